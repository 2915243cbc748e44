"""One block, step by step: its amax, how the scale comes out, and what each element becomes.

For `refops explain` and for teaching. Every number is read from the result of `refops.quantize` or computed by the
function that `refops.quantization` itself uses; the formulas are text beside them. Nothing is decided here.
"""

from dataclasses import dataclass

import numpy as np

from refops.formats import E4M3, E8M0, FloatFormat
from refops.ops import DequantizedSource, quantize
from refops.quantization.block import LARGEST_SCALE, valid_scales
from refops.quantization.mxfp8 import ENCODE_MULTIPLIER, scale_byte
from refops.quantization.nvfp4 import encode_multiplier, global_encode_scale
from refops.quantization.per_tensor import scale_from_amax
from refops.rounding import philox_bytes
from refops.scaling import BlockScaling, CurrentScaling, DelayedScaling, MXFP8Scaling, NVFP4Scaling
from refops.survey import cast_dequantized_source, cast_source, decode_scale_source, element_codes, has_transform
from refops.tiles import InputSource, magnitude_max

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
    fmt: FloatFormat | None = None

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
    fmt: FloatFormat
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
        BlockError: `row` or `block` out of range. TypeError, ValueError: as `refops.quantize`.
    """
    q = quantize(x, scaling, rowwise=not columnwise, columnwise=columnwise)
    block_rows, length = _block_shape(scaling)

    def oriented(matrix):
        return matrix.T if columnwise else matrix

    outer, inner = reversed(q.matrix_shape) if columnwise else q.matrix_shape
    _require_index(row, "row", outer, "columns" if columnwise else "rows")
    _require_index(block, "block", -(-inner // length), f"blocks of {length}")
    first_row, first = row // block_rows * block_rows, block * length
    rows, along = slice(first_row, min(first_row + block_rows, outer)), slice(first, min(first + length, inner))

    def tile_of(source):
        """The block's rectangle in the direction walked; nothing else of the tensor is computed."""
        return source.read(along, rows).T if columnwise else source.read(rows, along)

    with np.errstate(all="ignore"):
        tile, here = tile_of(cast_source(x, q)), row - first_row
        steps, multiplier = _scale_steps(q, magnitude_max(tile), columnwise, row, block)
        steps.append(Step("decode scale", tile_of(decode_scale_source(q))[here, 0], _decode_formula(scaling)))
        codes = oriented(element_codes(q))[row, along]
        random_bytes = _random_bytes(scaling, q.matrix_shape, columnwise, row, block)
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
    if isinstance(scaling, DelayedScaling | CurrentScaling):
        return 1, PER_TENSOR_BLOCK
    two_d = scaling.block_dim == 2 if isinstance(scaling, BlockScaling) else scaling.two_d
    return (scaling.block_size if two_d else 1), scaling.block_size


def _require_index(value, name, count, what):
    if not 0 <= value < count:
        raise BlockError(f"{name} must be in 0..{count - 1} (the tensor has {count} {what}); got {value}")


def _where(scaling, columnwise, row, first, stop, block):
    line, along = ("column", "rows") if columnwise else ("row", "columns")
    place = f"{line} {row}, {along} {first}..{stop - 1}"
    rows, length = _block_shape(scaling)
    if isinstance(scaling, DelayedScaling | CurrentScaling):
        return f"{place} (the scale is the whole tensor's)"
    return f"{place} (block {block})" if rows == 1 else f"{place} (of a {rows}x{length} tile, block {block})"


def _scale_steps(q, block_amax, columnwise, row, block):
    """The steps to the encode multiplier, and the multiplier."""
    scaling = q.scaling
    if isinstance(scaling, DelayedScaling | CurrentScaling):
        return _per_tensor_steps(q, columnwise)
    if isinstance(scaling, BlockScaling):
        return _block_steps(q, block_amax, columnwise, row, block)
    if isinstance(scaling, MXFP8Scaling):
        return _mxfp8_steps(scaling, block_amax)
    return _nvfp4_steps(q, block_amax, columnwise, row, block)


def _per_tensor_steps(q, columnwise):
    scaling = q.scaling
    amax = (q.amax_columnwise if columnwise else q.amax_rowwise)[0]
    if isinstance(scaling, DelayedScaling):
        scale = np.float32(scaling.scale)
        return [
            Step("tensor amax", amax, "max |x|, NaN ignored; for the history, not for this scale"),
            Step("encode multiplier", scale, "the scale, known before the tensor was seen"),
        ], scale
    (scale,) = scale_from_amax(
        np.array([amax]), scaling.fmt, epsilon=scaling.amax_epsilon, power_2=scaling.power_2_scale
    )
    return [
        Step("tensor amax", amax, "max |x|, NaN ignored"),
        Step("encode multiplier", scale, _scale_formula(scaling)),
    ], scale


def _scale_formula(scaling):
    cleared = ", mantissa cleared" if scaling.power_2_scale else ""
    return f"{float(scaling.fmt.max):g} / amax (0 or inf: 1){cleared}"


