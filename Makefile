# Every target below `env` works in a fresh clone: the environment is created on first use and checked by one stamp.
PYTHON ?= python3
# A second interpreter with `verifiers` installed, for the benchmarks that compare against it.
VERIFIERS_PYTHON ?=

# A second interpreter with vLLM installed, for `test-vllm` and benchmarks; docs/inference.md says how to make one.
VLLM_PYTHON ?=

# A second interpreter with `trl` installed, for the benchmarks that compare against it.
TRL_PYTHON ?=

# SmolLM2-135M-Instruct as a Hugging Face directory, for the benchmarks that run it.
SMOLLM2 ?=

COMPETITORS := $(if $(VERIFIERS_PYTHON),--verifiers-python $(VERIFIERS_PYTHON)) \
	$(if $(VLLM_PYTHON),--vllm-python $(VLLM_PYTHON)) $(if $(TRL_PYTHON),--trl-python $(TRL_PYTHON)) \
	$(if $(SMOLLM2),--smollm2 $(SMOLLM2))

BIN := .venv/bin
STAMP := .venv/.installed
ENOUGH := import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 ...")
PYTEST := $(BIN)/pytest -n 2 -q
BENCHMARKS := $(sort $(wildcard benchmarks/[a-z]*.py))

.DEFAULT_GOAL := help
.PHONY: help env test test-full test-vllm lint bench-check rl

help:  ## show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: $(STAMP)  ## create .venv and install the package with its local and dev extras

# Rebuilt only when the requirements change: an editable install sees source edits by itself.
$(STAMP): pyproject.toml
	@$(BIN)/python -m pip -V >/dev/null 2>&1 || { $(PYTHON) -c '$(ENOUGH)' && $(PYTHON) -m venv .venv; }
	@echo "installing into .venv (a few minutes the first time)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[local,dev]'
	@touch $@

lint: env  ## ruff, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --warnings

test: env lint  ## lint, types and the bounded tests
	$(PYTEST)

test-full: env lint  ## the same tests with full counts
	RAMIFY_FULL=1 $(PYTEST) --timeout 3600

test-vllm: env  ## the contract suite against a real vLLM: make test-vllm VLLM_PYTHON=...
	@test -n "$(VLLM_PYTHON)" || { echo "set VLLM_PYTHON to the interpreter of an environment with vLLM"; exit 2; }
	RAMIFY_VLLM_PYTHON=$(VLLM_PYTHON) $(BIN)/pytest -v --timeout 900 tests/contract

# A benchmark exits 1 for a missed target and 3 for a competitor that was not given; all run before the first failure counts.
bench-check: env  ## run every benchmark against its targets
	@status=0; for script in $(BENCHMARKS); do \
		echo "== $$script"; \
		$(BIN)/python $$script --check $(COMPETITORS) || status=$$?; \
	done; exit $$status

rl: env  ## the quickstart run: tiny learns to write words backwards, and the curve goes to reward.png
	$(BIN)/ramify rl @ examples/reverse_text/rl.toml
	$(BIN)/ramify plot outputs/reverse-text -o reward.png
