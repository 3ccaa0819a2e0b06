# Everything a person or CI calls. `make help` lists it.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
SEED ?= 1
# TORCH=cpu takes torch from uv's CPU backend (0.2 GB) in place of the locked CUDA build (4.6 GB); both run on CPUs.
TORCH ?= locked
RUN_ARGS ?=
IMAGES ?=
HELM ?= helm
HELM_ARGS ?=
ROWS ?=
PYTEST_ARGS ?=

# The agent is started as `python`: the one that has its packages.
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Bytecode halves the start of verl: it is written at the installation, and for our own modules when they are first used.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help
help: ## this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

# ---- environments -----------------------------------------------------------------------------------------------

$(BIN)/uv: locks/bootstrap.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.11 or name one, make PYTHON=…"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r locks/bootstrap.txt
	touch $@

ifeq ($(TORCH),cpu)
$(VENV)/.torch-cpu: locks/torch.in $(BIN)/uv
	@echo "torch: from uv's CPU backend, in place of the hashed lock locks/torch.txt"
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --torch-backend cpu -r locks/torch.in
	touch $@
TORCH_STAMP := $(VENV)/.torch-cpu
else
$(VENV)/.torch-locked: locks/torch.txt $(BIN)/uv
	@echo "torch: the CUDA build of the lock (4.6 GB on disk, runs on CPUs too; TORCH=cpu takes the small build)"
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --require-hashes -r locks/torch.txt
	touch $@
TORCH_STAMP := $(VENV)/.torch-locked
endif

$(VENV)/.demo: locks/trainer.txt pyproject.toml $(TORCH_STAMP)
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --require-hashes --no-deps -r locks/trainer.txt
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --no-deps -e .
	touch $@

$(VENV)/.dev: locks/dev.txt pyproject.toml $(TORCH_STAMP)
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --require-hashes --no-deps -r locks/dev.txt
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --no-deps -e .
	touch $@

.PHONY: install install-dev
install: $(VENV)/.demo ## what a run on this machine needs, into .venv
install-dev: $(VENV)/.dev ## the same and the tools of a developer

# ---- what a user wants --------------------------------------------------------------------------------------------

.PHONY: demo
demo: install ## train the calculator agent on two CPU cores, in about four minutes (SEED=n)
	$(BIN)/python examples/calculator/make_tasks.py
	$(BIN)/python examples/calculator/make_policy.py --seed $(SEED)
	$(BIN)/kitestring run examples/calculator/trainingrun.yaml --seed $(SEED) $(RUN_ARGS)

# ---- what a developer wants ---------------------------------------------------------------------------------------

.PHONY: test lint format bench test-vllm e2e e2e-full e2e-up e2e-down generate locks
test: install-dev ## every test, the faults and one real training included
	$(BIN)/pytest -m "not vllm" -n 3 --dist loadfile $(PYTEST_ARGS)

lint: install-dev ## formatting, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: install-dev ## format, and mend what the linter can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install-dev ## the costs of docs/performance.md against their allowed ranges (ROWS="rows worker": only those)
	$(BIN)/python -m bench $(ROWS)

test-vllm: install-dev ## the policy server's contract against the real vLLM on CPU
	$(BIN)/python tests/policy_server/vllm_server.py

e2e: e2e-up ## the core scenarios on a real cluster of three nodes (KUBECONFIG, else kind; see e2e/README.md)
	$(BIN)/pytest e2e -m "core and not full" $(PYTEST_ARGS)

e2e-full: e2e-up ## every scenario, those of nodes that fail, of Kueue and of scale too
	$(BIN)/pytest e2e -m "core or full" $(PYTEST_ARGS)

e2e-up: install-dev ## have the cluster of the end-to-end tests
	e2e/cluster up

e2e-down: ## delete it, and end what was started for it
	e2e/cluster down

generate: install-dev ## crds/manifests and docs/api.md from the models, and what the chart and its page take from them
	$(BIN)/python -m kitestring_cli.generate
	$(BIN)/python charts/generate.py

.PHONY: images manifests
images: $(BIN)/uv ## the container images (IMAGES="operator rollout --tag 1": only those, so); needs Docker
	UV=$(BIN)/uv images/build.sh $(IMAGES)

manifests: ## build/install.yaml: the rendered chart as one file (HELM_ARGS="--set seaweedfs.enabled=true"); needs Helm
	@mkdir -p build
	{ printf 'apiVersion: v1\nkind: Namespace\nmetadata:\n  name: kitestring\n'; \
	  $(HELM) template kitestring charts/kitestring --namespace kitestring --kube-version 1.31 --skip-tests $(HELM_ARGS); } > build/install.yaml
	@echo "kubectl apply -f build/install.yaml"

locks: $(BIN)/uv ## write every lock file anew
	bash locks/compile.sh
