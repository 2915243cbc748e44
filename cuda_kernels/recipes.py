"""Recipes: which prologue, epilogues and kernel make an operation, as plain hashable descriptions.

A `Recipe` is what a compiled kernel is cached by. `build` turns it into the Python function of the kernel for a target,
`signature` into the types of its arguments. Nothing here touches a GPU.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from cuda_kernels import casts, epilogues, kernels, prologues
from cuda_kernels.directions import Direction
from cuda_kernels.hadamard import make_hadamard
from cuda_kernels.operands import PARAMETERS, Inputs, Outputs, pointer, scalar
from cuda_kernels.simt import device
from cuda_kernels.vectors import VECTOR, make_kept, make_load, make_map3, make_round, make_store, products_for
from refops.activations import ACTIVATIONS


@dataclass(frozen=True)
class Prologue:
    """What is computed.

    Attributes:
        kind: "identity", "forward", "backward" (decoding: "codes").
        name: the activation, or None.
        storage: dtype of x, or the format of the codes.
        scaled, interleaved: row scales, interleaved gates.
        part: of a gated gradient, "both" halves, or "pair" for both from one read.
    """

    kind: str
    name: str | None
    storage: str
    scaled: bool = False
    interleaved: bool = False
    part: str = "both"

    @property
    def gated(self):
        """Whether rows are [act | gate]."""
        return self.kind in ("forward", "backward") and activation_is_gated(self.name)


def activation_is_gated(name):
    """Whether an activation has a gate."""
    return ACTIVATIONS[name].gated


@dataclass(frozen=True)
class Recipe:
    """One kernel.

    Attributes:
        kernel: "row", "wide row", "block row", "two block row", "band", "tile", "square", "square choice" or "columns".
        prologue: what is computed.
        row, column: epilogues, `Direction`s or tuples, a name of `EPILOGUES` and its options; None for a direction that
            is not made.
        storage: nominal dtype, to which `rounded` rounds before the cast.
        rounded: whether it does.
        stage: dtype of a tile in shared memory.
        transform: None or (sign mask, inverse) of the Hadamard transform; of columns in tiles, of rows in rows.
        dbias: None, "exact" or "rounded": also write column sums, of which values.
        whole, whole_columns: rows, transposed columns are aligned and hold whole vectors.
        transposed: a square's columnwise copy is stored transposed.
        fast_math: approximate exp and reciprocal.
    """

    kernel: str
    prologue: Prologue
    row: Any
    column: Any = None
    storage: str = "float32"
    rounded: bool = False
    stage: str = "float32"
    transform: tuple | None = None
    dbias: str | None = None
    whole: bool = True
    whole_columns: bool = True
    transposed: bool = True
    fast_math: bool = False

    @property
    def one_direction(self):
        """Whether the kernel has one `Outputs` only."""
        return self.kernel.endswith("row") or self.kernel == "band"


@dataclass(frozen=True)
class ScaledGradient:
    """The kernel of a row-scaled activation's gradients.

    Attributes:
        name: the activation. storage: dtype of x and dy. out_storage, scales_storage: dtypes of what is written.
        interleaved, whole, fast_math: as in `Prologue` and `Recipe`.
    """

    name: str
    storage: str
    out_storage: str
    scales_storage: str
    interleaved: bool = False
    whole: bool = True
    fast_math: bool = False


@cache
def make_prologue(key, whole, fast_math, target, skip=0):
    """Return the prologue function of a `Prologue`; for part "pair" it gives two vectors.

    With `skip`, which whole rows of all but codes and gradients of part "both" can have, it begins so many elements
    after its column.
    """
    if key.kind == "codes":
        return prologues.codes(key.storage)
    if key.kind == "identity":
        return prologues.identity(key.storage, whole, skip)
    options = (key.name, key.storage, whole, fast_math)
    if key.kind == "forward":
        made = _forward(key, options, skip, target)
        return prologues.scaled(made) if key.scaled else made
    if not key.gated:
        return prologues.unary_gradient(*options, skip, target)
    if key.part == "pair":
        return prologues.pair_of_gradients(*options, skip, target)
    return prologues.both_gradients(*options, target)


def _forward(key, options, skip, target):
    if key.gated:
        return prologues.gated(*options, key.interleaved, skip, target)
    return prologues.unary(*options, skip, target)


# --- epilogues by name ------------------------------------------------------------------------------


def direction_in(key):
    """The `Direction` of an epilogue's key, None of one that casts nothing."""
    return next((one for one in (key if isinstance(key, tuple) else (key,)) if isinstance(one, Direction)), None)


def _cast(whole, target, direction):
    """Scale and cast; the amax of a tensor whose scale is known is recorded on the way."""
    if direction.block is not None:
        return epilogues.blocks(direction, whole, target)
    made = epilogues.per_tensor(direction, whole, target)
    return epilogues.recording(made, 32) if direction.known else made


