"""The five quantizers: bit for bit what `refops.quantize` gives, which copies, in place, over a process group."""

import copy
import os
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

import fuser
import refops
from arrays import coarse
from fuser import dispatch
from fuser import quantization as q
from fuser.dispatch import TENSOR_FIELDS, as_numpy, as_torch
from fuser.dtypes import DType
from fuser.quantization.quantizer import Quantizer, ValueQuantizer
from fuser.quantization.storage import QuantizedTensorStorage
from refops import E4M3, E5M2
from tiers import SWEEP, sampled

F8, F8B = DType.kFloat8E4M3, DType.kFloat8E5M2
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def delayed(dtype=F8, scale=3.7, **usage):
    return q.Float8Quantizer(torch.tensor([scale]), torch.zeros(1), dtype, **usage)


#: name -> (quantizer, its refops settings).
QUANTIZERS = {
    "delayed": lambda: (delayed(), refops.DelayedScaling(E4M3, np.float32(3.7))),
    "delayed e5m2": lambda: (delayed(F8B), refops.DelayedScaling(E5M2, np.float32(3.7))),
    "current": lambda: (q.Float8CurrentScalingQuantizer(F8), refops.CurrentScaling(E4M3)),
    "current pow2": lambda: (
        q.Float8CurrentScalingQuantizer(F8B, "cpu", force_pow_2_scales=True, amax_epsilon=0.25),
        refops.CurrentScaling(E5M2, True, 0.25),
    ),
    "block 2d": lambda: (q.Float8BlockQuantizer(F8), refops.BlockScaling(E4M3, 2)),
    "block 1d f32": lambda: (
        q.Float8BlockQuantizer(F8, force_pow_2_scales=False, block_scaling_dim=1, amax_epsilon=0.5),
        refops.BlockScaling(E4M3, 1, False, 0.5),
    ),
    "mxfp8": lambda: (q.MXFP8Quantizer(F8), refops.MXFP8Scaling(E4M3)),
    "mxfp8 2d": lambda: (q.MXFP8Quantizer(F8B, with_2d_quantization=True), refops.MXFP8Scaling(E5M2, True)),
    "nvfp4": lambda: (q.NVFP4Quantizer(), refops.NVFP4Scaling()),
    "nvfp4 2d": lambda: (q.NVFP4Quantizer(with_2d_quantization=True), refops.NVFP4Scaling(two_d=True)),
    "nvfp4 rht": lambda: (
        q.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True),
        refops.NVFP4Scaling(rht=True),
    ),
    "nvfp4 no signs": lambda: (
        q.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, with_random_sign_mask=False),
        refops.NVFP4Scaling(rht=True, sign_mask=0),
    ),
    "nvfp4 4over6": lambda: (
        q.NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_e4m3_max=256, nvfp4_4over6_err_mode="mae"),
        refops.NVFP4Scaling(four_over_six="mae", e4m3_max=256),
    ),
    "nvfp4 rows": lambda: (q.NVFP4Quantizer(row_scaled_nvfp4=True), refops.NVFP4Scaling(row_scaled=True)),
}
USAGES = ((True, False), (False, True), (True, True))


