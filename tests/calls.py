"""The calls that the three packages make while a function runs."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = tuple(f"{ROOT}/{name}/" for name in ("refops", "cuda_kernels", "fuser"))
COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>"}  # calls of their own before Python 3.12


def calls_of(run):
    """(what `run()` returns, the calls in their order).

    A call is (file, Python function that the packages define, None), or (file, function that calls, C function).
    """
    calls = []

    def note(frame, event, argument):
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGES):
            return
        file = Path(code.co_filename).relative_to(ROOT).as_posix()
        if event == "c_call":
            calls.append((file, code.co_name, argument.__name__))
        elif event == "call" and code.co_name not in COMPREHENSIONS:
            calls.append((file, code.co_name, None))

    sys.setprofile(note)
    try:
        result = run()
    finally:
        sys.setprofile(None)
    return result, calls
