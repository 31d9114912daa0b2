"""Write conversations to token files, for `meshwright data chat`.

PREFIX.bin/.idx holds one conversation per document, and PREFIX.mask.bin/.idx a mask that shows which of its tokens are
learned. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.data.chat_template import (
    ChatTemplate,
    MaskedTokens,
    TemplateError,
    folder_tokenizer,
    load_template,
    named_template,
)
from meshwright.data.conversations import Conversation, PreferencePair, Record, read_records
from meshwright.data.packed import CHAT, JUDGED, KINDS, MASK, PAIRS, TEXT, ChatKind, best_fit
from meshwright.data.prepare import check_out
from meshwright.data.token_writer import TokenFileWriter, metadata
from meshwright.data.tokenizers import Tokenizer
from meshwright.errors import UserError

SHOWN_SAMPLES = 5  # samples in the summary; one more for pairs, which need an even number


@dataclass
class ChatSummary:
    """A summary of the written conversations. Of `tokens`, `learned` have a loss; the longest has `longest` tokens."""

    prefix: str
    kind: str
    conversations: int
    tokens: int
    learned: int
    longest: int
    files: list[str] = field(default_factory=list)
    samples: list[MaskedTokens] = field(default_factory=list)

    @property
    def facts(self) -> ChatKind:
        return KINDS[self.kind]

    @property
    def share(self) -> float:
        return self.learned / max(1, self.tokens)


def prepare_chat(
    inputs: Sequence[str], out: str, model: str, template: str = "", force: bool = False,
    advance: Callable[[int], None] = lambda count: None, seq: int = 0,
) -> tuple[ChatSummary, Tokenizer, list[int]]:  # fmt: skip
    """Write the conversations of some files, and return a summary, the tokenizer and each conversation's length.

    `seq` is noted as the length of samples that a run takes by default.
    """
    for prefix in (out, out + MASK):
        check_out(prefix, force)
    folder = Path(model)
    rendered = load_template(folder) if not template else named_template(template, folder)
    tokenizer = folder_tokenizer(folder)
    if tokenizer is None:
        raise UserError(f"{folder} has no tokenizer.json or tokenizer.model: name a model's folder with --model")
    summary = ChatSummary(out, "", 0, 0, 0, 0)
    lengths = []
    with TokenFileWriter(out, tokenizer.dtype) as tokens, TokenFileWriter(out + MASK, np.uint8) as masks:
        for masked in _encode_conversations(inputs, rendered, tokenizer, summary):
            ids = np.asarray(masked.tokens, tokens.dtype)
            tokens.add_documents(ids.tobytes(), [len(ids)])
            masks.add_documents(bytes(masked.mask), [len(ids)])
            lengths.append(len(ids))
            summary.learned += sum(1 for value in masked.mask if value)
            if len(summary.samples) < SHOWN_SAMPLES + summary.facts.is_pairs:
                summary.samples.append(masked)
            advance(1)
        if not lengths:
            raise UserError(f"{', '.join(inputs)}: no conversation is there to learn from")
        summary.conversations, summary.tokens, summary.longest = len(lengths), sum(lengths), max(lengths)
        # The masks are finished first, so that a complete token file always has its masks.
        masks.finish()
        noted: dict[str, Any] = {"chat": summary.kind, "learned": summary.learned, "template": rendered.text}
        content = metadata(tokenizer, tokens, **noted | ({"seq": seq} if seq else {}))
        tokens.finish({".json": content})
    summary.files = [out + suffix for suffix in (".bin", ".idx", ".json", f"{MASK}.bin", f"{MASK}.idx")]
    return summary, tokenizer, lengths


def _encode_conversations(
    inputs: Sequence[str], template: ChatTemplate, tokenizer: Tokenizer, summary: ChatSummary
) -> Iterator[MaskedTokens]:
    """Yield the tokens and mask of every conversation. All must be of one kind, which is noted in the summary."""
    for path in inputs:
        for where, record in read_records(Path(path)):
            kind = _kind(record)
            if summary.kind not in (TEXT, kind):
                raise UserError(f"{where} is of another kind than the records before it: keep kinds in files apart")
            summary.kind = kind
            conversations = [record.chosen, record.rejected] if isinstance(record, PreferencePair) else [record]
            try:
                yield from (_mark_bad_answer(one, template.encode(one, tokenizer)) for one in conversations)
            except TemplateError as error:
                raise UserError(f"{where}: {error}") from None


def _kind(record: Record) -> str:
    if isinstance(record, PreferencePair):
        return PAIRS
    return CHAT if record.good is None else JUDGED


def _mark_bad_answer(conversation: Conversation, masked: MaskedTokens) -> MaskedTokens:
    """Return the tokens with a mask of 2 instead of 1 if the answer was judged bad."""
    return masked._replace(mask=[2 * value for value in masked.mask]) if conversation.good is False else masked


def measure_packing(lengths: Sequence[int], seq: int, unit: int) -> tuple[int, int, float]:
    """Return how many samples of `seq` tokens the conversations fill, how many are cut, and the share without padding.

    `unit` conversations (2 for pairs) share one sample.
    """
    most = seq // unit
    taken = [min(length, most + 1) - 1 for length in lengths]
    groups = [max(1, sum(taken[n : n + unit])) for n in range(0, len(taken), unit)]
    bins = len(best_fit(groups, seq))
    return bins, sum(length > most + 1 for length in lengths), sum(groups) / (bins * seq)
