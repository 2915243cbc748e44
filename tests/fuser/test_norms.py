"""LayerNorm, RMSNorm and L2Normalization against float64; float32 statistics, one rounding, quantized outputs."""

import pytest
import torch
from one_rounding import (
    DTYPES,
    QUANTIZERS,
    assert_one_rounding,
    assert_same_quantized,
    call_backward,
    call_forward,
    new_quantizer,
    same_bits,
)

from fuser import functional
from fuser.basic import normalization
from fuser.basic.l2_normalization import L2Normalization
from fuser.basic.normalization import LayerNorm, RMSNorm
from fuser.basic.quantize import Quantize
from fuser.basic.residual import MakeExtraOutput
from fuser.common import get_fused_normalization_quantizer
from fuser.dispatch import backend
from fuser.explanation import explain
from fuser.quantization.contexts import autocast
from fuser.quantization.quantizer import Quantizer
from fuser.recipe import DelayedScaling
from fuser.sequential import Sequential

NORMS = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}


def _reference(op, x, parameters):
    """The definition, differentiable, over the last dimension."""
    weight, *bias = parameters
    gain = weight + 1 if op.zero_centered_gamma else weight
    if bias:
        centered = x - x.mean(-1, keepdim=True)
        return centered * (centered.square().mean(-1, keepdim=True) + op.eps).rsqrt() * gain + bias[0]
    return x * (x.square().mean(-1, keepdim=True) + op.eps).rsqrt() * gain


def _random_op(name, shape, dtype, **kwargs):
    op = NORMS[name](shape, dtype=dtype, **kwargs)
    with torch.no_grad():
        for parameter in op.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return op


def _check(op, x, y, dy):
    """Forward and backward against float64. A sum is good to 2e-6 of the sum of its terms' magnitudes."""
    dtype, width = y.dtype, op.weight.numel()
    parameters = [p.detach().to(dtype).double().reshape(-1).requires_grad_() for p in op.parameters()]
    x64 = x.detach().to(dtype).double().reshape(-1, width).requires_grad_()
    dy64 = dy.double().reshape(-1, width)
    truth = _reference(op, x64, parameters)
    truth.backward(dy64)

    plain, gain, *bias = x64.detach(), *(p.detach().abs() for p in parameters)
    if op.zero_centered_gamma:
        gain = (parameters[0].detach() + 1).abs()
    mean = plain.mean(-1, keepdim=True) if bias else torch.zeros(len(plain), 1, dtype=torch.float64)
    rstd = ((plain - mean).square().mean(-1, keepdim=True) + op.eps).rsqrt()
    # float32 knows x and its mean to 2^-24 of themselves, not of their difference.
    normalized = (plain.abs() + mean.abs()) * rstd
    assert_one_rounding(y.detach().reshape(-1, width), truth.detach(), normalized * gain + sum(bias))

    slope = dy64.abs() * gain
    terms = slope + slope.mean(-1, keepdim=True) + normalized * (slope * normalized).mean(-1, keepdim=True)
    # Autograd casts gradients to the dtype of what they belong to; they were rounded to that of the output.
    assert_one_rounding(x.grad.reshape(-1, width).to(dtype), x64.grad, terms * rstd)
    sums = [(dy64.abs() * normalized).sum(0), dy64.abs().sum(0)]
    for actual, parameter, total in zip(op.parameters(), parameters, sums, strict=False):
        assert actual.grad.shape == actual.shape
        assert_one_rounding(actual.grad.reshape(-1).to(dtype), parameter.grad, total)


