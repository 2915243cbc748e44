"""`oracle.check`: what it accepts, what it refuses, what it says; for every operation and scaling."""

import json
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from reference_calls import ALL_SCALINGS, BF16, E4M3, E5M2, FP16, FP32, MXFP8, F, call, every_call

import refops
from arrays import heavy_tailed
from refops import oracle
from refops.activations import bind_activation
from refops.oracle.operation import OPERATIONS, Case, arrays_of
from refops.oracle.places import Lines
from refops.oracle.report import Explanation, array_lines
from tiers import sampled


def refuses_columnwise(scaling):
    return isinstance(scaling, refops.NVFP4Scaling) and scaling.row_scaled and scaling.four_over_six


# --- the reference is right, a change is not ---------------------------------------------------------------------


@sampled(("op", "name"), every_call(), 11)
def test_the_reference_is_right_and_one_changed_entry_is_found(op, name):
    scaling = ALL_SCALINGS.get(name)
    inputs, outputs, options = call(op, scaling)
    assert oracle.check(op, inputs, outputs, **options).ok
    assert oracle.check(op, inputs, outputs, ulp=0, **options).ok
    for array in outputs:
        changed = {k: v.copy() for k, v in outputs.items()}
        flat = changed[array].reshape(-1)
        at = 0 if "scale_inv" in array else flat.size // 3  # padding comes last
        if flat.dtype.kind == "u":
            flat[at] ^= 1
        else:
            flat[at] = flat[at] * np.asarray(1.25, flat.dtype) + np.asarray(1, flat.dtype)
        for ulp in (0, 2):
            report = oracle.check(op, inputs, changed, ulp=ulp, diagnose=False, **options)
            wrong = {verdict.name: verdict.wrong for verdict in report.arrays if verdict.wrong}
            assert wrong.get(array, 0) >= 1, (array, ulp)
            if flat.dtype.kind == "u" and array.endswith("data"):
                assert wrong == {array: 1}, "an element's code is judged alone"
            shown = [m for m in report.mismatches if m.array == array]
            assert shown and shown[0].index[: len(outputs[array].shape)] == np.unravel_index(at, outputs[array].shape)


@sampled(("name", "dtype"), product(ALL_SCALINGS, [FP32, FP16, BF16]), 2, in_all=1, ids=str)
def test_specials_are_judged_like_the_reference(name, dtype):
    """NaN, infinities, subnormals, huge and tiny values; the tile is evaluated because one code is changed."""
    x = heavy_tailed((64, 128), FP32)
    specials = np.float32([0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-42, 3e38, -3.4e38, 6e4, 448, 1e-30, 7, -7])
    for row, start in ((3, 0), (4, 50), (37, 101)):
        x[row, start : start + len(specials)] = specials
    with np.errstate(over="ignore"):
        x = x.astype(dtype)
    for op, tensors in (("quantize", (x,)), ("silu", (x,)), ("dgelu", (x[::-1].copy(), x))):
        operation = OPERATIONS[op]
        inputs = dict(zip(operation.inputs, tensors, strict=True))
        case = Case(op, inputs, ALL_SCALINGS[name])
        outputs = case.reference({k: np.zeros(s.shape, s.dtype) for k, s in case.slots.items()})
        outputs = {k: v.copy() for k, v in outputs.items()}
        outputs["rowwise_data"].reshape(-1)[-1] ^= 1
        report = oracle.check(op, inputs, outputs, scaling=ALL_SCALINGS[name], diagnose=False)
        assert {v.name: v.wrong for v in report.arrays if v.wrong} == {"rowwise_data": 1}, str(report)


def test_scales_are_judged_first_and_codes_under_the_scale_that_was_written():
    x = heavy_tailed((128, 256))
    floor = refops.quantize(x, refops.MXFP8Scaling(E4M3, scale_rounding="floor"), columnwise=True)
    report = oracle.check("quantize", x, floor, scaling=MXFP8, diagnose=False)
    wrong = {verdict.name: verdict.wrong for verdict in report.arrays}
    assert wrong["rowwise_scale_inv"] and wrong["columnwise_scale_inv"]
    assert wrong["rowwise_data"] == wrong["columnwise_data"] == 0


def test_a_wrong_amax_is_reported_once():
    x = heavy_tailed((128, 256))
    for scaling in (refops.CurrentScaling(E4M3), refops.NVFP4Scaling()):
        stale = np.concatenate([x, 4 * np.abs(x).max(initial=0, keepdims=True).repeat(256, 1).repeat(128, 0)])
        q = refops.quantize(stale, scaling)
        outputs = {"data": q.rowwise_data[:128], "scale": q.rowwise_scale_inv[:128], "amax": q.amax_rowwise}
        report = oracle.check("quantize", x, outputs, scaling=scaling, diagnose=False)
        assert {v.name: v.wrong for v in report.arrays if v.wrong} == {"amax_rowwise": 1}


@pytest.mark.parametrize("name", ALL_SCALINGS)
def test_every_subset_of_the_outputs(name):
    """Each array alone, and data without scales: wrong codes are still found."""
    scaling = ALL_SCALINGS[name]
    inputs, outputs, options = call("silu", scaling)
    for array in outputs:
        assert oracle.check("silu", inputs, {array: outputs[array]}, **options).ok
        if array.endswith("data"):
            changed = outputs[array].copy()
            changed.reshape(-1)[7] ^= 3
            report = oracle.check("silu", inputs, {array: changed}, diagnose=False, **options)
            assert [v.wrong for v in report.arrays] == [1]


def test_two_d_blocks_store_one_scale_several_times():
    x = heavy_tailed((64, 64))
    scaling = refops.MXFP8Scaling(E4M3, two_d=True)
    q = refops.activation_quantize("silu", x, scaling)
    scales = q.rowwise_scale_inv.copy()
    scales[5, 1] += 1
    report = oracle.check("silu", x, {"scale": scales}, scaling=scaling, diagnose=False)
    assert report.arrays[0].wrong == 1 and report.arrays[0].blocks_touched == 1 and report.arrays[0].blocks == 4


