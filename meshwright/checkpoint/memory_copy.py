"""Checkpoints in memory: the keepers of a rank's node and of the next node each hold a copy of the rank's shard.

A rank copies the same blocks that it writes to a checkpoint on disk. The copies of all ranks therefore form a complete
checkpoint, which any layout can load. It survives the loss of one node. After the loss of two neighbouring nodes the
run falls back to the disk. Only the newest two steps are kept. Checkpoints on disk are still needed.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
import zlib
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.contract import CheckpointedTrainer
from meshwright.checkpoint.keeper import KEEPERS, KEY, KeeperError, KeeperLink
from meshwright.checkpoint.load import Reader
from meshwright.checkpoint.save import Snapshot
from meshwright.checkpoint.tensor_file import checksum, raw
from meshwright.config.load import to_mapping
from meshwright.device import SideStream
from meshwright.engine.sharding.remainders import as_tensor
from meshwright.errors import notice
from meshwright.outside import of_kind, parse_json
from meshwright.record import checkpoint_format as fmt
from meshwright.record.checkpoint_format import DamagedCheckpoint, Index, SavedBlock

# The time limit for a keeper to list its copies. One that does not answer counts as empty.
ASK_S = 5.0


@dataclass(frozen=True)
class Keepers:
    """The keepers that a rank knows: first those of this generation's `nodes`, in order, then those of earlier
    generations. `node` is the index of this rank's node."""

    addresses: list[tuple[str, int]]
    nodes: int
    node: int
    generation: int
    key: bytes

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> Keepers | None:
        """Read the keepers from the environment. Return None if the launcher started none."""
        if KEEPERS not in env or KEY not in env:
            return None
        value = of_kind(parse_json(env[KEEPERS]), dict[str, Any], KEEPERS)
        addresses = [(str(host), int(port)) for host, port in value["addresses"]]
        key = bytes.fromhex(env[KEY])
        return cls(addresses, int(value["nodes"]), int(value["node"]), int(value["generation"]), key)

    @property
    def holders(self) -> list[tuple[str, int]]:
        """The addresses of the keepers of this rank's copy: on its own node and, if there are several, on the next."""
        return [self.addresses[n] for n in dict.fromkeys((self.node, (self.node + 1) % self.nodes))]


class MemoryCopies:
    """The memory copies of one rank.

    Training waits for the copy to host memory. It goes into persistent buffers, pinned if the state is on a device,
    like those of a save. A thread then computes the checksums and sends the copy to the keepers.
    """

    def __init__(self, trainer: CheckpointedTrainer, keepers: Keepers) -> None:
        self.trainer, self.keepers = trainer, keepers
        self._thread: threading.Thread | None = None
        self._failed = False
        self._staging: dict[tuple[int, int], Tensor] = {}
        self.blocked_s = 0.0  # The time that training waited for the last copy.
        self.bytes = 0  # The size of the last copy, as sent to each keeper.

    def save(self) -> None:
        """Copy the present state to host memory, and send it to the keepers in a thread."""
        begun = time.monotonic()
        self.wait()
        trainer = self.trainer
        snapshot = Snapshot(trainer)
        with SideStream(trainer.ctx.device):
            snapshot.copy_to_host(self._staging, everything=True)
        snapshot.release_sources()
        self.bytes = sum(math.prod(values.shape) * values.element_size() for _, _, values in snapshot.blocks)
        index = Index(
            trainer.step_number, trainer.consumed, trainer.ctx.layout.world, to_mapping(trainer.ctx.config),
            dict(trainer.counters()), snapshot.tensors,  # type: ignore[arg-type]
            {f"rank-{trainer.ctx.rank}": self.bytes},
        )  # fmt: skip
        self._thread = threading.Thread(target=self._send, args=(index, snapshot), name="memory copy", daemon=True)
        self._thread.start()
        self.blocked_s = time.monotonic() - begun

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _send(self, index: Index, snapshot: Snapshot) -> None:
        (name,), chunks, at = index.files, [], 0
        for tensor, start, block in snapshot.blocks:
            values = as_tensor(block).detach().contiguous()
            # In memory a block's key is its offset in the rank's bytes.
            index.blocks.append(SavedBlock(tensor, start, tuple(values.shape), name, str(at), checksum(values)))
            chunks.append(raw(values))
            at += values.nbytes
        text = json.dumps(vars(index)).encode()
        data = b"".join(chunks)
        for address, port in self.keepers.holders:
            try:
                with KeeperLink(address, port, self.keepers.key) as link:
                    rank, generation = self.trainer.ctx.rank, self.keepers.generation
                    link.ask(
                        {"op": "put", "step": index.step, "rank": rank, "world": index.world, "generation": generation},
                        [text, data],
                    )  # fmt: skip
            except KeeperError as error:
                if not self._failed:  # Warn only once.
                    notice(f"meshwright: warning: rank {self.trainer.ctx.rank}: the memory copy is not kept: {error}")
                self._failed = True


