# Each target works from a bare checkout: it makes .venv when that is missing, and brings it up to date
# when pyproject.toml has changed.
#
#   make demo    tune a slow image training while it runs, three minutes in all, then run it under the plan
#                (make demo BUDGET=1m: shorter)
#   make test    lint, types, import contract, fast tests     (make test TESTS=tests/check MARK=slow)
#                (make test MARK=slow PART=2/8: the second of eight parts of the slow ones, which are hours in all)
#   make fuzz    the property tests on fresh examples (make test draws the same ones each time)
#   make lint    ruff only
#   make bench   measure against hand-tuned twins
#   make docs    the site, from docs/ and the docstrings, into build/site; links checked
#   make dist    wheel and sdist into dist/; the wheel is tried in a bare virtual environment
#   make clean   remove what these made, except .venv
#
# On Linux, pip may bring torch with gigabytes of CUDA. For a CPU-only torch:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test

PYTHON ?= python3
TORCH  ?= torch==2.13.0
TESTS  ?= tests
MARK   ?= not slow
PART   ?= 1/1
JOBS   ?= 4
BUDGET ?= 3m

BIN   := .venv/bin
STAMP := .venv/.hasten-dev
BENCH := .venv/.hasten-bench
DOCS  := .venv/.hasten-docs
DEMO  := build/demo
BARE  := build/bare

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Empty is as unset: pytest keeps the tests that it has rewritten, 6 s of CPU for each of its processes.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo test pytest fuzz lint types imports bench docs dist clean compiler

help:
	@sed -n 's/^#   make/  make/p' Makefile

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "hasten needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) -V 2>&1); try: make PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/pip || { echo "making .venv"; $(PYTHON) -m venv .venv; }
	@$(BIN)/python -c 'import re, sys; from importlib.metadata import version; \
	  sys.exit(tuple(map(int, re.findall(r"\d+", version("torch"))[:2])) < (2, 9))' 2>/dev/null || \
	  { echo "installing $(TORCH)"; $(BIN)/pip install -qq "$(TORCH)"; }
	@echo "installing hasten[dev] into .venv"
	@$(BIN)/pip install -qq -e '.[dev]'
	@touch $@

$(BENCH): $(STAMP)
	@echo "installing hasten[bench] into .venv"
	@$(BIN)/pip install -qq -e '.[bench]'
	@touch $@

$(DOCS): $(STAMP)
	@echo "installing hasten[docs] into .venv"
	@$(BIN)/pip install -qq -e '.[docs]'
	@touch $@

# torch.compile builds its CPU kernels with a C++ compiler; without one everything else still works.
compiler:
	@command -v "$${CXX:-g++}" >/dev/null || command -v clang++ >/dev/null || \
	  echo "note: no g++ here, so torch.compile cannot be tried on the CPU (Debian, Ubuntu: apt-get install g++)"

lint: $(STAMP)
	@echo "ruff"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { echo "not formatted; to format: $(BIN)/ruff format ." >&2; exit 1; }

types: $(STAMP)
	@echo "mypy"
	@$(CHECK) $(BIN)/mypy --no-error-summary

imports: $(STAMP)
	@echo "import contract"
	@out=$$($(CHECK) $(BIN)/lint-imports --no-logo 2>&1) || { echo "$$out" >&2; exit 1; }

# Tests wait for a third of their time: types and the import contract are checked meanwhile.
test: lint compiler
	@$(BIN)/python -m compileall -q -j 0 src  # once, not in each of the hundreds of processes that tests start
	@$(MAKE) --no-print-directory -j 3 types imports pytest CHECK="nice -n 19"

pytest: $(STAMP)
	@echo "pytest: $(TESTS) ($(MARK))"
	@$(BIN)/pytest -q -n $(JOBS) -m "$(MARK)" --part $(PART) $(TESTS)

demo: $(STAMP) compiler
	@mkdir -p $(DEMO)
	@echo "== drawing the images of the demo into $(DEMO)/shapes"
	@cd $(DEMO) && "$(CURDIR)/$(BIN)/python" ../../examples/slow_images.py --data shapes --epochs 0
	@echo "== hasten tune --budget $(BUDGET) examples/slow_images.py --epochs 8"
	@cd $(DEMO) && "$(CURDIR)/$(BIN)/hasten" tune --budget $(BUDGET) ../../examples/slow_images.py --data shapes --epochs 8
	@echo "== hasten run examples/slow_images.py --epochs 8"
	@cd $(DEMO) && "$(CURDIR)/$(BIN)/hasten" run ../../examples/slow_images.py --data shapes --epochs 8
	@echo "== the plan:   $(CURDIR)/$(DEMO)/hasten.toml"
	@echo "== the report: $(CURDIR)/$(DEMO)/hasten-report.html"

fuzz: $(STAMP) compiler
	@$(BIN)/pytest -q -n $(JOBS) -m hypothesis --hypothesis-profile=fuzz $(TESTS)

bench: $(BENCH) compiler
	@$(BIN)/python benchmarks/tune_vs_hand.py

docs: $(DOCS)
	@echo "mkdocs build --strict"
	@$(BIN)/mkdocs build --quiet --strict --site-dir build/site
	@echo "== the site: $(CURDIR)/build/site/index.html"

# The wheel must work where nothing else is: no checkout on the path, no extras.
dist: $(STAMP)
	@rm -rf dist $(BARE)
	@echo "building wheel and sdist"
	@$(BIN)/pip install -qq -e '.[dist]'
	@$(BIN)/python -m build --outdir dist . >build/dist.log 2>&1 || { cat build/dist.log >&2; exit 1; }
	@echo "installing $$(ls dist/*.whl) into a bare environment"
	@$(PYTHON) -m venv $(BARE)
	@$(BARE)/bin/pip install -qq "$(TORCH)" dist/*.whl
	@cp examples/tabular_mlp.py $(BARE)/
	@echo "hasten doctor, tune and run from there"
	@cd $(BARE) && bin/hasten --version && bin/hasten doctor tabular_mlp.py --epochs 1 >doctor.log && \
	  bin/hasten tune --budget 1m tabular_mlp.py --epochs 3 >tune.log && bin/hasten run tabular_mlp.py --epochs 1 || \
	  { tail -n 40 doctor.log tune.log >&2; exit 1; }
	@ls dist

clean:
	@echo "removing build, dist and caches (.venv stays; rm -rf .venv removes it)"
	@rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
