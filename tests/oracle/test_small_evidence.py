"""Little is wrong, or by little: a diagnosis says what it is, and no more than such evidence carries. Common slips."""

import ml_dtypes
import numpy as np
import pytest

import refops
from refops import oracle
from refops.quantization.hadamard import transform_groups
from refops.scalings.declaration import FLT_MAX

F = np.float32
BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = refops.E4M3


def normal(shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape, F)


@pytest.mark.parametrize("steps", [1, -1, 3])
@pytest.mark.parametrize("scaling", [refops.DelayedScaling(E4M3, scale=100.3), refops.CurrentScaling(E4M3)])
def test_a_reciprocal_that_is_off_in_the_last_place(scaling, steps):
    x = normal((256, 256))
    q = refops.quantize(x, scaling)
    inverse = (q.rowwise_scale_inv.view(np.int32) + np.int32(steps)).view(F)
    report = oracle.check("quantize", x, {"data": q.rowwise_data, "scale": inverse}, scaling=scaling)
    assert report.leads == ("rowwise_data: right under the right scales; rowwise_scale_inv alone is wrong",)
    names = [answer.names for answer in report.diagnosis]
    assert ("inexact-reciprocal",) in names and not {("stale-scale",), ("stale-amax",)} & set(names)
    [answer] = [answer for answer in report.diagnosis if answer.names == ("inexact-reciprocal",)]
    assert answer.exact and f"{abs(steps)} unit" in str(answer) and "but that" not in str(answer)


def test_a_scale_that_is_another_one_keeps_its_name():
    x, scaling = normal((256, 256)), refops.DelayedScaling(E4M3, scale=100.3)
    q = refops.quantize(x, refops.DelayedScaling(E4M3, scale=100.4))
    report = oracle.check("quantize", x, {"data": q.rowwise_data, "scale": q.rowwise_scale_inv}, scaling=scaling)
    assert report.diagnosis[0].names == ("stale-scale",)


def test_few_right_codes_of_other_bits_are_no_harm_to_what_explains_the_scale():
    """Under a wrong scale all codes have to be those of the replay, but for the last bits of tanh."""
    rng = np.random.default_rng(5)
    x = (rng.standard_normal((300, 200)) * 1.5).astype(F).astype(BF16)
    dy = (rng.standard_normal((300, 200)) * 0.2).astype(F).astype(BF16)
    scaling = refops.DelayedScaling(E4M3, scale=100.3)
    q = refops.activation_grad_quantize("gelu", dy, x, scaling)
    zeros = np.argwhere((oracle.acceptable("dgelu", {"dy": dy, "x": x}, dtype=F).upper >= 0) & (q.rowwise_data == 0x80))
    assert len(zeros)
    q.rowwise_data[tuple(zeros.T)] = 0
    outputs = {"data": q.rowwise_data, "scale": q.rowwise_scale_inv}
    assert oracle.check("dgelu", {"dy": dy, "x": x}, outputs, scaling=scaling).ok
    outputs["scale"] = 1 / q.rowwise_scale_inv
    answer = oracle.check("dgelu", {"dy": dy, "x": x}, outputs, scaling=scaling).diagnosis[0]
    assert answer.names == ("inverted-scale",) and answer.explained == 1 and "but that" not in str(answer)


def test_a_multiplier_that_is_low_in_the_last_place_is_no_factor():
    """It moves ties alone, which a cast with ties towards zero moves too: the answer says so."""
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((96, 160)) * rng.choice([0.05, 0.3, 1], (1, 160))).astype(F).astype(BF16)
    scaling = refops.NVFP4Scaling()
    q = refops.quantize(x, scaling)
    values = x.astype(F).reshape(96, 10, 16)
    scales = E4M3.values[q.rowwise_scale_inv[:96, :10]].astype(F)
    encode = F(448 * 6) / np.abs(values).max()
    multiplier = np.minimum(F(1) / (scales * (F(1) / encode)), FLT_MAX).astype(F)
    outputs = {"scale": q.rowwise_scale_inv, "amax": q.amax_rowwise}
    for factor, ok in ((multiplier, True), (np.nextafter(multiplier, F(0)), False)):
        scaled = (values * factor[..., None]).astype(F).reshape(96, 160)
        codes = refops.encode(scaled, refops.E2M1)
        outputs["data"] = codes if codes.shape[1] == 80 else codes[:, 0::2] | (codes[:, 1::2] << 4)
        report = oracle.check("quantize", x, outputs, scaling=scaling)
        assert report.ok == ok
    assert all("constant-factor" not in answer.names for answer in report.diagnosis)
    assert "after a multiplier one unit in the last place too low" in str(report.diagnosis[0])


