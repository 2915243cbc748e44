"""The GPU backend of `interface.Interface`: which kernels an operation runs, in which order, on which arrays.

Per layout, with an activation in front (without one the first step falls away):

    one scale, known          one kernel: activation, amax, cast (, transpose) (, sums)
    amax of the tensor first  activation + amax -> rounded temporary; cast of the temporary
    blocks, transposed columns, other amaxes first    activation -> rounded temporary; amax where needed; cast
    blocks, nothing transposed     one kernel for one or both directions (, sums)

Which kernel casts is a question of the layout and of the hooks (`_blocks`), never of the scaling's class.
"""

import math
from dataclasses import replace as replaced

import numpy as np

from cuda_kernels import kernels, plans, simt, tiles
from cuda_kernels.arrays import HIGH_PRECISION, Array, memory_of, numpy_dtype
from cuda_kernels.casts import STORAGES, carrier
from cuda_kernels.copies import BlockJob, Copy
from cuda_kernels.directions import direction_of
from cuda_kernels.families import blocks, dequantize
from cuda_kernels.interface import Backend, Interface, Operand
from cuda_kernels.launch import (
    LARGEST_DIMENSION,
    band_shape,
    column_grid,
    launcher_for,
    row_shape,
    tile_grid,
)
from cuda_kernels.operands import NO_PARAMETERS, Front, Inputs, Outputs, Random, pointer, scalar
from cuda_kernels.recipes import (
    Prologue,
    Recipe,
    ScaledGradient,
    arguments_of,
    build,
    build_scaled_gradient,
    direction_in,
    widest,
)
from cuda_kernels.result import Quantized
from cuda_kernels.scale_rules import of_tensor
from cuda_kernels.vectors import VECTOR
from refops.arguments import (
    as_codes_hint,
    require_choice,
    require_flag,
    require_high_precision_dtype,
    require_integer,
    require_tensor,
)
from refops.formats import E8M0, FORMATS, require_format
from refops.quantization.layout import ceil_div
from refops.rounding import PHILOX_BYTES
from refops.scalings import FP8_FORMATS

#: Name of a family of block casts (`family_of`) -> its `quantize(gpu, job)`, of those that are a file of `families`.
FAMILIES = {"blocks": blocks.quantize}


def family_of(scaling):
    """The name of the family that casts by blocks of a scaling: a question of its layout and its hooks."""
    layout = scaling.layout
    if direction_of(scaling, False).rules().choice is not None:
        return "four_over_six"
    if layout.block[0] > 1:
        return "squares"
    if not layout.columnwise_transposed:
        return "mxfp8"
    if layout.packed == 2 or layout.amax is not None or scaling.hadamard is not None:
        return "nvfp4"
    return "blocks"


def call(method, signature, args, options, fast_math):
    """Call a method of `Interface` on the device and in the library of its first array.

    Args:
        method, signature: the method and its signature, `self` first.
        args, options: its arguments but for `self`. fast_math: bool.

    Returns:
        Its result, arrays as those of the caller's library.
    """
    known = plans.seen(method, args, options, fast_math)
    plan = known and plans.plan_of(known)
    if plan:
        return plan.run(known)
    require_flag(fast_math, "fast_math")
    given = signature.bind(None, *args, **options).arguments  # a missing argument is no question of devices
    name = next(name for name in signature.parameters if name not in ("self", "name"))
    arrays = getattr(given[name], "arrays", None)
    memory = memory_of(next(iter(arrays.values())) if arrays else given[name], name)
    with memory.scope():
        known = plans.seen(method, args, options, fast_math)  # the memory may be the first of its kind
        if known is None or simt.SIMULATED or not plans.PLANS.wanted(known.key):
            return memory.returned(method(Interface(GPU(memory, fast_math)), *args, **options))
        recording = plans.Recording(known, memory, launcher_for(memory.device))
        backend = GPU(recording.memory, fast_math, recording.launcher)
        result = method(Interface(backend), *args, **options)
        recording.keep(result)
        return memory.returned(result)


