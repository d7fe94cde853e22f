# make serve | test | test-cluster | load | dist | lint | format | setup | clean. Each sets up what it needs; a second call is instant.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check
ARGS ?=
PRESET ?=

GROUPS := architecture pure torch_cpu interpreter ray_local http
# Whole simulations: counting their lines would take longer than running them.
PRESETS := tests/pure/test_simulate_presets.py
# Groups that compute and start no cluster share the cores, a process each; fixtures of a file are made once.
SHARED := torch_cpu interpreter
WORKERS ?= 2
export PYTHONUNBUFFERED := 1

.PHONY: help setup serve test test-cluster lint format oracle load dist clean

help:
	@echo "make serve         start the cluster in the foreground (PRESET=laptop-moe, ARGS='--set ingress.port=9000')"
	@echo "make test          lint, types, floors, then every test that needs no GPU"
	@echo "make load          a short Locust run against a cluster of its own (ARGS='--peak 16 --seconds 60')"
	@echo "make test-cluster  ray up on hosts made of namespaces, one of which dies under load (needs root)"
	@echo "make dist          what the machines of a cluster install (dist/)"
	@echo "make lint          ruff, mypy and import-linter alone"
	@echo "make format        rewrite the code in the one format"
	@echo "make setup         create .venv with everything the above need"
	@echo "make clean         remove environments and caches"

# torch goes first and alone: resolved together with the rest, pip would fetch the CUDA build on a CPU machine.
.venv/.torch: constraints.txt
	@echo "setup: creating .venv and installing torch (about a minute)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "setup: $(PYTHON) is older than 3.11; name another: make PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	@$(PIP) install -qq "$$(grep '^torch==' constraints.txt)"
	@touch $@

.venv/.runtime: .venv/.torch pyproject.toml
	@echo "setup: installing the runtime"
	@$(PIP) install -qq -c constraints.txt -e .
	@touch $@

.venv/.ready: .venv/.runtime
	@echo "setup: installing test tools"
	@$(PIP) install -qq -c constraints.txt -e '.[test]'
	@$(PIP) check
	@touch $@

# transformers is only an oracle: it must never share an environment with our `kernels` package.
.oracle/.ready: constraints.txt
	@echo "setup: creating .oracle with transformers (about a minute)"
	@test -x .oracle/bin/pip || $(PYTHON) -m venv .oracle
	@.oracle/bin/pip --disable-pip-version-check install -qq "$$(grep '^torch==' constraints.txt)"
	@.oracle/bin/pip --disable-pip-version-check install -qq -c constraints.txt transformers safetensors numpy
	@.oracle/bin/pip --disable-pip-version-check check
	@touch $@

# Locust patches whatever imports it, pytest included: it gets an environment of its own.
.load/.ready: constraints.txt
	@echo "setup: creating .load with Locust"
	@test -x .load/bin/pip || $(PYTHON) -m venv .load
	@.load/bin/pip --disable-pip-version-check install -qq -c constraints.txt locust matplotlib
	@touch $@

setup: .venv/.ready

oracle: .oracle/.ready

serve: .venv/.runtime
	@exec $(BIN)/dspark serve $(if $(PRESET),--config $(PRESET)) $(ARGS)

load: .venv/.runtime .load/.ready
	@.load/bin/python -m load_tests --check --min-streams 4 $(ARGS)

test-cluster: .venv/.ready
	@$(BIN)/python -m tests.cluster $(ARGS)

# A wheel is made anew each time: its content, not its version, decides whether a machine installs it.
dist: .venv/.runtime
	@rm -rf dist
	@$(PIP) wheel -q --no-deps -w dist .
	@cp constraints.txt configs/ray_up/setup_node.sh configs/ray_up/node.sh dist/
	@ls dist

lint: .venv/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/.ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Groups run from cheap to dear and stop at the first that fails. The pure group is the one whose coverage counts.
test: export OMP_NUM_THREADS := 1
test: lint oracle
	@for group in $(GROUPS); do \
	  compgen -G "tests/$$group/test_*.py" >/dev/null || { echo "tests/$$group: no tests"; continue; }; \
	  echo "== tests/$$group"; \
	  if [ "$$group" = pure ]; then \
	    $(BIN)/coverage run -m pytest "tests/$$group" --ignore=$(PRESETS) -q $(ARGS); \
	    $(BIN)/coverage report; \
	    $(BIN)/pytest $(PRESETS) -q -n $(WORKERS) $(ARGS); \
	  elif [[ " $(SHARED) " == *" $$group "* ]]; then \
	    $(BIN)/pytest "tests/$$group" -q -n $(WORKERS) --dist loadfile $(ARGS); \
	  else \
	    $(BIN)/pytest "tests/$$group" -q $(ARGS); \
	  fi; \
	done

clean:
	rm -rf .venv .oracle .load .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .coverage build dist *.egg-info
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