@sampled(("op", "name"), every_call(), 9)
def test_the_reference_is_right_without_the_shortcut(op, name, monkeypatch):
    """Nothing equals the reference when its bits are flipped: intervals alone judge every entry."""
    inputs, outputs, options = call(op, ALL_SCALINGS.get(name))
    right = Case.reference

    delayed = isinstance(options["scaling"], refops.DelayedScaling)  # whose scale_inv is the reference's

    def flipped(self, arrays):
        return {
            k: v if delayed and "scale_inv" in k else np.invert(v.view(f"u{v.dtype.itemsize}")).view(v.dtype)
            for k, v in right(self, arrays).items()
        }

    if OPERATIONS[op].kind != "update_delayed_scale":  # it is judged by the reference itself
        monkeypatch.setattr(Case, "reference", flipped)
    report = oracle.check(op, inputs, outputs, diagnose=False, **options)
    assert report.ok, str(report)


def test_four_over_six_without_dumped_scales_and_with_extreme_errors():
    x = heavy_tailed((64, 256))
    scaling = refops.NVFP4Scaling(four_over_six="mse")
    always6 = refops.quantize(x, refops.NVFP4Scaling())
    outputs = {"data": always6.rowwise_data, "amax": always6.amax_rowwise}
    assert not oracle.check("quantize", x, outputs, scaling=scaling, diagnose=False).ok
    for factor in (1e-23, 1e20, 1e35):  # squared errors under- or overflow float32: TE takes 6
        q = refops.quantize((x.astype(F) * F(factor)).astype(BF16), scaling)
        outputs = {"data": q.rowwise_data.copy(), "scale": q.rowwise_scale_inv, "amax": q.amax_rowwise}
        outputs["data"][0, 0] ^= 1
        report = oracle.check(
            "quantize", (x.astype(F) * F(factor)).astype(BF16), outputs, scaling=scaling, diagnose=False
        )
        assert [v.wrong for v in report.arrays] == [1, 0, 0]


def test_a_wrong_amax_beside_right_scales_is_the_only_thing_wrong():
    x = heavy_tailed((64, 256))
    for scaling in (refops.CurrentScaling(E4M3), refops.NVFP4Scaling()):
        q = refops.quantize(x, scaling)
        for amax in (q.amax_rowwise * F(1.25), F([np.nan]), F([0])):
            outputs = {"data": q.rowwise_data, "scale": q.rowwise_scale_inv, "amax": amax}
            report = oracle.check("quantize", x, outputs, scaling=scaling, diagnose=False)
            assert {v.name: v.wrong for v in report.arrays if v.wrong} == {"amax_rowwise": 1}


def test_a_scale_that_says_nothing_does_not_condemn_its_codes():
    x = heavy_tailed((64, 256))
    cases = (MXFP8, np.uint8(255)), (refops.BlockScaling(E4M3, 1), F(np.nan)), (refops.NVFP4Scaling(), np.uint8(0x7F))
    for scaling, unusable in cases:
        q = refops.quantize(x, scaling)
        scales = q.rowwise_scale_inv.copy()
        scales[1, 1] = unusable
        report = oracle.check("quantize", x, {"data": q.rowwise_data, "scale": scales}, scaling=scaling, diagnose=False)
        assert [v.wrong for v in report.arrays] == [0, 1]
        assert report.mismatches[0].index == (1, 1) and report.mismatches[0].distance > 0


def test_infinite_inputs_leave_no_freedom():
    x = heavy_tailed((64, 256))
    x[3, 3] = -np.inf
    for op in ("silu", "qgelu", "gelu"):
        y = refops.activation(op, x)
        for wrong in (-5, 0, -np.inf, 1e30):
            y[3, 3] = wrong
            assert not oracle.check(op, x, y, diagnose=False).ok
        assert np.isnan(refops.activation(op, x)[3, 3])


def test_dequantized_products_are_rounded_once():
    q = refops.quantize(heavy_tailed((64, 256), FP32), refops.CurrentScaling(E4M3))
    y = refops.dequantize(q)
    exact = E4M3.values[q.rowwise_data].astype(np.float64) * float(q.rowwise_scale_inv[0])
    truncated = np.where(np.abs(y) > np.abs(exact), np.nextafter(y, F(0)), y)
    report = oracle.check("dequantize", q, truncated, diagnose=False)
    assert report.arrays[0].wrong == np.count_nonzero(truncated != y) > 1000


def test_notes_say_what_was_not_judged():
    x, dy = heavy_tailed((2048, 64)), heavy_tailed((2048, 64), seed=1)
    q = refops.quantize(x, MXFP8)
    assert "not given, not judged: rowwise_scale_inv" in str(
        oracle.check("quantize", x, {"data": q.rowwise_data}, scaling=MXFP8)
    )
    zeros = np.zeros_like(q.rowwise_data)
    assert "hold 0x00: were they written?" in str(oracle.check("quantize", x, {"data": zeros}, scaling=MXFP8))
    dbias = refops.activation_grad("gelu", dy, x, dbias=True)[1]
    dbias = (dbias.astype(F) + F(0.05)).astype(BF16)
    report = oracle.check("dgelu", {"dy": dy, "x": x}, {"dbias": dbias}, diagnose=False)
    assert "dbias adds 2,048 terms" in str(report)


