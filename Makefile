PY := .venv/bin/python

protos: ## Regenerate the stubs from the contracts.
	rm -rf protos/python/forebay && mkdir -p protos/python
	cd protos && PATH=$(CURDIR)/.venv/bin:$$PATH $(CURDIR)/$(PY) -m grpc_tools.protoc -I . --python_out=python --grpc_python_out=python \
	  --mypy_out=python --mypy_grpc_out=python $$(find forebay -name '*.proto' | sort)
	find protos/python/forebay -type d -name v1 -exec touch {}/py.typed \;

.PHONY: protos
