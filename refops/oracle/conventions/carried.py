"""Conventions of what a tile keeps from another: its amax, the rest of its shared memory, the scale of its lines."""

from dataclasses import dataclass

import numpy as np

from refops.oracle.conventions.registry import computing
from refops.oracle.conventions.scales import require_blocks
from refops.oracle.geometry import TILE, Region, crop, part_of
from refops.oracle.replay import NotApplicable
from refops.quantization.result import DIRECTIONS

F = np.float32
AXES = ("row", "column")
#: Elements between tiles that follow each other in a CTA.
DISTANCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
#: Elements up to which a maximum over everything before is worth its time.
SMALL = 1 << 17


def widened(region, shape, before=(0, 0), after=(0, 0)):
    """The region with up to (rows, columns) more `before` and `after` it, as far as the tensor goes."""
    ends = zip((region.rows, region.columns), shape, before, after, strict=True)
    return Region(*(slice(max(part.start - b, 0), min(part.stop + a, size)) for part, size, b, a in ends))


def see_around(replay, before=(0, 0), after=(0, 0)):
    """Let each rectangle be computed with (rows, columns) before and after it, multiples of a tile, and cut again."""

    def run(inner, region, names):
        wide = widened(region, replay.shape, before, after)
        return {
            name: part_of(replay.case.scaling, name, array, inside(region, wide))
            for name, array in inner(wide, names).items()
        }

    replay.wrap("run", run)


def inside(region, wide):
    """A region seen from one that holds it."""
    parts = zip((region.rows, region.columns), (wide.rows, wide.columns), strict=True)
    return Region(*(slice(part.start - of.start, part.stop - of.start) for part, of in parts))


@dataclass
class At:
    """Where the blocks that a stage sees lie.

    Attributes:
        direction: the copy.
        edges: (rows, columns) of a block.
        start: (row, column) of the first element.
        shape: (rows, columns) of the elements.
    """

    direction: str = ""
    edges: tuple = (1, 1)
    start: tuple = (0, 0)
    shape: tuple = (0, 0)


def track_blocks(replay):
    """An `At` that the replay keeps while it quantizes."""
    at = At()

    def quantize_blocks(inner, values, amax_values, direction, region):
        at.direction, at.edges = direction, replay.block_shapes[direction]
        at.start, at.shape = (region.rows.start, region.columns.start), values.shape
        return inner(values, amax_values, direction, region)

    replay.wrap("quantize_blocks", quantize_blocks)
    return at


# --- the amax of a block before -------------------------------------------------------------------


def _larger_amaxes(replay):
    """Whether most wrong scales of the dump stand for larger amaxes than the right ones."""
    require_blocks(replay)
    setting, fmt = replay.setting, replay.layout.scale_format
    for name, written in setting.outputs.items():
        if name.endswith("_scale_inv"):
            values, own = (np.asarray(replay.read_scale(a, fmt)) for a in (written, setting.reference[name]))
            differs = written != setting.reference[name]
            if differs.any() and np.mean(values[differs] > own[differs]) > 0.9:
                return True
    return False


def _explains_scales(replay, before, change):
    """Whether block amaxes changed so give the wrong scales that the dump has in the probe, in some copy."""
    setting, region = replay.setting, replay.setting.probe
    replay.require(region is not None and replay.rule.choice is None)
    wide = widened(region, replay.shape, before)
    for direction in DIRECTIONS:
        name = f"{direction}_scale_inv"
        if name not in setting.outputs:
            continue
        written, own = (crop(replay.case, name, a[name], region) for a in (setting.outputs, setting.reference))
        if not (written != own).any():
            continue
        key = ("block amaxes", direction, wide.rows.start, wide.rows.stop, wide.columns.start, wide.columns.stop)
        if key not in setting.cache:
            setting.cache[key] = _block_amaxes(setting.replay(), direction, wide)
        at, amax, tensor_amax = setting.cache[key]
        plain = setting.replay()
        with np.errstate(all="ignore"):
            scales = plain.stored_scale(plain.scales(change(amax, at), tensor_amax)[0])
        made = part_of(replay.case.scaling, name, plain.place_scales(scales, direction, wide), inside(region, wide))
        if np.mean((made == written)[written != own]) >= 0.5:
            return True
    return False


def _block_amaxes(replay, direction, region):
    """(`At`, block amaxes, the tensor's amax) of a copy on a region."""
    at, seen = track_blocks(replay), {}

    def scales(inner, amax, tensor_amax):
        seen["amax"] = amax, tensor_amax
        return inner(amax, tensor_amax)

    replay.wrap("scales", scales)
    replay.run(region, [f"{direction}_data", f"{direction}_scale_inv"])
    if "amax" not in seen:
        raise NotApplicable
    return at, *seen["amax"]


