"""Answers: the file, the plan, what is counted, and that nothing a model wrote executes. The frozen answers are read whole."""

import datetime
import html.parser
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from rope_heads import language_models as lm
from rope_heads import one_hop, papers

FROZEN = sorted(lm.folder().glob("*.jsonl"))


def answers(path, texts, model="m", **where):
    items = lm.plan(windows=[12], data_sets=1, **where)[: len(texts)]
    lm.append(path, [lm.record(item, model, "2026-11-30", text or item.answer, 100, 2) for item, text in zip(items, texts)])
    return items


def test_the_plan_counts_what_the_paper_asks():
    items = lm.plan()
    assert len(items) == 11 * 2 * 200 and [i.window for i in items] == sorted(i.window for i in items)
    assert {i.task for i in lm.plan(settings=["front"])} == {"number"}
    with pytest.raises(ValueError, match="nothing to ask"):
        lm.plan(tasks=["letter"], settings=["front"])


def test_an_answer_cut_off_by_a_crash_is_dropped_and_the_next_one_is_whole(tmp_path):
    path = tmp_path / "m.jsonl"
    answers(path, ["a", "b"])
    with open(path, "ab") as file:
        file.write(b'{"model": "m", "answer": "cut')
    assert len(lm.read(path)) == 2
    answers(path, ["c"])
    assert [r["answer"] for r in lm.read(path)] == ["a", "b", "c"]


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "m.jsonl"
    answers(path, ["a", "b"])
    path.write_text(path.read_text().replace('"answer"', '"reply"', 1))
    with pytest.raises(ValueError, match="line 1 lacks answer"):
        lm.read(path)


def test_what_is_right_follows_from_the_item_not_from_the_file(tmp_path):
    items = answers(tmp_path / "m.jsonl", ["", "wrong", "several words", ""])
    rows = lm.table(lm.read(tmp_path / "m.jsonl"))
    assert rows.right.tolist() == [1, 0, 0, 1] and rows.kind.tolist() == ["right", "outside", "several", "right"]
    assert rows.distance.tolist() == [i.distance for i in items]
    assert lm.accuracy(rows).accuracy.tolist() == [0.5]
    stale = [{**r, "prompt": "0" * 16} for r in lm.read(tmp_path / "m.jsonl")]
    assert lm.table(stale).empty, "an answer to another prompt must not be scored against this item"


def test_names_of_models_stay_inside_the_folder(tmp_path):
    for name in ("openai/gpt-5.4", "../../evil", "a\\b", "x:y*?"):
        assert lm.file_of(name, tmp_path).parent == tmp_path
    assert lm.file_of("openai/gpt-5.4", tmp_path).name == "openai_gpt-5.4.jsonl"


def test_the_guess_of_tokens_is_above_a_real_tokenizer():
    """SmolLM2 cuts a letter+digit word into two tokens and every digit into one; measured prompts lie in the frozen file."""
    for path in FROZEN:
        for r in lm.read(path)[::40]:
            item = one_hop.items(r["task"], r["window"], r["data_set"], r["setting"])[r["number"]]
            assert r["input_tokens"] <= lm.tokens_at_most(item)


def test_the_screening_rule_on_the_published_table():
    published = papers.published_language_models()
    assert lm.screened(published, "letter") == ["Claude Sonnet 3.7", "GPT 5.4", "GPT 5.5"]
    assert lm.screened(published, "number") == ["GPT 5.4"]


@pytest.mark.parametrize("task, window", [("number", 12), ("number", 300), ("letter", 12), ("letter", 300)])
def test_guessing_a_word_of_the_window(task, window):
    rng, right = np.random.default_rng(0), []
    for seed in range(50):
        for item in one_hop.items(task, window, seed):
            right.append(rng.choice(item.words[:-1]) == item.answer)
    expected = lm.guessing(task, window)
    assert abs(np.mean(right) - expected) < 4 * np.sqrt(expected * (1 - expected) / len(right))


def test_the_lonely_word_needs_no_query():
    rng = np.random.default_rng(0)

    def rate(setting, window):
        return np.mean([lm.lonely_word(i, rng) == i.answer for seed in range(5) for i in one_hop.items("letter", window, seed, setting)])

    assert rate("plain", 300) > 0.97 and rate("plain", 12) < 0.3 and rate("twice", 300) < 0.03


