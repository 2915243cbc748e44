"""The five concrete quantizers of TE, with its names and arguments, and one for every other declared scaling.

| class                         | scale                                   | shapes                              |
|-------------------------------|-----------------------------------------|-------------------------------------|
| Float8Quantizer               | given (delayed scaling)                 | any                                 |
| Float8CurrentScalingQuantizer | from the tensor's amax                  | any                                 |
| Float8BlockQuantizer          | from the amax of 1x128 or 128x128       | any (TE's GEMMs: multiples of 128)  |
| MXFP8Quantizer                | E8M0 for 32 elements                    | M % 32 == 0 and K % 32 == 0         |
| NVFP4Quantizer                | E4M3 for 16 elements and the amax       | M % 16 == 0 and K % 16 == 0         |
| BlockScaledQuantizer          | as the scaling that it is given says    | what that scaling's layout stores   |

K is the last dimension, M the product of the others. A shape that is not allowed raises `ValueError`, as TE's extension
refuses it. Results are bit for bit those of `refops.quantize` with `quantizer.scaling()`.
"""

import contextlib
import functools
import math
import os
import threading
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fuser import dispatch
from fuser import recipe as recipes
from fuser.dispatch import Buffers
from fuser.distributed import reduce_amax
from fuser.dtypes import DType
from fuser.quantization import sharding
from fuser.quantization.quantizer import Quantizer, ValueQuantizer
from fuser.quantization.storage import (
    QUANTIZERS,
    BlockScaledTensorStorage,
    Float8BlockwiseQTensorStorage,
    Float8TensorStorage,
    MXFP8TensorStorage,
    NVFP4TensorStorage,
)
from fuser.quantization.tensor import BlockScaledTensor, Float8BlockwiseQTensor, Float8Tensor, MXFP8Tensor, NVFP4Tensor
from fuser.tracing import rehearsing
from refops.arguments import require_flag, shown
from refops.quantization.quantize import check_shape
from refops.quantization.result import matrix_shape
from refops.scalings import (
    TE_SIGN_MASK,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MXFP8Scaling,
    NVFP4Scaling,
    Scaling,
    require_scaling,
)
from refops.scalings.arithmetic import REFERENCE

__all__ = [
    "BlockScaledQuantizer",
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "MXFP8Quantizer",
    "NVFP4Quantizer",
]

#: TE's environment variable for the fast error of 4over6, read at every call.
FAST_ERROR = "NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH"


@functools.lru_cache(maxsize=256)
def _cached(cls, **settings):
    """A `refops` scaling; equal settings are checked once."""
    return cls(**settings)


class _Tape(threading.local):
    """The delayed scales of a forward pass that will be computed again (`fuser.recompute`)."""

    scales: dict[int, tuple[torch.Tensor, float]] | None = None
    replaying: bool = False


_tape = _Tape()


@contextlib.contextmanager
def delayed_scales(scales: dict[int, tuple[torch.Tensor, float]], *, replay: bool) -> Any:
    """Keep in `scales` what delayed-scaling quantizers of this thread cast with; `replay`: cast with that again.

    A replayed pass records no amaxes: it belongs to a step that was recorded.
    """
    outer, outer_replaying = _tape.scales, _tape.replaying
    for address, entry in (outer or {}).items():
        scales.setdefault(address, entry)
    _tape.scales, _tape.replaying = scales, replay or outer_replaying
    try:
        yield
    finally:
        _tape.scales, _tape.replaying = outer, outer_replaying
        if outer is not None:
            outer.update(scales)


def notes_scales() -> bool:
    """Whether this thread is in a `delayed_scales`."""
    return _tape.scales is not None


def is_replaying() -> bool:
    """Whether this thread computes a forward pass again (`fuser.recompute`)."""
    return _tape.replaying


def is_computing_again() -> bool:
    """Whether a forward pass that runs now is one that a backward pass makes again, for whichever checkpoint."""
    return is_replaying() or torch._C._current_graph_task_id() != -1


