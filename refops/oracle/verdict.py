"""The check itself: compares a dump with what `refops.oracle.enclosure` accepts and collects what lies outside.

A tile that equals the reference, under a scale that does, is right, because the reference is itself one of the accepted
results; intervals are computed for the other tiles alone. That is what makes the check of a right dump fast.
"""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from refops.arguments import require_choice, require_flag, require_high_precision_dtype, require_number, shown
from refops.formats import unpack_fp4
from refops.hints import DTypeLike, Number
from refops.oracle import enclosure
from refops.oracle.coverage import coverage_of
from refops.oracle.draws import said
from refops.oracle.enclosure import Bounds
from refops.oracle.entries import shown_code, shown_entry, shown_range
from refops.oracle.geometry import stored_index
from refops.oracle.interval import CoarseTanh
from refops.oracle.operation import JUDGED, MATMUL, Case, require_operation
from refops.oracle.places import Place
from refops.oracle.quantized_tensors import is_swizzled
from refops.oracle.quantized_verdict import QuantizedJudge
from refops.oracle.report import NOTHING_CHECKED, Explanation, Mismatch, Report
from refops.oracle.tally import MANY_WRONG, Tally, bits_of, distance_of
from refops.quantization.result import DIRECTIONS, reorder_scales
from refops.scalings import Scaling, named
from refops.tiles import Matrix, for_each, tile_slices

F = np.float32
#: Permitted errors that are tried where nothing else explains a dump, and the share that may stay wrong.
COARSER = (8192, 4096, 256, 32)
FEW_LEFT = 0.001
#: A sum of so many terms has a bound, valid for any order, that hides faults worth a note.
LONG_SUM = 1024


