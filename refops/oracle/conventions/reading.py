"""Conventions of layout: the numbers are right, their places are not. Each function undoes one of them.

For dequantization the same functions lay out the *input*, as a kernel that reads it wrongly would see it.
"""

import numpy as np

from refops.formats import pack_fp4, unpack_fp4
from refops.oracle.conventions.registry import reading
from refops.oracle.geometry import Geometry
from refops.oracle.replay import NotApplicable
from refops.quantization.layout import swizzle, unswizzle
from refops.quantization.result import DIRECTIONS, reorder_scales, reorder_transposed
from refops.scalings.declaration import SCALE_TILE


class Dump:
    """The arrays of a dump (or of the input of dequantization) while readings rearrange them.

    Attributes:
        case, scaling, layout: the case, its settings and their layout, None where nothing is quantized.
        arrays: output name -> array; functions assign new ones.
        applied, changed, facts: as of a replay.
    """

    def __init__(self, case, arrays):
        self.case, self.arrays = case, dict(arrays)
        self.scaling = case.scaling
        self.layout = None if case.scaling is None else case.scaling.layout
        self.applied, self.changed, self.facts = (), set(), {}
        self.shape = case.matrix_shape

    def require(self, condition):
        """Raise NotApplicable unless `condition` holds."""
        if not condition:
            raise NotApplicable

    def names(self, *endings):
        """Names of the arrays that end so; NotApplicable if there are none."""
        names = [name for name in self.arrays if name.endswith(endings)]
        self.require(names)
        return names

    def require_gemm_order(self):
        """NotApplicable unless GEMMs read scales in an order of their own."""
        self.require(self.layout is not None and self.layout.scale_order == "gemm")

    def inner_first(self, name):
        """Whether an array of scales is stored [block, outer]."""
        return self.layout.scales_inner_first["columnwise" in name]

    def data_transposed(self, name):
        """Whether values or data are stored by columns of the tensor."""
        return name.endswith("_data") and self.layout.data_transposed("columnwise" in name)

    def valid(self, name):
        """Shape of the part of scales that is no padding."""
        return Geometry.of(self.scaling, name).valid_scale_shape(self.shape)


@reading(
    "swapped-nibbles",
    "The two FP4 codes of each byte are exchanged: TE puts the even element into the low nibble.",
)
def swapped_nibbles(dump):
    dump.require(dump.layout is not None and dump.layout.packed == 2)
    for name in dump.names("_data"):
        data = dump.arrays[name]
        dump.arrays[name] = (data >> np.uint8(4)) | (data << np.uint8(4))


@reading("scales-swizzled", "The scales are {order}.")
def scales_swizzled(dump):
    dump.require_gemm_order()
    if dump.case.swizzled_scales:
        dump.facts["order"] = "in plain row-major order, not swizzled as said"
    else:
        dump.facts["order"] = "in the swizzled order that GEMMs read (tiles of 128 x 4), not in plain row-major order"
    reorder = swizzle if dump.case.swizzled_scales else unswizzle
    for name in dump.names("_scale_inv"):
        scales = dump.arrays[name]
        if dump.inner_first(name):
            dump.arrays[name] = reorder_transposed(reorder, scales, to_swizzled=dump.case.swizzled_scales)
        else:
            dump.arrays[name] = reorder(scales)


@reading(
    "scales-swizzled-as-stored",
    "The columnwise scales are swizzled {how}, where TE swizzles their transpose.",
    choices=("as stored", "viewed"),
)
def scales_swizzled_as_stored(dump, choice):
    dump.require_gemm_order()
    names = [name for name in dump.names("_scale_inv") if dump.inner_first(name)]
    dump.require(names)
    dump.facts["how"] = {
        "as stored": "along their stored order [block, column]",
        "viewed": "as if their array [block, column] were [column, block]",
    }[choice]
    for name in names:
        scales = dump.arrays[name]
        if dump.case.swizzled_scales:
            scales = reorder_transposed(swizzle, scales, to_swizzled=True)
        taken = scales if choice == "as stored" else scales.reshape(scales.shape[::-1])
        dump.require(taken.shape[0] % SCALE_TILE[0] == 0)
        dump.arrays[name] = unswizzle(taken).reshape(scales.shape)


@reading(
    "scales-transposed",
    "The scales are stored transposed: {expected} were expected.",
    choices=("padded", "valid", "valid, in padded rows"),
)
def scales_transposed(dump, choice):
    names = dump.names("_scale_inv")
    for name in names:
        scales = dump.arrays[name]
        dump.require(scales.ndim == 2)
        if choice == "padded":
            dump.arrays[name] = scales.reshape(scales.shape[::-1]).T
        else:
            rows, columns = dump.valid(name)
            dump.require((rows, columns) != scales.shape)
            written = scales.reshape(-1)[: rows * columns] if choice == "valid" else scales[:rows, :columns]
            dump.arrays[name] = _into(scales, written.reshape(columns, rows).T)
    rows, columns = dump.valid(names[0])
    dump.facts["expected"] = f"{rows} rows of {columns}"


