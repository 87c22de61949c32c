"""A kernel that moves the selected tokens of quantized heads, for rolling budgets: codes stay as they are."""

import torch

from .kv_kernels import TILE_TOKENS, _padded, _power, _registers, _tiles, tl, triton
from .kv_layout import EVERY, TILE
from .kv_pack import _pack, options
from .kv_reselect import _token_scale_options, _tokens
from .kv_storage import HeadTable


@triton.jit
def _copy(
    ptr,
    fresh_ptr,
    source,
    begin,
    packed,
    STEP: tl.constexpr,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Let tokens from `begin` on in tiles have WIDTH elements of those at places `source` [N], or of one fresh tile.

    Args:
        ptr: of tiles, STEP elements from each to the next; the first token of a tile has these elements at FIRST.
        fresh_ptr: such a tile, with what tokens have whose source is not among `packed` ones.
    """
    n = begin + tl.arange(0, source.shape[0])
    w = tl.arange(0, _power(WIDTH))[None, :]
    from_tiles, inside = (source < packed)[:, None], (w < WIDTH) & (n >= 0)[:, None]
    source_offsets = (source // TILE_TOKENS * STEP + source % TILE_TOKENS * WIDTH + FIRST)[:, None] + w
    in_tile_offsets = (n % TILE_TOKENS * WIDTH + FIRST)[:, None] + w
    moved = tl.load(ptr + source_offsets, inside & from_tiles, 0)
    fresh = tl.load(fresh_ptr + in_tile_offsets, inside & ~from_tiles, 0)
    tl.debug_barrier()  # what others still read; later tokens come from later places
    tl.store(ptr + (n // TILE_TOKENS * STEP)[:, None] + in_tile_offsets, tl.where(from_tiles, moved, fresh), inside)


@triton.jit
def _refill(
    states_ptr,  # of the head's first slot
    codes_ptr,  # of its first tile
    scales_ptr,
    kept_ptr,
    aside_ptr,  # [slots, D]
    place_ptr,  # [TILE]
    fresh_codes_ptr,  # of a tile
    fresh_scales_ptr,
    tokens,
    sink,
    ring,
    packed,
    still_packed,
    kv_slot,
    D: tl.constexpr,
    N: tl.constexpr,
    BITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PACK_N: tl.constexpr,
    RANGES: tl.constexpr,
):
    """Let a head have those tokens of its keys or values that it keeps, of which `still_packed` are in tiles."""
    WORD_BITS: tl.constexpr = 2 if BITS == 3 else BITS
    W: tl.constexpr = D * WORD_BITS // 8
    CODES: tl.constexpr = TILE_TOKENS * D * BITS // 8
    THIRDS: tl.constexpr = TILE_TOKENS * W
    SCALES: tl.constexpr = TILE_TOKENS * COLUMNS
    n = tl.arange(0, N)
    d = tl.arange(0, _padded(D))[None, :]
    # slots go round a ring, and tiles give and take: what slots get is put aside
    for begin in range(0, tokens - still_packed, N):
        aside_index = begin + n
        position = tl.where(aside_index < sink, aside_index, aside_index + still_packed)
        mask = position < tokens
        source = tl.load(kept_ptr + position, mask, 0)
        x = _tokens(
            ptr=states_ptr,
            codes_ptr=codes_ptr,
            scales_ptr=scales_ptr,
            position=source,
            mask=mask,
            sink=sink,
            ring=ring,
            packed=packed,
            kv_slot=kv_slot,
            D=D,
            BITS=BITS,
            COLUMNS=COLUMNS,
        )
        tl.store(aside_ptr + aside_index[:, None] * D + d, x, mask[:, None] & (d < D))
    for start in range(0, still_packed, TILE_TOKENS):
        tile_sources = kept_ptr + sink + start
        if tl.load(tile_sources + TILE_TOKENS - 1) - sink >= packed:  # the last of them, at least, is in a slot
            t = tl.arange(0, TILE_TOKENS)
            tl.store(place_ptr + t, tl.maximum(tl.load(tile_sources + t) - sink, packed) % ring)
            tl.debug_barrier()
            _pack(
                state_ptr=states_ptr + sink * kv_slot,
                code_ptr=fresh_codes_ptr,
                scale_ptr=fresh_scales_ptr,
                first=place_ptr,
                ring=ring,
                step=kv_slot,
                D=D,
                BITS=BITS,
                ROWS=TILE_TOKENS,
                COLUMNS=COLUMNS,
                N=PACK_N,
                RANGES=RANGES,
                LISTED=True,
            )
        tl.debug_barrier()
        for first in range(0, TILE_TOKENS, N):
            begin, source = start + first, tl.load(tile_sources + first + n) - sink
            _copy(codes_ptr, fresh_codes_ptr, source, begin, packed, STEP=CODES, FIRST=0, WIDTH=W)
            if BITS == 3:
                _copy(codes_ptr, fresh_codes_ptr, source, begin, packed, STEP=CODES, FIRST=THIRDS, WIDTH=W // 2)
            _copy(scales_ptr, fresh_scales_ptr, source, begin, packed, STEP=2 * SCALES, FIRST=0, WIDTH=COLUMNS)
            _copy(scales_ptr, fresh_scales_ptr, source, begin, packed, STEP=2 * SCALES, FIRST=SCALES, WIDTH=COLUMNS)
    tl.debug_barrier()
    for begin in range(0, tokens - still_packed, N):
        aside_index = begin + n
        position = tl.where(aside_index < sink, aside_index, aside_index + still_packed)
        slot = tl.where(aside_index < sink, aside_index, sink + (position - sink) % ring)
        mask = (position < tokens)[:, None] & (d < D)
        x = tl.load(aside_ptr + aside_index[:, None] * D + d, mask)
        tl.store(states_ptr + slot.to(tl.int64)[:, None] * kv_slot + d, x, mask)


@triton.jit(
    do_not_specialize=[
        *("column", "places", "heads", "slots", "residual"),
        *("skipped_batch", "skipped_head", "packed_batch", "packed_head", "tiles"),
    ]
)
def _move_codes_kernel(
    k_ptr,  # [batch, slots of all heads, D]
    v_ptr,
    kept_ptr,  # [batch, heads, places]
    aside_ptr,  # [batch, heads, 2, slots, D]
    place_ptr,  # [batch, heads, TILE]
    fresh_codes_ptr,  # [batch, heads, TILE, W], as wide as the wider codes
    fresh_scales_ptr,  # [batch, heads, 2, TILE, COLUMNS]
    offset_ptr,  # [heads]
    sink_ptr,
    ring_ptr,
    skipped_ptr,  # [batch, heads]
    k_codes_ptr,  # [batch, tiles, TILE, W]
    k_scales_ptr,  # [batch, tiles, 2, TILE, COLUMNS]
    v_codes_ptr,
    v_scales_ptr,
    packed_ptr,  # [batch, heads]
    first_ptr,  # [heads]
    kv_batch,
    kv_slot,
    skipped_batch,
    skipped_head,
    tiles,
    packed_batch,
    packed_head,
    heads,
    column,
    places,
    slots,
    residual,
    D: tl.constexpr,
    N: tl.constexpr,
    K_BITS: tl.constexpr,
    V_BITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PACK_N: tl.constexpr,
    RANGES: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    batch, head = program // heads, tl.program_id(0) % heads
    tokens = column - tl.load(skipped_ptr + batch * skipped_batch + head * skipped_head)
    sink = tl.load(sink_ptr + head)
    ring = tl.load(ring_ptr + head)
    packed_count_ptr = packed_ptr + batch * packed_batch + head * packed_head
    packed = tl.load(packed_count_ptr)
    # tiles stay as many while there are tokens to fill them: none of theirs returns to slots, to be quantized again
    filled = tl.minimum(packed, tl.maximum(tokens - sink, 0) // TILE_TOKENS * TILE_TOKENS)
    still_packed = tl.maximum(filled, tl.maximum(tokens - sink - residual, 0) // TILE_TOKENS * TILE_TOKENS)
    tile = batch * tiles + tl.load(first_ptr + head)
    states = batch * kv_batch + tl.load(offset_ptr + head).to(tl.int64) * kv_slot
    k_codes = k_codes_ptr + tile * (TILE_TOKENS * D * K_BITS // 8)
    v_codes = v_codes_ptr + tile * (TILE_TOKENS * D * V_BITS // 8)
    scales = tile * (2 * TILE_TOKENS * COLUMNS)
    kept_positions, aside = kept_ptr + program * places, aside_ptr + program * 2 * slots * D
    place = place_ptr + program * TILE_TOKENS
    fresh_codes = fresh_codes_ptr + program * (TILE_TOKENS * D * max(K_BITS, V_BITS) // 8)
    fresh_scales = fresh_scales_ptr + program * (2 * TILE_TOKENS * COLUMNS)
    for values in tl.static_range(2):
        _refill(
            states_ptr=(v_ptr if values else k_ptr) + states,
            codes_ptr=v_codes if values else k_codes,
            scales_ptr=(v_scales_ptr if values else k_scales_ptr) + scales,
            kept_ptr=kept_positions,
            aside_ptr=aside + slots * D if values else aside,
            place_ptr=place,
            fresh_codes_ptr=fresh_codes,
            fresh_scales_ptr=fresh_scales,
            tokens=tokens,
            sink=sink,
            ring=ring,
            packed=packed,
            still_packed=still_packed,
            kv_slot=kv_slot,
            D=D,
            N=N,
            BITS=V_BITS if values else K_BITS,
            COLUMNS=COLUMNS,
            PACK_N=PACK_N,
            RANGES=RANGES,
        )
    tl.store(packed_count_ptr, still_packed)


def move(arguments: dict, table: HeadTable, kept_positions: torch.Tensor) -> None:
    """Launch the kernel with these arguments of `kv_move.move`, for a table with tiles."""
    assert table.tiles is not None
    assert table.quantization is not None
    batch, heads = table.skipped.shape
    packing = options(table.keys.shape[2], table.quantization)
    slots = table.quantization.slots(EVERY, table.quantization.sink)
    wider_codes = max(table.tiles.key_codes, table.tiles.value_codes, key=torch.Tensor.numel)
    scales = table.tiles.key_scales
    _move_codes_kernel[(batch * heads,)](
        **arguments,
        **_tiles(table, torch.uint8),
        **_token_scale_options(table),
        aside_ptr=table.keys.new_empty(batch, heads, 2, slots, table.keys.shape[2]),
        place_ptr=kept_positions.new_empty(batch, heads, TILE),
        fresh_codes_ptr=wider_codes.new_empty(batch, heads, *wider_codes.shape[2:]),
        fresh_scales_ptr=scales.new_empty(batch, heads, *scales.shape[2:]),
        slots=slots,
        residual=table.quantization.residual,
        PACK_N=packing["V_N"],
        RANGES=packing["RANGES"],
        num_warps=8,
        **_registers(),
    )
