"""Outputs of other implementations as dumps for the oracle: the arrays of tests/vectors.

Each is read as the output of TE's operation on the same input. Where the other implementation follows TE the oracle
must call it right; where it is documented to do something else (`refops.conformance`), the first answer must name that.
The comparison of refops itself with these arrays is `refops.conformance`.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import refops
import refops.rounding
from refops import oracle
from refops.conformance import DTYPES, Vectors
from refops.oracle.operation import Case

VECTORS = Path(__file__).resolve().parents[1] / "vectors"
F = np.float32
#: What the oracle says of a right dump, and of one that it cannot explain.
RIGHT, UNKNOWN = "right", "unknown"


@dataclass(frozen=True)
class Dump:
    """One dump with its expected answer.

    Attributes:
        file: the vector file.
        peer: who made the arrays.
        variant: which of its arrays.
        op, inputs, outputs, scaling, params: arguments of `oracle.check`.
        expected: convention names of the documented divergence; () where there is none.
        ulp: permitted error.
    """

    file: str
    peer: str
    variant: str
    op: str
    inputs: object
    outputs: dict
    scaling: object = None
    params: dict = field(default_factory=dict)
    expected: tuple[str, ...] = ()
    ulp: float = 2

    def check(self, **options):
        """The oracle's report."""
        report = oracle.check(
            self.op, self.inputs, self.outputs, scaling=self.scaling, params=self.params, ulp=self.ulp, **options
        )
        assert not any("diagnosis failed" in note for note in report.notes), (str(self), report.notes)
        return report

    def __str__(self):
        return f"{self.file}: {self.variant}"


def dumps():
    """Every dump of tests/vectors, in the order of the file names."""
    readers = {
        "mxfp8": _mxfp8,
        "mxfp8_floor_even_ceil": _mxfp8_ocp,
        "nvfp4": _nvfp4,
        "nvfp4_rht": _nvfp4_rht,
        "nvfp4_other": _nvfp4_other,
        "fp8_block": _fp8_block,
        "fp8_current": _fp8_current,
        "fp8_delayed_update": _delayed_update,
        "cast_e4m3": _cast_fp8,
        "cast_e5m2": _cast_fp8,
        "act_unary": _act_unary,
        "act_gated": _act_gated,
        "dequant_mxfp8": _dequant_mxfp8,
        "dequant_nvfp4": _dequant_nvfp4,
        "dequant_fp8_block": _dequant_fp8_block,
    }
    for path in sorted(VECTORS.glob("*.npz")):
        v = Vectors(path)
        read = readers.get(v.meta["op"])
        if read is not None:  # the others hold no output of an operation: tables, casts of scales, swizzles
            peer = v.peer.split(" ")[0]
            for variant, op, inputs, outputs, *settings in read(v):
                yield Dump(path.stem, peer, variant, op, inputs, outputs, *settings)


def answer(report):
    """RIGHT, UNKNOWN, or the names of the first explanation, sorted, as text."""
    if report.ok:
        return RIGHT
    return " + ".join(sorted(report.diagnosis[0].names)) if report.diagnosis else UNKNOWN


def third_party_results():
    """List of (file, peer, variant, verdict, answer, expected answer), all strings, one for each dump."""
    rows = []
    for dump in dumps():
        report = dump.check()
        expected = " + ".join(sorted(dump.expected)) or RIGHT
        verdict = RIGHT if report.ok else "wrong"
        rows.append((dump.file, dump.peer, dump.variant, verdict, answer(report), expected))
    return rows


# --- readers: each yields (variant, op, inputs, outputs, scaling, params, expected, ulp), the last ones optional ----


def _mxfp8(v):
    fmt = refops.E5M2 if "e5m2" in v.name else refops.E4M3
    for prefix in ("", "special_"):
        if f"{prefix}x_bits" in v.arrays:
            outputs = {
                "rowwise_data": v.arrays[f"{prefix}row_q"],
                "rowwise_scale_inv": v.arrays[f"{prefix}row_scale"],
                "columnwise_data": v.arrays[f"{prefix}col_q"],
                "columnwise_scale_inv": v.arrays[f"{prefix}col_scale"],
            }
            yield f"{prefix}both directions", "quantize", v.tensor(f"{prefix}x_bits"), outputs, refops.MXFP8Scaling(fmt)


