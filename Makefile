# Two commands do everything on a fresh machine: `make demo` and `make test`; on one with a GPU, `make gpu`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Of `make gpu`: where, for how long, and the folder of logs and results.
DEVICE ?= cuda
GPU_MINUTES ?= 9
OUT ?= results/gpu

# Of `make clients`: an environment of its own, its scripts, and `STEPS=2` to see that everything runs.
CLIENTS := build/clients
CLIENT_PINS := benchmarks/clients/constraints.txt
CLIENT_SCRIPTS := bilstm_tagger darts_gru ncps_liquid neuralforecast_gru pytorch_forecasting_deepar sb3_recurrent_ppo skorch_gru snntorch_leaky
STEPS ?=

# What `make test-device` runs.
ON_DEVICE := $(addprefix tests/,front/test_conformance.py front/test_pretend_device.py front/test_waits.py \
	rows/test_rows.py depth/test_exactness.py depth/programs time/programs depth/test_residual.py chains/test_bypass.py)

# A test that hangs fails, by name, instead of all others.
ENDLESS := -o faulthandler_timeout=900 -o faulthandler_exit_on_timeout=true

.PHONY: help demo gallery test test-device docs figures gpu dist lint types layout wheel-test format clean

help:  ## Say what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(READY)  ## Set up, and compare autograd with an engine of each family on real data: tables, charts, a page
	$(BIN)/gradfree bench run
	@echo "Open file://$(CURDIR)/results/quick/report.html"

GALLERY := $(sort $(filter-out docs/gallery/drawing.py,$(wildcard docs/gallery/*.py)))

gallery: $(READY)  ## Run the examples of docs/gallery and draw their pictures; GRADFREE_SHORT=1 runs them small
	@for example in $(GALLERY); do echo $$example; OMP_NUM_THREADS=1 $(BIN)/python $$example || exit 1; done

# Sources are compiled once, not in every process that a test starts, whatever the environment says.
test: $(READY)  ## Set up and run all tests but the installations
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -m "slow or not slow" --ignore=tests/packaging $(ENDLESS)

# Where it cannot be built there is no such device, as on most machines there is no GPU.
test-device: $(READY)  ## What a GPU could break, on a device of the tests' own; it takes a C++ compiler
	@missing="$$(PYTHONPATH=tests/support $(BIN)/python -c 'import pretend_device as d; print(*d.missing_tools())')"; \
	if [ -n "$$missing" ]; then echo "skipped: no $$missing here"; exit; fi; set -x; \
	$(BIN)/pytest --device pretend $(ENDLESS) $(ON_DEVICE)

figures: $(READY)  ## Write all figures of README and docs anew from the committed records, and the tour's lists
	$(BIN)/python benchmarks/scripts/figures.py
	$(BIN)/python benchmarks/scripts/tour.py

docs: $(READY)  ## Check all figures, and build the documentation site, build/docs/index.html; a warning is an error
	$(BIN)/python benchmarks/scripts/figures.py --check
	$(BIN)/python benchmarks/scripts/tour.py --check
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs

dist: $(READY)  ## Build wheel and source distribution into dist/ and check their descriptions
	rm -rf dist
	$(BIN)/pip install --quiet twine==7.0.0
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*

wheel-test: $(READY)  ## Wheel, editable install and plain checkout in an environment of their own
	$(BIN)/pytest -m slow --basetemp=build/wheel-test tests/packaging

clients: $(CLIENTS)/.ready  ## Other people's programs with and without an engine, in an environment of their own
	@for script in $(CLIENT_SCRIPTS); do \
		OMP_NUM_THREADS=1 $(CLIENTS)/bin/python benchmarks/clients/$$script.py $(if $(STEPS),--steps $(STEPS)) || exit 1; \
	done

$(CLIENTS)/.ready: $(CLIENT_PINS) pyproject.toml
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip install --quiet -c $(CLIENT_PINS) torch
	$(CLIENTS)/bin/pip install --quiet -c $(CLIENT_PINS) 'darts[torch]' ncps neuralforecast pytorch-forecasting sb3-contrib skorch snntorch -e '.[lightning]'
	touch $@

gpu:  ## Tests and suites on a GPU, by the PYTHON that is there, for GPU_MINUTES; called again, it goes on
	$(PYTHON) .ci/gpu.py --device $(DEVICE) --minutes $(GPU_MINUTES) --out $(OUT)

lint: $(READY) layout  ## Style of code and prose, and the order of imports between rooms
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/prose.py
	cd build/layout && $(CURDIR)/$(BIN)/lint-imports --config $(CURDIR)/pyproject.toml

types: $(READY) layout  ## Types
	cd build/layout && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml -p gradfree

# The packages as an installation lays them out, for tools that only read them.
layout:
	rm -rf build/layout/gradfree && mkdir -p build/layout/gradfree
	ln -s $(CURDIR)/gradfree/* $(CURDIR)/algorithms $(CURDIR)/models $(CURDIR)/benchmarks build/layout/gradfree/

format: $(READY)  ## Let ruff rewrite the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove the environment and everything built
	rm -rf $(VENV) build dist *.egg-info

$(READY): constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/pip install --quiet -c constraints.txt --no-deps timm  # It asks for torchvision, which would bring another torch.
	touch $@
