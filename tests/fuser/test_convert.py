"""`fuser.convert`: models of torch.nn compute with operations, and are otherwise the models that they were."""

import copy
import functools
import io
import itertools
import operator
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import parametrizations, prune, weight_norm

import fuser
import refops
from fuser import conversion, ops
from fuser.quantization.identity import IdentityQuantizer
from fuser.quantization.state import DelayedScalingRequest
from fuser.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from fuser.tracing import OLD_TORCH
from tiers import sampled

RECIPES = (DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling)


def feed_forward(width=64, hidden=128):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, hidden), nn.GELU(approximate="tanh"), nn.Linear(hidden, width)
    )


def inputs(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gradients(model, x, recipe=None):
    """Output, gradient of the input and of each parameter, of a loss with unequal weights; NVFP4 draws one seed."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(3)
    if recipe is None:
        y = model(x)
    else:
        with fuser.autocast(recipe=recipe):
            y = model(x)
    y.backward(inputs(*y.shape, seed=2).to(y.dtype))
    return [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


def assert_equal(some, others):
    assert len(some) == len(others)
    for one, other in zip(some, others, strict=True):
        assert torch.equal(one, other)


def quantizes(model, *args):
    """Whether an output changes when quantization is switched off around the call."""
    with torch.no_grad():
        y = model(*args)
        with fuser.autocast(enabled=False):
            return not torch.equal(y, model(*args))


class TestNumbers:
    @sampled("kind", RECIPES, every=2, in_all=1)
    def test_a_sequence_is_the_pipeline_of_operations_bit_for_bit(self, kind):
        model = feed_forward()
        same = ops.Sequential(ops.LayerNorm(64), ops.Linear(64, 128), ops.GELU(), ops.Linear(128, 64))
        names = [name for name in same.state_dict() if not name.endswith("_extra_state")]
        same.load_state_dict(dict(zip(names, model.state_dict().values(), strict=True)))
        fuser.convert(model, kind())
        for _ in range(2):  # delayed scaling changes its scales
            assert_equal(gradients(model, inputs(2, 64, 64)), gradients(same, inputs(2, 64, 64), kind()))

    @pytest.mark.parametrize("cls", [nn.ReLU, nn.SiLU, lambda: nn.GELU(approximate="tanh"), lambda: nn.RMSNorm(32)])
    def test_one_module_is_its_operation(self, cls):
        module = fuser.convert(cls(), MXFP8BlockScaling())
        name = type(module).__name__.removeprefix("Converted")
        op = getattr(ops, name)(32, eps=torch.finfo(torch.float32).eps) if name == "RMSNorm" else getattr(ops, name)()
        assert_equal(gradients(module, inputs(8, 32)), gradients(op, inputs(8, 32)))

    def test_without_quantization_values_are_torchs(self):
        model, x = feed_forward(), inputs(8, 64)
        wanted = gradients(model, x)
        fuser.convert(model, MXFP8BlockScaling())
        with fuser.autocast(enabled=False):
            found = gradients(model, x)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other)

    def test_norms_without_a_bias_or_eps(self):
        for make in (lambda: nn.LayerNorm(32, bias=False), lambda: nn.RMSNorm(32), lambda: nn.RMSNorm(32, eps=1e-3)):
            norm, x = make(), inputs(4, 32) * 1e-3
            wanted = gradients(norm, x)
            fuser.convert(norm, MXFP8BlockScaling())
            assert isinstance(norm, conversion.modules.Converted)
            for one, other in zip(gradients(norm, x), wanted, strict=True):
                torch.testing.assert_close(one, other)

    def test_an_inner_activation_in_double_precision_is_torchs(self):
        x = inputs(4, 4).double()
        assert torch.equal(fuser.convert(nn.SiLU(), MXFP8BlockScaling())(x), nn.SiLU()(x))


class Conv1D(nn.Module):
    """As GPT-2's of transformers: its weight is (in_features, out_features)."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(inputs(nx, nf) / 16), nn.Parameter(inputs(nf, seed=2))

    def __repr__(self):
        return "Conv1D(nf={nf}, nx={nx})".format(**self.__dict__)

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.size()[:-1], self.nf)


class TestConv1D:
    def linear(self, conv):
        nx, nf = conv.weight.shape
        linear = nn.Linear(nx, nf)
        linear.weight.data, linear.bias.data = conv.weight.detach().t().clone(), conv.bias.detach().clone()
        return linear

    @pytest.mark.parametrize("kind", RECIPES)
    def test_bits_are_those_of_a_linear_layer(self, kind):
        conv = Conv1D(64, 128)
        model = nn.Sequential(conv, nn.GELU("tanh"), Conv1D(128, 64))
        same = nn.Sequential(self.linear(conv), nn.GELU("tanh"), self.linear(model[2]))
        for one in (model, same):
            fuser.convert(one, kind(), strict=True)
        for step in range(3):
            x = inputs(2, 64, 128, seed=step)
            found, wanted = gradients(model, x), gradients(same, x)
            for index in (2, 4):
                assert found[index].is_contiguous()
                found[index] = found[index].t()
            assert_equal(found, wanted)
            with torch.no_grad():
                for parameter in (*model.parameters(), *same.parameters()):
                    parameter.mul_(1.25)

    def test_it_is_otherwise_what_it_was(self):
        conv, x = Conv1D(64, 128), inputs(32, 128)
        weight, keys = conv.weight, list(conv.state_dict())
        fuser.convert(conv, MXFP8BlockScaling())
        assert conv.weight is weight and isinstance(conv, Conv1D) and quantizes(conv, x)
        y = conv(x)
        assert repr(conv) == "ConvertedConv1D(nf=64, nx=128, recipe=MXFP8BlockScaling)"
        for again in (copy.deepcopy(conv), pickle.loads(pickle.dumps(conv))):
            assert type(again) is type(conv) and list(again.state_dict()) == keys
            assert torch.equal(again(x), y)
        fuser.convert(conv, None)
        assert type(conv) is Conv1D and repr(conv) == "Conv1D(nf=64, nx=128)"

    @pytest.mark.filterwarnings("ignore:left in high precision")
    def test_pruned_parametrized_or_of_a_size_that_does_not_fit(self):
        for change in (lambda m: prune.l1_unstructured(m, "weight", 0.5), parametrizations.spectral_norm):
            conv = Conv1D(64, 128)
            change(conv)
            assert quantizes(fuser.convert(conv, MXFP8BlockScaling()), inputs(32, 128))
        with pytest.raises(ValueError, match="an input with K = in_features = 16, which"):
            fuser.convert(Conv1D(64, 16), MXFP8BlockScaling(), strict=True)

    def test_another_class_of_that_name_is_left(self):
        class Scaled(Conv1D):
            def forward(self, x):
                return 2 * super().forward(x)

        Scaled.__name__ = "Conv1D"
        with pytest.raises(ValueError, match="what it computes with weight is not quantized"):
            fuser.convert(Scaled(64, 64), MXFP8BlockScaling(), strict=True)

    @pytest.mark.parametrize(
        "change",
        [
            lambda m: setattr(m, "scale", 2.0),
            lambda m: setattr(m, "dropout", 0.5),
            lambda m: m.register_parameter("other", nn.Parameter(torch.zeros(()))),
            lambda m: m.register_buffer("other", torch.zeros(())),
            lambda m: setattr(m, "other", nn.Identity()),
            lambda m: setattr(m, "weight", nn.Parameter(torch.ones(2, 64, 64))),
            lambda m: setattr(m, "weight", nn.UninitializedParameter()),
            lambda m: setattr(m, "bias", None),
        ],
        ids=["attribute", "training", "parameter", "buffer", "module", "dimensions", "lazy", "bias"],
    )
    @pytest.mark.filterwarnings("ignore:left in high precision")
    def test_modules_of_one_class_are_judged_one_by_one(self, change):
        class Scaled(Conv1D):
            scale, dropout = 1.0, 0.0

            def forward(self, x):
                return nn.functional.dropout(super().forward(x) * self.scale, self.dropout, self.training)

        Scaled.__name__ = "Conv1D"
        model = nn.ModuleList([Scaled(64, 64), Scaled(64, 64)])
        change(model[1])
        for _ in range(2):  # also where one of the class was converted before
            fuser.convert(model, MXFP8BlockScaling())
            assert [isinstance(module, conversion.ConvertedConv1D) for module in model] == [True, False]

    def test_a_forward_without_a_bias(self):
        class Product(Conv1D):
            def forward(self, x):
                return x @ self.weight

        Product.__name__ = "Conv1D"
        conv, x = Product(64, 64), inputs(32, 64)
        linear = self.linear(conv)
        with pytest.raises(ValueError, match="what it computes with weight is not quantized"):
            fuser.convert(conv, MXFP8BlockScaling(), strict=True)  # whose bias has no part in it
        conv.bias = linear.bias = None
        assert torch.equal(*(fuser.convert(one, MXFP8BlockScaling(), strict=True)(x) for one in (conv, linear)))

    def test_classes_that_are_made_with_arguments(self):
        class Made(Conv1D):
            def __new__(cls, nf, nx):
                return super().__new__(cls)

        class Other(Made):
            def forward(self, x):
                return 2 * super().forward(x)

        Made.__name__ = Other.__name__ = "Conv1D"
        model, x = Made(64, 64), inputs(32, 64)
        fuser.convert(model, MXFP8BlockScaling(), strict=True)
        assert torch.equal(copy.deepcopy(model)(x), model(x))
        with pytest.raises(ValueError, match="what it computes with weight is not quantized"):
            fuser.convert(Other(64, 64), MXFP8BlockScaling(), strict=True)


