"""The matrix of layouts: every way to cut 1, 2, 4 and 8 ranks into dp x tp x pp, and what else may differ. No torch."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

WORLDS = (1, 2, 4, 8)
SCHEDULES = ("gpipe", "1f1b", "interleaved")

FAMILIES: dict[str, dict[str, Any]] = {
    # GPT-2's shape: layer norms, biases, learned positions.
    "gpt": {"heads": 8, "norm": "layernorm", "mlp": "gelu", "position": "learned", "bias": True},
    # Llama's shape. With two key-value heads, tp = 4 and 8 hold copies of them.
    "llama": {
        "heads": 8, "kv_heads": 2, "norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "bias": False, "ffn": 48,
    },
}  # fmt: skip

# Micro-batches of each data-parallel rank, by pp: enough for a steady state, and not always a multiple of pp.
MICRO_BATCHES = {1: 2, 2: 3, 4: 5, 8: 8}
# In fp32, where what is compared are losses over many steps, fewer.
FEWER = {1: 1, 2: 2, 4: 3, 8: 4}

Overrides = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Case:
    """One layout and model. `extra` overrides config keys ("section.key"), `data` arguments of the made samples."""

    dp: int
    tp: int
    pp: int
    sp: bool = False
    schedule: str = "1f1b"
    family: str = "gpt"
    tied: bool = True
    label: str = ""
    extra: Overrides = ()
    data: Overrides = ()
    cp: int = 1

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def name(self) -> str:
        words = [
            f"dp{self.dp}", f"tp{self.tp}", f"pp{self.pp}", "sp" if self.sp else "", self.schedule, self.family,
            "tied" if self.tied else "untied", self.label,
        ]  # fmt: skip
        return "-".join(word for word in words if word)

    @property
    def fp32_steps(self) -> int:
        """Losses to compare in fp32. These steps take most of a case's time, and that rounding stays small over many of
        them is a matter of the layout: what else may differ gets a few."""
        return 4 if self.label else 20

    def sections(self, precision: str) -> dict[str, dict[str, Any]]:
        """The config's sections, for `small_config`."""
        chunks = 2 if self.schedule == "interleaved" else 1
        count = (FEWER if precision == "fp32" else MICRO_BATCHES)[self.pp]
        sections: dict[str, dict[str, Any]] = {
            "model": {
                "layers": max(2, self.pp * chunks), "hidden": 32, "vocab": 53, "seq": 16,
                "tied_embeddings": self.tied, **FAMILIES[self.family],
            },
            "layout": {"tp": self.tp, "pp": self.pp, "sequence_parallel": self.sp, "chunks": chunks},
            "pipeline": {"schedule": self.schedule},
            # A norm of about 1.3: every step is clipped.
            "train": {
                "precision": precision, "global_batch": self.dp * count, "micro_batch": 1,
                "steps": 20, "clip": 0.7,
            },
            "optimizer": {"lr": 1e-3},
            "lr": {"warmup": 5},
            "comm": {"bucket_mib": 0.02},
        }  # fmt: skip
        for path, value in self.extra:
            *above, key = path.split(".")
            section: dict[str, Any] = sections
            for name in above:
                section = section.setdefault(name, {})
            section[key] = value
        sections["run"] = {"eval_samples": sections["train"]["global_batch"]}
        return sections

    def alone(self, precision: str) -> dict[str, dict[str, Any]]:
        """The same run on one process: no layout, no pipeline, and as few micro-batches as can be."""
        sections = self.sections(precision)
        sections["layout"], sections["pipeline"] = {}, {}
        sections.pop("context", None)
        sections.pop("zero", None)
        sections.pop("recompute", None)
        train = sections["train"]
        train["micro_batch"] = train["ramp"][0] if "ramp" in train else train["global_batch"]
        return sections


