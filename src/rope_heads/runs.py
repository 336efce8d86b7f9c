"""Frozen runs: many run folders become a few tables in data/runs, and what a reader's own run should look like beside them."""

import contextlib
import json
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from rope_heads import artefacts, final
from rope_heads.model import Transformer
from rope_heads.audit_tasks import ALL_TASKS
from rope_heads.training import accuracy_by_hops

# file of a run folder -> table of data/runs/<name>; the files of `rope-heads measure` keep their names
TABLES = {"log": "accuracy", "measures": "heads", "audit": "audit"} | {name: name for name in (*final.TABLES, "lengths", "gaps")}
FILES = {table: file for file, table in TABLES.items()}
LONG = ("lengths", "gaps")  # have a folder of data/runs of their own, whichever runs are measured so far


def collect(runs: Path, recipes: list[str], into: str, data: Path | None = None, partial: bool = False,
            tasks: list[str] | None = None, seeds: list[int] | None = None, only: list[str] | None = None, add: bool = False, report=print) -> dict[str, int]:  # fmt: skip
    """Joins the finished runs under runs/<recipe>/ into data/runs/<into>/{accuracy,heads,...}.parquet; rows of each table.

    Columns recipe, task and seed come first. The provenance lists every run: command, versions, seconds, last step. A run
    that is not finished is an error, unless `partial` takes it as far as it got (calibration needs no more; a verdict does).
    tasks, seeds: only these (default: all that are there); where both are given, each run that they name must be there.
    only: these tables alone (default: all that were measured, but for those on long inputs).
    add: what other runs left in these tables stays (`joined`), without it they leave them, and `report` says so. The numbers returned are of
    the rows that came in.
    """
    unknown = sorted(set(only or ()) - set(TABLES.values()))
    if unknown:
        raise ValueError(f"no table is called {', '.join(unknown)}; there are: {', '.join(TABLES.values())}")
    wanted = only or [table for table in TABLES.values() if table not in LONG]
    for name in (into, *recipes):
        if name in ("", ".", "..") or "/" in name or "\\" in name:
            raise ValueError(f"names of recipes and tables must be single folder names, got {name!r}")
    by_recipe = {recipe: sorted(path.parent for path in (Path(runs) / recipe).glob("*/run.json")
                                if _wanted(path.parent.name, tasks, seeds)) for recipe in recipes}  # fmt: skip
    there = {(recipe, folder.name) for recipe, found in by_recipe.items() for folder in found}
    absent = [f"{recipe}/{task}-{seed}" for recipe in recipes for task in tasks or () for seed in seeds or () if (recipe, f"{task}-{seed}") not in there]
    if absent:
        raise ValueError(f"{runs} lacks {', '.join(absent)}: train them first (rope-heads train)")
    empty = [recipe for recipe, found in by_recipe.items() if not found]
    if empty:
        raise ValueError(f"{runs} holds no runs of {', '.join(empty)}{' with these tasks and seeds' * bool(tasks or seeds)}: train some first (rope-heads train --recipe ...)")
    folders = [folder for found in by_recipe.values() for folder in found]
    if partial:  # a run that has just begun has nothing yet
        folders = [folder for folder in folders if (folder / "log.parquet").exists()]
        if not folders:
            raise ValueError(f"no run of {', '.join(recipes)} in {runs} has been evaluated yet: wait for its first log.parquet")
    unfinished = [str(folder.relative_to(runs)) for folder in folders if not (folder / "model.safetensors").exists()]
    if unfinished and not partial:
        raise ValueError(f"runs not finished: {', '.join(unfinished)}; run the same command again, it goes on where it stopped")
    frames: dict[str, list[pd.DataFrame]] = {}
    origins = []
    for folder in folders:
        identity = artefacts.read_json(folder / "run.json")[0]
        origins.append(artefacts.read_parquet(folder / "log.parquet")[1])
        for file, table in TABLES.items():
            if table in wanted and (folder / f"{file}.parquet").exists():
                frame = artefacts.read_parquet(folder / f"{file}.parquet")[0]
                for place, (name, value) in enumerate((("recipe", identity["recipe"]["name"]), ("task", identity["task"]), ("seed", identity["seed"]))):
                    frame.insert(place, name, value)
                frames.setdefault(table, []).append(frame)
    unmeasured = [table for table in only or () if table not in frames]
    if unmeasured:
        raise ValueError(f"no run has the table {', '.join(unmeasured)}: measure them (rope-heads {'lengths' if unmeasured[0] in LONG else 'measure'} --run)")
    for table, parts in frames.items():
        if len(parts) < len(folders) and not partial:
            lacking = [str(folder.relative_to(runs)) for folder in folders if not (folder / f"{FILES[table]}.parquet").exists()]
            raise ValueError(f"table {table} is there for some runs and missing for {', '.join(lacking)}: measure them (rope-heads {'lengths' if table in LONG else 'measure'} --run)")
    command = _command(into, recipes, partial, tasks, seeds, only)
    told = artefacts.provenance(command, round(sum(made["seconds"] for made in origins), 1), runs=origins)
    for table, parts in frames.items():
        frame = pd.concat(parts, ignore_index=True).sort_values(["recipe", "task", "seed", "step"], kind="stable", ignore_index=True)
        if table == "heads":  # by far the largest table: means over prompts need no more than seven digits
            frame = frame.astype(dict.fromkeys(frame.select_dtypes("float64"), "float32"))
        path = (data or artefacts.data_folder()) / "runs" / into / f"{table}.parquet"
        made = told
        if add:
            frame, made = joined(path, frame, told)
            there = {name: sorted(frame[name].unique().tolist()) for name in ("recipe", "task", "seed")}
            made = made | {"command": _command(into, there["recipe"], partial, tasks and there["task"], seeds and there["seed"], only)}  # whole table's
        elif path.exists():
            gone: set = set()
            with contextlib.suppress(ValueError):  # a damaged table, or none of ours, is simply made again
                gone = {_run_of(run) for run in artefacts.read_parquet(path)[1].get("runs", [])} - {_run_of(run) for run in origins}
            if gone:
                report(f"{into}/{table}: {len(gone)} runs that were in the table are not under {runs} and leave it (--add would keep them)")
        artefacts.write_parquet(path, frame, made)
    return {table: sum(map(len, parts)) for table, parts in frames.items()}


