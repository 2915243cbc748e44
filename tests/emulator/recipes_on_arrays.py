"""Run any kernel of the catalogue on the software GPU, by its `Spec` or recipe, on arrays large enough for all of them.

The results mean nothing: scales and amaxes are ones. What is counted is how the kernel moves its data.
"""

import numpy as np

from cuda_kernels import arrays
from cuda_kernels.arrays import numpy_dtype
from cuda_kernels.casts import carrier
from cuda_kernels.emulator.profile import KernelProfile, profile
from cuda_kernels.gpu import GPU
from cuda_kernels.operands import PARAMETERS, Front, Spec
from cuda_kernels.recipes import Prologue, ScaledGradient


def profile_recipe(recipe, shape, target) -> KernelProfile:
    """The `KernelProfile` of a kernel.

    Args:
        recipe: a `Spec`, `Recipe` or `ScaledGradient`. shape: (M, K) of the result as the rowwise direction sees it; of
            what is decoded as it is stored.
        target: a name of `emulator.settings.TARGETS`.
    """
    (profiled,) = profile(lambda: _launch(recipe, shape), target=target, elements=shape[0] * shape[1])
    return profiled


def _launch(recipe, shape):
    if isinstance(recipe, Spec):
        _launch_spec(recipe, shape)
        return
    gpu = GPU(arrays.memory_of(np.zeros(1, np.float32)), recipe.fast_math)
    if isinstance(recipe, ScaledGradient):
        front = _front(gpu, Prologue("backward", recipe.name, recipe.storage, scaled=True), shape)
        out, sums = gpu.empty(shape, recipe.out_storage), gpu.empty(shape[:1], recipe.scales_storage)
        gpu.scaled_gradient(front, out, recipe.out_storage, sums, recipe.scales_storage)
        return
    row, column = _fields(gpu, shape), _fields(gpu, shape)
    gpu.run(recipe, _front(gpu, recipe.prologue, shape), row, column, partial=gpu.empty(shape, "float32"))


def _launch_spec(spec, shape):
    """Launch the kernel of a `Spec`: every operand is large enough, whatever its dtype."""
    gpu, operands = GPU(arrays.memory_of(np.zeros(1, np.float32))), []
    for place, (kind, fields) in enumerate(spec.operands()):
        if isinstance(kind, str):
            operands.append((1 if kind == "scalar" else _pointed_at(gpu, shape, fields),))
            continue
        numbers = _sizes(spec, shape, place)
        values = {
            field: numbers.get(field, 1) if what == "scalar" else _pointed_at(gpu, shape, dtype)
            for field, (what, dtype) in fields.items()
        }
        operands.append(kind(**values))
    gpu.launch(spec, shape, *operands)


def _sizes(spec, shape, place):
    """The numbers of the operand in a place that say how large a matrix is, and how far its rows are apart.

    The second operand is what a kernel fills, rowwise, or the third one, columnwise.
    """
    (m, k), values, direction = shape, getattr(spec, "values", None), getattr(spec, "direction", None)
    halves = values is not None and values.gated and values.kind == "backward"
    turned = direction is not None and (
        (place == 1 and direction.transposed) or (place == 2 and direction.other.transposed)
    )
    outer, inner = (k, m) if turned else (m, k)
    return {
        "rows": m,
        "width": k // 2 if halves else k,
        "interleave": 0,
        "outer": outer,
        "inner": inner,
        "scale_stride": max(shape),
        "stride": max(shape),
        "first_block": 0,
    }


def _pointed_at(gpu, shape, dtype):
    """An array of a dtype with twice the elements of a shape, which nobody's offset leaves."""
    count = 2 * max(shape) * max(shape)
    if dtype in (np.float32, np.int32):
        return gpu.memory.wrap(np.ones(count, np.float32), "numbers")
    return gpu.memory.wrap(np.random.default_rng(0).integers(0, 120, count * dtype().itemsize, np.uint8), "bytes")


def _fields(gpu, shape):
    """Fields of `Outputs` of one direction: four bytes for each code and each scale, whatever their dtypes."""
    return {
        "data": gpu.empty(shape, "float32"),
        "scales": gpu.empty(shape, "float32"),
        "amax": gpu.zeros((max(shape),), "float32"),
        "given": _ones(gpu, 2 * max(shape)),
        "epsilon": 1.0,
        "largest_scale": 1.0,
        "scale_stride": max(shape),
    }


def _front(gpu, prologue, shape):
    """The `Front` of a prologue."""
    (m, k), dy = shape, None
    width, columns = k, k
    if prologue.kind == "backward":
        width = k // 2 if prologue.gated else k
        dy = _values(gpu, (m, width), prologue.storage)
    elif prologue.gated:
        columns = 2 * k
    return Front(
        kind=prologue.kind,
        name=prologue.name,
        parameters=(np.float32(1),) * len(PARAMETERS),
        x=_values(gpu, (m, columns), prologue.storage),
        dy=dy,
        row_scales=_ones(gpu, m),
        interleave=0,
        gated=prologue.gated,
        width=width,
        tensor_shape=shape,
        storage=prologue.storage,
    )


def _ones(gpu, count):
    return gpu.memory.wrap(np.ones(count, np.float32), "ones")


def _values(gpu, shape, storage):
    """Normally distributed values of a dtype, or random codes of a format; FP4 codes need but half of the bytes."""
    random = np.random.default_rng(0)
    if carrier(storage) == np.uint8:
        return gpu.memory.wrap(random.integers(0, 120, shape, np.uint8), "codes")
    return gpu.memory.wrap(random.standard_normal(shape, np.float32).astype(numpy_dtype(storage)), "x")
