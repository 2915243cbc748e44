"""Every kernel once: what `compile_report` compiles and measures, with the budgets that tests assert.

Bytes are those that a thread of the full case reads and writes in global memory. Budgets are instructions for each of
these bytes, of kernels without loops; (9, 0) is an H100, (10, 0, "a") a B200.
"""

import json
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

from cuda_kernels.directions import Direction, direction_of
from cuda_kernels.families import blocks, dequantize
from cuda_kernels.launch import numba_type
from cuda_kernels.operands import Inputs
from cuda_kernels.recipes import (
    Prologue,
    Recipe,
    ScaledGradient,
    activation_is_gated,
    arguments_of,
    build,
    build_scaled_gradient,
    direction_in,
)
from refops.activations import ACTIVATIONS
from refops.formats import E4M3, E5M2
from refops.scalings import BlockScaling, CurrentScaling, DelayedScaling, MXFP8Scaling, NVFP4Scaling

#: name; recipe, a `Spec`, or a `Recipe` or `ScaledGradient`; build(target, fast_math) -> kernel; signature;
#: bytes_per_thread; limits: "instr_per_byte" and "instr_per_byte_fast_math", target -> budget, None: no claim;
#: wide_loads, wide_stores: 128-bit accesses, or None; used: number -> name of the flat arguments that the kernel must
#: read.
Entry = namedtuple("Entry", "name recipe build signature bytes_per_thread limits wide_loads wide_stores used")

BF16 = "bfloat16"
SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
MXFP8 = direction_of(MXFP8Scaling(E4M3), False)
MXFP8_COLUMNS = direction_of(MXFP8Scaling(E4M3), True)
NVFP4 = direction_of(NVFP4Scaling(), False)
DELAYED = direction_of(DelayedScaling(E4M3), False)
IDENTITY = Prologue("identity", None, BF16)


#: Instructions for each byte of bf16 -> MXFP8 rowwise, rounded up to the next twentieth: accurate on (9, 0) and
#: (10, 0, "a"), fast_math on both. `tests/measured/measure_activations.py` measures and writes them.
ROW_BUDGETS = json.loads(Path(__file__).with_name("row_budgets.json").read_text(encoding="utf-8"))


def _entry(name, recipe, bytes_per_thread, limits=None, wide_loads=None, wide_stores=None):
    def build_for(target, fast_math):
        changed = replace(recipe, fast_math=fast_math)
        return build_scaled_gradient(changed, target) if isinstance(recipe, ScaledGradient) else build(changed, target)

    arguments = arguments_of(recipe)
    signature = tuple(numba_type(one) for one in arguments)
    used = _must_be_used(recipe, arguments) if isinstance(recipe, Recipe) else {}
    return Entry(name, recipe, build_for, signature, bytes_per_thread, limits or {}, wide_loads, wide_stores, used)


def _entry_of(cost):
    """The `Entry` of a family's `operands.Cost`."""
    spec, used, number = cost.spec, {}, 0
    for kind, fields in spec.operands():
        for field, (what, _) in fields.items():
            if what == "pointer" and spec.must_read(field):
                used[number] = f"{field} of {kind.__name__}"
            number += 1
    signature = tuple(numba_type(one) for one in spec.operands())
    limits = {} if cost.budget is None else _budget(*cost.budget)
    build_for = lambda target, fast_math: spec.function(target)  # noqa: E731  of no formula, so of one arithmetic
    wide = cost.wide_loads, cost.wide_stores
    return Entry(cost.name, spec, build_for, signature, cost.bytes_per_thread, limits, *wide, used)


def _must_be_used(recipe, arguments):
    """Number of a flat argument -> its name, of those that a kernel must read: input, codes, scales."""
    used, number, outputs = {}, 0, [recipe.row, recipe.column]
    for kind, fields in arguments:
        if isinstance(kind, str):
            number += 1
            continue
        key = None if kind is Inputs else outputs.pop(0)
        for field in fields:
            stores = (field == "data" and _stores_data(key)) or (field == "scales" and _stores_scales(key))
            if field == "x" or stores:
                used[number] = f"{field} of {kind.__name__}"
            number += 1
    return used


def _stores_data(key):
    """Whether an epilogue stores values or codes."""
    return key is not None and (isinstance(key, Direction) or key[0] not in ("nothing", "only blocks", "amax"))


def _stores_scales(key):
    """Whether an epilogue stores scales: a scale in memory is stored by another kernel."""
    direction = direction_in(key)
    return direction is not None and _stores_data(key) and (direction.block is not None or direction.known)


def _budget(h100, b200, h100_fast=None, b200_fast=None):
    accurate = {(9, 0): h100, (10, 0, "a"): b200}
    fast = {(9, 0): h100_fast or h100, (10, 0, "a"): b200_fast or b200}
    return {"instr_per_byte": accurate, "instr_per_byte_fast_math": fast}


def _row_budget(name):
    """The budget in `ROW_BUDGETS`; none yet for an activation that is only about to be measured."""
    return _budget(*ROW_BUDGETS[name]) if name in ROW_BUDGETS else None


