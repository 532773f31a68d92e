# Every target makes the environment it needs; `make demo` or `make test` is the
# only command to type in a fresh clone. `make PYTHON=/path/to/python3.12 test`
# chooses the interpreter (`make clean` first if another one made .venv).
PYTHON ?= python3
VENV ?= .venv
# One worker per core, at most four. The tests of a file stay together (worksteal), so
# that they share what is compiled.
PYTEST_ARGS ?= -n auto --maxprocesses 4 --dist worksteal
# The marks of the tests that `make test` runs; all tests with `make test MARKS=`.
MARKS ?= not slow
# Programs that `make fuzz` generates.
FUZZ ?= 10000
# For every command of the benchmarks: --resume, --models mlp,vit_s16, ...
BENCH_ARGS ?=
# For the corpus: --only transformers/Bert, ...
CORPUS_ARGS ?=
# Without it the newest Python wins, which gets the newest JAX.
BENCH_PYTHON ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
EXAMPLES_READY := $(VENV)/.ready-examples
RUN_READY := $(VENV)/.ready-test
DEV_READY := $(VENV)/.ready-dev
DOCS_READY := $(VENV)/.ready-docs
BENCH := .venv-bench
BENCH_GPU := .venv-bench-gpu
CORPUS := .venv-corpus
export JAX_PLATFORMS ?= cpu

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-slow fuzz check lint format types pyright doctest layering docs
.PHONY: test-corpus breaks coverage clean bench bench-gpu-aot bench-gpu soak convergence

help: ## Lists the targets.
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

demo: $(EXAMPLES_READY) ## Trains on real data, is killed, resumes; prints a table.
	$(BIN)/python -m examples.digits.demo

test: $(RUN_READY) ## The test suite, doctests included, without its slow part.
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m "$(MARKS)"

test-slow: $(RUN_READY) ## The slow part: long tables, and examples in processes.
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m slow

fuzz: $(RUN_READY) ## FUZZ (10000) generated programs, with seeds of its own.
	FLAX_AMP_FUZZ=$(FUZZ) $(BIN)/python -m pytest $(PYTEST_ARGS) -rP tests/fuzz \
	  tests/rewriter/test_six_lines.py

test-corpus: $(CORPUS)/.ready-corpus ## Programs nobody here wrote, pinned; writes a table.
	$(CORPUS)/bin/python -m benchmarks corpus $(CORPUS_ARGS)

breaks: $(RUN_READY) ## Breaks the package, line by line; each must fail its tests.
	$(BIN)/python -m tests.breaks

convergence: $(RUN_READY) ## Trains six tasks in each precision to the end; compares.
	$(BIN)/python -m benchmarks convergence

coverage: $(DEV_READY) ## Lines and branches that `make test` does not reach.
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m "not slow" --cov

check: lint types test ## Lint, types, and the test suite.

lint: $(DEV_READY) ## ruff: rules and formatting.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(DEV_READY) ## Formats, and fixes what ruff can fix.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(DEV_READY) ## mypy.
	$(BIN)/mypy

pyright: $(DEV_READY) ## pyright, for what users write; it needs Node.
	$(BIN)/pyright --pythonpath $(BIN)/python

doctest: $(RUN_READY) ## Only the examples in docstrings.
	$(BIN)/python -m pytest flax_amp

layering: $(RUN_READY) ## Only the one-way imports.
	$(BIN)/python -m pytest tests/test_layering.py

docs: $(DOCS_READY) ## The documentation as a site; warnings are errors.
	$(BIN)/python -m sphinx -W --keep-going -E -q -b html docs docs/_build/html
	@echo "open docs/_build/html/index.html"

bench: $(BENCH)/.ready-bench ## Costs for three TPUs and on the CPU; tables and plots.
	$(BENCH)/bin/python -m benchmarks tpu $(BENCH_ARGS)
	$(BENCH)/bin/python -m benchmarks tpu --target v6e $(BENCH_ARGS)
	$(BENCH)/bin/python -m benchmarks tpu --target tpu7x $(BENCH_ARGS)
	$(BENCH)/bin/python -m benchmarks mesh $(BENCH_ARGS)
	$(BENCH)/bin/python -m benchmarks host $(BENCH_ARGS)
	$(BENCH)/bin/python -m benchmarks error $(BENCH_ARGS)
	$(BENCH)/bin/python -m benchmarks cpu $(BENCH_ARGS)
	$(BENCH)/bin/python -m benchmarks step
	$(BENCH)/bin/python -m benchmarks report

