"""Conventions of what lies between load and store: how bits are read, which grid and which limit a cast has."""

import numpy as np

from refops.arguments import BFLOAT16
from refops.formats import E8M0, FORMATS, encode_tile
from refops.oracle.conventions.casts import DTYPES
from refops.oracle.conventions.fits import simplest_number
from refops.oracle.conventions.registry import computing
from refops.oracle.conventions.scales import (
    ELEMENT_MAXIMA,
    require_own_amax,
    require_powers_of_two,
    require_scaling,
    tensor_limit,
)
from refops.scalings.declaration import FLT_MAX

F = np.float32
#: Relative half steps of the dtypes that values are stored in.
HALF_STEP = {np.dtype(F): 2.0**-24, np.dtype(np.float16): 2.0**-11, BFLOAT16: 2.0**-8}


# --- how codes are read ---------------------------------------------------------------------------


def _wrong_entries_of_table(replay):
    """[(codes, value)]: the value that a dequantized dump has for one code, or for it and its negative."""
    replay.require(replay.dequantizes and not replay.hadamard and replay.setting.probe is not None)
    region, fmt = replay.setting.probe, replay.fmt
    written = replay.setting.outputs["y"].reshape(replay.shape)[region.rows, region.columns]
    own = replay.run(region, ("y",))["y"]
    codes = replay.codes(region)
    factor = replay.block_factor(replay.spread(replay.whole_scales(), region), region)
    wrong = (written != own) & ~(np.isnan(written) & np.isnan(own))
    replay.require(wrong.any())
    magnitudes, counts = np.unique(fmt.magnitude_code(codes[wrong]), return_counts=True)
    magnitude = magnitudes[np.argmax(counts)]
    replay.require(counts.max() >= 0.75 * counts.sum())
    chosen = wrong & (fmt.magnitude_code(codes) == magnitude) & np.isfinite(written) & (factor > 0)
    replay.require(chosen.any())
    with np.errstate(all="ignore"):
        ratio = written[chosen].astype(np.float64) / np.broadcast_to(factor, codes.shape)[chosen].astype(np.float64)
        ratio = np.abs(ratio) if fmt.values[magnitude] else ratio
    step = HALF_STEP[written.dtype]
    value = simplest_number(np.max(ratio * (1 - step)), np.min(ratio * (1 + step)))
    replay.require(value is not None and F(value) != fmt.values[magnitude])
    return [(tuple(int(code) for code in np.unique(codes[chosen])), value)]


@computing(
    "table-entry-wrong",
    "The table of {fmt}'s values has {found:g} for code {code:#x}, which is {own:g}.",
    stage="table",
    choices=_wrong_entries_of_table,
    alone=True,
)
def table_entry_wrong(replay, choice):
    codes, value = choice
    fmt = replay.fmt
    table = fmt.values.copy()
    for code in codes:
        table[code] = np.copysign(F(value), fmt.values[code]) if fmt.values[code] else F(value)
    replay.facts["fmt"], replay.facts["code"], replay.facts["found"] = fmt, codes[0], float(table[codes[0]])
    replay.facts["own"] = float(fmt.values[codes[0]])
    replay.decode = lambda read: table[read]


#: The quantiles of a normal distribution that QLoRA's NF4 stands for (Dettmers et al., 2023).
NF4 = [-1, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0]
NF4 += [0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1]


def _other_tables(replay):
    replay.require(replay.dequantizes and "exponent" in replay.fmt.fields)
    tables = ["integers with a sign bit", "integers in two's complement"]
    if replay.fmt.bits == 4:
        tables += ["halves of integers with a sign bit", "E3M0, powers of two", "NF4, quantiles of a normal"]
    return tables


