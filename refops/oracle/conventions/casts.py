"""Conventions of the cast: rounding, saturation, formats, signs, NaN, random bits; and roundings on the way to it."""

import math

import ml_dtypes
import numpy as np

from refops.arguments import BFLOAT16
from refops.formats import E4M3, E5M2, E8M0, FORMATS, encode_tile
from refops.oracle.conventions.factors import scaled_values
from refops.oracle.conventions.registry import computing
from refops.oracle.conventions.scales import require_scaling, require_two_levels, set_scale_max
from refops.oracle.draws import Ends, SharedDraws, said, shares, spread
from refops.oracle.geometry import Geometry, Region, whole
from refops.oracle.replay import TensorReplay
from refops.quantization.layout import padded_blocks
from refops.quantization.quantize import philox_groups
from refops.rounding import philox
from refops.scalings.declaration import FP8_FORMATS, accepts

F = np.float32
DTYPES = {"float16": np.dtype(np.float16), "bfloat16": BFLOAT16}


# --- roundings on the way -------------------------------------------------------------------------


@computing(
    "product-rounded",
    "The product x * scale is rounded to {dtype} before the cast, where TE casts the float32 product.",
    stage="product-rounding",
)
def product_rounded(replay):
    require_scaling(replay)
    replay.require(replay.dtype != F)
    replay.facts["dtype"] = replay.dtype
    replay.after("multiply", lambda scaled: scaled.astype(replay.dtype).astype(F))


def _double_rounding(replay, name, choice):
    replay.require(not replay.updates)
    dtype = DTYPES[name]
    if choice == "scaled":
        require_scaling(replay)
        replay.after("multiply", lambda scaled: scaled.astype(dtype).astype(F))
        replay.facts["where"] = "The scaled values pass through"
    else:
        quantizes = replay.computes and replay.scaling is not None
        replay.require(not (replay.computes and replay.kind == "quantize" and choice == "result"))
        replay.facts["where"] = "The result of the formula passes through"
        if quantizes:
            replay.require(dtype != replay.dtype)  # that is extra-rounding
            replay.after("compute", lambda values: values.astype(dtype).astype(F))
        else:
            replay.require(dtype != replay.out_dtype)
            replay.wrap("to_dtype", lambda inner, values, to: inner(values.astype(dtype).astype(F), to))


@computing(
    "double-rounding-bf16",
    "{where} bfloat16 before the last rounding: they are rounded twice.",
    stage=lambda choice: "product-rounding" if choice == "scaled" else "result",
    choices=("scaled", "result"),
)
def double_rounding_bf16(replay, choice):
    _double_rounding(replay, "bfloat16", choice)


@computing(
    "double-rounding-fp16",
    "{where} float16 before the last rounding: they are rounded twice.",
    stage=lambda choice: "product-rounding" if choice == "scaled" else "result",
    choices=("scaled", "result"),
)
def double_rounding_fp16(replay, choice):
    _double_rounding(replay, "float16", choice)


@computing(
    "truncated-before-quantized",
    "The result of the formula is converted to {dtype} by dropping its low bits before it is quantized{amax}, where TE "
    "{own}: look for a shift or a copy of the upper half in place of a conversion.",
    stage="rounding",
    choices=("amax too", "tensor amax apart", "cast alone"),
)
def truncated_before_quantized(replay, choice):
    require_scaling(replay)
    replay.require(replay.kind != "quantize")
    dtype = BFLOAT16 if replay.dtype == F else replay.dtype
    of_tensor, of_blocks = replay.layout.amax is not None, replay.layout.block is not None
    replay.require({"amax too": True, "tensor amax apart": of_tensor and of_blocks}.get(choice, of_tensor or of_blocks))
    rounds = replay.casts_rounded and replay.dtype != F
    replay.facts["dtype"] = dtype
    replay.facts["own"] = "rounds it to nearest even" if rounds else "quantizes the float32 values"
    replay.facts["amax"] = {
        "amax too": "",
        "tensor amax apart": ", though not before the tensor's amax",
        "cast alone": ", though not before the amax",
    }[choice]
    replay.round = lambda values: _round_values(values, dtype, "toward_zero").astype(F)
    replay.casts_rounded, replay.amax_rounded = True, choice == "amax too"
    replay.block_amax_rounded = choice != "cast alone"


# --- rounding -------------------------------------------------------------------------------------


def _round_values(values, dtype, rounding):
    """float32 rounded to float16 or bfloat16 "toward_zero" or "nearest_away"; others as usual."""
    if dtype == F:
        return values.astype(dtype)
    nearest = values.astype(dtype)
    back = nearest.astype(F)
    finite = np.isfinite(values)
    bits = nearest.view(np.uint16).copy()
    if rounding == "toward_zero":
        beyond = finite & (np.abs(back) > np.abs(values))
        bits[beyond] -= 1
    else:
        above = bits + np.uint16(1)
        with np.errstate(all="ignore"):
            midpoint = (np.abs(back.astype(np.float64)) + np.abs(above.view(dtype).astype(np.float64))) / 2
        tie = finite & (np.abs(values.astype(np.float64)) == midpoint)
        bits[tie] += 1
    return bits.view(dtype)