bench-gpu-aot: $(BENCH_GPU)/.ready-bench-gpu ## Costs for an H200 and a B200, without one.
	$(BENCH_GPU)/bin/python -m benchmarks gpu-aot $(BENCH_ARGS)
	$(BENCH_GPU)/bin/python -m benchmarks gpu-aot --target b200 $(BENCH_ARGS)
	$(BENCH_GPU)/bin/python -m benchmarks report

soak: $(RUN_READY) ## 50,000 steps in float16 with kills, bad batches and damage.
	$(BIN)/python -m benchmarks soak

bench-gpu: ## Times on the GPU that is here, with the JAX that is here.
	PYTHONPATH=. $(PYTHON) -m benchmarks gpu $(BENCH_ARGS)
	PYTHONPATH=. $(PYTHON) -m benchmarks report

clean: ## Removes the environments and what the tools left.
	rm -rf $(VENV) .venv-* .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- the environment: made once, again when pyproject.toml changes -------------------

$(VENV)/.made $(CORPUS)/.made:
	@for python in "$(PYTHON)" python3 python3.13 python3.12 python3.11; do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "making $(@D) with $$("$$python" --version)"; \
	    "$$python" -m venv --clear "$(@D)" && touch $@ && exit 0; \
	    echo "error: '$$python -m venv' failed; on Debian: apt-get install python3-venv" >&2; \
	    exit 1; \
	  fi; \
	done; \
	echo "error: no Python >= 3.11 (tried $(PYTHON), python3, python3.13, python3.12," >&2; \
	echo "  python3.11). Install one, or name it: make PYTHON=/path/to/python $(MAKECMDGOALS)" >&2; \
	exit 1

$(EXAMPLES_READY): pyproject.toml | $(VENV)/.made
	@echo "installing flax_amp[examples] into $(VENV): one to five minutes"
	@began=$$(date +%s); $(PIP) install --quiet --editable '.[examples]' && \
	  echo "installed in $$(($$(date +%s) - began)) s"
	@touch $@

# Each is named after a group of pyproject.toml. `make -j` installs one at a time.
$(DEV_READY): | $(RUN_READY)
$(RUN_READY) $(DEV_READY) $(DOCS_READY): pyproject.toml | $(VENV)/.made
	@echo "installing the group $(patsubst .ready-%,%,$(@F)) into $(VENV); it may take minutes"
	@$(PIP) install --quiet --upgrade 'pip>=25.1'    # which knows --group
	@$(PIP) install --quiet --editable . --group $(patsubst .ready-%,%,$(@F))
	@touch $@

$(BENCH)/.made $(BENCH_GPU)/.made:
	@for python in $(BENCH_PYTHON) \
	  python3.13 "$$HOME"/.pyenv/versions/3.13.*/bin/python \
	  python3.12 "$$HOME"/.pyenv/versions/3.12.*/bin/python \
	  python3.11 "$(PYTHON)"; do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "making $(@D) with $$("$$python" --version)"; \
	    "$$python" -m venv --clear "$(@D)" && touch $@ && exit 0; \
	  fi; \
	done; \
	echo "error: no Python >= 3.11 that can make an environment; name one:" >&2; \
	echo "  make BENCH_PYTHON=/path/to/python $(MAKECMDGOALS)" >&2; \
	exit 1

# jax[cuda12] brings the plugin that fits its JAX; libtpu is the newest.
$(BENCH)/.ready-bench: pyproject.toml | $(BENCH)/.made
$(BENCH_GPU)/.ready-bench-gpu: pyproject.toml | $(BENCH_GPU)/.made
$(CORPUS)/.ready-corpus: pyproject.toml | $(CORPUS)/.made
$(BENCH)/.ready-bench $(BENCH_GPU)/.ready-bench-gpu $(CORPUS)/.ready-corpus:
	$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --upgrade 'pip>=25.1'
	$(@D)/bin/python -m pip --disable-pip-version-check install --quiet \
	  --editable . --group $(patsubst .ready-%,%,$(@F))
	@touch $@
