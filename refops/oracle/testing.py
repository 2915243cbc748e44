"""One assertion for tests: the outputs are right, or the test fails with the whole report. Needs no test framework."""

from refops.oracle.verdict import check


def assert_matches(op, inputs, outputs, **options):
    """Judge outputs as `refops.oracle.check` does and raise MismatchError (an AssertionError) with the report if wrong.

    Args:
        op, inputs, outputs, **options: as for `refops.oracle.check`.

    Returns:
        The `Report`, for what a test wants to see besides (`notes`, counts).

    Raises:
        MismatchError: something is wrong; its text is the report. What `check` raises for bad use.
    """
    __tracebackhide__ = True  # pytest ends its traceback at the caller
    report = check(op, inputs, outputs, **options)
    report.raise_for_mismatch()
    return report
