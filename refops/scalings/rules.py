"""Rules that several scalings share, in the vocabulary of `refops.scalings.arithmetic`, and classes that have them.

Sources: TE `common/recipe/recipe_common.cuh` (float32 scales), `common/cast/mxfp8/quantize_mxfp8.cuh` and
`common/util/ptx_arch_spec.cuh` (E8M0, "up"), OCP Microscaling Formats (MX) 1.0, section 6.3 (E8M0, "floor"),
`common/cast/nvfp4/core_nvfp4.cuh` (small floats).
"""

from typing import Any

import numpy as np

from refops.arguments import require_choice, require_number
from refops.formats import E8M0, FloatFormat
from refops.hints import Number
from refops.scalings.arithmetic import FLT_MAX, F
from refops.scalings.declaration import (
    LARGEST_FINITE,
    Formulas,
    Numbers,
    Rule,
    Scaling,
    Words,
    choose,
    flags,
    non_negative,
)

U32 = np.uint32
ZERO, ONE, INFINITE = F(0), F(1), U32(0x7F800000)

#: Where the reciprocal of a scale would be subnormal.
LARGEST_MINIFLOAT = F(2.0**126)

#: How amax / max becomes a power of two.
E8M0_ROUNDINGS = ("up", "floor", "even", "ceil_ocp")


def _amax_in_words(epsilon):
    """(what becomes the scale, amaxes of which no quotient is taken): an epsilon that float32 keeps replaces zero."""
    return (f"max(amax, {float(epsilon):.9g})", "inf") if F(epsilon) > ZERO else ("amax", "0 or inf")


class Float32Scaling(Scaling):
    """Scales in float32: fmt.max / max(amax, amax_epsilon), 1 where amax is 0, infinite or NaN, the largest value of
    the input dtype where the quotient overflows; what is stored is 1 / scale.

    Attributes:
        power_2_scale: clear the mantissa, which rounds down to a power of two.
        amax_epsilon: what a smaller amax is replaced by.
    """

    amax_epsilon: Number = 0.0
    at_run_time = ("amax_epsilon",)

    def __post_init__(self):
        flags(self, "power_2_scale")
        non_negative(self, "amax_epsilon")

    @property
    def formulas(self) -> Formulas:
        """The quotient."""
        amax, unusable = _amax_in_words(self.amax_epsilon)
        quotient = f"{float(self.fmt.max):.9g} / {amax} ({unusable}: 1; overflow: {{largest}})"
        return Formulas(f"{quotient}{', mantissa cleared' * self.power_2_scale}")

    def demands(self) -> list[tuple[bool, str]]:
        stored = self.layout.scale_format
        return [(stored is None, f"scale_format must be None with scales in float32; got {stored!r}")]

    def numbers(self, dtype: Any) -> Numbers:
        return Numbers(F(self.amax_epsilon), LARGEST_FINITE[dtype])

    def block_scale(self, words: Words) -> Rule:
        where, quotient = words.where, words.quotient(F(self.fmt.max), self.power_2_scale)
        reciprocal = words.reciprocal(self.power_2_scale)

        @words.function
        def scale(amax, tensor_scale, p):
            amax = where(amax < p.epsilon, p.epsilon, amax)
            usable = (amax > ZERO) & (amax <= FLT_MAX)
            multiplier = where(usable, quotient(amax, p.largest_scale), ONE)
            return reciprocal(multiplier), multiplier

        return scale


