"""Conventions of the bias gradient: what is summed, how precisely, and which rows are forgotten."""

import numpy as np

from refops.arguments import BFLOAT16
from refops.oracle.conventions.registry import computing
from refops.oracle.geometry import Geometry, Region
from refops.tiles import SUM_CHUNK

F = np.float32


def require_dbias(replay):
    """NotApplicable unless the operation can write a bias gradient and the dump has it."""
    replay.require(replay.computes and "dbias" in replay.setting.outputs)


@computing(
    "dbias-rounded",
    "dbias sums the gradient as rounded to {dtype}, where TE's fused kernel sums float32 values.",
    stage="sum",
)
def dbias_rounded(replay):
    require_dbias(replay)
    replay.require(not replay.dbias_rounded and replay.dtype != F)
    replay.facts["dtype"] = replay.dtype
    replay.dbias_rounded = True


@computing(
    "dbias-unrounded",
    "dbias sums float32 values, where TE sums the gradient as rounded to {dtype} on this path.",
    stage="sum",
)
def dbias_unrounded(replay):
    require_dbias(replay)
    replay.require(replay.dbias_rounded and replay.kind != "quantize")
    replay.facts["dtype"] = replay.dtype if replay.scaling is not None else replay.out_dtype
    replay.dbias_rounded = False


@computing("dbias-of-dy", "dbias sums dy, the gradient before the activation's derivative.", stage="sum")
def dbias_of_dy(replay):
    require_dbias(replay)
    replay.require(replay.gradient and not replay.gated)
    replay.sum_terms = lambda columns: replay.load_upstream(slice(0, replay.shape[0]), columns)


@computing(
    "dbias-of-quantized",
    "dbias sums the values that the written codes stand for, where TE sums them before the cast.",
    stage="sum",
)
def dbias_of_quantized(replay):
    require_dbias(replay)
    replay.require(replay.scaling is not None and not replay.layout.two_level)
    geometry = Geometry.of(replay.case.scaling, "rowwise")
    replay.require(geometry.block is None or geometry.block[0] == 1)

    def terms(columns):
        outputs = replay.setting.outputs
        replay.require("rowwise_data" in outputs and "rowwise_scale_inv" in outputs)
        edge = 1 if geometry.block is None else geometry.block[1]  # regions begin with a block
        first = columns.start // edge * edge
        region = Region(slice(0, replay.shape[0]), slice(first, columns.stop))
        codes = geometry.codes(outputs["rowwise_data"], replay.shape, region.rows, region.columns)
        scales = geometry.scales(outputs["rowwise_scale_inv"], region.rows, region.columns)
        scales = replay.rule.decode_factor(scales, None)
        values = replay.fmt.values.take(codes, mode="clip") * geometry.expand(scales, region.shape)
        return values[:, columns.start - first :]

    replay.sum_terms = terms


def _add_rounded(terms, dtype):
    """Sum along axis 0, one after the other, every partial sum rounded."""
    total = np.zeros(terms.shape[1:], F)
    for term in terms:
        total = (total + term).astype(dtype).astype(F)
    return total


@computing(
    "dbias-low-precision",
    "dbias is accumulated in {dtype}, {order}, where TE accumulates in float32.",
    stage="sum-order",
    choices=[(d, o) for d in ("own", "bfloat16", "float16") for o in ("rows", "chunks", "tree", "pairs of chunks")],
)
def dbias_low_precision(replay, choice):
    require_dbias(replay)
    name, order = choice
    dtype = {"own": replay.dtype, "bfloat16": BFLOAT16, "float16": np.dtype(np.float16)}[name]
    replay.require(dtype != F and (name == "own" or dtype != replay.dtype))
    replay.facts["dtype"] = dtype
    replay.facts["order"] = {
        "rows": "row after row",
        "chunks": "in chunks of 128 rows that are added up",
        "tree": "as a tree",
        "pairs of chunks": "the chunks of 128 rows in float32, their sums in low precision",
    }[order]

    def column_sum(terms):
        rounded = terms.astype(dtype).astype(F)
        if order == "rows":
            return _add_rounded(rounded, dtype)
        if order == "tree":
            while len(rounded) > 1:
                odd = rounded[len(rounded) // 2 * 2 :]
                half = (rounded[0 : len(rounded) // 2 * 2 : 2] + rounded[1::2]).astype(dtype).astype(F)
                rounded = np.concatenate([half, odd])
            return rounded[0] if len(rounded) else np.zeros(terms.shape[1], F)
        starts = range(0, len(terms), SUM_CHUNK)
        if order == "chunks":
            parts = [_add_rounded(rounded[start : start + SUM_CHUNK], dtype) for start in starts]
        else:
            parts = [terms[start : start + SUM_CHUNK].sum(axis=0, dtype=F).astype(dtype).astype(F) for start in starts]
        return _add_rounded(np.array(parts, F).reshape(-1, terms.shape[1]), dtype)

    replay.column_sum = column_sum


@computing(
    "dbias-last-chunk-missing",
    "dbias leaves out {what}.",
    stage="sum-rows",
    choices=("tail 128", "tail 64", "tail 32", "tail 16", "last row", "first row", "last 128", "last 64", "last 32"),
)
def dbias_last_chunk_missing(replay, choice):
    require_dbias(replay)
    m = replay.shape[0]
    kind, _, size = choice.partition(" ")
    if size == "row":
        first, last = (0, m - 1) if kind == "last" else (1, m)
        replay.facts["what"] = f"the {kind} row"
    elif kind == "tail":
        first, last = 0, m // int(size) * int(size)
        replay.facts["what"] = f"the rows beyond the last multiple of {size}"
    else:
        first, last = 0, max(m - 1, 0) // int(size) * int(size)
        replay.require(m % int(size) == 0)
        replay.facts["what"] = f"the last {size} rows"
    replay.require((first, last) != (0, m) and first < last)
    replay.after("sum_terms", lambda terms: terms[first:last])
