"""The known ways in which a matrix product goes wrong: for each a small function, a name and a sentence for the user.

    @fault("bias-missing", "The bias is not added.", part="bias")
    def bias_missing(attempt):
        attempt.require(attempt.product.bias is not None)
        attempt.change(bias=None)

They are the conventions of products (`Convention` of `refops.oracle.conventions.registry`): each changes the `Product`
of an `Attempt`, or how the dump is read, and says in `attempt.facts` the words that its sentence needs. Nothing is
computed here. The order of registration breaks ties; `last` puts a fault behind all others.
"""

import math
from dataclasses import replace

import numpy as np

from refops.arguments import BFLOAT16
from refops.formats import FORMATS
from refops.oracle.conventions.fits import powers_of_two, roundoff
from refops.oracle.conventions.registry import Convention
from refops.oracle.products.cards import half_orders_of
from refops.oracle.products.halves import (
    BlockedProduct,
    DequantizedProduct,
    SteppedProduct,
    UnitProduct,
    is_narrowed,
)
from refops.oracle.products.operands import Operand, direction_of
from refops.oracle.products.splits import SPLIT, SplitProduct, split_shown
from refops.oracle.replay import NotApplicable
from refops.quantization.dequantize import DequantizedSource
from refops.quantization.result import reorder_scales
from refops.rounding import round_once
from refops.tiles import materialize

F = np.float32
FLOAT16 = np.dtype(np.float16)
HALVES = {"float16": FLOAT16, "bfloat16": BFLOAT16}
#: Which operands a fault is in.
OPERANDS = {"a": ("a",), "b": ("b",), "both": ("a", "b")}
#: Factors that are said as what they are where the measured one is as near as the result's dtype, and sums, allow.
SIMPLE_FACTORS = {"2": 2.0, "1/2": 0.5, "4": 4.0, "1/4": 0.25, "3": 3.0, "1/3": 1 / 3}
SIMPLE = 2.0**-14
#: Terms that a kernel takes in one step, or in one part of a split sum.
STEPS = (8, 16, 32, 64, 128, 256, 512)
PARTS = (2, 3, 4, 8)
#: Rows and columns in which terms that are missing are sought, and the least share of a term that must be.
SEEN, LEAST_SHARE = 64, 0.5
#: Terms to whose multiples the ends of such a run are rounded, where they may be off by a few.
RUN_STEP = 32

#: Every fault by name, in the order of registration.
FAULTS: dict[str, Convention] = {}


class Attempt:
    """A product and a dump of it, which a fault changes.

    Attributes:
        product: the `Product`.
        y: the dump, (m, n).
        facts: words for sentences.
        applied, changed: what `Convention.apply` notes.
    """

    def __init__(self, product, y):
        self.product, self.y = product, y
        self.facts, self.applied, self.changed = {}, (), set()

    def require(self, condition):
        """NotApplicable unless a condition holds."""
        if not condition:
            raise NotApplicable

    def change(self, **changes):
        """Change fields of the product."""
        self.product = replace(self.product, **changes)

    def take(self, axis, source):
        """Let the rows (axis 0) or columns of the product be others of its own."""
        self.product = self.product.taken(axis, source)

    def read(self, function):
        """Read the dump as if a function had laid it out, which undoes itself."""
        self.y = function(self.y)

    def change_operands(self, names, function):
        """Change operands, named as in `OPERANDS`; NotApplicable where the function changes none."""
        operands = {name: getattr(self.product, name) for name in OPERANDS[names]}
        changed = {name: function(operand) for name, operand in operands.items()}
        self.require(all(changed[name] is not operand for name, operand in operands.items()))
        self.facts["operand"] = "both operands" if names == "both" else names
        self.change(**changed)


def fault(name, sentence, *, part, choices=None, last=False):
    """Register a function that changes an `Attempt`; `part`: what of the product it changes, "layout" of a reading."""
    if choices is not None and not callable(choices):
        fixed = tuple(choices)
        choices = lambda attempt: fixed  # noqa: E731

    def register(function):
        FAULTS[name] = Convention(name, sentence, function, part, choices, last=last)
        return function

    return register


def in_operands(*others):
    """Choices: each of `OPERANDS`, with each of some others."""
    return tuple((names, *rest) for names in OPERANDS for rest in _pairs(others))


