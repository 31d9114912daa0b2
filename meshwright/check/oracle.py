"""One process is the oracle: gradients and parameters of any layout beside those of a single process.

A rank compares its own boxes of every parameter with the whole tensors of one process, so that nothing has to be
gathered but what ZeRO divides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from meshwright.engine.losses import Normalisation, Sums, sums_over_world
from meshwright.engine.output import Totals
from meshwright.engine.sharding.buffers import FlatBuffer, Slot
from meshwright.engine.step import Trainer
from meshwright.spec.layout.params import ParamRecord

Pairs = list[tuple[Any, torch.Tensor]]
Whole = dict[str, np.ndarray[Any, Any]]

EXACT = 1e-10  # the error that float64 allows a gradient, a norm or a parameter, relative to its largest element
LEAST = 1e-6  # a parameter whose gradients are smaller than this part of the largest is measured against that part


def true_gradients(trainer: Trainer) -> Pairs:
    """Runs one forward and backward, and returns (record, gradient) of every local parameter, as the true mean over
    tokens."""
    return divided_gradients(trainer, *trainer.gradients())


def divided_gradients(trainer: Trainer, totals: Totals, normalisation: Normalisation) -> Pairs:
    """Returns (record, gradient) of every local parameter from what a backward has left in the buffers."""
    sums = Sums.read(sums_over_world(trainer.ctx, totals, trainer.terms).tolist(), trainer.terms)
    divisor = normalisation.weight * max(normalisation.count(sums.tokens), 1.0)
    pairs = []
    for buffer in trainer.data_parallel.trained:
        for slot, grad in whole_locals(trainer, buffer, [bucket.own_grads for bucket in buffer.buckets]):
            pairs.append((slot.record, grad / divisor))
    return pairs


def whole_locals(
    trainer: Trainer, buffer: FlatBuffer, shares: Sequence[torch.Tensor]
) -> Iterator[tuple[Slot, torch.Tensor]]:
    """Yields the local tensors of all parameters from the shares of the ranks that divide them."""
    for bucket, stored in zip(buffer.buckets, shares, strict=True):
        share = stored.to(trainer.ctx.device.torch)  # offloaded shares: NCCL gathers no host memory
        flat = share.new_empty(bucket.stop - bucket.start)
        trainer.data_parallel.groups(buffer).shards.all_gather(flat, share.contiguous())
        for slot in bucket.slots:
            at = slot.start - bucket.start
            yield slot, flat[at : at + slot.record.numel].view(slot.record.local_shape).double().cpu()


def parameters(trainer: Trainer) -> Pairs:
    """Returns (record, value) of every local parameter, as the model holds it or, where ZeRO stage 3 divides it, as its
    ranks do together."""
    pairs: Pairs = []
    trainer.data_parallel.weights.wait_for_gathers()
    for buffer in trainer.data_parallel.buffers:
        if buffer.split.stage < 3:
            pairs += [(slot.record, slot.parameter.detach().double().cpu()) for slot in buffer.slots]
        else:
            own = [bucket.own_params for bucket in buffer.buckets]
            pairs += [(slot.record, value) for slot, value in whole_locals(trainer, buffer, own)]
    return pairs


def gather_global(pairs: Pairs) -> Whole:
    """Returns global tensors from one process's local ones."""
    whole: Whole = {}
    for record, local in pairs:
        target = whole.setdefault(record.name, np.zeros(record.shape))
        for box in record.boxes:
            target[box_slices(box.start, box.shape)] = local[box_slices(box.local_start, box.shape)].numpy()
    return whole


def box_slices(start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))


def largest_of(whole: Whole) -> float:
    """Returns the largest absolute value of all tensors."""
    return max((float(np.abs(value).max()) for value in whole.values() if value.size), default=0.0)


def error_of(record: ParamRecord, local: torch.Tensor, reference: np.ndarray[Any, Any], largest: float) -> float:
    """Returns the largest error of a rank's boxes of one parameter: |a-b| / max(max|b|, LEAST x the largest of all). A
    number that is not one is an infinite error."""
    result = 0.0
    peak = float(np.abs(reference).max()) if reference.size else 0.0
    scale = max(peak, LEAST * largest) or 1.0
    for box in record.boxes:
        a = local[box_slices(box.local_start, box.shape)].numpy()
        if a.size:
            error = float(np.abs(a - reference[box_slices(box.start, box.shape)]).max()) / scale
            result = max(result, error if error == error else np.inf)
    return result


def errors(pairs: Pairs, whole: Whole) -> dict[str, float]:
    """Returns the largest error of this rank's part of every parameter, by name."""
    largest, found = largest_of(whole), dict.fromkeys((record.name for record, _ in pairs), 0.0)
    for record, local in pairs:
        found[record.name] = max(found[record.name], error_of(record, local, whole[record.name], largest))
    return found


def worst(pairs: Pairs, whole: Whole) -> tuple[float, str]:
    """Returns the largest error and its parameter; an empty name where there is no error at all."""
    found = errors(pairs, whole)
    name = max(found, key=lambda each: found[each], default="")
    return (found[name], name) if name and found[name] > 0 else (0.0, "")


def relative(a: Sequence[float], b: Sequence[float]) -> float:
    """Returns the largest relative difference of two series; infinite where one is not a number."""
    differences = (abs(x - y) / abs(y) if x != y else 0.0 for x, y in zip(a, b, strict=True))
    return max((e if e == e else np.inf for e in differences), default=0.0)
