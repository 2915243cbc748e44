"""The oracle against the mutants: every fault is found, nearly every convention is named, no corruption gets a name.

What the oracle does not name right is listed by name here, so that a change for better or worse shows up; the lists'
lengths are bounded. That the mutants can tell a blunt oracle from a sharp one is tested in test_blunt_oracle.py.
"""

import numpy as np
from mutants import MUTANTS
from mutants.outcome import check, outcome

from tiers import sampled

CONVENTIONS = [name for name, mutant in MUTANTS.items() if mutant.kind == "convention"]
CORRUPTIONS = [name for name, mutant in MUTANTS.items() if mutant.kind == "corruption"]
#: Conventions whose first answer is another one, or unknown: at most a tenth.
MISNAMED = {
    "amax-and-scale-take-nan",
    "mx-amax-of-columns",
    "nv-amax-of-columns-for-rows",
    "silu-through-tanh",
}
#: Corruptions that get the name of a convention: at most a tenth.
FALSELY_NAMED = {"overflow-saturates-instead-of-inf"}


def entries(array):
    """Bits of an array's entries; every NaN counts as one."""
    if array.dtype.itemsize > 1:
        array = np.where(np.isnan(array.astype(np.float32)), array.dtype.type(np.nan), array)
    return np.ascontiguousarray(array).view({1: np.uint8, 2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


def differing(a, b):
    """How many entries of two dumps differ."""
    return sum(np.count_nonzero(entries(a[name]) != entries(b[name])) for name in a)


def test_the_library_is_large_enough():
    """Over all formats and operations: at least 50 conventions and 25 corruptions."""
    assert len(CONVENTIONS) >= 50 and len(CORRUPTIONS) >= 25
    families = {mutant.family for mutant in MUTANTS.values()}
    assert families == {
        "activation",
        "gradient",
        "Delayed",
        "Current",
        "Block",
        "MXFP8",
        "NVFP4",
        "dequantize",
        "update_delayed_scale",
    }
    for mutant in MUTANTS.values():
        assert mutant.sentence, mutant.name
        assert mutant.both == (mutant.both and len(mutant.expected) == 2), mutant.name
        assert mutant.expected or mutant.kind == "corruption", mutant.name


@sampled("name", MUTANTS, 31, in_all=60)
def test_the_fault_is_in_the_dump(name):
    """The dump differs from that of the right kernel and from the reference; the right kernel's is accepted."""
    mutant = MUTANTS[name]
    _, dump = mutant.dump()
    right = mutant.kernel().right()
    assert differing(dump, right)
    assert differing(dump, mutant.right_outputs(dump))
    report = check(mutant, right, diagnose=False)
    assert report.ok, str(report)


@sampled("name", MUTANTS, 29, in_all=48)
def test_detected_and_named(name):
    result = outcome(name)
    assert result.detected
    listed = MISNAMED if result.kind == "convention" else FALSELY_NAMED
    expected = " or ".join(MUTANTS[name].expected) or "unknown"
    assert result.right == (name not in listed), f"answer: {result.answer}; expected: {expected}; all: {result.answers}"


def test_nine_of_ten_are_named_right():
    assert set(CONVENTIONS) >= MISNAMED and len(MISNAMED) <= len(CONVENTIONS) / 10
    assert set(CORRUPTIONS) >= FALSELY_NAMED and len(FALSELY_NAMED) <= len(CORRUPTIONS) / 10


def test_dumps_are_reproducible():
    """The same seed gives the same inputs and the same dump."""
    for name in ("one-row-reuses-random-bits", "sr-with-its-own-generator", "one-block-chose-the-worse"):
        assert differing(MUTANTS[name].dump()[1], MUTANTS[name].dump()[1]) == 0