def case_of_kind(label: str, dp: int, tp: int, pp: int, data: dict[str, Any] | None, given: dict[str, Any]) -> Case:
    """A case of another kind of model. Those keys of `given` that have a dot are keys of the config."""
    extra = tuple((key, value) for key, value in given.items() if "." in key)
    own = {key: value for key, value in given.items() if "." not in key}
    return Case(dp, tp, pp, label=label, extra=extra, data=tuple((data or {}).items()), **own)


def layouts(world: int) -> Iterator[tuple[int, int, int, bool]]:
    """(dp, tp, pp, sequence parallel) of every way to cut `world` ranks."""
    sizes = [n for n in range(1, world + 1) if world % n == 0]
    for tp in sizes:
        for pp in sizes:
            if world % (tp * pp) == 0:
                for sp in (False, True) if tp > 1 else (False,):
                    yield world // (tp * pp), tp, pp, sp


# Without a pipeline the kinds differ in the order of micro-batches only: there one cut is tried with all of them.
MATRIX = [
    Case(dp, tp, pp, sp, schedule, family, tied)
    for world in WORLDS
    for dp, tp, pp, sp in layouts(world)
    for schedule in (SCHEDULES if pp > 1 or world == 1 else ("1f1b",))
    for family in FAMILIES
    for tied in (True, False)
]


def _special(label: str, case: dict[str, Any], data: dict[str, Any] | None = None, **extra: Any) -> Case:
    """`extra`'s keys are written section__key."""
    overrides = tuple((key.replace("__", "."), value) for key, value in extra.items())
    return Case(**case, label=label, extra=overrides, data=tuple((data or {}).items()))


def _cut(dp: int, tp: int, pp: int, **more: Any) -> dict[str, Any]:
    return {"dp": dp, "tp": tp, "pp": pp, **more}


def _rope(kind: str, original: int, **more: float) -> dict[str, Any]:
    return {"kind": kind, "factor": 4.0, "original": original, **more}


_LLAMA = {"family": "llama"}
_YARN = _rope("yarn", 8, beta_fast=2.0, beta_slow=0.1)
_INTERLEAVED = {"schedule": "interleaved"}
_REVERSED = "pp-dp-ep-cp-tp"
_NEOX = {"model__position": "rope", "model__rotary_fraction": 0.5, "model__parallel_residual": True}
_TOKEN_NORMS = {"model__qk_norm": True, "model__qk_norm_over": "all"}
_POST = {"model__norm_place": "post"}
_BLOOM = {"model__position": "alibi", "model__embedding_norm": True}

