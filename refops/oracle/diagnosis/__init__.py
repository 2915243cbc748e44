"""What explains a wrong dump: a convention of `refops.oracle.conventions`, or right entries elsewhere, and its place.

`search` tries everything; `comparison` counts how a replay compares with the dump, on the regions of `probes`;
`elements` lays arrays out as the tensor is; `placed` finds where a convention is followed, by `inference`, and what was
`moved`.
"""

import numpy as np

from refops.oracle.diagnosis.search import Search


def diagnose(case, outputs, wrong, reference):
    """Return what explains a wrong dump, best first; an empty list where nothing known does.

    Args:
        case: the `Case`.
        outputs: output name -> array as stored.
        wrong: output name -> bool array of its shape, True outside the enclosure (for packed FP4, bytes).
        reference: output name -> what the reference writes.

    Returns:
        List of `Explanation`.
    """
    with np.errstate(all="ignore"):
        return Search(case, outputs, wrong, reference).explanations()
