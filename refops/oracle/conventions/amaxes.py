"""Conventions of an amax that misses elements, or belongs to other ones: parts of the tensor, parts of a block."""

import contextlib

import numpy as np

from refops.oracle.conventions.registry import computing
from refops.oracle.conventions.scales import amax_of_scales, require_blocks, require_scaling
from refops.oracle.geometry import Region
from refops.oracle.replay import NotApplicable
from refops.quantization.result import DIRECTIONS

F = np.float32


# --- the tensor's amax ----------------------------------------------------------------------------


def require_tensor_amax(replay):
    """NotApplicable unless one amax of the whole tensor is written or scales follow from it."""
    require_scaling(replay)
    replay.require(replay.layout.amax == "tensor")


def _lines(which, m, k):
    """Parts of the rows (columns) that kernels stop at, by kind: (kind, words, bool of each)."""
    size = {"rows": m, "columns": k}[which]
    line, index = which.removesuffix("s"), np.arange(size)
    parts = []
    for tile in (128, 64, 32, 16, 8):
        if size % tile and size > tile:
            words = f"the {which} before the last partial tile of {tile}"
            parts.append(("tail", words, index < size // tile * tile))
    for shards, words in ((2, "half"), (4, "quarter"), (8, "eighth")):
        edge = -(-size // shards)
        for shard in range(shards):
            place = ({1: "second", 2: "third"} | {0: "first", shards - 1: "last"}).get(shard, f"{shard + 1}th")
            inside = (index >= shard * edge) & (index < (shard + 1) * edge)
            parts.append(("shard", f"the {place} {words} of the {which}", inside))
    parts += [("turn", f"the {words} {which}", index % 2 == phase) for phase, words in enumerate(("even", "odd"))]
    for period, nth in ((4, "fourth"), (8, "eighth"), (32, "32nd")):
        parts.append(("turn", f"every {nth} {line}", index % period == 0))
    for tile in (128, 64, 32):
        if size % tile == 0 and size > tile:
            parts.append(("last tile", f"all {which} but the last {tile}", index < size - tile))
    for count in (2**i for i in range(size.bit_length())):
        words = f"the first {count} {which}" if count > 1 else f"the first {line}"
        parts.append(("first", words, index < count))
    return [(kind, words, inside) for kind, words, inside in parts if inside.any() and not inside.all()]


def _parts_with_that_amax(replay):
    """(words, amax) of each smaller amax of parts that the dump implies; the words name a part of each kind."""
    require_tensor_amax(replay)
    setting = replay.setting
    key = ("line amaxes", replay.amax_rounded)
    if key not in setting.cache:
        setting.cache[key] = _line_amaxes(setting.replay())
    implied, found = _implied_amaxes(replay), {}
    for which, maxima in zip(("rows", "columns"), setting.cache[key], strict=True):
        for kind, words, inside in _lines(which, *replay.shape):
            amax = float(maxima[inside].max(initial=F(0)))
            near = any(abs(amax - dumped) <= error * abs(dumped) for dumped, error in implied)
            if near and amax < maxima.max(initial=F(0)):
                found.setdefault(amax, {}).setdefault((kind, which), words)
    return [(_alternatives(list(words.values())), amax) for amax, words in found.items()]


def _alternatives(words):
    """The first part, and how many other parts have the same amax."""
    first, *others = words
    if not others:
        return first
    return f"{first} (or of {others[0] if len(others) == 1 else f'one of {len(others)} other parts'})"


def _implied_amaxes(replay):
    """(amax, relative error) of the amaxes that the dump has or that its scales follow from."""
    setting, implied = replay.setting, []
    for direction in DIRECTIONS:
        amax = setting.dumped_amax(direction)
        scale_inv = setting.outputs.get(f"{direction}_scale_inv")
        implied += [] if amax is None else [(float(amax[0]), 1e-6)]
        if replay.layout.block is None and scale_inv is not None:
            implied.append((float(scale_inv[0]) * float(replay.scale_max), 1e-6))
    if replay.scaling.given is None:
        with contextlib.suppress(NotApplicable):
            implied.append((float(amax_of_scales(replay)[0, 0]), 1e-2))
    return implied


def _ends(inside, line):
    """Which lines are inside, in words: "row 3", "rows 0 to 255"."""
    at = np.flatnonzero(inside)
    return f"{line} {at[0]}" if len(at) == 1 else f"{line}s {at[0]} to {at[-1]}"


def _line_amaxes(replay):
    """The amax of each row and of each column of the values from which the tensor's amax is taken."""
    m, k = replay.shape
    replay.setting.spend(m * k if m * k > 1 << 20 else 0)
    height = max(128, (1 << 17) // max(1, k) // 128 * 128)
    of_rows, of_columns = [np.zeros(0, F)], np.zeros(k, F)
    for start in range(0, m, height):
        values = replay.compute(slice(start, min(start + height, m)), slice(0, k))
        values = np.abs(replay.round(values) if replay.amax_rounded else values)
        of_rows.append(np.fmax.reduce(values, axis=1, initial=F(0)))
        of_columns = np.fmax(of_columns, np.fmax.reduce(values, axis=0, initial=F(0)))
    return np.concatenate(of_rows), of_columns


@computing(
    "amax-of-a-part",
    "The amax{where} misses larger values, which lie in {left_out}: it is the amax of {part} alone.",
    stage=lambda choice: "stored-amax" if choice[2] == "stored" else "tensor-amax",
    choices=lambda replay: [
        (*part, how) for how in ("used", "stored", "scales") for part in _parts_with_that_amax(replay)
    ],
    last=True,
)
def amax_of_a_part(replay, choice):
    replay.facts["part"], amax, how = choice
    of_rows, of_columns = replay.setting.cache["line amaxes", replay.amax_rounded]
    replay.facts["left_out"] = f"{_ends(of_rows > amax, 'row')} and {_ends(of_columns > amax, 'column')}"
    _set_tensor_amax(replay, lambda direction: F(amax), how)


def _set_tensor_amax(replay, amax_of, how):
    """Let the tensor's amax be `amax_of(direction)`: "used" for scales and written, "stored" or for "scales" alone."""
    transformed = {d for d in DIRECTIONS if replay.hadamard[d]}
    used = replay.scaling.given is None
    replay.require(used or how == "stored")
    where = {"stored": " that is written, not that of the scales,", "scales": " of the scales, not the written one,"}
    replay.facts["where"] = where.get(how, "") if used else ""
    own = replay.tensor_amax
    if how == "scales":
        anywhere = Region(slice(0, 0), slice(0, 0))
        replay.stored_amax = lambda amax, direction: own(direction, anywhere).reshape(-1)
    if how != "stored":
        replay.tensor_amax = lambda direction, region: (
            own(direction, region) if direction in transformed else np.full((1, 1), amax_of(direction), F)
        )
    else:
        replay.wrap(
            "stored_amax",
            lambda inner, amax, direction: inner(
                amax if direction in transformed else np.full_like(amax, amax_of(direction)), direction
            ),
        )


@computing(
    "amax-of-the-input",
    "The amax{where} is that of {what}, and not of what is quantized.",
    stage=lambda choice: {"stored": "stored-amax", "blocks": "block-amax"}.get(choice[1], "tensor-amax"),
    choices=[(name, how) for how in ("used", "stored", "scales", "blocks") for name in ("x", "act", "gate", "dy")],
)
def amax_of_the_input(replay, choice):
    name, how = choice
    require_scaling(replay)
    replay.require(replay.kind != "quantize")
    replay.require(replay.gated or name not in ("act", "gate"))
    replay.require(replay.gradient or name != "dy")
    words = {"x": "the input x", "act": "act, a half of x", "gate": "gate, a half of x"}
    replay.facts["what"] = words.get(name, "dy")
    if how == "blocks":
        _set_block_amax_of_input(replay, name)
        return
    require_tensor_amax(replay)
    _set_tensor_amax(replay, lambda direction: _amax_of_input(replay, name), how)


def _amax_of_input(replay, name):
    setting = replay.setting
    key = ("amax of input", name)
    if key not in setting.cache:
        array = replay.case.inputs["dy" if name == "dy" else "x"]
        array = array.reshape(-1, array.shape[-1])
        if name in ("act", "gate"):
            array = array[:, replay.x_layout.columns(np.arange(replay.width), name == "gate")]
        setting.spend(array.size if array.size > 1 << 20 else 0)
        setting.cache[key] = np.fmax.reduce(np.abs(array.astype(F)), axis=None, initial=F(0))
    return setting.cache[key]


def _set_block_amax_of_input(replay, name):
    """Let each block's amax be that of the input at its place."""
    require_blocks(replay)
    replay.facts["where"] = " of each block"
    replay.require(not any(replay.hadamard.values()))
    wide = replay.gated and replay.gradient  # the result is as wide as x
    replay.require(name == "x" if wide else name != "x" or not replay.gated)

    def quantize_blocks(inner, values, amax_values, direction, region):
        if name in ("act", "gate"):
            index = np.arange(region.columns.start, region.columns.stop)
            loaded = replay.load("x", region.rows, replay.x_layout.columns(index, name == "gate"))
        else:
            loaded = replay.load(name, region.rows, region.columns)
        return inner(values, loaded, direction, region)

    replay.wrap("quantize_blocks", quantize_blocks)


# --- blocks' amaxes -------------------------------------------------------------------------------


def _part_of_block(length, which):
    """bool: the elements along a block of `length` from which its amax is taken."""
    index = np.arange(length)
    return {
        "first half": index < length // 2,
        "last half": index >= length // 2,
        "first quarter": index < length // 4,
        "last quarter": index >= length - length // 4,
        "even elements": index % 2 == 0,
        "odd elements": index % 2 == 1,
        "every fourth element": index % 4 == 0,
        "first element": index < 1,
        "last element": index >= length - 1,
        "elements but the first": index > 0,
        "elements but the last": index < length - 1,
    }[which]


BLOCK_PARTS = (
    *("first half", "last half", "even elements", "odd elements", "first quarter", "last quarter"),
    *("every fourth element", "first element", "last element", "elements but the first", "elements but the last"),
)


@computing(
    "block-amax-of-a-part",
    "The amax of each block is that of its {part} alone{along}.",
    stage="block-amax",
    choices=[(part, axis) for axis in ("inner", "outer") for part in BLOCK_PARTS],
    last=True,
)
def block_amax_of_a_part(replay, choice):
    part, along = choice
    require_blocks(replay)
    square = min(replay.block_shapes["rowwise"]) > 1
    replay.require(square or along == "inner")
    replay.facts["part"] = part
    replay.facts["along"] = f" along {'K' if along == 'inner' else 'M'}" if square else ""

    def block_amax(inner, blocks):
        axis = (3 if along == "inner" else 1) if square else (3 if blocks.shape[3] > 1 else 1)
        taken = _part_of_block(blocks.shape[axis], part)
        return inner(np.where(taken.reshape(-1, 1, 1) if axis == 1 else taken, blocks, F(0)))

    replay.wrap("block_amax", block_amax)
