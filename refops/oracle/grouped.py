"""The check of a grouped (mixture-of-experts) dump: each expert's rows are a tensor of their own, judged by itself.

The tensor holds the rows of all experts, one behind the other; `m_splits` says how many each has. Every expert has
amax, blocks, padding and sums of its own. An array of the dump may be

- a list with the array of each expert, or `outputs` a list with what each expert's kernel wrote;
- the arrays of the experts one behind the other, all with their padding or all without: what a kernel writes into one
  allocation;
- of data and scales that are stored with the rows of the tensor last (transposed), the arrays side by side.

Rows in a report are those of the tensor, not of the expert.
"""

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from refops.arguments import shown
from refops.oracle.dumps import as_numpy, fit_dtype
from refops.oracle.geometry import VALUES, Geometry, Region, crop, whole
from refops.oracle.operation import Case, require_operation
from refops.oracle.places import Place
from refops.oracle.quantized_tensors import is_swizzled
from refops.oracle.report import Explanation, Report, array_lines
from refops.oracle.tally import bits_of
from refops.oracle.verdict import check

#: Wrong experts that a diagnosis is tried for.
MOST_DIAGNOSED = 4
#: Operations whose tensors have no rows of experts.
UNGROUPED = ("dequantize", "update_delayed_scale")
#: What is said of an expert that was quantized under the amax of all.
TOGETHER = Explanation(
    names=("amax-of-all-experts",),
    sentence="The expert was quantized as a part of the whole tensor: the amax is that of the rows of all experts.",
    explained=1.0,
    exact=True,
)


@dataclass(frozen=True)
class ExpertReport:
    """What was found about one expert.

    Attributes:
        expert: its number.
        start, stop: its rows of the tensor.
        report: the `Report` on them, None where nothing of it was judged; rows are those of the tensor.
    """

    expert: int
    start: int
    stop: int
    report: Report | None

    @property
    def ok(self) -> bool:
        """Whether nothing of it is wrong."""
        return self.report is None or self.report.ok

    def __str__(self):
        rows = f"rows {self.start}..{self.stop - 1}" if self.stop > self.start else "no rows"
        return f"expert {self.expert} ({rows})"


