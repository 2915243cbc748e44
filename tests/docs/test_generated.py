"""The generated parts of README and of the guide are those of the code and of the committed measurements."""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "docs"))

import capabilities  # noqa: E402
import generate  # noqa: E402

from declared_scalings import WITHOUT_KERNELS, declared  # noqa: E402
from refops import ACTIVATIONS  # noqa: E402
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


#: tests/simulated/test_simulated_calls.py has the simulated kernels.
IN_THIS_PROCESS = ("refops", "host", "torch", "jax")


@pytest.fixture(scope="module", params=IN_THIS_PROCESS)
def backend(request):
    """(what the table says of a backend, what has its calls)"""
    pytest.importorskip({"host": "numba"}.get(request.param, request.param))
    told = json.loads(capabilities.RESULTS.read_text())[request.param]
    return told, capabilities.library_of(request.param)


@pytest.mark.check
@pytest.mark.parametrize("scaling", ["none", *SCALINGS])
def test_operations_are_right_where_the_table_has_them(backend, scaling):
    """Each operation once with each scaling on each backend, called and judged."""
    told, library = backend
    settings = SCALINGS[scaling].scaling if scaling in SCALINGS else None
    assert capabilities.offered_operations(library, settings) == told["scalings"][scaling]


@pytest.mark.check
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_right_where_the_table_has_them(backend, name):
    """Value and gradient in every dtype, called and judged."""
    told, library = backend
    assert capabilities.offered(capabilities.evaluate, library, name) == (name in told["activations"])


def test_table_has_every_scaling_and_backend():
    found = json.loads(capabilities.RESULTS.read_text())
    assert set(found) == set(capabilities.BACKENDS) and set(capabilities.TITLES) == {"none", *SCALINGS}
    table = capabilities.table(found)
    assert all(title in table for title in (*capabilities.TITLES.values(), *capabilities.BACKENDS.values()))
    found["host"]["scalings"]["mxfp8"].remove("gradient")
    found["jax"]["scalings"]["current"] = []
    assert "all but gradient + bias gradient + cast" in capabilities.table(found) != table


def test_a_row_that_was_not_measured_names_the_command(monkeypatch, tmp_path, capsys):
    found = json.loads(capabilities.RESULTS.read_text())
    del found["torch"]["scalings"]["mxfp4"]
    monkeypatch.setattr(capabilities, "RESULTS", tmp_path / "capabilities.json")
    capabilities.RESULTS.write_text(json.dumps(found))
    monkeypatch.setattr(sys, "argv", ["generate.py", "--write"])
    for program in (generate, capabilities):
        with pytest.raises(SystemExit):
            program.main()
        assert "docs/capabilities.py --write mxfp4 measures what it lacks" in capsys.readouterr().err
        monkeypatch.setattr(sys, "argv", ["capabilities.py"])


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


@pytest.mark.parametrize("backend", IN_THIS_PROCESS)
def test_what_kernels_cannot_make_is_not_offered(backend):
    """`make tables` has "-" there."""
    pytest.importorskip({"host": "numba"}.get(backend, backend))
    library = capabilities.library_of(backend)
    with declared():
        offered = capabilities.offered_operations(library, WITHOUT_KERNELS)
    assert offered == (capabilities.operations_of(WITHOUT_KERNELS) if backend == "refops" else [])