def _divides(shape, multiple):
    """Whether a tensor of `shape` is a matrix of blocks with that edge."""
    m, k = matrix_shape(shape)
    return len(shape) >= 2 and m % multiple == 0 and k % multiple == 0


def _require_divisible(shape, multiple, name):
    if math.prod(shape[:-1]) % multiple or math.prod(shape[-1:]) % multiple:
        raise ValueError(
            f"{name} needs M % {multiple} == 0 and K % {multiple} == 0 (K the last dimension, M the product of the "
            f"others); got a tensor of shape {tuple(shape)}"
        )


class _Float8(Quantizer):
    """A quantizer to E4M3 or E5M2, `dtype`."""

    dtype: DType

    def __init__(self, fp8_dtype: DType, *, rowwise: bool, columnwise: bool):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = DType.of(fp8_dtype)
        if self.dtype not in (DType.kFloat8E4M3, DType.kFloat8E5M2):
            raise ValueError(f"fp8_dtype must be DType.kFloat8E4M3 or DType.kFloat8E5M2; got {shown(self.dtype)}")

    def settings(self) -> Any:
        """Constructor arguments: without tensors and without the process group."""
        return {"fp8_dtype": self.dtype, **super().settings()}


class Float8Quantizer(_Float8):
    """FP8 with a given scale for the whole tensor: delayed scaling.

    Args:
        scale: float32, one element: the multiplier before the cast. Read at every call.
        amax: float32, one element: every call raises it to the largest magnitude seen.
        fp8_dtype: `DType.kFloat8E4M3` or `DType.kFloat8E5M2`.
        rowwise, columnwise: which copies results have.
    """

    tensor_class, storage_class = Float8Tensor, Float8TensorStorage
    _recipe_class = recipes.DelayedScaling

    def __init__(
        self,
        scale: torch.Tensor,
        amax: torch.Tensor,
        fp8_dtype: DType,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ):
        super().__init__(fp8_dtype, rowwise=rowwise, columnwise=columnwise)
        for name, tensor in (("scale", scale), ("amax", amax)):
            if not isinstance(tensor, torch.Tensor) or tensor.numel() != 1:
                got = f"shape {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else shown(tensor)
                raise TypeError(f"{name} must be a float32 tensor of one element, as torch.ones(1); got {got}")
        self.scale, self.amax = scale, amax
        self._read_scale = None

    def scaling(self) -> Scaling:
        """`DelayedScaling` with the present scale."""
        return DelayedScaling(self.dtype.format, self._scale_value())

    def _scale_value(self):
        """The scale as a number: the present one, or in a pass that is computed again the one of that time."""
        if rehearsing():
            return 1.0
        scales = _tape.scales
        if scales is None:
            return self._present_scale()
        address = self.scale.data_ptr()
        if address not in scales:
            scales[address] = (self.scale, self._present_scale())  # alive, the address is not used again
        elif not _tape.replaying and scales[address][1] != self._present_scale():
            raise RuntimeError(
                "Scales were updated inside of a function given to fuser.checkpoint, which has to run twice with the "
                "same ones: enter autocast around checkpoint, or once inside of the function"
            )
        return scales[address][1]

    def _present_scale(self):
        """Synchronizes with the GPU only if the scale changed since the last read."""
        if self.scale.device.type == "cpu" or self.scale.is_inference():  # cheap to read; no version to tell writes by
            return self.scale.item()
        key = (self.scale.data_ptr(), self.scale._version)
        if self._read_scale is None or self._read_scale[0] != key:
            self._read_scale = (key, self.scale.item())
        return self._read_scale[1]

    def _record(self, buffers):
        amax = buffers.amax_rowwise if buffers.amax_rowwise is not None else buffers.amax_columnwise
        # Without an amax they were gathered, from pieces that were recorded where they were made
        if amax is not None and not _tape.replaying and not rehearsing():
            with torch.inference_mode():  # an amax that was made in it is written in it alone
                torch.fmax(self.amax, amax.to(self.amax.device).view(self.amax.shape), out=self.amax)

    def calibrate(self, tensor: torch.Tensor) -> None:
        """Set the amax to that of a tensor."""
        with torch.inference_mode():
            self.amax.copy_(dispatch.amax(tensor).reshape(self.amax.shape))

    def create_tensor_from_data(
        self, data: Any, fake_dtype: Any = torch.float32, requires_grad: bool = False, internal: bool = False
    ) -> Any:
        """Wrap uint8 codes, rowwise, that were cast with the present scale; `fake_dtype` is the nominal dtype."""
        scale_inv = (1 / self.scale.detach().float()).reshape(1).to(data.device)
        buffers = Buffers(
            rowwise_data=data,
            rowwise_scale_inv=scale_inv,
            scaling=self.scaling(),
            shape=tuple(data.shape),
            dtype=fake_dtype,
        )
        if internal:
            return Float8TensorStorage(buffers, quantizer=self.copy())
        return Float8Tensor(buffers, quantizer=self.copy(), requires_grad=requires_grad)

    def supports_only_rowwise_all_gather(self) -> bool:
        """True: the transpose follows from the data."""
        return True


