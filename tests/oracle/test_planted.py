"""Faults of authors who do not know the conventions: all found, most named at the right place, hardly one misnamed."""

from collections import Counter
from functools import cache

import pytest
from planted import PLANTED
from planted.outcome import ACCEPTED, outcome

from tiers import SWEEP, sampled

#: Author -> the least share that is named, and at the right place.
LEAST = {"open": 0.85, "held": 0.6}
#: Faults whose first answer is a name that a judge calls wrong.
MISNAMED: set[tuple[str, str]] = set()


@cache
def judged(author, name):
    return outcome(author, name)


@sampled("fault", PLANTED, 31, in_all=12)
def test_found_and_not_misnamed(fault):
    result = judged(*fault)
    assert result.found
    misnamed = bool(result.answers) and not result.named
    assert misnamed == (fault in MISNAMED), result.sentence


def test_there_are_enough_of_them():
    count = Counter(author for author, _ in PLANTED)
    assert sum(count.values()) >= 150 and count["held"] >= 60 and set(count) == set(LEAST)
    assert {(author, name) for author in ACCEPTED for name in ACCEPTED[author]} == set(PLANTED)
    assert len({fault.write for fault in PLANTED.values()}) == len(PLANTED)


@pytest.mark.full
@pytest.mark.parametrize(
    ("author", "every"), [pytest.param(author, n, marks=SWEEP if n == 1 else ()) for author in LEAST for n in (4, 1)]
)
def test_most_are_named_at_the_right_place(author, every):
    results = [judged(*fault) for fault in [fault for fault in PLANTED if fault[0] == author][::every]]
    assert all(result.found for result in results)
    right = sum(result.named and result.placed for result in results)
    assert right >= LEAST[author] * len(results), f"{right} of {len(results)}"
