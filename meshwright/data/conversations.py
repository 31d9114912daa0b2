"""Read conversations from the common formats, as lists of messages with roles.

The formats are messages, prompt and completion, alpaca, sharegpt, preference pairs and judged answers. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.data.unpack import LARGEST_LINE, too_long
from meshwright.disk import refusal
from meshwright.errors import UserError
from meshwright.outside import parse_json

Message = dict[str, Any]
ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "bot": "assistant", "system": "system", "tool": "tool", "observation": "tool", "function": "tool",
    "function_call": "assistant",
}  # fmt: skip


@dataclass(frozen=True)
class Conversation:
    """A list of messages, with the tools that the assistant may call."""

    messages: list[Message]
    tools: list[Any] | None = None
    good: bool | None = None  # how the last answer was judged; None if it was not
    only_last: bool = False  # only the last answer is learned


@dataclass(frozen=True)
class PreferencePair:
    """Two conversations with the same beginning, of which the first was preferred."""

    chosen: Conversation
    rejected: Conversation


Record = Conversation | PreferencePair


def read_records(path: Path) -> Iterator[tuple[str, Record]]:
    """Yield the records of a .jsonl file, or of a .json file that holds a list.

    Each comes with its position for error messages ("FILE, line 3").
    """
    try:
        named = list(_named_values(path))
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text: convert it") from None
    except OSError as error:
        raise refusal(f"{path} can't be read", error, path, "another file") from None
    for where, value in named:
        if not isinstance(value, dict):
            raise UserError(f"{where} holds a {type(value).__name__}, not an object with fields")
        try:
            yield where, record_of(value)
        except ValueError as error:
            raise UserError(f"{where}: {error}") from None


def _named_values(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the values of a file, each with its position for error messages.

    The length of lines is limited, except in a .json file, which is often a list on one line.
    """
    limit = -1 if path.suffix == ".json" else LARGEST_LINE + 1
    with path.open("rb") as file:
        number, is_first = 0, True
        while line := file.readline(limit):
            number += 1
            if len(line) == limit:
                raise too_long(f"{path}, line {number}")
            if not (text := line.decode("utf-8")).strip():
                continue
            if is_first and text.lstrip()[:1] == "[":
                whole = text + file.read().decode("utf-8")
                for record, value in enumerate(_parse(whole, str(path)), start=1):
                    yield f"{path}, record {record}", value
                return
            is_first = False
            yield f"{path}, line {number}", _parse(text, f"{path}, line {number}")


def _parse(text: str, where: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise UserError(f"{where} is not JSON ({error}): correct it") from None


def record_of(value: dict[str, Any]) -> Record:
    """Return the record that an object of one of the known formats represents. Raise ValueError for any other."""
    tools = _tools(value.get("tools"))
    if "chosen" in value and "rejected" in value:
        return _pair(value, tools)
    if "messages" in value:
        return Conversation(_messages(value["messages"]), tools)
    if "conversations" in value:
        return Conversation(_system(value) + _messages(value["conversations"]), tools)
    if "prompt" in value and "completion" in value:
        label = value.get("label")
        if label is not None and not isinstance(label, bool):
            raise ValueError(f"label is {label!r}, not true or false")
        asked, answer = _turn(value["prompt"], "user"), _turn(value["completion"], "assistant")
        return Conversation(_system(value) + asked + answer, tools, label, only_last=True)
    if "instruction" in value and "output" in value:
        return Conversation(_system(value) + _alpaca(value), tools)
    known = "messages; conversations; prompt and completion; instruction and output; chosen and rejected"
    raise ValueError(f"its fields are {', '.join(map(str, value)) or 'none'}, and the known formats have {known}")


def _pair(value: dict[str, Any], tools: list[Any] | None) -> PreferencePair:
    chosen, rejected = (_turn(value[key], "assistant") for key in ("chosen", "rejected"))
    asked = _system(value) + (_turn(value["prompt"], "user") if "prompt" in value else [])
    # Without a prompt, both are whole conversations, and the messages that they share at the beginning are the prompt.
    if not asked:
        shared = 0
        while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
            shared += 1
        if not shared or shared in (len(chosen), len(rejected)):
            raise ValueError("chosen and rejected have no prompt in common, or are the same")
        asked = chosen[:shared]
        chosen = chosen[shared:]
        rejected = rejected[shared:]
    good, bad = (Conversation(asked + each, tools, only_last=True) for each in (chosen, rejected))
    return PreferencePair(good, bad)


def _turn(value: Any, role: str) -> list[Message]:
    """Return a text as one message with this role, or a list of messages as it is."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, dict):
        value = [value]
    return _messages(value)


def _messages(value: Any) -> list[Message]:
    """Check a list of messages, and return them with the keys and roles of the messages format."""
    if not isinstance(value, list) or not value:
        raise ValueError("a conversation must be a list of messages")
    messages = []
    for message in value:
        if not isinstance(message, dict):
            raise ValueError("a message must be an object with a role and a content")
        role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
        if not isinstance(role, str) or role not in ROLES:
            raise ValueError(f"the role {role!r} is not one of {', '.join(ROLES)}")
        if not isinstance(content, (str, list, type(None))):
            raise ValueError(f"the content of a message is a {type(content).__name__}, not a text")
        rest = {key: item for key, item in message.items() if key not in ("role", "from", "content", "value")}
        messages.append({"role": ROLES[role], "content": "" if content is None else content, **rest})
    return messages


def _system(value: dict[str, Any]) -> list[Message]:
    return [{"role": "system", "content": value["system"]}] if value.get("system") else []


def _alpaca(value: dict[str, Any]) -> list[Message]:
    messages, history = [], value.get("history") or []
    if not isinstance(history, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
        raise ValueError("history must be a list of pairs: what was asked, and the answer")
    texts = [value["instruction"], value.get("input") or "", value["output"]]
    texts += [each for turn in history for each in turn]
    if not all(isinstance(each, str) for each in texts):
        raise ValueError("instruction, input, output and history must be texts")
    for asked, answer in history:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    asked = "\n".join(text for text in texts[:2] if text)
    return [*messages, {"role": "user", "content": asked}, {"role": "assistant", "content": value["output"]}]


def _tools(value: Any) -> list[Any] | None:
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError:
            raise ValueError("tools is a text that is not JSON") from None
    if value and not isinstance(value, list):
        raise ValueError("tools must be a list")
    return value or None
