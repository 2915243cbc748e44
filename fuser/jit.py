"""Element-wise fusions by torch.compile: bias + activation, L2 normalization, bias + dropout + add. TE's `jit.py`.

    y = bias_gelu_fused(x, bias)
    with compilation(False):                 # or NVTE_TORCH_COMPILE=0 in the environment
        y = bias_gelu_fused(x, bias)         # the same function, eager

Whether a function runs compiled is decided when it is called: by the innermost `with compilation(...)`, else by the
environment variable NVTE_TORCH_COMPILE (0 or 1, read at every call), else yes. Importing this module compiles nothing
and starts no compiler worker. A function that torch.compile cannot compile warns once, with its name, and is eager from
then on; on a CPU that is what happens without a C++ compiler, with one warning for all functions.

Differences from TE, which computes in the dtype of its inputs: here float32 inside (float64 for float64 inputs), one
rounding at the end, compiled or not; relu and srelu give 0 for NaN, as TE's kernels do. Bias gradients are summed
before the rounding and over all but the bias's dimensions, not only the first. Constants are those of TE's kernels.
"""

import functools
import inspect
import os
import threading
import warnings
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch

from fuser.scopes import scope
from fuser.torch_words import TORCH
from refops.activations import ACTIVATIONS
from refops.activations.declaration import forms
from refops.arguments import require_flag, shown

VARIABLE = "NVTE_TORCH_COMPILE"
_selected = ContextVar("fuser_jit_compilation", default=None)
#: Whether `onnx_export(True)` is in force: a plain variable, since torch.compile does not trace a ContextVar.
_exporting = False


# --- whether to compile -------------------------------------------------------------------------------


@scope
def compilation(enabled):
    """Run the jitted functions called in the block compiled (True) or eagerly (False), whatever the environment says.

    It nests, and holds for the current thread or task alone.
    """
    token = _selected.set(require_flag(enabled, "enabled"))
    try:
        yield
    finally:
        _selected.reset(token)


def compilation_enabled():
    """Whether a jitted function called now would run compiled; ValueError if NVTE_TORCH_COMPILE is no integer."""
    selected = _selected.get()
    if selected is not None:
        return selected
    text = os.environ.get(VARIABLE, "1")
    try:
        return bool(int(text))
    except ValueError:
        raise ValueError(f"{VARIABLE} must be 0 or 1; got {shown(text)}") from None


@scope
def onnx_export(enabled=False):
    """In the block, `no_torch_dynamo` leaves functions unchanged, so that an exporter sees through them."""
    global _exporting
    before, _exporting = _exporting, require_flag(enabled, "enabled")
    try:
        yield
    finally:
        _exporting = before


def is_in_onnx_export_mode():
    """Whether this runs inside `onnx_export(True)` or torch's own ONNX exporter."""
    return _exporting or torch.onnx.is_in_onnx_export()


def set_jit_fusion_options():
    """Do nothing: it chose among the fusers of torch before 2.2, and torch.compile is the only one here."""


# --- compiling ----------------------------------------------------------------------------------------


#: Device types on which a C++ compiler was found missing: functions stay eager there without another warning.
_without_compiler: set[Any] = set()


def lazy_compile(func):
    """Return `func` compiled at its first call by torch.compile; nothing happens before.

    Within another torch.compile the function itself is called, and so becomes part of the outer graph. Where it cannot
    be compiled it warns once (RuntimeWarning) and is eager from then on; errors that the function raises when it runs
    eagerly are the caller's, and raised.
    """
    return _Compiled(func).wrapper(lambda: True)


def jit_fuser(func):
    """Like `lazy_compile` if `compilation_enabled()` at the call, else eager."""
    return _Compiled(func).wrapper(compilation_enabled)


#: TE's name for functions with dropout, which torch before 2.2 could not compile.
dropout_fuser = jit_fuser


