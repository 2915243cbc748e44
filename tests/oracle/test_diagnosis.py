"""The diagnosis: its replay is the reference, it names what was done, says "unknown" of the rest, and never fails.

How well it names faults that others wrote is counted by test_mutants.py and test_third_party.py.
"""

import re
from itertools import product
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from mutants import MUTANTS
from reference_calls import ALL_SCALINGS, call, every_call

import refops
from refops import oracle
from refops.oracle.conventions import CONVENTIONS
from refops.oracle.conventions.fits import simplest_number
from refops.oracle.diagnosis.moved import LAWS
from refops.oracle.geometry import crop, whole
from refops.oracle.operation import Case, arrays_of
from refops.oracle.products.faults import FAULTS
from refops.oracle.replay import Setting
from refops.oracle.tally import bits_of
from tiers import SWEEP, sampled

F = np.float32
BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = refops.E4M3
MXFP8, FLOOR = refops.MXFP8Scaling(E4M3), refops.MXFP8Scaling(E4M3, scale_rounding="floor")


def normal(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(BF16)


def floor_dump(shape):
    x = normal(shape)
    q = refops.quantize(x, FLOOR)
    return x, {"rowwise_data": q.rowwise_data.copy(), "rowwise_scale_inv": q.rowwise_scale_inv.copy()}


# --- the parts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "name"), list(every_call()))
def test_an_unchanged_replay_is_the_reference(op, name):
    inputs, outputs, options = call(op, ALL_SCALINGS.get(name))
    case = Case(op, inputs, options["scaling"], options["params"])
    replay = Setting(case, outputs, outputs).replay()
    region = whole(replay.setting.shape)
    sums = [n for n in outputs if n in ("dbias", "drow_scales")]
    made = replay.run(region, [n for n in outputs if n not in sums])
    for array, values in made.items():
        expected = crop(case, array, outputs[array], region)
        assert np.array_equal(bits_of(values), bits_of(expected.reshape(values.shape))), array


def test_conventions_have_names_and_sentences():
    assert len(CONVENTIONS) > 100
    for name, convention in CONVENTIONS.items():
        assert convention.name == name == name.lower() and " " not in name
        assert convention.sentence.endswith(".") and "\n" not in convention.sentence
    assert len({c.sentence for c in CONVENTIONS.values()}) == len(CONVENTIONS)


def test_mutants_expect_conventions_that_exist():
    """But for what has no replay: the verdict finds approximate-elementary, laws of lines say what was moved."""
    expected = {
        n for m in MUTANTS.values() for names in m.expected for n in ([names] if isinstance(names, str) else names)
    }
    moved = {f"{law}-{lines}" for law in LAWS for lines in ("rows", "columns", "blocks")}
    tiles = {"transposed-tiles", "exchanged-tiles"}
    assert expected <= {*CONVENTIONS, "approximate-elementary", "not-written"} | moved | tiles


# --- the search -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(64, 128), (128, 256), (1024, 1024)])
def test_stray_faults_do_not_hide_a_convention(shape):
    x, outputs = floor_dump(shape)
    report = oracle.check("quantize", x, outputs, scaling=MXFP8)
    assert report.diagnosis[0].names == ("scale-floor",) and report.diagnosis[0].explained == 1
    outputs["rowwise_data"][3, 5] ^= 1
    report = oracle.check("quantize", x, outputs, scaling=MXFP8)
    assert report.diagnosis[0].names == ("scale-floor",) and not report.diagnosis[0].exact
    outputs["rowwise_data"][3, 32:64] = 0
    report = oracle.check("quantize", x, outputs, scaling=MXFP8)
    assert report.diagnosis[0].names == ("scale-floor",) and report.diagnosis[0].explained < 1


@pytest.mark.parametrize("shape", [(64, 128), (256, 1024)])
def test_what_nothing_explains_is_unknown(shape):
    x, rng = normal(shape), np.random.default_rng(1)
    q = refops.quantize(x, MXFP8)
    one, block, garbage = (q.rowwise_data.copy() for _ in range(3))
    one[5, 7] ^= 1
    block[32:48, 64:96] = rng.integers(0, 256, (16, 32))
    garbage[:] = rng.integers(0, 256, shape)
    for data in (one, block, garbage):
        report = oracle.check("quantize", x, {"data": data, "scale": q.rowwise_scale_inv}, scaling=MXFP8)
        assert not report.ok and report.diagnosis == () and "diagnosis: unknown" in str(report)


def test_a_convention_that_changes_nothing_explains_nothing():
    x = normal((128, 256))
    x[0, 0] = 9  # the largest magnitude is positive: a signed amax is the same
    scaling = refops.CurrentScaling(E4M3)
    q = refops.quantize(x, scaling)
    outputs = {"data": q.rowwise_data, "scale": q.rowwise_scale_inv * F(1.01), "amax": q.amax_rowwise}
    names = {n for e in oracle.check("quantize", x, outputs, scaling=scaling).diagnosis for n in e.names}
    assert "signed-amax" not in names


def test_a_part_of_a_large_tensor_is_called_one():
    x = normal((2048, 1024))
    y = refops.activation("qgelu", x)
    y[-1, -200:] = 77
    report = oracle.check("gelu", x, y)
    best = report.diagnosis[0]
    assert best.names == ("other-activation",) and best.sampled and not best.exact
    assert "where it was compared" in str(best) and "qgelu" in best.sentence


def test_a_product_inside_a_formula_that_is_flushed_is_named():
    """silu'(act) dy is subnormal, and the gate is large: the gradient of act is normal, and 0 with -ftz=true."""
    rng = np.random.default_rng(0)
    act, gate = rng.uniform(-9, -8, (64, 128)).astype(F), rng.uniform(2**20, 2**21, (64, 128)).astype(F)
    dy = (rng.uniform(1, 2, (64, 128)) * 2.0 ** rng.integers(-124, -100, (64, 1))).astype(F)
    x = np.concatenate([act, gate], axis=1)
    dx = refops.activation_grad("swiglu", dy, x)
    product = refops.activation_grad("silu", dy, act)
    lost = np.abs(product) < np.finfo(F).smallest_normal
    assert lost.any() and not lost.all() and (dx[:, :128][lost] != 0).all()
    dx[:, :128][lost] = 0
    report = oracle.check("dswiglu", {"dy": dy, "x": x}, dx)
    assert report.diagnosis[0].names == ("subnormals-flushed",) and report.diagnosis[0].explained == 1


def tiles_down_the_columns(scales):
    """Swizzled scales whose tiles of 128 x 4 are exchanged as those of the transpose are."""
    tiles = refops.swizzle(scales).reshape(len(scales) // 128, -1, 512)
    return np.ascontiguousarray(tiles.swapaxes(0, 1)).reshape(scales.shape)


def tiles_row_by_row(scales):
    """The order of tiles is right, and each holds its rows one after the other."""
    tiles = scales.reshape(len(scales) // 128, 128, -1, 4)
    return np.ascontiguousarray(tiles.swapaxes(1, 2)).reshape(scales.shape)


def quarters_and_blocks_exchanged(scales):
    """The right order but for the last two digits of the address: row / 32 and the block are exchanged."""
    quads = refops.swizzle(scales).reshape(-1, 4, 4)
    return np.ascontiguousarray(quads.swapaxes(1, 2)).reshape(scales.shape)


OTHER_SWIZZLES = {
    "lies at 4 b + q, where GEMMs read it at 4 q + b": quarters_and_blocks_exchanged,
    "the swizzle is applied twice": lambda scales: refops.swizzle(refops.swizzle(scales)),
    "is undone and not applied": refops.unswizzle,
    "down the columns": tiles_down_the_columns,
    "n + 32, n + 64 and n + 96 together": tiles_row_by_row,
}


@sampled(("scaling", "said"), product([MXFP8, refops.NVFP4Scaling()], OTHER_SWIZZLES), 2, in_all=1)
def test_another_swizzle_is_named_in_scales_that_should_be_swizzled(said, scaling):
    x = normal((384, 640))
    outputs = dict(arrays_of(refops.quantize(x, scaling, columnwise=True)))
    for name in ("rowwise_scale_inv", "columnwise_scale_inv"):
        scales = outputs[name]
        gemm = scales.T if name.startswith("columnwise") and scaling == MXFP8 else scales
        outputs[name] = OTHER_SWIZZLES[said](np.ascontiguousarray(gemm)).reshape(scales.shape)
    first = oracle.check("quantize", x, outputs, scaling=scaling, swizzled_scales=True).diagnosis[0]
    assert first.names == ("scales-swizzled-otherwise",) and first.exact and said in first.sentence


def test_a_part_of_blocks_is_not_named_where_other_scales_are_small():
    """Bytes one too small in every eighth block are no amax of a part; nor are scales of a few blocks."""
    x = normal((128, 512))
    q = refops.quantize(x, MXFP8)
    lowered = q.rowwise_scale_inv.copy()
    lowered[::8, :16] -= 1
    report = oracle.check("quantize", x, {"data": q.rowwise_data, "scale": lowered}, scaling=MXFP8)
    assert not report.ok and all("block-amax-of-a-part" not in e.names for e in report.diagnosis)


PAIRS = {
    ("gate-order", "scale-floor"): lambda x: refops.activation_quantize(
        "swiglu", np.roll(x, x.shape[1] // 2, axis=1), FLOOR
    ),
    ("other-activation", "scale-floor"): lambda x: refops.activation_quantize("geglu", x, FLOOR),
    ("scales-swizzled", "scale-floor"): lambda x: refops.activation_quantize("swiglu", x, FLOOR).swizzled(),
    ("gate-order", "other-activation"): lambda x: refops.activation_quantize(
        "geglu", np.roll(x, x.shape[1] // 2, axis=1), MXFP8
    ),
    ("scales-swizzled", "gate-order"): lambda x: refops.activation_quantize(
        "swiglu", np.roll(x, x.shape[1] // 2, axis=1), MXFP8
    ).swizzled(),
}


@pytest.mark.full
@sampled("names", [*PAIRS], 3, in_all=len(PAIRS), ids=" + ".join)
def test_two_faults_are_found_together(names):
    x = normal((128, 512))
    q = PAIRS[names](x)
    outputs = {"data": q.rowwise_data, "scale": q.rowwise_scale_inv}
    report = oracle.check("swiglu", x, outputs, scaling=MXFP8)
    assert set(report.diagnosis[0].names) == set(names), str(report)
    assert "besides" in report.diagnosis[0].sentence


@pytest.mark.parametrize(
    ("sentence", "goes_on"),
    [
        ("The scales are swizzled.", "the scales are swizzled."),
        ("A block of zeros has scale 1.", "a block of zeros has scale 1."),
        ("NaN counts in the amax.", "NaN counts in the amax."),
        ("E5M2 codes are stored.", "E5M2 codes are stored."),
    ],
)
def test_the_second_sentence_of_a_pair_goes_on(sentence, goes_on):
    from refops.oracle.diagnosis.search import _uncapitalized

    assert _uncapitalized(sentence) == goes_on


@pytest.mark.parametrize(
    ("choice", "begins"),
    [
        ("tensor", "The amax is taken of the float32 values, where TE takes it of"),
        ("block", "The block amaxes are taken of the float32 values, where TE takes them of"),
    ],
)
def test_unrounded_amaxes_are_one_or_many(choice, begins):
    x = normal((64, 128))
    scaling = refops.NVFP4Scaling(rht=True) if choice == "tensor" else MXFP8
    case = Case("swiglu", (x,), scaling, {})
    reference = case.reference({})
    replay = Setting(case, reference, reference).replay()
    convention = CONVENTIONS["amax-unrounded"]
    convention.apply(replay, choice)
    assert convention.sentence.format_map({"dtype": "bfloat16", **replay.facts}).startswith(begins)


def test_parts_with_one_amax_are_counted():
    x = normal((64, 64)).astype(F)
    scaling = refops.CurrentScaling(E4M3)
    x[0, 0], x[50, 9] = 30, 40
    outputs = arrays_of(refops.quantize(np.clip(x, -30, 30), scaling))
    best = oracle.check("quantize", x, outputs, scaling=scaling).diagnosis[0]
    assert best.sentence.endswith("it is the amax of the first half of the rows (or of one of 6 other parts) alone.")
    x[0, 0], x[32, 0] = 0, 30
    x[[8, 33]] = 36  # in every part but rows 0 and 32
    outputs = arrays_of(refops.quantize(np.clip(x, -30, 30), scaling))
    best = oracle.check("quantize", x, outputs, scaling=scaling).diagnosis[0]
    assert best.sentence.endswith("it is the amax of every 32nd row alone.")


def test_a_block_with_infinity_alone_is_called_one():
    x = normal((128, 256)).astype(F)
    x[::7, ::33] = np.inf
    for word, more in (("infinity", np.inf), ("NaN or infinity", np.nan)):
        x[3::7, ::33] = more
        q = refops.quantize(x, MXFP8)
        blocks = ~np.isfinite(x).reshape(128, 8, 32).all(axis=2)
        scales = q.rowwise_scale_inv.copy()
        scales[:128, :8][blocks] = 255
        report = oracle.check("quantize", x, {"data": q.rowwise_data, "scale": scales}, scaling=MXFP8)
        assert report.diagnosis[0].sentence.startswith(f"A block with {word} gets a NaN scale,"), word


def test_an_element_under_one_scale_for_the_tensor_says_so_once():
    x = normal((32, 64))
    scaling = refops.DelayedScaling(E4M3)  # scale 1
    codes = refops.quantize(x, scaling).rowwise_data.copy()
    codes[3, 5] ^= 0x40
    report = oracle.check("quantize", x, {"data": codes}, scaling=scaling)
    shown = next(line for line in str(report).splitlines() if "[3, 5]" in line)
    assert "encode scale 1" in shown and shown.count("scale ") == 1, shown


def test_each_of_a_pair_keeps_its_own_words():
    """Both sentences have a {what}."""
    from refops.oracle.conventions.registry import Convention

    class Target:
        applied, changed, facts = (), set(), {}

    def say(word):
        return lambda target: target.facts.update(what=word)

    target = Target()
    for name in ("one", "two"):
        Convention(name, "It is {what}.", say(name), "stage").apply(target)
    assert target.facts["one"] == {"what": "one"} and target.facts["two"] == {"what": "two"}


def test_a_diagnosis_that_fails_does_not_cost_the_verdict(monkeypatch):
    from refops.oracle import diagnosis

    def fail(*arguments):
        raise RuntimeError("broken")

    monkeypatch.setattr(diagnosis, "diagnose", fail)
    x = normal((32, 64))
    report = oracle.check("silu", x, np.zeros_like(x))
    assert not report.ok and any("the diagnosis failed" in note and "broken" in note for note in report.notes)


@pytest.mark.full
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=SWEEP if seed % 15 else ()) for seed in range(30)])
def test_the_diagnosis_never_fails(seed):
    """Every kind of call, outputs at random, any subset, specials among the inputs."""
    rng = np.random.default_rng(seed)
    calls = list(every_call())
    op, name = calls[rng.integers(len(calls))]
    inputs, outputs, options = call(op, ALL_SCALINGS.get(name))
    if isinstance(inputs, dict) and "x" in inputs:
        inputs["x"].reshape(-1)[rng.choice(inputs["x"].size, 5)] = [np.nan, np.inf, -np.inf, 1e30, 0]
    names = [n for n in outputs if rng.random() < 0.7] or list(outputs)
    dump = {}
    for n in names:
        bits = rng.integers(0, 256, outputs[n].nbytes).astype(np.uint8)
        dump[n] = bits.view(outputs[n].dtype).reshape(outputs[n].shape)
    report = oracle.check(op, inputs, dump, **options)
    assert not any("diagnosis failed" in note for note in report.notes), (op, name, report.notes)


# --- numbers that are fitted -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "number"),
    [(0.0997, 0.1004, 0.1), (2.49, 2.51, 2.5), (-0.0101, -0.0099, -0.01), (1.0, 1.0, 1.0), (3.0, 2.0, None)],
)
def test_the_simplest_number_of_an_interval(low, high, number):
    assert simplest_number(low, high) == number


def test_rare_conventions_are_tried_in_no_pair():
    """Those of the modules for rare faults go together with no other."""
    alone = {name for name, convention in CONVENTIONS.items() if convention.alone}
    assert {"amax-carried", "half-read-twice", "two-casts", "hadamard-order", "leaky-relu"} <= alone
    assert not alone & {"scale-floor", "truncation", "missing-rounding"}


def test_the_changelog_counts_what_is_named():
    """The newest counts are those of what is registered."""
    text = (Path(refops.__file__).parents[1] / "CHANGELOG.md").read_text(encoding="utf-8")
    assert int(re.search(r"more conventions, (\d+) in all", text)[1]) == len(CONVENTIONS)
    assert int(re.search(r"(\d+) known faults are named", text)[1]) == len(FAULTS)
