# Commands for a clean clone; each installs what it needs. PYTHON chooses the interpreter of the
# virtual environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo serve test test-quick test-together test-apart bench benchmarks-page lint proto sbom clean

demo: $(VENV)/installed
	$(BIN)/outrider demo

serve: $(VENV)/installed
	$(BIN)/outrider serve --target models/target --drafter ngram --drafter model=models/draft

# Tests with clients, servers and time-outs run one by one, and mostly wait. Tests without a clock
# run beside them at a lower priority; their output follows at the end. At the lowest priority they
# would not run at all on a busy machine.
TOGETHER := $(addprefix tests/, losslessness simulator lm experiment verifier shared repo placement)
APART = $(filter-out $(TOGETHER:%=%/),$(wildcard tests/*/))
test: $(VENV)/installed-dev tools
	@$(MAKE) --no-print-directory --jobs=2 --keep-going test-apart test-together

test-apart:
	$(BIN)/python -m pytest $(PYTEST) $(APART)

test-together:
	@nice -n 5 $(BIN)/python -m pytest -n auto --dist worksteal $(PYTEST) $(TOGETHER) \
	  >$(VENV)/together.log 2>&1; \
	  status=$$?; cat $(VENV)/together.log; exit $$status

test-quick: export PYTEST := -m "not slow"
test-quick: test

bench: $(VENV)/installed-bench
	$(BIN)/outrider bench $(BENCH)

benchmarks-page: $(VENV)/installed
	$(BIN)/python -m outrider_bench.results_page

lint: $(VENV)/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

proto: $(VENV)/installed-dev
	protos/generate.sh

# A list of everything that is installed, in CycloneDX's format. Its tool has an environment of its
# own, so that it does not list itself.
SBOM_TOOL := build/cyclonedx
sbom: $(VENV)/installed
	$(PYTHON) -m venv $(SBOM_TOOL)
	$(SBOM_TOOL)/bin/python -m pip install --quiet --disable-pip-version-check cyclonedx-bom
	$(SBOM_TOOL)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
	  --output-file build/sbom.json $(BIN)/python
	@echo "build/sbom.json lists what is installed"

.PHONY: tools
tools:
	@tests/install-tools.sh

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

KERNELS := $(wildcard outrider/lm/cpu/kernels/*.[ch])
$(VENV)/installed: $(VENV)/bin/python pyproject.toml constraints.txt setup.py $(KERNELS)
	@echo "installing outrider into $(VENV); the first time takes a few minutes"
	$(PIP) -e '.[models]'
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) -e '.[dev]'
	@touch $@

$(VENV)/installed-bench: $(VENV)/installed
	$(PIP) -e '.[bench]'
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info
