import math

import numpy as np
import pytest
import torch

from rope_heads import artefacts, induction
from rope_heads.induction import ARMS, FORMED, Arm, build, sample
from rope_heads.induction_runs import Schedule, ToyRun, collect, run_folder
from rope_heads.spectra import rope_parts


def test_sequences_follow_a_map_of_their_own():
    tokens, predictable = sample(40, np.random.default_rng(0))
    assert tokens.shape == (40, 256) and predictable.shape == (40, 255)
    agree, total = 0, 0
    for row, flags in zip(tokens.tolist(), predictable.tolist()):
        following: dict[int, list[int]] = {}
        for t, flag in enumerate(flags):
            if flag:
                assert row[t] in row[:t], "a predictable step starts from a token seen before"
            following.setdefault(row[t], []).append(row[t + 1])
        for after in following.values():
            if len(after) > 1:
                most = max(map(after.count, after))
                agree, total = agree + most, total + len(after)
    assert 0.86 < agree / total < 0.97, "about nine in ten of a token's successors are the map's"
    assert 0.5 < predictable.float().mean() < 0.9
    again, _ = sample(40, np.random.default_rng(0))
    assert torch.equal(tokens, again)


def test_formation_threshold_is_the_papers():
    assert pytest.approx(2.154, abs=5e-4) == FORMED


def explicit(w_q, w_k):
    """M = W_Q W_K^T of one head, width x width, from a torch Linear's rows."""
    return w_q.double().T @ w_k.double()


def parts_of(m):
    return float(((m - m.T) / 2).square().sum() / m.square().sum())


@pytest.mark.parametrize("arm", ["learned symmetric", "learned sham", "RoPE sham"])
def test_penalty_is_the_antisymmetric_share_of_m(arm):
    model = build(ARMS[arm], 3)
    values = []
    for layer, block in enumerate(model.blocks):
        a = block.attention
        for head in range(4):
            turn = induction.sham_frames(a, layer)[head].double() if ARMS[arm].penalty == "sham" else torch.eye(32, dtype=torch.float64)
            values.append(parts_of(a.w_q[head].detach().double().T @ turn @ a.w_k[head].detach().double()))
    assert float(induction.penalty(model, ARMS[arm].penalty).detach()) == pytest.approx(np.mean(values), rel=1e-5)


def test_penalty_gradient_holds_the_denominator():
    model = build(ARMS["learned symmetric"], 0).double()
    a = model.blocks[0].attention
    term = induction.asymmetry(a.w_q, a.w_k)[0]
    (gradient,) = torch.autograd.grad(term, a.qkv.weight)
    w_q, w_k = (w[0].detach().clone().requires_grad_() for w in (a.w_q, a.w_k))
    m = w_q.T @ w_k
    fixed = float(m.detach().square().sum())
    by_hand = torch.autograd.grad(((m - m.T) / 2).square().sum() / fixed, (w_q, w_k))
    assert torch.allclose(gradient[:32], by_hand[0], atol=1e-12) and torch.allclose(gradient[128:160], by_hand[1], atol=1e-12)


def test_phase_penalty_is_the_share_of_im():
    a = build(ARMS["RoPE free"], 1).blocks[1].attention
    parts = rope_parts(a.w_q.mT, a.w_k.mT, "half")
    expected = []
    for head in range(4):
        real = sum(float(parts.real(t)[head].square().sum()) for t in range(16))
        imaginary = sum(float(parts.imaginary(t)[head].square().sum()) for t in range(16))
        expected.append(imaginary / (real + imaginary))
    assert induction.phase(a.w_q, a.w_k, "half").tolist() == pytest.approx(expected, rel=1e-5)


def test_tied_heads_have_a_symmetric_m_and_an_even_kernel():
    model = build(ARMS["RoPE tied"], 2)
    a = model.blocks[0].attention
    assert torch.equal(a.w_q, a.w_k) and not torch.equal(a.w_q, a.w_v)
    assert float(induction.penalty(model, "symmetric").detach()) == pytest.approx(0, abs=1e-6)
    kernel = rope_parts(a.w_q.mT, a.w_k.mT, "half").kernel(torch.arange(-8, 9), a.angles)
    assert torch.allclose(kernel, kernel.flip(-1), atol=1e-9)
    tokens, _ = sample(2, np.random.default_rng(0), 80)
    induction.loss_on(model, tokens, torch.ones_like(tokens[:, 1:], dtype=torch.bool))[0].backward()
    torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    assert torch.equal(a.w_q, a.w_k), "and stay tied through training"


