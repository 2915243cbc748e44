"""`python -m cuda_kernels report`, `profile` and `puzzles`: see `compile_report`, `emulator.profile` and `puzzles`."""

import argparse
import os
import sys

USAGE = """python -m cuda_kernels report [--kernel PATTERN] [--target sm_90] [--fast-math] [--json]
       python -m cuda_kernels profile --op NAME [--scaling NAME] [--target sm_90] [--shape MxK] [--columnwise] [--json]
       python -m cuda_kernels puzzles [FILE] [--only N] [--solutions]"""


def main(arguments):
    """Run a command; return the exit code."""
    try:
        code = run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader has seen enough: `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered goes nowhere
        return 1


def run(arguments):
    """Choose the command; SystemExit without one of the three."""
    parser = argparse.ArgumentParser(prog="python -m cuda_kernels", usage=USAGE)
    parser.add_argument("command", choices=("report", "profile", "puzzles"), help="COMMAND --help says more")
    command = parser.parse_args(arguments[:1]).command
    if command == "report":
        from cuda_kernels import compile_report

        return compile_report.main(arguments[1:])
    if command == "profile":
        from cuda_kernels.emulator import profile

        return profile.main(arguments[1:])
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # decided when the kernels' vocabulary is imported
    from cuda_kernels.puzzles.command import main as puzzles

    return puzzles(arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
