"""The scorecard: every claim in one table, from frozen values that a build must meet again."""

import json
import math
import os
import re

import pytest
from bs4 import BeautifulSoup

from rope_heads import artefacts, scorecard, verdicts
from rope_heads.artefacts import data_folder, repository
from rope_heads.claims import OPEN, UNTESTED, judge, read_ledger

LEDGER = read_ledger()
FROZEN = scorecard.frozen_values()
ROWS = scorecard.table(FROZEN)
CHAPTERS_IN_BOOK = {path.stem for path in (repository() / "book").glob("*.ipynb")}
TABLE = {"mechanistic_metrics": "runs/paper/mechanism.parquet", "training_dynamics": "runs/paper/accuracy.parquet", "rope_fingerprints": "runs/toys/formation.parquet",
         "length_generalization": "runs/lengths/lengths.parquet"}  # what a claim of the chapter that is still open waits for  # fmt: skip
TABLE_OF_CLAIM = {"own-shortcut-used": "runs/letter_12/audit.parquet", "own-debiased-letter": "runs/letter_12/lengths.parquet",
                  "own-number-64": "runs/number_64/lengths.parquet", "own-length-learnt": "runs/interventions/lengths.parquet",
                  "own-other-shapes": "runs/variants/heads.parquet"}  # fmt: skip

FAST_CHANGED = {"own-letter-dilution": ("change", "sharper"), "own-copies-by-value": ("kind", "own/repeat"),
                "own-number-window": ("change", "windowed")}  # rows of recipe fast that decide; fmt: skip


def lacks_data(name: str, chapter: str) -> bool:
    path = data_folder() / TABLE_OF_CLAIM.get(name, TABLE[chapter])
    if name == "P1-theory-explains-length" and path.exists():  # ranks within both recipes
        return set(artefacts.read_parquet(path)[0].recipe) < {"paper", "fast"}
    if name in FAST_CHANGED and path.exists():
        table = artefacts.read_parquet(path)[0]
        return not ((table.recipe == "fast") & (table[FAST_CHANGED[name][0]] == FAST_CHANGED[name][1])).any()
    if chapter == "rope_fingerprints" and path.exists():  # its open claims wait for arms of the toy models
        return not set(LEDGER.claims[name]["runs"]["tasks"]) <= set(artefacts.read_parquet(path)[0].arm)
    return not path.exists()


def test_every_claim_of_the_ledger_has_a_row_and_a_verdict():
    assert list(ROWS.index) == list(LEDGER.claims)
    assert set(ROWS.verdict) <= set(scorecard.ORDER)
    assert int(scorecard.tally(ROWS).to_numpy().sum()) == len(LEDGER.claims)


def test_only_claims_whose_chapter_or_table_is_missing_are_open():
    for name, row in ROWS[ROWS.verdict == scorecard.OPEN].iterrows():
        written = row.chapter in CHAPTERS_IN_BOOK
        few = "so far, the rule needs" in row.reason
        assert few or not written or lacks_data(name, row.chapter), f"{name} has its data but no frozen value"
        assert row.reason and (few or row.ours == [])


def test_an_open_claim_says_how_many_seeds_it_has_and_leads_to_its_cell():
    name = "P1-dynamics-number-staged"
    few = {part["value"]: {"0": 0.4, "1": 0.5} for part in LEDGER.claims[name]["part"]}
    row = scorecard.table(FROZEN | {name: few}).loc[[name]]
    assert row.verdict.item() == scorecard.OPEN and row.reason.item().endswith("2 runs so far, the rule needs 5")
    assert row.ours.item()[0].endswith("2 of 8 seeds") and f"#{scorecard.anchor(name)}" in scorecard.to_html(row)
    whole = {part["value"]: {str(seed): 0.4 for seed in range(8)} for part in LEDGER.claims[name]["part"]}
    assert scorecard.table(FROZEN | {name: whole}).loc[name, "ours"][0].endswith("8 seeds")


def test_judged_rows_agree_with_the_rules():
    for name, values in FROZEN.items():
        if not any("family" in part for part in LEDGER.claims[name]["part"]):
            assert ROWS.verdict[name] == judge(LEDGER.claims[name], values).verdict


def test_the_last_quick_build_recorded_the_frozen_values():
    report = repository() / "_build" / "report.json"
    built = json.loads(report.read_text()) if report.is_file() else {}
    if not built.get("ok") or built["mode"] != "quick" or {r["chapter"] for r in built["chapters"]} != set(CHAPTERS_IN_BOOK):
        assert not os.environ.get("CI"), "run `make book` first"
        pytest.skip("no whole build in mode quick: run `make book` first")
    done = [record["chapter"] for record in built["chapters"]]
    recorded = {claim: values for name in done for claim, values in verdicts.recorded(chapter=name).items()}
    frozen = {claim: values for name in done for claim, values in verdicts.recorded(data_folder() / "values", name).items()}
    assert frozen and scorecard.differences(recorded, frozen) == []


def test_a_changed_or_missing_value_is_found():
    name = "P1-theorem-3.1"
    changed = {value: {label: v + 1e-3 for label, v in column.items()} for value, column in FROZEN[name].items()}
    assert scorecard.differences({name: changed}, {name: FROZEN[name]})[0].startswith(f"{name}: ")
    assert scorecard.differences({}, {name: FROZEN[name]}) == [f"{name} is frozen but was not recorded"]
    assert scorecard.differences({name: FROZEN[name]}, {}) == [f"{name} is not frozen"]
    nearly = {value: {label: v * (1 + 1e-9) for label, v in column.items()} for value, column in FROZEN[name].items()}
    assert scorecard.differences({name: nearly}, {name: FROZEN[name]}) == []
    fewer = {value: dict(list(column.items())[1:]) for value, column in FROZEN[name].items()}
    assert scorecard.differences({name: fewer}, {name: FROZEN[name]})