SPECIAL = [
    _special("chunks-on-one-rank", _cut(2, 1, 1, **_INTERLEAVED)),
    _special("uneven-split", _cut(1, 1, 2), pipeline__split=[1, 3], model__layers=4),
    _special("split-ends-without-layers", _cut(1, 1, 4, **_LLAMA), pipeline__split=[0, 2, 1, 0], model__layers=3),
    _special("uneven-split", _cut(1, 2, 2, sp=True, **_INTERLEAVED), pipeline__split=[1, 2, 1, 1], model__layers=5),
    _special("layers-not-divisible", _cut(1, 1, 4), model__layers=6),
    _special("micro-batch-2", _cut(2, 1, 1), train__micro_batch=2, train__global_batch=8),
    _special("micro-batch-2", _cut(1, 2, 1, sp=True, **_LLAMA), train__micro_batch=2, train__global_batch=6),
    _special("micro-batch-2", _cut(1, 2, 2, sp=True), train__micro_batch=2, train__global_batch=8),
    _special("fewer-micro-batches-than-stages", _cut(1, 1, 4, **_INTERLEAVED), train__global_batch=3),
    _special("one-micro-batch", _cut(2, 1, 2), train__global_batch=2),
    _special("order", _cut(1, 2, 2, **_LLAMA), layout__order=_REVERSED),
    _special("order", _cut(2, 2, 1, sp=True), layout__order=_REVERSED),
    _special("order", _cut(2, 2, 2, sp=True, tied=False), layout__order=_REVERSED),
    _special("order-dp-first", _cut(2, 2, 2, **_INTERLEAVED), layout__order="dp-pp-tp-cp-ep"),
    _special("documents", _cut(2, 1, 1, **_LLAMA), {"segments": True}),
    _special("documents", _cut(1, 2, 2, sp=True), {"segments": True}),
    _special(
        "documents", _cut(2, 2, 2, sp=True, **_LLAMA), {"segments": True}, train__micro_batch=2, train__global_batch=8
    ),
    _special("no-holes", _cut(2, 2, 1), {"holes": False}),
    _special("masked-rank", _cut(2, 1, 1), {"blind": True}),
    _special("masked-rank", _cut(2, 2, 1, sp=True, **_LLAMA), {"blind": True}),
    _special("ramp", _cut(2, 1, 2), train__ramp=[4, 4, 24], train__global_batch=12),
    _special("ramp", _cut(2, 2, 1, sp=True, **_LLAMA), train__ramp=[2, 2, 20], train__global_batch=6),
    _special("rank-without-vocabulary", _cut(1, 4, 1), model__vocab=9),
    _special("rank-without-vocabulary", _cut(1, 8, 1, sp=True, **_LLAMA), model__vocab=9),
    _special("vocabulary-divides", _cut(1, 4, 1, sp=True, tied=False), model__vocab=64),
    _special("copies-of-one-kv-head", _cut(1, 4, 1, sp=True, **_LLAMA), model__kv_heads=1),
    _special("kv-copies-with-bias", _cut(1, 4, 1, sp=True, **_LLAMA), model__bias=True),
    _special("kv-copies-with-bias", _cut(2, 4, 1), model__kv_heads=2),
    _special("wide-heads", _cut(1, 2, 1, **_LLAMA), model__head_dim=6),
    _special("no-positions-relu", _cut(1, 2, 1, sp=True), model__position="none", model__mlp="relu"),
    _special("gelu-tanh-rms-with-bias", _cut(2, 1, 1), model__mlp="gelu_tanh", model__norm="rmsnorm"),
    # The parts that families of Hugging Face need: Qwen3's, OLMoE's, Qwen2's, GPT-NeoX's, BLOOM's, OPT's, Llama 3.1's.
    _special("qk-norm", _cut(1, 4, 1, sp=True, **_LLAMA), model__qk_norm=True),
    _special("qk-norm", _cut(2, 2, 1, **_LLAMA), model__qk_norm=True),
    _special("qk-norm", _cut(1, 2, 2, sp=True), model__qk_norm=True, model__position="rope"),
    _special("qk-norm-over-all", _cut(1, 4, 1, sp=True, **_LLAMA), **_TOKEN_NORMS),
    _special("qk-norm-over-all", _cut(1, 2, 1), **_TOKEN_NORMS),
    _special("qk-norm-over-all", _cut(1, 2, 2, **_LLAMA), **_TOKEN_NORMS, recompute__mode="full", zero__stage=1),
    _special("qkv-bias", _cut(1, 2, 1, **_LLAMA), model__qkv_bias=True),
    _special("qkv-bias", _cut(1, 4, 1, sp=True, **_LLAMA), model__qkv_bias=True),
    _special("partial-rotary-parallel-residual", _cut(1, 2, 1, sp=True), **_NEOX),
    _special("partial-rotary-parallel-residual", _cut(1, 2, 2), **_NEOX),
    _special("partial-rotary-parallel-residual", _cut(1, 1, 2, tied=False), {"segments": True}, **_NEOX),
    _special("alibi-embedding-norm", _cut(1, 2, 1), **_BLOOM),
    _special("alibi-embedding-norm", _cut(1, 2, 1, sp=True), {"segments": True}, **_BLOOM),
    _special("alibi-embedding-norm", _cut(1, 4, 1, sp=True), **_BLOOM, model__heads=12, model__hidden=48),
    _special("alibi-embedding-norm", _cut(1, 2, 2, sp=True, **_INTERLEAVED), {"segments": True}, **_BLOOM),
    _special("position-offset-relu", _cut(1, 2, 1, sp=True), model__position_offset=2, model__mlp="relu"),
    _special("position-offset-relu", _cut(1, 1, 2), {"segments": True}, model__position_offset=2, model__mlp="relu"),
    _special("rope-scaling", _cut(1, 2, 1, **_LLAMA), model__rope_scaling=_rope("llama3", 8)),
    _special("rope-scaling", _cut(1, 1, 2, **_LLAMA), {"segments": True}, model__rope_scaling=_rope("dynamic", 8)),
    _special("pieces", _cut(1, 2, 1, sp=True, **_LLAMA), recompute__pieces=3, recompute__mode="full"),
    _special("pieces", _cut(2, 2, 1), recompute__pieces=2, zero__stage=2),  # with biases
    _special("pieces", _cut(1, 2, 2, **_LLAMA, **_INTERLEAVED), recompute__pieces=16, recompute__mode="every:2"),
    _special("pieces", _cut(2, 1, 1, **_LLAMA), {"blind": True}, recompute__pieces=5, zero__stage=3),
    _special("post-norm", _cut(1, 2, 1, sp=True), **_POST, model__mlp="geglu", recompute__pieces=2),
    _special("post-norm", _cut(2, 1, 2), **_POST, model__mlp="quick_gelu", recompute__mode="full", zero__stage=3),
    _special("sandwich", _cut(1, 2, 1, sp=True, **_LLAMA), model__norm_place="sandwich"),
    _special("sandwich", _cut(2, 1, 2), model__norm_place="sandwich", recompute__mode="full", zero__stage=3),
    _special("one-bucket", _cut(2, 2, 1), comm__bucket_mib=25.0),
    _special("bucket-a-parameter", _cut(2, 1, 2), comm__bucket_mib=1e-4),
    _special("sgd-unclipped", _cut(2, 2, 1), optimizer__name="sgd", train__clip=0.0),
]

