"""A key-value cache in pages that sequences of any length share, and the arrangement of one forward pass over it.

Each layer has one pool of slots, one slot for a token. A page is a run of `PAGE` slots. A sequence holds the pages of
its tokens in order, wherever they lie. Full pages stay known by their tokens and all tokens before them after use, so
that a later prompt with the same beginning takes them over instead of computing them again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.nn.attention.attention import AnyMask, KVCache

PAGE = 16  # Tokens. Smaller pages waste less at the ends of sequences, larger ones are found by fewer lookups.
SCRATCH = 0  # The page that padding is written to.

BEGINNING = 0  # The prefix of a sequence's first page.


class Pages:
    """The pages of a pool: which are free, how many sequences use each, and which prefix each full one ends.

    A prefix is a number: that of the prefix one page shorter and the tokens of the last page determine it.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, SCRATCH, -1))
        self._users = [0] * count
        self._page_of: dict[tuple[int, tuple[int, ...]], int] = {}
        self._key_of: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._prefix_of = [BEGINNING] * count
        self._prefixes = BEGINNING
        # Pages that no sequence uses but that end a known prefix, the least recently used first.
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """The number of pages that can be taken."""
        return len(self._free) + len(self._idle)

    def take(self) -> int:
        """Return a page to write to. If no page is free, the oldest unused prefix is forgotten."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            del self._page_of[self._key_of.pop(page)]
        self._users[page] = 1
        return page

    def known(self, ids: Sequence[int]) -> tuple[list[int], int]:
        """Return the pages that hold the longest known beginning of a prompt, as pages in use, and its prefix.

        The last token is never among them, since its logits must be computed.
        """
        found: list[int] = []
        prefix = BEGINNING
        for start in range(0, (len(ids) - 1) // PAGE * PAGE, PAGE):
            page = self._page_of.get((prefix, tuple(ids[start : start + PAGE])))
            if page is None:
                break
            self._idle.pop(page, None)
            self._users[page] += 1
            prefix = self._prefix_of[page]
            found.append(page)
        return found, prefix

    def name(self, page: int, before: int, ids: Sequence[int]) -> int:
        """Record the tokens of a full page that follows the prefix `before`, and return the prefix that it ends."""
        key = (before, tuple(ids))
        known = self._page_of.get(key)
        # Two sequences may have computed the same beginning at the same time. One page is enough to know it by.
        if known is None:
            self._prefixes += 1
            self._page_of[key], self._key_of[page], self._prefix_of[page] = page, key, self._prefixes
            known = page
        return self._prefix_of[known]

    def release(self, pages: Sequence[int]) -> None:
        """End a sequence's use of pages. Those with a known prefix stay readable until they are needed."""
        # The last page of a prefix is useless without the first, so it is forgotten first.
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page]:
                continue
            if page in self._key_of:
                self._idle[page] = None
            else:
                self._free.append(page)


@dataclass(frozen=True)
class Row:
    """The part of a forward pass that belongs to one sequence: new tokens, those before them, and all its pages."""

    ids: Sequence[int]
    before: int
    pages: Sequence[int]


class Pass:
    """The tensors of one forward pass over some rows, for all layers. Shorter rows are padded at their ends."""

    def __init__(self, rows: Sequence[Row], device: torch.device) -> None:
        width = max(len(row.ids) for row in rows)
        ends = [row.before + len(row.ids) for row in rows]
        self.longest = max(ends)
        tokens = [[*row.ids, *[0] * (width - len(row.ids))] for row in rows]
        places = [[min(row.before + n, end - 1) for n in range(width)] for row, end in zip(rows, ends, strict=True)]
        slots = [
            [_slot(row.pages, row.before + n) if n < len(row.ids) else SCRATCH for n in range(width)] for row in rows
        ]
        read = [[_slot(row.pages, at) if at < end else SCRATCH for at in range(self.longest)]
                for row, end in zip(rows, ends, strict=True)]  # fmt: skip
        self.tokens, self.positions, self.slots, self.read = (
            torch.tensor(each, device=device) for each in (tokens, places, slots, read)
        )
        self.last = torch.tensor([n * width + len(row.ids) - 1 for n, row in enumerate(rows)], device=device)
        keys = torch.arange(self.longest, device=device)
        self.visible = keys <= self.positions[:, :, None]
        self._keys = keys

    def mask(self, window: int) -> Tensor:
        """Return which keys each query sees, [rows, 1, queries, keys]."""
        seen = self.visible
        if window:
            seen = seen & (self._keys > self.positions[:, :, None] - window)
        return seen[:, None]


def _slot(pages: Sequence[int], position: int) -> int:
    return pages[position // PAGE] * PAGE + position % PAGE


class PagedCache(KVCache):
    """The slots of one layer. `current` is the pass whose keys and values come next."""

    def __init__(self, pages: int) -> None:
        super().__init__(pages * PAGE)
        self.current: Pass | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write new keys and values to their slots, and return all that the rows see, [rows, heads, tokens, width]."""
        assert self.current is not None
        if self.keys is None or self.values is None:
            # Zeros, because masked values are multiplied by 0, and uninitialised memory may hold NaN.
            self.keys = keys.new_zeros(self.longest, keys.shape[1], keys.shape[3])
            self.values = values.new_zeros(self.longest, values.shape[1], values.shape[3])
        slots = self.current.slots.flatten()
        self.keys[slots] = keys.transpose(1, 2).flatten(0, 1)
        self.values[slots] = values.transpose(1, 2).flatten(0, 1)
        read = self.current.read
        return self.keys[read].transpose(1, 2), self.values[read].transpose(1, 2)

    def seen(self, mask: AnyMask, window: int = 0) -> AnyMask | Tensor:
        """Return which of the returned keys each query sees. It replaces the given mask."""
        assert self.current is not None
        return self.current.mask(window)
