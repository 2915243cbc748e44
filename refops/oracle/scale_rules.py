"""Which scales are right for the blocks of a tile, and what a block's elements are multiplied with under a scale."""

import numpy as np

from refops.formats import E2M1, E4M3, E8M0, encode_tile
from refops.oracle import enclosure
from refops.oracle.geometry import repeat
from refops.quantization import mxfp8, nvfp4
from refops.quantization.layout import block_view

F = np.float32


class ScaleRule:
    """Scales of the blocks of a tile.

    Attributes:
        amax: (least, greatest) amax of each block.
        range: (lowest, highest) acceptable scale of each block, as stored.
        to_runs: function that repeats an array over blocks to the runs that scales are stored for.
    """

    def __init__(self, least, greatest, to_runs):
        self.amax, self.to_runs = (least, greatest), to_runs

    def right(self, written):
        """Whether each written scale (over runs) is acceptable."""
        lowest, highest = (self.to_runs(end) for end in self.range)
        return (lowest <= written) & (written <= highest)

    def usable(self, written):
        """Which written scales say at all what elements were multiplied with."""
        raise NotImplementedError

    def multipliers(self, written):
        """(least, greatest) multiplier of each run's elements under the scale that was written."""
        raise NotImplementedError

    def all_multipliers(self):
        """(least, greatest) multiplier of each run's elements under any acceptable scale."""
        raise NotImplementedError


class ByteScales(ScaleRule):
    """MXFP8: E8M0 bytes."""

    def __init__(self, scaling, least, greatest, to_runs):
        super().__init__(least, greatest, to_runs)
        self.range = tuple(mxfp8.scale_byte(end, scaling.fmt, scaling.scale_rounding) for end in (least, greatest))

    def usable(self, written):
        return written != E8M0.nan_code

    def multipliers(self, written):
        multiplier = mxfp8.ENCODE_MULTIPLIER[written]
        return multiplier, multiplier

    def all_multipliers(self):
        lowest, highest = (mxfp8.ENCODE_MULTIPLIER[self.to_runs(byte)] for byte in self.range)
        return highest, lowest


class FloatScales(ScaleRule):
    """FP8 blocks: float32 scale_inv."""

    def __init__(self, scaling, least, greatest, to_runs, dtype):
        super().__init__(least, greatest, to_runs)
        self._fmt, self._traced = scaling.fmt, None
        self._scale_of = enclosure.encode_scale_of(scaling, dtype)
        low, high = enclosure.float_scale_range(least, greatest, self._scale_of)
        self._scales = low, high
        self.range = F(1) / high, F(1) / low

    def usable(self, written):
        return np.isfinite(written) & (written > 0)

    def right(self, written):
        ends = (self.to_runs(end) for end in self.amax)
        right, *self._traced = enclosure.float_scale_inverses(written, *ends, self._scale_of, self._fmt)
        return right

    def multipliers(self, written):
        if self._traced is None:
            self.right(written)
        return tuple(self._traced)

    def all_multipliers(self):
        return tuple(self.to_runs(end) for end in self._scales)


class TwoLevelScales(ScaleRule):
    """NVFP4: E4M3 bytes under the encode scale of the tensor (or of the row)."""

    def __init__(self, scaling, least, greatest, to_runs, tile_amax):
        super().__init__(least, greatest, to_runs)
        self.encode = enclosure.global_scale_range(*tile_amax, scaling.e4m3_max)
        # (1, 1), or with row scaling (R, 1) or (1, C): meets runs as well as blocks
        self.range = tuple(
            nvfp4.block_scale_byte(amax, encode) for amax, encode in zip(self.amax, self.encode, strict=True)
        )

    def usable(self, written):
        return written & np.uint8(0x7F) != E4M3.nan_code

    def multipliers(self, written):
        byte = written & np.uint8(0x7F)
        return tuple(nvfp4.encode_multiplier(byte, end) for end in self.encode)

    def all_multipliers(self):
        lowest, highest = (self.to_runs(byte) for byte in self.range)
        return nvfp4.encode_multiplier(highest, self.encode[0]), nvfp4.encode_multiplier(lowest, self.encode[1])


