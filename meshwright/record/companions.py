"""Companion files that travel with a model's weights: tokenizer, chat template, generation settings and config.json.

The config.json is that of the folder that the model was imported from. A run collects these files when it begins, from
the checkpoint that provided its weights or from its data. Each of its checkpoints holds a copy, as an imported
checkpoint does, so that any checkpoint can read and write text. No torch.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

from meshwright.config.data import DataConfig
from meshwright.data.chat_template import folder_tokenizer
from meshwright.data.token_file import Metadata, read_metadata
from meshwright.data.tokenizers import Tokenizer, TokenizerSource, load_tokenizer
from meshwright.errors import UserError, shorten
from meshwright.outside import of_kind, read_json
from meshwright.record import checkpoint_format as fmt

FOLDER = "companions"  # in a run's folder
NOTE = "companions.json"  # names the tokenizer and the source of the weights
ORIGIN = "hf_origin.json"  # config.json of an imported model, and how its folder stored the tensors
TOKENIZERS = ("tokenizer.json", "tokenizer.model")
EXTRA_FILES = (
    *TOKENIZERS, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip


def copy_files(source: Path, to: Path, names: Sequence[str] = EXTRA_FILES) -> list[str]:
    """Copy those of the named files that exist, and return their names."""
    present = [name for name in names if (source / name).is_file()]
    for name in present:
        shutil.copyfile(source / name, to / name)
    return present


def copy_all(source: Path, to: Path) -> None:
    copy_files(source, to, (*EXTRA_FILES, ORIGIN, NOTE))


class Note(TypedDict, total=False):
    """A note of a model's tokenizer. The file also says where the weights came from."""

    tokenizer: str | None  # its file, or "bytes"
    digest: str | None
    eod: int | None  # id of its end token


def read_note(folder: Path) -> dict[str, Any]:
    try:
        return dict(of_kind(read_json(folder / NOTE), Note, "it"))
    except (OSError, ValueError):
        return {}


def _of_data(prefixes: Sequence[str]) -> tuple[Path, Metadata] | None:
    """Return the prefix and the metadata of the first token file that has metadata, or None if none has."""
    for prefix in prefixes:
        metadata = read_metadata(prefix)
        if metadata:
            return Path(prefix), metadata
    return None


def _file_of(prefix: Path, metadata: Metadata) -> Path | None:
    """Return the tokenizer's file if it still exists. That of a trained tokenizer is in the folder of the tokens."""
    names = [metadata.get("tokenizer_file"), metadata.get("tokenizer")]
    candidates = [path for name in names if name for path in (prefix.parent / name, Path(name))]
    return next((path for path in candidates if path.is_file()), None)


def copy_tokenizer(prefixes: Sequence[str], to: Path) -> list[str]:
    """Copy the tokenizer of a run's data, if its file still exists, and return the names of the copies."""
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
    except Exception as error:  # the library raises plain Exception
        reason = shorten(str(error), 200)
        raise UserError(f"{file}, the tokenizer of the data, can't be read ({reason}): replace it") from None
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": end, "eos_token": end}
    fmt.write_whole(to / "tokenizer_config.json", (json.dumps(settings, indent=2) + "\n").encode())
    return ["tokenizer.json", "tokenizer_config.json"]


def collect(data: DataConfig, source: Path | None, to: Path, began_from: str | None, base: str = "") -> None:
    """Collect the companion files of a run's model in `to`, from the folder of its weights or from its data.

    Files that the run collected before stay, unless its data now have another tokenizer. `began_from` names the source
    of the run's weights. `base` is the digest of the weights that adapters belong to.
    """
    found = _of_data(data.prefixes)
    digest = found[1].get("tokenizer_digest") if found else None
    fits = digest is None or digest in (known_digests(to) or {digest})
    if to.is_dir() and fits:
        return

    note: dict[str, Any] = {"tokenizer": None, "digest": digest, "eod": None}
    note["from"] = read_note(to).get("from", began_from)
    note |= {"base": base} if base else {}
    source = to if source is None and to.is_dir() else source

    # The new files are collected in another folder, which replaces `to` when it is complete.
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
        # Without a copy of its file, only the tokenizer "bytes" can be loaded later.
        kind = "bytes" if found[1].get("tokenizer") == "bytes" else None
        note |= {"tokenizer": copied[0] if copied else kind, "eod": found[1].get("eod")}
    fmt.write_json(aside / NOTE, note)
    shutil.rmtree(to, ignore_errors=True)
    aside.rename(to)


def known_digests(folder: Path) -> set[str]:
    """Return the digests of the tokenizer in a model's folder, which may have one in each of two forms.

    The set is empty if no tokenizer is known.
    """
    noted = read_note(folder).get("digest")
    digests = {str(noted)} if noted else set()
    for name in TOKENIZERS:
        if not noted and (folder / name).is_file():
            content = (folder / name).read_bytes()
            kind = name.rpartition(".")[2]
            try:
                digests.add(TokenizerSource(kind, content, None, name).digest)
            except ValueError:
                continue  # a damaged file is reported by the code that loads the tokenizer
    return digests


def verify(folder: Path) -> None:
    """Raise a UserError if the tokenizer's file in a checkpoint is no longer the one that its note names."""
    noted = read_note(folder).get("digest")
    contents = {name: (folder / name).read_bytes() for name in TOKENIZERS if (folder / name).is_file()}

    def digest_of(name: str, content: bytes) -> str:
        try:
            return TokenizerSource(name.rpartition(".")[2], content, None, name).digest
        except ValueError:
            return ""

    if noted and contents and str(noted) not in {digest_of(*each) for each in contents.items()}:
        raise UserError(
            f"{folder / min(contents)} was changed after the checkpoint was written: copy it from another checkpoint "
            "of the run, or from the model's folder"
        )


def check_tokenizer(folder: Path, data: DataConfig) -> None:
    """Raise a UserError if data were made with another tokenizer than the model's, since their ids mean other texts."""
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
    """Raise a UserError if the tokenizer named with --tokenizer is not the model's.

    If the model's tokenizer is not known, raise if the named one has more tokens than the model.
    """
    found = _of_data(data.prefixes)
    data_digest = found[1].get("tokenizer_digest") if found else None
    theirs = known_digests(folder) or ({data_digest} if data_digest else set())
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
    """Return the tokenizer in a checkpoint's folder, or else that of its run's data; None if neither is known."""
    note = read_note(folder)
    end = None if note.get("eod") is None else str(note["eod"])
    if tokenizer := folder_tokenizer(folder, end):
        return tokenizer
    if note.get("tokenizer") == "bytes":
        return load_tokenizer("bytes")
    return tokenizer_of_data(prefixes)


def tokenizer_of_data(prefixes: Sequence[str]) -> Tokenizer | None:
    """Return the tokenizer that token files were made with; None if it is not noted or its file no longer exists."""
    found = _of_data(prefixes)
    if found is None:
        return None
    if found[1].get("tokenizer") == "bytes":
        return load_tokenizer("bytes")
    file = _file_of(*found)
    return load_tokenizer(str(file), str(found[1].get("eod", 0))) if file else None


def end_token(folder: Path, prefixes: Sequence[str]) -> int | None:
    """Return the id of the end token, from the folder's note or else from the metadata of the data."""
    found = _of_data(prefixes)
    token: int | None = read_note(folder).get("eod")
    if token is None and found:
        token = found[1].get("eod")
    return token
