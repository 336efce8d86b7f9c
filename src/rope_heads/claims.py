"""The ledger of claims and the rules that judge them.

`data/published/claims.toml` lists every claim with its statistic and rule; it was committed before the runs that decide it.
Here are the rules, as pure functions from values to a verdict.

Values of a claim: {value name: {label: number}}. A label is a seed ("3"; "fast-3" where recipes meet), a named case ("theta = 2 pi/5") or,
for heads of one run or of one layer, "cluster/member". `inf` means never (a run that never crosses a level) and may be the text "inf", which
strict JSON needs; nan is refused. Each part of a claim names a good region (`at_least`, `at_most` or `within`) and a wider weak one (`limit`).

- `median`: the interval of the median over seeds lies in the good region: holds; it misses the weak region: does not hold; else holds with a
  limit. The interval runs from the k-th smallest to the k-th largest value, k as large as a coverage of 90 % allows. It needs no distribution,
  and a run that never arrives counts as it should, where a t interval would need normal values and a number for "never". Coverage is 92.97 %
  for 8 seeds (2nd to 7th value) and 93.75 % for 5 (all of them), so a verdict errs at most one time in twenty to either side, and one seed in
  eight may stand apart. Fewer than 5 seeds allow no such interval: see `_few`. `every = true`: a single seed outside puts a limit on the claim.
- `shift`: difference or ratio of two independent groups of seeds, the Hodges-Lehmann estimate with the interval that belongs to the exact
  Mann-Whitney test (coverage at least 90 %). A part with a `family` also needs its adjusted p <= .05 to hold; while members of the family
  lack runs they count with p = 1, which can only make the adjusted p of the others larger.
- `correlation`: Spearman's rank correlation, or Pearson's, with a 90 % bootstrap interval that draws whole clusters (runs, layers).
- `cases`: numbers without sampling error (a theorem on listed cases, a published table recomputed). No interval. Quantifier `all`: every case
  is good: holds; one case misses the weak region: does not hold. Quantifier `some`: one good case is enough.
- `untestable`: says why.

Parts combine to the worst verdict; a part with `qualifies = true` can put a limit on a claim but not overturn it. A claim is open while a part
that decides has fewer runs than its rule needs (`min_seeds`, default 5), unless another part has failed already.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from rope_heads.artefacts import data_path

HOLDS, LIMIT, FAILS, UNTESTED = "holds", "holds with a limit", "does not hold", "not testable here"
OPEN = "open"  # no verdict yet: fewer runs than the rule needs
COVERAGE = 0.90
FIRST_EXCLUDED_SEED = 100  # calibration and trial runs; never part of a verdict
Values = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Verdict:
    """One judged claim or part. `interval` is None where nothing was sampled; `coverage` is that interval's own."""

    verdict: str
    estimate: float
    interval: tuple[float, float] | None
    n: int
    reason: str
    coverage: float = math.nan
    parts: tuple[tuple[str, Verdict], ...] = ()


@dataclass(frozen=True)
class Ledger:
    """What the ledger declares for all claims (header), and the claims by id."""

    header: dict
    claims: dict[str, dict]


def read_ledger(path: Path | None = None) -> Ledger:
    """Claims by id, in the order of the file. Raises ValueError on a repeated id."""
    content = tomllib.loads((path or data_path("published/claims.toml")).read_text(encoding="utf-8"))
    claims: dict[str, dict] = {}
    for claim in content["claim"]:
        if claim["id"] in claims:
            raise ValueError(f"claim ids must be unique, got {claim['id']!r} twice: rename one in claims.toml")
        claims[claim["id"]] = claim
    return Ledger(content["ledger"], claims)


BEARING = ("id", "kind", "claim", "statistic", "unit", "runs", "published", "part")


