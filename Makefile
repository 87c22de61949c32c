# Two commands do everything: `make demo` and `make test`. Each makes its own virtual environment.
PYTHON ?= python3.11
WORKERS ?= auto
MATRIX ?= 4.57.6 5.17.0
PYTEST = -m pytest -q -n $(WORKERS)

export OMP_NUM_THREADS = 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo test test-matrix test-wheel lint format clean

demo: .venv/ready
	rm -rf demo
	.venv/bin/python examples/demo.py demo

test: .venv/ready
	.venv/bin/python $(PYTEST)

# what a checkpoint's users have may be older: emitted models and the commands, on other versions of transformers
test-matrix: $(MATRIX:%=test-transformers-%)

test-transformers-%: .venv-%/ready
	.venv-$*/bin/python $(PYTEST) tests/templates tests/emit tests/cli tests/test_logits.py tests/test_hub.py tests/examples

# the wheel works outside of the checkout, and what it converts works where it is not installed
test-wheel: .venv/ready
	rm -rf dist .venv-wheel
	.venv/bin/python -m build --wheel --outdir dist .
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/pip install -q -c constraints.txt dist/*.whl
	.venv-wheel/bin/python tests/wheel.py

lint: .venv/ready
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .

format: .venv/ready
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/pip install -q -c constraints.txt -e '.[dev]'
	touch $@

.venv-%/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-$*
	grep -vE '^(transformers|tokenizers|huggingface.hub|hf-xet)==' constraints.txt > .venv-$*/constraints.txt
	.venv-$*/bin/pip install -q -c .venv-$*/constraints.txt -e '.[dev]' transformers==$*
	touch $@

clean:
	rm -rf .venv .venv-* demo dist
