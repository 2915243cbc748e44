"""Quantized tensors of other packages as outputs and inputs: fuser's, and tensors with TE's attributes."""

from types import SimpleNamespace

import numpy as np
import pytest

import refops
from refops import oracle
from refops.oracle.quantized_tensors import is_quantized, is_swizzled, parts_of

torch = pytest.importorskip("torch")

from fuser.dispatch import Buffers  # noqa: E402
from fuser.quantization import storage, tensor  # noqa: E402

E4M3 = refops.E4M3
X = torch.from_numpy(np.random.default_rng(0).standard_normal((128, 256)).astype(np.float32)).bfloat16()
#: Name of the scaling -> fuser's class for it: a torch.Tensor with "Storage" left out.
CLASSES = {
    "mxfp8": "MXFP8TensorStorage",
    "current": "Float8TensorStorage",
    "block-1x128": "Float8BlockwiseQTensorStorage",
    "nvfp4": "NVFP4TensorStorage",
    "mxint8": "BlockScaledTensorStorage",
}


def made(name, *, internal=False, swizzled=False):
    """A tensor of fuser, whose kernels give these arrays (`tests/fuser`)."""
    q = quantized(refops.scalings.named(name), swizzled)
    arrays = {name: torch.from_numpy(array) for name, array in oracle.operation.arrays_of(q).items()}
    buffers = Buffers(
        **arrays, scaling=q.scaling, shape=q.shape, dtype=torch.bfloat16, with_gemm_swizzled_scales=swizzled
    )
    if internal:
        return getattr(storage, CLASSES[name])(buffers)
    return getattr(tensor, CLASSES[name].removesuffix("Storage"))(buffers)


def te_like(q, class_name, **more):
    """A tensor of refops' with TE's attributes: uint8 codes, torch arrays, what is not there None."""
    arrays = {
        f"_{name}": None for name in ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
    }
    arrays |= {f"_{name}": torch.from_numpy(array) for name, array in oracle.operation.arrays_of(q).items()}
    return type(class_name, (SimpleNamespace,), {})(**arrays, **more)


def quantized(scaling, swizzled=False):
    x = X.view(torch.int16).numpy().view(refops.arguments.BFLOAT16)
    q = refops.quantize(x, scaling, columnwise=True)
    return q.swizzled() if swizzled else q


def wrong_names(report):
    return [array.name for array in report.arrays if not array.ok]


# --- fuser ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("internal", [False, True])
@pytest.mark.parametrize("name", CLASSES)
def test_tensors_of_fuser(name, internal):
    q = made(name, internal=internal)
    report = oracle.check("quantize", X, q, scaling=name)
    assert report.ok and {"rowwise_data", "columnwise_data"} <= {array.name for array in report.arrays}
    q.buffers.columnwise_data.view(-1)[5] ^= 8
    assert wrong_names(oracle.check("quantize", X, q, scaling=name, diagnose=False)) == ["columnwise_data"]


def test_swizzled_tensors_of_fuser():
    q = made("mxfp8", swizzled=True)
    assert is_swizzled(q) and is_swizzled({"q": q}) and not is_swizzled(made("mxfp8"))
    assert oracle.check("quantize", X, q, scaling="mxfp8").ok
    assert oracle.check("dequantize", q, refops.dequantize(quantized(q.buffers.scaling))).ok


@pytest.mark.parametrize("name", CLASSES)
def test_tensors_of_fuser_are_dequantized_with_their_own_scaling(name):
    q = made(name)
    y = torch.from_numpy(refops.dequantize(quantized(refops.scalings.named(name)), dtype=np.float32)).bfloat16()
    assert oracle.check("dequantize", q, y).ok
    assert not oracle.check("dequantize", q, -y, diagnose=False).ok
    assert oracle.acceptable("dequantize", q).lower.dtype == refops.arguments.BFLOAT16


def test_a_tensor_beside_its_bias_gradient():
    q, dbias = made("mxfp8"), X.float().sum(0).bfloat16()
    for name in ("q", "y", "dx"):
        report = oracle.check("quantize", X, {name: q, "dbias": dbias}, scaling="mxfp8")
        assert report.ok and "dbias" in {array.name for array in report.arrays}
    report = oracle.check("quantize", X, {"q": q, "dbias": dbias + 9}, scaling="mxfp8", diagnose=False)
    assert wrong_names(report) == ["dbias"]


# --- TE ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize(
    ("name", "more"), [("mxfp8", {"_fp8_dtype": "kFloat8E4M3"}), ("nvfp4", {"_fp4_dtype": "kFloat4E2M1"})]
)
def test_tensors_like_te(name, more, swizzled):
    q = quantized(refops.scalings.named(name), swizzled)
    te = te_like(q, "TETensor", _with_gemm_swizzled_scales=swizzled, **more)
    report = oracle.check("quantize", X, te, scaling=name)
    assert report.ok and len(report.arrays) == len(oracle.operation.arrays_of(q))
    assert oracle.check("dequantize", te, refops.dequantize(q), scaling=name).ok
    te._columnwise_scale_inv = te._columnwise_scale_inv ^ 1
    assert "columnwise_scale_inv" in wrong_names(oracle.check("quantize", X, te, scaling=name, diagnose=False))