def check(
    op: str,
    inputs: Any,
    outputs: Any,
    *,
    scaling: Scaling | str | None = None,
    params: Mapping[str, Any] | None = None,
    ulp: Number = 2,
    swizzled_scales: bool = False,
    padding: str | None = None,
    random_bits: str = "given",
    diagnose: bool = True,
    budget: Number | None = 5,
    progress: Callable[[float, float | None], None] | None = None,
    m_splits: Any = None,
) -> Report:
    """Judge what a kernel wrote.

    Args:
        op: name of the operation: an activation ("gelu", "swiglu", ...), its gradient ("dgelu", ...), either of them
            scaled by row ("scaled_swiglu", "scaled_dswiglu", ...), "quantize", "dequantize", "update_delayed_scale"; or
            "matmul", alpha a b^T + beta c + bias.
        inputs: what the kernel read: a dict of x, dy, row_scales, ... as `refops.oracle.operation` lists them for `op`,
            or the array itself where there is one. float32, float16 or bfloat16. For dequantize a quantized tensor
            (`refops.Quantized`, fuser's, TE's), or a dict of its arrays. For matmul a and b, each an array, a quantized
            tensor, or a dict of its arrays (which may also be given as a_codes, a_scales, b_codes ...), bias and c.
        outputs: what the kernel wrote: a dict of any of y, dx, dbias, drow_scales, or of the arrays of a `Quantized`
            (rowwise_data, rowwise_scale_inv, amax_rowwise, columnwise_...; data or codes, scale or scales, and amax
            are short for the rowwise ones, columnwise_codes and so on for the others), or a quantized tensor, alone or
            as "q" beside dbias. NumPy, torch, JAX, CuPy, anything with DLPack or an array interface; elements of their
            own dtype or as raw bits. Scales may come with their padding or without.
        scaling: settings such as `refops.MXFP8Scaling(refops.E4M3)`, or the name of a row of `refops.scalings.NAMED`
            such as "mxfp8", where the operation quantizes; for matmul those of both operands, or {"a": ..., "b": ...}.
        params: parameters of the activation, glu_interleave_size; for update_delayed_scale fmt, margin, algorithm,
            keep_unused; for matmul layout ("mk,nk" is the default; "mk,kn", "km,nk", "km,kn": how a and b lie; k is
            contracted, along the copy of a quantized operand that has its blocks along k), alpha, beta, a_fmt and b_fmt
            (formats other than that of scaling), card ("ampere", "hopper", "blackwell": demands the bits of that card)
            and split_accumulator (with card: whether Hopper's FP8 sums are promoted; either is right by default), sums
            ("float32": the short sums of Hopper's FP8 unit are wrong; "short": all that its bits may give is right;
            default: what they give with the errors that they usually have). a and b are x and w of y = x w^T, which
            `refops.gemm(w, x, card)` takes in the other order.
        ulp: error that exp and tanh may have, in float32 units in the last place; a result within as many of the
            float64 truth is right too. 2 covers CUDA C++ and libdevice without fast math; Triton's `/` and another
            order of TE's products need 4, fast math more. 0 asks for the reference's bits, NaN and padding included.
        swizzled_scales: the scales are in the order that GEMMs read (`Quantized.swizzled`).
        padding: "zero" judges the padding of scales too, "ignore" does not (TE leaves it unwritten). Default: "zero"
            with ulp=0, else "ignore".
        random_bits: of stochastic rounding. "given": those of the scaling, so each code is decided. "any": the kernel
            draws its own; either neighbour of a value is right, and over all elements the share that moves up must be
            what fair bits give (within 7 standard deviations and the 1/256 that 8-bit draws may be off). Elements that
            share one random number are named, or noted where that share is fair all the same.
        diagnose: look for the convention that explains a wrong dump.
        budget: seconds of processor time that this may take; a note says where it ended the search. None: no bound.
        progress: called now and then meanwhile, with the seconds spent and the budget.
        m_splits: rows of each expert where the tensor holds groups that are quantized each by itself, one behind the
            other; scaling, and what outputs hold, may then be one for each (`refops.oracle.grouped`). Default: one
            tensor.

    Returns:
        `Report` (`GroupedReport` with m_splits, `ProductReport` for matmul): `.ok`, `.mismatches`, `.diagnosis`,
        `.raise_for_mismatch()`, `str()`.

    Raises:
        TypeError, ValueError: an unknown operation or output, a missing input, settings, shapes or dtypes that
            contradict the operation; the message says what was expected.
    """
    require_number(ulp, "ulp", non_negative=True)
    ulp = float(ulp)
    padding = require_choice(padding, "padding", (None, "zero", "ignore"))
    random_bits = require_choice(random_bits, "random_bits", ("given", "any"))
    require_flag(diagnose, "diagnose")
    require_flag(swizzled_scales, "swizzled_scales")
    if budget is not None:
        require_number(budget, "budget", positive=True)
    if require_operation(op, JUDGED) is MATMUL:
        from refops.oracle.products import check_product

        _require_defaults({"ulp": ulp, "padding": padding, "random_bits": random_bits, "m_splits": m_splits})
        return check_product(inputs, outputs, scaling, params, swizzled_scales, diagnose, budget, progress)
    if m_splits is not None:
        from refops.oracle.grouped import check_groups  # which checks each group with this function

        options = {"padding": padding, "random_bits": random_bits, "diagnose": diagnose}
        options |= {
            "budget": budget,
            "progress": progress,
            "params": params,
            "ulp": ulp,
            "swizzled_scales": swizzled_scales,
        }
        return check_groups(op, inputs, outputs, scaling, m_splits, options)
    scaling = None if scaling is None else named(scaling)
    if random_bits == "any" and (ulp == 0 or not getattr(scaling, "stochastic_rounding", False)):
        got = f"ulp={ulp:g}, scaling={shown(scaling)}"
        raise ValueError(f"random_bits='any' needs ulp > 0 and a scaling with stochastic_rounding; got {got}")
    case = Case(op, inputs, scaling, params, swizzled_scales=swizzled_scales or is_swizzled(outputs))
    arrays, unpadded = case.fit_outputs(outputs)
    judge = Judge(case, arrays, unpadded, ulp, padding or ("zero" if ulp == 0 else "ignore"), random_bits)
    with np.errstate(all="ignore"):
        judge.run()
    # No convention explains what was written for a tensor of no elements.
    explanations, diagnosed = (), diagnose and judge.wrong > 0 and not case.is_empty
    if diagnosed:
        from refops.oracle.diagnosis import Budget
        from refops.oracle.diagnosis import diagnose as explain  # a right dump does not pay for its import

        limit = Budget(budget, progress)
        wrong = {name: tally.wrong for name, tally in judge.tallies.items()}
        try:
            explanations = tuple(explain(case, judge.outputs, wrong, judge.reference, limit))
        except Exception as error:  # a fault in one of many conventions must not cost the verdict
            judge.notes.append(f"the diagnosis failed, the verdict stands: {type(error).__name__}: {error}")
        if limit.ran_out:
            judge.notes.append(f"the diagnosis ended after {budget:g} s of processor time: a larger budget tries more")
        if not explanations:
            explanations = coarser_functions(judge, limit)
    if diagnose:
        shared = shared_numbers(judge)
        explanations, diagnosed = (*explanations, *shared), diagnosed or bool(shared)
    report = judge.report(explanations, diagnosed)
    return replace(report, coverage=coverage_of(case, judge.outputs, judge.reference)) if report.ok else report