class TestTheModelIsTheSame:
    def test_objects_names_and_keys(self):
        model = feed_forward()
        modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
        state = copy.deepcopy(model.state_dict())
        assert fuser.convert(model, MXFP8BlockScaling()) is model
        assert all(found is modules[name] for name, found in model.named_modules())
        assert {name: id(p) for name, p in model.named_parameters()} == {n: id(p) for n, p in parameters.items()}
        assert list(model.state_dict()) == list(state)
        model(inputs(32, 64))  # makes the operations
        assert list(model.state_dict()) == list(state)
        assert len(list(model.modules())) == len(modules)
        model.load_state_dict(state, strict=True)
        feed_forward().load_state_dict(model.state_dict(), strict=True)

    def test_attributes(self):
        model = fuser.convert(feed_forward(), MXFP8BlockScaling())
        norm, linear, gelu, _ = model
        assert (linear.in_features, linear.out_features, linear.bias.shape) == (64, 128, (128,))
        assert (norm.normalized_shape, norm.eps, norm.elementwise_affine, gelu.approximate) == (
            (64,),
            1e-5,
            True,
            "tanh",
        )
        assert isinstance(linear, nn.Linear)
        assert isinstance(norm, nn.LayerNorm)
        assert isinstance(model, nn.Sequential)
        assert isinstance(linear.recipe, MXFP8BlockScaling)
        assert "ConvertedLinear(in_features=64, out_features=128, bias=True, recipe=MXFP8BlockScaling)" in repr(model)

    def test_loaded_by_assignment_moved_and_cast(self):
        model = fuser.convert(feed_forward(), MXFP8BlockScaling())
        x = inputs(32, 64)
        before = model(x)
        other = {name: value + 0.5 for name, value in model.state_dict().items()}
        model.load_state_dict(other, assign=True)
        assert not torch.equal(model(x), before)
        assert model.bfloat16()(x.bfloat16()).dtype == torch.bfloat16
        model(x.bfloat16()).sum().backward()
        assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}

    def test_meta(self):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(64, 32), nn.RMSNorm(32))
        fuser.convert(model, MXFP8BlockScaling())
        assert model(torch.empty(8, 64, device="meta")).shape == (8, 32)
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.25)
        x = torch.full((32, 64), 2.0)
        assert torch.equal(model[0](x), torch.full((32, 32), 2 * 64 * 0.25 + 0.25))  # as before: nothing drawn anew

    def test_frozen_parameters_and_training_flag(self):
        model = feed_forward().eval()
        model[1].requires_grad_(False)
        fuser.convert(model, MXFP8BlockScaling())
        assert not any(module.training for module in model.modules())
        model(inputs(32, 64)).sum().backward()
        assert [p.grad is None for p in model.parameters()] == [False, False, True, True, False, False]

    def test_hooks_run_and_split_pipelines(self):
        model, seen = feed_forward(), []
        model[1].register_forward_hook(lambda module, args, y: seen.append("before") or y * 2)
        model[3].register_full_backward_hook(lambda *args: seen.append("gradient"))
        fuser.convert(model, MXFP8BlockScaling())
        model[1].register_forward_pre_hook(lambda *args: seen.append("pre"))
        model(inputs(32, 64).requires_grad_()).sum().backward()
        assert seen == ["pre", "before", "gradient"]

    def test_global_hooks(self):
        model, seen = fuser.convert(feed_forward(), MXFP8BlockScaling()), []
        handle = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
        try:
            model(inputs(32, 64))
        finally:
            handle.remove()
        assert set(model.modules()) <= set(seen)

    def test_tied_weights_and_a_module_with_two_names(self):
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.embedding = nn.Embedding(64, 32)
                self.first = self.second = nn.Linear(32, 32)
                self.head = nn.Linear(32, 64, bias=False)
                self.head.weight = self.embedding.weight

            def forward(self, tokens):
                return self.head(self.second(self.first(self.embedding(tokens))))

        model = Model()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fuser.convert(model, MXFP8BlockScaling())
        assert model.head.weight is model.embedding.weight
        assert model.first is model.second
        model(torch.arange(64)).sum().backward()
        assert model.embedding.weight.grad.abs().sum() > 0
        with pytest.raises(ValueError, match="same for all names of a module"):
            fuser.convert(model, {"first": MXFP8BlockScaling()})
        with pytest.raises(ValueError, match=r"filter must say the same for all names .*\['first', 'second'\]"):
            fuser.convert(model, MXFP8BlockScaling(), filter=lambda name, module: name != "first")

    def test_a_bias_that_comes_and_goes(self):
        linear, x = fuser.convert(nn.Linear(32, 32), Float8CurrentScaling()), inputs(16, 32)
        with_bias = linear(x)
        bias, linear.bias = linear.bias, None
        assert torch.allclose(linear(x) + bias, with_bias)
        linear.bias = bias
        assert torch.equal(linear(x), with_bias)

    def test_attributes_that_change_after_a_call(self):
        x = inputs(8, 32)
        for change in (lambda m: setattr(m, "eps", 10.0), lambda m: m.bfloat16(), lambda m: setattr(m, "eps", None)):
            norm, plain = nn.RMSNorm(32, eps=1e-5), nn.RMSNorm(32, eps=1e-5)
            fuser.convert(norm, MXFP8BlockScaling())(x)
            change(norm), change(plain)
            wide = x.to(norm.weight.dtype)
            torch.testing.assert_close(norm(wide), plain(wide))
        linear = fuser.convert(nn.Linear(32, 32), MXFP8BlockScaling())
        linear(x.repeat(4, 1))
        linear.weight = nn.Parameter(torch.ones(64, 32))
        linear.bias = None
        assert linear(x.repeat(4, 1)).shape == (32, 64)

    def test_functional_call(self):
        linear, x = fuser.convert(nn.Linear(32, 32), Float8CurrentScaling()), inputs(16, 32)
        zeros = {name: torch.zeros_like(p).requires_grad_() for name, p in linear.named_parameters()}
        y = torch.func.functional_call(linear, zeros, x)
        assert y.abs().sum() == 0
        y.sum().backward()
        assert zeros["weight"].grad.abs().sum() > 0
        assert linear.weight.grad is None


#: What torch's Sequential does as a list: of a sequence and another one.
EDITS = {
    "m[:3]": lambda m, other: m[:3],
    "m[1:]": lambda m, other: m[1:],
    "m[1::2]": lambda m, other: m[1::2],
    "m + other": lambda m, other: m + other,
    "plain + m": lambda m, other: nn.Sequential(nn.Tanh()) + m,
    "m * 2": lambda m, other: m * 2,
    "2 * m": lambda m, other: 2 * m,
    "+=": lambda m, other: operator.iadd(m, other),
    "*=": lambda m, other: operator.imul(m, 2),
    "append": lambda m, other: m.append(other[1]),
    "extend": lambda m, other: m.extend(other),
    "insert": lambda m, other: m.insert(1, other[0]),
    "pop": lambda m, other: (m.pop(0), m)[1],
    "pop a slice": lambda m, other: m.pop(slice(0, 3)),
    "del": lambda m, other: (operator.delitem(m, 0), m)[1],
    "assign": lambda m, other: (operator.setitem(m, 1, other[3]), m)[1],
}


class TestSequencesAsLists:
    @pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
    def test_bits_are_those_of_the_same_modules_converted_after_it(self, edit):
        # in bfloat16 an activation that is apart is rounded before it is quantized
        some, other = (feed_forward(hidden=64).bfloat16() for _ in range(2))
        fresh = fuser.convert(edit(*copy.deepcopy((some, other))), DelayedScaling())
        for model in (some, other):
            fuser.convert(model, DelayedScaling())
            with fuser.autocast(enabled=False):  # makes pipelines, and changes no scales
                model(inputs(32, 64).bfloat16())
        edited = edit(some, other)
        assert type(edited) is type(fresh) is conversion.ConvertedSequential
        for _ in range(2):
            assert_equal(gradients(edited, inputs(32, 64).bfloat16()), gradients(fresh, inputs(32, 64).bfloat16()))

    def test_a_sum_with_something_else_is_torchs_error(self):
        model = fuser.convert(feed_forward(), MXFP8BlockScaling())
        with pytest.raises(ValueError, match="supports only objects of Sequential class"):
            operator.add(model, [nn.ReLU()])
        with pytest.raises(TypeError, match="can only concatenate"):
            operator.add([nn.ReLU()], model)


