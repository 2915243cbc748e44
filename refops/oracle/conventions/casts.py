"""Conventions of the cast: rounding, saturation, formats, signs, NaN, random bits; and roundings on the way to it."""

import ml_dtypes
import numpy as np

from refops.arguments import BFLOAT16
from refops.formats import E2M1, E2M3, E3M2, E4M3, E5M2, encode_tile
from refops.oracle.conventions.registry import computing
from refops.oracle.conventions.scales import require_scaling, set_scale_max
from refops.oracle.geometry import Geometry
from refops.oracle.replay import DequantizeKernel, TensorKernel, UpdateKernel
from refops.quantization import mxfp8
from refops.quantization.layout import block_view, pad_to_blocks
from refops.rounding import philox
from refops.scaling import BlockScaling, CurrentScaling, DelayedScaling, MXFP8Scaling, NVFP4Scaling

F = np.float32
DTYPES = {"float16": np.dtype(np.float16), "bfloat16": BFLOAT16}


# --- roundings on the way -------------------------------------------------------------------------


@computing(
    "product-rounded",
    "The product x * scale is rounded to {dtype} before the cast, where TE casts the float32 product.",
    stage="product-rounding",
)
def product_rounded(kernel):
    require_scaling(kernel)
    kernel.require(kernel.dtype != F)
    kernel.facts["dtype"] = kernel.dtype
    kernel.after("multiply", lambda scaled: scaled.astype(kernel.dtype).astype(F))


def _double_rounding(kernel, name, choice):
    kernel.require(not isinstance(kernel, UpdateKernel))
    dtype = DTYPES[name]
    if choice == "scaled":
        require_scaling(kernel)
        kernel.after("multiply", lambda scaled: scaled.astype(dtype).astype(F))
        kernel.facts["where"] = "The scaled values pass through"
    else:
        quantizes = isinstance(kernel, TensorKernel) and kernel.scaling is not None
        kernel.require(not (isinstance(kernel, TensorKernel) and kernel.kind == "quantize" and choice == "result"))
        kernel.facts["where"] = "The result of the formula passes through"
        if quantizes:
            kernel.require(dtype != kernel.dtype)  # that is extra-rounding
            kernel.after("compute", lambda values: values.astype(dtype).astype(F))
        else:
            kernel.require(dtype != kernel.out_dtype)
            kernel.wrap("to_dtype", lambda inner, values, to: inner(values.astype(dtype).astype(F), to))


@computing(
    "double-rounding-bf16",
    "{where} bfloat16 before the last rounding: they are rounded twice.",
    stage=lambda choice: "product-rounding" if choice == "scaled" else "result",
    choices=("scaled", "result"),
)
def double_rounding_bf16(kernel, choice):
    _double_rounding(kernel, "bfloat16", choice)


@computing(
    "double-rounding-fp16",
    "{where} float16 before the last rounding: they are rounded twice.",
    stage=lambda choice: "product-rounding" if choice == "scaled" else "result",
    choices=("scaled", "result"),
)
def double_rounding_fp16(kernel, choice):
    _double_rounding(kernel, "float16", choice)


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


def _other_rounding(kernel, rounding):
    if isinstance(kernel, TensorKernel) and kernel.scaling is not None:
        kernel.rounding = rounding
        kernel.require(kernel.random_bits.__func__ is TensorKernel.random_bits)
        kernel.require(not getattr(kernel.scaling, "stochastic_rounding", False))
        kernel.facts["what"] = kernel.fmt
        return
    kernel.require(not isinstance(kernel, UpdateKernel) and kernel.out_dtype != F)
    kernel.facts["what"] = kernel.out_dtype
    kernel.to_dtype = lambda values, dtype: _round_values(values, dtype, rounding)


@computing(
    "truncation",
    "The cast to {what} truncates, where TE rounds to nearest even.",
    stage=lambda choice: "cast" if choice == "cast" else "casts",
    choices=("cast", "cast and scales"),
)
def truncation(kernel, choice):
    _other_rounding(kernel, "toward_zero")
    if choice == "cast and scales":
        require_scaling(kernel, NVFP4Scaling)
        kernel.facts["what"] = "E2M1 and that of the scales to E4M3"
        kernel.encode_block_scale = lambda scale: encode_tile(scale, E4M3, rounding="toward_zero")