# ZeRO stages over every way to cut 4 and 8 ranks; what else may differ is chosen so that every pair of values meets.
STAGES = (1, 2, 3)
FACTORS: dict[str, tuple[Any, ...]] = {
    "optimizer": ("none", "cpu", "disk"),
    "params": ("none", "cpu", "disk"),
    "recompute": ("none", "selective", "full", "every:2"),
    "schedule": SCHEDULES,  # interleaved has two chunks, the others one
    "sp": (False, True),
}
Choice = dict[str, Any]


def pairs_of(choice: Choice) -> set[tuple[Any, ...]]:
    """Every pair of values of one case."""
    items = sorted(choice.items())
    return {(*a, *b) for i, a in enumerate(items) for b in items[i + 1 :]}


def _choices(stage: int, tp: int, pp: int) -> Iterator[Choice]:
    for values in product(*FACTORS.values()):
        choice = dict(zip(FACTORS, values, strict=True))
        fits = (stage == 3 or choice["params"] == "none") and (tp > 1 or not choice["sp"])
        if fits and (pp > 1 or choice["schedule"] != "gpipe"):
            yield choice


def _cover() -> Iterator[tuple[int, int, int, int, Choice]]:
    """(stage, dp, tp, pp, choice), each choice the one that brings most pairs that were not met before."""
    met: set[tuple[Any, ...]] = set()
    for world in (4, 8):
        for stage in STAGES:
            for dp, tp, pp, sp in layouts(world):
                if not sp:
                    choice = max(_choices(stage, tp, pp), key=lambda c: len(pairs_of(c) - met))
                    if dp > 1:
                        met |= pairs_of(choice)
                    yield stage, dp, tp, pp, choice


