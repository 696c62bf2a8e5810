# Needs Python 3.11+, git and make; everything else goes into .venv.
#   make demo       a real model, plain and speculative, side by side
#   make test       the quick tests (most of the time goes into compiling)
#   make test-full  all tests, and the table in docs/exactness.md (AFTER_TEST=1: those that make test has not run)
#   make libtpu     the TPU's compiler into .cache, for scripts/tpu_report.py and its test alone
#   make lint       ruff and pyright
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
WORKERS ?= 2
REAL := tests/test_smollm2*.py
LIBTPU ?= libtpu>=0.0.42

.PHONY: venv demo test test-full libtpu lint clean
.DEFAULT_GOAL := venv

venv: $(STAMP)

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "specjax needs Python 3.11 or newer; set PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "This Python cannot make virtual environments. On Debian or Ubuntu: apt-get install python3-venv"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@for try in 1 2 3 4; do \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --retries 5 --timeout 60 \
			-e '.[test,plots]' && break; \
		test $$try = 4 && exit 1; \
		echo "install failed; trying again in $$((try * 10)) s"; sleep $$((try * 10)); \
	done
	@touch $@

demo: venv
	$(BIN)/python scripts/generate.py --demo --compare

test: venv
	$(BIN)/python -m pytest -n $(WORKERS) -q -m "not full"

test-full: venv libtpu
	$(BIN)/python -m pytest -n $(WORKERS) -q $(if $(AFTER_TEST),-m full) --ignore-glob='$(REAL)'
	SPECJAX_TEST_FUSIONS=1 $(BIN)/python -m pytest -n $(WORKERS) -q $(if $(AFTER_TEST),-m full) $(REAL)
	$(BIN)/python scripts/exactness_table.py

# Beside the environment, not in it: an installed libtpu makes every program look for a TPU.
libtpu: .cache/libtpu/libtpu/libtpu.so

.cache/libtpu/libtpu/libtpu.so: | $(STAMP)
	@for try in 1 2 3 4; do \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --upgrade \
			--target .cache/libtpu.new '$(LIBTPU)' && break; \
		test $$try = 4 && exit 1; \
		echo "download failed; trying again in $$((try * 10)) s"; sleep $$((try * 10)); \
	done
	@rm -rf .cache/libtpu && mv .cache/libtpu.new .cache/libtpu

lint: venv
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

clean:
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
