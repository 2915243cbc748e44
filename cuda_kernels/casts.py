"""Casts between float32 and the stored formats, one element (or one register) at a time, with the bits of the hardware.

Each format has an integer version that runs everywhere. Where a GPU has the instruction, `pairs_for` gives that: E4M3
and E5M2 from sm_89, E2M1 on sm_100a and its kin. Rules (OCP OFP8 1.0, OCP MX 1.0; `cvt.rn.satfinite`): round to nearest
even, saturate, NaN becomes the format's canonical NaN (+6 in E2M1), -0 keeps its sign.

16-bit floats travel as uint16, FP8, FP4 and E8M0 codes as uint8 or in the low bits of uint32.
"""

from collections import namedtuple
from functools import cache

import numpy as np

from cuda_kernels.simt import (
    U16,
    U32,
    U64,
    F,
    as_f32,
    as_u32,
    device,
    device_of_code,
    maximum,
    ptx,
    select,
    smaller_magnitude,
)
from refops.arguments import require_name
from refops.formats import E4M3, E8M0, FORMATS

SIGN, MAGNITUDE, INFINITE = U32(0x80000000), U32(0x7FFFFFFF), U32(0x7F800000)
SIGN_AND_EXPONENT, CANONICAL_NAN = U32(0xFF800000), U32(0x7FFFFFFF)
TWO, SIX = F(2), F(6)
#: 1.5 * 2^23: adding it rounds to an integer.
TO_INTEGER = F(12582912.0)
#: PTX of four FP8 codes.
FOUR_CODES = """{{ .reg .b16 s, t;
cvt.rn.satfinite.{0}.f32 s, $2, $1; cvt.rn.satfinite.{0}.f32 t, $4, $3; mov.b32 $0, {{s, t}}; }}"""


def has_fp8(target):
    """Whether a compute capability converts to and from E4M3 and E5M2 by instruction."""
    return target is not None and target[:2] >= (8, 9)


def has_e2m1(target):
    """Whether a compute capability converts to and from E2M1 and E8M0 by instruction: sm_100a and its kin."""
    return target is not None and target[0] >= 10 and target[2:] in (("a",), ("f",))


class Named(dict):
    """A table of what has a name: of any other name it says which there are.

    Attributes:
        what: what the names are of, for the message.

    Raises:
        ValueError: from a look-up, `table[name]`, where the table has no such name.
    """

    def __init__(self, what, rows):
        super().__init__(rows)
        self.what = what

    def __missing__(self, name):
        return require_name(name, self.what, self)  # which raises: the name is none of these


# --- codes of numbers -------------------------------------------------------------------------------


@cache
def make_encoder(mantissa_bits, bias, limit, nan_code, sign_shift, complement=False):
    """Return `encode(x)`: float32 to a code with `mantissa_bits` and `bias`, in uint32.

    Args:
        limit: the value to saturate at; for a format with infinity the value that infinity's code would have.
        nan_code: what NaN becomes, without its sign.
        sign_shift: how far the sign bit moves down from bit 31; None: the format has none, and -x is encoded as x.
        complement: whether a negative number's code is the two's complement of its magnitude's.
    """
    low = 23 - mantissa_bits  # bits that are rounded off
    shift, odd = U32(low), U32((1 << (low - 1)) - 1)
    rebias = U32(127 - bias << 23)
    smallest_normal = U32(127 + 1 - bias << 23)
    magic = F(2.0 ** (23 + 1 - bias - mantissa_bits))  # its ulp is the smallest subnormal: adding it rounds
    magic_bits, limit_bits = np.uint32(magic.view(np.uint32)), np.uint32(F(limit).view(np.uint32))
    nan, down, sign_mask = U32(nan_code), U32(sign_shift or 0), U32(0 if sign_shift is None else 1 << (31 - sign_shift))
    code_mask = U32(0xFFFFFFFF >> (sign_shift or 0))

    @device
    def with_sign_bit(magnitude, bits):
        return np.uint32(magnitude | np.uint32(np.uint32(bits >> down) & sign_mask))

    @device
    def with_complement(magnitude, bits):
        return np.uint32(select(bits >= SIGN, np.uint32(U32(0) - magnitude), magnitude) & code_mask)

    signed = with_complement if complement else with_sign_bit

    @device
    def encode(x):
        bits = as_u32(x)
        exact = np.uint32(bits & MAGNITUDE)
        m = select(exact > limit_bits, limit_bits, exact)
        rounded = np.uint32(m + odd + np.uint32(np.uint32(m >> shift) & U32(1)))
        normal = np.uint32(np.uint32(rounded - rebias) >> shift)
        subnormal = np.uint32(as_u32(as_f32(m) + magic) - magic_bits)
        return select(exact > INFINITE, nan, signed(select(m >= smallest_normal, normal, subnormal), bits))

    return encode


