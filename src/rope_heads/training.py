"""Training a model on a task: a loop that resumes to the bit, accuracy by hop count along the way.

Only the token after the query is predicted (P1, appendix C.2). A run is (task, recipe, seed): the seed fixes the initial weights, the
data (the seed's own 432,000 / 2,400 / 45,600 split), their order and the dropout masks. Everything it leaves lies in one folder:
`run.json` (what it is, versions, seconds), `log.parquet` (one row a step and hop count), `model.safetensors` (final weights),
`step-XXXXX.safetensors` (weights kept on the way) and, while it runs, `checkpoint.safetensors`.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn

from rope_heads import artefacts
from rope_heads.audit_tasks import ALL_TASKS
from rope_heads.index_start import start_as_index
from rope_heads.model import Config, Transformer, as_dict
from rope_heads.recipes import Recipe
from rope_heads.tasks import Batch


PREFIX_STREAM = 51  # keeps the random numbers of prefixes apart from those of order and dropout


def accuracy_by_hops(model: Transformer, batch: Batch, chunk: int = 512) -> dict[int, float]:
    """Share of right answers (arg max of the logits after the query, in [0, 1]) for every hop count in `batch`."""
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    right = []
    with torch.inference_mode():
        for start in range(0, len(batch.answers), chunk):
            tokens = torch.from_numpy(batch.tokens[start : start + chunk]).to(device)
            answers = torch.from_numpy(batch.answers[start : start + chunk]).to(device)
            right.append((model(tokens, last=True)[:, 0].argmax(-1) == answers).cpu())
    model.train(was_training)
    right = torch.cat(right).numpy()
    return {int(h): float(right[batch.hops == h].mean()) for h in np.unique(batch.hops)}


def first_of_each(batch: Batch, count: int) -> Batch:
    """The first `count` sequences of every hop count, in the order of `batch`."""
    rows = np.sort(np.concatenate([np.flatnonzero(batch.hops == h)[:count] for h in np.unique(batch.hops)]))
    return Batch(batch.tokens[rows], batch.answers[rows], batch.hops[rows])


class Run:
    """One training run and its folder. `Run(...).train()` starts it, or goes on from its last checkpoint.

    keep: steps after which weights are kept. config: changes to `Config` (layers, heads, ...); vocabulary and dropout follow from task
    and recipe. until: stop at the first evaluation where every hop count reaches this accuracy (default: go to the last step).
    measure: called as measure(model, step) at every evaluation; the rows it returns go to `measures.parquet`,
    or to the table that `measure.table` names.
    """

    def __init__(self, task: str, recipe: Recipe, seed: int, folder: str | os.PathLike, *, keep: Iterable[int] = (), config: dict | None = None,
                 device: str = "cpu", evaluate_every: int = 50, tests_per_hop: int = 500, checkpoint_every: int = 250, until: float | None = None,
                 measure: Callable[[Transformer, int], list[dict]] | None = None, report: Callable[[str], None] = print):  # fmt: skip
        if task not in ALL_TASKS:
            raise ValueError(f"task must be one of {', '.join(ALL_TASKS)}, got {task!r}")
        if seed < 0:
            raise ValueError(f"seed must be >= 0, got {seed}")
        if evaluate_every < 1 or checkpoint_every < 1:
            raise ValueError(f"evaluate_every and checkpoint_every must be >= 1, got {evaluate_every} and {checkpoint_every}")
        self.task, self.recipe, self.seed, self.folder, self.keep = ALL_TASKS[task], recipe, seed, Path(folder), sorted(set(keep))
        if self.keep and not 0 <= self.keep[0] <= self.keep[-1] <= recipe.steps:
            raise ValueError(f"kept steps must be between 0 and {recipe.steps}, got {self.keep[0]} to {self.keep[-1]}")
        self.device, self.evaluate_every, self.tests_per_hop, self.checkpoint_every = device, evaluate_every, tests_per_hop, checkpoint_every
        if until is not None and not 0 < until <= 1:
            raise ValueError(f"until must be in (0, 1], got {until}")
        self.measure, self.report, self.until = measure, report, until
        self.measured = getattr(measure, "table", "measures")
        self.config = Config(**{"vocab_size": self.task.vocabulary_size, "dropout": recipe.dropout,
                                "drop_embeddings": recipe.drop_embeddings, **(config or {})})  # fmt: skip
        self.identity = {"task": task, "seed": seed, "recipe": as_dict(recipe), "config": as_dict(self.config)}
        self.log: list[dict] = []
        self.measures: list[dict] = []
        self.step, self.seconds = 0, 0.0

    checkpoint = property(lambda self: self.folder / "checkpoint.safetensors")
    final = property(lambda self: self.folder / "model.safetensors")
    title = property(lambda self: f"{self.task.name} {self.recipe.name} seed {self.seed}")

    def train(self) -> Transformer:
        """The trained model, in evaluation mode. A finished run is read, an interrupted one goes on, another one's folder is refused."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with one_process(self.folder):
            self._claim_folder()
            return self._finished() if self.final.exists() else self._train()

    def _finished(self) -> Transformer:
        """The model of a finished run, if the run is the one asked for."""
        model = Transformer.load(self.final)
        if model.config != self.config:
            raise ValueError(f"{self.final} is another model than this run's: remove the folder to train again")
        reached = artefacts.read_json(self.folder / "run.json")[1]["step"]
        if reached < self.recipe.steps and not (self.until and self._accuracy_in_the_end() >= self.until):
            raise ValueError(f"{self.folder} was stopped at step {reached} of {self.recipe.steps} as good enough: pass another folder or remove it")
        self._require_files(reached)
        return model.to(self.device)

    def _accuracy_in_the_end(self) -> float:
        """Of the worst hop count, at the last evaluation of a finished run."""
        log = artefacts.read_parquet(self.folder / "log.parquet")[0]
        return log[log.step == log.step.max()].accuracy.min()

    def _require_files(self, reached: int) -> None:
        """A run that is past a step cannot keep its weights or measure it any more."""
        wanted = [f"step-{step:05d}.safetensors" for step in self.keep if step <= reached] + [f"{self.measured}.parquet"] * (self.measure is not None)
        missing = [name for name in wanted if not (self.folder / name).exists()]
        if missing:
            raise ValueError(f"{self.folder} has reached step {reached} without {', '.join(missing)}: remove the folder to train again with them")

    def _train(self) -> Transformer:
        torch.manual_seed(self.seed)
        model = Transformer(self.config)
        if self.recipe.index_layers:
            start_as_index(model, self.task, self.recipe.index_layers, self.seed)
        model = model.to(self.device).train()
        optimizer = torch.optim.AdamW(parameter_groups(model, self.recipe.weight_decay), lr=self.recipe.lr,
                                      betas=(self.recipe.beta1, self.recipe.beta2), fused=True)  # fmt: skip
        if self.checkpoint.exists():
            self._resume(model, optimizer)
        tokens, answers = (torch.from_numpy(a) for a in self.task.split("train", self.seed)[:2])
        tests = first_of_each(self.task.split("test", self.seed), self.tests_per_hop)
        if self.step == 0:
            self._observe(model, tests, loss=float("nan"))
            self._keep(model)
        started, began_at, losses = time.perf_counter() - self.seconds, self.step, []
        clock = time.perf_counter()
        while self.step < self.recipe.steps:
            rows = batch_rows(self.seed, self.step, self.recipe.batch, len(tokens))
            losses.append(self._update(model, optimizer, tokens[rows].to(self.device), answers[rows].to(self.device)))
            self.step += 1
            self.seconds = time.perf_counter() - started
            last = self.step == self.recipe.steps
            if self.step % self.evaluate_every == 0 or last:
                self._observe(model, tests, loss=float(torch.stack(losses).mean()))
                losses = []
                pace = (time.perf_counter() - clock) / (self.step - began_at)
                self._tell(pace)
                if self.until and self._worst_accuracy() >= self.until:
                    self._keep(model)
                    break
            self._keep(model)
            if self.step % self.checkpoint_every == 0 and not last:
                self._save(model, optimizer)
        self.seconds = time.perf_counter() - started
        self._finish(model)
        return model.eval()

    def _update(self, model: Transformer, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
        for group in optimizer.param_groups:
            group["lr"] = self.recipe.rate(self.step)
        model.dropout.reseed(self.seed, self.step)
        with torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self.recipe.precision == "bf16"):
            parts = self._lengthened(tokens, answers)
            logits = torch.cat([model(part, last=True)[:, 0] for part, _ in parts])  # [batch, id]
        answers = torch.cat([part for _, part in parts])
        loss = F.cross_entropy(logits.float(), answers)
        loss.backward()
        if self.recipe.clip:
            nn.utils.clip_grad_norm_(model.parameters(), self.recipe.clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def _lengthened(self, tokens: torch.Tensor, answers: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The batch, or what is left of it and new sequences in place of a share `long_share`, with one prefix length for all of these."""
        if not self.recipe.long_share:
            return [(tokens, answers)]
        rng = np.random.default_rng([self.seed, self.step, PREFIX_STREAM])
        chosen = torch.from_numpy(rng.random(len(tokens)) < self.recipe.long_share)
        if not chosen.any():
            return [(tokens, answers)]
        new = self.task.sample(int(chosen.sum()), None, rng, prefix=int(rng.integers(1, self.recipe.long_added + 1)))
        chosen = chosen.to(tokens.device)
        long = tuple(torch.from_numpy(column).to(tokens.device) for column in new[:2])
        return [long] if chosen.all() else [(tokens[~chosen], answers[~chosen]), long]

    def _observe(self, model: Transformer, tests: Batch, loss: float) -> None:
        accuracy = accuracy_by_hops(model, tests)
        self.log += [{"step": self.step, "hops": h, "accuracy": a, "tests": int((tests.hops == h).sum()), "loss": loss,
                      "rate": self.recipe.rate(max(self.step - 1, 0))} for h, a in accuracy.items()]  # fmt: skip
        if self.measure:
            model.eval()
            with torch.inference_mode():
                self.measures += self.measure(model, self.step)
            model.train()
        self._write_tables()

    def _worst_accuracy(self) -> float:
        """Lowest accuracy over hop counts at the last evaluation."""
        return min(row["accuracy"] for row in self.log if row["step"] == self.log[-1]["step"])

    def _keep(self, model: Transformer) -> None:
        if self.step in self.keep:
            model.save(self.folder / f"step-{self.step:05d}.safetensors")

    def _tell(self, pace: float) -> None:
        rows = [row for row in self.log if row["step"] == self.step]
        shares = " ".join(f"{row['accuracy']:.2f}" for row in rows)
        left = pace * (self.recipe.steps - self.step)
        self.report(f"{self.title}: step {self.step}/{self.recipe.steps}  loss {rows[0]['loss']:.3f}  accuracy by hops {shares}  "
                    f"{left / 60:.1f} min left")  # fmt: skip

    def _origin(self) -> dict:
        recipe, *changes = self.recipe.name.split(",")
        command = f"rope-heads train --task {self.task.name} --recipe {recipe} --seed {self.seed}" + "".join(f" --set {c}" for c in changes)
        command += f" --until {self.until}" * (self.until is not None) + " --measure" * (self.measure is not None)
        command += (" --keep " + " ".join(map(str, self.keep))) * bool(self.keep)
        return artefacts.provenance(command, round(self.seconds, 1), self.seed, threads=torch.get_num_threads(), device=self.device,
                                    step=self.step, **{k: v for k, v in self.identity.items() if k != "seed"})  # fmt: skip

    def _write_tables(self) -> None:
        artefacts.write_parquet(self.folder / "log.parquet", pd.DataFrame(self.log), self._origin())
        if self.measures:
            artefacts.write_parquet(self.folder / f"{self.measured}.parquet", pd.DataFrame(self.measures), self._origin())

    def _claim_folder(self) -> None:
        path = self.folder / "run.json"
        if path.exists():
            found = artefacts.read_json(path)[0]
            different = sorted(k for k in self.identity if found.get(k) != self.identity[k])
            if different:
                raise ValueError(f"{self.folder} holds a run with another {', '.join(different)}: pass another folder or remove it")
        else:
            artefacts.write_json(path, self.identity, self._origin())

    def _save(self, model: Transformer, optimizer: torch.optim.Optimizer) -> None:
        tensors = {f"model.{name}": t for name, t in model.state_dict().items()}
        for i, state in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{i}.{name}": t for name, t in state.items()}
        artefacts.write_tensors(self.checkpoint, tensors, {
            "step": str(self.step), "seconds": str(self.seconds), "identity": json.dumps(self.identity),
            "rows": json.dumps([len(self.log), len(self.measures)])})  # fmt: skip

    def _resume(self, model: Transformer, optimizer: torch.optim.Optimizer) -> None:
        tensors, metadata = artefacts.read_tensors(self.checkpoint)
        if metadata.get("identity") != json.dumps(self.identity):
            raise ValueError(f"{self.checkpoint} is no checkpoint of this run: remove it to start the run again")
        if json.loads(metadata["rows"])[1] and self.measure is None:
            raise ValueError(f"{self.folder} was begun with --measure: pass it again, or remove the folder to train without")
        self.step, self.seconds = int(metadata["step"]), float(metadata["seconds"])
        model.load_state_dict({name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")})
        state = {}
        for name, tensor in tensors.items():
            if name.startswith("optimizer."):
                _, i, key = name.split(".")
                state.setdefault(int(i), {})[key] = tensor
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        for rows, name in ((self.log, "log"), (self.measures, self.measured)):
            path = self.folder / f"{name}.parquet"
            if path.exists():  # rows later than the checkpoint will be made again
                rows += [row for row in artefacts.read_parquet(path)[0].to_dict("records") if row["step"] <= self.step]
        if [len(self.log), len(self.measures)] != json.loads(metadata["rows"]):
            raise ValueError(f"the tables in {self.folder} do not belong to its checkpoint of step {self.step}: remove the folder to train again")
        self._require_files(self.step)
        self.report(f"{self.title}: goes on from step {self.step}")

    def _finish(self, model: Transformer) -> None:
        artefacts.write_json(self.folder / "run.json", self.identity, self._origin())
        model.save(self.final)
        self.checkpoint.unlink(missing_ok=True)


@contextlib.contextmanager
def one_process(folder: Path):
    """Holds a lock on a run's folder; the system releases it when the process ends, however it ends. Left-over temporary files go."""
    with open(folder / ".lock", "w") as lock:
        with contextlib.suppress(ImportError):  # Windows has no fcntl: runs are not protected from each other there
            import fcntl

            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"another process trains in {folder}: wait for it or stop it") from None
        for left_over in [*folder.glob(".*.tmp"), *folder.glob(".tmp*")]:  # of a process that was killed while it wrote
            left_over.unlink(missing_ok=True)
        yield


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Matrices decay; biases and norms do not (as in Hugging Face's Trainer)."""
    parameters = list(model.parameters())
    return [{"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0}]  # fmt: skip


def batch_rows(seed: int, step: int, batch: int, size: int) -> np.ndarray:
    """Rows of the training split in update `step`: the split's own (shuffled) order in the first epoch, a new shuffle in each later one."""
    at = np.arange(step * batch, (step + 1) * batch)
    rows = at % size
    for epoch in np.unique(at // size):
        if epoch:
            order = np.random.default_rng([seed, int(epoch)]).permutation(size)
            rows[at // size == epoch] = order[rows[at // size == epoch]]
    return rows


def run_folder(root: str | os.PathLike, task: str, recipe: str, seed: int) -> Path:
    return Path(root) / recipe / f"{task}-{seed}"