def _casts():
    """Casts of a tensor as it is, one direction."""
    row = lambda storage, key, **options: Recipe(  # noqa: E731
        "row", Prologue("identity", None, storage), key, storage=storage, **options
    )
    e5m2, in_memory = direction_of(MXFP8Scaling(E5M2), False), direction_of(CurrentScaling(E4M3), False)
    swizzled = direction_of(MXFP8Scaling(E4M3), False, swizzled=True)
    wide = lambda *key, **options: replace(row(*key, **options), kernel="wide row")  # noqa: E731
    for storage, size in SIZES.items():
        yield _entry(f"{storage} -> MXFP8", wide(storage, MXFP8), 16 * size + 16.5, _budget(2.45, 2.15), size, 1)
    yield _entry("bf16 -> MXFP8 E5M2", wide(BF16, e5m2), 48.5, _budget(2.45, 2.15), 2, 1)
    yield _entry("bf16 -> MXFP8, swizzled", wide(BF16, swizzled), 48.5, None, 2, 1)
    yield _entry("bf16 -> MXFP8, guarded", row(BF16, MXFP8, whole=False), 24.25)
    yield _entry("bf16 -> delayed FP8", row(BF16, DELAYED), 24, _budget(3.85, 3.7), 1, 0)
    yield _entry("bf16 -> FP8, scale in memory", row(BF16, in_memory), 24, _budget(2.45, 2.45), 1, 0)
    blocks = lambda key, kernel="two block row", storage=BF16: replace(row(storage, key), kernel=kernel)  # noqa: E731
    random = direction_of(NVFP4Scaling(stochastic_rounding=True), False)
    by_row = direction_of(NVFP4Scaling(row_scaled=True), False)
    yield _entry("bf16 -> NVFP4", blocks(NVFP4), 82, _budget(4.5, 2.2), 4, 1)
    yield _entry("bf16 -> NVFP4, one block", blocks(NVFP4, "block row"), 41, _budget(5, 2.75), 2, 0)
    yield _entry("bf16 -> NVFP4, row-scaled", blocks(by_row), 82, _budget(4.55, 2.25), 4, 1)
    yield _entry("bf16 -> NVFP4, stochastic", blocks(random), 82, _budget(8, 7.7), 4, 1)
    yield _entry("float16 -> NVFP4", blocks(NVFP4, storage="float16"), 82, _budget(4.5, 2.2), 4, 1)
    yield _entry("float32 -> NVFP4", blocks(NVFP4, storage="float32"), 146, _budget(2.35, 1.05), 8, 1)
    four_over_six = direction_of(NVFP4Scaling(four_over_six="mae"), False)
    yield _entry("bf16 -> NVFP4, 4over6", row(BF16, four_over_six), 20.5, None, 1, 0)
    yield _entry("amax of bf16", row(BF16, ("amax",)), 16, None, 1, 0)
    yield _entry("Hadamard of bf16", row(BF16, ("plain", BF16), transform=(0xD7E8, False)), 32, None, 1, 1)


