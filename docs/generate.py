"""Generated parts of the READMEs and of the guide: tables of what the code does and of what was measured.

    python docs/generate.py            # exit code 1 where a document is not up to date
    python docs/generate.py --write    # brings the documents up to date

A part stands between `<!-- generated: NAME -->` and `<!-- end -->` and is replaced as a whole. Tables are made from the
code or from committed measurements; the programs that measure are named beside the tables.
"""

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), *(str(ROOT / folder) for folder in ("docs", "tests", "tests/benchmarks"))]

import capabilities  # noqa: E402
import orders  # noqa: E402
import tables  # noqa: E402
import te_names  # noqa: E402

from peers import conformance  # noqa: E402
from refops import ACTIVATIONS, DEFAULT_PARAMETERS  # noqa: E402

#: Operations that have another name in TE.
SCALED_OPERATIONS = {"clamped_swiglu": "ScaledClampedQGeGLU"}
REGION = re.compile(r"(<!-- generated: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def what_is_covered():
    """Operations x scalings x backends, as `docs/capabilities.py --write` found them."""
    return capabilities.table(json.loads(capabilities.RESULTS.read_text()))


def what_is_covered_in_short():
    """The same, a row for all scalings with the same cells."""
    return capabilities.table_in_short(json.loads(capabilities.RESULTS.read_text()))


def activations():
    """Names, formulas and defaults."""
    rows = [f"| `{name}` | {row.formula} |" for name, row in ACTIVATIONS.items()]
    defaults = ", ".join(f"{name} {default:g}" for name, default in DEFAULT_PARAMETERS.items())
    return "\n".join(["| name | formula |", "|---|---|", *rows, "", f"Parameters default to TE's: {defaults}."])


def activation_operations():
    """Names of each activation in the operations, in `fuser.functional` and in TE's JAX interface."""
    rows = []
    for name, row in ACTIVATIONS.items():
        scaled = SCALED_OPERATIONS.get(name, f"Scaled{row.op}") if row.row_scaled else ""
        jax = "" if row.jax is None else f"`({', '.join(map(repr, row.jax))}{',' * (len(row.jax) == 1)})`"
        rows.append(f"| `{row.op}` | {scaled and f'`{scaled}`'} | `{name}` | {jax} |")
    head = ["| operation | with a scale for each row | `fuser.functional` | JAX |", "|---|---|---|---|"]
    return "\n".join([*head, *rows])


def measured(pattern):
    """The newest committed measurement whose path under tests/ matches."""
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "tests").glob(pattern))]
    if not documents:
        raise ValueError(f"there is no tests/{pattern}; `make bench` and `make conformance` write them")
    return max(documents, key=lambda document: document["date"])


def speed():
    """The host kernels beside the best peer and a copy, as `make bench` measured them."""
    document = measured("benchmarks/results/cpu_*.json")
    return f"{tables.caption(document)}\n\n{tables.short(document)}"


def speed_of_all():
    """Every competitor at every size, and peak memory."""
    return tables.full(measured("benchmarks/results/cpu_*.json"))


def peers():
    """What agrees with each peer, in short, as `make conformance` found it."""
    return conformance.summary(measured("peers/results/conformance.json"))


def peers_in_full():
    """What agrees with each peer, and what the differences are."""
    return conformance.markdown(measured("peers/results/conformance.json"))


#: Name -> function without arguments that returns Markdown.
PARTS = {
    "capabilities": what_is_covered,
    "capabilities_in_short": what_is_covered_in_short,
    "activations": activations,
    "activation_operations": activation_operations,
    "speed": speed,
    "speed_of_all": speed_of_all,
    "peers": peers,
    "peers_in_full": peers_in_full,
    "swizzle": orders.swizzle,
    "derivatives": orders.derivatives,
    "te_names": te_names.table,
}


def generated(text):
    """Return a document with its generated parts made anew.

    Raises:
        ValueError: a part of an unknown name, or one that does not end.
    """
    unknown = set(re.findall(r"<!-- generated: (\w+) -->", text)) - set(PARTS)
    if unknown:
        raise ValueError(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if text.count("<!-- generated: ") != len(REGION.findall(text)):
        raise ValueError("a generated part has no <!-- end -->")
    return REGION.sub(lambda match: f"{match[1]}\n{PARTS[match[2]]().strip()}\n\n{match[4]}", text)


def documents():
    """Markdown files with generated parts."""
    files = [ROOT / "README.md", ROOT / "fuser" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path for path in files if "<!-- generated: " in path.read_text(encoding="utf-8")]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the documents, else only compare")
    write = parser.parse_args().write
    try:
        stale = [path for path in documents() if path.read_text(encoding="utf-8") != generated(path.read_text("utf-8"))]
    except ValueError as error:  # of a document, or of what its parts are made of
        parser.error(str(error))
    for path in stale:
        print(f"{'written' if write else 'not up to date'}: {path.relative_to(ROOT)}")
        if write:
            path.write_text(generated(path.read_text(encoding="utf-8")), encoding="utf-8")
    return int(bool(stale) and not write)


if __name__ == "__main__":
    sys.exit(main())
