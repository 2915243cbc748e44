"""Every instruction of the software GPU against NumPy, ml_dtypes and Python's integers.

These tests load the software GPU into their process, so they are an invocation of their own: `pytest tests/emulator`.
"""

import math

import ml_dtypes
import numpy as np
import pytest
from ptx_kernels import fault_of, run
from small_formats import doubles, every_brain_and_more, magnitudes, nearest_codes

F = np.float32
BF16 = ml_dtypes.bfloat16
NAN = 0x7FFFFFFF  # what float32 arithmetic makes of every NaN
HALF_NAN = 0x7FFF
WORD = 0xFFFFFFFF


def bits(value):
    """The bits of a float32."""
    return int(F(value).view(np.uint32))


def single(value):
    """A float32 as a constant of PTX."""
    return f"0f{bits(value):08X}"


def pair(high, low, dtype):
    """Two 16-bit floats in a word."""
    high, low = (int(np.array(value, dtype).view(np.uint16)) for value in (high, low))
    return high << 16 | low


def halves(high, low):
    """Two float16 in a word."""
    return pair(high, low, np.float16)


def brains(high, low):
    """Two bfloat16 in a word."""
    return pair(high, low, BF16)


def case(name, body, expected, **how):
    """A case of one thread, or of as many as `expected` has words."""
    return pytest.param(body, expected, how, id=name)


def check(body, expected, how):
    """Run a body and compare words; a float is compared by its bits in float32."""
    wanted = expected if isinstance(expected, list) else [expected]
    wanted = [bits(value) if isinstance(value, float) else value & WORD for value in wanted]
    found = run(body, threads=len(wanted), **how)
    assert [hex(word) for word in found] == [hex(word) for word in wanted]


# --- integers ---------------------------------------------------------------------------------------


def table_of_three(a, b, c, table):
    """lop3 by its definition: bit by bit, the bits of a, b and c are the number of a bit of the table."""
    found = 0
    for place in range(32):
        number = (a >> place & 1) << 2 | (b >> place & 1) << 1 | (c >> place & 1)
        found |= (table >> number & 1) << place
    return found


ONES = "mov.u32 %r1, -1; "
INTEGERS = [
    case("mul.hi.s32", "mul.hi.s32 %d, -5, 0x40000000;", -5 * 0x40000000 >> 32),
    case("mad.lo", "mad.lo.s32 %d, 7, 6, 3;", 7 * 6 + 3),
    case("mad.hi.u32", "mad.hi.u32 %d, 0xFFFFFFFF, 0xFFFFFFFF, 1;", (WORD * WORD >> 32) + 1),
    case("mul24.hi.s32", "mul24.hi.s32 %d, 0x7FFFFF, 0x7FFFFF;", 0x7FFFFF**2 >> 16),
    case("mul.wide.s32", "mul.wide.s32 %rd5, -3, 5; mov.b64 {%r1, %d}, %rd5;", -15 >> 32),
    case("INT_MIN / -1", ONES + "div.s32 %d, 0x80000000, %r1;", 0x80000000),
    case("rem.s32", "mov.u32 %r1, -7; rem.s32 %d, %r1, 3;", -1),
    case("bfe.s32", "bfe.s32 %d, 0x000000F0, 4, 4;", -1),
    case("bfe.s32 past the top", "bfe.s32 %d, 0x80000000, 30, 8;", -2),
    case("bfe.u32", "bfe.u32 %d, 0x12345678, 8, 12;", 0x12345678 >> 8 & 0xFFF),
    case("bfi", "bfi.b32 %d, 0xAB, 0x11111111, 8, 8;", 0x1111AB11),
    case("brev", "brev.b32 %d, 0x1;", 0x80000000),
    case("popc", "popc.b32 %d, 0xF0F1;", (0xF0F1).bit_count()),
    case("clz", "clz.b32 %d, 0x00010000;", 32 - (0x10000).bit_length()),
    case("popc.b64", "mov.u64 %rd5, -1; popc.b64 %d, %rd5;", 64),
    case("bfind", "bfind.s32 %d, -2;", 0),
    case("bfind.shiftamt", "bfind.shiftamt.u32 %d, 16;", 27),
    case("sad", "sad.u32 %d, 3, 10, 5;", abs(3 - 10) + 5),
    case("dp4a", "dp4a.s32.s32 %d, 0x01FF0203, 0x02020202, 10;", 10 + 2 * (1 - 1 + 2 + 3)),
    case("dp2a", "dp2a.lo.u32.u32 %d, 0x00030002, 0x00000504, 1;", 1 + 2 * 4 + 3 * 5),
    case("prmt", "prmt.b32 %d, 0x33221100, 0x77665544, 0x5410;", 0x55441100),
    case("prmt of signs", "prmt.b32 %d, 0x80, 0, 0x8888;", WORD),
    case(
        "lop3",
        "lop3.b32 %d, 0xFF00FF00, 0x0FF00FF0, 0x12345678, 0xE2;",
        table_of_three(0xFF00FF00, 0x0FF00FF0, 0x12345678, 0xE2),
    ),
    case("lop3.or", "setp.eq.u32 %p1, 1, 2; lop3.or.b32 %r1|%p2, 1, 1, 0, 0xC0, %p1; selp.b32 %d, 5, 6, %p2;", 5),
    case("shf.l.wrap", "shf.l.wrap.b32 %d, 0x80000001, 0x12345678, 4;", (0x1234567880000001 << 4 >> 32) & WORD),
    case("shf.r.clamp", "shf.r.clamp.b32 %d, 0x80000001, 0x12345678, 40;", 0x12345678),
    case("add.cc", ONES + "add.cc.u32 %r2, %r1, 1; addc.u32 %d, 5, 0;", 6),
    case("sub.cc", "sub.cc.u32 %r2, 0, 1; subc.u32 %d, 5, 0;", 4),
    case("madc", "mad.lo.cc.u32 %r1, 0x10000, 0x10000, 7; madc.hi.u32 %d, 0x10000, 0x10000, 3;", 4),
    case("add.sat", "add.sat.s32 %d, 0x7FFFFFFF, 5;", 0x7FFFFFFF),
    case("sub.sat", "mov.u32 %r1, 0x80000000; sub.sat.s32 %d, %r1, 5;", 0x80000000),
    case("max.s16x2", "max.s16x2 %d, 0x0001FFFF, 0xFFFF0002;", 0x00010002),
    case("max.relu", "max.relu.s32 %d, -3, -5;", 0),
    case("bmsk", "bmsk.clamp.b32 %d, 4, 8;", 0xFF0),
    case("szext", "szext.clamp.s32 %d, 0xFF, 8;", -1),
    case("shr.s32 by 40", "mov.u32 %r1, 40; shr.s32 %d, 0x80000000, %r1;", -1),
    case("shl by 32", "mov.u32 %r1, 32; shl.b32 %d, 1, %r1;", 0),
    case("cnot", "cnot.b32 %d, 0;", 1),
    case("shl.b64", "mov.u64 %rd5, 1; shl.b64 %rd6, %rd5, 33; mov.b64 {%r1, %d}, %rd6;", 2),
    case("cvt.sat.s8", "cvt.sat.s8.s32 %d, 300;", 127),
    case("cvt.s8 wraps", "cvt.s8.s32 %d, 200;", 200 - 256),
    case("cvt.s64 extends", ONES + "cvt.s64.s32 %rd5, %r1; mov.b64 {%r2, %d}, %rd5;", -1),
    case("cvt.u64 does not", ONES + "cvt.u64.u32 %rd5, %r1; mov.b64 {%r2, %d}, %rd5;", 0),
    case("cvt into a wider register", "mov.u32 %r1, -7; cvt.s32.s32 %rd5, %r1; mov.b64 {%r2, %d}, %rd5;", -1),
    case("cvt.pack", "cvt.pack.sat.u8.s32.b32 %d, 300, -1, 0x1234;", 0x1234FF00),
    case("slct", "slct.s32.s32 %d, 1, 2, -1;", 2),
    case("selp", "setp.lt.u32 %p1, 1, 2; selp.b32 %d, 1, 2, %p1;", 1),
    case("predicates", "setp.lt.u32 %p1, 1, 2; not.pred %p2, %p1; xor.pred %p3, %p1, %p2; selp.b32 %d, 1, 2, %p3;", 1),
]


