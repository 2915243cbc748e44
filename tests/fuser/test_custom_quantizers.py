"""Quantizers and storages of the caller's own, as TE's `custom_recipes` write them, in operations of this package."""

import copy
import dataclasses
from typing import Any

import pytest
import torch

import fuser
import refops
from fuser import functional, ops
from fuser import quantization as q
from fuser.common import maybe_dequantize
from fuser.gemm import GEMMType, MMParams, gemm, linear_dgrad, linear_forward, linear_wgrad
from fuser.recipe import CustomRecipe

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclasses.dataclass
class OneScale(q.QuantizedTensorStorage):
    """FP8 codes and their transpose, without `dequantize`, `shape` and `get_usages`: products are the quantizer's."""

    data: Any = None
    scale: Any = None
    data_t: Any = None
    scale_t: Any = None
    dtype: Any = None
    device: Any = None
    original_shape: Any = None
    _quantizer: Any = None

    custom = True
    tensors = ("data", "data_t", "scale", "scale_t")

    def prepare_for_saving(self):
        saved = [getattr(self, name) for name in self.tensors]
        vars(self).update(dict.fromkeys(self.tensors))
        return saved, self

    def restore_from_saved(self, tensors):
        vars(self).update(zip(self.tensors, tensors, strict=False))
        return tensors[len(self.tensors) :]

    def update_usage(self, rowwise_usage=None, columnwise_usage=None):
        assert columnwise_usage is not True or self.data_t is not None
        if rowwise_usage is False:
            self.data = self.scale = None

    def size(self, *dims):
        matrix = self.data.size() if self.data is not None else self.data_t.t().size()
        return matrix[dims[0]] if dims else matrix


class OneScaleQuantizer(q.Quantizer):
    """Overrides `quantize` alone, and has a product of its own."""

    def __init__(self, dtype):
        super().__init__(rowwise=True, columnwise=True)
        self.internal, self.dtype, self.products = True, dtype, []

    def quantize(self, tensor, **kwargs):
        matrix = tensor.reshape(-1, tensor.shape[-1])
        scale_inv = (matrix.float().abs().amax() / torch.finfo(self.dtype).max).reshape(1)
        codes = (matrix.float() / scale_inv).to(self.dtype)
        made = OneScale(dtype=tensor.dtype, device=tensor.device, original_shape=tuple(tensor.shape), _quantizer=self)
        if self.rowwise_usage:
            made.data, made.scale = codes, scale_inv
        if self.columnwise_usage:
            made.data_t, made.scale_t = codes.t().contiguous(), scale_inv
        return made

    def values(self, tensor):
        usages, self.rowwise_usage = self.rowwise_usage, True
        made = self.quantize(tensor)
        self.rowwise_usage = usages
        return (made.data.float() * made.scale).reshape(tensor.shape)

    def qgemm(self, qx, qw, m_params, out_dtype, sx, sw, bias=None, *, gemm_type, qresult_x, qresult_w):
        assert isinstance(m_params, MMParams) and m_params.out_dtype is out_dtype
        assert isinstance(qresult_x, OneScale) and isinstance(qresult_w, OneScale)
        self.products.append(gemm_type)
        product = (qx.float() * sx) @ (qw.float() * sw).t()
        return (product if bias is None else product + bias.float()).to(out_dtype)


@dataclasses.dataclass
class Halves(q.QuantizedTensorStorage):
    """Fields without defaults, by the names of a tensor's attributes; dequantizes itself."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    values: Any

    def size(self):
        return self.shape

    def dequantize(self, *, dtype=None):
        return self.values.to(self.dtype if dtype is None else dtype)

    def update_usage(self, rowwise_usage=None, columnwise_usage=None):
        """One copy serves both."""

    def prepare_for_saving(self):
        saved, self.values = [self.values], None
        return saved, self

    def restore_from_saved(self, tensors):
        self.values = tensors[0]
        return tensors[1:]


class HalvesQuantizer(q.Quantizer):
    """Overrides `quantize_impl` alone."""

    def __init__(self):
        super().__init__(rowwise=True, columnwise=True)

    def quantize_impl(self, tensor):
        return Halves(tensor.shape, tensor.dtype, tensor.device, tensor.half())

    def values(self, tensor):
        return tensor.half().float()


class NewQuantizer(HalvesQuantizer):
    """Its storages are made by `__new__`, as TE's own are."""

    class Storage(q.QuantizedTensorStorage):
        def __new__(cls, *args, tensor):
            made = super().__new__(cls)
            made.shape, made.dtype, made.device, made.values = tensor.shape, tensor.dtype, tensor.device, tensor.half()
            return made

        size, dequantize, update_usage = Halves.size, Halves.dequantize, Halves.update_usage
        prepare_for_saving, restore_from_saved = Halves.prepare_for_saving, Halves.restore_from_saved

    def quantize_impl(self, tensor):
        return self.Storage(tensor=tensor)


