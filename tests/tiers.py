"""Which tests run when: `make check`, `make test` and `make test-all`; CONTRIBUTING.md says what belongs where.

A test marked `check` is in all three, an unmarked one in the last two, one marked `full` in the last alone.
"""

import pytest


def sampled(names, cases, every, **options):
    """`pytest.mark.parametrize(names, cases, **options)`; all but each `every`-th case are marked `full`."""
    one = isinstance(names, str) and "," not in names
    marked = [
        pytest.param(*((case,) if one else case), marks=[] if number % every == 0 else [pytest.mark.full])
        for number, case in enumerate(cases)
    ]
    return pytest.mark.parametrize(names, marked, **options)
