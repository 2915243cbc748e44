"""Compare refops with arrays that other implementations produced, bit for bit.

The arrays are the `.npz` files of `tests/vectors` (its README says who made each). Every comparison returns counts. A
documented divergence of another implementation is recomputed element by element: a difference counts as explained only
where that divergence says it must be. NaN codes compare as one class: their bits are not specified.

This package judges refops itself. Other people's kernels are judged elsewhere.
"""

from pathlib import Path

import numpy as np

from refops.conformance import activations, casts, fp8, mxfp8, nvfp4
from refops.conformance.vectors import Comparison, Vectors

__all__ = ["COMPARISONS", "Comparison", "Vectors", "compare_file", "compare_vectors"]


#: Vector kind -> the comparison.
COMPARISONS = {
    "cast_e4m3": casts.compare_cast_fp8,
    "cast_e5m2": casts.compare_cast_fp8,
    "cast_e2m1": casts.compare_cast_e2m1,
    "cast_e8m0": casts.compare_cast_e8m0,
    "decode_tables": casts.compare_decode_tables,
    "e8m0_tables": casts.compare_e8m0_tables,
    "stochastic_round_e2m1": casts.compare_stochastic,
    "fp8_scale_from_amax": fp8.compare_scale_from_amax,
    "fp8_current": fp8.compare_fp8_current,
    "fp8_delayed_update": fp8.compare_fp8_delayed_update,
    "fp8_block": fp8.compare_fp8_block,
    "dequant_fp8_block": fp8.compare_dequant_fp8_block,
    "mxfp8": mxfp8.compare_mxfp8,
    "mxfp8_floor_even_ceil": mxfp8.compare_mxfp8_ocp,
    "dequant_mxfp8": mxfp8.compare_dequant_mxfp8,
    "nvfp4_scales": nvfp4.compare_nvfp4_scales,
    "nvfp4": nvfp4.compare_nvfp4,
    "nvfp4_rht": nvfp4.compare_nvfp4_rht,
    "nvfp4_other": nvfp4.compare_nvfp4_other,
    "dequant_nvfp4": nvfp4.compare_dequant_nvfp4,
    "scale_swizzle": casts.compare_swizzle,
    "act_unary": activations.compare_act_unary,
    "act_gated": activations.compare_act_gated,
}


def compare_vectors(directory):
    """Return the comparisons with every vector file in `directory`, in the order of the file names.

    Raises:
        FileNotFoundError: `directory` holds no vector file. ValueError: a file of an unknown kind.
    """
    paths = sorted(Path(directory).glob("*.npz"))
    if not paths:
        raise FileNotFoundError(f"directory must hold vector files (*.npz); got {str(directory)!r}")
    return [comparison for path in paths for comparison in compare_file(path)]


def compare_file(path):
    """Return the comparisons with one vector file."""
    vectors = Vectors(Path(path))
    kind = vectors.meta["op"]
    if kind not in COMPARISONS:
        raise ValueError(f"{vectors.name}: op must be one of {', '.join(COMPARISONS)}; got {kind!r}")
    with np.errstate(all="ignore"):
        COMPARISONS[kind](vectors)
    return vectors.comparisons
