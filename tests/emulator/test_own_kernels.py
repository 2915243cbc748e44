"""Every kernel of this project, as it is compiled for a target, is code that the software GPU knows.

By default these are the kernels with NVFP4 for a B200, whose instructions they need: `test_gate.py` runs most kernels
on an H100's device and samples of them on others. With EVERY_TARGET=1 in the environment it is every kernel for each
target, which takes minutes if the disk has no PTX yet. Each target is a process of its own (`load_own_kernels.py`).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cuda_kernels.compile_report import TARGETS, architecture, catalogue

EVERYTHING = os.environ.get("EVERY_TARGET") == "1"
SCRIPT = Path(__file__).with_name("load_own_kernels.py")
ROOT = SCRIPT.parent.parent.parent


def loaded(target, part=""):
    """{name: what is unknown} of the kernels for a target whose names have `part`."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "0", "PYTHONPATH": path}
    command = [sys.executable, str(SCRIPT), target, part]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    if "missing" in found:
        pytest.skip(found["missing"])
    return found


@pytest.mark.parametrize("part", ["puzzle", "naive"])
def test_kernels_for_beginners(part):
    found = loaded("sm_90", part)
    assert len(found) >= 5
    assert found == dict.fromkeys(found)


@pytest.mark.full
@pytest.mark.sweep
@pytest.mark.parametrize("target", [architecture(target) for target in TARGETS] if EVERYTHING else ["sm_100a"])
def test_every_kernel(target):
    part = "" if EVERYTHING else "NVFP4"
    found = loaded(target, part)
    assert len(found) >= 2 * len([entry for entry in catalogue() if part in entry.name])
    assert found == dict.fromkeys(found)