@functools.cache
def _load_compiler():
    """Import torch's compiler without its deprecation warnings, which would be errors under `-W error`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import torch._inductor.compile_fx  # noqa: F401


class _Compiled:
    """A function, its compiled form once there is one, and whether compiling it has failed."""

    def __init__(self, function):
        self.function, self.compiled, self.failed = function, None, set()  # device types where compiling failed
        self.lock = threading.Lock()

    def wrapper(self, wanted):
        function = self.function

        @functools.wraps(function)
        def call(*args, **kwargs):
            if torch.compiler.is_compiling() or not wanted():
                return function(*args, **kwargs)
            return self.run(args, kwargs)

        return call

    def run(self, args, kwargs):
        device_type = _device_type(args, kwargs)
        if device_type == "meta" or device_type in self.failed or device_type in _without_compiler:
            return self.function(*args, **kwargs)
        if self.compiled is None:
            _load_compiler()
            self.compiled = torch.compile(self.function)
        try:
            return self.compiled(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            failure = error
        try:
            result = self.function(*args, **kwargs)  # a mistake of the caller's raises here, in plain words
            self.give_up(failure, device_type)
        finally:
            del failure  # its traceback holds the caller's tensors
        return result

    def give_up(self, error, device_type):
        with self.lock:
            first = device_type not in self.failed
            self.failed.add(device_type)
        if first and device_type not in _without_compiler:
            name = getattr(self.function, "__qualname__", repr(self.function))
            warnings.warn(_explanation(error, name, device_type), RuntimeWarning, stacklevel=4)


def _explanation(error, name, device_type):
    """The text of the warning; remembers a missing compiler."""
    from torch._inductor import exc

    causes, cause = [], error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = getattr(cause, "inner_exception", None) or cause.__cause__ or cause.__context__
    if any(isinstance(one, exc.InvalidCxxCompiler) for one in causes):
        _without_compiler.add(device_type)
        return (
            f"torch.compile needs a C++ compiler for {name} on {device_type}, and there is none (install g++, or name "
            f"one in CXX): it and all other jitted functions run eagerly on {device_type} from now on"
        )
    lines = (str(error).strip() or "no message").splitlines()
    reason = next((line for line in lines if line.strip() and not line.endswith("raised:")), lines[0])
    return f"torch.compile failed for {name}, which runs eagerly from now on: {type(error).__name__}: {reason}"


def _device_type(args, kwargs):
    """Device type of the first tensor, "cpu" without one."""
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    return next((tensor.device.type for tensor in tensors), "cpu")


def no_torch_dynamo(recursive=True, when=None):
    """Return a decorator that keeps functions out of torch.compile's graphs. It must be called: `@no_torch_dynamo()`.

    Args:
        recursive: whether what the function calls is kept out too.
        when: None: always. Else a function of a dict, parameter name -> value of the arguments that were passed
            (defaults are absent), that returns None for calls that may be traced and a reason for others; those run
            eagerly under torch.compile with a warning that has the reason.

    While a model is exported to ONNX the decorator is transparent.

    Raises:
        AssertionError: when the function is decorated, with `when` and a parameter `*args`.
    """

    def decorate(function):
        import torch._dynamo

        if when is None:
            disabled = torch._dynamo.disable(function, recursive=recursive)

            @functools.wraps(function)
            def call(*args, **kwargs):
                if is_in_onnx_export_mode():
                    return function(*args, **kwargs)
                return disabled(*args, **kwargs)

            return call
        return _disabled_when(function, recursive, when)

    return decorate


def _disabled_when(function, recursive, when):
    parameters = inspect.signature(function).parameters.values()
    assert all(p.kind is not inspect.Parameter.VAR_POSITIONAL for p in parameters), (
        f"no_torch_dynamo(when=...) needs named parameters; {function.__qualname__} has *args"
    )
    positional = [p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]

    def eager(reason, *args, **kwargs):
        warnings.warn(
            f"Falling back to eager execution under torch.compile: {reason} is unsupported on the compiled path of "
            f"{function.__qualname__}",
            stacklevel=3,
        )
        return function(*args, **kwargs)

    import torch._dynamo

    disabled = torch._dynamo.disable(eager, recursive=recursive)

    @functools.wraps(function)
    def call(*args, **kwargs):
        if is_in_onnx_export_mode() or not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        passed = dict(zip(positional, args, strict=False))
        passed.update(kwargs)
        reason = when(passed)
        if reason is None:
            return function(*args, **kwargs)
        return disabled(reason, *args, **kwargs)

    return call


# --- dtypes -------------------------------------------------------------------------------------------


def _wide(tensor):
    """The tensor in the dtype that is computed in."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _narrow(tensor, *inputs):
    """Round to the dtype that torch promotes the inputs to."""
    return tensor.to(functools.reduce(torch.promote_types, (one.dtype for one in inputs)))


