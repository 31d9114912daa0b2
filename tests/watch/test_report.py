"""The data of the page: numbers equal to the files', few points, any folder, and a server for this machine alone."""

from __future__ import annotations

import json
import math
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from meshwright.cli.main import main
from meshwright.engine.result import StepResult
from meshwright.show.page_file import page
from meshwright.watch.metrics_file import _FRONT, MOST_POINTS, MetricsFile, thinned
from meshwright.watch.report import RunReport
from meshwright.watch.server import WATCH, Runs, Server, whole_page
from tests.watch.made import WORLD, add_event, faulty, healthy, line_of, relaid, resumed


def test_columns_equal_the_file_and_follow_it(tmp_path: Path) -> None:
    path = healthy(tmp_path / "run") / "metrics.jsonl"
    wanted = [json.loads(line) for line in path.read_text().splitlines()]
    found = MetricsFile(path)
    assert found.refresh() and not found.refresh()
    for name in ("step", "time", "loss", "grad_norm", "lr", "tokens", "step_time_s"):
        assert found.columns[name].tolist() == [line[name] for line in wanted], name
    assert np.isnan(found.columns["loss_scale"]).all()
    with path.open("a") as file:
        file.write(json.dumps(line_of(61, {}, 1.5) | {"loss": None}) + "\n" + '{"step": 62, "lo')  # cut off by a kill
    assert found.refresh() and len(found) == 61 and math.isnan(found.columns["loss"][-1])
    with path.open("a") as file:
        file.write('ss": 1.0}\nnot json\n' + json.dumps(dict(reversed(line_of(63, {}, 1.25).items()))) + "\n")
    assert found.refresh() and found.columns["step"].tolist()[-2:] == [62, 63]  # the keys may have another order
    assert found.columns["loss"][-1] == 1.25 and [line["step"] for line in found.lines(3)] == [1, 32, 63]
    path.write_text("".join(json.dumps(line) + "\n" for line in wanted[:30]))  # a resume removed the lost steps
    assert found.refresh() and len(found) == 30
    with path.open("a") as file:
        # The later line of a step counts.
        file.writelines(json.dumps(line_of(step, {}, 9.0)) + "\n" for step in (21, 22))
    assert found.refresh() and found.columns["step"].tolist() == [*range(1, 23)] and found.columns["loss"][20] == 9.0


def test_a_line_with_a_word_for_a_number_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps(line_of(step, {}, 1.0)) for step in (1, 2, 3)]
    lines[1] = re.sub(r'"time": [^,]+', '"time": "late"', lines[1])
    path.write_text("\n".join(lines) + "\n")
    found = MetricsFile(path)
    assert found.refresh() and len(found) == 2
    assert [line["step"] for line in found.lines(3)] == found.columns["step"].tolist() == [1, 3]


def test_fewer_points_keep_the_extremes_and_the_means() -> None:
    values = np.sin(np.arange(100_000) / 700)
    values[12_345], values[50_000] = 7.0, math.nan
    found = thinned({"step": np.arange(1.0, 100_001), "loss": values}, ("loss",))
    loss = found["loss"]
    assert len(found["step"]) == len(loss["mean"]) == MOST_POINTS and found["step"][-1] == 100_000
    assert max(loss["hi"]) == 7.0 and min(loss["lo"]) == pytest.approx(-1.0, abs=1e-4) and sum(loss["lost"]) == 1
    assert np.mean(loss["mean"]) == pytest.approx(np.nanmean(values), abs=1e-5)


@pytest.mark.wide
def test_a_run_of_a_hundred_thousand_steps_opens_in_a_second(tmp_path: Path) -> None:
    folder = healthy(tmp_path / "long", 100_000)
    took = []
    for _ in range(2):  # processor time, since others may use the machine
        begun = time.process_time()
        document = RunReport(folder).document()
        took.append(time.process_time() - begun)
    assert document["progress"]["step"] == 100_000 and len(json.dumps(document)) < 400_000
    assert min(took) < 1.0, took


