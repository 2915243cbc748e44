"""What `make notebooks` notices: an error, a warning, a slow cell, and outputs that are no longer the committed ones.

A test keeps the outputs of a small notebook in a folder of its own, and changes one thing.
"""

import ast
import asyncio
import base64
import importlib.util
import io
import json
import re
import shutil
from pathlib import Path

import matplotlib
import nbformat
import numpy as np
import pytest
from matplotlib import image
from matplotlib.font_manager import FontProperties
from nbformat.v4 import new_code_cell, new_notebook

pytestmark = pytest.mark.full
NOTEBOOKS = Path(__file__).resolve().parent.parent.parent / "notebooks"
FIGURE = """
from matplotlib import pyplot as plt
HEIGHT = 1
plt.figure(figsize=(2, 1))
plt.plot([0, HEIGHT, 3]);
""".strip()


def load(name):
    """A module of the notebooks, whose folder is no package."""
    spec = importlib.util.spec_from_file_location(name, NOTEBOOKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


execute = load("execute")


def check(path, write):
    """(seconds, problems) of one notebook."""
    return asyncio.run(execute.check(path, write))


def tagged(source, *tags):
    """A code cell with tags."""
    return new_code_cell(source, metadata={"tags": list(tags)})


@pytest.fixture
def notebook(tmp_path):
    """`write(*cells)` -> path of a notebook whose first cell draws its picture."""

    def write(*cells, name="notebook.ipynb"):
        path = tmp_path / "notebooks" / name
        path.parent.mkdir(exist_ok=True)
        nbformat.write(new_notebook(cells=[tagged(FIGURE, "picture"), *cells]), path)
        return path

    return write


def problems_after(path, change):
    """Change the JSON text of a notebook that was run, and check it."""
    path.write_text(change(path.read_text()))
    return check(path, write=False)[1]


def run_once(path):
    """Keep the outputs of a notebook; they are found again."""
    assert check(path, write=True)[1] == []
    assert check(path, write=False)[1] == []
    return path


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Path of a notebook that was run: its picture, and a cell that prints 3."""
    folder = tmp_path_factory.mktemp("kept") / "notebooks"
    folder.mkdir()
    cells = [tagged(FIGURE, "picture"), new_code_cell("print(1 + 2)")]
    nbformat.write(new_notebook(cells=cells), folder / "notebook.ipynb")
    return run_once(folder / "notebook.ipynb")


@pytest.mark.parametrize(
    "old, new, problem",
    [
        ('"3\\n"', '"4\\n"', "cell 2 is stale in its stdout"),
        ("HEIGHT = 1", "HEIGHT = 2", "cell 1 is stale in its image/png"),
        ("print(1 + 2)", "1 + 2", "cell 2 is stale: stdout committed, text/plain shown"),
        ("print(1 + 2)", "raise ValueError(5)", "fails"),
        ("print(1 + 2)", "import warnings; warnings.warn('old'); print(3)", "cell 2 writes to stderr"),
        ("print(1 + 2)", "import os; print(os.getcwd())", "cell 2 shows a path of this machine"),
    ],
)
def test_one_change_is_noticed(kept, tmp_path, old, new, problem):
    def change(text):
        assert old in text
        return text.replace(old, new)

    shutil.copytree(kept.parent, tmp_path / "notebooks")
    found = problems_after(tmp_path / "notebooks" / kept.name, change)
    assert found and found[0].startswith(problem), found


def test_what_varies_is_compared_in_kind_alone(notebook):
    path = run_once(notebook(tagged("import time\nprint(time.time())", "varies")))
    assert "stale" in problems_after(path, lambda text: text.replace("print(time.time())", "time.time()"))[0]


def test_an_error_on_purpose_is_an_output(notebook):
    path = run_once(notebook(tagged("raise ValueError(5)", "raises-exception")))
    assert "ValueError: 5" in problems_after(path, lambda text: text.replace("ValueError(5)", "ValueError(6)"))[0]


@pytest.mark.parametrize(
    "seconds, problems", [([59], []), ([70, 59], []), ([70, 70], ["takes 70 s, more than 60"])], ids=str
)
def test_a_notebook_that_is_slow_twice_is_a_problem(notebook, monkeypatch, seconds, problems):
    """Once is allowed: it may have compiled kernels. The clock is ours, the notebook was run before."""
    path = notebook(new_code_cell("1"))
    assert check(path, write=True)[1] == []
    runs = iter(seconds)

    async def ran(path):
        return nbformat.read(path, as_version=4), next(runs), []

    monkeypatch.setattr(execute, "execute", ran)
    assert check(path, write=False) == (seconds[-1], problems)
    assert next(runs, None) is None


def test_a_failing_notebook_is_not_written(notebook):
    path = notebook(new_code_cell("raise ValueError(5)"))
    before = path.read_text()
    assert check(path, write=True)[1][0].startswith("fails")
    assert path.read_text() == before and not (path.parent / "pictures").exists()


def test_two_pictures_or_none_are_a_problem(notebook):
    path = notebook(tagged(FIGURE, "picture"))
    assert check(path, write=True)[1] == ["has no figure of a cell tagged picture, or several"]


def test_a_figure_may_differ_by_a_last_bit_alone():
    def png(level):
        stream = io.BytesIO()
        image.imsave(stream, np.full((2, 2, 3), level, np.uint8), format="png")
        return base64.b64encode(stream.getvalue()).decode()

    assert execute.same_part("image/png", png(100), png(102))
    assert not execute.same_part("image/png", png(100), png(103))


def test_command_line(monkeypatch, notebook, capsys):
    path = notebook(new_code_cell("1"), name="00_one.ipynb")
    monkeypatch.setattr(execute, "FOLDER", path.parent)
    assert execute.main([]) == 1 and "FAILED" in capsys.readouterr().out
    assert execute.main(["--write"]) == 0
    assert execute.main(["00"]) == 0 and "ok" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        execute.main(["7"])
    assert stop.value.code == 2


# --- the notebooks themselves -----------------------------------------------------------------------


def committed():
    """Paths of the notebooks."""
    return sorted(NOTEBOOKS.glob("*.ipynb"))


def test_the_index_has_every_notebook_and_its_picture():
    index = (NOTEBOOKS / "README.md").read_text()
    names = re.findall(r"\((\d\d_\w+\.ipynb)\)", index)
    assert sorted(set(names)) == [path.name for path in committed()]
    for path in committed():
        assert f"pictures/{path.stem}.png" in index and (NOTEBOOKS / "pictures" / f"{path.stem}.png").exists()


@pytest.mark.parametrize("path", committed(), ids=lambda path: path.stem)
def test_cells_are_short_and_were_run(path):
    """At most 25 lines; run from top to bottom; no path of a machine; the first cell is the title."""
    cells = json.loads(path.read_text())["cells"]
    assert "".join(cells[0]["source"]).startswith(f"# {path.name[:2]} ")
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    for cell in code:
        folded = cell["metadata"].get("jupyter", {}).get("source_hidden")
        assert folded or len("".join(cell["source"]).splitlines()) <= 25


def code_cells():
    """(path, cell) for each code cell of each notebook."""
    return [(path, cell) for path in committed() for _, cell in execute.code_cells(nbformat.read(path, as_version=4))]


def has_figure(cell):
    return any("image/png" in execute.contents(output) for output in cell.outputs)


def test_cells_that_draw_are_folded_and_those_to_change_are_not():
    """Folded in JupyterLab and on the site, which read different marks."""
    for path, cell in code_cells():
        folded = cell.metadata.get("jupyter", {}).get("source_hidden", False)
        assert folded == execute.is_tagged(cell, "hide-input"), f"{path.name}: {cell.source}"
        assert folded or not has_figure(cell), f"{path.name}: {cell.source}"
        assert not folded or "change me" not in cell.source, f"{path.name}: {cell.source}"


def test_each_figure_has_a_description_of_its_own():
    """The site takes it from the cell; the index says the same of the figure that stands for the notebook."""
    index = (NOTEBOOKS / "README.md").read_text()
    described = []
    for path, cell in code_cells():
        if has_figure(cell):
            described.append(cell.metadata["mystnb"]["image"]["alt"])
            shown = f'<img src="pictures/{path.stem}.png" width="420" alt="{described[-1]}">'
            assert (shown in index) == execute.is_tagged(cell, "picture"), f"{path.name}: {described[-1]}"
    assert len(described) > 50 and all(described) and len(set(described)) == len(described)


def test_no_text_of_a_figure_is_below_8_points():
    """Neither what a cell asks for, nor what the notebooks' settings give, nor the picture of accesses."""
    drawing = [NOTEBOOKS / "plots.py", NOTEBOOKS.parent / "cuda_kernels" / "accesses.py"]
    for source in [path.read_text() for path in drawing] + [cell.source for _, cell in code_cells()]:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.keyword) and node.arg in ("fontsize", "labelsize", "titlesize", "size"):
                assert not isinstance(node.value, ast.Constant) or node.value.value >= 8, ast.unparse(node)
    with matplotlib.rc_context():
        load("plots")
        names = [name for name in matplotlib.rcParams if re.fullmatch(r"font\.size|.*\.(label|title|font)size", name)]
        sizes = {name: FontProperties(size=matplotlib.rcParams[name]).get_size_in_points() for name in names}
    assert len(sizes) > 6 and min(sizes.values()) >= 8, sizes
