"""The built site: all names are in it, no page asks the network for anything, every link leads somewhere.

`make docs` builds it and runs this.
"""

import html
import re
import sys
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path.append(str(TESTS / "docs"))

from reference_pages import PUBLIC, described, public_names  # noqa: E402

SITE = TESTS.parent / "build" / "docs"
PAGES = sorted(str(path.relative_to(SITE)) for path in SITE.rglob("*.html"))


def test_there_is_a_site():
    pages = ("index", "search", "docs/index", "docs/reference/refops", "docs/guide/numerical_policy", "docs/examples")
    others = (
        "CONTRIBUTING",
        "refops/oracle/README",
        "notebooks/README",
        "notebooks/04_mxfp8",
        "source/notebooks/plots.py",
    )
    assert {f"{page}.html" for page in (*pages, *others)} <= set(PAGES)


def test_nothing_is_a_download():
    assert not (SITE / "_downloads").exists()


#: A page of the reference -> the first names that it describes.
FIRST = {
    "oracle": ["refops.oracle.check", "refops.oracle.acceptable"],
    "refops": ["refops.quantize", "refops.activation_quantize"],
    "cuda_kernels": ["cuda_kernels.quantize", "cuda_kernels.activation_quantize"],
    "fuser": ["fuser.convert", "fuser.compare"],
    "fuser_ops": ["fuser.ops.Sequential"],
    "fuser_recipe": ["fuser.recipe.DelayedScaling"],
    "golden": ["refops.golden.write_golden", "refops.golden.read_golden"],
}


@pytest.mark.parametrize("page", FIRST)
def test_the_reference_opens_with_the_calls_that_people_use(page):
    text = (SITE / "docs" / "reference" / f"{page}.html").read_text()
    described = re.findall(r'<dt class="sig [^"]*" id="([^"]*)">', text)
    assert [name for name in described if name in FIRST[page]] == FIRST[page] and described[0] == FIRST[page][0]
    table = text[: text.index('<dt class="sig ')]
    assert all(f'href="#{name}"' in table for name in FIRST[page])


def test_the_inventory_has_every_public_name():
    inventory = pytest.importorskip("sphinx.util.inventory").InventoryFile
    names = {
        name
        for kind, objects in inventory.loads((SITE / "objects.inv").read_bytes(), uri="").data.items()
        if kind.startswith("py:")
        for name in objects
    }
    wanted = {f"{module}.{name}" for module, name in described() if module in PUBLIC and name in public_names(module)}
    missing = sorted(wanted - names)
    assert not missing


def signatures():
    """name -> signature as text, of every object of the reference."""
    found = {}
    for page in (SITE / "docs" / "reference").glob("*.html"):
        for name, inside in re.findall(r'<dt class="sig [^"]*" id="([^"]*)">(.*?)</dt>', page.read_text(), re.DOTALL):
            found[name] = " ".join(html.unescape(re.sub(r"<[^>]+>", "", inside)).split())
    return found


def test_signatures_are_readable():
    """Names as the source has them, not what Python makes of them; long lists of parameters stand one in a line."""
    found = signatures()
    assert len(found) > 300 and "x: ArrayLike" in found["refops.quantize"]
    assert "fp8_dtype: DType" in found["fuser.Float8Quantizer"]
    for name, text in found.items():
        raw = re.search(
            r"~\w|_Buffer|_SupportsArray|_DTypeDict|<(factory|class|function|object)|\*args, \*\*kwargs", text
        )
        assert not raw, f"{name}: {raw[0]}"
        parameters = re.split(r", (?=\*?\*?\w+: )", text)
        assert max(map(len, parameters)) <= 160 and len(parameters) <= 24, f"{name}: {text}"


@cache
def anchors(path):
    return set(re.findall(r'\bid="([^"]+)"', path.read_text()))


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_lead_somewhere(page):
    path = SITE / page
    for target in re.findall(r'\b(?:href|src)="([^"]+)"', path.read_text()):
        if target.startswith(("https://", "http://", "mailto:", "data:", "javascript:")):
            continue
        name, _, fragment = unquote(target.replace("&amp;", "&")).partition("#")
        file = (path.parent / name.split("?")[0]).resolve() if name else path
        assert file.exists(), f"{page} links to {target}"
        if fragment and file.suffix == ".html":
            assert fragment in anchors(file), f"{page} links to {target}"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_loads_nothing_from_the_network(page):
    """Links may lead out; scripts, styles, fonts and pictures are the site's own."""
    loading = r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="((?:https?:)?//[^"]+)"'
    assert not re.findall(loading, (SITE / page).read_text())


def test_styles_load_nothing_from_the_network():
    for path in SITE.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//", path.read_text()), path
