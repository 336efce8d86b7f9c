"""Every claim of the ledger in one table: the published value, ours with its interval, the verdict, and where the number comes from.

Chapters record the values of the claims they decide when they execute (`verdicts`). `data/values/CHAPTER.json` keeps those of mode quick, which rest
on frozen runs and exact computation; `rope-heads book --freeze-values` renews it, and a test compares a build with it. The scorecard judges these
values anew each time it executes. A claim without values, or with fewer runs than its rule needs, is open: its runs are not all made and measured.
"""

import html
import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path

import pandas as pd

from rope_heads import verdicts
from rope_heads.artefacts import data_folder, data_path, write_bytes
from rope_heads.claims import FAILS, HOLDS, LIMIT, OPEN, UNTESTED, Ledger, Values, Verdict, judge, read_ledger, regions
from rope_heads.verdicts import judge_known

ORDER = (HOLDS, LIMIT, FAILS, UNTESTED, OPEN)
PAPERS = {"P1": "https://arxiv.org/abs/2605.31558", "P0": "https://arxiv.org/abs/2511.11579", "P2": "https://arxiv.org/abs/2607.06621"}
CHAPTERS = ("training_dynamics", "mechanistic_metrics", "length_generalization", "theory", "rope_fingerprints", "language_models")
TRAINED_ANEW = {"P0-one-angle-tasks"}  # trained live in mode quick too: another processor gives other numbers, so only the verdict is compared
LIMITS = {
    "weaker than asked": "the whole interval, or a listed case, misses the good region and stays in the weak one",
    "a part fails": "a part that only qualifies the claim does not hold",
    "undecided": "the interval reaches from the good region beyond its edge",
    "not every run": "the interval is good, one run is not, and the claim says all",
    "few runs": "too few runs for an interval; those that there are do not contradict",
    "unfinished": "such a part is not measured yet, or cannot be",
}  # what puts the limit on a claim that holds with one
AGREE = 1e-6  # relative: the same computation on two processors


def frozen_values() -> dict[str, Values]:
    """Values by claim id as they lie in data/values."""
    return verdicts.recorded(data_path("values"))


def collected(mode: str) -> dict[str, Values]:
    """The values the scorecard shows: frozen ones in mode quick; in mode full those that the chapters of this build recorded, where they did."""
    return frozen_values() | (verdicts.recorded() if mode == "full" else {})


def freeze(values_folder: Path, chapters: Collection[str]) -> list[str]:
    """Copies what these chapters recorded to data/values; returns the names of those that recorded something. Files of others are left-overs."""
    paths = [path for path in sorted(values_folder.glob("*.json")) if path.stem in chapters]
    (data_folder() / "values").mkdir(parents=True, exist_ok=True)
    for path in paths:
        write_bytes(data_folder() / "values" / path.name, path.read_bytes())
    return [path.stem for path in paths]


def planned_seeds(claim: Mapping) -> int:
    """How many seeds the ledger plans for each task: 8 for "0-7", 0 where it names several ranges or none."""
    first, dash, last = str(claim["runs"].get("seeds", "")).partition("-")
    return int(last) - int(first) + 1 if dash and first.isdigit() and last.isdigit() else 0


def regenerates(claim: Mapping) -> str:
    """The command that makes the data behind a claim again; for claims without data of their own, the chapter itself."""
    runs, chapter = claim["runs"], claim["chapter"]
    if runs.get("recipe") == "toy":
        return "snakemake -c2 toys"
    if "other shapes" in runs.get("recipe", "") or any("12-letter" in task or "64 letters" in task for task in runs.get("tasks", [])):
        return "snakemake -c2 audit"
    if chapter == "length_generalization" and claim["id"] != "own-planes-causal":  # which needs no long input: it rests on a table of `paper`
        return "snakemake -c2 lengths"
    if runs.get("recipe") in ("paper", "fast"):
        return f"snakemake -c2 {runs['recipe']}"
    if runs.get("model") == "SmolLM2-135M":
        return "rope-heads fingerprint --model smollm2 --into smollm2"
    if runs.get("model"):
        return "rope-heads ask --model smollm2"
    return f"rope-heads book --force --only {chapter}"


