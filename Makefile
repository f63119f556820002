# `make demo` and `make test` work on a fresh clone: Python 3.11 to 3.13 and a C++ compiler are all they need.

PYTHON ?= python3
BIN := .venv/bin
# the install builds the C++ kernels
KERNELS := setup.py inflight/kernels/cpu/compile_flags.py $(wildcard inflight/kernels/cpu/*.cpp inflight/kernels/cpu/*.h)
TORCH := $(shell grep '^torch==' constraints.txt)

# Twice as many processes as cores, with one compute thread in each: half of the tests' time is waiting for processes. With worksteal
# a test that crashes its process costs no other test (tests/conftest.py). Compiled test files are kept
# (PYTHONDONTWRITEBYTECODE is empty). Otherwise each process would compile all of them, which takes 8 seconds.
PYTEST_WORKERS ?= $(shell echo $$((2 * $$(nproc))))
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal

# The environments of `make test-clients`. Without node and npm the Node tests are skipped.
CLIENTS := .venv-clients
NODE_STAMP := $(if $(and $(shell command -v node),$(shell command -v npm)),$(CLIENTS)/node/.stamp)

.PHONY: help demo test test-quick test-full test-clients test-agents check clean

help:
	@echo "make demo          generate text with the embedded model"
	@echo "make test          scripts/check and all tests except those of test-clients"
	@echo "make test-quick    scripts/check and the tests of what is not committed; SINCE=main: since the branch left main"
	@echo "make test-full     as make test, with big counts"
	@echo "make test-clients  real clients against inflight serve; installs about 3 GB into .venv-clients"
	@echo "make test-agents   Codex, Claude Code and others against inflight serve; installs about 3 GB into .venv-clients"
	@echo "make check         formatting, lint, types, architecture"
	@echo "make clean         remove caches and build products (.venv and .venv-clients stay)"

demo: .venv/.stamp-runtime
	@echo "The embedded model (4.8 million parameters) answers five prompts in one batch:"
	@INFLIGHT_LOG_LEVEL=WARNING $(BIN)/inflight generate --temperature 0 \
		--prompt "What is 47 + 38?" \
		--prompt "Extract name and age as JSON: Mia is 34 years old and lives in Oslo." \
		--prompt "What is the capital of France?" \
		--prompt "Which is the largest of 42, 7, 19 and 63?" \
		--prompt "Tell me a story about a fox named Anna in the forest."
	@echo "Next: serve it, or a model of your own, and call http://localhost:8000/v1 with any OpenAI client:"
	@echo "    $(BIN)/inflight serve"
	@echo "    $(BIN)/inflight serve Qwen/Qwen3-0.6B"

# `check` has run the architecture tests.
test: check
	$(PYTEST) --ignore=tests/architecture

# Before each commit. SINCE: a commit; without it, what is not committed, or on a clean tree the last commit.
test-quick: check
	@tests=$$($(BIN)/python scripts/changed_tests.py $(SINCE)) && if [ -n "$$tests" ]; then $(PYTEST) $$tests; fi
	@$(BIN)/python scripts/changed_tests.py --apart $(SINCE) | while read -r arguments; do $(PYTEST) $$arguments </dev/null || exit 1; done

test-full: check
	INFLIGHT_TEST_FULL=1 $(PYTEST) --ignore=tests/architecture

# SUITES="openai-3 node" runs only these.
test-clients: .venv/.stamp-dev $(CLIENTS)/templates/.stamp $(CLIENTS)/openai-3/.stamp $(CLIENTS)/openai-2/.stamp $(CLIENTS)/vllm/.stamp $(NODE_STAMP)
	$(BIN)/python -m tests.clients.run $(SUITES)

# AGENTS="codex claude" runs only these. Not part of CI, because the programs come from npm and PyPI.
test-agents: .venv/.stamp-runtime
	$(BIN)/python -m tests.clients.run_agents $(AGENTS)

check: .venv/.stamp-dev
	scripts/check

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find inflight inflight_bench tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +

# Set-up, run again only when pyproject.toml, constraints.txt or the kernels change. Its output is in .venv/setup.log. torch comes
# first, alone, and from pip: together with the rest the resolver may take a CUDA build of it where a CPU build is offered, and uv
# does not see every place where pip finds one.

LOGGED := scripts/quietly .venv/setup.log
PIP := $(LOGGED) $(BIN)/pip install --disable-pip-version-check -c constraints.txt
INSTALL := $(LOGGED) scripts/install -c constraints.txt

.venv/.stamp-torch: constraints.txt
	@echo "Set-up of .venv: torch (the largest package)"
	@$(PYTHON) -m venv .venv
	@$(PIP) $(TORCH)
	@touch $@

.venv/.stamp-runtime: .venv/.stamp-torch pyproject.toml constraints.txt $(KERNELS)
	@echo "Set-up of .venv: Inflight, with its C++ kernels (about half a minute)"
	@$(INSTALL) -e .
	@touch $@

.venv/.stamp-dev: .venv/.stamp-torch pyproject.toml constraints.txt $(KERNELS)
	@echo "Set-up of .venv: Inflight, with its C++ kernels, and the packages of the tests (about a minute)"
	@$(INSTALL) -e '.[dev]'
	@touch .venv/.stamp-runtime $@

# The environments of the clients. They are made again when their list of packages changes. The lists are complete, hence
# --no-deps. The list of vLLM's benchmark has only those requirements of torch and vLLM that the benchmark imports.

$(CLIENTS)/openai-%/.stamp: tests/clients/requirements-openai-%.txt
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/pip install -q --no-deps --no-compile -r $<
	@touch $@

$(CLIENTS)/vllm/.stamp: tests/clients/requirements-vllm.txt constraints.txt
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/pip install -q --no-compile $(TORCH)
	$(@D)/bin/pip install -q --no-deps --no-compile -r $<
	@touch $@

# Only the chat templates of these packages are kept.
$(CLIENTS)/templates/.stamp: tests/clients/template-packages.txt tests/clients/real_templates.py .venv/.stamp-dev
	rm -rf $(@D) && mkdir -p $(@D)
	$(BIN)/pip download -q --no-deps --no-binary llama-cpp-python -d $(@D) -r $<
	$(BIN)/python -m tests.clients.real_templates $(@D)
	@touch $@

$(CLIENTS)/node/.stamp: tests/clients/node/package.json tests/clients/node/package-lock.json
	mkdir -p $(@D)
	cp $^ $(@D)
	npm ci --silent --prefix $(@D)
	@touch $@