@computing(
    "other-table",
    "The codes are read as {what}, not as {fmt}.",
    stage="table",
    choices=_other_tables,
    alone=True,
)
def other_table(replay, choice):
    fmt = replay.fmt
    replay.facts["what"], replay.facts["fmt"] = choice, fmt
    codes = np.arange(len(fmt.values))
    half = len(codes) // 2
    magnitudes, signs = codes % half, np.where(codes < half, 1, -1)
    table = {
        "integers with a sign bit": signs * magnitudes,
        "integers in two's complement": np.where(codes < half, codes, codes - len(codes)),
        "halves of integers with a sign bit": signs * magnitudes / 2,
        "E3M0, powers of two": signs * np.where(magnitudes == 0, 0, 2.0 ** (magnitudes.astype(float) - 3)),
        "NF4, quantiles of a normal": np.resize(NF4, len(codes)),
    }[choice].astype(F)
    replay.decode = lambda read: table[read]


# --- how inputs are read --------------------------------------------------------------------------


def _inputs_alone_and_together(replay):
    """Sets of inputs of a matrix that may be read wrong: each, and both."""
    replay.require(replay.computes)
    names = tuple(name for name in ("x", "dy") if name in replay.setting.matrices)
    return [(name,) for name in names] + ([names] if len(names) > 1 else [])


def _change_inputs(replay, names, change):
    replay.facts["which"] = f"input{'s' * (len(names) > 1)} {' and '.join(names)}"
    replay.facts["are"] = "are" if len(names) > 1 else "is"
    replay.wrap(
        "load",
        lambda inner, asked, rows, columns: (
            change(inner(asked, rows, columns)) if asked in names else inner(asked, rows, columns)
        ),
    )


@computing(
    "input-bits-of-other-dtype",
    "The bits of the {which}, {own}, are read as {other}.",
    stage="input",
    choices=_inputs_alone_and_together,
    alone=True,
)
def input_bits_of_other_dtype(replay, choice):
    own = np.dtype(replay.dtype)
    replay.require(own != F)
    other = DTYPES["float16"] if own == BFLOAT16 else BFLOAT16
    replay.facts["own"], replay.facts["other"] = own, other
    _change_inputs(replay, choice, lambda values: values.astype(own).view(other).astype(F))


@computing(
    "output-bits-of-other-dtype",
    "The values are written as bits of {other}, where {own} was asked for.",
    stage="cast",
    alone=True,
)
def output_bits_of_other_dtype(replay):
    replay.require(not replay.updates and (replay.dequantizes or replay.scaling is None) and replay.out_dtype != F)
    other = DTYPES["float16"] if replay.out_dtype == BFLOAT16 else BFLOAT16
    replay.facts["own"], replay.facts["other"] = replay.out_dtype, other
    replay.wrap(
        "to_dtype",
        lambda inner, values, to: inner(values, other).view(to) if to == replay.out_dtype else inner(values, to),
    )


def truncated_bits(values, kept):
    """float32 with all but `kept` of its upper bits cleared."""
    mask = np.uint32((0xFFFFFFFF << (32 - kept)) & 0xFFFFFFFF)
    return (np.ascontiguousarray(values, F).view(np.uint32) & mask).view(F)


def _to_tf32(values):
    """float32 rounded to TF32, ties away from zero as cvt.rna.tf32 does."""
    bits = np.ascontiguousarray(values, F).view(np.uint32)
    return np.where(np.isfinite(values), truncated_bits((bits + np.uint32(0x1000)).view(F), 19), values)


INPUT_PRECISIONS = {
    "rounded to bfloat16": lambda values: values.astype(BFLOAT16).astype(F),
    "truncated to bfloat16": lambda values: truncated_bits(values, 16),
    "rounded to float16": lambda values: values.astype(np.float16).astype(F),
    "rounded to TF32": _to_tf32,
    "truncated to TF32": lambda values: truncated_bits(values, 19),
}


