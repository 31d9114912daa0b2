"""The planner against a sample of published runs. Each line of the table names the paper or page of its facts."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.errors import UserError
from meshwright.plan.cluster import load_cluster
from meshwright.plan.cost import predict_cost
from meshwright.plan.mixtures import is_mixture
from meshwright.plan.predictions import report, summary
from meshwright.plan.published import TABLE as SHIPPED
from meshwright.plan.published import (
    CannotTake,
    Prediction,
    case_of,
    cluster_of,
    network_gb_s,
    predict_row,
    read_rows,
    stack_of_row,
)
from meshwright.plan.stack import STACKS, Stack
from meshwright.spec.model.graph import active_parameters, parameter_count
from tests.support.waiting import HANG_S

TABLE = Path(__file__).parent / "published.csv"
SCHEDULES = SHIPPED.with_name("published_schedules.csv")


@pytest.fixture(scope="module")
def predictions() -> list[Prediction]:
    return [predict_row(row) for row in read_rows(TABLE)]


def mean_error(predictions: list[Prediction], prefix: str) -> float:
    errors = [abs(p.error) for p in predictions if p.id.startswith(prefix) and p.error is not None]
    assert errors
    return sum(errors) / len(errors)


@pytest.mark.parametrize(("prefix", "bar"), [("ko22", 0.04), ("sc21-t1", 0.08), ("", 0.10)])
def test_step_times_are_close(predictions: list[Prediction], prefix: str, bar: float) -> None:
    assert mean_error(predictions, prefix) <= bar


def test_memory_is_close_and_out_of_memory_is_foreseen(predictions: list[Prediction]) -> None:
    found = summary(predictions)
    assert found["memory"]["all"]["mean_abs_error"] < 0.10
    assert found["out_of_memory_predicted_to_fit"] == []
    assert found["ran_predicted_not_to_fit"] == []
    assert any(p.case is not None and p.case.outcome == "oom" for p in predictions)


def test_rows_that_cannot_be_taken_say_why(predictions: list[Prediction]) -> None:
    reasons = {p.id: p.reason for p in predictions if p.reason}
    assert "recompute" in reasons["zb-1.5b-m24-1f1b-i"]
    assert len(reasons) == 1
    row = next(row for row in read_rows(TABLE) if row["id"].startswith("dgxc-grok1"))
    with pytest.raises(CannotTake, match="a mixture of experts whose shape is not known"):
        case_of({**row, "model": "Another-8x3B"})


def test_mixtures_are_taken_by_their_names(predictions: list[Prediction]) -> None:
    grok = next(p for p in predictions if p.id.startswith("dgxc-grok1"))
    assert grok.case is not None and grok.error is not None and abs(grok.error) < 0.2
    job = grok.case.job
    assert (job.layout.ep, job.layout.etp, job.config.model.experts.count) == (2, 4, 8)
    shipped = [row for row in read_rows(SHIPPED) if is_mixture(row) and "grok" not in row["id"]]
    found = {row["id"]: predict_row(row) for row in shipped}
    assert len(found) == 9 and all(p.error is not None for p in found.values())
    for name, total, active in (("zoo-mixtral-8x22b", 141, 39), ("zoo-qwen3-235b-tp4", 235, 22)):
        case = found[name].case
        assert case is not None and case.job.layout.etp == 1
        assert parameter_count(case.job.model) / 1e9 == pytest.approx(total, rel=0.01)
        assert active_parameters(case.job.model) / 1e9 == pytest.approx(active, rel=0.02)
    for name in ("mcore-mixtral-8x7b", "zoo-mixtral-8x22b"):
        assert abs(found[name].error or 1.0) < 0.1
    pp32 = found["zoo-qwen3-235b-pp32"].case
    assert pp32 is not None and pp32.job.config.pipeline.split == (0, *[1] * 94, 0)


def test_schedules_differ_as_published() -> None:
    """Predicted are the throughputs of the zero-bubble paper, relative to 1F1B with the same model and micro-batches.

    The paper names no recomputation: the memory shows that nothing is computed again."""
    rows = {row["id"]: row for row in read_rows(SCHEDULES)}
    found = {name: predict_row(row) for name, row in rows.items()}
    assert not [p.reason for p in found.values() if p.reason]
    errors = []
    for name, row in rows.items():
        case = found[name].case
        assert case is not None and case.job.config.recompute.mode == "none"
        assert found[name].mem_gib == pytest.approx(float(row["mem_gb"]), rel=0.10), name
        model, micro_batches, _ = re.findall(r"zb-([\d.]+b)-(m\d+)-(.*)", name)[0]
        plain = f"zb-{model}-{micro_batches}-1f1b"
        if plain in rows and name != plain:
            published = samples_of(row) / samples_of(rows[plain])
            errors.append(found[plain].step_s / found[name].step_s / published - 1)
    assert len(errors) == 11 and sum(map(abs, errors)) / len(errors) <= 0.03


def samples_of(row: dict[str, str]) -> float:
    """Return the samples per second and device that a row of the zero-bubble paper reports."""
    return float(row["note"].split()[0])


def test_without_post_validation_a_step_ends_with_its_last_stage() -> None:
    row = next(row for row in read_rows(SCHEDULES) if row["id"] == "zb-28.3b-m96-zb-2p")
    case = case_of(row)
    free = predict_cost(case.job, case.cluster)
    waiting = predict_cost(replace(case.job, stack=replace(case.job.stack, update_waits=True)), case.cluster)
    assert free.barrier_s == 0.0 and waiting.barrier_s > 0.05 * free.step_s
    assert waiting.step_s - free.step_s == pytest.approx(waiting.barrier_s, rel=0.05)
    plain = case_of(next(row for row in read_rows(SCHEDULES) if row["id"] == "zb-28.3b-m96-1f1b"))
    assert predict_cost(plain.job, plain.cluster).barrier_s == 0.0


def test_the_command_writes_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "predictions.csv"
    assert main(["predict", "--csv", str(TABLE), "--out", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == len(found["runs"]) == len(read_rows(TABLE))
    with out.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["id", "step_time_s", "tokens_s_gpu", "mem_gb", "error", "reason"]
    assert [row["id"] for row in rows] == [row["id"] for row in read_rows(TABLE)]
    for row in rows:
        taken = row["step_time_s"] != ""
        assert taken != bool(row["reason"]) or row["reason"] == "predicted out of memory"


def test_results_come_first_and_outliers_have_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--system", "nvidia", "--model", "grok"]) == 0
    shown = capsys.readouterr()
    first, *rest = shown.out.splitlines()
    assert first.startswith("step time of mixtures of experts: mean error 17.0 % over 10 published runs")
    assert "NVIDIA DGXC (NeMo)" in shown.out and "next: meshwright predict --full" in shown.err
    (line,) = [line for line in rest if "dgxc-grok1-bf16-512-gbs1024" in line]
    assert "+23 %" in line and "its exchange sends rows" in line
    # A run within the limit is only in the whole table.
    assert "dgxc-grok1-bf16-8-" not in shown.out
    assert main(["predict", "--system", "nvidia", "--model", "grok", "--full"]) == 0
    assert "dgxc-grok1-bf16-8-" in capsys.readouterr().out
    assert main(["predict", "--system", "abacus"]) == 2
    assert "the systems are" in capsys.readouterr().err


@pytest.mark.wide
def test_every_run_that_ships_is_taken_and_every_outlier_explained() -> None:
    found = [predict_row(row) for row in read_rows(SHIPPED)]
    assert [p.id for p in found if p.reason] == []
    assert [p.id for p in found if p.is_outlier and not p.row["why"]] == []
    assert [p.id for p in found if not p.is_outlier and p.row["why"]] == []
    dense = summary([p for p in found if not is_mixture(p.row)])["step_time"]["all"]
    assert dense["rows"] == 308 and dense["mean_abs_error"] < 0.06
    text = report(found, full=True)
    assert all(p.id in text for p in found if p.error is not None)


def test_defaults_of_empty_cells() -> None:
    row = next(row for row in read_rows(TABLE) if row["id"] == "ko22-175b-present")
    assert row["precision"] == "" and row["cp"] == "" and row["ep"] == ""
    case = case_of({**row, "kv_heads": "", "vocab": "", "ffn": "", "vpp": ""})
    config = case.job.config
    assert config.train.precision == "fp16"
    assert config.model.kv_heads == config.model.heads
    assert config.model.vocab == 51200
    assert config.model.ffn == 4 * config.model.hidden
    assert config.layout.cp == config.layout.chunks == 1
    with pytest.raises(CannotTake, match="hidden"):
        case_of({**row, "hidden": ""})


@pytest.mark.parametrize(
    ("words", "rate"),
    [
        ("NVLink3/NVSwitch in node; 8x HDR InfiniBand 200Gb/s per node (Selene)", 200.0),
        ("8xA100 NVLink node; 4x Omni-Path 100Gb/s links per node (Jean Zay)", 50.0),
        ("NVLink in node; RDMA 400Gb/s per GPU (Grand Teton)", 400.0),
        ("1600Gb/s RoCE per node", 200.0),
        ("2Tb/s RoCE per host", 250.0),
        ("4x100Gb/s RoCE per node", 50.0),
        ("NVLink, single node", 0.0),
    ],
)
def test_words_about_the_network(words: str, rate: float) -> None:
    assert network_gb_s(words, 8) == rate


def test_nodes_of_four() -> None:
    row = next(row for row in read_rows(TABLE) if row["id"].startswith("bs1b3"))
    assert cluster_of(row).node.devices == 4
    assert cluster_of(row).network.node_gb_s == 50.0


def named(source: str, words: str, device: str, zero: int) -> Stack:
    return stack_of_row({"id": words, "source": source, "gpu": device, "zero_stage": str(zero)})


def test_a_source_names_its_stack() -> None:
    assert sum(not stack.own for stack in STACKS.values()) <= 6
    assert named("Korthikanti et al. 2022", "", "A100", 0).name == "unfused"
    assert named("bigscience tr11", "", "A100", 1).name == "unfused-deepspeed"
    assert named("torchtitan benchmarks", "", "H100", 3).name == "fsdp-compiled"
    assert named("torchtitan benchmarks", "tt-asyncTP", "H100", 3).hide_tp == STACKS["fused-overlap"].hide_tp
    assert named("torchtitan benchmarks", "tt-vanillaTP", "H100", 3).hide_tp == 0.0
    assert named("an unknown report", "", "H100-SXM", 3).name == "fsdp"
    assert named("an unknown report", "", "A100-SXM", 0).name == "unfused"


def test_constants_stay_physical() -> None:
    """Every share of a peak is below one, and at most all of the communication time is hidden."""
    for name in ("a100-80g-dgx", "h100-80g-dgx", "h200-141g-dgx", "b200-180g-dgx", "v100-32g"):
        e = load_cluster(name).efficiency
        assert all(0 < share < 1 for share in (e.product, e.attention, e.memory, e.link, e.network, e.fp8))
    for stack in STACKS.values():
        assert all(0 <= share <= 1 for share in (stack.hide_tp, stack.hide_dp, stack.hide_pp, stack.contention))


def test_bad_tables(tmp_path: Path) -> None:
    broken = tmp_path / "broken.csv"
    broken.write_text("id,layers\nx,2\n", encoding="utf-8")
    with pytest.raises(UserError, match="lacks the columns hidden"):
        read_rows(broken)
    with pytest.raises(UserError, match="there is no table"):
        read_rows(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("cell", "word"),
    [
        ({"layers": "-3"}, "layers=-3"), ({"heads": "x"}, "heads=x"), ({"gpus": "7"}, "not a multiple of tp x pp x cp"),
        ({"recompute": "some"}, "recompute=some"), ({"zero_stage": "9"}, "zero_stage=9"),
        ({"step_time_s": "nan"}, "step_time_s=nan"), ({"gpu": "abacus"}, "no cluster file for the device abacus"),
        ({"precision": "fp4"}, "fp4"), ({"global_batch": "1"}, "less than dp x micro-batch"),
        ({"schedule": "dualpipe"}, "two copies of each stage"), ({"schedule": "chimera"}, "chimera"),
        ({"seq_parallel": "yes"}, "seq_parallel=yes is not one of y, n"), ({"outcome": "OOM"}, "OOM"),
        ({"tp": "128", "pp": "1"}, "finer than its heads"),
    ],
)  # fmt: skip
def test_a_bad_cell_is_a_reason_and_no_crash(cell: dict[str, str], word: str) -> None:
    row = next(row for row in read_rows(TABLE) if row["id"] == "sc21-t1-39.1b")
    assert word in predict_row({**row, **cell}).reason


def row_of(name: str) -> dict[str, str]:
    return next(row for row in read_rows(TABLE) if row["id"] == name)


@pytest.mark.parametrize(
    ("cells", "word"),
    [
        ({"global_batch": "1023"}, "1023 is not a multiple of dp x micro-batch = 512"),
        ({"dp": "99"}, "dp=99 contradicts the devices: 128 / (tp x pp x cp = 4) is 32"),
        ({"tp": "3", "gpus": "96", "nodes": "12"}, "32 heads are not a multiple of tp=3"),
        ({"pp": "300", "gpus": "38400", "nodes": "4800"}, "pp=300 is more than the 36 layers"),
        ({"schedule": "gpipe", "vpp": "2"}, "gpipe has one chunk per rank, not vpp=2"),
    ],
)  # fmt: skip
def test_a_row_that_contradicts_itself_is_not_taken(cells: dict[str, str], word: str) -> None:
    row = row_of("sc21-t1-7.5b")
    assert predict_row(row).reason == ""
    assert word in predict_row({**row, **cells}).reason


def test_stages_of_an_embedding_alone_count() -> None:
    """BLOOM's 70 layers ran on 72 stages, with the embedding and the output layer on one stage each. A 73rd stage would
    be idle.
    """
    row = {**row_of("bloom176b-main-12695"), "tp": "1", "pp": "72", "dp": "4", "gpus": "288", "nodes": "36"}
    case = case_of({**row, "micro_batch": "1", "global_batch": "2048"})
    assert case.job.config.pipeline.split == (0, *[1] * 70, 0)
    with pytest.raises(CannotTake, match="pp=73 is more than the 70 layers"):
        case_of({**row, "pp": "73", "gpus": "292"})


def test_gpipe_keeps_every_micro_batch() -> None:
    row = row_of("sc21-t1-39.1b")
    assert predict_row({**row, "schedule": "gpipe"}).mem_gib > 1.5 * predict_row(row).mem_gib


def test_a_table_that_a_spreadsheet_saved(tmp_path: Path) -> None:
    marked = tmp_path / "marked.csv"
    marked.write_bytes(b"\xef\xbb\xbf" + TABLE.read_bytes())
    assert read_rows(marked) == read_rows(TABLE)


def test_the_calibration_script_reads_a_table() -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "calibrate.py"
    done = subprocess.run([sys.executable, str(script), str(TABLE)], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    found = re.search(r"mean absolute error of (\d+) rows: ([\d.]+) %", done.stdout)
    assert found is not None and int(found[1]) > 25 and float(found[2]) < 10
