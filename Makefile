# make run    answers a prompt with a real model:  make run PROMPT="Why is the sky blue?"
# make serve  an OpenAI-compatible server:  make serve SERVE_ARGS="--model Qwen/Qwen3-0.6B --port 8080"
# make test   ruff, the type checker, and the quick tests: what to run before a commit
# make test-all  the other tests, and those that search once more, for longer: CI runs both
# make check  ruff and the type checker
# make bench  the benchmarks that run on this machine
# make clients  installs programs that tests then run against the server: Codex, Claude Code, lm-eval and others
# make soak   the long form of tests that search, then loads a server for 10 minutes (SOAK_SECONDS=) and looks for
#             anything that grows

PYTHON ?= python3
PROMPT ?= Explain in two sentences why the sky is blue.
# The torch the project is tested with; any later one works too.
TORCH ?= torch==2.13.0
BIN := .venv/bin
export PROMPT
# Tests start hundreds of processes of Quire: compiled once, it starts sooner.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run serve test quick-tests test-all check bench clients soak clean

run: .venv/run-installed
	@$(BIN)/quire run "$$PROMPT"

serve: .venv/serve-installed
	@$(BIN)/quire serve $(SERVE_ARGS)

# Only the plugins that the tests use: each of pytest's processes would import those of schemathesis and langsmith, too.
# numpy's threads would wait for each other's cores: small systems of equations take it four times as long then.
PYTEST := OPENBLAS_NUM_THREADS=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(BIN)/python -m pytest \
	-p _hypothesis_pytestplugin

# The type checker has one core: tests begin beside it.
test: .venv/test-installed
	@$(MAKE) --no-print-directory -j2 check quick-tests

# Tests of one server or one file share a process (tests/processes.py).
quick-tests: .venv/test-installed
	QUIRE_QUICK_TESTS=1 $(PYTEST) --processes 4 -m "not slow and not gpu" $(PYTEST_ARGS)

# Some of these take a minute alone: whoever is done takes single tests from the others. Many wait for servers, so there
# are more processes.
test-all: .venv/test-installed
	$(PYTEST) --processes 6 --each -m "slow or soak or hypothesis or gpu" $(PYTEST_ARGS)

check: .venv/test-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	@$(BIN)/python scripts/statements.py

bench: .venv/test-installed
	$(BIN)/python -m quire.tools.bench.engine.scheduler
	$(BIN)/python -m quire.tools.bench.engine.cpu_kernels
	$(BIN)/python -m quire.tools.bench.engine.sampling
	$(BIN)/quire bench compare --peer transformers --requests 32 --prompt-tokens 100-300 --new-tokens 64-128
	$(BIN)/python -m quire.tools.bench.server_costs.served
	$(BIN)/python -m quire.tools.bench.server_costs.stalls

clients: .venv/test-installed
	$(BIN)/python -m tests.server.client_packages

soak: .venv/test-installed
	QUIRE_LONG_TESTS=1 $(BIN)/python -m pytest --processes 2 --each -m soak
	$(BIN)/python scripts/soak.py

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Quire needs Python 3.11 or later; set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv .venv

.venv/run-installed: pyproject.toml | .venv/bin/python
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet -e ".[structured]"
	@touch $@

.venv/serve-installed: pyproject.toml | .venv/run-installed
	$(BIN)/pip install --quiet -e ".[server]"
	@touch $@

.venv/test-installed: pyproject.toml | .venv/run-installed
	$(BIN)/pip install --quiet -e ".[test]"
	@touch $@

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
