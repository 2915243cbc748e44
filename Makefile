# Everything from a clone: `make report` runs the main job on real tensors, `make test` the tests.
# Each creates the environment in .venv first, once; PYTHON chooses the interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BASE := $(VENV)/.base
INSTALLED := $(VENV)/.installed
PEERS := $(VENV)/.peers
SOLVERS := $(VENV)/.solvers
# Peers of which the tests load single files: what they ask for (CUTLASS, data sets, builds of CUDA) is not installed.
ALONE := accelerate amd-quark auto-round py-cpuinfo quack-kernels
# pytest of the tests as they are, of those that run the kernels as Python in a simulator, and of those that run the
# compiled kernels on the software GPU, which a process keeps once it has loaded it. Work is stolen, for the tests differ
# by a factor of a thousand: else one process has many long ones left when the other is done.
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal
SIMULATED := NUMBA_ENABLE_CUDASIM=1 $(PYTEST) tests/simulated
EMULATED := $(PYTEST) tests/emulator
BOUNDS := tests/benchmarks -n 0 --benchmark-group-by=group --benchmark-sort=name --benchmark-columns=median,iqr,rounds

# Where this is set each of the tests' many processes would compile the sources again.
export PYTHONDONTWRITEBYTECODE :=

# Goals share the environment and the CPUs: one after another, also under -j.
.NOTPARALLEL:
.PHONY: help report check test test-full test-documents test-others test-all ci train minilm notebooks lab lint package docs bench bench-bounds bench-short tables sweeps simulated gate kernel-report gpu-check \
    oracle-score exhaustive prove fuzz peers conformance clean

help:
	@sed -n 's/^## //p' $(MAKEFILE_LIST)

## report      every operation and path checked; a real model's tensors measured under every scaling
report: $(BASE)
	$(BIN)/refops report

## check       in a minute: each operation once with each scaling on each backend, layers, linter
check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(PYTEST) -m check
	$(SIMULATED) -m check
	$(EMULATED) -m check

## test        the tests, in some 17 minutes, cold
test: $(INSTALLED)
	$(BIN)/python tests/prewarm.py
	$(PYTEST) -m "not full"
	$(SIMULATED) -m "not full"
	$(EMULATED) -m "not full"

## ci          what CI runs: test, the code of every document, linter, types, notebooks, site, package, bounds on speed
ci: test test-documents test-others
	$(MAKE) bench-bounds BENCH_ALLOWANCE=1.5

## test-all    before a release: as ci, with more cases of the tests
test-all: test-full test-others bench-bounds

test-documents: $(INSTALLED)
	$(PYTEST) tests/test_documents.py -m "full and not sweep"

# What mostly waits for pip and for single processes, side by side. The bounds on speed need the machine for themselves.
test-others: $(INSTALLED)
	mkdir -p build
	$(MAKE) package > build/package.log 2>&1 & package=$$!; $(MAKE) lint notebooks docs bench-short; others=$$?; \
	wait $$package; packaged=$$?; cat build/package.log; exit $$((others + packaged))

test-full: $(INSTALLED)
	$(BIN)/python tests/prewarm.py
	$(PYTEST) -m "not (full and sweep)"
	$(SIMULATED) -m "not (full and sweep)"
	$(EMULATED) -m "not (full and sweep)"

## train       train a small language model under every recipe; table and loss curves in train_char_lm/
train: $(INSTALLED)
	$(BIN)/python examples/train_char_lm.py

## minilm      a real model's feed-forward block under every recipe: error of output and gradients
minilm: $(INSTALLED)
	$(BIN)/python examples/minilm_feed_forward.py --explain

## notebooks   run all notebooks; fails on an error or where one shows something else than is committed
notebooks: $(INSTALLED)
	$(BIN)/python notebooks/execute.py

## lab         work through the notebooks in JupyterLab
lab: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,notebooks]'
	$(BIN)/jupyter lab --LabApp.default_url=/lab/tree/notebooks/README.md $(LAB)

## lint        linter, formatter, type checker
lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

## package     wheel and sdist: contents, metadata, hints, use on a clean machine; FULL=1: every Python, extras, tests
package: $(INSTALLED)
	$(BIN)/python tests/packaging/check_wheel.py $(if $(FULL),--full)

