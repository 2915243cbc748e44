"""Results of refops' public calls, compared bit for bit with arrays that other implementations made.

The arrays are the `.npz` files of `tests/vectors` (its README says who made each). Every comparison returns counts. A
documented divergence of another implementation is recomputed element by element: a difference counts as explained only
where that divergence says it must be. NaN codes compare as one class: their bits are not specified.

It does not cover what no public call returns: scale functions, tables and float64 truths are compared in
`tests/refops`. Other people's kernels are judged elsewhere (`refops.oracle`).
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import ml_dtypes
import numpy as np

import refops
from refops.activations import Arithmetic, bind_activation
from refops.arguments import BFLOAT16
from refops.formats import E2M1, E4M3, E5M2, E8M0, FORMATS, decode, encode, unpack_fp4
from refops.oracle.enclosure import NEAREST
from refops.oracle.interval import are_roundings
from refops.quantization.hadamard import GROUP, transform_exactly
from refops.quantization.layout import SCALE_TILE, pad_to_blocks, swizzle
from refops.quantization.result import Quantized
from refops.scalings import BlockScaling, CurrentScaling, MXFP8Scaling, NVFP4Scaling

DTYPES = {"fp32": np.dtype(np.float32), "fp16": np.dtype(np.float16), "bf16": BFLOAT16}
F = np.float32


@dataclass(frozen=True)
class Comparison:
    """What one comparison with another implementation's arrays found.

    Attributes:
        file: vector file that the arrays came from.
        peer: who made them.
        subject: what was compared, for example "MXFP8 rowwise codes, e4m3".
        elements: how many codes, scales or values.
        differing: how many are not bit-equal (NaN codes compare as a class).
        explained: how many of those a documented divergence accounts for, element by element.
        divergence: the documented divergence, or "".
    """

    file: str
    peer: str
    subject: str
    elements: int
    differing: int
    explained: int = 0
    divergence: str = ""

    @property
    def ok(self):
        """Whether every difference is a documented one."""
        return self.differing == self.explained


class Vectors:
    """One vector file: its metadata, its arrays, and the comparisons made with them so far."""

    def __init__(self, path):
        with np.load(path, allow_pickle=False) as arrays:
            self.arrays = {name: arrays[name] for name in arrays.files}
        self.meta = json.loads(self.arrays.pop("meta_json").tobytes())
        if str(self.meta["input"].get("generator", "")).startswith("exhaustive"):
            self.arrays["x_bits"] = np.arange(1 << 16, dtype=np.uint16)
        self.name = path.name
        self.comparisons = []

    @property
    def kind(self):
        """What the arrays hold: a key of `COMPARISONS`, or of what the tests compare."""
        return self.meta["op"]

    @property
    def peer(self):
        """Name and version of who made the arrays."""
        peers = self.meta["peer"] if isinstance(self.meta["peer"], list) else [self.meta["peer"]]
        return "; ".join(f"{peer['name']} {peer['version']}" for peer in peers)

    @property
    def variants(self):
        """Settings that the arrays of this file were made with, one dict each; "id" is the arrays' prefix."""
        return self.meta.get("variants", [])

    @property
    def fp8(self):
        """The FP8 format that the file's name says."""
        return E5M2 if "e5m2" in self.name else E4M3

    def tensor(self, name="x_bits", dtype=None):
        """Bit patterns as a tensor of the file's input dtype."""
        return self.arrays[name].view(DTYPES[dtype or self.meta["input"]["dtype"]])

    def compare(self, subject, ours, theirs, *, same_class=None, divergence="", expected=None):
        """Record how `ours` compares with `theirs`.

        Args:
            same_class: bool array, True where both are of a class (NaN) whose bits are not compared.
            divergence, expected: name of a documented divergence, and the array (or the mask of elements) that it
                predicts for `theirs`: differing elements that match it are explained.
        """
        ours, theirs = np.asarray(ours), np.asarray(theirs)
        if ours.shape != theirs.shape:
            raise ValueError(f"{self.name}: {subject}: shape {ours.shape} against {theirs.shape}")
        differs = ours != theirs
        if same_class is not None:
            differs &= ~same_class
        explained = np.zeros_like(differs)
        if expected is not None:
            explained = differs & (expected if expected.dtype == bool else expected == theirs)
        self.comparisons.append(
            Comparison(
                self.name,
                self.peer,
                subject,
                ours.size,
                int(differs.sum()),
                int(explained.sum()),
                divergence if explained.any() else "",
            )
        )

    def compare_codes(self, subject, ours, theirs, fmt, **documented):
        """`compare` for codes of `fmt`, NaN codes as one class."""
        both_nan = np.isnan(decode(ours, fmt)) & np.isnan(decode(theirs, fmt))
        self.compare(subject, ours, theirs, same_class=both_nan, **documented)

    def compare_floats(self, subject, ours, their_bits, **documented):
        """`compare` for float values given as bit patterns, NaN as one class."""
        theirs = np.asarray(their_bits).view(ours.dtype).reshape(ours.shape)
        both_nan = np.isnan(ours.astype(F)) & np.isnan(theirs.astype(F))
        self.compare(subject, bits_of(ours), bits_of(theirs), same_class=both_nan, **documented)

    def compare_scales(self, subject, ours, theirs, **documented):
        """`compare` for stored scales, without the padding that theirs lack; float32 ones are given as bit patterns."""
        compare = self.compare_floats if ours.dtype == F else self.compare
        compare(subject, ours[tuple(map(slice, theirs.shape))], theirs, **documented)


