"""`refops report`: every operation and path, checked against something that does not share its code.

Three parts: golden vectors made by other implementations (`refops.conformance`), checks of each operation against an
independent statement of what it must give (`refops.selfcheck`), and a survey of real tensors (`refops.survey`). This
module runs them and adds up what they found; `refops.display.report` prints it.
"""

import itertools
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import refops
from refops import conformance
from refops.selfcheck import all_tasks
from refops.selfcheck.inputs import real_tensors
from refops.selfcheck.tally import Check, run_task
from refops.survey import SCALINGS, measure, tensor_facts

#: Name -> module with refops' calls: what is checked.
BACKENDS = {"refops": refops}
REPOSITORY = Path(refops.__file__).parent.parent
VECTORS = REPOSITORY / "tests" / "vectors"
REAL_TENSORS = REPOSITORY / "tests" / "data" / "minilm_ffn.safetensors"

#: Section -> what it shows, in the order of the report.
SECTIONS = {
    "vectors": "Golden vectors: refops against arrays that other implementations made",
    "activations": "Activations: forward, gradient and row-scaled, against their float64 truth",
    "casts": "Casts: codes of each format against the definition, and against ml_dtypes",
    "scalings": "Scalings: rowwise and columnwise, float32, float16 and bfloat16, synthetic and real tensors",
    "fused": "Fused operations: activation_quantize and activation_grad_quantize against separate calls",
    "helpers": "Helpers: what the operations are built from and what goes with them",
    "survey": "Real tensors: signal to quantization noise (SQNR, dB) under every scaling",
}
#: What may be absent -> the option that says where it is.
MISSING = {"golden vectors": "--vectors DIR", "real tensors": "--data FILE"}
_WITHOUT_REAL_TENSORS = {"vectors", "casts", "helpers"}


@dataclass(frozen=True)
class Report:
    """Everything that `refops report` found.

    Attributes:
        backend: name of the module under test.
        sections: sections that were run.
        checks: list of `Check`.
        survey: list of (tensor name, `TensorFacts`, list of `Measurement`).
        missing: keys of `MISSING`: what was not found and therefore not checked.
        seconds: wall time.
    """

    backend: str
    sections: list
    checks: list
    survey: list
    missing: list
    seconds: float

    @property
    def unexplained(self):
        """Number of elements that differ without a documented reason."""
        return sum(c.unexplained for c in self.checks)

    @property
    def values(self):
        """Number of elements compared."""
        return sum(c.values for c in self.checks)

    @property
    def ok(self):
        """Whether nothing differs without a documented reason, and what was asked for was there: values or a survey."""
        return self.unexplained == 0 and (self.values > 0 or (self.sections == ["survey"] and bool(self.survey)))

    @property
    def verdict(self):
        """The report in one line."""
        if self.values:
            comparisons = spaced(sum(c.comparisons for c in self.checks))
            explained = sum(c.explained for c in self.checks)
            line = f"{'PASS' if self.ok else 'FAIL'}: {spaced(self.values)} values checked in {comparisons} comparisons"
            line += f", {spaced(self.unexplained)} unexplained difference{'' if self.unexplained == 1 else 's'}"
            line += f", {spaced(explained)} documented" if explained else ""
        else:
            line = "NOTHING COMPARED" + (f", {len(self.survey)} tensors surveyed" if self.survey else "")
        return "; ".join([f"{line} ({self.seconds:.1f} s)", *(f"{what} not found" for what in self.missing)])

    def as_dict(self):
        """Plain data for JSON."""
        return {
            "backend": self.backend,
            "version": refops.__version__,
            "ok": self.ok,
            "verdict": self.verdict,
            "seconds": self.seconds,
            "missing": self.missing,
            "checks": [{**asdict(c), "unexplained": c.unexplained} for c in self.checks],
            "survey": [
                {"tensor": name, **asdict(facts), "scalings": [m.as_dict() for m in measurements]}
                for name, facts, measurements in self.survey
            ],
        }


def spaced(number):
    """12345678 -> "12 345 678"."""
    return f"{number:,}".replace(",", " ")


def has_vectors(path):
    """Whether a path is a directory with golden vectors."""
    return any(Path(path).glob("*.npz"))


def make_report(backend="refops", *, vectors=VECTORS, data=REAL_TENSORS, sections=tuple(SECTIONS), progress=None):
    """Run the report.

    Args:
        backend: key of `BACKENDS`.
        vectors: directory of golden vectors; absent is noted, not an error.
        data: file of real tensors; absent is noted, not an error.
        sections: which sections to run.
        progress: called as progress(done, total, what) before each step and once at the end.

    Raises:
        FileError: `data` is there but cannot be read or holds nothing to quantize.
    """
    start = time.perf_counter()
    vectors, data = Path(vectors), Path(data)
    real, missing = {}, []
    if set(sections) - _WITHOUT_REAL_TENSORS:
        real = real_tensors(data)
        if not real:
            missing.append("real tensors")
    tasks = [t for t in all_tasks(BACKENDS[backend], real) if t.section in sections]
    surveyed = real if "survey" in sections else {}
    total, done = len(tasks) + len(surveyed) + 1, itertools.count()

    def step(what):
        if progress is not None:
            progress(next(done), total, what)

    checks, survey = [], []
    step("golden vectors")
    if "vectors" in sections:
        if has_vectors(vectors):
            checks += _vector_checks(vectors)
        else:
            missing.append("golden vectors")
    for task in tasks:
        step(f"{task.section}: {task.subject}")
        checks.append(run_task(task))
    for name, x in surveyed.items():
        step(f"survey: {name}")
        survey.append((name, tensor_facts(x), [measure(x, named) for named in SCALINGS.values()]))
    step("done")
    return Report(backend, list(sections), checks, survey, missing, time.perf_counter() - start)


def _vector_checks(directory):
    """Compare with the golden vectors in `directory`: one `Check` a comparison."""
    try:
        compared = conformance.compare_vectors(directory)
    except Exception as error:  # as in run_task: an error is a failed check, not a lost report
        return [Check("vectors", "compare_vectors", str(directory), 1, 1, 1, first=f"raised {error!r}")]
    return [
        Check(
            section="vectors",
            subject=f"{c.file}: {c.subject}",
            against=c.peer,
            comparisons=1,
            values=c.elements,
            differing=c.differing,
            explained=c.explained,
            divergence=c.divergence,
            first="" if c.ok else f"{c.differing - c.explained} of {c.elements} elements",
        )
        for c in compared
    ]
