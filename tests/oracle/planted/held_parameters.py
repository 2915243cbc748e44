"""Parameters and operands: limits on the wrong side, constants that ignore the call, exchanged operands."""

import numpy as np

from .held_common import BF16, MX, ONE, F, bf16, dgelu, gradients, halves, launch, load, mx_rows, sigmoid, silu
from .registry import Where, normal, planted

CLAMP = {"limit": 1.5, "alpha": 1.25, "glu_linear_offset": 0.5}


@planted("clamped_swiglu", normal((224, 704), scale=1.5), Where(("values",)), params=CLAMP)
def act_clamped_from_below_too(x):
    """act is clamped to [-limit, limit] like the gate, where only min(act, limit) is asked for."""
    y = np.empty((224, 352), BF16)
    limit, alpha, offset = F(1.5), F(1.25), F(0.5)
    for _, rows, columns in launch(224, 352, 64, 128):
        act, gate = load(x[rows, columns]), load(x[rows, columns.start + 352 : columns.stop + 352])
        act, gate = np.clip(act, -limit, limit), np.clip(gate, -limit, limit)
        y[rows, columns] = (act * sigmoid(alpha * act) * (gate + offset)).astype(BF16)
    return {"y": y}


@planted("clamped_swiglu", normal((224, 704), scale=1.5), Where(("rowwise",)), scaling=MX, params=CLAMP)
def alpha_compiled_in_as_1702(x):
    """The sigmoid's alpha is the constant 1.702 of the default, though the call asks for 1.25."""
    limit, offset = F(1.5), F(0.5)
    act, gate = halves(load(x))
    data, scales = np.empty((224, 352), np.uint8), np.empty((224, 11), np.uint8)
    for start in range(0, 224, 32):
        rows = slice(start, start + 32)
        c = np.minimum(act[rows], limit)
        y = c * sigmoid(F(1.702) * c) * (np.clip(gate[rows], -limit, limit) + offset)
        data[rows], scales[rows] = mx_rows(bf16(y))
    return {"rowwise_data": data, "rowwise_scale_inv": scales}


@planted("clamped_swiglu", normal((224, 704), scale=1.5), Where(("values",)), params=CLAMP)
def gate_clamped_from_above_only(x):
    """The gate is min(gate, limit) + offset; its lower bound -limit is missing."""
    act, gate = halves(load(x))
    limit = F(1.5)
    c, g = np.minimum(act, limit), np.minimum(gate, limit)
    return {"y": (c * sigmoid(F(1.25) * c) * (g + F(0.5))).astype(BF16)}


@planted("clamped_swiglu", normal((224, 704), scale=1.5), Where(("values",)), params=CLAMP)
def offset_added_before_the_clamp(x):
    """glu_linear_offset is added to the gate before it is clamped to [-limit, limit], where it belongs behind the
    clamp."""
    act, gate = halves(load(x))
    limit = F(1.5)
    y = np.empty(act.shape, BF16)
    for row in range(len(x)):
        c, g = np.minimum(act[row], limit), np.clip(gate[row] + F(0.5), -limit, limit)
        y[row] = (c * sigmoid(F(1.25) * c) * g).astype(BF16)
    return {"y": y}


@planted("dgelu", gradients((224, 352)), Where(("values",)))
def kernel_arguments_dy_and_x_exchanged(dy, x):
    """The launch passes x and dy in each other's place: dx is x times gelu'(dy)."""
    dx = np.empty(x.shape, BF16)

    def kernel(gradient, value):
        for _, rows, columns in launch(224, 352, 32, 64):
            dx[rows, columns] = (dgelu(load(value[rows, columns])) * load(gradient[rows, columns])).astype(BF16)

    kernel(x, dy)
    return {"dx": dx}


@planted("reglu", normal((193, 704)), Where(("values",)))
def relu_on_the_gate_half(x):
    """relu is applied to the second half of the row and the first half multiplies it; it belongs to the first."""
    act, gate = halves(x)
    y = np.empty(act.shape, BF16)
    for row in range(len(x)):
        y[row] = (load(act[row]) * np.maximum(load(gate[row]), F(0))).astype(BF16)
    return {"y": y}


def _interleaved(rng):
    return {
        "x": rng.standard_normal((128, 512), np.float32).astype(BF16),
        "row_scales": rng.uniform(0.1, 1, 128).astype(np.float32),
    }


@planted("scaled_swiglu", _interleaved, Where(("values",)), params={"glu_interleave_size": 32})
def interleaved_rows_read_as_halves(x, row_scales):
    """The row is read as [act | gate] although it is interleaved in runs of 32 columns."""
    y = np.empty((128, 256), BF16)
    for c in range(0, 256, 32):
        act, gate = load(x[:, c : c + 32]), load(x[:, 256 + c : 288 + c])
        y[:, c : c + 32] = (silu(act) * gate * row_scales[:, None]).astype(BF16)
    return {"y": y}


@planted(
    "dclamped_swiglu", gradients((224, 352), gated=True, scale=1.5), Where(("values",), columns=(0, 351)), params=CLAMP
)
def offset_missing_in_the_act_gradient(dy, x):
    """d_act is multiplied by the clamped gate without glu_linear_offset; d_gate is right."""
    act, gate = halves(load(x))
    limit, alpha, incoming = F(1.5), F(1.25), load(dy)
    c = np.minimum(act, limit)
    s = sigmoid(alpha * c)
    slope = np.where(act <= limit, (alpha * c) * (s * (ONE - s)) + s, F(0))
    d_act = (slope * incoming) * np.clip(gate, -limit, limit)
    d_gate = np.where(np.abs(gate) <= limit, incoming, F(0)) * (c * s)
    return {"dx": np.concatenate([d_act, d_gate], axis=1).astype(BF16)}
