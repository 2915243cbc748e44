"""`refops report`: a table for each section, what differs, and the verdict."""

from rich.text import Text

import refops
from refops.display.console import make_table, print_table, stdout_console
from refops.display.survey import print_survey
from refops.report import MISSING, SECTIONS, spaced

#: What the rows of a section of checks are.
SUBJECTS = {
    "activations": "activation",
    "casts": "format",
    "scalings": "scaling",
    "fused": "scaling",
    "helpers": "function",
}
SURVEY_LEGEND = 'higher is better; "-": the scaling does not take that shape; more with: refops inspect FILE'


def print_report(report):
    """Print a `Report`; its last line is the verdict."""
    console = stdout_console()
    console.print(f"refops {refops.__version__}, backend {report.backend}\n")
    for section in report.sections:
        checks = [c for c in report.checks if c.section == section]
        console.print(Text(SECTIONS[section], style="bold"))
        if section == "survey":
            print_survey(console, report.survey)
            console.print(f"{SURVEY_LEGEND if report.survey else 'not found'}\n", style="dim")
        elif section == "vectors":
            _print_vectors(console, checks)
        else:
            _print_checks(console, SUBJECTS[section], checks)
    failures = [c for c in report.checks if c.unexplained]
    if failures:
        console.print(Text("Unexplained differences", style="bold red"))
        for c in failures:
            console.print(f"  {c.section} {c.subject}: {spaced(c.unexplained)} of {spaced(c.values)} elements")
            console.print(f"    against {c.against}\n    first: {c.first}")
        console.print()
    for what in report.missing:
        console.print(f"{what} not found: run from a clone, or pass {MISSING[what]}")
    color = {"PASS": "green", "FAIL": "red"}.get(report.result, "yellow")
    console.print(Text(report.verdict, style=f"bold {color}"), soft_wrap=True)


def _print_vectors(console, checks):
    """One row for each family of files; notes below say who made them and which differences are documented."""
    if not checks:
        console.print("not found\n")
        return
    families = {}
    for c in checks:
        families.setdefault(_family(c), []).append(c)
    makers, divergences = {}, {}
    table = make_table("<vectors", "<made by", "elements", "equal", "<documented", "unexplained")
    for family, group in families.items():
        made_by = {_note(makers, maker) for c in group for maker in c.against.split("; ")}
        reasons = {_note(divergences, c.divergence) for c in group if c.explained}
        explained = sum(c.explained for c in group)
        table.add_row(
            family,
            "".join(f"[{number}]" for number in sorted(made_by)),
            spaced(sum(c.values for c in group)),
            spaced(sum(c.values - c.differing for c in group)),
            f"{spaced(explained)} {''.join(f'({number})' for number in sorted(reasons))}" if explained else "",
            spaced(sum(c.unexplained for c in group)),
        )
    print_table(console, table)
    for maker, number in makers.items():
        console.print(f"  [{number}] {maker}", style="dim")
    for divergence, number in divergences.items():
        console.print(f"  ({number}) {divergence}", style="dim")
    console.print()


def _family(check):
    """The first part of the vector file's name: "mxfp8__te_ref.npz: rowwise codes" -> "mxfp8"."""
    file = check.subject.split(":")[0]
    return file.removesuffix(".npz").split("__")[0]


def _note(notes, text):
    """The number of a note; a new note gets a new number."""
    return notes.setdefault(text, len(notes) + 1)


def _print_checks(console, subjects, checks):
    """What the section checks against, then one row per subject."""
    groups = {}
    for c in checks:
        groups.setdefault(c.subject, []).append(c)
    kinds = {}
    table = make_table(f"<{subjects}", "<against", "comparisons", "values", "unexplained")
    for subject, group in groups.items():
        table.add_row(
            subject,
            "".join(f"[{number}]" for number in sorted({_note(kinds, c.against) for c in group})),
            spaced(sum(c.comparisons for c in group)),
            spaced(sum(c.values for c in group)),
            spaced(sum(c.unexplained for c in group)),
        )
    for kind, number in kinds.items():
        console.print(f"  [{number}] {kind}", style="dim")
    print_table(console, table)