def _without_autocast(tensor):
    if not torch.amp.is_autocast_available(tensor.device.type):  # meta, for one
        return nullcontext()
    return torch.amp.autocast(device_type=tensor.device.type, enabled=False)


# --- bias and activation ------------------------------------------------------------------------------


def _family(name, function):
    """The functions of a `refops.activations.Function` without parameters, by TE's names for GELU.

    {name}_fused_(inp)                                  bias_{name}_fused_(inp, bias)
    d{name}_fused_(grad_output, inp)                    bgrad_d{name}_fused_(grad_output, inp, bias)

    The last returns (bias gradient, input gradient). `bias_{name}_fused` and `bgrad_d{name}_fused` are the same without
    autocast, and take no bias, or an empty one, for the first two; the bias gradient is None then.
    """
    value, slope, _ = forms(function.body, TORCH)

    def forward(inp):
        return _narrow(value(_wide(inp), None), inp)

    def bias_forward(inp, bias):
        return _narrow(value(_wide(inp) + _wide(bias), None), inp, bias)

    def backward(grad_output, inp):
        return _narrow(slope(_wide(inp), None) * _wide(grad_output), grad_output, inp)

    def bias_backward(grad_output, inp, bias):
        gradient = slope(_wide(inp) + _wide(bias), None) * _wide(grad_output)
        sums = gradient.sum_to_size(bias.shape)
        return _narrow(sums, grad_output, inp, bias), _narrow(gradient, grad_output, inp, bias)

    compiled = []
    for function, public, text in (
        (forward, f"{name}_fused_", "Apply the activation."),
        (bias_forward, f"bias_{name}_fused_", "Add a bias and apply the activation."),
        (backward, f"d{name}_fused_", "Return the gradient of the activation's input."),
        (bias_backward, f"bgrad_d{name}_fused_", "Return the gradients of the bias and of the input."),
    ):
        _name(function, public, f"{text} Compiled; {name}, float32 inside.")
        compiled.append(jit_fuser(function))
    forward, bias_forward, backward, bias_backward = compiled

    def bias_fused(inp, bias):
        with _without_autocast(inp):
            return forward(inp) if bias is None or bias.numel() == 0 else bias_forward(inp, bias)

    def bgrad_fused(grad_output, inp, bias):
        with _without_autocast(inp):
            if bias is None or bias.numel() == 0:
                return None, backward(grad_output, inp)
            return bias_backward(grad_output, inp, bias)

    _name(bias_fused, f"bias_{name}_fused", f"`bias_{name}_fused_` without autocast; no bias if None or empty.")
    _name(bgrad_fused, f"bgrad_d{name}_fused", f"`bgrad_d{name}_fused_` without autocast; (None, dx) without bias.")
    return {one.__name__: one for one in (*compiled, bias_fused, bgrad_fused)}


def _name(function, name, text):
    function.__name__ = function.__qualname__ = name
    function.__module__, function.__doc__ = __name__, text
    # Code of its own: torch.compile counts recompilations by code object, which closures of one function share.
    function.__code__ = function.__code__.replace(co_name=name)


#: Those of TE's `jit.py`, none of which has parameters.
_ACTIVATIONS = ("gelu", "silu", "relu", "qgelu", "srelu")
_FUNCTIONS: dict[Any, Any] = {}
for _key in _ACTIVATIONS:
    _FUNCTIONS |= _family(_key, ACTIVATIONS[_key].act)
globals().update(_FUNCTIONS)


