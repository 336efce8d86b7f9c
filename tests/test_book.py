"""The chapters as written: clean, of one form, and consistent with the package and the configuration."""

import ast
import builtins
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest
import yaml

import rope_heads
from rope_heads import artefacts, contents
from rope_heads.artefacts import check_data, data_folder

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "book").glob("*.ipynb"))
CHAPTERS = [path for path in NOTEBOOKS if path.stem != "index"]  # index is the title page: no exercises
WRITTEN_BY_THE_BUILD = {"book/status"}
CONFIG = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))
EXERCISE = re.compile(r"^(`{3,}|:{3,})\{exercise(?:-start)?\}[^\n]*\n(?:[ \t]*\n)*:label: *(\S+)", re.M)
SOLUTION = re.compile(r"^(`{3,}|:{3,})\{solution(?:-start)?\} *(\S+)\n((?::\w+:.*\n)*)", re.M)

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
every_chapter = pytest.mark.parametrize("path", CHAPTERS, ids=[path.stem for path in CHAPTERS])


def read(path):
    return nbformat.read(path, as_version=4)


def tags(cell):
    return cell.metadata.get("tags", [])


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text(notebook):
    return "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")


def plain(source):
    """Python of a cell: IPython's own lines (`%pip`) become `pass`."""
    return re.sub(r"^(\s*)[%!].*$", r"\1pass", source, flags=re.M)


@every_notebook
def test_a_notebook_is_valid_clean_and_in_one_form(path):
    raw = path.read_text(encoding="utf-8")
    notebook = read(path)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert notebook.metadata.kernelspec.name == "python3"
    assert set(notebook.metadata) <= {"kernelspec", "language_info", "rope_heads"} and notebook.metadata.language_info == {"name": "python"}
    assert raw == json.dumps(json.loads(raw), indent=1, ensure_ascii=False) + "\n", f"{path.name}: write it with indent=1 and a last newline"
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    for cell in code(notebook):
        assert cell.outputs == [] and cell.execution_count is None, f"{path.name}: cell {cell.id} holds outputs"


@every_notebook
def test_the_first_cells_are_title_and_card_setup_parameters(path):
    title, setup, parameters = read(path).cells[:3]
    assert title.cell_type == "markdown" and re.match(r"# \S", title.source)
    for words in ("You will learn", "You need", "You spend"):
        assert words in title.source
    hidden = "remove-cell" if path.stem == "index" else "hide-input"
    assert tags(setup) == ["setup", hidden] and setup.source == read(NOTEBOOKS[0]).cells[1].source, "the setup cell is the same everywhere"
    assert "parameters" in tags(parameters) and hidden in tags(parameters)
    assert sum("parameters" in tags(cell) for cell in read(path).cells) == 1


@every_notebook
def test_parameters_are_commented_and_the_mode_is_quick(path):
    source = read(path).cells[2].source
    lines = [line for line in source.splitlines() if line.strip()]
    assert lines and all("#" in line for line in lines), f"{path.name}: a comment beside each parameter"
    values = {node.targets[0].id: ast.literal_eval(node.value) for node in ast.parse(source).body}
    assert values["mode"] == "quick"


@every_notebook
def test_cells_are_short_and_parse(path):
    for cell in code(read(path)):
        assert len(cell.source.splitlines()) <= 15, f"{path.name}: cell {cell.id} has more than 15 lines"
        ast.parse(plain(cell.source))


@every_notebook
def test_visible_code_fits_its_column(path):
    for cell in code(read(path)):
        long = [line for line in cell.source.splitlines() if len(line) > 85]
        assert not long or {"hide-input", "hide-cell", "remove-cell"} & set(tags(cell)), f"{path.name}: cell {cell.id}: more than 85 characters: {long[0]}"