def normal(shape, dtype=torch.float32, seed=0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3
    flat = x.view(-1)
    if flat.numel() > 8:
        flat[:4] = torch.tensor([0.0, -0.0, 1e-6, -448.0])
    return x.to(dtype)


SHAPES = {
    "2-D": lambda dtype: normal((64, 96), dtype),
    "3-D": lambda dtype: normal((2, 64, 32), dtype),
    "transposed": lambda dtype: normal((128, 64), dtype).t(),
    "sliced": lambda dtype: normal((64, 2, 64), dtype)[:, 1],
    "no rows": lambda dtype: normal((0, 64), dtype),
    "specials": lambda dtype: normal((64, 64), dtype).index_fill(0, torch.tensor([3]), float("nan")),
    "zeros": lambda dtype: torch.zeros(32, 32, dtype=dtype),
}


def assert_same(result, expected):
    """The buffers of a quantized tensor are those of a `refops.Quantized`, to the bit."""
    for name in TENSOR_FIELDS:
        made, wanted = getattr(result.buffers, name), getattr(expected, name)
        assert (made is None) == (wanted is None), name
        if wanted is not None:
            assert tuple(made.shape) == wanted.shape and made.numpy().dtype == wanted.dtype, name
            np.testing.assert_array_equal(made.numpy().view(np.uint8), wanted.view(np.uint8), err_msg=name)


@pytest.mark.parametrize("shape", SHAPES)
@sampled(("name", "dtype"), [*product(QUANTIZERS, DTYPES)], 4, in_all=6)
def test_equals_refops_bit_for_bit(name, dtype, shape):
    quantizer, scaling = QUANTIZERS[name]()
    x = SHAPES[shape](dtype)
    array, rht = np.ascontiguousarray(as_numpy(x)), getattr(scaling, "rht", False)
    for rowwise, columnwise in USAGES:
        quantizer.set_usage(rowwise=rowwise, columnwise=columnwise)
        # Of other types than bfloat16 (TE's only one) a transform in float32 differs from refops' in float64.
        exact = not rht or dtype == torch.bfloat16
        with dispatch.backend("auto" if exact else "reference"):
            made = quantizer(x)
        expected = refops.quantize(array, scaling, rowwise=rowwise, columnwise=columnwise)
        assert_same(made, expected)
        assert made.get_usages() == quantizer.get_usages() == {"rowwise": rowwise, "columnwise": columnwise}
        assert isinstance(made, q.QuantizedTensor) and (made.shape, made.dtype) == (x.shape, dtype)
        values, wanted = made.dequantize(dtype=torch.float32).numpy(), refops.dequantize(expected)
        if rht and not rowwise:  # undone in float64 by refops, in float32 by kernels
            np.testing.assert_allclose(values, wanted, rtol=0, atol=2e-6 * np.nanmax(np.abs(wanted), initial=0))
        else:
            np.testing.assert_array_equal(values, wanted)


@pytest.mark.parametrize("name", ["delayed", "current", "block 1d f32", "block 2d"])
@pytest.mark.parametrize("shape", [(7,), (5, 3), (3, 130), (1, 1)])
def test_ragged_shapes_of_formats_that_take_them(name, shape):
    quantizer, scaling = QUANTIZERS[name]()
    x = normal(shape)
    assert_same(quantizer(x), refops.quantize(x.numpy(), scaling, rowwise=True, columnwise=True))


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("mxfp8", (32, 48), "K % 32 == 0"),
        ("mxfp8", (16, 64), "M % 32 == 0"),
        ("mxfp8", (64,), r"got a tensor of shape \(64,\)"),
        ("nvfp4", (16, 24), "K % 16 == 0"),
        ("nvfp4", (8, 32), "M % 16 == 0"),
    ],
)
def test_shapes_that_te_refuses(name, shape, words):
    quantizer, _ = QUANTIZERS[name]()
    for call in (lambda: quantizer(normal(shape)), lambda: quantizer.make_empty(shape)):
        with pytest.raises(ValueError, match=words):
            call()
    buffers = replace(quantizer(normal((64, 64))).buffers, shape=shape)
    with pytest.raises(ValueError, match=words):
        quantizer.wrap(buffers)
    assert not quantizer.is_quantizable(normal(shape))


def test_is_quantizable_as_in_te():
    fits = torch.empty(128, 256)
    for name in QUANTIZERS:
        quantizer, _ = QUANTIZERS[name]()
        assert quantizer.is_quantizable(fits) == (name != "nvfp4 rows")
    assert not q.Float8BlockQuantizer(F8).is_quantizable(torch.empty(128, 64))
    assert not q.Float8BlockQuantizer(F8).is_quantizable(torch.empty(128))
    assert delayed().is_quantizable(torch.empty(3))


def test_no_usage_is_an_error():
    with pytest.raises(ValueError, match="row-wise or column-wise usage"):
        q.MXFP8Quantizer(F8, rowwise=False, columnwise=False)(normal((32, 32)))


