"""The other calls in the simulator: dequantize, swizzling, amax, delayed scales, Hadamard, codes; wrong arguments."""

import importlib.util
import json
import pathlib
import sys
from dataclasses import replace

import numpy as np
import pytest
from simulated_cases import (
    BF16,
    DTYPES,
    FP16,
    FP32,
    RHT,
    SCALINGS,
    F,
    assert_same_result,
    directions_of,
    granularity,
    integers,
    judge,
    misaligned,
)

import cuda_kernels
import refops
from arrays import assert_same_bits, heavy_tailed
from cuda_kernels.errors import NoKernelsError
from refops import E2M1, E4M3, E5M2, E8M0
from refops.scalings import UNFUSED
from refops.survey import SCALINGS as NAMED
from tiers import sampled

pytestmark = pytest.mark.sweep

BOTH = SCALINGS | RHT


def both(x, scaling, rowwise, columnwise):
    """(simulated, reference) quantized tensors."""
    flags = {"rowwise": rowwise, "columnwise": columnwise}
    return cuda_kernels.quantize(x, scaling, **flags), refops.quantize(x, scaling, **flags)


@sampled("name", BOTH, 6)
def test_dequantize(name):
    """From each direction to two dtypes; undoing RHT rounds, so the oracle judges it."""
    scaling, number = BOTH[name], list(BOTH).index(name)
    shape = (35, 40) if granularity(scaling) == 1 else (32, 64)
    for rowwise, columnwise in directions_of(scaling)[:2]:
        q, expected = both((integers if name in RHT else heavy_tailed)(shape), scaling, rowwise, columnwise)
        dtype = DTYPES[(number + columnwise) % 3]
        y = cuda_kernels.dequantize(q, dtype=dtype)
        if name in RHT and columnwise:
            judge("dequantize", q.arrays, y, scaling=scaling)
        else:
            assert_same_bits(y, refops.dequantize(expected, dtype=dtype))
        assert y.dtype == dtype and cuda_kernels.dequantize(q).dtype == np.float32


def test_dequantize_undoes_the_signs_of_the_settings():
    """Not those of the default mask."""
    scaling = RHT["nvfp4-rht-signs"]
    q = cuda_kernels.quantize(integers((32, 32)), scaling, rowwise=False, columnwise=True)
    judge("dequantize", q.arrays, cuda_kernels.dequantize(q), scaling=scaling)


ANY_SCALES = ("delayed-e5m2", "current", "block-1x128-f32", "block-128x128", "mxfp8", "mxfp6-e3m2", "nvfp4-1x16")


@pytest.mark.parametrize("width", [112, 104], ids=["whole 16", "whole 8"])
@sampled("name", [*ANY_SCALES, "nvfp4-row-scaled", "mxfp8 columns"], 9)
def test_dequantize_any_codes_and_scales(name, width):
    """Every byte as a code and as an E8M0 or E4M3 scale, NaN among them; with whole 16 codes a thread reads 16."""
    name, columns = name.removesuffix(" columns"), name.endswith(" columns")
    scaling = SCALINGS[name]
    width = width if granularity(scaling) == 1 else 160 if width == 112 else 96
    shape, direction = (64, width), "columnwise" if columns else "rowwise"
    random = np.random.default_rng(5)
    largest = 64 if name == "mxfp6-e3m2" else 256
    for change in (np.asarray, misaligned):
        q, expected = both(heavy_tailed(shape), scaling, not columns, columns)
        for kind in (f"{direction}_data", f"{direction}_scale_inv"):
            array = getattr(expected, kind)
            if array.dtype == np.uint8:
                top = largest if kind.endswith("data") else 128 if "nvfp4" in name else 256
                array[...] = random.permutation(np.arange(array.size) % top).reshape(array.shape)
            q = replace(q, **{kind: change(array)})
        for dtype in DTYPES:
            y, theirs = cuda_kernels.dequantize(q, dtype=dtype), refops.dequantize(expected, dtype=dtype)
            assert_same_bits(one_nan(y.astype(F)), one_nan(theirs.astype(F)))