@every_chapter
def test_no_exercise_shows_its_target(path):
    """What a check compares with is computed, out of sight or by brute force: no number that the exercise does not name stands in the cell."""
    words, asked = dict(enumerate("zero one two three four five six seven eight nine ten".split())), set()
    for cell in read(path).cells:
        if cell.cell_type == "markdown":
            asked = set(re.findall(r"\w+", cell.source.lower())) if EXERCISE.search(cell.source) else asked
            continue
        if "checks." not in cell.source or {"solution", "hide-input"} & set(tags(cell)):
            continue
        tree = ast.parse(plain(cell.source))
        numbers = {node.targets[0].id for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
                   and isinstance(node.value, ast.Constant) and isinstance(node.value.value, (int, float))}  # fmt: skip
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in ("checks.close", "checks.equal"):
                target = ast.unparse(call.args[2])
                given = words.get(abs(int(target)), target) in asked if re.fullmatch(r"-?\d+", target) else False
                literal = isinstance(call.args[2], (ast.Constant, ast.UnaryOp, ast.BinOp))
                assert given or not literal and target not in numbers, (
                    f"{path.name}: cell {cell.id} shows what {ast.unparse(call.args[0])} should be"
                )


@every_notebook
def test_a_notebook_names_no_machine_and_draws_no_progress_bar(path):
    for cell in read(path).cells:
        for words in (r"/home/", r"/Users/", r"/tmp/", r"/root/", r"[A-Z]:\\\\", r"\btqdm\b", r"\bpickle\b", r"trust_remote_code"):
            assert not re.search(words, cell.source), f"{path.name}: cell {cell.id} holds {words}"


@every_notebook
def test_every_cell_that_draws_has_alt_text(path):
    for cell in code(read(path)):
        if re.search(r"\bplt\.(figure|subplots|show|subplot_mosaic)\b|\bsns\.\w+plot\b|\bImage\(", cell.source) and not defines_only(cell.source):
            alt = cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "")
            assert len(alt) >= 20, f"{path.name}: cell {cell.id} draws and has no alt text (metadata mystnb.image.alt)"


def defines_only(source):
    return all(isinstance(node, (ast.FunctionDef, ast.Import, ast.ImportFrom, ast.Assign)) for node in ast.parse(plain(source)).body) and (
        not any(isinstance(node, ast.Assign) and "plt." in ast.unparse(node) for node in ast.parse(plain(source)).body)
    )


@every_chapter
def test_two_or_three_exercises_each_with_a_folded_solution_and_an_instant_check(path):
    notebook = read(path)
    exercises = [match[2] for match in EXERCISE.finditer(text(notebook))]
    solutions = {match[2]: match[3] for match in SOLUTION.finditer(text(notebook))}
    assert 2 <= len(exercises) <= 3, f"{path.name} has {len(exercises)} exercises"
    assert set(solutions) == set(exercises), f"{path.name}: each exercise has a solution"
    for label, options in solutions.items():
        assert re.search(r"^:class:.*\bdropdown\b", options, re.M), f"{path.name}: the solution of {label} is not folded"
    assert all(label.split("-")[0] in path.stem.split("_") for label in exercises), f"{path.name}: labels begin with a word of the chapter's name"
    checks = [cell for cell in code(notebook) if "checks." in cell.source and "solution" not in tags(cell)]
    assert len(checks) >= len(exercises), f"{path.name}: an instant check for each exercise"
    for cell in code(notebook):
        if "solution" in tags(cell):
            assert "hide-cell" in tags(cell) or "hide-input" in tags(cell), f"{path.name}: the code of a solution is folded too"


@every_chapter
def test_a_chapter_without_its_solutions_still_parses_and_names_no_answer_it_lacks(path):
    """What a teacher hands out: cells tagged `solution` and solution directives removed. No remaining cell may need a name only they define."""
    defined, used = {*dir(builtins), "get_ipython"}, set()
    for cell in code(read(path)):
        if "solution" in tags(cell):
            continue
        for node in ast.walk(ast.parse(plain(cell.source))):
            if isinstance(node, ast.Name):
                (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                defined.add(node.name)
            elif isinstance(node, ast.arg):
                defined.add(node.arg)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                defined |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    assert not used - defined, f"{path.name}: without solutions these names are unknown: {sorted(used - defined)}"


# ---- the house around the chapters ----


def test_the_table_of_contents_lists_exactly_the_pages_that_exist():
    there = {path.relative_to(ROOT).with_suffix("").as_posix() for path in (ROOT / "book").iterdir() if path.suffix in (".ipynb", ".md")}
    listed = contents.pages(ROOT)
    assert len(listed) == len(set(listed)) and set(listed) - WRITTEN_BY_THE_BUILD == there
    assert listed[0] == "book/index"


def test_the_glossary_explains_the_book_s_own_words_and_no_others():
    glossary = (ROOT / "book/glossary.md").read_text(encoding="utf-8")
    terms = re.findall(r"^(?!```)(\S.*)\n  ", glossary.partition("```{glossary}")[2], re.M)
    assert len(terms) == len(set(terms)) and {"gap", "sharpness", "frozen", "verdict", "slot", "pure head"} <= set(terms)
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "book").glob("**/*.*") if path.suffix in (".md", ".ipynb") and path.stem != "glossary"]
    unused = [term for term in terms if term.lower() not in " ".join(pages).lower()]
    assert not unused, f"the glossary explains {unused}, which no page says"


