"""Conventions of where blocks begin, of whose scale a block is cast with, and of where in its array it is written."""

import math
from itertools import product

import numpy as np

from refops.formats import E8M0
from refops.oracle.conventions.carried import inside, widened
from refops.oracle.conventions.registry import computing
from refops.oracle.conventions.scales import require_blocks, require_coded_scales
from refops.oracle.geometry import TILE, Geometry, Region, crop, part_of, whole
from refops.quantization.layout import ceil_div, padded_blocks, swizzled_offset
from refops.quantization.result import DIRECTIONS, reorder_scales
from refops.scalings.declaration import SCALE_TILE

# --- where blocks begin ---------------------------------------------------------------------------

#: Lines by which a grid of blocks is off; only those below the edge of a block are tried.
DISPLACEMENTS = (1, 2, 4, 8, 16, 32, 64)
#: What a kernel does with the lines at an end of the tensor that no block of such a grid has: name -> words.
GRIDS = {
    "open": "",
    "joined": "; the block at the end has the lines beyond it too",
    "wrapped": "; the block at the end takes lines of the other end",
    "amax alone": "; but the codes are cast by the right blocks",
}
#: Share of the wrong scales of a probe that a displaced grid must give to be tried on more.
LEAST_GIVEN = 0.5


def _displaced_grids(replay):
    """(lines by which blocks begin late, below 0 early; one of `GRIDS`) that give wrong scales of the dump."""
    require_blocks(replay)
    replay.require(replay.scaling.random is None and replay.rule.choice is None)
    edge = max(replay.block_shapes["rowwise"])
    offsets = [sign * by for by in DISPLACEMENTS if by < edge for sign in (1, -1)]
    return [(by, grid) for by in offsets if _gives_scales(replay.setting, by) for grid in GRIDS]


def _gives_scales(setting, by):
    """Whether blocks that begin `by` lines late give wrong scales that the dump has in the probe, in some copy."""
    region = setting.probe
    if region is None:
        return False
    for direction in DIRECTIONS:
        name = f"{direction}_scale_inv"
        if name not in setting.outputs:
            continue
        written, own = (crop(setting.case, name, a[name], region) for a in (setting.outputs, setting.reference))
        differs = written != own
        if not differs.any():
            continue
        replay = setting.replay()
        _displace(replay, by, "amax alone")
        replay.encode = lambda values, bits: np.zeros(values.shape, np.uint8)  # its scales alone are asked for
        margins = (0, TILE) if direction == "rowwise" else (TILE, 0)
        wide = widened(region, setting.shape, margins, margins)
        with np.errstate(all="ignore"):
            made = part_of(setting.case.scaling, name, replay.run(wide, [name])[name], inside(region, wide))
        if np.mean((made == written)[differs]) >= LEAST_GIVEN:
            return True
    return False


def _displace(replay, by, grid):
    """Let blocks begin `by` lines late (below 0: early) along the direction in which they run."""
    joins = []  # the axis along which the two blocks at an end are one, where they are

    def quantize_blocks(inner, values, amax_values, direction, region):
        axis = int(direction == "rowwise")
        size, edge = values.shape[axis], replay.block_shapes[direction][axis]
        count, lead = ceil_div(size, edge), -by % edge  # the grid begins so many lines before the first
        if grid == "amax alone":
            return inner(values, _from_line(amax_values, by, axis, size), direction, region)
        if grid == "wrapped":
            codes, scales = inner(*(np.roll(v, -by, axis) for v in (values, amax_values)), direction, region)
            return np.roll(codes, by, axis), scales
        first = int(by > 0)  # the block of that grid which has the first scale
        blocks = max(ceil_div(lead + size, edge), first + count)
        joins[:] = [axis] if grid == "joined" and blocks > count else []
        lines = -lead, axis, blocks * edge
        codes, scales = inner(_from_line(values, *lines), _from_line(amax_values, *lines), direction, region)
        return _from_line(codes, lead, axis, size), _from_line(scales, first, axis, count)

    def join(amax):
        for axis in joins:
            lines = np.moveaxis(amax, axis, 0)
            pair = slice(0, 2) if by > 0 else slice(-2, None)
            lines[pair] = np.fmax.reduce(lines[pair], axis=0)
        return amax

    replay.wrap("quantize_blocks", quantize_blocks)
    replay.after("block_amax", join)


