"""Compare refops with arrays that other implementations produced, bit for bit.

The arrays are the `.npz` files of `tests/vectors` (its README says who made each). Every comparison returns counts;
a documented divergence of another implementation is recomputed element by element, so that a difference counts as
explained only where that divergence says it must be. NaN codes compare as one class: their bits are not specified.

This module judges refops itself. Other people's kernels are judged elsewhere.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from refops import ops
from refops.activations import bind_activation
from refops.arguments import BFLOAT16
from refops.formats import E2M1, E4M3, E5M2, E8M0, FORMATS, decode, encode, unpack_fp4
from refops.quantization import block, mxfp8, nvfp4, per_tensor
from refops.quantization.hadamard import hadamard_transform
from refops.quantization.layout import pad_to_blocks, swizzle
from refops.quantization.result import Quantized
from refops.scaling import BlockScaling, CurrentScaling, MXFP8Scaling, NVFP4Scaling

DTYPES = {"fp32": np.dtype(np.float32), "fp16": np.dtype(np.float16), "bf16": BFLOAT16}


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
    def peer(self):
        """Name and version of who made the arrays."""
        peers = self.meta["peer"] if isinstance(self.meta["peer"], list) else [self.meta["peer"]]
        return "; ".join(f"{peer['name']} {peer['version']}" for peer in peers)

    @property
    def variants(self):
        """Settings that the arrays of this file were made with, one dict each; "id" is the arrays' prefix."""
        return self.meta.get("variants", [])

    def tensor(self, name="x_bits", dtype=None):
        """Bit patterns as a tensor of the file's input dtype."""
        return self.arrays[name].view(DTYPES[dtype or self.meta["input"]["dtype"]])

    def compare(self, subject, ours, theirs, *, same_class=None, divergence="", expected=None):
        """Record how `ours` compares with `theirs`.

        Args:
            same_class: bool array, True where both are of a class (NaN) whose bits are not compared.
            divergence, expected: name of a documented divergence, and the array (or the mask of elements) that it
            predicts for
                `theirs`: differing elements that match it are explained.
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
        bits = np.uint16 if ours.dtype.itemsize == 2 else np.uint32
        both_nan = np.isnan(ours.astype(np.float32)) & np.isnan(theirs.astype(np.float32))
        self.compare(
            subject, np.ascontiguousarray(ours).view(bits), theirs.view(bits), same_class=both_nan, **documented
        )


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
    """Return the comparisons with one vector file."""
    vectors = Vectors(Path(path))
    kind = vectors.meta["op"]
    if kind not in COMPARISONS:
        raise ValueError(f"{vectors.name}: op must be one of {', '.join(COMPARISONS)}; got {kind!r}")
    with np.errstate(all="ignore"):
        COMPARISONS[kind](vectors)
    return vectors.comparisons


# --- casts and tables -----------------------------------------------------------------------------


def compare_cast_fp8(v):
    """Element casts to E4M3 and E5M2, saturating and not."""
    fmt = FORMATS[v.meta["op"].removeprefix("cast_")]
    x = v.tensor()
    v.compare_codes(f"{fmt!r} cast, saturating", encode(x, fmt), v.arrays["q_sat"], fmt)
    v.compare_codes(f"{fmt!r} cast, not saturating", encode(x, fmt, saturate=False), v.arrays["q_nosat"], fmt)


def compare_cast_e2m1(v):
    """Element casts to E2M1. TE's Python reference loses the sign of an exact -0 and maps NaN to 0."""
    x = v.tensor()
    codes = encode(x, E2M1)
    v.compare(
        "E2M1 cast",
        codes,
        v.arrays["q"],
        divergence="TE's Python reference encodes -0 and NaN as 0",
        expected=te_python_e2m1(x, codes) if "te_py" in v.name else None,
    )


def te_python_e2m1(x, codes):
    """E2M1 `codes` as TE's Python reference gives them: 0 where the value that is cast is -0 or NaN."""
    return np.where((x == 0) | np.isnan(x.astype(np.float32)), np.uint8(0), codes)


