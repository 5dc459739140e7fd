"""What deploy/ ships: fields that the published schemas require, names that exist here, rules that fire.

No CRD schema of KubeRay or the Prometheus operator is on PyPI or in Debian, so the fields are checked one by one, and
against the schema itself where KUBERAY_CRDS names a copy.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from configparser import RawConfigParser
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from jsonschema import Draft202012Validator

from rollout import cli
from rollout.config import load_settings
from trainer_bridge.cli import register

if not any(c.callback is not None and c.callback.__name__ == "demo" for c in cli.app.registered_commands):
    register(cli.app)
ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERAY = sorted((DEPLOY / "kuberay").glob("*.yaml"))


def documents(path: Path) -> list[dict[str, Any]]:
    return [d for d in yaml.safe_load_all(path.read_text(encoding="utf-8")) if d]


def command_takes(words: list[str]) -> None:
    """The parser takes these options, and the overrides are settings."""
    verb, *args = words
    command = typer.main.get_command(cli.app).commands[verb]  # type: ignore[attr-defined]
    context = command.make_context(verb, list(args), resilient_parsing=True)
    load_settings(None, context.params.get("overrides") or [])


def cluster_of(document: dict[str, Any]) -> dict[str, Any]:
    spec = document["spec"]
    return spec["rayClusterSpec"] if document["kind"] == "RayJob" else spec  # type: ignore[no-any-return]


@pytest.mark.parametrize("path", KUBERAY, ids=lambda p: p.name)
def test_kuberay(path: Path) -> None:
    first = documents(path)[0]
    assert first["apiVersion"] == "ray.io/v1" and first["kind"] in ("RayJob", "RayCluster")
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", first["metadata"]["name"])
    cluster = cluster_of(first)
    assert cluster["authOptions"] == {"mode": "token"}, "Ray wants a token"
    head, workers = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert head["rayStartParams"]["num-cpus"] == "0", "no replica on the head"
    for group in (head, *workers):
        # The operator's schema takes strings only here.
        assert all(isinstance(v, str) for v in group["rayStartParams"].values())
        (container,) = group["template"]["spec"]["containers"]
        resources = container["resources"]
        assert resources["limits"] == resources["requests"], "guaranteed class: neighbours cannot slow a replica"
        assert {"name", "image"} <= container.keys() and "command" not in container, "KubeRay sets the command itself"
        mounted = {m["name"] for m in container.get("volumeMounts", ())}
        assert mounted == {v["name"] for v in group["template"]["spec"].get("volumes", ())}
    for group in workers:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"] and group["groupName"]


@pytest.mark.parametrize("path", [p for p in KUBERAY if "ascend" in p.name], ids=lambda p: p.name)
def test_ascend_groups_state_the_npu_resource(path: Path) -> None:
    (group,) = cluster_of(documents(path)[0])["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    stated = json.loads(json.loads(group["rayStartParams"]["resources"]))
    assert stated == {"NPU": int(container["resources"]["limits"]["huawei.com/Ascend910"])}
    mounts = {m["mountPath"] for m in container["volumeMounts"]}
    assert {"/usr/local/Ascend/driver", "/etc/hccn.conf", "/dev/shm"} <= mounts
    assert {"name": "HCCL_DETERMINISTIC", "value": "strict"} in container["env"]


@pytest.mark.parametrize("path", [p for p in KUBERAY if "rayjob" in p.name], ids=lambda p: p.name)
def test_jobs_run_commands_that_exist(path: Path) -> None:
    spec = documents(path)[0]["spec"]
    words = shlex.split(spec["entrypoint"])
    assert words[:3] == ["python", "-m", "rollout"]
    command_takes(words[3:])
    config = Path(words[words.index("--config") + 1])
    assert (ROOT / config.relative_to("/opt/zerodrift")).exists()
    assert spec["submissionMode"] == "K8sJobMode" and spec["shutdownAfterJobFinishes"] is True
    assert spec["backoffLimit"] >= 0 and spec["ttlSecondsAfterFinished"] > 0
    assert isinstance(yaml.safe_load(spec["runtimeEnvYAML"]), dict)


@pytest.mark.parametrize("path", [p for p in KUBERAY if "raycluster" in p.name], ids=lambda p: p.name)
def test_clusters_have_a_grpc_service_and_are_scraped(path: Path) -> None:
    cluster, service, monitor = documents(path)
    name = cluster["metadata"]["name"]
    assert service["kind"] == "Service" and service["spec"]["selector"]["ray.io/cluster"] == name
    head = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    ports = {p["name"]: p["containerPort"] for p in head["ports"]}
    assert service["spec"]["ports"][0]["targetPort"] in ports
    assert monitor["spec"]["podMetricsEndpoints"][0]["port"] in ports
    metrics = str(ports["metrics"])
    assert cluster["spec"]["headGroupSpec"]["rayStartParams"]["metrics-export-port"] == metrics


def test_ray_cluster_launcher() -> None:
    config = yaml.safe_load((DEPLOY / "ray/cluster.yaml").read_text())
    assert config["provider"]["type"] == "local" and len(config["provider"]["worker_ips"]) == config["max_workers"]
    for commands in (config["head_start_ray_commands"], config["worker_start_ray_commands"]):
        assert "ray stop" in commands[0] and "RAY_AUTH_MODE=token" in commands[1]
        assert "--metrics-export-port" in commands[1]
    environment = yaml.safe_load((DEPLOY / "ray/runtime_env.yaml").read_text())
    assert environment["working_dir"] == "./" and all(isinstance(v, str) for v in environment["env_vars"].values())


@pytest.mark.parametrize("path", sorted((DEPLOY / "systemd").glob("*.service")), ids=lambda p: p.name)
def test_systemd_units(path: Path) -> None:
    unit = RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(path)
    program, *words = shlex.split(unit["Service"]["ExecStart"])
    assert program.endswith("/zerodrift")
    command_takes(words)
    assert unit["Service"]["NoNewPrivileges"] == "true" and unit["Install"]["WantedBy"]


def tool(name: str) -> str:
    """A program that checks for us; `make test-deploy` fetches all of them and then demands them."""
    beside = Path(sys.executable).with_name(name)
    found = shutil.which(name, path=f"{ROOT / '.tools/usr/bin'}{os.pathsep}{os.environ['PATH']}") or (
        str(beside) if beside.exists() else None
    )
    if found is None:
        assert "ZERODRIFT_DEPLOY_TOOLS" not in os.environ, f"{name} is missing"
        pytest.skip(f"{name} is missing; `make test-deploy` fetches it")
    return found


def run(*words: str | Path, cwd: Path = ROOT) -> None:
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr.strip(), done.stdout + done.stderr


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.npu"])
def test_images_copy_what_exists_and_pin_torch_first(name: str) -> None:
    text = (DEPLOY / "docker" / name).read_text()
    for line in re.findall(r"^COPY (.+) \S+$", text, re.M):
        assert all((ROOT / part).exists() for part in line.split()), line
    installs = re.findall(r"^RUN (?:python3 -m )?pip install (.*)$", text, re.M)
    assert "TORCH" in installs[0] and "'.[" in installs[-1]
    extras = set(re.search(r"\.\[([\w,]+)\]", installs[-1])[1].split(","))  # type: ignore[index]
    project = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", project, re.M) for extra in extras)
    assert re.search(r"^ARG TORCH=torch==2\.13\.0$", text, re.M)


def test_the_grafana_board_is_current_and_clashes_with_nobody() -> None:
    made = subprocess.run([sys.executable, DEPLOY / "grafana/board.py"], capture_output=True, text=True, check=True)
    text = (DEPLOY / "grafana/dashboards/zerodrift.json").read_text()
    assert made.stdout == text, "python deploy/grafana/board.py > deploy/grafana/dashboards/zerodrift.json"
    board = json.loads(text)
    assert board["uid"].startswith("zerodrift") and "id" not in board, "an id would overwrite another board"
    ids = [p["id"] for p in board["panels"]]
    assert len(set(ids)) == len(ids)
    cells: set[tuple[int, int]] = set()
    for p in board["panels"]:
        g = p["gridPos"]
        mine = {(x, y) for x in range(g["x"], g["x"] + g["w"]) for y in range(g["y"], g["y"] + g["h"])}
        assert g["x"] + g["w"] <= 24 and not (mine & cells), p["title"]
        cells |= mine
        assert all(t["expr"] for t in p["targets"])


def test_everything_provisioned_carries_our_name() -> None:
    """Grafana refuses a second data source, provider or board of one name: RL-Insight's and Ray's bring their own."""
    folder = DEPLOY / "grafana/provisioning"
    (source,) = yaml.safe_load((folder / "datasources/zerodrift.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((folder / "dashboards/zerodrift.yml").read_text())["providers"]
    assert source["name"].startswith("zerodrift") and source["uid"].startswith("zerodrift")
    assert not source.get("isDefault"), "whose default it is belongs to whoever runs Grafana"
    assert provider["name"] == provider["folder"] == "zerodrift"
    board = json.loads((DEPLOY / "grafana/dashboards/zerodrift.json").read_text())
    assert board["title"].startswith("zerodrift") and [v["name"] for v in board["templating"]["list"]] == ["datasource"]


def test_alerts() -> None:
    rules = yaml.safe_load((DEPLOY / "prometheus/rules.yml").read_text())
    names = {r["alert"]: r for g in rules["groups"] for r in g["rules"]}
    assert {"ZerodriftUnequalBits", "ZerodriftStaleWeights", "ZerodriftQueueFull"} <= names.keys()
    assert "for" not in names["ZerodriftUnequalBits"], "the first unequal bit is enough"
    for rule in names.values():
        assert rule["labels"]["severity"] in ("critical", "warning") and rule["annotations"]["summary"]


def test_promtool_agrees() -> None:
    promtool, folder = tool("promtool"), DEPLOY / "prometheus"
    for words in ("check rules rules.yml", "test rules rules_test.yml", "check config prometheus.yml"):
        done = subprocess.run([promtool, *words.split()], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.sh")), ids=lambda p: p.name)
def test_scripts_are_sound(path: Path) -> None:
    assert os.access(path, os.X_OK)
    run("bash", "-n", path)
    run(tool("shellcheck"), path)


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.npu"])
def test_hadolint_agrees(name: str, tmp_path: Path) -> None:
    hadolint, folder = tool("hadolint"), DEPLOY / "docker"
    run(hadolint, "--config", folder / ".hadolint.yaml", folder / name)
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM python:latest\nRUN cd /tmp && sudo apt-get install x\n")
    with pytest.raises(AssertionError, match="DL3007"):
        run(hadolint, "--config", folder / ".hadolint.yaml", bad)


@pytest.mark.parametrize("path", sorted((DEPLOY / "systemd").glob("*.service")), ids=lambda p: p.name)
def test_systemd_agrees(path: Path, tmp_path: Path) -> None:
    """Every line but the program, which is only there where it is installed."""
    analyze, unit = tool("systemd-analyze"), tmp_path / path.name
    unit.write_text(re.sub(r"^ExecStart=\S+", f"ExecStart={sys.executable}", path.read_text(), flags=re.M))
    run(analyze, "verify", unit)
    unit.write_text(unit.read_text().replace("Restart=", "Restrat="))
    with pytest.raises(AssertionError, match="Restrat"):
        run(analyze, "verify", unit)


@pytest.mark.parametrize("path", KUBERAY, ids=lambda p: p.name)
def test_kuberays_own_schema_agrees(path: Path) -> None:
    """With KUBERAY_CRDS=FOLDER, where KubeRay's ``ray.io_rayclusters.yaml`` and ``ray.io_rayjobs.yaml`` lie."""
    folder = os.environ.get("KUBERAY_CRDS")
    if folder is None:
        pytest.skip("KUBERAY_CRDS is not set; no package ships these schemas")
    document = documents(path)[0]
    crd = yaml.safe_load((Path(folder) / f"ray.io_{document['kind'].lower()}s.yaml").read_text())
    (version,) = [v for v in crd["spec"]["versions"] if v["name"] == "v1"]
    schema = closed(version["schema"]["openAPIV3Schema"]) | {"additionalProperties": True}
    errors = [f"{'/'.join(map(str, e.path))}: {e.message}" for e in Draft202012Validator(schema).iter_errors(document)]
    assert errors == []
    cluster_of(document)["headGroupSpec"]["template"]["spec"]["containers"][0]["imagge"] = "x"
    assert list(Draft202012Validator(schema).iter_errors(document)), "control: a field that is not there"


def closed(schema: Any) -> Any:
    """The schema with unknown fields refused, as `kubectl apply` does, and Kubernetes' own types in plain words."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    if made.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    if "properties" in made and not made.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made
