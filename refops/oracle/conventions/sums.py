"""Conventions of the bias gradient: what is summed, how precisely, and which rows are forgotten."""

import numpy as np

from refops.arguments import BFLOAT16
from refops.oracle.conventions.registry import computing
from refops.oracle.geometry import Geometry, Region
from refops.oracle.places import Lines
from refops.quantization.layout import ceil_div
from refops.tiles import SUM_CHUNK

F = np.float32
#: Elements of a tensor up to which sums along the other axis are tried.
SUMMED_WHOLE = 1 << 20


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
    choices=[
        (dtype, order)
        for dtype in ("own", "bfloat16", "float16")
        for order in ("rows", (128, "low"), "tree", *((size, "float32") for size in (128, 32, 64, 256, 16)))
    ],
)
def dbias_low_precision(replay, choice):
    require_dbias(replay)
    name, order = choice
    dtype = {"own": replay.dtype, "bfloat16": BFLOAT16, "float16": np.dtype(np.float16)}[name]
    replay.require(dtype != F and (name == "own" or dtype != replay.dtype))
    size, precision = (SUM_CHUNK, order) if isinstance(order, str) else order
    replay.require(precision != "float32" or size < replay.shape[0])
    replay.facts["dtype"] = dtype
    replay.facts["order"] = {
        "rows": "row after row",
        "low": f"in chunks of {size} rows that are added up",
        "tree": "as a tree",
        "float32": f"the chunks of {size} rows in float32, their sums in low precision",
    }[precision]

    def column_sum(terms):
        rounded = terms.astype(dtype).astype(F)
        if order == "rows":
            return _add_rounded(rounded, dtype)
        if order == "tree":
            return _add_as_tree(rounded, dtype)
        starts = range(0, len(terms), size)
        if precision == "low":
            parts = [_add_rounded(rounded[start : start + size], dtype) for start in starts]
        else:
            parts = [terms[start : start + size].sum(axis=0, dtype=F).astype(dtype).astype(F) for start in starts]
        return _add_rounded(np.array(parts, F).reshape(-1, terms.shape[1]), dtype)

    replay.column_sum = column_sum


def _add_as_tree(terms, dtype):
    """Sum along axis 0 by neighbours, every partial sum rounded."""
    while len(terms) > 1:
        odd = terms[len(terms) // 2 * 2 :]
        half = (terms[0 : len(terms) // 2 * 2 : 2] + terms[1::2]).astype(dtype).astype(F)
        terms = np.concatenate([half, odd])
    return terms[0] if len(terms) else np.zeros(terms.shape[1], F)


@computing(
    "dbias-last-chunk-missing",
    "dbias leaves out {what}.",
    stage="sum-rows",
    choices=(
        *(f"tail {size}" for size in (128, 64, 32, 16, 8)),
        "last row",
        "first row",
        *(f"last {size}" for size in (128, 64, 32, 16, 8)),
    ),
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
    replay.rows = Lines(m, last, m - 1) if first == 0 else Lines(m, 0, first - 1)
    replay.after("sum_terms", lambda terms: terms[first:last])


@computing(
    "dbias-along-other-axis",
    "dbias sums over columns: its entry n is the sum of row n of the gradient, not of column n.",
    stage="sum-rows",
    alone=True,
)
def dbias_along_other_axis(replay):
    require_dbias(replay)
    m, k = replay.shape
    replay.require(m >= k and m * k <= SUMMED_WHOLE)

    def dbias(columns):
        with np.errstate(all="ignore"):
            rows = replay.sum_terms(slice(0, k))[columns]
            return replay.to_dtype(replay.column_sum(np.ascontiguousarray(rows.T)), replay.dtype)

    replay.dbias = dbias


# --- parts that count twice, not at all, or alone -------------------------------------------------

#: Columns of dbias that a search for the part at fault looks at.
SEARCHED_COLUMNS = 64


def _parts_of_rows(m):
    """(words, index of each row's part): runs of rows, as tiles and shards have them, and rows by turns."""
    row = np.arange(m)
    runs = [size for size in (16, 32, 64, 128, 256, 512, 1024) if size < m]
    runs += [size for shards in (2, 4, 8) if (size := ceil_div(m, shards)) not in runs and size < m]
    parts = [(("run", size), row // size) for size in runs]
    parts += [(("turn", period), row % period) for period in (2, 4, 8, 16, 32) if period < m]
    return parts + [(("half", period), row % period // (period // 2)) for period in (4, 8, 16, 32, 64) if period < m]


def _rows_of_part(part, number, m):
    """The `Lines` of part `number`."""
    kind, size = part
    if kind == "turn":
        return Lines(m, 0, m - 1, size, (number, number))
    if kind == "half":
        return Lines(m, 0, m - 1, size, (number * size // 2, (number + 1) * size // 2 - 1))
    return Lines(m, number * size, min((number + 1) * size, m) - 1)


def _sums_of_parts(replay, columns):
    """(part, sums (parts, C)) of the terms of some columns."""
    terms = replay.setting.replay().sum_terms(columns).astype(np.float64)
    found = []
    for part, index in _parts_of_rows(len(terms)):
        sums = np.zeros((index.max() + 1, terms.shape[1]))
        np.add.at(sums, index, terms)
        found.append((part, sums))
    return found


def _part_at_fault(replay):
    """Effect -> (part, number) that gives the dump's sums best: a part that counts "twice", is "missing" or "alone".

    Kept for the conventions of one diagnosis; None where the dump's dbias is right.
    """
    setting = replay.setting
    if "part of dbias" not in setting.cache:
        setting.cache["part of dbias"] = _search_part(replay)
    return setting.cache["part of dbias"]


def _search_part(replay):
    setting = replay.setting
    got, right = (a["dbias"].reshape(-1).astype(np.float64) for a in (setting.outputs, setting.reference))
    off = np.abs(got - right)
    off[~np.isfinite(off)] = 0
    if not off.any() or replay.shape[0] < 2:
        return None
    width = min(SEARCHED_COLUMNS, len(off))
    start = int(np.argmax(np.convolve(off, np.ones(width), "valid")))
    columns = slice(start, start + width)
    setting.spend(replay.shape[0] * width)
    sought = {"twice": got[columns] - right[columns], "missing": right[columns] - got[columns], "alone": got[columns]}
    best = {}
    for part, sums in _sums_of_parts(replay, columns):
        for effect, wanted in sought.items():
            misses = np.abs(sums - wanted).sum(axis=1)
            number = int(np.argmin(misses))
            best.setdefault(effect, []).append((float(misses[number]), part, number))
    return {effect: min(found, key=lambda one: one[0])[1:] for effect, found in best.items()}


@computing(
    "dbias-part",
    "The bias gradient, dbias, {effect} {rows}.",
    stage="sum-rows",
    choices=("twice", "missing", "alone"),
    last=True,
)
def dbias_part(replay, choice):
    require_dbias(replay)
    found = _part_at_fault(replay)
    replay.require(found is not None)
    part, number = found[choice]
    rows = _rows_of_part(part, number, replay.shape[0])
    of_part, replay.facts["rows"] = rows.mask(), rows.words("row")
    replay.require(of_part.any() and not of_part.all())
    replay.rows = None if choice == "alone" else rows
    replay.facts["effect"] = {
        "twice": "has a part in it twice:",
        "missing": "leaves out",
        "alone": "is stored where it should be added: it holds one part alone,",
    }[choice]
    if choice == "twice":
        replay.after("sum_terms", lambda terms: np.concatenate([terms, terms[of_part]]))
    else:
        replay.after("sum_terms", lambda terms: terms[of_part == (choice == "alone")])
