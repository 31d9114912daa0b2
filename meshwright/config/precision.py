"""The precisions that `train.precision` can name, with the facts that the run and the planner need. No torch."""

from __future__ import annotations

from typing import Literal, NamedTuple

Precision = Literal["fp64", "fp32", "bf16", "fp16", "fp8"]


class PrecisionFacts(NamedTuple):
    """The facts about one precision of training."""

    stored: str  # the dtype of weights and activations, and of all products but those of linear layers
    bytes: int  # of an element of that dtype
    is_double: bool = False  # sums, masters and states are in fp64 as well
    is_wide: bool = False  # its products run at a fraction of an accelerator's rate, and a CPU multiplies it natively
    scales_loss: bool = False  # small gradients would underflow without a loss scale
    scales_products: bool = False  # linear layers multiply numbers of 8 bits with scales
    cuts_fp32: bool = False  # the stored dtype is the upper half of an fp32 number


PRECISIONS: dict[str, PrecisionFacts] = {
    "fp64": PrecisionFacts("fp64", 8, is_double=True, is_wide=True),
    "fp32": PrecisionFacts("fp32", 4, is_wide=True),
    "bf16": PrecisionFacts("bf16", 2, cuts_fp32=True),
    "fp16": PrecisionFacts("fp16", 2, scales_loss=True),
    "fp8": PrecisionFacts("bf16", 2, scales_products=True, cuts_fp32=True),
}
