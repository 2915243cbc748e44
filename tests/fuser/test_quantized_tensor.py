"""`QuantizedTensor` in torch: dispatch rules, autograd, views, in-place work, optimizers, files, modules; saving."""

import copy
import dataclasses
import functools
import io
import pickle
import re
import subprocess
import sys
import types
from itertools import product

import numpy as np
import pytest
import torch

import refops
from fuser import functional
from fuser import quantization as q
from fuser.dtypes import DType
from fuser.quantization.storage import QuantizedTensorStorage
from refops import E3M2, MXFP8Scaling
from tiers import sampled

F8, F8B = DType.kFloat8E4M3, DType.kFloat8E5M2

QUANTIZERS = {
    "delayed": lambda: q.Float8Quantizer(torch.tensor([3.7]), torch.zeros(1), F8),
    "current": lambda: q.Float8CurrentScalingQuantizer(F8),
    "block": lambda: q.Float8BlockQuantizer(F8B),
    "mxfp8": lambda: q.MXFP8Quantizer(F8),
    "nvfp4": lambda: q.NVFP4Quantizer(with_2d_quantization=True),
    "mxfp6": lambda: q.BlockScaledQuantizer(MXFP8Scaling(E3M2, two_d=True)),
}


#: What a tensor does is no matter of who quantizes.
pytestmark = pytest.mark.usefixtures("the_reference_quantizes")


@pytest.fixture(params=QUANTIZERS)
def quantizer(request):
    return QUANTIZERS[request.param]()


