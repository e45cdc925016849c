# `make demo` shows what commtrace does. `make check` is for every commit, `make test` for every change; .ci/run runs
# `make test-thorough` and `make test-newest`, too; `make test-long` is for a night. They need only Python >= 3.10 and a
# package index; everything is installed into .venv and .venv-newest.

PYTHON ?= python3
# For a machine without a GPU whose package index offers CUDA builds only:
#   make demo TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# The C extension, which is built again when its sources change. Where it can be built it must: a mistake in C is no reason
# to test the Python engine twice.
NATIVE := setup.py $(wildcard commtrace/_native/*.[ch])
build_native = if command -v cc >/dev/null && \
	test -e "$$($(1)/python -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h"; \
	then BUILD_COMMTRACE_NATIVE=1 $(1)/python setup.py --quiet build_ext --inplace; \
	else echo 'The C extension is left out: there is no C compiler (cc), or no Python.h (python3-dev).'; fi
# Tests run side by side. A process has tests that follow one another, and takes some of another one's when it has none left.
# A third of their time tests wait, for jobs that sleep, time out or start: three processes keep two cores busy.
WORKERS ?= $(shell echo $$(( ($$(getconf _NPROCESSORS_ONLN) * 3 + 1) / 2 )))
SIDE_BY_SIDE := -n $(WORKERS) --dist worksteal
PYTEST := $(BIN)/python -m pytest $(SIDE_BY_SIDE)
# `make test STRICT=1`, which is what .ci/run runs, fails where a test is skipped that tests/expected_skips.txt does not list.
# What needs no training: of it `make check` runs the tests.
CHECKED := tests/test_import_rules.py tests/test_public_api.py tests/test_docs.py tests/test_site.py tests/test_config.py
# Quiet, but for errors: `make install QUIET_INSTALL=` shows what pip does.
QUIET_INSTALL ?= --quiet
PIP := $(BIN)/python -m pip $(QUIET_INSTALL) --disable-pip-version-check --retries 10 --timeout 120
export PIP_NO_INPUT := 1
# Tests start hundreds of Pythons, each of which would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

# The newest versions, in an environment of their own: this torch is a CUDA build of 3 to 4 GB for most Pythons.
PYTHON_NEWEST ?= $(shell for python in python3.12 $(HOME)/.pyenv/versions/3.12*/bin/python3.12; do \
	$$python -c '' 2>/dev/null && echo $$python && break; done)
TORCH_NEWEST ?= torch==2.15.0
MEGATRON_NEWEST ?= megatron-core==0.19.2
NEWEST := .venv-newest
NEWEST_PIP := $(NEWEST)/bin/python -m pip $(QUIET_INSTALL) --disable-pip-version-check --retries 10 --timeout 120
# Oracle, capture, pipelining, Megatron and the example.
NEWEST_TESTS := tests/matrix tests/capture tests/integrations tests/e2e/test_capture_oracle.py \
	tests/e2e/test_capture_origins.py tests/e2e/test_pipelining.py tests/e2e/test_megatron_training.py

.PHONY: demo site web check test test-thorough sanitize test-newest test-long lint types unit e2e fuzz test-gpu gpu bench bench-stragglers soak install clean

demo: $(INSTALLED)  ## Train on 4 ranks with a slow one, print where the time went, write report.html.
	$(BIN)/python examples/demo.py

site: $(INSTALLED)  ## The documentation as a site in build/site, with the reference pages written anew.
	$(BIN)/python -m tools.reference docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

check: lint types  ## Lint, types, who imports whom, documentation, public names: about a minute.
	$(PYTEST) $(CHECKED)

test: lint types  ## Everything that is not marked thorough or long; pytest's closing line is the last one.
	$(PYTEST) $(if $(STRICT),--expected-skips test) tests bench

test-thorough: $(INSTALLED)  ## Minutes more: launchers, damaged inputs, every line that can fail, what pip would install.
	$(PYTEST) --thorough -m thorough $(if $(STRICT),--expected-skips test) tests bench

sanitize: $(INSTALLED)  ## The tests of the C extension with AddressSanitizer, UBSan and ThreadSanitizer: minutes; test-thorough has it, too.
	$(BIN)/python -m pytest -q --thorough -m thorough tests/native/test_core_sanitized.py

