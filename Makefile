# k3tool: `make demo` and `make test` are all a newcomer needs; `make check` is what a reviewer runs.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PY_SOURCES := k3tool stages tests setup.py
KERNEL_SOURCES := $(shell find kernels_common kernels_cpu -type f \( -name '*.[ch]' -o -name '*.inc' \) 2>/dev/null)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test check venv build gen gen-check fmt lint type proofs prove compile-gpu emulate-gpu gpu sizes clean requirements test-requirements

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/demo.stamp ## set up and run the whole pipeline on a sample checkpoint (one to two minutes)
	PATH="$(CURDIR)/$(BIN):$$PATH" samples/pipeline.sh build/demo

test: test-requirements $(VENV)/dev.stamp ## set up and run the tests
	$(BIN)/python -m pytest -n 2 --dist loadfile

check: lint type gen-check test ## everything a reviewer would run

venv: $(VENV)/dev.stamp ## make the virtual environment with the development tools

build: $(VENV)/demo.stamp ## compile the CPU interpreter again after a change of C sources
	$(BIN)/pip install --quiet --no-deps --editable .

gen: $(VENV)/dev.stamp ## write the files that the op table and the rules generate
	$(BIN)/python -m k3tool.isa.genheader
	$(BIN)/python -m k3tool.compiler.statements

gen-check: $(VENV)/dev.stamp ## fail if a generated file is not what the op table and the rules give
	$(BIN)/python -m k3tool.isa.genheader --check
	$(BIN)/python -m k3tool.compiler.statements --check

fmt: $(VENV)/dev.stamp ## format
	$(BIN)/ruff format $(PY_SOURCES)

lint: $(VENV)/dev.stamp ## ruff
	$(BIN)/ruff check $(PY_SOURCES)

type: $(VENV)/dev.stamp ## mypy, strict
	$(BIN)/mypy

proofs: $(VENV)/dev.stamp ## have Coq check every theorem and compare with the committed stamp (apt: coq)
	$(BIN)/python -m k3tool.compiler.prove

prove: $(VENV)/dev.stamp ## after a change of rules or proofs: the same, and write the stamp
	$(BIN)/python -m k3tool.compiler.statements
	$(BIN)/python -m k3tool.compiler.prove --write

compile-gpu: $(VENV)/demo.stamp ## compile the GPU interpreters (nvcc or NVRTC; clang-22, lld-22)
	$(BIN)/python -m k3tool.runtime.compile_gpu

emulate-gpu: test-requirements $(VENV)/dev.stamp ## run the GPU interpreters on emulated blocks against the CPU's bits (half an hour)
	$(BIN)/python -m tests.kernels.emulated_matrix

gpu: $(VENV)/demo.stamp ## on a CUDA device: bits against the CPU, and docs/gpu-results.md (pip install -e '.[cuda]')
	$(BIN)/python -m k3tool.bench.gpu_check

sizes: ## lines per file and the ten longest functions
	@$(PYTHON) samples/sizes.py k3tool stages

clean: ## remove what the targets above made
	rm -rf $(VENV) build kernels_cpu/build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# A missing apt package is named before anything is downloaded.
requirements:
	@missing=""; \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || missing="$$missing python3"; \
	$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || missing="$$missing python3-venv"; \
	command -v $${CC:-gcc} >/dev/null || missing="$$missing gcc"; \
	printf '#include <stdint.h>\n#include <pthread.h>\n' | $${CC:-gcc} -E - >/dev/null 2>&1 || missing="$$missing libc6-dev"; \
	if [ -n "$$missing" ]; then echo "k3tool needs Debian packages that are not here:$$missing (apt-get install$$missing)" >&2; exit 1; fi

test-requirements: requirements # GPU sources are C++, and run here on emulated blocks
	@command -v g++ >/dev/null || { echo "k3tool's tests need a Debian package that is not here: g++ (apt-get install g++)" >&2; exit 1; }

$(VENV)/bin/pip: | requirements
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo.stamp: $(VENV)/bin/pip pyproject.toml setup.py $(KERNEL_SOURCES)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/dev.stamp: $(VENV)/demo.stamp
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@