def _command(into: str, recipes, partial: bool, tasks, seeds, only) -> str:
    chosen = (("tasks", tasks), ("seeds", seeds), ("only", only))
    return f"rope-heads collect --into {into} --recipe " + " ".join(recipes) + " --partial" * partial + "".join(
        f" --{name} {' '.join(map(str, values))}" for name, values in chosen if values)  # fmt: skip


def joined(path: Path, frame: pd.DataFrame, told: dict) -> tuple[pd.DataFrame, dict]:
    """`frame` and what the table at `path` holds of other runs, and where both come from; without such a table `frame` alone.

    A run is (recipe or arm, task, seed); of one measured again the new rows count, on long inputs those of the same setting.
    """
    if not path.exists():
        return frame, told
    old, before = artefacts.read_parquet(path)
    if set(old.columns) != set(frame.columns):
        raise ValueError(f"{path} has other columns ({', '.join(sorted(set(old.columns) ^ set(frame.columns)))}): collect all its runs again, without --add")
    same = [name for name in ("recipe", "arm", "task", "seed", "inputs", "kind", "change") if name in frame]
    again = pd.MultiIndex.from_frame(old[same]).isin(pd.MultiIndex.from_frame(frame[same]))
    order = [name for name in ("recipe", "arm", "task", "seed", "step") if name in frame]
    whole = pd.concat([old[~again], frame.astype(old.dtypes.to_dict())], ignore_index=True).sort_values(order, kind="stable", ignore_index=True)
    fresh = [_run_of(made) for made in told["runs"]]
    runs = [made for made in before["runs"] if _run_of(made) not in fresh] + told["runs"]
    return whole, before | told | {"runs": runs, "seconds": round(sum(made["seconds"] for made in runs), 1)}


def _run_of(made: dict) -> tuple:
    return made.get("arm") or made.get("recipe", {}).get("name"), made.get("task"), made.get("seed")