class _AmaxReducing(ValueQuantizer):
    """A quantizer whose tensor amax can be the largest over a process group, so that all ranks scale alike."""

    with_amax_reduction: bool
    amax_reduction_group: Any

    def copy_for_result(self) -> Any:
        duplicate = self.copy()
        duplicate.with_amax_reduction, duplicate.amax_reduction_group = False, None
        return duplicate

    def _cast(self, tensor, rowwise, columnwise):
        if not self.with_amax_reduction:
            return super()._cast(tensor, rowwise, columnwise)
        amaxes = self._reduced_amaxes(tensor, columnwise)
        return _quantize_with_amaxes(tensor, self.scaling(), amaxes, rowwise, columnwise)

    def _reduced_amaxes(self, tensor, columnwise):
        """(amax of the tensor, amax of its transform or None), the largest over the ranks."""
        amaxes, scaling = [dispatch.amax(tensor)], self.layout_scaling()
        if scaling.hadamard is not None and columnwise:
            # Rounding plays no part in an amax, so this may as well be the cast of another seed.
            amaxes.append(dispatch.quantize(tensor, scaling, rowwise=False, columnwise=True).amax_columnwise)
        reduced = reduce_amax(torch.cat(amaxes), self.amax_reduction_group)
        return reduced[0], reduced[1] if len(amaxes) > 1 else None


def _with_new_seed(scaling):
    """The settings of one call: each that rounds stochastically by Philox has a seed of torch's CPU generator."""
    if scaling.random is None or scaling.random.bits is not None or rehearsing():
        return scaling
    seed = torch.randint(0, torch.iinfo(torch.int64).max, (), dtype=torch.int64, device="cpu").item()
    return replace(scaling, seed=seed)


def encode_scale(scaling: Scaling, amax: torch.Tensor) -> float:
    """What a scaling with one scale for the tensor multiplies values with, from their amax, (1,)."""
    with np.errstate(all="ignore"):
        _, multiplier = scaling.block_scale(REFERENCE)(
            np.array([amax.item()], np.float32), np.float32(0), scaling.numbers(np.dtype(np.float32))
        )
    return float(multiplier[0])


