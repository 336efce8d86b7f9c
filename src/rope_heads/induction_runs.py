"""Training the toy models of P2 (its training interventions): one run is (arm, seed), resumable, with tables instead of weights.

P2: AdamW at 1e-3, weight decay .01, 200 steps of warm-up, then constant; gradient clipped at 1; 64 fresh sequences a step; evaluated on 64 fixed
sequences. P2 evaluates every 100 steps and stops at 6,000; here every 20, and a run ends 200 steps after induction has formed, or at the cap.
A run leaves `log.parquet` (losses, gradient norms), `heads.parquet` (what each head attends to, and its spectra) and `run.json`.
"""

import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from rope_heads import artefacts, induction
from rope_heads.claims import FIRST_EXCLUDED_SEED
from rope_heads.induction import ARMS, FORMED, STRENGTH
from rope_heads.model import Transformer
from rope_heads.runs import joined
from rope_heads.training import one_process

EVALUATION_SEED, DATA_SEED = 99, 10_000  # of the fixed evaluation set; added to a run's seed for its training data (P2)


@dataclass(frozen=True)
class Schedule:
    """How a toy run is trained; the defaults are P2's, except for the grid of evaluations and the end."""

    cap: int = 3_000  # a run that has not formed by then is censored
    after: int | None = 200  # steps to go on after formation; None: to the cap
    every: int = 20  # steps between evaluations
    batch: int = 64
    lr: float = 1e-3
    warmup: int = 200
    weight_decay: float = 0.01
    clip: float = 1.0  # largest gradient norm; 0 = no limit
    length: int = induction.LENGTH
    layers: int = induction.LAYERS

    def __post_init__(self):
        for name in ("cap", "every", "batch", "layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        for name in ("lr", "warmup", "weight_decay", "clip"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be >= 0 and finite, got {getattr(self, name)}")
        if self.length <= induction.QUERIES_FROM:
            raise ValueError(f"length must be > {induction.QUERIES_FROM}, where attention is read off, got {self.length}")
        if self.after is not None and self.after < 0:
            raise ValueError(f"after must be >= 0 or None, got {self.after}")


def schedule(changes: dict[str, object]) -> Schedule:
    """The default schedule with some values replaced; ValueError names an unknown part or a value of the wrong type."""
    default = asdict(Schedule())
    for name, value in changes.items():
        if name not in default:
            raise ValueError(f"{name!r} is no part of a schedule; its parts are {', '.join(default)}")
        number = (int,) if name in ("cap", "every", "batch", "warmup", "length", "layers", "after") else (int, float)
        if isinstance(value, bool) or not (isinstance(value, number) or (name == "after" and value is None)):
            raise ValueError(f"{name} must be a {'whole number' if number == (int,) else 'number'}{' or None' * (name == 'after')}, got {value!r}")
    return Schedule(**default | changes)


def kind(schedule: Schedule) -> str:
    """Folder of runs with this schedule: "toys", or "toys,after=None,cap=6000" when it is changed."""
    default = Schedule()
    changes = {name: value for name, value in asdict(schedule).items() if value != getattr(default, name)}
    return ",".join(["toys", *(f"{name}={value}" for name, value in sorted(changes.items()))])


def options(schedule: Schedule | None) -> str:
    """What a command line needs for this schedule: " --set after=None --set cap=6000", or nothing."""
    return "".join(f" --set {change}" for change in kind(schedule or Schedule()).split(",")[1:])


def run_folder(root, arm: str, seed: int, schedule: Schedule | None = None) -> Path:
    return Path(root) / kind(schedule or Schedule()) / f"{arm.replace(' ', '-')}-{seed}"