def test_blocks_like_te():
    q = quantized(refops.scalings.named("block-1x128"))
    te = te_like(q, "Float8BlockwiseQTensor", _fp8_dtype="kFloat8E4M3", _is_2D_scaled=False)
    assert oracle.check("quantize", X, te, scaling="block-1x128").ok


@pytest.mark.parametrize("invalid", [False, True])
def test_fp8_with_one_scale_like_te(invalid):
    q = quantized(refops.CurrentScaling(E4M3))
    transposed = torch.from_numpy(q.columnwise_data)
    te = SimpleNamespace(
        _data=torch.from_numpy(q.rowwise_data),
        _scale_inv=torch.from_numpy(q.rowwise_scale_inv),
        _transpose=transposed ^ 8 if invalid else transposed,  # what is invalid is not read
        _transpose_invalid=invalid,
        _fp8_dtype="DType.kFloat8E4M3",
    )
    report = oracle.check("quantize", X, te, scaling="current")
    assert report.ok and len(report.arrays) == (2 if invalid else 4)
    assert oracle.check("dequantize", te, refops.dequantize(q), scaling="current").ok
    te._data = None
    if not invalid:
        names = {array.name for array in oracle.check("quantize", X, te, scaling="current").arrays}
        assert names == {"columnwise_data", "columnwise_scale_inv"}


# --- torch ------------------------------------------------------------------------------------------------------------


class Wrapped(torch.Tensor):
    """A class of a user."""


def test_torch_tensors_of_every_dtype_and_class():
    q = quantized(refops.MXFP8Scaling(E4M3))
    codes = torch.from_numpy(q.rowwise_data).view(torch.float8_e4m3fn)
    scales = torch.from_numpy(q.rowwise_scale_inv).view(torch.float8_e8m0fnu)
    for x in (X, torch.nn.Parameter(X), X.as_subclass(Wrapped)):
        assert oracle.check("quantize", x, {"codes": codes, "scales": scales}, scaling="mxfp8").ok
    dx = torch.from_numpy(refops.activation_grad("silu", np.float32(X.float()), np.float32(X.float()))).bfloat16()
    x = {"dy": X, "x": X}
    assert oracle.check("dsilu", x, {"dx": dx}).ok and not oracle.check("dsilu", x, -dx, diagnose=False).ok
    e5m2 = refops.quantize(np.float32(X.float()), refops.CurrentScaling(refops.E5M2)).rowwise_data
    assert oracle.check(
        "quantize", X.float(), {"codes": torch.from_numpy(e5m2).view(torch.float8_e5m2)}, scaling="current-e5m2"
    ).ok


# --- what is refused --------------------------------------------------------------------------------------------------


def test_what_is_no_quantized_tensor():
    for value in (X, np.zeros(3), {}, None, torch.nn.Linear(2, 2), np.ma.zeros(3)):
        assert not is_quantized(value)
    assert not is_swizzled(X) and not is_swizzled({"data": X})


def test_bad_use_says_what_was_expected():
    mxfp8 = made("mxfp8")
    with pytest.raises(TypeError, match="x must be an array; got a quantized tensor, MXFP8Tensor"):
        oracle.check("silu", mxfp8, X)
    with pytest.raises(ValueError, match=r"outputs must be of the kind of CurrentScaling.*got an MXFP8Tensor"):
        oracle.check("quantize", X, mxfp8, scaling="current")
    with pytest.raises(
        ValueError, match="scaling is required where outputs hold a quantized tensor; got an MXFP8Tensor"
    ):
        oracle.check("silu", X, mxfp8)
    with pytest.raises(ValueError, match="a quantized tensor must be named q or y or dx; got 'data'"):
        oracle.check("quantize", X, {"data": mxfp8}, scaling="mxfp8")
    with pytest.raises(ValueError, match="outputs must hold rowwise_data once"):
        oracle.check("quantize", X, {"rowwise_data": X, "q": mxfp8}, scaling="mxfp8")
    te = te_like(quantized(refops.MXFP8Scaling(refops.E5M2)), "MXFP8Tensor", _fp8_dtype="kFloat8E5M2")
    with pytest.raises(ValueError, match="outputs must have codes of E4M3; got an MXFP8Tensor of E5M2"):
        oracle.check("quantize", X, te, scaling="mxfp8")
    with pytest.raises(ValueError, match="scaling is required to dequantize an MXFP8Tensor, which does not say it"):
        oracle.check("dequantize", te, X)
    with pytest.raises(ValueError, match="scaling must be that of the MXFP8Tensor"):
        oracle.check("dequantize", mxfp8, X, scaling="mxfp8-e5m2")
    assert parts_of(te).fmt == refops.E5M2 and parts_of(mxfp8).scaling == refops.MXFP8Scaling(E4M3)


def test_swizzled_scales_to_dequantize_need_their_padding():
    q = quantized(refops.MXFP8Scaling(E4M3), swizzled=True)
    te = te_like(q, "MXFP8Tensor", _with_gemm_swizzled_scales=True)
    te._columnwise_scale_inv = te._columnwise_scale_inv[:, :100]
    te._columnwise_data = te._columnwise_data[:, :100]
    te._rowwise_data = te._rowwise_scale_inv = None
    with pytest.raises(ValueError, match="columnwise_scale_inv must have its padding when swizzled"):
        oracle.check("dequantize", te, X, scaling="mxfp8")
