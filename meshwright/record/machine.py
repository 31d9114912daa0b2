"""Reads the load of this machine from /proc, for a run's machine.jsonl: cores, memory and network. No torch."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

MACHINE_FILE = "machine.jsonl"
PROC = Path("/proc")


class MachineLoad:
    """The load of the machine between two calls of `read`. Systems without /proc have no figures."""

    def __init__(self, proc: Path = PROC) -> None:
        self.proc = proc
        self._before: tuple[float, dict[str, float]] | None = None

    def read(self, now: float) -> dict[str, float]:
        """Return the used share of all cores, the used share of the memory, and the bytes per second of the network.

        Shares of cores and rates are means since the call before, so the first call has none. `now` is in seconds.
        """
        counters = self._cores() | self._network()
        figures = self._memory()
        before, self._before = self._before, (now, counters)
        if before is None or now <= before[0]:
            return figures
        gone = {name: value - before[1][name] for name, value in counters.items() if name in before[1]}
        if gone.get("all", 0.0) > 0:
            figures["cores"] = 1.0 - gone["idle"] / gone["all"]
        for name in ("received", "sent"):
            if name in gone:
                figures[f"{name}_per_s"] = max(0.0, gone[name]) / (now - before[0])
        return figures

    def _cores(self) -> dict[str, float]:
        with suppress(OSError, ValueError, IndexError):
            # user, nice, system, idle, iowait, irq, softirq, steal; guest times are part of user and nice.
            ticks = [float(word) for word in (self.proc / "stat").read_text().split("\n")[0].split()[1:9]]
            return {"all": sum(ticks), "idle": ticks[3] + ticks[4]}
        return {}

    def _memory(self) -> dict[str, float]:
        with suppress(OSError):
            text = (self.proc / "meminfo").read_text()
            found = {name: float(value) for name, value in re.findall(r"(\w+):\s+(\d+) kB", text)}
            if found.get("MemTotal") and "MemAvailable" in found:
                return {"memory": 1.0 - found["MemAvailable"] / found["MemTotal"]}
        return {}

    def _network(self) -> dict[str, float]:
        """Return the bytes of all interfaces but the loopback."""
        received = sent = 0.0
        with suppress(OSError, ValueError, IndexError):
            for line in (self.proc / "net" / "dev").read_text().splitlines()[2:]:
                name, _, rest = line.partition(":")
                if name.strip() != "lo":
                    words = rest.split()
                    received, sent = received + float(words[0]), sent + float(words[8])
            return {"received": received, "sent": sent}
        return {}