@reading(
    "scales-unpadded",
    "The scales are stored without padding, in rows of {columns} entries where TE's rows have {stride}.",
)
def scales_unpadded(dump):
    changed = False
    for name in dump.names("_scale_inv"):
        scales = dump.arrays[name]
        if scales.ndim != 2:
            continue
        rows, columns = dump.valid(name)
        if columns != scales.shape[1]:
            changed = True
            dump.facts["columns"], dump.facts["stride"] = columns, scales.shape[1]
            dump.arrays[name] = _into(scales, scales.reshape(-1)[: rows * columns].reshape(rows, columns))
    dump.require(changed)


def _into(padded, valid):
    out = np.zeros_like(padded)
    out[: valid.shape[0], : valid.shape[1]] = valid
    return out


#: Orders in which a kernel may write scales in place of the one that GEMMs read: name -> axes of their array, split
#: into tiles of 128 rows, quarters of a tile, rows of a quarter, tiles of 4 columns and columns of a tile.
OTHER_SWIZZLES = {
    "the tiles follow each other down the columns, where GEMMs read a row of tiles first": (3, 0, 2, 1, 4),
    "the rows of a tile follow each other, where GEMMs read n, n + 32, n + 64 and n + 96 together": (0, 3, 1, 2, 4),
    "each tile is written column by column, where GEMMs read its rows": (0, 3, 4, 1, 2),
    "of row n + 32 q the block b of four lies at 4 b + q, where GEMMs read it at 4 q + b": (0, 3, 2, 4, 1),
}


#: An order of the rows of a tile that is no exchange of those axes.
INVERTED = (
    "the rows 4 n + q of a tile follow each other for each q, the inverse of the order in which GEMMs read the rows "
    "n + 32 q together for each n"
)


