# Everything a fresh machine with Python >= 3.11 needs. `make PYTHON=/path/to/python3.12 test` picks another interpreter.
PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python

.PHONY: help setup demo test lint unit doctor models coverage sanitize clean

help:
	@echo "make demo     compile a small Hugging Face model with backend=\"fa4\": sites, programs, error, speed"
	@echo "make test     install, lint, run the tests (GPU tests run only on a Hopper GPU)"
	@echo "make lint     ruff, mypy, layer direction, file and function sizes, examples"
	@echo "make unit     the tests alone; ARGS=\"tests/cpu -k mask\" selects"
	@echo "make doctor   what is installed, what is missing, and the command that remedies it"
	@echo "make models   coverage and error of every supported model on this machine's CPU"
	@echo "make sanitize a reduced sweep of the kernel under compute-sanitizer (on a Hopper GPU)"
	@echo "make coverage attention sites of every architecture of transformers; ARGS=\"--models llama,t5\" selects"

setup:
	@$(PYTHON) scripts/setup_env.py --venv $(VENV)

demo: setup
	@$(RUN) -m fa4_inductor.demo $(ARGS)

test: setup
	@$(RUN) scripts/check.py all -- $(ARGS)

lint: setup
	@$(RUN) scripts/check.py lint

unit: setup
	@$(RUN) scripts/check.py unit -- $(ARGS)

doctor: setup
	@$(RUN) -m fa4_inductor doctor

models: setup
	@$(RUN) benchmarks/models.py --device cpu $(ARGS)

sanitize: setup
	@$(RUN) scripts/sanitize.py $(ARGS)

coverage: setup
	@$(RUN) -m benchmarks.coverage $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
