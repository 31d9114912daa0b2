"""One process is the oracle: gradients, losses and parameters of any layout against those of a single process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from meshwright.checkpoint.load import Reader, complete_load, read_into
from meshwright.config.load import config_from
from meshwright.config.rules import check
from meshwright.config.sections import Config, ModelConfig
from meshwright.device import Device
from meshwright.sharding.buffers import REDUCER, FlatBuffer, Slot
from meshwright.train.context import Context, build_context
from meshwright.train.gpt import forward_step, model_provider
from meshwright.train.losses import Sums, sums_over_world
from meshwright.train.pretrain import build_modules
from meshwright.train.step import StepResult, Trainer

Pairs = list[tuple[Any, torch.Tensor]]
Whole = dict[str, np.ndarray]

# What the trunk promises: float64 gradients, norms and parameters; fp32 losses over a run.
EXACT = 1e-10
LOSSES = 1e-5

STEPS_64 = 3  # steps in float64 after which parameters are compared
STEPS_32 = 20


class Made:
    """Random token samples, a pure function of n; with `holes` a part of each is masked, and not the same part.

    With `blind`, every sample with an odd number is masked whole: a data-parallel rank may be left without a token.
    """

    def __init__(
        self, vocab: int, seq: int, holes: bool = True, segments: bool = False, blind: bool = False
    ) -> None:
        self.vocab, self.seq, self.holes, self.segments, self.blind = vocab, seq, holes, segments, blind

    def sample(self, n: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng([7, n])
        ids = random.integers(0, self.vocab, self.seq + 1)
        mask = np.ones(self.seq, dtype=np.int64)
        if self.holes:
            mask[: 1 + n % (self.seq // 2)] = 0
        if self.blind and n % 2:
            mask[:] = 0
        out = {"tokens": ids[:-1], "labels": ids[1:], "loss_mask": mask}
        if self.segments:
            cut = 1 + n % (self.seq - 1)
            at = np.arange(self.seq)
            out["segments"] = (at >= cut).astype(np.int64)
            out["positions"] = np.where(at >= cut, at - cut, at)
        return out


class MadeMasked:
    """Random samples with masked tokens for an encoder, a pure function of n: padded to other lengths and with other
    numbers of masked tokens each. With `blind`, nothing counts in samples with an odd number."""

    def __init__(self, model: ModelConfig, blind: bool = False) -> None:
        self.model, self.blind = model, blind

    def sample(self, n: int) -> dict[str, np.ndarray]:
        m, random = self.model, np.random.default_rng([11, n])
        length = m.seq - 3 * (n % 3)
        at, count = np.arange(m.seq), 1 + n % m.predictions
        places = np.zeros(m.predictions, np.int64)
        places[:count] = np.sort(random.permutation(np.arange(1, length))[:count])
        mask = (np.arange(m.predictions) < count) & (not (self.blind and n % 2))
        found = {
            "tokens": random.integers(0, m.vocab, m.seq), "labels": random.integers(0, m.vocab, m.predictions),
            "segments": (at >= length).astype(np.int64), "places": places, "loss_mask": mask.astype(np.int64),
        }  # fmt: skip
        found["token_types"] = ((at > length // 2) & (at < length)).astype(np.int64)
        return found | ({"swapped": random.integers(0, 2)} if m.pooler else {})


class MadeBlanks:
    """Random samples with a source, blanks that fill it in and padding, a pure function of n."""

    def __init__(self, model: ModelConfig, blind: bool = False) -> None:
        self.model, self.blind = model, blind

    def sample(self, n: int) -> dict[str, np.ndarray]:
        m, random = self.model, np.random.default_rng([17, n])
        at, source, used = np.arange(m.seq), 3 + n % 7, m.seq - n % 3
        later = (at >= source) & (at < used)
        found = {
            "tokens": random.integers(0, m.vocab, m.seq), "labels": random.integers(0, m.vocab, m.seq),
            "loss_mask": (later & (not (self.blind and n % 2))).astype(np.int64),
            "positions": np.where(at < source, at, random.integers(0, source)),
            "segments": np.where(at < source, 0, np.where(at < used, 1, 2)),
        }  # fmt: skip
        return found | ({"token_types": np.where(later, at - source + 1, 0)} if m.token_types else {})


class MadeSpans:
    """Random samples for an encoder-decoder, a pure function of n, with other numbers of tokens that count each."""

    def __init__(self, model: ModelConfig, blind: bool = False) -> None:
        self.model, self.blind = model, blind

    def sample(self, n: int) -> dict[str, np.ndarray]:
        m, random = self.model, np.random.default_rng([13, n])
        length = m.t5.decoder_seq
        labels = random.integers(0, m.vocab, length)
        mask = (np.arange(length) < length - n % 3) & (not (self.blind and n % 2))
        return {
            "tokens": random.integers(0, m.vocab, m.seq), "decoder_tokens": np.append(m.t5.start, labels[:-1]),
            "labels": labels, "loss_mask": mask.astype(np.int64),
        }  # fmt: skip


def made_for(config: Config, **made: Any) -> Any:
    """Samples of the fields that a config's model reads."""
    m = config.model
    if config.objective == "blanks":
        return MadeBlanks(m, **made)
    if config.objective == "spans":
        return MadeSpans(m, **made)
    return MadeMasked(m, **made) if config.objective == "masked" else Made(m.vocab, m.seq, **made)


