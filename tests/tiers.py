"""Which tests run when: `make check`, `test`, `test-all` and `sweeps`; CONTRIBUTING.md says what belongs where.

A test marked `check` is in all four, an unmarked one in all but the first, one marked `full` in the last two, and one
marked `full` and `sweep` in the last alone.
"""

import pytest

#: Marks of what `make sweeps` alone runs.
SWEEP = (pytest.mark.full, pytest.mark.sweep)


def sampled(names, cases, every, *, in_all=10, **options):
    """Return `pytest.mark.parametrize(names, cases, **options)` with marks, so that a tier runs only some of the cases.

    Args:
        every: `make test` takes each `every`-th case, from the first on.
        in_all: `make test-all` also takes each `in_all`-th of the others, by its place among them.
    """
    one, others = isinstance(names, str) and "," not in names, 0
    marked = []
    for number, case in enumerate(cases):
        marks = ()
        if number % every:
            marks = SWEEP if others % in_all else pytest.mark.full
            others += 1
        marked.append(pytest.param(*((case,) if one else case), marks=marks))
    return pytest.mark.parametrize(names, marked, **options)