def test_setup_cell_configuration_and_package_name_one_address_and_one_tag():
    setup = read(NOTEBOOKS[0]).cells[1].source
    repository = CONFIG["repository"]
    assert f'git+{repository["url"]}@v{rope_heads.__version__}"' in setup
    assert repository["branch"] == f"v{rope_heads.__version__}"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert project["version"] == citation["version"] == rope_heads.__version__
    assert citation["repository-code"] == repository["url"]
    command = re.sub(r"^#.*", "", setup, flags=re.M)
    assert "--no-deps" in command and "torch" not in command and "numpy" not in command
    assert artefacts.RELEASE == CONFIG["repository"]["url"].replace("https://github.com", "https://raw.githubusercontent.com")


def test_the_setup_cell_installs_what_torch_and_colab_do_not_bring():
    """With --no-deps, everything the package imports must be on Colab already or be named."""
    setup = read(NOTEBOOKS[0]).cells[1].source
    named = set(setup.partition('"')[2].partition('"')[2].split("\n")[0].split())
    needed = {re.split(r"[><=\[]", item)[0] for item in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]}
    on_colab = {"torch", "numpy", "scipy", "pandas", "pyarrow", "safetensors", "matplotlib", "seaborn", "psutil"}
    assert needed - on_colab <= named


def test_what_a_chapter_says_it_reads_exists():
    for path in contents.chapters(ROOT):
        contents.files_read(ROOT, path)


def test_direct_dependencies_are_locked_and_cuda_is_not():
    lock = {re.split(r"==", line)[0] for line in (ROOT / "requirements.txt").read_text().splitlines() if not line.startswith("#")}
    direct = {re.split(r"[=\s#]", line)[0] for line in (ROOT / "requirements.in").read_text().splitlines() if line and not line.startswith("#")}
    assert direct <= lock and not [name for name in lock if name.startswith(("nvidia-", "cuda-", "triton"))]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(item for extra in project["optional-dependencies"].values() for item in extra)]
    assert {re.split(r"[><=\[]", item)[0] for item in wanted} <= lock


def test_readme_gives_the_two_commands_and_one_picture_in_its_first_screen():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    screen = "\n".join(readme.splitlines()[:40])
    assert "make book" in screen and "make test" in screen
    pictures = re.findall(r"!\[([^\]]{20,})\]\(([^)]+)\)", screen)
    assert len(pictures) == 1 and (ROOT / pictures[0][1]).is_file()
    for target in re.findall(r"\]\((?!http)([^)#]+)", readme):
        assert (ROOT / target).exists(), f"README links to {target}"


def test_ci_and_workflows_run_the_readme_s_commands():
    script = (ROOT / ".ci/run").read_text()
    assert re.search(r"^make book$", script, re.M) and script.rstrip().endswith("make test")
    workflow = yaml.safe_load((ROOT / ".github/workflows/book.yml").read_text())
    commands = [step.get("run") for job in workflow["jobs"].values() for step in job["steps"]]
    assert ".ci/run" in commands


def test_data_holds_no_pickle_and_stays_small():
    files = [path for path in data_folder().rglob("*") if path.is_file()]
    assert not [path for path in files if path.suffix in (".pkl", ".pickle", ".pt", ".pth", ".bin", ".npy")]
    assert sum(path.stat().st_size for path in files) < 60e6
    assert not check_data(data_folder())[1]


def test_sources_pass_ruff():
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "--no-cache", "."], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
