"""`refops explain`: one block, step by step."""

from dataclasses import asdict

import numpy as np
from rich.text import Text

from refops.display.console import make_table, print_table, printable, stdout_console
from refops.display.numbers import binary, hexadecimal, significant


def walk_as_dict(named, origin, x, walk):
    """Plain data of a `BlockWalk` through tensor `x` under `named`; `origin` says where the tensor comes from."""
    return {
        "scaling": named.name,
        "description": named.description,
        "tensor": origin,
        "shape": x.shape,
        "dtype": x.dtype.name,
        "direction": walk.direction,
        "where": walk.where,
        "format": walk.fmt.name,
        "transformed": walk.transformed,
        "steps": [
            {
                "name": s.name,
                "value": s.value,
                "bits": s.bits,
                "format": s.fmt.name if s.fmt else "float32",
                "formula": s.formula,
            }
            for s in walk.steps
        ],
        "elements": [
            {**asdict(e), "original_bits": _float32_bits(e.original), "error": e.error} for e in walk.elements
        ],
    }


def _float32_bits(value):
    return f"0x{np.float32(value).view(np.uint32):08X}"


def print_walk(named, origin, walk):
    """Print how the scale comes out and what each element becomes."""
    console = stdout_console()
    console.print(Text(f"{named.name}: {named.description}", style="bold"))
    console.print(f"{printable(origin)}\n{walk.direction}, {walk.where}\n")
    console.print(Text("How the scale comes out", style="bold"))
    steps = make_table("<step", "value", "bits", "<from")
    for s in walk.steps:
        steps.add_row(s.name, f"{s.value:.7g}" if s.fmt is None else f"{s.value} ({s.fmt!r})", s.bits, s.formula)
    print_table(console, steps)
    console.print(Text(f"What each element becomes ({walk.fmt!r})", style="bold"))
    rows = [_cells(element, walk) for element in walk.elements]
    elements = make_table(*rows[0])
    for cells in rows:
        elements.add_row(*cells.values())
    print_table(console, elements)
    console.print("\n".join(_legend(walk)), style="dim")


def _cells(element, walk):
    """Column -> text of one element; columns that no element of the walk has are left out."""
    row, column = element.index
    cells = {"column": str(column)} if walk.direction == "rowwise" else {"row": str(row)}
    cells["x"] = significant(element.original, 4)
    if walk.transformed:
        cells["transformed"] = significant(element.cast, 4)
    cells["scaled"] = significant(element.scaled, 4)
    if element.random_byte is not None:
        cells["random"] = str(element.random_byte)
    return cells | {
        "code": hexadecimal(element.code, walk.fmt),
        "binary": binary(element.code, walk.fmt),
        "decoded": significant(element.decoded, 4),
        "dequantized": significant(element.dequantized, 4),
        "error": significant(element.error),
    }


def _legend(walk):
    """Lines that say what the columns mean."""
    scaled, decoded = "x", "decoded * decode scale"
    lines = []
    if walk.transformed:
        lines.append("transformed: x after the Hadamard transform of 16 rows, rounded to the dtype")
        scaled, decoded = "transformed", "the transform of (decoded * decode scale) undone"
    rounding = "the nearest value, ties to even"
    if walk.elements[0].random_byte is not None:
        rounding = "the value at or below scaled + random/256 of a step"
    return [
        *lines,
        f"scaled = {scaled} * encode multiplier",
        f"code: {rounding}, at most {walk.fmt.max:.9g}",
        f"dequantized = {decoded}; error = dequantized - x",
    ]
