"""The modes of the software GPU: each changes what it may, and nothing else."""

import ml_dtypes
import numpy as np
import pytest
from ptx_kernels import TARGET, run
from small_formats import doubles

import refops
from cuda_kernels.emulator import emulated
from refops import oracle

F = np.float32
BF16 = ml_dtypes.bfloat16
SEEDS = (1, 2, 3)

# --- perturb: approximate units use up their bounds -------------------------------------------------


def places(count):
    """So many units in the last place of the nearest float32, and half a one for its own rounding."""
    return lambda exact: (count + 0.5) * np.spacing(np.abs(exact).astype(F)).astype(np.float64)


def relative(power):
    return lambda exact: 2.0**power * np.abs(exact)


def absolute(power):
    return lambda exact: np.full(exact.shape, 2.0**power)


RNG = np.random.default_rng(1)
ANY = (RNG.standard_normal(8192) * 3).astype(F)
POSITIVE = np.exp2(RNG.uniform(-20, 20, 8192)).astype(F)
NEAR_ONE = RNG.uniform(0.51, 1.99, 8192).astype(F)
IN_TURNS = RNG.uniform(-2 * np.pi, 2 * np.pi, 8192).astype(F)
#: instruction -> arguments, function, bound as the PTX ISA documents it
UNITS = {
    "ex2.approx": (ANY, np.exp2, places(2)),
    "ex2.approx.ftz": (ANY, np.exp2, places(2)),
    "rcp.approx": (ANY, lambda x: 1 / x, places(1)),
    "rcp.approx.ftz": (ANY, lambda x: 1 / x, places(1)),
    "rsqrt.approx": (POSITIVE, lambda x: x**-0.5, relative(-22.9)),
    "sqrt.approx": (POSITIVE, np.sqrt, relative(-23)),
    "lg2.approx": (POSITIVE[np.abs(np.log2(POSITIVE)) > 1], np.log2, relative(-22)),
    "lg2.approx near 1": (NEAR_ONE, np.log2, absolute(-22)),
    "sin.approx": (IN_TURNS, np.sin, absolute(-20.5)),
    "cos.approx": (IN_TURNS, np.cos, absolute(-20.5)),
    "sin.approx far": (IN_TURNS * 40, np.sin, absolute(-14.7)),
    "tanh.approx": (ANY, np.tanh, relative(-11)),
}
#: Shares of results that must differ from the nearest float32: a bound of 2^-23 leaves few others.
MOVED = {"sqrt.approx": 0.01, "rsqrt.approx": 0.05}


def of_unit(name, x, seed):
    """What an instruction makes of x."""
    instruction = name.split()[0]
    return run(f"mov.b32 %f1, %a; {instruction}.f32 %f9, %f1; mov.b32 %d, %f9;", a=x, perturb=seed).view(F)


@pytest.mark.parametrize("name", UNITS)
def test_approximate_units_err_within_their_bounds(name):
    x, function, bound = UNITS[name]
    exact = function(x.astype(np.float64))
    nearest = of_unit(name, x, 0)
    np.testing.assert_array_equal(nearest, exact.astype(F))
    for seed in SEEDS:
        found = of_unit(name, x, seed)
        error = np.abs(found - exact)
        assert np.all(error <= bound(exact))
        assert np.mean(found != nearest) >= MOVED.get(name, 0.2)
        assert np.max(error / bound(exact)) > 0.7  # and they do use them


@pytest.mark.parametrize("name", ["ex2.approx", "tanh.approx"])
def test_an_error_belongs_to_its_argument_and_to_the_seed(name):
    """The same argument errs in the same way everywhere in a run, as a unit does; another seed is another unit."""
    x = UNITS[name][0]
    order = np.random.default_rng(2).permutation(x.size)
    found = of_unit(name, x, 5)
    np.testing.assert_array_equal(of_unit(name, x[order], 5), found[order])
    assert np.mean(of_unit(name, x, 6) != found) > 0.2