@pytest.mark.parametrize("body, expected, how", INTEGERS)
def test_integers(body, expected, how):
    check(body, expected, how)


def test_division_by_zero_is_defined_by_nobody_but_runs():
    """The ISA leaves the result to the machine; here all ones, as GPUs give."""
    assert run("mov.u32 %r1, 0; div.u32 %d, 5, %r1;")[0] == WORD


A = np.array([0, 1, 2, 3, 5, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0x80000001, WORD, 0x12345678, 0xDEADBEEF], np.uint32)
GRID_A, GRID_B = (grid.reshape(-1) for grid in np.meshgrid(A, A))
SIGNED_A, SIGNED_B = GRID_A.view(np.int32).astype(object), GRID_B.view(np.int32).astype(object)
PLAIN_A, PLAIN_B = GRID_A.astype(object), GRID_B.astype(object)
OF_PAIRS = {
    "add.u32": PLAIN_A + PLAIN_B,
    "sub.s32": SIGNED_A - SIGNED_B,
    "mul.lo.u32": PLAIN_A * PLAIN_B,
    "mul.hi.u32": PLAIN_A * PLAIN_B >> 32,
    "mul.hi.s32": SIGNED_A * SIGNED_B >> 32,
    "min.s32": np.minimum(SIGNED_A, SIGNED_B),
    "max.u32": np.maximum(PLAIN_A, PLAIN_B),
    "and.b32": PLAIN_A & PLAIN_B,
    "or.b32": PLAIN_A | PLAIN_B,
    "xor.b32": PLAIN_A ^ PLAIN_B,
    "shl.b32": np.array([a << b if b < 32 else 0 for a, b in zip(PLAIN_A, PLAIN_B, strict=True)], object),
    "shr.u32": np.array([a >> min(b, 32) for a, b in zip(PLAIN_A, PLAIN_B, strict=True)], object),
    "shr.s32": np.array([a >> min(b, 32) for a, b in zip(SIGNED_A, PLAIN_B, strict=True)], object),
}


@pytest.mark.parametrize("opcode", OF_PAIRS)
def test_integers_of_many_pairs(opcode):
    found = run(f"{opcode} %d, %a, %b;", a=GRID_A, b=GRID_B)
    np.testing.assert_array_equal(found, (OF_PAIRS[opcode] & WORD).astype(np.uint32))


@pytest.mark.parametrize("sign", "us")
def test_quotients_and_remainders(sign):
    """Towards zero, as in C; the divisor is not 0."""
    here = GRID_B != 0
    a, b = (PLAIN_A, PLAIN_B) if sign == "u" else (SIGNED_A, SIGNED_B)
    quotients = [abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1) for x, y in zip(a[here], b[here], strict=True)]
    remainders = [x - q * y for x, y, q in zip(a[here], b[here], quotients, strict=True)]
    body = f"div.{sign}32 %d, %a, %b; rem.{sign}32 %d1, %a, %b;"
    found, rest = run(body, a=GRID_A[here], b=GRID_B[here], second=True)
    assert list(found) == [q & WORD for q in quotients]
    assert list(rest) == [r & WORD for r in remainders]


# --- float32 ----------------------------------------------------------------------------------------


def on_f(name, code, expected):
    """A case whose result is %f9."""
    return case(name, code + " mov.b32 %d, %f9;", expected)


SINGLES = [
    on_f("inf - inf", "mov.f32 %f1, 0f7F800000; sub.f32 %f9, %f1, %f1;", NAN),
    on_f("max: NaN loses", f"max.f32 %f9, 0f7FC00001, {single(2)};", 2.0),
    on_f("max.NaN", f"max.NaN.f32 %f9, 0f7FC00001, {single(2)};", NAN),
    on_f("max of two NaN", "max.f32 %f9, 0f7FC00001, 0fFFC00000;", NAN),
    on_f("max of zeros", "mov.f32 %f1, 0f80000000; max.f32 %f9, %f1, 0f00000000;", 0.0),
    on_f("min of zeros", "mov.f32 %f1, 0f00000000; min.f32 %f9, %f1, 0f80000000;", -0.0),
    on_f("max of three", f"max.f32 %f9, {single(1)}, {single(5)}, {single(3)};", 5.0),
    on_f("max.xorsign.abs", f"max.xorsign.abs.f32 %f9, {single(-3)}, {single(2)};", -3.0),
    on_f("subnormals stay", "mov.f32 %f1, 0f00400000; add.f32 %f9, %f1, 0f00000000;", 0x00400000),
    on_f("add.ftz", "mov.f32 %f1, 0f80400000; add.ftz.f32 %f9, %f1, 0f80000000;", 0x80000000),
    on_f("fma.rz", f"fma.rz.f32 %f9, {single(1)}, {single(1)}, 0f33000000;", 1.0),
    on_f("fma.rp", f"fma.rp.f32 %f9, {single(1)}, {single(1)}, 0f30000000;", bits(1) + 1),
    on_f("mul.sat", f"mul.sat.f32 %f9, {single(3)}, {single(2)};", 1.0),
    on_f("sat of NaN", f"mul.sat.f32 %f9, 0f7FC00000, {single(2)};", 0.0),
    on_f("sqrt of -1", f"sqrt.rn.f32 %f9, {single(-1)};", NAN),
    on_f("ex2 of -0", "ex2.approx.ftz.f32 %f9, 0f80000000;", 1.0),
    on_f("lg2 of 0", "lg2.approx.f32 %f9, 0f00000000;", -math.inf),
    on_f("div.approx by more than 2^126", f"div.approx.f32 %f9, {single(1)}, 0f7F000001;", 0.0),
    on_f("copysign", f"copysign.f32 %f9, {single(-1)}, {single(7)};", -7.0),
    on_f("slct", f"slct.f32.s32 %f9, {single(1)}, {single(2)}, -1;", 2.0),
    on_f("set.f32", f"set.le.f32.f32 %f9, {single(1)}, {single(2)};", 1.0),
    on_f("decimal constants", "add.f32 %f9, 1.5, 0.25;", 1.75),
    on_f("neg", "mov.f32 %f1, 0f00000000; neg.f32 %f9, %f1;", -0.0),
    on_f("abs", f"abs.f32 %f9, {single(-2)};", 2.0),
    case("set.u32 with NaN", f"set.neu.u32.f32 %d, 0f7FC00000, {single(2)};", WORD),
    case("setp.ne with NaN", f"setp.ne.f32 %p1, 0f7FC00000, {single(2)}; selp.b32 %d, 1, 0, %p1;", 0),
    case("setp.num", f"setp.num.f32 %p1, 0f7FC00000, {single(2)}; selp.b32 %d, 1, 0, %p1;", 0),
    case(
        "setp p|q", f"setp.lt.f32 %p1|%p2, {single(3)}, {single(2)}; @%p1 add.u32 %d, %d, 1; @%p2 add.u32 %d, %d, 2;", 2
    ),
    case(
        "setp with another predicate",
        f"setp.eq.u32 %p3, 1, 1; setp.lt.and.f32 %p1|%p2, {single(3)}, {single(2)}, !%p3;"
        " @%p1 add.u32 %d, %d, 1; @%p2 add.u32 %d, %d, 2;",
        0,
    ),
    case(
        "testp",
        "testp.subnormal.f32 %p1, 0f00000001; testp.finite.f32 %p2, 0f7F800000;"
        " @%p1 add.u32 %d, %d, 1; @%p2 add.u32 %d, %d, 2;",
        1,
    ),
    case(
        "f32x2",
        f"mov.b64 %rd5, {{{single(1.5)}, {single(2)}}}; fma.rn.f32x2 %rd6, %rd5, %rd5, %rd5;"
        " mov.b64 {%d, %r1}, %rd6;",
        1.5 * 1.5 + 1.5,
    ),
    case(
        "f64",
        "mov.f64 %fd1, 0d4000000000000000; sqrt.rn.f64 %fd2, %fd1; cvt.rn.f32.f64 %f1, %fd2; mov.b32 %d, %f1;",
        math.sqrt(2),
    ),
]


