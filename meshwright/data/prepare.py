"""Turn text into a token file with several processes, in the order of the input.

The main process plans tasks of about a megabyte and writes their results. Workers read, parse and encode. Results are
written in the order of the tasks, so the file does not depend on the number of workers.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np

from meshwright.data.documents import (
    ByteRange,
    Task,
    check_first_records,
    find_files,
    left_out,
    plan_tasks,
    read_documents,
)
from meshwright.data.selection import EVERYTHING, Duplicates, EncodedTask, Selection, digest_of
from meshwright.data.sentences import split_sentences
from meshwright.data.token_writer import SIDE_FILES, TokenFileWriter, metadata
from meshwright.data.tokenizers import Tokenizer, TokenizerSource, load_tokenizer, train_tokenizer, trained_size
from meshwright.data.workers import map_in_order
from meshwright.errors import UserError, notice

# The least input per process that is worth its start, for a tokenizer that encodes fast and for a slow one.
QUICK_BYTES, SLOW_BYTES = 16 << 20, 2 << 20
# Text that a new tokenizer is trained on, at most. More text changes few of its words, and takes a minute per 70 MB.
TRAINING_BYTES = 64 << 20

# progress(label, total) is a context manager. It yields a function to call with the number of bytes newly done.
Progress = Callable[[str, int], contextlib.AbstractContextManager[Callable[[int], None]]]


@contextlib.contextmanager
def no_progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    yield lambda count: None


@dataclass(frozen=True)
class Summary:
    """A summary of a prepared token file.

    `empty`, `filtered` (by length) and `duplicates` count the documents that were left out, and `replaced` those with
    bytes that are not UTF-8. A sequence is a document, or a sentence if sentences are stored.
    """

    prefix: str
    files: list[str]
    tokenizer: str
    vocab_size: int
    eod: int
    dtype: str
    documents: int
    sequences: int
    tokens: int
    empty: int
    filtered: int
    duplicates: int
    replaced: int
    left_out: dict[str, int]  # files of other kinds in the folders, by suffix
    input_files: int
    input_bytes: int
    workers: int
    seconds: float
    mb_per_s: float


def encode_task(tokenizer: Tokenizer, selection: Selection, task: Task) -> EncodedTask:
    """Read and encode a task. A document without text is left out, but not the empty last part of a long document."""
    documents = []  # whole ones, and parts of long ones
    replaced = empty = filtered = 0
    for span in task:
        for document in read_documents(span, selection.field):
            replaced += document.replaced
            if not document.text and not span.goes_on:
                empty += 1
            elif not selection.fits(document.text):
                filtered += 1
            else:
                documents.append(document)

    end = np.array([tokenizer.eod], dtype=tokenizer.dtype).tobytes()
    token_bytes, lengths, counts = [], [], []
    split = [split_sentences(document.text) if selection.sentences else [document.text] for document in documents]
    encoded = iter(tokenizer.encode_batch([text for texts in split for text in texts]))
    for document, texts in zip(documents, split, strict=True):
        sequences = list(islice(encoded, len(texts)))
        if selection.sentences:
            # Some tokenizers give no tokens for white space, which is then no sentence.
            sequences = [ids for ids in sequences if len(ids)] or sequences[:1]
        token_bytes += [ids.tobytes() for ids in sequences]
        lengths += [len(ids) for ids in sequences]
        counts.append(len(sequences))
        if document.last:
            token_bytes.append(end)
            lengths[-1] += 1

    last_open = bool(documents) and not documents[-1].last
    digests = [digest_of(document.text) for document in documents] if selection.dedup else []
    size = sum(span.stored_bytes for span in task)
    return EncodedTask(b"".join(token_bytes), lengths, counts, digests, last_open, size, empty, filtered, replaced)


def make_encoder(recipe: TokenizerSource, selection: Selection) -> Callable[[Task], EncodedTask]:
    """Return the function that encodes tasks. It is called in each worker process."""
    return partial(encode_task, recipe.make(), selection)


def prepare(
    inputs: Sequence[str],
    out: str,
    *,
    tokenizer: str = "bytes",
    workers: int | None = None,
    eod: str | None = None,
    selection: Selection = EVERYTHING,
    globs: Sequence[str] = (),
    force: bool = False,
    progress: Progress = no_progress,
) -> Summary:
    """Write OUT.bin, OUT.idx and OUT.json (with `train:SIZE` also OUT.tokenizer.json) from the inputs.

    With more than one worker, a script that calls this must guard its entry with `if __name__ == "__main__"`, like any
    script that starts processes.
    """
    if workers is not None and workers < 1:
        raise UserError(f"--workers {workers} does not work: give 1 or more")
    check_out(out, force)
    size = trained_size(tokenizer)
    made = None if size is not None else load_tokenizer(tokenizer, eod)
    files = find_files(inputs, globs)
    skipped = left_out(inputs, files)
    check_first_records(files, selection.field)
    begin = time.perf_counter()
    side_files: dict[str, bytes] = {}
    if made is None:
        assert size is not None
        made = _train(files, size, selection, f"{os.path.basename(out)}.tokenizer.json", eod, progress)
        side_files[".tokenizer.json"] = made.recipe.content
    total = sum(file.size for file in files)
    workers = workers or _default_workers(sum(file.likely_text for file in files), made)
    with _sequential_library(), TokenFileWriter(out, made.dtype) as writer:
        dropped, replaced = _encode(writer, files, made, selection, workers, progress)
        side_files[".json"] = metadata(made, writer, trained=".tokenizer.json" in side_files)
        writer.finish(side_files)
    seconds = time.perf_counter() - begin
    return Summary(
        prefix=out, files=[out + suffix for suffix in (".bin", ".idx", *side_files)],
        tokenizer=made.recipe.spec, vocab_size=made.vocab_size, eod=made.eod, dtype=made.dtype.name,
        documents=writer.document_count, sequences=writer.sequence_count, tokens=writer.token_count,
        empty=dropped["empty"], filtered=dropped["filtered"], duplicates=dropped["duplicates"], replaced=replaced,
        left_out=skipped, input_files=len(files), input_bytes=total, workers=workers,
        seconds=seconds, mb_per_s=total / 1e6 / seconds,
    )  # fmt: skip


def _encode(
    writer: TokenFileWriter, files: list[ByteRange], tokenizer: Tokenizer, selection: Selection, workers: int,
    progress: Progress,
) -> tuple[dict[str, int], int]:  # fmt: skip
    """Encode all files into the writer.

    Return how many documents were left out, by reason, and how many held bytes that are not UTF-8.
    """
    tasks = plan_tasks(files, None if selection.whole else tokenizer.cut, selection.field)
    if workers > 1:
        results = map_in_order(make_encoder, (tokenizer.recipe, selection), tasks, workers)
    else:
        results = (encode_task(tokenizer, selection, task) for task in tasks)
    empty = filtered = replaced = 0
    seen = Duplicates()
    with progress("encoding", sum(file.size for file in files)) as advance, contextlib.closing(results):
        for result in results:
            if selection.dedup:
                tokens, lengths, counts = seen.without(result, writer.dtype.itemsize)
                writer.add_documents(tokens, lengths, counts=counts)
            else:
                sentence_counts = result.counts if selection.sentences else None
                writer.add_documents(result.tokens, result.lengths, result.last_open, sentence_counts)
            empty += result.empty
            filtered += result.filtered
            replaced += result.replaced
            advance(result.size)
    if not writer.document_count:
        if filtered:
            raise UserError(
                f"no document is left, {filtered:,} are too short or too long: change --min-chars or --max-chars"
            )
        raise UserError("the input holds no text, every document is empty: check the files and --field")
    return {"empty": empty, "filtered": filtered, "duplicates": seen.count}, replaced


def _train(
    files: list[ByteRange], size: int, selection: Selection, spec: str, eod: str | None, progress: Progress
) -> Tokenizer:
    """Train a tokenizer on the input. If that has more than TRAINING_BYTES, use tasks spread evenly over it."""
    from meshwright.data.words import CUT_BYTES

    total = sum(file.likely_text for file in files)
    step = -(-total // TRAINING_BYTES) or 1
    if step > 1:
        part = f"{total / step / 1e6:,.0f} MB, spread over all {total / 1e6:,.0f} MB of text"
        notice(f"the tokenizer is trained on a sample: {part}")

    def texts(advance: Callable[[int], None]) -> Iterator[str]:
        for number, task in enumerate(plan_tasks(files, None if selection.whole else CUT_BYTES, selection.field)):
            if number % step == 0:
                for span in task:
                    for document in read_documents(span, selection.field):
                        if selection.fits(document.text):
                            yield document.text
            advance(sum(span.stored_bytes for span in task))

    with progress("training the tokenizer", sum(file.size for file in files)) as advance:
        return train_tokenizer(texts(advance), size, spec, eod)


def check_out(out: str, force: bool, option: str = "--out") -> None:
    """Raise a UserError if `out` is not a usable prefix or, without `force`, if its files exist."""
    if not os.path.basename(out):
        raise UserError(f"{option} '{out}' is a folder: give a prefix in it, for example {os.path.join(out, 'train')}")
    bare, suffix = os.path.splitext(out)
    if suffix in (".bin", ".idx"):
        raise UserError(f"{option} is a prefix, without .bin or .idx: give {bare}")
    if force:
        return
    if os.path.exists(out + ".idx"):
        raise UserError(f"{out}.idx exists: add --force to write it again, or choose another {option}")
    for suffix in (".bin", *SIDE_FILES):
        if os.path.exists(out + suffix):
            raise UserError(
                f"{out}{suffix} exists without an index (from a run that did not finish, or another program): "
                f"add --force to write over it, or choose another {option}"
            )


def _default_workers(total: int, tokenizer: Tokenizer) -> int:
    """Return one process per core, but no more than have enough input to be worth their start."""
    # A tokenizer that can cut text is fast: it works on bytes or through the word cache.
    enough = SLOW_BYTES if tokenizer.cut is None else QUICK_BYTES
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, total // enough))


@contextlib.contextmanager
def _sequential_library() -> Iterator[None]:
    """Keep the tokenizers library from starting its own threads, since the workers already use all cores."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
