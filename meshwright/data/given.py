"""Samples that a program passes: any dataset with an index or an iterator, as a source of numbered samples. No torch.

A dataset with an index (`torch.utils.data.Dataset`, `datasets.Dataset`, a list) is shuffled anew in each epoch, by the
seed alone, so that sample n of a run is always the same. A dataset with only an iterator is read in its own order. To
resume, it is set to a state that a checkpoint holds if it has `state_dict` and `load_state_dict`. Otherwise the samples
that the run has used are read again and skipped.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from meshwright.data.dataset import keyed_permutation
from meshwright.errors import UserError, notice

Sample = dict[str, np.ndarray[Any, Any]]
# Labels of this value count in no loss, as in transformers.
IGNORED = -100
# The states of an iterator that are kept: a run that goes back a few steps finds an early enough one.
CACHED_STATES = 8


def number_samples(data: Any, name: str, seed: int = 0, shuffle: bool = False, every: int = 1) -> Any:
    """Return an object with `sample(n)` for the data that a program passes. `name` is used in error sentences.

    An object that has `sample` already is returned as it is. `every` is the number of samples of a step."""
    if data is None or hasattr(data, "sample"):
        return data
    if not isinstance(data, (Mapping, str)):
        if _has_index(data):
            return IndexedSamples(data, name, seed, shuffle)
        if hasattr(data, "__iter__"):
            return IteratedSamples(data, name, every)
    kind = type(data).__name__
    raise UserError(f"{name} is a {kind}: give an object with samples by index or by iteration, or with sample(n)")


def _has_index(data: Any) -> bool:
    """Return True if samples can be read by their numbers.

    torch's IterableDataset inherits an index that raises NotImplementedError."""
    if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        return False
    try:
        data[0]
    except NotImplementedError:
        return False
    except IndexError:
        return True
    return True


class IndexedSamples:
    """Samples of a dataset with an index. `shuffle` draws a new order for each epoch from the seed."""

    def __init__(self, data: Any, name: str, seed: int, shuffle: bool) -> None:
        self.data, self.name, self.seed, self.shuffle = data, name, seed, shuffle
        self.size = len(data)
        self._order: tuple[int, Sequence[int]] | None = None
        if not self.size:
            raise UserError(f"{name} has no samples: give data with at least one")

    def sample(self, n: int) -> Sample:
        epoch, at = divmod(n, self.size)
        return as_arrays(self.data[int(self._order_of(epoch)[at]) if self.shuffle else at], self.name)

    def _order_of(self, epoch: int) -> Any:
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, keyed_permutation(self.size, self.seed, "given", epoch)  # type: ignore[assignment]
        assert self._order is not None
        return self._order[1]


class IteratorPosition(NamedTuple):
    """A position of an iterator: the samples that it has given, its epoch, and its state (None: its beginning)."""

    position: int
    epoch: int
    state: Any


