"""How many elements of each peer agree with refops bit for bit, and what the others are (`make conformance`).

Every peer that can be imported gets the same inputs (`inputs`). A difference counts as explained only where the peer's
own rule, re-derived (`Divergence.predict`), gives exactly what the peer gave; and the full account must reproduce the
peer's output everywhere, where it agrees with refops too. Whatever is left is unexplained, and the exit code is 1.

    PYTHONPATH=.:tests python -m peers.conformance [--out FILE] [PEER_MODULE ...]
"""

import argparse
import datetime
import json
import platform
import sys
from operator import itemgetter
from pathlib import Path

import numpy as np
from rich.progress import track

import refops
from peers import inputs, registry
from peers.subjects import SUBJECTS, comparable
from refops.display.console import make_table, print_table, stdout_console

RESULTS = Path(__file__).resolve().parent / "results" / "conformance.json"
KINDS = ("ordinary", "special")


class Tally:
    """Counts of one offer over its datasets."""

    def __init__(self, offer):
        self._offer, self._subject = offer, SUBJECTS[offer.subject]
        self.counts = {kind: {"elements": 0, "agree": 0, "unexplained": 0} for kind in KINDS}
        self.real = {"elements": 0, "agree": 0}
        self.arrays, self.credited = {}, {kind: [0] * len(offer.divergences) for kind in KINDS}
        self.examples, self.refused = [], {}

    def add(self, dataset):
        """Compare on one dataset."""
        x, kind = dataset.x[: self._offer.rows], KINDS[dataset.special]
        refused = {name: self._offer.refuses[name] for name in inputs.special_values(x) if name in self._offer.refuses}
        if refused:
            self._refusal(x, refused)
            return
        with np.errstate(all="ignore"):
            theirs = self._offer.compute(x)
        with np.errstate(all="ignore"):
            ours = self._ours(x, theirs)
        models = [divergence.predict(x) for divergence in self._offer.divergences]
        for name, mine in ours.items():
            self._count(kind, dataset, name, mine, theirs[name], [model[name] for model in models])

    def _refusal(self, x, refused):
        """The peer has to raise what its offer says, and nothing else."""
        try:
            with np.errstate(all="ignore"):
                self._offer.compute(x)
        except Exception as error:
            if type(error) not in refused.values():
                raise
            message = f"{type(error).__name__}: {error}".splitlines()[0].strip(": ")
            self.refused |= {name: message for name in refused if name not in self.refused}
        else:
            raise ValueError(f"{self._offer.subject}: the peer must refuse {', '.join(refused)}; it took it")

    def _ours(self, x, theirs):
        if set(theirs) == {"values"} and "values" not in self._subject.formats:
            return {"values": self._subject.values(refops, x)}
        return self._subject.arrays(refops, x)

    def _count(self, kind, dataset, name, mine, theirs, models):
        fmt = self._subject.formats.get(name)
        if mine.shape != theirs.shape:
            raise ValueError(
                f"{self._offer.subject}: {name} of the peer must have shape {mine.shape}; got {theirs.shape}"
            )
        mine, theirs, *models = (comparable(array, fmt) for array in (mine, theirs, *models))
        differs = mine != theirs
        wrong = theirs != models[-1] if models else differs
        counts = self.counts[kind]
        counts["elements"] += mine.size
        agree = int(np.count_nonzero(~differs))
        counts["agree"] += agree
        counts["unexplained"] += int(np.count_nonzero(wrong))
        of_array = self.arrays.setdefault(name, {k: {"elements": 0, "agree": 0} for k in KINDS})[kind]
        for more in (of_array, self.real) if dataset.real else (of_array,):
            more["elements"] += mine.size
            more["agree"] += agree
        remaining = differs & ~wrong
        for i, model in enumerate(models):
            now = remaining & (model == theirs)
            self.credited[kind][i] += int(np.count_nonzero(now))
            remaining &= ~now
        if wrong.any() and len(self.examples) < 3:
            where = tuple(int(i) for i in np.argwhere(wrong)[0])
            self.examples.append(
                {
                    "dataset": f"{dataset.x.dtype.name}, {dataset.name}",
                    "array": name,
                    "index": where,
                    "refops": int(mine[where]),
                    "peer": int(theirs[where]),
                    "predicted": int(models[-1][where]) if models else None,
                }
            )

    def row(self, peer):
        """As plain data."""
        offer = self._offer
        divergences = [
            {
                "name": divergence.name,
                "sentence": divergence.sentence,
                **{kind: self.credited[kind][i] for kind in KINDS},
            }
            for i, divergence in enumerate(offer.divergences)
        ]
        return {
            "peer": peer.name,
            "subject": offer.subject,
            "variant": offer.variant,
            "dtypes": list(offer.dtypes),
            **self.counts,
            "real": self.real,
            "arrays": self.arrays,
            "divergences": [d for d in divergences if d["ordinary"] or d["special"]],
            "refuses": self.refused,
            "examples": self.examples,
        }