def newest_whole(keepers: Keepers) -> int:
    """Return the newest step for which the keepers hold the copies of all ranks, or 0 if there is none."""
    ranks: dict[tuple[int, int, int], set[int]] = {}
    for _, found in _list_all_copies(keepers):
        for step, rank, world, generation in found:
            ranks.setdefault((step, generation, world), set()).add(rank)
    return max((step for (step, _, world), has in ranks.items() if len(has) == world), default=0)


def _list_all_copies(keepers: Keepers) -> list[tuple[tuple[str, int], list[list[int]]]]:
    """Return, for every keeper that answers, its address and [step, rank, world, generation] of its copies."""
    answers = []
    for where in dict.fromkeys(keepers.addresses):
        try:
            with KeeperLink(*where, keepers.key, ASK_S) as link:
                answers.append((where, link.ask({"op": "found"})[0].get("found", [])))
        except KeeperError:
            continue
    return answers


class MemoryReader(Reader):
    """A reader of a checkpoint in the memory of keepers, with the interface of the reader for disks."""

    def __init__(self, keepers: Keepers, step: int) -> None:
        self.keepers, self.step = keepers, step
        self._links = ExitStack()
        # By the file name of a rank's part: the rank, and the connection to the keeper that holds it.
        self._at: dict[str, tuple[int, KeeperLink]] = {}
        super().__init__(Path(f"the copy of step {step} in memory"), self._merge_index())

    def _merge_index(self) -> Index:
        """Return the index, merged from the parts of all ranks. Raise DamagedCheckpoint if a part is missing."""
        holders: dict[tuple[int, int], dict[int, tuple[str, int]]] = {}
        for where, found in _list_all_copies(self.keepers):
            for step, rank, world, generation in found:
                if step == self.step:
                    holders.setdefault((generation, world), {})[rank] = where
        whole = [key for key, has in holders.items() if len(has) == key[1]]
        if not whole:
            raise DamagedCheckpoint(f"the keepers hold no whole copy of step {self.step}")
        links: dict[tuple[str, int], KeeperLink] = {}
        index: Index | None = None
        try:
            for rank, where in sorted(holders[max(whole)].items()):
                if where not in links:
                    links[where] = self._links.enter_context(KeeperLink(*where, self.keepers.key))
                _, (text,) = links[where].ask({"op": "list", "step": self.step, "rank": rank})
                part = fmt.index_of(parse_json(bytes(text)))
                self._at |= dict.fromkeys(part.files, (rank, links[where]))
                if index is None:
                    index = part
                else:
                    index.files |= part.files
                    index.tensors |= part.tensors
                    index.blocks += part.blocks
        except (KeeperError, ValueError, OSError) as error:
            raise DamagedCheckpoint(f"the copy of step {self.step} in memory can't be read: {error}") from None
        assert index is not None
        if left := index.incomplete():
            raise DamagedCheckpoint(f"the copy of step {self.step} in memory lacks a part of {left[0]}")
        return index

    def _values(self, block: SavedBlock) -> Tensor:
        rank, link = self._at[block.file]
        dtype = getattr(torch, self.index.tensors[block.tensor]["dtype"])
        size = math.prod(block.shape) * dtype.itemsize
        try:
            request = {"op": "get", "step": self.step, "rank": rank, "start": int(block.key), "size": size}
            _, (data,) = link.ask(request)  # type: ignore[arg-type]
        except KeeperError as error:
            raise OSError(str(error)) from None
        if len(data) != size or zlib.crc32(data) != block.crc32:
            raise ValueError("it is not what was sent")
        return torch.frombuffer(data, dtype=dtype).view(block.shape) if size else torch.empty(block.shape, dtype=dtype)

    def close(self) -> None:
        self._links.close()
