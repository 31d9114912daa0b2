"""The rules of the house, read from the source: who may talk to other ranks, who names devices, who imports whom."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support.waiting import HANG_S

PACKAGE = Path(__file__).parent.parent / "meshwright"
FILES = sorted(PACKAGE.rglob("*.py"))
LINES = 600  # of a file, which should be about one subject

# Outside of comm: what each file may use of torch.distributed, and nothing of it is a collective.
DISTRIBUTED = {
    "launch/processes.py": {
        "init_process_group", "destroy_process_group", "is_initialized", "get_rank", "get_world_size",
        "DistError",
    },
    "run/pretrain.py": {"is_initialized"},
    "dryrun/stand_ins.py": {"init_process_group", "destroy_process_group"},
    "launch/launch.py": {"elastic", "launcher", "TCPStore", "DistError"},
}  # fmt: skip

# A room imports only from rooms below it. `data` needs only the errors, also the disk's, and the reader of JSON; `show`
# is given what it draws; `plan` reads the plain parts of all below it.
LEVELS = {
    "errors": 0, "outside": 1, "disk": 1, "device": 2, "layout": 2, "schedule": 2, "data": 2, "kernels": 2, "parts": 3,
    "config": 3, "comm": 4, "nn": 5, "models": 6, "pipeline": 7, "sharding": 7, "optim": 8, "checkpoint": 9,
    "train": 10, "show": 11, "plan": 12, "dryrun": 13, "watch": 13, "bench": 14, "cli": 15, "__main__": 16,
}  # fmt: skip

WITHOUT_TORCH = [
    *(
        f"{room}.{path.stem}"
        for room in ("plan", "show", "watch")
        for path in sorted((PACKAGE / room).glob("*.py"))
        if path.stem != "__init__"
    ),
    "layout", "layout.params", "layout.rows", "layout.redistribute", "config.load",
    "config.rules", "models.description", "parts.part", "parts.graph", "parts.linear", "parts.gpt", "parts.context",
    "parts.experts",
    "parts.latent", "parts.tuning", "parts.loss_pieces", "parts.bert", "data.masked", "data.packed",
    "data.chat_prepare", "train.datasets",
    "optim.schedules", "comm.ledger", "comm.algorithms", "config.comm", "sharding.algorithms",
    "sharding.reducers", "sharding.compression.sizes", "schedule.table", "schedule.kinds", "schedule.verify",
    "schedule.simulate", "train.run_folder", "bench.models", "bench.fit", "bench.profile", "bench.request",
    "cli.bench", "cli.comm", "cli.ranks", "models.hf", "checkpoint.format",
    "checkpoint.verify", "cli.main", "cli.layout", "cli.schedule", "cli.config", "cli.data", "cli.eval",
    "cli.export", "cli.generate", "cli.import_", "cli.inspect", "cli.train", "pipeline.trace", "cli.cost", "cli.plan",
    "cli.predict", "cli.recipes", "config.recipes", "config.twin", "cli.memory", "cli.merge",
    "cli.simulate", "cli.check", "cli.check_page", "cli.compare", "config.exact_twin",
    "cli.scaling", "cli.common_args", "cli.files", "cli.dryrun",
    "cli.watch", "cli.status", "cli.submit", "cli.replay", "cli.init", "cli.completion", "cli.auto_layout",
    "train.job_files",
    "train.communicators", "comm.communicators",
    "train.run_notes", "train.loggers", "train.rank_figures", "train.speed",
]  # fmt: skip


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def dotted(node: ast.AST) -> str:
    """`torch.distributed.x` of an attribute chain, or an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (head := dotted(node.value)):
        return f"{head}.{node.attr}"
    return ""


@cache
def words(module: ast.Module) -> set[str]:
    """Every name and attribute chain of a file."""
    return {text for node in ast.walk(module) if (text := dotted(node))}