def _pairs(lists):
    return [()] if not lists else [(one, *rest) for one in lists[0] for rest in _pairs(lists[1:])]


# --- the result as it lies ------------------------------------------------------------------------


@fault("result-transposed", "The result is written transposed.", part="layout")
def result_transposed(attempt):
    m, n = attempt.y.shape
    attempt.require(m > 1 and n > 1)
    attempt.read(lambda y: y.reshape(n, m).T)


# --- parts of a split product ---------------------------------------------------------------------


def _split(attempt):
    """The split that the dump shows, or none."""
    found = split_shown(attempt.product, attempt.y)
    return [] if found is None else [found]


@fault(
    SPLIT,
    "The product is split along k, and what its parts add up to is rounded to 16 bits before these are added: {split}, "
    "where float32 is kept.",
    part="sums",
    choices=_split,
)
def split_sums_in_half(attempt, split):
    attempt.facts["split"] = split
    options = {"step": split.step, "total": split.total, "late": split.late}
    attempt.product = SplitProduct.of(attempt.product, accumulator=HALVES[split.dtype], **options)


# --- scales ---------------------------------------------------------------------------------------


def _scaled(operand):
    """Whether an operand has scales of blocks, or one of the tensor."""
    return operand.quantized is not None


def _with_changed_scales(operand, function):
    """The operand with a function of its scales: those of its blocks, or that of the tensor if it has no others."""
    if not _scaled(operand):
        return operand
    if operand.scales is None:
        return replace(operand, factor=function(operand.factor.astype(np.float64)))
    return operand.with_scales(function(operand.scales))


@fault(
    "scales-of-other-operand",
    "The scales of {operand} are those of the other operand.",
    part="scales",
    choices=OPERANDS,
)
def scales_of_other_operand(attempt, names):
    product = attempt.product
    others = {"a": product.b, "b": product.a}

    def changed(operand):
        other = others[operand.name]
        attempt.require(_scaled(operand) and _scaled(other) and operand.block == other.block)
        if operand.scales is None:
            return replace(operand, factor=other.factor)
        return operand.with_scales(other.scales[np.arange(operand.rows) % other.rows])

    attempt.change_operands(names, changed)


@fault("scales-missing", "The scales of {operand} are missing.", part="scales", choices=OPERANDS)
def scales_missing(attempt, names):
    attempt.change_operands(names, lambda operand: _with_changed_scales(operand, np.ones_like))


@fault("scales-twice", "The scales of {operand} are applied twice.", part="scales", choices=OPERANDS)
def scales_twice(attempt, names):
    attempt.change_operands(names, lambda operand: _with_changed_scales(operand, np.square))


@fault(
    "scales-inverted",
    "The scales of {operand} are inverted: the kernel multiplies by what it must divide by.",
    part="scales",
    choices=OPERANDS,
)
def scales_inverted(attempt, names):
    attempt.change_operands(names, lambda operand: _with_changed_scales(operand, np.reciprocal))


def _two_levels(operand):
    return operand.quantized is not None and operand.layout.two_level


@fault(
    "tensor-scale-missing",
    "The scale of the tensor, which stands above those of its blocks, is missing for {operand}.",
    part="factor",
    choices=OPERANDS,
)
def tensor_scale_missing(attempt, names):
    attempt.change_operands(names, lambda o: replace(o, factor=np.ones((1, 1)), top=1.0) if _two_levels(o) else o)


@fault(
    "amax-undivided",
    "The scale of the tensor is its amax for {operand}: it is not divided by {top:g}.",
    part="factor",
    choices=OPERANDS,
)
def amax_undivided(attempt, names):
    def undivided(operand):
        attempt.require(_two_levels(operand))
        attempt.facts["top"] = operand.top
        return replace(operand, top=1.0)

    attempt.change_operands(names, undivided)


@fault(
    "tensor-scale-twice",
    "The scale of the tensor, which stands above those of its blocks, is applied twice for {operand}.",
    part="factor",
    choices=OPERANDS,
)
def tensor_scale_twice(attempt, names):
    attempt.change_operands(names, _squared_factor)


