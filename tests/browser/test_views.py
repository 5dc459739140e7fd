"""Every view with recorded data: what it says, that it draws, how one gets there."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import Open, ready, shot, until
from tests.trainer_bridge.store.runs import CAUSE, record_run
from trainer_bridge.dashboard.explain import Explainer
from trainer_bridge.store.reader import RunStore

VIEWS = ("overview", "distribution", "where", "tokens", "compare", "manifest")


def figures(runs: Path, run: str) -> dict[int, dict[str, Any]]:
    store = RunStore(runs)
    store.refresh()
    return store.figures(run)


def series(page: Any, chart: str, index: int = 0) -> list[Any]:
    return page.evaluate(f"window.__charts[{json.dumps(chart)}].getOption().series[{index}].data")  # type: ignore[no-any-return]


def test_the_run_list_shows_every_verdict(open_page: Open, address: str) -> None:
    page = open_page(address)
    rows = page.locator("tbody tr")
    assert rows.count() == 3
    assert [rows.nth(i).locator(".pill").inner_text() for i in range(3)] == ["equal", "unequal", "unequal"]
    shot(page, "runs")
    page.get_by_role("link", name="sabotage").click()
    page.wait_for_selector("#verdict")
    assert "run=sabotage" in page.url


@pytest.mark.parametrize("run", ["clean", "sabotage"])
@pytest.mark.parametrize("view", VIEWS)
def test_every_view_draws(open_page: Open, address: str, run: str, view: str) -> None:
    page = open_page(f"{address}?run={run}&view={view}")
    expected = "equal" if run == "clean" else "unequal"
    assert page.locator("#verdict").get_attribute("data-verdict") == expected
    assert page.locator(".tabs [aria-current=page]").count() == 1
    charts = page.locator(".chart")
    for i in range(charts.count()):
        assert charts.nth(i).locator("canvas").count() >= 1
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out"
    shot(page, f"{run}-{view}", full=True)


def test_numbers_on_the_page_are_those_of_the_comparison(open_page: Open, address: str, runs: Path) -> None:
    expected = figures(runs, "sabotage")
    for step in (3, 15):
        page = open_page(f"{address}?run=sabotage&step={step}")
        tiles = page.locator("#tiles dd")
        shown = [tiles.nth(i).get_attribute("data-exact") for i in range(5)]
        wanted = [expected[step][name] for name in ("equal_tokens", "max_abs", "k3", "ess", "mean_reward")]
        assert [float(s) for s in shown] == [float(w) for w in wanted]
    unequal = series(page, "unequal")
    assert unequal == [f["unequal_tokens"] for f in expected.values()]
    assert unequal[11] == 0 and unequal[12] > 0, "control: the fault starts at step 12"


def test_the_fault_is_one_click_away(open_page: Open, address: str, runs: Path) -> None:
    """Step and cause at a glance; one click shows the tokens, with the cause again."""
    first = figures(runs, "sabotage")[12]["first_mismatch"]
    page = open_page(f"{address}?run=sabotage")
    assert "Unequal since step 12" in page.locator("#verdict").inner_text()
    assert CAUSE in page.locator("#cause").inner_text()
    page.click("#show-token")
    page.wait_for_selector("#ribbon")
    ready(page)
    assert CAUSE in page.locator("#cause").inner_text()
    pressed = page.locator("#ribbon button[aria-pressed=true]")
    assert pressed.get_attribute("data-position") == str(first["position"])
    panel = page.locator("#token").inner_text()
    assert first["rollout_bits"] in panel and first["trainer_bits"] in panel
    shot(page, "sample", full=True)


def test_a_sample_can_be_read_token_by_token_and_downloaded(open_page: Open, address: str) -> None:
    page = open_page(f"{address}?run=sabotage&view=tokens&step=12")
    page.locator("#worst tbody tr").first.click()
    page.wait_for_selector("#ribbon")
    page.locator("#ribbon button.masked").first.click()
    assert "not compared" in page.locator("#token").inner_text()
    assert page.locator("#explain").is_disabled(), "no explain in this server"
    with page.expect_download() as download:
        page.get_by_role("button", name="Download").click()
    line = json.loads(Path(download.value.path()).read_text())
    assert line["format"] == "zerodrift.rollout/2"


def test_addresses_hold_the_whole_state(open_page: Open, address: str) -> None:
    page = open_page(f"{address}?run=sabotage&view=where&step=13")
    assert page.locator("#step").input_value() == "13"
    heat = series(page, "heat")
    assert {cell[1] for cell in heat} == {0}, "one step, one row"
    page.get_by_role("link", name="Distribution").click()
    page.wait_for_selector("body[data-view=distribution][data-ready=true]")
    assert "step=13" in page.url and "view=distribution" in page.url
    page.go_back()
    page.wait_for_selector("body[data-view=where][data-ready=true]")
    assert page.locator("#step").input_value() == "13"


def test_the_keyboard_is_enough(open_page: Open, address: str) -> None:
    page = open_page(f"{address}?run=sabotage")
    for key, step in (("ArrowRight", "0"), ("ArrowRight", "1"), ("ArrowLeft", "0"), ("ArrowLeft", "")):
        page.keyboard.press(key)
        until(page, f"document.getElementById('step')?.value === {json.dumps(step)}")
        ready(page)
    page.keyboard.press("4")
    page.wait_for_selector("body[data-view=tokens][data-ready=true]")
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#help").is_visible()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("r")
    page.wait_for_selector("body[data-view=runs][data-ready=true]")


def test_two_runs_side_by_side(open_page: Open, address: str) -> None:
    page = open_page(f"{address}?run=clean&view=compare")
    assert page.locator("#with").input_value() == "ordinary", "the sibling is chosen by itself"
    names = page.evaluate("window.__charts.pair_abs.getOption().series.map((s) => s.name)")
    assert names == ["clean", "ordinary"]
    page.select_option("#with", "sabotage")
    page.wait_for_selector("body[data-ready=true]")
    assert "with=sabotage" in page.url


def test_differences_of_manifests_stand_first(open_page: Open, address: str) -> None:
    page = open_page(f"{address}?run=sabotage&view=manifest")
    first = page.locator("tbody tr").first.inner_text()
    assert "torch.sdpa" in page.locator("tbody").first.inner_text()
    assert "can change bits" in first or "differs" in first
    page.fill("input[type=search]", "dtype")
    assert page.locator("tbody").first.locator("tr:visible").count() == 1
    assert "decode = prefill" in page.locator("main").inner_text(), "the certificate is shown"


def test_chinese_dark_and_phone(open_page: Open, address: str) -> None:
    phone = {
        "viewport": {"width": 390, "height": 844},
        "device_scale_factor": 2,
        "locale": "zh-CN",
        "color_scheme": "dark",
    }
    for view in (*VIEWS, "runs"):
        page = open_page(f"{address}?run=sabotage&view={view}" if view != "runs" else address, **phone)
        assert page.evaluate("document.documentElement.lang") == "zh-CN"
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{view} sticks out"
        shot(page, f"phone-{view}")
    page = open_page(f"{address}?run=sabotage", **phone)
    assert "自第 12 步起不相等" in page.locator("#verdict").inner_text()
    page.click("#language")
    until(page, "document.documentElement.lang === 'en'")
    ready(page)
    assert "Unequal since step 12" in page.locator("#verdict").inner_text()
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"


def test_live_while_a_run_writes(open_page: Open, serve: Callable[..., str], tmp_path: Path) -> None:
    url = serve(tmp_path)
    page = open_page(url)
    assert "zerodrift demo --record" in page.locator(".empty").inner_text(), "the empty state says how to begin"
    shot(page, "empty")
    page.wait_for_selector("#live[data-state=on]")
    record_run(tmp_path, "fresh", steps=2)
    page.get_by_role("link", name="fresh").click()
    page.wait_for_selector("#verdict[data-verdict=equal]")
    until(page, "window.__charts.k3?.getOption().series[0].data.length === 2")
    record_run(tmp_path, "fresh", steps=4, broken_from=3)
    page.wait_for_selector("#verdict[data-verdict=unequal]")
    assert "Unequal since step 3" in page.locator("#verdict").inner_text()


def test_errors_are_told_and_can_be_left(open_page: Open, address: str) -> None:
    page = open_page(f"{address}?run=nowhere", expect_status=404)
    assert "no run 'nowhere'" in page.locator("#failure").inner_text()
    page.get_by_role("link", name="All runs").click()
    page.wait_for_selector("body[data-view=runs][data-ready=true]")


def test_recorded_text_cannot_become_markup(open_page: Open, serve: Callable[..., str], tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)>"
    record_run(tmp_path, "evil", steps=1, broken_from=0, note=evil, model=evil, manifest={evil: evil})
    url = serve(tmp_path)
    for view in ("overview", "manifest"):
        page = open_page(f"{url}?run=evil&view={view}")
        assert evil in page.locator("main").inner_text()
        assert page.locator("main img").count() == 0


def test_the_token_opens_the_page_and_leaves_the_address(
    open_page: Open, serve: Callable[..., str], tmp_path: Path
) -> None:
    record_run(tmp_path, steps=1)
    url = serve(tmp_path, "secret")
    page = open_page(url)
    assert page.locator("tbody tr").count() == 1 and "secret" not in page.url
    refused = open_page(url.split("#")[0], expect_status=401)
    assert "needs its token" in refused.locator("#failure").inner_text()


def test_explain_runs_from_the_page(open_page: Open, serve: Callable[..., str], tmp_path: Path) -> None:
    record_run(tmp_path, steps=1, broken_from=0)
    answer = {"verdict": "layer 3 mlp.down_proj: weights differ", "evidence": [
        {"stage": "weights", "question": "same tensors?", "answer": "1 of 272 differs", "clean": False},
    ]}  # fmt: skip
    program = f"import sys; open(sys.argv[1], 'w').write({json.dumps(answer)!r})"
    url = serve(tmp_path, explainer=Explainer((sys.executable, "-c", program, "{out}")))
    page = open_page(f"{url}?run=run&view=sample&step=0&request=step0/p0&index=0")
    page.click("#explain")
    page.wait_for_selector("#explanation table")
    shown = page.locator("#explanation").inner_text()
    assert "layer 3 mlp.down_proj: weights differ" in shown and "1 of 272 differs" in shown
