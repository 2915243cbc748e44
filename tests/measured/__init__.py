"""Measured bounds that tests assert. A command writes them: nothing here is typed by hand."""

import json
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
#: What to run after an activation was added, or changed on purpose.
COMMAND = "python tests/measured/measure_activations.py NAME ..., or `make tables` for all"


@cache
def activations(kind):
    """Name -> what was measured.

    Of functions, "FUNCTION.value" and "FUNCTION.slope": "largest_error" and "misrounded" (bfloat16, float16),
    "instructions". Of activations: "interval_widths" (value, gradient).
    """
    return json.loads((FOLDER / "activations.json").read_text(encoding="utf-8"))[kind]
