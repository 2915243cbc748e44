"""Every operation, checked against float64 arithmetic, ml_dtypes and definitions, and against its own parts.

For `refops report`, over synthetic tensors and any real ones handed in. What is checked is a *backend*: a module with
refops' calls, today refops itself. Values are checked against independent statements of what they must be; composed
operations, tiles and directions against separate calls, bit for bit. Every comparison is counted element by element.

Not a test suite: wrong arguments, error messages and statistics are the business of `tests/`. Nor does it compare with
other implementations' arrays; `refops.conformance` does.

    tally.py    counting: a `Task` is run with a `Tally`, and a `Check` comes of it
    inputs.py   the tensors
    settings.py the scalings
    activations.py casts.py scalings.py fused.py helpers.py     the tasks, one file a section of the report
"""

from refops.selfcheck.activations import activation_tasks
from refops.selfcheck.casts import cast_tasks
from refops.selfcheck.fused import fused_tasks
from refops.selfcheck.helpers import helper_tasks
from refops.selfcheck.scalings import scaling_tasks


def all_tasks(ops, real):
    """Return every `Task`, in the order of the report.

    Args:
        ops: the backend.
        real: name -> array of real tensors (`inputs.real_tensors`); may be empty.
    """
    return [
        *activation_tasks(ops, real),
        *cast_tasks(ops),
        *scaling_tasks(ops, real),
        *fused_tasks(ops, real),
        *helper_tasks(ops),
    ]
