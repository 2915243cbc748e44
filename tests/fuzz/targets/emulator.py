"""Targets of the software GPU: calls on NumPy arrays beside `refops`, a kernel on arrays of any size beside NumPy."""

import os

import numpy as np
from arguments_fuzz import SCALINGS, contents, plain, wrong
from harness import require, target
from judge import agree

from arrays import same_bits

if os.environ.get("NUMBA_ENABLE_CUDASIM") != "1":  # before another target's imports look for a driver
    from cuda_kernels.emulator import load

    load()

NEEDS = ("cuda_kernels.gpu", "cuda_kernels.emulator")
F = np.float32
TARGETS = ("sm_90", "sm_80", "sm_100a", "sm_120a")
#: y[i] = factor x[i] for the first n elements.
SCALED = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry scaled(.param .u64 x, .param .u64 y, .param .f32 factor, .param .u32 n)
{
    .reg .pred %p; .reg .b32 %r<5>; .reg .f32 %f<3>; .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [y]; ld.param.f32 %f1, [factor]; ld.param.u32 %r1, [n];
    mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x;
    mad.lo.u32 %r2, %r2, %r3, %r4;
    setp.ge.u32 %p, %r2, %r1;
    @%p ret;
    mul.wide.u32 %rd3, %r2, 4;
    add.u64 %rd1, %rd1, %rd3; add.u64 %rd2, %rd2, %rd3;
    ld.global.f32 %f2, [%rd1];
    mul.rn.f32 %f2, %f2, %f1;
    st.global.f32 [%rd2], %f2;
    ret;
}
"""
STATE = ("counters", "fault", "pending", "unordered", "forget", "reset")


@target("emulated", ["cuda_kernels.emulated"], cases=40, seconds=180, needs=NEEDS)
def emulated(case):
    """quantize gives the bits of the reference on every target, however the devices behave."""
    behaviour = {name: case.chance(0.3) for name in ("deferred", "backward", "contract", "uninitialised")}
    x = contents(case, (case.choose([1, 16, 32]), case.choose([16, 32, 64])), F)
    scaling = case.draw(SCALINGS)
    with case.call("cuda_kernels.emulated", case.choose(TARGETS), **behaviour):
        expected, got = agree(case, "refops.quantize", "cuda_kernels.quantize", (x, scaling), {})
    if getattr(scaling, "rht", False):  # whose sums a GPU makes in another order
        return
    for name, array in got.arrays.items():
        require(same_bits(array, getattr(expected, name)), f"another {name}", array, getattr(expected, name))


@target("own kernel", ["cuda_kernels.emulator.run", "cuda_kernels.emulator.Unwritten"], cases=150, needs=NEEDS)
def own_kernel(case):
    """What it writes is NumPy's product; what it may not do is a fault that leaves the device working."""
    from cuda_kernels.emulator import DeviceError

    size, n = int(case.rng.integers(1, 300)), int(case.rng.integers(0, 300))
    x, factor = plain(contents(case, (size,), F)), float(case.rng.integers(-8, 9)) / 4
    grid, block = case.choose([0, 1, 2, 3, (2, 1, 1), (1,)]), case.choose([1, 32, 128, 1024, 1025, "many"])
    out = case.call("cuda_kernels.emulator.Unwritten", (size,), F)
    given = wrong(case) if case.chance(0.05) else factor
    arguments = [x, out, given, n]
    options = {"target": case.choose(TARGETS), "documented": (ValueError, TypeError, DeviceError), "says": ""}
    ran = case.call("cuda_kernels.emulator.run", SCALED, "scaled", grid, block, arguments, **options)
    blocks = grid if isinstance(grid, int) else int(np.prod(grid))
    done = min(n, blocks * block)
    if given is not factor:  # something that may be a number
        return
    require(done <= size, "a write behind the end was not seen", done, size)
    with np.errstate(all="ignore"):
        expected = x[:done] * F(factor)
    wrong_places = (ran.arrays[1][:done] != expected) & ~(np.isnan(expected) & np.isnan(ran.arrays[1][:done]))
    require(not wrong_places.any(), "another product", x, factor)
    require(ran.counters.launches == 1, "launches counted", ran.counters.launches)


@target(
    "devices",
    ["cuda_kernels.emulator.Settings", "cuda_kernels.emulator.device_for", "cuda_kernels.emulator.behaviour"]
    + [f"cuda_kernels.emulator.{name}" for name in STATE],
    cases=60,
    needs=NEEDS,
)
def devices(case):
    """Settings are taken or refused by name; the state can be asked for and forgotten at any time."""
    values = {"deferred": True, "backward": False, "contract": True, "perturb": 3, "uninitialised": True, "longest": 9}
    values["targets"] = ("sm_90", "sm_100a")
    name = case.choose(list(values))
    case.attempt("cuda_kernels.emulator.Settings", **{name: wrong(case) if case.chance(0.5) else values[name]})
    number = case.call("cuda_kernels.emulator.device_for", case.choose([*TARGETS, "sm_13"]))
    require(0 <= number < len(TARGETS), "a number of a device", number)
    if name not in ("targets", "longest"):
        before = case.call("cuda_kernels.emulator.behaviour", **{name: values[name]})
        after = case.call("cuda_kernels.emulator.behaviour", **{name: getattr(before, name)})
        require(getattr(after, name) == values[name], "the behaviour that was set", name)
    for asked in STATE:
        case.call(f"cuda_kernels.emulator.{asked}")
    require(case.call("cuda_kernels.emulator.fault") == "", "no fault after reset")
