# Everything runs in a virtual environment of its own, .venv, made on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo demo-short test lint bench docs setup clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/mantissa train recipes/demo.yaml

# The demo cut down to a minute: the same path from recipe to report, without the learning.
demo-short: $(STAMP)
	rm -rf runs/demo-short
	$(BIN)/mantissa train recipes/demo.yaml run_dir=runs/demo-short steps=2 warm_start.steps=20 \
		rollout.prompts=8 evaluation.problems=16 checkpoint.every=1
	$(BIN)/mantissa train --resume runs/demo-short
	test -s runs/demo-short/report.html

test: $(STAMP)
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/python benchmarks/run_all.py

# The documentation site, in site/index.html; NO_MKDOCS_2_WARNING silences the theme's own advertisement.
docs: $(STAMP)
	$(BIN)/python docs/make_recipes.py
	$(BIN)/python docs/make_tables.py
	NO_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict

# TRL in an environment of its own: what it depends on is not what Mantissa depends on.
TRL_VENV := .venv-trl
$(TRL_VENV)/.installed: constraints.txt
	$(PYTHON) -m venv $(TRL_VENV)
	$(TRL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(TRL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt trl==1.16.0
	touch $@

bench-trl: $(STAMP) $(TRL_VENV)/.installed
	$(BIN)/python benchmarks/rl_step_vs_trl.py

clean:
	rm -rf $(VENV) site .mypy_cache .ruff_cache .pytest_cache
