"""Epilogues: how eight values in registers are scaled, cast and stored.

An epilogue is `epilogue(values, block_amax, out, outer, inner, valid)`: `values` are the elements of row `outer` from
`inner` on, `valid` of them inside the matrix; `block_amax` is the largest magnitude of their block, the same in every
thread that shares it; `out` is an `operands.Outputs`. A columnwise copy that is stored transposed goes through the same
epilogue with rows and columns exchanged.

`Epilogue` names what a kernel must know: how many threads along the row share a block, whether the block is a square.
The order of float32 operations is that of TE's `recipe_common.cuh`, `quantize_mxfp8.cuh` and `core_nvfp4.cuh`.
"""

from collections import namedtuple
from functools import cache

import numpy as np

from cuda_kernels import casts
from cuda_kernels.elementary import reciprocal_to_scale
from cuda_kernels.simt import (
    I32,
    I64,
    U32,
    F,
    as_f32,
    as_i32,
    as_u32,
    atomic_max,
    cuda,
    device,
    load_two_words,
    offset,
    ptx,
    select,
    store_words,
    store_words_if,
)
from cuda_kernels.vectors import VECTOR, WARP, ZERO, amax, amax_with, make_store, multiply_for

ONE = F(1)
#: What 4over6 multiplies a scale with to map the block's maximum to 4 instead of 6.
FOUR_FACTOR = F(1.5)
FLT_MAX, INFINITE = F(np.finfo(np.float32).max), casts.INFINITE
ONE_SIXTH = F(1) / F(6)
SIGN_AND_EXPONENT = U32(0xFF800000)

#: store       the epilogue function
#: lanes       threads along a row whose vectors make one block; 0: no block amax is needed
#: block_rows  rows of a block, 1 unless it is a square
Epilogue = namedtuple("Epilogue", "store lanes block_rows")


# --- storing codes ----------------------------------------------------------------------------------


@cache
def make_store_codes(fmt, whole, target):
    """Return `store(v, pointer, (row, stride, column), valid)`: eight codes; FP8 one a byte, FP4 two."""
    pair = casts.pairs_for(fmt, target)
    if fmt == "e2m1":
        return _make_store_fp4(pair, casts.eights_for(target), whole)
    return _make_store_fp8(pair, casts.quads_for(fmt, target), whole)


def _make_store_fp8(pair, word, whole):
    @device
    def store_whole(v, pointer, place, valid):
        words = word(v[0], v[1], v[2], v[3]), word(v[4], v[5], v[6], v[7])
        store_words_if(valid > 0, pointer, place[0], place[1], place[2], words)

    @device
    def store_guarded(v, pointer, place, valid):
        i = offset(place[0], place[1], place[2])
        for k in range(VECTOR):
            if k < valid:
                pointer[i + k] = np.uint8(pair(v[k], ZERO) & np.uint16(0xFF))

    return store_whole if whole else store_guarded


