# make demo: install once, then shrink the embedded model. make test: what CI runs.
PYTHON ?= python3
STAMP := .venv/.installed
VISION := .venv/vision/.installed

.PHONY: demo test clean

demo: $(STAMP)
	@.venv/bin/headwise demo

test: $(STAMP) $(VISION)
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy
	@OMP_NUM_THREADS=1 .venv/bin/pytest -q -n 2 --dist worksteal
	@OMP_NUM_THREADS=1 PYTHONPATH=tests/operators:.venv/vision .venv/bin/pytest -q tests/test_timm.py tests/test_experiments.py -k "timm or b4"

$(STAMP): pyproject.toml constraints.txt
	@echo "Installing into .venv (a few minutes the first time)"
	@test -x .venv/bin/python || $(PYTHON) -m venv .venv
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

# Beside the CPU torch torchvision only loads with tests/operators on the path, and would break whatever finds it else.
$(VISION): $(STAMP)
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .venv/vision -c constraints.txt timm torchvision
	@touch $@

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