def plain(value) -> str:
    """A published value of the ledger as text."""
    if isinstance(value, Mapping):
        return "; ".join(f"{key.replace('_', ' ')}: {plain(v)}" for key, v in value.items())
    if isinstance(value, list):
        return ", ".join(plain(v) for v in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def number(value: float) -> str:
    """Three digits; never and undefined in words."""
    if math.isinf(value):
        return "never" if value > 0 else "-inf"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def ours(verdict: Verdict, claim: Mapping) -> list[str]:
    """One line a part of the rule: estimate, interval where something was sampled, and how many seeds, clusters or cases stand behind it."""
    lines = []
    for part in claim["part"]:
        found = dict(verdict.parts).get(part["name"])
        if found is None or math.isnan(found.estimate):
            continue
        between = f" [{number(found.interval[0])}, {number(found.interval[1])}]" if found.interval else ""
        unit = {"cases": "case", "correlation": "cluster"}.get(part["kind"], "seed" if claim["unit"] == "seed" else "value")
        planned = planned_seeds(claim) if unit == "seed" and "min_seeds" not in part else found.n
        of = f" of {planned}" if found.n < planned else ""
        lines.append(f"{part['name']}: {number(found.estimate)}{between}, {found.n}{of} {unit}{'s' * (found.n != 1 or bool(of))}")
    return lines


def kind_of_limit(verdict: Verdict, claim: Mapping) -> tuple[str, str]:
    """What "holds with a limit" means for this claim, a word of `LIMITS` (the first that is true of a part), and that part's name; else "", ""."""
    if verdict.verdict != LIMIT:
        return "", ""
    parts = [(part, found) for part, (_, found) in zip(claim["part"], verdict.parts) if found.verdict != HOLDS]
    words = [(_limit_of(part, found), part["name"]) for part, found in parts]
    return min(words, key=lambda word: list(LIMITS).index(word[0]))


def _limit_of(part: Mapping, found: Verdict) -> str:
    if found.verdict != LIMIT:
        return "a part fails" if found.verdict == FAILS else "unfinished"
    if found.interval is None:
        return "weaker than asked" if part["kind"] == "cases" else "few runs"
    (low, high), (good_low, good_high) = found.interval, regions(part)[0]
    if low > good_high or high < good_low:
        return "weaker than asked"
    return "not every run" if good_low <= low and high <= good_high else "undecided"


def table(values: Mapping[str, Values], ledger: Ledger | None = None) -> pd.DataFrame:
    """One row a claim in the ledger's order; columns kind, paper, where, chapter, claim, published, ours (list), verdict, limit
    (`kind_of_limit`), reason, note (what a reader must know beside the verdict), command."""
    ledger = ledger or read_ledger()
    rows = {}
    for name, verdict in judge_known(ledger, values).items():
        claim = ledger.claims[name]
        limit, part = kind_of_limit(verdict, claim)
        other = "" if verdict.reason.startswith(f"{part}: ") else f"; {part}: {dict(verdict.parts)[part].reason}" if part else ""
        rows[name] = {"kind": claim["kind"], "paper": claim["paper"], "where": claim["where"], "chapter": claim["chapter"], "claim": claim["claim"],
                      "published": plain(claim["published"]), "ours": ours(verdict, claim), "verdict": verdict.verdict, "limit": limit, "reason": verdict.reason + other, "note": claim.get("note", ""),
                      "command": regenerates(claim)}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("id")


def tally(rows: pd.DataFrame) -> pd.DataFrame:
    """Number of claims by verdict (columns, in ORDER) for the papers' claims and this book's own (rows)."""
    whose = rows.paper.where(rows.kind == "paper", "this book").rename("claims of")
    return pd.crosstab(whose, rows.verdict).reindex(columns=list(ORDER), fill_value=0)


def anchor(claim_id: str) -> str:
    """Id of the place in a chapter's page where the claim is decided; without dots, which the theme's script takes for CSS classes."""
    return f"claim-{claim_id.replace('.', '-')}"


def to_html(rows: pd.DataFrame) -> str:
    """The rows as an HTML table: claim and source, published, ours, verdict with links to the deciding cell. Text is escaped."""
    escaped = html.escape
    lines = ['<table class="scorecard"><thead><tr><th>Claim</th><th>Published</th><th>Measured here</th><th>Verdict</th></tr></thead><tbody>']
    for name, row in rows.iterrows():
        papers = " and ".join(f'<a href="{PAPERS[p]}">{p}</a>' for p in row.paper.split(" and "))
        source = f"{papers}, {escaped(row['where'])}" if row.kind == "paper" else f"this book, on {papers}: {escaped(row['where'])}"
        made_in = "" if row.verdict == OPEN and not row.ours else f'<a href="{row.chapter}.html#{anchor(name)}">the cell that decides it</a>, data from '
        measured = "<br>".join(escaped(line) for line in row.ours) or "-"
        verdict = f"{row.verdict}: {row.limit}" if row.limit else row.verdict
        note = f'<p class="note">{escaped(row.note)}</p>' if row.note else ""
        lines.append(
            f'<tr id="{escaped(name)}"><td><p>{escaped(row.claim)}</p><p class="source">{source}</p></td>'
            f'<td data-label="Published">{escaped(row.published) or "-"}</td><td data-label="Measured here">{measured}</td>'
            f'<td data-label="Verdict"><p class="verdict" data-verdict="{row.verdict}">{verdict}</p>{note}'
            f'<p class="source">{escaped(row.reason)}<br>{made_in}<code>{escaped(row.command)}</code></p></td></tr>')  # fmt: skip
    return "\n".join([*lines, "</tbody></table>"])


def differences(recorded: Mapping[str, Values], frozen: Mapping[str, Values]) -> list[str]:
    """What a build recorded otherwise than data/values has it: one line a claim. A difference of AGREE, relative, is none."""
    ledger, lines = read_ledger(), []
    for name in sorted(set(recorded) | set(frozen)):
        if name not in recorded or name not in frozen:
            lines.append(f"{name} is {'not frozen' if name not in frozen else 'frozen but was not recorded'}")
        elif name in TRAINED_ANEW:
            new, old = (judge(ledger.claims[name], side[name]).verdict for side in (recorded, frozen))
            lines += [f"{name}: {new}, frozen {old}"] if new != old else []
        elif not same(recorded[name], frozen[name]):
            lines.append(f"{name}: {json.dumps(recorded[name])[:200]}, frozen {json.dumps(frozen[name])[:200]}")
    return lines


def same(a: Values, b: Values) -> bool:
    """Equal names and labels, and numbers that agree to AGREE."""
    if {k: set(v) for k, v in a.items()} != {k: set(v) for k, v in b.items()}:
        return False
    return all(math.isclose(x, b[name][label], rel_tol=AGREE, abs_tol=1e-12) for name, column in a.items() for label, x in column.items())
