"""Every kernel once: what `compile_report` compiles and measures, with the budgets that tests assert.

Bytes are those that a thread of the full case reads and writes in global memory. Budgets are instructions for each of
these bytes, of kernels without loops; (9, 0) is an H100, (10, 0, "a") a B200.
"""

from collections import namedtuple
from dataclasses import replace

from cuda_kernels.activations import ACTIVATIONS
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
)

#: name; recipe, a `Recipe` or `ScaledGradient`; build(target, fast_math) -> kernel; signature; bytes_per_thread;
#: limits: "instr_per_byte" and "instr_per_byte_fast_math", target -> budget, None: no claim; wide_loads, wide_stores:
#: 128-bit accesses, or None; used: number -> name of the flat arguments that the kernel must read.
Entry = namedtuple("Entry", "name recipe build signature bytes_per_thread limits wide_loads wide_stores used")

BF16 = "bfloat16"
SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
MXFP8 = ("mxfp8", "e4m3", "up", False, False)
NVFP4 = ("nvfp4", 448, False, False, "nearest", False)
BLOCK = ("block", "e4m3", False, True)
DELAYED = ("per tensor+amax", "e4m3", True)
IDENTITY = Prologue("identity", None, BF16)


#: Instructions for each byte of bf16 -> MXFP8 rowwise, as measured, rounded up to the next twentieth: accurate on
#: (9, 0) and (10, 0, "a"), fast_math on both.
ROW_BUDGETS = {
    "gelu": (9.3, 9.15, 5.0, 4.0),
    "dgelu": (7.75, 7.65, 4.35, 3.35),
    "qgelu": (8.95, 8.8, 5.65, 4.5),
    "dqgelu": (6.55, 6.25, 4.3, 3.45),
    "relu": (3.0, 2.85, 3.0, 2.85),
    "drelu": (2.35, 2.25, 2.35, 2.25),
    "srelu": (3.65, 3.5, 3.65, 3.5),
    "dsrelu": (2.55, 2.45, 2.55, 2.45),
    "silu": (8.65, 8.5, 5.3, 4.3),
    "dsilu": (6.15, 6.05, 4.1, 3.35),
    "glu": (5.55, 5.35, 3.55, 2.95),
    "dglu": (4.8, 4.65, 3.5, 2.9),
    "geglu": (6.15, 5.95, 3.55, 2.85),
    "dgeglu": (8.4, 8.25, 3.9, 3.05),
    "qgeglu": (5.95, 5.75, 3.95, 3.15),
    "dqgeglu": (5.3, 5.0, 3.9, 3.1),
    "reglu": (2.35, 2.15, 2.35, 2.15),
    "dreglu": (2.65, 2.55, 2.65, 2.55),
    "sreglu": (2.75, 2.55, 2.75, 2.55),
    "dsreglu": (3.0, 2.9, 3.0, 2.9),
    "swiglu": (5.75, 5.55, 3.75, 3.05),
    "dswiglu": (5.05, 4.9, 3.65, 2.95),
    "clamped_swiglu": (6.8, 6.6, 4.75, 3.85),
    "dclamped_swiglu": (6.45, 6.3, 4.9, 3.9),
    "situglu": (21.4, 21.15, 9.5, 6.4),
    "dsituglu": (16.85, 15.45, 8.9, 6.15),
}


def _entry(name, recipe, bytes_per_thread, limits=None, wide_loads=None, wide_stores=None):
    def build_for(target, fast_math):
        changed = replace(recipe, fast_math=fast_math)
        return build_scaled_gradient(changed, target) if isinstance(recipe, ScaledGradient) else build(changed, target)

    arguments = arguments_of(recipe)
    signature = tuple(numba_type(one) for one in arguments)
    used = _must_be_used(recipe, arguments) if isinstance(recipe, Recipe) else {}
    return Entry(name, recipe, build_for, signature, bytes_per_thread, limits or {}, wide_loads, wide_stores, used)


