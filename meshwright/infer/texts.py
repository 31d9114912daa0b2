"""Turn prompts into tokens for a model, and find its tokenizer and the tokens that end a text. No torch."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from meshwright.config.sections import Config
from meshwright.data.tokenizers import load_tokenizer
from meshwright.errors import UserError
from meshwright.outside import read_json
from meshwright.record.companions import check_named, read_note, tokenizer_beside

# Below this temperature, sampling always takes the likeliest token.
MIN_TEMPERATURE = 1e-4


def check_drawing(temperature: float, top_p: float, seed: int, mark: str = "--") -> None:
    """Refuse values that tokens can't be drawn with. `mark` stands before the options' names in the errors."""
    if not (temperature == 0 or MIN_TEMPERATURE <= temperature < float("inf")) or not 0 < top_p <= 1:
        top = f"{mark}top{'-' if mark else '_'}p"
        raise UserError(f"{mark}temperature must be 0 or at least {MIN_TEMPERATURE}, and {top} above 0 and at most 1")
    if not 0 <= seed < 2**63:
        raise UserError(f"{mark}seed {seed} must lie between 0 and 2^63 - 1")


def tokenizer_for(source: Path, config: Config, named: str | None = None) -> Any:
    """Return the named tokenizer, else the one beside the checkpoint, else that of the run's data, else None."""
    if named:
        tokenizer = load_tokenizer(named)
        check_named(tokenizer, source, config.data, config.model.vocab)
        return tokenizer
    return tokenizer_beside(source, config.data.prefixes)


def end_tokens(path: Path, tokenizer: Any) -> set[int]:
    """Return the tokens that end a text: those that the files of the model name, else the tokenizer's end token."""
    from meshwright.interop.hf import origin_of

    origin = origin_of(path)
    # In the order in which they count: generation_config.json, the end token of the training data if they have their
    # own tokenizer, and the config of the Hugging Face model that was imported.
    sources: list[Any] = [{"eos_token_id": read_note(path).get("eod")}]
    sources += [] if origin is None else [origin.config]
    # The file is optional.
    with contextlib.suppress(OSError, ValueError):
        sources.insert(0, read_json(path / "generation_config.json"))
    for source in sources:
        named = source.get("eos_token_id") if isinstance(source, dict) else None
        ends = {end for end in (named if isinstance(named, list) else [named]) if type(end) is int}
        if ends:
            return ends
    return set() if tokenizer is None else {tokenizer.eod}


def text_ids(source: Path, config: Config, tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a prompt, checked against the model's vocabulary."""
    from meshwright.interop.hf import origin_of

    # An imported model expects the special tokens that its tokenizer adds to a text, such as a begin token.
    encode = tokenizer.encode if origin_of(source) is None else tokenizer.encode_with_special_tokens
    ids = list(encode(text)) or [tokenizer.eod]
    # A model split over tp ranks would silently look up such a token as a row of zeros.
    if max(ids) >= config.model.vocab:
        beyond = f"beyond the model's {config.model.vocab}: the tokenizer is another model's"
        raise UserError(f"the prompt has token {max(ids)}, {beyond}")
    return ids
