"""Published runs: each fully described line of a table becomes a config and a software stack with its predictions.

The predictions are the time of a step and the memory. The module does not load torch.
"""

from __future__ import annotations

import csv
import io
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from meshwright.config.data import DataConfig
from meshwright.config.memory import Place, RecomputeConfig, ZeroConfig
from meshwright.config.sections import (
    Config,
    LayoutConfig,
    ModelConfig,
    PipelineConfig,
    TrainConfig,
)
from meshwright.errors import UserError
from meshwright.plan.cluster import Cluster, load_cluster
from meshwright.plan.cost import predict_cost
from meshwright.plan.flops import balanced_split, model_flops, recomputed_flops
from meshwright.plan.job import Job
from meshwright.plan.memory import needed_gib
from meshwright.plan.stack import STACKS, Stack, States
from meshwright.spec.model.description import describe
from meshwright.spec.model.graph import parameter_count
from meshwright.spec.schedule.kinds import default_kind

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from mixtures import is_mixture, mixture_of  # noqa: E402

Row = Mapping[str, str]

NEEDED = (
    "layers", "hidden", "heads", "seq_len", "gpu", "gpus", "tp", "pp", "dp", "micro_batch", "global_batch", "recompute",
)  # fmt: skip
SIZES = (
    "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len", "gpus", "nodes", "tp", "pp", "vpp", "cp", "ep",
    "etp", "dp", "micro_batch", "global_batch",
)  # fmt: skip
MEASURED = (
    "step_time_s", "step_time_s_calc", "tokens_s_gpu", "tokens_s_gpu_calc", "tflops_per_gpu", "mem_gb", "params_b",
)  # fmt: skip
WORDS = {
    "seq_parallel": ("y", "n"), "outcome": ("ok", "oom"),
    "schedule": ("none", "1f1b", "interleaved-1f1b", "interleaved", "gpipe", "zb-1p", "zb-2p", "dualpipe"),
}  # fmt: skip
COLUMNS = ("id", "step_time_s", "tokens_s_gpu", "mem_gb", "error", "reason")

# The cluster of a device's name, by the first match.
DEVICES = (
    (r"H100-96", "h100-96g-500w"), (r"H100", "h100-80g-dgx"), (r"H800", "h800-80g"), (r"H200", "h200-141g-dgx"),
    (r"B200", "b200-180g-dgx"), (r"A100.*40", "a100-40g-dgx"), (r"A100|A800", "a100-80g-dgx"),
    (r"V100.*16", "v100-16g"), (r"V100", "v100-32g"), (r"Ascend", "ascend-910-32g"),
)  # fmt: skip

DEFAULT_PRECISION = "fp16"  # of a row that names none: the mixed precision of the older papers
DEFAULT_VOCAB = 51200  # GPT-2's vocabulary as Megatron pads it
VOCAB_UNIT = 128  # every program here pads its vocabulary to a multiple of this on each tp rank
DROPOUT = 0.1  # Megatron's default, on in the runs of its papers
FUSED_LOGIT_BYTES = 0.25  # a loss that computes its logits in pieces holds a small part of them at once

