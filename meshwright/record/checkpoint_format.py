"""The format of a checkpoint: safetensors files of blocks of global tensors, and one JSON index. No torch.

    step-00000020/
      index.json              what is in it: the run's state, and every block with its place, file and checksum
      rank-00000.safetensors  the blocks that one rank wrote

A tensor is named STATE/NAME (`param/layers.0.mlp.up.weight`, `exp_avg/...`); a block is a rectangle of it. Nothing in
the files depends on the layout that wrote them. A folder counts as a checkpoint only under its final name, which it
gets by a rename when all is written and checked; until then it is called `.saving-step-...`. The index ends with the
CRC-32 of its own bytes, as each block has one in the index.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, get_type_hints

from meshwright.config.sections import Config
from meshwright.disk import hub_hint
from meshwright.errors import UserError, closest
from meshwright.outside import LARGEST, of_kind, parse_json

FORMAT = "meshwright checkpoint"
FORMAT_VERSION = 1
INDEX = "index.json"
SEAL = b', "crc32": '  # before the index's last value, the checksum of all that stands before this
# What grows when a job's ranks are started again; our own is for launchers that have none, with MESHWRIGHT_JOB.
ATTEMPTS = ("MESHWRIGHT_ATTEMPT", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
BLOCK_BYTES = 16 * 2**20  # a reader that needs a part of a block reads and checks all of it

# By the name in safetensors: the name in torch, and the bytes of an element.
SAFETENSORS_DTYPES = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "I64": ("int64", 8), "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1), "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}  # fmt: skip
ELEMENT_BYTES = dict(SAFETENSORS_DTYPES.values())


class DamagedCheckpoint(UserError):
    """A checkpoint that must not be used; the message names the file."""


class SavedBlock(NamedTuple):
    """A rectangle of a global tensor: which file holds it, under which key, and the CRC-32 of its bytes."""

    tensor: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    key: str
    crc32: int

    @classmethod
    def read(cls, row: Sequence[Any]) -> SavedBlock:
        """Returns the block that a list in a JSON file stands for. Raises ValueError for any other value."""
        tensor, start, shape, *rest = of_kind(row, _BLOCK, "a block")
        return cls(tensor, tuple(start), tuple(shape), *rest)


_BLOCK = tuple[tuple(get_type_hints(SavedBlock).values())]  # type: ignore[misc, valid-type]


class SavedTensor(TypedDict):
    """A global tensor: its shape, and the name of its dtype in torch."""

    shape: list[int]
    dtype: str


class Counters(TypedDict):
    """The numbers that a run keeps beside its tensors."""

    updates: int
    loss_scale: float | None
    good_steps: int


@dataclass
class Index:
    """All of a checkpoint but the numbers themselves. The annotations are also what `read_index` checks a file by."""

    step: int
    consumed: int
    world: int
    config: dict[str, dict[str, Any]]
    state: dict[str, float | None] = field(default_factory=dict)  # `Counters`, or nothing in an imported one
    tensors: dict[str, SavedTensor] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)  # name -> bytes
    blocks: list[SavedBlock] = field(default_factory=list)

    def incomplete(self) -> list[str]:
        """Returns the tensors that the blocks don't hold whole: they don't overlap, so counting elements is enough."""
        left = {name: math.prod(tensor["shape"]) for name, tensor in self.tensors.items()}
        for block in self.blocks:
            left[block.tensor] = left.get(block.tensor, 0) - math.prod(block.shape)
        return [name for name, count in left.items() if count]


def checkpoint_folder(config: Config) -> Path:
    """Returns the folder of a run's checkpoints."""
    return Path(config.checkpoint.dir) if config.checkpoint.dir else Path(config.run.dir) / "checkpoints"