def small_config(**sections: dict[str, Any]) -> Config:
    """A tiny model in float64; sections are merged key by key."""
    base: dict[str, dict[str, Any]] = {
        "model": {"layers": 4, "hidden": 32, "heads": 4, "vocab": 53, "seq": 16},
        "data": {"prefixes": ["made"]},
        "train": {"precision": "fp64", "global_batch": 8, "micro_batch": 1, "steps": 20, "compile": False},
        "comm": {"bucket_mib": 0.02},
    }
    for name, keys in sections.items():
        base[name] = base.get(name, {}) | keys
    return config_from(base)


def load_into(trainer: Trainer, reader: Reader, model_only: bool = False) -> None:
    """What a run does when it resumes, on ranks that can't fail alone."""
    read_into(trainer, reader, model_only)
    complete_load(trainer, reader, model_only)


def make_trainer(
    config: Config, rank: int = 0, world: int = 1, data: Any = None, process_groups: dict[str, Any] | None = None,
    device: Device | None = None,
) -> Trainer:  # fmt: skip
    check(config, world)
    device = device or Device("cpu")
    ctx: Context = build_context(config, rank, world, device, process_groups=process_groups, trains=True)
    data = data or made_for(config)
    return Trainer(ctx, build_modules(ctx, model_provider), forward_step, data, data)


def true_gradients(trainer: Trainer) -> Pairs:
    """(record, gradient) of every local parameter after one forward and backward, as the true mean over tokens."""
    totals, normalisation = trainer.gradients()
    sums = Sums.read(sums_over_world(trainer.ctx, totals, trainer.terms).tolist(), trainer.terms)
    divisor = normalisation.weight * max(normalisation.count(sums.tokens), 1.0)
    pairs = []
    for buffer in trainer.data_parallel.trained:
        for slot, grad in _whole(trainer, buffer, [bucket.own_grads for bucket in buffer.buckets]):
            pairs.append((slot.record, grad / divisor))
    return pairs


def _whole(trainer: Trainer, buffer: FlatBuffer, shares: list[torch.Tensor]) -> Iterator[tuple[Slot, torch.Tensor]]:
    """The local tensors of all parameters from the shares of the ranks that divide them."""
    for bucket, offloaded in zip(buffer.buckets, shares, strict=True):
        share = offloaded.to(trainer.ctx.device.torch)  # NCCL gathers no host memory
        flat = share.new_empty(bucket.stop - bucket.start)
        trainer.data_parallel.groups(buffer).shards.all_gather(flat, share.contiguous())
        for slot in bucket.slots:
            at = slot.start - bucket.start
            yield slot, flat[at : at + slot.record.numel].view(slot.record.local_shape).double()


