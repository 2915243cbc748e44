"""Conventions of amax and scale: which maximum, of what, and how it becomes a scale."""

import math
from dataclasses import replace

import numpy as np

from refops.arguments import BFLOAT16
from refops.formats import E4M3, E8M0, encode_tile
from refops.oracle.conventions.registry import computing
from refops.oracle.geometry import DIRECTIONS, Geometry, Region, crop, whole
from refops.oracle.replay import DequantizeKernel, NotApplicable, TensorKernel, UpdateKernel, power_of_two_below
from refops.quantization import mxfp8
from refops.quantization.block import LARGEST_SCALE
from refops.quantization.layout import block_amax, block_view
from refops.quantization.per_tensor import FLT_MAX
from refops.scaling import BlockScaling, CurrentScaling, DelayedScaling, MXFP8Scaling, NVFP4Scaling

F = np.float32


def require_scaling(kernel, *kinds):
    """NotApplicable unless a tensor is quantized with one of these settings (any, without)."""
    kernel.require(isinstance(kernel, TensorKernel) and kernel.scaling is not None)
    kernel.require(not kinds or isinstance(kernel.scaling, kinds))


def require_blocks(kernel):
    """NotApplicable unless blocks have scales of their own."""
    require_scaling(kernel, BlockScaling, MXFP8Scaling, NVFP4Scaling)


def require_own_amax(kernel):
    """NotApplicable unless the scales come from the tensor's amax."""
    require_scaling(kernel, CurrentScaling, BlockScaling, MXFP8Scaling, NVFP4Scaling)


# --- rounding before amax and cast ----------------------------------------------------------------


def require_activation_output(kernel):
    """NotApplicable unless values are quantized that a dtype could have rounded."""
    require_scaling(kernel)
    kernel.require(kernel.kind != "quantize" and kernel.dtype != F)
    kernel.facts["dtype"] = kernel.dtype


@computing(
    "missing-rounding",
    "The float32 result of the formula is quantized as it is, where TE rounds it to {dtype} first.",
    stage="rounding",
    choices=("amax too", "cast alone"),
)
def missing_rounding(kernel, choice):
    require_activation_output(kernel)
    kernel.require(kernel.casts_rounded)
    kernel.casts_rounded = False
    if choice == "amax too":
        kernel.amax_rounded = False
    else:
        kernel.require(isinstance(kernel.scaling, BlockScaling | MXFP8Scaling | NVFP4Scaling))
        kernel.block_amax_rounded = True


@computing(
    "extra-rounding",
    "The result of the formula is rounded to {dtype} before it is quantized, where TE quantizes the float32 values.",
    stage="rounding",
    choices=("amax too", "cast alone"),
)
def extra_rounding(kernel, choice):
    require_activation_output(kernel)
    kernel.require(not kernel.casts_rounded)
    kernel.casts_rounded = True
    kernel.amax_rounded = choice == "amax too"


@computing(
    "amax-rounded",
    "The amax is taken of values rounded to {dtype}, where TE takes that of the float32 values.",
    stage="amax-rounding",
)
def amax_rounded(kernel):
    require_activation_output(kernel)
    kernel.require(not kernel.amax_rounded)
    kernel.amax_rounded = True


@computing(
    "amax-unrounded",
    "The {what} taken of the float32 values, where TE takes it of values rounded to {dtype}.",
    stage="amax-rounding",
    choices=("tensor", "block", "both"),
)
def amax_unrounded(kernel, choice):
    require_activation_output(kernel)
    if choice in ("tensor", "both"):
        kernel.require(kernel.amax_rounded and isinstance(kernel.scaling, NVFP4Scaling))
        kernel.amax_rounded = False
    if choice in ("block", "both"):
        require_blocks(kernel)
        kernel.require(kernel.casts_rounded)
        kernel.block_amax_rounded = False
    kernel.facts["what"] = "block amaxes are" if choice == "block" else "amax is"


# --- which maximum --------------------------------------------------------------------------------


@computing(
    "signed-amax",
    "The amax is the maximum of the values, not of their magnitudes.",
    stage="magnitude",
)
def signed_amax(kernel):
    require_scaling(kernel)
    kernel.magnitude = lambda values: values


@computing(
    "nan-in-amax",
    "A NaN makes the amax NaN, and with it every scale that depends on it; TE's maximum ignores NaN.",
    stage="maximum",
)
def nan_in_amax(kernel):
    require_scaling(kernel)
    kernel.maximum = lambda a, axis: np.maximum.reduce(a, axis=axis, initial=F(0))


@computing(
    "stale-amax",
    "The {what} from another amax, {found:.6g} where this tensor has {own:.6g}: that of another step or tensor.",
    stage="tensor-amax",
    choices=("dump", "scale", "codes"),
    last=True,
)
def stale_amax(kernel, choice):
    require_scaling(kernel, CurrentScaling, NVFP4Scaling)
    kernel.require(not getattr(kernel.scaling, "row_scaled", False))
    setting = kernel.setting
    kernel.facts["what"] = "scales follow"
    region = Region(slice(0, 0), slice(0, 0))
    found = {}
    for direction in DIRECTIONS:
        amax = None
        if choice == "dump" and _something_follows(setting, direction):
            amax = setting.outputs.get(f"amax_{direction}")
        elif choice == "scale" and isinstance(kernel.scaling, CurrentScaling):
            scale_inv = setting.outputs.get(f"{direction}_scale_inv")
            amax = None if scale_inv is None else scale_inv * kernel.scale_max
        if amax is not None:
            found[direction] = amax.reshape(1, 1)
    if choice == "codes":
        found = dict.fromkeys(DIRECTIONS, _amax_of_scales(kernel))
    kernel.require(found)
    first = next(iter(found))
    kernel.facts["found"] = float(found[first][0, 0])
    kernel.facts["own"] = float(kernel.tensor_amax(first, region)[0, 0])
    kernel.require(np.isfinite(kernel.facts["found"]) and kernel.facts["found"] > 0)
    kernel.require(kernel.facts["found"] != kernel.facts["own"])
    for direction in DIRECTIONS:
        found.setdefault(direction, found[first])
    own = kernel.tensor_amax
    kernel.tensor_amax = lambda direction, region: found[direction]
    if choice != "dump":
        kernel.stored_amax = lambda amax, direction: own(direction, region).reshape(-1)


