"""Right outputs stored wrongly: functions from arrays by name to such arrays."""

import numpy as np

import refops

F = np.float32


def swapped(outputs):
    """The two codes of each byte of data exchanged."""
    return {n: (a >> 4 | a << 4) if n.endswith("_data") else a for n, a in outputs.items()}


def on_scales(change):
    """Scales changed by a function of their array."""
    return lambda outputs: {n: change(a) if n.endswith("_scale_inv") else a for n, a in outputs.items()}


def reciprocal(fmt):
    """Encode scales in place of decode scales, codes of `fmt`."""

    def change(scales):
        with np.errstate(all="ignore"):
            return refops.encode(F(1) / fmt.values[scales], fmt)

    return on_scales(change)


#: Scales in the transposed order, in an array of the right shape.
transposed = on_scales(lambda scales: np.ascontiguousarray(scales.T).reshape(scales.shape))
