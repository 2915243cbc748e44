"""`refops inspect`: what each scaling does to each tensor of a file."""

import csv
from collections import Counter
from dataclasses import asdict, fields

from rich.text import Text

from refops.arguments import dimensions
from refops.display.console import let_first_column_wrap, make_table, print_table, printable
from refops.display.numbers import decibels, percent, significant, sqnr
from refops.display.survey import print_survey
from refops.replacing import replacing
from refops.survey import Measurement, TensorFacts, lowest_sqnr, spread

SQNR_LEGEND = """\
SQNR       10 log10(sum x^2 / sum (x - xhat)^2), xhat the dequantized tensor
  exact    every finite element came back as it was
  -inf     a finite element came back infinite or NaN; with NVFP4 this happens
           when the tensor holds inf, or its amax is above 7.6e35"""
CAST_LEGEND = """\
Measured is the cast of the rowwise copy (nvfp4-rht: of the columnwise one),
which MXFP8 takes of any shape. A linear layer also needs the other copy: under
MXFP8, both dimensions of its weight must be multiples of 32, in TE as in fuser.
Only finite elements count. About the scalings: refops inspect --help"""
SUMMARY_LEGEND = f"""\
{SQNR_LEGEND}
  -        the scaling does not take that shape, or no element is finite
{CAST_LEGEND}"""
LEGEND = f"""\
{SQNR_LEGEND}
flushed    share of the non-zero elements that came back as zero
saturated  share cut off by the format's range, over half a step beyond its end
worst err  largest |x - xhat| / |x| of the elements that were not flushed
bits       per element as stored: data, unpadded scales, float32 amax or scale
{CAST_LEGEND}"""
#: Columns that a tensor's name gets at least in a line of many tensors, and those that may have an SQNR each.
NAME_COLUMNS, MOST_SCALINGS_ACROSS = 44, 4


def inspection_as_dict(file, inspected, skipped):
    """Plain data: everything that was measured.

    Args:
        file: its path.
        inspected: list of (tensor name, how it was read or "", `TensorFacts`, list of `Measurement`).
        skipped: list of (tensor name, why refops does not quantize it).
    """
    return {
        "file": file,
        "tensors": [
            {"tensor": name, "note": note, **asdict(facts), "scalings": [m.as_dict() for m in measurements]}
            for name, note, facts, measurements in inspected
        ],
        "skipped": [{"tensor": name, "reason": reason} for name, reason in skipped],
    }


def print_tensor(console, name, note, facts, measurements):
    """Print the table of one tensor; arguments as in `inspection_as_dict`."""
    console.print(Text(printable(name), style="bold"))
    line = f"{facts.dtype} {dimensions(facts.shape)}"
    line += f", magnitudes {significant(facts.smallest)} to {significant(facts.amax)}"
    line += f", {percent(facts.zeros / facts.elements)} % zeros, {facts.non_finite} non-finite"
    console.print(line + (f"; {note}" if note else ""))
    table = make_table("<scaling", "SQNR dB", "flushed %", "saturated %", "worst err", "bits")
    for m in measurements:
        if not m.reason:
            table.add_row(
                m.scaling,
                decibels(m),
                percent(m.flushed),
                percent(m.saturated),
                significant(m.worst_relative_error),
                f"{m.bits_per_element:.3f}",
            )
    if table.rows:
        print_table(console, table)
    _print_reasons(console, measurements)


def print_summary(console, inspected):
    """Print the SQNR of some tensors."""
    print_survey(
        console,
        [(f"{name} ({note})" if note else name, facts, measurements) for name, note, facts, measurements in inspected],
    )
    _print_reasons(console, [m for *_, measurements in inspected for m in measurements])


def _print_reasons(console, measurements):
    """Why scalings do not apply."""
    reasons = {}  # reason -> names of the scalings, each once
    for m in measurements:
        if m.reason:
            reasons.setdefault(m.reason, {})[m.scaling] = None
    for reason, names in reasons.items():
        console.print(f"{reason}: {', '.join(names)}\n")


def print_skipped(console, skipped):
    """Print what was not measured and why: tensors of one reason in one line."""
    names_of = {}
    for name, reason in skipped:
        names_of.setdefault(reason, []).append(printable(name))
    for reason, names in names_of.items():
        more = f", {names[1]} and {len(names) - 2} more" if len(names) > 2 else "".join(f", {n}" for n in names[1:])
        console.print(f"skipped {names[0]}{more}: {reason}")
    if skipped:
        console.print()


