"""`meshwright cost`: time, communication, bubble and memory of one training step, before it runs. Needs no torch."""

from __future__ import annotations

import argparse
import json

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
    parser.add_argument("target", metavar="CONFIG|PRESET", help="a config file, or the name of a model")
    parser.add_argument("words", nargs="*", metavar="key=value", help="config keys, as for train")
    parser.add_argument("--cluster", metavar="NAME|FILE", help="a cluster that ships, or its YAML file")
    parser.add_argument("--devices", type=int, metavar="N", help="number of devices")
    parser.add_argument("--layout", default="", metavar="tp=8,pp=16,...", help="the layout, in short words")
    parser.add_argument("--stack", metavar="NAME", help="the software stack (default: compiled, as Meshwright is)")
    parser.add_argument("--tokens", metavar="N", help="tokens of the whole run: its days and price too")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    job = jobs.planned(args.target, args.words, args.layout)
    cluster = jobs.cluster_for(job, args.cluster)
    stack = jobs.stack_named(args.stack or job.run.get("stack"))
    workload = job.workload(jobs.devices_for(job, args.devices), cluster.node.devices)
    cost = predict_cost(workload, cluster, stack)
    tokens = _number(args.tokens) if args.tokens else None
    counted = jobs.ledger_of(job, workload.world)
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