@cache
def make_decoder(mantissa_bits, bias, special, sign_shift, complement=False, by_product=True):
    """Return `decode(code)`: a code in uint32 to its float32, exact.

    Args:
        special: from this magnitude on codes are infinity (if it is a power of two in float32) and NaN; None: no such.
        sign_shift, complement: as of `make_encoder`; without a sign a code is a byte.
        by_product: shift the code into a float32 and multiply that. It is subnormal where the code is, which costs
            nothing on a GPU, and on most CPUs more than a hundred cycles.
    """
    shift, scale = U32(23 - mantissa_bits), F(2.0 ** (127 - bias))
    up, sign_mask = U32(sign_shift or 0), U32(0 if sign_shift is None else 1 << (31 - sign_shift))
    magnitude_mask = U32(0xFF if sign_shift is None else (1 << (31 - sign_shift)) - 1)
    code_mask = U32(0xFFFFFFFF >> (sign_shift or 0))
    first_special = U32(special if special is not None else 0xFFFFFFFF)

    @device
    def without_sign_bit(code):
        return np.uint32(code & magnitude_mask)

    @device
    def complemented(code):
        return select(np.uint32(code & sign_mask) != U32(0), np.uint32(np.uint32(U32(0) - code) & code_mask), code)

    magnitude_of = complemented if complement else without_sign_bit

    rebias, first_normal = U32(127 - bias << 23), U32(1 << mantissa_bits)
    smallest = F(2.0 ** (1 - bias - mantissa_bits))

    @device
    def product(magnitude):
        return as_f32(np.uint32(magnitude << shift)) * scale  # also right for subnormals

    @device
    def choice(magnitude):
        normal = as_f32(np.uint32(np.uint32(magnitude << shift) + rebias))
        return select(magnitude < first_normal, F(np.int32(magnitude)) * smallest, normal)

    value_of = product if by_product else choice

    @device_of_code
    def decode(code):
        magnitude = magnitude_of(code)
        sign = np.uint32(np.uint32(code & sign_mask) << up)
        bits = as_u32(value_of(magnitude))
        bits = select(magnitude >= first_special, np.uint32(np.uint32(magnitude << shift) | INFINITE), bits)
        return as_f32(np.uint32(bits | sign))

    return decode


@device
def e8m0_value(code):
    """2^(code - 127); 255 is NaN."""
    bits = np.uint32(code << U32(23))
    bits = select(code == U32(0), U32(0x400000), bits)
    return as_f32(select(code == U32(255), CANONICAL_NAN, bits))


def encoder_of(fmt):
    """The `make_encoder` of a `refops` format with subnormal numbers, saturating as `refops.encode` does."""
    sign = _sign_shift(fmt), fmt.twos_complement
    return make_encoder(fmt.mantissa_bits, fmt.bias, float(fmt.max), fmt.code_of_nan, *sign)


def decoder_of(fmt, by_product=True):
    """The decoder of a `refops` format: E8M0 or one with subnormal numbers; `by_product` as of `make_decoder`."""
    if fmt == E8M0:
        return e8m0_value
    special = fmt.nan_code if fmt.infinity_code is None else fmt.infinity_code
    sign = _sign_shift(fmt), fmt.twos_complement
    return make_decoder(fmt.mantissa_bits, fmt.bias, special, *sign, by_product)


