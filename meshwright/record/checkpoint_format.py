"""The format of a checkpoint: safetensors files of blocks of global tensors, and one JSON index. No torch.

    step-00000020/
      index.json              the run's state, and every block with its position, file and checksum
      rank-00000.safetensors  the blocks that one rank wrote

A tensor is named STATE/NAME (`param/layers.0.mlp.up.weight`, `exp_avg/...`). A block is a rectangular part of it.
Readers need not know the layout that wrote the files. A folder counts as a checkpoint only under its final name, which
it gets by a rename when everything is written and checked. Until then it is called `.saving-step-...`. The index has
the CRC-32 of each block, and ends with the CRC-32 of all bytes before that value.
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
from meshwright.outside import LARGEST, of_kind, parse_json, read_json
from meshwright.spec.model.hf.folder import has_weights

FORMAT = "meshwright checkpoint"
FORMAT_VERSION = 1
INDEX = "index.json"
SEAL = b', "crc32": '  # separates the index from its last value, the checksum of all bytes before this
# Environment variables that grow when a launcher restarts a job's ranks. MESHWRIGHT_ATTEMPT, with MESHWRIGHT_JOB, is
# for launchers that set none.
ATTEMPTS = ("MESHWRIGHT_ATTEMPT", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
# Size of a block. A reader that needs part of a block has to read and check all of it, so blocks are not larger.
BLOCK_BYTES = 16 * 2**20

# For each name of a dtype in safetensors, its name in torch and the bytes of an element.
SAFETENSORS_DTYPES = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "I64": ("int64", 8), "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1), "U8": ("uint8", 1),
    "BOOL": ("bool", 1), "F8_E4M3": ("float8_e4m3fn", 1),
}  # fmt: skip
ELEMENT_BYTES = dict(SAFETENSORS_DTYPES.values())


class DamagedCheckpoint(UserError):
    """An error for a checkpoint that must not be used. Its message names the file."""


class SavedBlock(NamedTuple):
    """A rectangular block of a global tensor, with the file and key that hold it and the CRC-32 of its bytes."""

    tensor: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    key: str
    crc32: int

    @classmethod
    def read(cls, row: Sequence[Any]) -> SavedBlock:
        """Return the block that a list in a JSON file represents. Raise ValueError for any other value."""
        tensor, start, shape, *rest = of_kind(row, _BLOCK, "a block")
        return cls(tensor, tuple(start), tuple(shape), *rest)


_BLOCK = tuple[tuple(get_type_hints(SavedBlock).values())]  # type: ignore[misc, valid-type]


class StoredTensor(TypedDict):
    """The shape of a global tensor, and the name of its dtype in torch."""

    shape: list[int]
    dtype: str


class Counters(TypedDict):
    """The numbers of a run's state that are not tensors."""

    updates: int
    loss_scale: float | None
    good_steps: int


@dataclass
class Index:
    """The index of a checkpoint. `read_index` checks a file against these annotations."""

    step: int
    consumed: int
    world: int
    config: dict[str, dict[str, Any]]
    state: dict[str, float | str | None] = field(default_factory=dict)  # `Counters`, or empty in an imported checkpoint
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)  # name -> bytes
    blocks: list[SavedBlock] = field(default_factory=list)

    def incomplete(self) -> list[str]:
        """Return the tensors that the blocks don't cover. Blocks don't overlap, so counting elements is enough."""
        left = {name: math.prod(tensor["shape"]) for name, tensor in self.tensors.items()}
        for block in self.blocks:
            left[block.tensor] = left.get(block.tensor, 0) - math.prod(block.shape)
        return [name for name, count in left.items() if count]


def checkpoint_folder(config: Config) -> Path:
    """Return the folder of a run's checkpoints."""
    return Path(config.checkpoint.dir) if config.checkpoint.dir else Path(config.run.dir) / "checkpoints"


def was_restarted(env: Mapping[str, str] = os.environ) -> bool:
    """Return True if a launcher has restarted this job's ranks. The job then resumes from its newest checkpoint."""
    counts = (env.get(name, "0") for name in ATTEMPTS)
    return any(count not in ("", "0") for count in counts)


