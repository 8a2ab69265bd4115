# `make serve` and `make test` do all the set-up. Everything lives in .venv; nothing is installed elsewhere.
PYTHON ?= python3
DEFAULT := checkpoints/efficientnet_lite0.safetensors
# Given here they win over SPYGLASS_PORT and SPYGLASS_CHECKPOINT in the environment, else those do.
PORT ?=
CHECKPOINT ?=
# For train: the folder with train/ and val/, the checkpoint to begin with, more options.
DATA ?=
INIT ?= $(DEFAULT)
OPTIONS ?=
BIN := .venv/bin

ifeq ($(filter train,$(MAKECMDGOALS))$(DATA),train)
$(error name the folder that holds train/ and val/: make train DATA=data/flowers)
endif

.PHONY: help serve train install test lint format bench clean
.DELETE_ON_ERROR:

serve: install $(filter checkpoints/%.safetensors,$(or $(CHECKPOINT),$(SPYGLASS_CHECKPOINT),$(DEFAULT)))  ## serve CHECKPOINT on PORT
	@exec $(BIN)/python -m service $(if $(CHECKPOINT),--checkpoint "$(CHECKPOINT)") $(if $(PORT),--port $(PORT))

train: install $(filter checkpoints/%.safetensors,$(INIT))  ## DATA/train and DATA/val -> checkpoints/NAME-OF-DATA.safetensors
	$(BIN)/python -m models train "$(DATA)" --init "$(INIT)" $(OPTIONS)

install: .venv/installed  ## the virtual environment with what serving and training need

test: .venv/installed-test  ## all tests
	$(BIN)/python -m pytest

lint: .venv/installed-test  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/installed-test  ## the formatting that lint wants
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/installed-bench $(filter checkpoints/%.safetensors,$(or $(CHECKPOINT),$(DEFAULT)))  ## this server beside others, in about 20 minutes (needs wrk)
	$(BIN)/python -m benchmarks.serving --checkpoint "$(or $(CHECKPOINT),$(DEFAULT))" $(OPTIONS)

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## /make \1: /p' Makefile

clean:  ## remove what install and the tools made
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache build *.egg-info

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: Spyglass needs Python 3.11 or newer; name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "error: $(PYTHON) lacks venv; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml | .venv/bin/python
	@echo "installing into .venv; the first time PyTorch, several GB, takes minutes"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

.venv/installed-test: pyproject.toml | .venv/bin/python
	@echo "installing into .venv what tests need; the first time PyTorch, several GB, takes minutes"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@ .venv/installed

.venv/installed-bench: pyproject.toml | .venv/bin/python
	@echo "installing into .venv what the benchmark needs; the first time PyTorch, several GB, takes minutes"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[bench]'
	@touch $@ .venv/installed

# Only where there is no such file yet.
checkpoints/%.safetensors: | .venv/installed
	@echo "there is no $@: making it of the public weights of $*"
	@$(BIN)/python -m models pull $* --out $@
