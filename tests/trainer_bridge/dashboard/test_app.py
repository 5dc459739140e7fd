"""The dashboard's API: its numbers are those of ``compare``, strangers stay out, errors name what is wrong."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.applications import Starlette

from tests.trainer_bridge.samples import f32, i32, sample
from tests.trainer_bridge.store.runs import CAUSE, batch, record_run
from trainer_bridge.compare import compare
from trainer_bridge.dashboard.app import STATIC, build_app
from trainer_bridge.dashboard.explain import Explainer, default_explainer
from trainer_bridge.dashboard.serve import bind
from trainer_bridge.dashboard.summaries import TRENDS
from trainer_bridge.dashboard.watch import Watcher
from trainer_bridge.jsonl import decode
from trainer_bridge.records import Comparison
from trainer_bridge.report import to_json
from trainer_bridge.store.facts import RunHead, SampleFacts, StepFacts
from trainer_bridge.store.partials import EQUAL_BIN
from trainer_bridge.store.reader import RunStore
from trainer_bridge.store.recorder import Recorder, RecordOptions


class Http:
    """Calls to an application in this process, one at a time."""

    def __init__(self, app: Starlette) -> None:
        self._app = app

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def call() -> httpx.Response:
            transport = httpx.ASGITransport(app=self._app, raise_app_exceptions=True)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
                return await http.request(method, path, **options)

        return asyncio.run(call())

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        return self.request("POST", path, **options)


def client(root: Path, **options: Any) -> Http:
    app = build_app(root, **options)
    app.state.store.refresh()
    return Http(app)


@pytest.fixture
def run(tmp_path: Path) -> tuple[Http, list[Comparison]]:
    comparisons, _ = record_run(tmp_path, steps=4, broken_from=2, trainer_manifest={"kernels.name": "other"})
    record_run(tmp_path, "clean")
    return client(tmp_path), comparisons


def test_every_figure_equals_the_comparison(run: tuple[Http, list[Comparison]]) -> None:
    http, comparisons = run
    page = http.get("/api/runs/run").json()
    assert page["tokens"] == sum(c.tokens for c in comparisons)
    assert page["equal_tokens"] == sum(c.equal_tokens for c in comparisons)
    assert page["max_abs"] == max(c.max_abs for c in comparisons)
    for step, comparison in enumerate(comparisons):
        said = json.loads(json.dumps(to_json(comparison)))
        del said["verdict"]
        shown = http.get(f"/api/runs/run/steps/{step}").json()
        assert {name: shown[name] for name in said} == said
        for name in set(TRENDS) & set(said):
            assert page["trends"][name][step] == said[name], name
    assert page["trends"]["max_abs"][3] != page["trends"]["max_abs"][2], "control: steps differ"


def test_the_verdict_names_step_token_and_cause(run: tuple[Http, list[Comparison]]) -> None:
    http, comparisons = run
    first = http.get("/api/runs/run").json()["first_unequal"]
    mismatch = comparisons[2].first_mismatch
    assert mismatch is not None
    assert first["step"] == 2 and first["findings"] == [CAUSE]
    assert (first["token"]["request_id"], first["token"]["position"]) == (mismatch.request_id, mismatch.position)
    clean = http.get("/api/runs/clean").json()
    assert clean["bitwise_equal"] is True and clean["first_unequal"] is None


def test_views_add_up(run: tuple[Http, list[Comparison]]) -> None:
    http, comparisons = run
    tokens, equal = sum(c.tokens for c in comparisons), sum(c.equal_tokens for c in comparisons)
    whole = http.get("/api/runs/run/distribution").json()
    assert whole["equal"] == equal == whole["ulp"][0][1]
    assert whole["equal"] + sum(n for _, n in whole["delta"]) == tokens == sum(p[2] for p in whole["probability"])
    assert all(place != EQUAL_BIN for place, _ in whole["delta"])
    one = http.get("/api/runs/run/distribution?first=2&last=2").json()
    assert one["equal"] == comparisons[2].equal_tokens
    histogram = {b.low: b.count for b in comparisons[2].ulp_histogram if b.count}
    assert {0 if k == 0 else 2 ** (k - 1): n for k, n in one["ulp"]} == histogram
    where = http.get("/api/runs/run/where").json()
    for step, comparison in enumerate(comparisons):
        cells = [cell for cell in where["heat"] if cell[0] == step]
        assert sum(c[2] for c in cells) == comparison.tokens and max(c[4] for c in cells) == comparison.max_abs
    for rows in where["groups"].values():
        assert sum(r[1] for r in rows) == tokens and sum(r[2] for r in rows) == tokens - equal
    assert http.get("/api/runs/run/worst").json()["rows"][0]["abs_delta"] == max(c.max_abs for c in comparisons)


def test_a_sample_and_its_file(run: tuple[Http, list[Comparison]]) -> None:
    http, _ = run
    expected = batch(2, broken=True, version=2, step=2)[1]
    where = {"request": expected.request_id, "index": expected.sample_index}
    shown = http.get("/api/runs/run/steps/2/sample", params=where).json()
    bits = [f"0x{int(v):08x}" for v in expected.rollout_logprobs.view("u4")]
    assert shown["columns"]["rollout_bits"] == bits
    assert shown["columns"]["rollout_logprob"][2] is None and shown["columns"]["mask"][2] is False
    record = decode(http.get("/api/runs/run/steps/2/sample.jsonl", params=where).text.strip(), 1)
    assert record.policy_logprobs.view("u4").tolist() == expected.rollout_logprobs.view("u4").tolist()
    assert record.seed == expected.seed and record.sampling is not None and record.spans == expected.spans
    listed = http.get("/api/runs/run/steps/2/samples").json()
    assert (
        listed["total"] == 6
        and sum(r["unequal"] for r in listed["rows"])
        == compare(batch(2, broken=True, version=2, step=2)).unequal_tokens
    )


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/api/runs/none", 404, "no run 'none'"),
        ("/api/runs/run/steps/99", 404, "has no step 99"),
        ("/api/runs/run/steps/x", 400, "step = 'x' is not an integer"),
        ("/api/runs/run/where?first=1;drop", 400, "first = '1;drop' is not an integer"),
        ("/api/runs/run/steps/0/sample?request=zzz&index=0", 404, "keeps no sample"),
    ],
)
def test_errors_are_named(run: tuple[Http, list[Comparison]], path: str, status: int, said: str) -> None:
    answer = run[0].get(path)
    assert answer.status_code == status and said in answer.json()["error"]


def test_an_empty_and_a_missing_folder_are_no_error(tmp_path: Path) -> None:
    assert client(tmp_path / "missing").get("/api/runs").json()["runs"] == []


def test_a_run_without_steps_yet(tmp_path: Path) -> None:
    record_run(tmp_path, steps=1)
    for file in (tmp_path / "run=run/steps").rglob("*.parquet"):
        file.unlink()
    page = client(tmp_path).get("/api/runs/run").json()
    assert page["steps"] == 0 and page["last_step"] is None and page["bitwise_equal"] is False


def test_the_token_is_demanded_for_data_and_never_for_the_page(tmp_path: Path) -> None:
    http = client(tmp_path, token="secret")
    assert http.get("/").status_code == 200 and http.get("/static/app.js").status_code == 200
    assert http.get("/api/runs").status_code == 401
    assert http.get("/api/runs", headers={"authorization": "Bearer wrong"}).status_code == 401
    assert http.get("/api/runs", headers={"authorization": "Bearer secret", "host": "any.example"}).status_code == 200


def test_without_a_token_only_local_names_are_answered(tmp_path: Path) -> None:
    http = client(tmp_path)
    for host, status in (("127.0.0.1:8420", 200), ("localhost", 200), ("[::1]:1", 200), ("evil.example", 403)):
        assert http.get("/api/runs", headers={"host": host}).status_code == status, host


def test_headers_forbid_foreign_code(tmp_path: Path) -> None:
    headers = client(tmp_path).get("/").headers
    assert "default-src 'self'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"


async def test_events_say_hello_and_then_what_changed(tmp_path: Path) -> None:
    watcher = Watcher(RunStore(tmp_path), interval_s=0.001)
    await watcher.start()
    stream = watcher.events()
    hello = await anext(stream)
    await asyncio.to_thread(record_run, tmp_path, "fresh", steps=1)
    changed = await anext(stream)
    assert hello.startswith("id: ") and "event: hello" in hello and '"runs": []' in hello
    assert "event: changed" in changed and '"fresh"' in changed
    await watcher.stop()
    rest = [event async for event in stream]
    assert all("fresh" in event for event in rest), "the stream ends with the watcher"


@pytest.fixture
def explaining(tmp_path: Path) -> Iterator[tuple[Http, dict[str, Any]]]:
    record_run(tmp_path, steps=1, broken_from=0)
    read = "n = [open(p).read().count('request_id') for p in sys.argv[1:3]]"
    program = f"import json, sys; {read}; json.dump({{'lines': n}}, open(sys.argv[3], 'w'))"
    yield (
        client(tmp_path, explainer=Explainer((sys.executable, "-c", program, "{rollouts}", "{trainer}", "{out}"))),
        {"request": "step0/p0", "index": 0},
    )


def test_each_side_has_a_file(run: tuple[Http, list[Comparison]]) -> None:
    expected = batch(2, broken=True, version=2, step=2)[1]
    where = {"request": expected.request_id, "index": expected.sample_index}
    for side, values in (("rollout", expected.rollout_logprobs), ("trainer", expected.trainer_logprobs)):
        text = run[0].get("/api/runs/run/steps/2/sample.jsonl", params=where | {"side": side}).text
        assert decode(text.strip(), 1).policy_logprobs.view("u4").tolist() == values.view("u4").tolist()
    assert not np.array_equal(expected.rollout_logprobs.view("u4"), expected.trainer_logprobs.view("u4")), "control"


def test_who_explains_and_whether_he_answers(tmp_path: Path) -> None:
    assert client(tmp_path).get("/api/explainer").json() == {"available": False, "address": None, "reason": ""}
    here = default_explainer(["explain"], ["model.path=m"])
    assert here is not None and here.command[-1] == "model.path=m" and "--address" not in here.command
    assert client(tmp_path, explainer=here).get("/api/explainer").json()["available"] is True
    with bind("127.0.0.1", 0) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        asks = default_explainer(["explain"], address=address)
        assert asks is not None and asks.command[asks.command.index("--address") + 1] == address
        answers = client(tmp_path, explainer=asks).get("/api/explainer").json()
        assert answers == {"available": True, "address": address, "reason": ""}
    for gone in (address, "no port"):
        asks = default_explainer(["explain"], address=gone)
        said = client(tmp_path, explainer=asks).get("/api/explainer").json()
        assert said["available"] is False and said["reason"] == f"the service {gone} does not answer"


def test_infinite_figures_are_shown(tmp_path: Path) -> None:
    """exp(1999) has no float64: k3 is infinite, which JSON has no number for."""
    broken = sample(f32([-1.0, -2000.0, -3.0]), f32([-1.0, -1.0, -3.0]), request_id="r", token_ids=i32([1, 2, 3]))
    recorder = Recorder(tmp_path, RunHead("run"), options=RecordOptions(keep_rate=1.0))
    recorder.record(StepFacts(0), [broken], compare([broken]))
    assert recorder.close().written == 1
    http = client(tmp_path)
    assert http.get("/api/runs/run").json()["trends"]["k3"] == ["inf"]
    assert http.get("/api/runs/run/where").json()["groups"]["replica"][0][5] == "inf"
    for view in ("distribution", "worst", "steps/0", "steps/0/samples", "steps/0/sample?request=r&index=0"):
        assert http.get(f"/api/runs/run/{view}").status_code == 200, view


@pytest.mark.parametrize(
    ("rewards", "shown"),
    [
        ((float("nan"), 1.0), None),
        ((float("inf"), 1.0), "inf"),
        ((float("inf"), float("-inf")), None),
        ((1.7e308, 1.7e308), "inf"),
        ((), None),
        ((1.0, 2.0), 1.5),
    ],
    ids=str,
)
def test_a_reward_that_is_no_number_hides_no_run(tmp_path: Path, rewards: tuple[float, ...], shown: Any) -> None:
    """One NaN, as a broken reward function gives it, took the run's page down for good."""
    samples = [sample()]
    recorder = Recorder(tmp_path, RunHead("run"), options=RecordOptions(keep_rate=1.0))
    facts = [SampleFacts(reward=rewards[0] if rewards else None)]
    for step in range(2):
        seconds = {"rollout": float("nan")}
        recorder.record(StepFacts(step, rewards=rewards, seconds=seconds), samples, compare(samples), facts)
    assert recorder.close().written == 2
    http = client(tmp_path)
    assert http.get("/api/runs/run").json()["trends"]["mean_reward"] == [shown] * 2
    assert http.get("/api/runs/run/steps/1").json()["mean_reward"] == shown
    for view in ("distribution", "where", "worst", "steps/0/samples", "steps/0/sample?request=r0&index=0"):
        assert http.get(f"/api/runs/run/{view}").status_code == 200, view
    assert http.get("/api/runs").json()["runs"][0]["bitwise_equal"]


