"""The oracle rejects nothing that is right: 1000 tensors of every class, and each way to be right alone.

And it can fail: the same variants one step beyond what is permitted are rejected, and the intervals are not much wider
than what permitted variants really do.
"""

from itertools import product

import numpy as np
import pytest
import variants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from variants import Variant

import refops
from refops.oracle.operation import OPERATIONS, Case
from tiers import sampled

TENSORS, CHUNK = 1000, 50
ROWS = variants.combinations()


def reject(task, variant, rng, **check):
    """The report on one variant's output if it is rejected, else None."""
    report = task.check(variants.run(task, variant, rng), variant.ulp, diagnose=False, **check)
    return None if report.ok else f"{task.label}, {variant}\n{report}"


# --- 1000 tensors ---------------------------------------------------------------------------------


@sampled("first", range(0, TENSORS, CHUNK), 5)
def test_no_false_alarm(first):
    """Zero rejected; every operation under every scaling comes in turn, all else is drawn."""
    rejected = [r for _, r in (variants.judge(0, index) for index in range(first, first + CHUNK)) if r]
    assert not rejected, "\n\n".join(map(str, rejected))


def test_the_tensors_cover_everything():
    """Every operation, every scaling, class of tensor, dtype and setting of a variant."""
    assert {op for op, _ in ROWS} == set(OPERATIONS)
    by_kind = {op: {name for other, name in ROWS if other == op} for op in OPERATIONS}
    for operation in OPERATIONS.values():
        if operation.takes_scaling or operation.kind == "dequantize":
            assert by_kind[operation.name] >= set(variants.SCALINGS), operation.name
    assert len(ROWS) < TENSORS
    labels, seen = set(), {}
    for index in range(TENSORS):
        task, variant, outputs = variants.case(0, index)
        labels |= set(task.label.split())
        for name in ("ulp", "elementary", "contract", "formula", "order", "hadamard"):
            seen.setdefault(name, set()).add(getattr(variant, name))
        seen.setdefault("outputs", set()).update(outputs)
    assert labels >= {*OPERATIONS, *variants.SCALINGS, *variants.CLASSES, "float32", "float16", "bfloat16"}
    assert seen["elementary"] == set(variants.ELEMENTARY) and seen["contract"] == set(variants.CONTRACTIONS)
    assert seen["formula"] == set(variants.FORMULAS) and seen["order"] == set(variants.ORDERS)
    assert seen["hadamard"] == set(variants.HADAMARDS) and seen["ulp"] == {1, 2, 4, 8, 64}
    assert seen["outputs"] >= {"y", "dx", "dbias", "drow_scales", "rowwise_data", "columnwise_scale_inv", "scale"}


def test_counting():
    """`count_false_alarms` reports its progress, is deterministic, and makes a case again from its number."""
    seen = []
    tensors, checks, rejected = variants.count_false_alarms(lambda *at: seen.append(at), tensors=12, seed=5)
    assert (tensors, rejected) == (12, []) and checks >= 12
    assert seen == [(i + 1, 12) for i in range(12)]
    for index in range(12):
        (first, one, a), (second, other, b) = variants.case(5, index), variants.case(5, index)
        assert first.label == second.label and one == other
        for name in a:
            np.testing.assert_array_equal(a[name].view(np.uint8), b[name].view(np.uint8))


# --- each way to be right -------------------------------------------------------------------------


@sampled("op", [*refops.ACTIVATIONS, *(f"d{name}" for name in refops.ACTIVATIONS)], 5)
def test_every_arithmetic_in_float32(op):
    """float32 output hides nothing: every elementary error, contraction and formula, around every corner."""
    for number, tensor_class in enumerate(("normal", "corners", "student", "ties")):
        rng = np.random.default_rng([number, len(op)])
        task = variants.draw_task(rng, op, None, tensor_class, variants.FP32)
        task.out_dtype, task.dbias = variants.FP32, False
        for elementary in variants.ELEMENTARY:
            for contract in variants.CONTRACTIONS:
                for formula in variants.FORMULAS[: 2 if elementary != "nearest" else 4]:
                    variant = Variant(4 if formula == "algebraic" else 2, elementary, contract, formula)
                    rejected = reject(task, variant, rng)
                    assert rejected is None, rejected