@computing(
    "ties-away",
    "The cast to {what} rounds ties away from zero, where TE rounds them to even.",
    stage="cast",
)
def ties_away(kernel):
    _other_rounding(kernel, "nearest_away")


@computing(
    "rounded-to-grid-directed",
    "The cast rounds every value {how}, where TE rounds to nearest even.",
    stage="cast",
    choices=("up", "down", "away", "ties to zero"),
    last=True,
)
def rounded_directed(kernel, choice):
    require_scaling(kernel)
    kernel.require(not getattr(kernel.scaling, "stochastic_rounding", False))
    kernel.facts["how"] = {
        "up": "up",
        "down": "down",
        "away": "away from zero",
        "ties to zero": "to nearest with ties towards zero",
    }[choice]
    if choice in ("up", "down"):
        kernel.rounding = choice
    elif choice == "away":
        kernel.encode = lambda values, bits: (
            encode_tile(np.abs(values), kernel.fmt, rounding="up") | _sign(values, kernel.fmt)
        )
    else:
        inner = kernel.encode

        def encode(values, bits):
            below = np.nextafter(np.abs(values), F(0))
            codes = encode_tile(below, kernel.fmt, rounding="nearest_away") | _sign(values, kernel.fmt)
            return np.where(np.isnan(values), inner(values, bits), codes)

        kernel.encode = encode


def _sign(values, fmt):
    return np.signbit(values).astype(np.uint8) << np.uint8(fmt.bits - 1)


@computing(
    "no-saturation",
    "Values beyond the largest code become {what}, where TE's cast saturates.",
    stage="saturation",
    choices=("special", "signless NaN", "wrapped"),
)
def no_saturation(kernel, choice):
    require_scaling(kernel)
    fmt = kernel.fmt
    if choice == "wrapped":
        kernel.facts["what"] = "whatever the low bits of the exponent are"
        inner = kernel.encode

        def encode(values, bits):
            extended = fmt.grid[-1] * 2.0 ** (1 + np.arange(3))
            beyond = np.abs(values) > fmt.max
            codes = inner(values, bits)
            reduced = np.abs(values)
            for _ in extended:
                reduced = np.where(reduced > fmt.max, reduced / F(2.0 ** (1 << (fmt.exponent_bits))), reduced)
            return np.where(beyond & np.isfinite(values), inner(np.copysign(reduced, values), bits), codes)

        kernel.encode = encode
        return
    kernel.require(fmt.infinity_code is not None or fmt.nan_code is not None)
    kernel.saturate = False
    kernel.facts["what"] = "NaN" if fmt.infinity_code is None else "infinity"
    if choice == "signless NaN":
        kernel.require(fmt.infinity_code is not None)
        kernel.facts["what"] = "NaN"
        kernel.after(
            "encode", lambda codes: np.where(codes & 0x7F == fmt.infinity_code, fmt.nan_code, codes).astype(np.uint8)
        )


@computing(
    "infinity-kept",
    "Infinity becomes {what}, where TE's cast saturates it.",
    stage="saturation",
    choices=("special", "zero"),
)
def infinity_kept(kernel, choice):
    require_scaling(kernel)
    fmt = kernel.fmt
    kernel.require(choice == "zero" or fmt.nan_code is not None)
    kernel.facts["what"] = "zero" if choice == "zero" else ("NaN" if fmt.infinity_code is None else "infinity")
    code = 0 if choice == "zero" else (fmt.infinity_code or fmt.nan_code)

    def encode(inner, values, bits):
        codes = inner(values, bits)
        return np.where(np.isinf(values), np.uint8(code) | _sign(values, fmt), codes)

    kernel.wrap("encode", encode)


# --- formats --------------------------------------------------------------------------------------

FNUZ = {E4M3: (ml_dtypes.float8_e4m3fnuz, 240), E5M2: (ml_dtypes.float8_e5m2fnuz, 57344)}