def _mxfp8_ocp(v):
    fmt = refops.E5M2 if "e5m2" in v.name else refops.E4M3
    for prefix, rule in (("floor", "floor"), ("even", "even"), ("ceil", "ceil_ocp"), ("special_floor", "floor")):
        x = v.tensor("special_x_bits" if prefix == "special_floor" else "x_bits")
        outputs = {"rowwise_data": v.arrays[f"{prefix}_q"], "rowwise_scale_inv": v.arrays[f"{prefix}_scale"]}
        not_finite = ("nan-scale-for-nonfinite",) if prefix == "special_floor" else ()
        divergence = (f"scale-{rule.replace('_', '-')}", *not_finite)
        yield f"{prefix} read as TE's", "quantize", x, outputs, refops.MXFP8Scaling(fmt), {}, divergence
        own = refops.MXFP8Scaling(fmt, scale_rounding=rule)
        yield f"{prefix} read as its own rule", "quantize", x, outputs, own, {}, not_finite


def _nvfp4_outputs(v, prefix):
    outputs = {}
    for direction, suffix, amax in (("rowwise", "", "row"), ("columnwise", "_t", "col")):
        outputs[f"{direction}_data"] = v.arrays[f"{prefix}_q{suffix}"]
        outputs[f"{direction}_scale_inv"] = v.arrays[f"{prefix}_scale{suffix}"]
        outputs[f"amax_{direction}"] = v.arrays[f"{prefix}_amax_{amax}_bits"].view(F)
    return outputs


def _te_python_zeros(x, outputs, scaling):
    """TE's Python reference encodes -0 and NaN as 0: which of the two this dump shows."""
    case = Case("quantize", x, scaling)
    arrays, _ = case.fit_outputs(outputs)
    reference = case.reference(arrays)
    names = set()
    for name in ("rowwise_data", "columnwise_data"):
        ours, theirs = (refops.unpack_fp4(a[name]) for a in (reference, arrays))
        lost = ours[(theirs == 0) & (ours != 0)]
        names |= {"zero-sign-lost"} if (lost == 8).any() else set()
        names |= {"nan-as-a-number"} if (lost == 7).any() else set()
    return tuple(names)


def _nvfp4(v):
    for variant in v.variants:
        scaling = refops.NVFP4Scaling(
            two_d=variant["tile"] == [16, 16],
            four_over_six=variant["four_over_six"].lower() if "four_over_six" in variant else None,
            e4m3_max=variant.get("e4m3_max", 448),
            row_scaled=variant.get("row_scaled", False),
        )
        x, outputs = v.tensor(variant["input"]), _nvfp4_outputs(v, variant["id"])
        yield variant["id"], "quantize", x, outputs, scaling, {}, _te_python_zeros(x, outputs, scaling)


def _nvfp4_rht(v):
    signs = {"te_signs": v.arrays["te_signs"], "custom_signs": v.arrays["custom_signs"], "none": np.ones(16)}
    for variant in v.variants:
        mask = sum(1 << i for i, sign in enumerate(signs[variant["signs"]]) if sign < 0)
        scaling = refops.NVFP4Scaling(rht=True, sign_mask=mask)
        x, outputs = v.tensor(variant["input"]), _nvfp4_outputs(v, variant["id"])
        name = f"{variant['id']}, signs {variant['signs']}"
        yield name, "quantize", x, outputs, scaling, {}, _te_python_zeros(x, outputs, scaling)


def _nvfp4_other(v):
    # In bfloat16 three codes show that torchao's tensor scale is amax / 2688, inverted.
    ao2 = ("clamped-block-scale",) + ("global-scale-by-division",) * ("bf16" in v.name)
    for prefix, name, expected in (
        ("ao1", "torchao, one level", ("one-level-nvfp4",)),
        ("ao2", "torchao, two levels", ao2),
        ("mo", "modelopt", ("zero-block-scale", "zero-sign-lost")),
    ):
        outputs = {"rowwise_data": v.arrays[f"{prefix}_q"], "rowwise_scale_inv": v.arrays[f"{prefix}_scale"]}
        yield name, "quantize", v.tensor(), outputs, refops.NVFP4Scaling(), {}, expected


