"""`fuser.xla`: both routes bit for bit against the kernels, under JAX's transformations, and the FFI frame itself."""

import ctypes
import re
import threading
from itertools import product

import ml_dtypes
import numpy as np
import pytest

from tiers import sampled

jax = pytest.importorskip("jax")
jax.config.update("jax_platforms", "cpu")
import jax.numpy as jnp  # noqa: E402
from scaled_tensors import (  # noqa: E402
    SCALE,
    SETTINGS,
    assert_same_quantized,
    assert_same_raw,
    quantizer_of,
    random,
    rows,
    run_python,
)

import refops  # noqa: E402
from cuda_kernels import host  # noqa: E402
from fuser import xla  # noqa: E402
from fuser.xla import compute, ffi  # noqa: E402
from fuser.xla.settings import ACTIVATION_NAMES  # noqa: E402
from fuser.xla.tensors import ScaledTensor1x, ScaledTensor2x  # noqa: E402
from xla_frames import FakeRuntime  # noqa: E402

ROUTES = ("ffi", "callback")
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
TYPES = tuple(xla.ActivationEnum)
SCALED = tuple(SETTINGS)


@pytest.fixture(params=ROUTES)
def route(request):
    with xla.route(request.param):
        yield request.param


# --- settings -------------------------------------------------------------------------------------------


def test_the_numbers_are_te_s():
    assert [m.name for m in sorted(xla.ScalingMode)] == [
        "NO_SCALING",
        "DELAYED_TENSOR_SCALING",
        "MXFP8_1D_SCALING",
        "CURRENT_TENSOR_SCALING",
        "NVFP4_1D_SCALING",
        "NVFP4_2D_SCALING",
    ]
    assert [int(m) for m in xla.QuantizeLayout] == [0, 1, 2]
    assert list(xla.ActivationEnum.values()) == list(range(12))
    for wrong in (("linear", "gelu"), ("tanh",), ()):
        with pytest.raises(KeyError, match="activation_type must be one of"):
            xla.act_lu(jnp.ones((2, 1, 8)), wrong)


def test_parameters_are_hashable_and_checked():
    a, b = xla.ActivationParams.create(limit=3.0), xla.ActivationParams.create(limit=3)
    assert hash(a) == hash(b) and a == b and a != xla.ActivationParams()
    assert (a.clamped_swiglu.alpha, a.clamped_swiglu.glu_linear_offset) == (1.702, 1.0)
    with pytest.raises(TypeError, match="takes no parameters"):
        xla.ActivationParams.create(("gelu",), limit=1.0)
    with pytest.raises(ValueError, match="alpha"):
        xla.ClampedSwigluParams(alpha=float("nan"))


MX, FP4, FP4_2D = (xla.ScalingMode[f"{name}_SCALING"] for name in ("MXFP8_1D", "NVFP4_1D", "NVFP4_2D"))


@pytest.mark.parametrize(
    ("mode", "shape", "axis", "padded", "unpadded"),
    [  # measured with TE's scaling_modes.py
        (MX, (32, 64), -1, ((128, 4), (4, 128)), ((32, 2), (1, 64))),
        (MX, (128, 4096), -1, ((128, 128), (4, 4096)), ((128, 128), (4, 4096))),
        (MX, (16, 128, 256), -1, ((16, 128, 8), (16, 4, 256)), ((16, 128, 8), (16, 4, 256))),
        (MX, (2, 64, 256), -1, ((2, 64, 8), (2, 2, 256)), ((2, 64, 8), (2, 2, 256))),
        (MX, (32, 2, 64), -2, ((128, 2, 2), (4, 2, 64)), ((32, 2, 2), (1, 2, 64))),
        (MX, (32, 1, 64), -2, ((128, 2, 2), (4, 2, 64)), ((32, 1, 2), (1, 1, 64))),
        (MX, (16, 128, 2, 32), -2, ((16, 128, 4, 1), (16, 4, 4, 32)), ((16, 128, 2, 1), (16, 4, 2, 32))),
        (FP4, (32, 64), -1, ((128, 4), (128, 4)), ((32, 4), (64, 2))),
    ],
)
def test_scale_shapes(mode, shape, axis, padded, unpadded):
    assert mode.get_scale_shape_2x(shape, is_padded=True, flatten_axis=axis) == padded
    assert mode.get_scale_shape_2x(shape, is_padded=False, flatten_axis=axis) == unpadded


def test_scale_shapes_of_tensors_squares_and_what_blocks_do_not_divide():
    shape = FP4_2D.get_scale_shape_2x((32, 64), is_padded=False, broadcast_2d_scale_shape_to_1d=False)
    assert shape == ((2, 4), (4, 2))
    assert FP4.get_scale_shape((256, 16, 128), "T", is_colwise=True, is_padded=False, flatten_axis=1) == (256, 16, 8)
    assert xla.ScalingMode.NO_SCALING.get_scale_shape((4, 4)) == (0,)
    assert xla.ScalingMode.CURRENT_TENSOR_SCALING.get_scale_shape((4, 4)) == (1,)
    assert xla.ScalingMode.CURRENT_TENSOR_SCALING.get_scale_shape((0, 4)) == (0,)
    with pytest.raises(
        ValueError, match=r"MXFP8_1D_SCALING needs a multiple of 32 along axis 0; got shape \(200, 96\)"
    ):
        MX.get_scale_shape_2x((200, 96))


# --- values ---------------------------------------------------------------------------------------------


@sampled(
    ("route", "activation_type"),
    product(ROUTES, TYPES),
    5,
    indirect=["route"],
    ids=lambda v: v if isinstance(v, str) else "-".join(v),
)
def test_unscaled_bits(route, activation_type):
    name = ACTIVATION_NAMES[xla.ActivationEnum[activation_type]]
    params = xla.ActivationParams.create(limit=2.5, alpha=1.5, glu_linear_offset=0.5)
    kernel_params = {"limit": 2.5, "alpha": 1.5, "glu_linear_offset": 0.5} if name == "clamped_swiglu" else {}
    for dtype in DTYPES:
        x, dz = random((3, 5, len(activation_type), 24), dtype), random((3, 5, 24), dtype, seed=1)
        y = xla.act_lu(x, activation_type, act_params=params, output_amax_when_no_scaling=True)
        assert isinstance(y, xla.NoScaleTensor) and y.shape == (3, 5, 24) and y.dtype == dtype
        assert_same_raw(y.data, host.activation(name, rows(x), **kernel_params).reshape(y.shape))
        exact = host.activation(name, rows(x), out_dtype=np.float32, **kernel_params)
        np.testing.assert_array_equal(np.asarray(y.amax), [np.abs(exact).max()])  # of the unrounded values
        assert xla.act_lu(x, activation_type, act_params=params).amax is None
        dx, dbias = xla.quantize_dact_dbias(dz, x, activation_type, act_params=params)
        wanted, sums = host.activation_grad(name, rows(dz[..., None, :]), rows(x), dbias=True, **kernel_params)
        assert_same_raw(dx.data, wanted.reshape(x.shape))
        assert_same_raw(dbias, sums.reshape(x.shape[-2:]))
        assert_same_raw(xla.dact_lu(dz, x, activation_type, act_params=params).data, dx.data)