@pytest.mark.check
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize(
    ("shape", "normalized"),
    [((40,), 40), ((7, 40), (40,)), ((2, 3, 40), 40), ((2, 3, 4, 10), (4, 10)), ((4, 10), (4, 10))],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_forward_and_backward(name, dtype, shape, normalized, zero_centered):
    torch.manual_seed(1)
    op = _random_op(name, normalized, dtype, zero_centered_gamma=zero_centered)
    x = (torch.randn(shape) * 2 + 0.5).to(dtype).requires_grad_()
    y = op(x)
    assert y.dtype == dtype
    assert y.shape == shape
    dy = torch.randn(shape).to(dtype)
    y.backward(dy)
    _check(op, x, y, dy)


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_many_rows(name, dtype, monkeypatch):
    """Several steps of rows; a parameter's gradient is a float32 sum over all (torch's kernel sums in 16 bits)."""
    monkeypatch.setattr(normalization, "STEP", 1 << 16)
    torch.manual_seed(2)
    op = _random_op(name, 256, dtype)
    x = torch.randn(1000, 256).to(dtype).requires_grad_()
    assert len(list(normalization.steps(x))) == 4
    y = op(x)
    dy = torch.randn(y.shape).to(dtype)
    y.backward(dy)
    _check(op, x, y, dy)


@pytest.mark.parametrize("offset", [30.0, -200.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_large_mean(name, dtype, offset):
    torch.manual_seed(3)
    op = _random_op(name, 64, dtype)
    x = (torch.randn(5, 64) + offset).to(dtype).requires_grad_()
    y = op(x)
    dy = torch.randn(y.shape).to(dtype)
    y.backward(dy)
    _check(op, x, y, dy)


@pytest.mark.parametrize("name", NORMS)
def test_agrees_with_torch(name):
    torch.manual_seed(4)
    op = _random_op(name, 32, torch.float32, eps=1e-3)
    module = torch.nn.LayerNorm(32, eps=1e-3) if name == "LayerNorm" else torch.nn.RMSNorm(32, eps=1e-3)
    module.load_state_dict(dict(op.named_parameters()))
    x = torch.randn(6, 32)
    torch.testing.assert_close(op(x), module(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NORMS)
def test_statistics_are_float32(name):
    op = _random_op(name, 48, torch.bfloat16)
    x = torch.randn(3, 4, 48).bfloat16()
    _, ctx = call_forward(op, x)
    saved, *statistics = ctx.saved_tensors[: -len(op.parameter_names)]
    assert same_bits(saved, x.reshape(12, 48))
    assert len(statistics) == (2 if name == "LayerNorm" else 1)
    assert all(s.dtype == torch.float32 and s.numel() == 12 for s in statistics)


def test_zero_centered_one_is_added_in_float32():
    torch.manual_seed(9)
    op = RMSNorm(64, dtype=torch.bfloat16, zero_centered_gamma=True, eps=0.0)
    with torch.no_grad():
        op.weight.fill_(3 * 2**-9)  # 1 + 3 * 2^-9 is no bfloat16: rounded it is 1 + 2^-7
    x = torch.randn(4, 64).bfloat16()
    normalized = x.double() * x.double().square().mean(-1, keepdim=True).rsqrt()
    y = op(x)
    assert torch.equal(y, (normalized * (1 + 3 * 2**-9)).bfloat16())
    assert not torch.equal(y, (normalized * (1 + 2**-7)).bfloat16())


@pytest.mark.parametrize("name", NORMS)
def test_initial_values(name):
    assert torch.equal(NORMS[name](3).weight, torch.ones(3))
    op = NORMS[name]((2, 3), zero_centered_gamma=True, dtype=torch.float16)
    assert all(torch.equal(p, torch.zeros(2, 3, dtype=torch.float16)) for p in op.parameters())
    assert [n for n, _ in op.named_parameters()] == (["weight", "bias"] if name == "LayerNorm" else ["weight"])


@pytest.mark.parametrize("name", NORMS)
def test_the_output_has_the_dtype_of_the_weight(name):
    op = _random_op(name, 32, torch.bfloat16)
    x = torch.randn(4, 32, requires_grad=True)
    y = op(x)
    assert y.dtype == torch.bfloat16
    assert same_bits(y.detach(), op(x.detach().bfloat16()).detach())
    y.sum().backward()
    assert x.grad.dtype == torch.float32
    assert op.weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("name", NORMS)
def test_autocast(name):
    op = _random_op(name, 32, torch.float32)
    x = torch.randn(4, 32, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = op(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert op.weight.grad.dtype == torch.float32
    assert same_bits(op.weight.grad, op.weight.grad.bfloat16().float())


@pytest.mark.parametrize("shape", [(4, 31), (32, 4), (8,)], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_incompatible_shapes(name, shape):
    op = NORMS[name]((4, 32))
    with pytest.raises(ValueError) as error:
        op(torch.ones(shape))
    message = f"Input tensor (shape={shape}) and weight tensor (shape=(4, 32)) are not compatible"
    rule = "the input's last dimensions must be normalized_shape"
    assert str(error.value) == f"In forward, operation 0 {name}(): {message}: {rule}"


@pytest.mark.parametrize("name", NORMS)
def test_empty_and_non_contiguous(name):
    op = _random_op(name, 32, torch.float32)
    x = torch.empty(0, 32, requires_grad=True)
    y = op(x)
    y.sum().backward()
    assert x.grad.shape == (0, 32)
    assert torch.equal(op.weight.grad, torch.zeros(32))
    op.zero_grad()
    x = torch.randn(32, 5).t().requires_grad_()
    y = op(x)
    dy = torch.randn(32, 5).t()
    y.backward(dy)
    _check(op, x, y, dy)


@pytest.mark.parametrize("name", NORMS)
def test_retain_graph_and_no_grad(name):
    op = _random_op(name, 16, torch.float32)
    x = torch.randn(4, 16, requires_grad=True)
    y = op(x)
    y.sum().backward(retain_graph=True)
    first = x.grad.clone()
    y.sum().backward()
    assert torch.equal(x.grad, 2 * first)
    with torch.no_grad():
        assert same_bits(op(x), y.detach())
    _, ctx = call_forward(op, x, requires_grad=False)
    assert ctx.to_save is None


@pytest.mark.parametrize("name", [*NORMS, "L2Normalization"])
def test_gradcheck_in_float64(name):
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    with backend("float64"):
        if name == "L2Normalization":
            assert torch.autograd.gradcheck(L2Normalization(), x)
            return
        for zero_centered in (False, True):
            op = _random_op(name, 8, torch.float64, zero_centered_gamma=zero_centered)
            parameters = tuple(op.parameters())
            assert torch.autograd.gradcheck(lambda x, *_, op=op: op(x), (x, *parameters))


# --- quantized outputs ------------------------------------------------------------------------------


@pytest.mark.check
@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("name", NORMS)
def test_quantized_output(name, quantizer):
    """Delayed scaling takes the float32 value, other formats the rounded output; the gradient is never quantized."""
    torch.manual_seed(6)
    op = _random_op(name, 128, torch.bfloat16)
    x = torch.randn(64, 128).bfloat16()
    used, expected = new_quantizer(quantizer), new_quantizer(quantizer)
    torch.manual_seed(7)
    y, ctx = call_forward(op, x, next_quantizer=used, previous_quantizer=new_quantizer(quantizer))
    torch.manual_seed(7)
    if quantizer == "delayed":
        wide = NORMS[name](128)
        wide.load_state_dict({n: p.float() for n, p in op.named_parameters()}, strict=False)
        unrounded, _ = call_forward(wide, x.float())
        reference = expected.quantize(unrounded, dtype=torch.bfloat16)
        rounded_first = new_quantizer("delayed")(call_forward(op, x)[0])
        assert not torch.equal(y.buffers.rowwise_data, rounded_first.buffers.rowwise_data)
        assert same_bits(used.amax, expected.amax)
    else:
        reference = functional.quantize(call_forward(op, x)[0], expected)
    assert_same_quantized(y, reference)
    dx, _, _ = call_backward(op, ctx, torch.randn(64, 128).bfloat16())
    assert type(dx) is torch.Tensor


def test_other_quantizers_are_ignored():
    class Custom(Quantizer):
        def quantize_impl(self, tensor):
            raise AssertionError("not to be called")

    quantizer = Custom(rowwise=True, columnwise=False)
    assert get_fused_normalization_quantizer(quantizer) is None
    y, _ = call_forward(RMSNorm(32), torch.randn(4, 32), next_quantizer=quantizer)
    assert type(y) is torch.Tensor


@pytest.mark.parametrize("name", NORMS)
def test_in_a_pipeline(name):
    op = _random_op(name, 64, torch.bfloat16)
    x = torch.randn(32, 64).bfloat16().requires_grad_()
    with autocast(enabled=True, recipe=DelayedScaling()):
        y = Sequential(op, Quantize())(x)
    assert hasattr(y, "buffers")
    expected, _ = call_forward(op, x.detach())
    torch.testing.assert_close(y.dequantize(), expected, rtol=0.07, atol=0.02)
    y.dequantize().sum().backward()
    assert op.weight.grad is not None


def test_quantized_input():
    x = new_quantizer("mxfp8")(torch.randn(32, 64).bfloat16())
    op = _random_op("RMSNorm", 64, torch.bfloat16)
    y, ctx = call_forward(op, x)
    assert same_bits(y, call_forward(op, x.dequantize())[0])
    dy = new_quantizer("current")(torch.randn(32, 64).bfloat16())
    assert same_bits(call_backward(op, ctx, dy)[0], call_backward(op, ctx, dy.dequantize())[0])


# --- construction -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NORMS)
def test_meta_device(name):
    op = NORMS[name](16, device="meta", dtype=torch.bfloat16, zero_centered_gamma=True)
    assert all(p.is_meta for p in op.parameters())
    op.weight.requires_grad_(False).sequence_parallel = True
    x = torch.randn(4, 16).bfloat16().requires_grad_()
    y = op(x)
    assert not any(p.is_meta for p in op.parameters())
    assert op.weight.dtype == torch.bfloat16
    assert op.weight.sequence_parallel and not op.weight.requires_grad
    assert same_bits(y.detach(), NORMS[name](16, dtype=torch.bfloat16)(x.detach()).detach())
    y.sum().backward()
    assert x.grad is not None
    if name == "LayerNorm":
        assert op.bias.grad is not None


VARIABLES = {
    "forward": "NVTE_FWD_LAYERNORM_SM_MARGIN",
    "backward": "NVTE_BWD_LAYERNORM_SM_MARGIN",
    "inference": "NVTE_INF_LAYERNORM_SM_MARGIN",
}


@pytest.mark.parametrize("name", NORMS)
def test_sm_margin(name, monkeypatch):
    for variable in VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)
    make = NORMS[name]
    assert make(4)._sm_margins == {"forward": 0, "backward": 0, "inference": 0}
    assert make(4, sm_margin=3)._sm_margins == {"forward": 3, "backward": 3, "inference": 3}
    assert make(4, sm_margin={"backward": 2})._sm_margins == {"forward": 0, "backward": 2, "inference": 0}
    monkeypatch.setenv(VARIABLES["forward"], "9")
    assert make(4, sm_margin=3)._sm_margins == {"forward": 9, "backward": 3, "inference": 3}
    assert make(4, sm_margin={"backward": 2})._sm_margins == {"forward": 9, "backward": 2, "inference": 0}
    assert make(4, sm_margin={"forward": 2})._sm_margins == {"forward": 2, "backward": 0, "inference": 0}
    x = torch.randn(2, 4)
    assert same_bits(make(4)(x).detach(), make(4, sm_margin=100)(x).detach())  # no numbers change


# --- L2 normalization -------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(40,), (3, 40), (2, 3, 40), (2, 3, 4, 10), (0, 8)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_l2_normalization(dtype, shape):
    torch.manual_seed(8)
    x = (torch.randn(shape) * 0.3).to(dtype).requires_grad_()
    op = L2Normalization(eps=0.5, seq_length=4, micro_batch_size=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = op(x)
    assert y.dtype == dtype
    dy = torch.randn(shape).to(dtype)
    y.backward(dy)
    x64 = x.detach().double().requires_grad_()
    norm = (x64.square().sum(-1, keepdim=True) + 0.5).rsqrt()
    (x64 * norm).backward(dy.double())
    x64, truth, norm = x64.detach(), x64.grad, norm.detach()
    assert_one_rounding(y.detach(), x64 * norm, (x64 * norm).abs())
    inner = (x64 * dy.double()).abs().sum(-1, keepdim=True)
    assert_one_rounding(x.grad, truth, (dy.double().abs() + x64.abs() * inner * norm**2) * norm)


def test_l2_normalization_saves_the_norm_only_for_backward():
    x = torch.randn(2, 3, 8).bfloat16()
    assert L2Normalization().eps == 1e-6
    _, ctx = call_forward(L2Normalization(), x, next_quantizer=new_quantizer("mxfp8"))
    saved, norm = ctx.saved_tensors
    assert saved is x
    assert norm.dtype == torch.float32
    assert norm.shape == (2, 3, 1)
    y, ctx = call_forward(L2Normalization(), x, requires_grad=False)
    assert ctx.to_save is None
    assert same_bits(y, call_forward(L2Normalization(), x)[0])


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_weight_overwritten_before_backward_is_an_error(name, frozen):
    """As of torch's layers: the gradient is that of the weight that forward used, or none."""
    op = _random_op(name, 16, torch.float32)
    op.weight.requires_grad_(not frozen)
    y = op(torch.randn(4, 16, requires_grad=True))
    with torch.no_grad():
        op.weight.mul_(10)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_weight_overwritten_before_a_fused_backward_is_an_error():
    norm = _random_op("RMSNorm", 16, torch.float32)
    y, residual = Sequential(MakeExtraOutput(), norm)(torch.randn(4, 16, requires_grad=True))
    with torch.no_grad():
        norm.weight.mul_(10)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (y + residual).sum().backward()


@pytest.mark.parametrize("name", NORMS)
def test_parameters_kept_for_backward_cost_no_memory(name):
    report = explain(_random_op(name, 16, torch.float32), torch.randn(4, 16, requires_grad=True))
    kept = [tensor for pipeline in report.pipelines for tensors in pipeline.saved.values() for tensor in tensors]
    assert [tensor.shared for tensor in kept if tensor.shape == (16,)] == [True] * (2 if name == "LayerNorm" else 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30, float("inf")])
def test_one_call_of_torch_has_the_bits_of_its_steps(monkeypatch, scale, dtype):
    x, weight = torch.randn(5, 1000, dtype=dtype) * scale, torch.randn(1000, dtype=dtype)
    made = RMSNorm(1000).normalize(x, (weight,), dtype)
    monkeypatch.setattr("fuser.basic.normalization._fused_on_cpu", None)
    for one, other in zip(made, RMSNorm(1000).normalize(x, (weight,), dtype), strict=True):
        assert one.dtype is other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
