"""The format of a checkpoint: safetensors files of blocks of global tensors, and one JSON index. No torch.

    step-00000020/
      index.json              what is in it: the run's state, and every block with its place, file and checksum
      rank-00000.safetensors  the blocks that one rank wrote

A tensor is named STATE/NAME (`param/layers.0.mlp.up.weight`, `exp_avg/...`); a block is a rectangle of it. Nothing in
the files depends on the layout that wrote them. A folder counts as a checkpoint only under its final name, which it
gets by a rename when all is written and checked; until then it is called `.saving-step-...`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from meshwright.config.sections import Config
from meshwright.errors import UserError

FORMAT = "meshwright checkpoint"
VERSION = 1
INDEX = "index.json"
BLOCK_BYTES = 16 * 2**20  # a reader that needs a part of a block reads and checks all of it


class DamagedCheckpoint(UserError):
    """A checkpoint that must not be used; the message names the file."""


@dataclass(frozen=True)
class Block:
    """A rectangle of a global tensor: which file holds it, under which key, and the CRC-32 of its bytes."""

    tensor: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    key: str
    crc32: int


@dataclass
class Index:
    """All of a checkpoint but the numbers themselves."""

    step: int
    consumed: int
    world: int
    config: dict[str, Any]
    state: dict[str, Any] = field(default_factory=dict)  # counters: updates, loss scale, ...
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)  # name -> shape, dtype
    files: dict[str, int] = field(default_factory=dict)  # name -> bytes
    blocks: list[Block] = field(default_factory=list)

    def of(self, tensor: str) -> list[Block]:
        if not hasattr(self, "_by_tensor"):
            self._by_tensor: dict[str, list[Block]] = {}
            for block in self.blocks:
                self._by_tensor.setdefault(block.tensor, []).append(block)
        return self._by_tensor.get(tensor, [])


def checkpoint_folder(config: Config) -> Path:
    """Where a run's checkpoints are."""
    return Path(config.checkpoint.dir) if config.checkpoint.dir else Path(config.run.dir) / "checkpoints"


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def saving_name(step: int) -> str:
    return f".saving-{folder_name(step)}"


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of every complete checkpoint, oldest first."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = re.fullmatch(r"step-(\d{8,})", path.name)
        if match and (path / INDEX).is_file():
            found.append((int(match.group(1)), path))
    return sorted(found)


def set_aside(folder: Path, after: int) -> None:
    """Checkpoints beyond the step that a run goes on from are another history, or damaged: kept, but not counted."""
    for step, path in checkpoints(folder):
        if step > after:
            name, number = f"lost-{path.name}", 1
            while (folder / name).exists():
                number += 1
                name = f"lost-{path.name}-{number}"
            path.rename(folder / name)


def remove_unfinished(folder: Path) -> None:
    """What a killed run left half-written; a later save of the same step must not find it."""
    for path in folder.glob(".saving-*") if folder.is_dir() else ():
        shutil.rmtree(path, ignore_errors=True)
    remove_old(folder)


def remove_old(folder: Path) -> None:
    for path in folder.glob(".old-*") if folder.is_dir() else ():
        shutil.rmtree(path, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all: written aside, flushed to disk, renamed."""
    aside = path.with_name(path.name + ".part")
    with aside.open("w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)



def write_index(folder: Path, index: Index) -> None:
    value = asdict(index)
    value["blocks"] = [[b.tensor, b.start, b.shape, b.file, b.key, b.crc32] for b in index.blocks]
    write_json(folder / INDEX, {"format": FORMAT, "version": VERSION} | value)


def read_index(folder: Path) -> Index:
    """Checked: another format, a later version, a missing or truncated file are told apart by name."""
    path = folder / INDEX
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{folder} is not a checkpoint: it has no {INDEX}") from None
    except (ValueError, OSError) as error:
        raise DamagedCheckpoint(f"{path} can't be read ({error}): use another checkpoint") from None
    if not isinstance(value, dict) or value.pop("format", None) != FORMAT:
        raise DamagedCheckpoint(f"{path} is not the index of a Meshwright checkpoint")
    version = value.pop("version", None)
    if version != VERSION:
        raise DamagedCheckpoint(f"{path} has format version {version}, and this program reads version {VERSION}")
    try:
        rows = value.pop("blocks")
        index = Index(**value, blocks=[Block(t, tuple(a), tuple(n), f, k, c) for t, a, n, f, k, c in rows])
    except (TypeError, ValueError, KeyError):
        raise DamagedCheckpoint(f"{path} lacks a part of the index: use another checkpoint") from None
    for name, size in index.files.items():
        _check_file(folder / name, size)
    return index


def _check_file(path: Path, size: int) -> None:
    if path.name != os.path.basename(path.name) or not path.is_file():
        raise DamagedCheckpoint(f"{path} is missing: use another checkpoint")
    found = path.stat().st_size
    if found != size:
        raise DamagedCheckpoint(f"{path} has {found} bytes where {size} were written: use another checkpoint")


def cut(start: tuple[int, ...], shape: tuple[int, ...], element_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges of dim 0 that keep a block below BLOCK_BYTES where rows allow it."""
    row = element_bytes
    for n in shape[1:]:
        row *= n
    rows = max(1, BLOCK_BYTES // max(1, row))
    for low in range(0, shape[0], rows):
        yield low, min(shape[0], low + rows)


def keep_newest(folder: Path, keep: int) -> None:
    """Removes all but the newest `keep` checkpoints (0: keeps all). A removed one loses its name first."""
    found = checkpoints(folder)
    for step, path in found[: len(found) - keep] if keep else ():
        aside = folder / f".old-{folder_name(step)}"
        path.rename(aside)
    remove_old(folder)