class E8M0Scaling(Scaling):
    """Scales that are powers of two, as E8M0 bytes. An amax of zero gives 0x00, infinity 0xFE.

    Attributes:
        scale_rounding: one of `E8M0_ROUNDINGS`; `MXFP8Scaling` says what each is.
        amax_epsilon: what a smaller amax is replaced by. In `at_run_time` if code need not be compiled anew for another
            one.
    """

    scale_rounding: str
    amax_epsilon: Number = 0.0

    def __post_init__(self):
        choose(self, scale_rounding=E8M0_ROUNDINGS)
        non_negative(self, "amax_epsilon")

    @property
    def formulas(self) -> Formulas:
        """Powers of two."""
        limit, emax = self.fmt.max, int(np.floor(np.log2(self.fmt.max)))
        shift = f" - {emax}" if emax else ""
        amax, _ = _amax_in_words(self.amax_epsilon)
        byte = {
            "up": f"{amax} * f32(1/{limit:.9g}), up to the next 2^(byte-127)",
            "floor": f"127 + floor(log2 {amax}){shift}",
            "even": f"127 + floor(log2 of {amax} rounded to the element's mantissa){shift}",
            "ceil_ocp": f"127 + ceil(log2 {amax}){shift}",
        }
        return Formulas("2^(127 - byte)", decode="2^(byte - 127)", stored=byte[self.scale_rounding])

    def demands(self) -> list[tuple[bool, str]]:
        stored = self.layout.scale_format
        return [(stored == E8M0, f"scale_format must be E8M0 with scales that are powers of two; got {stored!r}")]

    def numbers(self, dtype: Any) -> Numbers:
        return Numbers(F(self.amax_epsilon), FLT_MAX)

    def scale_code(self, words: Words) -> Rule:
        where, bits_of, u32, round_up = words.where, words.bits_of, words.u32, words.encode(E8M0, "up")
        inverse, emax = ONE / F(self.fmt.max), U32(int(np.floor(np.log2(self.fmt.max))))
        none, largest, shift = U32(0), U32(254), U32(23)
        rounding = require_choice(self.scale_rounding, "scale_rounding", E8M0_ROUNDINGS)
        half = U32(1 << (22 - self.fmt.mantissa_bits))
        added = {"up": none, "floor": none, "even": half, "ceil_ocp": U32(0x7FFFFF)}[rounding]

        @words.function
        def up(amax, tensor_scale, p):
            return round_up(amax * inverse)

        @words.function
        def relative(amax, tensor_scale, p):
            exponent = u32(u32(bits_of(amax) + added) >> shift)
            byte = where(exponent > emax, u32(exponent - emax), none)
            return where((bits_of(amax) >= INFINITE) | (byte > largest), largest, byte)

        byte = up if rounding == "up" else relative

        @words.function
        def bounded(amax, tensor_scale, p):
            return byte(where(amax < p.epsilon, p.epsilon, amax), tensor_scale, p)

        return bounded if self.amax_epsilon or "amax_epsilon" in self.at_run_time else byte

    def multiplier(self, words: Words) -> Rule | None:
        inverse_power = words.inverse_power

        @words.function
        def multiplier(code, tensor_scale):
            return inverse_power(code)

        return multiplier

    def decode_factor(self, words: Words) -> Rule:
        decode = words.decode(E8M0)

        @words.function
        def factor(stored, amax):
            return decode(stored)

        return factor


class MinifloatScaling(Scaling):
    """Scales in a small float format, the layout's, alone or under a float32 scale of the tensor (or row).

    In float32, in this order: S_enc = top / amax (at most FLT_MAX; 1 where amax is 0 or inf), byte = format(block
    amax * (S_enc * float32(1 / fmt.max))), multiplier = min(1 / (value of the byte * (1 / S_enc)), FLT_MAX). Without a
    second level (`Layout.two_level`) both are what they are at S_enc = 1.

    Attributes:
        top: what the tensor's amax becomes: the largest scale times fmt.max. Needed only with a second level.
    """

    @property
    def top(self) -> float:
        """The largest scale times fmt.max."""
        raise TypeError(f"{type(self).__name__} must have a top, the largest scale times fmt.max; got none")

    def demands(self) -> list[tuple[bool, str]]:
        stored = self.layout.scale_format
        if not isinstance(stored, FloatFormat) or stored.max >= LARGEST_MINIFLOAT:
            return [(False, f"scale_format must be a FloatFormat whose values are below 2^126; got {stored!r}")]
        if not self.layout.two_level:
            return []
        largest = float(require_number(self.top, f"top of {type(self).__name__}", positive=True)) / float(self.fmt.max)
        holds = float(stored.smallest_subnormal) <= largest <= float(stored.max)
        rule = f"fmt.max, {self.fmt.max:g}, times a scale that {stored!r} can hold, at most {stored.max:g}"
        return [(holds, f"top must be {rule}; got {self.top!r}")]

    def tensor_scale(self, words: Words) -> Rule | None:
        if not self.layout.two_level:
            return None
        top, where, at_most = F(self.top), words.where, words.at_most

        @words.function
        def encode_and_decode(amax):
            scale = at_most(top / amax, FLT_MAX)
            scale = where((amax != ZERO) & (scale != ZERO), scale, ONE)
            return scale, ONE / scale

        return encode_and_decode

    def scale_code(self, words: Words) -> Rule:
        encode, inverse = words.encode(self.layout.scale_format), ONE / F(self.fmt.max)

        @words.function
        def two_levels(amax, tensor_scale, p):
            s_enc, _ = tensor_scale
            return encode(amax * (s_enc * inverse))

        @words.function
        def one_level(amax, tensor_scale, p):
            return encode(amax * inverse)

        return two_levels if self.layout.two_level else one_level

    def multiplier(self, words: Words) -> Rule | None:
        decode, reciprocal_to_scale = words.decode(self.layout.scale_format), words.reciprocal_to_scale

        @words.function
        def two_levels(code, tensor_scale):
            _, s_dec = tensor_scale
            return reciprocal_to_scale(decode(code) * s_dec)

        @words.function
        def one_level(code, tensor_scale):
            return reciprocal_to_scale(decode(code))

        return two_levels if self.layout.two_level else one_level

    def decode_factor(self, words: Words) -> Rule:
        decode = words.decode(self.layout.scale_format)

        @words.function
        def one_level(stored, amax):
            return decode(stored)

        if not self.layout.two_level:
            return one_level
        down = ONE / F(self.top)

        @words.function
        def two_levels(stored, amax):
            return (decode(stored) * amax) * down

        return two_levels
