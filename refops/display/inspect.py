"""`refops inspect`: what each scaling does to each tensor of a file."""

from dataclasses import asdict

from rich.text import Text

from refops.display.console import make_table, print_table, printable
from refops.display.numbers import decibels, dimensions, percent, significant
from refops.display.survey import print_survey

SQNR_LEGEND = """\
SQNR       10 log10(sum x^2 / sum (x - xhat)^2), xhat the dequantized tensor
  exact    every finite element came back as it was
  -inf     a finite element came back infinite or NaN; with NVFP4 this happens
           when the tensor holds inf, or its amax is above 7.6e35"""
SUMMARY_LEGEND = f"""\
{SQNR_LEGEND}
  -        the scaling does not take that shape, or no element is finite
Only finite elements count. About the scalings: refops inspect --help"""
LEGEND = f"""\
{SQNR_LEGEND}
flushed    share of the non-zero elements that came back as zero
saturated  share cut off by the format's range, over half a step beyond its end
worst err  largest |x - xhat| / |x| of the elements that were not flushed
bits       per element as stored: data, unpadded scales, float32 amax or scale
Only finite elements count. About the scalings: refops inspect --help"""


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
    """Print what was not measured and why."""
    for name, reason in skipped:
        console.print(f"skipped {printable(name)}: {reason}")
    if skipped:
        console.print()