def _other_rounding(replay, rounding):
    if replay.computes and replay.scaling is not None:
        replay.rounding = rounding
        replay.require(replay.random_bits.__func__ is TensorReplay.random_bits)
        replay.require(replay.scaling.random is None)
        replay.facts["what"] = replay.fmt
        return
    replay.require(not replay.updates and replay.out_dtype != F)
    replay.facts["what"] = replay.out_dtype
    replay.to_dtype = lambda values, dtype: _round_values(values, dtype, rounding)


@computing(
    "truncation",
    "The cast to {what} truncates, where TE rounds to nearest even.",
    stage=lambda choice: "cast" if choice == "cast" else "casts",
    choices=("cast", "cast and scales"),
)
def truncation(replay, choice):
    _other_rounding(replay, "toward_zero")
    if choice == "cast and scales":
        require_two_levels(replay)
        replay.facts["what"] = f"{replay.fmt} and that of the scales to {replay.layout.scale_format}"
        replay.wrap("cast_scale", lambda inner, scale, fmt, rounding: inner(scale, fmt, "toward_zero"))


@computing(
    "ties-away",
    "The cast to {what} rounds ties away from zero, where TE rounds them to even{besides}.",
    stage="cast",
)
def ties_away(replay):
    _other_rounding(replay, "nearest_away")
    if replay.computes and replay.scaling is not None and not _has_powers_of_two(replay):
        replay.facts["besides"] = " (or after a multiplier one unit in the last place too high)"


def _has_powers_of_two(replay):
    """Whether elements are multiplied by powers of two, which no rounding moves."""
    given = replay.scaling.given
    if given is not None:
        return math.frexp(float(given))[0] == 0.5
    return replay.layout.scale_format == E8M0 or getattr(replay.scaling, "power_2_scale", False)


@computing(
    "rounded-to-grid-directed",
    "The cast rounds every value {how}, where TE rounds to nearest even.",
    stage="cast",
    choices=("up", "down", "away", "ties to zero"),
    last=True,
)
def rounded_directed(replay, choice):
    require_scaling(replay)
    replay.require(replay.scaling.random is None)
    replay.facts["how"] = {
        "up": "up",
        "down": "down",
        "away": "away from zero",
        "ties to zero": "to nearest with ties towards zero (or after a multiplier one unit in the last place too low)",
    }[choice]
    if choice in ("up", "down"):
        replay.rounding = choice
    elif choice == "away":
        replay.encode = lambda values, bits: _encode_magnitudes(values, replay.fmt, "up")
    else:
        inner = replay.encode

        def encode(values, bits):
            below = np.nextafter(np.abs(values), F(0))
            codes = _encode_magnitudes(np.copysign(below, values), replay.fmt, "nearest_away")
            return np.where(np.isnan(values), inner(values, bits), codes)

        replay.encode = encode


def _encode_magnitudes(values, fmt, rounding):
    """Codes of values whose magnitudes are rounded, then given their sign."""
    return fmt.signed_code(encode_tile(np.abs(values), fmt, rounding=rounding), np.signbit(values))


def _negated(codes, fmt):
    return fmt.signed_code(fmt.magnitude_code(codes), ~np.signbit(fmt.values[codes]))


@computing(
    "no-saturation",
    "Values beyond the largest code become {what}, where TE's cast saturates.",
    stage="saturation",
    choices=("special", "signless NaN", "wrapped"),
)
def no_saturation(replay, choice):
    require_scaling(replay)
    fmt = replay.fmt
    if choice == "wrapped":
        replay.facts["what"] = "whatever the low bits of the exponent are"
        inner = replay.encode

        def encode(values, bits):
            beyond = np.abs(values) > fmt.max
            codes = inner(values, bits)
            reduced = np.abs(values)
            for _ in range(3):
                reduced = np.where(reduced > fmt.max, reduced / F(2.0 ** (1 << (fmt.exponent_bits))), reduced)
            return np.where(beyond & np.isfinite(values), inner(np.copysign(reduced, values), bits), codes)

        replay.encode = encode
        return
    replay.require(fmt.infinity_code is not None or fmt.nan_code is not None)
    replay.saturate = False
    replay.facts["what"] = "NaN" if fmt.infinity_code is None else "infinity"
    if choice == "signless NaN":
        replay.require(fmt.infinity_code is not None)
        replay.facts["what"] = "NaN"
        replay.after(
            "encode", lambda codes: np.where(np.isinf(fmt.values[codes]), fmt.nan_code, codes).astype(np.uint8)
        )


