"""More of `cuda_kernels.host` against `refops`: row scales, Hadamard, sums, swizzled scales, tensors of PyTorch."""

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import pytest
from host_cases import (
    ALL_SCALINGS,
    BF16,
    DTYPES,
    E4M3,
    E5M2,
    MORE_SCALINGS_AND_DTYPES,
    MXFP8,
    SCALINGS_AND_DTYPES,
    F,
    takes,
    tensor,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

import refops
from arrays import ARRAYS, assert_same_quantized, same_bits
from cuda_kernels import host
from cuda_kernels.host import arrays
from refops import oracle
from refops.scalings.declaration import Layout
from refops.scalings.rules import E8M0Scaling
from tiers import SWEEP, sampled

FP32, FP16, _ = DTYPES
RHT = {
    "rht": refops.NVFP4Scaling(rht=True),
    "rht-signs": refops.NVFP4Scaling(rht=True, sign_mask=0x8001),
    "rht-sr": refops.NVFP4Scaling(rht=True, stochastic_rounding=True, seed=2**63 + 7),
}


def integers(shape, dtype=BF16, seed=0):
    """Small multiples of 1/4: every sum of them is exact."""
    return (np.random.default_rng(seed).integers(-16, 17, shape) / 4).astype(dtype)


def tame(shape, dtype=BF16, seed=0):
    """Heavy-tailed values, all finite."""
    return np.random.default_rng(seed).standard_t(3, shape).astype(dtype)


def judge(op, inputs, outputs, **options):
    """Raise unless the oracle accepts the outputs."""
    oracle.check(op, inputs, outputs, diagnose=False, **options).raise_for_mismatch()


def arrays_in(q):
    """Name -> array of a quantized tensor."""
    return {name: getattr(q, name) for name in ARRAYS if getattr(q, name) is not None}


# --- row scales -------------------------------------------------------------------------------------

PARAMETERS = {
    "clamped_swiglu": {"limit": 1.5, "alpha": 0.5, "glu_linear_offset": -0.25},
    "situglu": {"beta1": 0.5, "beta2": 3.0},
}
#: name, shape of dy, dtypes of x, dy, row scales and the result, interleave
SCALED = [
    ("swiglu", (3, 192), BF16, BF16, FP32, None, 32),
    ("swiglu", (2, 2, 192), BF16, BF16, BF16, BF16, 96),
    ("swiglu", (300, 150), BF16, BF16, FP32, FP32, 0),
    ("swiglu", (5, 27), FP16, BF16, FP16, FP16, 0),
    ("clamped_swiglu", (3, 64), BF16, FP32, BF16, None, 64),
    ("situglu", (4, 33), FP32, FP32, FP32, None, 0),
    ("srelu", (9, 300), BF16, BF16, FP32, None, 0),
    ("srelu", (0, 8), FP16, FP16, FP16, FP32, 0),
]


@sampled(("name", "shape", "x", "dy", "scales", "out", "interleave"), SCALED, 4)
def test_scaled_activations_lie_in_the_enclosure(name, shape, x, dy, scales, out, interleave):
    width = shape[-1] * (1 + refops.ACTIVATIONS[name].gated)
    inputs = {"x": tensor((*shape[:-1], width), x), "row_scales": tensor(shape[:-1], scales, seed=5)}
    told = {"glu_interleave_size": interleave, **PARAMETERS.get(name, {})}
    y = host.scaled_activation(name, *inputs.values(), out_dtype=out, **told)
    judge(f"scaled_{name}", inputs, y, params=told)
    gradient = tensor(shape, dy, seed=1)
    dx, drow = host.scaled_activation_grad(name, gradient, *inputs.values(), out_dtype=out, **told)
    judge(f"scaled_d{name}", {**inputs, "dy": gradient}, {"dx": dx, "drow_scales": drow}, params=told)
    assert (y.dtype, dx.dtype) == (out or x, out or x) and y.shape == shape
    assert (drow.dtype, drow.shape) == (scales, shape[:-1])


# --- Hadamard ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("name", RHT)
def test_rht_has_the_reference_s_bits_where_sums_are_exact_and_lies_in_the_enclosure_elsewhere(name, dtype):
    scaling = RHT[name]
    for rowwise in (False, True):
        options, x = {"rowwise": rowwise, "columnwise": True}, integers((96, 160), dtype)
        q = host.quantize(x, scaling, **options)
        assert_same_quantized(q, refops.quantize(x, scaling, **options))
        x = tame((160, 96), dtype)
        q = host.quantize(x, scaling, **options)
        judge("quantize", x, arrays_in(q), scaling=scaling)
    columnwise = host.quantize(x, scaling, rowwise=False, columnwise=True)
    judge("dequantize", columnwise, host.dequantize(columnwise))


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("mask", [0, 0x8001, 0xD7E8])
def test_hadamard_transform_of_exact_sums(mask, inverse):
    for shape, dtype in (((3, 5, 16), FP32), ((300, 8224), BF16), ((16,), FP16), ((0, 16), BF16)):
        x = integers(shape, dtype)
        mine = host.hadamard_transform(x, mask, inverse=inverse)
        assert same_bits(mine, refops.hadamard_transform(x, mask, inverse=inverse))


def test_hadamard_transform_is_undone():
    x = tame((70, 160), FP32)
    back = host.hadamard_transform(host.hadamard_transform(x), inverse=True)
    np.testing.assert_allclose(back, x, rtol=0, atol=4e-6 * np.abs(x).max())


# --- amax and scales --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (3, 5, 7), (300, 9000), (0, 4), (4, 0)], ids=str)
def test_amax(shape, dtype):
    for x in (tame(shape, dtype), tensor(shape, dtype), np.full(shape, np.nan, dtype), np.full(shape, 1e-45, dtype)):
        x.reshape(-1)[::3] = np.nan
        assert same_bits(host.amax(x), np.fmax.reduce(np.abs(x).astype(F), axis=None, initial=F(0))[None])


def test_the_largest_value_counts_wherever_it_lies():
    x = tame((259, 8195))
    for where in ((0, 0), (0, 8194), (127, 8191), (128, 8192), (258, 8194), (255, 17)):
        x[where], before = -1000, x[where]
        assert host.amax(x) == 1000
        assert host.quantize(x, refops.DelayedScaling(E4M3, 1.0)).amax_rowwise == 1000
        x[where] = before


@sampled("name", ["mxfp8", "mxfp8-2d", "nvfp4-1x16", "nvfp4-16x16", "nvfp4-mse-2d", "nvfp4-row-scaled"], 3)
def test_swizzled_scales(name):
    """Swizzled afterwards or as they are stored; 160 rows and 5 or 10 blocks: two tiles each way."""
    scaling, x = ALL_SCALINGS[name], tensor((160, 160))
    expected = refops.quantize(x, scaling, columnwise=True)
    assert_same_quantized(host.quantize(x, scaling, columnwise=True).swizzled(), expected.swizzled())
    direct = host.quantize(x, scaling, columnwise=True, swizzled_scales=True)
    assert direct.with_gemm_swizzled_scales and direct.swizzled() is direct
    assert_same_quantized(direct, expected.swizzled())
    assert_same_quantized(direct.unswizzled(), expected)
    assert same_bits(host.dequantize(direct), refops.dequantize(expected))


def test_fused_scales_are_swizzled_and_per_tensor_scales_have_no_order():
    x = integers((160, 96))
    mine = host.activation_quantize("relu", x, MXFP8, swizzled_scales=True)
    assert_same_quantized(mine, refops.activation_quantize("relu", x, MXFP8).swizzled())
    q = host.quantize(x, ALL_SCALINGS["current"], swizzled_scales=True)
    assert not q.with_gemm_swizzled_scales and q.swizzled() is q
    with pytest.raises(
        ValueError, match="swizzled_scales must be False with BlockScaling: block scaling stores float32"
    ):
        host.quantize(x, ALL_SCALINGS["block-1x128"], swizzled_scales=True)


@pytest.mark.parametrize("keep_unused", [True, False])
@pytest.mark.parametrize("algorithm", ["max", "most_recent", lambda h: h.mean(0)], ids=["max", "most_recent", "mean"])
def test_update_delayed_scale(algorithm, keep_unused):
    history = np.abs(tame((4, 300), FP32))
    history[0, :20], history[1, 3], history[2, 4], history[:, 5], history[:, 6] = 0, np.inf, np.nan, np.nan, 1e-45
    scale, before = np.linspace(0.5, 2, 300, dtype=F), history.copy()
    for fmt, margin in ((E4M3, 0), (E5M2, 3), (E4M3, -126), (E5M2, 126)):
        options = {"margin": margin, "algorithm": algorithm, "keep_unused": keep_unused}
        mine = host.update_delayed_scale(history, scale, fmt, **options)
        for a, b in zip(mine, refops.update_delayed_scale(history, scale, fmt, **options), strict=True):
            assert same_bits(a, b)
        assert same_bits(history, before)


def test_update_delayed_scale_of_one_tensor():
    for history, scale in ((F([3, 1, 4]), F([2])), (F([[3]]), F([2])), (F([0, 1]), F([2])), (F([3, 1]), F(2))):
        mine, reference = (m.update_delayed_scale(history, scale, E4M3) for m in (host, refops))
        for a, b in zip(mine, reference, strict=True):
            assert type(a) is type(b) and same_bits(a, b)


# --- sums -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["delayed-scale-1", "current", "mxfp8", "nvfp4-1x16", "block-1x128"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_sums_of_fused_gradients(activation, name):
    """More rows than a piece. Which values are summed, rounded or not, differs between scalings."""
    scaling, shape = ALL_SCALINGS[name], (288, 96)
    x, dy = tame((288, 96 * (1 + refops.ACTIVATIONS[activation].gated))), tame(shape, seed=1)
    q, dbias = host.activation_grad_quantize(activation, dy, x, scaling, dbias=True)
    judge(f"d{activation}", {"x": x, "dy": dy}, arrays_in(q) | {"dbias": dbias}, scaling=scaling)


@pytest.mark.parametrize("out", [None, FP32, FP16], ids=str)
def test_sums_of_gradients(out):
    x, dy = tame((300, 150)), tame((300, 150), seed=1)
    dx, dbias = host.activation_grad("gelu", dy, x, out_dtype=out, dbias=True)
    judge("dgelu", {"x": x, "dy": dy}, {"dx": dx, "dbias": dbias})
    assert dx.dtype == (out or BF16) and dbias.dtype == BF16
    x, dy = integers((300, 150)), integers((300, 150), seed=1)
    for a, b in zip(
        *(m.activation_grad("relu", dy, x, out_dtype=out, dbias=True) for m in (host, refops)), strict=True
    ):
        assert same_bits(a, b)


def test_sums_of_a_large_tensor():
    """Bits depend on the order: 128 rows, then the sums of all such pieces."""
    for dtype in (BF16, FP32):
        x = tame((700, 8300), dtype)
        mine, reference = (m.quantize(x, ALL_SCALINGS["delayed-scale-1"], dbias=True)[1] for m in (host, refops))
        assert same_bits(mine, reference)


# --- values -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("two_d", [pytest.param(False, marks=SWEEP), pytest.param(True, marks=pytest.mark.full)])
def test_given_random_bits(two_d):
    x, rng = tensor((96, 160), FP32), np.random.default_rng(3)
    bits = rng.integers(0, 256, (96, 160), np.uint8), rng.integers(0, 256, (160, 96), np.uint8)
    scaling = refops.NVFP4Scaling(stochastic_rounding=True, two_d=two_d, random_bits=bits)
    assert_same_quantized(host.quantize(x, scaling, columnwise=True), refops.quantize(x, scaling, columnwise=True))
    one = replace(scaling, random_bits=np.asfortranarray(bits[0]))
    assert_same_quantized(host.quantize(x, one), refops.quantize(x, one))
    assert not same_bits(host.quantize(x, one).rowwise_data, host.quantize(x[::-1], one).rowwise_data[::-1])


def test_random_bits_follow_seed_and_offset():
    x, seen = tame((32, 64), FP32), set()
    for seed, offset in ((0, 0), (1, 0), (0, 1), (2**64 - 1, 2**64 - 1), (2**32, 2**32)):
        scaling = refops.NVFP4Scaling(stochastic_rounding=True, seed=seed, offset=offset)
        q = host.quantize(x, scaling, columnwise=True)
        assert_same_quantized(q, refops.quantize(x, scaling, columnwise=True))
        seen.add(q.rowwise_data.tobytes())
    assert len(seen) == 5


def extremes(dtype):
    """Tensors of every kind of special value: NaNs of any payload, infinities, subnormals, the ends, zeros."""
    rng = np.random.default_rng(7)
    if dtype.itemsize == 2:
        every = rng.permutation(np.arange(1 << 16, dtype=np.uint16)).reshape(256, 256)
    else:
        words = [0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FBFFFFF, 0x7FC0DEAD, 0x7FFFFFFF]
        words += [0x34000000, 0x3F800000, 0x3F7FFFFF, 0x43E00000, 0x477FE000, 0x00400000, 0x47800000, 0x40C00000]
        every = (rng.choice(words, (96, 160)) | (rng.integers(0, 2, (96, 160)) << 31)).astype(np.uint32)
    every = every.view(dtype)
    with np.errstate(invalid="ignore"):
        nan, finite, small = np.isnan(every), np.isfinite(every), np.abs(every) < 2 * ml_dtypes.finfo(dtype).tiny
    zero, one = dtype.type(-0.0), dtype.type(1)
    return (
        every,
        np.where(finite, every, zero),
        np.where(small, every, zero),
        np.where(nan, every, one),
        np.where(nan, one, every),
    )


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
@sampled(("name", "dtype"), SCALINGS_AND_DTYPES, 8, in_all=24)
def test_special_values_have_the_reference_s_bits(name, dtype):
    assert_quantizes_special_values(ALL_SCALINGS[name], dtype)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
@sampled(("name", "dtype"), MORE_SCALINGS_AND_DTYPES, 8, in_all=24)
def test_special_values_under_other_settings_have_the_reference_s_bits(name, dtype):
    assert_quantizes_special_values(ALL_SCALINGS[name], dtype)


def assert_quantizes_special_values(scaling, dtype):
    """The bits of the reference, there and back."""
    for x in extremes(dtype):
        columnwise = takes(scaling, x.shape, True) and not getattr(scaling, "rht", False)
        mine, reference = (m.quantize(x, scaling, columnwise=columnwise) for m in (host, refops))
        assert_same_quantized(mine, reference)
        assert same_bits(host.dequantize(mine), refops.dequantize(mine))


@st.composite
def calls(draw):
    """(tensor of any bits, scaling, options) that the scaling takes."""
    scaling = ALL_SCALINGS[draw(st.sampled_from([n for n, s in ALL_SCALINGS.items() if not getattr(s, "rht", False)]))]
    packed = scaling.layout.packed > 1
    unit = 32 if packed else 1
    m, k = (draw(st.integers(0, 3 if packed else 150)) * unit for _ in "mk")
    dtype, word = draw(st.sampled_from([(BF16, np.uint16), (FP32, np.uint32)]))
    bits = draw(
        arrays_of.arrays(word, (m, k), elements=arrays_of.from_dtype(np.dtype(word)), fill=st.integers(0, 9999))
    )
    spread = draw(st.sampled_from([None, 1, 40, 1e4]))
    x = bits.view(dtype)
    if spread is not None:
        x = (np.random.default_rng(draw(st.integers(0, 99))).standard_normal((m, k)) * spread).astype(dtype)
    columnwise = takes(scaling, (m, k), True) and draw(st.booleans())
    return x, scaling, {"columnwise": columnwise, "rowwise": not columnwise or draw(st.booleans())}


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
@settings(deadline=None, max_examples=150, derandomize=True, database=None)
@given(calls())
def test_any_tensor_has_the_reference_s_bits(call):
    x, scaling, options = call
    mine, dbias = host.quantize(x, scaling, dbias=True, **options)
    reference, reference_dbias = refops.quantize(x, scaling, dbias=True, **options)
    assert_same_quantized(mine, reference)
    assert same_bits(dbias, reference_dbias)
    assert same_bits(host.dequantize(mine), refops.dequantize(mine))


# --- tensors of PyTorch -----------------------------------------------------------------------------


def to_torch(x):
    """A NumPy array as a new tensor of PyTorch with the same bits."""
    torch = pytest.importorskip("torch")
    if x.dtype == BF16:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x.copy())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_pytorch_are_taken_without_a_copy(dtype):
    x = tensor((160, 96), dtype)
    t = to_torch(x).requires_grad_()
    assert arrays.tensor_operand(t, "x").array.ctypes.data == t.data_ptr()
    want = refops.quantize(x, MXFP8, columnwise=True)
    q = host.quantize(t, MXFP8, columnwise=True)
    assert_same_quantized(q, want)
    assert all(isinstance(array, np.ndarray) for array in arrays_in(q).values()) and q.dtype == dtype
    assert same_bits(arrays.as_array(t, "x"), x), "arguments stay as they were"
    for view, same in ((t.t(), x.T), (t[1::2, 3::5], x[1::2, 3::5]), (t[:0], x[:0]), (t[5], x[5])):
        assert_same_quantized(
            host.quantize(view, MXFP8, columnwise=True), refops.quantize(same, MXFP8, columnwise=True)
        )
    expanded = t[:1].expand(64, 96)
    assert_same_quantized(host.quantize(expanded, MXFP8), refops.quantize(np.broadcast_to(x[:1], (64, 96)), MXFP8))


