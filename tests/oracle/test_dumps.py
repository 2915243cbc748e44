"""`refops.oracle.dumps`: which scales, other than those asked for, an array of a wrong shape may hold.

Each case has a tensor of (M, K) = (256, 512) but where it says otherwise; the shapes are counted by hand.
"""

import numpy as np
import pytest
from reference_calls import E4M3, MXFP8

import refops
from refops.oracle.dumps import fit, other_scales
from refops.oracle.operation import quantized_slots

CURRENT = refops.CurrentScaling(E4M3)
LINES = refops.BlockScaling(E4M3, block_dim=1)
SQUARES = refops.BlockScaling(E4M3, block_dim=2)
NVFP4 = refops.NVFP4Scaling()
NVFP4_2D = refops.NVFP4Scaling(two_d=True)

#: (scaling, direction, shape of the array, what is said of it).
WRONG_SCALES = [
    # One scale a tensor: the scales of blocks may stand in either order.
    (CURRENT, "rowwise", (256, 16), "scales of blocks of 32"),
    (CURRENT, "rowwise", (16, 256), "scales of blocks of 32"),
    (CURRENT, "columnwise", (512, 2), "scales of blocks of 128"),
    (CURRENT, "columnwise", (2, 4), "scales of blocks of 128x128"),
    (CURRENT, "columnwise", (1, 1), ""),
    # MXFP8 stores (M, K / 32) and (M / 32, K).
    (MXFP8, "rowwise", (16, 256), "transposed scales"),
    (MXFP8, "rowwise", (8, 512), "columnwise scales"),
    (MXFP8, "rowwise", (256, 32), "scales of blocks of 16"),
    (MXFP8, "rowwise", (8, 16), "scales of blocks of 32x32"),
    (MXFP8, "columnwise", (512, 8), "transposed scales"),
    (MXFP8, "columnwise", (256, 16), "rowwise scales"),
    (MXFP8, "columnwise", (16, 512), "scales of blocks of 16"),
    (MXFP8, "columnwise", (512, 16), "transposed scales of blocks of 16"),
    (MXFP8, "columnwise", (256, 100), ""),
    # 1x128 stores (K / 128, M) and (M / 128, K).
    (LINES, "rowwise", (256, 4), "transposed scales"),
    (LINES, "rowwise", (2, 512), "columnwise scales"),
    (LINES, "rowwise", (16, 256), "scales of blocks of 32"),
    (LINES, "rowwise", (4, 2), "scales of blocks of 128x128"),
    (LINES, "columnwise", (512, 2), "transposed scales"),
    (LINES, "columnwise", (4, 256), "rowwise scales"),
    # 128x128 stores (M / 128, K / 128) and (K / 128, M / 128), the last dimension padded to 4.
    (SQUARES, "rowwise", (4, 2), "transposed scales"),
    (SQUARES, "rowwise", (256, 4), "scales of blocks of 128"),
    (SQUARES, "rowwise", (4, 8), "scales of blocks of 64x64"),
    (SQUARES, "columnwise", (2, 4), "transposed scales"),
    (SQUARES, "columnwise", (512, 2), "scales of blocks of 128"),
    (SQUARES, "columnwise", (512, 4), "scales of blocks of 64"),  # and of 128, padded: the smaller is named
    (SQUARES, "columnwise", (8, 4), "scales of blocks of 64x64"),
    # NVFP4 stores (M, K / 16) and (K, M / 16), whether its blocks are lines or squares.
    *((scaling, "rowwise", (32, 256), "transposed scales") for scaling in (NVFP4, NVFP4_2D)),
    *((scaling, "rowwise", (512, 16), "columnwise scales") for scaling in (NVFP4, NVFP4_2D)),
    *((scaling, "columnwise", (16, 512), "transposed scales") for scaling in (NVFP4, NVFP4_2D)),
    *((scaling, "columnwise", (256, 32), "rowwise scales") for scaling in (NVFP4, NVFP4_2D)),
    (NVFP4, "rowwise", (16, 32), "scales of blocks of 16x16"),
    (NVFP4, "columnwise", (32, 16), "scales of blocks of 16x16"),
    (NVFP4_2D, "rowwise", (16, 32), "scales that are not repeated"),
    (NVFP4_2D, "rowwise", (128, 32), "scales that are not repeated"),  # padded
    (NVFP4_2D, "columnwise", (32, 16), "scales that are not repeated"),
    (NVFP4_2D, "columnwise", (16, 32), "transposed scales of blocks of 16x16"),
]


def scale_slot(scaling, direction, tensor):
    return quantized_slots(scaling, tensor)[f"{direction}_scale_inv"]


@pytest.mark.parametrize(("scaling", "direction", "shape", "said"), WRONG_SCALES)
def test_a_wrong_shape_of_scales_is_named(scaling, direction, shape, said):
    assert other_scales(scale_slot(scaling, direction, (256, 512)), shape) == said


@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
@pytest.mark.parametrize("scaling", [MXFP8, LINES, SQUARES, NVFP4, NVFP4_2D])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_entry_is_one_scale_even_of_a_tensor_within_a_block(scaling, direction, shape):
    assert other_scales(scale_slot(scaling, direction, (64, 96)), shape) == "one scale of the tensor"


def test_one_entry_of_one_block_is_the_scale_that_is_not_repeated():
    assert other_scales(scale_slot(NVFP4_2D, "rowwise", (16, 16)), (1, 1)) == "scales that are not repeated"


@pytest.mark.parametrize("tensor", [(0, 512), (256, 0)])
def test_nothing_is_said_of_a_tensor_without_elements(tensor):
    assert other_scales(scale_slot(MXFP8, "rowwise", tensor), (1, 1)) == ""


def test_a_flat_array_has_a_size_in_common_not_a_shape():
    slot = scale_slot(MXFP8, "rowwise", (256, 512))
    with pytest.raises(ValueError, match=r"got \(128,\), the size of scales of blocks of 32x32$"):
        fit(np.zeros(128, np.uint8), slot)
    with pytest.raises(ValueError, match=r"got \(8, 16\), the shape of scales of blocks of 32x32$"):
        fit(np.zeros((8, 16), np.uint8), slot)


def test_a_transposed_array_is_called_so():
    x = np.zeros((64, 96), np.float32)
    q = refops.quantize(x, MXFP8)
    with pytest.raises(ValueError, match=r"got \(96, 64\), which is transposed: give rowwise_data.T"):
        refops.oracle.check("quantize", x, {"data": q.rowwise_data.T}, scaling=MXFP8)


def test_outputs_in_a_tuple_are_shown_by_shape():
    x = np.zeros((64, 96), np.float32)
    q = refops.quantize(x, MXFP8)
    with pytest.raises(TypeError, match=r"or a Quantized; got tuple of .*uint8.*\(64, 96\), .*\(128, 4\)"):
        refops.oracle.check("quantize", x, (q.rowwise_data, q.rowwise_scale_inv), scaling=MXFP8)


def test_a_check_of_no_elements_says_that_nothing_was_checked():
    said = "nothing was checked: the outputs have no elements"
    x = np.zeros((0, 96), np.float32)
    q = refops.quantize(x, MXFP8)
    assert said in refops.oracle.check("quantize", x, {"data": q.rowwise_data}, scaling=MXFP8).notes
    assert said in refops.oracle.check("silu", x, x).notes
    assert said in refops.oracle.check("matmul", {"a": x, "b": np.ones((4, 96), np.float32)}, x[:, :4]).notes
    full = np.ones((4, 96), np.float32)
    assert said not in refops.oracle.check("relu", full, full).notes
