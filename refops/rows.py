"""Rows declared in the files of a folder, of which `refops.activations` and `refops.scalings` make their tables.

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


def rows_of(module: ModuleType, name: str, kind: type, *, without: tuple[str, ...]) -> tuple[Any, ...]:
    """The rows in the tuple `name` of a module; none in the modules `without` rows.

    Raises:
        TypeError: another module has no such name; the name is not that of a tuple of `kind`.
    """
    if not hasattr(module, name):
        if module.__name__.rpartition(".")[2] in without:
            return ()
        rule = f"must have {name}, a tuple of {kind.__name__}, unless it is {' or '.join(without)}"
        raise TypeError(f"a file of its folder {rule}; got none in {module.__file__}")
    rows = getattr(module, name)
    if isinstance(rows, tuple) and all(isinstance(row, kind) for row in rows):
        return rows
    comma = f", with a comma after one: {name} = (row,)" if isinstance(rows, kind) else ""
    raise TypeError(f"{name} must be a tuple of {kind.__name__}{comma}; got {shown(rows)} in {module.__file__}")