class ToyRun:
    """One run of an arm. `train()` goes on from a checkpoint, to the bit; a finished run is left as it is."""

    def __init__(
        self, arm: str, seed: int, folder, schedule: Schedule | None = None, device: str = "cpu", checkpoint_every: int = 200, report=print
    ):
        if arm not in ARMS:
            raise ValueError(f"arm must be one of {', '.join(ARMS)}; got {arm!r}")
        self.arm, self.seed, self.folder, self.schedule, self.device = arm, seed, Path(folder), schedule or Schedule(), device
        self.checkpoint_every, self.report = checkpoint_every, report
        self.step, self.seconds, self.formed = 0, 0.0, math.inf
        self.log: list[dict] = []
        self.heads: list[dict] = []
        self.identity = {"arm": arm, "seed": seed, "schedule": asdict(self.schedule)}
        self.evaluation = induction.sample(64, np.random.default_rng(EVALUATION_SEED), self.schedule.length)

    checkpoint = property(lambda self: self.folder / "checkpoint.safetensors")

    def train(self) -> float:
        """Step of formation (inf when censored)."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with one_process(self.folder):
            record = self.folder / "run.json"
            if record.exists():
                found = artefacts.read_json(record)[0]
                if {k: found.get(k) for k in self.identity} != self.identity:
                    raise ValueError(f"{self.folder} holds another run: pass another folder or remove it")
                return float(found["formed"])
            return self._train()

    def _train(self) -> float:
        s = self.schedule
        model = induction.build(ARMS[self.arm], self.seed, s.layers, s.length).to(self.device).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=s.lr, weight_decay=s.weight_decay)
        if self.checkpoint.exists():
            self._resume(model, optimizer)
        started = time.perf_counter() - self.seconds
        while True:
            tokens, _ = induction.sample(s.batch, np.random.default_rng([DATA_SEED + self.seed, self.step]), s.length)
            if self.step % s.every == 0 or self.step == s.cap:
                self._evaluate(model, tokens.to(self.device))
            if self.step >= self._end():
                break
            if self.step and self.step % self.checkpoint_every == 0:
                self.seconds = time.perf_counter() - started
                self._save(model, optimizer)
            self._update(model, optimizer, tokens.to(self.device))
            self.step += 1
        self.seconds = time.perf_counter() - started
        self._write_tables()
        artefacts.write_json(
            self.folder / "run.json", {**self.identity, "formed": self.formed if math.isfinite(self.formed) else "inf"}, self._origin()
        )
        self.checkpoint.unlink(missing_ok=True)
        return self.formed

    def _end(self) -> float:
        s = self.schedule
        return s.cap if s.after is None else min(s.cap, self.formed + s.after)

    def _loss(self, model: Transformer, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Loss over all next tokens, and the weighted penalty."""
        task, _ = induction.loss_on(model, tokens, torch.ones_like(tokens[:, 1:], dtype=torch.bool))
        kind = ARMS[self.arm].penalty
        return task, torch.zeros((), device=self.device) if kind == "none" else STRENGTH * induction.penalty(model, kind)

    def _update(self, model: Transformer, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
        for group in optimizer.param_groups:
            group["lr"] = self.schedule.lr * min(1.0, (self.step + 1) / max(1, self.schedule.warmup))
        optimizer.zero_grad()
        sum(self._loss(model, tokens)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), self.schedule.clip or math.inf)
        optimizer.step()

    def _evaluate(self, model: Transformer, tokens: Tensor) -> None:
        """One row for the run and one for each head; gradient norms on the batch that the next update sees."""
        norms = self._gradient_norms(model, tokens)
        model.eval()
        losses, rows = induction.evaluate(model, *(t.to(self.device) for t in self.evaluation))
        model.train()
        if math.isinf(self.formed) and losses["loss_predictable"] < FORMED:
            self.formed = float(self.step)
        self.log.append({"step": self.step, **losses, **norms})
        self.heads += [{"step": self.step, **row} for row in rows]
        if self.step % 100 == 0:
            self.report(
                f"{self.arm} seed {self.seed}: step {self.step}/{self.schedule.cap}  loss on predictable tokens {losses['loss_predictable']:.3f}"
            )

    def _gradient_norms(self, model: Transformer, tokens: Tensor) -> dict[str, float]:
        """Norms, over W_Q and W_K, of the gradients of the task's loss and of the weighted penalty."""
        weights = [p for block in model.blocks for name, p in block.attention.qkv.named_parameters() if "weight" in name]
        out = {}
        for name, loss in zip(("task", "penalty"), self._loss(model, tokens)):
            value = loss.detach()
            parts = torch.autograd.grad(loss, weights) if loss.requires_grad else ()
            rows = [part[: 2 * part.shape[0] // 3] for part in parts]  # the last third is W_V
            out |= {f"{name}_gradient": float(torch.stack([r.square().sum() for r in rows]).sum().sqrt()) if rows else 0.0}
            if name == "penalty":
                out["penalty"] = float(value)
        return out

    def _origin(self) -> dict:
        return artefacts.provenance(f'rope-heads toy --arm "{self.arm}" --seed {self.seed}{options(self.schedule)}', round(self.seconds, 1), self.seed,
                                    threads=torch.get_num_threads(), device=self.device, step=self.step)  # fmt: skip

    def _write_tables(self) -> None:
        for name, rows in (("log", self.log), ("heads", self.heads)):
            artefacts.write_parquet(self.folder / f"{name}.parquet", pd.DataFrame(rows), self._origin())

    def _save(self, model: Transformer, optimizer: torch.optim.Optimizer) -> None:
        self._write_tables()
        tensors = {f"model.{name}": t for name, t in model.state_dict().items()}
        for i, state in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{i}.{name}": t for name, t in state.items()}
        artefacts.write_tensors(self.checkpoint, tensors, {"step": str(self.step), "seconds": str(self.seconds), "formed": str(self.formed),
                                                           "identity": json.dumps(self.identity)})  # fmt: skip

    def _resume(self, model: Transformer, optimizer: torch.optim.Optimizer) -> None:
        tensors, metadata = artefacts.read_tensors(self.checkpoint)
        if metadata.get("identity") != json.dumps(self.identity):
            raise ValueError(f"{self.checkpoint} is no checkpoint of this run: remove it to start the run again")
        self.step, self.seconds, self.formed = int(metadata["step"]), float(metadata["seconds"]), float(metadata["formed"])
        model.load_state_dict({name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")})
        state: dict[int, dict] = {}
        for name, tensor in tensors.items():
            if name.startswith("optimizer."):
                _, i, key = name.split(".")
                state.setdefault(int(i), {})[key] = tensor
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        for rows, name in ((self.log, "log"), (self.heads, "heads")):  # rows of the checkpoint's step and later are made again
            rows += [
                row for row in artefacts.read_parquet(self.folder / f"{name}.parquet")[0].to_dict("records") if row["step"] < self.step
            ]
        self.report(f"{self.arm} seed {self.seed}: goes on from step {self.step}")


def collect(root, data: Path | None = None, schedule: Schedule | None = None, into: str = "toys", add: bool = False) -> dict[str, int]:
    """Joins the finished runs of one schedule under root into data/runs/<into>/{formation,log,heads}.parquet; rows of each table.

    formation: arm, seed, formed (step, inf when censored), steps (trained). Unfinished runs are left out; how many is told in the provenance. So are
    runs with seeds from 100 on, which are for trying out and count for no claim.
    add: runs that are in these tables already stay, as in `runs.collect`.
    """
    if into in ("", ".", "..") or "/" in into or "\\" in into:
        raise ValueError(f"into must be a single folder name, got {into!r}")
    root = Path(root) / kind(schedule or Schedule())
    folders = sorted(path.parent for path in root.glob("*/run.json"))
    if not folders:
        raise ValueError(f"{root} holds no finished runs: train some first (rope-heads toy --arm ... --seed ...)")
    unfinished = [path.parent.name for path in sorted(root.glob("*/checkpoint.safetensors"))]
    formation, frames, origins = [], {"log": [], "heads": []}, []
    for folder in folders:
        found, made = artefacts.read_json(folder / "run.json")
        if found["seed"] >= FIRST_EXCLUDED_SEED:
            continue
        origins.append({"arm": found["arm"], **made})
        formation.append(
            {
                "arm": found["arm"],
                "seed": found["seed"],
                "formed": float(found["formed"]),
                "steps": made["step"],
                "cap": found["schedule"]["cap"],
            }
        )
        for name, parts in frames.items():
            frame = artefacts.read_parquet(folder / f"{name}.parquet")[0]
            frame.insert(0, "arm", found["arm"])
            frame.insert(1, "seed", found["seed"])
            parts.append(frame)
    if not formation:
        raise ValueError(f"all runs of {root} have seeds from {FIRST_EXCLUDED_SEED} on, which are for trying out and are not collected")
    told = artefacts.provenance(
        "rope-heads toy --collect" + options(schedule) + f" --into {into}" * (into != "toys"), round(sum(made["seconds"] for made in origins), 1), runs=origins, unfinished=unfinished
    )
    tables = {"formation": pd.DataFrame(formation)} | {name: pd.concat(parts, ignore_index=True) for name, parts in frames.items()}
    for name, table in tables.items():
        floats = table.select_dtypes("float64").columns.difference(["formed"])
        path, table = (data or artefacts.data_folder()) / "runs" / into / f"{name}.parquet", table.astype(dict.fromkeys(floats, "float32"))
        artefacts.write_parquet(path, *(joined(path, table, told) if add else (table, told)))
    return {name: len(table) for name, table in tables.items()}