def bits_of(x):
    """The bit patterns of a float array."""
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


# --- casts of single values, tables of codes, the GEMM order of scales ------------------------------------------------


def compare_cast_fp8(v):
    """Element casts to E4M3 and E5M2, saturating and not."""
    fmt, x = v.fp8, v.tensor()
    v.compare_codes(f"{fmt!r} cast, saturating", encode(x, fmt), v.arrays["q_sat"], fmt)
    v.compare_codes(f"{fmt!r} cast, not saturating", encode(x, fmt, saturate=False), v.arrays["q_nosat"], fmt)


def te_python_e2m1(x, codes):
    """E2M1 `codes` as TE's Python reference gives them: 0 where the value that is cast is -0 or NaN."""
    return np.where((x == 0) | np.isnan(x.astype(F)), np.uint8(0), codes)


TE_PYTHON_E2M1 = "TE's Python reference encodes -0 and NaN as 0"


def compare_cast_e2m1(v):
    """Element casts to E2M1. TE's Python reference loses the sign of an exact -0 and maps NaN to 0."""
    x = v.tensor()
    codes = encode(x, E2M1)
    expected = te_python_e2m1(x, codes) if "te_py" in v.name else None
    v.compare("E2M1 cast", codes, v.arrays["q"], divergence=TE_PYTHON_E2M1, expected=expected)


def compare_cast_e8m0(v):
    """Scale bytes under each rounding."""
    x = v.tensor()
    for name, theirs, rounding, saturate in (
        ("up (TE)", "rp_sat", "up", True),
        ("up (CUDA)", "rp_sat_cuda", "up", True),
        ("up, not saturating", "rp_nosat_cuda", "up", False),
        ("toward zero", "rz_sat_cuda", "toward_zero", True),
    ):
        v.compare(f"E8M0 cast, {name}", encode(x, E8M0, rounding=rounding, saturate=saturate), v.arrays[theirs])
    theirs = v.arrays["torch_nearest"]
    v.compare(
        "E8M0 cast, nearest",
        encode(x, E8M0, rounding="nearest_away", saturate=False),
        theirs,
        divergence="torch rounds 2^-127 < x < 1.5 * 2^-127 up, not to nearest",
        expected=(x > F(2.0**-127)) & (x < F(1.5 * 2.0**-127)) & (theirs == 1),
    )


def compare_decode_tables(v):
    """The value of every code."""
    for fmt in (E4M3, E5M2, E2M1, E8M0):
        codes = np.arange(len(fmt.values), dtype=np.uint8)
        v.compare_floats(f"{fmt!r} decode", decode(codes, fmt), v.arrays[f"{fmt.name}_f32_bits"])


def compare_stochastic(v):
    """Stochastic E2M1 casts with given bits."""

    def cast(x, random_bits):
        return decode(encode(x, E2M1, rounding="stochastic", random_bits=random_bits), E2M1)

    x, drawn = v.tensor(dtype="fp32"), v.arrays["rbits"]
    v.compare_floats("E2M1 stochastic", cast(x, drawn), v.arrays["te_value"])
    every_byte = np.broadcast_to(np.arange(256, dtype=np.uint8), (64, 256))
    ours = cast(np.repeat(x[:64, None], 256, axis=1), every_byte)
    v.compare_floats("E2M1 stochastic, all 256 bytes", ours, v.arrays["te_full"])
    finite = np.isfinite(x)  # gfloat's arrays hold 0 for the others
    ours = cast(x[finite], drawn[finite])
    v.compare("E2M1 stochastic (gfloat StochasticFastest)", ours, v.arrays["gfloat_fastest"][finite])


