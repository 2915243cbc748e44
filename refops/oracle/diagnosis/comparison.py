"""How an array of a dump compares with what a convention's replay writes: counts of entries, and what they are worth.

share    of an array's wrong entries that the replay reproduces, averaged over the arrays with wrong entries, so
         that a few wrong scales weigh as much as many wrong codes;
damage   entries that are right in the dump but not in the replay, as a share of the wrong ones.
"""

from dataclasses import dataclass, field, replace
from functools import cache, cached_property, reduce

import numpy as np

from refops.oracle.conventions import CONVENTIONS

#: An explanation's least share, and the most damage.
ENOUGH, DAMAGE = 0.9, 0.2
#: Relative difference up to which a wrong number may be the one of a replay.
NEAR = 2.0**-5
#: Wrong entries that a part of an array must have, unless all are, to speak against an explanation of the whole.
LEAST_WRONG = 16
#: Share of the entries of an array that noise may move; and of codes in which nothing is wrong, where the one scale
#: that they are under is, and is explained: a replay has to give their bits.
NOISE, QUIET_NOISE = 5e-3, 2.0**-12


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
        """Damaged entries per wrong one, or per hundredth of all where none is wrong; per `floor` of all at least."""
        return self.damaged / max(self.wrong or 0.01 * self.entries, floor * self.entries, 1)

    @property
    def shows(self):
        """Whether more than a few of the wrong entries are explained, by values that the reference does not have."""
        return self.explained >= 0.1 * self.wrong > 0 and self.gained >= 0.04 * self.wrong

    @property
    def refutes(self):
        """Whether a part of an array is explained so badly, or harmed so much, that the whole is not explained."""
        if self.damaged > max(8, 2 * self.wrong, 0.05 * self.entries):
            return True
        return self.wrong >= min(LEAST_WRONG, self.entries) and self.explained < 0.5 * self.wrong


@dataclass
class Result:
    """A candidate and how it compares.

    Attributes:
        candidate: tuple of (convention, choice).
        counts: array name -> `Count`.
        facts: words for the sentences.
        made: (region, array name -> what the replay wrote there) of each region, where that was to be kept.
        rows: `Lines` that the candidate speaks of, None for all.
    """

    candidate: tuple
    counts: dict
    facts: dict = field(default_factory=dict)
    made: list = field(default_factory=list)
    rows: object = None

    def __add__(self, other):
        both = {name: self.counts[name] + other.counts[name] for name in self.counts.keys() & other.counts.keys()}
        counts = {**self.counts, **other.counts, **both}
        return replace(self, counts=counts, facts={**self.facts, **other.facts}, made=self.made + other.made)

    def of(self, names):
        """The same, of some arrays alone."""
        return replace(self, counts={name: count for name, count in self.counts.items() if name in names})

    @property
    def wrong_counts(self):
        """The counts of the arrays with wrong entries."""
        return [c for c in self.counts.values() if c.wrong]

    @property
    def share(self):
        """Mean share over the arrays with wrong entries."""
        wrong = self.wrong_counts
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
    def is_clear(self):
        """Whether every wrong entry is explained and none is harmed: the remaining differences are noise."""
        return self.explained == 1 and self.damaged == 0

    @property
    def enough(self):
        """Whether this explains the dump."""
        if self.damage > DAMAGE or not any(c.gained for c in self.wrong_counts):
            return False
        explains_all = any(c.share == 1 and c.wrong == c.entries for c in self.wrong_counts)
        harm = sum(
            c.damaged
            for c in self.counts.values()
            if c.wrong or not explains_all or c.damaged > QUIET_NOISE * c.entries
        )
        if harm >= sum(c.explained for c in self.wrong_counts):  # it moves faults to where the dump is right
            return False
        every = self.share >= ENOUGH and min(c.share for c in self.wrong_counts) >= 0.75
        stray = self.explained >= 0.99 and all(c.wrong - c.explained <= 1e-3 * c.entries for c in self.wrong_counts)
        return every or stray

    @property
    def promising(self):
        """Whether a probe gives no reason to drop this; in a probe a few entries weigh much."""
        few = sum(c.wrong for c in self.counts.values()) < 40
        solves_one = any(
            c.wrong >= 8 and c.share > 0.95 for c in self.wrong_counts
        )  # what is left may be a stray fault
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


def same(got, made, fmt, nan=None):
    """Where two arrays agree: the same bits, or NaN in both. `nan`: where `got` has NaN codes, if known."""
    if got.dtype == np.uint8:
        equal = got == made
        if fmt is not None and fmt.nan_code is not None:
            nan = _nan_codes_in(got, fmt) if nan is None else nan
            if nan.size:
                equal |= nan & _is_nan(made, fmt)
        return equal
    bits = f"u{got.dtype.itemsize}"
    equal = np.ascontiguousarray(got).view(bits) == np.ascontiguousarray(made, got.dtype).view(bits)
    return equal | (np.isnan(got) & np.isnan(made))