@sampled(
    ("route", "mode", "layout"),
    product(ROUTES, SCALED, xla.QuantizeLayout),
    4,
    in_all=1,
    indirect=["route"],
    ids=lambda v: v if isinstance(v, str) else v.name,
)
def test_scaled_bits(route, mode, layout):
    copies = {"rowwise": layout.has_rowwise, "columnwise": layout.has_colwise}
    for activation_type, name in ((("gelu",), "gelu"), (("silu", "linear"), "swiglu")):
        x, dz = random((2, 32, len(activation_type), 64), jnp.bfloat16), random((2, 32, 64), jnp.bfloat16, seed=1)
        y = xla.act_lu(x, activation_type, quantizer_of(mode, layout))
        q = host.activation_quantize(name, rows(x), SETTINGS[mode], **copies)
        assert isinstance(y, ScaledTensor2x if all(copies.values()) else ScaledTensor1x)
        assert_same_quantized(y, q)
        assert y.dequantize().dtype == jnp.bfloat16
        values = host.dequantize(q, dtype="bfloat16").reshape(2, 32, 64)
        if layout is xla.QuantizeLayout.COLWISE and mode.is_colwise_transposed:
            values = values.transpose(2, 0, 1)
        assert_same_raw(y.dequantize(), values)
        dx, dbias = xla.quantize_dact_dbias(dz, x, activation_type, True, quantizer_of(mode, layout))
        q, sums = host.activation_grad_quantize(
            name, rows(dz[..., None, :]), rows(x), SETTINGS[mode], dbias=True, **copies
        )
        assert_same_quantized(dx, q)
        assert_same_raw(dbias, sums.reshape(x.shape[-2:]))
        alone = xla.dact_lu(dz, x, activation_type, quantizer_of(mode, layout))
        assert_same_quantized(alone, q)


@pytest.mark.parametrize("mode", [None, *SCALED], ids=lambda m: m.name if m else "NO_SCALING")
def test_the_reference_backend_is_refops(mode):
    dispatch = pytest.importorskip("fuser.dispatch")
    x, dz = random((32, 2, 64), jnp.bfloat16), random((32, 64), jnp.bfloat16, seed=1)
    with dispatch.backend("reference"):
        q, p = (None if mode is None else quantizer_of(mode, xla.QuantizeLayout.ROWWISE_COLWISE) for _ in range(2))
        y = xla.act_lu(x, ("gelu", "linear"), q, output_amax_when_no_scaling=True)
        dx, dbias = xla.quantize_dact_dbias(dz, x, ("gelu", "linear"), True, p)
    if mode is None:
        assert_same_raw(y.data, refops.activation("geglu", rows(x)))
        exact = refops.activation("geglu", rows(x), out_dtype=np.float32)
        np.testing.assert_array_equal(np.asarray(y.amax), [np.abs(exact).max()])
        wanted, sums = refops.activation_grad("geglu", np.asarray(dz), rows(x), dbias=True)
        assert_same_raw(dx.data, wanted.reshape(x.shape))
    else:
        assert_same_quantized(y, refops.activation_quantize("geglu", rows(x), SETTINGS[mode], columnwise=True))
        wanted, sums = refops.activation_grad_quantize(
            "geglu", np.asarray(dz), rows(x), SETTINGS[mode], columnwise=True, dbias=True
        )
        assert_same_quantized(dx, wanted)
    assert_same_raw(dbias, sums.reshape(2, 64))


@sampled(
    ("route", "mode"),
    product(ROUTES, SCALED),
    2,
    in_all=1,
    indirect=["route"],
    ids=lambda v: v if isinstance(v, str) else v.name,
)
def test_quantize_flattens_where_it_is_told(route, mode):
    x = random((32, 2, 64), jnp.float16)
    tensor = quantizer_of(mode, xla.QuantizeLayout.ROWWISE_COLWISE).quantize(x, flatten_axis=-2)
    assert_same_quantized(tensor, host.quantize(rows(x), SETTINGS[mode], columnwise=True))
    assert tensor.shape == x.shape and tensor.dequantize().dtype == jnp.float16
    transposed = (2, 64, 32) if mode.is_colwise_transposed else x.shape
    assert tensor.colwise_tensor.shape == transposed
    assert quantizer_of(mode).quantize(x, is_rowwise=False, is_colwise=True, flatten_axis=-2).is_colwise


def test_e5m2():
    x = random((32, 1, 32))
    y = xla.act_lu(x, ("relu",), quantizer_of(MX, q_dtype=jnp.float8_e5m2))
    assert y.data.dtype == jnp.float8_e5m2
    assert_same_quantized(y, host.activation_quantize("relu", rows(x), refops.MXFP8Scaling(refops.E5M2)))


def test_subnormals_are_kept(route):
    """XLA's threads flush them; relu is exact, so its result is the input."""
    x = jnp.asarray(np.array([[1e-40, -1e-40, 2.0**-149, 1.0]], np.float32))
    assert_same_raw(xla.act_lu(x, ("relu",)).data, np.array([1e-40, 0, 2.0**-149, 1], np.float32))