def _something_follows(setting, direction):
    """Whether a dumped amax may have been used: not where what was written beside it is right without it."""
    beside = [f"{direction}_{part}" for part in ("scale_inv", "data") if f"{direction}_{part}" in setting.outputs]
    return not beside or any(not np.array_equal(setting.outputs[n], setting.reference[n]) for n in beside)


def _amax_of_scales(kernel):
    """The one amax that the written block scales (NVFP4) or codes (per tensor) agree with, or NotApplicable."""
    setting = kernel.setting
    region = setting.probe
    kernel.require(region is not None)
    values = kernel.values(region.rows, region.columns)
    values = kernel.round(values) if kernel.casts_rounded else values
    direction = next((d for d in DIRECTIONS if f"{d}_data" in setting.outputs), None)
    kernel.require(direction is not None)
    if isinstance(kernel.scaling, NVFP4Scaling):
        kernel.require(f"{direction}_scale_inv" in setting.outputs and not kernel.hadamard[direction])
        shape = kernel.block_shapes[direction]
        amax = block_amax(block_view(values, *shape))
        amax = Geometry.of(kernel.scaling, direction).store_scales(amax, shape, region.shape)
        written = crop(kernel.case, f"{direction}_scale_inv", setting.outputs[f"{direction}_scale_inv"], region)
        factor = common_factor(amax, written, E4M3)
        return np.full((1, 1), F(kernel.e4m3_max * 6) / (factor * F(6)), F)
    factor = _factor_of_codes(kernel, values, direction, region)
    return np.full((1, 1), kernel.scale_max / factor, F)


def _factor_of_codes(kernel, values, direction, region):
    geometry = Geometry.of(kernel.scaling, direction)
    written = geometry.codes(kernel.setting.outputs[f"{direction}_data"], kernel.shape, region.rows, region.columns)
    return common_factor(values, written, kernel.fmt)


def common_factor(values, codes, fmt):
    """The factor s with codes = fmt(values * s) throughout, float32; NotApplicable if there is none.

    Each element allows an interval of factors, from the midpoints around its code; the intervals must have a common
    point (a few elements may miss it).
    """
    half = 1 << (fmt.bits - 1)
    index = (codes.ravel() & np.uint8(half - 1)).astype(np.int64)
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


@computing(
    "stale-scale",
    "The data are multiplied with {found:.6g}, where the call's scale is {own:.6g}: that of another step or tensor.",
    stage="scale",
    choices=("scale_inv", "codes"),
    last=True,
)
def stale_scale(kernel, choice):
    require_scaling(kernel, DelayedScaling)
    outputs = kernel.setting.outputs
    direction = next((d for d in DIRECTIONS if f"{d}_data" in outputs or f"{d}_scale_inv" in outputs), None)
    kernel.require(direction is not None)
    own = F(kernel.scaling.scale)
    if choice == "scale_inv":
        kernel.require(f"{direction}_scale_inv" in outputs)
        inverse = outputs[f"{direction}_scale_inv"][0]
        kernel.require(np.isfinite(inverse) and inverse > 0)
        found = F(1) / inverse
        kernel.decode_scale = lambda scale: np.full_like(scale, inverse)
    else:
        region = kernel.setting.probe
        kernel.require(region is not None and f"{direction}_data" in outputs)
        values = kernel.values(region.rows, region.columns)
        values = kernel.round(values) if kernel.casts_rounded else values
        found = _factor_of_codes(kernel, values, direction, region)
        if abs(found / own - 1) < 1e-3:
            found = own
        kernel.decode_scale = lambda scale: np.full_like(scale, F(1) / own)
    kernel.require(found != own)
    kernel.facts["found"], kernel.facts["own"] = float(found), float(own)
    kernel.given_scale = lambda: np.full((1, 1), found, F)


@computing(
    "neighbour-block-scale",
    "{what} of the {which} block, one off.",
    stage=lambda choice: {"both": "block-amax", "stored": "stored", "cast": "multiplier"}[choice[0]],
    choices=[(what, by) for what in ("both", "cast", "stored") for by in (1, -1)],
)
def neighbour_block_scale(kernel, choice):
    what, by = choice
    if isinstance(kernel, DequantizeKernel):
        _neighbour_scale_read(kernel, what, by)
        return
    require_blocks(kernel)
    kernel.facts["which"] = "next" if by == 1 else "previous"
    kernel.facts["what"] = {
        "both": "Each block is scaled by the amax",
        "cast": "Each block is cast with the scale",
        "stored": "Each block's stored scale is that",
    }[what]
    kernel.halo = 1
    inner = {}

    def quantize_blocks(own, values, amax_values, direction, region):
        inner["axis"] = int(direction == "rowwise")
        return own(values, amax_values, direction, region)

    kernel.wrap("quantize_blocks", quantize_blocks)

    def shifted(array):
        axis = inner["axis"]
        return np.roll(array, -by, axis=axis) if array.shape[axis] > 1 else array

    if what == "both":
        kernel.after("block_amax", shifted)
    else:
        index = 1 if what == "cast" else 0
        kernel.after("scales", lambda pair: tuple(shifted(a) if i == index else a for i, a in enumerate(pair)))