## docs        the site in build/docs: documents, notebooks, reference from the docstrings; a browser looks at it
docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,docs]'
	rm -rf build/docs
	$(BIN)/python -m sphinx --jobs auto --fail-on-warning --keep-going --fresh-env --quiet -c docs . build/docs
	$(BIN)/python -m pytest -q tests/site

## bench       install the peers; speed and memory of every operation beside theirs, on 1 and 2 threads; writes a JSON
bench: $(PEERS)
	$(BIN)/python -m pytest $(BOUNDS)
	PYTHONPATH=.:tests $(BIN)/python tests/benchmarks/compare.py
	PYTHONPATH=.:tests $(BIN)/python tests/benchmarks/instructions.py

## bench-bounds  the asserted bounds on speed, on a quiet machine; BENCH_ALLOWANCE=1.5 allows half more on another one
bench-bounds: $(INSTALLED)
	$(BIN)/python -m pytest $(BOUNDS)

## bench-short  every operation of bench runs, with the right bits; nothing is asserted of its time
bench-short: $(INSTALLED)
	PYTHONPATH=.:tests $(BIN)/python tests/benchmarks/compare.py --short

## tables      measure what each backend offers; bring tables and pictures of README and the guide up to date
tables: $(INSTALLED)
	$(BIN)/python tests/measured/measure_activations.py
	$(BIN)/python docs/capabilities.py --write
	$(BIN)/python docs/generate.py --write
	$(BIN)/python docs/one_tensors_way.py --write

## sweeps      every case of every test: what test-all runs a share of, whole; a few hours
sweeps: $(INSTALLED)
	$(BIN)/python tests/prewarm.py
	$(PYTEST)
	$(SIMULATED)
	$(EMULATED)

## simulated   every test of the kernels as Python, its sweeps whole
simulated: $(INSTALLED)
	$(SIMULATED)

## gate        every GPU check on a software GPU: the compiled kernels through the whole launch path, bit for bit
gate: $(INSTALLED)
	$(EMULATED)

## kernel-report  every GPU kernel compiled, no GPU needed: registers, spills, accesses, instructions per byte
kernel-report: $(INSTALLED)
	$(BIN)/python -m cuda_kernels report

## gpu-check   every kernel against the reference, compute-sanitizer, benchmark; one JSON; without a card on the software GPU
gpu-check:
	$(PYTHON) tests/gpu/gpu_check.py --json gpu-check.json --seconds 420

## oracle-score  the oracle's evidence: faults found and named, false alarms, other implementations' arrays, speed
oracle-score: $(INSTALLED)
	$(BIN)/python tests/oracle/score.py

## exhaustive  all 2^32 float32 values through the casts, against ml_dtypes, and through exp and tanh: the nearest float32
exhaustive: $(INSTALLED)
	$(BIN)/python tests/exhaustive/encode_all_float32.py
	$(BIN)/python tests/exhaustive/correct_rounding.py

## prove       install two solvers; casts, scale rules and places equal their definitions for all inputs: a table
prove: $(SOLVERS)
	$(PYTEST) tests/proofs -o timeout=1800 -o faulthandler_timeout=2000

## fuzz        every public function, the command line and the file readers with random and hostile arguments
fuzz: $(INSTALLED)
	$(BIN)/python tests/fuzz/run.py --json tests/fuzz/results/fuzz.json

## peers       install the peers and run the tests that compare with them live; read .pt files
peers: $(PEERS)
	$(BIN)/python -m pytest tests/refops/test_peers.py tests/peers -rs
	$(BIN)/python -m pytest tests/refops/test_cli.py -k pytorch -rs

## conformance  install the peers; how many elements of each agree bit for bit, and what the others are; writes a JSON
conformance: $(PEERS)
	PYTHONPATH=.:tests $(BIN)/python -m peers.conformance

## clean       remove the environment and caches
clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .benchmarks

$(PEERS): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,peers]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps $(ALONE)
	touch $@

$(SOLVERS): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,prove]'
	touch $@

# What the report needs.
$(BASE): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

# What the tests need. pip first: pip 23 takes the newest CUDA and finds no way back to the one that PyTorch asks for.
$(INSTALLED): $(BASE)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@
