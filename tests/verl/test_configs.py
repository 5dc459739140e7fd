"""What the docs and configs/verl say fits veRL's own configuration, key by key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass

from examples.verl_grpo_cpu.run import compose
from trainer_bridge.verl.options import VerlOptions, read_options

ROOT = Path(__file__).parents[2]
FREE = ("engine_kwargs.zerodrift", "override_config.attn_implementation")
"""ends of paths below veRL's free dictionaries"""


def composed(name: str, folder: Path) -> Any:
    lines = yaml.safe_load((ROOT / "configs/verl" / name).read_text(encoding="utf-8"))
    # Later overrides win over those of cpu.yaml, which compose() begins with; what is added there is there already.
    later = [f"++{line[1:]}" if line.startswith("+") else line for line in lines]
    if any("zerodrift.addresses" in line for line in lines):
        # Those of the service that cpu.yaml hosts; beside addresses they are refused.
        later.append("~actor_rollout_ref.rollout.engine_kwargs.zerodrift.settings")
    return compose(folder, later)


@pytest.mark.parametrize("name", ["cpu.yaml", "qwen3_8b_npu.yaml"])
def test_every_override_is_a_key_of_verl_and_an_option_of_ours(name: str, tmp_path: Path) -> None:
    config = composed(name, tmp_path)
    rollout = config.actor_rollout_ref.rollout
    assert rollout.name == "zerodrift" and config.algorithm.adv_estimator == "grpo"
    options = read_options(OmegaConf.to_container(rollout.engine_kwargs))
    assert options.handshake == "strict"
    assert omega_conf_to_dataclass(rollout).name == "zerodrift"
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert actor.strategy == "fsdp2"
    with pytest.raises(Exception, match="nonesuch"):
        compose(tmp_path, ["actor_rollout_ref.rollout.nonesuch=1"])


def leaves(tree: dict[str, Any], prefix: str = "") -> list[str]:
    return [
        path
        for key, value in tree.items()
        for path in (leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"])
    ]


def test_the_yaml_and_the_options_of_the_docs() -> None:
    text = (ROOT / "docs/verl.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    tree = yaml.safe_load(block)
    base = compose(ROOT, [])
    for path in leaves(tree):
        assert any(free in path for free in FREE) or OmegaConf.select(base, path, default=...) is not ..., path
    assert read_options(tree["actor_rollout_ref"]["rollout"]["engine_kwargs"]) is not None
    told = set(
        re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| `")))
    )
    assert set(VerlOptions.model_fields) <= told, set(VerlOptions.model_fields) - told
