"""Puzzles: a rule in words and in NumPy, a kernel with a hole, a checker that says which element is wrong, and why.

After GPU-Puzzles (Sasha Rush): one new idea each.

    .venv/bin/python -m cuda_kernels puzzles    in a terminal: writes puzzles.py, then checks it

    from cuda_kernels import puzzles            in a notebook
    verdict = puzzles.check(add_bias)           a kernel by the name that it has in `holes`
    print(verdict)
    puzzles.plot(verdict.accesses)

Kernels run in the simulator, which is chosen when `cuda_kernels` first needs it: import this before any other part of
the package, or set NUMBA_ENABLE_CUDASIM=1. Unlike the rest of the package this part asks `refops` for results: it
judges with them, and computes nothing that a kernel uses.
"""

import os
import sys

if "cuda_kernels.simt" not in sys.modules:
    os.environ.setdefault("NUMBA_ENABLE_CUDASIM", "1")

from cuda_kernels.accesses import draw, plot
from cuda_kernels.puzzles.checker import Verdict, check
from cuda_kernels.puzzles.table import PUZZLES

__all__ = ["PUZZLES", "Verdict", "check", "draw", "plot"]
