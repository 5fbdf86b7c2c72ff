# The course's commands. `make lab` and `make test` need nothing installed but Python 3.11+ and make.
#
# TORCH=cpu takes small CPU-only builds of torch and torchvision: `make lab TORCH=cpu`. It is remembered in
# .venv, so it need be said only once; TORCH=default goes back to the builds with CUDA.

PYTHON ?= python3
BIN := .venv/bin
TORCH ?= $(shell cat .venv/torch-build 2>/dev/null || echo default)
# What a learner needs for `make lab`, an instructor for `make grade`, and the tests; each set has its own stamp in .venv.
EXTRAS := course,instructor,dev,site
smallest = $(if $(wildcard .venv/installed-dev),.venv/installed-dev,.venv/installed-$(1))

# Also run what an activated environment would find: nbgrader calls alembic, and a terminal in JupyterLab
# should know `ddp-course` and `torchrun`.
ACTIVATED := PATH="$(CURDIR)/$(BIN):$$PATH"

# Python keeps what it has compiled, even where somebody has switched that off: lessons and tests start many processes,
# and each would compile Jupyter, scikit-learn and the course again.
export PYTHONDONTWRITEBYTECODE :=

# What is compared there was made on CPUs. `make gpu` runs what is for GPUs.
test check test-all notebooks bench: export CUDA_VISIBLE_DEVICES :=

# For pytest, after what is said here: FLAGS="-n 0" runs one test after the other.
FLAGS ?=
TESTS = $(ACTIVATED) $(BIN)/python -m pytest -n logical --maxprocesses 4

.DEFAULT_GOAL := help
.PHONY: help env lab test check test-all lint notebooks exercises grade site bench gpu versions clean FORCE

help:  ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

env: .venv/installed-dev  ## Set the environment up in .venv, and nothing more (TORCH=cpu: small CPU-only builds).

.venv/installed-course: extras = course
.venv/installed-instructor: extras = course,instructor
.venv/installed-dev: extras = $(EXTRAS)
# On a terminal one sees what is fetched, and how large it is.
quiet = $(if $(shell test -t 2 && echo terminal),,--quiet)

# Installed once; again when the lists of packages change, or when TORCH names another build.
.venv/installed-%: pyproject.toml versions.txt $(if $(filter $(TORCH),$(shell cat .venv/torch-build 2>/dev/null)),,FORCE)
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) was not found: install Python 3.11 or newer, or name one: make env PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "The course needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -c 'import platform; print(platform.python_version())'). Name a newer one: make env PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv || { rm -rf .venv; echo "$(PYTHON) cannot make environments: install its venv module (Debian, Ubuntu: apt install python3-venv)."; exit 1; }
	@rm -f $@
	@echo "Installing $(extras) into .venv; the first time, torch alone is some gigabytes (TORCH=cpu: a fifth of it)."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c versions.txt uv
	@$(BIN)/uv pip install $(quiet) --python $(BIN)/python $(torch_flags) -c versions.txt -e '.[$(extras)]' || { $(torch_failed) exit 1; }
	@$(BIN)/python -m ipykernel install --sys-prefix >/dev/null
	@echo $(TORCH) > .venv/torch-build
	@touch $@

# torch and torchvision always come from the same build, so they are replaced together.
torch_flags = $(if $(filter default,$(TORCH)),,--torch-backend $(TORCH)) \
	$(if $(filter $(TORCH),$(shell cat .venv/torch-build 2>/dev/null || echo default)),,--reinstall-package torch --reinstall-package torchvision)

lab: $(call smallest,course)  ## Open JupyterLab on the first lesson; where there is no browser, its address is printed.
	@echo "JupyterLab opens lesson 00. Where no browser opens, visit the address it prints. Ctrl-C twice ends it."
	@$(ACTIVATED) $(BIN)/ddp-course lab $(LAB_FLAGS)

test: env lint  ## Run what CI runs: lint, tests, the stored outputs of every lesson, the exercises.
	@echo "Every lesson, every exercise, every failure: about half an hour on two cores. Make check takes 3 minutes."
	$(TESTS) -m "not nightly" $(FLAGS) --nbval tests notebooks

check: env lint  ## Run the fast part of it: what needs no lesson run and few ranks.
	$(TESTS) -q -m "not slow and not nightly and not gpu and not cluster" $(FLAGS) tests

test-all: env lint  ## Run everything, before a release: all seeds, three ranks, long runs, SLURM where it is installed.
	@echo "All that CI runs, and what only the nightly run adds: hours on two cores."
	$(TESTS) --again $(FLAGS) --nbval tests notebooks

lint: env
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check .

notebooks: env  ## Run the lessons again and store what they print (LESSONS="notebooks/03_*.ipynb": only those).
	$(ACTIVATED) $(BIN)/python tests/notebooks/execute.py $(LESSONS)

exercises: env  ## Generate exercises/ from solutions/.
	$(ACTIVATED) $(BIN)/ddp-course release

grade: $(call smallest,instructor)  ## Grade a class (SUBMISSIONS=folder): points, feedback and gradebook into class/. See INSTRUCTORS.md.
	@test -n "$(SUBMISSIONS)" || { echo "Name the folder: make grade SUBMISSIONS=submitted (see INSTRUCTORS.md)"; exit 1; }
	@$(ACTIVATED) $(BIN)/ddp-course grade $(SUBMISSIONS) $(GRADE_FLAGS)

site: env  ## Build the site into out/site/: lessons with their stored outputs, exercises, reference, errors, glossary.
	$(BIN)/python -m sphinx -q -W --keep-going -d out/doctrees -c docs . out/site
	@echo "open out/site/index.html"

bench: env  ## Time the course's parts beside torch's own: a table and JSON; under an hour.
	$(ACTIVATED) $(BIN)/python benchmarks/run.py

# GPU_PYTHON names a Python that has torch already, for a machine on which nothing can be installed.
gpu: $(if $(GPU_PYTHON),,env)  ## Run all that needs GPUs, and write out/gpu/report.md (BUDGET=540: seconds; GPU_PYTHON=python3: not in .venv).
	$(ACTIVATED) $(or $(GPU_PYTHON),$(BIN)/python) -m benchmarks.gpu_run $(if $(BUDGET),--budget $(BUDGET))

torch_failed = $(if $(filter default,$(TORCH)),,echo "TORCH=$(TORCH) takes torch from its makers' own index, not from \
	the package registry. If that is out of reach here: make env TORCH=default";)

versions: env  ## Choose the newest versions again, for every platform, and write versions.txt.
	$(BIN)/uv pip compile pyproject.toml --all-extras --universal --python-version 3.11 --upgrade \
	  --no-header --no-annotate --no-emit-index-url --quiet --output-file versions.txt

clean:  ## Remove the environment and every cache.
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis
	find benchmarks ddp_course docs judges notebooks programs solutions exercises tests \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune \
	  -exec rm -rf {} + 2>/dev/null || true