def compare_cast_e8m0(v):
    """Scale bytes under each rounding."""
    x = v.tensor()
    up = encode(x, E8M0, rounding="up")
    v.compare("E8M0 cast, up (TE)", up, v.arrays["rp_sat"])
    v.compare("E8M0 cast, up (CUDA)", up, v.arrays["rp_sat_cuda"])
    not_saturating = encode(x, E8M0, rounding="up", saturate=False)
    v.compare("E8M0 cast, up, not saturating", not_saturating, v.arrays["rp_nosat_cuda"])
    v.compare("E8M0 cast, toward zero", encode(x, E8M0, rounding="toward_zero"), v.arrays["rz_sat_cuda"])
    nearest = encode(x, E8M0, rounding="nearest_away", saturate=False)
    v.compare(
        "E8M0 cast, nearest",
        nearest,
        v.arrays["torch_nearest"],
        divergence="torch rounds 2^-127 < x < 1.5 * 2^-127 up, not to nearest",
        expected=(x > np.float32(2.0**-127)) & (x < np.float32(1.5 * 2.0**-127)) & (v.arrays["torch_nearest"] == 1),
    )


def compare_decode_tables(v):
    """The value of every code."""
    for fmt in (E4M3, E5M2, E2M1, E8M0):
        codes = np.arange(len(fmt.values), dtype=np.uint8)
        v.compare_floats(f"{fmt!r} decode", decode(codes, fmt), v.arrays[f"{fmt.name}_f32_bits"])


def compare_e8m0_tables(v):
    """Decode scale and encode multiplier of every scale byte."""
    v.compare_floats("E8M0 value", E8M0.values, v.arrays["value_f32_bits"])
    v.compare_floats("E8M0 encode multiplier", mxfp8.ENCODE_MULTIPLIER, v.arrays["recip_f32_bits"])


def compare_stochastic(v):
    """Stochastic E2M1 casts with given bits."""
    x = v.tensor(dtype="fp32")
    ours = decode(encode(x, E2M1, rounding="stochastic", random_bits=v.arrays["rbits"]), E2M1)
    v.compare_floats("E2M1 stochastic", ours, v.arrays["te_value"])
    every_byte = np.broadcast_to(np.arange(256, dtype=np.uint8), (64, 256))
    repeated = np.repeat(x[:64, None], 256, axis=1)
    ours = decode(encode(repeated, E2M1, rounding="stochastic", random_bits=every_byte), E2M1)
    v.compare_floats("E2M1 stochastic, all 256 bytes", ours, v.arrays["te_full"])
    finite = np.isfinite(x)  # gfloat's arrays hold 0 for the others
    ours = decode(encode(x[finite], E2M1, rounding="stochastic", random_bits=v.arrays["rbits"][finite]), E2M1)
    v.compare("E2M1 stochastic (gfloat StochasticFastest)", ours, v.arrays["gfloat_fastest"][finite])


# --- FP8 per tensor and per block -----------------------------------------------------------------


def compare_scale_from_amax(v):
    """Scale and reciprocal for every amax, epsilon, power-of-two setting and input dtype."""
    amax = v.arrays["amax_bits"].view(np.float32)
    for variant in v.variants:
        scale = per_tensor.scale_from_amax(
            amax,
            FORMATS[variant["fp8"]],
            epsilon=variant["eps"],
            power_2=variant["pow_2_scales"],
            value_for_inf=np.float32(variant["value_for_inf"]),
        )
        name = f"FP8 scale from amax, {_settings(variant)}, {variant['x_dtype']}"
        v.compare_floats(name, scale, v.arrays[f"{variant['id']}_scale_bits"])
        v.compare_floats(name + ", inverse", np.float32(1) / scale, v.arrays[f"{variant['id']}_scale_inv_bits"])


