# Two commands on a fresh machine: make demo, make test. PYTHON=/path/to/python3.12 chooses the interpreter.
.POSIX:
.PHONY: help demo test check env clean

CONFIG = configs/reverse_text.toml
ARGS =
WORKERS = 2
RUN = .venv/bin/python -m

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' Makefile

demo: env ## watch a small policy learn: make demo ARGS="--set seed=1", CONFIG=configs/other.toml
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

clean: ## remove .venv and caches; runs/ stays
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
