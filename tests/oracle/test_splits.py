"""Products split along k whose parts were rounded to 16 bits: named or noted, and nothing else is."""

import ml_dtypes
import numpy as np
import pytest

import refops
from refops import oracle
from refops.oracle.products.splits import Split
from tiers import sampled

F = np.float32
BF16, FP16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
NAME = ("split-sums-in-half",)
SCALINGS = {
    "current": refops.CurrentScaling(refops.E4M3),
    "mxfp8": refops.MXFP8Scaling(refops.E4M3),
    "block": refops.BlockScaling(refops.E4M3, 1),
    "plain": None,
}


def operands(name, k, shape=(64, 96), seed=0):
    """(inputs, float64 values of both)."""
    rng = np.random.default_rng(seed)
    a, b = (rng.standard_normal((rows, k), F) for rows in shape)
    if SCALINGS[name] is None:
        a, b = a.astype(BF16), b.astype(BF16)
        return {"a": a, "b": b}, [x.astype(np.float64) for x in (a, b)]
    a, b = (refops.quantize(x, SCALINGS[name]) for x in (a, b))
    return {"a": a, "b": b}, [refops.dequantize(x).astype(np.float64) for x in (a, b)]


def split(a, b, step, dtype, total=F, factor=1.0):
    """float64: parts of `step` terms, in a dtype, added in another one, times a factor."""
    sums = np.zeros((len(a), len(b)))
    for start in range(0, a.shape[1], step):
        part = a[:, start : start + step] @ b[:, start : start + step].T
        sums = (sums + part.astype(F).astype(dtype).astype(np.float64)).astype(total).astype(np.float64)
    return sums * factor


def says(report):
    """What is said of a split, as an answer or a note."""
    answers = [answer.sentence for answer in report.diagnosis if answer.names == NAME]
    return answers + [note for note in report.notes if "rounded once, are those of" in note]


CASES = [
    (name, k, parts, dtype, total)
    for k, parts in ((256, 2), (1024, 4), (640, 3), (4096, 8))
    for name in SCALINGS
    for dtype, total in ((BF16, F), (BF16, BF16), (FP16, F))
    if parts > 2 or total == F
]


@sampled(("name", "k", "parts", "dtype", "total"), CASES, 6)
@pytest.mark.parametrize("stored", [BF16, F])
def test_rounded_parts_are_named_or_noted(name, k, parts, dtype, total, stored):
    """A bound that is wide takes them for right: there a note says it."""
    inputs, (a, b) = operands(name, k)
    step = -(-k // parts) if k % parts == 0 else -(-k // (parts * 32)) * 32
    y = split(a, b, step, dtype, total).astype(stored)
    report = oracle.check("matmul", inputs, y)
    if dtype == FP16 and stored == BF16:  # eight bits hide how ten were rounded
        assert not any("bfloat16" in words for words in says(report))
        return
    [words] = says(report)
    assert f"{parts} parts of {step:,} terms, each rounded to {np.dtype(dtype).name}" in words
    assert ("added in it, too" in words) == (total == BF16)
    if not report.ok and report.arrays[0].wrong >= 64:
        assert report.diagnosis[0].names == NAME and report.diagnosis[0].explained == 1, str(report)
    elif report.ok:
        assert report.diagnosis == () and words.endswith("which the bound permits")


@pytest.mark.parametrize("late", [True, False])
def test_alpha_before_or_after_the_sum(late):
    inputs, (a, b) = operands("mxfp8", 512)
    alpha = 0.7
    y = split(a, b, 128, BF16, BF16, alpha) if late else split(a * alpha, b, 128, BF16, BF16)
    report = oracle.check("matmul", inputs, y.astype(BF16), params={"alpha": alpha})
    assert report.diagnosis[0].names == NAME
    assert ("then multiplied by alpha" in report.diagnosis[0].sentence) == late


# --- what must not be called a split ----------------------------------------------------------------------------------


def in_float32(a, b, stored):
    """A right split: its parts stay in float32."""
    return split(a, b, a.shape[1] // 4, F).astype(stored)


def backwards(a, b, stored):
    return split(a[:, ::-1], b[:, ::-1], 1, F).astype(stored)


def after_every_64(a, b, stored):
    """What was accumulated is rounded, not the parts."""
    sums = np.zeros((len(a), len(b)))
    for start in range(0, a.shape[1], 64):
        sums = (sums + a[:, start : start + 64] @ b[:, start : start + 64].T).astype(BF16).astype(np.float64)
    return sums.astype(stored)


def uneven(a, b, stored):
    """A third and two thirds and a bit: no split that is looked for."""
    parts = (slice(0, 77), slice(77, None))
    return sum((a[:, p] @ b[:, p].T).astype(F).astype(BF16).astype(F) for p in parts).astype(stored)


def cut_off(a, b, stored):
    return ((a @ b.T).astype(F).view(np.uint32) & np.uint32(0xFFFF0000)).view(F).astype(stored)


def rounded_twice(a, b, stored):
    return (a @ b.T).astype(FP16).astype(stored)


def noisy(a, b, stored):
    y = a @ b.T
    return (y * (1 + 2.0**-8 * np.random.default_rng(1).standard_normal(y.shape))).astype(stored)


OTHERS = [in_float32, backwards, after_every_64, uneven, cut_off, rounded_twice, noisy]


@sampled(
    ("made", "name", "k", "stored"),
    [(made, name, k, stored) for k in (256, 4096) for made in OTHERS for name in SCALINGS for stored in (BF16, F)],
    9,
    in_all=6,
)
def test_other_sums_are_not_called_a_split(made, name, k, stored):
    inputs, values = operands(name, k)
    assert says(oracle.check("matmul", inputs, made(*values, stored), budget=0.5)) == []


@sampled("card", ["hopper", "blackwell", "ampere"], 2)
def test_sums_of_cards_are_not_called_a_split(card):
    inputs, _ = operands("current" if card == "hopper" else "plain", 1024)
    y = refops.gemm(inputs["b"], inputs["a"], card, out_dtype=BF16)
    report = oracle.check("matmul", inputs, y)
    assert report.ok and says(report) == []


def test_few_results_are_no_evidence():
    inputs, (a, b) = operands("mxfp8", 256, (8, 8))
    assert says(oracle.check("matmul", inputs, split(a, b, 128, BF16).astype(BF16))) == []


def test_words():
    assert str(Split(64, 4, "bfloat16", F, "all")) == (
        "4 parts of 64 terms, each rounded to bfloat16, added in float32, then multiplied by the tensors' scales and "
        "alpha"
    )
