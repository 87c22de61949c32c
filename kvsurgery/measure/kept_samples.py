"""`KeptSamples`: what was measured of each sample, and the file from which an interrupted measurement goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from kvsurgery.errors import OutputError
from kvsurgery.measure.model import MeasuredModel
from kvsurgery.system.json_lines import append_lines, damaged, read_lines
from kvsurgery.version import TOOL


class KeptSamples:
    """Results by a hash of what they depend on, so that those of another measurement are not taken for its own.

    The hash covers the sample, the options, the config of the model, and the first numbers of each of its weights.

    Args:
        path: the file, to which each result is appended; None keeps nothing.
        measured: the model.
        options: of the measurement, which all samples have in common.

    Raises:
        KVSurgeryError: a line of the file is not what was written.
    """

    def __init__(self, path: Path | None, measured: MeasuredModel, *options: object):
        self._path, self._kept = path, {} if path is None else read_kept(path)
        if path is not None:
            model = measured.model
            facts = TOOL, measured.fingerprint, model.config.to_json_string(), model.dtype, model.device.type
            self._common = [str(fact) for fact in (*facts, *options)]

    def result(self, sample: Sequence[Any], measure: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], bool]:
        """What is kept of a sample, or else what `measure` returns; and whether it was kept.

        Args:
            sample: what this result depends on besides, in JSON's values.
            measure: gives float64 arrays, and values of JSON that are no lists, by name.

        Raises:
            OutputError: the file cannot be written.
        """
        if self._path is None:
            return measure(), False
        key = _hash([*self._common, *sample])
        if key in self._kept:
            return self._kept[key], True
        result = measure()
        plain = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in result.items()}
        try:
            append_lines(self._path, [{"sample": key, "result": plain, "checksum": _hash([key, plain])}])
        except OSError as error:
            raise OutputError(f"cannot write {self._path}: {error.strerror}") from error
        return result, False


def read_kept(path: Path) -> dict[str, dict[str, Any]]:
    """The results in a file of kept samples by their hashes, none of an absent one.

    Raises:
        KVSurgeryError: a line is not what was written.
    """
    kept: dict[str, dict[str, Any]] = {}
    for number, record in enumerate(read_lines(path), 1):
        key = record.get("sample")
        result = record.get("result")
        if not isinstance(result, dict) or record.get("checksum") != _hash([key, result]):
            raise damaged(path, number, "it is not what was written")
        kept[str(key)] = {name: np.array(value) if isinstance(value, list) else value for name, value in result.items()}
    return kept


def _hash(values: Sequence[Any]) -> str:
    return blake3(json.dumps(values).encode()).hexdigest()[:32]