def _neighbour_scale_read(kernel, what, by):
    kernel.require(what == "both" and kernel.whole_scales().shape != (1,))
    kernel.facts["which"], kernel.facts["what"] = (
        ("next" if by == 1 else "previous"),
        "Each block is read with the scale",
    )
    scaling, direction = kernel.scaling, kernel.direction
    b = scaling.block_size
    m, k = kernel.shape
    own = kernel.spread

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

    kernel.spread = spread


@computing(
    "wrong-axis-amax",
    "The block amax runs along {axis} in the {directions} copy: across the block, not along it.",
    stage="blocks",
    choices=[(how, d) for how in ("tile", "first", "element") for d in ("all", *DIRECTIONS)],
)
def wrong_axis_amax(kernel, choice):
    how, which = choice
    require_blocks(kernel)
    chosen = DIRECTIONS if which == "all" else (which,)
    kernel.require(kernel.block_shapes["rowwise"][0] == 1)
    kernel.facts["axis"] = "the other axis" if which == "all" else {"rowwise": "M", "columnwise": "K"}[which]
    kernel.facts["directions"] = "rowwise and columnwise" if which == "all" else which
    if how == "element":
        other = {"rowwise": "columnwise", "columnwise": "rowwise"}
        shapes = kernel.block_shapes
        kernel.block_shapes = {d: shapes[other[d]] if d in chosen else shapes[d] for d in DIRECTIONS}
        return
    b = kernel.scaling.block_size
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

    kernel.wrap("quantize_blocks", quantize_blocks)
    kernel.wrap("block_amax", across)


@computing(
    "wrong-block-size",
    "A scale covers {found} elements, where {own} were asked for.",
    stage="blocks",
    choices=(16, 32, 64, 128),
)
def wrong_block_size(kernel, choice):
    require_blocks(kernel)
    own = kernel.scaling.block_size
    kernel.require(choice != own)
    kernel.facts["found"], kernel.facts["own"] = choice, own
    kernel.block_shapes = {
        direction: tuple(choice if edge == own else edge for edge in shape)
        for direction, shape in kernel.block_shapes.items()
    }


@computing(
    "two-d-ignored",
    "A scale covers one row of a block, where one scale for a square tile was asked for.",
    stage="blocks",
)
def two_d_ignored(kernel):
    require_blocks(kernel)
    b = kernel.scaling.block_size
    kernel.require(kernel.block_shapes["rowwise"] == (b, b))
    kernel.block_shapes = {"rowwise": (1, b), "columnwise": (b, 1)}


@computing(
    "two-d-scales", "A scale covers a square tile, where one for each row of a block was asked for.", stage="blocks"
)
def two_d_scales(kernel):
    require_blocks(kernel)
    b = kernel.scaling.block_size
    kernel.require(kernel.block_shapes["rowwise"] == (1, b))
    kernel.block_shapes = dict.fromkeys(DIRECTIONS, (b, b))


@computing("tensor-scale-for-blocks", "All blocks share the scale of the whole tensor's amax.", stage="block-amax")
def tensor_scale_for_blocks(kernel):
    require_blocks(kernel)
    kernel.require(not getattr(kernel.scaling, "row_scaled", False))
    for direction in DIRECTIONS:
        scales = kernel.setting.outputs.get(f"{direction}_scale_inv")
        if scales is not None:
            valid = crop(kernel.case, f"{direction}_scale_inv", scales, whole(kernel.shape))
            kernel.require((valid == valid.flat[0]).all() if valid.size else True)
    if not isinstance(kernel.scaling, NVFP4Scaling):
        kernel.amax_rounded = kernel.casts_rounded
    amax = kernel.whole_amax("rowwise", None, None)
    kernel.after("block_amax", lambda own: np.full_like(own, amax[0]))


@computing(
    "row-amax-missing", "All rows share the tensor's amax, where each row (column) has its own.", stage="tensor-amax"
)
def row_amax_missing(kernel):
    require_scaling(kernel, NVFP4Scaling)
    kernel.require(kernel.scaling.row_scaled)
    own = kernel.tensor_amax

    def tensor_amax(direction, region):
        amax = kernel.whole_amax(
            direction, slice(0, kernel.shape[direction == "columnwise"]), int(direction == "rowwise")
        )
        return np.full_like(own(direction, region), np.fmax.reduce(amax, initial=F(0)))

    kernel.tensor_amax = tensor_amax


# --- MXFP8's byte ---------------------------------------------------------------------------------

RULE_NAMES = {
    "up": "round-up rule, amax / max rounded up to a power of two",
    "floor": "OCP floor rule, 2^floor(log2 amax)",
    "even": "OCP even rule, amax rounded to the format's mantissa first",
    "ceil_ocp": "OCP ceil rule, 2^ceil(log2 amax)",
}


def _other_rule(kernel, rule):
    require_scaling(kernel, MXFP8Scaling)
    own = kernel.scaling.scale_rounding
    kernel.require(own != rule)
    kernel.facts["expected"] = ("TE has the " if own == "up" else "the settings ask for the ") + RULE_NAMES[own]
    kernel.scale_byte = lambda amax: mxfp8.scale_byte(amax, kernel.fmt, rule)


@computing(
    "scale-floor",
    "The scale bytes follow the OCP floor rule, 2^floor(log2 amax), where {expected}.",
    stage="scale",
)
def scale_floor(kernel):
    _other_rule(kernel, "floor")


@computing(
    "scale-even",
    "The scale bytes follow the OCP even rule (amax rounded to the format's mantissa first), where {expected}.",
    stage="scale",
)
def scale_even(kernel):
    _other_rule(kernel, "even")


