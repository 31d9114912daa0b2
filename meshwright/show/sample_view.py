"""Show a sample as text, in which masked tokens, learned tokens and padding are marked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from meshwright.errors import plural
from meshwright.show.terminal import printable

if TYPE_CHECKING:
    from rich.text import Text

Spelling = Callable[[int], str]
# Styles of [MASK] tokens, of tokens that were changed, of tokens to predict that were kept, of tokens that are not
# learned, and of the second segment.
LEARNED, CHANGED, KEPT, ASIDE, SECOND = "bold red", "bold magenta", "bold yellow", "dim", "cyan"
# Styles and, for output without colours, brackets of conversation tokens: not learned, learned, and learned as bad.
CONVERSATION_STYLES = (ASIDE, "green", "red")
MARKS = (("", ""), ("«", "»"), ("‹", "›"))
MARKS_LEGEND = "(learned tokens stand in «», those of a bad answer in ‹›)"


def sample_text(sample: Mapping[str, Any], spelling: Spelling, special: Mapping[int, str]) -> Text:
    """Draw a sample of any kind. `special` maps the ids of special tokens to their names.

    For a token to predict, the label follows the token that the model sees: {[MASK]=word} if it is masked, {other=word}
    if it was changed, {word} if it was kept. A span-corruption sample is drawn as its input and then its target.
    """
    from rich.text import Text

    if "labels" in sample and is_blanks(sample):
        return _blank_text(sample, spelling, special)
    if "decoder_tokens" in sample:
        return _span_text(sample, spelling, special)
    masked = "places" in sample
    tokens = sample["tokens"].tolist()
    count = int((sample["segments"] == 0).sum()) if masked else len(tokens)
    learned = _labels(sample) if masked else {}
    text = Text()

    def spelled(token: int) -> str:
        return special.get(token) or printable(spelling(token).replace("\n", "\\n").replace("\t", "\\t"))

    for at, token in enumerate(tokens[:count]):
        if at in learned:
            style = _style(token, learned[at], special)
            seen = spelled(token)
            text.append(f"{{{seen}}}" if style == KEPT else f"{{{seen}={spelled(learned[at])}}}", style)
        elif token in special:
            text.append(f"{special[token]} ", ASIDE)
        elif masked:
            text.append(spelled(token), SECOND if sample["token_types"][at] else "")
        else:
            text.append(spelled(token), "" if sample["loss_mask"][at] else ASIDE)
    if count < len(tokens):
        text.append(f" + {len(tokens) - count} of padding", ASIDE)
    return text


def is_blanks(sample: Mapping[str, Any]) -> bool:
    """Return True for a blank-filling sample: a source, and then the spans that fill its blanks."""
    return "positions" in sample and "segments" in sample and not sample["loss_mask"][0]


def _blank_text(sample: Mapping[str, Any], spelling: Spelling, special: Mapping[int, str]) -> Text:
    """Draw the source of a blank-filling sample and, on separate lines, the spans that fill the blanks."""
    from rich.text import Text

    text = Text()
    segments, positions = sample["segments"].tolist(), sample["positions"].tolist()
    for token, segment, place in zip(sample["tokens"].tolist(), segments, positions, strict=True):
        if segment > 1:
            break
        name = special.get(token)
        begins = segment == 1 and name is not None
        text.append(f"\n{place}: {name} " if begins else name or "", ASIDE if begins else LEARNED)
        if name is None:
            shown = printable(spelling(token).replace("\n", "\\n").replace("\t", "\\t"))
            text.append(shown, CHANGED if segment else "")
    if left := segments.count(2):
        text.append(f" + {left} of padding", ASIDE)
    return text


def _span_text(sample: Mapping[str, Any], spelling: Spelling, special: Mapping[int, str]) -> Text:
    """Draw the input of a span-corruption sample and, on a separate line, the target."""
    from rich.text import Text

    target = sample["labels"][sample["loss_mask"] > 0]
    text = Text()
    for tokens, style, learned in ((sample["tokens"], "", LEARNED), (target, CHANGED, LEARNED)):
        text.append("\ntarget: " if style else "", ASIDE)
        for token in tokens.tolist():
            name = special.get(token)
            shown = printable(spelling(token).replace("\n", "\\n").replace("\t", "\\t")) if name is None else name
            token_style = style
            if name is not None:
                token_style = learned if name.startswith("<") else ASIDE
            text.append(shown, token_style)
    left = len(sample["labels"]) - len(target)
    text.append(f" + {left} of padding" if left else "", ASIDE)
    return text


def conversations_of(sample: Mapping[str, Any], pairs: bool) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the tokens and the mask of each conversation in a packed sample. Masks hold 0 for tokens that are not
    learned, 1 for learned ones and 2 for those of the second, bad answer of a pair."""
    segments = sample["segments"]
    for number in range(int(segments[-1]) + 1):
        inside = segments == number
        tokens, labels, mask = (sample[key][inside] for key in ("tokens", "labels", "loss_mask"))
        # Padding, which is the last segment, repeats one token, so its labels equal its tokens.
        if bool((labels == tokens).all()) and not mask.any():
            continue
        weight = 2 if pairs and number % 2 else 1
        yield [*tokens.tolist(), int(labels[-1])], [0, *(weight * mask).tolist()]


