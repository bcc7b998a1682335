# The commands people type. python3, python3-venv and make are all that must be there before.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml constraints.txt setup.sh Makefile

.PHONY: help lab demo test test-gpu test-long quick bench bench-strategies bench-home bench-compression bench-prediction recovering netns tables pictures docs binder torture interrupts joins damage last-steps cycles soak runs-end mutants course outputs packages lint clean

help:
	@echo "make lab    open JupyterLab on the first notebook"
	@echo "make demo   the same without a browser: train, switch, compare; writes demo.html"
	@echo "make test   run the tests (at most 15 minutes on two quiet cores)"
	@echo "make test-long  the others: more of each family, real networks, fresh environments (EVERY=1: every case and pair)"
	@echo "make test-gpu  run what wants GPUs; writes docs/project/gpu.md"
	@echo "make bench  measure; writes docs/project/benchmarks.md"
	@echo "make bench-strategies  every strategy on four simulated networks; writes docs/project/strategies.md (45 minutes; goes on where it stopped)"
	@echo "make bench-home  each method against its own claim, both tuned; the first part of docs/project/strategies.md (an hour at a time; goes on where it stopped)"
	@echo "make bench-compression  every compressor on four links; writes docs/project/compression.md (45 minutes; goes on where it stopped)"
	@echo "make bench-prediction  every strategy and compressor on a Llama, predicted and measured; writes docs/project/prediction.md (goes on where it stopped)"
	@echo "make netns  measure the emulated Link against a real network (Linux, root, iproute2)"
	@echo "make recovering  one of four workers killed: ours, torchrun, torchft, Ray Train (OTHERS=a python that has them; BUSY=1: beside two spinning processes)"
	@echo "make interrupts  a kernel interrupted 200 times at random moments of a lab's life (SEED=7)"
	@echo "make joins  300 faults while ranks join a run (about 4 hours; MINUTES=60 ends earlier; goes on where it stopped)"
	@echo "make damage  3,000 changes of a checkpoint's files and of a record's (20 minutes; goes on where it stopped)"
	@echo "make last-steps  resume the checkpoint of a last step, under every strategy and partition (goes on where it stopped)"
	@echo "make cycles  a lab opened, run and closed 100 times: what remains (CYCLES=100; goes on where it stopped)"
	@echo "make soak  eight ranks for an hour, changed and killed (MINUTES=60): what of memory, descriptors and threads grows"
	@echo "make torture  labs changed and harmed at random while they train, an hour (MINUTES=10, SEED=7; OUT=a file: goes on there)"
	@echo "make runs-end  five hundred short runs beside two spinning processes, and how each ended (SEED=7 replays)"
	@echo "make mutants  plant mistakes in a copy of the package, one at a time: does a test notice? (20 minutes on a busy machine)"
	@echo "make course  how long each lesson runs beside two spinning processes, into its head (LESSONS=\"05 08\")"
	@echo "make outputs  run each lesson whose code has changed, and store its results in its notebook (LESSONS=\"05 08\")"
	@echo "make packages  install the wheel with the lowest and the newest torch, under each Python found; run the quickstart"
	@echo "make tables  write the reference pages from the code (docs/reference/, docs/project/shapes.md)"
	@echo "make pictures  photograph the dashboard in Chromium (docs/start/*.png)"
	@echo "make docs   build the site; open site/index.html"
	@echo "make binder  print the address at which Binder opens the first lesson, from where this was cloned"
	@echo "make lint   ruff and mypy"

lab: $(VENV)/.installed
	@$(BIN)/workbench lab

demo: $(VENV)/.installed
	@$(BIN)/workbench demo

test: $(VENV)/.installed-test
	@$(BIN)/python tests/chromium.py
	@$(BIN)/python tests/run_all.py

test-long: $(VENV)/.installed-test
	@$(BIN)/python tests/chromium.py
	@$(BIN)/python tests/run_all.py long $(if $(EVERY),every)

test-gpu: $(VENV)/.installed-test
	@$(BIN)/python -m tests.gpu

