"""Does a Letter model hop, or count? What a model in training does with inputs on which the two disagree (own-shortcut-used)."""

import numpy as np
import pandas as pd
import torch

from rope_heads.audit_tasks import CONTROL_PLACES, LETTER_12, LETTER_12_DEBIASED, conflicts
from rope_heads.head_statistics import Values, by_seed
from rope_heads.model import Transformer
from rope_heads.training import accuracy_by_hops, first_of_each
from rope_heads.training_statistics import crossing

TASKS = {task.name: task for task in (LETTER_12, LETTER_12_DEBIASED)}
CONFLICT_STREAM = 12  # keeps the random numbers of conflict inputs apart from those of the tasks' own data


class Conflicting:
    """Called as measure(model, step) along training: accuracy on new sequences of both 12-letter tasks, and what is chosen on conflict inputs.

    Rows: step, inputs ("letter_12", "letter_12_debiased" or "conflict"), hops, tests, answered (share of right answers), counted and control
    (on conflict inputs: shares of answers that are the word the counting rule points at, and the control word; nan elsewhere).
    """

    table = "audit"

    def __init__(self, seed: int, tests_per_hop: int = 200, count: int = 500):
        self.tests = {name: first_of_each(task.split("test", seed), tests_per_hop) for name, task in TASKS.items()}
        self.conflicts = conflicts(LETTER_12, count, None, np.random.default_rng([seed, CONFLICT_STREAM]))

    def __call__(self, model: Transformer, step: int) -> list[dict]:
        rows = []
        for name, tests in self.tests.items():
            rows += [
                self._row(step, name, hops, int((tests.hops == hops).sum()), right)
                for hops, right in accuracy_by_hops(model, tests).items()
            ]
        device = next(model.parameters()).device
        said = model(torch.from_numpy(self.conflicts.tokens).to(device), last=True)[:, 0].argmax(-1).cpu().numpy()
        for hops in np.unique(self.conflicts.hops):
            at = self.conflicts.hops == hops
            shares = [
                float((said[at] == words[at]).mean()) for words in (self.conflicts.answers, self.conflicts.counted, self.conflicts.control)
            ]
            rows.append(self._row(step, "conflict", int(hops), int(at.sum()), *shares))
        return rows

    @staticmethod
    def _row(step, inputs, hops, tests, answered, counted=np.nan, control=np.nan) -> dict:
        return {"step": step, "inputs": inputs, "hops": hops, "tests": tests, "answered": answered, "counted": counted, "control": control}


def use_of_counting(audit: pd.DataFrame, accuracy: pd.DataFrame) -> Values:
    """own-shortcut-used: largest surplus of the counted token over a token of the control, over evaluations until the accuracy passes .9.

    The control word stands in CONTROL_PLACES tokens of the target window and the counted word in one; so its share is divided by that, and
    whoever picks any token of the window has no surplus. Accuracy is the mean over hop counts; if it never passes, all evaluations count.
    """
    values: Values = {}
    for name, task in (("use", "letter_12"), ("use_debiased", "letter_12_debiased")):
        arrives = by_seed(accuracy, task, lambda run: crossing(run, 0.9))

        def surplus(run: pd.DataFrame, arrives=arrives) -> float:
            early = run[(run.inputs == "conflict") & (run.step <= arrives[str(run.seed.iloc[0])])]
            weighted = early.assign(surplus=(early.counted - early.control / CONTROL_PLACES) * early.tests).groupby("step")[["surplus", "tests"]].sum()
            return float((weighted.surplus / weighted.tests).max())

        values[name] = by_seed(audit, task, surplus)
    return values
