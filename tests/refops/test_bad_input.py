"""Every wrong argument raises an error that names the argument, its value and the rule."""

import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from independent import BF16

import refops
from refops import E4M3
from refops.arguments import with_article

pytestmark = pytest.mark.check

X = np.ones((32, 64), np.float32)
U8 = np.zeros((32, 64), np.uint8)
HISTORY, SCALE = np.ones((4, 3), np.float32), np.ones(3, np.float32)

# Rules, as regular expressions.
FLOATS = "float32, float16 or bfloat16"
ONE_DIM = "at least one dimension"
OUTPUT_SHAPE = "shape of the activation's output"
POSITIVE = "finite float32: a positive number"
EVEN = "even last dimension"
FLAG = "True or False"
SETTINGS = "DelayedScaling.*NVFP4Scaling"
MODES = "one of .*nearest_even.*stochastic"


def nvfp4_bits(random_bits, **flags):
    """Quantize X stochastically with these random bits."""
    return refops.quantize(X, refops.NVFP4Scaling(stochastic_rounding=True, random_bits=random_bits), **flags)


def update(history=HISTORY, scale=SCALE, fmt=E4M3, **options):
    """`update_delayed_scale` with good defaults."""
    return refops.update_delayed_scale(history, scale, fmt, **options)


#: What the calls below see.
SCOPE = {
    **vars(refops),
    "CURRENT": refops.CurrentScaling(E4M3),
    "MX": refops.MXFP8Scaling(E4M3),
    "np": np,
    "X": X,
    "U8": U8,
    "HISTORY": HISTORY,
    "SCALE": SCALE,
    "BF16": BF16,
    "nvfp4_bits": nvfp4_bits,
    "update": update,
    "replace": replace,
    "f32": np.float32,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}

