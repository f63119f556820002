"""The files of deploy/: each is read by the tool that knows its format, and by the command that it starts."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from inflight.entrypoints.serve.asgi import PROBES
from tests.support.documented_commands import ROOT

DEPLOY = ROOT / "deploy"
COMMANDS = Path(sys.executable).parent


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(each) for each in command], capture_output=True, text=True, timeout=60)


def manifests() -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}


def test_the_dockerfile() -> None:
    done = run(COMMANDS / "hadolint", DEPLOY / "Dockerfile")
    assert done.returncode == 0, done.stdout


def test_the_dockerfile_copies_what_the_build_reads() -> None:
    copied = re.findall(r"^COPY (?!--)(.+) \S+$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    names = {name for line in copied for name in line.split()}
    assert names == {"setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "inflight", "inflight_bench"}
    assert all((ROOT / name).exists() for name in names)


def test_the_images_have_the_torch_of_the_constraints() -> None:
    (pinned,) = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert set(re.findall(r"^ARG TORCH_VERSION=(\S+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)) == {pinned}


def test_the_compose_file() -> None:
    done = run(COMMANDS / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", DEPLOY / "compose.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_stages_that_compose_builds() -> None:
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE))
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert {service["build"]["target"] for service in services.values()} == {"cpu", "cuda"} <= stages


def test_the_kubernetes_manifest() -> None:
    done = run(COMMANDS / "kubernetes-validate", "--strict", DEPLOY / "kubernetes.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(manifests()) == {"PersistentVolumeClaim", "Deployment", "Service"}


def test_the_probes_are_paths_of_the_server() -> None:
    (container,) = manifests()["Deployment"]["spec"]["template"]["spec"]["containers"]
    probes = {kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
    assert probes == {"startup": "/ready", "liveness": "/live", "readiness": "/ready"}
    assert set(probes.values()) <= PROBES
    assert container["lifecycle"]["preStop"]


def test_a_pod_has_time_to_drain() -> None:
    pod = manifests()["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    drain = float(container["args"][container["args"].index("--shutdown-timeout") + 1])
    wait = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= wait + drain + 70, "docs/serving.md: what the server needs at most"


def test_the_arguments_of_the_pod_are_options(monkeypatch: pytest.MonkeyPatch) -> None:
    (container,) = manifests()["Deployment"]["spec"]["template"]["spec"]["containers"]
    arguments = [each for each in container["args"] if "/" not in each]  # without the model: the embedded one
    done = run(COMMANDS / "inflight", "serve", *arguments, "--port", "0", "--check")
    assert done.returncode == 0, done.stderr


def test_the_settings_file(tmp_path: Path) -> None:
    settings = yaml.safe_load((DEPLOY / "serve.yaml").read_text())
    del settings["model"]  # the embedded one
    settings["port"] = 0  # another test may listen on the port
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(settings))
    done = run(COMMANDS / "inflight", "serve", "--config", tmp_path / "serve.yaml", "--check")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "inflight.service").read_text()
    assert "ExecStart=/opt/inflight/bin/inflight serve " in text
    unit = tmp_path / "inflight.service"
    unit.write_text(text.replace("/opt/inflight/bin/inflight", str(COMMANDS / "inflight")))  # it has to exist
    done = run("systemd-analyze", "verify", unit)
    assert done.returncode == 0, done.stderr
    assert "inflight.service" not in done.stderr, done.stderr
    unit.write_text(unit.read_text().replace("KillMode=mixed", "KillMode=mixd"))
    assert "mixd" in run("systemd-analyze", "verify", unit).stderr, "the check can fail"