class GPU(Backend):
    """Kernels on the device and in the library of one array; `fast_math` allows approximate exp and reciprocal."""

    def __init__(self, memory, fast_math=False, launcher=None):
        self.memory, self.fast_math = memory, fast_math
        self.launcher = launcher or launcher_for(memory.device)

    # --- arrays -----------------------------------------------------------------------------------

    def tensor(self, value, name):
        operand = self.elements(value, name)
        if not operand.shape:
            raise ValueError(f"{name} must have at least one dimension (the last one is K); got a scalar")
        m, k = math.prod(operand.shape[:-1]), operand.shape[-1]
        if max(m, k) >= LARGEST_DIMENSION:
            raise ValueError(f"{name} must have fewer than {LARGEST_DIMENSION} rows and columns; got {m} x {k}")
        return operand

    def elements(self, value, name):
        if isinstance(value, np.ndarray):
            require_tensor(np.atleast_1d(value), name)
        array = self.memory.wrap(value, name)
        if array.dtype not in HIGH_PRECISION:
            hint = "; round float64 to float32 first" if array.dtype == "float64" else ""
            raise TypeError(
                f"{name} must be float32, float16 or bfloat16{hint}; got {array.dtype} of shape {array.shape}"
            )
        return Operand(array, array.shape, array.dtype)

    def codes(self, value, name):
        array = self.memory.wrap(value, name)
        if array.dtype != "uint8":
            hint = as_codes_hint(array.dtype, name)
            raise TypeError(f"{name} must be a uint8 array; got {array.dtype} of shape {array.shape}{hint}")
        return Operand(array, array.shape, "uint8")

    def storage(self, dtype, name):
        text = str(dtype).removeprefix("torch.")
        return text if text in HIGH_PRECISION else require_high_precision_dtype(dtype, name).name

    def empty(self, shape, dtype):
        return self.memory.empty(shape, dtype)

    def zeros(self, shape, dtype):
        return self.memory.zeros(shape, dtype)

    def widened(self, operand):
        if operand.storage == "float32":
            return operand
        front = identity_of(operand.array, operand.storage)
        out = self.empty(operand.shape, "float32")
        self.materialize(front, out, "float32", None)
        return Operand(out, operand.shape, "float32")

    # --- launches ---------------------------------------------------------------------------------

    def run(self, recipe, front, row=None, column=None, partial=None):
        """Launch a recipe for a front; `row` and `column` are dicts of the fields of `Outputs` that matter."""
        m, k = front.matrix_shape
        inner = front.width if recipe.prologue.part == "pair" else k
        direction = direction_in(recipe.row or recipe.column)
        records_amax = direction.known if direction else recipe.row is not None and "amax" in recipe.row[0]
        lanes, columns = 32 if records_amax else 16, 2 * VECTOR
        of_tiles = lambda: tile_grid(m, k, tiles.tile_columns(recipe.stage))  # noqa: E731
        grid, block = {
            "row": lambda: row_shape(m, inner, lanes),
            "wide row": lambda: row_shape(m, inner, direction.block[1] // columns, columns),
            "block row": lambda: row_shape(m, inner, 1, columns),
            "two block row": lambda: row_shape(m, inner, 1, 2 * columns),
            "band": lambda: band_shape(m, inner),
            "tile": of_tiles,
            "square": of_tiles,
            "square choice": of_tiles,
            "columns": lambda: column_grid(m, k, recipe.column.block[1]),
        }[recipe.kernel]()
        if 0 in grid:
            grid, block = (1, 1, 1), (block[0], 1, 1)
        values = [*self._inputs(front), *outputs(outer=m, inner=k, **(row or {}))]
        if not recipe.one_direction:
            transposed = recipe.kernel != "columns" and recipe.transposed
            outer, inner = (k, m) if transposed else (m, k)
            values += outputs(outer=outer, inner=inner, **(column or {}))
        if recipe.kernel in ("band", "tile", "columns"):
            values.append(0 if partial is None else partial.pointer)
        make = lambda target: build(recipe, target)  # noqa: E731
        self._launch(recipe, make, arguments_of(recipe), values, grid, block)

    def launch(self, spec, shape, *operands):
        """Start the kernel of a `Spec` on tuples of arrays (or None) and numbers.

        Args:
            spec: a `Spec`. shape: (outer, inner) that its grid is for. operands: as its `operands` describe.
        """
        values = [_value_of(one) for operand in operands for one in operand]
        self._launch(spec, spec.function, spec.operands(), values, *spec.grid(*shape))

    def _launch(self, key, make, described, values, grid, block):
        self.launcher.launch(key, make, described, values, grid, block, self.memory.stream())

    @staticmethod
    def _inputs(front):
        rows = front.matrix_shape[0]
        pointers = [0 if array is None else array.pointer for array in (front.x, front.dy, front.row_scales)]
        return Inputs(*pointers, *map(float, front.parameters), rows, front.width, front.interleave)

    def _recipe(self, kernel, front, row, column=None, **options):
        key = Prologue(front.kind, front.name, front.storage, front.row_scales is not None, front.interleave > 0)
        return Recipe(kernel, key, row, column, front.storage, fast_math=self.fast_math, **options)

    def _whole(self, front, *stored):
        """Whether rows are whole aligned vectors, in everything that is read and in the `stored` arrays."""
        arrays = [a for a in (front.x, front.dy, *stored) if a is not None]
        return all(a.aligned for a in arrays) and front.width % VECTOR == 0 and front.matrix_shape[1] % VECTOR == 0

    def _rows(self, front, epilogue, fields, rounded, lanes=0, **options):
        """Run the rowwise kernel, for gated gradients both halves from one read where blocks allow it."""
        whole = self._whole(front, fields.get("data"))
        recipe = self._recipe("row", front, epilogue, rounded=rounded, whole=whole, **options)
        block = max(lanes, 1) * VECTOR
        if front.kind == "backward" and front.gated and whole and front.width % block == 0:
            recipe = replaced(recipe, prologue=replaced(recipe.prologue, part="pair"))
        self.run(widest(recipe, front.width), front, fields)

    def whole(self, front, owned, *stored):
        """Whether rows consist of whole aligned accesses of so many elements, in all that is read and `stored`."""
        arrays = [a for a in (front.x, front.dy, *stored) if a is not None]
        return all(a.aligned for a in arrays) and front.width % owned == 0 and front.matrix_shape[1] % owned == 0

    def column_sums(self, front, dbias, *, stored=None, out=None, rounded=False, sums_rounded=False):
        """Fill `dbias` (K,) with the sums of columns, and on the way store the values, in one read.

        Args:
            front: what is computed. dbias: array, of any dtype.
            stored: dtype of values, or a `Direction`, as of `stores.make_put`; None: nothing is stored.
            out: the tuple to fill, as `stores.described_output` says.
            rounded: values are rounded to `front.storage` (a dtype: to it) before they are stored.
            sums_rounded: these are summed, not the exact ones.
        """
        fields, epilogue, storage = {}, None, None
        if isinstance(stored, str):
            epilogue, fields, storage = ("plain", stored), {"data": out.data}, stored
        elif stored is not None:
            epilogue = stored
            names = {
                "tensor_scales": "given",
                "scale_inv": "scales",
                "multiplier": "epsilon",
                "stored": "largest_scale",
            }
            fields = {names.get(name, name): value for name, value in out._asdict().items()}
            fields = {name: value for name, value in fields.items() if name not in ("outer", "inner")}
        self._column_sums(front, dbias, epilogue, fields, rounded, sums_rounded, storage)

    def _column_sums(self, front, out, epilogue=None, fields=None, rounded=False, sums_rounded=False, storage=None):
        """Run the band kernel: an epilogue (or nothing) and the sums of columns."""
        (m, k), fields = front.matrix_shape, fields or {}
        partial = self.empty((ceil_div(m, kernels.BAND), k), "float32")
        recipe = self._recipe(
            "band",
            front,
            epilogue,
            rounded=rounded or sums_rounded,
            whole=self._whole(front, fields.get("data")),
            dbias="rounded" if sums_rounded else "exact",
        )
        if storage is not None:
            recipe = replaced(recipe, storage=storage)
        if m or _is_known(epilogue):  # the scale is stored even of an empty tensor
            self.run(recipe, front, fields, partial=partial)
        self._finish_sums(partial, out, partial.shape[0])

    def finish_sums(self, partial, out):
        """Fill `out` (K,), of any dtype, with the sums of the rows of `partial`, float32 (count, K), added in order."""
        self._finish_sums(partial, out, partial.shape[0])

    def _finish_sums(self, partial, out, count):
        k = out.shape[-1]
        described = [pointer(np.float32), pointer(carrier(out.dtype))]
        described += [scalar(np.int32)] * 2
        key = ("finish sums", out.dtype)
        values = [partial.pointer, out.pointer, count, k]
        grid = (max(1, ceil_div(k, simt.THREADS)), 1, 1)
        self._launch(key, lambda target: finish_sums_of(out.dtype), described, values, grid, (simt.THREADS, 1, 1))

    # --- activations ------------------------------------------------------------------------------

    def materialize(self, front, out, storage, dbias):
        if dbias is not None:
            epilogue, fields = ("plain", storage), {"data": out}
            self._column_sums(front, dbias, epilogue, fields, sums_rounded=True, storage=storage)
        elif out.size:
            self._rows(front, ("plain", storage), {"data": out}, False)

    def scaled_gradient(self, front, out, storage, scales_gradient, scales_storage):
        rows = front.matrix_shape[0]
        if not rows:
            return
        whole = self._whole(front, out)
        recipe = ScaledGradient(
            front.name, front.storage, storage, scales_storage, front.interleave > 0, whole, self.fast_math
        )
        values = [*self._inputs(front), out.pointer, scales_gradient.pointer]
        grid, block = row_shape(rows, 32 * VECTOR, 32)
        make = lambda target: build_scaled_gradient(recipe, target)  # noqa: E731
        self._launch(recipe, make, arguments_of(recipe), values, grid, block)

    def amax(self, front):
        out = self.zeros((1,), "float32")
        self._tensor_amax(front, out)
        return out

    def _tensor_amax(self, front, out):
        if 0 not in front.matrix_shape:
            self._rows(front, ("amax",), {"amax": out}, False)

    # --- quantization -----------------------------------------------------------------------------

    def quantize(self, job):
        if job.scaling.layout.block is not None:
            self._blocks(job)
        elif job.scaling.given is not None:
            self._known_scale(job)
        else:
            self._current_scale(job)

    def _stored_first(self, job, amax):
        """Return the front of the rounded tensor, computed into a temporary if there is anything to compute.

        `amax`, unless None, gets the largest magnitude, of unrounded values where the path says so.
        """
        front = job.front
        if front.kind != "identity":
            temporary = self.empty(front.matrix_shape, front.storage)
            take_amax = amax is not None and not job.path.amax_rounded
            if temporary.size:
                epilogue = ("plain+amax" if take_amax else "plain", front.storage)
                self._rows(front, epilogue, {"data": temporary, "amax": amax}, False)
            front = identity_of(temporary, front.storage)
            if amax is not None and not take_amax:
                self._tensor_amax(front, amax)
        elif amax is not None:
            self._tensor_amax(front, amax)
        if job.dbias is not None:
            self._column_sums(front if job.path.dbias_rounded else job.front, job.dbias)
        return front

    def _known_scale(self, job):
        stored, multiplier = of_tensor(job.scaling, np.zeros(1, np.float32), numpy_dtype(job.front.storage))
        given = {"epsilon": float(multiplier[0]), "largest_scale": float(stored[0])}
        self._per_tensor(job, job.front, given, job.dbias, job.path.dbias_rounded)

    def _current_scale(self, job):
        fields, amax = job.fields, shared_amax(job.fields)
        front = self._stored_first(job, amax)
        scale, numbers = self.empty((2,), "float32"), job.scaling.numbers(numpy_dtype(front.storage))
        described = [pointer(np.float32)] * 2 + [scalar(np.float32)] * 2
        values = [amax.pointer, scale.pointer, float(numbers.epsilon), float(numbers.largest_scale)]
        direction = direction_of(job.scaling, False)
        make = lambda target: kernels.make_scale_of_tensor(direction.rules(target).block_scale)  # noqa: E731
        self._launch(("scale of tensor", direction), make, described, values, (1, 1, 1), (1, 1, 1))
        for name in ("rowwise_scale_inv", "columnwise_scale_inv"):
            if name in fields:
                self._copy(scale, 1, fields[name])
        self._per_tensor(job, front, {"given": scale}, None, False)

    def _copy(self, source, index, target):
        """target[0] = source[index], float32."""
        described = [pointer(np.float32)] * 2 + [scalar(np.int32)]
        values = [source.pointer, target.pointer, index]
        self._launch("copy", lambda target: kernels.copy_one, described, values, (1, 1, 1), (1, 1, 1))

    def _per_tensor(self, job, front, given, dbias, sums_rounded):
        (row_key, row), (column_key, column) = directions_of(job, **given)
        if not job.columnwise and dbias is None:
            self._rows(front, row_key, row, False)
        elif not job.columnwise:
            self._column_sums(front, dbias, row_key, row, sums_rounded=sums_rounded)
        else:
            self._tiles(job, front, row_key, column_key, row, column, dbias=dbias)

    def _tiles(self, job, front, row_key, column_key, row, column, *, dbias=None, transform=None):
        """Run the tile kernel: columnwise copies transposed; sums of 128 rows each."""
        m, k = front.matrix_shape
        stage = front.storage if front.kind == "identity" else "float32"
        partial = None if dbias is None else self.empty((ceil_div(m, tiles.TILE_ROWS), k), "float32")
        recipe = self._recipe(
            "tile",
            front,
            row_key if job.rowwise and row is not None else None,
            column_key,
            stage=stage,
            transform=transform,
            dbias=None if dbias is None else "exact",
            whole=self._whole(front, (row or {}).get("data")),
            whole_columns=m % VECTOR == 0 and column.get("data", front.x).aligned,
        )
        if 0 not in (m, k) or _is_known(recipe.column):
            self.run(recipe, front, row, column, partial)
        if dbias is not None:
            self._finish_sums(partial, dbias, partial.shape[0])

    def _blocks(self, job):
        """Cast by blocks: where nothing is transposed and no amax is needed first, at once, else what was stored.

        The kernels that cast at once sum what is not rounded.
        """
        scaling, layout, front, dbias = job.scaling, job.scaling.layout, job.front, job.dbias
        at_once = not layout.columnwise_transposed and layout.amax is None and scaling.hadamard is None
        at_once = at_once and (dbias is None or front.kind == "identity" or not job.path.dbias_rounded)
        if not at_once:
            separate = layout.amax == "rows" or scaling.hadamard is not None
            front = self._stored_first(job, None if separate or layout.amax is None else shared_amax(job.fields))
            dbias = None
            if separate:
                self._separate_amaxes(job, front)
        empty, (m, k) = 0 in front.matrix_shape, front.matrix_shape
        if dbias is not None and (empty or layout.block[0] > 1):
            self._column_sums(front, dbias, sums_rounded=job.path.dbias_rounded)
            dbias = None
        if empty:
            return
        rounded = job.path.casts_rounded and at_once
        family = FAMILIES.get(family_of(scaling))
        if family is not None:
            rowwise, columnwise = self._copies(job, m, k)
            family(self, BlockJob(front, rounded, rowwise, columnwise, scaling.hadamard, dbias, job.path.dbias_rounded))
            return
        random, numbers = scaling.random, scaling.numbers(numpy_dtype(front.storage))
        given = {"epsilon": float(numbers.epsilon), "largest_scale": float(numbers.largest_scale)}
        if random is not None:
            given |= {"seed": random.seed, "offset": random.offset}
        (row_key, row), (column_key, column) = directions_of(job, **given)
        for fields in (row, column):
            if "random_bits" in fields:
                fields["random_bits"] = self.memory.from_numpy(np.ascontiguousarray(fields["random_bits"]))
        column["first_block"] = m * (k // PHILOX_BYTES)
        if layout.two_level:
            self._share_tensor_scales(job, row, column)
        self._cast_blocks(job, front, (row_key, column_key), (row, column), rounded, dbias)

    def _copies(self, job, m, k):
        """The `Copy` of each direction that is made, or None."""
        copies, scales_of_amax = [], {}
        numbers, rules = job.scaling.numbers(numpy_dtype(job.front.storage)), direction_of(job.scaling, False).rules()
        for name in ("rowwise", "columnwise"):
            columnwise = name == "columnwise"
            if not getattr(job, name):
                copies.append(None)
                continue
            direction, amax = direction_of(job.scaling, columnwise, job.swizzled), job.fields.get(f"amax_{name}")
            if rules.parts and id(amax) not in scales_of_amax:
                scales_of_amax[id(amax)] = self._tensor_scales(job.scaling, amax, rules.parts)
            copies.append(
                Copy(
                    direction,
                    job.fields[f"{name}_data"],
                    job.fields[f"{name}_scale_inv"],
                    *((k, m) if direction.transposed else (m, k)),
                    numbers,
                    amax,
                    scales_of_amax.get(id(amax)),
                    self._random(job, columnwise, m * (k // PHILOX_BYTES) if columnwise else 0),
                )
            )
        return copies

    def _random(self, job, columnwise, first_block):
        """The `Random` of a copy, None without stochastic rounding."""
        random, bits = job.scaling.random, job.random_bits[columnwise]
        if random is None:
            return None
        if bits is not None:
            bits = self.memory.from_numpy(np.ascontiguousarray(bits))
        return Random(bits, random.seed, random.offset, first_block)

    def _cast_blocks(self, job, front, keys, fields, rounded, dbias):
        """Run the kernels that cast by blocks."""
        (row_key, column_key), (row, column), (outer, edge) = keys, fields, job.scaling.layout.block
        transposed = job.scaling.layout.columnwise_transposed
        fits = edge <= tiles.tile_columns(front.storage)
        if outer > 1 and row_key.rules().choice is not None:
            self._square_choice(job, front, row_key, column_key, row, column)
        elif outer > 1 and not fits:
            self._wide_squares(job, front, row_key, column_key, row, column)
        elif outer > 1:
            self._squares(job, front, row_key, column_key, row, column)
        elif not job.columnwise and dbias is None:
            self._rows(front, row_key, row, rounded, lanes=edge // VECTOR)
        elif not job.columnwise:
            self._column_sums(front, dbias, row_key, row, rounded, job.path.dbias_rounded)
        elif not transposed:
            self._columns(job, front, row_key, column_key, row, column, dbias)
        else:
            if job.rowwise and not fits:
                self._rows(front, row_key, row, False, lanes=edge // VECTOR)
            transform = None if job.scaling.hadamard is None else (job.scaling.hadamard, False)
            self._tiles(job, front, row_key, column_key, row if fits else None, column, transform=transform)

    def _columns(self, job, front, row_key, column_key, row, column, dbias):
        """Run the column kernel: columnwise copies that are not transposed."""
        m, k = front.matrix_shape
        partial = None if dbias is None else self.empty((ceil_div(m, column_key.block[1]), k), "float32")
        recipe = self._recipe(
            "columns",
            front,
            row_key if job.rowwise else None,
            column_key,
            rounded=job.path.casts_rounded,
            dbias=None if dbias is None else "exact",
            whole=self._whole(front, row.get("data"), column["data"]),
        )
        self.run(recipe, front, row, column, partial)
        if dbias is not None:
            self._finish_sums(partial, dbias, partial.shape[0])

    def _squares(self, job, front, row_key, column_key, row, column):
        """Run the square kernel: one scale for a square block, in one or both directions."""
        m, transposed = front.matrix_shape[0], job.scaling.layout.columnwise_transposed
        recipe = self._recipe(
            "square",
            front,
            row_key,
            ("squares", column_key),
            rounded=job.path.casts_rounded,
            stage=front.storage,
            transposed=transposed,
            whole=self._whole(front, row.get("data"), None if transposed else column.get("data")),
            whole_columns=m % VECTOR == 0 if transposed else self._whole(front, column.get("data")),
        )
        self.run(squares_of(recipe, job), front, row, column)

    def _square_choice(self, job, front, row_key, column_key, row, column):
        """Run the kernel of squares with a choice of scales; the amax is read through the rowwise fields."""
        recipe = self._recipe(
            "square choice",
            front,
            row_key if job.rowwise else None,
            column_key if job.columnwise else None,
            stage=front.storage,
            whole=self._whole(front, row.get("data")),
            whole_columns=front.matrix_shape[0] % VECTOR == 0,
        )
        self.run(recipe, front, {**row, "given": shared_amax(job.fields)}, column)

    def _wide_squares(self, job, front, row_key, column_key, row, column):
        """Squares that no tile holds, 128 x 128 of float32: their maxima first, then each direction with them."""
        (m, k), edge = front.matrix_shape, job.scaling.layout.block[1]
        stride = ceil_div(k, edge)
        maxima = self.zeros((ceil_div(m, edge), stride), "float32")
        fields, lanes = {"amax": maxima, "scale_stride": stride}, edge // VECTOR
        self._rows(front, ("amax of squares", edge), fields, False, lanes=lanes)
        given = {"given": maxima, "first_block": stride}
        if job.rowwise:
            self._rows(front, ("given amax", row_key), row | given, False, lanes=lanes)
        if job.columnwise and column_key.transposed:
            self._tiles(job, front, None, ("given amax", column_key), None, column | given)
        elif job.columnwise:
            self._rows(front, ("given amax", column_key), column | given, False, lanes=lanes)

    def _share_tensor_scales(self, job, *directions):
        """Let each direction's `given` be its amax, or what the scaling's rule makes of that for all blocks."""
        rules, made = direction_of(job.scaling, False).rules(), {}
        for direction in directions:
            amax = direction.get("amax")
            if amax is None or not rules.parts or rules.choice is not None:  # errors are measured against the amax
                direction["given"] = amax
                continue
            if id(amax) not in made:
                made[id(amax)] = self._tensor_scales(job.scaling, amax, rules.parts)
            direction["given"] = made[id(amax)]

    def _tensor_scales(self, scaling, amax, parts):
        """Return the scales of a tensor or of its rows: float32 (1 or rows, parts)."""
        scales, direction = self.empty((amax.size, parts), "float32"), direction_of(scaling, False)
        described = [pointer(np.float32)] * 2 + [scalar(np.int32)]
        grid = (ceil_div(amax.size, simt.THREADS), 1, 1)
        make = lambda target: kernels.make_tensor_scales(direction.rules(target).tensor_scale, parts)  # noqa: E731
        values = [amax.pointer, scales.pointer, amax.size]
        self._launch(("tensor scales", direction), make, described, values, grid, (simt.THREADS, 1, 1))
        return scales

    def _separate_amaxes(self, job, front):
        """Fill the amaxes that differ between the directions: of rows and columns, or after the Hadamard transform."""
        scaling, fields = job.scaling, job.fields
        if 0 in front.matrix_shape:
            return
        epilogue = ("amax of rows",) if scaling.layout.amax == "rows" else ("amax",)
        if job.rowwise:
            self._rows(front, epilogue, {"amax": fields["amax_rowwise"]}, False)
        if job.columnwise:
            transform = None if scaling.hadamard is None else (scaling.hadamard, False)
            column = {"amax": fields["amax_columnwise"]}
            self._tiles(job, front, None, epilogue, None, column, transform=transform)

    def quantized(self, fields, scaling, shape, storage, swizzled):
        return Quantized(
            **{name: array.owner for name, array in fields.items()},
            scaling=scaling,
            shape=tuple(shape),
            dtype=storage,
            with_gemm_swizzled_scales=swizzled,
        )

    # --- back to high precision -------------------------------------------------------------------

    def require_quantized(self, q):
        if not isinstance(q, Quantized):
            raise TypeError(f"q must be a cuda_kernels Quantized; got {type(q).__name__}")
        if q.rowwise_data is None and q.columnwise_data is None:
            raise ValueError("q must hold rowwise_data or columnwise_data; got neither")
        return q.unswizzled() if q.with_gemm_swizzled_scales else q

    def dequantize(self, q, out, storage):
        dequantize.dequantize(self, q, out, storage)

    def hadamard(self, operand, sign_mask, inverse, out):
        if out.size:
            front = identity_of(operand.array, operand.storage)
            self._rows(front, ("plain", operand.storage), {"data": out}, False, transform=(sign_mask, inverse))

    def encode(self, operand, fmt, saturate, rounding, random_bits, out):
        _require_known_format(fmt)
        if not saturate or rounding != "nearest_even" or fmt == E8M0:
            raise ValueError(
                "encode on a GPU must be saturating, rounding='nearest_even', in another format than E8M0 "
                f"(refops.encode has the others); got saturate={saturate}, rounding={rounding!r}, fmt={fmt!r}"
            )
        if out.size:
            front = identity_of(operand.array, operand.storage)
            key = ("codes", fmt.name)
            self._rows(front, key, {"data": out}, False)

    def largest_code(self, codes):
        return 0 if not codes.array.size else int(self.memory.to_numpy(codes.array).max())

    def decode(self, codes, fmt, out):
        _require_known_format(fmt)
        if not out.size:
            return
        width = codes.shape[-1] if codes.shape else 1
        front = Front(
            "codes", None, NO_PARAMETERS, codes.array, None, None, 0, False, width, codes.shape or (1,), "float32"
        )
        recipe = Recipe("row", Prologue("codes", None, fmt.name), ("plain", "float32"), whole=False)
        self.run(recipe, front, {"data": out})

    # --- delayed scaling's update -----------------------------------------------------------------

    def update_delayed_scale(self, amax_history, scale, fmt, *, margin, algorithm, keep_unused):
        require_format(fmt, FP8_FORMATS)
        margin = require_integer(margin, "margin", low=-126, high=127)
        keep_unused = require_flag(keep_unused, "keep_unused")
        if not callable(algorithm):
            algorithm = require_choice(algorithm, "algorithm", ("max", "most_recent"))
        history, scale = self._float32(amax_history, "amax_history"), self._float32(scale, "scale")
        length, columns = _history_shape(history, scale)
        amax, mode = scale, 1 if algorithm == "most_recent" else 0
        if callable(algorithm):
            amax, mode = self._float32(algorithm(amax_history), "the result of algorithm"), 2
            if amax.size != columns:
                raise ValueError(f"algorithm must return one amax a column ({columns}); got shape {amax.shape}")
        new_history, new_scale = self.empty(history.shape, "float32"), self.empty(scale.shape, "float32")
        described = [pointer(np.float32)] * 5 + [scalar(np.float32)] + [scalar(np.int32)] * 4
        with np.errstate(over="ignore"):  # a negative margin
            numerator = float(np.float32(fmt.max) * np.float32(2.0**-margin))
        pointers = [array.pointer for array in (history, scale, amax, new_history, new_scale)]
        values = [*pointers, numerator, length, columns, mode, int(keep_unused)]
        grid = (ceil_div(columns, simt.THREADS), 1, 1)
        make = lambda target: kernels.delayed_scale  # noqa: E731
        self._launch("delayed scale", make, described, values, grid, (simt.THREADS, 1, 1))
        return new_history, new_scale

    def _float32(self, value, name):
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = self.memory.from_numpy(np.float32(value)).owner
        array = self.memory.wrap(value, name)
        if array.dtype != "float32":
            raise TypeError(f"{name} must be float32; got {array.dtype} of shape {array.shape}")
        return array

    def swizzle(self, scales, undo, transposed):
        """Return (R, C) scales in GEMM order, or back; `transposed` ones are [block, column], see `refops.swizzle`."""
        rows, columns = scales.shape[::-1] if transposed else scales.shape
        out = self.empty(scales.shape, scales.dtype)
        described = [pointer(np.uint8)] * 2 + [scalar(np.int32)] * 4
        values = [scales.pointer, out.pointer, rows, columns, int(transposed), int(undo)]
        grid = (ceil_div(scales.size, simt.THREADS), 1, 1)
        if scales.size:
            make = lambda target: kernels.swizzle  # noqa: E731
            self._launch("swizzle", make, described, values, grid, (simt.THREADS, 1, 1))
        return out


def finish_sums_of(dtype):
    """The kernel that adds partial sums and stores them in a dtype."""
    return kernels.make_finish_sums(STORAGES[dtype].narrow)


def reordered_scales(q, swizzled):
    """field -> array: the scales of a GPU `Quantized` in GEMM order, or back in rows."""
    memory, moved = memory_of(next(iter(q.arrays.values()))), {}
    with memory.scope():
        backend = GPU(memory)
        for name in ("rowwise_scale_inv", "columnwise_scale_inv"):
            if getattr(q, name) is not None:
                transposed = q.scaling.layout.scales_inner_first[name.startswith("column")]
                moved[name] = backend.swizzle(memory.wrap(getattr(q, name), name), not swizzled, transposed)
        return memory.returned(moved)


def _is_known(key):
    """Whether an epilogue casts with a scale that is known before the tensor is seen."""
    direction = direction_in(key)
    return direction is not None and direction.known


def _history_shape(history, scale):
    """(L, n) of a history, checked against its scale."""
    if len(history.shape) not in (1, 2) or history.shape[0] == 0:
        raise ValueError(f"amax_history must be (L,) or (L, n) with L >= 1; got shape {history.shape}")
    columns = history.size // history.shape[0]
    flat = len(scale.shape) > 1 or (len(history.shape) == 2 and scale.shape != history.shape[1:])
    if scale.size != columns or flat:
        raise ValueError(
            f"scale must have one entry for each column of amax_history {history.shape}; got shape {scale.shape}"
        )
    return history.shape[0], columns


def identity_of(array, storage):
    """The front that is a tensor itself."""
    shape = array.shape or (1,)
    return Front("identity", None, NO_PARAMETERS, array, None, None, 0, False, shape[-1], shape, storage)


def outputs(**fields):
    """The values of an `Outputs` tuple; arrays become pointers, what is not given 0."""
    return [_value_of(one) for one in Outputs(**{name: fields.get(name, 0) for name in Outputs._fields})]


def _value_of(field):
    """What a kernel gets for an array, None or a number."""
    if field is None:
        return 0
    return field.pointer if isinstance(field, Array) else field


def directions_of(job, **common):
    """((`Direction`, fields of `Outputs`) of the rowwise one, of the columnwise one); {} for one that is not made."""
    made = []
    for name in ("rowwise", "columnwise"):
        columnwise, fields = name == "columnwise", {}
        direction = direction_of(job.scaling, columnwise, job.swizzled)
        if getattr(job, name):
            scales, amax = job.fields[f"{name}_scale_inv"], job.fields.get(f"amax_{name}")
            stride = direction.scale_stride(scales.shape)
            fields = {"data": job.fields[f"{name}_data"], "scales": scales, "amax": amax, "scale_stride": stride}
            fields |= common
            if job.random_bits[columnwise] is not None:
                fields["random_bits"] = job.random_bits[columnwise]
        made.append((direction, fields))
    return tuple(made)


def shared_amax(fields):
    """Let both directions share one amax array, and return it."""
    names = [name for name in ("amax_rowwise", "amax_columnwise") if name in fields]
    for name in names[1:]:
        fields[name] = fields[names[0]]
    return fields[names[0]]


def squares_of(recipe, job):
    """A square recipe without the direction that is not made; the row epilogue still says what the blocks are."""
    if not job.columnwise:
        recipe = replaced(recipe, column=None)
    return recipe if job.rowwise else replaced(recipe, row=("only blocks", recipe.row))


def _require_known_format(fmt):
    """Raise ValueError for a format of the caller's own: kernels know `refops.FORMATS`, by name."""
    if FORMATS.get(fmt.name) != fmt:
        raise ValueError(f"fmt must be one of refops.FORMATS on a GPU (cuda_kernels.host takes any); got {fmt!r}")
