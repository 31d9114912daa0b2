"""Chat templates render messages as the text that a model was trained on, and show which of its tokens are learned.

A template is a Jinja program that comes with a model, so it runs in Jinja's sandbox. Most templates don't mark the
assistant's text. A conversation is therefore rendered turn by turn: the learned text is the text that an answer adds
to everything before it, which includes the generation prompt. This is right only if adding a turn leaves the earlier
text unchanged; a template that changes it is refused. No torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.data.conversations import Conversation, Message
from meshwright.data.tokenizers import Tokenizer, load_tokenizer
from meshwright.disk import hub_hint
from meshwright.errors import UserError, shorten
from meshwright.outside import read_json

# Some templates mark answers with statements that plain Jinja does not know. Turn-by-turn rendering does not need the
# marks, so they are replaced by statements without effect.
MARKS = (
    (r"{%(-?)\s*generation\s*(-?)%}", r"{%\1 if true \2%}"),
    (r"{%(-?)\s*endgeneration\s*(-?)%}", r"{%\1 endif \2%}"),
)


class TemplateError(UserError):
    """An error for a template that does not show which text is learned, or for a conversation that it can't render."""


class MaskedTokens(NamedTuple):
    """The tokens of a conversation, and a mask: 1 for tokens that are learned, 0 for others."""

    tokens: list[int]
    mask: list[int]


@dataclass(frozen=True)
class ChatTemplate:
    """A template's text, and the texts of special tokens that it may refer to: bos_token, eos_token, ..."""

    text: str
    special: dict[str, str] = field(default_factory=dict)

    @cached_property
    def _program(self) -> Any:
        try:
            from jinja2 import TemplateError
            from jinja2.ext import loopcontrols
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise UserError("chat templates need Jinja: pip install meshwright[chat]") from None
        text = self.text
        for mark, plain in MARKS:
            text = re.sub(mark, plain, text)
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        try:
            return environment.from_string(text)
        except TemplateError as error:
            raise TemplateError(f"the chat template can't be read ({shorten(str(error), 200)}): correct it") from None

    def render(self, messages: Sequence[Message], tools: list[Any] | None = None, begins: bool = False) -> str:
        """Return the text of messages. With `begins`, it ends with the generation prompt, which begins an answer."""
        try:
            given = {"messages": list(messages), "tools": tools, "add_generation_prompt": begins}
            return str(self._program.render(**self.special, **given))
        except UserError:
            raise
        except Exception as error:  # a template may fail in any way
            reason = shorten(str(error) or type(error).__name__, 200)
            raise TemplateError(f"the chat template can't render these messages ({reason})") from None

    def spans(self, conversation: Conversation) -> tuple[str, list[tuple[int, int]]]:
        """Return a conversation's text, and the spans [begin, end) of the answers in it that are learned."""
        messages, tools = conversation.messages, conversation.tools
        whole = self.render(messages, tools)
        answers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            raise TemplateError("no message of the assistant is there to learn from")
        found: list[tuple[int, int]] = []
        for number in answers[-1:] if conversation.only_last else answers:
            # No generation prompt precedes a message of the assistant that directly follows another one.
            after_answer = number and messages[number - 1]["role"] == "assistant"
            before = self.render(messages[:number], tools, begins=not after_answer) if number else ""
            until = whole if number == len(messages) - 1 else self.render(messages[: number + 1], tools)
            if not until.startswith(before) or not whole.startswith(until):
                raise TemplateError(
                    "the chat template changes earlier text when a turn is added, so what is learned can't be told "
                    f"(at the assistant's message {number + 1} of {len(messages)}): use a template for training"
                )
            found.append((len(before), len(before) + len(self._answer(until[len(before) :]))))
        return whole, found

    def _answer(self, text: str) -> str:
        """Return an answer without the white space that the template puts after its end token."""
        short = text.rstrip()
        # Templates end an answer with the end token or with another special token, such as <|im_end|> or <end_of_turn>.
        ends = short.endswith(self.special.get("eos_token") or "\0") or re.search(r"<[|/｜][^<>]*>$|<[a-z_]+>$", short)
        return short if ends else text

    def encode(self, conversation: Conversation, tokenizer: Tokenizer) -> MaskedTokens:
        """Return a conversation's tokens, and which of them are learned."""
        text, spans = self.spans(conversation)
        tokens = tokenizer.encode(text)
        mask = [0] * len(tokens)
        for begin, end in spans:
            first, last = (len(_prefix(tokens, tokenizer, text[:at])) for at in (begin, end))
            if first >= last:
                raise TemplateError("an answer of the assistant is empty: leave the conversation out")
            mask[first:last] = [1] * (last - first)
        return MaskedTokens(tokens, mask)


