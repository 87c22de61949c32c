"""What the Triton kernels share: attention over heads that keep different amounts, for CUDA.

A head's tokens lie in slots. Slot s holds position s while s < sink; from there on positions go round a ring: position
p is in slot sink + (p - sink) % ring. A query at position i sees position p <= i when p < sink or i - p < recent. A
head that keeps every token has a sink that no position reaches (`EVERY`).

Every launch says whether the compiler may fuse a product into a sum, as the default depends on Triton's version. Where
lanes add up products of their own by exchanging them, it must not: each would round another product, so lanes that
share a sum would hold sums that differ in the last bit, and write both to the same place.

The reference of the kernels is `kv_torch`. Floors in their docstrings are the time that no implementation beats: bytes
that must move over the device's read bandwidth, or operations over the rate of its matrix units.
"""

import math

import torch

try:
    import triton
    import triton.language as tl
except ImportError as error:  # transformers demands whatever is imported outside of a try
    raise ImportError("the CUDA kernels of this checkpoint need triton") from error

from .kv_cache import HeadTable
from .kv_layout import EVERY, TILE
from .kv_torch import Scoring

LOG2_E = math.log2(math.e)
# a score lower than any real one: unlike -inf, its difference from a masked score is no NaN
LOWEST = tl.constexpr(-1.0e30)
LN_2 = tl.constexpr(math.log(2))
TILE_TOKENS = tl.constexpr(TILE)
EVERY_POSITION = tl.constexpr(EVERY)


@triton.jit
def _scores(q, k, scale, cap, CAP: tl.constexpr):
    """Scores in base 2 of q [M, D] over k [N, D]; `_score_factors` gives the factors."""
    return _capped(tl.dot(q, tl.trans(k), input_precision="ieee") * scale, cap, CAP)


@triton.jit
def _capped(scores, cap, CAP: tl.constexpr):
    """Scores that `_score_factors` has scaled, in base 2."""
    if CAP:
        scores = cap * (1 - 2 / (tl.exp2(scores) + 1))  # tanh
    return scores


@triton.jit
def _accumulate(scores, v, top, total, acc):
    """A step of online softmax: scores [M, N] of values v [N, D]."""
    higher = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    fade = tl.exp2(top - higher)
    acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return higher, total * fade + tl.sum(weights, 1), acc


@triton.constexpr_function
def _unpacking(plane: int, bits: int, mantissa: int) -> tuple[int, ...]:
    """How the codes at bits plane * bits of 16-bit words become 16-bit floats less 2 ** (bits - 1), exactly.

    An integer x below 2 ** mantissa in the mantissa of the float 2 ** mantissa makes it 2 ** mantissa + x.

    Returns:
        shift; mask and exponent of the float (shifted & mask | exponent); mask and bits of what is added to it
        (shifted & mask ^ bits).
    """
    bias = 2 ** (14 - mantissa) - 1
    if bits > mantissa:  # 128 and the low seven bits, to which come -128 where the eighth is set, else -256
        return plane * bits, 0x7F, (bias + 7) << 7, 0x80, 0x8000 | (bias + 8) << 7
    span = mantissa // bits * bits  # bits that reach the mantissa with the same shift
    place = plane * bits % span
    exponent = (bias + mantissa - place) << mantissa
    added = 0x8000 | exponent | 2 ** (bits - 1) << place
    return plane * bits - place, (2**bits - 1) << place, exponent, 0, added


@triton.constexpr_function
def _unpacking_asm(plane: int, bits: int, mantissa: int) -> str:
    """`_unpacking` of two words at once, in three instructions, or four at 8 bits of bfloat16."""
    shift, mask, exponent, added_mask, added = _unpacking(plane, bits, mantissa)
    kind, one = ("bf16x2", 127 << 7) if mantissa == 7 else ("f16x2", 15 << 10)
    of_added = f"lop3.b32 b, word, {added_mask * 0x10001}, b, 0x6a;" if added_mask else ""
    return f"""{{
        .reg .b32 word, a, b, one;
        mov.b32 one, {one * 0x10001};
        mov.b32 b, {added * 0x10001};
        shr.b32 word, $1, {shift};
        lop3.b32 a, word, {mask * 0x10001}, {exponent * 0x10001}, 0xea;
        {of_added}
        fma.rn.{kind} $0, a, one, b;
    }}"""