def _fp8_block(v):
    for variant in v.variants:
        prefix, two_d = variant["id"], variant["tile"] == [128, 128]
        fmt = refops.FORMATS[variant["fp8"]]
        scaling = refops.BlockScaling(fmt, 2 if two_d else 1, variant["pow_2_scales"], variant["eps"])
        codes = v.arrays[f"{prefix}_q"]
        scales, transposed = (v.arrays[f"{prefix}_scale_inv{t}_bits"].view(F) for t in ("", "_t"))
        outputs = {
            "rowwise_data": codes,
            "columnwise_data": codes.T if two_d else v.arrays[f"{prefix}_q_t"],
            "rowwise_scale_inv": scales if two_d else scales.T,  # 1x128: stored [block, row]
            "columnwise_scale_inv": transposed if two_d else transposed.T,
        }
        yield prefix, "quantize", v.tensor(variant["input"]), outputs, scaling


def _fp8_current(v):
    for variant in v.variants:
        x, prefix = v.tensor(variant["input"]), variant["id"]
        scaling = refops.CurrentScaling(refops.FORMATS[variant["fp8"]], variant["pow_2_scales"], variant["eps"])
        codes, inverse = v.arrays[f"{prefix}_q"], v.arrays[f"{prefix}_scale_inv_bits"].view(F)
        outputs = {"rowwise_data": codes, "columnwise_data": codes.T, "rowwise_scale_inv": inverse}
        same = inverse == refops.quantize(x, scaling).rowwise_scale_inv
        expected = () if same.all() else ("scale-capped-at-input-dtype",)
        yield prefix, "quantize", x, outputs, scaling, {}, expected


def _delayed_update(v):
    steps = v.arrays["step_amax"]
    for variant in v.variants:
        fmt = refops.E4M3 if variant["fp8_max"] == 448 else refops.E5M2
        params = {"fmt": fmt, "margin": variant["margin"], "algorithm": variant["algo"], "keep_unused": False}
        histories = v.arrays[f"{variant['id']}_history_bits"].view(F)
        scales = v.arrays[f"{variant['id']}_scale_bits"].view(F)
        for step in range(1, len(steps)):
            history = np.concatenate([steps[step][None], histories[step - 1][1:]])
            inputs = {"amax_history": history, "scale": scales[step - 1]}
            outputs = {"amax_history": histories[step], "scale": scales[step]}
            ours = refops.update_delayed_scale(history, scales[step - 1], **params)[1]
            differ, has_nan = ours != scales[step], np.isnan(history).any(axis=0)
            expected = ("nan-history",) if (differ & has_nan).any() else ()
            expected += ("reciprocal-times-maximum",) if (differ & ~has_nan).any() else ()
            name = f"{variant['id']} {variant['algo']} step {step}"
            yield name, "update_delayed_scale", inputs, outputs, None, params, expected


def _cast_fp8(v):
    """A cast is quantization with scale 1."""
    scaling = refops.DelayedScaling(refops.FORMATS[v.meta["op"].removeprefix("cast_")])
    x = v.tensor().reshape(1, -1)
    yield "saturating", "quantize", x, {"rowwise_data": v.arrays["q_sat"].reshape(1, -1)}, scaling
    outputs = {"rowwise_data": v.arrays["q_nosat"].reshape(1, -1)}
    yield "not saturating", "quantize", x, outputs, scaling, {}, ("no-saturation",)


