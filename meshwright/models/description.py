"""What a GPT is made of, part by part: the records its modules are built from and the planner reads. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.config.sections import Config, ModelConfig
from meshwright.layout import Layout, Parts
from meshwright.layout.params import Init, ParamRecord, columns_of, rows_of, whole
from meshwright.layout.shards import node_parts

Records = dict[str, ParamRecord]

# Part of tp along which ranks hold the same key-value heads, when there are fewer of them than tp ranks.
KV_COPIES = "tp.kv"
KV_GROUPS = "tp.q"


@dataclass(frozen=True)
class Stage:
    """One chunk of the pipeline: its virtual stage number and the global numbers of its layers."""

    index: int
    count: int
    layers: range

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.count - 1


def stages(layers: int, count: int, split: Sequence[int] = ()) -> list[Stage]:
    """The layers of each virtual stage; without `split` as even as can be, the earlier ones taking the rest."""
    sizes = list(split) or [layers // count + (i < layers % count) for i in range(count)]
    assert len(sizes) == count and sum(sizes) == layers
    starts = [sum(sizes[:i]) for i in range(count)]
    return [
        Stage(i, count, range(start, start + size)) for i, (start, size) in enumerate(zip(starts, sizes, strict=True))
    ]


def kv_parts(model: ModelConfig, tp: int) -> Parts:
    """How tp is a product when key-value heads are replicated: the copies are neighbours."""
    if tp <= model.kv_heads:
        return ()
    return (("tp", ((KV_COPIES, tp // model.kv_heads), (KV_GROUPS, model.kv_heads))),)


def layout_of(config: Config, world: int, node_size: int = 0) -> Layout:
    """The layout that a config asks for on `world` ranks, `node_size` of them a machine if the config doesn't say."""
    c = config.layout
    layout = Layout(
        world, tp=c.tp, pp=c.pp, cp=c.cp, ep=c.ep, order=c.order, node_size=c.node_size or node_size or None,
        parts=kv_parts(config.model, c.tp),
    )  # fmt: skip
    if config.zero.stage == 0 or config.zero.shard_group == "dp":
        return layout
    return replace(layout, parts=(*layout.parts, *node_parts(layout)))


def fields_read(stage: Stage) -> set[str]:
    """The fields of a batch that a chunk reads, where the data have them."""
    ends = ({"tokens"} if stage.first else set()) | ({"labels", "loss_mask"} if stage.last else set())
    return ends | {"positions", "segments"}