def normal(*shape, dtype=torch.float32, seed=0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def assert_same_data(a, b):
    assert type(a) is type(b) and a.shape == b.shape and a.dtype == b.dtype
    assert a.buffers.scaling == b.buffers.scaling and a.buffers.tensors.keys() == b.buffers.tensors.keys()
    for name, tensor in a.buffers.tensors.items():
        assert torch.equal(tensor, b.buffers.tensors[name]), name


def loaded(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


# --- what it is -----------------------------------------------------------------------------------------


def test_it_looks_like_a_tensor_without_memory(quantizer):
    t = quantizer(normal(4, 16, 32, dtype=torch.bfloat16))
    assert isinstance(t, torch.Tensor) and isinstance(t, q.QuantizedTensor) and isinstance(t, QuantizedTensorStorage)
    assert t.shape == (4, 16, 32) and t.size(1) == 16 and t.stride() == (512, 32, 1) and t.is_contiguous()
    assert t.dtype == t._dtype == torch.bfloat16 and t.device.type == "cpu"
    assert t.numel() == 2048 and t.dim() == 3 and len(t) == 4 and not t.requires_grad and t.is_leaf
    assert t.untyped_storage().nbytes() == 0 and not t.is_pinned()
    assert type(t).__name__ in repr(t) and "rowwise + columnwise" in repr(t)


def test_names_of_transformer_engine():
    x = normal(64, 32)
    fp8 = QUANTIZERS["delayed"]()(x)
    assert fp8._data.shape == (64, 32) and fp8._transpose.shape == (32, 64) and fp8._scale_inv.shape == (1,)
    assert fp8._fp8_dtype is F8 and not fp8._transpose_invalid
    mx = QUANTIZERS["mxfp8"]()(x)
    assert mx._rowwise_data.shape == mx._columnwise_data.shape == (64, 32) and mx._rowwise_scale_inv.shape == (128, 4)
    assert mx._fp8_dtype is F8 and mx._with_gemm_swizzled_scales is False
    block = QUANTIZERS["block"]()(x)
    assert block._fp8_dtype is F8B and block._is_2D_scaled and block._columnwise_data.shape == (32, 64)
    fp4 = QUANTIZERS["nvfp4"]()(x)
    assert fp4._fp4_dtype is DType.kFloat4E2M1 and fp4._rowwise_data.shape == (64, 16)
    assert fp4._amax_rowwise.item() == x.abs().max() == fp4._amax_columnwise.item()
    assert (fp4._row_scaled_nvfp4, fp4._nvfp4_use_4over6, fp4._nvfp4_e4m3_max) == (False, False, 448)
    assert fp8.get_data_tensors() == (fp8._data, fp8._transpose)
    fp8._transpose = None
    assert fp8._transpose_invalid and fp8.get_usages() == {"rowwise": True, "columnwise": False}


def test_constructor_arguments_rebuild_it(quantizer):
    t = quantizer(normal(32, 32))
    assert_same_data(type(t)(**t.get_metadata()), t)


# --- values ---------------------------------------------------------------------------------------------


BLOCKS = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
FOUR_OVER_SIX = {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 256, "nvfp4_4over6_err_mode": "MAE"}
#: Of a quantizer TE's order of its storages' arguments, those after the arrays by their attributes' names.
CONSTRUCTORS = {
    "delayed": (QUANTIZERS["delayed"], ("fp8_dtype",)),
    "current": (QUANTIZERS["current"], ("fp8_dtype",)),
    "block": (QUANTIZERS["block"], (*BLOCKS, "fp8_dtype", "quantizer", "is_2D_scaled")),
    "block 1x128": (
        lambda: q.Float8BlockQuantizer(F8, block_scaling_dim=1, force_pow_2_scales=False),
        (*BLOCKS, "fp8_dtype", "quantizer", "is_2D_scaled"),
    ),
    "mxfp8": (QUANTIZERS["mxfp8"], (*BLOCKS, "fp8_dtype", "quantizer", "with_gemm_swizzled_scales")),
}
NVFP4 = (*BLOCKS, "amax_rowwise", "amax_columnwise", "fp4_dtype", "quantizer", "with_gemm_swizzled_scales")
NVFP4 += ("row_scaled_nvfp4", "nvfp4_use_4over6", "nvfp4_e4m3_max")
for name, options in {
    "nvfp4": {"with_rht": True, "with_post_rht_amax": True},
    "nvfp4 row-scaled": {"row_scaled_nvfp4": True},
    "nvfp4 4over6": FOUR_OVER_SIX,
}.items():
    CONSTRUCTORS[name] = functools.partial(q.NVFP4Quantizer, **options), NVFP4


def te_arguments(t, order, quantizer):
    """What TE's constructor of a storage takes for the data of `t`, by name."""
    arguments = {name: getattr(t, f"_{name}") for name in order if name != "quantizer"} | {"quantizer": quantizer}
    if isinstance(t, q.Float8Tensor):
        arguments |= {"data": t._data, "data_transpose": t._transpose, "fp8_scale_inv": t._scale_inv}
    return arguments


@pytest.mark.parametrize("copies", ["rowwise", "columnwise", "both"])
@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_constructors_of_transformer_engine(name, copies):
    make, order = CONSTRUCTORS[name]
    quantizer = make()
    quantizer.set_usage(rowwise=copies != "columnwise", columnwise=copies != "rowwise")
    t = quantizer(normal(2, 32, 64, dtype=torch.bfloat16))
    if order == ("fp8_dtype",):  # TE's FP8 tensors keep no record of an amax
        t.buffers = dataclasses.replace(t.buffers, amax_rowwise=None, amax_columnwise=None)
    arguments = te_arguments(t, order, quantizer)
    backwards = dict(reversed(arguments.items()))
    stored = type(t).__bases__[1]
    made = [
        type(t)(shape=t.shape, dtype=t.dtype, **arguments),
        type(t)(t.shape, t.dtype, requires_grad=True, **backwards, fake_dtype=t.dtype),
        type(t)(**backwards, stride=t.stride(), device="cpu", dtype=t.dtype, shape=list(t.shape)),
    ]
    for tensor in made:
        assert_same_data(tensor, t)
        assert tensor._quantizer is not quantizer and type(tensor._quantizer) is type(quantizer)
    assert [tensor.requires_grad for tensor in made] == [False, True, False]
    storages = [stored(**backwards, fake_dtype=t.dtype)]
    if "data" not in arguments:
        storages.append(stored(*(arguments[name] for name in order), fake_dtype=t.dtype))
    for storage in storages:
        assert type(storage) is stored and storage.numel() == t.numel() and storage.shape[-1] == t.shape[-1]
        assert torch.equal(storage.dequantize().reshape(t.shape), t.dequantize()) and storage.dtype == torch.bfloat16
    assert stored(**arguments).dtype == torch.float32
    alone = type(t)(t.shape, t.dtype, **arguments | {"quantizer": None})
    assert alone._quantizer is None and alone.stored_format()[:2] == t.stored_format()[:2]
    if name != "nvfp4" or copies == "rowwise":  # else only the quantizer tells of the transform
        assert torch.equal(alone.dequantize(), t.dequantize())


def test_constructors_say_what_does_not_fit():
    make, order = CONSTRUCTORS["mxfp8"]
    t = make()(normal(32, 64))
    arguments = te_arguments(t, order, None)
    wrong = {
        "rowwise_scale_inv must be uint8 of shape (128, 4)": {
            "rowwise_scale_inv": torch.zeros(32, 2, dtype=torch.uint8)
        },
        "columnwise_scale_inv must be uint8": {"columnwise_scale_inv": torch.zeros(4, 128)},
        "shape must have 2048 elements": {"shape": (32, 32)},
        "shape of a view of BufferStorage must keep the last dimension": {"shape": (64, 32)},
        "dtype must be torch.float32, as the other arguments say; got torch.float16": {"fake_dtype": torch.float16},
        "stride must be (64, 1), as the other arguments say; got (1, 32)": {"stride": (1, 32)},
        "device must be cpu, as the other arguments say; got 'meta'": {"device": "meta"},
    }
    for message, change in wrong.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            q.MXFP8Tensor(**{"shape": t.shape, "dtype": t.dtype} | arguments | change)
    with pytest.raises(ValueError, match="rowwise or columnwise data must be given"):
        q.MXFP8TensorStorage(None, None, None, None, F8)
    with pytest.raises(TypeError, match="unexpected keyword argument 'fp4_dtype'"):
        q.MXFP8TensorStorage(**arguments, fp4_dtype=F8)
    with pytest.raises(TypeError, match=r"missing .* required .* 'rowwise_data'"):
        q.MXFP8Tensor((32, 64), torch.float32)
    with pytest.raises(TypeError, match="buffers must be given"):
        q.BlockScaledTensor(shape=(32, 64), dtype=torch.float32)


def test_constructors_take_codes_by_the_names_of_their_formats():
    x = normal(32, 64)
    t, m = q.Float8CurrentScalingQuantizer(F8)(x), q.MXFP8Quantizer(F8)(x)
    codes = t._data.view(torch.float8_e4m3fn)
    made = q.Float8TensorStorage(data=codes, fp8_scale_inv=t._scale_inv.reshape(()), fp8_dtype=torch.float8_e4m3fn)
    assert made._data.dtype == torch.uint8 and made._data.data_ptr() == t._data.data_ptr() and made._transpose is None
    assert torch.equal(made.dequantize(), t.dequantize()) and made._scale_inv.data_ptr() == t._scale_inv.data_ptr()
    scales = m._rowwise_scale_inv.view(torch.float8_e8m0fnu)
    storage = q.MXFP8TensorStorage(m._rowwise_data.view(torch.float8_e4m3fn), scales, None, None, F8)
    assert torch.equal(storage.dequantize(), m.dequantize())


SWIZZLED = {
    "mxfp8": lambda: q.MXFP8Quantizer(F8),
    "mxfp8 32x32": lambda: q.MXFP8Quantizer(F8, with_2d_quantization=True),
    "nvfp4": lambda: q.NVFP4Quantizer(),
    "nvfp4 16x16": lambda: q.NVFP4Quantizer(with_2d_quantization=True),
    "nvfp4 transformed": lambda: q.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True),
    "nvfp4 row-scaled": lambda: q.NVFP4Quantizer(row_scaled_nvfp4=True),
    "nvfp4 4over6": lambda: q.NVFP4Quantizer(**FOUR_OVER_SIX),
    "mxfp6": QUANTIZERS["mxfp6"],
}


@pytest.mark.parametrize("name", SWIZZLED)
def test_scales_in_gemm_order(name):
    plain, quantizer, x = SWIZZLED[name](), SWIZZLED[name](), normal(2, 96, 160, dtype=torch.bfloat16)
    quantizer.optimize_for_gemm = True
    t, in_order = quantizer(x), plain(x)
    assert t._with_gemm_swizzled_scales and not in_order._with_gemm_swizzled_scales
    assert torch.equal(t._rowwise_data, in_order._rowwise_data) and torch.equal(
        t._columnwise_data, in_order._columnwise_data
    )
    rowwise, columnwise = in_order._rowwise_scale_inv.numpy(), in_order._columnwise_scale_inv.numpy()
    columnwise = columnwise.T if t.buffers.scaling.layout.scales_inner_first[1] else columnwise
    for scales, order in ((t._rowwise_scale_inv, rowwise), (t._columnwise_scale_inv, columnwise)):
        assert torch.equal(scales.flatten(), torch.from_numpy(refops.swizzle(np.ascontiguousarray(order))).flatten())
    for made in (t, t.view(192, 160), t.clone(), t.detach(), copy.deepcopy(t), loaded(t), type(t).make_like(t)):
        assert made._with_gemm_swizzled_scales and torch.equal(
            made.dequantize().reshape(x.shape), in_order.dequantize()
        )
        assert torch.equal(made.dequantize_columnwise().reshape(x.shape), in_order.dequantize_columnwise())
    assert torch.equal(t[1], in_order.dequantize()[1]) and torch.equal(t + 1, in_order + 1)
    assert torch.equal(t.view(-1), in_order.dequantize().view(-1))


@pytest.mark.parametrize("name", SWIZZLED)
def test_writes_in_gemm_order(name):
    plain, quantizer = SWIZZLED[name](), SWIZZLED[name]()
    quantizer.optimize_for_gemm = True
    x, other = normal(64, 64), normal(64, 64, seed=1)
    empty = quantizer.make_empty((64, 64))
    assert empty._with_gemm_swizzled_scales and empty.quantize_(x) is empty
    assert_same_data(empty, quantizer(x))
    assert torch.equal(empty.mul_(2).dequantize(), plain(plain(x).dequantize() * 2).dequantize())
    target = plain(x)
    quantizer.update_quantized(other, target)
    assert_same_data(target, quantizer(other))
    target.copy_(plain(x))
    assert_same_data(target, plain(x))
    target.copy_(quantizer(other))
    assert torch.equal(target.dequantize(), plain(other).dequantize())
    quantizer.internal = True
    for made, expected in ((quantizer(x), plain(x)), (functional.gelu(x, quantizer), functional.gelu(x, plain))):
        assert made._with_gemm_swizzled_scales and torch.equal(made.dequantize(), expected.dequantize())


@pytest.mark.parametrize("name", ["mxfp8 32x32", "nvfp4 16x16", "mxfp6"])
def test_a_copy_is_made_in_the_order_of_the_other(name):
    quantizer = SWIZZLED[name]()
    quantizer.optimize_for_gemm = True
    t = quantizer(normal(64, 128))
    for direction in ("rowwise", "columnwise"):
        t.update_usage(**{f"{direction}_usage": False})
        t.update_usage(**{f"{direction}_usage": True})
        assert_same_data(t, quantizer(normal(64, 128)))


def test_slices_in_gemm_order():
    quantizer = q.MXFP8Quantizer(F8)
    whole, rows = quantizer(normal(128, 64)), normal(32, 64, seed=1)
    part, late = whole[32:64], whole[64:96]
    quantizer.optimize_for_gemm = True
    part.copy_(quantizer(rows))  # reaches the whole, whose scales are in plain order
    assert torch.equal(whole.dequantize()[32:64], quantizer(rows).dequantize()) and not whole._with_gemm_swizzled_scales
    whole.copy_(quantizer(normal(128, 64)))
    with pytest.raises(RuntimeError, match="can't be written alone into a tensor whose scales are in GEMM order"):
        late.copy_(quantizer(rows))


@pytest.mark.parametrize("name", ["delayed", "current", "block"])
def test_formats_whose_scales_have_one_order_keep_it(name):
    quantizer = QUANTIZERS[name]()
    quantizer.optimize_for_gemm = True
    assert_same_data(quantizer(normal(32, 32)), QUANTIZERS[name]()(normal(32, 32)))


def test_dequantize(quantizer):
    x = normal(32, 64, dtype=torch.bfloat16)
    t = quantizer(x)
    values = t.dequantize()
    assert type(values) is torch.Tensor and values.dtype == torch.bfloat16
    wide = t.dequantize(dtype=torch.float32)
    assert torch.equal(wide.to(torch.bfloat16), values)
    assert (wide - x.float()).abs().max() <= 0.26 * x.abs().max()
    assert t.dequantize(dtype=torch.float64).dtype == torch.float64
    for name, dtype in (("float", torch.float32), ("half", torch.float16), ("bfloat16", torch.bfloat16)):
        plain = getattr(t, name)()
        assert type(plain) is torch.Tensor and plain.dtype == dtype and torch.equal(plain, t.dequantize(dtype=dtype))
    assert torch.equal(t.dequantize_columnwise(torch.bfloat16), values)


def test_dequantize_is_differentiable(quantizer):
    t = quantizer(normal(32, 32)).requires_grad_()
    weights = normal(32, 32, seed=1)
    (t.dequantize() * weights).sum().backward()
    assert torch.equal(t.grad, weights) and type(t.grad) is torch.Tensor
    with torch.no_grad():
        assert not t.dequantize().requires_grad


def test_other_operations_give_plain_tensors_of_the_values(quantizer):
    t, other = quantizer(normal(32, 64)), normal(32, 64, seed=1)
    values = t.dequantize()
    for result, expected in (
        (t + 1, values + 1),
        (other * t, other * values),
        (t @ other.t(), values @ other.t()),
        (t.t(), values.t()),
        (t[:, 3:5], values[:, 3:5]),
        (torch.cat([t, t]), torch.cat([values, values])),
        (t.sum(), values.sum()),
        (torch.zeros_like(t), torch.zeros_like(values)),
        (torch.nn.functional.linear(other, t), torch.nn.functional.linear(other, values)),
        (torch.where(t > 0, t, other), torch.where(values > 0, values, other)),
    ):
        assert type(result) is torch.Tensor and torch.equal(result, expected)
    assert torch.equal(t, t) and torch.allclose(t, values)


def test_gradients_through_other_operations(quantizer):
    t = quantizer(normal(32, 32)).requires_grad_()
    (t.t() @ normal(32, 4)).pow(2).sum().backward()
    plain = t.dequantize().detach().requires_grad_()
    (plain.t() @ normal(32, 4)).pow(2).sum().backward()
    assert torch.equal(t.grad, plain.grad)


# --- operations that keep the format ----------------------------------------------------------------------


def test_detach_shares_data(quantizer):
    t = quantizer(normal(32, 32)).requires_grad_()
    for detached in (t.detach(), t.data):
        assert type(detached) is type(t) and not detached.requires_grad and detached is not t
        assert detached._rowwise_data is t._rowwise_data


def test_clone_copies_data_and_is_differentiable(quantizer):
    t = quantizer(normal(32, 32)).requires_grad_()
    c = t.clone()
    assert_same_data(c, t)
    assert c._rowwise_data.data_ptr() != t._rowwise_data.data_ptr() and c.requires_grad and not c.is_leaf
    (c.dequantize() * 2).sum().backward()
    assert torch.equal(t.grad, torch.full((32, 32), 2.0))
    assert t.contiguous() is t


def test_view_shares_data_where_the_last_dimension_stays(quantizer):
    t = quantizer(normal(64, 32)).requires_grad_()
    v = t.view(4, -1, 32)
    assert type(v) is type(t) and v.shape == (4, 16, 32)
    assert all(v.buffers.tensors[n].data_ptr() == b.data_ptr() for n, b in t.buffers.tensors.items())
    assert torch.equal(v.dequantize(), t.dequantize().view(4, 16, 32))
    assert torch.equal(v.detach().dequantize_columnwise(), t.detach().dequantize_columnwise().view(4, 16, 32))
    weights = normal(4, 16, 32, seed=3)
    (v.dequantize() * weights).sum().backward()
    assert torch.equal(t.grad, weights.view(64, 32))
    r = t.detach().reshape(-1, 32)
    assert type(r) is type(t) and torch.equal(r.dequantize(), t.detach().dequantize())


def test_view_that_changes_the_last_dimension(quantizer):
    t = quantizer(normal(64, 32))
    for v, values in ((t.view(32, 64), t.dequantize().view(32, 64)), (t.flatten(), t.dequantize().flatten())):
        assert torch.equal(v, values)
        assert isinstance(v, q.QuantizedTensor) == isinstance(t, q.Float8Tensor)
        if isinstance(v, q.QuantizedTensor):
            assert v._data.data_ptr() == t._data.data_ptr() and v._transpose is None


def test_views_of_storages(quantizer):
    t = quantizer(normal(64, 32))
    quantizer.internal = True
    s = quantizer(normal(64, 32))
    v = s.view(2, 32, 32)
    assert type(v) is type(s) and v.shape == (2, 32, 32) and torch.equal(v.dequantize(), t.dequantize().view(2, 32, 32))
    assert s.view((2, -1, 32)).shape == (2, 32, 32)
    with pytest.raises(ValueError, match="2048 elements"):
        s.view(3, 32)
    if not isinstance(s, q.Float8TensorStorage):
        with pytest.raises(ValueError, match="must keep the last dimension"):
            s.view(32, 64)


ANY_SHAPE = {
    "delayed": QUANTIZERS["delayed"],
    "current": QUANTIZERS["current"],
    "block": QUANTIZERS["block"],
    "block 1x128": lambda: q.Float8BlockQuantizer(F8, block_scaling_dim=1),
    "mxfp6": lambda: q.BlockScaledQuantizer(MXFP8Scaling(E3M2)),
}


@pytest.mark.parametrize("name", ANY_SHAPE)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (130,), (0,)])
def test_scalars_and_lines(name, shape):
    quantizer, x = ANY_SHAPE[name](), normal(*shape)
    t, whole = quantizer(x), refops.quantize(np.atleast_1d(x.numpy()), quantizer.scaling(), columnwise=True)
    assert t.shape == t.view(shape).shape == shape
    for field, array in t.buffers.tensors.items():
        assert torch.equal(array.reshape(getattr(whole, field).shape), torch.from_numpy(getattr(whole, field))), field
    assert t._rowwise_data.shape == shape and t._columnwise_data.shape == quantizer.get_columnwise_shape(shape) == shape
    columnwise = dataclasses.replace(whole, rowwise_data=None, rowwise_scale_inv=None)
    values, columns = (torch.from_numpy(refops.dequantize(copies)).reshape(shape) for copies in (whole, columnwise))
    for made in (t, loaded(t), t.clone(), copy.deepcopy(t), t.view(shape)):
        assert torch.equal(made.dequantize(), values) and torch.equal(made.dequantize_columnwise(), columns)
    empty = quantizer.make_empty(shape)
    assert {n: a.shape for n, a in empty.buffers.tensors.items()} == {n: a.shape for n, a in t.buffers.tensors.items()}
    assert torch.equal(empty.quantize_(x).dequantize(), values)
    assert torch.equal(empty.mul_(2).dequantize(), quantizer(values * 2).dequantize())
    if len(shape) == 0:
        line = t.view(1)
        assert type(line) is type(t.view(1, 1)) is type(t) and line.shape == (1,) and line.view(()).item() == t.item()
    if t._copies_hold_the_same_codes():
        t.update_usage(columnwise_usage=False)
        t.update_usage(columnwise_usage=True)
        assert torch.equal(t.dequantize_columnwise(), values)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("shape", [(), (32,)])
