"""`python -m cuda_kernels report`, `profile` and `puzzles`: see `compile_report`, `emulator.profile` and `puzzles`."""

import os
import sys

USAGE = """usage: python -m cuda_kernels report [--kernel PATTERN] [--target sm_90] [--fast-math] [--json]
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
    """Choose the command."""
    if arguments[:1] == ["report"]:
        from cuda_kernels import compile_report

        return compile_report.main(arguments[1:])
    if arguments[:1] == ["profile"]:
        from cuda_kernels.emulator import profile

        return profile.main(arguments[1:])
    if arguments[:1] == ["puzzles"]:
        os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # decided when the kernels' vocabulary is imported
        from cuda_kernels.puzzles import command

        return command.main(arguments[1:])
    print(USAGE, file=sys.stderr)
    return 0 if arguments in (["-h"], ["--help"]) else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