@pytest.mark.parametrize(
    ("factor", "said", "dtype"), [(0.25, "factor, 1/4.", BF16), (0.5, "factor, 1/2.", F), (0.7, "factor, 0.7", F)]
)
def test_a_factor_of_a_product_is_a_simple_one_where_it_can_be(factor, said, dtype):
    scaling = refops.MXFP8Scaling(E4M3)
    a, b = (refops.quantize(normal((rows, 256), rows), scaling) for rows in (64, 96))
    y = (F(factor) * (refops.dequantize(a) @ refops.dequantize(b).T)).astype(dtype)
    answer = oracle.check("matmul", {"a": a, "b": b}, y).diagnosis[0]
    assert answer.names == ("other-factor",)
    assert said in answer.sentence


def test_one_scale_of_a_power_of_two_has_many_causes():
    """128 x 128 blocks, the amax of half of each: tile rows scaled by those of the next ones would have the same."""
    rng = np.random.default_rng(9)
    x = (rng.standard_normal((300, 328)) * np.exp(rng.standard_normal((300, 1)))).astype(F).astype(BF16)
    scaling = refops.BlockScaling(E4M3)
    part = x.copy()
    for start in range(0, 300, 128):
        part[start + 64 : start + 128] = 0
    scales = refops.quantize(part, scaling).rowwise_scale_inv
    right = refops.quantize(x, scaling).rowwise_scale_inv
    assert np.count_nonzero(scales != right) == 1
    factor = np.repeat(np.repeat(1 / scales[:, :3], 128, 0), 128, 1)[:300, :328]
    codes = refops.encode((x.astype(F) * factor).astype(F), E4M3)
    report = oracle.check("quantize", x, {"data": codes, "scale": scales}, scaling=scaling)
    first, *others = report.diagnosis
    assert first.names == ("block-amax-of-a-part",) and first.exact and "first half" in str(first), str(report)
    assert ("neighbour-line-scale",) in [answer.names for answer in others]


# --- right by the bound, and yet worth a note ------------------------------------------------------------------------


def product_of_current_scaling(k):
    scaling = refops.CurrentScaling(E4M3)
    a, b = (refops.quantize(normal((rows, k), rows), scaling) for rows in (64, 96))
    left, right = (refops.dequantize(operand).astype(np.float64) for operand in (a, b))
    return {"a": a, "b": b}, left @ right.T


def test_results_of_few_bits_are_right_with_a_note():
    inputs, y = product_of_current_scaling(512)
    y = y.astype(F)
    assert not [note for note in oracle.check("matmul", inputs, y).notes if "zero" in note or "factor" in note]
    report = oracle.check("matmul", inputs, (y.view(np.uint32) & np.uint32(0xFFFFE000)).view(F))
    assert report.ok and "the last 13 bits of every value are zero" in str(report) and "11 bits (TF32" in str(report)


def test_a_common_factor_within_the_bound_is_right_with_a_note():
    inputs, y = product_of_current_scaling(2048)
    report = oracle.check("matmul", inputs, (y * (1 + 2.0**-12)).astype(F))
    assert report.ok and "a common factor, 1.000244 = 1 + 2^-12.0" in str(report)


@pytest.mark.full
def test_values_outside_the_bound_of_float32_sums_are_counted():
    inputs, y = product_of_current_scaling(2048)
    y[5, 7] += 0.02 * np.sqrt((y**2).mean())
    report = oracle.check("matmul", inputs, y.astype(F))
    assert report.ok and report.order == "short"
    assert "outside the bound of float32 sums: 1 of 6,144 values" in str(report)


# --- common slips ----------------------------------------------------------------------------------------------------


def first_of(op, inputs, outputs, **options):
    report = oracle.check(op, inputs, outputs, **options)
    assert not report.ok and report.diagnosis, str(report)
    return report.diagnosis[0]


def test_halves_that_are_multiplied_without_the_function():
    x = normal((64, 256))
    answer = first_of("swiglu", x, x[:, :128] * x[:, 128:])
    assert answer.names == ("function-missing",) and answer.exact