@computing(
    "infinity-kept",
    "Infinity becomes {what}, where TE's cast saturates it.",
    stage="saturation",
    choices=("special", "zero"),
)
def infinity_kept(replay, choice):
    require_scaling(replay)
    fmt = replay.fmt
    replay.require(choice == "zero" or fmt.nan_code is not None)
    replay.facts["what"] = "zero" if choice == "zero" else ("NaN" if fmt.infinity_code is None else "infinity")
    code = 0 if choice == "zero" else (fmt.infinity_code or fmt.nan_code)

    def encode(inner, values, bits):
        codes = inner(values, bits)
        return np.where(np.isinf(values), fmt.signed_code(code, np.signbit(values)), codes)

    replay.wrap("encode", encode)


@computing(
    "cast-carry-lost",
    "The cast to {what} {how} where the mantissa rounds up to 2: {example}.",
    stage=lambda choice: "scale-cast" if choice.startswith("scale") else "cast",
    choices=("lost", "lost in normal codes", "clamped", "scale lost"),
)
def cast_carry_lost(replay, choice):
    replay.facts["how"] = "keeps the mantissa at its largest value" if choice == "clamped" else "loses the carry"
    if choice.startswith("scale"):
        require_two_levels(replay)
        fmt = replay.facts["what"] = replay.layout.scale_format
        replay.facts["example"] = _carry_example(fmt, choice)
        replay.wrap("cast_scale", lambda inner, scale, *how: _without_carry(scale, inner(scale, *how), fmt, choice))
        return
    if replay.computes and replay.scaling is not None:
        fmt = replay.facts["what"] = replay.fmt
        replay.require(not fmt.twos_complement and fmt.mantissa_bits > 0 and replay.scaling.random is None)
        replay.facts["example"] = _carry_example(fmt, choice)
        replay.wrap("encode", lambda inner, values, bits: _without_carry(values, inner(values, bits), fmt, choice))
        return
    replay.require(not replay.updates and replay.out_dtype != F and choice != "lost in normal codes")
    mantissa = 10 if replay.out_dtype == np.float16 else 7
    became = 2 - 2.0**-mantissa if choice == "clamped" else 1
    replay.facts["what"], replay.facts["example"] = replay.out_dtype, f"{2 - 2.0**-13:.6g} becomes {became:.6g}"
    less = np.uint16(1 if choice == "clamped" else 1 << mantissa)
    replay.to_dtype = lambda values, dtype: _stored_without_carry(values, dtype, mantissa, less)


def _carry_example(fmt, choice):
    """A value below the largest power of two, and what it becomes."""
    power = 2.0 ** math.floor(math.log2(float(fmt.max)))
    below = power / 2 * (2 - 2.0 ** -(fmt.mantissa_bits + 1))
    became = power * (1 - 2.0 ** -(fmt.mantissa_bits + 1)) if choice == "clamped" else power / 2
    return f"{below * (1 + 2.0**-10):g} becomes {became:g}"


def _without_carry(values, codes, fmt, choice):
    """Codes, where rounding up made the mantissa 0, with the exponent (or the code) below instead."""
    magnitude, step = fmt.magnitude_code(codes).astype(np.int64), 1 << fmt.mantissa_bits
    carried = (magnitude % step == 0) & (magnitude > 0) & (np.abs(values) < fmt.values[magnitude])
    if choice != "lost":
        carried &= magnitude > step
    lower = magnitude - (1 if choice == "clamped" else step)
    return np.where(carried, fmt.signed_code(lower.astype(np.uint8), np.signbit(values)), codes).astype(np.uint8)


def _stored_without_carry(values, dtype, mantissa, less):
    """float32 rounded to nearest even in a 16-bit dtype, its bits less `less` where that increments the exponent."""
    if dtype == F:
        return values.astype(dtype)
    nearest = values.astype(dtype)
    bits = nearest.view(np.uint16)
    carried = (bits % np.uint16(1 << mantissa) == 0) & (np.abs(nearest.astype(F)) > np.abs(values))
    carried &= np.isfinite(values)
    return np.where(carried, bits - less, bits).astype(np.uint16).view(dtype)


# --- formats --------------------------------------------------------------------------------------

FNUZ = {E4M3: (ml_dtypes.float8_e4m3fnuz, 240), E5M2: (ml_dtypes.float8_e5m2fnuz, 57344)}


@computing(
    "e4m3fnuz",
    "The codes are {fmt}FNUZ (AMD's, one more exponent bias, 0x80 is NaN), not OCP {fmt}{how}.",
    stage="format",
    choices=("scaled to it", "same scale", "same scale, unsaturated"),
)
def e4m3fnuz(replay, choice):
    if replay.dequantizes:
        float_scales = replay.layout.scale_format is None  # else it is as well a bias of the scales
        replay.require(replay.fmt in FNUZ and choice == "same scale" and float_scales)
        replay.facts["fmt"], replay.facts["how"] = replay.fmt, ", as they are read"
        values = np.arange(256, dtype=np.uint8).view(FNUZ[replay.fmt][0]).astype(F)
        replay.decode = lambda codes: values[codes]
        return
    require_scaling(replay)
    replay.require(replay.fmt in FNUZ)
    dtype, largest = FNUZ[replay.fmt]
    replay.facts["fmt"] = replay.fmt
    replay.facts["how"] = {
        "scaled to it": ", and the scales map to its maximum",
        "same scale": "",
        "same scale, unsaturated": ", and overflow is NaN",
    }[choice]
    if choice == "scaled to it":
        replay.require(largest != replay.fmt.max and replay.scaling.given is None)
        set_scale_max(replay, largest)

    def encode(values, bits):
        clipped = values if choice.endswith("unsaturated") else np.clip(values, F(-largest), F(largest))
        return clipped.astype(dtype).view(np.uint8)

    replay.encode = encode


