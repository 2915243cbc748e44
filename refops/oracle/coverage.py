"""What the input of a right dump covered, and so how much the verdict is worth.

RIGHT says that nothing wrong was written for this input. An input without ties says nothing of how ties are rounded;
one with a positive amax does not tell whether magnitudes were taken. So the report counts what shows such faults.
"""

from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np

from refops.formats import E8M0
from refops.oracle.geometry import TILE, Geometry
from refops.quantization.hadamard import HadamardSource
from refops.quantization.layout import block_amax, padded_blocks
from refops.quantization.quantize import amax_of_tile
from refops.quantization.result import DIRECTIONS
from refops.rounding import stored
from refops.scalings import UNFUSED
from refops.scalings.arithmetic import REFERENCE
from refops.scalings.declaration import SCALE_TILE
from refops.tiles import ceil_div, for_each

F = np.float32
LEAST_NORMAL = F(np.finfo(F).smallest_normal)
#: Up to so many elements all are looked at; of a larger tensor about `SAMPLE`, in tiles spread over it.
MOST_ELEMENTS = 1 << 20
SAMPLE = 1 << 17


@dataclass(frozen=True)
class Coverage:
    """What the cast values covered; with two copies the numbers are sums over both.

    Attributes:
        elements, of: how many elements were looked at, of how many: all, or tiles spread over a large tensor.
        copies: quantized copies that were given; 0 where values are stored.
        ties: values halfway between two that can be stored, where the tie to even decides.
        subnormals: stored elements that are subnormal in their format (an integer format has none).
        flushed: values that are not zero, stored as zero.
        saturated: finite values so far beyond the largest one that is stored that rounding alone cannot reach it.
        small: values that are subnormal in float32, which a kernel with FTZ (flush to zero) loses.
        special: NaN and infinities.
        blocks: blocks of the scaling; 0 without blocks.
        zero_blocks: how many hold nothing but zeros.
        negative_blocks: how many have a negative element as their largest magnitude.
        full_blocks: how many have the largest value of the format times a power of two as their amax, where scales are
            powers of two: there alone a scale that is always rounded up differs.
        small_scales: how many have a scale that is subnormal in its format.
        zero_scales: how many have scale 0 though they are not all zero.
        rounded_blocks: how many have another scale before their values are rounded to the dtype of the input.
        amax_rounds: whether the amax of the tensor is another before that; False where none is kept.
        one_order: whether scales are swizzled and no copy has several tiles of them in both directions.
        amax: the element with the largest magnitude, NaN left out; None where there is none.
        row, column: where that is in the matrix (M, K).
        tile: (row, column) of the 128 x 128 tile that holds it.
        tiles: (rows, columns) of all tiles.
    """

    elements: int
    of: int
    copies: int = 0
    ties: int = 0
    subnormals: int = 0
    flushed: int = 0
    saturated: int = 0
    small: int = 0
    special: int = 0
    blocks: int = 0
    zero_blocks: int = 0
    negative_blocks: int = 0
    full_blocks: int = 0
    small_scales: int = 0
    zero_scales: int = 0
    rounded_blocks: int = 0
    amax_rounds: bool = False
    one_order: bool = False
    amax: float | None = None
    row: int = 0
    column: int = 0
    tile: tuple[int, int] = (0, 0)
    tiles: tuple[int, int] = (1, 1)

    def __str__(self):
        where = "covered"
        if self.elements < self.of:
            where += f" in {self.elements:,} of {self.of:,} elements, the only ones looked at"
        stored = "codes" if self.copies else "values"
        counts = (
            f"{self.ties:,} ties, {self.subnormals:,} subnormal {stored}, {self.flushed:,} flushed to 0, "
            f"{self.saturated:,} saturated, {self.small:,} float32 subnormals, {self.special:,} NaN or infinite"
        )
        parts = [] if self.amax is None else [self._where_amax()]
        if self.blocks:
            parts.append(
                f"of {self.blocks:,} blocks {self.zero_blocks:,} zero, {self.negative_blocks:,} with a negative amax"
            )
        lines = [f"{where}: {counts}", "; ".join(parts), self._of_scales()]
        if self.one_order:
            lines.append("no copy has several tiles of scales (128 x 4) both ways: their order is not tested")
        return "\n         ".join(line for line in lines if line)

    def _of_scales(self):
        """Blocks whose scale shows a wrong rule, those that there are."""
        counts = (
            (self.full_blocks, "whose amax is the format's largest value times a power of two"),
            (self.small_scales, "with a subnormal scale"),
            (self.zero_scales, "with scale 0 that are not zero"),
            (self.rounded_blocks, "with another scale before rounding"),
        )
        parts = [f"{count:,} {words}" for count, words in counts if count]
        return f"blocks: {', '.join(parts)}" if parts else ""

    def _where_amax(self):
        last = tuple(count - 1 for count in self.tiles)
        tile = "the only tile" if self.tiles == (1, 1) else f"tile {self.tile[0]}, {self.tile[1]}"
        tile = "last tile" if self.tile == last != (0, 0) else tile
        rounds = ", another one before rounding" if self.amax_rounds else ""
        return f"amax {self.amax:.9g} in row {self.row}, column {self.column} ({tile}){rounds}"

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        amax = self.amax if self.amax is None or np.isfinite(self.amax) else str(self.amax)
        return {**asdict(self), "amax": amax, "tile": list(self.tile), "tiles": list(self.tiles)}


