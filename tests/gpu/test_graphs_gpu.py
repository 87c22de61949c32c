"""CUDA graphs of the Triton kernels on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from kvsurgery.templates.kv_codes import empty_tiles
from kvsurgery.templates.kv_decode import decode
from kvsurgery.templates.kv_layout import EVERY, Quantization
from kvsurgery.templates.kv_pack import flush
from kvsurgery.templates.kv_softmax import Scoring
from kvsurgery.templates.kv_storage import HeadTable
from tests.helpers import kernel_cases as cases


@pytest.fixture(autouse=True)
def _poison():
    """Memory that nothing has written holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def test_a_graph_decodes_what_has_grown_since_its_capture() -> None:
    """Nothing of a decode step depends on lengths that the host knows."""
    torch.manual_seed(0)
    heads, head_dim, slots = 2, 128, 3000
    query = torch.randn(1, heads * 4, head_dim, device="cuda", dtype=torch.bfloat16)
    keys, values = torch.randn(2, 1, heads * slots, head_dim, device="cuda", dtype=torch.bfloat16)
    columns, skipped = (torch.tensor(start, dtype=torch.int32, device="cuda") for start in ([[150]], [[50, 0]]))
    sinks, rings, recents = torch.tensor([[EVERY, 4], [1, 256], [1, 256]], dtype=torch.int32, device="cuda")
    offsets, scoring = torch.tensor([0, slots], device="cuda"), Scoring(head_dim**-0.5)
    table = HeadTable(keys, values, offsets, sinks, rings, recents, skipped)
    decode(query, table, columns, scoring)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode(query, table, columns, scoring)
    for count in (150, 2900, 57):
        columns.fill_(count)
        graph.replay()
        cases.check_decoded(out, query, table, columns, scoring)


def test_a_graph_packs_and_decodes_what_has_grown_since_its_capture() -> None:
    """Tiles that a replay packs are read by its own decode step; each head has its own length."""
    torch.manual_seed(0)
    quantization, heads, head_dim, room = Quantization(4), 2, 128, 40
    ring = quantization.slots(EVERY, 0)
    query = torch.randn(1, heads * 4, head_dim, device="cuda", dtype=torch.bfloat16)
    keys, values = torch.randn(2, 1, ring + 260, head_dim, device="cuda", dtype=torch.bfloat16)
    tiles = empty_tiles(keys, room, quantization)
    for part in tiles:
        part.copy_(torch.randint(256, part.shape) if part.dtype == torch.uint8 else torch.rand(part.shape))
    skipped, confirmed, packed = torch.zeros(3, 1, heads, dtype=torch.int32, device="cuda")
    columns = cases.columns("cuda")
    sinks, rings, recents, first_tiles = torch.tensor(
        [[0, 4], [ring, 256], [EVERY, 256], [0, -1]], dtype=torch.int32, device="cuda"
    )
    offsets = torch.tensor([0, ring], device="cuda")
    stored = tiles, first_tiles, packed, None, quantization
    table = HeadTable(keys, values, offsets, sinks, rings, recents, skipped, *stored)
    scoring = Scoring(head_dim**-0.5)

    def step() -> torch.Tensor:
        flush(table, confirmed)
        return decode(query, table, columns, scoring)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for tokens, before, after in ((200, 0, 0), (256, 0, 0), (257, 0, 128), (385, 128, 256), (4900, 4608, 4736)):
        lengths = torch.tensor([[tokens, tokens + 1000]], device="cuda")
        skipped.copy_(cases.skipped(lengths))
        confirmed.copy_(lengths - 1)
        packed[0, 0] = before
        graph.replay()
        assert packed.tolist() == [[after, 0]]
        cases.check_decoded(out, query, table, columns, scoring)