def _sign_shift(fmt):
    return 32 - fmt.bits if fmt.signed else None


#: Name -> encoder, decoder of each of `refops.FORMATS`; how E8M0 is rounded to is a rule of scales: `e8m0_up`.
ENCODERS = Named("fmt", {name: encoder_of(fmt) for name, fmt in FORMATS.items() if fmt != E8M0})
DECODERS = Named("fmt", {name: decoder_of(fmt) for name, fmt in FORMATS.items()})
#: The same for a CPU.
CPU_DECODERS = Named("fmt", {name: decoder_of(fmt, by_product=False) for name, fmt in FORMATS.items()})
e4m3, e5m2, e2m1 = ENCODERS["e4m3"], ENCODERS["e5m2"], ENCODERS["e2m1"]
decode_e4m3, decode_e2m1 = DECODERS["e4m3"], DECODERS["e2m1"]


# --- two codes at once: what the casting instructions make ------------------------------------------


@cache
def make_pair(encode, width):
    """Return `pair(low, high)`: two codes of `width` bits side by side, in uint16."""
    shift = U32(width)

    @device
    def pair(low, high):
        return np.uint16(np.uint32(encode(low) | np.uint32(encode(high) << shift)))

    return pair


@cache
def make_quad(pair, width):
    """Return `quad(a, b, c, d)`: what `pair` gives of two and two, `width` bits apart in uint32."""
    shift = U32(width)

    @device
    def quad(a, b, c, d):
        return np.uint32(np.uint32(pair(a, b)) | np.uint32(np.uint32(pair(c, d)) << shift))

    return quad


e4m3_pair, e5m2_pair, e2m1_pair = make_pair(e4m3, 8), make_pair(e5m2, 8), make_pair(e2m1, 4)


@ptx("min.xorsign.abs.f32 $0, $1, $2;", "=f,f,f", F, F, F)
def limited(x, limit):
    """The smaller of |x| and `limit` > 0 with the sign of x, `limit` where x is NaN: one instruction from sm_86 on."""
    m = as_f32(np.uint32(as_u32(x) & MAGNITUDE))
    return as_f32(np.uint32(as_u32(select(m < limit, m, limit)) | np.uint32(as_u32(x) & SIGN)))


@ptx("max.xorsign.abs.f32 $0, $1, $2;", "=f,f,f", F, F, F)
def raised(x, limit):
    """The larger of |x| and `limit` > 0 with the sign of x, `limit` where x is NaN: one instruction from sm_86 on."""
    m = as_f32(np.uint32(as_u32(x) & MAGNITUDE))
    return as_f32(np.uint32(as_u32(select(m > limit, m, limit)) | np.uint32(as_u32(x) & SIGN)))


@device
def e2m1_by_signed_addition(x):
    """E2M1 code in five instructions from sm_86 on, in the top four bits; those below mean nothing.

    Everything keeps the sign of x. A NaN must be positive, as in `e2m1_by_addition`. The sum's low bits are 2 + steps,
    its bits from 22 on 42 + 2 for each doubling, the top four bits 4 + 8 for the sign. The product adds the three in
    its top four bits, modulo 16: together the code. Nothing carries into them.
    """
    m = limited(x, SIX)
    power = as_f32(np.uint32(as_u32(raised(m, F(1))) & SIGN_AND_EXPONENT))
    return np.uint32(as_u32(power * F(2.0**22 + 1) + m) * U32(2**28 + 2**6 + 1))


@ptx("shf.l.wrap.b32 $0, $2, $1, 4;", "=r,r,r", U32, U32, U32)
def append(codes, code):
    """`codes` moved up by four bits, and the top four bits of `code` below them: one instruction."""
    return np.uint32(np.uint32(codes << U32(4)) | np.uint32(code >> U32(28)))