def compare_swizzle(v):
    """The 128x4 GEMM order of scales."""
    for variant in v.variants:
        theirs = v.arrays[f"{variant['id']}_out"]
        ours = swizzle(pad_to_blocks(v.arrays[f"{variant['id']}_in"], *SCALE_TILE))
        v.compare(f"swizzle {tuple(variant['shape'])}", ours.reshape(theirs.shape), theirs)


# --- activations ------------------------------------------------------------------------------------------------------


def compare_act_unary(v):
    """float32 values and derivatives against TE's formulas compiled for the host: equal bit for bit, except gelu."""
    x = v.arrays["x"]
    for name in ("gelu", "qgelu", "relu", "srelu", "silu"):
        for which, ours in (("", refops.activation(name, x)), ("d", refops.activation_grad(name, np.ones_like(x), x))):
            theirs, documented = v.arrays[f"te_f32_{which}{name}"], {}
            if name == "gelu":
                documented["divergence"] = "the host's tanhf is up to two float32 from the nearest"
                others = [bits_of(y) for y in _gelu_of_other_tanh(x, which)]
                documented["expected"] = np.any(others == bits_of(theirs), axis=0)
            v.compare_floats(f"{which}{name} float32 against TE's host formula", ours, theirs, **documented)


def _gelu_of_other_tanh(x, which):
    """Yield gelu or ("d") dgelu with each tanh that lies one or two float32 from the nearest.

    glibc's tanhf errs by up to 2.2 ulp. These are results, not a bound on their distance from ours: that would have to
    include each rounding after the tanh.
    """
    for toward in (-1, 1):
        for steps in (1, 2):
            bound = bind_activation("gelu", {}).using(TanhNearby(toward, steps))
            yield (bound.derivative if which else bound.value)(x)


class TanhNearby(Arithmetic):
    """float32 whose tanh lies `steps` float32 values from the nearest one, `toward` -1 or 1 and never beyond."""

    def __init__(self, toward, steps):
        self.toward, self.steps = F(toward), steps

    def tanh(self, x):
        """Hyperbolic tangent, `steps` values off."""
        result = super().tanh(x)
        for _ in range(self.steps):
            result = np.nextafter(result, self.toward)
        return result


# --- FP8 with one scale a tensor or a block ---------------------------------------------------------------------------


def fp8_settings(variant):
    """A variant's settings, in words."""
    return f"{variant['fp8']}, eps {variant['eps']:g}{', power of 2' if variant['pow_2_scales'] else ''}"


def compare_fp8_current(v):
    """Per-tensor current scaling. TE's Python reference caps an overflowing scale at the input dtype's maximum."""
    largest = F(np.finfo(F).max)
    for variant in v.variants:
        x = v.tensor(variant["input"])
        fmt = FORMATS[variant["fp8"]]
        q = refops.quantize(x, CurrentScaling(fmt, variant["pow_2_scales"], variant["eps"]), columnwise=True)
        codes, inverse = q.rowwise_data, q.rowwise_scale_inv
        if inverse[0] == F(1) / largest:  # the scale overflowed: what that reference computes instead
            cap = np.array([float(ml_dtypes.finfo(x.dtype).max)], F)
            codes, inverse = encode(x.astype(F) * cap, fmt), F(1) / cap
        name, theirs = f"FP8 current, {fp8_settings(variant)}", v.arrays[f"{variant['id']}_q"]
        documented = {"divergence": "TE's Python reference caps an overflowing scale at the input dtype's maximum"}
        v.compare_codes(f"{name}, codes", q.rowwise_data, theirs, fmt, expected=codes, **documented)
        v.compare_codes(f"{name}, transposed codes", q.columnwise_data, theirs.T, fmt, expected=codes.T, **documented)
        their_inverse = v.arrays[f"{variant['id']}_scale_inv_bits"]
        v.compare_floats(
            f"{name}, scale_inv", q.rowwise_scale_inv, their_inverse, expected=bits_of(inverse), **documented
        )


