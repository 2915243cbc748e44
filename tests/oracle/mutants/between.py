"""Conventions of what lies between load and store: bits, tables, grids, limits; single functions; the butterflies."""

import numpy as np

from mutants.kernels import BF16, F, Kernel, cast, decode, exponent_byte, mx_byte_up, unpack
from mutants.registry import convention
from refops import E4M3, E5M2, CurrentScaling, DelayedScaling, MXFP8Scaling, NVFP4Scaling

SIZE, PAIR = (512, 1024), (512, 2048)
FP32, FP16 = np.float32, np.float16
MX, NV, CURRENT = MXFP8Scaling(E4M3), NVFP4Scaling(), CurrentScaling(E4M3)
NV_RHT = NVFP4Scaling(rht=True)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], F)


def bf16(v):
    """Rounded to bfloat16 and back."""
    return np.asarray(v, F).astype(BF16).astype(F)


def rows_of(array):
    """(M, K) as it is stored."""
    return array.reshape(-1, array.shape[-1])


# --- codes and bits that are read -------------------------------------------------------------------------------------


@convention("table-entry-wrong", "dequantize", NV, shape=SIZE)
def nv_table_with_seven(k):
    """The table has 7 for code 7, which is 6."""
    table = np.where(E2M1 == 6, F(7), E2M1)
    return k.outputs(codes_read=lambda data: np.concatenate([table, -table])[unpack(data)])


@convention("table-entry-wrong", "dequantize", MX, shape=SIZE)
def mx_code_without_its_mantissa(k):
    """Code 0x3B, 1.375, has 1.25 in the table; 0xBB is right."""
    return k.outputs(codes_read=lambda data: np.where(data == 0x3B, F(1.25), decode(data, "e4m3")))


@convention("other-table", "dequantize", NV, shape=SIZE)
def nv_codes_read_as_int4(k):
    """The nibbles are signed integers."""
    return k.outputs(codes_read=lambda data: ((unpack(data).astype(int) ^ 8) - 8).astype(F))


@convention("input-bits-of-other-dtype", "silu", shape=SIZE)
def silu_of_half_bits(k):
    """The template was instantiated for half."""
    return k.outputs(load=lambda array: rows_of(array).view(FP16).astype(F))


@convention("input-bits-of-other-dtype", "quantize", MX, shape=SIZE, dtype=FP16)
def mx_of_bfloat16_bits(k):
    """Half is read as bfloat16 before it is quantized."""
    return k.outputs(load=lambda array: rows_of(array).view(BF16).astype(F))


@convention("output-bits-of-other-dtype", "swiglu", shape=PAIR)
def swiglu_written_as_half(k):
    """float2half for float2bfloat16."""
    return k.outputs(store=lambda f: f.astype(FP16).view(BF16))


@convention("input-of-low-precision", "quantize", CURRENT, shape=SIZE, dtype=FP32)
def current_of_truncated_float32(k):
    """The cast sees the upper halves of float32, the amax all of it."""
    upper = lambda v: (v.view(np.uint32) & np.uint32(0xFFFF0000)).view(F)  # noqa: E731
    return k.outputs(product=lambda v, scale: upper(v) * scale)


@convention("input-of-low-precision", "dgelu", shape=SIZE, dtype=FP32)
def dgelu_loads_bfloat16(k):
    """Both float32 inputs are rounded to bfloat16 in shared memory."""
    return k.outputs(load=lambda array: bf16(rows_of(array)))


# --- casts ------------------------------------------------------------------------------------------------------------


@convention("linear-grid", "quantize", NV, shape=SIZE)
def nv_codes_are_integers(k):
    """round(|x|) up to 7 as the code."""
    return k.outputs(
        cast=lambda v: np.fmin(np.rint(np.abs(v)), 7).astype(np.uint8) | np.signbit(v).astype(np.uint8) << np.uint8(3)
    )


@convention("rounded-to-integers", "quantize", CURRENT, shape=SIZE)
def current_by_way_of_integers(k):
    """rintf before the cast, from an INT8 kernel."""
    return k.outputs(cast=lambda v: cast(np.rint(v), "e4m3"))


@convention("two-casts", "quantize", DelayedScaling(E5M2, 64.0), shape=SIZE)
def delayed_e5m2_through_e4m3(k):
    """E4M3 codes are converted to E5M2."""
    return k.outputs(cast=lambda v: cast(decode(cast(v, "e4m3"), "e4m3"), "e5m2"))


@convention("saturation-limit", "quantize", MX, shape=SIZE)
def mx_clamped_to_256(k):
    """fminf(x, 256) before the cast."""
    return k.outputs(cast=lambda v: cast(np.clip(v, F(-256), F(256)), "e4m3"))


@convention("saturation-limit", "quantize", NV, shape=SIZE)
def nv_clamped_to_four(k):
    """The clamp is at 4."""
    return k.outputs(cast=lambda v: cast(np.clip(v, F(-4), F(4)), "e2m1"))


# --- scales -----------------------------------------------------------------------------------------------------------


@convention("multiplier-low-precision", "quantize", NV, shape=SIZE)
def nv_tensor_scale_in_bfloat16(k):
    """S_enc passes between kernels as bfloat16."""
    return k.outputs(global_scale=lambda amax: bf16(Kernel.global_scale(k, amax)))


@convention("reciprocal-rounded", "quantize", NV, shape=SIZE)
def nv_sixth_in_bfloat16(k):
    """S_enc times 1/6 in bfloat16."""
    return k.outputs(nv_byte=lambda amax, s_enc: cast(amax * (s_enc * bf16(F(1) / F(6))), "e4m3"))


