# Two commands do everything: `make demo` and `make test`. Each makes its own virtual environment, with the first Python that
# has what it takes: commands of pyenv may only say that no version is chosen, and Debian's Python may lack ensurepip.
PYTHON ?= $(eval PYTHON := $(call suitable,$(PYTHONS)))$(PYTHON)
PYTHONS = python3.11 python3.12 python3.13 python3.14 python3
SUITABLE = import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 15))
suitable = $(shell for name in $1; do { $$name -I -c '$(SUITABLE)' && echo $$name && break; } 2> /dev/null; done)
version = $(shell { $1 -V; } 2> /dev/null)
NO_PYTHON = no Python 3.11 to 3.14 with venv among: $(or $(PYTHON),$(PYTHONS)). Install one (on Debian and Ubuntu: \
apt install python3-venv), or name it: make PYTHON=/path/to/python

WORKERS ?= auto
MATRIX ?= 4.57.6 5.17.0
PYTEST = -m pytest -q $(PARALLEL) --durations=15
PARALLEL = $(if $(filter-out 1,$(WORKERS)),-n $(WORKERS) --dist worksteal)

export OMP_NUM_THREADS = 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# of all that torch installs, a run imports little: that gets compiled. To pip 0 means not to compile
export PIP_NO_COMPILE = 0
# settings of the caller's Python, of its tests, and of its language change neither
unexport $(filter PYTHON% PYTEST_% LANG LC_% TRITON_INTERPRET,$(.VARIABLES))

.PHONY: demo real real-short real-large real-rows test test-all test-fast test-matrix test-kernels test-ptx test-ptx-all test-gpu test-extras test-vllm test-vllm-load test-wheel coverage lint format environments clean

demo: .venv/ready
	rm -rf demo
	.venv/bin/python examples/demo.py demo

# the main commands on a real language model, which is downloaded once (93 MB)
real: .venv/ready
	rm -rf real
	unset OMP_NUM_THREADS; .venv/bin/python examples/tour.py smollm2 real

# on one thread, as other tests run beside it
real-short: .venv/ready
	rm -rf real
	.venv/bin/python examples/tour.py smollm2 real --short

# the same on a model ten times as large (1.1 GB), which took half an hour beside other work
real-large: .venv/ready
	rm -rf real
	unset OMP_NUM_THREADS; .venv/bin/python examples/tour.py qwen2.5-coder-1.5b real --short

# the first rows of the tables on SmolLM2, measured again and compared with the committed ones; TEXTS is a folder
real-rows: .venv/ready
	.venv/bin/python -W ignore benchmarks/real_model/first_rows.py $(TEXTS)

test: .venv/ready
	.venv/bin/python $(PYTEST)

# these targets run some of the cases that are much alike; here they run every one, which takes hours
test-all: export CASES = all
test-all: test test-matrix test-kernels test-ptx test-extras test-vllm

# while working: what decides a conversion, without models; under a minute on two cores
FAST = checkpoint metrics policy profile text test_recipe.py test_structure.py templates/test_kv_layout.py
test-fast: .venv/ready
	.venv/bin/python $(PYTEST) $(FAST:%=tests/%) --ignore tests/policy/test_footprint.py

# what a checkpoint's users have may be older: how models of other versions of transformers call the emitted code, and on
# the oldest all else that loads models or asks the Hub, but for what torch alone decides, which is the same with each
CALLED = emit conversion/test_logits.py $(patsubst %,templates/test_%.py,adapters doors exactness gather generation image_blocks images sinks states)
COMMANDS = bench compute compute_families convert evaluate hub_convert parallel_convert push reform_convert revert_verify stream
REST = distributed/test_tensor_parallel.py bench evaluate/test_decoding.py test_hub.py $(COMMANDS:%=cli/test_%.py)
REST += $(patsubst %,templates/test_%.py,budgeted chunked_attention encode hold kv_cache quantized)
TORCH_ONLY = any_operations or every_cache_path_equals or quantized_twice or every_way_in or tile_by_tile or minutes
TORCH_ONLY += or without_loss or more_bits or decoding_of_quantized_heads or compiled_forward
test-matrix: $(MATRIX:%=test-transformers-%)

test-transformers-4.%: .venv-4.%/ready
	.venv-4.$*/bin/python $(PYTEST) $(addprefix tests/,$(CALLED) $(REST)) -k "not ($(TORCH_ONLY))"

# between both ends: Llama, and families that the oldest lacks
NEWER = adapters or doors or gather or llama or gemma4 or ministral or qwen3_next or qwen3_5
test-transformers-5.%: .venv-5.%/ready
	.venv-5.$*/bin/python $(PYTEST) $(addprefix tests/,$(CALLED)) -k "$(NEWER)"

# kernels without a GPU: computed by Triton's interpreter, compiled for A100 and H100, and their instructions counted
test-kernels: .venv-triton-3.6.0/ready .venv-triton-newest/ready
	TRITON_INTERPRET=1 .venv-triton-3.6.0/bin/python $(PYTEST) -W ignore --noconftest tests/templates/test_kernels.py tests/templates/test_kernel_dispatch.py tests/templates/test_decode_graph.py tests/vllm/test_paged_kernel.py
	.venv-triton-3.6.0/bin/python $(PYTEST) --noconftest tests/templates/test_kernel_resources.py tests/vllm/test_paged_resources.py
	.venv-triton-newest/bin/python $(PYTEST) --noconftest tests/templates/test_kernel_resources.py tests/vllm/test_paged_resources.py
	.venv-triton-3.6.0/bin/python -m pytest -q -s --noconftest tests/templates/test_kernel_instructions.py

