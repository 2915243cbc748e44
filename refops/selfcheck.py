"""Every operation of a backend, checked by rules that know no scaling by name, for `refops report`.

A backend is a module with refops' calls, today refops itself. Values must lie in the oracle's intervals, codes where
their own decode scale puts the values that were cast; composed operations are compared with separate calls. Every
comparison is counted element by element.

This is not a test suite: whether each scaling's scales and paths are TE's is checked by `tests/refops`, which has a
second implementation, and of other implementations' arrays (`refops.conformance`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from refops import oracle
from refops.activations import ACTIVATIONS
from refops.arguments import BFLOAT16
from refops.formats import FORMATS, encode_by_definition
from refops.golden.inputs import INPUT_KINDS, make_row_scales, make_tensor
from refops.ops import SCALED_ACTIVATIONS
from refops.oracle.interval import are_roundings
from refops.rounding import ROUNDING_MODES
from refops.survey import SCALINGS, as_matrix, cast_dequantized_source, cast_source, decode_scale_source, element_codes

F = np.float32
DTYPES = (np.dtype(F), np.dtype(np.float16), BFLOAT16)
#: What a division, a product and a float32 decode scale may be off by together.
SLACK = 2.0**-20


@dataclass(frozen=True)
class Check:
    """The outcome of one kind of check on one subject.

    Attributes:
        section: key of `refops.report.SECTIONS`.
        subject: operation or scaling.
        against: what it was checked against.
        comparisons: how many arrays were compared.
        values: how many elements.
        differing: how many elements did not agree.
        explained: how many of those a documented divergence accounts for.
        divergence: that divergence, or "".
        first: the first element that differs without explanation, or "".
    """

    section: str
    subject: str
    against: str
    comparisons: int
    values: int
    differing: int = 0
    explained: int = 0
    divergence: str = ""
    first: str = ""

    @property
    def unexplained(self):
        """Differences that no documented divergence accounts for."""
        return self.differing - self.explained


class Tally:
    """Counts what a task compares and remembers the first difference."""

    def __init__(self):
        self.comparisons = self.values = self.differing = 0
        self.first = ""

    def holds(self, label, ok, got=None):
        """Count a bool array of verdicts; `got`: the array that they are about."""
        ok = np.asarray(ok, bool)
        self.comparisons += 1
        self.values += ok.size
        self.differing += ok.size - int(np.count_nonzero(ok))
        if not self.first and not ok.all():
            index = tuple(int(i) for i in np.argwhere(~ok)[0])
            self.first = f"{label} {list(index)}: {'the rule does not hold' if got is None else f'got {got[index]}'}"

    def equal(self, label, got, expected):
        """Compare two arrays bit by bit; None stands for an array that is not there."""
        shapes = [None if a is None else (a.dtype, a.shape) for a in (got, expected)]
        if None in shapes or shapes[0] != shapes[1]:
            self.holds(f"{label}: {shapes[0]} instead of {shapes[1]}", [shapes == [None, None]])
            return
        same = np.ascontiguousarray(got).view(np.uint8) == np.ascontiguousarray(expected).view(np.uint8)
        self.holds(label, same.reshape(*got.shape, got.itemsize).all(axis=-1), got)

    def quantized(self, label, got, expected):
        """Compare all arrays of two `Quantized` bit by bit."""
        for copy in ("rowwise", "columnwise"):
            for field in (f"{copy}_data", f"{copy}_scale_inv", f"amax_{copy}"):
                self.equal(f"{label} {field}", getattr(got, field), getattr(expected, field))


@dataclass(frozen=True)
class Task:
    """A check to run: `check(tally)` reports what it compares."""

    section: str
    subject: str
    against: str
    check: Callable

    def run(self):
        """Its `Check`; an exception inside it is a difference, not a crash."""
        tally = Tally()
        try:
            with np.errstate(all="ignore"):
                self.check(tally)
        except Exception as error:  # a backend may raise anything; the report must still end with a verdict
            tally.holds("", [False])
            tally.first = f"raised {type(error).__name__}: {' '.join(str(error).split())}"
        counts = (tally.comparisons, tally.values, tally.differing)
        return Check(self.section, self.subject, self.against, *counts, first=tally.first)


def all_tasks(ops, real):
    """Yield every `Task`, in the order of the report.

    Args:
        ops: the backend.
        real: name -> array of real tensors; may be empty.
    """
    for name in ACTIVATIONS:
        for op in (name, f"d{name}", *((f"scaled_{name}", f"scaled_d{name}") if name in SCALED_ACTIVATIONS else ())):
            task = partial(_check_values, ops, name, op, real)
            yield Task("activations", name, f"{op.replace(name, 'NAME')}: the oracle's intervals, ulp=2", task)
        yield Task("activations", name, "bias gradient: any order of float32 sums", partial(_check_dbias, ops, name))
    for fmt in FORMATS.values():
        yield Task(
            "casts",
            repr(fmt),
            "encode: search of the grid, five roundings; decode: back",
            partial(_check_casts, ops, fmt),
        )
    for named in SCALINGS.values():
        against = "|x| / decode scale lies in the code's rounding interval, float64"
        yield Task("scalings", named.name, against, partial(_check_codes, ops, named.scaling, real))
    for named in SCALINGS.values():
        for against, check in (
            ("float32: separate calls, bit for bit", _check_composed),
            ("16 bits: codes of the value before or after it is rounded", _check_composed_codes),
        ):
            yield Task("fused", named.name, against, partial(check, ops, named.scaling))
    random = np.random.default_rng(5)
    for subject, forward, back, x in (
        ("swizzle, unswizzle", ops.swizzle, ops.unswizzle, random.integers(0, 256, (256, 12), np.uint8)),
        ("pack_fp4, unpack_fp4", ops.pack_fp4, ops.unpack_fp4, random.integers(0, 16, (8, 32), np.uint8)),
        # Multiples of 16 are exact on the way.
        (
            "hadamard_transform",
            ops.hadamard_transform,
            partial(ops.hadamard_transform, inverse=True),
            (16 * random.integers(-8, 8, (64, 160))).astype(F),
        ),
    ):
        yield Task("helpers", subject, "its inverse, bit for bit", partial(_check_inverse, forward, back, x))


# --- tensors ----------------------------------------------------------------------------------------------------------


def _tensors(shape, seed=7):
    """Yield (label, tensor): every kind of numbers that golden files have, in every dtype."""
    for kind in (kind for kind in INPUT_KINDS if kind != "rounding"):  # which has the numbers of "mixed"
        for dtype in DTYPES:
            yield f"{kind} {dtype.name}", make_tensor(kind, shape, dtype, seed=seed)


def _activation_inputs(name, rows, columns, real=None):
    """Yield (label, x, dy). Real ones: each layer's own gradient; a gate is the rows in reverse."""
    width = columns * (1 + ACTIVATIONS[name].gated)
    for (label, x), (_, dy) in zip(_tensors((rows, width)), _tensors((rows, columns), seed=8), strict=True):
        yield f"{name} {label}", x, dy
    for tensor, x in (real or {}).items():
        dy = real.get(tensor.replace("pre_activation", "grad_activation"))
        if tensor.endswith("pre_activation") and dy is not None and dy.shape == x.shape:
            yield f"{name} {tensor}", np.concatenate([x, x[::-1]], 1) if ACTIVATIONS[name].gated else x, dy


