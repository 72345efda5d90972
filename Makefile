VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
DATA ?= data
# torch is installed first, in the version of constraints.txt, because any other package would install the newest one. For
# another build of torch, for example for one CUDA version: make setup TORCH="torch --index-url ADDRESS"
TORCH ?= torch
# Tests run the kernels of a GPU in Triton's interpreter. torch for CUDA installs Triton itself; macOS has none.
TRITON ?= $(if $(filter Linux,$(shell uname -s)),triton)
STAMP := $(VENV)/.installed
# Files are compiled when they are first imported: compiling all of them takes longer than installing them. The variable
# that forbids it (images of containers set it) would compile torch and Ray in every process of a test instead.
unexport PYTHONDONTWRITEBYTECODE
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# One line a step: what it is, and the time at which it begins.
STEP = @echo "$$(date +%T) setup:
export RAY_USAGE_STATS_ENABLED := 0
# Keeps the paths of another active environment out of this one's Ray workers.
unexport PYTHONPATH

.PHONY: help setup demo test nightly test-cluster test-fast frozen chaos chaos-short gpu gpu-proof check markers format golden settings docs lock clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

setup: $(STAMP) ## install .venv with pinned dependencies

$(STAMP): requirements.lock constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	$(STEP) 1 of 5, an empty environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	$(STEP) 2 of 5, $(firstword $(TORCH)) and what it needs (0.8 GB on disk for CPUs, more for GPUs): minutes"
	@$(PIP) -c constraints.txt $(TORCH)
	$(STEP) 3 of 5, $(or $(TRITON) (0.7 GB on disk),no triton on this system)"
	@$(if $(TRITON),$(PIP) -c constraints.txt $(TRITON))
	$(STEP) 4 of 5, $$(grep -c '==' requirements.lock) packages of requirements.lock (1.7 GB on disk): minutes"
	@$(PIP) --require-hashes -r requirements.lock
	$(STEP) 5 of 5, the command declutr"
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $(STAMP)
	$(STEP) done"

demo: setup ## corpus, shards, training, encoder, verdict, five searches: 4 to 7 minutes on 2 CPU cores
	$(BIN)/declutr demo

# Two processes of tests, a file of tests in one of them: most of the time is imports, on one core.
test: setup ## every test but those of `make nightly`: about 12 minutes on 2 CPU cores
	RAY_AUTH_MODE=disabled $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

nightly: setup ## what takes an hour and longer (100 minutes on two slow cores): the fault matrix, three hosts, steps of an imitated GPU, frozen figures; needs root
	$(BIN)/python -m pytest -m "nightly or cluster"
	$(MAKE) chaos frozen

test-cluster: setup ## kill one of three hosts in namespaces of this machine: two minutes, needs root
	$(BIN)/python -m pytest -m cluster

test-fast: setup ## tests of less than two seconds, without Ray and process groups: two minutes on 2 CPU cores
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not ray and not dist and not slow and not nightly"

chaos: setup ## one run for each fault, compared with the quiet run (docs/evidence/reliability.md): 30 to 50 minutes
	$(BIN)/python -m benchmarks.chaos --patience 3 --json runs/chaos.json

chaos-short: setup ## five of the faults in one run: about 5 minutes on 2 CPU cores
	$(BIN)/python -m benchmarks.chaos --together --steps 300 --patience 3 --json runs/chaos-short.json \
		--only worker_hung worker_killed_while_saving controller_killed driver_terminated driver_killed

frozen: setup ## compare weights, shards, scores and adaptations with those of cb156041 on this machine: 20 minutes
	@$(PIP) usearch==2.26.6 # cb156041 imports it, this checkout does not
	$(BIN)/python tests/frozen.py

gpu: setup ## on a machine with a GPU: check kernels and host syncs, profile, benchmark; figures and MFU in runs/gpu.json
	$(BIN)/python -m benchmarks.gpu --json runs/gpu.json

gpu-proof: setup ## on a machine with a GPU: DeCLUTR and its rivals from an MLM start, eight minutes at a time; give it again to continue
	timeout --signal=TERM 480 $(BIN)/declutr reproduce mlm-start --data $(DATA) --work runs/proof

check: markers setup ## conflict markers, lint, format, names, types, imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/names.py
	$(BIN)/mypy
	$(BIN)/lint-imports

# Indented markers count too: a formatter may have moved them into a docstring.
markers: ## find committed conflict markers
	@! git grep -nIE '^ *(<{7}|>{7}|\|{7})( |$$)'

format: setup ## rewrite the code's layout
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

golden: setup ## compare with the released code's figures alone
	$(BIN)/python -m pytest -m golden

settings: setup ## regenerate docs/reference/settings.md from the configuration models
	$(BIN)/python -c 'from declutr.cli.main import settings_page; print(settings_page(), end="")' > docs/reference/settings.md

# In an environment of its own: the lock of `make setup` has no MkDocs. Links and anchors are tested without it.
docs: ## build the documentation as a site in build/site
	@$(PYTHON) -m venv build/docs
	@build/docs/bin/python -m pip install --quiet --disable-pip-version-check mkdocs==1.6.1
	build/docs/bin/mkdocs build --strict --quiet
	@echo "build/site/index.html"

# For Python 3.11 to 3.13 on every system. Versions of the lock that still fit stay.
LOCK = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-strip-markers \
  --constraint constraints.txt --no-emit-package torch --no-emit-package triton --no-header pyproject.toml

lock: setup ## pin the dependencies again (torch is not among them: see TORCH)
	$(BIN)/python -m pip install --quiet uv
	$(LOCK) --extra dev --output-file requirements.lock
	cp requirements.lock requirements-run.lock  # whose versions the second lock takes
	$(LOCK) $(addprefix --extra ,audio cluster documents images languages report tensorboard) --output-file requirements-run.lock

clean: ## remove outputs of demo and tests; the environment stays
	rm -rf data runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
