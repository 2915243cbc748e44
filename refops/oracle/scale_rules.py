"""Which scales are right for the blocks of a tile, and by what a block's elements are multiplied under a scale.

Both follow from the rules that a scaling declares: they are monotone in the amax, so their values at the ends of the
interval that an amax may lie in bound all others. Two kinds of scales: codes, which say themselves what elements are
multiplied by, and float32 numbers, which are traced back to the amaxes that give them.
"""

from functools import reduce

import numpy as np

from refops.formats import encode_tile
from refops.oracle import enclosure
from refops.quantization.layout import padded_blocks
from refops.scalings.arithmetic import REFERENCE
from refops.scalings.declaration import FLT_MAX

F = np.float32


def scale_rule(scaling, dtype, amax, tensor_amax, geometry, bounds):
    """The `ScaleRule` of a tile.

    Args:
        dtype: of the unquantized tensor.
        amax: (least, greatest) amax of each block.
        tensor_amax: (least, greatest) amax of the tensor, shaped to meet the tile's runs; None where none is kept.
        geometry: the `Geometry` of the direction.
        bounds: the tile's elements, `Bounds`.
    """
    if scaling.layout.scale_format is None:
        return FloatScales(scaling, dtype, amax, geometry, bounds)
    kind = CodedScales if scaling.choice(REFERENCE) is None else ChosenScales
    return kind(scaling, dtype, amax, geometry, bounds, tensor_amax)


class ScaleRule:
    """Scales of the blocks of a tile.

    Attributes:
        amax: (least, greatest) amax of each block.
        range: (lowest, highest) acceptable scale of each block, as stored.
    """

    def __init__(self, amax, geometry, bounds):
        self.amax, self._geometry, self._bounds = amax, geometry, bounds

    def to_runs(self, blocks):
        """Repeat an array over blocks to the runs that scales are stored for."""
        return self._geometry.blocks_to_runs(blocks, self._bounds.lo.shape)

    def right(self, written):
        """Whether each written scale (over runs) is acceptable."""
        lowest, highest = (self.to_runs(end) for end in self.range)
        return (lowest <= written) & (written <= highest)

    def usable(self, written):
        """Which written scales say at all by what elements were multiplied."""
        raise NotImplementedError

    def multipliers(self, written):
        """(least, greatest) multiplier of each run's elements under the scale that was written."""
        raise NotImplementedError

    def all_multipliers(self):
        """(least, greatest) multiplier of each run's elements under any acceptable scale."""
        raise NotImplementedError

    def multipliers_without_scales(self, codes):
        """The same for a dump of `codes` alone; a rule that chooses among scales takes what fits them best."""
        return self.all_multipliers()


class FloatScales(ScaleRule):
    """Float32 decode scales, the reciprocals of encode scales."""

    def __init__(self, scaling, dtype, amax, geometry, bounds):
        super().__init__(amax, geometry, bounds)
        self._fmt, self._traced = scaling.fmt, None
        self._scale_of = enclosure.encode_scale_of(scaling, dtype)
        low, high = enclosure.float_scale_range(*amax, self._scale_of)
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


class CodedScales(ScaleRule):
    """Codes of a scale format, perhaps under a scale of the tensor (or of the row).

    Attributes:
        levels: what the declared `tensor_scale` gives at the tensor amaxes that bound all others; one where that is
            known or plays no part.
    """

    def __init__(self, scaling, dtype, amax, geometry, bounds, tensor_amax):
        super().__init__(amax, geometry, bounds)
        self._format, self._numbers = scaling.layout.scale_format, scaling.numbers(dtype)
        self._multiplier = scaling.multiplier(REFERENCE)
        self.levels = tensor_levels(scaling, tensor_amax)
        self.range = self._codes_of(scaling.scale_code(REFERENCE))

    def _codes_of(self, scale_code):
        """(lowest, highest) code of each block under a rule."""
        least, greatest = self.amax
        low = _lowest(scale_code(least, level, self._numbers) for level in self.levels)
        if len(self.levels) == 1 and greatest is least:
            return low, low
        return low, _highest(scale_code(greatest, level, self._numbers) for level in self.levels)

    def _magnitude(self, written):
        """Codes without their sign."""
        return self._format.magnitude_code(written)

    def usable(self, written):
        return ~np.isnan(self._format.values[self._magnitude(written)])

    def multipliers(self, written):
        return self._multipliers_between(*[self._magnitude(written)] * 2)

    def all_multipliers(self):
        return self._multipliers_between(*(self.to_runs(code) for code in self.range))

    def _multipliers_between(self, lowest, highest):
        """(least, greatest) multiplier under codes of a range: it falls where the code grows."""
        least = _lowest(self._multiplier(highest, level) for level in self.levels)
        if len(self.levels) == 1 and lowest is highest:
            return least, least
        return least, _highest(self._multiplier(lowest, level) for level in self.levels)


def tensor_levels(scaling, tensor_amax):
    """What `tensor_scale` gives at the ends of a range of tensor amaxes, and next to its special cases 0 and inf."""
    tensor_scale = scaling.tensor_scale(REFERENCE)
    if tensor_scale is None:
        return (F(0),)
    least, greatest = tensor_amax
    if least is greatest or np.array_equal(least, greatest):
        return (tensor_scale(least),)
    smallest, largest = enclosure.ordinary_ends(least, greatest)
    return tuple(tensor_scale(amax) for amax in (least, greatest, smallest, largest))