@pytest.mark.parametrize("mode", SCALED, ids=lambda m: m.name)
def test_padding_is_zero_whatever_the_memory_held(mode):
    x, settings = np.asarray(random((48, 1, 48))), SETTINGS[mode]
    q = host.activation_quantize("silu", rows(x), settings, columnwise=True)
    arrays = (q.rowwise_data, q.columnwise_data, q.rowwise_scale_inv, q.columnwise_scale_inv, np.zeros(1, np.float32))
    memory = [np.full(a.nbytes, 0x5A, np.uint8) for a in arrays]
    dtype = "float4_e2m1fn" if mode.is_nvfp4_scaling else "float8_e4m3fn"
    shapes = [(a.size * (1 + mode.is_nvfp4_scaling),) if i < 2 else a.shape for i, a in enumerate(arrays)]
    dtypes = [dtype, dtype, *[mode.get_scale_dtype().name] * 2, "float32"]
    results = [compute.Buffer(*one) for one in zip(memory, shapes, dtypes, strict=True)]
    scale, amax = np.full(1, SCALE, np.float32), memory[4].view(np.float32)
    operands = [compute.Buffer(a.reshape(-1).view(np.uint8), a.shape, "float32") for a in (x, scale, amax)]
    call = compute.Call(compute.ACTIVATION, 3, int(mode), int(xla.QuantizeLayout.ROWWISE_COLWISE))
    compute.run(call, compute.HostPlace(), operands, results)
    for array, bytes_ in zip(arrays[:4], memory, strict=False):
        np.testing.assert_array_equal(bytes_, array.reshape(-1).view(np.uint8))
    if q.amax_rowwise is not None:
        assert amax[0] == q.amax_rowwise[0]


def test_a_thread_keeps_its_floating_point_environment():
    torch = pytest.importorskip("torch")
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU flushes nothing")
    try:
        tiny = torch.full((1,), 1e-30)
        with compute.exact_subnormals():
            inside = (tiny * 1e-10).view(torch.int32).item()
        outside = (tiny * 1e-10).view(torch.int32).item()
    finally:
        torch.set_flush_denormal(False)
    assert inside != 0 and outside == 0


@pytest.mark.parametrize("mode", [None, *SCALED], ids=lambda m: m.name if m else "NO_SCALING")
def test_empty_tensors(route, mode):
    q = None if mode is None else quantizer_of(mode, xla.QuantizeLayout.ROWWISE_COLWISE)
    y = xla.act_lu(jnp.zeros((0, 32, 2, 64)), ("gelu", "linear"), q)
    assert y.shape == (0, 32, 64) and y.dequantize().shape == (0, 32, 64)
    dx, dbias = xla.quantize_dact_dbias(jnp.zeros((0, 32, 64)), jnp.zeros((0, 32, 1, 64)), ("gelu",), True, q)
    assert dx.shape == (0, 32, 1, 64)
    np.testing.assert_array_equal(np.asarray(dbias), np.zeros((1, 64)))


# --- quantizers -----------------------------------------------------------------------------------------


def test_delayed_scaling_follows_its_history():
    quantizer = xla.DelayedScaleQuantizer(q_layout=xla.QuantizeLayout.ROWWISE, margin=1)
    history, scale = np.zeros(1024, np.float32), np.float32(1)

    @jax.jit
    def step(quantizer, x):
        tensor = xla.act_lu(x, ("relu",), quantizer)
        return quantizer, tensor

    for seed in range(3):
        x = random((8, 1, 32), seed=seed)
        quantizer, tensor = step(quantizer, x)
        settings = refops.DelayedScaling(refops.E4M3, float(scale))
        assert_same_quantized(tensor, host.activation_quantize("relu", rows(x), settings))
        history[0] = np.maximum(np.asarray(x), 0).max()
        scale = np.float32(448) / history.max() / np.float32(2)
        history = np.roll(history, -1)
        history[0] = 0
        np.testing.assert_array_equal(np.asarray(quantizer.scale), [scale])
        np.testing.assert_array_equal(np.asarray(quantizer.amax_history), history)
    recent = xla.DelayedScaleQuantizer(amax_compute_algo="most_recent")
    for amax, wanted in ((4.0, 112.0), (2.0, 224.0), (0.0, 224.0), (float("inf"), 224.0)):
        recent.update(jnp.full((1,), amax))
        assert float(recent.scale[0]) == wanted


def test_the_factory():
    create = xla.QuantizerFactory.create
    assert create(scaling_mode=xla.ScalingMode.NO_SCALING) is None
    pair = create(2, xla.ScalingMode.NVFP4_2D_SCALING)
    assert len(pair) == 2 and isinstance(pair[1], xla.NVFP4Quantizer) and pair[0].q_dtype == jnp.float4_e2m1fn
    assert create(scaling_mode=2, q_layout=1).get_data_layout() == "N"
    assert create(scaling_mode=3, q_layout=2).get_data_layout() == "NT"
    with pytest.raises(ValueError, match="NVFP4Quantizer needs scaling_mode"):
        create(scaling_mode=xla.ScalingMode.NVFP4_1D_SCALING, q_dtype=jnp.float8_e4m3fn)
    with pytest.raises(ValueError, match="amax_compute_algo"):
        create(scaling_mode=1, amax_compute_algo="mean")


def test_results_are_pytrees():
    y = jax.jit(lambda v: xla.act_lu(v, ("gelu",), quantizer_of(MX, xla.QuantizeLayout.ROWWISE_COLWISE)))(
        random((32, 1, 32))
    )
    leaves, tree = jax.tree_util.tree_flatten(y)
    assert len(leaves) == 4
    again = jax.tree_util.tree_unflatten(tree, leaves)
    assert again.get_tensor(xla.TensorUsage.LHS) is again.rowwise_tensor
    assert again.get_tensor(xla.TensorUsage.RHS) is again.colwise_tensor
    assert again.rowwise_tensor.scaling_mode is MX and again.rowwise_tensor.dq_dtype == np.float32
    with pytest.raises(ValueError, match="scale_inv must have shape"):
        xla.ScaledTensorFactory.create_1x(jnp.zeros((32, 32)), jnp.zeros((2, 1)), scaling_mode=MX)
    with pytest.raises(TypeError, match="scale_inv must be float8_e8m0fnu in MXFP8_1D_SCALING; got float32"):
        xla.ScaledTensorFactory.create_1x(jnp.zeros((32, 32)), jnp.zeros((32, 1)), scaling_mode=MX)
    plain = xla.ScaledTensorFactory.create_1x(jnp.zeros((2, 2)), None, dq_dtype=jnp.float32)
    assert plain.scale_inv.shape == (0,)


# --- JAX's transformations ------------------------------------------------------------------------------


