"""Decode over packed tiles: codes become floats by bit operations, and scales go into queries, scores or weights.

The instructions of a warp bound it, not the memory. So each warp has a softmax of its own over its tokens, and lanes
sum what they have; warps and lanes are joined once, after a loop. And codes stay as they are: bits of a float under the
least exponent, an integer times 2 ** -133 in bfloat16 and 2 ** -24 in float16.
"""

from .kv_kernels import LOWEST, TILE_BYTES, TILE_TOKENS, _capped, _padded, _power, tl, triton
from .kv_layout import TILE, Quantization

# tokens beside each other of which a warp has one of each in a lane: the matrix units give a thread every eighth
LANE_TOKENS = tl.constexpr(8)
STRIPS = 4  # of tokens, as there are warps
MATRIX_ROWS, MATRIX_COLUMNS = 16, 8  # that matrix units take at once
OUTPUT = 2048  # channels of a head times columns of dots; with more, registers spill


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
def _raw_place(plane: int, bits: int, asm: bool) -> int:
    """Where a raw code of a plane lies in the low byte of its float: it counts 2 ** place times as much."""
    return 0 if bits == 3 or not asm else plane * bits % 8


@triton.constexpr_function
def _raw_exponent(dtype) -> int:
    """The integer x in the low bits of a float, all others of which are zero, is x * 2 ** -exponent."""
    return {"bf16": 133, "fp16": 24}[dtype.name]


