"""A different format for each direction, and none at all: the quantizers for both, their tensors, and training."""

import copy
import io

import numpy as np
import pytest
import torch

import fuser
import refops
from fuser import DType, gemm, ops
from fuser import quantization as q
from fuser.dispatch import TENSOR_FIELDS
from fuser.recipe import CustomRecipe, MXFP8BlockScaling

E4M3 = DType.kFloat8E4M3
#: name -> (how to make a new quantizer, its settings in `refops`).
FORMATS = {
    "row-scaled nvfp4": (lambda: q.NVFP4Quantizer(row_scaled_nvfp4=True), refops.NVFP4Scaling(row_scaled=True)),
    "nvfp4": (q.NVFP4Quantizer, refops.NVFP4Scaling()),
    "mxfp8": (lambda: q.MXFP8Quantizer(E4M3), refops.MXFP8Scaling(refops.E4M3)),
    "current": (lambda: q.Float8CurrentScalingQuantizer(E4M3), refops.CurrentScaling(refops.E4M3)),
    "block": (
        lambda: q.Float8BlockQuantizer(E4M3, block_scaling_dim=1),
        refops.BlockScaling(refops.E4M3, block_dim=1),
    ),
}
PAIRS = [("row-scaled nvfp4", "mxfp8"), ("mxfp8", "nvfp4"), ("current", "block"), ("nvfp4", "nvfp4")]


