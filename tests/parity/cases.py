"""The cases of the parity tests, and helpers to write them. No torch."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORLDS = (1, 2, 4, 8)
SCHEDULES = ("gpipe", "1f1b", "interleaved")
SPLIT = ("zb-h1", "zb-h2", "zb-v", "v-half", "dualpipev")  # Weight gradients apart from input gradients.
TWO_CHUNKS = ("interleaved", "zb-v", "v-half", "dualpipev")  # Each rank has two stages.

FAMILIES: dict[str, dict[str, Any]] = {
    # GPT-2's shape: layer norms, biases, learned positions.
    "gpt": {"heads": 8, "norm": "layernorm", "mlp": "gelu", "position": "learned", "bias": True},
    # Llama's shape. With two key-value heads, tp = 4 and 8 hold copies of them.
    "llama": {
        "heads": 8, "kv_heads": 2, "norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "bias": False, "ffn": 48,
    },
}  # fmt: skip

# Micro-batches of each data-parallel rank, by pp: enough for a steady state, and not always a multiple of pp.
MICRO_BATCHES = {1: 2, 2: 3, 4: 5, 8: 8}
# In fp32 losses over many steps are compared, so there are fewer micro-batches.
FEWER = {1: 1, 2: 2, 4: 3, 8: 4}

Overrides = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Case:
    """One layout and model. `extra` overrides config keys ("section.key"), `data` arguments of the made samples."""

    dp: int
    tp: int
    pp: int
    sp: bool = False
    schedule: str = "1f1b"
    family: str = "gpt"
    tied: bool = True
    label: str = ""
    extra: Overrides = ()
    data: Overrides = ()
    cp: int = 1

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def name(self) -> str:
        words = [
            f"dp{self.dp}", f"tp{self.tp}", f"pp{self.pp}", "sp" if self.sp else "", self.schedule, self.family,
            "tied" if self.tied else "untied", self.label,
        ]  # fmt: skip
        return "-".join(word for word in words if word)

    @property
    def fp32_steps(self) -> int:
        """The number of losses to compare in fp32. These steps take most of a case's time, and only the layout decides
        whether rounding stays small over many of them. Cases that differ in something else get a few.
        """
        return 4 if self.label else 20

    def sections(self, precision: str) -> dict[str, dict[str, Any]]:
        """Return the config's sections, for `small_config`."""
        chunks = 2 if self.schedule in TWO_CHUNKS else 1
        count = (FEWER if precision == "fp32" else MICRO_BATCHES)[self.pp]
        sections: dict[str, dict[str, Any]] = {
            "model": {
                "layers": max(2, self.pp * chunks), "hidden": 32, "vocab": 53, "seq": 16,
                "tied_embeddings": self.tied, **FAMILIES[self.family],
            },
            "layout": {"tp": self.tp, "pp": self.pp, "sequence_parallel": self.sp, "chunks": chunks},
            "pipeline": {"schedule": self.schedule},
            # The norm is about 1.3, so every step is clipped.
            "train": {
                "precision": precision, "global_batch": self.dp * count, "micro_batch": 1,
                "steps": 20, "clip": 0.7,
            },
            "optimizer": {"lr": 1e-3},
            "lr": {"warmup": 5},
            "comm": {"bucket_mib": 0.02},
        }  # fmt: skip
        for path, value in self.extra:
            *above, key = path.split(".")
            section: dict[str, Any] = sections
            for name in above:
                section = section.setdefault(name, {})
            section[key] = value
        sections["run"] = {"eval_samples": sections["train"]["global_batch"]}
        return sections

    def alone(self, precision: str) -> dict[str, dict[str, Any]]:
        """Return the same run on one process: no layout, no pipeline, and as few micro-batches as possible."""
        sections = self.sections(precision)
        sections["layout"], sections["pipeline"] = {}, {}
        sections.pop("context", None)
        sections.pop("zero", None)
        sections.pop("recompute", None)
        train = sections["train"]
        train["micro_batch"] = train["ramp"][0] if "ramp" in train else train["global_batch"]
        return sections


def case_of_kind(label: str, dp: int, tp: int, pp: int, data: dict[str, Any] | None, given: dict[str, Any]) -> Case:
    """Return a case of another kind of model. Keys of `given` that have a dot are keys of the config."""
    extra = tuple((key, value) for key, value in given.items() if "." in key)
    own = {key: value for key, value in given.items() if "." not in key}
    return Case(dp, tp, pp, label=label, extra=extra, data=tuple((data or {}).items()), **own)


def layouts(world: int) -> Iterator[tuple[int, int, int, bool]]:
    """Yield (dp, tp, pp, sequence parallel) for every way to cut `world` ranks."""
    sizes = [n for n in range(1, world + 1) if world % n == 0]
    for tp in sizes:
        for pp in sizes:
            if world % (tp * pp) == 0:
                for sp in (False, True) if tp > 1 else (False,):
                    yield world // (tp * pp), tp, pp, sp


def special(label: str, case: dict[str, Any], data: dict[str, Any] | None = None, **extra: Any) -> Case:
    """Return a labelled case. The keys of `extra` are written section__key."""
    overrides = tuple((key.replace("__", "."), value) for key, value in extra.items())
    return Case(**case, label=label, extra=overrides, data=tuple((data or {}).items()))


def cut(dp: int, tp: int, pp: int, **more: Any) -> dict[str, Any]:
    return {"dp": dp, "tp": tp, "pp": pp, **more}


def rope(kind: str, original: int, **more: float) -> dict[str, Any]:
    return {"kind": kind, "factor": 4.0, "original": original, **more}


LLAMA = {"family": "llama"}
YARN = rope("yarn", 8, beta_fast=2.0, beta_slow=0.1)
INTERLEAVED = {"schedule": "interleaved"}
BLOOM: dict[str, Any] = {"model__position": "alibi", "model__embedding_norm": True}
OFFLOAD = str(Path(tempfile.gettempdir()) / "meshwright-offload-tests")
# Muon's iterations in bf16 would differ between layouts.
MUON: dict[str, Any] = {
    "optimizer__name": "muon", "optimizer__muon__precision": "fp32", "optimizer__muon__adamw_lr": 5e-4,
}  # fmt: skip
# These cases have no biases, as Lion's: an update that is divided by its own size follows the rounding of zeros.
ADAFACTOR: dict[str, Any] = {"optimizer__name": "adafactor", "optimizer__lr": 1e-3}
# SOAP divides the elements of a rotated gradient by their own sizes. Rotation rounds small elements by the size of the
# large ones, so a small eps would amplify rounding.
SOAP: dict[str, Any] = {"optimizer__name": "soap", "optimizer__soap__every": 2, "optimizer__eps": 1e-5}
HEADS: dict[str, Any] = {"optimizer__muon__per_head": True}