@triton.constexpr_function
def _place(plane: int, planes: int) -> int:
    """Where a word has the codes of a plane."""
    return plane % 2 * (planes // 2) + plane // 2


@triton.jit
def _channels(plane: tl.constexpr, word, W: tl.constexpr):
    """The channels that a plane has of words."""
    return plane // 2 * 2 * W + 2 * word + plane % 2


@triton.constexpr_function
def _raw_asm(plane: int, bits: int) -> str:
    """Codes of two words as 16-bit floats with all other bits zero, in one instruction or two.

    The byte b as a bfloat16 is b * 2 ** -133 exactly: the numbers under the least exponent are as far apart as those
    with it, so that the eighth bit may lie in the exponent. Matrix units multiply such numbers as any others.
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
def _words(codes, unit, token, word, pair, D: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr):
    """Words of tokens of a unit, which broadcast against each other, and the bytes of third bits that go with them.

    These are loaded as pairs of words have them: from bytes, the compiler would lay out dots for four in a register.
    """
    W: tl.constexpr = D // _word_codes(BITS)
    start = unit * (N * W)
    tile = unit * N // TILE_TOKENS
    if BITS == 3:
        start += tile * (TILE_TOKENS * W // 2)
    words = tl.load(codes + start + (token * W + word), word < W, 0)
    third = words
    if BITS == 3:  # after the words of a tile
        third_start = (tile + 1) * (TILE_TOKENS * W) + unit * (N * W // 2)
        pairs = tl.load(codes + third_start + (token * (W // 2) + pair), pair < W // 2, 0)
        S: tl.constexpr = pairs.shape[0]
        A: tl.constexpr = pairs.shape[1]
        B: tl.constexpr = pairs.shape[2]
        if words.shape[1] > A:
            third = tl.reshape(tl.broadcast_to(pairs[:, :, None, :], [S, A, 2, B]), words.shape)
        else:
            third = tl.reshape(tl.broadcast_to(pairs[:, :, :, None], [S, A, B, 2]), words.shape)
        third = third >> (word % 2 * 8).to(tl.int16)
    return words, third


@triton.jit
def _codes(
    words, third, PLANE: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr, RAW: tl.constexpr, dtype: tl.constexpr
):
    """Codes at bits PLANE * BITS of int16 words, less 2 ** (BITS - 1), or RAW; of 3 bits one is in `third`.

    By assembly, RAW codes are bits of a float: `_raw_exponent` and `_raw_place` say what they count.
    """
    MANTISSA: tl.constexpr = 7 if dtype == tl.bfloat16 else 10
    if ASM and BITS == 3:
        third_asm: tl.constexpr = _unpacking_third_asm(PLANE, MANTISSA, RAW)
        codes = tl.inline_asm_elementwise(third_asm, "=r,r,r", [words, third], dtype.value, is_pure=True, pack=2)
    elif ASM:
        asm: tl.constexpr = _raw_asm(PLANE, BITS) if RAW else _unpacking_asm(PLANE, BITS, MANTISSA)
        codes = tl.inline_asm_elementwise(asm, "=r,r", [words], dtype.value, is_pure=True, pack=2)
    else:
        if BITS == 3:
            codes = (words >> (PLANE * 2)) & 3 | ((third >> PLANE) & 1) << 2
        else:
            codes = (words >> (PLANE * BITS)) & (2**BITS - 1)
        codes = (codes.to(tl.float32) - (0 if RAW else 2 ** (BITS - 1))).to(dtype)
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
def _pairs(ptr, index, MINIMA: tl.constexpr, dtype: tl.constexpr):
    """Scales 2 * index and 2 * index + 1, then their minima, in fp32; minima lie MINIMA elements after scales.

    One load gets all, in words of 32 bits: cp.async copies no less, and only what a dot needs is under way early.
    """
    part = tl.arange(0, 2)[None, :]
    if dtype == tl.float32:
        even_ptr = ptr + 2 * index[:, None] + MINIMA * part
        even, even_low = tl.split(tl.load(even_ptr))
        odd, odd_low = tl.split(tl.load(even_ptr + 1))
    else:
        words = tl.load(ptr.to(tl.pointer_type(tl.int32)) + index[:, None] + MINIMA // 2 * part)
        scales, lows = tl.split(words)
        even, odd = _halves(scales, dtype)
        even_low, odd_low = _halves(lows, dtype)
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
            even_ptr = ptr + 2 * (byte * W + index)
            scales += (tl.load(even_ptr, mask, 0.0), tl.load(even_ptr + 1, mask, 0.0))
            lows += (tl.load(even_ptr + MINIMA, mask, 0.0), tl.load(even_ptr + MINIMA + 1, mask, 0.0))
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
def _token_scales(ptr, tile, token, STRIPS: tl.constexpr, GROUPS: tl.constexpr, dtype: tl.constexpr):
    """Scales of tokens [N] of a tile as [STRIPS, tokens, 1], one for each of their GROUPS, and the minima."""
    SHAPE: tl.constexpr = [STRIPS, token.shape[0] // STRIPS, 1]
    MINIMA: tl.constexpr = TILE_TOKENS * GROUPS
    ptr += tile * (2 * MINIMA)
    scales, lows = (), ()
    if GROUPS == 1:  # pairs of tokens; to join them would slow the dots
        pairs = _pairs(ptr, token // 2, MINIMA, dtype)
        scales += (tl.reshape(tl.where(token % 2 == 0, pairs[0], pairs[1]), SHAPE),)
        lows += (tl.reshape(tl.where(token % 2 == 0, pairs[2], pairs[3]), SHAPE),)
    else:
        for pair in tl.static_range(GROUPS // 2):
            pairs = _pairs(ptr, token * (GROUPS // 2) + pair, MINIMA, dtype)
            scales += (tl.reshape(pairs[0], SHAPE), tl.reshape(pairs[1], SHAPE))
            lows += (tl.reshape(pairs[2], SHAPE), tl.reshape(pairs[3], SHAPE))
    return scales, lows


@triton.jit
def _of_columns(groups, column_group, SET: tl.constexpr, COLUMNS: tl.constexpr):
    """What the columns of a set of COLUMNS groups take: of each group there is one."""
    taken = groups[SET * COLUMNS]
    for group in tl.static_range(1, COLUMNS):
        taken = tl.where(column_group == group, groups[SET * COLUMNS + group], taken)
    return taken


@triton.jit
def _group_scales(ptr, tile, token, channel, GROUPS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr):
    """Scale and zero of some tokens and channels of a tile, where a token has GROUPS of each."""
    group = tl.minimum(channel // (D // GROUPS), GROUPS - 1)  # of padding too
    pointers = ptr + (tile * (2 * TILE_TOKENS) + token) * GROUPS + group
    scale = tl.load(pointers).to(tl.float32)
    return scale, tl.load(pointers + TILE_TOKENS * GROUPS).to(tl.float32) + scale * HALF


@triton.jit
def _head_sums(x, HEADS: tl.constexpr):
    """The sums of the columns of x [.., .., M] that are a head's, for each of them."""
    A: tl.constexpr = x.shape[0]
    B: tl.constexpr = x.shape[1]
    M: tl.constexpr = x.shape[2]
    sums = tl.sum(tl.reshape(x, [A, B, M // HEADS, HEADS]), 2)
    return tl.reshape(tl.broadcast_to(sums[:, :, None, :], [A, B, M // HEADS, HEADS]), [A, B, M])


@triton.jit
def _in_part(x, LANES: tl.constexpr):
    """Sums over tokens of x [STRIPS, T, M] as far as a lane has them, [STRIPS, LANES, M]."""
    S: tl.constexpr = x.shape[0]
    T: tl.constexpr = x.shape[1]
    return tl.sum(tl.reshape(x, [S, T // LANES, LANES, x.shape[2]]), 1) if T > LANES else x


@triton.jit
def _of_strips(x, STRIPS: tl.constexpr):
    """The matrices of x [rows, .., ..] for each strip of tokens, [STRIPS, .., ..]."""
    ROWS: tl.constexpr = x.shape[0]
    A: tl.constexpr = x.shape[1]
    B: tl.constexpr = x.shape[2]
    return tl.reshape(tl.broadcast_to(x[:, None], [ROWS, STRIPS // ROWS, A, B]), [STRIPS, A, B])


@triton.jit
def _over_tiles(
    q_ptr,  # [G, D]
    k_codes,  # int16 words [tiles, TILE, D * K_BITS / 16]
    k_scales,  # [tiles, 2, ...]
    v_codes,
    v_scales,
    partial_ptr,  # [programs + rows, G, D]
    lse_ptr,  # [programs + rows, G]
    part_number,  # of the first query's
    q_head,
    begin,
    end,
    scale,
    cap,
    packed,
    newest,
    recent,
    count,
    page_ptr,  # [tiles], or None
    code_page,
    scale_page,
    G: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    STRIPS: tl.constexpr,
    K_BITS: tl.constexpr,
    V_BITS: tl.constexpr,
    KEY_ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    K_PARTS: tl.constexpr,
    V_PARTS: tl.constexpr,
    KW: tl.constexpr,
    VW: tl.constexpr,
    CAP: tl.constexpr,
    ASM: tl.constexpr,
    RING: tl.constexpr,
):
    """A head's units `begin` to `end`, N packed tokens each.

    All of them are visible; with RING, of `packed` tokens after the sinks those that the token `newest` still sees, and
    tiles lie round a ring of `count`. With `page_ptr`, it says in which page a tile lies, `code_page` words and
    `scale_page` scales from one to the next; else tiles follow one another.
    A unit is STRIPS of tokens, and each has a softmax of its own, so that warps exchange nothing before the last unit.
    Codes are the taller factor of each dot and queries the columns of the other one: matrix units take 16 rows, but 8
    columns.
    A word of keys or values has PLANES codes; plane p of all W words is channels p // 2 * 2 * W + p % 2, + 2, ... and
    gets a dot of its own. Where a scale is a channel's of keys or a token's, queries, scores or weights take it: codes
    stay integers.
    Where a token has GROUPS of scales, columns that a group of queries would leave empty take COLUMNS of them: column
    g * HEADS + h is head h, times the scales of group g. What it gives elsewhere than in its group is left out. Where
    this is not all of them, planes, and then words, are in sets of as many groups each, and each set has factors of its
    own. Where COLUMNS is 0, codes are multiplied one by one.
    """
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    K_PLANES: tl.constexpr = _word_codes(K_BITS)
    V_PLANES: tl.constexpr = _word_codes(V_BITS)
    K_W: tl.constexpr = D // K_PLANES
    V_W: tl.constexpr = D // V_PLANES
    SETS: tl.constexpr = GROUPS // COLUMNS if COLUMNS > 0 else 1
    K_SETS: tl.constexpr = 1 if KEY_ROWS > 0 else SETS
    K_SIDE: tl.constexpr = K_PLANES * K_PARTS // K_SETS  # planes
    V_SIDE: tl.constexpr = V_PLANES * V_PARTS // SETS
    HEADS: tl.constexpr = _power(G) if COLUMNS > 1 else M
    # raw codes are integers times 2 ** -EXPONENT; sums of them stay far above the least floats
    EXPONENT: tl.constexpr = _raw_exponent(dtype) if ASM else 0
    K_RAW: tl.constexpr = KEY_ROWS > 0 or COLUMNS > 0
    V_RAW: tl.constexpr = COLUMNS > 0
    K_RISE: tl.constexpr = EXPONENT // 2 if K_RAW and dtype == tl.bfloat16 else 0
    RISE: tl.constexpr = EXPONENT // 2 if V_RAW and dtype == tl.bfloat16 else 0
    SMALL: tl.constexpr = 2.0 ** (K_RISE - EXPONENT) if K_RAW else 1.0
    scale = scale * (1.0 / SMALL)
    T: tl.constexpr = N // STRIPS
    UNIT_ROWS: tl.constexpr = max(KEY_ROWS * N // TILE_TOKENS, 1)
    # without matrix units tokens lie elsewhere; and a product fused with a sum over lanes differs from lane to lane
    LANES: tl.constexpr = T if dtype == tl.float32 else min(T, LANE_TOKENS)
    n = tl.arange(0, N)
    m = tl.arange(0, M)[None, None, :]
    token = (tl.arange(0, STRIPS) * T)[:, None] + tl.arange(0, T)[None, :]
    kw = tl.arange(0, KW)
    vw = tl.arange(0, VW)
    q, exact_q, q_sums, acc, zeros = (), (), (), (), ()
    for number in tl.static_range(K_SETS):
        q_sum = tl.zeros([1, 1, M], tl.float32)
        word = number % K_PARTS * KW + kw
        for plane in tl.static_range(number // K_PARTS * K_SIDE, (number // K_PARTS + 1) * K_SIDE):
            channel = _channels(plane, word, K_W)[None, :, None]
            q_mask = (m % HEADS < G) & (word < K_W)[None, :, None]
            if KEY_ROWS == 0 and SETS * COLUMNS > 1:
                q_mask &= channel // (D // GROUPS) == number * COLUMNS + m // HEADS
            plane_q = tl.load(q_ptr + m % HEADS * q_head + channel, q_mask, 0.0)
            if KEY_ROWS > 0:
                exact_q += (plane_q,)
            else:
                q_sum += tl.sum(plane_q.to(tl.float32), 1, keep_dims=True) * SMALL
            if K_RAW:  # exactly in bfloat16
                rise = 2.0 ** (K_RISE - _raw_place(_place(plane, K_PLANES), K_BITS, ASM))
                plane_q = (plane_q.to(tl.float32) * rise).to(dtype)
            q += (plane_q,)
        q_sums += (q_sum,)
    for _ in tl.static_range(SETS):
        for _ in tl.static_range(V_SIDE):
            acc += (tl.zeros([STRIPS, VW, M], tl.float32),)
        zeros += (tl.zeros([STRIPS, LANES, M], tl.float32),)  # what minima of values add to every channel of a set
    top = tl.full([STRIPS, 1, M], LOWEST, tl.float32)
    total = tl.zeros([STRIPS, LANES, M], tl.float32)
    for unit in range(begin, end):
        place = unit
        unit_k_codes = k_codes
        unit_k_scales = k_scales
        unit_v_codes = v_codes
        unit_v_scales = v_scales
        if page_ptr is not None:
            page_number = unit * N // TILE_TOKENS
            place -= page_number * (TILE_TOKENS // N)
            page = tl.load(page_ptr + page_number).to(tl.int64)
            unit_k_codes += page * code_page
            unit_k_scales += page * scale_page
            unit_v_codes += page * code_page
            unit_v_scales += page * scale_page
        tile = place * N // TILE_TOKENS
        first = place * N - tile * TILE_TOKENS
        k, v, k_third, v_third = (), (), (), ()
        for part in tl.static_range(K_PARTS):
            words, third = _words(
                unit_k_codes,
                place,
                token[:, :, None],
                (part * KW + kw)[None, None, :],
                (part * (KW // 2) + tl.arange(0, KW // 2))[None, None, :],
                D,
                N,
                K_BITS,
            )
            k += (words,)
            k_third += (third,)
        for part in tl.static_range(V_PARTS):
            words, third = _words(
                unit_v_codes,
                place,
                token[:, None, :],
                (part * VW + vw)[None, :, None],
                (part * (VW // 2) + tl.arange(0, VW // 2))[None, :, None],
                D,
                N,
                V_BITS,
            )
            v += (words,)
            v_third += (third,)

        scores = tl.zeros([STRIPS, T, M], tl.float32)
        if KEY_ROWS > 0:
            row_scales_ptr = unit_k_scales + (tile * (2 * KEY_ROWS) + first * KEY_ROWS // TILE_TOKENS) * D
            groups = tl.arange(0, UNIT_ROWS * KW)
            factors, lows = _channel_scales(row_scales_ptr, groups, K_W, KW, K_PLANES // 2, KEY_ROWS * D, ASM, dtype)
            zero_products = tl.zeros([STRIPS, T, M], tl.float32)
            for plane in tl.static_range(K_PLANES):
                factor = tl.reshape(factors[plane], [UNIT_ROWS, KW, 1])
                scaled_q = _product(
                    tl.broadcast_to(q[plane], [UNIT_ROWS, KW, M]), tl.broadcast_to(factor, [UNIT_ROWS, KW, M]), ASM
                )
                codes = _codes(k[0], k_third[0], _place(plane, K_PLANES), K_BITS, ASM, True, dtype)
                scores = tl.dot(codes, _of_strips(scaled_q, STRIPS), scores, input_precision="ieee")
                low = tl.broadcast_to(tl.reshape(lows[plane], [UNIT_ROWS, 1, KW]), [UNIT_ROWS, T, KW])
                zero_products = tl.dot(
                    _of_strips(low, STRIPS), _of_strips(exact_q[plane], STRIPS), zero_products, input_precision="ieee"
                )
            scores += zero_products * SMALL
        else:
            if K_RAW:
                factors, lows = _token_scales(unit_k_scales, tile, first + n, STRIPS, GROUPS, dtype)
            for number in tl.static_range(K_SETS):
                set_scores = tl.zeros([STRIPS, T, M], tl.float32)
                for plane in tl.static_range(number // K_PARTS * K_SIDE, (number // K_PARTS + 1) * K_SIDE):
                    codes = _codes(
                        k[number % K_PARTS],
                        k_third[number % K_PARTS],
                        _place(plane, K_PLANES),
                        K_BITS,
                        ASM,
                        K_RAW,
                        dtype,
                    )
                    if not K_RAW:
                        channel = _channels(plane, kw, K_W)[None, None, :]
                        k_factor, k_zero = _group_scales(
                            unit_k_scales, tile, first + token[:, :, None], channel, GROUPS, D, 2 ** (K_BITS - 1)
                        )
                        codes = (codes.to(tl.float32) * k_factor + k_zero).to(dtype)
                    set_scores = tl.dot(
                        codes,
                        _of_strips(q[number * K_SIDE + plane % K_SIDE], STRIPS),
                        set_scores,
                        input_precision="ieee",
                    )
                if K_RAW:
                    factor = _of_columns(factors, m // HEADS, number, COLUMNS)
                    low = _of_columns(lows, m // HEADS, number, COLUMNS)
                    set_scores = set_scores * factor + q_sums[number] * low
                scores += set_scores
            if COLUMNS > 1:
                scores = _head_sums(scores, HEADS)
        if CAP:
            scores = _capped(scores * scale, cap, CAP)
        if RING:
            last_tile = packed // TILE_TOKENS - 1
            position = (last_tile - (last_tile - tile) % count) * TILE_TOKENS + first + token
            scores = tl.where((newest - position < recent)[:, :, None], scores, float("-inf"))

        factor = 1.0 if CAP else scale  # which is positive, and a part of the subtraction
        new_top = tl.maximum(top, tl.max(scores, 1, keep_dims=True) * factor - RISE)
        weights = tl.exp2(scores * factor - new_top)
        fade = tl.exp2(top - new_top)
        total = total * fade + _in_part(weights, LANES)
        old_acc, old_zeros, acc, zeros = acc, zeros, (), ()
        if V_RAW:
            factors, lows = _token_scales(unit_v_scales, tile, first + n, STRIPS, GROUPS, dtype)
        for number in tl.static_range(SETS):
            set_weights = weights
            if V_RAW:
                low = _of_columns(lows, m // HEADS, number, COLUMNS)
                zeros += (old_zeros[number] * fade + _in_part(weights * low, LANES),)
                set_weights = weights * _of_columns(factors, m // HEADS, number, COLUMNS)
            else:
                zeros += (old_zeros[number],)
            set_weights = set_weights.to(dtype)
            for plane in tl.static_range(number // V_PARTS * V_SIDE, (number // V_PARTS + 1) * V_SIDE):
                codes = _codes(
                    v[number % V_PARTS], v_third[number % V_PARTS], _place(plane, V_PLANES), V_BITS, ASM, V_RAW, dtype
                )
                if not V_RAW:
                    channel = _channels(plane, vw, V_W)[None, :, None]
                    v_factor, v_zero = _group_scales(
                        unit_v_scales, tile, first + token[:, None, :], channel, GROUPS, D, 2 ** (V_BITS - 1)
                    )
                    codes = (codes.to(tl.float32) * v_factor + v_zero).to(dtype)
                old = old_acc[number * V_SIDE + plane % V_SIDE] * fade
                acc += (tl.dot(codes, set_weights, old, input_precision="ieee"),)
        top = new_top
    strip_top = top
    top = tl.max(strip_top, 0, keep_dims=True)
    fade = tl.exp2(strip_top - top)
    total = tl.sum(tl.sum(total, 1, keep_dims=True) * fade, 0, keep_dims=True)
    safe_total = tl.where(total > 0, total, 1.0)
    lse = tl.reshape(tl.where(total > 0, top + tl.log2(safe_total), LOWEST), [M])
    member = tl.arange(0, M)
    tl.store(lse_ptr + part_number + member, lse, member < G)
    for number in tl.static_range(SETS):
        zero = tl.sum(tl.sum(zeros[number], 1, keep_dims=True) * fade, 0, keep_dims=True)
        for plane in tl.static_range(number // V_PARTS * V_SIDE, (number // V_PARTS + 1) * V_SIDE):
            word = number % V_PARTS * VW + vw
            channel = _channels(plane, word, V_W)[None, :, None]
            out = tl.sum(acc[number * V_SIDE + plane % V_SIDE] * fade, 0, keep_dims=True)
            if V_RAW:  # in two steps: their product may be more than a float holds
                out = out * 2.0**RISE * 2.0 ** (EXPONENT - RISE - _raw_place(_place(plane, V_PLANES), V_BITS, ASM))
            out += zero
            if COLUMNS > 1:
                in_group = channel // (D // GROUPS) == number * COLUMNS + m // HEADS
                out = _head_sums(tl.where(in_group, out, 0.0), HEADS)
            out_ptr = partial_ptr + (part_number + m) * D + channel
            tl.store(out_ptr, out / safe_total, (m < G) & (word < V_W)[None, :, None])


def options(head_dim: int, query_rows: int, quantization: Quantization) -> dict:
    """How the kernel walks tiles: columns of its dots, which `query_rows` queries share, and options.

    Widths and tokens are not measured: they follow from the compiled code.
    """
    planes = [_word_codes(bits) for bits in quantization.widths]
    widths = [_padded(head_dim // count) for count in planes]
    tokens = min(max(TILE_BYTES // (2 * max(widths)), MATRIX_ROWS), TILE)
    key_rows = 0
    if quantization.scheme == "kivi":
        key_rows, _ = quantization.key_groups(head_dim)
        tokens = min(tokens, STRIPS * TILE // key_rows)  # a strip has one row of scales
    _, groups = quantization.value_groups(head_dim)
    max_members = max(OUTPUT // _padded(head_dim), MATRIX_COLUMNS)
    members = max(min(query_rows, max_members), MATRIX_COLUMNS)

    def word_parts(columns: int) -> list[int]:
        """How many parts words of keys and of values are in, so that columns of sets take all groups."""
        key_groups = 1 if key_rows else groups
        return [
            max(of_token // columns // max(count // 2, 1), 1)
            for of_token, count in zip((key_groups, groups), planes, strict=True)
        ]

    def fit(columns: int) -> bool:
        return all(
            parts == 1 or (width * count == head_dim and width // parts >= MATRIX_ROWS)
            for parts, width, count in zip(word_parts(columns), widths, planes, strict=True)
        )

    columns = 0
    if groups in (1, 2, 4, 8):
        wider = [rows for rows in (members, 2 * members, 4 * members) if rows <= max_members]
        shapes = [(rows, min(groups, max(rows // query_rows, 1))) for rows in wider]
        members, columns = next((shape for shape in shapes if fit(shape[1])), (members, 0))
    key_parts, value_parts = word_parts(columns) if columns else (1, 1)
    return {
        "OVER_TILES": _over_tiles,
        "PACKED_M": members,
        "PACKED_N": tokens,
        "STRIPS": min(STRIPS, tokens // MATRIX_ROWS),
        "K_BITS": quantization.widths.keys,
        "V_BITS": quantization.widths.values,
        "KEY_ROWS": key_rows,
        "GROUPS": groups,
        "COLUMNS": columns,
        "K_PARTS": key_parts,
        "V_PARTS": value_parts,
        "KW": widths[0] // key_parts,
        "VW": widths[1] // value_parts,
    }