def _block_steps(q, block_amax, columnwise, row, block):
    scaling = q.scaling
    (scale,) = scale_from_amax(
        np.array([block_amax]),
        scaling.fmt,
        epsilon=scaling.amax_epsilon,
        power_2=scaling.power_2_scale,
        value_for_inf=LARGEST_SCALE[q.dtype],
    )
    stored = valid_scales(q, columnwise)[row // _block_shape(scaling)[0], block]
    return [
        Step("block amax", block_amax, "max |x| of the block, NaN ignored"),
        Step("encode multiplier", scale, _scale_formula(scaling)),
        Step("stored scale", stored, "1 / encode multiplier, float32"),
    ], scale


_MXFP8_RULES = {
    "up": "amax * f32(1/{max:g}), up to the next 2^(byte-127)",
    "floor": "127 + floor(log2 amax) - {emax}",
    "even": "127 + floor(log2 of amax rounded to the element's mantissa) - {emax}",
    "ceil_ocp": "127 + ceil(log2 amax) - {emax}",
}


def _mxfp8_steps(scaling, block_amax):
    byte = int(scale_byte(np.array([block_amax]), scaling.fmt, scaling.scale_rounding)[0])
    rule = _MXFP8_RULES[scaling.scale_rounding].format(max=scaling.fmt.max, emax=int(np.log2(scaling.fmt.max)))
    return [
        Step("block amax", block_amax, "max |x| of the block, NaN ignored"),
        Step("scale byte", byte, rule, E8M0),
        Step("encode multiplier", ENCODE_MULTIPLIER[byte], "2^(127 - byte)"),
    ], ENCODE_MULTIPLIER[byte]


def _nvfp4_steps(q, block_amax, columnwise, row, block):
    scaling = q.scaling
    amaxes = q.amax_columnwise if columnwise else q.amax_rowwise
    amax = amaxes[row if scaling.row_scaled else 0]
    s_enc = global_encode_scale(amax, scaling.e4m3_max)[()]
    byte = int((q.columnwise_scale_inv if columnwise else q.rowwise_scale_inv)[row, block])
    multiplier = encode_multiplier(byte, s_enc)
    what = "transformed " if scaling.rht and columnwise else ""
    whose = ("column" if columnwise else "row") if scaling.row_scaled else "tensor"
    steps = [
        Step(f"{whose} amax", amax, f"max |{what}x| of the {whose}, NaN ignored"),
        Step("S_enc", s_enc, f"{scaling.e4m3_max} * 6 / {whose} amax (0 or inf: 1)"),
        Step("block amax", block_amax, f"max |{what}x| of the block, NaN ignored"),
    ]
    if scaling.four_over_six:
        error = {"mae": "absolute", "mse": "squared"}[scaling.four_over_six]
        rule = f"E4M3(block amax / 6 * S_enc), or of 1.5 times that: smaller {error} error"
    else:
        rule = "E4M3(block amax * (S_enc * f32(1/6)))"
    steps += [
        Step("scale byte", byte, rule, E4M3),
        Step("block scale", E4M3.values[byte], "the byte's value"),
        Step("encode multiplier", multiplier, "1 / (block scale * (1 / S_enc)), at most FLT_MAX"),
    ]
    return steps, multiplier


def _decode_formula(scaling):
    if isinstance(scaling, MXFP8Scaling):
        return "2^(byte - 127)"
    if isinstance(scaling, NVFP4Scaling):
        return f"(block scale * amax) * f32(1/{6 * scaling.e4m3_max})"
    return "the stored scale" if isinstance(scaling, BlockScaling) else "1 / encode multiplier, float32"


def _random_bytes(scaling, matrix_shape, columnwise, row, block):
    """The block's random bytes under stochastic rounding, the caller's or Philox's; None without it."""
    if not (isinstance(scaling, NVFP4Scaling) and scaling.stochastic_rounding):
        return None
    if scaling.random_bits is not None:
        bits = scaling.random_bits
        direction = bits[columnwise] if isinstance(bits, tuple) else bits
        return direction[row, block * scaling.block_size : (block + 1) * scaling.block_size]
    m, k = matrix_shape
    first, blocks = (
        (m * (k // scaling.block_size), m // scaling.block_size) if columnwise else (0, k // scaling.block_size)
    )
    return philox_bytes(scaling.seed, scaling.offset, [first + row * blocks + block])[0]


def as_tensor_of(values, scaling, *, columnwise=False):
    """Place a few values so that `scaling` accepts them: (tensor, note).

    Args:
        values: float32, float16 or bfloat16 (n,).
        scaling: any of the settings. NVFP4 needs multiples of 16 (row-scaled columnwise: 32): zeros are added.
        columnwise: place them down the first column instead of along the first row.
    """
    n = len(values)
    edge = (32 if scaling.row_scaled and columnwise else 16) if isinstance(scaling, NVFP4Scaling) else 1
    tensor = np.zeros((edge, -(-n // edge) * edge), values.dtype)
    tensor[0, :n] = values
    if columnwise:
        tensor = np.ascontiguousarray(tensor.T)
    m, k = tensor.shape
    line = "column" if columnwise else "row"
    note = f"the first {line} of a {m}x{k} tensor"
    if tensor.size > n:
        note += f", the rest zero: NVFP4 needs both sizes divisible by {edge}"
    return tensor, note
