"""Conversations packed into samples by best fit, each seen apart from the others, with the loss where the assistant
speaks. No torch.

PREFIX holds one conversation a document, and PREFIX.mask a 1 for every token of it that is learned. A conversation of L
tokens takes L - 1 places of a sample: its inputs, whose labels are the tokens after them. Longer ones are cut at the
end. The longest come first, and each goes where the least room is left that takes it, which needs at most 11/9 of the
fewest possible samples, and one more. Bins are made once and come in an order drawn from the seed and the epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.dataset import keyed_permutation
from meshwright.data.token_file import TokenFile, read_metadata
from meshwright.errors import UserError

MASK = ".mask"  # of the prefix of a file of masks
KINDS = {"": "plain text", "chat": "conversations", "pairs": "preference pairs", "judged": "judged answers"}
Bins = list[list[int]]


def best_fit(sizes: Sequence[int], room: int) -> Bins:
    """Returns the numbers of the items in each bin of `room`: largest items first, each into the fullest bin that takes
    it."""
    bins: Bins = []
    by_room: list[list[int]] = [[] for _ in range(room + 1)]
    there = 0  # bit r: some bin has room r
    for item in sorted(range(len(sizes)), key=lambda n: (-sizes[n], n)):
        size = sizes[item]
        assert 0 < size <= room, (size, room)
        fitting = there >> size
        if fitting:
            left = size + (fitting & -fitting).bit_length() - 1
            number = by_room[left].pop()
            if not by_room[left]:
                there ^= 1 << left
        else:
            left, number = room, len(bins)
            bins.append([])
        bins[number].append(item)
        by_room[left - size].append(number)
        there |= 1 << (left - size)
    return bins


def is_chat(prefix: str) -> str:
    """Returns what kind of conversations a token file holds: chat, pairs or judged; an empty word for plain text."""
    return str((read_metadata(prefix) or {}).get("chat", ""))


class Conversations:
    """The documents [low, high) of a file of conversations, or as many drawn from all over it."""

    def __init__(self, prefix: str, documents: tuple[int, int], drawn: bool, unit: int = 1) -> None:
        """`unit` documents belong together and count as one: 2 for pairs."""
        self.file, self.masks = TokenFile(prefix), TokenFile(prefix + MASK)
        if len(self.file) != len(self.masks) or not np.array_equal(self.file.sizes, self.masks.sizes):
            raise UserError(f"{prefix}{MASK} does not fit {prefix}: make both again with `meshwright data chat`")
        low, high = documents
        chosen = np.arange(low, high)
        if drawn:
            chosen = np.sort(keyed_permutation(self.file.document_count // unit, "split")[low:high]).astype(np.int64)
        self.numbers: NDArray[Any] = (chosen[:, None] * unit + np.arange(unit)).reshape(-1)

    def __len__(self) -> int:
        return len(self.numbers)

    def sizes(self) -> NDArray[Any]:
        found: NDArray[Any] = self.file.sizes[self.numbers].astype(np.int64)
        return found

    def read(self, number: int, most: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Returns the first tokens of a conversation, and its mask."""
        document = int(self.numbers[number])
        size = min(int(self.file.sizes[document]), most)
        first = int(self.file.pointers[document]) // self.file.dtype.itemsize
        at = int(self.masks.pointers[document])
        return self.file.tokens[first : first + size].astype(np.int64), self.masks.tokens[at : at + size]


