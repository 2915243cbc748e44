"""Products as a card computes them: the bits of `refops.gemm`, where a scope, a recipe or the environment says so."""

import copy
import functools
import itertools
import pickle
import threading
import types

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from linear_cases import RECIPES, linear_quantizers, seeded
from one_rounding import same_bits

import fuser
import refops
from fuser import cards, dispatch, gemm, ops, recipe
from fuser.cards import Products, current_products
from fuser.quantization.hybrid import HybridQuantizer
from fuser.quantization.identity import IdentityQuantizer
from fuser.quantization.storage import QuantizedTensorStorage
from fuser.recipe import MMParams
from refops.products import matmul

#: Recipes without random numbers -> the cards that multiply their formats.
CARDS_OF = {
    "delayed": ("hopper", "blackwell"),
    "current": ("hopper", "blackwell"),
    "block": ("hopper", "blackwell"),
    "mxfp8": ("blackwell",),
    "nvfp4": ("blackwell",),
}
PAIRS = [(name, card) for name, cards_of in CARDS_OF.items() for card in cards_of]
SIXTEEN_BITS = (torch.bfloat16, torch.float16)
#: What titles of recipes that say how products are computed end in.
TITLES = (" float32", " hopper", " blackwell")


def make_recipe(name, **options):
    return RECIPES[name](**options, **({"disable_stochastic_rounding": True} if name == "nvfp4" else {}))


def as_array(operand):
    """What `refops` takes for a tensor, a quantized one or its buffers."""
    buffers = getattr(operand, "buffers", operand)
    if not isinstance(buffers, dispatch.Buffers):
        return dispatch.as_numpy(operand)
    return dispatch.Reference(torch.device("cpu")).quantized(buffers)


def on_card(a, b, card, *, out_dtype, bias=None, **options):
    """The product by `refops` alone."""
    bias = None if bias is None else as_array(bias)
    made = refops.gemm(as_array(a), as_array(b), card, out_dtype=str(out_dtype)[6:], bias=bias, **options)
    return dispatch.as_torch(made)


def linear_on_card(own, card, x, w, dy, *, bias=None, split=(False, True, True)):
    """y, dx and dw by `refops` alone, of a layer without earlier steps; `split`: for each of them."""
    quantizers = [lambda tensor: tensor] * 3 if own is None else linear_quantizers(own)
    x, w, dy = [quantizer(tensor.detach()) for quantizer, tensor in zip(quantizers, (x, w, dy), strict=True)]
    products = [(w, x, "TN", bias), (w, dy, "NN", None), (x, dy, "NT", None)]
    return [
        on_card(a, b, card, layout=layout, bias=added, out_dtype=dy.dtype, use_split_accumulator=flag)
        for (a, b, layout, added), flag in zip(products, split, strict=True)
    ]


def tensors(rows, inner, columns, dtype=torch.float32):
    """x, w and dy, whose sums Hopper's FP8 units round otherwise than float32."""
    return (
        seeded(rows, inner, seed=1, dtype=dtype, requires_grad=True),
        seeded(columns, inner, seed=2, dtype=dtype),
        seeded(rows, columns, seed=3, dtype=dtype),
    )


def layer_of(w, bias=None, **options):
    layer = ops.Linear(w.shape[1], w.shape[0], bias=bias is not None, dtype=w.dtype, **options)
    with torch.no_grad():
        layer.weight.copy_(w)
        if bias is not None:
            layer.bias.copy_(bias)
    return layer