#: A wrong call, its error, and what the message must contain: argument, value and rule, as regular expressions.
CASES = [
    # classes, names and misspelt words, which are answered with what to write
    (
        "quantize(X, MXFP8Scaling)",
        TypeError,
        "scaling",
        "a class: write .*refops.MXFP8Scaling.fmt=refops.E4M3.$",
        SETTINGS,
    ),
    ("quantize(X, NVFP4Scaling)", TypeError, "scaling", "such as refops.NVFP4Scaling..$", SETTINGS),
    ("quantize(X, 'mxfp8-e5m2')", TypeError, "scaling", "write refops.MXFP8Scaling.fmt=refops.E5M2.$", SETTINGS),
    ("quantize(X, 'mxpf8')", TypeError, "scaling", "did you mean mxfp8", SETTINGS),
    ("MXFP8Scaling('E4M3')", TypeError, "fmt", "got 'E4M3': write refops.E4M3$", "FloatFormat"),
    ("encode(X, 'e4m4')", TypeError, "fmt", "got 'e4m4' .did you mean E4M3", "FloatFormat"),
    ("encode(X, E4M3, rounding='nearest')", ValueError, "rounding", "got 'nearest' .did you mean nearest_even", MODES),
    ("activation('swiglo', X)", ValueError, "name", "got 'swiglo' .did you mean swiglu, ", "one of gelu"),
    ("scaled_activation('swiglo', X, X[:, 0])", ValueError, "name", "did you mean swiglu or situglu.*", "one of srelu"),
    ("activation('clamped_swiglu', X, limt=3)", TypeError, "limt", "got 3 .did you mean limit", "takes: limit"),
    # dtype and rank of tensors
    ("quantize(X.astype(float), CURRENT)", TypeError, "x", "float64 of shape .32, 64.", FLOATS),
    ("quantize(np.ones((2, 3), np.int32), CURRENT)", TypeError, "x", "int32 of shape .2, 3.", FLOATS),
    ("quantize(X.astype(float8_e4m3fn), CURRENT)", TypeError, "x", "float8_e4m3fn", FLOATS),
    ("quantize(X.astype('>f4'), CURRENT)", TypeError, "x", ">f4", FLOATS),
    ("quantize(None, CURRENT)", TypeError, "x", "object", FLOATS),
    ("quantize('abc', CURRENT)", TypeError, "x", "<U3", FLOATS),
    ("quantize([[1.0, 2.0]], CURRENT)", TypeError, "x", "float64 of shape .1, 2.", "round float64 to float32 first"),
    ("quantize([[1.0], [1.0, 2.0]], CURRENT)", (TypeError, ValueError), "x", "", "float32|rectangular|array"),
    ("quantize(f32(1), CURRENT)", ValueError, "x", "scalar", ONE_DIM),
    ("activation('gelu', X.astype(np.complex64))", TypeError, "x", "complex64", FLOATS),
    ("activation('gelu', X > 0)", TypeError, "x", "bool", FLOATS),
    ("activation('gelu', np.float16(1))", ValueError, "x", "scalar", ONE_DIM),
    ("activation_quantize('gelu', f32(1), CURRENT)", ValueError, "x", "scalar", ONE_DIM),
    ("activation_grad('gelu', X.astype(float), X)", TypeError, "dy", "float64", FLOATS),
    ("activation_grad('gelu', f32(1), X)", ValueError, "dy", "scalar", ONE_DIM),
    ("encode(np.ones(4, np.int8), E4M3)", TypeError, "x", "int8 of shape .4,.", FLOATS),
    ("decode(X, E4M3)", TypeError, "codes", "float32", "uint8"),
    ("decode(U8.view(np.int8), INT8)", TypeError, "codes", "int8", r"codes\.view\(np\.uint8\)"),
    ("decode(U8.view(float8_e4m3fn), E4M3)", TypeError, "codes", "float8", r"codes\.view\(np\.uint8\)"),
    (
        "Quantized(rowwise_data=U8.view(np.int8), scaling=MXINT8Scaling(), shape=(32, 64), dtype=f32)",
        ValueError,
        "rowwise_data",
        "int8 of shape .32, 64.; hand in",
        r"rowwise_data\.view\(np\.uint8\)",
    ),
    ("decode([1, 2], E4M3)", TypeError, "codes", "int64", "uint8"),
    ("pack_fp4(np.ones((2, 2), np.int32))", TypeError, "codes", "int32", "uint8"),
    ("unpack_fp4(np.ones((2, 2), np.int32))", TypeError, "packed", "int32", "uint8"),
    ("hadamard_transform(np.ones((2, 16), int))", TypeError, "x", "int64", FLOATS),
    ("hadamard_transform(f32(1))", ValueError, "x", "scalar", ONE_DIM),
    ("scaled_activation('srelu', X, np.ones(32, int))", TypeError, "row_scales", "int64", FLOATS),
    # shapes
    ("activation('swiglu', X[:, :63])", ValueError, "x", r"\(32, 63\)", EVEN),
    ("activation_quantize('geglu', X[:, :3], MX)", ValueError, "x", r"\(32, 3\)", EVEN),
    ("activation_grad('reglu', X[:, :1], X[:, :3])", ValueError, "x", r"\(32, 3\)", EVEN),
    ("scaled_activation('swiglu', X[:, :3], SCALE)", ValueError, "x", r"\(32, 3\)", EVEN),
    ("activation_grad('gelu', X[:, :32], X)", ValueError, "dy", r"\(32, 64\).*got.*\(32, 32\)", OUTPUT_SHAPE),
    ("activation_grad('gelu', X.reshape(-1), X)", ValueError, "dy", r"got.*\(2048,\)", OUTPUT_SHAPE),
    ("activation_grad('swiglu', X, X)", ValueError, "dy", r"\(32, 32\).*got.*\(32, 64\)", OUTPUT_SHAPE),
    ("activation_grad('gelu', X.astype(BF16), X)", TypeError, "dy and x", "bfloat16 and float32", "same dtype"),
    ("scaled_activation_grad('swiglu', X, X, np.ones(32, f32))", ValueError, "dy", r"\(32, 64\)", OUTPUT_SHAPE),
    ("scaled_activation('swiglu', X, np.ones(31, f32))", ValueError, "row_scales", r"\(31,\)", "one entry per row, 32"),
    ("NVFP4Scaling(E2M1)", TypeError, "two_d", "E2M1", "NVFP4Scaling takes no element format, its elements are E2M1"),
    ("MXFP4Scaling(E2M1)", TypeError, "two_d", "E2M1", "MXFP4Scaling takes no element format"),
    ("MXFP8Scaling(E4M3, E4M3)", TypeError, "two_d", "E4M3", "True or False; got E4M3$"),
    ("quantize(X[:24], NVFP4Scaling())", ValueError, "x", r"\(24, 64\)", "M % 16 == 0"),
    ("quantize(X[:, :24], NVFP4Scaling())", ValueError, "x", r"\(32, 24\)", "K % 16 == 0"),
    ("quantize(X[0], NVFP4Scaling())", ValueError, "x", r"\(64,\), M=1", "M % 16 == 0"),
    ("quantize(X[:16], NVFP4Scaling(row_scaled=True), columnwise=True)", ValueError, "x", r"\(16, 64\)", "M % 32 == 0"),
    (
        "quantize(X, NVFP4Scaling(row_scaled=True, four_over_six='mae'), columnwise=True)",
        ValueError,
        "columnwise",
        "True",
        "row_scaled and four_over_six",
    ),
    ("activation_quantize('swiglu', X[:, :48], NVFP4Scaling())", ValueError, "x", "K=24", "K % 16 == 0"),
    ("hadamard_transform(X[:, :24])", ValueError, "x", r"\(32, 24\)", "divisible by 16"),
    ("pack_fp4(U8[:, :3])", ValueError, "codes", r"\(32, 3\)", EVEN),
    ("pack_fp4(np.uint8(3))", ValueError, "codes", r"\(\)", EVEN),
    ("pack_fp4(np.array([17, 0], np.uint8))", ValueError, "codes", "17", "below 16"),
    ("unpack_fp4(np.array([1.5]))", TypeError, "packed", "float64", "uint8 array; got float64 of shape .1,.$"),
    ("unpack_fp4(np.ones(2, np.int8))", TypeError, "packed", "int8", r"hand in packed.view\(np.uint8\)"),
    ("unpack_fp4(np.uint8(3))", ValueError, "packed", "scalar", ONE_DIM),
    ("decode(np.array([16], np.uint8), E2M1)", ValueError, "codes", "16", "below 16 in E2M1"),
    ("decode(np.array([200], np.uint8), E3M2)", ValueError, "codes", "200", "below 64 in E3M2"),
    ("swizzle(U8)", ValueError, "scales", r"\(32, 64\)", "rows % 128 == 0"),
    ("swizzle(np.zeros(512, np.uint8))", ValueError, "scales", r"\(512,\)", "2-D"),
    ("swizzle([[1, 2]])", (TypeError, ValueError), "scales", r"\(1, 2\)|list", "2-D|array"),
    ("unswizzle(np.zeros((128, 3), np.uint8))", ValueError, "scales", r"\(128, 3\)", "columns % 4 == 0"),
    ("activation_quantize('swiglu', X[:, :48], MX)", ValueError, "x", "H=24", "H % 32 == 0"),
    ("activation_grad_quantize('swiglu', X[:, :24], X[:, :48], MX)", ValueError, "x", "H=24", "H % 32 == 0"),
    # names and parameters
    ("activation('gelu2', X)", ValueError, "name", "'gelu2'", "one of gelu, .*situglu"),
    ("activation(3, X)", ValueError, "name", "3", "one of gelu"),
    ("activation_quantize('no_such_activation', X, MX)", ValueError, "name", "'no_such_activation'", "one of gelu"),
    ("activation_grad('sigmoid', X, X)", ValueError, "name", "'sigmoid'", "one of gelu"),
    (
        "scaled_activation('gelu', X, SCALE)",
        ValueError,
        "name",
        "'gelu'",
        "one of srelu, swiglu, clamped_swiglu, situglu",
    ),
    (
        "scaled_activation(np.array(['swiglu', 'srelu']), X, SCALE)",
        ValueError,
        "name",
        "array|<U6 of shape",
        "one of srelu, swiglu",
    ),
    ("activation('gelu', X, limit=7)", TypeError, "limit", "7", "gelu takes no parameter"),
    ("activation('situglu', X, alpha=2.0)", TypeError, "alpha", "2.0", "takes: beta1, beta2"),
    ("activation('clamped_swiglu', X, limt=2.0)", TypeError, "limt", "2.0", "takes: limit, alpha, glu_linear_offset"),
    ("activation('clamped_swiglu', X, alpha='1')", TypeError, "alpha", "'1'", "a number"),
    ("activation('clamped_swiglu', X, limit=np.nan)", ValueError, "limit", "nan", "a number"),
    ("activation('clamped_swiglu', X, limit=np.ones(2))", TypeError, "limit", r"float64 of shape \(2,\)", "a number"),
    ("activation('clamped_swiglu', X, limit=True)", TypeError, "limit", "True", "a number"),
    ("activation('clamped_swiglu', X, glu_linear_offset=10**400)", ValueError, "glu_linear_offset", "1000", "a number"),
    ("activation('situglu', X, beta1=0)", ValueError, "beta1", "0", POSITIVE),
    ("activation_quantize('situglu', X, MX, beta2=-25.0)", ValueError, "beta2", "-25.0", POSITIVE),
    ("activation_grad('situglu', X[:, :32], X, beta1=np.inf)", ValueError, "beta1", "inf", POSITIVE),
    ("activation('situglu', X, beta1=1e-60)", ValueError, "beta1", "1e-60", POSITIVE),
    ("activation('situglu', X, beta1=1e60)", ValueError, "beta1", r"1e\+60", POSITIVE),
    (
        "scaled_activation('swiglu', X, np.ones(32, f32), glu_interleave_size=16)",
        ValueError,
        "glu_interleave_size",
        "16",
        "multiple of 32 that divides H=32",
    ),
    (
        "scaled_activation('swiglu', X, np.ones(32, f32), glu_interleave_size=64)",
        ValueError,
        "glu_interleave_size",
        "64",
        "divides H=32",
    ),
    (
        "scaled_activation('swiglu', X, np.ones(32, f32), glu_interleave_size=-32)",
        ValueError,
        "glu_interleave_size",
        "-32",
        r"integer in \[0",
    ),
    (
        "scaled_activation('swiglu', X, np.ones(32, f32), glu_interleave_size=32.0)",
        TypeError,
        "glu_interleave_size",
        "32.0",
        "integer",
    ),
    (
        "scaled_activation('srelu', X, np.ones(32, f32), glu_interleave_size=32)",
        ValueError,
        "glu_interleave_size",
        "32",
        "gated",
    ),
    ("activation('gelu', X, out_dtype=np.float64)", TypeError, "out_dtype", "float64", FLOATS),
    ("activation('gelu', X, out_dtype='bf16')", TypeError, "out_dtype", "'bf16'", FLOATS),
    ("activation('gelu', X, out_dtype=float8_e5m2)", TypeError, "out_dtype", "float8_e5m2", FLOATS),
    ("activation_grad('gelu', X, X, out_dtype=int)", TypeError, "out_dtype", "int", FLOATS),
    ("scaled_activation('srelu', X, np.ones(32, f32), out_dtype='f8')", TypeError, "out_dtype", "f8", FLOATS),
    ("dequantize(quantize(X, MX), dtype=np.uint8)", TypeError, "dtype", "uint8", FLOATS),
    ("dequantize(quantize(X, MX), dtype=None)", TypeError, "dtype", "None", FLOATS),
    ("dequantize(X)", TypeError, "q", "ndarray", "Quantized"),
    (
        "dequantize(replace(quantize(X, MX), rowwise_data=None, rowwise_scale_inv=None))",
        (TypeError, ValueError),
        "q|rowwise_data",
        "None|neither|no ",
        "rowwise",
    ),
    # flags
    ("quantize(X, MX, rowwise=1)", TypeError, "rowwise", "1", FLAG),
    ("quantize(X, MX, columnwise='yes')", TypeError, "columnwise", "'yes'", FLAG),
    ("quantize(X, MX, dbias=None)", TypeError, "dbias", "None", FLAG),
    ("activation_grad('gelu', X, X, dbias=2)", TypeError, "dbias", "2", FLAG),
    ("activation_quantize('gelu', X, MX, dbias=True)", TypeError, "dbias", "True", "takes no parameter"),
    (
        "quantize(X, MX, rowwise=False)",
        ValueError,
        "rowwise or columnwise",
        "rowwise=False, columnwise=False",
        "must be True",
    ),
    ("hadamard_transform(X, inverse='no')", TypeError, "inverse", "'no'", FLAG),
    ("update(keep_unused=0)", TypeError, "keep_unused", "0", FLAG),
    ("encode(X, E4M3, saturate='no')", TypeError, "saturate", "'no'", FLAG),
    # encode
    ("encode(X, E4M3, rounding='nearest')", ValueError, "rounding", "'nearest'", MODES),
    ("encode(X, E4M3, rounding=['up'])", ValueError, "rounding", r"\['up'\]", MODES),
    ("encode(X, E4M3, rounding=None)", ValueError, "rounding", "None", MODES),
    ("encode(X, E4M3, random_bits=U8)", ValueError, "random_bits", "nearest_even", "needs rounding='stochastic'"),
    ("encode(X, E4M3, rounding='stochastic')", ValueError, "random_bits", "None", "required"),
    ("encode(X, E4M3, rounding='stochastic', random_bits=X)", TypeError, "random_bits", "float32", "uint8"),
    (
        "encode(X, E4M3, rounding='stochastic', random_bits=U8[:1])",
        ValueError,
        "random_bits",
        r"\(1, 64\)",
        r"shape of x, \(32, 64\)",
    ),
    ("encode(X, E8M0, rounding='stochastic', random_bits=U8)", ValueError, "rounding", "E8M0", "a format with a zero"),
    ("encode(X, 'e4m3')", TypeError, "fmt", "'e4m3'", "FloatFormat"),
    ("decode(U8, float8_e4m3fn)", TypeError, "fmt", "float8_e4m3fn", "FloatFormat"),
    # settings
    ("quantize(X, MXFP8Scaling)", TypeError, "scaling", "class", SETTINGS),
    ("quantize(X, E4M3)", TypeError, "scaling", "E4M3", SETTINGS),
    ("activation_quantize('gelu', X, None)", TypeError, "scaling", "None", SETTINGS),
    ("activation_grad_quantize('gelu', X, X, 'mxfp8')", TypeError, "scaling", "'mxfp8'", SETTINGS),
    ("DelayedScaling(E2M1)", ValueError, "fmt", "E2M1", "one of E4M3, E5M2"),
    ("encode(X, U8)", TypeError, "fmt", "uint8 of shape .32, 64.", "FloatFormat"),
    ("quantize(X, U8)", TypeError, "scaling", "uint8 of shape .32, 64.", SETTINGS),
    ("block_scales_as_mxfp8(U8)", TypeError, "q", "uint8 of shape .32, 64.", "BlockScaling"),
    (
        "block_scales_as_mxfp8(quantize(X, MXINT8Scaling()))",
        TypeError,
        "q",
        "MXINT8Scaling",
        "float32 scales of blocks",
    ),
    # formats
    ("FloatFormat(1, 4, 3, 7, 126)", TypeError, "name", "1", "string"),
    ("FloatFormat('f', 4, 3, 7, 0)", ValueError, "largest_code", "0", "integer in .1, 128."),
    ("FloatFormat('f', 4, 3, 7, 200)", ValueError, "largest_code", "200", "integer in .1, 128."),
    ("FloatFormat('f', 4, 3, 7, 126, infinity_code=128)", ValueError, "infinity_code", "128", "integer in .0, 128."),
    ("FloatFormat('f', 4, 3, 7, 126, infinity_code=127, nan_code=127)", ValueError, "nan_code", "127", "differ from"),
    ("FloatFormat('f', 4, 3, 7, 126, nan_code=3)", ValueError, "nan_code", "0x3", "above largest_code, 0x7e"),
    ("FloatFormat('f', 4, 3, 7, 127, nan_code=127)", ValueError, "nan_code", "0x7f", "above largest_code, 0x7f"),
    ("FloatFormat('f', X, 3, 7, 126)", TypeError, "exponent_bits", "float32 of shape", "integer"),
    ("FloatFormat('f', 4, -1, 7, 126)", ValueError, "mantissa_bits", "-1", "integer in"),
    ("FloatFormat('f', 4, 3, 1000, 126)", ValueError, "bias", "1000", "integer in"),
    ("FloatFormat('f', 4, 3, 7, 126, signed=None)", TypeError, "signed", "None", FLAG),
    ("CurrentScaling('e4m3')", TypeError, "fmt", "'e4m3'", "FloatFormat"),
    ("BlockScaling(E8M0)", ValueError, "fmt", "E8M0", "one of E4M3, E5M2"),
    ("MXFP8Scaling(E2M1)", ValueError, "fmt", "E2M1", "one of E4M3, E5M2, E3M2, E2M3"),
    ("DelayedScaling(E4M3, 0)", ValueError, "scale", "0", POSITIVE),
    ("DelayedScaling(E4M3, -2.0)", ValueError, "scale", "-2.0", POSITIVE),
    ("DelayedScaling(E4M3, float('nan'))", ValueError, "scale", "nan", POSITIVE),
    ("DelayedScaling(E4M3, float('inf'))", ValueError, "scale", "inf", POSITIVE),
    ("DelayedScaling(E4M3, 1e-39)", ValueError, "scale", "1e-39", "finite float32 reciprocal"),
    ("DelayedScaling(E4M3, np.ones(2, f32))", TypeError, "scale", r"float32 of shape \(2,\)", POSITIVE),
    ("DelayedScaling(E4M3, None)", TypeError, "scale", "None", POSITIVE),
    ("DelayedScaling(E4M3, 10**400)", ValueError, "scale", "1000", POSITIVE),
    ("CurrentScaling(E4M3, amax_epsilon=-1e-6)", ValueError, "amax_epsilon", "-1e-06", ">= 0"),
    ("BlockScaling(E4M3, amax_epsilon=-1)", ValueError, "amax_epsilon", "-1", ">= 0"),
    ("CurrentScaling(E4M3, amax_epsilon=-1e-60)", ValueError, "amax_epsilon", "-1e-60", ">= 0"),
    ("CurrentScaling(E4M3, amax_epsilon=np.inf)", ValueError, "amax_epsilon", "inf", "finite"),
    ("BlockScaling(E4M3, amax_epsilon=np.nan)", ValueError, "amax_epsilon", "nan", ">= 0"),
    ("CurrentScaling(E4M3, power_2_scale=1)", TypeError, "power_2_scale", "1", FLAG),
    ("BlockScaling(E4M3, 3)", ValueError, "block_dim", "3", "one of 1, 2"),
    ("BlockScaling(E4M3, True)", ValueError, "block_dim", "True", "one of 1, 2"),
    ("BlockScaling(E4M3, np.True_)", ValueError, "block_dim", "True", "one of 1, 2"),
    ("BlockScaling(E4M3, 2.0)", ValueError, "block_dim", "2.0", "one of 1, 2"),
    ("BlockScaling(E4M3, np.float32(2))", ValueError, "block_dim", "2.0", "one of 1, 2"),
    ("BlockScaling(E4M3, '2')", ValueError, "block_dim", "'2'", "one of 1, 2"),
    ("BlockScaling(E4M3, np.array(2))", ValueError, "block_dim", r"int64 of shape \(\)", "one of 1, 2"),
    ("BlockScaling(E4M3, np.int64(3))", ValueError, "block_dim", "3", "one of 1, 2"),
    (
        "MXFP8Scaling(E4M3, scale_rounding='nearest')",
        ValueError,
        "scale_rounding",
        "'nearest'",
        "'up', 'floor', 'even', 'ceil_ocp'",
    ),
    ("MXFP8Scaling(E4M3, two_d=2)", TypeError, "two_d", "2", FLAG),
    ("NVFP4Scaling(rht=True, sign_mask=1 << 16)", ValueError, "sign_mask", "65536", r"integer in \[0, 65536\)"),
    ("hadamard_transform(X, -1)", ValueError, "sign_mask", "-1", r"integer in \[0, 65536\)"),
    ("NVFP4Scaling(seed=-1)", ValueError, "seed", "-1", r"integer in \[0"),
    ("NVFP4Scaling(seed=1 << 64)", ValueError, "seed", "18446744073709551616", r"integer in \[0"),
    ("NVFP4Scaling(offset=1.0)", TypeError, "offset", "1.0", "integer"),
    ("NVFP4Scaling(four_over_six='rmse')", ValueError, "four_over_six", "'rmse'", "None, 'mae', 'mse'"),
    ("NVFP4Scaling(four_over_six=np.str_('rmse'))", ValueError, "four_over_six", "'rmse'", "None, 'mae', 'mse'"),
    ("NVFP4Scaling(four_over_six=False)", ValueError, "four_over_six", "False", "None, 'mae', 'mse'"),
    ("NVFP4Scaling(four_over_six=b'mae')", ValueError, "four_over_six", "b'mae'", "None, 'mae', 'mse'"),
    ("NVFP4Scaling(e4m3_max=240)", ValueError, "e4m3_max", "240", "448, 256"),
    ("NVFP4Scaling(e4m3_max=True)", ValueError, "e4m3_max", "True", "448, 256"),
    ("NVFP4Scaling(e4m3_max=np.float32(448))", ValueError, "e4m3_max", "448.0", "448, 256"),
    ("NVFP4Scaling(e4m3_max=np.int64(256))", ValueError, "e4m3_max=256", "four_over_six=None", "needs four_over_six"),
    ("NVFP4Scaling(fast_error=True)", ValueError, "fast_error=True", "four_over_six=None", "needs four_over_six"),
    ("NVFP4Scaling(e4m3_max=256)", ValueError, "e4m3_max=256", "four_over_six=None", "needs four_over_six"),
    ("NVFP4Scaling(four_over_six='mae', rht=True)", ValueError, "four_over_six", "rht=True", "cannot be combined"),
    (
        "NVFP4Scaling(four_over_six='mae', stochastic_rounding=True)",
        ValueError,
        "four_over_six",
        "stochastic_rounding=True",
        "cannot be combined",
    ),
    ("NVFP4Scaling(row_scaled=True, two_d=True)", ValueError, "row_scaled", "two_d=True", "cannot be combined"),
    ("NVFP4Scaling(row_scaled=True, rht=True)", ValueError, "row_scaled", "rht=True", "cannot be combined"),
    (
        "NVFP4Scaling(row_scaled=True, stochastic_rounding=True)",
        ValueError,
        "row_scaled",
        "stochastic_rounding=True",
        "cannot be combined",
    ),
    ("NVFP4Scaling(rht=True, two_d=True)", ValueError, "rht", "two_d=True", "cannot be combined"),
    (
        "NVFP4Scaling(random_bits=U8)",
        ValueError,
        "random_bits",
        "stochastic_rounding=False",
        "needs stochastic_rounding=True",
    ),
    ("nvfp4_bits(X)", TypeError, "random_bits", "float32", "uint8"),
    ("nvfp4_bits([1, 2])", TypeError, "random_bits", r"\[1, 2\]", "uint8"),
    ("nvfp4_bits((U8, U8, U8))", ValueError, "random_bits", "3 arrays", "pair"),
    ("nvfp4_bits((U8, None))", TypeError, "random_bits", "None", "uint8"),
    ("nvfp4_bits(U8.T)", ValueError, "random_bits", r"\(64, 32\)", r"rowwise output must have shape \(32, 64\)"),
    (
        "nvfp4_bits((U8, U8), columnwise=True)",
        ValueError,
        "random_bits",
        r"\(32, 64\)",
        r"columnwise output must have shape \(64, 32\)",
    ),
    ("nvfp4_bits(U8, columnwise=True)", ValueError, "random_bits", "one array", "pair for both directions"),
    ("block_scales_as_mxfp8(X)", TypeError, "q", "float32 of shape .32, 64.", "BlockScaling"),
    ("block_scales_as_mxfp8(quantize(X, MX))", TypeError, "q", "MXFP8Scaling", "BlockScaling"),
    (
        "block_scales_as_mxfp8(quantize(X, BlockScaling(E4M3, power_2_scale=False)))",
        ValueError,
        "q",
        "power_2_scale=False",
        "powers of two",
    ),
    # delayed scale update
    ("update(HISTORY.astype(float))", TypeError, "amax_history", "float64", "float32"),
    ("update(HISTORY[None])", ValueError, "amax_history", r"\(1, 4, 3\)", r"\(L,\) or \(L, n\)"),
    ("update(HISTORY[:0])", ValueError, "amax_history", r"\(0, 3\)", "L >= 1"),
    ("update(f32(1), f32(1))", ValueError, "amax_history", r"\(\)", r"\(L,\) or \(L, n\)"),
    ("update(HISTORY[:, 0], np.float64(1)[None])", TypeError, "scale", "float64", "float32"),
    ("update(HISTORY, SCALE[:2])", ValueError, "scale", r"\(2,\)", "one entry for each column"),
    ("update(HISTORY, SCALE[None])", ValueError, "scale", r"\(1, 3\)", "one entry for each column"),
    ("update(fmt=E2M1)", ValueError, "fmt", "E2M1", "one of E4M3, E5M2"),
    ("update(fmt='E5M2')", TypeError, "fmt", "'E5M2'", "FloatFormat"),
    ("update(margin=0.5)", TypeError, "margin", "0.5", "integer"),
    ("update(margin=127)", ValueError, "margin", "127", r"integer in \[-126, 127\)"),
    ("update(algorithm='mean')", ValueError, "algorithm", "'mean'", "'max', 'most_recent'"),
    ("update(algorithm=None)", ValueError, "algorithm", "None", "'max', 'most_recent'"),
    ("update(algorithm=lambda h: h[:2, 0])", ValueError, "algorithm", r"\(2,\)", r"one amax a column \(3\)"),
    ("update(algorithm=lambda h: ['a', 'b', 'c'])", (TypeError, ValueError), "algorithm", "a", "amax|float32|number"),
    (
        "update(HISTORY[:, 0], f32(1), algorithm=lambda h: None)",
        (TypeError, ValueError),
        "algorithm",
        "None|object",
        "amax|float32|number",
    ),
    ("quantize(X, BlockScaling(E5M2)).swizzled()", ValueError, "block scaling", "", "block_scales_as_mxfp8"),
]


