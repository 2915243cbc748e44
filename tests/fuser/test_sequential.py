"""The container: list interface, grouping, extra tensors, keyword arguments."""

import copy

import numpy as np
import pytest
import torch

from fuser import ops
from fuser.fuser import OperationFuser
from fuser.op import BasicOperation

pytestmark = pytest.mark.check


def keys(module):
    return list(module._modules)


class TestList:
    @pytest.fixture
    def four(self):
        return [ops.Identity(), torch.nn.ReLU(), ops.Bias(2), torch.nn.Identity()]

    def test_from_modules_and_from_a_dict(self, four):
        assert list(ops.Sequential(*four)) == four
        named = ops.Sequential({"a": four[0], "b": four[1]})
        assert keys(named) == ["a", "b"]
        assert not isinstance(named, torch.nn.Sequential)
        assert named.a is four[0]

    def test_reading(self, four):
        model = ops.Sequential(*four)
        assert len(model) == 4
        assert model[0] is four[0]
        assert model[-1] is four[3]
        assert list(model) == four
        for index in (4, -5):
            with pytest.raises(IndexError):
                model[index]

    def test_slices_share_modules_and_renumber(self, four):
        part = ops.Sequential(*four)[1:3]
        assert isinstance(part, ops.Sequential)
        assert list(part) == four[1:3]
        assert keys(part) == ["0", "1"]
        assert list(ops.Sequential(*four)[::-1]) == four[::-1]

    def test_set_and_delete(self, four):
        model = ops.Sequential(*four)
        new = ops.Identity()
        model[-1] = new
        assert model[3] is new
        del model[0]
        assert keys(model) == ["1", "2", "3"]
        assert list(model) == [four[1], four[2], new]
        del model[1:]
        assert list(model) == [four[1]]
        model.append(four[0])
        assert keys(model) == ["1", "2"]

    @pytest.mark.parametrize("names", [["fc"], ["fc", "act"], ["fc", "1"], ["7", "fc"], ["x1", "-1"]])
    def test_growing_beside_names(self, four, names):
        """New keys are numbers that no module has."""
        named = dict(zip(names, four, strict=False))
        model = ops.Sequential(named)
        assert model.append(four[2]).extend([four[3]]) is model
        assert keys(model)[: len(names)] == names
        assert list(model) == [*named.values(), *four[2:]]
        new = ops.Identity()
        assert list(model.insert(0, new)) == [new, *named.values(), *four[2:]]
        numbers = [int(key) for key in names if key.isdecimal()]
        first = max(numbers) + 1 if numbers else len(names)
        assert keys(model)[len(names) :] == [str(first + i) for i in range(3)]

    def test_set_takes_no_slice(self, four):
        with pytest.raises(TypeError):
            ops.Sequential(*four)[0:2] = four[:2]

    def test_growing(self, four):
        model = ops.Sequential(four[0])
        assert model.append(four[1]) is model
        assert model.extend(four[2:]) is model
        assert list(model) == four
        new = ops.Identity()
        assert model.insert(1, new) is model
        assert list(model) == [four[0], new, *four[1:]]
        assert keys(model) == ["0", "1", "2", "3", "4"]

    def test_pop(self, four):
        model = ops.Sequential(*four)
        assert model.pop(1) is four[1]
        rest = model.pop(slice(1, 3))
        assert list(rest) == four[2:]
        assert list(model) == four[:1]

    def test_plus(self, four):
        left, right = ops.Sequential(*four[:2]), ops.Sequential(*four[2:])
        both = left + right
        assert list(both) == four
        assert len(left) == 2
        same = left
        left += right
        assert left is same
        assert list(left) == four
        left += left
        assert list(left) == four + four

    @pytest.mark.parametrize(
        "change",
        [
            lambda s: s.append(ops.Identity()),
            lambda s: s.extend([ops.Identity()]),
            lambda s: s.insert(0, ops.Identity()),
            lambda s: s.pop(0),
            lambda s: s.__setitem__(0, ops.ConstantScale(3.0)),
            lambda s: s.__delitem__(0),
            lambda s: s.__iadd__([ops.Identity()]),
            lambda s: s.add_module("7", ops.Identity()),
        ],
    )
    def test_changes_regroup(self, change):
        model = ops.Sequential(ops.Identity(), ops.ConstantScale(2.0))
        model(torch.ones(2))
        change(model)
        assert model._module_groups is None
        model(torch.ones(2))
        assert len(model._module_groups[0]._basic_ops) == len(model)


