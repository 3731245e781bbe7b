# make train [ARGS=...] | test | test-long | stress [ARGS=...] | build | lint | format | stubs | clean
# Everything made lies in .venv, build*/ and python/raggedfsdp/_C*.so.
PYTHON ?= python3
ARGS ?=
CMAKE_FLAGS ?=
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
PY := .venv/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check
COMPILER := $(if $(filter default,$(origin CXX)),c++,$(CXX))
ONLY_ONCE := $(if $(wildcard build/CMakeCache.txt),,$(if $(shell command -v ninja),-G Ninja) -DRAGGED_TESTS=OFF)
CONFIGURE := cmake -S . -B build --log-level=WARNING -DPython3_EXECUTABLE=$(CURDIR)/$(PY) $(CMAKE_FLAGS)
COMPILE := cmake --build build --parallel $(JOBS)

# The first missing tool stops make with one line that says what to install.
missing = $(shell PYTHON='$(PYTHON)' CXX='$(COMPILER)' sh tools/need.sh $(1))
need = $(if $(call missing,$(1)),$(error $(call missing,$(1))))

.PHONY: help train test test-long stress build build-all lint format stubs clean
help:
	@sed -n 's/^# make/make/p' Makefile

train: build
	@$(PY) -m raggedfsdp train $(ARGS)

test: build-all
	OMP_NUM_THREADS=1 ctest --test-dir build --output-on-failure --label-exclude long
	OMP_NUM_THREADS=1 $(PY) -m pytest

test-long: build-all
	OMP_NUM_THREADS=1 ctest --test-dir build --output-on-failure
	OMP_NUM_THREADS=1 $(PY) -m pytest -m ""

build: .venv/run.stamp
	@$(call need,build)$(CONFIGURE) $(ONLY_ONCE)
	@$(COMPILE) --target raggedfsdp_C

build-all: .venv/dev.stamp
	@$(call need,test)$(CONFIGURE) $(ONLY_ONCE) -DRAGGED_TESTS=ON
	@$(COMPILE)

stress: build .venv/dev.stamp
	@OMP_NUM_THREADS=1 $(PY) tests/python/stress.py $(ARGS)

lint: build-all
	@sh tools/lint.sh

format: .venv/dev.stamp
	@sh tools/lint.sh --fix

stubs: build
	@$(PY) tools/stubs.py

$(PY):
	@$(call need,build)$(PYTHON) -m venv .venv

# Beside the packages: a .pth file and a small script, so that the checkout is importable and has its command.
.venv/run.stamp: requirements.txt tools/checkout.py | $(PY)
	@$(call need,build)$(PIP) -r requirements.txt
	@$(PY) tools/checkout.py
	@touch $@

.venv/dev.stamp: requirements-dev.txt .venv/run.stamp
	@$(call need,test)$(PIP) -r requirements-dev.txt
	@touch $@

clean:
	rm -rf build build-* python/raggedfsdp/_C*.so
