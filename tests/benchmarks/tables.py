"""Tables and the plot of what `compare.py` measured.

    python tests/benchmarks/tables.py                                                # both tables, Markdown
    python tests/benchmarks/tables.py results/cpu_<model>.json --plot speed.svg      # of another run than the newest

`host` is cuda_kernels.host. The best peer is the fastest of those with the bits of refops; a faster one with other bits
is named besides.
"""

import argparse
import json
import sys
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
MAIN_SIZE = [4096, 4096]
HOST, REFOPS, MEMCPY = "cuda_kernels.host", "refops", "memcpy"
#: Shorter names for columns.
SHORT_NAMES = {
    "torch formulas, eager": "torch eager",
    "torch formulas, torch.compile": "torch.compile",
    "jnp formulas, jit": "jnp",
    "cuda_kernels.host": "host",
    "jnp": "jnp cast",
    "torch": "torch cast",
}


def shown(name):
    """A competitor's name in tables."""
    return SHORT_NAMES.get(name, name)


def base(name):
    """A competitor's name without its variant."""
    return name.split(" (")[0]


def number(ms):
    """Milliseconds with two or three digits."""
    if ms is None:
        return "-"
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def times(ratio):
    """A ratio with two or three digits."""
    return "-" if ratio is None else f"{number(ratio)}x"


class Cell:
    """All competitors of one operation at one size and number of threads."""

    def __init__(self, rows):
        self.rows = {row["competitor"]: row for row in rows}

    def of(self, peer):
        """The row of a peer: of its variants the fastest, those with the bits of refops first; {} without one."""
        rows = [row for name, row in self.rows.items() if base(name) == peer and "best_ms" in row]
        return min(rows, key=lambda row: (not row.get("equal"), row["best_ms"]), default={})

    def ms(self, name):
        """Best time of a competitor, or None."""
        return self.rows.get(name, {}).get("best_ms")

    @property
    def host(self):
        """The row of the host kernels; {} where they were not timed."""
        return self.rows.get(HOST, {})

    @property
    def best(self):
        """Fastest peer with the bits of refops, or None."""
        return self.host.get("best_equal_peer")

    @property
    def faster_with_other_bits(self):
        """A peer that is faster than that one, with other bits, or None."""
        fastest = self.host.get("best_peer")
        return fastest if fastest != self.best else None

    @property
    def to_memcpy(self):
        """How many times memcpy's time is the host's, in words."""
        return times(self.host.get("to_memcpy"))

    @property
    def lead(self):
        """How many times the best peer's time is the host's; None without a peer."""
        to_peer = self.host.get("to_best_equal_peer")
        return 1 / to_peer if to_peer else None

    @property
    def standing(self):
        """`lead` in words."""
        if self.lead is None:
            return "no peer" if self.host else "-"
        return f"{self.lead:.1f}x" if self.lead >= 1 else f"**{self.lead:.2f}x, behind**"


def cells(document, size, threads):
    """Operation -> `Cell`, in the order of the document."""
    found = {}
    for row in document["rows"]:
        if row["size"] == size and row["threads"] == threads:
            found.setdefault(row["operation"], []).append(row)
    return {operation: Cell(rows) for operation, rows in found.items()}


def results(path=None):
    """The document at `path`; without one the newest that `compare.py` wrote."""
    if path is None:
        documents = [json.loads(found.read_text()) for found in sorted(RESULTS.glob("cpu_*.json"))]
        if not documents:
            raise FileNotFoundError(f"{RESULTS} must hold a cpu_*.json; `make bench` writes one")
        return max(documents, key=lambda document: document["date"])
    return json.loads(Path(path).read_text())


def sizes_and_threads(document):
    """Sizes and numbers of threads in the document, each in order; ValueError without rows."""
    if not document["rows"]:
        raise ValueError("document must have rows; got none")
    return (
        [list(size) for size in dict.fromkeys(tuple(row["size"]) for row in document["rows"])],
        list(dict.fromkeys(row["threads"] for row in document["rows"])),
    )