def _prefix(tokens: list[int], tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of `text`, the beginning of a longer text. They must be the first ones of its `tokens`."""
    prefix = tokenizer.encode(text)
    if prefix != tokens[: len(prefix)]:
        raise TemplateError(
            "a token reaches from before an answer into it, so what is learned can't be told: let the template end "
            "what comes before an answer with a special token or a line break"
        )
    return prefix


def load_template(folder: Path) -> ChatTemplate:
    """Read the chat template of a model's folder, and its special tokens."""
    settings = _settings(folder)
    try:
        if (folder / "chat_template.jinja").is_file():
            text: Any = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        elif (folder / "chat_template.json").is_file():
            text = read_json(folder / "chat_template.json").get("chat_template")
        else:
            text = settings.get("chat_template")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"the chat template of {folder} can't be read ({error}): get it again") from None
    # A model may have several templates with names. The one for plain conversations is called "default".
    if isinstance(text, list):
        named = {entry.get("name"): entry.get("template") for entry in text if isinstance(entry, dict)}
        text = named.get("default")
    if not isinstance(text, str) or not text:
        raise UserError(f"{folder} has no chat template{hub_hint(folder)}: name one with --template FILE.jinja")
    return ChatTemplate(text, special_tokens(folder))


def named_template(template: str, folder: Path) -> ChatTemplate:
    """Read a template from a file that the user names, with the special tokens of a model's folder."""
    try:
        text = Path(template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--template {template} can't be read ({error}): name a file of Jinja text") from None
    return ChatTemplate(text, special_tokens(folder))


def _settings(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's tokenizer_config.json, or an empty dictionary if there is none."""
    if not (folder / "tokenizer_config.json").is_file():
        return {}
    try:
        settings = read_json(folder / "tokenizer_config.json")
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}/tokenizer_config.json can't be read ({error}): get it again") from None
    return settings if isinstance(settings, dict) else {}


def special_tokens(folder: Path) -> dict[str, str]:
    """Return the texts of the special tokens that a folder's tokenizer_config.json names, by key (`eos_token`)."""
    texts = {}
    for key, value in _settings(folder).items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            texts[key] = text
    return texts


def folder_tokenizer(folder: Path, end: str | None = None) -> Tokenizer | None:
    """Return the tokenizer of a model's folder, or None if there is none.

    It ends documents with `end` or, without that, with the model's own end token if its vocabulary has it.
    """
    for path in (folder / "tokenizer.json", folder / "tokenizer.model"):
        if path.is_file():
            own = special_tokens(folder).get("eos_token") if end is None else None
            try:
                return load_tokenizer(str(path), own or end)
            except UserError:
                if not own:
                    raise
                return load_tokenizer(str(path))
    return None


def _to_json(value: Any, indent: int | None = None, **more: Any) -> str:
    """Replace Jinja's `tojson`, which escapes characters for HTML. Models are trained on unescaped JSON."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise TemplateError(f"the chat template refuses these messages: {shorten(str(message), 200)}")


def _now(form: str) -> str:
    return datetime.now().strftime(form)
