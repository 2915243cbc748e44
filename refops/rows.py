"""Rows declared in the files of a folder: what `refops.activations` and `refops.scalings` make their tables of.

A file that declares them wrongly stops the import with an error that names it.
"""

from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from refops.arguments import shown


def modules_of(package: str, path: Any) -> list[ModuleType]:
    """The modules of a package, in the order of their names."""
    return [import_module(f"{package}.{found.name}") for found in iter_modules(path)]


def require_rows(module: ModuleType, name: str, kind: type, *, none: tuple[str, ...]) -> None:
    """Raise TypeError unless a module has the tuple `name`, or is one of those in the folder that declare none."""
    if not hasattr(module, name) and module.__name__.rpartition(".")[2] not in none:
        rule = f"must have {name}, a tuple of {kind.__name__}, unless it is {' or '.join(none)}"
        raise TypeError(f"a file of its folder {rule}; got none in {module.__file__}")


def rows_of(module: ModuleType, name: str, kind: type) -> tuple[Any, ...]:
    """The rows in the tuple `name` of a module; none where it has no such name.

    Raises:
        TypeError: anything but a tuple of `kind`.
    """
    rows = getattr(module, name, ())
    if isinstance(rows, tuple) and all(isinstance(row, kind) for row in rows):
        return rows
    comma = f", with a comma after one: {name} = (row,)" if isinstance(rows, kind) else ""
    raise TypeError(f"{name} must be a tuple of {kind.__name__}{comma}; got {shown(rows)} in {module.__file__}")
