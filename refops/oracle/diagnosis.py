"""Which convention explains a wrong dump: every known one is tried, alone and then in pairs, and compared with it.

A convention explains a dump when its replay (`refops.oracle.replay`) equals it where it is wrong and changes nothing
where it is right. What counts:

    share    of an array's wrong entries that the replay reproduces, averaged over the arrays with wrong entries, so
             that a few wrong scales weigh as much as many wrong codes;
    damage   entries that are right in the dump but not in the replay, as a share of the wrong ones.

Large tensors are searched on probes, tiles of 128 x 128 where wrong entries lie densest, and what is found is confirmed
on a band of rows; amaxes and sums always belong to the whole tensor. Nothing here decides whether a dump is right, and
a dump that no convention explains gets no explanation.
"""

import math
from dataclasses import dataclass, field, replace

import numpy as np

from refops.oracle.conventions import CONVENTIONS
from refops.oracle.conventions.reading import Dump
from refops.oracle.geometry import TILE, VALUES, Geometry, Region, crop, whole
from refops.oracle.replay import FORMULA_STAGES, SETTINGS, NotApplicable, Setting, amax_is_near
from refops.oracle.report import Explanation
from refops.scalings.arithmetic import REFERENCE

F = np.float32
#: A whole matrix up to this many elements is its own probe, or is confirmed as a whole.
PROBE_ELEMENTS, CONFIRM_ELEMENTS = 1 << 15, 1 << 19
#: An explanation's least share, and the most damage.
ENOUGH, DAMAGE = 0.9, 0.2
#: Share of the entries of an array that noise may move.
NOISE = 5e-3
#: Share from which something is worth saying though it is not enough.
PARTLY = 0.5
#: Explanations that are returned, at most.
SHOWN = 5
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
SUM_ARRAYS = ("dbias", "drow_scales")
SUM_STAGES = {"sum", "sum-order", "sum-rows", "row-gradient"}
#: Stages that change the terms of a sum.
TERM_STAGES = FORMULA_STAGES | SUM_STAGES | {"rounding", SETTINGS}
#: Stages of the store of values: sums may be of what was stored.
STORE_STAGES = {"cast", "sign", "nan"}


def diagnose(case, outputs, wrong, reference):
    """Return what explains a wrong dump, best first; an empty list where nothing known does.

    Args:
        case: the `Case`.
        outputs: output name -> array as stored.
        wrong: output name -> bool array of its shape, True outside the enclosure (for packed FP4, bytes).
        reference: output name -> what the reference writes.

    Returns:
        List of `Explanation`.
    """
    with np.errstate(all="ignore"):
        return Search(case, outputs, wrong, reference).explanations()


@dataclass
class Count:
    """How one array compares with a replay: numbers of entries.

    Attributes:
        entries: compared.
        wrong: wrong in the dump.
        explained: of those, reproduced.
        gained: of those, not what the reference has: a code may be wrong because its scale is.
        damaged: right in the dump, not in the replay.
        different: not the same bits.
    """

    entries: int = 0
    wrong: int = 0
    explained: int = 0
    gained: int = 0
    damaged: int = 0
    different: int = 0

    def __add__(self, other):
        return Count(*(getattr(self, n) + getattr(other, n) for n in self.__dataclass_fields__))

    @property
    def share(self):
        """Share of the wrong entries that is explained."""
        return self.explained / self.wrong if self.wrong else 1.0

    def damage(self, floor):
        """Damaged entries per wrong one (or per `floor` of all entries); where nothing is wrong, per hundredth."""
        return self.damaged / max(self.wrong or 0.01 * self.entries, floor * self.entries, 1)


