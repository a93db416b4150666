# One word per job; `make` alone lists them. A bare Debian 12 needs: apt-get install -y python3-venv python3-dev g++ make
PYTHON ?= python3
JOBS   ?= 2
MODEL  ?= smollm2

VENV := .venv
BIN  := $(VENV)/bin
PY   := $(BIN)/python
PIP  := $(PY) -m pip install --quiet --disable-pip-version-check

# Stamps: a second run does no set-up again; a changed source or requirement redoes exactly its own step.
READY   := $(VENV)/.ready
SOURCES := pyproject.toml CMakeLists.txt $(shell find native -name '*.cpp' -o -name '*.h')

# $(call needs,KEY,...): that list of requirements in pyproject.toml, one a line, less references to ourselves.
needs = $(PY) -c "import sys, tomllib; t = tomllib.load(open('pyproject.toml', 'rb'))$(1); print(*(r for r in t if not r.startswith('quaff[')), sep='\n')"

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup run serve test test-models lint format bits bits-arm sanitize bench bench-peers guard sz clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | awk -F'\t' '{ printf "  make %-12s %s\n", $$1, $$2 }'

setup: $(READY) ## make .venv with everything a user needs and build the native module

run: $(READY) ## fetch SmolLM2, read a prompt of 2,000 tokens, answer it
	$(BIN)/quaff pull smollm2
	$(BIN)/quaff run smollm2 --file examples/waterworks.md --max-tokens 48

serve: $(VENV)/.serve ## serve MODEL on localhost:8080, with the APIs of OpenAI and Anthropic
	$(BIN)/quaff serve $(MODEL) $(ARGS)

test: $(VENV)/.test ## environment, build and all fast tests
	$(PY) -m pytest --numprocesses $(JOBS) -m "not models" --ignore=tests/models

test-models: $(VENV)/.test ## tests on real weights, fetched on first use
	$(PY) -m pytest tests/models
	$(BIN)/quaff verify smollm2
	$(BIN)/quaff verify gemma3

lint: $(VENV)/.dev ## ruff, mypy --strict, import layers, clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	find native -name '*.cpp' -o -name '*.h' | xargs $(BIN)/clang-format --dry-run -Werror

format: $(VENV)/.dev ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	find native -name '*.cpp' -o -name '*.h' | xargs $(BIN)/clang-format -i

bits: $(READY) ## hash every kernel on every instruction set of this machine and compare
	$(CMAKE) -S . -B build/native -DQUAFF_TESTS=ON >/dev/null
	$(CMAKE) --build build/native --parallel $(JOBS) --target bits
	build/native/bits
	! build/native/bits --broken >/dev/null 2>&1

bits-arm: ## the same for NEON under emulation (needs g++-aarch64-linux-gnu and qemu-user)
	bash native/tests/bits_arm.sh

# $(call apart,FOLDER,SOURCE,OPTIONS): SOURCE, built and installed in FOLDER, in a virtual environment that borrows the packages of .venv:
# a whole Python of its own, which child processes use too.
site = $(shell $(PY) -c "import sysconfig; print(sysconfig.get_path('purelib', vars={'base': '$(1)/venv'}))")
define apart
	$(PY) -m venv --clear --without-pip $(1)/venv
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(PIP) --no-build-isolation --no-deps --upgrade --target $(call site,$(1)) -C build-dir=$(CURDIR)/$(1)/cmake $(3) $(2)
	$(PY) -c "import sysconfig; print(sysconfig.get_path('purelib'))" > $(call site,$(1))/packages.pth
endef

SAN      = build/sanitize
RUNTIME  = $(shell $${CXX:-g++} -print-file-name=libasan.so):$(shell $${CXX:-g++} -print-file-name=libstdc++.so)
SLICE    = tests/kernels tests/hostile $(addprefix tests/laws/test_,isa.py mixed_batches.py packed.py pause_and_continue.py streamed.py)
CHECKED  = env ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1

sanitize: $(VENV)/.test ## kernels, packing, runtime and hostile files under ASan and UBSan
	$(call apart,$(SAN),.,-C cmake.define.QUAFF_SANITIZE=ON -C cmake.define.QUAFF_TESTS=ON)
	for program in bits linear_check threads_check source_check; do $(CHECKED) $(SAN)/cmake/$$program || exit 1; done
	$(CHECKED) LD_PRELOAD=$(RUNTIME) $(SAN)/venv/bin/python -m pytest --numprocesses $(JOBS) -p no:cacheprovider $(SLICE) -m "not models"