def test_wrong_arguments():
    with pytest.raises(ValueError, match="fp8_dtype"):
        q.MXFP8Quantizer(DType.kFloat16)
    with pytest.raises(ValueError, match="fp4_dtype"):
        q.NVFP4Quantizer(F8)
    with pytest.raises(ValueError, match="block_dim"):
        q.Float8BlockQuantizer(F8, block_scaling_dim=3)
    with pytest.raises(ValueError, match="err_mode"):
        q.NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_4over6_err_mode="max")
    with pytest.raises(ValueError, match="e4m3_max"):
        q.NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_e4m3_max=300)
    with pytest.raises(ValueError, match="with_rht=True needs with_post_rht_amax=True"):
        q.NVFP4Quantizer(with_rht=True)(normal((16, 16)))
    for exclusive in (
        {"row_scaled_nvfp4": True, "with_2d_quantization": True},
        {"row_scaled_nvfp4": True, "stochastic_rounding": True},
        {"row_scaled_nvfp4": True, "with_amax_reduction": True},
        {"nvfp4_use_4over6": True, "with_rht": True, "with_post_rht_amax": True},
        {"nvfp4_use_4over6": True, "stochastic_rounding": True},
    ):
        with pytest.raises(ValueError, match=r"cannot be combined|excludes"):
            q.NVFP4Quantizer(**exclusive)
    assert q.NVFP4Quantizer(nvfp4_e4m3_max=256).nvfp4_e4m3_max == 448, "only with 4over6, as in TE"


def test_post_rht_amax_has_no_effect_without_a_transform():
    x = normal((32, 32))
    asked, plain = (q.NVFP4Quantizer(with_post_rht_amax=flag)(x) for flag in (True, False))
    for name, tensor in plain.buffers.tensors.items():
        assert torch.equal(asked.buffers.tensors[name], tensor), name


def test_ignored_arguments_of_current_scaling_warn():
    with pytest.warns(DeprecationWarning, match="use_existing_amax"):
        q.Float8CurrentScalingQuantizer(F8, "cpu", use_existing_amax=True, scale=torch.ones(1), amax=torch.ones(1))


def test_element_types_by_other_names():
    assert q.MXFP8Quantizer(torch.float8_e5m2) == q.MXFP8Quantizer(F8B) == q.MXFP8Quantizer(int(F8B))


# --- delayed scaling ----------------------------------------------------------------------------------


def test_delayed_scaling_reads_its_scale_and_raises_its_amax():
    quantizer = delayed(scale=2.0)
    x = torch.tensor([[1.0, -3.0]])
    quantizer(x)
    quantizer(x / 2)
    quantizer(torch.tensor([[float("nan"), 2.0]]))
    assert quantizer.amax.item() == 3.0
    quantizer.scale.fill_(4.0)
    assert quantizer(x)._scale_inv.item() == 0.25
    quantizer.calibrate(torch.tensor([5.0]))
    assert quantizer.amax.item() == 5.0


def test_a_gpu_is_waited_for_only_after_its_scale_was_written():
    class DeviceScale:
        device, reads = torch.device("cuda"), 0

        def __init__(self):
            self.tensor = torch.tensor([2.0])

        def is_inference(self):
            return False

        def data_ptr(self):
            return self.tensor.data_ptr()

        @property
        def _version(self):
            return self.tensor._version

        def item(self):
            self.reads += 1
            return self.tensor.item()

    scale = DeviceScale()
    quantizer = delayed()
    quantizer.scale = scale
    assert [quantizer.scaling().scale for _ in range(3)] == [2.0] * 3 and scale.reads == 1
    scale.tensor.fill_(4.0)
    assert [quantizer.scaling().scale for _ in range(3)] == [4.0] * 3 and scale.reads == 2


def test_wrap_and_update_record_the_amax():
    quantizer = delayed()
    quantizer.wrap(dispatch.quantize(torch.full((4, 4), -9.0), quantizer.scaling(), rowwise=True))
    assert quantizer.amax.item() == 9.0
    made = quantizer(torch.zeros(4, 4))
    quantizer.update_quantized(torch.full((4, 4), 11.0), made)
    assert quantizer.amax.item() == 11.0


def test_create_tensor_from_data():
    quantizer = delayed(scale=4.0)
    codes = torch.tensor([[0x38, 0xB8]], dtype=torch.uint8)  # 1 and -1
    made = quantizer.create_tensor_from_data(codes, torch.bfloat16)
    assert made._data is codes and made.dequantize().tolist() == [[0.25, -0.25]] and made.dtype == torch.bfloat16
    assert isinstance(quantizer.create_tensor_from_data(codes, internal=True), q.Float8TensorStorage)


