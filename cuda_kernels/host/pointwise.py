"""Elementwise work outside tiles: encode and decode with every option, narrow vectors, scales of whole tensors."""

import hashlib
import math
from dataclasses import astuple as fields_of
from functools import cache, lru_cache

import numpy as np
from numba import types

from cuda_kernels import casts
from cuda_kernels.host.arrays import NOTHING, as_array, as_bytes
from cuda_kernels.host.compile import compiled
from cuda_kernels.host.threads import share
from cuda_kernels.host.tiles import BYTES
from cuda_kernels.simt import U32, F, as_f32, as_u32, device
from refops.arguments import require_choice, require_flag, require_integer
from refops.formats import FORMATS, require_format
from refops.quantization.delayed import call_algorithm, check_history
from refops.rounding import STOCHASTIC
from refops.scalings import FP8_FORMATS
from refops.scalings.declaration import FLT_MAX

#: Elements that one thread takes at least.
CHUNK = 1 << 15
#: Formats whose usual cast is that of tensors.
_FAST_FORMATS = tuple(fmt for name, fmt in FORMATS.items() if name in casts.ENCODERS)


def run(function, size, *arguments):
    """Call a compiled `function(*arguments, first, last)` over `size` elements."""

    def work(first, last):
        function(*arguments, min(size, first * CHUNK), min(size, last * CHUNK))

    count = -(-size // CHUNK)
    share(work, count, inline=count <= 1)


@cache
def _compiled_map(name, source, target, function):
    """Return `loop(x, out, first, last)`: `function` of every element; dtypes are those that the bytes hold."""

    def loop(x, out, first, last):
        values, results = x.view(source)[first:last], out.view(target)[first:last]
        for i in range(last - first):
            results[i] = target(function(values[i]))

    return compiled(name, loop, types.void(BYTES, BYTES, types.int64, types.int64))


def narrow(values, storage, out):
    """Store float32 `values` in `out`, of dtype `storage`."""
    target = casts.STORAGES[storage]
    loop = _compiled_map(f"narrow-{storage}", np.float32, target.carrier.type, target.narrow)
    run(loop, values.size, as_bytes(values), as_bytes(out))


# --- encode and decode ------------------------------------------------------------------------------


def make_encoder(fmt, saturate, rounding):
    """Return `encode(x, random_byte)`: a float32 to its code, for any format and rounding, by integer arithmetic.

    The magnitude is split into the code below it and the rest up to the next one, in units of 2^-shift of a step; the
    rounding decides on the rest.
    """
    mantissa, smallest = fmt.mantissa_bits, (128 if fmt.has_subnormals else 127) - fmt.bias
    largest, next_value = float(fmt.grid[-1]), float(fmt.after_largest)
    step = next_value - largest
    top, top_code = F(largest), fmt.largest_code
    specials = [c for c in (fmt.infinity_code, fmt.nan_code, fmt.largest_code) if c is not None]
    overflow, nan = (top_code if saturate else specials[0]), fmt.code_of_nan
    signed, has_zero = fmt.signed, fmt.has_subnormals
    # What is added to a negative number's code: its sign bit, or for two's complement minus twice the code.
    sign, factor, mask = (0, -2, (1 << fmt.bits) - 1) if fmt.twos_complement else (1 << (fmt.bits - 1), 0, 0xFF)
    up_for = _make_goes_up(rounding)
    stochastic, middle = rounding == STOCHASTIC, (largest + next_value) / 2

    @device
    def split(m):
        """The code at or below a finite magnitude, and the rest and its unit."""
        bits = as_u32(m)
        exponent, fraction = np.int64(bits >> U32(23)), np.int64(bits & U32(0x7FFFFF))
        fraction = fraction + 0x800000 if exponent > 0 else fraction * 2
        below = smallest - exponent if smallest > exponent else 0
        shift = min(23 - mantissa + below, 40)
        code = fraction >> shift
        code = code + ((max(exponent, smallest) - smallest) << mantissa) if has_zero else code - 1 + exponent
        return code, fraction & ((1 << shift) - 1), shift

    @device
    def beyond(m, negative):
        """The code of a magnitude from the largest value on."""
        position = 1 if np.float64(m) > middle else (0 if np.float64(m) == middle else -1)
        goes_up = m > top and up_for(position, top_code & 1, negative)
        return overflow if goes_up or (not saturate and m > FLT_MAX) else top_code

    @device
    def dithered(m, random_byte):
        """m plus random_byte / 256 of the step to the next code, rounded to float32 once."""
        exponent = max(np.int64(as_u32(m) >> U32(23)), smallest)
        width = step if m >= top else math.ldexp(1.0, exponent - 127 - mantissa)
        return F(np.float64(m) + width * (np.float64(random_byte) / 256.0))

    @device
    def encode(x, random_byte):
        m = as_f32(np.uint32(as_u32(x) & casts.MAGNITUDE))
        negative = signed and as_u32(x) >= casts.SIGN
        if x != x:
            return np.uint8(nan)
        m = dithered(m, random_byte) if stochastic else m
        if stochastic and np.float64(m) >= next_value:
            code = np.int64(overflow)
        elif m >= top:
            code = np.int64(beyond(m, negative))
        elif not has_zero and as_u32(m) < U32(0x400000):
            code = np.int64(0)
        else:
            code, rest, shift = split(m)
            half = np.int64(1) << (shift - 1)
            position = 1 if rest > half else (0 if rest == half else -1)
            if rest > 0 and up_for(position, code & 1, negative):
                code += 1
            if code > top_code:
                code = np.int64(overflow)
        return np.uint8((code + (sign + factor * code if negative else 0)) & mask)

    return encode


def _make_goes_up(rounding):
    """Return `up(position, odd, negative)`: whether an inexact magnitude moves to the upper code."""
    return {
        "nearest_even": device(lambda position, odd, negative: position > 0 or (position == 0 and odd == 1)),
        "nearest_away": device(lambda position, odd, negative: position >= 0),
        "toward_zero": device(lambda position, odd, negative: False),
        "up": device(lambda position, odd, negative: not negative),
        "down": device(lambda position, odd, negative: negative),
        STOCHASTIC: device(lambda position, odd, negative: False),
    }[rounding]


@cache
def _encode_loop(fmt, saturate, rounding, storage):
    carrier, widen = casts.STORAGES[storage].carrier.type, casts.STORAGES[storage].widen
    if saturate and rounding == "nearest_even" and fmt in _FAST_FORMATS:
        scalar = casts.ENCODERS[fmt.name]
        code_of = device(lambda x, random_byte: np.uint8(scalar(x)))
    else:
        code_of = make_encoder(fmt, saturate, rounding)
    stochastic = rounding == STOCHASTIC

    def loop(x, random_bits, out, first, last):
        values, codes = x.view(carrier)[first:last], out[first:last]
        random = random_bits[first:last]
        for i in range(last - first):
            codes[i] = code_of(widen(values[i]), random[i] if stochastic else np.uint8(0))

    name = f"encode-{_format_name(fmt)}-{rounding}-{storage}{'' if saturate else '-unsaturated'}"
    return compiled(name, loop, types.void(BYTES, BYTES, BYTES, types.int64, types.int64))


def _format_name(fmt):
    """A name that tells apart formats which callers define themselves."""
    return fmt.name if FORMATS.get(fmt.name) == fmt else hashlib.sha256(f"{fields_of(fmt)}".encode()).hexdigest()[:16]


def encode(operand, fmt, saturate, rounding, random_bits, out):
    """Fill uint8 `out` with the codes of an `Operand`."""
    loop = _encode_loop(fmt, saturate, rounding, operand.storage)
    bits = NOTHING if random_bits is None else as_bytes(random_bits.array)
    run(loop, out.size, as_bytes(operand.array), bits, as_bytes(out))


@lru_cache(maxsize=1)
def _decode_loop():
    """Codes of any format by the table of its values."""

    def loop(codes, values, out, first, last):
        results, part = out.view(np.float32)[first:last], codes[first:last]
        for i in range(last - first):
            results[i] = values[part[i]]

    floats = types.Array(types.float32, 1, "C")
    return compiled("decode", loop, types.void(BYTES, floats, BYTES, types.int64, types.int64))


def decode(codes, fmt, out):
    """Fill float32 `out` with the values of an `Operand` of codes."""
    run(_decode_loop(), out.size, as_bytes(codes.array), fmt.values.copy(), as_bytes(out))


def largest_code(codes):
    """The largest of an `Operand` of codes, 0 if it is empty."""
    return int(codes.array.max(initial=0))


# --- the delayed scale ------------------------------------------------------------------------------


def update_delayed_scale(amax_history, scale, fmt, *, margin, algorithm, keep_unused):
    """Roll the history and compute the next scale: a few numbers, in NumPy."""
    amax_history, scale = as_array(amax_history, "amax_history"), as_array(scale, "scale")
    history, scale, shape = check_history(amax_history, scale)
    require_format(fmt, FP8_FORMATS)
    margin = require_integer(margin, "margin", low=-126, high=127)
    require_flag(keep_unused, "keep_unused")
    rolls_always = callable(algorithm) or not keep_unused
    if callable(algorithm):
        amax = call_algorithm(algorithm, np.asarray(amax_history), scale.size)
    elif require_choice(algorithm, "algorithm", ("max", "most_recent")) == "max":
        amax = np.fmax.reduce(history, axis=0)
    else:
        amax = history[0]
    keep = np.zeros(scale.size, bool) if rolls_always else history[0] == 0
    with np.errstate(all="ignore"):
        quotient = (fmt.max * F(2.0**-margin)) / amax
    quotient[np.isinf(quotient)] = FLT_MAX
    usable = (amax > 0) & (amax < np.inf) & ~keep
    rolled = np.zeros_like(history)
    if len(history) > 1:
        rolled[1:-1], rolled[-1] = history[2:], history[0]
    new_history = np.where(keep, history, rolled).reshape(np.shape(amax_history))
    return new_history, np.where(usable, quotient, scale).astype(F).reshape(shape)[()]
