"""What the twins of recipes need before they train: tokens, conversations, and weights to adapt."""

from __future__ import annotations

from pathlib import Path

from meshwright.config.sections import Config
from meshwright.config.twin import TWIN_BASES, TWIN_DATA, TWIN_TALKS


def prepare_tiny(config: Config) -> None:
    """Makes what a twin uses and is not there: files of Python's own standard library, and an untrained base."""
    if TWIN_DATA in config.data.prefixes and not Path(f"{TWIN_DATA}.idx").is_file():
        from meshwright.data.prepare import prepare

        prepare(["stdlib"], TWIN_DATA, force=True)
    if TWIN_TALKS in config.data.prefixes and not Path(f"{TWIN_TALKS}.idx").is_file():
        from meshwright.data.talks import write_talks

        write_talks(TWIN_TALKS)
    base = Path(config.tune.base)
    if config.tune.base.startswith(TWIN_BASES) and not base.is_dir():
        from meshwright.interop.first_weights import write_first_weights

        write_first_weights(config.model, base, config.train.seed)