# --- L2 normalization ---------------------------------------------------------------------------------


@jit_fuser
def l2normalization_fused_(x, eps):
    """x / sqrt(sum(x^2) + eps) over the last dimension, in the dtype of `x`."""
    wide = _wide(x)
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


@jit_fuser
def l2normalization_fwd_fused_(x, eps):
    """As `l2normalization_fused_`, and 1 / sqrt(sum(x^2) + eps), float32 (..., 1), for the backward pass."""
    wide = _wide(x)
    rsqrt_norm = torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)
    return (wide * rsqrt_norm).to(x.dtype), rsqrt_norm


@jit_fuser
def l2normalization_backward_fused_(grad_output, x, rsqrt_norm, eps):
    """Gradient of `l2normalization_fwd_fused_` with respect to `x`, in its dtype."""
    wide, dy = _wide(x), _wide(grad_output)
    squared_norm = wide.square().sum(-1, keepdim=True) + eps
    return (rsqrt_norm * (dy - wide * ((wide * dy).sum(-1, keepdim=True) / squared_norm))).to(x.dtype)


def l2normalization_fused(x, eps):
    """`l2normalization_fused_` without autocast."""
    with _without_autocast(x):
        return l2normalization_fused_(x, eps)


def l2normalization_fwd_fused(x, eps):
    """`l2normalization_fwd_fused_` without autocast."""
    with _without_autocast(x):
        return l2normalization_fwd_fused_(x, eps)


def l2normalization_backward_fused(grad_output, x, rsqrt_norm, eps):
    """`l2normalization_backward_fused_` without autocast."""
    with _without_autocast(x):
        return l2normalization_backward_fused_(grad_output, x, rsqrt_norm, eps)


# --- bias, dropout, add -------------------------------------------------------------------------------


def bias_dropout_add(x, bias, residual, prob, training):
    """Return residual + dropout(x + bias), dropping with probability `prob` if `training`; `bias` may be None."""
    wide = _wide(x) if bias is None else _wide(x) + _wide(bias)
    dropped = torch.nn.functional.dropout(wide, p=prob, training=training)
    inputs = (x, residual) if bias is None else (x, bias, residual)
    return _narrow(_wide(residual) + dropped, *inputs)


def get_bias_dropout_add(training):
    """Return `bias_dropout_add` for a mode: a function of (x, bias, residual, prob)."""

    def bias_dropout_add_of_mode(x, bias, residual, prob):
        return bias_dropout_add(x, bias, residual, prob, training)

    return bias_dropout_add_of_mode


@dropout_fuser
def bias_dropout_add_fused_train_(x, bias, residual, prob):
    """`bias_dropout_add` for training, compiled."""
    return bias_dropout_add(x, bias, residual, prob, True)


@dropout_fuser
def bias_dropout_add_fused_inference_(x, bias, residual, prob):
    """`bias_dropout_add` for inference, compiled."""
    return bias_dropout_add(x, bias, residual, prob, False)


def bias_dropout_add_fused_train(x, bias, residual, prob):
    """`bias_dropout_add_fused_train_` with gradients on and without autocast."""
    with torch.enable_grad(), _without_autocast(x):
        return bias_dropout_add_fused_train_(x, bias, residual, prob)


def bias_dropout_add_fused_inference(x, bias, residual, prob):
    """`bias_dropout_add_fused_inference_` without autocast."""
    with _without_autocast(x):
        return bias_dropout_add_fused_inference_(x, bias, residual, prob)


# --- warm-up ------------------------------------------------------------------------------------------
#
# Functions compiled for the sizes of a model before its first step, so that no step of a pipeline waits for another.