@pytest.mark.parametrize("activation_type", TYPES, ids="-".join)
def test_gradients_against_float64(route, activation_type):
    x = random((4, len(activation_type), 16))
    bound = refops.activations.bind_activation(ACTIVATION_NAMES[xla.ActivationEnum[activation_type]], {})
    halves = [np.asarray(x, np.float64)[:, i] for i in range(len(activation_type))]
    dz = np.asarray(random((4, 16), seed=1))
    value, pull = jax.vjp(jax.jit(lambda v: xla.activation(v, activation_type)), x)
    np.testing.assert_allclose(np.asarray(value), bound.truth(*halves), rtol=2e-6, atol=2e-6)
    gradient = bound.truth_grad(dz.astype(np.float64), *halves)
    gradient = np.stack(gradient, axis=1) if bound.gated else gradient[:, None]
    np.testing.assert_allclose(np.asarray(pull(jnp.asarray(dz))[0]), gradient, rtol=2e-6, atol=1e-5)


def test_what_has_no_derivative_names_what_has_one():
    x = random((32, 1, 64))
    quantizer = xla.QuantizerFactory.create(scaling_mode=MX, q_dtype=jnp.float8_e4m3fn)
    calls = {xla.act_lu: lambda v: xla.act_lu(v, ("gelu",)), xla.quantize: lambda v: xla.quantize(v, quantizer)}
    for function, call in calls.items():
        with xla.route("ffi"), pytest.raises(ValueError, match=r"The FFI call to .* cannot be differentiated"):
            jax.grad(lambda v, call=call: call(v).dequantize().sum())(x)
        assert "cannot be differentiated" in function.__doc__ and "`activation`" in function.__doc__
    assert jax.grad(lambda v: xla.activation(v, ("gelu",), quantizer).sum())(x).shape == x.shape


@sampled("route", ROUTES, 2, in_all=1, indirect=True)
def test_transformations(route):
    x = random((4, 32, 1, 32), jnp.bfloat16)

    def apply(v):
        return xla.activation(v, ("gelu",))

    def loss(v):
        return apply(v).astype(jnp.float32).sum()

    wanted, gradient = apply(x), jax.grad(loss)(x)
    assert_same_raw(jax.jit(apply)(x), wanted)
    assert_same_raw(jax.vmap(apply)(x), wanted)
    assert_same_raw(jax.vmap(jax.vmap(apply))(x), wanted)
    assert_same_raw(jax.vmap(apply, in_axes=1, out_axes=1)(x), wanted)
    assert_same_raw(jax.lax.scan(lambda c, v: (c, apply(v)), 0, x)[1], wanted)
    assert_same_raw(jax.vmap(jax.grad(loss))(x), gradient)
    assert_same_raw(jax.jit(jax.grad(lambda v: jax.checkpoint(apply)(v).astype(jnp.float32).sum()))(x), gradient)
    scanned = jax.grad(lambda v: jax.lax.scan(lambda c, u: (c + loss(u), None), jnp.float32(0), v)[0])(x)
    assert_same_raw(scanned, gradient)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(apply, (x,), (x,))


@sampled(
    ("route", "mode"),
    product(ROUTES, SCALED),
    2,
    in_all=1,
    indirect=["route"],
    ids=lambda v: v if isinstance(v, str) else v.name,
)
def test_transformations_of_quantizing_calls(route, mode):
    """Each example is quantized by itself; a quantizer adds its noise forward, and none backward."""
    x = random((3, 32, 1, 32))

    def apply(v):
        return xla.act_lu(v, ("gelu",), quantizer_of(mode, xla.QuantizeLayout.ROWWISE_COLWISE))

    together, scanned = jax.vmap(apply)(x), jax.jit(lambda v: jax.lax.scan(lambda c, u: (c, apply(u)), 0, v)[1])(x)
    for i in range(3):
        alone = jax.tree_util.tree_leaves(apply(x[i]))
        for many in (together, scanned):
            for a, b in zip(jax.tree_util.tree_leaves(many), alone, strict=True):
                assert_same_raw(a[i], b)
    value, pull = jax.vjp(lambda v: xla.activation(v, ("gelu",), quantizer_of(mode)), x)
    assert_same_raw(value, xla.act_lu(x, ("gelu",), quantizer_of(mode)).dequantize())
    assert_same_raw(pull(value)[0], xla.dact_lu(value, x, ("gelu",)).data)


@pytest.mark.full
def test_shard_map_over_two_devices():
    code = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from fuser import xla
x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 32, 2, 32)), jnp.bfloat16)
mesh = Mesh(np.array(jax.devices()), ("d",))
assert len(jax.devices()) == 2
mx = xla.QuantizerFactory.create(scaling_mode=xla.ScalingMode.MXFP8_1D_SCALING, q_layout=2)
shard = lambda f: jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("d"), out_specs=P("d")))
for route in ("ffi", "callback"):
    with xla.route(route):
        f = lambda v: xla.activation(v, ("silu", "linear"))
        q = lambda v: xla.act_lu(v, ("silu", "linear"), mx).dequantize()
        loss = lambda g: lambda v: g(v).astype(jnp.float32).sum()
        assert (shard(f)(x) == f(x)).all() and (shard(q)(x) == q(x)).all()
        assert (jax.grad(loss(shard(f)))(x) == jax.grad(loss(f))(x)).all()