def _only_blocks(whole, target, direction):
    """The lanes and rows of an epilogue's blocks, nothing stored."""
    return _cast(whole, target, direction)._replace(store=epilogues.nothing().store)


def _squares(whole, target, direction):
    """One direction under squares."""
    made = epilogues.squares_along_rows if direction.along_columns else epilogues.blocks
    return made(direction, whole, target)


def _with_given_amax(whole, target, direction):
    return epilogues.with_given_amax(_squares(whole, target, direction), direction.transposed)


#: name -> function of (whole, target, options) that returns an `epilogues.Epilogue`.
EPILOGUES = {
    "nothing": lambda whole, target: epilogues.nothing(),
    "plain": lambda whole, target, storage: epilogues.plain(storage, whole, target),
    "plain+amax": lambda whole, target, storage: epilogues.recording(epilogues.plain(storage, whole, target), 32),
    "amax": lambda whole, target: epilogues.record_amax(32),
    "amax of rows": lambda whole, target: epilogues.record_amax(4, by_outer=True),
    "amax of squares": lambda whole, target, edge: epilogues.record_block_amax(edge),
    "codes": lambda whole, target, fmt: epilogues.codes(fmt, whole, target),
    "cast": _cast,
    "only blocks": _only_blocks,
    "squares": _squares,
    "given amax": _with_given_amax,
}


@cache
def make_epilogue(key, whole, target):
    """Return the `epilogues.Epilogue` of a tuple (name, *options) or of a `Direction`; None stores nothing."""
    name, *options = ("cast", key) if isinstance(key, Direction) else key or ("nothing",)
    return EPILOGUES[name](whole, target, *options)


# --- kernels ----------------------------------------------------------------------------------------


@cache
def build(recipe, target):
    """Return the kernel function of a `Recipe` for a compute capability, (major, minor[, "a"]), or None (simulator)."""
    prologue = make_prologue(recipe.prologue, recipe.whole, recipe.fast_math, target)
    rounded = make_round(recipe.storage if recipe.rounded else "float32", target)
    if recipe.kernel == "wide row":
        return _wide_row_kernel(recipe, prologue, target)
    if recipe.kernel in ("block row", "two block row"):
        return _block_row_kernel(recipe, target)
    row = make_epilogue(None if recipe.kernel == "square choice" else recipe.row, recipe.whole, target)
    transform = make_transform(recipe, target)
    if recipe.kernel == "row" and recipe.prologue.part == "pair":
        return kernels.make_pair_kernel(prologue, row, rounded)
    if recipe.kernel == "row":
        return kernels.make_row_kernel(prologue, row, rounded, transform)
    if recipe.kernel == "band":
        return kernels.make_band_kernel(prologue, row, rounded, recipe.dbias == "rounded")
    if recipe.kernel == "square choice":
        return _square_choice_kernel(recipe, prologue, rounded, target)
    if recipe.kernel == "columns":
        return _column_kernel(recipe, prologue, row, rounded, target)
    column = make_epilogue(recipe.column, recipe.whole_columns, target)
    if recipe.kernel == "square":
        return kernels.make_square_kernel(prologue, row, column, rounded, recipe.stage, recipe.transposed)
    dbias = recipe.dbias is not None
    return kernels.make_tile_kernel(prologue, row, column, rounded, recipe.stage, transform, dbias)


def widest(recipe, width):
    """A row recipe, or its twin whose threads own 16 or 32 neighbours of rows that are so many columns wide."""
    prologue, direction = recipe.prologue, recipe.row if isinstance(recipe.row, Direction) else None
    if direction is None or not recipe.whole or recipe.transform is not None or width % (2 * VECTOR):
        return recipe
    if _has_whole_blocks(direction) and prologue.kind == "identity":
        return replace(recipe, kernel="two block row" if width % (4 * VECTOR) == 0 else "block row")
    reaches_across = prologue.kind == "backward" and prologue.gated and prologue.part != "pair"  # from half to half
    return replace(recipe, kernel="wide row") if _has_wide_blocks(direction) and not reaches_across else recipe


def _has_whole_blocks(direction):
    """Whether a thread can own whole blocks: 16 FP4 codes under one scale, whose number in a row follows the last."""
    plain = direction.block == (1, 16) and direction.packed and direction.rules().choice is None
    return plain and direction.random != "given" and not direction.layout.scales_inner_first[direction.columnwise]


def _has_wide_blocks(direction):
    """Whether a thread can own 16 codes, one a byte, that it multiplies with a power of two."""
    single = direction.block is not None and not direction.square and not direction.packed
    return single and direction.powers_of_two and direction.random is None and direction.rules().choice is None


def _wide_row_kernel(recipe, prologue, target):
    storage, direction = recipe.storage if recipe.rounded else "float32", recipe.row
    kept = make_kept(storage, direction.fmt, target)
    epilogue = epilogues.wide_blocks(direction, target, kept.cast)
    both = prologue, make_prologue(recipe.prologue, recipe.whole, recipe.fast_math, target, VECTOR)
    make = kernels.make_wide_pair_kernel if recipe.prologue.part == "pair" else kernels.make_wide_row_kernel
    return make(both, epilogue, kept)


