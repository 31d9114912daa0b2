"""Structural rules, read from the source: who may talk to other ranks, who names devices, who imports whom."""

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
LINES = 600  # the longest file, since a file should be about one subject
FUNCTION_LINES = 60

# The names of torch.distributed that files outside comm may use. None of them is a collective.
DISTRIBUTED = {
    "device.py": {"ProcessGroupNCCL"},
    "launch/processes.py": {
        "init_process_group", "destroy_process_group", "is_initialized", "get_rank", "get_world_size",
        "DistError",
    },
    "run/pretrain.py": {"is_initialized"},
    "lab/emulate.py": {"get_backend"},
    "dryrun/stand_ins.py": {"init_process_group", "destroy_process_group"},
    "launch/launch.py": {"elastic", "launcher", "TCPStore", "DistError"},
}  # fmt: skip

# A folder imports only from folders below it. Each folder of `spec` counts separately.
LEVELS = {
    "errors": 0, "outside": 1, "disk": 1, "plugins": 1, "device_kinds": 2, "data": 2, "spec.layout": 2, "device": 3,
    "spec.schedule": 4, "kernels": 5, "config": 5, "spec.model": 6, "spec.traffic": 7, "record": 8, "show": 8,
    "comm": 9, "nn": 10, "layers": 11, "models": 11, "engine": 12, "plan": 13, "checkpoint": 14, "interop": 15,
    "launch": 15, "faults": 16, "run": 17, "infer": 18, "check": 19, "dryrun": 19, "watch": 19, "bench": 20,
    "lab": 20, "cli": 21, "library": 22, "__main__": 23,
}  # fmt: skip

# Importing these folders must not load torch, so that planning, reading and drawing start at once.
WITHOUT_TORCH = ("config", "data", "spec", "record", "show", "plan", "watch", "cli")


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def dotted(node: ast.AST) -> str:
    """Return an attribute chain as text, such as `torch.distributed.x`, or an empty string for another expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (head := dotted(node.value)):
        return f"{head}.{node.attr}"
    return ""


@cache
def words(module: ast.Module) -> set[str]:
    """Return every name and attribute chain of a file."""
    return {text for node in ast.walk(module) if (text := dotted(node))}


def imported(module: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield (full name, local name) of everything that a file imports, anywhere in it."""
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
    """Return the first names below `package` that a file uses, however it imports them. `*` stands for unknown uses."""
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


def test_files_and_functions_are_short() -> None:
    places = [PACKAGE, *(PACKAGE.parent / name for name in ("tests", "benchmarks", "examples"))]
    for path in (path for at in places for path in at.rglob("*.py")):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= LINES, f"{path} has more than {LINES} lines"
        longest = max(function_lines(tree(path)), default=(0, ""))
        assert longest[0] <= FUNCTION_LINES, f"{longest[1]} in {path} has more than {FUNCTION_LINES} lines"


def function_lines(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the number of lines and the name of each function, including those inside classes and functions."""
    for node in ast.walk(module):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            yield node.end_lineno - node.lineno + 1, node.name


def test_the_rule_counts_the_lines_of_every_function() -> None:
    source = "class A:\n    def f(self):\n        async def g():\n            pass\n\n        return g\n"
    assert sorted(function_lines(ast.parse(source))) == [(2, "g"), (5, "f")]


def test_nothing_is_unpickled() -> None:
    for path in FILES:
        name, module = name_of(path), tree(path)
        modules = {full.split(".")[0] for full, _ in imported(module)}
        assert not modules & {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}, name
        assert "load" not in used(path, "torch"), name
        assert not any("_object" in each for each in used(path, "torch.distributed")), f"{name}: these unpickle"
        keywords = {node.arg for node in ast.walk(module) if isinstance(node, ast.keyword)}
        assert "allow_pickle" not in keywords, name


def texts(module: ast.Module) -> set[str]:
    """Return the strings of a file, without its docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node.body for node in ast.walk(module) if isinstance(node, documented)]
    docstrings = {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}
    constants = [node for node in ast.walk(module) if isinstance(node, ast.Constant) and id(node) not in docstrings]
    return {node.value for node in constants if isinstance(node.value, str)}