@computing(
    "other-format",
    "The codes are {found}, where {own} was asked for{how}.",
    stage="format",
    fields=("fmt",),
    choices=[(fmt, how) for fmt in FORMATS.values() if fmt.signed for how in ("scaled to it", "same scale")],
)
def other_format(replay, choice):
    fmt, how = choice
    if replay.updates:
        replay.require(fmt in FP8_FORMATS and replay.fmt != fmt and how == "scaled to it")
        replay.facts["own"], replay.facts["found"], replay.facts["how"] = (
            replay.fmt,
            fmt,
            " (the scale maps to its maximum)",
        )
        replay.fmt = fmt
        return
    if not replay.dequantizes:
        require_scaling(replay)
    accepted = replay.scaling is not None and accepts(replay.scaling, fmt=fmt)
    replay.require(replay.fmt != fmt and (accepted or fmt.bits == replay.fmt.bits))
    replay.facts["own"], replay.facts["found"], replay.facts["how"] = replay.fmt, fmt, ""
    if replay.dequantizes:
        replay.require(how == "same scale" and fmt.bits == replay.fmt.bits)
        replay.facts["how"] = ", as they are read"
    elif how == "scaled to it":
        replay.require(accepted and replay.scaling.given is None)
        replay.facts["how"] = ", and the scales map to its maximum"
        replay.vary(fmt=fmt)
    replay.fmt = fmt


@computing(
    "nibble-sign-leaks",
    "The sign of the code in the {source} nibble of each byte {how} the code in the {other} nibble.",
    stage="nibbles",
    choices=[(source, how) for how in ("or", "xor", "copied", "extended") for source in ("low", "high")],
)
def nibble_sign_leaks(replay, choice):
    source, how = choice
    require_scaling(replay)
    replay.require(replay.layout.packed == 2)
    replay.require(how != "extended" or source == "low")
    replay.facts["source"], replay.facts["other"] = source, "high" if source == "low" else "low"
    replay.facts["how"] = {
        "or": "sets the sign of",
        "xor": "flips the sign of",
        "copied": "replaces the sign of",
        "extended": "is extended over all bits of",
    }[how]
    sign = np.uint8(8)

    def leak(codes):
        made = codes.copy()
        from_, to = (0, 1) if source == "low" else (1, 0)
        leaked = codes[:, from_::2] & sign
        own = codes[:, to::2]
        made[:, to::2] = {
            "or": own | leaked,
            "xor": own ^ leaked,
            "copied": (own & ~sign) | leaked,
            "extended": np.where(leaked, np.uint8(15), own),
        }[how]
        return made

    def quantize_blocks(inner, values, amax_values, direction, region):
        codes, scales = inner(values, amax_values, direction, region)
        along_rows = replay.layout.data_transposed(direction == "columnwise")
        return (leak(np.ascontiguousarray(codes.T)).T if along_rows else leak(codes)), scales

    replay.wrap("quantize_blocks", quantize_blocks)


# --- the columnwise copy --------------------------------------------------------------------------


@computing(
    "columnwise-of-rowwise",
    "The columnwise copy quantizes what the rowwise copy stands for{how}, where TE quantizes the values themselves.",
    stage="source",
    choices=("float32", "rounded"),
)
def columnwise_of_rowwise(replay, choice):
    require_scaling(replay)
    replay.require(replay.layout.block is not None)
    replay.facts["how"] = f", rounded to {replay.dtype}," if choice == "rounded" else ""
    replay.require(choice != "rounded" or replay.dtype != F)

    def source(inner, values, direction, region):
        if direction == "rowwise":
            return inner(values, direction, region)
        own = replay.setting.replay()
        values = own.round(values) if own.casts_rounded else values
        codes, scales = own.quantize_blocks(values, values, "rowwise", region)
        tensor_amax = own.tensor_amax("rowwise", region) if replay.layout.two_level else None
        rows, columns = own.block_shapes["rowwise"]
        scales = np.repeat(np.repeat(scales, rows, axis=0), columns, axis=1)[: values.shape[0], : values.shape[1]]
        made = own.fmt.values[codes] * own.rule.decode_factor(scales, tensor_amax)
        return replay.round(made) if choice == "rounded" else made.astype(F)

    replay.wrap("source", source)


# --- signs, NaN, subnormals -----------------------------------------------------------------------


@computing("sign-lost", "The sign bits are missing: the codes are those of magnitudes.", stage="sign")
def sign_lost(replay):
    if replay.computes and replay.scaling is None:
        replay.after("to_dtype", np.abs)
        return
    if replay.dequantizes:
        replay.after("decode", np.abs)
        return
    require_scaling(replay)
    replay.after("encode", replay.fmt.magnitude_code)


