"""The GPU backend of `interface.Interface`: which kernels an operation runs, in which order, on which arrays.

Per scaling, with an activation in front (without one the first step falls away):

    delayed              one kernel: activation, amax, cast (, transpose) (, sums)
    current, NVFP4       activation + amax -> rounded temporary; cast of the temporary
    block, NVFP4 with RHT or row scaling      activation -> rounded temporary; amax where needed; cast
    MXFP8                one kernel for one or both directions (, sums)
"""

import math
from dataclasses import replace as replaced

import numpy as np

from cuda_kernels import kernels, plans, simt
from cuda_kernels.arrays import HIGH_PRECISION, Array, memory_of
from cuda_kernels.casts import LARGEST_FINITE, STORAGES
from cuda_kernels.interface import Backend, Interface, Operand
from cuda_kernels.launch import (
    LARGEST_DIMENSION,
    band_shape,
    launcher_for,
    mxfp8_grid,
    row_shape,
    tile_grid,
)
from cuda_kernels.operands import NO_PARAMETERS, Front, Inputs, Outputs
from cuda_kernels.recipes import (
    Prologue,
    Recipe,
    ScaledGradient,
    arguments_of,
    build,
    build_scaled_gradient,
    carrier,
    pointer,
    scalar,
    widest,
)
from cuda_kernels.result import Quantized
from cuda_kernels.vectors import VECTOR
from refops.arguments import require_choice, require_flag, require_high_precision_dtype, require_integer, require_tensor
from refops.formats import FORMATS, require_format
from refops.quantization.layout import ceil_div
from refops.scaling import FP8_FORMATS, BlockScaling, CurrentScaling, DelayedScaling, MXFP8Scaling


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
        if known is None or simt.SIMULATED:
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
            raise TypeError(f"{name} must be a uint8 array; got {array.dtype} of shape {array.shape}")
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
        lanes = 32 if recipe.row and "amax" in recipe.row[0] else 16
        tiles = lambda: tile_grid(m, k, kernels.tile_columns(recipe.stage))  # noqa: E731
        grid, block = {
            "row": lambda: row_shape(m, inner, lanes),
            "wide row": lambda: row_shape(m, inner, 2, 2 * VECTOR),
            "block row": lambda: row_shape(m, inner, 1, 2 * VECTOR),
            "decode row": lambda: row_shape(m, inner, 1, 2 * VECTOR),
            "two block row": lambda: row_shape(m, inner, 1, 4 * VECTOR),
            "band": lambda: band_shape(m, inner),
            "tile": tiles,
            "square": tiles,
            "square choice": tiles,
            "mxfp8": lambda: mxfp8_grid(m, k),
        }[recipe.kernel]()
        if 0 in grid:
            grid, block = (1, 1, 1), (block[0], 1, 1)
        values = [*self._inputs(front), *outputs(outer=m, inner=k, **(row or {}))]
        if not recipe.one_direction:
            transposed = recipe.kernel != "mxfp8" and recipe.transposed
            outer, inner = (k, m) if transposed else (m, k)
            values += outputs(outer=outer, inner=inner, **(column or {}))
        if recipe.kernel in ("band", "tile", "mxfp8"):
            values.append(0 if partial is None else partial.pointer)
        make = lambda target: build(recipe, target)  # noqa: E731
        self._launch(recipe, make, arguments_of(recipe), values, grid, block)

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
        if m or (epilogue and epilogue[0].startswith("per tensor")):  # the scale is stored even of an empty tensor
            self.run(recipe, front, fields, partial=partial)
        self._finish_sums(partial, out, partial.shape[0])

    def _finish_sums(self, partial, out, count):
        k = out.shape[-1]
        described = [pointer(np.float32), pointer(carrier(out.dtype))]
        described += [scalar(np.int32)] * 2
        key = ("finish sums", out.dtype)
        values = [partial.pointer, out.pointer, count, k]
        grid = (max(1, ceil_div(k, kernels.THREADS)), 1, 1)
        self._launch(key, lambda target: finish_sums_of(out.dtype), described, values, grid, (kernels.THREADS, 1, 1))

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
        kind = type(job.scaling)
        if kind is DelayedScaling:
            self._delayed(job)
        elif kind is CurrentScaling:
            self._current(job)
        elif kind is MXFP8Scaling:
            self._mxfp8(job)
        elif kind is BlockScaling:
            self._block(job)
        else:
            self._nvfp4(job)

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
            self._column_sums(front, job.dbias)
        return front

    def _delayed(self, job):
        known = float(np.float32(job.scaling.scale))
        epilogue = ("per tensor+amax", job.scaling.fmt.name, True)
        given = {"epsilon": known, "largest_scale": float(np.float32(1) / np.float32(known))}
        self._per_tensor(job, job.front, epilogue, given, job.dbias, job.path.dbias_rounded)

    def _current(self, job):
        scaling, fields = job.scaling, job.fields
        amax = shared_amax(fields)
        front = self._stored_first(job, amax)
        scale = self.empty((2,), "float32")
        limit, epsilon = float(scaling.fmt.max), scaling.amax_epsilon
        described = [pointer(np.float32)] * 2 + [scalar(np.float32)] * 2 + [scalar(np.uint32)]
        mask = 0xFF800000 if scaling.power_2_scale else 0xFFFFFFFF
        values = [amax.pointer, scale.pointer, limit, epsilon, mask]
        self._launch("current scale", lambda target: kernels.current_scale, described, values, (1, 1, 1), (1, 1, 1))
        for name in ("rowwise_scale_inv", "columnwise_scale_inv"):
            if name in fields:
                self._copy(scale, 1, fields[name])
        self._per_tensor(job, front, ("per tensor", scaling.fmt.name, False), {"given": scale}, None, False)

    def _copy(self, source, index, target):
        """target[0] = source[index], float32."""
        described = [pointer(np.float32)] * 2 + [scalar(np.int32)]
        values = [source.pointer, target.pointer, index]
        self._launch("copy", lambda target: kernels.copy_one, described, values, (1, 1, 1), (1, 1, 1))

    def _per_tensor(self, job, front, epilogue, given, dbias, sums_rounded):
        directions = direction_fields(job, **given)
        row, column = directions["rowwise"], directions["columnwise"]
        if not job.columnwise and dbias is None:
            self._rows(front, epilogue, row, False)
        elif not job.columnwise:
            self._column_sums(front, dbias, epilogue, row, sums_rounded=sums_rounded)
        else:
            self._tiles(job, front, epilogue, epilogue, row, column, dbias=dbias)

    def _tiles(self, job, front, row_key, column_key, row, column, *, dbias=None, transform=None):
        """Run the tile kernel: columnwise copies transposed; sums of 128 rows each."""
        m, k = front.matrix_shape
        stage = front.storage if front.kind == "identity" else "float32"
        partial = None if dbias is None else self.empty((ceil_div(m, kernels.TILE_ROWS), k), "float32")
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
        if 0 not in (m, k) or recipe.column[0].startswith("per tensor"):
            self.run(recipe, front, row, column, partial)
        if dbias is not None:
            self._finish_sums(partial, dbias, partial.shape[0])

    def _mxfp8(self, job):
        scaling, front, rounded = job.scaling, job.front, job.path.casts_rounded
        directions = direction_fields(job)
        row, column = directions["rowwise"], directions["columnwise"]
        fmt, rule = scaling.fmt.name, scaling.scale_rounding
        row_key = ("mxfp8", fmt, rule, scaling.two_d, job.swizzled)
        empty = 0 in front.matrix_shape
        if (scaling.two_d or empty) and job.dbias is not None:
            self._column_sums(front, job.dbias, sums_rounded=job.path.dbias_rounded)
        if empty:
            return
        if scaling.two_d:
            self._squares(job, front, row_key, ("mxfp8 square columns", fmt, rule, job.swizzled), row, column)
        elif not job.columnwise and job.dbias is None:
            self._rows(front, row_key, row, rounded, lanes=4)
        elif not job.columnwise:
            self._column_sums(front, job.dbias, row_key, row, rounded, job.path.dbias_rounded)
        else:
            self._mxfp8_columns(job, row_key, (fmt, rule, job.swizzled), row, column)

    def _mxfp8_columns(self, job, row_key, column_key, row, column):
        front, (m, k) = job.front, job.front.matrix_shape
        partial = None if job.dbias is None else self.empty((ceil_div(m, kernels.MX_ROWS), k), "float32")
        recipe = self._recipe(
            "mxfp8",
            front,
            row_key if job.rowwise else None,
            column_key,
            rounded=job.path.casts_rounded,
            dbias=None if job.dbias is None else "exact",
            whole=self._whole(front, row.get("data"), column["data"]),
        )
        self.run(recipe, front, row, column, partial)
        if job.dbias is not None:
            self._finish_sums(partial, job.dbias, partial.shape[0])

    def _squares(self, job, front, row_key, column_key, row, column):
        """Run the square kernel: one scale for a square block, in one or both directions."""
        m = front.matrix_shape[0]
        transposed = column_key[0] != "mxfp8 square columns"
        recipe = self._recipe(
            "square",
            front,
            row_key,
            column_key,
            rounded=job.path.casts_rounded,
            stage=front.storage,
            transposed=transposed,
            whole=self._whole(front, row.get("data"), None if transposed else column.get("data")),
            whole_columns=m % VECTOR == 0 if transposed else self._whole(front, column.get("data")),
        )
        self.run(squares_of(recipe, job), front, row, column)

    def _square_choice(self, job, front, key, row, column):
        """Run the kernel of 4over6 in squares; the amax is read through the rowwise fields."""
        recipe = self._recipe(
            "square choice",
            front,
            key if job.rowwise else None,
            key if job.columnwise else None,
            stage=front.storage,
            whole=self._whole(front, row.get("data")),
            whole_columns=front.matrix_shape[0] % VECTOR == 0,
        )
        self.run(recipe, front, {**row, "given": shared_amax(job.fields)}, column)

    def _block(self, job):
        scaling, front = job.scaling, job.front
        if front.kind != "identity":
            front = self._stored_first(job, None)
        elif job.dbias is not None:
            self._column_sums(front, job.dbias)
        if 0 in front.matrix_shape:
            return
        largest = float(LARGEST_FINITE[front.storage])
        directions = direction_fields(job, epsilon=scaling.amax_epsilon, largest_scale=largest)
        row, column = directions["rowwise"], directions["columnwise"]
        key = ("block", scaling.fmt.name, scaling.block_dim == 2, scaling.power_2_scale)
        if scaling.block_dim == 2 and front.storage == "float32":
            self._wide_squares(job, front, row, column)
        elif scaling.block_dim == 2:
            self._squares(job, front, key, key, row, column)
        elif front.storage == "float32" or not job.columnwise:  # 128 columns of float32 do not fit a tile
            if job.rowwise:
                self._rows(front, key, row, False, lanes=16)
            if job.columnwise:
                self._tiles(job, front, None, key, None, column)
        else:
            self._tiles(job, front, key, key, row, column)

    def _wide_squares(self, job, front, row, column):
        """128 x 128 blocks of float32: their maxima first, then each direction with them."""
        (m, k), scaling = front.matrix_shape, job.scaling
        stride = ceil_div(k, 128)
        maxima = self.zeros((ceil_div(m, 128), stride), "float32")
        self._rows(front, ("block amax",), {"amax": maxima, "scale_stride": stride}, False)
        given = {"given": maxima, "first_block": stride}
        key = ("block given", scaling.fmt.name, scaling.power_2_scale)
        if job.rowwise:
            self._rows(front, (*key, False), row | given, False)
        if job.columnwise:
            self._tiles(job, front, None, (*key, True), None, column | given)

    def _nvfp4(self, job):
        scaling, fields = job.scaling, job.fields
        if scaling.row_scaled or scaling.rht:
            front = self._stored_first(job, None)
            self._separate_amaxes(job, front)
        else:
            front = self._stored_first(job, shared_amax(fields))
        m, k = front.matrix_shape
        if not m or not k:
            return
        seeds = {"seed": scaling.seed, "offset": scaling.offset}
        directions = direction_fields(job, **seeds)
        for name, bits in zip(("rowwise", "columnwise"), job.random_bits, strict=True):
            if bits is not None and directions[name]:
                directions[name]["random_bits"] = self.memory.from_numpy(np.ascontiguousarray(bits))
            directions[name]["given"] = fields.get(f"amax_{name}")
        row, column = directions["rowwise"], directions["columnwise"]
        if not scaling.four_over_six:
            self._nvfp4_scales(scaling, row, column)
        column["first_block"] = m * (k // scaling.block_size)
        key = nvfp4_key(job)
        if scaling.two_d and scaling.four_over_six:
            self._square_choice(job, front, key, row, column)
        elif scaling.two_d:
            self._squares(job, front, key, key, row, column)
        elif not job.columnwise:
            self._rows(front, key, row, False, lanes=2)
        else:
            transform = (scaling.sign_mask, False) if scaling.rht else None
            self._tiles(job, front, key, key, row, column, transform=transform)

    def _nvfp4_scales(self, scaling, *directions):
        """Replace each direction's amax, of the tensor or of its rows, by the scales (S_enc, S_dec)."""
        made = {}
        for direction in directions:
            amax = direction.get("given")
            if amax is None:
                continue
            if id(amax) not in made:
                scales = made[id(amax)] = self.empty((amax.size, 2), "float32")
                described = [pointer(np.float32)] * 2 + [scalar(np.float32), scalar(np.int32)]
                values = [amax.pointer, scales.pointer, 6.0 * scaling.e4m3_max, amax.size]
                grid = (ceil_div(amax.size, kernels.THREADS), 1, 1)
                make = lambda target: kernels.nvfp4_scales  # noqa: E731
                self._launch("nvfp4 scales", make, described, values, grid, (kernels.THREADS, 1, 1))
            direction["given"] = made[id(amax)]

    def _separate_amaxes(self, job, front):
        """Fill the amaxes that differ between the directions: of rows and columns, or after the Hadamard transform."""
        scaling, fields = job.scaling, job.fields
        if 0 in front.matrix_shape:
            return
        epilogue = ("amax of rows",) if scaling.row_scaled else ("amax",)
        if job.rowwise:
            self._rows(front, epilogue, {"amax": fields["amax_rowwise"]}, False)
        if job.columnwise:
            transform = (scaling.sign_mask, False) if scaling.rht else None
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
        if not out.size:
            return
        direction = "rowwise" if q.rowwise_data is not None else "columnwise"
        columnwise = direction == "columnwise"
        transposed = columnwise and not isinstance(q.scaling, MXFP8Scaling)
        m, k = math.prod(q.shape[:-1]), q.shape[-1]
        outer, inner = (k, m) if transposed else (m, k)
        wrap = lambda name: self.memory.wrap(getattr(q, name), name)  # noqa: E731
        name, fmt, options = decoder_of(q.scaling, columnwise)
        scales = wrap(f"{direction}_scale_inv")
        amax = None if getattr(q, f"amax_{direction}") is None else wrap(f"amax_{direction}")
        stride = scales.shape[-1]
        front = Front(
            "decoded",
            name,
            NO_PARAMETERS,
            wrap(f"{direction}_data"),
            scales,
            amax,
            stride,
            False,
            inner,
            (outer, inner),
            storage,
        )
        if columnwise and getattr(q.scaling, "rht", False):
            options = {**options, "transform": (q.scaling.sign_mask, True)}
        along_rows = "decode row" if k % (2 * VECTOR) == 0 and _readable(front, out) else "row"
        recipe = Recipe(
            "tile" if transposed else along_rows,
            Prologue("decoded", name, fmt, **options),
            None if transposed else ("plain", storage),
            ("plain", storage) if transposed else None,
            storage="float32",
            whole=k % VECTOR == 0 and out.aligned,
            whole_columns=k % VECTOR == 0 and out.aligned,
        )
        self.run(recipe, front, *(({}, {"data": out}) if transposed else ({"data": out},)))

    def hadamard(self, operand, sign_mask, inverse, out):
        if out.size:
            front = identity_of(operand.array, operand.storage)
            self._rows(front, ("plain", operand.storage), {"data": out}, False, transform=(sign_mask, inverse))

    def encode(self, operand, fmt, saturate, rounding, random_bits, out):
        _require_known_format(fmt)
        if not saturate or rounding != "nearest_even" or fmt.name == "e8m0":
            raise ValueError(
                "encode on a GPU must be saturating, rounding='nearest_even', with a signed format (refops.encode has "
                f"the others); got saturate={saturate}, rounding={rounding!r}, fmt={fmt!r}"
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
            "decoded", "none", NO_PARAMETERS, codes.array, None, None, 0, False, width, codes.shape or (1,), "float32"
        )
        recipe = Recipe("row", Prologue("decoded", "none", fmt.name), ("plain", "float32"), whole=False)
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
        grid = (ceil_div(columns, kernels.THREADS), 1, 1)
        make = lambda target: kernels.delayed_scale  # noqa: E731
        self._launch("delayed scale", make, described, values, grid, (kernels.THREADS, 1, 1))
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
        grid = (ceil_div(scales.size, kernels.THREADS), 1, 1)
        if scales.size:
            make = lambda target: kernels.swizzle  # noqa: E731
            self._launch("swizzle", make, described, values, grid, (kernels.THREADS, 1, 1))
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
                transposed = name.startswith("column") and isinstance(q.scaling, MXFP8Scaling)
                moved[name] = backend.swizzle(memory.wrap(getattr(q, name), name), not swizzled, transposed)
        return memory.returned(moved)


def _readable(front, out):
    """Whether rows of whole 16 codes can be read 16 at a time; of MXFP8 columns their scales too."""
    scales_too = front.name != "mx_columns" or (front.dy.aligned and front.interleave % (2 * VECTOR) == 0)
    return front.x.aligned and out.aligned and scales_too


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
    values = Outputs(**{name: fields.get(name, 0) for name in Outputs._fields})
    return [0 if one is None else one.pointer if isinstance(one, Array) else one for one in values]


def direction_fields(job, **common):
    """{"rowwise": ..., "columnwise": ...}: fields of `Outputs` for a direction that is made, {} for another."""
    directions = {}
    for name in ("rowwise", "columnwise"):
        directions[name] = {}
        if getattr(job, name):
            scales = job.fields[f"{name}_scale_inv"]
            stride = scales.shape[-1]
            if job.swizzled and name == "columnwise" and isinstance(job.scaling, MXFP8Scaling):
                stride = scales.shape[0]  # swizzled along the transpose
            data, amax = job.fields[f"{name}_data"], job.fields.get(f"amax_{name}")
            directions[name] = {"data": data, "scales": scales, "amax": amax, "scale_stride": stride, **common}
    return directions


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
    return recipe if job.rowwise else replaced(recipe, row=("only blocks", *recipe.row))


def nvfp4_key(job):
    """The epilogue of NVFP4 settings."""
    s = job.scaling
    if s.four_over_six:
        return ("nvfp4 4over6", s.e4m3_max, s.four_over_six == "mse", s.row_scaled, job.swizzled)
    rounding = "nearest"
    if s.stochastic_rounding:
        rounding = "philox" if s.random_bits is None else "given"
    return ("nvfp4", s.e4m3_max, s.two_d, s.row_scaled, rounding, job.swizzled)


def _require_known_format(fmt):
    """Raise ValueError for a format of the caller's own: kernels know `refops.FORMATS`, by name."""
    if FORMATS.get(fmt.name) != fmt:
        raise ValueError(f"fmt must be one of refops.FORMATS on a GPU (cuda_kernels.host takes any); got {fmt!r}")


def decoder_of(scaling, columnwise):
    """(kind of scale, format, options of `Prologue`) to dequantize with."""
    if isinstance(scaling, DelayedScaling | CurrentScaling):
        return "tensor", scaling.fmt.name, {}
    if isinstance(scaling, BlockScaling):
        return "square_block" if scaling.block_dim == 2 else "row_block", scaling.fmt.name, {}
    if isinstance(scaling, MXFP8Scaling):
        return "mx_columns" if columnwise else "mx_row", scaling.fmt.name, {}
    return "nvfp4_rows" if scaling.row_scaled else "nvfp4", "e2m1", {"top": 6.0 * scaling.e4m3_max}