def _from_line(array, start, axis, size):
    """`size` lines of an array from line `start` on, which may lie before the first; zeros beyond its ends."""
    lines = np.moveaxis(array, axis, 0)
    taken = np.zeros((size, *lines.shape[1:]), array.dtype)
    first, last = max(start, 0), min(start + size, len(lines))
    taken[first - start : last - start] = lines[first:last]
    return np.ascontiguousarray(np.moveaxis(taken, 0, axis))


@computing(
    "displaced-blocks",
    "The blocks of a copy begin {by} {when} along the direction in which they run: block n begins at line {edge} n "
    "{sign} {number}, where TE's begins at {edge} n{grid}.",
    stage="blocks",
    choices=_displaced_grids,
    alone=True,
)
def displaced_blocks(replay, choice):
    by, grid = choice
    require_blocks(replay)
    replay.facts["by"] = f"{abs(by)} line{'s' * (abs(by) > 1)}"
    replay.facts["when"], replay.facts["sign"] = ("late", "+") if by > 0 else ("early", "-")
    replay.facts["number"], replay.facts["edge"] = abs(by), max(replay.block_shapes["rowwise"])
    replay.facts["grid"] = GRIDS[grid]
    replay.halo = "along"
    _displace(replay, by, grid)


# --- whose scale a block is cast with ---------------------------------------------------------------

#: Elements of a tensor up to which all of its scales are made for an index that goes over all of them.
MOST_ELEMENTS = 1 << 20
#: Blocks that must have another scale than the one that they are cast with; scales with no mantissa agree by chance.
LEAST_MIRRORED, LEAST_MIRRORED_POWERS = 2, 6
#: Share of these that must have a wrong code.
LEAST_WRONG_BLOCKS = 0.5
#: Which scale block [i, j] of {rows} x {columns} is cast with: name, or edge of the tiles in which it is -> words.
MIRRORS = {
    "grid": "block [j, i]",
    128: "block [j, i] of its tile of 128 x 128 elements",
    64: "block [j, i] of its tile of 64 x 64 elements",
    "rows": "the block at place {columns} j + i, counted along rows, as if its indices were [j, i]",
    "columns": "the block at place {rows} j + i, counted along rows, as if the scales lay transposed",
    "stored": "the block at place {columns} i + j, counted along columns, as if the scales lay row by row",
}
TILES = tuple(how for how in MIRRORS if isinstance(how, int))


def _mirrors(replay):
    """The `MIRRORS` of kernels whose codes are wrong under right scales, where they would change what is cast."""
    require_blocks(replay)
    replay.require(replay.rule.choice is None and replay.layout.amax != "rows")
    wrong = {name: mask.any() for name, mask in replay.setting.wrong.items()}
    copies = [d for d in DIRECTIONS if wrong.get(f"{d}_data") and not wrong.get(f"{d}_scale_inv", True)]
    return [how for how in MIRRORS if any(_shows(replay, direction, how) for direction in copies)]


def _shows(replay, direction, how):
    """Whether codes are wrong in enough of the blocks that would be cast with another scale."""
    others = _others(replay, direction, how)
    if others is None:
        return False
    geometry = Geometry.of(replay.scaling, direction)
    codes = geometry.matrix(replay.setting.wrong[f"{direction}_data"], replay.setting.shape)
    codes = codes.T if geometry.transposed else codes
    edges = list(geometry.block)
    edges[not geometry.transposed] //= geometry.packed
    wrong = padded_blocks(codes, *edges).any(axis=(1, 3))
    return np.mean(wrong[others]) >= LEAST_WRONG_BLOCKS


