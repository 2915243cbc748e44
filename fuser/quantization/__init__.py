"""Quantized tensors, quantizers, recipe state and the contexts that switch them on."""

# ruff: noqa: F403 (each module says what it offers)

from fuser.quantization import (
    contexts,
    grouped,
    hybrid,
    identity,
    quantizer,
    quantizers,
    saving,
    state,
    storage,
    tensor,
)
from fuser.quantization.contexts import *
from fuser.quantization.grouped import *
from fuser.quantization.hybrid import *
from fuser.quantization.identity import *
from fuser.quantization.master_weights import (
    cast_master_weights_to_fp8,
    post_all_gather_processing,
    quantize_master_weights,
    replace_raw_data,
)
from fuser.quantization.quantizer import *
from fuser.quantization.quantizers import *
from fuser.quantization.saving import *
from fuser.quantization.state import *
from fuser.quantization.storage import *
from fuser.quantization.tensor import *

__all__ = [
    *contexts.__all__,
    *grouped.__all__,
    *hybrid.__all__,
    *identity.__all__,
    "cast_master_weights_to_fp8",
    "post_all_gather_processing",
    "quantize_master_weights",
    "replace_raw_data",
    *quantizer.__all__,
    *quantizers.__all__,
    *saving.__all__,
    *state.__all__,
    *storage.__all__,
    *tensor.__all__,
]