@pytest.mark.parametrize("body, expected, how", SINGLES)
def test_singles(body, expected, how):
    check(body, expected, how)


SPECIAL = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-45, 2.0**-126, 3.4e38, 1, -1, 1 + 2.0**-23], F)


def draw(count, seed, spread=40):
    """Values of many sizes, and special ones."""
    rng = np.random.default_rng(seed)
    drawn = (rng.standard_normal(count) * np.exp2(rng.integers(-spread, spread + 1, count))).astype(F)
    drawn[: SPECIAL.size] = SPECIAL
    return rng.permutation(drawn)


def same_bits(found, expected):
    """Words equal float32 values bit for bit, where every NaN is the canonical one."""
    expected = np.asarray(expected, F)
    wanted = np.where(np.isnan(expected), np.uint32(NAN), expected.view(np.uint32))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_arithmetic_of_two_singles(name):
    a, b = draw(16384, 1), draw(16384, 2)
    operation = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}[name]
    with np.errstate(all="ignore"):
        expected = operation(a, b)
    found = run(f"mov.b32 %f1, %a; mov.b32 %f2, %b; {name}.rn.f32 %f9, %f1, %f2; mov.b32 %d, %f9;", a=a, b=b)
    same_bits(found, expected)


def directed(exact, mode):
    """float64 values rounded to float32 in one of the directions."""
    near = exact.astype(F)
    too_high, too_low = near > exact, near < exact
    down = {"rz": too_high & (exact > 0), "rm": too_high, "rp": np.zeros_like(too_high)}[mode]
    up = {"rz": too_low & (exact < 0), "rm": np.zeros_like(too_low), "rp": too_low}[mode]
    near = np.where(down, np.nextafter(near, F(-np.inf)), near)
    return np.where(up, np.nextafter(near, F(np.inf)), near).astype(F)


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
@pytest.mark.parametrize("name", ["add", "mul", "fma", "sqrt", "rcp"])
def test_roundings_of_the_isa(name, mode):
    """In float64 the results are exact, or for roots and reciprocals never so near to a float32 that it matters."""
    rng = np.random.default_rng(3)
    a, b, c = (
        rng.integers(-4095, 4096, 4096).astype(F) * np.exp2(rng.integers(-6, 7, 4096)).astype(F) for _ in range(3)
    )
    if name in ("add", "mul"):
        a, b = ((1 + rng.random(4096)).astype(F) * np.exp2(rng.integers(-10, 11, 4096)).astype(F) for _ in range(2))
    if name in ("sqrt", "rcp"):
        a = (1 + rng.random(4096)).astype(F)
    wide_a, wide_b, wide_c = (one.astype(np.float64) for one in (a, b, c))
    exact = {
        "add": wide_a + wide_b,
        "mul": wide_a * wide_b,
        "fma": wide_a * wide_b + wide_c,
        "sqrt": np.sqrt(np.abs(wide_a)),
        "rcp": 1 / np.where(wide_a == 0, 1, wide_a),
    }[name]
    sources = {"add": "%f1, %f2", "mul": "%f1, %f2", "fma": "%f1, %f2, %f3"}.get(name, "%f1")
    body = f"mov.b32 %f1, %a; mov.b32 %f2, %b; mov.b32 %f3, %c; {name}.{mode}.f32 %f9, {sources}; mov.b32 %d, %f9;"
    found = run(body, a=a, b=b, c=c).view(F)
    inexact = exact != exact.astype(F)
    assert inexact.any()
    np.testing.assert_array_equal(found, directed(exact, mode))  # -0 and 0 count as equal here


def test_fma_has_one_rounding():
    """Compared with integers: a product of 24 bits each and a sum, rounded once."""
    rng = np.random.default_rng(4)
    a, b, c = (rng.integers(1 << 23, 1 << 24, 4096) for _ in range(3))
    exact = [int(x) * int(y) - (int(z) << 23) for x, y, z in zip(a, b, c, strict=True)]
    expected = np.array([rounded_to_single(value) for value in exact])
    given = [one.astype(F).view(np.uint32) for one in (a, b, -c * 2.0**23)]
    found = run(
        "mov.b32 %f1, %a; mov.b32 %f2, %b; mov.b32 %f3, %c; fma.rn.f32 %f9, %f1, %f2, %f3; mov.b32 %d, %f9;",
        a=given[0],
        b=given[1],
        c=given[2],
    )
    same_bits(found, expected)


def rounded_to_single(value):
    """A Python integer as the nearest float32, ties to even."""
    size = abs(value)
    shift = max(size.bit_length() - 24, 0)
    kept, rest = size >> shift, size & ((1 << shift) - 1)
    half = 1 << shift >> 1
    kept += rest > half or (rest == half != 0 and kept & 1)
    return math.copysign(math.ldexp(kept, shift), value)


@pytest.mark.parametrize(
    "name, function", [("sqrt.rn", np.sqrt), ("ex2.approx", np.exp2), ("lg2.approx", np.log2), ("rcp.approx", None)]
)
def test_functions_of_one_single(name, function):
    """Without a seed an approximate unit gives the nearest float32 of the exact value."""
    a = draw(8192, 5, spread=5)
    with np.errstate(all="ignore"):
        expected = (1 / a.astype(np.float64) if function is None else function(a.astype(np.float64))).astype(F)
    same_bits(run(f"mov.b32 %f1, %a; {name}.f32 %f9, %f1; mov.b32 %d, %f9;", a=a), expected)


