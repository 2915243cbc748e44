"""No input breaks a claim, in the eyes of two solvers; a wrong constant in it is found, and `refops` confirms where.

`make prove` runs all of it and prints the table; what is quick runs in `make test` too, if the solvers are there.
"""

import numpy as np
import pytest

import tiers

pytest.importorskip("z3", reason="proofs need z3-solver: make prove")
pytest.importorskip("bitwuzla", reason="proofs need bitwuzla: make prove")

import claims_of_casts
from solvers import ask, bitwuzla_says, numbers_of, z3_says

PARTS = (claims_of_casts,)
CLAIMS = [claim for part in PARTS for claim in part.CLAIMS]
CASES = [pytest.param(claim, id=claim.name, marks=() if claim.quick else tiers.SWEEP) for claim in CLAIMS]


@pytest.mark.parametrize("claim", CASES)
def test_claim(claim, record_property):
    seconds, others, example = 0.0, 0.0, ""
    for part, query in claim.queries.items():
        asked = query(False)
        first, second = ask(z3_says, asked), ask(bitwuzla_says, asked)
        assert "sat" not in (first.says, second.says), report(claim, part, asked, first.inputs or second.inputs)
        assert (first.says, second.says) == ("unsat", "unsat"), f"{claim.name}, {part}: {first}, {second}"
        seconds, others = seconds + first.seconds, others + second.seconds
        found = seeded_fault_shows(claim, part, query(True))
        example = example or found
    row = (claim.name, claim.domain, len(claim.queries), round(seconds, 2), round(others, 2), example)
    record_property("proof", row)


def seeded_fault_shows(claim, part, query):
    """Assert that a wrong constant has a counterexample, and that `refops` gives what was expected there."""
    answer = ask(bitwuzla_says, query)
    assert answer.says == "sat", f"{claim.name}, {part}: a wrong constant is not found, {answer}"
    given, got, expected = numbers_of(query, answer.inputs)
    with np.errstate(all="ignore"):
        true = claim.reference(part, **given)
    assert list(map(bits, true)) == list(map(bits, expected)) != list(map(bits, got)), report(
        claim, part, query, answer.inputs
    )
    shown = ", ".join(f"{name} {text(value)}" for name, value in given.items())
    return f"{shown}: {', '.join(map(text, got))}, refops {', '.join(map(text, true))}"


def report(claim, part, query, inputs):
    """A counterexample in words."""
    if inputs is None:
        return ""
    given, got, expected = numbers_of(query, inputs)
    shown = ", ".join(f"{name}={text(value)}" for name, value in given.items())
    return f"{claim.name}, {part}: at {shown} it is {list(map(text, got))}, not {list(map(text, expected))}"


def bits(value):
    """An integer: floats by their bits, NaN as one."""
    value = np.asarray(value)
    if value.dtype.kind != "f":
        return int(value)
    return "NaN" if np.isnan(value) else int(value.view(f"u{value.itemsize}"))


def text(value):
    """A number as a reader wants it: floats with their bits, codes in hexadecimal."""
    value = np.asarray(value)
    if value.dtype.kind == "f":
        return f"{value[()]:.9g} (0x{int(value.view(f'u{value.itemsize}')):08x})"
    return str(bool(value)) if value.dtype == bool else f"0x{int(value):02x}"