print("ok")
"""
    assert run_python(code, XLA_FLAGS="--xla_force_host_platform_device_count=2").strip() == "ok"


def test_calls_from_many_threads(route):
    f, x = jax.jit(lambda v: xla.act_lu(v, ("gelu",), quantizer_of(MX))), random((64, 1, 1024))
    wanted, wrong = np.asarray(f(x).data).view(np.uint8), []

    def work():
        for _ in range(20):
            if (np.asarray(f(x).data).view(np.uint8) != wanted).any():
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- errors ---------------------------------------------------------------------------------------------


def test_errors_when_traced():
    x = jnp.ones((32, 2, 32))
    with pytest.raises(ValueError, match=r"x must have the shape \(..., 1, n\)"):
        xla.act_lu(x, ("gelu",))
    with pytest.raises(TypeError, match="x must be float32, float16 or bfloat16; got int32"):
        xla.act_lu(jnp.ones((2, 1, 8), jnp.int32), ("gelu",))
    with pytest.raises(ValueError, match="dz must be float32 of shape"):
        xla.dact_lu(jnp.ones((32, 16)), x, ("gelu", "linear"))
    with pytest.raises(TypeError, match="quantizer must be a Quantizer or None; got str"):
        xla.act_lu(x, ("gelu", "linear"), "mxfp8")
    with pytest.raises(ValueError, match="multiple of 32 along axis 1; got shape"):
        xla.act_lu(jnp.ones((32, 1, 40)), ("gelu",), quantizer_of(MX))
    with pytest.raises(ValueError, match="flatten_axis must leave axes on both sides"):
        xla.act_lu(jnp.ones((1, 32)), ("gelu",), quantizer_of(MX))
    with pytest.raises(ValueError, match="NVFP4_1D_SCALING needs a multiple of 16 along axis 0; got shape"):
        quantizer_of(FP4, xla.QuantizeLayout.COLWISE).quantize(jnp.ones((8, 32)))
    with pytest.raises(ValueError, match="NVFP4_1D_SCALING needs a multiple of 16 along axis 0; got shape"):
        quantizer_of(FP4, xla.QuantizeLayout.ROWWISE).quantize(jnp.ones((8, 32)))
    with pytest.raises(ValueError, match=r"amax_scope must be AmaxScope\.LOCAL"):
        xla.act_lu(x, ("gelu", "linear"), amax_scope="everywhere")
    with pytest.raises(ValueError, match="name must be one of 'ffi', 'callback'; got 'tvm'"), xla.route("tvm"):
        pass


def test_errors_of_the_computation_reach_the_user(route):
    quantize = jax.jit(lambda v, s: xla.act_lu(v, ("gelu",), xla.DelayedScaleQuantizer(scale=s)).rowwise_tensor.data)
    with pytest.raises(jax.errors.JaxRuntimeError, match="ValueError: scale must be a finite float32: a positive"):
        jax.block_until_ready(quantize(jnp.ones((4, 1, 8)), jnp.zeros((1,))))


def te_act_lu(x, act_enum=0, scaling_mode=0, layout=0, dtype=jnp.float32, scales=(1,), aliases=None, **attributes):
    """TE's call of its FFI target, as its `ActLuPrimitive` lowers it."""
    s, one = jax.ShapeDtypeStruct, (1,)
    results = (
        s((*x.shape[:-2], x.shape[-1]), dtype),
        s(one, dtype),
        s(scales, attributes.pop("scale_dtype", jnp.float32)),
    )
    call = jax.ffi.ffi_call(
        "te_act_lu_ffi",
        (*results, s(one, jnp.float32), s(one, jnp.float32)),
        input_output_aliases={2: 4} if aliases is None else aliases,
    )
    numbers = {"act_enum": act_enum, "scaling_mode": scaling_mode, "quantize_layout": layout}
    attributes = {"output_amax_when_no_scaling": np.bool_(False), **attributes}
    return jax.jit(lambda v, s, a: call(v, s, a, **{k: np.int64(n) for k, n in numbers.items()}, **attributes))(
        x, jnp.full((1,), 2.0), jnp.full((1,), 7.0)
    )


def test_te_s_target_keeps_te_s_contract():
    ffi.register()
    x = random((32, 1, 64))
    out = te_act_lu(x)
    assert_same_raw(out[0], host.activation("gelu", rows(x)))
    assert float(out[4][0]) == 7.0  # no amax was asked for: the operand's memory, as it was
    out = te_act_lu(x, output_amax_when_no_scaling=np.bool_(True))
    assert float(out[4][0]) == np.abs(host.activation("gelu", rows(x))).max()
    out = te_act_lu(x, scaling_mode=1, dtype=jnp.float8_e4m3fn)
    q = host.activation_quantize("gelu", rows(x), refops.DelayedScaling(refops.E4M3, 2.0))
    np.testing.assert_array_equal(np.asarray(out[0]).view(np.uint8), q.rowwise_data)
    assert (float(out[2][0]), float(out[4][0])) == (0.5, float(q.amax_rowwise[0]))
    out = te_act_lu(x, scaling_mode=2, dtype=jnp.float8_e5m2, scales=(128, 4), scale_dtype=jnp.float8_e8m0fnu)
    q = host.activation_quantize("gelu", rows(x), refops.MXFP8Scaling(refops.E5M2))
    np.testing.assert_array_equal(np.asarray(out[2]).view(np.uint8), q.rowwise_scale_inv)  # padding is zero
    gated = random((4, 2, 64))
    params = {"limit": np.float32(2), "alpha": np.float32(1.5), "glu_linear_offset": np.float32(0.5)}
    wanted = host.activation("clamped_swiglu", rows(gated), limit=2.0, alpha=1.5, glu_linear_offset=0.5)
    assert_same_raw(te_act_lu(gated, 11, act_params=params)[0], wanted)


def test_te_s_gradient_target_keeps_te_s_contract():
    """With TE's seventh result, the workspace of its kernels, and its nested parameters' flat form."""
    ffi.register()
    assert {platform for platform, _ in ffi._registered} == {"cpu", "CUDA"}
    dz, x, s = random((32, 64), seed=1), random((32, 1, 64)), jax.ShapeDtypeStruct
    for is_dbias in (False, True):
        results = [s((32, 1, 64), jnp.float8_e4m3fn), s((1, 64, 32), jnp.float8_e4m3fn), s((1,), jnp.float32)]
        dbias = s((1, 64) if is_dbias else (1,), jnp.float32)
        results += [s((1,), jnp.float32), s((1,), jnp.float32), dbias, s((8, 64), jnp.float32)]
        call = jax.ffi.ffi_call("te_dact_dbias_quantize_ffi", results, input_output_aliases={3: 4})
        numbers = {"act_enum": 3, "scaling_mode": 1, "quantize_layout": 2}
        out = jax.jit(
            lambda *operands, call=call, numbers=numbers, is_dbias=is_dbias: call(
                *operands,
                **{name: np.int64(number) for name, number in numbers.items()},
                is_dbias=np.bool_(is_dbias),
                output_amax_when_no_scaling=np.bool_(False),
            )
        )(dz, x, jnp.full((1,), 2.0), jnp.zeros((1,)))
        q, sums = host.activation_grad_quantize(
            "silu", np.asarray(dz), rows(x), refops.DelayedScaling(refops.E4M3, 2.0), columnwise=True, dbias=True
        )
        np.testing.assert_array_equal(np.asarray(out[0]).view(np.uint8).ravel(), q.rowwise_data.ravel())
        np.testing.assert_array_equal(np.asarray(out[1]).view(np.uint8).ravel(), q.columnwise_data.ravel())
        assert float(out[3][0]) == 0.5 and float(out[4][0]) == float(q.amax_rowwise[0])
        if is_dbias:
            assert_same_raw(np.asarray(out[5]).ravel(), sums)