def test_module_replaced_by_name():
    """As adapters do it."""
    model = ops.Sequential(ops.Identity(), ops.ConstantScale(2.0))
    assert torch.equal(model(torch.ones(2)), torch.full((2,), 2.0))
    setattr(model, "1", ops.ConstantScale(3.0))
    assert torch.equal(model(torch.ones(2)), torch.full((2,), 3.0))
    model._modules["1"] = torch.nn.Identity()
    assert torch.equal(model(torch.ones(2)), torch.ones(2))


def test_operation_replaced_inside_a_fused_one():
    model = ops.Sequential(ops.Linear(4, 4), ops.GELU())
    x = torch.ones(2, 4)
    model(x)
    new = ops.BasicLinear(4, 4)
    model[0].basic_ops[0] = new
    model(x).sum().backward()
    assert new.weight.grad is not None
    with torch.no_grad():
        wanted = ops.Sequential(new, model[0].basic_ops[1], ops.GELU())(x)
        assert torch.equal(model(x), wanted)
        model[0].basic_ops.append(ops.ConstantScale(0.0))
        assert not model(x).any()


def test_operation_replaced_inside_a_fused_one_of_a_fuser():
    linear = ops.Linear(4, 4, bias=False)
    fuser = OperationFuser([linear])
    fuser(torch.ones(2, 4))
    linear.basic_ops[0] = ops.BasicLinear(4, 6)
    assert fuser(torch.ones(2, 4)).shape == (2, 6)


class TestForward:
    def test_groups_are_maximal_runs(self):
        modules = [
            ops.Identity(),
            torch.nn.Identity(),
            ops.Bias(2),
            ops.Linear(2, 2),
            torch.nn.ReLU(),
            torch.nn.Identity(),
            ops.GELU(),
            ops.ConstantScale(2.0),
            ops.Reshape((-1,)),
        ]
        model = ops.Sequential(*modules)
        model(torch.ones(3, 2))
        groups = model._module_groups
        assert len(groups) == 6
        kinds = [isinstance(group, OperationFuser) for group in groups]
        assert kinds == [True, False, True, False, False, True]
        assert [type(op).__name__ for op in groups[2]._basic_ops] == ["Bias", "BasicLinear", "Bias"]

    def test_empty(self):
        x = torch.ones(2)
        assert ops.Sequential()(x) is x

    def test_extra_tensors_from_left_to_right(self):
        model = ops.Sequential(
            ops.AddExtraInput(), ops.MakeExtraOutput(), torch.nn.ReLU(), ops.AddExtraInput(), ops.MakeExtraOutput()
        )
        y, first, second = model(torch.tensor([1.0]), torch.tensor([10.0]), torch.tensor([100.0]))
        assert (y.item(), first.item(), second.item()) == (111.0, 11.0, 111.0)

    @pytest.mark.parametrize("count", [0, 1, 3])
    def test_number_of_extra_inputs(self, count):
        """TE ignores surplus ones."""
        model = ops.Sequential(ops.AddExtraInput(), torch.nn.ReLU(), ops.AddExtraInput())
        names = "summand of AddExtraInput, summand of AddExtraInput, in this order"
        rule = f"Expected 2 extra inputs but got {count}: {names}"
        with pytest.raises(ValueError, match=rule):
            model(torch.ones(1), *[torch.ones(1)] * count)

    def test_extra_inputs_are_named(self):
        linears = [ops.GroupedLinear(2, 4, 4, scale_bias=scale_bias) for scale_bias in (True, False)]
        model = ops.Sequential(linears[0], ops.ScaledSReLU(), linears[1])
        names = "split_sizes of GroupedLinear, scales of GroupedLinear, scales of ScaledSReLU, split_sizes of GroupedL"
        with pytest.raises(ValueError, match=rf"^Expected 4 extra .* 1: {names}.*channel.*\(set_extra_input_channel\)"):
            model(torch.ones(2, 4), torch.tensor([1, 1]))
        with pytest.raises(
            ValueError, match="Expected 0 extra inputs but got 1: no operation takes one from the caller"
        ):
            ops.Sequential(ops.Identity())(torch.ones(1), torch.ones(1))

    def test_plain_module_with_a_tuple(self):
        class Two(torch.nn.Module):
            def forward(self, x):
                return x, x + 1

        y, z = ops.Sequential(ops.Identity(), Two())(torch.ones(2))
        assert torch.equal(z, y + 1)

    def test_channels_do_not_cross_groups(self):
        make = ops.MakeExtraOutput().set_extra_output_channel(0, "a")
        add = ops.AddExtraInput().set_extra_input_channel(0, "a")
        with pytest.raises(ValueError, match="no producer"):
            ops.Sequential(make, torch.nn.ReLU(), add)(torch.ones(2))

    def test_nested(self):
        inner = ops.Sequential(ops.ConstantScale(2.0), ops.ConstantScale(3.0))
        assert torch.equal(ops.Sequential(ops.ConstantScale(5.0), inner)(torch.ones(2)), torch.full((2,), 30.0))

    def test_deepcopy_has_its_own_groups(self):
        model = ops.Sequential(ops.Linear(4, 4), ops.Bias(4))
        x = torch.randn(2, 4)
        y = model(x)
        twin = copy.deepcopy(model)
        assert torch.equal(twin(x), y)
        twin(x).sum().backward()
        assert model[0].weight.grad is None
        assert twin[0].weight.grad is not None
        assert twin[0].weight is twin[0].basic_ops[0].weight
        assert twin._module_groups[0]._basic_ops[0] is twin[0].basic_ops[0]