class Float8CurrentScalingQuantizer(_Float8, _AmaxReducing):
    """FP8 with one scale from the tensor's own amax.

    Args:
        fp8_dtype: `DType.kFloat8E4M3` or `DType.kFloat8E5M2`.
        device: accepted for TE's sake; results are on the device of their input.
        rowwise, columnwise: which copies results have.
        with_amax_reduction, amax_reduction_group: take the largest amax of the ranks of a process group.
        force_pow_2_scales: round the scale down to a power of two.
        amax_epsilon: lower bound of the amax.
        use_existing_amax, scale, amax: ignored, with a `DeprecationWarning`, as in TE.
    """

    tensor_class, storage_class = Float8Tensor, Float8TensorStorage
    _recipe_class = recipes.Float8CurrentScaling
    _options = ("force_pow_2_scales", "amax_epsilon")

    def __init__(
        self,
        fp8_dtype: DType,
        device: Any = None,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        use_existing_amax: bool = False,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
        scale: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
    ):
        super().__init__(fp8_dtype, rowwise=rowwise, columnwise=columnwise)
        if use_existing_amax or scale is not None or amax is not None:
            message = "use_existing_amax, scale and amax have no effect on Float8CurrentScalingQuantizer"
            warnings.warn(message, DeprecationWarning, stacklevel=2)
        self.with_amax_reduction, self.amax_reduction_group = with_amax_reduction, amax_reduction_group
        self.force_pow_2_scales, self.amax_epsilon = force_pow_2_scales, amax_epsilon

    def scaling(self) -> Scaling:
        """`CurrentScaling`."""
        return _cached(
            CurrentScaling,
            fmt=self.dtype.format,
            power_2_scale=bool(self.force_pow_2_scales),
            amax_epsilon=self.amax_epsilon,
        )

    def _cast(self, tensor, rowwise, columnwise):
        if not self.with_amax_reduction:
            return super()._cast(tensor, rowwise, columnwise)
        scaling = self.scaling()
        amax = reduce_amax(dispatch.amax(tensor), self.amax_reduction_group)
        given = DelayedScaling(scaling.fmt, encode_scale(scaling, amax))
        buffers = dispatch.quantize(tensor, given, rowwise=rowwise, columnwise=columnwise)
        amaxes = {"amax_rowwise": amax if rowwise else None, "amax_columnwise": amax.clone() if columnwise else None}
        return replace(buffers, scaling=scaling, **amaxes)

    def supports_only_rowwise_all_gather(self) -> bool:
        """True: the transpose follows from the data."""
        return True


class Float8BlockQuantizer(_Float8, ValueQuantizer):
    """FP8 with a float32 scale for 1x128 elements or a 128x128 tile.

    Args:
        fp8_dtype: `DType.kFloat8E4M3` or `DType.kFloat8E5M2`.
        rowwise, columnwise: which copies results have.
        amax_epsilon: lower bound of each block's amax.
        force_pow_2_scales: round scales down to powers of two.
        block_scaling_dim: 1 or 2.
    """

    tensor_class, storage_class = Float8BlockwiseQTensor, Float8BlockwiseQTensorStorage
    _recipe_class = recipes.Float8BlockScaling
    _options = ("amax_epsilon", "force_pow_2_scales", "block_scaling_dim")
    block_len = BlockScaling.block_size

    def __init__(
        self,
        fp8_dtype: DType,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ):
        super().__init__(fp8_dtype, rowwise=rowwise, columnwise=columnwise)
        self.amax_epsilon, self.force_pow_2_scales = amax_epsilon, force_pow_2_scales
        self.block_scaling_dim = block_scaling_dim
        self.scaling()  # a wrong value raises here

    def scaling(self) -> Scaling:
        """`BlockScaling`."""
        return _cached(
            BlockScaling,
            fmt=self.dtype.format,
            block_dim=self.block_scaling_dim,
            power_2_scale=bool(self.force_pow_2_scales),
            amax_epsilon=self.amax_epsilon,
        )

    def is_quantizable(self, tensor: torch.Tensor) -> bool:
        """Whether TE's GEMMs take it: at least 2-D, both sizes multiples of 128. Quantizing here needs neither."""
        return _divides(tensor.shape, self.block_len)


