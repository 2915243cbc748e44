"""Dropout: both paths, what is kept for backward, and the distribution."""

import pytest
import torch
from one_rounding import call_backward, call_forward, new_quantizer, same_bits

from fuser.basic.dropout import Dropout

pytestmark = pytest.mark.check

HALVES = [torch.bfloat16, torch.float16]


def _one_rounding(x, keep, p):
    scale = torch.tensor(1 / (1 - p), dtype=torch.float32)
    return torch.where(keep, x.float() * scale, torch.zeros(())).to(x.dtype)


def _nonzero(dtype, *shape):
    return (torch.rand(shape) + 0.5).to(dtype)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_fused_path(dtype, p):
    torch.manual_seed(0)
    x = _nonzero(dtype, 16, 16, 3).requires_grad_()
    op = Dropout(p)
    y = op(x)
    keep = y.detach() != 0
    assert same_bits(y.detach(), _one_rounding(x.detach(), keep, p))
    dy = torch.randn(x.shape).to(dtype)
    y.backward(dy)
    assert torch.equal(x.grad, _one_rounding(dy, keep, p))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 64), (torch.bfloat16, 63), (torch.float16, 24)])
def test_unfused_path_multiplies_a_mask_of_the_tensors_dtype(dtype, size, p):
    torch.manual_seed(0)
    x = _nonzero(dtype, size).requires_grad_()
    y, ctx = call_forward(Dropout(p), x.detach())
    (mask,) = ctx.saved_tensors
    assert ctx.impl == "unfused"
    assert mask.dtype == dtype
    scale = torch.tensor(1 / (1 - p)).to(dtype)
    assert set(mask.tolist()) <= {0.0, scale.item()}
    assert same_bits(y, x.detach() * mask)
    dy = torch.randn(size).to(dtype)
    assert same_bits(call_backward(Dropout(p), ctx, dy)[0], dy * mask)


def test_fused_path_keeps_a_bit_an_element():
    torch.manual_seed(1)
    x = _nonzero(torch.bfloat16, 4, 8)
    y, ctx = call_forward(Dropout(0.5), x)
    (bits,) = ctx.saved_tensors
    assert ctx.impl == "fused"
    assert bits.dtype == torch.uint8
    assert bits.numel() == 4
    expected = [bool(byte >> i & 1) for byte in bits.tolist() for i in range(8)]
    assert (y.flatten() != 0).tolist() == expected
    assert 0 < sum(expected) < 32


@pytest.mark.parametrize("p", [0.003, 0.1, 0.3, 0.5, 0.75, 0.999])
def test_effective_probability(p):
    """Fused: floor(256 p) / 256. Unfused: p. Six standard deviations over 2^20 elements."""
    torch.manual_seed(2)
    n = 1 << 20
    for dtype, effective in ((torch.bfloat16, int(256 * p) / 256), (torch.float32, p)):
        y = Dropout(p)(torch.ones(n, dtype=dtype))
        deviation = (effective * (1 - effective) / n) ** 0.5
        assert abs((y == 0).double().mean().item() - effective) <= 6 * deviation


def test_bits_are_independent_of_their_position():
    torch.manual_seed(3)
    y = Dropout(0.5)(torch.ones(1 << 16, 16, dtype=torch.float16))
    kept = (y != 0).double()
    assert ((kept.mean(0) - 0.5).abs() < 0.02).all()
    correlation = torch.corrcoef(kept.t()) - torch.eye(16)
    assert correlation.abs().max() < 0.03


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_probability_zero_and_one(dtype):
    x = torch.randn(4, 16).to(dtype).requires_grad_()
    y = Dropout(0.0)(x)
    assert same_bits(y.detach(), x.detach())
    y = Dropout(1.0)(x)
    assert torch.equal(y, torch.zeros(4, 16, dtype=dtype))
    y.sum().backward()
    assert torch.equal(x.grad, torch.zeros(4, 16, dtype=dtype))


@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan")])
def test_invalid_probability(p):
    with pytest.raises(ValueError, match="p must be a probability"):
        Dropout(p)


def test_dropped_infinities_are_zero_in_the_fused_path():
    torch.manual_seed(4)
    y = Dropout(0.5)(torch.full((64,), float("inf"), dtype=torch.bfloat16))
    assert set(y.tolist()) == {0.0, float("inf")}


def test_evaluation_is_the_identity():
    x = torch.randn(4, 16, requires_grad=True)
    op = Dropout(0.5).eval()
    y = op(x)
    assert y.data_ptr() == x.data_ptr()
    y.backward(torch.full_like(y, 3.0))
    assert torch.equal(x.grad, torch.full_like(x, 3.0))
    _, ctx = call_forward(op, x)
    assert ctx.to_save == (None,)
    quantized = new_quantizer("mxfp8")(torch.randn(32, 32))
    assert call_forward(op, quantized)[0] is quantized


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_switching_modes_between_forward_and_backward(dtype):
    op = Dropout(0.5)
    x = _nonzero(dtype, 64).requires_grad_()
    y = op(x)
    op.eval()
    y.sum().backward()
    assert torch.equal(x.grad, (y.detach() != 0).to(dtype) * 2)
    x.grad = None
    y = op(x)
    op.train()
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_seed_and_second_backward(dtype):
    x = torch.randn(8, 16).to(dtype).requires_grad_()
    torch.manual_seed(5)
    first = Dropout(0.3)(x)
    torch.manual_seed(5)
    second = Dropout(0.3)(x)
    assert same_bits(first.detach(), second.detach())
    assert not torch.equal(first, Dropout(0.3)(x))
    first.sum().backward(retain_graph=True)
    gradient, x.grad = x.grad, None
    first.sum().backward()
    assert same_bits(gradient, x.grad)


def test_autocast_chooses_the_path():
    x = torch.randn(16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = Dropout(0.25)(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad.dtype == torch.float32


def test_quantized_input_is_read_directly():
    """No rounding to bfloat16 between the codes' values and the product."""
    torch.manual_seed(6)
    x = new_quantizer("delayed")(torch.rand(64, 16).bfloat16() + 0.5)
    y, ctx = call_forward(Dropout(0.3), x)
    assert y.dtype == torch.bfloat16
    assert ctx.impl == "fused"
    keep = y != 0
    wide = x.dequantize(dtype=torch.float32) * torch.tensor(1 / (1 - 0.3))
    assert same_bits(y, torch.where(keep, wide, torch.zeros(())).bfloat16())
    twice = torch.where(keep, x.dequantize().float() * torch.tensor(1 / (1 - 0.3)), torch.zeros(())).bfloat16()
    assert not torch.equal(y, twice)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shapes(dtype):
    for x in (torch.empty(0, 16, dtype=dtype), torch.ones(16, 6, dtype=dtype).t(), torch.ones(2, 2, 2, 4, dtype=dtype)):
        x.requires_grad_()
        y = Dropout(0.5)(x)
        assert y.shape == x.shape
        y.sum().backward()
        assert torch.equal(x.grad != 0, y != 0)
    with torch.no_grad():
        assert not Dropout(0.5)(x).requires_grad
    _, ctx = call_forward(Dropout(0.5), x.detach(), requires_grad=False)
    assert ctx.to_save is None