def test_inf_in_frozen_values_is_never():
    assert scorecard.same({"x": {"0": math.inf}}, {"x": {"0": math.inf}}) and not scorecard.same({"x": {"0": math.inf}}, {"x": {"0": 1.0}})
    assert scorecard.number(math.inf) == "never"


def test_a_member_of_a_family_without_runs_is_open_alone():
    family = [name for name, claim in LEDGER.claims.items() if any("family" in part for part in claim["part"])]
    needed = {name: {key: {str(seed): 100.0 + seed for seed in range(8)} for key in verdicts._needed(LEDGER.claims[name])} for name in family}
    assert scorecard.OPEN not in {verdicts.judge_known(LEDGER, needed)[name].verdict for name in family}
    needed.pop(family[0])
    assert [name for name in family if verdicts.judge_known(LEDGER, needed)[name].verdict == scorecard.OPEN] == family[:1]


def test_the_table_shows_what_was_measured_and_where():
    page = BeautifulSoup(scorecard.to_html(ROWS), "html.parser")
    assert len(page.select("tbody tr")) == len(ROWS)
    for name, row in ROWS.iterrows():
        cells = page.find("tr", id=name).find_all("td")
        assert row.claim in cells[0].get_text() and cells[3].select_one(".verdict").text == row.verdict + (f": {row.limit}" if row.limit else "") and row.command in cells[3].get_text()
        links = [tag["href"] for tag in cells[3].find_all("a")]
        assert links == ([f"{row.chapter}.html#{scorecard.anchor(name)}"] if row.ours or row.verdict != scorecard.OPEN else [])
        assert all(line in cells[2].get_text() for line in row.ours)
        assert row.note in cells[3].get_text()


@pytest.mark.parametrize("parts, values, word", [
    ([{"at_least": 0.9, "limit": 0.5}], [[0.8] * 5], "weaker than asked"),
    ([{"at_least": 0.9, "limit": 0.5}], [[0.7, 0.8, 0.9, 0.95, 1]], "undecided"),
    ([{"at_least": 0.9, "limit": 0.5, "every": True}], [[0.8, *[1] * 9]], "not every run"),
    ([{"at_least": 0.9, "limit": 0.5, "min_seeds": 3}], [[1, 1, 1]], "few runs"),
    ([{"at_least": 0.9, "limit": 0.5}, {"at_least": 1, "qualifies": True}], [[1] * 5, [0] * 5], "a part fails"),
    ([{"at_least": 0.9, "limit": 0.5}, {"at_least": 1, "qualifies": True}], [[1] * 5, []], "unfinished"),
    ([{"at_least": 0.9, "limit": 0.5}, {"at_least": 0.9, "limit": 0.5}], [[0.7, 0.8, 0.9, 0.95, 1], [0.8] * 5], "weaker than asked"),
    ([{"at_least": 0.9, "limit": 0.5}], [[1] * 5], ""),
    ([{"at_least": 0.9, "limit": 0.5}], [[0] * 5], ""),
])  # fmt: skip
def test_a_limit_says_of_which_kind_it_is(parts, values, word):
    claim = {"part": [{"name": f"p{i}", "kind": "median", "value": f"v{i}", **part} for i, part in enumerate(parts)]}
    verdict = judge(claim, {f"v{i}": {str(seed): float(v) for seed, v in enumerate(column)} for i, column in enumerate(values)})
    found, part = scorecard.kind_of_limit(verdict, claim)
    assert found == word and (part == "") == (word == "") and (not word or word in scorecard.LIMITS)


def test_anchors_are_plain_selectors():
    """The theme looks for the target of a link with querySelector("#..."), where a dot begins a class."""
    names = [scorecard.anchor(name) for name in LEDGER.claims]
    assert len(set(names)) == len(names) and all(re.fullmatch(r"[A-Za-z][\w-]*", name) for name in names)


def test_text_of_the_table_is_escaped():
    rows = ROWS.head(1).assign(claim="<script>alert(1)</script>", where="<b>", published="a < b")
    text = scorecard.to_html(rows)
    assert "<script>" not in text and "&lt;script&gt;" in text and "a &lt; b" in text


def test_only_chapters_of_the_book_are_frozen(tmp_path, monkeypatch):
    monkeypatch.setattr(scorecard, "data_folder", lambda: tmp_path / "data")
    for name in ("theory", "left_over"):
        (tmp_path / f"{name}.json").write_text("{}")
    assert scorecard.freeze(tmp_path, ["theory", "tasks"]) == ["theory"]
    assert [path.name for path in (tmp_path / "data" / "values").iterdir()] == ["theory.json"]


def test_no_verdict_without_an_interval_or_cases():
    """Sampled parts carry an interval, or say that too few runs allow none and then reach a limit at most; everything else is a listed case."""
    for name, verdict in verdicts.judge_known(LEDGER, FROZEN).items():
        for part, found in zip(LEDGER.claims[name]["part"], dict(verdict.parts).values(), strict=False):
            if part["kind"] in ("cases", "untestable") or found.verdict in (UNTESTED, OPEN):
                continue
            assert found.interval is not None or (found.verdict != "holds" and "no interval" in found.reason), name


def test_commands_name_what_exists():
    rules = (repository() / "Snakefile").read_text()
    for command in set(ROWS.command):
        if command.startswith("snakemake"):
            target = command.split()[-1]
            assert f"rule {target}:" in rules or f'"{target}": {{"recipe"' in rules, command
        else:
            assert command.startswith("rope-heads ")
    assert ROWS.command["own-planes-causal"] == "snakemake -c2 paper", "the chapter on long inputs reads runs/paper/tests.parquet for it"