@computing(
    "e4m3fnuz",
    "The codes are {fmt}FNUZ (AMD's, one more exponent bias, 0x80 is NaN), not OCP {fmt}{how}.",
    stage="format",
    choices=("scaled to it", "same scale", "same scale, unsaturated"),
)
def e4m3fnuz(kernel, choice):
    if isinstance(kernel, DequantizeKernel):
        kernel.require(kernel.fmt in FNUZ and choice == "same scale")
        kernel.facts["fmt"], kernel.facts["how"] = kernel.fmt, ", as they are read"
        values = np.arange(256, dtype=np.uint8).view(FNUZ[kernel.fmt][0]).astype(F)
        kernel.decode = lambda codes: values[codes]
        return
    require_scaling(kernel)
    kernel.require(kernel.fmt in FNUZ)
    dtype, largest = FNUZ[kernel.fmt]
    kernel.facts["fmt"] = kernel.fmt
    kernel.facts["how"] = {
        "scaled to it": ", and the scales map to its maximum",
        "same scale": "",
        "same scale, unsaturated": ", and overflow is NaN",
    }[choice]
    if choice == "scaled to it":
        kernel.require(largest != kernel.fmt.max and not isinstance(kernel.scaling, DelayedScaling))
        set_scale_max(kernel, largest)

    def encode(values, bits):
        clipped = values if choice.endswith("unsaturated") else np.clip(values, F(-largest), F(largest))
        return clipped.astype(dtype).view(np.uint8)

    kernel.encode = encode


@computing(
    "other-format",
    "The codes are {found}, where {own} was asked for{how}.",
    stage="format",
    choices=[(fmt, how) for fmt in (E4M3, E5M2, E3M2, E2M3) for how in ("scaled to it", "same scale")],
)
def other_format(kernel, choice):
    fmt, how = choice
    if isinstance(kernel, UpdateKernel):
        kernel.require(fmt in (E4M3, E5M2) and kernel.fmt != fmt and how == "scaled to it")
        kernel.facts["own"], kernel.facts["found"], kernel.facts["how"] = (
            kernel.fmt,
            fmt,
            " (the scale maps to its maximum)",
        )
        kernel.fmt = fmt
        return
    if not isinstance(kernel, DequantizeKernel):
        require_scaling(kernel)
    kernel.require(kernel.fmt != fmt and kernel.fmt != E2M1)
    kernel.require(fmt in (E4M3, E5M2) or isinstance(kernel.scaling, MXFP8Scaling))
    kernel.facts["own"], kernel.facts["found"], kernel.facts["how"] = kernel.fmt, fmt, ""
    if isinstance(kernel, DequantizeKernel):
        kernel.require(how == "same scale" and fmt.bits == kernel.fmt.bits)
        kernel.facts["how"] = ", as they are read"
    elif how == "scaled to it":
        kernel.require(isinstance(kernel.scaling, CurrentScaling | BlockScaling | MXFP8Scaling))
        kernel.facts["how"] = ", and the scales map to its maximum"
        kernel.scale_max = fmt.max
        if isinstance(kernel.scaling, MXFP8Scaling):
            kernel.scale_byte = lambda amax: mxfp8.scale_byte(amax, fmt, kernel.scaling.scale_rounding)
    kernel.fmt = fmt


# --- signs, NaN, subnormals -----------------------------------------------------------------------


@computing("sign-lost", "The sign bits are missing: the codes are those of magnitudes.", stage="sign")
def sign_lost(kernel):
    if isinstance(kernel, TensorKernel) and kernel.scaling is None:
        kernel.after("to_dtype", np.abs)
        return
    if isinstance(kernel, DequantizeKernel):
        kernel.after("decode", np.abs)
        return
    require_scaling(kernel)
    kernel.after("encode", lambda codes: codes & np.uint8((1 << (kernel.fmt.bits - 1)) - 1))


