from __future__ import annotations

import importlib.util
import os


def installed() -> bool:
    """Whether vLLM is; without it, this folder itself may look like the package."""
    try:
        return importlib.util.find_spec("vllm.version") is not None
    except ModuleNotFoundError:
        return False


# `make test-vllm` has an environment of its own
INSTALLED = installed()
collect_ignore_glob = [] if INSTALLED else ["test_*"]

# read when vLLM is imported: the engine in this process, on one thread, with a small cache
SETTINGS = {
    "NUMBA_NUM_THREADS": "1",  # numba, which finds n-grams, gives torch as many threads for good
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # compiling takes longer than all that it would speed up here
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
if INSTALLED:
    os.environ.update(SETTINGS)
