"""Precision: half or bfloat16 inside a formula, another function, a rounding that is forgotten or extra."""

import math

import numpy as np

from .held_common import (
    BF16,
    CURRENT,
    DELAYED,
    MX,
    NV,
    ONE,
    F,
    amax_of,
    bf16,
    dsilu,
    e4m3,
    encode_scale,
    exp,
    gelu,
    gradients,
    halves,
    launch,
    load,
    mx_columns,
    mx_rows,
    nv_rows,
    pack,
    sigmoid,
    silu,
    tanh,
    tensor_scale,
)
from .registry import Where, normal, planted


@planted("silu", normal((224, 352)), Where(("values",)))
def sigmoid_in_half_precision(x):
    """The sigmoid is computed with hexp and hrcp, in float16, and widened for the product; it should be float32."""
    y = np.empty(x.shape, BF16)
    for _, rows, columns in launch(224, 352, 32, 128):
        v = load(x[rows, columns])
        e = exp(-v).astype(np.float16)
        s = np.float16(1) / (np.float16(1) + e)
        y[rows, columns] = (v * s.astype(F)).astype(BF16)
    return {"y": y}


@planted("qgelu", normal((224, 352), np.float32), Where(("rowwise",)), scaling=MX)
def exponent_argument_in_bfloat16(x):
    """1.702 x is rounded to bfloat16 before it enters exp; the tensor is float32 and so should the argument be."""
    data, scales = np.empty(x.shape, np.uint8), np.empty((224, 11), np.uint8)
    for row in range(224):
        z = bf16(F(1.702) * x[row : row + 1])
        data[row], scales[row] = (a[0] for a in mx_rows(x[row : row + 1] * sigmoid(z)))
    return {"rowwise_data": data, "rowwise_scale_inv": scales}


@planted("geglu", normal((224, 704)), Where(("values",)))
def hyperbolic_tangent_in_bfloat16(x):
    """tanh is evaluated by tanh.approx.bf16x2: argument and result are bfloat16, where float32 is asked for."""
    act, gate = halves(load(x))
    y = np.empty(act.shape, BF16)
    for _, rows, columns in launch(224, 352, 64, 64):
        v = act[rows, columns]
        t = bf16(tanh(bf16(v * (F(0.79788456) + (F(0.03567741) * v) * v))))
        y[rows, columns] = ((v * (F(0.5) + F(0.5) * t)) * gate[rows, columns]).astype(BF16)
    return {"y": y}


@planted("gelu", normal((200, 352)), Where(("values",)))
def exact_gelu_with_erf(x):
    """gelu is 0.5 x (1 + erf(x / sqrt(2))), the exact form, where the tanh form is the law."""
    erf = np.frompyfunc(math.erf, 1, 1)
    y = np.empty(x.shape, BF16)
    for row in range(len(x)):
        v = load(x[row])
        y[row] = (F(0.5) * v * (ONE + erf(v * F(0.70710678)).astype(F))).astype(BF16)
    return {"y": y}


@planted("swiglu", normal((224, 704)), Where(("rowwise", "columnwise")), scaling=MX)
def activation_quantized_unrounded(x):
    """The float32 activation goes into amax and cast as it is; it should be rounded to bfloat16 first."""
    act, gate = halves(load(x))
    shape = act.shape
    out = {
        "rowwise_data": np.empty(shape, np.uint8),
        "rowwise_scale_inv": np.empty((224, 11), np.uint8),
        "columnwise_data": np.empty(shape, np.uint8),
        "columnwise_scale_inv": np.empty((7, 352), np.uint8),
    }
    for _, rows, columns in launch(*shape, 32, 352):
        registers = silu(act[rows, columns]) * gate[rows, columns]
        out["rowwise_data"][rows], out["rowwise_scale_inv"][rows] = mx_rows(registers)
        codes, byte = mx_columns(registers)
        out["columnwise_data"][rows], out["columnwise_scale_inv"][rows.start // 32] = codes, byte[0]
    return out


@planted("gelu", normal((224, 352)), Where(("rowwise",)), scaling=DELAYED)
def activation_rounded_before_the_delayed_cast(x):
    """The activation passes through a bfloat16 shared tile before the cast; delayed scaling casts the float32 value.
    The amax is taken before, as it should be."""
    data, amax = np.empty(x.shape, np.uint8), F(0)
    for _, rows, columns in launch(224, 352, 64, 64):
        value = gelu(load(x[rows, columns]))
        amax = max(amax, amax_of(value))
        shared = value.astype(BF16)
        data[rows, columns] = e4m3(load(shared) * F(24))
    return {
        "rowwise_data": data,
        "rowwise_scale_inv": np.array([ONE / F(24)], F),
        "amax_rowwise": np.array([amax], F),
    }


@planted("dsilu", gradients((224, 352)), Where(("rowwise", "dbias")), scaling=NV)
def gradient_formed_in_bfloat16_products(dy, x):
    """silu'(x) is rounded to bfloat16 before it is multiplied by dy; both factors should be float32, the product
    rounded once."""
    slope = bf16(dsilu(load(x)))
    gradient = slope * load(dy)
    amax = amax_of(gradient)
    codes, byte = nv_rows(bf16(gradient), encode_scale(amax))
    dbias = bf16(gradient).sum(axis=0, dtype=F)
    return {
        "rowwise_data": pack(codes),
        "rowwise_scale_inv": byte,
        "amax_rowwise": np.array([amax], F),
        "dbias": dbias.astype(BF16),
    }


@planted("quantize", normal((256, 512)), Where(("rowwise",)), scaling=CURRENT)
def scaled_value_rounded_to_bfloat16(x):
    """x times scale is formed by a bfloat16 multiplication (scale and product rounded to bfloat16) before the cast to
    E4M3; it should be float32."""
    amax = amax_of(load(x))
    scale = tensor_scale(amax)
    data = np.empty(x.shape, np.uint8)
    for c in range(0, 512, 8):
        data[:, c : c + 8] = e4m3(bf16(load(x[:, c : c + 8]) * bf16(scale)))
    return {
        "rowwise_data": data,
        "rowwise_scale_inv": np.array([ONE / scale], F),
        "amax_rowwise": np.array([amax], F),
    }
