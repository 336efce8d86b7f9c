"""What a chapter measured for the claims it decides: kept where the scorecard finds it, and shown with its verdict.

`record` writes the values of a claim, and nothing else, to _build/values/CHAPTER.json, the chapter being the one the ledger names:
{claim id: {value name: {label: number}}}, `inf` as the text "inf". The rules stay in `claims`; whoever judges does it from these values.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from rope_heads.artefacts import repository, write_bytes
from rope_heads.claims import OPEN, Ledger, Values, Verdict, adjust, judge, read_ledger


def values_folder() -> Path | None:
    """_build/values of the checkout; None where the package was installed without one (Colab): there nothing is kept."""
    root = repository()
    return None if root is None else root / "_build" / "values"


def _needed(claim: Mapping) -> set[str]:
    """Names of the values that the rule of a claim reads."""
    parts = claim["part"]
    return {p[key] for p in parts for key in ("value", "against") if key in p} | {p["gate"]["value"] for p in parts if "gate" in p}


def record(claim_id: str, values: Values, folder: Path | None = None) -> dict[str, dict[str, float]]:
    """Keep the values of one claim and return them as plain numbers. Earlier values of the claim are replaced, other claims stay.

    Raises ValueError when the ledger has no such claim, when the names are not exactly those that its rule reads, or on nan.
    """
    ledger = read_ledger()
    if claim_id not in ledger.claims:
        raise ValueError(f"claim_id must be one of the ledger's, got {claim_id!r}: see data/published/claims.toml")
    claim = ledger.claims[claim_id]
    if set(values) != _needed(claim):
        raise ValueError(f"values of {claim_id} must be named {sorted(_needed(claim))}, got {sorted(values)}")
    plain = {name: {str(label): float(v) for label, v in column.items()} for name, column in values.items()}
    odd = [f"{name} of {label!r}" for name, column in plain.items() for label, v in column.items() if math.isnan(v)]
    if odd:
        raise ValueError(f"values of {claim_id} must be numbers (inf for never), got nan for {odd[0]}: mend the measurement")
    folder = values_folder() if folder is None else folder
    if folder is not None:
        kept = {**recorded(folder, claim["chapter"]), claim_id: plain}
        strict = {c: {name: {k: str(v) if math.isinf(v) else v for k, v in column.items()} for name, column in named.items()}
                  for c, named in kept.items()}  # fmt: skip
        write_bytes(folder / f"{claim['chapter']}.json", (json.dumps(strict, indent=1, allow_nan=False) + "\n").encode())
    return plain


def recorded(folder: Path | None = None, chapter: str = "*") -> dict[str, dict[str, dict[str, float]]]:
    """Values by claim id of one chapter, or of all: empty when nothing was recorded yet."""
    folder = values_folder() if folder is None else folder
    found: dict[str, dict] = {}
    for path in sorted(folder.glob(f"{chapter}.json")) if folder is not None else []:
        for claim_id, named in json.loads(path.read_text(encoding="utf-8")).items():
            found[claim_id] = {name: {label: float(v) for label, v in column.items()} for name, column in named.items()}
    return found


def judge_known(ledger: Ledger, values: Mapping[str, Values]) -> dict[str, Verdict]:
    """Verdict of every claim of the ledger; OPEN where values are missing."""
    adjusted, found = adjust(ledger, values), {}
    for name, claim in ledger.claims.items():
        untestable = all(part["kind"] == "untestable" for part in claim["part"])
        without_runs = any("family" in part for part in claim["part"]) and not all(values.get(name, {}).values())
        if (name in values and not without_runs) or untestable:
            found[name] = judge(claim, values.get(name, {}), adjusted.get(name))
        else:
            found[name] = Verdict(OPEN, math.nan, None, 0, waits_for(claim))
    return found


def waits_for(claim: Mapping) -> str:
    """What an open claim lacks, in words."""
    runs = claim["runs"]
    if not runs:
        return "the chapter that decides it is not in the book yet"
    tasks = ", ".join(runs.get("tasks", [])).replace("_", " ")
    recipe = runs.get("recipe", runs.get("model", ""))
    return f"its runs are not all made and measured yet: {recipe if isinstance(recipe, str) else ' and '.join(recipe)}{f' on {tasks}' if tasks else ''}, seeds {runs.get('seeds', '')}"


def verdict_table(values: Mapping[str, Values]) -> pd.DataFrame:
    """One row a claim, in the order given: whose claim it is, the claim, the verdict by its registered rule, and what decided it."""
    ledger, rows = read_ledger(), []
    judged = judge_known(ledger, values)
    for claim_id in values:
        claim, found = ledger.claims[claim_id], judged[claim_id]
        whose = {"paper": claim["paper"], "own": "this book"}[claim["kind"]]
        rows.append([f"{whose}, {claim['where']}" if claim["kind"] == "paper" else whose, claim["claim"], found.verdict, found.reason])
    return pd.DataFrame(rows, index=list(values), columns=["source", "claim", "verdict", "decided by"])