def normal(*shape, dtype=torch.bfloat16, seed=0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def hybrid(rowwise="nvfp4", columnwise="mxfp8", source="original"):
    return q.HybridQuantizer(
        rowwise_quantizer=FORMATS[rowwise][0](),
        columnwise_quantizer=FORMATS[columnwise][0](),
        columnwise_source=source,
    )


def assert_part(part, x, name, direction):
    """A part holds one copy: that which refops makes of `x`."""
    values, settings = x.float().numpy(), FORMATS[name][1]
    expected = refops.quantize(values, settings, rowwise=direction == "rowwise", columnwise=direction == "columnwise")
    for field in TENSOR_FIELDS:
        made, wanted = getattr(part.buffers, field), getattr(expected, field)
        assert (made is None) == (wanted is None), field
        if made is not None:
            np.testing.assert_array_equal(made.numpy(), wanted, err_msg=field)


# --- quantizers and tensors -------------------------------------------------------------------------


@pytest.mark.parametrize(("rowwise", "columnwise"), PAIRS)
def test_parts_are_what_refops_makes(rowwise, columnwise):
    x = normal(64, 96)
    tensor = hybrid(rowwise, columnwise)(x)
    assert_part(tensor._rowwise_storage, x, rowwise, "rowwise")
    assert_part(tensor._columnwise_storage, x, columnwise, "columnwise")
    assert torch.equal(tensor.dequantize(), tensor._rowwise_storage.dequantize())
    assert torch.equal(tensor.dequantize_columnwise(), tensor._columnwise_storage.dequantize_columnwise())
    again = hybrid(rowwise, columnwise, "rowwise_dequantized")(x)
    assert_part(again._rowwise_storage, x, rowwise, "rowwise")
    assert_part(again._columnwise_storage, again.dequantize(), columnwise, "columnwise")


@pytest.mark.parametrize("source", ["original", "rowwise_dequantized"])
def test_one_direction_alone(source):
    x, quantizer = normal(32, 64), hybrid(source=source)
    both = quantizer(x)
    quantizer.set_usage(rowwise=False)
    alone = quantizer(x)
    assert alone.get_usages() == {"rowwise": False, "columnwise": True}
    assert torch.equal(alone.dequantize(), both.dequantize_columnwise())
    quantizer.set_usage(columnwise=False)
    with pytest.raises(ValueError, match="must have row-wise or column-wise usage; got neither"):
        quantizer(x)


def test_usage_drops_a_part_and_makes_none():
    tensor = hybrid()(normal(32, 64))
    view = tensor.detach()
    view.update_usage(rowwise_usage=False)
    assert view.get_usages() == {"rowwise": False, "columnwise": True} and all(tensor.get_usages().values())
    with pytest.raises(RuntimeError, match=r"Requested rowwise usage, .* does not follow from the other direction"):
        view.update_usage(rowwise_usage=True)
    with pytest.raises(ValueError, match="b must hold a rowwise copy for this product"):
        gemm.linear_forward(view, normal(16, 64))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"rowwise_quantizer": q.DelayedScalingRequest()},
            TypeError,
            "rowwise_quantizer must be a Quantizer .* request",
        ),
        ({"columnwise_source": "rows"}, ValueError, "columnwise_source must be one of 'original', .* got 'rows'"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    given = {"rowwise_quantizer": q.NVFP4Quantizer(), "columnwise_quantizer": q.NVFP4Quantizer()}
    with pytest.raises(error, match=message):
        q.HybridQuantizer(**given | arguments)


class Own(q.QuantizedTensorStorage):
    """A storage of a user's: no buffers."""


class OwnQuantizer(q.Quantizer):
    def __init__(self):
        super().__init__(rowwise=True, columnwise=True)

    def quantize_impl(self, tensor):
        return Own()


@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
@pytest.mark.parametrize("storage_class", [None, Own])
def test_parts_have_buffers(direction, storage_class):
    quantizer = OwnQuantizer()
    quantizer.storage_class = storage_class
    parts = {"rowwise_quantizer": q.MXFP8Quantizer(E4M3), "columnwise_quantizer": q.MXFP8Quantizer(E4M3)}
    with pytest.raises(TypeError, match=f"{direction}_quantizer must make tensors with `buffers` .* got OwnQuantizer"):
        q.HybridQuantizer(**parts | {f"{direction}_quantizer": quantizer})
    with pytest.raises(TypeError, match=f"{direction}_storage must be a tensor with `buffers` .* got Own"):
        storages = {f"{d}_storage": Own() if d == direction else None for d in ("rowwise", "columnwise")}
        q.HybridQuantizedTensorStorage(**storages, quantizer=None)


def test_one_quantizer_is_no_two():
    one = q.MXFP8Quantizer(E4M3)
    with pytest.raises(ValueError, match="must be two objects; got the same one twice"):
        q.HybridQuantizer(rowwise_quantizer=one, columnwise_quantizer=one)


def test_shapes_of_both_formats_are_checked():
    quantizer = q.HybridQuantizer(rowwise_quantizer=q.NVFP4Quantizer(), columnwise_quantizer=q.MXFP8Quantizer(E4M3))
    with pytest.raises(ValueError, match="MXFP8 needs M % 32"):
        quantizer(normal(16, 64))
    quantizer.set_usage(columnwise=False)
    assert quantizer(normal(16, 64)).shape == (16, 64)
    assert not q.HybridQuantizer(
        rowwise_quantizer=q.MXFP8Quantizer(E4M3), columnwise_quantizer=q.NVFP4Quantizer()
    ).is_requantization_safe()


def test_equal_settings_make_equal_quantizers():
    assert hybrid() == hybrid() and hash(hybrid()) == hash(hybrid())
    assert hybrid() != hybrid(source="rowwise_dequantized") and hybrid() != hybrid("mxfp8")
    quantizer = hybrid()
    duplicate = quantizer.copy()
    duplicate.set_usage(rowwise=False)
    assert quantizer.get_usages() != duplicate.get_usages() and quantizer != duplicate
    assert duplicate.rowwise_quantizer is not quantizer.rowwise_quantizer


def test_tensors_keep_quantizers_that_communicate_with_nobody():
    reducing = q.Float8CurrentScalingQuantizer(E4M3, with_amax_reduction=True, amax_reduction_group=None)
    quantizer = q.HybridQuantizer(rowwise_quantizer=q.MXFP8Quantizer(E4M3), columnwise_quantizer=reducing)
    assert not quantizer(normal(32, 32))._quantizer.columnwise_quantizer.with_amax_reduction
    assert quantizer.columnwise_quantizer is reducing and quantizer.copy().columnwise_quantizer.with_amax_reduction


def test_parts_may_be_storages():
    """A shell is filled for each backward pass, and stays empty itself."""
    quantizer = hybrid()
    quantizer.rowwise_quantizer.internal = quantizer.columnwise_quantizer.internal = quantizer.internal = True
    storage = quantizer(normal(32, 64))
    assert not isinstance(storage._rowwise_storage, torch.Tensor)
    tensors, (shell,) = q.prepare_for_saving(storage)
    for _ in range(2):
        own = object.__new__(type(shell))
        own.__dict__.update(shell.__dict__)
        (restored,) = q.restore_from_saved([own], tensors)
        assert torch.equal(restored.dequantize_columnwise(), storage.dequantize_columnwise())
        assert shell.buffers.device is None


class TestTensor:
    @pytest.fixture(params=["hybrid", "identity"])
    def quantizer(self, request):
        return hybrid() if request.param == "hybrid" else q.IdentityQuantizer()

    def test_works_as_its_values(self, quantizer):
        x = normal(64, 64)
        tensor = quantizer(x)
        values = tensor.dequantize()
        assert torch.equal(tensor + 1, values + 1) and tensor.dtype == x.dtype
        assert torch.equal(tensor.float(), tensor.dequantize(dtype=torch.float32))
        assert type(tensor.float()) is torch.Tensor
        view = tensor.view(2, 32, 64)
        assert type(view) is type(tensor) and torch.equal(view.dequantize(), values.view(2, 32, 64))
        assert type(tensor.to_dtype(torch.float16)) is type(tensor)
        assert repr(tensor).startswith(type(tensor).__name__)

    def test_in_place_writes_keep_the_memory(self, quantizer):
        tensor = quantizer(normal(64, 64))
        memory = [array.data_ptr() for array in tensor.buffers.tensors.values()]
        new = normal(64, 64, seed=1)
        tensor.copy_(new)
        assert [array.data_ptr() for array in tensor.buffers.tensors.values()] == memory
        assert torch.equal(tensor.dequantize(), quantizer(new).dequantize())
        tensor.mul_(2)
        assert torch.equal(
            tensor.dequantize_columnwise(), quantizer(quantizer(new).dequantize() * 2).dequantize_columnwise()
        )

    def test_copies_are_their_own(self, quantizer):
        tensor = quantizer(normal(64, 64))
        values = tensor.dequantize().clone()
        copies = [tensor.clone(), copy.deepcopy(tensor), quantizer.make_empty((64, 64), dtype=torch.bfloat16)]
        copies[-1].copy_(tensor)
        tensor.zero_()
        for duplicate in copies:
            assert torch.equal(duplicate.dequantize(), values) and type(duplicate) is type(tensor)

    def test_files(self, quantizer):
        tensor = torch.nn.Parameter(quantizer(normal(64, 64)))
        file = io.BytesIO()
        torch.save({"weight": tensor}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)["weight"]
        assert isinstance(loaded, torch.nn.Parameter) and type(loaded) is type(tensor)
        assert loaded._quantizer == tensor._quantizer
        for name, array in tensor.buffers.tensors.items():
            assert torch.equal(loaded.buffers.tensors[name], array), name

    def test_parts_along_rows_are_plain(self, quantizer):
        tensor = quantizer(normal(64, 64))
        assert type(tensor[:32]) is torch.Tensor and torch.equal(tensor[:32], tensor.dequantize()[:32])
        with pytest.warns(UserWarning, match="split in high precision: only tensors in one quantized format are cut"):
            parts = torch.nn.Parameter(tensor).split(32)
        assert all(type(part) is torch.Tensor for part in parts)

    def test_clear(self, quantizer):
        quantizer.internal = True
        storage = quantizer(normal(64, 64))
        assert not isinstance(storage, torch.Tensor) and storage.device.type == "cpu"
        storage.clear()
        with pytest.raises(RuntimeError, match=r"of shape \(64, 64\) holds no data to dequantize"):
            storage.dequantize()

    def test_saving(self, quantizer):
        quantizer.internal = True
        storage = quantizer(normal(64, 64))
        tensors, shells = q.prepare_for_saving(storage, None, storage)
        assert all(tensor is None or isinstance(tensor, torch.Tensor) for tensor in tensors)
        assert all(storage.get_usages().values()), "the caller's stays whole"
        restored = q.restore_from_saved(shells, tensors)
        assert restored[1] is None
        for one in (restored[0], restored[2]):
            assert torch.equal(one.dequantize_columnwise(), storage.dequantize_columnwise())


def test_identity_holds_the_tensor_itself():
    x = normal(8, 24)
    tensor = q.IdentityQuantizer()(x)
    assert tensor._hp_data.data_ptr() == x.data_ptr() and tensor.get_data_tensors()[1] is None
    cast = q.IdentityQuantizer(dtype=torch.float32)(x)
    assert cast.dtype == torch.float32 and torch.equal(cast.dequantize(), x.float())
    tensor.update_usage(rowwise_usage=False, columnwise_usage=False)
    assert tensor.get_usages() == {"rowwise": True, "columnwise": True}


def test_identity_of_a_transposed_tensor_is_contiguous():
    x = normal(4, 8).t()
    made = [q.IdentityQuantizer()(x), q.IdentityTensor(x.shape, x.dtype, hp_data=x, quantizer=None)]
    made.append(
        q.HybridQuantizer(rowwise_quantizer=q.IdentityQuantizer(), columnwise_quantizer=q.IdentityQuantizer())(x)
    )
    for tensor in made:
        assert tensor.is_contiguous() and tensor.dequantize().is_contiguous() and torch.equal(tensor.dequantize(), x)
        assert torch.equal(tensor.view(-1).dequantize(), x.reshape(-1))


def test_empty_identity_has_the_quantizer_s_dtype():
    empty = q.IdentityQuantizer(dtype=torch.float32).make_empty((2, 3), dtype=torch.bfloat16)
    assert empty.dtype == empty._hp_data.dtype == torch.float32
    assert q.IdentityQuantizer().make_empty((2, 3), dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("quantizer", [q.IdentityQuantizer(), hybrid(), FORMATS["mxfp8"][0]()])
def test_what_is_taken_comes_to_the_present_device(quantizer):
    """Also a copy that was missing."""
    target = quantizer.make_empty((32, 64), device="meta")
    if isinstance(quantizer, q.HybridQuantizer):
        target.update_usage(columnwise_usage=False)
    target.set_buffers(quantizer(normal(32, 64)).buffers)
    assert {tensor.device.type for tensor in target.buffers.tensors.values()} == {"meta"}
    assert all(target.get_usages().values())


def test_gradients_pass_through():
    x = normal(32, 64).requires_grad_()
    hybrid()(x).dequantize().sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


# --- operations -------------------------------------------------------------------------------------


def recipe_of(forward, backward, gradient, source="rowwise_dequantized"):
    """Inputs and weights in two formats, gradients in one; a role tells which."""

    def factory(role):
        if role.tensor_type == "grad_output":
            return gradient()
        return q.HybridQuantizer(rowwise_quantizer=forward(), columnwise_quantizer=backward(), columnwise_source=source)

    return CustomRecipe(qfactory=factory)


def row_scaled():
    return q.NVFP4Quantizer(row_scaled_nvfp4=True)


def mxfp8():
    return q.MXFP8Quantizer(E4M3)


@pytest.mark.parametrize("source", ["original", "rowwise_dequantized"])
def test_linear_multiplies_the_parts(source):
    """Row-scaled NVFP4 in forward, MXFP8 in backward: every product is that of the copies it reads."""
    op = ops.BasicLinear(64, 96, dtype=torch.bfloat16)
    x, dy = normal(32, 64).requires_grad_(), normal(32, 96, seed=1)
    with fuser.autocast(recipe=recipe_of(row_scaled, mxfp8, mxfp8, source)):
        y = op(x)
    y.backward(dy)
    of_both = q.HybridQuantizer(rowwise_quantizer=row_scaled(), columnwise_quantizer=mxfp8(), columnwise_source=source)
    qx, qw, qdy = of_both(x.detach()), of_both(op.weight.detach()), mxfp8()(dy)
    rows = [one.dequantize(dtype=torch.float32) for one in (qx, qw, qdy)]
    columns = [one.dequantize_columnwise(dtype=torch.float32) for one in (qx, qw, qdy)]
    assert torch.equal(y, (rows[0] @ rows[1].T).to(y.dtype))
    assert torch.equal(x.grad, (rows[2] @ columns[1]).to(y.dtype))
    assert torch.equal(op.weight.grad, (columns[2].T @ columns[0]).to(y.dtype))


def test_backward_keeps_the_columnwise_parts_alone():
    model = ops.Sequential(ops.GELU(), ops.Linear(64, 96, bias=False), ops.GELU(), ops.Linear(96, 32))
    recipe = recipe_of(row_scaled, mxfp8, mxfp8)
    found = fuser.explain(model, normal(32, 64, dtype=torch.float32), recipe=recipe, quiet=True)
    (pipeline,) = found.pipelines
    of_linear = [pipeline.saved[i] for i, name in enumerate(pipeline.basic_ops) if name == "BasicLinear"]
    assert [tensor.format for tensors in of_linear for tensor in tensors] == ["MXFP8Scaling columnwise"] * 4
    assert all(tensor.bytes == tensor.theory for tensors in of_linear for tensor in tensors)
    emitted = {edge.quantizer for edge in pipeline.edges if edge.direction == "forward" and edge.quantized}
    assert "HybridQuantizer (rowwise NVFP4Quantizer, columnwise MXFP8Quantizer E4M3)" in emitted


def test_explain_names_what_is_kept_in_high_precision():
    recipe = recipe_of(mxfp8, q.IdentityQuantizer, q.IdentityQuantizer)
    x = normal(32, 64, dtype=torch.float32)
    (pipeline,) = fuser.explain(ops.BasicLinear(64, 96), x, recipe=recipe, quiet=True).pipelines
    assert [tensor.format for tensor in pipeline.saved[0]] == ["float32", "float32"]
    with_both = hybrid()(x)
    assert fuser.explanation._quantized_theory(with_both)[0] == "NVFP4Scaling rowwise and MXFP8Scaling columnwise"


def test_a_retained_graph_runs_backward_again():
    model = ops.Sequential(ops.Linear(64, 64), ops.SiLU(), ops.Linear(64, 32))
    x = normal(32, 64, dtype=torch.float32).requires_grad_()
    with fuser.autocast(recipe=recipe_of(row_scaled, mxfp8, mxfp8)):
        y = model(x)
    gradients = []
    for _ in range(2):
        x.grad = None
        y.sum().backward(retain_graph=True)
        gradients.append(x.grad.clone())
    assert torch.equal(*gradients)


def test_weights_that_are_kept_hybrid_train():
    recipe = recipe_of(q.NVFP4Quantizer, mxfp8, mxfp8)
    torch.manual_seed(0)
    with fuser.quantized_model_init(recipe=recipe):
        model = ops.Sequential(ops.Linear(64, 64), ops.GELU(), ops.Linear(64, 32))
    weight = model[0].weight
    assert isinstance(weight, q.HybridQuantizedTensor)
    memory = weight._columnwise_storage._columnwise_data.data_ptr()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, losses = normal(32, 64, dtype=torch.float32), []
    for _ in range(8):
        with fuser.autocast(recipe=recipe):
            loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0] and model[0].weight is weight
    assert weight._columnwise_storage._columnwise_data.data_ptr() == memory
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight.zero_()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other[0].weight.dequantize(), weight.dequantize())
    assert torch.equal(other[0].weight.dequantize_columnwise(), weight.dequantize_columnwise())
    model.half()
    assert isinstance(model[0].weight, q.HybridQuantizedTensor) and model[0].weight.dtype == torch.float16


