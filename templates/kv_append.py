"""Tokens on their way into a cache: one per row into its slot of every head, and whole tiles from there into codes."""

import torch

try:
    import triton
    import triton.language as tl
except ImportError as error:  # transformers demands whatever is imported outside of a try
    raise ImportError("the CUDA kernels of this checkpoint need triton") from error

from .kv_kernels import TILE_TOKENS, _padded
from .kv_layout import TILE, Quantisation
from .kv_quant import Tiles, quantise

PASS_BYTES = 32 * 1024  # of states in fp32 that a program quantises at once
PACK_OPTIONS = "BITS", "K_ROWS", "K_COLUMNS", "K_N", "V_COLUMNS", "V_N", "WP", "CP", "GP"  # of kernels that pack tiles


@triton.jit(do_not_specialize=["position_batch", "position_head", "heads"])
def _append_kernel(
    k_ptr,
    v_ptr,
    new_k_ptr,
    new_v_ptr,
    offset_ptr,
    position_ptr,
    sink_ptr,
    ring_ptr,
    kv_batch,
    kv_slot,
    new_k_batch,
    new_k_head,
    new_v_batch,
    new_v_head,
    position_batch,
    position_head,
    heads,
    D: tl.constexpr,
    DP: tl.constexpr,
):
    batch, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    position = tl.load(position_ptr + batch * position_batch + head * position_head).to(tl.int32)
    if position >= 0:
        sink, ring = tl.load(sink_ptr + head), tl.load(ring_ptr + head)
        slot = tl.where(position < sink, position, sink + (position - sink) % tl.maximum(ring, 1))
        at = batch.to(tl.int64) * kv_batch + (tl.load(offset_ptr + head).to(tl.int64) + slot) * kv_slot
        d = tl.arange(0, DP)
        new_k = tl.load(new_k_ptr + batch * new_k_batch + head * new_k_head + d, d < D)
        new_v = tl.load(new_v_ptr + batch * new_v_batch + head * new_v_head + d, d < D)
        tl.store(k_ptr + at + d, new_k, d < D)
        tl.store(v_ptr + at + d, new_v, d < D)


def append(
    keys: torch.Tensor,
    values: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    offsets: torch.Tensor,
    positions: torch.Tensor,
    sinks: torch.Tensor,
    rings: torch.Tensor,
) -> None:
    """Store one token per row in its slot of every head, in place. Where the position is negative, nothing is stored.

    Floor: a launch; what it moves is a few kilobytes per row.

    Args:
        keys, values, offsets, sinks, rings: as `decode` takes them. There must be a slot for the position.
        new_keys, new_values: [batch, heads, 1, head_dim], after RoPE.
        positions: int [batch, heads], each head's own: tokens that it holds already.
    """
    batch, heads, _, head_dim = new_keys.shape
    assert keys.stride() == values.stride()
    assert keys.stride(2) == new_keys.stride(3) == new_values.stride(3) == 1
    with torch.cuda.device_of(keys):
        _append_kernel[(batch * heads,)](
            *(keys, values, new_keys, new_values, offsets, positions, sinks, rings),
            *(*keys.stride()[:2], *new_keys.stride()[:2], *new_values.stride()[:2], *positions.stride(), heads),
            D=head_dim,
            DP=_padded(head_dim),
            num_warps=1,
        )


def append_reference(keys, values, new_keys, new_values, offsets, positions, sinks, rings):
    """What `append` does, token by token."""
    for row, of_heads in enumerate(positions.tolist()):
        for head, (position, sink, ring) in enumerate(zip(of_heads, sinks.tolist(), rings.tolist(), strict=True)):
            if position >= 0:
                slot = position if position < sink else sink + (position - sink) % ring
                keys[row, offsets[head] + slot] = new_keys[row, head, 0]
                values[row, offsets[head] + slot] = new_values[row, head, 0]


@triton.jit
def _rounded(x):
    """Non-negative x below 2 ** 22 to the nearest integer, halves to the even one."""
    return (x + 8388608.0) - 8388608.0


@triton.jit
def _places(first, n, ring, LISTED: tl.constexpr):
    """Where tokens n of a tile lie: in the slots of a ring from `first` on, or where a list at pointer `first` says."""
    return tl.load(first + n) if LISTED else (first + n) % ring


