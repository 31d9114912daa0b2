"""`meshwright cost`: time, communication, bubble and memory of one training step, before it runs. Needs no torch."""

from __future__ import annotations

import argparse
import json

from meshwright.cli.asked import step_arguments, step_asked
from meshwright.errors import UserError
from meshwright.plan import job as jobs
from meshwright.plan.account import as_json, report
from meshwright.plan.cost import predict_cost
from meshwright.plan.show import size, table

MIXED = True
EXAMPLES = """example:
  meshwright cost gpt3-175b --cluster a100-80g-dgx --devices 1024 --layout tp=8,pp=16,recompute=full \\
      train.global_batch=1536 --tokens 300e9
  meshwright cost bloom-176b                      # the published run: its cluster, devices and layout
  meshwright cost config.yaml --cluster h100-80g-dgx --devices 64 --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    step_arguments(parser)
    parser.add_argument("--tokens", metavar="N", help="tokens of the whole run: its days and price too")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    job, workload, cluster, stack = step_asked(args)
    cost = predict_cost(workload, cluster, stack)
    tokens = _number(args.tokens) if args.tokens else None
    counted = jobs.ledger_of(job, workload)
    if args.json:
        ledger = counted and {axis: traffic._asdict() for axis, traffic in counted.items()}
        print(json.dumps({**as_json(cost, tokens), "ledger": ledger}))
        return 0
    print(report(cost, tokens))
    if counted:
        rows = [("all ranks, as metrics.jsonl counts them", "calls", "payload", "wire")]
        for axis, traffic in counted.items():
            rows.append((axis, f"{traffic.calls:,}", size(traffic.payload_bytes), size(traffic.wire_bytes)))
        print(f"\n{table(rows)}")
    return 0


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise UserError(f"--tokens {text} must be a number above zero, e.g. 300e9")
    return value