#: Arguments of `check` that say nothing of a product of matrices -> what they have to be for one.
_NOT_FOR_PRODUCTS = {"ulp": 2, "padding": None, "random_bits": "given", "m_splits": None}


def _require_defaults(given):
    """Raise ValueError for an argument that has no meaning for a matrix product."""
    for name, value in given.items():
        if value != _NOT_FOR_PRODUCTS[name]:
            raise ValueError(f"{name} must be {_NOT_FOR_PRODUCTS[name]!r} for {MATMUL.name}; got {shown(value)}")


class Acceptable(NamedTuple):
    """What a right kernel may write for each element: anything in [lower, upper], and NaN where `nan` says so.

    Attributes:
        lower, upper: the least and the greatest right value, in the dtype that is stored; NaN where only NaN is right.
        nan: bool, whether NaN is right.
    """

    lower: np.ndarray
    upper: np.ndarray
    nan: np.ndarray


def acceptable(
    op: str,
    inputs: Any,
    *,
    params: Mapping[str, Number] | None = None,
    ulp: float = 2,
    dtype: DTypeLike | None = None,
) -> Acceptable:
    """Return what `check` accepts of each element of an operation that writes values: `Acceptable`.

    Codes have no such interval before there is a dump: `check` judges each under the scale that the dump itself has.

    Args:
        op, inputs, params, ulp: as for `check`, ulp above 0; `op` is an activation, its gradient, either of them scaled
            by row, or "dequantize".
        dtype: in which the result is stored: float32, float16 or bfloat16. Default: that of x (of the `Quantized`).

    Returns:
        Arrays of the shape of y or dx. Derived in `refops.oracle.enclosure`.

    Raises:
        TypeError, ValueError: as `check`; an operation that writes no values.
    """
    require_number(ulp, "ulp", positive=True)
    kind = require_operation(op).kind
    if kind in ("quantize", "update_delayed_scale"):
        raise ValueError(f"op must be an activation, its gradient or dequantize, which write values; got {op!r}")
    case = Case(op, inputs, None, params)
    own = case.inputs["q" if kind == "dequantize" else "x"].dtype
    dtype = own if dtype is None else require_high_precision_dtype(dtype, "dtype")
    stored_float32 = dtype == np.float32
    if kind == "dequantize":
        source = enclosure.DequantizedBounds(case.inputs["q"], float(ulp), stored_float32=stored_float32)
    else:
        source = enclosure.bounds_of(case, float(ulp), stored_float32=stored_float32)
    lower, upper = np.empty((2, *source.shape), dtype)
    nan = np.empty(source.shape, bool)

    def work(rows, columns):
        bounds = source.read(rows, columns).rounded(dtype)
        nan[rows, columns] = bounds.nan
        lower[rows, columns], upper[rows, columns] = bounds.lo, bounds.hi

    with np.errstate(all="ignore"):
        for_each(tile_slices(source.shape), work)
    return Acceptable(*(array.reshape(case.result_shape) for array in (lower, upper, nan)))