class MXFP8Quantizer(_Float8, ValueQuantizer):
    """FP8 with an E8M0 scale for 32 elements, along rows and along columns.

    Args:
        fp8_dtype: `DType.kFloat8E4M3` or `DType.kFloat8E5M2`.
        rowwise, columnwise: which copies results have.
        with_2d_quantization: one scale for a 32x32 tile.
    """

    tensor_class, storage_class = MXFP8Tensor, MXFP8TensorStorage
    _recipe_class = recipes.MXFP8BlockScaling
    _options = ("with_2d_quantization",)

    def __init__(
        self, fp8_dtype: DType, *, rowwise: bool = True, columnwise: bool = True, with_2d_quantization: bool = False
    ):
        super().__init__(fp8_dtype, rowwise=rowwise, columnwise=columnwise)
        self.with_2d_quantization = with_2d_quantization

    def scaling(self) -> Scaling:
        """`MXFP8Scaling`."""
        return _cached(MXFP8Scaling, fmt=self.dtype.format, two_d=bool(self.with_2d_quantization))

    def check_shape(self, shape: Any) -> None:
        """Raise `ValueError` unless both sizes divide by 32."""
        _require_divisible(shape, MXFP8Scaling.block_size, "MXFP8")

    def is_quantizable(self, tensor: torch.Tensor) -> bool:
        """Whether both sizes divide by 32."""
        return _divides(tensor.shape, MXFP8Scaling.block_size)

    def is_requantization_safe(self) -> bool:
        """True: scales are powers of two, and the values that one gave fit the next."""
        return True


