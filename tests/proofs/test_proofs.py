"""No input breaks a claim, in the eyes of two solvers; a wrong constant in it is found, and `refops` confirms where.

`make prove` runs all of it and prints the table; what is quick runs in `make test` too, if the solvers are there.
"""

import time

import numpy as np
import pytest

import refops
import tiers

pytest.importorskip("z3", reason="proofs need z3-solver: make prove")
pytest.importorskip("bitwuzla", reason="proofs need bitwuzla: make prove")

import claims_of_casts
import claims_of_instructions
import claims_of_places
import claims_of_reciprocals
import claims_of_scales
from claims_of_reciprocals import ENUMERATED, PLACES, WRONG, wrong_results
from solvers import ask, bitwuzla_says, numbers_of, z3_says

PARTS = (claims_of_casts, claims_of_scales, claims_of_places, claims_of_instructions, claims_of_reciprocals)
CLAIMS = [claim for part in PARTS for claim in part.CLAIMS]
BROKEN = [claim for part in PARTS for claim in getattr(part, "BROKEN", ())]
CASES = [pytest.param(claim, id=claim.name, marks=() if claim.quick else tiers.SWEEP) for claim in CLAIMS]


@pytest.mark.parametrize("claim", CASES)
def test_no_input_breaks_the_claim(claim, record_property):
    seconds, others, example = 0.0, 0.0, ""
    for part, query in claim.queries.items():
        asked = query(False)
        first, second = ask(z3_says, asked), ask(bitwuzla_says, asked)
        assert "sat" not in (first.says, second.says), report(claim, part, asked, first.inputs or second.inputs)
        assert (first.says, second.says) == ("unsat", "unsat"), f"{claim.name}, {part}: z3 {first}, bitwuzla {second}"
        seconds, others = seconds + first.seconds, others + second.seconds
        example = example or a_wrong_constant_shows(claim, part, query(True))
    row = (claim.name, claim.domain, len(claim.queries), f"{seconds:.1f}", f"{others:.1f}", example)
    record_property("proof", row)


def a_wrong_constant_shows(claim, part, query):
    """Assert that a query with a wrong constant has a counterexample that `refops` confirms, and return it in words."""
    answer = ask(bitwuzla_says, query)
    assert answer.says == "sat", f"{claim.name}, {part}: a wrong constant is not found, {answer}"
    return confirmed(claim, part, query, answer.inputs)


def confirmed(claim, part, query, inputs):
    """A counterexample in words, of which the reference gives what was expected and not what was got."""
    given, got, expected = numbers_of(query, inputs)
    with np.errstate(all="ignore"):
        true = claim.reference(part, **given)
    ok = list(map(bits, true)) == list(map(bits, expected)) != list(map(bits, got))
    assert ok, report(claim, part, query, inputs)
    which = next(k for k in range(len(got)) if bits(got[k]) != bits(true[k]))
    shown = ", ".join(f"{name} {text(value)}" for name, value in list(given.items())[:3])
    return f"{shown}{', ...' * (len(given) > 3)}: {text(got[which])}, refops {text(true[which])}"


@pytest.mark.parametrize("case", ENUMERATED, ids=[case.name for case in ENUMERATED])
@pytest.mark.full
@pytest.mark.sweep
def test_no_mantissa_and_no_seed_breaks_a_reciprocal(case, record_property):
    began = time.process_time()
    for places in PLACES:
        wrong = wrong_results(case, places)
        assert not len(wrong), f"seed {places} off: {len(wrong)} wrong, the first at {text(wrong[0])}"
    seconds = time.process_time() - began
    found = wrong_results(case, 0, WRONG)
    assert len(found)
    domain = "every mantissa, every seed within 1 ulp"
    example = f"{len(found)} of {len(case.numbers())}, the first at {text(found[0])}"
    record_property("proof", (f"{case.name} = 1 / x", domain, f"enumerated, {seconds:.1f} s", "-", "-", example))


def test_refops_moves_each_scale_to_its_place():
    """`swizzle` reshapes and transposes: what it does in three tiles by three it does in any number."""
    for rows in (128, 256, 384):
        for columns in (4, 8, 12):
            numbers = np.arange(rows * columns).reshape(rows, columns)
            found = np.empty(rows * columns, int)
            found[refops.swizzle(numbers).ravel()] = numbers.ravel()  # where each number stands
            i, j = np.indices((rows, columns))
            np.testing.assert_array_equal(found.reshape(rows, columns), claims_of_places.published_place(i, j, columns))
            np.testing.assert_array_equal(refops.unswizzle(refops.swizzle(numbers)), numbers)


@pytest.mark.parametrize("claim", BROKEN, ids=[f"{claim.name}, {claim.domain}" for claim in BROKEN])
def test_where_a_claim_ends(claim):
    """Limits that docs/guide/proofs.md states: where one is mended, the claim belongs to those that hold."""
    ((part, query),) = claim.queries.items()
    asked = query(False)
    answer = ask(bitwuzla_says, asked)
    assert answer.says == "sat"
    given, got, expected = numbers_of(asked, answer.inputs)
    with np.errstate(all="ignore"):
        (true,) = claim.reference(part, **given)
    assert bits(got[0]) != bits(expected[0]) and bits(true) in (bits(got[0]), bits(expected[0]))


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
