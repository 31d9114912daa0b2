"""The counts of a run in words: steps of this start and in total, tokens, learned tokens and pairs."""

from __future__ import annotations

import io
import re
from pathlib import Path

from tests.show.test_run import config, play, result, summarised, write_run


def test_the_end_of_a_resumed_run_says_what_was_trained_now() -> None:
    steps = [result(n) for n in range(13, 21)]
    assert "finished 8 steps in 0:00 (20 in all): runs/test" in play(io.StringIO(), config(), steps)
    assert "stopped at step 15 of 20, 3 steps in 0:00, saved in runs/test" in play(io.StringIO(), config(), steps[:3])


def test_what_the_loss_counts_stands_beside_the_tokens(tmp_path: Path) -> None:
    """Tokens are those that went through the model. A chat learns fewer of them, and pairs are no tokens."""
    chat = [result(n, counted=64) for n in range(1, 6)]
    assert re.search(r"256 tok/s  25 % learned", play(io.StringIO(), config(), chat))
    text = summarised(write_run(tmp_path / "a", config(), chat))
    assert re.search(r"^seen +1\.28k tokens \([\d.]+ per parameter\)   320 learned   40 samples", text, re.MULTILINE)
    likelier = {"chosen answers likelier (share of pairs)": 0.75}
    pairs = [result(n, counted=16, counted_as="pairs", monitored=likelier) for n in range(1, 6)]
    text = play(io.StringIO(), config(), pairs)
    assert "256 tok/s  eta" in text and "12 of 16 chosen answers likelier" in text and "learned" not in text
    assert "   80 pairs   40 samples" in summarised(write_run(tmp_path / "b", config(), pairs))