def coverage_of(case, outputs, reference):
    """The `Coverage` of a right dump; None for operations without a single cast, and if no result was given.

    Args:
        case: the `Case`.
        outputs: name -> array as stored, scales in plain order.
        reference: name -> the reference's array.
    """
    if case.is_empty or case.operation.kind not in ("quantize", "activation", "activation_grad"):
        return None
    if not case.quantizes:
        name = next((name for name in ("y", "dx") if name in outputs), None)
        return None if name is None else _Count(case.source).run([_Values(outputs[name].dtype)], copies=0)
    is_activation = case.operation.kind != "quantize"
    path = case.scaling.path if is_activation else UNFUSED
    source = case.source.rounded() if path.casts_rounded else case.source
    copies = [_Codes(case, copy, outputs, reference) for copy in DIRECTIONS if f"{copy}_data" in outputs]
    if not copies:
        return None
    found = _Count(source, case.source if is_activation else None).run(copies, len(copies))
    amax_rounds = found.amax_rounds and case.scaling.layout.amax is not None
    several = any(min(copy.tiles_of_scales) > 1 for copy in copies)
    return replace(found, amax_rounds=amax_rounds, one_order=case.swizzled_scales and not several)


class _Count:
    """Counts over the tiles of a source, each read once.

    Args:
        source: what is cast.
        unrounded: the same before it is rounded to the dtype of the input; None where nothing is.
    """

    def __init__(self, source, unrounded=None):
        self.source, self.unrounded, self.shape = source, unrounded, source.shape
        self.is_rounded = unrounded is not None and source is not unrounded
        self.tiles = tuple(ceil_div(size, TILE) for size in self.shape)
        self.elements, self.amax, self.at = 0, None, (0, 0)
        self.largest = np.zeros(2, F)  # of unrounded values, of rounded ones
        self.totals = dict.fromkeys(("small", "special"), 0)

    def run(self, stores, copies):
        """The `Coverage` of what each of `stores` counts."""

        def look(rows, columns):
            tile, unrounded = self._read(rows, columns)
            self._look(tile, rows, columns)
            for store in stores:
                for name, count in store.count(self.source, tile, unrounded, rows, columns).items():
                    self.totals[name] = self.totals.get(name, 0) + int(count)

        for_each(self._chosen(), look)
        where = {} if self.amax is None else {"row": self.at[0], "column": self.at[1]}
        tile = tuple(i // TILE for i in self.at)
        of = self.shape[0] * self.shape[1]
        rounds = bool(self.largest[0] != self.largest[1])
        found = Coverage(self.elements, of, copies, amax=self.amax, tile=tile, tiles=self.tiles, **where, **self.totals)
        return replace(found, amax_rounds=rounds)

    def _read(self, rows, columns):
        """(what is cast, the same before its rounding) of a tile; None for the second where nothing is rounded."""
        if self.unrounded is None:
            return self.source.read(rows, columns), None
        unrounded = self.unrounded.read(rows, columns)
        rounded = stored(unrounded, self.source.dtype).astype(F)
        both = [np.fmax.reduce(np.abs(values), axis=None) for values in (unrounded, rounded)]
        self.largest = np.fmax(self.largest, both)
        return (rounded, unrounded) if self.is_rounded else (unrounded, None)

    def _chosen(self):
        """Slices of all tiles, or of some: every n-th, and the last one."""
        starts = list(product(range(0, self.shape[0], TILE), range(0, self.shape[1], TILE)))
        if self.shape[0] * self.shape[1] > MOST_ELEMENTS:
            kept = max(SAMPLE // TILE**2, 1)
            places = np.linspace(len(starts) - 1, 0, kept).astype(int)
            starts = [starts[i] for i in sorted(set(places.tolist()))]
        m, k = self.shape
        return [(slice(i, min(i + TILE, m)), slice(j, min(j + TILE, k))) for i, j in starts]

    def _look(self, tile, rows, columns):
        magnitudes = np.abs(tile)
        self.elements += tile.size
        self.totals["small"] += int(np.count_nonzero((magnitudes < LEAST_NORMAL) & (magnitudes > 0)))
        self.totals["special"] += tile.size - int(np.count_nonzero(np.isfinite(magnitudes)))
        largest = np.fmax.reduce(magnitudes, axis=None)
        if not np.isnan(largest) and (self.amax is None or largest > abs(self.amax)):
            i, j = np.unravel_index(np.argmax(magnitudes == largest), tile.shape)
            self.amax, self.at = float(tile[i, j]), (rows.start + int(i), columns.start + int(j))


class _Values:
    """Results that are stored as float32, float16 or bfloat16."""

    def __init__(self, dtype):
        info = ml_dtypes.finfo(dtype)
        self.dtype, self.form = np.dtype(dtype), (int(info.nmant), int(info.minexp), float(info.max))
        self.least = float(info.smallest_normal)

    def count(self, source, tile, unrounded, rows, columns):
        """Numbers of a tile by field of `Coverage`."""
        stored = np.abs(tile.astype(self.dtype).astype(F))
        return {
            "ties": 0 if self.dtype == F else np.count_nonzero(is_tie(tile, *self.form)),
            "subnormals": np.count_nonzero((stored < F(self.least)) & (stored > 0)),
            "flushed": np.count_nonzero((stored == 0) & (tile != 0)),
            "saturated": np.count_nonzero(np.isinf(stored) & np.isfinite(tile)),
        }


class _Codes:
    """Codes of one copy, under the scales of the reference."""

    def __init__(self, case, copy, outputs, reference):
        self.scaling, self.dtype, self.shape = case.scaling, case.inputs["x"].dtype, case.matrix_shape
        self.geometry, self.layout = Geometry.of(self.scaling, copy), self.scaling.layout
        self.codes, self.scales = outputs[f"{copy}_data"], reference[f"{copy}_scale_inv"]
        self.amax, self.numbers = reference.get(f"amax_{copy}"), self.scaling.numbers(self.dtype)
        fmt = self.scaling.fmt
        magnitudes = np.abs(fmt.values)
        self.is_zero = magnitudes == 0
        self.is_subnormal = (magnitudes > 0) & (magnitudes < fmt.smallest_normal) & (not fmt.twos_complement)
        self.form = (fmt.mantissa_bits, 1 - fmt.bias, float(fmt.max))
        self.beyond = F((fmt.grid[-1] + fmt.after_largest) / 2)
        counts = self.layout.scale_counts(self.shape, self.geometry.columnwise)
        self.tiles_of_scales = tuple(ceil_div(count, edge) for count, edge in zip(counts, SCALE_TILE, strict=True))

    def count(self, source, tile, unrounded, rows, columns):
        """Numbers of a tile by field of `Coverage`."""
        if self.geometry.columnwise and self.scaling.hadamard is not None:
            tile, unrounded = HadamardSource(source, self.scaling.hadamard).read(rows, columns), None
        scaled = tile * self.geometry.expand(self._multipliers(tile, rows, columns), tile.shape)
        codes = self.geometry.codes(self.codes, self.shape, rows, columns)
        found = {
            "ties": 0 if self.scaling.random is not None else np.count_nonzero(is_tie(scaled, *self.form)),
            "subnormals": np.count_nonzero(self.is_subnormal[codes]),
            "flushed": np.count_nonzero(self.is_zero[codes] & (tile != 0)),
            "saturated": np.count_nonzero((np.abs(scaled) > self.beyond) & np.isfinite(tile)),
        }
        return found | self._blocks(tile, unrounded, rows, columns)

    def _multipliers(self, tile, rows, columns):
        """What elements of each run of a tile are multiplied by."""
        scaling, geometry = self.scaling, self.geometry
        if geometry.block is None:
            return scaling.block_scale(REFERENCE)(self.amax, F(0), self.numbers)[1]
        multiplier = scaling.multiplier(REFERENCE)
        if multiplier is not None:
            return multiplier(geometry.scales(self.scales, rows, columns), self._tensor_scale(rows, columns))
        return geometry.blocks_to_runs(self._scales_of(tile, rows, columns)[1], tile.shape)

    def _tensor_scale(self, rows, columns):
        if not self.layout.two_level:
            return F(0)
        amax = amax_of_tile(self.layout, self.amax, rows, columns, self.geometry.columnwise)
        return self.scaling.tensor_scale(REFERENCE)(amax)

    def _scales_of(self, tile, rows, columns):
        """(stored scale, multiplier) of each block of a tile by its amax."""
        maxima = block_amax(padded_blocks(tile, *self.geometry.block))
        return self.scaling.block_scale(REFERENCE)(maxima, self._tensor_scale(rows, columns), self.numbers)

    def _blocks(self, tile, unrounded, rows, columns):
        if self.geometry.block is None:
            return {}
        blocks, scale_format = padded_blocks(tile, *self.geometry.block), self.layout.scale_format
        most, least = (reduce(blocks, axis=(1, 3)) for reduce in (np.fmax.reduce, np.fmin.reduce))
        amax, (scales, _) = np.maximum(most, -least), self._scales_of(tile, rows, columns)
        found = {
            "blocks": most.size,
            "zero_blocks": np.count_nonzero((most == 0) & (least == 0)),
            "negative_blocks": np.count_nonzero(-least > most),
        }
        if scale_format == E8M0 or getattr(self.scaling, "power_2_scale", False):
            found["full_blocks"] = np.count_nonzero(np.frexp(amax / F(self.scaling.fmt.max))[0] == 0.5)
        elif scale_format is not None:
            found["small_scales"] = np.count_nonzero((scales > 0) & (scales < 1 << scale_format.mantissa_bits))
            found["zero_scales"] = np.count_nonzero((scales == 0) & (amax > 0))
        if unrounded is not None:
            found["rounded_blocks"] = np.count_nonzero(self._scales_of(unrounded, rows, columns)[0] != scales)
        return found


def is_tie(values, mantissa_bits, least_exponent, largest):
    """Which float32 values lie halfway between two neighbours of a format, both at most `largest`.

    Args:
        mantissa_bits: of the format.
        least_exponent: of its normal numbers; below it steps stay the same.
    """
    magnitudes = np.abs(values)
    exponents = np.maximum(np.frexp(magnitudes)[1] - 1, least_exponent)
    twice = np.ldexp(magnitudes, mantissa_bits + 1 - exponents)  # in half steps: exact, a power of two times the value
    with np.errstate(invalid="ignore"):  # infinity has no remainder
        return (twice % 2 == 1) & (magnitudes < F(largest))
