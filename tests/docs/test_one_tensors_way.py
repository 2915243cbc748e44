"""The pictures of one tensor's way have the numbers that `refops` computes, and text that can be read."""

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import refops

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "docs"))

import one_tensors_way  # noqa: E402

PAGE = ROOT / "docs" / "guide" / "one_tensors_way.md"
#: Pixels of CSS to the point.
PIXELS = 4 / 3


@pytest.fixture(scope="module")
def way():
    return one_tensors_way.follow()


def words(name):
    """The text of a committed picture."""
    root = ElementTree.parse(one_tensors_way.FOLDER / name).getroot()
    return [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]


def test_pictures_are_up_to_date(way):
    for name, draw in one_tensors_way.PICTURES.items():
        assert (one_tensors_way.FOLDER / name).read_text(encoding="utf-8") == draw(way), f"{name}: run `make tables`"


def test_numbers_of_the_pictures_are_the_references():
    """Computed here from the arrays, not by the way that draws them."""
    tensors = load_file(ROOT / "tests" / "data" / "minilm_ffn.safetensors")
    x, w = tensors["layer3.ffn.input"][:128, :128], tensors["layer3.ffn.up.weight"][:128, :128]
    q, qw = (refops.quantize(tensor, refops.MXFP8Scaling(refops.E4M3)) for tensor in (x, w))
    byte, code = int(q.rowwise_scale_inv[37, 2]), int(q.rowwise_data[37, 65])
    amax = float(np.abs(x[37, 64:96].astype(np.float32)).max())
    assert f"amax {amax:g}" in words("way_1_block.svg")
    assert f"stored: {byte} = 0x{byte:02X} (E8M0), with the exponent {byte - 127} + 127" in words("way_2_scale.svg")
    bits = [word for word in words("way_3_code.svg") if word in ("0", "1")]
    assert int("".join(bits), 2) == code
    back = float(refops.dequantize(q)[37, 65])
    assert any(f"= {back:g}, off by {back - float(x[37, 65]):.2g}" in word for word in words("way_3_code.svg"))
    assert f"[37, 2] = 0x{byte:02X}" in words("way_4_layout.svg")
    marked = np.zeros((128, 4), np.uint8)
    marked[37, 2] = 1
    place = int(refops.swizzle(marked).argmax())
    assert f"32 lines of 16 bytes: [37, 2] is byte {place}" in words("way_5_swizzle.svg")
    y = refops.gemm(qw, q, "blackwell", out_dtype=np.float32)
    shown = words("way_6_product.svg")
    assert f"{y[37, 1]:.6f}" in shown
    terms = [float(word) for word in shown if re.fullmatch(r"-?0\.\d{6}", word)][:4]
    assert sum(terms) == pytest.approx(float(y[37, 1]), abs=4 * 0.5e-6)  # each is shown with six digits


def test_the_terms_sum_to_the_result(way):
    """Exact sums of the blocks' products, by their scales; a Blackwell keeps enough bits for float32's here."""
    total = sum(value * 2.0 ** (first + second) for value, first, second in way.terms)
    assert np.float32(total) == pytest.approx(way.result, rel=2.0**-22)


def test_the_tile_has_every_scale_once(way):
    assert sorted(way.places) == list(range(512))


@pytest.mark.parametrize("name", one_tensors_way.PICTURES)
def test_text_is_inside_and_large_enough(name):
    root = ElementTree.parse(one_tensors_way.FOLDER / name).getroot()
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    for element in root.iter("{http://www.w3.org/2000/svg}text"):
        size, x, y = (float(element.attrib[key]) for key in ("font-size", "x", "y"))
        assert size / PIXELS >= 8, element.text
        room = {"start": width - x, "end": x, "middle": 2 * min(x, width - x)}[element.attrib["text-anchor"]]
        # 0.58 em is more than the mean width of Helvetica's letters
        assert 0.58 * size * len(element.text) <= room and size <= y <= height, element.text


def test_the_page_shows_every_picture():
    shown = re.findall(r"!\[([^\]]+)\]\(\.\./pictures/([\w.]+)\)", PAGE.read_text(encoding="utf-8"))
    assert sorted(name for _, name in shown) == sorted(one_tensors_way.PICTURES)
    assert len({alternative for alternative, _ in shown}) == len(shown)