HOSTILE = ["<script>window.hit = 1</script>", "<img src=x onerror='window.hit = 1'>", "$\\href{javascript:window.hit=1}{x}$", "\x1b[31mred\x07", "</code></td><b>",
           "a\u202eb", "`<a href='javascript:window.hit=1'>x</a>`", "\\(x^2\\)"]  # fmt: skip


class Tags(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text = [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text.append(data)


def test_answers_are_shown_as_text():
    parsed = Tags()
    parsed.feed(lm.answers_html([[text, "x"] for text in HOSTILE], ["answer", "<i>"]))
    assert {tag for tag, _ in parsed.tags} == {"table", "thead", "tbody", "tr", "th", "td", "code"}
    assert all("mathjax_ignore" in attributes["class"] for tag, attributes in parsed.tags if tag in ("table", "code"))
    assert HOSTILE[0] in parsed.text and "\\x1b[31mred\\x07" in parsed.text and "a\\u202eb" in parsed.text


def test_a_browser_executes_nothing_in_answers(tmp_path):
    sync = pytest.importorskip("playwright.sync_api")
    page_file = tmp_path / "page.html"
    page_file.write_text("<meta charset=utf-8><script>window.hit = 0</script>" + lm.answers_html([[text] for text in HOSTILE], ["answer"]))
    browser_path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser_path is None:
        pytest.skip("no Chromium on this machine")
    with sync.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(page_file.as_uri())
        page.wait_for_timeout(300)
        assert page.evaluate("window.hit") == 0 and page.locator("td").count() == len(HOSTILE)
        browser.close()


@pytest.mark.parametrize("path", FROZEN, ids=lambda p: p.stem)
def test_frozen_answers_belong_to_the_items_that_the_package_makes(path):
    records = lm.read(path)
    rows = lm.table(records)
    assert len(rows) == len(records) > 0, "a prompt or a generator changed: ask again, or undo the change"
    assert not pd.DataFrame(records).duplicated(["model", "prompt"]).any()
    for r in records:
        datetime.date.fromisoformat(r["date"])
        assert set(r) - set(lm.FIELDS) <= {"rank", "candidates", "top", "near_rank"} and len(r["answer"]) <= lm.LONGEST_ANSWER
        if "rank" in r:
            words = set(one_hop.items(r["task"], r["window"], r["data_set"], r["setting"])[r["number"]].words[:-1])
            assert 1 <= r["rank"] <= r["candidates"] == len(words) and r["top"] in words
            assert 1 <= r.get("near_rank", 1) <= r["candidates"]
    assert all(json.dumps(r, ensure_ascii=True).isascii() for r in records)


def test_the_model_of_limited_reach_is_what_such_a_solver_scores():
    rng = np.random.default_rng(0)
    items = [item for seed in range(50) for item in one_hop.items("number", 48, seed)]
    right = [item.distance <= 10 or rng.choice(item.words[:-1]) == item.answer for item in items]
    assert abs(np.mean(right) - lm.within_reach(10, 48)) < 4 * np.sqrt(0.2 / len(items))
    windows = np.array(one_hop.WINDOWS)
    reach, error = lm.fitted_reach(windows, lm.within_reach(6.3, windows))
    assert abs(reach - 6.3) < 0.051 and error < 1e-9


def test_the_registered_difference_counts_whole_data_sets_only():
    rows = pd.DataFrame([
        {"task": t, "setting": "plain", "window": w, "data_set": d, "right": int(t == "letter" and k < 30 + d)}
        for t in one_hop.TASKS for w in one_hop.WINDOWS for d in range(3) for k in range(40) if not (d == 2 and w == 300 and k == 39)
    ])  # fmt: skip
    found = lm.difference_by_data_set(rows)
    assert found.index.tolist() == [0, 1] and found.tolist() == pytest.approx([30 / 40, 31 / 40])


def test_words_within_reach_of_a_solver_whatever_its_competence_by_distance():
    """Right with probability 1/distance at each distance: the sum over distances is the harmonic number."""
    rng = np.random.default_rng(0)
    for window in (12, 48):
        items = [item for seed in range(100) for item in one_hop.items("number", window, seed)]
        right = [rng.random() < 1 / i.distance or rng.choice(list("abcdefghijklmnopqrstuvwxyz")) == i.answer for i in items]
        harmonic = sum(1 / d for d in range(1, window + 1))
        assert abs(lm.effective_reach(window, np.mean(right)) - harmonic) < 4 * window * np.sqrt(np.var(right) / len(items))


def test_the_chapter_executes_without_the_extra():
    """All code cells but the set-up cell, in a process that cannot import what the extra brings."""
    chapter = Path(__file__).parents[1] / "book" / "language_models.ipynb"
    cells = [c["source"] for c in json.loads(chapter.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]
    sources = ["".join(s) if isinstance(s, list) else s for s in cells][1:]
    program = (
        "import importlib.util, json, sys, matplotlib\nmatplotlib.use('Agg')\n"
        "extra = {'inspect_ai', 'openai', 'transformers', 'gguf', 'accelerate'}\nfind = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name in extra else find(name, *more)\n"
        "sys.modules.update(dict.fromkeys(extra))\nspace = {}\n"
        "for source in json.load(sys.stdin):\n    exec(source, space)\n    space['plt'].close('all') if 'plt' in space else None\n"
        "import contextlib, io\nchecks, lm = space['checks'], space['lm']\nwith contextlib.redirect_stdout(io.StringIO()):\n"
        "    found = [checks.equal('x', n, space['bar']) for n in (8, 13, 15)]  # the mean of a guesser, one too few, one too many\n"
        "    found += [checks.close('x', [0.5 + 0.5 * lm.guessing('number', n) for n in (w - 6 for w in (12, 48, 300))], space['expected'], tolerance=0.015)]\n"
        "assert not any(found), found\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], input=json.dumps(sources), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert lm.INSTALL in done.stdout and done.stdout.count("right:") == 3


def written(folder, **changes):
    """A file of three answers, the second one changed."""
    records = [lm.record(item, "m", "2026-01-01", item.answer, 1, 1, rank=1, candidates=12) for item in one_hop.items("letter", 12, 0)[:3]]
    records[1] |= changes
    (folder / "m.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder / "m.jsonl", records


@pytest.mark.parametrize("name, value", [
    ("model", 5), ("task", ["letter"]), ("task", "x"), ("setting", None), ("setting", "words"), ("window", "12"), ("window", 12.0), ("window", 1), ("window", 10**6),
    ("data_set", -1), ("number", -1), ("number", None), ("prompt", ["a"]), ("answer", 5), ("answer", None), ("input_tokens", "x"), ("output_tokens", -4),
    ("rank", "x"), ("candidates", 1), ("near_rank", 0.5), ("near_rank", "x"), ("near_rank", True),
])  # fmt: skip
def test_a_line_with_a_value_of_another_kind_is_refused_by_its_number(tmp_path, name, value):
    path, _ = written(tmp_path, **{name: value})
    with pytest.raises(ValueError, match=r"m.jsonl, line 2 .*(restore the file or delete the line)"):
        lm.read(path)


@pytest.mark.parametrize("line", [b"\xff\xfe\x00", b"[" * 100_000, b"7", b"null", b"{}", b""])
def test_a_line_that_is_no_answer_is_refused_by_its_number(tmp_path, line):
    path, _ = written(tmp_path)
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(ValueError, match="m.jsonl, line 4 lacks"):
        lm.read(path)


def test_of_several_answers_to_one_prompt_the_first_counts(tmp_path):
    """Two programs that asked at the same time, or `inspect eval --epochs`: a cell keeps its number of answers."""
    _, records = written(tmp_path)
    again = [{**records[0], "answer": "wrong"}, records[1], {**records[2], "model": "another"}]
    found = lm.table([*records, *again])
    assert found.model.tolist() == ["m"] * 3 + ["another"] and found.right.tolist() == [1] * 4


def test_half_a_character_in_an_answer_does_not_end_the_chapter(tmp_path):
    written(tmp_path, answer="x\ud800\x00")
    assert lm.answers(tmp_path).answer[1] == "x?\x00"
    assert lm.record(one_hop.items("letter", 12, 0)[0], "m", "d", "\udfff", 1, 1)["answer"] == "?"