class PackedStream:
    """Samples of packed conversations. Sample n is a pure function of the seed and n."""

    def __init__(
        self, parts: Sequence[Conversations], seq: int, seed: int, name: str, padding: int, positions: bool,
        unit: int = 1, vocab_needed: int | None = None,
    ) -> None:  # fmt: skip
        self.parts, self.seq, self.seed, self.name, self.padding = parts, seq, seed, name, padding
        self.positions, self.unit, self.vocab_needed = positions, unit, vocab_needed
        lengths = np.concatenate([part.sizes() for part in parts]) if parts else np.zeros(0, np.int64)
        most = seq // unit  # pairs share a sample: each half has as much room
        self._taken = np.minimum(lengths, most + 1)
        groups = (self._taken - 1).reshape(-1, unit).sum(1)
        self._where = [(part, n) for part in parts for n in range(len(part))]
        self.bins = best_fit(groups.tolist(), seq) if len(groups) else []
        self.cut = int((lengths > most + 1).sum())
        if not self.bins:
            raise UserError(f"the {name} part of the data holds no conversation: use more data, or another split")
        self.filled = float(groups.sum()) / (len(self.bins) * seq)

    @property
    def source(self) -> PackedStream:
        return self

    @property
    def epoch_samples(self) -> int:
        return len(self.bins)

    def own_labels(self, n: int) -> int:
        return self.seq

    def source_of(self, n: int) -> str:
        return ""

    def _order(self, epoch: int) -> NDArray[Any]:
        return keyed_permutation(len(self.bins), self.seed, self.name, "bins", epoch)

    def sample(self, n: int) -> dict[str, NDArray[np.int64]]:
        """Returns tokens, labels, loss_mask, segments and positions: [seq] each. What is left is padding, without a
        loss and in segments of its own."""
        epoch, at = divmod(n, len(self.bins))
        found = {key: np.zeros(self.seq, np.int64) for key in ("tokens", "labels", "loss_mask", "segments")}
        found["tokens"][:] = found["labels"][:] = self.padding
        places = np.zeros(self.seq, np.int64)
        begin = number = 0
        for group in self.bins[int(self._order(epoch)[at])]:
            for item in range(group * self.unit, (group + 1) * self.unit):
                part, inside = self._where[item]
                tokens, mask = part.read(inside, int(self._taken[item]))
                here = slice(begin, begin + len(tokens) - 1)
                found["tokens"][here], found["labels"][here] = tokens[:-1], tokens[1:]
                found["loss_mask"][here], found["segments"][here] = mask[1:], number
                places[here] = np.arange(len(tokens) - 1)
                begin, number = here.stop, number + 1
        found["segments"][begin:], places[begin:] = number, np.arange(self.seq - begin)
        return found | ({"positions": places} if self.positions else {})


def packed_datasets(
    prefixes: Sequence[str], split: Sequence[float], seq: int, seed: int, drawn: bool, positions: bool, kinds: set[str]
) -> list[PackedStream | None]:
    """Returns the train, valid and test samples of files of conversations, which must be of these kinds; a part whose
    share is 0 is None. Conversations of all files are packed together."""
    from meshwright.data.stream import SPLIT_NAMES, check_tokenizers, split_documents

    found = [(prefix, is_chat(prefix)) for prefix in prefixes]
    for prefix, kind in found:
        if not kind and not Path(f"{prefix}.idx").is_file():
            made = "check the path, or make it with `meshwright data chat`"
            raise UserError(f"no token file {prefix} (.idx and .bin): {made}")
        if kind not in kinds:
            raise UserError(
                f"{prefix} holds {KINDS[kind]}, and data.objective asks for {KINDS[min(kinds)]}: make the data with "
                "`meshwright data chat`, or change data.objective"
            )
    if len({kind for _, kind in found}) > 1:
        raise UserError("data.prefixes names pairs and judged answers: use one kind")
    unit = 2 if found[0][1] == "pairs" else 1
    metadata = [read_metadata(prefix) or {} for prefix in prefixes]
    check_tokenizers([TokenFile(prefix) for prefix in prefixes], metadata)
    vocab, padding = max(int(each["vocab_size"]) for each in metadata), int(metadata[0]["eod"])
    streams: list[PackedStream | None] = []
    for part, name in enumerate(SPLIT_NAMES):
        if not split[part]:
            streams.append(None)
            continue
        parts = []
        for prefix in prefixes:
            count = TokenFile(prefix).document_count // unit
            parts.append(Conversations(prefix, split_documents(count, split)[part], drawn, unit))
        streams.append(PackedStream(parts, seq, seed, name, padding, positions, unit, vocab))
    return streams