@sampled("name", ["mxfp8", "mxfp8-2d", "nvfp4-1x16", "nvfp4-16x16", "nvfp4-mae-2d", "nvfp4-row-scaled"], 6)
def test_swizzled_scales(name):
    """Swizzled afterwards or when they are stored, and back; 160 rows and 5 or 10 blocks: two tiles each way."""
    scaling = SCALINGS[name]
    x = heavy_tailed((160, 160))
    directions = dict(zip(("rowwise", "columnwise"), directions_of(scaling)[-1], strict=True))
    plain, expected = both(x, scaling, **directions)
    assert_same_result(plain.swizzled(), expected.swizzled())
    assert_same_result(plain.swizzled().unswizzled(), expected)
    assert plain.unswizzled() is plain and plain.swizzled().with_gemm_swizzled_scales
    direct = cuda_kernels.quantize(x, scaling, **directions, swizzled_scales=True)
    assert_same_result(direct, expected.swizzled())
    assert direct.with_gemm_swizzled_scales and direct.swizzled() is direct
    assert_same_bits(cuda_kernels.dequantize(direct), refops.dequantize(expected))


def test_per_tensor_scales_have_no_order():
    q = cuda_kernels.quantize(heavy_tailed((4, 8)), SCALINGS["current"], swizzled_scales=True)
    assert not q.with_gemm_swizzled_scales and q.swizzled() is q
    with pytest.raises(ValueError, match="block_scales_as_mxfp8"):
        cuda_kernels.quantize(heavy_tailed((4, 8)), SCALINGS["block-1x128"]).swizzled()


@pytest.mark.parametrize("shape", [(1,), (37,), (3, 5, 7), (70, 3), (2, 1040), (0, 4), (4, 0)], ids=str)
def test_amax(shape):
    for dtype in DTYPES:
        x = heavy_tailed(shape, dtype)
        assert_same_bits(cuda_kernels.amax(x), np.fmax.reduce(np.abs(x).astype(F), axis=None, initial=F(0))[None])
    x.reshape(-1)[::3] = np.nan
    assert_same_bits(
        cuda_kernels.amax(misaligned(x)), np.fmax.reduce(np.abs(x).astype(F), axis=None, initial=F(0))[None]
    )


@pytest.mark.parametrize("keep_unused", [True, False])
@pytest.mark.parametrize("algorithm", ["max", "most_recent", lambda h: h.mean(0)], ids=["max", "most_recent", "mean"])
def test_update_delayed_scale(algorithm, keep_unused):
    history = np.abs(heavy_tailed((4, 300), FP32))
    history[0, :20], history[1, 3], history[2, 4], history[:, 5], history[:, 6] = 0, np.inf, np.nan, np.nan, 1e-45
    scale = np.linspace(0.5, 2, 300, dtype=F)
    for fmt, margin in ((E4M3, 0), (E5M2, 3), (E4M3, -126)):
        options = {"margin": margin, "algorithm": algorithm, "keep_unused": keep_unused}
        before = history.copy()
        got = cuda_kernels.update_delayed_scale(history, scale, fmt, **options)
        for one, expected in zip(got, refops.update_delayed_scale(history, scale, fmt, **options), strict=True):
            assert_same_bits(one, expected)
        assert_same_bits(history, before)


def test_update_delayed_scale_of_one_tensor():
    for history, scale in ((F([3, 1, 4]), F([2])), (F([[3]]), F([2])), (F([0, 1]), F([2]))):
        got = cuda_kernels.update_delayed_scale(history, scale, E4M3)
        for one, expected in zip(got, refops.update_delayed_scale(history, scale, E4M3), strict=True):
            assert_same_bits(one, expected)


