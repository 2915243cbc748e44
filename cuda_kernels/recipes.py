"""Recipes: which prologue, epilogues and kernel make an operation, as plain hashable descriptions.

A `Recipe` is what a compiled kernel is cached by. `build` turns it into the Python function of the kernel for a target,
`signature` into the types of its arguments. Nothing here touches a GPU.
"""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from cuda_kernels import casts, epilogues, kernels, prologues
from cuda_kernels.activations import ACTIVATIONS
from cuda_kernels.hadamard import make_hadamard
from cuda_kernels.operands import Inputs, Outputs
from cuda_kernels.simt import device
from cuda_kernels.vectors import VECTOR, make_kept, make_load, make_map3, make_round, make_store, products_for
from refops.formats import FORMATS


@dataclass(frozen=True)
class Prologue:
    """What is computed.

    Attributes:
        kind: "identity", "forward", "backward" (dequantization: "decoded").
        name: the activation; for "decoded" the kind of scale.
        storage: dtype of x (for "decoded" the format of the codes).
        scaled, interleaved: row scales, interleaved gates.
        part: of a gated gradient, "both" halves, or "pair" for both from one read.
        top: of NVFP4's decoding, 6 e4m3_max.
        transform: of decoding, (sign mask, inverse) of a Hadamard transform along the rows, or None.
    """

    kind: str
    name: str | None
    storage: str
    scaled: bool = False
    interleaved: bool = False
    part: str = "both"
    top: float = 0.0
    transform: tuple | None = None

    @property
    def gated(self):
        """Whether rows are [act | gate]."""
        return self.kind in ("forward", "backward") and activation_is_gated(self.name)


def activation_is_gated(name):
    """Whether an activation has a gate."""
    return ACTIVATIONS[name].gate is not None


@dataclass(frozen=True)
class Recipe:
    """One kernel.

    Attributes:
        kernel: "row", "wide row", "block row", "two block row", "decode row", "band", "tile", "square", "square choice"
            or "mxfp8".
        prologue: what is computed.
        row, column: epilogues as tuples, a name of `EPILOGUES` and its options; None for a direction that is not made.
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
    row: tuple | None
    column: tuple | None = None
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

    With `skip`, which whole rows of all but decoded values and gradients of part "both" can have, it begins so many
    elements after its column.
    """
    if key.kind == "decoded" and key.transform:
        return prologues.transformed(_decoded(key), make_hadamard(*key.transform))
    if key.kind == "decoded":
        return _decoded(key)
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


def _decoded(key):
    if key.name == "mx_columns":
        return prologues.decoded_mx_columns(key.storage)
    return prologues.decoded(key.storage, _scale_of(key, None))


def _decoded_wide(key, target):
    if key.name == "mx_columns":
        return prologues.decoded_mx_columns_wide(key.storage, target)
    return prologues.decoded_wide(key.storage, _scale_of(key, target), target)


def _scale_of(key, target):
    scales = {
        "tensor": prologues.tensor_scale,
        "row_block": prologues.row_block_scale,
        "square_block": prologues.square_block_scale,
        "mx_row": prologues.mx_row_scale,
        "none": prologues.no_scale,
    }
    return scales.get(key.name) or prologues.make_nvfp4_scale(key.top, key.name == "nvfp4_rows", target)


# --- epilogues by name ------------------------------------------------------------------------------


def _limit(fmt):
    return float(FORMATS[fmt].max), FORMATS[fmt].mantissa_bits


def _scale_index(swizzled, plain):
    return epilogues.scale_swizzled if swizzled else plain


def _block(whole, target, fmt, square, power_2):
    return epilogues.block_fp8(fmt, _limit(fmt)[0], square, power_2, whole, target)


def _only_blocks(whole, target, *key):
    """The lanes and rows of an epilogue's blocks, nothing stored."""
    return make_epilogue(key, whole, target)._replace(store=epilogues.nothing().store)


def _given_block(whole, target, fmt, power_2, by_column):
    return epilogues.with_given_amax(_block(whole, target, fmt, True, power_2), by_column)


def _mxfp8(whole, target, fmt, rounding, square, swizzled):
    index = _scale_index(swizzled, epilogues.scale_row_major)
    return epilogues.mxfp8(fmt, *_limit(fmt), rounding, square, index, whole, target)


def _mxfp8_square_columns(whole, target, fmt, rounding, swizzled):
    index = _scale_index(swizzled, epilogues.scale_block_major)
    return epilogues.mxfp8_square_columns(fmt, *_limit(fmt), rounding, index, whole, target)