def _quantized(ops, scaling, real):
    """Yield (label, x, its `Quantized`, both copies); ragged and real tensors where their shape is taken."""
    for label, x in _tensors((96, 288)):
        yield label, x, ops.quantize(x, scaling, columnwise=True)
    edge = scaling.layout.columnwise_multiple
    for label, x in (*_tensors((37, 75)), *real.items()):
        if math.prod(x.shape[:-1]) % edge == 0 and x.shape[-1] % edge == 0:
            yield f"ragged {label}", x, ops.quantize(x, scaling, columnwise=True)


# --- activations ------------------------------------------------------------------------------------------------------


def _check_values(ops, name, op, real, tally):
    """An activation, its gradient, or either of them scaled by row; of the last its second result is a sum."""
    scaled, gradient = op.startswith("scaled_"), op.endswith(f"d{name}")
    function = getattr(ops, f"{'scaled_' * scaled}activation{'_grad' * gradient}")
    for label, x, dy in _activation_inputs(name, 48, 160, None if scaled else real):
        inputs = ({"dy": dy} if gradient else {}) | {"x": x}
        if scaled:
            inputs["row_scales"] = make_row_scales(len(x), seed=7, stream=2)
        for dtype in {x.dtype, np.dtype(F)}:
            got = function(name, *inputs.values(), out_dtype=dtype)
            got = got[0] if scaled and gradient else got
            lower, upper, nan = oracle.acceptable(op, inputs, dtype=dtype)
            tally.holds(label, ((lower <= got) & (got <= upper)) | (nan & np.isnan(got)), got)


def _check_dbias(ops, name, tally):
    """|sum - exact| <= n 2^-24 sum |terms| of the gradient as it is stored, then one rounding."""
    for label, x, dy in _activation_inputs(name, 48, 160):
        dx, dbias = ops.activation_grad(name, dy, x, dbias=True)
        terms = dx.astype(np.float64)
        size = np.abs(terms).sum(axis=0)
        permitted = len(terms) * 2.0**-24 * size
        right = are_roundings(dbias, *(terms.sum(axis=0) + end for end in (-permitted, permitted)))
        judged = size < float(np.finfo(F).max)
        tally.holds(label, right[judged], dbias[judged])


# --- casts ------------------------------------------------------------------------------------------------------------


