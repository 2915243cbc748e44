"""Conventions of amax and scale: which maximum, of what, and how it becomes a scale."""

import math
from dataclasses import fields, replace
from functools import cache
from typing import NamedTuple

import numpy as np

from refops.arguments import BFLOAT16
from refops.formats import E4M3, E8M0, FORMATS, encode_tile
from refops.oracle.conventions import registry
from refops.oracle.conventions.registry import computing
from refops.oracle.geometry import TILE, Geometry, Region, crop, whole
from refops.oracle.replay import SETTINGS, NotApplicable, amax_is_near, power_of_two_below
from refops.oracle.tally import bits_of, ordered
from refops.quantization.layout import block_amax, padded_blocks
from refops.quantization.result import DIRECTIONS
from refops.scalings import NAMED
from refops.scalings.arithmetic import REFERENCE
from refops.scalings.declaration import FLT_MAX, FP8_FORMATS, LARGEST_FINITE, Numbers, accepts
from refops.scalings.rules import E8M0_ROUNDINGS, E8M0Scaling

F = np.float32
F_TYPE = np.dtype(F)
#: Units in the last place that an approximate reciprocal may be off: rcp.approx has one, fast division two.
RECIPROCAL_ULP = 4


def require_scaling(replay):
    """NotApplicable unless a tensor is quantized."""
    replay.require(replay.computes and replay.scaling is not None)


def require_blocks(replay):
    """NotApplicable unless blocks have scales of their own."""
    require_scaling(replay)
    replay.require(replay.layout.block is not None)


def require_own_amax(replay):
    """NotApplicable unless the scales come from the tensor's amax."""
    require_scaling(replay)
    replay.require(replay.scaling.given is None)


def require_float_scales(replay):
    """NotApplicable unless scales are float32."""
    require_scaling(replay)
    replay.require(replay.layout.scale_format is None)


def require_float_scales_of_amax(replay):
    """NotApplicable unless scales are float32 and come from the tensor's amax."""
    require_float_scales(replay)
    require_own_amax(replay)


def require_coded_scales(replay):
    """NotApplicable unless scales are codes."""
    require_scaling(replay)
    replay.require(replay.layout.scale_format is not None)


def require_powers_of_two(replay):
    """NotApplicable unless scales are E8M0 bytes."""
    require_scaling(replay)
    replay.require(replay.layout.scale_format == E8M0)


def require_two_levels(replay):
    """NotApplicable unless block scales are relative to a scale of the tensor."""
    require_scaling(replay)
    replay.require(replay.layout.two_level)


def tensor_limit(replay):
    """What a scaling of two levels maps the tensor's amax to: the largest element times the largest block scale."""
    return replay.rule.tensor_scale(F(1))[0]


def set_encode_scale(replay, change):
    """Let the tensor's encode scale be `change(encode scale, amax)`, the decode scale its inverse."""

    def tensor_scale(inner, amax):
        encode = change(inner(amax)[0], amax).astype(F)
        return encode, F(1) / encode

    replay.wrap("tensor_scale", tensor_scale)


# --- other settings -------------------------------------------------------------------------------
# They come before what fits a number to the dump, which may explain as much: an amax that is 256 times as large gives
# nearly the bytes of scales with another exponent bias.


def other_settings(replay):
    """(row, ((field, value), ...)) of settings that put codes and scales in the same places.

    First, with "" for the row, one field that no other convention exchanges: values that the scaling's named rows have,
    and the other one of a flag. At the end the rows themselves, by name, that differ in several fields or in a flag
    that is on: no convention of one field makes them.
    """
    require_scaling(replay)
    scaling = replay.case.scaling
    named = {field for convention in registry.CONVENTIONS.values() for field in convention.fields}
    rows = {name: row.scaling for name, row in NAMED.items() if type(row.scaling) is type(scaling)}
    asked = [field.name for field in fields(scaling) if field.name not in scaling.at_run_time]
    found = {}
    for field in asked:
        if field in named:
            continue
        own = getattr(scaling, field)
        for value in [not own] if isinstance(own, bool) else [getattr(row, field) for row in rows.values()]:
            if value != own and _leaves_places(scaling, **{field: value}):
                found["", ((field, value),)] = None
    kept = any(name.startswith("amax") for name in replay.setting.outputs)
    for name, row in rows.items():
        changed = {field: getattr(row, field) for field in asked if getattr(row, field) != getattr(scaling, field)}
        many = len(changed) > 1 or True in changed.values()
        same_amax = row.layout.amax in (None, scaling.layout.amax) or not kept
        if many and same_amax and _leaves_places(scaling, scale_format_too=False, **changed):
            found[name, tuple(changed.items())] = None
    return found


def _leaves_places(scaling, scale_format_too=True, **changed):
    """Whether a scaling may have other settings that put codes and scales in the same places, whatever amax is kept."""
    if not accepts(scaling, **changed):
        return False
    ignored = {"amax": "tensor", "two_level": False, "columnwise_multiple": 1}
    own, other = (replace(s.layout, **ignored) for s in (scaling, replace(scaling, **changed)))
    if not scale_format_too and None not in (own.scale_format, other.scale_format):
        other = replace(other, scale_format=own.scale_format)
    return own == other


def _settings(values):
    return " and ".join(f"{field}={value!r}" for field, value in values)


@computing(
    "other-setting",
    "The kernel works with {found}, where the settings have {own}.",
    stage=lambda choice: SETTINGS if choice[0] else "scale",
    choices=other_settings,
    last=True,
)
def other_setting(replay, choice):
    row, values = choice
    scaling = replay.case.scaling
    replay.facts["found"] = f"{_settings(values)}, the settings of {row}" if row else _settings(values)
    replay.facts["own"] = _settings((field, getattr(scaling, field)) for field, _ in values)
    if row:
        replay.follow(replace(scaling, **dict(values)))
        return
    replay.vary(**dict(values))
    if replay.layout.scale_format == E8M0:
        replay.require(rule_of(replay.scaling) in (None, rule_of(scaling)))  # those have names of their own
    replay.numbers = replay.scaling.numbers(replay.dtype)


# --- rounding before amax and cast ----------------------------------------------------------------


def require_activation_output(replay):
    """NotApplicable unless the quantized values could have been rounded to a dtype first."""
    require_scaling(replay)
    replay.require(replay.kind != "quantize" and replay.dtype != F)
    replay.facts["dtype"] = replay.dtype


@computing(
    "missing-rounding",
    "The float32 result of the formula is quantized as it is, where TE rounds it to {dtype} first.",
    stage="rounding",
    choices=("amax too", "cast alone"),
)
def missing_rounding(replay, choice):
    require_activation_output(replay)
    replay.require(replay.casts_rounded)
    replay.casts_rounded = False
    if choice == "amax too":
        replay.amax_rounded = False
    else:
        require_blocks(replay)
        replay.block_amax_rounded = True


@computing(
    "extra-rounding",
    "The result of the formula is rounded to {dtype} before it is quantized, where TE quantizes the float32 values.",
    stage="rounding",
    choices=("amax too", "cast alone"),
)
def extra_rounding(replay, choice):
    require_activation_output(replay)
    replay.require(not replay.casts_rounded)
    replay.casts_rounded = True
    replay.amax_rounded = choice == "amax too"


@computing(
    "amax-rounded",
    "The amax is taken of values rounded to {dtype}, where TE takes that of the float32 values.",
    stage="amax-rounding",
)
def amax_rounded(replay):
    require_activation_output(replay)
    replay.require(not replay.amax_rounded)
    replay.amax_rounded = True


@computing(
    "amax-unrounded",
    "The {what} taken of the float32 values, where TE takes {them} of values rounded to {dtype}.",
    stage="amax-rounding",
    choices=("tensor", "block", "both"),
)
def amax_unrounded(replay, choice):
    require_activation_output(replay)
    if choice in ("tensor", "both"):
        replay.require(replay.amax_rounded and replay.layout.amax is not None)
        replay.amax_rounded = False
    if choice in ("block", "both"):
        require_blocks(replay)
        replay.require(replay.casts_rounded)
        replay.block_amax_rounded = False
    replay.facts["what"], replay.facts["them"] = (
        ("block amaxes are", "them") if choice == "block" else ("amax is", "it")
    )


# --- which maximum --------------------------------------------------------------------------------


@computing(
    "signed-amax",
    "The amax {which}is the maximum of the values, not of their magnitudes.",
    stage=lambda choice: "block-amax" if choice == "blocks" else "magnitude",
    choices=("every", "blocks"),
)
def signed_amax(replay, choice):
    require_scaling(replay)
    replay.facts["which"] = "of each block " if choice == "blocks" else ""
    if choice == "every":
        replay.magnitude = lambda values: values
    else:
        require_two_levels(replay)
        replay.block_amax = lambda blocks: replay.maximum(blocks, (1, 3))


@computing(
    "signed-tensor-amax",
    "The tensor's amax{where} is the maximum of the values, not of their magnitudes.",
    stage=lambda choice: "stored-amax" if choice == "stored" else "tensor-amax",
    choices=("used", "stored"),
)
def signed_tensor_amax(replay, choice):
    require_scaling(replay)
    replay.require(replay.layout.amax == "tensor" and (choice == "stored" or replay.layout.two_level))
    replay.facts["where"] = " that is written, not that of the scales," if choice == "stored" else ""
    signed = replay.setting.replay()
    registry.CONVENTIONS["signed-amax"].apply(signed, "every")
    if choice == "used":
        replay.tensor_amax = signed.tensor_amax
    else:
        anywhere = Region(slice(0, 0), slice(0, 0))
        replay.stored_amax = lambda amax, direction: signed.tensor_amax(direction, anywhere).reshape(-1)


@computing(
    "nan-in-amax",
    "A NaN makes the amax NaN, and with it every scale that depends on it; TE's maximum ignores NaN.",
    stage="maximum",
)
def nan_in_amax(replay):
    require_scaling(replay)
    replay.maximum = lambda a, axis: np.maximum.reduce(a, axis=axis, initial=F(0))


def _larger(amax, magnitude):
    """The larger one by a comparison: a NaN that comes is taken, a NaN that is there is replaced."""
    return np.where(amax > magnitude, amax, magnitude)