@device
def e2m1_pair_by_signed_addition(low, high):
    """Two E2M1 codes by `e2m1_by_signed_addition`."""
    return np.uint16(append(np.uint32(e2m1_by_signed_addition(high) >> U32(28)), e2m1_by_signed_addition(low)))


@device
def e2m1_eight_by_signed_addition(v):
    """Eight E2M1 codes by `e2m1_by_signed_addition`, the first in the lowest bits."""
    codes = np.uint32(e2m1_by_signed_addition(v[7]) >> U32(28))
    codes = append(append(codes, e2m1_by_signed_addition(v[6])), e2m1_by_signed_addition(v[5]))
    codes = append(append(codes, e2m1_by_signed_addition(v[4])), e2m1_by_signed_addition(v[3]))
    codes = append(append(codes, e2m1_by_signed_addition(v[2])), e2m1_by_signed_addition(v[1]))
    return append(codes, e2m1_by_signed_addition(v[0]))


@device
def e2m1_by_addition(x):
    """E2M1 code in ten instructions, for GPUs without one. A NaN must be positive, as GPU arithmetic makes it.

    Adding 2^22 times the power of two at or below |x| rounds |x| to one mantissa bit and leaves 0 to 4 steps in the
    sum's low bits; the exponent of the sum gives the two codes that each doubling adds.
    """
    m = smaller_magnitude(SIX, x)
    power = as_f32(np.uint32(as_u32(maximum(F(1), m)) & INFINITE))
    s = as_u32(power * F(2.0**22) + m)
    code = np.uint32(np.uint32(np.uint32(s >> U32(22)) + s - U32(2)) & U32(7))
    return np.uint32(code | np.uint32(np.uint32(as_u32(x) >> U32(28)) & U32(8)))


e2m1_pair_by_addition = make_pair(e2m1_by_addition, 4)


@ptx("cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", U16, F, F)
def e4m3_pair_instruction(low, high):
    """Two E4M3 codes in one instruction."""
    return e4m3_pair(low, high)


@ptx("cvt.rn.satfinite.e5m2x2.f32 $0, $2, $1;", "=h,f,f", U16, F, F)
def e5m2_pair_instruction(low, high):
    """Two E5M2 codes in one instruction."""
    return e5m2_pair(low, high)


@ptx("{ .reg .b8 t; cvt.rn.satfinite.e2m1x2.f32 t, $2, $1; cvt.u16.u8 $0, t; }", "=h,f,f", U16, F, F)
def e2m1_pair_instruction(low, high):
    """Two E2M1 codes in one instruction."""
    return e2m1_pair(low, high)


e4m3_quad, e5m2_quad = make_quad(e4m3_pair, 16), make_quad(e5m2_pair, 16)


@ptx(FOUR_CODES.format("e4m3x2"), "=r,f,f,f,f", U32, F, F, F, F)
def e4m3_quad_instructions(a, b, c, d):
    """Four E4M3 codes in one register: the second conversion merges with the first."""
    return e4m3_quad(a, b, c, d)


@ptx(FOUR_CODES.format("e5m2x2"), "=r,f,f,f,f", U32, F, F, F, F)
def e5m2_quad_instructions(a, b, c, d):
    """Four E5M2 codes in one register."""
    return e5m2_quad(a, b, c, d)


@device
def e4m3_by_pair(x):
    """E4M3 code of one number by the instruction for two."""
    return np.uint32(e4m3_pair_instruction(x, F(0)))


@ptx(
    "{ .reg .b16 s, t; .reg .b32 u; cvt.u16.u32 s, $1;"
    " cvt.rn.f16x2.e4m3x2 u, s; mov.b32 {s, t}, u; cvt.f32.f16 $0, s; }",
    "=f,r",
    F,
    U32,
)
def decode_e4m3_instructions(code):
    """`decode_e4m3` by the GPU's conversions (sm_89 on)."""
    return decode_e4m3(code)


