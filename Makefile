# Everything a newcomer needs: `make demo`, `make test`. Second runs reuse what the first installed.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
ARGS ?=

.PHONY: demo serve test test-long redis check fmt doctor bench-engine bench-policies clean help

help:
	@echo "make demo [ARGS=...]   run agents on a real model, warm and cold"
	@echo "make serve [ARGS=...]  start the server and stay"
	@echo "make test [ARGS=...]   set everything up and run the tests"
	@echo "make test-long [...]   the fault and property tests with thousands of seeds (long)"
	@echo "make check             the full gate: format, lint, types, import contracts, tests"
	@echo "make bench-engine      compare the engine with its peers (long)"
	@echo "make bench-policies    compare all policies on recorded traces, TRACES=folder (long)"

demo: $(VENV)/.run
	$(BIN)/keepwarm demo $(ARGS)

serve: $(VENV)/.run
	$(BIN)/keepwarm serve $(ARGS)

doctor: $(VENV)/.run
	$(BIN)/keepwarm doctor $(ARGS)

test: $(VENV)/.dev redis
	$(BIN)/keepwarm models pull
	$(BIN)/pytest $(ARGS)

test-long: $(VENV)/.dev redis
	$(BIN)/keepwarm models pull
	$(BIN)/pytest tests/faults tests/property --num-seeds 5000 $(ARGS)

# The tests run a real Redis; Debian, Ubuntu and Homebrew have it.
redis:
	@command -v redis-server >/dev/null || command -v valkey-server >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq redis-server; } || \
	  sudo -n apt-get install -y -qq redis-server 2>/dev/null || brew install --quiet redis 2>/dev/null || \
	  { echo "The tests need Redis: sudo apt-get install redis-server, or brew install redis"; exit 1; }

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) test

fmt: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench-engine: $(VENV)/.run
	$(BIN)/keepwarm bench engine $(ARGS)

bench-policies: $(VENV)/.run
	@test -n "$(TRACES)" || { echo "Name the folder of recorded traces: make bench-policies TRACES=..."; exit 1; }
	$(BIN)/python bench/policies.py --traces "$(TRACES)" $(ARGS)

clean:
	rm -rf $(VENV) .venv-peers

# Debian and Ubuntu keep what `venv` needs in a package of its own: fetched when we may, named when we may not.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Keepwarm needs Python 3.11 or newer; name one with PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
	  { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq python3-venv; } || \
	  sudo -n apt-get install -y -qq python3-venv 2>/dev/null || \
	  { echo "Keepwarm needs the venv module: sudo apt-get install python3-venv"; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.run: $(VENV)/bin/python pyproject.toml
	@echo "Installing Keepwarm and PyTorch (CPU) into $(VENV); the first time takes a few minutes."
	$(PIP) install --quiet --upgrade "pip>=25.1"
	$(PIP) install -e '.[engine,report,remote]'
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	$(PIP) install --quiet --group dev
	@touch $@
