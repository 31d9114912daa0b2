"""What travels with a model's weights: its tokenizer, chat template and generation settings, and the config.json of the
folder that it was imported from. No torch.

A run collects these files when it begins, from the checkpoint that gave it its weights or from its data, and every one
of its checkpoints holds a copy, as an imported checkpoint does: so text goes in and out wherever the weights are.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

from meshwright.config.data import DataConfig
from meshwright.data.token_file import Metadata, read_metadata
from meshwright.data.tokenizers import Recipe, Tokenizer, load_tokenizer
from meshwright.errors import UserError, shortened
from meshwright.outside import of_kind, read_json
from meshwright.record import checkpoint_format as fmt

FOLDER = "companions"  # in a run's folder
NOTE = "companions.json"  # which tokenizer that is, and where the weights came from
ORIGIN = "hf_origin.json"  # config.json of an imported model, and how its folder stored the tensors
TOKENIZERS = ("tokenizer.json", "tokenizer.model")
EXTRA_FILES = (
    *TOKENIZERS, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip


def copy_files(source: Path, to: Path, names: Sequence[str] = EXTRA_FILES) -> list[str]:
    """Copies those of the files that are there, and returns their names."""
    found = [name for name in names if (source / name).is_file()]
    for name in found:
        shutil.copyfile(source / name, to / name)
    return found


def copy_all(source: Path, to: Path) -> None:
    copy_files(source, to, (*EXTRA_FILES, ORIGIN, NOTE))


class Note(TypedDict, total=False):
    """Which tokenizer a model has: its file or kind, its digest and end token; and where the weights came from."""

    tokenizer: str | None
    digest: str | None
    eod: int | None


def read_note(folder: Path) -> dict[str, Any]:
    try:
        return dict(of_kind(read_json(folder / NOTE), Note, "it"))
    except (OSError, ValueError):
        return {}


def _of_data(prefixes: Sequence[str]) -> tuple[Path, Metadata] | None:
    """The prefix and the metadata of the first of a run's token files that has metadata."""
    for prefix in prefixes:
        found = read_metadata(prefix)
        if found:
            return Path(prefix), found
    return None


def _file_of(prefix: Path, metadata: Metadata) -> Path | None:
    """The tokenizer's file, if it still exists: one that was trained lies beside the tokens."""
    words = [metadata.get("tokenizer_file"), metadata.get("tokenizer")]
    places = [place for word in words if word for place in (prefix.parent / word, Path(word))]
    return next((place for place in places if place.is_file()), None)


def copy_tokenizer(prefixes: Sequence[str], to: Path) -> list[str]:
    """Copies the tokenizer of a run's data, if its file still exists, and returns the names of the copies."""
    found = _of_data(prefixes)
    file = _file_of(*found) if found else None
    if found is None or file is None:
        return []
    if file.suffix == ".model":
        shutil.copyfile(file, to / "tokenizer.model")
        return ["tokenizer.model"]
    shutil.copyfile(file, to / "tokenizer.json")
    from tokenizers import Tokenizer as Library

    try:
        end = Library.from_file(str(file)).id_to_token(found[1].get("eod", 0))
    except Exception as error:  # the library raises nothing narrower
        said = shortened(str(error), 200)
        raise UserError(f"{file}, the tokenizer of the data, can't be read ({said}): replace it") from None
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": end, "eos_token": end}
    fmt.write_whole(to / "tokenizer_config.json", (json.dumps(settings, indent=2) + "\n").encode())
    return ["tokenizer.json", "tokenizer_config.json"]