def compare_fp8_delayed_update(v):
    """24 steps of history and scale. TE's Python path differs from its kernel in two ways, re-derived here."""
    steps = v.arrays["step_amax"]
    for variant in v.variants:
        fmt, margin, algorithm = E4M3 if variant["fp8_max"] == 448 else E5M2, variant["margin"], variant["algo"]
        history = np.zeros((variant["history_len"], steps.shape[1]), F)
        scale = their_scale = np.ones(steps.shape[1], F)
        rows = []
        for amax in steps:
            history = np.concatenate([amax[None], history[1:]])
            their_scale = te_python_delayed_scale(history, their_scale, fmt, margin, algorithm)
            history, scale = refops.update_delayed_scale(
                history, scale, fmt, margin=margin, algorithm=algorithm, keep_unused=False
            )
            rows.append((history, scale, their_scale))
        histories, scales, their_scales = map(np.stack, zip(*rows, strict=True))
        name = f"delayed update, {algorithm}, length {variant['history_len']}, margin {margin}, {fmt!r}"
        v.compare_floats(f"{name}, history", histories, v.arrays[f"{variant['id']}_history_bits"])
        v.compare_floats(
            f"{name}, scale",
            scales,
            v.arrays[f"{variant['id']}_scale_bits"],
            divergence="TE's Python path multiplies by 1 / amax and keeps the scale while a NaN is in the history",
            expected=bits_of(their_scales),
        )


def te_python_delayed_scale(history, scale, fmt, margin, algorithm):
    """The next scale as TE's Python path computes it: torch turns `number / tensor` into `reciprocal * number`."""
    amax = np.max(history, axis=0) if algorithm == "max" else history[0]
    fresh = (F(1) / amax * fmt.max) / F(2.0**margin)
    fresh = np.where((amax > 0) & np.isfinite(amax), fresh, scale)
    return np.where(np.isinf(fresh), np.finfo(F).max, fresh).astype(F)


def compare_fp8_block(v):
    """1x128 and 128x128 blocks, rowwise and transposed."""
    for variant in v.variants:
        fmt, prefix, two_d = FORMATS[variant["fp8"]], variant["id"], variant["tile"] == [128, 128]
        scaling = BlockScaling(fmt, 2 if two_d else 1, variant["pow_2_scales"], variant["eps"])
        q = refops.quantize(v.tensor(variant["input"]), scaling, columnwise=True)
        name = f"FP8 block {'128x128' if two_d else '1x128'}, {fp8_settings(variant)}"
        codes = v.arrays[f"{prefix}_q"]
        transposed = codes.T if two_d else v.arrays[f"{prefix}_q_t"]
        v.compare_codes(f"{name}, codes", q.rowwise_data, codes, fmt)
        v.compare_codes(f"{name}, columnwise codes", q.columnwise_data, transposed, fmt)
        for copy, suffix in (("rowwise", ""), ("columnwise", "_t")):
            ours = getattr(q, f"{copy}_scale_inv")
            ours = ours if two_d else ours.T  # TE's reference has 1x128 scales [row, block], before its GEMM layout
            subject = f"{name}, {'' if copy == 'rowwise' else 'columnwise '}scale_inv"
            v.compare_scales(subject, ours, v.arrays[f"{prefix}_scale_inv{suffix}_bits"])
        shapes = q.rowwise_scale_inv.shape, q.columnwise_scale_inv.shape
        theirs = variant["gemm_layout_scale_shape"], variant["gemm_layout_scale_t_shape"]
        v.compare(f"{name}, stored scale shapes", np.array(shapes), np.array(theirs))


# --- MXFP8 ------------------------------------------------------------------------------------------------------------


def compare_mxfp8(v):
    """TE's MXFP8: both directions, special rows and ragged shapes."""
    fmt = v.fp8
    for prefix in ("", "special_"):
        if f"{prefix}x_bits" not in v.arrays:
            continue
        q = refops.quantize(v.tensor(f"{prefix}x_bits"), MXFP8Scaling(fmt), columnwise=True)
        name = f"MXFP8 {prefix.replace('_', ' ')}{fmt!r}"
        for copy, theirs in (("rowwise", f"{prefix}row"), ("columnwise", f"{prefix}col")):
            v.compare_codes(f"{name}, {copy} codes", getattr(q, f"{copy}_data"), v.arrays[f"{theirs}_q"], fmt)
            v.compare_scales(f"{name}, {copy} scales", getattr(q, f"{copy}_scale_inv"), v.arrays[f"{theirs}_scale"])