def _wanted(name: str, tasks: list[str] | None, seeds: list[int] | None) -> bool:
    task, _, seed = name.rpartition("-")
    return (not tasks or task in tasks) and (not seeds or seed in map(str, seeds))


def keep_weights(runs: Path, recipe: str, names: list[str], into: str, data: Path | None = None, report=print) -> None:
    """Final weights of the named runs (`number-0`) go to data/runs/<into>/<name>.safetensors, in fp16 where that changes no accuracy.

    "No accuracy" is that of each hop count on the whole test split, which `rope-heads measure` has measured in fp32; else fp32 is kept.
    """
    for name in names:
        folder = Path(runs) / recipe / name
        if not (folder / "model.safetensors").exists() or not (folder / "tests.parquet").exists():
            raise ValueError(f"{folder} is no measured run: train it, then rope-heads measure --run")
        identity, made = artefacts.read_json(folder / "run.json")
        tests = artefacts.read_parquet(folder / "tests.parquet")[0].query("planes_off == 'none'").set_index("hops").accuracy.to_dict()
        model = Transformer.load(folder / "model.safetensors")
        tensors = {key: value.half() for key, value in model.state_dict().items()}
        half = Transformer(model.config).eval()
        half.load_state_dict({key: value.float() for key, value in tensors.items()})
        same = accuracy_by_hops(half, ALL_TASKS[identity["task"]].split("test", identity["seed"])) == tests
        told = {"config": json.dumps(identity["config"]), "made by": made["command"], "recipe": json.dumps(identity["recipe"])}
        artefacts.write_tensors((data or artefacts.data_folder()) / "runs" / into / f"{name}.safetensors", tensors if same else model.state_dict(), told)
        report(f"data/runs/{into}/{name}.safetensors: {'fp16, same accuracy' if same else 'fp32, for fp16 changes the accuracy'}")


def frozen_model(name: str, run: str) -> Transformer:
    """A trained model of data/runs/<name>, as `number-0`: evaluation mode, fp32."""
    return Transformer.load(artefacts.data_path(f"runs/{name}/{run}.safetensors"))


def frozen(name: str, table: str = "accuracy") -> pd.DataFrame:
    """One table of data/runs/<name>: "accuracy" (recipe, task, seed, step, hops, accuracy, ...) or "heads" (recipe, task, seed, step, layer, head, ...)."""
    return artefacts.read_parquet(artefacts.data_path(f"runs/{name}/{table}.parquet"))[0]


def origin(name: str, table: str = "accuracy") -> dict:
    """Where a frozen table comes from: the command, and for each run its own command, versions and seconds."""
    return artefacts.read_parquet(artefacts.data_path(f"runs/{name}/{table}.parquet"))[1]


def crossings(accuracy: pd.DataFrame, level: float) -> pd.Series:
    """First step at which accuracy reaches `level` in (0, 1), linear between evaluations, inf when never; by task, seed and hop count."""
    from rope_heads.claims import crossing_step

    groups = accuracy.sort_values("step").groupby(["task", "seed", "hops"])
    return groups.apply(lambda run: crossing_step(run.step.to_numpy(), run.accuracy.to_numpy(), level), include_groups=False)


def prediction_interval(values, coverage: float = 0.999) -> tuple[float, float]:
    """Where the value of one more seed should fall, from the values of n seeds: mean -+ t sd sqrt(1 + 1/n), normal values assumed.

    A new seed leaves it once in 1 / (1 - coverage) times; the interval of a mean would be left far more often.
    """
    values = np.asarray(values, dtype=float)
    if len(values) < 2 or not np.isfinite(values).all():
        raise ValueError(f"needs at least two finite values, got {values.tolist()}")
    reach = stats.t.ppf((1 + coverage) / 2, len(values) - 1) * values.std(ddof=1) * np.sqrt(1 + 1 / len(values))
    return float(values.mean() - reach), float(values.mean() + reach)


def describe(frame_origin: dict) -> str:
    """One line for a caption: how many runs, hours of computing, and the command that makes the table again."""
    runs = frame_origin["runs"]
    return f"{len(runs)} runs, {sum(run['seconds'] for run in runs) / 3600:.1f} core hours; regenerate with `{frame_origin['command']}`"
