"""Dispatch: no copies, the same bits from every backend, what a backend is chosen by, float64 for gradcheck."""

import dataclasses
import functools
import re
import sys
import threading

import ml_dtypes
import numpy as np
import pytest
import torch
from one_rounding import same_bits
from torch._subclasses.fake_tensor import FakeTensorMode

import fuser
import refops
from cuda_kernels import host
from cuda_kernels.described import Plans
from cuda_kernels.host import calls
from cuda_kernels.result import Quantized as DeviceQuantized
from fuser import dispatch, functional
from fuser.dispatch import Buffers, as_numpy, as_torch, backend, current_backend
from refops import oracle
from tiers import sampled

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FP8 = (refops.E4M3, refops.E5M2)
SCALINGS = (
    *[refops.DelayedScaling(fmt, 3.5) for fmt in FP8],
    *[refops.CurrentScaling(fmt, power_2_scale=fmt is refops.E5M2) for fmt in FP8],
    *[refops.BlockScaling(refops.E4M3, dim) for dim in (1, 2)],
    *[refops.MXFP8Scaling(fmt) for fmt in FP8],
    refops.MXFP8Scaling(refops.E4M3, two_d=True),
    refops.NVFP4Scaling(),
    refops.NVFP4Scaling(two_d=True),
    refops.NVFP4Scaling(rht=True),
    refops.NVFP4Scaling(stochastic_rounding=True, seed=7, offset=3),
    refops.NVFP4Scaling(row_scaled=True),
    refops.NVFP4Scaling(four_over_six="mae", e4m3_max=256),
)
DROPPED = {
    direction: dict.fromkeys((f"{direction}_data", f"{direction}_scale_inv", f"amax_{direction}"))
    for direction in ("rowwise", "columnwise")
}
DIRECTIONS = ((True, False), (False, True), (True, True))
#: Transcendental values may differ in the last bit of float32 between backends; these are the same everywhere.
EXACT = ("relu", "srelu", "reglu", "sreglu")


def ids(value):
    return repr(value) if not isinstance(value, torch.dtype) else str(value).removeprefix("torch.")


def sample(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 3).to(dtype)


def assert_same_buffers(actual, expected):
    """`expected`: Buffers, or a refops.Quantized."""
    for name in dispatch.TENSOR_FIELDS:
        one, other = getattr(actual, name), getattr(expected, name)
        assert (one is None) == (other is None), name
        if one is not None:
            other = other if isinstance(other, torch.Tensor) else as_torch(other)
            assert same_bits(one, other), name
    assert actual.scaling == expected.scaling
    assert actual.shape == tuple(expected.shape)
    assert actual.with_gemm_swizzled_scales == expected.with_gemm_swizzled_scales


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8], ids=ids)
def test_views_share_memory_in_both_directions(dtype):
    tensor = torch.arange(24).reshape(4, 6).to(dtype)[:, ::2]
    array = as_numpy(tensor)
    assert array.ctypes.data == tensor.data_ptr() and array.shape == (4, 3)
    assert dtype is not torch.bfloat16 or array.dtype == ml_dtypes.bfloat16
    back = as_torch(array)
    assert back.data_ptr() == tensor.data_ptr() and back.dtype == dtype and back.stride() == tensor.stride()
    back[1, 1] = 42
    assert tensor[1, 1] == 42 and array[1, 1] == 42


def test_view_of_a_parameter_and_of_a_negated_tensor():
    parameter = torch.nn.Parameter(torch.ones(3))
    assert as_numpy(parameter).ctypes.data == parameter.data_ptr()
    negative = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    assert negative.is_neg() and as_numpy(negative).tolist() == [-2, 4]


