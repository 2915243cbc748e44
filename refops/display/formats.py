"""`refops formats`: the fields and limits of each number format, and every code of one."""

import math

import numpy as np

from refops.display.console import make_table, print_table, stdout_console
from refops.display.numbers import binary, hexadecimal, power_of_two, significant


def format_as_dict(fmt):
    """Plain data: fields, limits and special codes of a format."""
    finite, floating = fmt.values[np.isfinite(fmt.values)], "exponent" in fmt.fields
    return {
        "name": fmt.name,
        "bits": fmt.bits,
        **{f"{field}_bits": width for field, width in fmt.fields.items()},
        "bias": fmt.bias if floating else None,
        "max": fmt.max,
        "smallest_normal": fmt.smallest_normal if floating else None,
        "smallest_subnormal": fmt.smallest_subnormal if fmt.has_subnormals else None,
        "nan_codes": [f"0x{c:02X}" for c in np.flatnonzero(np.isnan(fmt.values))],
        "inf_codes": [f"0x{c:02X}" for c in np.flatnonzero(np.isinf(fmt.values))],
        "finite_values": len(np.unique(finite + np.float32(0))),  # -0 + 0 = +0: one value
    }


def codes_as_dict(fmt):
    """Plain data: `format_as_dict` and the value of every code."""
    codes = [{"code": code, "value": value, "text": significant(value, 9)} for code, value in enumerate(fmt.values)]
    return {**format_as_dict(fmt), "codes": codes}


def print_formats(formats):
    """Print one row per format."""
    _print_facts(stdout_console(), formats)


def print_codes(fmt):
    """Print a format's row and the value of every code."""
    console = stdout_console()
    _print_facts(console, [fmt])
    console.print()
    if fmt.bits == 8:
        print_table(console, _code_grid(fmt))
        negative = "0x100 - code" if fmt.twos_complement else "| 0x80"
        sign = f", {negative} for the negative value" if fmt.signed else ""
        console.print(f"code = row + column{sign}; values to 4 digits, all with --json", style="dim")
    else:
        print_table(console, _code_list(fmt))


def _print_facts(console, formats):
    table = make_table(
        "<format", "S E M", "bias", "max", "min normal", "min subnormal", "<NaN codes", "<inf codes", "values"
    )
    for fmt in formats:
        facts = format_as_dict(fmt)
        normal, subnormal = facts["smallest_normal"], facts["smallest_subnormal"]
        table.add_row(
            facts["name"],
            " ".join(map(str, fmt.fields.values())),
            "-" if facts["bias"] is None else str(facts["bias"]),
            power_of_two(facts["max"]),
            "-" if normal is None else power_of_two(normal),
            "-" if subnormal is None else power_of_two(subnormal),
            _code_ranges(facts["nan_codes"]),
            _code_ranges(facts["inf_codes"]),
            str(facts["finite_values"]),
        )
    print_table(console, table)
    console.print(
        "S E M: bits of sign, exponent, mantissa (int8: of integer, fraction); values: finite ones, -0 and +0 are one",
        style="dim",
    )


def _code_ranges(codes):
    """Codes with runs of each sign drawn together: 7D-7F FD-FF."""
    runs = []  # [first, last]
    for code in (int(text, 16) for text in codes):
        if runs and code == runs[-1][1] + 1 and code != 0x80:
            runs[-1][1] = code
        else:
            runs.append([code, code])
    texts = [f"{first:02X}" if first == last else f"{first:02X}-{last:02X}" for first, last in runs]
    return " ".join(texts) or "none"


def _code_grid(fmt):
    """The non-negative codes of an 8-bit format, one row per exponent; eight per row if they have no mantissa."""
    width = 1 << fmt.fields.get("mantissa", 0)
    width = 8 if width == 1 else width
    table = make_table("<code", *(f"+{column:X}" for column in range(width)), rule=False)
    for row in range(0, 1 << (fmt.bits - fmt.signed), width):
        values = map(float, fmt.values[row : row + width])
        table.add_row(f"0x{row:02X}", *(power_of_two(v, 4) if math.isfinite(v) else str(v) for v in values))
    return table


def _code_list(fmt):
    """All codes of a narrow format, each beside its negative."""
    table = make_table("<code", "<binary", "value", "<code", "<binary", "value")
    half = 1 << (fmt.bits - 1)
    for positive in range(half):
        cells = []
        for code in (positive, positive + half):
            cells += [hexadecimal(code, fmt), binary(code, fmt), f"{fmt.values[code]:g}"]
        table.add_row(*cells)
    return table