@pytest.mark.parametrize("mask", [0, 0x8001, 0xD7E8, 0xFFFF])
@pytest.mark.parametrize("inverse", [False, True])
def test_hadamard_transform(mask, inverse):
    for shape, dtype in (((3, 5, 16), FP32), ((4, 80), FP16), ((16,), BF16), ((0, 16), BF16)):
        x = integers(shape, dtype)
        got = cuda_kernels.hadamard_transform(misaligned(x), mask, inverse=inverse)
        assert_same_bits(got, refops.hadamard_transform(x, mask, inverse=inverse))


def one_nan(x):
    """x with the same NaN for every NaN: a decoded NaN has no particular bits."""
    return np.where(np.isnan(x), F(np.nan), x)


@pytest.mark.parametrize("fmt", [fmt for fmt in refops.FORMATS.values() if fmt not in (E2M1, E8M0)], ids=str)
def test_codes(fmt):
    codes = np.arange(len(fmt.values), dtype=np.uint8)
    assert_same_bits(one_nan(cuda_kernels.decode(codes, fmt)), one_nan(refops.decode(codes, fmt)))
    assert_same_bits(cuda_kernels.decode(codes[:0], fmt), refops.decode(codes[:0], fmt))
    values = np.concatenate([fmt.values, heavy_tailed((50,), FP32), F([np.nan, np.inf, -np.inf, 1e-45, 3e38])])
    midpoints = (fmt.values[:-1].astype(np.float64) + fmt.values[1:]) / 2
    values = np.concatenate([values, midpoints[np.isfinite(midpoints)].astype(F)])
    for dtype in DTYPES:
        with np.errstate(over="ignore"):
            x = values.astype(dtype)
        assert_same_bits(cuda_kernels.encode(x, fmt), refops.encode(x, fmt))
    assert_same_bits(cuda_kernels.encode(values[3], fmt), refops.encode(values[3], fmt))


def test_codes_of_e2m1_and_e8m0():
    codes = np.arange(16, dtype=np.uint8)[None, :9]
    x = heavy_tailed((3, 7), FP32)
    assert_same_bits(cuda_kernels.encode(x, E2M1), refops.encode(x, E2M1))
    assert_same_bits(cuda_kernels.decode(codes, E2M1), refops.decode(codes, E2M1))
    codes = np.arange(256, dtype=np.uint8)
    assert_same_bits(one_nan(cuda_kernels.decode(codes, E8M0)), one_nan(refops.decode(codes, E8M0)))


def test_calls_do_not_change_their_arguments():
    x, dy = heavy_tailed((32, 64)), heavy_tailed((32, 64), seed=1)
    before = x.tobytes(), dy.tobytes()
    cuda_kernels.activation_grad_quantize("silu", dy, x, SCALINGS["nvfp4-1x16"], columnwise=True, dbias=True)
    cuda_kernels.quantize(x, SCALINGS["current"], columnwise=True, dbias=True)
    assert (x.tobytes(), dy.tobytes()) == before


# --- wrong arguments --------------------------------------------------------------------------------


