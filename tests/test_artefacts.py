"""Files of data/: whole or not at all, listed with checksums, and with their origin inside."""

import functools
import hashlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pandas
import pyarrow.parquet
import pytest
import torch

import rope_heads
from rope_heads import artefacts

ORIGIN = {"command": "rope-heads measure", "seconds": 1.5, "seed": 3}


def test_failed_write_leaves_the_old_file_and_no_litter(tmp_path):
    path = tmp_path / "table.json"
    artefacts.write_bytes(path, b"old")
    with pytest.raises(RuntimeError), artefacts.atomic(path) as temporary:
        temporary.write_bytes(b"half of the ne")
        raise RuntimeError("interrupted")
    assert path.read_bytes() == b"old"
    assert [item.name for item in tmp_path.iterdir()] == ["table.json"]


@pytest.mark.skipif(os.name != "posix", reason="limits a process's file size, which needs POSIX")
def test_full_disk_leaves_the_old_file(tmp_path):
    """A real write error in the middle of the file: the process may write no file beyond 1000 bytes."""
    program = ("import resource, sys\nfrom rope_heads.artefacts import write_bytes\n"
               "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\nwrite_bytes(sys.argv[1], b'x' * 5000)")  # fmt: skip
    path = tmp_path / "table.json"
    path.write_bytes(b"old")
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True)
    assert done.returncode == 1 and "OSError" in done.stderr
    assert path.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.skipif(os.name != "posix", reason="kills a process in the middle of a write")
def test_kill_in_the_middle_of_a_write_leaves_the_old_file(tmp_path):
    program = ("import os, signal, sys\nfrom rope_heads.artefacts import atomic\n"
               "with atomic(sys.argv[1]) as temporary:\n temporary.write_bytes(b'half')\n os.kill(os.getpid(), signal.SIGKILL)")  # fmt: skip
    path = tmp_path / "table.json"
    path.write_bytes(b"old")
    assert subprocess.run([sys.executable, "-c", program, str(path)]).returncode == -9
    assert path.read_bytes() == b"old"


def test_json_and_parquet_return_what_was_written_with_its_origin(tmp_path):
    frame = pandas.DataFrame({"step": [50, 100], "accuracy": [0.125, 0.25], "task": ["number", "letter"]})
    origin = artefacts.provenance("rope-heads measure", seconds=2.0, seed=1, prompts=300)
    artefacts.write_parquet(tmp_path / "a.parquet", frame, origin)
    artefacts.write_json(tmp_path / "a.json", {"x": [1, 2]}, origin)
    read, read_origin = artefacts.read_parquet(tmp_path / "a.parquet")
    pandas.testing.assert_frame_equal(read, frame, check_dtype=False)
    assert read_origin == origin and origin["prompts"] == 300 and origin["versions"]["numpy"]
    assert artefacts.read_json(tmp_path / "a.json") == ({"x": [1, 2]}, origin)


FRAME = pandas.DataFrame({"step": range(0, 6000, 50), "accuracy": [(17 * i % 97) / 97 for i in range(120)], "task": ["number", "letter"] * 60})


def test_a_flipped_bit_anywhere_in_the_values_of_a_table_is_refused_by_name(tmp_path):
    """Every byte of the pages, one bit each; pages end where the description of the table, which stands last in the file, begins."""
    path = tmp_path / "a.parquet"
    artefacts.write_parquet(path, FRAME, ORIGIN)
    content = path.read_bytes()
    description = int.from_bytes(content[-8:-4], "little") + 8
    for place in range(4, len(content) - description):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :])
        try:
            frame, origin = artefacts.read_parquet(path)
        except ValueError as error:
            assert str(path) in str(error) and "restore it or make it again" in str(error)
        else:  # the bit says nothing about the values, for instance one of a statistic
            assert frame.equals(FRAME) and origin == ORIGIN, f"byte {place} of {len(content)}"


