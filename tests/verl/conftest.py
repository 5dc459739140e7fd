"""Only where verl is installed (``make test-verl``); elsewhere nothing here is collected."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("verl") else ["*.py"]