def is_compared(peer, offer):
    """Whether an offer belongs to the table: a peer's own cast or scaling of one tensor, and no formula of ours."""
    subject = SUBJECTS[offer.subject]
    return not peer.formulas and subject.exact and subject.inputs == ("x",)


def compare(peer, offer, *, real=True, dtypes=inputs.DTYPES):
    """Return the row of one offer."""
    subject, tally = SUBJECTS[offer.subject], Tally(offer)
    for name in dtypes:
        if name not in offer.dtypes:
            continue
        if subject.family == "casts":
            datasets = inputs.values_for_casts(subject.formats["codes"], inputs.DTYPES[name])
        else:
            datasets = inputs.tensors(inputs.DTYPES[name], real=real)
        for dataset in datasets:
            tally.add(dataset)
    return tally.row(peer)


def conformance(peers, show=lambda items: items):
    """Return the whole document: versions, peers, rows."""
    offers = [(peer, offer) for peer in peers for offer in peer.offers if is_compared(peer, offer)]
    rows = [compare(peer, offer) for peer, offer in show(offers)]
    return {
        "schema": 1,
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "versions": {"refops": refops.__version__, **registry.versions(("numpy", "ml_dtypes"))},
        "peers": [
            {"name": peer.name, "versions": peer.packages, "absent": peer.absent} for peer in peers if not peer.formulas
        ],
        "rows": rows,
    }


def unexplained(row):
    """How many elements of a row the account of the peer does not give."""
    return sum(row[kind]["unexplained"] for kind in KINDS)


# --- words ---------------------------------------------------------------------------------------


def grouped(number):
    """Thousands apart."""
    return f"{number:,}".replace(",", " ")


def share(counts):
    """How many of how many agree."""
    if not counts["elements"]:
        return "-"
    if counts["agree"] == counts["elements"]:
        return f"all {grouped(counts['elements'])}"
    return f"{grouped(counts['agree'])} of {grouped(counts['elements'])}"


def difference(*rows):
    """What differs, in sentences with the number of elements, over rows of one peer that differ alike.

    Behind a sentence stands the number of elements of ordinary data, and of data with NaN and infinity.
    """
    sentences = []
    for i, divergence in enumerate(rows[0]["divergences"]):
        ordinary, special = (sum(row["divergences"][i][kind] for row in rows) for kind in KINDS)
        counts = [grouped(ordinary)] if ordinary else []
        counts += [f"with NaN, inf: {grouped(special)}"] if special else []
        sentences.append(f"{divergence['sentence'].rstrip('.')} ({'; '.join(counts)}).")
    for kind, message in rows[0]["refuses"].items():
        sentences.append(f"Refuses {kind} ({message}).")
    wrong = sum(unexplained(row) for row in rows)
    if wrong:
        sentences.append(f"UNEXPLAINED: {grouped(wrong)}.")
    return " ".join(sentences)


def title(row):
    """The row's subject and variant."""
    return row["subject"] + (f" ({row['variant']})" if row["variant"] else "")