def _sharded(number: int, stage: int, dp: int, tp: int, pp: int, choice: Choice) -> Case:
    extra: dict[str, Any] = {
        "zero.stage": stage, "recompute.mode": choice["recompute"], "zero.offload.optimizer": choice["optimizer"],
        "zero.offload.params": choice["params"], "zero.offload.path": OFFLOAD, "zero.offload.buffer_mib": 0.02,
    }  # fmt: skip
    family, tied = list(FAMILIES)[number % 2], number % 3 != 0
    label = f"zero{stage}-{choice['optimizer']}-{choice['params']}-{choice['recompute']}"
    return Case(dp, tp, pp, choice["sp"], choice["schedule"], family, tied, label, tuple(extra.items()))


OFFLOAD = str(Path(tempfile.gettempdir()) / "meshwright-offload-tests")
COVER = list(_cover())
SHARDED = [_sharded(number, *found) for number, found in enumerate(COVER)] + [
    _special("zero1-node", _cut(4, 1, 1), zero__stage=1, zero__shard_group="node", layout__node_size=2),
    _special("zero3-node", _cut(4, 1, 2, **_LLAMA), zero__stage=3, zero__shard_group="node", layout__node_size=2),
    _special("zero3-ramp", _cut(2, 1, 1), zero__stage=3, train__ramp=[2, 2, 20], train__global_batch=6),
    _special("zero2-masked-rank", _cut(2, 1, 1), {"blind": True}, zero__stage=2),
    _special("zero3-chunks-on-one-rank", _cut(2, 1, 1, **_INTERLEAVED), zero__stage=3),
]

CASES = MATRIX + SPECIAL + SHARDED

# Mixtures of experts: every way to fold etp x ep x edp over tp x dp, and what else may differ.
MIXTURES: dict[str, dict[str, Any]] = {
    # DeepSeek-V3's: sigmoid scores, a balancing bias, groups, a shared expert, a dense block first.
    "deepseek": {
        "count": 8, "top_k": 3, "ffn": 16, "shared": 1, "first_dense": 1, "router": "sigmoid", "bias_balance": 0.001,
        "scale": 2.5, "groups": 4, "groups_used": 2, "aux_loss": 0.05, "z_loss": 0.01,
    },
    # Mixtral's, in every second block.
    "mixtral": {"count": 4, "top_k": 2, "ffn": 24, "every": 2, "aux_loss": 0.05},
    "olmoe": {"count": 8, "top_k": 4, "ffn": 16, "normalise": False, "z_loss": 0.02},
}  # fmt: skip


# DeepSeek's attention from short vectors.
LATENT = {"q_rank": 12, "kv_rank": 8, "nope_dim": 6, "rope_dim": 4, "v_dim": 6}


def _mixture(
    kind: str, cut: dict[str, Any], ep: int = 1, etp: int = 0, label: str = "", data: dict[str, Any] | None = None,
    **extra: Any,
) -> Case:  # fmt: skip
    """`extra`'s keys are written section__key; those of model.experts without a section."""
    keys = {f"model.experts.{key}": value for key, value in MIXTURES[kind].items()}
    keys |= {"layout.ep": ep, "layout.etp": etp, "model.layers": max(2, 2 * cut["pp"])}
    keys |= {key.replace("__", ".") if "__" in key else f"model.experts.{key}": value for key, value in extra.items()}
    words = [kind, f"ep{ep}", f"etp{etp}" if etp else "", label]
    if cut.get("schedule") == "interleaved":
        keys["model.layers"] = 2 * cut["pp"]
    label, made = "-".join(filter(None, words)), tuple((data or {}).items())
    return Case(**{**_LLAMA, **cut}, label=label, extra=tuple(keys.items()), data=made)


