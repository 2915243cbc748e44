"""Functions of declarations as device functions; if a compiler refuses one, the error says whose it is.

Formulas and scale rules are written in a vocabulary, and only a compiler notices when one of them leaves it: NumPy, the
simulator among them, runs all of NumPy. Numba's own message is long, and about whatever was compiled around it.
"""

from contextlib import contextmanager
from pathlib import Path
from types import FunctionType

from cuda_kernels.errors import NoKernelsError
from cuda_kernels.simt import device


def device_of(owner, vocabulary, function):
    """Return `simt.device` of a function of a declaration.

    Args:
        owner: what declares it, as an error names it. vocabulary: the file that says what it may use.
    """
    function.declaration, function.called_with = (owner, vocabulary), []
    return device(function, function.called_with)


@contextmanager
def explain_declared(function):
    """Turn a compiler's error about `function` into a `NoKernelsError`, if a declared function in it is the cause."""
    try:
        yield
    except Exception as error:  # Numba and numba-cuda have classes of their own
        for inner in _inside(function, {}):
            if hasattr(inner, "declaration") and _refused(inner):
                raise NoKernelsError(_sentence(inner)) from error
        raise


def _sentence(function):
    (owner, vocabulary), code = function.declaration, function.__code__
    place = f"{Path(code.co_filename).name}, line {code.co_firstlineno}"
    return (
        f"{owner} cannot be compiled: its function {code.co_name} ({place}) may use only the words of {vocabulary}, "
        "operators and float32 or uint32 constants"
    )


def _inside(value, seen):
    """The functions in a function, those that it calls before itself."""
    value = getattr(value, "py_func", value)  # of a function that Numba compiled already
    if isinstance(value, tuple):
        for part in value:
            yield from _inside(part, seen)
    elif isinstance(value, FunctionType) and value not in seen:
        seen[value] = None
        for cell in value.__closure__ or ():
            yield from _inside(cell.cell_contents, seen)
        yield value


def _refused(function):
    """Whether it does not compile by itself, for types that it was called with."""
    import numba

    for types in function.called_with:
        try:
            numba.njit(error_model="numpy")(function).compile(tuple(types))
        except Exception:  # as above
            return True
    return False
