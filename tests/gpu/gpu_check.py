"""Everything that only a GPU can show, in one run: `python tests/gpu/gpu_check.py --json FILE [--seconds 420]`.

Run it from the root of a clone on a machine with Python, NumPy, ml_dtypes, torch, numba and numba-cuda. First it says
what it runs on: a card, or without one the software GPU (`cuda_kernels.emulator`). If there is neither, it says why,
and exits with 0. On a card:

    quantize, activations, calls     every public call against `refops`, bit for bit or judged by `refops.oracle`
    warm                             what `speed` times, once, in several processes: it leaves the PTX on disk
    units                            scalar functions on every mantissa or every bfloat16
    launches                         streams, CUDA graphs, threads, autograd, a second device, CuPy and Numba arrays
    memcheck, racecheck              some of it under compute-sanitizer, where that is installed
    speed                            device time beside a copy of the same bytes; host time per call

Every part runs in processes of its own with a share of the time, so that none hides another: a crash, a hang and a
broken CUDA context end with it. The JSON holds the environment, and for each part its cases, failures and times. The
exit code is 1 where a result was wrong, a case raised or a part broke off. Inputs are new; `--seed` repeats a run.

    --device emulated       quantize, activations, calls and units on the software GPU: the compiled kernels, checked,
                            at shapes of a few tiles. --target sm_100a; --deferred: work is done late and backwards
    --device simulated      the same parts in the simulator: the kernels as Python, at small shapes
    --parts A,B             some parts; --only TEXT: cases whose name has the text
"""

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
for folder in map(str, (ROOT / "tests" / "simulated", ROOT / "tests", HERE, ROOT)):
    if folder not in sys.path:
        sys.path.insert(0, folder)

#: part -> (share of the time, whether several processes divide its cases).
PARTS = {
    "quantize": (0.20, True),
    "activations": (0.20, True),
    "calls": (0.06, True),
    "warm": (0.06, True),
    "units": (0.05, False),
    "launches": (0.10, False),
    "memcheck": (0.07, False),
    "racecheck": (0.07, False),
    "speed": (0.19, False),
}
#: Those that need no card.
PARTS_WITHOUT_CARD = ("quantize", "activations", "calls", "units")
SANITIZERS = ("memcheck", "racecheck")
WORKERS = 10
#: Exit code by which compute-sanitizer says that it found something.
FOUND = 86
#: What it says where it cannot work, for example in some virtual machines.
REFUSALS = ("Device not supported", "Unable to find injection library", "Failed to initialize")
PACKAGES = (
    "numpy",
    "ml_dtypes",
    "torch",
    "numba",
    "numba-cuda",
    "llvmlite",
    "cuda-core",
    "cuda-bindings",
    "triton",
    "cupy-cuda13x",
)


# --- what there is ----------------------------------------------------------------------------------


def missing_card():
    """Why nothing can be run on a card here; None if it can."""
    try:
        import torch
    except Exception as error:
        return f"torch cannot be imported: {type(error).__name__}: {error}"
    try:
        if not torch.cuda.is_available():
            return "torch sees no CUDA device"
        from cuda_kernels.launch import launcher_for

        launcher_for(0)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def missing_emulator():
    """Why nothing can be run on the software GPU here; None if it can."""
    try:
        from cuda_kernels.emulator import build, loading

        build.libraries()
        loading.find_linker()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def choose_device(options):
    """(what the cases run on, one line that says so); (None, why) where there is nothing."""
    if options.device == "simulated":
        return "simulated", "the simulator: kernels as Python"
    no_card = "not asked for" if options.device == "emulated" else missing_card()
    if no_card is None:
        return "cuda", "a card"
    no_emulator = "not asked for" if options.device == "cuda" else missing_emulator()
    if no_emulator is None:
        late = ", deferred and backwards" if options.deferred else ""
        return "emulated", f"the software GPU, {options.target}{late}; a card: {no_card}"
    return None, f"no GPU: {no_card}; the software GPU: {no_emulator}"


