"""The check of a product: the bits of a card's order, else the bound of any order of float32 sums, else wrong."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from refops.oracle.enclosure import Bounds
from refops.oracle.entries import shown_entry, shown_range
from refops.oracle.products.cards import has_short_sums, orders_of, short_orders_of
from refops.oracle.products.case import ProductCase
from refops.oracle.products.product import SHORT_BITS
from refops.oracle.products.splits import SPLIT, split_shown
from refops.oracle.report import NOTHING_CHECKED, Mismatch, Report
from refops.oracle.tally import Tally, bits_of, distance_of
from refops.tiles import cut

F = np.float32
#: Rows and columns of a tile of results that is judged at once.
TILE = 512
#: Products of elements, at most, that are added up to compare a dump with one order of a card.
MOST_PRODUCTS = 1 << 21
#: The same where some results have the bits of an order of few bits, to see whether the others do.
MOST_CONFIRMED = 1 << 26
#: What the bound of sums may be, as a share of the typical result, before the report says so.
WIDE = 2.0**-6
#: How many times as large as in a card's order the errors of sums of few bits may be, in the root mean square over a
#: row or a column, and how many of these there have to be before each is looked at by itself.
UNUSUAL, LEAST_ENTRIES = 8, 16
#: Low bits that are zero in every float32 result, at least, before the report says so.
ZERO_BITS = 4
#: Share of the squares of the errors that a common factor has to make, and the least such factor, less 1.
OF_A_FACTOR, LEAST_FACTOR = 0.9, 2.0**-20


@dataclass(frozen=True)
class ProductReport(Report):
    """What `check` found of a product.

    Attributes:
        order: "card" where some card's order gives the bits of the dump, "float32" where it is right for some order of
            float32 sums, "short" where it is right for none, except sums of the few bits that Hopper's FP8 unit keeps,
            "wrong".
        bound: what each value was judged by: "bits" of a card, or the bound of sums in any order, "float32" or "short".
        width: how far a result may be off within that bound, in the mean, as a share of the results' root mean square.
        cards: the cards whose bits these are, with the interval of promotion.
        compared: results of which the bits were compared with those of cards.
    """

    order: str = "wrong"
    bound: str = "float32"
    width: float = 0.0
    cards: tuple[str, ...] = ()
    compared: int = 0

    def headline(self) -> str:
        """The verdict in one line."""
        judged = "the bits of a card"
        if self.bound != "bits":
            sums = {"float32": "float32 sums", "short": f"sums of {SHORT_BITS} bits"}[self.bound]
            judged = f"{sums} in any order, within {100 * self.width:.2g} % of a typical result"
        return f"{'RIGHT' if self.ok else 'WRONG'}: {self.operation}: {self.settings} ({judged})"

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON: that of `Report`, and its own attributes."""
        return super().as_dict() | {
            "order": self.order,
            "bound": self.bound,
            "width": self.width,
            "cards": list(self.cards),
            "compared": self.compared,
        }


def check_product(inputs, outputs, scaling, params, swizzled_scales, diagnosing, budget, progress):
    """Return the `ProductReport` on a dump; arguments as for `refops.oracle.check`."""
    case = ProductCase(inputs, scaling, params, swizzled_scales=swizzled_scales)
    y = case.fit_outputs(outputs)[0]["y"]
    with np.errstate(all="ignore"):
        judge = ProductJudge(case, y)
        judge.run()
        explanations, diagnosed = [], diagnosing and not case.is_empty and bool(judge.tally.count)
        doubtful = judge.order == "short"
        if diagnosed or doubtful:
            from refops.oracle.diagnosis import Budget
            from refops.oracle.products.diagnosis import diagnose  # a right dump does not pay for its import

            limit = Budget(budget, progress)
            has_short_sums = judge.has_short_sums and not doubtful
            try:
                explanations = diagnose(
                    judge.product, judge.y, judge.nearest, judge.doubted, limit, has_short_sums, single=doubtful
                )
            except Exception as error:  # a mistake in one of many faults must not cost the verdict
                judge.notes.append(f"the diagnosis failed, the verdict stands: {type(error).__name__}: {error}")
            if doubtful and explanations:
                judge.refuse()
            if limit.ran_out:
                judge.notes.append(
                    f"the diagnosis ended after {budget:g} s of processor time: a larger budget tries more"
                )
        explanations = explanations if diagnosing else []
        judge.note_split(explanations)
        return judge.report(explanations, diagnosing and bool(judge.tally.count))