def compare_fp8_current(v):
    """Per-tensor current scaling. TE's Python reference caps an overflowing scale at the input dtype's maximum."""
    for variant in v.variants:
        x = v.tensor(variant["input"])
        fmt = FORMATS[variant["fp8"]]
        q = ops.quantize(x, CurrentScaling(fmt, variant["pow_2_scales"], variant["eps"]), columnwise=True)
        # What that reference computes, from the same pieces with its own cap.
        scale = per_tensor.scale_from_amax(
            q.amax_rowwise,
            fmt,
            epsilon=variant["eps"],
            power_2=variant["pow_2_scales"],
            value_for_inf=block.LARGEST_SCALE[x.dtype],
        )
        documented = {"divergence": "TE's Python reference caps an overflowing scale at the input dtype's maximum"}
        name = f"FP8 current, {_settings(variant)}"
        theirs = v.arrays[f"{variant['id']}_q"]
        expected = encode(x.astype(np.float32) * scale, fmt)
        v.compare_codes(name + ", codes", q.rowwise_data, theirs, fmt, expected=expected, **documented)
        v.compare_codes(
            name + ", transposed codes", q.columnwise_data, theirs.T, fmt, expected=expected.T, **documented
        )
        inverse = (np.float32(1) / scale).view(np.uint32)
        v.compare_floats(
            name + ", scale_inv",
            q.rowwise_scale_inv,
            v.arrays[f"{variant['id']}_scale_inv_bits"],
            expected=inverse,
            **documented,
        )


def compare_fp8_delayed_update(v):
    """24 steps of history and scale. TE's Python path differs from its kernel in two ways, re-derived here."""
    steps = v.arrays["step_amax"]
    for variant in v.variants:
        history = np.zeros((variant["history_len"], steps.shape[1]), np.float32)
        scale = their_scale = np.ones(steps.shape[1], np.float32)
        fmt = E4M3 if variant["fp8_max"] == 448 else E5M2
        histories, scales, their_scales = [], [], []
        for amax in steps:
            history = np.concatenate([amax[None], history[1:]])
            their_scale = te_python_delayed_scale(history, their_scale, fmt, variant["margin"], variant["algo"])
            history, scale = per_tensor.update_delayed_scale(
                history, scale, fmt, margin=variant["margin"], algorithm=variant["algo"], keep_unused=False
            )
            histories.append(history)
            scales.append(scale)
            their_scales.append(their_scale)
        rule = f"{variant['algo']}, length {variant['history_len']}, margin {variant['margin']}"
        name = f"delayed update, {rule}, {fmt!r}"
        v.compare_floats(f"{name}, history", np.stack(histories), v.arrays[f"{variant['id']}_history_bits"])
        v.compare_floats(
            f"{name}, scale",
            np.stack(scales),
            v.arrays[f"{variant['id']}_scale_bits"],
            divergence="TE's Python path multiplies by 1 / amax and keeps the scale while a NaN is in the history",
            expected=np.stack(their_scales).view(np.uint32),
        )


def te_python_delayed_scale(history, scale, fmt, margin, algorithm):
    """The next scale as TE's Python path computes it: torch turns `number / tensor` into `reciprocal * number`."""
    amax = np.max(history, axis=0) if algorithm == "max" else history[0]
    fresh = (np.float32(1) / amax * fmt.max) / np.float32(2.0**margin)
    fresh = np.where((amax > 0) & np.isfinite(amax), fresh, scale)
    return np.where(np.isinf(fresh), np.finfo(np.float32).max, fresh).astype(np.float32)


