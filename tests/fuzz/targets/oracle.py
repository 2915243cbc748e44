"""Targets of `refops.oracle`: right dumps are right, changed ones are judged, nonsense is refused."""

import json

import numpy as np
from arguments_fuzz import (
    FP8,
    SCALINGS,
    contents,
    directions,
    fits_of,
    laid_out,
    parameters,
    plain,
    shape,
    spoiled,
    tensor,
    wrong,
)
from harness import DocumentedError, require, target
from hypothesis import strategies as st

import refops
from refops import oracle
from refops.activations import ACTIVATIONS
from refops.oracle import testing  # noqa: F401  oracle.testing
from refops.oracle.operation import QUANTIZED_ARRAYS

NEEDS = ("refops.oracle.diagnosis",)


def right(case):
    """(op, inputs, outputs, options) of a dump that is right; `DocumentedError` where the arguments do not fit."""
    try:
        return _right(case)
    except (ValueError, TypeError) as error:
        raise DocumentedError(str(error)) from error


def _right(case):
    name = case.choose(tuple(ACTIVATIONS))
    kind = case.choose(["activation", "grad", "quantize", "quantize", "fused", "dequantize", "update", "scaled"])
    scaling, options = case.draw(SCALINGS), {}
    x = tensor(case, fits=2 * (fits_of(scaling) or 16))
    if kind == "update":
        history = np.abs(contents(case, (4, 3), np.float32))
        scale = np.abs(contents(case, (3,), np.float32)) + np.float32(1)
        fmt = case.choose(FP8)
        new = refops.update_delayed_scale(history, scale, fmt)
        inputs = {"amax_history": history, "scale": scale}
        return "update_delayed_scale", inputs, dict(zip(inputs, new, strict=True)), {"params": {"fmt": fmt}}
    if kind in ("activation", "grad", "scaled"):
        params = parameters(case, name)
        options["params"] = params
        if kind == "activation":
            return name, x, refops.activation(name, x, **params), options
        if kind == "scaled":
            name = case.choose(refops.SCALED_ACTIVATIONS)
            row_scales = tensor(case, (int(np.prod(x.shape[:-1])),), np.dtype(np.float32))
            return (
                f"scaled_{name}",
                {"x": x, "row_scales": row_scales},
                refops.scaled_activation(name, x, row_scales),
                {},
            )
        dy = tensor(case, (*x.shape[:-1], x.shape[-1] // (1 + ACTIVATIONS[name].gated)), x.dtype)
        dx, dbias = refops.activation_grad(name, dy, x, dbias=True, **params)
        return f"d{name}", {"dy": dy, "x": x}, {"dx": dx, "dbias": dbias}, options
    flags = directions(case)
    if getattr(scaling, "row_scaled", False):
        flags = {}
    if kind == "fused":
        q, op = refops.activation_quantize(name, x, scaling, **flags), name
    else:
        q, op = refops.quantize(x, scaling, **flags), "quantize"
    if kind == "dequantize":
        return "dequantize", q, refops.dequantize(q), {}
    return op, x, q, {"scaling": scaling}


def as_dict(outputs):
    """Outputs by name, as a dump of files has them."""
    if isinstance(outputs, refops.Quantized):
        return {name: getattr(outputs, name) for name in QUANTIZED_ARRAYS if getattr(outputs, name) is not None}
    return outputs


def require_report(report):
    """A report prints, and its numbers fit together."""
    require(str(report) and json.dumps(report.ok) and repr(report), "a report without text")
    require(report.ok == (not report.mismatches), "the verdict contradicts the mismatches")


@target(
    "oracle_right",
    ["refops.oracle.check", "refops.oracle.Report", "refops.oracle.ArrayVerdict", "refops.oracle.Coverage"],
    cases=400,
    needs=NEEDS,
)
def oracle_right(case):
    """What refops writes is right, at any ulp, however the arrays lie in memory."""
    op, inputs, outputs, options = right(case)
    options["ulp"] = case.choose([0, 2, 2, 4, 0.5, np.float32(2)])
    if case.chance(0.5):
        outputs = as_dict(outputs)
        if isinstance(outputs, dict):
            outputs = {name: laid_out(case, plain(array)) for name, array in outputs.items()}
    report = case.call("refops.oracle.check", op, inputs, outputs, **options)
    require_report(report)
    require(report.ok, f"the reference is rejected: {report}")
    report.raise_for_mismatch()
    rebuild(case, "ArrayVerdict", report.arrays[0])
    rebuild(case, "Report", report)
    if report.coverage is not None:
        require(str(report.coverage) in str(report), "what was covered is not said")
        rebuild(case, "Coverage", report.coverage)


def rebuild(case, name, value):
    """The class called with the fields of one of its objects gives an equal one."""
    fields = {field: getattr(value, field) for field in value.__dataclass_fields__}
    made = case.call(f"refops.oracle.{name}", **fields)
    require(repr(made) == repr(value), "another object", made, value)


@target(
    "oracle_wrong",
    [
        "refops.oracle.check",
        "refops.oracle.Mismatch",
        "refops.oracle.MismatchError",
        "refops.oracle.Explanation",
        "refops.oracle.testing.assert_matches",
    ],
    cases=350,
    seconds=60,
    needs=NEEDS,
)
def oracle_wrong(case):
    """Changed dumps are judged and diagnosed without an error; a report of mismatches raises one."""
    op, inputs, outputs, options = right(case)
    outputs = as_dict(outputs)
    if not isinstance(outputs, dict):
        outputs = {case.choose(["y"]): outputs}
    outputs = {name: np.array(array) for name, array in outputs.items()}
    chosen = outputs[case.choose(list(outputs))]
    flat = chosen.reshape(-1).view(np.uint8)
    how = case.below(4)
    if how == 0:
        flat[...] = case.rng.integers(0, 256, flat.shape)
    elif how == 1:
        flat[...] = case.choose([0, 255, 0x7F])
    elif flat.size:
        for _ in range(case.below(20, 1)):
            flat[case.below(flat.size)] ^= 1 << case.below(8)
    report = case.call("refops.oracle.check", op, inputs, outputs, diagnose=case.chance(0.7), **options)
    require_report(report)
    require(not any("the diagnosis failed" in note for note in report.notes), "the diagnosis failed", report.notes)
    if report.ok:
        again = case.call("refops.oracle.testing.assert_matches", op, inputs, outputs, diagnose=False, **options)
        require(again.ok, "another verdict")
        return
    try:
        if case.chance(0.5):
            oracle.testing.assert_matches(op, inputs, outputs, diagnose=False, **options)
        else:
            report.raise_for_mismatch()
        require(False, "no error is raised")
    except oracle.MismatchError as error:
        require(str(error), "an error without text")
        case.call("refops.oracle.MismatchError", *error.args)
    rebuild(case, "Mismatch", report.mismatches[0])
    for explanation in report.diagnosis[:1]:
        rebuild(case, "Explanation", explanation)


def product(case):
    """(inputs, y, options) of a product that is right: quantized or plain operands, both with k last or first."""
    k, sizes = 32 * case.below(4, 1), [32 * case.below(3, 1) for _ in "ab"]
    layout = case.choose(["mk,nk", "mk,kn", "km,nk", "km,kn"])
    scaling = case.draw(SCALINGS)
    operands, values = [], []
    for size, axes in zip(sizes, layout.split(","), strict=True):
        turned = axes[0] == "k"
        x = contents(case, (k, size) if turned else (size, k), np.float32)
        if case.chance(0.7):
            try:
                x = refops.quantize(x, scaling, rowwise=not turned, columnwise=turned)
            except (ValueError, TypeError) as error:
                raise DocumentedError(str(error)) from error
        operands.append(x)
        with np.errstate(all="ignore"):
            plain_values = refops.dequantize(x) if isinstance(x, refops.Quantized) else x
            values.append((plain_values.T if turned else plain_values).astype(np.float64))
    with np.errstate(all="ignore"):
        y = (values[0] @ values[1].T).astype(case.choose([np.float32, np.float16]))
    return dict(zip("ab", operands, strict=True)), y, {"params": {"layout": layout}}


@target("oracle_products", ["refops.oracle.check", "refops.oracle.ProductReport"], cases=200, seconds=60, needs=NEEDS)
def oracle_products(case):
    """float64 products are right; changed ones are judged and diagnosed without an error."""
    inputs, y, options = product(case)
    report = case.call("refops.oracle.check", "matmul", inputs, laid_out(case, y), **options)
    require_report(report)
    require(report.ok, f"a right product is rejected: {report}")
    rebuild(case, "ProductReport", report)
    flat = y.reshape(-1).view(np.uint8)
    if case.chance(0.3):
        flat[...] = case.rng.integers(0, 256, flat.shape)
    else:
        flat[case.below(flat.size)] ^= 1 << case.below(8)
    options |= {"diagnose": case.chance(0.5), "budget": 1}
    report = case.call("refops.oracle.check", "matmul", inputs, y, **options)
    require_report(report)
    require(not any("the diagnosis failed" in note for note in report.notes), "the diagnosis failed", report.notes)


@target("oracle_explanation", ["refops.oracle.Explanation"], cases=30, needs=NEEDS)
def oracle_explanation(case):
    """A dump of a known convention is named."""
    x = contents(case, (64, 128), np.float32)
    x = np.where(np.isfinite(x), x, np.float32(1))
    q = refops.quantize(x, refops.MXFP8Scaling(refops.E4M3, scale_rounding="floor"))
    report = refops.oracle.check("quantize", x, as_dict(q), scaling=refops.MXFP8Scaling(refops.E4M3))
    require_report(report)
    fields = {"names": ("a",), "sentence": case.draw(st.text(max_size=20)), "explained": case.rng.random()}
    case.call("refops.oracle.Explanation", **fields)


@target("oracle_places", ["refops.oracle.Lines", "refops.oracle.Place"], cases=60, needs=NEEDS)
def oracle_places(case):
    """A place's mask holds what its words say: rows times columns."""
    sizes, sides = (case.below(40, 1), case.below(40, 1)), []
    for size in sizes:
        first, period = case.below(size), case.below(8, 1)
        lines = case.call(
            "refops.oracle.Lines",
            size=size,
            first=first,
            last=first + case.below(size - first),
            period=period,
            phases=(case.below(period), case.below(period)),
        )
        require(lines.mask().shape == (size,) and isinstance(lines.words("row"), str), "lines without a mask")
        sides.append(lines)
    place = case.call("refops.oracle.Place", arrays=(), rows=sides[0], columns=sides[1])
    mask = place.mask(sizes)
    require(mask.sum() == sides[0].mask().sum() * sides[1].mask().sum(), "another mask")
    require(json.dumps(place.as_dict()) and isinstance(str(place), str), "a place without text")


@target("oracle_experts", ["refops.oracle.GroupedReport", "refops.oracle.ExpertReport"], cases=40, needs=NEEDS)
def oracle_experts(case):
    """Experts that are quantized each by itself are right, and one that is not is named."""
    splits = [32 * case.below(4) for _ in range(case.below(3, 1))] + [32]
    x = np.where(np.isfinite(values := contents(case, (sum(splits), 64), np.float32)), values, np.float32(1))
    scaling, starts = refops.MXFP8Scaling(refops.E4M3), np.cumsum([0, *splits[:-1]])
    parts = [as_dict(refops.quantize(x[a : a + n], scaling)) for a, n in zip(starts, splits, strict=True)]
    report = case.call("refops.oracle.check", "quantize", x, parts, scaling=scaling, m_splits=splits)
    require(report.ok and str(report), "the reference is rejected", report)
    parts[-1] = {name: array.copy() for name, array in parts[-1].items()}
    parts[-1]["rowwise_data"].reshape(-1)[0] ^= 0x40
    wrong = case.call("refops.oracle.check", "quantize", x, parts, scaling=scaling, m_splits=splits)
    require(wrong.wrong_experts == (len(splits) - 1,), "another expert is wrong", wrong)
    rebuild(case, "GroupedReport", wrong)
    rebuild(case, "ExpertReport", wrong.experts[-1])


@target("oracle_nonsense", ["refops.oracle.check"], cases=500, needs=NEEDS)
def oracle_nonsense(case):
    """Arguments that do not fit are refused by name."""
    op, inputs, outputs, options = right(case)
    outputs = as_dict(outputs)
    how = case.below(6)
    if how == 0:
        op = case.choose([wrong(case), "dswiglu", "quantize", "dequantize", "gelu", "scaled_swiglu", "clamped_dswiglu"])
    elif how == 1:
        inputs = case.choose(
            [wrong(case), {}, {"x": wrong(case)}, {"x": tensor(case), "dy": tensor(case)}, {"q": inputs}]
        )
    elif how == 2:
        outputs = case.choose(
            [wrong(case), {}, {"y": wrong(case)}, {"data": wrong(case)}, {"nothing": tensor(case)}, {1: 2}]
        )
    elif how == 3 and isinstance(outputs, dict):
        name = case.choose(list(outputs))
        outputs = {**outputs, name: case.choose([tensor(case), wrong(case), np.zeros(shape(case), np.uint8)])}
    else:
        extra = {
            "ulp": case.choose([-1, np.nan, "2", None]),
            "padding": "x",
            "random_bits": "none",
            "swizzled_scales": 1,
        }
        name = case.choose([*extra, "scaling", "params", "diagnose"])
        options[name] = extra.get(name, wrong(case)) if case.chance(0.6) else wrong(case)
    require_report(case.call("refops.oracle.check", op, inputs, outputs, **spoiled(case, options, 0.1)))


@target("oracle_acceptable", ["refops.oracle.acceptable", "refops.oracle.Acceptable"], cases=350, needs=NEEDS)
def oracle_acceptable(case):
    """What refops writes lies inside of the bounds, which are ordered; nonsense is refused."""
    op, inputs, outputs, options = right(case)
    options = {"params": options.get("params"), "ulp": case.choose([2, 2, 0.5, 4, np.float32(1)])}
    if case.chance(0.15):
        options[case.choose(["ulp", "params", "dtype"])] = case.choose([0, -1, np.nan, np.uint8, wrong(case)])
        judge_bounds(case.call("refops.oracle.acceptable", op, inputs, **options), None)
        return
    found = case.call("refops.oracle.acceptable", op, inputs, **options)  # codes have no bounds: refused
    if isinstance(outputs, dict):
        outputs = outputs["dx"]
    elif op == "dequantize":
        outputs = refops.dequantize(inputs, dtype=inputs.dtype)
    elif isinstance(outputs, refops.Quantized):  # the bounds are of what is quantized
        outputs = refops.activation(op, inputs)
    judge_bounds(found, outputs)
    fields = case.call("refops.oracle.Acceptable", *found)
    require(fields._asdict().keys() == found._asdict().keys(), "another tuple")


def judge_bounds(found, written):
    """Bounds of one shape and dtype, ordered; with what refops wrote inside."""
    lower, upper = (np.asarray(bound, np.float64) for bound in (found.lower, found.upper))
    require(lower.shape == upper.shape == found.nan.shape and found.nan.dtype == bool, "shapes or dtypes differ")
    require(found.lower.dtype == found.upper.dtype, "the bounds' dtypes differ", found.lower.dtype, found.upper.dtype)
    none = np.isnan(lower)
    require(np.array_equal(none, np.isnan(upper)), "one bound is NaN, the other is not")
    require(bool(found.nan[none].all()), "no value is right, and NaN is not either")
    require(bool((none | (lower <= upper)).all()), "a lower bound lies above the upper one")
    if written is None:
        return
    require(
        written.shape == lower.shape and written.dtype == found.lower.dtype, "another shape or dtype", written.dtype
    )
    wide = written.astype(np.float64)
    inside = np.where(np.isnan(wide), found.nan, (lower <= wide) & (wide <= upper))
    require(bool(inside.all()), "the reference lies outside of its bounds", np.argwhere(~inside)[:3].tolist())