@computing(
    "scale-ceil-ocp",
    "The scale bytes follow the OCP ceil rule, 2^ceil(log2 amax), where {expected}.",
    stage="scale",
)
def scale_ceil_ocp(kernel):
    _other_rule(kernel, "ceil_ocp")


@computing(
    "scale-up", "The scale bytes round amax / max up to a power of two, TE's rule, where {expected}.", stage="scale"
)
def scale_up(kernel):
    _other_rule(kernel, "up")


@computing(
    "scale-nearest",
    "The scale bytes round amax / max to the nearest power of two{how}, where {expected}.",
    stage="scale",
    choices=("value", "logarithm"),
)
def scale_nearest(kernel, choice):
    _other_rule(kernel, "nearest")
    kernel.facts["how"] = "" if choice == "value" else " by its logarithm"

    def scale_byte(amax):
        ratio = amax * (F(1) / kernel.scale_max)
        if choice == "value":
            return encode_tile(ratio, E8M0, rounding="nearest_even")
        return log_byte(np.rint(np.log2(ratio)), amax)

    kernel.scale_byte = scale_byte


def log_byte(exponent, amax):
    """Scale byte of a float exponent; 0 for amax 0, 0xFE for inf."""
    exponent = np.where(np.isfinite(exponent), exponent, -127)
    byte = np.clip(exponent + 127, 0, 254).astype(np.uint8)
    return np.where(np.isinf(amax), np.uint8(254), byte)


@computing(
    "scale-log2",
    "The scale's exponent comes from a float32 log2, which is off by one next to powers of two.",
    stage="scale",
    choices=("ceil, divided", "ceil, multiplied", "floor", "ceil of difference"),
)
def scale_log2(kernel, choice):
    require_scaling(kernel, MXFP8Scaling)

    def scale_byte(amax):
        emax = F(math.floor(math.log2(kernel.scale_max)))
        if choice == "floor":
            exponent = np.floor(np.log2(amax)) - emax
        elif choice == "ceil, divided":
            exponent = np.ceil(np.log2(amax / kernel.scale_max))
        elif choice == "ceil, multiplied":
            exponent = np.ceil(np.log2(amax * (F(1) / kernel.scale_max)))
        else:
            exponent = np.ceil(np.log2(amax) - np.log2(kernel.scale_max))
        return log_byte(exponent, amax)

    kernel.require(choice != "floor" or kernel.scaling.scale_rounding == "floor")
    kernel.require(choice == "floor" or kernel.scaling.scale_rounding == "up")
    kernel.scale_byte = scale_byte


@computing(
    "scale-divided",
    "amax is divided by the format's maximum, where TE multiplies with the float32 reciprocal: they differ where the "
    "quotient is a power of two.",
    stage="scale",
)
def scale_divided(kernel):
    require_scaling(kernel, MXFP8Scaling)
    kernel.require(kernel.scaling.scale_rounding == "up")
    kernel.scale_byte = lambda amax: encode_tile(amax / kernel.scale_max, E8M0, rounding="up")


@computing(
    "scale-off-by-one",
    "Each scale byte is one too {high}{how}.",
    stage=lambda choice: {"both": "scale", "stored": "stored", "cast": "multiplier"}[choice[1]],
    choices=[(by, what) for by in (1, -1) for what in ("both", "stored", "cast")],
)
def scale_off_by_one(kernel, choice):
    by, what = choice
    if isinstance(kernel, DequantizeKernel):
        kernel.require(isinstance(kernel.scaling, MXFP8Scaling) and what == "both")
        kernel.facts["high"], kernel.facts["how"] = ("high" if by == 1 else "low"), " as it is read (the bias is off)"
        kernel.wrap("decode_scale", lambda inner, s: inner(np.clip(s.astype(int) + by, 0, 254).astype(np.uint8)))
        return
    require_scaling(kernel, MXFP8Scaling, NVFP4Scaling)
    kernel.facts["high"] = "high" if by == 1 else "low"
    kernel.facts["how"] = {
        "both": "",
        "stored": ", though the data are cast with the right one",
        "cast": " for the cast, though the right one is stored",
    }[what]

    def moved(byte):
        top = 254 if isinstance(kernel.scaling, MXFP8Scaling) else 0x7E
        return np.clip(byte.astype(int) + by, 0, top).astype(np.uint8)

    if isinstance(kernel.scaling, MXFP8Scaling):
        if what == "both":
            kernel.after("scale_byte", moved)
        elif what == "cast":
            kernel.wrap("byte_multiplier", lambda inner, byte: inner(moved(byte)))
    else:
        kernel.require(what != "cast")
        if what == "both":
            kernel.after("encode_block_scale", moved)
    if what == "stored":
        kernel.after("stored_scale", moved)


# --- which limits ---------------------------------------------------------------------------------


def set_scale_max(kernel, value):
    """Let the amax be mapped to `value` instead of the element format's maximum."""
    kernel.scale_max = F(value)
    if isinstance(kernel.scaling, MXFP8Scaling):
        rule = kernel.scaling.scale_rounding
        if rule == "up":
            kernel.scale_byte = lambda amax: encode_tile(amax * (F(1) / F(value)), E8M0, rounding="up")
        else:
            shift = int(np.floor(np.log2(value))) - int(np.floor(np.log2(kernel.fmt.max)))
            own = kernel.scale_byte
            kernel.scale_byte = lambda amax: np.where(
                (amax == 0) | np.isinf(amax), own(amax), np.clip(own(amax).astype(int) - shift, 0, 254)
            ).astype(np.uint8)


@computing(
    "e4m3-max-240",
    "The amax is mapped to 240, the maximum of IEEE-like E4M3 (and E4M3FNUZ), where OCP's E4M3 has 448.",
    stage="limit",
)
def e4m3_max_240(kernel):
    if isinstance(kernel, UpdateKernel):
        kernel.require(kernel.fmt == E4M3)
        kernel.after("fresh_scale", lambda scale: scale * F(240 / 448))
        return
    require_own_amax(kernel)
    kernel.require(kernel.fmt == E4M3)
    set_scale_max(kernel, 240)


