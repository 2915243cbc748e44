"""Instructions are counted, not guessed: a loop of twice the rounds has twice as many."""

import sys

import numpy as np
import pytest
from instructions import _chain, instructions_of

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ptrace is Linux's")


def test_a_loop_has_as_many_instructions_as_rounds():
    one = np.uint64(1)
    _chain(1, one)  # compiled before it is counted
    try:
        few, many = (instructions_of(lambda rounds=rounds: _chain(rounds, one)) for rounds in (1000, 3000))
    except OSError as error:
        pytest.skip(f"{error}")
    assert 6 <= (many - few) / 2000 <= 10  # three shifts, three exclusive ors, a counter, and a move each at most
