"""Entries and intervals as a report shows them: values with their bits."""

import numpy as np

from refops.oracle.tally import bits_of


def shown_entry(entry, slot):
    """One entry of an output, value and bits."""
    if slot.fmt is None:
        bits = bits_of(np.asarray(entry).reshape(1))[0]
        return f"{float(entry):.9g} (0x{int(bits):0{2 * np.asarray(entry).itemsize}x})"
    if slot.packed > 1:
        return f"0x{int(entry):02x}"
    return shown_code(entry, slot.fmt)


def shown_code(code, fmt):
    """One code, hexadecimal and value."""
    value = fmt.values[code] if code < len(fmt.values) else np.nan
    return f"0x{int(code):02x} ({value:.6g})"


def shown_ends(low, high, slot):
    """The range of two entries of an output."""
    return shown_entry(low, slot) if low == high else f"{shown_entry(low, slot)} to {shown_entry(high, slot)}"


def shown_codes(low, high, nan, fmt):
    """The range of two codes, and whether NaN is possible."""
    text = shown_code(low, fmt) if low == high else f"{shown_code(low, fmt)} to {shown_code(high, fmt)}"
    return f"{text} or NaN" if nan and not np.isnan(fmt.values[low]) else text


def shown_interval(low, high):
    """The range of two numbers."""
    return f"{low:.9g}" if low == high else f"{low:.9g} to {high:.9g}"


def shown_range(bounds, index):
    """The interval at an index of `Bounds`."""
    low, high = bounds.lo[index], bounds.hi[index]
    if np.isnan(low):
        return "NaN"
    text = shown_interval(low, high)
    return f"{text} or NaN" if bounds.nan[index] else text