def was_restarted(env: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher has started this job's ranks before; the job then continues from its newest checkpoint."""
    counts = (env.get(name, "0") for name in ATTEMPTS)
    return any(count not in ("", "0") for count in counts)


def job_name(env: Mapping[str, str] = os.environ) -> str:
    """Returns the launcher's name of this job, which all of its attempts share; empty if the launcher gives none."""
    return env.get("MESHWRIGHT_JOB") or env.get("SLURM_JOB_ID") or env.get("TORCHELASTIC_RUN_ID") or ""


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Returns the step in the name of a checkpoint's folder; -1 if the name holds none."""
    match = re.fullmatch(r"step-(\d{8,})", path.name)
    return int(match.group(1)) if match else -1


def saving_name(step: int) -> str:
    return f".saving-{folder_name(step)}"


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Returns (step, path) of every checkpoint, oldest first. Each was complete once; `read_index` checks that it still
    is."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        step = step_of(path)
        if step >= 0 and path.is_dir():
            found.append((step, path))
    return sorted(found)


def set_aside(folder: Path, after: int) -> None:
    """Renames the checkpoints beyond the step that a run continues from: they are damaged or of another history, so
    they are kept but no longer count."""
    for step, path in list_checkpoints(folder):
        if step > after:
            name, number = f"lost-{path.name}", 1
            while (folder / name).exists():
                number += 1
                name = f"lost-{path.name}-{number}"
            path.rename(folder / name)


def remove_unfinished(folder: Path, before: int | None = None) -> None:
    """Removes what killed or failed saves left half-written, of all steps or of those before one, so that a later save
    of the same step does not find it."""
    for path in folder.glob(".saving-*") if folder.is_dir() else ():
        if before is None or step_of(Path(path.name.removeprefix(".saving-"))) < before:
            shutil.rmtree(path, ignore_errors=True)
    remove_old(folder)


def remove_old(folder: Path) -> None:
    for path in folder.glob(".old-*") if folder.is_dir() else ():
        shutil.rmtree(path, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    write_whole(path, json.dumps(value).encode())


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file whole or not at all: under another name first, flushed to disk, then renamed."""
    aside = path.with_name(path.name + ".part")
    with aside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def sync_folder(path: Path) -> None:
    """Flushes a folder, after which the new names in it are on disk. File systems that can't flush a folder are
    tolerated."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def write_index(folder: Path, index: Index) -> None:
    head = json.dumps({"format": FORMAT, "version": FORMAT_VERSION} | vars(index)).encode()[:-1]
    write_whole(folder / INDEX, head + SEAL + f"{zlib.crc32(head)}}}".encode())


def read_index(folder: Path) -> Index:
    """Reads and checks the index. Another format, a later version, and a missing, truncated or changed file each raise
    an error that names the file."""
    path = folder / INDEX
    try:
        data = path.read_bytes()
        value = parse_json(data)
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} is missing: use another checkpoint") from None
    except (ValueError, OSError) as error:
        raise DamagedCheckpoint(f"{path} can't be read ({error}): use another checkpoint") from None
    if not isinstance(value, dict) or value.pop("format", None) != FORMAT:
        raise DamagedCheckpoint(f"{path} is not the index of a Meshwright checkpoint")
    version = value.pop("version", None)
    if version != FORMAT_VERSION:
        raise DamagedCheckpoint(f"{path} has format version {version}, and this program reads version {FORMAT_VERSION}")
    head, _, _ = data.rpartition(SEAL)
    if value.pop("crc32", None) != zlib.crc32(head):
        raise DamagedCheckpoint(f"{path} is damaged (wrong checksum): use another checkpoint")
    try:
        index = index_of(value)
    except ValueError as error:
        raise DamagedCheckpoint(f"{path} is no whole index ({error}): use another checkpoint") from None
    for path, size in ((folder / name, size) for name, size in index.files.items()):
        if not path.is_file():
            raise DamagedCheckpoint(f"{path} is missing: use another checkpoint")
        found = path.stat().st_size
        if found != size:
            raise DamagedCheckpoint(f"{path} has {found} bytes where {size} were written: use another checkpoint")
    return index


def index_of(value: dict[str, Any]) -> Index:
    """Builds an index from JSON, and checks all of it, so that nobody who reads it has to. Raises ValueError."""
    kinds = get_type_hints(Index)
    if strange := sorted(kinds.keys() ^ value.keys()):
        raise ValueError(f"{strange[0]} is {'lacking' if strange[0] in kinds else 'unknown'}")
    for key, kind in kinds.items():
        if key != "blocks":
            of_kind(value[key], kind, key)
    of_kind(value["blocks"], list[Any], "blocks")
    index = Index(**value | {"blocks": [SavedBlock.read(row) for row in value["blocks"]]})
    if index.state:
        of_kind(index.state, Counters, "state")
    if "model" not in index.config or index.world < 1:
        raise ValueError("its config has no model" if index.world else "it was written by no rank")
    for name, tensor in index.tensors.items():
        if tensor["dtype"] not in ELEMENT_BYTES or math.prod(tensor["shape"]) * 8 >= LARGEST:
            raise ValueError(f"{name} can't be of shape {tensor['shape']} and dtype {tensor['dtype']}")
    if any(os.path.basename(name) != name or name in ("", ".", "..") for name in index.files):
        raise ValueError("it names files that are not the checkpoint's")
    for block in index.blocks:
        whole = index.tensors[block.tensor]["shape"] if block.tensor in index.tensors else None
        inside = whole is not None and len(whole) == len(block.start) == len(block.shape)
        if not inside or any(a + n > size for a, n, size in zip(block.start, block.shape, whole or (), strict=True)):
            raise ValueError(f"a block of {block.tensor} lies outside of it")
        if block.file not in index.files:
            raise ValueError("it names files that are not the checkpoint's")
    return index


def blocks_of(shape: tuple[int, ...], element_bytes: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yields the start and the shape of blocks that cover a tensor in order: runs of rows below BLOCK_BYTES, unless a
    single row is larger. The rows of a tensor that stacks matrices are those of each matrix, if they have to be."""
    row = max(1, element_bytes * math.prod(shape[1:]))
    if row > BLOCK_BYTES and len(shape) > 2:
        for n in range(shape[0]):
            for start, inner in blocks_of(shape[1:], element_bytes):
                yield (n, *start), (1, *inner)
        return
    rows = max(1, BLOCK_BYTES // row)
    for low in range(0, shape[0], rows):
        yield (low, *(0 for _ in shape[1:])), (min(rows, shape[0] - low), *shape[1:])


def keep_newest(folder: Path, keep: int) -> None:
    """Removes all but the newest `keep` checkpoints (0: keeps all). A removed one loses its name first."""
    found = list_checkpoints(folder)
    for step, path in found[: max(0, len(found) - keep)] if keep else ():
        path.rename(folder / f".old-{folder_name(step)}")
    remove_old(folder)


def path_and_step(source: str) -> tuple[Path, str]:
    """Splits PATH[@STEP]. A path that exists may have an @ in its name."""
    text, at, step = source.rpartition("@")
    return (Path(text), step) if at and not Path(source).exists() else (Path(source), "")


def find_checkpoint(source: str) -> Path:
    """Returns the checkpoint that PATH[@STEP] names: a checkpoint's own folder, or the newest (or STEP's) in a run's
    folder."""
    path, wanted = path_and_step(source)
    if wanted and not wanted.isdecimal():
        raise UserError(f"'{source}': after @ comes a step's number, e.g. {path}@1000")
    if (path / INDEX).is_file():
        if wanted and step_of(path) != int(wanted):
            raise UserError(f"{path} is one checkpoint, not a run's folder: leave @{wanted} out")
        return path
    found = dict(list_checkpoints(path) or list_checkpoints(path / "checkpoints"))
    if not found and (path / "config.json").is_file():
        raise UserError(
            f"{path} is a Hugging Face folder: turn it into a checkpoint with `meshwright import {path} --to FOLDER`"
        )
    if not path.exists():
        near = _folder_near(path) or hub_hint(path)
        raise UserError(f"there is no folder '{path}'{near}: name a run's folder or a checkpoint's")
    if not found and (path / "run.json").is_file():
        raise UserError(f"{path} has no checkpoint yet: wait for one (checkpoint.every), or stop the run, which saves")
    if not found:
        what = "is a file" if path.is_file() else "holds neither a run nor a complete checkpoint"
        raise UserError(f"{path} {what}: name a run's folder or a checkpoint's")
    step = int(wanted) if wanted else max(found)
    if step not in found:
        raise UserError(f"{path} has no checkpoint of step {wanted}: it has {', '.join(map(str, found))}")
    return found[step]


def _folder_near(path: Path) -> str:
    """Suggests a folder beside it with nearly this name."""
    try:
        close = closest(path.name, sorted(each.name for each in path.parent.iterdir() if each.is_dir()))
    except OSError:
        return ""
    return f" (did you mean '{path.with_name(close)}'?)" if close else ""


def model_folder(source: str) -> Path:
    """Returns the folder of whole weights that PATH[@STEP] of a checkpoint, or a Hugging Face folder, names."""
    return Path(source) if (Path(source) / "config.json").is_file() else find_checkpoint(source)