def compare_fp8_block(v):
    """1x128 and 128x128 blocks, rowwise and transposed."""
    for variant in v.variants:
        x = v.tensor(variant["input"])
        fmt = FORMATS[variant["fp8"]]
        two_d = variant["tile"] == [128, 128]
        scaling = BlockScaling(fmt, 2 if two_d else 1, variant["pow_2_scales"], variant["eps"])
        q = ops.quantize(x, scaling, columnwise=True)
        name = f"FP8 block {'128x128' if two_d else '1x128'}, {_settings(variant)}"
        prefix = variant["id"]
        codes = v.arrays[f"{prefix}_q"]
        v.compare_codes(name + ", codes", q.rowwise_data, codes, fmt)
        transposed = codes.T if two_d else v.arrays[f"{prefix}_q_t"]
        v.compare_codes(name + ", columnwise codes", q.columnwise_data, transposed, fmt)
        v.compare_floats(name + ", scale_inv", block.valid_scales(q), v.arrays[f"{prefix}_scale_inv_bits"])
        columnwise = block.valid_scales(q, columnwise=True)
        v.compare_floats(name + ", columnwise scale_inv", columnwise, v.arrays[f"{prefix}_scale_inv_t_bits"])
        shapes = (q.rowwise_scale_inv.shape, q.columnwise_scale_inv.shape)
        theirs = (variant["gemm_layout_scale_shape"], variant["gemm_layout_scale_t_shape"])
        v.compare(name + ", stored scale shapes", np.array(shapes), np.array(theirs))


def compare_dequant_fp8_block(v):
    """Dequantization from stored codes and scales."""
    for variant in v.variants:
        prefix, shape = variant["id"], tuple(variant["shape"])
        scaling = BlockScaling(E4M3, 2 if variant["tile"] == [128, 128] else 1)
        scales = v.arrays[f"{prefix}_scale_gemm_layout_bits"].view(np.float32)
        dtype = DTYPES[variant["out_dtype"]]
        q = Quantized(v.arrays[f"{prefix}_q"], scales, None, None, None, None, scaling, shape, dtype)
        name = f"FP8 block dequantize, {variant['tile']} to {variant['out_dtype']}"
        v.compare_floats(name, ops.dequantize(q, dtype=dtype), v.arrays[f"{prefix}_out_bits"])


# --- MXFP8 ----------------------------------------------------------------------------------------


def compare_mxfp8(v):
    """TE's MXFP8: both directions, special rows and ragged shapes."""
    fmt = E5M2 if "e5m2" in v.name else E4M3
    for prefix in ("", "special_"):
        if f"{prefix}x_bits" not in v.arrays:
            continue
        x = v.tensor(f"{prefix}x_bits")
        q = ops.quantize(x, MXFP8Scaling(fmt), columnwise=True)
        name = f"MXFP8 {prefix.replace('_', ' ')}{fmt!r}"
        v.compare_codes(name + ", rowwise codes", q.rowwise_data, v.arrays[f"{prefix}row_q"], fmt)
        v.compare_codes(name + ", columnwise codes", q.columnwise_data, v.arrays[f"{prefix}col_q"], fmt)
        row_scales, column_scales = v.arrays[f"{prefix}row_scale"], v.arrays[f"{prefix}col_scale"]
        v.compare(name + ", rowwise scales", _leading(q.rowwise_scale_inv, row_scales), row_scales)
        v.compare(name + ", columnwise scales", _leading(q.columnwise_scale_inv, column_scales), column_scales)


def compare_mxfp8_ocp(v):
    """The OCP scale rules. NaN or inf makes torchao's scale NaN; refops ignores NaN and takes 0xFE for inf."""
    fmt = E5M2 if "e5m2" in v.name else E4M3
    for prefix, rule in (("floor", "floor"), ("even", "even"), ("ceil", "ceil_ocp"), ("special_floor", "floor")):
        x = v.tensor("special_x_bits" if prefix == "special_floor" else "x_bits")
        q = ops.quantize(x, MXFP8Scaling(fmt, scale_rounding=rule))
        not_finite = ~np.isfinite(x.astype(np.float32).reshape(len(x), -1, 32)).all(axis=2)
        documented = {"divergence": "torchao makes the scale of a block with NaN or inf NaN (0xFF)"}
        scales, codes = v.arrays[f"{prefix}_scale"], v.arrays[f"{prefix}_q"]
        v.compare(
            f"MX {rule} {fmt!r}, scales",
            _leading(q.rowwise_scale_inv, scales),
            scales,
            expected=not_finite & (scales == 0xFF),
            **documented,
        )
        v.compare_codes(
            f"MX {rule} {fmt!r}, codes",
            q.rowwise_data,
            codes,
            fmt,
            expected=np.repeat(not_finite & (scales == 0xFF), 32, axis=1),
            **documented,
        )


