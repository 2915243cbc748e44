"""Two float32 in one 64-bit register: from sm_100 on, one instruction multiplies or adds both.

The arithmetic is that of two float32, bit for bit. Pairs are uint64, the first number in the low half. `has_pairs` says
where they pay; `vectors.make_multiply` and `FAST_PAIRS`, the fast formulas of two numbers, are what uses them.
"""

import numpy as np

from cuda_kernels.activations import QGELU_ALPHA, TWO_GELU_CUBIC, TWO_SQRT_2_OVER_PI
from cuda_kernels.elementary import LN_2, LOG2_E, ONE, TWO, exp2_unit, fma, reciprocal_seed
from cuda_kernels.simt import U32, U64, F, as_f32, as_u32, at_least, at_most, device, ptx, smaller_magnitude

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


@ptx("fma.rn.f32x2 $0, $1, $2, $3;", "=l,l,l,l", U64, U64, U64, U64)
def fma2(a, b, c):
    """a * b + c of three pairs, each rounded once."""
    return pair(fma(first(a), first(b), first(c)), fma(second(a), second(b), second(c)))


def both(x):
    """A pair of one constant twice."""
    bits = int(F(x).view(U32))
    return U64(bits << 32 | bits)


MINUS_LOG2_E, LN_2S, ONES, MINUS_ONES = both(-LOG2_E), both(LN_2), both(ONE), both(-ONE)
CUBICS, LINEARS, ALPHAS = both(TWO_GELU_CUBIC), both(TWO_SQRT_2_OVER_PI), both(QGELU_ALPHA)


@device
def sigmoid2(x, p):
    """`activations.fast_sigmoid` of a pair."""
    product = mul2(x, MINUS_LOG2_E)
    factor = fma2(fma2(product, LN_2S, x), MINUS_ONES, ONES)
    factor = pair(smaller_magnitude(TWO, first(factor)), smaller_magnitude(TWO, second(factor)))
    sums = fma2(pair(exp2_unit(first(product)), exp2_unit(second(product))), factor, ONES)
    return pair(reciprocal_seed(first(sums)), reciprocal_seed(second(sums)))


@device
def silu2(x, p):
    """x sigmoid(x) of a pair."""
    return mul2(x, sigmoid2(x, p))


@device
def gelu2(x, p):
    """`activations.fast_gelu` of a pair."""
    return mul2(x, sigmoid2(mul2(x, fma2(mul2(CUBICS, x), x, LINEARS)), p))


@device
def qgelu2(x, p):
    """x sigmoid(1.702 x) of a pair."""
    return mul2(x, sigmoid2(mul2(ALPHAS, x), p))


@device
def clamped_silu2(x, p):
    """`clamped_silu` of a pair."""
    c = pair(at_most(first(x), p.limit), at_most(second(x), p.limit))
    return mul2(c, sigmoid2(mul2(pair(p.alpha, p.alpha), c), p))


@device
def clamped_gate2(g, p):
    """`clamped_gate` of a pair."""
    low = at_most(at_least(first(g), -p.limit), p.limit)
    high = at_most(at_least(second(g), -p.limit), p.limit)
    return fma2(pair(low, high), ONES, pair(p.glu_linear_offset, p.glu_linear_offset))


#: Fast formulas of (pair, parameters) by the name that they have in `activations.FAST`.
FAST_PAIRS = {
    "sigmoid": sigmoid2,
    "silu": silu2,
    "gelu": gelu2,
    "qgelu": qgelu2,
    "clamped_silu": clamped_silu2,
    "clamped_gate": clamped_gate2,
}