class IteratedSamples:
    """Samples of a dataset with only an iterator, which is read again from the beginning when it ends."""

    def __init__(self, data: Any, name: str, every: int) -> None:
        """Read from `data`, and remember its state each time after about `every` samples."""
        self.data, self.name, self.every = data, name, every
        self.has_states = hasattr(data, "state_dict") and hasattr(data, "load_state_dict")
        self._fresh = copy.deepcopy(data.state_dict()) if self.has_states else None
        self._states = [IteratorPosition(0, 0, self._fresh)]
        self._go_to(self._states[0])
        # Sample 0 is read once more to learn the shapes, when a run that resumes is elsewhere already.
        self._first: Sample | None = None

    def sample(self, n: int) -> Sample:
        if n == 0 and self._first is not None and self.position != 0:
            return self._first
        if n < self.position:
            self._go_to(next(state for state in reversed(self._states) if state.position <= n))
        while self.position < n:
            self._next()
        value = as_arrays(self._next(), self.name)
        if self.position >= self._states[-1].position + self.every:
            self._note_state()
        if n == 0:
            self._first = value
        return value

    def _note_state(self) -> None:
        if self.has_states:
            self._states.append(IteratorPosition(self.position, self.epoch, copy.deepcopy(self.data.state_dict())))
            # The first one stays: it begins anew.
            del self._states[1:-CACHED_STATES]

    def state_before(self, n: int) -> str:
        """Return the newest known state that has not passed sample n, as JSON, or "" if there is none that JSON can
        express."""
        # A copy, since the thread that reads samples may add a state meanwhile.
        found = next(state for state in reversed(self._states.copy()) if state.position <= n)
        try:
            return json.dumps(found) if self.has_states else ""
        except TypeError:
            return ""

    def begin_at(self, n: int, state: str, says: bool) -> None:
        """Prepare to read from sample n on. `state` is the one in a checkpoint, or empty."""
        if state:
            self._states[1:] = [IteratorPosition(*json.loads(state))]
            self._go_to(self._states[-1])
        elif n and says:
            why = "has no state_dict" if not self.has_states else "had no state in the checkpoint"
            notice(f"{self.name} {why}: its first {n:,} samples are read again and skipped, to go on after them")

    def _go_to(self, state: IteratorPosition) -> None:
        self.position, self.epoch = state.position, state.epoch
        if self.has_states:
            self.data.load_state_dict(copy.deepcopy(state.state))
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        if hasattr(self.data, "set_epoch"):
            self.data.set_epoch(self.epoch)
        self._iterator: Iterator[Any] = iter(self.data)
        if self.position and not self.has_states and self._iterator is self.data:
            raise UserError(
                f"{self.name} is an iterator that can't begin again, and sample {self.position:,} is needed once more: "
                "give an object whose __iter__ begins anew"
            )

    def _next(self) -> Any:
        for _ in range(2):
            try:
                value = next(self._iterator)
            except StopIteration:
                self.epoch += 1
                self._begin_epoch()
                continue
            self.position += 1
            return value
        raise UserError(f"{self.name} ended after {self.position:,} samples and gives no more: give one that repeats")


def as_arrays(sample: Any, name: str) -> Sample:
    """Return a sample as arrays by name. Tensors, lists and numbers become arrays."""
    if not isinstance(sample, Mapping) or not sample:
        kind = type(sample).__name__
        raise UserError(f"a sample of {name} is a {kind}: give mappings of names to arrays, as {{'x': [1, 2]}}")
    arrays = {str(key): np.asarray(value) for key, value in sample.items()}
    if wrong := [key for key, value in arrays.items() if value.dtype.kind not in "biuf"]:
        raise UserError(f"'{wrong[0]}' of a sample of {name} holds no numbers: leave it out, or tokenize it first")
    return arrays


class TransformersSamples:
    """Samples for the built-in models from samples in the form of transformers.

    A sample has `input_ids` and maybe `attention_mask` and `labels` (-100: not learned). Each token predicts the next
    one. A sample in Meshwright's own form (`tokens`, `labels`, `loss_mask`) stays as it is.
    """

    def __init__(self, data: Any, name: str, seq: int, fields: Sequence[str]) -> None:
        self.data, self.name, self.seq, self.fields = data, name, seq, fields

    def sample(self, n: int) -> Sample:
        sample: Sample = self.data.sample(n)
        if "input_ids" not in sample:
            if lacking := [field for field in self.fields if field not in sample]:
                raise UserError(
                    f"a sample of {self.name} has {', '.join(sample)} and lacks {lacking[0]}: give input_ids, or "
                    f"{', '.join(self.fields)}"
                )
            return sample
        ids = sample["input_ids"].astype(np.int64)
        labels = sample.get("labels", ids).astype(np.int64)
        kept = sample.get("attention_mask", np.ones_like(ids)) > 0
        if ids.ndim != 1 or len(ids) < 2 or len(ids) > self.seq + 1:
            raise UserError(
                f"a sample of {self.name} has input_ids of shape {list(ids.shape)}, and model.seq={self.seq} takes 2 "
                f"to {self.seq + 1} tokens: cut them, or set model.seq"
            )
        learned = kept[1:] & (labels[1:] != IGNORED)
        rest = (0, self.seq + 1 - len(ids))
        return {
            "tokens": np.pad(ids[:-1], rest), "labels": np.pad(np.where(learned, labels[1:], 0), rest),
            "loss_mask": np.pad(learned.astype(np.int64), rest),
        }  # fmt: skip


def iterator_behind(data: Any) -> IteratedSamples | None:
    """Return the iterator behind a dataset, if there is one."""
    inner = data.data if isinstance(data, TransformersSamples) else data
    return inner if isinstance(inner, IteratedSamples) else None
