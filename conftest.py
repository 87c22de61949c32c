"""What every run of the tests has in common: no influence of the caller's environment, and none of a busy machine.

pytest loads this file before `tests/conftest.py`, so before torch, transformers and rich read the environment.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# where programs and data lie, and the switches of the tests themselves
KEPT = {"CUDA_VISIBLE_DEVICES", "HOME", "LD_LIBRARY_PATH", "PATH", "TMPDIR"}
KEPT |= {"KVSURGERY_SHARED", "LOAD_REQUESTS", "TRITON_INTERPRET"}
for name in [*os.environ]:
    if name not in KEPT and not name.startswith("PYTEST_"):
        del os.environ[name]
# nothing listens at this port, so a test that asks the Hub by mistake fails at once
os.environ |= {"COLUMNS": "80", "HF_ENDPOINT": "http://127.0.0.1:9", "OMP_NUM_THREADS": "1"}

# no time limits, and the same examples in every run: a test that begins to fail fails because of a change
settings.register_profile("kvsurgery", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.load_profile("kvsurgery")