@pytest.mark.parametrize("output_amax", [False, True])
def test_flags_are_sent_once_and_te_s_also_where_it_is_false(output_amax):
    x, dz = jnp.ones((32, 1, 64)), jnp.ones((32, 64))

    def attributes(function, *operands):
        (sent,) = re.findall(r"mhlo.backend_config = \{(.*?)\}", jax.jit(function).lower(*operands).as_text())
        return sent.split(", ")

    numbers = ["quantize_layout = 0 : i64", "scaling_mode = 0 : i64"]
    flag = f"output_amax_when_no_scaling = {str(output_amax).lower()}"
    with xla.route("ffi"):
        sent = attributes(lambda x: xla.act_lu(x, ("gelu",), output_amax_when_no_scaling=output_amax).data, x)
        assert sent == ["act_enum = 0 : i64", flag, *numbers]
        for is_dbias in (False, True):
            options = {"is_dbias": is_dbias, "output_amax_when_no_scaling": output_amax}
            sent = attributes(lambda dz, x, o=options: xla.quantize_dact_dbias(dz, x, **o)[0].data, dz, x)
            assert sent == ["act_enum = 0 : i64", *["is_dbias = true"] * is_dbias, flag, *numbers]
        q = quantizer_of(xla.ScalingMode.MXFP8_1D_SCALING)
        sent = attributes(lambda x: xla.quantize(x, q).data, dz)
        assert sent == ["quantize_layout = 0 : i64", "scaling_mode = 2 : i64"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"act_enum": 77}, "Unsupported ActivationEnum 77"),
        ({"scaling_mode": 9}, "9 is not a valid ScalingMode"),
        ({"act_enum": 4}, "swiglu needs 2 along the second last axis"),
        ({"aliases": {}}, "amax and updated_amax should be aliased"),
        ({"scaling_mode": 1}, "DELAYED_TENSOR_SCALING needs data of float8_e4m3fn or float8_e5m2; got float32"),
        ({"dtype": jnp.float8_e5m2}, "output must be float32 or float16 or bfloat16; got float8_e5m2"),
        ({"scaling_mode": 2, "dtype": jnp.float8_e5m2}, "rowwise_scale_inv must have 512 elements"),
    ],
)
def test_te_s_target_refuses(options, message):
    ffi.register()
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT.*ValueError: .*{message}|TypeError: {message}"
    ):
        jax.block_until_ready(te_act_lu(jnp.ones((32, 1, 64)), **options))


# --- the call frame -------------------------------------------------------------------------------------


def test_a_frame_is_decoded():
    x = np.arange(12, dtype=np.float32).reshape(3, 1, 4)
    attributes = {
        "act_enum": np.int64(3),
        "flag": np.bool_(True),
        "half": np.float16(1.5),
        "small": np.uint8(200),
        "wide": np.float64(0.1),
        "text": "naïve",
        "numbers": np.arange(3, dtype=np.int32),
        "act_params": {"clamped_swiglu": {"limit": np.float32(0.5), "alpha": np.float32(2)}},
    }
    runtime = FakeRuntime(
        [x, x.astype(ml_dtypes.bfloat16), np.array(1, np.float32)], [np.zeros(0, np.uint8)], attributes
    )
    frame = ffi.Frame(runtime.frame)
    assert len(frame.operands) == 3 and len(frame.results) == 1
    assert frame.operands[0] == (x.ctypes.data, (3, 1, 4), "float32")
    assert [o.dtype for o in frame.operands[1:]] == ["bfloat16", "float32"] and frame.operands[2].shape == ()
    decoded = frame.attributes
    np.testing.assert_array_equal(decoded.pop("numbers"), [0, 1, 2])
    assert decoded == {
        "act_enum": 3,
        "flag": True,
        "half": 1.5,
        "small": 200,
        "wide": 0.1,
        "text": "naïve",
        "act_params": {"clamped_swiglu": {"limit": 0.5, "alpha": 2.0}},
    }
    view = compute.HostPlace().view(frame.operands[0], (3, 4), "float32")
    view[0, 0] = 42  # XLA's memory itself
    assert x[0, 0, 0] == 42


def test_a_frame_s_services():
    runtime = FakeRuntime()
    frame = ffi.Frame(runtime.frame)
    assert frame.stream() == 0x7F00DEADBEEF and frame.device_ordinal() == 3
    assert frame.allocate(100) == 0x1000
    frame.free(0x1000, 100)
    assert runtime.allocated == [100] and runtime.freed == [(0x1000, 100)]
    runtime.fails = True
    with pytest.raises(RuntimeError, match="XLA's stream_get failed: no such thing"):
        frame.stream()
    assert runtime.errors == [("destroyed", 55)]
    runtime.api.struct_size = ffi.Api.device_ordinal_get.offset
    with pytest.raises(NotImplementedError, match="has no device_ordinal_get"):
        frame.device_ordinal()
    runtime.frame.struct_size = 100
    with pytest.raises(RuntimeError, match="call frame has 100 bytes; 168 are needed"):
        ffi.Frame(runtime.frame)


def test_a_handler_answers_metadata_and_reports_errors():
    seen = []
    handler = ffi.handler(lambda frame: seen.append(frame.attributes))
    runtime = FakeRuntime(attributes={"a": np.int64(1)})
    assert runtime.call(handler) is None and seen == [{"a": 1}]
    assert FakeRuntime(stage=2).call(handler) is None and len(seen) == 1  # other stages have nothing to do
    metadata = ffi.Metadata(struct_size=36)
    metadata.traits = 7
    extension = ffi.MetadataExtension(ffi.Extension(32, 1, None), ctypes.pointer(metadata))
    runtime.frame.extension = ctypes.addressof(extension)
    assert runtime.call(handler) is None and len(seen) == 1
    assert (metadata.api_version.major, metadata.api_version.minor, metadata.traits) == (0, 1, 0)
    for error, code in ((ValueError, 3), (TypeError, 3), (NotImplementedError, 12), (KeyboardInterrupt, 13)):

        def fail(frame, error=error):
            raise error("because")

        runtime = FakeRuntime()
        assert runtime.call(ffi.handler(fail)) == 99
        assert runtime.errors == [(code, f"{error.__name__}: because")]