def _must_be_used(recipe, arguments):
    """Number of a flat argument -> its name, of those that a kernel must read: input, codes, scales."""
    used, number, outputs = {}, 0, [recipe.row, recipe.column]
    for kind, fields in arguments:
        if isinstance(kind, str):
            number += 1
            continue
        key = None if kind is Inputs else outputs.pop(0)
        for field in fields:
            stores = key is not None and (
                (field == "data" and key[0] not in NO_DATA) or (field == "scales" and _scales(key))
            )
            if field == "x" or stores:
                used[number] = f"{field} of {kind.__name__}"
            number += 1
    return used


#: Epilogues that store no data.
NO_DATA = ("nothing", "amax", "amax of rows", "block amax")


def _scales(key):
    """Whether an epilogue stores scales."""
    known = key[0].startswith("per tensor") and key[2]
    return known or key[0].startswith(("block", "mxfp8", "nvfp4")) or key[0] in ("e4m3", "e5m2")


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
    e5m2, in_memory = ("mxfp8", "e5m2", "up", False, False), ("per tensor", "e4m3", False)
    wide = lambda *key, **options: replace(row(*key, **options), kernel="wide row")  # noqa: E731
    for storage, size in SIZES.items():
        yield _entry(f"{storage} -> MXFP8", wide(storage, MXFP8), 16 * size + 16.5, _budget(2.45, 2.15), size, 1)
    yield _entry("bf16 -> MXFP8 E5M2", wide(BF16, e5m2), 48.5, _budget(2.45, 2.15), 2, 1)
    yield _entry("bf16 -> MXFP8, swizzled", wide(BF16, (*MXFP8[:4], True)), 48.5, None, 2, 1)
    yield _entry("bf16 -> MXFP8, guarded", row(BF16, MXFP8, whole=False), 24.25)
    yield _entry("bf16 -> delayed FP8", row(BF16, DELAYED), 24, _budget(3.85, 3.7), 1, 0)
    yield _entry("bf16 -> FP8, scale in memory", row(BF16, in_memory), 24, _budget(2.45, 2.45), 1, 0)
    yield _entry("bf16 -> 1x128 blocks", row(BF16, BLOCK), 24.25, _budget(4.1, 4), 1, 0)
    blocks = lambda key, kernel="two block row", storage=BF16: replace(row(storage, key), kernel=kernel)  # noqa: E731
    random, by_row = ("nvfp4", 448, False, False, "philox", False), ("nvfp4", 448, False, True, "nearest", False)
    yield _entry("bf16 -> NVFP4", blocks(NVFP4), 82, _budget(4.5, 2.2), 4, 1)
    yield _entry("bf16 -> NVFP4, one block", blocks(NVFP4, "block row"), 41, _budget(5, 2.75), 2, 0)
    yield _entry("bf16 -> NVFP4, row-scaled", blocks(by_row), 82, _budget(4.55, 2.25), 4, 1)
    yield _entry("bf16 -> NVFP4, stochastic", blocks(random), 82, _budget(8, 7.7), 4, 1)
    yield _entry("float16 -> NVFP4", blocks(NVFP4, storage="float16"), 82, _budget(4.5, 2.2), 4, 1)
    yield _entry("float32 -> NVFP4", blocks(NVFP4, storage="float32"), 146, _budget(2.35, 1.05), 8, 1)
    four_over_six = ("nvfp4 4over6", 448, False, False, False)
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
    recipe = Recipe("mxfp8", Prologue("backward", "gelu", BF16), MXFP8, ("e4m3", "up", False), BF16, True)
    recipe, limits = Recipe(**{**vars(recipe), "dbias": "exact"}), _budget(7.7, 7.45, 5, 4)
    yield _entry("dgelu + dbias bf16 -> MXFP8 both", recipe, 32 * 6.06 + 4, limits)