def fingerprint(entry: Mapping) -> str:
    """sha256 over what bears the rule: of a claim `BEARING`, of the ledger's header everything but its list of changes."""
    bearing = {key: entry[key] for key in BEARING} if "id" in entry else {key: v for key, v in entry.items() if key != "changes"}
    return hashlib.sha256(json.dumps(bearing, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


# ---- statistics that many claims share -------------------------------------------------------------------------------------------


def crossing_step(steps, curve, level: float) -> float:
    """First step at which `curve` [evaluation] reaches `level`, linear between evaluations; inf when it never does."""
    steps, curve = np.asarray(steps, float), np.asarray(curve, float)
    reached = np.flatnonzero(curve >= level)
    if not len(reached):
        return math.inf
    i = int(reached[0])
    return float(steps[0]) if i == 0 else float(steps[i - 1] + (level - curve[i - 1]) / (curve[i] - curve[i - 1]) * (steps[i] - steps[i - 1]))


def maximal_step(steps, accuracy) -> float:
    """First evaluation with accuracy of at least the mean over the last ten evaluations minus .001."""
    accuracy = np.asarray(accuracy, float)
    least = accuracy[-10:].mean() - 0.001 - 1e-9  # a difference of exactly .001 counts, however its last digit is rounded
    return float(np.asarray(steps, float)[np.flatnonzero(accuracy >= least)[0]])


def break_length(added, accuracy, training_length: int = 17) -> float:
    """Input length (training length + added tokens) at which accuracy first falls below .5, linear on the grid; the longest when it never does."""
    crossed = crossing_step(added, -np.asarray(accuracy, float), -0.5)
    return training_length + (float(np.max(added)) if math.isinf(crossed) else crossed)


# ---- intervals -------------------------------------------------------------------------------------------------------------------


def median_interval(values, coverage: float = COVERAGE) -> tuple[float, float, float] | None:
    """(low, high, actual coverage) for the median of `values` [n], or None when even the whole range covers less.

    P(k-th smallest <= median <= k-th largest) >= 1 - 2 P(Binomial(n, 1/2) <= k - 1).
    """
    ordered, n = np.sort(np.asarray(values, float)), len(values)
    for k in range((n + 1) // 2, 0, -1):
        actual = 1 - 2 * stats.binom.cdf(k - 1, n, 0.5)
        if actual >= coverage:
            return float(ordered[k - 1]), float(ordered[n - k]), float(actual)
    return None


def _mann_whitney_counts(n: int, m: int) -> np.ndarray:
    """Number of arrangements with U = 0 .. n*m, for two samples without ties (recurrence over the largest value)."""
    table = {(i, j): np.ones(1) for i in range(n + 1) for j in range(m + 1) if i == 0 or j == 0}
    for i in range(1, n + 1):
        for j in range(1, m + 1):
            counts = np.zeros(i * j + 1)
            counts[j:] += table[i - 1, j]
            counts[: i * (j - 1) + 1] += table[i, j - 1]
            table[i, j] = counts
    return table[n, m]


def shift_interval(first, second, coverage: float = COVERAGE) -> tuple[float, float, float, float] | None:
    """Hodges-Lehmann shift of `first` [n] over `second` [m]: (estimate, low, high, actual coverage), or None when n, m are too small."""
    a, b = np.asarray(first, float)[:, None], np.asarray(second, float)[None, :]
    with np.errstate(invalid="ignore"):
        pairs = a - b
    pairs = np.sort(np.where(np.isnan(pairs), 0.0, pairs).ravel())  # two runs that never arrive are a tie
    actual = 1 - 2 * np.cumsum(_mann_whitney_counts(len(a), b.size)) / math.comb(len(a) + b.size, b.size)
    k = int((actual >= coverage).sum()) - 1
    return None if k < 0 else (_middle(pairs), float(pairs[k]), float(pairs[-1 - k]), float(actual[k]))


def _middle(ordered: np.ndarray) -> float:
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return float(low) if low == high else float((low + high) / 2)


def one_sided_p(first, second) -> float:
    """Exact P(rank sum of `first` at least as large) over all divisions of the pooled values; ties keep their mid-ranks."""
    pooled = np.concatenate([np.asarray(first, float), np.asarray(second, float)])
    ranks, n = stats.rankdata(pooled), len(first)
    result = stats.permutation_test((ranks[:n], ranks[n:]), lambda x, y, axis: x.sum(axis=axis), vectorized=True,
                                    permutation_type="independent", n_resamples=np.inf, alternative="greater")
    return float(result.pvalue)


def clustered_correlation(x, y, clusters, method: str = "spearman", coverage: float = COVERAGE, draws: int = 4000):
    """(correlation, low, high): percentile bootstrap that draws whole clusters with replacement, seed 0. All arguments have length n."""
    x, y = (stats.rankdata(v) if method == "spearman" else np.asarray(v, float) for v in (x, y))
    members = [np.flatnonzero(np.asarray(clusters) == c) for c in dict.fromkeys(clusters)]
    rng, sampled = np.random.default_rng(0), []
    for _ in range(draws):
        rows = np.concatenate([members[i] for i in rng.integers(len(members), size=len(members))])
        if np.ptp(x[rows]) > 0 and np.ptp(y[rows]) > 0:
            sampled.append(np.corrcoef(x[rows], y[rows])[0, 1])
    low, high = np.quantile(sampled, [(1 - coverage) / 2, (1 + coverage) / 2])
    return float(np.corrcoef(x, y)[0, 1]), float(low), float(high)


# ---- one part --------------------------------------------------------------------------------------------------------------------


def regions(part: Mapping) -> tuple[tuple[float, float], tuple[float, float]]:
    """Good and weak region of a part, as closed intervals."""
    if "at_least" in part:
        return (part["at_least"], math.inf), (part.get("limit", part["at_least"]), math.inf)
    if "at_most" in part:
        return (-math.inf, part["at_most"]), (-math.inf, part.get("limit", part["at_most"]))
    return tuple(part["within"]), tuple(part.get("limit", part["within"]))


def _inside(value: float, region: tuple[float, float]) -> bool:
    return region[0] <= value <= region[1]


def _column(part: Mapping, values: Values, key: str = "value") -> dict[str, float]:
    name = part[key]
    if name not in values:
        raise ValueError(f"value {name!r} is missing, got {sorted(values)}: the chapter that decides the claim must write it")
    column = {str(label): float(v) for label, v in values[name].items()}
    for label, v in column.items():
        if math.isnan(v):
            raise ValueError(f"value {name!r} of {label!r} is nan, expected a number (inf for never): mend the measurement")
        seed = re.match(r"(?:.*-)?(\d+)(?:/|$)", label)
        if part["kind"] != "cases" and seed and int(seed[1]) >= FIRST_EXCLUDED_SEED:
            raise ValueError(f"{name!r} of {label!r} is a calibration run, expected seeds below {FIRST_EXCLUDED_SEED}: leave it out")
    return column


def _sorted_out(low: float, high: float, part: Mapping) -> str:
    good, weak = regions(part)
    if _inside(low, good) and _inside(high, good):
        return HOLDS
    return FAILS if high < weak[0] or low > weak[1] else LIMIT


def _say(part: Mapping) -> str:
    good, weak = regions(part)
    return f"asked: {_range(*good)}" + ("" if good == weak else f"; weak: {_range(*weak)}")


def _range(low: float, high: float) -> str:
    return f"at least {low:g}" if math.isinf(high) else f"at most {high:g}" if math.isinf(low) else f"{low:g} to {high:g}"


def _so_far(n: int, what: str) -> str:
    return f"{n or 'no'} {what}{'s' * (n != 1)} so far"


def _few(column: Mapping[str, float], part: Mapping) -> str:
    """Fewer than five runs: agreement of all of them can at most hold with a limit; contradiction by all of them is one."""
    good, weak = regions(part)
    return FAILS if not any(_inside(v, weak) for v in column.values()) else LIMIT


def _median(part, values, _p) -> Verdict:
    column = _column(part, values)
    n, estimate = len(column), _middle(np.sort(list(column.values()))) if column else math.nan
    if n < part.get("min_seeds", 5):
        return Verdict(OPEN, estimate, None, n, f"{_so_far(n, 'run')}, the rule needs {part.get('min_seeds', 5)}")
    good, _ = regions(part)
    passing = sum(_inside(v, good) for v in column.values())
    reason = f"{_say(part)}; {passing} of {n} pass"
    found = median_interval(list(column.values()))
    if found is None:
        return Verdict(_few(column, part), estimate, None, n, f"{reason}; {n} runs allow no interval, so at most a limited verdict")
    verdict = _sorted_out(found[0], found[1], part)
    if verdict == HOLDS and part.get("every") and passing < n:
        verdict, reason = LIMIT, reason + ", the claim says all"
    return Verdict(verdict, estimate, found[:2], n, reason, found[2])


def _shift(part, values, p) -> Verdict:
    first, second = _column(part, values, "value"), _column(part, values, "against")
    n, ratio = min(len(first), len(second)), part.get("scale", "difference") == "ratio"
    if n < part.get("min_seeds", 5):
        return Verdict(OPEN, math.nan, None, n, f"{len(first)} and {_so_far(len(second), 'run')}, the rule needs {part.get('min_seeds', 5)} each")
    a, b = (np.array(list(c.values())) for c in (first, second))
    estimate, low, high, actual = shift_interval(np.log(a), np.log(b)) if ratio else shift_interval(a, b)
    if ratio:
        estimate, low, high = (float(np.exp(v)) for v in (estimate, low, high))
    verdict, reason = _sorted_out(low, high, part), _say(part)
    if "family" in part:
        if p is None:
            raise ValueError(f"part {part['name']!r} belongs to family {part['family']!r}, expected its adjusted p: call judge_all")
        reason += f"; adjusted p = {p:.4g}"
        if verdict == HOLDS and p > 0.05:
            verdict = LIMIT
    return Verdict(verdict, estimate, (low, high), n, reason, actual)


def _correlation(part, values, _p) -> Verdict:
    x, y = _column(part, values, "value"), _column(part, values, "against")
    if set(x) != set(y):
        odd = sorted(set(x) ^ set(y))[:5]
        raise ValueError(f"labels of {part['value']!r} and {part['against']!r} must be the same, they differ in {odd}: measure both for each")
    clusters = [label.split("/")[0] for label in x]
    n = len(set(clusters))
    if n < part.get("min_seeds", 5):
        return Verdict(OPEN, math.nan, None, n, f"{_so_far(n, 'cluster')}, the rule needs {part.get('min_seeds', 5)}")
    if len(set(x.values())) == 1 or len(set(y.values())) == 1:
        return Verdict(UNTESTED, math.nan, None, n, "one side is the same everywhere, so there is nothing to correlate")
    estimate, low, high = clustered_correlation(list(x.values()), [y[k] for k in x], clusters, part.get("method", "spearman"))
    return Verdict(_sorted_out(low, high, part), estimate, (low, high), n, f"{_say(part)}; {len(x)} points in {n} clusters", COVERAGE)


def _cases(part, values, _p) -> Verdict:
    column = _column(part, values)
    if not column:
        return Verdict(UNTESTED, math.nan, None, 0, "no case was measured")
    good, weak = regions(part)
    in_good, in_weak = [k for k, v in column.items() if _inside(v, good)], [k for k, v in column.items() if _inside(v, weak)]
    if part.get("quantifier", "all") == "all":
        verdict = HOLDS if len(in_good) == len(column) else LIMIT if len(in_weak) == len(column) else FAILS
        away = {k: max(good[0] - v, v - good[1]) for k, v in column.items()}
        shown = max(away, key=away.get)
    else:
        verdict = HOLDS if in_good else LIMIT if in_weak else FAILS
        shown = min(column, key=lambda k: max(good[0] - column[k], column[k] - good[1]))
    return Verdict(verdict, column[shown], None, len(column), f"{_say(part)}; {len(in_good)} of {len(column)} cases pass; shown: {shown}")


def _untestable(part, _values, _p) -> Verdict:
    return Verdict(UNTESTED, math.nan, None, 0, part["reason"])


KINDS = {"median": _median, "shift": _shift, "correlation": _correlation, "cases": _cases, "untestable": _untestable}


# ---- claims ----------------------------------------------------------------------------------------------------------------------


def judge(claim: Mapping, values: Values, adjusted: Mapping[str, float] | None = None) -> Verdict:
    """Verdict of one claim. `adjusted`: adjusted p by part name, for parts of the family. Raises ValueError on missing or nan values.

    Estimate, interval and n are those of the part that decides (the first with the worst verdict that counts, else the first).
    """
    judged = [(part, KINDS[part["kind"]](part, values, (adjusted or {}).get(part["name"]))) for part in claim["part"]]
    for part in claim["part"]:
        gate = part.get("gate")
        if gate and np.median([*_column({**part, "value": gate["value"]}, values).values()]) < gate["at_least"]:
            reason = f"the gate failed: median of {gate['value']} is below {gate['at_least']:g}"
            return Verdict(UNTESTED, math.nan, None, 0, reason, parts=tuple((p["name"], v) for p, v in judged))
    parts = tuple((part["name"], verdict) for part, verdict in judged)
    for wanted in (FAILS, UNTESTED, OPEN):
        for part, found in judged:
            if found.verdict == wanted and not part.get("qualifies"):
                return Verdict(wanted, found.estimate, found.interval, found.n, f"{part['name']}: {found.reason}", found.coverage, parts)
    for part, found in judged:
        if found.verdict != HOLDS:
            return Verdict(LIMIT, found.estimate, found.interval, found.n, f"{part['name']}: {found.reason}", found.coverage, parts)
    part, found = judged[0]
    return Verdict(HOLDS, found.estimate, found.interval, found.n, f"{part['name']}: {found.reason}", found.coverage, parts)


def adjust(ledger: Ledger, values: Mapping[str, Values]) -> dict[str, dict[str, float]]:
    """Benjamini-Hochberg over the one declared family, always of its declared size: {claim id: {part name: adjusted p}}.

    A member with fewer runs than its rule needs counts with p = 1. The adjusted p of the others is then an upper bound of what it will be.
    """
    members = [(c["id"], part) for c in ledger.claims.values() for part in c["part"] if "family" in part]
    raw = []
    for name, part in members:
        first, second = (list(_column(part, values[name], key).values()) if name in values else [] for key in ("value", "against"))
        raw.append(one_sided_p(first, second) if min(len(first), len(second)) >= part.get("min_seeds", 5) else 1.0)
    out: dict[str, dict[str, float]] = {}
    for (name, part), p in zip(members, stats.false_discovery_control(raw, method="bh"), strict=True):
        out.setdefault(name, {})[part["name"]] = float(p)
    return out


def judge_all(ledger: Ledger, values: Mapping[str, Values]) -> dict[str, Verdict]:
    """Verdicts of every claim; `values` by claim id. Claims whose parts are all untestable need none. Names the claims that lack values."""
    needs = [c["id"] for c in ledger.claims.values() if any(part["kind"] != "untestable" for part in c["part"])]
    missing = [name for name in needs if name not in values]
    if missing:
        raise ValueError(f"claims without values: {missing}: run the chapters that decide them")
    adjusted = adjust(ledger, values)
    return {name: judge(claim, values.get(name, {}), adjusted.get(name)) for name, claim in ledger.claims.items()}
