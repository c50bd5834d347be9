# make run: a fresh machine to a listening service.   make test: everything CI checks.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
HOST ?= 127.0.0.1
PORT ?= 8765

.PHONY: help install run tools test bench clean

help:            ## show this
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(VENV)/.installed   ## make .venv/ with everything pinned

# On Linux PyPI's torch is the CUDA build, gigabytes more: the CPU build of the same pin comes from PyTorch's own index
# first.  For a GPU:  make run TORCH_INDEX=
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "HalluTracer needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@test -z '$(TORCH_INDEX)' || $(PIP) --no-deps --retries 2 --timeout 15 --index-url '$(TORCH_INDEX)' torch || \
		echo "$(TORCH_INDEX) did not give torch; taking the default index's build"
	$(PIP) --editable '.[test]'
	@touch $@

run: install     ## serve the embedded demo model on $(HOST):$(PORT)
	@$(BIN)/hallutracer serve --host $(HOST) --port $(PORT)

test: install    ## ruff, mypy --strict, pytest
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

tools:           ## the real Prometheus that some tests ask for: Debian's package, unpacked into .tools/
	deploy/tools.sh

bench: install   ## the readout's cost, side by side with the bare forward
	$(BIN)/python -m tests.bench.readout_cost

clean:           ## remove .venv/ and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build *.egg-info