def test_a_diagnosis_of_all_that_is_wrong_answers_what_was_not_written():
    """NaN stored as -448: one value in all wrong entries, which were written; without a diagnosis nobody knows."""
    x = heavy_tailed((128, 64), FP32)
    x[::4, ::8] = np.nan
    q = refops.quantize(x, MXFP8)
    outputs = {"data": np.where(q.rowwise_data == E4M3.nan_code, 0xFE, q.rowwise_data).astype(np.uint8)}
    outputs["scale"] = q.rowwise_scale_inv
    report = oracle.check("quantize", x, outputs, scaling=MXFP8)
    assert report.diagnosis[0].names == ("nan-as-a-number",) and not report.notes
    report = oracle.check("quantize", x, outputs, scaling=MXFP8, diagnose=False)
    assert report.notes == ("all wrong entries of rowwise_data hold 0xfe: were they written?",)


def test_a_diagnosis_of_one_output_answers_for_that_one():
    """Blocks with NaN get the NaN scale, and the codes of some rows are noise: only the scales are explained."""
    x = heavy_tailed((128, 256), FP32)
    x[::4, ::32] = np.nan
    q = refops.quantize(x, MXFP8)
    data, scales = q.rowwise_data.copy(), q.rowwise_scale_inv.copy()
    scales[::4] = 255
    data[1::4] = np.random.default_rng(0).integers(0, 256, data[1::4].shape)
    report = oracle.check("quantize", x, {"data": data, "scale": scales}, scaling=MXFP8)
    assert report.diagnosis[0].names == ("nan-scale-for-nonfinite",) and report.diagnosis[0].explained < 0.1
    assert report.diagnosis[0].whole_arrays == ("rowwise_scale_inv",) and not report.notes


# --- dtypes, shapes, layouts ---------------------------------------------------------------------------------------


def test_outputs_come_in_their_own_dtype_or_as_raw_bits():
    x = heavy_tailed((64, 128))
    q = refops.quantize(x, MXFP8)
    for data in (
        q.rowwise_data,
        q.rowwise_data.view(np.int8),
        q.rowwise_data.view(ml_dtypes.float8_e4m3fn),
        q.rowwise_data.ravel(),
        q.rowwise_data.view(ml_dtypes.float8_e4m3fn)[:, ::-1][:, ::-1],
    ):
        assert oracle.check("quantize", x, {"data": data}, scaling=MXFP8).ok
    assert oracle.check("quantize", x, {"scale": q.rowwise_scale_inv.view(ml_dtypes.float8_e8m0fnu)}, scaling=MXFP8).ok
    nvfp4 = refops.NVFP4Scaling()
    q = refops.quantize(x, nvfp4)
    one_a_byte = refops.unpack_fp4(q.rowwise_data).view(ml_dtypes.float4_e2m1fn)
    scales = q.rowwise_scale_inv.view(ml_dtypes.float8_e4m3fn)
    amax = q.amax_rowwise.view(np.uint32)
    assert oracle.check("quantize", x, {"data": one_a_byte, "scale": scales, "amax": amax}, scaling=nvfp4).ok
    y = refops.activation("silu", x)
    for dump in (
        y,
        y.view(np.uint16),
        y.view(np.int16),
        y.view("V2"),
        y.ravel(),
        y.view(np.uint16).byteswap().view(">u2"),
    ):
        assert oracle.check("silu", x, dump).ok
    wide = refops.activation("silu", x, out_dtype=F)
    assert oracle.check("silu", x, wide).ok and oracle.check("silu", x, wide.view(np.uint32)).ok
    half = refops.activation("silu", x, out_dtype=FP16)
    assert oracle.check("silu", x, half).ok
    assert not oracle.check("silu", x, half.view(np.uint16), diagnose=False).ok, "raw 16 bits are x's dtype"


class _Interface:
    """An array that offers one protocol and nothing else."""

    def __init__(self, array, protocol):
        self._array = array
        setattr(self, protocol, getattr(array, protocol))


@pytest.mark.parametrize("protocol", ["__array__", "__array_interface__", "__dlpack__"])
def test_any_array_protocol(protocol):
    x = heavy_tailed((32, 64), FP32)
    y = refops.activation("silu", x)
    given = _Interface(y, protocol)
    if protocol == "__dlpack__":
        given.__dlpack_device__ = y.__dlpack_device__
        type(given).__dlpack__ = lambda self, **options: y.__dlpack__(**options)
        type(given).__dlpack_device__ = lambda self: y.__dlpack_device__()
    elif protocol == "__array__":
        type(given).__array__ = lambda self, dtype=None, copy=None: y
    try:
        assert oracle.check("silu", x, given).ok
    finally:
        for name in ("__dlpack__", "__dlpack_device__", "__array__"):
            if name in vars(_Interface):
                delattr(_Interface, name)


def test_torch_tensors():
    torch = pytest.importorskip("torch")
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    xn = x.view(torch.int16).numpy().view(BF16)
    y = torch.from_numpy(refops.activation("silu", xn).view(np.int16)).view(torch.bfloat16)
    assert oracle.check("silu", x.requires_grad_(), y).ok
    q = refops.quantize(xn, MXFP8)
    data = torch.from_numpy(q.rowwise_data).view(torch.float8_e4m3fn)
    scales = torch.from_numpy(q.rowwise_scale_inv).view(torch.float8_e8m0fnu)
    assert oracle.check("quantize", x.detach(), {"data": data, "scale": scales}, scaling=MXFP8).ok
    with pytest.raises(TypeError, match="rowwise_data must be uint8 codes or float8_e4m3fn"):
        oracle.check("quantize", x.detach(), {"data": data.view(torch.float8_e5m2)}, scaling=MXFP8)


