"""Prints the table of what was proved."""


def pytest_terminal_summary(terminalreporter):
    rows = [
        value
        for report in terminalreporter.getreports("passed")
        for name, value in getattr(report, "user_properties", ())
        if name == "proof" and report.when == "call"
    ]
    if not rows:
        return
    from rich.console import Console
    from rich.table import Table
    from solvers import versions

    table = Table(title=f"Proved by {versions()}", title_justify="left")
    for column, options in {
        "claim": {},
        "domain": {},
        "queries": {"justify": "right"},
        "z3, s": {"justify": "right"},
        "bitwuzla, s": {"justify": "right"},
        "counterexample of a wrong constant": {"overflow": "fold"},
    }.items():
        table.add_column(column, **options)
    for row in rows:
        table.add_row(*map(str, row))
    Console(width=200).print(table)