@dataclass(frozen=True)
class GroupedReport(Report):
    """What `check` found of a grouped dump: `arrays`, `diagnosis` and `notes` are those of all experts.

    Attributes:
        experts: an `ExpertReport` for each.
    """

    experts: tuple[ExpertReport, ...] = ()

    @property
    def wrong_experts(self) -> tuple[int, ...]:
        """Numbers of the experts of which something is wrong."""
        return tuple(one.expert for one in self.experts if not one.ok)

    def __str__(self):
        wrong, count = self.wrong_experts, len(self.experts)
        found = f"{_experts(wrong)} of {count} {'is' if len(wrong) == 1 else 'are'} wrong" if wrong else "all experts"
        lines = [f"{self.headline()}: {found}", *self._totals()]
        for one in self.experts:
            if not one.ok:
                lines += _lines_of(one, self.diagnosed)
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def _totals(self):
        """A line on each output: how much of it was judged, over all experts."""
        lines = []
        for name in dict.fromkeys(array.name for array in self.arrays):
            parts = [array for array in self.arrays if array.name == name]
            entries, wrong = (sum(getattr(part, count) for part in parts) for count in ("entries", "wrong"))
            lines.append(f"  {name}: {f'{wrong:,} of ' * bool(wrong)}{entries:,} {'wrong' if wrong else 'right'}")
        return lines

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON: that of `Report`, and "experts" with number, rows and report of each."""
        experts = [
            {
                "expert": one.expert,
                "rows": [one.start, one.stop],
                "ok": one.ok,
                "report": None if one.report is None else one.report.as_dict(),
            }
            for one in self.experts
        ]
        return super().as_dict() | {"experts": experts}


def _lines_of(one, diagnosed):
    """Lines of text on a wrong expert."""
    lines = [f"  {one}: wrong"]
    for array in one.report.arrays:
        lines += [f"  {line}" for line in array_lines(array)]
    if diagnosed and one.report.diagnosed:
        found = [f"      {n}. {explanation}" for n, explanation in enumerate(one.report.diagnosis, 1)]
        lines += ["    diagnosis:", *found] if found else ["    diagnosis: unknown: no known convention explains it"]
    return lines


def _experts(numbers):
    """The experts of these ascending numbers in words."""
    return f"expert{'s' * (len(numbers) > 1)} {_runs(numbers)}"


def _runs(numbers):
    """Ascending numbers in words: "0..3, 5"."""
    breaks = [0, *(i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1] + 1), len(numbers)]
    runs = [(numbers[start], numbers[stop - 1]) for start, stop in pairwise(breaks)]
    return ", ".join(str(first) if first == last else f"{first}..{last}" for first, last in runs)


# --- the check --------------------------------------------------------------------------------------------------------


def check_groups(op, inputs, outputs, scaling, m_splits, options):
    """Judge a grouped dump; `options` are the other keyword arguments of `check`. Returns a `GroupedReport`.

    Raises:
        TypeError, ValueError: as `check`; `m_splits` that are no sizes of at least one expert, or do not add up to the
            rows of the inputs; an operation without rows; outputs of which no part can be given to each expert.
    """
    groups = Groups(op, inputs, scaling, m_splits, options["params"], options["swizzled_scales"])
    written = groups.split_outputs(outputs)
    options = options | {"swizzled_scales": groups.swizzled(outputs)}
    reports, diagnoses = [], MOST_DIAGNOSED if options["diagnose"] else 0
    for expert, given in enumerate(written):
        report = None
        if given:
            arguments = (op, groups.cases[expert].inputs, given)
            own = options | {"scaling": groups.scalings[expert]}
            report = check(*arguments, **own | {"diagnose": False})
            if not report.ok and diagnoses:
                diagnoses -= 1
                together = not options["swizzled_scales"] and groups.follows_the_whole(expert, given)
                report = (
                    replace(report, diagnosis=(TOGETHER,), diagnosed=True) if together else check(*arguments, **own)
                )
        reports.append(report)
    return groups.report(reports, options)


class Groups:
    """The experts of a grouped call.

    Attributes:
        sizes: rows of each.
        starts: first row of each.
        whole: the `Case` of the tensor as a whole.
        cases: the `Case` of each expert.
        scalings: the scaling of each.
    """

    def __init__(self, op, inputs, scaling, m_splits, params=None, swizzled_scales=False):
        operation = require_operation(op)
        if operation.kind in UNGROUPED:
            raise ValueError(f"m_splits must be None for {operation.name}, which has no rows; got {shown(m_splits)}")
        self.sizes = _sizes(m_splits)
        self.scalings = self._scalings(scaling)
        self.whole = Case(op, inputs, self.scalings[0], params, swizzled_scales=swizzled_scales)
        rows = self.whole.matrix_shape[0]
        if sum(self.sizes) != rows:
            raise ValueError(f"m_splits must add up to the {rows} rows of the inputs; got {sum(self.sizes)}")
        self.starts = [0, *accumulate(self.sizes)][:-1]
        self._whole_reference = None
        self.cases = [
            Case(op, self._inputs_of(start, size), own, params, swizzled_scales=swizzled_scales)
            for start, size, own in zip(self.starts, self.sizes, self.scalings, strict=True)
        ]

    def _scalings(self, scaling):
        if not isinstance(scaling, list | tuple):
            return [scaling] * len(self.sizes)
        if len(scaling) != len(self.sizes):
            raise ValueError(f"scaling must be one, or one for each of {len(self.sizes)} experts; got {len(scaling)}")
        return list(scaling)

    def _inputs_of(self, start, size):
        """The inputs of an expert: its rows, of matrices and of what has an entry for each row."""
        rows, inputs = slice(start, start + size), {}
        for name, array in self.whole.inputs.items():
            flat = array.reshape(-1) if name == "row_scales" else array.reshape(sum(self.sizes), array.shape[-1])
            inputs[name] = flat[rows]
        return inputs

    def swizzled(self, outputs):
        """Whether the scales of the outputs are in GEMM order."""
        each = outputs if isinstance(outputs, list | tuple) else [outputs]
        return self.whole.swizzled_scales or any(map(is_swizzled, each))

    def follows_the_whole(self, expert, given):
        """Whether an expert's codes, scales and amax are those of its rows in the tensor quantized as a whole."""
        if not self.whole.quantizes or self.whole.scaling.layout.amax != "tensor":
            return False
        case = self.cases[expert]
        arrays = {name: a for name, a in case.fit_outputs(given)[0].items() if case.slots[name].kind != "values"}
        if not arrays or self.whole.scaling.given is not None:
            return False
        reference, (_, width) = self._reference_of_the_whole(tuple(arrays)), self.whole.matrix_shape
        start = self.starts[expert]
        mine, place = whole(case.matrix_shape), Region(slice(start, start + self.sizes[expert]), slice(0, width))
        return all(
            np.array_equal(
                bits_of(crop(case, name, array, mine)), bits_of(crop(self.whole, name, reference[name], place))
            )
            for name, array in arrays.items()
        )

    def _reference_of_the_whole(self, names):
        if self._whole_reference is None:
            self._whole_reference = self.whole.reference({name: np.empty(0, np.uint8) for name in names})
        return self._whole_reference

    # --- outputs ------------------------------------------------------------------------------------------------------

    def split_outputs(self, outputs):
        """Return for each expert: output name -> array of it. Empty where an expert without rows has nothing to judge.

        An expert without rows may have written no codes, scales and amax; its sums must be 0.
        """
        count = len(self.sizes)
        if isinstance(outputs, list | tuple):
            if len(outputs) != count:
                raise ValueError(f"outputs must be a dict, or one for each of {count} experts; got {len(outputs)}")
            given = [case.name_outputs(one) for case, one in zip(self.cases, outputs, strict=True)]
        else:
            split = {name: self._split(name, a) for name, a in self.whole.name_outputs(outputs).items()}
            given = [{name: parts[expert] for name, parts in split.items()} for expert in range(count)]
        for expert, size in enumerate(self.sizes):
            if not size:
                given[expert] = {n: a for n, a in given[expert].items() if self.whole.slots[n].kind == "values"}
        return given

    def sizes_of(self, name):
        """Entries of an output of all experts, with padding and without: [(shape,), (shape,)] to read it by."""
        slots = [case.slots[name] for case in self.cases]
        return [(sum(int(np.prod(getattr(s, part))) for s in slots),) for part in ("shape", "valid")]

    def _split(self, name, value):
        """The arrays of each expert in an output that holds all of them."""
        slots = [case.slots[name] for case in self.cases]
        if isinstance(value, list | tuple) and len(value) == len(slots) and all(hasattr(a, "shape") for a in value):
            return list(value)
        array = fit_dtype(as_numpy(value, name), slots[0])
        for shapes in ([s.shape for s in slots], [s.valid for s in slots]):
            if array.size == sum(int(np.prod(shape)) for shape in shapes):
                return self._cut(name, array, shapes)
        with_padding, without = ((s[0],) for s in self.sizes_of(name))
        also = f", or {without[0]:,} without padding" if without != with_padding else ""
        raise ValueError(
            f"{name} must hold what {len(slots)} experts wrote, one after another, {with_padding[0]:,} "
            f"entries{also}; got shape {array.shape}"
        )

    def _cut(self, name, array, shapes):
        side_by_side = array.ndim == 2 and array.shape == (shapes[0][0], sum(shape[-1] for shape in shapes))
        if side_by_side and self._rows_last(name):
            return np.split(array, list(accumulate(shape[-1] for shape in shapes))[:-1], axis=1)
        ends = list(accumulate(int(np.prod(shape)) for shape in shapes))[:-1]
        parts = np.split(np.ascontiguousarray(array).reshape(-1), ends)
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _rows_last(self, name):
        """Whether an array is stored with the rows of the tensor last."""
        if not name.endswith(("_data", "_scale_inv")):
            return False
        return Geometry.of(self.whole.scaling, name).entry(name)[0]

    # --- the report ---------------------------------------------------------------------------------------------------

    def report(self, reports, options):
        """The `GroupedReport` of the experts' reports."""
        experts = tuple(
            ExpertReport(expert, start, start + size, None if own is None else self._in_the_tensor(own, start, size))
            for expert, (start, size, own) in enumerate(zip(self.starts, self.sizes, reports, strict=True))
        )
        judged = [one for one in experts if one.report is not None]
        if not judged:
            raise ValueError("outputs must hold something of an expert with rows; got none")
        first, explanations = judged[0].report, {}
        for one in judged:
            for explanation in one.report.diagnosis:
                explanations.setdefault((explanation.names, str(explanation.place)), explanation)
        empty = [expert for expert, size in enumerate(self.sizes) if not size]
        notes = [f"no rows, so no codes, scales and amax to judge: {_experts(empty)}"] if empty else []
        notes += self._common_notes(judged)
        wrong = [one for one in judged if not one.ok]
        left = [one.expert for one in wrong if not one.report.diagnosed]
        if options["diagnose"] and left:
            notes.append(f"a diagnosis was tried for {MOST_DIAGNOSED} wrong experts, not for {_experts(left)}")
        return GroupedReport(
            operation=first.operation,
            settings=first.settings,
            ulp=first.ulp,
            arrays=tuple(array for one in judged for array in one.report.arrays),
            diagnosis=tuple(explanations.values()),
            notes=tuple(notes),
            diagnosed=any(one.report.diagnosed for one in wrong),
            experts=experts,
        )

    def _common_notes(self, judged):
        """Each note once, with the experts that it is about."""
        about = {}
        for one in judged:
            for note in one.report.notes:
                about.setdefault(note, []).append(one.expert)
        everyone = len(judged)
        return [note if len(of) == everyone else f"{_experts(of)}: {note}" for note, of in about.items()]

    def _in_the_tensor(self, report, start, count):
        """A report in rows of the tensor, from one in rows of an expert that has `count` rows from `start` on."""
        rows = self.whole.matrix_shape[0]
        places = ((one.place or Place()).from_row(start, count, rows) for one in report.diagnosis)
        diagnosis = tuple(replace(one, place=place) for one, place in zip(report.diagnosis, places, strict=True))
        return replace(report, arrays=tuple(self._moved(array, start) for array in report.arrays), diagnosis=diagnosis)

    def _moved(self, array, start):
        rows_first = self._rows_first(array.name)

        def moved(mismatch):
            element = mismatch.element and (mismatch.element[0] + start, mismatch.element[1])
            index = mismatch.index
            if rows_first and index:
                index = (index[0] + start, *index[1:])
            return replace(mismatch, index=index, element=element)

        shown_ones = {part: tuple(map(moved, getattr(array, part))) for part in ("first", "worst")}
        return replace(array, **shown_ones, first_row=start if rows_first else 0)

    def _rows_first(self, name):
        """Whether the first index of an array is the row of the tensor."""
        if name in (*VALUES, "drow_scales"):
            return True
        if name.startswith("amax") or name == "dbias":
            return (
                self.whole.scaling is not None and self.whole.scaling.layout.amax == "rows" and name == "amax_rowwise"
            )
        geometry = Geometry.of(self.whole.scaling, name)
        if geometry.run is None and name.endswith("_scale_inv"):
            return False
        transposed, rows, _ = geometry.entry(name)
        return not transposed and rows == 1


def _sizes(m_splits):
    """Rows of each expert as a list of integers."""
    array = as_numpy(m_splits, "m_splits")
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu" or (array < 0).any():
        raise ValueError(f"m_splits must be the rows of each expert, integers >= 0; got {shown(m_splits)}")
    return [int(size) for size in array]