# --- float16 and bfloat16 ---------------------------------------------------------------------------

HALVES = [
    case("fma.rn.relu.f16x2", f"fma.rn.relu.f16x2 %d, {halves(3, 2)}, {halves(2, 2)}, {halves(1, -9)};", halves(7, 0)),
    case("max.NaN.bf16x2", f"max.NaN.bf16x2 %d, {brains(3, np.nan)}, {brains(4, 1)};", brains(4, 0) | HALF_NAN),
    case("max.xorsign.abs.bf16x2", f"max.xorsign.abs.bf16x2 %d, {brains(-3, 1)}, {brains(2, 4)};", brains(-3, 4)),
    case("neg.f16", f"mov.b16 %h1, {halves(0, 1)}; neg.f16 %h2, %h1; cvt.u32.u16 %d, %h2;", halves(0, -1)),
    case("abs.bf16x2", f"abs.bf16x2 %d, {brains(-3, -0.0)};", brains(3, 0)),
    case(
        "setp.ftz.f16x2",  # the smallest subnormal is 0
        "setp.lt.ftz.f16x2 %p1|%p2, 0, 0x00010001; @%p1 add.u32 %d, %d, 1; @!%p2 add.u32 %d, %d, 2;",
        2,
    ),
    case(
        "setp.f16x2",
        f"setp.lt.f16x2 %p1|%p2, {halves(5, 1)}, {halves(4, 2)}; @%p1 add.u32 %d, %d, 1; @%p2 add.u32 %d, %d, 2;",
        1,
    ),
]


@pytest.mark.parametrize("body, expected, how", HALVES)
def test_halves(body, expected, how):
    check(body, expected, how)


def every_half(dtype, seed):
    """All 65536 numbers of a format, and as many at random."""
    codes = np.arange(65536, dtype=np.uint16)
    return codes.view(dtype), np.random.default_rng(seed).permutation(codes).view(dtype)


@pytest.mark.parametrize("dtype, name", [(np.float16, "f16"), (BF16, "bf16")])
@pytest.mark.parametrize("operation", ["add", "sub", "mul", "fma"])
def test_arithmetic_of_halves(operation, dtype, name):
    """One rounding, of a result that float64 holds exactly but for sums of very different sizes: those are left out."""
    a, b = every_half(dtype, 6)
    c = np.roll(b, 77)
    x, y, z = (doubles(one) for one in (a, b, c))
    with np.errstate(all="ignore"):
        exact = {"add": x + y, "sub": x - y, "mul": x * y, "fma": x * y + z}[operation]
        summands = {"add": (x, y), "sub": (x, y), "mul": (x, x), "fma": (x * y, z)}[operation]
        ratio = np.abs(np.log2(np.abs(summands[0])) - np.log2(np.abs(summands[1])))
    certain = ~np.isfinite(ratio) | (ratio < 28) | ~np.isfinite(exact)
    expected = rounded_to_half(exact, dtype)
    sources = "%h1, %h2, %h3" if operation == "fma" else "%h1, %h2"
    body = (
        "cvt.u16.u32 %h1, %a; cvt.u16.u32 %h2, %b; cvt.u16.u32 %h3, %c;"
        f"{operation}.rn.{name} %h4, {sources}; cvt.u32.u16 %d, %h4;"
    )
    found = run(body, a=a.view(np.uint16), b=b.view(np.uint16), c=c.view(np.uint16))
    assert certain.mean() > 0.15
    np.testing.assert_array_equal(found[certain], expected[certain])


def rounded_to_half(exact, dtype):
    """Bits of float64 values as the nearest number of a 16-bit format, NaN as the canonical one."""
    info = ml_dtypes.finfo(dtype)
    unit = np.exp2(np.maximum(np.floor(np.log2(np.maximum(np.abs(exact), 1e-300))), info.minexp) - info.nmant)
    with np.errstate(all="ignore"):
        near = np.where(np.isfinite(exact), np.rint(exact / unit) * unit, exact)  # a multiple of the last place
        near = np.where(np.abs(near) > float(info.max), np.copysign(np.inf, near), near)
        found = near.astype(F).astype(dtype).view(np.uint16).astype(np.uint32)
    zeros = (near == 0) & np.signbit(exact)
    return np.where(np.isnan(exact), HALF_NAN, np.where(zeros, 0x8000, found))


# --- conversions ------------------------------------------------------------------------------------

CONVERSIONS = [
    case("NaN to s32", "cvt.rzi.s32.f32 %d, 0f7FC00000;", 0),
    case("NaN to u64", "cvt.rzi.u64.f32 %rd5, 0f7FC00000; mov.b64 {%r1, %d}, %rd5;", 0x80000000),
    case("3e9 to s32", f"cvt.rni.s32.f32 %d, {single(3e9)};", 0x7FFFFFFF),
    case("-1 to u8", f"cvt.rzi.u8.f32 %d, {single(-1)};", 0),
    case("2.5 to the nearest", f"cvt.rni.s32.f32 %d, {single(2.5)};", 2),
    case(
        "cvt.rp.f32.s64",
        "mov.u64 %rd5, 0x4000000000000001; cvt.rp.f32.s64 %f1, %rd5; mov.b32 %d, %f1;",
        bits(2.0**62) + 1,
    ),
    case(
        "cvt.rn.bf16.u64",
        "mov.u64 %rd5, 0x4040000000000001; cvt.rn.bf16.u64 %h1, %rd5; cvt.u32.u16 %d, %h1;",
        brains(0, 2.0**62) + 1,
    ),
    case("cvt.rz.f16.f32", f"cvt.rz.f16.f32 %h1, {single(70000)}; cvt.u32.u16 %d, %h1;", halves(0, 65504)),
    case("cvt.rn.satfinite.f16", "cvt.rn.satfinite.f16.f32 %h1, 0fFF800000; cvt.u32.u16 %d, %h1;", halves(0, -65504)),
    case("cvt.rn.relu.bf16", f"cvt.rn.relu.bf16.f32 %h1, {single(-3)}; cvt.u32.u16 %d, %h1;", 0),
    case("cvt.rna.tf32", "cvt.rna.tf32.f32 %d, 0f3F801000;", 0x3F802000),
    case("cvt.rn.tf32", "cvt.rn.tf32.f32 %d, 0f3F801000;", 0x3F800000),
    case("cvt.sat.f32", f"cvt.sat.f32.f32 %f1, {single(-2)}; mov.b32 %d, %f1;", 0.0),
    case("cvt.sat of NaN", "cvt.sat.f32.f32 %f1, 0f7FC00000; mov.b32 %d, %f1;", 0.0),
    case("cvt.rmi.f32", f"cvt.rmi.f32.f32 %f1, {single(-2.5)}; mov.b32 %d, %f1;", -3.0),
    case("cvt.ftz", "cvt.ftz.f64.f32 %fd1, 0f00400000; cvt.rn.f32.f64 %f1, %fd1; mov.b32 %d, %f1;", 0.0),
]


