"""Random models on random layouts. A case is drawn from a seed and its number, so that it can be drawn again."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random
from typing import Any

Sections = dict[str, dict[str, Any]]

# Sections that divide the work over ranks. The others describe the training, which one process can do as well.
SHARING = ("layout", "zero", "context", "pipeline", "recompute", "comm")
VOCAB, STEPS = 53, 3


@dataclass
class Case:
    """One model and one layout.

    `against` says with which run the result is compared: a run of one process, or a second run like it ("itself").
    `then` says how the run is interrupted: not at all, resumed on the same layout or on `other`, or stopped by SIGTERM.
    """

    name: str
    world: int
    sections: Sections
    against: str = "one process"
    then: str = ""
    other: tuple[int, Sections] | None = None
    hf: str = ""  # a family of transformers whose own module is wrapped
    dry: bool = False
    notes: list[str] = field(default_factory=list)


def draw(seed: int | str, number: int) -> Case:
    """Return case `number` of a seed."""
    random = Random(f"layouts {seed} {number}")
    kind = random.choices(
        ["dense", "experts", "latent", "bert", "t5", "glm", "adapters", "preference", "chat", "hf"],
        [30, 16, 6, 8, 8, 8, 10, 6, 5, 3],
    )[0]
    case = Case(f"{seed}:{number} {kind}", 1, {})
    made = {"dense": _dense, "adapters": _dense, "chat": _dense, "preference": _dense, "experts": _experts,
            "latent": _latent, "bert": _bert, "t5": _t5, "glm": _glm, "hf": _wrapped}[kind]  # fmt: skip
    case.sections["model"] = made(random, case)
    case.sections["data"] = {"prefixes": ["made"]}
    if kind in ("adapters", "chat", "preference"):
        _tuning(random, case, kind)
    case.sections["optimizer"] = {"lr": 1e-2} | random.choice([{}, {"weight_decay": 0.0}, {"betas": [0.9, 0.95]}])
    case.sections["train"] = {"steps": STEPS, "precision": "fp64", "clip": random.choice([0.0, 1.0, 0.05])}
    case.world, sharing = _layout(random, case)
    case.sections |= sharing
    _variants(random, case)
    _batches(random, case)
    # The plan of a parameter server states the mean of all ranks, which a dry run of single ranks does not show.
    case.dry = random.random() < 0.2 and "server" not in case.sections["train"]
    if kind == "dense" and case.against == "one process" and not case.then and random.random() < 0.04:
        case.sections["train"]["compile"] = True  # the reference, one process, does not compile
    return case


def _common(random: Random) -> dict[str, Any]:
    heads = random.choice([2, 4, 4, 4, 6, 8])
    model: dict[str, Any] = {
        "layers": random.choice([1, 2, 2, 3, 4]), "heads": heads, "hidden": heads * random.choice([2, 4, 8]),
        "vocab": VOCAB, "seq": random.choice([8, 16, 16, 24]), "tied_embeddings": random.random() < 0.5,
    }  # fmt: skip
    return model


def _gpt(random: Random) -> dict[str, Any]:
    model = _common(random)
    model |= {"norm": random.choice(["layernorm", "rmsnorm"]), "bias": random.random() < 0.5}
    if random.random() < 0.25:
        model["norm_place"] = random.choice(["post", "deep", "sandwich"])
    elif random.random() < 0.15:
        model["parallel_residual"] = True
    model["mlp"] = random.choice(["gelu", "relu", "swiglu", "geglu", "reglu", "gelu_tanh"])
    if model["mlp"].endswith("glu"):
        model["ffn"] = random.choice([24, 32, 48])
    model["position"] = random.choice(["learned", "rope", "rope", "alibi", "none"])
    if model["position"] == "rope" and random.random() < 0.2:
        model["rotary_fraction"] = 0.5 if model["hidden"] // model["heads"] >= 4 else 1.0
    if random.random() < 0.1:
        model["embedding_norm"] = True
    if random.random() < 0.1:
        model["embedding_grad"] = 0.1
    return model


def _dense(random: Random, case: Case) -> dict[str, Any]:
    model = _gpt(random)
    model["kv_heads"] = random.choice([n for n in range(1, model["heads"] + 1) if model["heads"] % n == 0])
    if random.random() < 0.25:
        model["window"] = random.choice([2, 3, 5, 8])
        if model["layers"] > 1 and random.random() < 0.5:
            model["window_pattern"] = [1, 0]
    if not model["bias"] and random.random() < 0.3:
        model["qkv_bias"] = True
    if random.random() < 0.25:
        model["qk_norm"] = True
        model["qk_norm_over"] = random.choice(["head", "all"])
    return model


def _experts(random: Random, case: Case) -> dict[str, Any]:
    model = _dense(random, case) if random.random() < 0.8 else _latent(random, case)
    count = random.choice([2, 4, 4, 6, 8])
    experts: dict[str, Any] = {"count": count, "top_k": random.choice([1, 2]), "ffn": random.choice([8, 16, 24])}
    experts |= random.choice([{}, {"aux_loss": 0.01}, {"aux_loss": 0.01, "z_loss": 0.001}])
    if experts.get("aux_loss") and random.random() < 0.2:
        experts["aux_level"] = "batch"
    experts |= random.choice([{}, {}, {"router": "sigmoid", "bias_balance": 0.01}, {"shared": 1}, {"scale": 2.0}])
    if random.random() < 0.3:
        experts["capacity"] = random.choice([0.5, 1.0, 1.25, 8.0])
    if count % 2 == 0 and count >= 4 and random.random() < 0.2:
        experts |= {"groups": 2, "groups_used": random.choice([1, 2])}
    if model["layers"] > 1 and random.random() < 0.3:
        experts |= random.choice([{"every": 2}, {"first_dense": 1}])
    return model | {"experts": experts, "bias": False}


def _latent(random: Random, case: Case) -> dict[str, Any]:
    model = _gpt(random) | {"position": "rope"}
    model.pop("rotary_fraction", None)
    latent = {"kv_rank": random.choice([4, 8]), "q_rank": random.choice([0, 6]), "nope_dim": 4, "rope_dim": 4,
              "v_dim": random.choice([4, 8])}  # fmt: skip
    return model | {"latent": latent}


def _bert(random: Random, case: Case) -> dict[str, Any]:
    model = _common(random) | {"kind": "bert", "position": random.choice(["learned", "rope"])}
    if random.random() < 0.5:
        model |= {"token_types": 2, "pooler": random.random() < 0.5}
    return model


def _t5(random: Random, case: Case) -> dict[str, Any]:
    model = _common(random) | {"kind": "t5"}
    model["layers"] = random.choice([2, 3, 4])
    model["mlp"] = random.choice(["relu", "tanh_geglu"])
    return model | ({"ffn": 32} if model["mlp"] != "relu" else {})


def _glm(random: Random, case: Case) -> dict[str, Any]:
    model = _common(random) | {"kind": "glm", "position": random.choice(["rope", "learned"])}
    return model | random.choice([{}, {"norm_place": "deep"}, {"mlp": "geglu", "ffn": 32}])


def _wrapped(random: Random, case: Case) -> dict[str, Any]:
    case.hf = random.choice(["granite", "llama", "qwen2"])
    return {"kind": "hf", "seq": 16}


def _tuning(random: Random, case: Case, kind: str) -> None:
    model, tune = case.sections["model"], {}
    if kind == "adapters" or random.random() < 0.6:
        tune = {"kind": random.choice(["lora", "lora", "dora"]), "rank": random.choice([2, 4])}
        tune |= random.choice([{}, {}, {"targets": ["q", "v"]}, {"modules_to_save": ["embedding"]}])
        if tune["kind"] == "lora" and random.random() < 0.25:
            tune["quantise"] = "nf4"
            # nf4 packs blocks of 64 values of a tp rank's rows and inputs, so the model must be larger.
            model |= {"heads": 8, "kv_heads": 8, "hidden": 128, "ffn": 256, "position": "rope"}
            model.pop("rotary_fraction", None)
    if kind == "preference":
        tune.pop("modules_to_save", None)
        tune["loss"] = random.choice(["dpo", "ipo", "kto"] if tune else ["orpo", "simpo"])
    if kind != "adapters":
        model["seq"] = 24
        if model["position"] == "alibi":
            model["position"] = "rope"
        case.sections["data"] |= {"objective": kind}
    if tune:
        case.sections["tune"] = tune


def _layout(random: Random, case: Case) -> tuple[int, Sections]:
    """Draw a number of ranks and how they share the model. The rules of the config decide whether they can."""
    model = case.sections["model"]
    world = random.choice([2, 2, 3, 4, 4, 4, 6, 8, 8])
    left, sizes = world, {"tp": 1, "cp": 1, "pp": 1}
    # tp is listed twice, so that it is drawn more often.
    for axis in random.sample(["tp", "tp", "cp", "pp"], 4):
        most = min(left, model.get("layers", 2)) if axis == "pp" else left
        if sizes[axis] == 1 and random.random() < 0.45:
            sizes[axis] = random.choice([n for n in range(1, most + 1) if left % n == 0])
            left //= sizes[axis]
    if model.get("kind") in ("bert", "glm", "t5") and random.random() < 0.9:
        sizes["cp"] = 1
    layout: dict[str, Any] = {axis: n for axis, n in sizes.items() if n > 1}
    found: Sections = {"layout": layout, "comm": {"bucket_mib": random.choice([0.001, 0.02, 25.0])}}
    if sizes["tp"] > 1 and random.random() < 0.4:
        layout["sequence_parallel"] = True
    grids = not case.hf and model.get("kind", "gpt") in ("gpt", "glm") and "tune" not in case.sections
    if grids and not {"experts", "latent"} & model.keys() and sizes["tp"] in (2, 4, 8) and random.random() < 0.3:
        _grid(random, sizes["tp"], layout)
    if sizes["cp"] > 1:
        found["context"] = {"kind": random.choice(["auto", "gather", "ring", "ulysses"]),
                            "order": random.choice(["zigzag", "striped", "contiguous", "documents"])}  # fmt: skip
        if sizes["cp"] == 4 and random.random() < 0.5:
            found["context"] |= {"kind": "hybrid", "inner": 2}
    _pipeline(random, model, sizes["pp"], found)
    _expert_axes(random, model, world // sizes["pp"], sizes["tp"], layout)
    if random.random() < 0.5:
        found["zero"] = {"stage": random.choice([1, 2, 3])}
        if random.random() < 0.2:
            found["zero"]["offload"] = {"optimizer": "cpu"}
    if random.random() < 0.25 and not case.hf:
        found["recompute"] = {"mode": random.choice(["selective", "full", "every:2"])}
    if world in (4, 8) and random.random() < 0.2:
        layout["node_size"] = 2
        if "zero" in found and random.random() < 0.5:
            found["zero"]["shard_group"] = "node"
        elif layout.get("ep") == 4:
            found["comm"]["algorithm"] = {"ep": "hierarchical"}
    if random.random() < 0.1:
        found["comm"]["algorithm"] = random.choice(["ring", "tree", "halving_doubling", "mesh"])
    return world, found


def _grid(random: Random, tp: int, layout: dict[str, Any]) -> None:
    layout.pop("sequence_parallel", None)
    two = [[row, tp // row] for row in range(1, tp + 1) if tp % row == 0]
    three = [[*pair, 2] for row in range(1, tp // 2 + 1) if tp // 2 % row == 0 for pair in [(row, tp // 2 // row)]]
    if random.random() < 0.5:
        layout["tp_grid"] = random.choice(two)
    else:
        layout |= {"tp_grid": random.choice(three), "tp_kind": random.choice(["2.5d", "3d"])}


def _pipeline(random: Random, model: dict[str, Any], pp: int, found: Sections) -> None:
    if pp == 1:
        return
    found["pipeline"] = {"schedule": random.choice(["1f1b", "gpipe"])}
    if model.get("layers", 2) >= 2 * pp and random.random() < 0.4:
        found["layout"]["chunks"] = 2
        found["pipeline"] = {"schedule": "interleaved"}


def _expert_axes(random: Random, model: dict[str, Any], ranks: int, tp: int, layout: dict[str, Any]) -> None:
    if "experts" not in model:
        return
    if random.random() < 0.5:
        layout["etp"] = random.choice([n for n in range(1, tp + 1) if tp % n == 0])
    room = ranks // (layout.get("etp") or tp)
    choices = [n for n in range(1, room + 1) if room % n == 0 and model["experts"]["count"] % n == 0]
    if (ep := random.choice(choices)) > 1:
        layout["ep"] = ep


def _variants(random: Random, case: Case) -> None:
    """Draw features that can't be compared with one process, and how a run is interrupted."""
    drawn, train = random.random(), case.sections["train"]
    if drawn < 0.06 and not case.hf:
        case.sections["model"]["dropout"] = 0.1
        case.against = "itself"
    elif drawn < 0.18:
        kind = random.choice(["bf16", "fp8", "int8", "int4", "onebit", "powersgd", "topk", "threshold", "adaptive"])
        reduce = {"adaptive": True} if kind == "adaptive" else {"kind": kind}
        case.sections["comm"] = {"bucket_mib": 0.02, "reduce": reduce}
        case.against = "itself"
    elif drawn < 0.22:
        case.sections.pop("zero", None)
        case.sections["comm"] = {"bucket_mib": 0.02}
        train["server"] = {"ranks": 1, "staleness": random.choice([0, 1, 2])}
        case.against = "itself" if train["server"]["staleness"] else "one process"
    elif drawn < 0.27 and case.world % 2 == 0 and case.world > 2:
        case.sections["layout"]["replicas"] = 2
        train["local"] = {"steps": random.choice([1, 2])}
        train["local"] |= random.choice([{}, {"compress": {"kind": "topk"}}, {"fragments": 2}])
        case.against = "itself"
    case.then = random.choices(["", "same", "other", "SIGTERM"], [50, 15, 25, 10])[0]
    if case.then == "other" and case.against == "one process":
        case.other = _layout(random, case)
    elif case.then == "other":
        case.then = "same"


def _batches(random: Random, case: Case) -> None:
    """Set batch sizes that the ranks of all of a case's layouts can divide."""
    shares = []
    for world, sections in [(case.world, case.sections), *([case.other] if case.other else [])]:
        layout = sections["layout"]
        shares.append(max(1, world // math.prod(layout.get(axis, 1) for axis in ("tp", "cp", "pp"))))
    micro, unit = random.choice([1, 1, 2, 2, 3, 4]), math.lcm(*shares)
    batch = micro * unit * random.choice([1, 1, 2, 2, 3])
    case.sections["train"] |= {"micro_batch": micro, "global_batch": batch}
    if random.random() < 0.1:
        case.sections["train"]["ramp"] = [micro * unit, micro * unit, 2 * batch]
    case.sections["run"] = {"eval_every": STEPS, "eval_samples": micro * unit}


def merged(base: Sections, given: dict[str, Any]) -> Sections:
    """Return the sections with the advised values, whose keys have dots."""
    found = {name: dict(keys) for name, keys in base.items()}
    for key, value in given.items():
        *path, last = key.split(".")
        inside: dict[str, Any] = found
        for name in path:
            inside[name] = dict(inside.get(name, {}))
            inside = inside[name]
        inside[last] = value
    return found
