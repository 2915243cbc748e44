"""Conventions of an amax that misses elements, or belongs to other ones: parts of the tensor, parts of a block."""

import contextlib

import numpy as np

from refops.oracle.conventions.registry import computing
from refops.oracle.conventions.scales import amax_of_scales, require_blocks, require_scaling
from refops.oracle.geometry import Geometry, Region, whole
from refops.oracle.replay import NotApplicable, amax_is_near
from refops.quantization.layout import padded_blocks
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


#: Parts of a block that kernels take the amax of: name -> f(index of each element, elements of a block) -> bool.
BLOCK_PARTS = {
    "first half": lambda index, length: index < length // 2,
    "last half": lambda index, length: index >= length // 2,
    "even elements": lambda index, length: index % 2 == 0,
    "odd elements": lambda index, length: index % 2 == 1,
    "first quarter": lambda index, length: index < length // 4,
    "last quarter": lambda index, length: index >= length - length // 4,
    "every fourth element": lambda index, length: index % 4 == 0,
    "first element": lambda index, length: index < 1,
    "last element": lambda index, length: index >= length - 1,
    "elements but the first": lambda index, length: index > 0,
    "elements but the last": lambda index, length: index < length - 1,
}
#: Scales that are too small, at least, from which a part of the blocks is read, and the share of them that it gives.
LEAST_SMALL, LEAST_GIVEN = 16, 0.98
#: Elements of the part of a tensor from which it is read.
READ = 1 << 17


def _along_block(blocks, along):
    """The axis of a `block_view` along which parts of its blocks lie: of square ones along K ("inner") or M."""
    return 1 if blocks.shape[3] == 1 or (along == "outer" and blocks.shape[1] > 1) else 3


def _parts_of_blocks(replay):
    """(words, "inner" or "outer", the elements taken) of usual parts of a block, then of one that the dump implies."""
    require_blocks(replay)
    index = np.arange(max(replay.block_shapes["rowwise"]))
    parts = {}
    for along in ("inner", "outer") if min(replay.block_shapes["rowwise"]) > 1 else ("inner",):
        for words, inside in BLOCK_PARTS.items():
            parts[along, _elements(inside(index, len(index)))] = words
        with contextlib.suppress(NotApplicable):
            taken = _implied_part(replay, along)
            parts.setdefault((along, _elements(taken)), _words_of_part(taken))
    return [(words, along, taken) for (along, taken), words in parts.items()]


def _elements(taken):
    return tuple(np.flatnonzero(taken).tolist())


def _implied_part(replay, along):
    """bool: the elements of each block whose amax gives the scales of the dump that are too small.

    An element by whose magnitude alone a scale would be larger than the one that was written is not among them. Of
    parts without such elements that give those scales the one is taken that spoils the fewest right scales.
    """
    replay.require(replay.rule.choice is None)
    direction, small, written, right = _small_scales(replay)
    setting, plain = replay.setting, replay.setting.replay()
    region = _region_read(setting)
    blocks = padded_blocks(plain.operands(direction, region)[1], *plain.block_shapes[direction])
    axis = _along_block(blocks, along)
    magnitudes = np.moveaxis(np.fmax.reduce(np.abs(blocks), axis=4 - axis, initial=F(0)), 1 if axis == 1 else 2, 0)
    _, tensor_amax = plain.amaxes(blocks, direction, region)

    def scales_of(amax):
        with np.errstate(all="ignore"):
            return plain.stored_scale(plain.scales(amax, tensor_amax)[0])

    def is_given(scales):
        return amax_is_near(scales, written) if written.dtype == F else scales == written

    larger = [(scales_of(one) > written) & ~is_given(scales_of(one)) & (one > 0) & small for one in magnitudes]
    excluded = np.count_nonzero(larger, axis=(1, 2)) > np.count_nonzero(small) // 512  # a few may be damaged
    replay.require(excluded.any() and not excluded.all())
    found = []
    for taken in _simple_parts(~excluded):
        given = is_given(scales_of(np.max(magnitudes, axis=0, where=taken[:, None, None], initial=F(0))))
        if given[small].mean() >= LEAST_GIVEN:
            found.append((np.count_nonzero(right & ~given), taken))
    replay.require(found)
    return min(found, key=lambda spoilt_and_taken: spoilt_and_taken[0])[1]