@dataclass
class Result:
    """A candidate and how it compares.

    Attributes:
        candidate: tuple of (convention, choice).
        counts: array name -> `Count`.
        facts: words for the sentences.
        made: probe number -> array name -> what the replay wrote there.
    """

    candidate: tuple
    counts: dict
    facts: dict = field(default_factory=dict)
    made: list = field(default_factory=list)

    def __add__(self, other):
        names = {**self.counts, **other.counts}
        counts = {n: self.counts.get(n, Count()) + other.counts.get(n, Count()) for n in names}
        return replace(self, counts=counts, facts={**self.facts, **other.facts}, made=self.made + other.made)

    @property
    def _wrong(self):
        return [c for c in self.counts.values() if c.wrong]

    @property
    def share(self):
        """Mean share over the arrays with wrong entries."""
        wrong = self._wrong
        return sum(c.share for c in wrong) / len(wrong) if wrong else 0.0

    @property
    def explained(self):
        """Share of all wrong entries."""
        total = sum(c.wrong for c in self.counts.values())
        return sum(c.explained for c in self.counts.values()) / total if total else 0.0

    @property
    def damage(self):
        """Sum of the arrays' damage.

        Next to an array that is explained in large part, a few entries that the noise of exp and tanh moves do not
        count.
        """
        evident = any(c.wrong > 0.01 * c.entries and c.share > ENOUGH for c in self.counts.values())
        return sum(c.damage(NOISE if evident else 0.0) for c in self.counts.values())

    @property
    def damaged(self):
        """Number of damaged entries."""
        return sum(c.damaged for c in self.counts.values())

    @property
    def exact(self):
        """Whether every entry has the same bits (NaN being one)."""
        return not any(c.different for c in self.counts.values())

    @property
    def enough(self):
        """Whether this explains the dump."""
        if self.damage > DAMAGE or not any(c.gained for c in self._wrong):
            return False
        every = self.share >= ENOUGH and min(c.share for c in self._wrong) >= 0.75
        stray = self.explained >= 0.99 and all(c.wrong - c.explained <= 1e-3 * c.entries for c in self._wrong)
        return every or stray

    @property
    def promising(self):
        """Whether a probe, where a few entries weigh much, is no reason to drop this."""
        few = sum(c.wrong for c in self.counts.values()) < 40
        solves_one = any(c.wrong >= 8 and c.share > 0.95 for c in self._wrong)  # what is left may be a stray fault
        explains = self.share >= (0.5 if few else 0.75) or solves_one or self.explained >= 0.95
        return explains and (self.damage <= 0.4 or (few and self.damaged <= 4))

    @property
    def rank(self):
        """Sort key, best first."""
        return (not self.exact, -round(self.share - self.damage, 3), len(self.candidate), places(self.candidate))


def places(candidate):
    """Places of a candidate's conventions in the list."""
    order = {name: i for i, name in enumerate(CONVENTIONS)}
    return tuple(order[convention.name] for convention, _ in candidate)


# --- comparison -----------------------------------------------------------------------------------


def same(got, made, fmt):
    """Where two arrays hold the same: bits, and any NaN for any NaN."""
    if got.dtype == np.uint8:
        equal = got == made
        if fmt is not None and fmt.nan_code is not None:
            nan = np.isnan(fmt.values)
            equal |= nan[got] & nan[made]
        return equal
    bits = f"u{got.dtype.itemsize}"
    equal = np.ascontiguousarray(got).view(bits) == np.ascontiguousarray(made, got.dtype).view(bits)
    return equal | (np.isnan(got) & np.isnan(made))


