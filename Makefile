# Every target sets up what it needs by itself: .venv in this clone, pinned requirements, the extension, editable.
#     make setup | study | test | test-fast | bench | docs | lint | wheel | clean          PYTHON=python3.11 names another Python
PYTHON ?= python3
RUN := .venv/bin/python
CPP := $(shell find csrc $(wildcard tests/cuda/emulator) -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
# What the build depends on besides files; see the table in setup.py.
SWITCHES := $(CXX) $(foreach name,SKIP_EXTENSION CUDA CUDA_ARCHS SANITIZE DEBUG,$(name)=$(OVERTONE_$(name)))

export PYTHON
# Another environment's packages must not mix with those of .venv.
unexport PYTHONPATH PYTHONHOME

.PHONY: help setup study test test-fast bench docs lint wheel clean clean-all always
.DEFAULT_GOAL := help

help:
	@echo "make study   trains ViT, ViT⁺ and ViT⁻ on digits and writes the report: minutes"
	@echo "make test    lints and runs every test"
	@echo "make test-fast  lints and runs the tests to run before a commit: two minutes"
	@echo "make bench   compares with eager PyTorch and torch.compile"
	@echo "make docs    builds the documentation: build/docs/index.html"
	@echo "make wheel   builds dist/*.whl for this Python"
	@echo "make lint    checks style and types only"
	@echo "make setup   prepares .venv and builds the extension; the targets above do it by themselves"
	@echo "make clean   removes what was built; make clean-all removes .venv too"

setup: .venv/package.done .venv/extension.done

study: setup
	@$(RUN) -m overtone study

bench: setup
	@$(RUN) -m overtone bench

# A warning is an error; the tests build the site in the same way.
docs: setup
	@$(RUN) -m sphinx -q -W --keep-going -d build/doctrees docs build/docs
	@echo "overtone: build/docs/index.html"

# A process per core, a file at a time; threads that wait for work must not spin on the other process's core.
test: setup lint
	@OMP_WAIT_POLICY=PASSIVE $(RUN) -m pytest -n auto --dist loadfile $(PYTEST_ARGS)

# One file of tests per op and layer; what builds, trains, compiles with inductor or starts processes is left to `test`.
FAST := tests/reference tests/nn/test_modules.py tests/nn/test_spectrum.py tests/cli/test_cli.py tests/project/test_layers.py \
  tests/project/test_deprecated.py tests/project/test_public_names.py $(addprefix tests/ops/test_,frequency.py linear.py \
  basis.py backends.py registry.py) tests/ops/linalg/test_qr.py
test-fast: setup lint
	@OMP_WAIT_POLICY=PASSIVE $(RUN) -m pytest -n auto --dist loadfile -m "not slow" $(FAST) $(PYTEST_ARGS)

# For a package index, the wheels of all Pythons: cibuildwheel, configured in pyproject.toml.
wheel: .venv/requirements.done
	@$(RUN) -m build --wheel --no-isolation --outdir dist .
	@ls -sh dist/*.whl

# mypy sees the package as setup.py maps it: three folders as one.
lint: .venv/requirements.done
	@echo "overtone: ruff, clang-format, mypy"
	@$(RUN) -m ruff check --quiet .
	@$(RUN) -m ruff format --quiet --check .
	@.venv/bin/clang-format --dry-run -Werror $(CPP)
	@$(RUN) -m mypy --no-error-summary setup.py
	@rm -rf build/lint && mkdir -p build/lint/overtone
	@ln -s "$(CURDIR)"/python/overtone/* "$(CURDIR)/triton_kernels" "$(CURDIR)/benchmarks" build/lint/overtone
	@MYPYPATH=build/lint $(RUN) -m mypy --no-error-summary -p overtone

clean:
	@rm -rf build dist reports .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache .venv/extension.done
	@rm -rf python/*.egg-info *.egg-info python/overtone/_C.*.so
	@find python benchmarks triton_kernels tests -name __pycache__ -prune -exec rm -rf {} +

clean-all: clean
	@rm -rf .venv

# A stamp is made only after its step succeeded, so an interrupted step is done again.
.venv/requirements.done: requirements-dev.txt requirements-no-deps.txt scripts/setup scripts/mend_torchvision.py
	@scripts/setup requirements
	@touch $@

.venv/package.done: .venv/requirements.done pyproject.toml setup.py
	@scripts/setup package
	@touch $@

# The folders are named too: their time changes when a file is added or removed.
.venv/extension.done: .venv/requirements.done .venv/switches setup.py $(shell find csrc)
	@scripts/setup extension
	@touch $@

.venv/switches: .venv/requirements.done always
	@echo '$(SWITCHES)' | cmp -s - $@ || echo '$(SWITCHES)' >$@