class ProductJudge:
    """One check.

    Attributes:
        case: the `ProductCase`. product: its `Product`. y: the dump, (m, n).
        tally: what is wrong.
        nearest: the right results, (m, n): exact sums, rounded once.
        doubted: bool (m, n), what is outside of the bound of float32 sums.
        has_short_sums: whether sums of few bits are right: a card has such a unit for the operands.
        bound: as in `ProductReport`. widths: "float32", "short" -> the width of that bound, where it was used.
        orders: the cards' orders whose bits the dump has. compared: in how many results.
        notes: what else the user should know.
    """

    def __init__(self, case, y):
        self.case, self.product = case, case.product(y.dtype)
        self.stored, self.y = y, y.reshape(self.product.shape)
        self.has_short_sums = has_short_sums(self.product) and case.sums != "float32"
        self.bound, self.widths = "float32", {}
        self.nearest, self.doubted = np.zeros_like(self.y), np.zeros(self.product.shape, bool)
        self.tally, self.notes, self.orders, self.compared = self._new_tally(), [], [], 0
        self.order = "float32"

    def _new_tally(self, before=None):
        """A tally without mismatches; what differs from the reference is that of `before`."""
        tally = Tally(self.case.slots["y"])
        tally.entries = self.y.size
        if before is not None:
            tally.differing, tally.differing_nans = before.differing, before.differing_nans
        return tally

    def run(self):
        """Judge the dump."""
        if 0 in self.product.shape:
            self.notes.append(NOTHING_CHECKED)
            return
        self._judge_bounds()
        if self.case.card is not None:
            self._judge_bits()
            return
        self._compare_with_cards()
        if self.doubted.any():
            self.order = "short" if self._is_short() else "wrong"
        if self.orders and self.order == "short":
            self._confirm_short()
        if self.orders and self.order != "wrong":
            self.order, self.bound = "card", "bits"
        elif self.order == "short" and self.case.sums is None:
            self._judge_usual()
        if self.bound != "bits":
            self._note_width()
            if self.order in ("float32", "short"):
                self._note_what_shows()

    def _tiles(self):
        rows, columns = (cut(size, TILE) for size in self.product.shape)
        return [(r, c) for r in rows for c in columns]

    # --- bounds -----------------------------------------------------------------------------------

    def _judge_bounds(self):
        """Compare each result with the bound of float32 sums."""
        widths = []
        for rows, columns in self._tiles():
            bounds = self.product.bounds(rows, columns)
            values = self.y[rows, columns]
            self.nearest[rows, columns] = nearest = self.product.stored(rows, columns)
            self.tally.count_differing(values, nearest)
            self.doubted[rows, columns] = wrong = ~bounds.contain(values.astype(F))
            self._add(rows, columns, wrong, bounds)
            widths.append(_relative_width(bounds, nearest))
        self.widths["float32"] = float(np.median(widths))

    @property
    def width(self):
        """The width of the bound that the dump was judged by, 0 for bits."""
        return self.widths.get(self.bound, 0.0)

    def _note_width(self):
        if self.width > WIDE:
            refused = ""
            if self.bound == "short":
                refused = f"; params={{'sums': 'float32'}} refuses sums of {SHORT_BITS} bits"
            self.notes.append(
                f"sums of {self.product.k:,} terms: any order may be off by {100 * self.width:.2g} % of a typical "
                f"result: smaller errors cannot be seen{refused}"
            )

    def _note_what_shows(self):
        """Notes on what is right by its bound, but unlike sums in float32."""
        if self.order == "short":
            self.notes.append(
                f"outside the bound of float32 sums: {np.count_nonzero(self.doubted):,} of {self.y.size:,} values"
            )
        zero, own = _common_zero_bits(self.y), _common_zero_bits(self.nearest)
        if zero >= max(ZERO_BITS, own + 1) and self.y.size >= LEAST_ENTRIES:
            self.notes.append(
                f"the last {zero} bits of every value are zero, which the bound permits: results seem to be rounded to "
                f"{np.finfo(F).nmant + 1 - zero} bits (TF32 has 11, bfloat16 8)"
            )
        factor = self._common_factor()
        if factor is not None:
            self.notes.append(
                f"nearly all that values are off by is a common factor, {factor:.7g} = 1 {'-+'[factor > 1]} "
                f"2^{np.log2(abs(factor - 1)):.1f}, which the bound permits"
            )

    def note_split(self, explanations):
        """A note on results of a split product whose parts were rounded to 16 bits, unless it is an explanation."""
        if self.bound == "bits" or 0 in self.product.shape or any(SPLIT in one.names for one in explanations):
            return
        split = split_shown(self.product, self.y)
        if split is not None:
            permitted = "" if self.tally.count else ", which the bound permits"
            self.notes.append(f"results that differ from the exact sums, rounded once, are those of {split}{permitted}")

    def _common_factor(self):
        """The number that a sample of the results is the exact one times, if it makes nearly all of their errors."""
        rows, columns = self._sample()
        exact = self.product.exact(rows, columns)
        off = self.y[rows][:, columns].astype(np.float64) - exact
        usable = np.isfinite(off) & np.isfinite(exact)
        exact, off = exact[usable], off[usable]
        size, errors = float(exact @ exact), float(off @ off)
        if off.size < LEAST_ENTRIES or not size or not errors:
            return None
        share = float(off @ exact) / size
        common = share**2 * size >= OF_A_FACTOR * errors and abs(share) >= LEAST_FACTOR
        return 1 + share if common else None

    def _is_short(self):
        """Whether the dump is within the bound of a unit of few bits, if there is one; then that bound judges it."""
        if not self.has_short_sums:
            return False
        self.tally, self.bound, widths = self._new_tally(self.tally), "short", []
        for rows, columns in self._tiles():
            if self.doubted[rows, columns].any():
                bounds = self.product.bounds(rows, columns, short=True)
                self._add(rows, columns, ~bounds.contain(self.y[rows, columns].astype(F)), bounds)
                widths.append(_relative_width(bounds, self.nearest[rows, columns]))
        self.widths["short"] = float(np.median(widths))
        return not self.tally.count

    def _judge_usual(self):
        """Refuse rows and columns whose errors are far larger than a unit of few bits makes them.

        The bound is the worst case of the worst order. The errors of a row, as shares of their bounds, are of the size
        that they have in a card's own orders, whatever the order is.
        """
        rows, columns = self._sample()
        own = [
            self._squares(rows, columns, order.stored(self.product, rows, columns))
            for order in short_orders_of(self.product)
        ]
        most = UNUSUAL**2 * max(float(_mean(squares)) for squares in own)
        squares = np.full(self.y.shape, np.nan)
        for rows, columns in self._tiles():
            squares[rows, columns] = self._squares(rows, columns, self.y[rows, columns])
        unusual = np.full(self.y.shape, _mean(squares) > most)
        for axis in (0, 1):
            if self.y.shape[axis] >= LEAST_ENTRIES:
                unusual |= _mean(squares, axis=axis, keepdims=True) > most
        unusual &= self.doubted
        if not unusual.any():
            return
        self.order, self.bound, self.tally = "wrong", "float32", self._new_tally(self.tally)
        for rows, columns in self._tiles():
            self._add(rows, columns, unusual[rows, columns], self.product.bounds(rows, columns))
        self.doubted = unusual
        self.notes.append(
            f"{np.count_nonzero(unusual):,} values are within the worst that {SHORT_BITS} bits may do, but in rows or "
            f"columns whose errors are more than {UNUSUAL} times those of Hopper's FP8 unit: "
            f"params={{'sums': 'short'}} takes them for right"
        )

    def _squares(self, rows, columns, values):
        """float64, the squares of errors of some results, as shares of the bound of few bits; NaN without a bound."""
        bounds = self.product.bounds(rows, columns, short=True)
        widths = (bounds.hi.astype(np.float64) - bounds.lo) / 2
        off = values.astype(np.float64) - self.product.exact(rows, columns)
        return np.where(np.isfinite(off) & np.isfinite(widths) & (widths > 0), off / widths, np.nan) ** 2

    def refuse(self):
        """Judge by the bound of float32 sums alone: what few bits would excuse is a known fault in float32."""
        self.order, self.bound, self.tally = "wrong", "float32", self._new_tally(self.tally)
        for rows, columns in self._tiles():
            self._add(rows, columns, self.doubted[rows, columns], self.product.bounds(rows, columns))

    def _add(self, rows, columns, wrong, bounds):
        """Add the wrong results of a tile to the tally."""
        if not wrong.any():
            return
        self.tally.wrong.reshape(self.product.shape)[rows, columns] |= wrong
        distance = distance_of(self.y[rows, columns].astype(F), bounds, self.y.dtype)

        def describe(index):
            row, column = (int(i) + part.start for i, part in zip(index, (rows, columns), strict=True))
            got = shown_entry(self.y[row, column], self.tally.slot)
            right = float(self.product.exact(np.array([row]), np.array([column]))[0, 0])
            stored = (*map(int, np.unravel_index(row, self.stored.shape[:-1])), column)
            acceptable = shown_range(bounds, index)
            inputs = {} if np.isnan(right) else {"exact": right}
            return Mismatch("y", stored, (row, column), got, acceptable, float(distance[index]), inputs)

        self.tally.add(wrong, distance, describe)

    # --- cards ------------------------------------------------------------------------------------

    def _compare_with_cards(self):
        """Find the orders of cards that give the dump's bits, of all results or of some."""
        rows, columns = self._sample()
        values = self.y[rows][:, columns]
        for order in orders_of(self.product):
            if _same_bits(order.stored(self.product, rows, columns), values):
                self.orders.append(order)
        self.compared = values.size

    def _confirm_short(self):
        """Compare all results with the order that some have, unless there are too many: the bound alone says little."""
        if self.compared == self.y.size or self.y.size * self.product.k > MOST_CONFIRMED:
            return
        order, different = self.orders[0], 0
        for rows, columns in self._tiles():
            mine = order.stored(self.product, rows, columns)
            different += int(np.count_nonzero(~_equal_bits(mine, self.y[rows, columns])))
        self.compared = self.y.size
        if different:
            self.orders = []
            self.notes.append(
                f"{different:,} of {self.y.size:,} values do not have the bits of {order}, which the others have"
            )
        else:
            self.orders = [order]

    def _sample(self):
        """Indices of rows and of columns, spread over the result, whose products are not too many to be compared."""
        m, n = self.product.shape
        entries = max(MOST_PRODUCTS // max(self.product.k, 1), 64)
        if m * n <= entries:
            return np.arange(m), np.arange(n)
        edge = max(int(entries**0.5), 1)
        rows = min(m, max(edge, entries // n))
        columns = min(n, max(entries // rows, 1))
        return (np.linspace(0, size - 1, count).astype(int) for size, count in ((m, rows), (n, columns)))

    def _judge_bits(self):
        """Demand the bits of one card, in whichever of its orders leaves fewer wrong."""
        orders = orders_of(self.product, self.case.card, self.case.split_accumulator)
        rows, columns = self._sample()
        values = self.y[rows][:, columns]
        wrong = [np.count_nonzero(~_equal_bits(o.stored(self.product, rows, columns), values)) for o in orders]
        order = orders[int(np.argmin(wrong))]
        self.tally = self._new_tally(self.tally)
        for rows, columns in self._tiles():
            mine = order.stored(self.product, rows, columns)
            bounds = Bounds(*(mine.astype(F),) * 2, np.isnan(mine.astype(F)))
            self._add(rows, columns, ~_equal_bits(mine, self.y[rows, columns]), bounds)
        self.compared, self.bound = self.y.size, "bits"
        if self.tally.count:
            self.order = "wrong"
            nearer = ""
            if len(orders) > 1:
                nearer = f", the nearer of {' and '.join(map(str, orders))}: split_accumulator says which to demand"
            self.notes.append(f"judged by the bits of {order}{nearer}")
        else:
            self.order, self.orders = "card", [order]

    # --- the report -------------------------------------------------------------------------------

    def report(self, explanations, diagnosed):
        """The `ProductReport`."""
        order = self.order
        unwritten = self.tally.unwritten(self.stored, explanations)
        cards = tuple(map(str, self.orders)) if order == "card" else ()
        return ProductReport(
            operation="matmul",
            settings=self._settings(),
            ulp=0.0,
            arrays=(self.tally.verdict(),),
            diagnosis=tuple(explanations),
            notes=(*self.notes, *unwritten),
            diagnosed=diagnosed,
            leads=tuple(self._leads(order)),
            order=order,
            bound=self.bound,
            width=self.width,
            cards=cards,
            compared=self.compared,
        )

    def _settings(self):
        a, b = (
            repr(operand.scaling) if operand.scaling is not None else str(operand.elements.dtype)
            for operand in self.case.operands.values()
        )
        params = [f"{name}={value!r}" for name, value in self.case.params.items()]
        return "; ".join([f"{a} by {b} -> {self.y.dtype}", *params])

    def _leads(self, order):
        """What the verdict rests on."""
        some = f" in the {self.compared:,} results that were compared" if self.compared < self.y.size else ""
        if order == "card":
            yield f"y: bit for bit what these compute{some}: {'; '.join(map(str, self.orders))}"
        elif order == "float32":
            cards = dict.fromkeys(one.card for one in orders_of(self.product))
            others = f"; bits differ from those of {', '.join(cards)}" if cards else "; no card has this product"
            yield f"y: right for some order of float32 sums{others if self.y.size else ''}"
        elif order == "short":
            yield (
                f"y: outside the bound of float32 sums, within that of the {SHORT_BITS} bits of Hopper's FP8 unit; "
                f"not the bits of any order that is known here"
            )
        elif self.orders and self.case.sums == "float32":
            orders = "; ".join(map(str, self.orders))
            yield f"y: bit for bit what these compute{some}, which sums='float32' refuses: {orders}"
        elif self.case.card is not None and not self.doubted.any():
            yield f"y: right for some order of float32 sums, but not the bits of {self.case.card}"


def _common_zero_bits(values):
    """How many low bits are zero in all of some float32 values; 0 for another dtype, or where all values are zero."""
    if values.dtype != F:
        return 0
    held = int(np.bitwise_or.reduce(bits_of(values), axis=None))
    return (held & -held).bit_length() - 1 if held else 0


def _equal_bits(mine, values):
    """Where two arrays of one dtype agree: the same bits, or NaN in both."""
    return (bits_of(mine) == bits_of(values)) | (np.isnan(mine) & np.isnan(values))


def _same_bits(mine, values):
    return bool(_equal_bits(mine, values).all())


def _mean(values, **options):
    """The mean of the finite ones of some values, 0 where there are none."""
    finite = np.isfinite(values)
    return np.where(finite, values, 0).sum(**options) / np.maximum(finite.sum(**options), 1)


def _relative_width(bounds, values):
    """Half the width of intervals, in the mean, as a share of the typical value: its root mean square."""
    widths, values = (bounds.hi.astype(np.float64) - bounds.lo) / 2, np.abs(values.astype(np.float64))
    finite = np.isfinite(widths) & np.isfinite(values)
    typical = np.sqrt(np.mean(values[finite] ** 2)) if finite.any() else 0
    return float(np.mean(widths[finite]) / typical) if typical else 0.0