def test_tensors_of_pytorch_in_every_argument():
    torch = pytest.importorskip("torch")
    x, dy, scales = tame((32, 64), FP32), tame((32, 32), FP32, seed=1), tame((32,), FP32, seed=2)
    tx, tdy, ts = map(to_torch, (x, dy, scales))
    same = [
        (host.activation("swiglu", tx, out_dtype=torch.bfloat16), host.activation("swiglu", x, out_dtype=BF16)),
        (host.activation_grad("swiglu", tdy, tx), host.activation_grad("swiglu", dy, x)),
        (host.scaled_activation("swiglu", tx, ts), host.scaled_activation("swiglu", x, scales)),
        (
            host.dequantize(host.quantize(tx, MXFP8), dtype=torch.float16),
            host.dequantize(host.quantize(x, MXFP8), dtype=FP16),
        ),
        (host.amax(tx), host.amax(x)),
        (host.amax(torch._neg_view(tx[:1]) if hasattr(torch, "_neg_view") else -tx[:1]), host.amax(-x[:1])),
        (host.encode(tx[0, 0], E4M3), host.encode(x[0, 0], E4M3)),
        (host.decode(torch.arange(9, dtype=torch.uint8), E4M3), host.decode(np.arange(9, dtype=np.uint8), E4M3)),
        (
            host.update_delayed_scale(tdy.abs(), ts.abs(), E4M3)[1],
            host.update_delayed_scale(abs(dy), abs(scales), E4M3)[1],
        ),
    ]
    for a, b in same:
        assert isinstance(a, np.ndarray) and same_bits(a, b)
    for wrong in (tx.double(), torch.ones(4, dtype=torch.int32), torch.ones(4, device="meta"), torch.tensor(1.0)):
        with pytest.raises((TypeError, ValueError), match="x must"):
            host.quantize(wrong, MXFP8)


# --- what has no kernels ----------------------------------------------------------------------------


def test_a_scaling_that_nobody_registered_is_refused_whatever_its_fields_are():
    @dataclass(frozen=True)
    class UnknownScaling(E8M0Scaling):
        step: float
        fmt, layout, scale_rounding, at_run_time = E4M3, MXFP8.layout, "up", ("step",)

    for quantize in (refops.quantize, host.quantize):
        with pytest.raises(TypeError, match=r"^scaling must be one of .*; got .*UnknownScaling"):
            quantize(tensor((32, 64)), UnknownScaling(1.0))


def test_a_scaling_of_refops_without_kernels_is_refused():
    """A class that `refops` has learnt, and no kernel: an error, not what some other scaling would give."""

    class LaterScaling(refops.BlockScaling):
        layout = Layout(block=(1, 8), scale_order="fixed")

    later, x = LaterScaling(E4M3), tensor((32, 64), FP32)
    for call in (
        lambda: host.quantize(x, later),
        lambda: host.activation_quantize("gelu", x, later),
        lambda: host.dequantize(refops.quantize(x, later)),
    ):
        with pytest.raises(TypeError, match=r"^scaling must be one that has kernels: blocks of .*; got .*LaterScaling"):
            call()
