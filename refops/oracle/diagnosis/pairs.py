"""Two conventions at once: which pairs are worth trying, and which of those a small part of the tensor refutes.

Some hundred conventions give ten thousand pairs. They come in the order of their promise, and most are refuted before
much is computed: by what each of the two does by itself, or on a sample of the region in which wrong entries lie
densest, one copy after the other. What explains a dump explains most of each array, so also of that sample. Only what
a sample does not refute is evaluated on more.
"""

from functools import cached_property

from refops.oracle.diagnosis.comparison import Result, places
from refops.oracle.diagnosis.probes import SUM_ARRAYS
from refops.oracle.geometry import Region
from refops.oracle.replay import SETTINGS, NotApplicable
from refops.scalings.arithmetic import REFERENCE

#: Pairs come in the order of their promise: so many are tried; once one explains all of the probes as many again and
#: `MORE_PAIRS`, for a better one, until `ENOUGH_PAIRS` do. Once one makes all bits of what confirms it, none is better:
#: `EQUAL_PAIRS` are tried for one that makes the same of more common conventions.
MOST_PAIRS, MORE_PAIRS, ENOUGH_PAIRS, EQUAL_PAIRS = 1200, 256, 8, 192
#: Share of an array that one of a pair must explain by itself.
LEADING = 0.25
#: Stages that leave scales and amaxes as they are: those from the multiplication on.
CAST_STAGES = {
    "multiply",
    "product-rounding",
    "cast",
    "saturation",
    "sign",
    "nan",
    "subnormals",
    "random",
}
#: Stages of sums.
SUM_STAGES = {"sum", "sum-order", "sum-rows", "row-gradient"}


