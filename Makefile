# Two commands on a fresh machine: `make demo` runs a search, `make test` passes the tests.
# Both set up what they need in .venv; PYTHON chooses another interpreter (3.11 or later).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Not the whole folder: trl writes its models, with a README each, where it is run.
OURS := autotune benchmarks examples tests
# What runs: the package and the training stack. What develops adds linters and tests to it.
RUNS := $(VENV)/.runs
READY := $(VENV)/.ready

.PHONY: demo test quick-test lint setup bench clean

demo: $(RUNS)
	$(BIN)/autotune demo

test: $(READY) lint
	$(BIN)/python -m pytest -q

quick-test: $(READY)
	$(BIN)/python -m pytest -q -m "not trl and not gpu and not browser"

lint: $(READY)
	$(BIN)/ruff check $(OURS)
	$(BIN)/ruff format --check $(OURS)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/codespell $(OURS) search_spaces *.md

bench: $(READY)
	$(BIN)/python benchmarks/overhead.py

setup: $(READY)

# torch first and alone, at the pinned version: a range would take the newest build there is.
$(RUNS): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[trl,html]'
	touch $@

$(READY): $(RUNS)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[trl,html,plot,dashboard,dev]'
	touch $@

clean:
	rm -rf $(VENV) .demo dist build