def test_formats_that_need_whole_blocks_say_so(name, shape):
    quantizer = QUANTIZERS[name]()
    for make in (lambda: quantizer(normal(*shape)), lambda: quantizer.make_empty(shape)):
        with pytest.raises(ValueError, match=rf"needs M % \d+ == 0 and K % \d+ == 0 .* shape \({'32,' * len(shape)}\)"):
            make()


def test_calibrating_with_a_scalar():
    quantizer = QUANTIZERS["delayed"]()
    quantizer.calibrate(torch.tensor(-2.5))
    assert quantizer.amax.tolist() == [2.5]


def test_make_like_and_to_dtype(quantizer):
    t = quantizer(normal(32, 32))
    like = type(t).make_like(t, shape=(2, 16, 32), dtype=torch.float16, requires_grad=True)
    assert (like.shape, like.dtype, like.requires_grad) == ((2, 16, 32), torch.float16, True)
    half = t.to_dtype(torch.float16)
    assert (
        half._rowwise_data is t._rowwise_data and half.dequantize().dtype == torch.float16 and t.dtype == torch.float32
    )


def test_to_and_cpu(quantizer):
    t = quantizer(normal(32, 32)).requires_grad_()
    assert t.to(torch.float32) is t and t.cpu() is t and t.to("cpu") is t
    plain = t.to(torch.bfloat16)
    assert type(plain) is torch.Tensor and torch.equal(plain, t.dequantize(dtype=torch.bfloat16))
    plain.float().sum().backward()
    assert torch.equal(t.grad, torch.ones(32, 32))
    copied = t.detach().to("cpu", copy=True)
    assert_same_data(copied, t)
    assert copied._rowwise_data is not t._rowwise_data
    moved = t.detach().to("meta")
    assert type(moved) is type(t) and moved.device.type == "meta" and moved._rowwise_data.device.type == "meta"
    assert "shape=(32, 32), meta" in repr(moved)


