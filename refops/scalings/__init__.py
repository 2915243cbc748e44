"""The scalings: one declaration a file, found here. A file added to this folder adds its scaling everywhere.

SCALINGS    the classes, in their fixed order
NAMED       the rows that the command line shows, by name
named       settings, by one of those names or as they are
"""

from dataclasses import MISSING, fields, is_dataclass
from types import ModuleType
from typing import Any

from refops.arguments import did_you_mean, shown
from refops.formats import ElementFormat
from refops.rows import modules_of, rows_of
from refops.scalings.block import BlockScaling as BlockScaling
from refops.scalings.current import CurrentScaling as CurrentScaling
from refops.scalings.declaration import FP8_FORMATS as FP8_FORMATS
from refops.scalings.declaration import UNFUSED as UNFUSED
from refops.scalings.declaration import NamedScaling as NamedScaling
from refops.scalings.declaration import Path as Path
from refops.scalings.declaration import Scaling as Scaling
from refops.scalings.declaration import require_declared, require_fit
from refops.scalings.delayed import DelayedScaling as DelayedScaling
from refops.scalings.mxfp8 import MXFP8Scaling as MXFP8Scaling
from refops.scalings.nvfp4 import TE_SIGN_MASK as TE_SIGN_MASK
from refops.scalings.nvfp4 import NVFP4Scaling as NVFP4Scaling

#: What names on the command line are made of.
NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-_.")


def _declared(module: ModuleType) -> list[type[Scaling]]:
    """The scalings that a module itself declares: its dataclasses. (Others are what scalings have in common.)

    Raises:
        TypeError: one without a title, or another that cannot be declared; the message names it.
    """
    classes = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Scaling)]
    declared = [cls for cls in classes if cls.__module__ == module.__name__ and is_dataclass(cls)]
    for cls in declared:
        if not hasattr(cls, "title"):
            raise TypeError(f"{cls.__name__} must have a title, which tables show; got none in {module.__file__}")
        require_declared(cls)
    return declared


def _by_name(classes: tuple[type[Scaling], ...], rows: list[NamedScaling]) -> dict[str, NamedScaling]:
    """The rows by name, in the order of their classes.

    Raises:
        TypeError: a name that is declared twice, or a row of a class that is not declared; the message names it.
        ValueError: a name that a command line and a file's name cannot have.
    """
    names = [cls.__name__ for cls in classes] + [row.name for row in rows]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise TypeError(f"a scaling or a row of NAMED is declared twice: {', '.join(twice)}")
    for row in rows:
        if not row.name or set(row.name) - NAME_CHARACTERS:
            raise ValueError(f"name of a row of NAMED must be of a-z, 0-9, '-', '_' and '.'; got {row.name!r}")
        if type(row.scaling) not in classes:
            rule = "must have a scaling that is declared, a dataclass of a file of refops/scalings"
            raise TypeError(f"the row {row.name!r} of NAMED {rule}; got {shown(row.scaling)}")
    return {row.name: row for row in sorted(rows, key=lambda row: classes.index(type(row.scaling)))}


_modules = modules_of(__name__, __path__)
_rows = [
    row
    for module in _modules
    for row in rows_of(module, "NAMED", NamedScaling, without=("arithmetic", "declaration", "rules"))
]

#: Every scaling, in its declared order.
SCALINGS: tuple[type[Scaling], ...] = tuple(
    sorted((cls for module in _modules for cls in _declared(module)), key=lambda cls: (cls.order, cls.__name__))
)
#: The scalings that the command line shows, by name, in the order of their classes.
NAMED = _by_name(SCALINGS, _rows)


def _defaults(rows: dict[str, NamedScaling]) -> dict[str, str]:
    """The part before the first hyphen -> name of the row with nothing but defaults: "nvfp4" -> "nvfp4-1x16"."""
    found = {}
    for name, row in rows.items():
        required = [field for field in fields(row.scaling) if field.default is MISSING]  # type: ignore[arg-type]
        family = name.split("-")[0]
        if not required and family not in rows and row.scaling == type(row.scaling)():
            found[family] = name
    return found


#: Short names -> names of `NAMED`.
SHORT_NAMES = _defaults(NAMED)


#: What `refops` offers of this folder.
__all__ = [cls.__name__ for cls in SCALINGS]
globals().update({cls.__name__: cls for cls in SCALINGS})

for _row in NAMED.values():
    require_fit(_row.scaling)


def require_scaling(scaling: Any) -> Any:
    """Return `scaling`, raising TypeError unless it is one of `SCALINGS`."""
    if not isinstance(scaling, SCALINGS):
        names = ", ".join(cls.__name__ for cls in SCALINGS)
        raise TypeError(f"scaling must be one of {names}; got {shown(scaling)}{_hint(scaling)}")
    return scaling


def _hint(scaling: Any) -> str:
    """What an error adds about a value that is no scaling: the settings to write instead of a class or a name."""
    if isinstance(scaling, Scaling):
        return ", whose class is in no file of refops/scalings: put it there"
    if isinstance(scaling, str):
        row = row_of(scaling)
        return did_you_mean(scaling, NAMED) if row is None else f": write {as_code(row.scaling)}"
    if isinstance(scaling, type) and scaling in SCALINGS:
        row = next((row for row in NAMED.values() if type(row.scaling) is scaling), None)
        made = f"{scaling.__name__}(...)" if row is None else as_code(row.scaling)
        return f", a class: write settings of it, such as {made}"
    return ""


def as_code(scaling: Any) -> str:
    """The Python expression that makes the settings, fields at their defaults left out: "refops.NVFP4Scaling()"."""
    given = {field.name: getattr(scaling, field.name) for field in fields(scaling) if field.init}
    defaults = {field.name: field.default for field in fields(scaling)}
    shown_fields = [
        f"{name}={f'refops.{value!r}' if isinstance(value, ElementFormat) else repr(value)}"
        for name, value in given.items()
        if value is not defaults[name] and value != defaults[name]
    ]
    return f"refops.{type(scaling).__name__}({', '.join(shown_fields)})"


def row_of(name: str) -> NamedScaling | None:
    """The row that `named` takes a name for; None if there is none."""
    name = name.lower()
    return NAMED.get(SHORT_NAMES.get(name, name))


def named(scaling: Any) -> Any:
    """Return the settings that `scaling` stands for: a name of `NAMED` ("mxfp8", in any case), or settings themselves.

    "nvfp4" is the row of it that has the defaults of its class.

    Raises:
        ValueError: no such name; the message names similar ones. TypeError: neither a name nor a scaling.
    """
    if not isinstance(scaling, str):
        return require_scaling(scaling)
    row = row_of(scaling)
    if row is None:
        hint = did_you_mean(scaling, NAMED)
        raise ValueError(f"scaling must be one of {', '.join(NAMED)}, or settings; got {scaling!r}{hint}")
    return row.scaling