def test_identity_everywhere_is_no_quantization():
    torch.manual_seed(0)
    model = ops.Sequential(ops.RMSNorm(64), ops.Linear(64, 128), ops.SwiGLU(), ops.Linear(64, 64)).bfloat16()
    results = []
    for enabled in (False, True):
        x = normal(32, 64).requires_grad_()
        with fuser.autocast(enabled, recipe=CustomRecipe(qfactory=lambda role: q.IdentityQuantizer())):
            y = model(x)
        y.float().square().sum().backward()
        results.append([y, x.grad, *(p.grad.clone() for p in model.parameters())])
        model.zero_grad()
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_quantized_product_with_an_operand_that_is_not():
    x, w = normal(32, 64), normal(16, 64, seed=1)
    one, other = q.MXFP8Quantizer(E4M3, columnwise=False)(x), q.IdentityQuantizer()(w)
    assert torch.equal(gemm.linear_forward(one, other, out_dtype=torch.float32), one.float() @ w.float().T)
    assert gemm.native_obstacle(other, one) == "an operand is not quantized"


def test_grouped_linear_takes_two_formats():
    op = ops.GroupedLinear(2, 64, 32, bias=False)
    splits, x = torch.tensor([32, 64]), normal(96, 64, dtype=torch.float32).requires_grad_()
    recipe = recipe_of(row_scaled, mxfp8, mxfp8)
    with fuser.autocast(recipe=recipe):
        y = op(x, splits)
    y.sum().backward()
    single = ops.BasicLinear(64, 32)
    single.weight = torch.nn.Parameter(op.weight1.detach().clone())
    part = x.detach()[32:].clone().requires_grad_()
    with fuser.autocast(recipe=recipe):
        of_part = single(part)
    of_part.sum().backward()
    assert torch.equal(y[32:], of_part) and torch.equal(x.grad[32:], part.grad)
    assert torch.equal(op.weight1.grad, single.weight.grad)


