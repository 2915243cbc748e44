"""Which convention explains a wrong dump, and where: every known one is tried and compared with it.

A convention explains a dump when its replay (`refops.oracle.replay`) equals it where it is wrong and changes little
where it is right (`comparison`). It is tried everywhere; then in the copy, the rows and the columns in which it shows
(`inference`); then in `pairs`. Beside conventions stands what is right at another place (`moved`).

Large tensors are searched on probes, tiles of 128 x 128 where wrong entries lie densest, and what is found is confirmed
on bands of rows; each sum runs over a whole row or column. What explains nothing of a sample, a part of the first probe
with hundreds of wrong entries, is not tried on more. Nothing here decides whether a dump is right, and
a dump that no convention explains gets no explanation.
"""

import dataclasses
from functools import cached_property

import numpy as np

from refops.formats import E8M0
from refops.oracle.conventions import CONVENTIONS
from refops.oracle.conventions.reading import Dump
from refops.oracle.diagnosis.comparison import LEAST_WRONG, Part, Result, same
from refops.oracle.diagnosis.elements import other_scales, stored_marks
from refops.oracle.diagnosis.pairs import SUM_STAGES, Pairs, has_other_blocks
from refops.oracle.diagnosis.placed import FIT_SCALES, Placing
from refops.oracle.diagnosis.probes import SUM_ARRAYS, Probes
from refops.oracle.geometry import VALUES, Region, crop
from refops.oracle.places import Lines, Place
from refops.oracle.replay import FORMULA_STAGES, SETTINGS, NotApplicable, Setting, amax_is_near
from refops.oracle.report import Explanation
from refops.oracle.tally import bits_of
from refops.quantization.result import DIRECTIONS

#: Share from which something is worth saying though it is not enough.
PARTLY = 0.5
#: Explanations that are returned, at most.
SHOWN = 5
#: Findings that are confirmed also where the budget is spent: else what it was spent on would be lost.
SURE = 3
#: Rows and columns of the part of a probe that may refute a candidate.
SAMPLE = (32, 64)
#: Elements that sums of a sample add up.
SAMPLE_SUMS = 1 << 13
#: Stages that change the terms of a sum.
TERM_STAGES = FORMULA_STAGES | SUM_STAGES | {"rounding", SETTINGS}
#: Stages that change an amax by little.
AMAX_STAGES = {"rounding", "amax-rounding", "stored-amax", SETTINGS}
#: Names with which a sentence may begin: they keep their small letter.
ARRAYS = ("x", "dy", "y", "dx", "dbias", "row_scales", "drow_scales")
#: Stages of the store of values: sums may be of what was stored.
STORE_STAGES = {"cast", "sign", "nan"}


