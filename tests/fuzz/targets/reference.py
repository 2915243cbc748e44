"""Targets of `refops`: every public function, and of `cuda_kernels.host` beside it: the same calls, the same bits."""

import dataclasses

import numpy as np
from arguments_fuzz import (
    FLOAT_DTYPES,
    FORMATS,
    FP8,
    NUMBERS,
    SCALINGS,
    SEEDS,
    activation_name,
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
from harness import require, target
from hypothesis import strategies as st
from judge import (
    agree,
    judged_by_the_oracle,
    require_array,
    require_finite_dequantized,
    require_quantized,
    require_same_quantized,
    same_values,
)

import refops
from arrays import same_bits
from refops.activations import ACTIVATIONS
from refops.products import CARDS, UNITS

ROUNDINGS = ("nearest_even", "nearest_away", "toward_zero", "up", "down", "stochastic", "nearest", "")
HOST = ("cuda_kernels.host",)


def either(case, name, host):
    """A function that calls `refops`, and the compiled kernels where `host`: (reference's result, theirs or None)."""

    def call(*args, **kwargs):
        if not host:
            return case.call(f"refops.{name}", *args, **kwargs), None
        return agree(case, f"refops.{name}", f"cuda_kernels.host.{name}", args, kwargs)

    return call


def both(name, covers, *, cases):
    """Decorator: the function as two targets, of `refops` alone and of both packages."""

    def register(run):
        target(name, [f"refops.{c}" for c in covers], cases=cases)(lambda case: run(case, False))
        target(f"host_{name}", [f"cuda_kernels.host.{c}" for c in covers], cases=cases, seconds=120, needs=HOST)(
            lambda case: run(case, True)
        )
        return run

    return register


# --- settings and formats ---------------------------------------------------------------------------------------------

FIELDS = {
    refops.DelayedScaling: {"fmt": st.sampled_from(FORMATS), "scale": NUMBERS},
    refops.CurrentScaling: {"fmt": st.sampled_from(FORMATS), "power_2_scale": st.booleans(), "amax_epsilon": NUMBERS},
    refops.BlockScaling: {
        "fmt": st.sampled_from(FORMATS),
        "block_dim": st.integers(-1, 3),
        "power_2_scale": st.booleans(),
        "amax_epsilon": NUMBERS,
    },
    refops.MXFP8Scaling: {
        "fmt": st.sampled_from(FORMATS),
        "two_d": st.booleans(),
        "scale_rounding": st.sampled_from(["up", "floor", "even", "ceil_ocp", "UP", "nearest", ""]),
    },
    refops.NVFP4Scaling: {
        "two_d": st.booleans(),
        "rht": st.booleans(),
        "sign_mask": st.integers(-1, 1 << 16),
        "stochastic_rounding": st.booleans(),
        "seed": SEEDS,
        "offset": st.integers(-1, 1 << 64),
        "four_over_six": st.sampled_from([None, "mae", "mse", "max"]),
        "e4m3_max": st.sampled_from([448, 256, 448.0, 0]),
        "row_scaled": st.booleans(),
        "scale_format": st.sampled_from(FORMATS),
        "tensor_level": st.booleans(),
        "fast_error": st.booleans(),
    },
    refops.MXFP4Scaling: {
        "two_d": st.booleans(),
        "scale_rounding": st.sampled_from(["up", "floor", "even", "ceil_ocp", "nearest"]),
        "block_size": st.sampled_from([32, 16, 64, 0]),
    },
    refops.E8M0BlockScaling: {
        "fmt": st.sampled_from(FORMATS),
        "block_dim": st.integers(-1, 3),
        "amax_epsilon": NUMBERS,
        "block_size": st.sampled_from([128, 64, 32]),
    },
    refops.MXINT8Scaling: {"scale_rounding": st.sampled_from(["floor", "up", "even", "nearest"])},
    refops.Block64Scaling: {
        "fmt": st.sampled_from(FORMATS),
        "power_2_scale": st.booleans(),
        "amax_epsilon": NUMBERS,
    },
}


@target("settings", [f"refops.{cls.__name__}" for cls in FIELDS], cases=600)
def settings(case):
    """Settings are refused, or equal and hash as their own copy, print and can be replaced."""
    cls = case.choose(tuple(FIELDS))
    fields = {name: case.draw(strategy) for name, strategy in FIELDS[cls].items() if name == "fmt" or case.chance(0.5)}
    if cls is refops.NVFP4Scaling and case.chance(0.2):
        fields["random_bits"] = case.choose(
            [np.zeros((16, 16), np.uint8), (np.zeros((16, 16), np.uint8),) * 2, wrong(case)]
        )
    fields = spoiled(case, fields, 0.3)
    made = case.call(f"refops.{cls.__name__}", **fields)
    again = dataclasses.replace(made)
    require(made == again and hash(made) == hash(again) and repr(made) == repr(again), "a copy differs", made)
    for name in fields:
        value = getattr(made, name)
        require(
            name == "random_bits" or type(value) in (bool, int, float, str, type(None), refops.FloatFormat),
            "not plain",
            value,
        )


@target("float_format", ["refops.FloatFormat"], cases=300)
def float_format(case):
    """A format is refused, or its values ascend, and each of them encodes to a code of that value."""
    exponent_bits, mantissa_bits = case.below(9), case.below(7)
    fields = {
        "exponent_bits": exponent_bits,
        "mantissa_bits": mantissa_bits,
        "bias": case.choose([0, 1, 3, 7, 15, 16, 127, 200, -3]),
        "largest_code": max(0, (1 << (exponent_bits + mantissa_bits)) - 1 - case.below(3)),
        "signed": case.chance(0.8),
        "has_subnormals": case.chance(0.8),
    }
    if case.chance(0.2):
        fields["largest_code"] = case.choose([-1, 0, 1, 300, 1 << 20])
    if case.chance(0.2):
        fields["infinity_code"] = case.below(300)
    if case.chance(0.2):
        fields["nan_code"] = case.below(300)
    fmt = case.call("refops.FloatFormat", "fuzz", **spoiled(case, fields, 0.15))
    require((np.diff(fmt.grid) > 0).all(), "the grid does not ascend", fmt.grid)
    codes = np.arange(fmt.largest_code + 1, dtype=np.uint8)
    values = refops.decode(codes, fmt)
    require(np.array_equal(refops.encode(values, fmt), codes), "codes do not come back", dataclasses.asdict(fmt))


@target("integer_format", ["refops.IntegerFormat", "refops.ElementFormat"], cases=200)
def integer_format(case):
    """A format of integers is refused, or every code but the least, which no cast gives, comes back."""
    fields = {"bits": case.below(11), "fraction_bits": case.below(10)}
    fmt = case.call("refops.IntegerFormat", "fuzz", **spoiled(case, fields, 0.15))
    require(isinstance(fmt, refops.ElementFormat), "no element format", fmt)
    codes = np.array([code for code in range(1 << fmt.bits) if code != fmt.largest_code + 1], np.uint8)
    values = refops.decode(codes, fmt)
    require(np.array_equal(refops.encode(values, fmt), codes), "codes do not come back", dataclasses.asdict(fmt))


@both("encode", ["encode"], cases=400)
def encode(case, host):
    """Codes fit the format and decode to the nearest value; layout of memory changes nothing."""
    fmt = case.choose(FORMATS)
    x = tensor(case, low=0)
    options = {"fmt": fmt, "rounding": case.choose(ROUNDINGS), "saturate": case.chance(0.6)}
    if options["rounding"] == "stochastic" or case.chance(0.1):
        bits = case.rng.integers(0, 256, x.shape if case.chance(0.9) else (3,), np.uint8)
        options["random_bits"] = laid_out(case, bits)
    arguments = spoiled(case, {"x": x, **options})
    codes, other = either(case, "encode", host)(arguments.pop("x"), arguments.pop("fmt"), **arguments)
    require(other is None or same_bits(codes, other), "host encodes otherwise", options)
    require(codes.dtype == np.uint8 and (not codes.size or int(codes.max()) < 1 << fmt.bits), "codes beyond the format")
    if arguments.keys() <= options.keys() and codes.shape == x.shape:
        require(
            same_bits(
                codes,
                refops.encode(
                    plain(x), fmt, **{k: plain(v) if isinstance(v, np.ndarray) else v for k, v in arguments.items()}
                ),
            ),
            "the layout of x counts",
        )


@both("decode", ["decode"], cases=250)
def decode(case, host):
    """Values are those of the format's table."""
    fmt = case.choose(FORMATS)
    codes = laid_out(case, case.rng.integers(0, 1 << (8 if case.chance(0.2) else fmt.bits), shape(case), np.uint8))
    arguments = spoiled(case, {"codes": codes, "fmt": fmt})
    values, other = either(case, "decode", host)(arguments["codes"], arguments["fmt"])
    require(other is None or same_bits(values, other), "host decodes otherwise")
    if arguments["codes"] is codes and arguments["fmt"] is fmt:
        require_array(values, codes.shape, np.float32, "values")
        require(same_bits(values, fmt.values[plain(codes)]), "values are not those of the table")


@target("fp4_packing", ["refops.pack_fp4", "refops.unpack_fp4"], cases=250)
def fp4_packing(case):
    """Unpacking undoes packing."""
    codes = laid_out(case, case.rng.integers(0, 17 if case.chance(0.2) else 16, shape(case, fits=2), np.uint8))
    (given,) = spoiled(case, {"codes": codes}).values()
    unpacked = case.call("refops.unpack_fp4", given)
    packed = case.call("refops.pack_fp4", given)
    back = case.call("refops.unpack_fp4", packed)
    require(same_bits(back, np.asarray(given)), "packing loses codes")
    require(same_bits(case.call("refops.pack_fp4", unpacked), np.asarray(given)), "unpacking loses codes")


@target(
    "swizzling",
    ["refops.swizzle", "refops.unswizzle", "cuda_kernels.host.swizzle", "cuda_kernels.host.unswizzle"],
    cases=200,
    needs=HOST,
)
def swizzling(case):
    """Bytes move to the place that the layout's formula gives them, and back."""
    sizes = (128 * case.below(4), 4 * case.below(5)) if case.chance(0.7) else shape(case)
    scales = laid_out(case, case.rng.integers(0, 256, sizes, np.uint8))
    (given,) = spoiled(case, {"scales": scales}).values()
    package = case.choose(["refops", "cuda_kernels.host"])
    moved = case.call(f"{package}.swizzle", given)
    back = case.call(f"{package}.unswizzle", moved)
    i, j = np.indices(given.shape)
    place = (i // 128 * (given.shape[1] // 4) + j // 4) * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4
    require(np.array_equal(moved.reshape(-1)[place], given), "a scale lies at another place than the formula's")
    require(same_bits(back, np.asarray(given)), "unswizzle does not undo swizzle")
    require(
        same_bits(case.call(f"{package}.swizzle", case.call(f"{package}.unswizzle", given)), np.asarray(given)),
        "nor the reverse",
    )


# --- products of tensor cores -----------------------------------------------------------------------------------------

OPERAND_FORMATS = (*FORMATS, *(dtype for dtype in FLOAT_DTYPES if dtype.itemsize == 2))


def values_of(case, fmt, sizes):
    """Values of a format, special ones too; now and then some that it does not have."""
    if isinstance(fmt, refops.ElementFormat):
        values = fmt.values[case.rng.integers(0, 1 << fmt.bits, sizes)]
    else:
        values = contents(case, sizes, fmt).astype(np.float32)
    if case.chance(0.05):
        values.flat[:1] = 1.1
    return laid_out(case, values)


@target(
    "tensor_core_sums",
    [f"refops.products.{name}" for name in ("unit", "matmul", "check_operands", "smallest_exponent")],
    cases=300,
)
def tensor_core_sums(case):
    """Sums are as documented, and exchanging the operands transposes them."""
    known = case.choose(UNITS)
    fmt = case.choose(known.formats)
    settings = {"card": known.card, "a_format": fmt, "b_format": fmt, "scale_format": known.scale_format}
    settings["accumulator"] = known.accumulator.dtype
    other = {
        "card": CARDS,
        "b_format": OPERAND_FORMATS,
        "scale_format": (refops.E8M0, refops.E4M3, refops.UE5M3, None),
        "accumulator": (np.float16, "float32", np.float64),
    }
    for name, choices in other.items():
        if case.chance(0.15):
            settings[name] = case.choose(choices)
    formats = settings["a_format"], settings["b_format"]
    arguments = spoiled(case, settings, 0.1)
    unit = case.call("refops.products.unit", arguments.pop("card"), **arguments)
    m, n, k = (case.choose([0, 1, 3, 17, 65]) for _ in range(3))
    operands = {"a": values_of(case, formats[0], (m, k)), "b": values_of(case, formats[1], (n, k))}
    options = {"a_format": formats[0], "b_format": formats[1]}
    block = case.choose(unit.scale_blocks) if unit.scale_blocks else None
    if case.chance(0.1 if unit.scale_blocks else 0.4):
        options["promotion"] = block = case.choose([32, 64, 64, 128, 48, 0, 1 << 70])
    if block and (unit.scale_blocks or case.chance(0.5)):
        fmt = unit.scale_format or refops.E4M3
        for name, rows in (("a_scale", m), ("b_scale", n)):
            options[name] = np.abs(values_of(case, fmt, (rows, -(-k // block))))
    arguments = spoiled(case, {**operands, "unit": unit, **options})
    sums = case.call("refops.products.matmul", **arguments)
    if any(arguments[name] is not value for name, value in {**operands, "unit": unit, **options}.items()):
        return
    require_array(sums, (m, n), np.float32, "sums")
    other_side = {"a_format": "b_format", "b_format": "a_format", "a_scale": "b_scale", "b_scale": "a_scale"}
    exchanged = {other_side.get(name, name): value for name, value in options.items()}
    other = refops.products.matmul(operands["b"], operands["a"], unit, **exchanged)
    require(same_bits(sums, np.ascontiguousarray(other.T)), "exchanging the operands does not transpose the sums")
    every = {"a_scale": None, "b_scale": None, "promotion": None} | options
    checked = case.call("refops.products.check_operands", **operands, unit=unit, **every)
    require(checked.unit is unit and checked.a.shape == (m, k), "check_operands returns something else")
    least = 2.0 ** case.call("refops.products.smallest_exponent", wrong(case) if case.chance(0.1) else formats[0])
    require(least <= 1, "a smallest exponent is positive")


@target("products_on_cards", ["refops.gemm", "refops.products.product_of"], cases=200)
def products_on_cards(case):
    """A product is as documented, and exchanging the operands transposes it."""
    scalings = [case.draw(SCALINGS)] * 2 if case.chance(0.8) else [case.draw(SCALINGS) for _ in range(2)]
    fits = max(fits_of(scaling) or 1 for scaling in scalings)
    m, n, k = (fits * case.choose([1, 1, 2, 3]) for _ in range(3))
    dtype = case.choose(FLOAT_DTYPES)
    x, w = (contents(case, (rows, k), dtype) for rows in (m, n))
    plainly = case.chance(0.2)
    a, b = (
        tensor if plainly else refops.quantize(tensor, scaling)
        for tensor, scaling in zip((w, x), scalings, strict=True)
    )
    card = case.choose([*CARDS, "blackwell", "blackwell"])
    options = {"out_dtype": np.float32}
    if case.chance(0.3):
        options["layout"] = case.choose(["TN", "TN", "NN", "NT", "tn"])
    if case.chance(0.3):
        options["use_split_accumulator"] = case.chance(0.7)
    if case.chance(0.2):
        options["split_interval"] = case.choose([32, 128, 5, -1])
    if case.chance(0.1):
        options["accumulator"] = np.float16
    arguments = spoiled(case, {"a": a, "b": b, "card": card, **options})
    result = case.call("refops.gemm", **arguments)
    if any(arguments[name] is not value for name, value in {"a": a, "b": b, "card": card, **options}.items()):
        return
    if options.get("layout", "TN") == "TN":
        require_array(result, (m, n), np.float32, "the product")
        other = refops.gemm(b, a, card, **options)
        require(same_values(result, np.ascontiguousarray(other.T)), "exchanging the operands does not transpose it")
    kinds = [tensor.dtype if plainly else scaling for tensor, scaling in zip((w, x), scalings, strict=True)]
    case.call("refops.products.product_of", card, *(wrong(case) if case.chance(0.1) else kind for kind in kinds))


# --- activations ------------------------------------------------------------------------------------------------------


def output_shape(name, x):
    """Shape of an activation's output."""
    return (*x.shape[:-1], x.shape[-1] // 2) if ACTIVATIONS[name].gated else x.shape


@both("activation", ["activation"], cases=400)
def activation(case, host):
    """dtype and shape as documented; the layout of memory changes nothing; host lies inside of the oracle."""
    name, x = activation_name(case), tensor(case, fits=2)
    options = parameters(case, name)
    if case.chance(0.3):
        options["out_dtype"] = case.choose([*FLOAT_DTYPES, "bfloat16", "float32", "f2"])
    arguments = spoiled(case, {"name": name, "x": x, **options})
    given, tensor_given = arguments.pop("name"), arguments.pop("x")
    y, other = either(case, "activation", host)(given, tensor_given, **arguments)
    if given is not name or tensor_given is not x:
        return
    out_dtype = np.dtype(arguments.get("out_dtype") or x.dtype)
    require_array(y, output_shape(name, x), out_dtype, "y")
    require(same_bits(y, refops.activation(name, plain(x), **arguments)), "the layout of x counts")
    if other is not None:
        require_array(other, y.shape, y.dtype, "host's y")
        params = {k: v for k, v in arguments.items() if k != "out_dtype"}
        judged_by_the_oracle(name, plain(x), other, params=params)


@both("activation_grad", ["activation_grad"], cases=400)
def activation_grad(case, host):
    """As `activation`, with dbias."""
    name, x = activation_name(case), tensor(case, fits=2)
    sizes = output_shape(name, x) if case.chance(0.9) else shape(case)
    dy = tensor(case, sizes, x.dtype if case.chance(0.95) else None)
    options = parameters(case, name)
    if case.chance(0.5):
        options["dbias"] = case.chance(0.7)
    if case.chance(0.2):
        options["out_dtype"] = case.choose(FLOAT_DTYPES)
    arguments = spoiled(case, {"name": name, "dy": dy, "x": x, **options})
    given = [arguments.pop(key) for key in ("name", "dy", "x")]
    results, other = either(case, "activation_grad", host)(*given, **arguments)
    if given[0] is not name or given[1] is not dy or given[2] is not x:
        return
    dbias = bool(arguments.get("dbias", False))
    dx = results[0] if dbias else results
    require_array(dx, x.shape, arguments.get("out_dtype") or x.dtype, "dx")
    if dbias:
        require_array(results[1], x.shape[-1:], x.dtype, "dbias")
    again = refops.activation_grad(name, plain(dy), plain(x), **arguments)
    require(same_bits(dx, again[0] if dbias else again), "the layout counts")
    if other is not None and "out_dtype" not in arguments:
        outputs = {"dx": other[0], "dbias": other[1]} if dbias else {"dx": other}
        params = {k: v for k, v in arguments.items() if k not in ("out_dtype", "dbias")}
        judged_by_the_oracle(f"d{name}", {"dy": plain(dy), "x": plain(x)}, outputs, params=params)


@both("scaled_activation", ["scaled_activation", "scaled_activation_grad"], cases=350)
def scaled_activation(case, host):
    """Activations with a scale for each row, and both gradients."""
    name = case.choose(refops.SCALED_ACTIVATIONS) if case.chance(0.95) else activation_name(case)
    x = tensor(case, fits=case.choose([2, 64]))
    rows = int(np.prod(x.shape[:-1]))
    row_scales = tensor(case, case.choose([(rows,), (rows, 1), x.shape[:-1] or (1,), (rows + 1,)]))
    options = parameters(case, name)
    if case.chance(0.4):
        options["glu_interleave_size"] = case.choose([0, 32, 64, 33, -32])
    arguments = spoiled(case, {"name": name, "x": x, "row_scales": row_scales, **options})
    given = [arguments.pop(key) for key in ("name", "x", "row_scales")]
    y, other = either(case, "scaled_activation", host)(*given, **arguments)
    if given[1] is not x or given[0] is not name or given[2] is not row_scales:
        return
    require_array(y, output_shape(name, x), x.dtype, "y")
    if other is not None:
        inputs = {"x": plain(x), "row_scales": plain(row_scales)}
        judged_by_the_oracle(f"scaled_{name}", inputs, other, params=arguments)
    dy = tensor(case, y.shape)
    (dx, drow_scales), other = either(case, "scaled_activation_grad", host)(name, dy, x, row_scales, **arguments)
    require_array(dx, x.shape, x.dtype, "dx")
    require_array(drow_scales, row_scales.shape, row_scales.dtype, "drow_scales")
    if other is not None:
        inputs = {"dy": plain(dy), "x": plain(x), "row_scales": plain(row_scales)}
        judged_by_the_oracle(f"scaled_d{name}", inputs, {"dx": other[0], "drow_scales": other[1]}, params=arguments)


# --- quantization -----------------------------------------------------------------------------------------------------


def made(case, x_shape, x_dtype, scaling, result, other, arguments, op, inputs, params=None):
    """Judge what a quantizing call returned, on one or both packages."""
    dbias = arguments.get("dbias", False)
    q, sums = result if dbias else (result, None)
    rowwise, columnwise = arguments.get("rowwise", True), arguments.get("columnwise", False)
    require_quantized(q, x_shape, x_dtype, scaling, rowwise=rowwise, columnwise=columnwise)
    refops.dequantize(q)
    if dbias:
        require_array(sums, x_shape[-1:], x_dtype, "dbias")
    if other is None:
        return q
    theirs, their_sums = other if dbias else (other, None)
    require_quantized(theirs, x_shape, x_dtype, scaling, rowwise=rowwise, columnwise=columnwise)
    if op == "quantize" and not getattr(scaling, "rht", False):
        require_same_quantized(q, theirs)
        require(sums is None or same_values(sums, their_sums), "dbias differs")
    outputs = {name: getattr(theirs, name) for name in refops.oracle.operation.QUANTIZED_ARRAYS}
    outputs = {name: array for name, array in outputs.items() if array is not None}
    if dbias:
        outputs["dbias"] = their_sums
    judged_by_the_oracle(op, inputs, outputs, scaling=scaling, params=params)
    return q


def call_flags(case, dbias=True):
    """Flags of a quantizing call."""
    flags = dict(directions(case))
    if dbias and case.chance(0.3):
        flags["dbias"] = True
    return flags


@both("quantize", ["quantize", "dequantize"], cases=500)
def quantize(case, host):
    """Layout as documented, host equal to the bit, back to finite values; memory layout changes nothing."""
    scaling = case.draw(SCALINGS)
    x = tensor(case, fits=fits_of(scaling))
    flags = call_flags(case)
    arguments = spoiled(case, {"x": x, "scaling": scaling, **flags})
    given, given_scaling = arguments.pop("x"), arguments.pop("scaling")
    result, other = either(case, "quantize", host)(given, given_scaling, **arguments)
    if given is not x or given_scaling is not scaling:
        return
    q = made(case, x.shape, x.dtype, scaling, result, other, arguments, "quantize", plain(x))
    require_finite_dequantized(q, x)
    again = refops.quantize(plain(x), scaling, **arguments)
    require_same_quantized(q, again[0] if arguments.get("dbias") else again)
    dtype = case.choose([*FLOAT_DTYPES, "float32", np.float64, wrong(case)])
    (values, theirs) = either(case, "dequantize", host)(q, dtype=dtype)
    require_array(values, x.shape, np.dtype(dtype), "dequantized values")
    transformed = q.rowwise_data is None and getattr(scaling, "rht", False)
    require(theirs is None or transformed or same_values(values, theirs), "host dequantizes otherwise")


@both("activation_quantize", ["activation_quantize"], cases=350)
def activation_quantize(case, host):
    """An activation and a cast."""
    name, scaling = activation_name(case), case.draw(SCALINGS)
    x = tensor(case, fits=2 * (fits_of(scaling) or 1))
    flags, params = call_flags(case, dbias=False), parameters(case, name)
    arguments = spoiled(case, {"name": name, "x": x, "scaling": scaling, **flags, **params})
    given = [arguments.pop(key) for key in ("name", "x", "scaling")]
    result, other = either(case, "activation_quantize", host)(*given, **arguments)
    if given[0] is name and given[1] is x and given[2] is scaling:
        params = {k: v for k, v in arguments.items() if k in params}
        made(case, output_shape(name, x), x.dtype, scaling, result, other, arguments, name, plain(x), params)


@both("activation_grad_quantize", ["activation_grad_quantize"], cases=350)
def activation_grad_quantize(case, host):
    """A gradient and a cast."""
    name, scaling = activation_name(case), case.draw(SCALINGS)
    x = tensor(case, fits=2 * (fits_of(scaling) or 1))
    dy = tensor(case, output_shape(name, x), x.dtype)
    flags, params = call_flags(case), parameters(case, name)
    arguments = spoiled(case, {"name": name, "dy": dy, "x": x, "scaling": scaling, **flags, **params})
    given = [arguments.pop(key) for key in ("name", "dy", "x", "scaling")]
    result, other = either(case, "activation_grad_quantize", host)(*given, **arguments)
    if given[0] is name and given[1] is dy and given[2] is x and given[3] is scaling:
        inputs = {"dy": plain(dy), "x": plain(x)}
        params = {k: v for k, v in arguments.items() if k in params}
        made(case, x.shape, x.dtype, scaling, result, other, arguments, f"d{name}", inputs, params)


@target("quantized", ["refops.Quantized", "refops.block_scales_as_mxfp8"], cases=400)
def quantized(case):
    """A `Quantized` of arrays that a kernel might have written is refused, or dequantizes; GEMM orders come back."""
    scaling = case.draw(SCALINGS)
    sizes = shape(case, low=1, fits=fits_of(scaling))
    fields = {}
    for name, (stored, dtype) in refops.quantization.result.stored_layout(scaling, sizes).items():
        if case.chance(0.75):
            array = (
                contents(case, stored, dtype) if dtype == np.float32 else case.rng.integers(0, 256, stored, np.uint8)
            )
            fields[name] = laid_out(case, array)
    fields |= {"scaling": scaling, "shape": sizes, "dtype": case.choose(FLOAT_DTYPES)}
    if case.chance(0.1):
        fields["with_gemm_swizzled_scales"] = True
    q = case.call("refops.Quantized", **spoiled(case, fields, 0.3))
    repr(q)
    values = case.call("refops.dequantize", q)
    require_array(values, q.shape, np.float32, "values")
    if isinstance(scaling, refops.BlockScaling):
        scales = case.call("refops.block_scales_as_mxfp8", q)
        there = [q.rowwise_data is not None, q.columnwise_data is not None]
        require([s is not None for s in scales] == there, "scales of a direction that is not there", scales)
    elif not q.with_gemm_swizzled_scales:
        require_same_quantized(q, q.swizzled().unswizzled())


@both("update_delayed_scale", ["update_delayed_scale"], cases=350)
def update_delayed_scale(case, host):
    """New history and scale like the old ones; scales positive and finite where the old ones were."""
    history = case.choose([(1,), (16,), (16, 3), (4, 1), (0,), (0, 2), (2, 3, 4), ()])
    history = contents(case, history, np.float32)
    if case.chance(0.8):
        history = np.abs(history)
    scale = contents(case, case.choose([history.shape[1:], history.shape[1:], (1,), (), (5,)]), np.float32)
    if case.chance(0.8):
        scale = np.abs(scale) + np.float32(0.5)
    options = {}
    for name, strategy in (
        ("margin", st.one_of(st.integers(-200, 200), NUMBERS)),
        ("algorithm", st.sampled_from(["max", "most_recent", "mean"])),
        ("keep_unused", st.booleans()),
    ):
        if case.chance(0.4):
            options[name] = case.draw(strategy)
    arguments = {"amax_history": laid_out(case, history), "scale": laid_out(case, scale), "fmt": case.choose(FP8)}
    arguments = spoiled(case, {**arguments, **options})
    given = [arguments.pop(key) for key in ("amax_history", "scale", "fmt")]
    (new_history, new_scale), other = either(case, "update_delayed_scale", host)(*given, **arguments)
    require_array(new_history, np.shape(given[0]), np.float32, "history")
    require(new_scale.dtype == np.float32 and new_scale.shape == np.shape(given[1]), "another scale", new_scale)
    if other is not None:
        require(same_values(new_history, other[0]) and same_values(new_scale, other[1]), "host updates otherwise")
    old = np.asarray(given[1])
    if (old > 0).all() and np.isfinite(old).all():
        require((new_scale > 0).all() and np.isfinite(new_scale).all(), "a scale that cannot be used", new_scale)


@both("hadamard_transform", ["hadamard_transform"], cases=250)
def hadamard_transform(case, host):
    """Shape and dtype stay; the inverse gives back what sums exactly."""
    x = tensor(case, fits=16)
    options = {}
    if case.chance(0.5):
        options["sign_mask"] = case.below(70000, -2)
    if case.chance(0.3):
        options["inverse"] = case.chance(0.5)
    arguments = spoiled(case, {"x": x, **options})
    given = arguments.pop("x")
    y, other = either(case, "hadamard_transform", host)(given, **arguments)
    if given is x:
        require(y.shape == x.shape, "another shape", y.shape)
        require(
            other is None or (other.shape, other.dtype) == (y.shape, y.dtype), "host differs in shape or dtype", other
        )


@target("host_amax", ["cuda_kernels.host.amax"], cases=250, needs=HOST)
def host_amax(case):
    """The largest magnitude, NaN ignored."""
    x = tensor(case)
    (given,) = spoiled(case, {"x": x}).values()
    result = case.call("cuda_kernels.host.amax", given)
    if given is x:
        wide = np.abs(plain(x).astype(np.float32))
        expected = np.max(np.where(np.isnan(wide), np.float32(0), wide), initial=np.float32(0))
        require(same_bits(np.asarray(result).reshape(()), np.float32(expected)), "another amax", result, expected)


@target(
    "host_threads", ["cuda_kernels.host.get_num_threads", "cuda_kernels.host.set_num_threads"], cases=100, needs=HOST
)
def host_threads(case):
    """The number of threads is refused, or what `get_num_threads` returns; results do not depend on it."""
    before = case.call("cuda_kernels.host.get_num_threads")
    n = case.choose([1, 2, before, 0, -1, 10**6, True, 1.0, "2", None])
    x = tensor(case, (257, 64))
    expected = case.call("cuda_kernels.host.quantize", x, refops.MXFP8Scaling(refops.E4M3))
    try:
        case.call("cuda_kernels.host.set_num_threads", n)
        require(case.call("cuda_kernels.host.get_num_threads") == n, "another number", n)
        require_same_quantized(expected, case.call("cuda_kernels.host.quantize", x, refops.MXFP8Scaling(refops.E4M3)))
    finally:
        case.call("cuda_kernels.host.set_num_threads", before)