# --- many tensors -----------------------------------------------------------------------------------------------------


def worst_first(inspected):
    """The tensors of an inspection by their lowest SQNR, those without one at the end."""

    def rank(one):
        lowest = lowest_sqnr(one[-1])
        return (1, 0.0) if lowest is None else (0, lowest.sqnr_db)

    return sorted(inspected, key=rank)


def holds(inspected, skipped):
    """What a file holds, lines such as "150 bfloat16": tensors of each dtype, or of the codes that they were."""
    counts = Counter(f"{facts.dtype}{note and f': {note}'}" for _, note, facts, _ in inspected)
    lines = [f"{count} {what}" for what, count in counts.most_common()]
    return lines + [f"{len(skipped)} not measured"] * bool(skipped)


def print_lines(console, inspected, skipped, most=None):
    """Print one line per tensor, the worst first, and a summary of all of them under each scaling.

    Args:
        inspected, skipped: as in `inspection_as_dict`.
        most: how many tensors to show; all without.
    """
    ordered = worst_first(inspected)
    shown = ordered[:most]
    console.print(f"{len(inspected) + len(skipped)} tensors")
    for line in holds(inspected, skipped):
        console.print(f"  {printable(line)}")
    console.print()
    names = [m.scaling for m in inspected[0][-1]] if inspected else []
    if not names:
        return
    across = names if len(names) <= MOST_SCALINGS_ACROSS else []
    columns = across or ["minimum", "<under", "median", "maximum", "<under "]
    table = make_table("<tensor", "<dtype", "<shape", "amax", *columns)
    for name, _, facts, measurements in shown:
        what = printable(name), facts.dtype, dimensions(facts.shape), significant(facts.amax)
        sqnrs = [decibels(m) for m in measurements] if across else _ends(measurements)
        table.add_row(*what, *sqnrs)
    let_first_column_wrap(console, table, NAME_COLUMNS)
    print_table(console, table)
    if len(shown) < len(ordered):
        console.print(f"{len(ordered) - len(shown)} tensors with a higher SQNR are not shown\n")
    _print_reasons(console, [m for *_, measurements in shown for m in measurements])
    print_spreads(console, inspected)


def _ends(measurements):
    """Lowest SQNR, its scaling, median, highest SQNR and its scaling."""
    given = sorted((m for m in measurements if m.sqnr_db is not None), key=lambda m: m.sqnr_db)
    if not given:
        return ["-", "", "-", "-", ""]
    low, middle, high = spread(m.sqnr_db for m in given)
    return [sqnr(low), given[0].scaling, sqnr(middle), sqnr(high), given[-1].scaling]


def spreads(inspected):
    """Yield (scaling, (minimum, median, maximum) of SQNR over the tensors or None, name of the worst tensor or "")."""
    for of_tensors in zip(*(measurements for *_, measurements in inspected), strict=True):
        found = spread(m.sqnr_db for m in of_tensors)
        worst = next(
            (one[0] for one, m in zip(inspected, of_tensors, strict=True) if found and m.sqnr_db == found[0]), ""
        )
        yield of_tensors[0].scaling, found, worst


def print_spreads(console, inspected):
    """Print the lowest, median and highest SQNR of each scaling over all tensors."""
    table = make_table("<scaling", "minimum", "median", "maximum", "<worst tensor")
    for scaling, found, worst in spreads(inspected):
        table.add_row(scaling, *map(sqnr, found or [None] * 3), printable(worst))
    print_table(console, table)


# --- files ------------------------------------------------------------------------------------------------------------


def write_csv(path, file, inspected, skipped):
    """Write a row for each tensor and scaling, the worst tensors first: the fields of `TensorFacts` and `Measurement`.

    Infinities are inf and -inf, what is not there is empty. Arguments as in `inspection_as_dict`.

    Raises:
        OSError: the file cannot be written.
    """
    of_tensor = [field.name for field in fields(TensorFacts)]
    of_scaling = [field.name for field in fields(Measurement)]
    with replacing(path) as new, open(new, "w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, ["tensor", "note", *of_tensor, *of_scaling])
        writer.writeheader()
        for name, note, facts, measurements in worst_first(inspected):
            row = {"tensor": name, "note": note, **asdict(facts), "shape": dimensions(facts.shape)}
            writer.writerows({**row, **asdict(m)} for m in measurements)
        writer.writerows({"tensor": name, "reason": reason} for name, reason in skipped)