@pytest.mark.full
def test_the_handler_on_a_gpu_s_memory_simulated():
    """The CUDA path in the kernels' simulator: XLA's buffers filled in place, temporaries given back."""
    pytest.importorskip("greenlet")
    code = """
import numpy as np, ml_dtypes, refops
from fuser.xla import compute, ffi
from fuser.xla.compute import Buffer, Call
from fuser.xla.cuda import CudaPlace

class Frame:  # memory is NumPy's in the simulator, where pointers are arrays
    def __init__(self): self.live = {}
    def stream(self): return 7
    def device_ordinal(self): return 0
    def allocate(self, size):
        memory = np.full(size + 16, 0xA5, np.uint8)
        memory = memory[-memory.ctypes.data % 16:][:size]
        self.live[id(memory)] = memory
        return memory
    def free(self, memory, size): del self.live[id(memory)]

class Driver:
    def fill_with_zeros(self, memory, size, stream): assert stream == 7; memory.reshape(-1).view(np.uint8)[:size] = 0
    def copy_memory(self, source, target, size, stream):
        target.reshape(-1).view(np.uint8)[:size] = source.reshape(-1).view(np.uint8)[:size]
    def fetch_memory(self, source, host, stream):
        host.view(np.uint8)[:] = source.reshape(-1).view(np.uint8)[:host.nbytes]

def buffer(array): return Buffer(array.reshape(-1).view(np.uint8), array.shape, array.dtype.name)

def check(kind, mode, layout, settings, dtype):
    x = (np.random.default_rng(0).standard_normal((32, 2, 32)) * 3).astype(ml_dtypes.bfloat16)
    dz = x[:, 0] * 2
    rows, gradient = x.reshape(32, 64), kind == "gradient"
    scale, amax = np.full(1, 4.0, np.float32), np.zeros(1, np.float32)
    call = Call(kind, 4, mode, layout, mode == 0, gradient)
    fp4 = dtype == "float4_e2m1fn"
    columns = 64 if gradient else 32
    operands = [*([buffer(dz)] if gradient else []), buffer(x), buffer(scale), buffer(amax)]
    names = ("rowwise_data", "columnwise_data", "rowwise_scale_inv", "columnwise_scale_inv")
    arguments = ("swiglu", dz, rows) if gradient else ("swiglu", rows)
    function = "activation_grad" if gradient else "activation"
    options = {"dbias": True} if gradient else {}
    if mode == 0:
        wanted = getattr(refops, function)(*arguments, **options)
        memory = [np.zeros((32, columns), ml_dtypes.bfloat16)] + [np.zeros(1, np.float32) for _ in range(3)]
        wanted, sums = wanted if gradient else (wanted, None)
        wanted = [wanted]
    else:
        q = getattr(refops, function + "_quantize")(*arguments, settings, columnwise=layout == 2, **options)
        q, sums = q if gradient else (q, None)
        wanted = [getattr(q, name) for name in names]
        memory = [np.full(1 if w is None else w.shape, 0x5A, np.uint8 if w is None else w.dtype) for w in wanted]
    results = [buffer(m) for m in memory] + [buffer(amax)]
    if mode != 0:
        for i in (0, 1):
            shape = (*memory[i].shape[:-1], memory[i].shape[-1] * 2) if fp4 else memory[i].shape
            results[i] = results[i]._replace(shape=shape, dtype=dtype)
    dbias = np.zeros((2, 32), ml_dtypes.bfloat16)
    results.append(buffer(dbias))
    frame = Frame()
    with CudaPlace(frame, Driver()) as place:
        compute.run(call, place, operands, results)
    assert not frame.live
    for m, w in zip(memory, wanted):
        if w is not None:
            a, b = m.astype(np.float32), np.asarray(w).astype(np.float32)
            assert (a != b).mean() <= 0.01, (kind, mode, layout)
    if gradient:
        np.testing.assert_allclose(dbias.ravel().astype(np.float32), sums.astype(np.float32), rtol=1e-2, atol=1e-2)
    if mode in (0, 1, 3, 4):
        assert amax[0] > 0

E4M3 = refops.E4M3
for kind in ("activation", "gradient"):
    check(kind, 0, 0, None, "bfloat16")
    check(kind, 1, 2, refops.DelayedScaling(E4M3, 4.0), "float8_e4m3fn")
    check(kind, 3, 2, refops.CurrentScaling(E4M3), "float8_e4m3fn")
    check(kind, 2, 2, refops.MXFP8Scaling(E4M3), "float8_e4m3fn")
check("activation", 4, 2, refops.NVFP4Scaling(), "float4_e2m1fn")

def check_all(call, dtype, operands, made, amaxes):
    names = ("rowwise_data", "columnwise_data", "rowwise_scale_inv", "columnwise_scale_inv")
    wanted = [np.concatenate([getattr(q, name).ravel() for q in made]) for name in names]
    memory = [np.full(w.shape, 0x5A, np.uint8) for w in wanted]
    results = [buffer(m) for m in (*memory, operands[-1])]
    packed = 1 + (dtype == "float4_e2m1fn")
    results[:2] = [one._replace(shape=(one.shape[0] * packed,), dtype=dtype) for one in results[:2]]
    frame = Frame()
    with CudaPlace(frame, Driver()) as place:
        compute.run(call, place, [buffer(o) for o in operands], results)
    assert not frame.live
    for m, w in zip(memory, wanted, strict=True):
        np.testing.assert_array_equal(m, w)
    np.testing.assert_array_equal(operands[-1], amaxes)

x = (np.random.default_rng(0).standard_normal((96, 32)) * 3).astype(np.float32)
groups = np.split(x, [32])
made = [refops.quantize(g, refops.MXFP8Scaling(E4M3), columnwise=True).swizzled() for g in groups]
zeros = np.zeros(2, np.float32)
operands = [np.array([32, 64], np.int32), x, zeros + 1, zeros.copy()]
check_all(Call("grouped", 0, 2, 2), "float8_e4m3fn", operands, made, zeros)
x = x.astype(ml_dtypes.bfloat16)
made = refops.quantize(
    x, refops.NVFP4Scaling(rht=True, stochastic_rounding=True, seed=5 | 6 << 32, offset=7 | 8 << 32), columnwise=True
)
call = Call("quantize", 0, 4, 2, use_rht=True, stochastic_rounding=True)
operands = [x, np.array([5, 6, 7, 8], np.uint32), zeros.copy()]
check_all(call, "float4_e2m1fn", operands, [made], [made.amax_rowwise[0], made.amax_columnwise[0]])
print("ok")
"""
    assert run_python(code, NUMBA_ENABLE_CUDASIM="1").strip() == "ok"