@triton.constexpr_function
def _unpacking_third_asm(plane: int, mantissa: int) -> str:
    """The same of two words with two low bits each, and of the third ones beside them, in five instructions."""
    kind, one = ("bf16x2", 127 << 7) if mantissa == 7 else ("f16x2", 15 << 10)
    exponent = (2 ** (14 - mantissa) - 1 + mantissa) << mantissa
    to_third = f"shr.b32 word, $2, {plane - 2};" if plane > 2 else f"shl.b32 word, $2, {2 - plane};"
    return f"""{{
        .reg .b32 word, a, b, one;
        mov.b32 one, {one * 0x10001};
        mov.b32 b, {(0x8000 | exponent | 4) * 0x10001};
        shr.b32 word, $1, {2 * plane};
        lop3.b32 a, word, {3 * 0x10001}, {exponent * 0x10001}, 0xea;
        {to_third}
        lop3.b32 a, word, {4 * 0x10001}, a, 0xea;
        fma.rn.{kind} $0, a, one, b;
    }}"""


@triton.jit
def _third_bits(codes, unit, n, w, D: tl.constexpr, N: tl.constexpr):
    """The bytes of third bits that go with words w [channels] of N tokens, int16; `codes` are int16 words of tiles."""
    W: tl.constexpr = D // 8
    tile = unit * N // TILE_TOKENS
    # after the words of a tile, which are two bytes each
    at = (unit * N + n)[:, None] * W + (tile + 1) * (2 * TILE_TOKENS * W) + w[None, :]
    return tl.load(codes.to(tl.pointer_type(tl.uint8)) + at, (w < W)[None, :], 0).to(tl.int16)


@triton.jit
def _codes(words, third, PLANE: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr, dtype: tl.constexpr):
    """Codes less 2 ** (BITS - 1) at bits PLANE * BITS of int16 words; of 3 bits two there and one in `third`."""
    MANTISSA: tl.constexpr = 7 if dtype == tl.bfloat16 else 10
    if ASM and BITS == 3:
        of_three: tl.constexpr = _unpacking_third_asm(PLANE, MANTISSA)
        codes = tl.inline_asm_elementwise(of_three, "=r,r,r", [words, third], dtype.value, is_pure=True, pack=2)
    elif ASM:
        asm: tl.constexpr = _unpacking_asm(PLANE, BITS, MANTISSA)
        codes = tl.inline_asm_elementwise(asm, "=r,r", [words], dtype.value, is_pure=True, pack=2)
    elif BITS == 3:
        low, high = (words >> (PLANE * 2)) & 3, (third >> PLANE) & 1
        codes = ((low | high << 2).to(tl.float32) - 4).to(dtype)
    else:
        low = (words >> (PLANE * BITS)) & (2**BITS - 1)
        codes = (low.to(tl.float32) - 2 ** (BITS - 1)).to(dtype)
    return codes