def _in_sequence(magnitudes):
    """The running maximum (N, ...) at its end: it starts again behind the last NaN."""
    nan = np.isnan(magnitudes)
    behind = ~np.logical_or.accumulate(nan[::-1])[::-1]
    return np.where(nan[-1], F(np.nan), np.max(magnitudes, axis=0, where=behind, initial=F(0)))


def _by_halves(magnitudes):
    """The maximum of (N, ...), N a power of two, as lane 0 of a butterfly finds it: far lanes first."""
    while len(magnitudes) > 1:
        half = len(magnitudes) // 2
        magnitudes = _larger(magnitudes[:half], magnitudes[half:])
    return magnitudes[0]


def _by_neighbours(magnitudes):
    """The same, near lanes first."""
    while len(magnitudes) > 1:
        magnitudes = _larger(magnitudes[0::2], magnitudes[1::2])
    return magnitudes[0]


RESTARTS = {
    "in sequence": ("before", _in_sequence),
    "by halves": ("before it in a reduction that begins with the far lanes", _by_halves),
    "by neighbours": ("before it in a reduction that begins with the near lanes", _by_neighbours),
}


@computing(
    "nan-restarts-amax",
    "A NaN in a block makes its amax lose what came {what}{last}: the maximum is a comparison, "
    "amax > |x| ? amax : |x|, where TE's fmaxf ignores NaN.",
    stage="block-amax",
    choices=[(order, last) for order in RESTARTS for last in ("kept", "dropped")],
    alone=True,
)
def nan_restarts_amax(replay, choice):
    order, last = choice
    require_blocks(replay)
    region = replay.setting.probe
    replay.require(region is not None and np.isnan(replay.values(region.rows, region.columns)).any())
    replay.facts["what"], fold = RESTARTS[order]
    replay.facts["last"] = "" if last == "kept" else ", and one at the end makes it 0"

    def block_amax(blocks):
        magnitudes = np.abs(np.moveaxis(blocks, (1, 3), (0, 1)))
        amax = fold(magnitudes.reshape(-1, *magnitudes.shape[2:]))
        return np.where(np.isnan(amax), F(0), amax) if last == "dropped" else amax

    replay.block_amax = block_amax


@computing(
    "stale-amax",
    "The {what} from another amax, {found:.6g} where this tensor has {own:.6g}: that of another step or tensor.",
    stage="tensor-amax",
    choices=("dump", "scale", "codes"),
    last=True,
)
def stale_amax(replay, choice):
    require_own_amax(replay)
    replay.require(replay.layout.amax == "tensor")
    setting = replay.setting
    replay.facts["what"] = "scales follow"
    region = Region(slice(0, 0), slice(0, 0))
    found = {}
    for direction in DIRECTIONS:
        amax = None
        if choice == "dump" and _something_follows(setting, direction):
            amax = setting.outputs.get(f"amax_{direction}")
        elif choice == "scale" and replay.layout.block is None:
            scale_inv = setting.outputs.get(f"{direction}_scale_inv")
            amax = None if scale_inv is None else scale_inv * replay.scale_max
        if amax is not None:
            found[direction] = amax.reshape(1, 1)
    if choice == "codes":
        found = dict.fromkeys(DIRECTIONS, amax_of_scales(replay))
    replay.require(found)
    first = next(iter(found))
    replay.facts["found"] = float(found[first][0, 0])
    replay.facts["own"] = float(replay.tensor_amax(first, region)[0, 0])
    replay.require(np.isfinite(replay.facts["found"]) and replay.facts["found"] > 0)
    ends = (np.array(replay.facts[which]) for which in ("found", "own"))
    replay.require(choice == "dump" or not amax_is_near(*ends))  # an inexact reciprocal is no other amax
    replay.require(replay.facts["found"] != replay.facts["own"])
    for direction in DIRECTIONS:
        found.setdefault(direction, found[first])
    own = replay.tensor_amax
    replay.tensor_amax = lambda direction, region: found[direction]
    if choice != "dump":
        replay.stored_amax = lambda amax, direction: own(direction, region).reshape(-1)


def _something_follows(setting, direction):
    """Whether a dumped amax may have been used: not if the rest of the dump is right without it."""
    beside = [f"{direction}_{part}" for part in ("scale_inv", "data") if f"{direction}_{part}" in setting.outputs]
    return not beside or any(not np.array_equal(setting.outputs[n], setting.reference[n]) for n in beside)


def amax_of_scales(replay):
    """The one amax that the written block scales (two levels) or codes (per tensor) agree with, or NotApplicable."""
    setting = replay.setting
    region = setting.probe
    replay.require(region is not None)
    values = replay.values(region.rows, region.columns)
    values = replay.round(values) if replay.casts_rounded else values
    direction = next((d for d in DIRECTIONS if f"{d}_data" in setting.outputs), None)
    replay.require(direction is not None)
    if replay.layout.two_level:
        replay.require(f"{direction}_scale_inv" in setting.outputs and not replay.hadamard[direction])
        shape = replay.block_shapes[direction]
        amax = block_amax(padded_blocks(values, *shape))
        amax = Geometry.of(replay.scaling, direction).store_scales(amax, shape, region.shape)
        written = crop(replay.case, f"{direction}_scale_inv", setting.outputs[f"{direction}_scale_inv"], region)
        factor = common_factor(amax, written, replay.layout.scale_format)
        return np.full((1, 1), tensor_limit(replay) / (factor * replay.fmt.max), F)
    factor = _factor_of_codes(replay, values, direction, region)
    return np.full((1, 1), replay.scale_max / factor, F)


def _factor_of_codes(replay, values, direction, region):
    geometry = Geometry.of(replay.scaling, direction)
    written = geometry.codes(replay.setting.outputs[f"{direction}_data"], replay.shape, region.rows, region.columns)
    return common_factor(values, written, replay.fmt)


def common_factor(values, codes, fmt):
    """The factor s with codes = fmt(values * s) throughout, float32; NotApplicable if there is none.

    Each element allows an interval of factors, from the midpoints around its code; the intervals must have a common
    point (a few elements may miss it).
    """
    index = fmt.magnitude_code(codes.ravel()).astype(np.int64)
    grid = fmt.grid
    magnitude = np.abs(values.ravel().astype(np.float64))
    usable = (index > 0) & (index < fmt.largest_code) & np.isfinite(magnitude) & (magnitude > 0)
    if usable.sum() < 4:
        raise NotApplicable
    index, magnitude = index[usable], magnitude[usable]
    lower = (grid[index - 1] + grid[index]) / 2 / magnitude
    upper = (grid[index] + grid[index + 1]) / 2 / magnitude
    low, high = np.quantile(lower, 0.995), np.quantile(upper, 0.005)
    if len(lower) < 1000 or low > high * (1 + 1e-3):
        low, high = lower.max(), upper.min()
    else:
        near_low, near_high = lower[lower <= high], upper[upper >= low]
        low, high = near_low.max(), near_high.min()
    if low > high * (1 + 1e-6):
        raise NotApplicable
    return F((low + high) / 2)


# --- one number in all wrong scales of blocks -------------------------------------------------------
# What explains it most simply comes first, before an offset or a factor, which one number cannot tell from it.

#: Scales that differ from the right ones, at least.
LEAST_HELD = 4
#: Lower bounds of an amax that keep a quotient finite: they have a name of their own.
EPSILONS = (1e-12, 1e-10, 1e-8, 1e-6, 1e-5, 1e-4, 2.0**-126)


class HeldScale(NamedTuple):
    """The number that all wrong scales of a copy hold.

    Attributes:
        direction: of the copy.
        stored: the number as it is stored.
        value: what it stands for.
        is_larger: whether the right scales are all smaller where it stands.
        is_largest: whether no scale of the copy should be as large.
        alike: whether the right scales are one number too, where it stands.
        everywhere: whether all scales of the copy are wrong.
    """

    direction: str
    stored: np.generic
    value: float
    is_larger: bool
    is_largest: bool
    alike: bool
    everywhere: bool


def held_scale(replay):
    """The `HeldScale` of a dump; NotApplicable where its wrong scales hold different numbers."""
    require_blocks(replay)
    cache = replay.setting.cache
    if "held scale" not in cache:
        found = (_held_in(replay, direction) for direction in DIRECTIONS)
        cache["held scale"] = next((held for held in found if held is not None), None)
    replay.require(cache["held scale"] is not None)
    return cache["held scale"]


def _held_in(replay, direction):
    """The `HeldScale` of one copy, or None."""
    setting, name = replay.setting, f"{direction}_scale_inv"
    if name not in setting.outputs:
        return None
    inside = replay.case.slots[name].valid_slices
    got, expected = setting.outputs[name][inside], setting.reference[name][inside]
    differs = bits_of(got) != bits_of(expected)
    numbers, fmt = np.unique(got[differs]), replay.layout.scale_format
    if np.count_nonzero(differs) < LEAST_HELD or len(numbers) > 1:
        return None
    stored = numbers[0]
    if fmt is not None and stored >= fmt.largest_code:  # too large a scale saturates, whatever made it
        return None
    value, right = (replay.read_scale(scales, fmt) for scales in (stored, expected))
    smaller, alike, everywhere = right < value, len(np.unique(expected[differs])) == 1, bool(differs.all())
    is_larger, is_largest = bool(smaller[differs].all()), bool(smaller.all())
    return HeldScale(direction, stored, float(value), is_larger, is_largest, alike, everywhere)


def _starts(replay):
    """The number from which the amax of each block starts; [] if none gives the scales of the dump."""
    held = held_scale(replay)
    per_row = replay.layout.two_level and replay.layout.amax == "rows"
    if not held.is_larger or held.value == 1 or per_row:  # 1 is what a scale begins with
        return []
    plain, anywhere = replay.setting.replay(), Region(slice(0, 0), slice(0, 0))
    tensor_amax = plain.tensor_amax(held.direction, anywhere) if replay.layout.two_level else None

    def gives_it(start):
        scale = plain.scales(np.full((1, 1), start, F), tensor_amax)[0]
        return bool(scale.reshape(-1)[0] == held.stored)

    stored = np.full((1, 1), held.stored)
    implied = float(replay.rule.decode_factor(stored, tensor_amax)[0, 0]) * float(replay.scale_max)
    if not 0 < implied < FLT_MAX or any(map(gives_it, EPSILONS)):
        return []
    exponent = math.floor(math.log2(implied))
    numbers = [1.0]
    if not held.is_largest:  # else all blocks would have that scale, as if none of them had an amax
        numbers += [*(2.0**e for e in range(exponent + 1, exponent - 3, -1)), implied]
    return [number for number in numbers if gives_it(number)][:1]