class ChosenScales(CodedScales):
    """Codes of the candidate with the smallest error: 4over6."""

    def __init__(self, scaling, dtype, amax, geometry, bounds, tensor_amax):
        super().__init__(scaling, dtype, amax, geometry, bounds, tensor_amax)
        self._fmt, self._tensor_amax = scaling.fmt, tensor_amax
        candidates = scaling.choice(REFERENCE).candidates
        self._error, self._decode_factor = scaling.choice(REFERENCE).error, scaling.decode_factor(REFERENCE)
        self.candidates = [self._codes_of(_code_of(candidate)) for candidate in candidates]
        self.range = _lowest(low for low, _ in self.candidates), _highest(high for _, high in self.candidates)

    def right(self, written):
        inside = [(self.to_runs(low) <= written) & (written <= self.to_runs(high)) for low, high in self.candidates]
        taken = [self.to_runs(may) & within for may, within in zip(self.may_take(), inside, strict=True)]
        return np.logical_and.reduce(inside) | np.logical_or.reduce(taken)

    def multipliers_without_scales(self, codes):
        """Those of the permitted candidate under which the fewest codes of a block are wrong."""
        bounds, geometry = self._bounds, self._geometry
        fewest = chosen = None
        for may, ends in zip(self.may_take(), self.candidates, strict=True):
            multipliers = self._multipliers_between(*(self.to_runs(code) for code in ends))
            each = [geometry.expand(m, codes.shape) for m in multipliers]
            wrong = ~enclosure.codes_inside(
                codes, *enclosure.code_bounds(bounds, *each, self._fmt), bounds.nan, self._fmt
            )
            count = np.where(may, padded_blocks(wrong, *geometry.block).sum(axis=(1, 3)), np.inf)
            if chosen is None:
                fewest, chosen = count, multipliers
                continue
            better = self.to_runs(count < fewest)
            fewest = np.minimum(fewest, count)
            chosen = [np.where(better, new, old) for new, old in zip(multipliers, chosen, strict=True)]
        return tuple(chosen)

    def may_take(self):
        """For each candidate, the blocks that may take it."""
        if len(self.levels) > 1:  # errors at the ends of a range of amaxes bound nothing between them
            return [np.ones(low.shape, bool) for low, _ in self.candidates]
        errors = [self._block_errors(low, high) for low, high in self.candidates]
        may = []
        for i, (low, _) in enumerate(errors):
            # A candidate is kept where its error is less than those before it, never where one is NaN (as it is under
            # an infinite amax), and where none after it is less.
            before = [low <= other for _, other in errors[:i]]
            after = [~(other < low) for _, other in errors[i + 1 :]]
            may.append(np.logical_and.reduce([*before, *after]))
        return may

    def _block_errors(self, lowest, highest):
        """(least, greatest) error of each block, over the bounds of its elements and any order of the sum."""
        bounds, block = self._bounds, self._geometry.block
        ends = [padded_blocks(bounds.lo, *block)]
        width = 0.0
        if bounds.hi is not bounds.lo:
            ends.append(padded_blocks(bounds.hi, *block))
            width = np.abs(ends[1].astype(np.float64) - ends[0])
        codes = (lowest,) if lowest is highest else (lowest, highest)
        found = [self._element_errors(code, x, width) for code in codes for x in ends]
        least, greatest = _lowest(low for low, _ in found), _highest(high for _, high in found)
        size = block[0] * block[1]
        underflow = size * 2.0**-149
        total_low = least.sum(axis=(1, 3)) * (1 - (size + 2) * 2.0**-23) - underflow
        total_high = greatest.sum(axis=(1, 3)) * (1 + (size + 2) * 2.0**-23) + underflow
        unsure = padded_blocks(bounds.nan, *block).any(axis=(1, 3)) | self._overflows(highest)
        unsure |= highest - lowest > 1  # codes between them, of which nothing is known
        total_low, total_high = np.where(unsure, 0.0, total_low), np.where(unsure, np.inf, total_high)
        return total_low, np.where(total_high >= FLT_MAX, np.inf, total_high)

    def _element_errors(self, code, x, width):
        """(least, greatest) error of elements that lie `width` or less from the float32 `x`, under a scale code.

        An error grows with the distance of what a code stands for from the element. The distance has the roundings of a
        float32 formula; and of an element near `x`, whose code may be another, it is at most `width` more or less.
        """
        amax = self._tensor_amax[0].astype(np.float64)
        multiplier = self._multiplier(code, self.levels[0])[:, None, :, None]
        value = self._fmt.values[encode_tile(x * multiplier, self._fmt)]
        restored = value * self._decode_factor(code, amax)[:, None, :, None]
        slack = 2.0**-22 * np.abs(restored) + 2.0**-23 * np.abs(x) + width
        scale, amax = self._format.values[code][:, None, :, None], amax[:, None, :, None]
        errors = [self._error(value, scale, amax, moved) for moved in (x - slack, x + slack)]
        return np.where(np.abs(restored - x) <= slack, 0.0, np.minimum(*errors)), np.maximum(*errors)

    def _overflows(self, code):
        """Blocks under a scale code where float32 errors may be infinite."""
        error = self._error(self._fmt.max, self._format.values[code], self._tensor_amax[0], F(0))
        return ~np.isfinite(error * F(1 + 2.0**-20))


def _code_of(candidate):
    return lambda amax, level, numbers: candidate(amax, level, numbers)[0]


def _lowest(arrays):
    return reduce(np.minimum, arrays)


def _highest(arrays):
    return reduce(np.maximum, arrays)
