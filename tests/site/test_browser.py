"""The built site in a browser: nothing is cut at three widths, the console stays empty, search finds what is there.

Where no Chromium is on PATH, this is skipped. `make docs` builds the site and runs this.
"""

import functools
import re
import shutil
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

playwright = pytest.importorskip("playwright.sync_api")

SITE = Path(__file__).resolve().parents[2] / "build" / "docs"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium on PATH")

#: A phone, a laptop, a wide screen.
WIDTHS = (400, 1300, 1900)
PAGES = sorted(str(path.relative_to(SITE)) for path in SITE.rglob("*.html"))
#: Pages of sources are all made in one way: one of each kind of file.
SOURCES = [page for page in PAGES if page.startswith("source/")]
LOOKED_AT = [page for page in PAGES if page not in SOURCES] + [
    next(page for page in SOURCES if page.endswith(suffix)) for suffix in (".py.html", ".cpp.html") if SOURCES
]

#: What reaches beyond its box or the window; wide tables scroll by themselves.
CUT = """() => {
const width = document.documentElement.clientWidth, cut = [];
const name = element => element.tagName + " " + element.textContent.trim().slice(0, 40);
if (document.documentElement.scrollWidth > width) cut.push("the page is " + document.documentElement.scrollWidth);
for (const element of document.querySelectorAll("article pre"))
  if (element.scrollWidth > element.clientWidth + 1) cut.push("code: " + name(element));
for (const element of document.querySelectorAll("article :is(pre, img, p, li, dt, h1, h2, h3)")) {
  if (element.closest(".table-wrapper, .text_html")) continue;
  const box = element.getBoundingClientRect();
  if (box.width && box.right > width + 1) cut.push("beyond the window: " + name(element));
}
return cut;
}"""
#: Pictures that did not load.
MISSING_PICTURES = "[...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src)"
#: The least size of code on a screen, in pixels.
SMALLEST_CODE = """
Math.min(...[...document.querySelectorAll("article pre")].map(code => parseFloat(getComputedStyle(code).fontSize)))
"""
#: Luminance of the text and of what is behind it, 0 to 1: of the page, and of its first code.
LUMINANCES = """() => {
const luminance = colour => { const [r, g, b] = colour.match(/[\\d.]+/g).map(Number);
                              return (0.2126 * r + 0.7152 * g + 0.0722 * b) / 255; };
const of = (text, behind) => [getComputedStyle(text).color, getComputedStyle(behind).backgroundColor].map(luminance);
const code = document.querySelector("article .highlight");
return [of(document.querySelector("article p"), document.body), of(code.querySelector("pre"), code)];
}"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def address():
    """The site on a server of this process."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser, address):
    """An empty page, whose addresses begin at the site; `page.said` is what its console said."""
    with browser.new_context(base_url=address) as context:
        page = context.new_page()
        page.said = []
        page.on("console", lambda message: page.said.append(message.text))
        page.on("pageerror", lambda error: page.said.append(str(error)))
        yield page


def resize(page, width):
    page.set_viewport_size({"width": width, "height": 1000})


def test_no_page_is_cut_and_no_console_says_anything(page):
    faults = []
    for name in LOOKED_AT:
        page.goto(f"/{name}")
        for width in WIDTHS:
            resize(page, width)
            faults += [f"{name} at {width}: {cut}" for cut in page.evaluate(CUT)]
        faults += [f"{name}: no picture {url}" for url in page.evaluate(MISSING_PICTURES)]
        faults += [f"{name}: {message}" for message in page.said]
        page.said.clear()
    assert not faults, "\n".join(faults)


def test_what_is_cut_is_seen(page):
    """Code that does not wrap, a paragraph that is too wide, a script that fails."""
    page.goto("/docs/guide/mxfp8.html")
    resize(page, 400)
    page.evaluate("""() => {
        const code = document.querySelector("article pre");
        code.style.whiteSpace = "pre";
        code.style.fontSize = "20px";
        document.querySelector("article p").style.width = "900px";
        console.error("said");
    }""")
    cut = page.evaluate(CUT)
    assert any(fault.startswith("code: ") for fault in cut) and any("beyond the window" in fault for fault in cut)
    assert page.said == ["said"]


@pytest.mark.parametrize("width", [1300, 1900])
def test_code_is_large_enough(page, width):
    resize(page, width)
    for name in ("refops/oracle/README", "docs/guide/mxfp8", "docs/examples", "notebooks/04_mxfp8"):
        page.goto(f"/{name}.html")
        assert page.evaluate(SMALLEST_CODE) >= 9, name


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["docs/index", "notebooks/04_mxfp8"])
def test_light_and_dark(page, name, scheme):
    """As the reader's system asks for."""
    page.emulate_media(color_scheme=scheme)
    page.goto(f"/{name}.html")
    for text, behind in page.evaluate(LUMINANCES):
        assert (text > behind + 0.5) if scheme == "dark" else (behind > text + 0.5)


def test_search_finds_swizzle(page, address):
    """Typed on the front page; a result leads to the word."""
    resize(page, 1300)
    page.goto("/docs/index.html")
    page.fill("input[name=q]", "swizzle")
    page.press("input[name=q]", "Enter")
    playwright.expect(page.locator("#search-results")).to_contain_text(re.compile(r"found \d+ pages?"))
    results = page.locator("#search-results ul.search li > a")
    links = [address_of.get_attribute("href") for address_of in results.all()]
    found = {re.sub(r"[?#].*", "", link) for link in links}
    assert {"docs/guide/glossary.html", "docs/guide/mxfp8.html", "docs/reference/refops.html"} <= found
    results.first.click()
    playwright.expect(page.locator("article")).to_contain_text(re.compile("swizzle", re.IGNORECASE))
    assert not page.said


def test_links_of_the_front_page_are_alive(page, address):
    """From the root, which leads to it; test_site.py has the links of every page."""
    page.goto("/")
    page.wait_for_url("**/docs/index.html")
    links = page.evaluate("[...document.querySelectorAll('a[href]')].map(link => link.href.split('#')[0])")
    inside = {link for link in links if link.startswith(address)}
    assert len(inside) > 50
    for link in inside:
        assert page.request.get(link).ok, link
