"""The config section on communication: back end, buckets, compression, overlap and algorithms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, get_args

from meshwright.config.blocks import LONGEST_S, not_negative, one_of, positive
from meshwright.device_kinds import AUTO, backend_names
from meshwright.errors import UserError, nearest
from meshwright.plugins import Registry

# Blocks of elements with one scale, and blocks of topk, have a multiple of this many elements.
BLOCK_UNIT = 16
NODE_COPY = "comm.gather.node_copy=true"
# The most elements of a block of topk: positions in a block are sent as numbers of one or two bytes.
MAX_CHOSEN_FROM = 1 << 15


@dataclass(frozen=True)
class ReduceKind:
    """One kind of compression of gradients. Paths are written `package.module:name`.

    A kind with a `codec` compresses slices, element by element. The codec is the path of a class that is called with
    the section of the config (see `Codec` in engine/sharding/compression/exchange.py). `message_bytes` is a function of
    (config, elements, bytes of an element) that returns the bytes of a compressed slice, or its path.

    A kind without a codec has a `reducer`, the path of a function of a `ReducerRequest`, and a `plan` of it, the
    path of a function of the section of the config that needs no torch (see `ReducerPlan`).
    """

    codec: str = ""
    message_bytes: str | Callable[[Any, int, int], int] = ""
    keys: tuple[str, ...] = ()  # the keys of `comm.reduce` among ratio, rank and block that apply to it
    biased: bool = False  # it is wrong on average, so `error_feedback: auto` means error feedback
    rounds: bool = False  # its codec rounds at random if it is given noise
    reducer: str = "meshwright.engine.sharding.compression.make:exchange"
    plan: str = "meshwright.engine.sharding.compression.sizes:CompressionPlan"
    compresses: bool = True
    sends_factors: bool = False  # it sums narrow factors of matrices, so it needs whole matrices


_SIZES, _CODES = "meshwright.engine.sharding.compression.sizes", "meshwright.engine.sharding.compression.quantised"
_SPARSE = "meshwright.engine.sharding.compression.sparse"
REDUCE_KINDS = Registry("comm.reduce.kind", {
    "plain": ReduceKind(compresses=False),
    "bf16": ReduceKind(f"{_CODES}:UpperHalves", f"{_SIZES}:upper_half_bytes", rounds=True),
    "fp8": ReduceKind(f"{_CODES}:Float8", f"{_SIZES}:scaled_bytes", ("block",), rounds=True),
    "int8": ReduceKind(f"{_CODES}:Int8", f"{_SIZES}:scaled_bytes", ("block",), rounds=True),
    "int4": ReduceKind(f"{_CODES}:Int4", f"{_SIZES}:scaled_bytes", ("block",), rounds=True),
    "onebit": ReduceKind(f"{_CODES}:SignCodec", f"{_SIZES}:scaled_bytes", ("block",), biased=True),
    "powersgd": ReduceKind(
        keys=("rank",), biased=True, reducer="meshwright.engine.sharding.compression.make:low_rank", sends_factors=True
    ),
    "topk": ReduceKind(f"{_SPARSE}:TopK", f"{_SIZES}:topk_bytes", ("ratio", "block"), biased=True),
    "threshold": ReduceKind(f"{_SPARSE}:Threshold", f"{_SIZES}:threshold_bytes", ("ratio",), biased=True),
})  # fmt: skip


@dataclass(frozen=True)
class ReduceConfig:
    """The compression of gradients in their sum over the data-parallel ranks. With kind=plain there is none."""

    section: ClassVar[str] = "comm.reduce"
    kind: str = "plain"  # one of REDUCE_KINDS
    ratio: float = 0.01  # topk, threshold: the fraction of the elements that is sent
    rank: int = 4  # powersgd: the rank of the two factors that are sent in place of a matrix
    # fp8, int8, int4, onebit: elements that share a scale; topk: elements of which the largest are sent.
    block: int = 256
    # Add the part that compression left out to the gradient of the next step; auto: see `feeds_back`.
    error_feedback: Literal["auto", "true", "false"] = "auto"
    warmup_steps: int = 0  # the first steps of a run, whose gradients are not compressed
    # Choose the kind after the first steps, by measured times; `ratio` is then the least that topk may send.
    adaptive: bool = False

    def __post_init__(self) -> None:
        one_of(f"{self.section}.kind", self.kind, REDUCE_KINDS)
        positive(self.section, self, "rank", "block")
        not_negative(self.section, self, "warmup_steps")
        if not 0.0 < self.ratio <= 1.0:
            wrong = f"{self.section}.ratio={self.ratio}"
            raise UserError(f"{wrong} must be above 0 and at most 1, e.g. 0.01 for one per cent")
        if self.block % BLOCK_UNIT:
            up = -(-self.block // BLOCK_UNIT) * BLOCK_UNIT
            raise UserError(f"{self.section}.block={self.block} must be a multiple of {BLOCK_UNIT}: try {up}")
        if self.kind == "topk" and self.block > MAX_CHOSEN_FROM:
            raise UserError(f"{self.section}.block={self.block} is more than places in a block of topk can be numbered "
                            f"for: use at most {MAX_CHOSEN_FROM}")  # fmt: skip
        if self.adaptive and (self.facts.compresses or self.error_feedback != "auto"):
            raise UserError(f"{self.section}.adaptive=true chooses how gradients are sent, and keeps what is left out: "
                            f"leave {self.section}.kind and {self.section}.error_feedback out")  # fmt: skip
        of_some = {key for facts in REDUCE_KINDS.values() for key in facts.keys}
        # A key that another kind would need is refused instead of ignored.
        for key in (f.name for f in fields(self)):
            lossy = {name: facts for name, facts in REDUCE_KINDS.items() if facts.compresses}
            kinds = [name for name, facts in lossy.items() if key in facts.keys or key not in of_some]
            if self.adaptive and key != "rank":
                continue
            if key != "kind" and self.kind not in kinds and getattr(self, key) != getattr(ReduceConfig, key):
                raise UserError(
                    f"{self.section}.{key} has no effect with {self.section}.kind={self.kind}: leave it out, or set "
                    f"the kind to {kinds[0] if len(kinds) == 1 else 'one of ' + ', '.join(kinds)}"
                )

    @property
    def facts(self) -> ReduceKind:
        return REDUCE_KINDS[self.kind]

    @property
    def compresses(self) -> bool:
        """True if gradients may be compressed."""
        return self.facts.compresses or self.adaptive

    @property
    def words(self) -> str:
        """The key that asks for compression with its value, as in `comm.reduce.kind=int8`."""
        return f"{self.section}.adaptive=true" if self.adaptive else f"{self.section}.kind={self.kind}"

    @property
    def feeds_back(self) -> bool:
        """True if each rank adds the part that it left out to its next gradient (error feedback). Rounding to several
        bits is stochastic and right on average, so `auto` means error feedback for the other kinds only."""
        biased = self.facts.biased or self.adaptive
        return self.error_feedback == "true" or (self.error_feedback == "auto" and biased)


@dataclass(frozen=True)
class GatherConfig:
    """The all-gather of the weights that ZeRO stage 3 shards. Unless kind is plain, they are rounded for it."""

    kind: Literal["plain", "bf16", "fp8", "int8"] = "plain"
    block: int = 256  # fp8, int8: elements that share a scale
    # Keep gathered weights for the rest of the step, sharded over the ranks of each node: only the first gather of a
    # step crosses nodes.
    node_copy: bool = False

    @property
    def facts(self) -> ReduceKind:
        """The facts about the kind of compression of gradients whose codec rounds the weights."""
        return REDUCE_KINDS[self.kind]

    @property
    def rounds(self) -> bool:
        """True if gathered weights are rounded."""
        return self.facts.compresses

    def __post_init__(self) -> None:
        positive("comm.gather", self, "block")
        if self.block % BLOCK_UNIT:
            up = -(-self.block // BLOCK_UNIT) * BLOCK_UNIT
            raise UserError(f"comm.gather.block={self.block} must be a multiple of {BLOCK_UNIT}: try {up}")
        if "block" not in self.facts.keys and self.block != GatherConfig.block:
            raise UserError(f"comm.gather.block has no effect with comm.gather.kind={self.kind}: leave it out")


@dataclass(frozen=True)
class OverlapConfig:
    """The kinds of communication that overlap with computation. The bytes are the same either way."""

    gradients: bool = True  # gradients are summed over the data axes while backward continues
    weights: bool = True  # ZeRO: a unit's weights are gathered while the unit before it computes
    tensor: bool = False  # linear layers over tp send in pieces while other pieces are multiplied
    pipeline: bool = True  # activations are sent to other stages while the next micro-batch computes
    # With `tensor`: a product is split only if each of its sends can hide behind at least this many GFLOP of it.
    piece_gflop: float = 60.0

    def __post_init__(self) -> None:
        not_negative("comm.overlap", self, "piece_gflop")

    @property
    def piece_flops(self) -> float | None:
        """The least FLOPs of a product for each of its sends over tp. None: products are not split."""
        return self.piece_gflop * 1e9 if self.tensor else None


@dataclass(frozen=True)
class LinkConfig:
    """The rates of the links, as `meshwright comm bench` measures them. `comm.algorithm: auto` chooses by them."""

    link_gb_s: float = 0.0  # rate at which a rank sends to others of its node
    network_gb_s: float = 0.0  # rate at which all ranks of a node together send to other nodes; 0: like link_gb_s
    latency_us: float = 0.0  # latency of every message
    section: ClassVar[str] = "comm.links"

    def __post_init__(self) -> None:
        not_negative(self.section, self, "link_gb_s", "network_gb_s", "latency_us")

    @property
    def on(self) -> bool:
        """True if any rate or latency is given."""
        return bool(self.link_gb_s or self.network_gb_s or self.latency_us)


@dataclass(frozen=True)
class EmulateConfig(LinkConfig):
    """Slow links that are emulated on a CPU by delays, to measure the effect of a slower network. 0: no delay."""

    section: ClassVar[str] = "comm.emulate"
    emulation: ClassVar[str] = "meshwright.lab.emulate:emulate_links"  # the function that delays the calls of a mesh

    def words(self, per_node: int) -> str:
        """Return the links in words, e.g. `emulated links: 0.1 GB/s in a node of 4`."""
        rates = [f"{self.link_gb_s:g} GB/s in a node of {per_node}"] if self.link_gb_s else []
        rates += [f"{self.network_gb_s:g} GB/s between nodes"] if self.network_gb_s else []
        rates += [f"{self.latency_us:g} us"] if self.latency_us else []
        return "emulated links: " + ", ".join(rates)


# The ways to sum gradients: torch's collective, one of Meshwright's algorithms on sends and receives, or the fastest of
# them (auto).
Summing = Literal["torch", "auto", "ring", "tree", "halving_doubling", "mesh", "hierarchical"]
Exchanging = Literal["torch", "hierarchical"]


@dataclass(frozen=True)
class AlgorithmConfig:
    """The algorithms of collectives by axis. In a config, a single word in place of the section sets every axis that
    knows the word."""

    section: ClassVar[str] = "comm.algorithm"
    dp: Summing = "torch"  # sums of gradients over the data axes: dp, cp, and edp for experts
    ep: Exchanging = "torch"  # exchanges of rows among experts; hierarchical: first inside a node, then between nodes

    @property
    def sums_itself(self) -> bool:
        """True if one of Meshwright's algorithms sums gradients instead of torch's collective."""
        return self.dp != "torch"

    @property
    def chooses(self) -> bool:
        """True if the fastest algorithm is chosen for each sum."""
        return self.dp == "auto"

    @property
    def exchanges_by_node(self) -> bool:
        """True if rows travel to their experts inside a node first, and then between nodes."""
        return self.ep == "hierarchical"

    @classmethod
    def from_word(cls, word: str) -> AlgorithmConfig:
        """Return the section that a single word stands for, as in `comm.algorithm: ring`."""
        sums, exchanges = get_args(Summing), get_args(Exchanging)
        if word not in sums:
            raise UserError(f"{cls.section}={word} is not one of {', '.join(sums)}{nearest(word, sums)}")
        return cls(dp=word, ep=word if word in exchanges else "torch")  # type: ignore[arg-type]


@dataclass(frozen=True)
class CommConfig:
    """Communication: the back end, its timeout, the size of gradient buckets, and the sections above."""

    backend: str = AUTO  # auto, gloo, nccl or hccl: a back end of `DEVICE_KINDS`
    timeout: float = 600.0  # seconds until a hanging collective is reported and the run is stopped
    # Gradients are reduced in buckets of about this size. 0: 25 MiB, or more where many ranks sum them.
    bucket_mib: float = 0.0
    reduce: ReduceConfig = field(default_factory=ReduceConfig)
    gather: GatherConfig = field(default_factory=GatherConfig)
    overlap: OverlapConfig = field(default_factory=OverlapConfig)
    emulate: EmulateConfig = field(default_factory=EmulateConfig)
    links: LinkConfig = field(default_factory=LinkConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    # The switch of each node, in the order of nodes: our own rings visit the nodes of a switch one after another.
    switches: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        one_of("comm.backend", self.backend, backend_names())
        positive("comm", self, "timeout")
        not_negative("comm", self, "bucket_mib")
        if self.timeout > LONGEST_S:
            raise UserError(f"comm.timeout={self.timeout:g} is more than a year of seconds: lower it")
        if self.algorithm.dp == "auto" and not self.known_links.link_gb_s:
            raise UserError(
                "comm.algorithm=auto needs to know the links: give comm.links.link_gb_s and, between nodes, "
                "comm.links.network_gb_s (meshwright comm bench measures them)"
            )

    @property
    def known_links(self) -> LinkConfig:
        """The links that sums are sent over: the emulated ones if there are any, else those given in `comm.links`."""
        return self.emulate if self.emulate.on else self.links
