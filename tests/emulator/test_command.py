"""`python -m cuda_kernels.emulator SCRIPT`: a script that knows nothing of the software GPU runs on it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NUMBA = """
import sys
import numpy as np
from numba import cuda

@cuda.jit
def add(x, y, n):
    i = cuda.grid(1)
    if i < n:
        y[i] = x[i] + 1

size = int(sys.argv[1])
x = cuda.to_device(np.arange(100, dtype=np.float32))
y = cuda.device_array_like(x)
add[1, 128](x, y, size)
print(__name__, sys.argv[1:], y.copy_to_host()[-1], len(cuda.gpus), cuda.get_current_device().compute_capability)
"""
CORE = """
import ctypes
import cuda.core as core

SOURCE = 'extern "C" __global__ void add(int* x, int n) { int i = threadIdx.x; if (i < n) x[i] = x[i] + i; }'
device = core.Device()
device.set_current()
stream = device.create_stream()
x = device.allocate(128, stream=stream)
x.fill(0, stream=stream)
architecture = "".join(map(str, device.compute_capability))
program = core.Program(SOURCE, code_type="c++", options=core.ProgramOptions(arch=f"sm_{architecture}"))
kernel = program.compile("ptx").get_kernel("add")
core.launch(stream, core.LaunchConfig(grid=1, block=32), kernel, x, ctypes.c_int(32))
copy = core.LegacyPinnedMemoryResource().allocate(128)
copy.copy_from(x, stream=stream)
stream.sync()
print((ctypes.c_int * 32).from_address(int(copy.handle))[31])
"""


def command(*arguments, **environment):
    """(exit code, output, errors) of the command."""
    options = {"capture_output": True, "text": True, "timeout": 200, "cwd": ROOT}
    made = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "cuda_kernels.emulator", *arguments],
        env=os.environ | environment,
        **options,
    )
    return made.returncode, made.stdout, made.stderr


@pytest.fixture
def script(tmp_path):
    """Return write(text), which writes a script and returns its path."""

    def write(text):
        path = tmp_path / "script.py"
        path.write_text(text)
        return str(path)

    return write


def test_script_of_numba(script):
    pytest.importorskip("numba_cuda")
    code, output, errors = command(script(NUMBA), "100", "--flag")
    assert code == 0, errors
    assert output == "__main__ ['100', '--flag'] 100.0 4 ComputeCapability(major=9, minor=0)\n"


def test_options(script):
    pytest.importorskip("numba_cuda")
    options = ("--target", "sm_100a", "--target", "sm_80", "--deferred", "--backward", "--perturb", "3", "--contract")
    code, output, errors = command(*options, "--uninitialised", "--counts", script(NUMBA), "100")
    assert code == 0, errors
    assert output == "__main__ ['100'] 100.0 2 ComputeCapability(major=10, minor=0)\n"
    head, line = errors.splitlines()[-2:]
    assert head.split()[:3] == ["launches", "blocks", "warp"]
    assert line.split()[:2] == ["1", "1"]
    assert "add" in line


def test_fault_is_the_scripts_exception(script):
    pytest.importorskip("numba_cuda")
    code, output, errors = command("--counts", script(NUMBA), "120")
    assert (code, output) == (1, "")
    assert "invalid read of 4 bytes" in errors.splitlines()[-1]
    assert "thread 100: ld.global" in errors.splitlines()[-1]
    assert "launches" in errors  # counted all the same


def test_script_of_cuda_core(script):
    pytest.importorskip("cuda.core")
    code, output, errors = command("--target", "sm_80", script(CORE))
    assert code == 0, errors
    assert output == "31\n"


def test_module_and_exit_code(tmp_path):
    (tmp_path / "some_module.py").write_text("import sys; print(__name__, sys.argv[1:]); raise SystemExit(5)")
    code, output, _ = command("-m", "some_module", "a", PYTHONPATH=os.pathsep.join((str(tmp_path), str(ROOT))))
    assert (code, output) == (5, "__main__ ['a']\n")


def test_unknown_target(script):
    code, _, errors = command("--target", "sm_91", script(NUMBA))
    assert code == 2
    assert "invalid choice: 'sm_91'" in errors


TOO_LATE = """
import ctypes
from cuda_kernels.emulator import load, loading
ctypes.CDLL(str(loading.find_linker()))
load()
"""


def test_load_comes_before_cuda_is_used(script):
    pytest.importorskip("numba_cuda")
    made = subprocess.run(
        [sys.executable, script(TOO_LATE)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert made.returncode == 1
    assert "the software GPU must be loaded before" in made.stderr.splitlines()[-1]