def one_for(fmt, target):
    """Return (encode, decode) of single numbers of a `refops` format, codes in uint32."""
    if fmt == E4M3 and has_fp8(target):
        return e4m3_by_pair, decode_e4m3_instructions
    return encoder_of(fmt), decoder_of(fmt, by_product=target is not None)


@cache
def make_halves(fmt, which):
    """Return `halves(codes)`: two FP8 codes of four, the `which` (0 low, 1 high) two, as two float16 (sm_89 on)."""
    decode, shift = DECODERS[fmt], U32(16 * which)
    asm = f"{{ .reg .b16 s, t; mov.b32 {{s, t}}, $1; cvt.rn.f16x2.{fmt}x2 $0, {'st'[which]}; }}"

    @ptx(asm, "=r,r", U32, U32)
    def halves(codes):
        two = np.uint32(codes >> shift)
        return f16_pair(decode(np.uint32(two & U32(0xFF))), decode(np.uint32(np.uint32(two >> U32(8)) & U32(0xFF))))

    return halves


@cache
def make_e2m1_halves(which):
    """Return `halves(codes)`: two neighbours of eight E2M1 codes, those of byte `which`, as two float16 (sm_100a)."""
    shift = U32(8 * which)
    asm = f"{{ .reg .b8 t0, t1, t2, t3; mov.b32 {{t0, t1, t2, t3}}, $1; cvt.rn.f16x2.e2m1x2 $0, t{which}; }}"

    @ptx(asm, "=r,r", U32, U32)
    def halves(codes):
        two = np.uint32(codes >> shift)
        low, high = np.uint32(two & U32(15)), np.uint32(np.uint32(two >> U32(4)) & U32(15))
        return f16_pair(decode_e2m1(low), decode_e2m1(high))

    return halves


@ptx("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", U32, U32, U32)
def multiply_halves(a, b):
    """The products of two times two float16."""
    low = widen_f16(np.uint16(a & U32(0xFFFF))) * widen_f16(np.uint16(b & U32(0xFFFF)))
    return f16_pair(low, widen_f16(np.uint16(a >> U32(16))) * widen_f16(np.uint16(b >> U32(16))))


@cache
def make_e2m1_halves_by_shifts(first):
    """Return `halves(codes)`: two E2M1 codes of eight, numbers `first` and `first` + 4, as two float16.

    These two are 16 bits apart as they are. Exponent and mantissa are shifted to the lowest of float16's exponent bits
    and its highest mantissa bit; what is then 2^14 too small, 0.5 as a subnormal number, is exact.
    """
    up, down, sign_up = U32(max(9 - 4 * first, 0)), U32(max(4 * first - 9, 0)), U32(12 - 4 * first)

    @device
    def halves(codes):
        magnitudes = np.uint32(np.uint32(np.uint32(codes << up) >> down) & U32(0x0E000E00))
        signs = np.uint32(np.uint32(codes << sign_up) & U32(0x80008000))
        return multiply_halves(np.uint32(magnitudes | signs), U32(0x74007400))

    return halves


def has_halves(fmt, target):
    """Whether two codes at a time become float16: E2M1 everywhere, E4M3 and E5M2 by instruction."""
    return fmt == "e2m1" or (fmt in ("e4m3", "e5m2") and has_fp8(target))


def halves_of(fmt, target):
    """Return four functions that decode two codes each, neighbours, but without an instruction for E2M1 four apart.

    E2M1's eight codes are in one word, others, one per byte, in two.
    """
    if fmt == "e2m1":
        make = make_e2m1_halves if has_e2m1(target) else make_e2m1_halves_by_shifts
        return tuple(make(k) for k in range(4))
    return (make_halves(fmt, 0), make_halves(fmt, 1)) * 2


def quads_for(fmt, target):
    """Return the four-at-once encoder that belongs to `pairs_for(fmt, target)`: uint32, FP8 one per byte, FP4 two."""
    if fmt in ("e4m3", "e5m2") and has_fp8(target):
        return {"e4m3": e4m3_quad_instructions, "e5m2": e5m2_quad_instructions}[fmt]
    return make_quad(pairs_for(fmt, target), 8 if fmt == "e2m1" else 16)