@pytest.mark.parametrize("body, expected, how", CONVERSIONS)
def test_conversions(body, expected, how):
    check(body, expected, how)


#: name in PTX -> dtype, bits in a pair, register for a pair
SMALL = {
    "e4m3": (ml_dtypes.float8_e4m3fn, 8, "%h1"),
    "e5m2": (ml_dtypes.float8_e5m2, 8, "%h1"),
    "e2m3": (ml_dtypes.float6_e2m3fn, 8, "%h1"),
    "e3m2": (ml_dtypes.float6_e3m2fn, 8, "%h1"),
    "e2m1": (ml_dtypes.float4_e2m1fn, 4, "%b1"),
}
READ = {8: "cvt.u32.u16 %d, %h1;", 4: "mov.b16 %h2, {%b1, 0}; cvt.u32.u16 %d, %h2;"}
WRITE = {8: "cvt.u16.u32 %h1, %a;", 4: "cvt.u16.u32 %h1, %a; mov.b16 {%b1, %b2}, %h1;"}


@pytest.mark.parametrize("name", SMALL)
def test_singles_to_small_pairs(name):
    """Every bfloat16 and values between, in the lower place and, in another order, in the upper one."""
    dtype, width, register = SMALL[name]
    low = every_brain_and_more(7)
    high = np.roll(low, 4321)
    body = f"mov.b32 %f1, %a; mov.b32 %f2, %b; cvt.rn.satfinite.{name}x2.f32 {register}, %f1, %f2; {READ[width]}"
    found = run(body, a=high, b=low)
    np.testing.assert_array_equal(found, nearest_codes(high, dtype) << width | nearest_codes(low, dtype))


@pytest.mark.parametrize("name", SMALL)
def test_the_reference_is_that_of_ml_dtypes(name):
    """The search among the numbers agrees with another implementation, so that both are what they should be."""
    dtype = SMALL[name][0]
    x = every_brain_and_more(8)
    x = x[np.isfinite(x)]
    largest = float(ml_dtypes.finfo(dtype).max)
    with np.errstate(all="ignore"):
        other = np.clip(x, -largest, largest).astype(dtype).view(np.uint8)
    np.testing.assert_array_equal(nearest_codes(x, dtype), other)


@pytest.mark.parametrize("source, name", [("f16x2", "e4m3"), ("f16x2", "e5m2"), ("f16x2", "e2m1"), ("bf16x2", "e4m3")])
def test_halves_to_small_pairs(source, name):
    """Every pair of neighbours of a 16-bit format."""
    dtype, width, register = SMALL[name]
    codes = np.arange(65536, dtype=np.uint16)
    half = np.float16 if source == "f16x2" else BF16
    high, low = doubles(codes.view(half)), doubles(np.roll(codes, 1).view(half))
    words = codes.astype(np.uint32) << 16 | np.roll(codes, 1)
    found = run(f"cvt.rn.satfinite.{name}x2.{source} {register}, %a; {READ[width]}", a=words)
    np.testing.assert_array_equal(found, nearest_codes(high, dtype) << width | nearest_codes(low, dtype))


@pytest.mark.parametrize("name", SMALL)
def test_small_pairs_to_halves(name):
    """All codes, in both places."""
    dtype, width, register = SMALL[name]
    size = ml_dtypes.finfo(dtype).bits
    low = np.arange(1 << size, dtype=np.uint32)
    high = np.roll(low, 3)

    def half(codes):
        values = codes.astype(np.uint8).view(dtype).astype(F)
        exact = values.astype(np.float16).view(np.uint16).astype(np.uint32)
        return np.where(np.isnan(values), HALF_NAN, exact)

    found = run(f"{WRITE[width]} cvt.rn.f16x2.{name}x2 %d, {register};", a=high << width | low)
    np.testing.assert_array_equal(found, half(high) << 16 | half(low))


@pytest.mark.parametrize("dtype, name", [(np.float16, "f16"), (BF16, "bf16")])
def test_singles_to_halves_and_back(dtype, name):
    x = every_brain_and_more(9)
    with np.errstate(all="ignore"):
        expected = np.where(np.isnan(x), HALF_NAN, x.astype(dtype).view(np.uint16).astype(np.uint32))
    body = (
        f"mov.b32 %f1, %a; mov.b32 %f2, %b; cvt.rn.{name}.f32 %h1, %f1; cvt.u32.u16 %d, %h1;"
        f" cvt.rn.{name}x2.f32 %d1, %f2, %f1;"
    )
    found, packed = run(body, a=x, b=np.roll(x, 5), second=True)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(packed, np.roll(expected, 5) << 16 | expected)
    codes = np.arange(65536, dtype=np.uint16)
    back = run(f"cvt.u16.u32 %h1, %a; cvt.f32.{name} %f1, %h1; mov.b32 %d, %f1;", a=codes)
    same_bits(back, codes.view(dtype).astype(F))


@pytest.mark.parametrize("mode", ["rz", "rp"])
@pytest.mark.parametrize("finite", ["", ".satfinite"])
def test_scales(mode, finite):
    """The power of two at or below |x|, or at or above it. NaN is 255, as is what is too large without .satfinite."""
    x = every_brain_and_more(10)
    size = np.abs(doubles(x))
    with np.errstate(all="ignore"):
        exponent = np.log2(np.maximum(size, 2.0**-127))
        code = (np.floor(exponent) if mode == "rz" else np.ceil(exponent)) + 127
    code = np.where(np.isnan(x), 255, np.minimum(code, 254 if finite else 255)).astype(np.uint32)
    body = f"mov.b32 %f1, %a; mov.b32 %f2, %b; cvt.{mode}{finite}.ue8m0x2.f32 %h1, %f1, %f2; cvt.u32.u16 %d, %h1;"
    found = run(body, a=x, b=np.roll(x, 3))
    np.testing.assert_array_equal(found, code << 8 | np.roll(code, 3))
    brain = np.arange(65536, dtype=np.uint32)
    packed = run(f"cvt.{mode}{finite}.ue8m0x2.bf16x2 %h1, %a; cvt.u32.u16 %d, %h1;", a=brain << 16 | brain)
    np.testing.assert_array_equal(packed, code[:65536] * 257)


def test_scales_to_brains():
    codes = np.arange(256, dtype=np.uint32)
    found = run("cvt.u16.u32 %h1, %a; cvt.rn.bf16x2.ue8m0x2 %d, %h1;", a=codes << 8 | codes[::-1])
    with np.errstate(over="ignore"):
        powers = np.exp2(codes.astype(np.float64) - 127).astype(F)
    values = powers.astype(BF16).view(np.uint16).astype(np.uint32)
    values = np.where(codes == 255, HALF_NAN, values)
    np.testing.assert_array_equal(found, values << 16 | values[::-1])