@computing(
    "other-format-max",
    "The amax is mapped to {found:g}, where the maximum is {own:g}.",
    stage="limit",
    choices=(448, 57344, 256, 6, 28, 7.5, 4, 1, 127, 464, 512),
)
def other_format_max(kernel, choice):
    if isinstance(kernel, UpdateKernel):
        kernel.require(choice in (448, 57344, 1, 127))
        own = kernel.fmt.max
        kernel.require(choice != own)
        kernel.after("fresh_scale", lambda scale: scale * (F(choice) / own))
    elif isinstance(kernel, DequantizeKernel):
        kernel.require(isinstance(kernel.scaling, NVFP4Scaling) and choice in (448, 256))
        own = kernel.scaling.e4m3_max
        kernel.require(choice != own)
        kernel.factor = lambda: F(1) / F(6 * choice)
    elif isinstance(kernel.scaling, NVFP4Scaling):
        require_own_amax(kernel)
        kernel.require(choice in (448, 256) and choice != kernel.e4m3_max)
        own, kernel.e4m3_max = kernel.e4m3_max, choice
    else:
        require_own_amax(kernel)
        own = kernel.fmt.max
        kernel.require(choice != own)
        set_scale_max(kernel, choice)
    kernel.facts["found"], kernel.facts["own"] = float(choice), float(own)


@computing(
    "element-max-4",
    "Block maxima are mapped to 4, where TE maps them to 6, the largest E2M1 value.",
    stage="limit",
)
def element_max_4(kernel):
    require_scaling(kernel, NVFP4Scaling)
    kernel.require(not kernel.four_over_six)
    kernel.wrap("block_byte", lambda inner, amax, s_enc: inner(amax * F(1.5), s_enc))


@computing(
    "power-of-two-missing",
    "The scales are not rounded to powers of two.",
    stage="power-of-two",
)
def power_of_two_missing(kernel):
    require_scaling(kernel, CurrentScaling, BlockScaling)
    kernel.require(kernel.scaling.power_2_scale)
    _power_of_two(kernel, False)


@computing(
    "power-of-two-extra",
    "The {what} rounded {how} to powers of two.",
    stage="power-of-two",
    choices=("down", "up"),
)
def power_of_two_extra(kernel, choice):
    kernel.facts["what"] = "scales are"
    kernel.facts["how"] = "down" if choice == "down" else "up"
    if isinstance(kernel, UpdateKernel):
        kernel.require(choice == "down")
        kernel.after("fresh_scale", power_of_two_below)
        return
    require_scaling(kernel, CurrentScaling, BlockScaling, DelayedScaling)
    if isinstance(kernel.scaling, DelayedScaling):
        kernel.require(choice == "down")
        kernel.after("given_scale", power_of_two_below)
    elif choice == "down":
        kernel.require(not kernel.scaling.power_2_scale)
        _power_of_two(kernel, True)
    else:
        kernel.require(not kernel.scaling.power_2_scale)
        kernel.after("encode_scale", power_of_two_above)


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
def power_of_two_up(kernel, choice):
    require_scaling(kernel, CurrentScaling, BlockScaling)
    kernel.require(kernel.scaling.power_2_scale)
    _power_of_two(kernel, False)
    kernel.facts["how"] = {"up": "up to the next", "nearest": "to the nearest"}[choice]
    if choice == "up":
        kernel.after("encode_scale", power_of_two_above)
    else:
        kernel.after("encode_scale", lambda scale: np.exp2(np.rint(np.log2(scale))).astype(F))


def _power_of_two(kernel, wanted):
    kernel.scaling = replace(kernel.scaling, power_2_scale=wanted)


@computing("epsilon-missing", "amax_epsilon is ignored.", stage="epsilon")
def epsilon_missing(kernel):
    require_scaling(kernel, CurrentScaling, BlockScaling)
    kernel.require(kernel.scaling.amax_epsilon > 0)
    kernel.scaling = replace(kernel.scaling, amax_epsilon=0.0)


@computing(
    "epsilon-extra",
    "The amax {what} {epsilon:g}, which {own}.",
    stage="epsilon",
    last=True,
    choices=[(e, how) for e in (1e-12, 1e-10, 1e-8, 1e-6, 1e-5, 1e-4, 2.0**-126) for how in ("bound", "sum")],
)
def epsilon_extra(kernel, choice):
    epsilon, how = choice
    require_own_amax(kernel)
    kernel.facts["epsilon"] = epsilon
    kernel.facts["what"] = "is at least" if how == "bound" else "has an addend of"
    kernel.facts["own"] = "TE does not have"
    own = getattr(kernel.scaling, "amax_epsilon", 0.0)
    kernel.require(F(own) != F(epsilon))
    if own:
        kernel.facts["own"] = f"is not the amax_epsilon of the settings, {own:g}"
        kernel.scaling = replace(kernel.scaling, amax_epsilon=0.0)
    change = (lambda amax: np.maximum(amax, F(epsilon))) if how == "bound" else (lambda amax: amax + F(epsilon))
    if isinstance(kernel.scaling, CurrentScaling):
        kernel.wrap("encode_scale", lambda inner, amax: inner(change(amax)))
    else:
        kernel.after("block_amax", change)


# --- what is stored, what is multiplied -----------------------------------------------------------


