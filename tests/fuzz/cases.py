"""Hostile inputs of every kind. A case damages the files of the current folder and returns the words of a command."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import typing
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import yaml

from meshwright.cli.main import main
from meshwright.config.load import key_of
from meshwright.config.sections import Config
from meshwright.interop.hf import import_folder
from meshwright.plan.cluster import FOLDER
from meshwright.record import checkpoint_format as fmt
from tests.fuzz import hostile
from tests.fuzz.hostile import Raw, json_text
from tests.support.token_files import write_documents

CONFIG = """\
model: {layers: 2, hidden: 32, heads: 4, kv_heads: 2, vocab: 300, seq: 16, norm: rmsnorm, mlp: swiglu, position: rope,
  bias: false, tied_embeddings: false, ffn: 48}
data: {prefixes: [tokens]}
train: {steps: 1, global_batch: 2}
run: {dir: run, device: cpu, tensorboard: false}
"""
STEP = "run/checkpoints/step-00000001"
PART = "rank-00000.safetensors"
SHARDED = "model.safetensors.index.json"
CLUSTER = ["--cluster", "laptop", "--devices", "2"]

Case = Callable[[Random], list[str]]


def make_good(folder: Path) -> None:
    """Create the files that cases damage: token files, a run with one checkpoint, and its weights as a Hugging Face
    folder.
    """
    before = os.getcwd()
    os.chdir(folder)
    try:
        Path("config.yaml").write_text(CONFIG)
        write_documents("tokens", [np.arange(60) % 256] * 20)
        metadata = {"format": "meshwright tokens", "tokenizer": "bytes", "tokenizer_file": None, "vocab_size": 257}
        Path("tokens.json").write_text(json.dumps(metadata | {"eod": 256, "tokenizer_digest": "bytes:0"}))
        assert main(["train", "config.yaml"]) == 0
        assert main(["export", "run", "--to", "hf"]) == 0
        Path("hf/tokenizer.json").unlink(missing_ok=True)
        shutil.copytree("hf", "sharded")
        os.rename("sharded/model.safetensors", "sharded/model-1.safetensors")
        names = json.loads(header_of(Path("hf/model.safetensors"))[0])
        where = {name: "model-1.safetensors" for name in names if name != "__metadata__"}
        Path("sharded", SHARDED).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))
    finally:
        os.chdir(before)


def header_of(path: Path) -> tuple[bytes, bytes]:
    """Return the header of a safetensors file, and the bytes that follow it."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return data[8:end], data[end:]


def damaged(path: Path, random: Random, head: Any = None) -> bytes:
    """Return the content of a JSON file with some values changed, or as broken text."""
    found = json.loads(path.read_bytes() if head is None else head)
    if random.random() < 0.15:
        return hostile.broken_text(json.dumps(found), random)
    return json_text(hostile.mutated(found, random)).encode("utf-8", "surrogatepass")


def readers(random: Random, source: str) -> list[str]:
    """Return a command that reads a run or a Hugging Face folder."""
    commands = [
        ["inspect", source], ["inspect", source, "--json"], ["inspect", source, "--no-verify"],
        ["export", source, "--to", "out"], ["generate", source, "--prompt-tokens", "1,2", "--max-tokens", "2"],
        ["eval", source, "--samples", "1"], ["train", "config.yaml", "--from", source, "run.dir=other"],
        ["train", "config.yaml", "train.steps=2"],
    ]  # fmt: skip
    return random.choice(commands)


def checkpoint_index(random: Random) -> list[str]:
    """Write an index with a valid checksum and changed values."""
    value = json.loads(Path(STEP, fmt.INDEX).read_text())
    value.pop("crc32")
    changed = hostile.mutated(value, random)
    if isinstance(changed, dict):
        changed.setdefault("format", fmt.FORMAT)
    head = json_text(changed).encode("utf-8", "surrogatepass")[:-1]
    Path(STEP, fmt.INDEX).write_bytes(head + fmt.SEAL + f"{zlib.crc32(head)}}}".encode())
    return readers(random, "run")


