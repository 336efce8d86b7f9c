"""Asking over real HTTP on loopback: servers that misbehave, limits, resuming, secrets. No call leaves the machine."""

import io
import json
import subprocess
import sys
import threading
import time

import pytest

from rope_heads import asking, loopback, one_hop
from rope_heads import language_models as lm

pytest.importorskip("inspect_ai")
pytest.importorskip("openai")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inspect-ai's own use of its retry library
MODEL = "openai-api/fake/model"
SECRET = "sk-very-secret-0123456789"
QUICK = asking.Manner(timeout=120, retries=0, first_wait=0.01, concurrency=1)


def reply(text, usage=True):
    body = {"id": "1", "object": "chat.completion", "created": 1, "model": "model",
            "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}]}  # fmt: skip
    tokens = {"usage": {"prompt_tokens": 100, "completion_tokens": 2, "total_tokens": 102}} if usage else {}
    return 200, json.dumps({**body, **tokens}).encode()


class Server:
    """Answers the n-th request with the n-th entry, the last one for ever; remembers what was asked."""

    def __init__(self, *entries):
        self.entries, self.asked, self.lock = entries, [], threading.Lock()

    def __call__(self, request):
        with self.lock:
            self.asked.append(request["messages"][-1]["content"])
            return self.entries[min(len(self.asked), len(self.entries)) - 1]


class Abrupt(loopback.Handler):
    """Status 0: closes without a word. Status 1: promises a body and closes half-way. Status 2: says nothing for two seconds."""

    def send(self, status, body):
        self.close_connection = True
        if status == 1:
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n" + body[:20])
        if status == 2:
            time.sleep(2)
        if status > 2:
            super().send(status, body)


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("FAKE_API_KEY", SECRET)


def ask(server, items, folder, manner=QUICK, handler=loopback.Handler, lines=None, **more):
    with loopback.serving(server, handler) as address:
        return asking.ask(items, folder / "m.jsonl", MODEL, manner, (lines if lines is not None else []).append, base_url=address, **more)


def some(count):
    return lm.plan(tasks=["number"], windows=[12], data_sets=1)[:count]


GARBAGE = [(429, b'{"error": {"message": "slow down"}}'), (500, b"oops"), (200, b"<html>garbage</html>"), (200, b"\xff\xfe\x00"), (200, b""), (200, b'"text"'),
           (200, b"[]"), (200, b'{"choices": []}'), (404, b'{"error": {"message": "no such model"}}')]  # fmt: skip


def test_errors_and_garbage_end_in_a_count_and_a_reason_and_the_rest_is_kept(tmp_path):
    items = some(12)
    outcome = ask(Server(*GARBAGE, reply("a")), items, tmp_path)
    assert outcome.answered == 3 and outcome.missing.total() == len(GARBAGE) and len(lm.read(tmp_path / "m.jsonl")) == 3
    assert outcome.missing["HTTP 429"] == outcome.missing["HTTP 500"] == outcome.missing["HTTP 404"] == 1
    told = "\n".join(asking.summary(outcome))
    assert "missing 1: HTTP 429; for example: Error code: 429 - slow down" in told and "run the same command again" in told
    later = ask(Server(reply("b")), items, tmp_path)
    assert later.answered == len(GARBAGE) and later.calls == len(GARBAGE)
    assert sorted(r["answer"] for r in lm.read(tmp_path / "m.jsonl")) == ["a"] * 3 + ["b"] * len(GARBAGE)


def test_a_server_that_closes_without_a_word_or_half_way(tmp_path):
    outcome = ask(Server((0, b""), (1, reply("a")[1]), (0, b""), reply("a")), some(4), tmp_path, handler=Abrupt)
    assert outcome.answered == 1 and outcome.missing == {"connection failed or closed": 3}


def test_a_server_that_says_nothing(tmp_path):
    outcome = ask(Server((2, b"")), some(2), tmp_path, asking.Manner(timeout=0.5, retries=0, concurrency=1), Abrupt)
    assert outcome.answered == 0 and outcome.missing == {"no answer in time": 2}


def test_no_server_at_all(tmp_path):
    outcome = asking.ask(some(2), tmp_path / "m.jsonl", MODEL, QUICK, print, base_url="http://127.0.0.1:9/v1")
    assert outcome.answered == 0 and outcome.missing == {"connection failed or closed": 2}


def test_a_passing_fault_is_tried_again_a_hopeless_one_is_not(tmp_path):
    manner = asking.Manner(timeout=120, retries=3, first_wait=0.01, concurrency=1)
    server = Server((429, b"{}"), (500, b""), (200, b"<"), reply("a"), (401, b"{}"))
    outcome = ask(server, some(2), tmp_path, manner)
    assert outcome.answered == 1 and outcome.missing == {"HTTP 401": 1} and len(server.asked) == 5 == outcome.calls


def test_twenty_failures_in_a_row_end_the_run(tmp_path):
    server = Server((401, b"{}"))
    outcome = ask(server, some(40), tmp_path)
    assert len(server.asked) == 20 and outcome.missing == {"HTTP 401": 20, "not asked: 20 failures in a row": 20}


def test_answers_are_paid_once_whatever_is_asked_next(tmp_path):
    server = Server(reply("a"))
    assert ask(server, some(3), tmp_path).answered == 3
    lines = []
    assert ask(server, some(5), tmp_path, lines=lines).answered == 2
    assert len(server.asked) == 5 == len(set(server.asked)) and lines[0].startswith("3 answers are there; 2 calls to make, at most about ")


def test_a_killed_command_keeps_every_answer_and_goes_on(tmp_path):
    killed = threading.Event()

    class Stops(Server):  # answers six requests and holds the others until the command is dead
        def __call__(self, request):
            answer = super().__call__(request)
            if len(self.asked) > 6:
                killed.wait(300)
            return answer

    server, path = Stops(reply("a")), lm.file_of(MODEL, tmp_path)
    with loopback.serving(server) as address:
        command = [sys.executable, "-m", "rope_heads", "ask", "--model", MODEL, "--base-url", address, "--task", "number", "--windows", "12", "--data-sets", "1",
                   "--concurrency", "2", "--yes", "--answers", str(tmp_path)]  # fmt: skip
        first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while len(lm.read(path)) < 6:
            assert first.poll() is None
            time.sleep(0.05)
        first.kill()
        first.wait()
        killed.set()
        kept, asked = len(lm.read(path)), len(server.asked)
        again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 0 and f"{40 - kept} answers in {40 - kept} calls" in again.stdout, again.stderr
    assert kept == 6 <= asked <= 8, "only what was under way may be asked twice"
    assert len(lm.read(path)) == 40 == len({r["prompt"] for r in lm.read(path)})
    assert SECRET not in again.stdout + again.stderr + path.read_text()


def test_counts_are_shown_and_agreed_before_the_first_call(tmp_path):
    server, lines = Server(reply("a")), []

    def confirm():
        assert len(lines) == 1 and "5 calls to make" in lines[0] and "US dollars" in lines[0] and not server.asked
        return False

    ask(server, some(5), tmp_path, asking.Manner(price=lm.Price(1, 10)), lines=lines, confirm=confirm)
    assert not server.asked


def test_the_cost_limit_holds_with_calls_side_by_side_and_failures_that_may_be_paid(tmp_path):
    items = some(30)
    most = lm.Price(10, 10).of(max(map(lm.tokens_at_most, items)), 16)
    manner = asking.Manner(timeout=120, retries=0, concurrency=8, price=lm.Price(10, 10), max_cost=5.5 * most, stop_after=100)
    failing = ask(Server((500, b"")), items, tmp_path, manner)
    assert failing.calls <= 6 and failing.cost <= manner.max_cost
    assert failing.missing["not asked: the cost limit is reached"] == 30 - failing.calls
    paying = ask(Server(reply("a")), items, tmp_path, manner)
    real = lm.Price(10, 10).of(100, 2)
    assert paying.cost <= manner.max_cost and paying.cost == pytest.approx(paying.answered * real) and paying.answered > 6


def test_the_limit_of_calls(tmp_path):
    """The counts say it beforehand, and the progress is that of the calls: what the limit leaves out is no progress."""
    server, lines = Server(reply("a")), []
    outcome = ask(server, some(10), tmp_path, asking.Manner(concurrency=4, max_calls=3), lines=lines)
    tokens = sum(map(lm.tokens_at_most, some(3)))
    assert lines[0].endswith(f"3 calls to make of 10, the limit of calls, at most about {tokens:,} input and 48 output tokens")
    assert lines[1:] == [f"{k}/3 items, {k} answered" for k in (1, 2, 3)]
    assert len(server.asked) == 3 == outcome.answered and outcome.missing == {"not asked: the limit of calls is reached": 7}


def test_keys_appear_nowhere(tmp_path, capfd, caplog):
    caplog.set_level("DEBUG")
    echo = json.dumps({"error": {"message": f"your key {SECRET} is wrong"}}).encode()
    lines = []
    outcome = ask(Server((401, echo), reply(f"key {SECRET}")), some(2), tmp_path, lines=lines)
    out = capfd.readouterr()
    written = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert outcome.answered == 1 and "[redacted]" in written and "[redacted]" in "\n".join(asking.summary(outcome))
    for text in (written, out.out, out.err, caplog.text, "\n".join(lines), "\n".join(asking.summary(outcome))):
        assert SECRET not in text


def test_answers_that_are_markup_or_escape_codes_stay_text(tmp_path):
    ask(Server(reply("<script>alert(1)</script>\x1b[2J")), some(1), tmp_path)
    text = (tmp_path / "m.jsonl").read_text()
    assert "\x1b" not in text and json.loads(text)["answer"].startswith("<script>")


def test_an_answer_without_usage_is_counted_at_the_guess(tmp_path):
    items = some(1)
    assert ask(Server(reply("a", usage=False)), items, tmp_path).input_tokens >= lm.tokens_at_most(items[0])


def test_two_processes_do_not_ask_the_same(tmp_path):
    with asking.alone(tmp_path / "m.jsonl"), pytest.raises(ValueError, match="another process is writing"):
        ask(Server(reply("a")), some(1), tmp_path)


@pytest.mark.parametrize("arguments, words", [
    (["--model", "gpt"], "model must be smollm2"),
    (["--model", "openai/gpt-5.4", "--max-cost", "1"], "--max-cost needs --price IN OUT"),
    (["--model", "openai/gpt-5.4", "--windows", "1"], "window must be 2 to 999 words, got 1"),
    (["--model", "openai/gpt-5.4", "--setting", "front", "--task", "letter"], "nothing to ask"),
    (["--model", "openai-api/fake/model", "--base-url", "http://127.0.0.1:9/v1", "--windows", "12"], "add --yes"),
    (["--model", "openai/gpt-5.4", "--windows", "12"], "OPENAI_API_KEY"),
    (["--model", "smollm2", "--max-calls", "2", "--timeout", "1"], "--timeout, --max-calls: smollm2 answers in this process"),
    (["--model", "smollm2", "--concurrency", "1"], "--concurrency: smollm2 answers in this process"),
    (["--model", "smollm2", "--price", "1", "1", "--max-cost", "1"], "--price, --max-cost: smollm2 answers in this process"),
    (["--model", "nobody/none", "--windows", "12", "--yes"], "nobody/none cannot be asked"),
    (["--model", "openai/gpt-5.4", "--windows", "12", "--yes"], "OPENAI_API_KEY"),
])  # fmt: skip
def test_bad_values_of_the_command_give_one_line_and_exit_code_2(arguments, words, tmp_path, monkeypatch, capsys):
    from rope_heads.__main__ import main

    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main(["ask", *arguments, "--answers", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_the_command_says_what_is_missing_and_ends_with_1(tmp_path, capsys):
    from rope_heads.__main__ import main

    with loopback.serving(Server((500, b"<b>no</b>\x1b[2J"), reply("a"))) as address:
        code = main(["ask", "--model", MODEL, "--base-url", address, "--windows", "12", "--data-sets", "1", "--max-calls", "2", "--retries", "0",
                     "--concurrency", "1", "--yes", "--answers", str(tmp_path)])  # fmt: skip
    out = capsys.readouterr().out
    assert code == 1 and "1 answers in 2 calls" in out and "missing 1: HTTP 500" in out and "\x1b" not in out and SECRET not in out
    assert "missing 78: not asked: the limit of calls is reached" in out and "run the same command again" in out


def test_the_help_says_what_is_written_and_how_long_it_takes(capsys):
    from rope_heads.__main__ import main

    with pytest.raises(SystemExit):
        main(["ask", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "writes" in told and "minutes" in told and "check-data --update" in told and all(name in told for name in ("smollm2-http", "openai/gpt-5.4", *one_hop.SETTINGS))


def test_without_the_extra_the_command_says_what_to_install(tmp_path):
    program = ("import sys; sys.modules['inspect_ai'] = None\nfrom rope_heads.__main__ import main\n"
               f"sys.exit(main(['ask', '--model', 'openai/gpt-5.4', '--yes', '--answers', {str(tmp_path)!r}]))")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2 and lm.INSTALL in done.stderr and "pip install -e '.[llm]'" in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_the_package_imports_no_extra_by_itself():
    program = ("import sys; from rope_heads import asking, language_models, loopback, one_hop, small_model, small_routes\n"
               "print(sorted({'inspect_ai', 'openai', 'transformers', 'gguf', 'accelerate'} & set(sys.modules)))")  # fmt: skip
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_inspect_task_scores_and_reads_answers_that_are_there(tmp_path):
    """`inspect eval` over HTTP, twice: the second run asks nothing."""
    from pathlib import Path

    import rope_heads

    task = Path(rope_heads.__file__).parent / "inspect_task.py"
    server = Server(reply("a"))
    with loopback.serving(server) as address:
        command = [sys.executable, "-m", "inspect_ai", "eval", task.name, "--model", MODEL, "--model-base-url", address, "--display", "none", "--log-dir",
                   str(tmp_path / "logs"), "--log-format", "json", "--max-retries", "1", "--timeout", "60", "--no-fail-on-error", "-T", "task=number", "-T", "windows=12",
                   "-T", "data_sets=1", "-T", f"answers={tmp_path}"]  # fmt: skip
        for _ in range(2):
            done = subprocess.run(command, capture_output=True, text=True, cwd=task.parent)
            assert done.returncode == 0, done.stderr[-2000:]
    assert len(server.asked) == 40 == len(set(server.asked))
    rows = lm.table(lm.read(lm.file_of(MODEL, tmp_path)))
    logs = [json.loads(path.read_text()) for path in sorted((tmp_path / "logs").glob("*.json"))]
    found = [log["results"]["scores"][0]["metrics"]["accuracy"]["value"] for log in logs]
    assert found == pytest.approx([rows.right.mean()] * 2) and SECRET not in "".join(p.read_text() for p in (tmp_path / "logs").glob("*.json"))


class Reports(Server):
    """Reports that an answer took a negative number of tokens."""

    def __call__(self, request):
        status, body = super().__call__(request)
        return status, body.replace(b'"prompt_tokens": 100', b'"prompt_tokens": -1000000')


def test_a_negative_count_of_tokens_makes_no_room_below_the_cost_limit(tmp_path):
    items = some(6)
    price = lm.Price(10, 10)
    manner = asking.Manner(timeout=120, retries=0, concurrency=1, price=price, max_cost=2.5 * price.of(max(map(lm.tokens_at_most, items)), 16))
    outcome = ask(Reports(reply("a")), items, tmp_path, manner)
    assert outcome.calls == 2 and 0 < outcome.cost <= manner.max_cost and all(r["input_tokens"] > 0 for r in lm.read(tmp_path / "m.jsonl"))


def test_nothing_is_asked_when_answers_cannot_be_kept(tmp_path):
    server = Server(reply("a"))
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        ask(server, some(1), tmp_path / "file")
    assert not server.asked


def test_a_disk_that_is_full_ends_the_run_with_a_count(tmp_path, monkeypatch):
    """The second answer cannot be written: the first is kept, the others are not paid for, and the run says so."""
    append, full = lm.append, iter([False, False, True])

    def appended(path, records):
        if next(full):
            raise OSError(28, "No space left on device")
        append(path, records)

    monkeypatch.setattr(lm, "append", appended)
    server = Server(reply("a"))
    outcome = ask(server, some(5), tmp_path)
    told = "\n".join(asking.summary(outcome))
    assert len(server.asked) == 2 and outcome.answered == len(lm.read(tmp_path / "m.jsonl")) == 1 and outcome.missing.total() == 4
    assert "missing 1: answered, but the answer could not be kept; for example: " in told and "m.jsonl: No space left on device" in told
    assert "missing 3: not asked: answers cannot be kept" in told


def test_what_a_provider_says_is_told_without_the_request(tmp_path):
    outcome = ask(Server((403, b'{"error": {"message": "no credit left"}}')), some(1), tmp_path)
    assert "no credit left" in outcome.example["HTTP 403"] and "Request" not in outcome.example["HTTP 403"]


def test_a_missing_key_is_said_in_plain_words(tmp_path, monkeypatch):
    monkeypatch.delenv("FAKE_API_KEY")
    agreed = []
    with pytest.raises(ValueError, match="cannot be asked: .*No FAKE_API_KEY defined in the environment") as error:
        ask(Server(reply("a")), some(1), tmp_path, confirm=lambda: agreed.append(1))
    assert "bold" not in str(error.value) and not agreed, "a reader must not agree to calls that cannot be made"


def test_a_key_is_taken_out_in_every_spelling(monkeypatch):
    monkeypatch.setenv("ODD_TOKEN", " sk-a\nb\"c/d-0123 \n")
    for form in ('sk-a\nb"c/d-0123', r'sk-a\nb"c/d-0123', r'sk-a\nb\"c/d-0123', "sk-a%0Ab%22c%2Fd-0123"):
        assert asking.redacted(f"<{form}>") == "<[redacted]>"


@pytest.mark.parametrize("url", ["", "notaurl", "http://", "ftp://x", "http://[::1", "http://127.0.0.1:99999", "http://x:0", "http://u:hush@x:y/"])
def test_an_address_that_is_none_is_refused_and_not_shown(tmp_path, url):
    with pytest.raises(ValueError, match="--base-url must look like https://HOST/v1") as error:
        asking.run(MODEL, some(1), QUICK, print, base_url=url, path=tmp_path / "m.jsonl")
    assert "hush" not in str(error.value)


@pytest.mark.parametrize("model", ["smollm2", "smollm2-http", "smollm2-hf"])
def test_an_address_is_not_ignored_for_a_model_that_runs_here(tmp_path, model):
    with pytest.raises(ValueError, match=f"--base-url is for models that a server answers for .*{model} runs here"):
        asking.run(model, some(1), QUICK, print, base_url="http://127.0.0.1:9/v1", path=tmp_path / "m.jsonl")


def test_a_closed_terminal_is_no_consent(monkeypatch):
    terminal = io.StringIO("")
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    assert not asking.agreed()