@triton.jit
def _pack(
    state_ptr,  # of the head's place 0
    code_ptr,  # [TILE, W] bytes of one tile
    scale_ptr,  # [2, ROWS, COLUMNS]
    first,  # and `ring`: as `_places` takes them
    ring,
    step,  # from place to place
    D: tl.constexpr,
    DP: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    N: tl.constexpr,
    WP: tl.constexpr,
    CP: tl.constexpr,
    GP: tl.constexpr,
    LISTED: tl.constexpr,
):
    """Quantise a tile of keys or values: scales first, then codes by them, N tokens at once."""
    dtype: tl.constexpr = state_ptr.dtype.element_ty
    W: tl.constexpr = D * BITS // 8
    GROUP: tl.constexpr = D // COLUMNS
    MOST: tl.constexpr = 2**BITS - 1
    n, w = tl.arange(0, N), tl.arange(0, WP)
    for start in tl.static_range(0, TILE_TOKENS, N):
        token = _places(first, start + n, ring, LISTED)
        if ROWS < TILE_TOKENS:  # of a channel, and N tokens are a group
            d = tl.arange(0, DP)[None, :]
            x = tl.load(state_ptr + token[:, None] * step + d, d < D, 0.0).to(tl.float32)
            low, high = tl.min(x, 0)[None, :], tl.max(x, 0)[None, :]
            at, there = start // N * D + d, d < D
        else:
            column, g = tl.arange(0, CP)[None, :, None], tl.arange(0, GP)[None, None, :]
            inside = (column < COLUMNS) & (g < GROUP) & (n >= 0)[:, None, None]
            states = state_ptr + token[:, None, None] * step + column * GROUP + g
            low = tl.min(tl.load(states, inside, float("inf")).to(tl.float32), 2)
            high = tl.max(tl.load(states, inside, float("-inf")).to(tl.float32), 2)
            column = tl.arange(0, CP)[None, :]
            at, there = (start + n)[:, None] * COLUMNS + column, (column < COLUMNS) & (n >= 0)[:, None]
        tl.store(scale_ptr + at, tl.div_rn(high - low, tl.full(low.shape, MOST, tl.float32)).to(dtype), there)
        tl.store(scale_ptr + ROWS * COLUMNS + at, low.to(dtype), there)
    tl.debug_barrier()  # other threads read what these have stored
    for start in tl.static_range(0, TILE_TOKENS, N):
        token = _places(first, start + n, ring, LISTED)
        there = (w < W)[None, :] & (n >= 0)[:, None]
        packed = tl.zeros([N, WP], tl.int32)
        for plane in tl.static_range(8 // BITS):
            d = plane * W + w
            x = tl.load(state_ptr + token[:, None] * step + d[None, :], there, 0.0).to(tl.float32)
            at = scale_ptr + ((start + n) * ROWS // TILE_TOKENS)[:, None] * COLUMNS + (d // GROUP)[None, :]
            scale = tl.load(at, there, 1.0).to(tl.float32)
            low = tl.load(at + ROWS * COLUMNS, there, 0.0).to(tl.float32)
            code = _rounded(tl.div_rn(x - low, tl.where(scale > 0, scale, 1.0)))
            packed |= tl.minimum(tl.maximum(code, 0.0), MOST).to(tl.int32) << (BITS * plane)
        tl.store(code_ptr + (start + n)[:, None] * W + w[None, :], packed.to(tl.uint8), there)


@triton.jit(do_not_specialize=["confirmed_batch", "confirmed_head", "packed_batch", "packed_head", "heads", "least"])
def _flush_kernel(
    k_ptr,
    v_ptr,
    offset_ptr,  # [heads]
    sink_ptr,
    ring_ptr,
    confirmed_ptr,  # [batch, heads]
    k_codes_ptr,  # [batch, tiles, TILE, W]
    k_scales_ptr,  # [batch, tiles, 2, K_ROWS, K_COLUMNS]
    v_codes_ptr,
    v_scales_ptr,
    packed_ptr,  # [batch, heads]
    first_ptr,  # [heads]
    count_ptr,  # or None
    kv_batch,
    kv_slot,
    confirmed_batch,
    confirmed_head,
    codes_batch,
    k_scales_batch,
    v_scales_batch,
    packed_batch,
    packed_head,
    heads,
    least,
    D: tl.constexpr,
    DP: tl.constexpr,
    BITS: tl.constexpr,
    K_ROWS: tl.constexpr,
    K_COLUMNS: tl.constexpr,
    K_N: tl.constexpr,
    V_COLUMNS: tl.constexpr,
    V_N: tl.constexpr,
    WP: tl.constexpr,
    CP: tl.constexpr,
    GP: tl.constexpr,
):
    batch, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    first = tl.load(first_ptr + head)
    own = packed_ptr + batch * packed_batch + head * packed_head
    packed = tl.load(own).to(tl.int32)
    confirmed = tl.load(confirmed_ptr + batch * confirmed_batch + head * confirmed_head).to(tl.int32)
    sink = tl.load(sink_ptr + head)
    if (first >= 0) & (confirmed - sink - packed >= least):
        ring = tl.load(ring_ptr + head)
        place = packed // TILE_TOKENS
        if count_ptr is not None:
            place %= tl.load(count_ptr + head)
        tile = (first + place).to(tl.int64)
        states = batch * kv_batch + (tl.load(offset_ptr + head) + sink).to(tl.int64) * kv_slot
        codes = batch * codes_batch + tile * (TILE_TOKENS * D * BITS // 8)
        k_scales = k_scales_ptr + batch * k_scales_batch + tile * (2 * K_ROWS * K_COLUMNS)
        v_scales = v_scales_ptr + batch * v_scales_batch + tile * (2 * TILE_TOKENS * V_COLUMNS)
        _pack(
            *(k_ptr + states, k_codes_ptr + codes, k_scales, packed, ring, kv_slot),
            *(D, DP, BITS, K_ROWS, K_COLUMNS, K_N, WP, CP, GP, False),
        )
        _pack(
            *(v_ptr + states, v_codes_ptr + codes, v_scales, packed, ring, kv_slot),
            *(D, DP, BITS, TILE_TOKENS, V_COLUMNS, V_N, WP, CP, GP, False),
        )
        tl.store(own, packed + TILE_TOKENS)


def flush(
    keys: torch.Tensor,
    values: torch.Tensor,
    offsets: torch.Tensor,
    sinks: torch.Tensor,
    rings: torch.Tensor,
    confirmed: torch.Tensor,
    tiles: Tiles,
    packed: torch.Tensor,
    first_tiles: torch.Tensor,
    quantisation: Quantisation,
    counts: torch.Tensor | None = None,
) -> None:
    """Pack the oldest whole tile of each head that has enough tokens beyond its residual, in place.

    A head with `residual` + `TILE` confirmed tokens after its sinks that are not packed, or more, gives its `TILE`
    oldest ones to tile packed // `TILE`, as `kv_quant.quantise` makes it, and `packed` grows by as many. The ring keeps
    them until others take their slots.

    Floor: 4 * `TILE` * head_dim * itemsize bytes to read and `quantisation.tile_bytes(head_dim)` to write for each
    tile, every `TILE` tokens of a head; else a launch.

    Args:
        keys, values, offsets, sinks, rings, tiles, packed, first_tiles, quantisation, counts: as `decode` takes them.
        confirmed: int [batch, heads], tokens that are stored and will not be taken back.
    """
    batch, heads, head_dim = len(keys), len(offsets), keys.shape[2]
    assert keys.stride() == values.stride()
    assert keys.stride(2) == 1
    assert tiles.key_codes.stride() == tiles.value_codes.stride()
    assert all(part[0].is_contiguous() for part in tiles)
    strides = *(part.stride(0) for part in (tiles.key_codes, tiles.key_scales, tiles.value_scales)), *packed.stride()
    with torch.cuda.device_of(keys):
        _flush_kernel[(batch * heads,)](
            *(keys, values, offsets, sinks, rings, confirmed, *tiles, packed, first_tiles, counts),
            *(*keys.stride()[:2], *confirmed.stride(), *strides, heads, quantisation.residual + TILE),
            D=head_dim,
            DP=_padded(head_dim),
            **_pack_options(head_dim, quantisation),
            num_warps=8,
        )


def flush_reference(keys, values, offsets, sinks, rings, confirmed, tiles, packed, first_tiles, quantisation, counts):
    """What `flush` does, head by head."""
    for row, of_heads in enumerate((confirmed - sinks).tolist()):
        for head, (first, ring, tokens) in enumerate(zip(first_tiles.tolist(), rings.tolist(), of_heads, strict=True)):
            start = int(packed[row, head])
            if first >= 0 and tokens - start >= quantisation.residual + TILE:
                at = offsets[head] + sinks[head] + torch.arange(start, start + TILE, device=keys.device) % ring
                made = quantise(keys[row, at], values[row, at], quantisation)
                place = start // TILE if counts is None else start // TILE % int(counts[head])
                for part, own in zip(tiles, made, strict=True):
                    part[row, first + place] = own
                packed[row, head] += TILE


def _pack_options(head_dim: int, quantisation: Quantisation) -> dict[str, int]:
    """How a kernel packs tiles: the groups that have scales, the tokens that it takes at once, and powers of two."""
    key_groups, (_, columns) = quantisation.key_groups(head_dim), quantisation.value_groups(head_dim)
    padded_columns, group = triton.next_power_of_2(columns), triton.next_power_of_2(head_dim // columns)
    tokens = min(max(PASS_BYTES // (4 * padded_columns * group), 1), TILE)
    key_tokens = TILE // key_groups[0] if quantisation.scheme == "kivi" else tokens
    width = triton.next_power_of_2(quantisation.code_bytes(head_dim))
    options = quantisation.bits, *key_groups, key_tokens, columns, tokens, width, padded_columns, group
    return dict(zip(PACK_OPTIONS, options, strict=True))