def tensor_header(random: Random) -> list[str]:
    """Damage the header of a checkpoint's part, or of a file of weights."""
    ours = random.random() < 0.6
    path = Path(STEP, PART) if ours else Path("hf/model.safetensors")
    head, rest = header_of(path)
    changed = damaged(path, random, head)
    length = len(changed) if random.random() < 0.9 else random.choice((0, 7, 2**40, 2**64 - 1))
    path.write_bytes(length.to_bytes(8, "little") + changed + rest)
    if ours and random.random() < 0.9:  # the index has the new size
        value = json.loads(Path(STEP, fmt.INDEX).read_text())
        value.pop("crc32")
        value["files"][PART] = path.stat().st_size
        whole = json.dumps(value).encode()[:-1]
        Path(STEP, fmt.INDEX).write_bytes(whole + fmt.SEAL + f"{zlib.crc32(whole)}}}".encode())
    return readers(random, "run") if ours else ["import", "hf", "--to", "out"]


def hf_folder(random: Random) -> list[str]:
    """Damage a Hugging Face folder: its config.json, its weight map, or its settings of generation or tokenizer."""
    folder, name = random.choice((("hf", "config.json"), ("hf", "config.json"), ("sharded", SHARDED)))
    path = Path(folder, name)
    if random.random() < 0.15:
        name = random.choice(("generation_config.json", "tokenizer.json"))
        (Path(folder) / name).write_text(json_text(hostile.value(random)), encoding="utf-8", errors="surrogatepass")
    else:
        path.write_bytes(damaged(path, random))
    commands = [
        ["import", folder, "--to", "out"], ["import", folder, "--to", "out", f"--seq={random.choice((0, 3, 2**62))}"],
        ["generate", folder, "--prompt-tokens", "1", "--max-tokens", "2"], ["eval", folder, "--data", "tokens"],
        ["export", "run", "--to", "out", "--like", folder],
    ]  # fmt: skip
    return random.choice(commands)


def token_files(random: Random) -> list[str]:
    """Damage token files or their metadata, or write hostile text to prepare."""
    what = random.randrange(4)
    if what == 0:
        Path("tokens.json").write_bytes(damaged(Path("tokens.json"), random))
    elif what == 1:
        data = bytearray(Path("tokens.idx").read_bytes())
        at = random.randrange(len(data) - 8)
        data[at : at + 8] = random.choice((bytes(8), b"\xff" * 8, random.randbytes(8), (2**62).to_bytes(8, "little")))
        Path("tokens.idx").write_bytes(data)
    elif what == 2:
        lines = [json_text({"text": "a good line"}), json_text(hostile.mutated({"text": "x", "n": [1, {}]}, random))]
        Path("in.jsonl").write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass")
        return ["data", "prepare", "in.jsonl", "--out", "made", "--workers", "1"]
    else:
        Path("tokenizer.json").write_text(json_text(hostile.value(random)), encoding="utf-8", errors="surrogatepass")
        Path("in.txt").write_text("some text")
        return ["data", "prepare", "in.txt", "--out", "made", "--workers", "1", "--tokenizer", "tokenizer.json"]
    return random.choice(
        [["train", "config.yaml", "run.dir=other"], ["eval", "run", "--data", "tokens"], ["eval", "run"],
         ["generate", "run", "--prompt", "ab", "--max-tokens", "2"], ["export", "run", "--to", "out"]]
    )  # fmt: skip


def keys_of_config() -> list[tuple[str, Any]]:
    """List every key of a config with its type."""

    def keys(cls: Any, before: str) -> list[tuple[str, Any]]:
        hints, found = typing.get_type_hints(cls), []
        for field in dataclasses.fields(cls):
            kind, name = hints[field.name], f"{before}{key_of(field)}"
            found += keys(kind, f"{name}.") if dataclasses.is_dataclass(kind) else [(name, kind)]
        return found

    return [each for each in keys(Config, "") if each[0] != "extra"]


def word_of(random: Random, sections: Sequence[str] = ()) -> str:
    """Return a `section.key=value` word with a value that is hostile, or nearly right."""
    keys = keys_of_config()
    key, kind = random.choice([each for each in keys if not sections or each[0].startswith(tuple(sections))])
    sizes = (0, 1, 2, 3, 4, 8, 16, 48, 10**6, 2**31, 2**62, -1)
    choices = [str(random.choice(sizes)), f"[{random.choice(sizes)},{random.choice(sizes)},{random.choice(sizes)}]"]
    choices += [str(word) for word in typing.get_args(kind) if isinstance(word, str)] * 2
    choices += ["1e-300", "1e300", "0.5", "every:" + "9" * random.choice((1, 9, 5000)), "true"]
    given = hostile.value(random)
    if isinstance(given, Raw):
        given = given.text
    choices.append(given if isinstance(given, str) else json.dumps(given, default=lambda raw: raw.text[:9000]))
    if random.random() < 0.1:
        key = random.choice((key + "x", key.split(".")[0], key + ".x", "." + key, "x" * 3000 + ".y", "model..layers"))
    return f"{key}={random.choice(choices)}"