# --- stochastic rounding --------------------------------------------------------------------------------


def test_stochastic_rounding_repeats_with_the_seed_and_is_unbiased():
    quantizer = q.NVFP4Quantizer(stochastic_rounding=True)
    x = normal((64, 64))

    def draw():
        return quantizer(x).dequantize()

    torch.manual_seed(5)
    first, second = draw(), draw()
    torch.manual_seed(5)
    assert torch.equal(draw(), first) and not torch.equal(first, second)
    torch.manual_seed(5)
    scaling = quantizer.scaling()
    torch.manual_seed(5)
    assert_same(quantizer(x), refops.quantize(x.numpy(), scaling, rowwise=True, columnwise=True))
    nearest = q.NVFP4Quantizer()(x).dequantize()
    mean = torch.stack([draw() for _ in range(50)]).mean(0)
    assert (mean - x).abs().mean() < (nearest - x).abs().mean() / 2


def test_only_stochastic_calls_draw_random_numbers():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    q.NVFP4Quantizer()(normal((16, 16)))
    q.NVFP4Quantizer(stochastic_rounding=True).make_empty((16, 16))
    assert torch.equal(torch.get_rng_state(), state)
    q.NVFP4Quantizer(stochastic_rounding=True)(normal((16, 16)))
    assert not torch.equal(torch.get_rng_state(), state)


def test_rht_matrix():
    quantizer = q.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True)
    v = torch.arange(1.0, 17.0)
    expected = refops.hadamard_transform(v[None].numpy(), quantizer.rht_matrix_random_sign_mask_t)
    np.testing.assert_array_equal((v @ quantizer.rht_matrix.float()).numpy(), expected[0])
    assert quantizer.rht_matrix_random_sign_mask_t == 0xD7E8


# --- results --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("the_reference_quantizes")
@pytest.mark.parametrize("name", QUANTIZERS)
def test_internal_results_are_bare_storages(name):
    quantizer, _ = QUANTIZERS[name]()
    tensor = quantizer(normal((64, 64)))
    quantizer.internal = True
    storage = quantizer(normal((64, 64)).requires_grad_())
    assert type(storage) is quantizer.storage_class and not isinstance(storage, torch.Tensor)
    assert isinstance(tensor, quantizer.storage_class) and isinstance(tensor, QuantizedTensorStorage)
    assert torch.equal(storage.dequantize(), tensor.dequantize())
    assert storage.shape == tensor.shape == storage.size() and storage.device == tensor.device


def test_results_keep_a_copy_of_the_quantizer_without_its_group():
    quantizer = q.Float8CurrentScalingQuantizer(F8, with_amax_reduction=True, amax_reduction_group=object())
    made = quantizer(normal((4, 4)))
    quantizer.set_usage(columnwise=False)
    assert made._quantizer is not quantizer and made._quantizer.columnwise_usage
    assert made._quantizer.amax_reduction_group is None and not made._quantizer.with_amax_reduction
    fixed = delayed()
    assert fixed(normal((4, 4)))._quantizer.amax is fixed.amax, "copies share scale and amax"


def test_nominal_dtype():
    quantizer = q.MXFP8Quantizer(F8)
    x = normal((32, 32), torch.bfloat16)
    made = quantizer.quantize(x, dtype=torch.float32)
    assert made.dtype == torch.float32 and torch.equal(made.dequantize(), quantizer(x).dequantize().float())


def test_quantizing_a_quantized_tensor_quantizes_its_values():
    x = normal((32, 32))
    mx, fp8 = q.MXFP8Quantizer(F8), q.Float8CurrentScalingQuantizer(F8)
    assert torch.equal(fp8(mx(x)).dequantize(), fp8(mx(x).dequantize()).dequantize())
    assert torch.equal(mx(mx(x)).dequantize(), mx(x).dequantize())
    mx.internal = True
    assert torch.equal(fp8(mx(x)).dequantize(), fp8(mx(x).dequantize()).dequantize())


def test_multi_quantize():
    quantizer = q.MXFP8Quantizer(F8)
    xs = [normal((32, 32), seed=i) for i in range(3)]
    assert all(
        torch.equal(a.dequantize(), quantizer(x).dequantize())
        for a, x in zip(quantizer.multi_quantize(xs), xs, strict=True)
    )


