"""Stages that fill a tile with the float32 values of a result.

Their operands are an `operands.Inputs` and the tables of those parts of an activation (`tables`) that are read instead
of computed: one loop serves all activations of which nothing is computed. Values and the order of operations are those
of kernels (`cuda_kernels.reads`); nothing is rounded here.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from cuda_kernels.casts import STORAGES
from cuda_kernels.formulas import functions_of
from cuda_kernels.host.compile import address_of
from cuda_kernels.host.tables import Part, in_arithmetic, is_tabulated, table_of
from cuda_kernels.host.tiles import STAGE, make_array_at, reader, size
from cuda_kernels.operands import Inputs
from cuda_kernels.simt import F, device
from refops.activations.declaration import IDENTITY

ONE = F(1)


# --- parts of an activation -------------------------------------------------------------------------


class Getting(NamedTuple):
    """How a part of an activation is got from a number as it is stored.

    Attributes:
        name: in the name of a loop; those of one name are one function.
        function: f(stored, inputs, table).
    """

    name: str
    function: Any


@cache
def from_table():
    """Read it from a table."""
    return Getting("table", device(lambda stored, inputs, table: table[stored]))


def preparation_of(part, *others):
    """Return (prepare, get): how the loop of a product gets one part of it, a `Getting`.

        prepare(line, stored, inputs, table)      before the loop
        get(prepared, stored, inputs, table)      in it, a number: `prepared` is that of the line

    A part that alone reads a table does so in a loop of its own, into the line: LLVM vectorises no loop that reads a
    table, but the product's without it. Other parts are computed in the product's loop.
    """
    function = part.function
    if part != from_table() or from_table() in others:
        return _nothing, device(lambda prepared, stored, inputs, table: function(stored, inputs, table))

    @device
    def prepare(line, stored, inputs, table):
        for i in range(stored.size):
            line[i] = function(stored[i], inputs, table)

    return prepare, device(lambda prepared, stored, inputs, table: prepared)


@device
def _nothing(line, stored, inputs, table):
    pass


@cache
def itself(storage):
    """The number itself."""
    widen = STORAGES[storage].widen
    return Getting("identity", device(lambda stored, inputs, table: widen(stored)))


@cache
def getting(name, part, storage, arithmetic):
    """Return the `Getting` of a `Part` of an activation, x of a dtype."""
    if is_tabulated(name, part, storage):
        return from_table()
    if part is Part.GATE and part.declared(name) is IDENTITY:
        return itself(storage)
    function, widen = getattr(functions_of(name, arithmetic), part.value), STORAGES[storage].widen
    return Getting(
        in_arithmetic(name, part, arithmetic), device(lambda stored, inputs, table: function(widen(stored), inputs))
    )


#: (kind of a front, whether it is gated) -> the parts that it is made of.
PARTS = {
    ("forward", False): (Part.VALUE,),
    ("forward", True): (Part.VALUE, Part.GATE),
    ("backward", False): (Part.DERIVATIVE,),
    ("backward", True): tuple(Part),
}


# --- what fills a tile ------------------------------------------------------------------------------


class Filling(NamedTuple):
    """What fills the tiles of a front half.

    Attributes:
        stage: address of the stage.
        operands: numbers and arrays that it reads.
        tables: those of the arrays that are no argument of the call.
    """

    stage: int
    operands: list
    tables: list


def filling_for(front):
    """Return the `Filling` of a `Front`."""
    if front.kind == "identity":
        stage = filling("identity", (itself(front.storage),), front.storage, False, False)
        return Filling(stage, [*front.source(), None], [])
    parts, tables = PARTS[front.kind, front.gated], []
    for part in parts:
        read = is_tabulated(front.name, part, front.storage)
        made = table_of(front.name, part, front.storage, front.parameters, front.arithmetic) if read else None
        tables.append(made)
    gettings = tuple(getting(front.name, part, front.storage, front.arithmetic) for part in parts)
    stage = filling(front.kind, gettings, front.storage, front.row_scales is not None, front.interleave > 0)
    return Filling(stage, [*front.source(), *tables], [table for table in tables if table is not None])


@cache
def filling(kind, gettings, storage, scaled, interleaved):
    """Return the address of one stage, compiled on first use."""
    words = [kind, *(one.name for one in gettings), storage, "scaled" * scaled, "interleaved" * interleaved]
    if kind == "backward":
        function = (_gated_gradient if len(gettings) > 1 else _gradient)(storage, *gettings)
    elif len(gettings) > 1:
        function = _gated(storage, *gettings, scaled, interleaved)
    else:
        function = _elementwise(storage, *gettings, scaled)
    return address_of("-".join(word for word in words if word), function, STAGE)


def inputs_at(storage):
    """Return `read(words, i)`: the `Inputs` whose words begin at `i`, tensors of a dtype."""
    carrier = STORAGES[storage].carrier.type
    return reader(Inputs, x=carrier, dy=carrier)


#: table(words, i): the table whose words are `i` and `i` + 1; those of a stage follow its `Inputs`.
table_at, FIRST_TABLE = make_array_at(np.float32), size(Inputs)


def _elementwise(storage, value, scaled):
    """f(x), times the row's scale."""
    read, value = inputs_at(storage), value.function

    def fill(words, at, tile, rows, columns, row, column):
        inputs, table = read(words, at), table_at(words, at + FIRST_TABLE)
        for r in range(rows):
            start = (row + r) * inputs.width + column
            x, line = inputs.x[start : start + columns], tile[r]
            factor = inputs.row_scales[row + r] if scaled else ONE
            for c in range(columns):
                y = value(x[c], inputs, table)
                line[c] = y * factor if scaled else y

    return fill