@pytest.mark.parametrize(("call", "error", "argument", "value", "rule"), CASES, ids=[c[0] for c in CASES])
def test_error_names_argument_value_and_rule(call, error, argument, value, rule):
    with pytest.raises(error) as caught:
        eval(call, SCOPE)
    message = str(caught.value)
    for pattern in (rf"\b(?:{argument})\b", value, rule):
        assert re.search(pattern, message, re.DOTALL), f"{pattern!r} not in {message!r}"


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
    for block_dim in (1, 2):
        assert same_setting(refops.BlockScaling(E4M3, kind(block_dim)), refops.BlockScaling(E4M3, block_dim))


@pytest.mark.parametrize("kind", [np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
def test_numpy_integers_as_e4m3_max(kind):
    for four_over_six, e4m3_max in ((None, 448), ("mae", 448), ("mse", 256)):
        assert same_setting(
            refops.NVFP4Scaling(four_over_six=four_over_six, e4m3_max=kind(e4m3_max)),
            refops.NVFP4Scaling(four_over_six=four_over_six, e4m3_max=e4m3_max),
        )


def test_numpy_strings_are_names():
    """A name taken from an array of strings."""
    name = np.str_
    for rounding in ("up", "floor", "even", "ceil_ocp"):
        plain = refops.MXFP8Scaling(E4M3, scale_rounding=rounding)
        assert same_setting(refops.MXFP8Scaling(E4M3, scale_rounding=name(rounding)), plain)
    plain = refops.NVFP4Scaling(four_over_six="mae")
    assert same_setting(refops.NVFP4Scaling(four_over_six=name("mae")), plain)
    assert np.array_equal(refops.encode(X, E4M3, rounding=name("up")), refops.encode(X, E4M3, rounding="up"))
    assert np.array_equal(update(algorithm=name("most_recent"))[1], update(algorithm="most_recent")[1])
    assert np.array_equal(refops.activation(name("gelu"), X), refops.activation("gelu", X))
    assert refops.scaled_activation(name("srelu"), X, np.ones(32, np.float32)).shape == X.shape


def same_setting(a, b):
    """Equal, of one hash, quantizing alike, and holding values of the same types."""
    fields = [(vars(a)[field], vars(b)[field]) for field in vars(b)]
    results = [refops.quantize(X, scaling) for scaling in (a, b)]
    return (
        a == b
        and hash(a) == hash(b)
        and repr(a) == repr(b)
        and all(type(x) is type(y) for x, y in fields)
        and all(
            np.array_equal(*(getattr(q, array) for q in results)) for array in ("rowwise_data", "rowwise_scale_inv")
        )
    )


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, int, np.int32])
def test_numpy_numbers_are_numbers(kind):
    assert refops.DelayedScaling(E4M3, kind(2)) == refops.DelayedScaling(E4M3, 2.0)
    out = refops.activation("clamped_swiglu", X, limit=kind(3), alpha=kind(2), glu_linear_offset=kind(1))
    assert np.array_equal(out, refops.activation("clamped_swiglu", X, limit=3.0, alpha=2.0, glu_linear_offset=1.0))