@pytest.mark.usefixtures("the_reference_quantizes")
@pytest.mark.parametrize("name", QUANTIZERS)
def test_update_quantized_writes_in_place(name):
    quantizer, _ = QUANTIZERS[name]()
    x, new = normal((64, 64)), normal((64, 64), seed=1)
    made = quantizer(x)
    pointers = {field: tensor.data_ptr() for field, tensor in made.buffers.tensors.items()}
    assert quantizer.update_quantized(new, made) is made
    assert torch.equal(made.dequantize(), quantizer(new).dequantize())
    assert torch.equal(made.dequantize_columnwise(), quantizer(new).dequantize_columnwise())
    assert {field: tensor.data_ptr() for field, tensor in made.buffers.tensors.items()} == pointers
    quantizer.quantize(x, out=made)
    assert torch.equal(made.dequantize(), quantizer(x).dequantize())


def test_update_quantized_keeps_the_usages_of_its_destination():
    quantizer = q.MXFP8Quantizer(F8)
    made = quantizer(normal((32, 32)))
    made.update_usage(columnwise_usage=False)
    quantizer.update_quantized(normal((32, 32), seed=1), made)
    assert made.get_usages() == {"rowwise": True, "columnwise": False}
    made.clear()
    quantizer.update_quantized(normal((32, 32), seed=1), made)
    assert made.get_usages() == {"rowwise": True, "columnwise": True}


def test_noop_flag():
    quantizer = q.MXFP8Quantizer(F8)
    made = quantizer(normal((32, 32)))
    before = made.dequantize()
    quantizer.update_quantized(torch.zeros(32, 32), made, noop_flag=torch.ones(1))
    made.quantize_(torch.zeros(32, 32), noop_flag=torch.ones(1))
    assert torch.equal(made.dequantize(), before)
    quantizer.update_quantized(torch.zeros(32, 32), made, noop_flag=torch.zeros(1))
    assert not made.dequantize().any()


def test_update_quantized_refuses_other_destinations():
    quantizer = q.MXFP8Quantizer(F8)
    with pytest.raises(TypeError, match="MXFP8TensorStorage"):
        quantizer.update_quantized(normal((32, 32)), delayed()(normal((32, 32))))
    with pytest.raises(ValueError, match="shape of dst"):
        quantizer.update_quantized(normal((32, 64)), quantizer(normal((32, 32))))


@pytest.mark.parametrize("name", QUANTIZERS)
def test_make_empty_has_the_buffers_of_a_result(name):
    quantizer, _ = QUANTIZERS[name]()
    for rowwise, columnwise in USAGES:
        quantizer.set_usage(rowwise=rowwise, columnwise=columnwise)
        made, result = quantizer.make_empty((64, 32), dtype=torch.bfloat16), quantizer(normal((64, 32), torch.bfloat16))
        assert (made.shape, made.dtype, made.device) == (result.shape, result.dtype, result.device)
        kinds = [{name: (t.shape, t.dtype) for name, t in t.buffers.tensors.items()} for t in (made, result)]
        assert kinds[0] == kinds[1]
        made.quantize_(normal((64, 32), torch.bfloat16))
        assert torch.equal(made.dequantize(), result.dequantize())
    assert quantizer.make_empty((64, 32), requires_grad=True).requires_grad
    assert quantizer.get_columnwise_shape((64, 32)) == result._columnwise_data.shape
    assert quantizer.get_scale_shape((64, 32), columnwise=False) == result._rowwise_scale_inv.shape
    assert quantizer.get_scale_shape((64, 32), columnwise=True) == result._columnwise_scale_inv.shape
    quantizer.internal = True
    assert type(quantizer.make_empty((64, 32))) is quantizer.storage_class


# --- the other copy -------------------------------------------------------------------------------------

TRANSPOSABLE = ("delayed", "delayed e5m2", "current", "current pow2", "block 2d", "mxfp8 2d", "nvfp4 2d")