def _one_for_another(replay):
    """Whether some block scales hold one number and the right ones another: the cause need not be an offset."""
    try:
        held = held_scale(replay)
        return held.alike and not held.everywhere
    except NotApplicable:
        return False


@computing(
    "amax-starts-from",
    "The amax of each block starts from {start:.6g}{about}, where TE's starts from 0: it is never less.",
    stage="block-amax",
    choices=_starts,
    last=True,
)
def amax_starts_from(replay, choice):
    require_blocks(replay)
    require_own_amax(replay)
    replay.facts["start"] = choice
    replay.facts["about"] = "" if replay.layout.scale_format is None else " (or a number with the same scale)"
    replay.after("block_amax", lambda amax: np.maximum(amax, F(choice)))


@computing(
    "stale-scale",
    "{what}.",
    stage=lambda choice: "stored" if choice == "stored alone" else "scale",
    choices=("scale_inv", "codes", "blocks", "stored alone"),
    last=True,
)
def stale_scale(replay, choice):
    if choice in ("blocks", "stored alone"):
        _keep_scale_of_blocks(replay, choice == "stored alone")
        return
    require_scaling(replay)
    replay.require(replay.scaling.given is not None)
    outputs = replay.setting.outputs
    direction = next((d for d in DIRECTIONS if f"{d}_data" in outputs or f"{d}_scale_inv" in outputs), None)
    replay.require(direction is not None)
    own = replay.scaling.given
    if choice == "scale_inv":
        replay.require(f"{direction}_scale_inv" in outputs)
        inverse = outputs[f"{direction}_scale_inv"][0]
        replay.require(np.isfinite(inverse) and inverse > 0)
        found = F(1) / inverse
        replay.decode_scale = lambda scale: np.full_like(scale, inverse)
    else:
        region = replay.setting.probe
        replay.require(region is not None and f"{direction}_data" in outputs)
        values = replay.values(region.rows, region.columns)
        values = replay.round(values) if replay.casts_rounded else values
        found = _factor_of_codes(replay, values, direction, region)
        if abs(found / own - 1) < 1e-3:
            found = own
        replay.decode_scale = lambda scale: np.full_like(scale, F(1) / own)
    replay.require(not amax_is_near(np.array(found), np.array(own)))  # an inexact reciprocal is no other scale
    replay.facts["what"] = (
        f"The data are multiplied by {float(found):.6g}, where the call's scale is {float(own):.6g}: that of another "
        f"step or tensor"
    )
    replay.encode_scale = lambda amax: np.full((1, 1), found, F)


def _keep_scale_of_blocks(replay, stored_alone):
    """Give every block the one scale that the wrong scales of the dump hold, whatever its amax."""
    held = held_scale(replay)
    replay.require(np.isfinite(held.value) and held.value > 0)
    replay.require(held.value == 1 or not held.alike)  # one number for another may be a factor or an offset
    fmt = replay.layout.scale_format
    shown = f"{held.value:.6g}" + ("" if fmt is None else f" (0x{int(held.stored):02X})")
    cast = ", though the data are cast with the right ones" if stored_alone else ""
    which = "the one that they begin with" if held.value == 1 else "one of before"
    what = "The stored scales" if stored_alone else "The scales of blocks"
    replay.facts["what"] = f"{what} are {shown} whatever the amax is{cast}: {which}, which was not replaced"
    if stored_alone:
        replay.after("stored_scale", lambda scale: np.full_like(scale, held.stored))
    elif fmt is not None:
        replay.after("scale_code", lambda code: np.full_like(code, held.stored))
    else:
        replay.after("encode_scale", lambda scale: np.full_like(scale, F(1) / held.stored))
        replay.after("decode_scale", lambda scale: np.full_like(scale, held.stored))


@computing(
    "neighbour-block-scale",
    "{what} of the {which} block, one off.",
    stage=lambda choice: {"both": "block-amax", "stored": "stored", "cast": "multiplier"}[choice[0]],
    choices=[(what, by) for what in ("both", "cast", "stored") for by in (1, -1)],
)
def neighbour_block_scale(replay, choice):
    what, by = choice
    if replay.dequantizes:
        _neighbour_scale_read(replay, what, by)
        return
    require_blocks(replay)
    replay.facts["which"] = "next" if by == 1 else "previous"
    replay.facts["what"] = {
        "both": "Each block is scaled by the amax",
        "cast": "Each block is cast with the scale",
        "stored": "Each block's stored scale is that",
    }[what]
    replay.halo = "along"
    inner = {}

    def quantize_blocks(own, values, amax_values, direction, region):
        inner["axis"] = int(direction == "rowwise")
        return own(values, amax_values, direction, region)

    replay.wrap("quantize_blocks", quantize_blocks)

    def shifted(array):
        axis = inner["axis"]
        return np.roll(array, -by, axis=axis) if array.shape[axis] > 1 else array

    if what == "both":
        replay.after("block_amax", shifted)
    else:
        index = 1 if what == "cast" else 0
        replay.after("scales", lambda pair: tuple(shifted(a) if i == index else a for i, a in enumerate(pair)))


@computing(
    "neighbour-tile-amax",
    "Each block is {what} of the block {which} it, across the direction in which blocks run.",
    stage=lambda choice: {"both": "block-amax", "stored": "stored", "cast": "multiplier"}[choice[0]],
    choices=[(what, by) for what in ("both", "cast", "stored") for by in (1, -1)],
)
def neighbour_tile_amax(replay, choice):
    what, by = choice
    require_blocks(replay)
    replay.facts["what"] = {
        "both": "scaled by the amax",
        "cast": "cast with the scale",
        "stored": "given the stored scale, not that of its cast,",
    }[what]
    replay.facts["which"] = "after" if by == 1 else "before"
    replay.halo = "across"
    inner = {}

    def quantize_blocks(own, values, amax_values, direction, region):
        inner["axis"] = int(direction == "columnwise")
        return own(values, amax_values, direction, region)

    def shifted(array):
        axis = inner["axis"]
        return np.roll(array, -by, axis=axis) if array.shape[axis] > 1 else array

    replay.wrap("quantize_blocks", quantize_blocks)
    if what == "both":
        replay.after("block_amax", shifted)
    else:
        index = 1 if what == "cast" else 0
        replay.after("scales", lambda pair: tuple(shifted(a) if i == index else a for i, a in enumerate(pair)))


def _neighbour_scale_read(replay, what, by):
    replay.require(what == "both" and replay.layout.block is not None)
    replay.facts["which"], replay.facts["what"] = (
        ("next" if by == 1 else "previous"),
        "Each block is read with the scale",
    )
    direction, b = replay.direction, replay.layout.block[1]
    m, k = replay.shape
    own = replay.spread

    def spread(scales, region):
        rows, columns = region.rows, region.columns
        if direction == "rowwise":
            start = min(max(columns.start + by * b, 0), max(k - b, 0))
            index = np.clip(np.arange(columns.start, columns.stop) + by * b, 0, k - 1)
            wide = own(scales, Region(rows, slice(min(start, columns.start), min(k, columns.stop + b))))
            return wide[:, index - min(start, columns.start)]
        start = min(max(rows.start + by * b, 0), rows.start)
        index = np.clip(np.arange(rows.start, rows.stop) + by * b, 0, m - 1)
        return own(scales, Region(slice(start, min(m, rows.stop + b)), columns))[index - start]

    replay.spread = spread


