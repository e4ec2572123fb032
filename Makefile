# `make demo` and `make test` need Python, a C++ compiler and make, nothing else: they make .venv, build a wheel (nvcc
# comes with the build requirements) and install that wheel, not the tree. `make dev` and `make quick` install the tree,
# editable, and compile in place what has changed. Nothing is done twice: see the stamp files.
PYTHON ?= python3
VENV ?= .venv
ENGINES ?= .engines
PYTEST_ARGS ?= -n auto --dist worksteal
ENGINES_ARGS ?=

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

# pytest compiles the tests again in each of its processes, 8 s each, where this is set.
export PYTHONDONTWRITEBYTECODE :=

RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check
SOURCES := $(sort $(shell find src cuda layouts -type f -not -path '*/__pycache__/*' -not -path '*.egg-info/*' \
	-not -name '_core*.so' -not -name _build.json)) setup.py tools/fatbins.py pyproject.toml README.md
# What a wheel depends on beside the text of its sources: a file that is gone, and the settings of the build, so that
# `KVBM_CUDA=0 make test` is not answered with the last build.
SETTINGS := $(SOURCES) $(foreach v,CUDACXX CUDA_HOME CUDA_PATH CUDA_ARCHS CUDA_PTX_ARCHS \
	KVBM_CUDA KVBM_REQUIRE_CUDA KVBM_LAYOUTS KVBM_SANITIZE,$(v)=$($(v)))

# Tools come with either.
TOOLS = $(or $(wildcard $(VENV)/.editable),$(VENV)/.dev)
# What a build needs, apart: PyTorch has parts of a CUDA toolkit of its own in the environment.
IN_PLACE := PYTHONPATH=$(abspath $(VENV))/build-requires

.PHONY: demo dev quick test full mutants engines engines-next sglang fuzz torture soak coverage sanitize docs lint format wheel gpu clean
.DEFAULT_GOAL := test

demo: $(VENV)/.demo
	$(VENV)/bin/kvbm demo

dev: $(VENV)/.editable
	$(IN_PLACE) $(RUN) setup.py build_ext --inplace

quick: dev
	$(RUN) -m pytest -m "quick and not gpu" $(PYTEST_ARGS)

test: $(VENV)/.test
	$(RUN) -m pytest -m "not gpu" $(PYTEST_ARGS)

# All that `make test` leaves out as well: the whole matrix, more random cases, each case in each way. Hours.
full: $(VENV)/.test
	$(RUN) -m pytest -m "(full or not full) and not gpu" --timeout 3600 $(PYTEST_ARGS)

# Lines of kvbm that are broken on purpose, and the tests that must fail then.
mutants: dev
	$(RUN) tools/mutants.py

# With vLLM itself, which runs without a GPU: an environment of its own, of 3.5 GB.
engines: $(ENGINES)/.kvbm
	$(ENGINES)/bin/python -m pytest tests/engines $(ENGINES_ARGS)

# SGLang loads torchvision, which fails beside torch for CPUs until the tests declare its operators: an environment behind the other.
# With the Python of a vLLM that PyPI has for GPUs only, over the operators of the one for CPUs.
engines-next: $(ENGINES)/.kvbm $(ENGINES)/next-0.33.0
	PYTHONPATH=$(abspath $(ENGINES))/next-0.33.0 $(ENGINES)/bin/python -m pytest tests/engines $(ENGINES_ARGS)

$(ENGINES)/next-%: $(ENGINES)/.made tools/vllm_over.py
	$(ENGINES)/bin/python tools/vllm_over.py $* $@

sglang: $(ENGINES)/.sglang
	$(ENGINES)/sglang/bin/python -m pytest tests/engines/test_sglang.py $(ENGINES_ARGS)

# A million inputs that are almost right; goes on where it was stopped (build/fuzz.json).
fuzz: dev
	$(RUN) tools/fuzz.py $(FUZZ_ARGS)

# Copies with injected faults, an hour of them or as TORTURE_ARGS says (--time, --device cuda:0); goes on where it was
# stopped (build/torture.json).
torture: dev
	$(RUN) tools/torture.py $(TORTURE_ARGS)

# A million copies in one process, and whether what it holds grows.
soak: dev
	$(RUN) tools/torture.py soak $(TORTURE_ARGS)

# Of the sample, as whatever looks at every line costs time; programs that tests start count too.
coverage: $(VENV)/.test
	$(RUN) -m pytest -m "sample and not gpu" --cov $(PYTEST_ARGS)