def imported(module: ast.Module) -> Iterator[tuple[str, str]]:
    """(full name, name here) of everything that a file imports, anywhere in it."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, alias.asname or alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", alias.asname or alias.name


@cache
def uses(module: ast.Module, package: str) -> set[str]:
    """The first names below `package` that a file uses, however it imports them; `*` for one that we can't follow."""
    names = {here: full for full, here in imported(module)}
    reached = list(names.values())
    for text in words(module):
        parts = text.split(".")
        head = next((h for n in range(1, len(parts) + 1) if (h := ".".join(parts[:n])) in names), None)
        reached.append(names[head] + text[len(head) :] if head else text)
    below = f"{package}."
    found = {full.removeprefix(below).split(".")[0] for full in reached if full.startswith(below)}
    plain = {here for here, full in names.items() if full == package and here != package}
    parents = {id(node.value) for node in ast.walk(module) if isinstance(node, ast.Attribute)}
    if any(isinstance(n, ast.Name) and n.id in plain and id(n) not in parents for n in ast.walk(module)):
        found.add("*")
    return found


@cache
def used(path: Path, package: str) -> set[str]:
    return uses(tree(path), package)


def test_only_comm_talks_to_other_ranks() -> None:
    for path in FILES:
        if path.parent.name == "comm":
            continue
        found = used(path, "torch.distributed")
        assert found <= DISTRIBUTED.get(name_of(path), set()), f"{name_of(path)}: collectives go through comm.Group"
        assert "c10d" not in path.read_text(encoding="utf-8").replace('rdzv_backend="c10d"', ""), name_of(path)


def test_the_rule_sees_every_way_to_a_collective() -> None:
    ways = [
        "import torch.distributed as dist\ndist.all_reduce(x)",
        "import torch\ntorch.distributed.all_reduce(x)",
        "from torch import distributed\ndistributed.all_reduce(x)",
        "from torch.distributed import all_reduce",
        "def f():\n    from torch.distributed import all_reduce as g",
        "import torch.distributed as dist\ngetattr(dist, 'all_reduce')(x)",
    ]
    for source in ways:
        assert uses(ast.parse(source), "torch.distributed") & {"all_reduce", "*"}, source
    assert uses(ast.parse("import torch.distributed as dist\ndist.is_initialized()"), "torch.distributed") == {
        "is_initialized"
    }


def test_files_are_short() -> None:
    places = [PACKAGE, *(PACKAGE.parent / name for name in ("tests", "benchmarks", "examples"))]
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for at in places for path in at.rglob("*.py")}
    assert not {str(path): count for path, count in lines.items() if count > LINES}, f"more than {LINES} lines"


def test_nothing_is_unpickled() -> None:
    for path in FILES:
        name, module = name_of(path), tree(path)
        modules = {full.split(".")[0] for full, _ in imported(module)}
        assert not modules & {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}, name
        assert "load" not in used(path, "torch"), name
        assert not any("_object" in each for each in used(path, "torch.distributed")), f"{name}: these unpickle"
        keywords = {node.arg for node in ast.walk(module) if isinstance(node, ast.keyword)}
        assert "allow_pickle" not in keywords, name


def test_only_the_device_file_names_devices() -> None:
    for path in FILES:
        if path.name == "device.py":
            continue
        assert not used(path, "torch") & {"cuda", "npu"}, name_of(path)
        text = path.read_text(encoding="utf-8")
        assert "torch.cuda" not in text and "torch.npu" not in text, name_of(path)


def test_imports_go_one_way() -> None:
    for path in FILES:
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        assert room in LEVELS, f"say in LEVELS where the room {room} stands"
        for full, _ in imported(tree(path)):
            parts = full.split(".")
            if parts[0] == "meshwright" and len(parts) > 1 and parts[1] in LEVELS and parts[1] != room:
                assert LEVELS[parts[1]] < LEVELS[room], f"{name_of(path)} imports {full}, which stands above it"


def test_the_architecture_page_states_the_same_order() -> None:
    rooms: dict[int, list[str]] = {}
    for room, level in LEVELS.items():
        rooms.setdefault(level, []).append(room)
    order = " ← ".join(", ".join(rooms[level]) for level in sorted(rooms) if rooms[level] != ["__main__"])
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert f"`{order}`" in " ".join(page.split()), f"docs/architecture.md must say `{order}`"


def test_what_must_start_fast_does_not_import_torch() -> None:
    source = (
        "import importlib, json, sys\n"
        "loads = []\n"
        "for name in json.loads(sys.argv[1]):\n"
        "    importlib.import_module('meshwright.' + name)\n"
        "    if 'torch' in sys.modules:\n"
        "        loads.append(name)\n"
        "        break\n"
        "print(json.dumps(loads))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", source, json.dumps(WITHOUT_TORCH)], capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [], "the first of them that imports torch"
