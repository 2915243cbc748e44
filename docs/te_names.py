"""The names of TransformerEngine 2.20 for PyTorch, and which of them `fuser.compat` offers.

`te_names.json` has the names that TE's modules define, or import for their users; modules that have nothing to
do with this package are left out. Importing the names shows which of them work.
"""

import importlib
import json
import warnings
from pathlib import Path

import fuser.compat

NAMES = json.loads(Path(__file__).with_name("te_names.json").read_text(encoding="utf-8"))
#: Above this count a list is shortened to "all others".
MOST_LISTED = 12


def found():
    """module -> (names that work, {reason: names, or modules, that are refused for it})."""
    fuser.compat.install()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of te.fp8
            return {module: status(module, names) for module, names in NAMES.items()}
    finally:
        fuser.compat.uninstall()


def status(module, names):
    """`found` for one module. A module that can't be imported, or of which nothing works, is refused itself."""
    try:
        offered = importlib.import_module(module)
    except ImportError:
        return [], {fuser.compat.reason(module): [module]}
    works = [name for name in names if hasattr(offered, name)]
    if names and not works:
        return [], {fuser.compat.reason(module): [module]}
    refused = {}
    for name in names:
        if name not in works:
            refused.setdefault(fuser.compat.reason(f"{module}.{name}"), []).append(name)
    return works, refused


def table():
    """Modules in which all names work; for the others what works, what is refused and why; modules that are refused."""
    modules = found()
    everything, rows, outside = {}, ["| module | works | refused: why |", "|---|---|---|"], {}
    for module, (works, refused) in modules.items():
        if works and refused:
            few = sum(map(len, refused.values())) <= MOST_LISTED
            reasons = [f"{code(names) if few else 'all others'}: {why}" for why, names in refused.items()]
            left = "all others" if few and len(works) > MOST_LISTED else code(works)
            rows.append(f"| {code([module])} | {left} | {'; '.join(reasons)} |")
        elif works:
            package, _, name = module.rpartition(".")
            everything.setdefault(package, []).append(name)
        else:
            for why, names in refused.items():
                outside.setdefault(why, []).extend(names)
    rows += [f"| {code(names)} | | all: {why} |" for why, names in outside.items()]
    packages = [f"- in {code([package])}: {code(names)}" for package, names in everything.items()]
    heading = "`te` is `transformer_engine.pytorch`. In these modules all names work:"
    return "\n".join([heading, "", *packages, "", "The others:", "", *rows])


def code(names):
    """Names as code, separated by commas."""
    return ", ".join(f"`{name.replace('transformer_engine.pytorch', 'te')}`" for name in names)