@computing(
    "wrong-axis-amax",
    "The block amax runs along {axis} in the {directions} copy: across the block, not along it.",
    stage="blocks",
    choices=[(how, d) for how in ("tile", "first", "element") for d in ("all", *DIRECTIONS)],
)
def wrong_axis_amax(replay, choice):
    how, which = choice
    require_blocks(replay)
    chosen = DIRECTIONS if which == "all" else (which,)
    replay.require(replay.block_shapes["rowwise"][0] == 1)
    replay.facts["axis"] = "the other axis" if which == "all" else {"rowwise": "M", "columnwise": "K"}[which]
    replay.facts["directions"] = "rowwise and columnwise" if which == "all" else which
    if how == "element":
        other = {"rowwise": "columnwise", "columnwise": "rowwise"}
        shapes = replay.block_shapes
        replay.block_shapes = {d: shapes[other[d]] if d in chosen else shapes[d] for d in DIRECTIONS}
        return
    b = replay.layout.block[1]
    state = {}

    def quantize_blocks(own, values, amax_values, direction, region):
        state["direction"] = direction
        return own(values, amax_values, direction, region)

    def across(own, blocks):
        if state["direction"] not in chosen:
            return own(blocks)
        rows, block_rows, columns, block_columns = blocks.shape
        matrix = blocks.reshape(rows * block_rows, columns * block_columns)
        if state["direction"] == "columnwise":
            matrix = matrix.T
        count, width = matrix.shape
        padded = np.zeros((math.ceil(count / b) * b, width), F)
        padded[:count] = matrix
        maxima = np.fmax.reduce(np.abs(padded.reshape(-1, b, width)), axis=1, initial=F(0))  # (tiles, width)
        tiles = maxima.reshape(len(maxima), width // b, b)
        if how == "tile":  # row t of a tile takes the amax of column t
            result = tiles.transpose(0, 2, 1).reshape(len(maxima) * b, width // b)[:count]
        else:
            result = np.repeat(tiles[:, :, 0], b, axis=0)[:count]
        return np.ascontiguousarray(result.T if state["direction"] == "columnwise" else result)

    replay.wrap("quantize_blocks", quantize_blocks)
    replay.wrap("block_amax", across)


@computing(
    "wrong-block-size",
    "A scale covers {found} elements, where {own} were asked for.",
    stage="blocks",
    choices=lambda replay: [(size, how) for how in ("at its run", "in a row") for size in _other_block_sizes(replay)],
)
def wrong_block_size(replay, choice):
    size, how = choice
    own = replay.layout.block[1]
    replay.facts["found"], replay.facts["own"] = size, own
    if how == "in a row":
        _place_in_a_row(replay, size)
    replay.block_shapes = {
        direction: tuple(size if edge == own else edge for edge in shape)
        for direction, shape in replay.block_shapes.items()
    }


def _other_block_sizes(replay):
    """The block sizes of all scalings, half the right size and twice it; none larger than a replay's region."""
    require_blocks(replay)
    own = replay.layout.block[1]
    sizes = dict.fromkeys((16, 32, 64, 128, own // 2, 2 * own))
    return [size for size in sizes if size != own and size <= TILE]


def _place_in_a_row(replay, size):
    """Let scales of `size` elements lie one beside the other, where padding gives both sizes the same array.

    Only where a region holds all blocks of a line: those of a few elements.
    """
    layout = replay.layout
    other = replace(layout, block=tuple(size if edge == layout.block[1] else edge for edge in layout.block))
    given = [d for d in DIRECTIONS if f"{d}_scale_inv" in replay.setting.outputs]
    replay.require(given)
    for columnwise in (direction == "columnwise" for direction in given):
        same = other.scale_shape(replay.shape, columnwise) == layout.scale_shape(replay.shape, columnwise)
        replay.require(same and layout.oriented(replay.shape, columnwise)[1] <= TILE)

    def place_scales(scales, direction, region):
        geometry, inner = Geometry.of(replay.case.scaling, direction), int(direction == "rowwise")
        block = list(replay.block_shapes[direction])
        block[inner] = geometry.run[inner]
        lacking = math.ceil(region.shape[inner] / block[inner]) - scales.shape[inner]
        widths = [(0, max(lacking, 0) * (axis == inner)) for axis in (0, 1)]
        return geometry.store_scales(np.pad(scales, widths), tuple(block), region.shape)

    replay.place_scales = place_scales


@computing(
    "two-d-ignored",
    "A scale covers one row of a block, where one scale for a square tile was asked for.",
    stage="blocks",
    fields=("two_d", "block_dim"),
)
def two_d_ignored(replay):
    require_blocks(replay)
    b = replay.layout.block[1]
    replay.require(replay.block_shapes["rowwise"] == (b, b))
    replay.block_shapes = {"rowwise": (1, b), "columnwise": (b, 1)}


@computing(
    "two-d-scales", "A scale covers a square tile, where one for each row of a block was asked for.", stage="blocks"
)
def two_d_scales(replay):
    require_blocks(replay)
    b = replay.layout.block[1]
    replay.require(replay.block_shapes["rowwise"] == (1, b))
    replay.block_shapes = dict.fromkeys(DIRECTIONS, (b, b))


@computing("tensor-scale-for-blocks", "All blocks share the scale of the whole tensor's amax.", stage="block-amax")
def tensor_scale_for_blocks(replay):
    require_blocks(replay)
    replay.require(replay.layout.amax != "rows")
    for direction in DIRECTIONS:
        scales = replay.setting.outputs.get(f"{direction}_scale_inv")
        if scales is not None:
            valid = crop(replay.case, f"{direction}_scale_inv", scales, whole(replay.shape))
            replay.require((valid == valid.flat[0]).all() if valid.size else True)
    if replay.layout.amax is None:
        replay.amax_rounded = replay.casts_rounded
    amax = replay.whole_amax("rowwise", None, None)
    replay.after("block_amax", lambda own: np.full_like(own, amax[0]))


@computing(
    "row-amax-missing",
    "All rows share the tensor's amax, where each row (column) has its own.",
    stage="tensor-amax",
    fields=("row_scaled",),
)
def row_amax_missing(replay):
    require_scaling(replay)
    replay.require(replay.layout.amax == "rows")
    own = replay.tensor_amax

    def tensor_amax(direction, region):
        amax = replay.whole_amax(
            direction, slice(0, replay.shape[direction == "columnwise"]), int(direction == "rowwise")
        )
        return np.full_like(own(direction, region), np.fmax.reduce(amax, initial=F(0)))

    replay.tensor_amax = tensor_amax


# --- blocks of zeros ------------------------------------------------------------------------------
# They come before the rules of all blocks: what shows in blocks of zeros alone is said of them. But a small power of
# two there is a clamp of every scale sooner than one of zeros.


@computing(
    "clamped-block-scale",
    "Block scales are clamped to {least:g} or more, where TE keeps smaller ones.",
    stage="clamp",
    choices=lambda replay: _small_scales(replay),
)
def clamped_block_scale(replay, choice):
    replay.facts["least"] = choice
    _clamp(replay, choice)


def _small_scales(replay):
    """The least normal scale, then the powers of two below it from the least scale on."""
    require_two_levels(replay)
    fmt = replay.layout.scale_format
    normal, least = float(fmt.smallest_normal), float(fmt.smallest_subnormal)
    return [normal, *(least * 2.0**i for i in range(round(math.log2(normal / least))))]


@computing(
    "zero-block-scale",
    "A block of zeros gets the scale {found}, where TE's is {own}.",
    stage="zero-block",
    choices=lambda replay: replay.setting.scale_values,
)
def zero_block_scale(replay, choice):
    require_own_amax(replay)
    replay.facts["found"] = choice if isinstance(choice, np.floating) else f"0x{int(choice):02X}"
    one = np.ones((1, 1), F)
    zero = replay.setting.replay().scales(np.zeros((1, 1), F), one)[0].reshape(-1)[0]
    replay.facts["own"] = zero if zero.dtype == F else f"0x{int(zero):02X}"
    replay.require(zero.dtype == np.asarray(choice).dtype)
    if replay.layout.two_level:  # what elements are multiplied by follows
        own_code = replay.scale_code
        replay.scale_code = lambda rule, amax, tensor_scale: np.where(
            amax == 0, choice, own_code(rule, amax, tensor_scale)
        ).astype(np.uint8)
        return
    own_scales = replay.scales

    def scales(amax, tensor_amax):
        written, multiplier = own_scales(amax, tensor_amax)
        return np.where(amax == 0, choice, written).astype(written.dtype), multiplier

    replay.scales = scales


def _has_byte_0(replay):
    """Whether the reference has a block of scale byte 0."""
    case, reference = replay.case, replay.setting.reference
    names = [name for name in reference if name.endswith("_scale_inv")]
    return any((reference[name][case.slots[name].valid_slices] == 0).any() for name in names)


def _set_multiplier_of_zero(replay, which, multiplier):
    """Let what elements are multiplied by be `multiplier` in blocks whose scale byte, or whose amax, is 0."""
    if which == "scale byte":
        require_coded_scales(replay)
        replay.require(_has_byte_0(replay))
        replay.wrap(
            "code_multiplier",
            lambda inner, code, tensor_scale: np.where(code == 0, multiplier, inner(code, tensor_scale)).astype(F),
        )
        return
    require_blocks(replay)
    require_own_amax(replay)
    replay.require(replay.rule.choice is None)

    def scales(inner, amax, tensor_amax):
        written, own = inner(amax, tensor_amax)
        return written, np.where(amax == 0, multiplier, own).astype(F)

    replay.wrap("scales", scales)


@computing(
    "zero-block-nan",
    "A block whose {which} is 0 gets the multiplier 1 / 0 = inf, and 0 * inf is NaN: TE's multiplier is finite there.",
    stage="multiplier",
    choices=("scale byte", "amax"),
)
def zero_block_nan(replay, choice):
    replay.facts["which"] = choice
    _set_multiplier_of_zero(replay, choice, F(np.inf))


@computing(
    "zero-block-guard",
    "Elements of a block whose {which} is 0 {what}; TE multiplies them by a finite number that is not 0.",
    stage="multiplier",
    choices=(("scale byte", "multiplied"), ("scale byte", "cleared"), ("amax", "cleared")),
    alone=True,
)
def zero_block_guard(replay, choice):
    replay.facts["which"], how = choice
    multiplied = how == "multiplied"
    replay.facts["what"] = "are multiplied by 0, or nearly" if multiplied else "become +0, whatever they are"
    _set_multiplier_of_zero(replay, choice[0], F(0))
    if not multiplied:
        replay.wrap(
            "multiply",
            lambda inner, values, multiplier: np.where(multiplier == 0, F(0), inner(values, multiplier)),
        )


# --- E8M0 bytes -----------------------------------------------------------------------------------

#: What the rules are called; emax is the exponent of the format's largest value.
RULE_NAMES = {
    "up": "round-up rule, amax / max rounded up to a power of two",
    "floor": "OCP floor rule, 2^(floor(log2 amax) - {emax})",
    "even": "OCP even rule, amax rounded to the format's mantissa first",
    "ceil_ocp": "OCP ceil rule, 2^(ceil(log2 amax) - {emax})",
}


@cache
def rule_of(scaling):
    """Which of `E8M0_ROUNDINGS` gives the bytes that a scaling declares, None for another rule."""
    mantissas = np.arange(0, 1 << 23, 1 << 18, dtype=np.uint32)  # the formats' own, their midpoints, and beside them
    mantissas = np.concatenate([mantissas, mantissas + np.uint32(1), (mantissas - np.uint32(1)) & np.uint32(0x7FFFFF)])
    amax = ((np.arange(255, dtype=np.uint32) << np.uint32(23))[:, None] + mantissas).view(F)
    with np.errstate(all="ignore"):
        own = scaling.scale_code(REFERENCE)(amax, F(0), Numbers(F(0), FLT_MAX))
        same = [rule for rule in E8M0_ROUNDINGS if np.array_equal(own, other_byte(scaling.fmt, rule)(amax))]
    return same[0] if same else None


def other_byte(fmt, rule):
    """f(amax) -> byte by one of `E8M0_ROUNDINGS`, for elements of `fmt`."""
    settings = E8M0Scaling()
    settings.fmt, settings.scale_rounding = fmt, rule
    byte = settings.scale_code(REFERENCE)
    return lambda amax: byte(amax, F(0), None)


def _set_byte(replay, byte):
    """Let the scale bytes be `byte(amax)`, of amaxes that are amax_epsilon at least."""
    replay.scale_code = lambda declared, amax, tensor_scale: byte(replay.bounded(amax))


def _other_rule(replay, rule):
    require_powers_of_two(replay)
    own = rule_of(replay.case.scaling)
    replay.require(own != rule)
    expected = "TE has the " if own == "up" else "the settings ask for the "
    emax = replay.facts["emax"] = math.floor(math.log2(replay.fmt.max))
    own_rule = expected + RULE_NAMES[own].format(emax=emax) if own else "the settings have a rule of their own"
    replay.facts["expected"] = own_rule
    if rule in RULE_NAMES:
        _set_byte(replay, lambda amax: other_byte(replay.fmt, rule)(amax))


@computing(
    "scale-floor",
    "The scale bytes follow the OCP floor rule, 2^(floor(log2 amax) - {emax}), where {expected}.",
    stage="scale",
    fields=("scale_rounding",),
)
def scale_floor(replay):
    _other_rule(replay, "floor")


@computing(
    "scale-up", "The scale bytes round amax / max up to a power of two, TE's rule, where {expected}.", stage="scale"
)
def scale_up(replay):
    _other_rule(replay, "up")


@computing(
    "scale-even",
    "The scale bytes follow the OCP even rule (amax rounded to the format's mantissa first), where {expected}.",
    stage="scale",
)
def scale_even(replay):
    _other_rule(replay, "even")


@computing(
    "scale-ceil-ocp",
    "The scale bytes follow the OCP ceil rule, 2^(ceil(log2 amax) - {emax}), where {expected}.",
    stage="scale",
)
def scale_ceil_ocp(replay):
    _other_rule(replay, "ceil_ocp")


@computing(
    "scale-nearest",
    "The scale bytes round amax / max to the nearest power of two{how}, where {expected}.",
    stage="scale",
    choices=("value", "logarithm"),
)
def scale_nearest(replay, choice):
    _other_rule(replay, "nearest")
    replay.facts["how"] = "" if choice == "value" else " by its logarithm"

    def byte(amax):
        ratio = amax * (F(1) / replay.scale_max)
        if choice == "value":
            return encode_tile(ratio, E8M0, rounding="nearest_even")
        return log_byte(np.rint(np.log2(ratio)), amax)

    _set_byte(replay, byte)


def log_byte(exponent, amax):
    """Scale byte of a float exponent; 0 for amax 0, the largest for inf."""
    exponent = np.where(np.isfinite(exponent), exponent, -E8M0.bias)
    byte = np.clip(exponent + E8M0.bias, 0, E8M0.largest_code).astype(np.uint8)
    return np.where(np.isinf(amax), np.uint8(E8M0.largest_code), byte)


@computing(
    "scale-log2",
    "The scale's exponent comes from a float32 log2, which is off by one next to powers of two.",
    stage="scale",
    choices=("ceil, divided", "ceil, multiplied", "floor", "ceil of difference"),
)
def scale_log2(replay, choice):
    require_powers_of_two(replay)

    def byte(amax):
        emax = F(math.floor(math.log2(replay.scale_max)))
        if choice == "floor":
            exponent = np.floor(np.log2(amax)) - emax
        elif choice == "ceil, divided":
            exponent = np.ceil(np.log2(amax / replay.scale_max))
        elif choice == "ceil, multiplied":
            exponent = np.ceil(np.log2(amax * (F(1) / replay.scale_max)))
        else:
            exponent = np.ceil(np.log2(amax) - np.log2(replay.scale_max))
        return log_byte(exponent, amax)

    replay.require(rule_of(replay.case.scaling) == ("floor" if choice == "floor" else "up"))
    _set_byte(replay, byte)


@computing(
    "scale-divided",
    "amax is divided by the format's maximum, where TE multiplies by the float32 reciprocal: they differ where the "
    "quotient is a power of two.",
    stage="scale",
)
def scale_divided(replay):
    require_powers_of_two(replay)
    replay.require(rule_of(replay.case.scaling) == "up")
    _set_byte(replay, lambda amax: encode_tile(amax / replay.scale_max, E8M0, rounding="up"))


@computing(
    "scale-quotient-floor",
    "The scale byte is 127 + floor(log2(amax / {largest:g})), a floor of the quotient, where {expected}; {codes}.",
    stage=lambda choice: "stored" if choice == "stored" else "scale",
    choices=("both", "stored"),
)
def scale_quotient_floor(replay, choice):
    _other_rule(replay, "quotient floor")
    largest = replay.facts["largest"] = float(replay.scale_max)
    _follow_byte(replay, lambda amax: _exponent_of(amax / F(largest)), choice)


@computing(
    "scale-above-quotient",
    "The scale byte is 128 + floor(log2(amax / {largest:g})): above the quotient also where that is a power of two, "
    "where {expected}.",
    stage="scale",
    choices=[("multiplied", 0, 254), ("multiplied", 1, 254), ("multiplied", 1, 255), ("divided", 1, 255)],
)
def scale_above_quotient(replay, choice):
    how, zero, infinite = choice
    _other_rule(replay, "quotient floor")
    largest = replay.facts["largest"] = float(replay.scale_max)

    def byte(amax):
        quotient = amax / F(largest) if how == "divided" else amax * (F(1) / F(largest))
        above = np.fmin(_exponent_of(quotient).astype(int) + 1, infinite)
        return np.where(quotient == 0, zero, above).astype(np.uint8)

    _follow_byte(replay, byte, "both")


@computing(
    "scale-emax-missing",
    "The scale byte is 127 + {rule}(log2 amax), without the format's exponent {emax}, where {expected}; {codes}.",
    stage=lambda choice: "stored" if choice[1] == "stored" else "scale",
    choices=[(rule, what) for what in ("both", "stored") for rule in ("floor", "ceil", "even")],
)
def scale_emax_missing(replay, choice):
    rule, what = choice
    _other_rule(replay, "emax missing")
    replay.facts["rule"] = {"even": "round"}.get(rule, rule)
    emax = replay.facts["emax"]
    replay.require(emax)
    of_format = {"floor": "floor", "ceil": "ceil_ocp", "even": "even"}[rule]

    def byte(amax):
        code = other_byte(replay.fmt, of_format)(amax * F(2.0**emax))
        return np.where(np.isinf(amax * F(2.0**emax)), _exponent_of(amax), code).astype(np.uint8)

    _follow_byte(replay, byte, what)


def _exponent_of(positive):
    """The exponent field of float32 that is not negative, as a scale byte: 127 + floor(log2 x); 254 for inf and NaN."""
    field = (np.ascontiguousarray(positive, F).view(np.uint32) >> np.uint32(23)) & np.uint32(0xFF)
    return np.minimum(field, np.uint32(E8M0.largest_code)).astype(np.uint8)


def _follow_byte(replay, byte, what):
    """Let scale bytes be `byte(amax)`: for the cast as well ("both"), or what is stored alone."""
    if what == "both":
        replay.facts["codes"] = "the data are cast with that byte"
        _set_byte(replay, byte)
        return
    replay.facts["codes"] = "the data are cast with the right one"
    state = {}

    def scale_code(inner, rule, amax, tensor_scale):
        state["amax"] = replay.bounded(amax)
        return inner(rule, amax, tensor_scale)

    replay.wrap("scale_code", scale_code)
    replay.stored_scale = lambda code: byte(state["amax"])


@computing(
    "scale-off-by-one",
    "Each scale byte is one too {high}{how}.",
    stage=lambda choice: {"both": "scale", "stored": "stored", "cast": "multiplier"}[choice[1]],
    choices=[(by, what) for by in (1, -1) for what in ("both", "stored", "cast")],
    last=True,
)
def scale_off_by_one(replay, choice):
    by, what = choice
    if replay.dequantizes:
        replay.require(replay.layout.scale_format is not None and what == "both")
        replay.facts["high"], replay.facts["how"] = ("high" if by == 1 else "low"), " as it is read (the bias is off)"
        replay.wrap("read_scale", lambda inner, codes, fmt: inner(_moved(codes, by, fmt), fmt))
        return
    require_coded_scales(replay)
    replay.facts["high"] = "high" if by == 1 else "low"
    replay.facts["how"] = {
        "both": "",
        "stored": ", though the data are cast with the right one",
        "cast": " for the cast, though the right one is stored",
    }[what]
    replay.require(what == "cast" or not _one_for_another(replay))
    fmt = replay.layout.scale_format
    if what == "both":
        replay.after("scale_code", lambda code: _moved(code, by, fmt))
    elif what == "cast":
        replay.wrap("code_multiplier", lambda inner, code, tensor_scale: inner(_moved(code, by, fmt), tensor_scale))
    else:
        replay.after("stored_scale", lambda code: _moved(code, by, fmt))


def _moved(code, by, fmt):
    return np.clip(code.astype(int) + by, 0, fmt.largest_code).astype(np.uint8)


# --- which limits ---------------------------------------------------------------------------------


#: Formats that scales may have: all, and those of the scalings that there are.
SCALE_FORMATS = list(dict.fromkeys([*FORMATS.values(), *(row.scaling.layout.scale_format for row in NAMED.values())]))
SCALE_FORMATS.remove(None)
#: The largest values of the element formats, those of FP8 among them.
ELEMENT_MAXIMA = [float(fmt.max) for fmt in FORMATS.values() if fmt.signed]
FP8_MAXIMA = [float(fmt.max) for fmt in FP8_FORMATS]


class WithMaximum:
    """A format as a scale rule sees it, with another largest value."""

    def __init__(self, fmt, largest):
        self._fmt, self.max = fmt, F(largest)

    def __getattr__(self, name):
        return getattr(self._fmt, name)


def set_scale_max(replay, value):
    """Let the amax be mapped to `value` instead of the element format's maximum."""
    replay.vary(fmt=WithMaximum(replay.fmt, value))


@computing(
    "e4m3-max-240",
    "The amax is mapped to 240, the maximum of IEEE-like E4M3 (and E4M3FNUZ), where OCP's E4M3 has 448.",
    stage="limit",
)
def e4m3_max_240(replay):
    if replay.updates:
        replay.require(replay.fmt == E4M3)
        replay.after("fresh_scale", lambda scale: scale * F(240 / 448))
        return
    require_own_amax(replay)
    replay.require(replay.fmt == E4M3)
    set_scale_max(replay, 240)


#: Largest block scales that TE's settings allow.
E4M3_LIMITS = (448, 256)


@computing(
    "other-format-max",
    "The amax is mapped to {found:g}, where the maximum is {own:g}.",
    stage="limit",
    fields=("e4m3_max",),
    choices=lambda replay: dict.fromkeys([*ELEMENT_MAXIMA, *(E4M3_LIMITS if _has_two_levels(replay) else ())]),
)
def other_format_max(replay, choice):
    if not replay.updates and _has_two_levels(replay):
        if not replay.dequantizes:
            require_own_amax(replay)
        own = replay.case.scaling.e4m3_max
        replay.require(choice in E4M3_LIMITS and choice != own)
        replay.vary(e4m3_max=choice)
        replay.facts["found"], replay.facts["own"] = float(choice), float(own)
        return
    _map_to(replay, choice)


@computing(
    "other-limit",
    "The amax is mapped to {found:g}, which is no format's largest value, where the maximum is {own:g}.",
    stage="limit",
    choices=(256, 1, 127, 464, 512),
    last=True,
)
def other_limit(replay, choice):
    replay.require(replay.updates or not _has_two_levels(replay))
    _map_to(replay, choice)


def _has_two_levels(replay):
    """Whether the largest block scale is a setting."""
    return replay.layout is not None and replay.layout.two_level and hasattr(replay.case.scaling, "e4m3_max")


def _map_to(replay, largest):
    """Let the amax be mapped to another number than the largest value of the element format."""
    own = replay.fmt.max if replay.updates or replay.layout is not None else None
    replay.require(own is not None and largest != own)
    if replay.updates:
        replay.require(largest in (*FP8_MAXIMA, 1, 127))
        replay.after("fresh_scale", lambda scale: scale * (F(largest) / own))
    else:
        require_own_amax(replay)
        replay.require(not replay.layout.two_level)
        set_scale_max(replay, largest)
    replay.facts["found"], replay.facts["own"] = float(largest), float(own)


@computing(
    "element-max-4",
    "Block maxima are mapped to {found:g}, where TE maps them to {own:g}, the largest {fmt} value.",
    stage="limit",
)
def element_max_4(replay):
    require_two_levels(replay)
    replay.require(replay.rule.choice is None)
    found, own = replay.fmt.grid[-2:]
    replay.facts["found"], replay.facts["own"], replay.facts["fmt"] = found, own, replay.fmt
    larger = F(own / found)
    replay.wrap("scale_code", lambda inner, rule, amax, tensor_scale: inner(rule, amax * larger, tensor_scale))


@computing(
    "power-of-two-missing",
    "The scales are not rounded to powers of two.",
    stage="power-of-two",
    fields=("power_2_scale",),
)
def power_of_two_missing(replay):
    _require_power_of_two(replay, True)
    replay.vary(power_2_scale=False)


@computing(
    "power-of-two-extra",
    "The {what} rounded {how} to powers of two.",
    stage="power-of-two",
    choices=("down", "up"),
)
def power_of_two_extra(replay, choice):
    replay.facts["what"] = "scales are"
    replay.facts["how"] = "down" if choice == "down" else "up"
    if replay.updates:
        replay.require(choice == "down")
        replay.after("fresh_scale", power_of_two_below)
        return
    if replay.scaling is not None and replay.scaling.given is not None:
        require_scaling(replay)
        replay.require(choice == "down")
        replay.after("encode_scale", power_of_two_below)
        return
    _require_power_of_two(replay, False)
    if choice == "down":
        replay.vary(power_2_scale=True)
    else:
        replay.after("encode_scale", power_of_two_above)


def _require_power_of_two(replay, wanted):
    """NotApplicable unless float32 scales may be rounded to powers of two, and are (or are not)."""
    require_float_scales_of_amax(replay)
    replay.require(replay.scaling.power_2_scale is wanted)


def power_of_two_above(scale):
    """The power of two at or above positive float32."""
    below = power_of_two_below(scale)
    return np.where(below == scale, scale, below * F(2)).astype(F)


@computing(
    "power-of-two-up",
    "The encode scales are rounded {how} power of two, where TE rounds down.",
    stage="power-of-two",
    choices=("up", "nearest"),
)
def power_of_two_up(replay, choice):
    _require_power_of_two(replay, True)
    replay.vary(power_2_scale=False)
    replay.facts["how"] = {"up": "up to the next", "nearest": "to the nearest"}[choice]
    if choice == "up":
        replay.after("encode_scale", power_of_two_above)
    else:
        replay.after("encode_scale", lambda scale: np.exp2(np.rint(np.log2(scale))).astype(F))


@computing("epsilon-missing", "amax_epsilon is ignored.", stage="epsilon", fields=("amax_epsilon",))
def epsilon_missing(replay):
    require_own_amax(replay)
    replay.require(replay.numbers.epsilon > 0)
    replay.numbers = replay.numbers._replace(epsilon=F(0))


@computing(
    "epsilon-extra",
    "The amax {what} {epsilon:g}, which {own}.",
    stage="epsilon",
    last=True,
    choices=[(e, how) for e in EPSILONS for how in ("bound", "sum")],
)
def epsilon_extra(replay, choice):
    epsilon, how = choice
    require_own_amax(replay)
    replay.facts["epsilon"] = epsilon
    replay.facts["what"] = "is at least" if how == "bound" else "has an addend of"
    replay.facts["own"] = "TE does not have"
    own = replay.numbers.epsilon
    replay.require(own != F(epsilon))
    if own:
        replay.facts["own"] = f"is not the amax_epsilon of the settings, {own:g}"
        replay.numbers = replay.numbers._replace(epsilon=F(0))
    change = (lambda amax: np.maximum(amax, F(epsilon))) if how == "bound" else (lambda amax: amax + F(epsilon))
    if replay.layout.block is None:
        replay.wrap("encode_scale", lambda inner, amax: inner(change(amax)))
    else:
        replay.after("block_amax", change)


# --- what is stored, what is multiplied -----------------------------------------------------------


@computing(
    "inverted-scale",
    "{what}, the reciprocal of what TE has.",
    stage=lambda choice: {"both": "scale", "stored": "stored", "multiplied": "multiplier"}[choice],
    choices=("stored", "multiplied", "both"),
)
def inverted_scale(replay, choice):
    if replay.updates:
        replay.require(choice == "both")
        replay.facts["what"] = "The scale is amax / max"
        replay.after("fresh_scale", lambda scale: F(1) / scale)
        return
    if replay.dequantizes:
        replay.require(choice == "both")
        replay.facts["what"] = "Elements are divided by the stored scale"
        replay.after("read_scale", lambda scale: F(1) / scale)
        return
    require_scaling(replay)
    replay.facts["what"] = {
        "stored": "The stored scales are encode scales, max / amax",
        "multiplied": "Elements are multiplied by the decode scale",
        "both": "Elements are multiplied by amax / max and its reciprocal is stored",
    }[choice]
    fmt = replay.layout.scale_format
    if fmt is None:
        if choice == "both":
            replay.after("encode_scale", lambda scale: F(1) / scale)
        elif choice == "stored":
            replay.decode_scale = lambda scale: scale
        else:
            replay.wrap("multiply", lambda inner, values, scale: inner(values, F(1) / scale))
    elif choice == "multiplied":
        replay.after("code_multiplier", lambda multiplier: F(1) / multiplier)
    else:
        replay.require(choice == "stored" or not replay.layout.two_level)
        stage = "scale_code" if choice == "both" else "stored_scale"
        replay.after(stage, lambda code: encode_tile(F(1) / fmt.values[code], fmt))


@computing(
    "multiplier-missing",
    "Elements are cast {what}, though the stored scales are right: look for the product that the cast should take.",
    stage="multiplier",
    choices=("all", "block"),
)
def multiplier_missing(replay, choice):
    require_own_amax(replay)  # a scale that is given may be another one, 1: stale-scale says so
    replay.require(replay.rule.choice is None)
    if choice == "all":
        replay.facts["what"] = "as they are, without a multiplier"
        replay.multiply = lambda values, multiplier: values
        return
    require_two_levels(replay)
    replay.facts["what"] = "with the tensor's scale alone, without that of their block"
    replay.code_multiplier = lambda code, tensor_scale: np.broadcast_to(tensor_scale[0], code.shape)


OTHER_COPY = dict(zip(DIRECTIONS, reversed(DIRECTIONS), strict=True))


@computing(
    "multiplier-of-other-copy",
    "The {directions} codes are cast with the scales of the {others} blocks, though the stored scales are right: look "
    "at which multiplier is kept for the second cast.",
    stage="multiplier",
    choices=[("columnwise",), ("rowwise",), DIRECTIONS],
    alone=True,
)
def multiplier_of_other_copy(replay, choice):
    require_blocks(replay)
    shapes = replay.block_shapes
    replay.require(replay.rule.choice is None and shapes["rowwise"] != shapes["columnwise"])
    replay.require(len(choice) < 2 or all(f"{d}_data" in replay.setting.outputs for d in DIRECTIONS))
    both = len(choice) > 1
    replay.facts["directions"] = " and the ".join(choice)
    replay.facts["others"] = "other copy's" if both else OTHER_COPY[choice[0]]

    def spread(inner, multiplier, direction, region):
        if direction not in choice:
            return inner(multiplier, direction, region)
        other = OTHER_COPY[direction]
        rows, columns = shapes[other]
        blocks = padded_blocks(replay.operands(other, region)[1], rows, columns)
        _, multiplier = replay.scales(*replay.amaxes(blocks, other, region))
        (m, k), elements = region.shape, np.repeat(np.repeat(multiplier, rows, axis=0), columns, axis=1)
        return padded_blocks(elements[:m, :k], *shapes[direction])

    replay.wrap("spread", spread)


@computing(
    "scale-inverse-separate",
    "The stored scale is {what}, where TE stores the float32 reciprocal of the encode scale.",
    stage="stored",
    choices=("amax / max", "amax * (1 / max)", "amax / max, multiplied by its reciprocal"),
)
def scale_inverse_separate(replay, choice):
    _require_power_of_two(replay, False)
    replay.facts["what"] = choice.partition(",")[0]
    inner = replay.encode_scale
    state = {}

    def encode_scale(amax):
        amax = replay.bounded(amax)
        scale = inner(amax)
        quotient = amax * (F(1) / replay.scale_max) if "*" in choice else amax / replay.scale_max
        usual = (amax > 0) & np.isfinite(amax) & np.isfinite(F(1) / quotient)
        state["inverse"] = np.where(usual, quotient, F(1) / scale)
        return np.where(usual, F(1) / quotient, scale) if "," in choice else scale

    replay.encode_scale = encode_scale
    replay.decode_scale = lambda scale: state["inverse"]


@computing(
    "inexact-reciprocal",
    "The stored scales are off by up to {ulp} in the last place: their reciprocal is an approximation (rcp.approx, "
    "fast division), where TE's is rounded correctly.",
    stage="stored",
    last=True,
)
def inexact_reciprocal(replay):
    require_float_scales(replay)
    outputs, reference = replay.setting.outputs, replay.setting.reference
    names = [name for d in DIRECTIONS if (name := f"{d}_scale_inv") in outputs]
    steps = [np.abs(ordered(outputs[name], F_TYPE) - ordered(reference[name], F_TYPE)) for name in names]
    most = max((int(found.max()) for found in steps if found.size), default=0)
    replay.require(0 < most <= RECIPROCAL_ULP)
    replay.facts["ulp"] = f"{most} unit{'s' * (most > 1)}"

    def place_scales(inner, scales, direction, region):
        own, name = inner(scales, direction, region), f"{direction}_scale_inv"
        return crop(replay.case, name, outputs[name], region).reshape(own.shape) if name in outputs else own

    replay.wrap("place_scales", place_scales)


@computing(
    "scale-rounded-to-bf16",
    "The {what} rounded to bfloat16, where TE keeps float32.",
    stage="scale-dtype",
    choices=("encode scale is", "stored scale is", "stored scale and the multiplier are", "scale is"),
)
def scale_rounded_to_bf16(replay, choice):
    replay.facts["what"] = choice
    to_bf16 = lambda scale: np.asarray(scale).astype(BFLOAT16).astype(F)  # noqa: E731
    if not replay.computes:
        replay.require(choice == "scale is")
        replay.after("block_factor" if replay.dequantizes else "fresh_scale", to_bf16)
        return
    require_float_scales(replay)
    replay.require(choice != "scale is")
    if choice.startswith("encode"):
        replay.after("encode_scale", to_bf16)
    else:
        replay.after("decode_scale", to_bf16)
        if "multiplier" in choice:
            replay.wrap("multiply", lambda inner, values, scale: inner(values, F(1) / to_bf16(F(1) / scale)))


@computing(
    "multiplier-low-precision",
    "{what} rounded to {dtype}, where TE keeps float32{overflow}.",
    stage=lambda choice: "multiplier" if choice[1] == "multiplier" else "scale-dtype",
    choices=[(d, w) for w in ("multiplier", "scale", "tensor scale") for d in ("bfloat16", "float16")],
)
def multiplier_low_precision(replay, choice):
    name, what = choice
    require_scaling(replay)
    dtype = {"bfloat16": BFLOAT16, "float16": np.dtype(np.float16)}[name]
    replay.facts["dtype"] = dtype
    to_dtype = lambda scale: np.asarray(scale).astype(dtype).astype(F)  # noqa: E731
    if what == "tensor scale":
        require_two_levels(replay)
        replay.facts["what"] = "The encode scale of the tensor is"
        set_encode_scale(replay, lambda own, amax: to_dtype(own))
    elif what == "scale":
        require_float_scales(replay)
        replay.require(name == "float16")  # the other one is scale-rounded-to-bf16
        replay.facts["what"] = "The encode scale is"
        replay.after("encode_scale", to_dtype)
    else:
        replay.facts["what"] = "What each element is multiplied by is"

        def multiply(inner, values, multiplier):
            rounded = to_dtype(multiplier)
            if (np.isinf(rounded) & np.isfinite(multiplier)).any():
                replay.facts["overflow"] = (
                    f"; multipliers beyond {LARGEST_FINITE[dtype]:.6g} become inf, and 0 * inf NaN"
                )
            return inner(values, rounded)

        replay.wrap("multiply", multiply)


@computing(
    "divided-by-scale",
    "Elements are divided by the scale, where TE multiplies by its reciprocal: the last bit differs.",
    stage="multiply",
    choices=("decode", "exact", "global", "global encode", "block"),
)
def divided_by_scale(replay, choice):
    require_scaling(replay)
    replay.require(replay.layout.scale_format != E8M0)  # exact either way
    if choice == "decode":
        replay.wrap("multiply", lambda inner, values, multiplier: values / (F(1) / multiplier))
        return
    if not replay.layout.two_level:
        require_float_scales_of_amax(replay)
        replay.require(choice == "exact")
        state = {}
        own = replay.encode_scale

        def encode_scale(amax):
            state["inverse"] = replay.bounded(amax) / replay.scale_max
            return own(amax)

        replay.encode_scale = encode_scale

        def divide(values, multiplier):
            inverse = state["inverse"][:, None, :, None]
            is_its_reciprocal = (
                np.abs(inverse * multiplier - 1) < 2.0**-20
            )  # not where it was rounded to a power of two
            return np.where((multiplier != 1) & is_its_reciprocal, values / inverse, values * multiplier).astype(F)

        replay.multiply = divide
        return
    replay.require(choice != "exact")
    state = {}

    def code_multiplier(inner, code, tensor_scale):
        values = replay.layout.scale_format.values[code]
        state["scale"], state["s_enc"] = values[:, None, :, None], tensor_scale[0][:, None, :, None]
        return inner(code, tensor_scale)

    def multiply(inner, values, multiplier):
        scale, s_enc = state["scale"], state["s_enc"]
        usual = np.isfinite(multiplier) & (multiplier < FLT_MAX) & (scale > 0)
        if choice == "global":
            scaled = values / (scale * (F(1) / s_enc))
        elif choice == "global encode":
            scaled = values * (s_enc / scale)
        else:
            scaled = (values * s_enc) / scale
        return np.where(usual, scaled, inner(values, multiplier)).astype(F)

    replay.wrap("code_multiplier", code_multiplier)
    replay.wrap("multiply", multiply)


# --- two levels -----------------------------------------------------------------------------


@computing(
    "missing-global-scale",
    "{what}: the tensor's amax plays no part.",
    stage="global-scale",
    choices=("all", "stored", "multiplier", "amax 0"),
)
def missing_global_scale(replay, choice):
    if replay.dequantizes:
        replay.require(replay.layout.two_level and choice == "all")
        replay.facts["what"] = "Elements are multiplied by the block scale alone"
        replay.block_factor = lambda scales, region: replay.read_scale(scales, replay.layout.scale_format)
        return
    require_two_levels(replay)
    replay.facts["what"] = {
        "all": f"The block scale is amax / {replay.fmt.max:g} alone",
        "stored": f"The stored block scale is amax / {replay.fmt.max:g} alone",
        "multiplier": "Elements are divided by the block scale alone",
        "amax 0": "The amax is written as 0, and scales are made of that, as if none had been found",
    }[choice]
    if choice == "all":
        replay.after("tensor_scale", _ones)
    elif choice == "amax 0":
        setting = replay.setting
        held = {d: setting.outputs[f"amax_{d}"] for d in DIRECTIONS if f"amax_{d}" in setting.outputs}
        replay.require(any((amax == 0).all() and _something_follows(setting, d) for d, amax in held.items()))
        replay.wrap("tensor_scale", lambda inner, amax: inner(np.zeros_like(amax)))
        replay.stored_amax = lambda amax, direction: np.zeros_like(amax)
    elif choice == "multiplier":
        replay.wrap("code_multiplier", lambda inner, code, tensor_scale: inner(code, _ones(tensor_scale)))
    else:
        replay.wrap("scale_code", lambda inner, rule, amax, tensor_scale: inner(rule, amax, _ones(tensor_scale)))


def _ones(tensor_scale):
    return tuple(np.ones_like(scale) for scale in tensor_scale)


def _clamp(replay, least):
    """Let block scales be `least` or more before their cast."""
    largest = replay.layout.scale_format.max
    replay.wrap("cast_scale", lambda inner, scale, *how: inner(np.clip(scale, F(least), largest), *how))


@computing(
    "one-level-nvfp4",
    "{title} has one level: the block scale is amax / {largest:g} clamped to 2^{exponent} or more, and the tensor's "
    "amax plays no part.",
    stage="global-scale",
)
def one_level_nvfp4(replay):
    require_two_levels(replay)
    least = replay.layout.scale_format.smallest_normal
    replay.facts["title"], replay.facts["largest"] = replay.scaling.title, replay.fmt.max
    replay.facts["exponent"] = round(math.log2(least))
    replay.after("tensor_scale", _ones)
    _clamp(replay, least)


@computing(
    "global-scale-by-division",
    "The tensor's scale is the inverse of amax / {limit:g}, where TE divides {limit:g} by the amax: last bits differ.",
    stage="global-scale",
)
def global_scale_by_division(replay):
    require_two_levels(replay)
    limit = replay.facts["limit"] = tensor_limit(replay)

    def change(own, amax):
        scale = F(1) / (amax / limit)
        return np.where(np.isfinite(scale) & (amax > 0) & np.isfinite(amax), scale, own)

    set_encode_scale(replay, change)


@computing(
    "block-scale-order",
    "The block scale is computed as {what}: its last bit differs from TE's amax * (S_enc * 1/{largest:g}).",
    stage="scale",
    choices=(
        "(amax / 6) * S_enc",
        "(amax * S_enc) / 6",
        "(amax / 6) / (1 / S_enc)",
        "amax * S_enc * 1/6",
        "(amax / 6) / S_dec",
    ),
)
def block_scale_order(replay, choice):
    require_two_levels(replay)
    replay.require(replay.rule.choice is None)
    largest, limit, fmt, state = replay.fmt.max, tensor_limit(replay), replay.layout.scale_format, {}
    replay.facts["what"], replay.facts["largest"] = choice.replace("6", f"{largest:g}"), largest

    def tensor_scale(inner, amax):
        state["decode"] = amax / limit
        return inner(amax)

    def scale_code(rule, amax, tensor_scale):
        s_enc, s_dec = tensor_scale
        scale = {
            "(amax / 6) * S_enc": lambda: (amax / largest) * s_enc,
            "(amax * S_enc) / 6": lambda: (amax * s_enc) / largest,
            "(amax / 6) / (1 / S_enc)": lambda: (amax / largest) / s_dec,
            "amax * S_enc * 1/6": lambda: (amax * s_enc) * (F(1) / largest),
            "(amax / 6) / S_dec": lambda: (amax / largest) / np.where(state["decode"] == 0, F(1), state["decode"]),
        }[choice]()
        return replay.cast_scale(np.fmin(scale, FLT_MAX).astype(F), fmt, "nearest_even")

    replay.wrap("tensor_scale", tensor_scale)
    replay.scale_code = scale_code


@computing(
    "block-scale-cast",
    "The block scale is cast to {fmt} {how}, where TE rounds to nearest even.",
    stage="scale-cast",
    choices=("toward_zero", "up", "nearest_away"),
)
def block_scale_cast(replay, choice):
    require_two_levels(replay)
    replay.facts["fmt"] = replay.layout.scale_format
    replay.facts["how"] = {"toward_zero": "by truncation", "up": "upwards", "nearest_away": "with ties away from zero"}[
        choice
    ]
    replay.wrap("cast_scale", lambda inner, scale, fmt, rounding: inner(scale, fmt, choice))


@computing(
    "scale-unrounded-for-cast",
    "Elements are multiplied by the block scale before its cast, where TE decodes the stored byte.",
    stage="multiply",
)
def scale_unrounded_for_cast(replay):
    require_two_levels(replay)
    replay.require(replay.rule.choice is None)
    state = {}

    def scale_code(inner, rule, amax, tensor_scale):
        state["amax"] = amax
        return inner(rule, amax, tensor_scale)

    def code_multiplier(inner, code, tensor_scale):
        own, amax = inner(code, tensor_scale), state["amax"]
        return np.where(amax > 0, np.fmin(replay.fmt.max / amax, FLT_MAX), own).astype(F)

    replay.wrap("scale_code", scale_code)
    replay.wrap("code_multiplier", code_multiplier)


@computing(
    "missing-factor",
    "The factor 1 / ({element} * {scale}) of {title}'s global scale is left out{what}.",
    stage="factor",
    choices=("all", "6", "max"),
)
def missing_factor(replay, choice):
    replay.require(replay.layout is not None and replay.layout.two_level)
    element = replay.fmt.max
    scale = tensor_limit(replay) / element
    replay.facts["title"], replay.facts["element"], replay.facts["scale"] = (
        replay.scaling.title,
        f"{element:g}",
        f"{scale:g}",
    )
    replay.facts["what"] = {"all": "", "6": f" except for the {element:g}", "max": f" except for the {scale:g}"}[choice]
    kept = {"all": F(1), "6": element, "max": scale}[choice]
    if replay.dequantizes:
        fmt = replay.layout.scale_format
        replay.block_factor = lambda scales, region: (
            (replay.read_scale(scales, fmt) * replay.amax(region)) * (F(1) / kept)
        )
    else:
        require_scaling(replay)
        set_encode_scale(replay, lambda own, amax: np.where(amax == 0, F(1), np.fmin(kept / amax, FLT_MAX)))


#: How a cast to a format of scales may round. Key: whether the format has powers of two alone. "nearest_even" is the
#: only rounding of formats with a significand.
SCALE_ROUNDINGS = {
    False: {"nearest_even": ""},
    True: {"nearest_even": "", "up": ", rounded up", "toward_zero": ", cut"},
}


def _other_formats_of_scales(replay):
    """(format, how it is used, how the cast to it rounds) of the formats that scales of the same width may have."""
    own = None if replay.layout is None else replay.layout.scale_format
    replay.require(own is not None)
    return [
        (fmt, how, rounding)
        for fmt in SCALE_FORMATS
        if fmt != own and fmt.bits == own.bits
        for how in ("both", "scaled to it", "stored")
        for rounding in SCALE_ROUNDINGS[fmt == E8M0]
    ]


def _byte_of_zero(setting):
    """What a dump has most often where scale codes of the reference are 0; None where none is."""
    held = [np.zeros(0, np.uint8)]
    for direction in DIRECTIONS:
        name = f"{direction}_scale_inv"
        if name in setting.outputs:
            inside = setting.case.slots[name].valid_slices
            held.append(setting.outputs[name][inside][setting.reference[name][inside] == 0])
    counts = np.bincount(np.concatenate(held))
    return int(counts.argmax()) if counts.any() else None


@computing(
    "other-scale-format",
    "The scales are {found}{rounded}, where {own} was asked for{how}.",
    stage=lambda choice: "stored" if choice[1] == "stored" else "scale-cast",
    choices=_other_formats_of_scales,
)
def other_scale_format(replay, choice):
    fmt, how, rounding = choice
    own = replay.layout.scale_format
    replay.facts["found"], replay.facts["own"], replay.facts["how"] = fmt, own, ""
    replay.facts["rounded"] = SCALE_ROUNDINGS[fmt == E8M0][rounding]
    if replay.dequantizes:
        replay.require(how == "both" and rounding == "nearest_even")
        replay.facts["how"] = ", as they are read"
        replay.wrap("read_scale", lambda inner, codes, _: inner(codes, fmt))
        return
    require_scaling(replay)
    if how == "stored":
        replay.facts["how"] = ", though the data are cast with the right ones"
        # log2(0) becomes whatever the kernel's cast makes of -inf
        zero = _byte_of_zero(replay.setting) if fmt == E8M0 else None
        if zero:
            replay.facts["how"] += f"; one of 0 becomes 0x{zero:02X}"

        def store(codes):
            stored = encode_tile(own.values[codes], fmt, rounding=rounding)
            return stored if zero is None else np.where(codes == 0, zero, stored).astype(np.uint8)

        replay.after("stored_scale", store)
        return
    require_two_levels(replay)  # the rules of one level make codes without a cast

    def cast(inner, scale, _, own_rounding):  # only casts to E8M0 round as the choice says
        return inner(scale, fmt, rounding if fmt == E8M0 else own_rounding)

    replay.wrap("cast_scale", cast)
    replay.wrap("read_scale", lambda inner, codes, _: inner(codes, fmt))
    if how == "scaled to it":
        replay.facts["how"] = ", and the tensor's scale maps to its maximum"
        limit = fmt.max * replay.fmt.max
        set_encode_scale(
            replay,
            lambda encode, amax: np.where((amax > 0) & np.isfinite(amax), np.fmin(limit / amax, FLT_MAX), encode),
        )


# --- NaN and infinity -----------------------------------------------------------------------------


@computing(
    "nan-scale-for-nonfinite",
    "A block with {what} gets a NaN scale{codes}, where TE ignores NaN and clamps infinity.",
    stage="block-amax",
    choices=[(what, codes) for what in ("inf", "nan", "both") for codes in ("nan", "own", "zero")],
)
def nan_scale_for_nonfinite(replay, choice):
    what, codes = choice
    require_own_amax(replay)
    fmt = replay.layout.scale_format
    replay.require(fmt is None or fmt.nan_code is not None)
    nan_scale = F(np.nan) if fmt is None else np.uint8(fmt.nan_code)
    replay.facts["what"] = {"both": "NaN or infinity", "inf": "infinity", "nan": "NaN"}[what]
    replay.facts["codes"] = {"nan": " and NaN codes", "own": "", "zero": " and zeros"}[codes]
    inner, own_scales = replay.block_amax, replay.scales
    state = {}

    def block_maxima(blocks):
        amax = inner(blocks)
        nan, inf = np.isnan(blocks).any(axis=(1, 3)), np.isinf(blocks).any(axis=(1, 3))
        state["bad"] = {"both": nan | inf, "inf": inf & ~nan, "nan": nan}[what]
        return amax

    def scales(amax, tensor_amax):
        written, multiplier = own_scales(amax, tensor_amax)
        if "bad" not in state:
            state["bad"] = ~np.isfinite(amax)
        bad = state["bad"]
        written = np.where(bad, nan_scale, written)
        if codes != "own":
            multiplier = np.where(bad, F(np.nan) if codes == "nan" else F(0), multiplier)
        return written, multiplier

    replay.block_amax, replay.scales = block_maxima, scales


@computing(
    "inf-amax-not-handled",
    "An amax of inf (or a scale that overflows) is {how}, where TE replaces the scale by {own}.",
    stage="overflow",
    choices=("quotient", "amax clamped", "overflow inf", "zero amax"),
)
def inf_amax_not_handled(replay, choice):
    replay.facts["how"] = "bounded by the largest float32" if choice == "amax clamped" else "used as it is"
    if replay.computes and replay.scaling is not None and replay.layout.scale_format == E8M0:
        _read_bytes_of_infinity(replay, choice)
        return
    require_float_scales_of_amax(replay)
    replay.facts["own"] = "1 (or the largest finite value)"
    inner = replay.encode_scale

    def encode_scale(amax):
        amax = replay.bounded(amax)
        scale, raw = inner(amax), replay.scale_max / amax
        if choice == "quotient":
            return np.where(np.isinf(amax), raw, scale).astype(F)
        if choice == "amax clamped":
            return inner(np.fmin(amax, FLT_MAX))
        if choice == "zero amax":
            return np.where(amax == 0, raw, scale).astype(F)
        return np.where(np.isinf(raw) & (amax > 0), F(np.inf), scale).astype(F)

    replay.encode_scale = encode_scale


def _read_bytes_of_infinity(replay, choice):
    """Let the byte of an infinite amax follow from its bits, as if it were 2^128, or from the largest float32."""
    replay.require(choice in ("quotient", "amax clamped"))
    replay.facts["own"] = f"the largest, 0x{E8M0.largest_code:02X}"

    def scale_code(inner, rule, amax, tensor_scale):
        own = inner(rule, amax, tensor_scale)
        if choice == "amax clamped":
            return np.where(np.isinf(amax), inner(rule, np.full_like(amax, FLT_MAX), tensor_scale), own)
        half = inner(rule, np.full_like(amax, 2.0**127), tensor_scale)
        return np.where(np.isinf(amax), half + np.uint8(1), own).astype(np.uint8)

    replay.wrap("scale_code", scale_code)


@computing(
    "scale-capped-at-input-dtype",
    "A scale that overflows becomes {what}, where TE caps it at {own}.",
    stage="overflow",
)
def scale_capped_at_input_dtype(replay):
    require_float_scales_of_amax(replay)
    inputs, float32 = "the largest value of the input's dtype", "the largest float32"
    own, of_dtype = replay.numbers.largest_scale, LARGEST_FINITE[replay.dtype]
    replay.require(of_dtype != FLT_MAX)
    other = of_dtype if own == FLT_MAX else FLT_MAX
    replay.facts["what"], replay.facts["own"] = (inputs, float32) if own == FLT_MAX else (float32, inputs)
    inner = replay.encode_scale

    def encode_scale(amax):
        amax = replay.bounded(amax)
        return np.where(np.isinf(replay.scale_max / amax) & (amax > 0), other, inner(amax)).astype(F)

    replay.encode_scale = encode_scale
