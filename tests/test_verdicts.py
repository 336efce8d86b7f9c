import json
import math

import numpy as np
import pytest

from rope_heads import claims, verdicts
from rope_heads.claims import FAILS, HOLDS, judge, read_ledger

IRRATIONAL = "P1-theta-irrational"


def test_values_are_kept_by_chapter_and_come_back(tmp_path):
    written = verdicts.record(IRRATIONAL, {"gap": {"theta = 1/sqrt 2": 0.25, "theta = 2 pi/5": 0}}, tmp_path)
    verdicts.record("P1-theorem-3.2", {"excess": {"index": math.inf, "retrieval": -1.0}}, tmp_path)
    verdicts.record(IRRATIONAL, {"gap": {"theta = e/4": 1e-5}}, tmp_path)  # a second run replaces the first
    assert written == {"gap": {"theta = 1/sqrt 2": 0.25, "theta = 2 pi/5": 0.0}}
    assert [path.name for path in tmp_path.iterdir()] == ["theory.json"]
    assert verdicts.recorded(tmp_path) == verdicts.recorded(tmp_path, "theory") == {
        IRRATIONAL: {"gap": {"theta = e/4": 1e-5}},
        "P1-theorem-3.2": {"excess": {"index": math.inf, "retrieval": -1.0}},
    }
    content = json.loads((tmp_path / "theory.json").read_text(), parse_constant=pytest.fail)  # strict JSON: no Infinity
    assert content["P1-theorem-3.2"]["excess"]["index"] == "inf"
    assert verdicts.recorded(tmp_path, "scorecard") == {} and verdicts.recorded(tmp_path / "nothing") == {}


def test_what_was_recorded_can_be_judged(tmp_path):
    for gap, expected in ((1e-5, HOLDS), (0.0, FAILS)):
        verdicts.record(IRRATIONAL, {"gap": {"theta": gap}}, tmp_path)
        assert judge(read_ledger().claims[IRRATIONAL], verdicts.recorded(tmp_path)[IRRATIONAL]).verdict == expected


def test_table_has_a_row_a_claim_with_its_verdict():
    table = verdicts.verdict_table({IRRATIONAL: {"gap": {"a": 1.0, "b": 0.0}}, "own-theorem-3.2-minimum": {"excess": {"index": 0}, "printed": {"r": 1}}})
    assert list(table.index) == [IRRATIONAL, "own-theorem-3.2-minimum"]
    assert list(table["verdict"]) == ["does not hold", "holds with a limit"]
    assert table.loc[IRRATIONAL, "source"].startswith("P1") and table.loc["own-theorem-3.2-minimum", "source"] == "this book"
    assert "retrieval as printed" in table.loc["own-theorem-3.2-minimum", "decided by"]


def test_every_claim_of_the_ledger_can_name_its_values():
    for claim in read_ledger().claims.values():
        testable = any(part["kind"] != "untestable" for part in claim["part"])
        assert bool(verdicts._needed(claim)) == testable, claim["id"]


def test_nothing_is_written_without_a_checkout(monkeypatch):
    monkeypatch.setattr(verdicts, "repository", lambda: None)
    assert verdicts.record(IRRATIONAL, {"gap": {"theta": 1}}) == {"gap": {"theta": 1.0}}
    assert verdicts.recorded() == {}


def test_errors(tmp_path):
    with pytest.raises(ValueError, match="claim_id must be one of the ledger's, got 'P9'"):
        verdicts.record("P9", {}, tmp_path)
    with pytest.raises(ValueError, match=r"must be named \['gap'\], got \['gaps'\]"):
        verdicts.record(IRRATIONAL, {"gaps": {"theta": 1}}, tmp_path)
    with pytest.raises(ValueError, match="got nan for gap of 'theta'"):
        verdicts.record(IRRATIONAL, {"gap": {"theta": math.nan}}, tmp_path)
    assert not list(tmp_path.iterdir())


def test_members_of_a_family_do_not_wait_for_each_other():
    ledger = claims.read_ledger()
    family = [c["id"] for c in ledger.claims.values() if any("family" in part for part in c["part"])]
    rng = np.random.default_rng(0)

    def column(key):
        return {str(seed): 0.0 if key == "asymmetry" else float(rng.integers(40, 100)) for seed in range(5)}

    values = {name: {part[key]: column(part[key]) for part in ledger.claims[name]["part"] for key in ("value", "against") if key in part} for name in family}
    assert (verdicts.verdict_table(values).verdict != claims.OPEN).all() and "adjusted p" in verdicts.verdict_table(values)["decided by"].iloc[0]
    for gap in (values | {family[-1]: {name: {} for name in values[family[-1]]}}, {k: v for k, v in values.items() if k != family[-1]}):
        judged = verdicts.judge_known(ledger, gap)
        assert judged[family[-1]].verdict == claims.OPEN and "not all made and measured" in judged[family[-1]].reason
        assert all(judged[name].verdict != claims.OPEN for name in family[:-1])