@pytest.mark.parametrize(
    "make",
    [
        lambda v: refops.DelayedScaling(E4M3, v),
        lambda v: refops.CurrentScaling(E4M3, amax_epsilon=v),
        lambda v: refops.BlockScaling(E4M3, amax_epsilon=v),
    ],
    ids=["scale", "current amax_epsilon", "block amax_epsilon"],
)
@pytest.mark.parametrize(
    "kind", [np.float32, np.float64, lambda v: np.array([v], np.float32)], ids=["f32", "f64", "f32[1]"]
)
def test_numbers_that_are_one_float32_make_equal_settings(make, kind):
    """0.1 is another number in float64 and in float32, but the same setting."""
    assert same_setting(make(kind(0.1)), make(0.1))
    assert make(0.1) != make(np.nextafter(np.float32(0.1), np.float32(1)))
    assert len({make(0.1), make(kind(0.1)), make(np.float32(0.1))}) == 1


class RaisesInArray:
    """As a torch tensor that needs a gradient: its conversion raises an error of its own kind."""

    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("no array today")


def test_an_argument_whose_conversion_raises_is_named():
    with pytest.raises(TypeError, match="x must convert to a NumPy array; got RaisesInArray: no array today"):
        refops.quantize(RaisesInArray(), refops.CurrentScaling(E4M3))


