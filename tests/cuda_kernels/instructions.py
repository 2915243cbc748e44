"""PTX of the formulas of activations, and the float32 instructions in it."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

#: What has no float32 arithmetic of its own in PTX.
MOVES = ("ld", "st", "mov")


def ptx_of_formulas(names=()):
    """{"accurate", "fast" or "elementary": {name: PTX}} of the activations called `names`, or of all."""
    run = subprocess.run(
        [sys.executable, Path(__file__).parent / "formulas_to_ptx.py", *names],
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "0", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def float_instructions(ptx):
    """Counter of the float32 instructions, without their type; comparisons of every kind are one."""
    found = re.findall(r"^\s*(?:@!?%p\d+\s+)?([a-z]\w*(?:\.[a-z]\w*)*?)(?:\.f32)+\s", ptx, re.MULTILINE)
    return Counter("setp" if name.startswith("setp") else name for name in found if not name.startswith(MOVES))
