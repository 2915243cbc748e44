"""What a fuzz target is, and the rules by which a case is a result, a documented error or a failure.

A target is a function of a `Case`. It makes arguments from the case's seed, calls the public function through
`Case.call`, and judges what comes back. A case ends as

    result      every call returned, and what it returned satisfied the target's checks
    refused     a call raised a documented error: of a documented type, raised by the project's own code and saying what
                it got
    failure     anything else: another exception, a check that does not hold, a warning, a changed input, a crash, a
                hang, memory beyond the limit, a file that is neither whole nor absent, a pickle that was executed

The same seed, target and number give the same case, in any process.
"""

import hashlib
import importlib
import shutil
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("refops", "cuda_kernels", "fuser")
#: Random bytes that the strategies of one case may draw from.
BYTES = 1 << 15

RESULT, REFUSED, FAILURE = "result", "refused", "failure"


class CheckError(AssertionError):
    """A check of a target that does not hold."""


class DocumentedError(Exception):
    """A call raised a documented error, which is the cause of this one."""


@dataclass(frozen=True)
class Target:
    """A fuzz target.

    Attributes:
        name: how `run.py --only` calls it.
        run: function of a `Case`.
        covers: dotted names of the public functions and classes that it calls.
        cases: how many cases a full run has.
        seconds: the limit of one case.
        needs: what its worker imports before the first case.
        simulated: whether its worker runs kernels in the simulator.
    """

    name: str
    run: Callable
    covers: tuple[str, ...]
    cases: int
    seconds: float
    needs: tuple[str, ...]
    simulated: bool


#: Every target by name, filled by the modules of `targets`.
TARGETS: dict[str, Target] = {}


def target(name, covers=(), *, cases, seconds=60, needs=("refops",), simulated=False):
    """Decorator: register a target."""

    def register(run):
        if name in TARGETS:
            raise ValueError(f"name must be new; got {name!r}")
        TARGETS[name] = Target(name, run, tuple(covers), cases, seconds, tuple(needs), simulated)
        return run

    return register


