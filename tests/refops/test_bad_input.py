"""Every wrong argument raises an error that names the argument, its value and the rule."""

import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from helpers import BF16

import refops
from refops import E2M1, E4M3, E5M2, E8M0

X = np.ones((32, 64), np.float32)
CURRENT = refops.CurrentScaling(E4M3)
MX = refops.MXFP8Scaling(E4M3)
HISTORY, SCALE = np.ones((4, 3), np.float32), np.ones(3, np.float32)
FLOATS = "float32, float16 or bfloat16"
ONE_DIM = "at least one dimension"
OUTPUT_SHAPE = "shape of the activation's output"
POSITIVE = "finite float32: a positive number"
U8 = np.zeros((32, 64), np.uint8)


def case(name, call, error, argument, value, rule):
    """One wrong call; `argument`, `value` and `rule` are regular expressions that the message must contain."""
    return pytest.param(call, error, argument, value, rule, id=name)


def nvfp4_bits(bits, **flags):
    """Quantize X stochastically with these random bits."""
    return refops.quantize(X, refops.NVFP4Scaling(stochastic_rounding=True, random_bits=bits), **flags)


def update(history=HISTORY, scale=SCALE, fmt=E4M3, **options):
    """`update_delayed_scale` with good defaults."""
    return refops.update_delayed_scale(history, scale, fmt, **options)


