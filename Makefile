# Every target does all of its own set-up: `make demo` and `make test` work on a fresh clone.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
SOURCES := backend_src benchmarks client examples tests training model_repository

.DEFAULT_GOAL := help

.PHONY: help
help: ## Show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

.PHONY: setup
setup: $(INSTALLED) ## Install everything into .venv (torch, diffusers, an embedded Triton, development tools)

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable '.[server,embedded,development]'
	@touch $@

.PHONY: demo
demo: setup ## Run the main job: 16 users' requests fused on a real Triton server; writes demo.png
	$(BIN)/python -m examples.demo

.PHONY: serve
serve: setup ## Serve model_repository on ports 8000 (HTTP), 8001 (gRPC) and 8002 (metrics)
	$(BIN)/triton-diffusion serve model_repository

.PHONY: test
test: setup ## Run all tests, those on the real Triton server included
	$(BIN)/python -m pytest

.PHONY: lint
lint: setup ## Check style and types
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

.PHONY: format
format: setup ## Format the code
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

.PHONY: bench-stepwise
bench-stepwise: setup ## Measure step-wise against request-level batching; writes build/stepwise.json
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.stepwise

.PHONY: bench-lora
bench-lora: setup ## Measure waves of different LoRA adapters; writes build/lora.json
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.lora

.PHONY: bench-instances
bench-instances: setup ## Measure two model instances against one; writes build/instances.json
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.instances

.PHONY: bench-tuning
bench-tuning: setup ## Measure max_num_seqs, the wait and the modes; writes build/tuning.json and docs/tuning.png
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.tuning

.PHONY: families
families: setup ## Compare every family's fused results with the stock calls; writes build/families.json
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.families

.PHONY: docs
docs: setup ## Write docs/reference.md anew from the tables in the code
	$(BIN)/python -m triton_diffusion.reference docs/reference.md

.PHONY: constraints
constraints: setup ## Choose anew which releases the image installs; writes deploy/constraints.txt
	$(BIN)/uv pip compile --quiet --upgrade --python-version 3.12 --python-platform x86_64-unknown-linux-gnu \
		--extra server --extra tracing --extra vision --no-annotate --no-emit-index-url --custom-compile-command 'make constraints' \
		--output-file deploy/constraints.txt pyproject.toml

.PHONY: train-shapes
train-shapes: setup ## Train the shapes model anew (about an hour)
	$(BIN)/python -m training.shapes.train --output model_repository/shapes/1/checkpoint

.PHONY: check-shapes
check-shapes: setup ## Measure how often the shapes model draws what its caption says; writes build/shapes.json
	$(BIN)/python -m training.shapes.check

.PHONY: train-lora
train-lora: setup ## Train the shapes model's LoRA adapters anew (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m training.shapes.lora

.PHONY: check-lora
check-lora: setup ## Measure how often the shapes model's adapters do what they should; writes build/lora-shapes.json
	$(BIN)/python -m training.shapes.check_lora

.PHONY: clean
clean: ## Remove everything that was built or installed here
	rm -rf $(VENV) build pictures demo.png .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