class TestCopies:
    def test_a_copy_leaves_the_original(self):
        model = feed_forward()
        wanted = model(inputs(32, 64))
        duplicate = fuser.convert(model, MXFP8BlockScaling(), inplace=False)
        assert type(model[1]) is nn.Linear
        assert torch.equal(model(inputs(32, 64)), wanted)
        assert quantizes(duplicate, inputs(32, 64))
        assert not {id(p) for p in model.parameters()} & {id(p) for p in duplicate.parameters()}

    def test_a_copy_may_share_parameters(self):
        model = feed_forward()
        model.register_buffer("count", torch.zeros(1))
        duplicate = fuser.convert(model, MXFP8BlockScaling(), inplace=False, share_parameters=True)
        assert [id(p) for p in model.parameters()] == [id(p) for p in duplicate.parameters()]
        assert duplicate.count is not model.count
        assert quantizes(duplicate, inputs(32, 64))

    @sampled(("how", "used"), itertools.product(["deepcopy", "pickle", "torch.save"], [False, True]), every=3, in_all=1)
    def test_copies_of_a_converted_model(self, how, used):
        model, x = fuser.convert(feed_forward(), DelayedScaling(amax_history_len=2)), inputs(32, 64)
        if used:
            model(x).sum().backward()
            model(x * 3).sum().backward()
        if how == "deepcopy":
            duplicate = copy.deepcopy(model)
        elif how == "pickle":
            duplicate = pickle.loads(pickle.dumps(model))
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            duplicate = torch.load(file, weights_only=False)
        duplicate.zero_grad()
        model.zero_grad()
        assert_equal(gradients(duplicate, x), gradients(model, x))  # scales came along
        with torch.no_grad():
            duplicate[1].weight.zero_()  # and parameters are the copy's own
        assert model[1].weight.abs().sum() > 0
        assert not torch.equal(duplicate(x), model(x))

    @pytest.mark.parametrize(
        "rule",
        [
            {},
            {"amax_compute_algo": lambda history: history.amax(dim=0)},
            {"scaling_factor_compute_algo": lambda amax, scale, fp8_max, recipe: fp8_max / amax},
        ],
        ids=["max", "amax by a function", "scale by a function"],
    )
    def test_modules_update_their_own_scales(self, rule):
        """A call of a module is one step of its own history, whatever updates, as under one `autocast` for all."""
        recipe, x = DelayedScaling(amax_history_len=4, **rule), inputs(32, 64)
        block = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh())
        steps = []
        for around in (None, recipe):  # one model after the other: each update comes to all that there are
            model = fuser.convert(copy.deepcopy(block), recipe)
            steps.append([gradients(model, x * 0.7**step, around) for step in range(4)])  # old amaxes count
        for bound, scoped in zip(*steps, strict=True):
            assert_equal(bound, scoped)

    def test_state_dicts_are_saved_and_loaded(self, tmp_path):
        model = fuser.convert(feed_forward(), DelayedScaling())
        model(inputs(32, 64))
        torch.save(model.state_dict(), tmp_path / "state.pt")
        loaded = torch.load(tmp_path / "state.pt", weights_only=True)
        fresh = feed_forward()
        fresh.load_state_dict(loaded)
        assert_equal(list(fresh.parameters()), list(model.parameters()))

    def test_moving_averages(self):
        model = fuser.convert(feed_forward(), MXFP8BlockScaling())
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        )
        average.update_parameters(model)
        with torch.no_grad():
            model[1].weight.add_(2)
        average.update_parameters(model)
        assert torch.allclose(average.module[1].weight, model[1].weight - 1)
        assert quantizes(average, inputs(32, 64))

    def test_back_to_torch(self):
        model, x = feed_forward(), inputs(32, 64)
        wanted, attributes = model(x), set(vars(model[1]))
        fuser.convert(model, MXFP8BlockScaling())
        model(x)
        assert fuser.convert(model, None) is model
        assert [type(module) for module in model] == [nn.LayerNorm, nn.Linear, nn.GELU, nn.Linear]
        assert type(model) is nn.Sequential
        assert set(vars(model[1])) == attributes
        assert torch.equal(model(x), wanted)