def _nvfp4(whole, target, e4m3_max, square, row_scaled, rounding, swizzled):
    index = _scale_index(swizzled, epilogues.scale_row_major)
    return epilogues.nvfp4(square, row_scaled, rounding, index, whole, target)


def _four_over_six(whole, target, e4m3_max, mse, row_scaled, swizzled):
    index = _scale_index(swizzled, epilogues.scale_row_major)
    return epilogues.nvfp4_four_over_six(e4m3_max, mse, row_scaled, index, whole, target)


#: name -> function of (whole, target, options) that returns an `epilogues.Epilogue`.
EPILOGUES = {
    "nothing": lambda whole, target: epilogues.nothing(),
    "plain": lambda whole, target, storage: epilogues.plain(storage, whole, target),
    "plain+amax": lambda whole, target, storage: epilogues.recording(epilogues.plain(storage, whole, target), 32),
    "amax": lambda whole, target: epilogues.record_amax(32),
    "amax of rows": lambda whole, target: epilogues.record_amax(4, by_outer=True),
    "per tensor": lambda whole, target, fmt, known: epilogues.per_tensor(fmt, known, whole, target),
    "per tensor+amax": lambda whole, target, fmt, known: epilogues.recording(
        epilogues.per_tensor(fmt, known, whole, target), 32
    ),
    "codes": lambda whole, target, fmt: epilogues.codes(fmt, whole, target),
    "only blocks": _only_blocks,
    "block": _block,
    "block amax": lambda whole, target: epilogues.record_block_amax(),
    "block given": _given_block,
    "mxfp8": _mxfp8,
    "mxfp8 square columns": _mxfp8_square_columns,
    "nvfp4": _nvfp4,
    "nvfp4 4over6": _four_over_six,
}


@cache
def make_epilogue(key, whole, target):
    """Return the `epilogues.Epilogue` of a tuple (name, *options); None stores nothing."""
    name, *options = key or ("nothing",)
    return EPILOGUES[name](whole, target, *options)


# --- kernels ----------------------------------------------------------------------------------------


@cache
def build(recipe, target):
    """Return the kernel function of a `Recipe` for a compute capability, (major, minor[, "a"]), or None (simulator)."""
    if recipe.kernel == "decode row":
        store = make_store(recipe.row[1], True, target)
        return kernels.make_decode_row_kernel(_decoded_wide(recipe.prologue, target), store)
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
    if recipe.kernel == "mxfp8":
        return _mxfp8_kernel(recipe, prologue, row, rounded, target)
    column = make_epilogue(recipe.column, recipe.whole_columns, target)
    if recipe.kernel == "square":
        return kernels.make_square_kernel(prologue, row, column, rounded, recipe.stage, recipe.transposed)
    dbias = recipe.dbias is not None
    return kernels.make_tile_kernel(prologue, row, column, rounded, recipe.stage, transform, dbias)


def widest(recipe, width):
    """A row recipe, or its twin whose threads own 16 or 32 neighbours of rows that are so many columns wide."""
    prologue, (name, *options) = recipe.prologue, recipe.row
    if not recipe.whole or recipe.transform is not None or width % (2 * VECTOR):
        return recipe
    if name == "nvfp4" and options[3] in ("nearest", "philox") and prologue.kind == "identity":
        return replace(recipe, kernel="two block row" if width % (4 * VECTOR) == 0 else "block row")
    reaches_across = prologue.kind == "backward" and prologue.gated and prologue.part != "pair"  # from half to half
    return replace(recipe, kernel="wide row") if name == "mxfp8" and not reaches_across else recipe


def _mxfp8_wide(storage, target, fmt, rounding, square, swizzled):
    index, kept = _scale_index(swizzled, epilogues.scale_row_major), make_kept(storage, fmt, target)
    return epilogues.mxfp8_wide(*_limit(fmt), rounding, index, target, kept.fp8), kept


def _wide_row_kernel(recipe, prologue, target):
    storage = recipe.storage if recipe.rounded else "float32"
    epilogue, kept = _mxfp8_wide(storage, target, *recipe.row[1:])
    both = prologue, make_prologue(recipe.prologue, recipe.whole, recipe.fast_math, target, VECTOR)
    make = kernels.make_wide_pair_kernel if recipe.prologue.part == "pair" else kernels.make_wide_row_kernel
    return make(both, epilogue, kept)