def test_what_heads_attend_to_against_loops():
    model = build(ARMS["ALiBi free"], 0).eval()
    tokens, _ = sample(2, np.random.default_rng(1), 70)
    with torch.inference_mode():
        previous, induced = induction.head_patterns(model, tokens)
        for layer, x in enumerate(model.layer_inputs(tokens)):
            pattern = model.attention(layer, x)
            prev, ind = [], []
            for b in range(2):
                for q in range(64, 70):
                    prev.append(pattern[b, :, q, q - 1])
                    keys = [k for k in range(1, q + 1) if tokens[b, k - 1] == tokens[b, q]]
                    ind.append(pattern[b, :, q, keys].sum(-1))
            assert torch.allclose(previous[layer], torch.stack(prev).mean(0), atol=1e-6)
            assert torch.allclose(induced[layer], torch.stack(ind).mean(0), atol=1e-6)


def test_loss_before_training_is_that_of_guessing():
    tokens, predictable = sample(8, np.random.default_rng(2))
    for name in ("learned free", "RoPE free", "ALiBi free", "no positions free", "RoPE tied"):
        with torch.inference_mode():
            everything, foreseen = induction.loss_on(build(ARMS[name], 0).eval(), tokens, predictable)
        assert abs(float(everything) - math.log(64)) < 0.5 and abs(float(foreseen) - math.log(64)) < 0.6


TINY = Schedule(cap=6, every=2, batch=2, length=70)


def tables(folder):
    from rope_heads.artefacts import read_parquet

    return {name: read_parquet(folder / f"{name}.parquet")[0] for name in ("log", "heads")}


def test_an_interrupted_run_ends_as_an_uninterrupted_one(tmp_path, monkeypatch):
    quiet = {"report": lambda line: None}
    whole = ToyRun("RoPE sham", 1, tmp_path / "whole", TINY, checkpoint_every=2, **quiet)
    assert math.isinf(whole.train())
    broken = ToyRun("RoPE sham", 1, tmp_path / "broken", TINY, checkpoint_every=2, **quiet)
    update = broken._update

    def stops(*arguments):
        if broken.step == 5:
            raise KeyboardInterrupt
        update(*arguments)

    monkeypatch.setattr(broken, "_update", stops)
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    assert (tmp_path / "broken" / "checkpoint.safetensors").exists()
    ToyRun("RoPE sham", 1, tmp_path / "broken", TINY, checkpoint_every=2, **quiet).train()
    one, other = tables(tmp_path / "whole"), tables(tmp_path / "broken")
    for name in one:
        assert one[name].equals(other[name]), name
    assert one["log"].step.tolist() == [0, 2, 4, 6] and len(one["heads"]) == 4 * 8
    assert (one["log"].penalty_gradient > 0).all() and (one["log"].task_gradient > 0).all()
    assert not (tmp_path / "whole" / "checkpoint.safetensors").exists()


@pytest.mark.parametrize("change", [{"clip": -1.0}, {"lr": math.inf}, {"warmup": -1}, {"weight_decay": math.nan}])
def test_a_schedule_that_trains_nothing_is_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        Schedule(**change)


def test_no_limit_on_gradients_and_no_warm_up_still_train(tmp_path):
    schedule = Schedule(cap=4, every=2, batch=2, length=70, warmup=0, clip=0.0)
    ToyRun("learned free", 0, tmp_path, schedule, report=lambda line: None).train()
    losses = tables(tmp_path)["log"].loss
    assert losses.nunique() == len(losses) and np.isfinite(losses).all()


def test_a_run_ends_some_steps_after_formation(tmp_path, monkeypatch):
    monkeypatch.setattr("rope_heads.induction_runs.FORMED", 10.0)  # any loss is below
    run = ToyRun("learned free", 0, tmp_path, Schedule(cap=50, after=4, every=2, batch=2, length=70), report=lambda line: None)
    assert run.train() == 0 and tables(tmp_path)["log"].step.tolist() == [0, 2, 4]


