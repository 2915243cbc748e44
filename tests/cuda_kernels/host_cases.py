"""What the tests of `cuda_kernels.host` share: every scaling, shapes, a tensor with special values."""

from itertools import product

import ml_dtypes
import numpy as np

import refops
from arrays import heavy_tailed
from refops.survey import SCALINGS

F = np.float32
BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(F), np.dtype(np.float16), BF16]
E4M3, E5M2 = refops.E4M3, refops.E5M2
MXFP8 = refops.MXFP8Scaling(E4M3)
#: Settings beyond those that have a name.
MORE_SCALINGS = {
    "block-1x128-f32": refops.BlockScaling(E4M3, 1, power_2_scale=False, amax_epsilon=1e-3),
    "block-128x128-f32-e5m2": refops.BlockScaling(E5M2, 2, power_2_scale=False),
    "mxfp8-2d": refops.MXFP8Scaling(E4M3, two_d=True),
    "mxfp8-even": refops.MXFP8Scaling(E4M3, scale_rounding="even"),
    "mxfp8-floor": refops.MXFP8Scaling(E5M2, scale_rounding="floor"),
    "mxfp8-ceil": refops.MXFP8Scaling(E5M2, scale_rounding="ceil_ocp"),
    "mxfp6-e3m2": refops.MXFP8Scaling(refops.E3M2),
    "mxfp6-e2m3-2d": refops.MXFP8Scaling(refops.E2M3, two_d=True),
    "nvfp4-mse": refops.NVFP4Scaling(four_over_six="mse"),
    "nvfp4-mse-2d": refops.NVFP4Scaling(four_over_six="mse", e4m3_max=256, two_d=True),
    "nvfp4-mae-fast": refops.NVFP4Scaling(four_over_six="mae", fast_error=True),
    "nvfp4-mse-fast-2d": refops.NVFP4Scaling(four_over_six="mse", e4m3_max=256, two_d=True, fast_error=True),
    "nvfp4-sr-2d": refops.NVFP4Scaling(stochastic_rounding=True, two_d=True, seed=7),
    "nvfp4-sr": refops.NVFP4Scaling(stochastic_rounding=True, seed=7, offset=1 << 40),
}
ALL_SCALINGS = {name: row.scaling for name, row in SCALINGS.items()} | MORE_SCALINGS
#: For `sampled`: each pair is compiled, by tests/prewarm.py for those with a name, in a test for the others.
SCALINGS_AND_DTYPES, MORE_SCALINGS_AND_DTYPES = ([*product(names, DTYPES)] for names in (SCALINGS, MORE_SCALINGS))
#: M and K that every scaling takes, and ragged ones.
ALIGNED, RAGGED = [(96, 160), (160, 1312), (0, 64)], [(3, 5), (130, 1070), (1, 8200), (33, 1), (7,), (2, 3, 40), (4, 0)]


def tensor(shape, dtype=BF16, seed=0):
    """Heavy-tailed values with zeros of both signs, huge and tiny ones, NaN and infinities."""
    x = heavy_tailed(shape, F, seed)
    flat = x.reshape(-1)
    for start, value in ((300, 1e-42), (901, 3e38), (1502, -1e-30), (2203, np.nan), (4604, np.inf), (4705, -np.inf)):
        flat[start::9001] = value
    with np.errstate(over="ignore"):
        return x.astype(dtype)


def takes(scaling, shape, columnwise):
    """Whether the scaling allows this."""
    layout = scaling.layout
    multiple = layout.columnwise_multiple if columnwise else layout.shape_multiple
    divides = int(np.prod(shape[:-1])) % multiple == 0 == shape[-1] % multiple
    return divides and not (columnwise and scaling.only_rowwise)
