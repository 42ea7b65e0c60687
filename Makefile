PY := .venv/bin/python
BIN := .venv/bin
PROMPT ?= What is the capital of France?
SOURCES := protos/python libs services
MODELS := .forebay/models

help: ## List the targets.
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):[^#]*## (.*)/\1\t\2/' | expand -t 16

run: install ## Set everything up, start a local fleet with a real model, ask it a question.
	@$(BIN)/forebay up
	@$(BIN)/forebay chat --temperature 0 --trace "$(PROMPT)"

down: ## Stop the local fleet.
	@$(BIN)/forebay down

install: ## Install the product into .venv (returns at once when it is there).
	@python3 deploy/local/bootstrap.py

install-dev: ## Install also what tests and linters need.
	@python3 deploy/local/bootstrap.py --dev

models: install-dev ## Prepare the models that end-to-end tests use.
	@$(PY) -m forebay_engine.prepare smollm2 --into $(MODELS)/smollm2
	@$(PY) -m forebay_engine.prepare minilm --into $(MODELS)/minilm

test: test-unit test-contract test-integration test-e2e ## Run every test.

test-unit: install-dev ## Cores alone: no sockets, seconds in all.
	$(PY) -m pytest tests/unit

test-contract: install-dev ## Contracts, packages and the rules of the repository.
	$(PY) -m pytest tests/contract

test-integration: install-dev ## Real etcd, real gRPC, real processes, simulated engines.
	$(PY) -m pytest tests/integration

test-e2e: models ## The real model.
	$(PY) -m pytest tests/e2e

lint: install-dev ## Style, of code and contracts.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd protos && ../$(BIN)/buf lint && ../$(BIN)/buf format --diff --exit-code

types: install-dev ## Static types, strict.
	$(BIN)/mypy libs services

imports: install-dev ## Who may import whom.
	$(BIN)/lint-imports

protos: install-dev ## Regenerate the stubs from the contracts.
	rm -rf protos/python/forebay && mkdir -p protos/python
	cd protos && PATH=$(CURDIR)/$(BIN):$$PATH $(CURDIR)/$(PY) -m grpc_tools.protoc -I . --python_out=python \
	  --grpc_python_out=python --mypy_out=quiet:python --mypy_grpc_out=quiet:python $$(find forebay -name '*.proto' | sort)
	find protos/python/forebay -type d -name v1 -exec touch {}/py.typed \;

bench: install-dev ## Run one benchmark: make bench NAME=mesh_overhead
	$(PY) -m bench $(NAME)

.PHONY: help run down install install-dev models test test-unit test-contract test-integration test-e2e lint types imports protos bench