def compare_mxfp8_ocp(v):
    """The OCP scale rules. NaN or inf makes torchao's scale NaN; refops ignores NaN and takes 0xFE for inf."""
    fmt = v.fp8
    documented = {"divergence": "torchao makes the scale of a block with NaN or inf NaN (0xFF)"}
    for prefix, rule in (("floor", "floor"), ("even", "even"), ("ceil", "ceil_ocp"), ("special_floor", "floor")):
        x = v.tensor("special_x_bits" if prefix == "special_floor" else "x_bits")
        q = refops.quantize(x, MXFP8Scaling(fmt, scale_rounding=rule))
        not_finite = ~np.isfinite(x.astype(F).reshape(len(x), -1, 32)).all(axis=2)
        scales, codes = v.arrays[f"{prefix}_scale"], v.arrays[f"{prefix}_q"]
        v.compare_scales(
            f"MX {rule} {fmt!r}, scales",
            q.rowwise_scale_inv,
            scales,
            expected=not_finite & (scales == 0xFF),
            **documented,
        )
        expected = np.where(np.repeat(not_finite, 32, axis=1), np.uint8(0x7F), q.rowwise_data)
        v.compare_codes(f"MX {rule} {fmt!r}, codes", q.rowwise_data, codes, fmt, expected=expected, **documented)


# --- NVFP4 ------------------------------------------------------------------------------------------------------------


def compare_nvfp4(v):
    """1x16, 16x16, 4over6 and row-scaled, both directions."""
    for variant in v.variants:
        two_d, row_scaled = variant["tile"] == [16, 16], variant.get("row_scaled", False)
        choice, e4m3_max = variant.get("four_over_six"), variant.get("e4m3_max", 448)
        choice = choice and choice.lower()
        scaling = NVFP4Scaling(two_d=two_d, four_over_six=choice, e4m3_max=e4m3_max, row_scaled=row_scaled)
        name = f"NVFP4 {'16x16' if two_d else '1x16'}"
        name += f" 4over6 {choice} {e4m3_max}" if choice else ""
        name += " row-scaled" if row_scaled else ""
        x = v.tensor(variant["input"])
        _compare_nvfp4_tensor(v, variant, name, (x, x.T), refops.quantize(x, scaling, columnwise=True))


def compare_nvfp4_rht(v):
    """Random Hadamard transform of the columnwise copy, then NVFP4."""
    signs = {"te_signs": v.arrays["te_signs"], "custom_signs": v.arrays["custom_signs"], "none": np.ones(16)}
    for variant in v.variants:
        x = v.tensor(variant["input"])
        mask = sum(1 << i for i, sign in enumerate(signs[variant["signs"]]) if sign < 0)
        theirs = v.tensor(f"{variant['id']}_rht_bits")
        ours = refops.hadamard_transform(np.ascontiguousarray(x.T), mask)
        name, documented = f"NVFP4 RHT, signs {variant['signs']}", {}
        if variant["exact"]:
            q = refops.quantize(x, NVFP4Scaling(rht=True, sign_mask=mask), columnwise=True)
        else:  # their float32 sum rounds in another order: judge the quantizer from their transform
            documented["divergence"] = "the reference rounds partial sums to float32"
            documented["expected"] = are_roundings(theirs, *_float32_transform(x, mask))
            column = refops.quantize(theirs, NVFP4Scaling())
            q = replace(
                refops.quantize(x, NVFP4Scaling()),
                columnwise_data=column.rowwise_data,
                columnwise_scale_inv=column.rowwise_scale_inv,
                amax_columnwise=column.amax_rowwise,
            )
        v.compare_floats(f"{name}, transform", ours, bits_of(theirs), **documented)
        name += "" if variant["exact"] else " (from their transform)"
        _compare_nvfp4_tensor(v, variant, name, (x, theirs), q)


def _float32_transform(x, sign_mask):
    """(least, greatest) float64 (K, M) that groups of 16 rows may give as float32 sums, in any order, of terms x / 4.

    15 additions err by at most 15 2^-24 of the terms' magnitudes (source: `refops.oracle.enclosure`), and a subnormal
    x / 4 by 2^-150.
    """
    groups = x.astype(np.float64).reshape(-1, GROUP, x.shape[1])
    exact = transform_exactly(groups, sign_mask)
    slack = (GROUP - 1) * NEAREST * np.abs(groups).sum(axis=1, keepdims=True) / 4 + GROUP * 2.0**-150
    return tuple((exact + end).reshape(x.shape).T for end in (-slack, slack))


