"""One block, step by step: its amax, how the scale comes out, and what each element becomes.

For `refops explain` and for teaching. Every number is read from the result of `refops.quantize` or computed by the
function that `refops.quantization` itself uses; the formulas are text beside them. Nothing is decided here.
"""

import numbers
from dataclasses import dataclass

import numpy as np

from refops.arguments import shown
from refops.formats import ElementFormat
from refops.ops import DequantizedSource, quantize
from refops.quantization.quantize import random_bytes
from refops.scalings.arithmetic import FLT_MAX, REFERENCE
from refops.survey import cast_dequantized_source, cast_source, decode_scale_source, element_codes, has_transform
from refops.tiles import InputSource, ceil_div, magnitude_max, round_up

#: Elements of a row that stand for the "block" of a per-tensor scaling.
PER_TENSOR_BLOCK = 16


@dataclass(frozen=True)
class Step:
    """One number on the way to the scale.

    Attributes:
        name: what it is.
        value: np.float32, or an int where `fmt` says how the byte is read.
        formula: where it comes from.
        fmt: format of a scale byte, or None.
    """

    name: str
    value: np.float32 | int
    formula: str
    fmt: ElementFormat | None = None

    @property
    def bits(self):
        """The stored bits in hexadecimal: eight digits for float32, two for a scale byte."""
        if self.fmt is not None:
            return f"0x{self.value:02X}"
        return f"0x{np.float32(self.value).view(np.uint32):08X}"


@dataclass(frozen=True)
class Element:
    """What one element becomes. float32 unless said otherwise.

    Attributes:
        index: (row, column) in the (M, K) tensor.
        original: the tensor's element.
        cast: what is scaled: `original`, or its Hadamard transform.
        random_byte: the random bits of stochastic rounding, or None.
        scaled: `cast` times the encode multiplier.
        code: int.
        decoded: the code's value.
        restored: `decoded` times the decode scale.
        dequantized: what `refops.dequantize` gives: `restored`, any Hadamard transform undone.
    """

    index: tuple[int, int]
    original: np.float32
    cast: np.float32
    random_byte: int | None
    scaled: np.float32
    code: int
    decoded: np.float32
    restored: np.float32
    dequantized: np.float32

    @property
    def error(self):
        """dequantized - original, in float64."""
        return float(self.dequantized) - float(self.original)


@dataclass(frozen=True)
class BlockWalk:
    """One block, walked.

    Attributes:
        direction: "rowwise" (blocks along K) or "columnwise" (blocks along M).
        where: the block in words, with its place in the tensor.
        fmt: format of the elements.
        transformed: whether elements went through the Hadamard transform.
        steps: list of `Step`, in order.
        elements: list of `Element`, along the direction.
    """

    direction: str
    where: str
    fmt: ElementFormat
    transformed: bool
    steps: list
    elements: list


class BlockError(ValueError):
    """A row or block outside the tensor; the message names argument, value and rule."""


def explain_block(x, scaling, *, columnwise=False, row=0, block=0):
    """Walk one block of a tensor.

    Args:
        x: float32, float16 or bfloat16 (..., K).
        scaling: any of the settings.
        columnwise: walk the columnwise copy: `row` is then a column of the tensor, and `block` runs along M.
        row: row of the (M, K) tensor.
        block: number of the block along the row. Per-tensor scalings have no blocks: 16 elements stand for one.

    Returns:
        `BlockWalk`. Of a two-dimensional block the walk shows one row; its amax is the whole tile's.

    Raises:
        BlockError: `row` or `block` out of range. TypeError: one of them is no integer. TypeError, ValueError: as
            `refops.quantize`.
    """
    q = quantize(x, scaling, rowwise=not columnwise, columnwise=columnwise)
    block_rows, length = _block_shape(scaling)

    def oriented(matrix):
        return matrix.T if columnwise else matrix

    outer, inner = scaling.layout.oriented(q.matrix_shape, columnwise)
    _require_index(row, "row", outer, "column" if columnwise else "row")
    _require_index(block, "block", ceil_div(inner, length), "block", f" of {length}")
    first_row, first = row // block_rows * block_rows, block * length
    rows, along = slice(first_row, min(first_row + block_rows, outer)), slice(first, min(first + length, inner))

    def tile_of(source):
        """The block's rectangle in the direction walked; nothing else of the tensor is computed."""
        return source.read(along, rows).T if columnwise else source.read(rows, along)

    with np.errstate(all="ignore"):
        tile, here = tile_of(cast_source(x, q)), row - first_row
        steps, multiplier = _scale_steps(q, magnitude_max(tile), columnwise, row, block)
        steps.append(Step("decode scale", tile_of(decode_scale_source(q))[here, 0], scaling.formulas.decode))
        codes = oriented(element_codes(q))[row, along]
        random_bytes = _random_bytes(scaling, q.matrix_shape, columnwise, row, along)
        columns = zip(
            [(i, row) if columnwise else (row, i) for i in range(along.start, along.stop)],
            tile_of(InputSource(x))[here],
            tile[here],
            [None] * len(codes) if random_bytes is None else map(int, random_bytes),
            tile[here] * multiplier,
            map(int, codes),
            scaling.fmt.values[codes],
            tile_of(cast_dequantized_source(q))[here],
            tile_of(DequantizedSource(q))[here],
            strict=True,
        )
        elements = [Element(*values) for values in columns]
    return BlockWalk(
        "columnwise" if columnwise else "rowwise",
        _where(scaling, columnwise, row, along.start, along.stop, block),
        scaling.fmt,
        has_transform(q),
        steps,
        elements,
    )