class Part:
    """One array of the dump on one region, ready to be compared.

    Attributes:
        got, wrong, reference: crops.
        fmt: format of its codes, or None.
        relaid: whether a reading moved its entries, so that `wrong` only counts.
        few: whether these are scales or amaxes: few numbers, which must agree closely.
    """

    def __init__(self, got, wrong, reference, fmt, relaid=False, few=False):
        self.got, self.wrong, self.reference, self.fmt, self.relaid = got, wrong, reference, fmt, relaid
        self.few = few
        self.wrong_count = int(np.count_nonzero(wrong))
        self._base = None

    def compare(self, made):
        """Return the `Count` of a replay."""
        if made is self.reference and self._base is not None:
            return self._base
        equal = same(self.got, made, self.fmt)
        agrees = equal
        if self.got.dtype != np.uint8 and self.got.size:
            agrees = equal | self._near(made)
        different = self.got.size - int(np.count_nonzero(equal))
        count = Count(self.got.size, self.wrong_count, different=different)
        if self.relaid:
            bad = self.got.size - int(np.count_nonzero(agrees))
            count.explained, count.damaged = max(0, self.wrong_count - bad), max(0, bad - self.wrong_count)
            count.gained = count.explained
        else:
            explained = self.wrong & agrees
            count.explained = int(np.count_nonzero(explained))
            if made is not self.reference and count.explained:
                count.gained = int(np.count_nonzero(explained & ~same(self.got, self.reference, self.fmt)))
            bad = ~(self.wrong | agrees)
            if made is self.reference:
                bad = np.zeros_like(bad)
            elif bad.any():
                bad &= ~same(self.reference, made, self.fmt)
            count.damaged = int(np.count_nonzero(bad))
        if made is self.reference:
            self._base = count
        return count

    def _near(self, made):
        """Where numbers agree up to the noise of float32 arithmetic.

        A wrong entry must be far nearer to the replay than to the reference; a right one may differ as much as the
        reference does.
        """
        got, made, reference = (a.astype(np.float64) for a in (self.got, made, self.reference))
        off, own = np.abs(got - made), np.abs(got - reference)
        own = np.where(np.isfinite(own), own, 0)
        if self.relaid:
            return off <= 2.0**-19 * np.abs(made)
        noise = 2.0**-19 * np.abs(got)
        explained = off <= (np.minimum(noise, own / 8) if self.few else own / 8)
        return np.where(self.wrong, explained, off <= 4 * own + noise)


# --- where to look --------------------------------------------------------------------------------


def tile_counts(mask, rows, columns):
    """Number of True in each tile of `rows` x `columns` entries."""
    if not mask.size:
        return np.zeros((0, 0))
    counts = np.add.reduceat(mask, np.arange(0, mask.shape[1], columns), axis=1, dtype=np.int32)
    return np.add.reduceat(counts, np.arange(0, mask.shape[0], rows), axis=0, dtype=np.int64)