def parameters(trainer: Trainer) -> Pairs:
    """(record, value) of every local parameter, as the model holds it or, where it is not there, as its ranks do."""
    pairs = []
    trainer.data_parallel.weights.wait_for_gathers()
    for buffer in trainer.data_parallel.buffers:
        if buffer.split.stage < 3:
            pairs += [(slot.record, slot.parameter.detach().double()) for slot in buffer.slots]
        else:
            own = [bucket.own_params for bucket in buffer.buckets]
            pairs += [(slot.record, value) for slot, value in _whole(trainer, buffer, own)]
    return pairs


def moments(trainer: Trainer) -> Pairs:
    """(record, value) of both moments of every local parameter, the second ones under a name of their own."""
    pairs = []
    for state in trainer.states():
        name = state.name
        if name != "param" and not name.startswith(REDUCER):
            found = _whole(trainer, state.buffer, state.tensors)
            pairs += [(replace(slot.record, name=f"{name}/{slot.record.name}"), value) for slot, value in found]
    return pairs


def gather_global(pairs: Pairs) -> Whole:
    """Global tensors from one process's local ones."""
    whole: Whole = {}
    for record, local in pairs:
        target = whole.setdefault(record.name, np.zeros(record.shape))
        for box in record.boxes:
            target[_at(box.start, box.shape)] = local[_at(box.local_start, box.shape)].cpu().numpy()
    return whole


def _at(start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))


def worst(pairs: Pairs, whole: Whole) -> tuple[float, str]:
    """The largest error by the trunk's measure: |a-b| / max(max|b| of the parameter, 1e-6 x the largest of all).

    A number that is not one is an infinite error.
    """
    largest = max(float(np.abs(b).max()) for b in whole.values())
    result, name = 0.0, ""
    for record, local in pairs:
        reference = whole[record.name]
        scale = max(float(np.abs(reference).max()), 1e-6 * largest)
        for box in record.boxes:
            a = local[_at(box.local_start, box.shape)].cpu().numpy()
            error = float(np.abs(a - reference[_at(box.start, box.shape)]).max()) / scale
            error = error if error == error else np.inf
            if error > result:
                result, name = error, record.name
    return result, name


def relative(a: Sequence[float], b: Sequence[float]) -> float:
    """The largest relative difference of two series; infinite where one is not a number."""
    errors = [abs(x - y) / abs(y) for x, y in zip(a, b, strict=True)]
    return max(e if e == e else np.inf for e in errors)


@dataclass(frozen=True)
class Reference:
    """What one process finds: gradients of the first batch; norms, what was counted of experts, parameters and
    validation loss of STEPS_64 steps; fp32 losses of STEPS_32."""

    gradients: Whole
    norms: list[float]
    counted: list[float]
    parameters: Whole
    moments: Whole
    validation: float
    losses: list[float]

    def of_kind(self, kind: str) -> Whole:
        """First or second moments alone: their sizes are not alike."""
        return {name: value for name, value in self.moments.items() if name.startswith(f"{kind}/")}


def exact_reference(trainer: Trainer) -> Reference:
    """Returns what the trainer of one process finds in float64; there are no fp32 losses."""
    gradients = gather_global(true_gradients(trainer))
    results = [trainer.step() for _ in range(STEPS_64)]
    norms, counted = [result.grad_norm for result in results], counted_of(results[1:])
    after, states = gather_global(parameters(trainer)), gather_global(moments(trainer))
    return Reference(gradients, norms, counted, after, states, validation_loss(trainer), [])


def solo(exact: Config, single: Config, data: Any = None) -> Reference:
    """The reference of a config without any layout, given in float64 and in fp32."""
    found = exact_reference(make_trainer(exact, data=data))
    trainer = make_trainer(single, data=data)
    return replace(found, losses=[trainer.step().loss for _ in range(STEPS_32)])


