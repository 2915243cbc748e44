"""gpu_check.py without a GPU: its cases in the simulator, its records, what it says; launches on a fake driver."""

import json
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tiers import sampled

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))

import gpu_cases
import gpu_check
import gpu_units
from gpu_cases import alone

from cuda_kernels.operands import pointer, scalar

GPU = Path(gpu_check.__file__).parent
CASES = [(part, *case) for part in ("quantize", "activations", "calls") for case in gpu_check.cases_of(part)[::23]]
ALL = {part: gpu_check.cases_of(part) for part in gpu_check.PARTS if part not in ("speed", "warm", "launches")}


@sampled(("part", "name", "function"), CASES, 8, ids=[f"{part} {name}" for part, name, _ in CASES])
def test_some_cases(part, name, function):
    function(gpu_cases.Simulated(), np.random.default_rng(1))


@pytest.mark.parametrize(("name", "function"), list(gpu_units.cases()), ids=[name for name, _ in gpu_units.cases()])
def test_scalar_functions(name, function):
    function(gpu_cases.Simulated(), np.random.default_rng(1))


@pytest.mark.parametrize("part", ALL)
def test_every_case_has_a_name_of_its_own(part):
    names = [name for name, _ in ALL[part]]
    assert names and len(set(names)) == len(names)


def test_shares_are_whole():
    assert sum(share for share, _ in gpu_check.PARTS.values()) == pytest.approx(1)


def test_a_record_tells_wrong_from_broken(tmp_path):
    record = gpu_check.Record(tmp_path / "record.json")

    def wrong():
        raise AssertionError("3 of 4 wrong")

    record.attempt("good", lambda: "a note")
    record.attempt("wrong", wrong)
    record.attempt("broken", lambda: 1 / 0)
    written = json.loads((tmp_path / "record.json").read_text())
    assert [(f["case"], f["kind"]) for f in written["failures"]] == [("wrong", "wrong"), ("broken", "error")]
    assert "ZeroDivisionError" in written["failures"][1]["message"]
    assert written["cases"] == 3 and written["notes"]["good"] == "a note" and not written["done"]


def test_a_wrong_bit_is_seen():
    """The comparison of a case fails where a kernel's result differs in one bit."""
    device, rng = gpu_cases.Simulated(), np.random.default_rng(1)
    device.get = lambda array: np.bitwise_xor(array, np.uint8(1)) if array.dtype == np.uint8 else array
    _, function = gpu_check.cases_of("quantize")[0]
    with pytest.raises(AssertionError):
        function(device, rng)


def test_no_time_no_cases():
    record = gpu_check.Record()
    gpu_check.run_cases(record, gpu_cases.Simulated(), ALL["quantize"][:3], 1, deadline=0)
    assert record.cases == 0 and len(record.skipped) == 3


DONE = {"cases": 2, "failures": [], "skipped": [], "notes": {}, "results": {}, "done": True}


@pytest.mark.parametrize(
    ("part", "codes", "found", "tail", "status"),
    [
        ("quantize", [0, 0], [DONE, DONE], "", "passed"),
        ("quantize", [0, -11], [DONE, {"cases": 1}], "Segmentation fault", "failed"),
        ("quantize", [0, "timeout"], [DONE, DONE | {"done": False}], "", "failed"),
        ("memcheck", [gpu_check.FOUND], [DONE], "Invalid __global__ write", "failed"),
        ("memcheck", ["timeout"], [DONE | {"done": False}], "", "passed"),
        ("racecheck", [1], [DONE | {"failures": [{}]}], "Device not supported", "skipped"),
    ],
)
def test_summaries(part, codes, found, tail, status):
    found = [json.loads(json.dumps(one)) for one in found]
    assert gpu_check.combined(part, codes, found, [tail] * len(codes))["status"] == status


@pytest.mark.parametrize("part", gpu_check.PARTS)
def test_the_command_of_a_part_can_be_parsed(part, monkeypatch):
    monkeypatch.setattr(gpu_check, "find_sanitizer", lambda: "compute-sanitizer")
    options = gpu_check.parse(["--seed", "5", "--only", "mxfp8", "--target", "sm_100a", "--deferred"])
    command = gpu_check.command_of(options, part, "x.json", 9.7, (1, 3))
    parsed = gpu_check.parse(command[command.index("--part") :])
    expected = (part, (1, 3), 5, "mxfp8", 9)
    assert (parsed.part, parsed.share, parsed.seed, parsed.only, parsed.seconds) == expected
    assert (parsed.target, parsed.deferred) == ("sm_100a", True)
    assert command[0] == ("compute-sanitizer" if part in gpu_check.SANITIZERS else sys.executable)


NO_CARD, NO_EMULATOR = "torch sees no CUDA device", "CompilerMissingError: no compiler"


def test_without_any_gpu_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "missing_card", lambda: NO_CARD)
    monkeypatch.setattr(gpu_check, "missing_emulator", lambda: NO_EMULATOR)
    assert gpu_check.main(["--json", str(tmp_path / "g.json")]) == 0
    said = f"no GPU: {NO_CARD}; the software GPU: {NO_EMULATOR}"
    assert capsys.readouterr().out == f"{said}\n"
    assert json.loads((tmp_path / "g.json").read_text()) == {"gpu": False, "reason": said}


