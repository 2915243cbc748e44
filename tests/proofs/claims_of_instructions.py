"""Instructions: what their Python bodies say off the GPU is what the PTX ISA says, where they are used.

A GPU runs the instruction, everything else the body, and all other claims are of the body. Fused multiply-adds, minima
and maxima are those of the solvers' theory of floats (IEEE 754). PTX has +0 above -0 in `min` and `max`; a body that
does not is asked about numbers that are not both zero.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import z3
from claims import Claim, one_more, traced
from definitions import INFINITE, MAGNITUDE, narrowed, widened
from solvers import Query
from terms import COMPILED, TRUNCATED, Term, fused, is_nan, variable

from cuda_kernels import casts, elementary, simt

F32, U8, U16, U32 = np.float32, np.uint8, np.uint16, np.uint32
SIGN = 0x80000000


class Instruction(NamedTuple):
    """One.

    Attributes:
        text: PTX. body: its meaning. inputs: name -> type. meaning: f(*inputs) -> `Term`, from the PTX ISA.
        wrong: constants of the body that are made wrong. known: f(*inputs) -> what holds of them where it is used.
        domain: that in words.
    """

    text: str
    body: Callable[..., Any]
    inputs: dict[str, type]
    meaning: Callable[..., Term]
    wrong: dict[Any, Any]
    known: Callable[..., list[Any]] = lambda *inputs: []
    domain: str = "all inputs"


def float_of(bits):
    """A float32 by its bits."""
    return Term(F32, bits=bits)


def magnitude(x):
    """|x|."""
    return float_of(x.bits & MAGNITUDE)


def least(a, b):
    """min.f32: a NaN loses, -0 is below +0."""
    smaller = z3.If(z3.fpLT(a.node, b.node), a.bits, b.bits)
    zeros = z3.And(z3.fpIsZero(a.node), z3.fpIsZero(b.node))
    chosen = z3.If(zeros, a.bits | b.bits, smaller)
    return float_of(z3.If(is_nan(a).node, b.bits, z3.If(is_nan(b).node, a.bits, chosen)))


def greatest(a, b):
    """max.f32."""
    larger = z3.If(z3.fpGT(a.node, b.node), a.bits, b.bits)
    zeros = z3.And(z3.fpIsZero(a.node), z3.fpIsZero(b.node))
    chosen = z3.If(zeros, a.bits & b.bits, larger)
    return float_of(z3.If(is_nan(a).node, b.bits, z3.If(is_nan(b).node, a.bits, chosen)))


def signed_as(x, y, found):
    """.xorsign.abs: a magnitude with the signs of both."""
    return float_of((found.bits & MAGNITUDE) | ((x.bits ^ y.bits) & SIGN))


def product_of_halves(a, b):
    """mul.rn.f16x2."""

    def half(word, k):
        return Term(U16, z3.Extract(16 * k + 15, 16 * k, word.node))

    def product(k):
        x, y = (widened(half(word, k), "float16") for word in (a, b))
        exact = z3.fpMul(z3.RNE(), x.node, y.node)  # 22 bits of 24
        return narrowed(Term(F32, exact), "float16").bits

    return Term(U32, z3.Concat(product(1), product(0)))


def positive(limit):
    """A limit is a positive number."""
    return z3.And(limit.bits != 0, z3.ULE(limit.bits, INFINITE))


def no_nan_and_not_both_zero(a, b):
    """Of `maximum` and its like: `a`, or `limit`, is no NaN."""
    return [z3.Not(z3.fpIsNaN(a.node)), z3.Not(z3.And(z3.fpIsZero(a.node), z3.fpIsZero(b.node)))]


def truncated_known(a, b, c):
    """Of stochastic rounding: a power of two from 1 to 4, 2^22 + 1, and at most 8 with the same sign."""
    power = a.bits & MAGNITUDE
    constant_bits = int(np.float32(2.0**22 + 1).view(U32))
    same_sign = (a.bits ^ c.bits) & SIGN == 0
    size = z3.fpLEQ(z3.fpAbs(c.node), z3.FPVal(8, z3.Float32()))
    return [z3.Or([power == 0x3F800000 + (k << 23) for k in range(3)]), b.bits == constant_bits, same_sign, size]


A_LIMIT = "limit > 0"
ONE_NUMBER = "one a number, not both zero"
INSTRUCTIONS = (
    Instruction(
        "min.xorsign.abs.f32",
        casts.limited,
        {"x": F32, "limit": F32},
        lambda x, limit: signed_as(x, limit, least(magnitude(x), magnitude(limit))),
        {"MAGNITUDE": lambda value: value - U32(1)},
        lambda x, limit: [positive(limit)],
        A_LIMIT,
    ),
    Instruction(
        "max.xorsign.abs.f32",
        casts.raised,
        {"x": F32, "limit": F32},
        lambda x, limit: signed_as(x, limit, greatest(magnitude(x), magnitude(limit))),
        {"MAGNITUDE": lambda value: value - U32(1)},
        lambda x, limit: [positive(limit)],
        A_LIMIT,
    ),
    Instruction(
        "shf.l.wrap.b32",
        casts.append,
        {"codes": U32, "code": U32},
        lambda codes, code: Term(U32, z3.Extract(63, 32, z3.Concat(codes.node, code.node) << 4)),
        {28: one_more},
    ),
    Instruction(
        "prmt.b32 ..., 0x7624",
        casts.make_fraction(2).__closure__[0].cell_contents,
        {"word": U32, "others": U32},
        lambda word, others: Term(
            U32,
            z3.Concat(z3.Extract(31, 16, others.node), z3.Extract(23, 16, word.node), z3.Extract(7, 0, others.node)),
        ),
        {"shift": one_more},
        lambda word, others: [z3.Extract(15, 8, others.node) == 0],
        "second byte of others 0",
    ),
    Instruction(
        "max.u32",
        casts.larger_integer,
        {"a": U32, "b": U32},
        lambda a, b: Term(U32, z3.If(z3.ULT(a.node, b.node), b.node, a.node)),
        {},
    ),
    Instruction(
        "mul.rn.f16x2",
        casts.multiply_halves,
        {"a": U32, "b": U32},
        product_of_halves,
        {16: one_more},
        lambda a, b: [b.node == 0x74007400],
        "b twice 2^14, as E2M1's decoder calls it",
    ),
    Instruction(
        "fma.rz.f32",
        casts.fma_truncated,
        {"a": F32, "b": F32, "c": F32},
        lambda a, b, c: fused(a, b, c, TRUNCATED),
        {},
        truncated_known,
        "as stochastic rounding calls it",
    ),
    Instruction("max.f32", simt.maximum, {"a": F32, "b": F32}, greatest, {}, no_nan_and_not_both_zero, ONE_NUMBER),
    Instruction(
        "min.f32",
        simt.at_most,
        {"x": F32, "limit": F32},
        least,
        {},
        lambda x, limit: no_nan_and_not_both_zero(limit, x),
        ONE_NUMBER,
    ),
    Instruction(
        "max.f32 of at_least",
        simt.at_least,
        {"x": F32, "limit": F32},
        greatest,
        {},
        lambda x, limit: no_nan_and_not_both_zero(limit, x),
        ONE_NUMBER,
    ),
    Instruction(
        "min.f32 of a and |x|",
        simt.smaller_magnitude,
        {"a": F32, "x": F32},
        lambda a, x: least(a, magnitude(x)),
        {0x7FFFFFFF: lambda value: value - 1},
        lambda a, x: no_nan_and_not_both_zero(a, x),
        ONE_NUMBER,
    ),
    Instruction(
        "max.f32 of a and |x|",
        simt.larger_magnitude,
        {"a": F32, "x": F32},
        lambda a, x: greatest(a, magnitude(x)),
        {0x7FFFFFFF: lambda value: value - 1},
        lambda a, x: no_nan_and_not_both_zero(a, x),
        ONE_NUMBER,
    ),
)


def instruction_claim(instruction):
    """One instruction."""

    def query(seeded):
        inputs = [variable(name, kind) for name, kind in instruction.inputs.items()]
        fault = (instruction.wrong or None) if seeded else None
        got = traced(instruction.body, *inputs, rule=COMPILED, fault=fault)
        expected = instruction.meaning(*inputs)
        if seeded and not instruction.wrong:  # a body without constants: of the second argument the next number
            wrong = float_of(inputs[1].bits + 1) if inputs[1].dtype == F32 else inputs[1] + U32(1)
            got = traced(instruction.body, inputs[0], wrong, *inputs[2:], rule=COMPILED)
        return Query(dict(zip(instruction.inputs, inputs, strict=True)), got, expected, instruction.known(*inputs))

    def reference(part, **given):
        """The body on numbers, as in the simulator."""
        return [instruction.body(*given.values())]

    return Claim(f"{instruction.body.__name__} = {instruction.text}", instruction.domain, {"body": query}, reference)


CLAIMS = list(map(instruction_claim, INSTRUCTIONS))


# --- what does not hold -----------------------------------------------------------------------------


#: Have counterexamples: see docs/guide/proofs.md. No cast and no rule meets them.
BROKEN = [
    instruction_claim(
        Instruction(
            "fma.rn.f32",
            elementary.fma,
            {"a": F32, "b": F32, "c": F32},
            fused,
            {},
            lambda a, b, c: [z3.Not(z3.fpIsNaN(one.node)) for one in (a, b, c)],
            "all numbers",
        )
    ),
    instruction_claim(
        Instruction(
            "max.f32",
            simt.maximum,
            {"a": F32, "b": F32},
            greatest,
            {},
            lambda a, b: [z3.fpIsZero(a.node), z3.fpIsZero(b.node)],
            "zeros",
        )
    ),
]
