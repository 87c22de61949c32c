"""What every run of the tests has in common: no influence of the caller's environment, and none of a busy machine.

pytest loads this file before `tests/conftest.py`, so before torch, transformers and rich read the environment.
"""

from __future__ import annotations

import gc
import os

from hypothesis import HealthCheck, settings

from tests.helpers.kept_gcc import keep_compiled

# where programs and data lie, and the switches of the tests themselves
KEPT = {"CUDA_VISIBLE_DEVICES", "HOME", "LD_LIBRARY_PATH", "PATH", "TMPDIR"}
KEPT |= {"CASES", "KVSURGERY_SHARED", "LOAD_REQUESTS", "LOAD_SEEDS", "TRITON_INTERPRET"}
for name in [*os.environ]:
    if name not in KEPT and not name.startswith("PYTEST_"):
        del os.environ[name]
# nothing listens at this port, so a test that asks the Hub by mistake fails at once
os.environ |= {"COLUMNS": "80", "HF_ENDPOINT": "http://127.0.0.1:9", "OMP_NUM_THREADS": "1"}
os.environ["MATPLOTLIBRC"] = os.devnull  # pictures look the same whatever the home folder's settings say

keep_compiled()

os.fsync = lambda descriptor: None  # nothing here has to survive a power failure, so nothing waits for the disk

# no time limits, and the same examples in every run: a test that begins to fail fails because of a change
settings.register_profile(
    "kvsurgery", deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.load_profile("kvsurgery")


def pytest_collection_finish() -> None:
    """Keep what has been imported out of garbage collections, which would otherwise look at all of it each time."""
    gc.freeze()