def markdown_table(header, rows):
    """A Markdown table; the first column is text, the others are numbers."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *rows)) + "\n"


def caption(document):
    """One sentence on where and when."""
    machine = document["machine"]
    return (
        f"{machine['cpu']}, {machine['cpus']} CPUs, {machine['memory_gib']} GiB, Python {document['python']}, "
        f"{document['date']}; milliseconds, best of up to {document['method']['most_rounds']} alternating rounds."
    )


#: Over the fastest of the peers; formulas are in `tests/peers/formulas.py`.
BEST_PEER = "best peer (torch and jnp: the same formula, written for this comparison)"


def at_size(document, size):
    """Number of threads -> operation -> `Cell` at one size; ValueError where nothing was measured there."""
    sizes, threads = sizes_and_threads(document)
    if list(size) not in sizes:
        raise ValueError(f"size must be one that was measured, of {sizes}; got {list(size)}")
    return {n: found for n in threads if (found := cells(document, list(size), n))}


def operations_of(by_threads):
    """Operations that any number of threads has, in order."""
    return list(dict.fromkeys(operation for found in by_threads.values() for operation in found))


def short(document, size=None):
    """Host, the best peer and memcpy at 4096 x 4096, with each number of threads."""
    size = size or MAIN_SIZE
    by_threads = at_size(document, size)
    first = next(iter(by_threads))
    header = ["bfloat16, " + " x ".join(map(str, size))]
    for n in by_threads:
        words = f"{n} thread{'s' * (n > 1)}"
        header += [f"memcpy, {words}", *(["refops"] if n == first else []), "host", "x memcpy"]
        header += [BEST_PEER if n == first else "best peer", "host is faster by"]
    rows = []
    for operation in operations_of(by_threads):
        line = [operation]
        for n, found in by_threads.items():
            cell = found.get(operation) or Cell([])
            best = f"{number(cell.ms(cell.best))} ({shown(cell.best)})" if cell.best else "-"
            ours = [number(cell.ms(REFOPS))] if n == first else []
            line += [number(cell.ms(MEMCPY)), *ours, number(cell.ms(HOST)), cell.to_memcpy, best, cell.standing]
        rows.append(line)
    return markdown_table(header, rows) + _remarks(document, size, by_threads)


def _remarks(document, size, by_threads):
    """Where a peer is faster, with the same bits or with others."""
    lines = []
    for n, found in by_threads.items():
        behind = [operation for operation, cell in found.items() if cell.lead is not None and cell.lead < 1]
        if behind:
            lines.append(f"host is behind, {n} thread{'s' * (n > 1)}: {'; '.join(behind)}.")
        other = [
            f"{operation} ({shown(cell.faster_with_other_bits)}, {number(cell.ms(cell.faster_with_other_bits))} ms)"
            for operation, cell in found.items()
            if cell.faster_with_other_bits
        ]
        if other:
            lines.append(f"Faster than the best peer, but other bits, {n} thread{'s' * (n > 1)}: {'; '.join(other)}.")
    return "".join(f"\n{line}\n" for line in lines)


def full(document):
    """Every competitor at every size and number of threads; peak memory; who was left out or absent."""
    sizes, threads = sizes_and_threads(document)
    parts = [caption(document) + "\n"]
    for size in sizes:
        for n in threads:
            found = cells(document, size, n)
            if not found:
                continue  # the largest is not measured on one thread
            names = columns(found)
            rows = [
                [operation, *(_time(cell.of(name)) for name in names), cell.to_memcpy]
                for operation, cell in found.items()
            ]
            title = f"{' x '.join(map(str, size))}, {n} thread{'s' * (n > 1)}"
            parts.append(markdown_table([title, *map(shown, names), "host x memcpy"], rows))
    parts.append(
        "torch eager, torch.compile and jnp are the same formulas, written for this comparison (`tests/peers`). "
        '"x memcpy": time of host over that of memcpy.\n'
    )
    parts.append('"~": the bits differ from those of refops, or cannot be compared. "-": not offered, or too slow.\n')
    parts += [part for part in (_memory(document), _instructions(document)) if part]
    absent = [f"{peer['name']} ({peer['absent']})" for peer in document["peers"] if peer["absent"]]
    if absent:
        parts.append(f"Absent: {', '.join(absent)}.\n")
    return "\n".join(parts)


def columns(found):
    """Peers, whatever their variants, the copies and ours first."""
    names = list(dict.fromkeys(base(name) for cell in found.values() for name in cell.rows))
    return sorted(names, key=lambda name: (name not in (MEMCPY, "copy into new memory"), name not in (REFOPS, HOST)))


def _time(row):
    other_bits = "equal" in row and not row["equal"]
    return number(row.get("best_ms")) + ("~" if other_bits and "best_ms" in row else "")


def _memory(document):
    """Peak memory beyond the inputs, in MiB."""
    rows = [row for row in document["rows"] if "peak_bytes" in row]
    if not rows:
        return ""
    size = rows[0]["size"]
    found = cells(document, size, rows[0]["threads"])
    names = [name for name in columns(found) if name not in (MEMCPY, "copy into new memory")]
    lines = []
    for operation, cell in found.items():
        peaks = [cell.of(name).get("peak_bytes") for name in names]
        lines.append([operation, *("-" if peak is None else f"{peak / 2**20:.0f}" for peak in peaks)])
    title = f"peak MiB beyond the inputs, {' x '.join(map(str, size))}"
    return markdown_table([title, *map(shown, names)], lines)


def _instructions(document):
    """How close the host kernels come to the core's limit: instructions per element and per cycle, as counted."""
    counted = document.get("instructions")
    if counted is None:
        return ""
    width, rows = counted["width"], []
    for operation, found in counted["operations"].items():
        share = found["per_cycle"] / width
        rows.append([operation, f"{found['per_element']:.1f}", f"{found['per_cycle']:.1f}", f"{100 * share:.0f} %"])
    title = f"host, {' x '.join(map(str, counted['size']))}, 1 thread"
    header = [title, "instructions per element", "per cycle", f"of {width} per cycle"]
    return markdown_table(header, rows)