@pytest.mark.parametrize("content", [b"", b"PAR1", b"step,accuracy\n", b"half"], ids=["empty", "magic", "csv", "half"])
def test_what_is_no_whole_table_is_refused_by_name(tmp_path, content):
    path = tmp_path / "a.parquet"
    artefacts.write_parquet(path, FRAME, ORIGIN)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if content == b"half" else content)
    with pytest.raises(ValueError, match=r"a\.parquet is damaged or no parquet table"):
        artefacts.read_parquet(path)
    with pytest.raises(FileNotFoundError):
        artefacts.read_parquet(tmp_path / "b.parquet")


def test_tables_without_page_checksums_are_read(tmp_path):
    """As they were written until checksums came."""
    table = pyarrow.Table.from_pandas(FRAME, preserve_index=False)
    metadata = {**table.schema.metadata, b"rope_heads": json.dumps(ORIGIN).encode()}
    pyarrow.parquet.write_table(table.replace_schema_metadata(metadata), tmp_path / "old.parquet", compression="zstd")
    frame, origin = artefacts.read_parquet(tmp_path / "old.parquet")
    assert frame.equals(FRAME) and origin == ORIGIN


def test_the_same_tensors_give_the_same_bytes(tmp_path):
    tensors = {name: torch.arange(12.0).reshape(3, 4) for name in "abcde"}
    metadata = {name: "value" for name in "klmnopq"}
    contents = set()
    for _ in range(20):
        artefacts.write_tensors(tmp_path / "a.safetensors", tensors, metadata)
        contents.add((tmp_path / "a.safetensors").read_bytes())
    assert len(contents) == 1
    read, read_metadata = artefacts.read_tensors(tmp_path / "a.safetensors")
    assert read_metadata == metadata and all(torch.equal(read[name], tensors[name]) for name in tensors)


def test_files_without_origin_are_refused_by_name(tmp_path):
    pandas.DataFrame({"a": [1]}).to_parquet(tmp_path / "plain.parquet")
    (tmp_path / "plain.json").write_text("[1]")
    with pytest.raises(ValueError, match="plain.parquet does not say where it comes from"):
        artefacts.read_parquet(tmp_path / "plain.parquet")
    with pytest.raises(ValueError, match="plain.json must hold exactly"):
        artefacts.read_json(tmp_path / "plain.json")


def test_json_refuses_nan(tmp_path):
    with pytest.raises(ValueError):
        artefacts.write_json(tmp_path / "a.json", float("nan"), ORIGIN)
    assert not list(tmp_path.iterdir())


def test_manifest_lists_size_and_sha256_and_names_every_difference(tmp_path):
    files = {"published/a.csv": b"1,2\n", "runs/b.bin": bytes(1000), "runs/c.bin": b"c"}
    for name, content in files.items():
        artefacts.write_bytes(tmp_path / name, content)
    (tmp_path / "README.md").write_text("what lies here")
    assert artefacts.write_manifest(tmp_path) == 3
    listed = json.loads((tmp_path / "manifest.json").read_text())["files"]
    assert listed == {name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()} for name, content in files.items()}
    assert artefacts.check_data(tmp_path) == (3, [])

    (tmp_path / "published/a.csv").write_bytes(b"1,3\n")
    (tmp_path / "runs/b.bin").unlink()
    (tmp_path / "runs/c.bin").write_bytes(b"cc")
    (tmp_path / "runs/d.bin").write_bytes(b"d")
    count, problems = artefacts.check_data(tmp_path)
    assert count == 3 and len(problems) == 4
    assert problems[0].startswith("published/a.csv is altered: sha256") and problems[1] == "runs/b.bin is missing"
    assert problems[2] == "runs/c.bin is altered: 2 bytes, expected 1" and problems[3] == "runs/d.bin is not listed"