def stochastic_codes(x, random, width, dtype):
    """Codes of |x| by the definition: to the lower neighbour, or to the upper where the sum of the cut-off share and
    of the random share is 1 or more. Shares are of the step between the neighbours; saturating."""
    grid = np.append(magnitudes(dtype), np.inf)
    size = np.abs(doubles(x))
    lower = np.searchsorted(grid, size, side="right") - 1
    step = np.where(lower + 1 < len(grid) - 1, grid[np.minimum(lower + 1, len(grid) - 2)] - grid[lower], 1)
    share = np.where(lower + 1 < len(grid) - 1, (size - grid[lower]) / step, 0)
    code = lower + (share + random / 2.0**width >= 1)
    sign = np.signbit(x).astype(np.int64) << (ml_dtypes.finfo(dtype).bits - 1)
    return (np.minimum(code, len(grid) - 2) | sign).astype(np.uint32)


@pytest.mark.parametrize("name", SMALL)
def test_stochastic_rounding_to_small_formats(name):
    dtype, width, _ = SMALL[name]
    rng = np.random.default_rng(11)
    x, y = ((rng.standard_normal(16384) * np.exp2(rng.integers(-8, 5, 16384))).astype(F) for _ in range(2))
    random = rng.integers(0, 1 << 32, 16384, dtype=np.uint32)
    register, read = ("%d", "") if width == 8 else ("%h1", "cvt.u32.u16 %d, %h1;")
    convert = f"cvt.rs.satfinite.{name}x4.f32 {register}, {{%f1, %f2, %f2, %f1}}, %c;"
    body = f"mov.b32 %f1, %a; mov.b32 %f2, %b; {convert} {read}"
    found = run(body, a=x, b=y, c=random)
    parts = [random >> 24, random >> 8 & 255, random >> 16 & 255, random & 255]
    if width == 8:
        parts = [random >> 16, random >> 16, random & 0xFFFF, random & 0xFFFF]
    count = 2 * width
    expected = np.zeros_like(found)
    for value, part in zip((x, y, y, x), parts, strict=True):
        expected = expected << width | stochastic_codes(value, part, count, dtype)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype, name, width", [(np.float16, "f16", 13), (BF16, "bf16", 16)])
def test_stochastic_rounding_to_halves(dtype, name, width):
    """In integers: the bits that are cut off and the random ones are added, and the carry goes up."""
    rng = np.random.default_rng(12)
    x = ((1 + rng.random(8192)) * np.exp2(rng.integers(-10, 10, 8192)) * rng.choice([-1, 1], 8192)).astype(F)
    random = rng.integers(0, 1 << 32, 8192, dtype=np.uint32)
    cut = (1 << width) - 1
    words = x.view(np.uint32)

    def expected(part):
        up = (words & cut) + (part & cut) > cut
        rounded = ((words & ~np.uint32(cut)) + (up.astype(np.uint32) << width)).view(F)
        return rounded.astype(dtype).view(np.uint16).astype(np.uint32)

    found = run(f"mov.b32 %f1, %a; cvt.rs.{name}x2.f32 %d, %f1, %f1, %b;", a=x, b=random)
    np.testing.assert_array_equal(found, expected(random >> 16) << 16 | expected(random))


@pytest.mark.parametrize(
    "target, low, high",
    [("s32", -(2**31), 2**31 - 1), ("u32", 0, 2**32 - 1), ("s16", -(2**15), 2**15 - 1), ("u8", 0, 255)],
)
@pytest.mark.parametrize("mode, function", [("rzi", np.trunc), ("rni", np.rint), ("rmi", np.floor), ("rpi", np.ceil)])
def test_singles_to_integers(target, low, high, mode, function):
    """They saturate, and NaN gives 0."""
    x = draw(8192, 13, spread=34)
    wide = function(x.astype(np.float64))
    expected = [0 if math.isnan(v) else int(min(max(v, low), high)) & WORD for v in wide]
    found = run(f"mov.b32 %f1, %a; cvt.{mode}.{target}.f32 %r1, %f1; cvt.{target[0]}32.{target} %d, %r1;", a=x)
    np.testing.assert_array_equal(found, np.array(expected, np.uint32))


@pytest.mark.parametrize("source", ["s32", "u32"])
def test_integers_to_singles(source):
    rng = np.random.default_rng(14)
    words = rng.integers(0, 1 << 32, 8192, dtype=np.uint32)
    values = words.view(np.int32) if source == "s32" else words
    same_bits(run(f"cvt.rn.f32.{source} %f1, %a; mov.b32 %d, %f1;", a=words), values.astype(np.float64).astype(F))


# --- memory -----------------------------------------------------------------------------------------

ONE, TWO, THREE, FOUR = (bits(value) for value in (1, 2, 3, 4))
MEMORY = [
    case("v4", "ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%in]; add.u32 %d, %r1, %r4;", 5, a=[1, 2, 3, 4]),
    case(
        "v8",
        "ld.global.nc.L1::no_allocate.L2::256B.v8.b32 {%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8}, [%in];"
        " add.u32 %d, %r1, %r8;",
        9,
        a=list(range(1, 9)),
    ),
    case("ld.s8", "ld.global.s8 %d, [%in+1];", -2, a=[0xFE00]),
    case("ld.u8", "ld.global.u8 %d, [%in+1];", 0xFE, a=[0xFE00]),
    case("ld.s16 into 64 bits", "ld.global.s16 %rd5, [%in]; mov.b64 {%r1, %d}, %rd5;", -1, a=[0x8000]),
    case(
        "cache policy",
        "createpolicy.fractional.L2::evict_last.b64 %rd9, 1.0;"
        " ld.global.L1::evict_last.L2::cache_hint.b32 %d, [%in + 4], %rd9;",
        8,
        a=[7, 8],
    ),
    case("local", "mov.u64 %rd5, loc; cvta.local.u64 %rd6, %rd5; st.u32 [%rd6+4], 77; ld.local.u32 %d, [loc+4];", 77),
    case(
        "generic and shared",
        "mov.u64 %rd5, buffer; cvta.shared.u64 %rd6, %rd5; st.u32 [%rd6], 5; ld.shared.u32 %d, [buffer];",
        5,
    ),
    case(
        "isspacep",
        "mov.u64 %rd5, buffer; cvta.shared.u64 %rd6, %rd5; isspacep.shared %p1, %rd6;"
        " isspacep.global %p2, %rd6; @%p1 add.u32 %d, %d, 1; @%p2 add.u32 %d, %d, 2;",
        1,
    ),
    case(
        "atomics",
        "atom.global.add.u32 %r1, [%in], 1; atom.global.cas.b32 %r2, [%in+4], 5, 9;"
        " atom.global.inc.u32 %r3, [%in+8], 7; red.global.max.s32 [%in+12], 50;"
        " ld.global.v4.u32 {%r4, %r5, %r6, %r7}, [%in]; mad.lo.u32 %d, %r4, 1000, %r5;"
        " mad.lo.u32 %d, %d, 1000, %r6; add.u32 %d, %d, %r7;",
        ((3 + 1) * 1000 + 9) * 1000 + 3 + 50,
        a=[3, 5, 2, 6],
    ),
    case("atom returns what was there", "atom.global.exch.b32 %d, [%in], 1;", 3, a=[3]),
    case(
        "red.v4.f32",
        f"red.global.add.v4.f32 [%in], {{{single(1)}, {single(2)}, {single(3)}, {single(4)}}};"
        " ld.global.u32 %d, [%in+12];",
        4.0,
        a=[0] * 4,
    ),
    case(
        "atom.bf16x2",
        f"atom.global.add.noftz.bf16x2 %r1, [%in], {brains(1, 2)}; ld.global.u32 %d, [%in];",
        brains(2, 2),
        a=[brains(1, 0)],
    ),
    case(
        "cp.async",
        "cp.async.ca.shared.global [%s], [%in], 4; cp.async.commit_group; cp.async.wait_group 0;"
        " ld.shared.u32 %d, [buffer];",
        42,
        a=[42],
    ),
    case(
        "cp.async of two groups",
        "cp.async.ca.shared.global [%s], [%in], 4; cp.async.commit_group;"
        " cp.async.ca.shared.global [%s+4], [%in+4], 4; cp.async.commit_group; cp.async.wait_group 1;"
        " ld.shared.u32 %r1, [buffer]; ld.shared.u32 %r2, [buffer+4]; add.u32 %d, %r1, %r2;",
        42 + 0xA5A5A5A5,  # nobody waited for the second
        a=[42, 43],
    ),
    case(
        "cp.async fills with zeros",
        "mov.u32 %r1, 4; cp.async.cg.shared.global [%s], [%in], 16, %r1; cp.async.wait_all;"
        " ld.shared.u32 %r1, [buffer]; ld.shared.u32 %r2, [buffer+4]; add.u32 %d, %r1, %r2;",
        42,
        a=[42],  # the other 12 bytes need not be there
    ),
    case(
        "cp.async that ignores its source",
        "setp.eq.u32 %p1, %t, 0; cp.async.ca.shared.global [%s], [%in], 4, %p1; cp.async.wait_all;"
        " ld.shared.u32 %d, [buffer];",
        0,
        a=[42],
    ),
]