def compare_dequant_mxfp8(v):
    """Dequantization: one rounding of the exact product. torchao multiplies in the output dtype."""
    codes, scales = v.arrays["mx_q"], v.arrays["mx_scale"]
    padded = pad_to_blocks(scales, 128, 4)
    for name, dtype in (("fp32", DTYPES["fp32"]), ("bf16", DTYPES["bf16"])):
        q = Quantized(codes, padded, None, None, None, None, MXFP8Scaling(E4M3), codes.shape, dtype)
        ours = ops.dequantize(q, dtype=dtype)
        v.compare_floats(f"MXFP8 dequantize to {name}", ours, v.arrays[f"mx_out_exact_{name}_bits"])
        scale = np.repeat(E8M0.values[scales].astype(dtype), 32, axis=1)
        in_dtype = (decode(codes, E4M3).astype(dtype).astype(np.float32) * scale.astype(np.float32)).astype(dtype)
        v.compare_floats(
            f"MXFP8 dequantize to {name} (torchao)",
            ours,
            v.arrays[f"mx_out_torchao_{name}_bits"],
            divergence="torchao multiplies in the output dtype",
            expected=in_dtype.view(_bits(dtype)),
        )


# --- NVFP4 ----------------------------------------------------------------------------------------


def compare_nvfp4_scales(v):
    """Global and block scales for every pair of amaxes."""
    s_enc = nvfp4.global_encode_scale(v.arrays["global_amax_bits"].view(np.float32))
    v.compare_floats("NVFP4 global encode scale", s_enc, v.arrays["S_enc_bits"])
    scales = nvfp4.block_scale_byte(v.arrays["block_amax_bits"].view(np.float32), s_enc[:, None])
    v.compare("NVFP4 block scale", scales, v.arrays["block_scale"])


def compare_nvfp4(v):
    """1x16, 16x16, 4over6 and row-scaled, both directions."""
    for variant in v.variants:
        scaling = NVFP4Scaling(
            two_d=variant["tile"] == [16, 16],
            four_over_six=variant["four_over_six"].lower() if "four_over_six" in variant else None,
            e4m3_max=variant.get("e4m3_max", 448),
            row_scaled=variant.get("row_scaled", False),
        )
        x = v.tensor(variant["input"])
        _compare_nvfp4_tensor(v, variant, _nvfp4_name(scaling), x, x.T, ops.quantize(x, scaling, columnwise=True))


