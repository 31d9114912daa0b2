"""The section on communication: back end, buckets, and how gradients are summed over the data-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal, get_args

from meshwright.config.blocks import LONGEST_S, not_negative, positive
from meshwright.errors import UserError, nearest

BLOCK_UNIT = 16  # what a block of numbers with one scale is a multiple of
NODE_COPY = "comm.gather.node_copy=true"
MOST_CHOSEN_FROM = 1 << 15  # elements of a block of topk, whose places are numbers of one or two bytes
# The kinds that a key of `comm.reduce` belongs to.
SPARSE, LOW_RANK = ("topk", "threshold"), ("powersgd",)
ROUNDED, SCALED = ("bf16", "fp8", "int8", "int4"), ("fp8", "int8", "int4", "onebit")


@dataclass(frozen=True)
class ReduceConfig:
    """How gradients are summed over the data-parallel ranks: as they are, or compressed."""

    section: ClassVar[str] = "comm.reduce"
    kind: Literal["plain", "bf16", "fp8", "int8", "int4", "onebit", "powersgd", "topk", "threshold"] = "plain"
    ratio: float = 0.01  # topk, threshold: the part of the elements that is sent
    rank: int = 4  # powersgd: of the product that stands for a matrix
    block: int = 256  # fp8, int8, int4, onebit: elements that share a scale; topk: of which the largest are sent
    error_feedback: Literal["auto", "true", "false"] = "auto"  # what was left out is added to the next step's gradient
    warmup_steps: int = 0  # first steps of a run that are summed as they are
    adaptive: bool = False  # the kind is chosen after the first steps, by what was measured; `ratio`: the least

    def __post_init__(self) -> None:
        positive(self.section, self, "rank", "block")
        not_negative(self.section, self, "warmup_steps")
        if not 0.0 < self.ratio <= 1.0:
            wrong = f"{self.section}.ratio={self.ratio}"
            raise UserError(f"{wrong} must be above 0 and at most 1, e.g. 0.01 for one per cent")
        if self.block % BLOCK_UNIT:
            up = -(-self.block // BLOCK_UNIT) * BLOCK_UNIT
            raise UserError(f"{self.section}.block={self.block} must be a multiple of {BLOCK_UNIT}: try {up}")
        if self.kind == "topk" and self.block > MOST_CHOSEN_FROM:
            raise UserError(f"{self.section}.block={self.block} is more than places in a block of topk can be numbered "
                            f"for: use at most {MOST_CHOSEN_FROM}")  # fmt: skip
        if self.adaptive and (self.kind != "plain" or self.error_feedback != "auto"):
            raise UserError(f"{self.section}.adaptive=true chooses how gradients are sent, and keeps what is left out: "
                            f"leave {self.section}.kind and {self.section}.error_feedback out")  # fmt: skip
        belongs = {"ratio": SPARSE, "rank": LOW_RANK, "block": (*SCALED, "topk")}
        lossy = tuple(kind for kind in KINDS if kind != "plain")
        for key in (f.name for f in fields(self)):
            kinds = belongs.get(key, lossy)
            if self.adaptive and key != "rank":
                continue
            if key != "kind" and self.kind not in kinds and getattr(self, key) != getattr(ReduceConfig, key):
                raise UserError(
                    f"{self.section}.{key} has no effect with {self.section}.kind={self.kind}: leave it out, or set "
                    f"the kind to {kinds[0] if len(kinds) == 1 else 'one of ' + ', '.join(kinds)}"
                )

    @property
    def compresses(self) -> bool:
        return self.kind != "plain" or self.adaptive

    @property
    def words(self) -> str:
        """The key that asks for compression, with its value."""
        return f"{self.section}.adaptive=true" if self.adaptive else f"{self.section}.kind={self.kind}"

    @property
    def feeds_back(self) -> bool:
        """Whether each rank keeps what it left out. Rounding to a few bits is by chance and right on average, so
        `auto` keeps it for the other kinds alone."""
        by_itself = self.kind in ("onebit", *LOW_RANK, *SPARSE) or self.adaptive
        return self.error_feedback == "true" or (self.error_feedback == "auto" and by_itself)


KINDS = ("plain", "bf16", *SCALED, *LOW_RANK, *SPARSE)


@dataclass(frozen=True)
class GatherConfig:
    """How the weights that ZeRO stage 3 divides travel to the ranks that use them: as they are, or rounded."""

    kind: Literal["plain", "bf16", "fp8", "int8"] = "plain"
    block: int = 256  # fp8, int8: elements that share a scale
    node_copy: bool = False  # a node keeps what it has gathered, divided among its ranks, for the rest of the step

    def __post_init__(self) -> None:
        positive("comm.gather", self, "block")
        if self.block % BLOCK_UNIT:
            up = -(-self.block // BLOCK_UNIT) * BLOCK_UNIT
            raise UserError(f"comm.gather.block={self.block} must be a multiple of {BLOCK_UNIT}: try {up}")
        if self.kind not in SCALED and self.block != GatherConfig.block:
            raise UserError(f"comm.gather.block has no effect with comm.gather.kind={self.kind}: leave it out")


@dataclass(frozen=True)
class OverlapConfig:
    """Which communication runs while something is computed. The bytes are the same either way."""

    gradients: bool = True  # summed over the data axes while backward goes on
    weights: bool = True  # ZeRO: gathered while the unit before computes
    tensor: bool = False  # sent over tp in pieces, while other pieces are multiplied
    pipeline: bool = True  # sent to other stages while the next micro-batch computes
    piece_gflop: float = 60.0  # tensor: a product is cut where each send has at least so much of it to hide behind

    def __post_init__(self) -> None:
        not_negative("comm.overlap", self, "piece_gflop")

    @property
    def piece_flops(self) -> float | None:
        """The FLOPs of a product for each send over tp; None: products are not cut."""
        return self.piece_gflop * 1e9 if self.tensor else None


@dataclass(frozen=True)
class LinkConfig:
    """What links carry, as `meshwright comm bench` measures it: `comm.algorithm: auto` chooses by it."""

    link_gb_s: float = 0.0  # what a rank sends to others of its node
    network_gb_s: float = 0.0  # what the ranks of a node together send to other nodes; 0: like the rank's link
    latency_us: float = 0.0  # of every message
    section: ClassVar[str] = "comm.links"

    def __post_init__(self) -> None:
        not_negative(self.section, self, "link_gb_s", "network_gb_s", "latency_us")

    @property
    def on(self) -> bool:
        return bool(self.link_gb_s or self.network_gb_s or self.latency_us)


@dataclass(frozen=True)
class EmulateConfig(LinkConfig):
    """Slow links that are emulated by delays, on a CPU, to measure what a slower network would do; 0: as they are."""

    section: ClassVar[str] = "comm.emulate"

    def words(self, per_node: int) -> str:
        """Returns e.g. `emulated links: 0.1 GB/s in a node of 4`."""
        rates = [f"{self.link_gb_s:g} GB/s in a node of {per_node}"] if self.link_gb_s else []
        rates += [f"{self.network_gb_s:g} GB/s between nodes"] if self.network_gb_s else []
        rates += [f"{self.latency_us:g} us"] if self.latency_us else []
        return "emulated links: " + ", ".join(rates)


# How gradients are summed: by torch's collective, by one of ours on sends and receives, or by the fastest.
Summing = Literal["torch", "auto", "ring", "tree", "halving_doubling", "mesh", "hierarchical"]
Exchanging = Literal["torch", "hierarchical"]


@dataclass(frozen=True)
class AlgorithmConfig:
    """Which algorithms collectives run by, axis by axis; one word stands for every axis that knows it."""

    section: ClassVar[str] = "comm.algorithm"
    dp: Summing = "torch"  # sums of gradients over the data axes: dp, cp, and edp of experts
    ep: Exchanging = "torch"  # exchanges of rows among experts: at once, or first inside a node and then between nodes

    @property
    def sums_itself(self) -> bool:
        """True if our own algorithm sums gradients instead of torch's collective."""
        return self.dp != "torch"

    @classmethod
    def from_word(cls, word: str) -> AlgorithmConfig:
        sums, exchanges = get_args(Summing), get_args(Exchanging)
        if word not in sums:
            raise UserError(f"{cls.section}={word} is not one of {', '.join(sums)}{nearest(word, sums)}")
        return cls(dp=word, ep=word if word in exchanges else "torch")  # type: ignore[arg-type]


@dataclass(frozen=True)
class CommConfig:
    backend: Literal["auto", "gloo", "nccl", "hccl"] = "auto"
    timeout: float = 600.0  # seconds until a collective that does not end is reported and the run stopped
    # Gradients are reduced in buckets of about this size. 0: 25 MiB, or more where many ranks sum them.
    bucket_mib: float = 0.0
    reduce: ReduceConfig = field(default_factory=ReduceConfig)
    gather: GatherConfig = field(default_factory=GatherConfig)
    overlap: OverlapConfig = field(default_factory=OverlapConfig)
    emulate: EmulateConfig = field(default_factory=EmulateConfig)
    links: LinkConfig = field(default_factory=LinkConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    switches: tuple[int, ...] = ()  # that each node is at: our own rings visit the nodes of a switch one after another

    def __post_init__(self) -> None:
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
        """The links that sums go over: the emulated ones, or those that the user gives."""
        return self.emulate if self.emulate.on else self.links