def test_on_a_gpu():
    """XLA's buffers and stream on a real device, where JAX has one: nearly all the bits of the host's kernels."""
    code = """
import sys
import numpy as np, jax, jax.numpy as jnp
try:
    jax.devices("gpu")
except RuntimeError:
    print("no GPU")
    sys.exit()
from fuser import xla
def results(x, dz, mode):
    q = lambda: xla.QuantizerFactory.create(scaling_mode=mode, q_layout=2)
    forward = jax.jit(lambda x: xla.act_lu(x, ("silu", "linear"), q(), output_amax_when_no_scaling=True))(x)
    backward = jax.jit(lambda dz, x: xla.quantize_dact_dbias(dz, x, ("silu", "linear"), True, q()))(dz, x)
    return [np.asarray(leaf) for leaf in jax.tree_util.tree_leaves((forward, backward))]
generator = np.random.default_rng(0)
x = jnp.asarray(generator.standard_normal((4, 64, 2, 256)), jnp.bfloat16)
dz = jnp.asarray(generator.standard_normal((4, 64, 256)), jnp.bfloat16)
for mode in xla.ScalingMode:
    with xla.route("ffi"):
        on_gpu = results(x, dz, mode)
    with xla.route("callback"):
        on_host = results(x, dz, mode)
    for a, b in zip(on_gpu, on_host, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape, mode
        differing = (a.astype(np.float32) != b.astype(np.float32)).mean()
        assert differing <= (1e-2 if a.size > 1024 else 1), (mode, a.dtype, differing)
        np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), rtol=0.3, atol=0.3)
print("ok")
"""
    answer = run_python(code, JAX_PLATFORMS="", XLA_PYTHON_CLIENT_PREALLOCATE="false").strip()
    if answer == "no GPU":
        pytest.skip("JAX has no GPU here")
    assert answer == "ok"


# --- imports --------------------------------------------------------------------------------------------


def test_what_is_imported():
    code = "import sys, fuser.xla, fuser.xla.ffi; print('torch' in sys.modules, fuser.xla.ffi._registered)"
    assert run_python(code).strip() == "False {}"
    code = """
import sys
sys.modules["jax"] = None
import fuser
try: import fuser.xla
except ImportError as error: print(error)
"""
    assert run_python(code).strip() == "fuser.xla needs JAX: pip install jax"


def test_the_route_is_chosen_by_scope_then_environment(monkeypatch):
    assert xla.current_route() == "ffi"
    monkeypatch.setenv("FUSER_XLA_ROUTE", "callback")
    assert xla.current_route() == "callback"
    with xla.route("ffi"):
        assert "te_act_lu_ffi" in jax.jit(lambda v: xla.act_lu(v, ("gelu",)).data).lower(jnp.ones((2, 1, 8))).as_text()
    text = jax.jit(lambda v: xla.act_lu(v, ("gelu",)).data).lower(jnp.ones((2, 1, 8))).as_text()
    assert "te_act_lu_ffi" not in text and "callback" in text
    ffi = xla.route("ffi")
    with ffi, ffi:
        assert xla.current_route() == "ffi"
    with ffi:
        assert xla.current_route() == "ffi"
    monkeypatch.setenv("FUSER_XLA_ROUTE", "carrier pigeon")
    with pytest.raises(ValueError, match="FUSER_XLA_ROUTE must be one of"):
        xla.current_route()


@sampled(
    ("mode", "layout"),
    product(
        ["DELAYED_TENSOR_SCALING", "CURRENT_TENSOR_SCALING", "MXFP8_1D_SCALING", "NVFP4_1D_SCALING"],
        xla.QuantizeLayout,
    ),
    2,
    in_all=1,
)
def test_activation_has_one_layout_whatever_the_quantizer_makes(mode, layout):
    """Columnwise copies may be transposed; the activation's result and its gradient are not."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((32, 32, 1, 32)), jnp.float32)
    quantizer = xla.QuantizerFactory.create(scaling_mode=xla.ScalingMode[mode], q_layout=layout)
    want = xla.activation(x, ("gelu",))
    y = xla.activation(x, ("gelu",), quantizer)
    assert y.shape == want.shape
    assert float(jnp.linalg.norm(y - want) / jnp.linalg.norm(want)) < (0.15 if "NVFP4" in mode else 0.06)
    assert jax.grad(lambda v: xla.activation(v, ("gelu",), quantizer).sum())(x).shape == x.shape


def test_one_columnwise_copy_takes_the_quantizer_s_own_layout():
    x = jnp.ones((16, 1, 32), jnp.float32)
    quantizer = xla.CurrentScaleQuantizer(q_layout=xla.QuantizeLayout.COLWISE)
    q = xla.act_lu(x, ("gelu",), quantizer)
    again = xla.ScaledTensorFactory.create(
        None,
        None,
        q.data,
        q.scale_inv,
        scaling_mode=q.scaling_mode,
        data_layout=quantizer.get_data_layout(),
        q_layout=xla.QuantizeLayout.COLWISE,
    )
    assert again.data_layout == q.data_layout == "T"


@pytest.mark.parametrize("error", ["surrogate", "unprintable"])
def test_an_error_that_cannot_be_shown_is_an_error_all_the_same(monkeypatch, error):
    class UnprintableError(ValueError):
        def __str__(self):
            raise RuntimeError("no words")

    def fail(*args, **kwargs):
        raise ValueError("sur\udcff") if error == "surrogate" else UnprintableError()

    monkeypatch.setattr(xla.ffi, "run", fail)
    with xla.route("ffi"), pytest.raises(jax.errors.JaxRuntimeError, match=r"ValueError|UnprintableError"):
        xla.act_lu(jnp.ones((4, 1, 24), jnp.float32), ("gelu",)).data.block_until_ready()