def _check_casts(ops, fmt, tally):
    patterns = np.arange(1 << 16, dtype=np.uint16)
    for label, x in (("", patterns.view(np.float16)), ("", patterns.view(BFLOAT16)), *_tensors((48, 160))):
        for rounding in ROUNDING_MODES if x.dtype == F else ("nearest_even",):
            for saturate in (True, False):
                got = ops.encode(x, fmt, rounding=rounding, saturate=saturate)
                expected = encode_by_definition(x.astype(np.float64), fmt, saturate, rounding)
                tally.equal(f"{label} {x.dtype} {rounding}", got, expected)
    values = fmt.values[np.isfinite(fmt.values)]
    codes = np.flatnonzero(np.isfinite(fmt.values)).astype(np.uint8)
    tally.equal("decode", ops.decode(codes, fmt), values)
    cast = np.abs(values) <= fmt.max  # an integer's least value is not
    tally.equal("encode what was decoded", ops.encode(values, fmt)[cast], codes[cast])


# --- scalings ---------------------------------------------------------------------------------------------------------


def _codes_inside(tally, label, q, low, high):
    """Each code's rounding interval holds v / decode scale of a value v between `low` and `high`, (M, K) of float32.

    Between the midpoints to the values beside the code's; under stochastic rounding between those values. Left out:
    values that are not finite, and scales that are not, or so small that float32 holds them with few bits.
    """
    all_values, codes = q.scaling.fmt.values.astype(np.float64), element_codes(q)
    value, decode = all_values[codes], as_matrix(decode_scale_source(q)).astype(np.float64)
    ordered = np.unique(all_values[np.abs(all_values) <= q.scaling.fmt.max])
    middle = (ordered[1:] + ordered[:-1]) / 2
    below, above = np.append(-np.inf, middle), np.append(middle, np.inf)
    if q.scaling.random is not None:
        below, above = np.append(-np.inf, ordered[:-1]), np.append(ordered[1:], np.inf)
    place = np.minimum(np.searchsorted(ordered, value), ordered.size - 1)
    least, greatest = np.sort([low, high], axis=0).astype(np.float64) / decode
    least, greatest = least - SLACK * np.abs(least), greatest + SLACK * np.abs(greatest)
    judged = np.isfinite(low) & np.isfinite(high) & np.isfinite(decode) & (decode >= 2.0**-110)
    inside = (below[place] <= greatest) & (least <= above[place]) & np.isfinite(value)
    tally.holds(f"{label} codes", inside[judged], codes[judged])
    signed = ~np.isnan(low) & (np.signbit(low) == np.signbit(high))
    if not np.signbit(all_values[all_values == 0]).any():
        signed &= value != 0
    tally.holds(f"{label} signs", (np.signbit(value) == np.signbit(low))[signed], codes[signed])
    product = value * decode
    off = np.abs(as_matrix(cast_dequantized_source(q)) - product) > np.abs(product) * SLACK
    tally.holds(f"{label} dequantized", ~off[judged & (np.abs(product) < float(np.finfo(F).max))])


def _directions(q):
    """(name, `q` with that copy alone), of both."""
    for copy, other in (("rowwise", "columnwise"), ("columnwise", "rowwise")):
        yield copy, replace(q, **{f"{other}_data": None, f"{other}_scale_inv": None, f"amax_{other}": None})


def _check_codes(ops, scaling, real, tally):
    for label, x, both in _quantized(ops, scaling, real):
        for copy, q in _directions(both):
            values = as_matrix(cast_source(x, q))
            _codes_inside(tally, f"{label} {copy}", q, values, values)


# --- composed operations ----------------------------------------------------------------------------------------------


def _compositions(ops, scaling, dtypes):
    """Yield (label, result of the composed call, separate result in float32, the same in the input dtype)."""
    for name in ACTIVATIONS:
        for label, x, dy in _activation_inputs(name, 32, 128):
            if x.dtype in dtypes:
                y32, y16 = (ops.activation(name, x, out_dtype=dtype) for dtype in (F, x.dtype))
                yield label, ops.activation_quantize(name, x, scaling, columnwise=True), y32, y16
                dx32, dx16 = (ops.activation_grad(name, dy, x, out_dtype=dtype) for dtype in (F, x.dtype))
                q = ops.activation_grad_quantize(name, dy, x, scaling, columnwise=True)
                yield f"d{label}", q, dx32, dx16


def _check_composed(ops, scaling, tally):
    for label, got, values, _ in _compositions(ops, scaling, (F,)):
        tally.quantized(label, got, ops.quantize(values, scaling, columnwise=True))


def _check_composed_codes(ops, scaling, tally):
    for label, got, unrounded, rounded in _compositions(ops, scaling, DTYPES[1:]):
        for copy, q in _directions(got):
            ends = (as_matrix(cast_source(end, q)) for end in (unrounded, rounded))
            _codes_inside(tally, f"{label} {copy}", q, *ends)


# --- helpers ----------------------------------------------------------------------------------------------------------


def _check_inverse(forward, back, x, tally):
    tally.equal("there and back", back(forward(x)), x)