def shared_numbers(judge):
    """The explanations of stochastic rounding that is not fair because elements share a random number.

    Numbers that are fair all the same are worth a note.
    """
    explanations = {}
    for name, found in judge.shared.items():
        if judge.tallies[name].bias:
            explanations.setdefault(found, []).append(name)
            continue
        judge.notes.append(
            f"{name}: one random number rounds {said(found)}, where each element needs one of its own; means are fair "
            f"all the same"
        )
    if not explanations:
        return ()
    from refops.oracle.conventions import CONVENTIONS  # which a right dump does not pay for

    convention = CONVENTIONS["random-number-shared"]
    copies = sum(name.endswith("_data") for name in judge.tallies)
    unfair = sum(bool(tally.bias) for tally in judge.tallies.values())
    return tuple(
        Explanation(
            (convention.name,),
            convention.sentence.format(what=said(found)),
            0.0 if judge.wrong else len(names) / unfair,
            place=None if len(names) == copies else Place(tuple(names)),
            whole_arrays=tuple(names),
        )
        for found, names in explanations.items()
    )


def coarser_functions(judge, budget):
    """The explanation of last resort: exp, tanh or division coarser than permitted. An empty tuple if they are not."""
    if judge.case.operation.activation is None or judge.ulp == 0 or judge.wrong < MANY_WRONG:
        return ()
    found = sentence = None
    if not any(_is_far(tally.verdict()) for tally in judge.tallies.values()):
        found = _least_coarse(judge, budget, lambda ulp: judge.of_coarser(ulp=ulp))
        sentence = (
            "exp, tanh or division are approximations (fast math, hardware functions): everything is within {} ulp "
            "where {:g} are permitted."
        )
    if found is None and _has_a_sigmoid(judge.case):
        found = _least_coarse(judge, budget, lambda ulp: judge.of_coarser(words=CoarseTanh(ulp)))
        sentence = (
            "The sigmoid is 0.5 + 0.5 tanh(x / 2), with a tanh that is an approximation (a hardware function): "
            "everything is right if that tanh may be off by {} ulp where {:g} are permitted."
        )
        if found is not None and not _shows_above_zero(judge, budget, found[0]):
            return ()
    if found is None:
        return ()
    ulp, explained = found
    return (Explanation(("approximate-elementary",), sentence.format(ulp, judge.ulp), explained),)


def _least_coarse(judge, budget, coarser):
    """(ulp, share of the wrong entries that are right then): the least of `COARSER` that explains a dump; None if none
    does.

    Args:
        coarser: function from ulp to a check that permits it.
    """
    found = None
    for ulp in COARSER:
        if ulp <= judge.ulp or budget.is_spent():
            break
        left = _left_wrong(coarser(ulp), FEW_LEFT * judge.wrong, budget)
        if left is None:
            break
        found = ulp, 1 - left / judge.wrong
    return found


def _left_wrong(other, most, budget):
    """How many entries a check that was not run yet finds wrong; None where more than `most`, or where time ended."""
    other.gives_up = lambda: other.wrong > most or budget.is_spent()
    with np.errstate(all="ignore"):
        other.run()
    return None if other.gives_up() else other.wrong


def _has_a_sigmoid(case):
    """Whether the formulas of a case's activation have a sigmoid."""
    return any(word.startswith("sigmoid") for function in case.bound.activation.functions for word in function.words)


def _shows_above_zero(judge, budget, ulp):
    """Whether a coarse tanh shows where x is above 0 too.

    Far below 0 its error is larger than the result, so that it would explain any fault there. tanh is odd: what is an
    error of tanh shows on both sides.
    """
    below_alone = judge.of_coarser(words=CoarseTanh(ulp, below_zero=True))
    left = _left_wrong(below_alone, FEW_LEFT * judge.wrong + MANY_WRONG, budget)
    return left is None and not budget.is_spent()


def _is_far(verdict):
    """Whether the first wrong codes or scales are off by more than a coarse function can move them: one step."""
    coded = verdict.kind in ("codes", "scales") and len(verdict.first) > 1
    return coded and all(mismatch.distance > 2 for mismatch in verdict.first)


