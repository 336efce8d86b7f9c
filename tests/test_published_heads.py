"""Statistics of the released tables: against the published ones, against counting by hand, and against the tables when they are here."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from rope_heads import papers, published_heads
from rope_heads.published_heads import FILES, ROPE, gap, percentiles, pick, separation_p, strongest, top_percentile


@pytest.fixture(scope="module")
def table():
    return published_heads.frozen()


def test_the_frozen_statistics_are_those_of_the_released_tables(table):
    tables = papers.released_tables(download=False)
    if tables is None:
        pytest.skip("the released tables are not here: set ROPE_HEADS_TABLES to a folder that holds them")
    pd.testing.assert_frame_equal(published_heads.statistics(tables), table, rtol=0, atol=1e-12)


def test_the_headline_percentiles_and_gaps_are_the_published_ones(table):
    published = papers.table("p2_models").set_index("model")
    assert list(published.index) == list(FILES) and set(published.index[published["positions"] == "rope"]) == set(ROPE)
    for measure in ("d_head", "dir_frac", "imag_mass"):
        found = pick(table, "percentile", measure=measure, by="previous", k=5)
        assert (found - published[f"{measure}_percentile"]).abs().max() <= 0.005 + 1e-9, measure
    found = pick(table, "percentile", measure="d_head", by="induction", k=5)
    assert (found - published["induction_d_head_percentile"]).abs().max() <= 0.005 + 1e-9
    assert (pick(table, "partial correlation") - published["partial_correlation"]).abs().max() <= 0.005 + 1e-9
    for row in papers.table("p2_gaps").itertuples():
        assert gap(pick(table, "percentile", measure="d_head", by="previous", k=row.k)) == pytest.approx(row.gap, abs=0.005)


def test_ablations_nulls_and_checkpoints_are_the_published_ones(table):
    of = {name: papers.published_value("P2", name) for name in ("null_dir_frac_gpt2", "null_d_head_gpt2", "gpt2_loss_ratio", "gpt2_sum_loss_without_symmetric")}
    assert pick(table, "null mean", measure="dir_frac").iloc[0] == pytest.approx(of["null_dir_frac_gpt2"], abs=5e-5)
    assert pick(table, "null mean", measure="d_head").iloc[0] == pytest.approx(of["null_d_head_gpt2"], abs=5e-5)
    assert pick(table, "ratio of losses").iloc[0] == pytest.approx(of["gpt2_loss_ratio"], abs=0.005)
    assert pick(table, "sum of losses without M_S").iloc[0] == pytest.approx(of["gpt2_sum_loss_without_symmetric"], abs=0.005)
    phase = papers.table("p2_phase_ablation").set_index("model")
    assert (pick(table, "phase: largest loss") - phase["loss_increase"]).abs().max() <= 5e-4
    assert (pick(table, "phase: layer of the largest") == phase["layer"]).all() and (pick(table, "phase: head of the largest") == phase["head"]).all()
    assert (pick(table, "phase: previous-token rank of the largest") == phase["previous_token_rank"]).all()
    steps = papers.table("p2_checkpoints").set_index(["step", "model"])
    rise = steps.loc[1000, "rope_imag_frac_percentile"] - steps.loc[512, "rope_imag_frac_percentile"]
    assert (pick(table, "checkpoints: percentile rise 512 to 1000") - rise).abs().max() <= 0.011


def test_percentiles_and_the_strongest_heads_by_hand():
    values, behaviour = [0.3, 0.1, 0.2, 0.2, 0.9], [0.0, 5.0, 7.0, 6.0, 1.0]
    assert percentiles(values).tolist() == [0.8, 0.2, 0.5, 0.5, 1.0]
    assert strongest(behaviour, 2).tolist() == [2, 3]
    assert top_percentile(values, behaviour, 3) == 0.5 and top_percentile(values, behaviour, 5) == 0.5
    assert top_percentile([1, 2, 3, 4], [4, 3, 2, 1], 2) == pytest.approx(0.375)


def test_partial_correlation_takes_the_third_column_out():
    rng = np.random.default_rng(0)
    given, clusters = rng.normal(size=400), np.repeat(np.arange(20), 20)
    left, right = 3 * given + rng.normal(size=400), -2 * given + rng.normal(size=400)
    found, low, high = published_heads.partial_correlation(left, right, given, clusters)
    assert abs(found) < 0.12 and low < found < high and stats.spearmanr(left, right).statistic < -0.7
    shared = rng.normal(size=400)
    assert published_heads.partial_correlation(left + shared, right + shared, given, clusters)[1] > 0.3


def test_p_of_complete_separation_is_one_over_the_number_of_choices():
    one, two = separation_p(3, 4)
    assert one == pytest.approx(1 / math.comb(7, 3)) and two == pytest.approx(2 / math.comb(7, 3))
    assert separation_p(2, 4)[0] == pytest.approx(1 / math.comb(6, 2))


def test_pick_names_what_it_lacks(table):
    with pytest.raises(ValueError, match="'percentile' with {'k': 4} must name one value a model, got 0"):
        pick(table, "percentile", k=4)
    with pytest.raises(ValueError, match="must name one value a model"):
        pick(table, "percentile", k=5)


def test_gap_is_positive_only_when_the_groups_are_apart():
    values = pd.Series({model: 0.2 for model in FILES} | {model: 0.7 for model in ROPE})
    assert gap(values) == pytest.approx(0.5)
    values["BLOOM-1b1"] = 0.8
    assert gap(values) == pytest.approx(-0.1)


def test_percentiles_of_too_few_heads_or_of_gaps_are_refused():
    values = np.arange(6.0)
    for k in (0, -1, 7, np.nan):
        with pytest.raises(ValueError, match="k be 1 to their number 6"):
            top_percentile(values, values, k)
    for gaps in (np.array([1, np.nan]), np.zeros(0), np.zeros((2, 2))):
        with pytest.raises(ValueError, match="values must be finite numbers .head."):
            percentiles(gaps)
    with pytest.raises(ValueError, match="behaviour must hold finite numbers"):
        strongest(np.full(3, np.nan), 1)
    with pytest.raises(ValueError, match="of the same heads, got 5 and 6"):
        top_percentile(values[:5], values, 2)
    with pytest.raises(ValueError, match="both groups must hold a model, got 0 and 4"):
        separation_p(0, 4)
