"""`gpu_check.py` on the software GPU: processes of its own, which must load it before anything looks for a driver."""

import json
import subprocess
import sys
from pathlib import Path

COMMAND = Path(__file__).resolve().parents[1] / "gpu" / "gpu_check.py"
#: Text of a name in each part -> how many cases have it.
NAMES = {"calls": ("amax", 1), "units": ("exact", 1)}


def test_parts_run_and_pass(tmp_path):
    for part, (text, count) in NAMES.items():
        record = tmp_path / f"{part}.json"
        options = ["--device", "emulated", "--target", "sm_100a", "--deferred", "--parts", part, "--only", text]
        command = [sys.executable, str(COMMAND), *options, "--json", str(record), "--seconds", "60"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "runs on the software GPU, sm_100a, deferred and backwards" in done.stdout
        written = json.loads(record.read_text())
        assert written["ok"] and written["parts"][part]["cases"] == count
