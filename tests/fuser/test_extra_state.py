"""Extra state of checkpoints: tensors and JSON, round trips, legacy payloads."""

import dataclasses
import functools
import io
import json
import pickle
import warnings
import zipfile
from itertools import product

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fuser
from fuser import extra_state, ops, recipe
from tiers import sampled


class TestPacking:
    TENSORS = {  # noqa: RUF012
        "a": torch.tensor([1.5, -0.0, float("inf"), float("nan")]),
        "b": torch.arange(6, dtype=torch.int64).reshape(2, 3),
        "c": torch.zeros(0, 4, dtype=torch.bfloat16),
        "d": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "e": torch.tensor(2.0, dtype=torch.float16),
    }

    def test_round_trip(self):
        state = extra_state.pack({"x": [1, "y"]}, self.TENSORS)
        assert (state.dtype, state.dim(), state.device.type) == (torch.uint8, 1, "cpu")
        metadata, tensors = extra_state.unpack(state)
        assert metadata == {"x": [1, "y"]}
        assert list(tensors) == list(self.TENSORS)
        for name, tensor in self.TENSORS.items():
            assert tensors[name].shape == tensor.shape
            assert tensors[name].dtype is tensor.dtype
            bits = (t.reshape(-1).view(torch.uint8) for t in (tensors[name], tensor))
            assert torch.equal(*bits)

    def test_other_dtypes_are_refused_by_name(self):
        with pytest.raises(TypeError, match=r"scale must be .*float32, .*; got torch\.float64"):
            extra_state.pack({}, {"scale": torch.ones(3, dtype=torch.float64)})

    def test_is_a_safetensors_file(self):
        safetensors = pytest.importorskip("safetensors.torch")
        loaded = safetensors.load(bytes(extra_state.pack({}, self.TENSORS).tolist()))
        assert torch.equal(loaded["b"], self.TENSORS["b"])

    def test_does_not_alias(self):
        source = torch.ones(3)
        state = extra_state.pack({}, {"a": source})
        _, tensors = extra_state.unpack(state)
        tensors["a"].zero_()
        source.zero_()
        assert torch.equal(extra_state.unpack(state)[1]["a"], torch.ones(3))

    PACKED = bytes(extra_state.pack({"x": [1, "y"]}, TENSORS).tolist())

    @staticmethod
    def as_unpacked(data):
        """What `unpack` makes of bytes; the only error it may raise is RuntimeError."""
        try:
            unpacked = extra_state.unpack(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        except RuntimeError:
            return None
        if unpacked is not None:
            metadata, tensors = unpacked
            assert isinstance(metadata, dict) and all(isinstance(t, torch.Tensor) for t in tensors.values())
        return unpacked

    @settings(max_examples=300, deadline=None)
    @given(st.binary(min_size=1, max_size=200))
    @example(b"\x05\0\0\0\0\0\0\0{abc}")
    @example(b"\x02\0\0\0\0\0\0\0{}")
    @example(b"\xff\xff\xff\xff\xff\xff\xff\xff{}")
    @example(b"\x02\0\0\0\0\0\0\0{\xff")
    @example(b"\xff\xff\x01\0\0\0\0\0{" + b'"a":{' * 0x5000 + b" " * 0x8000)
    def test_any_bytes(self, data):
        assert self.as_unpacked(data) is None

    @settings(max_examples=300, deadline=None)
    @given(st.data())
    def test_changed_bytes(self, data):
        changed = bytearray(self.PACKED)
        for _ in range(data.draw(st.integers(1, 4))):
            changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
        self.as_unpacked(changed)

    def test_truncated_or_extended(self):
        for size in range(1, len(self.PACKED)):
            with pytest.raises(RuntimeError):
                extra_state.unpack(torch.frombuffer(bytearray(self.PACKED[:size]), dtype=torch.uint8))
        with pytest.raises(RuntimeError, match="damaged"):
            extra_state.unpack(torch.frombuffer(bytearray(self.PACKED + b"\0"), dtype=torch.uint8))

    json_values = st.recursive(
        st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
        lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=5), values, max_size=3),
        max_leaves=5,
    )

    @settings(max_examples=300, deadline=None)
    @given(
        entry=st.fixed_dictionaries(
            {},
            optional={
                "dtype": st.sampled_from(["F32", "U8", "F8"]) | json_values,
                "shape": st.lists(st.integers(-2, 2**66), max_size=3) | json_values,
                "data_offsets": st.lists(st.integers(-2, 2**66), min_size=2, max_size=2) | json_values,
            },
        )
        | json_values,
        metadata=st.just({"state": "{}"}) | json_values,
    )
    @example(entry={"dtype": "F32", "shape": [-1], "data_offsets": [0, 8]}, metadata={"state": "{}"})
    @example(entry={"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 8]}, metadata={"state": "{}"})
    @example(entry={"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, metadata={"state": "[1]"})
    def test_any_header(self, entry, metadata):
        header = json.dumps({"__metadata__": metadata, "a": entry}).encode()
        self.as_unpacked(len(header).to_bytes(8, "little") + header + bytes(8))

    @pytest.mark.parametrize("empty", [None, torch.empty(0, dtype=torch.uint8)])
    def test_empty(self, empty):
        assert extra_state.unpack(empty) is None


class Planted:
    """Runs when it is unpickled."""

    ran = False

    @staticmethod
    def run():
        Planted.ran = True

    def __reduce__(self):
        return (Planted.run, ())


def pickled(value):
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


class TestLegacy:
    def test_without_state_is_ignored(self):
        for value in ({}, {"extra_fp8_variables": {"a": 1}}, b""):
            op = ops.Quantize()
            op.set_extra_state(pickled(value))
            assert op._fp8_metas is None

    def test_stateless_recipes_are_ignored(self):
        state = {"forward": {"recipe": recipe.Float8CurrentScaling(), "extra_fp8_variables": {}}}
        ops.Quantize().set_extra_state(pickled(state))

    @pytest.mark.parametrize(
        "value",
        [
            {"forward": {"scale_fwd": [1.0]}},
            {"forward": {"recipe": recipe.DelayedScaling()}},
            {"forward": {"scale_fwd": torch.ones(1), "amax_history_fwd": torch.ones(2, 1)}},
            Planted(),
            {"recipe": recipe.MXFP8BlockScaling(), "planted": Planted()},
        ],
        ids=["keys", "delayed recipe", "tensors", "code", "code beside a stateless recipe"],
    )
    @pytest.mark.parametrize("allowed", ["0", "1"])
    def test_anything_else_is_refused_and_never_run(self, value, allowed, monkeypatch):
        monkeypatch.setenv(extra_state.UNSAFE_PICKLE_EXTRA_STATE_ENV, allowed)
        payload = pickled(value)
        is_stateless = isinstance(value, dict) and "planted" in value
        if is_stateless:
            ops.Quantize().set_extra_state(payload)  # ignored as TE ignores it
        else:
            with pytest.raises(RuntimeError, match=r"^Refusing to load pickled Transformer Engine extra state"):
                ops.Quantize().set_extra_state(payload)
        assert not Planted.ran

    @staticmethod
    def of_version_1(value):
        """The extra state of TE 1.x: a file of torch.save, in memory."""
        file = io.BytesIO()
        torch.save(value, file)
        return file

    @pytest.mark.parametrize("value", [None, {}, {"extra_fp8_variables": {"fp8_checkpoint": False}}])
    def test_version_1_without_state_is_ignored(self, value):
        state = self.of_version_1(value)
        for payload in (state, state.getvalue(), io.BytesIO(), b""):
            op = ops.Quantize()
            op.set_extra_state(payload)
            assert op._fp8_metas is None

    @pytest.mark.parametrize(
        "value",
        [{"scale_fwd": torch.ones(3), "amax_history_fwd": torch.ones(2, 3), "extra_fp8_variables": {}}, Planted()],
        ids=["tensors", "code"],
    )
    def test_version_1_with_state_is_refused_and_never_run(self, value):
        model, payload = ops.Sequential(ops.Linear(8, 8)), self.of_version_1(value)
        state = model.state_dict() | {"0.basic_ops.0._extra_state": payload}
        refusal = r"^0\.basic_ops\.0\._extra_state: Refusing to load pickled Transformer Engine extra state"
        with pytest.raises(RuntimeError, match=refusal):
            model.load_state_dict(state)
        del state["0.basic_ops.0._extra_state"]  # as the message says
        model.load_state_dict(state)
        assert not Planted.ran

    def test_damaged_files_of_torch_save(self):
        data = self.of_version_1({"scale_fwd": torch.ones(3)}).getvalue()
        for size in range(1, len(data), 7):
            with pytest.raises(RuntimeError):
                extra_state.unpack(data[:size])
        compressed = io.BytesIO()
        with zipfile.ZipFile(compressed, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(None))
        with pytest.raises(RuntimeError, match="neither"):
            extra_state.unpack(compressed)

    @pytest.mark.parametrize("state", [{}, 3, "text"])
    def test_other_types_are_refused(self, state):
        with pytest.raises(TypeError, match=f"uint8 tensor, bytes or an io.BytesIO; got {type(state).__name__}"):
            ops.Quantize().set_extra_state(state)

    def test_garbage(self):
        with pytest.raises(RuntimeError, match="neither"):
            ops.Quantize().set_extra_state(torch.tensor([1, 2, 3], dtype=torch.uint8))


def largest(history):
    return history.amax(0)


class Stray(recipe.Recipe):
    """Derives from the base of all recipes alone."""


@dataclasses.dataclass(repr=False)
class Marked(recipe.DelayedScaling):
    """A recipe of the user's."""

    mark: object = None


SameName = type("DelayedScaling", (recipe.DelayedScaling,), {})


class TestRecipes:
    @pytest.mark.parametrize(
        "one",
        [
            recipe.DelayedScaling(),
            recipe.DelayedScaling(
                margin=2, fp8_format=recipe.Format.E4M3, amax_history_len=7, amax_compute_algo="most_recent"
            ),
            recipe.DelayedScaling(reduce_amax=False),
        ],
    )
    def test_round_trip(self, one):
        entry = json.loads(json.dumps(extra_state.recipe_to_json(one)))
        assert repr(extra_state.recipe_from_json(entry)) == repr(one)

    def test_other_objects_cannot_be_stored(self):
        one = recipe.DelayedScaling()
        one.margin = torch.ones(1)
        with pytest.raises(TypeError, match="margin"):
            extra_state.recipe_to_json(one)

    def test_recipes_of_nobody_cannot_be_stored(self):
        with pytest.raises(TypeError, match="Stray"):
            extra_state.recipe_to_json(Stray())

    def test_functions_are_stored_by_name_and_taken_from_the_present_recipe(self):
        one = recipe.DelayedScaling(margin=3, amax_compute_algo=largest)
        entry = json.loads(json.dumps(extra_state.recipe_to_json(one)))
        assert entry["fields"]["amax_compute_algo"]["function"].endswith("largest")
        restored = extra_state.recipe_from_json(entry)
        assert (restored.amax_compute_algo, restored.margin) == ("max", 3)
        (difference,) = extra_state.differences(entry, restored)
        assert "largest" in difference and "'max'" in difference
        present = recipe.DelayedScaling(amax_compute_algo=functools.partial(largest))
        restored = extra_state.recipe_from_json(entry, present)
        assert (restored.amax_compute_algo, restored.margin) == (present.amax_compute_algo, 3)
        assert extra_state.differences(entry, restored) == []
        named = extra_state.recipe_to_json(present)["fields"]["amax_compute_algo"]
        assert named == {"function": "functools.partial"}

    @pytest.mark.parametrize("kind", ["Marked", "DelayedScaling"], ids=["by another name", "by the same name"])
    def test_a_subclass_becomes_its_base(self, kind):
        one = {"Marked": Marked, "DelayedScaling": SameName}[kind](margin=3, fp8_format=recipe.Format.E4M3)
        entry = json.loads(json.dumps(extra_state.recipe_to_json(one)))
        restored = extra_state.recipe_from_json(entry)
        assert type(restored) is recipe.DelayedScaling
        assert (restored.margin, restored.fp8_format) == (3, recipe.Format.E4M3)
        (difference,) = extra_state.differences(entry, restored)
        assert kind in difference and "now it is a DelayedScaling" in difference

    @pytest.mark.parametrize(
        "entry",
        [
            None,
            [],
            {},
            {"class": "DelayedScaling"},
            {"class": "DelayedScaling", "fields": 3},
            {"class": ["DelayedScaling"], "fields": {}},
            {"class": "Recipe", "fields": {"margin": 1}},
            {"class": "Recipe", "fields": {"products": "hopper"}},
            {"class": "DelayedScaling", "fields": {"fp8_format": "E9"}},
            {"class": "DelayedScaling", "fields": {"amax_history_len": "long"}},
        ],
    )
    def test_damaged(self, entry):
        with pytest.raises(RuntimeError):
            extra_state.recipe_from_json(entry)

    @pytest.mark.parametrize("name", ["Recipe2", "Format", "os"])
    def test_unknown_class(self, name):
        with pytest.raises(RuntimeError, match=name):
            extra_state.recipe_from_json({"class": name, "fields": {}})

    def test_unknown_field(self):
        with pytest.raises(RuntimeError, match="color"):
            extra_state.recipe_from_json({"class": "DelayedScaling", "fields": {"color": 1}})


def trained(steps=3, length=4, **kwargs):
    torch.manual_seed(0)
    model = ops.Sequential(ops.Linear(32, 32), ops.GELU(), ops.Linear(32, 32), ops.Quantize(backward=True))
    train(model, steps, length, **kwargs)
    return model


def train(model, steps, length=4, **kwargs):
    outputs = []
    for step in range(steps):
        x = torch.randn(32, 32, generator=torch.Generator().manual_seed(step)) * (step + 1)
        with fuser.autocast(recipe=recipe.DelayedScaling(amax_history_len=length, **kwargs)):
            y = model(x)
        y = y.dequantize() if isinstance(y, fuser.QuantizedTensor) else y
        y.square().mean().backward()
        outputs.append(y.detach())
    return outputs


class TestOperations:
    @pytest.mark.parametrize(
        "kind",
        [recipe.Float8CurrentScaling, recipe.MXFP8BlockScaling, recipe.Float8BlockScaling, recipe.NVFP4BlockScaling],
    )
    def test_stateless_recipes_store_nothing(self, kind):
        op = ops.Quantize()
        with fuser.autocast(recipe=kind()):
            op(torch.randn(128, 128))
        assert op.get_extra_state().numel() == 0

    def test_every_operation_stores_a_1d_cpu_tensor(self):
        for key, value in trained().state_dict().items():
            if key.endswith("_extra_state"):
                assert (value.dtype, value.dim(), value.device.type) == (torch.uint8, 1, "cpu")

    @pytest.mark.parametrize("steps", [0, 2], ids=["fresh", "with scales"])
    def test_a_state_dict_without_extra_state_loads_and_leaves_scales_alone(self, steps):
        """As that of a model in torch.nn, or of TE without the keys that its loader refuses."""
        model = trained(steps=steps)
        before = [tensor.clone() for tensor in scales_of(model)]
        state = {key: value for key, value in trained().state_dict().items() if not key.endswith("_extra_state")}
        assert str(model.load_state_dict(state, strict=True)) == "<All keys matched successfully>"
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(scales_of(model), before, strict=True))
        assert torch.equal(model[0].weight, state["0.basic_ops.0.weight"])
        with pytest.raises(RuntimeError, match=r"Missing key.*0\.basic_ops\.0\.weight"):
            model.load_state_dict({key: value for key, value in state.items() if key != "0.basic_ops.0.weight"})

    def test_training_continues_bit_for_bit(self):
        """Through a file, `weights_only`, into a fresh model."""
        model = trained()
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        fresh = trained(steps=0)
        fresh.load_state_dict(torch.load(file, weights_only=True), strict=True)
        for mine, theirs in zip(train(model, 3), train(fresh, 3), strict=True):
            assert torch.equal(mine, theirs)
        for (key, a), b in zip(model.state_dict().items(), fresh.state_dict().values(), strict=True):
            assert torch.equal(a, b), key

    def test_loading_restores_in_place(self):
        """Quantizers that are in use see the loaded scales."""
        model = trained()
        state = {key: value.clone() for key, value in model.state_dict().items()}
        quantizer = model[0].basic_ops[0].get_quantizer("forward", 0)
        scale = quantizer.scale.item()
        train(model, 5)
        assert quantizer.scale.item() != scale
        model.load_state_dict(state)
        assert model[0].basic_ops[0].get_quantizer("forward", 0) is quantizer
        assert quantizer.scale.item() == scale

    def test_loading_another_history_length(self):
        state = trained(length=4).state_dict()
        model = trained(length=6)
        model.load_state_dict(state)
        metas = model[0].basic_ops[0]._fp8_metas["forward"]
        assert metas["scaling_fwd"].amax_history.shape == (4, 2)
        quantizer = model[0].basic_ops[0].get_quantizer("forward", 0)
        assert quantizer.amax.data_ptr() == metas["scaling_fwd"].amax_history.data_ptr()
        train(model, 1, length=4)

    def test_loading_does_not_need_or_leave_autocast(self):
        state = trained().state_dict()
        model = trained(steps=0)
        model.load_state_dict(state)
        from fuser.quantization.state import FP8GlobalStateManager

        assert not FP8GlobalStateManager.is_fp8_enabled()
        model(torch.randn(32, 32))  # without a recipe: nothing is quantized, nothing is lost
        for (key, a), b in zip(state.items(), model.state_dict().values(), strict=True):
            assert torch.equal(a, b), key

    def test_state_for_an_operation_without_quantizers_is_ignored(self):
        state = ops.Quantize().get_extra_state()
        ops.Identity().set_extra_state(state)
        quantize = ops.Quantize()
        with fuser.autocast(recipe=recipe.DelayedScaling()):
            quantize(torch.ones(16, 16))
        ops.Identity().set_extra_state(quantize.get_extra_state())

    def test_wrong_number_of_quantizers(self):
        state = trained()[0].basic_ops[0].get_extra_state()
        with pytest.raises(RuntimeError, match="shape"):
            ops.Quantize().set_extra_state(state)

    def test_an_error_of_loading_names_the_key_and_changes_no_scale(self):
        def experts(count):
            return ops.Sequential(ops.LayerNorm(32), ops.GroupedLinear(count, 32, 32))

        model, other = experts(2), experts(3)
        for one, splits in ((model, [16, 16]), (other, [16, 16, 16])):
            with fuser.autocast(recipe=recipe.DelayedScaling()):
                one(torch.ones(sum(splits), 32), torch.tensor(splits)).sum().backward()
        before = [state.clone() for key, state in other.state_dict().items() if key.endswith("_extra_state")]
        with pytest.raises(
            RuntimeError, match=r"^1\._extra_state: GroupedLinear: saved forward scale has shape \(4,\)"
        ):
            other.load_state_dict(model.state_dict())
        after = [state for key, state in other.state_dict().items() if key.endswith("_extra_state")]
        assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))

    @pytest.mark.parametrize(
        "state",
        [
            extra_state.pack({"sideways": {}}, {}),
            extra_state.pack({"forward": []}, {}),
            extra_state.pack({"forward": {"recipe": {"class": "DelayedScaling", "fields": {}}}}, {}),
        ],
        ids=["mode", "entry", "no tensors"],
    )
    def test_state_of_another_make(self, state):
        with pytest.raises(RuntimeError):
            ops.Quantize().set_extra_state(state)


def through_a_file(model):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def scales_of(model):
    """Scales and amax histories of all operations."""
    states = [
        meta["scaling_fwd" if mode == "forward" else "scaling_bwd"]
        for op in model.modules()
        for mode, meta in (getattr(op, "_fp8_metas", None) or {}).items()
        if meta and meta["recipe"].delayed()
    ]
    return [tensor.clone() for state in states for tensor in (state.scale, state.amax_history)]


class TestRecipesOfTheUsersOwn:
    """A model trained under a recipe that JSON can't hold saves, loads and goes on."""

    RECIPES = {  # noqa: RUF012
        "subclass": lambda: Marked(amax_history_len=4, mark=object()),
        "function": lambda: recipe.DelayedScaling(amax_history_len=4, amax_compute_algo=largest),
        "both": lambda: Marked(amax_history_len=4, amax_compute_algo=lambda history: history.amax(0)),
    }

    @staticmethod
    def step(model, own, seed):
        x = torch.randn(32, 32, generator=torch.Generator().manual_seed(seed))
        with fuser.autocast(recipe=own):
            y = model(x)
        y.sum().backward()
        return y.detach()

    @staticmethod
    def model():
        return ops.Sequential(ops.Linear(32, 32), ops.GELU(), ops.Linear(32, 32))

    @pytest.fixture(params=RECIPES)
    def own(self, request):
        return self.RECIPES[request.param]()

    def trained(self, own):
        torch.manual_seed(0)
        model = self.model()
        for seed in range(3):
            self.step(model, own, seed)
        return model

    def test_into_a_fresh_model(self, own):
        model, fresh = self.trained(own), self.model()
        with pytest.warns(UserWarning, match="can't be restored as it was") as caught:
            fresh.load_state_dict(through_a_file(model))
        per_op = 2 if isinstance(own, Marked) and callable(own.amax_compute_algo) else 1
        assert len(caught) == 2 * per_op  # once an operation
        for mine, theirs in zip(scales_of(model), scales_of(fresh), strict=True):
            assert torch.equal(mine, theirs)
        for seed in (5, 6):
            assert torch.equal(self.step(model, own, seed), self.step(fresh, own, seed))

    def test_into_a_model_in_use_it_stays_as_it_is(self, own):
        model, other = self.trained(own), self.trained(own)
        self.step(other, own, 7)
        quantizer = other[0].basic_ops[0].get_quantizer("forward", 0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            other.load_state_dict(through_a_file(model))
        assert other[0].basic_ops[0].get_quantizer("forward", 0) is quantizer
        assert type(other[0].basic_ops[0]._fp8_metas["forward"]["recipe"]) is type(own)
        for mine, theirs in zip(scales_of(model), scales_of(other), strict=True):
            assert torch.equal(mine, theirs)

    def test_the_present_function_goes_with_the_stored_values(self):
        model = self.trained(self.RECIPES["function"]())
        other = self.trained(recipe.DelayedScaling(amax_history_len=6, amax_compute_algo=largest))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            other.load_state_dict(through_a_file(model))
        present = other[0].basic_ops[0]._fp8_metas["forward"]["recipe"]
        assert (present.amax_history_len, present.amax_compute_algo) == (4, largest)


class TestQuantizedModels:
    @sampled(
        ("grouped", "own"),
        product(
            [False, True],
            [
                recipe.DelayedScaling(amax_history_len=4),
                recipe.Float8CurrentScaling(),
                recipe.MXFP8BlockScaling(),
                recipe.Float8BlockScaling(),
                recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
            ],
        ),
        2,
        in_all=1,
        ids=lambda v: v if isinstance(v, bool) else type(v).__name__,
    )
    def test_round_trip_is_bit_exact_and_training_continues(self, own, grouped):
        """Weights whose scale has been updated since they were quantized, too."""
        splits = [torch.tensor([128, 128])] if grouped else []

        def make(seed):
            torch.manual_seed(seed)
            with fuser.quantized_model_init(recipe=own):
                return ops.Sequential(ops.GroupedLinear(2, 128, 128) if grouped else ops.Linear(128, 128), ops.GELU())

        def step(model, seed, optimizer=None):
            x = torch.randn(256, 128, generator=torch.Generator().manual_seed(seed)) * (seed + 1)
            model.zero_grad()
            with fuser.autocast(recipe=own):
                y = model(x, *splits)
            y.sum().backward()
            if optimizer is not None:
                optimizer.step()
            return [y.detach(), *(p.grad for p in model.parameters())]

        model, fresh = make(0), make(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for seed in range(3):
            step(model, seed, optimizer)
        step(model, 3)  # scales move on, weights don't
        fresh.load_state_dict(through_a_file(model))
        for mine, theirs in zip(model.parameters(), fresh.parameters(), strict=True):
            assert type(mine) is type(theirs)
            if isinstance(mine, fuser.QuantizedTensor):
                for name, tensor in mine.buffers.tensors.items():
                    assert torch.equal(tensor, theirs.buffers.tensors[name]), name
        for seed in (4, 5):
            results = (step(m, seed, torch.optim.SGD(m.parameters(), lr=0.01)) for m in (model, fresh))
            for mine, theirs in zip(*results, strict=True):
                assert torch.equal(mine, theirs)
