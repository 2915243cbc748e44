"""What the oracle says of a planted fault: found or not, named or not, at the right place or not."""

from dataclasses import dataclass

import numpy as np

from planted import accepted_held, accepted_open
from planted.registry import PLANTED
from refops import oracle
from refops.oracle.operation import Case

#: Author -> fault -> names that are right.
ACCEPTED = {"open": accepted_open.ACCEPTED, "held": accepted_held.ACCEPTED}
#: Least overlap of the place that is said and the true one: elements in both, as a share of those in either.
OVERLAP = 0.9


@dataclass(frozen=True)
class Outcome:
    """One planted fault judged.

    Attributes:
        author, name: of the fault.
        found: whether the dump was rejected.
        answers: names of each explanation, best first.
        sentence: the first explanation, as text; "" where there is none.
        overlap: of its place with the true one.
        copies: whether it speaks of the right outputs.
    """

    author: str
    name: str
    found: bool
    answers: tuple[tuple[str, ...], ...]
    sentence: str
    overlap: float
    copies: bool

    @property
    def named(self):
        """Whether the first answer's names are all right."""
        return bool(self.answers) and set(self.answers[0]) <= set(ACCEPTED[self.author][self.name])

    @property
    def placed(self):
        """Whether the place is the true one."""
        return self.copies and self.overlap >= OVERLAP


def outcome(author, name):
    """Judge one planted fault."""
    fault = PLANTED[author, name]
    inputs, outputs = fault.inputs(), fault.outputs()
    report = oracle.check(
        fault.op, inputs, outputs, scaling=fault.scaling, params=fault.params, ulp=fault.ulp, diagnose=True
    )
    answers = tuple(explanation.names for explanation in report.diagnosis)
    if not answers:
        return Outcome(author, name, not report.ok, (), "", 0.0, False)
    first = report.diagnosis[0]
    shape = Case(fault.op, inputs, fault.scaling, fault.params).matrix_shape or (1, 1)
    said = np.ones(shape, bool) if first.place is None else first.place.mask(shape)
    true = fault.where.mask(shape)
    overlap = float((said & true).sum() / max((said | true).sum(), 1))
    arrays = first.place.arrays if first.place is not None and first.place.arrays else tuple(outputs)
    return Outcome(
        author, name, not report.ok, answers, str(first), overlap, _agree(arrays, fault.where.arrays, report)
    )


def _agree(said, true, report):
    """Whether what is wrong among the outputs that are said is what is wrong among the true ones."""
    wrong = {array.name for array in report.arrays if not array.ok}
    of_said = {_part(name) for name in wrong if name in said or _short(name) in said}
    return of_said == {
        _part(name) for name in wrong if not true or {_part(name), name, name.partition("_")[0]} & {*true}
    }


def _short(name):
    """The short name of a rowwise output."""
    return {"rowwise_data": "data", "rowwise_scale_inv": "scale", "amax_rowwise": "amax"}.get(name, name)


def _part(name):
    """What an output belongs to, in the words of `Where.arrays`."""
    for direction in ("rowwise", "columnwise"):
        if direction in name.split("_"):
            return direction
    return {"y": "values", "dx": "values", "amax_history": "history"}.get(name, name)