@dataclass(frozen=True)
class GPTDescription:
    """The parameters of one tensor-parallel rank."""

    model: ModelConfig
    tp: int = 1
    tp_rank: int = 0
    sequence_parallel: bool = False
    pp: int = 1

    @property
    def _replicated(self) -> dict[str, tuple[str, ...]]:
        """Axes of a parameter that every tp rank holds and applies to its own tokens under sequence parallelism."""
        if self.tp == 1:
            return {}
        return {"copies": ("tp",), "partial": ("tp",) if self.sequence_parallel else ()}

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding that a rank holds; the vocabulary is padded until tp divides it."""
        return -(-self.model.vocab // self.tp)

    @property
    def normal(self) -> Init:
        return Init("normal", self.model.init_std)

    @property
    def output(self) -> Init:
        """Projections back into the residual stream start smaller, as in GPT-2."""
        return Init("normal", self.model.init_std / math.sqrt(2 * self.model.layers))

    def _vocabulary(self, name: str, tied: bool) -> ParamRecord:
        first = self.tp_rank * self.vocab_rows
        held = max(0, min(self.vocab_rows, self.model.vocab - first))
        axes = ("embedding",) if tied and self.pp > 1 else ()
        return rows_of(
            name, ((first, held, 0),), self.model.vocab, (self.model.hidden,), self.normal, self.vocab_rows,
            partial=axes, copies=axes, tied=name if tied else "",
        )  # fmt: skip

    def norm(self, name: str) -> Records:
        shape = (self.model.hidden,)
        records = {"weight": whole(f"{name}.weight", shape, Init("ones"), decay=False, **self._replicated)}
        if self.model.norm == "layernorm" and self.model.bias:
            records["bias"] = whole(f"{name}.bias", shape, Init("zeros"), decay=False, **self._replicated)
        return records

    def embedding(self) -> Records:
        records = {"tokens.weight": self._vocabulary("embedding.weight", self.model.tied_embeddings)}
        if self.model.position == "learned":
            shape = (self.model.position_offset + self.model.seq, self.model.hidden)
            records["positions.weight"] = whole("position.weight", shape, self.normal, **self._replicated)
        if self.model.embedding_norm:
            records |= prefixed("norm", self.norm("embedding_norm"))
        return records

    def head(self) -> Records:
        m = self.model
        weight = self._vocabulary("embedding.weight" if m.tied_embeddings else "head.weight", m.tied_embeddings)
        return prefixed("norm", self.norm("final_norm")) | {"output.weight": weight}

    def attention(self, name: str) -> Records:
        m, d = self.model, self.model.head_dim
        total, queries = (m.heads + 2 * m.kv_heads) * d, m.heads // self.tp * d
        kv = max(1, m.kv_heads // self.tp) * d
        kv_first = self.tp_rank * m.kv_heads // self.tp * d  # of copied heads: tp_rank // copies
        k_first, v_first = m.heads * d + kv_first, (m.heads + m.kv_heads) * d + kv_first
        q_rows = (self.tp_rank * queries, queries, 0)

        def cut(key: str, tail: tuple[int, ...], init: Init, decay: bool) -> Records:
            full = f"{name}.qkv.{key}"
            if self.tp <= m.kv_heads:
                parts = (q_rows, (k_first, kv, queries), (v_first, kv, queries + kv))
                return {f"qkv.{key}": rows_of(full, parts, total, tail, init, decay=decay)}
            shared = (KV_COPIES,)
            kv_parts = ((k_first, kv, 0), (v_first, kv, kv))
            return {
                f"q.{key}": rows_of(full, (q_rows,), total, tail, init, decay=decay),
                f"kv.{key}": rows_of(full, kv_parts, total, tail, init, decay=decay, copies=shared, partial=shared),
            }

        records = cut("weight", (m.hidden,), self.normal, True)
        if m.bias or m.qkv_bias:
            records |= cut("bias", (), Init("zeros"), False)
        if m.qk_norm:
            # One weight for all heads: each tp rank has the gradient of its own heads. Of copies of a key-value head,
            # each has the gradient from its own queries, so there too the sum over tp is the whole.
            axes = ("tp",) if self.tp > 1 else ()
            for key in ("q_norm", "k_norm"):
                full = f"{name}.{key}.weight"
                records[f"{key}.weight"] = whole(full, (d,), Init("ones"), decay=False, copies=axes, partial=axes)
        return records | self._row(f"{name}.out", "out", m.heads * d)

    def mlp(self, name: str) -> Records:
        m, width = self.model, self.model.ffn // self.tp
        first = self.tp_rank * width
        parts: tuple[tuple[int, int, int], ...] = ((first, width, 0),)
        key, total = "up", m.ffn
        if m.mlp == "swiglu":
            parts, key, total = (*parts, (m.ffn + first, width, width)), "gate_up", 2 * m.ffn
        records = {f"{key}.weight": rows_of(f"{name}.{key}.weight", parts, total, (m.hidden,), self.normal)}
        if m.bias:
            records[f"{key}.bias"] = rows_of(f"{name}.{key}.bias", parts, total, (), Init("zeros"), decay=False)
        return records | self._row(f"{name}.down", "down", m.ffn)

    def _row(self, name: str, key: str, columns: int) -> Records:
        """A projection whose input is cut over tp; its bias is added once, after the sum."""
        h = self.model.hidden
        records = {f"{key}.weight": columns_of(f"{name}.weight", h, columns, self.tp, self.tp_rank, self.output)}
        if self.model.bias:
            records[f"{key}.bias"] = whole(f"{name}.bias", (h,), Init("zeros"), decay=False, **self._replicated)
        return records

    def block(self, layer: int) -> Records:
        name = f"layers.{layer}"
        return (
            prefixed("norm1", self.norm(f"{name}.norm1"))
            | prefixed("attention", self.attention(f"{name}.attention"))
            | prefixed("norm2", self.norm(f"{name}.norm2"))
            | prefixed("mlp", self.mlp(f"{name}.mlp"))
        )

    def stage(self, stage: Stage) -> Records:
        """Every parameter of a chunk, in the order of its forward; a tie inside the chunk appears once."""
        records: Records = {}
        if stage.first:
            records |= prefixed("embedding", self.embedding())
        for layer in stage.layers:
            records |= prefixed(f"blocks.{layer}", self.block(layer))
        if stage.last:
            head = self.head()
            if stage.first and self.model.tied_embeddings:
                del head["output.weight"]
            records |= prefixed("head", head)
        return records


def prefixed(prefix: str, records: Records) -> Records:
    return {f"{prefix}.{key}": record for key, record in records.items()}