class Judge:
    """One check.

    Attributes:
        case: the `Case`.
        outputs: name -> array as stored; scales in plain order.
        reference: name -> the reference's array.
        tallies: name -> `Tally`.
        shared: name -> which elements share a random number (`SharedDraws.found`), where random bits may be any.
        words: vocabulary of intervals that decides what is right; None: `refops.oracle.interval.INTERVALS`.
        gives_up: function asked before each tile: whether the others need not be judged.
    """

    def __init__(self, case, outputs, unpadded, ulp, padding, random_bits):
        self.gives_up = lambda: False
        self.case, self.ulp, self.padding, self.unpadded = case, ulp, padding, unpadded
        self.random_bits, self.words, self.shared = random_bits, None, {}
        self.notes = []
        self.outputs = {name: self._plain_order(name, array) for name, array in outputs.items()}
        self.reference = case.reference(outputs)
        self.tallies = {name: Tally(case.slots[name]) for name in outputs}

    def of_coarser(self, *, ulp=None, words=None):
        """The same check with another permitted error or vocabulary, and without padding; not run yet."""
        other = copy(self)
        other.ulp, other.words, other.padding, other.notes = self.ulp if ulp is None else ulp, words, "ignore", []
        other.tallies = {name: Tally(self.case.slots[name]) for name in self.outputs}
        return other

    @property
    def wrong(self):
        """Number of wrong entries of all outputs."""
        return sum(tally.count for tally in self.tallies.values())

    def run(self):
        """Judge every output."""
        for name in self.outputs:
            self._count_entries(name)
        if self.ulp == 0:
            for name in self.outputs:
                self._judge_bits(name)
        else:
            self._judge_enclosure()
        self._judge_padding()
        self._note_what_is_missing()
        if not any(tally.entries for tally in self.tallies.values()):
            self.notes.append(NOTHING_CHECKED)

    def report(self, explanations, diagnosed):
        """The `Report`."""
        scaling = "" if self.case.scaling is None else repr(self.case.scaling)
        params = ", ".join(f"{name}={value!r}" for name, value in self.case.params.items())
        unwritten = [
            note for name, tally in self.tallies.items() for note in tally.unwritten(self.outputs[name], explanations)
        ]
        return Report(
            operation=self.case.operation.name,
            settings="; ".join(filter(None, (scaling, params))),
            ulp=self.ulp,
            arrays=tuple(tally.verdict() for tally in self.tallies.values()),
            diagnosis=explanations,
            notes=(*self.notes, *unwritten),
            diagnosed=diagnosed,
            leads=tuple(self._leads()),
        )

    def _leads(self):
        """Hints on where to look: whether the codes of wrong scales are right, and under which scales."""
        for direction in DIRECTIONS:
            scales, codes = f"{direction}_scale_inv", f"{direction}_data"
            if not {scales, codes} <= set(self.tallies) or not self.tallies[scales].count:
                continue
            inside = self.case.slots[codes].valid_slices
            if np.array_equal(bits_of(self.outputs[codes][inside]), bits_of(self.reference[codes][inside])):
                yield f"{codes}: right under the right scales; {scales} alone is wrong"
            elif not self.tallies[codes].count:
                yield f"{codes}: right under the scales that were written; what makes {scales} is wrong"

    def _note_what_is_missing(self):
        """Notes on what was not given."""
        for direction in DIRECTIONS:
            arrays = [name for name in self.case.slots if direction in name.split("_")]
            missing = [name for name in arrays if name not in self.outputs]
            if missing and len(missing) < len(arrays):
                self.notes.append(f"not given, not judged: {', '.join(missing)}")

    # --- common -----------------------------------------------------------------------------------

    def _plain_order(self, name, array):
        """Undo the GEMM order of scales: those stored [block, outer] are swizzled along their transpose."""
        layout = self.case.scaling.layout if self.case.quantizes else None
        if not (self.case.swizzled_scales and layout and name.endswith("scale_inv") and layout.scale_order == "gemm"):
            return array
        self.notes.append(f"{name} was put in plain order: indices are those of the plain order")
        if name in self.unpadded:
            raise ValueError(f"{name} must have its padding when swizzled, {self.case.slots[name].shape}; got without")
        return reorder_scales(layout, name, array, to_swizzled=False)

    def _count_entries(self, name):
        tally, slot = self.tallies[name], self.case.slots[name]
        got, expected = self.outputs[name][slot.valid_slices], self.reference[name][slot.valid_slices]
        if slot.packed == 2:
            tally.entries = 2 * got.size
            tally.differing = int(np.count_nonzero((got ^ expected) & 15) + np.count_nonzero((got ^ expected) >> 4))
        else:
            tally.entries = got.size
            tally.count_differing(got, expected)

    def _judge_bits(self, name):
        """ulp=0: the reference's bits."""
        slot, tally = self.case.slots[name], self.tallies[name]
        got, expected = self.outputs[name][slot.valid_slices], self.reference[name][slot.valid_slices]
        tally.wrong[slot.valid_slices] = bits_of(got) != bits_of(expected)
        packed = slot.packed == 2
        if packed:
            got, expected = unpack_fp4(got), unpack_fp4(expected)
        wrong = bits_of(got) != bits_of(expected)

        def describe(index):
            at = index = tuple(int(i) for i in index)
            if packed:
                at = (*index[:-1], index[-1] // 2)
            show = shown_entry if slot.fmt is None else lambda code, slot: shown_code(code, slot.fmt)
            return Mismatch(name, at, None, show(got[index], slot), show(expected[index], slot), 1.0, {})

        tally.add(wrong, np.ones(wrong.shape, np.float32), describe)

    def _judge_padding(self):
        """Padding that is not zero: wrong if zeros were asked for, else worth a note."""
        for name, array in self.outputs.items():
            slot, tally = self.case.slots[name], self.tallies[name]
            if not slot.padded:
                continue
            if name in self.unpadded:
                self.notes.append(f"{name} came without its padding: {slot.valid} of {slot.shape} was judged")
                continue
            written = array != 0
            written[slot.valid_slices] = False
            count = int(np.count_nonzero(written))
            if not count:
                continue
            if self.padding == "ignore":
                total = array.size - array[slot.valid_slices].size
                self.notes.append(
                    f"{count:,} of the {total:,} padding entries of {name} are not zero; TE leaves them unwritten "
                    f"(with padding zero they are judged)"
                )
                continue
            tally.entries += array.size - array[slot.valid_slices].size
            tally.wrong |= written

            def describe(index, name=name, array=array, slot=slot):
                index = tuple(int(i) for i in index)
                return Mismatch(name, index, None, shown_entry(array[index], slot), "0 (padding)", 1.0, {})

            tally.add(written, np.ones(written.shape, np.float32), describe)

    def _judge_enclosure(self):
        case = self.case
        if case.operation.kind == "update_delayed_scale":
            for name in self.outputs:
                self.judge_exact(name)
        elif case.operation.kind == "dequantize":
            stored_float32 = self.outputs["y"].dtype == np.float32
            source = enclosure.DequantizedBounds(case.inputs["q"], self.ulp, stored_float32=stored_float32)
            self._judge_values("y", source)
        elif case.quantizes:
            QuantizedJudge(self).run()
        else:
            for name, array in self.outputs.items():
                if name == "dbias":
                    # The gradient as stored is summed: in the dtype of the dumped dx, else in that of x.
                    dtype = self.outputs["dx"].dtype if "dx" in self.outputs else case.inputs["x"].dtype
                    source = enclosure.bounds_of(case, self.ulp, stored_float32=dtype == np.float32, words=self.words)
                    self.judge_sums(name, enclosure.RoundedBounds(source, dtype), axis=0)
                elif name == "drow_scales":
                    source = enclosure.FormulaBounds(case, self.ulp, "drow_scales", words=self.words)
                    self.judge_sums(name, source, axis=1)
                else:
                    float32 = array.dtype == np.float32
                    source = enclosure.bounds_of(case, self.ulp, stored_float32=float32, words=self.words)
                    self._judge_values(name, source)

    def judge_exact(self, name):
        """Numbers that no freedom touches: equal to the reference, NaN as one class."""
        got, expected = self.outputs[name].reshape(-1), self.reference[name].reshape(-1)
        self.judge_numbers(name, got, Bounds(expected, expected, np.isnan(expected)), (slice(0, got.size),))

    def _judge_values(self, name, source):
        """Float results, tile by tile."""
        dtype = self.outputs[name].dtype
        got, expected = (Matrix(a[name]) for a in (self.outputs, self.reference))

        def work(rows, columns):
            mine, theirs = got.raw(rows, columns), expected.raw(rows, columns)
            if np.array_equal(bits_of(mine), bits_of(theirs)) or self.gives_up():
                return
            bounds = source.read(rows, columns).rounded(dtype)
            self.judge_numbers(name, mine.astype(F), bounds, (rows, columns))

        for_each(tile_slices(source.shape), work)

    def judge_sums(self, name, source, axis):
        """Sums over rows (axis 0) or columns (axis 1), only those that differ from the reference."""
        array = self.outputs[name]
        got, expected = array.reshape(-1), self.reference[name].reshape(-1)
        count = source.shape[axis]
        different = np.flatnonzero(bits_of(got) != bits_of(expected))
        if not different.size:
            return
        if count >= LONG_SUM:
            self.notes.append(
                f"{name} adds {count:,} terms: in any order the error may reach {count - 1:,} x 2^-24 of the sum of "
                f"their magnitudes, so what a few terms contribute cannot be judged"
            )
        step = 256  # of 1024 terms: a tile of the usual size
        for start in range(different[0], different[-1] + 1, step):
            at = slice(start, min(start + step, different[-1] + 1))
            bounds = enclosure.sum_bounds(source, axis, at, stored_float32=array.dtype == F).rounded(array.dtype)
            self.judge_numbers(name, got[at].astype(F), bounds, (at,))

    def judge_numbers(self, name, values, bounds, region):
        """Judge float32 `values`, a rectangle or a run of an output, against their bounds."""
        wrong = ~bounds.contain(values)
        if not wrong.any():
            return
        slot, tally = self.case.slots[name], self.tallies[name]
        array = self.outputs[name]
        matrix = len(region) == 2
        (tally.wrong.reshape(-1, tally.wrong.shape[-1]) if matrix else tally.wrong.reshape(-1))[region] |= wrong
        distance = distance_of(values, bounds, array.dtype)

        def describe(index):
            index = tuple(int(i) for i in index)
            at = tuple(i + s.start for i, s in zip(index, region, strict=True))
            element = at if matrix else None
            absolute = (
                stored_index(at, array.shape) if matrix else tuple(map(int, np.unravel_index(at[0], array.shape)))
            )
            return Mismatch(
                name,
                absolute,
                element,
                shown_entry(array[absolute], slot),
                shown_range(bounds, index),
                float(distance[index]),
                {} if element is None else self.inputs_at(*element),
            )

        tally.add(wrong, distance, describe)

    def inputs_at(self, row, column):
        """Input values of an element of the result."""
        case, values = self.case, {}
        if case.operation.kind in ("dequantize", "update_delayed_scale"):
            return values
        x = Matrix(case.inputs["x"])
        if not case.gated:
            values["x"] = x.read(slice(row, row + 1), slice(column, column + 1))[0, 0]
        else:
            layout = case.row_layout
            if case.operation.kind.endswith("grad"):  # a column of dx is a column of x
                column = int(layout.locate(column)[1])
            act, gate = (layout.columns(column, second) for second in (False, True))
            for name, at in (("act", act), ("gate", gate)):
                values[name] = x.read(slice(row, row + 1), slice(at, at + 1))[0, 0]
        if "dy" in case.inputs:
            values["dy"] = Matrix(case.inputs["dy"]).read(slice(row, row + 1), slice(column, column + 1))[0, 0]
        if "row_scales" in case.inputs:
            values["row_scale"] = case.inputs["row_scales"].reshape(-1)[row]
        return {name: float(value) for name, value in values.items()}