@computing(
    "inverted-scale",
    "{what}, the reciprocal of what TE has.",
    stage=lambda choice: {"both": "scale", "stored": "stored", "multiplied": "multiplier"}[choice],
    choices=("stored", "multiplied", "both"),
)
def inverted_scale(kernel, choice):
    if isinstance(kernel, UpdateKernel):
        kernel.require(choice == "both")
        kernel.facts["what"] = "The scale is amax / max"
        kernel.after("fresh_scale", lambda scale: F(1) / scale)
        return
    if isinstance(kernel, DequantizeKernel):
        kernel.require(choice == "both")
        kernel.facts["what"] = "Elements are divided by the stored scale"
        kernel.after("decode_scale", lambda scale: F(1) / scale)
        return
    require_scaling(kernel)
    kernel.facts["what"] = {
        "stored": "The stored scales are encode scales, max / amax",
        "multiplied": "Elements are multiplied with the decode scale",
        "both": "Elements are multiplied with amax / max and its reciprocal is stored",
    }[choice]
    if isinstance(kernel.scaling, MXFP8Scaling):
        flipped = lambda byte: np.clip(254 - byte.astype(int), 0, 254).astype(np.uint8)  # noqa: E731
        if choice == "both":
            kernel.after("scale_byte", flipped)
        elif choice == "stored":
            kernel.after("stored_scale", flipped)
        else:
            kernel.wrap("byte_multiplier", lambda inner, byte: inner(flipped(byte)))
    elif isinstance(kernel.scaling, NVFP4Scaling):
        kernel.require(choice != "both")
        if choice == "stored":
            kernel.after("stored_scale", lambda byte: encode_tile(F(1) / E4M3.values[byte], E4M3))
        else:
            kernel.after("nvfp4_multiplier", lambda multiplier: F(1) / multiplier)
    else:
        stage = "given_scale" if isinstance(kernel.scaling, DelayedScaling) else "encode_scale"
        if choice == "both":
            kernel.after(stage, lambda scale: F(1) / scale)
        elif choice == "stored":
            kernel.decode_scale = lambda scale: scale
        else:
            kernel.wrap("multiply", lambda inner, values, scale: inner(values, F(1) / scale))


@computing(
    "scale-inverse-separate",
    "The stored scale is {what}, where TE stores the float32 reciprocal of the encode scale.",
    stage="stored",
    choices=("amax / max", "amax * (1 / max)", "amax / max, multiplied with its reciprocal"),
)
def scale_inverse_separate(kernel, choice):
    require_scaling(kernel, CurrentScaling, BlockScaling)
    kernel.require(not kernel.scaling.power_2_scale)
    kernel.facts["what"] = choice.partition(",")[0]
    inner = kernel.encode_scale
    state = {}

    def encode_scale(amax):
        scale = inner(amax)
        quotient = amax * (F(1) / kernel.scale_max) if "*" in choice else amax / kernel.scale_max
        usual = (amax > 0) & np.isfinite(amax) & np.isfinite(F(1) / quotient)
        state["inverse"] = np.where(usual, quotient, F(1) / scale)
        return np.where(usual, F(1) / quotient, scale) if "," in choice else scale

    kernel.encode_scale = encode_scale
    kernel.decode_scale = lambda scale: state["inverse"]


@computing(
    "scale-rounded-to-bf16",
    "The {what} rounded to bfloat16, where TE keeps float32.",
    stage="scale-dtype",
    choices=("encode scale is", "stored scale is", "stored scale and the multiplier are", "scale is"),
)
def scale_rounded_to_bf16(kernel, choice):
    kernel.facts["what"] = choice
    to_bf16 = lambda scale: np.asarray(scale).astype(BFLOAT16).astype(F)  # noqa: E731
    if isinstance(kernel, DequantizeKernel | UpdateKernel):
        kernel.require(choice == "scale is")
        kernel.after("block_factor" if isinstance(kernel, DequantizeKernel) else "fresh_scale", to_bf16)
        return
    require_scaling(kernel, DelayedScaling, CurrentScaling, BlockScaling)
    kernel.require(choice != "scale is")
    stage = "given_scale" if isinstance(kernel.scaling, DelayedScaling) else "encode_scale"
    if choice.startswith("encode"):
        kernel.after(stage, to_bf16)
    else:
        kernel.after("decode_scale", to_bf16)
        if "multiplier" in choice:
            kernel.wrap("multiply", lambda inner, values, scale: inner(values, F(1) / to_bf16(F(1) / scale)))


@computing(
    "divided-by-scale",
    "Elements are divided by the scale, where TE multiplies with its reciprocal: the last bit differs.",
    stage="multiply",
    choices=("decode", "exact", "global", "global encode", "block"),
)
def divided_by_scale(kernel, choice):
    require_scaling(kernel)
    kernel.require(not isinstance(kernel.scaling, MXFP8Scaling))
    if choice == "decode":
        kernel.wrap("multiply", lambda inner, values, multiplier: values / (F(1) / multiplier))
        return
    if not isinstance(kernel.scaling, NVFP4Scaling):
        kernel.require(choice == "exact" and not isinstance(kernel.scaling, DelayedScaling))
        state = {}
        own = kernel.encode_scale

        def encode_scale(amax):
            state["inverse"] = amax / kernel.scale_max
            return own(amax)

        kernel.encode_scale = encode_scale
        kernel.multiply = lambda values, multiplier: np.where(
            (multiplier != 1), values / state["inverse"][:, None, :, None], values
        ).astype(F)
        return
    kernel.require(choice != "exact")
    state = {}

    def nvfp4_multiplier(inner, byte, s_enc):
        state["byte"], state["s_enc"] = E4M3.values[byte][:, None, :, None], s_enc[:, None, :, None]
        return inner(byte, s_enc)

    def multiply(inner, values, multiplier):
        scale, s_enc = state["byte"], state["s_enc"]
        usual = np.isfinite(multiplier) & (multiplier < FLT_MAX) & (scale > 0)
        if choice == "global":
            scaled = values / (scale * (F(1) / s_enc))
        elif choice == "global encode":
            scaled = values * (s_enc / scale)
        else:
            scaled = (values * s_enc) / scale
        return np.where(usual, scaled, inner(values, multiplier)).astype(F)

    kernel.wrap("nvfp4_multiplier", nvfp4_multiplier)
    kernel.wrap("multiply", multiply)