@pytest.mark.parametrize(
    "path",
    [
        "worst?last=9223372036854775808",
        "where?first=-9223372036854775809",
        "steps/99999999999999999999",
        "steps/0/sample?request=r&index=99999999999999999999",
        f"steps/{'9' * 5000}",
    ],
)
def test_numbers_that_no_column_holds_are_refused(run: tuple[Http, list[Comparison]], path: str) -> None:
    answer = run[0].get(f"/api/runs/run/{path}")
    assert answer.status_code == 400 and len(answer.text) < 200
    assert run[0].get("/api/runs/run/worst?last=9223372036854775807").status_code == 200


def test_explain_runs_the_command_on_the_sample(explaining: tuple[Http, dict[str, Any]]) -> None:
    http, where = explaining
    assert http.post("/api/runs/run/steps/0/explain", params=where).json()["explanation"] == {"lines": [1, 1]}
    assert http.get("/api/runs/run/steps/0/explain", params=where).status_code == 405


def test_explain_that_fails_or_is_missing_says_so(tmp_path: Path) -> None:
    record_run(tmp_path, steps=1)
    where = {"request": "step0/p0", "index": 0}
    broken = Explainer((sys.executable, "-c", "raise SystemExit('no model here')"))
    answer = client(tmp_path, explainer=broken).post("/api/runs/run/steps/0/explain", params=where)
    assert answer.status_code == 502 and "no model here" in answer.json()["error"]
    slow = Explainer((sys.executable, "-c", "import threading; threading.Event().wait()"), limit_s=0.2)
    answer = client(tmp_path, explainer=slow).post("/api/runs/run/steps/0/explain", params=where)
    assert answer.status_code == 502 and "was stopped" in answer.json()["error"]
    assert client(tmp_path).post("/api/runs/run/steps/0/explain", params=where).status_code == 501
    assert default_explainer(["demo"]) is None
    command = default_explainer(["demo", "explain"])
    assert command is not None and "explain" in command.command


def test_vendored_code_carries_its_licence() -> None:
    assert "Apache License" in (STATIC / "vendor/echarts.LICENSE").read_text()
    assert "Apache ECharts" in (STATIC / "vendor/echarts.NOTICE").read_text()