def _block_shape(scaling):
    """(rows, elements along a row) of a block in the direction walked."""
    return scaling.layout.block or (1, PER_TENSOR_BLOCK)


def _require_index(value, name, count, what, of=""):
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer; got {shown(value)}")
    if not 0 <= value < count:
        there = f"{count} {what}{'s' * (count != 1)}{of}"
        raise BlockError(f"{name} must be in 0..{count - 1} (the tensor has {there}); got {value}")


def _where(scaling, columnwise, row, first, stop, block):
    line, along = ("column", "rows") if columnwise else ("row", "columns")
    place = f"{line} {row}, {along} {first}..{stop - 1}"
    rows, length = _block_shape(scaling)
    if scaling.layout.block is None:
        return f"{place} (the scale is the whole tensor's)"
    return f"{place} (block {block})" if rows == 1 else f"{place} (of a {rows}x{length} tile, block {block})"


def _scale_steps(q, block_amax, columnwise, row, block):
    """The steps to the encode multiplier, and the multiplier."""
    scaling, layout, formulas = q.scaling, q.scaling.layout, q.scaling.formulas
    what, steps = "transformed " if columnwise and scaling.hadamard is not None else "", []
    amax, tensor_scale = block_amax, np.float32(0)
    if layout.amax is not None:
        rows = layout.amax == "rows"
        whose = ("column" if columnwise else "row") if rows else "tensor"
        tensor_amax = (q.amax_columnwise if columnwise else q.amax_rowwise)[row if rows else 0]
        of_whom = "" if layout.block is None else f" of the {whose}"
        steps.append(Step(f"{whose} amax", tensor_amax, f"max |{what}x|{of_whom}, NaN ignored{formulas.amax}"))
        amax = tensor_amax if layout.block is None else block_amax
    if layout.two_level:
        tensor_scale = scaling.tensor_scale(REFERENCE)(tensor_amax)
        steps.append(Step("S_enc", tensor_scale[0][()], formulas.tensor_scale.format(whose=whose)))
    if layout.block is not None:
        steps.append(Step("block amax", block_amax, f"max |{what}x| of the block, NaN ignored"))
    stored = _stored_scale(q, columnwise, row, block)
    if layout.scale_format is None:
        p = scaling.numbers(q.dtype)
        _, multiplier = scaling.block_scale(REFERENCE)(np.array([amax]), tensor_scale, p)
        multiplier = np.ravel(multiplier)[0]
        largest = "FLT_MAX" if p.largest_scale == FLT_MAX else f"{p.largest_scale:.7g}"
        steps.append(Step("encode multiplier", multiplier, formulas.multiplier.format(largest=largest)))
        if layout.block is not None:
            steps.append(Step("stored scale", stored, formulas.stored))
        return steps, multiplier
    formula = formulas.stored + _chosen(scaling, stored, block_amax, tensor_scale, q.dtype)
    steps.append(Step("scale byte", int(stored), formula, layout.scale_format))
    if layout.two_level:
        steps.append(Step("block scale", layout.scale_format.values[stored], "the byte's value"))
    multiplier = scaling.multiplier(REFERENCE)(stored, tensor_scale)
    steps.append(Step("encode multiplier", multiplier, formulas.multiplier))
    return steps, multiplier


def _chosen(scaling, stored, block_amax, tensor_scale, dtype):
    """Which of several scales a block has kept, in words; "" where there is one."""
    choice = scaling.choice(REFERENCE)
    if choice is None:
        return ""
    amax, p = np.array([block_amax]), scaling.numbers(dtype)
    codes = [int(np.ravel(candidate(amax, tensor_scale, p)[0])[0]) for candidate in choice.candidates]
    kept = " and ".join(f"number {number}" for number, code in enumerate(codes, 1) if code == stored)
    return f"; here {kept} of {', '.join(f'0x{code:02X}' for code in codes)}"


def _stored_scale(q, columnwise, row, block):
    """The stored scale of a block of a row, in the direction walked."""
    layout = q.scaling.layout
    scales = layout.scales_by_outer(q.columnwise_scale_inv if columnwise else q.rowwise_scale_inv, columnwise)
    return scales[0, 0] if layout.block is None else scales[row // layout.run[0], block]


def _random_bytes(scaling, matrix_shape, columnwise, row, along):
    """The random bytes of a row's elements under stochastic rounding, the caller's or Philox's; None without it."""
    if scaling.random is None:
        return None
    return random_bytes(scaling.random, slice(row, row + 1), along, matrix_shape, columnwise)[0]


def as_tensor_of(values, scaling, *, columnwise=False):
    """Place a few values so that `scaling` accepts them: (tensor, note).

    Args:
        values: float32, float16 or bfloat16 (n,).
        scaling: any of the settings. Where it needs sizes that divide by something, zeros are added.
        columnwise: place them down the first column instead of along the first row.
    """
    n = len(values)
    edge = scaling.layout.columnwise_multiple if columnwise else scaling.layout.shape_multiple
    tensor = np.zeros((edge, round_up(n, edge)), values.dtype)
    tensor[0, :n] = values
    if columnwise:
        tensor = np.ascontiguousarray(tensor.T)
    m, k = tensor.shape
    line = "column" if columnwise else "row"
    note = f"the first {line} of a {m}x{k} tensor"
    if tensor.size > n:
        note += f", the rest zero: {scaling.title} needs both sizes divisible by {edge}"
    return tensor, note