@cache
def make_eight(quad):
    """Return `eight(v)`: what `quad` gives of the first and of the last four of eight, in uint32."""

    @device
    def eight(v):
        return np.uint32(quad(v[0], v[1], v[2], v[3]) | np.uint32(quad(v[4], v[5], v[6], v[7]) << U32(16)))

    return eight


def eights_for(target):
    """Return the eight-at-once encoder of E2M1: a tuple of eight to uint32, the first in the lowest bits."""
    if pairs_for("e2m1", target) is e2m1_pair_by_signed_addition:
        return e2m1_eight_by_signed_addition
    return make_eight(quads_for("e2m1", target))


def pairs_for(fmt, target):
    """Return the two-at-once encoder of a format for a GPU.

    Args:
        fmt: a name of `ENCODERS`.
        target: compute capability, for example (9, 0) or (10, 0, "a"); None for code that runs anywhere.
    """
    if fmt in ("e4m3", "e5m2") and has_fp8(target):
        return {"e4m3": e4m3_pair_instruction, "e5m2": e5m2_pair_instruction}[fmt]
    if target is not None and fmt == "e2m1":
        by_addition = e2m1_pair_by_signed_addition if target[:2] >= (8, 6) else e2m1_pair_by_addition
        return e2m1_pair_instruction if has_e2m1(target) else by_addition
    return make_pair(ENCODERS[fmt], 4 if fmt == "e2m1" else 8)


# --- 16-bit floats ----------------------------------------------------------------------------------


@device
def widen_bf16(half):
    """bfloat16 bits to float32."""
    return as_f32(np.uint32(np.uint32(half) << U32(16)))


@device
def narrow_bf16(x):
    """float32 to bfloat16 bits, nearest even; NaN becomes 0x7FFF."""
    bits = as_u32(x)
    rounded = np.uint32(np.uint32(bits + U32(0x7FFF) + np.uint32(np.uint32(bits >> U32(16)) & U32(1))) >> U32(16))
    return np.uint16(select(np.uint32(bits & MAGNITUDE) > INFINITE, U32(0x7FFF), rounded))


_f16_decode = make_decoder(10, 15, 0x7C00, 16)
_f16_encode = make_encoder(10, 15, 65536.0, 0x7FFF, 16)


@ptx("cvt.f32.f16 $0, $1;", "=f,h", F, U16)
def widen_f16(half):
    """float16 bits to float32."""
    return _f16_decode(np.uint32(half))


@ptx("cvt.rn.f16.f32 $0, $1;", "=h,f", U16, F)
def narrow_f16(x):
    """float32 to float16 bits, nearest even, overflow to infinity; NaN becomes 0x7FFF."""
    return np.uint16(_f16_encode(x))


@device
def widen_f32(x):
    """float32 as it is, a signalling NaN made quiet."""
    return x * F(1)


@device
def narrow_f32(x):
    """float32 as it is stored: every NaN as CUDA's canonical one."""
    return select(x != x, as_f32(CANONICAL_NAN), x)


@device
def bf16_pair(low, high):
    """Two bfloat16 in one register."""
    return np.uint32(np.uint32(narrow_bf16(low)) | np.uint32(np.uint32(narrow_bf16(high)) << U32(16)))


@ptx("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", U32, F, F)
def bf16_pair_instruction(low, high):
    """Two bfloat16 in one register by one instruction (sm_80 on)."""
    return bf16_pair(low, high)


@device
def f16_pair(low, high):
    """Two float16 in one register."""
    return np.uint32(np.uint32(narrow_f16(low)) | np.uint32(np.uint32(narrow_f16(high)) << U32(16)))


@device
def round_f32(x):
    """x: float32 needs no rounding to float32."""
    return x


