"""Conventions of how the Hadamard transform is computed: roundings inside, another factor, another order of outputs."""

import numpy as np

from refops.oracle.conventions.casts import DTYPES
from refops.oracle.conventions.hooks import require_transform
from refops.oracle.conventions.registry import computing
from refops.quantization.hadamard import GROUP, sign_vector, transform_groups

F = np.float32
STRIDES = {"neighbours first": (1, 2, 4, 8), "halves first": (8, 4, 2, 1)}


@computing(
    "hadamard-stages-rounded",
    "Each of the four stages of the Hadamard transform is rounded to {dtype}, {order}, where TE rounds once, at the "
    "end.",
    stage="hadamard",
    choices=[(dtype, order) for dtype in DTYPES for order in STRIDES],
    alone=True,
)
def hadamard_stages_rounded(replay, choice):
    name, order = choice
    require_transform(replay)
    dtype, signs = DTYPES[name], sign_vector(replay.scaling.hadamard)[:, None].astype(F)
    replay.facts["dtype"], replay.facts["order"] = name, order

    def stages(values):
        for stride in STRIDES[order]:
            pairs = values.reshape(len(values), GROUP // (2 * stride), 2, stride, values.shape[2])
            first, second = pairs[:, :, 0], pairs[:, :, 1]
            values = np.stack([first + second, first - second], axis=2).reshape(values.shape)
            values = values.astype(dtype).astype(F)
        return values * F(0.25)

    if replay.dequantizes:
        replay.hadamard_groups = lambda groups: stages(groups.astype(F)) * signs
    else:
        replay.hadamard_groups = lambda groups: replay.round(stages(groups.astype(F) * signs) + F(0))


@computing(
    "hadamard-other-factor",
    "The Hadamard transform is multiplied by {found}, where its factor is 1/4.",
    stage="hadamard",
    choices=(1 / 16, 1 / 8, 1 / 2, 2**-0.5),
    alone=True,
)
def hadamard_other_factor(replay, choice):
    require_transform(replay)
    replay.facts["found"] = f"1/{1 / choice:.4g}"
    factor, mask = F(4 * choice), replay.scaling.hadamard
    if replay.dequantizes:
        replay.hadamard_groups = lambda groups: transform_groups(groups, mask, F, inverse=True) * factor
    else:
        replay.hadamard_groups = lambda groups: replay.round(transform_groups(groups, mask, F) * factor)


def _reversed_bits(number):
    return int(f"{number:04b}"[::-1], 2)


#: Output number -> the one of Sylvester's order that stands there.
ORDERS = {
    "in bit-reversed order": [_reversed_bits(i) for i in range(GROUP)],
    "in order of sign changes": [_reversed_bits(i ^ (i >> 1)) for i in range(GROUP)],
    "in dyadic order": [i ^ (i >> 1) for i in range(GROUP)],
    "in reverse order": list(range(GROUP))[::-1],
    "with even ones first": [*range(0, GROUP, 2), *range(1, GROUP, 2)],
    "with both halves interleaved": [i // 2 + i % 2 * GROUP // 2 for i in range(GROUP)],
}


@computing(
    "hadamard-order",
    "The outputs of the Hadamard transform are {order}, where TE has Sylvester's order.",
    stage="hadamard",
    choices=ORDERS,
    alone=True,
)
def hadamard_order(replay, choice):
    require_transform(replay)
    replay.facts["order"] = choice
    order = np.array(ORDERS[choice])
    if replay.dequantizes:
        replay.wrap("hadamard_groups", lambda inner, groups: inner(groups[:, np.argsort(order)]))
    else:
        replay.after("hadamard_groups", lambda groups: groups[:, order])
