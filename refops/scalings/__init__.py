"""The scalings: one declaration a file, found here. A file added to this folder adds its scaling everywhere.

SCALINGS    the classes, in their fixed order
NAMED       the rows that the command line shows, by name
"""

from dataclasses import is_dataclass
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from refops.arguments import shown
from refops.scalings.block import BlockScaling as BlockScaling
from refops.scalings.current import CurrentScaling as CurrentScaling
from refops.scalings.declaration import FP8_FORMATS as FP8_FORMATS
from refops.scalings.declaration import UNFUSED as UNFUSED
from refops.scalings.declaration import NamedScaling as NamedScaling
from refops.scalings.declaration import Path as Path
from refops.scalings.declaration import Scaling as Scaling
from refops.scalings.delayed import DelayedScaling as DelayedScaling
from refops.scalings.mxfp8 import MXFP8Scaling as MXFP8Scaling
from refops.scalings.nvfp4 import TE_SIGN_MASK as TE_SIGN_MASK
from refops.scalings.nvfp4 import NVFP4Scaling as NVFP4Scaling


def _declared(module: ModuleType) -> list[type[Scaling]]:
    """The scalings that a module itself declares: its dataclasses. (Others are what scalings have in common.)"""
    classes = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Scaling)]
    return [cls for cls in classes if cls.__module__ == module.__name__ and is_dataclass(cls)]


_modules = [import_module(f"{__name__}.{found.name}") for found in iter_modules(__path__)]

#: Every scaling, in its declared order.
SCALINGS: tuple[type[Scaling], ...] = tuple(
    sorted((cls for module in _modules for cls in _declared(module)), key=lambda cls: (cls.order, cls.__name__))
)

_rows: list[NamedScaling] = [row for module in _modules for row in getattr(module, "NAMED", ())]

_names = [cls.__name__ for cls in SCALINGS] + [row.name for row in _rows]
if len(set(_names)) < len(_names):
    raise TypeError(f"a scaling or a row of NAMED is declared twice: {sorted(_names)}")

#: The scalings that the command line shows, by name, in the order of their classes.
NAMED = {row.name: row for row in sorted(_rows, key=lambda row: SCALINGS.index(type(row.scaling)))}


#: What `refops` offers of this folder.
__all__ = [cls.__name__ for cls in SCALINGS]
globals().update({cls.__name__: cls for cls in SCALINGS})


def require_scaling(scaling: Any) -> Any:
    """Return `scaling`, raising TypeError unless it is one of `SCALINGS`."""
    if not isinstance(scaling, SCALINGS):
        names = ", ".join(cls.__name__ for cls in SCALINGS)
        raise TypeError(f"scaling must be one of {names}; got {shown(scaling)}")
    return scaling