def counted_of(results: Sequence[StepResult]) -> list[float]:
    """The rows of every expert and the routers' mean entropy in each of these steps. (The first step counts the
    gradients that were asked for before it, too.)"""
    mixed = [result.experts for result in results if result.experts]
    return [float(n) for found in mixed for rows in (*found["rows"], [found["entropy"]]) for n in rows]


def validation_loss(trainer: Trainer) -> float:
    line = trainer.validate()
    assert line is not None
    return float(line["loss"])


@dataclass(frozen=True)
class Outcome:
    """How far one rank is from the reference: (error, worst parameter) or an error, by what was compared."""

    gradients: tuple[float, str]
    overlapped: tuple[float, str]  # again, with buckets reduced while backward runs
    norm: float
    counted: float = 0.0
    parameters: tuple[float, str] = (0.0, "")
    moments: tuple[float, str] = (0.0, "")
    validation: float = 0.0
    losses: float = 0.0

    def complaints(self, exact: float = EXACT) -> list[str]:
        found = []
        for what in ("gradients", "overlapped", "parameters", "moments"):
            error, name = getattr(self, what)
            if error > exact:
                found.append(f"{what}: {name} is off by {error:.1e}")
        for what, limit in (("norm", exact), ("counted", exact), ("validation", exact), ("losses", LOSSES)):
            if getattr(self, what) > limit:
                found.append(f"{what}: off by {getattr(self, what):.1e}")
        return found


def compare_exact(trainer: Trainer, reference: Reference) -> Outcome:
    """Gradients of the first batch, twice, and the norm that a step reports, against the reference.

    Ranks only measure, and the test that started them judges: a rank that raised alone would leave the others waiting.
    """
    first = worst(true_gradients(trainer), reference.gradients)
    again = worst(true_gradients(trainer), reference.gradients)
    return Outcome(first, again, relative([trainer.step().grad_norm], reference.norms[:1]))


def compare_steps(trainer: Trainer, reference: Reference) -> Outcome:
    """`compare_exact`, and the next steps, where what an update leaves behind shows: their norms, what they counted of
    experts, and all parameters after them, frozen ones (the experts' balancing biases) included."""
    o = compare_exact(trainer, reference)
    results = [trainer.step() for _ in range(STEPS_64 - 1)]
    norm = relative([result.grad_norm for result in results], reference.norms[1:])
    differences = [abs(a - b) for a, b in zip(counted_of(results), reference.counted, strict=True)]
    counted = max((d if d == d else np.inf for d in differences), default=0.0)
    after = worst(parameters(trainer), reference.parameters)
    return replace(o, norm=max(o.norm, norm), counted=counted, parameters=after)


def compare(exact: Trainer, single: Trainer, reference: Reference, steps: int = STEPS_32) -> Outcome:
    """All of it: also moments and validation loss after STEPS_64 steps, and fp32 losses of `steps`."""
    o = compare_states(exact, reference)
    losses = relative([single.step().loss for _ in range(steps)], reference.losses[:steps])
    return replace(o, losses=losses)


def compare_states(exact: Trainer, reference: Reference) -> Outcome:
    """`compare_steps`, and the moments and the validation loss after them."""
    o = compare_steps(exact, reference)
    states = max(worst([p for p in moments(exact) if p[0].name.startswith(f"{kind}/")], reference.of_kind(kind))
                 for kind in ("exp_avg", "exp_avg_sq")) if reference.moments else (0.0, "")  # fmt: skip
    validation = relative([validation_loss(exact)], [reference.validation])
    return replace(o, moments=states, validation=validation)


def complaints(outcomes: Sequence[Outcome], exact: float = EXACT) -> list[str]:
    """What is wrong on any rank, each said once with the first rank that says it."""
    found: dict[str, str] = {}
    for rank, outcome in enumerate(outcomes):
        for complaint in outcome.complaints(exact):
            found.setdefault(complaint.split(":")[0], f"rank {rank}: {complaint}")
    return list(found.values())
