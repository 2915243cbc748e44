"""What differs in a golden file that was changed after it was written.

The digest is one for the whole file and cannot say it. But the header says what made the file, and the same arguments
give the same bytes: the file is made once more and compared.
"""

import math

import numpy as np

import refops
from refops.golden.dump import build_golden
from refops.golden.header import as_layout, digest, params_from_header, reads_columnwise, settings_from_dict
from refops.golden.matrix import Recipe

#: A header that was changed may ask for a larger tensor than the file has; it is not made.
MOST_GROWTH = 8
#: Inputs that differ in a larger share of their bytes are other inputs.
FEW = 0.1


def what_differs(header, arrays):
    """Say in one line what has changed in a golden file since it was written.

    Args:
        header, arrays: of a file whose digest does not match them.

    Returns:
        The first array that differs, with its first byte; or the part of the header; or that it cannot be told.
    """
    try:
        _require_size(header, arrays)
        made = build_golden(_recipe_of(header))
    except Exception as error:  # whatever a changed header may cause
        return f"its header is not what it was, {' '.join(str(error).split())}"
    as_made = as_layout(made.header, header["layout"]) | {"refops": header["refops"]}
    same_version = digest(as_made, made.arrays) == header.get("digest")
    missing = sorted(set(made.arrays) ^ set(arrays))
    if missing:
        return f"the header asks for other arrays than the file has, {missing[0]} is one"
    differing = [name for name in made.arrays if _bytes_of(made.arrays[name]) != _bytes_of(arrays[name])]
    fields = _fields_that_differ(as_made, header)
    if not differing:
        return f"{fields[0]} of its header differs" if fields else "all arrays are right, the digest itself differs"
    if same_version:
        return _first_byte(differing, made.arrays, arrays)
    if fields or _inputs_are_others(made.arrays, arrays):
        return "its header is not what it was, for it asks for other arrays"
    return _first_byte(differing, made.arrays, arrays) + _doubt(header)


def _recipe_of(header):
    """The `Recipe` that a header describes."""
    return Recipe(
        header["operation"],
        settings_from_dict(header["scaling"]),
        tuple(header["shape"]),
        header["dtype"],
        header["seed"],
        header["inputs"],
        params_from_header(header),
        reads_columnwise(header),
        header.get("swizzled_scales", False),
    )


def _require_size(header, arrays):
    largest = max((array.size for array in arrays.values()), default=0)
    if math.prod(header["shape"]) > MOST_GROWTH * max(largest, 1):
        raise ValueError(f"shape {header['shape']} is not that of its arrays")


def _fields_that_differ(made, header):
    """Keys of two headers, the digest left out, whose values differ."""
    keys = sorted((made.keys() | header.keys()) - {"digest"})
    return [key for key in keys if made.get(key) != header.get(key)]


def _bytes_of(array):
    return np.ascontiguousarray(array).tobytes()


def _inputs_are_others(made, arrays):
    """Whether all inputs differ in more than a few bytes: then they come from another seed and are not damaged."""
    pairs = [(_bytes_of(a), _bytes_of(arrays[name])) for name, a in made.items() if name.startswith("input.")]
    return all(
        len(a) != len(b) or np.mean(np.frombuffer(a, np.uint8) != np.frombuffer(b, np.uint8)) > FEW for a, b in pairs
    )


def _first_byte(differing, made, arrays):
    """The first byte of the first array that differs, in words."""
    name = differing[0]
    expected, found = (np.frombuffer(_bytes_of(of[name]), np.uint8) for of in (made, arrays))
    more = f", and {len(differing) - 1} more arrays" if len(differing) > 1 else ""
    if expected.size != found.size:
        return f"{name} has {found.size:,} bytes, expected {expected.size:,}{more}"
    at = np.flatnonzero(expected != found)
    return (
        f"{name} differs in {at.size:,} of {found.size:,} bytes, first at byte {at[0]} "
        f"(expected 0x{expected[at[0]]:02x}, found 0x{found[at[0]]:02x}){more}"
    )


def _doubt(header):
    """What to say if the file made anew has another digest: the arrays may not be at fault."""
    if header["refops"] == refops.__version__:
        return "; or its header is not what it was"
    return f"; compared with refops {refops.__version__}, which writes another digest than {header['refops']} wrote"
