"""Logging of the entry points: structlog renders, the standard library carries.

Modules only call ``logging.getLogger(__name__)`` or ``structlog.get_logger(__name__)``; a program calls ``configure``
once. What is bound with ``structlog.contextvars`` (request_id, worker, weight_version) is in every line.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

import structlog
from structlog.typing import Processor


def configure(level: str, json: bool, *, stream: TextIO | None = None) -> None:
    """Send every record of ``level`` and above to ``stream`` (stderr), as text or as one JSON object a line.

    Colours only on a terminal. A second call replaces what the first one set up.
    """
    # Bars of libraries would tear the output of an entry point apart.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    target = sys.stderr if stream is None else stream
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        # Cached loggers would keep the first configuration.
        cache_logger_on_first_use=False,
    )
    handler = _Handler(target)
    render: list[Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if json
        else [structlog.dev.ConsoleRenderer(colors=target.isatty())]
    )
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    root = logging.getLogger()
    for other in [handler for handler in root.handlers if isinstance(handler, _Handler)]:
        root.removeHandler(other)
    root.addHandler(handler)
    root.setLevel(level.upper())


class _Handler(logging.StreamHandler[TextIO]):
    """Our handler, told apart from those that others put on the root logger."""