_RUNS = 5
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def warmup_jit_bias_dropout_add(hidden_size, dtype, seq_length, micro_batch_size, device=None):
    """Compile `bias_dropout_add_fused_train_` and `..._inference_` for x (s, b, h) and bias (h,).

    Args:
        hidden_size, seq_length, micro_batch_size: h, s and b.
        dtype: that of all tensors.
        device: where; None is torch's default device (TE: always the current GPU). Random states stay as they are.
    """
    shape = (seq_length, micro_batch_size, hidden_size)
    with _warming_up(device) as random:
        bias, residual = random(shape[-1:], dtype), random(shape, dtype)
        for x in _with_and_without_gradient(random(shape, dtype)):
            for _ in range(_RUNS):
                bias_dropout_add_fused_train_(x, bias, residual, 0.1)
            for _ in range(_RUNS):
                bias_dropout_add_fused_inference_(x, bias, residual, 0.1)


def warmup_jit_bias_gelu(ffn_hidden_size_per_partition, dtype, seq_length, micro_batch_size, device=None):
    """Compile `bias_gelu_fused_` and `gelu_fused_` for x (s * b, f); arguments as `warmup_jit_bias_dropout_add`."""
    shape = (seq_length * micro_batch_size, ffn_hidden_size_per_partition)
    with _warming_up(device) as random:
        bias = random(shape[-1:], dtype)
        for x in _with_and_without_gradient(random(shape, dtype)):
            for _ in range(_RUNS):
                _FUNCTIONS["bias_gelu_fused_"](x, bias)
                _FUNCTIONS["gelu_fused_"](x)


def warmup_jit_l2normalization(hidden_size, dtype, seq_length, micro_batch_size, device=None):
    """Compile the L2 normalization functions for x (s * b, h); arguments as `warmup_jit_bias_dropout_add`."""
    with _warming_up(device) as random, torch.no_grad():
        x = random((seq_length * micro_batch_size, hidden_size), dtype)
        for _ in range(_RUNS):
            l2normalization_fused_(x, 1e-6)
        for _ in range(_RUNS):
            y, rsqrt_norm = l2normalization_fwd_fused_(x, 1e-6)
            l2normalization_backward_fused_(y, x, rsqrt_norm, 1e-6)


@contextmanager
def _warming_up(device):
    """Give a function (shape, dtype) -> random tensor; restore random states, and free a GPU's memory afterwards."""
    device = torch.get_default_device() if device is None else torch.device(device)
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        yield lambda shape, dtype: torch.rand(shape, dtype=dtype, device=device)
    if on_gpu:
        torch.cuda.empty_cache()


def _with_and_without_gradient(x):
    yield x
    yield x.clone().requires_grad_()


def _for_all_dtypes(warmup):
    def for_all(size, seq_length, micro_batch_size, device=None):
        for dtype in _DTYPES:
            warmup(size, dtype, seq_length, micro_batch_size, device)

    _name(for_all, f"{warmup.__name__}_all_dtypes", f"`{warmup.__name__}` for float32, bfloat16 and float16.")
    return for_all


warmup_jit_bias_dropout_add_all_dtypes = _for_all_dtypes(warmup_jit_bias_dropout_add)
warmup_jit_bias_gelu_all_dtypes = _for_all_dtypes(warmup_jit_bias_gelu)
warmup_jit_l2normalization_all_dtypes = _for_all_dtypes(warmup_jit_l2normalization)

__all__ = [
    "bias_dropout_add",
    "bias_dropout_add_fused_inference",
    "bias_dropout_add_fused_inference_",
    "bias_dropout_add_fused_train",
    "bias_dropout_add_fused_train_",
    "compilation",
    "compilation_enabled",
    "dropout_fuser",
    "get_bias_dropout_add",
    "is_in_onnx_export_mode",
    "jit_fuser",
    "l2normalization_backward_fused",
    "l2normalization_backward_fused_",
    "l2normalization_fused",
    "l2normalization_fused_",
    "l2normalization_fwd_fused",
    "l2normalization_fwd_fused_",
    "lazy_compile",
    "no_torch_dynamo",
    "onnx_export",
    "set_jit_fusion_options",
    "warmup_jit_bias_dropout_add",
    "warmup_jit_bias_dropout_add_all_dtypes",
    "warmup_jit_bias_gelu",
    "warmup_jit_bias_gelu_all_dtypes",
    "warmup_jit_l2normalization",
    "warmup_jit_l2normalization_all_dtypes",
    *_FUNCTIONS,
]
