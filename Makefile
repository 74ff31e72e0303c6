# make demo       train the example with four CPU workers in two compute groups (about two minutes)
# make test       run ruff and mypy, and pytest beside them; continuous integration runs this and test-accelerator
# make examples   run the examples, shortened, the tutorial and the notebook; about five minutes on two cores
# make test-all   the same, and what is marked exhaustive: more cases of claims that make test has some of
# make docs       build the site into docs/_build/html; a warning is an error, and nothing is downloaded
# make test-accelerator   some of the tests, and a few more, with emulated GPUs: see tests/accelerator/README.md
# The first of these creates .venv; later ones use it until pyproject.toml or constraints.txt changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
EXAMPLES := $(VENV)/examples
PYTEST := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help demo docs test examples test-all test-accelerator pytest lint format install clean

help:
	@sed -n '/^$$/q; s/^# //p' Makefile

demo: $(READY)
	$(BIN)/python examples/fashion_mnist.py --workers 4 --groups 2

# The tools of the site need Python 3.11: with an older one it says so, and succeeds.
docs: $(READY)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "make docs: no site is built with Python 3.10" >&2; exit 0; }; \
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --fresh-env --jobs auto docs docs/_build/html

# mypy has one process, for a minute or more: what it leaves of the machine is for the tests.
test: $(READY)
	@$(MAKE) --no-print-directory --jobs=2 lint pytest

test-all:
	@$(MAKE) --no-print-directory test OPTIONS=--all

examples: $(EXAMPLES)/.ready
	OMP_NUM_THREADS=1 $(EXAMPLES)/bin/python examples/check.py $(OPTIONS)

# torchmetrics imports transformers wherever it is installed, for two seconds in each process. So what only the examples
# need is in an environment of its own, which also has the packages of the first one.
$(EXAMPLES)/.ready: $(READY)
	$(BIN)/python -m venv --without-pip $(EXAMPLES)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		"$$($(EXAMPLES)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/parent.pth"
	$(BIN)/python -m pip --python $(EXAMPLES)/bin/python install --quiet --disable-pip-version-check \
		-c constraints.txt -e '.[examples]'
	touch $@

# It says so, and succeeds, where there can be no emulated GPU: without a C++ compiler, for one.
test-accelerator: $(READY)
	$(BIN)/python tests/accelerator $(OPTIONS)

# Tests start hundreds of processes, the first of them all at once; what is compiled here need not be compiled in each.
# On a busy machine a few of them may wait in vain for processor time: up to three that fail are run again, alone.
pytest: $(READY)
	$(BIN)/python -m compileall -q lightning_omni
	$(PYTEST) --cache-clear -n 4 --dist loadfile --no-loadscope-reorder $(OPTIONS) || \
	{ [ $$? -eq 1 ] && $(PYTEST) --again --last-failed --last-failed-no-failures none $(OPTIONS); }

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

install: $(READY)

# The constraints hold torch at one version: an index that offers its CPU build of that version is enough.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,docs]'
	touch $@

clean:
	rm -rf $(VENV) build dist docs/_build .mypy_cache .pytest_cache .ruff_cache .hypothesis lightning_logs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