def test_no_manifest_is_made_of_nothing(tmp_path):
    (tmp_path / "README.md").write_text("what lies here")
    (tmp_path / "manifest.json").write_text("as committed")
    with pytest.raises(ValueError, match="holds no data files"):
        artefacts.write_manifest(tmp_path)
    assert (tmp_path / "manifest.json").read_text() == "as committed"


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"files": {"a": 1}}'])
def test_a_broken_manifest_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    count, problems = artefacts.check_data(tmp_path)
    assert count == 0 and problems[0].startswith("manifest.json")


def test_data_is_the_checkout_s_and_missing_files_are_named():
    root = artefacts.repository()
    assert (root / "pyproject.toml").is_file() and artefacts.data_folder() == root / "data"
    with pytest.raises(FileNotFoundError, match="data/published/nothing.json is not here: see data/README.md"):
        artefacts.data_path("published/nothing.json")


def test_the_repository_s_data_is_as_listed():
    count, problems = artefacts.check_data(artefacts.data_folder())
    assert problems == []


def test_the_wheel_carries_the_published_data_and_reads_them_outside_a_checkout(tmp_path):
    """What a chapter opened in Colab has: the package alone, with data/published inside."""
    root = artefacts.repository()
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--wheel-dir", str(tmp_path), str(root)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "installed")
    program = ("from rope_heads import artefacts\nprint(artefacts.repository(), artefacts.data_path('published/claims.toml'))\n"
               "try: artefacts.data_path('runs/none.parquet')\nexcept FileNotFoundError as error: print(error)")  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, cwd=tmp_path)
    place, refusal = done.stdout.splitlines()
    assert place == f"None {tmp_path / 'installed/rope_heads/data/published/claims.toml'}"
    assert refusal == "data/runs/none.parquet is not part of this version of the book: run this from a checkout of the repository"
    carried = {path.relative_to(tmp_path / "installed/rope_heads/data") for path in (tmp_path / "installed/rope_heads/data").rglob("*.*")}
    assert carried == {path.relative_to(root / "data") for path in (root / "data/published").rglob("*.*")} | {Path("manifest.json")}


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """No checkout, and a server on this machine in place of the release: (folder served, cache folder)."""
    served, package, cache = tmp_path / "served", tmp_path / "package", tmp_path / "cache"
    data = served / f"v{rope_heads.__version__}" / "data"
    (data / "values").mkdir(parents=True)
    (data / "values" / "one.json").write_text("{}")
    (data / "values" / "two.json").write_text("[]")
    artefacts.write_manifest(data)
    (package / "data").mkdir(parents=True)
    shutil.copy(data / "manifest.json", package / "data")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=served)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(artefacts, "PACKAGE", package)
        monkeypatch.setattr(artefacts, "repository", lambda: None)
        monkeypatch.setattr(artefacts, "RELEASE", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr("pooch.os_cache", lambda name: cache)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield data, cache
        server.shutdown()


def test_outside_a_checkout_files_and_folders_are_fetched_once(outside):
    data, _ = outside
    assert artefacts.data_path("values/one.json").read_text() == "{}"
    folder = artefacts.data_path("values")
    shutil.rmtree(data)  # from now on only the cache can give them
    assert artefacts.data_path("values") == folder and {path.name for path in folder.iterdir()} == {"one.json", "two.json"}


def test_outside_a_checkout_another_file_than_the_released_one_is_refused(outside):
    data, cache = outside
    (data / "values" / "one.json").write_text("{ }")
    with pytest.raises(FileNotFoundError, match="data/values/one.json could not be fetched.*hash"):
        artefacts.data_path("values/one.json")
    assert not list(cache.rglob("*.json"))
    shutil.rmtree(data)
    with pytest.raises(FileNotFoundError, match="data/values/two.json could not be fetched"):
        artefacts.data_path("values/two.json")
    with pytest.raises(FileNotFoundError, match="data/values/three.json is not part of this version"):
        artefacts.data_path("values/three.json")
