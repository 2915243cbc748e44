"""What the oracle says of a mutant."""

from dataclasses import dataclass

from mutants.registry import MUTANTS
from refops import oracle


@dataclass(frozen=True)
class Outcome:
    """One mutant judged.

    Attributes:
        name, family, kind: of the mutant.
        detected: whether the dump was rejected.
        place: where a right name stands among the answers, 1 for the first; 0 if none is right.
        answers: names of each explanation, best first.
    """

    name: str
    family: str
    kind: str
    detected: bool
    place: int
    answers: tuple[tuple[str, ...], ...]

    @property
    def right(self):
        """Whether the answer is the one expected: for a convention its name first, for a corruption no wrong name."""
        return self.place == 1 or (self.kind == "corruption" and not self.answers)

    @property
    def answer(self):
        """The first answer, as text."""
        return " + ".join(self.answers[0]) if self.answers else "unknown"


def check(mutant, outputs, *, diagnose):
    """The oracle's report on `outputs` of the mutant's operation."""
    return oracle.check(
        mutant.op,
        mutant.inputs,
        outputs,
        scaling=mutant.scaling,
        params=mutant.params,
        ulp=mutant.ulp,
        diagnose=diagnose,
    )


def outcome(name, *, diagnose=True):
    """Judge one mutant."""
    mutant = MUTANTS[name]
    report = check(mutant, mutant.dump()[1], diagnose=diagnose)
    assert not any("diagnosis failed" in note for note in report.notes), (name, report.notes)
    places = [i for i, explanation in enumerate(report.diagnosis, 1) if mutant.named_right(explanation)]
    answers = tuple(explanation.names for explanation in report.diagnosis)
    return Outcome(name, mutant.family, mutant.kind, not report.ok, places[0] if places else 0, answers)
