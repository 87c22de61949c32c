"""Attention of few queries to the codes of tiles on a CPU: a loop in C, for the machine's own compiler.

PyTorch unpacks codes to memory, scales them there, and then multiplies. The loop reads each byte of codes once, and
what it unpacks stays in the nearest cache. On one thread of a CPU with AVX-512, a decode step of six requests of 1,100
tokens takes 0.6 ms with 4 bits, 3 KV heads of 64 channels and 9 query heads, where PyTorch takes 2.6 ms, and 0.5 ms
over bfloat16. It needs GCC, of version 12 or later for float16, and about a second to compile for each kind of tile.
"""

import ctypes
import functools
import logging
import os
import shlex
import subprocess
import tempfile
from pathlib import Path

import torch

from .kv_codes import Tiles
from .kv_layout import TILE, Quantization
from .kv_softmax import Scoring

logger = logging.getLogger(__name__)

FLAGS = "-O3 -march=native -fopenmp -fno-math-errno -fno-trapping-math -fPIC -shared"  # OpenMP has torch's threads

SOURCE = r"""
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
#define VECTORS ((HEAD_DIM + LANES - 1) / LANES)  // of a token
#define SIZE ((VECTORS + 1) * LANES)  // floats of a token: the last store of its codes may reach over
#define PER_CHANNEL (KEY_ROWS < TILE)  // scales of keys
#define LOWEST -1.0e30f  // below all scores

typedef float floats __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint8_t bytes __attribute__((vector_size(LANES)));

static inline float number(STATE x) {
#if BFLOAT16
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, sizeof y);
    return y;
#else
    return x;
#endif
}

static inline STATE stored(float x) {
#if BFLOAT16
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to the nearest, halves to the even one
#else
    return x;
#endif
}

// e to the power of x <= 0, by the polynomial of the Cephes library
static inline float exponential(float x) {
    float power = x * 1.44269504f < -126.0f ? -126.0f : x * 1.44269504f;  // NaN stays
    float whole = floorf(power + 0.5f);
    float rest = power - whole;
    float y = 1.535336188319500e-4f;
    y = y * rest + 1.339887440266574e-3f;
    y = y * rest + 9.618437357674640e-3f;
    y = y * rest + 5.550332471162809e-2f;
    y = y * rest + 2.402264791363012e-1f;
    y = y * rest + 6.931472028550421e-1f;
    y = y * rest + 1.0f;
    int32_t bits = ((int32_t)whole + 127) << 23;
    float factor;
    memcpy(&factor, &bits, sizeof factor);
    return y * factor;
}

// up to LANES bytes, then 0
static inline bytes loaded(const uint8_t *from, int count) {
    bytes x = {0};
    memcpy(&x, from, count < LANES ? count : LANES);
    return x;
}

static inline ints widened(bytes x) {
#if defined __AVX512F__
    return (ints)_mm512_cvtepu8_epi32((__m128i)x);
#elif defined __AVX2__
    return (ints)_mm256_cvtepu8_epi32(_mm_set_epi64x(0, (int64_t)x));
#else
    return __builtin_convertvector(x, ints);
#endif
}

// a vector with the sum of x[i] in lane i; overwrites x
static inline floats sums(floats *x) {
#pragma GCC unroll 4
    for (int half = LANES / 2; half; half /= 2) {
        ints low;
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) low[i] = i / half * 2 * half + i % half;
#pragma GCC unroll 8
        for (int i = 0; i < half; i++) {
            floats one = x[2 * i], other = x[2 * i + 1];
            x[i] = __builtin_shuffle(one, other, low) + __builtin_shuffle(one, other, low + half);
        }
    }
    return x[0];
}

// the codes of a token, as `Tiles` describes them
static inline void unpack(const uint8_t *tile, int token, int bits, float *codes) {
    int low_bits = bits == 3 ? 2 : bits, width = HEAD_DIM * low_bits / 8;
    const uint8_t *lows = tile + token * width, *thirds = tile + TILE * width + token * (width / 2);
    for (int w = (width - 1) / LANES * LANES; w >= 0; w -= LANES) {  // a plane's last store may reach into the next
        ints low = widened(loaded(lows + w, width - w)), third = {0};
        if (bits == 3) {  // a byte has those of two channels, the second ones four bits higher
            bytes pair;
            ints shift;
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) pair[i] = i / 2, shift[i] = i % 2 * 4;
            third = widened(__builtin_shuffle(loaded(thirds + w / 2, (width - w) / 2), pair)) >> shift;
        }
#pragma GCC unroll 4
        for (int plane = 0; plane < 8 / low_bits; plane++) {
            ints code = (low >> plane * low_bits & ((1 << low_bits) - 1)) | (third >> plane & 1) << 2;
            *(floats *)(codes + plane * width + w) = __builtin_convertvector(code, floats);
        }
    }
}

// queries of a KV head, and their attention to the tokens that have been read
struct reading {
    int64_t count, new_tokens;  // queries; new tokens, one after the other for each query head
    float scale, softcap;  // of scores; a cap of 0 is none
    float *query, *scaled, *output;  // [count][SIZE]
    float *added, *highest, *total;  // [count]: product with the minima, highest score, sum of weights
    float *weights;  // [count][TILE]
    float (*states)[SIZE];  // keys or values of LANES tokens
    float (*bias)[TILE];  // [new_tokens], LOWEST where a query does not see a token, else 0
};

// where up to TILE tokens lie: in a tile, or some states apart
struct tokens {
    const uint8_t *key_codes, *value_codes;
    const STATE *key_scales, *value_scales;
    const STATE *keys, *values;
    int64_t key_stride, value_stride;
};

static inline void find_tile(
    struct tokens *tokens, const uint8_t *const *parts, const int64_t (*strides)[2], int64_t place, int64_t head
) {
    tokens->key_codes = parts[0] + place * strides[0][0] + head * strides[0][1];
    tokens->key_scales = (const STATE *)(parts[1] + place * strides[1][0] + head * strides[1][1]);
    tokens->value_codes = parts[2] + place * strides[2][0] + head * strides[2][1];
    tokens->value_scales = (const STATE *)(parts[3] + place * strides[3][0] + head * strides[3][1]);
}

static inline void scale_query(struct reading *r, const STATE *scales, const STATE *lows) {
    for (int64_t n = 0; n < r->count; n++) {
        float added = 0;
#pragma omp simd reduction(+ : added)
        for (int d = 0; d < HEAD_DIM; d++) {
            r->scaled[n * SIZE + d] = r->query[n * SIZE + d] * number(scales[d]);
            added += r->query[n * SIZE + d] * number(lows[d]);
        }
        r->added[n] = added;
    }
}

// tokens t, t + 1, ... of a tile whose scales are for the channels of one token
static inline void dequantize(
    float (*states)[SIZE], const uint8_t *codes, const STATE *scales, int columns, int bits, int t
) {
    int size = HEAD_DIM / columns;
    for (int i = 0; i < LANES; i++) {
        unpack(codes, t + i, bits, states[i]);
        for (int c = 0; c < columns; c++) {
            float scale = number(scales[(t + i) * columns + c]), low = number(scales[(TILE + t + i) * columns + c]);
            for (int d = c * size; d < (c + 1) * size; d++) states[i][d] = states[i][d] * scale + low;
        }
    }
}

static inline void load(struct reading *r, const STATE *states, int64_t stride, int t, int end) {
    for (int i = 0; i < LANES && t + i < end; i++)
        for (int d = 0; d < HEAD_DIM; d++) r->states[i][d] = number(states[(t + i) * stride + d]);
}

static inline void save(STATE *to, float (*states)[SIZE]) {
    for (int i = 0; i < LANES; i++)
        for (int d = 0; d < HEAD_DIM; d++) to[i * HEAD_DIM + d] = stored(states[i][d]);
}

// products of queries and the keys of tokens t, t + 1, ...
static inline void multiply(struct reading *r, int t) {
    for (int64_t n = 0; n < r->count; n++) {
        const float *query = r->scaled + n * SIZE;
        floats products[LANES];
        for (int i = 0; i < LANES; i++) {
            products[i] = *(floats *)query * *(floats *)r->states[i];
            for (int d = LANES; d < HEAD_DIM; d += LANES)
                products[i] += *(floats *)(query + d) * *(floats *)(r->states[i] + d);
        }
        *(floats *)(r->weights + n * TILE + t) = sums(products) + r->added[n];
    }
}

// from products of tokens from..end to their weights, relative to the highest score so far
static inline void weigh(struct reading *r, int from, int end) {
    for (int64_t n = 0; n < r->count; n++) {
        float *weights = r->weights + n * TILE, highest = r->highest[n], total = 0;
        const float *bias = r->bias[n % r->new_tokens];
        for (int t = from; t < end; t++) {
            float score = weights[t] * r->scale;
            if (r->softcap) score = r->softcap * tanhf(score / r->softcap);
            weights[t] = bias[t] < 0 ? LOWEST : score;
        }
#pragma omp simd reduction(max : highest)
        for (int t = from; t < end; t++) highest = weights[t] > highest ? weights[t] : highest;
        float factor = exponential(r->highest[n] - highest);
#pragma omp simd reduction(+ : total)
        for (int t = from; t < end; t++) {
            weights[t] = bias[t] < 0 ? 0 : exponential(weights[t] - highest);
            total += weights[t];
        }
        r->highest[n] = highest;
        r->total[n] = r->total[n] * factor + total;
        for (int d = 0; d < HEAD_DIM; d++) r->output[n * SIZE + d] *= factor;
    }
}

// adds the weighted values of tokens t, t + 1, ...
static inline void accumulate(struct reading *r, int t) {
    for (int64_t n = 0; n < r->count; n++) {
        const float *weights = r->weights + n * TILE + t;
        floats output[VECTORS];
        memcpy(output, r->output + n * SIZE, sizeof output);
        for (int i = 0; i < LANES; i++)
            for (int d = 0; d < VECTORS; d++) output[d] += weights[i] * *(floats *)(r->states[i] + d * LANES);
        memcpy(r->output + n * SIZE, output, sizeof output);
    }
}

// tokens from..end, `from` a multiple of LANES
static inline void read_tokens(struct reading *r, const struct tokens *tokens, int packed, int from, int end) {
    const int per_channel = packed && PER_CHANNEL;
    if (!per_channel) {
        memcpy(r->scaled, r->query, r->count * SIZE * sizeof(float));
        memset(r->added, 0, r->count * sizeof(float));
    }
    for (int t = from; t < end; t += LANES) {
        if (per_channel) {
            if (t == from || t % (TILE / KEY_ROWS) == 0) {
                const STATE *scales = tokens->key_scales + t / (TILE / KEY_ROWS) * HEAD_DIM;
                scale_query(r, scales, scales + KEY_ROWS * HEAD_DIM);
            }
            for (int i = 0; i < LANES; i++) unpack(tokens->key_codes, t + i, KEY_BITS, r->states[i]);
        } else if (packed)
            dequantize(r->states, tokens->key_codes, tokens->key_scales, KEY_COLUMNS, KEY_BITS, t);
        else
            load(r, tokens->keys, tokens->key_stride, t, end);
        multiply(r, t);
    }
    weigh(r, from, (end + LANES - 1) / LANES * LANES);
    for (int t = from; t < end; t += LANES) {
        if (packed)
            dequantize(r->states, tokens->value_codes, tokens->value_scales, VALUE_COLUMNS, VALUE_BITS, t);
        else
            load(r, tokens->values, tokens->value_stride, t, end);
        accumulate(r, t);
    }
}

// Each split reads some of the tiles, and the first one the tokens that are not in tiles.
void attend(
    const float *query,  // [requests][heads][count][HEAD_DIM], of new_tokens for each query head
    const STATE *keys, const STATE *values,  // of others tokens that are not in tiles
    const int64_t (*strides)[3],  // of keys and of values: of requests, heads and tokens
    const uint8_t *hidden,  // [requests][new_tokens][others], 1 where a query does not see a token
    const uint8_t *const *parts,  // of tiles: codes and scales of keys, codes and scales of values
    const int64_t (*part_strides)[2],  // of each, in bytes: of tiles and of heads
    const int64_t *places,  // [requests][tiles]
    const int64_t (*seen)[2],  // [requests][new_tokens], the first token in tiles that a query sees, and the end
    float *output,  // [splits][requests][heads][count][HEAD_DIM]
    float *lse,  // [splits][requests][heads][count], log-sum-exp of the scores
    int64_t requests, int64_t heads, int64_t count, int64_t new_tokens, int64_t others, int64_t tiles, int64_t splits,
    float scale, float softcap, int threads
) {
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t item = 0; item < splits * requests * heads; item++) {
        int64_t head = item % heads, request = item / heads % requests, split = item / heads / requests;
        size_t floats_needed = count * (3 * SIZE + TILE + 3) + LANES * SIZE + new_tokens * TILE;
        float *room = aligned_alloc(64, (floats_needed * sizeof(float) + 63) / 64 * 64);
        if (!room) abort();
        struct reading r = {.count = count, .new_tokens = new_tokens, .scale = scale, .softcap = softcap};
        r.query = room;
        r.scaled = r.query + count * SIZE;
        r.output = r.scaled + count * SIZE;
        r.weights = r.output + count * SIZE;
        r.states = (float (*)[SIZE])(r.weights + count * TILE);
        r.bias = (float (*)[TILE])(r.states + LANES);
        r.added = *(r.bias + new_tokens);
        r.highest = r.added + count;
        r.total = r.highest + count;
        memset(room, 0, floats_needed * sizeof(float));
        for (int64_t n = 0; n < count; n++) {
            const float *source = query + (item % (requests * heads) * count + n) * HEAD_DIM;
            memcpy(r.query + n * SIZE, source, HEAD_DIM * sizeof(float));
            r.highest[n] = LOWEST;
        }
        struct tokens tokens = {.key_stride = strides[0][2], .value_stride = strides[1][2]};
        for (int64_t first = 0; split == 0 && first < others; first += TILE) {
            int end = others - first < TILE ? others - first : TILE;
            tokens.keys = keys + request * strides[0][0] + head * strides[0][1] + first * strides[0][2];
            tokens.values = values + request * strides[1][0] + head * strides[1][1] + first * strides[1][2];
            for (int64_t n = 0; n < new_tokens; n++) {
                const uint8_t *hides = hidden + (request * new_tokens + n) * others + first;
                for (int t = 0; t < TILE; t++) r.bias[n][t] = t >= end || hides[t] ? LOWEST : 0;
            }
            read_tokens(&r, &tokens, 0, 0, end);
        }
        for (int64_t tile = split * tiles / splits; tile < (split + 1) * tiles / splits; tile++) {
            int from = TILE, end = 0;  // what at least one query sees
            for (int64_t n = 0; n < new_tokens; n++) {
                const int64_t *sees = seen[request * new_tokens + n];
                int64_t begin = sees[0] - tile * TILE, stop = sees[1] - tile * TILE;
                begin = begin < 0 ? 0 : begin;
                stop = stop > TILE ? TILE : stop;
                for (int t = 0; t < TILE; t++) r.bias[n][t] = t < begin || t >= stop ? LOWEST : 0;
                from = begin < stop && begin < from ? begin : from;
                end = begin < stop && stop > end ? stop : end;
            }
            if (from >= end) continue;
            find_tile(&tokens, parts, part_strides, places[request * tiles + tile], head);
            read_tokens(&r, &tokens, 1, from / LANES * LANES, end);
        }
        for (int64_t n = 0; n < count; n++) {
            int any = r.total[n] != 0;
            lse[item * count + n] = any ? r.highest[n] + logf(r.total[n]) : LOWEST;
            for (int d = 0; d < HEAD_DIM; d++)
                output[(item * count + n) * HEAD_DIM + d] = any ? r.output[n * SIZE + d] / r.total[n] : 0;
        }
        free(room);
    }
}

// tokens of tiles of one request, `stride` states from head to head
void unpack_tiles(
    const uint8_t *const *parts, const int64_t (*part_strides)[2], const int64_t *places, STATE *keys, STATE *values,
    int64_t heads, int64_t tiles, int64_t stride, int threads
) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t item = 0; item < heads * tiles; item++) {
        int64_t head = item / tiles, tile = item % tiles, place = head * stride + tile * TILE * HEAD_DIM;
        struct tokens tokens;
        find_tile(&tokens, parts, part_strides, places[tile], head);
        float states[LANES][SIZE], scales[HEAD_DIM], lows[HEAD_DIM];
        for (int t = 0; t < TILE; t += LANES, place += LANES * HEAD_DIM) {
            if (PER_CHANNEL) {
                const STATE *row = tokens.key_scales + t / (TILE / KEY_ROWS) * HEAD_DIM;
                for (int d = 0; d < HEAD_DIM; d++) {
                    scales[d] = number(row[d]);
                    lows[d] = number(row[KEY_ROWS * HEAD_DIM + d]);
                }
                for (int i = 0; i < LANES; i++) {
                    unpack(tokens.key_codes, t + i, KEY_BITS, states[i]);
                    for (int d = 0; d < HEAD_DIM; d++) states[i][d] = states[i][d] * scales[d] + lows[d];
                }
            } else
                dequantize(states, tokens.key_codes, tokens.key_scales, KEY_COLUMNS, KEY_BITS, t);
            save(keys + place, states);
            dequantize(states, tokens.value_codes, tokens.value_scales, VALUE_COLUMNS, VALUE_BITS, t);
            save(values + place, states);
        }
    }
}
"""