def planner(random: Random, target: str) -> list[str]:
    """Return a command that reads a config and runs no step."""
    commands = [
        ["config", "show", target], ["config", "check", target, "--world", str(random.choice((1, 2, 8, 10**12)))],
        ["cost", target, *CLUSTER], ["memory", target, "--world", "2"], ["plan", target, *CLUSTER, "--json"],
        ["simulate", target, *CLUSTER], ["dryrun", target, "--world", "1", "--micro-batches", "1"],
    ]  # fmt: skip
    return random.choice(commands)


def config_words(random: Random) -> list[str]:
    return [*planner(random, "config.yaml"), *(word_of(random) for _ in range(random.choice((1, 1, 2, 3))))]


# Keys that may have any value in a run of one step. None of them sets the model's size or a folder to write to.
TRAINED = (
    "optimizer.", "lr.", "loss_scale.", "comm.", "zero.stage", "zero.shard", "zero.offload.buffer", "recompute.",
    "data.", "checkpoint.every", "checkpoint.keep", "checkpoint.async", "checkpoint.busy", "run.log", "run.eval",
    "train.clip", "train.seed", "train.ramp", "train.micro", "train.precision", "train.grad", "context.",
    "pipeline.", "layout.",
)  # fmt: skip


def train_words(random: Random) -> list[str]:
    words = [word_of(random, TRAINED) for _ in range(random.choice((1, 1, 2)))]
    return ["train", "config.yaml", "run.dir=other", *words]


def config_yaml(random: Random) -> list[str]:
    text = hostile.yaml_text(random, CONFIG)
    Path("config.yaml").write_text(text, encoding="utf-8", errors="surrogatepass")
    return planner(random, "config.yaml")


def cluster_file(random: Random) -> list[str]:
    """Change values of a cluster file. The file is YAML, and JSON is YAML too."""
    raw = yaml.safe_load((FOLDER / "laptop.yaml").read_text(encoding="utf-8"))
    name = f"mine-{random.randrange(10**9)}.yaml"  # a process reads each cluster file only once
    Path(name).write_text(json_text(hostile.mutated(raw, random)), encoding="utf-8", errors="surrogatepass")
    command = random.choice((["cost"], ["simulate"], ["plan", "--json"]))
    return [command[0], "config.yaml", "--cluster", name, "--devices", "2", *command[1:]]


def arguments(random: Random) -> list[str]:
    """Return a command with numbers that are too large, too small, or not numbers at all."""
    numbers = (
        "0", "-1", "1", "2", "3", "7", "64", "1000", "65536", "1000000000", "9" * 30, "9" * 5000, "1.5", "nan", "inf",
        "1e300", "", "x", "²", "0x10", "1_000", "a" * 10_000, "8:16", "8:" + "9" * 20, "1,2,x",
    )  # fmt: skip

    def number() -> str:
        return random.choice(numbers)

    preset, cluster = "gpt2-124m", ["--cluster", "h100-80g-dgx"]
    commands: list[list[str]] = [
        ["plan", preset, *cluster, f"--devices={number()}", f"--global-batch={number()}", "--json"],
        ["plan", preset, *cluster, "--devices=8", "--global-batch=64", f"--seq={number()}", f"--fit={number()}"],
        ["cost", preset, *cluster, f"--devices={number()}", f"--tokens={number()}", f"--layout=tp={number()}"],
        ["scaling", preset, *cluster, f"--devices={number()}", f"--global-batch={number()}"],
        ["memory", preset, f"--world={number()}", f"--rank={number()}", "train.global_batch=64"],
        ["simulate", preset, *cluster, "--devices=8", "train.global_batch=64",
         f"--what-if={random.choice(('slow-link', 'slow-network', 'slow-rank', 'fewer-nodes', 'x'))}={number()}"],
        ["layout", f"--world={number()}", f"--tp={number()}", f"--pp={number()}"],
        ["layout", "--world=16", f"--order={random.choice(('', 'tp', 'tp-tp', 'x' * 9000, 'pp-tp-cp-ep-dp'))}",
         f"--ep={number()}", f"--node-size={number()}"],
        ["schedule", f"--pp={number()}", f"--micro-batches={number()}", f"--chunks={number()}"],
        ["schedule", "--pp=2", "--micro-batches=4", f"--forward={number()}", f"--backward={number()}",
         f"--send={number()}", "--kind=" + random.choice(("1f1b", "gpipe", "interleaved", "", "x" * 9000))],
        ["inspect", f"run@{number()}"], ["generate", "run", f"--prompt-tokens={number()}", f"--max-tokens={number()}"],
        ["generate", "run", "--prompt=ab", f"--temperature={number()}", f"--top-p={number()}", f"--seed={number()}"],
        ["train", "config.yaml", f"--from=run@{number()}", "run.dir=other"], [number()], [random.choice(("plan", "x"))],
        ["config", "show", number()], ["inspect", number()], ["import", number(), f"--to={number()}"],
        ["eval", "run", f"--data={number()}"], ["data", "prepare", number(), "--out=made"],
    ]  # fmt: skip
    return random.choice(commands)


