# Two commands do everything on a fresh machine: `make demo`, `make test`. They share one virtual environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MINUTES ?= 60

.PHONY: demo test test-slow soak check bench docs clean

demo: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/ragkv demo --shape qwen2.5-0.5b

test: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m "not slow"

test-slow: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m slow --timeout=3600

soak: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python -m tests.api.soak --minutes $(MINUTES)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/python -m benchmarks --quick

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "The site is in site/: open site/index.html, or serve the folder, which the search needs."

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dense,minilm,pdf,office,watch,structured,langchain,api,redis,s3,ray,docs,dev]"
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