@sampled(
    ("tensor_class", "order"),
    product(["normal", "student", "log-normal", "ties", "subnormal", "huge", "special"], variants.ORDERS),
    2,
    in_all=1,
)
def test_every_order_of_sums(tensor_class, order):
    """dbias fused and unfused, drow_scales, rows that cancel."""
    rng = np.random.default_rng(3)
    for op, scaling in (
        ("dgelu", "mxfp8"),
        ("dswiglu", "current"),
        ("quantize", "nvfp4-1x16"),
        ("scaled_dswiglu", None),
    ):
        for dtype in (variants.FP32, variants.BF16):
            task = variants.draw_task(rng, op, scaling, tensor_class, dtype)
            task.dbias = op != "scaled_dswiglu"
            rejected = reject(task, Variant(order=order), rng)
            assert rejected is None, rejected


@sampled(
    ("tensor_class", "hadamard"),
    product(["normal", "log-normal", "ties", "zeros", "constant", "special", "huge"], variants.HADAMARDS),
    3,
    in_all=1,
)
def test_every_hadamard_transform(tensor_class, hadamard):
    rng = np.random.default_rng(4)
    for dtype in variants.DTYPES.values():
        for op in ("quantize", "silu"):
            task = variants.draw_task(rng, op, "nvfp4-rht", tensor_class, dtype)
            rejected = reject(task, Variant(hadamard=hadamard), rng)
            assert rejected is None, rejected


@sampled(
    ("two_d", "setting", "order"),
    product([False, True], ["mae", "mse"], ["sequential", "reversed", "pairwise", "permuted", "float64"]),
    3,
    in_all=1,
)
def test_every_order_of_4over6_errors(two_d, setting, order):
    """Errors that differ in their last bits alone decide between 4 and 6."""
    rng = np.random.default_rng(5)
    for tensor_class in ("normal", "ties", "student", "huge", "special", "zeros"):
        for e4m3_max in (256, 448):
            task = variants.draw_task(rng, "quantize", "nvfp4-4over6", tensor_class)
            task.scaling = refops.NVFP4Scaling(two_d=two_d, four_over_six=setting, e4m3_max=e4m3_max)
            rejected = reject(task, Variant(order=order), rng)
            assert rejected is None, rejected


@pytest.mark.parametrize("op", ["quantize", "swiglu", "dgelu"])
def test_stochastic_rounding_with_bits_of_its_own(op):
    """A kernel that draws its own bits, other ones each time."""
    for seed in range(12):
        rng = np.random.default_rng([9, seed])
        tensor_class = ("normal", "log-normal", "student", "ties")[seed % 4]
        task = variants.draw_task(rng, op, "nvfp4-stochastic", tensor_class)
        outputs = variants.run(task, Variant.draw(rng, ulp=4), rng)
        task.scaling = refops.NVFP4Scaling(stochastic_rounding=True, seed=1 << 50)
        report = task.check(outputs, 4, diagnose=False, random_bits="any")
        assert report.ok, f"{task.label}\n{report}"


def test_bfloat16_cast_up_early():
    """float32 inputs that hold bfloat16 values: another nominal dtype, so other roundings, judged as what they are."""
    rng = np.random.default_rng(6)
    for op in ("swiglu", "dgelu", "quantize"):
        for scaling in ("delayed-scale-1", "mxfp8", "nvfp4-1x16"):
            task = variants.draw_task(rng, op, scaling, "normal", variants.BF16)
            task.inputs = {name: value.astype(np.float32) for name, value in task.inputs.items()}
            rejected = reject(task, Variant.draw(rng), rng)
            assert rejected is None, rejected


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(ROWS),
    st.sampled_from(variants.CLASSES),
    st.sampled_from(list(variants.DTYPES)),
    st.builds(
        lambda ulp, formula, **others: Variant(
            max(ulp, 4) if formula == "algebraic" else ulp, formula=formula, **others
        ),
        ulp=st.sampled_from([1, 2, 3, 8, 64]),
        elementary=st.sampled_from(variants.ELEMENTARY),
        contract=st.sampled_from(variants.CONTRACTIONS),
        formula=st.sampled_from(variants.FORMULAS),
        order=st.sampled_from(variants.ORDERS),
        hadamard=st.sampled_from(variants.HADAMARDS),
    ),
    st.integers(0, 1 << 30),
)
def test_any_variant_of_any_tensor(row, tensor_class, dtype, variant, seed):
    rng = np.random.default_rng(seed)
    task = variants.draw_task(rng, *row, tensor_class, variants.DTYPES[dtype])
    rejected = reject(task, variant, rng)
    assert rejected is None, rejected


