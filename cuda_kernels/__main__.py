"""`python -m cuda_kernels report`: every kernel compiled without a GPU, see `compile_report`."""

import sys

from cuda_kernels import compile_report

USAGE = "usage: python -m cuda_kernels report [--kernel PATTERN] [--target sm_90] [--fast-math] [--json]"

if __name__ == "__main__":
    if sys.argv[1:2] != ["report"]:
        print(USAGE, file=sys.stderr)
        sys.exit(0 if sys.argv[1:2] in (["-h"], ["--help"]) else 2)
    sys.exit(compile_report.main(sys.argv[2:]))