def seed_of(seed, name, number):
    """The seed of a case, 64 bits."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}/{number}".encode()).digest()[:8], "little")


def resolve(name):
    """The object of a dotted name. A function is taken before a module of the same name."""
    first, *rest = name.split(".")
    found, path = importlib.import_module(first), first
    for part in rest:
        path = f"{path}.{part}"
        if not hasattr(found, part):
            importlib.import_module(path)
        found = getattr(found, part)
    return found


def require(condition, message, *values):
    """Raise `CheckError` unless `condition`."""
    if not condition:
        raise CheckError(" ".join([message, *map(repr, values)]))


class Case:
    """One case of a target.

    Attributes:
        rng: NumPy generator of this case.
        folder: an empty folder for this case alone.
        canary: path of a file that only executed code of a hostile file would make.
        calls: (name, outcome) -> count of what was called.
    """

    def __init__(self, name, seed, number, folder):
        self.name, self.number = name, number
        key = seed_of(seed, name, number)
        self.rng = np.random.default_rng(key)
        self.folder = Path(folder)
        self.canary = self.folder.parent / f"canary-{self.folder.name}"
        self.calls = Counter()
        self._bytes = np.random.default_rng([key, 1]).bytes(BYTES)
        self._data = None

    # --- choices ------------------------------------------------------------------------------------------------------

    def draw(self, strategy):
        """A value of a Hypothesis strategy."""
        return self._data.draw(strategy)

    def choose(self, options):
        """One of `options`."""
        return options[int(self.rng.integers(len(options)))]

    def chance(self, probability):
        """Whether something of this probability happens."""
        return bool(self.rng.random() < probability)

    def below(self, high, low=0):
        """An integer in [low, high)."""
        return int(self.rng.integers(low, high))

    # --- calls --------------------------------------------------------------------------------------------------------

    def call(self, name, /, *args, documented=(ValueError, TypeError), says="got", changes=(), **kwargs):
        """Call a public function by its dotted name.

        Args:
            documented: error types that its docstring names.
            says: text that the message of a documented error holds.
            changes: positions and names of arguments that the function may write to.

        Raises:
            DocumentedError: it raised a documented error. CheckError: another one, or it changed an argument.
        """
        function = resolve(name)
        passed = {**dict(enumerate(args)), **kwargs}
        before = {key: snapshot(value) for key, value in passed.items() if key not in changes}
        try:
            result = function(*args, **kwargs)
        except documented as error:
            self._check_unchanged(name, before, passed)
            problem = undocumented(error, says)
            if problem:
                raise CheckError(f"{name}: {problem}: {type(error).__name__}: {error}") from error
            self.calls[name, REFUSED] += 1
            raise DocumentedError(f"{name}: {type(error).__name__}: {error}") from error
        self._check_unchanged(name, before, passed)
        self.calls[name, RESULT] += 1
        return result

    def attempt(self, name, /, *args, **kwargs):
        """As `call`; returns (True, result) or (False, the documented error)."""
        try:
            return True, self.call(name, *args, **kwargs)
        except DocumentedError as refused:
            return False, refused.__cause__

    @staticmethod
    def _check_unchanged(name, before, passed):
        for key, taken in before.items():
            require(same_snapshot(taken, snapshot(passed[key])), f"{name} changed its argument", key)

    # --- the case -----------------------------------------------------------------------------------------------------

    def run(self, function):
        """Run the target's function; return (outcome, text)."""
        self.folder.mkdir(parents=True)
        outcome = []

        @settings(database=None, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        @given(st.data())
        def body(data):
            self._data = data
            outcome.append(self._judged(function))

        try:
            body.hypothesis.fuzz_one_input(self._bytes)
            if not outcome:
                return FAILURE, f"the strategies of the case needed more than {BYTES} bytes"
            if self.canary.exists():
                return FAILURE, "code in a file was executed: the canary is there"
            return outcome[0]
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _judged(self, function):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                function(self)
                outcome = RESULT, ""
            except DocumentedError as refused:
                outcome = REFUSED, str(refused)
            except Exception as error:
                return FAILURE, "".join(traceback.format_exception(error))
        for warning in caught:
            where = f"{warning.filename}:{warning.lineno}"
            return FAILURE, f"{where} warned: {warning.category.__name__}: {warning.message}"
        return outcome


def undocumented(error, says):
    """What is wrong with an error of a documented type, or None: it must come from the project and say what it got."""
    frames = traceback.extract_tb(error.__traceback__)
    raised_in = Path(frames[-1].filename)
    text = str(error)
    in_signature = raised_in.parent == Path(__file__).parent or raised_in.name == "inspect.py"
    if isinstance(error, TypeError) and "argument" in text and in_signature:
        return None  # Python's own word on a call that does not fit the signature
    if raised_in.name == "enum.py" and "is not a valid" in text:
        return None  # the same on an enumeration
    if not any(raised_in.is_relative_to(ROOT / package) for package in PACKAGES):
        return f"raised by {raised_in.name}:{frames[-1].lineno}, not by a check of the argument"
    if says not in text:
        return f"the message does not say {says!r}"
    if "\n" in text:
        return "the message has more than one line"
    return None


def snapshot(value):
    """A copy of what a call could change in `value`: bytes of arrays and tensors, also inside of containers."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, None if value.dtype.hasobject else value.tobytes()
    if isinstance(value, dict):
        return {str(key): snapshot(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [snapshot(item) for item in value]
    if type(value).__module__ == "torch" and hasattr(value, "detach"):
        return torch_bits(value)
    fields = getattr(value, "__dataclass_fields__", None)
    if fields is not None and not isinstance(value, type):
        return {name: snapshot(getattr(value, name)) for name in fields}
    return None


def torch_bits(tensor):
    """(dtype, shape, bytes) of a dense torch tensor; None of others, which hold no bytes here."""
    import torch

    if (
        tensor.layout is not torch.strided
        or tensor.device.type == "meta"
        or type(tensor)
        not in (
            torch.Tensor,
            torch.nn.Parameter,
        )
    ):
        return None
    flat = tensor.detach().resolve_conj().reshape(-1)
    flat = torch.empty(flat.numel(), dtype=flat.dtype).copy_(flat)  # strides of one whatever they were
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return str(tensor.dtype), tuple(tensor.shape), data


def same_snapshot(one, other):
    """Whether two snapshots are of the same bits."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_snapshot(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same_snapshot, one, other))
    return one == other