bench: $(READY) ## prompt and decode speed of MODEL, with the control, and the machine's ceilings
	$(BIN)/quaff bench $(MODEL) -p 512 -n 64 --schedule chunk,token

PEERS := build/peers
bench-peers: $(READY) $(PEERS)/.ready ## quaff, llama.cpp and OpenVINO by turns on the same files; ARGS="--models smollm2-q8_0" shortens it
	$(PY) -m benchmarks.peers --peers $(PEERS)/bin/python $(ARGS)

# Without BASE: the commit under the changes of the working tree, or the one before when there are none. A base is built once.
# With -I neither PYTHONPATH nor the folder we stand in can put one side's code in the place of the other's.
GUARD := build/guard
BASE  ?= $(if $(shell git status --porcelain),HEAD,HEAD~1)
guard: $(READY) ## speed of the working tree against BASE, by turns: fails when prefill or decode lost more than 1 % and the noise
	base=$$(git rev-parse --verify --short=12 "$(BASE)^{commit}") && $(MAKE) --no-print-directory $(GUARD)/$$base/.ready && \
	  $(MAKE) --no-print-directory guard-run BASE=$$base

.PHONY: guard-run
guard-run:
	$(call apart,$(GUARD)/tree,.)
	git show HEAD:benchmarks/ledger.jsonl > $(GUARD)/ledger.jsonl 2>/dev/null || rm -f $(GUARD)/ledger.jsonl
	$(PY) -m quaff.measure.guard $(MODEL) --base "$(GUARD)/$(BASE)/venv/bin/python -I -m quaff" --base-name "commit $(BASE)" \
	  --ours "$(GUARD)/tree/venv/bin/python -I -m quaff" --ledger $(GUARD)/ledger.jsonl $(ARGS)

$(GUARD)/%/.ready:
	rm -rf $(@D) && mkdir -p $(@D)/source && git archive $* | tar -x -C $(@D)/source
	$(call apart,$(@D),$(@D)/source)
	@touch $@

sz: ## lines per folder
	@git ls-files src native tests benchmarks | grep -E '\.(py|pyi|cpp|h|sh)$$' | xargs wc -l | grep -v ' total$$' | \
	  awk '{ n = split($$2, p, "/"); d = p[1]; for (i = 2; i < n && i <= 3; i++) d = d "/" p[i]; lines[d] += $$1; all += $$1 } \
	  END { for (d in lines) printf "%6d  %s\n", lines[d], d; printf "%6d  total\n", all }' | sort -k2

clean: ## remove everything that was built
	rm -rf build .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# The steps behind the words.
CMAKE = PATH="$(CURDIR)/$(BIN):$$PATH" cmake

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "quaff needs Python 3.11 or newer; with another one: make PYTHON=python3.12 setup"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "Python's venv is missing: apt-get install -y python3-venv"; exit 1; }
	@$(PYTHON) -c 'import os, sysconfig as s; os.stat(s.get_path("include") + "/Python.h")' 2>/dev/null || { echo "Python's headers are missing: apt-get install -y python3-dev"; exit 1; }
	@command -v $${CXX:-g++} >/dev/null || { echo "a C++20 compiler is missing: apt-get install -y g++"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(READY): $(VENV)/.python $(SOURCES)
	$(call needs,['build-system']['requires']) > $(VENV)/build.txt
	$(PIP) --requirement $(VENV)/build.txt $$(command -v cmake >/dev/null || echo cmake) $$(command -v ninja >/dev/null || echo ninja)
	@echo "building the native module: a minute or two"
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(PIP) --no-build-isolation --editable .
	@touch $@

$(VENV)/.%: $(READY)
	$(call needs,['project']['optional-dependencies']['$*']) > $(VENV)/$*.txt
	$(PIP) --requirement $(VENV)/$*.txt
	@touch $@

$(VENV)/.dev: $(VENV)/.test
$(VENV)/.test: $(VENV)/.serve

# The peers live apart from us, llama.cpp compiled for this machine. One that cannot be installed is left out.
$(PEERS)/.ready: pyproject.toml | $(READY)
	$(PYTHON) -m venv $(PEERS)
	$(call needs,['project']['optional-dependencies']['peers']) > $(PEERS)/peers.txt
	export CMAKE_ARGS=-DGGML_NATIVE=ON CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS); while read -r peer; do \
	  $(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-binary llama-cpp-python "$$peer" </dev/null || \
	  echo "$$peer cannot be installed and is left out"; done <$(PEERS)/peers.txt
	@touch $@