NOMINAL = {
    "quantize": lambda quantizer, dtype: quantizer.quantize(normal(32, 32), dtype=dtype),
    "make_empty": lambda quantizer, dtype: quantizer.make_empty((32, 32), dtype=dtype),
    "to_dtype": lambda quantizer, dtype: quantizer(normal(32, 32)).to_dtype(dtype),
    "_dtype": lambda quantizer, dtype: setattr(quantizer(normal(32, 32)), "_dtype", dtype),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("way", NOMINAL)
def test_other_dtypes_are_refused_by_name(quantizer, dtype, way):
    with pytest.raises(TypeError, match=rf"dtype .*must be .*float32, .*float16 or .*bfloat16; got {dtype}"):
        NOMINAL[way](quantizer, dtype)


def test_codes_of_another_dtype_are_refused_by_name():
    with pytest.raises(TypeError, match=r"float32, float16 or bfloat16; got torch\.float64"):
        QUANTIZERS["delayed"]().create_tensor_from_data(torch.zeros(4, 4, dtype=torch.uint8), fake_dtype=torch.float64)


def test_new_empty_and_empty_like(quantizer):
    t = quantizer(normal(32, 32))
    t.update_usage(columnwise_usage=False)
    for made, shape in ((torch.empty_like(t), (32, 32)), (t.new_empty((64, 32)), (64, 32))):
        assert type(made) is type(t) and made.shape == shape and made.get_usages() == t.get_usages()
    assert type(torch.empty_like(t, dtype=torch.int32)) is torch.Tensor
    if isinstance(t, (q.MXFP8Tensor, q.NVFP4Tensor)):
        assert type(t.new_empty((3, 5))) is torch.Tensor


def test_expand_as_itself_is_an_identity_in_the_graph(quantizer):
    p = torch.nn.Parameter(quantizer(normal(32, 32)))
    accumulator = p.expand_as(p).grad_fn.next_functions[0][0]
    assert accumulator.variable is p
    assert type(p.detach().expand_as(torch.zeros(2, 32, 32))) is torch.Tensor


# --- in-place work ----------------------------------------------------------------------------------------


def test_in_place_operations_requantize(quantizer):
    t = quantizer(normal(32, 32))
    pointer, version, expected = t._rowwise_data.data_ptr(), t._version, quantizer(t.dequantize() * 0.5)
    assert t.mul_(0.5) is t and t._version > version
    assert torch.equal(t.dequantize(), expected.dequantize()) and t._rowwise_data.data_ptr() == pointer
    t.fill_(2.0)
    assert torch.equal(t.dequantize(), quantizer(torch.full((32, 32), 2.0)).dequantize())
    t += 1
    assert isinstance(t, q.QuantizedTensor) and t.dequantize().mean() > 2.5
    torch.add(normal(32, 32), 1.0, out=t)
    assert torch.equal(t.dequantize(), quantizer(normal(32, 32) + 1).dequantize())
    t.zero_()
    assert not t.dequantize().any() and not t.dequantize_columnwise().any()


def test_in_place_operations_only_read_their_other_arguments(quantizer):
    t, other = quantizer(normal(32, 32)), quantizer(normal(32, 32, seed=1))
    values, other = other.dequantize(), type(other)(other.buffers)  # without quantizer: writing would raise
    buffers, expected = other.buffers, quantizer(t.dequantize() + values).dequantize()
    t.add_(other)
    assert torch.equal(t.dequantize(), expected) and other.buffers is buffers


def test_foreach_operations_requantize(quantizer):
    ts = [quantizer(normal(32, 32, seed=i)) for i in range(2)]
    expected = [quantizer(t.dequantize() + 1).dequantize() for t in ts]
    torch._foreach_add_(ts, 1.0)
    assert all(torch.equal(t.dequantize(), e) for t, e in zip(ts, expected, strict=True))


def test_in_place_under_inference_mode_returns_the_tensor(quantizer):
    with torch.inference_mode():
        t = quantizer(normal(32, 32))
        expected = quantizer(t.dequantize() + 1).dequantize()
        assert t.add_(1) is t and torch.equal(t.dequantize(), expected)
        t.quantize_(torch.ones(32, 32))
        assert torch.equal(t.dequantize(), quantizer(torch.ones(32, 32)).dequantize())


MODES = {"inference": torch.inference_mode, "no_grad": torch.no_grad, "grad": torch.enable_grad}
OPERATIONS = {
    "alias": torch.ops.aten.alias,
    "as_strided": lambda t: t.as_strided((64, 64), (64, 1)),
    "clone": torch.clone,
    "copy_": lambda t: t.copy_(normal(64, 64, seed=1)),
    "data": lambda t: t.data,
    "data of another": lambda t: setattr(t, "data", t.clone()),
    "data of values": lambda t: setattr(t, "data", normal(64, 64, seed=1)),
    "deepcopy": copy.deepcopy,
    "detach": torch.detach,
    "empty_like": torch.empty_like,
    "expand": lambda t: t.expand(2, 64, 64),
    "expand_as": lambda t: t.expand_as(t),
    "flatten": torch.flatten,
    "half": lambda t: t.half(),
    "matmul": lambda t: normal(64, 64) @ t,
    "mul_": lambda t: t.mul_(2),
    "new_zeros": lambda t: t.new_zeros(32, 64),
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "repr": repr,
    "reshape": lambda t: t.reshape(-1, 64),
    "save": lambda t: torch.save(t, io.BytesIO()),
    "select": lambda t: t[0],
    "slice": lambda t: t[32:],
    "split": lambda t: t.split(32),
    "sum": torch.sum,
    "t": torch.t,
    "to": lambda t: t.to(torch.bfloat16),
    "unbind": torch.unbind,
    "unsqueeze": lambda t: t.unsqueeze(0),
    "view": lambda t: t.view(2, 32, 64),
    "zero_": lambda t: t.zero_(),
}


@sampled(("quantizer", "made", "used"), product(QUANTIZERS, MODES, MODES), 5, in_all=1, indirect=["quantizer"])
def test_what_works_with_plain_tensors_works_in_every_mode(quantizer, made, used):
    for name, operation in OPERATIONS.items():
        with MODES[made]():
            values = normal(64, 64)
            t, values = quantizer(values), values.clone()
        with MODES[used]():
            try:
                operation(values)
            except RuntimeError:  # torch refuses it, as a write outside to what was made in inference mode
                continue
            result = operation(t)
            assert not isinstance(result, torch.Tensor) or result.shape == operation(values).shape, name


def test_views_under_inference_mode_stay_in_step(quantizer):
    t = quantizer(normal(64, 64))
    with torch.inference_mode():
        views = t.detach(), t.data, t.view(2, 32, 64), t.view_as(t)
        assert all(view._rowwise_data.data_ptr() == t._rowwise_data.data_ptr() for view in views)
        assert not any(view.is_inference() for view in views)
        t.mul_(2)
    assert all(torch.equal(view.dequantize().reshape(t.shape), t.dequantize()) for view in views)


def test_copies_made_in_inference_mode_are_written_outside(quantizer):
    t = quantizer(normal(64, 64))
    with torch.inference_mode():
        t.update_usage(columnwise_usage=False)
        if t._copies_hold_the_same_codes():
            t.update_usage(columnwise_usage=True)
        made = quantizer(normal(64, 64, seed=1))
    for tensor in (t, made):
        tensor.quantize_(normal(64, 64, seed=2))
        assert torch.equal(tensor.dequantize(), quantizer(normal(64, 64, seed=2)).dequantize())


def test_delayed_scaling_keeps_amaxes_made_in_inference_mode():
    with torch.inference_mode():
        quantizer = QUANTIZERS["delayed"]()
    quantizer(normal(4, 4))
    assert quantizer.amax.item() == normal(4, 4).abs().max()
    quantizer.calibrate(normal(4, 4) * 2)
    assert quantizer.amax.item() == normal(4, 4).abs().max() * 2


def test_copy_between_quantized_and_plain(quantizer):
    t, u = quantizer(normal(32, 32)), quantizer(normal(32, 32, seed=1))
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        plain = torch.empty(32, 32, dtype=dtype)
        plain.copy_(t)
        assert torch.equal(plain, t.dequantize().to(dtype))
    pointer = t._rowwise_data.data_ptr()
    t.copy_(u)
    assert torch.equal(t._rowwise_data, u._rowwise_data) and t._rowwise_data.data_ptr() == pointer
    u.update_usage(columnwise_usage=False)
    other = quantizer(normal(32, 32, seed=2))
    other.copy_(u)
    assert other.get_usages() == {"rowwise": True, "columnwise": True}
    assert torch.equal(other.dequantize(), quantizer(u.dequantize()).dequantize())
    other.copy_(torch.ones(32))
    assert torch.equal(other.dequantize(), quantizer(torch.ones(32, 32)).dequantize())
    other.copy_(q.MXFP8Quantizer(F8B)(normal(32, 32)))
    assert torch.equal(other.dequantize(), quantizer(q.MXFP8Quantizer(F8B)(normal(32, 32)).dequantize()).dequantize())


def without_quantizer(tensor):
    """As delayed scaling's come from a file."""
    return type(tensor)(tensor.buffers)


def test_copy_between_tensors_of_one_format_takes_codes_and_scales(quantizer):
    """Also where requantizing would give others: no quantizer in the source, another scale in the destination's."""
    source, destination = quantizer(normal(32, 32)), quantizer(normal(32, 32, seed=1))
    if hasattr(quantizer, "scale"):
        quantizer.scale.mul_(0.7)
    kept = destination._quantizer
    destination.copy_(without_quantizer(source))
    assert_same_data(destination, source)
    assert destination._quantizer is kept
    bare = without_quantizer(quantizer(normal(32, 32, seed=2)))
    bare.copy_(source)
    assert_same_data(bare, source)


def test_copy_takes_what_the_destination_holds(quantizer):
    source = quantizer(normal(32, 32))
    quantizer.set_usage(columnwise=False)
    rowwise = quantizer(normal(32, 32, seed=1))
    if hasattr(quantizer, "scale"):
        quantizer.scale.mul_(0.7)
    rowwise.copy_(source)
    assert rowwise.get_usages() == {"rowwise": True, "columnwise": False}
    assert torch.equal(rowwise._rowwise_data, source._rowwise_data)
    assert source.get_usages() == {"rowwise": True, "columnwise": True}
    if source._copies_hold_the_same_codes():
        both = without_quantizer(source.clone())
        both.copy_(rowwise)
        assert_same_data(both, source)


@pytest.mark.parametrize(
    ("make", "other"),
    [
        (QUANTIZERS["delayed"], lambda: q.Float8Quantizer(torch.tensor([3.7]), torch.zeros(1), F8B)),
        (QUANTIZERS["current"], lambda: q.Float8CurrentScalingQuantizer(F8B)),
        (QUANTIZERS["mxfp8"], lambda: q.MXFP8Quantizer(F8B)),
        (QUANTIZERS["block"], lambda: q.Float8BlockQuantizer(F8)),
        (QUANTIZERS["block"], lambda: q.Float8BlockQuantizer(F8B, block_scaling_dim=1)),
        (QUANTIZERS["nvfp4"], lambda: q.NVFP4Quantizer(with_2d_quantization=False)),
    ],
    ids=["delayed", "current", "mxfp8", "block", "block dim", "nvfp4 2d"],
)
def test_copy_between_formats_quantizes_into_that_of_the_destination(make, other):
    quantizer, source = make(), other()(normal(32, 32))
    destination = quantizer(normal(32, 32, seed=1))
    scaling = destination.buffers.scaling
    for given in (source, without_quantizer(source)):
        destination.copy_(given)
        assert destination.stored_format() == quantizer(normal(32, 32)).stored_format() != source.stored_format()
        assert destination.buffers.scaling.fmt is scaling.fmt
        assert torch.equal(destination.dequantize(), quantizer(source.dequantize()).dequantize())
    with pytest.raises(TypeError, match="format"):
        destination.copy_from_storage(source)


def test_quantize_in_place_bumps_the_version(quantizer):
    t = quantizer(normal(32, 32)).requires_grad_()
    y = t * 2
    squared = (t * t).sum()
    t.quantize_(torch.ones(32, 32))
    assert torch.equal(t.dequantize().detach(), quantizer(torch.ones(32, 32)).dequantize())
    y.sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.backward()


def test_data_setter(quantizer):
    p = torch.nn.Parameter(quantizer(normal(32, 32)))
    p.data = torch.ones(32, 32)
    assert torch.equal(p.dequantize(), quantizer(torch.ones(32, 32)).dequantize())
    replacement = quantizer(normal(32, 32, seed=4))
    p.data = replacement
    assert p._rowwise_data is replacement._rowwise_data and isinstance(p, torch.nn.Parameter) and p.requires_grad
    p.data = quantizer(normal(64, 32, dtype=torch.bfloat16))
    assert p.shape == (64, 32) and p.dtype == torch.bfloat16 and p.dequantize().shape == (64, 32)
    p.data = torch.zeros(32, 32)
    assert p.shape == (32, 32) and p.dtype == torch.float32 and not p.dequantize().any()
    with pytest.raises(TypeError, match="data must be"):
        p.data = (q.MXFP8Quantizer if not isinstance(p, q.MXFP8Tensor) else q.Float8BlockQuantizer)(F8)(normal(32, 32))


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "momentum"])
def test_optimizers_step_on_quantized_parameters(quantizer, optimizer):
    make = {
        "SGD": lambda p: torch.optim.SGD([p], lr=0.1),
        "momentum": lambda p: torch.optim.SGD([p], lr=0.1, momentum=0.9),
        "AdamW": lambda p: torch.optim.AdamW([p], lr=0.1, weight_decay=0.0),
    }[optimizer]
    p = torch.nn.Parameter(quantizer(normal(32, 32)))
    reference = torch.nn.Parameter(p.dequantize().detach().clone())
    for parameter in (p, reference):
        stepper = make(parameter)
        for _ in range(2):
            parameter.grad = torch.ones(32, 32)
            stepper.step()
            if parameter is reference:  # values are quantized after every step
                reference.data = quantizer(reference.data).dequantize()
    assert isinstance(p, q.QuantizedTensor) and isinstance(p, torch.nn.Parameter)
    assert torch.equal(p.dequantize(), reference) and not torch.equal(
        p.dequantize(), quantizer(normal(32, 32)).dequantize()
    )


