# `make demo` and `make test` are the two commands; each sets up .venv first (scripts/bootstrap.sh).
#
#   make demo WORKDIR=runs/mine          another folder for the run
#   make test ARGS='tests/ops -x'        arguments for pytest
#   make test NHA_PYTHON=/path/python3   another interpreter for the set-up

SHELL := /bin/sh
ROOT := $(shell CDPATH='' cd -- "$$(dirname -- '$(strip $(MAKEFILE_LIST))')" && pwd)
PYTHON := .venv/bin/python
WORKDIR ?= runs/demo
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help environment demo test lint format hooks clean

help:
	@echo 'make demo    train a small model on real text, on a CPU in minutes'
	@echo 'make test    run the tests'
	@echo 'make lint    ruff, formatting and types'
	@echo 'make format  let ruff mend and format'
	@echo 'make hooks   run the lint before every commit (pre-commit)'
	@echo 'make clean   remove .venv, caches and build output (never a run)'

environment:
	@sh '$(ROOT)/scripts/bootstrap.sh'

demo: environment
	cd '$(ROOT)' && $(PYTHON) -m experiments.train --config configs/demo_text.py --workdir '$(WORKDIR)'

test: environment
	cd '$(ROOT)' && $(PYTHON) -m pytest --numprocesses=auto --maxprocesses=8 --dist=worksteal $(ARGS)

lint: environment
	cd '$(ROOT)' && $(PYTHON) -m ruff check .
	cd '$(ROOT)' && $(PYTHON) -m ruff format --check .
	cd '$(ROOT)' && $(PYTHON) -m mypy

format: environment
	cd '$(ROOT)' && $(PYTHON) -m ruff check --fix .
	cd '$(ROOT)' && $(PYTHON) -m ruff format .

hooks: environment
	cd '$(ROOT)' && $(PYTHON) -m pre_commit install

clean:
	cd '$(ROOT)' && rm -rf .venv .venv.previous .venv.log .pytest_cache .ruff_cache .mypy_cache build dist *.egg-info
	cd '$(ROOT)' && find . -name __pycache__ -type d -prune -exec rm -rf {} +