def run_folder(random: Random) -> list[str]:
    """Damage files that a run reads when it continues."""
    name = random.choice(("metrics.jsonl", "validation.jsonl", "run.json", "config.yaml"))
    path = Path("run", name)
    if name == "config.yaml":
        path.write_text(hostile.yaml_text(random, CONFIG), encoding="utf-8", errors="surrogatepass")
    else:
        path.write_bytes(damaged(path, random) + b"\n" * random.randrange(2))
    return ["train", "config.yaml", "train.steps=2"]


def looked_at(random: Random) -> list[str]:
    """Damage files of a run that other commands read, or give hostile options to the command that submits a run."""
    what = random.randrange(4)
    if what == 3:
        words = [f"--{option}={hostile.scalar(random)}" for option in ("nodes", "time", "lead", "name", "setup")]
        asked = [word.replace("\ud800", "")[:20_000] for word in random.sample(words, 2)]
        return ["submit", "config.yaml", random.choice(("--slurm", "--kubernetes")), "--image=i", "--claim=c", *asked]
    names = ("metrics.jsonl", "validation.jsonl", "events.jsonl", "ranks.json", "run.json", "config.yaml")
    path = Path("run", random.choice([name for name in names if Path("run", name).exists()]))
    lines = path.read_bytes().splitlines()
    if path.suffix == ".yaml":
        path.write_text(hostile.yaml_text(random, CONFIG), encoding="utf-8", errors="surrogatepass")
    else:
        at = random.randrange(len(lines))
        lines[at] = damaged(path, random, lines[at])
        path.write_bytes(b"\n".join(lines))
    return random.choice(
        [["status", "run"], ["status", "run", "--json"], ["status", "run", "--verify"], ["watch", "run", "--html=x"]]
    )


def imported(random: Random) -> list[str]:
    """Damage the notes that an import leaves in a checkpoint, or give hostile words for upcycling or tables of runs."""
    if random.random() < 0.3:
        given = random.choice(("count=2,top_k=1", "count=4", "ffn=24"))
        return ["import", "hf", "--to", "out", f"--upcycle={given},{word_of(random).partition('.')[2]}"]
    if random.random() < 0.3:
        cells = [str(hostile.scalar(random)) for _ in range(12)]
        heads = ["name", "model", "cluster", "devices", "tp", "pp", "global_batch", "seconds"]
        Path("runs.csv").write_text(
            ",".join(random.sample(heads, 6)) + "\n" + ",".join(cells), encoding="utf-8", errors="replace"
        )
        return ["predict", "--csv", "runs.csv"]
    import_folder(Path("hf"), Path("imported"))
    path = Path("imported", "hf_origin.json")
    path.write_bytes(damaged(path, random))
    return random.choice(
        [["export", "imported", "--to", "out"], ["inspect", "imported"], ["eval", "imported", "--data", "tokens"],
         ["generate", "imported", "--prompt-tokens=1", "--max-tokens=2"],
         ["export", "run", "--to", "out", "--like", "imported"]]
    )  # fmt: skip


KINDS: dict[str, Case] = {
    "config words": config_words, "words of a run": train_words, "config YAML": config_yaml, "arguments": arguments,
    "cluster files": cluster_file,
    "checkpoint indexes": checkpoint_index, "tensor headers": tensor_header, "Hugging Face folders": hf_folder,
    "token files": token_files, "run folders": run_folder, "imported checkpoints": imported,
    "looks at a run": looked_at,
}  # fmt: skip