def plain(document):
    """For a terminal: host beside the best peer and memcpy, every size and number of threads."""
    sizes, threads = sizes_and_threads(document)
    lines = [caption(document)]
    for size in sizes:
        for n in threads:
            if not cells(document, size, n):
                continue
            lines += ["", f"{' x '.join(map(str, size))}, {n} thread{'s' * (n > 1)}"]
            lines.append(
                f"{'':28}{'memcpy':>9}{'refops':>9}{'host':>9}{'x memcpy':>10}{'best peer with the same bits':>42}"
                "  host leads"
            )
            for operation, cell in cells(document, size, n).items():
                best = f"{shown(cell.best)} {number(cell.ms(cell.best)):>8}" if cell.best else "-"
                shown_times = "".join(f"{number(cell.ms(name)):>9}" for name in (MEMCPY, REFOPS, HOST))
                lines.append(
                    f"{operation:28}{shown_times}{cell.to_memcpy:>10}{best:>42}  {cell.standing.replace('*', '')}"
                )
    return "\n".join(lines) + "\n"


#: Competitor -> (label, marker, colour): told apart by the marker too. The colours are those of Okabe and Ito.
MARKERS = {
    MEMCPY: ("memcpy of the same bytes", "|", "#000000"),
    HOST: ("cuda_kernels.host", "o", "#0072B2"),
    REFOPS: ("refops", "D", "#E69F00"),
    "torch formulas, torch.compile": ("torch.compile", "^", "#D55E00"),
    "torch formulas, eager": ("torch eager", "v", "#CC79A7"),
    "jnp formulas, jit": ("jax.numpy, jit", "s", "#009E73"),
    "torchao": ("torchao", "P", "#56B4E9"),
    "ml_dtypes": ("ml_dtypes", "X", "#000000"),
}
#: Marks for peers besides, that are the fastest somewhere.
MORE_MARKS = ("<", ">", "p", "h", "*", "d", "8", "H")


def plotted(by_threads):
    """Competitor -> (label, marker, colour): those of `MARKERS` that were timed, and each peer that is the fastest."""
    found = [cell for operations in by_threads.values() for cell in operations.values()]
    there = {name: style for name, style in MARKERS.items() if any(cell.of(name) for cell in found)}
    fastest = [base(name) for cell in found for name in (cell.best, cell.host.get("best_peer")) if name]
    others = [name for name in dict.fromkeys(fastest) if name not in MARKERS]
    return there | {name: (shown(name), mark, "#000000") for name, mark in zip(others, MORE_MARKS, strict=False)}


def line_style(name, style):
    """How matplotlib draws a competitor's mark: ours are filled."""
    _, marker, colour = style
    stroke = marker == "|"
    return {
        "linestyle": "",
        "marker": marker,
        "color": colour,
        "markerfacecolor": colour if name in (HOST, REFOPS) else "none",
        "markersize": 9 if stroke else 6,
        "markeredgewidth": 1.6 if stroke else 1.2,
    }


def plot(document, path, size=None):
    """Draw the times at 4096 x 4096, a panel for each number of threads, on one scale, readable in grey."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "refops"})
    size = size or MAIN_SIZE
    by_threads = at_size(document, size)
    operations, threads = operations_of(by_threads), list(by_threads)
    markers = plotted(by_threads)
    height = 1.3 + 0.27 * len(operations)
    figure, axes = plt.subplots(
        1, len(threads), figsize=(9, height), sharex=True, sharey=True, squeeze=False, facecolor="white"
    )
    for axis, n in zip(axes[0], threads, strict=True):
        found = by_threads[n]
        for y, operation in enumerate(operations):
            axis.axhline(y, color="0.9", linewidth=0.8, zorder=0)
            for name, style in markers.items():
                row = found[operation].of(name) if operation in found else {}
                if row:
                    axis.plot(row["best_ms"], y, zorder=4 if name == HOST else 3, **line_style(name, style))
                if row.get("equal") is False:
                    axis.annotate("~", (row["best_ms"], y), (0, 4), textcoords="offset points", ha="center", fontsize=8)
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_xlabel(f"milliseconds, {n} thread{'s' * (n > 1)}")
        axis.set_ylim(len(operations) - 0.4, -0.6)
        axis.grid(axis="x", color="0.85", linewidth=0.6, zorder=0)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
    axes[0][0].set_yticks(range(len(operations)), operations)
    handles = [plt.Line2D([], [], label=style[0], **line_style(name, style)) for name, style in markers.items()]
    handles.append(plt.Line2D([], [], label="other bits than refops", linestyle="", marker="$\\sim$", color="black"))
    figure.legend(handles=handles, loc="upper center", ncol=5, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.55 / height))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def main():
    """Print the tables, draw the plot where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", type=Path, nargs="?", help="the newest in results/ by default")
    parser.add_argument("--plot", type=Path, help="write it there instead: .svg or .png")
    options = parser.parse_args()
    document = results(options.json)
    if options.plot:
        plot(document, options.plot)
        return 0
    print(short(document))
    print(full(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
