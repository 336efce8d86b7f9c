import numpy as np
import pandas as pd
import pytest
import torch

from rope_heads import artefacts
from rope_heads.arguments import TASKS as NAMES
from rope_heads.__main__ import main
from rope_heads.audit_tasks import ALL_TASKS, LETTER_12
from rope_heads.counting import Conflicting, use_of_counting
from rope_heads.solvers import counting_candidates


class Rule:
    """Stands in for a model: answers by `words(tokens)`."""

    def __init__(self, words):
        self.words = words

    def parameters(self):
        yield torch.zeros(1)

    training = False

    def eval(self):
        return self

    def train(self, mode=True):
        return self

    def __call__(self, tokens, last=False):
        said = torch.from_numpy(self.words(tokens.numpy()))
        return torch.nn.functional.one_hot(said, LETTER_12.vocabulary_size).float()[:, None]


def by_counting(tokens):
    candidates = counting_candidates(LETTER_12, tokens, second_once=True)
    return np.take_along_axis(tokens, candidates.argmax(axis=1)[:, None], axis=1)[:, 0]


def test_who_hops_and_who_counts_is_told_apart():
    measure = Conflicting(0, tests_per_hop=30, count=80)
    hops, counts = (pd.DataFrame(measure(Rule(words), 50)) for words in (LETTER_12.solve, by_counting))
    assert (hops.answered == 1).all() and set(hops.inputs) == {"letter_12", "letter_12_debiased", "conflict"}
    at = counts.inputs == "conflict"
    assert (counts.counted[at] == 1).all() and (counts.answered[at] == 0).all() and (counts.control[at] == 0).all()
    assert (hops.counted[hops.inputs == "conflict"] == 0).all() and hops.counted[hops.inputs != "conflict"].isna().all()
    assert counts.tests[at].sum() == 80 and (counts.answered[counts.inputs == "letter_12"] > 0.4).all()


def test_use_is_the_largest_surplus_on_the_way():
    accuracy = pd.DataFrame([{"recipe": "r", "task": task, "seed": 0, "step": step, "hops": h, "accuracy": float(step >= 100)}
                             for task in ("letter_12", "letter_12_debiased") for step in (0, 50, 100, 150) for h in (1, 2)])  # fmt: skip
    audit = pd.DataFrame([{"recipe": "r", "task": task, "seed": 0, "step": step, "inputs": "conflict", "hops": h, "tests": n, "answered": 0.0,
                           "counted": counted, "control": 0.1} for task in ("letter_12", "letter_12_debiased")
                          for step, counted in ((0, 0.1), (50, 0.5), (100, 0.2), (150, 0.9)) for h, n in ((1, 10), (2, 30))])  # fmt: skip
    audit.loc[(audit.task == "letter_12") & (audit.hops == 2) & (audit.step == 50), "counted"] = 0.3
    values = use_of_counting(audit, accuracy)
    assert values["use"]["0"] == pytest.approx((0.45 * 10 + 0.25 * 30) / 40), "what comes after the task is learnt does not count"
    assert values["use_debiased"]["0"] == pytest.approx(0.45)
    never = use_of_counting(audit, accuracy.assign(accuracy=0.5))
    assert never["use"]["0"] == pytest.approx(0.85), "a run that never learns the task is judged on all evaluations"


def test_who_picks_any_token_of_the_window_has_no_surplus():
    guess = Rule(lambda tokens: tokens[np.arange(len(tokens)), np.random.default_rng(0).integers(0, 8, len(tokens))])
    table = pd.DataFrame(Conflicting(0, tests_per_hop=4, count=20_000)(guess, 0)).assign(recipe="r", seed=0)
    both = pd.concat([table.assign(task=task) for task in ("letter_12", "letter_12_debiased")])
    assert abs(use_of_counting(both, both[both.inputs == "letter_12"].assign(accuracy=0.1))["use"]["0"]) < 0.01


def test_the_command_line_trains_every_task(tmp_path, capsys):
    assert set(NAMES) == set(ALL_TASKS)
    tiny = [word for k, v in (("steps", 1), ("batch", 2), ("layers", 1), ("width", 8), ("warmup", 0)) for word in ("--set", f"{k}={v}")]
    assert main(["train", "--task", "letter_12_debiased", "--measure", "--runs", str(tmp_path), *tiny]) == 0, capsys.readouterr().err
    (folder,) = tmp_path.glob("*/letter_12_debiased-0")
    frame, origin = artefacts.read_parquet(folder / "audit.parquet")
    assert set(frame.step) == {0, 1} and "letter_12_debiased" in origin["command"] and not (folder / "measures.parquet").exists()
    assert len(frame[frame.step == 0]) == 12  # 4 hop counts of two tasks and of the conflict inputs


def test_an_audit_run_resumes_with_its_table(tmp_path):
    from rope_heads.recipes import Recipe
    from rope_heads.training import Run

    recipe = Recipe("tiny", steps=4, batch=2, warmup=0)
    options = {
        "config": {"layers": 1, "width": 8},
        "evaluate_every": 2,
        "tests_per_hop": 5,
        "checkpoint_every": 2,
        "report": lambda line: None,
    }

    class Stops(Conflicting):
        def __call__(self, model, step):
            if step == 4 and self.stop:
                raise KeyboardInterrupt
            return super().__call__(model, step)

    measure = Stops(0, tests_per_hop=5, count=8)
    measure.stop = True
    with pytest.raises(KeyboardInterrupt):
        Run("letter_12", recipe, 0, tmp_path / "a", measure=measure, **options).train()
    measure.stop = False
    Run("letter_12", recipe, 0, tmp_path / "a", measure=measure, **options).train()
    Run("letter_12", recipe, 0, tmp_path / "b", measure=measure, **options).train()
    one, other = (artefacts.read_parquet(tmp_path / name / "audit.parquet")[0] for name in "ab")
    pd.testing.assert_frame_equal(one, other)