def _compare_nvfp4_tensor(v, variant, name, cast, q):
    """Codes, scales and amaxes of both directions; `cast`: the values of each, for the -0 divergence."""
    copies = ("rowwise", "", "_amax_row_bits"), ("columnwise", "_t", "_amax_col_bits")
    for values, (copy, suffix, their_amax) in zip(cast, copies, strict=True):
        codes, scales = unpack_fp4(getattr(q, f"{copy}_data")), getattr(q, f"{copy}_scale_inv")
        their_codes, their_scales = (v.arrays[f"{variant['id']}_{part}{suffix}"] for part in ("q", "scale"))
        decode_scale = E4M3.values[scales[tuple(map(slice, their_scales.shape))]].astype(np.float64)
        decode_scale *= getattr(q, f"amax_{copy}")[:, None] / (6.0 * q.scaling.e4m3_max)
        multiplier = np.repeat(np.minimum(1 / decode_scale, np.finfo(F).max), 16, axis=1)
        expected = te_python_e2m1((values * multiplier).astype(F), codes)
        v.compare(f"{name}, {copy} codes", codes, unpack_fp4(their_codes), divergence=TE_PYTHON_E2M1, expected=expected)
        v.compare_scales(f"{name}, {copy} scales", scales, their_scales)
        v.compare_floats(f"{name}, {copy} amax", getattr(q, f"amax_{copy}"), v.arrays[variant["id"] + their_amax])


def compare_nvfp4_other(v):
    """torchao and modelopt on the same tensor: what differs is re-derived from their documented rules."""
    x = v.tensor().astype(F)
    blocks = x.reshape(len(x), -1, 16)
    block_maxima = np.abs(blocks).max(axis=2)
    q = refops.quantize(v.tensor(), NVFP4Scaling())
    codes = unpack_fp4(q.rowwise_data)
    sixth, one = block_maxima / F(6), F(1)

    def clamped(scales):
        return encode(np.clip(scales, F(2.0**-6), F(448)), E4M3)

    two_levels, modelopt = (v.arrays[f"{prefix}_global_bits"].view(F) for prefix in ("ao2", "mo"))
    with_one_level, with_two_levels = clamped(sixth), clamped(sixth / two_levels)
    of_zero = encode(np.where(block_maxima == 0, one, sixth / modelopt), E4M3)
    for peer, prefix, scales, multiplier, divergence in (
        (
            "torchao, one level",
            "ao1",
            with_one_level,
            one / E4M3.values[with_one_level],
            "torchao's one-level mode has no global scale",
        ),
        (
            "torchao, two levels",
            "ao2",
            with_two_levels,
            (one / two_levels) / E4M3.values[with_two_levels],
            "torchao clamps block scales to >= 2^-6",
        ),
        (
            "modelopt",
            "mo",
            of_zero,
            one / (E4M3.values[of_zero] * modelopt),
            "modelopt divides by the scale and gives zero blocks scale 1",
        ),
    ):
        their_scales, their_codes = v.arrays[f"{prefix}_scale"], unpack_fp4(v.arrays[f"{prefix}_q"])
        documented = {"divergence": divergence}
        v.compare_scales(f"NVFP4 scales ({peer})", q.rowwise_scale_inv, their_scales, expected=scales, **documented)
        expected = encode(blocks * multiplier[..., None], E2M1)
        if peer == "modelopt":  # its cast loses the sign of an exact -0 besides
            expected = te_python_e2m1(blocks, expected)
        v.compare(f"NVFP4 codes ({peer})", codes, their_codes, expected=expected.reshape(codes.shape), **documented)


# --- dequantization ---------------------------------------------------------------------------------------------------


def _dequantized(codes, scales, scaling, dtype, **more):
    """Stored rowwise arrays as values of `dtype`."""
    shape = (codes.shape[0], codes.shape[1] * scaling.layout.packed)
    q = Quantized(
        rowwise_data=codes, rowwise_scale_inv=scales, scaling=scaling, shape=shape, dtype=DTYPES[dtype], **more
    )
    return refops.dequantize(q, dtype=q.dtype)


