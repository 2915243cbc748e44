"""Counting what agrees and what differs: a `Task` is run with a `Tally`, and a `Check` comes of it."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from refops.rounding import round_once

#: float32 unit roundoff, what permitted errors are multiples of.
U = 2.0**-24


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


@dataclass(frozen=True)
class Task:
    """A check to run: `run(tally)` reports what it compares."""

    section: str
    subject: str
    against: str
    run: Callable


class Tally:
    """Counts what a task compares and remembers the first difference."""

    def __init__(self):
        self.comparisons = self.values = self.differing = 0
        self.first = ""

    def holds(self, label, ok, describe=lambda index: "the rule does not hold"):
        """Count a bool array of verdicts; `describe(index)` says what is wrong at an index."""
        ok = np.asarray(ok, bool)
        self.comparisons += 1
        self.values += ok.size
        wrong = ok.size - int(np.count_nonzero(ok))
        self.differing += wrong
        if wrong and not self.first:
            index = tuple(int(i) for i in np.argwhere(~ok)[0])
            self.first = f"{label}{list(index)}: {describe(index)}"

    def equal(self, label, got, expected):
        """Compare two arrays bit by bit (any NaN equals any NaN); None stands for an array that is not there."""
        if got is None or expected is None or got.shape != expected.shape or got.dtype != expected.dtype:
            same = got is None and expected is None
            self.holds(label, np.array([same]), lambda _: f"got {_outline(got)}, expected {_outline(expected)}")
            return
        same = got == expected
        if got.dtype.kind not in "ui":
            same = np.where(same, np.signbit(got) == np.signbit(expected), np.isnan(got) & np.isnan(expected))
        self.holds(label, same, lambda i: f"got {_number(got[i])}, expected {_number(expected[i])}")

    def close(self, label, got, truth, permitted):
        """Compare with a float64 truth: `got` is what a value within truth +- permitted, rounded once, can become.

        Rounding is monotone, so that is what lies between the roundings of both ends.
        """
        permitted = permitted + 2.0**-140  # products that are subnormal on the way
        low, high = round_once(truth - permitted, got.dtype), round_once(truth + permitted, got.dtype)
        self.holds(label, (low <= got) & (got <= high), lambda i: f"got {_number(got[i])}, truth {truth[i]:.9g}")

    def quantized(self, label, got, expected):
        """Compare all data and scales of two `Quantized` bit by bit."""
        for field in ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv"):
            self.equal(f"{label} {field}", getattr(got, field), getattr(expected, field))

    def amaxes(self, label, got, expected):
        """Compare the amaxes of two `Quantized` bit by bit."""
        for field in ("amax_rowwise", "amax_columnwise"):
            self.equal(f"{label} {field}", getattr(got, field), getattr(expected, field))


def _outline(array):
    return "nothing" if array is None else f"{array.dtype} of shape {array.shape}"


def _number(value):
    return f"0x{int(value):02X}" if value.dtype.kind in "ui" else f"{float(value):.9g}"


def run_task(task):
    """Run one task; an exception inside it is a difference, not a crash."""
    tally = Tally()
    try:
        with np.errstate(all="ignore"):
            task.run(tally)
    except Exception as error:  # a backend may raise anything; the report must still end with a verdict
        tally.holds("", np.array([False]))
        tally.first = f"raised {type(error).__name__}: {' '.join(str(error).split())}"
    return Check(
        task.section, task.subject, task.against, tally.comparisons, tally.values, tally.differing, first=tally.first
    )