def compare_nvfp4_rht(v):
    """Random Hadamard transform of the columnwise copy, then NVFP4."""
    signs = {"te_signs": v.arrays["te_signs"], "custom_signs": v.arrays["custom_signs"], "none": np.ones(16)}
    for variant in v.variants:
        x = v.tensor(variant["input"])
        mask = sum(1 << i for i, sign in enumerate(signs[variant["signs"]]) if sign < 0)
        their_rht = v.tensor(f"{variant['id']}_rht_bits")
        ours = hadamard_transform(np.ascontiguousarray(x.T), mask)
        name = f"NVFP4 RHT, signs {variant['signs']}"
        if variant["exact"]:
            v.compare_floats(name + ", transform", ours, their_rht.view(_bits(x.dtype)))
            q = ops.quantize(x, NVFP4Scaling(rht=True, sign_mask=mask), columnwise=True)
            _compare_nvfp4_tensor(v, variant, name, x, ours, q)
        else:  # their float32 sum rounds in another order: judge the quantizer from their transform
            magnitude = np.abs(x.T.astype(np.float64)).reshape(x.shape[1], -1, 16).sum(axis=2)
            bound = np.repeat(16 * 2.0**-24 * magnitude / 4, 16, axis=1)  # any order of a float32 sum of 16 terms
            v.compare_floats(
                name + ", transform",
                ours,
                their_rht.view(_bits(x.dtype)),
                divergence="the reference rounds partial sums to float32",
                expected=np.abs(ours.astype(np.float64) - their_rht.astype(np.float64)) <= bound,
            )
            q = ops.quantize(x, NVFP4Scaling())
            column = ops.quantize(their_rht, NVFP4Scaling())
            q = Quantized(
                q.rowwise_data,
                q.rowwise_scale_inv,
                column.rowwise_data,
                column.rowwise_scale_inv,
                q.amax_rowwise,
                column.amax_rowwise,
                q.scaling,
                q.shape,
                q.dtype,
            )
            _compare_nvfp4_tensor(v, variant, name + " (from their transform)", x, their_rht, q)


def _compare_nvfp4_tensor(v, variant, name, row_values, column_values, q):
    """Codes, scales and amaxes of both directions; `*_values` are what was cast, for the -0 divergence."""
    prefix = variant["id"]
    documented = {"divergence": "TE's Python reference encodes -0 and NaN as 0"}
    for direction, values, suffix in (("rowwise", row_values, ""), ("columnwise", column_values, "_t")):
        data, scales = getattr(q, f"{direction}_data"), getattr(q, f"{direction}_scale_inv")
        codes = unpack_fp4(data)
        their_scales = v.arrays[f"{prefix}_scale{suffix}"]
        s_enc = nvfp4.global_encode_scale(getattr(q, f"amax_{direction}"), q.scaling.e4m3_max)[:, None]
        multiplier = np.repeat(nvfp4.encode_multiplier(_leading(scales, their_scales), s_enc), 16, axis=1)
        expected = te_python_e2m1(values.astype(np.float32) * multiplier, codes)
        theirs = unpack_fp4(v.arrays[f"{prefix}_q{suffix}"])
        v.compare(f"{name}, {direction} codes", codes, theirs, expected=expected, **documented)
        v.compare(f"{name}, {direction} scales", _leading(scales, their_scales), their_scales)
        amax_bits = v.arrays[f"{prefix}_amax_{'col' if suffix else 'row'}_bits"]
        v.compare_floats(f"{name}, {direction} amax", getattr(q, f"amax_{direction}"), amax_bits)


def compare_nvfp4_other(v):
    """torchao and modelopt on the same tensor: what differs is re-derived from their documented rules."""
    x = v.tensor().astype(np.float32)
    blocks = x.reshape(len(x), -1, 16)
    q = ops.quantize(v.tensor(), NVFP4Scaling())
    codes, scales = unpack_fp4(q.rowwise_data), _leading(q.rowwise_scale_inv, v.arrays["ao2_scale"])
    block_maxima = np.abs(blocks).max(axis=2)

    one_level = encode(np.clip(block_maxima / np.float32(6), np.float32(2.0**-6), np.float32(448)), E4M3)
    _compare_with_rule(
        v,
        "torchao, one level",
        codes,
        scales,
        "ao1",
        one_level,
        blocks,
        np.float32(1) / E4M3.values[one_level],
        "torchao's one-level mode has no global scale",
    )

    global_scale = v.arrays["ao2_global_bits"].view(np.float32)
    relative = (block_maxima / np.float32(6)) / global_scale
    clamped = encode(np.clip(relative, np.float32(2.0**-6), np.float32(448)), E4M3)
    _compare_with_rule(
        v,
        "torchao, two levels",
        codes,
        scales,
        "ao2",
        clamped,
        blocks,
        (np.float32(1) / global_scale) / E4M3.values[clamped],
        "torchao clamps block scales to >= 2^-6",
    )

    global_scale = v.arrays["mo_global_bits"].view(np.float32)
    relative = (block_maxima / np.float32(6)) / global_scale
    of_zero = encode(np.where(block_maxima == 0, np.float32(1), relative), E4M3)
    _compare_with_rule(
        v,
        "modelopt",
        codes,
        scales,
        "mo",
        of_zero,
        blocks,
        np.float32(1) / (E4M3.values[of_zero] * global_scale),
        "modelopt divides by the scale and gives zero blocks scale 1",
    )


