# make report | test | lint | lab | clean; the first of them sets up a virtual environment in .venv

PYTHON ?= python3
VENV ?= .venv
REPORTS ?= reports
BIN := $(VENV)/bin
READY := $(VENV)/ready

.PHONY: report test lint lab clean
.DEFAULT_GOAL := report

report: $(READY)
	@$(BIN)/workbench report notebooks/compare.ipynb -o $(REPORTS)

test: $(READY)
	@$(BIN)/python -m pytest --numprocesses auto --dist loadgroup --notebooks tests notebooks

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

lab: $(READY)
	@$(BIN)/workbench demo

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# installed again only when what is to be installed has changed
$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.10 or newer is needed, as '$(PYTHON)' (make PYTHON=/path/to/python3)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or newer is needed; $(PYTHON) is $$($(PYTHON) -V) (make PYTHON=/path/to/newer)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "Python's venv is missing: on Debian and Ubuntu, apt-get install python3-venv"; exit 1; }
	@echo "setting up $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing workbench and what it needs (about 1.5 GB at first)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@
	@echo "ready"