def test_quotients_err_within_their_bounds():
    body = "mov.b32 %f1, %a; mov.b32 %f2, %b; div.approx.f32 %f9, %f1, %f2; mov.b32 %d, %f9;"
    divisor = np.roll(ANY, 1)
    exact = doubles(ANY) / doubles(divisor)
    for seed in SEEDS:
        found = run(body, a=ANY, b=divisor, perturb=seed).view(F)
        assert np.all(np.abs(found - exact) <= places(2)(exact))
        assert np.mean(found != exact.astype(F)) > 0.2


HALF_UNITS = {
    ("ex2.approx", "f16", np.float16): relative(-9.9),
    ("ex2.approx.ftz", "bf16", BF16): relative(-7),
    ("tanh.approx", "f16", np.float16): absolute(-10.987),
    ("tanh.approx", "bf16", BF16): absolute(-8),
}


@pytest.mark.parametrize("name, kind, dtype", HALF_UNITS)
def test_units_of_halves_err_within_their_bounds(name, kind, dtype):
    """All arguments from -8 to 8."""
    x = np.arange(65536, dtype=np.uint16).view(dtype)
    x = x[np.abs(doubles(x)) <= 8]
    exact = (np.exp2 if "ex2" in name else np.tanh)(doubles(x))
    body = f"cvt.u16.u32 %h1, %a; {name}.{kind} %h2, %h1; cvt.u32.u16 %d, %h2;"
    nearest = run(body, a=x.view(np.uint16)).astype(np.uint16).view(dtype)
    for seed in SEEDS:
        found = run(body, a=x.view(np.uint16), perturb=seed).astype(np.uint16).view(dtype)
        bound = HALF_UNITS[name, kind, dtype](exact)
        is_nearest = found.view(np.uint16) == nearest.view(np.uint16)
        assert np.all((np.abs(doubles(found) - exact) <= bound * (1 + 1e-12)) | is_nearest)
        assert np.mean(found != nearest) > 0.02


EXACT = {
    "add.f32 %f9, %f1, %f2": None,
    "fma.rn.f32 %f9, %f1, %f2, %f1": None,
    "div.rn.f32 %f9, %f1, %f2": None,
    "sqrt.rn.f32 %f9, %f1": None,
    "rcp.rn.f32 %f9, %f1": None,
    "cvt.rni.f32.f32 %f9, %f1": None,
}


@pytest.mark.parametrize("instruction", EXACT)
def test_instructions_that_round_stay_as_they_are(instruction):
    body = f"mov.b32 %f1, %a; mov.b32 %f2, %b; {instruction}; mov.b32 %d, %f9;"
    plain = run(body, a=ANY, b=POSITIVE)
    np.testing.assert_array_equal(run(body, a=ANY, b=POSITIVE, perturb=7), plain)


def test_results_that_the_isa_names_stay_as_they_are():
    x = np.array([0, -0.0, np.inf, -np.inf, np.nan], F)
    for name in ("ex2.approx", "rcp.approx", "tanh.approx", "sin.approx"):
        body = f"mov.b32 %f1, %a; {name}.f32 %f9, %f1; mov.b32 %d, %f9;"
        np.testing.assert_array_equal(run(body, a=x, perturb=9), run(body, a=x))


# --- contract: one rounding for a product and its sum -----------------------------------------------

SQUARE = "mov.f32 %f3, 0f3F800001; mul.f32 %f1, %f3, %f3;"  # (1 + 2^-23)^2, 2^-46 above the nearest float32
TO_ZERO = "sub.f32 %f9, %f1, 0f3F800002; mov.b32 %d, %f9;"
CONTRACTED = {
    "a product and a difference": f"{SQUARE} {TO_ZERO}",
    "the other way round": f"{SQUARE} sub.f32 %f9, 0f3F800002, %f1; neg.f32 %f9, %f9; mov.b32 %d, %f9;",
    "a sum": f"{SQUARE} add.f32 %f9, %f1, 0fBF800002; mov.b32 %d, %f9;",
    "ftz in both": f"{SQUARE} {TO_ZERO}".replace("mul.f32", "mul.ftz.f32").replace("sub.f32", "sub.ftz.f32"),
}
NOT_CONTRACTED = {
    "a rounding is named": f"{SQUARE} {TO_ZERO}".replace("mul.f32", "mul.rn.f32"),
    "a rounding of the sum is named": f"{SQUARE} {TO_ZERO}".replace("sub.f32", "sub.rn.f32"),
    "the product is used twice": f"{SQUARE} {TO_ZERO} add.f32 %f8, %f1, %f1;",
    "ftz in one": f"{SQUARE} {TO_ZERO}".replace("sub.f32", "sub.ftz.f32"),
    "a branch may come between": f"{SQUARE} setp.eq.u32 %p1, %t, 99; @%p1 bra X; X: {TO_ZERO}",
    "a factor changes between": f"{SQUARE} mov.f32 %f3, 0f40000000; {TO_ZERO}",
    "the product is saturated": f"{SQUARE} {TO_ZERO}".replace("mul.f32", "mul.sat.f32").replace(
        "0f3F800002", "0f3F800000"
    ),
}