def _compare_with_rule(v, peer, codes, scales, prefix, rule_scales, blocks, multiplier, divergence):
    """Compare with a peer's arrays; differences are explained where the peer's own rule gives them."""
    their_scales, their_codes = v.arrays[f"{prefix}_scale"], unpack_fp4(v.arrays[f"{prefix}_q"])
    v.compare(f"NVFP4 scales ({peer})", scales, their_scales, divergence=divergence, expected=rule_scales)
    rule_codes = encode(blocks * multiplier[..., None], E2M1)
    if peer == "modelopt":  # its cast loses the sign of an exact -0 besides
        rule_codes = te_python_e2m1(blocks, rule_codes)
    v.compare(
        f"NVFP4 codes ({peer})", codes, their_codes, divergence=divergence, expected=rule_codes.reshape(codes.shape)
    )


def compare_dequant_nvfp4(v):
    """Dequantization from stored codes, scales and amax."""
    codes, scales, amax = v.arrays["q"], v.arrays["scale"], v.arrays["amax"]
    shape = (codes.shape[0], 2 * codes.shape[1])
    for name in ("fp32", "bf16"):
        q = Quantized(codes, pad_to_blocks(scales, 128, 4), None, None, amax, None, NVFP4Scaling(), shape, DTYPES[name])
        v.compare_floats(
            f"NVFP4 dequantize to {name}", ops.dequantize(q, dtype=DTYPES[name]), v.arrays[f"out_{name}_bits"]
        )


def compare_swizzle(v):
    """The 128x4 GEMM order of scales."""
    for variant in v.variants:
        theirs = v.arrays[f"{variant['id']}_out"]
        ours = swizzle(pad_to_blocks(v.arrays[f"{variant['id']}_in"], 128, 4))
        v.compare(f"swizzle {tuple(variant['shape'])}", ours.reshape(theirs.shape), theirs)


# --- activations ----------------------------------------------------------------------------------


def compare_act_unary(v):
    """float64 truth against PyTorch, float32 values against TE's host formulas.

    PyTorch's float64 formulas cancel in the tails and use exact constants where TE has float32 ones, so agreement is
    judged by the bound of `_truth_bound`; "differing" counts elements outside it.
    """
    x = v.arrays["x"]
    for name in ("gelu", "qgelu", "relu", "srelu", "silu"):
        bound = bind_activation(name, {})
        peer = "gelu_tanh" if name == "gelu" else name
        for which, ours in (("", bound.truth), ("d", lambda x, b=bound: b.truth_grad(1.0, x))):
            theirs = v.arrays[f"f64_{which}{peer}"]
            outside = ~_agrees(ours(x.astype(np.float64)), theirs, _truth_bound(x))
            v.compare(f"{which}{name} truth against float64", outside, np.zeros_like(outside))
        for which, ours in (("", bound.value), ("d", bound.derivative)):
            theirs = v.arrays[f"te_f32_{which}{name}"]
            outside = ~_agrees(ours(x), theirs, _float32_bound(x))
            v.compare(f"{which}{name} float32 against TE's host formula", outside, np.zeros_like(outside))