def test_jax_arrays():
    jax = pytest.importorskip("jax")
    x = jax.numpy.asarray(heavy_tailed((64, 128)))
    q = refops.quantize(np.asarray(x), MXFP8)
    data = jax.numpy.asarray(q.rowwise_data.view(ml_dtypes.float8_e4m3fn))
    assert oracle.check(
        "quantize", x, {"data": data, "scale": jax.numpy.asarray(q.rowwise_scale_inv)}, scaling=MXFP8
    ).ok


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8-2d", "nvfp4-1x16", "nvfp4-16x16", "block-1x128", "block-128x128"])
def test_scales_with_padding_without_and_flat(name):
    scaling = ALL_SCALINGS[name]
    inputs, outputs, options = call("quantize", scaling, shape=(80, 192))
    case = Case("quantize", inputs, scaling)
    for array in ("rowwise_scale_inv", "columnwise_scale_inv"):
        slot = case.slots[array]
        valid = outputs[array][slot.valid_slices]
        for dump in (outputs[array], outputs[array].ravel(), valid, valid.ravel()):
            report = oracle.check("quantize", inputs, {array: dump}, **options)
            assert report.ok and ("without its padding" in str(report)) == (dump.size != slot.shape[0] * slot.shape[1])
            dump = dump.copy()
            dump.reshape(-1)[0] = 3
            assert oracle.check("quantize", inputs, {array: dump}, diagnose=False, **options).arrays[0].wrong == 1