def one_scale(role):
    return OneScaleQuantizer(E5M2 if role.tensor_type == "grad_output" else E4M3)


FACTORIES = {
    "quantize": one_scale,
    "quantize_impl": lambda role: HalvesQuantizer(),
    "__new__": lambda role: NewQuantizer(),
}


@pytest.fixture(params=FACTORIES)
def factory(request):
    return FACTORIES[request.param]


def made_for_input(factory):
    return factory(q.QuantizerRole(module_type="linear", tensor_type="input", name=""))


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_trains(factory, bias):
    made = []
    recipe = CustomRecipe(qfactory=lambda role: made.append(factory(role)) or made[-1])
    op, x, dy = ops.Linear(32, 64, bias=bias), normal(2, 16, 32).requires_grad_(), normal(2, 16, 64, seed=1)
    with fuser.autocast(recipe=recipe):
        y = op(x)
    y.backward(dy, retain_graph=True)
    first = x.grad.clone()
    y.backward(dy)  # what was saved is still there
    assert torch.equal(x.grad, first * 2)
    of_input, of_weight, of_grad = made
    weight = op.weight.detach()
    quantized_x, quantized_w, quantized_dy = of_input.values(x.detach()), of_weight.values(weight), of_grad.values(dy)
    expected = quantized_x @ quantized_w.t() + (op.bias.detach() if bias else 0)
    torch.testing.assert_close(y.detach(), expected)
    torch.testing.assert_close(first, quantized_dy @ quantized_w)
    torch.testing.assert_close(op.weight.grad, 2 * quantized_dy.reshape(-1, 64).t() @ quantized_x.reshape(-1, 32))
    if factory is one_scale:  # TE asks the quantizer of the left operand
        assert of_input.products == [GEMMType.FPROP]
        assert of_grad.products == [GEMMType.DGRAD, GEMMType.WGRAD] * 2 and not of_weight.products


def test_in_a_pipeline(factory):
    model = ops.Sequential(ops.RMSNorm(32), ops.Linear(32, 64), ops.GELU(), ops.Linear(64, 32))
    x, plain = normal(16, 32).requires_grad_(), model(normal(16, 32))
    with fuser.autocast(recipe=CustomRecipe(qfactory=factory)):
        y = model(x)
    y.sum().backward()
    torch.testing.assert_close(y, plain, rtol=0.1, atol=0.1)
    assert all(parameter.grad is not None for parameter in model.parameters())
    report = fuser.explain(model, x, recipe=CustomRecipe(qfactory=factory), quiet=True)
    kept = type(made_for_input(factory)(x.detach())).__name__
    saved = [tensor for tensors in report.pipelines[0].saved.values() for tensor in tensors if tensor.format == kept]
    assert len(saved) == 4 and all(tensor.bytes == tensor.theory > 0 for tensor in saved)


def test_saving_keeps_the_callers_whole(factory):
    storage = made_for_input(factory)(normal(8, 8))
    before = dict(vars(storage))
    flat, objects = q.prepare_for_saving(storage, None, storage)
    assert all(vars(storage)[name] is value for name, value in before.items())
    restored, rest = q.restore_from_saved(objects, [*flat, "more"], return_saved_tensors=True)
    assert rest == ["more"] and restored[1] is None
    for copied in (restored[0], restored[2]):
        assert type(copied) is type(storage) and all(vars(copied)[name] is value for name, value in before.items())


