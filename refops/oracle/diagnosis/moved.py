"""Right entries at a wrong place: rows, columns, blocks or tiles that are shifted, swapped, repeated or never written.

Of some wrong lines (rows, then columns) of an array the line of the reference is sought that holds the same; where that
is found for nearly all of them, a law is sought that leads from each line to its source. What a law says of all lines
is compared with the dump as what a convention's replay writes is.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from refops.oracle.tally import bits_of

F = np.float32
#: Wrong lines whose source is sought, entries of each that are compared first, and the share that must have one.
SAMPLED, COMPARED, FOUND = 48, 64, 0.9
#: What laws of lines are called.
LAWS = ("shifted", "swapped", "repeated", "rotated", "reversed", "permuted")
#: Lines in a group that a law may stay within.
GROUPS = tuple(1 << n for n in range(1, 10))
#: Entries that a line must have to be told from others.
LEAST = 4
#: Lines that one may come from, at most.
MOST_SOURCES = 512
#: Sources of one line that laws are made of.
MOST_LAWS = 64
#: Entries of a line of which one may differ from its source: an exp that rounds another way.
STRAY = 16
#: Bits of a significand by which numbers are compared where their own bits lead to no law: a kernel whose exp rounds
#: another way, or two orders of one sum, hardly ever differ in them.
COARSE_BITS = 5
#: The part of 1 by which a sampled position follows the one before: no period of a fault meets these positions alone.
GOLDEN = (5**0.5 - 1) / 2
#: Bytes that memory holds before it is written: what allocators, debuggers and the software GPU fill it with; of codes
#: of four bits, half of one.
FILLERS = {0x00, 0xFF, 0xCD, 0xCC, 0xDD, 0xAA, 0x55, 0xA5}
#: Share of the wrong entries that a number must make up to be one that was not written.
MANY = 0.3
#: Share of the entries with one number that belong to the other sign, where no result of these inputs may be so.
OTHER_SIGN = 0.1


class Law(NamedTuple):
    """Where the entries of each line come from.

    Attributes:
        name: what happened, one of `LAWS`.
        axis: 0 for rows, 1 for columns.
        source: int array, for each line the one whose entries it holds; itself where that would lie outside.
        words: what the law says, with {line} for a line.
    """

    name: str
    axis: int
    source: np.ndarray
    words: str

    def apply(self, matrix):
        """The matrix that such a kernel writes instead of this one."""
        return np.take(matrix, self.source, axis=self.axis)

    def names(self, edge):
        """(name, sentence about {what}) of an array whose entries cover `edge` (rows, columns) elements."""
        line = "block" if edge[self.axis] > 1 else ("row", "column")[self.axis]
        return f"{self.name}-{line}s", f"{{what}} are in the wrong {line}s: {self.words.format(line=line)}"

    def held(self):
        """bool: lines for which the law says something."""
        return self.source != np.arange(len(self.source))


class TileLaw(NamedTuple):
    """Where the entries of square tiles come from.

    Attributes:
        edge: of a tile.
        inside: whether each tile is transposed in itself; else tile (i, j) holds tile (j, i).
    """

    edge: int
    inside: bool

    def apply(self, matrix):
        """The matrix that such a kernel writes instead of this one: of the last tiles, the square that fits."""
        made, (rows, columns) = matrix.copy(), matrix.shape
        for top in range(0, rows, self.edge):
            for left in range(0, columns, self.edge):
                if self.inside:
                    size = min(self.edge, rows - top, columns - left)
                    made[top : top + size, left : left + size] = matrix[top : top + size, left : left + size].T
                elif max(top, left) + self.edge <= min(rows, columns):
                    other = matrix[left : left + self.edge, top : top + self.edge]
                    made[top : top + self.edge, left : left + self.edge] = other
        return made

    def names(self, edge):
        """As of a `Law`."""
        tiles = f"tiles of {self.edge} x {self.edge} entries"
        how = f"{tiles} are transposed" if self.inside else f"of {tiles}, (i, j) holds what belongs in (j, i)"
        return "transposed-tiles" if self.inside else "exchanged-tiles", f"{{what}} are in the wrong places: {how}"


#: Laws of tiles that are tried; rows and columns of the part of a matrix that they are tried on first.
TILE_LAWS = tuple(TileLaw(1 << n, inside) for n in range(2, 8) for inside in (True, False))
WINDOW = 512
#: Elements of a matrix up to which tiles that are exchanged are sought.
EXCHANGED = 1 << 20


@dataclass(frozen=True)
class Constant:
    """The number that many wrong entries of an array hold.

    Attributes:
        value: the number, as stored. words: its bits.
        fmt: format of the codes, or None.
    """

    value: object
    fmt: object = None

    @property
    def number(self):
        """The value, in words; of a code its bits as well."""
        number = float(_numbers(np.asarray(self.value), self.fmt))
        text = "NaN" if np.isnan(number) else f"{number:g}"
        return text if self.fmt is None else f"{self.words}, {text}"

    @property
    def may_be_computed(self):
        """Whether overflow, or a NaN among the inputs, may have made it, besides what memory holds."""
        return not (np.isfinite(_numbers(np.asarray(self.value), self.fmt)) or self.is_left_over)

    def held_by(self, got):
        """Where a matrix holds it; one NaN is as good as another, and one zero."""
        return _plain_bits(got) == _plain_bits(np.asarray(self.value))

    @property
    def is_left_over(self):
        """Whether allocators and tools fill unwritten memory with this."""
        held = set(np.asarray(self.value).reshape(1).view(np.uint8).tolist())
        four_bits = self.fmt is not None and self.fmt.bits == 4
        fillers = {half for byte in FILLERS for half in (byte & 15, byte >> 4)} if four_bits else FILLERS
        return len(held) == 1 and held <= fillers

    def is_no_result(self, expected):
        """Whether it stands where numbers of the other sign belong, which neither saturation nor rounding makes.

        Args:
            expected: what belongs where it is held, as stored.
        """
        number, belongs = (_numbers(np.asarray(a), self.fmt) for a in (self.value, expected))
        other = belongs > 0 if np.signbit(number) else belongs < 0
        return np.count_nonzero(other) >= max(OTHER_SIGN * other.size, LEAST)

    @property
    def words(self):
        """The bits, hexadecimal."""
        value = np.asarray(self.value)
        return f"0x{int(bits_of(value.reshape(1))[0]):0{2 * value.itemsize}x}"


def _numbers(stored, fmt):
    """float64 values of numbers, or of codes of a format; codes of no format are numbers."""
    return (stored if fmt is None else fmt.values.take(stored, mode="clip")).astype(np.float64)


def find_constant(got, reference, differs, fmt):
    """The `Constant` that many entries of a matrix hold where it `differs` from the reference, or None.

    It is one that memory holds by itself. Where nearly all of these entries hold it, it may also be NaN or an infinity,
    with which tests fill what is to be written, or a number that stands for results of either sign.

    Args:
        got, reference, differs: matrices. fmt: format of their codes, or None.
    """
    count = int(np.count_nonzero(differs))
    if count < LEAST:
        return None
    most, times = _commonest(_plain_bits(got[differs]))
    found = Constant(most.view(got.dtype), fmt)
    if times < max(MANY * count, LEAST) or np.count_nonzero(found.held_by(reference)) > 0.5 * reference.size:
        return None
    if found.is_left_over:
        return found
    if times < FOUND * count:
        return None
    held = found.held_by(got)
    if found.may_be_computed or (found.is_no_result(reference[differs & held]) and not _is_spread(held, differs)):
        return found
    return None


def _is_spread(held, differs):
    """Whether a number is the result of one entry that its neighbours got as well, as from a broadcast.

    Half of the runs of entries that hold it wrongly, along rows or along columns, border on one that holds it rightly.
    """
    for wrong, right in ((held & differs, held & ~differs), ((held & differs).T, (held & ~differs).T)):
        inside = np.pad(wrong, ((0, 0), (1, 1)))
        first, behind = inside[:, 1:] & ~inside[:, :-1], inside[:, :-1] & ~inside[:, 1:]
        bordering = np.count_nonzero(first[:, 1:-1] & right[:, :-1]) + np.count_nonzero(behind[:, :-1] & right)
        if bordering >= 0.5 * np.count_nonzero(first):
            return True
    return False


def _plain_bits(numbers):
    """The bits of numbers, or codes, with +0 for either zero and one NaN for all."""
    if numbers.dtype == np.uint8:
        return numbers
    plain = np.where(numbers == 0, np.zeros_like(numbers), numbers)
    return bits_of(np.where(np.isnan(plain), np.full_like(plain, np.nan), plain))


def _commonest(bits):
    """(the most common of some unsigned integers, how often it occurs)."""
    if bits.dtype == np.uint8:
        counts = np.bincount(bits)
        return np.uint8(counts.argmax()), int(counts.max())
    values, counts = np.unique(bits, return_counts=True)
    return values[int(np.argmax(counts))], int(counts.max())


def find_law(got, reference, differs):
    """The `Law` that leads from a matrix of the reference to the one that was written, or None.

    Args:
        got, reference: matrices of one dtype.
        differs: bool, where they differ by more than noise.
    """
    if 1 in got.shape:
        return _law_of_vector(got, reference, differs)
    for axis in (0, 1):
        matrices = (bits_of(m) if axis == 0 else np.ascontiguousarray(bits_of(m).T) for m in (got, reference))
        sources = _sources(*matrices, differs if axis == 0 else differs.T)
        law = _law_of(sources, got.shape[axis]) if sources else None
        if law is not None:
            name, source, words = law
            return Law(name, axis, source, words)
    return None


def find_any_law(got, reference, differs):
    """The `Law` or `TileLaw` that leads from a matrix of the reference to the one that was written, or None.

    Numbers are compared by their bits, and where that leads to none by the first few of them.

    Args:
        got, reference, differs: as of `find_law`.
    """
    law = find_law(got, reference, differs) or find_tile_law(got, reference, differs)
    if law is None and got.dtype != np.uint8:
        numbers = coarse(got), coarse(reference), differs
        law = find_law(*numbers) or find_tile_law(*numbers)
    return law


def coarse(values):
    """float32 of few bits, which two ways of computing one number hardly ever tell apart."""
    significand, exponent = np.frexp(values.astype(F))
    return np.ldexp(np.rint(significand * F(1 << COARSE_BITS)), exponent - COARSE_BITS)


def _spread(count, some):
    """Positions below `count`, at most `some`, in ascending order: all, or such that lie in no regular steps."""
    if count <= some:
        return np.arange(count)
    return np.unique((np.arange(some) * GOLDEN % 1 * count).astype(int))


def find_tile_law(got, reference, differs):
    """The `TileLaw` that leads from a matrix of the reference to the one that was written, or None."""
    near = _window(differs)
    parts = got[near], reference[near], differs[near]
    for law in TILE_LAWS:
        if 2 * law.edge > max(got.shape):
            break
        # Tiles that are exchanged lie as far apart as the matrix is large; others are tried on a part of it first.
        if parts[0].size < got.size and not (_leads(law, *parts) if law.inside else got.size <= EXCHANGED):
            continue
        if _leads(law, got, reference, differs):
            return law
    return None


def _leads(law, got, reference, differs):
    """Whether a law gives nearly all entries that differ."""
    return differs.any() and same_bits(law.apply(reference), got)[differs].mean() >= FOUND


def _window(differs):
    """Slices of the part with the first wrong entry, that begins and ends where the largest tiles do."""
    row, column = (int(i) // WINDOW * WINDOW for i in np.unravel_index(int(np.argmax(differs)), differs.shape))
    return slice(row, row + WINDOW), slice(column, column + WINDOW)


def same_bits(one, other):
    """Where two matrices have the same bits."""
    return bits_of(one) == bits_of(other)


def _law_of_vector(got, reference, differs):
    """The `Law` of a matrix of one row or column: entries are compared as numbers, up to the noise of a sum."""
    axis = int(got.shape[0] == 1)
    line, known, wrong = got.reshape(-1), reference.reshape(-1), np.flatnonzero(differs)
    noise = 0.0 if got.dtype == np.uint8 else 2.0**-7 if got.itemsize == 2 else 2.0**-14
    line, known, sources = line.astype(np.float64), known.astype(np.float64), {}
    for number in wrong[_spread(len(wrong), SAMPLED)]:
        alike = np.flatnonzero(np.abs(known - line[number]) <= noise * np.abs(line[number]))
        alike = alike[alike != number]
        if len(alike) <= len(line) // 8:
            sources[int(number)] = alike[np.argsort(np.abs(alike - number), kind="stable")]
    told = {number: alike for number, alike in sources.items() if len(alike)}
    if len(told) < max(LEAST, FOUND * len(sources)):
        return None
    law = _law_of(told, len(line))
    return None if law is None else Law(law[0], axis, law[1], law[2])


def _sources(got, reference, differs):
    """Line -> the lines of the reference that it may come from, the nearest first; {} unless nearly all have one."""
    wrong = np.flatnonzero(differs.any(axis=1))
    if not len(wrong) or got.shape[1] < LEAST:
        return {}
    chosen = wrong[_spread(len(wrong), SAMPLED)]
    found, without = {}, 0
    for line in chosen:
        sources = _sources_of(got[line], reference, differs[line], line)
        if sources is None:
            continue
        if len(sources):
            found[int(line)] = sources
        else:
            without += 1
        if without > (1 - FOUND) * len(chosen):  # too many, whatever the others have
            return {}
    return found if len(found) >= FOUND * (len(found) + without) else {}


def _sources_of(line, reference, differs, number):
    """The lines of the reference that hold what `line` does, the nearest first; the whole line is compared, then the
    part from its first wrong entry to its last. None where both are too short, or too uniform, to tell lines apart."""
    where, told = np.flatnonzero(differs), None
    for first, end in ((0, len(line)), (int(where[0]), int(where[-1]) + 1)):
        part = line[first:end]
        if len(part) < LEAST or len(np.unique(part)) < 2:
            continue
        told = []
        some = first + _spread(len(part), COMPARED)
        alike = np.flatnonzero(np.count_nonzero(reference[:, some] != line[some], axis=1) <= len(some) // STRAY)
        strays = np.count_nonzero(reference[alike, first:end] != part, axis=1)
        alike = alike[(strays <= len(part) // STRAY) & (alike != number)]
        if len(alike):
            return alike[np.argsort(np.abs(alike - number), kind="stable")][:MOST_SOURCES]
    return told


# --- laws -------------------------------------------------------------------------------------------


def _law_of(sources, size):
    """(name, source of every line, words) of the first law that holds for nearly all lines, or None."""
    every, start = np.arange(size), min(sources, key=lambda line: len(sources[line]))
    for source in sources[start][:MOST_LAWS]:
        for name, leads, words in _laws(start, int(source), every, size):
            inside = (leads >= 0) & (leads < size)
            leads = np.where(inside, leads, every)
            held = sum(leads[line] in sources[line] for line in sources)
            if held >= FOUND * len(sources) and (leads != every).any():
                return name, leads, words
    return None


def _laws(line, source, every, size):
    """Laws that lead from a line to its source, the simplest first."""
    by, across = source - line, line ^ source
    sign = "+" if by > 0 else "-"
    yield "shifted", every + by, f"{{line}} n holds what belongs in {{line}} n {sign} {abs(by)}"
    if line + source == size - 1:
        yield "reversed", size - 1 - every, "all {line}s are in reverse order"
    yield "swapped", every ^ across, f"{{line}}s n and n ^ {across} are exchanged"
    yield "repeated", np.full(size, source), f"each {{line}} holds what belongs in {{line}} {source}"
    yield "shifted", (every + by) % size, f"{{line}} n holds what belongs in {{line}} (n + {by % size}) mod {size}"
    for group in GROUPS:
        if group >= size:
            break
        yield from _laws_in_groups(line, source, every, group)


def _laws_in_groups(line, source, every, group):
    """Laws within groups of lines, and of where groups come from."""
    start, place = every - every % group, every % group
    into, by = source % group, (source - line) % group
    yield "repeated", start + into, f"each {group} {{line}}s hold what belongs in the {_nth(into)} of them"
    same_group = place + source // group * group
    yield "repeated", same_group, f"each {group} {{line}}s hold what belongs in the same {group}"
    yield "rotated", start + (place + by) % group, f"each {group} {{line}}s are rotated by {by}"
    yield "reversed", start + group - 1 - place, f"each {group} {{line}}s are in reverse order"
    for few in GROUPS:
        if few >= group:
            break
        many = group // few
        yield "permuted", start + place % few * many + place // few, f"each {group} {{line}}s are dealt out by {few}"


def _nth(number):
    return "first" if number == 0 else f"number {number}"
