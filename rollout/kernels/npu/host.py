"""Whether Ascend devices are on this host, from its device nodes alone: nothing is imported."""

from __future__ import annotations

import re
from pathlib import Path

_NODE = re.compile(r"davinci\d+")


def device_nodes(root: Path = Path("/dev")) -> tuple[str, ...]:
    """Device nodes of NPUs, such as "davinci0", in order."""
    try:
        names = [path.name for path in root.iterdir()]
    except OSError:
        return ()
    return tuple(sorted((n for n in names if _NODE.fullmatch(n)), key=lambda n: int(n.removeprefix("davinci"))))
