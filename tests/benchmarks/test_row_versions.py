"""Results that several runs write keep the versions of each."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import provenance


def test_rows_keep_the_versions_that_measured_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions of an earlier file, which names no rows, come first."""
    earlier = {"kvsurgery": "0.1.0", "torch": "2.13.0", "transformers": "5.2.0"}
    found: dict[str, Any] = {"versions": earlier}
    for version, row in (("5.23.0", "original"), ("5.24.0", "4 bits"), ("5.23.0", "2 bits"), ("5.24.0", "4 bits")):
        monkeypatch.setattr(provenance.transformers, "__version__", version)
        provenance.record_versions(found, row)
    first, *later = found["versions"]
    assert first == earlier
    assert [(each["transformers"], each["rows"]) for each in later] == [
        ("5.23.0", ["original", "2 bits"]),
        ("5.24.0", ["4 bits"]),
    ]


def test_rows_that_a_gpu_measured_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same versions on a CPU are another entry, before and after."""
    monkeypatch.setattr(provenance.torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    found: dict[str, Any] = {}
    for device, row in (("cpu", "original"), ("cuda", "4 bits"), ("cpu", "3 bits"), ("cuda:0", "2 bits")):
        provenance.record_versions(found, row, device)
    assert [(each.get("device"), each["rows"]) for each in found["versions"]] == [
        (None, ["original", "3 bits"]),
        ("NVIDIA H100", ["4 bits", "2 bits"]),
    ]


def test_new_results_begin_with_the_versions_that_run() -> None:
    found: dict[str, Any] = {}
    provenance.record_versions(found, "original")
    [only] = found["versions"]
    assert only["rows"] == ["original"]
    assert {"kvsurgery", "torch", "transformers"} < only.keys()