@device
def round_bf16(x):
    """x rounded to bfloat16."""
    return widen_bf16(narrow_bf16(x))


@device
def round_f16(x):
    """x rounded to float16."""
    return widen_f16(narrow_f16(x))


#: A dtype of unquantized tensors: name, bytes, the NumPy dtype that carries it, stored -> float32, float32 -> stored,
#: float32 rounded to it.
Storage = namedtuple("Storage", "name size carrier widen narrow round")
STORAGES = Named(
    "storage",
    {
        "float32": Storage("float32", 4, np.dtype(np.float32), widen_f32, narrow_f32, round_f32),
        "bfloat16": Storage("bfloat16", 2, np.dtype(np.uint16), widen_bf16, narrow_bf16, round_bf16),
        "float16": Storage("float16", 2, np.dtype(np.uint16), widen_f16, narrow_f16, round_f16),
    },
)


def carrier(storage):
    """The NumPy dtype whose elements a kernel reads for a dtype or format: uint16 for bfloat16, uint8 for codes."""
    return STORAGES[storage].carrier if storage in STORAGES else np.dtype(np.uint8)


# --- scales -----------------------------------------------------------------------------------------


@ptx("max.u32 $0, $1, $2;", "=r,r,r", U32, U32, U32)
def larger_integer(a, b):
    """The larger of two uint32."""
    return select(a > b, a, b)


@ptx(
    "{ .reg .b16 t; cvt.rp.satfinite.ue8m0x2.f32 t, 0f00000000, $1; cvt.u32.u16 $0, t; }",
    "=r,f",
    U32,
    F,
)
def e8m0_up_instruction(x):
    """`e8m0_up` in one instruction (sm_100a and its kin)."""
    return e8m0_up(x)


def e8m0_up_for(target):
    """Return `e8m0_up` as a GPU has it."""
    return e8m0_up_instruction if has_e2m1(target) else e8m0_up


@device
def e8m0_up(x):
    """E8M0 code of the smallest power of two >= x >= 0 (no NaN): 0 up to 2^-127, 254 beyond 2^127 and for infinity."""
    bits = as_u32(x)
    code = np.uint32(np.uint32(bits + U32(0x7FFFFF)) >> U32(23))
    code = select(bits <= U32(0x400000), U32(0), code)
    return select(code > U32(254), U32(254), code)


@device
def e8m0_multiplier(code):
    """2^(127 - code), what elements are multiplied by before the cast. code <= 254."""
    return as_f32(larger_integer(np.uint32(np.uint32(U32(254) - code) << U32(23)), U32(0x400000)))


# --- random bits ------------------------------------------------------------------------------------

PHILOX_A, PHILOX_B = U64(0xD2511F53), U64(0xCD9E8D57)
PHILOX_KEY_A, PHILOX_KEY_B = U32(0x9E3779B9), U32(0xBB67AE85)
LOW_WORD, WORD = U64(0xFFFFFFFF), U64(32)


@device
def philox(seed, offset, subsequence):
    """Four random uint32 by Philox 4x32-10 (Salmon et al. 2011); uint64 key `seed`, counter (offset, subsequence)."""
    a, b = np.uint32(offset & LOW_WORD), np.uint32(offset >> WORD)
    c, d = np.uint32(subsequence & LOW_WORD), np.uint32(subsequence >> WORD)
    key_a, key_b = np.uint32(seed & LOW_WORD), np.uint32(seed >> WORD)
    for _ in range(10):
        first, second = np.uint64(a) * PHILOX_A, np.uint64(c) * PHILOX_B
        a, c = (
            np.uint32(np.uint32(np.uint32(second >> WORD) ^ b) ^ key_a),
            np.uint32(np.uint32(np.uint32(first >> WORD) ^ d) ^ key_b),
        )
        b, d = np.uint32(second & LOW_WORD), np.uint32(first & LOW_WORD)
        key_a, key_b = np.uint32(key_a + PHILOX_KEY_A), np.uint32(key_b + PHILOX_KEY_B)
    return a, b, c, d