def test_padding_is_noted_or_judged():
    inputs, outputs, options = call("quantize", MXFP8, shape=(80, 192))
    scales = outputs["rowwise_scale_inv"].copy()
    scales[100, 3] = 5
    report = oracle.check("quantize", inputs, {"scale": scales}, **options)
    assert report.ok and "1 of the 544 padding entries of rowwise_scale_inv are not zero" in str(report)
    for strict in ({"padding": "zero"}, {"ulp": 0}):
        report = oracle.check("quantize", inputs, {"scale": scales}, diagnose=False, **strict, **options)
        assert report.arrays[0].wrong == 1 and report.mismatches[0].index == (100, 3)
    assert oracle.check("quantize", inputs, {"scale": scales}, ulp=0, padding="ignore", **options).ok


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4-1x16"])
def test_swizzled_scales(name):
    scaling = ALL_SCALINGS[name]
    x = heavy_tailed((144, 320))
    q = refops.quantize(x, scaling, columnwise=True).swizzled()
    assert oracle.check("quantize", x, q, scaling=scaling).ok, "a Quantized says itself that it is swizzled"
    scales = {k: getattr(q, k) for k in ("rowwise_scale_inv", "columnwise_scale_inv")}
    assert oracle.check("quantize", x, scales, scaling=scaling, swizzled_scales=True).ok
    assert not oracle.check("quantize", x, scales, scaling=scaling, diagnose=False).ok
    with pytest.raises(ValueError, match="must have its padding when swizzled"):
        oracle.check(
            "quantize",
            x,
            {"scale": scales["rowwise_scale_inv"][:144, : 320 // scaling.block_size]},
            scaling=scaling,
            swizzled_scales=True,
        )


@pytest.mark.parametrize("name", ALL_SCALINGS)
def test_leading_dimensions_and_strides(name):
    x = heavy_tailed((4, 2 * 16, 128))[:, ::2]
    scaling = ALL_SCALINGS[name]
    q = refops.quantize(x, scaling, columnwise=True)
    assert oracle.check("quantize", x, q, scaling=scaling).ok
    data = q.rowwise_data.copy()
    data[2, 3, 5] ^= 1
    report = oracle.check("quantize", x, {"data": data}, scaling=scaling, diagnose=False)
    assert report.mismatches[0].index == (2, 3, 5) and report.mismatches[0].element[0] == 35


@pytest.mark.parametrize("op", ["quantize", "swiglu", "dgelu"])
@pytest.mark.parametrize("shape", [(0, 64), (1, 64), (64, 32), (1, 1), (3, 33)])
def test_empty_and_ragged_tensors(op, shape):
    for name in ("delayed-scale-1", "current", "block-1x128", "block-128x128", "mxfp8"):
        if op == "swiglu" and name == "mxfp8" and shape[1] % 32:
            continue
        inputs, outputs, options = call(op, ALL_SCALINGS[name], shape=shape)
        assert oracle.check(op, inputs, outputs, **options).ok
        if outputs["rowwise_data"].size:
            outputs["rowwise_data"][-1, -1] ^= 1
            assert not oracle.check(op, inputs, outputs, diagnose=False, **options).ok


# --- particular operations -----------------------------------------------------------------------------------------


def test_nan_is_one_class_unless_bits_are_asked_for():
    x = heavy_tailed((8, 32), FP32)
    x[2, 3] = np.nan
    y = refops.activation("silu", x)
    y[2, 3] = np.uint32(0xFFC00001).view(F)
    assert oracle.check("silu", x, y).ok
    assert not oracle.check("silu", x, y, ulp=0, diagnose=False).ok
    q = refops.quantize(x, MXFP8)
    data = q.rowwise_data.copy()
    assert data[2, 3] == 0x7F
    data[2, 3] = 0xFF
    assert oracle.check("quantize", x, {"data": data}, scaling=MXFP8).ok
    data[2, 3] = 0x7E
    assert not oracle.check("quantize", x, {"data": data}, scaling=MXFP8, diagnose=False).ok


def test_zero_keeps_its_sign_in_a_cast_but_a_computed_zero_may_have_either():
    x = np.zeros((32, 32), F)
    x[0, 0] = -0.0
    for scaling in (refops.CurrentScaling(E4M3), refops.BlockScaling(E4M3, 1), MXFP8):
        data = refops.quantize(x, scaling).rowwise_data.copy()
        assert data[0, 0] == 0x80
        data[0, 0] = 0
        report = oracle.check("quantize", x, {"data": data}, scaling=scaling, diagnose=False)
        assert report.ok == (scaling is MXFP8), "TE's specialised MXFP8 kernels write +0"
    x = -np.ones((32, 64), F)
    data = refops.activation_quantize("reglu", x, MXFP8).rowwise_data
    assert (data == 0x80).all(), "0 times a negative gate"
    assert oracle.check("reglu", x, {"data": np.zeros_like(data)}, scaling=MXFP8).ok


def test_sums_are_accepted_in_any_order_but_not_with_a_row_missing():
    x, dy = heavy_tailed((512, 64)), heavy_tailed((512, 64), seed=1)
    inputs = {"dy": dy, "x": x}
    dx = refops.activation_grad("gelu", dy, x)
    terms = dx.astype(F)
    for total in (
        np.cumsum(terms, axis=0, dtype=F)[-1],
        np.cumsum(terms[::-1], axis=0, dtype=F)[-1],
        terms.astype(np.float64).sum(axis=0),
        terms.reshape(16, 32, 64).sum(axis=1, dtype=F).sum(axis=0, dtype=F),
    ):
        assert oracle.check("dgelu", inputs, {"dbias": total.astype(BF16)}).ok
    short = terms[:-7].sum(axis=0).astype(BF16)
    report = oracle.check("dgelu", inputs, {"dbias": short}, diagnose=False)
    assert report.arrays[0].wrong > 32
    first = report.mismatches[0]
    assert (first.index, first.got, first.acceptable) == ((0,), "15.4375 (0x4177)", "18.5")
    assert first.distance == (0x4194 - 0x4177), "in units of the last place of bfloat16"


def test_stochastic_rounding_with_bits_of_its_own():
    x = heavy_tailed((256, 512), FP32)
    scaling = refops.NVFP4Scaling(stochastic_rounding=True, seed=1)
    own = refops.quantize(x, refops.NVFP4Scaling(stochastic_rounding=True, seed=2), columnwise=True)
    assert not oracle.check("quantize", x, own, scaling=scaling, diagnose=False).ok
    assert oracle.check("quantize", x, own, scaling=scaling, random_bits="any").ok
    nearest = refops.quantize(x, refops.NVFP4Scaling())
    report = oracle.check("quantize", x, nearest, scaling=scaling, random_bits="any")
    assert not report.ok and "45.20 % of the inexact values moved up in magnitude where fair bits move 47.21 %" in str(
        report
    )
    low = np.random.default_rng(0).integers(0, 200, x.shape).astype(np.uint8)
    unfair = refops.quantize(x, refops.NVFP4Scaling(stochastic_rounding=True, random_bits=low))
    report = oracle.check("quantize", x, unfair, scaling=scaling, random_bits="any")
    assert not report.ok and "moved up in magnitude" in str(report)
    data = own.rowwise_data.copy()
    data[4, 4] ^= 7
    report = oracle.check("quantize", x, {"data": data}, scaling=scaling, random_bits="any", diagnose=False)
    assert report.arrays[0].wrong == 1


@pytest.mark.parametrize("name", ALL_SCALINGS)
def test_dequantize_from_a_dict_of_arrays_and_columnwise(name):
    scaling = ALL_SCALINGS[name]
    q = refops.quantize(heavy_tailed((64, 128)), scaling, columnwise=True)
    for direction in ("rowwise", "columnwise"):
        arrays = {name: array for name, array in arrays_of(q).items() if direction in name}
        y = refops.dequantize(refops.Quantized(**arrays, scaling=scaling, shape=q.shape, dtype=q.dtype), dtype=BF16)
        assert oracle.check("dequantize", arrays, y, scaling=scaling).ok
        y = y.copy()
        y[3, 3] = 77
        report = oracle.check("dequantize", arrays, y, scaling=scaling, diagnose=False)
        assert [v.wrong for v in report.arrays] == [1]


def test_parameters_reach_the_formula():
    x = heavy_tailed((64, 128), FP32)
    y = refops.activation("clamped_swiglu", x, limit=2.0, alpha=1.0)
    assert oracle.check("clamped_swiglu", x, y, params={"limit": 2.0, "alpha": 1.0}).ok
    assert not oracle.check("clamped_swiglu", x, y, diagnose=False).ok
    scales = heavy_tailed((64,), FP32)
    y = refops.scaled_activation("swiglu", x, scales, glu_interleave_size=32)
    inputs = {"x": x, "row_scales": scales}
    assert oracle.check("scaled_swiglu", inputs, y, params={"glu_interleave_size": 32}).ok
    assert not oracle.check("scaled_swiglu", inputs, y, diagnose=False).ok


def test_te_spellings_of_gradients():
    inputs, outputs, _ = call("dclamped_swiglu")
    assert oracle.check("clamped_dswiglu", inputs, outputs).ok


# --- the report ------------------------------------------------------------------------------------------------------


def test_the_report_says_what_where_and_how_far():
    x = heavy_tailed((96, 160), FP32, seed=3)
    q = refops.activation_quantize("silu", x, MXFP8)
    data = q.rowwise_data.copy()
    data[40:44, 64:96] = 0
    report = oracle.check("silu", x, {"data": data, "scale": q.rowwise_scale_inv}, scaling=MXFP8)
    (codes, scales) = report.arrays
    assert not report.ok and codes.blocks_touched == 4 and codes.blocks == 480 and codes.box == ((40, 43), (64, 95))
    (unwritten,) = report.diagnosis
    assert scales.ok and unwritten.names == ("not-written",) and str(unwritten.place) == "rows 40..43, columns 64..95"
    first = report.mismatches[0]
    row, column = first.element
    assert first.index == first.element and first.inputs == {"x": x[row, column]}
    amax = np.abs(refops.activation("silu", x)[row, 64:96]).max()
    low, high = map(float, first.amax.split(" to "))
    assert 0 < low <= amax <= high < low * (1 + 2.0**-20)
    text = str(report)
    assert text.startswith("WRONG: silu -> MXFP8Scaling(fmt=E4M3")
    assert "rowwise_data: 126 of 15,360 codes wrong (0.82 %), in 4 of 480 blocks" in text, "two codes are 0 rightly"
    assert "all in rows 40..43, columns 64..95 of 96 x 160" in text
    assert "rowwise_scale_inv: 480 scales right" in text
    assert "1. not-written, in rows 40..43, columns 64..95 only: The codes hold 0x00" in text
    assert codes.picture == ("." * 48,) * 3 + ("." * 19 + "*" * 10 + "." * 19,) + ("." * 48,) * 4
    assert json.loads(json.dumps(report.as_dict()))["arrays"][0]["wrong"] == codes.wrong
    with pytest.raises(oracle.MismatchError, match="rowwise_data"):
        report.raise_for_mismatch()
    assert issubclass(oracle.MismatchError, AssertionError)


def test_the_worst_entry_is_the_farthest():
    x = heavy_tailed((64, 64), FP32)
    y = refops.activation("silu", x)
    y[1, 1] *= F(1.001)
    y[60, 60] = 1e30
    y[33, 7] = np.nan
    report = oracle.check("silu", x, y, diagnose=False)
    verdict = report.arrays[0]
    assert [m.index for m in verdict.first] == [(1, 1), (33, 7), (60, 60)]
    assert [m.index for m in verdict.worst] == [(33, 7), (60, 60), (1, 1)]
    assert json.dumps(report.as_dict(), allow_nan=False)


def test_a_right_report_counts_other_bits():
    x = heavy_tailed((64, 64), FP32)
    y = bind_activation("silu", {}).truth(x.astype(np.float64)).astype(F)
    report = oracle.check("silu", x, y)
    report.raise_for_mismatch()
    assert report.ok and report.arrays[0].differing > 500 and "other bits than the reference" in str(report)


def test_a_right_report_says_which_other_bits_are_nan():
    x = heavy_tailed((64, 64), FP32)
    x[:, 5] = np.nan
    q = refops.quantize(x, MXFP8)
    negative = np.where(q.rowwise_data == E4M3.nan_code, 0xFF, q.rowwise_data).astype(np.uint8)
    report = oracle.check("quantize", x, {"data": negative, "scale": q.rowwise_scale_inv}, scaling=MXFP8)
    assert report.arrays[0].differing == report.arrays[0].differing_nans == 64
    assert "64 of them other bits than the reference's (all NaN with another sign or payload)" in str(report)
    assert report.as_dict()["arrays"][0]["differing_nans"] == 64

    y = bind_activation("silu", {}).truth(x.astype(np.float64)).astype(F)
    y[:, 5] = -y[:, 5]
    verdict = oracle.check("silu", x, y).arrays[0]
    assert verdict.ok and verdict.differing > verdict.differing_nans == 64
    assert f"{verdict.differing:,} of them other bits than the reference's (64 NaN with" in str(array_lines(verdict))


def test_counts_and_shares_in_words():
    x = heavy_tailed((32, 32), FP32)
    scaling = refops.CurrentScaling(E4M3)
    outputs = arrays_of(refops.quantize(x, scaling))
    assert ": 1 scale right" in str(oracle.check("quantize", x, outputs, scaling=scaling))
    shares = {1: "all", 0.99996: ">99.9 %", 0.966: "96.6 %"}
    for share, text in shares.items():
        assert str(Explanation(("gate-order",), "Why.", share)).endswith(f"(explains {text} of what is wrong)")


# --- bad use ---------------------------------------------------------------------------------------------------------

X = np.ones((32, 64), F)
BAD_CALLS = {
    "operation": (("gleu", X, X), {}, ValueError, r"op must be one of .*did you mean .*gelu"),
    "operation type": ((3, X, X), {}, ValueError, "op must be one of"),
    "missing input": (("dgelu", {"x": X}, X), {}, ValueError, "inputs must hold dy, x for dgelu; got x"),
    "bare input": (("dgelu", X, X), {}, TypeError, "inputs must be a dict with dy, x"),
    "surplus input": (("gelu", {"x": X, "dy": X}, X), {}, ValueError, "inputs must hold x alone"),
    "input dtype": (("gelu", X.astype(np.int32), X), {}, TypeError, "x must be float32, float16 or bfloat16"),
    "odd width": (("swiglu", X[:, :63], X), {}, ValueError, "x must have an even last dimension"),
    "dy shape": (("dswiglu", {"dy": X, "x": X}, X), {}, ValueError, r"dy must have the shape .*\(32, 32\)"),
    "output shape": (("swiglu", X, X), {}, ValueError, r"y must have shape \(32, 32\); got \(32, 64\)"),
    "transposed output": (("gelu", X, X.T), {}, ValueError, r"y must have shape \(32, 64\); got \(64, 32\)"),
    "output dtype": (
        ("gelu", X, X.astype(np.float64)),
        {},
        TypeError,
        "y must be float32, float16 or bfloat16, or raw",
    ),
    "output name": (("gelu", X, {"z": X}), {}, ValueError, "outputs must be among y; got 'z'"),
    "no output": (("gelu", X, {}), {}, ValueError, "outputs must hold at least one of y; got none"),
    "not an array": (("gelu", X, "y.npy"), {}, TypeError, "y must be an array .*; got str"),
    "bare output": (("quantize", X, X), {"scaling": MXFP8}, TypeError, "outputs must be a dict of rowwise_data"),
    "twice": (
        ("quantize", X, {"data": X, "rowwise_data": X}),
        {"scaling": MXFP8},
        ValueError,
        "outputs must hold rowwise_data once",
    ),
    "scaling missing": (("quantize", X, X), {}, ValueError, "scaling is required for quantize"),
    "scaling type": (("quantize", X, X), {"scaling": 8}, TypeError, "scaling must be one of"),
    "scaling name": (
        ("quantize", X, X),
        {"scaling": "mxfp9"},
        ValueError,
        "scaling must be one of .*, or settings; got .mxfp9",
    ),
    "scaling superfluous": (
        ("scaled_srelu", {"x": X, "row_scales": X[:, 0]}, X),
        {"scaling": MXFP8},
        ValueError,
        "scaling must be None for scaled_srelu",
    ),
    "shape rule": (
        ("quantize", X[:, :50], {"data": X}),
        {"scaling": refops.NVFP4Scaling()},
        ValueError,
        "M % 16 == 0 and K % 16 == 0",
    ),
    "code dtype": (
        ("quantize", X, {"data": X.astype(ml_dtypes.float8_e5m2)}),
        {"scaling": MXFP8},
        TypeError,
        "rowwise_data must be uint8 codes or float8_e4m3fn",
    ),
    "scale dtype": (
        ("quantize", X, {"scale": np.ones((128, 4), F)}),
        {"scaling": MXFP8},
        TypeError,
        "rowwise_scale_inv must be uint8 codes or float8_e8m0fnu",
    ),
    "UE5M3 scales, which have no dtype": (
        ("quantize", X, {"scale": np.ones((128, 4), F)}),
        {"scaling": refops.NVFP4Scaling(scale_format=refops.UE5M3)},
        TypeError,
        "rowwise_scale_inv must be uint8 codes; got float32",
    ),
    "INT8 codes": (
        ("quantize", X, {"data": X}),
        {"scaling": refops.MXINT8Scaling()},
        TypeError,
        "rowwise_data must be uint8 codes or int8; got float32",
    ),
    "scale shape": (
        ("quantize", X, {"scale": np.ones((64, 4), np.uint8)}),
        {"scaling": MXFP8},
        ValueError,
        r"rowwise_scale_inv must have shape \(128, 4\) \(or its valid part, \(32, 2\)\); got \(64, 4\)",
    ),
    "scales of smaller blocks": (
        ("quantize", X, {"scale": np.ones((32, 4), np.uint8)}),
        {"scaling": MXFP8},
        ValueError,
        r"got \(32, 4\), the shape of scales of blocks of 16$",
    ),
    "transposed scales": (
        ("quantize", X, {"scale": np.ones((2, 32), np.uint8)}),
        {"scaling": MXFP8},
        ValueError,
        r"got \(2, 32\), the shape of transposed scales$",
    ),
    "scales of tiles": (
        ("quantize", X, {"scale": np.ones((2, 4), np.uint8)}),
        {"scaling": MXFP8},
        ValueError,
        r"got \(2, 4\), the shape of scales of blocks of 16x16$",
    ),
    "scales in blocks of what has one": (
        ("quantize", X, {"scale": np.ones((32, 2), np.float32)}),
        {"scaling": refops.CurrentScaling(E4M3)},
        ValueError,
        r"must have shape \(1,\); got \(32, 2\), the shape of scales of blocks of 32$",
    ),
    "amax of MXFP8": (("quantize", X, {"amax": X}), {"scaling": MXFP8}, ValueError, "outputs must be among"),
    "dbias dtype": (("dgelu", {"dy": X, "x": X}, {"dbias": X[0].astype(BF16)}), {}, TypeError, "dbias must be float32"),
    "params": (("gelu", X, X), {"params": {"limit": 7.0}}, ValueError, r"params must be among those of gelu \(none\)"),
    "params type": (("gelu", X, X), {"params": 7.0}, TypeError, "params must be a dict"),
    "param value": (("situglu", X, X[:, :32]), {"params": {"beta1": -1}}, ValueError, "beta1 must be"),
    "interleave": (
        ("scaled_swiglu", {"x": X, "row_scales": X[:, 0]}, X[:, :32]),
        {"params": {"glu_interleave_size": 7}},
        ValueError,
        "glu_interleave_size must be 0",
    ),
    "row scales": (
        ("scaled_srelu", {"x": X, "row_scales": X[0]}, X),
        {},
        ValueError,
        "row_scales must have one entry per row",
    ),
    "fmt missing": (
        ("update_delayed_scale", {"amax_history": X[0], "scale": X[0, 0]}, {"scale": X[0, 0]}),
        {},
        ValueError,
        "params must hold fmt",
    ),
    "ulp": (("gelu", X, X), {"ulp": -1}, ValueError, "ulp must be"),
    "padding": (("gelu", X, X), {"padding": "one"}, ValueError, "padding must be one of"),
    "random bits": (("gelu", X, X), {"random_bits": "mine"}, ValueError, "random_bits must be one of"),
    "any random bits": (
        ("quantize", X, {"data": X}),
        {"scaling": MXFP8, "random_bits": "any"},
        ValueError,
        "needs ulp > 0",
    ),
    "None": (("quantize", X, {"data": None}), {"scaling": MXFP8}, TypeError, "rowwise_data must be an array"),
    "no scaling": (("gelu", X, {"data": X}), {}, ValueError, "outputs must be among y; got 'data'; .* give scaling"),
    "another Quantized": (
        ("quantize", X, refops.quantize(X, refops.MXFP8Scaling(E5M2))),
        {"scaling": MXFP8},
        ValueError,
        "outputs must be of the kind of MXFP8Scaling",
    ),
    "dbias dtype, quantized": (
        ("quantize", X, {"dbias": X[0].astype(BF16)}),
        {"scaling": MXFP8},
        TypeError,
        "dbias must be float32",
    ),
    "swizzled array": (
        ("gelu", X, X),
        {"swizzled_scales": X},
        TypeError,
        r"swizzled_scales must be True or False; got float32 of shape \(32, 64\)",
    ),
    "swizzled": (("gelu", X, X), {"swizzled_scales": "yes"}, TypeError, "swizzled_scales must be True or False"),
    "dequantize inputs": (("dequantize", X, X), {}, TypeError, "inputs must be a Quantized or a dict of its arrays"),
    "dequantize scaling": (("dequantize", {"data": X}, X), {}, ValueError, "scaling is required to dequantize"),
    "dequantize scale": (
        ("dequantize", {"data": X.astype(np.uint8)}, X),
        {"scaling": MXFP8},
        ValueError,
        "rowwise_data needs rowwise_scale_inv",
    ),
}


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 64, 1), (2, 0, 128)])
@pytest.mark.parametrize("scaling", [None, MXFP8, refops.DelayedScaling(E4M3), refops.NVFP4Scaling()])
def test_a_wrong_dump_of_no_elements_is_judged_without_a_diagnosis(shape, scaling):
    if isinstance(scaling, refops.NVFP4Scaling) and shape[-1] == 1:
        shape = shape[:-1]
    x = np.zeros(shape, np.float32)
    if scaling is None:
        report = oracle.check("drelu", {"dy": x, "x": x}, {"dx": x, "dbias": np.ones(shape[-1], np.float32)})
    else:
        q = refops.quantize(x, scaling)
        outputs = {name: getattr(q, name) for name in ("rowwise_data", "rowwise_scale_inv", "amax_rowwise")}
        changed = {n: np.full_like(a, 3) for n, a in outputs.items() if a is not None}
        report = oracle.check("quantize", x, changed, scaling=scaling, padding="zero")
    assert not report.diagnosis and not any("failed" in note for note in report.notes)
    assert str(report)