# The stack that a row's source documents, by the first match. It follows from the source, and never from the error of
# the prediction.
SOURCES: tuple[tuple[str, str], ...] = (
    (r"llm-foundry|FSDP VLDB", "fsdp"),
    (r"torchtitan|fms-fsdp", "fsdp-compiled"),
    (r"nanotron|InternEvo|FlashAttention|picotron|stas00", "fused"),
    (r"MT-NLG|bigscience|BLOOM|GLM|NeoX|ZeRO|DeepSpeed", "unfused-deepspeed"),
    (r"SC21|Korthikanti|Shoeybi|OPT|Zero Bubble", "unfused"),
    (r"dgxc|NeMo|Megatron|Nemotron|MegaScale|Llama 3", "fused-overlap"),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One line as the planner sees it."""

    id: str
    source: str
    gpu: str
    job: Job
    cluster: Cluster
    measured_s: float  # 0 if not given
    measured_gib: float  # 0 if not given
    memory_kind: str
    outcome: str


@dataclass(frozen=True)
class Prediction:
    id: str
    source: str = ""
    gpu: str = ""
    step_s: float = 0.0
    tokens_s_gpu: float = 0.0
    mem_gib: float = 0.0
    error: float | None = None
    reason: str = ""
    fits: bool = True
    case: Case | None = None


class CannotTake(Exception):
    """A line lacks something, which the message names."""


def read_rows(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        raise UserError(f"there is no table '{path}': give the path of a CSV file of published runs")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # a spreadsheet writes a byte-order mark first
            reader = csv.DictReader(file)
            names = reader.fieldnames or []
            rows = [{key: value or "" for key, value in row.items() if key} for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} can't be read as a CSV file: {error}") from None
    missing = [name for name in ("id", *NEEDED) if name not in names]
    if missing:
        raise UserError(f"{path} lacks the columns {', '.join(missing)}: it must have the form of published_runs.csv")
    return rows


def case_of(row: Row) -> Case:
    """Return the job and cluster of a line. Raise `CannotTake` with the missing fields if it lacks any."""
    missing = [name for name in NEEDED if not row.get(name)]
    if missing:
        raise CannotTake(f"not given: {', '.join(missing)}")
    _check_numbers(row)
    cluster = cluster_of(row)
    job = job_of_row(row, cluster)
    return Case(
        row["id"], row.get("source", ""), row["gpu"], job, cluster, measured_seconds(row, job),
        measured_memory(row), row.get("mem_kind", ""), row.get("outcome", "ok"),
    )  # fmt: skip


def stack_of_row(row: Row) -> Stack:
    """Return the stack that a row's source documents, or else the usual one on that device."""
    zero, words = _int(row, "zero_stage", 0), f"{row['id']} {row.get('note', '')}"
    name = next((name for pattern, name in SOURCES if re.search(pattern, row.get("source", ""))), "")
    if not name and zero == 3:
        name = "fsdp"
    if not name:
        name = "unfused" if row["gpu"].startswith(("V100", "A100", "Ascend")) else "fused-overlap"
    if name == "unfused" and zero == 3:  # at that time only DeepSpeed had stage 3
        name = "unfused-deepspeed"
    if name == "fsdp-compiled" and re.search(r"asyncTP", words) and "vanillaTP" not in words:
        return replace(STACKS[name], hide_tp=STACKS["fused-overlap"].hide_tp)
    return STACKS[name]


def _check_numbers(row: Row) -> None:
    """Check that sizes are positive integers, measured values are positive numbers, and words are known."""
    for key in SIZES:
        text = row.get(key, "")
        try:
            good = not text or (float(text) == int(float(text)) and 0 < float(text) < 1e9)
        except (ValueError, OverflowError):
            good = False
        if not good:
            raise CannotTake(f"{key}={text} is not a whole number above zero")
    for key in MEASURED:
        text = row.get(key, "")
        try:
            good = not text or 0 < float(text) < 1e12
        except ValueError:
            good = False
        if not good:
            raise CannotTake(f"{key}={text} is not a number above zero")
    if not re.fullmatch(r"none|selective|full|every:[1-9]\d*", row["recompute"]):
        raise CannotTake(f"recompute={row['recompute']} is not one of none, selective, full, every:N")
    if row.get("zero_stage", "") not in ("", "0", "1", "2", "3"):
        raise CannotTake(f"zero_stage={row['zero_stage']} is not one of 0, 1, 2, 3")
    for key, words in WORDS.items():
        if row.get(key, "") not in ("", *words):
            raise CannotTake(f"{key}={row[key]} is not one of {', '.join(words)}")


def cluster_of(row: Row) -> Cluster:
    """Return the shipped cluster of the row's device, with the node and the network that the row names."""
    name = next((cluster for pattern, cluster in DEVICES if re.search(pattern, row["gpu"])), "")
    if not name:
        raise CannotTake(f"no cluster file for the device {row['gpu']}")
    cluster = load_cluster(name)
    words = row.get("interconnect", "")
    node = cluster.node.devices
    if found := re.match(r"(\d+)x\w+ NVLink node", words):
        node = int(found[1])
    elif _int(row, "nodes", 0):
        node = max(1, -(-_int(row, "gpus", 1) // _int(row, "nodes", 1)))
    rate = network_gb_s(words, node) or cluster.network.node_gb_s * node / cluster.node.devices
    return replace(cluster, node=replace(cluster.node, devices=node), network=replace(cluster.network, node_gb_s=rate))


def network_gb_s(words: str, node: int) -> float:
    """Return the GB/s of a node, or 0 if the words do not name any.

    The words are e.g. `8x HDR InfiniBand 200Gb/s per node` or `RDMA 400Gb/s per GPU`.
    """
    found = re.search(r"(?:(\d+)x\s*)?([A-Za-z][A-Za-z -]*)?(\d+(?:\.\d+)?)\s*([GT])b/s", words)
    if not found:
        return 0.0
    count = int(found[1] or 1)
    # The words state bits per second.
    rate = float(found[3]) * (1000 if found[4] == "T" else 1) / 8
    if re.search(r"per GPU", words):
        count = node
    return count * rate


def model_of(row: Row, stack: Stack) -> ModelConfig:
    """Return the model of a row.

    The stated number of parameters decides whether its MLP is gated and its embeddings are tied. A mixture of experts
    is looked up by its name.
    """
    unit = VOCAB_UNIT * _int(row, "tp", 1)
    if is_mixture(row):
        known = mixture_of(row)
        if known is None:
            raise CannotTake("a mixture of experts whose shape is not known here (benchmarks/mixtures.py)")
        return replace(known, vocab=-(-known.vocab // unit) * unit)
    hidden, heads = _int(row, "hidden", 0), _int(row, "heads", 0)
    ffn = _int(row, "ffn", 0)
    vocab = -(-_int(row, "vocab", DEFAULT_VOCAB) // unit) * unit
    params = _float(row, "params_b", 0.0) * 1e9
    found: list[tuple[float, ModelConfig]] = []
    for gated in (False, True):
        for tied in (True, False):
            model = ModelConfig(
                layers=_int(row, "layers", 0), hidden=hidden, heads=heads, vocab=vocab,
                seq=_int(row, "seq_len", 0), kv_heads=_int(row, "kv_heads", heads), ffn=ffn,
                head_dim=0 if hidden % heads == 0 else -(-hidden // heads),
                mlp="swiglu" if gated else "gelu", norm="rmsnorm" if gated else "layernorm",
                position="rope" if gated else "learned", bias=not gated, tied_embeddings=tied,
                dropout=0.0 if stack.fused_attention else DROPOUT,
            )  # fmt: skip
            plain = (ffn in (0, 4 * hidden)) != gated
            distance = abs(parameter_count(describe(model)) - params) / params if params else 1.0
            # Without a parameter count, or with one that no shape matches, the width of the MLP decides.
            found.append((round(distance, 2) if distance < 0.1 else 1.0 + (not plain) + 0.1 * (tied == gated), model))
    return min(found, key=lambda item: item[0])[1]


def job_of_row(row: Row, cluster: Cluster) -> Job:
    """Return the row as a config with its software stack."""
    stack = stack_of_row(row)
    text = " ".join((row.get("source", ""), row["id"], row.get("note", "")))
    gpus, tp, pp, cp = (_int(row, key, 1) for key in ("gpus", "tp", "pp", "cp"))
    if gpus % (tp * pp * cp):
        raise CannotTake(f"{gpus} devices are not a multiple of tp x pp x cp = {tp * pp * cp}")
    model = model_of(row, stack)
    if tp > min(model.heads, model.ffn) or cp > model.seq:
        raise CannotTake(f"tp={tp} or cp={cp} cuts the model finer than its heads, MLP or sequence")
    _check_cut(model, tp, pp, text)
    ends = _ends_are_slots(model.layers, pp, text)
    chunks, schedule = _schedule(row, model.layers + 2 * ends, pp)
    precision = row.get("precision", "") or DEFAULT_PRECISION
    if precision not in ("fp32", "bf16", "fp16", "fp8"):
        raise CannotTake(f"no cluster has rates for the precision {precision}")
    micro, batch = _int(row, "micro_batch", 1), _int(row, "global_batch", 1)
    _check_batch((gpus, tp * pp * cp), _int(row, "dp", 1), micro, batch)
    sequence_parallel = tp > 1 and (row.get("seq_parallel") == "y" or stack.name == "fsdp-compiled")
    zero = _int(row, "zero_stage", 0)
    states = states_of_row(stack, precision, zero, text)
    config = Config(
        model, DataConfig(("tokens",)),
        LayoutConfig(
            tp=tp, pp=pp, cp=cp, ep=_int(row, "ep", 1), etp=_expert_tp(row), sequence_parallel=sequence_parallel,
            chunks=chunks, node_size=cluster.node.devices,
        ),
        PipelineConfig(schedule, _split(model, pp, chunks, text)),
        TrainConfig(
            global_batch=batch, micro_batch=micro, precision=cast(Any, precision),
            grad_dtype=cast(Any, "fp32" if states.grad == 4 or precision == "fp8" else precision),
        ),
        ZeroConfig(zero), RecomputeConfig(row["recompute"]),
    )  # fmt: skip
    loss = FUSED_LOGIT_BYTES if re.search(r", Liger,", text) else stack.logit_bytes
    return Job(config, gpus, replace(stack, states=states, logit_bytes=loss))


def _expert_tp(row: Row) -> int:
    """Return etp as the row or its note states it. The default of 0 means tp, since programs once had no other etp."""
    said = re.search(r"\bETP=(\d+)", row.get("note", ""))
    return _int(row, "etp", int(said[1]) if said else 0)


def _check_cut(model: ModelConfig, tp: int, pp: int, text: str) -> None:
    """Check that every tp rank has whole heads, and that every stage has a layer, or an embedding that counts as
    one.
    """
    if model.heads % tp:
        raise CannotTake(f"{model.heads} heads are not a multiple of tp={tp}")
    slots = model.layers + 2 if _ends_are_slots(model.layers, pp, text) else model.layers
    if pp > slots:
        raise CannotTake(f"pp={pp} is more than the {slots} layers that stages can be made of")


def _schedule(row: Row, layers: int, pp: int) -> tuple[int, str]:
    """Return the chunks of a pipeline rank and their schedule, which is 1F1B unless the row names another."""
    chunks, name = _int(row, "vpp", 1), row.get("schedule", "")
    if name.startswith(("zb", "dualpipe")):
        raise CannotTake(f"the schedule {name} is not modelled yet")
    if name == "gpipe":
        if chunks > 1:
            raise CannotTake(f"the schedule gpipe has one chunk per rank, not vpp={chunks}")
        return 1, name
    if pp * chunks > layers:
        chunks = max(1, layers // pp)
    return chunks, default_kind(chunks)


def _check_batch(devices: tuple[int, int], dp: int, micro: int, batch: int) -> None:
    """Check that the row's dp follows from its devices, and that the replicas share the batch in whole
    micro-batches.
    """
    world, unit = devices
    if dp != world // unit:
        raise CannotTake(f"dp={dp} contradicts the devices: {world} / (tp x pp x cp = {unit}) is {world // unit}")
    if batch < dp * micro:
        raise CannotTake(f"global batch {batch} is less than dp x micro-batch = {dp * micro}")
    if batch % (dp * micro):
        raise CannotTake(f"global batch {batch} is not a multiple of dp x micro-batch = {dp * micro}")


def _ends_are_slots(layers: int, pp: int, text: str) -> bool:
    """Return whether the embedding and the output layer each take the place of a layer in the split into stages."""
    return "embeddings counted as pipeline slots" in text or ("bigscience" in text and (layers + 2) % pp == 0)


def _split(model: ModelConfig, pp: int, chunks: int, text: str) -> tuple[int, ...]:
    """Return the layers of each stage if the source says how they are split, or else () for an even split."""
    layers, stages = model.layers, pp * chunks
    if pp == 1:
        return ()
    if "nanotron" in text and chunks == 1:  # it weighs blocks by their products, and so the output layer
        return balanced_split(model, pp)
    if _ends_are_slots(layers, pp, text):
        slots = [(layers + 2) // stages + (i < (layers + 2) % stages) for i in range(stages)]
        slots[0] -= 1
        slots[-1] -= 1
        return tuple(slots)
    return ()


def states_of_row(stack: Stack, precision: str, zero: int, text: str) -> States:
    """Return the bytes of each state, as the source or its program documents them."""
    if re.search(r"mixed_precision=PURE", text):
        return States(param=2, grad=2, master=0, rule=(2, 2))
    offload = Place.HOST if re.search(r"offload", text, re.IGNORECASE) and zero >= 1 else Place.DEVICE
    away = Place.HOST if re.search(r"offload of \w+/activations", text) else Place.DEVICE
    if stack.name == "unfused-deepspeed":
        # In fp16 the gradients are in fp16, and the update copies its own part to fp32. In bf16 the gradients have a
        # whole sum in fp32 beside them.
        wide = precision == "bf16"
        return States(
            param=2, grad=4 if wide else 2, master=4, grad_copy=2 if wide else 0, step_copy=0 if wide else 4,
            buckets=True, optimizer_at=offload, checkpoints_at=away,
        )  # fmt: skip
    if "distributed_fused_adam" in text:  # gradients are summed in bf16, and the masters are the missing 16 bits
        return States(param=2, grad=2, master=2)
    casts = zero >= 2 and bool(re.search(r"torchtitan|fms|llm-foundry|FSDP", text))  # FSDP keeps fp32 shards alone
    return States(
        param=2, grad=4 if precision in ("bf16", "fp8") else 2, master=4, keeps_param=not casts,
        buckets="DeepSpeed" in text and zero > 0, optimizer_at=offload, checkpoints_at=away,
    )  # fmt: skip


def measured_seconds(row: Row, job: Job) -> float:
    """Return the measured seconds of a step, as given or computed from other columns, or 0 if neither is possible."""
    for key in ("step_time_s", "step_time_s_calc"):
        if row.get(key):
            return float(row[key])
    for key in ("tokens_s_gpu", "tokens_s_gpu_calc"):
        if row.get(key):
            return job.tokens / (float(row[key]) * job.world)
    kind, attention = row.get("flops_kind", ""), row.get("attn_flops", "")
    if row.get("tflops_per_gpu") and kind in ("model", "hardware") and attention in ("full", "causal"):
        model, causal = job.config.model, attention == "causal"
        flops = model_flops(model, job.tokens, causal)
        if kind == "hardware":
            flops += recomputed_flops(model, job.tokens, job.config.recompute.mode, causal)
        return flops / (float(row["tflops_per_gpu"]) * 1e12 * job.world)
    return 0.0


def measured_memory(row: Row) -> float:
    """Return the measured GiB. The table's GB from nvidia-smi and from plots are GiB too, as these tools define
    them.
    """
    if not row.get("mem_gb"):
        return 0.0
    return float(row["mem_gb"])


def predict_row(row: Row) -> Prediction:
    try:
        return predict_case(case_of(row))
    except CannotTake as reason:
        return Prediction(row["id"], row.get("source", ""), row.get("gpu", ""), reason=str(reason))
    except (UserError, ValueError) as error:
        return Prediction(row["id"], row.get("source", ""), row.get("gpu", ""), reason=f"can't be read: {error}")


def predict_case(case: Case) -> Prediction:
    cost = predict_cost(case.job, case.cluster)
    memory = needed_gib(case.job, case.cluster)
    error = cost.step_s / case.measured_s - 1 if case.measured_s else None
    return Prediction(
        case.id, case.source, case.gpu, cost.step_s, cost.tokens_per_s_device, memory, error, "",
        memory <= case.cluster.device.memory_gib, case,
    )  # fmt: skip


def predict_file(path: Path) -> list[Prediction]:
    return [predict_row(row) for row in read_rows(path)]


def predictions_csv(predictions: Iterable[Prediction]) -> str:
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    writer.writerow(COLUMNS)
    for p in predictions:
        if p.reason:
            writer.writerow([p.id, "", "", "", "", p.reason])
            continue
        note = "" if p.fits else "predicted out of memory"
        error = "" if p.error is None else repr(p.error)
        writer.writerow([p.id, repr(p.step_s), repr(p.tokens_s_gpu), repr(p.mem_gib), error, note])
    return file.getvalue()


def _int(row: Row, key: str, default: int) -> int:
    text = row.get(key, "")
    return int(float(text)) if text else default


def _float(row: Row, key: str, default: float) -> float:
    text = row.get(key, "")
    return float(text) if text else default