def test_backward_through_a_quantized_parameter_trains():
    torch.manual_seed(0)
    x, target = torch.randn(64, 32), torch.randn(64, 32)
    p = torch.nn.Parameter(q.MXFP8Quantizer(F8)(torch.randn(32, 32)))
    optimizer, losses = torch.optim.SGD([p], lr=1.0), []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (x @ p - target).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 3


# --- usages and quantizers ----------------------------------------------------------------------------------


def test_update_quantizer(quantizer):
    t = quantizer(normal(32, 32))
    new = copy.deepcopy(quantizer)
    with pytest.warns(UserWarning, match="quantizer of .* is being replaced"):
        t.update_quantizer(new)
    assert t._quantizer is new
    bare = type(t)(t.buffers)
    with pytest.raises(RuntimeError, match="which has none"):
        bare.update_quantizer(new)
    if isinstance(bare, q.Float8Tensor):  # the scale that the data have
        bare.quantize_(torch.ones(32, 32))
        assert torch.equal(bare._scale_inv, t._scale_inv)
    else:
        with pytest.raises(RuntimeError, match="has no quantizer"):
            bare.add_(1)


def test_clear_frees_the_data(quantizer):
    t = quantizer(normal(32, 32))
    t.clear()
    assert t.get_usages() == {"rowwise": False, "columnwise": False} and not t.buffers.tensors
    with pytest.raises(RuntimeError, match="holds no data"):
        t.dequantize()
    assert "no data" in repr(t)


