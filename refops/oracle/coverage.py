"""What the input of a right dump covered, and so how much the verdict is worth.

RIGHT says that nothing wrong was written for this input. An input without ties says nothing of how ties are rounded;
one with a positive amax does not tell whether magnitudes were taken. So the report counts what shows such faults.
"""

from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np

from refops.oracle.geometry import TILE, Geometry
from refops.quantization.hadamard import HadamardSource
from refops.quantization.layout import block_amax, padded_blocks
from refops.quantization.quantize import amax_of_tile
from refops.quantization.result import DIRECTIONS
from refops.scalings import UNFUSED
from refops.scalings.arithmetic import REFERENCE
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
        return "\n         ".join([f"{where}: {counts}", *(["; ".join(parts)] if parts else [])])

    def _where_amax(self):
        last = tuple(count - 1 for count in self.tiles)
        tile = "the only tile" if self.tiles == (1, 1) else f"tile {self.tile[0]}, {self.tile[1]}"
        tile = "last tile" if self.tile == last != (0, 0) else tile
        return f"amax {self.amax:.9g} in row {self.row}, column {self.column} ({tile})"

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
    path = UNFUSED if case.operation.kind == "quantize" else case.scaling.path
    source = case.source.rounded() if path.casts_rounded else case.source
    copies = [_Codes(case, copy, outputs, reference) for copy in DIRECTIONS if f"{copy}_data" in outputs]
    return _Count(source).run(copies, len(copies)) if copies else None


class _Count:
    """Counts over the tiles of a source, each read once."""

    def __init__(self, source):
        self.source, self.shape = source, source.shape
        self.tiles = tuple(ceil_div(size, TILE) for size in self.shape)
        self.elements, self.amax, self.at = 0, None, (0, 0)
        self.totals = dict.fromkeys(("small", "special"), 0)

    def run(self, stores, copies):
        """The `Coverage` of what each of `stores` counts."""

        def look(rows, columns):
            tile = self.source.read(rows, columns)
            self._look(tile, rows, columns)
            for store in stores:
                for name, count in store.count(self.source, tile, rows, columns).items():
                    self.totals[name] = self.totals.get(name, 0) + int(count)

        for_each(self._chosen(), look)
        where = {} if self.amax is None else {"row": self.at[0], "column": self.at[1]}
        tile = tuple(i // TILE for i in self.at)
        of = self.shape[0] * self.shape[1]
        return Coverage(self.elements, of, copies, amax=self.amax, tile=tile, tiles=self.tiles, **where, **self.totals)

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

    def count(self, source, tile, rows, columns):
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

    def count(self, source, tile, rows, columns):
        """Numbers of a tile by field of `Coverage`."""
        if self.geometry.columnwise and self.scaling.hadamard is not None:
            tile = HadamardSource(source, self.scaling.hadamard).read(rows, columns)
        scaled = tile * self.geometry.expand(self._multipliers(tile, rows, columns), tile.shape)
        codes = self.geometry.codes(self.codes, self.shape, rows, columns)
        found = {
            "ties": 0 if self.scaling.random is not None else np.count_nonzero(is_tie(scaled, *self.form)),
            "subnormals": np.count_nonzero(self.is_subnormal[codes]),
            "flushed": np.count_nonzero(self.is_zero[codes] & (tile != 0)),
            "saturated": np.count_nonzero((np.abs(scaled) > self.beyond) & np.isfinite(tile)),
        }
        return found | self._blocks(tile)

    def _multipliers(self, tile, rows, columns):
        """What elements of each run of a tile are multiplied by."""
        scaling, geometry = self.scaling, self.geometry
        if geometry.block is None:
            return scaling.block_scale(REFERENCE)(self.amax, F(0), self.numbers)[1]
        tensor_scale = F(0)
        if self.layout.two_level:
            amax = amax_of_tile(self.layout, self.amax, rows, columns, geometry.columnwise)
            tensor_scale = scaling.tensor_scale(REFERENCE)(amax)
        multiplier = scaling.multiplier(REFERENCE)
        if multiplier is not None:
            return multiplier(geometry.scales(self.scales, rows, columns), tensor_scale)
        maxima = block_amax(padded_blocks(tile, *geometry.block))
        return geometry.blocks_to_runs(
            scaling.block_scale(REFERENCE)(maxima, tensor_scale, self.numbers)[1], tile.shape
        )

    def _blocks(self, tile):
        if self.geometry.block is None:
            return {}
        blocks = padded_blocks(tile, *self.geometry.block)
        most, least = (reduce(blocks, axis=(1, 3)) for reduce in (np.fmax.reduce, np.fmin.reduce))
        return {
            "blocks": most.size,
            "zero_blocks": np.count_nonzero((most == 0) & (least == 0)),
            "negative_blocks": np.count_nonzero(-least > most),
        }


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
