"""Conventions of parameters, of derivatives that lack a term, of coarse words, and of casts and scales that slip."""

import numpy as np

from mutants.kernels import BF16, F, Kernel, cast, decode, exponent_byte, spread
from mutants.registry import convention
from refops import E4M3, E5M2, BlockScaling, CurrentScaling, DelayedScaling, MXFP8Scaling, NVFP4Scaling

SIZE, PAIR = (256, 512), (256, 1024)
CURRENT, DELAYED = CurrentScaling(E4M3), DelayedScaling(E4M3, 3.7)
MX, NV = MXFP8Scaling(E4M3), NVFP4Scaling()
CLAMPED = {"limit": 5.0}


# --- parameters and clamps --------------------------------------------------------------------------------------------


@convention("other-parameter", "clamped_swiglu", shape=PAIR, data="wide")
def clamped_at_six(k):
    """limit 6."""
    return k.outputs(limit=F(6))


@convention("other-parameter", "clamped_swiglu", shape=PAIR, data="wide", dtype=np.float32)
def clamped_at_an_odd_number(k):
    """limit 6.125, which nobody would guess."""
    return k.outputs(limit=F(6.125))


@convention("other-parameter", "dclamped_swiglu", MX, shape=PAIR, data="wide")
def gradient_with_alpha_1_3(k):
    """alpha 1.3."""
    return k.outputs(alpha=F(1.3))


@convention("other-parameter", "situglu", shape=PAIR, data="wide")
def situ_with_beta_3_5(k):
    """beta1 3.5."""
    return k.outputs(beta1=F(3.5))


@convention("argument-factor", "swiglu", shape=PAIR, dtype=np.float32)
def swiglu_with_a_beta(k):
    """silu with the parameter of Swish, 1.25."""
    return k.outputs(value=lambda x: x * k.sigmoid(F(1.25) * x))


@convention("clamp-variant", "clamped_swiglu", shape=PAIR, data="wide")
def gate_unclamped(k):
    """The gate is not clamped."""
    return k.outputs(gate=lambda g: g + F(1))


@convention("clamp-variant", "clamped_swiglu", MX, params=CLAMPED, shape=PAIR, data="wide")
def gate_clamped_above_only(k):
    """min(gate, limit) + 1."""
    return k.outputs(gate=lambda g: np.fmin(g, k.limit) + F(1))


@convention("clamp-variant", "clamped_swiglu", shape=PAIR, data="wide")
def act_clamped_on_both_sides(k):
    """act between -limit and limit: only far below zero, where float32 and bfloat16 still see it."""
    right = k.value
    return k.outputs(limit=F(7), value=lambda x: right(np.fmax(x, -k.limit)))


@convention("clamp-variant", "dclamped_swiglu", shape=PAIR, data="wide")
def gradients_pass_the_clamps(k):
    """The masks are forgotten."""

    def slope(x):
        c = np.fmin(x, k.limit)
        s = k.sigmoid(k.alpha * c)
        return k.alpha * c * s * (F(1) - s) + s

    return k.outputs(slope=slope, gate_slope=np.ones_like)


# --- derivatives ------------------------------------------------------------------------------------------------------


@convention("x-and-dy-exchanged", "dgelu", shape=SIZE)
def pointers_exchanged(k):
    """The two input pointers are exchanged."""
    return k.outputs(backward=lambda dy, x: k.slope(dy) * x)


@convention("x-and-dy-exchanged", "dsrelu", MXFP8Scaling(E5M2), shape=SIZE)
def mx_pointers_exchanged(k):
    """The same, quantized."""
    return k.outputs(backward=lambda dy, x: k.slope(dy) * x)


@convention("derivative-at-output", "dgelu", shape=SIZE)
def derivative_at_y(k):
    """The tensor that was saved is y, not x."""
    right = k.slope
    return k.outputs(slope=lambda x: right(k.value(x)))


@convention("derivative-term", "dsilu", shape=SIZE)
def silu_slope_is_the_sigmoid(k):
    """silu' = sigmoid."""
    return k.outputs(slope=lambda x: k.sigmoid(x))


@convention("derivative-term", "dswiglu", MX, shape=PAIR)
def silu_slope_without_one_minus_s(k):
    """silu' = s + x s."""
    return k.outputs(slope=lambda x: k.sigmoid(x) + x * k.sigmoid(x))


@convention("derivative-term", "dgelu", shape=SIZE)
def gelu_slope_without_its_second_term(k):
    """gelu' = 0.5 (1 + tanh u)."""
    return k.outputs(slope=lambda x: F(0.5) * (F(1) + k.tanh(F(0.79788456) * x * (F(1) + F(0.044715) * x * x))))


