"""The table of docs/less-communication.md: savings of each technique on emulated links of two rates, on 4 and 8 ranks.

    python benchmarks/savings.py [--ranks 4 8] [--steps 9]

Each of the four settings is one `meshwright comm savings` of examples/slow-links.yaml: all techniques train on local
ranks in turns, and the planner predicts them. The result is a table in Markdown, the number of predictions within 25 %
of the measurement, and the load of the machine before each setting, since other work makes steps longer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import BenchParser, finish

from meshwright.lab.techniques import saved_share
from meshwright.show.units import percent, seconds

CONFIG = Path(__file__).parent.parent / "examples" / "slow-links.yaml"
RATES = ((0.1, 0.02), (0.04, 0.008))  # GB/s in the node, between nodes
CLOSE = 0.25


def measure(ranks: int, rates: tuple[float, float], steps: int) -> dict[str, Any]:
    """Return each technique's figures by name."""
    link, network = rates
    words = [
        "comm", "savings", str(CONFIG), "--nproc", str(ranks), "--steps", str(steps), "--json", "comm.bucket_mib=2",
        f"train.global_batch={ranks}", f"layout.node_size={ranks // 2}",
        f"comm.emulate.link_gb_s={link}", f"comm.emulate.network_gb_s={network}",
    ]  # fmt: skip
    done = subprocess.run([sys.executable, "-m", "meshwright", *words], stdout=subprocess.PIPE, text=True, check=True)
    return {each["name"]: each for each in json.loads(done.stdout)["techniques"]}


def cell(found: dict[str, Any], name: str) -> tuple[str, float]:
    """Return one technique's figures in one setting, and the relative error of the prediction."""
    each, base = found[name], found["as configured"]["measured"]["step_s"]
    step, planned = each["measured"]["step_s"], each["predicted"]["step_s"]
    off = planned / step - 1.0
    return f"{seconds(step)} ({seconds(planned)}, {100 * off:+.0f} %), {percent(saved_share(base, step))}", off


def bytes_saved(found: dict[str, Any], name: str) -> str:
    base, own = (sum(found[each]["measured"]["sent"].values()) for each in ("as configured", name))
    return percent(saved_share(base, own))


def main() -> None:
    parser = BenchParser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--rates", type=int, default=len(RATES), help="number of link rates to measure")
    args = parser.parse(ranks=[2], steps=1, rates=1)
    settings, found = [(ranks, rates) for ranks in args.ranks for rates in RATES[: args.rates]], []
    for ranks, rates in settings:
        print(f"{ranks} ranks, {rates}: load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
        found.append(measure(ranks, rates, args.steps))
    names = [name for name in found[0] if all(name in each for each in found)]
    titles = [f"{ranks} ranks, {link} / {network}" for ranks, (link, network) in settings]
    print("| technique | bytes saved | " + " | ".join(titles) + " |\n|" + "---|" * (2 + len(titles)))
    offs = []
    for name in names:
        cells = [cell(each, name) for each in found]
        offs += [off for _, off in cells]
        print(f"| {name} | {bytes_saved(found[0], name)} | " + " | ".join(text for text, _ in cells) + " |")
    close = sum(abs(off) <= CLOSE for off in offs)
    print(f"\n{close} of {len(offs)} predictions are within 25 %; the worst is {100 * max(offs, key=abs):+.0f} %")
    keys = ("ranks", "rates", "techniques")
    result = [dict(zip(keys, (*setting, each), strict=True)) for setting, each in zip(settings, found, strict=True)]
    finish(args, result)


if __name__ == "__main__":
    main()