def test_the_recipe_of_both_is_custom():
    assert hybrid()._get_compatible_recipe() is q.IdentityQuantizer()._get_compatible_recipe() is CustomRecipe
    assert MXFP8BlockScaling is mxfp8()._get_compatible_recipe()


@pytest.mark.parametrize("internal", [False, True])
def test_constructors_take_te_s_arguments(internal):
    x = normal(32, 64)
    for quantizer, fields in (
        (hybrid(), ("rowwise_storage", "columnwise_storage")),
        (q.IdentityQuantizer(), ("hp_data",)),
    ):
        quantizer.internal = internal
        made = quantizer(x)
        arguments = {field: getattr(made, f"_{field}") for field in fields} | {"quantizer": quantizer}
        if internal:
            again = type(made)(**arguments, fake_dtype=x.dtype)
        else:
            again = type(made)(shape=x.shape, dtype=x.dtype, **arguments, device=x.device)
        assert type(again) is type(made) and again.shape == x.shape and again.dtype == x.dtype
        assert torch.equal(again.dequantize(), made.dequantize()) and again._quantizer == made._quantizer
    with pytest.raises(ValueError, match="rowwise_storage or columnwise_storage must be given; got neither"):
        q.HybridQuantizedTensorStorage(rowwise_storage=None, columnwise_storage=None, quantizer=hybrid())
