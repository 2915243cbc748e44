"""Conventions of what a kernel reads: the right arithmetic on a neighbour of the right element."""

import numpy as np

from refops.oracle.conventions.registry import computing
from refops.oracle.geometry import as_slice

#: Elements by which a read is off: a neighbour, a vector of two to sixteen, a block, a tile; fewer of half an input.
OFFSETS = (1, -1, 2, -2, 4, -4, 8, -8, 16, -16, 32, -32, 64, -64, 128, -128)
OFFSETS_OF_HALF = (1, -1, 2, -2, 32, -32)
#: From so many elements on, what is read outside the tensor is a buffer of zeros; nearer it is the line at the edge.
BUFFER = 16


def _shifts(replay):
    """(input, half, rows, columns) to try: one input, or a half of a gated one, off by some rows or columns."""
    replay.require(replay.computes)
    read = [("x", "", OFFSETS)] + [("x", half, OFFSETS_OF_HALF) for half in ("act", "gate") if replay.gated]
    read += [("dy", "", OFFSETS)] if "dy" in replay.setting.matrices else []
    found = [(name, half, *shift) for name, half, offsets in read for by in offsets for shift in ((0, by), (by, 0))]
    return found + ([("row_scales", "", by, 0) for by in OFFSETS] if replay.scaled else [])


@computing(
    "input-shifted",
    "{what} is read {by} away from where it belongs: {line} n gets what {line} n {sign} {number} should get{outside}.",
    stage="input",
    choices=_shifts,
)
def input_shifted(replay, choice):
    name, half, rows_off, columns_off = choice
    by, line = (rows_off, "row") if rows_off else (columns_off, "column")
    facts = replay.facts
    facts["what"], facts["line"] = " of ".join(filter(None, (half, name))), line
    facts["by"] = f"{abs(by)} {line}{'s' * (abs(by) > 1)}"
    facts["sign"], facts["number"] = ("+" if by > 0 else "-"), abs(by)
    facts["outside"] = ", zeros at the edge" if abs(by) >= BUFFER and name != "row_scales" else ""
    if name == "row_scales":
        replay.require(abs(by) < replay.case.inputs["row_scales"].size)
        _shift_row_scales(replay, rows_off)
        return
    m, k = replay.setting.matrices[name].shape
    replay.require(abs(rows_off) < m and abs(columns_off) < k)

    def load(inner, asked, rows, columns):
        if asked != name or (half and half != _half_of(replay, columns)):
            return inner(asked, rows, columns)
        row = np.arange(rows.start, rows.stop) + rows_off
        column = np.arange(k)[columns] + columns_off
        return _read(lambda *at: inner(asked, *at), row, column, (m, k), abs(by) >= BUFFER)

    replay.wrap("load", load)


def _half_of(replay, columns):
    """Which half of a gated input some of its columns belong to."""
    index = np.arange(replay.setting.matrices["x"].shape[1])[columns]
    if not index.size:
        return ""
    is_gate, _ = replay.x_layout.locate(index[:1])
    return "gate" if is_gate[0] else "act"


def _read(load, row, column, shape, zeros):
    """What stands at rows and columns that may lie outside a matrix: zeros, or the line at its edge."""
    inside = [(line >= 0) & (line < size) for line, size in zip((row, column), shape, strict=True)]
    row, column = (np.clip(line, 0, size - 1) for line, size in zip((row, column), shape, strict=True))
    if not row.size or not column.size:
        return load(slice(0, row.size), as_slice(column))
    first = int(row.min())
    values = load(slice(first, int(row.max()) + 1), as_slice(column))[row - first]
    return np.where(inside[0][:, None] & inside[1][None, :], values, np.float32(0)) if zeros else values


def _shift_row_scales(replay, by):
    """Let each row have the scale of the row that is `by` further on."""
    scales = replay.case.inputs["row_scales"].reshape(-1, 1).astype(np.float32)

    def row_scale(rows):
        return scales[np.clip(np.arange(rows.start, rows.stop) + by, 0, len(scales) - 1)]

    replay.row_scale = row_scale
