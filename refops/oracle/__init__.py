"""The oracle: judge what a kernel wrote, without false alarms, and name what went wrong.

    dump = {"codes": codes, "scales": scales}
    report = refops.oracle.check("swiglu", x, dump, scaling="mxfp8")
    print(report)                  # the verdict, the first and the worst wrong entries, where they are, and why
    report.raise_for_mismatch()    # in a test

`refops.oracle.acceptable("silu", x)` gives the interval that each element may lie in.

How a result is judged is derived in `refops.oracle.enclosure`; README.md beside this file shows how to dump from CUDA
C++, Triton and Rust.
"""

from refops.oracle.coverage import Coverage
from refops.oracle.grouped import ExpertReport, GroupedReport
from refops.oracle.operation import OPERATIONS
from refops.oracle.places import Lines, Place
from refops.oracle.products import ProductReport
from refops.oracle.report import ArrayVerdict, Explanation, Mismatch, MismatchError, Report
from refops.oracle.verdict import Acceptable, acceptable, check

__all__ = [
    "OPERATIONS",
    "Acceptable",
    "ArrayVerdict",
    "Coverage",
    "ExpertReport",
    "Explanation",
    "GroupedReport",
    "Lines",
    "Mismatch",
    "MismatchError",
    "Place",
    "ProductReport",
    "Report",
    "acceptable",
    "check",
]