@convention("reciprocal-rounded", "quantize", MX, shape=SIZE, dtype=FP32, data="above_powers_of_two")
def mx_reciprocal_in_bfloat16(k):
    """amax times 1/448 in bfloat16, rounded up to a power of two: other bytes beside those powers."""
    return k.outputs(mx_byte=lambda amax: mx_byte_up(amax * bf16(F(1) / F(448)), F(1)))


def _exponent(amax):
    """ceil(log2(amax / 448)), exact."""
    fraction, exponent = np.frexp(amax.astype(np.float64) / 448)
    return np.where(amax > 0, exponent - (fraction == 0.5), 0)


@convention("exponent-wraps", "quantize", MX, shape=(256, 512), dtype=FP32, data="vanishing_rows")
def mx_exponent_in_int8(k):
    """int8_t exponent: -129 becomes 127."""
    return k.outputs(mx_byte=lambda amax: exponent_byte(_exponent(amax).astype(np.int8).astype(int), amax))


@convention("exponent-wraps", "quantize", MX, shape=SIZE, data="with_bytes_above_127")
def mx_byte_as_signed_char(k):
    """2^(127 - byte) of a signed char."""
    multiplier = lambda byte: np.ldexp(F(1), 127 - byte.view(np.int8).astype(np.int32)).astype(F)  # noqa: E731
    return k.outputs(mx_multiplier=multiplier)


# --- single functions -------------------------------------------------------------------------------------------------


@convention("leaky-relu", "relu", shape=SIZE)
def relu_with_slope(k):
    """A slope of 0.05 below zero."""
    return k.outputs(value=lambda x: np.where(x > 0, x, F(0.05) * x))


@convention("leaky-relu", "reglu", MX, shape=PAIR)
def reglu_with_usual_slope(k):
    """leaky_relu of torch, 0.01."""
    return k.outputs(value=lambda x: np.where(x > 0, x, F(0.01) * x))


@convention("relu-passes-at-zero", "drelu", shape=SIZE)
def drelu_with_greater_or_equal(k):
    """x >= 0 for x > 0."""
    return k.outputs(slope=lambda x: np.where(x >= 0, F(1), F(0)))


@convention("clamp-at-zero-missing", "srelu", shape=SIZE)
def srelu_is_the_square(k):
    """x * x."""
    return k.outputs(value=lambda x: x * x)


@convention("gelu-cubic-coefficient", "gelu", shape=SIZE)
def gelu_without_cube(k):
    """tanh(0.798 x)."""
    return k.outputs(value=lambda x: x * (F(0.5) + F(0.5) * k.tanh(F(0.79788456) * x)))


@convention("gelu-cubic-coefficient", "dgelu", shape=SIZE)
def dgelu_with_forward_coefficient(k):
    """0.0357 where the formula has the factor sqrt(2/pi) outside."""

    def slope(x):
        t = k.tanh(F(0.79788456) * x * (F(1) + F(0.03567741) * x * x))
        inner = F(0.79788456) + F(0.1070322243) * x * x
        return F(0.5) * x * ((F(1) - t * t) * inner) + F(0.5) * (F(1) + t)

    return k.outputs(slope=slope)


@convention("other-elementary-function", "swiglu", shape=PAIR)
def swiglu_with_hard_sigmoid(k):
    """x / 6 + 1/2, clamped."""
    return k.outputs(sigmoid=lambda x: np.clip(x / F(6) + F(0.5), F(0), F(1)))


@convention("other-elementary-function", "silu", shape=SIZE)
def silu_without_minus(k):
    """1 / (1 + e^x)."""
    return k.outputs(sigmoid=lambda x: F(1) / (F(1) + k.exp(x)))


@convention("other-elementary-function", "gelu", shape=SIZE)
def gelu_with_rational_tanh(k):
    """Pade's tanh."""
    return k.outputs(tanh=lambda x: np.clip(x * (F(27) + x * x) / (F(27) + F(9) * x * x), F(-1), F(1)))


# --- the Hadamard transform -------------------------------------------------------------------------------------------


def butterflies(k, v, strides, round_stage):
    """Groups of 16 rows through four stages, each rounded."""
    signs = np.where(k.scaling.sign_mask >> np.arange(16) & 1, F(-1), F(1))
    groups = v.reshape(-1, 16, v.shape[1]) * signs[:, None]
    for stride in strides:
        out = np.empty_like(groups)
        for i in range(16):
            first, second = groups[:, i & ~stride], groups[:, i | stride]
            out[:, i] = round_stage(first - second if i & stride else first + second)
        groups = out
    return (groups * F(0.25) + F(0)).reshape(v.shape)


@convention("hadamard-stages-rounded", "quantize", NV_RHT, shape=SIZE, rowwise=False, columnwise=True)
def nv_butterflies_in_bfloat16(k):
    """bfloat16x2 additions, the far halves first."""
    return k.outputs(hadamard=lambda v: butterflies(k, v, (8, 4, 2, 1), bf16))


@convention("hadamard-other-factor", "quantize", NV_RHT, shape=SIZE, rowwise=False, columnwise=True)
def nv_transform_over_sixteen(k):
    """1/16, the factor of the inverse of an unnormalised transform."""
    return k.outputs(hadamard=lambda v: k.rounded(Kernel.hadamard(k, v) * F(0.25)))


@convention("hadamard-order", "quantize", NV_RHT, shape=SIZE, columnwise=True, data="coarse")
def nv_transform_in_bit_reversed_order(k):
    """The last stage is not undone: output 1 stands at 8."""
    order = [int(f"{i:04b}"[::-1], 2) for i in range(16)]
    return k.outputs(hadamard=lambda v: Kernel.hadamard(k, v).reshape(-1, 16, v.shape[1])[:, order].reshape(v.shape))
