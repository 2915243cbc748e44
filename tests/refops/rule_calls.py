"""The rules of the declared scalings, called on arrays as the reference calls them."""

from types import SimpleNamespace

import numpy as np

import refops
from refops.scalings.arithmetic import REFERENCE
from refops.scalings.declaration import FLT_MAX, Numbers

F = np.float32


def scale_from_amax(amax, fmt, *, epsilon=0.0, power_2=False, value_for_inf=FLT_MAX):
    """The float32 encode scale of each amax."""
    rule = refops.BlockScaling(fmt, power_2_scale=power_2).block_scale(REFERENCE)
    with np.errstate(all="ignore"):
        return rule(amax, F(0), Numbers(F(epsilon), F(value_for_inf)))[1]


def scale_byte(amax, fmt, rounding="up"):
    """The E8M0 byte of each amax."""
    with np.errstate(all="ignore"):
        return refops.MXFP8Scaling(fmt, scale_rounding=rounding).scale_code(REFERENCE)(amax, None, None)


def inverse_power(byte):
    """What elements are multiplied by under an E8M0 byte."""
    return REFERENCE.inverse_power(byte)


def nvfp4(e4m3_max=448):
    """The rules of NVFP4: `tensor(amax)` -> (S_enc, S_dec), `byte(amax, tensor)`, `multiplier(byte, tensor)`."""
    scaling = refops.NVFP4Scaling(e4m3_max=e4m3_max, four_over_six=None if e4m3_max == 448 else "mae")
    code = scaling.scale_code(REFERENCE)
    return SimpleNamespace(
        tensor=np.errstate(all="ignore")(scaling.tensor_scale(REFERENCE)),
        byte=lambda amax, tensor: code(amax, tensor, None),
        multiplier=scaling.multiplier(REFERENCE),
    )