def test_a_delayed_scale_that_is_not_updated():
    history, scale = np.abs(normal((4, 3))), np.array([3, 5, 7], F)
    rolled, _ = refops.update_delayed_scale(history.copy(), scale.copy(), E4M3)
    inputs = {"amax_history": history, "scale": scale}
    outputs = {"amax_history": rolled, "scale": scale}
    answer = first_of("update_delayed_scale", inputs, outputs, params={"fmt": E4M3})
    assert answer.names == ("scale-not-updated",) and answer.exact


@pytest.mark.parametrize("slot", ["columnwise", "rowwise"])
def test_an_amax_of_the_other_copy(slot):
    scaling, x = refops.NVFP4Scaling(rht=True), normal((96, 160)).astype(BF16)
    q = refops.quantize(x, scaling, columnwise=True)
    assert q.amax_rowwise != q.amax_columnwise
    outputs = {name: array for name, array in vars(q).items() if isinstance(array, np.ndarray)}
    outputs[f"amax_{slot}"] = {"rowwise": q.amax_columnwise, "columnwise": q.amax_rowwise}[slot]
    answer = first_of("quantize", x, outputs, scaling=scaling)
    assert answer.names == ("amax-slot-of-other-copy",) and f"slot of the {slot} amax" in answer.sentence


@pytest.mark.parametrize(
    ("kept", "name", "said"),
    [
        (lambda k: k < 128, "terms-missing", "those from 128 to 319 of 320"),
        (lambda k: (k < 17) | (k >= 40), "terms-missing", "those from 17 to 39 of 320"),
    ],
)
def test_a_long_run_of_terms_that_are_missing(kept, name, said):
    a, b = (refops.quantize(normal((rows, 320), rows), refops.MXFP8Scaling(E4M3)) for rows in (64, 96))
    left = refops.dequantize(a) * kept(np.arange(320))
    answer = first_of("matmul", {"a": a, "b": b}, (left @ refops.dequantize(b).T).astype(F))
    assert answer.names == (name,) and said in answer.sentence


@pytest.mark.parametrize(
    ("moved", "name", "said"),
    [
        (lambda s: np.repeat(s[:, ::2], 2, axis=1), "scale-of-several-blocks", "2 blocks of a along k"),
        (lambda s: s.T.reshape(s.shape), "scales-transposed", "of a are transposed, but read as they were"),
        (lambda s: s.reshape(s.shape[::-1]).T, "scales-transposed", "of a are read transposed, without their padding"),
    ],
)
def test_other_scales_of_a_product(moved, name, said):
    a, b = (refops.quantize(normal((rows, 320), rows), refops.MXFP8Scaling(E4M3)) for rows in (64, 96))
    scales = np.ldexp(F(1), a.rowwise_scale_inv[:64, :10].astype(int) - 127)
    left = E4M3.values[a.rowwise_data] * np.repeat(moved(scales), 32, axis=1)
    answer = first_of("matmul", {"a": a, "b": b}, (left @ refops.dequantize(b).T).astype(F))
    assert answer.names == (name,) and said in answer.sentence


