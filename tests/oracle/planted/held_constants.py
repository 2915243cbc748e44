"""Arrays that are right but for a constant or a reciprocal, and values in each other's place."""

import numpy as np

from .held_common import (
    BF16,
    CURRENT,
    DELAYED,
    MX_E5M2,
    NV,
    ONE,
    ROW_BLOCKS,
    F,
    amax_of,
    bf16,
    block_multiplier,
    blocks,
    e4m3,
    e5m2,
    encode_scale,
    gelu,
    halves,
    launch,
    load,
    mx_rows,
    nv_rows,
    pack,
    silu,
    tensor_scale,
)
from .registry import Where, normal, planted


@planted("quantize", normal((224, 352)), Where(("rowwise",)), scaling=CURRENT)
def scale_stored_where_its_inverse_belongs(x):
    """scale_inv holds the multiplier 448 / amax itself, not its reciprocal; codes and amax are right."""
    x = load(x)
    amax = F(0)
    for _, rows, columns in launch(224, 352, 64, 64):
        amax = max(amax, amax_of(x[rows, columns]))
    scale = tensor_scale(amax)
    data = np.empty(x.shape, np.uint8)
    for _, rows, columns in launch(224, 352, 64, 64):
        data[rows, columns] = e4m3(x[rows, columns] * scale)
    return {
        "rowwise_data": data,
        "rowwise_scale_inv": np.array([scale], F),
        "amax_rowwise": np.array([amax], F),
    }


@planted("quantize", normal((224, 352)), Where(("rowwise",)), scaling=MX_E5M2)
def exponent_byte_stored_one_too_high(x):
    """The byte that is stored is one above the one that the codes were cast with: every decode scale is twice what it
    should be."""
    x = load(x)
    data, scales = np.empty(x.shape, np.uint8), np.empty((224, 11), np.uint8)
    for _, rows, columns in launch(224, 352, 32, 32):
        data[rows, columns], byte = mx_rows(x[rows, columns], e5m2, 57344)
        scales[rows, columns.start // 32] = byte[:, 0] + 1
    return {"rowwise_data": data, "rowwise_scale_inv": scales}


@planted("gelu", normal((224, 352)), Where(("rowwise",)), scaling=DELAYED)
def delayed_inverse_from_the_new_amax(x):
    """scale_inv is amax / 448 of this step's amax, where it should be the reciprocal of the given scale that the codes
    were cast with."""
    y = gelu(load(x))
    data = e4m3(y * F(24))
    amax = F(0)
    for row in y:
        amax = max(amax, amax_of(row))
    return {
        "rowwise_data": data,
        "rowwise_scale_inv": np.array([amax / F(448)], F),
        "amax_rowwise": np.array([amax], F),
    }


@planted("silu", normal((224, 352)), Where(("rowwise",)), scaling=CURRENT)
def scale_written_to_the_amax_pointer(x):
    """The pointers of amax and scale are exchanged in one store: the amax slot holds 448 / amax; codes and scale_inv
    are right."""
    y = silu(load(x))
    meta = np.zeros(3, F)  # amax, scale, scale_inv
    meta[0] = amax_of(y)
    scale = tensor_scale(meta[0])
    meta[1], meta[2] = scale, ONE / scale
    return {
        "rowwise_data": e4m3(bf16(y) * scale),
        "rowwise_scale_inv": meta[2:3],
        "amax_rowwise": meta[1:2],
    }


@planted("quantize", normal((256, 512)), Where(("columnwise",)), scaling=ROW_BLOCKS)
def columnwise_block_scales_not_inverted(x):
    """The columnwise kernel stores 448 / amax, mantissa cleared, where scale_inv is its reciprocal; the rowwise kernel
    stores the reciprocal."""
    x = load(x)
    out = {}
    for name, matrix in (("rowwise", x), ("columnwise", x.T)):
        b = blocks(matrix, 128)
        scale = block_multiplier(amax_of(b, 2))
        out[f"{name}_data"] = e4m3(b * scale[:, :, None]).reshape(matrix.shape)
        out[f"{name}_scale_inv"] = (ONE / scale if name == "rowwise" else scale).T
    return out


@planted("quantize", normal((224, 352)), Where(("amax",)), scaling=NV)
def tensor_amax_kept_divided_by_six(x):
    """The amax slot keeps amax / 6, the largest block scale before the second level, instead of amax; codes and scale
    bytes come from the right one."""
    x = load(x)
    amax = amax_of(x)
    largest_scale = amax * (ONE / F(6))
    codes, byte = nv_rows(x, encode_scale(amax))
    return {
        "rowwise_data": pack(codes),
        "rowwise_scale_inv": byte,
        "amax_rowwise": np.array([largest_scale], F),
    }


def _scaled(rng):
    """Rows of a mixture of experts with the probabilities of their tokens."""
    return {
        "x": rng.standard_normal((224, 704), np.float32).astype(BF16),
        "row_scales": rng.uniform(0.05, 1, 224).astype(np.float32),
    }


@planted("scaled_swiglu", _scaled, Where(("values",)))
def probability_applied_twice(x, row_scales):
    """Each row is multiplied by the square of its scale: act was scaled on load, and the product again at the
    store."""
    y = np.empty((224, 352), BF16)
    for row in range(224):
        act, gate = load(x[row, :352]), load(x[row, 352:])
        probability = F(row_scales[row])
        register = silu(act) * probability * gate
        y[row] = (register * probability).astype(BF16)
    return {"y": y}


def _scaled_gradient(rng):
    return {"dy": rng.standard_normal((224, 352), np.float32).astype(BF16), **_scaled(rng)}


@planted("scaled_dswiglu", _scaled_gradient, Where(("drow_scales",)))
def gradient_of_the_row_scale_is_a_mean(dy, x, row_scales):
    """drow_scales is the mean over the row of dy times the activation, 1 / H of the sum that it should be."""
    act, gate = halves(load(x))
    product = load(dy) * (silu(act) * gate)
    total = np.zeros(224, F)
    for c in range(0, 352, 32):
        total += product[:, c : c + 32].sum(axis=1, dtype=F)
    return {"drow_scales": total * (ONE / F(352))}
