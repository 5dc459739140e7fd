"""``zerodrift doctor``: what is on this host, what is missing for which feature, and the exact next step.

Works anywhere and changes nothing: versions come from package metadata and files, and what could crash or start a
device is asked in a process of its own.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rollout.errors import RolloutError
from rollout.kernels.npu import environment, package_ops
from rollout.kernels.npu.host import device_nodes
from rollout.kernels.npu.lines import DISTRIBUTION, INSTALL, line_of
from rollout.kernels.registry import platform_default

State = Literal["ok", "absent", "broken", "not needed"]
PROBE_SECONDS = 120
ASK_TORCH_NPU = (
    "import torch, torch_npu; n = torch_npu.npu; "
    "print('zerodrift:', torch_npu.__version__, n.device_count() if n.is_available() else 0, "
    "n.get_device_name() if n.is_available() else '-', sep='|')"
)
ASK_PACKAGE = (
    "import torch, batch_invariant_ops as b; o = torch.ops.batch_invariant_ops; "
    "print('zerodrift:', 'cuda' if hasattr(b, 'set_batch_invariant_mode') else 'ascend', "
    "*[n for n in {required!r} if not hasattr(o, n)], sep='|')"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One part of the stack."""

    part: str
    state: State
    found: str
    needed_for: str
    next_step: str = ""

    def as_dict(self) -> dict[str, str]:
        """For ``--json``."""
        return dataclasses.asdict(self)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _ask(code: str) -> str:
    """Last words of a Python process of its own: what it printed after "zerodrift:", or why it failed."""
    # The parent may have turned torch's autoloading off; here it is part of the question.
    environ = {k: v for k, v in os.environ.items() if k != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
            check=False,
            env=environ,
        )
    except subprocess.TimeoutExpired:
        return f"failed|no answer within {PROBE_SECONDS} s"
    for line in done.stdout.splitlines():
        if line.startswith("zerodrift:|"):
            return line.removeprefix("zerodrift:|")
    words = [line for line in done.stderr.splitlines() if line.strip()]
    return f"failed|{words[-1] if words else f'exit code {done.returncode}'}"


@dataclass(frozen=True, slots=True)
class Host:
    """What the doctor asks; tests answer in its place."""

    nodes: Callable[[], tuple[str, ...]] = device_nodes
    version: Callable[[str], str | None] = _version
    ask: Callable[[str], str] = _ask
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    driver_file: Path = Path("/usr/local/Ascend/driver/version.info")
    machine: str = field(default_factory=platform.machine)


def examine(host: Host | None = None) -> tuple[Finding, ...]:
    """Every part, in the order in which to mend them."""
    host = host or Host()
    wanted = bool(host.nodes())
    return (
        _python(host),
        _devices(host),
        _driver(host, wanted),
        _cann(host, wanted),
        _torch_npu(host, wanted),
        _flash(host, wanted),
        _invariant(host, wanted),
        _triton(host),
        _environment(host, wanted),
        _ray(host, wanted),
        Finding("kernel set", "ok", platform_default(host.nodes), "kernels.name=auto"),
    )


def _absent(wanted: bool) -> State:
    return "broken" if wanted else "not needed"


def _python(host: Host) -> Finding:
    torch = host.version("torch")
    versions = f"Python {platform.python_version()}, torch {torch}, transformers {host.version('transformers')}"
    found = f"{versions}, {host.machine}"
    return Finding("python and torch", "ok" if torch else "broken", found, "everything", "" if torch else "make setup")


def _devices(host: Host) -> Finding:
    nodes = host.nodes()
    if nodes:
        return Finding("NPU", "ok", f"{len(nodes)} device nodes: {', '.join(nodes)}", "kernel set npu")
    step = (
        "nothing, to serve on CPU; in a container map /dev/davinci*, /dev/davinci_manager, /dev/devmm_svm and "
        "/dev/hisi_hdc"
    )
    return Finding("NPU", "absent", "no /dev/davinci*", "kernel set npu", step)


def _driver(host: Host, wanted: bool) -> Finding:
    try:
        lines = host.driver_file.read_text(encoding="utf-8").splitlines()
        found = next(
            (line.split("=", 1)[1] for line in lines if line.startswith("Version=")), lines[0] if lines else ""
        )
        return Finding("driver", "ok", found, "kernel set npu")
    except OSError:
        step = f"install the Ascend driver and firmware of your chip; in a container mount {host.driver_file.parent}"
        return Finding("driver", _absent(wanted), f"no {host.driver_file}", "kernel set npu", step if wanted else "")