def _tiles():
    """Both directions, squares and columns."""
    columns = ("e4m3", "up", False)
    limits = _budget(3.45, 2.8)
    yield _entry("bf16 -> MXFP8 both", Recipe("mxfp8", IDENTITY, MXFP8, columns, BF16), 32 * 4.0625, limits, 4, 0)
    yield _entry("bf16 -> MXFP8 columnwise", Recipe("mxfp8", IDENTITY, None, columns, BF16), 32 * 3.03125, None, 4, 0)
    swiglu = Prologue("forward", "swiglu", BF16)
    recipe, limits = Recipe("mxfp8", swiglu, MXFP8, columns, BF16, True), _budget(5.95, 5.5, 4.25, 3.4)
    yield _entry("swiglu bf16 -> MXFP8 both", recipe, 32 * 6.0625, limits, 8, 0)
    tile = 128 * 128 / 256
    for name, key, size, more in (
        ("delayed FP8", DELAYED, 4, {}),
        ("1x128 blocks", BLOCK, 4.0625, {}),
        ("NVFP4", NVFP4, 3.125, {}),
        ("NVFP4 + RHT", NVFP4, 3.125, {"transform": (0xD7E8, False)}),
    ):
        recipe = Recipe("tile", IDENTITY, key, key, BF16, stage=BF16, **more)
        yield _entry(f"bf16 -> {name} both", recipe, tile * size)
    recipe = Recipe("tile", Prologue("forward", "gelu", BF16), DELAYED, DELAYED, BF16)
    yield _entry("gelu bf16 -> delayed FP8 both", recipe, tile / 2 * 4)
    recipe = Recipe("tile", Prologue("backward", "gelu", BF16), DELAYED, DELAYED, BF16, dbias="exact")
    yield _entry("dgelu + dbias bf16 -> delayed FP8 both", recipe, tile / 2 * 6)
    square = ("block", "e4m3", True, True)
    yield _entry("bf16 -> 128x128 both", Recipe("square", IDENTITY, square, square, BF16, stage=BF16), tile * 4)
    key, columns = ("mxfp8", "e4m3", "up", True, False), ("mxfp8 square columns", "e4m3", "up", False)
    recipe = Recipe("square", IDENTITY, key, columns, BF16, stage=BF16, transposed=False)
    yield _entry("bf16 -> MXFP8 32x32 both", recipe, tile * 4.0625)
    key = ("nvfp4", 448, True, False, "nearest", False)
    yield _entry("bf16 -> NVFP4 16x16 both", Recipe("square", IDENTITY, key, key, BF16, stage=BF16), tile * 3.125)
    key = ("nvfp4 4over6", 448, False, False, False)
    recipe = Recipe("square choice", IDENTITY, key, key, BF16, stage=BF16)
    yield _entry("bf16 -> NVFP4 16x16 4over6 both", recipe, tile * 3.125)


def _dequantization():
    plain = ("plain", BF16)
    for name, fmt, kind, options, size, limits in (
        ("FP8", "e4m3", "tensor", {}, 48, (1.7, 1.55)),
        ("1x128 blocks", "e4m3", "row_block", {}, 48.5, (1.85, 1.65)),
        ("MXFP8", "e4m3", "mx_row", {}, 48.5, (1.9, 1.7)),
        ("MXFP8 columnwise", "e4m3", "mx_columns", {}, 64, (3.2, 3.05)),
        ("NVFP4", "e2m1", "nvfp4", {"top": 2688.0}, 41, (3.05, 2.1)),
    ):
        recipe = Recipe("decode row", Prologue("decoded", kind, fmt, **options), plain)
        yield _entry(f"{name} -> bf16", recipe, size, _budget(*limits), None, 2)
    recipe = Recipe("row", Prologue("decoded", "mx_row", "e4m3"), plain)
    yield _entry("MXFP8 -> bf16, any K", recipe, 24.25, None, None, 1)
    prologue = Prologue("decoded", "nvfp4", "e2m1", top=2688.0, transform=(0xD7E8, True))
    yield _entry("NVFP4 columnwise + RHT -> bf16", Recipe("tile", prologue, None, plain), 128 * 64 / 256 * 2.6)


def catalogue():
    """Return the `Entry` of every kernel."""
    return [*_casts(), *_activations(), *_sums(), *_tiles(), *_dequantization()]
