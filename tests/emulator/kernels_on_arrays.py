"""Run any kernel of the catalogue on the software GPU, by its `Spec`, on arrays large enough for all of them.

The results mean nothing: scales and amaxes are ones. What is counted is how the kernel moves its data.
"""

from itertools import zip_longest

import numpy as np

from cuda_kernels import arrays, emulated
from cuda_kernels.emulator import counters
from cuda_kernels.gpu import GPU


def counted(spec, shape, target):
    """The `KernelCounters` of one launch of a kernel.

    Args:
        spec: a `Spec`. shape: (M, K) of the result as the rowwise direction sees it; of what is decoded as it is
            stored.
        target: a name of `emulator.settings.TARGETS`.
    """
    with emulated(target):
        before = counters()
        _launch(spec, shape)
        after = counters()
    changes = [now.difference(was) for now, was in zip_longest(after, before)]
    (ran,) = [change for change in changes if change.launches]
    return ran


def _launch(spec, shape):
    """Launch the kernel of a `Spec`: every operand is large enough, whatever its dtype."""
    gpu, operands = GPU(arrays.memory_of(np.zeros(1, np.float32))), []
    for place, (kind, fields) in enumerate(spec.operands()):
        if isinstance(kind, str):
            number = shape[1] if fields is np.int32 else 1  # of rows or columns
            operands.append((number if kind == "scalar" else _pointed_at(gpu, shape, fields),))
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