def test_an_array_whose_conversion_raises_is_named():
    """In inputs and outputs: torch tensors without memory, of another layout, of a dtype that NumPy lacks; others."""
    torch = pytest.importorskip("torch")

    class Raises:
        def __array__(self, dtype=None, copy=None):
            raise RuntimeError("none\ntoday")

    class Refuses:
        def __dlpack__(self, **options):
            raise BufferError("none\ntoday")

    tensor = torch.from_numpy(X)
    bad = [tensor.to("meta"), tensor.to_sparse(), torch.empty(X.shape, dtype=torch.uint4), Raises(), Refuses()]
    bad += [torch.complex(tensor, tensor).conj(), [row.bfloat16() for row in tensor]]
    for given in bad:
        for name, inputs, output in (("x", given, X), ("y", X, given)):
            with pytest.raises(TypeError, match=rf"^{name} must convert to a NumPy array; got \w+: .+") as error:
                oracle.check("gelu", inputs, output)
            assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_use_says_what_was_expected(name):
    arguments, options, error, message = BAD_CALLS[name]
    with pytest.raises(error, match=message):
        oracle.check(*arguments, **options)


@pytest.mark.parametrize(
    "scaling", [MXFP8, refops.NVFP4Scaling(), refops.CurrentScaling(E4M3)], ids=["mxfp8", "nvfp4", "current"]
)
def test_codes_that_are_right_under_the_right_scales_are_called_so(scaling):
    """Under other scales they are wrong, and counted; no example and no picture shows them."""
    x = np.random.default_rng(0).standard_normal((96, 160)).astype(BF16)
    q = refops.quantize(x, scaling)
    scales = q.rowwise_scale_inv
    scales = scales * 2 if scales.dtype == F else refops.swizzle(scales)
    report = oracle.check("quantize", x, {"data": q.rowwise_data, "scale": scales}, scaling=scaling)
    codes, wrong = report.arrays
    assert 0 < codes.wrong == codes.misread and not (codes.first or codes.worst or codes.picture or codes.box)
    line = f"15,360 codes right under the right scales; {codes.wrong:,} ("
    assert line in str(report) and "codes wrong" not in str(report) and wrong.first
    assert all(mismatch.array == "rowwise_scale_inv" for mismatch in report.mismatches)