def compare_act_gated(v):
    """float64 truth against PyTorch, forward and gradient, gate order included."""
    x, dy = v.tensor("x_bits", "bf16"), v.tensor("dy_bits", "bf16")
    x, dy = x.astype(np.float64), dy.astype(np.float64)
    half = x.shape[1] // 2
    act, gate = x[:, :half], x[:, half:]
    for name in ("glu", "geglu", "qgeglu", "reglu", "sreglu", "swiglu"):
        bound = bind_activation(name, {})
        peer = "geglu_tanh" if name == "geglu" else name
        outside = ~_agrees(bound.truth(act, gate), v.arrays[f"{peer}_y_f64"], _truth_bound(act) * np.abs(gate))
        v.compare(f"{name} truth against float64", outside, np.zeros_like(outside))
        theirs = v.arrays[f"{peer}_dx_f64"]
        d_act, d_gate = bound.truth_grad(dy, act, gate)
        outside = ~_agrees(d_act, theirs[:, :half], _truth_bound(act) * np.abs(dy * gate))
        outside |= ~_agrees(d_gate, theirs[:, half:], _truth_bound(act) * np.abs(dy))
        v.compare(f"d{name} truth against float64", outside, np.zeros_like(outside))


def _truth_bound(x):
    """How far float64 values of the same real function may lie apart: TE's constants are rounded to float32.

    sqrt(2/pi), 0.044715 and 1.702 move by at most 2^-25 relative; |x f'| and |x f''| stay below 3 (1 + |x|) for every
    activation here, so the values move by at most 3 (1 + |x|) 2^-25. Squared ReLU is exact.
    """
    return 3.0 * (1.0 + np.abs(x.astype(np.float64))) * 2.0**-25


def _float32_bound(x):
    """How far two float32 evaluations in the same order may lie apart: 8 roundings of terms up to 2 (1 + |x|)."""
    return 16.0 * (1.0 + np.abs(x.astype(np.float64))) * 2.0**-24


def _agrees(ours, theirs, bound):
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    same = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
    return same | (np.abs(ours - theirs) <= bound)


# --- small helpers --------------------------------------------------------------------------------


def _settings(variant):
    return f"{variant['fp8']}, eps {variant['eps']:g}{', power of 2' if variant['pow_2_scales'] else ''}"


def _nvfp4_name(scaling):
    parts = ["NVFP4", "16x16" if scaling.two_d else "1x16"]
    if scaling.four_over_six:
        parts.append(f"4over6 {scaling.four_over_six} {scaling.e4m3_max}")
    if scaling.row_scaled:
        parts.append("row-scaled")
    return " ".join(parts)


def _leading(padded, like):
    """The leading part of `padded` that has the shape of `like`."""
    return padded[: like.shape[0], : like.shape[1]]


def _bits(dtype):
    return np.uint16 if dtype.itemsize == 2 else np.uint32


#: Vector kind -> the comparison.
COMPARISONS = {
    "cast_e4m3": compare_cast_fp8,
    "cast_e5m2": compare_cast_fp8,
    "cast_e2m1": compare_cast_e2m1,
    "cast_e8m0": compare_cast_e8m0,
    "decode_tables": compare_decode_tables,
    "e8m0_tables": compare_e8m0_tables,
    "stochastic_round_e2m1": compare_stochastic,
    "fp8_scale_from_amax": compare_scale_from_amax,
    "fp8_current": compare_fp8_current,
    "fp8_delayed_update": compare_fp8_delayed_update,
    "fp8_block": compare_fp8_block,
    "dequant_fp8_block": compare_dequant_fp8_block,
    "mxfp8": compare_mxfp8,
    "mxfp8_floor_even_ceil": compare_mxfp8_ocp,
    "dequant_mxfp8": compare_dequant_mxfp8,
    "nvfp4_scales": compare_nvfp4_scales,
    "nvfp4": compare_nvfp4,
    "nvfp4_rht": compare_nvfp4_rht,
    "nvfp4_other": compare_nvfp4_other,
    "dequant_nvfp4": compare_dequant_nvfp4,
    "scale_swizzle": compare_swizzle,
    "act_unary": compare_act_unary,
    "act_gated": compare_act_gated,
}
