"""Conventions of arrays that are off by a constant factor, and of an amax slot that holds something else.

The constant is the one that the dump implies; it is said with its name where it has one.
"""

import numpy as np

from refops.formats import E8M0, encode_tile
from refops.oracle.conventions.fits import common_ratio, named_constant, powers_of_two, roundoff
from refops.oracle.conventions.registry import computing
from refops.oracle.conventions.scales import (
    common_factor,
    require_scaling,
    require_two_levels,
    set_encode_scale,
    tensor_limit,
)
from refops.oracle.geometry import VALUES, Geometry, Region
from refops.quantization.layout import padded_blocks
from refops.quantization.result import DIRECTIONS

F = np.float32


# --- which constant -------------------------------------------------------------------------------


def known_constants(replay):
    """words -> value of the constants that a kernel could have forgotten or applied twice."""
    known = {"2": 2.0, "1/2": 0.5}
    if replay.setting.shape:
        m, k = replay.shape
        sizes = {"the number of rows": m, "the number of columns": k, "the number of elements": m * k}
        known |= {f"{value}, {words}": float(value) for words, value in sizes.items() if value > 1}
        known |= {f"1/{value}, one by {words}": 1 / value for words, value in sizes.items() if value > 1}
    if replay.scaling is not None:
        largest = float(replay.fmt.max)
        limits = {"the largest value of the elements": largest}
        if replay.layout.two_level:
            scale_max = float(tensor_limit(replay)) / largest if replay.computes else 448.0
            product = "the product of the largest values of elements and block scales"
            limits |= {"the largest block scale": scale_max, product: scale_max * largest}
        known |= {f"{value:g}, {words}": value for words, value in limits.items()}
        known |= {f"1/{value:g}, one by {words}": 1 / value for words, value in limits.items()}
        known |= _scales_of_tensor(replay)
    known |= powers_of_two() | {"3": 3.0, "1/3": 1 / 3, "2/3": 2 / 3, "4/3": 4 / 3}
    known |= {"log2(e)": 1.4426950408889634, "ln(2)": 0.6931471805599453, "sqrt(2)": 2.0**0.5, "1/sqrt(2)": 2.0**-0.5}
    return known


def _scales_of_tensor(replay):
    """The tensor's encode scale and its inverse, where the tensor has one."""
    for direction in DIRECTIONS:
        inverse = replay.setting.reference.get(f"{direction}_scale_inv")
        if inverse is not None and inverse.dtype == F and inverse.shape == (1,) and inverse[0] > 0:
            encode = 1 / float(inverse[0])
            words = {"the encode scale": encode, "the decode scale": 1 / encode}
            return {f"{value:.7g}, {name}": value for name, value in words.items()}
    return {}


def _say(replay, what, low, high, few=""):
    """The constant between two bounds; the sentence says that `what` is off by it.

    One number is always another one times something: there (`few` is "one") the constant must be a power of two, or
    have a name. Scales that all hold one number, where all right ones are another ("alike"), may as well have been left
    as they were: there it must have a name.
    """
    value, replay.facts["factor"] = named_constant(low, high, known_constants(replay))
    named = "," in replay.facts["factor"]
    replay.require(not few or named or (few == "one" and np.log2(value) % 1 == 0))
    replay.facts["what"] = what
    return value


def _times(values, factor):
    """float32 values times a constant, rounded once."""
    return (np.asarray(values, np.float64) * factor).astype(F)


def _ratio(replay, names, error=None, both_rounded=True):
    """(low, high, `few` of `_say`): the dumped over the right one of the first of `names` that has a common ratio."""
    cache, key = replay.setting.cache, ("ratio", tuple(names), error, both_rounded)  # it is asked of each pair
    if key not in cache:
        cache[key] = _ratio_of_first(replay, names, error, both_rounded)
    return cache[key]


def _ratio_of_first(replay, names, error, both_rounded):
    outputs, reference = replay.setting.outputs, replay.setting.reference
    names = [name for name in names if name in outputs]
    replay.require(names)
    wrong = [name for name in names if not np.array_equal(outputs[name], reference[name])]
    replay.require(wrong)
    faulty = replay.setting.faulty(wrong[0])
    got, expected = outputs[wrong[0]][faulty], reference[wrong[0]][faulty]
    fmt = replay.layout.scale_format if wrong[0].endswith("_scale_inv") and got.dtype == np.uint8 else None
    if fmt is not None:
        got, expected = fmt.values[got], fmt.values[expected]
        error = 0.0 if fmt == E8M0 else 2.0 ** -(fmt.mantissa_bits + 1)
    elif error is None:
        error = roundoff(got.dtype)
    part = slice(0, 1 << 20)
    differs = got != expected
    few = "one" if np.count_nonzero(differs) == 1 else ""
    if not few and wrong[0].endswith("_scale_inv") and len(np.unique(expected[differs])) == 1:
        few = "alike"
    replay.require(fmt is None or few != "alike")
    low, high = common_ratio(got.ravel()[part], expected.ravel()[part], error * (1 + both_rounded))
    return low, high, few


