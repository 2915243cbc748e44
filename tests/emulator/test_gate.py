"""Every case of `tests/gpu` on the software GPU: the compiled kernels, through the whole launch path, bit for bit.

Each case runs twice: once in order; and once late and backwards, where work is deferred until somebody waits for it and
is then done in the opposite order where nothing orders it. `gate.both_ways` says what else the second run asks for.
"""

import gate
import pytest

from tiers import sampled

#: Targets on which every n-th case runs.
EVERY = {"sm_90": 1, "sm_100a": 4, "sm_80": 32, "sm_120a": 32}
CASES = gate.sample(every=1)
RUNS = [(target, *case) for target, every in EVERY.items() for case in CASES[::every]]
#: All of them run in each tier: they take a blink each, and a share of all runs had none of this part.
UNITS = [run for run in RUNS if run[1] == "units"]
OTHERS = [run for run in RUNS if run[1] != "units"]
NAMES = ("target", "part", "name", "function")


def ids_of(runs):
    return [f"{target} {part} {name}" for target, part, name, _ in runs]


@sampled(NAMES, OTHERS, 24, in_all=72, ids=ids_of(OTHERS))
def test_case(target, part, name, function):
    gate.both_ways(target, part, name, function)


@pytest.mark.parametrize(NAMES, UNITS, ids=ids_of(UNITS))
def test_unit(target, part, name, function):
    gate.both_ways(target, part, name, function)