# --- NVFP4's two levels ---------------------------------------------------------------------------


@computing(
    "missing-global-scale",
    "{what}: the tensor's amax plays no part.",
    stage="global-scale",
    choices=("all", "stored", "multiplier"),
)
def missing_global_scale(kernel, choice):
    if isinstance(kernel, DequantizeKernel):
        kernel.require(isinstance(kernel.scaling, NVFP4Scaling) and choice == "all")
        kernel.facts["what"] = "Elements are multiplied with the block scale alone"
        kernel.block_factor = lambda scales, region: scales
        return
    require_scaling(kernel, NVFP4Scaling)
    kernel.facts["what"] = {
        "all": "The block scale is amax / 6 alone",
        "stored": "The stored block scale is amax / 6 alone",
        "multiplier": "Elements are divided by the block scale alone",
    }[choice]
    if choice == "all":
        kernel.after("global_scale", np.ones_like)
    elif choice == "multiplier":
        kernel.wrap("nvfp4_multiplier", lambda inner, byte, s_enc: inner(byte, np.ones_like(s_enc)))
    else:
        kernel.wrap("block_byte", lambda inner, amax, s_enc: inner(amax, np.ones_like(s_enc)))


@computing(
    "clamped-block-scale",
    "Block scales are clamped to {least:g} or more, where TE keeps smaller ones.",
    stage="clamp",
    choices=(2.0**-6, 2.0**-9, 2.0**-8, 2.0**-7),
)
def clamped_block_scale(kernel, choice):
    require_scaling(kernel, NVFP4Scaling)
    kernel.facts["least"] = choice
    kernel.wrap("encode_block_scale", lambda inner, scale: inner(np.clip(scale, F(choice), F(448))))


@computing(
    "one-level-nvfp4",
    "NVFP4 has one level: the block scale is amax / 6 clamped to 2^-6 or more, and the tensor's amax plays no part.",
    stage="global-scale",
)
def one_level_nvfp4(kernel):
    require_scaling(kernel, NVFP4Scaling)
    kernel.after("global_scale", np.ones_like)
    kernel.wrap("encode_block_scale", lambda inner, scale: inner(np.clip(scale, F(2.0**-6), F(448))))


@computing(
    "global-scale-by-division",
    "The tensor's scale is the inverse of amax / 2688, where TE divides 2688 by the amax: last bits differ.",
    stage="global-scale",
)
def global_scale_by_division(kernel):
    require_scaling(kernel, NVFP4Scaling)

    def global_scale(inner, amax):
        scale = F(1) / (amax / F(6 * kernel.e4m3_max))
        return np.where(np.isfinite(scale) & (amax > 0) & np.isfinite(amax), scale, inner(amax)).astype(F)

    kernel.wrap("global_scale", global_scale)


@computing(
    "zero-block-scale",
    "A block of zeros gets the scale {found}, where TE's is {own}.",
    stage="zero-block",
    choices=lambda kernel: kernel.setting.scale_values,
)
def zero_block_scale(kernel, choice):
    require_own_amax(kernel)
    kernel.facts["found"] = choice if isinstance(choice, np.floating) else f"0x{int(choice):02X}"
    own_scales = kernel.scales
    if isinstance(kernel.scaling, NVFP4Scaling):
        own = kernel.block_byte
        kernel.facts["own"] = "0x00"
        if kernel.four_over_six:
            raise_to = kernel.encode_block_scale
            kernel.encode_block_scale = lambda scale: np.where(scale == 0, choice, raise_to(scale)).astype(np.uint8)
        else:
            kernel.block_byte = lambda amax, s_enc: np.where(amax == 0, choice, own(amax, s_enc)).astype(np.uint8)
        return
    zero = kernel.setting.kernel().scales(np.zeros((1, 1), F), None)[0].reshape(-1)[0]
    kernel.facts["own"] = zero if zero.dtype == F else f"0x{int(zero):02X}"
    kernel.require(zero.dtype == np.asarray(choice).dtype)

    def scales(amax, tensor_amax):
        written, multiplier = own_scales(amax, tensor_amax)
        return np.where(amax == 0, choice, written).astype(written.dtype), multiplier

    kernel.scales = scales


@computing(
    "block-scale-order",
    "The block scale is computed as {what}: its last bit differs from TE's amax * (S_enc * 1/6).",
    stage="scale",
    choices=(
        "(amax / 6) * S_enc",
        "(amax * S_enc) / 6",
        "(amax / 6) / (1 / S_enc)",
        "amax * S_enc * 1/6",
        "(amax / 6) / S_dec",
    ),
)
def block_scale_order(kernel, choice):
    require_scaling(kernel, NVFP4Scaling)
    kernel.require(not kernel.four_over_six)
    kernel.facts["what"] = choice
    state = {}

    def global_scale(inner, amax):
        state["decode"] = amax / F(6 * kernel.e4m3_max)
        return inner(amax)

    def block_byte(amax, s_enc):
        scale = {
            "(amax / 6) * S_enc": lambda: (amax / F(6)) * s_enc,
            "(amax * S_enc) / 6": lambda: (amax * s_enc) / F(6),
            "(amax / 6) / (1 / S_enc)": lambda: (amax / F(6)) / (F(1) / s_enc),
            "amax * S_enc * 1/6": lambda: (amax * s_enc) * (F(1) / F(6)),
            "(amax / 6) / S_dec": lambda: (amax / F(6)) / np.where(state["decode"] == 0, F(1), state["decode"]),
        }[choice]()
        return kernel.encode_block_scale(np.fmin(scale, FLT_MAX).astype(F))

    kernel.wrap("global_scale", global_scale)
    kernel.block_byte = block_byte