def _moved_by(code, factor, fmt):
    """Codes of scales times a factor; E8M0 codes move by the factor's logarithm."""
    if fmt == E8M0:
        return np.clip(code.astype(int) + int(np.rint(np.log2(factor))), 0, fmt.largest_code).astype(np.uint8)
    return encode_tile(_times(fmt.values[code], factor), fmt)


# --- arrays times a constant ----------------------------------------------------------------------

FACTOR_STAGES = {
    "scales and codes": "scale",
    "global": "global-scale",
    "scales": "stored",
    "codes": "multiply",
    "amax": "stored-amax",
    "values": "result",
    "dbias": "sum",
    "row gradients": "row-gradient",
}


@computing(
    "constant-factor",
    "{what} the right one times a constant: {factor}.",
    stage=FACTOR_STAGES.get,
    choices=tuple(FACTOR_STAGES),
    last=True,
)
def constant_factor(replay, choice):
    _FACTORS[choice](replay)


def _values_times(replay):
    outputs = replay.setting.outputs
    if replay.updates:
        factor = _say(replay, "The new scale is", *_ratio(replay, ("scale",)))
        replay.after("fresh_scale", lambda scale: _times(scale, factor))
        return
    names = [name for name in VALUES if name in outputs]
    if not names:
        require_scaling(replay)
        names = [f"amax_{d}" for d in DIRECTIONS]
        names += [f"{d}_scale_inv" for d in DIRECTIONS]
    factor = _say(replay, f"{_result(replay)} is", *_ratio(replay, names))
    if replay.dequantizes:
        replay.after("multiply", lambda values: _times(values, factor))
    else:
        replay.after("compute", lambda values: _times(values, factor))


def _result(replay):
    """What the sentence calls the tensor."""
    name = next((name for name in VALUES if name in replay.setting.outputs), None)
    return f"The result, {name}," if name else "The tensor that is quantized"


def _scales_and_codes_times(replay):
    require_scaling(replay)
    ratio = _ratio(replay, [f"{d}_scale_inv" for d in DIRECTIONS])
    factor = _say(replay, "Each scale, with which the data are cast too, is", *ratio)
    fmt = replay.layout.scale_format
    if fmt is None:
        replay.after("encode_scale", lambda scale: _times(scale, 1 / factor))
    elif fmt == E8M0:
        replay.after("scale_code", lambda code: _moved_by(code, factor, fmt))
    else:
        replay.wrap("cast_scale", lambda inner, scale, *how: inner(_times(scale, factor), *how))


def _global_scale_times(replay):
    require_two_levels(replay)
    factor = _say(replay, "The scale of the tensor is", *_ratio(replay, [f"{d}_scale_inv" for d in DIRECTIONS]))
    set_encode_scale(replay, lambda own, amax: _times(own, factor))


def _stored_scales_times(replay):
    require_scaling(replay)
    ratio = _ratio(replay, [f"{d}_scale_inv" for d in DIRECTIONS])
    factor = _say(replay, "Each stored scale, not that of the cast, is", *ratio)
    fmt = replay.layout.scale_format
    if fmt is None:
        replay.after("decode_scale", lambda scale: _times(scale, factor))
    else:
        replay.after("stored_scale", lambda code: _moved_by(code, factor, fmt))


def _codes_times(replay):
    require_scaling(replay)
    setting = replay.setting
    region = setting.probe
    replay.require(region is not None and replay.scaling.random is None)
    direction = next((d for d in DIRECTIONS if _data_differ(setting, d)), None)
    replay.require(direction is not None)
    scaled, codes = scaled_values(setting.replay(), direction, region)
    factor = float(common_factor(scaled, codes, replay.fmt))
    replay.require(abs(factor - 1) > 1e-5)
    for end in (F(0), F(np.inf)):  # the last bit of a product decides ties: a factor is not needed
        beside = np.copysign(np.nextafter(np.abs(scaled), end), scaled)
        replay.require(not np.array_equal(encode_tile(beside, replay.fmt), codes))
    width = 2.0**-14  # as near as the codes of a probe tell
    factor = _say(replay, "What each element is multiplied by is", factor * (1 - width), factor * (1 + width))
    replay.wrap("multiply", lambda inner, values, multiplier: _times(inner(values, multiplier), factor))


def _data_differ(setting, direction):
    name = f"{direction}_data"
    return name in setting.outputs and not np.array_equal(setting.outputs[name], setting.reference[name])


