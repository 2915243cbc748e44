"""`oracle.check("matmul", ...)`: right products of every order are right, wrong ones are named."""

import json
from dataclasses import replace

import numpy as np
import product_faults
import pytest
from product_faults import BF16, E4M3, E5M2, FP16, FP32, SCALINGS, Given, decoded

import refops
from refops import oracle
from refops.oracle.products import ProductCase
from refops.products import gemm
from tiers import sampled

F = np.float32
SHAPES = ((64, 96, 256), (96, 64, 384), (32, 96, 160))
RNG = np.random.default_rng(24)


def tensor(rows, k, seed, size=0.3):
    """bfloat16, rows of different sizes and blocks of different sizes along k, so that scales differ."""
    rng = np.random.default_rng(seed)
    blocks = np.exp2(rng.integers(-2, 3, -(-k // 16)).repeat(16)[:k] + 2 * (np.arange(k) // 128))
    sizes = np.exp(rng.standard_normal((rows, 1))) * blocks
    return (size * rng.standard_normal((rows, k)) * sizes).astype(BF16)


def quantized(name, shape, seed=0, **options):
    """Both operands of a product, quantized."""
    m, n, k = shape
    scaling = SCALINGS[name]
    other = refops.DelayedScaling(E4M3, scale=40.0) if name == "delayed" else scaling
    a, b = tensor(m, k, 2 * seed), tensor(n, k, 2 * seed + 1, 0.02)
    return refops.quantize(a, scaling, **options), refops.quantize(b, other, **options)


def judged(a, b, y, inputs=(), **options):
    """The report on a product."""
    return oracle.check("matmul", {"a": a, "b": b, **dict(inputs)}, y, **options)


# --- right products are right ---------------------------------------------------------------------


def in_order(a, b, order):
    """float32 sums of the products of (m, k) and (n, k) in some order."""
    rng, k = np.random.default_rng(3), a.shape[1]
    a, b = a.astype(F), b.astype(F)
    if order == "float64":
        return (a.astype(np.float64) @ b.astype(np.float64).T).astype(F)
    if order == "library":
        return a @ b.T
    places = rng.permutation(k) if order == "shuffled" else np.arange(k)
    products = a[:, None, places] * b[None, :, places]
    if order == "tree":
        while products.shape[2] > 1:
            if products.shape[2] % 2:
                products = np.concatenate([products, np.zeros_like(products[:, :, :1])], axis=2)
            products = products[:, :, 0::2] + products[:, :, 1::2]
        return products[:, :, 0]
    if order == "split":
        parts = [np.cumsum(part, axis=2, dtype=F)[:, :, -1] for part in np.array_split(products, 3, axis=2)]
        return parts[2] + (parts[0] + parts[1])
    if order == "cut off":  # toward zero after each addition
        total = np.zeros(products.shape[:2], F)
        for place in range(k):
            exact = total.astype(np.float64) + products[:, :, place].astype(np.float64)
            total = exact.astype(F)
            total = np.where(np.abs(total) > np.abs(exact), np.nextafter(total, F(0)), total)
        return total
    return np.cumsum(products, axis=2, dtype=F)[:, :, -1]


ORDERS = ("float64", "library", "in turn", "shuffled", "tree", "split", "cut off")


@sampled(("name", "order"), [(name, order) for order in ORDERS for name in SCALINGS], 17)
def test_every_order_of_float32_sums_is_right(name, order):
    for seed, dtype in enumerate((FP32, FP16, BF16)):
        a, b = quantized(name, (32, 64, 192), seed)
        left, right = decoded(a), decoded(b)
        sums = in_order(left.spread(), right.spread(), order)
        y = (sums * F(left.factor * right.factor)).astype(dtype)
        report = judged(a, b, y)
        assert report.ok and report.order in ("float32", "card"), str(report)
        dequantized = in_order(refops.dequantize(a), refops.dequantize(b), order).astype(dtype)
        assert judged(a, b, dequantized).ok


@sampled("name", [*SCALINGS, "bfloat16", "float16"], 5)
@pytest.mark.parametrize("card", ["ampere", "hopper", "blackwell"])
def test_the_bits_of_a_card_are_recognised(name, card):
    for seed, shape in enumerate([(32, 64, 256), (64, 32, 160)]):
        if name in SCALINGS:
            a, b = quantized(name, shape, seed)
        else:
            m, n, k = shape
            a, b = (tensor(rows, k, seed + rows).astype(F).astype(name) for rows in (m, n))
        try:
            results = {split: gemm(b, a, card, out_dtype=F, use_split_accumulator=split) for split in (False, True)}
        except ValueError as error:
            with pytest.raises(ValueError, match="card must have a unit"):
                judged(a, b, np.zeros(shape[:2], F), params={"card": card})
            assert "card must have" in str(error)
            return
        for split, y in results.items():
            report = judged(a, b, y)
            assert report.ok and report.order == "card"
            assert any(one.startswith(card) for one in report.cards)
            strict = judged(a, b, y, params={"card": card, "split_accumulator": split})
            assert strict.ok and len(strict.cards) == 1 and strict.compared == y.size
            assert judged(a, b, y, params={"card": card}).ok
        changed = results[False].copy()
        changed[3, 5] = np.nextafter(changed[3, 5], F(np.inf))
        wrong = judged(a, b, changed, params={"card": card, "split_accumulator": False}, diagnose=False)
        assert [array.wrong for array in wrong.arrays] == [1] and wrong.mismatches[0].index == (3, 5)


def test_a_cards_order_is_told_from_another_promotion():
    a, b = quantized("current", (32, 32, 384))
    y = gemm(b, a, "hopper", out_dtype=F, use_split_accumulator=True)
    assert judged(a, b, y).cards == ("hopper, promoted after every 128 products",)
    report = judged(a, b, y, params={"card": "hopper", "split_accumulator": False}, diagnose=False)
    assert not report.ok and "judged by the bits of hopper" in report.notes
    report = judged(a, b, y + F(1), params={"card": "hopper"}, diagnose=False)
    assert any("the nearer of hopper and hopper, promoted after every 128" in note for note in report.notes)


def test_a_result_that_has_not_the_bits_of_the_others():
    """It is within what Hopper's FP8 unit may give, and right; the report says so."""
    a, b = quantized("current", (96, 96, 512))
    y = gemm(b, a, "hopper", out_dtype=F)
    assert judged(a, b, y).compared == y.size
    y[50, 51] = np.nextafter(y[50, 51], F(0))
    report = judged(a, b, y)
    assert report.ok and report.order == "short"
    assert "1 of 9,216 values do not have the bits of hopper, which the others have" in report.notes


@pytest.mark.parametrize("name", ["current", "block"])
def test_short_sums_are_right_where_the_card_adds_them(name):
    """Hopper's sums of k in two parts, added in float32: with scales of blocks that is its own order."""
    for seed in range(2):
        a, b = quantized(name, (48, 32, 512), seed)
        y = sum(
            gemm(_columns(b, part), _columns(a, part), "hopper", out_dtype=F)
            for part in (slice(0, 384), slice(384, 512))
        )
        report = judged(a, b, y)
        assert report.ok, str(report)
        assert report.order == {"current": "short", "block": "card"}[name]
        if name == "current":
            assert "13 bits" in report.leads[0] and report.diagnosis == ()


def _columns(q, part):
    """Some columns of a tensor, whole blocks of them."""
    scales = q.rowwise_scale_inv
    if scales.size > 1:
        scales = np.ascontiguousarray(scales[part.start // 128 : part.stop // 128])
    shape = (q.shape[0], part.stop - part.start)
    return replace(q, rowwise_data=q.rowwise_data[:, part].copy(), rowwise_scale_inv=scales, shape=shape)


# --- wrong ones are found and named ---------------------------------------------------------------


def planted_cases():
    for name in SCALINGS:
        for seed in range(len(SHAPES)):
            given = given_of(name, seed)[0]
            shown = (number for number, fault in enumerate(product_faults.FAULTS) if fault.shows(name, given))
            yield from ((number, name, seed) for number in shown)


def given_of(name, seed):
    """A product with what it adds: `Given`, inputs and parameters of `oracle.check`; seeds take shapes in turn."""
    m, n, _ = shape = SHAPES[seed]
    rng = np.random.default_rng(seed)
    a, b = quantized(name, shape, seed)
    given = Given(decoded(a), decoded(b), (FP32, BF16, FP16)[seed])
    inputs, params = {"a": a, "b": b}, {}
    if seed:
        given.bias = inputs["bias"] = rng.standard_normal(n).astype(F)
        given.alpha = params["alpha"] = 0.75
    if seed == 2:
        given.c = inputs["c"] = rng.standard_normal((m, n)).astype(F)
        given.beta = params["beta"] = 0.5
    return given, inputs, params


@sampled(("number", "name", "seed"), sorted(planted_cases()), 131, in_all=150)
def test_planted_faults_are_named(number, name, seed):
    planted, (given, inputs, params) = product_faults.FAULTS[number], given_of(name, seed)
    with np.errstate(all="ignore"):
        y, right = planted.function(given), given.finished(given.product())
    assert oracle.check("matmul", inputs, right, params=params).ok
    report = oracle.check("matmul", inputs, y, params=params, budget=None)
    assert not report.ok
    assert report.diagnosis and report.diagnosis[0].names == (planted.name,), str(report)
    assert report.diagnosis[0].explained > 0.9


def test_a_fault_in_some_rows_is_placed():
    a, b = quantized("mxfp8", (96, 64, 256))
    given = Given(decoded(a), decoded(b))
    y = given.finished(given.product())
    y[64:] = product_faults.b_scales_missing(given)[64:]
    explanation = judged(a, b, y).diagnosis[0]
    assert explanation.names == ("scales-missing",)
    assert (explanation.place.rows.first, explanation.place.rows.last) == (64, 95)
    assert explanation.place.columns is None and "in rows 64..95 only" in str(explanation)


@sampled(
    ("name", "value"), [(name, value) for name in ("mxfp8", "nvfp4", "current") for value in (np.nan, np.inf, 40.0)], 4
)
def test_one_wrong_result_shows_no_fault(name, value):
    """A NaN, or any number, is what some fault gives at one place: that is no reason to name it."""
    a, b = quantized(name, (64, 96, 128))
    y = (refops.dequantize(a) @ refops.dequantize(b).T).astype(BF16)
    y[5, 7] = value if not np.isfinite(value) else value * np.abs(y.astype(F)).max()
    report = judged(a, b, y, budget=0.5)
    assert not report.ok and report.arrays[0].wrong == 1 and report.diagnosis == (), str(report)


def test_a_clamp_at_zero_is_no_result_that_was_not_written():
    a, b = quantized("mxfp8", (64, 96, 128))
    y = np.maximum(refops.dequantize(a) @ refops.dequantize(b).T, 0)
    assert judged(a, b, y).diagnosis[0].names == ("activation-applied",)


def test_two_faults_at_once():
    a, b = (tensor(rows, 48, rows).astype(F) for rows in (24, 32))
    bias = RNG.standard_normal(32).astype(F)
    report = judged(a, b, a @ b.T, {"bias": bias}, params={"alpha": 2}, budget=None)
    assert report.diagnosis[0].names == ("alpha-missing", "bias-wrong"), str(report)
    assert report.diagnosis[0].sentence == "alpha, 2, is missing; besides: The bias is not added."


def test_noise_has_no_name():
    a, b = quantized("mxfp8", (64, 96, 128))
    y = refops.dequantize(a) @ refops.dequantize(b).T
    noisy = y * (1 + 0.2 * RNG.standard_normal(y.shape)).astype(F)
    report = judged(a, b, noisy, budget=0.5)
    assert not report.ok and report.diagnosis == ()
    assert "diagnosis: unknown" in str(report)


def test_plain_operands():
    for dtype in (FP32, FP16, BF16):
        a, b = (tensor(rows, 192, rows, 0.1).astype(F).astype(dtype) for rows in (48, 64))
        y = (a.astype(np.float64) @ b.astype(np.float64).T).astype(F).astype(dtype)
        assert judged(a, b, y).ok
        report = judged(a, b, (a.astype(F) @ b.astype(F).reshape(192, 64)).astype(dtype))
        assert report.diagnosis[0].names == ("operand-transposed",) and report.diagnosis[0].sentence.count(" b ")
    a, b = (tensor(rows, 192, rows).astype(F) * F(1.2345) for rows in (48, 64))
    tf32 = ((x.view(np.uint32) & np.uint32(0xFFFFE000)).view(F) for x in (a, b))
    report = judged(a, b, np.matmul(next(tf32), next(tf32).T))
    assert report.diagnosis[0].names == ("operand-rounded",) and "TF32" in report.diagnosis[0].sentence


def test_one_plain_operand():
    a, b = refops.quantize(tensor(32, 128, 1), SCALINGS["current"]), tensor(48, 128, 2)
    y = refops.dequantize(a) @ b.astype(F).T
    report = judged(a, b, y)
    assert report.ok and report.order == "float32" and "no card has this product" in report.leads[0]
    report = judged(a, b, decoded(a).elements.astype(F) @ b.astype(F).T)
    assert report.diagnosis[0].names == ("scales-missing",)
    with pytest.raises(ValueError, match="card must have a unit"):
        judged(a, b, y, params={"card": "hopper"})


def test_the_copy_that_does_not_run_along_the_sums():
    m, n, k = 64, 64, 128
    a, b = (refops.quantize(tensor(rows, k, rows), SCALINGS["nvfp4"], columnwise=True) for rows in (m, n))
    wrong = decoded(a).values @ decoded(b, columnwise=True).values
    report = judged(a, b, wrong.astype(F))
    assert report.diagnosis[0].names == ("other-copy",), str(report)
    assert "columnwise copy of b is read" in report.diagnosis[0].sentence


def test_codes_of_the_other_copy_under_the_scales_of_this_one():
    a, b = (refops.quantize(tensor(64, 128, seed), SCALINGS["mxfp8"], columnwise=True) for seed in (5, 6))
    codes = decoded(b, columnwise=True).elements.T  # they lie as the rowwise ones do
    wrong = decoded(a).values @ replace(decoded(b), elements=codes).values.T
    report = judged(a, b, wrong.astype(F))
    assert report.diagnosis[0].names == ("other-copy",), str(report)
    assert "under the scales of the rowwise one" in report.diagnosis[0].sentence


def hopper_faults(a, b, bias):
    """Wrong products, their sums those of Hopper's FP8 unit."""

    def right(a, b, **options):
        return gemm(b, a, "hopper", out_dtype=F, **options)

    ones = replace(a, rowwise_scale_inv=np.ones_like(a.rowwise_scale_inv))
    yield "scales-missing", right(ones, b, bias=bias)
    yield "bias-wrong", right(a, b)
    yield "rounded-before-adding", right(a, b).astype(BF16).astype(F) + bias
    yield "result-transposed", np.ascontiguousarray(right(a, b, bias=bias).T).reshape(len(right(a, b)), -1)
    yield "activation-applied", np.maximum(right(a, b, bias=bias), 0)
    if a.scaling.layout.block is None:
        yield "sums-in-half", right(a, b, bias=bias, accumulator=np.float16)


@sampled(("name", "seed"), [(name, seed) for seed in range(4) for name in ("current", "block")], 8)
def test_faults_are_named_where_hopper_adds(name, seed):
    a, b = quantized(name, (32, 64, 384), seed)
    bias = (100 * np.random.default_rng(seed).standard_normal(64)).astype(F)
    for fault, y in hopper_faults(a, b, bias):
        report = judged(a, b, y, {"bias": bias}, budget=None)
        assert not report.ok and report.diagnosis[0].names == (fault,), (fault, str(report))


# --- sums in 16 bits, lines that stand elsewhere, results that were not written --------------------


def kept_in(dtype, left, right, step):
    """float32 sums that are rounded to a dtype after every step."""
    total = np.zeros((len(left), len(right)), dtype)
    for start in range(0, left.shape[1], step):
        part = slice(start, start + step)
        with np.errstate(over="ignore", invalid="ignore"):
            total = (total.astype(F) + left[:, part] @ right[:, part].T).astype(dtype)
    return total.astype(F)


HALVES = [(dtype, step) for dtype in (BF16, FP16) for step in (1, 16, 64)]


@sampled(("name", "dtype", "step"), [(name, *how) for name in ("current", "block", "nvfp4") for how in HALVES], 5)
def test_sums_in_half_of_operands_that_were_scaled_first(name, dtype, step):
    """They lie within what Hopper's FP8 unit may give where there are few roundings, and are wrong all the same."""
    a, b = (refops.quantize(RNG.standard_normal((32, 256), F), SCALINGS[name]) for _ in "ab")
    left, right = refops.dequantize(a), refops.dequantize(b)
    narrow = [one.astype(dtype).astype(F) for one in (left, right)]
    for operands in ((left, right), narrow):
        y = kept_in(dtype, *operands, step)
        report = judged(a, b, y, budget=None)
        assert not report.ok and report.order == "wrong"
        assert report.diagnosis[0].names == ("sums-in-half",), str(report)
        assert f"kept in {dtype.name}" in report.diagnosis[0].sentence


def test_sums_in_half_within_blocks():
    """Sums of codes in bfloat16 within each block, promoted to float32 with the scales of the block."""
    a, b = quantized("mxfp8", (32, 48, 256))
    left, right, y = decoded(a), decoded(b), np.zeros((32, 48))
    for block in range(8):
        part = slice(32 * block, 32 * block + 32)
        codes = (one.elements[:, part].astype(F) for one in (left, right))
        y += kept_in(BF16, *codes, 8) * left.scales[:, [block]] * right.scales[:, block]
    report = judged(a, b, y.astype(F), budget=None)
    assert report.diagnosis[0].names == ("sums-in-half",) and "within blocks of 32" in str(report.diagnosis[0])


def test_sums_in_half_that_overflow():
    rng = np.random.default_rng(0)
    a, b = (refops.quantize(rng.standard_normal((32, 256), F), SCALINGS["current"]) for _ in "ab")
    values = [decoded(q).elements.astype(F) for q in (a, b)]
    factor = F(decoded(a).factor * decoded(b).factor)
    for y in (kept_in(FP16, *values, 16) * factor, gemm(b, a, "hopper", out_dtype=F, accumulator=np.float16)):
        assert np.isinf(y).mean() > 0.9
        report = judged(a, b, y)
        assert report.diagnosis[0].names == ("sums-in-half",), str(report)
        assert "float16" in report.diagnosis[0].sentence and "some overflow" in report.diagnosis[0].sentence
    large = refops.quantize(1 + rng.random((32, 256), F), SCALINGS["current"])
    report = judged(large, large, gemm(large, large, "hopper", out_dtype=F, accumulator=np.float16))
    assert [one.names for one in report.diagnosis] == [("not-written",), ("sums-in-half",)], str(report)
    assert "all of them overflowed" in report.diagnosis[0].sentence


def not_written_cases():
    """Name -> (function from a right result (64, 96) to the dump, words of the place)."""

    def filled(rows, columns, value):
        def fill(y):
            y[rows, columns] = value
            return y

        return fill

    every = slice(None)
    yield "last row", filled(63, every, 0), "in row 63 only"
    yield "last columns", filled(every, slice(64, 96), 0), "in columns 64..95 only"
    yield "either zero", lambda y: y * F(0), ": The values of y hold 0x00000000"
    yield "0xff", filled(slice(48, 64), every, np.uint32(0xFFFFFFFF).view(F)), "in rows 48..63 only"
    yield "NaN", filled(slice(48, 64), every, np.nan), "in rows 48..63 only: The values of y hold NaN"
    yield "inf", filled(slice(48, 64), every, np.inf), "in rows 48..63 only: The values of y hold inf"


@pytest.mark.parametrize(
    ("make", "words"), [one[1:] for one in not_written_cases()], ids=[n for n, *_ in not_written_cases()]
)
@sampled("name", ["mxfp8", "current"], 2)
def test_results_that_were_not_written(name, make, words):
    a, b = quantized(name, (64, 96, 128))
    report = judged(a, b, make(refops.dequantize(a) @ refops.dequantize(b).T))
    assert [one.names for one in report.diagnosis] == [("not-written",)], str(report)
    assert words in str(report.diagnosis[0]) and report.diagnosis[0].explained == 1


@sampled("name", ["mxfp8", "current", "nvfp4"], 3, in_all=1)
def test_what_is_not_finite_alone_explains_nothing(name):
    """Many faults make NaN of some results: they are not named for one NaN, or for a few in some rows."""
    a, b = quantized(name, (64, 96, 128))
    for where in ((3, 4), (slice(3, 6), slice(0, 96, 3))):
        y = refops.dequantize(a) @ refops.dequantize(b).T
        y[where] = np.nan
        report = judged(a, b, y)
        assert not report.ok and report.diagnosis == (), str(report)


def elsewhere_cases():
    """(Name that a diagnosis gives, function from a right result (64, 96) to the dump, words of the place or "")."""
    yield "reversed-rows", lambda y: y[::-1], ""
    yield "reversed-columns", lambda y: y[:, ::-1], ""
    yield "shifted-rows", lambda y: np.roll(y, 1, axis=0), ""
    yield "shifted-columns", lambda y: np.roll(y, -2, axis=1), ""
    yield "swapped-rows", lambda y: y[np.arange(64) ^ 1], ""
    yield "shifted-rows", lambda y: np.concatenate([y[:32], y[:32]]), "rows 32..63"
    yield "repeated-columns", lambda y: y[:, np.arange(96) // 8 * 8], ""
    yield "transposed-tiles", lambda y: y.reshape(2, 32, 3, 32).transpose(0, 3, 2, 1).reshape(64, 96), ""


@sampled(("case", "name"), [(n, name) for n in range(8) for name in ("mxfp8", "current", "bfloat16")], 5)
def test_results_in_other_lines(case, name):
    fault, make, place = list(elsewhere_cases())[case]
    a, b = quantized("mxfp8" if name == "bfloat16" else name, (64, 96, 128))
    right = gemm(b, a, "hopper", out_dtype=F) if name == "current" else refops.dequantize(a) @ refops.dequantize(b).T
    y = np.ascontiguousarray(make(right.astype(BF16) if name == "bfloat16" else right))
    report = judged(a, b, y)
    assert report.diagnosis[0].names == (fault,), str(report)
    if name != "current":  # all of whose short sums are outside of the bound of float32 sums, in their places, too
        assert str(report.diagnosis[0].place or "") == place


@sampled("name", ["mxfp8", "current", "nvfp4"], 3, in_all=1)
def test_a_single_term(name):
    a, b = (refops.quantize(RNG.standard_normal((rows, 256), F), SCALINGS[name]) for rows in (48, 64))
    left, right = refops.dequantize(a), refops.dequantize(b)
    term = left[:, 100:101] @ right[:, 100:101].T
    for y, fault in ((left @ right.T - term, "terms-missing"), (left @ right.T + term, "terms-twice")):
        report = judged(a, b, y)
        assert report.diagnosis[0].names == (fault,), str(report)
        assert "number 100 of 256" in report.diagnosis[0].sentence


# --- sums of few bits ------------------------------------------------------------------------------


def test_errors_that_are_unusual_for_short_sums_are_wrong():
    rng = np.random.default_rng(0)
    a, b = (refops.quantize(rng.standard_normal((32, 1024), F), SCALINGS["current"]) for _ in "ab")
    exact = refops.dequantize(a) @ refops.dequantize(b).T
    noisy = exact + F(0.05 * np.abs(exact).mean()) * rng.choice([-1, 1], exact.shape).astype(F)
    row = exact.copy()
    row[5] *= F(1.01)
    for y, wrong_rows in ((noisy, range(32)), (row, [5])):
        report = judged(a, b, y, diagnose=False)
        assert not report.ok and report.order == "wrong" and report.bound == "float32"
        (top, bottom), _ = report.arrays[0].box
        assert (top, bottom) == (wrong_rows[0], wrong_rows[-1])
        assert any("'sums': 'short'" in note for note in report.notes)
        granted = judged(a, b, y, params={"sums": "short"})
        assert granted.ok and granted.order == granted.bound == "short" and granted.width > 0.05
        assert "sums of 13 bits in any order, within" in granted.headline()


@sampled(("kind", "k"), [(kind, k) for kind in ("normal", "outliers", "positive") for k in (256, 1024, 4096)], 3)
def test_short_sums_in_another_order_are_usual(kind, k):
    rng = np.random.default_rng(k)
    x = [rng.standard_normal((24, k), F) for _ in "ab"]
    for one in x if kind == "outliers" else ():
        one[:, ::37] *= 30
        one[0] *= F(0.01)
        one[1] = np.where(np.arange(k) == 5, F(3), F(0))
    a, b = (refops.quantize(np.abs(one) if kind == "positive" else one, SCALINGS["current"]) for one in x)
    places = rng.permutation(k)
    y = gemm(_columns_at(b, places), _columns_at(a, places), "hopper", out_dtype=F)
    report = judged(a, b, y, diagnose=False)
    assert report.ok and report.order in ("short", "float32"), str(report)


def _columns_at(q, places):
    """The columns of a tensor with one scale in another order."""
    return replace(q, rowwise_data=np.ascontiguousarray(q.rowwise_data[:, places]))


def test_short_sums_are_refused_where_a_kernel_sums_in_float32():
    a, b = quantized("current", (48, 32, 512))
    y = gemm(_columns(b, slice(0, 384)), _columns(a, slice(0, 384)), "hopper", out_dtype=F)
    y = y + gemm(_columns(b, slice(384, 512)), _columns(a, slice(384, 512)), "hopper", out_dtype=F)
    assert judged(a, b, y).order == "short"
    report = judged(a, b, y, params={"sums": "float32"}, diagnose=False)
    assert not report.ok and report.bound == "float32" and "float32 sums in any order" in report.headline()
    hopper = judged(a, b, gemm(b, a, "hopper", out_dtype=F), params={"sums": "float32"}, diagnose=False)
    assert not hopper.ok and "which sums='float32' refuses" in hopper.leads[0]
    right = refops.dequantize(a) @ refops.dequantize(b).T
    assert judged(a, b, right, params={"sums": "float32"}).ok


def test_the_headline_says_by_what_a_product_was_judged():
    a, b = quantized("mxfp8", (32, 64, 256))
    y = refops.dequantize(a) @ refops.dequantize(b).T
    report = judged(a, b, y)
    bounds = ProductCase({"a": a, "b": b}).product(FP32).bounds(slice(None), slice(None))
    width = np.mean(bounds.hi.astype(np.float64) - bounds.lo) / 2 / np.sqrt(np.mean(y.astype(np.float64) ** 2))
    assert report.bound == "float32" and report.width == pytest.approx(width, rel=1e-3)
    assert report.headline().endswith(f"(float32 sums in any order, within {100 * width:.2g} % of a typical result)")
    card = judged(a, b, gemm(b, a, "blackwell", out_dtype=F))
    assert card.bound == "bits" and card.width == 0 and card.headline().endswith("(the bits of a card)")


# --- layouts, copies, names -----------------------------------------------------------------------


@sampled(("layout", "name"), [(o, s) for s in SCALINGS for o in ("mk,nk", "mk,kn", "km,nk", "km,kn")], 9)
def test_layouts_read_the_copy_along_the_sums(layout, name):
    m, n, k = 64, 96, 128
    shapes = [(k, rows) if axes[0] == "k" else (rows, k) for rows, axes in zip((m, n), layout.split(","), strict=True)]
    turned = [axes[0] == "k" for axes in layout.split(",")]
    a, b = (refops.quantize(tensor(*shape, shape[0]), SCALINGS[name], columnwise=True) for shape in shapes)
    values = [decoded(q, columnwise).values for q, columnwise in zip((a, b), turned, strict=True)]
    y = (values[0] @ values[1].T).astype(F)
    assert judged(a, b, y, params={"layout": layout}).ok
    assert not judged(a, b, 1.5 * y, params={"layout": layout}, diagnose=False).ok
    plain = [refops.dequantize(q) for q in (a, b)]
    assert not judged(*plain, 1.01 * y, params={"layout": layout}, diagnose=False).ok
    exact = (plain[0].T if turned[0] else plain[0]) @ (plain[1] if turned[1] else plain[1].T)
    assert judged(*plain, exact, params={"layout": layout}).ok
    te = {"mk,nk": "TN", "mk,kn": "NN", "km,kn": "NT"}.get(layout)
    card = "hopper" if name in ("delayed", "current", "block", "block-2d") else "blackwell"
    if te is not None and name != "current-e5m2":
        y = gemm(b, a, card, layout=te, out_dtype=F)
        assert judged(a, b, y, params={"layout": layout, "card": card}).ok


def test_transformed_copies_are_multiplied_as_they_are():
    scaling = refops.NVFP4Scaling(rht=True)
    x, dy = tensor(128, 64, 1), tensor(128, 96, 2)
    a, b = (refops.quantize(one, scaling, columnwise=True) for one in (dy, x))
    values = [decoded(q, columnwise=True).values for q in (a, b)]
    assert judged(a, b, (values[0] @ values[1].T).astype(F), params={"layout": "km,kn"}).ok
    undone = refops.dequantize(replace(a, rowwise_data=None, rowwise_scale_inv=None, amax_rowwise=None))
    report = judged(a, b, (undone.T.astype(np.float64) @ values[1].T).astype(F), params={"layout": "km,kn"})
    assert report.diagnosis[0].names == ("transform-undone",)
    with pytest.raises(ValueError, match="same Hadamard transform"):
        judged(a, refops.quantize(x, refops.NVFP4Scaling(), columnwise=True), 0, params={"layout": "km,kn"})


@sampled("name", ["mxfp8", "current", "nvfp4", "block"], 2)
def test_operands_as_arrays(name):
    a, b = quantized(name, (64, 96, 128))
    y = refops.dequantize(a) @ refops.dequantize(b).T
    inputs = {}
    for operand, q in (("a", a), ("b", b)):
        inputs[f"{operand}_codes"], inputs[f"{operand}_scales"] = q.rowwise_data, q.rowwise_scale_inv
        if q.amax_rowwise is not None and q.scaling.layout.two_level:
            inputs[f"{operand}_amax"] = q.amax_rowwise
    assert oracle.check("matmul", inputs, y, scaling=SCALINGS[name]).ok
    assert oracle.check("matmul", inputs, {"y": y}, scaling={"a": SCALINGS[name], "b": SCALINGS[name]}).ok
    if a.scaling.layout.scale_order == "gemm":
        swizzled = {key: refops.swizzle(value) if key.endswith("scales") else value for key, value in inputs.items()}
        assert oracle.check("matmul", swizzled, y, scaling=SCALINGS[name], swizzled_scales=True).ok
        report = oracle.check("matmul", swizzled, y, scaling=SCALINGS[name])
        assert report.diagnosis[0].names == ("scales-order",)
        assert judged(a.swizzled(), b.swizzled(), y).ok


def test_operands_of_two_formats():
    a = refops.quantize(tensor(64, 256, 1), refops.CurrentScaling(E5M2))
    b = refops.quantize(tensor(96, 256, 2), refops.CurrentScaling(E4M3))
    y = gemm(b, a, "hopper", out_dtype=BF16, use_split_accumulator=True)
    report = judged(a, b, y)
    assert report.ok and report.order == "card" and report.settings.startswith("CurrentScaling(fmt=E5M2")
    inputs = {"a_codes": a.rowwise_data, "a_scale": a.rowwise_scale_inv, "b": b}
    assert oracle.check("matmul", inputs, y, scaling={"a": a.scaling}).ok


def test_leading_dimensions_and_torch():
    torch = pytest.importorskip("torch")
    x, w = tensor(2 * 24, 64, 1).reshape(2, 24, 64), tensor(32, 64, 2)
    y = x.astype(F) @ w.astype(F).T
    assert judged(x, w, y).ok and judged(x, w, y.reshape(48, 32)).ok
    tensors = [torch.from_numpy(one.view(np.int16)).view(torch.bfloat16) for one in (x, w)]
    report = judged(*tensors, torch.from_numpy(y + 1), diagnose=False)
    assert not report.ok and len(report.mismatches[0].index) == 3


# --- the bounds -----------------------------------------------------------------------------------


@sampled("name", SCALINGS, 5)
def test_the_ends_of_the_bounds_are_right_and_what_lies_beyond_is_wrong(name):
    a, b = quantized(name, (32, 64, 128))
    for dtype in (FP32, FP16, BF16):
        case = ProductCase({"a": a, "b": b}, params={"alpha": 0.3})
        product = case.product(np.dtype(dtype))
        bounds = product.bounds(slice(None), slice(None))
        for ends, beyond in ((bounds.lo, -np.inf), (bounds.hi, np.inf)):
            y = ends.astype(dtype)
            assert judged(a, b, y, params={"alpha": 0.3}).ok
            y[5, 7] = np.nextafter(y[5, 7], np.asarray(beyond, dtype))
            report = judged(a, b, y, params={"alpha": 0.3}, diagnose=False)
            if report.order == "float32":
                pytest.fail("a value beyond the bound was taken for right")
        relative = (bounds.hi.astype(np.float64) - bounds.lo).max() / np.abs(bounds.hi).max()
        assert relative < {"float32": 1e-3, "float16": 2e-3, "bfloat16": 1e-2}[np.dtype(dtype).name]


def test_what_one_step_less_changes_is_found():
    """A kernel that forgets the last 32 of 512 terms, in bfloat16."""
    a, b = (refops.quantize(RNG.standard_normal((32, 512)).astype(BF16), SCALINGS["mxfp8"]) for _ in "ab")
    left, right = (refops.dequantize(q)[:, :-32] for q in (a, b))
    report = judged(a, b, (left @ right.T).astype(BF16), budget=None)
    assert not report.ok and "the last 32 of 512" in report.diagnosis[0].sentence


def test_a_known_fault_is_not_excused_by_few_bits():
    """Float32 sums that lack some terms lie within what Hopper's FP8 unit may give: they are wrong nevertheless."""
    a, b = (refops.quantize(RNG.standard_normal((48, 1024)).astype(BF16), SCALINGS["current"]) for _ in "ab")
    left, right = (refops.dequantize(q)[:, :-32] for q in (a, b))
    for diagnose in (False, True):
        report = judged(a, b, left @ right.T, diagnose=diagnose)
        assert not report.ok and report.order == "wrong"
    assert report.diagnosis[0].names == ("terms-missing",)


def test_special_values():
    a, b = np.ones((4, 32), F), np.ones((3, 32), F)
    a[0, 3], a[1, 4], b[2, 4] = np.nan, np.inf, 0
    with np.errstate(invalid="ignore"):
        y = a @ b.T
    assert np.isnan(y[0]).all() and np.isinf(y[1, 0]) and np.isnan(y[1, 2])
    assert judged(a, b, y).ok
    for place in ((0, 0), (1, 0), (1, 2), (3, 0)):
        wrong = y.copy()
        wrong[place] = 7
        report = judged(a, b, wrong, diagnose=False)
        assert [m.index for m in report.mismatches] == [place]
    huge = np.full((1, 2), 3e38, F)
    assert judged(huge, np.ones((1, 2), F), np.array([[np.inf]], F)).ok
    cancelling = np.array([[3e38, 3e38, -3e38, -3e38]], F)
    for possible in (np.inf, -np.inf, np.nan, 0):
        assert judged(cancelling, np.ones((1, 4), F), np.array([[possible]], F)).ok
    assert not judged(cancelling[:, ::2], np.ones((1, 2), F), np.array([[np.inf]], F)).ok
    tiny = np.full((1, 8), 1e-30, F)
    assert judged(tiny, tiny, np.zeros((1, 1), F)).ok
    assert judged(tiny * F(1e-8), np.full((1, 8), 1e8, F), (tiny * F(1e-8)) @ np.full((8, 1), 1e8, F)).ok


@pytest.mark.parametrize("alpha", [0.001, -0.001, 0.0])
def test_sums_that_are_infinite_before_they_are_multiplied(alpha):
    """With alpha, or the scale of a tensor, in whatever order."""
    large = np.full((1, 2), 3e38, F)
    right = {0.001: (np.inf, 6e35), -0.001: (-np.inf, -6e35), 0.0: (np.nan, 0)}[alpha]
    for possible in (np.inf, -np.inf, np.nan, 6e35, -6e35, 0):
        y = np.array([[possible]], F)
        report = judged(large, np.ones((1, 2), F), y, params={"alpha": alpha}, diagnose=False)
        assert report.ok == any(np.array_equal(F(one), y[0, 0], equal_nan=True) for one in right)
    scaling = refops.CurrentScaling(refops.E4M3)
    a, b = (refops.quantize(np.full((1, 16), size, F), scaling) for size in (1e38, 1.0))
    for possible, ok in ((np.inf, True), (1.6e36, True), (-np.inf, False), (np.nan, False)):
        report = judged(a, b, np.array([[possible]], F), params={"alpha": 0.001}, diagnose=False)
        assert report.ok == ok


def test_an_infinite_term_beside_sums_that_are_infinite():
    a = np.array([[np.inf, -3e38, -3e38]], F)
    for possible, ok in ((np.inf, True), (np.nan, True), (0.0, False)):
        assert judged(a, np.ones((1, 3), F), np.array([[possible]], F), diagnose=False).ok == ok


@pytest.mark.parametrize("exponents", [(100, -100), (120, 120), (-60, -70), (-66, -70)], ids=str)
def test_scales_of_blocks_whose_product_is_no_normal_number(exponents):
    """As Hopper multiplies them, before partial sums: an overflow makes NaN of zeros, an underflow costs bits."""
    rng = np.random.default_rng(0)
    x = [rng.standard_normal((32, 128)) * np.exp2(exponent) for exponent in exponents]
    if exponents[0] == 120:
        for one in x:
            one[1:] = 1.0  # of a block with the first row: zeros under its scale
    a, b = (refops.quantize(one.astype(F), refops.BlockScaling(refops.E4M3, power_2_scale=False)) for one in x)
    y = gemm(b, a, "hopper", out_dtype=F)
    if exponents[0] == 120:
        assert np.isnan(y).any()
    with np.errstate(all="ignore"):
        dequantized = refops.dequantize(a) @ refops.dequantize(b).T
    assert judged(a, b, y).ok and judged(a, b, dequantized).ok


@pytest.mark.parametrize("name", ["current", "block", "mxfp8"])
def test_nothing_to_add_up_on_a_card(name):
    a, b = (refops.quantize(np.ones((rows, 0), F), SCALINGS[name]) for rows in (32, 64))
    for params in ({}, {"card": "blackwell"}):
        report = judged(a, b, np.zeros((32, 64), F), params=params)
        assert report.ok and report.order == "card" and "blackwell" in report.cards
        assert not judged(a, b, np.ones((32, 64), F), params=params).ok


def test_empty_products():
    for m, n, k in ((0, 4, 8), (4, 0, 8), (4, 5, 0)):
        a, b = np.ones((m, k), F), np.ones((n, k), F)
        report = judged(a, b, np.zeros((m, n), F))
        assert report.ok and str(report).startswith("RIGHT: matmul")
    assert not judged(np.ones((4, 0), F), np.ones((5, 0), F), np.ones((4, 5), F)).ok


# --- what it says and refuses ---------------------------------------------------------------------


def test_reports():
    a, b = quantized("mxfp8", (32, 64, 256))
    y = gemm(b, a, "blackwell", out_dtype=F)
    report = judged(a, b, y)
    assert report.leads == ("y: bit for bit what these compute: blackwell",)
    data = json.loads(json.dumps(report.as_dict()))
    assert data["order"] == "card" and data["cards"] == ["blackwell"] and data["compared"] == y.size
    report = judged(a, b, np.nextafter(y, F(np.inf)), diagnose=False)
    assert report.order == "float32" and report.leads[0].endswith("bits differ from those of blackwell")
    with pytest.raises(oracle.MismatchError, match="alpha, 2, is missing"):
        judged(a, b, y, params={"alpha": 2}).raise_for_mismatch()
    zeros = judged(a, b, np.zeros_like(y), diagnose=False)
    assert any("were they written?" in note for note in zeros.notes)
    assert "no card has this product" in judged(*(refops.dequantize(q) for q in (a, b)), y).leads[0]


A, B = np.ones((4, 32), F), np.ones((3, 32), F)
Y = np.full((4, 3), 32, F)
Q = refops.quantize(A, refops.MXFP8Scaling(E4M3))


@pytest.mark.parametrize(
    ("inputs", "outputs", "options", "message"),
    [
        ({"a": A}, Y, {}, "inputs must hold a and b for matmul; got a"),
        (A, Y, {}, "inputs must be a dict with a and b"),
        ({"a": A, "b": B, "x": B}, Y, {}, "inputs must be among a, b, bias, c"),
        ({"a": A, "b": B[:, :16]}, Y, {}, "a and b must have one contracted size with layout 'mk,nk'; got 32 in a"),
        ({"a": A, "b": B}, Y.T, {}, r"y must have shape \(4, 3\)"),
        ({"a": A, "b": B}, {}, {}, "outputs must hold y; got none"),
        ({"a": A, "b": B}, {"z": Y}, {}, "outputs must be among y; got 'z'"),
        (
            {"a": A, "b": B},
            Y,
            {"params": {"layout": "TN"}},
            "layout must be .* gemm.b, a, layout='TN'. is 'mk,nk' here",
        ),
        ({"a": A, "b": B}, Y, {"params": {"layout": "TT"}}, "layout must be"),
        ({"a": A, "b": B}, Y, {"params": {"sums": "half"}}, "sums must be"),
        ({"a": A, "b": B}, Y, {"params": {"sums": "short"}}, "sums must be 'float32' for operands"),
        ({"a": Q, "b": Q}, Y, {"params": {"sums": "float32", "card": "hopper"}}, "sums goes without card"),
        ({"a": A, "b": B}, Y.astype(np.int32), {}, "y must be float32, float16 or bfloat16, or raw bits"),
        ({"a_codes": Q.rowwise_data, "a_scales": Q.rowwise_scale_inv, "b": Q}, Y, {}, "scaling is required where a"),
        (
            {"a_codes": Q.rowwise_data, "a_scales": Q.rowwise_scale_inv, "b": Q},
            Y,
            {"scaling": "current"},
            r"\(is the scaling mxfp8\?\)",
        ),
        ({"a": A, "b": B}, Y, {"params": {"transpose": True}}, "params must be among layout"),
        ({"a": A, "b": B}, Y, {"params": {"card": "volta"}}, "card must be"),
        ({"a": A, "b": B}, Y, {"params": {"card": "hopper"}}, "float16 or bfloat16"),
        ({"a": A, "b": B}, Y, {"params": {"split_accumulator": True}}, "split_accumulator needs card"),
        ({"a": A, "b": B}, Y, {"params": {"beta": 2}}, "beta needs c"),
        ({"a": A, "b": B, "bias": Y}, Y, {}, r"bias must have shape \(3,\)"),
        ({"a": A, "b": B, "c": A}, Y, {}, r"c must have shape \(4, 3\)"),
        ({"a": A.astype(np.float64), "b": B}, Y, {}, "a must be float32, float16 or bfloat16"),
        ({"a": A, "b": B}, Y, {"ulp": 0}, "ulp must be 2 for matmul"),
        ({"a": A, "b": B}, Y, {"m_splits": [4]}, "m_splits must be None for matmul"),
        ({"a": A, "b": B}, Y, {"padding": "zero"}, "padding must be None for matmul"),
        ({"a": Q, "b": Q, "a_codes": A}, Y, {}, "inputs must hold a once"),
        (
            {"a_codes": Q.rowwise_data, "b": Q},
            Y,
            {"scaling": "mxfp8"},
            "a must be a quantized operand of matmul; got one of which",
        ),
        ({"a": Q, "b": Q}, Y, {"params": {"layout": "mk,kn"}}, "b must hold its columnwise copy with layout 'mk,kn'"),
        ({"a": A, "b": B}, Y, {"scaling": {"w": "mxfp8"}}, "scaling must hold settings of quantized operands"),
        ({"a": A, "b": B}, Y, {"scaling": "mxfp8"}, "scaling must hold settings of quantized operands"),
    ],
)
def test_bad_use(inputs, outputs, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        oracle.check("matmul", inputs, outputs, **options)


def test_the_decoder_of_planted_faults():
    """It reads what `refops.dequantize` reads, which rounds twice under two levels."""
    for name in SCALINGS:
        a, _ = quantized(name, SHAPES[0], columnwise=True)
        off, roundings = np.abs(decoded(a).values - refops.dequantize(a)), 2 if name == "nvfp4" else 1
        assert (off <= roundings * 2.0**-24 * np.abs(refops.dequantize(a))).all(), name


# --- the command line -----------------------------------------------------------------------------


@pytest.fixture
def dumped(tmp_path, monkeypatch):
    """A product of two formats in files of every kind."""
    save_file = pytest.importorskip("safetensors.numpy").save_file
    monkeypatch.chdir(tmp_path)
    a = refops.quantize(tensor(32, 128, 1), refops.CurrentScaling(E5M2))
    b = refops.quantize(tensor(48, 128, 2), refops.CurrentScaling(E4M3))
    bias = RNG.standard_normal(48).astype(F)
    y = gemm(b, a, "hopper", out_dtype=BF16, bias=bias)
    arrays = {"a_codes": a.rowwise_data, "a_scale": a.rowwise_scale_inv, "bias": bias}
    save_file(arrays | {"b_data": b.rowwise_data, "b_scale_inv": b.rowwise_scale_inv}, "in.safetensors")
    for name, array in arrays.items():
        array.tofile(f"{name}.bin")
    np.save("b_codes.npy", b.rowwise_data)
    np.savez("b.npz", scale=b.rowwise_scale_inv)
    y.tofile("y.bin")
    y.astype(F).tofile("wide.bin")
    y[:, :].view(np.uint16).T.copy().tofile("turned.bin")
    return y


CHECK = ("check", "--op", "matmul", "--scaling", "current", "--param", "a_fmt=e5m2")


def test_command_line(run, dumped):
    whole = ("--input", "in.safetensors", "--output", "y=y.bin")
    code, out, err = run(*CHECK, *whole)
    assert (code, err) == (0, "") and out.startswith("RIGHT: matmul: CurrentScaling(fmt=E5M2")
    assert "y: bit for bit what these compute: hopper" in out
    parts = ("--input", "a_codes=a_codes.bin@uint8:32x128", "--input", "a_scale=a_scale.bin@float32:1")
    parts += (
        "--input",
        "b_codes=b_codes.npy",
        "--input",
        "b_scales=b.npz:scale",
        "--input",
        "bias=bias.bin@float32:48",
    )
    code, out, err = run(*CHECK, *parts, "--output", "y=y.bin", "--param", "card=hopper", "--json")
    assert (code, err) == (0, "") and json.loads(out)["cards"] == ["hopper"]
    code, out, _ = run(*CHECK, "--input", "in.safetensors", "--output", "y=turned.bin")
    assert code == 1 and "1. result-transposed: The result is written transposed." in out
    assert run(*CHECK, *whole, "--out-dtype", "float16", "--no-diagnosis")[0] == 1
    code, _, err = run(*CHECK, "--input", "in.safetensors", "--output", "y=wide.bin")
    assert code == 2 and "the size of float32 (--out-dtype float32)" in err
    code, _, err = run("check", "--op", "matmul", "--input", "in.safetensors", "--output", "y=y.bin")
    assert code == 2 and "--scaling is required where a is given by its arrays" in err
    code, out, _ = run(*CHECK, *whole, "--param", "sums=float32", "--no-diagnosis")
    assert code == 1 and "which sums='float32' refuses" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--input", "x=y.bin@bfloat16:32x48"), "--input must be NAME=FILE with NAME one of a, b, bias, c"),
        (("--input", "a=y.bin@bfloat16:32x48"), "--input must hold a and b for matmul; got a"),
        (("--input", "in.safetensors", "--param", "layout=TN"), "--param layout must be one of 'mk,nk'"),
        (("--input", "in.safetensors", "--param", "layout=NT"), "'NT') is 'km,kn' here"),
        (("--input", "in.safetensors", "--param", "sums=half"), "--param sums must be one of 'float32', 'short'"),
        (("--input", "in.safetensors", "--param", "card=ampere"), "--param card must have a unit that multiplies"),
        (("--input", "in.safetensors", "--m-splits", "16,16"), "--m-splits must be None for matmul; got [16, 16]"),
        (("--input", "in.safetensors", "--ulp", "0"), "--ulp must be 2 for matmul"),
        (("--input", "in.safetensors", "--output", "z=y.bin"), "--output z is no output of matmul: y"),
    ],
)
def test_bad_use_of_the_command_line(run, dumped, words, message):
    code, out, err = run(*CHECK, *words, "--output", "y=y.bin")
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1