class Recorder:
    """A library that notes the addresses of arrays that go in and come out."""

    def __init__(self, library):
        self._library, self.read, self.made = library, [], []

    def __getattr__(self, name):
        def call(*args, **kwargs):
            arrays = [a for a in args if isinstance(a, np.ndarray)]
            quantized = [a for a in args if isinstance(a, refops.Quantized)]
            self.read += [a.ctypes.data for a in [*arrays, *fields(quantized)]]
            result = getattr(self._library, name)(*args, **kwargs)
            results = result if isinstance(result, tuple) else (result,)
            made = [r for r in results if isinstance(r, np.ndarray)]
            quantized = [r for r in results if isinstance(r, refops.Quantized)]
            self.made += [a.ctypes.data for a in [*made, *fields(quantized)]]
            return result

        return call


def fields(quantized):
    found = [getattr(q, name) for q in quantized for name in dispatch.TENSOR_FIELDS]
    return [array for array in found if array is not None]


@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
@pytest.mark.parametrize("which", ["auto", "reference"])
def test_calls_copy_nothing(monkeypatch, dtype, which):
    with backend(which):
        engine = dispatch._engine(torch.zeros(1))
    recorder = Recorder(engine.library)
    monkeypatch.setattr(engine, "library", recorder)
    monkeypatch.setattr(dispatch, "_engine_on", lambda *_: engine)
    x, dy, scales = sample((32, 64), dtype), sample((32, 32), dtype, 1), sample((32,), dtype, 2)

    def check(read, results):
        assert recorder.read == [tensor.data_ptr() for tensor in read]
        assert recorder.made == [tensor.data_ptr() for tensor in results]
        recorder.read.clear()
        recorder.made.clear()

    monkeypatch.setattr(calls, "PLANS", Plans())  # no call was made before
    with backend(which):
        check([x], [dispatch.activation("swiglu", x)])
        check([dy, x], dispatch.activation_grad("swiglu", dy, x, dbias=True))
        check([x, scales], [dispatch.scaled_activation("swiglu", x, scales)])
        check([dy, x, scales], dispatch.scaled_activation_grad("swiglu", dy, x, scales))
        for scaling in (refops.CurrentScaling(refops.E4M3), refops.MXFP8Scaling(refops.E4M3), refops.NVFP4Scaling()):
            options = {"rowwise": True, "columnwise": True}
            buffers, dbias = dispatch.quantize(x, scaling, **options, dbias=True)
            check([x], [dbias, *buffers.tensors.values()])
            check([x], dispatch.activation_quantize("swiglu", x, scaling, **options).tensors.values())
            check([dy, x], dispatch.activation_grad_quantize("swiglu", dy, x, scaling, **options).tensors.values())
            rowwise = [buffers.rowwise_data, buffers.rowwise_scale_inv, buffers.amax_rowwise]
            check([t for t in rowwise if t is not None], [dispatch.dequantize(buffers, dtype=dtype)])


# --- the same bits from every backend, and those of refops -------------------------------------------


@pytest.mark.parametrize("scaling", SCALINGS, ids=ids)
def test_casts_agree_bit_for_bit(scaling):
    for dtype in DTYPES:
        x = sample((64, 96), dtype)
        x[0, :3] = torch.tensor([0.0, -0.0, 1e30 if dtype is not torch.float16 else 6e4]).to(dtype)
        for rowwise, columnwise in DIRECTIONS:
            options = {"rowwise": rowwise, "columnwise": columnwise}
            buffers, dbias = dispatch.quantize(x, scaling, **options, dbias=True)
            with backend("reference"):
                expected, expected_dbias = dispatch.quantize(x, scaling, **options, dbias=True)
            transformed = columnwise and getattr(scaling, "rht", False)  # its sums have several right orders
            if transformed:
                for one in (buffers, expected):
                    oracle.check("quantize", x, one.tensors, scaling=scaling).raise_for_mismatch()
            else:
                assert_same_buffers(buffers, expected)
                assert_same_buffers(buffers, refops.quantize(as_numpy(x), scaling, **options))
            assert same_bits(dbias, expected_dbias)
            assert buffers.dtype is dtype and buffers.device == x.device
            for which in [True] * columnwise + [False] * rowwise:
                values = dispatch.dequantize(expected, dtype=dtype, columnwise=which)
                with backend("reference"):
                    reference = dispatch.dequantize(expected, dtype=dtype, columnwise=which)
                if which and transformed:
                    torch.testing.assert_close(values, reference)
                else:
                    assert same_bits(values, reference)
                assert values.shape == x.shape and values.dtype is dtype
                if not transformed:
                    wanted = dataclasses.replace(
                        refops.quantize(as_numpy(x), scaling, **options),
                        **DROPPED["rowwise" if which else "columnwise"],
                    )
                    assert same_bits(values, as_torch(refops.dequantize(wanted, dtype=as_numpy(x).dtype)))