def _mixtures() -> Iterator[Case]:
    yield _mixture("deepseek", _cut(1, 1, 1), data={"segments": True})
    for kind in MIXTURES:
        yield _mixture(kind, _cut(2, 1, 1), ep=2)
        yield _mixture(kind, _cut(1, 2, 1, sp=True), ep=2, etp=1)
    for dp, tp, pp, sp in layouts(4):
        for etp in (1, 2, 4):
            for ep in (1, 2, 4):
                if dp * tp % (etp * ep) == 0:
                    number = dp + 2 * tp + 3 * ep + etp
                    kind, zero = list(MIXTURES)[number % 3], number % 4
                    yield _mixture(kind, _cut(dp, tp, pp, sp=sp), ep, etp, f"zero{zero}", zero__stage=zero)
    wide = [("deepseek", 4, 1, 3), ("mixtral", 2, 2, 1), ("olmoe", 8, 1, 2), ("deepseek", 2, 4, 0), ("olmoe", 2, 1, 3)]
    for kind, ep, etp, zero in wide[:3]:
        yield _mixture(kind, _cut(4, 2, 1, sp=True), ep, etp, f"zero{zero}", zero__stage=zero)
    for kind, ep, etp, zero in wide:
        if etp * ep <= 4:
            yield _mixture(kind, _cut(2, 2, 2, sp=ep == 2), ep, etp, f"zero{zero}", zero__stage=zero)
    for schedule in ("gpipe", "interleaved"):
        yield _mixture("deepseek", _cut(2, 1, 2, schedule=schedule), ep=2)
    yield _mixture("mixtral", _cut(1, 2, 2, sp=True, schedule="interleaved"), ep=2, etp=1, zero__stage=1)
    for mode, zero in (("full", 0), ("every:2", 3), ("selective", 2)):
        recompute: dict[str, Any] = {"recompute__mode": mode, "zero__stage": zero}
        yield _mixture("deepseek", _cut(2, 2, 1, sp=True), 2, 1, mode.replace(":", ""), **recompute)
    nodes = {"layout__node_size": 2, "comm__algorithm": {"ep": "hierarchical"}}
    yield _mixture("deepseek", _cut(4, 1, 1), 4, 1, "by-node", **nodes)
    yield _mixture("olmoe", _cut(2, 2, 1, sp=True), 4, 1, "by-node-zero3", **nodes, zero__stage=3)
    yield _mixture("olmoe", _cut(2, 1, 1), 2, 1, "all-choices", top_k=8)
    yield _mixture("olmoe", _cut(2, 1, 1), 1, 1, "one-expert", count=1, top_k=1)
    yield _mixture("deepseek", _cut(2, 2, 1), 4, 1, "masked-rank", {"blind": True})
    yield _mixture("mixtral", _cut(2, 1, 1), 2, 1, "micro-batch-2", train__micro_batch=2, train__global_batch=8)
    yield _mixture("mixtral", _cut(1, 2, 1), 2, 1, "gelu", model__mlp="gelu", model__bias=True)
    latent = {f"model__latent__{key}": value for key, value in LATENT.items()}
    yield _mixture("deepseek", _cut(2, 2, 1, sp=True), 2, 1, "latent", **latent)
    direct = {**latent, "model__latent__q_rank": 0}
    yield _mixture("deepseek", _cut(1, 2, 2), 2, 1, "latent-q", zero__stage=3, **direct)
    yield _special("latent", _cut(1, 2, 1, sp=True, **_LLAMA), **latent)
    yield _special("latent", _cut(2, 2, 1, **_LLAMA), {"segments": True}, **direct)
    yield _mixture("olmoe", _cut(2, 1, 1), 2, 1, "offload", zero__stage=3, **_OFFLOADED)


_OFFLOADED = {
    "zero__offload": {"optimizer": "cpu", "params": "cpu", "path": OFFLOAD, "buffer_mib": 0.02},
}


