# Everything happens in .venv; a second run of any target installs nothing again.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-all lint docs dist families test-newest test-axolotl gpu-check clean

demo: $(VENV)/.installed
	$(BIN)/lengthwise demo

# Every promise once: four to five minutes on two cores.
test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations 10

# Every case of every promise, before a release: twenty minutes on two quiet cores.
test-all: $(VENV)/.installed-dev
	HYPOTHESIS_PROFILE=full $(BIN)/python -m pytest -n 2 --dist worksteal --durations 10 -m ''

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check src tests testing benchmarks $(wildcard examples)
	$(BIN)/ruff format --check src tests testing benchmarks $(wildcard examples)
	$(BIN)/lint-imports
	$(BIN)/pyright

# The documentation as a site, .site/index.html; any warning fails. Needs no torch.
docs: .venv-docs/.installed
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=src .venv-docs/bin/mkdocs build --quiet
	@echo "open .site/index.html"

.venv-docs/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --group docs
	@touch $@

families: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/families.py --out docs/families.md

# The wheel and the source archive, dist/: checked, and the wheel planned with where there is no torch.
dist: $(VENV)/.installed-dev
	rm -rf dist .venv-dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python testing/dist.py dist
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	  numpy pydantic pyyaml rich tyro
	.venv-dist/bin/python -m pip install --quiet --disable-pip-version-check --no-deps dist/*.whl
	cd dist && ../.venv-dist/bin/lengthwise simulate --model llama-7b --lengths github --context 16K --gpus 8

# The newest releases that the ranges in pyproject.toml allow, but for torch, unless TORCH='torch>=2.14' names a newer one.
TORCH ?= $(shell grep '^torch==' constraints.txt)
test-newest:
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	echo "$(TORCH)" > .venv-newest/torch.txt
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager \
	  --constraint .venv-newest/torch.txt -e '.[dev]'
	.venv-newest/bin/python -m pip list | grep -E '^(torch|transformers|accelerate|peft|trl|datasets) '
	.venv-newest/bin/python -m pytest -n 2 tests/integrations tests/session tests/models tests/data

# The integrations with exactly the versions that axolotl pins. Its wheel wants Python 3.12 and runs on 3.11, too.
test-axolotl:
	$(PYTHON) -m venv .venv-axolotl
	.venv-axolotl/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	.venv-axolotl/bin/python -m pip install --quiet --disable-pip-version-check \
	  --requirement tests/integrations/axolotl.txt --editable .
	.venv-axolotl/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python \
	  axolotl==0.21.0 axolotl-contribs-lgpl==0.0.7 axolotl-contribs-mit==0.0.6 bitsandbytes==0.50.2 evaluate==0.4.1
	.venv-axolotl/bin/python -m pytest -p no:anyio -W ignore::pytest.PytestUnraisableExceptionWarning \
	  tests/integrations/test_integrations_axolotl.py \
	  tests/integrations/test_integrations_trainer.py tests/data

# On a machine with a GPU: all parts, then the page from what they wrote, whatever failed; where torch cannot start it,
# the reason alone. Elsewhere: one line. Both with status 2.
gpu-check:
	@test -e /dev/nvidiactl || test -e /dev/dxg || test -e /dev/kfd || \
	  { echo "gpu-check: no GPU on this machine; nothing was run or written" >&2; exit 2; }
	@$(MAKE) --no-print-directory $(VENV)/.installed-dev
	@$(BIN)/python benchmarks/gpu_check.py --out runs/gpu --page docs/gpu.md

clean:
	rm -rf $(VENV) .venv-newest .venv-axolotl .venv-docs .venv-dist dist .site runs .pytest_cache .ruff_cache .hypothesis .import_linter_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "lengthwise needs Python 3.11 or later; got $$($(PYTHON) --version). Run: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing lengthwise and torch into $(VENV) (about a minute, once)"
	$(INSTALL) --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing the development tools into $(VENV) (once)"
	$(INSTALL) --editable '.[dev]'
	@touch $@