def markdown(document):
    """The table for a page: a row for each peer and format, those of a peer that differ alike on one line.

    "agree" counts codes and scales of ordinary data, of which "real tensors" are a part; the number after a sentence is
    that of the elements that it accounts for.
    """
    merged = {}
    for row in document["rows"]:
        alike = tuple((d["sentence"], bool(d["ordinary"])) for d in row["divergences"])
        merged.setdefault((row["peer"], alike, tuple(row["refuses"].items()), bool(unexplained(row))), []).append(row)
    versions = {peer["name"]: next(iter(peer["versions"].values()), "") for peer in document["peers"]}
    lines = ["| peer | format | agree | real tensors | with NaN, inf | difference |", "|---|---|---|---|---|---|"]
    for (peer, *_), rows in merged.items():
        counts = []
        for kind in ("ordinary", "real", "special"):
            counts.append(share({key: sum(row[kind][key] for row in rows) for key in ("elements", "agree")}))
        cells = (f"{peer} {versions[peer]}", "; ".join(map(title, rows)), *counts, difference(*rows) or "none")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    for peer in document["peers"]:
        if peer["absent"]:
            lines.append(f"| {peer['name']} | not installed | | | | {peer['absent']} |")
    return "\n".join(lines) + "\n"


def summary(document):
    """Formats down, peers across: the share of codes and scales that agree.

    Of a scaling: of real tensors, then of all ordinary data, constructed to differ; of a cast: of every finite number.
    Of a peer's several ways, the one that agrees best.
    """
    present = [peer["name"] for peer in document["peers"] if not peer["absent"]]
    shares = {}
    for row in document["rows"]:
        found = [percent(row[kind]) for kind in ("real", "ordinary") if row[kind]["elements"]]
        key = (row["subject"], row["peer"])
        best = max(
            shares.get(key, (0, "")), (row["ordinary"]["agree"] / row["ordinary"]["elements"], found), key=itemgetter(0)
        )
        shares[key] = best
    lines = ["| | " + " | ".join(present) + " |", "|---" * (1 + len(present)) + "|"]
    for subject in dict.fromkeys(row["subject"] for row in document["rows"]):
        cells = [" / ".join(dict.fromkeys(shares.get((subject, peer), (0, "-"))[1])) for peer in present]
        lines.append(f"| {subject} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def percent(counts):
    """The share that agrees, never rounded up to everything."""
    if not counts["elements"]:
        return "-"
    if counts["agree"] == counts["elements"]:
        return "all"
    return f"{min(99.99, 100 * counts['agree'] / counts['elements']):.4g} %"


def print_rows(document):
    """A table for a terminal."""
    console = stdout_console()
    table = make_table("<peer", "<format", "agree", "real tensors", "NaN, inf", "<difference")
    for row in document["rows"]:
        counts = (share(row[kind]) for kind in ("ordinary", "real", "special"))
        table.add_row(row["peer"], title(row), *counts, difference(row))
    print_table(console, table)
    for peer in document["peers"]:
        if peer["absent"]:
            console.print(f"{peer['name']} is absent: {peer['absent']}")
    for row in document["rows"]:
        for example in row["examples"]:
            console.print(f"unexplained: {row['peer']}, {title(row)}: {example}")


def main(arguments=None):
    """Compare, print, write the JSON; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peers", nargs="*", help=f"modules of peers, all without: {', '.join(registry.MODULES)}")
    parser.add_argument("--out", type=Path, help=f"where the JSON goes; {RESULTS.name} of all peers by default")
    options = parser.parse_args(arguments)
    unknown = set(options.peers) - set(registry.MODULES)
    if unknown:
        parser.error(f"peers must be of {', '.join(registry.MODULES)}; got {', '.join(sorted(unknown))}")
    document = conformance(
        registry.load(*options.peers), lambda items: track(items, "Comparing", disable=not sys.stdout.isatty())
    )
    print_rows(document)
    out = options.out or (None if options.peers else RESULTS)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(document, indent=1) + "\n")
    return int(any(unexplained(row) for row in document["rows"]))


if __name__ == "__main__":
    sys.exit(main())
