"""The heads' own gaps: against full attention matrices taken apart in plain loops, and curves against hand-made tables."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from models import built

from rope_heads import circuits, length_gap
from rope_heads.length_gap import PAIRS, VALUES, GapTally, gap_curve, gap_length, look_gaps, performed, weakest
from rope_heads.long_pass import read
from rope_heads.tasks import LETTER, NUMBER, Batch

ADDED = (0, 3, 80)


def test_a_look_taken_apart_by_hand():
    """Five keys, the task's own from the third on: target 2.0, rivals 1.0 (added), 0.5 and -1.0."""
    logits = torch.tensor([1.0, -3.0, 0.5, 2.0, -1.0]).view(1, 1, 1, 5)
    values, rival = look_gaps(logits, torch.tensor([[0]]), torch.tensor([[3]]), 2)
    others = math.exp(1.0) + math.exp(-3.0) + math.exp(0.5) + math.exp(-1.0)
    wanted = {"gap": 1.0, "gap_inside": 1.5, "log_odds": 2.0 - math.log(others), "weight": math.exp(2.0) / (math.exp(2.0) + others), "ahead": 1.0}
    assert {name: pytest.approx(value.item(), abs=1e-6) for name, value in values.items()} == wanted and rival.item() == 0
    dilution = values["gap"] - values["log_odds"]
    assert 0 <= dilution <= math.log(4)
    even = look_gaps(torch.zeros(1, 1, 1, 7), torch.tensor([[0]]), torch.tensor([[3]]), 2)[0]
    assert (even["gap"] - even["log_odds"]).item() == pytest.approx(math.log(6)), "equal rivals dilute most"


@pytest.mark.parametrize("task, config", [(NUMBER, {"heads": 1, "width": 16}), (LETTER, {"heads": 2}), (NUMBER, {"heads": 1, "pairing": "half"}),
                                          (LETTER, {"heads": 2, "positions": "none"})])  # fmt: skip
def test_sums_equal_those_of_whole_attention_matrices(task, config):
    model = built(vocab_size=task.vocabulary_size, layers=3, **config)
    batch = task.sample(8, np.repeat([1, 2, 3, 4], 2), np.random.default_rng(0), prefix=80)
    core = Batch(batch.tokens[:, 80:], batch.answers, batch.hops)
    tally = GapTally(model, ADDED)
    for rows in (slice(0, 3), slice(3, 8)):
        with torch.inference_mode():
            read(model, torch.from_numpy(batch.tokens[rows, :80]), torch.from_numpy(core.tokens[rows]), ADDED, tally.observer(task, core, [0, 1, 2])(rows))
    wanted = {name: np.zeros_like(value) for name, value in tally.sums.items()}
    for i, added in enumerate(ADDED):
        tokens = np.hstack([batch.tokens[:, :added], core.tokens])
        with torch.inference_mode():
            for layer, x in enumerate(model.layer_inputs(torch.from_numpy(tokens))):
                attention = model.blocks[layer].attention
                logits = attention.logits(model.blocks[layer].norm(x)).double().numpy()
                q, k, _ = (t.double().numpy() for t in attention.project(model.blocks[layer].norm(x), x.shape[1]))
                for prompt, sequence in enumerate(tokens):
                    chain = task.chain(sequence)
                    for pair, (looker, target) in enumerate(PAIRS):
                        if target >= len(chain) or (layer == 2 and looker):
                            continue
                        for head in range(model.config.heads):
                            at, right = chain[looker], chain[target]
                            row = {key: logits[prompt, head, at, key] for key in range(at + 1) if key != right}
                            rival = max(row, key=row.get)
                            gap = logits[prompt, head, at, right] - row[rival]
                            odds = logits[prompt, head, at, right] - math.log(sum(map(math.exp, row.values())))
                            place = (i, layer, head, batch.hops[prompt] - 1, pair)
                            found = {"gap": gap, "gap_inside": logits[prompt, head, at, right] - max(v for key, v in row.items() if key >= added),
                                     "log_odds": odds, "weight": 1 / (1 + math.exp(-odds)), "ahead": gap > 0, "prompts": 1}  # fmt: skip
                            for name, value in found.items():
                                wanted[name][place] += value
                            product = attention.scale * q[prompt, at, head] * (k[prompt, right, head] - k[prompt, rival, head])
                            half = len(product) // 2
                            wanted["planes"][place] += product[:half] + product[half:] if config.get("pairing") == "half" else product[::2] + product[1::2]
    for name, value in wanted.items():
        np.testing.assert_allclose(tally.sums[name], value, atol=2e-3, rtol=1e-3, err_msg=name)
    np.testing.assert_allclose(tally.sums["planes"].sum(-1), tally.sums["gap"], atol=1e-3)
    restored = GapTally(model, ADDED)
    restored.restore(tally.state())
    assert all(np.array_equal(restored.sums[name], value) for name, value in tally.sums.items())