def _others(replay, direction, how):
    """Blocks of a copy that would be cast with another scale; None where they are too few to tell."""
    setting, scales = replay.setting, f"{direction}_scale_inv"
    if scales not in setting.outputs:
        return None
    geometry, everything = Geometry.of(replay.scaling, direction), whole(setting.shape)
    runs = geometry.scales(setting.reference[scales], everything.rows, everything.columns)
    down, along = (edge // run for edge, run in zip(geometry.block, geometry.run, strict=True))
    own = runs[::down, ::along]
    rows, columns = own.shape
    if how == "grid":
        applies = rows == columns
    elif how in TILES:
        applies = geometry.block[0] == geometry.block[1] < how
    else:
        applies = rows != columns and (how != "rows" or rows > columns) and math.prod(setting.shape) <= MOST_ELEMENTS
    if not applies:
        return None
    fmt = replay.layout.scale_format
    are_powers = fmt == E8M0 or getattr(replay.scaling, "power_2_scale", False)
    least = LEAST_MIRRORED_POWERS if are_powers else LEAST_MIRRORED
    others = _mirrored(own, how, geometry.block) != own
    return others if np.count_nonzero(others) >= least else None


def _mirrored(blocks, how, edges):
    """For each block of the whole tensor (or of whole tiles, where `how` is one of them) the entry that casts it."""
    rows, columns = blocks.shape
    if how == "grid":
        return blocks.T
    if how in TILES:
        edge = how // edges[0]
        padded = np.zeros((ceil_div(rows, edge) * edge, ceil_div(columns, edge) * edge), blocks.dtype)
        padded[:rows, :columns] = blocks
        squares = padded.reshape(len(padded) // edge, edge, -1, edge)
        return squares.transpose(0, 3, 2, 1).reshape(padded.shape)[:rows, :columns]
    if how == "stored":
        return blocks.T.reshape(blocks.shape)
    i, j = np.indices(blocks.shape)
    return blocks.reshape(-1)[j * (columns if how == "rows" else rows) + i]


@computing(
    "multiplier-of-transposed-block",
    "The codes of block [i, j] are cast with the scale of {which}, though the stored scales are right: look at the "
    "order of the two indices with which the cast reads its scale.",
    stage="multiplier",
    choices=_mirrors,
    alone=True,
)
def multiplier_of_transposed_block(replay, choice):
    shape, blocks_of = replay.setting.shape, replay.block_shapes

    def multipliers(direction, parts):
        """Those of the blocks of a rectangle; of blocks beyond the tensor what a block of zeros has."""
        region = Region(*(slice(part.start, min(part.stop, size)) for part, size in zip(parts, shape, strict=True)))
        values = replay.operands(direction, region)[1]
        beyond = [(0, part.stop - part.start - size) for part, size in zip(parts, values.shape, strict=True)]
        blocks = padded_blocks(np.pad(values, beyond), *blocks_of[direction])
        return replay.scales(*replay.amaxes(blocks, direction, region))[1]

    def spread(inner, multiplier, direction, region):
        if _others(replay, direction, choice) is None:
            return inner(multiplier, direction, region)
        edges = blocks_of[direction]
        rows, columns = (ceil_div(size, edge) for size, edge in zip(shape, edges, strict=True))
        replay.facts["which"] = MIRRORS[choice].format(rows=rows, columns=columns)
        parts = region.rows, region.columns
        i, j = (slice(part.start // edge, ceil_div(part.stop, edge)) for part, edge in zip(parts, edges, strict=True))
        if choice == "grid":
            there = [slice(at.start * edge, at.stop * edge) for at, edge in zip((j, i), edges, strict=True)]
            return inner(multipliers(direction, there).T, direction, region)
        if choice in TILES:
            tiles = [slice(p.start // choice * choice, ceil_div(p.stop, choice) * choice) for p in parts]
            made = _mirrored(multipliers(direction, tiles), choice, edges)
            i, j = (
                slice(at.start - t.start // e, at.stop - t.start // e)
                for at, t, e in zip((i, j), tiles, edges, strict=True)
            )
            return inner(made[i, j], direction, region)
        made = _mirrored(multipliers(direction, (slice(0, shape[0]), slice(0, shape[1]))), choice, edges)
        return inner(made[i, j], direction, region)

    replay.wrap("spread", spread)


# --- where scales are written ---------------------------------------------------------------------
# An order that only moves scales is a reading. At these offsets some are lost: they lie on others, or in no array.

#: Share of the scales of a kernel with wrong offsets that the dump must have where that kernel writes them.
LEAST_FOUND = 0.9
#: Scales of an array up to which wrong offsets are worth their time.
MOST_SCALES = 1 << 21


class ScaleArray:
    """The right scales of a copy and the written ones, with the outer dimension of a GEMM first.

    Attributes:
        right: (outer, blocks), padded.
        lines, blocks: how many of them are no padding.
        memory: the bytes of the dump, one after the other.
        inner_first: whether [block, outer] is stored.
    """

    def __init__(self, setting, name):
        self._case, self._name, self._shape = setting.case, name, setting.reference[name].shape
        self.inner_first = setting.case.scaling.layout.scales_inner_first["columnwise" in name]
        valid, right = Geometry.of(self._case.scaling, name).valid_scale_shape(setting.shape), setting.reference[name]
        self.lines, self.blocks = valid[::-1] if self.inner_first else valid
        self.right = np.ascontiguousarray(right.T) if self.inner_first else right
        self.memory = self._reordered(setting.outputs[name], True).reshape(-1)
        self.differs = not np.array_equal(setting.outputs[name], right)

    def _reordered(self, scales, to_swizzled):
        if not self._case.swizzled_scales:  # the dump is compared in the order of its memory
            return scales
        return reorder_scales(self._case.scaling.layout, self._name, scales, to_swizzled)

    def written_at(self, offsets, last):
        """What a kernel writes at `offsets`: an array to be compared with the dump, or None if the dump denies it.

        Of two scales with one offset the one with the larger index stays (`last`), or the other one. What nothing was
        written to holds what the dump has there most often.
        """
        outer, block = (index.reshape(-1)[:: 1 if last else -1] for index in np.indices((self.lines, self.blocks)))
        offset = offsets(self, outer, block)
        inside = offset < self.right.size
        made, is_written = np.zeros(self.right.size, np.uint8), np.zeros(self.right.size, bool)
        made[offset[inside]], is_written[offset[inside]] = self.right[outer[inside], block[inside]], True
        if np.mean((made == self.memory)[is_written]) < LEAST_FOUND:
            return None
        if not is_written.all():
            made[~is_written] = np.bincount(self.memory[~is_written]).argmax()
        return self._reordered(made.reshape(self._shape), False)


def _with_floored_tiles(array, outer, block):
    return swizzled_offset(outer, block, array.blocks // SCALE_TILE[1])


def _of_stored_order(array, outer, block):
    return swizzled_offset(block, outer, len(array.right) // SCALE_TILE[1])


def _has_a_partial_tile(array):
    return array.lines > SCALE_TILE[0] and array.blocks % SCALE_TILE[1] > 0


def _has_other_rows_of_tiles(array):
    return array.inner_first and array.right.shape[1] % SCALE_TILE[0] > 0


#: Offsets that lose scales: name -> (f(array, outer, block) -> offset; whether they lose any of an array; words).
OFFSETS = {
    "floored": (
        _with_floored_tiles,
        _has_a_partial_tile,
        "{floor} tiles count as a row of tiles, where its {blocks} blocks of scales fill {ceiling}: the first tile of "
        "a row lies on the last of the row before",
    ),
    "as stored": (
        _of_stored_order,
        _has_other_rows_of_tiles,
        "they are swizzled along their stored order [block, column], where TE swizzles their transpose, so that most "
        "offsets lie beyond the array",
    ),
}


def _scattered(replay):
    """{(name of an `OFFSETS`, which of two scales stays): {name of an array: what is written}}, made once.

    Only of arrays whose scales are wrong, and which hold what a kernel with these offsets writes.
    """
    require_coded_scales(replay)
    setting = replay.setting
    replay.require(replay.layout.scale_order == "gemm")
    if "scattered" not in setting.cache:
        found = setting.cache["scattered"] = {}
        for name in (name for name in setting.outputs if name.endswith("_scale_inv")):
            array = ScaleArray(setting, name)
            if not array.differs or array.right.size > MOST_SCALES:
                continue
            for (offsets, (where, loses, _)), last in product(OFFSETS.items(), (True, False)):
                written = array.written_at(where, last) if loses(array) else None
                if written is not None:
                    found.setdefault((offsets, last), {})[name] = written
    return setting.cache["scattered"]


@computing(
    "scale-offsets",
    "The scales are written at wrong offsets of the swizzled order that GEMMs read (tiles of 128 x 4): {how}.",
    stage="stored",
    choices=_scattered,
    alone=True,
)
def scale_offsets(replay, choice):
    written = _scattered(replay)[choice]
    array = ScaleArray(replay.setting, next(iter(written)))
    floor, ceiling = array.blocks // SCALE_TILE[1], ceil_div(array.blocks, SCALE_TILE[1])
    replay.facts["how"] = OFFSETS[choice[0]][2].format(blocks=array.blocks, floor=floor, ceiling=ceiling)

    def place_scales(inner, scales, direction, region):
        name = f"{direction}_scale_inv"
        placed = inner(scales, direction, region)
        return crop(replay.case, name, written[name], region) if name in written else placed

    replay.wrap("place_scales", place_scales)