def _rows_dealt_back(scales):
    """Scales whose tiles have their rows in the order of `INVERTED`, in plain order."""
    rows, columns = scales.shape
    across = SCALE_TILE[1]
    tiles = scales.reshape(rows // SCALE_TILE[0], columns // across, 4, SCALE_TILE[0] // 4, across)
    return np.ascontiguousarray(tiles.transpose(0, 3, 2, 1, 4)).reshape(rows, columns)


def _restored(order):
    """f(scales in another swizzled order) -> scales in plain order."""
    if order == INVERTED:
        return _rows_dealt_back
    if order == "applied twice":
        return lambda scales: unswizzle(unswizzle(scales))
    if order == "reversed":
        return swizzle
    axes = OTHER_SWIZZLES[order]

    def restore(scales):
        rows, columns = scales.shape
        split = (rows // SCALE_TILE[0], 4, SCALE_TILE[0] // 4, columns // SCALE_TILE[1], SCALE_TILE[1])
        written = scales.reshape([split[axis] for axis in axes])
        return np.ascontiguousarray(written.transpose(np.argsort(axes))).reshape(rows, columns)

    return restore


@reading(
    "scales-swizzled-otherwise",
    "The scales are in another order than the swizzled one that GEMMs read (tiles of 128 x 4): {how}.",
    choices=("applied twice", "reversed", *OTHER_SWIZZLES, INVERTED),
    alone=True,
)
def scales_swizzled_otherwise(dump, choice):
    dump.require_gemm_order()
    dump.facts["how"] = {
        "applied twice": "the swizzle is applied twice",
        "reversed": "each scale is read from where it should be written, so that the swizzle is undone and not applied",
    }.get(choice, choice)
    restore, moved = _restored(choice), False
    for name in dump.names("_scale_inv"):
        scales = dump.arrays[name]
        written = reorder_scales(dump.layout, name, scales, True) if dump.case.swizzled_scales else scales
        restored = reorder_transposed(restore, written, False) if dump.inner_first(name) else restore(written)
        dump.arrays[name], moved = restored, moved or not np.array_equal(restored, scales)
    dump.require(moved)


@reading(
    "swapped-directions",
    "The rowwise and the columnwise {what} are exchanged.",
    choices=("all", "stored", "_data", "_scale_inv"),
)
def swapped_directions(dump, choice):
    swapped = []
    for what in ("data", "scale_inv"):
        first, second = (f"{direction}_{what}" for direction in DIRECTIONS)
        if first in dump.arrays and second in dump.arrays and choice in ("all", "stored", f"_{what}"):
            a, b = dump.arrays[first], dump.arrays[second]
            dump.require(a.size == b.size)
            if a.shape != (1,):
                dump.arrays[first], dump.arrays[second] = b.reshape(a.shape), a.reshape(b.shape)
                swapped.append({"data": "data", "scale_inv": "scales"}[what])
    if choice == "all" and {"amax_rowwise", "amax_columnwise"} <= set(dump.arrays):
        a, b = dump.arrays["amax_rowwise"], dump.arrays["amax_columnwise"]
        if a.shape == b.shape:
            dump.arrays["amax_rowwise"], dump.arrays["amax_columnwise"] = b, a
    dump.require(swapped)
    dump.facts["what"] = " and ".join(swapped)


@reading(
    "data-transposed",
    "The {what} stored transposed: TE stores {expected}.",
    choices=("all", "columnwise_data", "rowwise_data"),
)
def data_transposed(dump, choice):
    dump.require(dump.shape)
    m, k = dump.shape
    names = [n for n in dump.arrays if n in ("y", "dx") or n.endswith("_data")]
    names = [n for n in names if choice in ("all", n)]
    dump.require(names and (choice == "all" or len(dump.arrays) > 1))
    for name in names:
        array = dump.arrays[name]
        transposed = dump.data_transposed(name)
        rows, columns = (k, m) if transposed else (m, k)
        dump.facts["expected"] = f"rows of {columns}" if not transposed else f"the columns as {rows} rows of {columns}"
        if name.endswith("_data") and dump.layout.packed == 2:
            dump.require(rows % 2 == 0)
            codes = unpack_fp4(array.reshape(columns, rows // 2)).T
            dump.arrays[name] = pack_fp4(codes).reshape(array.shape)
        else:
            dump.arrays[name] = array.reshape(columns, rows).T.reshape(array.shape)
    dump.facts["what"] = "data are" if choice == "all" else choice.replace("_", " ") + " are"


@reading(
    "swapped-halves",
    "The two halves of {what} are exchanged.",
    choices=("columns", "columns of data", "rows"),
)
def swapped_halves(dump, choice):
    dump.require(dump.shape)
    m, k = dump.shape
    axis = choice != "rows"
    dump.require((m, k)[axis] % 2 == 0 and (m, k)[axis] > 1)
    dump.require("dbias" in dump.arrays or choice != "columns of data")
    gradient = dump.case.gated and dump.case.operation.kind.endswith("grad")
    dump.facts["what"] = (
        ("each row, [d_gate | d_act] for TE's [d_act | d_gate]," if gradient else "each row") if axis else ("the rows")
    )
    changed = False
    for name in list(dump.arrays):
        array = dump.arrays[name]
        if name in ("y", "dx"):
            dump.arrays[name] = _roll_half(array.reshape(m, k), axis).reshape(array.shape)
        elif name == "dbias" and choice == "columns":
            dump.arrays[name] = _roll_half(array, 0)
        elif name.endswith("_data"):
            transposed = dump.data_transposed(name)
            matrix = array.reshape(k if transposed else m, -1)
            along = axis ^ transposed
            dump.require(matrix.shape[along] % 2 == 0)
            dump.arrays[name] = _roll_half(matrix, along).reshape(array.shape)
        elif name.endswith("_scale_inv") and array.ndim == 2:
            valid = dump.valid(name)
            along = axis ^ Geometry.of(dump.scaling, name).scales_transposed
            dump.require(valid[along] % 2 == 0)
            dump.arrays[name] = _into(array, _roll_half(array[: valid[0], : valid[1]], along))
        else:
            continue
        changed = True
    dump.require(changed)


def _roll_half(matrix, axis):
    return np.roll(matrix, matrix.shape[axis] // 2, axis=axis)


@reading(
    "byte-swapped",
    "The bytes of each number are in the opposite (big-endian) order.",
)
def byte_swapped(dump):
    changed = False
    for name, array in dump.arrays.items():
        if array.itemsize > 1:
            dump.arrays[name] = np.ascontiguousarray(array).view(f"u{array.itemsize}").byteswap().view(array.dtype)
            changed = True
    dump.require(changed)


@reading(
    "shifted-by-one",
    "The {what} one entry too {late}.",
    choices=(("data", 1), ("data", -1), ("scales", 1), ("scales", -1), ("row", 1), ("row", -1)),
)
def shifted_by_one(dump, choice):
    what, by = choice
    endings = {"data": ("_data", "y", "dx"), "scales": ("_scale_inv",), "row": ("_data", "y", "dx")}[what]
    for name in dump.names(*endings):
        array = dump.arrays[name]
        dump.require(array.size > 1)
        if what == "row":
            dump.arrays[name] = np.roll(array, -by, axis=-1)
        else:
            dump.arrays[name] = np.roll(array.reshape(-1), -by).reshape(array.shape)
    dump.facts["what"] = {"data": "data are stored", "scales": "scales are stored", "row": "data of each row are"}[what]
    dump.facts["late"] = "late" if by == 1 else "early"