class NVFP4Quantizer(_AmaxReducing):
    """E2M1 with an E4M3 scale for 16 elements and a float32 amax for the tensor.

    Args:
        fp4_dtype: `DType.kFloat4E2M1`.
        rowwise, columnwise: which copies results have.
        with_amax_reduction, amax_reduction_group: take the largest amax of the ranks of a process group.
        with_rht: random Hadamard transform of the columnwise copy. (TE takes bfloat16 alone; here float16 and float32
            too.)
        with_post_rht_amax: take the amax of that copy after the transform. With a transform it must be True, which is
            checked at the first call; without one it has no effect.
        with_2d_quantization: one scale for a 16x16 tile.
        stochastic_rounding: round elements stochastically; the seed comes from torch's default CPU generator, so that
            `torch.manual_seed` makes runs repeat (TE: from the GPU's, whose mapping to elements differs).
        row_scaled_nvfp4: an amax for each row instead of one for the tensor.
        nvfp4_use_4over6, nvfp4_e4m3_max, nvfp4_4over6_err_mode: try mapping a block's maximum to 4 besides 6, largest
            block scale 448 or 256 (448 without 4over6), error "MAE" or "MSE". Where the environment variable
            NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH is 1 at a call, with TE's fast error: `NVFP4Scaling.fast_error`.
        with_random_sign_mask: the transform's fixed signs (0xD7E8), or none.

    Raises:
        ValueError: settings that exclude each other; the message names them.
    """

    tensor_class, storage_class = NVFP4Tensor, NVFP4TensorStorage
    _recipe_class = recipes.NVFP4BlockScaling
    _options = (
        "with_rht",
        "with_post_rht_amax",
        "with_2d_quantization",
        "stochastic_rounding",
        "row_scaled_nvfp4",
        "nvfp4_use_4over6",
        "nvfp4_e4m3_max",
        "nvfp4_4over6_err_mode",
        "with_random_sign_mask",
    )

    def __init__(
        self,
        fp4_dtype: DType = DType.kFloat4E2M1,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        with_rht: bool = False,
        with_post_rht_amax: bool = False,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        nvfp4_4over6_err_mode: str = "MAE",
        with_random_sign_mask: bool = True,
    ):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        if DType.of(fp4_dtype) is not DType.kFloat4E2M1:
            raise ValueError(f"fp4_dtype must be DType.kFloat4E2M1; got {shown(fp4_dtype)}")
        self.dtype = DType.kFloat4E2M1
        self.with_amax_reduction = require_flag(with_amax_reduction, "with_amax_reduction")
        self.amax_reduction_group = amax_reduction_group
        self.with_rht = require_flag(with_rht, "with_rht")
        self.with_post_rht_amax = require_flag(with_post_rht_amax, "with_post_rht_amax")
        self.with_2d_quantization = require_flag(with_2d_quantization, "with_2d_quantization")
        self.stochastic_rounding = require_flag(stochastic_rounding, "stochastic_rounding")
        self.row_scaled_nvfp4 = require_flag(row_scaled_nvfp4, "row_scaled_nvfp4")
        self.nvfp4_use_4over6 = require_flag(nvfp4_use_4over6, "nvfp4_use_4over6")
        self.with_random_sign_mask = require_flag(with_random_sign_mask, "with_random_sign_mask")
        self.nvfp4_e4m3_max = nvfp4_e4m3_max if nvfp4_use_4over6 else 448
        self.nvfp4_4over6_err_mode = str(nvfp4_4over6_err_mode).upper()
        if self.nvfp4_4over6_err_mode not in ("MAE", "MSE"):
            raise ValueError(f"nvfp4_4over6_err_mode must be 'MAE' or 'MSE'; got {shown(nvfp4_4over6_err_mode)}")
        if row_scaled_nvfp4 and with_amax_reduction:
            raise ValueError("row_scaled_nvfp4 excludes with_amax_reduction; got both")
        self._settings_of_calls()  # combinations that exclude each other raise here

    @property
    def rht_matrix_random_sign_mask_t(self) -> int:
        """The 16 signs of the transform: bit i set means -1."""
        return TE_SIGN_MASK if self.with_random_sign_mask else 0

    @property
    def rht_matrix(self) -> torch.Tensor:
        """diag(signs) H / 4 in bfloat16, (16, 16): a row vector of 16 values times it is their transform."""
        bits = torch.arange(16)
        parity = torch.tensor([[(int(i) & int(j)).bit_count() & 1 for j in bits] for i in bits])
        return (self.rht_signs()[:, None] * (1 - 2 * parity) / 4).to(torch.bfloat16)

    def rht_signs(self) -> torch.Tensor:
        """The 16 signs of the transform, float32."""
        return 1.0 - 2.0 * ((self.rht_matrix_random_sign_mask_t >> torch.arange(16)) & 1)

    def _settings_of_calls(self):
        return _cached(
            NVFP4Scaling,
            two_d=bool(self.with_2d_quantization),
            rht=bool(self.with_rht),
            sign_mask=self.rht_matrix_random_sign_mask_t,
            stochastic_rounding=bool(self.stochastic_rounding),
            four_over_six=self.nvfp4_4over6_err_mode.lower() if self.nvfp4_use_4over6 else None,
            fast_error=bool(self.nvfp4_use_4over6) and os.getenv(FAST_ERROR, "0") == "1",
            e4m3_max=self.nvfp4_e4m3_max,
            row_scaled=bool(self.row_scaled_nvfp4),
        )

    def scaling(self) -> Scaling:
        """`NVFP4Scaling`; with stochastic rounding every call draws a seed.

        Raises:
            ValueError: `with_rht` without `with_post_rht_amax`.
        """
        if self.with_rht and not self.with_post_rht_amax:
            raise ValueError(
                "with_rht=True needs with_post_rht_amax=True: the amax of transformed values is taken of those; "
                f"got with_post_rht_amax={self.with_post_rht_amax}"
            )
        return _with_new_seed(self._settings_of_calls())

    def layout_scaling(self) -> Scaling:
        """`scaling()` without a seed: for shapes alone."""
        return self._settings_of_calls()

    def check_shape(self, shape: Any) -> None:
        """Raise `ValueError` unless both sizes divide by 16."""
        _require_divisible(shape, NVFP4Scaling.block_size, "NVFP4")

    def is_quantizable(self, tensor: torch.Tensor) -> bool:
        """Whether both sizes divide by 16; False for row scaling, as in TE."""
        return _divides(tensor.shape, NVFP4Scaling.block_size) and not self.row_scaled_nvfp4