class ManyLines:
    """An object that prints over many lines."""

    def __repr__(self):
        return "line\n" * 10_000


@pytest.mark.parametrize(
    "call",
    [
        lambda value: refops.encode(X, value),
        lambda value: refops.quantize(X, value),
        lambda value: refops.activation(value, X),
        lambda value: refops.DelayedScaling(E4M3, value),
        lambda value: refops.NVFP4Scaling(stochastic_rounding=True, random_bits=value),
        lambda value: refops.Quantized(scaling=refops.MXFP8Scaling(E4M3), shape=value, dtype=np.float32),
    ],
)
def test_messages_have_one_line_of_some_length(call):
    with pytest.raises((TypeError, ValueError), match=r"got line line .*ManyLines") as error:
        call(ManyLines())
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


def test_torch_tensors_are_taken_with_their_bits():
    """bfloat16, with a gradient, not contiguous, seen as its negative; codes; one that has no memory is named."""
    torch = pytest.importorskip("torch")
    tensor = torch.linspace(-3, 3, 64 * 96).reshape(96, 64).bfloat16().t()
    expected = tensor.float().numpy().astype(ml_dtypes.bfloat16)
    scaling = refops.MXFP8Scaling(E4M3)
    codes = refops.quantize(expected, scaling).rowwise_data
    negative = torch.complex(torch.zeros(64, 96), -tensor.float()).conj().imag
    for given in (tensor, tensor.clone().requires_grad_(), tensor.float().requires_grad_(), negative):
        assert np.array_equal(refops.quantize(given, scaling).rowwise_data, codes)
    assert np.array_equal(refops.decode(torch.from_numpy(codes), E4M3), refops.decode(codes, E4M3))
    with pytest.raises(TypeError, match="x must convert to a NumPy array; got Tensor: "):
        refops.quantize(torch.empty(64, 96, device="meta"), scaling)
    with pytest.raises(TypeError, match=r"codes must be a uint8 array; got float8_e4m3fn .*codes.view\(np.uint8\)"):
        refops.decode(torch.from_numpy(codes).view(torch.float8_e4m3fn), E4M3)


def test_an_article_before_the_name_of_a_class():
    consonants = ("Tensor", "Float8Tensor", "SiLU", "uint8", "dict")
    vowels = ("ndarray", "int", "OperationFuser", "MXFP8Tensor", "FP8Tensor", "RMSNorm", "NVFP4Tensor")
    assert [with_article(noun) for noun in consonants] == [f"a {noun}" for noun in consonants]
    assert [with_article(noun) for noun in vowels] == [f"an {noun}" for noun in vowels]
