"""The host's work in a step, measured without a GPU.

The models have the layers of BERT-large, T5-large and a GPT. Their tensors are so small that a CPU computes next to
nothing, and they are compiled as on an accelerator.

    python benchmarks/host_time.py                            # all cases
    python benchmarks/host_time.py --cases bert --plain       # and a plain compiled loop (it compiles for minutes)

Every case has the CPU milliseconds of a forward and backward (the lower quartile), those of the forward alone, and the
number of Python functions called. The update is not included: it is one launch per bucket on a GPU, and something else
on a CPU.
"""

from __future__ import annotations

import cProfile
import os
import pstats
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from common import BenchParser, finish  # noqa: E402
from plain_encoders import plain_step  # noqa: E402

from meshwright.bench import step  # noqa: E402
from meshwright.config.load import config_from  # noqa: E402
from meshwright.config.sections import Config  # noqa: E402
from meshwright.device import Device  # noqa: E402
from meshwright.dryrun.stand_ins import fake_world, release  # noqa: E402

TINY = {"hidden": 32, "heads": 2, "ffn": 32, "vocab": 64, "seq": 8, "dropout": 0.0}
CASES: dict[str, dict[str, Any]] = {
    "bert": {"preset": "bert-large", "predictions": 2},
    "t5": {"preset": "t5-large", "head_dim": 16},
    "gpt": {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False},
    "gpt-biases": {"position": "learned", "norm": "layernorm", "mlp": "gelu", "bias": True},
}


def config_of(case: str, layers: int, together: int, compiled: str) -> Config:
    model = {**CASES[case], **TINY, "layers": layers}
    if case == "t5":
        model["t5"] = {"encoder_layers": layers // 2, "decoder_seq": 4}
    train = {"precision": "bf16", "micro_batch": 1, "global_batch": 1, "steps": 10**6, "compile": compiled}
    train |= {"compile_together": together}
    data = {"prefixes": ["made"]}
    run, lr = {"device": "cpu"}, {"schedule": "constant"}
    return config_from({"model": model, "train": train, "data": data, "run": run, "lr": lr})


def quartile_ms(call: Callable[[], object], steps: int, warm: int = 5) -> float:
    for _ in range(warm):
        call()
    times = []
    for _ in range(steps):
        begin = time.process_time()
        call()
        times.append(time.process_time() - begin)
    return 1e3 * sorted(times)[steps // 4]


def functions(call: Callable[[], object], steps: int = 5, top: int = 0) -> int:
    """Return the number of function calls in one call. With `top`, also print where the time goes."""
    profile = cProfile.Profile()
    with profile:
        for _ in range(steps):
            call()
    found = pstats.Stats(profile)
    if top:
        found.sort_stats("tottime").print_stats(top)
        found.sort_stats("cumtime").print_stats(top)
    return int(found.total_calls // steps)  # type: ignore[attr-defined]


def ours(config: Config, steps: int, top: int) -> dict[str, float]:
    with fake_world(0, 1):
        trainer = step.make_trainer(config, Device.choose("cpu"))
        executor, forwards = trainer.executor, []
        real = executor.forward_step

        def forward(*given: Any) -> Any:
            begin = time.process_time()
            found = real(*given)
            forwards.append(time.process_time() - begin)
            return found

        executor.forward_step = forward
        figures = {"host_ms": quartile_ms(trainer.gradients, steps)}
        figures["forward_ms"] = 1e3 * sorted(forwards[-steps:])[steps // 4]
        figures["functions"] = functions(trainer.gradients, top=top)
        release(trainer)
    return figures


def main() -> None:
    parser = BenchParser(__doc__)
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--together", type=int, default=1, help="blocks that are compiled as one graph")
    parser.add_argument("--plain", action="store_true", help="also time a plain compiled loop of BERT and T5")
    parser.add_argument("--compile", choices=["true", "false"], default="true", help="train.compile")
    parser.add_argument("--top", type=int, default=0, help="print this many functions of a profile")
    args = parser.parse(cases=["gpt"], layers=2, steps=2, compile="false")
    torch.set_num_threads(1)
    rows = []
    for case in args.cases:
        config = config_of(case, args.layers, args.together, args.compile)
        figures: dict[str, Any] = {"case": case, "layers": args.layers, **ours(config, args.steps, args.top)}
        torch._dynamo.reset()
        if args.plain and case in ("bert", "t5"):
            work = plain_step(config.model, 1, torch.device("cpu"), update=False)
            figures |= {"plain_ms": quartile_ms(work, args.steps), "plain_functions": functions(work)}
            torch._dynamo.reset()
        rows.append(figures)
    finish(args, rows, rows=rows)


if __name__ == "__main__":
    main()