class BlockScaledQuantizer(_AmaxReducing):
    """Blocks with scales of their own, as any scaling says that `refops.scalings` declares.

    TE has no such class. Its quantizers are for the scalings that it has; this one is for all others, and for settings
    that TE's arguments do not reach: `BlockScaledQuantizer(MXFP8Scaling(E4M3, scale_rounding="floor"))`.

    Args:
        scaling: the settings. With stochastic rounding by Philox every call draws a seed in place of theirs.
        rowwise, columnwise: which copies results have.
        with_amax_reduction, amax_reduction_group: take the largest amax of the ranks of a process group, where scales
            depend on an amax of the tensor.

    Raises:
        TypeError: no declared scaling. ValueError: one scale for the tensor, for which TE's quantizers are there;
        `with_amax_reduction` without an amax of the tensor.
    """

    tensor_class, storage_class = BlockScaledTensor, BlockScaledTensorStorage
    _recipe_class = recipes.BlockScaledRecipe

    def __init__(
        self,
        scaling: Scaling,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
    ):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        layout = require_scaling(scaling).layout
        if layout.block is None:
            raise ValueError(f"scaling must have blocks, or be that of another quantizer; got {scaling}")
        if with_amax_reduction and not (layout.two_level and layout.amax == "tensor"):
            raise ValueError(f"with_amax_reduction needs scales that depend on the tensor's amax; got {scaling}")
        self._scaling = scaling
        self.with_amax_reduction, self.amax_reduction_group = with_amax_reduction, amax_reduction_group

    def settings(self) -> Any:
        """Constructor arguments without the process group."""
        return {"scaling": self._scaling, **super().settings()}

    def scaling(self) -> Scaling:
        """The scaling; with stochastic rounding every call draws a seed."""
        return _with_new_seed(self._scaling)

    def layout_scaling(self) -> Scaling:
        """The scaling as it was given: for shapes alone."""
        return self._scaling

    def check_shape(self, shape: Any) -> None:
        """Raise `ValueError` unless `refops` takes a tensor of `shape` in these copies."""
        check_shape(self._scaling, tuple(shape), matrix_shape(shape), self.columnwise_usage)

    def is_quantizable(self, tensor: torch.Tensor) -> bool:
        """Whether both sizes divide into whole blocks. Quantizing may not need that."""
        return _divides(tensor.shape, self._scaling.layout.block[1])


def _quantize_with_amaxes(x, scaling, amaxes, rowwise, columnwise):
    """Quantize with two levels of scales as part of a tensor whose amaxes are larger than those of `x`.

    Kernels take the amax from the tensor. So rows are appended, a block high, that hold the given amax, and with the
    Hadamard transform 16 more whose transform has the given maximum in one place; then the rows of `x` are cut off.
    (The transform of the first ones is amax / 4, which the other maximum never falls below; and a transform is at most
    4 times the largest value, so the reverse holds too.)
    """
    amax, transformed_amax = amaxes
    m, k = matrix_shape(x.shape)
    block, points = sharding.rows_together(scaling), 16
    first = -(-m // block) * block - m  # zeros that fill the last block of `x`
    rows = x.new_zeros(first + block + (0 if transformed_amax is None else points), k)
    rows[first, 0] = amax
    if transformed_amax is not None:
        signs = 1.0 - 2.0 * ((scaling.hadamard >> torch.arange(points, device=x.device)) & 1)
        rows[first + block :, 0] = transformed_amax / 4 * signs
    extended = torch.cat((x.reshape(m, k), rows))
    buffers = dispatch.quantize(extended, scaling, rowwise=rowwise, columnwise=columnwise)
    matrix = sharding.take_rows(buffers, 0, m)
    return BlockScaledTensorStorage(matrix).viewed_buffers(tuple(x.shape))


#: The quantizer classes above: not hybrid and identity quantizers, which cast by no scaling.
CONCRETE = (
    Float8Quantizer,
    Float8CurrentScalingQuantizer,
    Float8BlockQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    BlockScaledQuantizer,
)
QUANTIZERS.update({cls.__name__: cls for cls in CONCRETE})
