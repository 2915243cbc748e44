"""Which tests run when: `make check`, `make test` and `make test-all`; CONTRIBUTING.md says what belongs where.

A test marked `check` is in all three, an unmarked one in the last two, one marked `full` in the last alone.
"""

import pytest


def sampled(names, cases, every, *, in_all=1, **options):
    """`pytest.mark.parametrize(names, cases, **options)`; all but each `every`-th case are marked `full`.

    Of these all but each `in_all`-th are marked `sweep` too: a command of their own runs them.
    """
    one = isinstance(names, str) and "," not in names

    def marks(number):
        if number % every == 0:
            return []
        return [pytest.mark.full] if number % in_all == 0 else [pytest.mark.full, pytest.mark.sweep]

    marked = [pytest.param(*((case,) if one else case), marks=marks(number)) for number, case in enumerate(cases)]
    return pytest.mark.parametrize(names, marked, **options)
