"""Requests and answers of OpenAI's completions and chat completions, as plain mappings. Nothing here knows HTTP.

`CompletionRequest.read` checks a request's body, `GeneratedAnswer` turns the tokens of one text into text and
log-probabilities, piece by piece, and the functions at the end build the documents to send.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.data.chat_template import ChatTemplate, TemplateError
from meshwright.data.tokenizers import INCOMPLETE, Tokenizer
from meshwright.errors import UserError
from meshwright.infer.batching import Drawn
from meshwright.infer.texts import MIN_TEMPERATURE

MOST_TEXTS, MOST_STOPS, MOST_LIKELIEST = 128, 16, 20
# Keys that would change an answer and are not implemented. A request may hold them with their neutral values.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,), "suffix": ("",), "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},),
    "tools": ([],), "functions": ([],), "tool_choice": ("none", "auto"), "response_format": ({"type": "text"},),
    "echo": (False,),
}  # fmt: skip


class BadRequest(UserError):
    """A request that can't be answered. `param` names its key, and `status` is that of HTTP."""

    def __init__(self, text: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(text)
        self.param, self.code, self.status = param, code, status


@dataclass(frozen=True)
class ServedModel:
    """Everything about the served model that requests and answers need."""

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    vocab: int
    longest: int
    ends: frozenset[int]  # The tokens that end a text.
    chat_ends: frozenset[int]  # The tokens that end an answer.
    adds_special: bool = False  # True if prompts begin with the special tokens that the tokenizer adds to a text.


@dataclass(frozen=True)
class CompletionRequest:
    """A checked request: `prompts` in tokens, each to be answered `copies` times."""

    prompts: tuple[tuple[int, ...], ...]
    copies: int
    most: int
    temperature: float
    top_p: float
    seed: int
    stops: tuple[str, ...]
    logprobs: bool
    likeliest: int
    stream: bool
    with_usage: bool
    is_chat: bool

    @property
    def texts(self) -> list[tuple[int, ...]]:
        """Return the prompt of each text to generate."""
        return [prompt for prompt in self.prompts for _ in range(self.copies)]

    @classmethod
    def read(cls, body: Any, model: ServedModel, is_chat: bool) -> CompletionRequest:
        if not isinstance(body, Mapping):
            raise BadRequest("the body must be a JSON object")
        if body.get("model", model.name) != model.name:
            text = f"there is no model '{str(body['model'])[:100]}' here, only '{model.name}'"
            raise BadRequest(text, "model", "model_not_found", 404)
        for key, neutral in NEUTRAL.items():
            if body.get(key) is not None and body[key] not in neutral:
                raise BadRequest(f"{key} is not supported: leave it out", key)
        prompts = (_conversation(body, model),) if is_chat else _prompts(body, model)
        copies = _number(body, "n", 1, 1, MOST_TEXTS, whole=True)
        if len(prompts) * copies > MOST_TEXTS:
            raise BadRequest(f"a request may ask for {MOST_TEXTS} texts: send several", "n")
        room = min(model.longest - len(prompt) + 1 for prompt in prompts)
        if room < 1:
            longest = max(map(len, prompts))
            text = f"the prompt has {longest} tokens, and the model's context {model.longest}: shorten it"
            raise BadRequest(text, "messages" if is_chat else "prompt", "context_length_exceeded")
        key = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
        most = _number(body, key, room if is_chat else 16, 1, 2**31, whole=True)
        likeliest = _likeliest(body, is_chat)
        options = body.get("stream_options") or {}
        temperature = float(_number(body, "temperature", 1.0, 0.0, 2.0))
        return cls(
            prompts=prompts, copies=copies, most=min(most, room),
            # Below this temperature, drawing always takes the likeliest token.
            temperature=0.0 if temperature < MIN_TEMPERATURE else temperature,
            top_p=float(_number(body, "top_p", 1.0, 1e-6, 1.0)),
            seed=_number(body, "seed", random.getrandbits(62), 0, 2**62, whole=True), stops=_stops(body),
            logprobs=likeliest is not None, likeliest=likeliest or 0, stream=bool(body.get("stream")),
            with_usage=bool(isinstance(options, Mapping) and options.get("include_usage")), is_chat=is_chat,
        )  # fmt: skip


def _number(body: Mapping[str, Any], key: str, default: float, least: float, most: float, whole: bool = False) -> Any:
    value = body.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not least <= value <= most:
        kind = "a whole number" if whole else "a number"
        raise BadRequest(f"{key} must be {kind} between {least:g} and {most:g}, not {str(value)[:40]!r}", key)
    return value


def _likeliest(body: Mapping[str, Any], is_chat: bool) -> int | None:
    """Return how many of the likeliest tokens to report; None if no log-probabilities are asked for."""
    if not is_chat:
        asked = body.get("logprobs") is not None
        return int(_number(body, "logprobs", 0, 0, MOST_LIKELIEST, whole=True)) if asked else None
    top = int(_number(body, "top_logprobs", 0, 0, MOST_LIKELIEST, whole=True))
    if top and not body.get("logprobs"):
        raise BadRequest("top_logprobs needs logprobs: true", "top_logprobs")
    return top if body.get("logprobs") else None


def _stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    stops = body.get("stop")
    if stops is None or isinstance(stops, str):
        stops = [] if stops is None else [stops]
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(isinstance(one, str) and one for one in stops):
        raise BadRequest(f"stop must be a text, or a list of at most {MOST_STOPS} texts", "stop")
    return tuple(stops)


def _prompts(body: Mapping[str, Any], model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """Return the prompts of a completion: a text, tokens, or a list of one of them."""
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    prompts = tuple(_tokens(each, model) for each in (prompt if several and isinstance(prompt, list) else [prompt]))
    if len(prompts) > MOST_TEXTS:
        raise BadRequest(f"a request may hold {MOST_TEXTS} prompts: send several", "prompt")
    return prompts


def _tokens(prompt: Any, model: ServedModel) -> tuple[int, ...]:
    if isinstance(prompt, str):
        encode = model.tokenizer.encode_with_special_tokens if model.adds_special else model.tokenizer.encode
        ids = _encoded(encode, prompt, "prompt") or [model.tokenizer.eod]
    elif isinstance(prompt, list) and prompt and all(type(id) is int for id in prompt):
        ids = prompt
    else:
        raise BadRequest("prompt must be a text, a list of tokens, or a list of texts or lists of tokens", "prompt")
    return _checked(ids, model, "prompt")


def _encoded(encode: Any, text: str, key: str) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRequest(f"{key} holds half of a surrogate pair, which is no text", key) from None
    return list(encode(text))


def _checked(ids: Sequence[int], model: ServedModel, key: str) -> tuple[int, ...]:
    if min(ids) < 0 or max(ids) >= model.vocab:
        raise BadRequest(f"{key} has a token outside the model's vocabulary of {model.vocab}", key)
    return tuple(ids)


def _conversation(body: Mapping[str, Any], model: ServedModel) -> tuple[int, ...]:
    """Return the tokens of a chat's messages, rendered by the model's template."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(each, Mapping) for each in messages):
        raise BadRequest("messages must be a list of objects with a role and a content", "messages")
    if model.template is None:
        raise BadRequest(f"'{model.name}' has no chat template: use completions", "messages")
    try:
        text = model.template.render([_message(each) for each in messages], begins=True)
    except TemplateError as error:
        raise BadRequest(str(error), "messages") from None
    ids = _encoded(model.tokenizer.encode, text, "messages")
    if not ids:
        raise BadRequest("messages render to an empty text", "messages")
    return _checked(ids, model, "messages")


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose content is one text. Clients may send a list of text parts instead."""
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content):
            raise BadRequest("only text can be in the content of a message", "messages")
        content = "".join(part["text"] for part in content)
    if not isinstance(message.get("role"), str) or not isinstance(content, str):
        raise BadRequest("each message needs a role and a content, both texts", "messages")
    return {**message, "content": content}


@dataclass(frozen=True)
class TextPiece:
    """Text that is final, with the log-probabilities of its tokens, and the reason if the text ended."""

    text: str
    drawn: tuple[Drawn, ...]
    reason: str | None = None


class GeneratedAnswer:
    """One text in the making. Text that a stop text may still cut off is held back."""

    def __init__(self, tokenizer: Tokenizer, ends: Container[int], stops: Sequence[str]) -> None:
        self.tokenizer, self.end_tokens, self.stops = tokenizer, ends, stops
        self.ids: list[int] = []
        self.text = ""
        self.reason: str | None = None
        self._sent = 0
        self._waiting: list[Drawn] = []
        # Tokens before `_from` never change the text again. Those up to `_read` are in `text`.
        self._from = self._read = 0
        self.count = 0

    def add(self, drawn: Drawn, is_last: bool) -> TextPiece:
        """Take the next token and return the text that became final."""
        self.count += 1
        if drawn.token in self.end_tokens:
            self.reason = "stop"
        else:
            self.ids.append(drawn.token)
            self._waiting.append(drawn)
            self._decode(is_last)
            self._stop()
        if is_last and self.reason is None:
            self.reason = "length"
        return self._piece()

    def _decode(self, is_last: bool) -> None:
        """Append the text of the newest tokens, unless it ends in the middle of a character."""
        # Tokens are decoded after the one before them, since a tokenizer may write a first token in another way.
        decode = self.tokenizer.decode
        whole, before = decode(self.ids[self._from :]), decode(self.ids[self._from : self._read])
        if whole.endswith(INCOMPLETE) and not is_last:
            return
        self.text += whole[len(before) :]
        # After a token without text, such as a special one, the next one would be written like a first one.
        if len(whole) > len(before):
            self._from = self._read
        self._read = len(self.ids)

    def _stop(self) -> None:
        """Cut the text before the first stop text in it."""
        found = [at for stop in self.stops if (at := self.text.find(stop, max(0, self._sent - len(stop)))) >= 0]
        if found:
            self.text, self.reason = self.text[: min(found)], "stop"

    def _piece(self) -> TextPiece:
        end = len(self.text)
        if self.reason is None:
            end -= max((_overlap(self.text, stop) for stop in self.stops), default=0)
        text, self._sent = self.text[self._sent : end], max(self._sent, end)
        # Log-probabilities go with the text of their tokens.
        drawn, self._waiting = (tuple(self._waiting), []) if text or self.reason else ((), self._waiting)
        return TextPiece(text, drawn, self.reason)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(frozen=True)
class Reply:
    """The parts that all documents of one answer share."""

    model: ServedModel
    request: CompletionRequest
    id: str
    created: int

    @classmethod
    def to(cls, request: CompletionRequest, model: ServedModel) -> Reply:
        return cls(model, request, f"{'chatcmpl' if request.is_chat else 'cmpl'}-{uuid.uuid4().hex}", int(time.time()))

    def _head(self, chunk: bool) -> dict[str, Any]:
        kind = "text_completion"
        if self.request.is_chat:
            kind = "chat.completion.chunk" if chunk else "chat.completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model.name}

    def whole(self, pieces: Sequence[Sequence[TextPiece]], counts: Sequence[int]) -> dict[str, Any]:
        """Return the document of a request that does not stream, from the pieces of each text."""
        choices = []
        for index, parts in enumerate(pieces):
            text, drawn = "".join(part.text for part in parts), [each for part in parts for each in part.drawn]
            choice = self._choice(index, parts[-1].reason, drawn)
            choice |= {"message": {"role": "assistant", "content": text}} if self.request.is_chat else {"text": text}
            choices.append(choice)
        return {**self._head(False), "choices": choices, "usage": self.usage(counts)}

    def first(self, index: int) -> dict[str, Any]:
        """Return the chunk that opens a text of a chat."""
        delta = {"role": "assistant", "content": ""}
        return {**self._head(True), "choices": [{"index": index, "delta": delta, "finish_reason": None}]}

    def chunk(self, index: int, piece: TextPiece) -> dict[str, Any]:
        delta = {"content": piece.text} if piece.text else {}
        text: dict[str, Any] = {"delta": delta} if self.request.is_chat else {"text": piece.text}
        return {**self._head(True), "choices": [self._choice(index, piece.reason, piece.drawn) | text]}

    def _choice(self, index: int, reason: str | None, drawn: Sequence[Drawn]) -> dict[str, Any]:
        return {"index": index, "finish_reason": reason, "logprobs": self._logprobs(drawn)}

    def last(self, counts: Sequence[int]) -> dict[str, Any]:
        """Return the chunk with the counts of tokens, which follows all texts if it is asked for."""
        return {**self._head(True), "choices": [], "usage": self.usage(counts)}

    def usage(self, counts: Sequence[int]) -> dict[str, int]:
        prompt, made = sum(map(len, self.request.prompts)), sum(counts)
        return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}

    def _logprobs(self, drawn: Sequence[Drawn]) -> dict[str, Any] | None:
        if not self.request.logprobs:
            return None
        decode = self.model.tokenizer.decode

        def entry(token: int, logprob: float) -> dict[str, Any]:
            text = decode([token])
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        if self.request.is_chat:
            rows = [{**entry(each.token, each.logprob), "top_logprobs": [entry(*top) for top in each.likeliest]}
                    for each in drawn]  # fmt: skip
            return {"content": rows}
        return {
            "tokens": [decode([each.token]) for each in drawn], "token_logprobs": [each.logprob for each in drawn],
            "top_logprobs": [{decode([token]): logprob for token, logprob in each.likeliest} for each in drawn],
        }  # fmt: skip