def environment(device):
    """Versions, the card, the driver."""
    found = {"python": platform.python_version(), "platform": platform.platform(), "device": device}
    found["processors"] = os.cpu_count()
    for package in PACKAGES:
        with suppress(Exception):
            found[package] = metadata.version(package)
    with suppress(Exception):
        run = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        found["commit"] = run.stdout.strip()
    if device == "cuda":
        import torch

        with suppress(Exception):
            found["cuda of torch"] = torch.version.cuda
            found["card"] = torch.cuda.get_device_name(0)
            found["devices"] = torch.cuda.device_count()
            found["capability"] = list(torch.cuda.get_device_capability(0))
        with suppress(Exception):
            query = [
                "nvidia-smi",
                "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit",
                "--format=csv,noheader",
            ]
            found["driver, clocks, power"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    return found


# --- one part in this process -----------------------------------------------------------------------


class Record:
    """What one process found, written to its file after every case."""

    def __init__(self, path=None):
        self.path = path
        self.cases, self.failures, self.skipped, self.notes, self.results = 0, [], [], {}, {}
        self.done = False

    def attempt(self, name, function):
        """Run a case; a failure is recorded."""
        start = time.monotonic()
        try:
            note = function()
            if isinstance(note, str):
                self.notes[name] = note
        except Exception as error:
            kind = "wrong" if isinstance(error, AssertionError) else "error"
            lines = (
                str(error).strip().splitlines()[:12] if kind == "wrong" else traceback.format_exc().splitlines()[-8:]
            )
            self.failures.append({"case": name, "kind": kind, "message": "\n".join(line[:400] for line in lines)})
            print(f"  {kind}: {name}: {(lines or [''])[-1 if kind == 'error' else 0][:200]}", flush=True)
        self.cases += 1
        self.notes.setdefault("slowest", ["", 0.0])
        spent = time.monotonic() - start
        if spent > self.notes["slowest"][1]:
            self.notes["slowest"] = [name, round(spent, 2)]
        self.write()

    def skip(self, name):
        """Note a case that there was no time for."""
        self.skipped.append(name)

    def write(self):
        """Write what is known so far."""
        if self.path:
            Path(self.path).write_text(json.dumps(self.as_dict()))

    def as_dict(self):
        """Plain data."""
        return {name: getattr(self, name) for name in ("cases", "failures", "skipped", "notes", "results", "done")}


def cases_of(part):
    """[(name, function of (device, rng))] of a part."""
    import gpu_cases

    if part == "units":
        import gpu_units

        return list(gpu_units.cases())
    if part == "warm":
        import gpu_speed

        return list(gpu_speed.warming_cases())
    if part == "launches":
        import gpu_launches

        return list(gpu_launches.cases())
    made = {
        "quantize": gpu_cases.quantize_cases,
        "activations": gpu_cases.activation_cases,
        "calls": gpu_cases.call_cases,
    }
    return list(made.get(part, gpu_cases.sanitized_cases)())


def make_device(options):
    """The device that cases run on."""
    import gpu_cases

    if options.device == "emulated":
        return gpu_cases.Emulated(options.target, deferred=options.deferred, backward=options.deferred)
    return gpu_cases.Simulated() if options.device == "simulated" else gpu_cases.Torch()


def run_cases(record, device, cases, seed, deadline):
    """Run cases until the time is spent, or until the device answers nothing any more."""
    import numpy as np

    for number, (name, function) in enumerate(cases):
        if time.monotonic() > deadline:
            record.skip(name)
            continue
        rng = np.random.default_rng([seed, number])
        record.attempt(name, lambda function=function, rng=rng: function(device, rng))
        if device.name == "cuda" and not alive(device):
            record.failures.append(
                {"case": name, "kind": "error", "message": "the CUDA context is broken from here on"}
            )
            for later, _ in cases[number + 1 :]:
                record.skip(later)
            break


def alive(device):
    """Whether the CUDA context still works."""
    try:
        device.torch.cuda.synchronize(device.number)
        return True
    except Exception:
        return False


def run_part(options):
    """Run (a share of) one part in this process; its record goes to `--json`."""
    deadline = time.monotonic() + options.seconds
    record = Record(options.json)
    record.write()
    if options.part == "speed":
        import gpu_speed

        record.attempt("speed", lambda: gpu_speed.run(record, deadline))
    else:
        share, of = options.share
        device = make_device(options)  # first: cases look for numba.cuda, which keeps the driver that it finds
        cases = [case for case in cases_of(options.part) if options.only in case[0]][share::of]
        if options.part in SANITIZERS:
            device.size = "small"
        with device:
            run_cases(record, device, cases, options.seed, deadline)
    record.done = True
    record.write()
    return 1 if record.failures else 0


# --- all parts, each in processes of its own --------------------------------------------------------


def command_of(options, part, json_file, seconds, share=(0, 1)):
    """The command line of one process."""
    own = [sys.executable, str(HERE / "gpu_check.py"), "--part", part, "--json", json_file, "--device", options.device]
    own += ["--seconds", str(int(seconds)), "--seed", str(options.seed), "--only", options.only]
    own += ["--share", f"{share[0]}/{share[1]}", "--target", options.target]
    own += ["--deferred"] if options.deferred else []
    if part not in SANITIZERS:
        return own
    tool = find_sanitizer()
    return [tool, "--tool", part, "--error-exitcode", str(FOUND), "--print-limit", "10", *own]


def find_sanitizer():
    """Path of compute-sanitizer, or None."""
    found = shutil.which("compute-sanitizer")
    usual = [Path("/usr/local/cuda/bin/compute-sanitizer"), Path("/opt/cuda/bin/compute-sanitizer")]
    return found or next((str(path) for path in usual if path.exists()), None)


def environment_of(options, part):
    """Environment variables of a part's processes."""
    variables = dict(os.environ, PYTHONUNBUFFERED="1")
    variables.pop("NUMBA_ENABLE_CUDASIM", None)
    if options.device == "simulated":
        variables["NUMBA_ENABLE_CUDASIM"] = "1"
    if part in SANITIZERS:  # every array its own allocation: what lies behind one belongs to nobody
        variables["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    return variables


def run_parts(options, parts):
    """Run parts one after another; return part -> summary."""
    spare = 1 if options.device == "cuda" else 0  # a card's processes wait for it
    workers = max(1, min(WORKERS, (os.cpu_count() or 2) - spare))
    end, summaries = time.monotonic() + options.seconds, {}
    for i, part in enumerate(parts):
        left = sum(PARTS[later][0] for later in parts[i:])
        seconds = max(5.0, (end - time.monotonic()) * PARTS[part][0] / left)
        print(f"{part}: at most {seconds:.0f} s", flush=True)
        start = time.monotonic()
        try:
            if part in SANITIZERS and find_sanitizer() is None:
                summaries[part] = {"status": "skipped", "reason": "compute-sanitizer is not installed"}
            else:
                summaries[part] = run_processes(options, part, seconds, workers if PARTS[part][1] else 1)
        except Exception:
            summaries[part] = {"status": "broken", "reason": traceback.format_exc()[-1500:]}
        summaries[part]["seconds"] = round(time.monotonic() - start, 1)
        print(f"{part}: {described(summaries[part])}", flush=True)
        write_json(options, summaries)
    return summaries


def described(summary):
    """One line."""
    failures = summary.get("failures", [])
    counts = f"{summary.get('cases', 0)} cases, {len(failures)} failures, {len(summary.get('skipped', []))} not reached"
    return f"{summary['status']}, {counts}, {summary['seconds']} s {summary.get('reason', '')}".rstrip()


def run_processes(options, part, seconds, count):
    """Run a part in `count` processes at a time; return what they found together."""
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder, f"{i}.json")) for i in range(count)]
        # compiled kernels: some of it is for the start, and for a last case that compiles several
        inner = seconds if options.device == "simulated" else seconds * 0.85 - 5
        commands = [command_of(options, part, file, max(5, inner), (i, count)) for i, file in enumerate(files)]
        logs = [Path(folder, f"{i}.log") for i in range(count)]
        running = []
        for command, log in zip(commands, logs, strict=True):
            out = log.open("w")
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment_of(options, part),
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            running.append((process, out))
        codes = [finish(process, time.monotonic() + seconds + 10) for process, _ in running]
        for _, out in running:
            out.close()
        texts = [log.read_text(errors="replace") for log in logs]
        tails = [text if len(text) < 4000 else f"{text[:1000]}\n...\n{text[-3000:]}" for text in texts]
        found = [json.loads(Path(f).read_text()) if Path(f).exists() else {} for f in files]
    for tail in tails:
        print("".join(f"{line}\n" for line in tail.splitlines()[-12:] if line.startswith("  ")), end="")
    return combined(part, codes, found, tails)