class CodesLoop:
    """The compiled loop, for `Tiles` [places, heads, ...] of one kind and dtype; the parts of a tile are contiguous."""

    def __init__(self, library: ctypes.CDLL):
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        self._attend, self._unpack = library.attend, library.unpack_tiles
        self._attend.argtypes = [pointer] * 11 + [integer] * 7 + [ctypes.c_float] * 2 + [ctypes.c_int]
        self._unpack.argtypes = [pointer] * 5 + [integer] * 3 + [ctypes.c_int]
        self._attend.restype = self._unpack.restype = None

    def unpack(self, tiles: Tiles, places: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the keys and values of some tiles.

        Args:
            places: of the tiles, int64 [n].
            keys, values: [heads, n * TILE, head_dim], heads as far apart in both, and contiguous otherwise.
        """
        self._unpack(
            *_located(tiles),
            *(part.data_ptr() for part in (places, keys, values)),
            *(len(keys), len(places), keys.stride(0)),
            torch.get_num_threads(),
        )

    def __call__(
        self,
        query: torch.Tensor,
        states: tuple[torch.Tensor, torch.Tensor],
        hidden: torch.Tensor,
        tiles: Tiles,
        places: torch.Tensor,
        seen: torch.Tensor,
        scoring: Scoring,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of queries to the tokens in tiles and to others, without gradients, dropout and attention sinks.

        Args:
            query: [requests, heads, group * new, head_dim], of `new` tokens each.
            states: keys and values of the others, [requests, heads, n, head_dim].
            hidden: which of the others the query of a new token does not see, bool [requests, new, n].
            places: of each request's tiles, int64 [requests, tiles].
            seen: the first token in these tiles that the query of a new token sees, and the end: int64
                [requests, new, 2].

        Returns:
            In float32, [requests, heads, group * new, head_dim], and the log-sum-exp of the scores of each query.
        """
        requests, heads, count, head_dim = query.shape
        assert all(part.stride(3) == 1 for part in states)
        threads = torch.get_num_threads()
        splits = max(1, min(places.shape[1], threads // (requests * heads)))
        inputs = query.float(), hidden, places, seen
        query, hidden, places, seen = (part.contiguous() for part in inputs)
        output = query.new_empty(splits, requests, heads, count, head_dim)
        lse = query.new_empty(splits, requests, heads, count)
        self._attend(
            query.data_ptr(),
            *(part.data_ptr() for part in states),
            (ctypes.c_int64 * 6)(*(stride for part in states for stride in part.stride()[:3])),
            hidden.data_ptr(),
            *_located(tiles),
            *(part.data_ptr() for part in (places, seen, output, lse)),
            *(requests, heads, count, *hidden.shape[1:], places.shape[1], splits),
            *(scoring.scale, scoring.softcap or 0, min(threads, splits * requests * heads)),
        )
        if splits == 1:
            return output[0], lse[0]
        total = lse.logsumexp(0)
        return (output * (lse - total).exp()[..., None]).sum(0), total


def _located(tiles: Tiles) -> tuple[ctypes.Array, ctypes.Array]:
    """Addresses of the parts of tiles, and bytes from place to place and from head to head."""
    steps = (part.stride(axis) * part.itemsize for part in tiles for axis in (0, 1))
    return (ctypes.c_void_p * 4)(*(part.data_ptr() for part in tiles)), (ctypes.c_int64 * 8)(*steps)


@functools.cache
def codes_loop(quantization: Quantization, head_dim: int, dtype: torch.dtype) -> CodesLoop | None:
    """The loop for heads of this size with states of this dtype.

    None, with a warning, where it cannot be compiled; None too for float64, and for keys in groups of tokens that fill
    no vectors.
    """
    state = {torch.float32: "float", torch.float16: "_Float16", torch.bfloat16: "uint16_t"}.get(dtype)
    rows, columns = quantization.key_groups(head_dim)
    if state is None or (rows < TILE and TILE // rows % 16):  # tokens of a vector have one scale
        return None
    constants = {
        "STATE": state,
        "BFLOAT16": int(dtype == torch.bfloat16),
        "TILE": TILE,
        "HEAD_DIM": head_dim,
        "KEY_BITS": quantization.widths.keys,
        "KEY_ROWS": rows,
        "KEY_COLUMNS": columns,
        "VALUE_BITS": quantization.widths.values,
        "VALUE_COLUMNS": quantization.value_groups(head_dim)[1],
    }
    return _compiled(*(f"-D{name}={constant}" for name, constant in constants.items()))


@functools.cache
def _compiled(*constants: str) -> CodesLoop | None:
    try:
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder, "codes.so")
            compiler, *options = shlex.split(os.environ.get("CC") or "gcc")
            command = [compiler, *FLAGS.split(), *options, *constants, "-x", "c", "-", "-o", str(library), "-lm"]
            subprocess.run(command, input=SOURCE, text=True, check=True, capture_output=True)
            return CodesLoop(ctypes.CDLL(str(library)))
    except subprocess.CalledProcessError as error:
        reason = next((line for line in error.stderr.splitlines() if "error:" in line), error)
    except (OSError, ValueError) as error:
        reason = error
    logger.warning(
        "PyTorch reads quantized caches on this CPU, which takes longer, since no loop in C could be made for it (%s). "
        "That takes gcc, or a GCC that the environment variable CC names, and a temporary folder (TMPDIR) from which "
        "libraries can be loaded",
        reason,
    )
    return None
