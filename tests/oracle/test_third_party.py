"""The oracle on what other implementations really wrote: stored arrays, and torch and torchao live where installed."""

import functools

import ml_dtypes
import numpy as np
import pytest
import third_party

import refops
from refops import oracle
from tiers import sampled

F = np.float32
MXFP8 = refops.MXFP8Scaling(refops.E4M3)


@functools.cache
def dumps_by_file():
    """Vector file -> its dumps."""
    files = {}
    for dump in third_party.dumps():
        files.setdefault(dump.file, []).append(dump)
    return files


# --- stored arrays --------------------------------------------------------------------------------


@pytest.mark.parametrize("file", sorted(dumps_by_file()))
def test_verdict(file):
    """Right where the other implementation follows TE, wrong where it is documented not to."""
    for dump in dumps_by_file()[file]:
        report = dump.check(diagnose=False)
        assert report.ok == (not dump.expected), f"{dump}\n{report}"


DIVERGING = sorted(f for f, dumps in dumps_by_file().items() if any(d.expected for d in dumps))


@sampled("file", DIVERGING, 6, in_all=2)
def test_the_documented_divergence_is_the_first_answer(file):
    for dump in dumps_by_file()[file]:
        if dump.expected:
            report = dump.check()
            assert third_party.answer(report) == " + ".join(sorted(dump.expected)), f"{dump}\n{report}"


def test_every_kind_of_output_is_there():
    """1053 dumps when this was written: codes and scales, activations, updates, dequantized values."""
    dumps = [dump for dumps in dumps_by_file().values() for dump in dumps]
    assert len(dumps) >= 1000
    assert {dump.op for dump in dumps} >= {"quantize", "dequantize", "update_delayed_scale", "dgelu", "swiglu", "dglu"}
    assert {type(dump.scaling) for dump in dumps} >= {
        refops.DelayedScaling,
        refops.CurrentScaling,
        refops.BlockScaling,
        refops.MXFP8Scaling,
        refops.NVFP4Scaling,
    }
    expected = {name for dump in dumps for name in dump.expected}
    assert expected >= {
        "scale-floor",
        "scale-even",
        "scale-ceil-ocp",
        "nan-scale-for-nonfinite",
        "one-level-nvfp4",
        "clamped-block-scale",
        "zero-block-scale",
        "zero-sign-lost",
        "no-saturation",
        "erf-gelu",
    }


# --- torchao live ---------------------------------------------------------------------------------


def test_torchao_rceil():
    """Its round-up rule: TE's on ordinary values; older releases take ceil(log2 amax / max) in float32.

    That logarithm is an integer for an amax one to a few ulp above a power of two times the maximum, one scale too low.
    """
    torch = pytest.importorskip("torch")
    mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", exc_type=ImportError)
    config = pytest.importorskip("torchao.prototype.mx_formats.config")
    rng = np.random.default_rng(0)
    blocks = rng.uniform(-1, 1, (64, 8, 32)).astype(F)
    ordinary = blocks * np.exp2(rng.uniform(-10, 10, (64, 8, 1))).astype(F)
    beside = (448 * np.exp2(rng.integers(-10, 5, (64, 8)))).astype(F)
    beside = (beside.view(np.int32) + rng.integers(-2, 3, beside.shape).astype(np.int32)).view(F)
    edges = blocks * beside[..., None]
    edges[:, :, 0] = beside
    for x, near_edge in ((ordinary, False), (edges, True)):
        x = np.ascontiguousarray(x.reshape(64, 256))
        scales, data = mx_tensor.to_mx(
            torch.from_numpy(x), torch.float8_e4m3fn, 32, config.ScaleCalculationMode("rceil")
        )
        outputs = {"data": data, "scale": scales.view(torch.uint8)}
        report = oracle.check("quantize", x, outputs, scaling=MXFP8)
        same = np.array_equal(refops.quantize(x, MXFP8).rowwise_scale_inv[:64, :8], scales.view(torch.uint8).numpy())
        assert report.ok == same
        if not near_edge:
            assert same
        elif not same:
            assert third_party.answer(report) == "scale-log2", str(report)


@pytest.mark.parametrize(
    ("rule", "name"), [("floor", "scale-floor"), ("even", "scale-even"), ("ceil", "scale-ceil-ocp")]
)
def test_torchao_scale_rules_are_named(rule, name):
    torch = pytest.importorskip("torch")
    mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", exc_type=ImportError)
    config = pytest.importorskip("torchao.prototype.mx_formats.config")
    x = torch.randn((64, 256), generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    scales, data = mx_tensor.to_mx(x, torch.float8_e4m3fn, 32, config.ScaleCalculationMode(rule))
    report = oracle.check("quantize", x, {"data": data, "scale": scales}, scaling=MXFP8)
    assert third_party.answer(report) == name, str(report)


# --- torch's CPU kernels live ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


def tensor(torch, dtype, seed=0, shape=(128, 256)):
    """Normal values, and where the dtype has 16 bits every one of them in the right order of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 3).to(getattr(torch, dtype))


def forward_and_gradient(torch, function, x):
    """(y, dy, dx) of a torch function."""
    x = x.clone().requires_grad_()
    y = function(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).to(x.dtype)
    y.backward(dy)
    return y, dy, x.grad


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ["silu", "gelu", "relu"])
def test_torch_activations_are_right(torch, name, dtype):
    """Other factorings of the same functions, within 4 ulp.

    Not beyond: far left, where the sigmoid is subnormal, torch's dsilu multiplies by dy first and loses bits; from
    |x| = 1.8e19 its dgelu is NaN, because it squares x first (TE's is from 5.6e19).
    """
    function = {
        "silu": torch.nn.functional.silu,
        "gelu": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
        "relu": torch.nn.functional.relu,
    }[name]
    x = tensor(torch, dtype)
    y, dy, dx = forward_and_gradient(torch, function, x)
    for report in (
        oracle.check(name, x, y, ulp=4),
        oracle.check(f"d{name}", {"dy": dy, "x": x}, dx, ulp=4),
    ):
        assert report.ok, str(report)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_torch_gelu_with_erf_is_named(torch, dtype):
    x = tensor(torch, dtype)
    y, dy, dx = forward_and_gradient(torch, torch.nn.functional.gelu, x)
    assert third_party.answer(oracle.check("gelu", x, y)) == "erf-gelu"
    assert third_party.answer(oracle.check("dgelu", {"dy": dy, "x": x}, dx)) == "erf-gelu"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_torch_glu_has_its_gate_first(torch, dtype):
    """torch multiplies the first half with the sigmoid of the second: TE's with halves exchanged, and named as that."""
    x = tensor(torch, dtype)
    y = torch.nn.functional.glu(x)
    exchanged = torch.cat([x[:, 128:], x[:, :128]], dim=1)
    assert oracle.check("glu", exchanged, y, ulp=4).ok
    report = oracle.check("glu", x, y)
    assert third_party.answer(report) == "gate-order", str(report)


def test_torch_glu_gradient_in_bfloat16_is_imprecise(torch):
    """Its CPU kernel evaluates the 16-bit gradient in 16 bits; float32 is right."""
    for dtype in ("float32", "bfloat16"):
        x = tensor(torch, dtype)
        _, dy, dx = forward_and_gradient(torch, torch.nn.functional.glu, x)
        exchanged, dx = (torch.cat([t[:, 128:], t[:, :128]], dim=1) for t in (x, dx))
        report = oracle.check("dglu", {"dy": dy, "x": exchanged}, dx, ulp=4)
        assert report.ok == (dtype == "float32"), str(report)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_torch_relu_propagates_nan(torch, dtype):
    """TE's fmaxf drops NaN; torch's relu keeps it."""
    x = tensor(torch, dtype)
    x[::7, ::5] = float("nan")
    report = oracle.check("relu", x, torch.nn.functional.relu(x))
    assert third_party.answer(report) == "nan-propagated", str(report)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_casts_and_sums(torch, dtype):
    """Casts within E4M3's range, scales composed of torch operations, and the order of torch's sum over rows."""
    x = tensor(torch, dtype, shape=(300, 256))
    wide = x.float()
    amax = wide.abs().amax()
    scale = torch.tensor(448.0) / amax
    outputs = {
        "data": (wide * scale).to(torch.float8_e4m3fn),
        "scale_inv": (torch.ones(()) / scale).reshape(1),
        "amax": amax.reshape(1),
        "dbias": wide.sum(0).to(x.dtype),
    }
    report = oracle.check("quantize", x, outputs, scaling=refops.CurrentScaling(refops.E4M3))
    assert report.ok, str(report)


def test_torch_scalar_division_is_a_reciprocal(torch):
    """number / tensor is reciprocal * number in torch: a scale one ulp off, and its codes with it."""
    x = tensor(torch, "float32", seed=3)
    outcomes = set()
    for factor in np.linspace(1, 2, 40):
        scaled = x * float(factor)
        inverse = (1.0 / (448.0 / scaled.abs().amax())).reshape(1)
        report = oracle.check("quantize", scaled, {"scale_inv": inverse}, scaling=refops.CurrentScaling(refops.E4M3))
        expected = refops.quantize(scaled.numpy(), refops.CurrentScaling(refops.E4M3)).rowwise_scale_inv
        assert report.ok == np.array_equal(inverse.numpy(), expected)
        outcomes.add(report.ok)
    assert outcomes == {True, False}


def test_ml_dtypes_does_not_saturate():
    """Its cast to E4M3 gives NaN beyond 464."""
    x = (np.random.default_rng(4).standard_normal((64, 128)) * 400).astype(F)
    with np.errstate(all="ignore"):
        codes = x.astype(ml_dtypes.float8_e4m3fn)
    report = oracle.check("quantize", x, {"data": codes}, scaling=refops.DelayedScaling(refops.E4M3))
    assert third_party.answer(report) == "no-saturation", str(report)