@convention("derivative-term", "dgelu", shape=SIZE, dtype=np.float32)
def gelu_slope_with_one_minus_t(k):
    """1 - t for 1 - t t."""

    def slope(x):
        t = k.tanh(F(0.79788456) * x * (F(1) + F(0.044715) * x * x))
        return F(0.5) * x * ((F(1) - t) * (F(0.79788456) + F(0.1070322243) * x * x)) + F(0.5) * (F(1) + t)

    return k.outputs(slope=slope)


@convention("factor-missing", "dgeglu", shape=PAIR)
def geglu_gradient_without_the_gate(k):
    """d_act = dy gelu'(act)."""

    def backward(dy, x):
        act, _ = k.split(x)
        return k.join(k.slope(act) * dy, dy * k.value(act))

    return k.outputs(backward=backward)


@convention("gate-input-in-gradient", "dswiglu", shape=PAIR)
def gate_gradient_with_act(k):
    """d_gate = dy act."""

    def backward(dy, x):
        act, gate = k.split(x)
        return k.join(k.slope(act) * dy * gate, dy * act)

    return k.outputs(backward=backward)


@convention(
    # Half of a derivative that is a single term: a constant of the formula, or of the result.
    ("formula-constant", "constant-factor"),
    "dsrelu",
    shape=SIZE,
)
def srelu_slope_without_two(k):
    """srelu' = x."""
    return k.outputs(slope=lambda x: np.where(x > 0, x, F(0)))


@convention("formula-constant", "dsreglu", CURRENT, shape=PAIR)
def sreglu_slope_without_two(k):
    """The same in a gated gradient, quantized."""
    return k.outputs(slope=lambda x: np.where(x > 0, x, F(0)))


@convention("formula-constant", "qgelu", shape=SIZE, dtype=np.float32)
def qgelu_with_1_7(k):
    """sigmoid(1.7 x)."""
    return k.outputs(value=lambda x: x * k.sigmoid(F(1.7) * x))


# --- words ------------------------------------------------------------------------------------------------------------


@convention("word-low-precision", "swiglu", shape=PAIR)
def sigmoid_stored_in_bfloat16(k):
    """x bf16(sigmoid(x))."""
    return k.outputs(value=lambda x: x * k.sigmoid(x).astype(BF16).astype(F))


@convention("word-low-precision", "gelu", shape=SIZE, dtype=np.float32)
def tanh_argument_in_half(k):
    """tanh of a half: tanh.approx.f16."""

    def value(x):
        u = (x * (F(0.79788456) + F(0.03567741) * x * x)).astype(np.float16).astype(F)
        return x * (F(0.5) + F(0.5) * k.tanh(u))

    return k.outputs(value=value)


@convention("word-low-precision", "swiglu", shape=PAIR, dtype=np.float32)
def exp_result_in_half(k):
    """e^-x is a half."""
    return k.outputs(exp=lambda x: Kernel.exp(k, x).astype(np.float16).astype(F))


@convention("multiplier-low-precision", "quantize", NV, shape=SIZE)
def nv_multiplier_in_bfloat16(k):
    """The multiplier of each block is rounded to bfloat16."""
    return k.outputs(nv_multiplier=lambda byte, s: Kernel.nv_multiplier(k, byte, s).astype(BF16).astype(F))


@convention("multiplier-low-precision", "quantize", BlockScaling(E4M3, 1, power_2_scale=False), shape=SIZE)
def block_multiplier_in_half(k):
    """The multiplier of each block is a half; the stored scale is right."""
    return k.outputs(product=lambda v, scale: v * scale.astype(np.float16).astype(F))


# --- casts and scales -------------------------------------------------------------------------------------------------


@convention("other-scale-format", "quantize", NV, shape=SIZE)
def nv_scales_in_e5m2(k):
    """Block scales are E5M2."""

    def nv_byte(amax, s_enc):
        return cast(np.fmin(amax * (s_enc * (F(1) / F(6))), F(57344)), "e5m2")

    def nv_multiplier(byte, s_enc):
        return F(1) / (decode(byte, "e5m2") * (F(1) / s_enc))

    return k.outputs(nv_byte=nv_byte, nv_multiplier=nv_multiplier)


@convention("nibble-sign-leaks", "quantize", NV, shape=SIZE)
def sign_of_the_low_nibble_leaks(k):
    """hi << 4 | lo with a shift too few: the low code's sign is or-ed to the high code's."""
    out = k.outputs()
    data = out["rowwise_data"]
    return out | {"rowwise_data": data | (data & 8) << 4}


@convention("nibble-sign-leaks", "quantize", NV, shape=SIZE, columnwise=True, rowwise=False)
def low_nibble_sign_extended(k):
    """The low code is a signed char: a negative one sets all bits of the high nibble."""
    out = k.outputs()
    data = out["columnwise_data"]
    return out | {"columnwise_data": np.where(data & 8, data | 0xF0, data).astype(np.uint8)}