def bad_input():
    """The module of `refops`' own wrong calls."""
    folder = pathlib.Path(__file__).parents[1] / "refops"
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location("refops_bad_input", folder / "test_bad_input.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module


BAD = bad_input()
CALLS = (
    "quantize(",
    "activation",
    "scaled_",
    "encode(",
    "decode(",
    "hadamard_",
    "dequantize(",
    "update(",
    "nvfp4_bits(",
)
#: Said otherwise: of the package's own result type, of what is no array at all.
OWN_WORDS = ("dequantize(X)", "dequantize(replace(", "quantize('abc'", "update(algorithm=lambda h: ['a'")
OWN_WORDS += ("update(HISTORY[:, 0], f32(1), algorithm=lambda h: None)",)
WRONG = [case[0] for case in BAD.CASES if case[0].startswith(CALLS) and not case[0].startswith(OWN_WORDS)]


def scope(module):
    """Names of the wrong calls, those of `module`."""
    update = lambda h=BAD.HISTORY, s=BAD.SCALE, fmt=E4M3, **o: module.update_delayed_scale(h, s, fmt, **o)  # noqa: E731
    bits = lambda b, **o: module.quantize(  # noqa: E731
        BAD.X, refops.NVFP4Scaling(stochastic_rounding=True, random_bits=b), **o
    )
    return {**BAD.SCOPE, **{n: getattr(module, n) for n in cuda_kernels.__all__ if hasattr(refops, n)}} | {
        "update": update,
        "nvfp4_bits": bits,
    }


@pytest.mark.parametrize("name", ["e3m4", "e4m3"])
def test_formats_that_no_kernel_knows_are_refused(name):
    """Also one that has the name of another: IEEE's e4m3 ends at 240."""
    fmt = refops.FloatFormat(name, 4, 3, bias=7, largest_code=0x77, infinity_code=0x78, nan_code=0x7C)
    for call in (
        lambda: cuda_kernels.encode(np.ones(8, F), fmt),
        lambda: cuda_kernels.decode(np.ones(8, np.uint8), fmt),
    ):
        with pytest.raises(ValueError, match=r"^fmt must be one of refops\.FORMATS on a GPU"):
            call()


@pytest.mark.parametrize("call", WRONG)
def test_errors_are_those_of_refops(call):
    with pytest.raises((TypeError, ValueError)) as expected:
        eval(call, scope(refops))
    with pytest.raises((TypeError, ValueError)) as got:
        eval(call, scope(cuda_kernels))
    assert (got.type, str(got.value)) == (expected.type, str(expected.value))


# --- what README's table says ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def capabilities():
    folder = pathlib.Path(__file__).resolve().parent.parent.parent / "docs"
    spec = importlib.util.spec_from_file_location("capabilities", folder / "capabilities.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def told(capabilities):
    """What the table says of the simulated kernels."""
    return json.loads(capabilities.RESULTS.read_text())["kernels"]


@pytest.mark.check
@pytest.mark.parametrize("scaling", ["none", *NAMED])
def test_operations_are_right_where_the_table_has_them(capabilities, told, scaling):
    """Each operation once with each scaling, called and judged."""
    settings = NAMED[scaling].scaling if scaling in NAMED else None
    assert capabilities.offered_operations(cuda_kernels, settings) == told["scalings"][scaling]


@pytest.mark.check
@pytest.mark.parametrize("name", refops.ACTIVATIONS)
def test_activations_are_right_where_the_table_has_them(capabilities, told, name):
    """Value and gradient in every dtype, called and judged."""
    assert capabilities.offered(capabilities.evaluate, cuda_kernels, name) == (name in told["activations"])


class RoundedFirst(refops.DelayedScaling):
    """A known scale, for values that are rounded before they are cast."""

    path = UNFUSED


@pytest.mark.parametrize("columnwise", [False, True])
def test_a_known_scale_of_rounded_values(columnwise):
    dy, x, scaling = heavy_tailed((9, 48), BF16, 1), heavy_tailed((9, 96), BF16), RoundedFirst(E4M3, 3.0)
    flags = {"rowwise": True, "columnwise": columnwise}
    got = cuda_kernels.activation_quantize("reglu", x, scaling, **flags)
    assert_same_result(got, refops.activation_quantize("reglu", x, scaling, **flags))
    got = cuda_kernels.activation_grad_quantize("reglu", dy, x, scaling, **flags)
    assert_same_result(got, refops.activation_grad_quantize("reglu", dy, x, scaling, **flags))


class CastUnrounded(refops.CurrentScaling):
    """A scale of the amax, for values that are cast as they are computed."""

    path = refops.DelayedScaling.path


class SummedRounded(refops.DelayedScaling):
    """A known scale, for values that are cast as they are computed, and summed as they are stored."""

    path = replace(refops.DelayedScaling.path, dbias_rounded=True)


@pytest.mark.parametrize("scaling", [CastUnrounded(E4M3), SummedRounded(E4M3, 3.0)])
def test_what_no_kernel_makes_right_is_refused(scaling):
    with pytest.raises(NoKernelsError, match=r"must be one that has kernels: values that are rounded .*; got "):
        cuda_kernels.activation_quantize("silu", heavy_tailed((9, 48), BF16), scaling)