def _contexts() -> Iterator[Case]:
    """Sequences shared by cp ranks: every way and order, documents on and off, with the other axes.

    Documents of the made samples have 1 to 15 of a sequence's 16 tokens, so many are longer than the 8, 4 or 2 of a
    rank. In the contiguous order a ring's first ranks see no key of the blocks of later ones."""

    def case(label: str, cut: dict[str, Any], cp: int, data: dict[str, Any] | None = None, **extra: Any) -> Case:
        return _special(f"cp{cp}-{label}", {**_LLAMA, **cut, "cp": cp}, data, layout__cp=cp, **extra)

    kinds: list[dict[str, Any]] = [{"context__kind": kind} for kind in ("gather", "ring", "ulysses")]
    kinds.append({"context__kind": "hybrid", "context__inner": 2})
    for kind in kinds:
        name = kind["context__kind"]
        for number, order in enumerate(("zigzag", "striped", "contiguous", "documents")):
            for documents in (False, True):
                cp = 4 if name == "hybrid" or (number + documents) % 2 else 2
                label = f"{name}-{order}" + ("-documents" if documents else "")
                yield case(label, _cut(1, 1, 1), cp, {"segments": documents}, context__order=order, **kind)
    yield case("ring-tp-sp", _cut(1, 2, 1, sp=True), 2, {"segments": True}, **kinds[1], zero__stage=1)
    yield case("gather-tp", _cut(1, 2, 1), 2, **kinds[0], zero__stage=3)
    yield case("ulysses-tp", _cut(1, 2, 1), 2, **kinds[2])
    yield case("ring-pp", _cut(1, 1, 2), 2, {"segments": True}, **kinds[1], model__rope_scaling=_YARN)
    latent = {f"model__latent__{key}": value for key, value in LATENT.items()}
    scaled = _YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}
    yield case("latent-yarn", _cut(1, 2, 1), 2, {"segments": True}, **kinds[0], **latent, model__rope_scaling=scaled)
    yield case("ring-chunks", _cut(1, 1, 2, schedule="interleaved"), 2, **kinds[1], zero__stage=2)
    yield case("gather-dp", _cut(2, 1, 1), 2, {"blind": True}, **kinds[0], zero__stage=3)
    yield case("ring-recompute", _cut(1, 1, 1), 2, {"segments": True}, **kinds[1], recompute__mode="full")
    pairs: dict[str, Any] = {"train__micro_batch": 2, "train__global_batch": 8}
    yield case("learned", _cut(2, 1, 1, family="gpt"), 2, {"segments": True}, **kinds[1], **pairs)
    yield case("one-kv-head", _cut(1, 1, 1), 4, **kinds[2], model__kv_heads=1)
    yield case("ring-8", _cut(1, 1, 1), 8, {"segments": True}, **kinds[1])
    yield case("hybrid-8", _cut(1, 1, 1), 8, {"segments": True}, **kinds[3])
    yield case("gather-8", _cut(1, 1, 1), 8, {"segments": True}, **kinds[0])
    yield case("gather-tp-sp-pp", _cut(1, 2, 2, sp=True), 2, {"segments": True}, **kinds[0])
    yield case("ring-dp", _cut(2, 1, 1), 2, {"segments": True}, **kinds[1], zero__stage=2)
    yield case(
        "ulysses-chunks", _cut(1, 1, 2, schedule="interleaved"), 2, {"segments": True}, **kinds[2], zero__stage=3
    )
    for kind in kinds:  # every sample of a micro-batch is dealt by its own documents
        label, order = f"{kind['context__kind']}-pairs", {"context__order": "documents"}
        yield case(label, _cut(1, 1, 1), 4, {"segments": True}, **kind, **order, **pairs)
    bloom = {**_BLOOM, "model__kv_heads": 4}
    yield case("alibi-ring", _cut(1, 1, 1, family="gpt"), 2, {"segments": True}, **kinds[1], **bloom)
    yield case("alibi-gather-tp", _cut(1, 2, 1, sp=True), 2, {"segments": True}, **kinds[0], **_BLOOM, zero__stage=3)
    yield case("alibi-ulysses-pp", _cut(1, 1, 2), 2, **kinds[2], **bloom)
    yield case("alibi-hybrid", _cut(1, 1, 1), 4, {"segments": True}, **kinds[3], **bloom, model__heads=8)
    experts = {f"model__experts__{key}": value for key, value in MIXTURES["deepseek"].items()}
    yield case("experts", _cut(1, 1, 1), 4, **kinds[1], **experts, layout__ep=4)
    yield case("experts-tp", _cut(1, 2, 1), 2, **kinds[0], **experts, layout__ep=2, layout__etp=1)