@pytest.mark.parametrize("shape", [(64, 96), (3, 32, 288), (160, 64)])
@pytest.mark.parametrize("name", TRANSPOSABLE)
def test_update_usage_makes_the_missing_copy(name, shape):
    quantizer, scaling = QUANTIZERS[name]()
    x = normal(shape)
    both = refops.quantize(x.numpy(), scaling, rowwise=True, columnwise=True)
    for present, missing in (("rowwise", "columnwise"), ("columnwise", "rowwise")):
        quantizer.set_usage(**{present: True, missing: False})
        made = quantizer(x)
        made.update_usage(**{f"{missing}_usage": True})
        assert_same(made, both)
        made.update_usage(**{f"{present}_usage": False})
        assert made.get_usages() == {present: False, missing: True}
        assert_same(made, refops.quantize(x.numpy(), scaling, **{present: False, missing: True}))


@pytest.mark.parametrize("name", [name for name in QUANTIZERS if name not in TRANSPOSABLE])
def test_update_usage_says_when_a_copy_cannot_be_made(name):
    quantizer, _ = QUANTIZERS[name]()
    made = quantizer(normal((64, 64)))
    made.update_usage(rowwise_usage=True, columnwise_usage=True)
    made.update_usage(columnwise_usage=False)
    assert made.get_usages() == {"rowwise": True, "columnwise": False}
    with pytest.raises(RuntimeError, match=r"Requested column-wise usage, but .* is missing column-wise data"):
        made.update_usage(columnwise_usage=True)
    made.clear()
    with pytest.raises(RuntimeError, match="Requested row-wise usage"):
        made.update_usage(rowwise_usage=True)


@pytest.mark.usefixtures("the_reference_quantizes")
def test_stochastic_copies_differ_so_none_is_made():
    made = q.NVFP4Quantizer(with_2d_quantization=True, stochastic_rounding=True, columnwise=False)(normal((32, 32)))
    with pytest.raises(RuntimeError, match="other codes"):
        made.update_usage(columnwise_usage=True)


def test_update_usage_none_leaves_everything():
    made = delayed()(normal((4, 4)))
    buffers = made.buffers
    made.update_usage()
    made.update_usage(rowwise_usage=True)
    assert made.buffers is buffers


# --- process groups -------------------------------------------------------------------------------------


def pretend_other_rank(monkeypatch, *amaxes):
    """Amax reductions also see the amaxes of another rank."""

    def reduce_amax(amax, group):
        assert group == "group"
        return torch.maximum(amax, torch.cat(amaxes))

    monkeypatch.setattr("fuser.quantization.quantizers.reduce_amax", reduce_amax)


GROUP = {"with_amax_reduction": True, "amax_reduction_group": "group"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("settings", [{}, {"force_pow_2_scales": True, "amax_epsilon": 1e4}])
def test_current_scaling_over_a_group_is_that_of_the_joint_tensor(monkeypatch, settings, dtype):
    mine, other = normal((32, 48), dtype) / 64, normal((32, 48), dtype, seed=1) * 5
    quantizer = q.Float8CurrentScalingQuantizer(F8, **settings, **GROUP)
    pretend_other_rank(monkeypatch, dispatch.amax(other))
    made = quantizer(mine)
    joint = q.Float8CurrentScalingQuantizer(F8, **settings)(torch.cat((mine, other)))
    assert torch.equal(made._data, joint._data[:32]) and torch.equal(made._transpose, joint._transpose[:, :32])
    assert torch.equal(made._scale_inv, joint._scale_inv) and torch.equal(made._amax_rowwise, joint._amax_rowwise)


NVFP4_GROUP = {
    "plain": {},
    "2d": {"with_2d_quantization": True},
    "rht": {"with_rht": True, "with_post_rht_amax": True},
    "4over6": {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 256},
}


@pytest.mark.parametrize("scale", [1 / 64, 64], ids=["smaller", "larger"])
@pytest.mark.parametrize("settings", NVFP4_GROUP.values(), ids=NVFP4_GROUP)
@pytest.mark.parametrize("usage", USAGES)
def test_nvfp4_over_a_group_is_that_of_the_joint_tensor(monkeypatch, settings, usage, scale):
    usage = dict(zip(("rowwise", "columnwise"), usage, strict=True))
    mine, other = normal((2, 64, 80), torch.bfloat16) * scale, normal((2, 64, 80), torch.bfloat16, seed=1)
    reference = q.NVFP4Quantizer(**settings, **usage)
    amaxes = [dispatch.amax(other)]
    if usage["columnwise"] and "with_rht" in settings:
        amaxes.append(q.NVFP4Quantizer(**settings)(other)._amax_columnwise)
    pretend_other_rank(monkeypatch, *amaxes)
    made, joint = q.NVFP4Quantizer(**settings, **usage, **GROUP)(mine), reference(torch.cat((mine, other)))
    if usage["rowwise"]:
        assert torch.equal(made._rowwise_data, joint._rowwise_data[:2])
        assert torch.equal(made._rowwise_scale_inv, joint._rowwise_scale_inv[:128])
        assert torch.equal(made._amax_rowwise, joint._amax_rowwise)
    if usage["columnwise"]:
        assert torch.equal(made._columnwise_data, joint._columnwise_data[:, :64])
        assert torch.equal(made._columnwise_scale_inv, joint._columnwise_scale_inv[:, :8])
        assert torch.equal(made._amax_columnwise, joint._amax_columnwise)


def test_a_group_of_one_changes_nothing():
    x = normal((64, 64), torch.bfloat16)
    for make in (
        lambda **group: q.Float8CurrentScalingQuantizer(F8, **group),
        lambda **group: q.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, **group),
    ):
        alone, grouped = make()(x), make(with_amax_reduction=True)(x)
        for name, tensor in alone.buffers.tensors.items():
            assert torch.equal(tensor, grouped.buffers.tensors[name]), name