def _squared_factor(operand):
    if not _two_levels(operand):
        return operand
    return replace(operand, factor=operand.factor.astype(np.float64) ** 2, top=operand.top**2)


def _relaid(operand, function):
    """The operand whose stored scales are changed by a function of (layout, name of the array, array)."""
    if operand.scales is None:
        return operand
    q, name = operand.quantized, f"{direction_of(operand.columnwise)}_scale_inv"
    q = q.unswizzled() if q.with_gemm_swizzled_scales else q
    stored = getattr(q, name)
    changed = function(q.scaling.layout, name, stored)
    if np.array_equal(changed, stored):
        return operand
    return operand.reread(replace(q, **{name: np.ascontiguousarray(changed)}))


def _orders(attempt):
    """Operands, and the wrong order in which their scales are read: first the order that was not given."""
    product = attempt.product
    given = any(one.quantized is not None and one.quantized.with_gemm_swizzled_scales for one in (product.a, product.b))
    return [(names, to_swizzled) for to_swizzled in (given, not given) for names in OPERANDS]


@fault(
    "scales-order",
    "The scales of {operand} are read {how}.",
    part="scales",
    choices=_orders,
)
def scales_order(attempt, choice):
    names, to_swizzled = choice
    words = {True: "in plain order, but lie in GEMM order", False: "in GEMM order, but lie in plain order"}

    def reordered(layout, name, stored):
        attempt.require(layout.scale_order == "gemm")
        return reorder_scales(layout, name, stored, to_swizzled=to_swizzled)

    attempt.change_operands(names, lambda operand: _relaid(operand, reordered))
    attempt.facts["how"] = words[to_swizzled]


@fault(
    "scales-transposed",
    "The scales of {operand} are {how}.",
    part="scales",
    choices=in_operands(
        ("read transposed", "read transposed, without their padding", "transposed, but read as they were")
    ),
)
def scales_transposed(attempt, choice):
    names, attempt.facts["how"] = choice

    def transposed(layout, name, stored):
        return stored.reshape(stored.shape[::-1]).T

    def changed(operand):
        if choice[1] == "read transposed":
            return _relaid(operand, transposed)
        attempt.require(operand.scales is not None and 1 not in operand.scales.shape)
        rows, blocks = operand.scales.shape
        if choice[1] == "transposed, but read as they were":
            return operand.with_scales(operand.scales.T.reshape(rows, blocks))
        return operand.with_scales(operand.scales.reshape(blocks, rows).T)

    attempt.change_operands(names, changed)


@fault(
    "scale-of-several-blocks",
    "One scale is read for {count} blocks of {operand} along k: that of the first.",
    part="scales",
    choices=in_operands((2, 4)),
)
def scale_of_several_blocks(attempt, choice):
    names, count = choice

    def repeated(operand):
        attempt.require(operand.scales is not None and operand.scales.shape[1] > 1)
        blocks = np.arange(operand.scales.shape[1])
        changed = operand.scales[:, blocks - blocks % count]
        return operand if np.array_equal(changed, operand.scales) else operand.with_scales(changed)

    attempt.change_operands(names, repeated)
    attempt.facts["count"] = count


@fault(
    "scales-shifted",
    "The scales of {operand} are those of the {which}{end}.",
    part="scales",
    choices=in_operands(
        ((1, 1, "next block"), (1, -1, "block before"), (0, 1, "next row"), (0, -1, "row before")), ("around", "last")
    ),
)
def scales_shifted(attempt, choice):
    names, (axis, step, which), end = choice

    def shifted(operand):
        attempt.require(operand.scales is not None)
        count = operand.scales.shape[axis]
        attempt.require(count > 1)
        places = np.arange(count) + step
        places = places % count if end == "around" else np.clip(places, 0, count - 1)
        changed = np.take(operand.scales, places, axis=axis)
        return operand if np.array_equal(changed, operand.scales) else operand.with_scales(changed)

    attempt.change_operands(names, shifted)
    attempt.facts["which"] = which
    attempt.facts["end"] = ", around the end" if end == "around" else ""


# --- elements -------------------------------------------------------------------------------------


