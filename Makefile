# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo test lint types wheel-test format clean

help:  ## Say what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(READY)  ## Set up and run the main job: backprop against Highway-BP on real data, with table and plot
	$(BIN)/gradfree bench run

test: $(READY)  ## Set up and run all tests but the installations
	$(BIN)/pytest -m "slow or not slow" --ignore=tests/packaging

wheel-test: $(READY)  ## Wheel, editable install and plain checkout in an environment of their own
	$(BIN)/pytest -m slow tests/packaging

lint: $(READY)  ## Style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)  ## Types; mypy sees the packages as an installation lays them out
	rm -rf build/types && mkdir -p build/types/gradfree
	ln -s $(CURDIR)/gradfree/* $(CURDIR)/algorithms $(CURDIR)/models $(CURDIR)/benchmarks build/types/gradfree/
	cd build/types && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml -p gradfree

format: $(READY)  ## Let ruff rewrite the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove the environment and everything built
	rm -rf $(VENV) build dist *.egg-info

$(READY): constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@
