"""Chat templates: what turns messages into the text that a model was trained on, and which of its tokens are learned.

A template is a Jinja program that comes with a model, so it runs in Jinja's sandbox. Most don't mark what the assistant
says. So a conversation is rendered turn by turn: what an answer adds to everything before it, with the words that begin
an answer, is what is learned. That holds only where the earlier text stays as it is when turns are added; a template
that changes it is refused. No torch.
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
from meshwright.data.tokenizers import Tokenizer
from meshwright.disk import hub_hint
from meshwright.errors import UserError, shortened
from meshwright.outside import read_json

# Marks of answers, which some templates have: rendering turn by turn needs none.
MARKS = (
    (r"{%(-?)\s*generation\s*(-?)%}", r"{%\1 if true \2%}"),
    (r"{%(-?)\s*endgeneration\s*(-?)%}", r"{%\1 endif \2%}"),
)


class Broken(UserError):
    """Raised for a template that can't tell what is learned, or a conversation that it can't render."""


class Masked(NamedTuple):
    """The tokens of a conversation, and which of them are learned (1) or not (0)."""

    tokens: list[int]
    mask: list[int]


@dataclass(frozen=True)
class ChatTemplate:
    """A template's text, and the texts of special tokens that it may use: bos_token, eos_token, ..."""

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
            raise Broken(f"the chat template can't be read ({shortened(str(error), 200)}): correct it") from None

    def render(self, messages: Sequence[Message], tools: list[Any] | None = None, begins: bool = False) -> str:
        """Returns the text of messages; `begins`: with the words that begin an answer."""
        try:
            given = {"messages": list(messages), "tools": tools, "add_generation_prompt": begins}
            return str(self._program.render(**self.special, **given))
        except UserError:
            raise
        except Exception as error:  # a template may fail in any way
            said = shortened(str(error) or type(error).__name__, 200)
            raise Broken(f"the chat template can't render these messages ({said})") from None

    def spans(self, conversation: Conversation) -> tuple[str, list[tuple[int, int]]]:
        """Returns a conversation's text, and the begin and end of each answer in it that is learned."""
        messages, tools = conversation.messages, conversation.tools
        whole = self.render(messages, tools)
        answers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            raise Broken("no message of the assistant is there to learn from")
        found: list[tuple[int, int]] = []
        for number in answers[-1:] if conversation.only_last else answers:
            after_answer = number and messages[number - 1]["role"] == "assistant"
            before = self.render(messages[:number], tools, begins=not after_answer) if number else ""
            until = whole if number == len(messages) - 1 else self.render(messages[: number + 1], tools)
            if not until.startswith(before) or not whole.startswith(until):
                raise Broken(
                    "the chat template changes earlier text when a turn is added, so what is learned can't be told "
                    f"(at the assistant's message {number + 1} of {len(messages)}): use a template for training"
                )
            found.append((len(before), len(before) + len(self._answer(until[len(before) :]))))
        return whole, found

    def _answer(self, text: str) -> str:
        """Returns an answer without the blanks that the template puts after its end token."""
        short = text.rstrip()
        ends = short.endswith(self.special.get("eos_token") or "\0") or re.search(r"<[|/｜][^<>]*>$|<[a-z_]+>$", short)
        return short if ends else text

    def encode(self, conversation: Conversation, tokenizer: Tokenizer) -> Masked:
        """Returns a conversation's tokens and which of them are learned."""
        text, spans = self.spans(conversation)
        tokens = tokenizer.encode(text)
        mask = [0] * len(tokens)
        for begin, end in spans:
            first, last = (len(_prefix(tokens, tokenizer, text[:at])) for at in (begin, end))
            if first >= last:
                raise Broken("an answer of the assistant is empty: leave the conversation out")
            mask[first:last] = [1] * (last - first)
        return Masked(tokens, mask)


def _prefix(tokens: list[int], tokenizer: Tokenizer, text: str) -> list[int]:
    """Returns the tokens of the beginning of a text, which must be the text's first tokens."""
    found = tokenizer.encode(text)
    if found != tokens[: len(found)]:
        raise Broken(
            "a token reaches from before an answer into it, so what is learned can't be told: let the template end "
            "what comes before an answer with a special token or a line break"
        )
    return found


def load_template(folder: Path) -> ChatTemplate:
    """Reads the chat template of a model's folder, and its special tokens."""
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
    if isinstance(text, list):  # several, by name
        named = {each.get("name"): each.get("template") for each in text if isinstance(each, dict)}
        text = named.get("default")
    if not isinstance(text, str) or not text:
        raise UserError(f"{folder} has no chat template{hub_hint(folder)}: name one with --template FILE.jinja")
    return ChatTemplate(text, special_tokens(folder))


def named_template(template: str, folder: Path) -> ChatTemplate:
    """Reads a template of one's own, with the special tokens of a model's folder."""
    try:
        text = Path(template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--template {template} can't be read ({error}): name a file of Jinja text") from None
    return ChatTemplate(text, special_tokens(folder))


def _settings(folder: Path) -> dict[str, Any]:
    """Returns what a folder's tokenizer_config.json holds; nothing where there is none."""
    if not (folder / "tokenizer_config.json").is_file():
        return {}
    try:
        found = read_json(folder / "tokenizer_config.json")
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}/tokenizer_config.json can't be read ({error}): get it again") from None
    return found if isinstance(found, dict) else {}


def special_tokens(folder: Path) -> dict[str, str]:
    """Returns the texts of the special tokens that a folder's tokenizer_config.json names."""
    found = {}
    for key, value in _settings(folder).items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            found[key] = text
    return found


def _to_json(value: Any, indent: int | None = None, **more: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise Broken(f"the chat template refuses these messages: {shortened(str(message), 200)}")


def _now(form: str) -> str:
    return datetime.now().strftime(form)