class TestTraining:
    def test_a_model_that_becomes_a_part_of_another_keeps_its_delayed_scales(self):
        def trained():
            torch.manual_seed(0)
            model = fuser.convert(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), DelayedScaling())
            for _ in range(3):
                (model(torch.ones(16, 32)) * 1e-4).sum().backward()
            return model

        alone, part = trained(), trained()
        fuser.convert(nn.ModuleDict({"body": part}), DelayedScaling())
        assert [op.name for op in part[1].pipeline()._basic_ops] == ["body.1", "body.1"]
        for model in (alone, part):
            model.zero_grad()
            (model(torch.ones(16, 32)) * 1e-4).sum().backward()
        assert alone[0].weight.grad.any()
        for one, other in zip(alone.parameters(), part.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)

    def test_a_function_of_names_is_asked_again_under_a_new_name(self):
        def qfactory(role):
            return fuser.IdentityQuantizer() if role.name == "body" else fuser.MXFP8Quantizer(fuser.DType.kFloat8E4M3)

        custom = CustomRecipe(qfactory=qfactory)
        layer, x = fuser.convert(nn.Linear(32, 32), custom), torch.randn(32, 32)
        quantized = layer(x)
        fuser.convert(nn.ModuleDict({"body": layer}), custom)
        assert not torch.equal(layer(x), quantized)

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_optimizers_made_before_and_after(self, when):
        model, same = feed_forward(), feed_forward()
        fuser.convert(same, MXFP8BlockScaling())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2) if when == "before" else None
        fuser.convert(model, MXFP8BlockScaling())
        optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
        other = torch.optim.AdamW(same.parameters(), lr=1e-2)
        losses = []
        for _ in range(5):
            for one, steps in ((model, optimizer), (same, other)):
                steps.zero_grad()
                loss = (one(inputs(32, 64)) - 1).square().mean()
                loss.backward()
                steps.step()
            losses.append(loss.item())
        assert losses[-1] < 0.8 * losses[0]
        assert_equal(list(model.parameters()), list(same.parameters()))

    def test_checkpointing(self):
        for recipe in (MXFP8BlockScaling(), DelayedScaling()):
            model = fuser.convert(feed_forward(), recipe)
            x = inputs(32, 64)
            twin = copy.deepcopy(model)
            wanted = gradients(twin, x)
            assert_equal(gradients(_Wrapped(copy.deepcopy(model), fuser.checkpoint), x), wanted)
            torchs = _Wrapped(model, lambda *args: torch.utils.checkpoint.checkpoint(*args, use_reentrant=False))
            if not recipe.delayed():
                assert_equal(gradients(torchs, x), wanted)
            else:  # torch's own would run again with scales that the first run updated
                with pytest.raises(RuntimeError, match="with scales that were updated since its forward pass: use"):
                    gradients(torchs, x)

    @pytest.mark.parametrize("reentrant", [False, True])
    @pytest.mark.parametrize("bound", [NVFP4BlockScaling(), None])
    def test_checkpointing_under_another_recipe(self, reentrant, bound):
        model, x = fuser.convert(feed_forward(), MXFP8BlockScaling()), inputs(32, 64)
        for child in model:
            child.recipe = bound
        for run in (fuser.checkpoint, torch.utils.checkpoint.checkpoint):
            with fuser.autocast(recipe=MXFP8BlockScaling()):
                y = run(model, x.requires_grad_(), use_reentrant=reentrant)
            if run is fuser.checkpoint:
                y.sum().backward()
                continue
            with pytest.raises(RuntimeError, match="under another recipe than its forward pass: use"):
                y.sum().backward()
            with fuser.autocast(recipe=MXFP8BlockScaling()):
                model(x).sum().backward()

    def test_a_computed_weight_is_computed_once_in_a_call(self):
        class Count(nn.Module):
            calls = 0

            def forward(self, weight):
                self.calls += 1
                return weight * 1.0

        for model in (nn.Linear(64, 64), feed_forward(64, 64), nn.LayerNorm(64)):
            layer = model[1] if isinstance(model, nn.Sequential) else model
            count = Count()
            nn.utils.parametrize.register_parametrization(layer, "weight", count)
            count.calls = 0
            fuser.convert(model, MXFP8BlockScaling())
            assert count.calls == 0
            for calls in (1, 2):
                model(inputs(32, 64)).sum().backward()
                assert count.calls == calls
            if model is not layer or isinstance(layer, nn.Linear):
                with fuser.statistics(model):
                    model(inputs(32, 64)).sum().backward()
                assert count.calls == 3

    def test_copies_after_a_call_with_a_computed_weight(self):
        for build in (lambda: nn.Linear(64, 64), lambda: feed_forward(64, 64)):
            model = build()
            parametrizations.weight_norm(model if isinstance(model, nn.Linear) else model[1])
            fuser.convert(model, DelayedScaling())
            for _ in range(2):
                gradients(model, inputs(32, 64))
            twin = copy.deepcopy(model)
            assert_equal(gradients(twin, inputs(32, 64)), gradients(model, inputs(32, 64)))

    def test_attributes_under_the_names_of_settings(self):
        linear = nn.Linear(32, 32)
        own = {"_name": "mine", "recipe": "r", "pad": 3}
        vars(linear).update(own)
        for recipe in (MXFP8BlockScaling(), NVFP4BlockScaling(), None):
            fuser.convert(linear, recipe, pad=True)
        assert own.items() <= vars(linear).items()
        assert vars(linear).keys() == vars(nn.Linear(32, 32)).keys() | own.keys()

    def test_data_parallel(self):
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        try:
            model = fuser.convert(feed_forward(), DelayedScaling())
            twin = copy.deepcopy(model)
            parallel = nn.parallel.DistributedDataParallel(model)
            for _ in range(2):
                assert_equal(gradients(parallel, inputs(32, 64)), gradients(twin, inputs(32, 64)))
        finally:
            torch.distributed.destroy_process_group()

    def test_pruning_and_spectral_norm(self):
        """Both put a tensor that is computed in a hook in the weight's place."""
        for change in (lambda m: prune.l1_unstructured(m, "weight", 0.5), nn.utils.spectral_norm):
            linear, x = fuser.convert(nn.Linear(64, 32), MXFP8BlockScaling()), inputs(32, 64)
            change(linear)
            y = linear(x)
            y.sum().backward()
            assert quantizes(linear, x)
            assert linear.weight_orig.grad.abs().sum() > 0
            another = fuser.convert(linear, MXFP8BlockScaling(), inplace=False)
            assert torch.equal(another.eval()(x), linear.eval()(x))

    def test_fsdp(self):
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        try:
            model = fuser.convert(feed_forward(), MXFP8BlockScaling())
            wanted = gradients(copy.deepcopy(model), inputs(32, 64))
            for module in (model[1], model[3], model):
                fully_shard(module)
            found = gradients(model, inputs(32, 64))
            assert_equal(found[:2], wanted[:2])
            assert_equal([gradient.full_tensor() for gradient in found[2:]], wanted[2:])
            classes = [type(module) for module in model.modules()]
            with pytest.raises(ValueError, match="one became FSDPConvertedLinear"):
                fuser.convert(model, None)
            assert [type(module) for module in model.modules()] == classes  # the norm before it, too
        finally:
            torch.distributed.destroy_process_group()

    def test_convert_after_fsdp_says_that_it_comes_before(self):
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        try:
            model = feed_forward()
            for module in (model[0], model[1], model):
                fully_shard(module)
            with pytest.warns(UserWarning) as caught:
                fuser.convert(model, MXFP8BlockScaling())
            assert str(caught[0].message).splitlines() == [
                "left in high precision:",
                "  0 (FSDPLayerNorm): fully_shard made it a subclass: call fuser.convert before fully_shard",
                "  1 (FSDPLinear): fully_shard made it a subclass: call fuser.convert before fully_shard",
            ]
        finally:
            torch.distributed.destroy_process_group()

    def test_tensor_parallel_is_refused(self):
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        try:
            mesh = init_device_mesh("cpu", (1,))
            plans = {"1": ColwiseParallel(), "3": RowwiseParallel()}
            for plan in (plans, {"1": plans["1"]}, {"3": plans["3"]}):
                model = fuser.convert(feed_forward(), MXFP8BlockScaling())
                parallelize_module(model, mesh, plan)
                with pytest.raises(RuntimeError, match=r"take plain tensors; got a DTensor as input, .*fully_shard"):
                    model(inputs(32, 64))
            model = fuser.convert(feed_forward(), MXFP8BlockScaling())
            distribute_module(model[1], mesh)  # the parameters alone: without hooks
            with pytest.raises(RuntimeError, match=r"take plain tensors; got a DTensor as weight"):
                model(inputs(32, 64))
        finally:
            torch.distributed.destroy_process_group()

    @pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
    def test_a_norm_without_eps_does_not_join_what_may_change_its_dtype(self):
        model = nn.Sequential(nn.Linear(64, 64), nn.RMSNorm(64))
        alone = fuser.convert(copy.deepcopy(model[0]), MXFP8BlockScaling())
        fuser.convert(model, MXFP8BlockScaling())
        assert [len(found._basic_ops) for found, _ in model.fusers()] == [2, 1]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(model(inputs(32, 64)), nn.RMSNorm.forward(model[1], alone(inputs(32, 64))))

    def test_torch_autocast(self):
        model = fuser.convert(feed_forward(), MXFP8BlockScaling())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(inputs(32, 64))
        y.float().sum().backward()
        assert y.dtype == torch.bfloat16
        assert model[1].weight.grad.dtype == torch.float32

    @pytest.mark.parametrize(
        "build", [lambda: nn.LayerNorm(64), lambda: nn.RMSNorm(64), lambda: nn.GELU("tanh"), nn.SiLU, nn.ReLU]
    )
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
    def test_norms_and_activations_in_torch_autocast_have_the_dtypes_of_torchs(self, build, dtype):
        """A residual stream in float32 keeps its bits, which TE's operations round to bfloat16."""
        plain, x = build(), (inputs(32, 64) + 100).to(dtype)
        model = fuser.convert(plain, MXFP8BlockScaling(), inplace=False)
        outside = model(x) if dtype == torch.float32 else None
        copied = pickle.loads(pickle.dumps(model))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            wanted, found, again = plain(x), model(x), copied(x)
        assert (found.dtype, again.dtype) == (wanted.dtype, wanted.dtype)
        assert torch.equal(found, again)
        if outside is not None:
            assert torch.equal(found, outside)
            torch.testing.assert_close(found, wanted, rtol=2e-6, atol=0)  # GELU's own tanh
        else:
            assert torch.equal(found, wanted)

    @pytest.mark.parametrize("cls", [nn.LayerNorm, nn.RMSNorm])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("in_autocast", [False, True])
    @pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
    def test_a_norm_with_parameters_of_another_dtype_is_torchs(self, cls, dtype, in_autocast):
        """Its float32 parameters are not rounded to the dtype of its input, nor their gradients."""
        norm = cls(64, eps=1e-5)
        for seed, parameter in enumerate(norm.parameters()):
            parameter.data = inputs(64, seed=seed)
        model = fuser.convert(norm, MXFP8BlockScaling(), inplace=False)
        x, dy = inputs(32, 64).to(dtype), inputs(32, 64, seed=3).to(dtype)

        def results(module, dtype):
            leaf = x.to(dtype, copy=True).requires_grad_()
            y = module(leaf)
            y.backward(dy.to(dtype))
            return y.detach(), leaf.grad, *(parameter.grad for parameter in module.parameters())

        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=in_autocast):
            wanted, found = results(norm, dtype), results(model, dtype)
        norm.zero_grad()
        exact = results(norm.double(), torch.float64)
        assert [one.dtype for one in found] == [one.dtype for one in wanted]
        assert torch.equal(found[0], wanted[0])
        torch.testing.assert_close(found[1].double(), exact[1], rtol=torch.finfo(dtype).eps, atol=1e-5)
        for one, other in zip(found[2:], exact[2:], strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)

    def test_a_comparison_in_torch_autocast_does_not_blame_the_recipe(self):
        """For bfloat16's rounding of a float32 residual stream with a large mean: an error of 0.14 of the norm."""

        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.norm, self.linear = nn.LayerNorm(64), nn.Linear(64, 64)

            def forward(self, x):
                return x + self.linear(self.norm(x))

        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = fuser.compare(
                Block(), inputs(32, 64) + 100, {"norm": {"linear": None, "*": MXFP8BlockScaling()}}, quiet=True
            )
        assert found["norm"].output == 0

    @pytest.mark.parametrize("normalize", [weight_norm, parametrizations.weight_norm], ids=["hook", "parametrization"])
    @pytest.mark.parametrize("when", ["before", "after"])
    @pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
    def test_weight_norm(self, normalize, when):
        x = inputs(32, 64)
        plain, linear = nn.Linear(64, 32), nn.Linear(64, 32)
        linear.load_state_dict(plain.state_dict())
        normalize(plain)
        if when == "before":
            fuser.convert(normalize(linear), MXFP8BlockScaling())
        else:
            normalize(fuser.convert(linear, MXFP8BlockScaling()))
        for _ in range(2):
            wanted, found = gradients(plain, x), gradients(linear, x)
            for one, other in zip(found, wanted, strict=True):
                assert 0.001 < ((one - other).norm() / other.norm()).item() < 0.1 or other.dim() == 1
        if when == "before" and normalize is parametrizations.weight_norm:
            fuser.convert(linear, None)
            assert torch.equal(linear(x), plain(x))
            fuser.convert(linear, MXFP8BlockScaling())
            nn.utils.parametrize.remove_parametrizations(linear, "weight")
            assert type(linear) is conversion.ConvertedLinear


