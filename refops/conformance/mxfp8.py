"""MXFP8: TE's scale rule and the OCP ones, both directions, dequantization."""

import numpy as np

from refops import ops
from refops.conformance.vectors import DTYPES, bits_of, leading
from refops.formats import E4M3, E5M2, E8M0, decode
from refops.quantization.layout import pad_to_blocks
from refops.quantization.result import Quantized
from refops.scaling import MXFP8Scaling


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
        v.compare(name + ", rowwise scales", leading(q.rowwise_scale_inv, row_scales), row_scales)
        v.compare(name + ", columnwise scales", leading(q.columnwise_scale_inv, column_scales), column_scales)


def compare_mxfp8_ocp(v):
    """The OCP scale rules. NaN or inf makes torchao's scale NaN; refops ignores NaN and takes 0xFE for inf."""
    fmt = E5M2 if "e5m2" in v.name else E4M3
    for prefix, rule in (("floor", "floor"), ("even", "even"), ("ceil", "ceil_ocp"), ("special_floor", "floor")):
        x = v.tensor("special_x_bits" if prefix == "special_floor" else "x_bits")
        q = ops.quantize(x, MXFP8Scaling(fmt, scale_rounding=rule))
        not_finite = ~np.isfinite(x.astype(np.float32).reshape(len(x), -1, 32)).all(axis=2)
        documented = {"divergence": "torchao makes the scale of a block with NaN or inf NaN (0xFF)"}
        scales, codes = v.arrays[f"{prefix}_scale"], v.arrays[f"{prefix}_q"]
        ours = leading(q.rowwise_scale_inv, scales)
        expected = np.where(not_finite, np.uint8(0xFF), ours)
        v.compare(f"MX {rule} {fmt!r}, scales", ours, scales, expected=expected, **documented)
        expected = np.where(np.repeat(not_finite, 32, axis=1), np.uint8(0x7F), q.rowwise_data)
        v.compare_codes(f"MX {rule} {fmt!r}, codes", q.rowwise_data, codes, fmt, expected=expected, **documented)


def compare_dequant_mxfp8(v):
    """Dequantization: one rounding of the exact product. torchao multiplies in the output dtype."""
    codes, scales = v.arrays["mx_q"], v.arrays["mx_scale"]
    padded = pad_to_blocks(scales, 128, 4)
    for name, dtype in (("fp32", DTYPES["fp32"]), ("bf16", DTYPES["bf16"])):
        scaling = MXFP8Scaling(E4M3)
        q = Quantized(rowwise_data=codes, rowwise_scale_inv=padded, scaling=scaling, shape=codes.shape, dtype=dtype)
        ours = ops.dequantize(q, dtype=dtype)
        v.compare_floats(f"MXFP8 dequantize to {name}", ours, v.arrays[f"mx_out_exact_{name}_bits"])
        scale = np.repeat(E8M0.values[scales].astype(dtype), 32, axis=1)
        in_dtype = (decode(codes, E4M3).astype(dtype).astype(np.float32) * scale.astype(np.float32)).astype(dtype)
        v.compare_floats(
            f"MXFP8 dequantize to {name} (torchao)",
            ours,
            v.arrays[f"mx_out_torchao_{name}_bits"],
            divergence="torchao multiplies in the output dtype",
            expected=in_dtype.view(bits_of(dtype)),
        )