@pytest.mark.parametrize("name", EXACT)
def test_quantized_activations_agree_bit_for_bit(name):
    gated = refops.ACTIVATIONS[name].gated
    x, dy = sample((32, 128), torch.bfloat16), sample((32, 64 if gated else 128), torch.bfloat16, 1)
    for scaling in SCALINGS:
        if getattr(scaling, "rht", False):
            continue
        options = {"rowwise": True, "columnwise": True}
        results = []
        for which in ("auto", "reference"):
            with backend(which):
                y = dispatch.activation_quantize(name, x, scaling, **options)
                results.append((y, *dispatch.activation_grad_quantize(name, dy, x, scaling, **options, dbias=True)))
        for one, other in zip(*results, strict=True):
            if isinstance(one, Buffers):
                assert_same_buffers(one, other)
            else:
                assert same_bits(one, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
@sampled("name", refops.ACTIVATIONS, 3)
def test_activations_of_both_backends_lie_in_the_enclosure(name, dtype):
    gated = refops.ACTIVATIONS[name].gated
    x = sample((24, 64), dtype)
    dy = sample((24, 32 if gated else 64), dtype, 1)
    scaled = name in refops.SCALED_ACTIVATIONS
    prefix, _, last = name.rpartition("_")
    gradient = f"{prefix}_d{last}" if prefix else f"d{last}"
    scales = sample((24,), dtype, 2)
    for which in ("auto", "reference"):
        with backend(which):
            y = dispatch.activation(name, x)
            dx, dbias = dispatch.activation_grad(name, dy, x, dbias=True)
            oracle.check(name, x, {"y": y}).raise_for_mismatch()
            oracle.check(gradient, {"x": x, "dy": dy}, {"dx": dx, "dbias": dbias}).raise_for_mismatch()
            if scaled:
                inputs = {"x": x, "row_scales": scales}
                y = dispatch.scaled_activation(name, x, scales)
                dx, dscales = dispatch.scaled_activation_grad(name, dy, x, scales)
                oracle.check(f"scaled_{name}", inputs, {"y": y}).raise_for_mismatch()
                outputs = {"dx": dx, "drow_scales": dscales}
                oracle.check(f"scaled_{gradient}", inputs | {"dy": dy}, outputs).raise_for_mismatch()


def test_out_dtype_and_parameters():
    x = sample((8, 64), torch.bfloat16)
    for which in ("auto", "reference"):
        with backend(which):
            y = dispatch.activation("clamped_swiglu", x, out_dtype=torch.float32, limit=1.5, alpha=1.0)
            expected = refops.activation("clamped_swiglu", as_numpy(x), out_dtype=np.float32, limit=1.5, alpha=1.0)
            torch.testing.assert_close(y, as_torch(expected), rtol=1e-6, atol=1e-6)
            with pytest.raises(TypeError, match="out_dtype"):
                dispatch.activation("gelu", x, out_dtype=torch.int32)
            with pytest.raises(TypeError, match="gelu takes no parameter 'limit'"):
                dispatch.activation("gelu", x, limit=1.0)


def test_interleaved_rows():
    x, scales, dy = sample((6, 192), torch.float32), sample((6,), torch.float32, 1), sample((6, 96), torch.float32, 2)
    plain = x.unflatten(-1, (3, 2, 32)).transpose(1, 2).reshape(6, 192)
    for which in ("auto", "reference", "float64"):
        if which == "float64":
            x, plain, scales, dy = (t.double() for t in (x, plain, scales, dy))
        with backend(which):
            y = dispatch.scaled_activation("swiglu", x, scales, glu_interleave_size=32)
            dx, dscales = dispatch.scaled_activation_grad("swiglu", dy, x, scales, glu_interleave_size=32)
            expected_dx, expected_dscales = dispatch.scaled_activation_grad("swiglu", dy, plain, scales)
            assert torch.equal(y, dispatch.scaled_activation("swiglu", plain, scales))
            assert torch.equal(dx.unflatten(-1, (3, 2, 32)).transpose(1, 2).reshape(6, 192), expected_dx)
            assert torch.equal(dscales, expected_dscales)


# --- shapes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["auto", "reference"])
@pytest.mark.parametrize("shape", [(64,), (0, 64), (3, 0, 64), (2, 3, 64), (5, 0)], ids=str)
def test_any_rank_and_empty(shape, which):
    x = sample(shape, torch.bfloat16)
    with backend(which):
        y = dispatch.activation("swiglu", x)
        assert y.shape == (*shape[:-1], shape[-1] // 2) and y.dtype is x.dtype
        dx, dbias = dispatch.activation_grad("swiglu", y, x, dbias=True)
        assert dx.shape == x.shape and dbias.shape == shape[-1:]
        if 0 in shape[:-1]:
            assert not dbias.any()
        for scaling in (refops.DelayedScaling(refops.E4M3), refops.CurrentScaling(refops.E4M3),
                        refops.BlockScaling(refops.E4M3), refops.MXFP8Scaling(refops.E4M3)):  # fmt: skip
            buffers = dispatch.quantize(x, scaling, rowwise=True, columnwise=True)
            assert buffers.shape == shape
            for columnwise in (False, True):
                back = dispatch.dequantize(buffers, dtype=torch.bfloat16, columnwise=columnwise)
                assert back.shape == x.shape
                torch.testing.assert_close(back.float(), x.float(), rtol=0.13, atol=0.1)
        assert dispatch.amax(x).shape == (1,)


@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
def test_non_contiguous(dtype):
    base = sample((64, 96), dtype)
    for view in (base.t(), base[::2, 32:], base.expand(3, 64, 96), base[:, ::3]):
        for which in ("auto", "reference"):
            with backend(which):
                assert torch.equal(dispatch.activation("gelu", view), dispatch.activation("gelu", view.contiguous()))
                for scaling in (refops.CurrentScaling(refops.E4M3), refops.MXFP8Scaling(refops.E4M3)):
                    both = {"rowwise": True, "columnwise": True}
                    contiguous = dispatch.quantize(view.contiguous(), scaling, **both)
                    assert_same_buffers(dispatch.quantize(view, scaling, **both), contiguous)
                assert torch.equal(dispatch.amax(view), view.abs().max().float().reshape(1))


def test_amax_ignores_nan():
    x = torch.tensor([[1.0, float("nan"), -7.0]])
    for which in ("auto", "reference"):
        with backend(which):
            assert dispatch.amax(x).tolist() == [7.0] and dispatch.amax(x).dtype is torch.float32
            assert dispatch.amax(torch.zeros(0, 4)).tolist() == [0.0]


def test_swizzled_scales_are_undone():
    x = sample((160, 256), torch.bfloat16)
    for scaling in (refops.MXFP8Scaling(refops.E4M3), refops.NVFP4Scaling()):
        buffers = dispatch.quantize(x, scaling, rowwise=True, columnwise=True)
        moved = dispatch.swizzled(buffers)
        assert moved.with_gemm_swizzled_scales
        expected = refops.quantize(as_numpy(x), scaling, rowwise=True, columnwise=True).swizzled()
        assert_same_buffers(moved, expected)
        for columnwise in (False, True):
            one, other = (dispatch.dequantize(b, columnwise=columnwise) for b in (buffers, moved))
            assert torch.equal(one, other)


def test_update_delayed_scale():
    history = torch.tensor([[4.0, 0.0], [2.0, 1.0], [8.0, 3.0]])
    scale = torch.tensor([1.0, 5.0])
    for which in ("auto", "reference"):
        with backend(which):
            for algorithm in ("max", "most_recent", lambda h: h.amax(0)):
                new = dispatch.update_delayed_scale(history, scale, refops.E4M3, margin=1, algorithm=algorithm)
                function = (lambda h: h.max(0)) if callable(algorithm) else algorithm
                expected = refops.update_delayed_scale(
                    history.numpy(), scale.numpy(), refops.E4M3, margin=1, algorithm=function
                )
                for one, other in zip(new, expected, strict=True):
                    assert np.array_equal(one.numpy(), other)
            one_column = dispatch.update_delayed_scale(history[:, 0].clone(), scale[:1], refops.E5M2)
            assert one_column[0].shape == (3,) and one_column[1].shape == (1,)
            scalar = dispatch.update_delayed_scale(history[:, 0].clone(), torch.tensor(1.0), refops.E5M2)
            assert scalar[1].shape == () and scalar[1] == one_column[1][0]
    assert history[0, 0] == 4.0


# --- which backend --------------------------------------------------------------------------------


def test_backend_nests_and_ends(monkeypatch):
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    assert current_backend() == "auto"
    with backend("reference") as name:
        assert name == current_backend() == "reference"
        with backend("float64"):
            assert current_backend() == "float64"
        assert current_backend() == "reference"
        with pytest.raises(RuntimeError), backend("auto"):
            raise RuntimeError
        assert current_backend() == "reference"
    assert current_backend() == "auto"


def test_backend_decorates():
    @backend("reference")
    def name():
        return current_backend()

    assert name() == "reference" and name() == "reference"


def test_backend_of_other_threads():
    seen = {}

    def work(key):
        seen[key] = current_backend()
        with backend("float64"):
            seen[key, "inside"] = current_backend()

    with backend("reference"):
        thread = threading.Thread(target=work, args=("other",))
        thread.start()
        thread.join()
        assert current_backend() == "reference"
    assert seen == {"other": "auto", ("other", "inside"): "float64"}


def test_environment_variable(monkeypatch):
    monkeypatch.setenv(dispatch.VARIABLE, "reference")
    assert current_backend() == "reference"
    assert isinstance(dispatch._engine(torch.zeros(1)), dispatch.Reference)
    with backend("auto"):
        assert current_backend() == "auto"
    monkeypatch.setenv(dispatch.VARIABLE, "")
    assert current_backend() == "auto"
    monkeypatch.setenv(dispatch.VARIABLE, "cuda")
    with pytest.raises(ValueError, match=r"FUSER_BACKEND must be one of 'auto', .*got 'cuda'"):
        dispatch.activation("gelu", torch.zeros(1))


@pytest.mark.parametrize("wrong", ["Reference", "", None, 3])
def test_wrong_backend(wrong):
    with pytest.raises(ValueError, match="name must be one of 'auto', 'reference', 'exact', 'float64'; got"):
        backend(wrong)


def test_reference_computes_with_refops(monkeypatch):
    x = sample((4, 32), torch.bfloat16)
    calls = []
    original = refops.activation
    monkeypatch.setattr(refops, "activation", lambda *a, **k: calls.append(a[0]) or original(*a, **k))
    dispatch.activation("gelu", x)
    assert not calls
    with backend("reference"):
        y = dispatch.activation("gelu", x)
    assert calls == ["gelu"]
    assert np.array_equal(as_numpy(y), original("gelu", as_numpy(x)))


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["auto", "reference"])
def test_wrong_tensors(which):
    x = torch.zeros(2, 4)
    with backend(which):
        for wrong in (x.double(), x.int(), x.numpy(), None, x.to("meta")):
            with pytest.raises(TypeError, match="x must be"):
                dispatch.activation("gelu", wrong)
            with pytest.raises(TypeError, match="dy must be"):
                dispatch.activation_grad("gelu", wrong, x)
            with pytest.raises(TypeError, match="scales must be"):
                dispatch.scaled_activation("srelu", x, wrong)
        with pytest.raises(ValueError, match="dy must have the shape"):
            dispatch.activation_grad("gelu", x[:1], x)
        with pytest.raises(TypeError, match="dy and x must have the same dtype"):
            dispatch.activation_grad("gelu", x.half(), x)
        with pytest.raises(ValueError, match="even last dimension"):
            dispatch.activation("swiglu", x[:, :3])
        with pytest.raises(ValueError, match="name must be one of"):
            dispatch.activation("tanh", x)
        with pytest.raises(ValueError, match="rowwise or columnwise must be True"):
            dispatch.quantize(x, refops.CurrentScaling(refops.E4M3), rowwise=False, columnwise=False)
        with pytest.raises(ValueError, match="16"):
            dispatch.quantize(x, refops.NVFP4Scaling())


def test_wrong_buffers():
    x = sample((4, 32), torch.float32)
    buffers = dispatch.quantize(x, refops.MXFP8Scaling(refops.E4M3))
    with pytest.raises(ValueError, match="columnwise_data"):
        dispatch.dequantize(buffers, columnwise=True)
    with pytest.raises(TypeError, match="dtype must be"):
        dispatch.dequantize(buffers, dtype=torch.float64)
    with pytest.raises(TypeError, match="buffers must be Buffers"):
        dispatch.dequantize(x)
    empty = Buffers(scaling=buffers.scaling, shape=(4, 32), dtype=torch.float32)
    with pytest.raises(ValueError, match="neither"):
        dispatch.dequantize(empty)


# --- a GPU's library, torch.compile ------------------------------------------------------------------


class LibraryOfTensors:
    """Stands for `cuda_kernels`: takes and returns torch tensors, and its own kind of quantized tensor."""

    def __getattr__(self, name):
        return lambda *args, **kwargs: self._outward(
            getattr(refops, name)(*map(self._inward, args), **{k: self._inward(v) for k, v in kwargs.items()})
        )

    def amax(self, x):
        return x.abs().max().float().reshape(1)

    def _inward(self, value):
        if isinstance(value, torch.Tensor):
            return as_numpy(value)
        if isinstance(value, torch.dtype):
            return as_numpy(torch.zeros(1, dtype=value)).dtype
        if isinstance(value, DeviceQuantized):
            arrays = {name: as_numpy(tensor) for name, tensor in value.arrays.items()}
            return refops.Quantized(**arrays, scaling=value.scaling, shape=value.shape, dtype=np.dtype(value.dtype))
        return value

    def _outward(self, value):
        if isinstance(value, tuple):
            return tuple(map(self._outward, value))
        if isinstance(value, refops.Quantized):
            arrays = {name: getattr(value, name) for name in dispatch.TENSOR_FIELDS}
            arrays = {name: as_torch(array) for name, array in arrays.items() if array is not None}
            return DeviceQuantized(**arrays, scaling=value.scaling, shape=value.shape, dtype=value.dtype.name)
        return as_torch(np.asarray(value))


def test_a_library_of_tensors(monkeypatch):
    """What goes to and comes from `cuda_kernels`, on the CPU."""
    monkeypatch.setattr(dispatch, "_engine_on", lambda *_: dispatch.Kernels(LibraryOfTensors()))
    x, dy, scales = sample((32, 64), torch.float16), sample((32, 32), torch.float16, 1), sample((32,), torch.float16, 2)
    arrays = [as_numpy(t) for t in (dy, x, scales)]
    y = dispatch.activation("swiglu", x, out_dtype=torch.bfloat16)
    assert same_bits(y, as_torch(refops.activation("swiglu", arrays[1], out_dtype=ml_dtypes.bfloat16)))
    results = dispatch.scaled_activation_grad("swiglu", dy, x, scales)
    for one, other in zip(results, refops.scaled_activation_grad("swiglu", *arrays), strict=True):
        assert same_bits(one, as_torch(other))
    scaling = refops.MXFP8Scaling(refops.E4M3)
    buffers, dbias = dispatch.activation_grad_quantize("swiglu", dy, x, scaling, columnwise=True, dbias=True)
    expected, expected_dbias = refops.activation_grad_quantize(
        "swiglu", *arrays[:2], scaling, columnwise=True, dbias=True
    )
    assert_same_buffers(buffers, expected)
    assert same_bits(dbias, as_torch(expected_dbias)) and buffers.dtype is torch.float16
    back = dispatch.dequantize(buffers, dtype=torch.float32)
    assert same_bits(back, as_torch(refops.dequantize(expected)))
    history, scale = dispatch.update_delayed_scale(torch.ones(3, 1), torch.ones(1), refops.E4M3)
    assert history.shape == (3, 1) and scale.tolist() == [448.0] and dispatch.amax(x).shape == (1,)


def test_torch_compile():
    x = sample((8, 64), torch.float32)

    def step(x):
        y = dispatch.activation("swiglu", x) * 2
        return dispatch.dequantize(dispatch.quantize(y, refops.CurrentScaling(refops.E4M3))) + 1

    assert torch.equal(torch.compile(step, backend="eager")(x), step(x))


# --- float64 --------------------------------------------------------------------------------------


class Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, name):
        ctx.name = name
        ctx.save_for_backward(x)
        return dispatch.activation(name, x)

    @staticmethod
    def backward(ctx, dy):
        return dispatch.activation_grad(ctx.name, dy, *ctx.saved_tensors), None


class ScaledActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scales, name, g):
        ctx.name, ctx.g = name, g
        ctx.save_for_backward(x, scales)
        return dispatch.scaled_activation(name, x, scales, glu_interleave_size=g)

    @staticmethod
    def backward(ctx, dy):
        return *dispatch.scaled_activation_grad(ctx.name, dy, *ctx.saved_tensors, glu_interleave_size=ctx.g), None, None


@pytest.mark.parametrize("name", refops.ACTIVATIONS)
def test_gradcheck_in_float64(name):
    x = sample((3, 12), torch.float64)
    x[x.abs() < 0.05] = 0.5  # away from the corner of relu
    x.requires_grad_()
    scales = sample((3,), torch.float64, 1).requires_grad_()
    with backend("float64"):
        assert torch.autograd.gradcheck(Activation.apply, (x, name))
        if name in refops.SCALED_ACTIVATIONS:
            for g in [0, 2] if refops.ACTIVATIONS[name].gated else [0]:
                assert torch.autograd.gradcheck(ScaledActivation.apply, (x, scales, name, g))


def test_float64_is_the_true_function():
    x = sample((5, 6), torch.float64)
    with backend("float64"):
        torch.testing.assert_close(dispatch.activation("silu", x), torch.nn.functional.silu(x), rtol=1e-14, atol=1e-14)
        expected = torch.nn.functional.gelu(x, approximate="tanh")
        torch.testing.assert_close(dispatch.activation("gelu", x), expected, rtol=1e-6, atol=1e-7)
        dx, dbias = dispatch.activation_grad("silu", x, x, dbias=True)
        torch.testing.assert_close(dbias, dx.sum(0))
        single = dispatch.activation("gelu", x.float())
        assert single.dtype is torch.float32
        with pytest.raises(TypeError, match="float64 only in activations"):
            dispatch.quantize(x, refops.CurrentScaling(refops.E4M3))


