# Everything here works on a machine with Python (3.10 or newer) and make alone.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: help install test lint format clean

help:            ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(VENV)/.installed  ## create .venv with everything in it

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

test: install    ## all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

lint: install    ## ruff, without changing anything
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install  ## ruff, changing what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:           ## remove what make made
	rm -rf $(VENV) demo .pytest_cache .ruff_cache *.egg-info
