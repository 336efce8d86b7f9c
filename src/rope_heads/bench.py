"""Speed, as ratios measured side by side: everything compared runs in one process, in turns, so that a slow moment hits both alike."""

import itertools
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from rope_heads.lengths import GRID
from rope_heads.long_pass import read
from rope_heads.model import Config, Transformer
from rope_heads.scores import positional_symbolic, swap_logits
from rope_heads.spectra import qk_spectrum
from rope_heads.tasks import LENGTH, TASKS
from rope_heads.recipes import RECIPES
from rope_heads.training import parameter_groups


def in_turns(contestants: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call, `rounds` times round the table after one round to warm up."""
    seconds = {name: [] for name in contestants}
    for turn in range(rounds + 1):
        for name, call in contestants.items():
            start = time.perf_counter()
            call()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(slow: list[float], fast: list[float]) -> tuple[float, float, float]:
    """Median of the ratios of neighbouring calls, with the quartiles."""
    quotients = [a / b for a, b in zip(slow, fast, strict=True)]
    low, middle, high = statistics.quantiles(quotients, n=4)
    return middle, low, high


def training_step(model: torch.nn.Module, last_logits: Callable, bf16: bool) -> Callable[[], None]:
    """One update of recipe `paper` on random tokens: batch 64, 17 tokens."""
    recipe = RECIPES["paper"]
    optimizer = torch.optim.AdamW(parameter_groups(model, recipe.weight_decay), lr=recipe.lr, betas=(recipe.beta1, recipe.beta2), fused=True)
    tokens, answers = torch.randint(1, 137, (recipe.batch, 17)), torch.randint(1, 137, (recipe.batch,))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = last_logits(model, tokens)
        F.cross_entropy(logits.float(), answers).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def sequences(rounds: int = 3, count: int = 48_000) -> list[str]:
    """Sequences a second of every task, one core."""
    lines = []
    for name, task in TASKS.items():
        rng = np.random.default_rng(0)
        seconds = in_turns({name: lambda task=task, rng=rng: task.sample(count, None, rng)}, rounds)[name]
        lines.append(f"{name}: {count / statistics.median(seconds):,.0f} sequences/s (slowest of {rounds}: {count / max(seconds):,.0f})")
    return lines


def training(rounds: int = 12) -> list[str]:
    """Training step against Hugging Face's GPT-J in fp32, in turns, on the threads of this process."""
    ours, half = Transformer(Config()).train(), Transformer(Config()).train()
    theirs = Transformer(Config()).to_hugging_face().train()
    seconds = in_turns({
        "Hugging Face GPT-J, fp32": training_step(theirs, lambda m, t: m(input_ids=t).logits[:, -1], False),
        "rope_heads, fp32": training_step(ours, lambda m, t: m(t, last=True)[:, 0], False),
        "rope_heads, bf16 autocast": training_step(half, lambda m, t: m(t, last=True)[:, 0], True),
    }, rounds)  # fmt: skip
    base = seconds["Hugging Face GPT-J, fp32"]
    lines = []
    for name, taken in seconds.items():
        middle, low, high = ratio(base, taken)
        lines.append(f"{name}: {statistics.median(taken):.3f} s a step, {middle:.2f} times as fast as Hugging Face (quartiles {low:.2f} to {high:.2f})")
    return lines


def scores_by_brute_force(model: Transformer, layer: int, hidden: torch.Tensor, temperature: float = 1e-4) -> tuple[torch.Tensor, torch.Tensor]:
    """Both scores [prompt, head] as they are defined: the layer runs again on all inputs for every exchange of two keys before the last token."""
    base, query = model.attention(layer, hidden)[:, :, -1], hidden.shape[1] - 1
    cosines, moved = [], []
    for a, b in itertools.combinations(range(query), 2):
        order = list(range(query + 1))
        order[a], order[b] = b, a
        before, after = base[..., [a, b]], model.attention(layer, hidden[:, order])[:, :, -1][..., [a, b]]
        norm = before.norm(dim=-1) * after.norm(dim=-1)
        cosines.append(torch.stack([(before * after).sum(-1), (before.flip(-1) * after).sum(-1)]) / norm)
        moved.append((before[..., 0] - before[..., 1]).abs())
    weights = (torch.stack(moved, -1) / temperature).softmax(-1)
    positional, symbolic = (weights * torch.stack(cosines, -1)).sum(-1)
    return positional, symbolic


def scores(rounds: int = 5, points: int = 135, inputs: tuple[tuple[int, int], ...] = ((17, 300), (49, 20))) -> list[str]:
    """Scores of a whole training run without the model's forward pass, and the closed form against brute force in fp64, in turns."""
    torch.manual_seed(0)
    model, lines = Transformer(Config()).eval(), []
    with torch.inference_mode():
        hidden = model.layer_inputs(torch.randint(1, 137, (300, 17)))
        once = statistics.median(in_turns({"all": lambda: [positional_symbolic(swap_logits(model, i, h)) for i, h in enumerate(hidden[: len(model.blocks)])]}, rounds)["all"])
        lines.append(f"{points} evaluations x {len(model.blocks)} layers x 300 prompts: {points * once:.0f} s (from {rounds} evaluations)")
        model = model.double()
        for length, batch in inputs:
            h = model.layer_inputs(torch.randint(1, 137, (batch, length)))[3]
            found: dict[str, tuple] = {}
            seconds = in_turns({"brute": lambda h=h, found=found: found.update(brute=scores_by_brute_force(model, 3, h)),
                                "ours": lambda h=h, found=found: found.update(ours=positional_symbolic(swap_logits(model, 3, h)))}, 3)  # fmt: skip
            off = max((x - y).abs().max().item() for x, y in zip(found["brute"], found["ours"], strict=True))
            middle, low, high = ratio(seconds["brute"], seconds["ours"])
            lines.append(f"{batch} prompts of {length} tokens: {middle:.0f} times as fast as brute force (quartiles {low:.0f} to {high:.0f}), scores agree to {off:.0e}")
    return lines


def spectra(rounds: int = 3, heads: int = 8, width: int = 2048) -> list[str]:
    """Spectra of heads as wide as Llama-3-8B's, and eigenvalues through the core against those of the whole matrix, float64."""
    w_q, w_k = torch.randn(2, heads, 4096, 128, generator=torch.Generator().manual_seed(0)) / 64
    began = time.process_time()
    for _ in range(rounds):
        qk_spectrum(w_q, w_k)
    many = (time.process_time() - began) / (rounds * heads)
    one_q, one_k = w_q[0, :width].double(), w_k[0, :width].double()
    found: dict[str, torch.Tensor] = {}
    seconds = in_turns({
        "whole": lambda: found.update(whole=torch.linalg.eigvals(one_q @ one_k.T)),
        "core": lambda: found.update(core=qk_spectrum(one_q, one_k).eigenvalues),
    }, rounds)  # fmt: skip
    whole = found["whole"][found["whole"].abs().argsort(descending=True)[:128]]
    distance = (whole[:, None] - found["core"][None, :]).abs()
    off = max(distance.min(0).values.max(), distance.min(1).values.max()) / whole.abs().max()
    middle, low, high = ratio(seconds["whole"], seconds["core"])
    return [f"1,024 heads of 4096 x 128: {1024 * many:.0f} s of processor time ({rounds} x {heads} heads measured, scaled up)",
            f"a head of {width} x 128 through its core: {middle:.0f} times as fast as the whole matrix (quartiles {low:.0f} to {high:.0f}), "
            f"eigenvalues agree to {off:.0e}"]  # fmt: skip


def lengths(rounds: int = 3, inputs: tuple[tuple[int, int], ...] = ((17, 256), (1_017, 4), (5_017, 1))) -> list[str]:
    """Sequences a second at three lengths against Hugging Face's GPT-J, both asked for the logits after the last token; and all lengths of the
    grid up to there in one pass."""
    ours = Transformer(Config()).eval()
    theirs = ours.to_hugging_face(n_positions=max(length for length, _ in inputs))
    lines = []
    for length, batch in inputs:
        tokens = torch.randint(1, 137, (batch, length))
        grid = [added for added in GRID if added <= length - LENGTH]
        with torch.inference_mode():
            seconds = in_turns({
                "theirs": lambda t=tokens: theirs(input_ids=t, logits_to_keep=1),
                "ours": lambda t=tokens: ours(t, last=True),
                "grid": lambda t=tokens, grid=grid: read(ours, t[:, :-LENGTH], t[:, -LENGTH:], grid),
            }, rounds)  # fmt: skip
        middle, low, high = ratio(seconds["theirs"], seconds["ours"])
        a_second = {name: batch / statistics.median(taken) for name, taken in seconds.items()}
        lines.append(f"{length:,} tokens: {a_second['ours']:.3g} sequences/s, {middle:.2f} times as fast as Hugging Face (quartiles {low:.2f} to "
                     f"{high:.2f}); at all {len(grid)} lengths of the grid up to there {a_second['grid']:.3g} sequences/s")  # fmt: skip
    return lines


BENCHES = {"sequences": sequences, "training": training, "scores": scores, "spectra": spectra, "lengths": lengths}


def main(names: list[str], threads: int = 1, report: Callable[[str], None] = print) -> None:
    torch.set_num_threads(threads)
    report(f"{threads} thread(s), {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}")
    for name in names:
        report(f"-- {name}")
        for line in BENCHES[name]():
            report(line)