quick: $(VENV)/.installed-test
	@$(BIN)/python -m pytest -q

bench: $(VENV)/.installed-test
	@$(BIN)/python -m tests.bench

bench-strategies: $(VENV)/.installed-test
	@$(BIN)/python -m tests.bench.strategies

bench-home: $(VENV)/.installed-test
	@$(BIN)/python -m tests.bench.home $(if $(MINUTES),--minutes $(MINUTES))

bench-compression: $(VENV)/.installed-test
	@$(BIN)/python -m tests.bench.codecs --out docs/data/codecs.json
	@$(BIN)/python -m tests.bench.compression

bench-prediction: $(VENV)/.installed-test
	@$(BIN)/python -m tests.bench llama

netns: $(VENV)/.installed-test
	@$(BIN)/python -m tests.bench netns

torture: $(VENV)/.installed-test
	@$(BIN)/python -m tests.campaign --minutes $(or $(MINUTES),60) $(if $(SEED),--seed $(SEED)) $(if $(OUT),--out $(OUT))

interrupts: $(VENV)/.installed-test
	@$(BIN)/python -m tests.interrupts $(if $(SEED),--seed $(SEED))

joins: $(VENV)/.installed-test
	@$(BIN)/python -m tests.joins $(if $(MINUTES),--minutes $(MINUTES)); \
	code=$$?; $(BIN)/python -m tests.bench.reliability; exit $$code

damage: $(VENV)/.installed-test
	@$(BIN)/python -m tests.damage; code=$$?; $(BIN)/python -m tests.bench.reliability; exit $$code

last-steps: $(VENV)/.installed-test
	@$(BIN)/python -m tests.last_steps; code=$$?; $(BIN)/python -m tests.bench.reliability; exit $$code
cycles: $(VENV)/.installed-test
	@$(BIN)/python -m tests.cycles --cycles $(or $(CYCLES),100) --out docs/data/cycles.json; \
	code=$$?; $(BIN)/python -m tests.bench.reliability; exit $$code

soak: $(VENV)/.installed-test
	@$(BIN)/python -m tests.soak $(if $(MINUTES),--minutes $(MINUTES)) --out docs/data/soak.json; \
	code=$$?; $(BIN)/python -m tests.bench.reliability; exit $$code

recovering: $(VENV)/.installed-test
	@$(BIN)/python -m tests.bench.recovering --python $(OTHERS) $(if $(BUSY),--busy) --out docs/data/recovering.json
	@$(BIN)/python -m tests.bench.reliability

runs-end: $(VENV)/.installed-test
	@$(BIN)/python -m tests.runs_end $(if $(SEED),--seed $(SEED))

mutants: $(VENV)/.installed-test
	@$(BIN)/python -m tests.mutants

course: $(VENV)/.installed-test
	@$(BIN)/python -m tests.course $(LESSONS)

outputs: $(VENV)/.installed-test
	@$(BIN)/python -m tests.outputs $(LESSONS)

packages: $(VENV)/.installed-test
	@$(BIN)/python -m tests.packages

tables: $(VENV)/.installed-test
	@$(BIN)/python -m tests.tables

pictures: $(VENV)/.installed-test
	@$(BIN)/python -m tests.pictures

docs: $(VENV)/.installed-docs
	@$(BIN)/python -m sphinx -W --keep-going -q -c docs . site
	@echo "open site/index.html"

binder:
	@$(PYTHON) binder/link.py

lint: $(VENV)/.installed-dev
	@$(BIN)/ruff check . && $(BIN)/mypy

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "Python 3.11 or newer is needed; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV) || \
	    { rm -rf $(VENV); echo "Python's venv is missing; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }

$(VENV)/.installed: $(VENV)/bin/python $(SOURCES)
	@./setup.sh $(BIN)/python dock
	@touch $@

$(VENV)/.installed-%: $(VENV)/bin/python $(SOURCES)
	@./setup.sh $(BIN)/python dock,$*
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache
