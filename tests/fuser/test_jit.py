"""`fuser.jit`: formulas against float64, when and whether functions are compiled, what happens when they cannot be."""

import inspect
import os
import subprocess
import sys
import warnings

import pytest
import torch
from one_rounding import DTYPES, assert_one_rounding

from fuser import jit
from refops.activations import Function, bind_activation

NAMES = ("gelu", "silu", "relu", "qgelu", "srelu")


@pytest.fixture
def eager():
    with jit.compilation(False):
        yield


@pytest.fixture
def compiles(monkeypatch):
    """A list of the functions that torch.compile was asked for; "compiled" ones run as they are."""
    asked = []

    def compile(function):
        asked.append(function.__name__)
        return function

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.delenv(jit.VARIABLE, raising=False)
    return asked


def random(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * 3).to(dtype)


# --- formulas -------------------------------------------------------------------------------------------


def value_and_slope(name, x):
    """The float64 activation and its derivative, by `refops`, whose float64 has other words than torch."""
    bound, x = bind_activation(name, {}), x.detach().double().numpy()
    return torch.from_numpy(bound.truth(x)), torch.from_numpy(bound.truth_grad(1.0, x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_activations_against_float64(eager, name, dtype):
    x, bias, dy = random(64, 32, dtype=dtype), random(32, dtype=dtype, seed=1), random(64, 32, dtype=dtype, seed=2)
    value, slope = value_and_slope(name, x)
    size = 1 + x.double().abs() ** (2 if name == "srelu" else 1)
    assert_one_rounding(getattr(jit, f"{name}_fused_")(x), value, size)
    assert_one_rounding(getattr(jit, f"d{name}_fused_")(dy, x), slope * dy.double(), size * dy.double().abs())
    shifted = x.double() + bias.double()
    value, slope = value_and_slope(name, shifted)
    size = 1 + (x.double().abs() + bias.double().abs()) ** (2 if name == "srelu" else 1)
    assert_one_rounding(getattr(jit, f"bias_{name}_fused_")(x, bias), value, size)
    sums, gradient = getattr(jit, f"bgrad_d{name}_fused_")(dy, x, bias)
    # A bias adds a rounding before the activation, whose slope is steep where relu's has its step.
    away = shifted.abs() > 1e-4
    wanted = slope * dy.double()
    assert_one_rounding(gradient[away], wanted[away], (4 * size * dy.double().abs())[away])
    assert sums.shape == bias.shape and sums.dtype == dtype
    assert_one_rounding(sums, wanted.sum(0), (4 * size * dy.double().abs()).sum(0))


@pytest.mark.parametrize("name", NAMES)
def test_without_a_bias(eager, name):
    x, dy = random(8, 16), random(8, 16, seed=1)
    forward, backward = getattr(jit, f"bias_{name}_fused"), getattr(jit, f"bgrad_d{name}_fused")
    for bias in (None, torch.empty(0)):
        assert torch.equal(forward(x, bias), getattr(jit, f"{name}_fused_")(x))
        sums, gradient = backward(dy, x, bias)
        assert sums is None and torch.equal(gradient, getattr(jit, f"d{name}_fused_")(dy, x))
    bias = random(16, seed=2)
    assert torch.equal(forward(x, bias), getattr(jit, f"bias_{name}_fused_")(x, bias))
    for a, b in zip(backward(dy, x, bias), getattr(jit, f"bgrad_d{name}_fused_")(dy, x, bias), strict=True):
        assert torch.equal(a, b)


def test_bias_gradients_have_the_shape_of_the_bias(eager):
    """TE sums over the first dimension alone, which is no bias gradient for a 3-D input."""
    x, dy, bias = random(4, 6, 8), random(4, 6, 8, seed=1), random(8, seed=2)
    sums, gradient = jit.bgrad_dgelu_fused_(dy, x, bias)
    assert sums.shape == (8,) and gradient.shape == x.shape
    torch.testing.assert_close(sums, gradient.sum((0, 1)), rtol=1e-6, atol=1e-5)


def test_sums_are_of_unrounded_values(eager):
    """Each gradient is 1 + 2^-8 - 2^-15, in bfloat16 1; 257 of them are nearest to 258, 257 ones to 256."""
    x = torch.full((257, 1), 0.5 * (1 + 2**-7), dtype=torch.bfloat16)
    dy = torch.full((257, 1), 1 - 2**-8, dtype=torch.bfloat16)
    sums, gradient = jit.bgrad_dsrelu_fused_(dy, x, torch.zeros(1, dtype=torch.bfloat16))
    assert (gradient == 1).all() and sums.item() == 258


@pytest.mark.parametrize("name", NAMES)
def test_autograd(eager, name):
    """Gradients by autograd are those of the backward functions."""
    x, bias, dy = random(16, 8).requires_grad_(), random(8, seed=1).requires_grad_(), random(16, 8, seed=2)
    getattr(jit, f"bias_{name}_fused")(x, bias).backward(dy)
    sums, gradient = getattr(jit, f"bgrad_d{name}_fused")(dy, x.detach(), bias.detach())
    torch.testing.assert_close(x.grad, gradient, rtol=2e-6, atol=2e-5)
    torch.testing.assert_close(bias.grad, sums, rtol=2e-6, atol=1e-4)


def test_float64_stays_float64(eager):
    x, bias = random(4, 8).double().requires_grad_(), random(8).double().requires_grad_()
    assert torch.autograd.gradcheck(jit.bias_gelu_fused, (x, bias))
    assert torch.autograd.gradcheck(lambda t: jit.l2normalization_fused(t, 1e-6), (x,))


def test_relu_of_nan_is_zero(eager):
    x = torch.tensor([float("nan"), -0.0, 1.0])
    for name in ("relu", "srelu"):
        y = getattr(jit, f"{name}_fused_")(x)
        assert y.tolist() == [0, 0, 1] and not torch.signbit(y).any()
        assert getattr(jit, f"d{name}_fused_")(torch.ones(3), x)[0] == 0


def test_wrappers_disable_autocast(eager):
    seen = []

    def value(x, p):
        seen.append(torch.is_autocast_enabled("cpu"))
        return x

    functions = jit._family("probe", Function("probe", lambda words: (value, value)))
    with torch.autocast("cpu", torch.bfloat16):
        functions["bias_probe_fused"](torch.ones(2, 2), torch.ones(2))
        functions["bgrad_dprobe_fused"](torch.ones(2, 2), torch.ones(2, 2), None)
        functions["probe_fused_"](torch.ones(2, 2))
    assert seen == [False, False, True]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_l2_normalization(eager, dtype):
    eps = 1e-5
    x, dy = random(32, 48, dtype=dtype) * 100, random(32, 48, dtype=dtype, seed=1)
    wide = x.double().requires_grad_()
    norm = (wide.square().sum(-1, keepdim=True) + eps).rsqrt()
    y = wide * norm
    y.backward(dy.double())
    assert_one_rounding(jit.l2normalization_fused(x, eps), y.detach(), y.detach().abs())
    result, rsqrt_norm = jit.l2normalization_fwd_fused(x, eps)
    assert_one_rounding(result, y.detach(), y.detach().abs())
    assert rsqrt_norm.dtype == torch.float32 and rsqrt_norm.shape == (32, 1)
    torch.testing.assert_close(rsqrt_norm.double(), norm.detach(), rtol=1e-6, atol=0)
    dx = jit.l2normalization_backward_fused(dy, x, rsqrt_norm, eps)
    size = norm.detach() * (dy.double().abs() + y.detach().abs() * (y.detach() * dy.double()).abs().sum(-1, True))
    assert_one_rounding(dx, wide.grad, size)
    x32 = x.float().requires_grad_()
    jit.l2normalization_fused(x32, eps).backward(dy.float())
    torch.testing.assert_close(x32.grad.double(), wide.grad, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bias_dropout_add(eager, dtype):
    x, bias, residual = (
        random(64, 64, dtype=dtype),
        random(64, dtype=dtype, seed=1),
        random(64, 64, dtype=dtype, seed=2),
    )
    wanted = residual.double() + x.double() + bias.double()
    size = residual.double().abs() + x.double().abs() + bias.double().abs()
    for inference in (
        jit.get_bias_dropout_add(False),
        jit.bias_dropout_add_fused_inference_,
        jit.bias_dropout_add_fused_inference,
        lambda *args: jit.bias_dropout_add(*args, training=False),
    ):
        assert_one_rounding(inference(x, bias, residual, 0.5), wanted, size)
    for training in (
        jit.get_bias_dropout_add(True),
        jit.bias_dropout_add_fused_train_,
        jit.bias_dropout_add_fused_train,
    ):
        assert torch.equal(training(x, bias, residual, 1.0), residual)
        torch.manual_seed(0)
        y = training(x, bias, residual, 0.25)
        kept = y != residual
        assert abs(kept.double().mean() - 0.75) < 0.04
        shifted = (x.double() + bias.double()) / 0.75
        assert_one_rounding(y[kept], (residual.double() + shifted)[kept], (size / 0.75)[kept])
        torch.manual_seed(0)
        assert torch.equal(training(x, bias, residual, 0.25), y)
    assert torch.equal(jit.bias_dropout_add(x, None, residual, 0.5, False), (x.float() + residual.float()).to(dtype))
    with torch.no_grad():
        y = jit.bias_dropout_add_fused_train(x.clone().requires_grad_(), bias, residual, 0.1)
    assert y.requires_grad


# --- when functions are compiled ------------------------------------------------------------------------


def test_the_call_decides(compiles, monkeypatch):
    @jit.jit_fuser
    def double(x):
        """Twice."""
        return x * 2

    assert double.__name__ == "double" and double.__doc__ == "Twice." and compiles == []
    x = torch.ones(2)
    monkeypatch.setenv(jit.VARIABLE, "0")
    assert torch.equal(double(x), x * 2) and compiles == [] and not jit.compilation_enabled()
    with jit.compilation(True):
        assert jit.compilation_enabled()
        with jit.compilation(False):
            double(x)
        assert compiles == []
        double(x)
    assert compiles == ["double"]
    monkeypatch.delenv(jit.VARIABLE)
    assert torch.equal(double(x), x * 2) and compiles == ["double"]  # once
    monkeypatch.setenv(jit.VARIABLE, "yes")
    with pytest.raises(ValueError, match="NVTE_TORCH_COMPILE must be 0 or 1; got 'yes'"):
        double(x)
    with pytest.raises(TypeError, match="enabled must be True or False; got 1"), jit.compilation(1):
        pass


def test_lazy_compile_asks_nobody(compiles):
    double = jit.lazy_compile(lambda x: x * 2)
    with jit.compilation(False):
        double(torch.ones(2))
    assert compiles == ["<lambda>"]
    assert jit.set_jit_fusion_options() is None


def test_importing_starts_nothing():
    code = """
import os, sys, threading
import torch
before = threading.active_count(), set(sys.modules)
import fuser.jit
assert threading.active_count() == before[0]
loaded = {name for name in set(sys.modules) - before[1] if name.startswith(("torch._inductor", "torch._dynamo"))}
assert not loaded, loaded
children = open(f"/proc/self/task/{os.getpid()}/children").read() if sys.platform == "linux" else ""
assert children == "", children
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=subprocess_environment())


def subprocess_environment(**changes):
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **changes}


def test_a_failed_compile_warns_once_and_is_eager(monkeypatch):
    calls = []

    def compile(function):
        def fail(*args):
            calls.append(function.__name__)
            raise RuntimeError("the compiler is on holiday\nuntil May")

        return fail

    monkeypatch.setattr(torch, "compile", compile)
    double, triple = jit.lazy_compile(lambda x: x * 2), jit.jit_fuser(scaled)
    with pytest.warns(RuntimeWarning) as seen:
        assert torch.equal(triple(torch.ones(2)), torch.full((2,), 3.0))
    assert [str(w.message) for w in seen] == [
        "torch.compile failed for scaled, which runs eagerly from now on: RuntimeError: the compiler is on holiday"
    ]
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(triple(torch.ones(2)), torch.full((2,), 3.0))
    assert calls == ["scaled"]
    with pytest.warns(RuntimeWarning, match="<lambda>"):
        double(torch.ones(2))


def scaled(x):
    return x * 3


def test_the_caller_s_mistakes_are_the_caller_s(monkeypatch):
    """What fails eagerly too is no failure of the compiler: the plain error comes, and the function stays compiled."""
    ran = []

    def compile(function):
        def run(*args):
            ran.append(1)
            return function(*args)

        return run

    monkeypatch.setattr(torch, "compile", compile)
    add = jit.lazy_compile(lambda a, b: a + b)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="must match the size"):
            add(torch.ones(2), torch.ones(3))
        assert torch.equal(add(torch.ones(2), torch.ones(2)), torch.full((2,), 2.0))
    assert len(ran) == 2


@pytest.mark.full
@pytest.mark.parametrize("cause", ["PATH", pytest.param("CXX", marks=pytest.mark.sweep)])
def test_without_a_cpp_compiler(tmp_path, cause):
    """One warning for all functions, and right results; with an empty PATH, or with CXX naming nothing."""
    code = """
import warnings, torch
from fuser import jit
x, bias = torch.randn(4, 8), torch.randn(8)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    y, z = jit.bias_gelu_fused_(x, bias), jit.l2normalization_fused_(x, 1e-6)
    jit.bias_gelu_fused_(x, bias)
ours = [str(w.message) for w in seen if w.category is RuntimeWarning]
assert len(ours) == 1, ours
assert ours[0].startswith("torch.compile needs a C++ compiler for bias_gelu_fused_ on cpu, and there is none"), ours
with jit.compilation(False):
    assert torch.equal(y, jit.bias_gelu_fused_(x, bias)) and torch.equal(z, jit.l2normalization_fused_(x, 1e-6))
"""
    environment = subprocess_environment(TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "kept"), NVTE_TORCH_COMPILE="1")
    environment.pop("CXX", None)
    changes = {"PATH": {"PATH": str(tmp_path)}, "CXX": {"CXX": "/nonexistent"}}[cause]
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, env={**environment, **changes}, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr


def has_compiler():
    from shutil import which

    return which(os.environ.get("CXX", "g++")) is not None


@pytest.mark.skipif(not has_compiler(), reason="needs a C++ compiler")
def test_with_a_cpp_compiler(monkeypatch):
    """Compiled by inductor, where warnings are errors too: the same float64 bounds, also for gradients."""
    monkeypatch.delenv(jit.VARIABLE, raising=False)
    x, dy = random(64, 32, dtype=torch.bfloat16).requires_grad_(), random(64, 32, dtype=torch.bfloat16, seed=2)
    bias = random(32, dtype=torch.bfloat16, seed=1).requires_grad_()
    y = jit.bias_gelu_fused_(x, bias)
    y.backward(dy)
    from torch._dynamo.utils import counters

    assert counters["stats"]["unique_graphs"] > 0
    shifted = x.detach().double() + bias.detach().double()
    value, slope = value_and_slope("gelu", shifted)
    size = 1 + shifted.abs()
    assert_one_rounding(y.detach(), value, size)
    assert_one_rounding(x.grad, slope * dy.double(), 4 * size * dy.double().abs())


def test_within_another_compile():
    """Jitted functions become part of the outer graph."""

    def outer(x, bias):
        return jit.bias_gelu_fused(x, bias) + jit.l2normalization_fused_(x, 1e-6)

    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    x, bias = random(4, 8), random(8, seed=1)
    with jit.compilation(False):
        wanted = outer(x, bias)
    assert torch.equal(torch.compile(outer, backend=backend, fullgraph=True)(x, bias), wanted)
    assert len(graphs) == 1


# --- no_torch_dynamo ------------------------------------------------------------------------------------


def traced(function, *args, **kwargs):
    """Run under torch.compile, in one graph; a graph break is an error."""
    torch._dynamo.reset()
    return torch.compile(lambda *a: function(*a, **kwargs) + 1, backend="eager", fullgraph=True)(*args)


def test_no_torch_dynamo():
    @jit.no_torch_dynamo()
    def double(x):
        """Twice."""
        return x * 2

    x = torch.ones(2)
    assert torch.equal(double(x), x * 2) and double.__doc__ == "Twice."
    with pytest.raises(torch._dynamo.exc.Unsupported):
        traced(double, x)
    broken = torch.compile(lambda t: double(t) + 1, backend="eager")
    assert torch.equal(broken(x), x * 2 + 1)
    with jit.onnx_export(True):
        assert jit.is_in_onnx_export_mode()
        assert torch.equal(traced(double, x), x * 2 + 1)
    assert not jit.is_in_onnx_export_mode()


def test_no_torch_dynamo_around_its_own_frame_alone():
    """recursive=False: what the function calls may be compiled again."""
    seen = []

    @jit.no_torch_dynamo(recursive=False)
    def outer(x):
        seen.append(torch.compiler.is_compiling())
        return inner(x)

    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def inner(x):
        return x * 2

    torch._dynamo.reset()
    torch.compile(lambda t: outer(t) + 1, backend=backend)(torch.ones(2))
    alone = len(graphs)
    outer_recursive = jit.no_torch_dynamo()(outer.__wrapped__)
    graphs.clear()
    torch._dynamo.reset()
    torch.compile(lambda t: outer_recursive(t) + 1, backend=backend)(torch.ones(2))
    assert seen == [False, False] and alone == len(graphs) + 1


@pytest.mark.filterwarnings("ignore")
def test_no_torch_dynamo_when():
    asked = []

    def when(call):
        asked.append({k: v for k, v in call.items() if k != "x"})
        return "factor > 2" if call.get("factor", 1) > 2 else None

    @jit.no_torch_dynamo(when=when)
    def times(x, factor=1, *, offset=0):
        return x * factor + offset

    x = torch.ones(2)
    assert torch.equal(times(x, 5), x * 5) and asked == []  # not compiling
    assert torch.equal(traced(times, x), x + 1)
    torch._dynamo.reset()
    fallen = torch.compile(lambda t: times(t, 3, offset=1), backend="eager")
    with pytest.warns(UserWarning, match="Falling back to eager execution under torch.compile: factor > 2 is unsuppor"):
        assert torch.equal(fallen(x), x * 3 + 1)
    with jit.onnx_export(True):
        torch._dynamo.reset()
        assert torch.equal(torch.compile(lambda t: times(t, 3), backend="eager", fullgraph=True)(x), x * 3)
    with pytest.raises(AssertionError, match=r"needs named parameters; .*f has \*args"):

        @jit.no_torch_dynamo(when=when)
        def f(*args):
            return args


# --- warm-up --------------------------------------------------------------------------------------------

WARMUPS = {
    "bias_dropout_add": {"bias_dropout_add_fused_train_", "bias_dropout_add_fused_inference_"},
    "bias_gelu": {"bias_gelu_fused_", "gelu_fused_"},
    "l2normalization": {
        "l2normalization_fused_",
        "l2normalization_fwd_fused_",
        "l2normalization_backward_fused_",
    },
}


@pytest.mark.parametrize("name", WARMUPS)
def test_warm_ups(monkeypatch, name):
    """They run the functions of their name, in each dtype, on the device that is asked for, and draw no numbers."""
    ran = []

    def run(self, args, kwargs):
        ran.append((self.function.__name__, args[0].dtype, args[0].device.type, args[0].shape[-1]))
        return self.function(*args, **kwargs)

    monkeypatch.setattr(jit._Compiled, "run", run)
    monkeypatch.delenv(jit.VARIABLE, raising=False)
    state = torch.get_rng_state()
    warmup, for_all = getattr(jit, f"warmup_jit_{name}"), getattr(jit, f"warmup_jit_{name}_all_dtypes")
    warmup(16, torch.bfloat16, 3, 2)
    assert {one[0] for one in ran} == WARMUPS[name] and {one[1:] for one in ran} >= {(torch.bfloat16, "cpu", 16)}
    ran.clear()
    for_all(16, 3, 2, device="meta")
    assert {one[2] for one in ran} == {"meta"} and {one[1] for one in ran} == set(jit._DTYPES)
    ran.clear()
    with torch.device("meta"):
        warmup(16, torch.float32, 3, 2)
    assert {one[2] for one in ran} == {"meta"}
    assert torch.equal(torch.get_rng_state(), state)


def test_warm_ups_without_compiling(eager):
    jit.warmup_jit_bias_gelu(8, torch.float32, 2, 2)


def test_meta_tensors_compile_nothing_and_break_nothing():
    """A warm-up on meta must not turn compilation off elsewhere."""
    x, bias = torch.empty(4, 8, device="meta", requires_grad=True), torch.empty(8, device="meta")
    with warnings.catch_warnings(), jit.compilation(True):
        warnings.simplefilter("error")
        assert jit.gelu_fused_(x).shape == x.shape
        assert jit.bias_gelu_fused(x, bias).shape == x.shape
        assert jit.l2normalization_fused(x, 1e-6).shape == x.shape
        assert jit.bias_dropout_add_fused_train(x, bias, x, 0.1).shape == x.shape


def test_each_function_has_code_of_its_own():
    """torch.compile counts recompilations by code object: functions that share one use up each other's budget."""
    names = [f"{prefix}{name}_fused_" for name in ("gelu", "silu", "relu", "qgelu", "srelu") for prefix in ("", "d")]
    codes = {id(inspect.unwrap(getattr(jit, name)).__code__) for name in names}
    assert len(codes) == len(names)


def test_a_failed_compile_says_why_and_stays_on_its_device(monkeypatch):
    compiled = jit._Compiled(lambda x: x + 1)

    def fail(*args):
        raise RuntimeError("backend='inductor' raised:\nthe reason")

    compiled.compiled = fail
    with pytest.warns(RuntimeWarning, match="the reason"):
        assert torch.equal(compiled.run((torch.ones(2),), {}), torch.full((2,), 2.0))
    assert compiled.failed == {"cpu"}