@pytest.mark.parametrize("name", CONTRACTED)
def test_products_that_become_one_with_their_sum(name):
    body = CONTRACTED[name]
    assert run(body).view(F)[0] == 0
    assert run(body, contract=True).view(F)[0] == F(2.0**-46)


@pytest.mark.parametrize("name", NOT_CONTRACTED)
def test_products_that_do_not(name):
    body = NOT_CONTRACTED[name]
    assert run(body).view(F)[0] == 0
    assert run(body, contract=True).view(F)[0] == 0


# --- backward: the order of blocks and warps --------------------------------------------------------

TICKET = "atom.global.add.u32 %d, [%in], 1;"


@pytest.mark.parametrize("block", [32, 128])
def test_what_depends_on_the_order_shows(block):
    """Tickets from a counter: warps and blocks come in the other order, lanes in the same."""
    forward = run(TICKET, threads=128, a=[0], block=block)
    backward = run(TICKET, threads=128, a=[0], block=block, backward=True)
    np.testing.assert_array_equal(forward, np.arange(128))
    np.testing.assert_array_equal(backward.reshape(4, 32), np.arange(128).reshape(4, 32)[::-1])


def test_what_does_not_depend_on_the_order_stays():
    body = "st.shared.u32 [%ts], %t; bar.sync 0; xor.b32 %r1, %ts, 128; ld.shared.u32 %d, [%r1];"
    forward = run(body, threads=256, block=128)
    np.testing.assert_array_equal(run(body, threads=256, block=128, backward=True), forward)


# --- this project's activations on units that err ---------------------------------------------------

#: Places of float32 that the oracle has to allow exp and tanh: (nearest units, units at the ISA's bounds).
NEEDED = {"accurate": (2, 3), "fast": (3, 4)}
NAMES = ("silu", "gelu", "swiglu", "clamped_swiglu", "situglu", "qgelu")


def drawn(name):
    """(dy, x), float32, of the sizes on which approximate exponentials keep their bounds."""
    rng = np.random.default_rng(3)
    width = 2 if refops.ACTIVATIONS[name].gated else 1
    return tuple(np.clip(rng.standard_normal((32, 128 * n)) * 4, -60, 60).astype(F) for n in (1, width))


def reports(name, fast, allowed, seed):
    """What the oracle says of the activation and of its gradient."""
    import cuda_kernels

    dy, x = drawn(name)
    with emulated(target=TARGET, perturb=seed):
        y = cuda_kernels.activation(name, x, fast_math=fast)
        dx = cuda_kernels.activation_grad(name, dy, x, fast_math=fast)
    yield oracle.check(name, x, y, ulp=allowed)
    yield oracle.check(f"d{name}", {"dy": dy, "x": x}, {"dx": dx}, ulp=allowed)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", NEEDED)
@pytest.mark.parametrize("seed", (0, *SEEDS))
def test_activations_on_units_that_err(name, how, seed):
    for report in reports(name, how == "fast", NEEDED[how][seed > 0], seed):
        report.raise_for_mismatch()


def test_two_places_rest_on_better_units_than_the_isa_promises():
    """silu by accurate kernels: right at 2 with the nearest results, not with all that the ISA allows of its units."""
    for report in reports("silu", False, 2, 0):
        report.raise_for_mismatch()
    wrong = [report for seed in SEEDS for report in reports("silu", False, 2, seed) if not report.ok]
    assert wrong
