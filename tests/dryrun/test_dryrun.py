"""A dry run of a rank gives the ledger, states and schedule of a real Gloo rank, and those of the plan.

Also tests the command `meshwright dryrun`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.cli.dryrun import compare
from meshwright.cli.main import main
from meshwright.config.sections import Config
from meshwright.device import Device
from meshwright.dryrun.meta_mode import MetaMode, SavedBytes
from meshwright.dryrun.run_rank import RankRun, make_rank, run_rank, state_bytes
from meshwright.dryrun.stand_ins import fake_world
from meshwright.plan import communication
from meshwright.plan.job import checked_job
from meshwright.plan.rank import planned_rank
from meshwright.spec.model.gpt import OutputLayerPart
from meshwright.spec.schedule.table import action_counts
from tests.parity.cases import OFFLOAD
from tests.support.oracle import make_trainer, small_config
from tests.support.ranks import run_ranks

LLAMA = {
    "norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "bias": False, "kv_heads": 2, "tied_embeddings": False,
}  # fmt: skip
SP = {"tp": 2, "sequence_parallel": True}
DISK = {"optimizer": "disk", "params": "disk", "path": OFFLOAD}
BF16 = {"precision": "bf16", "global_batch": 4}
MIXTURE = {**LLAMA, "seq": 32, "experts": {"count": 4, "ffn": 16, "shared": 1, "capacity": 1.0}}
OF_EXPERTS = {"kind": "lora", "rank": 4, "base": "none", "targets": ["q", "expert_gate", "expert_up", "expert_down"]}

CASES: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    "one": (1, {}),
    "dp": (2, {}),
    "pp": (2, {"layout": {"pp": 2}, "train": BF16}),
    "tp-selective": (2, {"layout": {"tp": 2}, "recompute": {"mode": "selective"}, "model": {"vocab": 51}}),
    # Offload to files, because on a real rank of this test the device memory already is the host memory.
    "zero3-offload": (2, {"zero": {"stage": 3, "offload": DISK}, "train": BF16}),
    "glm": (4, {"layout": {**SP, "pp": 2}, "model": {"kind": "glm"}, "train": BF16}),
    "bert": (4, {"layout": {**SP, "pp": 2}, "model": {"kind": "bert"}, "train": BF16}),
    "t5": (4, {
        "layout": {**SP, "pp": 2}, "train": BF16,
        "model": {"kind": "t5", "layers": 6, "seq": 32, "t5": {"encoder_layers": 2, "decoder_seq": 32}},
    }),
    "window": (2, {
        "layout": SP, "train": BF16,
        "model": {**LLAMA, "window": 3, "window_pattern": [1, 0], "norm_place": "sandwich"},
    }),
    "experts-lora": (4, {
        "layout": {**SP, "ep": 2}, "zero": {"stage": 3}, "train": BF16, "model": MIXTURE, "tune": OF_EXPERTS,
    }),
    "zero1": (4, {"zero": {"stage": 1}, "layout": SP, "model": LLAMA}),
    "server": (4, {"train": {"server": {"ranks": 2}}}),
    "zero2": (4, {"zero": {"stage": 2}, "layout": {"pp": 2}, "train": BF16}),
    "groups": (4, {
        "optimizer": {"name": "muon", "groups": [
            {"match": "embedding.*", "optimizer": "lion"}, {"match": "*norm*", "decay": 0.2},
            {"match": "layers.3.mlp.*", "optimizer": "adamw"}, {"match": "layers.0.*", "lr": 2e-3},
        ]},
        "zero": {"stage": 2}, "layout": {"pp": 2}, "train": BF16,
    }),
    "muon": (4, {"optimizer": {"name": "muon"}, "layout": SP, "model": LLAMA, "train": BF16}),
    "muon-zero2": (8, {
        "optimizer": {"name": "muon"}, "zero": {"stage": 2}, "layout": {**SP, "pp": 2}, "model": LLAMA, "train": BF16,
    }),
    "muon-zero3-kv-copies": (8, {
        "optimizer": {"name": "muon"}, "zero": {"stage": 3}, "layout": {**SP, "tp": 4}, "model": LLAMA, "train": BF16,
    }),
    "muon-experts": (4, {
        "optimizer": {"name": "muon"}, "zero": {"stage": 1}, "layout": {**SP, "ep": 2, "etp": 1}, "train": BF16,
        "model": MIXTURE,
    }),
    "adafactor-kv-copies": (4, {
        "optimizer": {"name": "adafactor"}, "zero": {"stage": 1}, "layout": {**SP, "tp": 4}, "model": LLAMA,
        "train": BF16,
    }),
    "soap-zero2": (8, {
        "optimizer": {"name": "soap", "soap": {"max_side": 32}}, "zero": {"stage": 2}, "layout": {**SP, "pp": 2},
        "model": LLAMA, "train": BF16,
    }),
    "soap-experts-offload": (4, {
        "optimizer": {"name": "soap"}, "zero": {"stage": 3, "offload": DISK}, "layout": {**SP, "ep": 2, "etp": 1},
        "train": BF16, "model": MIXTURE,
    }),
    "ema": (4, {"optimizer": {"ema": 0.9}, "zero": {"stage": 2}, "layout": {"pp": 2}, "train": BF16}),
    "lion-offload": (2, {"optimizer": {"name": "lion"}, "zero": {"stage": 3, "offload": DISK}, "train": BF16}),
    "pieces": (2, {"recompute": {"mode": "full", "offload": True, "pieces": 3}, "layout": SP, "train": BF16}),
    "zero3-full": (4, {"zero": {"stage": 3}, "layout": SP, "recompute": {"mode": "full"}, "train": {"micro_batch": 4}}),
    "all": (8, {
        "layout": {**SP, "pp": 2, "chunks": 2}, "pipeline": {"schedule": "interleaved"}, "zero": {"stage": 3},
        "recompute": {"mode": "every:2"}, "train": BF16,
    }),
}  # fmt: skip


def config_of(name: str) -> Config:
    sections = {key: dict(value) for key, value in CASES[name][1].items()}
    sections["model"] = {"layers": 4, "hidden": 16, "heads": 4, "seq": 8, "vocab": 30} | sections.get("model", {})
    sections["train"] = {"precision": "fp32", "global_batch": 8} | sections.get("train", {})
    return small_config(**sections)


def entries(trainer: Any) -> dict[Any, tuple[int, int, int]]:
    """Return the calls, payload bytes and wire bytes of each entry of the ledger."""
    tallies = trainer.ctx.ledger.entries
    return {entry: (tally.calls, tally.payload_bytes, tally.wire_bytes) for entry, tally in tallies.items()}


def facts(trainer: Any) -> dict[str, Any]:
    """Return the properties of a trainer in which a dry rank and a real one must agree."""
    return {
        "ledger": entries(trainer), "states": state_bytes(trainer), "schedule": action_counts(trainer.executor.done),
        "slots": [(s.name, s.start, tuple(s.view.shape)) for b in trainer.data_parallel.buffers for s in b.slots],
    }  # fmt: skip


def real(rank: int, world: int, names: list[str]) -> list[dict[str, Any]]:
    """Train a step of each case on a real rank and return its facts."""
    by_case = []
    for name in names:
        trainer = make_trainer(config_of(name), rank, world)
        trainer.step()
        by_case.append(facts(trainer))
    return by_case


@pytest.fixture(scope="module")
def of_real_ranks() -> dict[str, list[dict[str, Any]]]:
    """Run all cases on real ranks, with one launch per number of ranks. Return the facts of each rank by case."""
    by_case: dict[str, list[dict[str, Any]]] = {}
    for world in sorted({world for world, _ in CASES.values()}):
        names = [name for name, (ranks, _) in CASES.items() if ranks == world]
        by_rank = run_ranks(world, real, names)
        by_case |= {name: [rank[i] for rank in by_rank] for i, name in enumerate(names)}
    return by_case


@pytest.mark.parametrize("name", list(CASES))
def test_a_dry_rank_is_the_real_one(name: str, of_real_ranks: dict[str, list[dict[str, Any]]]) -> None:
    world, config = CASES[name][0], config_of(name)
    for rank in range(world):
        with fake_world(rank, world), MetaMode():
            trainer = make_rank(config, world, rank, Device("meta"))
            trainer.step()
            assert all(slot.parameter.is_meta for buffer in trainer.data_parallel.buffers for slot in buffer.slots)
            assert facts(trainer) == of_real_ranks[name][rank], f"rank {rank}"


@pytest.mark.parametrize("name", list(CASES))
def test_a_dry_rank_is_the_planned_one(name: str) -> None:
    world, config = CASES[name][0], config_of(name)
    for rank in {0, world - 1}:
        one = compare(
            rank, run_rank(config, world, rank, Device("meta")), planned_rank(checked_job(config, world), rank)
        )
        assert one["equal"], one
        # In fp64 and fp32 attention uses other kernels, whose saved activations differ.
        if config.train.precision == "bf16":
            assert one["most"]["activations"]["ratio"] == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("name", ["pp", "zero2", "zero3-full", "all"])
def test_on_a_device_what_others_would_send_is_finite(name: str) -> None:
    """The last rank has finite results on real tensors, though all of its input comes from ranks that do not exist."""
    world, config = CASES[name][0], config_of(name)
    with fake_world(world - 1, world):
        trainer = make_rank(config, world, world - 1, Device("cpu"))
        results = [trainer.step() for _ in range(2)]
    assert trainer.optimizer.updates == 2
    assert all(math.isfinite(result.loss) and math.isfinite(result.grad_norm) for result in results)


def test_a_device_is_timed_and_counts_the_same() -> None:
    config = config_of("zero1")
    ran: RankRun = run_rank(config, 4, 3, Device("cpu"))
    dry = run_rank(config, 4, 3, Device("meta"))
    assert (ran.calls, ran.states, ran.schedule, ran.updated) == (dry.calls, dry.states, dry.schedule, True)
    assert ran.step_s is not None and ran.step_s > 0 and dry.step_s is None
    assert dry.most["peak"] > sum(dry.states.values())


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_updates_though_the_one_that_counts_its_norm_is_absent(stage: int) -> None:
    """The last rank makes an update, though the ranks that contribute the loss and the norm are absent.

    It is the second replica of the second tensor-parallel rank of the last stage, so its own values do not count.
    """
    config = small_config(layout={"tp": 2, "pp": 2}, zero={"stage": stage}, train={"precision": "bf16"})
    assert run_rank(config, 8, 7, Device("cpu")).updated


def test_storages_are_counted_while_they_live() -> None:
    meta = {"device": "meta", "dtype": torch.float32}
    with MetaMode() as dry:
        tally, named = dry.storages.all, dry.storages.named
        a = torch.empty(100, **meta)
        b = a * 2.0
        assert tally.now == 800
        view, again = b[10:].view(9, 10), a * 2.0
        assert tally.now == 1200 and again.shape == a.shape
        del b, again
        assert tally.now == 800, "a view keeps its storage"
        dry.storages.name([a])
        a.untyped_storage().resize_(0)
        assert (tally.now, named.now, named.most) == (400, 0, 400)
        a.untyped_storage().resize_(40)
        assert (tally.now, named.now) == (440, 40)
        del view, a
        assert (tally.now, tally.most, named.now) == (0, 1200, 0)


def test_a_module_that_branches_on_its_data_meets_nothing_unusual() -> None:
    """Conditions on data, such as whether a mask is full or a number overflowed, take their usual branch."""
    with MetaMode():
        x = torch.empty(4, 3, device="meta")
        # The second time, remembered results are used.
        for _ in range(2):
            assert bool((x > 0).all()) and not bool(x.isnan().any())
            assert (x[:, -1] == 0).all().item() and not torch.any(x < 0).item()


def test_results_are_remembered_by_all_that_they_depend_on() -> None:
    meta = {"device": "meta"}
    with MetaMode():
        # The second time, remembered results are used.
        for _ in range(2):
            a, b = torch.empty(4, 6, dtype=torch.bfloat16, **meta), torch.empty(6, 5, dtype=torch.bfloat16, **meta)
            assert (a @ b).shape == (4, 5) and (a.t() @ a).shape == (6, 6)
            assert (a * 2).dtype == torch.bfloat16 and (a * torch.empty(4, 1, **meta)).dtype == torch.float32
            assert a.sum(0).shape == (6,) and a.sum(1).shape == (4,)
            assert a.t().clone().stride() == (1, 6) and a.clone().stride() == (6, 1)
            assert a.view(24).untyped_storage()._cdata == a.untyped_storage()._cdata


def test_saved_tensors_are_counted_once() -> None:
    weight = torch.empty(3, 3, device="meta", requires_grad=True)
    x = torch.empty(5, 3, device="meta", requires_grad=True)
    saved = SavedBytes([weight])
    with saved:
        y = (x @ weight) * x
        assert saved.bytes.now == 2 * 60, "the product, and x only once, though two operators save it"
        y.sum().backward()
    assert (saved.bytes.now, saved.bytes.most) == (0, 120)


CONFIG = """
model: {layers: 4, hidden: 16, heads: 4, vocab: 30, seq: 8}
train: {global_batch: 8, precision: bf16}
"""


@pytest.fixture
def config_file(tmp_path: Path) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG, encoding="utf-8")
    return str(path)


def test_json_holds_every_figure_twice(config_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [config_file, "--world", "8", "--layout", "tp=2,pp=2", "zero.stage=1", "--ranks", "0,7", "--json"]
    assert main(["dryrun", *words]) == 0
    out, err = capsys.readouterr()
    assert "rank 0 of 8 (tp 0, dp 0, pp 0)" in err and "rank 7 of 8 (tp 1, dp 1, pp 1)" in err
    result = json.loads(out)
    assert set(result) == {"model", "world", "device", "equal", "ranks"} and result["equal"]
    assert [one["rank"] for one in result["ranks"]] == [0, 7]
    one = result["ranks"][1]
    assert set(one) == {
        "rank", "coordinate", "layers", "micro_batches", "parameters", "bytes", "comm", "calls", "schedule", "most",
        "updated", "build_s", "run_s", "step_s", "equal",
    }  # fmt: skip
    assert one["layers"] == [2, 3] and one["coordinate"] == {"tp": 1, "cp": 0, "dp": 1, "pp": 1}
    assert set(one["bytes"]) == {"parameters", "gradients", "master", "optimizer"}
    assert set(one["comm"]) == {"tp", "pp", "dp", "embedding", "world"}
    pair = one["comm"]["tp"]
    assert pair["equal"] and pair["ran"] == pair["planned"] and set(pair["ran"]) == {
        "calls", "payload_bytes", "wire_bytes",
    }  # fmt: skip
    assert one["bytes"]["gradients"]["ran"] == 2 * one["bytes"]["parameters"]["ran"]
    assert one["bytes"]["master"]["ran"] == one["bytes"]["parameters"]["ran"] // 2, "remainders, sharded over two ranks"
    assert one["schedule"]["forward"]["ran"] == 4 and set(one["most"]) == {"activations", "gathered", "peak"}


@pytest.mark.parametrize("devices, settings", [
    (3, ["layout.ep=3", "model.experts.count=3", "train.global_batch=3"]),
    (4, ["layout.ep=4", "layout.node_size=2", "comm.algorithm.ep=hierarchical", "model.experts.count=4"]),
])  # fmt: skip
@pytest.mark.parametrize("seq", [8, 9, 11])
def test_rows_that_ep_does_not_divide_are_as_planned(
    config_file: str, devices: int, settings: list[str], seq: int, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["dryrun", config_file, "--devices", str(devices), "model.experts.ffn=8", "model.experts.top_k=1"]
    assert main([*words, f"model.seq={seq}", "layout.etp=1", "train.micro_batch=1", *settings]) == 0
    assert "differs" not in capsys.readouterr().out


@pytest.mark.parametrize("stage", [1, 3])
def test_a_cpus_host_memory_is_its_device(config_file: str, stage: int, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["dryrun", config_file, "--devices", "2", "run.device=cpu", f"zero.stage={stage}"]
    assert main([*words, "zero.offload.optimizer=cpu", *(["zero.offload.params=cpu"] if stage == 3 else [])]) == 0
    assert "differs" not in capsys.readouterr().out


def test_a_difference_is_told(
    config_file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["dryrun", config_file, "--world", "4", "--ranks", "3", "--layout", "tp=2", "--micro-batches", "1"]
    assert main(words) == 0
    assert "differs" not in capsys.readouterr().out
    monkeypatch.setattr(communication, "unit_collectives", communication.unit_collectives.__wrapped__)
    monkeypatch.setattr(OutputLayerPart, "collectives", lambda part, at, batch: iter(()))
    assert main(words) == 1
    out = capsys.readouterr().out
    assert "The run does not equal the plan" in out
    assert [line.split()[:2] for line in out.splitlines() if line.endswith("differs")] == [
        ["tp", "calls"], ["tp", "payload"], ["tp", "wire"],
    ]  # fmt: skip


BAD = {
    "rank outside": (["--world", "8", "--ranks", "0,8"], "8 is not in a world of 8, choose 0 to 7"),
    "not a rank": (["--world", "8", "--ranks", "first"], "numbers with commas"),
    "negative rank": (["--world", "8", "--ranks=-1"], "numbers with commas"),
    "world not divisible": (["--world", "6", "--layout", "tp=4"], "start 4 or 8 ranks"),
    "no world": (["--world", "0"], "start at least 1"),
    "layout that does not fit": (["--world", "8", "--layout", "pp=8"], "lower layout.pp"),
    "unknown axis": (["--world", "8", "--layout", "tq=2"], "did you mean"),
    "dp in the layout": (["--world", "8", "--layout", "dp=8"], "leave it out"),
    "no micro-batches": (["--world", "8", "--micro-batches", "0"], "must be at least 1"),
    "global batch": (["--world", "3"], "try 6 or 9"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_mistakes_are_one_sentence(name: str, config_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, message = BAD[name]
    assert main(["dryrun", config_file, *words]) == 2
    out, err = capsys.readouterr()
    assert not out and message in err and err.count("\n") == 1


def test_an_unknown_model_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dryrun", "gpt3-175", "--world", "8"]) == 2
    assert "did you mean 'gpt3-175b'" in capsys.readouterr().err


GPT3 = ["gpt3-175b", "--world", "1024", "--layout", "tp=8,pp=16", "train.global_batch=1536", "--ranks", "0,512,1023"]
MT_NLG = ["mt-nlg-530b", "--world", "4480", "--ranks", "0,2240,4479"]


def check_large(words: list[str], parameters: list[int], micro_batches: int, capsys: Any) -> None:
    """Run ranks of a large model dry, and compare with the plan and with parameters counted by hand."""
    assert main(["dryrun", *words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["equal"] and [one["parameters"]["ran"] for one in result["ranks"]] == parameters
    for one in result["ranks"]:
        assert one["micro_batches"] == micro_batches == one["schedule"]["backward"]["ran"]
        assert one["most"]["activations"]["ratio"] == pytest.approx(1.0, abs=0.001)
        assert one["most"]["peak"]["ratio"] == pytest.approx(1.0, abs=0.1)


def test_three_ranks_of_gpt3(capsys: pytest.CaptureFixture[str]) -> None:
    """This runs two micro-batches. The wide test below runs whole steps."""
    layer = 12 * 12288**2 // 8 + (3 + 4) * 12288 // 8 + 6 * 12288
    embedding = -(-50257 // 8) * 12288
    first, middle, last = embedding + 2048 * 12288 + 6 * layer, 6 * layer, embedding + 2 * 12288 + 6 * layer
    check_large([*GPT3, "--micro-batches", "2"], [first, middle, last], 2, capsys)


@pytest.mark.wide
def test_whole_steps_of_gpt3_and_mt_nlg(capsys: pytest.CaptureFixture[str]) -> None:
    layer = 12 * 12288**2 // 8 + (3 + 4) * 12288 // 8 + 6 * 12288
    embedding = -(-50257 // 8) * 12288
    ends = [embedding + 2048 * 12288 + 6 * layer, 6 * layer, embedding + 2 * 12288 + 6 * layer]
    check_large(GPT3, ends, 192, capsys)
    h = 20480
    layer, embedding = 12 * h**2 // 8 + 7 * h // 8 + 6 * h, 51200 // 8 * h
    ends = [embedding + 2048 * h + 3 * layer, 3 * layer, embedding + 2 * h + 3 * layer]
    check_large(MT_NLG, ends, 120, capsys)


@pytest.mark.parametrize("losses", [{"aux_loss": 0.1}, {"z_loss": 0.1}, {"aux_loss": 0.1, "router": "sigmoid"}])
def test_nothing_of_a_routers_losses_outlives_its_micro_batch(losses: dict[str, Any]) -> None:
    """The memory of saved activations does not grow with the number of micro-batches in a step.

    An autograd graph that no backward pass runs through would stay.
    """
    experts = {"count": 8, "top_k": 2, "ffn": 16, **losses}
    peaks = set()
    for batch in (2, 16):
        config = small_config(model={**LLAMA, "layers": 2, "experts": experts}, train={"global_batch": batch})
        peaks.add(run_rank(config, 1, 0, Device("meta")).most["activations"])
    assert len(peaks) == 1


@pytest.mark.parametrize(
    ("world", "sections"),
    [
        (1, {"model": LLAMA}), (1, {"recompute": {"mode": "full"}}), (2, {"zero": {"stage": 1}}),
        (2, {"layout": {"pp": 2}}), (2, {"layout": {"pp": 2, "chunks": 2}, "pipeline": {"schedule": "interleaved"}}),
    ],
)  # fmt: skip
def test_gradients_of_one_micro_batch_come_while_activations_go(world: int, sections: dict[str, Any]) -> None:
    """The peak is lower than with gradients allocated all the time, and the plan predicts it.

    With one micro-batch, gradients are allocated during backward while activations are freed.
    """
    model = {"layers": 16, "hidden": 256, "heads": 4, "seq": 128, "vocab": 512} | sections.get("model", {})
    dp = 2 if "zero" in sections else 1
    train = {"precision": "bf16", "micro_batch": 4, "global_batch": 4 * dp}
    config = small_config(**{**sections, "model": model, "train": train})
    for rank in {0, world - 1}:
        ran = run_rank(config, world, rank, Device("meta"))
        planned = planned_rank(checked_job(config, world), rank)
        assert compare(rank, ran, planned)["equal"]
        assert ran.most["peak"] == pytest.approx(planned.most["peak"], rel=0.03)
        if "recompute" not in sections:
            assert ran.most["peak"] < 0.97 * (sum(ran.states.values()) + ran.most["activations"])


@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_keep_their_memory_on_a_cpu(stage: int) -> None:
    """The buffers of gradients stay allocated between steps on a CPU, and the plan predicts it.

    Writing to memory that was returned to the system costs ten times as much as writing to memory that was kept.
    """
    model = {"layers": 16, "hidden": 256, "seq": 128, "vocab": 512}
    train = {"precision": "fp32", "global_batch": 2}
    config = small_config(model=model, train=train, zero={"stage": stage}, run={"device": "cpu"})
    ran = run_rank(config, 2, 0, Device("meta"))
    planned = planned_rank(checked_job(config, 2), 0)
    assert compare(0, ran, planned)["equal"]
    assert ran.most["peak"] == pytest.approx(planned.most["peak"], rel=0.03)
    trainer = make_trainer(small_config(train={"global_batch": 1}, run={"device": "cpu"}))
    for _ in range(2):
        trainer.step()
        trainer.data_parallel.begin(1)
        assert all(bucket.grads.allocated for bucket in trainer.data_parallel.buckets)