def _region_read(setting):
    """The part of the tensor from which a part of the blocks is read."""
    m, k = setting.shape
    return whole(setting.shape) if m * k <= READ else setting.probe


def _small_scales(replay):
    """(direction, bool of the blocks with too small scales, the scales of all, bool of right ones) of a copy.

    NotApplicable where no copy's wrong scales are nearly all too small.
    """
    cache, outputs = replay.setting.cache, replay.setting.outputs
    if "small scales" not in cache:
        found = (_small_scales_of(replay, d) for d in DIRECTIONS if f"{d}_scale_inv" in outputs)
        cache["small scales"] = next((small for small in found if small is not None), None)
    replay.require(cache["small scales"] is not None)
    return cache["small scales"]


def _small_scales_of(replay, direction):
    """As `_small_scales`, of one copy; None where it has too few."""
    setting, geometry = replay.setting, Geometry.of(replay.case.scaling, direction)
    region, name = _region_read(setting), f"{direction}_scale_inv"
    steps = tuple(slice(None, None, block // run) for block, run in zip(geometry.block, geometry.run, strict=True))
    written, own = (
        geometry.scales(a[name], region.rows, region.columns)[steps] for a in (setting.outputs, setting.reference)
    )
    small = written < own
    if np.count_nonzero(small) < max(LEAST_SMALL, 0.9 * np.count_nonzero(written != own)):
        return None
    return direction, small, written, written == own


def _simple_parts(free):
    """bool, the elements taken: those of a period, then a run, then all but a run, of elements that are `free`.

    A run has the ends of an eighth of the block, then those that are as far as they may be.
    """
    length, period = len(free), 2
    while period < length and length % period == 0:
        phases = free.reshape(-1, period).all(axis=0)
        if phases.any() and not phases.all():
            yield np.tile(phases, length // period)
        period *= 2
    index, step = np.arange(length), max(length // 8, 1)
    first, end = _longest_run(free)
    for start, stop in ((-(-first // step) * step, end // step * step), (first, end)):
        if start < stop:
            yield (index >= start) & (index < stop)
    first, end = np.flatnonzero(~free)[[0, -1]] + (0, 1)
    for start, stop in ((first // step * step, -(-end // step) * step), (first, end)):
        if start > 0 or stop < length:
            yield (index < start) | (index >= stop)


def _longest_run(where):
    """[first, end] of the longest run of True; there is one."""
    runs = np.flatnonzero(np.diff(where.astype(int), prepend=0, append=0)).reshape(-1, 2)
    return runs[np.argmax(runs[:, 1] - runs[:, 0])]


def _words_of_part(taken):
    """What the elements are called that a part takes of a block."""
    length, period = len(taken), 2
    while period < length and length % period == 0:
        phases = taken.reshape(-1, period)
        if (phases == phases[0]).all():
            which = np.flatnonzero(phases[0])
            return f"element{'s' * (len(which) > 1)} {_numbers(which)} of every {period}"
        period *= 2
    inside = np.flatnonzero(taken)
    if inside[-1] - inside[0] == len(inside) - 1:
        if inside[0] == 0:
            return f"first {len(inside)} of {length} elements"
        if inside[-1] == length - 1:
            return f"last {len(inside)} of {length} elements"
        return f"elements {_numbers(inside)}"
    return f"elements but {_numbers(np.flatnonzero(~taken))}"


def _numbers(index):
    """Numbers in words: "3", "0 to 2", "0, 1 and 3"."""
    if len(index) > 2 and index[-1] - index[0] == len(index) - 1:
        return f"{index[0]} to {index[-1]}"
    *others, last = (str(number) for number in index)
    return f"{', '.join(others)} and {last}" if others else last


@computing(
    "block-amax-of-a-part",
    "The amax of each block is that of its {part} alone{along}.",
    stage="block-amax",
    choices=_parts_of_blocks,
    last=True,
)
def block_amax_of_a_part(replay, choice):
    part, along, elements = choice
    square = min(replay.block_shapes["rowwise"]) > 1
    replay.facts["part"] = part
    replay.facts["along"] = f" along {'K' if along == 'inner' else 'M'}" if square else ""

    def block_amax(inner, blocks):
        axis = _along_block(blocks, along)
        taken = np.isin(np.arange(blocks.shape[axis]), elements)
        return inner(np.where(taken.reshape(-1, 1, 1) if axis == 1 else taken, blocks, F(0)))

    replay.wrap("block_amax", block_amax)