def test_copy_from_storage(quantizer):
    quantizer.internal = True
    a, b = quantizer(normal(32, 32)), quantizer(normal(32, 32, seed=1))
    pointer = a._rowwise_data.data_ptr()
    a.copy_from_storage(b)
    assert_same_data(a, b)
    assert a._rowwise_data.data_ptr() == pointer
    with pytest.raises(ValueError, match="shape"):
        a.copy_from_storage(quantizer(normal(64, 32)))
    other = q.MXFP8Quantizer(F8) if not isinstance(a, q.MXFP8TensorStorage) else q.Float8BlockQuantizer(F8)
    with pytest.raises(TypeError, match="format"):
        a.copy_from_storage(other(normal(32, 32)))


# --- copies and files -----------------------------------------------------------------------------------------


def test_deepcopy(quantizer):
    p = torch.nn.Parameter(quantizer(normal(32, 32)))
    p.grad, p.main_grad = torch.ones(32, 32), torch.zeros(2)
    twin = copy.deepcopy(p)
    assert_same_data(twin, p)
    assert isinstance(twin, torch.nn.Parameter) and twin.requires_grad and torch.equal(twin.grad, p.grad)
    assert twin.main_grad is not p.main_grad and twin._rowwise_data.data_ptr() != p._rowwise_data.data_ptr()
    assert twin._quantizer is not p._quantizer and type(twin._quantizer) is type(p._quantizer)
    a, b = copy.deepcopy((p, p))
    assert a is b
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(p.clone())