def halves_of(interleaved):
    """Return `halves(inputs, row, column, columns)`: where act and gate of an output column lie, and for how many
    columns on from there they lie next to each other."""

    @device
    def contiguous(inputs, row, column, columns):
        start = row * 2 * inputs.width + column
        return start, start + inputs.width, columns

    @device
    def alternating(inputs, row, column, columns):
        g = inputs.interleave
        start = row * 2 * inputs.width + column // g * 2 * g + column % g
        return start, start + g, min(columns, g - column % g)

    return alternating if interleaved else contiguous


def _gated(storage, value, gate, scaled, interleaved):
    """f(act) * gate(gate), times the row's scale."""
    read, halves, (prepare, get) = inputs_at(storage), halves_of(interleaved), preparation_of(value, gate)
    gate = gate.function

    def fill(words, at, tile, rows, columns, row, column):
        inputs = read(words, at)
        values, gates_of = table_at(words, at + FIRST_TABLE), table_at(words, at + FIRST_TABLE + 2)
        for r in range(rows):
            factor = inputs.row_scales[row + r] if scaled else ONE
            done = 0
            while done < columns:
                first, second, n = halves(inputs, row + r, column + done, columns - done)
                acts, gates, line = inputs.x[first : first + n], inputs.x[second : second + n], tile[r, done : done + n]
                prepare(line, acts, inputs, values)
                for c in range(n):
                    product = get(line[c], acts[c], inputs, values) * gate(gates[c], inputs, gates_of)
                    line[c] = product * factor if scaled else product
                done += n

    return fill


def _gradient(storage, derivative):
    """f'(x) * dy."""
    read, widen, (prepare, get) = inputs_at(storage), STORAGES[storage].widen, preparation_of(derivative)

    def fill(words, at, tile, rows, columns, row, column):
        inputs, table = read(words, at), table_at(words, at + FIRST_TABLE)
        for r in range(rows):
            start = (row + r) * inputs.width + column
            x, dy, line = inputs.x[start : start + columns], inputs.dy[start : start + columns], tile[r]
            prepare(line, x, inputs, table)
            for c in range(columns):
                line[c] = get(line[c], x[c], inputs, table) * widen(dy[c])

    return fill


def _gated_gradient(storage, value, derivative, gate, slope):
    """(f'(act) * dy) * gate(gate) in columns 0 to width, (gate'(gate) * dy) * f(act) in the others."""
    read, widen = inputs_at(storage), STORAGES[storage].widen
    prepare_derivative, derivative_of = preparation_of(derivative, gate)
    prepare_value, value_of = preparation_of(value, slope)
    gate, slope = gate.function, slope.function

    def fill(words, at, tile, rows, columns, row, column):
        inputs, i = read(words, at), at + FIRST_TABLE
        values, derivatives = table_at(words, i), table_at(words, i + 2)
        gates_of, slopes = table_at(words, i + 4), table_at(words, i + 6)
        width = inputs.width
        of_act = min(max(width - column, 0), columns)
        for r in range(rows):
            start = (row + r) * 2 * width
            first = start + column
            acts, gates = inputs.x[first : first + of_act], inputs.x[first + width : first + width + of_act]
            here = (row + r) * width + column
            dy, line = inputs.dy[here : here + of_act], tile[r]
            prepare_derivative(line, acts, inputs, derivatives)
            for c in range(of_act):
                of_dy = derivative_of(line[c], acts[c], inputs, derivatives) * widen(dy[c])
                line[c] = of_dy * gate(gates[c], inputs, gates_of)
            n, first = columns - of_act, start + column + of_act - width
            acts, gates = inputs.x[first : first + n], inputs.x[first + width : first + width + n]
            here = (row + r) * width + column + of_act - width
            dy, line = inputs.dy[here : here + n], tile[r, of_act:columns]
            prepare_value(line, acts, inputs, values)
            for c in range(n):
                of_dy = slope(gates[c], inputs, slopes) * widen(dy[c])
                line[c] = of_dy * value_of(line[c], acts[c], inputs, values)

    return fill