CASES = [
    # dtype and rank of tensors
    case("quantize-float64", lambda: refops.quantize(X.astype(float), CURRENT), TypeError, "x", "float64 of shape .32, 64.", FLOATS),
    case("quantize-int32", lambda: refops.quantize(np.ones((2, 3), np.int32), CURRENT), TypeError, "x", "int32 of shape .2, 3.", FLOATS),
    case("quantize-fp8", lambda: refops.quantize(X.astype(ml_dtypes.float8_e4m3fn), CURRENT), TypeError, "x", "float8_e4m3fn", FLOATS),
    case("quantize-big-endian", lambda: refops.quantize(X.astype(">f4"), CURRENT), TypeError, "x", ">f4", FLOATS),
    case("quantize-none", lambda: refops.quantize(None, CURRENT), TypeError, "x", "object", FLOATS),
    case("quantize-text", lambda: refops.quantize("abc", CURRENT), TypeError, "x", "<U3", FLOATS),
    case("quantize-list-of-float", lambda: refops.quantize([[1.0, 2.0]], CURRENT), TypeError, "x", "float64 of shape .1, 2.", "round float64 to float32 first"),
    case("quantize-ragged-list", lambda: refops.quantize([[1.0], [1.0, 2.0]], CURRENT), (TypeError, ValueError), "x", "", "float32|rectangular|array"),
    case("quantize-scalar", lambda: refops.quantize(np.float32(1), CURRENT), ValueError, "x", "scalar", ONE_DIM),
    case("activation-complex", lambda: refops.activation("gelu", X.astype(np.complex64)), TypeError, "x", "complex64", FLOATS),
    case("activation-bool", lambda: refops.activation("gelu", X > 0), TypeError, "x", "bool", FLOATS),
    case("activation-scalar", lambda: refops.activation("gelu", np.float16(1)), ValueError, "x", "scalar", ONE_DIM),
    case("activation-quantize-scalar", lambda: refops.activation_quantize("gelu", np.float32(1), CURRENT), ValueError, "x", "scalar", ONE_DIM),
    case("grad-dy-float64", lambda: refops.activation_grad("gelu", X.astype(float), X), TypeError, "dy", "float64", FLOATS),
    case("grad-dy-scalar", lambda: refops.activation_grad("gelu", np.float32(1), X), ValueError, "dy", "scalar", ONE_DIM),
    case("encode-int8", lambda: refops.encode(np.ones(4, np.int8), E4M3), TypeError, "x", "int8 of shape .4,.", FLOATS),
    case("decode-float", lambda: refops.decode(X, E4M3), TypeError, "codes", "float32", "uint8"),
    case("decode-int64", lambda: refops.decode([1, 2], E4M3), TypeError, "codes", "int64", "uint8"),
    case("pack-int", lambda: refops.pack_fp4(np.ones((2, 2), np.int32)), TypeError, "codes", "int32", "uint8"),
    case("unpack-int", lambda: refops.unpack_fp4(np.ones((2, 2), np.int32)), TypeError, "packed", "int32", "uint8"),
    case("hadamard-int", lambda: refops.hadamard_transform(np.ones((2, 16), int)), TypeError, "x", "int64", FLOATS),
    case("hadamard-scalar", lambda: refops.hadamard_transform(np.float32(1)), ValueError, "x", "scalar", ONE_DIM),
    case("row-scales-int", lambda: refops.scaled_activation("srelu", X, np.ones(32, int)), TypeError, "row_scales", "int64", FLOATS),
    # shapes
    case("gated-odd", lambda: refops.activation("swiglu", X[:, :63]), ValueError, "x", r"\(32, 63\)", "even last dimension"),
    case("gated-odd-quantize", lambda: refops.activation_quantize("geglu", X[:, :3], MX), ValueError, "x", r"\(32, 3\)", "even last dimension"),
    case("gated-odd-grad", lambda: refops.activation_grad("reglu", X[:, :1], X[:, :3]), ValueError, "x", r"\(32, 3\)", "even last dimension"),
    case("gated-odd-scaled", lambda: refops.scaled_activation("swiglu", X[:, :3], SCALE), ValueError, "x", r"\(32, 3\)", "even last dimension"),
    case("grad-dy-shape", lambda: refops.activation_grad("gelu", X[:, :32], X), ValueError, "dy", r"\(32, 64\).*got.*\(32, 32\)", OUTPUT_SHAPE),
    case("grad-dy-flat", lambda: refops.activation_grad("gelu", X.reshape(-1), X), ValueError, "dy", r"got.*\(2048,\)", OUTPUT_SHAPE),
    case("grad-gated-dy-shape", lambda: refops.activation_grad("swiglu", X, X), ValueError, "dy", r"\(32, 32\).*got.*\(32, 64\)", OUTPUT_SHAPE),
    case("grad-dtypes", lambda: refops.activation_grad("gelu", X.astype(BF16), X), TypeError, "dy and x", "bfloat16 and float32", "same dtype"),
    case("scaled-dy-shape", lambda: refops.scaled_activation_grad("swiglu", X, X, np.ones(32, np.float32)), ValueError, "dy", r"\(32, 64\)", OUTPUT_SHAPE),
    case("scaled-rows", lambda: refops.scaled_activation("swiglu", X, np.ones(31, np.float32)), ValueError, "row_scales", r"\(31,\)", "one entry a row, 32"),
    case("nvfp4-rows", lambda: refops.quantize(X[:24], refops.NVFP4Scaling()), ValueError, "x", r"\(24, 64\)", "M % 16 == 0"),
    case("nvfp4-columns", lambda: refops.quantize(X[:, :24], refops.NVFP4Scaling()), ValueError, "x", r"\(32, 24\)", "K % 16 == 0"),
    case("nvfp4-1d", lambda: refops.quantize(X[0], refops.NVFP4Scaling()), ValueError, "x", r"\(64,\), M=1", "M % 16 == 0"),
    case("nvfp4-row-scaled", lambda: refops.quantize(X[:16], refops.NVFP4Scaling(row_scaled=True), columnwise=True), ValueError, "x", r"\(16, 64\)", "M % 32 == 0"),
    case("nvfp4-row-scaled-4over6", lambda: refops.quantize(X, refops.NVFP4Scaling(row_scaled=True, four_over_six="mae"), columnwise=True), ValueError, "columnwise", "True", "row_scaled and four_over_six"),
    case("nvfp4-activation", lambda: refops.activation_quantize("swiglu", X[:, :48], refops.NVFP4Scaling()), ValueError, "x", "K=24", "K % 16 == 0"),
    case("hadamard-columns", lambda: refops.hadamard_transform(X[:, :24]), ValueError, "x", r"\(32, 24\)", "divisible by 16"),
    case("pack-odd", lambda: refops.pack_fp4(U8[:, :3]), ValueError, "codes", r"\(32, 3\)", "even last dimension"),
    case("pack-scalar", lambda: refops.pack_fp4(np.uint8(3)), ValueError, "codes", r"\(\)", "even last dimension"),
    case("pack-17", lambda: refops.pack_fp4(np.array([17, 0], np.uint8)), ValueError, "codes", "17", "below 16"),
    case("unpack-scalar", lambda: refops.unpack_fp4(np.uint8(3)), ValueError, "packed", "scalar", ONE_DIM),
    case("decode-wide-fp4", lambda: refops.decode(np.array([16], np.uint8), E2M1), ValueError, "codes", "16", "below 16 in E2M1"),
    case("decode-wide-fp6", lambda: refops.decode(np.array([200], np.uint8), refops.E3M2), ValueError, "codes", "200", "below 64 in E3M2"),
    case("swizzle-unpadded", lambda: refops.swizzle(U8), ValueError, "scales", r"\(32, 64\)", "rows % 128 == 0"),
    case("swizzle-1d", lambda: refops.swizzle(np.zeros(512, np.uint8)), ValueError, "scales", r"\(512,\)", "2-D"),
    case("swizzle-list", lambda: refops.swizzle([[1, 2]]), (TypeError, ValueError), "scales", r"\(1, 2\)|list", "2-D|array"),
    case("unswizzle-columns", lambda: refops.unswizzle(np.zeros((128, 3), np.uint8)), ValueError, "scales", r"\(128, 3\)", "columns % 4 == 0"),
    # names and parameters
    case("unknown-name", lambda: refops.activation("gelu2", X), ValueError, "name", "'gelu2'", "one of gelu, .*situglu"),
    case("name-not-text", lambda: refops.activation(3, X), ValueError, "name", "3", "one of gelu"),
    case("name-quantize", lambda: refops.activation_quantize("mish", X, MX), ValueError, "name", "'mish'", "one of gelu"),
    case("name-grad", lambda: refops.activation_grad("sigmoid", X, X), ValueError, "name", "'sigmoid'", "one of gelu"),
    case("name-scaled", lambda: refops.scaled_activation("gelu", X, SCALE), ValueError, "name", "'gelu'", "one of swiglu, situglu, clamped_swiglu, srelu"),
    case("name-scaled-array", lambda: refops.scaled_activation(np.array(["swiglu", "srelu"]), X, SCALE), ValueError, "name", "array", "one of swiglu"),
    case("parameter-unknown", lambda: refops.activation("gelu", X, limit=7), TypeError, "limit", "7", "gelu takes no parameter"),
    case("parameter-of-another", lambda: refops.activation("situglu", X, alpha=2.0), TypeError, "alpha", "2.0", "takes: beta1, beta2"),
    case("parameter-misspelt", lambda: refops.activation("clamped_swiglu", X, limt=2.0), TypeError, "limt", "2.0", "takes: limit, alpha, glu_linear_offset"),
    case("parameter-text", lambda: refops.activation("clamped_swiglu", X, alpha="1"), TypeError, "alpha", "'1'", "a number"),
    case("parameter-nan", lambda: refops.activation("clamped_swiglu", X, limit=np.nan), ValueError, "limit", "nan", "a number"),
    case("parameter-array", lambda: refops.activation("clamped_swiglu", X, limit=np.ones(2)), TypeError, "limit", "array", "a number"),
    case("parameter-bool", lambda: refops.activation("clamped_swiglu", X, limit=True), TypeError, "limit", "True", "a number"),
    case("parameter-huge-int", lambda: refops.activation("clamped_swiglu", X, glu_linear_offset=10**400), ValueError, "glu_linear_offset", "1000", "a number"),
    case("beta-zero", lambda: refops.activation("situglu", X, beta1=0), ValueError, "beta1", "0", POSITIVE),
    case("beta-negative", lambda: refops.activation_quantize("situglu", X, MX, beta2=-25.0), ValueError, "beta2", "-25.0", POSITIVE),
    case("beta-infinite", lambda: refops.activation_grad("situglu", X[:, :32], X, beta1=np.inf), ValueError, "beta1", "inf", POSITIVE),
    case("beta-underflows", lambda: refops.activation("situglu", X, beta1=1e-60), ValueError, "beta1", "1e-60", POSITIVE),
    case("beta-overflows", lambda: refops.activation("situglu", X, beta1=1e60), ValueError, "beta1", r"1e\+60", POSITIVE),
    case("interleave-odd", lambda: refops.scaled_activation("swiglu", X, np.ones(32, np.float32), glu_interleave_size=16), ValueError, "glu_interleave_size", "16", "multiple of 32 that divides H=32"),
    case("interleave-too-wide", lambda: refops.scaled_activation("swiglu", X, np.ones(32, np.float32), glu_interleave_size=64), ValueError, "glu_interleave_size", "64", "divides H=32"),
    case("interleave-negative", lambda: refops.scaled_activation("swiglu", X, np.ones(32, np.float32), glu_interleave_size=-32), ValueError, "glu_interleave_size", "-32", r"integer in \[0"),
    case("interleave-float", lambda: refops.scaled_activation("swiglu", X, np.ones(32, np.float32), glu_interleave_size=32.0), TypeError, "glu_interleave_size", "32.0", "integer"),
    case("interleave-unary", lambda: refops.scaled_activation("srelu", X, np.ones(32, np.float32), glu_interleave_size=32), ValueError, "glu_interleave_size", "32", "gated"),
    case("out-dtype-float64", lambda: refops.activation("gelu", X, out_dtype=np.float64), TypeError, "out_dtype", "float64", FLOATS),
    case("out-dtype-text", lambda: refops.activation("gelu", X, out_dtype="bf16"), TypeError, "out_dtype", "'bf16'", FLOATS),
    case("out-dtype-fp8", lambda: refops.activation("gelu", X, out_dtype=ml_dtypes.float8_e5m2), TypeError, "out_dtype", "float8_e5m2", FLOATS),
    case("out-dtype-grad", lambda: refops.activation_grad("gelu", X, X, out_dtype=int), TypeError, "out_dtype", "int", FLOATS),
    case("out-dtype-scaled", lambda: refops.scaled_activation("srelu", X, np.ones(32, np.float32), out_dtype="f8"), TypeError, "out_dtype", "f8", FLOATS),
    case("dequantize-dtype", lambda: refops.dequantize(refops.quantize(X, MX), dtype=np.uint8), TypeError, "dtype", "uint8", FLOATS),
    case("dequantize-dtype-none", lambda: refops.dequantize(refops.quantize(X, MX), dtype=None), TypeError, "dtype", "None", FLOATS),
    case("dequantize-array", lambda: refops.dequantize(X), TypeError, "q", "ndarray", "Quantized"),
    case("dequantize-empty", lambda: refops.dequantize(replace(refops.quantize(X, MX), rowwise_data=None, rowwise_scale_inv=None)), (TypeError, ValueError), "q|rowwise_data", "None|neither|no ", "rowwise"),
    # flags
    case("rowwise-int", lambda: refops.quantize(X, MX, rowwise=1), TypeError, "rowwise", "1", "True or False"),
    case("columnwise-text", lambda: refops.quantize(X, MX, columnwise="yes"), TypeError, "columnwise", "'yes'", "True or False"),
    case("dbias-none", lambda: refops.quantize(X, MX, dbias=None), TypeError, "dbias", "None", "True or False"),
    case("dbias-grad", lambda: refops.activation_grad("gelu", X, X, dbias=2), TypeError, "dbias", "2", "True or False"),
    case("dbias-forward", lambda: refops.activation_quantize("gelu", X, MX, dbias=True), TypeError, "dbias", "True", "takes no parameter"),
    case("no-direction", lambda: refops.quantize(X, MX, rowwise=False), ValueError, "rowwise or columnwise", "rowwise=False, columnwise=False", "must be True"),
    case("hadamard-inverse-text", lambda: refops.hadamard_transform(X, inverse="no"), TypeError, "inverse", "'no'", "True or False"),
    case("keep-unused-int", lambda: update(keep_unused=0), TypeError, "keep_unused", "0", "True or False"),
    case("saturate-text", lambda: refops.encode(X, E4M3, saturate="no"), TypeError, "saturate", "'no'", "True or False"),
    # encode
    case("rounding-unknown", lambda: refops.encode(X, E4M3, rounding="nearest"), ValueError, "rounding", "'nearest'", "one of .*nearest_even.*stochastic"),
    case("rounding-list", lambda: refops.encode(X, E4M3, rounding=["up"]), ValueError, "rounding", r"\['up'\]", "one of .*nearest_even"),
    case("rounding-none", lambda: refops.encode(X, E4M3, rounding=None), ValueError, "rounding", "None", "one of .*nearest_even"),
    case("bits-superfluous", lambda: refops.encode(X, E4M3, random_bits=U8), ValueError, "random_bits", "nearest_even", "needs rounding='stochastic'"),
    case("bits-missing", lambda: refops.encode(X, E4M3, rounding="stochastic"), ValueError, "random_bits", "None", "required"),
    case("bits-dtype", lambda: refops.encode(X, E4M3, rounding="stochastic", random_bits=X), TypeError, "random_bits", "float32", "uint8"),
    case("bits-shape", lambda: refops.encode(X, E4M3, rounding="stochastic", random_bits=U8[:1]), ValueError, "random_bits", r"\(1, 64\)", r"shape of x, \(32, 64\)"),
    case("bits-e8m0", lambda: refops.encode(X, E8M0, rounding="stochastic", random_bits=U8), ValueError, "rounding", "E8M0", "a format with a zero"),
    case("encode-format-text", lambda: refops.encode(X, "e4m3"), TypeError, "fmt", "'e4m3'", "FloatFormat"),
    case("decode-format-dtype", lambda: refops.decode(U8, ml_dtypes.float8_e4m3fn), TypeError, "fmt", "float8_e4m3fn", "FloatFormat"),
    # settings
    case("scaling-class", lambda: refops.quantize(X, refops.MXFP8Scaling), TypeError, "scaling", "class", "DelayedScaling.*NVFP4Scaling"),
    case("scaling-format", lambda: refops.quantize(X, E4M3), TypeError, "scaling", "E4M3", "DelayedScaling.*NVFP4Scaling"),
    case("scaling-none", lambda: refops.activation_quantize("gelu", X, None), TypeError, "scaling", "None", "DelayedScaling"),
    case("scaling-text-grad", lambda: refops.activation_grad_quantize("gelu", X, X, "mxfp8"), TypeError, "scaling", "'mxfp8'", "DelayedScaling"),
    case("delayed-format", lambda: refops.DelayedScaling(E2M1), ValueError, "fmt", "E2M1", "one of E4M3, E5M2"),
    case("current-format-text", lambda: refops.CurrentScaling("e4m3"), TypeError, "fmt", "'e4m3'", "FloatFormat"),
    case("block-format", lambda: refops.BlockScaling(E8M0), ValueError, "fmt", "E8M0", "one of E4M3, E5M2"),
    case("mxfp8-format", lambda: refops.MXFP8Scaling(E2M1), ValueError, "fmt", "E2M1", "one of E4M3, E5M2, E3M2, E2M3"),
    case("scale-zero", lambda: refops.DelayedScaling(E4M3, 0), ValueError, "scale", "0", POSITIVE),
    case("scale-negative", lambda: refops.DelayedScaling(E4M3, -2.0), ValueError, "scale", "-2.0", POSITIVE),
    case("scale-nan", lambda: refops.DelayedScaling(E4M3, float("nan")), ValueError, "scale", "nan", POSITIVE),
    case("scale-infinite", lambda: refops.DelayedScaling(E4M3, float("inf")), ValueError, "scale", "inf", POSITIVE),
    case("scale-tiny", lambda: refops.DelayedScaling(E4M3, 1e-39), ValueError, "scale", "1e-39", "finite float32 reciprocal"),
    case("scale-array", lambda: refops.DelayedScaling(E4M3, np.ones(1, np.float32)), TypeError, "scale", "array", POSITIVE),
    case("scale-none", lambda: refops.DelayedScaling(E4M3, None), TypeError, "scale", "None", POSITIVE),
    case("scale-huge-int", lambda: refops.DelayedScaling(E4M3, 10**400), ValueError, "scale", "1000", POSITIVE),
    case("epsilon-negative", lambda: refops.CurrentScaling(E4M3, amax_epsilon=-1e-6), ValueError, "amax_epsilon", "-1e-06", ">= 0"),
    case("epsilon-negative-block", lambda: refops.BlockScaling(E4M3, amax_epsilon=-1), ValueError, "amax_epsilon", "-1", ">= 0"),
    case("epsilon-negative-tiny", lambda: refops.CurrentScaling(E4M3, amax_epsilon=-1e-60), ValueError, "amax_epsilon", "-1e-60", ">= 0"),
    case("epsilon-infinite", lambda: refops.CurrentScaling(E4M3, amax_epsilon=np.inf), ValueError, "amax_epsilon", "inf", "finite"),
    case("epsilon-nan", lambda: refops.BlockScaling(E4M3, amax_epsilon=np.nan), ValueError, "amax_epsilon", "nan", ">= 0"),
    case("pow2-int", lambda: refops.CurrentScaling(E4M3, power_2_scale=1), TypeError, "power_2_scale", "1", "True or False"),
    case("block-dim", lambda: refops.BlockScaling(E4M3, 3), ValueError, "block_dim", "3", "one of 1, 2"),
    case("block-dim-bool", lambda: refops.BlockScaling(E4M3, True), ValueError, "block_dim", "True", "one of 1, 2"),
    case("mxfp8-rounding", lambda: refops.MXFP8Scaling(E4M3, scale_rounding="nearest"), ValueError, "scale_rounding", "'nearest'", "'up', 'floor', 'even', 'ceil_ocp'"),
    case("mxfp8-two-d", lambda: refops.MXFP8Scaling(E4M3, two_d=2), TypeError, "two_d", "2", "True or False"),
    case("sign-mask", lambda: refops.NVFP4Scaling(rht=True, sign_mask=1 << 16), ValueError, "sign_mask", "65536", r"integer in \[0, 65536\)"),
    case("hadamard-mask", lambda: refops.hadamard_transform(X, -1), ValueError, "sign_mask", "-1", r"integer in \[0, 65536\)"),
    case("seed-negative", lambda: refops.NVFP4Scaling(seed=-1), ValueError, "seed", "-1", r"integer in \[0"),
    case("seed-65-bits", lambda: refops.NVFP4Scaling(seed=1 << 64), ValueError, "seed", "18446744073709551616", r"integer in \[0"),
    case("offset-float", lambda: refops.NVFP4Scaling(offset=1.0), TypeError, "offset", "1.0", "integer"),
    case("four-over-six", lambda: refops.NVFP4Scaling(four_over_six="rmse"), ValueError, "four_over_six", "'rmse'", "None, 'mae', 'mse'"),
    case("e4m3-max", lambda: refops.NVFP4Scaling(e4m3_max=240), ValueError, "e4m3_max", "240", "448, 256"),
    case("e4m3-max-alone", lambda: refops.NVFP4Scaling(e4m3_max=256), ValueError, "e4m3_max=256", "four_over_six=None", "needs four_over_six"),
    case("nvfp4-4over6-rht", lambda: refops.NVFP4Scaling(four_over_six="mae", rht=True), ValueError, "four_over_six", "rht=True", "cannot be combined"),
    case("nvfp4-4over6-sr", lambda: refops.NVFP4Scaling(four_over_six="mae", stochastic_rounding=True), ValueError, "four_over_six", "stochastic_rounding=True", "cannot be combined"),
    case("nvfp4-row-2d", lambda: refops.NVFP4Scaling(row_scaled=True, two_d=True), ValueError, "row_scaled", "two_d=True", "cannot be combined"),
    case("nvfp4-row-rht", lambda: refops.NVFP4Scaling(row_scaled=True, rht=True), ValueError, "row_scaled", "rht=True", "cannot be combined"),
    case("nvfp4-row-sr", lambda: refops.NVFP4Scaling(row_scaled=True, stochastic_rounding=True), ValueError, "row_scaled", "stochastic_rounding=True", "cannot be combined"),
    case("nvfp4-rht-2d", lambda: refops.NVFP4Scaling(rht=True, two_d=True), ValueError, "rht", "two_d=True", "cannot be combined"),
    case("nvfp4-bits-alone", lambda: refops.NVFP4Scaling(random_bits=U8), ValueError, "random_bits", "stochastic_rounding=False", "needs stochastic_rounding=True"),
    case("nvfp4-bits-dtype", lambda: nvfp4_bits(X), TypeError, "random_bits", "float32", "uint8"),
    case("nvfp4-bits-list", lambda: nvfp4_bits([1, 2]), TypeError, "random_bits", r"\[1, 2\]", "uint8"),
    case("nvfp4-bits-three", lambda: nvfp4_bits((U8, U8, U8)), ValueError, "random_bits", "3 arrays", "pair"),
    case("nvfp4-bits-none-in-pair", lambda: nvfp4_bits((U8, None)), TypeError, "random_bits", "None", "uint8"),
    case("nvfp4-bits-shape", lambda: nvfp4_bits(U8.T), ValueError, "random_bits", r"\(64, 32\)", r"rowwise output must have shape \(32, 64\)"),
    case("nvfp4-bits-shape-columnwise", lambda: nvfp4_bits((U8, U8), columnwise=True), ValueError, "random_bits", r"\(32, 64\)", r"columnwise output must have shape \(64, 32\)"),
    case("nvfp4-bits-one-for-two", lambda: nvfp4_bits(U8, columnwise=True), ValueError, "random_bits", "one array", "pair for both directions"),
    case("block-scales-of-array", lambda: refops.block_scales_as_mxfp8(X), TypeError, "q", "array", "BlockScaling"),
    case("block-scales-of-mxfp8", lambda: refops.block_scales_as_mxfp8(refops.quantize(X, MX)), TypeError, "q", "MXFP8Scaling", "BlockScaling"),
    case("block-scales-f32", lambda: refops.block_scales_as_mxfp8(refops.quantize(X, refops.BlockScaling(E4M3, power_2_scale=False))), ValueError, "q", "power_2_scale=False", "powers of two"),
    # delayed scale update
    case("history-float64", lambda: update(HISTORY.astype(float)), TypeError, "amax_history", "float64", "float32"),
    case("history-3d", lambda: update(HISTORY[None]), ValueError, "amax_history", r"\(1, 4, 3\)", r"\(L,\) or \(L, n\)"),
    case("history-empty", lambda: update(HISTORY[:0]), ValueError, "amax_history", r"\(0, 3\)", "L >= 1"),
    case("history-scalar", lambda: update(np.float32(1), np.float32(1)), ValueError, "amax_history", r"\(\)", r"\(L,\) or \(L, n\)"),
    case("update-scale-python", lambda: update(HISTORY[:, 0], 1.0), TypeError, "scale", "float64", "float32"),
    case("update-scale-shape", lambda: update(HISTORY, SCALE[:2]), ValueError, "scale", r"\(2,\)", "one entry for each column"),
    case("update-scale-2d", lambda: update(HISTORY, SCALE[None]), ValueError, "scale", r"\(1, 3\)", "one entry for each column"),
    case("update-format", lambda: update(fmt=E2M1), ValueError, "fmt", "E2M1", "one of E4M3, E5M2"),
    case("update-format-text", lambda: update(fmt="E5M2"), TypeError, "fmt", "'E5M2'", "FloatFormat"),
    case("margin-float", lambda: update(margin=0.5), TypeError, "margin", "0.5", "integer"),
    case("margin-large", lambda: update(margin=127), ValueError, "margin", "127", r"integer in \[-126, 127\)"),
    case("algorithm-unknown", lambda: update(algorithm="mean"), ValueError, "algorithm", "'mean'", "'max', 'most_recent'"),
    case("algorithm-none", lambda: update(algorithm=None), ValueError, "algorithm", "None", "'max', 'most_recent'"),
    case("algorithm-returns-shape", lambda: update(algorithm=lambda h: h[:2, 0]), ValueError, "algorithm", r"\(2,\)", r"one amax a column \(3\)"),
    case("algorithm-returns-text", lambda: update(algorithm=lambda h: ["a", "b", "c"]), (TypeError, ValueError), "algorithm", "a", "amax|float32|number"),
    case("algorithm-returns-none", lambda: update(HISTORY[:, 0], np.float32(1), algorithm=lambda h: None), (TypeError, ValueError), "algorithm", "None|object", "amax|float32|number"),
    case("swizzled-block", lambda: refops.quantize(X, refops.BlockScaling(E5M2)).swizzled(), ValueError, "block scaling", "", "block_scales_as_mxfp8"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "argument", "value", "rule"), CASES)
