"""The kinds of norms that `model.norm` can name, with the facts that configs, model parts and the planner need. No
torch."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.plugins import Registry


@dataclass(frozen=True)
class NormKind:
    """One kind of norm.

    `module` is the path `package.module:Class` of a `meshwright.nn.norm.Norm`. It is imported only when a model is
    built, so that registering a norm needs no torch.
    """

    module: str
    supports: frozenset[str]  # the features of `config/features.py` that it works with
    statistics: int = 1  # numbers per row that are saved for backward
    centred: bool = False  # it subtracts a row's mean
    bias: bool = False  # it has a bias if `model.bias` is true
    elementwise: bool = True  # it has a weight per feature; false: one weight for all of them
    fuses: bool = False  # `Linear.after_norm` has a kernel that fuses it with the product after it
    host_copies: int = 0  # full-size tensors in accumulation precision that it saves on a CPU instead of its input


NORMS = Registry(
    "model.norm",
    {
        "layernorm": NormKind(
            "meshwright.nn.norm:LayerNorm", frozenset({"grid"}), statistics=2, centred=True, bias=True
        ),
        "rmsnorm": NormKind("meshwright.nn.norm:RMSNorm", frozenset({"grid"}), fuses=True, host_copies=2),
    },
)
