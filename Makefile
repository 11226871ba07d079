# Everything a person or CI runs. `make` alone prints the list. Needs GNU make, bash, Python >= 3.11 and, for the stack,
# Docker with compose >= 2.24.4.
SHELL := bash
.SHELLFLAGS := -e -o pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

# Unset ones keep the defaults of docker/up; `make X=y` and `X=y make` are the same.
export LAYOUT REGISTRY START_S ENGINES SECCOMP MODEL DTYPE STEPS SEED PORT THREADS DETACH ENGINE_TIMEOUT ENGINE_ARGS OUT PROJECT TAG BASE_IMAGE TORCH_INDEX UPGRADE PROFILES

BIN := .venv/bin
PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3.13 python3,$(shell $(p) -c 'import sys; sys.version_info >= (3, 11) and print("$(p)")' 2>/dev/null)))

##@ The stack

.PHONY: up-colocated
up-colocated: wheels ## Train a model while vLLM serves it from another container
	@LAYOUT=colocated docker/up

.PHONY: up-disagg
up-disagg: wheels ## The same with ENGINES=n engines (2) that share nothing with the trainer but one network
	@LAYOUT=disagg docker/up

.PHONY: down
down: ## End this checkout's stack (the prepared model stays)
	@docker/down

.PHONY: up-k8s
up-k8s: ## The same in the cluster of kubectl's context (LAYOUT=colocated|disagg, SECCOMP=...|RuntimeDefault, REGISTRY=)
	@k8s/up

.PHONY: down-k8s
down-k8s: ## End it
	@k8s/down

.PHONY: logs
logs: ## Follow the containers' logs
	@. docker/lib.sh && compose logs --follow

.PHONY: images
images: wheels ## Build the trainer and engine images
	@. docker/lib.sh && COMPOSE_PROGRESS=auto compose build

.PHONY: doctor
doctor: dev ## What this machine allows
	@$(BIN)/syncstack doctor

##@ Development

.PHONY: dev
dev: .venv/ready ## Make .venv with the package (editable) and its tools

.venv/ready: requirements/torch.txt requirements/build.txt requirements/dev.txt pyproject.toml docker/dev
	@docker/dev "$(PYTHON)"

.PHONY: wheels
wheels: ## Fetch torch into wheels/ if this machine's pip has a place of its own for it
	@docker/wheels

.PHONY: test
test: lint verify-seccomp verify-report-schema test-unit test-process test-k8s test-compose ## Everything, in this order, up to the first failure

.PHONY: lint
lint: dev ## ruff, mypy --strict, shellcheck
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck --external-sources --source-path=SCRIPTDIR docker/dev docker/down docker/healthcheck docker/input.sh docker/lib.sh docker/lock docker/up docker/wheels k8s/down k8s/lib.sh k8s/up .ci/run

.PHONY: test-unit
test-unit: dev ## Fast tests, no Docker
	$(BIN)/pytest tests/unit

.PHONY: test-process
test-process: dev ## Trainer and engine as real processes under each profile
	$(BIN)/pytest tests/process

.PHONY: test-compose
test-compose: dev images ## The real containers, once per profile (PROFILES="a b": these only)
	$(BIN)/pytest tests/compose

.PHONY: test-k8s
test-k8s: dev ## Both layouts in a cluster that has the images, under each profile
	$(BIN)/pytest tests/k8s

.PHONY: faults
faults: dev ## docs/faults.md from a run of every fault in every phase
	FAULTS_TABLE=docs/faults.md $(BIN)/pytest tests/process/test_faults.py

.PHONY: bench
bench: dev ## The transport against one memcpy and one digest of the same bytes
	$(BIN)/python -m bench

.PHONY: bench-senders
bench-senders: dev ## As root: 1, 2 and 4 trainer ranks behind limited links, in network namespaces
	$(BIN)/python -m bench.senders

##@ Generated files

.PHONY: lock
lock: dev ## requirements/*.txt from requirements/*.in (UPGRADE=1: take newer releases)
	@docker/lock

.PHONY: seccomp
seccomp: dev ## seccomp/*.json from the table in syncstack/seccomp
	$(BIN)/syncstack seccomp generate

.PHONY: verify-seccomp
verify-seccomp: dev ## Fails when seccomp/*.json is not what `make seccomp` writes
	$(BIN)/syncstack seccomp verify

.PHONY: report-schema
report-schema: dev ## docs/report.schema.json from syncstack/run/schema.py
	$(BIN)/python -m syncstack.run.schema > docs/report.schema.json

.PHONY: verify-report-schema
verify-report-schema: dev ## Fails when docs/report.schema.json is not the report's
	$(BIN)/python -m syncstack.run.schema --check docs/report.schema.json

.PHONY: verify-manifests
verify-manifests: dev ## Fails when the chart renders other objects than the kustomizations (kubectl, helm; no cluster)
	$(BIN)/pytest tests/k8s/test_manifests.py tests/k8s/test_chart.py

##@ Other

.PHONY: clean
clean: ## Remove .venv, caches, images, and the volumes of this checkout
	@if docker info >/dev/null 2>&1; then \
	  docker/down --volumes; \
	  docker image rm --force $$(docker image ls --quiet 'syncstack/*') 2>/dev/null || true; \
	  docker image prune --force --filter label=io.syncstack.image >/dev/null; \
	fi
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis wheels

.PHONY: help
help: ## This list
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {print "\n" substr($$0, 5)} /^[a-z-]+:.*## / {printf "  %-22s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@printf '\nVariables of up-colocated:\n'
	@printf '  %-36s %s\n' \
	  'SECCOMP=restrictive' 'or permissive, docker-default, unconfined' \
	  'MODEL=DIR' 'a Hugging Face folder instead of SmolLM2-135M-Instruct' \
	  'STEPS=n SEED=n' 'of the training' \
	  'DTYPE=float32' 'of the weights in the engine; or bfloat16, float16' \
	  'PORT=8000' 'where the engine answers, on 127.0.0.1' \
	  'DETACH=1' 'leave the engine serving the last version' \
	  'ENGINE_TIMEOUT=300 ENGINE_ARGS=...' 'seconds to wait for the engine; more options for it' \
	  'OUT=out THREADS=n' 'folder of the results; CPU threads of each side' \
	  'PROJECT=name TAG=dev BASE_IMAGE=...' 'compose project, image tag, base of the images'