def test_error_names_argument_value_and_rule(call, error, argument, value, rule):
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    for pattern in (rf"\b(?:{argument})", value, rule):
        assert re.search(pattern, message, re.DOTALL), f"{pattern!r} not in {message!r}"
    assert "\n" not in message or len(message) < 2000, "an error message should be short"


def test_enough_cases():
    """The issue's kinds of bad input are each there more than once."""
    names = [c.id for c in CASES]
    assert len(set(names)) == len(names) >= 50


NUMPY_INTEGERS = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]


@pytest.mark.parametrize("kind", NUMPY_INTEGERS)
def test_numpy_integers_mean_what_python_integers_mean(kind):
    """An integer setting taken from an array must not overflow, and must not wrap silently."""
    seeded = refops.quantize(X, refops.NVFP4Scaling(stochastic_rounding=True, seed=kind(5), offset=kind(7)))
    same = refops.quantize(X, refops.NVFP4Scaling(stochastic_rounding=True, seed=5, offset=7))
    assert np.array_equal(seeded.rowwise_data, same.rowwise_data)
    assert update(margin=kind(1))[1].tolist() == update(margin=1)[1].tolist() == [224.0] * 3
    masked = refops.hadamard_transform(X, kind(0x58))
    assert np.array_equal(masked, refops.hadamard_transform(X, 0x58))
    gates = np.ones(32, np.float32)
    interleaved = refops.scaled_activation("swiglu", X, gates, glu_interleave_size=kind(32))
    assert np.array_equal(interleaved, refops.scaled_activation("swiglu", X, gates, glu_interleave_size=32))


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, int, np.int32])
def test_numpy_numbers_are_numbers(kind):
    assert refops.DelayedScaling(E4M3, kind(2)) == refops.DelayedScaling(E4M3, 2.0)
    out = refops.activation("clamped_swiglu", X, limit=kind(3), alpha=kind(2), glu_linear_offset=kind(1))
    assert np.array_equal(out, refops.activation("clamped_swiglu", X, limit=3.0, alpha=2.0, glu_linear_offset=1.0))