@computing(
    "block-scale-cast",
    "The block scale is cast to E4M3 {how}, where TE rounds to nearest even.",
    stage="scale-cast",
    choices=("toward_zero", "up", "nearest_away"),
)
def block_scale_cast(kernel, choice):
    require_scaling(kernel, NVFP4Scaling)
    kernel.facts["how"] = {"toward_zero": "by truncation", "up": "upwards", "nearest_away": "with ties away from zero"}[
        choice
    ]
    kernel.encode_block_scale = lambda scale: encode_tile(scale, E4M3, rounding=choice)


@computing(
    "scale-unrounded-for-cast",
    "Elements are multiplied with the block scale before its cast to E4M3, where TE decodes the stored byte.",
    stage="multiply",
)
def scale_unrounded_for_cast(kernel):
    require_scaling(kernel, NVFP4Scaling)
    kernel.require(not kernel.four_over_six)
    state = {}

    def block_byte(inner, amax, s_enc):
        state["amax"] = amax
        return inner(amax, s_enc)

    def nvfp4_multiplier(inner, byte, s_enc):
        own, amax = inner(byte, s_enc), state["amax"]
        return np.where(amax > 0, np.fmin(F(6) / amax, FLT_MAX), own).astype(F)

    kernel.wrap("block_byte", block_byte)
    kernel.wrap("nvfp4_multiplier", nvfp4_multiplier)


@computing(
    "missing-factor",
    "The factor 1 / (6 * {e4m3_max}) of NVFP4's global scale is left out{what}.",
    stage="factor",
    choices=("all", "6", "max"),
)
def missing_factor(kernel, choice):
    kernel.require(isinstance(kernel.scaling, NVFP4Scaling))
    e4m3_max = kernel.scaling.e4m3_max
    kernel.facts["e4m3_max"] = e4m3_max
    kernel.facts["what"] = {"all": "", "6": " but for the 6", "max": f" but for the {e4m3_max}"}[choice]
    kept = F({"all": 1, "6": 6, "max": e4m3_max}[choice])
    if isinstance(kernel, DequantizeKernel):
        kernel.factor = lambda: F(1) / kept
    else:
        require_scaling(kernel)
        kernel.global_scale = lambda amax: np.where(amax == 0, F(1), np.fmin(kept / amax, FLT_MAX)).astype(F)


# --- NaN and infinity -----------------------------------------------------------------------------


@computing(
    "nan-scale-for-nonfinite",
    "A block with {what} gets a NaN scale{codes}, where TE ignores NaN and clamps infinity.",
    stage="maximum",
    choices=[(what, codes) for what in ("both", "inf", "nan") for codes in ("nan", "own", "zero")],
)
def nan_scale_for_nonfinite(kernel, choice):
    what, codes = choice
    require_own_amax(kernel)
    kernel.facts["what"] = {"both": "NaN or infinity", "inf": "infinity", "nan": "NaN"}[what]
    kernel.facts["codes"] = {"nan": " and NaN codes", "own": "", "zero": " and zeros"}[codes]
    inner, own_scales = kernel.block_amax, kernel.scales
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
        if isinstance(kernel.scaling, MXFP8Scaling | NVFP4Scaling):
            written = np.where(bad, np.uint8(0xFF if isinstance(kernel.scaling, MXFP8Scaling) else 0x7F), written)
        else:
            written = np.where(bad, F(np.nan), written)
        if codes != "own":
            multiplier = np.where(bad, F(np.nan) if codes == "nan" else F(0), multiplier)
        return written, multiplier

    kernel.block_amax, kernel.scales = block_maxima, scales


@computing(
    "inf-amax-not-handled",
    "An amax of inf (or a scale that overflows) is used as it is, where TE replaces the scale by {own}.",
    stage="overflow",
    choices=("quotient", "amax clamped", "overflow inf", "zero amax"),
)
def inf_amax_not_handled(kernel, choice):
    require_scaling(kernel, CurrentScaling, BlockScaling)
    kernel.facts["own"] = "1 (or the largest finite value)"
    inner = kernel.encode_scale

    def encode_scale(amax):
        scale, raw = inner(amax), kernel.scale_max / amax
        if choice == "quotient":
            return np.where(np.isinf(amax), raw, scale).astype(F)
        if choice == "amax clamped":
            return inner(np.fmin(amax, FLT_MAX))
        if choice == "zero amax":
            return np.where(amax == 0, raw, scale).astype(F)
        return np.where(np.isinf(raw) & (amax > 0), F(np.inf), scale).astype(F)

    kernel.encode_scale = encode_scale


@computing(
    "scale-capped-at-input-dtype",
    "A scale that overflows becomes {what}, where TE caps it at {own}.",
    stage="overflow",
)
def scale_capped_at_input_dtype(kernel):
    require_scaling(kernel, CurrentScaling, BlockScaling)
    inputs, float32 = "the largest value of the input's dtype", "the largest float32"
    blocks = isinstance(kernel.scaling, BlockScaling)
    kernel.facts["what"], kernel.facts["own"] = (float32, inputs) if blocks else (inputs, float32)
    inner, other = kernel.encode_scale, FLT_MAX if blocks else LARGEST_SCALE[kernel.dtype]

    def encode_scale(amax):
        return np.where(np.isinf(kernel.scale_max / amax) & (amax > 0), other, inner(amax)).astype(F)

    kernel.encode_scale = encode_scale