@triton.jit
def _pairs(ptr, at, there, MINIMA: tl.constexpr, HALF: tl.constexpr, dtype: tl.constexpr):
    """Scales 2 * at and 2 * at + 1 of a row, then their zeros, in fp32; minima lie MINIMA elements after scales.

    One load gets all, in words of 32 bits: cp.async copies no less, and only what a dot needs is under way early.
    """
    both = tl.arange(0, 2)[None, :]
    if dtype == tl.float32:
        of_even = ptr + 2 * at[:, None] + MINIMA * both
        even, even_low = tl.split(tl.load(of_even, there[:, None], 0.0))
        odd, odd_low = tl.split(tl.load(of_even + 1, there[:, None], 0.0))
    else:
        words = tl.load(ptr.to(tl.pointer_type(tl.int32)) + at[:, None] + MINIMA // 2 * both, there[:, None], 0)
        scales, lows = tl.split(words)
        even, odd = _halves(scales, dtype)
        even_low, odd_low = _halves(lows, dtype)
    return even, odd, even_low + even * HALF, odd_low + odd * HALF


@triton.jit
def _halves(words, dtype: tl.constexpr):
    """The 16-bit floats in the low and in the high half of words, in fp32."""
    if dtype == tl.bfloat16:
        return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)
    low, high = words.to(tl.int16), (words >> 16).to(tl.int16)
    return low.to(tl.float16, bitcast=True).to(tl.float32), high.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _of_tokens(ptr, tile, token, HALF: tl.constexpr, dtype: tl.constexpr):
    """Scale and zero of some tokens of a tile, where a token has one of each; to join pairs would slow the dots."""
    pairs = _pairs(ptr + tile * (2 * TILE_TOKENS), token // 2, token >= 0, TILE_TOKENS, HALF, dtype)
    return tl.where(token % 2 == 0, pairs[0], pairs[1]), tl.where(token % 2 == 0, pairs[2], pairs[3])


@triton.jit
def _of_groups(ptr, tile, token, channel, there, GROUPS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr):
    """Scale and zero [N, channels] of some tokens and channels of a tile, where a token has GROUPS of each."""
    at = ptr + (tile * (2 * TILE_TOKENS) + token)[:, None] * GROUPS + (channel // (D // GROUPS))[None, :]
    scale = tl.load(at, there[None, :], 0.0).to(tl.float32)
    return scale, tl.load(at + TILE_TOKENS * GROUPS, there[None, :], 0.0).to(tl.float32) + scale * HALF


@triton.jit
def _over_tiles(
    q_ptr,  # [G, D]
    k_codes,  # int16 words [tiles, TILE, D * BITS / 16]
    k_scales,  # [tiles, 2, ...]
    v_codes,
    v_scales,
    partial_ptr,  # [programs + rows, G, D]
    lse_ptr,  # [programs + rows, G]
    part,  # [M]
    q_head,
    begin,
    end,
    scale,
    cap,
    packed,
    newest,
    recent,
    count,
    G: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    BITS: tl.constexpr,
    KEY_ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    KW: tl.constexpr,
    VW: tl.constexpr,
    CAP: tl.constexpr,
    ASM: tl.constexpr,
    RING: tl.constexpr,
):
    """A head's units `begin` to `end`, N packed tokens each.

    All of them are visible; with RING, of `packed` tokens after the sinks those that the token `newest` still sees, and
    tiles lie round a ring of `count`.
    A word has PLANES codes; plane p of all words is channels p // 2 * 2 * W + p % 2, + 2, + 4, ... and gets a dot of
    its own. Where a scale is a channel's of keys or a token's, queries, scores or weights take it: codes stay integers.
    """
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    WORD_BITS: tl.constexpr = 2 if BITS == 3 else BITS
    W: tl.constexpr = D * WORD_BITS // 16
    PLANES: tl.constexpr = 16 // WORD_BITS
    HALF: tl.constexpr = 2 ** (BITS - 1)
    m, n, kw, vw = tl.arange(0, M), tl.arange(0, N), tl.arange(0, KW), tl.arange(0, VW)
    q, acc = (), ()
    for plane in tl.static_range(PLANES):
        of_plane = q_ptr + m[:, None] * q_head + (plane // 2 * 2 * W + 2 * kw + plane % 2)[None, :]
        q += (tl.load(of_plane, (m < G)[:, None] & (kw < W)[None, :], 0.0),)
        acc += (tl.zeros([M, VW], tl.float32),)
    q_sum = tl.zeros([M], tl.float32)
    if KEY_ROWS == 0:
        for plane in tl.static_range(PLANES):
            q_sum += tl.sum(q[plane].to(tl.float32), 1)
    top = tl.full([M], LOWEST, tl.float32)
    total = tl.zeros([M], tl.float32)
    zeros = tl.zeros([M], tl.float32)  # what the zeros of values add to every channel
    for unit in range(begin, end):
        tile = unit * N // TILE_TOKENS
        first = unit * N - tile * TILE_TOKENS
        states = unit * (N * W) + n[:, None] * W
        k_third, v_third = n, n
        if BITS == 3:
            states += tile * (TILE_TOKENS * W // 2)
            k_third, v_third = _third_bits(k_codes, unit, n, kw, D, N), _third_bits(v_codes, unit, n, vw, D, N)
        k = tl.load(k_codes + states + kw[None, :], (kw < W)[None, :], 0)
        v = tl.load(v_codes + states + vw[None, :], (vw < W)[None, :], 0)

        scores = tl.zeros([M, N], tl.float32)
        if KEY_ROWS > 0:
            of_row = k_scales + (tile * (2 * KEY_ROWS) + first * KEY_ROWS // TILE_TOKENS) * D
            folded, of_zeros = (), tl.zeros([M, KW], tl.float32)
            for byte in tl.static_range(PLANES // 2):
                pairs = _pairs(of_row, byte * W + kw, kw < W, KEY_ROWS * D, HALF, dtype)
                for odd in tl.static_range(2):
                    exact = q[2 * byte + odd].to(tl.float32)
                    folded += ((exact * (pairs[odd] * scale)[None, :]).to(dtype),)
                    of_zeros += exact * (pairs[2 + odd] * scale)[None, :]
            scores += tl.sum(of_zeros, 1)[:, None]
            for plane in tl.static_range(PLANES):
                codes = _codes(k, k_third, plane % 2 * (PLANES // 2) + plane // 2, BITS, ASM, dtype)
                scores = tl.dot(folded[plane], tl.trans(codes), scores, input_precision="ieee")
        else:
            for plane in tl.static_range(PLANES):
                codes = _codes(k, k_third, plane % 2 * (PLANES // 2) + plane // 2, BITS, ASM, dtype)
                if GROUPS > 1:
                    k_channel = plane // 2 * 2 * W + 2 * kw + plane % 2
                    k_factor, k_zero = _of_groups(k_scales, tile, first + n, k_channel, kw < W, GROUPS, D, HALF)
                    codes = (codes.to(tl.float32) * k_factor + k_zero).to(dtype)
                scores = tl.dot(q[plane], tl.trans(codes), scores, input_precision="ieee")
            if GROUPS == 1:
                token_factor, token_zero = _of_tokens(k_scales, tile, first + n, HALF, dtype)
                scores = scores * token_factor[None, :] + q_sum[:, None] * token_zero[None, :]
            scores *= scale
        scores = _capped(scores, cap, CAP)
        if RING:
            last = packed // TILE_TOKENS - 1
            token = (last - (last - tile) % count) * TILE_TOKENS + first + n
            scores = tl.where((newest - token < recent)[None, :], scores, float("-inf"))

        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(weights, 1)
        if GROUPS == 1:
            v_factor, v_zero = _of_tokens(v_scales, tile, first + n, HALF, dtype)
            zeros = zeros * fade + tl.sum(weights * v_zero[None, :], 1)
            weights *= v_factor[None, :]
        faded, acc = acc, ()
        for plane in tl.static_range(PLANES):
            codes = _codes(v, v_third, plane % 2 * (PLANES // 2) + plane // 2, BITS, ASM, dtype)
            if GROUPS > 1:
                v_channel = plane // 2 * 2 * W + 2 * vw + plane % 2
                v_factor, v_zero = _of_groups(v_scales, tile, first + n, v_channel, vw < W, GROUPS, D, HALF)
                codes = (codes.to(tl.float32) * v_factor + v_zero).to(dtype)
            acc += (tl.dot(weights.to(dtype), codes, faded[plane] * fade[:, None], input_precision="ieee"),)
        top = higher
    safe = tl.where(total > 0, total, 1.0)
    tl.store(lse_ptr + part, tl.where(total > 0, top + tl.log2(safe), LOWEST), m < G)
    for plane in tl.static_range(PLANES):
        channel = plane // 2 * 2 * W + 2 * vw + plane % 2
        out = (acc[plane] + zeros[:, None]) / safe[:, None]
        tl.store(partial_ptr + part[:, None] * D + channel[None, :], out, (m < G)[:, None] & (vw < W)[None, :])


def _padded(head_dim: int) -> int:
    """Elements of a row of a tile: a power of two, and enough for the matrix units."""
    return max(16, triton.next_power_of_2(head_dim))


def _score_factors(scoring: Scoring) -> dict:
    """What `_scores` multiplies the dot products and the capped scores by, so that exp2 is all it needs."""
    if scoring.softcap is None:
        return {"scale": scoring.scale * LOG2_E, "cap": 1.0, "CAP": False}
    return {"scale": 2 * scoring.scale / scoring.softcap * LOG2_E, "cap": scoring.softcap * LOG2_E, "CAP": True}


def _strides(states: torch.Tensor, *names: str) -> dict[str, int]:
    """A tensor's strides along its first dimensions, by the names that a kernel has for them."""
    return dict(zip(names, states.stride(), strict=False))


def _slots(table: HeadTable) -> dict:
    """Arguments of every kernel that works on the slots of a layer's heads."""
    assert table.keys.stride() == table.values.stride()
    assert table.keys.stride(2) == 1
    return {
        "k_ptr": table.keys,
        "v_ptr": table.values,
        "offset_ptr": table.offsets,
        "sink_ptr": table.sinks,
        "ring_ptr": table.rings,
        **_strides(table.keys, "kv_batch", "kv_slot"),
        "heads": len(table.offsets),
        "D": table.keys.shape[2],
        "DP": _padded(table.keys.shape[2]),
    }


def _tiles(table: HeadTable, word: torch.dtype) -> dict:
    """Arguments of every kernel that works on packed tiles, whose codes it takes in such words."""
    pointers = "k_codes_ptr", "k_scales_ptr", "v_codes_ptr", "v_scales_ptr", "packed_ptr", "first_ptr"
    strides = "codes_batch", "k_scales_batch", "v_scales_batch", "packed_batch", "packed_head"
    if table.tiles is None or table.packed is None:
        return dict.fromkeys(pointers) | dict.fromkeys(strides, 0)
    key_codes, key_scales, value_codes, value_scales = table.tiles
    assert key_codes.stride() == value_codes.stride()
    assert all(part[0].is_contiguous() for part in table.tiles)
    key_codes, value_codes = key_codes.view(word), value_codes.view(word)
    parts = key_codes, key_scales, value_codes, value_scales, table.packed, table.first_tiles
    steps = *(part.stride(0) for part in (key_codes, key_scales, value_scales)), *table.packed.stride()
    return dict(zip((*pointers, *strides), (*parts, *steps), strict=True))
