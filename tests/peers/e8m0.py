"""refops' E8M0 scales of any element format: those of a scaling that it has, and of those that only a peer has."""

import numpy as np

from refops.scalings.arithmetic import REFERENCE
from refops.scalings.rules import E8M0Scaling

#: Byte -> what elements are multiplied by.
MULTIPLIER = REFERENCE.inverse_power(np.arange(256))


def scale_byte(amax, fmt, rule="up"):
    """The byte of each float32 amax under a `scale_rounding`."""
    scaling = E8M0Scaling()
    scaling.fmt, scaling.scale_rounding = fmt, rule
    return scaling.scale_code(REFERENCE)(amax, None, None).astype(np.uint8)
