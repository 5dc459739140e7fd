"""What the NPU set supports, by code line of flash_attn_npu: from the vendor's documents and the kernels' sources."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rollout.kernels.base import Capabilities
from rollout.kernels.npu.lines import LATER, CodeLine

PAGE_SIZE = 128
MAX_HEAD_DIM = 256

CAPABILITIES = Capabilities(
    dtypes=frozenset({torch.bfloat16, torch.float16}),
    page_sizes=frozenset({PAGE_SIZE}),
    max_head_dim=MAX_HEAD_DIM,
    features=frozenset({"causal", "gqa", "paged", "varlen", "backward"}),
)
"""What the set offers on every line. A window and a softcap, which the later line has, are not offered: no plan proves
them equal between decode and training."""

PACKAGE: Mapping[str, tuple[str, str]] = {
    "causal": ("yes", "yes"),
    "gqa": ("yes", "yes"),
    "paged": ("yes", "yes"),
    "varlen": ("yes", "yes"),
    "backward": ("by its v2 module", "yes"),
    "sliding_window": ("no", "yes, not offered"),
    "softcap": ("no", "yes, not offered"),
    "alibi": ("no", "no"),
    "mla": ("no", "no"),
    "fp8": ("no", "no"),
    "rope_in_kernel": ("no", "no"),
    "additive_mask": ("no", "no"),
    "attention_sinks": ("no", "no"),
    "linear_attention": ("no", "no"),
    "moe": ("no", "no"),
    "graph_capture": ("no", "only with scheduler_metadata, not offered"),
}
"""feature -> what the kernels have on (train-infer, later)"""


def describe(feature: str, line: CodeLine) -> str:
    """What the package can do about a feature on a line, in words."""
    return PACKAGE[feature][1 if line is LATER else 0]