def scaled_values(replay, direction, region):
    """(float32 values as the right kernel casts them, the dump's codes) of a region, block by block."""
    seen = []
    replay.wrap("encode", lambda inner, values, bits: (seen.append(values), inner(values, bits))[1])
    data = f"{direction}_data"
    replay.run(region, [data])
    replay.require(len(seen) == 1)
    codes = Geometry.of(replay.case.scaling, direction).codes(
        replay.setting.outputs[data], replay.shape, region.rows, region.columns
    )
    codes = padded_blocks(np.ascontiguousarray(codes), *(replay.block_shapes[direction] or region.shape))
    return seen[0], codes


def _amax_times(replay):
    require_scaling(replay)
    factor = _say(replay, "The amax that is written is", *_ratio(replay, [f"amax_{d}" for d in DIRECTIONS]))
    replay.wrap("stored_amax", lambda inner, amax, direction: inner(_times(amax, factor), direction))


def _dbias_times(replay):
    replay.require(replay.computes)
    factor = _say(replay, "The bias gradient, dbias, is", *_ratio(replay, ("dbias",)))
    replay.after("column_sum", lambda total: _times(total, factor))


def _row_gradients_times(replay):
    replay.require(replay.computes)
    factor = _say(replay, "The gradient of row_scales is", *_ratio(replay, ("drow_scales",)))
    replay.wrap("row_gradient_terms", lambda inner, *arguments: _times(inner(*arguments), factor))


_FACTORS = {
    "values": _values_times,
    "scales and codes": _scales_and_codes_times,
    "global": _global_scale_times,
    "scales": _stored_scales_times,
    "codes": _codes_times,
    "amax": _amax_times,
    "dbias": _dbias_times,
    "row gradients": _row_gradients_times,
}


# --- the slot of the amax -------------------------------------------------------------------------


@computing(
    "amax-slot-holds-scale",
    "The slot of the {copy}amax holds {what}, {found:.7g}, where the amax is {own:.7g}.",
    stage="stored-amax",
    choices=("encode scale", "decode scale", "reciprocal", "square"),
)
def amax_slot_holds_scale(replay, choice):
    require_scaling(replay)
    replay.require(replay.layout.amax is not None)
    if choice in ("encode scale", "decode scale"):
        replay.require(replay.layout.two_level or replay.layout.block is None)
    outputs, reference = replay.setting.outputs, replay.setting.reference
    given = [direction for direction in DIRECTIONS if f"amax_{direction}" in outputs]
    wrong = [d for d in given if not np.array_equal(outputs[f"amax_{d}"], reference[f"amax_{d}"])]
    replay.facts["copy"] = f"{wrong[0]} " if len(wrong) < len(given) and wrong else ""
    replay.facts["what"] = {
        "encode scale": "the encode scale",
        "decode scale": "the decode scale, which is stored as scale_inv",
        "reciprocal": "1 / amax",
        "square": "the amax's square",
    }[choice]
    if choice == "decode scale" and replay.layout.two_level:
        replay.facts["what"] = "the tensor's decode scale"

    def stored_amax(inner, amax, direction):
        if direction not in wrong:
            return inner(amax, direction)
        if choice == "reciprocal":
            held = F(1) / amax
        elif choice == "square":
            held = amax * amax
        else:
            held = _scale_of_tensor(replay, amax, choice)
        replay.require(np.isfinite(amax).all())
        if amax.size:
            replay.facts["found"], replay.facts["own"] = float(held.flat[0]), float(amax.flat[0])
        return inner(held.astype(F), direction)

    replay.wrap("stored_amax", stored_amax)


@computing(
    "amax-slot-of-other-copy",
    "The slot of the {copy} amax holds that of the other copy, {found:.7g}, where its own is {own:.7g}.",
    stage="stored-amax",
    choices=DIRECTIONS,
)
def amax_slot_of_other_copy(replay, choice):
    require_scaling(replay)
    replay.require(replay.layout.amax == "tensor" and f"amax_{choice}" in replay.setting.outputs)
    replay.require(replay.scaling.given is None)
    [other] = [direction for direction in DIRECTIONS if direction != choice]
    own, held = (replay.setting.replay().tensor_amax(d, Region(slice(0, 0), slice(0, 0))) for d in (choice, other))
    replay.require(not np.array_equal(own, held))  # copies of the same numbers have one amax
    replay.facts["copy"], replay.facts["found"] = choice, float(held.flat[0])

    def stored_amax(inner, amax, direction):
        if direction != choice:
            return inner(amax, direction)
        replay.facts["own"] = float(amax.flat[0])
        return inner(held.reshape(amax.shape), direction)

    replay.wrap("stored_amax", stored_amax)


def _scale_of_tensor(replay, amax, choice):
    """The tensor's encode or decode scale of an amax, or of each row's."""
    if replay.layout.two_level:
        pair = replay.tensor_scale(amax)
        return pair[0] if choice == "encode scale" else pair[1]
    encode = replay.encode_scale(None if replay.scaling.given is not None else amax.reshape(-1, 1)).reshape(-1)
    return encode if choice == "encode scale" else replay.decode_scale(encode)