class Pairs:
    """The search for pairs in one diagnosis.

    Args:
        search: the `Search`.
        singles: `Result` of each convention by itself, with what its replay made.
    """

    def __init__(self, search, singles):
        self.search, self.case, self.singles = search, search.case, singles
        self.region = search.probes.probes[0]
        self._left = {}

    def results(self):
        """Results of the pairs that could explain what no single convention does."""
        search = self.search
        results = self._with_readings()
        region = self._smaller_region()
        search.setting.whole_halo = False
        tried, clear = 0, sum(r.is_clear for r in results)
        most = MORE_PAIRS if clear else MOST_PAIRS
        for first, second in self.tried():
            if search.budget.is_spent() or clear >= ENOUGH_PAIRS or tried >= most:
                break
            tried += 1
            if self.leave_too_much(first, second):
                continue
            pair = (*first.candidate, *second.candidate)
            try:
                if search.is_refuted(pair):
                    continue
                result = search.evaluate(pair, [self.region if has_other_blocks(pair) else region], sums=1 << 14)
            except (NotApplicable, ValueError, LookupError):  # two that do not fit together
                continue
            if result.promising:
                results.append(result)
            if result.is_clear:
                most = most if clear else 2 * tried + MORE_PAIRS
                clear += 1
                if result.exact and search.confirm(result).exact:
                    most = min(most, tried + EQUAL_PAIRS)
        return results

    def extensions(self, best):
        """Pairs of the best single explanation with another that together leave nothing unexplained."""
        results = []
        for other in self.singles if not best.candidate[0][0].alone else ():
            if other.candidate[0][0].last or other.candidate[0][0].alone:
                continue
            (a, choice_a), (b, choice_b) = best.candidate[0], other.candidate[0]
            if a is b or (not a.reads and a.stage_of(choice_a) == b.stage_of(choice_b)):
                continue
            pair = tuple(sorted((*best.candidate, *other.candidate), key=lambda item: places((item,))))
            try:
                if self.search.is_refuted(pair, exactly=True):
                    continue
                result = self.search.evaluate(pair, self.search.probes.probes, sums=1 << 14)
            except (NotApplicable, ValueError, LookupError):
                continue
            if result.exact:
                results.append(result)
        return results

    # --- which -------------------------------------------------------------------------------------

    @cached_property
    def _useful(self):
        """(readings, computing conventions) that could be half of an explanation."""
        useful = [r for r in self.singles if not r.candidate[0][0].alone and self._is_useful(r)]
        reads = [r for r in useful if r.candidate[0][0].reads and self.case.operation.kind != "dequantize"]
        return reads, [r for r in useful if r not in reads]

    def tried(self):
        """Pairs in which one convention alone explains a good part of some array; the best come first."""
        _, computes = self._useful
        order = {id(result): place for place, result in enumerate(computes)}
        leading = sorted((r for r in computes if _led_share(r) >= LEADING), key=lambda r: -_led_share(r))
        seen = set()
        for one in leading:
            seen.add(id(one))
            for other in computes:
                if id(other) not in seen:
                    pair = sorted((one, other), key=lambda r: order[id(r)])
                    if self._is_compatible(*pair):
                        yield pair

    def _is_useful(self, result):
        """Whether a convention could be half of an explanation.

        It must change something, much where much is wrong, and unless much is wrong in some array must not spoil one of
        which little is wrong. Codes under a wrong scale may all seem spoilt: the other half has to explain that scale.
        """
        search = self.search
        if result.candidate[0][0].reads and self.case.operation.kind != "dequantize":
            return True  # what another scale hides, a layout may still explain
        if self._is_dormant(result):
            return True
        effect = 0.0
        much = any(count.wrong > 0.5 * count.entries > 8 for count in result.counts.values())
        for name, count in result.counts.items():
            spoilt = count.damaged - _under_wrong_scales(name, result.counts)
            if not much and spoilt > 2 * count.wrong + 0.02 * count.entries:
                return False
            if name in SUM_ARRAYS:
                effect = max(effect, float(count.explained > 0 or count.damaged > 0))
        for region, made in result.made:
            for name, array in made.items():
                reference = search.reference_crop(name, region)
                if array is not reference and array.size:
                    different = 1 - search.count_same(name, reference, array) / array.size
                    wrong = search.parts(region)[name].wrong_count / array.size
                    effect = max(effect, different / max(min(wrong, 0.05), 1e-9) if wrong else different * 100)
        return effect > 0.05

    def _is_dormant(self, result):
        """Whether a convention is of the saturation and changes nothing: right scales leave nothing to saturate."""
        convention, choice = result.candidate[0]
        return convention.stage_of(choice) == "saturation" and all(
            made[name] is self.search.reference_crop(name, region) for region, made in result.made for name in made
        )

    def _is_compatible(self, first, second):
        """Whether two conventions change different stages and together can explain scales and amaxes."""
        (a, choice_a), (b, choice_b) = first.candidate[0], second.candidate[0]
        if a is b:
            return False
        stages = a.stage_of(choice_a), b.stage_of(choice_b)
        if stages[0] == stages[1] or SETTINGS in stages:
            return False
        scaling = self.case.scaling
        scales_follow = scaling is not None and scaling.choice(REFERENCE) is not None  # errors of codes choose scales
        for one, stage in ((first, stages[1]), (second, stages[0])):
            if stage in CAST_STAGES and not scales_follow:
                for name, count in one.counts.items():
                    scale_like = name.endswith("_scale_inv") or name.startswith("amax")
                    if scale_like and (count.share < 0.75 or count.damage(0.0) > 0.4):
                        return False
            if stage in SUM_STAGES:
                for name, count in one.counts.items():
                    if name not in SUM_ARRAYS and (count.share < 0.75 or count.damage(0.0) > 0.4):
                        return False
        return True

    def leave_too_much(self, first, second):
        """Whether one of two explains too little, or harms too much, of an array that the other leaves alone."""
        for one, other in ((first, second), (second, first)):
            if any(one.counts[name].refutes for name in self._left_by(other)):
                return True
        return False

    def _left_by(self, result):
        """Names of the matrices that a convention alone leaves equal to the reference, on all of the probes.

        Of what was tried on the sample alone none is said: what is rare may lie beside it; nor of what shows under
        other scales alone.
        """
        if self._is_dormant(result) or any(region == self.search.sample != self.region for region, _ in result.made):
            return []
        key = id(result)
        if key not in self._left:
            self._left[key] = [
                name
                for name in self.search.matrix_names
                if all(made[name] is self.search.reference_crop(name, region) for region, made in result.made)
            ]
        return self._left[key]

    # --- where -------------------------------------------------------------------------------------

    def _smaller_region(self):
        """The first probe, cut to fewer rows where much is wrong and blocks allow it."""
        region = self.region
        rows, columns = region.shape
        wrong = sum(p.wrong_count for p in self.search.parts(region).values())
        if rows * columns > 8192 and self.search.has_small_blocks and wrong > 0.05 * rows * columns:
            height = max(32, 8192 // columns // 32 * 32)
            return Region(slice(region.rows.start, min(region.rows.start + height, region.rows.stop)), region.columns)
        return region

    # --- readings ----------------------------------------------------------------------------------

    def _with_readings(self):
        """Pairs with readings: the replays exist already; only the dump is rearranged."""
        search, results = self.search, []
        reads, computes = self._useful
        for read in reads:
            item = read.candidate[0]
            arrays, facts = search.relaid((item,))
            key = ((item[0].name, repr(item[1])),)
            for other in computes:
                region, made = other.made[0]
                counts = _counts(search.parts(region, arrays, key), made)
                if counts is None:
                    continue
                result = Result((item, *other.candidate), counts, {**facts, **other.facts})
                if search.sum_names:
                    sums = {n: c for n, c in other.counts.items() if n in SUM_ARRAYS}
                    if any(arrays[n] is not search.outputs[n] for n in sums):
                        sums = search.evaluate_sums(search.replay(other.candidate), 1 << 14, arrays).counts
                    result.counts.update(sums)
                if result.promising:
                    results.append(result)
        candidates = [
            (*a.candidate, *b.candidate)
            for i, a in enumerate(reads)
            for b in reads[i + 1 :]
            if a.candidate[0][0] is not b.candidate[0][0] and (_solves_an_array(a) or _solves_an_array(b))
        ]
        return results + [
            r for r in search.try_all(candidates, lambda pair: search.evaluate(pair, [self.region])) if r.promising
        ]


def has_other_blocks(candidate):
    """Whether a candidate has blocks of another size than the settings: a small region may cut those."""
    return any(convention.stage_of(choice) == "blocks" for convention, choice in candidate)


def _under_wrong_scales(name, counts):
    """How many entries of an array of codes have a scale that is wrong in the dump; 0 for another array."""
    direction, is_data, _ = name.partition("_data")
    scales = counts.get(f"{direction}_scale_inv")
    return counts[name].entries * scales.wrong / scales.entries if is_data and scales and scales.entries else 0


def _counts(parts, made):
    """The `Count` of each array, or None where one of them refutes that a candidate explains the dump."""
    counts = {}
    for name, part in parts.items():
        counts[name] = part.compare(made[name])
        if counts[name].refutes:
            return None
    return counts


def _led_share(result):
    """The largest share of an array's wrong entries that a result explains, and the reference does not."""
    return max((count.gained / count.wrong for count in result.wrong_counts), default=0.0)


def _solves_an_array(result):
    return any(c.wrong and c.share > 0.9 for c in result.counts.values())
