"""A worker process: runs cases that it reads as JSON lines, and says when each begins and how it ended.

The parent (`pool.py`) watches the clock and the process. Standard output and error of the cases go to a log, so that
nothing a case prints is taken for an answer. Address space is limited to what the imports took and a margin.
"""

import faulthandler
import importlib
import json
import os
import resource
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent), str(HERE.parent)]

#: Bytes that a case may map beyond what the imports took.
MARGIN = 3 << 30


def address_space():
    """Bytes of virtual memory of this process; None where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def limit_memory():
    """Let an allocation beyond the margin fail in this process alone."""
    used = address_space()
    if used is not None:
        resource.setrlimit(resource.RLIMIT_AS, (used + MARGIN, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main():
    """Serve cases until the input ends."""
    folder, modules = Path(sys.argv[1]), sys.argv[2].split(",")
    answers = os.fdopen(int(sys.argv[3]), "w", buffering=1)
    faulthandler.enable()
    import harness

    for module in modules:
        importlib.import_module(module)
    prepared = set()
    for line in sys.stdin:
        order = json.loads(line)
        target = harness.TARGETS[order["target"]]
        for needed in target.needs:
            if needed not in prepared:
                resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                importlib.import_module(needed)
                prepared.add(needed)
        limit_memory()
        for number in order["numbers"]:
            answers.write(json.dumps({"begins": number}) + "\n")
            case = harness.Case(target.name, order["seed"], number, folder / f"{target.name}-{number}")
            outcome, text = case.run(target.run)
            calls = [[*key, count] for key, count in case.calls.items()]
            answers.write(json.dumps({"ends": number, "outcome": outcome, "text": text, "calls": calls}) + "\n")
        answers.write(json.dumps({"done": True}) + "\n")


if __name__ == "__main__":
    main()