def _block_row_kernel(recipe, target):
    one, two = epilogues.whole_blocks(recipe.row, target)
    vectors, store = (2, one) if recipe.kernel == "block row" else (4, two)
    skips = range(0, vectors * VECTOR, VECTOR)
    return kernels.make_block_row_kernel([make_prologue(recipe.prologue, True, False, target, k) for k in skips], store)


def _square_choice_kernel(recipe, prologue, rounded, target):
    row, column = recipe.row, recipe.column
    store_row = row and epilogues.make_store_choice(row, recipe.whole, target)
    store_column = column and epilogues.make_store_choice(column, recipe.whole_columns, target)
    choice = epilogues.make_candidates(row or column, target), epilogues.make_row_errors(row or column, target)
    return kernels.make_square_choice_kernel(prologue, choice, store_row, store_column, rounded, recipe.stage)


@cache
def make_transform(recipe, target):
    """Return the Hadamard transform, rounded to the nominal dtype, or what leaves values as they are."""
    if recipe.transform is None:
        return kernels.no_transform
    hadamard, rounded = make_hadamard(*recipe.transform), make_round(recipe.storage, target)
    return device(lambda v, upper: rounded(hadamard(v, upper)))


def _column_kernel(recipe, prologue, row, rounded, target):
    direction = recipe.column
    store_codes = epilogues.make_store_codes(direction.fmt, direction.packed, recipe.whole, target)
    put, scales = epilogues.make_put_block(direction), epilogues.make_scales(direction, target)
    maxima = kernels.column_maxima_for(recipe.storage if recipe.rounded else "float32", rounded, target)
    column = kernels.ColumnCast(direction.block[1], scales, put, store_codes, products_for(target))
    return kernels.make_column_kernel(prologue, row, column, maxima, recipe.dbias is not None)


@cache
def build_scaled_gradient(recipe, target):
    """Return the kernel of a `ScaledGradient`."""
    name, storage, whole, fast_math = recipe.name, recipe.storage, recipe.whole, recipe.fast_math
    d_act, d_gate = prologues.make_scaled_gradient(name, fast_math)
    gated = activation_is_gated(name)
    if gated:
        halves = prologues.make_halves(storage, whole, recipe.interleaved)
    else:
        halves = prologues.make_single(storage, whole)
    loads = halves, make_load(storage, whole)
    gradients = make_map3(d_act), make_map3(d_gate or d_act)
    forward = make_map3(prologues.make_forward_product(name, fast_math))
    stores = make_store(recipe.out_storage, whole, target), casts.STORAGES[recipe.scales_storage].narrow
    return kernels.make_scaled_gradient_kernel(loads, gradients, forward, stores, gated)


# --- types of arguments -----------------------------------------------------------------------------

#: Fields of `Inputs` and `Outputs` that are not pointers: name -> NumPy scalar type.
SCALARS = {
    **dict.fromkeys((*PARAMETERS, "epsilon", "largest_scale"), np.float32),
    **dict.fromkeys(("rows", "width", "interleave", "outer", "inner", "scale_stride"), np.int32),
    **dict.fromkeys(("seed", "offset"), np.uint64),
    "first_block": np.int64,
}
#: Pointers whose element type never changes.
POINTERS = {"row_scales": np.float32, "amax": np.int32, "given": np.float32, "random_bits": np.uint8}


def tuple_of(kind, **pointers):
    """The description of an `Inputs` or `Outputs` argument: (kind, field -> description)."""
    fields = {}
    for field in kind._fields:
        fields[field] = scalar(SCALARS[field]) if field in SCALARS else pointer(pointers.get(field) or POINTERS[field])
    return kind, fields


@cache
def arguments_of(recipe):
    """Descriptions of the arguments of a recipe's kernel: each (kind, fields) of a tuple, a pointer or a number."""
    if isinstance(recipe, ScaledGradient):
        x, out, scales = (casts.carrier(s) for s in (recipe.storage, recipe.out_storage, recipe.scales_storage))
        return tuple_of(Inputs, x=x, dy=x), pointer(out), pointer(scales)
    prologue = recipe.prologue
    x = casts.carrier(prologue.storage)
    arguments = [tuple_of(Inputs, x=x, dy=x), _outputs_of(recipe.row)]
    if not recipe.one_direction:
        arguments.append(_outputs_of(recipe.column))
    if recipe.kernel in ("band", "tile", "columns"):
        arguments.append(pointer(np.float32))
    return tuple(arguments)


def _outputs_of(key):
    direction = direction_in(key)
    if direction is not None:
        return tuple_of(Outputs, data=np.uint8, scales=direction.scale_type)
    data = casts.carrier(key[1]) if key is not None and key[0].startswith("plain") else np.uint8
    return tuple_of(Outputs, data=data, scales=np.uint8)