test-long: test-thorough  ## Hours: the tests marked long, 20 repetitions, 100,000 damaged inputs, a soak, all versions.
	$(PYTEST) --thorough --long -m long tests
	$(MAKE) --no-print-directory fuzz soak
	$(BIN)/nox

test-newest:  ## What depends on versions, on the newest ones; skipped where they cannot be had.
ifeq ($(PYTHON_NEWEST),)
	@echo 'test-newest is skipped: there is no Python 3.12. Name one: make test-newest PYTHON_NEWEST=/path/to/python3.12'
else
	@test -e $(NEWEST)/.torch || { \
		echo 'Setting up $(NEWEST) with $(TORCH_NEWEST) and $(MEGATRON_NEWEST). Once; it takes some minutes.' && \
		$(PYTHON_NEWEST) -m venv $(NEWEST) && $(NEWEST_PIP) install $(TORCH_NEWEST) && touch $(NEWEST)/.torch; \
	} || true
	@if test -e $(NEWEST)/.torch; then $(MAKE) --no-print-directory $(NEWEST)/.tested; \
		else echo 'test-newest is skipped: $(TORCH_NEWEST) could not be installed.'; fi
endif

.PHONY: $(NEWEST)/.tested
$(NEWEST)/.tested: $(NEWEST)/.installed
	@$(call build_native,$(NEWEST)/bin)
	$(NEWEST)/bin/python -m pytest $(SIDE_BY_SIDE) --long $(if $(STRICT),--expected-skips test-newest) $(NEWEST_TESTS)

$(NEWEST)/.installed: pyproject.toml
	@$(NEWEST_PIP) install $(TORCH_NEWEST) $(MEGATRON_NEWEST) --editable '.[dev]'
	@touch $@

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)  ## Of all Python here, tests included, as pyproject.toml says.
	$(BIN)/mypy

web:  ## The page of reports, viewer/assets, from its sources in viewer/web. Needs npm.
	cd viewer/web && npm ci --no-audit --no-fund && npm run check && npm test && npm run build

unit: $(INSTALLED)
	$(PYTEST) tests -m "not e2e"

e2e: $(INSTALLED)
	$(PYTEST) tests -m e2e

fuzz: $(INSTALLED)  ## Try FUZZ_INPUTS (100000) damaged inputs at every door; FUZZ_SEED (1) chooses others.
	FUZZ_INPUTS=$${FUZZ_INPUTS:-100000} FUZZ_SEED=$${FUZZ_SEED:-1} $(PYTEST) --thorough tests/fuzz --timeout=0

test-gpu: $(INSTALLED)  ## On a machine with a GPU: NCCL ranks on it, compared with the kernels that torch.profiler saw.
	$(BIN)/python -m pytest tests/gpu

# Without an environment of its own: a lent machine has torch, and may reach no package index.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
OUT ?= gpu-hour

gpu:  ## On a machine with a GPU: ten minutes for everything that only a GPU can tell. One table, one archive in OUT.
	@$(GPU_PYTHON) bench/gpu_hour.py --output $(OUT)

bench: $(INSTALLED)
	$(BIN)/python bench/overhead.py
	$(BIN)/python bench/live_metrics.py
	$(BIN)/python bench/analysis.py

bench-stragglers: $(INSTALLED)  ## Over a hundred kinds of faults, 50 hidden slow ranks, 200 clean runs: who is named?
	$(BIN)/python bench/stragglers.py --hidden 50 --clean 200

soak: $(INSTALLED)  ## Train for SOAK_MINUTES (30) with everything recorded: nothing grows, drifts, hangs or is dropped.
	$(BIN)/python bench/soak.py

install: $(INSTALLED)

$(INSTALLED): $(VENV)/.packages $(NATIVE)
	@$(call build_native,$(BIN))
	@touch $@

# torch on its own and first: left to a dependency of another package, pip would take the newest build, with CUDA.
$(VENV)/.packages: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "commtrace needs Python 3.10 or newer: make PYTHON=python3.11")'
	@echo 'Setting up $(VENV) with torch, megatron-core and DeepSpeed. Once; it takes one to a few minutes.'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install $(TORCH)
	@$(PIP) install --editable '.[megatron,deepspeed,dev]'
	@touch $@

clean:
	rm -rf $(VENV) $(NEWEST) .nox .mypy_cache .ruff_cache .pytest_cache .hypothesis build commtrace.egg-info commtrace-runs demo-run report.html
	rm -f commtrace/_native/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
