"""Decode over packed tiles: codes become floats by bit operations, and scales go into queries, scores or weights.

The instructions of a warp bound it, not the memory. So lanes sum what they have, and are summed once, after a loop; and
codes of bfloat16 stay as they are: a mantissa under the least exponent, an integer times 2 ** -133.
"""

from .kv_kernels import LOWEST, TILE_BYTES, TILE_TOKENS, _capped, _padded, _power, tl, triton
from .kv_layout import TILE, Quantization

# tokens beside each other of which four warps have one of each in a lane: the matrix units give a thread two
LANE_TOKENS = tl.constexpr(32)
SHARED_ROWS = 32  # of dots that queries and groups of scales share, at most
SHARED_OUTPUT = SHARED_ROWS * 128  # the same times the channels of a head; with more, registers spill


@triton.jit
def _in_part(x, LANES: tl.constexpr):
    """Sums over tokens of x [M, N] as far as a lane has them, [M, LANES]: lanes are summed once, after a loop."""
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    return tl.sum(tl.reshape(x, [M, N // LANES, LANES]), 1) if N > LANES else x


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
    addend = 0x8000 | exponent | 2 ** (bits - 1) << place
    return plane * bits - place, (2**bits - 1) << place, exponent, 0, addend


@triton.constexpr_function
def _word_codes(bits: int) -> int:
    """How many codes a word has; of 3 bits the third lies apart."""
    return 16 // (2 if bits == 3 else bits)


@triton.constexpr_function
def _raw_place(plane: int, bits: int) -> int:
    """Where a raw code of a plane lies in the low byte of its float: it counts 2 ** place times as much."""
    return 0 if bits == 3 else plane * bits % 8


@triton.constexpr_function
def _place(plane: int, planes: int) -> int:
    """Where a word has the codes of a plane."""
    return plane % 2 * (planes // 2) + plane // 2


@triton.constexpr_function
def _raw_asm(plane: int, bits: int) -> str:
    """Codes of two words as bfloat16s with all other bits zero, in one instruction or two.

    The byte b as a float is b * 2 ** -133 exactly: the numbers under the least exponent are as far apart as those with
    it, so that the eighth bit may lie in the exponent. Matrix units multiply such numbers as any others.
    """
    place = plane * bits % 8
    if bits == 8 and plane:
        return "prmt.b32 $0, $1, 0, 0x4341;"
    mask = ((2**bits - 1) << place) * 0x10001
    return f"{{.reg .b32 word; shr.b32 word, $1, {plane * bits - place}; and.b32 $0, word, {mask};}}"


@triton.constexpr_function
def _unpacking_asm(plane: int, bits: int, mantissa: int) -> str:
    """`_unpacking` of two words at once, in three instructions, or four at 8 bits of bfloat16."""
    shift, mask, exponent, addend_mask, addend = _unpacking(plane, bits, mantissa)
    kind, one = ("bf16x2", 127 << 7) if mantissa == 7 else ("f16x2", 15 << 10)
    addend_asm = f"lop3.b32 b, word, {addend_mask * 0x10001}, b, 0x6a;" if addend_mask else ""
    return f"""{{
        .reg .b32 word, a, b, one;
        mov.b32 one, {one * 0x10001};
        mov.b32 b, {addend * 0x10001};
        shr.b32 word, $1, {shift};
        lop3.b32 a, word, {mask * 0x10001}, {exponent * 0x10001}, 0xea;
        {addend_asm}
        fma.rn.{kind} $0, a, one, b;
    }}"""


@triton.constexpr_function
def _unpacking_third_asm(plane: int, mantissa: int, raw: bool) -> str:
    """The same of two words with two low bits each, and of the third ones beside them, in five instructions or four."""
    kind, one = ("bf16x2", 127 << 7) if mantissa == 7 else ("f16x2", 15 << 10)
    exponent = 0 if raw else (2 ** (14 - mantissa) - 1 + mantissa) << mantissa
    to_third = f"shr.b32 word, $2, {plane - 2};" if plane > 2 else f"shl.b32 word, $2, {2 - plane};"
    return f"""{{
        .reg .b32 word, a, b, one;
        mov.b32 one, {one * 0x10001};
        mov.b32 b, {(0x8000 | exponent | 4) * 0x10001};
        shr.b32 word, $1, {2 * plane};
        lop3.b32 a, word, {3 * 0x10001}, {exponent * 0x10001}, 0xea;
        {to_third}
        lop3.b32 a, word, {4 * 0x10001}, a, 0xea;
        {"mov.b32 $0, a;" if raw else f"fma.rn.{kind} $0, a, one, b;"}
    }}"""


@triton.jit
def _third_bits(codes, unit, n, w, D: tl.constexpr, N: tl.constexpr):
    """The bytes of third bits that go with words w [channels] of N tokens, int16; `codes` are int16 words of tiles."""
    W: tl.constexpr = D // 8
    tile = unit * N // TILE_TOKENS
    # after the words of a tile, which are two bytes each
    offsets = (unit * N + n)[:, None] * W + (tile + 1) * (2 * TILE_TOKENS * W) + w[None, :]
    return tl.load(codes.to(tl.pointer_type(tl.uint8)) + offsets, (w < W)[None, :], 0).to(tl.int16)


@triton.jit
def _codes(
    words, third, PLANE: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr, RAW: tl.constexpr, dtype: tl.constexpr
):
    """Codes at bits PLANE * BITS of int16 words, less 2 ** (BITS - 1), or RAW; of 3 bits one is in `third`."""
    MANTISSA: tl.constexpr = 7 if dtype == tl.bfloat16 else 10
    if ASM and BITS == 3:
        third_asm: tl.constexpr = _unpacking_third_asm(PLANE, MANTISSA, RAW)
        codes = tl.inline_asm_elementwise(third_asm, "=r,r,r", [words, third], dtype.value, is_pure=True, pack=2)
    elif ASM:
        asm: tl.constexpr = _raw_asm(PLANE, BITS) if RAW else _unpacking_asm(PLANE, BITS, MANTISSA)
        codes = tl.inline_asm_elementwise(asm, "=r,r", [words], dtype.value, is_pure=True, pack=2)
    elif BITS == 3:
        low, high = (words >> (PLANE * 2)) & 3, (third >> PLANE) & 1
        codes = ((low | high << 2).to(tl.float32) - 4).to(dtype)
    else:
        low = (words >> (PLANE * BITS)) & (2**BITS - 1)
        codes = (low.to(tl.float32) - 2 ** (BITS - 1)).to(dtype)
    return codes


@triton.jit
def _split_words(words, ASM: tl.constexpr, dtype: tl.constexpr):
    """The 16-bit floats in the low and in the high half of 32-bit words."""
    if ASM:  # of two words at once
        low: tl.constexpr = "prmt.b32 $0, $1, $2, 0x5410;"
        high: tl.constexpr = "prmt.b32 $0, $1, $2, 0x7632;"
        even = tl.inline_asm_elementwise(low, "=r,r,r", [words], dtype.value, is_pure=True, pack=2)
        odd = tl.inline_asm_elementwise(high, "=r,r,r", [words], dtype.value, is_pure=True, pack=2)
    else:
        even, odd = _halves(words, dtype)
    return even.to(dtype), odd.to(dtype)


@triton.jit
def _product(x, y, ASM: tl.constexpr):
    """Products of floats, rounded once; the compiler has none of bfloat16."""
    dtype: tl.constexpr = x.dtype
    if ASM:
        kind: tl.constexpr = "bf16x2" if dtype == tl.bfloat16 else "f16x2"
        asm: tl.constexpr = "{.reg .b32 none; mov.b32 none, 0x80008000; fma.rn." + kind + " $0, $1, $2, none;}"
        product = tl.inline_asm_elementwise(asm, "=r,r,r", [x, y], dtype.value, is_pure=True, pack=2)
    else:
        product = (x.to(tl.float32) * y.to(tl.float32)).to(dtype)
    return product


@triton.jit
def _pairs(ptr, index, mask, MINIMA: tl.constexpr, HALF: tl.constexpr, dtype: tl.constexpr):
    """Scales 2 * index and 2 * index + 1 of a row, then their zeros, in fp32; minima lie MINIMA elements after scales.

    One load gets all, in words of 32 bits: cp.async copies no less, and only what a dot needs is under way early.
    """
    part = tl.arange(0, 2)[None, :]
    if dtype == tl.float32:
        even_ptr = ptr + 2 * index[:, None] + MINIMA * part
        even, even_low = tl.split(tl.load(even_ptr, mask[:, None], 0.0))
        odd, odd_low = tl.split(tl.load(even_ptr + 1, mask[:, None], 0.0))
    else:
        words = tl.load(ptr.to(tl.pointer_type(tl.int32)) + index[:, None] + MINIMA // 2 * part, mask[:, None], 0)
        scales, lows = tl.split(words)
        even, odd = _halves(scales, dtype)
        even_low, odd_low = _halves(lows, dtype)
    if HALF:
        even_low, odd_low = even_low + even * HALF, odd_low + odd * HALF
    return even, odd, even_low, odd_low


@triton.jit
def _columns(x, COUNT: tl.constexpr):
    """The columns of x [K, COUNT], 1, 2 or 4."""
    if COUNT == 1:
        columns = (tl.reshape(x, [x.shape[0]]),)
    elif COUNT == 2:
        columns = tl.split(x)
    else:
        even, odd = tl.split(tl.reshape(x, [x.shape[0], 2, 2]))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        columns = (first, second, third, fourth)
    return columns


@triton.jit
def _channel_scales(
    ptr,
    kw,
    W: tl.constexpr,
    KW: tl.constexpr,
    BYTES: tl.constexpr,
    MINIMA: tl.constexpr,
    ASM: tl.constexpr,
    dtype: tl.constexpr,
):
    """Scale and minimum of the channels of each plane; `kw` counts the words of several groups, KW each."""
    index, mask = kw // KW * (BYTES * W) + kw % KW, kw % KW < W
    scales, lows = (), ()
    if dtype == tl.float32:
        for byte in tl.static_range(BYTES):
            pairs = _pairs(ptr, byte * W + index, mask, MINIMA, 0, dtype)
            scales += (pairs[0], pairs[1])
            lows += (pairs[2], pairs[3])
    else:
        part = tl.arange(0, 2 * BYTES)[None, :]  # one load has enough words that each thread copies one
        index = index[:, None] + part // 2 * W + part % 2 * (MINIMA // 2)
        words = tl.load(ptr.to(tl.pointer_type(tl.int32)) + index, mask[:, None], 0)
        scale_words, low_words = tl.split(tl.reshape(words, [kw.shape[0], BYTES, 2]))
        scale_words = _columns(scale_words, BYTES)
        low_words = _columns(low_words, BYTES)
        for byte in tl.static_range(BYTES):
            scales += _split_words(scale_words[byte], ASM, dtype)
            lows += _split_words(low_words[byte], ASM, dtype)
    return scales, lows


@triton.jit
def _halves(words, dtype: tl.constexpr):
    """The 16-bit floats in the low and in the high half of words, in fp32."""
    if dtype == tl.bfloat16:
        return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)
    low = words.to(tl.int16)
    high = (words >> 16).to(tl.int16)
    return low.to(tl.float16, bitcast=True).to(tl.float32), high.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _token_scales(ptr, tile, token, HALF: tl.constexpr, dtype: tl.constexpr):
    """Scale and zero of some tokens of a tile, where a token has one of each; to join pairs would slow the dots."""
    pairs = _pairs(ptr + tile * (2 * TILE_TOKENS), token // 2, token >= 0, TILE_TOKENS, HALF, dtype)
    return tl.where(token % 2 == 0, pairs[0], pairs[1]), tl.where(token % 2 == 0, pairs[2], pairs[3])


@triton.jit
def _group_scales(ptr, tile, token, channel, mask, GROUPS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr):
    """Scale and zero [N, channels] of some tokens and channels of a tile, where a token has GROUPS of each."""
    pointers = ptr + (tile * (2 * TILE_TOKENS) + token)[:, None] * GROUPS + (channel // (D // GROUPS))[None, :]
    scale = tl.load(pointers, mask[None, :], 0.0).to(tl.float32)
    return scale, tl.load(pointers + TILE_TOKENS * GROUPS, mask[None, :], 0.0).to(tl.float32) + scale * HALF


@triton.jit
def _spread(x, HEADS: tl.constexpr, M: tl.constexpr):
    """Each row of x [R, K] for HEADS rows, and all of them again and again, [M, K]."""
    R: tl.constexpr = x.shape[0]
    K: tl.constexpr = x.shape[1]
    return _repeated(tl.reshape(tl.broadcast_to(x[:, None], [R, HEADS, K]), [R * HEADS, K]), M)


@triton.jit
def _head_sums(x, HEADS: tl.constexpr, M: tl.constexpr):
    """The sums of the rows of x [R, K] that are a head's, again and again, [M, K]."""
    R: tl.constexpr = x.shape[0]
    K: tl.constexpr = x.shape[1]
    return _repeated(tl.sum(tl.reshape(x, [R // HEADS, HEADS, K]), 0), M)


@triton.jit
def _repeated(x, M: tl.constexpr):
    """The rows of x [R, K] again and again, [M, K]."""
    R: tl.constexpr = x.shape[0]
    K: tl.constexpr = x.shape[1]
    return tl.reshape(tl.broadcast_to(x[None], [M // R, R, K]), [M, K])


@triton.jit
def _side_scales(
    ptr,
    tile,
    first,
    side: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIDES: tl.constexpr,
    HALF: tl.constexpr,
    dtype: tl.constexpr,
):
    """Scale and zero of some tokens of a tile, where a token has GROUPS of each: of every row [M, N], whose group is
    one of a side, or [1, N].
    """
    if GROUPS == 1:
        factor, zero = _token_scales(ptr, tile, first + tl.arange(0, N), HALF, dtype)
        factor, zero = factor[None, :], zero[None, :]
    else:
        SIDE_GROUPS: tl.constexpr = GROUPS // SIDES
        pair = tl.arange(0, N * SIDE_GROUPS // 2)
        index = (
            first * (GROUPS // 2)
            + pair // (SIDE_GROUPS // 2) * (GROUPS // 2)
            + (side * (SIDE_GROUPS // 2) + pair % (SIDE_GROUPS // 2))
        )
        pairs = _pairs(ptr + tile * (2 * TILE_TOKENS * GROUPS), index, index >= 0, TILE_TOKENS * GROUPS, HALF, dtype)
        # sums of one: past a join, the compiler would lay out weights as if they were loaded with half as many bits
        factor = tl.sum(tl.reshape(tl.join(pairs[0], pairs[1]), [1, N, SIDE_GROUPS]), 0)
        zero = tl.sum(tl.reshape(tl.join(pairs[2], pairs[3]), [1, N, SIDE_GROUPS]), 0)
        factor = _spread(tl.trans(factor), HEADS, M)
        zero = _spread(tl.trans(zero), HEADS, M)
    return factor, zero


@triton.jit
def _over_tiles(
    q_ptr,  # [G, D]
    k_codes,  # int16 words [tiles, TILE, D * K_BITS / 16]
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
    K_BITS: tl.constexpr,
    V_BITS: tl.constexpr,
    KEY_ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIDES: tl.constexpr,
    KW: tl.constexpr,
    VW: tl.constexpr,
    CAP: tl.constexpr,
    ASM: tl.constexpr,
    RING: tl.constexpr,
):
    """A head's units `begin` to `end`, N packed tokens each.

    All of them are visible; with RING, of `packed` tokens after the sinks those that the token `newest` still sees, and
    tiles lie round a ring of `count`.
    A word of keys or values has PLANES codes; plane p of all W words is channels p // 2 * 2 * W + p % 2, + 2, ... and
    gets a dot of its own. Where a scale is a channel's of keys or a token's, queries, scores or weights take it: codes
    stay integers.
    Where SIDES is not 0, rows that a group of queries would leave empty take the groups that have a scale: row
    g * HEADS + h is head h, times the scales of group g. What it gives elsewhere than in its group is left out. Where
    rows are too few, planes are in SIDES of as many groups each, and each side has weights of its own. Only keys may
    take more, Q_ROWS where they have groups of tokens: a warp leaves out the products of others.
    """
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    K_PLANES: tl.constexpr = _word_codes(K_BITS)
    V_PLANES: tl.constexpr = _word_codes(V_BITS)
    K_W: tl.constexpr = D // K_PLANES
    V_W: tl.constexpr = D // V_PLANES
    K_HALF: tl.constexpr = 2 ** (K_BITS - 1)
    V_HALF: tl.constexpr = 2 ** (V_BITS - 1)
    SPREAD: tl.constexpr = SIDES > 0
    # raw codes are multiples of 2 ** -133: what they multiply is 2 ** 64 times as much, and sums are 2 ** -69 of theirs
    V_RAW: tl.constexpr = ASM and dtype == tl.bfloat16 and (GROUPS == 1 or SPREAD)
    K_RAW: tl.constexpr = ASM and dtype == tl.bfloat16 and (GROUPS == 1 or KEY_ROWS > 0 or SPREAD)
    K_BIAS: tl.constexpr = 0 if K_RAW else K_HALF
    V_BIAS: tl.constexpr = 0 if V_RAW else V_HALF
    RISE: tl.constexpr = 64 if V_RAW else 0
    SMALL: tl.constexpr = 2.0**-69 if K_RAW else 1.0
    scale = scale * (1.0 / SMALL)
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    kw = tl.arange(0, KW)
    vw = tl.arange(0, VW)
    HEADS: tl.constexpr = _power(G) if SPREAD else M
    K_SIDE: tl.constexpr = K_PLANES // max(SIDES, 1)  # planes
    V_SIDE: tl.constexpr = V_PLANES // max(SIDES, 1)
    UNIT_ROWS: tl.constexpr = max(KEY_ROWS * N // TILE_TOKENS, 1)
    Q_ROWS: tl.constexpr = max(UNIT_ROWS * HEADS, M) if SPREAD else M  # rows that ask keys
    R: tl.constexpr = Q_ROWS if SPREAD else max(_power(G), 128 // KW)  # fewer: every thread would add up all channels
    a = tl.arange(0, Q_ROWS)
    r = tl.arange(0, R)
    q, exact_q, acc, q_sums, zeros = (), (), (), (), ()
    # without matrix units tokens lie elsewhere; and a product fused with a sum over lanes differs from lane to lane
    LANES: tl.constexpr = N if dtype == tl.float32 else min(N, LANE_TOKENS)
    for side in tl.static_range(max(SIDES, 1)):
        q_sum = tl.zeros([M], tl.float32)
        for plane in tl.static_range(side * K_SIDE, (side + 1) * K_SIDE):
            channel = plane // 2 * 2 * K_W + 2 * kw + plane % 2
            q_pointers = q_ptr + (a % HEADS)[:, None] * q_head + channel[None, :]
            q_mask = (a % HEADS < G)[:, None] & (kw < K_W)[None, :]
            if SPREAD and KEY_ROWS == 0:
                row_group = a // HEADS + side * (GROUPS // SIDES)
                q_mask &= row_group[:, None] == (channel // (D // GROUPS))[None, :]
            plane_q = tl.load(q_pointers, q_mask, 0.0)
            if KEY_ROWS == 0:
                q_sum += tl.sum(plane_q.to(tl.float32), 1) * SMALL
            if K_RAW:  # exactly
                rise = 2.0 ** (64 - _raw_place(_place(plane, K_PLANES), K_BITS))
                plane_q = (plane_q.to(tl.float32) * rise).to(dtype)
            q += (plane_q,)
            exact_pointers = q_ptr + (r % HEADS)[:, None] * q_head + channel[None, :]
            exact_q += (
                tl.load(exact_pointers, (r % HEADS < G)[:, None] & (kw < K_W)[None, :], 0.0).to(tl.float32) * SMALL,
            )
        for _ in tl.static_range(V_SIDE):
            acc += (tl.zeros([M, VW], tl.float32),)
        q_sums += (q_sum,)
        zeros += (tl.zeros([M, LANES], tl.float32),)  # what the zeros of values add to every channel of a side
    top = tl.full([M], LOWEST, tl.float32)
    total = tl.zeros([M, LANES], tl.float32)
    for unit in range(begin, end):
        tile = unit * N // TILE_TOKENS
        first = unit * N - tile * TILE_TOKENS
        k_start = unit * (N * K_W)
        v_start = unit * (N * V_W)
        k_third, v_third = n, n
        if K_BITS == 3:
            k_start += tile * (TILE_TOKENS * K_W // 2)
            k_third = _third_bits(k_codes, unit, n, kw, D, N)
        if V_BITS == 3:
            v_start += tile * (TILE_TOKENS * V_W // 2)
            v_third = _third_bits(v_codes, unit, n, vw, D, N)
        k = tl.load(k_codes + k_start + (n[:, None] * K_W + kw[None, :]), (kw < K_W)[None, :], 0)
        v = tl.load(v_codes + v_start + (n[:, None] * V_W + vw[None, :]), (vw < V_W)[None, :], 0)

        if KEY_ROWS > 0:
            row_scales_ptr = k_scales + (tile * (2 * KEY_ROWS) + first * KEY_ROWS // TILE_TOKENS) * D
            scaled_q, zero_products = (), tl.zeros([R, KW], tl.float32)
            groups = tl.arange(0, UNIT_ROWS * KW)
            factors, lows = _channel_scales(row_scales_ptr, groups, K_W, KW, K_PLANES // 2, KEY_ROWS * D, ASM, dtype)
            for plane in tl.static_range(K_PLANES):
                factor, zero = factors[plane], lows[plane].to(tl.float32)
                if not K_RAW:
                    zero += factor.to(tl.float32) * K_HALF
                if SPREAD:
                    factor = _spread(tl.reshape(factor, [UNIT_ROWS, KW]), HEADS, Q_ROWS)
                    zero = _spread(tl.reshape(zero, [UNIT_ROWS, KW]), HEADS, Q_ROWS)
                else:
                    factor, zero = factor[None, :], zero[None, :]
                scaled_q += (_product(q[plane], factor, ASM),)
                zero_products += exact_q[plane] * zero
            scores = tl.broadcast_to(_repeated(tl.sum(zero_products, 1)[:, None], Q_ROWS), [Q_ROWS, N])
            for plane in tl.static_range(K_PLANES):
                codes = _codes(k, k_third, _place(plane, K_PLANES), K_BITS, ASM, K_RAW, dtype)
                scores = tl.dot(scaled_q[plane], tl.trans(codes), scores, input_precision="ieee")
            if UNIT_ROWS > 1:
                in_rows = (a // HEADS)[:, None] == (n * UNIT_ROWS // N)[None, :]
                scores = _head_sums(tl.where(in_rows, scores, 0.0), HEADS, M)
        else:
            for side in tl.static_range(max(SIDES, 1)):
                side_scores = tl.zeros([M, N], tl.float32)
                for plane in tl.static_range(side * K_SIDE, (side + 1) * K_SIDE):
                    codes = _codes(k, k_third, _place(plane, K_PLANES), K_BITS, ASM, K_RAW, dtype)
                    if GROUPS > 1 and not SPREAD:
                        channel = plane // 2 * 2 * K_W + 2 * kw + plane % 2
                        k_factor, k_zero = _group_scales(
                            k_scales, tile, first + n, channel, kw < K_W, GROUPS, D, K_HALF
                        )
                        codes = (codes.to(tl.float32) * k_factor + k_zero).to(dtype)
                    side_scores = tl.dot(q[plane], tl.trans(codes), side_scores, input_precision="ieee")
                if GROUPS == 1 or SPREAD:
                    k_factor, k_zero = _side_scales(
                        k_scales, tile, first, side, N, M, HEADS, GROUPS, SIDES, K_BIAS, dtype
                    )
                    side_scores = side_scores * k_factor + q_sums[side][:, None] * k_zero
                if side == 0:
                    scores = side_scores
                else:
                    scores += side_scores
            if SPREAD:
                scores = _head_sums(scores, HEADS, M)
        if CAP:
            scores = _capped(scores * scale, cap, CAP)
        if RING:
            last_tile = packed // TILE_TOKENS - 1
            token = (last_tile - (last_tile - tile) % count) * TILE_TOKENS + first + n
            scores = tl.where((newest - token < recent)[None, :], scores, float("-inf"))

        factor = 1.0 if CAP else scale  # which is positive, and a part of the subtraction
        new_top = tl.maximum(top, tl.max(scores, 1) * factor - RISE)
        weights = tl.exp2(scores * factor - new_top[:, None])
        fade = tl.exp2(top - new_top)
        total = total * fade[:, None] + _in_part(weights, LANES)
        old_acc, old_zeros, acc, zeros = acc, zeros, (), ()
        for side in tl.static_range(max(SIDES, 1)):
            if GROUPS == 1 or SPREAD:
                v_factor, v_zero = _side_scales(v_scales, tile, first, side, N, M, HEADS, GROUPS, SIDES, V_BIAS, dtype)
                zeros += (old_zeros[side] * fade[:, None] + _in_part(weights * v_zero, LANES),)
                side_weights = weights * v_factor
            else:
                zeros += (old_zeros[side],)
                side_weights = weights
            for plane in tl.static_range(side * V_SIDE, (side + 1) * V_SIDE):
                codes = _codes(v, v_third, _place(plane, V_PLANES), V_BITS, ASM, V_RAW, dtype)
                if GROUPS > 1 and not SPREAD:
                    v_channel = plane // 2 * 2 * V_W + 2 * vw + plane % 2
                    v_factor, v_zero = _group_scales(v_scales, tile, first + n, v_channel, vw < V_W, GROUPS, D, V_HALF)
                    codes = (codes.to(tl.float32) * v_factor + v_zero).to(dtype)
                acc += (tl.dot(side_weights.to(dtype), codes, old_acc[plane] * fade[:, None], input_precision="ieee"),)
        top = new_top
    total = tl.sum(total, 1)
    safe_total = tl.where(total > 0, total, 1.0)
    tl.store(lse_ptr + part, tl.where(total > 0, top + tl.log2(safe_total), LOWEST), m < G)
    for plane in tl.static_range(V_PLANES):
        v_channel = plane // 2 * 2 * V_W + 2 * vw + plane % 2
        plane_out = acc[plane]
        if V_RAW:  # in two steps: their product is more than a float holds
            plane_out = plane_out * 2.0**64 * 2.0 ** (69 - _raw_place(_place(plane, V_PLANES), V_BITS))
        plane_out += tl.sum(zeros[plane // V_SIDE], 1)[:, None]
        if SPREAD and GROUPS > 1:
            row_group = m // HEADS + plane // V_SIDE * (GROUPS // SIDES)
            in_group = row_group[:, None] == (v_channel // (D // GROUPS))[None, :]
            plane_out = _head_sums(tl.where(in_group, plane_out, 0.0), HEADS, M)
        out = plane_out / safe_total[:, None]
        tl.store(partial_ptr + part[:, None] * D + v_channel[None, :], out, (m < G)[:, None] & (vw < V_W)[None, :])


def options(head_dim: int, query_rows: int, quantization: Quantization) -> tuple[int, dict]:
    """How the kernel walks tiles: rows of its dots, of which `query_rows` have queries, and options.

    Widths and tokens are not measured: they follow from the compiled code. A dot that is wider than it is tall is split
    over warps by columns; a square one has each warp compute all of it.
    """
    planes = [_word_codes(bits) for bits in quantization.widths]
    key_width, value_width = (_padded(head_dim // count) for count in planes)
    # with whole tiles of 3 bits registers spill on H100
    max_tokens = TILE // 2 if 3 in quantization.widths else TILE
    tokens = min(max(TILE_BYTES // (2 * max(key_width, value_width)), 16), max_tokens)
    key_rows = 0
    if quantization.scheme == "kivi":
        key_rows, _ = quantization.key_groups(head_dim)
    _, groups = quantization.value_groups(head_dim)
    members = max(16, query_rows)
    half_tokens = min(tokens, TILE // 2)
    sides = 0
    max_rows, value_dot_rows = min(SHARED_ROWS, SHARED_OUTPUT // head_dim), query_rows * groups

    def key_dot_rows(tokens: int) -> int:
        """Rows for the queries of every group of so many tokens."""
        return query_rows * key_rows * tokens // TILE

    if max(key_rows, groups) > 1 and groups & (groups - 1) == 0:
        fewer_tokens = tokens if key_dot_rows(tokens) <= max_rows else half_tokens
        max_sides = max(min(groups, *planes) // 2, 1)  # sides of two groups of channels or more
        if max(key_dot_rows(tokens), value_dot_rows) <= members:
            sides = 1
        elif key_dot_rows(fewer_tokens) <= max_rows and value_dot_rows <= members * max_sides:
            tokens, sides = fewer_tokens, 1 if value_dot_rows <= members else max_sides
        elif max(key_dot_rows(half_tokens), value_dot_rows) <= max_rows:
            members, tokens, sides = max(key_dot_rows(half_tokens), value_dot_rows), half_tokens, 1
    if key_rows and not sides:
        tokens = min(tokens, TILE // key_rows)  # a unit has one row of scales
    return members, {
        "OVER_TILES": _over_tiles,
        "PACKED_N": tokens,
        "K_BITS": quantization.widths.keys,
        "V_BITS": quantization.widths.values,
        "KEY_ROWS": key_rows,
        "GROUPS": groups,
        "SIDES": sides,
        "KW": key_width,
        "VW": max(value_width, 2 * members),
    }
