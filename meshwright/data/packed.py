"""Conversations packed into samples by best fit. Each is attended separately, with a loss on the assistant's tokens.

PREFIX holds one conversation per document, and PREFIX.mask has a 1 for each of its tokens that is learned. A
conversation of L tokens takes L - 1 positions of a sample: its inputs, whose labels are the tokens after them. One that
is longer than a sample is cut at the end. The longest conversations are packed first, and each goes into the fullest
sample that has room for it (best fit decreasing). This needs at most 11/9 of the minimum number of samples, plus one.
The samples are packed once, and every epoch shuffles them by (seed, epoch). No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.data.dataset import keyed_permutation
from meshwright.data.token_file import TokenFile, read_metadata
from meshwright.errors import UserError, plural
from meshwright.outside import LARGEST

MASK = ".mask"  # suffix that turns a token file's prefix into that of its mask file


class ChatKind(NamedTuple):
    """A kind of token files: its name in messages, and the conversations that share a sample."""

    words: str
    unit: int = 1
    judged: bool = False  # the mask says whether an answer is good

    @property
    def is_pairs(self) -> bool:
        return self.unit == 2


TEXT, CHAT, PAIRS, JUDGED = "", "chat", "pairs", "judged"
KINDS = {
    TEXT: ChatKind("plain text"), CHAT: ChatKind("conversations"), PAIRS: ChatKind("preference pairs", unit=2),
    JUDGED: ChatKind("judged answers", judged=True),
}  # fmt: skip
Bins = list[list[int]]
LENGTH_UNIT = 64  # A length that is chosen is a multiple of this, which every split over ranks and kernel takes.


def best_fit(sizes: Sequence[int], room: int) -> Bins:
    """Return the numbers of the items in each bin of size `room`, packed by best fit decreasing.

    The largest items come first, and each goes into the fullest bin that has room for it.
    """
    bins: Bins = []
    by_room: list[list[int]] = [[] for _ in range(room + 1)]
    # Bit r is set if some bin has room r left. The lowest set bit from `size` on is the best fit, which makes the
    # search fast without a sorted structure.
    available = 0
    for item in sorted(range(len(sizes)), key=lambda n: (-sizes[n], n)):
        size = sizes[item]
        assert 0 < size <= room, (size, room)
        fitting = available >> size
        if fitting:
            left = size + (fitting & -fitting).bit_length() - 1
            number = by_room[left].pop()
            if not by_room[left]:
                available ^= 1 << left
        else:
            left, number = room, len(bins)
            bins.append([])
        bins[number].append(item)
        by_room[left - size].append(number)
        available |= 1 << (left - size)
    return bins


def is_chat(prefix: str) -> str:
    """Return the kind of conversations in a token file: chat, pairs or judged; an empty string for plain text."""
    return str((read_metadata(prefix) or {}).get("chat", ""))


def sizes_of(prefixes: Sequence[str]) -> tuple[NDArray[Any], int]:
    """Return the tokens of each conversation in some files, and how many conversations share a sample (2 for pairs)."""
    sizes = [TokenFile(prefix).sizes for prefix in prefixes]
    return np.concatenate(sizes).astype(np.int64), KINDS[is_chat(prefixes[0])].unit


def fitting_length(sizes: NDArray[Any], unit: int, most: int) -> int:
    """Return the length of samples that conversations of these sizes take, at most `most`.

    It holds the longest conversation, or 99 % of them if the longest is more than twice as long: a few very long ones
    would cost all samples their memory.
    """
    needed = unit * (sizes - 1)
    longest = int(needed.max())
    usual = int(np.percentile(needed, 99))
    wanted = longest if longest <= 2 * usual else usual
    return min(most, -(-max(1, wanted) // LENGTH_UNIT) * LENGTH_UNIT)


def sample_length(prefixes: Sequence[str], most: int) -> int:
    """Return the length of samples for conversations: that of `data chat --seq`, or else the one that fits them.

    Without token files of conversations, which are reported elsewhere, it is `most`.
    """
    if not all(is_chat(prefix) and Path(f"{prefix}.idx").is_file() for prefix in prefixes):
        return most
    noted = max((read_metadata(prefix) or {}).get("seq", 0) for prefix in prefixes)
    return min(most, noted) if noted else fitting_length(*sizes_of(prefixes), most)


class LengthLoss(NamedTuple):
    """The loss by a length of samples: of `conversations`, `cut` lose their end and `empty` every learned token.

    Of `learned` tokens, `kept` are left.
    """

    conversations: int
    cut: int
    empty: int
    learned: int
    kept: int

    @property
    def hurts(self) -> bool:
        """True if more than a hundredth of the learned tokens is lost, or every one of some conversation."""
        return bool(self.empty) or self.kept < 0.99 * self.learned

    def words(self) -> str:
        """Describe the loss, e.g. `the end of 3 of 200 conversations is cut off`."""
        if not self.cut:
            return "no conversation is cut"
        lost = 1.0 - self.kept / max(1, self.learned)
        words = f"the end of {self.cut:,} of {plural(self.conversations, 'conversation')} is cut off"
        words += f", which loses {100 * lost:.1f} % of the learned tokens" if lost else ""
        return words + (f", and {self.empty:,} of them keep nothing to learn" if self.empty else "")


def cut_of(prefixes: Sequence[str], seq: int) -> LengthLoss:
    """Count the tokens that samples of `seq` tokens cut off the conversations of some files."""
    conversations = cut = empty = learned = lost = 0
    for prefix in prefixes:
        unit = sizes_of([prefix])[1]
        whole = Conversations(prefix, (0, TokenFile(prefix).document_count), drawn=False)
        sizes, most = whole.sizes(), seq // unit + 1
        conversations = conversations + len(sizes)
        learned = learned + (read_metadata(prefix) or {}).get("learned", 0)
        for number in np.flatnonzero(sizes > most).tolist():
            mask = whole.read(number, int(sizes[number]))[1]
            cut = cut + 1
            empty = empty + (not mask[:most].any())
            lost += int(np.count_nonzero(mask[most:]))
    return LengthLoss(conversations, cut, empty, learned, learned - lost)


def length_words(prefixes: Sequence[str], seq: int) -> str:
    """Describe the length of samples of some conversations, its reason, and the tokens that it cuts off."""
    cut = cut_of(prefixes, seq)
    if seq != sample_length(prefixes, LARGEST):
        why = " (model.seq)"
    elif any((read_metadata(prefix) or {}).get("seq") for prefix in prefixes):
        why = ", which `data chat --seq` named"
    else:
        why = f", chosen because they hold {'99 % of the conversations' if cut.cut else 'the longest conversation'}"
    return f"{'meshwright: warning: ' * cut.hurts}samples of {plural(seq, 'token')}{why}: {cut.words()}"


class Conversations:
    """The documents [low, high) of a file of conversations, or the same number taken from all over it."""

    def __init__(self, prefix: str, documents: tuple[int, int], drawn: bool, unit: int = 1) -> None:
        """Open the file and its masks. Groups of `unit` documents (2 for pairs) are selected together.

        `documents` counts in such groups, and so does the selection with `drawn`.
        """
        self.file = TokenFile(prefix)
        self.masks = TokenFile(prefix + MASK)
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
        """Return the first `most` tokens of a conversation, and their mask."""
        document = int(self.numbers[number])
        size = min(int(self.file.sizes[document]), most)
        first = int(self.file.pointers[document]) // self.file.dtype.itemsize
        at = int(self.masks.pointers[document])  # masks take one byte per token, so bytes are positions
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
        # A pair has to fit one sample, and each of its conversations gets half of it.
        most = seq // unit
        # A conversation of L tokens has L - 1 inputs, so one token more than there are positions is used.
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
        """Return tokens, labels, loss_mask, segments and, if wanted, positions: [seq] each.

        The rest of the sample is padding, without a loss and in a separate segment.
        """
        epoch, at = divmod(n, len(self.bins))
        sample = {key: np.zeros(self.seq, np.int64) for key in ("tokens", "labels", "loss_mask", "segments")}
        sample["tokens"][:] = sample["labels"][:] = self.padding
        positions = np.zeros(self.seq, np.int64)
        begin = number = 0
        for group in self.bins[int(self._order(epoch)[at])]:
            for item in range(group * self.unit, (group + 1) * self.unit):
                part, inside = self._where[item]
                tokens, mask = part.read(inside, int(self._taken[item]))
                here = slice(begin, begin + len(tokens) - 1)
                sample["tokens"][here], sample["labels"][here] = tokens[:-1], tokens[1:]
                sample["loss_mask"][here], sample["segments"][here] = mask[1:], number
                positions[here] = np.arange(len(tokens) - 1)
                begin, number = here.stop, number + 1
        sample["segments"][begin:], positions[begin:] = number, np.arange(self.seq - begin)
        return sample | ({"positions": positions} if self.positions else {})


def packed_datasets(
    prefixes: Sequence[str], split: Sequence[float], seq: int, seed: int, drawn: bool, positions: bool, kinds: set[str]
) -> list[PackedStream | None]:
    """Return the train, valid and test streams of files of conversations, all packed together.

    A part whose share is 0 is None. Raise a UserError if a file is of none of these `kinds`.
    """
    # stream.py imports this module.
    from meshwright.data.stream import SPLIT_NAMES, check_tokenizers, split_documents

    kind_of = [(prefix, is_chat(prefix)) for prefix in prefixes]
    for prefix, kind in kind_of:
        if not kind and not Path(f"{prefix}.idx").is_file():
            advice = "check the path, or make it with `meshwright data chat`"
            raise UserError(f"no token file {prefix} (.idx and .bin): {advice}")
        if kind not in kinds:
            raise UserError(
                f"{prefix} holds {KINDS[kind].words}, and data.objective asks for {KINDS[min(kinds)].words}: make the "
                "data with `meshwright data chat`, or change data.objective"
            )
    if len({kind for _, kind in kind_of}) > 1:
        raise UserError("data.prefixes names pairs and judged answers: use one kind")
    unit = KINDS[kind_of[0][1]].unit
    metadata = [read_metadata(prefix) or {} for prefix in prefixes]
    check_tokenizers([TokenFile(prefix) for prefix in prefixes], metadata)
    vocab = max(int(each["vocab_size"]) for each in metadata)
    padding = int(metadata[0]["eod"])
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
