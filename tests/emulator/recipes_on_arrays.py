"""Run any kernel of the catalogue on the software GPU, by its `Spec` or recipe, on arrays large enough for all of them.

The results mean nothing: scales and amaxes are ones. What is counted is how the kernel moves its data.
"""

import numpy as np

from cuda_kernels import arrays
from cuda_kernels.arrays import numpy_dtype
from cuda_kernels.casts import carrier
from cuda_kernels.emulator.profile import KernelProfile, profile
from cuda_kernels.gpu import GPU
from cuda_kernels.operands import PARAMETERS, Coded, Front, Spec, Stored
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
        _dequantize(recipe, shape)
        return
    gpu = GPU(arrays.memory_of(np.zeros(1, np.float32)), recipe.fast_math)
    if isinstance(recipe, ScaledGradient):
        front = _front(gpu, Prologue("backward", recipe.name, recipe.storage, scaled=True), shape)
        out, sums = gpu.empty(shape, recipe.out_storage), gpu.empty(shape[:1], recipe.scales_storage)
        gpu.scaled_gradient(front, out, recipe.out_storage, sums, recipe.scales_storage)
        return
    row, column = _fields(gpu, shape), _fields(gpu, shape)
    gpu.run(recipe, _front(gpu, recipe.prologue, shape), row, column, partial=gpu.empty(shape, "float32"))


def _dequantize(spec, shape):
    """Launch a kernel of `families.dequantize`; the scales are as many as the values."""
    gpu, (outer, inner) = GPU(arrays.memory_of(np.zeros(1, np.float32))), shape
    codes, scales = _values(gpu, shape, "e4m3"), _values(gpu, shape, "e4m3")
    coded = Coded(codes, scales, inner, _ones(gpu, outer), outer, inner)
    result = shape[::-1] if spec.direction.transposed else shape
    gpu.launch(spec, shape, coded, Stored(gpu.empty(result, spec.storage), *result))


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