@device
def e2m1_stochastic(x, random_byte):
    """E2M1 code of x, rounded stochastically: add random_byte / 256 of a step to |x|, then truncate.

    The step is that of |x|'s binade: 0.5 below 2, 1 below 4, 2 above. The sum is rounded to float32 once.
    """
    bits = as_u32(x)
    m = as_f32(np.uint32(bits & MAGNITUDE))
    m = select(m > F(6), F(6), m)
    step = select(m >= F(4), F(2), select(m >= F(2), F(1), F(0.5)))
    d = m + step * (F(random_byte) * F(1.0 / 256))
    high = select(d >= F(6), U32(7), select(d >= F(4), U32(6), select(d >= F(3), U32(5), U32(4))))
    code = select(d >= F(2), high, np.uint32(d * TWO))
    return select(x != x, U32(7), np.uint32(code | np.uint32(np.uint32(bits >> U32(28)) & U32(8))))


#: Format -> its stochastic encoder.
STOCHASTIC = {"e2m1": e2m1_stochastic}


@ptx("fma.rz.f32 $0, $1, $2, $3;", "=f,f,f,f", F, F, F, F)
def fma_truncated(a, b, c):
    """a * b + c, rounded towards 0."""
    exact = np.float64(a) * np.float64(b) + np.float64(c)
    nearest = F(exact)
    return as_f32(np.uint32(as_u32(nearest) - select(abs(np.float64(nearest)) > abs(exact), U32(1), U32(0))))


@cache
def make_fraction(k):
    """Return `fraction(word)`: byte `k` of a word, divided by 512: the byte in a number between 64 and 65, less 64."""
    shift = U32(8 * k)

    @ptx(f"prmt.b32 $0, $1, $2, 0x76{k}4;", "=r,r,r", U32, U32, U32)
    def byte_in_second_place(word, others):
        return np.uint32(np.uint32(np.uint32(np.uint32(word >> shift) & U32(0xFF)) << U32(8)) | others)

    @device
    def fraction(word):
        return as_f32(byte_in_second_place(word, U32(0x42800000))) - F(64)

    return fraction


@device
def e2m1_stochastic_by_addition(x, fraction):
    """`e2m1_stochastic` of random_byte / 512 from sm_86 on, in the top four bits as in `e2m1_by_signed_addition`.

    The step is half the power of two. Where adding a part of it reaches the next power, the steps counted are 4, which
    is as many codes as that power's own 2 steps and doubling.
    """
    m = limited(x, SIX)
    power = as_f32(np.uint32(as_u32(raised(m, F(1))) & SIGN_AND_EXPONENT))
    s = fma_truncated(power, F(2.0**22 + 1), power * fraction + m)
    return np.uint32(as_u32(s) * U32(2**28 + 2**6 + 1))


def stochastic_eights_for(target):
    """Return `eight(v, low, high)`: eight E2M1 codes rounded with the random bytes of two words, in uint32."""
    signed = target is not None and target[:2] >= (8, 6)
    fractions = [make_fraction(k) for k in range(4)]

    def code_of(k):
        """The code of element k and its random byte, in the top four bits."""
        fraction, shift = fractions[k % 4], U32(8 * (k % 4))
        if signed:
            return device(lambda x, w: e2m1_stochastic_by_addition(x, fraction(w)))
        byte = device(lambda w: np.uint32(np.uint32(w >> shift) & U32(0xFF)))
        return device(lambda x, w: np.uint32(e2m1_stochastic(x, byte(w)) << U32(28)))

    first, second, third, fourth = [code_of(k) for k in range(4)]

    @device
    def four(codes, a, b, c, d, w):
        return append(append(append(append(codes, fourth(d, w)), third(c, w)), second(b, w)), first(a, w))

    @device
    def eight(v, low, high):
        return four(four(U32(0), v[4], v[5], v[6], v[7], high), v[0], v[1], v[2], v[3], low)

    return eight