def _cann(host: Host, wanted: bool) -> Finding:
    home = host.environ.get("ASCEND_HOME_PATH", "")
    step = "install CANN >= 8.5 and source its set_env.sh, which sets ASCEND_HOME_PATH and ASCEND_OPP_PATH"
    if not home:
        return Finding("CANN", _absent(wanted), "ASCEND_HOME_PATH is not set", "torch_npu", step if wanted else "")
    if not host.environ.get("ASCEND_OPP_PATH"):
        return Finding("CANN", "broken", f"{home}, but ASCEND_OPP_PATH is not set", "torch_npu", step)
    return Finding("CANN", "ok", home, "torch_npu")


def _torch_npu(host: Host, wanted: bool) -> Finding:
    version, torch = host.version("torch-npu"), host.version("torch") or ""
    series = ".".join(torch.split(".")[:2])
    install = f"pip install 'torch-npu=={series}.*', after CANN"
    if version is None:
        return Finding("torch_npu", _absent(wanted), "not installed", "kernel set npu", install if wanted else "")
    if not version.startswith(f"{series}."):
        return Finding("torch_npu", "broken", f"{version} beside torch {torch}", "kernel set npu", install)
    answer = host.ask(ASK_TORCH_NPU).split("|")
    if answer[0] == "failed":
        step = (
            "source CANN's set_env.sh in this shell; without an NPU uninstall torch_npu, since it breaks `import torch`"
        )
        return Finding("torch_npu", "broken", f"{version} does not import: {answer[1]}", "kernel set npu", step)
    if answer[1] == "0":
        state: State = "broken" if wanted else "ok"
        step = "check npu-smi info and ASCEND_RT_VISIBLE_DEVICES" if wanted else ""
        return Finding("torch_npu", state, f"{version}, no device visible", "kernel set npu", step)
    return Finding("torch_npu", "ok", f"{version}, {answer[1]} x {answer[2]}", "kernel set npu")


def _flash(host: Host, wanted: bool) -> Finding:
    version = host.version(DISTRIBUTION)
    if version is None:
        return Finding(
            DISTRIBUTION, _absent(wanted), "not installed", "attention on the NPU", INSTALL if wanted else ""
        )
    try:
        line = line_of(version)
    except RolloutError as error:
        return Finding(DISTRIBUTION, "broken", version, "attention on the NPU", error.message)
    return Finding(DISTRIBUTION, "ok", f"{version}, line {line.name}: {line.promise}", "attention on the NPU")


def _invariant(host: Host, wanted: bool) -> Finding:
    needed = "faster products than the fixed-shape plan; attention plan fused_infer"
    version = host.version(package_ops.NAME)
    if version is None:
        step = "optional: the fixed-shape plan works without it" if wanted else ""
        return Finding(package_ops.NAME, "absent" if wanted else "not needed", "not installed", needed, step)
    answer = host.ask(ASK_PACKAGE.format(required=package_ops.REQUIRED)).split("|")
    if answer[0] == "ascend" and len(answer) == 1:
        return Finding(package_ops.NAME, "ok", f"{version}, Ascend", needed)
    if answer[0] == "cuda":
        found = f"{version}: the CUDA package of the same import name"
    else:
        found = f"{version}: " + (answer[1] if answer[0] == "failed" else f"lacks {', '.join(answer[1:])}")
    return Finding(package_ops.NAME, "broken" if wanted else "not needed", found, needed, package_ops.REPAIR)


def _triton(host: Host) -> Finding:
    version = host.version("triton-ascend")
    return Finding(
        "triton-ascend", "ok" if version else "not needed", version or "not installed", "nothing of zerodrift"
    )


def _environment(host: Host, wanted: bool) -> Finding:
    problems = environment.wrong(host.environ)
    needed = "determinism of collectives and products"
    if not problems:
        return Finding("environment", "ok", "every variable of the table is set", needed)
    contrary = [f"{v.name}={found}" for v, found in problems if found is not None]
    exports = " ".join(f"{v.name}={v.value}" for v, _ in problems)
    if contrary:
        step = f"correct it on both sides: export {exports}"
        return Finding("environment", "broken" if wanted else "not needed", ", ".join(contrary), needed, step)
    found = f"unset: {', '.join(v.name for v, _ in problems)}"
    step = f"workers set it themselves; the trainer's shell needs: export {exports}" if wanted else ""
    return Finding("environment", "absent" if wanted else "not needed", found, needed, step)


def _ray(host: Host, wanted: bool) -> Finding:
    version = host.version("ray")
    if version is None:
        return Finding("ray", "broken", "not installed", "replicas", "make setup")
    step = 'set worker.resources={"NPU": 1}: a replica that asks Ray for no NPU sees none' if wanted else ""
    return Finding("ray", "ok", version, "replicas", step)
