"""`meshwright serve`: answer completions and chats over HTTP, as OpenAI's interface defines them."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.cli.chat import answer_ends, template_of
from meshwright.cli.generate import model_config, tokenizer_of
from meshwright.errors import UserError, notice
from meshwright.infer.reading import add_ema
from meshwright.infer.texts import end_tokens
from meshwright.launch.launch import start

EXAMPLES = """example:
  meshwright serve runs/tuned --port 8000
  meshwright serve models/llama-8b --tp 2 --name llama --api-key-env KEY
  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "def main("}'

Clients of OpenAI's interface connect with base_url="http://127.0.0.1:8000/v1". Ctrl-C or SIGTERM finishes the requests
that are open, then ends; a second Ctrl-C ends at once. Only this machine can connect unless --host names an address."""

LOOPBACK = "127.0.0.1"
LOOK_S = 0.01
WHOLE_CONTEXTS = 16  # The sequences of full length that the cache holds, unless --cache-tokens says otherwise.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="RUN|CHECKPOINT[@STEP]|HF-FOLDER")
    parser.add_argument("--tp", dest="nproc", type=int, default=1, metavar="N", help="tensor-parallel ranks")
    parser.add_argument("--host", default=LOOPBACK, help=f"the address to listen on (default {LOOPBACK})")
    parser.add_argument("--port", type=int, default=8000, help="default 8000; 0 chooses a free one")
    parser.add_argument("--name", default="", help="the model's name in requests (default: the folder's)")
    most = "sequences that run at once (default 64); further ones wait"
    parser.add_argument("--max-running", type=int, default=64, metavar="N", help=most)
    queue = "sequences that run or wait; beyond them requests are refused with status 429 (default 1024)"
    parser.add_argument("--max-open", type=int, default=1024, metavar="N", help=queue)
    cache = f"tokens in the key-value cache (default: those of {WHOLE_CONTEXTS} whole contexts)"
    parser.add_argument("--cache-tokens", type=int, default=0, metavar="N", help=cache)
    key = "the environment variable with the key that requests must bring"
    parser.add_argument("--api-key-env", default="", metavar="NAME", help=key)
    parser.add_argument("--template", default="", metavar="FILE.jinja", help="another chat template than the model's")
    parser.add_argument("--tokenizer", metavar="T", help="use another tokenizer than the one beside the model")
    add_ema(parser)


def run(args: argparse.Namespace) -> int:
    if min(args.nproc, args.max_running, args.max_open) < 1 or args.cache_tokens < 0:
        raise UserError("--tp, --max-running and --max-open must be at least 1, and --cache-tokens not negative")
    if not 0 <= args.port < 65536:
        raise UserError(f"--port {args.port} is not a port: choose 0 to 65535")
    for library in ("uvicorn", "starlette"):
        if importlib.util.find_spec(library) is None:
            raise UserError(f"serve needs {library}: pip install meshwright[serve]")
    if args.api_key_env and not os.environ.get(args.api_key_env):
        raise UserError(f"--api-key-env {args.api_key_env}: this environment variable is empty or not set")
    name = args.name or Path(str(args.source).split("@")[0]).name
    config = model_config(args)
    model = config.model
    if model.kind_facts.is_encoder_decoder or model.kind_facts.is_foreign or config.objective_facts.fills_blanks:
        raise UserError(f"{args.source} is not a decoder with a description here: use meshwright generate")
    if tokenizer_of(args, config) is None:
        raise UserError("no tokenizer is known for this model: name one with --tokenizer")
    args.name, args.rendered = name, None
    # A model without a template serves completions alone.
    with contextlib.suppress(UserError):
        args.rendered = template_of(args, config)
    if args.rendered is not None:
        replace(args.rendered).render([{"role": "user", "content": "?"}], begins=True)
    return start(args.nproc, serve_rank, args, stops=True)


def serve_rank(args: argparse.Namespace) -> None:
    """Run one rank of the server. Rank 0 also answers HTTP, in a second thread."""
    from meshwright.infer.batching import Batcher
    from meshwright.infer.engine_thread import Engine, RequestChannel, run_batches
    from meshwright.infer.evaluate import with_model
    from meshwright.infer.paged import PAGE
    from meshwright.launch.signals import StopRequests

    def use(ctx: Any, modules: Any, place: Any) -> None:
        model = ctx.config.model
        tokens = args.cache_tokens or min(WHOLE_CONTEXTS, args.max_running) * model.seq
        engine = Engine(args.max_open) if place.rank == 0 else None
        report = engine.report if engine is not None else (lambda key, drawn, is_last: None)
        batcher = Batcher(modules[0], model.vocab, model.seq, tokens // PAGE + 2, args.max_running, report)
        channel = RequestChannel(ctx.mesh.world, place.rank, modules[0].parallel.device)
        with StopRequests() as requests:
            if engine is None:
                run_batches(batcher, None, channel, lambda: False)
                return
            with _listening(args, ctx.config, engine, lambda: requests.seen):
                run_batches(batcher, engine, channel, lambda: requests.seen)

    with_model(args.source, args.sections, use, args.ema)


@contextlib.contextmanager
def _listening(args: argparse.Namespace, config: Any, engine: Any, stopping: Any) -> Iterator[None]:
    """Answer HTTP in a thread until the block ends. All answers are sent before it ends."""
    import uvicorn

    from meshwright.infer.requests import ServedModel
    from meshwright.infer.server import Service
    from meshwright.interop.hf import origin_of

    path, tokenizer = Path(args.source), tokenizer_of(args, config)
    ends = end_tokens(path, tokenizer)
    imported = origin_of(path) is not None
    chat_ends = answer_ends(args.rendered, tokenizer, ends) if args.rendered else ends
    model = ServedModel(
        args.name, tokenizer, args.rendered, config.model.vocab, config.model.seq, frozenset(ends),
        frozenset(chat_ends), imported,
    )  # fmt: skip
    app = Service(engine, model, os.environ.get(args.api_key_env, ""), stopping).app()
    settings = uvicorn.Config(
        app, host=args.host, port=args.port, log_level="warning", access_log=False, lifespan="off",
        timeout_graceful_shutdown=5,
    )  # fmt: skip
    try:
        socket = settings.bind_socket()
    except SystemExit:
        raise UserError(f"port {args.port} of {args.host} can't be used: choose another with --port") from None
    host, port = socket.getsockname()[:2]
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]}, name="http", daemon=True)
    thread.start()
    # The socket is bound, but refuses connections until the server listens on it.
    while not server.started and thread.is_alive():
        time.sleep(LOOK_S)
    if not server.started:
        raise UserError(f"the server could not start on {host}:{port}: see the lines above")
    notice(f"serves {args.name} at http://{host}:{port}/v1 ({'chat and ' if args.rendered else ''}completions)")
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()
