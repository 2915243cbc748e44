"""Use activations that were declared a moment ago, everywhere: `python use_activation.py CHECK`.

`tests/test_cost_of_change.py` runs each check in a copy of this repository that has `mish.py` and `leaky_relu.py` in
refops/activations, in a process of its own. Nothing here edits the copy.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import refops
from refops import oracle
from refops.activations import bind_activation

ROOT = Path(refops.__file__).resolve().parents[1]
F = np.float32
#: The latter two have a parameter of a name that is new.
NAMES = ("mish", "mishglu", "leaky_relu", "leaky_reglu")
PARAMETERS = {name: {"negative_slope": 0.3} for name in NAMES if name.startswith("leaky")}
MXFP8 = refops.MXFP8Scaling(refops.E4M3)


def inputs(name, shape=(32, 64)):
    """(x, dy) in bfloat16, x twice as wide for gated activations."""
    import ml_dtypes

    rng = np.random.default_rng(7)
    wide = (shape[0], shape[1] * (1 + refops.ACTIVATIONS[name].gated))
    return [(rng.standard_t(3, size) * 3).astype(ml_dtypes.bfloat16) for size in (wide, shape)]


def judge(library, name):
    """The oracle accepts value, gradient and the quantized value of a library, with default and other parameters."""
    x, dy = inputs(name)
    for p in ({}, PARAMETERS[name]) if name in PARAMETERS else ({},):
        oracle.check(name, x, library.activation(name, x, **p), params=p).raise_for_mismatch()
        dx = library.activation_grad(name, dy, x, **p)
        oracle.check(f"d{name}", {"x": x, "dy": dy}, dx, params=p).raise_for_mismatch()
        q = library.activation_quantize(name, x, MXFP8, columnwise=True, **p)
        oracle.check(name, x, q, scaling=MXFP8, params=p).raise_for_mismatch()


def command(*arguments):
    """What a command of this repository prints; it must exit with 0."""
    done = subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def truth():
    """float64 against the textbook form in mpmath, 1e-13; slope too, but relative to 1 near its root."""
    import mpmath as mp

    bound = bind_activation("mish", {})
    x = np.concatenate([np.linspace(-95, 95, 191), np.linspace(-3, 3, 121)]).astype(F).astype(np.float64)
    value, slope = bound.value(x, true=True), bound.derivative(x, true=True)
    with mp.workdps(60):

        def mish(v):
            return v * mp.tanh(mp.log1p(mp.exp(v)))

        for v, ours, our_slope in zip(x, value, slope, strict=True):
            exact, steepness = mish(mp.mpf(v)), mp.diff(mish, mp.mpf(v))
            assert abs(ours - exact) <= 1e-13 * abs(exact), v
            assert abs(our_slope - steepness) <= 1e-13 * max(abs(steepness), 0.05 * (abs(v + 1.19) < 0.5)), v


def reference():
    """float32 within the oracle's interval of the truth, as an array of its own."""
    for name in NAMES:
        judge(refops, name)


def host():
    """Compiled for this CPU."""
    import cuda_kernels.host

    for name in NAMES:
        judge(cuda_kernels.host, name)


def simulator():
    """The kernels as Python: NUMBA_ENABLE_CUDASIM=1."""
    import cuda_kernels

    for name in NAMES:
        judge(cuda_kernels, name)


def software_gpu():
    """The compiled kernels, executed."""
    import cuda_kernels

    for fast_math in (False, True):
        for name in NAMES:
            x, _ = inputs(name)
            with cuda_kernels.emulated("sm_90"):
                y = cuda_kernels.activation(name, x, fast_math=fast_math)
                q = cuda_kernels.activation_quantize(name, x, MXFP8, fast_math=fast_math)
            oracle.check(name, x, y, ulp=8 if fast_math else 2).raise_for_mismatch()
            oracle.check(name, x, q, scaling=MXFP8, ulp=8 if fast_math else 2).raise_for_mismatch()


def compiled():
    """PTX for sm_90 without float64 and spills, within the budget that was measured a moment ago."""
    from cuda_kernels import catalogue, compile_report

    for name in (*NAMES, *(f"d{name}" for name in NAMES)):
        (entry,) = [entry for entry in catalogue.catalogue() if entry.name == f"{name} bf16 -> MXFP8"]
        measured = compile_report.compile_entry(entry, (9, 0), False)
        assert compile_report.budget_of(entry, (9, 0), False) >= measured.instr_per_byte > 0
        assert compile_report.problems(measured, entry) == []