def job_name(env: Mapping[str, str] = os.environ) -> str:
    """Return the launcher's name of this job, which all of its attempts share; empty if the launcher gives none."""
    return env.get("MESHWRIGHT_JOB") or env.get("SLURM_JOB_ID") or env.get("TORCHELASTIC_RUN_ID") or ""


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint's folder, or -1 if the name has none."""
    match = re.fullmatch(r"step-(\d{8,})", path.name)
    return int(match.group(1)) if match else -1


def saving_name(step: int) -> str:
    return f".saving-{folder_name(step)}"


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of every checkpoint, oldest first.

    Each of them was complete when it was saved. `read_index` checks that it still is.
    """
    checkpoints = []
    for path in folder.iterdir() if folder.is_dir() else ():
        step = step_of(path)
        if step >= 0 and path.is_dir():
            checkpoints.append((step, path))
    return sorted(checkpoints)


def set_aside(folder: Path, after: int) -> None:
    """Rename the checkpoints after the step that a run resumes from, so that they no longer count.

    They are damaged or belong to another history of the run. They are not deleted.
    """
    for step, path in list_checkpoints(folder):
        if step > after:
            name, number = f"lost-{path.name}", 1
            while (folder / name).exists():
                number += 1
                name = f"lost-{path.name}-{number}"
            path.rename(folder / name)


def remove_unfinished(folder: Path, before: int | None = None) -> None:
    """Remove the incomplete folders of killed or failed saves, so that a later save of the same step begins empty.

    With `before`, only those of earlier steps are removed.
    """
    for path in folder.glob(".saving-*") if folder.is_dir() else ():
        if before is None or step_of(Path(path.name.removeprefix(".saving-"))) < before:
            shutil.rmtree(path, ignore_errors=True)
    remove_old(folder)


def remove_old(folder: Path) -> None:
    """Delete the checkpoints that `keep_newest` renamed, also those left by a process that was killed meanwhile."""
    for path in folder.glob(".old-*") if folder.is_dir() else ():
        shutil.rmtree(path, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    write_whole(path, json.dumps(value).encode())


def write_whole(path: Path, data: bytes) -> None:
    """Write a file completely or not at all: under another name first, synced to disk, then renamed."""
    aside = path.with_name(path.name + ".part")
    with aside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def sync_folder(path: Path) -> None:
    """Flush a folder, so that the new names in it are on disk. A file system that can't flush folders is no error."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def write_index(folder: Path, index: Index) -> None:
    """Write the index, with its checksum as the last value of the JSON object."""
    head = json.dumps({"format": FORMAT, "version": FORMAT_VERSION} | vars(index)).encode()[:-1]
    write_whole(folder / INDEX, head + SEAL + f"{zlib.crc32(head)}}}".encode())


def read_index(folder: Path) -> Index:
    """Read and check the index.

    Raise DamagedCheckpoint, which names the file, for another format or version, for a changed index, and for a file
    that is missing or has another size than when it was written. The content of the other files is not read.
    """
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
    # The checksum is of the bytes as they were written, since JSON may be written in several ways.
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
        actual = path.stat().st_size
        if actual != size:
            raise DamagedCheckpoint(f"{path} has {actual} bytes where {size} were written: use another checkpoint")
    return index


def index_of(value: dict[str, Any]) -> Index:
    """Build an index from JSON, and check all of it so that its users need not. Raise ValueError if it is wrong."""
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
    # A name with a path could make a reader open files outside of the checkpoint.
    if any(os.path.basename(name) != name or name in ("", ".", "..") for name in index.files):
        raise ValueError("it names files that are not the checkpoint's")
    for block in index.blocks:
        shape = index.tensors[block.tensor]["shape"] if block.tensor in index.tensors else None
        fits = shape is not None and len(shape) == len(block.start) == len(block.shape)
        if not fits or any(a + n > size for a, n, size in zip(block.start, block.shape, shape or (), strict=True)):
            raise ValueError(f"a block of {block.tensor} lies outside of it")
        if block.file not in index.files:
            raise ValueError("it names files that are not the checkpoint's")
    return index