class Search:
    """One diagnosis."""

    def __init__(self, case, outputs, wrong, reference, budget):
        self.case, self.budget = case, budget
        self.outputs = {n: np.asarray(a) for n, a in outputs.items() if n in reference}
        self.reference = {n: np.asarray(reference[n]) for n in reference}
        self.wrong = {n: np.asarray(wrong[n]) for n in self.outputs}
        self.setting = Setting(case, self.outputs, self.reference, self.wrong)
        self.shape = self.setting.shape
        self.formats = {n: self._format(n) for n in self.outputs}
        self.probes = Probes(case, self.shape, self.wrong)
        self.setting.probe = self.probes.probes[0] if self.shape else None
        self.setting.scale_values = self._common_wrong_scales()
        self.matrix_names = [n for n in self.outputs if n not in SUM_ARRAYS]
        self.sum_names = [n for n in self.outputs if n in SUM_ARRAYS]
        self.copies = self._names_of_copies()
        self._parts, self._readings = {}, {}
        self._sum_cache = {}
        block = case.scaling.layout.block if case.quantizes else None
        self.has_small_blocks = block is None or max(block) <= 32  # blocks end where a part of a tile does
        self.sample = self._sample()

    def _format(self, name):
        """The format of an array of codes, by which one NaN is as good as another; None where bits are compared."""
        slot = self.case.slots[name]
        return None if slot.packed > 1 or self._has_other_nan(name, slot.fmt) else slot.fmt

    def _has_other_nan(self, name, fmt):
        """Whether codes of NaN are wrong where the reference has another NaN: the call asks for the bits."""
        if fmt is None or fmt.nan_code is None or self.outputs[name].dtype != np.uint8:
            return False
        wrong = self.wrong[name]
        got, right = (np.isnan(fmt.values.take(a[name][wrong], mode="clip")) for a in (self.outputs, self.reference))
        return bool((got & right).any())

    def _names_of_copies(self):
        """Names of the matrices of each copy; of what is no copy together."""
        copies = {}
        for name in self.matrix_names:
            copies.setdefault(next((d for d in DIRECTIONS if d in name), ""), []).append(name)
        return list(copies.values())

    def _sample(self):
        """The part of the first probe in which most is wrong; None where blocks do not allow a part."""
        if not self.shape or not self.has_small_blocks:
            return None
        probe, (rows, columns) = self.probes.probes[0], SAMPLE
        candidates = [
            Region(slice(r, min(r + rows, probe.rows.stop)), slice(c, min(c + columns, probe.columns.stop)))
            for r in range(probe.rows.start, probe.rows.stop, rows)
            for c in range(probe.columns.start, probe.columns.stop, columns)
        ]
        return max(candidates, key=self._promise)

    def _promise(self, region):
        """How much is wrong in a region, each entry as a share of its array; half where blocks have no neighbours."""
        masks = {name: crop(self.case, name, self.wrong[name], region) for name in self.matrix_names}
        share = sum(np.count_nonzero(m) / max(np.count_nonzero(self.wrong[name]), 1) for name, m in masks.items())
        sides = zip((region.rows, region.columns), self.shape, strict=True)
        return share if all(side.start > 0 and side.stop < size for side, size in sides) else share / 2

    def _common_wrong_scales(self):
        """The two commonest values of the wrong scales of each array of scales."""
        found = []
        for name, mask in self.wrong.items():
            if name.endswith("_scale_inv") and mask.any():
                values, counts = np.unique(self.outputs[name][mask][: 1 << 16], return_counts=True)
                found += [v for v in values[np.argsort(-counts, kind="stable")[:2]] if v not in found]
        return found

    # --- comparing ---------------------------------------------------------------------------------

    def parts(self, region, arrays=None, key=()):
        """Array name -> `Part` on a region, of the dump or of what a reading made of it."""
        key = (key, region.rows.start, region.rows.stop, region.columns.start, region.columns.stop)
        if key not in self._parts:
            arrays = self.outputs if arrays is None else arrays
            self._parts[key] = {
                name: Part(
                    crop(self.case, name, arrays[name], region),
                    crop(self.case, name, self.wrong[name], region),
                    self.reference_crop(name, region),
                    self.formats[name],
                    relaid=arrays[name] is not self.outputs[name],
                    few=name not in VALUES,
                    follows=self._follows(name, region),
                )
                for name in self.matrix_names
            }
        return self._parts[key]

    def _follows(self, name, region):
        """Codes of a region, as stored, that lie under another scale than the reference's; None where none do."""
        marks = other_scales(self.case, name, region, self.outputs, self.reference)
        return None if marks is None else stored_marks(self.case, name, marks)

    def reference_crop(self, name, region):
        """What the reference has of a region, cut once."""
        key = (name, region.rows.start, region.rows.stop, region.columns.start, region.columns.stop)
        cache = self.setting.cache
        if key not in cache:
            cache[key] = crop(self.case, name, self.reference[name], region)
        return cache[key]

    def replay(self, candidate):
        """A replay with the computing conventions of a candidate; NotApplicable where one means nothing."""
        replay = self.setting.replay()
        for convention, choice in candidate:
            if convention.reads:
                if replay.dequantizes:
                    self._read_input(replay, convention, choice)
                continue
            convention.apply(replay, choice)
        return replay

    def _read_input(self, replay, convention, choice):
        """Let a dequantizing replay read its input as if it were laid out another way."""
        direction = replay.direction
        names = [f"{direction}_{what}" for what in ("data", "scale_inv")]
        dump = Dump(self.case, {name: getattr(replay.q, name) for name in names})
        convention.apply(dump, choice)
        replay.q = dataclasses.replace(replay.q, **dump.arrays)
        replay.facts.update(dump.facts)
        replay.applied, replay.changed = (*replay.applied, (convention, choice)), replay.changed | {"layout"}

    def evaluate(self, candidate, regions, *, keep=False, sums=1 << 16, until_hopeless=True):
        """Return the `Result` of a candidate on regions; NotApplicable where it means nothing."""
        replay = self.replay(candidate)
        reads = [item for item in candidate if item[0].reads and not replay.dequantizes]
        arrays, facts = self.relaid(tuple(reads)) if reads else (None, {})
        result = Result(candidate, {}, {})
        for number, region in enumerate(regions):
            made = self.run(replay, region)
            parts = self.parts(region, arrays, tuple((c.name, repr(choice)) for c, choice in reads))
            counts = {name: part.compare(made[name]) for name, part in parts.items()}
            result += Result(candidate, counts, {}, [(region, made)] if keep else [])
            if until_hopeless and number == 0 and len(regions) > 1 and result.share < 0.2 and result.wrong_counts:
                break
        if self.sum_names:
            result += self.evaluate_sums(replay, sums, arrays)
        result.facts, result.rows = {**replay.facts, **facts}, replay.rows
        for name, count in result.counts.items():
            if count.explained and not replay.changed & AMAX_STAGES and self._is_amax_off_by_noise(name):
                result.counts[name] = dataclasses.replace(count, explained=0, gained=0)
        return result

    def is_refuted(self, candidate, *, exactly=False):
        """Whether a small part of a probe shows that a candidate does not explain the dump, one copy after the other.

        With `exactly`, that it does not make the dump's bits. NotApplicable where the candidate means nothing.
        """
        if not self._fits_sample(candidate):
            return False
        replay, parts = self.replay(candidate), self.parts(self.sample)
        for names in self.copies:
            made = self.run(replay, self.sample, names)
            counts = [parts[name].compare(made[name]) for name in names]
            if any(count.different if exactly else count.refutes for count in counts):
                return True
        if not self.sum_names:
            return False
        sums = self.evaluate_sums(replay, SAMPLE_SUMS, None).counts.values()
        return any(count.different if exactly else count.refutes for count in sums)

    def _fits_sample(self, candidate):
        """Whether there is a sample, and a candidate computes something that can be told from it."""
        reads = any(convention.reads for convention, _ in candidate)
        return self.sample is not None and not reads and not has_other_blocks(candidate)

    def _is_amax_off_by_noise(self, name):
        """Whether an output is an amax so near to the reference's that a replay takes the dump's (`settled_amax`)."""
        if not name.startswith("amax") or not self.wrong[name].any():
            return False
        return bool(amax_is_near(self.outputs[name], self.reference[name]).all())

    def run(self, replay, region, names=None):
        """What a replay writes of a region; the reference where nothing that it writes there is changed."""
        names = self.matrix_names if names is None else names
        reference = {name: self.reference_crop(name, region) for name in names}
        if not replay.changed - SUM_STAGES - {"layout"} and not replay.dequantizes:
            return reference
        made = replay.run(region, names)
        # How the reference compares is known: most conventions leave some arrays as they are.
        return {name: reference[name] if _equal(array, reference[name]) else array for name, array in made.items()}

    def evaluate_sums(self, replay, elements, arrays):
        """The `Result` of the sums that a replay makes, so many that they add up `elements`.

        `arrays`: the dump as readings lay it out; None for as it is.
        """
        counts = {}
        for name in self.sum_names:
            got = (arrays or self.outputs)[name]
            flat, mask = got.reshape(-1), self.wrong[name].reshape(-1)
            window = self.probes.window(mask, max(1, elements // max(1, self._terms(name))))
            reference = self.reference[name].reshape(-1)[window]
            relaid = got is not self.outputs[name]
            part = Part(flat[window], mask[window], reference, None, relaid, sums=True)
            if not replay.changed & (TERM_STAGES | STORE_STAGES):
                counts[name] = part.compare(reference)
                continue
            counts[name] = part.compare(self._sums(name, replay, window))
            if not replay.changed & TERM_STAGES:  # summed before or after the store that is at fault
                before = part.compare(reference)
                counts[name] = min(counts[name], before, key=lambda count: (count.damaged, -count.explained))
        return Result((), counts)

    def _terms(self, name):
        """Elements that one entry of a sum adds up."""
        m, k = self.shape
        return m if name == "dbias" else k

    def _sums(self, name, replay, window):
        relevant = tuple(
            (c.name, repr(choice)) for c, choice in replay.applied if c.stage_of(choice) in TERM_STAGES | STORE_STAGES
        )
        key = (name, relevant, window.start, window.stop)
        if key not in self._sum_cache:
            self._sum_cache[key] = getattr(replay, name)(window)
        return self._sum_cache[key]

    def sum_in_place(self, candidate, name, place):
        """The `Count` of dbias where a candidate's terms are summed in a place, and right ones outside."""
        replay, plain = self.replay(candidate), self.setting.replay()
        mask = self.wrong[name].reshape(-1)
        columns = self.probes.window(mask, max(1, (1 << 19) // max(1, self._terms(name))))
        inside = place.mask(self.shape)[:, columns]
        terms = np.where(inside, replay.sum_terms(columns), plain.sum_terms(columns))
        made = replay.to_dtype(replay.column_sum(terms), replay.dtype)
        got, reference = (array[name].reshape(-1)[columns] for array in (self.outputs, self.reference))
        return Part(got, mask[columns], reference, None, sums=True).compare(made)

    def amax_in_place(self, candidate, name, place):
        """The `Count` of the tensor's amax where a candidate's values are in a place, and right ones outside."""
        replay, plain = self.replay(candidate), self.setting.replay()
        if any(replay.hadamard.values()):
            raise NotApplicable("the amax is that of transformed values")
        self.setting.spend(2 * plain.shape[0] * plain.shape[1])
        rows, columns = (slice(0, size) for size in self.shape)
        values = np.where(place.mask(self.shape), replay.compute(rows, columns), plain.compute(rows, columns))
        values = plain.round(values) if plain.amax_rounded else values
        made = np.fmax.reduce(np.abs(values), axis=None, initial=np.float32(0)).reshape(1)
        return Part(self.outputs[name], self.wrong[name], self.reference[name], None, few=True).compare(made)

    def relaid(self, reads):
        """(arrays, facts): the dump as readings lay it out."""
        key = tuple((c.name, repr(choice)) for c, choice in reads)
        if key not in self._readings:
            dump = Dump(self.case, self.outputs)
            for convention, choice in reads:
                convention.apply(dump, choice)
            if len(self._readings) > 64:
                self._readings.clear()
            self._readings[key] = dump.arrays, dump.facts
        return self._readings[key]

    # --- candidates --------------------------------------------------------------------------------

    def variants(self):
        """Every convention with every choice, as candidates of one."""
        for convention in CONVENTIONS.values():
            try:
                target = Dump(self.case, self.outputs) if convention.reads else self.setting.replay()
                choices = convention.choices_for(target)
            except NotApplicable:
                continue
            for choice in choices:
                yield ((convention, choice),)

    def try_all(self, candidates, evaluate):
        """Results of the candidates that mean something."""
        results = []
        for candidate in candidates:
            if self.budget.is_spent():
                break
            try:
                results.append(evaluate(candidate))
            except NotApplicable:
                continue
        return results

    def singles(self):
        """`Result` of each convention by itself, with what its replay made."""
        self.setting.probing = True
        return self.try_all(self.variants(), self._single)

    def _single(self, candidate):
        """The `Result` of one convention on the probes; on the sample where that shows that it explains nothing.

        What changes nothing of the sample may be rare, and is tried on the probes.
        """
        if self._sample_decides and self._fits_sample(candidate):
            result = self.evaluate(candidate, [self.sample], keep=True, sums=SAMPLE_SUMS)
            [(_, made)] = result.made
            changed = any(array is not self.reference_crop(name, self.sample) for name, array in made.items())
            if changed and not any(count.shows for count in result.counts.values()):
                return result
        return self.evaluate(candidate, self.probes.probes, keep=True, sums=1 << 14)

    @cached_property
    def _sample_decides(self):
        """Whether the sample holds enough of what is wrong in each matrix to show what explains nothing of it."""
        if self.sample is None:
            return False
        parts = self.parts(self.sample)
        totals = {name: int(np.count_nonzero(self.wrong[name])) for name in self.matrix_names}
        return all(parts[name].wrong_count >= min(LEAST_WRONG, total) for name, total in totals.items())

    # --- the search ----------------------------------------------------------------------------------

    def explanations(self):
        """The explanations, best first."""
        if not any(mask.any() for mask in self.wrong.values()):
            return []
        singles = self.singles()
        found = self.confirmed(r for r in singles if r.promising and self._changes_something(r))
        good = [r for r in found if r.enough]
        settled = bool(good) and (good[0].exact or good[0].is_clear)
        if settled and self.probes.complete:
            return self.said(good)
        # Of a large tensor only a part was compared: what explains it may be followed there alone.
        placed = Placing(self).answers(good if settled else singles) if self.shape else []
        if placed and (not good or settled or placed[0].exact):
            return placed[:SHOWN]
        if settled:
            return self.said(good)
        if good:
            return self.said(self._with_extensions(good, singles))
        good = [r for r in self.confirmed(Pairs(self, singles).results()) if r.enough]
        return self.said(good or self.partial(found)[:1])

    def _with_extensions(self, good, singles):
        """Results, behind those that a second convention makes exact."""
        pairs = Pairs(self, singles)
        extended = self.confirmed(r for best in good[:3] for r in pairs.extensions(best))
        return [r for r in extended if r.exact] + good

    def said(self, results):
        """The `Explanation` of each of the first results."""
        return [self.explanation(r) for r in unique(results)[:SHOWN]]

    def _changes_something(self, result):
        """Whether a candidate writes anything else than the reference on the probes: else it explains nothing."""
        convention, choice = result.candidate[0]
        if convention.reads or any(name in SUM_ARRAYS for name in result.counts):
            return True
        if convention.stage_of(choice) == "amax-rounding" and any(c.gained for c in result.counts.values()):
            return True  # by a last bit, which else is noise
        return any(
            array is not self.reference_crop(name, region) and self._differs(name, array, region)
            for region, made in result.made
            for name, array in made.items()
        )

    def count_same(self, name, reference, array):
        """How many entries of two arrays of an output hold the same."""
        return int(np.count_nonzero(same(reference, array, self.formats[name])))

    def _differs(self, name, array, region):
        """Whether a replay wrote something else than the reference; an amax may be the dump's own (`settled_amax`)."""
        reference = self.reference_crop(name, region)
        if name.startswith("amax"):
            array = np.where(amax_is_near(array, reference), reference, array)
        return self.count_same(name, reference, array) < array.size

    def confirmed(self, results):
        """The best of some results, evaluated on larger regions, sorted; more by thin evidence, rare ones last."""
        each, most = (8, 32) if self._is_thin else (3, 10)
        best = unique(sorted(results, key=lambda r: r.rank), each)[:most]
        found = []
        for result in best:
            if len(found) >= SURE and self.budget.is_spent():
                break
            found.append(self.confirm(result))
        rare = {id(r): self._is_thin and any(convention.alone for convention, _ in r.candidate) for r in found}
        return sorted(found, key=lambda r: (not r.exact, rare[id(r)], r.rank))

    @cached_property
    def _is_thin(self):
        """Whether all that is wrong is a few scales that are powers of two: many rules move one by one step."""
        wrong = {name: int(np.count_nonzero(mask)) for name, mask in self.wrong.items() if mask.any()}
        if not all(name.endswith("_scale_inv") for name in wrong) or sum(wrong.values()) >= FIT_SCALES:
            return False
        scaling = self.case.scaling
        return scaling.layout.scale_format == E8M0 or getattr(scaling, "power_2_scale", False)

    def confirm(self, result, regions=None):
        """A result evaluated on larger regions; itself where that is too costly: what the probes say must do.

        With `regions` of one's own, what the replay makes there is kept; None where that is too costly.
        """
        whole_halo, self.setting.whole_halo = self.setting.whole_halo, True
        self.setting.probing = False
        try:
            options = {"sums": 1 << 19, "until_hopeless": False, "keep": regions is not None}
            return self.evaluate(result.candidate, regions or self.probes.confirm, **options)
        except NotApplicable:
            return None if regions is not None else result
        finally:
            self.setting.whole_halo, self.setting.probing = whole_halo, True

    def partial(self, confirmed):
        """What explains a large part of a dump that is wrong in many places, and harms nothing."""
        results = [r for r in confirmed if r.share >= PARTLY and r.damage <= 0.05]
        return [r for r in results if any(c.gained > 0.9 * c.wrong > 0.01 * c.entries for c in r.wrong_counts)]

    def explanation(self, result):
        """The `Explanation` for the user."""
        text = self.sentence(result)
        if not result.enough:
            lack = "explains a part only" if result.explained < 1 else "would also change what is right"
            text = f"{text[:-1]}; but that {lack}."
        names = tuple(convention.name for convention, _ in result.candidate)
        exact, sampled = result.exact and self.probes.complete, not self.probes.complete
        place = self._speaks_of(result) if result.enough else None
        whole_arrays = tuple(name for name, count in result.counts.items() if 0 < count.wrong == count.explained)
        return Explanation(names, text, result.explained, exact, sampled, place, whole_arrays)

    def _speaks_of(self, result):
        """The `Place` that alone a result is about, wherever it is followed; None for all of the tensor."""
        if result.rows is not None:
            return Place((), result.rows)
        gated_gradient = self.case.gated and self.case.operation.kind.endswith("grad")
        if not gated_gradient or not self.probes.complete or any(c.reads for c, _ in result.candidate):
            return None
        confirmed = self.confirm(result, self.probes.confirm)
        if confirmed is None:
            return None
        changed = Placing(self).changed(confirmed).any(axis=0)
        width = self.shape[1] // 2
        if changed[:width].any() == changed[width:].any():
            return None
        first = 0 if changed[:width].any() else width
        return Place((), None, Lines(2 * width, first, first + width - 1))

    def sentence(self, result):
        """What the conventions of a result say."""
        sentences = []
        for convention, _ in result.candidate:
            words = {**result.facts, **result.facts.get(convention.name, {})}
            sentence = convention.sentence.format_map(_Facts(words))
            named = sentence.split()[0] in ARRAYS
            sentences.append(sentence if named else sentence[0].upper() + sentence[1:])
        if len(sentences) == 1:
            return sentences[0]
        return f"{sentences[0][:-1]}; besides: {_uncapitalized(sentences[1])}"


class _Facts(dict):
    """Words of sentences; one that is missing leaves a gap, not an error."""

    def __missing__(self, key):
        return ""


def _equal(made, reference):
    """Whether a replay wrote the reference's bits."""
    alike = made.dtype == reference.dtype and made.shape == reference.shape
    return alike and np.array_equal(bits_of(made), bits_of(reference))


def _uncapitalized(sentence):
    """A sentence as it goes on after a semicolon: a name, a number or an abbreviation keeps its capitals."""
    word = sentence.split()[0]
    return sentence[0].lower() + sentence[1:] if word[1:].islower() or word == "A" else sentence


def unique(results, each=1):
    """The first `each` results of the same conventions, which differ in their choices."""
    seen, kept = {}, []
    for result in results:
        names = frozenset(convention.name for convention, _ in result.candidate)
        seen[names] = seen.get(names, 0) + 1
        if seen[names] <= each:
            kept.append(result)
    return kept
