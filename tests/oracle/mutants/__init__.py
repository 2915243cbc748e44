"""The mutants of the oracle: kernels with one seeded fault each, over all operations and formats.

`MUTANTS` maps a name to a `Mutant`: what the kernel did wrong, its inputs and its dump, and the answer that the
oracle should give. A *convention* is a systematic fault that many kernels have had and that has a name; a *corruption*
is wrong entries here and there, which must be detected and which no convention explains. test_mutants.py and score.py
count both.
"""

from mutants import between, blocks, carried, corruptions, nvfp4, parts, per_tensor, placements, precision, values
from mutants.registry import MUTANTS, Mutant

__all__ = [
    "MUTANTS",
    "Mutant",
    "between",
    "blocks",
    "carried",
    "corruptions",
    "nvfp4",
    "parts",
    "per_tensor",
    "placements",
    "precision",
    "values",
]