def _nan_codes_in(codes, fmt):
    """Which codes are NaN; an empty array where none is."""
    nan = _is_nan(codes, fmt)
    return nan if nan.any() else np.zeros(0, bool)


def _is_nan(codes, fmt):
    """Which codes are NaN. A format has few of them, so comparing is faster than looking each code up."""
    return reduce(np.logical_or, (codes == code for code in _nan_codes(fmt)))


@cache
def _nan_codes(fmt):
    return np.flatnonzero(np.isnan(fmt.values)).astype(np.uint8).tolist()


class Part:
    """One array of the dump on one region, ready to be compared.

    Attributes:
        got, wrong, reference: crops.
        fmt: format of its codes, or None.
        relaid: whether a reading moved its entries, so that `wrong` only counts.
        few: whether these are scales or amaxes: few numbers, which must agree closely.
        follows: codes under a scale that is not the reference's: they are what the kernel made of that scale, also
            where they are right under it, so that a replay must give them. None where no scale differs.
        sums: whether terms may cancel, so that an error is large beside the sum.
    """

    def __init__(self, got, wrong, reference, fmt, relaid=False, few=False, follows=None, sums=False):
        self.got, self.wrong, self.reference, self.fmt, self.relaid = got, wrong, reference, fmt, relaid
        self.few, self.follows, self.sums = few, follows, sums
        self.wrong_count = int(np.count_nonzero(wrong))
        self._base = None

    @cached_property
    def _got_nan(self):
        return self._nan_of(self.got)

    @cached_property
    def _reference_nan(self):
        return self._nan_of(self.reference)

    def _nan_of(self, codes):
        """Where codes are NaN (`_nan_codes_in`); None where this is no array of such."""
        has_nan = codes.dtype == np.uint8 and self.fmt is not None and self.fmt.nan_code is not None
        return _nan_codes_in(codes, self.fmt) if has_nan else None

    @cached_property
    def _differs(self):
        """Where the dump is not the reference."""
        return ~same(self.got, self.reference, self.fmt, self._got_nan)

    def compare(self, made):
        """Return the `Count` of a replay."""
        if made is self.reference and self._base is not None:
            return self._base
        equal = same(self.got, made, self.fmt, self._got_nan)
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
                count.gained = int(np.count_nonzero(explained & self._differs))
            bad = ~(self.wrong | agrees)
            if bad.any():
                bad &= self._is_said(made)
            count.damaged = int(np.count_nonzero(bad))
        if made is self.reference:
            self._base = count
        return count

    def _is_said(self, made):
        """Where a replay can be compared: it changes an entry, or the scale that the entry is under."""
        if made is self.reference:
            said = np.zeros(self.got.shape, bool)
        else:
            said = ~same(self.reference, made, self.fmt, self._reference_nan)
        return said if self.follows is None else said | self.follows

    def marks(self, made, laid=None):
        """Where a replay shows, where it would show but does not, and what it leaves unexplained: three bool arrays.

        Args:
            made: what the replay writes.
            laid: the dump as a reading lays it out; it is compared with `made` in place of the dump.
        """
        got = self.got if laid is None else laid
        agrees = same(got, made, self.fmt)
        differs = self._differs
        changes = ~same(self.got, laid, self.fmt) if laid is not None else ~same(self.reference, made, self.fmt)
        if got.dtype != np.uint8 and got.size:
            agrees = agrees | (self._near(made) if laid is None else False)
            differs = self.wrong
        absent = ~self.wrong & ~agrees & (changes | (False if self.follows is None else self.follows))
        return differs & agrees & changes, absent, self.wrong & ~agrees

    def _near(self, made):
        """Where numbers agree up to the noise of float32 arithmetic.

        A wrong entry must be far nearer to the replay than to the reference; a right one may differ as much as the
        reference does.
        """
        got, made, reference = (a.astype(np.float64) for a in (self.got, made, self.reference))
        off, own = np.abs(got - made), np.abs(got - reference)
        own = np.where(np.isfinite(own), own, 0)
        if self.relaid:
            return off <= 2.0**-19 * np.where(np.isfinite(made), np.abs(made), 0)
        noise = 2.0**-19 * np.abs(got)
        explained = off <= (np.minimum(noise, own / 8) if self.few else own / 8)
        if not self.sums:  # a number near zero is near to all others there
            explained &= off <= NEAR * np.maximum(np.abs(got), np.abs(made))
        return np.where(self.wrong, explained, off <= 4 * own + noise)