class FourOverSixScales(TwoLevelScales):
    """NVFP4 with 4over6: the byte that maps the maximum to 6 or to 4, whichever has the smaller error."""

    def __init__(self, scaling, least, greatest, to_runs, tile_amax, bounds, geometry):
        self._scaling, self._tile_amax, self._bounds, self._geometry = scaling, tile_amax, bounds, geometry
        super().__init__(scaling, least, greatest, to_runs, tile_amax)
        self._by_factor = {
            factor: tuple(
                nvfp4.four_over_six_byte(amax, encode, F(factor))
                for amax, encode in zip(self.amax, self.encode, strict=True)
            )
            for factor in (1.0, 1.5)
        }
        self.range = self._by_factor[1.0][0], self._by_factor[1.5][1]

    def right(self, written):
        inside6, inside4 = (
            (self.to_runs(low) <= written) & (written <= self.to_runs(high)) for low, high in self._by_factor.values()
        )
        may_take6, may_take4 = (self.to_runs(may) for may in self._may_take())
        return (inside6 & inside4) | (inside6 & may_take6) | (inside4 & may_take4)

    def choices(self):
        """For 6 and for 4: which blocks may take it, and the (least, greatest) multiplier of its bytes, by block."""
        for may, (low, high) in zip(self._may_take(), self._by_factor.values(), strict=True):
            yield may, (nvfp4.encode_multiplier(high, self.encode[0]), nvfp4.encode_multiplier(low, self.encode[1]))

    def _may_take(self):
        """(blocks that may map their maximum to 6, blocks that may map it to 4)."""
        error6, error4 = (self._error_of(bytes_) for bytes_ in self._by_factor.values())
        if not np.array_equal(*self._tile_amax):  # errors at the ends of a range of amaxes bound nothing between them
            return np.ones(error6[0].shape, bool), np.ones(error4[0].shape, bool)
        # The kernel takes 4 where error4 < error6: never where an error is NaN, as it is under an infinite amax.
        return ~(error4[1] < error6[0]), error4[0] <= error6[1]

    def _error_of(self, bytes_):
        """(least, greatest) error of each block, over the bounds of its elements and any order of the sum."""
        least = greatest = None
        for byte, encode, amax in zip(bytes_, self.encode, self._tile_amax, strict=True):
            low, high = self._block_errors(byte, encode, amax)
            least = low if least is None else np.minimum(least, low)
            greatest = high if greatest is None else np.maximum(greatest, high)
        return least, greatest

    def _block_errors(self, byte, encode, amax):
        shape = self._bounds.lo.shape
        block = self._geometry.block
        scale = repeat(byte, block, shape)
        multiplier = nvfp4.encode_multiplier(scale, encode)
        ends = (self._bounds.lo,) if self._bounds.hi is self._bounds.lo else (self._bounds.lo, self._bounds.hi)
        terms = []
        for values in ends:
            codes = encode_tile(values * multiplier, E2M1)
            restored = (
                E2M1.values[codes].astype(np.float64) * E4M3.values[scale] * amax / (6.0 * self._scaling.e4m3_max)
            )
            difference = np.abs(restored - values)
            numerator = np.abs(restored) * (6.0 * self._scaling.e4m3_max)  # in float32 in the kernel: it may overflow
            huge = numerator * (1 + 2.0**-22) >= np.finfo(F).max
            difference = np.where(huge, np.inf, difference)
            slack = 2.0**-22 * np.abs(restored) + 2.0**-23 * np.abs(values)
            terms.append((np.maximum(difference - slack, 0.0), difference + slack))
        # Between the ends of an element's interval its error is at most the interval's width away from one of them.
        width = np.abs(self._bounds.hi.astype(np.float64) - self._bounds.lo)
        low = np.maximum(np.minimum.reduce([t[0] for t in terms]) - width, 0.0)
        high = np.maximum.reduce([t[1] for t in terms]) + width
        if self._scaling.four_over_six == "mse":
            low, high = low * low, high * high
        size = block[0] * block[1]
        underflow = size * 2.0**-149
        total_low = block_view(low, *block).sum(axis=(1, 3)) * (1 - (size + 2) * 2.0**-23) - underflow
        total_high = block_view(high, *block).sum(axis=(1, 3)) * (1 + (size + 2) * 2.0**-23) + underflow
        unsure = np.isinf(total_low) | block_view(self._bounds.nan, *block).any(axis=(1, 3))
        total_low, total_high = np.where(unsure, 0.0, total_low), np.where(unsure, np.inf, total_high)
        return total_low, np.where(total_high >= np.finfo(F).max, np.inf, total_high)