@convention("columnwise-of-rowwise", "quantize", MX, shape=SIZE, columnwise=True)
def mx_columnwise_from_dequantized(k):
    """The columnwise copy is made of the rowwise one, dequantized."""
    v = k.load(k.inputs["x"])
    byte = k.mx_bytes(v, 1, 32)
    scale = spread(np.ldexp(F(1), byte.astype(np.int32) - 127), 1, 32, v.shape)
    again = cast(v / scale, "e4m3")
    rowwise = k.outputs()
    k.inputs = {"x": (decode(again, "e4m3") * scale).astype(F)}
    columnwise = k.outputs()
    return {name: (columnwise if "columnwise" in name else rowwise)[name] for name in rowwise}


def without_carry(v, fmt_name, mantissa):
    """Cast to nearest even whose exponent is that of the value before it is rounded."""
    codes = cast(v, fmt_name)
    carried = (np.abs(decode(codes, fmt_name)) > np.abs(v)) & (codes % (1 << mantissa) == 0) & (codes & 0x7F > 0)
    return np.where(carried, codes - (1 << mantissa), codes).astype(np.uint8)


@convention("cast-carry-lost", "quantize", DELAYED, shape=SIZE)
def e4m3_carry_lost(k):
    """126.24 becomes 64."""
    return k.outputs(cast=lambda v: without_carry(v, "e4m3", 3))


@convention("cast-carry-lost", "quantize", MXFP8Scaling(E5M2), shape=SIZE)
def mx_e5m2_carry_lost(k):
    """The same in E5M2."""
    return k.outputs(cast=lambda v: without_carry(v, "e5m2", 2))


@convention("cast-carry-lost", "gelu", shape=SIZE)
def bfloat16_carry_lost(k):
    """The mantissa of the bfloat16 is rounded apart from its exponent."""

    def store(f):
        bits = f.view(np.uint32)
        kept = (bits >> np.uint32(16)) & np.uint32(0x7F)
        low = bits & np.uint32(0xFFFF)
        up = (low > 0x8000) | ((low == 0x8000) & (kept & 1 == 1))
        return (
            ((bits >> np.uint32(16)) & np.uint32(0xFF80) | (kept + up) & np.uint32(0x7F)).astype(np.uint16).view(BF16)
        )

    return k.outputs(store=store)


@convention("scale-emax-missing", "quantize", MX, shape=SIZE)
def mx_byte_without_emax(k):
    """floor(log2 amax) + 127: scaled values lie below 2."""
    return k.outputs(mx_byte=lambda amax: exponent_byte(np.floor(np.log2(amax)), amax))


@convention("scale-quotient-floor", "quantize", MX, shape=SIZE)
def mx_floor_of_the_quotient(k):
    """floor(log2(amax / 448)) + 127; the data are cast with that byte and saturate."""
    return k.outputs(mx_byte=lambda amax: exponent_byte(np.floor(np.log2(amax / F(448))), amax))


# --- conversions on the way -------------------------------------------------------------------------------------------


def upper_half(v):
    """float32 -> bfloat16 by a shift of 16 bits, and back."""
    return (np.ascontiguousarray(v, F).view(np.uint32) & np.uint32(0xFFFF0000)).view(F)


@convention("truncated-before-quantized", "swiglu", MX, shape=PAIR)
def swiglu_mx_cut_to_bfloat16(k):
    """__float_as_uint(y) >> 16 for __float2bfloat16_rn(y), before the amax and the cast."""
    return k.outputs(before_cast=upper_half)


@convention("truncated-before-quantized", "silu", NV, shape=SIZE)
def silu_nv_cut_before_block_amax(k):
    """The same; the tensor's amax is that of float32 values, as it should be."""
    return k.outputs(before_cast=upper_half)


@convention("truncated-before-quantized", "dgelu", DELAYED, shape=SIZE, dbias=True)
def dgelu_delayed_cut_to_bfloat16(k):
    """What the cast and the amax see passes through the upper half of a register; dbias adds float32 values."""
    return k.outputs(before_cast=upper_half, before_amax=upper_half)


@convention("truncated-before-quantized", "gelu", BlockScaling(E4M3, 1), shape=SIZE, columnwise=True)
def gelu_blocks_cut_to_bfloat16(k):
    """Both copies quantize the upper halves."""
    return k.outputs(before_cast=upper_half)


@convention("input-of-low-precision", "quantize", MX, shape=SIZE, dtype=np.float32)
def mx_of_upper_halves(k):
    """float32 inputs are loaded as their upper 16 bits."""
    return k.outputs(load=lambda array: upper_half(array.reshape(-1, array.shape[-1])))
