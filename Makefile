# The commands of a checkout. `make` lists them. Everything is installed into .venv, the model into a cache folder.

SHELL := /bin/sh
VENV := .venv
PYTHON ?=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1

.DEFAULT_GOAL := help
.PHONY: help demo test chaos soak test-long fuzz test-gpu check audit format model install clean bench-%

help:
	@echo "make demo            install, fetch a small model, and answer questions about the installed packages"
	@echo "make test            all tests but the long ones; with a JDK 21+ and Maven also those on real servers"
	@echo "make chaos           rounds of random faults on real servers and workers, for SECONDS=300 or ROUNDS=n, SEED=n"
	@echo "make soak            an hour at full speed with a fake model, judged: memory, descriptors, latency; for SECONDS=3600"
	@echo "make test-long       the long tests"
	@echo "make fuzz            a million inputs to what reads bytes of others: messages, settings, templates, metadata"
	@echo "make test-gpu        the tests that need a CUDA device"
	@echo "make check           ruff, mypy strict, layers, and of the dependencies their versions, fit and licences"
	@echo "make audit           known vulnerabilities of the dependencies; over the network"
	@echo "make format          ruff's fixes and format"
	@echo "make bench-NAME      tests/bench/NAME.py (cpu-engine, pipeline, ...)"
	@echo "make model           fetch and verify the demo's model; prints its path"
	@echo "make clean           remove what was installed and built here (not the model)"

demo: $(VENV)/installed-demo
	@$(BIN)/pagemill demo

# What the tests need is started by themselves; the model is fetched before, since it takes a while.
test: $(VENV)/installed-dev model
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-long: $(VENV)/installed-dev model
	$(BIN)/python -m pytest -m "slow and not gpu" --timeout 3600

# As many rounds as fit into SECONDS; or ROUNDS of them (the long form: 1000, an hour on 2 cores); SEED alone replays
# that round by itself. Needs a JDK and Maven.
chaos: SECONDS ?= 300
chaos: $(VENV)/installed-dev
	$(BIN)/python -m tests.chaos.driver --seconds $(SECONDS) $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(SEED),--seed $(SEED))

# Prints a line every five minutes and its verdict; not beside anything else that is measured.
soak: SECONDS ?= 3600
soak: $(VENV)/installed-dev
	$(BIN)/python -m tests.soak.driver --seconds $(SECONDS)

# Other inputs at every run; a failure prints the one that it shrank to.
fuzz: $(VENV)/installed-dev
	PAGEMILL_FUZZ_INPUTS=$${PAGEMILL_FUZZ_INPUTS:-1000000} $(BIN)/python -m pytest -s --timeout 7200 tests/fuzz

test-gpu: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m gpu

check: $(VENV)/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_layers.py
	$(BIN)/python -m tests.audit_dependencies

# In an environment of its own, and over the network: it asks a database of known vulnerabilities for every pin. Strict:
# a package that the database does not know fails it, or an index that is only a mirror would look like a clean bill.
AUDIT := build/audit
audit: | $(BIN)/python
	test -x $(AUDIT)/bin/pip-audit || { $(BIN)/python -m venv $(AUDIT) && $(AUDIT)/bin/pip install 'pip-audit>=2.10,<3'; }
	$(AUDIT)/bin/pip-audit --strict --no-deps --disable-pip -r constraints.txt

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench-%: $(VENV)/installed-dev
	@test -f tests/bench/$(subst -,_,$*).py || { echo "There is no tests/bench/$(subst -,_,$*).py" >&2; exit 1; }
	$(BIN)/python -m tests.bench.$(subst -,_,$*)

model: $(VENV)/installed-demo
	@$(BIN)/python -m pipeline.model_download

install: $(VENV)/installed-dev

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	rm -rf tests/servers/kafka/target tests/servers/elasticsearch/target
	rm -f tests/servers/elasticsearch/modules/transport-netty4/*.jar
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps make the second time instant; a change of the requirements installs again.
$(VENV)/installed-demo: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -c constraints.txt -e '.[demo]'
	@touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt $(VENV)/installed-demo | $(BIN)/python
	$(PIP) install -c constraints.txt -e '.[demo,dev]'
	@touch $@

$(BIN)/python:
	@deploy/make-venv "$(VENV)" "$(PYTHON)"
