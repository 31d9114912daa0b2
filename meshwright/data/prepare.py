"""Turning text into a token file, on several processes, in the order of the input.

The main process plans tasks of about a megabyte and writes what comes back; workers read, parse and encode. Results
are taken in the order of the tasks, so the file does not depend on the number of workers.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from meshwright.data.documents import ByteRange, Task, find_files, plan_tasks, read_documents
from meshwright.data.token_file import METADATA_FORMAT
from meshwright.data.token_writer import SIDE_FILES, TokenFileWriter
from meshwright.data.tokenizers import Recipe, Tokenizer, load_tokenizer, train_tokenizer, trained_size
from meshwright.data.workers import map_in_order
from meshwright.errors import UserError

QUICK_BYTES, SLOW_BYTES = 16 << 20, 2 << 20  # input per process: less is not worth another process
TRAINING_BYTES = 512 << 20

# progress(label, total) is a context that yields the function to call with each further number of bytes done.
Progress = Callable[[str, int], contextlib.AbstractContextManager[Callable[[int], None]]]


@contextlib.contextmanager
def no_progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    yield lambda count: None


@dataclass(frozen=True)
class Encoded:
    """The result of a task: the ids of its documents back to back, as the token file stores them, and their lengths."""

    tokens: bytes
    lengths: list[int]
    last_open: bool
    empty: int
    replaced: int
    size: int


@dataclass(frozen=True)
class Summary:
    """What was written. `replaced` counts documents with bytes that are not UTF-8, `empty` those that were left out."""

    prefix: str
    files: list[str]
    tokenizer: str
    vocab_size: int
    eod: int
    dtype: str
    documents: int
    tokens: int
    empty: int
    replaced: int
    input_files: int
    input_bytes: int
    workers: int
    seconds: float
    mb_per_s: float


def encode_task(tokenizer: Tokenizer, field: str, task: Task) -> Encoded:
    """Reads and encodes a task. A document without text is left out; an empty end of a long document is not."""
    pieces, replaced, empty = [], 0, 0
    for span in task:
        for piece in read_documents(span, field):
            replaced += piece.replaced
            if piece.text or (span.start and not span.lines):
                pieces.append(piece)
            else:
                empty += 1
    end = np.array([tokenizer.eod], dtype=tokenizer.dtype).tobytes()
    parts, lengths = [], []
    for piece, ids in zip(pieces, tokenizer.encode_batch([piece.text for piece in pieces]), strict=True):
        parts.append(ids.tobytes())
        if piece.last:
            parts.append(end)
        lengths.append(len(ids) + piece.last)
    last_open = bool(pieces) and not pieces[-1].last
    return Encoded(b"".join(parts), lengths, last_open, empty, replaced, sum(span.size for span in task))


def make_encoder(recipe: Recipe, field: str) -> Callable[[Task], Encoded]:
    """Makes, in a worker process, the function that its tasks go through."""
    return partial(encode_task, recipe.make(), field)


def prepare(
    inputs: Sequence[str],
    out: str,
    *,
    tokenizer: str = "bytes",
    workers: int | None = None,
    eod: str | None = None,
    field: str = "text",
    force: bool = False,
    progress: Progress = no_progress,
) -> Summary:
    """Writes OUT.bin, OUT.idx and OUT.json (and OUT.tokenizer.json with `train:SIZE`) from the inputs. With more than
    one worker a script must guard its entry with `if __name__ == "__main__"`, as any that starts processes."""
    if workers is not None and workers < 1:
        raise UserError(f"--workers {workers} does not work: give 1 or more")
    check_out(out, force)
    size = trained_size(tokenizer)
    made = None if size is not None else load_tokenizer(tokenizer, eod)
    files = find_files(inputs)
    begin = time.perf_counter()
    side_files: dict[str, bytes] = {}
    if made is None:
        assert size is not None
        made = _train(files, size, field, f"{os.path.basename(out)}.tokenizer.json", eod, progress)
        side_files[".tokenizer.json"] = made.recipe.content
    total = sum(file.size for file in files)
    workers = workers or _default_workers(total, made)
    with _sequential_library(), TokenFileWriter(out, made.dtype) as writer:
        empty, replaced = _encode(writer, files, made, field, workers, progress)
        side_files[".json"] = _metadata(made, writer, trained=".tokenizer.json" in side_files)
        writer.finish(side_files)
    seconds = time.perf_counter() - begin
    return Summary(
        prefix=out, files=[out + suffix for suffix in (".bin", ".idx", *side_files)],
        tokenizer=made.recipe.spec, vocab_size=made.vocab_size, eod=made.eod, dtype=made.dtype.name,
        documents=writer.document_count, tokens=writer.token_count, empty=empty, replaced=replaced,
        input_files=len(files), input_bytes=total, workers=workers,
        seconds=seconds, mb_per_s=total / 1e6 / seconds,
    )  # fmt: skip


def _encode(
    writer: TokenFileWriter, files: list[ByteRange], tokenizer: Tokenizer, field: str, workers: int, progress: Progress
) -> tuple[int, int]:
    """Encodes everything into the writer; returns the numbers of empty documents and of those with bad bytes."""
    tasks = plan_tasks(files, tokenizer.cut)
    if workers > 1:
        results = map_in_order(make_encoder, (tokenizer.recipe, field), tasks, workers)
    else:
        results = (encode_task(tokenizer, field, task) for task in tasks)
    empty = replaced = 0
    with progress("encoding", sum(file.size for file in files)) as advance, contextlib.closing(results):
        for result in results:
            writer.add_documents(result.tokens, result.lengths, result.last_open)
            empty += result.empty
            replaced += result.replaced
            advance(result.size)
    if not writer.document_count:
        raise UserError("the input holds no text, every document is empty: check the files and --field")
    return empty, replaced


def _metadata(tokenizer: Tokenizer, writer: TokenFileWriter, trained: bool) -> bytes:
    """Returns the content of PREFIX.json: what a model and a sampler need to know about the tokens."""
    spec = tokenizer.recipe.spec
    found = {
        "format": METADATA_FORMAT, "version": 1,
        "tokenizer": spec, "tokenizer_file": spec if trained else None, "tokenizer_digest": tokenizer.recipe.digest,
        "vocab_size": tokenizer.vocab_size, "eod": tokenizer.eod, "dtype": tokenizer.dtype.name,
        "documents": writer.document_count, "tokens": writer.token_count,
    }  # fmt: skip
    return json.dumps(found, indent=1).encode() + b"\n"


def _train(files: list[ByteRange], size: int, field: str, spec: str, eod: str | None, progress: Progress) -> Tokenizer:
    """Trains a tokenizer on the input; of more than TRAINING_BYTES it reads tasks that are spread evenly over it."""
    from meshwright.data.words import CUT_BYTES

    total = sum(file.size for file in files)
    step = -(-total // TRAINING_BYTES) or 1

    def texts(advance: Callable[[int], None]) -> Iterator[str]:
        for number, task in enumerate(plan_tasks(files, CUT_BYTES)):
            if number % step == 0:
                for span in task:
                    for piece in read_documents(span, field):
                        yield piece.text
            advance(sum(span.size for span in task))

    with progress("training the tokenizer", total) as advance:
        return train_tokenizer(texts(advance), size, spec, eod)


def check_out(out: str, force: bool) -> None:
    """Refuses to overwrite anything unless asked to, and names that can't be meant."""
    if not os.path.basename(out):
        raise UserError(f"--out '{out}' is a folder: give a prefix in it, for example {os.path.join(out, 'train')}")
    bare, suffix = os.path.splitext(out)
    if suffix in (".bin", ".idx"):
        raise UserError(f"--out is a prefix, without .bin or .idx: give {bare}")
    if force:
        return
    if os.path.exists(out + ".idx"):
        raise UserError(f"{out}.idx exists: add --force to write it again, or choose another --out")
    for suffix in (".bin", *SIDE_FILES):
        if os.path.exists(out + suffix):
            raise UserError(
                f"{out}{suffix} exists without an index (from a run that did not finish, or another program): "
                "add --force to write over it, or choose another --out"
            )


def _default_workers(total: int, tokenizer: Tokenizer) -> int:
    """Returns one process per core, but no more than have enough to do (a tokenizer that can cut text is quick)."""
    enough = SLOW_BYTES if tokenizer.cut is None else QUICK_BYTES
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, total // enough))


@contextlib.contextmanager
def _sequential_library() -> Iterator[None]:
    """Keeps the tokenizers library from starting threads of its own: the workers are the parallelism."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
