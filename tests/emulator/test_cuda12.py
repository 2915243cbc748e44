"""A sample of the gate with the wheels of CUDA 12: their NVVM, their nvJitLink, on the same software GPU.

The environment of the tests has the wheels of CUDA 13, and only one of the two fits into an environment. So one is made
here, with what `pip install '.[cuda12]'` would install. Two processes run in it, one for each target.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import gate
import pytest

from cuda_kernels.emulator import build

ROOT = Path(__file__).resolve().parents[2]
#: The last toolkit of CUDA 12, whose NVVM knows sm_100a, with the linker of the same release.
PACKAGES = ("numba-cuda[cu12]", "cuda-toolkit==12.9.2.0", "nvidia-nvjitlink-cu12==12.9.86")
#: What the packages of this project import.
MORE = ("ml_dtypes", "numba", "numpy", "rich", "safetensors")
#: The PTX that this toolkit writes; that of CUDA 13 begins at 9.0.
PTX = "8.8"
TARGETS = ("sm_90", "sm_100a")
#: Each so many-th case of the gate.
EVERY = 160


@pytest.fixture
def python(tmp_path):
    """Interpreter of a new environment with the wheels of CUDA 12; it is removed after the test, for it is large.

    Skips the test where they cannot be fetched, except in CI.
    """
    folder = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    options = ["--quiet", "--no-compile", "--retries", "1", "--constraint", str(ROOT / "constraints.txt")]
    command = [sys.executable, "-m", "pip", "--python", str(folder), "install", *options, *PACKAGES, *MORE]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr[-500:]]
        give_up = pytest.fail if os.environ.get("CI") else pytest.skip
        give_up(f"the wheels of CUDA 12 cannot be installed here: {said[-1]}")
    yield folder / "bin" / "python"
    shutil.rmtree(folder)


def start(python, target, caches):
    """Start the sample of the gate on a target; its PTX is new, the software GPU is that of this process."""
    libraries = build.libraries()
    shutil.copytree(libraries, caches / "cuda_kernels" / libraries.name)
    dropped = ("NUMBA_ENABLE_CUDASIM", "CUDA_HOME", "CUDA_PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    given = {"NUMBA_CACHE_DIR": str(caches), "PYTHONPATH": str(ROOT)}
    command = [str(python), gate.__file__, "--target", target, "--every", str(EVERY)]
    return subprocess.Popen(command, env=kept | given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def libraries_of(environment, caches):
    """The libraries that a process of `start` must have loaded: the compiler, the linker, and the shim before it."""
    (packages,) = environment.resolve().glob("lib/python3*/site-packages/nvidia")
    (shim,) = caches.resolve().glob("cuda_kernels/emulator-*/libnvJitLink.so.12")
    return {str(packages / "cuda_nvcc/nvvm/lib64/libnvvm.so"), str(packages / "nvjitlink/lib" / shim.name), str(shim)}


@pytest.mark.full
@pytest.mark.timeout(600)
def test_gate_with_the_compiler_and_the_linker_of_cuda_12(python, tmp_path):
    running = {target: start(python, target, tmp_path / target) for target in TARGETS}
    outputs = {target: process.communicate() for target, process in running.items()}
    for target, (output, errors) in outputs.items():
        assert output, errors
        found = json.loads(output)
        assert found["failures"] == {}, target
        assert found["cases"] == len(gate.sample(EVERY))
        assert found["ptx"] == [PTX]
        assert set(found["libraries"]) == libraries_of(python.parents[1], tmp_path / target)