@pytest.mark.parametrize(
    ("given", "card", "emulator", "device", "said"),
    [
        ([], None, None, "cuda", "a card"),
        ([], NO_CARD, None, "emulated", f"the software GPU, sm_90; a card: {NO_CARD}"),
        (["--device", "cuda"], NO_CARD, None, None, f"no GPU: {NO_CARD}; the software GPU: not asked for"),
        (
            ["--device", "emulated", "--target", "sm_100a", "--deferred"],
            None,
            None,
            "emulated",
            "the software GPU, sm_100a, deferred and backwards; a card: not asked for",
        ),
    ],
)
def test_it_says_on_what_it_runs(given, card, emulator, device, said, monkeypatch):
    monkeypatch.setattr(gpu_check, "missing_card", lambda: card)
    monkeypatch.setattr(gpu_check, "missing_emulator", lambda: emulator)
    assert gpu_check.choose_device(gpu_check.parse(given)) == (device, said)


def test_the_whole_command_in_the_simulator(tmp_path):
    """Processes, shares, records and exit code of a run with one case a part."""
    command = [sys.executable, str(GPU / "gpu_check.py"), "--device", "simulated", "--parts", "calls,units"]
    command += ["--only", "amax", "--json", str(tmp_path / "g.json"), "--seconds", "60"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "g.json").read_text())
    assert written["ok"] and written["parts"]["calls"]["cases"] == 1 and "numpy" in written["environment"]


@pytest.mark.parametrize("layout", gpu_cases.LAYOUTS)
def test_tensors_keep_their_values_in_every_layout(layout):
    """`Torch.put` and `get` on the CPU."""
    pytest.importorskip("torch")
    device = gpu_cases.Torch()
    device.device = "cpu"
    for dtype in gpu_cases.DTYPES:
        x = gpu_cases.draw(np.random.default_rng(2), (6, 16), dtype)
        tensor = device.put(x, layout)
        assert device.get(tensor).tobytes() == x.tobytes() and tuple(tensor.shape) == x.shape
        assert tensor.is_contiguous() == (layout in ("plain", "misaligned"))
        assert (tensor.data_ptr() % 16 != 0) == (layout == "misaligned")


# --- launches ---------------------------------------------------------------------------------------


class FakeCore:
    """The part of `cuda.core` that the launcher uses; remembers what was launched, and on which devices."""

    def __init__(self):
        self.launched, self.made_current = [], []

    def Device(self, number):  # noqa: N802
        return SimpleNamespace(compute_capability=(9, 0))

    @contextmanager
    def device_scope(self, number):
        self.made_current.append(number)
        yield

    def LaunchConfig(self, **shape):  # noqa: N802
        return shape

    def launch(self, stream, config, kernel, *values):
        self.launched.append((stream, config, kernel, values))


@pytest.fixture
def launcher(monkeypatch):
    """A `Launcher` of device 0 on a fake driver; compiling takes a while and gives "kernel"."""
    from cuda_kernels import launch

    core, compiled = FakeCore(), []

    def compile_slowly(self, spec):
        time.sleep(0.02)
        compiled.append(spec)
        return "kernel"

    monkeypatch.setattr(launch, "cuda_core", lambda: core)
    monkeypatch.setattr(launch, "device_scope", core.device_scope)
    monkeypatch.setattr(launch, "explain_missing", nullcontext)
    monkeypatch.setattr(launch, "stream_of", lambda handle: handle)
    monkeypatch.setattr(launch.Launcher, "_compile", compile_slowly)
    made = launch.Launcher(0)
    made.compiled = compiled
    return made


SPEC = alone("three arguments", None, [pointer(np.float32), scalar(np.int32), scalar(np.float32)])


def test_a_launcher_converts_and_compiles_once(launcher):
    for _ in range(3):
        launcher.launch(SPEC, [64, 3, 0.5], (2, 1, 1), (256, 1, 1), 7)
    stream, config, kernel, values = launcher.core.launched[-1]
    assert (stream, config, kernel) == (7, {"grid": (2, 1, 1), "block": (256, 1, 1)}, "kernel")
    assert values == (64, np.int32(3), np.float32(0.5)) and [type(v) for v in values] == [int, np.int32, np.float32]
    assert launcher.compiled == [SPEC] and launcher.core.made_current == [0] * 3 and launcher.target == (9, 0)


def test_an_empty_grid_launches_nothing(launcher):
    launcher.launch(SPEC, [0, 0, 0.0], (0, 1, 1), (256, 1, 1), 0)
    assert not launcher.core.launched


def test_threads_share_a_kernel_and_each_has_its_device_current(launcher):
    def work():
        launcher.launch(SPEC, [64, 3, 0.5], (1, 1, 1), (32, 1, 1), 0)

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert launcher.compiled == [SPEC] and launcher.core.made_current == [0] * 5
    assert len(launcher.core.launched) == 5
