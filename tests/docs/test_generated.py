"""The generated parts of README and of the guide are those of the code and of the committed measurements."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "docs"))

import capabilities  # noqa: E402
import generate  # noqa: E402

from refops.survey import SCALINGS  # noqa: E402


def test_documents_are_up_to_date():
    documents = generate.documents()
    assert ROOT / "README.md" in documents
    for path in documents:
        text = path.read_text(encoding="utf-8")
        assert generate.generated(text) == text, f"{path.name}: run `make tables`"


def test_every_part_is_used():
    texts = "".join(path.read_text(encoding="utf-8") for path in generate.documents())
    assert set(re.findall(r"<!-- generated: (\w+) -->", texts)) == set(generate.PARTS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- generated: nonsense -->\n<!-- end -->", "no part is called nonsense"),
        ("<!-- generated: activations -->\n", "no <!-- end -->"),
    ],
)
def test_parts_that_cannot_be_made(text, message):
    with pytest.raises(ValueError, match=message):
        generate.generated(text)


def test_the_counts_of_fuzzing_are_those_measured():
    counts = json.loads((ROOT / "tests/fuzz/results/fuzz.json").read_text())
    assert counts["failures"] == counts["not_run"] == 0
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ("cases", "results", "documented_errors"):
        assert f"{counts[name]:,}".replace(",", " ") in readme, name


# --- what the backends offer ------------------------------------------------------------------------


def measured(backend, **variables):
    command = [sys.executable, "docs/capabilities.py", "--backend", backend]
    run = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("backend", ["refops", "host", "torch", "jax"])
def test_backends_offer_what_the_table_says(backend):
    """The simulated kernels' column is measured by tests/simulated/test_simulated_calls.py."""
    pytest.importorskip({"host": "numba"}.get(backend, backend))
    assert measured(backend) == json.loads(capabilities.RESULTS.read_text())[backend]


def test_table_has_every_scaling_and_backend():
    found = json.loads(capabilities.RESULTS.read_text())
    assert set(found) == set(capabilities.BACKENDS) and set(capabilities.TITLES) == {"none", *SCALINGS}
    table = capabilities.table(found)
    assert all(title in table for title in (*capabilities.TITLES.values(), *capabilities.BACKENDS.values()))
    found["host"]["scalings"]["mxfp8"].remove("gradient")
    found["jax"]["scalings"]["current"] = []
    assert "all but gradient + bias gradient + cast" in capabilities.table(found) != table


class OneBitOff:
    """refops with one wrong bit in the codes."""

    def __getattr__(self, name):
        return getattr(capabilities.refops, name)

    def quantize(self, x, scaling, **copies):
        q = capabilities.refops.quantize(x, scaling, **copies)
        q.rowwise_data.flat[7] ^= 1
        return q


def test_a_wrong_bit_is_no_refusal():
    scaling = SCALINGS["mxfp8"].scaling
    with pytest.raises(capabilities.WrongResultError, match="rowwise_data"):
        capabilities.offered(lambda: capabilities.quantize(OneBitOff(), scaling))