def test_a_scaling_of_one_s_own_needs_tensors_that_hold_it():
    class Floor(fuser.Quantizer):
        def scaling(self):
            return refops.MXFP8Scaling(refops.E4M3, scale_rounding="floor")

    with pytest.raises(TypeError, match=r"Floor must name tensor_class and storage_class, .*BlockScaledTensorStorage"):
        Floor(rowwise=True, columnwise=True)

    class Whole(Floor):
        tensor_class, storage_class = q.BlockScaledTensor, q.BlockScaledTensorStorage

    x = torch.linspace(-3, 3, 32 * 64).reshape(32, 64)
    expected = refops.quantize(x.numpy(), Whole(rowwise=True, columnwise=True).scaling())
    made = Whole(rowwise=True, columnwise=True)(x)
    assert type(made) is q.BlockScaledTensor
    assert (made.dequantize().numpy() == refops.dequantize(expected)).all()


def test_dequantizing():
    x = normal(4, 8)
    halves = HalvesQuantizer()(x)
    assert torch.equal(maybe_dequantize(halves, torch.bfloat16), x.half().bfloat16())
    assert torch.equal(functional.dequantize(halves, torch.float32), x.half().float())
    quantizer, x = q.MXFP8Quantizer(E4M3), normal(32, 32)
    assert torch.equal(quantizer(HalvesQuantizer()(x)), quantizer(x.half().float()))
    with pytest.raises(NotImplementedError, match="OneScale must override dequantize"):
        maybe_dequantize(OneScaleQuantizer(E4M3)(x))


def test_products_finish_as_others():
    quantizer = OneScaleQuantizer(E4M3)
    x, w, dy, out = normal(8, 16), normal(4, 16, seed=1), normal(8, 4, seed=2), normal(8, 4, seed=3)
    qx, qw, qdy = quantizer(x), quantizer(w), quantizer(dy)
    x, w, dy = quantizer.values(x), quantizer.values(w), quantizer.values(dy)
    torch.testing.assert_close(linear_dgrad(qdy, qw), dy @ w)
    torch.testing.assert_close(linear_wgrad(qdy, qx, out_dtype=torch.float16), (dy.t() @ x).half())
    bias = normal(4, seed=4)
    result = linear_forward(qx, qw, bias=bias, alpha=2.0, beta=3.0, out=out.clone(), accumulate=True)
    torch.testing.assert_close(result, 2 * x @ w.t() + bias + 3 * out)
    halves = HalvesQuantizer()(w)
    torch.testing.assert_close(linear_forward(x, halves), x @ w.half().float().t())
    with pytest.raises(ValueError, match="do not fit"):
        gemm(qw, qdy)


def test_copies_of_storages():
    quantizer = q.MXFP8Quantizer(E4M3)
    quantizer.internal = True
    made = quantizer(normal(32, 32))
    for duplicate in (copy.copy(made), copy.deepcopy(made)):
        assert torch.equal(duplicate.dequantize(), made.dequantize()) and duplicate._quantizer == quantizer


@pytest.mark.parametrize("way", ["quantize", "quantize_impl", "quantize_buffers", "__call__"])
def test_no_fused_cast_passes_by_what_a_subclass_overrides(way):
    """For a format of this package: every cast of values goes through the method, even a cast that kernels fuse."""
    of_class = getattr(q.MXFP8Quantizer, way)
    negating = type(
        "Negating", (q.MXFP8Quantizer,), {way: lambda self, x, *args, **kwargs: of_class(self, -x, *args, **kwargs)}
    )
    quantizer, x, dy = negating(fp8_dtype=fuser.DType.kFloat8E4M3), normal(32, 64), normal(32, 64, seed=1)
    assert torch.equal(functional.gelu(x, quantizer).dequantize(), quantizer(functional.gelu(x)).dequantize())
    dx = quantizer(functional.dgelu(dy, x, None)).dequantize()
    assert torch.equal(functional.dgelu(dy, x, quantizer).dequantize(), dx)
    assert torch.equal(functional.dbias_dgelu(dy, x, quantizer)[1].dequantize(), dx)
    assert torch.equal(functional.bgrad_quantize(dy, quantizer)[1].dequantize(), quantizer(dy).dequantize())
