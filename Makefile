# The project's commands. The work is done in scripts/; this file passes the variables on.

PORT ?= 8080
RANKS ?= 2
CHECKPOINT ?=
DTYPE ?=
QUANTIZATION ?=
DEVICE ?=
PYTHON ?= python3
ARGS ?=

RUN = .venv/bin/python -m
MODEL = --ranks "$(RANKS)" --checkpoint "$(CHECKPOINT)" --dtype "$(DTYPE)" --quantization "$(QUANTIZATION)" \
	--device "$(DEVICE)"
# The demo takes free ports, unless PORT was given
DEMO_PORT = $(if $(filter file,$(origin PORT)),,--port "$(PORT)")

.DEFAULT_GOAL := help
.PHONY: help venv demo test start stop serve status smoke archive benchmark lint clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo 'Variables: PORT=8080 (inference; management PORT+1, metrics PORT+2, gRPC PORT+3), RANKS=2,'
	@echo '  CHECKPOINT= (file or folder; empty: the demo model), DTYPE=auto|float32|bfloat16|float16,'
	@echo '  QUANTIZATION=none|int8|int4, DEVICE=auto|cpu|cuda, ARGS= (more options for the script),'
	@echo '  PYTHON=python3 (makes .venv; remove .venv to change it)'

venv: ## set up .venv (every other target does it first)
	@$(PYTHON) -m scripts.setup_venv

demo: venv ## set up, start, one chat and one text request, stop
	@$(RUN) scripts.demo $(DEMO_PORT) $(MODEL) $(ARGS)

test: venv ## all tests
	@$(RUN) pytest $(ARGS)

start: venv ## start a server in the background; returns when it answers
	@$(RUN) scripts.server start --port "$(PORT)" $(MODEL) $(ARGS)

stop: venv ## stop the server at PORT
	@$(RUN) scripts.server stop --port "$(PORT)" $(ARGS)

serve: venv ## run a server in the foreground; Ctrl-C stops it
	@$(RUN) scripts.server serve --port "$(PORT)" $(MODEL) $(ARGS)

status: venv ## whether a server runs at PORT
	@$(RUN) scripts.server status --port "$(PORT)"

smoke: venv ## one request of each kind to the server at PORT
	@$(RUN) scripts.smoke --url "http://127.0.0.1:$(PORT)" $(ARGS)

archive: venv ## build the model archive in build/model-store
	@$(RUN) scripts.package_archive $(MODEL) $(ARGS)

benchmark: venv ## measure the speed; writes build/benchmark.json
	@mkdir -p build
	@$(RUN) scripts.benchmark --json build/benchmark.json --ranks "$(RANKS)" \
		$(if $(CHECKPOINT),--checkpoint "$(CHECKPOINT)") $(if $(DTYPE),--dtype "$(DTYPE)") \
		$(if $(QUANTIZATION),--quantization "$(QUANTIZATION)") $(if $(DEVICE),--device "$(DEVICE)") $(ARGS)

lint: venv ## ruff and mypy
	@$(RUN) ruff check .
	@$(RUN) ruff format --check .
	@$(RUN) mypy

clean: ## stop this checkout's servers, remove build/ and caches (.venv stays)
	@if [ -x .venv/bin/python ]; then $(RUN) scripts.server stop --all; fi
	@rm -rf build logs *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