def _other_precisions(replay):
    """(inputs, precision, what the amax is of) that lose bits of the inputs' dtype."""
    names = _inputs_alone_and_together(replay)
    lossless = {BFLOAT16: ("bfloat16", "TF32"), DTYPES["float16"]: ("float16", "TF32")}.get(replay.dtype, ())
    precisions = [p for p in INPUT_PRECISIONS if not p.endswith(lossless or ("-",))]
    amaxes = ["amax too"]
    if replay.scaling is not None and replay.layout.amax is not None and replay.scaling.given is None:
        amaxes.append("cast alone")
    return [
        (chosen, precision, amax) for precision in precisions for amax in amaxes for chosen in names[-1:] + names[:-1]
    ]


@computing(
    "input-of-low-precision",
    "The {which} {are} {how} when loaded{amax}, where all bits of {own} count.",
    stage="input",
    choices=_other_precisions,
    alone=True,
)
def input_of_low_precision(replay, choice):
    names, precision, amax = choice
    replay.facts["how"], replay.facts["own"], replay.facts["amax"] = precision, np.dtype(replay.dtype), ""
    if amax == "cast alone":
        replay.facts["amax"] = " for the cast, though not for the amax"
        replay.tensor_amax = replay.setting.replay().tensor_amax
    _change_inputs(replay, names, INPUT_PRECISIONS[precision])


# --- how elements are cast ------------------------------------------------------------------------


@computing(
    "linear-grid",
    "Scaled magnitudes are rounded on a linear grid: code n stands for {step:.4g} n, where {fmt}'s values are not "
    "evenly spaced.",
    stage="cast",
    choices=("largest code", "integers", "halves"),
    alone=True,
)
def linear_grid(replay, choice):
    require_scaling(replay)
    fmt = replay.fmt
    replay.require(fmt.bits == 4 and "exponent" in fmt.fields and replay.scaling.random is None)
    per_unit = {"largest code": fmt.largest_code / float(fmt.max), "integers": 1.0, "halves": 2.0}[choice]
    replay.facts["step"], replay.facts["fmt"] = 1 / per_unit, fmt

    def encode(inner, values, bits):
        magnitude = np.fmin(np.rint(np.abs(values) * F(per_unit)), fmt.largest_code)
        codes = np.where(np.isnan(values), 0, magnitude).astype(np.uint8)
        return np.where(np.isnan(values), inner(values, bits), fmt.signed_code(codes, np.signbit(values)))

    replay.wrap("encode", encode)


@computing(
    "rounded-to-integers",
    "Scaled values are {how} to integers before the cast to {fmt}.",
    stage="cast",
    choices=("rounded", "truncated"),
    alone=True,
)
def rounded_to_integers(replay, choice):
    require_scaling(replay)
    replay.require("exponent" in replay.fmt.fields)
    replay.facts["how"], replay.facts["fmt"] = choice, replay.fmt
    change = np.rint if choice == "rounded" else np.trunc
    replay.wrap("encode", lambda inner, values, bits: inner(change(values), bits))


@computing(
    "two-casts",
    "The {fmt} codes are made by way of {other}: values are rounded twice.",
    stage="cast",
    choices=[fmt for fmt in FORMATS.values() if fmt.signed],
    alone=True,
)
def two_casts(replay, choice):
    require_scaling(replay)
    replay.require(choice != replay.fmt)
    replay.facts["fmt"], replay.facts["other"] = replay.fmt, choice
    replay.wrap("encode", lambda inner, values, bits: inner(choice.values[encode_tile(values, choice)], bits))


def _lower_limits(replay):
    """Values below the format's largest that a clamp may have: maxima of other formats and integers."""
    require_scaling(replay)
    largest = float(replay.fmt.max)
    limits = [*ELEMENT_MAXIMA, 240.0, 256.0, 127.0, 128.0, float(replay.fmt.grid[-2]), largest / 2]
    return [limit for limit in dict.fromkeys(limits) if limit < largest]


