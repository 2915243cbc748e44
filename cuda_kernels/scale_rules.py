"""The vocabulary of scale rules as device functions, and the rules of declared scalings bound to it.

`refops.scalings.arithmetic` says what each word means and gives it to NumPy. Here a word is a function of numbers that
Numba compiles for the CPU and for GPUs, which have an instruction for some. No scaling is named here: a rule has one
text, in its declaration, and the bits are those of `refops`.
"""

import hashlib
from collections import namedtuple
from functools import cache

import numpy as np

from cuda_kernels import casts
from cuda_kernels.casts import SIGN_AND_EXPONENT
from cuda_kernels.declared import device_of
from cuda_kernels.elementary import reciprocal_to_scale
from cuda_kernels.simt import SIMULATED, U32, F, as_f32, as_u32, at_most, device, magnitude, ptx, select
from refops.formats import E8M0
from refops.scalings.arithmetic import REFERENCE
from refops.scalings.declaration import FLT_MAX

ONE = F(1)
#: The file that lists the words.
VOCABULARY = "refops/scalings/arithmetic.py"


# --- words ------------------------------------------------------------------------------------------


@ptx("mov.b32 $0, $1;", "=f,f", F, F)
def settled(x):
    """x, passed so that a product with it is not contracted with an addition."""
    return x


@device
def power_of_two_inverse(scale):
    """1 / scale of a power of two from 2^-126 to 2^127, without a division."""
    bits = as_u32(scale)
    return as_f32(select(bits == U32(0x7F000000), U32(0x400000), np.uint32(U32(0x7F000000) - bits)))


@device
def inverse(scale):
    """1 / scale."""
    return ONE / scale


@cache
def make_quotient(limit):
    """Return `quotient(amax, overflow)`: limit / amax, `overflow` where that is infinite."""
    limit = F(limit)

    @device
    def quotient(amax, overflow):
        scale = limit / amax
        return select(scale > FLT_MAX, overflow, scale)

    return quotient


@cache
def make_power_of_two_quotient(limit):
    """Return `make_quotient` with the mantissa cleared, without a division.

    The bits of two positive floats differ by the bits of their quotient, except for its mantissa: where the mantissa of
    `limit` is the smaller one, the difference borrows from the exponent, which is one less, as the quotient's is. Its
    rounding does not matter: a quotient below a power of two is at least 2^-24 of it below, so rounds below it.
    That takes a normal amax; of a subnormal one the quotient is infinite, if `limit` is at least 4.
    """
    limit = F(limit)
    bits_for_one, overflowing = U32(int(as_u32(limit)) + 0x3F800000), as_u32(F(limit * F(2.0**-64) * F(2.0**-64)))
    divided = make_quotient(limit)

    @device
    def by_difference(amax, overflow):
        bits = as_u32(amax)
        quotient = select(bits <= overflowing, as_u32(overflow), np.uint32(bits_for_one - bits))
        return as_f32(np.uint32(quotient & SIGN_AND_EXPONENT))

    @device
    def by_division(amax, overflow):
        return as_f32(np.uint32(as_u32(divided(amax, overflow)) & SIGN_AND_EXPONENT))

    return by_difference if limit >= F(4) else by_division


class RuleWords:
    """The vocabulary on a target: a compute capability, or None for a CPU, the simulator and code that runs anywhere.

    Codes are uint32.
    """

    where, at_most, magnitude = staticmethod(select), staticmethod(at_most), staticmethod(magnitude)
    bits_of, u32, rounded = staticmethod(as_u32), np.uint32, staticmethod(settled)
    inverse_power = staticmethod(casts.e8m0_multiplier)
    reciprocal_to_scale = staticmethod(reciprocal_to_scale)

    def __init__(self, target=None, scaling=None):
        self._target, self._scaling = target, scaling

    def function(self, f):
        """A function of a rule, `scaling`'s."""
        return device_of(f"the scale rule of {self._scaling!r}", VOCABULARY, f)

    def encode(self, fmt, rounding="nearest_even"):
        """f(x) -> code."""
        if fmt == E8M0 and rounding == "up":
            return casts.e8m0_up_for(self._target)
        if fmt == E8M0 or rounding != "nearest_even":
            raise ValueError(f"no kernel encodes scales in {fmt!r} with rounding={rounding!r}")
        return casts.one_for(fmt, self._target)[0]

    def decode(self, fmt):
        """f(code) -> value."""
        return casts.one_for(fmt, self._target)[1]

    @staticmethod
    def quotient(limit, power_2):
        """f(amax, overflow)."""
        return make_power_of_two_quotient(limit) if power_2 else make_quotient(limit)

    @staticmethod
    def reciprocal(power_2):
        """f(scale)."""
        return power_of_two_inverse if power_2 else inverse


# --- rules ------------------------------------------------------------------------------------------

#: The rules of a scaling, as device functions. Field, meaning:
#:   tensor_scale    f(amax), or None
#:   parts           float32 numbers that it gives: 0 without one, 1, or the length of a tuple
#:   block_scale     f(amax, tensor_scale, p) -> (stored, multiplier)
#:   decode_factor   f(stored, amax)
#:   choice          `refops.scalings.declaration.Choice` of device functions, or None
Rules = namedtuple("Rules", "tensor_scale parts block_scale decode_factor choice")


@cache
def rules_of(scaling, target=None):
    """Return the `Rules` of a scaling, `compiled_as` it is, for a target."""
    words = RuleWords(target, scaling)
    return Rules(
        scaling.tensor_scale(words),
        _parts_of(scaling),
        scaling.block_scale(words),
        scaling.decode_factor(words),
        scaling.choice(words),
    )


def _parts_of(scaling):
    rule = scaling.tensor_scale(REFERENCE)
    if rule is None:
        return 0
    given = rule(np.ones(1, np.float32))
    return len(given) if isinstance(given, tuple) else 1


@cache
def content_of(scaling):
    """Digest of the text and the constants of a scaling's rules: machine code on disk is named by it.

    Files of other packages may declare scalings; the digest of sources (`ptx_cache.sources`) does not see them.
    """
    if SIMULATED:  # which keeps nothing
        return ""
    rules = rules_of(scaling)
    functions = [rules.tensor_scale, rules.block_scale, rules.decode_factor]
    if rules.choice is not None:
        functions += [*rules.choice.candidates, rules.choice.error]
    names = [f.__qualname__ for f in functions if f is not None]  # which `device` made of what they hold
    return hashlib.sha256(" ".join(names).encode()).hexdigest()[:12]


def of_tensor(scaling, amax, dtype):
    """Return (stored, multiplier) of a whole tensor, arrays (1,), by the NumPy rule.

    Args:
        amax: float32 (1,). dtype: np.dtype of the tensor.
    """
    with np.errstate(all="ignore"):
        stored, multiplier = scaling.block_scale(REFERENCE)(amax, F(0), scaling.numbers(dtype))
    return np.reshape(stored, 1), np.reshape(multiplier, 1)
