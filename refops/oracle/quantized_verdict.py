"""The check of an operation that quantizes: the tensor's amax, the scales, the codes under the scales written, sums."""

import numpy as np

from refops.oracle import enclosure
from refops.oracle.draws import SharedDraws
from refops.oracle.enclosure import Bounds
from refops.oracle.entries import shown_code, shown_codes, shown_ends, shown_entry, shown_interval, shown_range
from refops.oracle.fairness import Fairness
from refops.oracle.geometry import Geometry
from refops.oracle.report import Mismatch
from refops.oracle.scale_rules import scale_rule
from refops.oracle.tally import bits_of, distance_of, outside
from refops.quantization.layout import ceil_div
from refops.quantization.quantize import amax_of_tile, random_bytes
from refops.quantization.result import DIRECTIONS
from refops.scalings import UNFUSED
from refops.tiles import for_each, tile_slices

F = np.float32


class QuantizedJudge:
    """The check of an operation that quantizes: amax, then scales, then codes, then sums."""

    def __init__(self, judge):
        self.judge, self.case, self.ulp = judge, judge.case, judge.ulp
        self.scaling = judge.case.scaling
        path = UNFUSED if self.case.operation.kind == "quantize" else self.scaling.path
        source = enclosure.RememberedBounds(enclosure.bounds_of(self.case, self.ulp, words=judge.words))
        rounded = source.rounded()
        self.values = rounded if path.casts_rounded else source
        in_float32 = enclosure.bounds_of(self.case, self.ulp, stored_float32=True, words=judge.words)
        self.amax_values = rounded if path.amax_rounded else in_float32
        self._amaxes, self._fairness, self._draws = {}, {}, {}
        self.dbias_values = rounded if path.dbias_rounded else source
        self.shape = source.shape

    def run(self):
        """Judge every output of the case."""
        given = [d for d in DIRECTIONS if any(name.endswith(d) or name.startswith(d) for name in self.judge.outputs)]
        works = [work for work in map(self._work_of, given) if work is not None]

        def judge_tile(rows, columns):  # in all directions, which have the same values there
            if not self.judge.gives_up():
                for work in works:
                    work(rows, columns)

        if works:
            for_each(tile_slices(self.shape), judge_tile)
        for name, fairness in self._fairness.items():
            self.judge.tallies[name].bias = fairness.bias()
            found = self._draws[name].found()
            if found is not None and not self.judge.tallies[name].count:
                self.judge.shared[name] = found
        if "dbias" in self.judge.outputs:
            self.judge.judge_sums("dbias", self.dbias_values, axis=0)

    def _given(self, name):
        return name in self.judge.outputs

    def _same(self, name):
        """Whether the dump has this array and it equals the reference."""
        return self._given(name) and np.array_equal(
            bits_of(self.judge.outputs[name]), bits_of(self.judge.reference[name])
        )

    # --- amax of the tensor -----------------------------------------------------------------------

    def _sources(self, columnwise):
        """(values that are cast, values of the tensor's amax) of one direction."""
        if columnwise and self.scaling.hadamard is not None:
            transformed = enclosure.HadamardBounds(self.values, self.scaling.hadamard)
            return transformed, transformed
        return self.values, self.amax_values

    def _amax_range(self, direction):
        """Judge a dumped tensor amax; return the (least, greatest) amax that scales are judged by.

        The dump's own where it is right, or wrong but followed by the scales; all acceptable ones where none is given,
        or where what was written beside it is right without it.
        """
        name, columnwise = f"amax_{direction}", direction == "columnwise"
        axis = int(not columnwise) if self.scaling.layout.amax == "rows" else None
        if self._same(name):
            return self.judge.outputs[name], self.judge.outputs[name]
        least, greatest = self._tensor_amax_bounds(self._sources(columnwise)[1], axis)
        if not self._given(name):
            return least, greatest
        written = self.judge.outputs[name]
        bounds = Bounds(least, greatest, np.zeros(least.shape, bool))
        self.judge.judge_numbers(name, written, bounds, (slice(0, written.size),))
        beside = next((n for n in (f"{direction}_scale_inv", f"{direction}_data") if self._given(n)), None)
        if beside is not None and self._same(beside) and not bounds.contain(written).all():
            return least, greatest
        return written, written

    def _tensor_amax_bounds(self, source, axis):
        """`enclosure.tensor_amax_bounds`, once for both directions of the same values."""
        key = source, axis
        if key not in self._amaxes:
            self._amaxes[key] = enclosure.tensor_amax_bounds(source, axis)
        return self._amaxes[key]

    # --- one direction ----------------------------------------------------------------------------

    def _work_of(self, direction):
        """A function that judges a rectangle (rows, columns) of a direction; None where nothing is left to judge."""
        columnwise = direction == "columnwise"
        names = {part: f"{direction}_{part}" for part in ("data", "scale_inv")} | {"amax": f"amax_{direction}"}
        geometry = Geometry(self.scaling, columnwise)
        self._count_blocks(geometry, names)
        has_amax = names["amax"] in self.case.slots
        tensor_right = not has_amax or not self._given(names["amax"]) or self._same(names["amax"])
        if tensor_right and all(self._same(names[part]) for part in ("data", "scale_inv") if self._given(names[part])):
            return None
        amax_range = self._amax_range(direction) if has_amax else None
        multiplier = self._per_tensor_multiplier(names, amax_range) if geometry.block is None else None
        source = self._sources(columnwise)[0]
        if geometry.block is None and not self._given(names["data"]):
            return None
        if self._given(names["data"]):
            stored = self.shape[::-1] if geometry.transposed else self.shape
            self._fairness[names["data"]], self._draws[names["data"]] = Fairness(), SharedDraws(stored)

        def work(rows, columns):
            if geometry.block is None:
                self._judge_codes(names, geometry, source, rows, columns, multiplier, amax_range)
            else:
                self._judge_blocks(names, geometry, source, rows, columns, amax_range, tensor_right)

        return work

    def _count_blocks(self, geometry, names):
        m, k = self.shape
        if geometry.block is None:
            return
        blocks = ceil_div(m, geometry.block[0]) * ceil_div(k, geometry.block[1])
        for part in ("data", "scale_inv"):
            if self._given(names[part]):
                self.judge.tallies[names[part]].blocks = blocks

    def _per_tensor_multiplier(self, names, amax_range):
        """Judge a per-tensor scale_inv; return the (least, greatest) scale that elements were multiplied by."""
        name = names["scale_inv"]
        if self.scaling.given is not None:
            if self._given(name):
                self.judge.judge_exact(name)
            return self.scaling.given, self.scaling.given
        scale_of = enclosure.encode_scale_of(self.scaling, self.case.inputs["x"].dtype)
        if not self._given(name):
            return tuple(end[0] for end in enclosure.float_scale_range(*amax_range, scale_of))
        written = self.judge.outputs[name]
        right, least, greatest = enclosure.float_scale_inverses(written, *amax_range, scale_of, self.scaling.fmt)
        if not right.all():
            if not (np.isfinite(written) & (written > 0)).all():  # no scale at all: codes are judged without it
                least, greatest = enclosure.float_scale_range(*amax_range, scale_of)
            ends = [F(1) / end for end in enclosure.float_scale_range(*amax_range, scale_of)[::-1]]
            self._wrong_scale(name, written, Bounds(*ends, np.zeros(1, bool)))
        return least[0], greatest[0]

    def _wrong_scale(self, name, written, shown):
        """Record a per-tensor scale_inv that no acceptable amax gives, also where it lies between the ends."""
        tally, slot = self.judge.tallies[name], self.case.slots[name]
        tally.wrong[...] = True
        distance = np.maximum(distance_of(written, shown, written.dtype), 1)

        def describe(index):
            text = shown_range(shown, (0,))
            return Mismatch(name, (0,), None, shown_entry(written[0], slot), text, float(distance[0]), {})

        tally.add(np.ones(1, bool), distance, describe)

    # --- blocks -----------------------------------------------------------------------------------

    def _judge_blocks(self, names, geometry, source, rows, columns, amax_range, tensor_right):
        tile_shape = (rows.stop - rows.start, columns.stop - columns.start)
        tiles = [self._tiles(names[part], geometry, rows, columns) for part in ("data", "scale_inv")]
        if tensor_right and self._tile_is_reference(*tiles):
            return
        (codes, expected), (written, _) = tiles
        bounds = source.read(rows, columns)
        layout = self.scaling.layout
        if layout.scale_format is not None and not layout.two_level:  # TE's kernels may multiply-add with +0
            bounds = bounds.with_either_zero()
        amax = enclosure.block_amax_bounds(bounds, *geometry.block)
        tensor_amax = right = None
        if amax_range is not None:
            tensor_amax = tuple(amax_of_tile(layout, end, rows, columns, geometry.columnwise) for end in amax_range)
        rule = scale_rule(self.scaling, self.case.inputs["x"].dtype, amax, tensor_amax, geometry, bounds)
        if written is not None:
            right = rule.right(written)
            if geometry.block != geometry.run:
                right &= geometry.agree_within_blocks(written, right)
            self._record_scales(names, geometry, rows, columns, written, right, rule)
        if codes is None:
            return
        if written is None:
            multipliers = rule.multipliers_without_scales(codes)
        else:
            multipliers = rule.multipliers(written)
            usable = rule.usable(written)
            if not usable.all():
                pairs = zip(multipliers, rule.all_multipliers(), strict=True)
                multipliers = tuple(np.where(usable, own, any_right) for own, any_right in pairs)
        same = multipliers[0] is multipliers[1]
        element_multipliers = [geometry.expand(m, tile_shape) for m in multipliers[: 1 if same else 2]]
        amax = [rule.to_runs(end) for end in rule.amax]

        def details(at):
            run = tuple(i // edge for i, edge in zip(at, geometry.run, strict=True))
            found = {"amax": shown_interval(amax[0][run], amax[1][run])}
            if written is not None:
                found["scale"] = shown_entry(written[run], self.case.slots[names["scale_inv"]])
            return found

        least, greatest = element_multipliers[0], element_multipliers[-1]
        misread = None if right is None else geometry.expand(~right, tile_shape) & (codes == expected)
        self._record_codes(names, geometry, rows, columns, codes, bounds, least, greatest, details, misread)

    def _tiles(self, name, geometry, rows, columns):
        """Codes or scales of a rectangle, (of the dump, of the reference); (None, None) where they were not dumped."""
        if not self._given(name):
            return None, None
        arrays = self.judge.outputs[name], self.judge.reference[name]
        if name.endswith("_data"):
            return tuple(geometry.codes(array, self.shape, rows, columns) for array in arrays)
        return tuple(geometry.scales(array, rows, columns) for array in arrays)

    def _tile_is_reference(self, codes, scales):
        """Whether both pairs of `_tiles` agree."""
        return _equal(*codes) and _equal(*scales)

    # --- records ----------------------------------------------------------------------------------

    def _record_scales(self, names, geometry, rows, columns, written, right, rule):
        wrong = ~right
        if not wrong.any():
            return
        name = names["scale_inv"]
        slot, tally = self.case.slots[name], self.judge.tallies[name]
        tally.wrong[geometry.scale_index(rows, columns)] |= wrong.T if geometry.scales_transposed else wrong
        tally.blocks_touched += geometry.count_blocks(wrong, geometry.run)
        lowest, highest = (rule.to_runs(end) for end in rule.range)
        if written.dtype == np.float32:
            distance = np.maximum(distance_of(written, Bounds(lowest, highest, wrong), written.dtype), 1)
        else:
            distance = outside(written, lowest, highest)
        least, greatest = (rule.to_runs(end) for end in rule.amax)

        def describe(at):
            at = tuple(int(i) for i in at)
            row, column = rows.start + at[0] * geometry.run[0], columns.start + at[1] * geometry.run[1]
            return Mismatch(
                name,
                geometry.stored_scale(rows, columns, at),
                (row, column),
                shown_entry(written[at], slot),
                shown_ends(lowest[at], highest[at], slot),
                float(distance[at]),
                {},
                amax=shown_interval(least[at], greatest[at]),
            )

        tally.add(wrong, distance, describe)

    def _record_codes(self, names, geometry, rows, columns, codes, bounds, least, greatest, details, misread):
        """Judge codes of a rectangle; `misread`: those of the reference under wrong scales, bool, or None for none."""
        fmt, name = self.scaling.fmt, names["data"]
        bits = self._random_bits(geometry, rows, columns)
        lowest, highest = enclosure.code_bounds(bounds, least, greatest, fmt, bits)
        if isinstance(bits, str):
            low = bounds.lo * least
            self._fairness[name].add(low, codes, fmt)
            high = low if bounds.lo is bounds.hi and least is greatest else bounds.hi * greatest
            seen = (rows, columns, (low, high), codes)
            if geometry.transposed:
                seen = (columns, rows, (low.T, high.T), codes.T)
            self._draws[name].add(*seen, fmt)
        wrong = ~enclosure.codes_inside(codes, lowest, highest, bounds.nan, fmt)
        if not wrong.any():
            return
        slot, tally = self.case.slots[name], self.judge.tallies[name]
        self._mark(tally.wrong, geometry, rows, columns, wrong)
        misread = np.zeros_like(wrong) if misread is None else misread & wrong
        self._mark(tally.evident, geometry, rows, columns, wrong & ~misread)
        if geometry.block is not None:
            tally.blocks_touched += geometry.count_blocks(wrong, (1, 1))
        order = enclosure.code_order
        masked = codes & np.uint8(len(fmt.values) - 1)
        distance = outside(order(masked, fmt), order(lowest, fmt), order(highest, fmt))

        def describe(at):
            at = tuple(int(i) for i in at)
            row, column = rows.start + at[0], columns.start + at[1]
            acceptable = shown_codes(lowest[at], highest[at], bounds.nan[at], fmt)
            return Mismatch(
                name,
                geometry.stored_element(row, column, slot.shape),
                (row, column),
                shown_code(codes[at], fmt),
                acceptable,
                float(distance[at]),
                self.judge.inputs_at(row, column),
                **details(at),
            )

        if geometry.transposed:  # first is first as stored
            tally.add(wrong.T, distance.T, lambda at: describe(at[::-1]), misread.T)
        else:
            tally.add(wrong, distance, describe, misread)

    def _mark(self, marks, geometry, rows, columns, wrong):
        """Set the wrong elements in `marks`, of the stored shape; packed codes share a byte."""
        wrong = wrong.T if geometry.transposed else wrong
        if geometry.packed > 1:
            wrong = np.logical_or.reduce([wrong[:, i :: geometry.packed] for i in range(geometry.packed)])
        geometry.matrix(marks, self.shape)[geometry.data_index(rows, columns)] |= wrong

    def _random_bits(self, geometry, rows, columns):
        random = self.scaling.random
        if random is None:
            return None
        if self.judge.random_bits == "any":
            return "any"
        columnwise = geometry.columnwise
        outer, inner = geometry.layout.oriented((rows, columns), columnwise)
        bits = random_bytes(random, outer, inner, self.shape, columnwise)
        return bits.T if columnwise else bits

    def _judge_codes(self, names, geometry, source, rows, columns, multiplier, amax_range):
        """Codes of a tile under one multiplier for the tensor."""
        codes, expected = self._tiles(names["data"], geometry, rows, columns)
        scale_right = self._same(names["scale_inv"]) or self.scaling.given is not None
        if scale_right and _equal(codes, expected):
            return
        bounds = source.read(rows, columns)
        details = {"scale": f"encode scale {shown_interval(*multiplier)}"}
        if amax_range is not None and self.scaling.given is None:
            details["amax"] = shown_interval(amax_range[0][0], amax_range[1][0])
        wrong_scale = self._given(names["scale_inv"]) and self.judge.tallies[names["scale_inv"]].count
        misread = codes == expected if wrong_scale else None
        self._record_codes(names, geometry, rows, columns, codes, bounds, *multiplier, lambda at: details, misread)


def _equal(array, other):
    """Whether two arrays, or None and None, have the same bits."""
    return array is other or np.array_equal(bits_of(array), bits_of(other))
