"""`refops report`: is this installation right, and what does each scaling do to real tensors?

Three parts: golden vectors made by other implementations (`refops.conformance`), checks of each operation by rules that
know no scaling by name (`refops.selfcheck`), and a survey of real tensors (`refops.survey`). This
module runs them, in several processes if asked, and adds up what they found; `refops.display.report` prints it.
"""

import multiprocessing
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path

import refops
from refops import conformance
from refops.files import FileError, UnsupportedTensorError, open_tensors
from refops.selfcheck import Check, all_tasks
from refops.survey import SCALINGS, measure, tensor_facts

#: Name -> module with refops' calls: what is checked.
BACKENDS = {"refops": refops}
#: Where a clone has the golden vectors and the real tensors.
VECTORS = Path("tests", "vectors")
REAL_TENSORS = Path("tests", "data", "minilm_ffn.safetensors")

#: Section -> what it shows, in the order of the report.
SECTIONS = {
    "vectors": "Golden vectors: refops against arrays that other implementations made",
    "activations": "Activations: forward, gradient and row-scaled, against the oracle's intervals",
    "casts": "Casts: codes of each format against the definition",
    "scalings": "Scalings: codes under their own scales, both directions, every dtype, synthetic and real tensors",
    "fused": "Fused operations: activation_quantize and activation_grad_quantize against separate calls",
    "helpers": "Helpers: what goes with the operations, against its inverse",
    "survey": "Real tensors: signal to quantization noise (SQNR, dB) under every scaling",
}
#: What may be absent -> the option that says where it is.
MISSING = {"golden vectors": "--vectors DIR", "real tensors": "--data FILE"}
_WITHOUT_REAL_TENSORS = {"vectors", "casts", "helpers"}
#: Up to so many steps are run in this process: others take a second to start.
_FEW_STEPS = 25


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
        """Whether nothing differs without a documented reason, and the values or the survey asked for were there."""
        return self.unexplained == 0 and (self.values > 0 or (self.sections == ["survey"] and bool(self.survey)))

    @property
    def result(self):
        """PASS only if all that was asked for was there; INCOMPLETE means right as far as it could be checked."""
        if not self.values:
            return "SURVEY" if self.ok else "NOTHING COMPARED"
        if not self.ok:
            return "FAIL"
        return "INCOMPLETE" if self.missing else "PASS"

    @property
    def verdict(self):
        """The report in one line."""
        line = self.result
        if self.values:
            comparisons = spaced(sum(c.comparisons for c in self.checks))
            explained = sum(c.explained for c in self.checks)
            line += f": {spaced(self.values)} values checked in {comparisons} comparisons"
            line += f", {spaced(self.unexplained)} unexplained difference{'' if self.unexplained == 1 else 's'}"
            line += f", {spaced(explained)} documented" if explained else ""
        elif self.survey:
            line += f": {len(self.survey)} tensors measured, nothing compared"
        line += f"; NOT CHECKED, for they were not found: {', '.join(self.missing)}" if self.missing else ""
        return f"{line} ({self.seconds:.1f} s)"

    def as_dict(self):
        """Plain data for JSON."""
        return {
            "backend": self.backend,
            "version": refops.__version__,
            "ok": self.ok,
            "result": self.result,
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


def find_clone():
    """The clone that this package lies in, else the one that the current directory lies in, else None.

    An installed package does not carry the golden vectors and the real tensors; a clone has them.
    """
    for start in (Path(refops.__file__).parent, Path()):
        try:
            start = start.resolve()
        except FileNotFoundError:  # the current directory was removed
            continue
        for folder in (start, *start.parents):
            if all((folder / part).exists() for part in (VECTORS, REAL_TENSORS, "refops/__init__.py")):
                return folder
    return None


def make_report(backend="refops", *, vectors=None, data=None, sections=tuple(SECTIONS), progress=None, processes=1):
    """Run the report.

    Args:
        backend: key of `BACKENDS`.
        vectors: directory of golden vectors; absent is noted, not an error. None: that of `find_clone`.
        data: file of real tensors; absent is noted, not an error. None: that of `find_clone`.
        sections: which sections to run.
        progress: called as progress(done, total, what) before each step is run or, where others run it, waited for,
            and once at the end.
        processes: how many share the work. More than one are started anew (`spawn`), so a script that asks for them
            guards its main part with `if __name__ == "__main__"`.

    Raises:
        FileError: `data` is there but cannot be read or holds nothing to quantize.
    """
    start = time.perf_counter()
    clone = find_clone()
    if clone is not None:
        vectors = clone / VECTORS if vectors is None else vectors
        data = clone / REAL_TENSORS if data is None else data
    real, missing = {}, []
    if set(sections) - _WITHOUT_REAL_TENSORS:
        real = {} if data is None else real_tensors(data)
        if not real:
            missing.append("real tensors")
    if "vectors" in sections and (vectors is None or not has_vectors(vectors)):
        missing.append("golden vectors")
    asked = (backend, None if "golden vectors" in missing else vectors, real, tuple(sections))
    steps, checks, survey = _steps(*asked), [], []
    show = progress or (lambda done, total, what: None)
    with _running(steps, asked, processes) as results:
        for done, step in enumerate(steps):
            show(done, len(steps), step.what)
            found = next(results)
            if step.section == "survey":
                survey.append(found)
            else:
                checks += found
    show(len(steps), len(steps), "done")
    return Report(backend, list(sections), checks, survey, missing, time.perf_counter() - start)


def real_tensors(path):
    """Return name -> array of the tensors in a file that refops can quantize; none where there is no file.

    Raises:
        FileError: the file is there but cannot be read, or holds no such tensor.
    """
    if not Path(path).exists():
        return {}
    found = {}
    with open_tensors(path) as tensors:
        for tensor in tensors:
            try:
                found[tensor.name] = tensor.load()[0]
            except UnsupportedTensorError:
                continue
    if not found:
        raise FileError(f"must hold at least one tensor that refops quantizes; got {str(path)!r}")
    return found


# --- steps -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Step:
    """A part of the report; `run()` returns a list of `Check`, or for the survey its row."""

    section: str
    what: str
    run: Callable


def _steps(backend, vectors, real, sections):
    """All steps in the order of the report, the same in every process."""
    steps = []
    if "vectors" in sections and vectors is not None:
        steps.append(_Step("vectors", "golden vectors", partial(_vector_checks, vectors)))
    for task in all_tasks(BACKENDS[backend], real):
        if task.section in sections:
            steps.append(_Step(task.section, f"{task.section}: {task.subject}", partial(_checked, task)))
    if "survey" in sections:
        steps += [_Step("survey", f"survey: {name}", partial(_surveyed, name, x)) for name, x in real.items()]
    return steps


@contextmanager
def _running(steps, asked, processes):
    """An iterator over the results of the steps, in their order. `asked`: the arguments of `_steps`."""
    if processes == 1 or len(steps) <= _FEW_STEPS:
        yield (step.run() for step in steps)
        return
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, spawn, _start_worker, asked)
    try:
        with _interrupts_wait():
            results = pool.map(_run_step, range(len(steps)))
        yield results
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _interrupts_wait():
    """Ctrl-C in the body is raised at its end; processes that are started in the body never see one.

    Raised in between, it would leave a process half started, for which the end would wait for ever.
    """
    resource_tracker.ensure_running()  # its start would unblock SIGINT
    in_main = threading.current_thread() is threading.main_thread()
    received = []
    if in_main:
        handler = signal.signal(signal.SIGINT, lambda *arguments: received.append(arguments))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if in_main:
            signal.signal(signal.SIGINT, handler)
        if received:
            signal.raise_signal(signal.SIGINT)


#: The steps of a worker process.
_worker_steps: list[_Step] = []


def _start_worker(*asked):
    _worker_steps[:] = _steps(*asked)


def _run_step(number):
    return _worker_steps[number].run()


def _checked(task):
    return [task.run()]


def _surveyed(name, x):
    return name, tensor_facts(x), [measure(x, named) for named in SCALINGS.values()]


def _vector_checks(directory):
    """Compare with the golden vectors in `directory`: one `Check` a comparison."""
    try:
        compared = conformance.compare_vectors(directory)
    except Exception as error:  # as in Task.run: an error is a failed check, not a lost report
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
