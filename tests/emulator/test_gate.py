"""Every case of `tests/gpu` on the software GPU: the compiled kernels, through the whole launch path, bit for bit.

Once as it comes; once late and backwards, where work is deferred until somebody waits for it and is then done in the
opposite order where nothing orders it. `gate.both_ways` says what else the second time asks for.
"""

import gate

from tiers import sampled

#: Targets on which every n-th case runs.
EVERY = {"sm_90": 1, "sm_100a": 4, "sm_80": 32, "sm_120a": 32}
CASES = gate.sample(every=1)
RUNS = [(target, *case) for target, every in EVERY.items() for case in CASES[::every]]


@sampled(
    ("target", "part", "name", "function"),
    RUNS,
    24,
    in_all=24,
    ids=[f"{target} {part} {name}" for target, part, name, _ in RUNS],
)
def test_case(target, part, name, function):
    gate.both_ways(target, part, name, function)