@computing(
    "saturation-limit",
    "The cast saturates at {found:g}, where the scale is right and the largest {fmt} is {own:g}.",
    stage="saturation",
    choices=_lower_limits,
    alone=True,
)
def saturation_limit(replay, choice):
    replay.facts["found"], replay.facts["own"], replay.facts["fmt"] = choice, float(replay.fmt.max), replay.fmt
    limit = F(choice)
    replay.wrap("encode", lambda inner, values, bits: inner(np.clip(values, -limit, limit), bits))


# --- what elements are multiplied by ------------------------------------------------------------


@computing(
    "reciprocal-rounded",
    "The amax is multiplied by 1/{largest:g} rounded to {dtype}{order}, where TE has float32.",
    stage="scale",
    choices=[(dtype, order) for dtype in DTYPES for order in ("amax first", "constants first")],
    alone=True,
)
def reciprocal_rounded(replay, choice):
    name, order = choice
    require_own_amax(replay)
    largest = replay.facts["largest"] = float(replay.fmt.max)
    reciprocal = F(1 / largest).astype(DTYPES[name]).astype(F)
    replay.facts["dtype"], replay.facts["order"] = name, ""
    if replay.layout.two_level:
        replay.require(replay.rule.choice is None and tensor_limit(replay) > 0)
        replay.facts["order"] = ", then with S_enc" if order == "amax first" else " times S_enc"

        def scale_code(rule, amax, tensor_scale):
            encode = tensor_scale[0]
            scale = (amax * reciprocal) * encode if order == "amax first" else amax * (encode * reciprocal)
            return replay.cast_scale(np.fmin(scale, FLT_MAX).astype(F), replay.layout.scale_format, "nearest_even")

        replay.scale_code = scale_code
        return
    replay.require(order == "amax first")
    if replay.layout.scale_format == E8M0:
        exact = F(1) / F(largest)
        replay.wrap(
            "scale_code",
            lambda inner, rule, amax, tensor_scale: inner(rule, amax * F(reciprocal / exact), tensor_scale),
        )
        return
    replay.require(replay.layout.scale_format is None)
    replay.wrap(
        "encode_scale",
        lambda inner, amax: np.where(
            (amax > 0) & np.isfinite(amax), F(1) / (replay.bounded(amax) * reciprocal), inner(amax)
        ).astype(F),
    )


@computing(
    "exponent-wraps",
    "The exponent of a scale wraps around: {what}.",
    stage=lambda choice: "multiplier" if choice == "byte read signed" else "scale",
    choices=("exponent signed", "byte wraps", "byte read signed"),
    alone=True,
)
def exponent_wraps(replay, choice):
    require_powers_of_two(replay)
    replay.require(not replay.numbers.epsilon)
    bias, largest = E8M0.bias, E8M0.largest_code
    replay.facts["what"] = {
        "exponent signed": "it is kept in a signed byte, in which less than -128 is positive, where it should be "
        f"bounded by -{bias}",
        "byte wraps": "a byte below 0 is one from 255 downwards, where it should be bounded by 0",
        "byte read signed": f"for the cast the byte is read as a signed number, or {bias} - byte as an unsigned one: "
        "bytes from 128 on stand for numbers that are far too small",
    }[choice]
    if choice == "byte read signed":
        replay.code_multiplier = lambda code, tensor_scale: np.ldexp(
            F(1), bias - code.astype(np.uint8).view(np.int8).astype(int)
        )
        return

    def scale_code(inner, rule, amax, tensor_scale):
        shift = np.where(amax < 1, 64, -64)
        moved = inner(rule, np.ldexp(amax, shift).astype(F), tensor_scale)  # in the middle of the range
        byte = moved.astype(int) - shift
        wrapped = byte & 0xFF
        if choice == "exponent signed":
            wrapped = np.clip((byte - bias).astype(np.int8).astype(int) + bias, 0, largest)
        usual = (amax == 0) | ~np.isfinite(amax)
        return np.where(usual, inner(rule, amax, tensor_scale), wrapped).astype(np.uint8)

    replay.wrap("scale_code", scale_code)
