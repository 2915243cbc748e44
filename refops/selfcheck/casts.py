"""Casts: `encode` and `decode` of every format, checked against a search of the grid in float64 and ml_dtypes."""

from functools import partial

import ml_dtypes
import numpy as np

from refops.arguments import BFLOAT16
from refops.formats import FORMATS, encode_by_definition
from refops.rounding import ROUNDING_MODES
from refops.selfcheck.tally import Task

#: The same formats as ml_dtypes implements them.
ML_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
}


def cast_tasks(ops):
    """Return the tasks of every format."""
    tasks = []
    for fmt in FORMATS.values():
        task = partial(Task, "casts", repr(fmt))
        tasks += [
            task("encode: search of the grid in float64, five roundings", partial(_check_encode, ops, fmt)),
            task("decode: ml_dtypes", partial(_check_decode, ops, fmt)),
        ]
        if fmt.signed:  # ml_dtypes rounds E8M0 to nearest and has no zero rule for it
            tasks.append(task("encode: ml_dtypes' cast of the clipped value", partial(_check_ml_dtypes, ops, fmt)))
        if fmt.has_subnormals:
            tasks.append(
                task(
                    "stochastic rounding: share of the 256 random bytes that round up",
                    partial(_check_stochastic, ops, fmt),
                )
            )
    return tasks


def _cast_inputs(fmt):
    """Yield (dtype name, array): every float16 and bfloat16; float32 grid, midpoints, neighbours and random bits."""
    patterns = np.arange(65536, dtype=np.uint16)
    yield "float16", patterns.view(np.float16)
    yield "bfloat16", patterns.view(BFLOAT16)
    points = np.concatenate([fmt.grid, (fmt.grid[1:] + fmt.grid[:-1]) / 2, fmt.grid[-1] * np.array([1.01, 1.1, 2])])
    points = points.astype(np.float32)
    near = np.concatenate([points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(0))])
    random_bits = np.random.default_rng(1).integers(0, 1 << 32, 1 << 16, dtype=np.uint32).view(np.float32)
    yield "float32", np.concatenate([near, -near, random_bits])


def _check_encode(ops, fmt, tally):
    for dtype, x in _cast_inputs(fmt):
        modes = ROUNDING_MODES if dtype == "float32" else ("nearest_even",)
        for rounding in modes:
            for saturate in (True, False):
                got = ops.encode(x, fmt, rounding=rounding, saturate=saturate)
                expected = encode_by_definition(x.astype(np.float64), fmt, saturate, rounding)
                tally.equal(f"{dtype} {rounding} saturate={saturate} ", got, expected)


def _check_decode(ops, fmt, tally):
    codes = np.arange(1 << fmt.bits, dtype=np.uint8)
    tally.equal("decode", ops.decode(codes, fmt), codes.view(ML_DTYPES[fmt.name]).astype(np.float32))


def _check_ml_dtypes(ops, fmt, tally):
    for dtype, x in _cast_inputs(fmt):
        x = x[~np.isnan(x)]
        clipped = np.clip(x.astype(np.float32), -fmt.max, fmt.max)
        tally.equal(f"{dtype} ", ops.encode(x, fmt), clipped.astype(ML_DTYPES[fmt.name]).view(np.uint8))


def _check_stochastic(ops, fmt, tally):
    """Over all 256 random bytes a value goes to its neighbours only, up in proportion to where it lies between them."""
    grid = fmt.grid.astype(np.float32)
    below, above = grid[:-1, None], grid[1:, None]
    sixteenths = (np.arange(16) / 16).astype(np.float32)
    x = np.repeat((below + (above - below) * sixteenths).reshape(-1, 1), 256, axis=1)
    bits = np.tile(np.arange(256, dtype=np.uint8), (len(x), 1))
    values = ops.decode(ops.encode(x, fmt, rounding="stochastic", random_bits=bits), fmt)
    low, high = np.repeat(below, 16), np.repeat(above, 16)
    tally.holds("neighbours", (values == low[:, None]) | (values == high[:, None]))
    expected = np.tile(np.arange(16) * 16, len(grid) - 1)
    tally.equal("rounded up", np.count_nonzero(values == high[:, None], axis=1), expected)