def _activations():
    """Activations and gradients, to MXFP8 rowwise."""
    for name in ACTIVATIONS:
        gated, parts = activation_is_gated(name), 2 if activation_is_gated(name) else 1
        fused = {"storage": BF16, "rounded": True}
        forward = Recipe("wide row", Prologue("forward", name, BF16), MXFP8, **fused)
        limits = _row_budget(name)
        yield _entry(f"{name} bf16 -> MXFP8", forward, 32 * parts + 16.5, limits, 2 * parts, 1)
        part = "pair" if gated else "both"
        backward = Recipe("wide row", Prologue("backward", name, BF16, part=part), MXFP8, **fused)
        limits, size = _row_budget(f"d{name}"), 32 * (parts + 1) + 16.5 * parts
        yield _entry(f"d{name} bf16 -> MXFP8", backward, size, limits, 2 * (parts + 1), parts)
    for storage in ("float16", "float32"):
        recipe = Recipe("wide row", Prologue("forward", "swiglu", storage), MXFP8, storage=storage, rounded=True)
        yield _entry(f"swiglu {storage} -> MXFP8", recipe, 32 * SIZES[storage] + 16.5, None, 2 * SIZES[storage], 1)
    for name in ("gelu", "swiglu"):
        read = 32 if name == "swiglu" else 16
        recipe = Recipe("row", Prologue("forward", name, BF16), ("plain", BF16), storage=BF16)
        yield _entry(f"{name} bf16 -> bf16", recipe, read + 16, None, read // 16, 1)
        recipe = Recipe("row", Prologue("forward", name, BF16), ("plain+amax", BF16), storage=BF16)
        yield _entry(f"{name} bf16 -> bf16 + amax", recipe, read + 16, None, read // 16, 1)
        recipe = Recipe("row", Prologue("forward", name, BF16), DELAYED, storage=BF16)
        limits = _budget(6.6, 6.5, 4.55, 3.95) if name == "swiglu" else _budget(10.65, 10.5, 6.25, 5.25)
        yield _entry(f"{name} bf16 -> delayed FP8", recipe, read + 8, limits, read // 16, 0)
    recipe = Recipe("row", Prologue("forward", "swiglu", BF16, scaled=True), ("plain", BF16), storage=BF16)
    yield _entry("scaled swiglu bf16 -> bf16", recipe, 48.5, None, 2, 1)
    recipe = Recipe("row", Prologue("backward", "swiglu", BF16), MXFP8, storage=BF16, rounded=True, whole=False)
    yield _entry("dswiglu bf16 -> MXFP8, guarded", recipe, 40.25)
    for name in ("swiglu", "srelu"):
        yield _entry(f"scaled d{name} bf16", ScaledGradient(name, BF16, BF16, "float32"), 80)


def _sums():
    """Gradients with column sums."""
    for name in ("gelu", "silu"):
        prologue = Prologue("backward", name, BF16)
        recipe = Recipe("band", prologue, MXFP8, storage=BF16, rounded=True, dbias="exact")
        yield _entry(f"d{name} + dbias bf16 -> MXFP8", recipe, 32 * 40.25 + 32)
    recipe = Recipe("band", Prologue("backward", "gelu", BF16), DELAYED, storage=BF16, dbias="exact")
    yield _entry("dgelu + dbias bf16 -> delayed FP8", recipe, 32 * 40 + 32)
    recipe = Recipe("columns", Prologue("backward", "gelu", BF16), MXFP8, MXFP8_COLUMNS, BF16, True)
    recipe, limits = Recipe(**{**vars(recipe), "dbias": "exact"}), _budget(7.7, 7.5, 5, 4)
    yield _entry("dgelu + dbias bf16 -> MXFP8 both", recipe, 32 * 6.06 + 4, limits)


def _tiles():
    """Both directions, squares and columns."""
    limits, columns = _budget(3.45, 2.8), lambda row: Recipe("columns", IDENTITY, row, MXFP8_COLUMNS, BF16)
    yield _entry("bf16 -> MXFP8 both", columns(MXFP8), 32 * 4.0625, limits, 4, 0)
    yield _entry("bf16 -> MXFP8 columnwise", columns(None), 32 * 3.03125, None, 4, 0)
    swiglu = Prologue("forward", "swiglu", BF16)
    recipe, limits = Recipe("columns", swiglu, MXFP8, MXFP8_COLUMNS, BF16, True), _budget(5.95, 5.5, 4.25, 3.4)
    yield _entry("swiglu bf16 -> MXFP8 both", recipe, 32 * 6.0625, limits, 8, 0)
    tile = 128 * 128 / 256
    for name, key, size, more in (
        ("delayed FP8", DELAYED, 4, {}),
        ("NVFP4", NVFP4, 3.125, {}),
        ("NVFP4 + RHT", NVFP4, 3.125, {"transform": (0xD7E8, False)}),
    ):
        recipe = Recipe("tile", IDENTITY, key, _columnwise(key), BF16, stage=BF16, **more)
        yield _entry(f"bf16 -> {name} both", recipe, tile * size)
    recipe = Recipe("tile", Prologue("forward", "gelu", BF16), DELAYED, _columnwise(DELAYED), BF16)
    yield _entry("gelu bf16 -> delayed FP8 both", recipe, tile / 2 * 4)
    dgelu = Prologue("backward", "gelu", BF16)
    recipe = Recipe("tile", dgelu, DELAYED, _columnwise(DELAYED), BF16, dbias="exact")
    yield _entry("dgelu + dbias bf16 -> delayed FP8 both", recipe, tile / 2 * 6)
    square = _squares(BlockScaling(E4M3, 2))
    yield _entry("bf16 -> 128x128 both", Recipe("square", IDENTITY, *square, BF16, stage=BF16), tile * 4)
    square = _squares(MXFP8Scaling(E4M3, two_d=True))
    recipe = Recipe("square", IDENTITY, *square, BF16, stage=BF16, transposed=False)
    yield _entry("bf16 -> MXFP8 32x32 both", recipe, tile * 4.0625)
    square = _squares(NVFP4Scaling(two_d=True))
    yield _entry("bf16 -> NVFP4 16x16 both", Recipe("square", IDENTITY, *square, BF16, stage=BF16), tile * 3.125)
    row = direction_of(NVFP4Scaling(two_d=True, four_over_six="mae"), False)
    recipe = Recipe("square choice", IDENTITY, row, _columnwise(row), BF16, stage=BF16)
    yield _entry("bf16 -> NVFP4 16x16 4over6 both", recipe, tile * 3.125)


def _columnwise(direction):
    """The other direction of the same scaling."""
    return replace(direction, columnwise=True)


def _squares(scaling):
    """The epilogues of both directions under squares."""
    return direction_of(scaling, False), ("squares", direction_of(scaling, True))


def catalogue():
    """Return the `Entry` of every kernel."""
    moved = [cost for family in (blocks, dequantize) for cost in family.costs()]
    return [*_casts(), *_activations(), *_sums(), *_tiles(), *map(_entry_of, moved)]
