# make report | test | lint | docs | lab | clean; the first of them sets up a virtual environment in .venv

PYTHON ?= python3
VENV ?= .venv
REPORTS ?= reports
BIN := $(VENV)/bin
READY := $(VENV)/ready
PYTEST := $(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

# where it is set, as in some images, each process compiles the package and the tests anew
unexport PYTHONDONTWRITEBYTECODE

.PHONY: report test lint docs lab clean
.DEFAULT_GOAL := report

report: $(READY)
	@$(BIN)/workbench report notebooks/compare.ipynb -o $(REPORTS)

# the plain suite answers within minutes; make test ALL=1 runs everything: what is slow, browsers, notebooks; where tables of models by
# wrappers by checks are sampled, WORKBENCH_EXHAUSTIVE=1 make test ALL=1 checks them whole
test: $(READY)
ifdef ALL
	@$(PYTEST) --notebooks --executed-notebooks build/notebooks tests notebooks
else
	@$(PYTEST) -m "not slow and not browser" --notebooks tests notebooks/first_look.ipynb
endif

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

# strict: a link that leads nowhere or a missing docstring is an error; notebooks that the tests executed are not executed again
docs: $(READY)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "$(CURDIR)/site/index.html"

lab: $(READY)
	@$(BIN)/workbench demo

clean:
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# installed again only when what is to be installed has changed
$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.11 or newer is needed, as '$(PYTHON)' (make PYTHON=/path/to/python3)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) -V) (make PYTHON=/path/to/newer)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "Python's venv is missing: on Debian and Ubuntu, apt-get install python3-venv"; exit 1; }
	@echo "setting up $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing workbench and what it needs (about 1.5 GB at first)"
	@if $(BIN)/python -m pip show --quiet workbench 2>/dev/null; then $(BIN)/python -m pip uninstall --quiet --yes workbench; fi # its former name
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip # old ones take long to find which versions go together
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e ".[dev]"
	@# on all cores, where pip takes one; some packages hold code of Python 2; tests, and models that nothing here imports, are left out
	@$(BIN)/python -m compileall -qq -j 0 -x '/tests/|/transformers/models/' $(VENV)/lib || true
	@touch $@
	@echo "ready"
