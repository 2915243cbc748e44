"""Worker processes: hands out cases, watches each one's time, and names the case that a worker died in."""

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path

from harness import FAILURE, ROOT, TARGETS

HERE = Path(__file__).resolve().parent
#: Seconds for the imports before the first case of a target.
STARTING = 180
#: Cases that a worker gets at once: a target's state does not live longer.
CHUNK = 50


@dataclass
class Tally:
    """What came of a target's cases.

    Attributes:
        outcomes: outcome -> count.
        calls: (public name, outcome) -> count.
        failures: [(case number, text)].
        seconds: time of all of its cases.
    """

    outcomes: Counter = field(default_factory=Counter)
    calls: Counter = field(default_factory=Counter)
    failures: list = field(default_factory=list)
    seconds: float = 0.0


class Worker:
    """A process that runs one chunk of cases at a time."""

    def __init__(self, folder, modules, simulated):
        self.simulated, self.folder = simulated, folder
        self.log = open(folder / f"log-{os.urandom(4).hex()}", "w+b")  # noqa: SIM115 (lives as long as the process)
        reading, writing = os.pipe()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        environment |= {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
        environment.pop("NUMBA_ENABLE_CUDASIM", None)
        if simulated:
            environment["NUMBA_ENABLE_CUDASIM"] = "1"
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "worker.py"), str(folder), ",".join(modules), str(writing)],
            stdin=subprocess.PIPE,
            stdout=self.log,
            stderr=self.log,
            pass_fds=[writing],
            env=environment,
            start_new_session=True,
        )
        os.close(writing)
        self.answers = reading
        self.order, self.running, self.deadline, self.began, self._rest = None, None, None, 0.0, b""

    def give(self, order):
        """Start on a chunk."""
        self.order, self.left = order, deque(order["numbers"])
        self.deadline, self.running = time.monotonic() + STARTING, None
        self.process.stdin.write((json.dumps(order) + "\n").encode())
        self.process.stdin.flush()

    def read(self):
        """Answers that have come; None when the process has closed its end."""
        data = os.read(self.answers, 1 << 20)
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def kill(self):
        """End the process and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdin.close()
        os.close(self.answers)
        self.log.close()

    def last_words(self):
        """The end of what the process printed."""
        self.log.flush()
        self.log.seek(0)
        return self.log.read()[-3000:].decode(errors="replace")


class Pool:
    """Runs cases in worker processes.

    Args:
        seed: seed of the run.
        modules: modules whose import registers targets.
        jobs: processes at a time.
        watch: called with (finished cases, name of the target) after each case.
    """

    def __init__(self, seed, modules, jobs=2, watch=lambda done, name: None):
        self.seed, self.modules, self.jobs, self.watch = seed, modules, jobs, watch
        self.tallies, self.done = {}, 0

    def run(self, numbers, *, until=None):
        """Run cases; return target name -> `Tally`.

        Args:
            numbers: target name -> case numbers.
            until: value of `time.monotonic()` at which no further chunk is begun.
        """
        self.tallies = {name: Tally() for name in numbers}
        chunks = {False: deque(), True: deque()}
        longest = max(map(len, numbers.values()), default=0)
        for first in range(0, longest, CHUNK):  # in turns, so that each has had some where time is short
            for name, wanted in numbers.items():
                if first >= len(wanted):
                    continue
                chunks[TARGETS[name].simulated].append(
                    {"target": name, "seed": self.seed, "numbers": list(wanted[first : first + CHUNK])}
                )
        folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
        workers, selector = [], selectors.DefaultSelector()
        try:
            while True:
                late = until is not None and time.monotonic() > until
                if late:
                    for waiting in chunks.values():
                        waiting.clear()
                self._assign(workers, chunks, folder, selector)
                if not workers:
                    break
                for key, _ in selector.select(timeout=0.5):
                    self._hear(key.data, workers, chunks, selector)
                self._check_clocks(workers, chunks, selector)
        finally:
            for worker in workers:
                worker.kill()
            selector.close()
            shutil.rmtree(folder, ignore_errors=True)
        return self.tallies

    def _assign(self, workers, chunks, folder, selector):
        for worker in list(workers):
            if worker.order is None:
                waiting = chunks[worker.simulated]
                if waiting:
                    worker.give(waiting.popleft())
                else:
                    self._remove(worker, workers, selector)
        while len(workers) < self.jobs and any(chunks.values()):
            simulated = not chunks[False] or (bool(chunks[True]) and not any(w.simulated for w in workers))
            worker = Worker(folder, self.modules, simulated)
            workers.append(worker)
            selector.register(worker.answers, selectors.EVENT_READ, worker)
            worker.give(chunks[simulated].popleft())

    @staticmethod
    def _remove(worker, workers, selector):
        selector.unregister(worker.answers)
        workers.remove(worker)
        worker.kill()

    def _hear(self, worker, workers, chunks, selector):
        if worker not in workers:
            return
        messages = worker.read()
        if messages is None:
            code = worker.process.wait()
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            self._lost(worker, workers, chunks, selector, f"the process ended with {how}")
            return
        for message in messages:
            name = worker.order["target"]
            tally = self.tallies[name]
            if "begins" in message:
                worker.running, worker.began = message["begins"], time.monotonic()
                worker.deadline = worker.began + TARGETS[name].seconds
            elif "ends" in message:
                tally.seconds += time.monotonic() - worker.began
                tally.outcomes[message["outcome"]] += 1
                for called, outcome, count in message["calls"]:
                    tally.calls[called, outcome] += count
                if message["outcome"] == FAILURE:
                    tally.failures.append((message["ends"], message["text"]))
                worker.left.popleft()
                worker.running, worker.deadline = None, time.monotonic() + STARTING
                self.done += 1
                self.watch(self.done, name)
            else:
                worker.order = None

    def _check_clocks(self, workers, chunks, selector):
        for worker in list(workers):
            if worker.order is not None and time.monotonic() > worker.deadline:
                seconds = TARGETS[worker.order["target"]].seconds if worker.running is not None else STARTING
                self._lost(worker, workers, chunks, selector, f"it ran for more than {seconds:g} s")

    def _lost(self, worker, workers, chunks, selector, why):
        """A process is gone: the case that it was in has failed, the rest of its chunk goes to another one."""
        name, number = worker.order["target"], worker.left.popleft() if worker.left else None
        tally = self.tallies[name]
        tally.outcomes[FAILURE] += 1
        tally.failures.append((number, f"{why}\n{worker.last_words()}".strip()))
        self.done += 1
        self.watch(self.done, name)
        if worker.left:
            chunks[worker.simulated].appendleft({**worker.order, "numbers": list(worker.left)})
        self._remove(worker, workers, selector)
