"""What one of two processes computes takes no more memory than `Footprint` says."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsurgery.system.processes import Processes
from tests.distributed import process
from tests.distributed.start import start
from tests.helpers.families import make
from tests.helpers.surgery import convert_folder
from tests.policy.test_footprint import WIDE_HEADS, WIDE_MLP, activations, footprint

BATCH, PROMPT, CHUNKS = 2, 1024, (256, 512)


def work(processes: Processes, folders: list[Path]) -> list[list[int]]:
    """Of each checkpoint, bytes at the peak of a prefill in chunks of each size."""
    found = []
    for folder in folders:
        model = process.load(folder, tp_size=2)
        found.append([activations(model, BATCH, PROMPT, chunk, processes.world) for chunk in CHUNKS])
    return found


@pytest.mark.slow
def test_a_prefill_grows_no_faster_than_predicted(tmp_path):
    """All heads stream, so that what a CPU keeps masks for does not grow with the chunk."""
    cases = [(family, widths) for family in ("llama", "mixtral") for widths in (WIDE_MLP, WIDE_HEADS)]
    sources = [
        make(family, tmp_path / f"source-{number}", max_position_embeddings=4096, vocab_size=104, **widths)
        for number, (family, widths) in enumerate(cases)
    ]
    converted = [convert_folder(source, tmp_path / f"out-{source.name}", full_heads=0, tp=2) for source in sources]
    for one in converted:
        one.load()  # copies the code, which several would do at once
    for rank in start(2, work, tmp_path, [one.folder for one in converted]):
        for source, measured in zip(sources, rank, strict=True):
            small, large = (
                footprint(source, 2).activation_bytes(BATCH, PROMPT, chunk, tiles=False) for chunk in CHUNKS
            )
            assert 0.3 * (large - small) < measured[1] - measured[0] < 1.02 * (large - small), source
