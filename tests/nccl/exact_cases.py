"""The cases that must equal one process in float64: every axis, schedule, algorithm, grid and way to offload. No torch.

Most are parity cases, chosen by name. The others have shapes that only a network exposes: messages that NCCL does not
buffer, and sums by Meshwright's own algorithms on numbers of ranks that are not powers of two.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from tests.nccl.transports import Transport
from tests.parity.cases import LLAMA, MICRO_BATCHES, SPLIT, Case, cut, special
from tests.parity.expert_cases import MIXTURES
from tests.parity.matrix import CASES as PARITY
from tests.parity.sharded_cases import SHARDED

# Rows and columns of the messages between stages. NCCL completes a small send without its receive, but not one of 33
# MB.
MESSAGE = {"nccl": 2048, "gloo": 256}
# Keys that only configure communication between ranks. One process has none of them.
BETWEEN_RANKS = {"comm": ("algorithm", "overlap", "links", "gather", "switches"), "train": ("server", "compile")}


@dataclass(frozen=True)
class Exact:
    """A case whose gradients, norms, parameters, moments and validation loss must equal those of one process."""

    subject: str
    case: Case
    large: bool = False  # The case has messages that NCCL does not buffer.

    @property
    def name(self) -> str:
        return f"{self.subject}/{self.case.name}"

    @property
    def ranks(self) -> int:
        return self.case.world

    def sections(self, transport: Transport) -> dict[str, dict[str, Any]]:
        return self._sized(self.case.sections("fp64"), transport)

    def alone(self, transport: Transport) -> dict[str, dict[str, Any]]:
        """Return the config of the same training on one process."""
        sections = self._sized(self.case.alone("fp64"), transport)
        for section, keys in BETWEEN_RANKS.items():
            sections[section] = {key: value for key, value in sections[section].items() if key not in keys}
        if self.large:
            # All samples at once would need gigabytes for scores.
            sections["train"]["micro_batch"] = 1
        return sections

    def _sized(self, sections: dict[str, dict[str, Any]], transport: Transport) -> dict[str, dict[str, Any]]:
        if self.large:
            size = MESSAGE[transport.name]
            # Few and narrow heads: the weights stay small while the messages do not.
            sections["model"] |= {"seq": size, "hidden": size, "heads": 2, "kv_heads": 2, "head_dim": 8, "ffn": 16}
        # Worlds run side by side, so each needs its own folder.
        if "offload" in sections.get("zero", {}):
            folder = Path(tempfile.gettempdir()) / f"meshwright-{transport.name}-{self.case.name}"
            sections["zero"]["offload"] = sections["zero"]["offload"] | {"path": str(folder)}
        return sections


_BY_NAME = {case.name: case for case in PARITY}
_BY_LABEL = {case.label: case for case in PARITY}


def _layouts() -> Iterator[Exact]:
    names = (
        "dp2-tp1-pp1-1f1b-gpt-tied", "dp4-tp1-pp1-1f1b-llama-untied", "dp8-tp1-pp1-1f1b-gpt-untied",
        "dp1-tp2-pp1-1f1b-llama-tied", "dp1-tp2-pp1-sp-1f1b-gpt-tied", "dp1-tp4-pp1-sp-1f1b-llama-untied",
        "dp1-tp8-pp1-sp-1f1b-gpt-tied", "dp1-tp1-pp2-gpipe-gpt-untied", "dp1-tp1-pp2-interleaved-llama-tied",
        "dp1-tp1-pp4-1f1b-gpt-tied", "dp1-tp1-pp4-interleaved-gpt-untied", "dp1-tp1-pp8-1f1b-llama-tied",
        "dp2-tp2-pp1-sp-1f1b-gpt-untied", "dp2-tp1-pp2-gpipe-llama-tied", "dp1-tp2-pp2-sp-interleaved-gpt-tied",
        "dp2-tp2-pp2-sp-1f1b-gpt-tied", "dp2-tp2-pp2-sp-interleaved-llama-untied", "dp1-tp2-pp4-gpipe-llama-tied",
    )  # fmt: skip
    yield from (Exact("layout", _BY_NAME[name]) for name in names)
    uneven = ("layers-not-divisible", "split-ends-without-layers", "fewer-micro-batches-than-stages", "order-dp-first")
    yield from (Exact("layout", _BY_LABEL[label]) for label in uneven)


def _contexts() -> Iterator[Exact]:
    labels = (
        "cp2-gather-zigzag", "cp4-gather-striped", "cp2-ring-zigzag", "cp4-ring-zigzag-documents",
        "cp2-ring-striped-documents", "cp2-ulysses-zigzag", "cp4-ulysses-zigzag-documents", "cp4-hybrid-zigzag",
        "cp4-hybrid-contiguous-documents", "cp2-ring-tp-sp", "cp2-gather-tp-sp-pp", "cp2-ring-chunks", "cp8-ring-8",
        "cp8-hybrid-8", "cp2-ring-dp", "cp4-experts", "cp2-experts-tp",
    )  # fmt: skip
    yield from (Exact("context", _BY_LABEL[label]) for label in labels)


def _experts() -> Iterator[Exact]:
    names = (
        "dp2-tp1-pp1-1f1b-llama-tied-deepseek-ep2", "dp1-tp2-pp1-sp-1f1b-llama-tied-olmoe-ep2-etp1",
        "dp4-tp1-pp1-1f1b-llama-tied-mixtral-ep4-etp1-zero3", "dp4-tp1-pp1-1f1b-llama-tied-olmoe-ep2-etp2-zero2",
        "dp2-tp2-pp1-sp-1f1b-llama-tied-mixtral-ep2-etp1-zero1", "dp1-tp4-pp1-1f1b-llama-tied-mixtral-ep1-etp4-zero0",
        "dp2-tp1-pp2-interleaved-llama-tied-deepseek-ep2", "dp2-tp2-pp2-sp-1f1b-llama-tied-olmoe-ep2-etp1-zero3",
        "dp4-tp1-pp1-1f1b-llama-tied-deepseek-ep4-etp1-by-node", "dp4-tp2-pp1-sp-1f1b-llama-tied-olmoe-ep8-etp1-zero2",
    )  # fmt: skip
    yield from (Exact("experts", _BY_NAME[name]) for name in names)
    # The 32 tokens of a step choose one of 64 experts each. Most experts get none, so their ranks send and receive
    # nothing.
    keys = {f"model__experts__{key}": value for key, value in MIXTURES["olmoe"].items()}
    keys |= {"model__experts__count": 64, "model__experts__top_k": 1, "layout__etp": 1}
    yield Exact("experts", special("empty-ep4", cut(4, 1, 1, **LLAMA), layout__ep=4, **keys))
    yield Exact("experts", special("empty-ep8-tp", cut(4, 2, 1, sp=True, **LLAMA), layout__ep=8, **keys))
    tied = {**keys, "layout__ep": 2, "layout__etp": 2, "layout__cp": 2, "context__kind": "ring"}
    whole = cut(1, 2, 2, cp=2, **LLAMA)
    yield Exact("experts", special("tp-cp-pp-documents", whole, {"segments": True}, **tied))


def _sharding() -> Iterator[Exact]:
    """Yield ZeRO over the data-parallel ranks with every place to offload to. The parity cases chose the pairs."""
    chosen = [case for case in SHARDED if case.world == 4 and case.dp > 1]
    further = ("zero3-node", "zero3-chunks-on-one-rank", "zero2-masked-rank")
    chosen += [case for case in SHARDED if case.label in further]
    chosen += [_BY_NAME["dp8-tp1-pp1-1f1b-gpt-tied-zero2-none-none-none"]]
    yield from (Exact("zero", case) for case in chosen)
    offload = {"recompute__mode": "full", "recompute__offload": True}
    yield Exact("zero", special("activations", cut(2, 1, 2, **LLAMA), **offload))
    yield Exact("zero", special("activations-zero3", cut(2, 2, 1, sp=True), **offload, zero__stage=3))
    yield Exact("zero", special("no-overlap-3", cut(4, 1, 1), zero__stage=3, comm__overlap={"weights": False}))
    yield Exact("zero", special("no-overlap-2", cut(4, 1, 1), zero__stage=2, comm__overlap={"gradients": False}))


def _algorithms() -> Iterator[Exact]:
    def summed(kind: str, ranks: int, node: int = 0, **more: Any) -> Exact:
        words = [kind, f"{ranks}", f"node{node}" if node else "", f"zero{more['zero__stage']}" if more else ""]
        keys: dict[str, Any] = {"comm__algorithm": kind, **({"layout__node_size": node} if node else {}), **more}
        return Exact("algorithm", special("-".join(filter(None, words)), cut(ranks, 1, 1), **keys))

    for kind in ("ring", "tree", "mesh"):
        yield from (summed(kind, ranks) for ranks in (2, 3, 4, 5, 6, 8))
    yield from (summed("halving_doubling", ranks) for ranks in (2, 4, 8))
    nodes = ((3, 1), (4, 2), (4, 4), (6, 2), (6, 3), (8, 2), (8, 4))
    yield from (summed("hierarchical", ranks, node) for ranks, node in nodes)
    yield summed("ring", 3, zero__stage=1)
    yield summed("ring", 4, zero__stage=2)
    yield summed("tree", 5, zero__stage=1)
    yield summed("mesh", 6, zero__stage=3)
    yield summed("hierarchical", 8, 4, zero__stage=2)
    slow = {"comm__links": {"link_gb_s": 10.0, "network_gb_s": 0.1, "latency_us": 20.0}}
    for ranks, node in ((4, 2), (5, 1), (6, 3), (8, 4)):
        keys = {"comm__algorithm": "auto", "layout__node_size": node, **slow}
        yield Exact("algorithm", special(f"auto-{ranks}-node{node}", cut(ranks, 1, 1), **keys))
    yield Exact("algorithm", special("ring-tp-pp", cut(2, 2, 2, sp=True, **LLAMA), comm__algorithm="ring"))


def _grids() -> Iterator[Exact]:
    def grid(kind: str, sizes: tuple[int, ...], label: str, pp: int = 1, dp: int = 1, **extra: Any) -> Exact:
        row, col, depth = (*sizes, 1)[:3]
        sequences = depth * (max(row, col) if kind == "3d" else row)
        keys: dict[str, Any] = {
            "layout__tp_grid": list(sizes), "layout__tp_kind": kind, "train__micro_batch": sequences,
            "train__global_batch": dp * MICRO_BATCHES[pp] * sequences, **extra,
        }  # fmt: skip
        return Exact("grid", special(f"{kind}-{label}", cut(dp, prod(sizes), pp, **LLAMA), **keys))

    compiled = {"train__compile": "true"}
    for kind, sizes in (("2d", (2, 2)), ("2.5d", (1, 2, 2)), ("3d", (2, 2, 1))):
        yield grid(kind, sizes, "plain")
        yield grid(kind, sizes, "compiled", **compiled)
        yield grid(kind, sizes, "zero1", dp=2, zero__stage=1)
    yield grid("2.5d", (2, 2, 2), "whole")
    yield grid("3d", (2, 2, 2), "whole-compiled", **compiled)
    yield grid("2d", (2, 2), "zero2-compiled", dp=2, zero__stage=2, **compiled)
    yield grid("2d", (2, 2), "pp", pp=2)
    yield grid("3d", (2, 2, 1), "pp-compiled", pp=2, **compiled)
    # Gradients of a single micro-batch are released as soon as they are sent.
    yield grid("2d", (2, 2), "one-compiled", train__global_batch=2, **compiled)


def _overlaps() -> Iterator[Exact]:
    pieces = {"comm__overlap": {"tensor": True, "piece_gflop": 0.0}}
    for tp in (2, 4):
        for sp in (False, True):
            yield Exact("overlap", special("pieces", cut(1, tp, 1, sp=sp), **pieces))  # with biases
    yield Exact("overlap", special("pieces-full", cut(2, 2, 1, sp=True, **LLAMA), **pieces, recompute__mode="full"))
    yield Exact("overlap", special("pieces-zero3", cut(2, 2, 1, sp=True, **LLAMA), **pieces, zero__stage=3))
    plain = {"comm__overlap": {"gradients": False, "weights": False, "pipeline": False}}
    yield Exact("overlap", special("none", cut(2, 1, 2), **plain, zero__stage=3))


def _messages() -> Iterator[Exact]:
    """Yield cases that test the order of sends and receives with messages that complete only with their other end."""
    one = {"train__global_batch": 4}
    for overlap in (True, False):
        more = {} if overlap else {"comm__overlap": {"pipeline": False}}
        word = "" if overlap else "-no-overlap"
        for schedule in ("1f1b", "gpipe"):
            yield Exact("messages", special(f"large{word}", cut(1, 1, 4, schedule=schedule, **LLAMA), **more), True)
        for chunks in (2, 4):
            keys = {"layout__chunks": chunks, "model__layers": 2 * chunks, **one, **more}
            pipe = cut(1, 1, 2, schedule="interleaved", **LLAMA)
            yield Exact("messages", special(f"large-x{chunks}{word}", pipe, **keys), True)
    yield Exact("messages", special("large-dp", cut(2, 1, 2, schedule="interleaved", **LLAMA), zero__stage=3), True)
    yield Exact("messages", special("large-tp", cut(1, 2, 2, sp=True, **LLAMA)), True)
    ring = {"layout__cp": 2, "context__kind": "ring"}
    yield Exact("messages", special("large-cp", cut(1, 1, 2, cp=2, **LLAMA), **ring), True)
    # Two chunks on four ranks make the last rank send to the first.
    pipe = cut(1, 1, 4, schedule="interleaved", **LLAMA)
    yield Exact("messages", special("large-x2-pp4", pipe, layout__chunks=2, model__layers=8), True)


def _schedules() -> Iterator[Exact]:
    """Yield the schedules that split backwards. Their sends and receives must pair up with large messages too."""
    for schedule in SPLIT:
        pipe = cut(1, 1, 4, schedule=schedule, **LLAMA)
        yield Exact("schedules", special(f"large-{schedule}", pipe), True)
        yield Exact("schedules", special(f"{schedule}-dp", cut(2, 1, 2, schedule=schedule), zero__stage=3))
        tensor = cut(1, 2, 2, sp=True, schedule=schedule, **LLAMA)
        yield Exact("schedules", special(f"{schedule}-tp", tensor, recompute__mode="full"))


def _lora(kind: str = "lora", **more: Any) -> dict[str, Any]:
    return {"tune__kind": kind, "tune__rank": 4, **more}


def _adapters() -> Iterator[Exact]:
    packed = {"tune__quantise": "nf4", "model__hidden": 128, "model__ffn": 128, "model__head_dim": 16}
    for kind in ("lora", "dora"):
        yield Exact("adapters", special(kind, cut(2, 2, 1, sp=True, **LLAMA), **_lora(kind), zero__stage=3))
        yield Exact("adapters", special(kind, cut(2, 1, 2, **LLAMA), **_lora(kind), zero__stage=1))
    yield Exact("adapters", special("nf4", cut(2, 2, 1, **LLAMA), **_lora(), **packed, zero__stage=3))
    yield Exact("adapters", special("nf4", cut(1, 1, 2, **LLAMA), **_lora(), **packed))
    for loss in ("dpo", "kto"):
        keys = {
            "data__objective": "preference", "tune__loss": loss, "tune__beta": 0.3, "model__seq": 24,
            "train__micro_batch": 2, "train__global_batch": 8,
        }  # fmt: skip
        yield Exact("adapters", special(loss, cut(2, 2, 1, **LLAMA), **_lora(), **keys))
        yield Exact("adapters", special(f"{loss}-zero3", cut(2, 1, 2, **LLAMA), **_lora(), **keys, zero__stage=3))


def _other_models() -> Iterator[Exact]:
    t5 = {
        "model__kind": "t5", "model__head_dim": 6, "model__t5__decoder_seq": 8, "model__t5__distance": 18,
        "model__norm": "rmsnorm", "model__mlp": "relu", "model__position": "relative", "model__bias": False,
    }  # fmt: skip
    bert = {"model__kind": "bert", "model__predictions": 5}
    stages = {"pipeline__encoder_stages": 1}
    yield Exact("t5", special("t5", cut(2, 2, 1, sp=True), **t5, zero__stage=3))
    deep = {"model__layers": 5, "model__t5__encoder_layers": 2}
    yield Exact("t5", special("t5", cut(1, 1, 4), **t5, **stages, **deep))
    yield Exact("t5", special("t5-all", cut(2, 2, 2, sp=True), **t5, **stages, zero__stage=1))
    yield Exact("bert", special("bert", cut(2, 2, 1, sp=True), **bert, zero__stage=3))
    yield Exact("bert", special("bert", cut(1, 1, 2, schedule="interleaved"), **bert))
    yield Exact("bert", special("bert-all", cut(2, 2, 2, sp=True), **bert, zero__stage=1))


def _servers() -> Iterator[Exact]:
    """Yield parameter servers that wait for all ranks, which is data parallelism."""
    yield Exact("server", special("server", cut(4, 1, 1), train__server={"ranks": 1}))
    yield Exact("server", special("servers", cut(2, 2, 1, **LLAMA), train__server={"ranks": 2}))


EXACT_CASES = [
    *_layouts(), *_contexts(), *_experts(), *_sharding(), *_algorithms(), *_grids(), *_overlaps(), *_messages(),
    *_schedules(),
    *_adapters(), *_other_models(), *_servers(),
]  # fmt: skip