def test_sparse_tensors_are_refused_by_name():
    x = torch.eye(4).to_sparse()
    for call in (
        lambda: dispatch.activation("gelu", x),
        lambda: dispatch.quantize(x, refops.MXFP8Scaling(refops.E4M3)),
    ):
        with pytest.raises(TypeError, match=r"x must be a dense tensor; got torch.sparse_coo of shape \(4, 4\)"):
            call()


# --- calls that are made again ----------------------------------------------------------------------


def functions_called(call):
    """(module, name) of every Python function that a call runs."""
    found = []

    def note(frame, event, argument):
        if event == "call":
            found.append((frame.f_globals.get("__name__", ""), frame.f_code.co_name))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


TO_STORAGE, TO_TENSOR = (fuser.MXFP8Quantizer(fuser.DType.kFloat8E4M3) for _ in range(2))
TO_STORAGE.internal = True
CURRENT = refops.CurrentScaling(refops.E4M3)


@functools.cache
def quantized_ones():
    return TO_STORAGE(torch.ones(32, 64))


#: name -> (call of tensors x and gated x, its checks once all is known: each of them once).
AGAIN = {
    "gelu": (lambda x, g: functional.gelu(x), set()),
    "dgelu": (lambda x, g: functional.dgelu(x, x), {"_check_backward", "_require_activation", "_require_input"}),
    "swiglu -> MXFP8": (
        lambda x, g: functional.swiglu(g, TO_STORAGE),
        {
            "_require_activation",
            "_require_input",
            "_require_quantizer",
            "check_shape",
            "_require_divisible",
        },
    ),
    "quantize": (
        lambda x, g: TO_TENSOR(x),
        {"check_shape", "_require_divisible"},
    ),
    "dispatch.quantize": (lambda x, g: dispatch.quantize(x, CURRENT), set()),
    "dispatch.quantize and sums": (lambda x, g: dispatch.quantize(x, CURRENT, dbias=True), set()),
    "amax": (lambda x, g: dispatch.amax(x), set()),
    "dequantize": (lambda x, g: quantized_ones().dequantize(), {"_require_data"}),
}
#: Checks whose arguments are not those of the call: what the CPU does, and two tensors that are each checked once.
OTHER_CHECKS, TWO_TENSORS = {"require_subnormals"}, {"dgelu": {"_require_input"}}


