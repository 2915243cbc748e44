"""Faults that people plant in kernels: each a kernel of its own, by authors who do not know the conventions.

`open_*` were seen while the oracle was improved, `held_*` by nobody who worked on it. `registry` says what a fault is,
`accepted_*` which names a judge, who saw the fault and the sentence alone, calls right; `outcome` is what the oracle
says.
"""

from planted import (
    held_amax,
    held_codes,
    held_constants,
    held_dbias,
    held_dequantize,
    held_derivatives,
    held_index,
    held_memory,
    held_nvfp4,
    held_parameters,
    held_part,
    held_pipeline,
    held_precision,
    held_scale_slots,
    held_unwritten,
    held_updates,
    open_formulas,
    open_fused,
    open_indices,
    open_parts,
    open_precision,
    open_ratios,
    open_regions,
)
from planted.registry import PLANTED

__all__ = [
    "PLANTED",
    "held_amax",
    "held_codes",
    "held_constants",
    "held_dbias",
    "held_dequantize",
    "held_derivatives",
    "held_index",
    "held_memory",
    "held_nvfp4",
    "held_parameters",
    "held_part",
    "held_pipeline",
    "held_precision",
    "held_scale_slots",
    "held_unwritten",
    "held_updates",
    "open_formulas",
    "open_fused",
    "open_indices",
    "open_parts",
    "open_precision",
    "open_ratios",
    "open_regions",
]