@fault(
    "nibbles-swapped",
    "The two codes in each byte of {operand} are read in the wrong order.",
    part="elements",
    choices=("a", "b"),
)
def nibbles_swapped(attempt, name):
    def swapped(operand):
        attempt.require(operand.quantized is not None and operand.layout.packed == 2)
        rows, k = operand.elements.shape
        return replace(operand, elements=operand.elements.reshape(rows, k // 2, 2)[:, :, ::-1].reshape(rows, k))

    attempt.change_operands(name, swapped)


@fault(
    "other-format",
    "The codes of {operand} are read as {read}, but they are {own}.",
    part="elements",
    choices=in_operands(tuple(FORMATS)),
)
def other_format(attempt, choice):
    names, read = choice
    fmt = FORMATS[read]

    def decoded(operand):
        attempt.require(operand.fmt not in (None, fmt) and len(operand.fmt.values) == len(fmt.values))
        attempt.facts["read"], attempt.facts["own"] = fmt, operand.fmt
        return replace(operand, elements=fmt.values[operand.codes()], fmt=fmt)

    attempt.change_operands(names, decoded)


@fault(
    "operand-transposed",
    "The elements of {operand} are read as if they lay transposed.",
    part="elements",
    choices=OPERANDS,
)
def operand_transposed(attempt, names):
    def transposed(operand):
        attempt.require(operand.quantized is None or operand.layout.packed == 1)
        rows, k = operand.elements.shape
        elements = operand.elements
        read = elements.T.reshape(rows, k) if operand.stored_k_first else elements.reshape(k, rows).T
        return replace(operand, elements=read)

    attempt.change_operands(names, transposed)


@fault(
    "other-copy",
    "The {other} copy of {operand} is read{how}; the {own} copy is the one that runs along the sums.",
    part="elements",
    choices=in_operands(("data", "data and scales", "values")),
)
def other_copy(attempt, choice):
    names, how = choice
    words = {
        "data": " under the scales of the {own} one",
        "data and scales": " as if it lay as the {own} one",
        "values": "",
    }

    def read(operand):
        q, own, other = operand.quantized, direction_of(operand.columnwise), direction_of(not operand.columnwise)
        attempt.require(q is not None and getattr(q, f"{other}_data") is not None)
        attempt.facts |= {"own": own, "other": other, "how": words[how].format(own=own)}
        if how == "values":
            right = Operand.read(operand.name, q, not operand.columnwise)
            values = right.values(slice(None)).T.astype(F)
            attempt.require(right.factor.shape[0] == 1)
            return replace(
                operand, elements=np.ascontiguousarray(values), scales=None, factor=right.factor, top=right.top
            )
        arrays = ["data"] if how == "data" else ["data", "scale_inv"]
        changes = {}
        for what in arrays:
            mine, theirs = (getattr(q, f"{direction}_{what}") for direction in (own, other))
            attempt.require(mine.size == theirs.size)
            changes[f"{own}_{what}"] = np.ascontiguousarray(theirs).reshape(mine.shape)
        return Operand.read(operand.name, replace(q, **changes), operand.columnwise)

    attempt.change_operands(names, read)


@fault(
    "transform-undone",
    "The Hadamard transform of {operand} is undone before the product; that of the other operand is not.",
    part="elements",
    choices=("a", "b"),
)
def transform_undone(attempt, name):
    def undone(operand):
        attempt.require(operand.columnwise and operand.scaling is not None and operand.scaling.hadamard is not None)
        only = {f"rowwise_{what}": None for what in ("data", "scale_inv")} | {"amax_rowwise": None}
        values = materialize(DequantizedSource(replace(operand.quantized, **only)), F).reshape(-1, operand.rows).T
        return replace(operand, elements=np.ascontiguousarray(values), scales=None, factor=np.ones((1, 1)), top=1.0)

    attempt.change_operands(name, undone)


def _tf32(values):
    """float32 cut off to the 10 bits that TF32 keeps."""
    return (np.ascontiguousarray(values, F).view(np.uint32) & np.uint32(0xFFFFE000)).view(F)


def _narrowing(dtype):
    """Function of float32 values: the same, rounded to a dtype."""
    return lambda values: values.astype(dtype).astype(F)


#: What an operand may be rounded to before it is multiplied.
NARROWED = {"TF32": _tf32, **{name: _narrowing(dtype) for name, dtype in HALVES.items()}}


@fault(
    "operand-rounded",
    "The values of {operand} are rounded to {to} before they are multiplied.",
    part="elements",
    choices=in_operands(tuple(NARROWED)),
)
def operand_rounded(attempt, choice):
    names, attempt.facts["to"] = choice

    def rounded(operand):
        values = operand.values(slice(None)) * operand.factor_of(slice(None))
        narrow = NARROWED[choice[1]](values.astype(F))
        if np.array_equal(narrow, values):
            return operand
        return replace(operand, elements=narrow, scales=None, factor=np.ones((1, 1)), top=1.0)

    attempt.change_operands(names, rounded)


# --- terms of the sums ----------------------------------------------------------------------------


def _ranges(attempt):
    """Runs of terms that a kernel may lose: its last or first step, or one of several parts of the sum."""
    k, found = attempt.product.k, {}
    for step in STEPS:
        rest = k % step or step
        if rest < k:
            found[k - rest, k] = f"the last {rest}"
        if step < k:
            found[0, step] = f"the first {step}"
    for parts in PARTS:
        size = math.ceil(k / parts)
        for start in range(0, k, size):
            stop = min(start + size, k)
            if stop - start < k:
                found.setdefault((start, stop), f"those from {start} to {stop - 1}")
    return [(start, stop, words) for (start, stop), words in found.items()]


def _missing_ranges(attempt):
    """The same, and the terms whose products the dump lacks, as far as one can see."""
    return _ranges(attempt) + _seen_range(attempt, -1)


def _doubled_ranges(attempt):
    """The same, and the terms whose products the dump has twice."""
    return _ranges(attempt) + _seen_range(attempt, 1)


def _seen_range(attempt, sign):
    """The run of terms whose products, times a sign, are in what is wrong with the dump; an empty list without any.

    The product of column k of a with column k of b is so large a share of the differences as it correlates with them.
    """
    product, y = attempt.product, attempt.y
    rows, columns = (np.linspace(0, size - 1, min(size, SEEN)).astype(int) for size in product.shape)
    off = y[rows][:, columns].astype(np.float64) - product.exact(rows, columns)
    off = np.where(np.isfinite(off), off, 0) / product.factors(rows, columns)
    a, b = product.a.values(rows), product.b.values(columns)
    sizes = (a * a).sum(axis=0) * (b * b).sum(axis=0)
    shares = sign * ((off.T @ a) * b).sum(axis=0) / sizes
    start, stop = _likeliest_run(shares - LEAST_SHARE)
    whole_steps = tuple(min(round(end / RUN_STEP) * RUN_STEP, product.k) for end in (start, stop))
    runs = dict.fromkeys(((start, stop), whole_steps))
    return [
        (first, end, f"number {first}" if end == first + 1 else f"those from {first} to {end - 1}")
        for first, end in runs
        if 0 < end - first < product.k
    ]


def _likeliest_run(gains):
    """(start, stop) of the run of numbers with the largest sum; (0, 0) where all are negative."""
    sums = np.concatenate([[0.0], np.cumsum(gains)])
    least = np.minimum.accumulate(sums)
    stop = int(np.argmax(sums - least))
    return int(np.argmin(sums[: stop + 1])), stop


def _weighted(attempt, start, stop, weight):
    """Count some terms with a weight."""

    def weighted(operand):
        elements = operand.elements.astype(F)
        elements[:, start:stop] *= F(weight)
        return replace(operand, elements=elements)

    attempt.change_operands("a", weighted)


@fault("terms-missing", "Terms of the sums are missing: {which} of {k}.", part="terms", choices=_missing_ranges)
def terms_missing(attempt, choice):
    start, stop, attempt.facts["which"] = choice
    attempt.facts["k"] = attempt.product.k
    _weighted(attempt, start, stop, 0)


@fault("terms-twice", "Terms of the sums are added twice: {which} of {k}.", part="terms", choices=_doubled_ranges)
def terms_twice(attempt, choice):
    start, stop, attempt.facts["which"] = choice
    attempt.facts["k"] = attempt.product.k
    _weighted(attempt, start, stop, 2)


# --- what follows the sums ------------------------------------------------------------------------


@fault("alpha-missing", "alpha, {alpha:g}, is missing.", part="alpha")
def alpha_missing(attempt):
    attempt.facts["alpha"] = attempt.product.alpha
    attempt.require(attempt.product.alpha != 1)
    attempt.change(alpha=1.0)


@fault("alpha-inverted", "The product is divided by alpha, {alpha:g}, not multiplied by it.", part="alpha")
def alpha_inverted(attempt):
    attempt.facts["alpha"] = alpha = attempt.product.alpha
    attempt.require(alpha not in (0, 1))
    attempt.change(alpha=1 / alpha)


@fault(
    "alpha-on-all",
    "alpha, {alpha:g}, multiplies what is added as well, not only the product.",
    part="alpha",
)
def alpha_on_all(attempt):
    product = attempt.product
    attempt.facts["alpha"] = alpha = product.alpha
    attempt.require(alpha != 1 and product.addends(slice(0, 1), slice(0, 1)))
    bias = None if product.bias is None else alpha * product.bias
    attempt.change(bias=bias, beta=alpha * product.beta)


@fault(
    "bias-wrong",
    "The bias is {how}.",
    part="bias",
    choices=("not added", "added twice", "subtracted", "added along rows"),
)
def bias_wrong(attempt, how):
    bias = attempt.product.bias
    attempt.require(bias is not None)
    attempt.facts["how"] = how
    if how == "added along rows":
        attempt.require(attempt.product.shape[0] == len(bias) and attempt.product.c is None)
        attempt.change(c=np.broadcast_to(bias[:, None], attempt.product.shape), beta=1.0, bias=None)
        return
    attempt.change(bias={"not added": None, "added twice": 2 * bias, "subtracted": -bias}[how])


@fault(
    "accumulation-wrong",
    "c, to which the product is to be added, is {how}.",
    part="c",
    choices=("not added", "added twice", "subtracted", "added without beta"),
)
def accumulation_wrong(attempt, how):
    product = attempt.product
    attempt.require(product.c is not None)
    attempt.facts["how"] = how
    if how == "not added":
        attempt.change(c=None)
        return
    beta = {"added twice": 2 * product.beta, "subtracted": -product.beta, "added without beta": 1.0}[how]
    attempt.require(beta != product.beta)
    attempt.change(beta=beta)


def _rounding(dtype):
    """Function of float64 values: the same, rounded to a dtype."""
    return lambda values: round_once(values, dtype).astype(np.float64)


@fault(
    "rounded-before-adding",
    "The product is rounded to {dtype} before {what} is added.",
    part="rounding",
    choices=HALVES,
)
def rounded_before_adding(attempt, name):
    product = attempt.product
    added = ["c"] * (product.c is not None) + ["the bias"] * (product.bias is not None)
    attempt.require(added)
    attempt.facts["dtype"], attempt.facts["what"] = name, " or ".join(added)
    attempt.change(first=_rounding(HALVES[name]))


@fault("result-rounded", "The result is rounded to {dtype} before it is stored.", part="rounding", choices=HALVES)
def result_rounded(attempt, name):
    attempt.require(HALVES[name] != attempt.product.dtype)
    attempt.facts["dtype"] = name
    attempt.change(last=_rounding(HALVES[name]))


@fault("result-cut-off", "The result is cut off to {dtype}, toward zero, not rounded to nearest.", part="rounding")
def result_cut_off(attempt):
    dtype = attempt.product.dtype
    attempt.require(dtype in HALVES.values())
    attempt.facts["dtype"] = dtype

    def cut_off(values):
        nearest = round_once(values, dtype)
        toward_zero = np.nextafter(nearest, np.zeros_like(nearest))
        too_large = np.abs(nearest.astype(np.float64)) > np.abs(values)
        return np.where(too_large, toward_zero, nearest).astype(np.float64)

    attempt.change(last=cut_off)


@fault(
    "activation-applied",
    "{name} is applied to the result.",
    part="activation",
    choices=("relu", "clipped to the largest finite value"),
)
def activation_applied(attempt, name):
    attempt.require(name == "relu" or attempt.product.dtype == FLOAT16)
    largest = float(np.finfo(np.float16).max)
    attempt.facts["name"] = "relu" if name == "relu" else "A limit, the largest finite value,"
    least, greatest = (0.0, np.inf) if name == "relu" else (-largest, largest)
    attempt.change(last=lambda values: np.clip(values, least, greatest))


# --- what the sums are kept in --------------------------------------------------------------------


def _halves(attempt):
    """How sums in 16 bits are made, in words, and the class that computes the product."""
    product, found = attempt.product, []
    block = BlockedProduct.of(product).block
    for name, dtype in HALVES.items():
        steps = [step for step in (1, 2, 4, *STEPS) if step < product.k]
        found += [(name, _after(step), SteppedProduct, dtype, {"step": step}) for step in steps]
        for values, of_what in _dequantized(product, dtype):
            options = {"values": values}
            found += [
                (name, _after(step) + of_what, DequantizedProduct, dtype, options | {"step": step}) for step in steps
            ]
        for total, to in ((F, "in float32"), (dtype, "in it, too")) if block is not None else ():
            how = f" within blocks of {block}, whose sums are scaled, then added {to}"
            in_block = [step for step in steps if step <= block]
            options = {"total": total}
            found += [(name, _after(step) + how, BlockedProduct, dtype, options | {"step": step}) for step in in_block]
    for order in half_orders_of(product):
        found.append(("float16", f"as a unit of {order.card} does", UnitProduct, FLOAT16, {"order": order}))
    return found


def _after(step):
    """When a sum is rounded, in words."""
    after = "term" if step == 1 else f"{step} terms"
    return f"rounded to it after every {after}"


def _dequantized(product, dtype):
    """(dtype, words) of operands that are multiplied by all scales before the sums, where that shows in them."""
    operands = product.a, product.b
    if all(operand.quantized is None for operand in operands):
        return
    if any((operand.factor != operand.top).any() for operand in operands):
        yield F, ", of operands multiplied by their scales first"
    some = [np.linspace(0, operand.rows - 1, min(operand.rows, 64)).astype(int) for operand in operands]
    if any(is_narrowed(operand, rows, dtype) for operand, rows in zip(operands, some, strict=True)):
        yield dtype, ", of operands multiplied by their scales first and rounded to it, too"


@fault("sums-in-half", "Sums are kept in {dtype}, {how}{overflow}.", part="sums", choices=_halves)
def sums_in_half(attempt, choice):
    attempt.facts["dtype"], attempt.facts["how"], kind, dtype, options = choice
    attempt.facts["overflow"] = "; some overflow" if _overflowed(attempt) else ""
    attempt.product = kind.of(attempt.product, accumulator=dtype, **options)


def _overflowed(attempt):
    """Whether the dump has results that are not finite where the right product has none."""
    rows, columns = (np.linspace(0, size - 1, min(size, 32)).astype(int) for size in attempt.product.shape)
    right = np.isfinite(attempt.product.exact(rows, columns))
    return bool((right & ~np.isfinite(attempt.y[rows][:, columns].astype(F))).any())


@fault("sign", "The product has the wrong sign.", part="alpha")
def sign(attempt):
    attempt.change(alpha=-attempt.product.alpha)


@fault(
    "other-factor",
    "The product is multiplied by a further factor, {factor}.",
    part="alpha",
    choices=("simple", "measured"),
    last=True,
)
def other_factor(attempt, choice):
    product, y = attempt.product, attempt.y
    rows, columns = (np.linspace(0, size - 1, min(size, 32)).astype(int) for size in product.shape)
    sums = product.sums(rows, columns)
    rest = y[rows][:, columns].astype(np.float64) - sum(product.addends(rows, columns))
    ratios = rest / sums
    ratios = ratios[np.isfinite(ratios) & (np.abs(sums) > np.median(np.abs(sums)))]
    attempt.require(ratios.size)
    factor = float(np.median(ratios))
    attempt.require(factor not in (0, 1) and math.isfinite(factor))
    attempt.facts["factor"] = f"{factor:.6g}"
    if choice == "simple":
        width = roundoff(y.dtype) + SIMPLE
        known = SIMPLE_FACTORS | powers_of_two()
        near = (pair for pair in known.items() if abs(factor / pair[1] - 1) <= width)
        attempt.facts["factor"], factor = next(near, ("", 0.0))
        attempt.require(factor)
    attempt.change(factor=factor)
