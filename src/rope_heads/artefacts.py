"""Reading and writing data/: where it lies, whole files or none, checksums, and where each table comes from.

Everything under data/ is listed in data/manifest.json with its size and sha256; `rope-heads check-data` compares.
"""

import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
UNLISTED = {"README.md", "manifest.json"}  # the two files of data/ that describe the others
RELEASE = "https://raw.githubusercontent.com/position-or-symbol/position-or-symbol"  # then the tag
READS = "ROPE_HEADS_READS"  # environment variable of a chapter that is executed for the book: the parts of data/ that it may read, as JSON
VERSIONED = ("rope-heads", "torch", "numpy")  # packages whose version goes into the provenance of a table


def repository() -> Path | None:
    """The checkout this package runs from, or None when it was installed from a wheel."""
    root = PACKAGE.parents[1]
    return root if (root / "pyproject.toml").is_file() and PACKAGE == root / "src" / "rope_heads" else None


def data_folder() -> Path:
    """data/ of the checkout; without a checkout the copy inside the wheel, which holds data/published only."""
    root = repository()
    return root / "data" if root else PACKAGE / "data"


def data_path(name: str) -> Path:
    """Path of a file or folder of data/, named as in the repository without the leading data/ (`published/curves.json`).

    Outside a checkout (Colab) what the wheel does not carry is fetched from the release and kept in the user's cache folder; every file must have
    the sha256 of the manifest that came with the wheel. FileNotFoundError when there is no such file, or no network. While the book executes a
    chapter, ValueError for what its metadata do not name: a chapter is executed again when what it names has changed, so it must name all.
    """
    declared = json.loads(os.environ.get(READS, '["."]'))
    if not any(part in (".", name) or name.startswith(f"{part}/") for part in declared):
        raise ValueError(f"this chapter reads data/{name}, which its metadata do not name: add it to rope_heads.reads")
    path = data_folder() / name
    if path.exists():
        return path
    if repository() is not None:
        raise FileNotFoundError(f"data/{name} is not here: see data/README.md for the command that makes it")
    return _fetched(name)


def _fetched(name: str) -> Path:
    import pooch

    listed = json.loads((data_folder() / "manifest.json").read_text(encoding="utf-8"))["files"]
    wanted = [file for file in listed if file == name or file.startswith(f"{name}/")]
    if not wanted:
        raise FileNotFoundError(f"data/{name} is not part of this version of the book: run this from a checkout of the repository")
    version = importlib.metadata.version("rope-heads")
    home = Path(pooch.os_cache("rope-heads")) / version
    pooch.get_logger().setLevel("WARNING")  # a page is no place for one line a file
    for file in wanted:
        place = home / file
        try:
            pooch.retrieve(f"{RELEASE}/v{version}/data/{file}", f"sha256:{listed[file]['sha256']}", place.name, place.parent,
                           downloader=pooch.HTTPDownloader(timeout=30))  # fmt: skip
        except (OSError, ValueError) as error:  # no network; another checksum: pooch keeps no such file
            raise FileNotFoundError(f"data/{file} could not be fetched: {error}") from None
    return home / name


@contextlib.contextmanager
def atomic(path):
    """Yields a temporary path beside `path`; on success it replaces `path` in one step, on an error nothing changes.

    A reader sees the old file or the new one, never half of it, also after a power cut or on a full disk.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb+") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if os.name == "posix":  # the new name itself must reach the disk too
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_bytes(path, content: bytes) -> None:
    with atomic(path) as temporary:
        temporary.write_bytes(content)


def provenance(command: str, seconds: float | None = None, seed: int | None = None, **more) -> dict:
    """Where a table comes from: the command that makes it again, versions, seconds, seed, and what else the caller names."""
    versions = {"python": platform.python_version()}
    for name in VERSIONED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    made = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"command": command, "seconds": seconds, "seed": seed, "made": made, "versions": versions, **more}


def write_json(path, value, origin: dict) -> None:
    """JSON file {"provenance": origin, "data": value}."""
    text = json.dumps({"provenance": origin, "data": value}, indent=1, ensure_ascii=False, allow_nan=False)
    write_bytes(path, (text + "\n").encode())


def read_json(path) -> tuple[object, dict]:
    """(value, provenance) of a file written by `write_json`."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:  # not JSON, not UTF-8
        raise ValueError(f"{path} cannot be read ({error}): restore it or make it again") from None
    if not isinstance(content, dict) or set(content) != {"provenance", "data"}:
        raise ValueError(f"{path} must hold exactly 'provenance' and 'data': write it with artefacts.write_json")
    return content["data"], content["provenance"]