def finish(process, deadline):
    """Wait for a process; its exit code, or "timeout"."""
    try:
        return process.wait(max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its session holds what it started
        process.wait()
        return "timeout"


def combined(part, codes, found, tails):
    """The summary of a part from what its processes wrote, how they ended, and the ends of their output."""
    summary = {"status": "passed", "cases": 0, "failures": [], "skipped": [], "notes": {}, "results": {}}
    for number, (code, one, tail) in enumerate(zip(codes, found, tails, strict=True)):
        summary["cases"] += one.get("cases", 0)
        for name in ("failures", "skipped"):
            summary[name] += one.get(name, [])
        slowest = one.get("notes", {}).pop("slowest", None)
        summary["notes"] |= one.get("notes", {}) | ({f"slowest of {number}": slowest} if slowest else {})
        summary["results"] |= one.get("results", {})
        refused = part in SANITIZERS and any(words in tail for words in REFUSALS)
        if refused:
            return {**summary, "status": "skipped", "reason": f"compute-sanitizer does not work here: {tail[-400:]}"}
        if code == FOUND and part in SANITIZERS:
            summary["failures"].append({"case": part, "kind": "wrong", "message": tail[-2500:]})
        elif code == "timeout" and one.get("cases") and part in (*SANITIZERS, "speed"):
            summary["notes"]["ended"] = "the time was spent before the last case ended"
        elif code not in (0, 1) or not one.get("done"):
            summary["failures"].append({"case": part, "kind": "broken", "message": f"exit {code}\n{tail[-1500:]}"})
    if summary["failures"]:
        summary["status"] = "failed"
    return summary


# --- the command ------------------------------------------------------------------------------------


def write_json(options, summaries, **more):
    """Write the file, whatever is known."""
    if options.json:
        plain = {"gpu": options.device == "cuda", "environment": options.environment, "seed": options.seed}
        Path(options.json).write_text(json.dumps(plain | {"parts": summaries, **more}, indent=1))


def parse(arguments):
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="where the record goes")
    parser.add_argument("--seconds", type=float, default=420)
    parser.add_argument("--device", choices=("any", "cuda", "emulated", "simulated"), default="any")
    parser.add_argument("--target", default="sm_90", help="of the software GPU")
    parser.add_argument("--deferred", action="store_true", help="the software GPU works late, and backwards")
    parser.add_argument("--parts", default="", help="names with commas between")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name has this text")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--share", default="0/1", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.share = tuple(int(n) for n in options.share.split("/"))
    options.seed = int.from_bytes(os.urandom(4), "big") if options.seed is None else options.seed
    unknown = set(filter(None, options.parts.split(","))) - set(PARTS)
    if unknown:
        parser.error(f"--parts must be of {', '.join(PARTS)}; got {', '.join(sorted(unknown))}")
    return options


def main(arguments=None):
    """Return the exit code."""
    options = parse(arguments)
    if options.part:
        return run_part(options)
    options.device, said = choose_device(options)
    print(said if options.device is None else f"runs on {said}", flush=True)
    if options.device is None:
        if options.json:
            Path(options.json).write_text(json.dumps({"gpu": False, "reason": said}, indent=1))
        return 0
    options.environment = environment(options.device) | {"runs on": said}
    print(json.dumps(options.environment), flush=True)
    wanted = [part for part in PARTS if not options.parts or part in options.parts.split(",")]
    parts = [part for part in wanted if options.device == "cuda" or part in PARTS_WITHOUT_CARD]
    summaries = run_parts(options, parts)
    wrong = [part for part, summary in summaries.items() if summary["status"] in ("failed", "broken")]
    write_json(options, summaries, ok=not wrong)
    print(f"{'wrong: ' + ', '.join(wrong) if wrong else 'ok'}, seed {options.seed}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
