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
PROTO := $(wildcard proto/rollout/v1/*.proto)
PROTOC := PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I proto

.PHONY: help setup model demo test test-slow explain-suite lint fix proto schema bench

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

explain-suite: model ## the planted faults: verdict of `zerodrift explain`, right or wrong, time
	@$(BIN)/python -m tests.explain.suite

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