def judged_and_named():
    """Wrong kernels are rejected, and what they do is named."""
    x, dy = inputs("mishglu")
    for name, wrong, finding in (
        ("mish", refops.activation("silu", x), "other-activation: The kernel computes silu, not mish."),
        ("mishglu", refops.activation("swiglu", x), "other-activation: The kernel computes swiglu, not mishglu."),
        ("mishglu", refops.activation("mishglu", np.roll(x, 64, axis=1)), "gate-order"),
    ):
        report = oracle.check(name, x, wrong)
        assert not report.ok and finding in str(report), report
    plain = refops.activation_grad("mishglu", np.ones_like(dy), x)
    report = oracle.check("dmishglu", {"x": x, "dy": dy}, plain)
    assert not report.ok and "upstream-gradient-missing" in str(report), report
    values = bind_activation("mish", {}).value(x.astype(F))
    report = oracle.check("mish", x, (values * F(1.01)).astype(x.dtype))
    assert not report.ok


def commands():
    """golden, check, inspect and explain of the command line."""
    with tempfile.TemporaryDirectory() as folder:
        command("refops", "golden", "--op", "mishglu", "--scaling", "mxfp8", "--shape", "32x128", "--out", folder)
        assert any("mishglu" in path.name for path in Path(folder).iterdir())
        x, y = Path(folder) / "x.npy", Path(folder) / "y.npy"
        values = inputs("mishglu")[0].astype(F)
        np.save(x, values)
        np.save(y, refops.activation("mishglu", values))
        assert "RIGHT" in command("refops", "check", "--op", "mishglu", "--input", str(x), "--output", f"y={y}")
        command("refops", "inspect", str(y))
        command("refops", "explain", str(y), "--scaling", "mxfp8")


def fuser():
    """The operation, its gradient, and the functions by name."""
    import torch

    import fuser
    from fuser import functional, ops

    x = torch.randn(16, 64, dtype=torch.bfloat16, requires_grad=True)
    for name, operation in (("mish", ops.Mish()), ("mishglu", ops.MishGLU())):
        y = operation(x)
        assert torch.equal(y, getattr(functional, name)(x.detach()))
        dy = torch.randn_like(y)
        (dx,) = torch.autograd.grad(y, x, dy)
        assert torch.equal(dx, getattr(functional, f"d{name}")(dy, x.detach()))
    torch.testing.assert_close(ops.Mish()(x), torch.nn.functional.mish(x), rtol=2**-7, atol=2**-9)
    y = ops.LeakyReLU(negative_slope=0.3)(x)
    assert torch.equal(y, torch.nn.functional.leaky_relu(x, 0.3))
    assert torch.equal(y, functional.leaky_relu(x.detach(), negative_slope=0.3))
    assert "Mish" in ops.__all__ and fuser.ops is ops


def jax():
    """TE's JAX interface under the names that follow from the declaration."""
    import jax.numpy as jnp

    from fuser import xla
    from fuser.xla.settings import ACTIVATION_NAMES

    x = inputs("mish")[0]
    for kind, name in ((("mish",), "mish"), (("mish", "linear"), "mishglu")):
        assert ACTIVATION_NAMES[xla.ActivationEnum[kind]] == name
        halves = jnp.asarray(x).reshape(32, len(kind), -1)
        y = np.asarray(xla.activation(halves, kind))
        assert np.array_equal(y.astype(F), refops.activation(name, x).astype(F)), name


def documents():
    """The guide's row and the fuser's, as `python docs/generate.py --write` wrote them."""
    assert "| `mishglu` | mish(act) gate |" in (ROOT / "docs" / "guide" / "activations.md").read_text(encoding="utf-8")
    assert "`MishGLU`" in (ROOT / "fuser" / "README.md").read_text(encoding="utf-8")
    measured = json.loads((ROOT / "tests" / "measured" / "activations.json").read_text(encoding="utf-8"))
    assert all({"mish", "mish.slope"} & set(rows) for rows in measured.values())


CHECKS = {
    check.__name__: check
    for check in (
        truth,
        reference,
        host,
        simulator,
        software_gpu,
        compiled,
        judged_and_named,
        commands,
        fuser,
        jax,
        documents,
    )
}

if __name__ == "__main__":
    CHECKS[sys.argv[1]]()
