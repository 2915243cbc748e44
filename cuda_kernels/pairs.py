"""Two float32 in one 64-bit register: from sm_100 on, one instruction multiplies or adds both.

The arithmetic is that of two float32, bit for bit. Pairs are uint64, the first number in the low half. `has_pairs` says
where they pay; `vectors.multiply_for` and `fast_words`, which chooses the words of fast formulas, use them.
"""

from functools import cache

import numpy as np

from cuda_kernels.elementary import fma
from cuda_kernels.fast import FAST_NUMBERS, NUMBERS, Arithmetic, make_fast_words
from cuda_kernels.simt import U32, U64, F, as_f32, as_u32, clipped_natively, device, ptx

WORD = U64(32)


def has_pairs(target):
    """Whether a compute capability has arithmetic on pairs."""
    return target is not None and target[0] >= 10


@ptx("mov.b64 $0, {$1, $2};", "=l,f,f", U64, F, F)
def pair(a, b):
    """Two numbers side by side; on a GPU no instruction, but a choice of registers."""
    return np.uint64(np.uint64(as_u32(a)) | np.uint64(np.uint64(as_u32(b)) << WORD))


@ptx("{ .reg .f32 t; mov.b64 {$0, t}, $1; }", "=f,l", F, U64)
def first(p):
    """The number in the low half."""
    return as_f32(np.uint32(p & U64(0xFFFFFFFF)))


@ptx("{ .reg .f32 t; mov.b64 {t, $0}, $1; }", "=f,l", F, U64)
def second(p):
    """The number in the high half."""
    return as_f32(np.uint32(p >> WORD))


@ptx("mul.rn.f32x2 $0, $1, $2;", "=l,l,l", U64, U64, U64)
def mul2(a, b):
    """The products of two pairs."""
    return pair(first(a) * first(b), second(a) * second(b))


@ptx("sub.rn.f32x2 $0, $1, $2;", "=l,l,l", U64, U64, U64)
def sub2(a, b):
    """The differences of two pairs."""
    return pair(first(a) - first(b), second(a) - second(b))


@ptx("fma.rn.f32x2 $0, $1, $2, $3;", "=l,l,l,l", U64, U64, U64, U64)
def fma2(a, b, c):
    """a * b + c of three pairs, each rounded once."""
    return pair(fma(first(a), first(b), first(c)), fma(second(a), second(b), second(c)))


def both(x):
    """A pair of one constant twice."""
    bits = int(F(x).view(U32))
    return U64(bits << 32 | bits)


@device
def twice(x):
    """A pair of one number twice."""
    return pair(x, x)


def each(function):
    """Return the function of one pair that applies `function` to each half."""
    return device(lambda x: pair(function(first(x)), function(second(x))))


def each_of_two(function):
    """Return the function of two pairs that applies `function` to their halves."""
    return device(lambda x, y: pair(function(first(x), first(y)), function(second(x), second(y))))


@cache
def make_pairs(n, fma2):
    """Return the `Arithmetic` of pairs of the numbers of `n`."""
    inverse = n.inverse
    return Arithmetic(
        constant=both,
        spread=twice,
        inverse=device(lambda x: twice(inverse(x))),
        mul=mul2,
        sub=sub2,
        fma=fma2,
        at_most=each_of_two(n.at_most),
        at_least=each_of_two(n.at_least),
        smaller_magnitude=each_of_two(n.smaller_magnitude),
        clipped=each_of_two(n.clipped),
        is_at_most=each_of_two(n.is_at_most),
        is_within=each_of_two(n.is_within),
        less_one=each_of_two(n.less_one),
        mul_sat=each_of_two(n.mul_sat),
        exp2=each(n.exp2),
        reciprocal=each(n.reciprocal),
    )


NATIVE = NUMBERS._replace(clipped=clipped_natively)
FAST_NATIVE, FAST_PAIRS = make_fast_words(NATIVE), make_fast_words(make_pairs(NATIVE, fma2))


def fast_words(target):
    """Return the `fast.FastWords` that suit a target: of pairs where `has_pairs`, else of numbers."""
    if has_pairs(target):
        return FAST_PAIRS
    return FAST_NATIVE if target is not None and target[0] >= 8 else FAST_NUMBERS
