# The few commands there are. Each makes .venv first, which takes minutes once and nothing afterwards.
#   make demo  [ARGS="--kill denoise"]     make bench [ARGS="overhead --json"]     make test [PYTEST="-k lease"]
.PHONY: help setup demo test lint unit wheel docs bench doctor conformance matrix clean
.DEFAULT_GOAL := help
.NOTPARALLEL:
ARGS ?=
PYTEST ?=
BIN := .venv/bin

help:
	@echo 'make demo    prompts become videos in three pools of processes; ARGS="--kill decode", "--transfer-mode store" ...'
	@echo 'make test    lint, types, all tests, then the wheel and its tests'
	@echo 'make lint    ruff and mypy alone          make unit   the fast tests alone'
	@echo 'make conformance  the suite against all that is here; ARGS="engine:shm --level L1" against one thing'
	@echo 'make matrix  write conformance/matrix.md from the reports of make conformance'
	@echo 'make docs    write docs/reference from the docstrings'
	@echo 'make bench   measure on this machine      make doctor what is installed and reachable'
	@echo 'make clean   delete .venv and all that was built'

setup:
	@tools/setup.sh

demo: setup
	$(BIN)/moonrelay demo $(ARGS)

bench: setup
	$(BIN)/moonrelay bench $(if $(ARGS),$(ARGS),overhead)

doctor: setup
	$(BIN)/moonrelay doctor $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: setup
	$(BIN)/python tools/run_tests.py tests/unit tests/property tests/test_architecture.py $(PYTEST)

test: lint
	$(BIN)/python tools/make_reference.py --check
	$(BIN)/python tools/run_tests.py $(PYTEST)
	$(BIN)/nox --session wheel

wheel: setup
	$(BIN)/nox --session wheel

conformance: setup
ifneq ($(ARGS),)
	$(BIN)/moonrelay conformance $(ARGS)
else
	@$(BIN)/nox --session conformance third_party; code=$$?; $(BIN)/nox --session matrix -- --keep && exit $$code
endif

matrix: setup
	$(BIN)/nox --session matrix -- --update --keep

docs: setup
	$(BIN)/python tools/make_reference.py

clean:
	rm -rf .venv .nox build dist out .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
