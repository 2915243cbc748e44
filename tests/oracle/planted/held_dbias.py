"""Bias gradients: chunks counted twice or dropped, stores instead of sums, other terms."""

import numpy as np

from .held_common import (
    BF16,
    CURRENT,
    DELAYED,
    MX,
    ONE,
    F,
    amax_of,
    bf16,
    dgelu,
    dqgelu,
    dsilu,
    e4m3,
    e4m3_value,
    gradients,
    halves,
    launch,
    load,
    mx_rows,
    silu,
    tensor_scale,
)
from .registry import Where, normal, planted


@planted("dgelu", gradients((224, 352)), Where(("dbias",), rows=(0, 31)), scaling=MX)
def first_row_chunk_added_twice(dy, x):
    """The bias gradient's accumulator starts with the sum of rows 0 to 31 and the loop adds that chunk again; dx is
    right."""
    total, codes, scales = None, np.empty(x.shape, np.uint8), np.empty((224, 11), np.uint8)
    for start in range(0, 224, 32):
        rows = slice(start, start + 32)
        gradient = dgelu(load(x[rows])) * load(dy[rows])
        part = gradient.sum(axis=0, dtype=F)
        if total is None:
            total = part.copy()
        total += part
        codes[rows], scales[rows] = mx_rows(bf16(gradient))
    return {"rowwise_data": codes, "rowwise_scale_inv": scales, "dbias": total.astype(BF16)}


@planted("dsilu", gradients((224, 352)), Where(("dbias",), rows=(192, 223)))
def second_pass_drops_the_partial_chunk(dy, x):
    """The kernel that adds the partial sums of 64 rows each runs over M // 64 of them: the last 32 rows, 192 to 223,
    are missing in dbias."""
    dx = np.empty(x.shape, BF16)
    workspace = np.zeros((4, 352), F)
    for i, (_, rows, columns) in enumerate(launch(224, 352, 64, 352)):
        dx[rows] = (dsilu(load(x[rows, columns])) * load(dy[rows, columns])).astype(BF16)
        workspace[i] = load(dx[rows]).sum(axis=0, dtype=F)
    dbias = np.zeros(352, F)
    for i in range(224 // 64):
        dbias += workspace[i]
    return {"dx": dx, "dbias": dbias.astype(BF16)}


@planted("drelu", gradients((256, 512)), Where(("dbias",)))
def warps_store_their_sums_over_each_other(dy, x):
    """Each of eight warps sums its 32 rows and stores the sum to the same shared line instead of adding it: dbias is
    the last warp's sum, of rows 224 to 255."""
    dx = np.empty(x.shape, BF16)
    shared = np.zeros(512, F)
    for warp in range(8):
        rows = slice(32 * warp, 32 * warp + 32)
        dx[rows] = np.where(x[rows] > 0, dy[rows], BF16.type(0))
        register = np.zeros(512, F)
        for row in range(rows.start, rows.stop):
            register += load(dx[row])
        shared[:] = register
    return {"dx": dx, "dbias": shared.astype(BF16)}


@planted("quantize", normal((224, 352)), Where(("dbias",)), scaling=CURRENT)
def bias_gradient_accumulated_in_bfloat16(x):
    """The column sums are kept in a bfloat16 accumulator, rounded after each row, instead of float32."""
    amax = amax_of(load(x))
    scale = tensor_scale(amax)
    accumulator = np.zeros(352, BF16)
    data = np.empty(x.shape, np.uint8)
    for row in range(224):
        accumulator = (load(accumulator) + load(x[row])).astype(BF16)
        data[row] = e4m3(load(x[row]) * scale)
    return {
        "rowwise_data": data,
        "rowwise_scale_inv": np.array([ONE / scale], F),
        "amax_rowwise": np.array([amax], F),
        "dbias": accumulator,
    }


@planted("dqgelu", gradients((224, 352)), Where(("dbias",)), scaling=MX)
def bias_gradient_sums_the_incoming_gradient(dy, x):
    """dbias is the column sum of dy, not of dy times the activation's derivative."""
    dbias, data, scales = np.zeros(352, F), np.empty(x.shape, np.uint8), np.empty((224, 11), np.uint8)
    for _, rows, columns in launch(224, 352, 32, 352):
        incoming = load(dy[rows, columns])
        data[rows], scales[rows] = mx_rows(bf16(dqgelu(load(x[rows, columns])) * incoming))
        dbias += incoming.sum(axis=0, dtype=F)
    return {"rowwise_data": data, "rowwise_scale_inv": scales, "dbias": dbias.astype(BF16)}


@planted("dsilu", gradients((256, 512)), Where(("dbias",)), scaling=MX)
def bias_gradient_of_what_was_quantized(dy, x):
    """dbias sums the dequantized codes of the tile in shared memory, where the float32 gradient before any cast
    should be summed."""
    dbias, data, scales = np.zeros(512, F), np.empty(x.shape, np.uint8), np.empty((256, 16), np.uint8)
    for _, rows, columns in launch(256, 512, 64, 128):
        codes, byte = mx_rows(bf16(dsilu(load(x[rows, columns])) * load(dy[rows, columns])))
        data[rows, columns], scales[rows, columns.start // 32 : columns.stop // 32] = codes, byte
        factor = np.repeat(np.ldexp(ONE, byte.astype(np.int32) - 127), 32, axis=1)
        dbias[columns] += (e4m3_value(codes) * factor).sum(axis=0, dtype=F)
    return {"rowwise_data": data, "rowwise_scale_inv": scales, "dbias": dbias.astype(BF16)}


@planted("dswiglu", gradients((224, 192), gated=True), Where(("dbias",), columns=(192, 383)), scaling=MX)
def gate_half_of_the_bias_gradient_repeats_act(dy, x):
    """The second half of dbias, which belongs to the gate, holds the sums of d_act again: both halves are reduced
    from the same registers."""
    act, gate = halves(load(x))
    incoming = load(dy)
    d_act, d_gate = (dsilu(act) * incoming) * gate, incoming * silu(act)
    data, scales = mx_rows(bf16(np.concatenate([d_act, d_gate], axis=1)))
    dbias = np.empty(384, F)
    for half in range(2):
        registers = np.zeros(192, F)
        for row in range(224):
            registers += d_act[row]
        dbias[192 * half : 192 * half + 192] = registers
    return {"rowwise_data": data, "rowwise_scale_inv": scales, "dbias": dbias.astype(BF16)}


@planted("dgelu", gradients((224, 352)), Where(("dbias",)), scaling=DELAYED)
def bias_gradient_divided_by_the_rows(dy, x):
    """dbias is the mean over the 224 rows, 1 / M of the sum that it should be."""
    gradient = dgelu(load(x)) * load(dy)
    total = np.zeros(352, F)
    for start in range(0, 224, 16):
        total += gradient[start : start + 16].sum(axis=0, dtype=F)
    return {
        "rowwise_data": e4m3(gradient * F(24)),
        "rowwise_scale_inv": np.array([ONE / F(24)], F),
        "amax_rowwise": np.array([amax_of(gradient)], F),
        "dbias": (total * (ONE / F(len(x)))).astype(BF16),
    }
