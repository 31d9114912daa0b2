"""Generation with a key-value cache: the time of the last token against the first, with the cache and without it.

The benchmark also compares tokens/s with transformers' own greedy generation of the same weights. The three take turns,
round by round, in one process. With the cache the last token should cost little more than the first, since it reads the
keys and values of all tokens before it in addition to all weights. Without the cache it costs the whole text.

    python benchmarks/generate.py
    python benchmarks/generate.py --tokens 1024 --hidden 512 --json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import BenchParser, finish

from meshwright.checkpoint.hf_files import HFFolder
from meshwright.checkpoint.load import load_weights
from meshwright.config.load import config_from
from meshwright.device import Device
from meshwright.engine.context import build_context
from meshwright.engine.providers import model_provider
from meshwright.infer.generate import Generator
from meshwright.interop.hf import config_of
from meshwright.models.graph_stage import GraphStage
from meshwright.run.pretrain import build_modules

VOCAB = 8192
NEAR = 16  # tokens at either end, of whose times the median is taken


def make_models(args: argparse.Namespace) -> tuple[GraphStage, Any]:
    """Return a Llama with random weights, as our model and as transformers'."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=args.hidden, num_hidden_layers=args.layers, num_attention_heads=args.hidden // 64,
        num_key_value_heads=args.hidden // 64, intermediate_size=4 * args.hidden, vocab_size=VOCAB,
        max_position_embeddings=args.tokens + 1, initializer_range=0.1,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.generation_config.eos_token_id = None
    with tempfile.TemporaryDirectory() as name:
        theirs.save_pretrained(name)
        folder = HFFolder(Path(name))
        sections = config_of(folder.model) | {"run": {"device": "cpu"}, "train": {"global_batch": 1}}
        ctx = build_context(config_from(sections), 0, 1, Device("cpu"))
        (module,) = build_modules(ctx, model_provider)
        load_weights([module], folder)
    assert isinstance(module, GraphStage)
    return module, theirs


def with_cache(module: GraphStage, count: int) -> tuple[list[int], list[float]]:
    """Return a greedy text after token 1, and the seconds of each of its tokens."""
    generator = Generator(module, VOCAB, count + 1)
    tokens, seconds = [1], []
    for _ in range(count):
        begin = time.perf_counter()
        tokens.append(int(generator.next_logits(tokens[-1:]).argmax()))
        seconds.append(time.perf_counter() - begin)
    return tokens[1:], seconds


def whole(module: GraphStage, ids: list[int]) -> float:
    """Return the seconds of the token after `ids` without a cache."""
    begin = time.perf_counter()
    Generator(module, VOCAB, len(ids)).next_logits(ids).argmax()
    return time.perf_counter() - begin


def by_transformers(model: Any, count: int) -> tuple[list[int], float]:
    ids = torch.ones((1, 1), dtype=torch.long)
    begin = time.perf_counter()
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
        )
    return out[0, 1:].tolist(), time.perf_counter() - begin


def measure(args: argparse.Namespace) -> dict[str, Any]:
    module, model = make_models(args)
    rows: dict[str, list[float]] = {"cached": [], "uncached": [], "speed": [], "first_ms": [], "last_ms": []}
    for number in range(args.rounds + 1):
        mine, seconds = with_cache(module, args.tokens)
        theirs, their_seconds = by_transformers(model, args.tokens)
        assert mine == theirs, "both write the same text"
        ids = [1, *mine]
        first, last = (statistics.median(part) for part in (seconds[1 : NEAR + 1], seconds[-NEAR:]))
        alone = statistics.median(whole(module, ids[:n]) for n in range(1, NEAR + 1))
        at_end = statistics.median(whole(module, ids[:n]) for n in range(args.tokens - 2, args.tokens + 1))
        if number:  # the first round warms up
            found = (last / first, at_end / alone, their_seconds / sum(seconds), 1e3 * first, 1e3 * last)
            for key, value in zip(rows, found, strict=True):
                rows[key].append(value)
        print(f"  round {number}/{args.rounds}", end="\r", file=sys.stderr, flush=True)
    return {"tokens": args.tokens, "rounds": args.rounds} | {k: statistics.median(v) for k, v in rows.items()}


def main() -> None:
    parser = BenchParser(__doc__)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    args = parser.parse(tokens=4, rounds=1, layers=1, hidden=64)
    torch.set_num_threads(1)
    r = measure(args)
    print(
        f"token {r['tokens']} against token 1, median of {r['rounds']} rounds: {r['cached']:.2f} x the time with the "
        f"cache ({r['first_ms']:.1f} and {r['last_ms']:.1f} ms), {r['uncached']:.1f} x without it; against "
        f"transformers' generation of the same weights: {r['speed']:.2f} x tokens/s"
    )
    finish(args, r)


if __name__ == "__main__":
    main()
