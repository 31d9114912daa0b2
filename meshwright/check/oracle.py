"""Compare gradients and parameters of any layout with those of a single process, which is the oracle.

A rank compares its boxes of every parameter with the whole tensors of one process. Only the shards of ZeRO have to be
gathered for this.
"""

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
WholeTensors = dict[str, np.ndarray[Any, Any]]

# The allowed error of a gradient, a norm or a parameter in float64, relative to its largest element.
EXACT = 1e-10
# The smallest scale of an error, relative to the largest gradient of all. Tiny gradients are measured against it.
LEAST = 1e-6


def true_gradients(trainer: Trainer) -> Pairs:
    """Run one forward and backward. Return (record, gradient) of every local parameter, with the gradient as the true
    mean over tokens."""
    return divided_gradients(trainer, *trainer.gradients())


def divided_gradients(trainer: Trainer, totals: Totals, normalisation: Normalisation) -> Pairs:
    """Return (record, gradient) of every local parameter, from the gradient sums that backward left in the buffers."""
    # The buffers hold sums over tokens of all ranks. The update divides by the same number.
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
    """Yield (slot, local tensor) of all parameters, gathered from the shards of the ranks that divide them."""
    for bucket, stored in zip(buffer.buckets, shares, strict=True):
        # The shards may be offloaded, and NCCL can't gather host memory.
        share = stored.to(trainer.ctx.device.torch)
        flat = share.new_empty(bucket.stop - bucket.start)
        trainer.data_parallel.groups(buffer).shards.all_gather(flat, share.contiguous())
        for slot in bucket.slots:
            at = slot.start - bucket.start
            yield slot, flat[at : at + slot.record.numel].view(slot.record.local_shape).double().cpu()


def parameters(trainer: Trainer) -> Pairs:
    """Return (record, value) of every local parameter. With ZeRO stage 3 the value is gathered from its shards."""
    pairs: Pairs = []
    trainer.data_parallel.weights.wait_for_gathers()
    for buffer in trainer.data_parallel.buffers:
        if buffer.split.stage < 3:
            pairs += [(slot.record, slot.parameter.detach().double().cpu()) for slot in buffer.slots]
        else:
            own = [bucket.own_params for bucket in buffer.buckets]
            pairs += [(slot.record, value) for slot, value in whole_locals(trainer, buffer, own)]
    return pairs


def gather_global(pairs: Pairs) -> WholeTensors:
    """Return the global tensors of a single process, from its local ones."""
    whole: WholeTensors = {}
    for record, local in pairs:
        target = whole.setdefault(record.name, np.zeros(record.shape))
        for box in record.boxes:
            target[box_slices(box.start, box.shape)] = local[box_slices(box.local_start, box.shape)].numpy()
    return whole


def box_slices(start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))


def largest_of(whole: WholeTensors) -> float:
    """Return the largest absolute value of all tensors."""
    return max((float(np.abs(value).max()) for value in whole.values() if value.size), default=0.0)


def error_of(record: ParamRecord, local: torch.Tensor, reference: np.ndarray[Any, Any], largest: float) -> float:
    """Return the largest error of a rank's boxes of one parameter: |a-b| / max(max|b|, LEAST x `largest`). `largest` is
    the largest value of all parameters. NaN counts as an infinite error."""
    result = 0.0
    peak = float(np.abs(reference).max()) if reference.size else 0.0
    scale = max(peak, LEAST * largest) or 1.0
    for box in record.boxes:
        a = local[box_slices(box.local_start, box.shape)].numpy()
        if a.size:
            error = float(np.abs(a - reference[box_slices(box.start, box.shape)]).max()) / scale
            # NaN differs from itself.
            result = max(result, error if error == error else np.inf)
    return result


def errors(pairs: Pairs, whole: WholeTensors) -> dict[str, float]:
    """Return the largest error of this rank's shard of each parameter, by name."""
    largest = largest_of(whole)
    by_name = dict.fromkeys((record.name for record, _ in pairs), 0.0)
    for record, local in pairs:
        by_name[record.name] = max(by_name[record.name], error_of(record, local, whole[record.name], largest))
    return by_name


def worst(pairs: Pairs, whole: WholeTensors) -> tuple[float, str]:
    """Return the largest error and its parameter. The name is empty if there is no error at all."""
    by_name = errors(pairs, whole)
    name = max(by_name, key=lambda each: by_name[each], default="")
    return (by_name[name], name) if name and by_name[name] > 0 else (0.0, "")


def relative(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the largest relative difference of two series, or infinity if there is a NaN."""
    differences = (abs(x - y) / abs(y) if x != y else 0.0 for x, y in zip(a, b, strict=True))
    return max((e if e == e else np.inf for e in differences), default=0.0)