@computing(
    "sign-inverted",
    "The signs are inverted: {what}.",
    stage=lambda choice: {"result": "result", "dy": "upstream", "codes": "sign"}[choice],
    choices=("result", "dy", "codes"),
)
def sign_inverted(replay, choice):
    if replay.dequantizes:
        replay.require(choice == "codes")
        replay.facts["what"] = "a set sign bit is read as +"
        replay.after("decode", np.negative)
        return
    replay.require(replay.computes)
    if choice == "result":
        replay.facts["what"] = f"the kernel writes -{(replay.operation.outputs or ('x',))[0]}"
        replay.after("compute", np.negative)
    elif choice == "dy":
        replay.require(replay.gradient and replay.scaled)  # else it is the gradient of x that is negated
        replay.facts["what"] = "dy enters negated"
        replay.after("load_upstream", np.negative)
    else:
        require_scaling(replay)
        replay.facts["what"] = "the sign of every code is flipped"
        replay.after("encode", lambda codes: _negated(codes, replay.fmt))


@computing(
    "zero-sign-lost",
    "{what} written as +0, where TE keeps the sign.",
    stage="sign",
    choices=("all", "exact"),
)
def zero_sign_lost(replay, choice):
    replay.facts["what"] = "-0 is" if choice == "exact" else "-0, and negative values that round to zero, are"
    if replay.dequantizes or (replay.computes and replay.scaling is None):
        replay.require(choice == "all")
        replay.facts["what"] = "-0 is"
        replay.after("to_dtype", lambda values: values + values.dtype.type(0))
        return
    require_scaling(replay)
    negative_zero = replay.fmt.signed_code(0, True)
    replay.require(negative_zero != 0)

    def encode(inner, values, bits):
        codes = inner(values, bits)
        lost = (codes == negative_zero) if choice == "all" else (values == 0)
        return np.where(lost, np.uint8(0), codes)

    replay.wrap("encode", encode)


@computing(
    "nan-as-a-number",
    "NaN becomes {what}, where TE writes the format's {own}.",
    stage="nan",
    choices=("0", "largest", "negative largest", "0x80"),
)
def nan_as_a_number(replay, choice):
    if not (replay.computes and replay.scaling is not None):
        replay.require(not replay.updates and choice == "0")
        replay.facts["what"], replay.facts["own"] = "0", "NaN"
        replay.after("to_dtype", lambda values: np.where(np.isnan(values), values.dtype.type(0), values))
        return
    fmt = replay.fmt
    replay.facts["own"] = {fmt.nan_code: "NaN", fmt.largest_code: "largest value"}.get(fmt.code_of_nan, "0")
    largest, top_bit = fmt.largest_code, 1 << (fmt.bits - 1)
    code = {"0": 0, "largest": largest, "negative largest": fmt.signed_code(largest, True), "0x80": top_bit}[choice]
    replay.require(code != fmt.code_of_nan)
    alone = "-0" if fmt.values[top_bit] == 0 else "the least value"
    replay.facts["what"] = {"0": "0", "largest": "the largest value", "0x80": alone}.get(choice, "the least value")
    replay.wrap("encode", lambda inner, values, bits: np.where(np.isnan(values), np.uint8(code), inner(values, bits)))


@computing(
    "nan-sign-kept",
    "NaN becomes 0x{found:02X} with the sign that it has, where TE's cast writes 0x{own:02X} for either sign.",
    stage="nan",
    choices=lambda replay: _positive_nan_codes(replay),
    alone=True,
)
def nan_sign_kept(replay, choice):
    fmt = replay.fmt
    replay.facts["found"], replay.facts["own"] = choice, fmt.code_of_nan
    replay.wrap("round", lambda inner, values: np.where(np.isnan(values), values, inner(values)))  # else it has no sign

    def encode(inner, values, bits):
        return np.where(np.isnan(values), fmt.signed_code(choice, np.signbit(values)), inner(values, bits))

    replay.wrap("encode", encode)