@pytest.mark.skipif(bool(OLD_TORCH), reason=OLD_TORCH)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore:.*torch.jit:DeprecationWarning")
class TestCompiled:
    """With fullgraph=True: nothing is left outside."""

    @pytest.fixture(autouse=True)
    def fresh_compiler(self):
        torch._dynamo.reset()

    def compiled(self, model, **options):
        counter = CompileCounterWithBackend("aot_eager")
        return torch.compile(model, backend=counter, fullgraph=True, **options), counter

    @sampled("kind", [DelayedScaling, MXFP8BlockScaling], 2, in_all=1)
    def test_a_transformer_has_eagers_bits(self, kind):
        model = fuser.convert(_CausalModel(layers=1), kind())
        twin = copy.deepcopy(model)
        function, counter = self.compiled(model)
        for seed in range(2):
            tokens = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(seed))
            results = []
            for one, call in ((model, function), (twin, twin)):
                one.zero_grad()
                y = call(input_ids=tokens, labels=tokens)
                y["loss"].backward()
                results.append([y["loss"].detach(), y["logits"].detach(), *(p.grad for p in one.parameters())])
            assert_equal(*results)
        assert counter.frame_count == 1

    def assert_follows(self, change, *shape, pad=False, frames=2):
        """After a change to the model and an input of another shape, results are those of an eager model."""
        torch._dynamo.reset()  # all models run the same code, which is compiled for a few variants at most
        model = fuser.convert(feed_forward(), MXFP8BlockScaling(), pad=pad)
        twin = copy.deepcopy(model)
        function, counter = self.compiled(model)
        for x in (inputs(32, 64), inputs(*shape), inputs(*shape, seed=5)):
            assert_equal(gradients(function, x), gradients(twin, x))
            change(model), change(twin)
        assert counter.frame_count <= frames

    def test_parameters_are_read_at_every_call(self):
        def change(model):
            state = {name: value + 0.5 for name, value in model.state_dict().items()}
            model.load_state_dict(state, assign=True)

        self.assert_follows(change, 32, 64, frames=1)

    @pytest.mark.full
    def test_recipes_children_and_hooks(self):
        self.assert_follows(lambda model: setattr(model[1], "recipe", None), 32, 64)
        self.assert_follows(lambda model: setattr(model[0], "eps", 10.0), 32, 64, frames=3)
        self.assert_follows(lambda model: len(model) < 5 and model.insert(1, nn.Tanh()), 32, 64)
        self.assert_follows(lambda model: model[1].register_forward_hook(lambda m, args, y: y * 2), 32, 64, frames=3)

    @pytest.mark.full
    def test_padding_with_symbolic_sizes(self):
        self.assert_follows(lambda model: None, 5, 7, 64, pad=True)
        model = fuser.convert(feed_forward(), MXFP8BlockScaling(), pad=True)
        function, counter = self.compiled(model, dynamic=True)
        function(inputs(5, 64))
        compiled_once = counter.frame_count
        for rows in (37, 43):
            assert torch.equal(function(inputs(rows, 64)), model(inputs(rows, 64)))
        assert counter.frame_count == compiled_once

    def test_a_norm_that_is_torchs_in_16_bits(self):
        model = nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 64), nn.ReLU()).bfloat16()
        fuser.convert(model, MXFP8BlockScaling())
        assert_equal(
            gradients(self.compiled(model)[0], inputs(32, 64).bfloat16()), gradients(model, inputs(32, 64).bfloat16())
        )

    def test_what_is_left_outside_says_why(self):
        linear, x = parametrizations.weight_norm(nn.Linear(64, 64)), inputs(32, 64)
        fuser.convert(linear, MXFP8BlockScaling())
        with pytest.raises(Unsupported, match="a weight or bias is no plain parameter"):
            self.compiled(linear)[0](x)
        torch._dynamo.reset()
        assert torch.equal(torch.compile(linear, backend="eager")(x), linear(x))

    def test_a_parameter_that_is_replaced_inside(self):
        linear, x = fuser.convert(nn.Linear(64, 64), MXFP8BlockScaling()), inputs(32, 64)
        zeros = {name: torch.zeros_like(p) for name, p in linear.named_parameters()}

        def function(x):
            return torch.func.functional_call(linear, zeros, x)

        with pytest.raises(Unsupported, match="a parameter was replaced in the compiled function"):
            self.compiled(function)[0](x)
        torch._dynamo.reset()
        assert torch.compile(function, backend="eager")(x).abs().sum() == 0


class _Wrapped(nn.Module):
    def __init__(self, model, call):
        super().__init__()
        self.model, self.call = model, call

    def forward(self, x):
        return self.call(self.model, x)


class TestRules:
    def converted(self, model):
        return [name for name, module in model.named_modules() if isinstance(module, conversion.ConvertedLinear)]

    def model(self):
        return nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.ModuleDict({"c": nn.Linear(32, 32)}), "n": nn.SiLU()})

    def test_filter(self):
        asked = []
        model = fuser.convert(self.model(), MXFP8BlockScaling(), filter=lambda n, m: asked.append(n) or n != "a")
        assert self.converted(model) == ["b.c"]
        assert asked == ["a", "b.c", "n"]

    def test_patterns(self):
        mx, fp4 = MXFP8BlockScaling(), NVFP4BlockScaling()
        model = fuser.convert(self.model(), {"b.*": mx, "*": fp4})
        assert (model["a"].recipe, model["b"]["c"].recipe, model["n"].recipe) == (fp4, mx, fp4)
        assert self.converted(fuser.convert(model, {"a": None, "b.c": fp4})) == ["b.c"]
        assert model["b"]["c"].recipe is fp4
        assert type(model["n"]) is nn.SiLU  # no pattern matches: torch's again

    def test_function(self):
        model = fuser.convert(self.model(), lambda name, m: MXFP8BlockScaling() if isinstance(m, nn.Linear) else None)
        assert self.converted(model) == ["a", "b.c"]
        assert type(model["n"]) is nn.SiLU

    def test_an_outer_autocast_wins(self):
        linear, x = fuser.convert(nn.Linear(64, 64), NVFP4BlockScaling()), inputs(32, 64)
        own = linear(x)
        with fuser.autocast(recipe=MXFP8BlockScaling()):
            outer = linear(x)
        with fuser.autocast(enabled=False):
            plain = linear(x)
        torch.testing.assert_close(plain, torch.nn.functional.linear(x, linear.weight, linear.bias))
        linear.recipe = MXFP8BlockScaling()
        assert torch.equal(linear(x), outer)
        assert not torch.equal(own, outer)
        linear.recipe = None
        assert torch.equal(linear(x), plain)
        assert "recipe=None" in repr(linear)

    def test_a_custom_recipe_knows_the_names(self):
        roles = []

        def qfactory(role):
            roles.append((role.name, role.tensor_type))
            return fuser.MXFP8Quantizer(fuser.DType.kFloat8E4M3)

        model = nn.Sequential(nn.Linear(32, 32), nn.Sigmoid(), nn.Linear(32, 32))
        fuser.convert(model, CustomRecipe(qfactory=qfactory))
        roles.clear()
        model(inputs(32, 32)).sum().backward()
        assert set(roles) == {(n, t) for n in ("0", "2") for t in ("input", "weight", "grad_output")}
        roles.clear()
        whole = nn.ModuleDict({"part": model})
        fuser.convert(whole, CustomRecipe(qfactory=qfactory))  # asks, too, which sizes fit
        model(inputs(32, 32)).sum().backward()
        assert {name for name, _ in roles} == {"part.0", "part.2"}

    def test_a_name_stands_for_what_is_in_it(self):
        model = nn.ModuleList([feed_forward(), feed_forward()])
        fuser.convert(model, {"1": None, "0.3": NVFP4BlockScaling(), "*": MXFP8BlockScaling()})
        kinds = [getattr(module, "recipe", None).__class__.__name__ for module in [*model[0], *model[1]]]
        assert kinds == ["MXFP8BlockScaling"] * 3 + ["NVFP4BlockScaling"] + ["NoneType"] * 4

    def test_again_with_another_recipe(self):
        model = fuser.convert(feed_forward(), MXFP8BlockScaling())
        fuser.convert(model, Float8CurrentScaling(), pad=True)
        assert {type(module.recipe) for module in model} == {Float8CurrentScaling}
        assert all(module.pad for module in model)

    @pytest.mark.parametrize(
        ("arguments", "options", "error", "message"),
        [
            ((torch.zeros(1), MXFP8BlockScaling()), {}, TypeError, "model must be a torch.nn.Module; got"),
            ((nn.SiLU(), MXFP8BlockScaling), {}, TypeError, r"recipe must be a recipe, .* MXFP8BlockScaling\(\)"),
            (
                (nn.SiLU(), "mxfp8"),
                {},
                TypeError,
                r"recipe must be a recipe, a mapping, a function or None; got 'mxfp8'; .*\.MXFP8BlockScaling\(\)$",
            ),
            (
                (nn.SiLU(), {"": "mxfp8"}),
                {},
                TypeError,
                "recipe must be a recipe of fuser.recipe; got 'mxfp8'; make .*MXFP8",
            ),
            ((nn.SiLU(), {"a*": None}), {}, ValueError, r"patterns that match names of linear .*; got 'a\*'$"),
            ((nn.SiLU(), torch.float8_e4m3fn), {}, TypeError, r"such as fuser.recipe.MXFP8BlockScaling\(\)$"),
            ((nn.SiLU(), "nvfp4"), {}, TypeError, r"such as fuser.recipe.NVFP4BlockScaling\(\)$"),
            (
                (nn.SiLU(), "mxfp4"),
                {},
                TypeError,
                r"fuser.recipe.BlockScaledRecipe\(refops.MXFP4Scaling\(\)\)$",
            ),
            ((nn.SiLU(), "custom"), {}, TypeError, r"such as fuser.recipe.CustomRecipe\(...\)$"),
            ((nn.SiLU(), refops.MXFP8Scaling(refops.E4M3)), {}, TypeError, r"BlockScaledRecipe\(scaling\)"),
            ((nn.SiLU(), refops.MXFP8Scaling), {}, TypeError, r"BlockScaledRecipe\(scaling\)"),
            ((nn.SiLU(), fuser.NVFP4Quantizer()), {}, TypeError, "CustomRecipe.* of quantizers"),
            ((nn.SiLU(), nn.SiLU()), {}, TypeError, "got a SiLU; a module is not a recipe"),
            ((nn.SiLU(), {nn.Linear: None}), {}, TypeError, "what goes by class is a function of name and module"),
            ((feed_forward(), {"1": None, "3": lambda: 0}), {}, TypeError, "recipe of '3' must be a recipe"),
            ((nn.SiLU(), {}), {}, ValueError, "recipe must have at least one pattern"),
            ((nn.Sequential(nn.Linear(1, 1)), {".*0$": None}), {}, ValueError, "regular expressions are not taken"),
            ((nn.ModuleDict({"gate": nn.SiLU()}), {"gaet": None}), {}, ValueError, "did you mean gate"),
            (
                (feed_forward(), {"*": MXFP8BlockScaling(), "1": None}),
                {},
                ValueError,
                r"got '1' behind '\*', which decides for all that it matches",
            ),
            (
                (nn.Sequential(nn.GELU(), nn.Linear(32, 32)), {"0": MXFP8BlockScaling()}),
                {},
                ValueError,
                r"got one for '0', which is GELU\(approximate='none'\)",
            ),
            ((nn.SiLU(), {0: None}), {}, TypeError, "recipe must have patterns of names as keys, .*; got 0"),
            ((nn.SiLU(), None), {"filter": 1}, TypeError, "filter must be a function"),
            (
                (nn.SiLU(), None),
                {"share_parameters": True},
                ValueError,
                "share_parameters must come with inplace=False",
            ),
            ((nn.SiLU(), None), {"pad": 32}, TypeError, "pad must be"),
        ],
    )
    def test_errors(self, arguments, options, error, message):
        with pytest.raises(error, match=message):
            fuser.convert(*arguments, **options)

    @pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
    def test_scripted_models(self):
        model = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
        with pytest.raises(TypeError, match=r"one that torch\.jit compiled as '0': convert the model before that"):
            fuser.convert(model, MXFP8BlockScaling())