def test_collected_tables(tmp_path):
    for arm, seed in (("learned free", 0), ("ALiBi symmetric", 0), ("learned free", 100)):
        ToyRun(arm, seed, run_folder(tmp_path, arm, seed, TINY), TINY, report=lambda line: None).train()
    assert run_folder("runs", "RoPE free", 3).as_posix() == "runs/toys/RoPE-free-3"
    assert run_folder("runs", "RoPE free", 3, Schedule(cap=6000, after=None)).as_posix() == "runs/toys,after=None,cap=6000/RoPE-free-3"
    with pytest.raises(ValueError, match="holds no finished runs"):
        collect(tmp_path, tmp_path / "data")  # none with the usual schedule
    assert collect(tmp_path, tmp_path / "data", TINY) == {"formation": 2, "log": 8, "heads": 64}, "seeds from 100 on are trials"
    with pytest.raises(ValueError, match="holds no finished runs"):
        collect(tmp_path / "nothing", tmp_path)
    trial = tmp_path / "trials only"
    ToyRun("learned free", 100, run_folder(trial, "learned free", 100, TINY), TINY, report=lambda line: None).train()
    with pytest.raises(ValueError, match="seeds from 100 on"):
        collect(trial, tmp_path / "trial data", TINY)
    other = tmp_path / "other machine"
    ToyRun("learned free", 1, run_folder(other, "learned free", 1, TINY), TINY, report=lambda line: None).train()
    for _ in range(2):
        assert collect(other, tmp_path / "data", TINY, add=True)["formation"] == 1
        formation, origin = artefacts.read_parquet(tmp_path / "data" / "runs" / "toys" / "formation.parquet")
        assert sorted(zip(formation.arm, formation.seed)) == [("ALiBi symmetric", 0), ("learned free", 0), ("learned free", 1)]
        assert len(artefacts.read_parquet(tmp_path / "data" / "runs" / "toys" / "heads.parquet")[0]) == 96 and len(origin["runs"]) == 3


def test_command_line(tmp_path, capsys, monkeypatch):
    from rope_heads import artefacts
    from rope_heads.__main__ import main

    tiny = [word for k, v in (("cap", 2), ("every", 2), ("batch", 2), ("length", 70)) for word in ("--set", f"{k}={v}")]
    assert main(["toy", "--arm", "learned free", "--runs", str(tmp_path), *tiny]) == 0
    assert "has not formed by step 2," in capsys.readouterr().out and len(list(tmp_path.glob("toys,batch=2,cap=2,*/learned-free-0/run.json"))) == 1
    monkeypatch.setattr(artefacts, "data_folder", lambda: tmp_path / "data")
    assert main(["toy", "--collect", "--into", "tiny", "--runs", str(tmp_path), *tiny]) == 0
    heads, origin = artefacts.read_parquet(tmp_path / "data" / "runs" / "tiny" / "heads.parquet")
    assert len(heads) == 16 and origin["command"] == "rope-heads toy --collect --set batch=2 --set cap=2 --set every=2 --set length=70 --into tiny"
    assert "--set cap=2" in origin["runs"][0]["command"]
    for wrong, told in (
        (["--arm", "RoPE"], "arm must be one of"), ([], "pass --arm"), (["--arm", "RoPE free", "--collect"], "pass --arm"), (["--collect", "--into", "a/b"], "single folder name"),
        (["--arm", "RoPE free", "--set", "size=3"], "no part of a schedule"), (["--arm", "RoPE free", "--set", "cap=2.5"], "whole number"),
    ):  # fmt: skip
        assert main(["toy", "--runs", str(tmp_path / "x"), *wrong]) == 2 and told in capsys.readouterr().err


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="no phase|has a phase"):
        Arm("learned", "phase")
    with pytest.raises(ValueError, match="penalty must be one of"):
        Arm("rope", "odd")
    with pytest.raises(ValueError, match="arm must be one of"):
        ToyRun("RoPE", 0, tmp_path)
    with pytest.raises(ValueError, match="length must be > 64"):
        Schedule(length=64)
    ToyRun("learned free", 0, tmp_path / "x", TINY, report=lambda line: None).train()
    with pytest.raises(ValueError, match="holds another run"):
        ToyRun("learned free", 1, tmp_path / "x", TINY).train()
    with pytest.raises(ValueError, match="count must be >= 1"):
        sample(0, np.random.default_rng(0))
