"""The files of deploy/: each is read by the tool that knows its format, and by the command that it starts."""

from __future__ import annotations

import re
import runpy
import shutil
import socket
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from inflight.config.engine_args import EngineArgs
from inflight.engine.process.engine_process import MAX_END_SECONDS
from inflight.entrypoints.serve.asgi import PROBES
from tests.support.documented_commands import ROOT
from tests.unit.entrypoints.runner import invoke

DEPLOY = ROOT / "deploy"
HEALTH = runpy.run_path(str(DEPLOY / "health.py"))
COMMANDS = Path(sys.executable).parent


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(each) for each in command], capture_output=True, text=True, timeout=300)


MANIFESTS = {  # file -> its objects, as (kind, name)
    "kubernetes.yaml": {
        ("PersistentVolumeClaim", "inflight-models"),
        ("Deployment", "inflight"),
        ("Service", "inflight"),
    },
    "kubernetes-replicas.yaml": {
        ("StatefulSet", "inflight"),
        ("Service", "inflight"),
        ("PodDisruptionBudget", "inflight"),
    },
    "kubernetes-headless.yaml": {
        ("PersistentVolumeClaim", "inflight-models"),
        ("Deployment", "inflight-head"),
        ("StatefulSet", "inflight-node"),
        ("Service", "inflight-cluster"),
        ("Service", "inflight"),
        ("NetworkPolicy", "inflight-head"),
        ("NetworkPolicy", "inflight-node"),
    },
    "kuberay.yaml": {
        ("PersistentVolumeClaim", "inflight-models"),
        ("RayCluster", "inflight-ray"),
        ("Deployment", "inflight"),
        ("Service", "inflight"),
    },
}
SERVERS = {  # file -> the workload that serves HTTP
    "kubernetes.yaml": ("Deployment", "inflight"),
    "kubernetes-replicas.yaml": ("StatefulSet", "inflight"),
    "kubernetes-headless.yaml": ("Deployment", "inflight-head"),
    "kuberay.yaml": ("Deployment", "inflight"),
}
NODES = "kubernetes-headless.yaml", ("StatefulSet", "inflight-node")
# what a RayCluster of ray.io/v1 has, as far as the manifest uses it
RAY_FIELDS = {
    "cluster": {"rayVersion", "headGroupSpec", "workerGroupSpecs"},
    "head": {"rayStartParams", "template"},
    "workers": {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"},
}


def objects(file: str) -> dict[tuple[str, str], Any]:  # Any: what YAML has
    documents = list(yaml.safe_load_all((DEPLOY / file).read_text()))
    found = {(each["kind"], each["metadata"]["name"]): each for each in documents}
    assert len(found) == len(documents)
    return found


def pod_of(file: str, workload: tuple[str, str]) -> Any:
    return objects(file)[workload]["spec"]["template"]["spec"]


def values_of(pod: Any) -> dict[str, str]:
    """The arguments of the pod's container as option -> value; "" if it has none."""
    (container,) = pod["containers"]
    joined = " ".join(container["args"]).replace("=", " ")
    return dict(re.findall(r"(--[a-z-]+) ?((?!--)\S+)?", joined))


def test_the_dockerfile() -> None:
    done = run(COMMANDS / "hadolint", DEPLOY / "Dockerfile")
    assert done.returncode == 0, done.stdout


def test_the_dockerfile_copies_what_the_build_reads() -> None:
    copied = re.findall(r"^COPY (?!--)(.+) \S+$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    names = {name for line in copied for name in line.split()}
    assert names == {
        *("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "inflight", "inflight_bench"),
        *("deploy/health.py", "constraints.txt"),
    }
    assert all((ROOT / name).exists() for name in names)


def test_every_package_of_the_images_is_pinned() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    installs = re.findall(r"pip install .*", text)
    assert installs and all("-c /constraints.txt" in line for line in installs)
    assert "PIP_CONSTRAINT=/source/constraints.txt" in text and "PIP_BUILD_CONSTRAINT=" in text, "what builds the wheel"


def test_only_nodes_reach_the_port_of_the_replicas() -> None:
    found = objects("kubernetes-headless.yaml")
    pods = {
        kind: found[kind, name]["spec"]["template"]["metadata"]["labels"]
        for kind, name in (("Deployment", "inflight-head"), ("StatefulSet", "inflight-node"))
    }
    head, node = (found["NetworkPolicy", name]["spec"] for name in ("inflight-head", "inflight-node"))
    assert head["podSelector"]["matchLabels"] == pods["Deployment"]
    assert node["podSelector"]["matchLabels"] == pods["StatefulSet"] and node["ingress"] == []
    rules = {port["port"]: rule.get("from") for rule in head["ingress"] for port in rule["ports"]}
    (service,) = found["Service", "inflight-cluster"]["spec"]["ports"]
    assert rules == {8000: None, service["port"]: [{"podSelector": {"matchLabels": pods["StatefulSet"]}}]}


def test_the_images_have_the_torch_of_the_constraints() -> None:
    (pinned,) = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert set(re.findall(r"^ARG TORCH_VERSION=(\S+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)) == {pinned}


@pytest.mark.parametrize(
    ("arguments", "variables", "expected"),
    [
        ("", {}, "127.0.0.1 8000 None False False"),
        ("m --port 9000 --host=::", {"INFLIGHT_SERVE_PORT": "8000"}, "::1 9000 None False False"),
        ("m --port=1 --port=2", {}, "127.0.0.1 2 None False False"),
        ("", {"INFLIGHT_SERVE_HOST": "0.0.0.0", "INFLIGHT_SERVE_UDS": "/s"}, "127.0.0.1 8000 /s False False"),
        ("--ssl_certfile /c", {}, "127.0.0.1 8000 None True False"),
        ("--config FILE", {"INFLIGHT_SERVE_HOST": "10.0.0.1"}, "10.0.0.1 7000 None True True"),
    ],
)
def test_the_health_check_asks_where_the_server_listens(
    arguments: str, variables: dict[str, str], expected: str, tmp_path: Path
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("port: 7000 # not 8000\nssl_certfile: '/c'\nssl-ca-certs: /ca\nhost: ::\n")
    line = ["inflight", "serve", *arguments.replace("FILE", str(file)).split(), ""]
    assert " ".join(map(str, HEALTH["address_of"](line, variables))) == expected


def test_the_health_check_gives_the_status_of_the_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer(status: int) -> None:
            connection, _ = listener.accept()
            with connection:
                assert connection.recv(1000).startswith(b"GET /health ")
                connection.sendall(b"HTTP/1.1 %d X\r\ncontent-length: 0\r\n\r\n" % status)

        address = HEALTH["address_of"]([], {"INFLIGHT_SERVE_PORT": str(listener.getsockname()[1])})
        for status in (200, 503):
            server = threading.Thread(target=answer, args=(status,))
            server.start()
            assert HEALTH["status_of"](address) == status
            server.join()
    with pytest.raises(ConnectionRefusedError):
        HEALTH["status_of"](address)


def test_extras_of_the_images_exist() -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for file in ("Dockerfile", "compose.yaml"):
        for named in re.findall(r"EXTRAS=([a-z,-]+)", (DEPLOY / file).read_text()):
            assert set(named.split(",")) <= set(known)


def test_the_compose_file() -> None:
    done = run(COMMANDS / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", DEPLOY / "compose.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_stages_that_compose_builds() -> None:
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE))
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert {service["build"]["target"] for service in services.values()} == {"cpu", "cuda"} <= stages


def test_the_kubernetes_manifests(tmp_path: Path) -> None:
    """The tool does not know a RayCluster, so the objects beside it are checked, and the templates of its pods."""
    count = 0
    for file, expected in MANIFESTS.items():
        found = objects(file)
        assert set(found) == expected
        ray = found.pop(("RayCluster", "inflight-ray"), None)
        groups = [] if ray is None else [ray["spec"]["headGroupSpec"], *ray["spec"]["workerGroupSpecs"]]
        for number, group in enumerate(groups):
            template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": f"{number}"}}
            found["PodTemplate", f"{number}"] = {**template, "template": group["template"]}
        (tmp_path / file).write_text(yaml.safe_dump_all(found.values()))
        count += len(found)
    done = run(COMMANDS / "kubernetes-validate", "--strict", *tmp_path.iterdir())
    assert done.returncode == 0, done.stdout + done.stderr
    assert (done.stdout + done.stderr).count("passed for resource") == count


@pytest.mark.parametrize("file", MANIFESTS)
def test_the_objects_name_each_other(file: str) -> None:
    found = objects(file)
    workloads = {key: each for key, each in found.items() if key[0] in ("Deployment", "StatefulSet")}
    labels = [each["spec"]["template"]["metadata"]["labels"] for each in workloads.values()]
    for (kind, name), each in found.items():
        selector = each["spec"].get("selector")
        if kind == "Service":
            assert selector in labels, name
        elif selector is not None:
            assert selector["matchLabels"] in labels, name
    for (kind, name), each in workloads.items():
        assert each["spec"]["selector"]["matchLabels"] == each["spec"]["template"]["metadata"]["labels"], name
        assert kind == "Deployment" or ("Service", each["spec"]["serviceName"]) in found
        pod = each["spec"]["template"]["spec"]
        claims = each["spec"].get("volumeClaimTemplates", [])
        volumes = {volume["name"] for volume in [*pod["volumes"], *(claim["metadata"] for claim in claims)]}
        assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == volumes, name
        for volume in pod["volumes"]:
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            assert claim is None or ("PersistentVolumeClaim", claim) in found


@pytest.mark.parametrize("file", SERVERS)
def test_the_probes_are_paths_of_the_server(file: str) -> None:
    (container,) = pod_of(file, SERVERS[file])["containers"]
    probes = {kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
    assert probes == {"startup": "/ready", "liveness": "/live", "readiness": "/ready"}
    assert set(probes.values()) <= PROBES
    assert container["lifecycle"]["preStop"]


@pytest.mark.parametrize("file", SERVERS)
def test_a_pod_has_time_to_drain(file: str) -> None:
    pod = pod_of(file, SERVERS[file])
    (container,) = pod["containers"]
    drain = float(values_of(pod)["--shutdown-timeout"])
    wait = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= wait + drain + 70, "docs/serving.md: what the server needs at most"


@pytest.mark.parametrize(("file", "workload"), [*SERVERS.items(), NODES])
def test_the_arguments_of_a_pod_are_options(file: str, workload: tuple[str, str]) -> None:
    (container,) = pod_of(file, workload)["containers"]
    arguments = [each for each in container["args"] if "/" not in each]  # without the model: the embedded one
    joined = "\n".join(arguments).replace("$(POD_IP)", "127.0.0.1").replace("$(ORDINAL)", "1")
    done = invoke(["serve", *joined.split("\n"), "--port", "0", "--check"])
    assert done.exit_code == 0, done.output


def test_the_head_waits_for_the_nodes() -> None:
    """And the nodes find it before it is ready, and have the other numbers."""
    found = objects(NODES[0])
    head, nodes = (values_of(pod_of(NODES[0], each)) for each in (SERVERS[NODES[0]], NODES[1]))
    spec = found[NODES[1]]["spec"]
    size, local = int(head["--data-parallel-size"]), int(head["--data-parallel-size-local"])
    assert size == local + spec["replicas"] == int(nodes["--data-parallel-size"])
    assert (spec["ordinals"]["start"], nodes["--data-parallel-size-local"]) == (local, "1")
    service = found["Service", nodes["--data-parallel-address"]]["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    assert service["ports"][0]["port"] == EngineArgs().data_parallel_rpc_port
    token = [
        [
            each
            for each in pod_of(NODES[0], workload)["containers"][0]["env"]
            if each["name"] == "INFLIGHT_CLUSTER_TOKEN"
        ]
        for workload in (SERVERS[NODES[0]], NODES[1])
    ]
    assert token[0] == token[1] and "secretKeyRef" in token[0][0]["valueFrom"]
    assert pod_of(*NODES)["terminationGracePeriodSeconds"] > 2 * MAX_END_SECONDS


def test_the_ray_cluster() -> None:
    found = objects("kuberay.yaml")
    cluster = found["RayCluster", "inflight-ray"]
    assert cluster["apiVersion"] == "ray.io/v1"
    spec, (workers,) = cluster["spec"], cluster["spec"]["workerGroupSpecs"]
    fields = {"cluster": set(spec), "head": set(spec["headGroupSpec"]), "workers": set(workers)}
    assert fields == RAY_FIELDS
    (pinned,) = re.findall(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    text = (DEPLOY / "kuberay.yaml").read_text()
    assert spec["rayVersion"] == pinned and f'"ray[default]=={pinned}"' in text
    pod = pod_of("kuberay.yaml", SERVERS["kuberay.yaml"])
    (server,) = pod["containers"]
    head = f"{cluster['metadata']['name']}-head-svc:6379"
    assert f"--address={head} " in server["command"][2] and {"name": "RAY_ADDRESS", "value": head} in server["env"]
    values, ranks = values_of(pod), workers["template"]["spec"]["containers"][0]
    assert int(values["--pipeline-parallel-size"]) == workers["replicas"] == workers["maxReplicas"]
    assert values["--num-threads"] == ranks["resources"]["limits"]["cpu"]
    images = {spec["headGroupSpec"]["template"]["spec"]["containers"][0]["image"], ranks["image"], server["image"]}
    assert images == {"inflight:ray"}


def test_the_settings_file(tmp_path: Path) -> None:
    settings = yaml.safe_load((DEPLOY / "serve.yaml").read_text())
    del settings["model"]  # the embedded one
    settings["port"] = 0  # another test may listen on the port
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(settings))
    done = invoke(["serve", "--config", str(tmp_path / "serve.yaml"), "--check"])
    assert done.exit_code == 0, done.output


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
