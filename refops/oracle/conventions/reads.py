"""Conventions of what a kernel reads: the right arithmetic on an element beside the one that belongs there."""

import numpy as np

from refops.oracle.conventions.registry import computing

#: Elements by which a read is off: a neighbour, a vector of two to sixteen, a block, a tile.
OFFSETS = (1, -1, 2, -2, 4, -4, 8, -8, 16, -16, 32, -32, 64, -64, 128, -128)


def _shifts(replay):
    """(input, rows, columns) to try: one input off by some rows or columns."""
    replay.require(replay.computes)
    names = [name for name in ("x", "dy") if name in replay.setting.matrices]
    return [(name, *shift) for name in names for by in OFFSETS for shift in ((0, by), (by, 0))]


@computing(
    "input-shifted",
    "{what} is read {by} away from where it belongs: {line} n holds the result of {line} n {sign} {number} of {what}.",
    stage="input",
    choices=_shifts,
)
def input_shifted(replay, choice):
    name, rows_off, columns_off = choice
    m, k = replay.setting.matrices[name].shape
    replay.require(abs(rows_off) < m and abs(columns_off) < k)
    by, line = (rows_off, "row") if rows_off else (columns_off, "column")
    replay.facts["what"], replay.facts["line"] = name, line
    replay.facts["by"] = f"{abs(by)} {line}{'s' * (abs(by) > 1)}"
    replay.facts["sign"], replay.facts["number"] = ("+" if by > 0 else "-"), abs(by)

    def load(inner, asked, rows, columns):
        if asked != name:
            return inner(asked, rows, columns)
        row = np.clip(np.arange(rows.start, rows.stop) + rows_off, 0, m - 1)
        column = np.arange(columns.start, columns.stop) if isinstance(columns, slice) else np.asarray(columns)
        column = np.clip(column + columns_off, 0, k - 1)
        if not row.size:
            return inner(asked, rows, column)
        return inner(asked, slice(int(row[0]), int(row[-1]) + 1), column)[row - row[0]]

    replay.wrap("load", load)
