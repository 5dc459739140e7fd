"""Compose veRL's own configuration, start Ray, run veRL's own trainer, and read veRL's own metrics back."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
PAGE_SIZE = 16


def environment() -> dict[str, str]:
    """What every process needs: the plugin, the CPU platform, the trainer's kernel settings."""
    return {
        "VERL_USE_EXTERNAL_MODULES": "trainer_bridge.verl.plugin,trainer_bridge.verl.cpu",
        "VERL_PLATFORM": "zerodrift_cpu",
        "VERL_ENGINE_DEVICE": "cuda",
        "ZERODRIFT_ENGINE__PAGE_SIZE": str(PAGE_SIZE),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_DISABLE_IMPORT_WARNING": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }


def overrides(folder: Path, extra: Sequence[str] = ()) -> list[str]:
    """``configs/verl/cpu.yaml`` with the paths of this run."""
    lines: list[str] = yaml.safe_load((ROOT / "configs/verl/cpu.yaml").read_text(encoding="utf-8"))
    return [
        *lines,
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/train.parquet",
        f"actor_rollout_ref.model.path={folder}/model",
        f"reward.custom_reward_function.path={Path(__file__).with_name('task.py')}",
        f"trainer.default_local_dir={folder}/checkpoints",
        f"trainer.rollout_data_dir={folder}/rollouts",
        "trainer.logger=[console,file]",
        *extra,
    ]


def compose(folder: Path, extra: Sequence[str] = ()) -> Any:
    """veRL's ``ppo_trainer`` configuration with our overrides."""
    import verl
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    config_dir = Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(config_dir=str(config_dir), version_base=None):
        return hydra_compose(config_name="ppo_trainer", overrides=overrides(folder, extra))


def sampled(folder: Path) -> str:
    """SHA-256 over every step's prompts and answers as veRL dumped them; V1 writes rows as they end, so sorted."""
    state = hashlib.sha256()
    for file in sorted((folder / "rollouts").glob("*.jsonl"), key=lambda path: int(path.stem)):
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        state.update(json.dumps(sorted((row["input"], row["output"]) for row in rows)).encode())
    return state.hexdigest()


@contextlib.contextmanager
def ray_on_the_cpu(variables: dict[str, str]) -> Iterator[None]:
    """A Ray cluster whose "GPUs" are processes of this machine."""
    import ray

    ray.init(
        num_cpus=16,
        num_gpus=4,
        include_dashboard=False,
        log_to_driver=bool(os.environ.get("VERBOSE")),
        logging_level="error",
        runtime_env={"env_vars": variables},
    )
    try:
        yield
    finally:
        ray.shutdown()


def train(folder: Path, extra: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Run veRL's trainer; returns veRL's metrics, one dictionary a step."""
    from examples.verl_grpo_cpu.task import write_model, write_prompts

    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").exists():
        write_model(folder / "model")
        write_prompts(folder / "train.parquet")
    log = folder / "metrics.jsonl"
    log.unlink(missing_ok=True)
    variables = environment() | {"VERL_FILE_LOGGER_PATH": str(log)}
    os.environ.update(variables)
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
    from verl.trainer.main_ppo_v0 import TaskRunner

    config = compose(folder, extra)
    with ray_on_the_cpu(variables):
        run_ppo(config, task_runner_class=TaskRunnerV1 if config.trainer.use_v1 else TaskRunner)
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return [line["data"] | {"step": line["step"]} for line in lines]
