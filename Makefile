# The course's commands. `make lab` and `make test` need nothing installed but Python 3.11+ and make.
#
# TORCH=cpu takes small CPU-only builds of torch and torchvision: `make lab TORCH=cpu`. It is remembered in
# .venv, so it need be said only once; TORCH=default goes back to the builds with CUDA.

PYTHON ?= python3
BIN := .venv/bin
TORCH ?= $(shell cat .venv/torch-build 2>/dev/null || echo default)
EXTRAS := course,instructor,dev

# Also run what an activated environment would find: nbgrader calls alembic, and a terminal in JupyterLab
# should know `ddp-course` and `torchrun`.
ACTIVATED := PATH="$(CURDIR)/$(BIN):$$PATH"

.DEFAULT_GOAL := help
.PHONY: help env lab test check notebooks exercises grade bench versions clean FORCE

help:  ## Show this list.
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

env: .venv/installed  ## Set the environment up in .venv, and nothing more (TORCH=cpu: small CPU-only builds).

# Installed once; again when the lists of packages change, or when TORCH names another build.
.venv/installed: pyproject.toml versions.txt $(if $(filter $(TORCH),$(shell cat .venv/torch-build 2>/dev/null)),,FORCE)
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) was not found: install Python 3.11 or newer, or name one: make env PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "The course needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -c 'import platform; print(platform.python_version())'). Name a newer one: make env PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv || { rm -rf .venv; echo "$(PYTHON) cannot make environments: install its venv module (Debian, Ubuntu: apt install python3-venv)."; exit 1; }
	@rm -f .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c versions.txt uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python $(torch_flags) -c versions.txt -e '.[$(EXTRAS)]'
	$(BIN)/python -m ipykernel install --sys-prefix >/dev/null
	@echo $(TORCH) > .venv/torch-build
	@touch $@

# torch and torchvision always come from the same build, so they are replaced together.
torch_flags = $(if $(filter default,$(TORCH)),,--torch-backend $(TORCH)) \
	$(if $(filter $(TORCH),$(shell cat .venv/torch-build 2>/dev/null || echo default)),,--reinstall-package torch --reinstall-package torchvision)

versions:  ## Choose the newest versions again, for every platform, and write versions.txt.
	$(BIN)/uv pip compile pyproject.toml --all-extras --universal --python-version 3.11 --upgrade \
	  --no-header --no-annotate --no-emit-index-url --quiet --output-file versions.txt
