"""TE's former home of `autocast` and the recipes: importing it warns. Use `fuser` and `fuser.recipe`."""

import warnings

from fuser.quantization import *  # noqa: F403
from fuser.recipe import *  # noqa: F403

warnings.warn("fuser.fp8 is deprecated: use fuser (autocast ...) and fuser.recipe", DeprecationWarning, stacklevel=2)
