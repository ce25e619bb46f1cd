# make demo          a run from nothing on any laptop          make test       the suite in both library lanes, and across them
# make release-demo  the release's three stages, tiny          make test-long  what takes longer than CI allows
# make check         format, lint, types, import contracts     make bench      speed and memory against stated baselines
# make format        rewrite the formatting                    make clean      remove what these made, runs/ excepted
PYTHON ?= python3.11
VENV ?= .venv
RELEASE_VENV ?= .venv-release
RELEASE_DEMO ?= runs/release-demo
BIN = $(VENV)/bin
PYTEST = $(BIN)/python -m pytest
# One compute thread a worker: two workers then share two cores without fighting, and CPU results do not depend on it.
TEST_ENV = OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

.PHONY: demo release-demo install test test-default test-release test-lanes test-long check format bench clean

install: $(VENV)/.installed

demo: install
	$(BIN)/ps train demo

release-demo: install
	PYTHON="$(abspath $(BIN)/python)" artifacts/demo/release.sh "$(RELEASE_DEMO)"

test: test-default test-release test-lanes

test-default: install
	$(TEST_ENV) $(PYTEST) -n 2 --dist loadfile -m "not long and not lanes" --cov=parallel_synthesis --cov=pscli --cov-report=term:skip-covered

# The model, checkpoint and merge tests with the transformers and peft of the release.
test-release: $(RELEASE_VENV)/.installed
	$(TEST_ENV) $(RELEASE_VENV)/bin/python -m pytest -n 2 --dist loadfile -m "lane and not long"

# A run that goes on with the other lane's libraries: needs both environments.
test-lanes: install $(RELEASE_VENV)/.installed
	$(TEST_ENV) PARALLEL_SYNTHESIS_OTHER_PYTHON="$(abspath $(RELEASE_VENV)/bin/python)" $(PYTEST) -m lanes

test-long: install
	$(TEST_ENV) $(PYTEST) -m long --timeout=3600

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install
	@failed=0; for file in tests/bench/bench_*.py; do echo "== $$file"; $(BIN)/python $$file || failed=1; done; exit $$failed

$(VENV)/.installed: constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

$(RELEASE_VENV)/.installed: constraints-release.txt pyproject.toml
	$(PYTHON) -m venv $(RELEASE_VENV)
	$(RELEASE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-release.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) $(RELEASE_VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
