"""Helpers: what the operations are built from and what goes with them, each checked against its rule written out."""

from dataclasses import replace
from functools import partial

import numpy as np

from refops.formats import E4M3, E5M2, E8M0
from refops.rounding import philox, philox_bytes
from refops.scaling import BlockScaling, MXFP8Scaling, NVFP4Scaling
from refops.selfcheck.inputs import DTYPES, clip_to_finite, in_every_dtype, synthetic_tensors
from refops.selfcheck.settings import CHECKED
from refops.selfcheck.tally import Task, U
from refops.survey import as_matrix, decode_scale_source, element_codes


def helper_tasks(ops):
    """Return the tasks of the functions beside the operations."""
    task = partial(Task, "helpers")
    return [
        task("hadamard_transform", "float64 product with the matrix", partial(_check_hadamard, ops)),
        task("hadamard_transform", "its inverse", partial(_check_hadamard_inverse, ops)),
        task("swizzle, unswizzle", "index formula of the GEMM layout", partial(_check_swizzle, ops)),
        task("pack_fp4, unpack_fp4", "nibble by nibble", partial(_check_packing, ops)),
        task("update_delayed_scale", "the rule, entry by entry", partial(_check_delayed_update, ops)),
        task("block_scales_as_mxfp8", "the float32 scales", partial(_check_block_scales, ops)),
        task("quantize with dbias", "float64 sum", partial(_check_quantize_dbias, ops)),
        task("philox", "known answers of cuRAND's Philox 4x32-10", _check_philox),
        task("stochastic rounding", "the same Philox bytes handed in", partial(_check_philox_bits, ops)),
    ]


def _check_hadamard(ops, tally):
    for label, x in in_every_dtype({"gaussian": synthetic_tensors()["gaussian"]}):
        for sign_mask in (0xD7E8, 0, 0x1234):
            matrix = _hadamard_matrix(sign_mask)
            groups = x.astype(np.float64).reshape(-1, 16)
            truth, size = (groups @ matrix).reshape(x.shape), (np.abs(groups) @ np.abs(matrix)).reshape(x.shape)
            tally.close(label, ops.hadamard_transform(x, sign_mask), truth, 2.0**-48 * size)


def _hadamard_matrix(sign_mask):
    """diag(signs) @ H / 4: bit i of the mask negates row i; an entry of H is the parity of the indices' common bits."""
    index = range(16)
    parity = np.array([[bin(i & j).count("1") % 2 for j in index] for i in index])
    signs = np.array([-1.0 if sign_mask >> i & 1 else 1.0 for i in index])
    return signs[:, None] * np.where(parity, -0.25, 0.25)


def _check_hadamard_inverse(ops, tally):
    x = synthetic_tensors()["gaussian"]
    back = ops.hadamard_transform(ops.hadamard_transform(x), inverse=True)
    # Sixteen outputs, each rounded by at most U of at most the group's norm, meet again in every element.
    norm = np.sqrt((x.astype(np.float64) ** 2).reshape(-1, 16).sum(axis=1)).repeat(16).reshape(x.shape)
    tally.close("inverse", back, x.astype(np.float64), 4 * U * norm)


