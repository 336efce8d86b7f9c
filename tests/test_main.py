"""The command line: fast help, exit code 2 and one line for a bad value, check-data's verdict."""

import re
import subprocess
import sys

import pytest

from rope_heads import __main__ as command_line
from rope_heads import arguments, artefacts

COMMANDS = ["book", "check-data", "train", "measure", "lengths", "collect", "fingerprint", "ask", "toy", "bench"]


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "rope_heads", *arguments], capture_output=True, text=True)


def test_help_names_the_commands_and_imports_nothing_heavy():
    program = "import sys, rope_heads.__main__ as m\ntry: m.main(['--help'])\nexcept SystemExit: print(sorted({'torch', 'numpy', 'papermill'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("[]\n")
    for command in COMMANDS:
        assert command in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_says_what_it_writes_and_how_long_it_takes(command):
    done = run(command, "--help")
    assert done.returncode == 0
    text = " ".join(done.stdout.split()).lower()
    assert "writes" in text and re.search(r"(\d|a|an|of|some|few) (seconds?|minutes?|hours?|hour)\b|takes days", text), text


@pytest.mark.parametrize("arguments, words", [
    ([], "required: COMMAND"),
    (["bok"], "invalid choice: 'bok'"),
    (["book", "--mode", "fast"], "invalid choice: 'fast'"),
    (["book", "--time-limit", "0"], "must be > 0, got 0"),
    (["book", "--time-limit", "nan"], "must be > 0, got nan"),
    (["book", "--time-limit", "soon"], "must be a number, got 'soon'"),
    (["book", "--parameter", "seed"], "must look like NAME=VALUE, got 'seed'"),
    (["book", "--only", "nothing"], "no chapter is called 'nothing'; there are: index"),
    (["book", "--parameter", "mode=full"], "use --mode"),
    (["book", "--parameter", "seed={1}"], "must be a number, a word, a list or a table, got {1}"),
    (["train", "--task", "numbers"], "invalid choice: 'numbers'"),
    (["train", "--task", "number", "--seed", "-1"], "must be a whole number >= 0, got -1"),
    (["train", "--task", "number", "--seed", "1.0"], "must be a whole number >= 0, got 1.0"),
    (["train", "--task", "number", "--threads", "99999999999"], "must be 1 to 1024, got 99999999999"),
    (["train", "--task", "number", "--until", "2"], "until must be in (0, 1], got 2"),
    (["train", "--task", "number", "--set", "steps=1.7"], "steps must be of type int, got 1.7"),
    (["train", "--task", "number", "--set", "lr=None"], "lr must be of type float, got None"),
    (["lengths", "--run", "nowhere"], "nowhere holds no finished run"),
    (["lengths", "--run", "nowhere", "--added", "-5"], "must be a whole number >= 0, got -5"),
    (["collect", "--recipe", "../x"], "single folder names, got '../x'"),
    (["fingerprint", "--model", "smollm2", "--into", "x", "--only", "phases"], "no table is called phases; there are: detectors"),
    (["fingerprint", "--model", "smollm2", "--into", "../x"], "single folder name, got '../x'"),
    (["check-data", "now"], "unrecognized arguments: now"),
])  # fmt: skip
def test_bad_values_give_one_clear_line_and_exit_code_2(arguments, words):
    done = run(*arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert words in done.stderr and done.stderr.count("\n") == 1 and done.stderr.startswith("rope-heads")


def test_a_folder_that_is_a_file_is_named_without_a_traceback(tmp_path):
    (tmp_path / "runs").write_text("a file")
    done = run("train", "--task", "number", "--runs", str(tmp_path / "runs"))
    assert done.returncode == 1 and "runs" in done.stderr and done.stderr.count("\n") == 1


def test_a_folder_without_a_model_is_named_in_one_line(tmp_path):
    done = run("fingerprint", "--model", str(tmp_path), "--into", "x")
    assert done.returncode == 1 and f"{tmp_path} cannot be read as a model" in done.stderr and done.stderr.count("\n") == 1


def test_seeds_are_read_to_the_last_digit():
    assert arguments.whole("9007199254740993") == 9007199254740993


def test_parameters_are_python_literals_or_words():
    assert arguments.parameter("seed=3") == ("seed", 3)
    assert arguments.parameter("task=number") == ("task", "number")
    assert arguments.parameter("expression=a=b") == ("expression", "a=b")


def test_check_data_names_what_is_wrong_and_update_mends_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(artefacts, "data_folder", lambda: tmp_path)
    artefacts.write_bytes(tmp_path / "a.csv", b"1")
    artefacts.write_manifest(tmp_path)
    assert command_line.main(["check-data"]) == 0
    assert capsys.readouterr().out == "all 1 files of data/ are as listed\n"
    artefacts.write_bytes(tmp_path / "a.csv", b"2")
    assert command_line.main(["check-data"]) == 1
    assert "data/a.csv is altered" in capsys.readouterr().err
    assert command_line.main(["check-data", "--update"]) == 0
    assert command_line.main(["check-data"]) == 0


def test_check_data_makes_no_manifest_of_an_empty_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(artefacts, "data_folder", lambda: tmp_path / "data")
    assert command_line.main(["check-data", "--update"]) == 2
    said = capsys.readouterr()
    assert "holds no data files" in said.err and said.err.count("\n") == 1 and not said.out and not list(tmp_path.rglob("*"))
