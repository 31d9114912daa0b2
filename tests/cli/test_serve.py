"""`meshwright serve` with OpenAI's own client: the same texts as `generate`, under load, rubbish and a stop."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.main import main
from meshwright.infer.generate import generate_all
from tests.support.waiting import HANG_S, until
from tests.support.word_model import make_word_model

openai = pytest.importorskip("openai")
KEY = "a-key"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_word_model(tmp_path_factory.mktemp("served") / "words")


class Served:
    """A running server and a client of it."""

    def __init__(self, folder: Path, *words: str) -> None:
        command = [sys.executable, "-m", "meshwright", "serve", str(folder), "--port", "0", *words]
        environment = {**os.environ, "KEY": KEY, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        assert self.process.stderr is not None
        self.errors: list[str] = []
        for line in self.process.stderr:
            self.errors.append(line)
            if found := re.search(r"http://127\.0\.0\.1:(\d+)/v1", line):
                self.port = int(found[1])
                break
        else:
            raise AssertionError(f"the server did not start: {self.errors}")
        threading.Thread(target=lambda: self.errors.extend(self.process.stderr or ()), daemon=True).start()
        url = f"http://127.0.0.1:{self.port}/v1"
        self.client = openai.OpenAI(base_url=url, api_key=KEY, timeout=HANG_S, max_retries=0)

    def open_requests(self) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG_S)
        connection.request("GET", "/health")
        found: int = json.loads(connection.getresponse().read())["open_requests"]
        connection.close()
        return found

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(HANG_S)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    server = Served(folder, "--api-key-env", "KEY", "--max-open", "100", "--max-running", "8", "--cache-tokens", "400")
    yield server
    assert server.end() == 0, server.errors
    assert not [line for line in server.errors if "Traceback" in line or "Error" in line]


def generated(folder: Path, prompts: list[list[int]], most: list[int]) -> list[list[int]]:
    """Return the greedy tokens of `generate` after each prompt."""
    from meshwright.infer.evaluate import with_model
    from meshwright.infer.reading import sections_of

    def use(ctx: Any, modules: Any, place: Any) -> list[list[int]]:
        model = ctx.config.model
        return [generate_all(modules[0], model, [ids], n, ends={60})[0] for ids, n in zip(prompts, most, strict=True)]

    found: list[list[int]] = with_model(str(folder), sections_of([], 1), use)
    return found


def words_of(ids: list[int]) -> str:
    return " ".join(f"w{id}" for id in ids)


def test_64_requests_at_once_get_the_texts_of_generate(folder: Path, served: Served) -> None:
    """The cache holds fewer tokens than all of them need, so that some give way to others."""
    chance = random.Random(3)
    prompts = [[chance.randrange(1, 60) for _ in range(chance.choice((1, 5, 17, 40)))] for _ in range(64)]
    most = [chance.randrange(1, 40) for _ in prompts]

    def ask(number: int) -> Any:
        return served.client.completions.create(
            model="words", prompt=prompts[number], max_tokens=most[number], temperature=0
        )

    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(ask, range(64)))
    for answer, ids, tokens in zip(answers, prompts, generated(folder, prompts, most), strict=True):
        ended = tokens[-1] == 60
        text = [token for token in tokens if token not in (0, 60)]
        assert answer.choices[0].text.split() == words_of(text).split()
        assert answer.choices[0].finish_reason == ("stop" if ended else "length")
        assert answer.usage.prompt_tokens == len(ids) and answer.usage.completion_tokens == len(tokens)
    assert served.open_requests() == 0


def test_streams_carry_the_same_text(served: Served) -> None:
    given = {"model": "words", "prompt": "w9 w10 w11", "max_tokens": 20, "temperature": 0}
    whole = served.client.completions.create(**given).choices[0]
    chunks = list(served.client.completions.create(**given, stream=True, stream_options={"include_usage": True}))
    texts = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(each.text for each in texts) == whole.text and len(texts) > 3
    assert texts[-1].finish_reason == whole.finish_reason and chunks[-1].usage.completion_tokens > 3


def test_chat_follows_the_template(folder: Path, served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    messages: list[Any] = [{"role": "system", "content": "w12"}, {"role": "user", "content": "w9 w10"}]
    given = {"model": "words", "messages": messages, "max_tokens": 7, "temperature": 0}
    answer = served.client.chat.completions.create(**given).choices[0]
    prompt = "w7 w12 <e> w5 w9 w10 <e> w6"
    assert main(["generate", str(folder), "--prompt", prompt, "--max-tokens", "7", "--json"]) == 0
    ids = json.loads(capsys.readouterr().out)["tokens"]
    # The template ends an answer with token 0.
    ids = ids[: ids.index(0)] if 0 in ids else ids
    assert answer.message.role == "assistant" and answer.message.content.split() == words_of(ids).split()
    stream = served.client.chat.completions.create(**given, stream=True)
    parts = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(parts) == answer.message.content


def test_several_texts_and_log_probabilities(served: Served) -> None:
    given = {"model": "words", "prompt": ["w1 w2", "w3"], "n": 2, "max_tokens": 6, "seed": 5, "logprobs": 3}
    first, second = (served.client.completions.create(**given, temperature=1.5).choices for _ in range(2))
    assert [each.text for each in first] == [each.text for each in second] and len(first) == 4
    assert len({each.text for each in first}) > 2
    for choice in first:
        rows = choice.logprobs
        assert len(rows.tokens) == len(rows.token_logprobs) == len(rows.top_logprobs) > 0
        for value, top in zip(rows.token_logprobs, rows.top_logprobs, strict=True):
            assert value <= max(top.values()) + 1e-9 <= 1e-9
    chat = served.client.chat.completions.create(
        model="words", messages=[{"role": "user", "content": "w1"}], max_tokens=4, logprobs=True, top_logprobs=2
    )
    assert all(len(row.top_logprobs) == 2 for row in chat.choices[0].logprobs.content)


def test_a_text_ends_before_a_stop_text(served: Served) -> None:
    given = {"model": "words", "prompt": "w9 w10 w11", "max_tokens": 20, "temperature": 0}
    whole = served.client.completions.create(**given).choices[0].text
    stop = " ".join(whole.split()[4:6])
    for stream in (False, True):
        answer = served.client.completions.create(**given, stop=["never", stop], stream=stream)
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        assert "".join(each.text for each in choices) == whole[: whole.index(stop)]
        assert choices[-1].finish_reason == "stop"


@pytest.mark.parametrize(("path", "body", "status", "sentence"), [
    ("/v1/completions", b"{", 400, "the body is no JSON"),
    ("/v1/completions", b"[" * 100_000, 400, "the body is no JSON"),
    ("/v1/completions", b"[]", 400, "must be a JSON object"),
    ("/v1/completions", b'{"prompt": 5}', 400, "prompt must be a text"),
    ("/v1/completions", b'{"prompt": [61]}', 400, "outside the model's vocabulary of 61"),
    ("/v1/completions", b'{"prompt": "w1", "model": "gpt-9"}', 404, "there is no model 'gpt-9'"),
    ("/v1/completions", b'{"prompt": "w1", "max_tokens": 0}', 400, "max_tokens must be a whole number"),
    ("/v1/completions", b'{"prompt": "w1", "temperature": "hot"}', 400, "temperature must be a number"),
    ("/v1/completions", b'{"prompt": "w1", "n": 1000}', 400, "n must be a whole number between 1 and 128"),
    ("/v1/completions", b'{"prompt": "w1", "best_of": 3}', 400, "best_of is not supported"),
    ("/v1/completions", b'{"prompt": "\\ud800"}', 400, "half of a surrogate pair"),
    ("/v1/completions", json.dumps({"prompt": "w1 " * 200}).encode(), 400, "the model's context 96"),
    ("/v1/chat/completions", b'{"messages": []}', 400, "messages must be a list"),
    ("/v1/chat/completions", b'{"messages": [{"role": "user"}]}', 400, "needs a role and a content"),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', 400, "only text"),
])  # fmt: skip
def test_bad_requests_get_one_sentence(served: Served, path: str, body: bytes, status: int, sentence: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=HANG_S)
    connection.request("POST", path, body, {"Authorization": f"Bearer {KEY}"})
    response = connection.getresponse()
    error = json.loads(response.read())["error"]
    assert response.status == status and sentence in error["message"], error


def test_a_wrong_key_is_refused(served: Served) -> None:
    for key in ("", "another", "a-key-and-more"):
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=HANG_S)
        connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})
        assert connection.getresponse().status == 401
    assert [model.id for model in served.client.models.list()] == ["words"]


def test_clients_that_leave_free_their_places(served: Served) -> None:
    body = json.dumps({"prompt": "w1", "max_tokens": 90, "n": 20, "stream": True}).encode()
    lines = ("POST /v1/completions HTTP/1.1", "Host: x", f"Authorization: Bearer {KEY}", f"Content-Length: {len(body)}")
    head = "\r\n".join((*lines, "", ""))
    for stream in (True, False):
        sent = body if stream else body.replace(b'"stream": true', b'"stream":false')
        with socket.create_connection(("127.0.0.1", served.port), timeout=HANG_S) as connection:
            connection.sendall(head.encode() + sent)
            if stream:
                assert connection.recv(20)
    # Rubbish that is no HTTP at all.
    with socket.create_connection(("127.0.0.1", served.port), timeout=HANG_S) as connection:
        connection.sendall(os.urandom(200))
    until(lambda: served.open_requests() == 0)
    assert served.client.completions.create(model="words", prompt="w1", max_tokens=2).choices


def test_too_many_requests_are_told_to_come_back(served: Served) -> None:
    with pytest.raises(openai.RateLimitError, match="try again later"):
        served.client.completions.create(model="words", prompt="w1", n=101)


def test_a_stop_finishes_the_open_requests(folder: Path) -> None:
    server = Served(folder, "--name", "mine")
    given = {"model": "mine", "prompt": "w9", "max_tokens": 90, "temperature": 0}
    stream = server.client.completions.create(**given, stream=True)
    first = next(iter(stream))
    server.process.send_signal(signal.SIGTERM)
    texts = [first, *stream]
    assert texts[-1].choices[0].finish_reason in ("stop", "length")
    assert server.process.wait(HANG_S) == 0, server.errors


@pytest.mark.wide
def test_two_ranks_answer_alike(folder: Path, served: Served) -> None:
    server = Served(folder, "--tp", "2")
    given = {"prompt": "w9 w10 w11", "max_tokens": 30, "temperature": 0, "model": "words"}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: server.client.completions.create(**given).choices[0].text, range(8)))
    assert set(answers) == {served.client.completions.create(**given).choices[0].text}
    assert server.end() == 0, server.errors


@pytest.mark.parametrize(("words", "sentence"), [
    (("--port", "70000"), "is not a port"), (("--tp", "0"), "must be at least 1"),
    (("--api-key-env", "NO_SUCH_KEY"), "empty or not set"),
])  # fmt: skip
def test_bad_options(folder: Path, words: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(folder), *words]) == 2
    assert sentence in capsys.readouterr().err