# The host's code is compiled for it in place, apart from what is installed: see the script.
sanitize: $(or $(wildcard $(VENV)/.editable),$(VENV)/.test) $(VENV)/.requires
	$(IN_PLACE) PYTHON=$(RUN) PYTEST_ARGS="$(PYTEST_ARGS)" tools/sanitize.sh

# Warnings are errors: a link or an anchor that does not exist, a docstring that does not fit its function.
# With the search: python -m http.server --directory build/site
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --quiet --strict

lint: $(TOOLS)
	$(RUN) -m ruff check
	$(RUN) -m mypy
	PATH="$$PWD/$(VENV)/bin:$$PATH" cython-lint src/kvbm
	$(VENV)/bin/clang-format --dry-run --Werror cuda/*.h cuda/*.cuh cuda/*.cpp cuda/*.cu

format: $(TOOLS)
	$(RUN) -m ruff check --select I --fix
	$(VENV)/bin/clang-format -i cuda/*.h cuda/*.cuh cuda/*.cpp cuda/*.cu

wheel: dist/.wheel
	@ls -l dist/*.whl

gpu:
	tools/gpu_check.sh

clean:
	rm -rf build dist $(VENV) src/*.egg-info src/kvbm/_core*.so src/kvbm/_build.json

$(VENV)/.python:
	$(PYTHON) -m venv $(VENV)
	@touch $@

build/.settings: FORCE
	@mkdir -p build
	@cmp -s $@ - <<< '$(SETTINGS)' || cat > $@ <<< '$(SETTINGS)'
FORCE:

dist/.wheel: $(SOURCES) build/.settings | $(VENV)/.python
	@rm -rf dist
	$(PIP) wheel --no-deps --wheel-dir dist .
	@touch $@

# --force-reinstall: pip takes a wheel of the same version for the same wheel.
$(VENV)/.kvbm: dist/.wheel
	$(PIP) install --quiet --force-reinstall --no-deps dist/*.whl
	@rm -f $(VENV)/.editable
	@touch $@

$(VENV)/.test $(VENV)/.demo $(VENV)/.dev $(VENV)/.docs: $(VENV)/.%: $(VENV)/.kvbm constraints.txt
	$(PIP) install --quiet --constraint constraints.txt "$$(ls dist/*.whl)[$*]"
	@touch $@

# torch's own packages for images and sound come along for CUDA's torch, and fail beside the one for CPUs.
$(ENGINES)/.made: tests/engines/requirements.txt
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip --disable-pip-version-check install --quiet --only-binary :all: --requirement $<
	$(ENGINES)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(ENGINES)/bin/python -m pip --disable-pip-version-check install --quiet --only-binary :all: --no-deps \
		lmcache==0.5.6 nixl-cu13==1.5.1 nixl==1.5.1
	@touch $@

$(ENGINES)/.kvbm: dist/.wheel $(ENGINES)/.made
	$(ENGINES)/bin/python -m pip --disable-pip-version-check install --quiet dist/*.whl
	$(ENGINES)/bin/python -m pip --disable-pip-version-check install --quiet --force-reinstall --no-deps dist/*.whl
	@touch $@

$(ENGINES)/.sglang: $(ENGINES)/.kvbm tests/engines/requirements-sglang.txt
	$(ENGINES)/bin/python -m venv $(ENGINES)/sglang
	echo $(abspath $(ENGINES))/lib/python*/site-packages > "$$(echo $(ENGINES)/sglang/lib/python*/site-packages)/behind.pth"
	$(ENGINES)/sglang/bin/python -m pip --disable-pip-version-check install --quiet --only-binary :all: --no-deps \
		--requirement tests/engines/requirements-sglang.txt
	@touch $@

$(VENV)/.requires: pyproject.toml | $(VENV)/.python
	$(RUN) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")' \
		> $(VENV)/build-requires.txt
	$(PIP) install --quiet --upgrade --target $(VENV)/build-requires --requirement $(VENV)/build-requires.txt
	@touch $@

# Two steps: PyYAML and others that a build needs are found in build-requires, and would not be installed.
$(VENV)/.editable: pyproject.toml constraints.txt $(VENV)/.requires
	$(IN_PLACE) $(PIP) install --quiet --no-deps --no-build-isolation --editable .
	$(PIP) install --quiet --constraint constraints.txt 'kvbm-layouts[test,dev]'
	@rm -f $(VENV)/.kvbm
	@touch $@
