# Sets up .venv by itself; `make help` lists the targets. Second runs only do what changed.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
# The tested torch, asked for by itself and exactly: left to the dependencies, pip would take the newest CUDA build.
TORCH ?= torch==2.13.0
# Options for that one install, such as an index of CPU builds: make test TORCH_ARGS='--index-url URL'
TORCH_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq --no-input
STAMP := $(VENV)/.installed
PROTO := proto/rollout/v1/rollout.proto
PROTOC := PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I proto

# The real torch_npu breaks `import torch` where CANN is missing, so its contract tests live apart, with stub libraries.
NPU_VENV := .venv-npu
NPU_PIP := $(NPU_VENV)/bin/python -m pip --disable-pip-version-check -qq --no-input
NPU_STAMP := $(NPU_VENV)/.installed
FLASH_ATTN_NPU := flash-attn-npu==0.4.2.post1

.PHONY: help setup model demo test test-slow test-npu-contract lint fix proto schema bench

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v < (3, 13) or sys.exit(f"zerodrift needs Python 3.11 or 3.12, $(PYTHON) is {v[0]}.{v[1]}; set PYTHON=")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (minutes the first time)"
	@$(PIP) install $(TORCH_ARGS) '$(TORCH)'
	@$(PIP) install --editable '.[dev,demo]'
	@touch $@

setup: $(STAMP) ## make .venv with everything that the other targets need

model: setup ## fetch, check and convert the demo's model (cached outside the checkout)
	@$(BIN)/python -m rollout.assets

demo: setup ## the whole path on this machine: rollout, trainer, comparison by bits
	@$(BIN)/zerodrift demo

test: model ## every test not marked slow
	@$(BIN)/python -m pytest -x -q -m 'not slow'

test-slow: model ## the tests marked slow (none so far)
	@$(BIN)/python -m pytest -x -q -m slow || [ $$? -eq 5 ]

$(NPU_STAMP): tests/npu_contract/stubs.py tests/npu_contract/requirements.txt
	@command -v gcc >/dev/null && command -v readelf >/dev/null || { echo "make test-npu-contract needs gcc and binutils"; exit 1; }
	@test -x $(NPU_VENV)/bin/python || $(PYTHON) -m venv $(NPU_VENV)
	@echo "installing into $(NPU_VENV)"
	@$(NPU_PIP) install $(TORCH_ARGS) '$(TORCH)'
	@$(NPU_PIP) install -r tests/npu_contract/requirements.txt
	@$(NPU_PIP) install --no-deps torch-npu==2.13.0
	@TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(NPU_VENV)/bin/python tests/npu_contract/stubs.py
	@FLASH_ATTENTION_SKIP_NPU_BUILD=TRUE $(NPU_PIP) install --no-deps --no-build-isolation '$(FLASH_ATTN_NPU)'
	@touch $@

test-npu-contract: $(NPU_STAMP) ## our NPU calls against the real torch_npu and flash_attn_npu, without a device
	@$(NPU_VENV)/bin/python -m pytest -x -q -W default --confcutdir=tests/npu_contract tests/npu_contract

lint: setup ## ruff, mypy, import order, buf, freshness of generated files
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check --quiet
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/buf lint proto
	@out=$$(mktemp -d); trap 'rm -rf "$$out"' EXIT; \
	$(PROTOC) --python_out="$$out" --mypy_out="$$out" --grpc_python_out="$$out" --mypy_grpc_out="$$out" $(PROTO); \
	diff -r -x __init__.py -x __pycache__ "$$out/rollout/v1" rollout/v1 || { echo "rollout/v1 is not current: make proto"; exit 1; }

fix: setup ## what ruff can mend by itself
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

proto: setup ## regenerate rollout/v1
	@$(PROTOC) --python_out=. --mypy_out=. --grpc_python_out=. --mypy_grpc_out=. $(PROTO)

schema: setup ## regenerate configs/schema.json
	@schema=$$($(BIN)/python -m rollout.config) && printf '%s\n' "$$schema" > configs/schema.json

bench: setup ## the benchmarks
	@$(BIN)/python -m benchmarks