def looking(model, tables):
    """`circuits.looks` as prescribed: tables[layer] = {looker position in the chain: position looked at in the chain}; others look at themselves."""

    def looks(_, inputs):
        tokens = looking.tokens
        out = torch.arange(17).expand(len(inputs), len(tokens), 1, 17).clone()
        for prompt, row in enumerate(tokens):
            chain = NUMBER.chain(row)
            for layer, table in enumerate(tables):
                for looker, target in table.items():
                    if max(looker, target) < len(chain):
                        out[layer, prompt, 0, chain[looker]] = chain[target]
        return out

    return looks


@pytest.mark.parametrize("tables, reading, steps", [
    ([{0: 1, 1: 2, 2: 3, 3: 4}] * 4, "backward", {(0, 1, 1), (1, 2, 1), (2, 3, 1), (3, 4, 1)}),  # in every layer: h hops end in layer h - 1
    ([{0: 1}, {0: 2}, {0: 3}, {0: 4}], "forward", {(h, 1, 0) for h in range(4)} | {(h, 2, 1) for h in range(1, 4)} | {(2, 3, 2), (3, 3, 2), (3, 4, 3)}),
])  # fmt: skip
def test_who_performs_a_step(tables, reading, steps, monkeypatch):
    batch = NUMBER.sample(40, None, np.random.default_rng(0))
    looking.tokens = batch.tokens[np.argsort(batch.hops, kind="stable")]
    monkeypatch.setattr(circuits, "looks", looking(None, tables))
    found, performs = performed(built(heads=1, layers=4, vocab_size=NUMBER.vocabulary_size), NUMBER, batch)
    assert found == reading
    if reading == "forward":
        assert {(int(h), PAIRS[pair][1], int(layer)) for layer, _, h, pair in np.argwhere(performs)} == steps
    else:
        assert {(h, k) for _, _, h, pair in np.argwhere(performs) for k in [PAIRS[pair]]} == {(h, (k, k + 1)) for h in range(4) for k in range(h + 1)}
        ends = {int(h): int(layer) for layer, _, h, pair in np.argwhere(performs) if PAIRS[pair] == (0, 1)}
        assert ends == {0: 0, 1: 1, 2: 2, 3: 3}, "the last token's look comes after those before it"


def test_rows_keep_what_is_shown_and_what_is_performed(monkeypatch):
    model = built(heads=1, layers=2, width=16, vocab_size=NUMBER.vocabulary_size)
    tally = GapTally(model, (0, 50))
    core = NUMBER.sample(40, None, np.random.default_rng(0))
    tally.sums["prompts"][:] = 10.0
    tally.sums["gap"][:] = 5.0
    tally.sums["ahead"][0, 0, 0, 0, 0], tally.sums["ahead"][0, 1, 0, 3, 2], tally.sums["ahead"][0, 1, 0, 3, 1] = 2.0, 3.0, 2.0
    performs = np.zeros((2, 1, 4, 10), dtype=bool)
    performs[0, 0, 0, 0] = True
    monkeypatch.setattr(length_gap, "performed", lambda *_: ("backward", performs))
    rows = tally.rows(NUMBER, core)
    assert rows[["added", "layer", "hops", "looker", "target", "performs"]].values.tolist() == [
        [added, *look] for added in (0, 50) for look in ([0, 1, 0, 1, True], [1, 4, 0, 3, False])]  # fmt: skip
    assert (rows.gap == 0.5).all() and set(VALUES) <= set(rows.columns) and rows.planes.iloc[0].shape == (8,)
    assert rows.planes.isna().tolist() == [False, True] * 2, "planes take most of the room"


def table(rows) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["added", "layer", "looker", "performs", "prompts", "gap"])


def test_the_curve_is_the_least_over_layers_of_the_mean_over_prompts():
    gaps = table([
        (0, 0, 0, True, 30, 4.0), (0, 0, 0, True, 10, 0.0), (0, 1, 0, True, 5, 3.5), (0, 1, 1, True, 5, -9.0), (0, 2, 0, False, 5, -7.0),
        (100, 0, 0, True, 30, -1.0), (100, 0, 0, True, 10, 3.0), (100, 1, 0, True, 5, 1.0), (100, 1, 1, True, 5, 1.0),
    ])  # fmt: skip
    curve = gap_curve(gaps)
    assert curve.to_dict() == {0: 3.0, 100: 0.0}
    assert gap_curve(gaps, every_look=True).to_dict() == {0: (3.5 - 9) / 2, 100: 0.0}
    found = weakest(gaps.assign(weight=[0.9, 0.5, 0.7, 0, 0, 0.2, 0.6, 0.4, 0]))
    assert found.layer.to_dict() == {0: 0, 100: 0} and found.weight.to_dict() == pytest.approx({0: 0.8, 100: 0.3})


@pytest.mark.parametrize("curve, length", [({0: 3.0, 100: 1.0, 200: -1.0}, 167.0), ({0: 3.0, 5000: 0.5}, 5017.0), ({0: -0.5, 10: 3.0}, 17.0)])
def test_the_length_is_where_the_curve_falls_below_zero(curve, length):
    assert gap_length(pd.Series(curve)) == length