@computing(
    "sign-inverted",
    "The signs are inverted: {what}.",
    stage=lambda choice: {"result": "result", "dy": "upstream", "codes": "sign"}[choice],
    choices=("result", "dy", "codes"),
)
def sign_inverted(kernel, choice):
    if isinstance(kernel, DequantizeKernel):
        kernel.require(choice == "codes")
        kernel.facts["what"] = "a set sign bit is read as +"
        kernel.after("decode", np.negative)
        return
    kernel.require(isinstance(kernel, TensorKernel))
    if choice == "result":
        kernel.facts["what"] = f"the kernel writes -{(kernel.operation.outputs or ('x',))[0]}"
        kernel.after("compute", np.negative)
    elif choice == "dy":
        kernel.require(kernel.gradient and kernel.scaled)  # else it is the gradient of x that is negated
        kernel.facts["what"] = "dy enters negated"
        kernel.after("load_upstream", np.negative)
    else:
        require_scaling(kernel)
        kernel.facts["what"] = "the sign bit of every code is flipped"
        kernel.after("encode", lambda codes: codes ^ np.uint8(1 << (kernel.fmt.bits - 1)))


@computing(
    "zero-sign-lost",
    "{what} written as +0, where TE keeps the sign.",
    stage="sign",
    choices=("all", "exact"),
)
def zero_sign_lost(kernel, choice):
    kernel.facts["what"] = "-0 is" if choice == "exact" else "-0, and negative values that round to zero, are"
    if isinstance(kernel, DequantizeKernel) or (isinstance(kernel, TensorKernel) and kernel.scaling is None):
        kernel.require(choice == "all")
        kernel.facts["what"] = "-0 is"
        kernel.after("to_dtype", lambda values: values + values.dtype.type(0))
        return
    require_scaling(kernel)
    negative_zero = 1 << (kernel.fmt.bits - 1)

    def encode(inner, values, bits):
        codes = inner(values, bits)
        lost = (codes == negative_zero) if choice == "all" else (values == 0)
        return np.where(lost, np.uint8(0), codes)

    kernel.wrap("encode", encode)


@computing(
    "nan-as-zero",
    "NaN becomes {what}, where TE writes the format's {own}.",
    stage="nan",
    choices=("0", "largest", "negative largest", "0x80", "signed NaN"),
)
def nan_as_zero(kernel, choice):
    if not (isinstance(kernel, TensorKernel) and kernel.scaling is not None):
        kernel.require(not isinstance(kernel, UpdateKernel) and choice == "0")
        kernel.facts["what"], kernel.facts["own"] = "0", "NaN"
        kernel.after("to_dtype", lambda values: np.where(np.isnan(values), values.dtype.type(0), values))
        return
    fmt = kernel.fmt
    kernel.facts["own"] = "largest value" if fmt.nan_code is None else "NaN"
    sign = 1 << (fmt.bits - 1)
    kernel.require(choice != "signed NaN")
    code = {"0": 0, "largest": fmt.largest_code, "negative largest": fmt.largest_code | sign, "0x80": sign}[choice]
    kernel.require(code != (fmt.largest_code if fmt.nan_code is None else fmt.nan_code))
    kernel.facts["what"] = {"0": "0", "largest": "the largest value", "0x80": "-0"}.get(choice, "the least value")
    kernel.wrap("encode", lambda inner, values, bits: np.where(np.isnan(values), np.uint8(code), inner(values, bits)))


@computing(
    "subnormal-codes-flushed",
    "Values below the least normal number of {fmt} become zero, where TE writes its subnormal codes.",
    stage="subnormals",
    choices=("codes", "values", "unsigned"),
)
def subnormal_codes_flushed(kernel, choice):
    if isinstance(kernel, DequantizeKernel):
        kernel.require(choice == "codes")
        kernel.facts["fmt"] = kernel.fmt
        kernel.after(
            "decode", lambda values: np.where(np.abs(values) < kernel.fmt.smallest_normal, F(0) * values, values)
        )
        return
    require_scaling(kernel)
    fmt = kernel.fmt
    kernel.facts["fmt"] = fmt
    sign = np.uint8(1 << (fmt.bits - 1))

    def encode(inner, values, bits):
        codes = inner(values, bits)
        if choice == "values":
            small = np.abs(values) < fmt.smallest_normal
        else:
            small = (codes & (sign - np.uint8(1))) < (1 << fmt.mantissa_bits)
        return np.where(small, np.uint8(0) if choice == "unsigned" else codes & sign, codes)

    kernel.wrap("encode", encode)


