"""An HTTP server with OpenAI's interface: completions, chat completions and the list of models.

It answers each request as soon as its tokens are there. A client that goes away frees its place at once. When the
server stops, it takes no new requests and finishes those that it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from meshwright.errors import UserError
from meshwright.infer.batching import Drawn
from meshwright.infer.engine_thread import Engine
from meshwright.infer.requests import BadRequest, CompletionRequest, GeneratedAnswer, Reply, ServedModel, TextPiece

MOST_BYTES = 8 * 2**20  # The longest body of a request.
STOPPING = "the server is stopping: ask another one"
KINDS = {401: "authentication_error", 429: "rate_limit_error", 503: "server_error"}  # OpenAI's words, by status.
LOOK_S = 0.5  # Seconds between two looks at whether a client that does not stream is still there.

Event = tuple[int, Drawn, bool]  # The number of the text in its request, the token, and whether it is the last.


class Texts:
    """The texts of one request while they are generated."""

    def __init__(self, engine: Engine, model: ServedModel, request: CompletionRequest) -> None:
        loop = asyncio.get_running_loop()
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        ends = model.chat_ends if request.is_chat else model.ends
        self.answers = [GeneratedAnswer(model.tokenizer, ends, request.stops) for _ in request.texts]
        self._engine = engine
        self._unfinished = set(range(len(self.answers)))

        def listener(index: int) -> Callable[[Drawn, bool], None]:
            def listen(drawn: Drawn, is_last: bool) -> None:
                # The loop may be closed by now, if the server is being ended.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(self.events.put_nowait, (index, drawn, is_last))

            return listen

        orders = []
        for index, ids in enumerate(request.texts):
            given = {
                "ids": ids, "most": request.most, "temperature": request.temperature, "top_p": request.top_p,
                "seed": request.seed + index, "ends": tuple(ends), "likeliest": request.likeliest,
            }  # fmt: skip
            orders.append((given, listener(index)))
        keys = engine.submit(orders)
        if keys is None and engine.is_closed:
            raise BadRequest(STOPPING, None, "stopping", 503)
        if keys is None:
            raise BadRequest("the server has as many requests as it takes: try again later", None, "overloaded", 429)
        self.keys = keys

    async def pieces(self) -> AsyncIterator[tuple[int, TextPiece]]:
        """Yield (number of the text, its next final piece) until all texts have ended."""
        try:
            while self._unfinished:
                index, drawn, is_last = await self.events.get()
                # Tokens after a stop text may still arrive.
                if index not in self._unfinished:
                    continue
                piece = self.answers[index].add(drawn, is_last)
                if piece.reason is not None:
                    self._unfinished.discard(index)
                    if not is_last:
                        self._engine.cancel(self.keys[index])
                if piece.text or piece.reason is not None:
                    yield index, piece
        finally:
            self.give_up()

    def give_up(self) -> None:
        """End the texts that no client waits for."""
        for index in self._unfinished:
            self._engine.cancel(self.keys[index])
        self._unfinished = set()

    @property
    def counts(self) -> list[int]:
        return [answer.count for answer in self.answers]


class Service:
    """The routes of the server."""

    def __init__(self, engine: Engine, model: ServedModel, api_key: str, stopping: Callable[[], bool]) -> None:
        self.engine, self.model, self.api_key, self.stopping = engine, model, api_key, stopping

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self._guarded(self.models)),
                Route("/v1/models/{name:path}", self._guarded(self.one_model)),
                Route("/v1/completions", self._guarded(self.completions), methods=["POST"]),
                Route("/v1/chat/completions", self._guarded(self.chat), methods=["POST"]),
                Route("/health", self.health),
            ]
        )

    def _guarded(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Return the handler with a check of the key, and with mistakes turned into OpenAI's error documents."""

        async def guarded(request: Request) -> Response:
            try:
                given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
                if self.api_key and not hmac.compare_digest(given, self.api_key.encode()):
                    raise BadRequest("the API key is missing or wrong", None, "invalid_api_key", 401)
                return await handler(request)
            except BadRequest as error:
                return _error(str(error), error.param, error.code, error.status)
            except UserError as error:
                return _error(str(error), None, None, 400)
            except ClientDisconnect:
                return Response(status_code=499)

        return guarded

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "stopping" if self.stopping() else "ok", "open_requests": self.engine.open})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def one_model(self, request: Request) -> Response:
        if request.path_params["name"] != self.model.name:
            raise BadRequest(f"there is only the model '{self.model.name}' here", "model", "model_not_found", 404)
        return JSONResponse(self._described())

    def _described(self) -> dict[str, Any]:
        return {"id": self.model.name, "object": "model", "created": 0, "owned_by": "meshwright",
                "max_model_len": self.model.longest}  # fmt: skip

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, is_chat=False)

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, is_chat=True)

    async def _answer(self, request: Request, is_chat: bool) -> Response:
        if self.stopping():
            raise BadRequest(STOPPING, None, "stopping", 503)
        body = await _body(request)
        # Long texts take a while to encode, and other requests continue meanwhile.
        asked = await asyncio.to_thread(CompletionRequest.read, body, self.model, is_chat)
        texts, reply = Texts(self.engine, self.model, asked), Reply.to(asked, self.model)
        if asked.stream:
            return StreamingResponse(_streamed(texts, reply, asked), media_type="text/event-stream")
        pieces: list[list[TextPiece]] = [[] for _ in asked.texts]

        async def collect() -> None:
            async for index, piece in texts.pieces():
                pieces[index].append(piece)

        work = asyncio.create_task(collect())
        while not (await asyncio.wait({work}, timeout=LOOK_S))[0]:
            if await request.is_disconnected():
                work.cancel()
                texts.give_up()
                raise ClientDisconnect
        work.result()
        return JSONResponse(reply.whole(pieces, texts.counts))


async def _streamed(texts: Texts, reply: Reply, asked: CompletionRequest) -> AsyncIterator[str]:
    """Yield the events of a streamed answer. If the client goes away, starlette closes this generator."""
    pieces = texts.pieces()
    try:
        if asked.is_chat:
            for index in range(len(asked.texts)):
                yield _event(reply.first(index))
        async for index, piece in pieces:
            yield _event(reply.chunk(index, piece))
        if asked.with_usage:
            yield _event(reply.last(texts.counts))
        yield "data: [DONE]\n\n"
    finally:
        texts.give_up()


def _event(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document)}\n\n"


async def _body(request: Request) -> Any:
    """Return the parsed JSON body of a request, of limited length."""
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > MOST_BYTES:
            raise BadRequest(f"the body is longer than {MOST_BYTES:,} bytes: send less", None, None, 413)
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise BadRequest("the body is no JSON") from None


def _error(text: str, param: str | None, code: str | None, status: int) -> JSONResponse:
    kind = KINDS.get(status, "invalid_request_error")
    headers = {"Retry-After": "1"} if status == 429 else None
    return JSONResponse({"error": {"message": text, "type": kind, "param": param, "code": code}}, status, headers)