class TestWhatIsLeft:
    def warned(self, model, recipe=None, **options):
        with pytest.warns(UserWarning, match="left in high precision") as found:
            fuser.convert(model, MXFP8BlockScaling() if recipe is None else recipe, **options)
        (warning,) = found
        assert warning.filename == __file__
        return str(warning.message).split("\n  ")[1:]

    def test_sizes(self):
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
        (line,) = self.warned(model)
        assert line.startswith("2 (Linear): MXFP8 needs M % 32 == 0 and K % 32 == 0")
        assert line.endswith(
            "; got a weight with M = out_features = 10 and K = in_features = 64, which pad does not change"
        )
        assert model(inputs(32, 32)).shape == (32, 10)
        with pytest.raises(ValueError, match=r"strict must be False here: not all is converted:\n  2 \(Linear\)"):
            fuser.convert(model, MXFP8BlockScaling(), strict=True)
        fuser.convert(model, {"2": None, "*": MXFP8BlockScaling()}, strict=True)  # said, so no fault
        (line,) = self.warned(nn.Linear(10, 64))
        assert line.endswith("; got an input with K = in_features = 10, which pad does not change")

    @pytest.mark.parametrize("recipe", [DelayedScaling(), Float8CurrentScaling(), Float8BlockScaling()])
    def test_sizes_that_a_gpu_refuses(self, recipe):
        """FP8 takes any size here, so that all is converted; `compare` says it of the same weights."""
        model = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 32), nn.Linear(32, 64))
        with pytest.warns(UserWarning, match="^On a GPU TE refuses FP8 products with a size that is no") as caught:
            fuser.convert(model, recipe, strict=True)
        (warning,) = caught
        assert str(warning.message).endswith(" of 16: 0 weight 24x64, 2 weight 32x24. Here they are emulated.")
        assert warning.filename == __file__
        assert [one.recipe for one in model] == [recipe] * 4
        assert str(warning.message) in " ".join(str(fuser.compare(model, inputs(3, 64), recipe, quiet=True)).split())
        model(inputs(32, 64)).sum().backward()  # not once more in a call
        fuser.convert(model, {"3": recipe}, inplace=False)  # nothing is said of what is not converted

    def test_sizes_that_a_gpu_refuses_are_said_before_anything_is_changed(self):
        model = nn.Sequential(*[nn.Linear(24, 24) for _ in range(20)])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning, match=r"0 weight 24x24, .*, 7 weight 24x24, 12 more\. Here"):
                fuser.convert(model, DelayedScaling())
        assert {type(one) for one in model} == {nn.Linear}

    def test_sizes_that_a_gpu_refuses_of_other_layers(self):
        conv = Conv1D(24, 64)  # its weight is 64x24, that of the operation 24x64
        for model, recipe, named in (
            (conv, DelayedScaling(), "weight 24x64"),
            (nn.Linear(64, 24, device="meta"), DelayedScaling(), "weight 24x64"),
            (nn.Linear(64, 24), CustomRecipe(qfactory=lambda role: DelayedScalingRequest()), "weight 24x64"),
        ):
            with pytest.warns(UserWarning, match=f"^On a GPU .* of 16: {named}. Here"):
                fuser.convert(model, recipe)
        other_format = CustomRecipe(qfactory=lambda role: IdentityQuantizer())
        fuser.convert(nn.Linear(64, 24), other_format)  # every warning is an error here

    def test_nothing_is_changed_by_an_error(self):
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 10))
        with pytest.raises(ValueError, match="strict"):
            fuser.convert(model, MXFP8BlockScaling(), strict=True)
        assert [type(module) for module in model] == [nn.Linear, nn.Linear]

    def test_subclasses_are_not_replaced(self):
        class LoRA(nn.Linear):
            def forward(self, x):
                return super().forward(x) + 1

        model = nn.Sequential(LoRA(32, 32), nn.LazyLinear(32), nn.Conv2d(1, 1, 1), nn.LSTM(4, 4))
        lines = self.warned(model)
        assert [line.split(":")[0] for line in lines] == ["0 (LoRA)", "1 (LazyLinear)", "2 (Conv2d)", "3 (LSTM)"]
        assert type(model[0]) is LoRA
        model[1](torch.zeros(32, 32))
        assert len(self.warned(model)) == 3  # it has become a Linear
        assert type(model[1]) is conversion.ConvertedLinear

    def test_matrices_that_others_multiply_with(self):
        class Product(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight, self.bias = nn.Parameter(torch.ones(32, 32)), nn.Parameter(torch.zeros(32))

            def forward(self, x):
                return x @ self.weight + self.bias

        model = nn.Sequential(Product(), nn.Embedding(8, 8), nn.LayerNorm((4, 8)), nn.BatchNorm1d(8), nn.PReLU(8))
        model.append(parametrizations.weight_norm(Product())).append(parametrizations.weight_norm(nn.Linear(32, 32)))
        lines = self.warned(model)
        assert [line.split(" ")[0] for line in lines] == ["0", "5"]
        assert lines[0] == "0 (Product): no module of torch's; what it computes with weight is not quantized"
        (line,) = self.warned(nn.ParameterList([torch.ones(32, 32), torch.ones(32)]))
        assert line == "the model (ParameterList): what is computed with 0 is not quantized"
        with pytest.raises(ValueError, match=r"0 \(Product\)"):
            fuser.convert(model, MXFP8BlockScaling(), strict=True)
        fuser.convert(model, {"[05]": None, "*": MXFP8BlockScaling()}, strict=True)

    def test_parents_that_ask_a_weight_for_facts(self):
        class Parent(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(32, 32)

            def forward(self, x):
                weight = self.linear.weight
                assert x.dtype == weight.dtype
                self.size = self.linear.weight.norm()
                if isinstance(self.linear.weight, torch.Tensor) and torch.is_tensor(self.linear.bias):
                    x = x.to(self.linear.weight.dtype)
                return self.linear(x)

        class Computes(Parent):
            def forward(self, x):
                weight = self.linear.weight
                return x @ weight.to(x.dtype)

        fuser.convert(Parent(), MXFP8BlockScaling(), strict=True)
        (line,) = self.warned(Computes())
        assert line.startswith("the model (Computes) reads linear.weight in its forward")

    def parent(self, forward):
        """A parent of two layers, with that forward in its class."""
        parent = type("Parent", (nn.Module,), {"forward": forward})()
        parent.used, parent.read = nn.Linear(32, 32), nn.Linear(32, 32)
        return parent

    def test_forwards_without_a_source(self):
        made = {}
        exec(
            "def reads(self, x):\n    return x @ self.read.weight\n"
            "def calls(self, x):\n    return self.read(self.used(x))\n"
            "def calls_reads(self, x):\n    return self.reads(x)\n",
            made,
        )
        no_source = (
            "the model (Parent) has no source of {}, where it may read weights of used, read: fuser.statistics tells "
            "whether they are quantized when it runs"
        )
        assert self.warned(self.parent(made["reads"])) == [no_source.format("forward")]
        fuser.convert(self.parent(made["calls"]), MXFP8BlockScaling(), strict=True)
        parent = self.parent(made["calls_reads"])
        type(parent).reads = made["reads"]
        assert self.warned(parent) == [no_source.format("reads")]
        built_in = self.parent(made["calls"])
        built_in.forward = torch.relu
        assert self.warned(built_in) == [no_source.format("forward")]

    def test_forwards_that_are_no_methods(self):
        reads = "the model (Parent) reads read.weight in its forward: not quantized there"
        by_lambda = self.parent(
            lambda me, x: x @ me.read.weight,
        )
        assert self.warned(by_lambda)[0].startswith("the model (Parent) ")
        parent = self.parent(None)

        def on_the_object(x):
            return x @ parent.read.weight

        def of_the_module(module, x):
            return x @ module.read.weight

        for forward in (on_the_object, functools.partial(of_the_module, parent), of_the_module.__get__(parent)):
            parent.forward = forward
            assert self.warned(parent) == [reads]
        parent.forward = lambda x: parent.read(parent.used(x))
        for model in (parent, *(torch.compile(one, backend="eager") for one in (nn.Linear(32, 32), feed_forward()))):
            fuser.convert(model, MXFP8BlockScaling(), strict=True)

    def test_modules_inside_of_themselves(self):
        model = nn.Sequential(nn.Sequential(nn.Linear(32, 32)))
        model[0].append(model)
        with pytest.raises(ValueError, match="model must hold no module that is inside of itself; got a Sequential"):
            fuser.convert(model, MXFP8BlockScaling())

    @pytest.mark.parametrize("build", [lambda: nn.Linear(32, 32), lambda: feed_forward()])
    def test_rows_that_do_not_fit(self, build):
        model = fuser.convert(build(), MXFP8BlockScaling())
        width = 32 if isinstance(model, nn.Linear) else 64
        with pytest.raises(
            ValueError, match=r"; got .*5, \d+.*; fuser\.convert\(\.\.\., pad=True\) pads M of linear layers$"
        ):
            model(inputs(5, width))

    def test_nested_tensors(self):
        linear = fuser.convert(nn.Linear(32, 32), MXFP8BlockScaling())
        with pytest.raises(RuntimeError, match="input of ConvertedLinear must be no nested tensor"):
            linear(torch.nested.nested_tensor([torch.zeros(3, 32), torch.zeros(4, 32)], layout=torch.jagged))

    def test_forwards_replaced_on_the_object(self):
        linear = nn.Linear(32, 32)
        linear.forward = lambda x: x + 1
        assert self.warned(linear) == ["the model (Linear): its forward was replaced on the object"]
        assert torch.equal(linear(torch.zeros(1)), torch.ones(1))
        model = fuser.convert(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), MXFP8BlockScaling())
        model[1].forward = lambda x: torch.zeros(3)
        assert torch.equal(model(inputs(32, 32)), torch.zeros(3))

    def test_double_precision(self):
        assert "float64" in self.warned(nn.Linear(32, 32).double())[0]
        model = fuser.convert(nn.Sequential(nn.Linear(32, 32), nn.ReLU()), MXFP8BlockScaling()).double()
        for part in (model, model[0]):
            with pytest.raises(
                ValueError, match=r"the weight of '0' is of torch.float64\. .* fuser.convert\(model, None\)"
            ):
                part(inputs(32, 32).double())
        with fuser.backend("float64"), fuser.autocast(enabled=False):
            y = model(inputs(32, 32).double())
        plain = fuser.convert(model, None)(inputs(32, 32).double())
        assert plain.dtype == y.dtype == torch.float64
        torch.testing.assert_close(y, plain, rtol=1e-13, atol=1e-13)

    @pytest.mark.parametrize(
        ("build", "compiled"),
        [
            (lambda: nn.Linear(64, 64), False),
            (lambda: nn.Linear(64, 64), True),
            (feed_forward, False),
            (lambda: feed_forward()[1:], False),
        ],
    )
    def test_an_input_of_another_dtype_is_torchs_error(self, build, compiled):
        model, x = build(), inputs(32, 64)
        fuser.convert(model, MXFP8BlockScaling())
        called = torch.compile(model, backend="eager") if compiled else model
        for dtype in (torch.bfloat16, torch.float16):
            with pytest.raises(RuntimeError, match=f"must have the dtype of the weight.*, torch.float32.* got {dtype}"):
                called(x.to(dtype))
            with pytest.raises(RuntimeError):
                fuser.convert(copy.deepcopy(model), None)(x.to(dtype))
        with torch.autocast("cpu", torch.bfloat16):
            assert called(x.to(torch.float16)).dtype == torch.bfloat16

    @pytest.mark.parametrize(
        ("rule", "named"),
        [
            (MXFP8BlockScaling(), ["0 (Linear)", "1.0 (BasicLinear)"]),
            ({"1": MXFP8BlockScaling()}, ["1.0 (BasicLinear)"]),
            (lambda name, module: MXFP8BlockScaling() if name == "0" else None, ["0 (Linear)"]),
            ({"0": None, "1": None, "*": MXFP8BlockScaling()}, []),
        ],
    )
    def test_operations_are_left_to_autocast_and_named(self, rule, named):
        model = nn.Sequential(
            ops.Linear(64, 64), ops.Sequential(ops.BasicLinear(64, 64), ops.GELU()), nn.Linear(64, 64)
        )
        why = (
            "an operation of fuser.ops, which takes its recipe from a fuser.autocast around its call, not from convert"
        )
        if named:
            assert self.warned(model, rule) == [f"{one}: {why}" for one in named]
            with pytest.raises(ValueError, match=r"not all is converted:\n.*: an operation of fuser.ops"):
                fuser.convert(model, rule, strict=True)
        else:
            fuser.convert(model, rule, strict=True)

    def test_a_model_of_operations(self):
        with pytest.raises(ValueError, match=r"not all is converted:\n  the model \(Linear\): an operation of fuser"):
            fuser.convert(ops.Linear(64, 64), MXFP8BlockScaling(), strict=True)
        fuser.convert(ops.Sequential(ops.GELU(), ops.RMSNorm(64)), MXFP8BlockScaling(), strict=True)

    def test_what_has_no_operation_stays_without_a_word(self):
        model = nn.Sequential(
            nn.GELU(), nn.ReLU(inplace=True), nn.LayerNorm(32, elementwise_affine=False), nn.Tanh(), nn.Embedding(4, 4)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fuser.convert(model, MXFP8BlockScaling())
        assert not any(isinstance(module, conversion.modules.Converted) for module in model.modules())
        assert type(model) is nn.Sequential

    def test_parents_that_read_a_weight(self):
        class Parent(nn.Module):
            def __init__(self):
                super().__init__()
                self.used, self.read = nn.Linear(32, 32), nn.Linear(32, 32)
                nn.init.zeros_(self.used.weight)

            def forward(self, x):
                return self.project(self.used(x.to(self.used.weight.dtype)))

            def project(self, x):
                return nn.functional.linear(x, self.read.weight)

        class Child(Parent):
            def forward(self, x):
                return super().forward(x)

        (line,) = self.warned(nn.Sequential(Child()))
        assert line.startswith("0 (Child) reads read.weight")
        (line,) = self.warned(nn.Sequential(Parent()))
        assert line == "0 (Parent) reads read.weight in its forward: not quantized there"

        class Encoder(nn.TransformerEncoderLayer):
            def forward(self, x):
                return super().forward(x) + nn.functional.linear(x, self.linear1.weight)

        class Sequence(nn.Sequential):
            def __init__(self):
                super().__init__()
                self.head = nn.Linear(32, 32)

            def forward(self, x):
                return x @ self.head.weight if self.head.bias is None else x

        assert self.warned(Encoder(32, 2, 32))[1].startswith("the model (Encoder) reads linear1.weight in its")
        assert self.warned(Sequence())[0].startswith("the model (Sequence) reads head.weight in its")

    def test_output_heads_that_multiply_by_an_embedding(self):
        """Under one recipe for the whole model: patterns and a filter say what is meant."""

        class Language(nn.Module):
            def __init__(self):
                super().__init__()
                self.table, self.layer = nn.Embedding(96, 64), nn.Linear(64, 64)

            def forward(self, i):
                return nn.functional.linear(self.layer(self.table(i)), self.table.weight)

        class LooksUp(Language):
            def forward(self, i):
                return self.layer(nn.functional.embedding(i, self.table.weight))

        expected = "the model (Language) reads table.weight in its forward: not quantized there"
        assert self.warned(Language()) == [expected]
        (found,) = fuser.compare(Language(), torch.arange(32)[None], MXFP8BlockScaling(), quiet=True)
        assert found.left == [expected]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fuser.convert(LooksUp(), MXFP8BlockScaling())
            fuser.convert(Language(), {"layer": MXFP8BlockScaling()})
            fuser.convert(Language(), MXFP8BlockScaling(), filter=lambda name, module: isinstance(module, nn.Linear))


class TestModels:
    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    @pytest.mark.parametrize("padding", [False, True])
    def test_encoder_in_eval_mode(self, padding):
        """torch's fast path reads the weights: the error was 1e-7. The nested tensors of padded batches, too."""
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        model, x = nn.TransformerEncoder(layer, 2).eval(), inputs(4, 16, 64)
        mask = (torch.arange(16) >= torch.tensor([16, 12, 16, 9])[:, None]) if padding else None
        with torch.no_grad():
            plain = model(x, src_key_padding_mask=mask)
            with pytest.warns(UserWarning, match=r"layers\.1\.self_attn \(MultiheadAttention\)"):
                fuser.convert(model, MXFP8BlockScaling())
            found = model(x, src_key_padding_mask=mask)
            if padding:
                plain, found = plain[~mask], found[~mask]
            assert 0.005 < ((found - plain).norm() / plain.norm()).item() < 0.05
            fuser.convert(model, None)
            assert model.layers[0].activation_relu_or_gelu
            assert model.use_nested_tensor
            again = model(x, src_key_padding_mask=mask)
            assert torch.equal(again[~mask] if padding else again, plain)

    def test_decoder_trains(self):
        model = nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 2, 64, batch_first=True), 1)
        with pytest.warns(UserWarning, match="multihead_attn"):
            fuser.convert(model, MXFP8BlockScaling())
        model(inputs(2, 16, 32), inputs(2, 16, 32)).sum().backward()
        assert all(p.grad is not None for p in model.parameters())

    def test_convolutional(self):
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
            nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10),
        )  # fmt: skip
        with pytest.warns(UserWarning, match=r"0 \(Conv2d\): convolutions are not quantized\n  7 \(Linear\)"):
            fuser.convert(model, MXFP8BlockScaling(), pad=True)
        model(inputs(4, 3, 8, 8)).sum().backward()
        assert all(p.grad is not None for p in model.parameters())
        assert quantizes(model.eval(), inputs(4, 3, 8, 8))

    def test_like_hugging_face(self):
        """Attention with four projections, a gated feed-forward, a norm of its own, outputs in a dict, tied weights."""
        torch.manual_seed(0)
        model = _CausalModel()
        tokens = torch.arange(64).view(2, 32) % 64
        plain = model(input_ids=tokens, labels=tokens)["loss"]
        fuser.convert(model, MXFP8BlockScaling(), strict=True)
        loss = model(input_ids=tokens, labels=tokens)["loss"]
        loss.backward()
        assert 0 < abs(loss.item() - plain.item()) < 0.1
        assert all(p.grad is not None for p in model.parameters())
        model.apply(lambda m: nn.init.normal_(m.weight, std=0.02) if isinstance(m, nn.Linear) else None)
        assert quantizes(model, tokens)


