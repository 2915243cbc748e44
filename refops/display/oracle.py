"""`refops check` and `refops golden`: the verdict, and what was written."""

from refops.arguments import dimensions
from refops.display.console import make_table, print_table, printable, stdout_console


def print_check(report):
    """Print a `refops.oracle.Report`; its own text is made for a terminal of 120 columns and for logs alike."""
    for line in str(report).split("\n"):
        print(printable(line))


def print_launch(described, changed):
    """Print what a kernel did while it ran, and which inputs it changed."""
    print(printable(described))
    if changed:
        print(f"note: the kernel changed its input {', '.join(changed)}")


def print_fault(fault):
    """Print what a kernel did wrong while it ran."""
    print(printable(f"WRONG: the kernel failed: {fault}"))


def print_golden(path, golden):
    """Print where a golden file is and what it holds."""
    console = stdout_console()
    console.print(printable(str(path)), soft_wrap=True)
    console.print()
    table = make_table("<array", "<dtype", "shape", "<what it is")
    for name, array in golden.header["arrays"].items():
        table.add_row(name, array["dtype"], dimensions(array["shape"]), array["description"])
    print_table(console, table)


def print_golden_matrix(directory, written):
    """Print how much was written to a directory of golden files."""
    size = sum(entry["bytes"] for entry in written.values())
    print(
        f"{len(written):,} files, {size / 1e6:.0f} MB, in {printable(str(directory))}; manifest.json has their SHA-256"
    )


def written_as_dict(directory, written):
    """Plain data: the directory and each file with its SHA-256 and size."""
    return {
        "directory": str(directory),
        "files": [{"file": name, **entry} for name, entry in sorted(written.items())],
    }
