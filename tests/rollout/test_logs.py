"""Logging of the entry points."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from rollout.logs import configure


@pytest.fixture(autouse=True)
def restored_root() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def test_json_lines_from_both_kinds_of_logger() -> None:
    stream = io.StringIO()
    configure("info", True, stream=stream)
    with structlog.contextvars.bound_contextvars(request_id="r1"):
        logging.getLogger("plain").info("took %d ms", 5)
        structlog.get_logger("fancy").warning("slow", worker=2)
    plain, fancy = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert (plain["event"], plain["level"], plain["logger"], plain["request_id"]) == (
        "took 5 ms",
        "info",
        "plain",
        "r1",
    )
    assert (fancy["event"], fancy["worker"], fancy["logger"], fancy["request_id"]) == ("slow", 2, "fancy", "r1")


def test_an_exception_stays_on_its_line() -> None:
    stream = io.StringIO()
    configure("info", True, stream=stream)
    try:
        raise ValueError("odd")
    except ValueError:
        logging.getLogger("plain").exception("failed")
    (line,) = stream.getvalue().splitlines()
    assert "ValueError: odd" in json.loads(line)["exception"]


def test_text_without_colours_off_a_terminal_and_below_level_is_silent() -> None:
    stream = io.StringIO()
    configure("warning", False, stream=stream)
    logging.getLogger("plain").info("hidden")
    structlog.get_logger("fancy").info("hidden")
    logging.getLogger("plain").warning("shown")
    assert "shown" in stream.getvalue()
    assert "hidden" not in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_a_second_call_replaces_the_first() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure("info", False, stream=first)
    configure("info", False, stream=second)
    logging.getLogger("plain").info("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1