# --- stochastic rounding --------------------------------------------------------------------------


def require_stochastic(kernel):
    """NotApplicable without stochastic rounding."""
    require_scaling(kernel, NVFP4Scaling)
    kernel.require(kernel.scaling.stochastic_rounding)


@computing(
    "nearest-for-stochastic",
    "The data are rounded {how}, where stochastic rounding was asked for.",
    stage="random",
    choices=("nearest_even", "toward_zero", "nearest_away"),
)
def nearest_for_stochastic(kernel, choice):
    require_stochastic(kernel)
    kernel.facts["how"] = {
        "nearest_even": "to nearest even",
        "toward_zero": "towards zero",
        "nearest_away": "to nearest, ties away from zero",
    }[choice]
    kernel.random_bits = lambda direction, region: None
    kernel.rounding = choice


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


@computing(
    "other-random-bits",
    "The data are rounded stochastically, but with other random bits than those of the call{how}.",
    stage="random",
    choices=("inverted", "columnwise restarts", "zero", *PHILOX_CHANGES, "any"),
)
def other_random_bits(kernel, choice):
    require_stochastic(kernel)
    scaling, given = kernel.scaling, kernel.scaling.random_bits is not None
    kernel.facts["how"] = {
        "any": "",
        "inverted": ": the complement of them",
        "zero": ": all zero",
        "columnwise restarts": ": the columnwise copy counts its blocks from 0 again",
    }.get(choice, f": Philox with {choice}")
    if choice == "any":
        _either_neighbour(kernel)
    elif choice == "zero":
        kernel.after("random_bits", np.zeros_like)
    elif choice == "inverted":
        kernel.after("random_bits", np.invert)
    elif choice == "columnwise restarts":
        kernel.require(not given)
        first = kernel.shape[0] * (kernel.shape[1] // 16)

        def restart(inner, number):
            return inner(np.where(number >= first, number - first, number))

        kernel.wrap("philox", restart)
    else:
        kernel.require(not given)

        def changed(number):
            words = PHILOX_CHANGES[choice](scaling.seed, scaling.offset, np.asarray(number, np.uint64))
            return np.ascontiguousarray(words).astype("<u4").view(np.uint8)

        kernel.philox = changed


def _either_neighbour(kernel):
    """Take the dump's code where it is one of the two neighbours of the scaled value."""
    outputs = kernel.setting.outputs
    kernel.require(all(_much_differs(kernel, name) for name in outputs if name.endswith("_data")))
    state = {}

    def quantize_blocks(inner, values, amax_values, direction, region):
        state["dump"] = None
        name = f"{direction}_data"
        if name in outputs:
            codes = Geometry.of(kernel.scaling, name).codes(outputs[name], kernel.shape, region.rows, region.columns)
            codes = np.ascontiguousarray(codes)
            shape = kernel.block_shapes[direction]
            state["dump"] = block_view(pad_to_blocks(codes, *shape), *shape)
        return inner(values, amax_values, direction, region)

    def encode(inner, values, bits):
        if state["dump"] is None:
            return inner(values, bits)
        below = encode_tile(values, E2M1, rounding="toward_zero")
        above = encode_tile(np.abs(values), E2M1, rounding="up") | _sign(values, E2M1)
        dump = state["dump"]
        return np.where((dump == below) | (dump == above), dump, inner(values, bits))

    kernel.wrap("quantize_blocks", quantize_blocks)
    kernel.wrap("encode", encode)


def _much_differs(kernel, name):
    """Whether a tenth of the bytes differs from the reference: what other bits do, and what no damage does."""
    ours, dump = kernel.setting.reference[name].reshape(-1), kernel.setting.outputs[name].reshape(-1)
    part = slice(0, 1 << 20)
    return (ours[part] != dump[part]).mean() > 0.1
