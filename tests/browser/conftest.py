"""A headless Chromium, pages that may not fail in silence, and a dashboard over recorded runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.trainer_bridge.store.runs import record_run
from trainer_bridge.dashboard.explain import Explainer
from trainer_bridge.dashboard.serve import bind, page_address, serving_beside

CHROMIUM = Path("/usr/bin/chromium")
SHOTS = Path(__file__).parents[2] / "out/browser"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Debian's Chromium, driven by playwright."""
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is missing; `make test-browser` installs it")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield chromium
        chromium.close()


@contextmanager
def serving(root: Path, token: str | None = None, explainer: Explainer | None = None) -> Iterator[str]:
    """A dashboard of ``root`` in this process; its address."""
    listener = bind("127.0.0.1", 0)
    with serving_beside(root, listener, token=token, explainer=explainer):
        yield page_address(listener, token)


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Serves a folder until the test and its pages are done."""
    with ExitStack() as stack:
        yield lambda *options, **named: stack.enter_context(serving(*options, **named))


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean run, the same tokens broken from the start, and a 20-step run broken from step 12."""
    root = tmp_path_factory.mktemp("runs")
    manifest = {"kernels.op.attention": "cpu", "dtype.activations": "bfloat16", "host.name": "node-1"}
    trainer = manifest | {"kernels.op.attention": "torch.sdpa", "host.name": "node-2"}
    record_run(root, "clean", steps=8, sibling="ordinary", manifest=manifest, trainer_manifest=manifest, created=3.0)
    record_run(root, "ordinary", steps=8, broken_from=0, sibling="clean", manifest=manifest, created=2.0)
    family = {"checks": 128, "compared": 4096, "control": "one bit of one row", "control_caught": True, "cpu_s": 1.0}
    families = [
        family | {"name": "steps", "title": "decode = prefill = training", "failures": []},
        family | {"name": "linear", "title": "products at every row count", "failures": ["row 3 of 7 differs"]},
    ]
    certificate = {"format": "zerodrift.certificate/1", "holds": False, "level": "quick", "families": families}
    record_run(
        root, "sabotage", steps=20, broken_from=12, manifest=manifest, trainer_manifest=trainer, created=1.0,
        certificate=certificate,
    )  # fmt: skip
    return root


@pytest.fixture(scope="session")
def address(runs: Path) -> Iterator[str]:
    """A dashboard over ``runs``."""
    with serving(runs) as url:
        yield url


Open = Callable[..., Any]


@pytest.fixture
def open_page(browser: Any, serve: Any) -> Iterator[Open]:
    """Opens an address and waits until it is drawn. Any console error, page error or foreign request fails the test."""
    contexts: list[Any] = []
    wrong: list[str] = []
    expected: set[int] = set()

    def open_at(url: str, *, expect_status: int | None = None, **options: Any) -> Any:
        if expect_status is not None:
            expected.add(expect_status)
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 860}, "locale": "en-US"} | options))
        contexts.append(context)
        page = context.new_page()

        def on_console(message: Any) -> None:
            # The browser itself logs a failed load; the status that a test provokes is no fault.
            if message.type == "error" and not any(f"status of {code}" in message.text for code in expected):
                wrong.append(f"console: {message.text}")

        page.on("console", on_console)
        page.on("pageerror", lambda error: wrong.append(f"page: {error}"))
        own = (url.split("?")[0].split("#")[0], "data:", "blob:")
        page.on("request", lambda r: None if r.url.startswith(own) else wrong.append(f"request: {r.url}"))
        page.goto(url)
        ready(page)
        return page

    yield open_at
    for context in contexts:
        context.close()
    assert wrong == []


def ready(page: Any) -> None:
    """Wait until the view is drawn, what lies below the screen too."""
    page.wait_for_selector("body[data-ready=true][data-complete=true]")


def until(page: Any, condition: str) -> None:
    """Wait until a JavaScript expression holds; ``wait_for_function`` would need eval, which the page forbids."""
    again = "requestAnimationFrame(look)"
    page.evaluate(f"() => new Promise((done) => {{ const look = () => ({condition}) ? done() : {again}; look(); }})")


def shot(page: Any, name: str, *, full: bool = False) -> None:
    """Keep a picture for people to look at."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{name}.png", full_page=full)
