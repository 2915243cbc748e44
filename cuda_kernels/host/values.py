"""Stages that fill a tile with the float32 values of a result: one compiled loop for each activation and dtype.

Their operand is an `operands.Inputs`. Values and the order of operations are those of kernels (`cuda_kernels.reads`);
nothing is rounded here.
"""

from functools import cache

from cuda_kernels.casts import STORAGES
from cuda_kernels.formulas import functions_of
from cuda_kernels.host.compile import address_of
from cuda_kernels.host.tiles import STAGE, reader
from cuda_kernels.operands import Inputs
from cuda_kernels.simt import F, device

ONE = F(1)


def filling_for(front):
    """Return the address of the stage that computes a `Front`."""
    if front.kind == "identity":
        return filling("identity", None, front.storage, False, False, False)
    scaled, interleaved = front.row_scales is not None, front.interleave > 0
    return filling(front.kind, front.name, front.storage, front.gated, scaled, interleaved)


@cache
def filling(kind, name, storage, gated, scaled, interleaved):
    """Return the address of one stage, compiled on first use."""
    words = [name, kind, storage, "scaled" * scaled, "interleaved" * interleaved]
    if kind == "identity":
        function = _elementwise(storage, device(lambda x, p: x), False)
    elif kind == "forward":
        function = _gated(name, storage, scaled, interleaved) if gated else _unary(name, storage, scaled)
    else:
        function = _gated_gradient(name, storage) if gated else _unary_gradient(name, storage)
    return address_of("-".join(word for word in words if word), function, STAGE)


def inputs_at(storage):
    """Return `read(words, i)`: the `Inputs` whose words begin at `i`, tensors of a dtype."""
    carrier = STORAGES[storage].carrier.type
    return reader(Inputs, x=carrier, dy=carrier)


def _unary(name, storage, scaled):
    return _elementwise(storage, functions_of(name).value, scaled)


def _elementwise(storage, function, scaled):
    """f(x), times the row's scale."""
    read, widen = inputs_at(storage), STORAGES[storage].widen

    def fill(words, at, tile, rows, columns, row, column):
        inputs = read(words, at)
        for r in range(rows):
            start = (row + r) * inputs.width + column
            x, line = inputs.x[start : start + columns], tile[r]
            factor = inputs.row_scales[row + r] if scaled else ONE
            for c in range(columns):
                value = function(widen(x[c]), inputs)
                line[c] = value * factor if scaled else value

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


def _gated(name, storage, scaled, interleaved):
    """f(act) * gate(gate), times the row's scale."""
    read, widen = inputs_at(storage), STORAGES[storage].widen
    functions, halves = functions_of(name), halves_of(interleaved)
    value, gate = functions.value, functions.gate

    def fill(words, at, tile, rows, columns, row, column):
        inputs = read(words, at)
        for r in range(rows):
            factor = inputs.row_scales[row + r] if scaled else ONE
            done = 0
            while done < columns:
                first, second, n = halves(inputs, row + r, column + done, columns - done)
                acts, gates, line = inputs.x[first : first + n], inputs.x[second : second + n], tile[r, done : done + n]
                for c in range(n):
                    product = value(widen(acts[c]), inputs) * gate(widen(gates[c]), inputs)
                    line[c] = product * factor if scaled else product
                done += n

    return fill


def _unary_gradient(name, storage):
    """f'(x) * dy."""
    read, widen = inputs_at(storage), STORAGES[storage].widen
    derivative = functions_of(name).derivative

    def fill(words, at, tile, rows, columns, row, column):
        inputs = read(words, at)
        for r in range(rows):
            start = (row + r) * inputs.width + column
            x, dy, line = inputs.x[start : start + columns], inputs.dy[start : start + columns], tile[r]
            for c in range(columns):
                line[c] = derivative(widen(x[c]), inputs) * widen(dy[c])

    return fill


def _gated_gradient(name, storage):
    """(f'(act) * dy) * gate(gate) in columns 0 to width, (gate'(gate) * dy) * f(act) in the others."""
    read, widen = inputs_at(storage), STORAGES[storage].widen
    functions = functions_of(name)
    value, derivative, gate, slope = functions.value, functions.derivative, functions.gate, functions.gate_slope

    def fill(words, at, tile, rows, columns, row, column):
        inputs = read(words, at)
        width = inputs.width
        of_act = min(max(width - column, 0), columns)
        for r in range(rows):
            start = (row + r) * 2 * width
            first = start + column
            acts, gates = inputs.x[first : first + of_act], inputs.x[first + width : first + width + of_act]
            at = (row + r) * width + column
            dy, line = inputs.dy[at : at + of_act], tile[r]
            for c in range(of_act):
                line[c] = (derivative(widen(acts[c]), inputs) * widen(dy[c])) * gate(widen(gates[c]), inputs)
            n, first = columns - of_act, start + column + of_act - width
            acts, gates = inputs.x[first : first + n], inputs.x[first + width : first + width + n]
            at = (row + r) * width + column + of_act - width
            dy, line = inputs.dy[at : at + n], tile[r, of_act:columns]
            for c in range(n):
                line[c] = (slope(widen(gates[c]), inputs) * widen(dy[c])) * value(widen(acts[c]), inputs)

    return fill