def write_parquet(path, frame, origin: dict) -> None:
    """Parquet table of a pandas frame; the provenance travels in the file's own metadata, and each page of values has a checksum."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pandas(frame, preserve_index=False)
    table = table.replace_schema_metadata({**table.schema.metadata, b"rope_heads": json.dumps(origin).encode()})
    with atomic(path) as temporary:
        pyarrow.parquet.write_table(table, temporary, compression="zstd", write_page_checksum=True)


def read_parquet(path) -> tuple[object, dict]:
    """(pandas frame, provenance) of a file written by `write_parquet`. ValueError names the file when it is truncated, altered or something else.

    Files written before pages had checksums are read as well; in them an altered value can pass, which only the manifest notices.
    """
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path, page_checksum_verification=True)
        frame, origin = table.to_pandas(), json.loads((table.schema.metadata or {}).get(b"rope_heads", b"null"))
    except (FileNotFoundError, PermissionError):
        raise
    except (OSError, ValueError, KeyError, TypeError, NotImplementedError) as error:  # whatever a wrong byte makes of the description of the columns
        raise ValueError(f"{path} is damaged or no parquet table ({type(error).__name__}: {error}): restore it or make it again") from None
    if origin is None:
        raise ValueError(f"{path} does not say where it comes from: write it with artefacts.write_parquet")
    return frame, origin


def sha256(path) -> str:
    with open(path, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def describe(folder: Path) -> dict[str, dict]:
    """{path: {"bytes", "sha256"}} of every file under `folder`, sorted by path, without README.md and manifest.json at its top."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [(path.relative_to(folder).as_posix(), path) for path in files]
    return {name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for name, path in names if name not in UNLISTED}


def write_manifest(folder: Path) -> int:
    """Lists every file of `folder` in its manifest.json; returns how many. ValueError when there is none: a list of nothing would pass every check."""
    files = describe(folder)
    if not files:
        raise ValueError(f"{folder} holds no data files: restore data/ from the repository before its manifest is written anew")
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in files.items())
    write_bytes(folder / "manifest.json", ('{"files": {\n' + lines + "\n}}\n").encode())
    return len(files)


def check_data(folder: Path) -> tuple[int, list[str]]:
    """(number of files listed, what is wrong), comparing `folder` with its manifest.json: one line for each file."""
    manifest = folder / "manifest.json"
    try:
        listed = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        expected = {name: (entry["bytes"], entry["sha256"]) for name, entry in listed.items()}
    except FileNotFoundError:
        return 0, ["manifest.json is missing: restore it from the repository"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return 0, [f"manifest.json cannot be read ({type(error).__name__}: {error}): restore it from the repository"]
    found = describe(folder)
    problems = []
    for name, (size, digest) in expected.items():
        if name not in found:
            problems.append(f"{name} is missing")
        elif found[name]["bytes"] != size:
            problems.append(f"{name} is altered: {found[name]['bytes']} bytes, expected {size}")
        elif found[name]["sha256"] != digest:
            problems.append(f"{name} is altered: sha256 {found[name]['sha256'][:12]}..., expected {digest[:12]}...")
    problems += [f"{name} is not listed" for name in found if name not in expected]
    return len(expected), problems


def write_tensors(path, tensors: dict, metadata: dict[str, str]) -> None:
    """safetensors file of torch tensors, atomic, with a checksum over tensors and metadata that `read_tensors` verifies."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    own = json.dumps({**metadata, "sha256": _digest(tensors, metadata)}, sort_keys=True)
    try:
        with atomic(path) as temporary:
            save_file(tensors, temporary, {"rope_heads": own})  # one entry, because safetensors writes several in random order
    except SafetensorError as error:
        raise OSError(f"{path} was not written ({error}); what stood there before is unchanged") from None


def read_tensors(path) -> tuple[dict, dict[str, str]]:
    """(tensors, metadata) of a file of `write_tensors`. ValueError names the file when it is truncated, altered or something else."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            metadata, tensors = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no iterator)
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a complete safetensors file ({error}); fetch it or train it again") from None
    with contextlib.suppress(KeyError, ValueError):  # a file of an earlier version has its entries side by side
        metadata = json.loads(metadata["rope_heads"])
    if "sha256" not in metadata:
        raise ValueError(f"{path} was not written by this project: its metadata holds no sha256")
    stored = metadata.pop("sha256")
    if _digest(tensors, metadata) != stored:
        raise ValueError(f"{path} was altered: its content does not match the checksum stored with it; fetch it or train it again")
    return tensors, metadata


def _digest(tensors: dict, metadata: dict[str, str]) -> str:
    """sha256 over metadata, names, types, shapes and bytes: safetensors itself notices a cut file but not a changed byte."""
    import torch

    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(tensors):
        t = tensors[name]
        digest.update(f"{name} {t.dtype} {tuple(t.shape)}".encode())
        digest.update(t.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