# what the compiled kernels do, executed instruction by instruction; the second one runs every case
test-ptx: .venv-triton-3.6.0/ready .venv-triton-newest/ready
	.venv-triton-3.6.0/bin/python $(PYTEST) --noconftest $(PTX)
	.venv-triton-newest/bin/python $(PYTEST) --noconftest $(PTX)

test-ptx-all: export CASES = all
test-ptx-all: PTX += tests/templates/test_kernel_resources.py
test-ptx-all: test-ptx

PTX = tests/ptx/test_compiled_kernels.py tests/ptx/test_decode_step.py tests/ptx/test_host_work.py tests/ptx/test_mutations.py

# the same kernels on a GPU, with the Python that has torch and triton for it: make test-gpu GPU_PYTHON=python3
GPU_PYTHON ?= python3
test-gpu:
	$(GPU_PYTHON) -m pytest -q --noconftest tests/gpu tests/templates/test_kernels.py tests/vllm/test_paged_kernel.py

# with the libraries that quantize weights, and the lm-evaluation-harness
test-extras: .venv-extras/ready
	.venv-extras/bin/python $(PYTEST) tests/templates/test_weight_quantization.py tests/conversion/test_quantization_libraries.py tests/examples/test_pages.py tests/evaluate/test_lm_eval.py -k "weight or w8 or harness or lm_eval"

# checkpoints served by vLLM's CPU build
test-vllm: .venv-vllm/ready
	.venv-vllm/bin/python $(PYTEST) tests/vllm

# random requests for about ten minutes: 60,000 of a model in each test, and about as many of the cache manager alone
test-vllm-load: export CASES = all
test-vllm-load: export LOAD_REQUESTS = 60000
test-vllm-load: export LOAD_SEEDS = 1980
test-vllm-load: .venv-vllm/ready
	.venv-vllm/bin/python -m pytest -q tests/vllm/test_load.py tests/vllm/test_manager.py

# the wheel works outside of the checkout, and what it converts works where it is not installed
test-wheel: .venv/ready
	rm -rf dist .venv-wheel
	.venv/bin/python -m build --wheel --outdir dist .
	.venv/bin/python -m venv .venv-wheel
	.venv-wheel/bin/pip install -q -c constraints.txt dist/*.whl
	.venv-wheel/bin/python tests/wheel.py

# which lines the tests reach; not those that only other processes or copies of emitted code run
coverage: .venv/ready
	.venv/bin/python $(PYTEST) --cov=kvsurgery --cov=templates --cov-report=term:skip-covered

lint: .venv/ready
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/ty check

format: .venv/ready
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

# an environment of another Python than the one that is asked for is made anew
ifneq ($(origin PYTHON),file)
ifneq ($(call version,.venv/bin/python),$(call version,$(PYTHON)))
.PHONY: .venv/ready
endif
endif

.venv/ready: pyproject.toml constraints.txt
	$(if $(call suitable,$(PYTHON)),,$(error $(NO_PYTHON)))
	@echo "Creating .venv with $(PYTHON): torch, transformers, tools for the tests."
	@echo "This takes 2 to 6 minutes and 1.2 GB of disk, or 5.5 GB where pip takes torch"
	@echo "with CUDA. At its end, pip is silent for a minute or two."
	@$(if $(filter-out $(call version,.venv/bin/python),$(call version,$(PYTHON))),rm -rf .venv)
	$(PYTHON) -m venv .venv
	.venv/bin/pip install $$(test -t 2 || echo -q) -c constraints.txt -e '.[dev]'
	.venv/bin/python -c 'import torch._dynamo; from transformers import AutoModelForCausalLM, LlamaForCausalLM'
	touch $@

# the others begin as hard links to .venv's files, compiled modules too, of which pip replaces those of another version
COPY = rm -rf $(@D) && cp -al .venv $(@D) && rm $@
INSTALL = $(@D)/bin/python -m pip install -q

# Triton comes after torch, whose CUDA builds ask for a version of their own; 3.6's interpreter fails on numpy 2.4
.venv-triton-3.6.0/ready: TRITON = triton==3.6.0
.venv-triton-newest/ready: TRITON = triton

.venv-triton-%/ready: .venv/ready
	$(COPY)
	$(INSTALL) $(TRITON) 'numpy<2.4'
	touch $@

.venv-extras/ready: .venv/ready
	$(COPY)
	$(INSTALL) -c constraints.txt -e '.[dev,eval,quant]'
	touch $@

VLLM = tests/vllm/distribution
.venv-vllm/ready: .venv/ready requirements-vllm.txt $(VLLM)/pyproject.toml $(VLLM)/torchvision_operators.py
	$(COPY)
	$(INSTALL) --no-deps -r requirements-vllm.txt -e . $(VLLM)
	tee -a $(@D)/lib/python*/site-packages/torchvision/extension.py < $(VLLM)/torchvision_operators.py > /dev/null
	touch $@

.PRECIOUS: .venv-%/ready .venv-triton-%/ready
.venv-%/ready: .venv/ready
	$(COPY)
	grep -vE '^(transformers|tokenizers|huggingface.hub|hf-xet)==' constraints.txt > $(@D)/constraints.txt
	$(INSTALL) -c $(@D)/constraints.txt -e '.[dev]' transformers==$*
	touch $@

# all of these but vLLM's, which not every processor can have; pip uses one core, so make two at a time: make -j2
environments: .venv-extras/ready $(MATRIX:%=.venv-%/ready) .venv-triton-3.6.0/ready .venv-triton-newest/ready

clean:
	rm -rf .venv .venv-* demo dist real examples/gemma3/model* examples/qwen2.5-coder-1.5b/model* examples/smollm2/model*