@pytest.mark.parametrize("body, expected, how", MEMORY)
def test_memory(body, expected, how):
    check(body, expected, how)


def test_atomic_sums_of_singles_flush_subnormals_in_global_memory_alone():
    tiny = 0x00000100
    body = (
        "st.shared.u32 [buffer], 0; mov.b32 %f1, 0f00000100; atom.shared.add.f32 %f2, [buffer], %f1;"
        " ld.shared.u32 %d, [buffer]; atom.global.add.f32 %f2, [%in], %f1; ld.global.u32 %d1, [%in];"
    )
    shared, global_ = run(body, threads=1, a=[0], second=True)
    assert (shared[0], global_[0]) == (tiny, 0)


LOOP_OF_COPY = """
 mbarrier.init.shared.b64 [buffer], 1;
 mbarrier.arrive.expect_tx.shared.b64 %rd5, [buffer], 64;
 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [buffer+16], [%in], 64, [buffer];
"""


def test_bulk_copies():
    """From global memory, waited for by an mbarrier, and back from shared memory."""
    body = (
        LOOP_OF_COPY
        + """
W: mbarrier.try_wait.parity.shared.b64 %p1, [buffer], 0; @!%p1 bra W;
 ld.shared.u32 %d, [buffer+76];
 cp.async.bulk.global.shared::cta.bulk_group [%at1], [buffer+16], 16;
 cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
 ld.global.u32 %d1, [%at1+4];
"""
    )
    found, copied = run(body, threads=1, a=range(100, 116), second=True, words=16)
    assert (found[0], list(copied[:4])) == (115, [101, 101, 102, 103])


def test_an_mbarrier_counts_arrivals_of_warps():
    """Two warps write, arrive and wait; each reads what the other wrote. Twice, so that both parities are used."""
    body = """
 setp.eq.u32 %p1, %t, 0; @%p1 mbarrier.init.shared.b64 [buffer+512], 64; bar.sync 0;
 xor.b32 %r3, %t, 32; shl.b32 %r3, %r3, 2; add.u32 %r3, %s, %r3;
 mov.u32 %r4, 0;
N: mad.lo.u32 %r5, %r4, 100, %t; st.shared.u32 [%ts], %r5;
 mbarrier.arrive.shared.b64 %rd5, [buffer+512];
W: mbarrier.test_wait.shared.b64 %p2, [buffer+512], %rd5; @!%p2 bra W;
 ld.shared.u32 %r6, [%r3]; add.u32 %d, %d, %r6; bar.sync 0;
 add.u32 %r4, %r4, 1; setp.lt.u32 %p3, %r4, 3; @%p3 bra N;
"""
    expected = [3 * (thread ^ 32) + 300 for thread in range(64)]
    assert list(run(body, threads=64)) == expected


# --- lanes ------------------------------------------------------------------------------------------