def collect(data: DataConfig, source: Path | None, to: Path, began_from: str | None, base: str = "") -> None:
    """Gathers what travels with a run's model in `to`: from the folder that its weights come from, or from its data.
    What a run has gathered before stays, unless its data are now of another tokenizer. `base` is the digest of the
    weights that adapters belong to."""
    found = _of_data(data.prefixes)
    digest = found[1].get("tokenizer_digest") if found else None
    fits = digest is None or digest in (known_digests(to) or {digest})
    if to.is_dir() and fits:
        return
    note: dict[str, Any] = {"tokenizer": None, "digest": digest, "eod": None}
    note["from"] = read_note(to).get("from", began_from)
    note |= {"base": base} if base else {}
    source = to if source is None and to.is_dir() else source
    aside = to.with_name(f".new-{to.name}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    if source is not None:
        if not copy_files(source, aside, (ORIGIN,)) and (source / "config.json").is_file():
            fmt.write_json(aside / ORIGIN, {"config": read_json(source / "config.json"), "tensors": {}})
        theirs = known_digests(source)
        if theirs and (digest is None or digest in theirs):
            copy_files(source, aside)
            note |= {key: value for key, value in read_note(source).items() if key in ("tokenizer", "eod", "digest")}
    if found and not any((aside / name).is_file() for name in TOKENIZERS):
        copied = copy_tokenizer(data.prefixes, aside)
        word = found[1].get("tokenizer")
        note |= {"tokenizer": copied[0] if copied else word if word == "bytes" else None, "eod": found[1].get("eod")}
    fmt.write_json(aside / NOTE, note)
    shutil.rmtree(to, ignore_errors=True)
    aside.rename(to)


def known_digests(folder: Path) -> set[str]:
    """Of the tokenizers beside a model, which may be one in two forms; none where no tokenizer is known."""
    told = read_note(folder).get("digest")
    found = {str(told)} if told else set()
    for name in TOKENIZERS:
        if not told and (folder / name).is_file():
            content, kind = (folder / name).read_bytes(), name.rpartition(".")[2]
            try:
                found.add(Recipe(kind, content, None, name).digest)
            except ValueError:
                continue  # a damaged file says nothing; whoever needs it will tell
    return found


def check_tokenizer(folder: Path, data: DataConfig) -> None:
    """Refuses data that were made with another tokenizer than the model's: its ids mean other texts."""
    theirs = known_digests(folder)
    for prefix in data.prefixes if theirs and not data.any_tokenizer else ():
        digest = (read_metadata(prefix) or Metadata()).get("tokenizer_digest")
        if digest and digest not in theirs:
            names = [str(folder / name) for name in TOKENIZERS if (folder / name).is_file()]
            with_it = names[0] if names else "the model's own"
            raise UserError(
                f"{prefix} was made with another tokenizer than the model in {folder}, so its tokens mean other texts: "
                f"prepare it with --tokenizer {with_it}, or set data.any_tokenizer=true if that is meant"
            )


def check_named(tokenizer: Tokenizer, folder: Path, data: DataConfig, vocab: int) -> None:
    """Refuses a tokenizer that was named to write text with and is not the model's; where the model's is not known,
    one with more tokens than the model has."""
    found = _of_data(data.prefixes)
    told = found[1].get("tokenizer_digest") if found else None
    theirs = known_digests(folder) or ({told} if told else set())
    named = f"--tokenizer {tokenizer.recipe.spec}"
    if theirs and not data.any_tokenizer and tokenizer.recipe.digest not in theirs:
        raise UserError(
            f"{named} is another tokenizer than that of the model in {folder}, so its tokens mean other texts: leave "
            "it out, which takes the model's own, or name that"
        )
    if not theirs and tokenizer.vocab_size > vocab:
        raise UserError(
            f"{named} has {tokenizer.vocab_size:,} tokens and the model in {folder} has {vocab:,}: name the model's own"
        )


def tokenizer_beside(folder: Path, prefixes: Sequence[str]) -> Tokenizer | None:
    """The tokenizer beside a checkpoint, or else that of its run's data; None if neither is known."""
    note = read_note(folder)
    end = None if note.get("eod") is None else str(note["eod"])
    for name in TOKENIZERS:
        if (folder / name).is_file():
            return load_tokenizer(str(folder / name), end)
    if note.get("tokenizer") == "bytes":
        return load_tokenizer("bytes")
    return tokenizer_of_data(prefixes)


def tokenizer_of_data(prefixes: Sequence[str]) -> Tokenizer | None:
    """The tokenizer that token files were made with; None if they don't say, or its file is gone."""
    found = _of_data(prefixes)
    if found is None:
        return None
    if found[1].get("tokenizer") == "bytes":
        return load_tokenizer("bytes")
    file = _file_of(*found)
    return load_tokenizer(str(file), str(found[1].get("eod", 0))) if file else None


def end_token(folder: Path, prefixes: Sequence[str]) -> int | None:
    """The id that ends a text, as the data have it."""
    found = _of_data(prefixes)
    told = read_note(folder).get("eod")
    told = found[1].get("eod") if told is None and found else told
    return told
