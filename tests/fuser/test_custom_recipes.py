"""TE's factories for custom recipes, and its reference quantizers with the numbers of `refops`."""

import dataclasses

import numpy as np
import pytest
import torch

import fuser
import refops
from fuser import ops, recipe
from fuser import quantization as q
from fuser.custom_recipes import quantizer_factories, quantizer_factory_zoo, reference
from fuser.custom_recipes.reference import CurrentScalingQuantizerRef, Fp4Formats, NVFP4QuantizerRef
from fuser.dispatch import as_numpy

FACTORIES = {
    name: getattr(module, name) for module in (quantizer_factories, quantizer_factory_zoo) for name in module.__all__
}


def normal(*shape, dtype=torch.bfloat16, seed=0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def step(of):
    """Output, input gradient and parameters' gradients of a step under a recipe."""
    torch.manual_seed(0)
    model = ops.Sequential(ops.RMSNorm(64), ops.Linear(64, 128), ops.SwiGLU(), ops.Linear(64, 64)).bfloat16()
    x = normal(64, 64).requires_grad_()
    with fuser.autocast(recipe=of):
        y = model(x)
    y.backward(normal(64, 64, seed=1))
    return [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


#: factory -> the recipe that it does again. A fused norm or activation rounds once less than a custom one's, whatever
#: the factory: not where the quantizers are the same classes.
SAME = {
    "delayed_scaling_factory": recipe.DelayedScaling,
    "current_scaling_factory": recipe.Float8CurrentScaling,
    "float8_block_scaling_factory": recipe.Float8BlockScaling,
    "mxfp8_factory": recipe.MXFP8BlockScaling,
    "nvfp4_factory": recipe.NVFP4BlockScaling,
}


@pytest.mark.parametrize("name", SAME)
def test_factories_do_the_built_in_recipes_again(name):
    expected = step(SAME[name]())
    made = step(recipe.CustomRecipe(qfactory=FACTORIES[name]))
    assert all(torch.equal(one, other) for one, other in zip(made, expected, strict=True))


@pytest.mark.parametrize(
    ("name", "built_in"),
    [
        ("mxfp8_fwd_high_precision_bwd_factory", recipe.MXFP8BlockScaling(backward_override="dequantized")),
        (
            "nvfp4_row_scaled_fwd_high_precision_bwd_factory",
            recipe.NVFP4BlockScaling(
                row_scaled_activation=True,
                backward_override="dequantized",
                disable_rht=True,
                disable_stochastic_rounding=True,
                disable_2d_quantization=True,
            ),
        ),
    ],
)
def test_backward_of_what_forward_multiplied_is_the_override(name, built_in):
    """In different ways, so one linear is compared: an override keeps its surroundings in high precision."""
    results = []
    for of in (built_in, recipe.CustomRecipe(qfactory=FACTORIES[name])):
        torch.manual_seed(0)
        op, x = ops.BasicLinear(64, 96, dtype=torch.bfloat16), normal(32, 64).requires_grad_()
        with fuser.autocast(recipe=of):
            y = op(x)
        y.backward(normal(32, 96, seed=1))
        results.append((y, x.grad, op.weight.grad))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


#: factory -> what it makes for input, weight and output gradient of a linear.
MADE = {
    "high_precision_fwd_mxfp8_bwd_factory": ("Identity/MXFP8", "Identity/MXFP8", "MXFP8"),
    "mxfp8_fwd_nvfp4_bwd_factory": ("MXFP8/NVFP4", "MXFP8>NVFP4", "NVFP4"),
    "nvfp4_1d_weight_factory": ("NVFP4", "NVFP4>NVFP4", "NVFP4"),
    "mxfp8_fwd_high_precision_bwd_factory": ("MXFP8>Identity", "MXFP8>Identity", "Identity"),
    "nvfp4_row_scaled_fwd_mxfp8_bwd_factory": ("NVFP4>MXFP8", "NVFP4>MXFP8", "MXFP8"),
    "nvfp4_row_scaled_fwd_high_precision_bwd_factory": ("NVFP4>Identity", "NVFP4>Identity", "Identity"),
}


def named(quantizer):
    """Its format; of two A/B, A>B where the second is made of the first's values."""
    if not isinstance(quantizer, q.HybridQuantizer):
        return type(quantizer).__name__.removesuffix("Quantizer")
    joined = {"original": "/", "rowwise_dequantized": ">"}[quantizer.columnwise_source]
    return named(quantizer.rowwise_quantizer) + joined + named(quantizer.columnwise_quantizer)


@pytest.mark.parametrize("name", quantizer_factory_zoo.__all__)
def test_mixed_factories(name):
    module_type = "grouped_linear" if name == "nvfp4_row_scaled_fwd_mxfp8_bwd_factory" else "linear"
    roles = [q.QuantizerRole(module_type, tensor) for tensor in ("input", "weight", "grad_output")]
    made = [FACTORIES[name](role) for role in roles]
    assert tuple(map(named, made)) == MADE[name]
    for quantizer, role in zip(made, roles, strict=True):
        parts = [getattr(quantizer, f"{d}_quantizer", quantizer) for d in ("rowwise", "columnwise")]
        rows = getattr(parts[0], "row_scaled_nvfp4", False)
        assert rows == ("row_scaled" in name and role.tensor_type == "input")
    assert isinstance(FACTORIES[name](None), q.Quantizer), "a slot without a role"

    def qfactory(role):
        return FACTORIES[name](dataclasses.replace(role, module_type=module_type))

    result = step(recipe.CustomRecipe(qfactory=qfactory))
    assert all(torch.isfinite(tensor).all() for tensor in result)


def test_a_factory_for_experts_says_that_other_operations_get_mxfp8():
    factory = quantizer_factory_zoo.nvfp4_row_scaled_fwd_mxfp8_bwd_factory
    with pytest.warns(UserWarning, match="this one is MXFP8 in both directions"):
        found = step(recipe.CustomRecipe(qfactory=factory))
    wanted = step(recipe.MXFP8BlockScaling())
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    for role in (None, q.QuantizerRole("dpa", "input"), q.QuantizerRole("linear", "grad_output")):
        assert isinstance(factory(role), q.MXFP8Quantizer)


# --- reference quantizers ---------------------------------------------------------------------------

CASES = [
    ("1x16", NVFP4QuantizerRef(Fp4Formats.E2M1), refops.NVFP4Scaling()),
    ("16x16", NVFP4QuantizerRef(quant_tile_shape=(16, 16)), refops.NVFP4Scaling(two_d=True)),
    ("rht", NVFP4QuantizerRef(with_rht=True), refops.NVFP4Scaling(rht=True)),
    (
        "no signs",
        NVFP4QuantizerRef(with_rht=True, with_random_sign_mask=False),
        refops.NVFP4Scaling(rht=True, sign_mask=0),
    ),
    ("rows", NVFP4QuantizerRef(row_scaled_nvfp4=True), refops.NVFP4Scaling(row_scaled=True)),
    (
        "4over6",
        NVFP4QuantizerRef(nvfp4_use_4over6=True, nvfp4_e4m3_max=256, nvfp4_4over6_err_mode="mse"),
        refops.NVFP4Scaling(four_over_six="mse", e4m3_max=256),
    ),
]


@pytest.mark.parametrize(("quantizer", "scaling"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_nvfp4_reference_shows_the_numbers_of_refops(quantizer, scaling):
    x = normal(2, 48, 64)
    made, expected = quantizer.quantize(x), refops.quantize(as_numpy(x), scaling, columnwise=True)
    assert made.data.shape == (96, 32) and made.data_t.shape == (64, 48) and made.original_shape == (2, 48, 64)
    assert made.scale.shape == (96, 4) and made.scale_t.shape == (64, 6) and made.scale.dtype == torch.float8_e4m3fn
    np.testing.assert_array_equal(made.data.numpy().ravel(), expected.rowwise_data.ravel())
    np.testing.assert_array_equal(made.data_t.numpy().ravel(), expected.columnwise_data.ravel())
    np.testing.assert_array_equal(made.scale.view(torch.uint8).numpy(), expected.rowwise_scale_inv[:96, :4])
    np.testing.assert_array_equal(made.scale_t.view(torch.uint8).numpy(), expected.columnwise_scale_inv[:64, :6])
    np.testing.assert_array_equal(made.global_amax_row.numpy(), expected.amax_rowwise)
    np.testing.assert_array_equal(made.global_amax_col.numpy(), expected.amax_columnwise)
    assert torch.equal(made.dequantize(), torch.from_numpy(refops.dequantize(expected)).to(x.dtype))
    empty = quantizer.make_empty((2, 48, 64), dtype=x.dtype)
    assert type(empty) is type(made)
    quantizer.update_quantized(x, empty)
    assert torch.equal(empty.data, made.data)
    quantizer.optimize_for_gemm = True  # as operations set it
    assert torch.equal(quantizer(x).scale.view(torch.uint8), made.scale.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("pow_2_scales", [False, True])
def test_current_scaling_reference(dtype, pow_2_scales):
    x = normal(3, 8, 20)
    made = CurrentScalingQuantizerRef(dtype, pow_2_scales=pow_2_scales, eps=1e-3)(x)
    fmt = {torch.float8_e4m3fn: refops.E4M3, torch.float8_e5m2: refops.E5M2}[dtype]
    scaling = refops.CurrentScaling(fmt, power_2_scale=pow_2_scales, amax_epsilon=1e-3)
    expected = refops.quantize(as_numpy(x), scaling, columnwise=True)
    assert made.data.shape == (24, 20) and made.data.dtype == made.quant_dtype == dtype
    np.testing.assert_array_equal(made.data.view(torch.uint8).numpy(), expected.rowwise_data.reshape(24, 20))
    assert torch.equal(made.data_t.view(torch.uint8), made.data.view(torch.uint8).t())
    assert made.scale.item() == made.scale_t.item() == expected.rowwise_scale_inv.item()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pow_2_scales": True}, "pow_2_scales must be False: refops has no such NVFP4; got True"),
        ({"quant_tile_shape": (1, 32)}, r"quant_tile_shape must be \(1, 16\) or \(16, 16\); got \(1, 32\)"),
        ({"dtype": "e2m1"}, "dtype must be Fp4Formats.E2M1; got 'e2m1'"),
        ({"with_rht": True, "row_scaled_nvfp4": True}, "row_scaled"),
    ],
)
def test_wrong_settings(arguments, message):
    with pytest.raises(ValueError, match=message):
        NVFP4QuantizerRef(**arguments)


def test_references_train_and_see_rounded_tensors():
    """What an activation or a norm hands over is rounded to its dtype: references take no part in a fused cast."""
    for factory, built_in in (
        (reference.current_scaling_ref_factory, recipe.Float8CurrentScaling()),
        (reference.nvfp4_ref_rht_2d_factory, recipe.NVFP4BlockScaling(disable_stochastic_rounding=True)),
    ):
        made, expected = step(recipe.CustomRecipe(qfactory=factory)), step(built_in)
        for one, other in zip(made, expected, strict=True):
            assert torch.isfinite(one).all()
            assert (one - other).float().norm() < 0.3 * other.float().norm()


def test_references_work_whatever_the_backend(monkeypatch):
    x, quantizer = normal(32, 32), NVFP4QuantizerRef()
    seen = []
    quantize = fuser.dispatch.quantize
    monkeypatch.setattr(
        fuser.dispatch,
        "quantize",
        lambda *args, **kwargs: seen.append(fuser.dispatch.current_backend()) or quantize(*args, **kwargs),
    )
    quantizer(x)
    assert seen == ["reference"] and quantizer.custom
    assert quantizer == NVFP4QuantizerRef() != NVFP4QuantizerRef(with_rht=True)


def test_helpers():
    values = torch.tensor([[0.25, 0.75, -5.0, 7.0, -0.0, 1.5, 2.5, 3.5]])
    packed = reference.cast_to_fp4x2(values)
    assert torch.equal(reference.cast_from_fp4x2(packed, torch.float32), torch.tensor([[0, 1, -4, 6, -0.0, 1.5, 2, 4]]))
    assert packed.shape == (1, 4) and packed.dtype == torch.uint8
    signs = reference.get_wgrad_sign_vector()
    assert signs.tolist() == [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
    assert reference.roundup_div(7, 4) == 2


def test_a_factory_that_raises_leaves_no_trace():
    def current(role):
        return q.Float8CurrentScalingQuantizer(fp8_dtype=fuser.DType.kFloat8E4M3, device="cpu")

    def broken(role):  # forward's quantizers are made when it raises
        if role.tensor_type == "grad_output":
            raise LookupError("no gradients")
        return q.MXFP8Quantizer(fp8_dtype=fuser.DType.kFloat8E4M3)

    def call(model, qfactory):
        of.qfactory = qfactory
        with fuser.autocast(recipe=of):
            return model(x)

    of, x = recipe.CustomRecipe(qfactory=broken), normal(64, 64)
    linear = ops.BasicLinear(64, 64, dtype=torch.bfloat16)
    for model in (ops.Sequential(linear), ops.Sequential(linear)):  # its first call, and one after others
        with pytest.raises(LookupError, match="no gradients"):
            call(model, broken)
        expected = call(ops.Sequential(linear), current)
        with pytest.raises(LookupError, match="no gradients"):
            call(model, broken)
        assert torch.equal(call(model, current), expected)
    model = ops.Sequential(linear)
    expected = call(model, current)
    with pytest.raises(LookupError, match="no gradients"):
        call(model, broken)
    assert torch.equal(call(model, current), expected)