def _check_swizzle(ops, tally):
    rows, columns = 256, 12
    scales = np.random.default_rng(5).integers(0, 256, (rows, columns), dtype=np.uint8)
    expected = np.zeros(rows * columns, np.uint8)
    for i in range(rows):
        for j in range(columns):
            tile = (i // 128) * (columns // 4) + j // 4
            expected[tile * 512 + (i % 32) * 16 + (i % 128) // 32 * 4 + j % 4] = scales[i, j]
    swizzled = ops.swizzle(scales)
    tally.equal("swizzle", swizzled.ravel(), expected)
    tally.equal("unswizzle", ops.unswizzle(swizzled), scales)
    x = synthetic_tensors()["wide"]
    for named in CHECKED.values():
        if isinstance(named.scaling, MXFP8Scaling | NVFP4Scaling):
            q = ops.quantize(x, named.scaling, columnwise=True)
            tally.quantized(f"{named.name} swizzled and back", q.swizzled().unswizzled(), q)
            tally.equal(f"{named.name} values", ops.dequantize(q.swizzled()), ops.dequantize(q))


def _check_packing(ops, tally):
    codes = np.random.default_rng(6).integers(0, 16, (8, 32), dtype=np.uint8)
    packed = codes[:, ::2] + 16 * codes[:, 1::2]  # the earlier element in the low nibble
    tally.equal("pack_fp4", ops.pack_fp4(codes), packed)
    tally.equal("unpack_fp4", ops.unpack_fp4(packed), codes)


def _check_delayed_update(ops, tally):
    rng = np.random.default_rng(8)
    for fmt in (E4M3, E5M2):
        for length in (1, 2, 5):
            for algorithm in ("max", "most_recent"):
                history = rng.exponential(3, (length, 40)).astype(np.float32)
                history[:, :4] = [[0, np.inf, 1e-37, 0]] * length
                history[0, 4:8] = 0
                scale = rng.exponential(50, 40).astype(np.float32)
                new_history, new_scale = ops.update_delayed_scale(history, scale, fmt, algorithm=algorithm)
                for column in range(40):
                    before = list(history[:, column])
                    after, expected = _delayed_rule(before, scale[column], fmt, algorithm)
                    tally.equal(f"history {column} ", new_history[:, column], np.array(after, np.float32))
                    # In float64; one float32 division away.
                    tally.holds(f"scale {column} ", np.abs(new_scale[column : column + 1] / expected - 1) <= 2 * U)


def _delayed_rule(before, scale, fmt, algorithm):
    """(history, float64 scale) of one column: roll, clear row 0, max / amax; as it was where the newest amax is 0."""
    if before[0] == 0:
        return before, float(scale)
    after = [0, *before[2:], before[0]][: len(before)]
    amax = float(max(before)) if algorithm == "max" else float(before[0])
    if not np.isfinite(amax):
        return after, float(scale)
    return after, min(float(fmt.max) / amax, float(np.finfo(np.float32).max))


def _check_block_scales(ops, tally):
    x = synthetic_tensors()["wide"]
    for block_dim in (1, 2):
        q = ops.quantize(x, BlockScaling(E4M3, block_dim), columnwise=True)
        for columnwise, scales in zip((False, True), ops.block_scales_as_mxfp8(q), strict=True):
            # decode_scale_source reads the rowwise copy where there is one.
            decode = as_matrix(decode_scale_source(replace(q, rowwise_data=None) if columnwise else q))
            decode = decode.T if columnwise else decode
            outer, inner = decode.shape
            bytes_of_blocks = ops.unswizzle(scales)[:outer, : -(-inner // 32)]
            values = np.repeat(ops.decode(bytes_of_blocks, E8M0), 32, axis=1)[:, :inner]
            tally.equal(f"block_dim={block_dim} columnwise={columnwise} ", values, np.ascontiguousarray(decode))


def _check_quantize_dbias(ops, tally):
    for dtype in DTYPES:
        x = clip_to_finite(synthetic_tensors()["wide"], dtype)
        for named in CHECKED.values():
            _, dbias = ops.quantize(x, named.scaling, dbias=True)
            terms = x.astype(np.float64)
            permitted = len(terms) * U * np.abs(terms).sum(axis=0)
            tally.close(f"{named.name} {dtype.name}", dbias, terms.sum(axis=0), permitted)


def _check_philox(tally):
    known = {
        (0, 0, 0): [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
        (1234, 7, 5): [0x78352B63, 0x8FB42772, 0x2160D7EA, 0x7F6082EA],
    }
    for (seed, offset, subsequence), words in known.items():
        tally.equal(f"seed {seed}", philox(seed, offset, [subsequence])[0], np.array(words, np.uint32))


def _check_philox_bits(ops, tally):
    x = synthetic_tensors()["wide"]
    m, k = x.shape
    scaling = NVFP4Scaling(stochastic_rounding=True, seed=99, offset=5)
    numbers = np.arange(2 * m * k // 16)
    row_bits, column_bits = philox_bytes(scaling.seed, scaling.offset, numbers).reshape(2, m * k)
    given = replace(scaling, random_bits=(row_bits.reshape(m, k), column_bits.reshape(k, m)))
    tally.quantized("Philox", ops.quantize(x, scaling, columnwise=True), ops.quantize(x, given, columnwise=True))
    halves = np.full((64, 16), 0.25, np.float32)
    halves[:, 0] = 6  # the scale is 1: every other element lies halfway between 0 and 0.5
    codes = element_codes(ops.quantize(halves, scaling))[:, 1:]
    tally.holds("halves go to a neighbour", codes <= 1)  # 0 is the code of 0, 1 that of 0.5
    tally.holds("halves go both ways", np.unique(codes).size == 2)