class Recorder(BasicOperation):
    def __init__(self):
        super().__init__()
        self.seen = []

    def op_forward(self, ctx, input_, *, prev_op_grad_output_quantizer, next_op_input_quantizer, note=None):
        self.seen.append(note)
        return input_

    def op_backward(self, ctx, grad_output):
        return grad_output, ()


class TestKeywords:
    def test_by_module_and_by_index(self):
        first, second = Recorder(), Recorder()
        model = ops.Sequential(first, torch.nn.ReLU(), second)
        model(torch.ones(2), op_kwargs={first: {"note": 1}, 2: {"note": 2}})
        model(torch.ones(2), op_kwargs={-1: {"note": 3}})
        assert first.seen == [1, None]
        assert second.seen == [2, 3]

    def test_only_basic_operations(self):
        linear = ops.Linear(2, 2)
        model = ops.Sequential(linear, torch.nn.ReLU())
        for key, name in ((0, "Linear"), (1, "ReLU"), (linear, "Linear")):
            with pytest.raises(ValueError, match=f"provide forward kwargs to {name}, but Sequential only allows"):
                model(torch.ones(1, 2), op_kwargs={key: {}})

    def test_member_of_a_fused_operation(self):
        linear = ops.Linear(2, 2)
        with pytest.raises(TypeError, match="color"):
            ops.Sequential(linear)(torch.ones(1, 2), op_kwargs={linear.basic_ops[0]: {"color": 1}})

    def test_unknown_operation(self):
        with pytest.raises(ValueError, match="op_kwargs contains keys that are not in this Sequential"):
            ops.Sequential(Recorder())(torch.ones(2), op_kwargs={Recorder(): {}})


def test_inputs_that_are_no_tensors_are_named():
    model = ops.Sequential(ops.Linear(32, 32), ops.GELU())
    for wrong in (np.zeros((4, 32), np.float32), [1.0], None):
        with pytest.raises(TypeError, match=f"input must hold torch tensors; got {type(wrong).__name__}"):
            model(wrong)
    with pytest.raises(TypeError, match="extra_inputs must hold torch tensors; got float"):
        ops.AddExtraInput()(torch.zeros(4, 32), 1.0)
