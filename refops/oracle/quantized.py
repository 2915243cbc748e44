"""The check of an operation that quantizes: the tensor's amax, the scales, the codes under the scales written, sums."""

import numpy as np

from refops import ops
from refops.oracle import enclosure
from refops.oracle.enclosure import Bounds
from refops.oracle.fairness import Fairness
from refops.oracle.geometry import DumpArrays, Geometry, agree_within_blocks
from refops.oracle.report import Mismatch
from refops.oracle.scale_rules import ByteScales, FloatScales, FourOverSixScales, TwoLevelScales
from refops.oracle.show import shown_code, shown_codes, shown_ends, shown_entry, shown_interval, shown_range
from refops.oracle.tally import bits_of, distance_of, outside
from refops.quantization import nvfp4
from refops.quantization.layout import ceil_div
from refops.scaling import BlockScaling, DelayedScaling, MXFP8Scaling, NVFP4Scaling
from refops.tiles import for_each, tile_slices

F = np.float32


class QuantizedJudge:
    """The check of an operation that quantizes: amax, then scales, then codes, then sums."""

    def __init__(self, judge):
        self.judge, self.case, self.ulp = judge, judge.case, judge.ulp
        self.scaling = judge.case.scaling
        self.dump, self.reference = DumpArrays(judge.outputs, self.case), DumpArrays(judge.reference, self.case)
        path = ops.PATHS["unfused"] if self.case.operation.kind == "quantize" else ops.path_of(self.scaling)
        source = enclosure.bounds_of(self.case, self.ulp)
        rounded = source.rounded()
        self.values = rounded if path.casts_rounded else source
        self.amax_values = rounded if path.amax_rounded else source
        self.dbias_values = rounded if path.dbias_rounded else source
        self.shape = source.shape

    def run(self):
        """Judge every output of the case."""
        for direction in ("rowwise", "columnwise"):
            if any(name.endswith(direction) or name.startswith(direction) for name in self.judge.outputs):
                self._judge_direction(direction)
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
        if columnwise and isinstance(self.scaling, NVFP4Scaling) and self.scaling.rht:
            transformed = enclosure.HadamardBounds(self.values, self.scaling.sign_mask)
            return transformed, transformed
        return self.values, self.amax_values

    def _amax_range(self, direction):
        """(least, greatest) tensor amax to go on with: the dump's own where given, else all acceptable ones.

        A dumped amax is judged here. Where it is not given the reference's stands in as long as everything else that
        depends on it equals the reference; `_judge_direction` asks for the whole range only where something differs.
        """
        name = f"amax_{direction}"
        columnwise = direction == "columnwise"
        axis = None
        if isinstance(self.scaling, NVFP4Scaling) and self.scaling.row_scaled:
            axis = 0 if columnwise else 1
        if self._given(name):
            written = self.judge.outputs[name]
            if not self._same(name):
                least, greatest = enclosure.tensor_amax_bounds(self._sources(columnwise)[1], axis)
                self._judge_amax(name, written, least, greatest)
            return written, written
        return enclosure.tensor_amax_bounds(self._sources(columnwise)[1], axis)

    def _judge_amax(self, name, written, least, greatest):
        self.judge.judge_numbers(
            name, written, Bounds(least, greatest, np.zeros(least.shape, bool)), (slice(0, written.size),)
        )

    # --- one direction ----------------------------------------------------------------------------

    def _judge_direction(self, direction):
        columnwise = direction == "columnwise"
        names = {part: f"{direction}_{part}" for part in ("data", "scale_inv")} | {"amax": f"amax_{direction}"}
        geometry = Geometry.of(self.scaling, columnwise)
        if names["amax"] not in self.case.slots:  # the scaling keeps none
            tensor_right, amax_range = True, None
        else:
            tensor_right = self._same(names["amax"]) or not self._given(names["amax"])
            amax_range = None
        parts = [names[part] for part in ("data", "scale_inv") if self._given(names[part])]
        if tensor_right and all(self._same(name) for name in parts):
            self._count_blocks(geometry, names)
            return
        if names["amax"] in self.case.slots:
            amax_range = self._amax_range(direction)
        multiplier = self._per_tensor_multiplier(names, amax_range) if geometry.block is None else None
        self._count_blocks(geometry, names)
        source = self._sources(columnwise)[0]
        if geometry.block is None and not self._given(names["data"]):
            return

        def work(rows, columns):
            if geometry.block is None:
                self._judge_codes(names, geometry, source, rows, columns, multiplier)
            else:
                self._judge_blocks(names, geometry, source, rows, columns, amax_range, tensor_right)

        self._fairness = Fairness()
        for_each(tile_slices(self.shape), work)
        if self._given(names["data"]):
            self.judge.tallies[names["data"]].bias = self._fairness.bias()

    def _count_blocks(self, geometry, names):
        m, k = self.shape
        if geometry.block is None:
            return
        blocks = ceil_div(m, geometry.block[0]) * ceil_div(k, geometry.block[1])
        for part in ("data", "scale_inv"):
            if self._given(names[part]):
                self.judge.tallies[names[part]].blocks = blocks

    def _per_tensor_multiplier(self, names, amax_range):
        """Judge a per-tensor scale_inv; return the (least, greatest) scale that elements were multiplied with."""
        name = names["scale_inv"]
        if isinstance(self.scaling, DelayedScaling):
            if self._given(name):
                self.judge.judge_exact(name)
            scale = F(self.scaling.scale)
            return scale, scale
        scale_of = enclosure.block_scale_of(self.scaling, self.case.inputs["x"].dtype)
        if not self._given(name):
            return tuple(end[0] for end in enclosure.float_scale_range(*amax_range, scale_of))
        written = self.judge.outputs[name]
        right, least, greatest = enclosure.float_scale_inverses(written, *amax_range, scale_of, self.scaling.fmt)
        if not right.all():
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
        codes = self._codes(self.dump, names, geometry, rows, columns)
        written = self._scales(self.dump, names, geometry, rows, columns)
        if tensor_right and self._tile_is_reference(names, geometry, rows, columns, codes, written):
            return
        bounds = source.read(rows, columns)
        least, greatest = enclosure.block_amax_bounds(bounds, *geometry.block)
        tile_amax = self._tile_amax(amax_range, geometry, rows, columns)
        rule = self._scale_rule(bounds, least, greatest, tile_amax, geometry, tile_shape)
        if written is not None:
            right = rule.right(written)
            if geometry.block != geometry.run:
                right &= agree_within_blocks(written, right, geometry)
            self._record_scales(names, geometry, rows, columns, written, right, rule, bounds)
        if codes is None:
            return
        multipliers = rule.all_multipliers() if written is None else rule.multipliers(written)
        same = multipliers[0] is multipliers[1]
        element_multipliers = [geometry.expand(m, tile_shape) for m in multipliers[: 1 if same else 2]]
        self._record_codes(
            names,
            geometry,
            rows,
            columns,
            codes,
            bounds,
            element_multipliers[0],
            element_multipliers[-1],
            rule,
            written,
        )

    def _codes(self, arrays, names, geometry, rows, columns):
        return geometry.codes(arrays, rows, columns) if self._given(names["data"]) else None

    def _scales(self, arrays, names, geometry, rows, columns):
        return geometry.scales(arrays, rows, columns) if self._given(names["scale_inv"]) else None

    def _tile_is_reference(self, names, geometry, rows, columns, codes, written):
        if codes is not None and not np.array_equal(codes, geometry.codes(self.reference, rows, columns)):
            return False
        if written is None:
            return True
        return np.array_equal(bits_of(written), bits_of(geometry.scales(self.reference, rows, columns)))

    def _tile_amax(self, amax_range, geometry, rows, columns):
        """The tensor's (least, greatest) amax, shaped to meet the runs of a tile."""
        if amax_range is None:
            return None
        if not self.scaling.row_scaled:
            return tuple(end.reshape(1, 1) for end in amax_range)
        return tuple(end[None, columns] if geometry.columnwise else end[rows, None] for end in amax_range)

    def _scale_rule(self, bounds, least, greatest, tile_amax, geometry, tile_shape):
        if isinstance(self.scaling, MXFP8Scaling):
            rule = ByteScales(self.scaling, least, greatest)
        elif isinstance(self.scaling, BlockScaling):
            rule = FloatScales(self.scaling, least, greatest, self.case.inputs["x"].dtype)
        elif self.scaling.four_over_six:
            rule = FourOverSixScales(self.scaling, least, greatest, tile_amax, bounds, geometry)
        else:
            rule = TwoLevelScales(self.scaling, least, greatest, tile_amax)
        rule.to_runs = lambda blocks: geometry.blocks_to_runs(blocks, tile_shape)
        return rule

    # --- records ----------------------------------------------------------------------------------

    def _record_scales(self, names, geometry, rows, columns, written, right, rule, bounds):
        wrong = ~right
        if not wrong.any():
            return
        name = names["scale_inv"]
        slot, tally = self.case.slots[name], self.judge.tallies[name]
        index, flipped = geometry.scale_index(rows, columns)
        tally.wrong[index] |= wrong.T if flipped else wrong
        tally.blocks_touched += geometry.count_blocks(wrong, geometry.run)
        lowest, highest = (rule.to_runs(end) for end in rule.range)
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

    def _record_codes(self, names, geometry, rows, columns, codes, bounds, least, greatest, rule, written):
        fmt, name = self.scaling.fmt, names["data"]
        bits = self._random_bits(geometry, rows, columns)
        lowest, highest = enclosure.code_bounds(bounds, least, greatest, fmt, bits)
        if isinstance(bits, str):
            self._fairness.add(bounds.lo * least, codes, fmt)
        wrong = ~enclosure.codes_inside(codes, lowest, highest, bounds.nan, fmt)
        if not wrong.any():
            return
        slot, tally = self.case.slots[name], self.judge.tallies[name]
        self._mark(tally, geometry, rows, columns, wrong)
        if geometry.block is not None:
            tally.blocks_touched += geometry.count_blocks(wrong, (1, 1))
        order = enclosure.code_order
        masked = codes & np.uint8(len(fmt.values) - 1)
        distance = outside(order(masked, fmt), order(lowest, fmt), order(highest, fmt))

        def describe(at):
            at = tuple(int(i) for i in at)
            row, column = rows.start + at[0], columns.start + at[1]
            amax = scale = ""
            if rule is not None:
                run = tuple(i // edge for i, edge in zip(at, geometry.run, strict=True))
                ends = [rule.to_runs(end)[run] for end in rule.amax]
                amax = shown_interval(*ends)
                if written is not None:
                    scale = shown_entry(written[run], self.case.slots[names["scale_inv"]])
            acceptable = shown_codes(lowest[at], highest[at], bounds.nan[at], fmt)
            return Mismatch(
                name,
                geometry.stored_element(row, column, slot.shape),
                (row, column),
                shown_code(codes[at], fmt),
                acceptable,
                float(distance[at]),
                self.judge.inputs_at(row, column),
                amax=amax,
                scale=scale,
            )

        tally.add(wrong, distance, describe)

    def _mark(self, tally, geometry, rows, columns, wrong):
        """Set the wrong elements in the stored array; two FP4 codes share a byte."""
        m, k = self.shape
        if geometry.transposed:
            wrong, rows, columns = wrong.T, columns, rows
            m, k = k, m
        if isinstance(self.scaling, NVFP4Scaling):
            wrong = wrong[:, 0::2] | wrong[:, 1::2]
            columns, k = slice(columns.start // 2, columns.stop // 2), k // 2
        tally.wrong.reshape(m, k)[rows, columns] |= wrong

    def _random_bits(self, geometry, rows, columns):
        scaling = self.scaling
        if not isinstance(scaling, NVFP4Scaling) or not scaling.stochastic_rounding:
            return None
        if self.judge.random_bits == "any":
            return "any"
        m, k = self.shape
        row_bits, column_bits = nvfp4.given_bits(scaling, m, k, not geometry.columnwise, geometry.columnwise)
        if not geometry.columnwise:
            return nvfp4.tile_bits(scaling, row_bits, rows, columns, k // 16, 0)
        return nvfp4.tile_bits(scaling, column_bits, columns, rows, m // 16, m * (k // 16)).T

    def _judge_codes(self, names, geometry, source, rows, columns, multiplier):
        """Codes of a tile under one multiplier for the tensor."""
        codes = geometry.codes(self.dump, rows, columns)
        scale_right = self._same(names["scale_inv"]) or isinstance(self.scaling, DelayedScaling)
        if scale_right and np.array_equal(codes, geometry.codes(self.reference, rows, columns)):
            return
        bounds = source.read(rows, columns)
        self._record_codes(names, geometry, rows, columns, codes, bounds, *multiplier, None, None)