@pytest.mark.parametrize("shape", [(384, 384), (600, 700)])
def test_scales_of_squares_in_the_other_order(shape):
    """[K / 128, M / 128] one after another, in rows that are padded as the right ones are."""
    rng = np.random.default_rng(2)
    x = (rng.standard_normal(shape) * np.exp(2 * rng.standard_normal((1, shape[1])))).astype(F).astype(BF16)
    scaling = refops.BlockScaling(E4M3)
    q = refops.quantize(x, scaling)
    valid = q.rowwise_scale_inv[:, : -(-shape[1] // 128)]
    scales = np.zeros_like(q.rowwise_scale_inv)
    scales[:, : valid.shape[1]] = np.ascontiguousarray(valid.T).reshape(valid.shape)
    answer = first_of("quantize", x, {"data": q.rowwise_data, "scale": scales}, scaling=scaling)
    assert answer.names == ("scales-transposed",)


@pytest.mark.parametrize(
    ("summed", "name"),
    [
        (lambda dx: dx.sum(axis=1), "dbias-along-other-axis"),
        (lambda dx: dx[:-8].sum(axis=0), "dbias-last-chunk-missing"),
    ],
)
def test_a_bias_gradient_of_other_elements(summed, name):
    x, dy = normal((256, 256)).astype(BF16), normal((256, 256), 2).astype(BF16)
    dbias = summed(refops.activation_grad("gelu", dy.astype(F), x.astype(F))).astype(BF16)
    scaling = refops.DelayedScaling(E4M3, scale=8.0)
    answer = first_of("dgelu", {"x": x, "dy": dy}, {"dbias": dbias}, scaling=scaling)
    assert answer.names == (name,)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_rowwise_copy_that_is_transformed_too(axis):
    x, scaling = normal((96, 160)).astype(BF16), refops.NVFP4Scaling(rht=True)
    q = refops.quantize(x, scaling, columnwise=True)
    along = x if axis == 0 else np.ascontiguousarray(x.T)
    transformed = transform_groups(along.reshape(-1, 16, along.shape[1]), scaling.hadamard, BF16).reshape(along.shape)
    wrong = refops.quantize(transformed if axis == 0 else np.ascontiguousarray(transformed.T), refops.NVFP4Scaling())
    outputs = {name: getattr(wrong, name) for name in ("rowwise_data", "rowwise_scale_inv", "amax_rowwise")}
    outputs |= {name: getattr(q, name) for name in ("columnwise_data", "columnwise_scale_inv", "amax_columnwise")}
    answer = first_of("quantize", x, outputs, scaling=scaling)
    assert answer.names == ("hadamard-rowwise-too",) and ("along columns" in answer.sentence) == (axis == 0)


def test_a_tanh_of_the_special_function_unit():
    """tanh.approx: a relative error of up to 2^-11."""
    x = normal((128, 128)) * 2
    inner = F(0.79788456) * x * (1 + F(0.044715) * x * x)
    tanh = np.tanh(inner.astype(np.float64)) * (1 + 2.0**-11 * np.sin(1e4 * inner))
    answer = first_of("gelu", x, (F(0.5) * x * (1 + tanh)).astype(F))
    assert answer.names == ("approximate-elementary",) and answer.explained > 0.999


def through_coarse_tanh(x, error=2.0**-11):
    """sigmoid(x) through a tanh with a relative error of up to `error`."""
    tanh = np.tanh(x.astype(np.float64) / 2) * (1 + error * np.sin(1e4 * x.astype(np.float64)))
    return F(0.5) + F(0.5) * tanh.astype(F)


@pytest.mark.parametrize("dtype", [F, BF16])
@pytest.mark.parametrize("op", ["silu", "swiglu", "dsilu"])
def test_a_sigmoid_through_the_tanh_of_the_special_function_unit(op, dtype):
    """Its error is absolute: 2^-12, more than the sigmoid itself below -8.3."""
    x, other = (normal((128, 256), seed).astype(dtype).astype(F) * 4 for seed in (1, 2))
    sigmoid = through_coarse_tanh(x)
    inputs, made = {
        "silu": ({"x": x}, x * sigmoid),
        "swiglu": ({"x": np.hstack([x, other])}, x * sigmoid * other),
        "dsilu": ({"x": x, "dy": other}, (x * (sigmoid * (F(1) - sigmoid)) + sigmoid) * other),
    }[op]
    answer = first_of(op, {name: array.astype(dtype) for name, array in inputs.items()}, made.astype(dtype))
    assert answer.names == ("approximate-elementary",) and answer.explained > 0.999
    assert "0.5 + 0.5 tanh(x / 2)" in answer.sentence and "by 8192 ulp where 2 are permitted" in answer.sentence


@pytest.mark.parametrize(
    "fault",
    [
        lambda x, sigmoid: np.where(x < -8.5, F(0), x * sigmoid),
        lambda x, sigmoid: np.where(x < -9, x * F(2.0**-13), x * sigmoid),
        lambda x, sigmoid: np.where(x < -3, x * through_coarse_tanh(x), x * sigmoid),
        lambda x, sigmoid: x * through_coarse_tanh(x, 2.0**-9),
        lambda x, sigmoid: x * (sigmoid + F(2.0**-12) * np.sin(F(1e4) * x)),
    ],
    ids=["zeros", "tail", "one side", "4 times as far", "not relative to tanh"],
)
def test_other_errors_of_a_sigmoid_are_none_of_tanh(fault):
    x = normal((256, 256), 1) * 6
    report = oracle.check("silu", x, fault(x, 1 / (1 + np.exp(-x))).astype(F))
    assert not report.ok
    assert all("tanh(x / 2)" not in answer.sentence for answer in report.diagnosis), str(report)