#: Calls with a result that Python code stores, the sums of columns: a NumPy array, whose bytes are filled and which
#: becomes a tensor.
STORED_FROM_PYTHON = {"dispatch.quantize and sums"}


@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
@pytest.mark.parametrize("name", AGAIN)
def test_a_call_made_again_checks_and_boxes_nothing_twice(name, dtype):
    call, expected = AGAIN[name]
    x, gated = sample((32, 64), dtype), sample((32, 128), dtype)
    for _ in range(3):
        call(x, gated)
    called = functions_called(lambda: call(x, gated))
    checks = [one for _, one in called if re.match("_?(require|check)", one) and one not in OTHER_CHECKS]
    assert set(checks) == expected
    assert {one for one in checks if checks.count(one) > 1} == TWO_TENSORS.get(name, set())
    boxing = {"as_numpy", "as_torch", "as_array", "as_bytes", "operand", "_from_torch"}
    boxed = {"as_torch", "as_bytes"} if name in STORED_FROM_PYTHON else set()
    assert boxing & {one for _, one in called} == boxed
    assert ("refops.quantization.result", "__post_init__") not in called


def test_a_plan_is_not_taken_for_others():
    """A plan serves no other backend, memory or dtype, and no call that only `cuda_kernels.host` has planned."""
    x = sample((8, 64), torch.float32)
    first = [dispatch.activation("relu", x) for _ in range(3)]
    assert same_bits(first[2], first[0]) and len({y.data_ptr() for y in first}) == 3
    with backend("reference"):
        called = functions_called(lambda: dispatch.activation("relu", x))
        assert ("fuser.dispatch", "as_numpy") in called
    turned = x.reshape(64, 8).t()
    assert same_bits(dispatch.activation("relu", turned), torch.relu(turned).contiguous())
    assert same_bits(dispatch.activation("relu", -x), torch.relu(-x))
    negative = torch._neg_view(x)
    assert negative.is_neg() and same_bits(dispatch.activation("relu", negative), torch.relu(-x))
    parameter = torch.nn.Parameter(x)
    assert same_bits(dispatch.activation("relu", parameter), first[0])
    with FakeTensorMode(), pytest.raises(TypeError, match="memory of their own"):
        dispatch.activation("relu", x)
    with torch.device("meta"):
        assert same_bits(dispatch.activation("relu", x), first[0])
    for _ in range(2):
        host.activation("relu", x.numpy())
        with pytest.raises(TypeError, match="x must be a plain torch tensor"):
            dispatch.activation("relu", x.numpy())
    with pytest.raises(TypeError, match="float64"):
        dispatch.activation("relu", x.double())
