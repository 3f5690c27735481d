# make demo    a small store, made up and served on this machine: exact rows, hits, reads, times
# make test    the test suite
# make lint    ruff and mypy
#
# Each makes its own .venv if there is none and installs the pinned versions of constraints.txt into it.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test test-quick test-bounds test-denied test-rules test-counts test-gpu test-engines lint wheel clean

# The first Python that runs and is new enough; `make PYTHON=...` overrules.
PYTHON ?= $(shell for candidate in python3 python3.13 python3.12 python3.11; do \
	"$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo "$$candidate" && break; done)
BIN := .venv/bin
READY := .venv/.ssdgram-ready
PYTEST := $(BIN)/python -m pytest
PIP := $(BIN)/python -m pip --disable-pip-version-check

help:
	@sed -n 's/^# make /make /p' Makefile

$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { test -n "$(PYTHON)" || { echo "SSDGram needs Python 3.11 or newer with venv; none was found. Name one: make PYTHON=..." >&2; exit 1; }; \
		echo "making .venv with $(PYTHON)"; "$(PYTHON)" -m venv .venv; }
	@echo "installing the pinned packages (a minute or two the first time)"
	$(PIP) install -q -c constraints.txt setuptools
	$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[test,lint]'
	@touch $@

demo: $(READY)
	$(BIN)/python -m ssdgram demo

# A process a core, four at the most, a test file each at a time, long ones first (tests/conftest.py); `make test JOBS=1` runs all in one.
JOBS ?= $(shell cores=$$(nproc 2>/dev/null || echo 1); echo $$((cores < 4 ? cores : 4)))
SPREAD := $(if $(filter-out 0 1,$(JOBS)),-n $(JOBS) --dist loadfile --no-loadscope-reorder)
test: $(READY)
	$(PYTEST) -q $(SPREAD) -m "not gpu and not engines" $(ARGS)

lint: $(READY)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

# Compiled code with array bounds checked; such code has its own folder of compiled code.
BOUNDS := $(wildcard $(addprefix tests/,$(addsuffix .py,test_compiled test_directory test_hash test_overflow test_page \
	test_policy test_sketch test_store_bounds)))
test-bounds: $(READY)
	NUMBA_BOUNDSCHECK=1 SSDGRAM_CACHE_DIR="$${SSDGRAM_CACHE_DIR:-$(CURDIR)/.bounds-cache}" $(PYTEST) -q -m "not gpu and not slow" $(BOUNDS) $(ARGS)

# The suite as a container with Docker's default profile sees it: io_uring refused. Left out is what knows no queue: pure functions,
# formats, conversion, benchmarks' own arithmetic, packaging, GPUs; and the test that refuses io_uring itself.
QUEUELESS := $(wildcard tests/test_bench*.py tests/test_trace*.py) $(addprefix tests/test_,$(addsuffix .py, \
	blocks bounded checkpoint cli compression configs constants convert convert_kill dequant directory drive engine_contract \
	engine_loading engine_real engine_seams errors_raised exports files gather_cpu gds gds_gpu gds_store geometry hash history \
	history_scripts hotset_gds inspect io_uring_denied kernels_triton lookup manifest model numa overflow page policy ragged reference reuse \
	rules safetensors sequence serve_gpu sketch slim source store_gpu synth text token_map verify wheel))
DENIED := $(filter-out $(QUEUELESS),$(wildcard tests/test_*.py))
test-denied: $(READY)
	$(BIN)/python tests/deny_io_uring.py $(PYTEST) -q $(SPREAD) -m "not gpu and not slow and not engines" $(DENIED) $(ARGS)

# Every rule of tests/rules/table.py taken out in turn: some test must miss it. Compiles a changed planner two dozen times: half an
# hour, and not part of CI, which only checks that the table fits the sources (tests/test_rules.py).
test-rules: $(READY)
	$(BIN)/python tests/rules/remove.py $(ARGS)

# Deaths and cancellations in the numbers that were asked for: kill -9 of a client between prefetch and use, of one in a loop of steps, of
# the server, ten times each; 10,000 cancellations with a server and 10,000 without; 10,000 scripts of histories. Some minutes.
test-counts: $(READY)
	SSDGRAM_CANCELLATIONS=10000 $(PYTEST) -q -m "not gpu" --durations=12 tests/test_serve_death.py tests/test_history_scripts.py \
		tests/test_planner.py::test_cancelled_at_random $(ARGS)

test-gpu: $(READY)
	$(PYTEST) -q -m gpu $(ARGS)

# The plug-ins' tables against the published files of both engines, and vLLM's own PLE classes with and without the plug-in; fetched by
# pip into .peer/ (about 380 MB, and 60 MB of packages that vLLM's files import, once).
test-engines: $(READY)
	PYTHONPATH=. $(BIN)/python tests/fetch_engines.py .peer/engines
	$(PYTEST) -q -m engines $(ARGS)

wheel: $(READY)
	$(BIN)/python -m build --wheel --sdist --no-isolation --outdir dist .

clean:
	rm -rf build dist .bounds-cache .rules-cache .mypy_cache .ruff_cache .pytest_cache *.egg-info
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