def _positive_nan_codes(replay):
    """The codes of NaN without a sign bit, that of the format's cast first."""
    require_scaling(replay)
    fmt = replay.fmt
    replay.require(fmt.nan_code is not None and fmt.signed)
    codes = np.flatnonzero(np.isnan(fmt.values[: len(fmt.values) // 2])).tolist()
    return sorted(codes, key=lambda code: code != fmt.code_of_nan)


@computing(
    "subnormal-codes-flushed",
    "Values below the least normal number of {fmt} become zero, where TE writes its subnormal codes.",
    stage="subnormals",
    choices=("codes", "values", "unsigned"),
)
def subnormal_codes_flushed(replay, choice):
    if replay.dequantizes:
        replay.require(choice == "codes")
        replay.facts["fmt"] = replay.fmt
        replay.after(
            "decode", lambda values: np.where(np.abs(values) < replay.fmt.smallest_normal, F(0) * values, values)
        )
        return
    require_scaling(replay)
    fmt = replay.fmt
    replay.require("exponent" in fmt.fields)
    replay.facts["fmt"] = fmt

    def encode(inner, values, bits):
        codes = inner(values, bits)
        if choice == "values":
            small = np.abs(values) < fmt.smallest_normal
        else:
            small = fmt.magnitude_code(codes) < (1 << fmt.mantissa_bits)
        zero = fmt.signed_code(0, np.signbit(fmt.values[codes]) & (choice != "unsigned"))
        return np.where(small, zero, codes)

    replay.wrap("encode", encode)


# --- stochastic rounding --------------------------------------------------------------------------


def require_stochastic(replay):
    """NotApplicable without stochastic rounding."""
    require_scaling(replay)
    replay.require(replay.scaling.random is not None)


@computing(
    "nearest-for-stochastic",
    "The data are rounded {how}, where stochastic rounding was asked for.",
    stage="random",
    fields=("stochastic_rounding",),
    choices=("nearest_even", "toward_zero", "nearest_away"),
)
def nearest_for_stochastic(replay, choice):
    require_stochastic(replay)
    replay.facts["how"] = {
        "nearest_even": "to nearest even",
        "toward_zero": "towards zero",
        "nearest_away": "to nearest, ties away from zero",
    }[choice]
    replay.random_bits = lambda direction, region: None
    replay.rounding = choice


PHILOX_CHANGES = {
    "exchanged": lambda seed, offset, number: philox(offset, seed, number),
    "offset 0": lambda seed, offset, number: philox(seed, 0, number),
    "seed 0": lambda seed, offset, number: philox(0, offset, number),
    "offset / 4": lambda seed, offset, number: philox(seed, offset // 4, number),
    "offset * 4": lambda seed, offset, number: philox(seed, (offset * 4) & ((1 << 64) - 1), number),
    "offset + 1": lambda seed, offset, number: philox(seed, (offset + 1) & ((1 << 64) - 1), number),
    "seed + 1": lambda seed, offset, number: philox((seed + 1) & ((1 << 64) - 1), offset, number),
    "big-endian bytes": lambda seed, offset, number: philox(seed, offset, number).byteswap(),
    "words reversed": lambda seed, offset, number: philox(seed, offset, number)[:, ::-1],
    "block number + 1": lambda seed, offset, number: philox(seed, offset, number + 1),
}


def _shared_draws(replay):
    """What elements of the probe share a random number in some copy, as `SharedDraws.all_found` says it."""
    require_stochastic(replay)
    setting, region, found = replay.setting, replay.setting.probe, []
    replay.require(region is not None)
    for name in (name for name in setting.outputs if name.endswith("_data")):
        seen = scaled_values(setting.replay(), name.removesuffix("_data"), region)
        values, codes = (_as_stored(replay, name, _flat(blocks, region.shape)) for blocks in seen)
        draws = SharedDraws(codes.shape)
        draws.add(*(slice(0, size) for size in codes.shape), (values, values), codes, replay.fmt)
        found += draws.all_found()
    return list(dict.fromkeys(found))


def _as_stored(replay, direction, matrix):
    """A matrix of elements in the order in which a copy stores them; from there back again."""
    return matrix.T if Geometry.of(replay.scaling, direction).transposed else matrix


def _flat(blocks, shape):
    """A `block_view` as a matrix, without what lies beyond the tensor."""
    rows, columns = blocks.shape[:2], blocks.shape[2:]
    return blocks.reshape(math.prod(rows), math.prod(columns))[: shape[0], : shape[1]]


@computing(
    "random-number-shared",
    "One random number rounds {what}, where each element needs one of its own, so that errors do not average out: look "
    "for a draw outside the loop over elements.",
    stage="random",
    choices=_shared_draws,
    alone=True,
)
def random_number_shared(replay, choice):
    group, sense = choice
    replay.facts["what"] = said(choice)
    dump, seen = _dumped_codes(replay), {}

    def encode(inner, values, bits):
        own, (codes, direction, region) = inner(values, bits), dump()
        if codes is None:
            return own
        stored = (_as_stored(replay, direction, _flat(blocks, region.shape)) for blocks in (values, codes))
        p, up = shares(*stored, replay.fmt, sense)
        ends, transposed = Ends(p, up, group), Geometry.of(replay.scaling, direction).transposed
        if None in group:  # one number in all rectangles
            whole = seen.setdefault(direction, Ends.none(replay.shape[:: -1 if transposed else 1], group))
            whole.include(ends, group, *(region.rows, region.columns)[:: -1 if transposed else 1])
        moved, p = (_as_stored(replay, direction, a) for a in (p > spread(ends.numbers(), group, p.shape), p))
        if sense == "value":
            moved ^= np.signbit(_flat(values, region.shape))
        below = encode_tile(values, replay.fmt, rounding="toward_zero")
        above = _encode_magnitudes(values, replay.fmt, "up")
        moved, unknown = (padded_blocks(a, *values.shape[1::2]) for a in (moved, np.isnan(p)))
        return np.where(unknown, own, np.where(moved, above, below))

    replay.wrap("encode", encode)


@computing(
    "other-random-bits",
    "The data are rounded stochastically, but with other random bits than those of the call{how}.",
    stage="random",
    choices=("inverted", "columnwise restarts", "zero", *PHILOX_CHANGES, "any"),
)
def other_random_bits(replay, choice):
    require_stochastic(replay)
    random, given = replay.scaling.random, replay.scaling.random.bits is not None
    replay.facts["how"] = {
        "any": "",
        "inverted": ": the complement of them",
        "zero": ": all zero",
        "columnwise restarts": ": the columnwise copy counts its blocks from 0 again",
    }.get(choice, f": Philox with {choice}")
    if choice == "any":
        _either_neighbour(replay)
    elif choice == "zero":
        replay.after("random_bits", np.zeros_like)
    elif choice == "inverted":
        replay.after("random_bits", np.invert)
    elif choice == "columnwise restarts":
        replay.require(not given)
        m, k = replay.shape
        first = philox_groups(slice(0, 1), slice(0, k), (m, k), True)[0, 0]

        def restart(inner, number):
            return inner(np.where(number >= first, number - first, number))

        replay.wrap("philox", restart)
    else:
        replay.require(not given)

        def changed(number):
            words = PHILOX_CHANGES[choice](random.seed, random.offset, np.asarray(number, np.uint64))
            return np.ascontiguousarray(words).astype("<u4").view(np.uint8)

        replay.philox = changed


def _either_neighbour(replay):
    """Take the dump's code where it is one of the two neighbours of the scaled value."""
    replay.require(all(_much_differs(replay, name) for name in replay.setting.outputs if name.endswith("_data")))
    dump = _dumped_codes(replay)

    def encode(inner, values, bits):
        codes, _, _ = dump()
        if codes is None:
            return inner(values, bits)
        below = encode_tile(values, replay.fmt, rounding="toward_zero")
        above = _encode_magnitudes(values, replay.fmt, "up")
        return np.where((codes == below) | (codes == above), codes, inner(values, bits))

    replay.wrap("encode", encode)


def _dumped_codes(replay):
    """A function that gives what is being cast: the dump's codes of its blocks (None if none), the copy, the region."""
    outputs, state = replay.setting.outputs, {}

    def quantize_blocks(inner, values, amax_values, direction, region):
        name, codes = f"{direction}_data", None
        if name in outputs:
            codes = Geometry.of(replay.scaling, name).codes(outputs[name], replay.shape, region.rows, region.columns)
            codes = padded_blocks(np.ascontiguousarray(codes), *replay.block_shapes[direction])
        state["cast"] = codes, direction, region
        return inner(values, amax_values, direction, region)

    replay.wrap("quantize_blocks", quantize_blocks)
    return lambda: state["cast"]


def _much_differs(replay, name):
    """Whether a tenth of the bytes differs from the reference: other random bits do that, damage does not."""
    ours, dump = replay.setting.reference[name].reshape(-1), replay.setting.outputs[name].reshape(-1)
    part = slice(0, 1 << 20)
    return (ours[part] != dump[part]).mean() > 0.1


# --- the last place of the multiplier -------------------------------------------------------------

#: Units in the last place by which a multiplier may be off: fast reciprocals and divisions have one or two.
OFF_BY = (1, -1, 2, -2)
#: In place of the offsets of all multipliers: each scale has one of its own, which its codes show.
FITTED = "fitted"
#: Units up to which a number is looked for that gives the same codes: numbers of 16 bits may not tell them apart.
MOST_UNITS = 1 << 12
#: Wrong codes that an offset must give, for each number that is fitted to it; the most of all, as a share.
LEAST_CODES, MOST_WRONG = 4, 0.25
#: Elements up to which all are compared, or all of the rows of a probe.
MOST_ELEMENTS = 1 << 19


def _last_places(replay):
    """The least and the greatest offset that gives the wrong codes, or `FITTED`: a list of one of these, or none.

    A product that is rounded otherwise than to nearest, a quotient in its place, and ties that all go one way move
    codes as well: where one of these gives the codes too, no offset is named.
    """
    require_scaling(replay)
    setting = replay.setting
    replay.require(setting.probe is not None and replay.scaling.random is None and replay.rule.choice is None)
    wrong = {name: setting.wrong[name] for name in setting.wrong if name.endswith("_data")}
    copies = [name.removesuffix("_data") for name, mask in wrong.items() if mask.any()]
    replay.require(copies and all(mask.mean() <= MOST_WRONG for mask in wrong.values()))
    found = [_last_places_of(replay, direction) for direction in copies]
    if any(offsets != found[0] for offsets in found):
        least = {offsets and offsets[0] for offsets in found}
        if len(least) > 1 or found[0] in (None, FITTED):
            return []
        return [min(found, key=lambda offsets: abs(offsets[1]))]
    return [found[0]] if found[0] is not None else []


def _last_places_of(replay, direction):
    values, multiplier, codes = _products(replay, direction)
    encode = lambda scaled: replay.encode(scaled, None)  # noqa: E731
    count = np.count_nonzero(encode(values * multiplier) != codes)
    if count < LEAST_CODES:
        return None
    others = (encode(scaled) for scaled in _made_otherwise(values, multiplier))
    if any(np.array_equal(made, codes) for made in others) or _rounds_ties_alone(
        values * multiplier, codes, replay.fmt
    ):
        return None

    def gives(units):
        return np.array_equal(encode(values * _moved(multiplier, units)), codes)

    least = next((units for units in OFF_BY if gives(units)), None)
    if least is not None:
        sign, low, high = np.sign(least), abs(least), 2 * abs(least)
        while high <= MOST_UNITS and gives(sign * high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if gives(sign * middle) else (low, middle)
        return least, int(sign * low)
    if multiplier.shape[1::2] != (1, 1):
        return None
    moved = _fitted(values, multiplier, codes, encode)
    fitted = len(np.unique(multiplier[moved != multiplier]))
    is_evident = fitted > 1 and count >= LEAST_CODES * fitted
    return FITTED if is_evident and np.array_equal(encode(values * moved), codes) else None


def _products(replay, direction):
    """(float32 values, what they are multiplied by, the dump's codes), block by block: of all, or of a part."""
    seen, own, everything = [], replay.setting.replay(), whole(replay.setting.shape)
    own.wrap("multiply", lambda inner, *factors: (seen.append(factors), inner(*factors))[1])
    band = Region(replay.setting.probe.rows, everything.columns)
    region = next((r for r in (everything, band) if math.prod(r.shape) <= MOST_ELEMENTS), replay.setting.probe)
    _, codes = scaled_values(own, direction, region)
    replay.require(len(seen) == 1)
    values, multiplier = seen[0]
    return values, np.asarray(multiplier, F), codes


def _rounds_ties_alone(scaled, codes, fmt):
    """Whether the codes are those of a cast with ties away from zero, or towards it."""
    away = encode_tile(scaled, fmt, rounding="nearest_away")
    below = np.copysign(np.nextafter(np.abs(scaled), F(0)), scaled)
    return np.array_equal(away, codes) or np.array_equal(encode_tile(below, fmt, rounding="nearest_away"), codes)


def _made_otherwise(values, multiplier):
    """Products of float32 numbers, rounded towards zero, away from it, and not at all before the cast; a quotient."""
    exact = values.astype(np.float64) * multiplier  # 48 bits
    nearest = exact.astype(F)
    off = np.abs(nearest.astype(np.float64)) - np.abs(exact)
    cut = np.where(off > 0, np.nextafter(nearest, F(0)), nearest)
    away = np.where(off < 0, np.nextafter(nearest, np.copysign(F(np.inf), nearest)), nearest)
    odd = np.where((off != 0) & (cut.view(np.uint32) & 1 == 0), away, cut)  # rounds as the exact product does
    return cut, away, odd, values / (F(1) / multiplier)


def _moved(multiplier, units):
    """Positive float32 numbers, `units` in the last place larger; 0, infinity and NaN as they are."""
    usual = np.isfinite(multiplier) & (multiplier > 0)
    return np.where(usual, (multiplier.view(np.int32) + np.int32(units)).view(F), multiplier)


def _fitted(values, multiplier, codes, encode):
    """The multipliers, each moved by the units that give most codes of its blocks: those of one scale by the same."""
    _, scale = np.unique(multiplier, return_inverse=True)
    offsets = (0, *OFF_BY)
    missed = [
        np.bincount(scale.ravel(), (encode(values * _moved(multiplier, off)) != codes).sum(axis=(1, 3)).ravel())
        for off in offsets
    ]
    units = np.array(offsets)[np.argmin(missed, axis=0)][scale].reshape(multiplier.shape)
    return _moved(multiplier, units.astype(np.int32))


@computing(
    "multiplier-slightly-off",
    "What each element is multiplied by is {what} in the last place: look for an approximate reciprocal (rcp.approx, "
    "fast division) or another order of the scale's products.",
    stage="multiply",
    choices=_last_places,
    alone=True,
)
def multiplier_slightly_off(replay, choice):
    if choice != FITTED:
        least, most = (abs(units) for units in choice)
        units = f"{least} unit{'s' * (least > 1)}" if least == most else f"{least} to {most:,} units"
        replay.facts["what"] = f"too {'high' if choice[0] > 0 else 'low'} by {units}"
        replay.wrap("multiply", lambda inner, values, multiplier: inner(values, _moved(multiplier, choice[0])))
        return
    replay.facts["what"] = f"off by up to {max(OFF_BY)} units, by other numbers for other scales,"
    dump = _dumped_codes(replay)

    def multiply(inner, values, multiplier):
        codes, _, _ = dump()
        if codes is None:
            return inner(values, multiplier)
        return inner(values, _fitted(values, multiplier, codes, lambda scaled: replay.encode(scaled, None)))

    replay.wrap("multiply", multiply)