def _reduce_over_two(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    xs = [normal((32, 32), seed=i) * (i + 1) for i in range(2)]
    joint = q.Float8CurrentScalingQuantizer(F8)(torch.cat(xs))
    made = q.Float8CurrentScalingQuantizer(F8, with_amax_reduction=True)(xs[rank])
    assert torch.equal(made._scale_inv, joint._scale_inv)
    assert torch.equal(made._data, joint._data[32 * rank : 32 * (rank + 1)])
    from fuser.quantization.state import FP8GlobalStateManager as Manager
    from fuser.quantization.state import RecipeState
    from fuser.recipe import DelayedScaling

    state = RecipeState.create(DelayedScaling(), mode="forward", num_quantizers=2)
    meta = {"scaling_fwd": state, "recipe": state.recipe, "fp8_group": None}
    Manager.add_fp8_tensors_to_global_buffer(meta)
    with q.autocast():
        state.make_quantizers()[rank](torch.full((2, 2), 7.0))
    assert state.scale.tolist() == [64.0, 64.0], "each rank saw one of the two tensors"
    torch.distributed.destroy_process_group()


@pytest.mark.full
def test_two_processes():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(_reduce_over_two, args=(port,), nprocs=2)


# --- autograd, equality, copies --------------------------------------------------------------------------


@pytest.mark.parametrize("name", QUANTIZERS)
def test_the_gradient_passes_straight_through(name):
    quantizer, _ = QUANTIZERS[name]()
    x = normal((64, 64), torch.bfloat16).requires_grad_()
    made = quantizer(x)
    assert made.requires_grad and not made.is_leaf
    weights = normal((64, 64), seed=2)
    (made.dequantize(dtype=torch.float32) * weights).sum().backward()
    assert torch.equal(x.grad, weights.to(torch.bfloat16))


def test_no_graph_where_none_is_wanted():
    quantizer = q.MXFP8Quantizer(F8)
    x = normal((32, 32)).requires_grad_()
    with torch.no_grad():
        assert not quantizer(x).requires_grad
    with torch.inference_mode():
        assert not quantizer(x).requires_grad
    assert not quantizer(x.detach()).requires_grad
    assert quantizer(x).requires_grad


def test_equality_by_value():
    assert q.MXFP8Quantizer(F8) == q.MXFP8Quantizer(F8) and hash(q.MXFP8Quantizer(F8)) == hash(q.MXFP8Quantizer(F8))
    assert q.MXFP8Quantizer(F8) != q.MXFP8Quantizer(F8, columnwise=False)
    assert q.MXFP8Quantizer(F8) != q.Float8BlockQuantizer(F8)
    assert q.NVFP4Quantizer() != q.NVFP4Quantizer(with_2d_quantization=True)
    assert delayed() != delayed(), "scale and amax are its own"


def test_copies():
    group = object()
    quantizer = q.NVFP4Quantizer(with_amax_reduction=True, amax_reduction_group=group)
    for duplicate in (quantizer.copy(), copy.deepcopy(quantizer)):
        assert duplicate == quantizer and duplicate.amax_reduction_group is group
        duplicate.set_usage(rowwise=False)
        assert quantizer.rowwise_usage
    fixed = delayed()
    assert fixed.copy().scale is fixed.scale and copy.deepcopy(fixed).scale is not fixed.scale


def test_a_quantizer_of_the_users_own():
    class Half(Quantizer):
        def __init__(self):
            super().__init__(rowwise=True, columnwise=False)

        def quantize_impl(self, tensor):
            return q.MXFP8Quantizer(F8)(tensor / 2)

    x = normal((32, 32))
    assert torch.equal(Half()(x).dequantize(), q.MXFP8Quantizer(F8)(x / 2).dequantize())
    with pytest.raises(NotImplementedError, match="Half"):
        Half().scaling()


@pytest.mark.parametrize("base", [Quantizer, ValueQuantizer])
def test_an_abstract_quantizer_is_refused(base):
    class Nothing(base):
        """Says neither how to scale nor how to quantize."""

    for kind in (base, Nothing):
        with pytest.raises(TypeError, match=f"Can't instantiate abstract class {kind.__name__}"):
            kind(rowwise=True, columnwise=True)


@pytest.mark.parametrize(
    ("mode", "top", "two_d", "backend"),
    [
        ("MAE", 448, False, "reference"),
        pytest.param("MAE", 448, False, "auto", marks=pytest.mark.full),
        pytest.param("MSE", 256, True, "auto", marks=SWEEP),
    ],
)  # the kernels of each take half a minute to compile
def test_the_fast_error_of_4over6(monkeypatch, mode, top, two_d, backend):
    with fuser.backend(backend):
        check_the_fast_error(monkeypatch, mode, top, two_d)


def check_the_fast_error(monkeypatch, mode, top, two_d):
    options = {"nvfp4_4over6_err_mode": mode, "nvfp4_e4m3_max": top, "with_2d_quantization": two_d}
    quantizer = q.NVFP4Quantizer(nvfp4_use_4over6=True, **options)
    plain = q.NVFP4Quantizer(with_2d_quantization=two_d)
    x = as_torch(coarse((256, 256)))
    exact, asked = quantizer(x), quantizer.scaling()
    monkeypatch.setenv("NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH", "1")
    fast, scaling = quantizer(x), quantizer.scaling()
    assert (asked.fast_error, scaling.fast_error, plain.scaling().fast_error) == (False, True, False)
    assert fast.buffers.scaling == scaling == replace(asked, fast_error=True)
    assert_same(fast, refops.quantize(as_numpy(x), scaling, rowwise=True, columnwise=True))
    different = (fast._rowwise_scale_inv != exact._rowwise_scale_inv).sum().item()
    assert different < 100 and (different > 0 or two_d)  # near ties alone; sums of 256 errors are rarely so near
    exact.copy_(fast)  # one format, whichever error chose the scales
    assert torch.equal(exact._rowwise_data, fast._rowwise_data)


def test_reference_backend_gives_the_same_bits():
    x = normal((64, 64), torch.bfloat16)
    for make in QUANTIZERS.values():
        quantizer, _ = make()
        made = quantizer(x)
        with dispatch.backend("reference"):
            expected = quantizer(x)
        for name, tensor in expected.buffers.tensors.items():
            assert torch.equal(tensor, made.buffers.tensors[name]), name


@pytest.mark.parametrize(
    "arguments",
    [
        (1.0, torch.zeros(1)),
        (torch.ones(1), 0.0),
        (None, torch.zeros(1)),
        (torch.ones(1), np.zeros(1)),
        (torch.ones(2), torch.zeros(1)),
    ],
)
def test_delayed_scaling_needs_tensors(arguments):
    with pytest.raises(TypeError, match="must be a float32 tensor of one element"):
        q.Float8Quantizer(*arguments, DType.kFloat8E4M3)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_what_is_no_tensor_is_named(name):
    quantizer, _ = QUANTIZERS[name]()
    for wrong in (np.zeros((32, 32), np.float32), [1.0], None, 1.0):
        with pytest.raises(TypeError, match=f"tensor must be a torch tensor .*; got {type(wrong).__name__}"):
            quantizer(wrong)
