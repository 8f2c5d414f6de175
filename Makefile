# make demo: install what runs need, then shrink the embedded model. make test: linters, types, tests and documentation; CI runs
# it after make browser, which installs the Chromium that the report is tested in. make docs: the documentation site, strictly.
# make notebooks: runs the notebooks and keeps their outputs.
# make dist: wheel and source distribution in dist/, tried in a new environment.
# make serve-test: the engines that serve models, each in an environment of its own (serving/NAME.txt, serving/test_NAME.py).
PYTHON ?= python3
READY := .venv/.ready
STAMP := .venv/.installed
VISION := .venv/vision/.installed
SERVING := $(basename $(notdir $(wildcard serving/*.txt)))

# Needs timm, so it runs in the second call of pytest.
TIMM := tests/test_experiments.py::test_an_experiment_runs_at_the_smallest_size[b4_redesigns]

.PHONY: demo test docs notebooks dist browser screenshots serve-test clean

demo: $(READY)
	@.venv/bin/headwise demo

test: $(STAMP) $(VISION)
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy
	@OMP_NUM_THREADS=1 .venv/bin/pytest -q -rs -n 2 --dist worksteal --ignore tests/test_timm.py --ignore tests/test_redesign.py --deselect "$(TIMM)"
	@OMP_NUM_THREADS=1 PYTHONPATH=tests/operators:.venv/vision .venv/bin/pytest -q tests/test_timm.py tests/test_redesign.py tests/test_experiments.py -k "timm or redesign or b4"
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --quiet --strict

docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --quiet --strict
	@echo "the site is in site/: open site/index.html"

notebooks: $(STAMP)
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[notebooks]"
	@.venv/bin/python notebooks/run.py

dist: $(STAMP)
	@rm -rf dist build
	@.venv/bin/python -m build --outdir dist . >/dev/null
	@.venv/bin/python tests/clean_install.py dist

browser:
	@if command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null; then \
		echo "Chromium is there"; \
	elif command -v apt-get >/dev/null; then \
		SUDO=; [ "$$(id -u)" = 0 ] || SUDO=sudo; \
		$$SUDO apt-get update -q && $$SUDO env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends chromium; \
	else \
		echo "No apt-get here: install Chromium or Chrome yourself, or set CHROMIUM to its path; without it the browser tests are skipped."; \
	fi

.PRECIOUS: .venv/%/.installed
serve-test: $(SERVING:%=serve-test-%)

serve-test-%: .venv/%/.installed
	@OMP_NUM_THREADS=1 .venv/$*/bin/python -m pytest -q -rs serving/test_$*.py

screenshots: $(STAMP)
	@.venv/bin/python docs/screenshots.py

$(READY): pyproject.toml constraints.txt
	@echo "Installing into .venv (a few minutes the first time)"
	@test -x .venv/bin/python || $(PYTHON) -m venv .venv
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(STAMP): $(READY)
	@echo "Installing what tests and documentation need"
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

# Beside the CPU torch torchvision only loads with tests/operators on the path, and would break whatever finds it else.
$(VISION): $(STAMP)
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .venv/vision -c constraints.txt timm torchvision
	@touch $@

# The CPU torch first: whatever needs torch else brings gigabytes of CUDA. Packages behind "# remove:" go again.
.venv/%/.installed: serving/%.txt pyproject.toml constraints.txt
	@echo "Installing into .venv/$* (some minutes the first time)"
	@test -x .venv/$*/bin/python || $(PYTHON) -m venv .venv/$*
	@grep '^torch==' constraints.txt > .venv/$*/torch.txt
	@.venv/$*/bin/python -m pip install --quiet --disable-pip-version-check -r .venv/$*/torch.txt
	@.venv/$*/bin/python -m pip install --quiet --disable-pip-version-check -c .venv/$*/torch.txt -r serving/$*.txt -e .
	@sed -n 's/^# remove: //p' serving/$*.txt | xargs -r .venv/$*/bin/python -m pip uninstall --quiet -y
	@touch $@

clean:
	rm -rf .venv build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
