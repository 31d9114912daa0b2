"""The kinds of norms that `model.norm` can name, with the facts that configs, parts and the planner need. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.plugins import Registry


@dataclass(frozen=True)
class NormKind:
    """One kind of norm. `module` is the path `package.module:Class` of a `meshwright.nn.norm.Norm`, which is imported
    when a model is built, so that registering a norm needs no torch."""

    module: str
    supports: frozenset[str]  # the features of `config/features.py` that it works with
    statistics: int = 1  # numbers that each row keeps for backward
    centred: bool = False  # it subtracts a row's mean
    bias: bool = False  # it has a bias where `model.bias` is true
    elementwise: bool = True  # it has a weight for each feature; false: one for all of them
    fuses: bool = False  # `Linear.after_norm` has a kernel that computes it with the product after it
    host_copies: int = 0  # full-size tensors in the precision of sums that it keeps on a CPU in place of its input


NORMS = Registry(
    "model.norm",
    {
        "layernorm": NormKind(
            "meshwright.nn.norm:LayerNorm", frozenset({"grid"}), statistics=2, centred=True, bias=True
        ),
        "rmsnorm": NormKind("meshwright.nn.norm:RMSNorm", frozenset({"grid"}), fuses=True, host_copies=2),
    },
)