def conversation_text(number: int, tokens: list[int], mask: list[int], tokenizer: Any, colour: bool) -> Text:
    """Return a conversation with its learned tokens in colour, or in brackets where there are no colours."""
    from rich.text import Text

    text, begin = Text(f"{number}: ", style="bold"), 0
    pieces = tokenizer.pieces()
    for at in range(1, len(tokens) + 1):
        if at == len(tokens) or mask[at] != mask[begin]:
            before, after = ("", "") if colour else MARKS[mask[begin]]
            words = printable(_spell(tokens[begin:at], tokenizer, pieces).replace("\n", "\\n"))
            text.append(f"{before}{words}{after}", CONVERSATION_STYLES[mask[begin]])
            begin = at
    return text


def _spell(ids: list[int], tokenizer: Any, pieces: list[str]) -> str:
    """Return the text of tokens, in which special tokens have their names."""
    text = ""
    plain: list[int] = []
    for token in ids:
        # `decode` leaves special tokens out.
        if not tokenizer.decode([token]) and pieces[token]:
            text += (tokenizer.decode(plain) if plain else "") + pieces[token]
            plain = []
        else:
            plain.append(token)
    return text + (tokenizer.decode(plain) if plain else "")


def conversations_summary(sample: Mapping[str, Any], conversations: int) -> str:
    """Return one line that says how many conversations a packed sample holds and how many tokens are learned."""
    learned = int(sample["loss_mask"].sum())
    return f"{plural(conversations, 'conversation')} in {len(sample['tokens'])} tokens, {learned} of them learned"


def _labels(sample: Mapping[str, Any]) -> dict[int, int]:
    """Return the positions of the tokens to predict, with their labels."""
    counted = sample["loss_mask"] > 0
    return dict(zip(sample["places"][counted].tolist(), sample["labels"][counted].tolist(), strict=True))


def _style(token: int, label: int, special: Mapping[int, str]) -> str:
    """Return the style of a token to predict: it is masked, kept or changed."""
    if token in special:
        return LEARNED
    return KEPT if token == label else CHANGED


def sample_summary(sample: Mapping[str, Any], special: Mapping[int, str]) -> str:
    """Return one line about the size of a sample and the part of it that is learned."""
    tokens = sample["tokens"]
    if is_blanks(sample):
        source, spans = (int((sample["segments"] == n).sum()) for n in (0, 1))
        blanks = sum(special.get(token, "").endswith("MASK]") for token in tokens[:source].tolist())
        return f"{source + spans} tokens of {len(tokens)}, a source of {source} with {plural(blanks, 'blank')}"
    if "decoder_tokens" in sample:
        spans = sum(special.get(token, "").startswith("<") for token in tokens.tolist())
        target = int(sample["loss_mask"].sum())
        return f"{len(tokens)} tokens with {plural(spans, 'span')} taken out, {target} of the target to predict"
    if "places" not in sample:
        documents = int(sample["segments"][-1]) + 1 if "segments" in sample else 0
        known = f", {plural(documents, 'document')} apart" if documents else ""
        return f"{plural(len(tokens), 'token')}, of which {int(sample['loss_mask'].sum())} have a loss{known}"
    learned = _labels(sample)
    kinds = [_style(int(tokens[at]), label, special) for at, label in learned.items()]
    words = {LEARNED: "masked", CHANGED: "changed", KEPT: "kept"}
    parts = [f"{kinds.count(style)} {word}" for style, word in words.items()]
    order = ""
    if "swapped" in sample:
        order = ", its two segments swapped" if sample["swapped"] else ", its two segments in order"
    count = int((sample["segments"] == 0).sum())
    return f"{count} tokens of {len(tokens)}, {len(learned)} to predict ({', '.join(parts)}){order}"
