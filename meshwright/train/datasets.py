"""The token datasets of a config, and what can be known of them before any rank starts. No torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshwright.config.sections import Config
from meshwright.data.stream import SampleOptions, build_datasets
from meshwright.errors import UserError


class Checked:
    """A dataset whose ids are checked: one outside of the vocabulary would be looked up as nothing, silently."""

    def __init__(self, dataset: Any, vocab: int) -> None:
        self.dataset, self.vocab = dataset, vocab

    def sample(self, n: int) -> dict[str, np.ndarray[Any, Any]]:
        sample: dict[str, np.ndarray[Any, Any]] = self.dataset.sample(n)
        ids = (sample["tokens"], sample["labels"])
        least, top = min(int(x.min()) for x in ids), max(int(x.max()) for x in ids)
        if top >= self.vocab:
            raise UserError(
                f"the data hold token {top}, beyond model.vocab={self.vocab}: prepare them with the model's tokenizer, "
                f"or begin a run with model.vocab={top + 1} or more"
            )
        if least < 0:
            raise UserError(f"the data hold token {least}, and no token has a negative id: prepare them again")
        return sample

    def source_of(self, n: int) -> str:
        return str(self.dataset.source_of(n))


def datasets_of(config: Config) -> tuple[Any, Any, Any]:
    """Train, valid and test (None where the split leaves none); raises for every mistake that the files show."""
    d = config.data
    options = SampleOptions(d.eod if d.eod >= 0 else None, d.mask_eod, d.reset_positions, d.reset_attention)
    how = (config.model.seq, config.train.seed, options, d.draw_split)
    parts = build_datasets(d.prefixes, d.weights or None, d.split, *how)
    assert parts[0] is not None
    needed = parts[0].vocab_needed
    if needed is not None and needed > config.model.vocab:
        raise UserError(
            f"model.vocab={config.model.vocab} is too small for the data, whose tokenizer has {needed} tokens: "
            f"set model.vocab={needed} or more"
        )
    return tuple(part if part is None else Checked(part, config.model.vocab) for part in parts)  # type: ignore[return-value]