def step(layer, x, dy, card, own=None, **options):
    """y, dx and dw of a layer; the scope is around the forward pass alone."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    with fuser.products(card, **options), fuser.autocast(enabled=own is not None, recipe=own):
        y = layer(x)
    y.backward(dy)
    return [y.detach(), x.grad, layer.weight.grad]


def all_same(ours, theirs):
    return all(same_bits(one, other) for one, other in zip(ours, theirs, strict=True))


# --- layers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "card"), PAIRS)
def test_layers_have_the_bits_of_the_card(name, card):
    x, w, dy = tensors(160, 192, 160)
    bias = seeded(len(w), seed=4)
    expected = linear_on_card(make_recipe(name), card, x, w, dy, bias=bias)
    made = step(layer_of(w, bias), x, dy, card, make_recipe(name))
    assert all_same(made, expected)
    if (name, card) != ("mxfp8", "blackwell"):
        assert not all_same(step(layer_of(w, bias), x, dy, "float32", make_recipe(name)), expected)


@pytest.mark.parametrize("card", refops.products.CARDS)
@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
def test_layers_of_16_bits(dtype, card):
    x, w, dy = tensors(37, 101, 29, dtype)
    bias = seeded(29, seed=4, dtype=dtype)
    layer = layer_of(w, bias)
    expected = linear_on_card(None, card, x, w, dy, bias=bias)
    assert all_same(step(layer, x, dy, card), expected)


def test_float32_layers_stay_as_they_are():
    x, w, dy = tensors(37, 101, 29)
    assert all_same(step(layer_of(w), x, dy, "hopper"), step(layer_of(w), x, dy, "float32"))


@pytest.mark.parametrize("name", ["current", "block"])
def test_split_accumulators_of_the_recipe(name):
    """Whether each product is promoted; scales of blocks are multiplied by partial sums whatever is said."""
    x, w, dy = tensors(160, 160, 160)
    flags = (True, False, False)
    own = make_recipe(name)
    for product, flag in zip(("fprop", "dgrad", "wgrad"), flags, strict=True):
        setattr(own, f"fp8_gemm_{product}", MMParams(use_split_accumulator=flag))
    made = step(layer_of(w), x, dy, "hopper", own)
    assert all_same(made, linear_on_card(own, "hopper", x, w, dy, split=flags))
    usual = step(layer_of(w), x, dy, "hopper", make_recipe(name))
    changed = [not same_bits(one, other) for one, other in zip(made, usual, strict=True)]
    assert changed == ([True, True, True] if name == "current" else [False] * 3)


@pytest.mark.parametrize("interval", [None, 64])
def test_another_interval(interval):
    x, w, dy = tensors(160, 160, 160)

    def promoted(a, b, unit, **options):
        return matmul(a, b, unit, **options | {"promotion": interval})

    quantizers = linear_quantizers(make_recipe("current"))
    x8, w8, dy8 = [quantizer(tensor.detach()) for quantizer, tensor in zip(quantizers, (x, w, dy), strict=True)]
    products = [(w8, x8, "TN"), (w8, dy8, "NN"), (x8, dy8, "NT")]
    expected = [on_card(a, b, "hopper", layout=s, out_dtype=torch.float32, matmul=promoted) for a, b, s in products]
    made = step(layer_of(w), x, dy, "hopper", make_recipe("current"), promotion=interval)
    assert all_same(made, expected)
    for name, card in (("block", "hopper"), ("current", "blackwell")):  # nothing that software chooses
        made = step(layer_of(w), x, dy, card, make_recipe(name), promotion=interval)
        assert all_same(made, step(layer_of(w), x, dy, card, make_recipe(name)))


def test_main_grads_are_added_to():
    x, w, dy = tensors(128, 256, 128, torch.bfloat16)
    layer = layer_of(w, accumulate_into_main_grad=True)
    before = seeded(128, 256, seed=5)
    layer.weight.main_grad = before.clone()
    step(layer, x, dy, "hopper", make_recipe("current"))
    x8, _, dy8 = [q(t.detach()) for q, t in zip(linear_quantizers(make_recipe("current")), (x, w, dy), strict=True)]
    product = on_card(x8, dy8, "hopper", layout="NT", out_dtype=torch.float32, use_split_accumulator=True)
    assert same_bits(layer.weight.main_grad, product + before)


@pytest.mark.parametrize("delayed", [False, True])
def test_grouped_products(delayed):
    splits = [32, 0, 96]
    x, w, dy = tensors(128, 256, 128, torch.bfloat16)
    op = ops.GroupedLinear(3, 256, 128, bias=False, dtype=torch.bfloat16, delay_wgrad_compute=delayed)
    with torch.no_grad():
        for weight in op.weights:
            weight.copy_(w)
    with fuser.products("hopper"), fuser.autocast(recipe=make_recipe("current")):
        y = op(x, torch.tensor(splits))
    y.backward(dy)
    if delayed:
        with fuser.products("blackwell"):
            op.backward_dw()
    groups = zip(*(tensor.detach().split(splits) for tensor in (x, y, x.grad, dy)), op.weights, strict=True)
    for x_i, y_i, dx_i, dy_i, weight in groups:
        if len(x_i):
            made = [y_i, dx_i, weight.grad]
            assert all_same(made, linear_on_card(make_recipe("current"), "hopper", x_i, w, dy_i))
    assert not op.weight1.grad.any()


def test_fused_operations():
    """Those that multiply: bias and activation, scale and add, their gradients, each with operations beside it."""
    x, w, dy = tensors(160, 160, 160)
    residual = seeded(160, 160, seed=6)
    model = ops.Sequential(
        ops.Linear(160, 160, bias=False), ops.ConstantScale(2.0), ops.AddExtraInput(in_place=True), ops.Bias(160)
    )
    with torch.no_grad():
        model[0].weight.copy_(w)
        model[3].bias.zero_()
    made, unfused = [], []
    for results, context in ((made, fuser.fusions()), (unfused, fuser.fusions(only=True))):
        leaf = x.detach().requires_grad_()
        with context, fuser.products("hopper"), fuser.autocast(recipe=make_recipe("current")):
            y = model(leaf, residual.clone())
        y.backward(dy)
        results += [y, leaf.grad, model[0].weight.grad.clone()]
        model.zero_grad()
    assert all_same(made[1:], unfused[1:])
    x8, w8, _ = [q(t.detach()) for q, t in zip(linear_quantizers(make_recipe("current")), (x, w, dy), strict=True)]
    assert same_bits(made[0], on_card(w8, x8, "hopper", alpha=2.0, out_dtype=torch.float32) + residual)


def test_converted_models_and_quantized_weights():
    x, w, dy = tensors(128, 256, 128, torch.bfloat16)
    plain = torch.nn.Linear(256, 128, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        plain.weight.copy_(w)
    own = make_recipe("current", products="hopper")
    expected = linear_on_card(own, "hopper", x, w, dy)
    converted = fuser.convert(copy.deepcopy(plain), own)
    y = converted(x)
    y.backward(dy)
    assert all_same([y, x.grad, converted.weight.grad], expected)
    with fuser.quantized_model_init(recipe=own):
        quantized = ops.Linear(256, 128, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        quantized.weight.copy_(w)
    leaf = x.detach().requires_grad_()
    with fuser.autocast(recipe=own):
        y = quantized(leaf)
    y.backward(dy)
    assert all_same([y, leaf.grad, quantized.weight.grad], expected)


def two_layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(256, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32))


@functools.cache
def many_recipes():
    """What `compare` says of two layers under recipes that differ in the card, one of which lacks the format."""
    own = [
        make_recipe(name, products=card)
        for name in ("current", "mxfp8")
        for card in (None, "float32", "hopper", "blackwell")
    ]
    return fuser.compare(two_layers(), seeded(32, 256), own, quiet=True)


def test_comparisons_of_cards():
    """Recipes that differ in the card alone: `compare` computes each step on its card."""
    plain, same, hopper, blackwell = (many_recipes()[f"Float8CurrentScaling{c}"] for c in ("", *TITLES))
    assert plain.output == same.output and plain.gradient == same.gradient
    assert len({one.output for one in (plain, hopper, blackwell)}) == 3
    assert len({one.gradient for one in (plain, hopper, blackwell)}) == 3


def test_tables_of_many_recipes_show_every_number():
    """Beside one another as far as the console is wide; nothing is cut off."""
    found, text = many_recipes(), str(many_recipes())
    names = [f"{kind}{card}" for kind in ("Float8CurrentScaling", "MXFP8BlockScaling") for card in ("", *TITLES)]
    assert [one.recipe for one in found] == names
    lines = text.splitlines()
    assert max(map(len, lines)) <= 120
    heads = [line for line in lines if line.startswith("layer ")]
    shown = [one for one in found if one.error is None]
    columns = [one.recipe for one in shown]
    assert " ".join(" ".join(heads).replace("layer", "").split()) == " ".join([*columns, *columns])
    rows = [cell for line in lines if line.startswith("(model) ") for cell in line.split()[1:]]
    assert rows == [f"{one.output:.1e}" for one in shown]


def test_a_recipe_that_the_card_lacks_is_a_row():
    refused = many_recipes()["MXFP8BlockScaling hopper"]
    assert (refused.loss, refused.output, refused.layers, refused.error.card) == (None, None, [], "hopper")
    assert "\nMXFP8BlockScaling hopper " in str(many_recipes()) and " not on hopper " in str(many_recipes())
    assert "Under MXFP8BlockScaling hopper: In forward, operation 0 BasicLinear" in str(many_recipes())
    headings = [line for line in str(many_recipes()).splitlines() if line.startswith(("layer ", "tensor "))]
    assert headings and not any("MXFP8BlockScaling hopper" in line for line in headings)
    with fuser.products("hopper"):
        found = fuser.compare(two_layers(), seeded(32, 256), quiet=True)
        with pytest.raises(ValueError, match=r"^Under MXFP8BlockScaling: In forward, .*: blackwell can; got 'hopper'"):
            fuser.compare(two_layers(), seeded(32, 256), recipe.MXFP8BlockScaling(), quiet=True)
        with pytest.raises(ValueError, match=r"^Under NVFP4BlockScaling: In forward"):
            fuser.compare(two_layers(), seeded(32, 256), baseline=recipe.NVFP4BlockScaling(), quiet=True)
    assert [one.recipe for one in found if one.error] == ["MXFP8BlockScaling", "NVFP4BlockScaling"]
    assert "\nQuantized: 2 of 2 layers" in str(found)


def test_one_sentence_for_all_recipes_that_are_refused_for_one_cause():
    cards = {card: recipe.MXFP8BlockScaling(products=card) for card in ("ampere", "hopper", "blackwell")}
    found = fuser.compare(two_layers(), seeded(32, 256), cards, quiet=True)
    refusals = [line for line in str(found).splitlines() if line.startswith("Under ")]
    assert len(refusals) == 1 and refusals[0].startswith("Under ampere, hopper: In forward, ")
    assert [found[card].error.card for card in ("ampere", "hopper")] == ["ampere", "hopper"]
    (heading,) = {line.split()[1:][0] for line in str(found).splitlines() if line.startswith(("layer ", "tensor "))}
    assert heading == "blackwell"


@pytest.mark.parametrize("rows", [32, 5])
def test_a_baseline_leaves_what_the_sums_change(rows):
    """Of a padded batch, too: y, dx and dw of a step by hand, under one recipe with and without a card."""
    x, w, dy = tensors(rows, 256, 48)
    model = torch.nn.Sequential(torch.nn.Linear(256, 48, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(w)
    own = make_recipe("current")
    cards_of = [make_recipe("current", products=card) for card in ("hopper", "blackwell")]
    found = fuser.compare(model, x.detach(), cards_of, loss=lambda y: (y * dy).sum(), baseline=own, quiet=True)
    assert [one.recipe for one in found] == ["Float8CurrentScaling hopper", "Float8CurrentScaling blackwell"]
    padded = [torch.nn.functional.pad(tensor, (0, 0, 0, -rows % 16)) for tensor in (x.detach(), dy)]

    def step_on(card):
        y, _, dw = step(layer_of(w), *padded, card, own)
        return y[:rows], dw

    def error(one, other):
        return ((one.double() - other).norm() / other.double().norm()).item()

    for one, card in zip(found, ("hopper", "blackwell"), strict=True):
        for layer in one.layers:
            assert layer.output == one.output == pytest.approx(error(step_on(card)[0], step_on("float32")[0]))
        assert one.layers[0].gradient == pytest.approx(error(step_on(card)[1], step_on("float32")[1]))
    assert found.baseline.recipe == "Float8CurrentScaling"
    assert found.baseline.output == pytest.approx(error(step_on("float32")[0], x.detach() @ w.T))
    assert 0.02 < found.baseline.output < 0.1 and 1e-5 < found.recipes[0].output < 1e-2
    first = str(found).splitlines()[0]
    assert (
        first.startswith("Loss without a recipe: ")
        and f", under Float8CurrentScaling: {found.baseline.loss:.4g}. " in first
    )


def test_names_of_baselines():
    x, own = seeded(32, 256), make_recipe("current")
    names = {"a": own, "b": {"0": own}}
    for baseline in (own, "a"):
        found = fuser.compare(two_layers(), x, names, baseline=baseline, quiet=True)
        assert found.baseline.recipe == "a" and found["a"].output == found["a"].gradient == found["a"].loss_error == 0
        assert found["b"].output > 0
    other = recipe.MXFP8BlockScaling()
    found = fuser.compare(two_layers(), x, {"MXFP8BlockScaling": own}, baseline=other, quiet=True)
    assert found.baseline.recipe == "baseline MXFP8BlockScaling" and found.recipes[0].output > 0.01
    with pytest.raises(ValueError, match="baseline must be one of a, b; got 'c'"):
        fuser.compare(two_layers(), x, names, baseline="c")
    for wrong in (recipe.MXFP8BlockScaling, 3, ["a"]):
        with pytest.raises(TypeError, match="baseline must be a recipe, the name of one of recipes, or None; got"):
            fuser.compare(two_layers(), x, names, baseline=wrong)


def test_titles_of_recipes():
    """The class and what differs from its defaults, derived ones as long as they are."""
    own = recipe.Float8CurrentScaling(use_power_2_scales=True, products="hopper")
    assert own.title == "Float8CurrentScaling hopper use_power_2_scales=True"
    assert recipe.Float8CurrentScaling(fp8_format=recipe.Format.E4M3).title == "Float8CurrentScaling fp8_format=E4M3"
    own = recipe.Float8BlockScaling()
    assert own.title == "Float8BlockScaling"
    own.fp8_quant_fwd_inp = recipe.QParams(amax_epsilon=0.5)
    assert "fp8_quant_fwd_inp=QParams(" in own.title and "amax_epsilon=0.5" in own.title
    assert recipe.CustomRecipe(qfactory=print).title == "CustomRecipe qfactory=<built-in function print>"


# --- operands -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "card"), PAIRS)
@pytest.mark.parametrize("layout", gemm.LAYOUTS)
def test_gemm(name, card, layout):
    """Each layout, with a factor, a bias of another dtype, and memory to add to; on both backends."""
    m, n, k = (64, 32, 160) if name == "mxfp8" else (48, 80, 144)
    shapes = [(k, m) if layout[1] == "T" else (m, k), (k, n) if layout[0] == "N" else (n, k)]
    of_input, of_weight, _ = linear_quantizers(make_recipe(name))
    b = of_input(seeded(*shapes[0], seed=1))
    a = (of_input if layout == "NT" else of_weight)(seeded(*shapes[1], seed=2))
    bias, out = seeded(n, seed=3, dtype=torch.float16), seeded(m, n, seed=4, dtype=torch.bfloat16)
    options = {"layout": layout, "bias": bias, "alpha": -0.75}
    with fuser.products(card):
        made = gemm.gemm(a, b, out_dtype=torch.bfloat16, use_split_accumulator=True, **options)
        added = gemm.gemm(a, b, out=out.clone(), accumulate=True, beta=0.5, use_split_accumulator=True, **options)
    with fuser.products(card), fuser.backend("reference"):
        assert same_bits(made, gemm.gemm(a, b, out_dtype=torch.bfloat16, use_split_accumulator=True, **options))
    sums = functools.partial(on_card, a, b, card, use_split_accumulator=True, **options)
    assert same_bits(made, sums(out_dtype=torch.bfloat16))
    assert same_bits(added, sums(out_dtype=torch.float32).add_(out.float(), alpha=0.5).bfloat16())


@pytest.mark.parametrize("layout", gemm.LAYOUTS)
@pytest.mark.parametrize("reference", [False, True])
def test_gradients_of_plain_operands(layout, reference):
    """The card computes them: each is a product of the gradient of y and of the other operand."""
    m, n, k = 48, 80, 144
    b = seeded(*((k, m) if layout[1] == "T" else (m, k)), seed=1, dtype=torch.bfloat16).requires_grad_()
    a = seeded(*((k, n) if layout[0] == "N" else (n, k)), seed=2, dtype=torch.bfloat16).requires_grad_()
    bias = seeded(n, seed=3, dtype=torch.bfloat16).requires_grad_()
    dy = seeded(m, n, seed=4, dtype=torch.bfloat16)
    with fuser.products("hopper"), fuser.backend("reference" if reference else "auto"):
        y = gemm.gemm(a, b, layout=layout, bias=bias, alpha=-0.75)
    assert same_bits(y.detach(), on_card(a, b, "hopper", layout=layout, bias=bias, alpha=-0.75, out_dtype=y.dtype))
    y.backward(dy)  # outside of the scope
    options = {"alpha": -0.75, "out_dtype": torch.bfloat16}
    left, right = {"TN": ((b, dy, "NT"), (a, dy, "NN")), "NN": ((dy, b, "NT"), (a, dy, "TN"))}.get(
        layout, ((dy, b, "NN"), (dy, a, "TN"))
    )
    for operand, (first, second, order) in ((a, left), (b, right)):
        assert same_bits(operand.grad, on_card(first, second, "hopper", layout=order, **options))
    plain = [one.detach().clone().requires_grad_() for one in (a, b)]
    gemm.gemm(*plain, layout=layout, alpha=-0.75).backward(dy)
    for operand, other in zip((a, b), plain, strict=True):
        assert torch.allclose(operand.grad.float(), other.grad.float(), rtol=2**-7, atol=2**-7)
    assert torch.equal(bias.grad, dy.float().sum(0).bfloat16())


def test_the_gradient_beside_a_quantized_operand():
    """It is that of the dequantized one, which has no gradient itself."""
    x, w, _ = tensors(16, 160, 32, torch.bfloat16)
    quantized = linear_quantizers(make_recipe("current"))[0](w)
    x = x.detach().requires_grad_()
    with fuser.products("ampere"):
        y = gemm.gemm(quantized, x)
    y.backward(torch.ones_like(y))
    values = quantized.dequantize(dtype=torch.bfloat16)
    assert same_bits(x.grad, on_card(values, torch.ones_like(y), "ampere", layout="NN", out_dtype=torch.bfloat16))


def test_quantized_and_plain_operands():
    """The quantized one is dequantized to the dtype of the plain one."""
    x, w, _ = tensors(16, 160, 32, torch.bfloat16)
    quantizer = linear_quantizers(make_recipe("current"))[0]
    wide = quantizer(seeded(32, 160, seed=2))
    with fuser.products("ampere"):
        for quantized in (wide, quantizer(w)):
            values = quantized.dequantize(dtype=torch.bfloat16)
            assert same_bits(gemm.gemm(quantized, x), on_card(values, x, "ampere", out_dtype=torch.bfloat16))
            expected = on_card(x, values, "ampere", out_dtype=torch.bfloat16)
            assert same_bits(gemm.gemm(x, quantized, out_dtype=torch.bfloat16), expected)
        with fuser.products("float32"):
            expected = gemm.gemm(wide, x.float())
        assert same_bits(gemm.gemm(wide, x.float()), expected)


def test_formats_of_the_callers_own_beside_plain_ones():
    """What has a product of its own only with its like dequantizes itself, and is a plain operand then."""

    class Own(QuantizedTensorStorage):
        custom = True

        def __init__(self, values):
            self.values, self.original_shape, self.dtype, self.device = (
                values,
                values.shape,
                values.dtype,
                values.device,
            )
            self._quantizer = types.SimpleNamespace(qgemm=None)

        def dequantize(self, *, dtype=None):
            return self.values

    x, w, _ = tensors(16, 160, 32, torch.bfloat16)
    expected = on_card(w, x, "ampere", out_dtype=torch.float32)
    with fuser.products("ampere"):
        assert same_bits(gemm.gemm(Own(w), x, out_dtype=torch.float32), expected)
        assert same_bits(gemm.gemm(w, Own(x), out_dtype=torch.float32), expected)


def test_products_that_no_card_has():
    """Of plain operands of two dtypes; of float64 where that is computed in."""
    x, w, _ = tensors(16, 160, 32)
    for a, b in ((w.half(), x.bfloat16()), (w, x.half())):
        expected = gemm.gemm(a, b)
        with fuser.products("hopper"):
            assert same_bits(gemm.gemm(a, b), expected)
    with fuser.backend("float64"), fuser.products("hopper"):
        assert gemm.gemm(w.double(), x.double()).dtype is torch.float64
        wide = gemm.gemm(w.half(), x.half(), out_dtype=torch.float64)
        assert same_bits(wide, on_card(w.half(), x.half(), "hopper", out_dtype=torch.float32).double())


def test_directions_of_other_formats():
    """Forward in FP8, as the card computes it; backward of what is not quantized, in its dtype."""

    def factory(role):
        fp8 = fuser.Float8CurrentScalingQuantizer(fuser.DType.kFloat8E4M3, device="cpu")
        return HybridQuantizer(rowwise_quantizer=fp8, columnwise_quantizer=IdentityQuantizer())

    x, w, dy = tensors(32, 160, 48, torch.bfloat16)
    own = recipe.CustomRecipe(qfactory=factory, products="hopper")
    leaf = x.detach().requires_grad_()
    with fuser.autocast(recipe=own):
        y = layer_of(w)(leaf)
    y.backward(dy)
    x8, w8 = [factory(None).rowwise_quantizer(tensor.detach()) for tensor in (x, w)]
    dy8 = factory(None).rowwise_quantizer(dy).dequantize(dtype=torch.bfloat16)
    assert same_bits(y, on_card(w8, x8, "hopper", out_dtype=torch.bfloat16))
    assert same_bits(leaf.grad, on_card(w, dy8, "hopper", layout="NN", out_dtype=torch.bfloat16))


@pytest.mark.parametrize("shape", [(0, 32), (16, 0), (2, 3, 32)])
def test_empty_operands_and_leading_dimensions(shape):
    x, w = seeded(*shape, dtype=torch.bfloat16), seeded(8, shape[-1], seed=1, dtype=torch.bfloat16)
    with fuser.products("blackwell"):
        y = gemm.linear_forward(x, w, bias=torch.ones(8))
        dw = gemm.linear_wgrad(y, x)
    assert torch.equal(y, on_card(w, x, "blackwell", bias=torch.ones(8), out_dtype=torch.bfloat16))
    assert y.shape == (*shape[:-1], 8) and dw.shape == (8, shape[-1])


# --- what decides -------------------------------------------------------------------------------------


def test_scopes_nest_and_decorate():
    @fuser.products("blackwell")
    def name():
        return current_products().name

    assert current_products() == Products("float32")
    with fuser.products("hopper", promotion=64) as selected:
        assert selected == current_products() == Products("hopper", 64)
        assert name() == name() == "blackwell"
        with pytest.raises(RuntimeError), fuser.products("float32"):
            assert current_products().name == "float32"
            raise RuntimeError
        assert current_products().name == "hopper"
    assert current_products().name == "float32"


@pytest.mark.parametrize(
    ("options", "shown"),
    [({}, "hopper"), ({"promotion": None}, "hopper, never promoted"), ({"promotion": 64}, "hopper, promoted every 64")],
)
@pytest.mark.parametrize("runs", [False, True])
def test_what_is_in_force_is_shown(options, shown, runs):
    """By `explain`, planned or run, of a scope and of a recipe; by the module that has the recipe; by a function."""
    own, x = make_recipe("current", products="blackwell"), [seeded(32, 64)] if runs else []
    layer = ops.Sequential(ops.Linear(64, 64))
    with fuser.products("hopper", **options):
        found = fuser.explain(layer, *x, recipe=own, quiet=True)
        assert str(fuser.current_products()) == shown
    assert found.pipelines[0].products == shown and f"\n  products: {shown}\n" in str(found)
    found = fuser.explain(layer, *x, recipe=own, quiet=True)
    assert found.to_dict()["pipelines"][0]["products"] == "blackwell"
    assert "products" not in str(fuser.explain(layer, *x, recipe=make_recipe("current"), quiet=True))
    converted = fuser.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)), own)
    assert "recipe=Float8CurrentScaling, products='blackwell')" in repr(converted)
    assert fuser.explain(converted, *x, quiet=True).pipelines[0].products == "blackwell"


def test_other_threads_have_none():
    seen = []

    def work():
        seen.append(current_products().name)
        with fuser.products("ampere"):
            seen.append(current_products().name)

    with fuser.products("hopper"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert current_products().name == "hopper"
    assert seen == ["float32", "ampere"]


def test_order_of_scope_recipe_and_environment(monkeypatch):
    monkeypatch.setenv(cards.VARIABLE, "ampere")
    assert current_products().name == "ampere"
    with fuser.autocast(recipe=recipe.DelayedScaling()):
        assert current_products().name == "ampere"
    with fuser.autocast(recipe=recipe.DelayedScaling(products="float32")):
        assert current_products().name == "float32"
    with fuser.autocast(recipe=recipe.DelayedScaling(products="blackwell")):
        assert current_products().name == "blackwell"
        with fuser.products("hopper"), fuser.autocast(recipe=recipe.DelayedScaling(products="ampere")):
            assert current_products().name == "hopper"
        with fuser.autocast(enabled=False):
            assert current_products().name == "ampere"
    monkeypatch.setenv(cards.VARIABLE, "")
    assert current_products().name == "float32"


@pytest.mark.parametrize("way", ["scope", "recipe", "environment"])
def test_backward_has_what_forward_had(way, monkeypatch):
    """Under whatever it is called: another scope, another recipe, none, in another thread."""
    x, w, dy = tensors(160, 160, 160)
    own = make_recipe("current", products="hopper" if way == "recipe" else None)
    expected = linear_on_card(own, "hopper", x, w, dy)
    layer = layer_of(w)
    if way == "environment":
        monkeypatch.setenv(cards.VARIABLE, "hopper")

    def forward():
        x.grad = layer.weight.grad = None
        with fuser.autocast(recipe=own):
            if way != "scope":
                return layer(x)
            with fuser.products("hopper"):
                return layer(x)

    def backward(y):
        y.backward(dy)
        assert all_same([y, x.grad, layer.weight.grad], expected)

    backward(forward())
    y = forward()
    with fuser.products("blackwell"):
        backward(y)
    y = forward()
    with fuser.autocast(recipe=make_recipe("mxfp8", products="blackwell")):
        backward(y)
    y = forward()
    thread = threading.Thread(target=y.backward, args=(dy,))
    thread.start()
    thread.join()
    assert all_same([y, x.grad, layer.weight.grad], expected)
    if way == "environment":
        for later in ("blackwell", "", "no card"):
            monkeypatch.setenv(cards.VARIABLE, "hopper")
            y = forward()
            monkeypatch.setenv(cards.VARIABLE, later)
            backward(y)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_have_the_variable_of_forward(use_reentrant, monkeypatch):
    x, w, dy = tensors(160, 160, 160)
    block, own = layer_of(w), make_recipe("current")
    expected = linear_on_card(own, "hopper", x, w, dy)
    monkeypatch.setenv(cards.VARIABLE, "hopper")
    with fuser.autocast(recipe=own):
        y = fuser.checkpoint(block, x, use_reentrant=use_reentrant)
    monkeypatch.setenv(cards.VARIABLE, "blackwell")
    y.backward(dy)
    assert all_same([y, x.grad, block.weight.grad], expected)
    assert current_products().name == "blackwell"


def test_float32_forward_has_a_float32_backward():
    x, w, dy = tensors(160, 160, 160)
    layer = layer_of(w)
    expected = step(layer, x, dy, "float32", make_recipe("current"))
    for context in (fuser.products("hopper"), fuser.autocast(recipe=make_recipe("current", products="hopper"))):
        leaf = x.detach().requires_grad_()
        layer.zero_grad()
        with fuser.autocast(recipe=make_recipe("current")):
            y = layer(leaf)
        with context:
            y.backward(dy)
        assert all_same([y, leaf.grad, layer.weight.grad], expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints(use_reentrant):
    """`fuser.checkpoint` computes again under the scope of forward, torch's under that around the backward pass."""
    x, w, dy = tensors(160, 160, 160)
    block = ops.Sequential(layer_of(w), ops.GELU(), layer_of(w))

    def gradients(call, *, scope_around_backward):
        leaf = x.detach().requires_grad_()
        block.zero_grad()
        with fuser.autocast(recipe=make_recipe("current")):
            with fuser.products("hopper"):
                y = call(block, leaf)
                if scope_around_backward:
                    y.backward(dy)
            if not scope_around_backward:
                y.backward(dy)
        return [y, leaf.grad, *(parameter.grad for parameter in block.parameters())]

    expected = gradients(lambda function, x: function(x), scope_around_backward=False)
    own = functools.partial(fuser.checkpoint, use_reentrant=use_reentrant)
    torchs = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=use_reentrant)
    assert all_same(gradients(own, scope_around_backward=False), expected)
    assert all_same(gradients(own, scope_around_backward=True), expected)
    assert all_same(gradients(torchs, scope_around_backward=True), expected)