def test_examples_leave_out_codes_whose_scale_is_at_fault():
    x = np.random.default_rng(0).standard_normal((96, 160)).astype(BF16)
    q = refops.quantize(x, MXFP8)
    codes, scales = q.rowwise_data.copy(), q.rowwise_scale_inv.copy()
    scales[0, 0] += 3
    codes[50, 70] ^= 0x40
    report = oracle.check("quantize", x, {"data": codes, "scale": scales}, scaling=MXFP8)
    found = report.arrays[0]
    assert found.wrong == found.misread + 1 and [m.index for m in found.first] == [(50, 70)]
    assert f"{found.misread:,} of these are right under the right scales, and left out below" in str(report)
    assert "all in row 50, column 70 of 96 x 160" in str(report)


def test_where_entries_are_wrong_is_said_with_their_period():
    x = np.random.default_rng(0).standard_normal((96, 160)).astype(BF16)
    codes = refops.quantize(x, MXFP8).rowwise_data.copy()
    codes[15::16, 7::8] ^= 3
    report = oracle.check("quantize", x, {"data": codes}, scaling=MXFP8, diagnose=False)
    assert "all in row 15 of every 16, column 7 of every 8 of 96 x 160" in str(report)
    assert report.as_dict()["arrays"][0]["place"]["rows"]["period"] == 16


@pytest.mark.parametrize(
    ("marked", "words"),
    [
        ([27], "row 27"),
        ([0, 95], ""),
        ([3, 19], "rows 3..19"),
        (range(16, 40), "rows 16..39"),
        (range(1, 96, 2), "odd rows"),
        (range(20, 60, 4), "row 0 of every 4 within rows 20..56"),
        ([i for i in range(96) if i % 32 in (8, 9)], "rows 8..9 of every 32"),
        ([15, 31, 32, 47, 63], "rows 15..63"),
    ],
)
def test_the_fewest_lines_around_marked_ones(marked, words):
    mask = np.zeros(96, bool)
    mask[list(marked)] = True
    lines = Lines.around(mask)
    assert lines.mask()[mask].all() and lines.words("row") == words
