"""Gradients with a term or a factor missing."""

import numpy as np

from .held_common import (
    BF16,
    MX,
    NV,
    ONE,
    ROW_BLOCKS,
    F,
    amax_of,
    bf16,
    block_multiplier,
    blocks,
    dgelu,
    dsilu,
    e4m3,
    encode_scale,
    gelu,
    gradients,
    halves,
    launch,
    load,
    mx_rows,
    nv_rows,
    pack,
    sigmoid,
    tanh,
)
from .registry import Where, planted


@planted("dsilu", gradients((224, 352)), Where(("values",)))
def silu_slope_without_its_second_term(dy, x):
    """The slope of silu is taken as sigmoid(x) alone; x s (1 - s) is missing."""
    dx = np.empty(x.shape, BF16)
    for _, rows, columns in launch(224, 352, 16, 352):
        dx[rows, columns] = (sigmoid(load(x[rows, columns])) * load(dy[rows, columns])).astype(BF16)
    return {"dx": dx}


@planted("dgelu", gradients((256, 512)), Where(("rowwise",)), scaling=MX)
def gelu_inner_slope_without_factor_three(dy, x):
    """The derivative of the cubic inside tanh is sqrt(2/pi) (1 + 0.044715 x^2): the factor 3 of the cubic term is
    missing."""
    data, scales = np.empty(x.shape, np.uint8), np.empty((256, 16), np.uint8)
    for _, rows, columns in launch(256, 512, 64, 512):
        v = load(x[rows, columns])
        t = tanh((F(0.79788456) * v) * (ONE + (F(0.044715) * v) * v))
        steep = F(0.79788456) + (F(0.03567741) * v) * v
        slope = (F(0.5) * v) * ((ONE - t * t) * steep) + F(0.5) * (ONE + t)
        data[rows], scales[rows] = mx_rows(bf16(slope * load(dy[rows, columns])))
    return {"rowwise_data": data, "rowwise_scale_inv": scales}


@planted("dswiglu", gradients((224, 352), gated=True), Where(("values",), columns=(352, 703)))
def gate_gradient_takes_the_slope(dy, x):
    """d_gate is dy times silu'(act), where it is dy times silu(act); d_act is right."""
    dx = np.empty(x.shape, BF16)
    for _, rows, columns in launch(224, 352, 32, 128):
        behind = slice(columns.start + 352, columns.stop + 352)
        act, gate, incoming = load(x[rows, columns]), load(x[rows, behind]), load(dy[rows, columns])
        slope = dsilu(act)
        dx[rows, columns] = ((slope * incoming) * gate).astype(BF16)
        dx[rows, behind] = (incoming * slope).astype(BF16)
    return {"dx": dx}


CLAMP = {"limit": 1.0, "alpha": 1.702, "glu_linear_offset": 1.0}


@planted("dclamped_swiglu", gradients((224, 352), gated=True), Where(("values",), columns=(352, 703)), params=CLAMP)
def gate_gradient_passes_beyond_the_limit(dy, x):
    """d_gate is not zeroed where the gate lies outside [-limit, limit]."""
    act, gate = halves(load(x))
    limit, alpha, incoming = ONE, F(1.702), load(dy)
    dx = np.empty(x.shape, BF16)
    for row in range(224):
        c = np.minimum(act[row], limit)
        z = alpha * c
        s = sigmoid(z)
        slope = np.where(act[row] <= limit, z * (s * (ONE - s)) + s, F(0))
        dx[row, :352] = ((slope * incoming[row]) * (np.clip(gate[row], -limit, limit) + ONE)).astype(BF16)
        dx[row, 352:] = (incoming[row] * (c * s)).astype(BF16)
    return {"dx": dx}


@planted("dqgelu", gradients((224, 352)), Where(("values",)))
def chain_rule_without_1702(dy, x):
    """The slope of x sigmoid(1.702 x) is x s (1 - s) + s: the inner factor 1.702 is missing in the first term."""
    v = load(x)
    dx = np.empty(x.shape, BF16)
    for row in range(224):
        s = sigmoid(F(1.702) * v[row])
        dx[row] = ((v[row] * (s * (ONE - s)) + s) * load(dy[row])).astype(BF16)
    return {"dx": dx}


@planted("dsrelu", gradients((224, 352)), Where(("rowwise", "columnwise")), scaling=ROW_BLOCKS)
def squared_relu_slope_without_two(dy, x):
    """The slope of squared relu is max(x, 0) instead of 2 max(x, 0)."""
    gradient = bf16(np.maximum(load(x), F(0)) * load(dy))
    out = {}
    for name, matrix in (("rowwise", gradient), ("columnwise", gradient.T)):
        b = blocks(matrix, 128)
        scale = block_multiplier(amax_of(b, 2))
        codes = e4m3(b * scale[:, :, None]).reshape(len(matrix), -1)
        out[f"{name}_data"], out[f"{name}_scale_inv"] = codes[:, : matrix.shape[1]], (ONE / scale).T
    return out


def _with_zeros(rng):
    x = np.rint(3 * rng.standard_normal((193, 363)))
    return {"dy": rng.standard_normal((193, 363), np.float32).astype(BF16), "x": x.astype(BF16)}


@planted("drelu", _with_zeros, Where(("values",)))
def relu_mask_includes_zero(dy, x):
    """dy passes where x >= 0, where it should pass for x > 0 only."""
    dx = np.zeros(x.shape, BF16)
    for row in range(len(x)):
        dx[row] = np.where(load(x[row]) >= 0, dy[row], BF16.type(0))
    return {"dx": dx}


@planted("dgeglu", gradients((256, 192), gated=True), Where(("rowwise",), columns=(0, 191)), scaling=NV)
def act_gradient_without_the_gate(dy, x):
    """d_act is dy gelu'(act); the factor gate is missing. The amax is that of what is written."""
    act, incoming = load(x[:, :192]), load(dy)
    registers = np.concatenate([dgelu(act) * incoming, incoming * gelu(act)], axis=1)
    amax = amax_of(registers)
    codes, byte = nv_rows(bf16(registers), encode_scale(amax))
    return {"rowwise_data": pack(codes), "rowwise_scale_inv": byte, "amax_rowwise": np.array([amax], F)}
