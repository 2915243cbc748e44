"""The settings that are checked: those that the command line shows, and every other branch of the arithmetic."""

from refops.formats import E2M3, E3M2, E4M3, E5M2
from refops.scaling import BlockScaling, CurrentScaling, DelayedScaling, MXFP8Scaling, NVFP4Scaling, Scaling
from refops.survey import SCALINGS, NamedScaling

#: Settings that no survey needs: name -> scaling. Together with the survey's they reach every branch.
_MORE: dict[str, Scaling] = {
    "delayed-e5m2": DelayedScaling(E5M2, 3.7),
    "current-epsilon": CurrentScaling(E4M3, amax_epsilon=0.01),
    "block-1x128-f32": BlockScaling(E5M2, 1, power_2_scale=False),
    "block-128x128-f32": BlockScaling(E4M3, 2, power_2_scale=False, amax_epsilon=0.01),
    "mxfp8-32x32": MXFP8Scaling(E4M3, two_d=True),
    "mxfp8-even": MXFP8Scaling(E4M3, scale_rounding="even"),
    "mxfp8-ceil": MXFP8Scaling(E5M2, scale_rounding="ceil_ocp"),
    "mxfp6-e3m2": MXFP8Scaling(E3M2),
    "mxfp6-e2m3": MXFP8Scaling(E2M3, two_d=True),
    "nvfp4-rht-plain": NVFP4Scaling(rht=True, sign_mask=0),
    "nvfp4-4over6-mse": NVFP4Scaling(four_over_six="mse"),
    "nvfp4-16x16-4over6": NVFP4Scaling(two_d=True, four_over_six="mae", e4m3_max=256),
    "nvfp4-16x16-stochastic": NVFP4Scaling(two_d=True, stochastic_rounding=True, seed=5, offset=7),
}

#: Every setting that the self-check runs, by name. With RHT it is the columnwise copy that counts.
CHECKED = dict(SCALINGS)
for _name, _scaling in _MORE.items():
    CHECKED[_name] = NamedScaling(_name, _scaling, "", columnwise=getattr(_scaling, "rht", False))