def test_steps_are_compared_with_the_plan_of_their_own_layout(tmp_path: Path) -> None:
    report = RunReport(relaid(tmp_path / "run"))
    document, plan = report.document(), report.plan()
    assert {axis: each["differs_at"] for axis, each in plan["comm"].items()} == dict.fromkeys(
        ("dp", "embedding", "pp", "world")
    )
    assert document["trace"]["earlier"] == "traced at step 3, before the layout changed at step 40"
    assert "bubble" not in document["trace"] and plan["simulated"] is None
    add_event(tmp_path / "run", kind="resume", step=50, world=WORLD, changed=["train.steps"])
    assert report.document()["trace"]["earlier"].endswith("at step 40")  # the newest start has the same layout
    add_event(tmp_path / "run", kind="resume", step=30, world=WORLD, changed=[])
    assert report.document()["trace"]["earlier"].endswith("at step 30")  # the run went back beyond the change
    add_event(tmp_path / "run", kind="resume", step=55, world=WORLD // 2, changed=[])
    assert report.document()["trace"]["earlier"].endswith("at step 55")


def test_steps_that_compare_the_ranks_are_as_planned(tmp_path: Path) -> None:
    report = RunReport(healthy(tmp_path / "run", steps=100))
    report.document()
    assert {each["differs_at"] for each in report.plan()["comm"].values()} == {None}


def test_states_are_told_apart(tmp_path: Path) -> None:
    well, again, bad = (
        RunReport(make(tmp_path / name)) for name, make in (("a", healthy), ("b", resumed), ("c", faulty))
    )
    document = well.document()
    assert document["state"]["kind"] == "finished" and document["alerts"] == []
    assert document["sources"][0]["tokens"] == pytest.approx(0.7 * 60 * 1024)
    assert all(each["differs_at"] is None for each in well.plan()["comm"].values())
    document = again.document()
    assert document["state"]["kind"] == "stopped"
    assert [alert["text"] for alert in document["alerts"]] == [
        "restarted 1 time", "11 steps trained again after resumes",
    ]  # fmt: skip
    document, plan = bad.document(), bad.plan()
    assert document["state"]["kind"] == "hung" and "rank 3 did not arrive" in document["state"]["text"]
    assert document["progress"]["skipped"] == 2 and document["progress"]["not_finite"] == 1
    assert any("rank 3 computes 1.9" in alert["text"] for alert in document["alerts"])
    assert [axis for axis, each in plan["comm"].items() if each["differs_at"]] == ["tp"]
    assert bad.flight(3)["calls"][0]["done"] is True and bad.flight(99)["calls"] == []
    assert plan["memory"]["peak"] > 0 and plan["simulated"]["how"] == "the planner's times"
    (bad.path / "run.json").write_text(json.dumps({"world": WORLD, "device": "an unknown thing"}))
    simulated = RunReport(bad.path).plan()["simulated"]
    assert simulated["how"].startswith("the traced step's") and simulated["bubble"] == pytest.approx(0.2, abs=0.05)


def test_any_folder_of_a_run_has_a_page(tmp_path: Path) -> None:
    """A run that has only begun, one of an older version, and one whose files hold nonsense have a page too."""
    folder = healthy(tmp_path / "run")
    for name in ("events.jsonl", "layers.jsonl", "ranks.json", "trace.json", "run.json", "validation.jsonl"):
        (folder / name).write_text('{"time": "x", "busy_s": 3, "traceEvents": {}, "layers": 1, "world": "many"}\n[]\n')
        whole_page(Runs([RunReport(folder)]))
        (folder / name).unlink()
        whole_page(Runs([RunReport(folder)]))
    (folder / "metrics.jsonl").write_text("")
    assert RunReport(folder).document()["progress"]["step"] == 0
    whole_page(Runs([RunReport(folder)]))


def test_what_is_shown_is_never_markup(tmp_path: Path) -> None:
    folder = healthy(tmp_path / "<script>alert(1)<")
    notes = json.loads((folder / "run.json").read_text()) | {"command": "</script><img src=x onerror=alert(2)>"}
    (folder / "run.json").write_text(json.dumps(notes))
    text = whole_page(Runs([RunReport(folder)]))
    assert "<script>alert" not in text and "</script><img" not in text and "<img" not in text
    assert text.count("<script") == 2 and "&lt;script&gt;" in text
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", text)
    assert "default-src 'none'" in WATCH.policy and "unsafe-inline'" not in WATCH.policy.split("style-src")[0]
    assert page("{{DATA}}", {}, WATCH).count("{{DATA}}") == 1  # a title is not filled in again


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(Runs([RunReport(faulty(tmp_path / "run"))]), 0) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield found
        found.shutdown()


def ask(server: Server, path: str, **headers: str) -> tuple[int, bytes]:
    request = urllib.request.Request(server.address.rstrip("/") + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_the_server_answers_this_machine_alone(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert ask(server, "/")[0] == 200
    assert json.loads(ask(server, "/data.json")[1])[0]["state"]["kind"] == "hung"
    assert json.loads(ask(server, f"/flight.json?run=0&rank={WORLD - 1}")[1])["calls"]
    for headers in ({"Host": "evil.example"}, {"Host": "127.0.0.1"}, {"Origin": "http://evil.example"}):
        assert ask(server, "/data.json", **headers)[0] == 403, headers
    for path in ("/../run.json", "/config.yaml", "/%2e%2e/x", "/flight.json?run=7&rank=0", "/flight.json?rank=../x"):
        status, body = ask(server, path)
        assert status in (400, 404) and len(body) < 80, path
    with socket.create_connection(server.server_address[:2]) as raw:  # a path that no library would send
        raw.sendall(b"GET /../../../etc/passwd HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n" % server.server_address[1])
        assert raw.recv(100).startswith(b"HTTP/1.1 404")


def test_nothing_new_is_not_sent_again(server: Server) -> None:
    with urllib.request.urlopen(server.address + "data.json") as answer:
        version = answer.headers["ETag"]
    assert ask(server, "/data.json", **{"If-None-Match": version})[0] == 304
    folder = server.runs.reports[0].path
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line_of(48, {}, 2.0)) + "\n")
    status, body = ask(server, "/data.json", **{"If-None-Match": version})
    assert status == 200 and json.loads(body)[0]["progress"]["step"] == 48


def test_the_command_writes_a_page_or_says_why_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = healthy(tmp_path / "run")
    assert main(["watch", str(run), "--html", str(tmp_path / "page.html")]) == 0
    assert "<title>run · Meshwright</title>" in (tmp_path / "page.html").read_text()
    assert main(["watch", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["progress"]["steps"] == 60
    assert main(["watch", str(tmp_path), "--json"]) == 0
    assert [run["name"] for run in json.loads(capsys.readouterr().out)["runs"]] == ["run"]
    assert main(["status", str(tmp_path / "nowhere")]) == 2
    assert f"nowhere is not there: name one of the runs in {tmp_path}, such as {run}" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    healthy(tmp_path / "runs" / "second")
    assert main(["watch", "secnd", "--json"]) == 2  # searched beside it, then where runs usually are
    assert "secnd is not there: name one of the runs in ., such as run" in capsys.readouterr().err
    assert main(["watch", "no/secnd", "--json"]) == 2
    assert "name one of the runs in runs, such as runs/second" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert main(["watch", "no/secnd", "--json"]) == 2
    assert "secnd is not there: name the folder that run.dir named" in capsys.readouterr().err
    assert main(["watch", str(run), "--port", "99999"]) == 2
    assert main(["watch", str(run), "--cluster", "nowhere", "--html", str(tmp_path / "x")]) == 2


def test_lines_begin_as_the_fast_way_of_reading_them_expects() -> None:
    """A line that begins otherwise would be parsed as a whole."""
    line = json.dumps(StepResult(3, 2.5, 1.0, 1e-3, None, False, 64, 8, step_time_s=0.5).line())
    found = _FRONT.match(line.encode())
    assert found is not None and found.groups()[-1] == b"0.5"