def blocks_of(shape: tuple[int, ...], element_bytes: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the start and the shape of blocks that cover a tensor in order.

    A block is a run of rows of at most BLOCK_BYTES, or a single row if that is larger. If a tensor stacks matrices and
    one of them is larger than that, each matrix is divided into runs of its rows.
    """
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
    """Delete all but the newest `keep` checkpoints; 0 keeps all."""
    checkpoints = list_checkpoints(folder)
    for step, path in checkpoints[: max(0, len(checkpoints) - keep)] if keep else ():
        # Renamed first: a checkpoint that is only partly deleted must not look like one.
        path.rename(folder / f".old-{folder_name(step)}")
    remove_old(folder)


def path_and_step(source: str) -> tuple[Path, str]:
    """Split PATH[@STEP] into the path and the step's digits. A path that exists may have an @ in its name."""
    text, at, step = source.rpartition("@")
    return (Path(text), step) if at and not Path(source).exists() else (Path(source), "")


def find_checkpoint(source: str) -> Path:
    """Return the folder of the checkpoint that PATH[@STEP] names.

    PATH is the folder of a checkpoint or of a run. For a run, the result is its newest checkpoint or that of STEP.
    """
    path, wanted = path_and_step(source)
    if wanted and not wanted.isdecimal():
        raise UserError(f"'{source}': after @ comes a step's number, e.g. {path}@1000")
    if (path / INDEX).is_file():
        if wanted and step_of(path) != int(wanted):
            raise UserError(f"{path} is one checkpoint, not a run's folder: leave @{wanted} out")
        return path
    by_step = dict(list_checkpoints(path) or list_checkpoints(path / "checkpoints"))
    if not by_step and (path / "config.json").is_file():
        raise UserError(
            f"{path} is a Hugging Face folder: turn it into a checkpoint with `meshwright import {path} --to FOLDER`"
        )
    if not path.exists():
        near = _folder_near(path) or hub_hint(path)
        raise UserError(f"there is no folder '{path}'{near}: name a run's folder or a checkpoint's")
    if not by_step and (path / "run.json").is_file():
        raise UserError(f"{path} has no checkpoint yet: wait for one (checkpoint.every), or stop the run, which saves")
    if not by_step:
        problem = "is a file" if path.is_file() else "holds neither a run nor a complete checkpoint"
        raise UserError(f"{path} {problem}: name a run's folder or a checkpoint's")
    step = int(wanted) if wanted else max(by_step)
    if step not in by_step:
        raise UserError(f"{path} has no checkpoint of step {wanted}: it has {', '.join(map(str, by_step))}")
    return by_step[step]


def _folder_near(path: Path) -> str:
    """Return a suggestion if a neighbouring folder has nearly this name, or an empty string."""
    try:
        close = closest(path.name, sorted(other.name for other in path.parent.iterdir() if other.is_dir()))
    except OSError:
        return ""
    return f" (did you mean '{path.with_name(close)}'?)" if close else ""


def is_hf_folder(source: str) -> bool:
    """Return True if a path names a Hugging Face folder, and not a run or a checkpoint."""
    return (Path(source) / "config.json").exists()


def model_folder(source: str) -> Path:
    """Return the folder with a complete set of weights that PATH[@STEP] or the path of a Hugging Face folder names."""
    if not is_hf_folder(source):
        return find_checkpoint(source)
    path = Path(source) / "config.json"
    try:
        read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} can't be read ({error}): get it again") from None
    return Path(source)


def first_weights(config: Config, source: str | None) -> str:
    """Return the run, checkpoint or Hugging Face folder whose weights a new run begins with, "" if they are drawn.

    `source` is what --from names. Companion files and the tokenizer's check follow this choice, so that they are the
    same whichever key names a model.
    """
    folder = config.model.hf
    return config.tune.base or source or (folder if folder and has_weights(Path(folder)) else "")