def _make_store_fp4(pair, word, whole):
    """FP4 rows are whole blocks of 16, so `valid` is 0 or 8; guarded means an address that may be unaligned."""

    @device
    def store_whole(v, pointer, place, valid):
        if valid > 0:
            store_words(pointer, offset(place[0], place[1], place[2]) >> 1, (word(v),))

    @device
    def store_guarded(v, pointer, place, valid):
        if valid > 0:
            i = offset(place[0], place[1], place[2]) >> 1
            for k in range(VECTOR // 2):
                pointer[i + k] = np.uint8(pair(v[2 * k], v[2 * k + 1]) & np.uint16(0xFF))

    return store_whole if whole else store_guarded


# --- where a scale is stored ------------------------------------------------------------------------


@device
def scale_row_major(out, outer, block):
    """Index of the scale of a row's `block`: [outer, block]."""
    return offset(outer, out.scale_stride, block)


@device
def scale_block_major(out, outer, block):
    """Index of the scale in an array [block, outer]."""
    return offset(block, out.scale_stride, outer)


@device
def scale_swizzled(out, outer, block):
    """Index in the order that tensor-core GEMMs read: 512-byte tiles of 128 rows x 4 blocks."""
    tile = I64(outer >> 7) * (out.scale_stride >> 2) + (block >> 2)
    return tile * 512 + ((outer & 31) << 4) + ((outer & 127) >> 5 << 2) + (block & 3)


# --- epilogues --------------------------------------------------------------------------------------


def plain(storage, whole, target):
    """Store values in a dtype, unscaled."""
    store_values = make_store(storage, whole, target)

    @device
    def store(values, block_amax, out, outer, inner, valid):
        store_values(values, out.data, offset(outer, out.inner, inner), valid)

    return Epilogue(store, 0, 1)


def nothing():
    """Store nothing: for kernels that only sum."""

    @device
    def store(values, block_amax, out, outer, inner, valid):
        pass

    return Epilogue(store, 0, 1)


def record_amax(lanes, by_outer=False):
    """Raise `amax` to the largest magnitude: the tensor's, or (`by_outer`) the row's.

    Args:
        lanes: threads that share one atomic operation; with `by_outer` they must be of one row.
    """

    @device
    def store(values, block_amax, out, outer, inner, valid):
        if (cuda.threadIdx.x & (lanes - 1)) == 0 and valid > 0:
            atomic_max(out.amax, outer if by_outer else 0, as_i32(block_amax))

    return Epilogue(store, lanes, 1)


def recording(epilogue, lanes):
    """Return `epilogue`, which needs no block amax, with the tensor's amax recorded beside it."""
    store_values, record = epilogue.store, record_amax(lanes).store

    @device
    def store(values, block_amax, out, outer, inner, valid):
        record(values, block_amax, out, outer, inner, valid)
        store_values(values, block_amax, out, outer, inner, valid)

    return Epilogue(store, lanes, 1)


def codes(fmt, whole, target):
    """Store codes of the values as they are, one a byte."""
    pair = casts.make_pair(casts.ENCODERS[fmt], 8)
    one_a_byte = _make_store_fp8(pair, casts.make_quad(pair, 16), whole)
    store_codes = one_a_byte if fmt == "e2m1" else make_store_codes(fmt, whole, target)

    @device
    def store(values, block_amax, out, outer, inner, valid):
        store_codes(values, out.data, (outer, out.inner, inner), valid)

    return Epilogue(store, 0, 1)


def per_tensor(fmt, known, whole, target):
    """FP8 with one scale: in memory (`given`), or `known` when the kernel starts (delayed scaling).

    A known scale is in `epsilon`, its reciprocal, which is stored as scale_inv, in `largest_scale`.
    """
    store_codes, multiply = make_store_codes(fmt, whole, target), multiply_for(target)

    @device
    def store(values, block_amax, out, outer, inner, valid):
        scale = out.epsilon if known else out.given[0]
        if known and outer == 0 and inner == 0:
            out.scales[0] = out.largest_scale
        store_codes(multiply(values, scale), out.data, (outer, out.inner, inner), valid)

    return Epilogue(store, 0, 1)


def record_block_amax():
    """Raise `amax` [row block, column block] to the largest magnitude of its 128 x 128 square."""

    @device
    def store(values, block_amax, out, outer, inner, valid):
        if (cuda.threadIdx.x & 15) == 0 and valid > 0:
            atomic_max(out.amax, offset(outer >> 7, out.scale_stride, inner >> 7), as_i32(block_amax))

    return Epilogue(store, 16, 1)


def with_given_amax(epilogue, by_column):
    """Return an epilogue for squares of 128 x 128 whose maxima are `given` [row block, column block]."""
    store_with = epilogue.store

    @device
    def store(values, block_amax, out, outer, inner, valid):
        row, column = (inner, outer) if by_column else (outer, inner)
        index = offset(row >> 7, I32(out.first_block), column >> 7)
        store_with(values, out.given[index] if valid > 0 else ZERO, out, outer, inner, valid)

    return Epilogue(store, 0, 1)


@device
def power_of_two_inverse(scale):
    """1 / scale of a power of two up to 2^127, without a division."""
    bits = as_u32(scale)
    return as_f32(select(bits == U32(0x7F000000), U32(0x400000), np.uint32(U32(0x7F000000) - bits)))


def scale_mask(power_2):
    """The bits of a scale that are kept: all, or sign and exponent, which rounds down to a power of two."""
    return U32(0xFF800000 if power_2 else 0xFFFFFFFF)


@device
def fp8_scale(amax, limit, epsilon, largest, mask):
    """limit / amax, its mantissa masked; `largest` where that overflows, 1 where amax is 0 or infinite."""
    amax = select(amax < epsilon, epsilon, amax)
    scale = limit / amax
    scale = select(scale > FLT_MAX, largest, scale)
    scale = as_f32(np.uint32(as_u32(scale) & mask))
    return select((amax > ZERO) & (amax <= FLT_MAX), scale, ONE)


@cache
def make_power_of_two_scale(limit):
    """Return `scale(amax, epsilon, largest)`: `fp8_scale` with the mantissa masked, without a division.

    The bits of two positive floats differ by the bits of their quotient, but for its mantissa: where the mantissa of
    `limit` is the smaller one, the difference borrows from the exponent, which is one less, as the quotient's is. Its
    rounding does not matter: a quotient below a power of two is at least 2^-24 of it below, so rounds below it.
    """
    bits_for_one, overflowing = U32(int(as_u32(limit)) + 0x3F800000), as_u32(F(limit * F(2.0**-64) * F(2.0**-64)))

    @device
    def scale(amax, epsilon, largest):
        amax = select(amax < epsilon, epsilon, amax)
        bits = as_u32(amax)
        quotient = select(bits <= overflowing, as_u32(largest), np.uint32(bits_for_one - bits))
        power = as_f32(np.uint32(quotient & SIGN_AND_EXPONENT))
        return select((amax > ZERO) & (amax <= FLT_MAX), power, ONE)

    return scale


def block_fp8(fmt, limit, square, power_2, whole, target):
    """FP8 with one float32 scale for 128 elements of a row, or for a square of 128 x 128."""
    store_codes, multiply, edge = make_store_codes(fmt, whole, target), multiply_for(target), 128
    limit, mask = F(limit), scale_mask(power_2)
    divided = device(lambda amax, epsilon, largest: fp8_scale(amax, limit, epsilon, largest, mask))
    scale_of = make_power_of_two_scale(limit) if power_2 else divided
    inverse = power_of_two_inverse if power_2 else device(lambda scale: ONE / scale)

    @device
    def store(values, block_amax, out, outer, inner, valid):
        scale = scale_of(block_amax, out.epsilon, out.largest_scale)
        if valid > 0 and (inner & 127) == 0:
            if square and (outer & 127) == 0:
                out.scales[scale_row_major(out, outer >> 7, inner >> 7)] = inverse(scale)
            if not square:
                out.scales[scale_block_major(out, outer, inner >> 7)] = inverse(scale)
        store_codes(multiply(values, scale), out.data, (outer, out.inner, inner), valid)

    return Epilogue(store, edge // VECTOR, edge if square else 1)


@cache
def make_e8m0_byte(limit, mantissa_bits, rounding, target=None):
    """Return `byte(amax)`: the E8M0 code of a block; `rounding` is that of `MXFP8Scaling`."""
    inverse, emax = F(1) / F(limit), U32(int(np.floor(np.log2(limit))))
    half = U32(1 << (22 - mantissa_bits)) if rounding == "even" else U32(0)
    round_up = U32(0x7FFFFF) if rounding == "ceil_ocp" else U32(0)
    round_up_to_power = casts.e8m0_up_for(target)

    @device
    def up(amax):
        return round_up_to_power(amax * inverse)

    @device
    def relative(amax):
        bits = as_u32(amax)
        exponent = np.uint32(np.uint32(bits + half + round_up) >> U32(23))
        code = select(exponent > emax, np.uint32(exponent - emax), U32(0))
        return select(bits >= INFINITE, U32(254), code)

    return up if rounding == "up" else relative


def mxfp8(fmt, limit, mantissa_bits, rounding, square, scale_index, whole, target):
    """MX formats: one E8M0 byte for 32 elements of a row, or for a square of 32 x 32."""
    store_codes, byte_of = make_store_codes(fmt, whole, target), make_e8m0_byte(limit, mantissa_bits, rounding, target)
    multiply = multiply_for(target)

    @device
    def store(values, block_amax, out, outer, inner, valid):
        byte = byte_of(block_amax)
        if valid > 0 and (inner & 31) == 0:
            out.scales[scale_index(out, outer, inner >> 5)] = np.uint8(byte)
        store_codes(multiply(values, casts.e8m0_multiplier(byte)), out.data, (outer, out.inner, inner), valid)

    return Epilogue(store, 32 // VECTOR, 32 if square else 1)


def mxfp8_wide(limit, mantissa_bits, rounding, scale_index, target, fp8):
    """`mxfp8` for threads that hold 16 neighbours as `vectors.Kept` says: `store(first, second, ...)`, 16 codes."""
    byte_of = make_e8m0_byte(limit, mantissa_bits, rounding, target)

    @device
    def store(first, second, block_amax, out, outer, inner, valid):
        byte = byte_of(block_amax)
        a, b = fp8(first, casts.e8m0_multiplier(byte)), fp8(second, casts.e8m0_multiplier(byte))
        if valid > 0 and (inner & 31) == 0:
            out.scales[scale_index(out, outer, inner >> 5)] = np.uint8(byte)
        store_words_if(valid > 0, out.data, outer, out.inner, inner, (a[0], a[1], b[0], b[1]))

    return Epilogue(store, 32 // (2 * VECTOR), 1)


def mxfp8_square_columns(fmt, limit, mantissa_bits, rounding, scale_index, whole, target):
    """The columnwise copy under 32 x 32 blocks: the rowwise codes, and the scale of each column of the block."""
    store_codes, byte_of = make_store_codes(fmt, whole, target), make_e8m0_byte(limit, mantissa_bits, rounding, target)
    multiply = multiply_for(target)

    @device
    def store(values, block_amax, out, outer, inner, valid):
        byte = byte_of(block_amax)
        if (outer & 31) == 0:
            for k in range(VECTOR):
                if k < valid:
                    out.scales[scale_index(out, inner + k, outer >> 5)] = np.uint8(byte)
        store_codes(multiply(values, casts.e8m0_multiplier(byte)), out.data, (outer, out.inner, inner), valid)

    return Epilogue(store, 32 // VECTOR, 32)


# --- NVFP4 ------------------------------------------------------------------------------------------


@device
def global_encode_scale(amax, top):
    """top / amax, at most FLT_MAX; 1 where amax is 0 or infinite. `top` is e4m3_max * 6."""
    scale = top / amax
    scale = select(scale > FLT_MAX, FLT_MAX, scale)
    return select((amax != ZERO) & (scale != ZERO), scale, ONE)


@device
def block_scale(amax, s_enc):
    """A block's scale before it is rounded to E4M3: amax * (S_enc / 6)."""
    return amax * (s_enc * ONE_SIXTH)


@device
def block_byte(amax, s_enc):
    """E4M3 code of a block's scale, at most 448."""
    return casts.e4m3(block_scale(amax, s_enc))


@device
def encode_multiplier(byte, s_dec):
    """1 / (scale * S_dec), at most FLT_MAX: what elements are multiplied with. S_dec = 1 / S_enc."""
    return reciprocal_to_scale(casts.decode_e4m3(byte) * s_dec)


@cache
def make_nvfp4_scales(row_scaled, target):
    """Return `scales(block_amax, out, outer, valid)`: a block's E4M3 code and the multiplier of its elements."""
    encode, decode = casts.e4m3_for(target)

    @device
    def scales(block_amax, out, outer, valid):
        i = offset(outer, I32(2), I32(0)) if row_scaled and valid > 0 else I64(0)
        s_enc, s_dec = load_two_words(out.given, i)
        byte = encode(block_scale(block_amax, as_f32(s_enc)))
        return byte, reciprocal_to_scale(decode(byte) * as_f32(s_dec))

    return scales


@cache
def make_block_codes(row_scaled, rounding, target):
    """Return `codes(first, second, out, outer, inner)`: a block's E4M3 code, and its 16 E2M1 codes in two words."""
    scales, multiply = make_nvfp4_scales(row_scaled, target), multiply_for(target)
    nearest, stochastic = casts.eights_for(target), casts.stochastic_eights_for(target)

    @device
    def codes(first, second, out, outer, inner):
        byte, multiplier = scales(amax_with(amax(first), second), out, outer, 1)
        a, b = multiply(first, multiplier), multiply(second, multiplier)
        if rounding == "nearest":
            return np.uint8(byte), nearest(a), nearest(b)
        w = random_words(out, outer, inner)
        return np.uint8(byte), stochastic(a, w[0], w[1]), stochastic(b, w[2], w[3])

    return codes


def nvfp4_blocks(row_scaled, rounding, scale_index, target):
    """`nvfp4` for threads that hold whole blocks, but for given random bits: (`store` of one block, `store` of two)."""
    codes = make_block_codes(row_scaled, rounding, target)

    @device
    def store_one(v, out, outer, inner):
        byte, a, b = codes(v[0], v[1], out, outer, inner)
        out.scales[scale_index(out, outer, inner >> 4)] = byte
        store_words(out.data, offset(outer, out.inner >> 1, inner >> 1), (a, b))

    @device
    def store_two(v, out, outer, inner):
        byte, a, b = codes(v[0], v[1], out, outer, inner)
        next_byte, c, d = codes(v[2], v[3], out, outer, I32(inner + 16))
        i = scale_index(out, outer, inner >> 4)  # the block's number is even: in every order the next one follows it
        out.scales[i], out.scales[i + 1] = byte, next_byte
        store_words(out.data, offset(outer, out.inner >> 1, inner >> 1), (a, b, c, d))

    return store_one, store_two


def nvfp4(square, row_scaled, rounding, scale_index, whole, target):
    """E2M1 with an E4M3 scale for 16 elements (or a square of 16 x 16) under the tensor's scale.

    Args:
        row_scaled: `given` holds S_enc and S_dec = 1 / S_enc for each outer index, else those of the tensor.
        rounding: "nearest", "philox" or "given" (random_bits).
    """
    scales, multiply = make_nvfp4_scales(row_scaled, target), multiply_for(target)
    store_nearest, store_random = make_store_codes("e2m1", whole, target), make_store_random(rounding)

    @device
    def store(values, block_amax, out, outer, inner, valid):
        byte, multiplier = scales(block_amax, out, outer, valid)
        if valid > 0 and (inner & 15) == 0:
            out.scales[scale_index(out, outer, inner >> 4)] = np.uint8(byte)
        v = multiply(values, multiplier)
        if rounding == "nearest":
            store_nearest(v, out.data, (outer, out.inner, inner), valid)
        elif valid > 0:
            store_random(v, out, outer, inner)

    return Epilogue(store, 16 // VECTOR, 16 if square else 1)


@ptx("mul.rn.f32 $0, $1, $2;", "=f,f,f", F, F, F)
def product(a, b):
    """a * b, never contracted into a multiply-add."""
    return a * b


@cache
def make_four_over_six_error(top, mse):
    """Return `error(v, multiplier, scale, amax, start)`: `start` plus the errors of eight elements, one after another.

    An element's error is (code * scale * amax) / top - x, its magnitude or (`mse`) its square; `top` = 6 e4m3_max.
    """

    @device
    def one(x, multiplier, scale, amax):
        value = casts.decode_e2m1(casts.e2m1(x * multiplier))
        difference = ((value * scale) * amax) / top - x
        return product(difference, difference) if mse else as_f32(as_u32(difference) & casts.MAGNITUDE)

    @device
    def error(v, multiplier, scale, amax, start):
        total = start
        for k in range(VECTOR):
            total = total + one(v[k], multiplier, scale, amax)
        return total

    return error


@cache
def make_row_errors(e4m3_max, mse):
    """Return `errors(v, block_amax, amax, upper)`: of 16 elements that two threads hold, mapped to 6 and to 4.

    A sum runs through the first thread's elements, then through those of the second (`upper`); both get it.
    """
    top = F(6 * e4m3_max)
    error = make_four_over_six_error(top, mse)

    @device
    def sixteen(v, byte, s_enc, amax, upper):
        multiplier, scale = encode_multiplier(byte, ONE / s_enc), casts.decode_e4m3(byte)
        own = error(v, multiplier, scale, amax, ZERO)
        both = error(v, multiplier, scale, amax, cuda.shfl_xor_sync(WARP, own, 1))
        return select(upper, both, cuda.shfl_xor_sync(WARP, both, 1))

    @device
    def errors(v, block_amax, amax, upper):
        s_enc = global_encode_scale(amax, top)
        six = sixteen(v, four_over_six_byte(block_amax, s_enc, ONE), s_enc, amax, upper)
        return six, sixteen(v, four_over_six_byte(block_amax, s_enc, FOUR_FACTOR), s_enc, amax, upper)

    return errors


@cache
def make_store_choice(e4m3_max, scale_index, whole, target):
    """Return `store(v, block_amax, four, amax, out, outer, inner, valid)`: NVFP4 with the maximum mapped to 4 or 6."""
    top, store_codes, multiply = F(6 * e4m3_max), make_store_codes("e2m1", whole, target), multiply_for(target)

    @device
    def store(v, block_amax, four, amax, out, outer, inner, valid):
        s_enc = global_encode_scale(amax, top)
        byte = four_over_six_byte(block_amax, s_enc, select(four, FOUR_FACTOR, ONE))
        if valid > 0 and (inner & 15) == 0:
            out.scales[scale_index(out, outer, inner >> 4)] = np.uint8(byte)
        values = multiply(v, encode_multiplier(byte, ONE / s_enc))
        store_codes(values, out.data, (outer, out.inner, inner), valid)

    return store


def nvfp4_four_over_six(e4m3_max, mse, row_scaled, scale_index, whole, target):
    """NVFP4 1x16 that maps each block's maximum to 6 or to 4, whichever errs less (6 if equal)."""
    errors = make_row_errors(e4m3_max, mse)
    store_choice = make_store_choice(e4m3_max, scale_index, whole, target)

    @device
    def store(values, block_amax, out, outer, inner, valid):
        amax = out.given[outer] if row_scaled and valid > 0 else out.given[0]
        six, four = errors(values, block_amax, amax, (inner & 15) == 8)
        store_choice(values, block_amax, four < six, amax, out, outer, inner, valid)

    return Epilogue(store, 16 // VECTOR, 1)


@device
def four_over_six_byte(amax, s_enc, factor):
    """E4M3 code of a block's scale: factor 1 maps its maximum to 6, factor 1.5 to 4."""
    return casts.e4m3(((amax / F(6)) * s_enc) * factor)


@device
def random_words(out, outer, inner):
    """The random bytes of the block of 16 that holds an element, four in a word."""
    block = out.first_block + offset(outer, out.inner >> 4, inner >> 4)
    return casts.philox(np.uint64(out.seed), np.uint64(out.offset), np.uint64(block))


@cache
def make_store_random(rounding):
    """Return `store(v, out, outer, inner)`: eight E2M1 codes rounded stochastically, from Philox or with given bits."""

    @device
    def philox_word(out, outer, inner, k):
        a, b, c, d = random_words(out, outer, inner)
        first = (inner & 15) == 0
        low, high = select(first, a, c), select(first, b, d)
        return low if k == 0 else high

    @device
    def given_word(out, outer, inner, k):
        i = offset(outer, out.inner, inner) + 4 * k
        low = np.uint32(np.uint32(out.random_bits[i]) | np.uint32(np.uint32(out.random_bits[i + 1]) << U32(8)))
        high = np.uint32(np.uint32(out.random_bits[i + 2]) | np.uint32(np.uint32(out.random_bits[i + 3]) << U32(8)))
        return np.uint32(low | np.uint32(high << U32(16)))

    word_of = given_word if rounding == "given" else philox_word

    @device
    def code(v, word, k):
        return casts.e2m1_stochastic(v, np.uint32(np.uint32(word >> U32(8 * k)) & U32(0xFF)))

    @device
    def store(v, out, outer, inner):
        byte = offset(outer, out.inner, inner) >> 1
        for half in range(2):
            w = word_of(out, outer, inner, half)
            first = np.uint32(code(v[4 * half], w, 0) | np.uint32(code(v[4 * half + 1], w, 1) << U32(4)))
            second = np.uint32(code(v[4 * half + 2], w, 2) | np.uint32(code(v[4 * half + 3], w, 3) << U32(4)))
            out.data[byte + 2 * half] = np.uint8(first)
            out.data[byte + 2 * half + 1] = np.uint8(second)

    return store