def _act_unary(v):
    """TE's host formulas in float32, and float64 values rounded once; dy = 1 for derivatives.

    PyTorch's float64 takes 1.702 and sqrt(2/pi) as they are, TE's float32 constants differ by 2^-25 relative: at
    z = 1.702 x = 20 that moves the result by 20 * 2^-25, 10 ulp.
    """
    x = v.arrays["x"].reshape(1, -1)
    one = np.ones_like(x)
    for name in ("gelu", "qgelu", "relu", "srelu", "silu"):
        peer = "gelu_tanh" if name == "gelu" else name
        for source, value, slope, ulp in (
            ("TE's float32", f"te_f32_{name}", f"te_f32_d{name}", 2),
            ("float64", f"f64_{peer}", f"f64_d{peer}", 16),
        ):
            y, dx = (_once(v.arrays[n], DTYPES["fp32"]).reshape(1, -1) for n in (value, slope))
            yield f"{name}, {source}", name, x, {"y": y}, None, {}, (), ulp
            yield f"d{name}, {source}", f"d{name}", {"dy": one, "x": x}, {"dx": dx}, None, {}, (), ulp
    erf = ("erf-gelu",)
    y, dx = (_once(v.arrays[n], DTYPES["fp32"]).reshape(1, -1) for n in ("f64_gelu_erf", "f64_dgelu_erf"))
    yield "gelu with erf", "gelu", x, {"y": y}, None, {}, erf
    yield "dgelu with erf", "dgelu", {"dy": one, "x": x}, {"dx": dx}, None, {}, erf


def _act_gated(v):
    """float64 values rounded once, to the input's dtype and to float32."""
    x, dy = v.tensor("x_bits", "bf16"), v.tensor("dy_bits", "bf16")
    for name in ("glu", "geglu", "qgeglu", "reglu", "sreglu", "swiglu"):
        peers = [("geglu_tanh", ()), ("geglu_erf", ("erf-gelu",))] if name == "geglu" else [(name, ())]
        for peer, expected in peers:
            for dtype in ("fp32", "bf16"):
                y, dx = (_once(v.arrays[f"{peer}_{n}_f64"], DTYPES[dtype]) for n in ("y", "dx"))
                yield f"{peer} {dtype}", name, x, {"y": y}, None, {}, expected
                yield f"d{peer} {dtype}", f"d{name}", {"dy": dy, "x": x}, {"dx": dx}, None, {}, expected


def _once(values, dtype):
    with np.errstate(all="ignore"):  # beyond the dtype's range is inf
        return refops.rounding.round_once(values, dtype)


def _dequant_mxfp8(v):
    inputs = {"rowwise_data": v.arrays["mx_q"], "rowwise_scale_inv": v.arrays["mx_scale"]}
    scaling = refops.MXFP8Scaling(refops.E4M3)
    for name in ("fp32", "bf16"):
        exact, theirs = (v.tensor(f"mx_out_{who}_{name}_bits", name) for who in ("exact", "torchao"))
        yield f"exact product to {name}", "dequantize", inputs, {"y": exact}, scaling
        differ = (exact != theirs) & ~np.isnan(exact.astype(F))
        expected = ("low-precision-arithmetic",) if differ.any() else ()
        yield f"torchao to {name}", "dequantize", inputs, {"y": theirs}, scaling, {}, expected


def _dequant_nvfp4(v):
    inputs = {"rowwise_data": v.arrays["q"], "rowwise_scale_inv": v.arrays["scale"], "amax_rowwise": v.arrays["amax"]}
    for name in ("fp32", "bf16"):
        yield f"to {name}", "dequantize", inputs, {"y": v.tensor(f"out_{name}_bits", name)}, refops.NVFP4Scaling()


def _dequant_fp8_block(v):
    for variant in v.variants:
        prefix = variant["id"]
        scaling = refops.BlockScaling(refops.E4M3, 2 if variant["tile"] == [128, 128] else 1)
        scales = v.arrays[f"{prefix}_scale_gemm_layout_bits"].view(F)
        inputs = {"rowwise_data": v.arrays[f"{prefix}_q"], "rowwise_scale_inv": scales}
        outputs = {"y": v.tensor(f"{prefix}_out_bits", variant["out_dtype"])}
        yield f"{variant['tile']} to {variant['out_dtype']}", "dequantize", inputs, outputs, scaling