class _Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()


class _Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.input_norm, self.post_norm = _Norm(width), _Norm(width)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(width, width, bias=False))
        self.gate_proj, self.up_proj = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down_proj, self.act_fn = nn.Linear(2 * width, width, bias=False), nn.SiLU()

    def forward(self, x):
        h = self.input_norm(x)
        q, k, v = (
            p(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.o_proj(y)
        h = self.post_norm(x)
        return x + self.down_proj(self.act_fn(self.gate_proj(h)) * self.up_proj(h))


class _CausalModel(nn.Module):
    def __init__(self, vocabulary=64, width=32, layers=2):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([_Block(width, 2) for _ in range(layers)])
        self.norm = _Norm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, input_ids, labels=None):
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(self.norm(x))
        if labels is None:
            return logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


class TestPadding:
    @sampled(("kind", "rows"), itertools.product(RECIPES, [(0,), (1,), (5, 7), ()]), every=3, in_all=1)
    def test_as_padded_by_hand(self, kind, rows):
        """Bit for bit: the rows that are there, the weight's gradient and the bias's."""
        torch.manual_seed(0)
        linear = nn.Linear(128, 128)
        padded = fuser.convert(copy.deepcopy(linear), kind(), pad=True)
        x = inputs(*rows, 128)
        found = gradients(padded, x)
        fuser.convert(linear, kind())
        flat = x.reshape(-1, 128)
        multiple = fuser.get_align_size_for_quantization(kind())
        whole = torch.zeros(-(-len(flat) // multiple) * multiple, 128)
        whole[: len(flat)] = flat
        whole.requires_grad_()
        dy = torch.zeros_like(whole)
        dy[: len(flat)] = inputs(*rows, 128, seed=2).reshape(-1, 128)
        torch.manual_seed(3)
        y = linear(whole)
        y.backward(dy)
        wanted = [
            y[: len(flat)].view(x.shape),
            whole.grad[: len(flat)].view(x.shape),
            linear.weight.grad,
            linear.bias.grad,
        ]
        assert_equal(found, [t.detach() for t in wanted])

    def test_rows_of_zeros_add_nothing(self):
        """Current scaling takes any number of rows: what it computes without padding is what it computes with it."""
        torch.manual_seed(0)
        linear = fuser.convert(nn.Linear(64, 64), Float8CurrentScaling())
        x = inputs(5, 64)
        wanted = gradients(linear, x)
        linear.pad = True
        for one, other in zip(gradients(linear, x), wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)  # sums over rows in another order at most

    def test_in_a_sequence(self):
        """Only linear layers get rows of zeros: a norm or an activation would turn them into other rows."""
        model = fuser.convert(feed_forward(), Float8CurrentScaling())
        x = inputs(3, 64)
        wanted = gradients(model, x)
        fuser.convert(model, Float8CurrentScaling(), pad=True)
        for one, other in zip(gradients(model, x), wanted, strict=True):
            assert ((one - other).norm() / other.norm()).item() < 0.02  # the activation was rounded before its cast
        assert_equal(
            gradients(model, inputs(32, 64)),
            gradients(fuser.convert(feed_forward(), Float8CurrentScaling()), inputs(32, 64)),
        )

    def test_without_it_blocks_are_an_error(self):
        with pytest.raises(ValueError, match="M % 32 == 0"):
            fuser.convert(nn.Linear(64, 64), MXFP8BlockScaling())(inputs(5, 64))

    def test_not_without_quantization(self):
        linear = fuser.convert(nn.Linear(64, 64), MXFP8BlockScaling(), pad=True)
        with fuser.autocast(enabled=False):
            torch.testing.assert_close(linear(inputs(5, 64)), nn.Linear.forward(linear, inputs(5, 64)))


class TestExplain:
    def test_the_pipelines_of_a_converted_model(self):
        model = nn.Sequential(feed_forward(), nn.Tanh(), nn.ModuleDict({"a": nn.Linear(64, 32)}))
        fuser.convert(model, MXFP8BlockScaling())
        x = inputs(32, 64)
        for explanation in (fuser.explain(model, quiet=True), fuser.explain(model[0], x, quiet=True)):
            pipeline = explanation.pipelines[0]
            assert pipeline.basic_ops == ["LayerNorm", "BasicLinear", "Bias", "GELU", "BasicLinear", "Bias"]
            assert pipeline.recipe == "MXFP8BlockScaling"
            assert [edge.quantizer for edge in pipeline.edges if edge.direction == "forward"].count(
                "MXFP8Quantizer"
            ) == 2
        assert [p.basic_ops for p in fuser.explain(model, quiet=True).pipelines[1:]] == [["BasicLinear", "Bias"]]
        with fuser.autocast(enabled=False):
            assert fuser.explain(model[0], x, quiet=True).pipelines[0].recipe is None

    def test_scales_are_not_disturbed(self):
        model, x = fuser.convert(feed_forward(), DelayedScaling()), inputs(32, 64)
        model(x).sum().backward()
        twin = copy.deepcopy(model)
        fuser.explain(model, x * 100, quiet=True)
        assert_equal(gradients(model, x), gradients(twin, x))
