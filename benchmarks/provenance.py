"""Which versions, on which device, measured which rows of a JSON file that several runs write."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from kvsurgery import __version__


def record_versions(report: dict[str, Any], row: str, device: str | torch.device = "cpu") -> None:
    """Note in results that the versions that run now measured a row, or a part of it.

    `report["versions"]` is a list of versions, each with the `rows` that it measured. Files from before have one dict
    there, the versions of the last run; it becomes the first entry, without `rows`. A GPU is named beside the versions.
    """
    entries = report.setdefault("versions", [])
    if isinstance(entries, dict):
        report["versions"] = entries = [entries]
    now: dict[str, Any] = {
        "kvsurgery": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if torch.device(device).type == "cuda":
        now["device"] = torch.cuda.get_device_name(device)
    entry = next((entry for entry in entries if {**now, "rows": entry.get("rows")} == entry), None)
    if entry is None:
        entry = {**now, "rows": []}
        entries.append(entry)
    if row not in entry["rows"]:
        entry["rows"].append(row)