CONTEXTS = list(_contexts())
CASES += CONTEXTS
EXPERTS = list({case.name: case for case in _mixtures()}.values())
CASES += EXPERTS

# The part that `make test` runs; the rest is marked wide.
_QUICK_MATRIX = (
    "dp1-tp1-pp1-gpipe-llama-tied", "dp2-tp1-pp1-1f1b-gpt-tied", "dp1-tp2-pp1-1f1b-llama-tied",
    "dp1-tp2-pp1-sp-1f1b-gpt-tied", "dp1-tp1-pp2-gpipe-gpt-untied", "dp1-tp1-pp2-interleaved-llama-tied",
    "dp1-tp1-pp4-1f1b-gpt-tied", "dp2-tp2-pp1-sp-1f1b-gpt-untied", "dp1-tp2-pp2-1f1b-llama-untied",
    "dp1-tp2-pp2-sp-interleaved-gpt-tied",
    "dp2-tp2-pp2-sp-interleaved-llama-untied",
)  # fmt: skip
_QUICK_CONTEXTS = (
    "cp2-gather-zigzag", "cp2-ring-striped-documents", "cp4-one-kv-head", "cp4-hybrid-contiguous-documents",
    "cp2-ring-pp", "cp2-alibi-ring",
)  # fmt: skip
_QUICK_SHARDED = ("zero1-node", "zero3-ramp", "zero3-chunks-on-one-rank")
_QUICK_LABELS = (
    "chunks-on-one-rank", "uneven-split", "micro-batch-2", "documents", "masked-rank", "ramp", "order",
    "rank-without-vocabulary", "kv-copies-with-bias", "split-ends-without-layers", "qk-norm", "qk-norm-over-all",
    "partial-rotary-parallel-residual", "alibi-embedding-norm", "pieces", "post-norm",
)  # fmt: skip
_QUICK_EXPERTS = (
    "dp2-tp1-pp1-1f1b-llama-tied-deepseek-ep2",  # ep across dp
    "dp1-tp2-pp1-sp-1f1b-llama-tied-olmoe-ep2-etp1",  # ep across tp
    "dp2-tp2-pp1-1f1b-llama-tied-olmoe-ep2-etp2-zero2",  # etp is tp, and every rank has all tokens
    "dp2-tp1-pp2-1f1b-llama-tied-olmoe-ep2-etp1-zero3",
    "dp1-tp2-pp2-sp-interleaved-llama-tied-mixtral-ep2-etp1",
    "dp2-tp2-pp1-sp-1f1b-llama-tied-deepseek-ep2-etp1-full",  # ep across tp while dp holds copies; recomputation
)


def _quick() -> set[str]:
    """The named part of the matrix, and of each chosen label its first case of four ranks at most."""
    names = {*_QUICK_MATRIX, *_QUICK_EXPERTS}
    for label in _QUICK_LABELS:
        names.add(next(case.name for case in SPECIAL if case.label == label and case.world <= 4))
    names |= {next(case.name for case in CONTEXTS if case.label == label) for label in _QUICK_CONTEXTS}
    names |= {case.name for case in SHARDED if case.label in _QUICK_SHARDED}
    some = [case.name for case in SHARDED if case.dp == 4 and case.world == 4 and case.label.count("-") == 3]
    names |= set(some[::3])
    names.add(next(case.name for case in SHARDED if case.label.startswith("zero3") and case.dp == case.tp == case.pp))
    return names


QUICK = _quick()
_NAMES = {case.name for case in CASES}
assert len(_NAMES) == len(CASES) and not QUICK - _NAMES
