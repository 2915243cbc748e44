"""What explains a wrong dump, and where: a convention of `refops.oracle.conventions`, or right entries elsewhere.

`search` tries everything, as long as its `budget` lasts, two conventions at once by `pairs`; `comparison` counts how a
replay compares with the dump, on the regions of `probes`; `elements` lays arrays out as the tensor is; `placed` finds
where a convention is followed, by `inference`; `displaced` what was `moved` or not written.
"""

import numpy as np

from refops.oracle.diagnosis.budget import Budget
from refops.oracle.diagnosis.search import Search

__all__ = ["Budget", "diagnose"]


def diagnose(case, outputs, wrong, reference, budget):
    """Return what explains a wrong dump, best first; an empty list where nothing known does.

    Args:
        case: the `Case`.
        outputs: output name -> array as stored.
        wrong: output name -> bool array of its shape, True outside the enclosure (for packed FP4, bytes).
        reference: output name -> what the reference writes.
        budget: the `Budget`; what was found when it is spent is returned.

    Returns:
        List of `Explanation`.
    """
    with np.errstate(all="ignore"):
        return Search(case, outputs, wrong, reference, budget).explanations()