def test_only_the_device_files_name_devices() -> None:
    """A new kind of device is an entry in `device_kinds.py` and a class in `device.py`, or a plugin with both."""
    for path in FILES:
        if path.name in ("device.py", "device_kinds.py"):
            continue
        name, module = name_of(path), tree(path)
        assert not used(path, "torch") & {"cuda", "npu", "xpu", "mps", "accelerator"}, name
        attributes = {node.attr for node in ast.walk(module) if isinstance(node, ast.Attribute)}
        assert not attributes & {"is_cuda", "is_npu", "is_xpu", "is_mps", "ProcessGroupNCCL"}, name
        text = path.read_text(encoding="utf-8")
        assert "torch.cuda" not in text and "torch.npu" not in text, name
        assert not texts(module) & {"cuda", "npu", "nccl", "hccl"}, f"{name}: ask `device_kinds.py`"


# The most comparisons with string literals outside config (220 when this was written). Lower it when there are fewer,
# and never raise it: instead of comparing the name of a kind in several files, give the kind an attribute that answers
# the question.
STRING_COMPARISONS = 250
# Their strings are those of other programs: published tables, pickles and configs.
READ_OTHERS = {"plan/published.py", "interop/torch_files.py", "interop/configs.py"}


def compared_strings(module: ast.Module) -> Iterator[ast.AST]:
    """Yield each comparison of a value with a string literal, or with a tuple, list or set that holds one.

    `"key" in mapping` looks something up and is none.
    """

    def names(node: ast.AST) -> bool:
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            return any(names(element) for element in node.elts)
        return isinstance(node, ast.Constant) and isinstance(node.value, str)

    for node in ast.walk(module):
        if isinstance(node, ast.Compare):
            values = [node.left, *node.comparators]
            for number, op in enumerate(node.ops):
                sides = values[number : number + 2] if isinstance(op, (ast.Eq, ast.NotEq)) else values[number + 1 :][:1]
                if isinstance(op, (ast.Eq, ast.NotEq, ast.In, ast.NotIn)) and any(map(names, sides)):
                    yield node
        elif isinstance(node, ast.MatchValue) and names(node.value):
            yield node


def test_kinds_are_rarely_told_apart_by_their_names() -> None:
    outside = [path for path in FILES if not name_of(path).startswith("config/") and name_of(path) not in READ_OTHERS]
    found = {name_of(path): count for path in outside if (count := len(list(compared_strings(tree(path)))))}
    assert sum(found.values()) <= STRING_COMPARISONS, found


def test_the_rule_sees_comparisons_with_strings() -> None:
    counts = {
        'x == "a"': 1, '"a" != x': 1, 'x in ("a", B)': 1, 'x == "a" == y': 2, '"a" in x': 0, "x == 1": 0,
        "x == (1, 'a')": 1, "match x:\n    case 'a':\n        pass": 1,
    }  # fmt: skip
    assert {source: len(list(compared_strings(ast.parse(source)))) for source in counts} == counts


def folder_of(module: str) -> str:
    """Return the folder that a module below meshwright counts to, or the file if it is beside the folders."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "spec" else parts[0]


def test_imports_go_one_way() -> None:
    for path in FILES:
        folder = folder_of(name_of(path).removesuffix(".py").replace("/", "."))
        if path.name == "__init__.py" and folder in ("__init__", "spec.__init__"):
            continue
        assert folder in LEVELS, f"say in LEVELS where {folder} stands"
        for full, _ in imported(tree(path)):
            if not full.startswith("meshwright."):
                continue
            other = folder_of(full.removeprefix("meshwright."))
            if other in LEVELS and other != folder:
                assert LEVELS[other] < LEVELS[folder], f"{name_of(path)} imports {full}, which stands above it"


def test_the_architecture_page_states_the_same_order() -> None:
    levels: dict[int, list[str]] = {}
    for folder, level in LEVELS.items():
        levels.setdefault(level, []).append(folder.replace(".", "/"))
    order = " ← ".join(", ".join(levels[level]) for level in sorted(levels) if levels[level] != ["__main__"])
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert f"`{order}`" in " ".join(page.split()), f"docs/architecture.md must say `{order}`"


def test_the_architecture_page_lists_every_folder() -> None:
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    listed = {line.split("`")[1].rstrip("/") for line in page.splitlines() if line.startswith("| `") and "/` |" in line}
    assert folders == {name for name in listed if "/" not in name}


def test_what_must_start_fast_does_not_import_torch() -> None:
    modules = [
        name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path in FILES
        if name_of(path).split("/")[0] in WITHOUT_TORCH
    ]
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
        [sys.executable, "-c", source, json.dumps(modules)], capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [], "the first of them that imports torch"