def _of_blocks_before(axis, distance, kind):
    """f(amax, at): the larger one of each block's amax and that of the blocks before."""

    def change(amax, at):
        edge = at.edges[axis]
        if distance % edge:
            raise NotApplicable
        lag, amax = distance // edge, np.moveaxis(amax, axis, 0).copy()
        line = at.start[axis] + np.arange(len(amax)) * edge
        before = amax.copy()
        for i in range(lag, len(amax)):
            if kind == "one":
                amax[i] = np.fmax(amax[i], before[i - lag])
            elif kind == "all" or line[i] // TILE == line[i - lag] // TILE:
                amax[i] = np.fmax(amax[i], amax[i - lag])
        return np.moveaxis(amax, 0, axis)

    return change


def _tiles_before(axis, distance, kind, replay):
    """(rows, columns) before a rectangle that a replay needs."""
    size = replay.shape[axis] if kind == "all" else -(-distance // TILE) * TILE
    return (size, 0) if axis == 0 else (0, size)


def _carried(replay):
    replay.require(_larger_amaxes(replay))
    kinds = ["one", "tile"] + ["all"] * (replay.shape[0] * replay.shape[1] <= SMALL)
    found = []
    for axis in (0, 1):
        for distance in (d for d in DISTANCES if d < replay.shape[axis]):
            for kind in kinds if 2 * distance < TILE else (k for k in kinds if k != "tile"):
                try:
                    before = _tiles_before(axis, distance, kind, replay)
                    if _explains_scales(replay, before, _of_blocks_before(axis, distance, kind)):
                        found.append((axis, distance, kind))
                except NotApplicable:
                    continue
    return found


@computing(
    "amax-carried",
    "The block amax is not cleared between tiles: it is the larger of the block's own and that of {what}.",
    stage="block-amax",
    choices=_carried,
    alone=True,
)
def amax_carried(replay, choice):
    axis, distance, kind = choice
    before = f"{distance} {AXES[axis]}{'s' * (distance > 1)}"
    replay.facts["what"] = {
        "one": f"the block {before} before",
        "tile": f"the blocks {before} before, and before those, in the same {TILE} {AXES[axis]}s",
        "all": f"all blocks {before} before, and before those",
    }[kind]
    see_around(replay, _tiles_before(axis, distance, kind, replay))
    at, change = track_blocks(replay), _of_blocks_before(axis, distance, kind)
    replay.after("block_amax", lambda amax: change(amax, at))


def _of_lines_together(count, partner):
    """f(amax, at): the largest amax of lines that lie across the blocks: groups of them, or n and n ^ count."""

    def change(amax, at):
        axis = int(at.direction == "columnwise")
        lines = np.moveaxis(amax, axis, 0)
        number = np.arange(len(lines))
        result = lines.copy()
        for other in [number ^ count] if partner else [number ^ step for step in range(1, count)]:
            result = np.fmax(
                result, np.where((other < len(lines))[:, None], lines[np.minimum(other, len(lines) - 1)], 0)
            )
        return np.moveaxis(result, 0, axis)

    return change


def _together(replay):
    replay.require(_larger_amaxes(replay))
    groups = [(count, False) for count in (2, 4, 8, 16, 32)] + [(count, True) for count in (2, 4, 8, 16, 32, 64)]
    return [choice for choice in groups if _explains_scales(replay, (0, 0), _of_lines_together(*choice))]


@computing(
    "amax-of-lines-together",
    "The block amax is that of {what} together: the reduction goes over too many lanes.",
    stage="block-amax",
    choices=_together,
    alone=True,
)
def amax_of_lines_together(replay, choice):
    count, partner = choice
    replay.facts["what"] = f"lines n and n ^ {count}" if partner else f"{count} lines that lie side by side"
    at, change = track_blocks(replay), _of_lines_together(count, partner)
    replay.after("block_amax", lambda amax: change(amax, at))


# --- a last block that is short -------------------------------------------------------------------


def _require_short_block(replay):
    """The copies whose last block is short, each with its axis; NotApplicable if there is none."""
    require_blocks(replay)
    axes = {d: int(d == "rowwise") for d in DIRECTIONS if f"{d}_data" in replay.setting.outputs}
    short = {d: axis for d, axis in axes.items() if replay.shape[axis] % replay.block_shapes[d][axis]}
    replay.require(short)
    return short


def _last_lines(replay, short):
    """The lines of the short blocks, in words."""
    said = []
    for direction, axis in short.items():
        size = replay.shape[axis]
        said.append(f"{AXES[axis]}s {size - size % replay.block_shapes[direction][axis]}..{size - 1}")
    return " and ".join(said)


@computing(
    "rest-of-tile-kept",
    "The last block, {where}, is short and the rest of its tile is not cleared: its amax counts what the block before "
    "left there.",
    stage="block-amax",
    alone=True,
)
def rest_of_tile_kept(replay):
    short = _require_short_block(replay)
    replay.facts["where"] = _last_lines(replay, short)
    see_around(replay, (TILE, TILE))
    at = track_blocks(replay)

    def block_amax(inner, blocks):
        axis = short.get(at.direction)
        if axis is None or at.start[axis] + at.shape[axis] != replay.shape[axis]:
            return inner(blocks)
        blocks = np.moveaxis(blocks, (2 * axis, 2 * axis + 1), (0, 1)).copy()  # (blocks, elements, ...) along the axis
        used = at.shape[axis] % blocks.shape[1]
        if len(blocks) > 1:
            blocks[-1, used:] = blocks[-2, used:]
        return inner(np.moveaxis(blocks, (0, 1), (2 * axis, 2 * axis + 1)))

    replay.wrap("block_amax", block_amax)


@computing(
    "short-block-amax-scaled",
    "The amax of the last block, {where}, which has {used} of {size} elements, is multiplied by {factor}.",
    stage="block-amax",
    choices=("size / used", "used / size"),
    alone=True,
)
def short_block_amax_scaled(replay, choice):
    short = _require_short_block(replay)
    at = track_blocks(replay)
    replay.facts["where"] = _last_lines(replay, short)
    first = next(iter(short))
    size = replay.facts["size"] = replay.block_shapes[first][short[first]]
    used = replay.facts["used"] = replay.shape[short[first]] % size
    replay.facts["factor"] = f"{size} / {used}" if choice == "size / used" else f"{used} / {size}"

    def block_amax(inner, blocks):
        amax, axis = inner(blocks), short.get(at.direction)
        if axis is None or at.start[axis] + at.shape[axis] != replay.shape[axis]:
            return amax
        edge = at.edges[axis]
        share = F(at.shape[axis] % edge) / F(edge)
        last = (slice(None), -1) if axis else (-1, slice(None))
        amax[last] *= share if choice == "used / size" else F(1) / share
        return amax

    replay.wrap("block_amax", block_amax)


# --- scales of the lines beside -------------------------------------------------------------------


@computing(
    "neighbour-line-scale",
    "{what} of {line} n {sign} 1.",
    stage=lambda choice: {"both": "block-amax", "cast": "multiplier"}[choice[0]],
    choices=[(what, by) for what in ("cast", "both") for by in (-1, 1)],
    alone=True,
)
def neighbour_line_scale(replay, choice):
    what, by = choice
    replay.facts["sign"] = "+" if by == 1 else "-"
    if replay.dequantizes:
        replay.require(what == "both" and replay.layout.block is not None)
        _read_beside(replay, by)
        return
    require_blocks(replay)
    axes = {d: int(d == "columnwise") for d in DIRECTIONS if f"{d}_data" in replay.setting.outputs}
    replay.require(axes)
    direction = next(iter(axes))
    line = AXES[axes[direction]]
    square = replay.block_shapes[direction][axes[direction]] > 1
    replay.facts["line"] = f"tile {line}" if square else line
    replay.facts["what"] = {
        "both": f"Each {replay.facts['line']} n is scaled by the amaxes",
        "cast": f"Each {replay.facts['line']} n is cast with the scales, though stored scales are right,",
    }[what]
    see_around(replay, (TILE, TILE), (TILE, TILE))
    at = track_blocks(replay)

    def shifted(array):
        axis = int(at.direction == "columnwise")
        index = np.clip(np.arange(array.shape[axis]) + by, 0, array.shape[axis] - 1)
        return np.take(array, index, axis=axis)

    if what == "both":
        replay.after("block_amax", shifted)
    else:
        replay.after("scales", lambda pair: (pair[0], shifted(pair[1])))


def _read_beside(replay, by):
    """Read each line of a dequantized tensor with the scales of the next or the previous line."""
    axis = int(replay.direction == "columnwise")
    replay.require(replay.geometry.run[axis] == 1)
    replay.facts["line"] = AXES[axis]
    replay.facts["what"] = f"Each {AXES[axis]} n is read with the scales"
    own = replay.spread

    def spread(scales, region):
        parts = [region.rows, region.columns]
        index = np.clip(np.arange(parts[axis].start, parts[axis].stop) + by, 0, replay.shape[axis] - 1)
        if not index.size:
            return own(scales, region)
        parts[axis] = slice(int(index[0]), int(index[-1]) + 1)
        return np.take(own(scales, Region(*parts)), index - index[0], axis=axis)

    replay.spread = spread
