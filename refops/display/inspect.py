"""`refops inspect`: what each scaling does to each tensor of a file."""

from dataclasses import asdict

from rich.text import Text

from refops.display.console import make_table, print_table, printable, stdout_console
from refops.display.numbers import decibels, dimensions, percent, significant

LEGEND = """\
SQNR       10 log10(sum x^2 / sum (x - xhat)^2), xhat the dequantized tensor
flushed    share of the non-zero elements that came back as zero
saturated  share cut off by the format's range, over half a step beyond its end
worst err  largest |x - xhat| / |x| of the elements that were not flushed
bits       per element as stored: data, unpadded scales, float32 amax or scale
Only finite elements count. About the scalings: refops inspect --help"""


def inspection_as_dict(file, inspected, skipped):
    """Plain data of what `print_inspection` prints."""
    return {
        "file": file,
        "tensors": [
            {"tensor": name, "note": note, **asdict(facts), "scalings": [m.as_dict() for m in measurements]}
            for name, note, facts, measurements in inspected
        ],
        "skipped": [{"tensor": name, "reason": reason} for name, reason in skipped],
    }


def print_inspection(inspected, skipped, drawn_in=None):
    """Print a table for each tensor.

    Args:
        inspected: list of (tensor name, how it was read or "", `TensorFacts`, list of `Measurement`).
        skipped: list of (tensor name, why refops does not quantize it).
        drawn_in: file that the picture is in, if one was drawn.
    """
    console = stdout_console()
    for tensor in inspected:
        _print_tensor(console, *tensor)
    for name, reason in skipped:
        console.print(f"skipped {printable(name)}: {reason}")
    if not (inspected or skipped):
        console.print("the file holds no tensors")
    if inspected:
        console.print(("\n" if skipped else "") + LEGEND, style="dim")
    if drawn_in is not None:
        console.print(f"\ndrawn in {printable(drawn_in)}")


def _print_tensor(console, name, note, facts, measurements):
    console.print(Text(printable(name), style="bold"))
    line = f"{facts.dtype} {dimensions(facts.shape)}"
    line += f", magnitudes {significant(facts.smallest)} to {significant(facts.amax)}"
    line += f", {percent(facts.zeros / facts.elements)} % zeros, {facts.non_finite} non-finite"
    console.print(line + (f"; {note}" if note else ""))
    table = make_table("<scaling", "SQNR dB", "flushed %", "saturated %", "worst err", "bits")
    reasons = {}  # why a scaling does not apply -> names of the scalings
    for m in measurements:
        if m.reason:
            reasons.setdefault(m.reason, []).append(m.scaling)
            continue
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
    for reason, names in reasons.items():
        console.print(f"{reason}: {', '.join(names)}\n")