LANES = list(range(32))
ROW = "and.b32 %r1, %t, 7; shl.b32 %r1, %r1, 4; add.u32 %r1, %r1, %s;"
#: word n of shared memory holds n: rows of 8 numbers of 16 bits, n and 0
MATRIX = np.array([[4 * row + column // 2 if column % 2 == 0 else 0 for column in range(8)] for row in range(8)])


def matrix_words(matrix):
    """What the lanes get of a matrix of 8 by 8: lane l row l/4, columns 2(l%4) and the next."""
    return [int(matrix[n // 4, 2 * (n % 4)] | matrix[n // 4, 2 * (n % 4) + 1] << 16) for n in LANES]


WARPS = [
    case("shfl.bfly", "shfl.sync.bfly.b32 %d, %t, 1, 31, -1;", [n ^ 1 for n in LANES]),
    case("shfl.up", "shfl.sync.up.b32 %r1|%p1, %t, 1, 0, -1; selp.b32 %d, %r1, 99, %p1;", [99, *range(31)]),
    case("shfl.down", "shfl.sync.down.b32 %d, %t, 2, 31, -1;", [n + 2 if n < 30 else n for n in LANES]),
    case("shfl in segments", "shfl.sync.idx.b32 %d, %t, 1, 0x181F, -1;", [n // 8 * 8 + 1 for n in LANES]),
    case("vote.ballot", "setp.lt.u32 %p1, %t, 3; vote.sync.ballot.b32 %d, %p1, -1;", [7] * 32),
    case("vote.any", "setp.eq.u32 %p1, %t, 3; vote.sync.any.pred %p2, %p1, -1; selp.b32 %d, 1, 0, %p2;", [1] * 32),
    case("vote.all", "setp.ne.u32 %p1, %t, 3; vote.sync.all.pred %p2, %p1, -1; selp.b32 %d, 1, 0, %p2;", [0] * 32),
    case(
        "votes of both halves",
        "setp.lt.u32 %p2, %t, 16; selp.b32 %r1, 0xFFFF, 0xFFFF0000, %p2; setp.lt.u32 %p1, %t, 20;"
        " vote.sync.ballot.b32 %d, %p1, %r1;",
        [0xFFFF] * 16 + [0xF0000] * 16,
    ),
    case("redux.add", "redux.sync.add.s32 %d, %t, -1;", [sum(LANES)] * 32),
    case("redux.max", "sub.s32 %r1, %t, 31; redux.sync.max.s32 %d, %r1, -1;", [0] * 32),
    case("redux.f32", "cvt.rn.f32.u32 %f1, %t; redux.sync.max.abs.f32 %f2, %f1, -1; mov.b32 %d, %f2;", [31.0] * 32),
    case("match.any", "and.b32 %r1, %t, 1; match.any.sync.b32 %d, %r1, -1;", [0x55555555, 0xAAAAAAAA] * 16),
    case("match.all", "match.all.sync.b32 %d|%p1, %t, -1;", [0] * 32),
    case("elect", "elect.sync _|%p1, -1; selp.b32 %d, 1, 0, %p1;", [1] + [0] * 31),
    case("activemask", "setp.lt.u32 %p1, %t, 5; @%p1 activemask.b32 %d;", [31] * 5 + [0] * 27),
    case(
        "ldmatrix",
        f"st.shared.u32 [%ts], %t; bar.warp.sync -1; {ROW} ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%d}}, [%r1];",
        matrix_words(MATRIX),
    ),
    case(
        "ldmatrix.trans",
        f"st.shared.u32 [%ts], %t; bar.warp.sync -1; {ROW}"
        " ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%d}, [%r1];",
        matrix_words(MATRIX.T),
    ),
    case(
        "divergence",
        "setp.lt.u32 %p1, %t, 5; @%p1 bra A; mov.u32 %d, 2; bra E; A: mov.u32 %d, 1; E: ",
        [1] * 5 + [2] * 27,
    ),
    case(
        "brx.idx",
        "and.b32 %r1, %t, 3; ts: .branchtargets A, B, C, D; brx.idx %r1, ts; A: mov.u32 %d, 10; bra E;"
        " B: mov.u32 %d, 11; bra E; C: mov.u32 %d, 12; bra E; D: mov.u32 %d, 13; E: ",
        [10, 11, 12, 13] * 8,
    ),
    case(
        "a loop of another length for each lane",
        "mov.u32 %r1, 0; L: add.u32 %d, %d, %r1; add.u32 %r1, %r1, 1; setp.le.u32 %p1, %r1, %t; @%p1 bra L;",
        [n * (n + 1) // 2 for n in LANES],
    ),
    case(
        "labels of scopes",
        "{ .reg .pred p; setp.eq.u32 p, %t, 0; @p bra x; mov.u32 %d, 1; x: }"
        " { .reg .b32 q; mov.u32 q, 5; bra x; mov.u32 q, 6; x: add.u32 %d, %d, q; }",
        [5] + [6] * 31,
    ),
    case("bar.red", "setp.lt.u32 %p1, %t, 40; bar.red.popc.u32 %d, 0, %p1;", [40] * 64),
    case(
        "special registers",
        "mov.u32 %r1, %laneid; mov.u32 %r2, %warpid; mad.lo.u32 %d, %r2, 100, %r1;",
        [n // 32 * 100 + n % 32 for n in range(64)],
    ),
]


@pytest.mark.parametrize("body, expected, how", WARPS)
def test_warps(body, expected, how):
    check(body, expected, how)


def test_lanes_of_a_warp_that_wait_for_each_other():
    """A lock of which one lane has to let go before the others get it: lanes make progress on their own."""
    body = """
 setp.ne.u32 %p1, %t, 0; @%p1 bra J; st.shared.u32 [buffer], 0; st.shared.u32 [buffer+4], 0;
J: bar.warp.sync -1;
L: atom.shared.cas.b32 %r1, [buffer], 0, 1; setp.ne.u32 %p1, %r1, 0; @%p1 bra L;
 ld.volatile.shared.u32 %d, [buffer+4]; add.u32 %r2, %d, 1; st.volatile.shared.u32 [buffer+4], %r2;
 atom.shared.exch.b32 %r1, [buffer], 0;
"""
    assert sorted(run(body, threads=4)) == [0, 1, 2, 3]


# --- functions --------------------------------------------------------------------------------------

FUNCTIONS = """
.func (.param .b32 result) clipped_double(.param .b32 given)
{
 .reg .b32 %r<4>; .reg .pred %p;
 ld.param.b32 %r1, [given]; setp.gt.u32 %p, %r1, 10; @%p bra big;
 add.u32 %r1, %r1, %r1; st.param.b32 [result], %r1; ret;
big: mov.u32 %r2, 7; st.param.b32 [result], %r2; ret;
}
.func (.reg .b32 o) thrice(.reg .b32 v) { mul.lo.u32 o, v, 3; ret; }
.func store(.param .b64 where, .param .b32 what)
{
 .reg .b64 %rd<4>; .reg .b32 %r<4>; .local .align 4 .b32 kept[2];
 ld.param.b64 %rd1, [where]; ld.param.b32 %r1, [what]; call (%r2), thrice, (%r1);
 st.local.b32 [kept+4], %r2; ld.local.b32 %r3, [kept+4]; st.global.b32 [%rd1], %r3; ret;
}
.func forever() { call forever; ret; }
"""
CALLED = """
 { .param .b32 q; .param .b32 r; st.param.b32 [q], %t; call.uni (r), clipped_double, (q); ld.param.b32 %d, [r]; }
 setp.lt.u32 %p1, %t, 4;
 @%p1 call (%d), thrice, (%d);
"""


def test_calls():
    expected = [2 * n * (3 if n < 4 else 1) if n <= 10 else 7 for n in LANES]
    assert list(run(CALLED, threads=32, functions=FUNCTIONS)) == expected


def test_calls_of_calls():
    """With local variables and registers of their own for each call."""
    body = """
 { .param .b64 w; .param .b32 v; st.param.b64 [w], %at1; st.param.b32 [v], %t; call store, (w, v); }
 { .param .b64 w; .param .b32 v; add.u32 %r1, %t, 1;
   st.param.b64 [w], %mine; st.param.b32 [v], %r1; call store, (w, v); }
 ld.global.b32 %d, [%mine]; ld.global.b32 %d1, [%at1];
"""
    found, second = run(body, threads=8, functions=FUNCTIONS, second=True)
    assert (list(found), list(second)) == ([3 * n + 3 for n in range(8)], [3 * n for n in range(8)])


# --- what is unknown --------------------------------------------------------------------------------

UNKNOWN = {
    "frobnicate.b32 %d, 1;": "unknown instruction: frobnicate.b32 %d, 1",
    "add.rn.sat.u32 %d, 1, 2;": "unknown part",
    "mapa.shared::cluster.u32 %d, %s, 0;": "unknown instruction: mapa",
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%f1, %f2, %f3, %f4}, {%r1, %r2, %r3, %r4}, {%r5, %r6},"
    " {%f1, %f2, %f3, %f4};": "unknown instruction, with more operands than any",
    "call.uni nobody, (%r1);": "a call of nobody, which has no body here",
    "call %rd1, (%r1), proto;": "a call through a pointer",
    "call forever;": "a call of forever from itself",
    "mov.u32 %d, %nonsense;": "unknown special register %nonsense",
    "bra nowhere;": "no label nowhere",
    "add.u32 %d, 1x, 2;": "not a number: 1x",
}


@pytest.mark.parametrize("body", UNKNOWN)
def test_unknown_code_is_refused_when_it_is_loaded(body):
    assert UNKNOWN[body] in fault_of(body, functions=FUNCTIONS)


def test_the_line_of_unknown_code_is_named():
    said = fault_of("\n\n frobnicate.b32 %d, 1;")
    assert "line " in said and "frobnicate" in said