def test_save_and_load_with_weights_only(quantizer):
    t = quantizer(normal(3, 32, 64, dtype=torch.bfloat16))
    t.update_usage(columnwise_usage=False)
    file = io.BytesIO()
    torch.save({"w": t, "b": torch.ones(2)}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["w"]
    assert_same_data(loaded, t)
    if isinstance(quantizer, q.Float8Quantizer):
        assert loaded._quantizer is None, "its scale and amax belong to the model's state"
    else:
        assert loaded._quantizer == t._quantizer
    loaded.add_(0)
    assert loaded.dequantize().dtype == torch.bfloat16
    assert_same_data(pickle.loads(pickle.dumps(t)), t)


def test_parameters_stay_parameters_in_files(quantizer):
    p = torch.nn.Parameter(quantizer(normal(32, 32)))
    file = io.BytesIO()
    torch.save(p, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert isinstance(loaded, torch.nn.Parameter) and loaded.requires_grad
    assert_same_data(loaded, p)


def test_state_dict_round_trip(quantizer):
    def module(seed):
        m = torch.nn.Module()
        m.weight = torch.nn.Parameter(quantizer(normal(32, 32, seed=seed)))
        return m

    source, target = module(0), module(1)
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    target.load_state_dict(torch.load(file, weights_only=True))
    assert isinstance(target.weight, q.QuantizedTensor)
    if isinstance(quantizer, q.Float8Quantizer):  # loaded without quantizer: values are quantized anew
        assert torch.equal(target.weight.dequantize(), source.weight.dequantize())
    else:
        assert_same_data(target.weight, source.weight)


def test_buffers_go_through_dlpack_without_a_copy(quantizer):
    t = quantizer(normal(32, 32))
    array = np.from_dlpack(t._rowwise_data)
    assert array.ctypes.data == t._rowwise_data.data_ptr()
    assert torch.from_dlpack(t._columnwise_data).data_ptr() == t._columnwise_data.data_ptr()


def test_storages_can_be_flattened(quantizer):
    quantizer.internal = True
    t = quantizer(normal(32, 32))
    names, context = t.__tensor_flatten__()
    inner = {name: getattr(t, name) for name in names}
    assert len(inner) == len(t.buffers.tensors)
    assert_same_data(type(t).__tensor_unflatten__(inner, context, t.size(), None), t)


@pytest.mark.filterwarnings("ignore")  # what the compiler leaves to Python, it says
def test_compiled_code_gives_the_same_results():
    torch._dynamo.reset()
    mxfp8 = QUANTIZERS["mxfp8"]()

    def layer(x, w):
        return torch.relu(x @ w) + w.view(32, 32).sum() + mxfp8(x * 2).dequantize() @ w.dequantize()

    x, w = normal(32, 32).requires_grad_(), torch.nn.Parameter(mxfp8(normal(32, 32, seed=1)))
    gradients = []
    for function in (layer, torch.compile(layer, backend="aot_eager")):
        x.grad = w.grad = None
        y = function(x, w)
        y.sum().backward()
        gradients.append((y.detach(), x.grad, w.grad))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


# --- modules ----------------------------------------------------------------------------------------------------


class Op(q.KeepsQuantizedParameters, torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(weight)
        self.bias = torch.nn.Parameter(torch.ones(4))


@pytest.mark.parametrize("cast", ["half", "bfloat16", "float", "to"])
def test_casting_a_module_keeps_quantized_parameters_quantized(quantizer, cast):
    op = Op(quantizer(normal(32, 32)))
    model, weight, data = torch.nn.Sequential(op), op.weight, op.weight._rowwise_data
    weight.grad = torch.ones(32, 32)
    model.to(torch.float16) if cast == "to" else getattr(model, cast)()
    dtype = {"half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32, "to": torch.float16}[cast]
    assert op.weight is weight and isinstance(weight, torch.nn.Parameter) and weight._rowwise_data is data
    assert weight.dtype == weight.dequantize().dtype == weight.grad.dtype == op.bias.dtype == dtype
    assert weight.requires_grad


@pytest.mark.parametrize("cast", [torch.nn.Module.double, lambda op: op.to(torch.float64)], ids=["double", "to"])
@pytest.mark.parametrize("with_mixin", [True, False])
def test_casting_a_module_to_float64_is_refused(quantizer, cast, with_mixin):
    op = Op(quantizer(normal(32, 32)))
    op.weight.grad = torch.ones(32, 32)
    before = op.weight.detach().clone()
    if not with_mixin:
        plain = torch.nn.Module()
        plain.weight, op = op.weight, plain
    name = r"dtype of Op\.weight, which is quantized, " if with_mixin else ".*"
    with pytest.raises(TypeError, match=rf"^{name}must be float32, float16 or bfloat16.*got torch\.float64"):
        cast(torch.nn.Sequential(op))
    assert_same_data(op.weight.detach(), before)
    assert op.weight.grad.dtype is torch.float32
    assert all(parameter.dtype is torch.float32 for parameter in op.parameters())


def test_casting_with_a_live_graph(quantizer):
    """`torch.utils.swap_tensors`, which torch would use, refuses a parameter that a graph holds."""
    op = Op(quantizer(normal(32, 32)))
    loss = (op.weight.dequantize() * 2).sum()
    op.half()
    assert op.weight.dtype == torch.float16
    (op.weight.dequantize() * 2).sum().backward()
    assert op.weight.grad.dtype == torch.float16
    del loss


def test_moving_a_module(quantizer):
    op = Op(quantizer(normal(32, 32)))
    op.to("meta")
    assert op.weight.device.type == op.weight._rowwise_data.device.type == op.bias.device.type == "meta"


def test_a_module_without_the_mixin_keeps_codes_and_scales(quantizer):
    """Also where they could not be made again: delayed scaling's scale has moved on."""
    module = torch.nn.Module()
    module.weight = weight = torch.nn.Parameter(quantizer(normal(32, 32)))
    if hasattr(quantizer, "scale"):
        quantizer.scale.mul_(0.7)
    before = weight.detach().clone()
    for cast in (torch.nn.Module.half, torch.nn.Module.half, torch.nn.Module.float):
        cast(module)
        assert module.weight is weight and isinstance(weight, q.QuantizedTensor)
        assert_same_data(weight.detach().to_dtype(torch.float32), before)
        assert weight.dtype == (torch.float16 if cast is torch.nn.Module.half else torch.float32)
    weight.data = before.dequantize() * 2
    assert torch.equal(weight.dequantize(), quantizer(before.dequantize() * 2).dequantize())


def test_torch_is_not_patched():
    assert torch.nn.Module.half.__module__ == "torch.nn.modules.module"
    assert torch.nn.Module._apply.__module__ == "torch.nn.modules.module"


# --- saving -------------------------------------------------------------------------------------------------------


def test_prepare_and_restore(quantizer):
    tensor, x = quantizer(normal(32, 32)), normal(2, 2)
    quantizer.internal = True
    storage = quantizer(normal(32, 32, seed=1))
    storage.update_usage(columnwise_usage=False)
    flat, objects = q.prepare_for_saving(x, storage, None, tensor, storage)
    assert all(t is None or isinstance(t, torch.Tensor) for t in flat)
    assert flat[0] is x and objects[0] is None and objects[2] is None and objects[3] is None
    assert storage.buffers.tensors, "the caller's storage stays whole"
    assert not objects[1].buffers.tensors
    restored, rest = q.restore_from_saved(objects, [*flat, x], return_saved_tensors=True)
    assert restored[0] is x and restored[2] is None and restored[3] is tensor and rest == [x]
    for again in (restored[1], restored[4]):
        assert_same_data(again, storage)
        assert again._rowwise_data is storage._rowwise_data
    with pytest.raises(TypeError, match="quantized or grouped storages"):
        q.prepare_for_saving(3)


def test_storage_methods_of_saving(quantizer):
    quantizer.internal = True
    storage = quantizer(normal(32, 32))
    values = storage.dequantize()
    tensors, shell = storage.prepare_for_saving()
    assert shell is storage and not storage.buffers.tensors
    assert storage.restore_from_saved([*tensors, None]) == [None]
    assert torch.equal(storage.dequantize(), values)


def test_restore_from_func_ctx_releases_the_objects(quantizer):
    quantizer.internal = True
    flat, objects = q.prepare_for_saving(quantizer(normal(32, 32)))
    ctx = types.SimpleNamespace(tensor_objects=objects, saved_tensors=tuple(flat))
    (restored,) = q.restore_from_func_ctx(ctx)
    assert restored.shape == (32, 32) and ctx.tensor_objects is None
    with pytest.raises(AttributeError, match="tensor_objects"):
        q.restore_from_func_ctx(ctx)
    with pytest.raises(AttributeError, match="tensor_objects"):
        q.restore_from_func_ctx(types.SimpleNamespace())


@pytest.mark.parametrize("internal", [False, True])
def test_autograd_saves_quantized_tensors(quantizer, internal):
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            flat, ctx.tensor_objects = q.prepare_for_saving(w)
            ctx.save_for_backward(*flat)
            return x * w.dequantize()

        @staticmethod
        def backward(ctx, grad):
            (w,) = q.restore_from_saved(ctx.tensor_objects, ctx.saved_tensors)
            return grad * w.dequantize(), None

    quantizer.internal = internal
    w, x = quantizer(normal(32, 32)), normal(32, 32, seed=1).requires_grad_()
    y = Scale.apply(x, w)
    for _ in range(2):
        x.grad = None
        y.sum().backward(retain_graph=True)
        assert torch.equal(x.grad, w.dequantize())


# --- subclasses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.dequantize(),
        lambda s: s.update_usage(rowwise_usage=True),
        lambda s: s.get_usages(),
        lambda s: s.prepare_for_saving(),
        lambda s: s.restore_from_saved([]),
        lambda s: s.copy_from_storage(s),
    ],
)
def test_a_storage_without_buffers_says_what_is_missing(call):
    class Unfinished(QuantizedTensorStorage):
        """Overrides nothing."""

    with pytest.raises(NotImplementedError, match="Unfinished must override"):
        call(Unfinished())


# --- processes that only load -----------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("imports", ["import torch, fuser", "import fuser, torch; fuser.autocast"])
def test_importing_fuser_is_enough_to_load(tmp_path, imports):
    path = tmp_path / "tensors.pt"
    torch.save({name: make()(normal(32, 32)) for name, make in QUANTIZERS.items()}, path)
    code = f"{imports}\nprint(*[type(t).__name__ for t in torch.load({str(path)!r}, weights_only=True).values()])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [type(make()(normal(32, 32))).__name__ for make in QUANTIZERS.values()]


def test_import_fuser_does_not_import_torch():
    subprocess.run([sys.executable, "-c", "import sys, fuser; assert 'torch' not in sys.modules"], check=True)


def test_a_callers_subclass_is_loaded_as_the_class_that_is_here():
    """As TE's are; a file that is written can be read, also where the subclass is not known."""

    class Mine(q.MXFP8Tensor):
        pass

    class Quantizer(q.MXFP8Quantizer):
        tensor_class = Mine

    t, file = Quantizer(DType.kFloat8E4M3)(torch.randn(32, 64)), io.BytesIO()
    torch.save(t, file)
    file.seek(0)
    loaded = torch.load(file)
    assert type(t) is Mine and type(loaded) is q.MXFP8Tensor and torch.equal(loaded.dequantize(), t.dequantize())
    assert type(copy.deepcopy(t)) is Mine