# --- the variants are right, the test can fail, the oracle is tight -------------------------------


@sampled("scaling", [None, *variants.SCALINGS], 4, ids=str)
def test_without_freedom_a_variant_is_the_reference(scaling):
    """Nearest exp and tanh, nothing contracted, sums in order: bit for bit, NaN as a class.

    Two implementations that share no arithmetic. Left out are sums over more than one chunk of 128 rows, and the
    Hadamard transform, whose float64 sums are taken in another order.
    """
    rng = np.random.default_rng(7)
    for op in [op for op, name in ROWS if name == scaling]:
        for tensor_class in ("normal", "special", "ties", "amax-edges"):
            task = variants.draw_task(rng, op, scaling, tensor_class)
            outputs = variants.run(task, Variant(), rng)
            inputs = task.inputs if len(task.inputs) > 1 else next(iter(task.inputs.values()))
            case = Case(task.op, inputs, task.scaling, task.params)
            arrays, _ = case.fit_outputs(outputs)
            reference = case.reference(arrays)
            for name, array in arrays.items():
                if name in ("dbias", "drow_scales") or (scaling == "nvfp4-rht" and ("column" in name or name == "y")):
                    continue
                assert same(array, reference[name], case.slots[name]), f"{task.label}: {name}"


def same(ours, theirs, slot):
    """Equal, NaN as one class and the sign of zero aside for values."""
    if ours.dtype == np.uint8:
        if slot.fmt is None or slot.fmt == refops.E2M1:
            return np.array_equal(ours, theirs)
        ours, theirs = (np.where(np.isnan(slot.fmt.values[a]), 0x7F, a) for a in (ours, theirs))
        return np.array_equal(ours, theirs)
    return np.array_equal(ours.astype(np.float32), theirs.astype(np.float32), equal_nan=True)


@pytest.mark.parametrize("elementary", ["up", "down"])
@pytest.mark.parametrize("name", [n for n in refops.ACTIVATIONS if n not in ("relu", "srelu", "reglu", "sreglu")])
def test_an_error_beyond_the_permitted_is_rejected(name, elementary):
    """exp and tanh off by 64 ulp and judged at 2, in float32, value and gradient."""
    rng = np.random.default_rng(8)
    for op in (name, f"d{name}"):
        task = variants.draw_task(rng, op, None, "normal", variants.FP32)
        task.inputs = {
            n: variants.draw_tensor(rng, "normal", (64, v.shape[-1]), variants.FP32) for n, v in task.inputs.items()
        }
        task.out_dtype, task.params, task.dbias = variants.FP32, {}, False
        variant = Variant(2, elementary)
        assert reject(task, variant, rng) is None
        assert reject(task, variant.overstepping(64), rng) is not None


@pytest.mark.parametrize("gradient", [False, True], ids=["value", "gradient"])
@pytest.mark.parametrize("name", refops.ACTIVATIONS)
def test_the_intervals_are_tight(name, gradient, record_property):
    """Width of the interval over the spread of permitted variants (at least one ulp), median where nothing cancels.

    Bound 5: whatever lies within 2 ulp of the truth is accepted, 4 ulp and the ends' rounding, also where exp and tanh
    contribute less.
    """
    ratio, share = variants.widths(name, gradient=gradient)
    record_property("ratio", ratio)
    assert ratio <= 5, ratio
    assert share > 0.5