def _block_row_kernel(recipe, target):
    _, _, row_scaled, rounding, swizzled = recipe.row[1:]
    index = _scale_index(swizzled, epilogues.scale_row_major)
    one, two = epilogues.nvfp4_blocks(row_scaled, rounding, index, target)
    vectors, store = (2, one) if recipe.kernel == "block row" else (4, two)
    skips = range(0, vectors * VECTOR, VECTOR)
    return kernels.make_block_row_kernel([make_prologue(recipe.prologue, True, False, target, k) for k in skips], store)


def _square_choice_kernel(recipe, prologue, rounded, target):
    made = []
    for key, whole in ((recipe.row, recipe.whole), (recipe.column, recipe.whole_columns)):
        e4m3_max, mse, _, swizzled = (key or recipe.row or recipe.column)[1:]
        index = _scale_index(swizzled, epilogues.scale_row_major)
        made.append(epilogues.make_store_choice(e4m3_max, index, whole, target) if key else None)
    errors = epilogues.make_row_errors(e4m3_max, mse)
    return kernels.make_square_choice_kernel(prologue, errors, *made, rounded, recipe.stage)


@cache
def make_transform(recipe, target):
    """Return the Hadamard transform, rounded to the nominal dtype, or what leaves values as they are."""
    if recipe.transform is None:
        return kernels.no_transform
    hadamard, rounded = make_hadamard(*recipe.transform), make_round(recipe.storage, target)
    return device(lambda v, upper: rounded(hadamard(v, upper)))


def _mxfp8_kernel(recipe, prologue, row, rounded, target):
    fmt, rounding, swizzled = recipe.column
    byte_of = epilogues.make_e8m0_byte(*_limit(fmt), rounding, target)
    store_codes = epilogues.make_store_codes(fmt, recipe.whole, target)
    index = _scale_index(swizzled, epilogues.scale_block_major)
    dbias = recipe.dbias is not None
    columns = kernels.column_maxima_for(recipe.storage if recipe.rounded else "float32", rounded, target)
    products = products_for(target)
    return kernels.make_mxfp8_kernel(prologue, row, byte_of, store_codes, index, products, columns, dbias)


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
    **dict.fromkeys(("limit", "alpha", "glu_linear_offset", "beta1", "beta2", "epsilon", "largest_scale"), np.float32),
    **dict.fromkeys(("rows", "width", "interleave", "outer", "inner", "scale_stride"), np.int32),
    **dict.fromkeys(("seed", "offset"), np.uint64),
    "first_block": np.int64,
}
#: Pointers whose element type never changes.
POINTERS = {"row_scales": np.float32, "amax": np.int32, "given": np.float32, "random_bits": np.uint8}


def pointer(dtype):
    """The description of a pointer argument."""
    return ("pointer", np.dtype(dtype).type)


def scalar(dtype):
    """The description of a number passed by value."""
    return ("scalar", np.dtype(dtype).type)


def tuple_of(kind, **pointers):
    """The description of an `Inputs` or `Outputs` argument: (kind, field -> description)."""
    fields = {}
    for field in kind._fields:
        fields[field] = scalar(SCALARS[field]) if field in SCALARS else pointer(pointers.get(field) or POINTERS[field])
    return kind, fields


def carrier(storage):
    """The NumPy dtype whose elements a kernel reads for a dtype or format: uint16 for bfloat16, uint8 for codes."""
    return casts.STORAGES[storage].carrier if storage in casts.STORAGES else np.dtype(np.uint8)


@cache
def arguments_of(recipe):
    """Descriptions of the arguments of a recipe's kernel: each (kind, fields) of a tuple, a pointer or a number."""
    if isinstance(recipe, ScaledGradient):
        x, out, scales = (carrier(s) for s in (recipe.storage, recipe.out_storage, recipe.scales_storage))
        return tuple_of(Inputs, x=x, dy=x), pointer(out), pointer(scales)
    prologue = recipe.prologue
    x = second = carrier(prologue.storage)
    if prologue.kind == "decoded":
        second = np.float32 if prologue.name in ("tensor", "row_block", "square_block", "none") else np.uint8
    arguments = [tuple_of(Inputs, x=x, dy=second), _outputs_of(recipe.row)]
    if not recipe.one_direction:
        arguments.append(_outputs_of(None if recipe.kernel == "mxfp8" else recipe.column))
    if recipe.kernel in ("band", "tile", "mxfp8"):
        arguments.append(pointer(np.float32))
    return tuple(arguments)


def _outputs_of(key):
    name = "nothing" if key is None else key[0]
    data = carrier(key[1]) if name.startswith("plain") else np.uint8
    scales = np.float32 if name.startswith(("per tensor", "block")) else np.uint8
    return tuple_of(Outputs, data=data, scales=scales)