def test_export_refuses():
    """A recorded product would be torch's, of float32 sums."""
    layer, x = layer_of(seeded(8, 16, dtype=torch.bfloat16)), seeded(4, 16, dtype=torch.bfloat16)
    with fuser.products("hopper"), pytest.raises(RuntimeError, match=r"torch\.export can't record gemm"):
        torch.export.export(layer, (x,), strict=False)


# --- recipes ------------------------------------------------------------------------------------------


def test_recipes_say_how():
    own, other = recipe.MXFP8BlockScaling(products="blackwell"), recipe.MXFP8BlockScaling()
    assert own != other and "products='blackwell'" in repr(own) and other.products is None
    for duplicate in (copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
        assert duplicate == own and duplicate.products == "blackwell"
    own.products = None
    assert own == other
    with pytest.raises(TypeError):
        recipe.Float8CurrentScaling(False, recipe.Format.E4M3, *[MMParams()] * 3, False, False, None, "hopper")
    own.hold_values()
    with pytest.raises(RuntimeError, match="products can't be changed"):
        own.products = "hopper"


def test_flags_of_recipes_without_fields_for_them():
    for own in (recipe.DelayedScaling(), recipe.MXFP8BlockScaling(), recipe.CustomRecipe(qfactory=print)):
        flags = [own.product_params(product).use_split_accumulator for product in ("fprop", "dgrad", "wgrad")]
        assert flags == [False, True, True]
    assert recipe.Float8BlockScaling().product_params("fprop") == MMParams(True)


# --- errors -------------------------------------------------------------------------------------------


NAMES = r"must be one of 'float32', 'ampere', 'hopper', 'blackwell'; got "


@pytest.mark.parametrize("wrong", ["Hopper", "cuda", "", None, 9, "environment"])
def test_other_names(wrong, monkeypatch):
    with pytest.raises(ValueError, match=f"name {NAMES}"):
        fuser.products(wrong)
    if wrong is not None:
        with pytest.raises(ValueError, match=f"products {NAMES}"):
            recipe.DelayedScaling(products=wrong)
    if wrong:
        monkeypatch.setenv(cards.VARIABLE, str(wrong))
        with pytest.raises(ValueError, match=f"FUSER_PRODUCTS {NAMES}'{wrong}'"):
            gemm.gemm(*[torch.ones(2, 2, dtype=torch.bfloat16)] * 2)


@pytest.mark.parametrize(
    ("wrong", "error"), [(0, ValueError), (48, ValueError), (True, TypeError), ("Split", TypeError), (1.5, TypeError)]
)
def test_other_intervals(wrong, error):
    rule = rf"^promotion must be 'split', None or a positive multiple of 32; got {wrong!r}$"
    with pytest.raises(error, match=rule):
        fuser.products("hopper", promotion=wrong)


def test_refops_says_what_multiplies_tensors_of_fuser():
    quantized = linear_quantizers(make_recipe("mxfp8"))[0](seeded(32, 64))
    rule = r"a must be a refops\.Quantized or a plain tensor; got a MXFP8Tensor, which fuser\.gemm\.gemm multiplies"
    with pytest.raises(TypeError, match=rule):
        refops.gemm(quantized, quantized, "blackwell")
    with fuser.products("blackwell"):
        assert gemm.gemm(quantized, quantized).shape == (32, 32)


def test_an_error_names_the_group():
    op = ops.GroupedLinear(2, 64, 64, bias=False)
    own = make_recipe("mxfp8", products="blackwell")
    wrong = pytest.raises(ValueError, match=r"group 0 of 32 rows.*E8M0.*blackwell can; got 'hopper'")
    with fuser.products("hopper"), fuser.autocast(recipe=own), wrong:
        op(seeded(64, 64), torch.tensor([32, 32]))


def test_cards_without_the_product():
    x, w, dy = tensors(128, 256, 128)
    for name, others in CARDS_OF.items():
        for card in set(refops.products.CARDS) - set(others):
            with pytest.raises(ValueError, match=rf"{' and '.join(others)} can; got '{card}'"):
                step(layer_of(w), x, dy, card, make_recipe(name))


def fp8(quantizer, **options):
    return functools.partial(quantizer, fuser.DType.kFloat8E4M3, **options)


#: Quantizers of formats whose scales are of different kinds.
KINDS = {
    "mxfp8": fp8(fuser.MXFP8Quantizer),
    "nvfp4": fuser.NVFP4Quantizer,
    "current": fp8(fuser.Float8CurrentScalingQuantizer, device="cpu"),
    "block": fp8(fuser.Float8BlockQuantizer, block_scaling_dim=1),
}
#: Pairs of them that a card multiplies: on Blackwell scales of blocks of 128 become E8M0 bytes.
MIXED = {("blackwell", "mxfp8", "block"), ("blackwell", "block", "mxfp8")}


@pytest.mark.parametrize("card", refops.products.CARDS)
def test_products_of_two_formats_are_refused_on_a_card_that_lacks_them(card):
    """Without a card they are computed; on one none is emulated, nor in backward alone."""
    x, w, dy = tensors(32, 128, 128, torch.bfloat16)
    for one, other in itertools.permutations(KINDS, 2):
        a, b = KINDS[one]()(w), KINDS[other]()(x)
        assert gemm.gemm(a, b, out_dtype=torch.float32).isfinite().all()
        with fuser.products(card):
            if (card, one, other) in MIXED:
                assert gemm.gemm(a, b, out_dtype=torch.float32).isfinite().all()
                continue
            with pytest.raises(ValueError, match=f" can; got '{card}'"):
                gemm.gemm(a, b, out_dtype=torch.float32)

        def factory(role, one=one, other=other):
            return KINDS[other if role.tensor_type == "grad_output" else one]()

        own = recipe.CustomRecipe(qfactory=factory)
        step(layer_of(w), x, dy, "float32", own)
        with pytest.raises(ValueError, match=f" can; got '{card}'"):
            step(layer_of(w), x, dy, card, own)


# --- GPUs ---------------------------------------------------------------------------------------------


def test_which_devices_are_cards(monkeypatch):
    gpu = torch.device("cuda")
    for capability, names in {(8, 0): {"ampere"}, (9, 0): {"hopper"}, (10, 0): {"blackwell"}, (8, 9): set()}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert {name for name in refops.products.CARDS if cards.is_card(gpu, Products(name))} == names
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert not cards.is_card(gpu, Products("hopper", None)) and not cards.is_card(
        torch.device("cpu"), Products("hopper")
    )


@pytest.mark.parametrize("split", [False, True])
def test_a_card_multiplies_itself(split, monkeypatch):
    """torch's products on the device that is the card: of FP8 with its short sums where the accumulator isn't split."""
    x, w, _ = tensors(32, 64, 48, torch.bfloat16)
    x8, w8 = [linear_quantizers(make_recipe("current"))[0](tensor.detach()) for tensor in (x, w)]
    asked = []

    def scaled_mm(*operands, use_fast_accum, **options):
        asked.append(use_fast_accum)
        return torch.zeros(32, 48, dtype=options["out_dtype"])

    monkeypatch.setattr(gemm, "is_card", lambda device, selected: True)
    monkeypatch.setattr(gemm, "native_obstacle", lambda a, b, layout: None)
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(dispatch, "gemm", None)
    with fuser.products("hopper"):
        assert not gemm.gemm(w8, x8, use_split_accumulator=split).any()
        own = gemm.gemm(w, x)
    assert asked == [not split]
    assert same_bits(own, gemm.gemm(w, x))
    assert not gemm.gemm(w8, x8, use_split_accumulator=split).any() and asked[1:] == [False]


def test_values_are_not_copied(monkeypatch):
    """A tensor's memory is what the reference reads."""
    seen = []
    monkeypatch.setattr(refops.products, "gemm", lambda a, b, card, **options: seen.append((a, b)) or np.zeros((1, 1)))
    x = torch.ones(1, 16, dtype=torch.float16)
    dispatch.gemm(x, x, "hopper", out_dtype=torch.float32)
    assert all(np.shares_memory(array, x.numpy()) for array in seen[0])