class Places:
    """Where the wrong entries lie: which tiles to probe, what to confirm on.

    Attributes:
        probes: regions of a tile, the densest first.
        confirm: regions that are larger, the probes' tiles among them.
        complete: whether those are the whole tensor.
    """

    def __init__(self, case, shape, wrong):
        self.shape = shape
        self.complete = True
        self._density = {}
        if not shape or math.prod(shape) == 0:
            self.probes = self.confirm = [whole(shape)]
            return
        for name, mask in wrong.items():
            if mask.ndim == 0 or name in SUM_ARRAYS or name.startswith("amax") or mask.shape == (1,):
                continue
            cropped = crop(case, name, mask, whole(shape))
            transposed, rows, columns = (False, 1, 1)
            if name not in VALUES:
                transposed, rows, columns = Geometry.of(case.scaling, name).entry(name)
            matrix = cropped.T if transposed else cropped
            if matrix.any():
                counts = tile_counts(matrix, max(TILE // rows, 1), max(TILE // columns, 1)).astype(float)
                self._density[name] = counts
        elements = math.prod(shape)
        if elements <= PROBE_ELEMENTS:
            self.probes = self.confirm = [whole(shape)]
            return
        tiles = self._chosen_tiles()
        self.probes = [self._tile(*tile) for tile in tiles]
        if elements <= CONFIRM_ELEMENTS:
            self.confirm = [whole(shape)]
        else:
            self.confirm, self.complete = self._bands(tiles), False

    def _total(self):
        return sum(counts / counts.sum() for counts in self._density.values())

    def _chosen_tiles(self):
        """The densest tile, one more for each array that has nothing wrong there, and more where little is wrong."""
        if not self._density:
            return [(0, 0)]
        total = self._total()
        chosen = [tuple(map(int, np.unravel_index(np.argmax(total), total.shape)))]
        for counts in self._density.values():
            if not any(counts[tile] for tile in chosen):
                chosen.append(tuple(map(int, np.unravel_index(np.argmax(counts), counts.shape))))
        order = np.argsort(-total, axis=None, kind="stable")[:8]
        for index in order:
            tile = tuple(map(int, np.unravel_index(index, total.shape)))
            found = sum(counts[t] for counts in self._density.values() for t in chosen)
            if found >= 16 or len(chosen) >= 4 or total[tile] == 0:
                break
            if tile not in chosen:
                chosen.append(tile)
        return chosen[:4]

    def _tile(self, row, column, height=1, width=1):
        rows = slice(row * TILE, min((row + height) * TILE, self.shape[0]))
        return Region(rows, slice(column * TILE, min((column + width) * TILE, self.shape[1])))

    def _bands(self, tiles):
        """Bands of rows through the tiles, the densest first; half a million elements in all."""
        budget = CONFIRM_ELEMENTS // (TILE * TILE)
        bands, columns = [], -(-self.shape[1] // TILE)
        rows = list(dict.fromkeys(row for row, _ in tiles))
        if self._density:
            total = self._total().sum(axis=1)
            rows += [int(r) for r in np.argsort(-total, kind="stable")[:4] if total[r] and int(r) not in rows]
        for row in rows:
            mine = [column for r, column in tiles if r == row]
            width = min(columns, max(1, budget // max(1, len({r for r, _ in tiles}))))
            start = 0
            if mine:
                start = min(max(min(mine) - width // 2, 0), columns - width)
            bands.append(self._tile(row, start, 1, width))
            bands += [self._tile(row, c) for c in mine if not start <= c < start + width]
            budget -= width
            if budget <= 0 and set(r for r, _ in tiles) <= {b.rows.start // TILE for b in bands}:
                break
        return bands

    def window(self, mask, elements):
        """A slice of a vector of sums around its densest wrong entries."""
        size = len(mask)
        width = max(1, min(size, elements))
        if width == size:
            return slice(0, size)
        counts = np.convolve(mask.astype(np.float64), np.ones(width), "valid")
        start = int(np.argmax(counts)) if counts.any() else 0
        return slice(start, start + width)


# --- the search -----------------------------------------------------------------------------------


class Search:
    """One diagnosis."""

    def __init__(self, case, outputs, wrong, reference):
        self.case = case
        self.outputs = {n: np.asarray(a) for n, a in outputs.items() if n in reference}
        self.reference = {n: np.asarray(reference[n]) for n in reference}
        self.wrong = {n: np.asarray(wrong[n]) for n in self.outputs}
        self.setting = Setting(case, self.outputs, self.reference)
        self.shape = self.setting.shape
        self.formats = {n: self._format(n) for n in self.outputs}
        self.places = Places(case, self.shape, self.wrong)
        self.setting.probe = self.places.probes[0] if self.shape else None
        self.setting.scale_values = self._common_wrong_scales()
        self.matrix_names = [n for n in self.outputs if n not in SUM_ARRAYS]
        self.sum_names = [n for n in self.outputs if n in SUM_ARRAYS]
        self._parts, self._readings = {}, {}
        self._sum_cache = {}

    def _format(self, name):
        slot = self.case.slots[name]
        return None if slot.packed > 1 else slot.fmt

    def _common_wrong_scales(self):
        """The scale that most of the wrong scales of the dump have, for each array of scales."""
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
                    self._reference_crop(name, region),
                    self.formats[name],
                    relaid=arrays[name] is not self.outputs[name],
                    few=name not in VALUES,
                )
                for name in self.matrix_names
            }
        return self._parts[key]

    def _reference_crop(self, name, region):
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
        replay.q = replace(replay.q, **dump.arrays)
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
            result += Result(candidate, counts, {}, [made] if keep else [])
            if until_hopeless and number == 0 and len(regions) > 1 and result.share < 0.2 and result._wrong:
                break
        if self.sum_names:
            result += self._evaluate_sums(replay, sums, arrays)
        result.facts = {**replay.facts, **facts}
        return result

    def run(self, replay, region):
        """What a replay writes of a region; the reference where nothing that it writes there is changed."""
        if not replay.changed - SUM_STAGES - {"layout"} and not replay.dequantizes:
            return {name: self._reference_crop(name, region) for name in self.matrix_names}
        return replay.run(region, self.matrix_names)

    def _evaluate_sums(self, replay, elements, arrays):
        counts = {}
        for name in self.sum_names:
            got = (arrays or self.outputs)[name]
            flat, mask = got.reshape(-1), self.wrong[name].reshape(-1)
            window = self.places.window(mask, max(1, elements // max(1, self._terms(name))))
            reference = self.reference[name].reshape(-1)[window]
            relaid = got is not self.outputs[name]
            part = Part(flat[window], mask[window], reference, None, relaid)
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

    def try_all(self, candidates, regions, **options):
        """Results of the candidates that mean something."""
        results = []
        for candidate in candidates:
            try:
                results.append(self.evaluate(candidate, regions, **options))
            except NotApplicable:
                continue
        return results

    # --- the search ----------------------------------------------------------------------------------

    def explanations(self):
        """The explanations, best first."""
        if not any(mask.any() for mask in self.wrong.values()):
            return []
        self.setting.probing = True
        singles = self.try_all(self.variants(), self.places.probes, keep=True)
        found = self.confirmed(r for r in singles if r.promising and self._changes_something(r))
        good = [r for r in found if r.enough]
        if not good:
            pairs = self.confirmed(self.pairs(singles))
            good = [r for r in pairs if r.enough]
        elif not good[0].exact:
            extended = self.confirmed(r for best in good[:3] for r in self.extensions(best, singles))
            good = [r for r in extended if r.exact] + good
        if not good:
            good = self.partial(found)[:1]
        return [self.explanation(r) for r in unique(good)[:SHOWN]]

    def _changes_something(self, result):
        """Whether a candidate is another computation at all, here: one that is not explains nothing."""
        if result.candidate[0][0].reads or any(name in SUM_ARRAYS for name in result.counts):
            return True
        return any(
            array is not self._reference_crop(name, region) and self._differs(name, array, region)
            for made, region in zip(result.made, self.places.probes, strict=False)
            for name, array in made.items()
        )

    def _differs(self, name, array, region):
        """Whether a replay wrote something else than the reference; an amax may be the dump's own (`settled_amax`)."""
        reference = self._reference_crop(name, region)
        if name.startswith("amax"):
            array = np.where(amax_is_near(array, reference), reference, array)
        return not same(reference, array, self.formats[name]).all()

    def confirmed(self, results):
        """The best of some results, evaluated on larger regions, sorted."""
        best = unique(sorted(results, key=lambda r: r.rank), each=3)[:10]
        self.setting.whole_halo = True
        confirmed = []
        for result in best:
            self.setting.probing = False
            try:
                confirmed.append(
                    self.evaluate(result.candidate, self.places.confirm, sums=1 << 19, until_hopeless=False)
                )
            except NotApplicable:  # too costly on the whole tensor: what the probes say must do
                confirmed.append(result)
            finally:
                self.setting.probing = True
        return sorted(confirmed, key=lambda r: r.rank)

    def partial(self, confirmed):
        """What explains a large part of a dump that is wrong in many places, and harms nothing."""
        results = [r for r in confirmed if r.share >= PARTLY and r.damage <= 0.05]
        return [r for r in results if any(c.gained > 0.9 * c.wrong > 0.01 * c.entries for c in r._wrong)]

    def explanation(self, result):
        """The `Explanation` for the user."""
        sentences = []
        for convention, _ in result.candidate:
            words = {**result.facts, **result.facts.get(convention.name, {})}
            sentence = convention.sentence.format_map(_Facts(words))
            sentences.append(sentence[0].upper() + sentence[1:])
        text = sentences[0]
        if len(sentences) > 1:
            text = f"{text[:-1]}; besides: {_uncapitalized(sentences[1])}"
        if not result.enough:
            text = f"{text[:-1]}; but that explains a part only."
        names = tuple(convention.name for convention, _ in result.candidate)
        complete = self.places.complete
        return Explanation(names, text, result.explained, result.exact and complete, sampled=not complete)

    # --- pairs ---------------------------------------------------------------------------------------

    def pairs(self, singles):
        """Results of the pairs that could explain what no single convention does."""
        useful = [r for r in singles if self.useful(r)]
        reads = [r for r in useful if r.candidate[0][0].reads and self.case.operation.kind != "dequantize"]
        computes = [r for r in useful if r not in reads]
        results = self._reading_pairs(reads, computes)
        region = self._pair_region()
        self.setting.whole_halo = False
        for i, first in enumerate(computes):
            for second in computes[i + 1 :]:
                if not self._compatible(first, second):
                    continue
                pair = (*first.candidate, *second.candidate)
                larger = any(c.stage_of(choice) == "blocks" for c, choice in pair)
                try:
                    result = self.evaluate(pair, [self.places.probes[0] if larger else region], sums=1 << 14)
                except (NotApplicable, ValueError, LookupError):  # two that do not fit together
                    continue
                if result.promising:
                    results.append(result)
        return results

    def _pair_region(self):
        """The first probe, cut to fewer rows where much is wrong and blocks allow it."""
        region = self.places.probes[0]
        rows, columns = region.shape
        wrong = sum(p.wrong_count for p in self.parts(region).values())
        block = self.case.scaling.layout.block if self.case.quantizes else None
        small = block is None or max(block) <= 32  # blocks end where the cut region does
        if rows * columns > 8192 and small and wrong > 0.05 * rows * columns:
            height = max(32, 8192 // columns // 32 * 32)
            return Region(slice(region.rows.start, min(region.rows.start + height, region.rows.stop)), region.columns)
        return region

    def useful(self, result):
        """Whether a convention could be half of an explanation.

        It must change something, much where much is wrong, and unless much is wrong in some array must not spoil one of
        which little is wrong.
        """
        if result.candidate[0][0].reads and self.case.operation.kind != "dequantize":
            return True  # what another scale hides, a layout may still explain
        effect = 0.0
        much = any(count.wrong > 0.5 * count.entries > 8 for count in result.counts.values())
        for name, count in result.counts.items():
            if not much and count.damaged > 2 * count.wrong + 0.02 * count.entries:
                return False
            if name in SUM_ARRAYS:
                effect = max(effect, float(count.explained > 0 or count.damaged > 0))
        for made, region in zip(result.made, self.places.probes, strict=False):
            for name, array in made.items():
                reference = self._reference_crop(name, region)
                if array is not reference and array.size:
                    different = 1 - np.count_nonzero(same(reference, array, self.formats[name])) / array.size
                    wrong = self.parts(region)[name].wrong_count / array.size
                    effect = max(effect, different / max(min(wrong, 0.05), 1e-9) if wrong else different * 100)
        return effect > 0.05

    def _compatible(self, first, second):
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

    def _reading_pairs(self, reads, computes):
        """Pairs with readings: the replays are there, only the dump is laid out anew."""
        results = []
        region = self.places.probes[0]
        for read in reads:
            item = read.candidate[0]
            arrays, facts = self.relaid((item,))
            key = ((item[0].name, repr(item[1])),)
            parts = self.parts(region, arrays, key)
            for other in computes:
                counts = {name: part.compare(other.made[0][name]) for name, part in parts.items()}
                result = Result((item, *other.candidate), counts, {**facts, **other.facts})
                if self.sum_names:
                    sums = {n: c for n, c in other.counts.items() if n in SUM_ARRAYS}
                    if any(arrays[n] is not self.outputs[n] for n in sums):
                        sums = self._evaluate_sums(self.replay(other.candidate), 1 << 14, arrays).counts
                    result.counts.update(sums)
                if result.promising:
                    results.append(result)
        candidates = [
            (*a.candidate, *b.candidate)
            for i, a in enumerate(reads)
            for b in reads[i + 1 :]
            if a.candidate[0][0] is not b.candidate[0][0] and (_solves_an_array(a) or _solves_an_array(b))
        ]
        return results + [r for r in self.try_all(candidates, [region]) if r.promising]

    def extensions(self, best, singles):
        """Pairs of the best single explanation with another that together leave nothing unexplained."""
        results = []
        for other in singles:
            if other.candidate[0][0].last:
                continue
            (a, choice_a), (b, choice_b) = best.candidate[0], other.candidate[0]
            if a is b or (not a.reads and a.stage_of(choice_a) == b.stage_of(choice_b)):
                continue
            pair = sorted((*best.candidate, *other.candidate), key=lambda item: places((item,)))
            try:
                result = self.evaluate(tuple(pair), self.places.probes)
            except (NotApplicable, ValueError, LookupError):
                continue
            if result.exact:
                results.append(result)
        return results


class _Facts(dict):
    """Words of sentences; one that is missing leaves a gap, not an error."""

    def __missing__(self, key):
        return ""


def _solves_an_array(result):
    return any(c.wrong and c.share > 0.9 for c in result.counts.values())


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