def compare_dequant_fp8_block(v):
    """From stored codes and scales."""
    for variant in v.variants:
        prefix, dtype, tile = variant["id"], variant["out_dtype"], variant["tile"]
        scales = v.arrays[f"{prefix}_scale_gemm_layout_bits"].view(F)
        scaling = BlockScaling(E4M3, 2 if tile == [128, 128] else 1)
        ours = _dequantized(v.arrays[f"{prefix}_q"], scales, scaling, dtype)
        v.compare_floats(f"FP8 block dequantize, {tile} to {dtype}", ours, v.arrays[f"{prefix}_out_bits"])


def compare_dequant_mxfp8(v):
    """One rounding of the exact product. torchao multiplies in the output dtype."""
    codes, scales = v.arrays["mx_q"], v.arrays["mx_scale"]
    for name in ("fp32", "bf16"):
        ours, dtype = _dequantized(codes, pad_to_blocks(scales, *SCALE_TILE), MXFP8Scaling(E4M3), name), DTYPES[name]
        v.compare_floats(f"MXFP8 dequantize to {name}", ours, v.arrays[f"mx_out_exact_{name}_bits"])
        scale = np.repeat(decode(scales, E8M0).astype(dtype), 32, axis=1)
        in_dtype = (decode(codes, E4M3).astype(dtype).astype(F) * scale.astype(F)).astype(dtype)
        v.compare_floats(
            f"MXFP8 dequantize to {name} (torchao)",
            ours,
            v.arrays[f"mx_out_torchao_{name}_bits"],
            divergence="torchao multiplies in the output dtype",
            expected=bits_of(in_dtype),
        )


def compare_dequant_nvfp4(v):
    """From stored codes, scales and amax."""
    scales, amax = pad_to_blocks(v.arrays["scale"], *SCALE_TILE), v.arrays["amax"]
    for name in ("fp32", "bf16"):
        ours = _dequantized(v.arrays["q"], scales, NVFP4Scaling(), name, amax_rowwise=amax)
        v.compare_floats(f"NVFP4 dequantize to {name}", ours, v.arrays[f"out_{name}_bits"])


# --- files ------------------------------------------------------------------------------------------------------------

#: Vector kind -> the comparison.
COMPARISONS = {
    "cast_e4m3": compare_cast_fp8,
    "cast_e5m2": compare_cast_fp8,
    "cast_e2m1": compare_cast_e2m1,
    "cast_e8m0": compare_cast_e8m0,
    "decode_tables": compare_decode_tables,
    "stochastic_round_e2m1": compare_stochastic,
    "scale_swizzle": compare_swizzle,
    "act_unary": compare_act_unary,
    "fp8_current": compare_fp8_current,
    "fp8_delayed_update": compare_fp8_delayed_update,
    "fp8_block": compare_fp8_block,
    "mxfp8": compare_mxfp8,
    "mxfp8_floor_even_ceil": compare_mxfp8_ocp,
    "nvfp4": compare_nvfp4,
    "nvfp4_rht": compare_nvfp4_rht,
    "nvfp4_other": compare_nvfp4_other,
    "dequant_fp8_block": compare_dequant_fp8_block,
    "dequant_mxfp8": compare_dequant_mxfp8,
    "dequant_nvfp4": compare_dequant_nvfp4,
}
#: Kinds of files with what no public call returns: the tests compare them.
OF_PARTS = ("act_gated", "e8m0_tables", "fp8_scale_from_amax", "nvfp4_scales")


def compare_vectors(directory):
    """Return the comparisons with every vector file in `directory`, in the order of the file names.

    Raises:
        FileNotFoundError: `directory` holds no vector file. ValueError: a file of an unknown kind.
    """
    paths = sorted(Path(directory).glob("*.npz"))
    if not paths:
        raise FileNotFoundError(f"directory must hold vector files (*.npz); got {str(directory)!r}")
    return [comparison for path in paths for comparison in compare_file(path)]


def compare_file(path):
    """Return the comparisons with one vector file: none where it is of `OF_PARTS`."""
    vectors = Vectors(Path(path))
    if vectors.kind not in COMPARISONS and vectors.kind not in OF_PARTS:
        raise ValueError(f"{vectors.name}: op must be one of {', '.join(COMPARISONS)}; got {vectors.kind!r}")
    if vectors.kind in COMPARISONS:
        with np.errstate(all="ignore"):
            COMPARISONS[vectors.kind](vectors)
    return vectors.comparisons
