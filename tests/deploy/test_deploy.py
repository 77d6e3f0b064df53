"""Checks of what operators run that need no cluster: manifests, compose file, images, secrets, proxy."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast

import jsonschema
import kubernetes_validate
import pytest
import yaml
from fastapi.routing import APIRoute

from common.bus.streams import Cell
from common.children.own_folder import SHARED_MEMORY
from common.peers.server import NUM_PORTS
from common.private_networks import PRIVATE
from common.settings import KNOWN, PREFIX, TINY
from deploy.make_secrets import read_settings
from manager_service.http.operators import cluster_routes
from manager_service.http.schemas import WantedTotal
from rollout_service.settings import ON_GPU

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
KUBERNETES_GPU = ROOT / "deploy" / "kubernetes-gpu"
KUBERNETES_RANKS = ROOT / "deploy" / "kubernetes-gpu-ranks"
KUBERNETES_DOWNLOAD = ROOT / "deploy" / "kubernetes-download"
KUBERNETES_NODES = ROOT / "deploy" / "kubernetes-nodes"
VERSIONS = ("1.32", "1.37")
"""Versions of Kubernetes: the oldest that is promised, and the newest."""

TOLD = set(re.findall(r"`([a-z0-9-]+)`", (ROOT / "docs" / "operations.md").read_text()))
"""Names that operators read."""
TRIGGERS: dict[str, dict[str, Any]] = {
    "redis-streams": {
        "address": {"type": "string", "pattern": "^[a-z0-9.-]+:[0-9]+$"},
        "stream": {"type": "string"},
        "streamLength": {"type": "string", "pattern": "^[1-9][0-9]*$"},
    },
    "metrics-api": {
        "url": {"type": "string", "pattern": "^http://[a-z0-9.-]+:[0-9]+/"},
        "valueLocation": {"type": "string"},
        "targetValue": {"type": "string", "pattern": "^[1-9][0-9]*$"},
        "authMode": {"enum": ["apiKey", "basic", "bearer", "tls"]},
    },
}
"""Fields that each of KEDA's scalers reads; to an API server these are any strings."""
RESTRICTED = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
"""Volumes that pods of a namespace may have that enforces this level of Kubernetes' pod security standards."""


def documents() -> Iterator[tuple[str, dict[str, Any]]]:
    for file in sorted(KUBERNETES.glob("*.yaml")):
        for number, document in enumerate(yaml.safe_load_all(file.read_text())):
            yield f"{file.name}:{number}", document


MANIFESTS = {name: document for name, document in documents() if not name.startswith("kustomization")}


def named(kind: str) -> dict[str, Any]:
    return {d["metadata"]["name"]: d for d in MANIFESTS.values() if d["kind"] == kind}


@pytest.fixture(scope="module", autouse=True)
def schemas() -> Iterator[None]:
    """Has the library parse each version's definitions once: it would for each object."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kubernetes_validate.utils, "schema_contents", cache(kubernetes_validate.utils.schema_contents))
        yield


@pytest.mark.parametrize("name", MANIFESTS)
def test_each_manifest_is_valid(name: str) -> None:
    check(MANIFESTS[name])


def check(document: dict[str, Any]) -> None:
    """Holds an object to the schema of its API server, fields that it does not know included."""
    _check(json.dumps(document))


@cache
def _check(text: str) -> None:
    """Looks once at what several folders have."""
    document: dict[str, Any] = json.loads(text)
    if not document["apiVersion"].startswith("keda.sh/"):
        for version in VERSIONS:
            kubernetes_validate.validate(document, version, strict=True)
        return
    from cloudcoil.models.keda import v1alpha1 as keda  # imported here: it takes seconds

    known: Any = getattr(keda, document["kind"]).model_validate(document)
    assert known.model_dump(mode="json", by_alias=True, exclude_unset=True) == document
    for trigger in document["spec"].get("triggers", []):
        fields = TRIGGERS[trigger["type"]]
        schema = {"type": "object", "additionalProperties": False, "required": list(fields), "properties": fields}
        jsonschema.validate(trigger["metadata"], schema)


with_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl renders the folders")


def rendered(folder: Path) -> list[dict[str, Any]]:
    """The manifests that kubectl would send."""
    text = subprocess.run(["kubectl", "kustomize", folder], check=True, capture_output=True, text=True).stdout
    return list(yaml.safe_load_all(text))


@with_kubectl
@pytest.mark.parametrize(
    "folder", [KUBERNETES, KUBERNETES_GPU, KUBERNETES_RANKS, KUBERNETES_DOWNLOAD, KUBERNETES_NODES]
)
def test_what_kubectl_would_send_is_valid_and_whole(folder: Path) -> None:
    sent = rendered(folder)
    for document in sent:
        check(document)
    made = {d["metadata"]["name"] for d in sent if d["kind"] in ("ConfigMap", "Secret")}
    assert made <= references(sent) <= TOLD | made


def references(value: Any) -> set[str]:
    """Names of the config maps and secrets that objects refer to."""
    if isinstance(value, list):
        return {name for item in cast(list[Any], value) for name in references(item)}
    if not isinstance(value, dict):
        return set()
    found: set[str] = set()
    for key, inner in cast(dict[str, Any], value).items():
        if key in ("configMapRef", "configMapKeyRef", "configMap", "secretRef", "secretKeyRef", "secret"):
            found.add(inner.get("name") or inner["secretName"])
        found |= references(inner)
    return found


def test_the_manifests_run_what_compose_runs_with_settings_that_there_are() -> None:
    workloads = {**named("Deployment"), **named("StatefulSet")}
    of_compose_alone = {"store", "rollout-gpu", "trainer-gpu"}  # a development's store; patches
    assert set(workloads) == set(COMPOSE["services"]) - of_compose_alone
    shared = set(re.findall(r"^(\w+)=", (KUBERNETES / "settings.env").read_text(), re.MULTILINE))
    for name, document in workloads.items():
        for container in document["spec"]["template"]["spec"]["containers"]:
            own = {row["name"] for row in container.get("env", [])}
            unknown = {row for row in own | shared if row.startswith(PREFIX)} - {PREFIX + key.upper() for key in KNOWN}
            assert not unknown
            assert own - {"REDIS_PASSWORD"} <= set(COMPOSE["services"][name]["environment"]), name


def test_the_kustomization_names_every_file() -> None:
    listed = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
    assert set(listed["resources"]) == {f.name for f in KUBERNETES.glob("*.yaml")} - {"kustomization.yaml"}
    for generator in listed["configMapGenerator"]:
        for file in [*generator.get("envs", []), *generator.get("files", [])]:
            assert (KUBERNETES / file.rpartition("=")[2]).is_file()


@with_kubectl
@pytest.mark.parametrize("name", ["rollout", "trainer"])
def test_the_patches_for_gpus_give_manifests_alike_compose(name: str) -> None:
    sent = rendered(KUBERNETES_GPU)
    (document,) = (d for d in sent if (d["kind"], d["metadata"]["name"]) == ("Deployment", name))
    (container,) = document["spec"]["template"]["spec"]["containers"]
    environment = {row["name"]: row.get("value") for row in container["env"]}
    in_compose = COMPOSE["services"][f"{name}-gpu"]
    fixed = {key: value for key, value in in_compose["environment"].items() if re.fullmatch("[a-z0-9]+", value or "")}
    own = {key: value for key, value in fixed.items() if key.startswith("MARLAAS_")}
    assert own["MARLAAS_" + name.upper() + "_DEVICE"] == "cuda" and own.items() <= environment.items()
    assert container["image"].partition(":")[0] == in_compose["image"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert {"tmp"} <= {volume["name"] for volume in document["spec"]["template"]["spec"]["volumes"]}


@with_kubectl
@pytest.mark.parametrize(("folder", "devices"), [(KUBERNETES_GPU, 1), (KUBERNETES_RANKS, 2)])
def test_on_gpus_workers_have_room_for_a_real_base_and_its_adapters(folder: Path, devices: int) -> None:
    sent = rendered(folder)
    pods = {d["metadata"]["name"]: d["spec"]["template"]["spec"] for d in sent if d["kind"] == "Deployment"}
    (settings,) = (d["data"] for d in sent if d["kind"] == "ConfigMap" and d["metadata"]["name"].startswith("marlaas-"))
    (claim,) = (
        d["metadata"]["name"]
        for d in sent
        if d["kind"] == "PersistentVolumeClaim" and "models" in d["metadata"]["name"]
    )
    for name in ("manager", "env", "rollout", "trainer"):
        [mount] = [row for row in pods[name]["containers"][0]["volumeMounts"] if row["name"] == "models"]
        assert Path(settings["HF_HOME"]).is_relative_to(mount["mountPath"]) and mount["readOnly"]
        assert volumes(pods[name])["models"] == {"claimName": claim, "readOnly": True}
    assert settings["HF_HUB_OFFLINE"] == "1", "no policy lets workers out to the hub"
    memory = volumes(pods["rollout"])["shared-memory"]
    assert memory["medium"] == "Memory" and num_bytes(memory["sizeLimit"]) >= 2 * ON_GPU["rollout_idle_adapter_bytes"]
    assert {"name": "shared-memory", "mountPath": str(SHARED_MEMORY)} in pods["rollout"]["containers"][0][
        "volumeMounts"
    ]
    assert num_bytes(memory["sizeLimit"]) < num_bytes(limits(pods["rollout"])["memory"]) / 2, (
        "it counts as the container's"
    )
    for name in ("rollout", "trainer"):
        probe = pods[name]["containers"][0]["startupProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] >= 3600 and probe["exec"]
    ranks = {row["name"]: row.get("value") for row in pods["trainer"]["containers"][0]["env"]}.get(
        "MARLAAS_TRAINER_RANKS", "1"
    )
    assert (ranks, limits(pods["trainer"])["nvidia.com/gpu"]) == (str(devices), str(devices))
    assert ("shared-memory" in volumes(pods["trainer"])) == (devices > 1)


def volumes(pod: dict[str, Any]) -> dict[str, Any]:
    """Each volume by its name."""
    return {v["name"]: next(value for key, value in v.items() if key != "name") for v in pod["volumes"]}


def limits(pod: dict[str, Any]) -> dict[str, str]:
    return pod["containers"][0]["resources"]["limits"]


def num_bytes(quantity: str) -> int:
    """The bytes of a quantity such as `8Gi`, or `8g` in the compose file."""
    number, unit = re.fullmatch(r"(\d+)([KMGkmg])[ib]?", quantity).groups()  # pyright: ignore[reportOptionalMemberAccess]
    return int(number) << {"k": 10, "m": 20, "g": 30}[unit.lower()]


def test_the_download_alone_reaches_the_hub_and_has_its_token() -> None:
    job, policy = yaml.safe_load_all((KUBERNETES_DOWNLOAD / "download.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert policy["spec"]["podSelector"]["matchLabels"] == job["spec"]["template"]["metadata"]["labels"]
    assert [port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]] == [443]
    assert {row["name"] for row in container["env"]} == {"MARLAAS_BASE_MODELS", "HF_HOME", "HF_TOKEN"}
    listed = yaml.safe_load((KUBERNETES_GPU / "kustomization.yaml").read_text())["configMapGenerator"][0]["literals"]
    assert f"HF_HOME={container['env'][1]['value']}" in listed, "where workers look"
    assert volumes(pod)["models"]["claimName"] == "models" and pod["securityContext"]["runAsNonRoot"]
    others = [*KUBERNETES.glob("*.yaml"), *KUBERNETES_GPU.glob("*.yaml"), ROOT / "docker-compose.yml"]
    assert not [file for file in others if "HF_TOKEN" in file.read_text()]


def test_the_download_is_of_what_its_base_models_name(tmp_path: Path) -> None:
    job = next(yaml.safe_load_all((KUBERNETES_DOWNLOAD / "download.yaml").read_text()))
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MARLAAS_BASE_MODELS": f"tiny,q={tmp_path}"}
    done = subprocess.run([sys.executable, *command[1:]], env=environment, check=True, capture_output=True, text=True)
    assert done.stdout.split() == [str(TINY), str(tmp_path)]
    assert subprocess.run(
        [sys.executable, *command[1:]], env=environment | {"MARLAAS_BASE_MODELS": "q=none"}
    ).returncode


def test_compose_has_room_for_adapters_and_the_hubs_cache() -> None:
    services = COMPOSE["services"]
    assert num_bytes(services["rollout-gpu"]["shm_size"]) >= 2 * ON_GPU["rollout_idle_adapter_bytes"]
    for name in ("manager", "env", "rollout", "trainer", "rollout-gpu", "trainer-gpu"):
        environment = services[name]["environment"]
        assert (environment["HF_HOME"], environment["HF_HUB_OFFLINE"]) == ("/models/huggingface", "1")
        assert any(":/models:ro" in volume for volume in services[name]["volumes"])


def test_what_is_compiled_for_a_gpu_outlives_its_container() -> None:
    for name in ("rollout-gpu", "trainer-gpu"):
        service = COMPOSE["services"][name]
        found = {key: value for key, value in service["environment"].items() if not key.startswith(PREFIX)}
        caches = [value for key, value in found.items() if re.search("CACHE_(ROOT|DIR)$", key)]
        assert len(caches) == 2 and all(value.startswith("/compiled/") for value in caches)
        assert "compiled:/compiled" in service["volumes"] and "compiled" in COMPOSE["volumes"]


def test_rollout_workers_alone_reach_each_others_ports_and_have_a_folder_for_adapters() -> None:
    policy = named("NetworkPolicy")["peers"]["spec"]
    rollout = {"podSelector": {"matchLabels": {"app": "rollout"}}}
    ports = [{"protocol": "TCP", "port": 7600, "endPort": 7600 + NUM_PORTS - 1}]
    assert policy["ingress"] == [{"from": [rollout], "ports": ports}]
    assert policy["egress"] == [{"to": [rollout], "ports": ports}]
    (container,) = named("Deployment")["rollout"]["spec"]["template"]["spec"]["containers"]
    environment = {row["name"]: row.get("value") for row in container["env"]}
    assert (environment["MARLAAS_PEER_PORT"], environment["MARLAAS_CACHE_DIR"]) == ("7600", "/cache")
    assert {"name": "cache", "mountPath": "/cache"} in container["volumeMounts"]
    for name in ("rollout", "rollout-gpu", "trainer", "trainer-gpu"):
        assert "cache:/cache" in COMPOSE["services"][name]["volumes"] and "cache" in COMPOSE["volumes"]
        assert COMPOSE["services"][name]["environment"]["MARLAAS_CACHE_DIR"] == "/cache"


def test_the_manifests_and_compose_configure_redis_alike() -> None:
    assert (KUBERNETES / "redis.conf").read_text() == (ROOT / "deploy" / "docker" / "redis.conf").read_text()


def test_stages_scale_on_the_streams_that_they_read_and_rollout_on_what_managers_want() -> None:
    cell, scaled, secrets = Cell("tiny"), named("ScaledObject"), named("TriggerAuthentication")
    triggers = {name: [t["metadata"] for t in d["spec"]["triggers"]] for name, d in scaled.items()}
    streams = {name: [metadata["stream"] for metadata in triggers[name]] for name in ("env", "trainer")}
    assert streams == {"env": [cell.env], "trainer": [cell.train]}
    for name, document in scaled.items():
        assert document["spec"]["scaleTargetRef"]["name"] == name
        assert "replicas" not in named("Deployment")[name]["spec"], "the autoscaler and the manifest would disagree"
        assert {t["authenticationRef"]["name"] for t in document["spec"]["triggers"]} <= set(secrets)
    # As many as are wanted, all at once, from a route that there is, with the key that it needs
    (wanted,), rollout = triggers["rollout"], scaled["rollout"]["spec"]
    service, _, path = wanted["url"].removeprefix("http://").partition("/")
    port = named("Service")["manager"]["spec"]["ports"][0]["port"]
    assert service == f"manager.marlaas.svc:{port}" and wanted["valueLocation"] in WantedTotal.model_fields
    assert f"/{path}" in {route.path for route in cluster_routes.router.routes if isinstance(route, APIRoute)}
    assert (wanted["targetValue"], wanted["authMode"]) == ("1", "bearer")
    key = {"parameter": "token", "name": "marlaas-keys", "key": "admin_key"}
    assert secrets[rollout["triggers"][0]["authenticationRef"]["name"]]["spec"]["secretTargetRef"] == [key]
    assert named("NetworkPolicy")["api"]["spec"]["ingress"] == [{"ports": [{"protocol": "TCP", "port": port}]}]
    behavior = rollout["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert [p["value"] for p in behavior["scaleUp"]["policies"]] == [rollout["maxReplicaCount"]]


def test_a_nodes_folder_outlives_pods_and_is_made_for_the_workers_uid() -> None:
    volume, claim = (
        named("PersistentVolume")["marlaas-node-folder"]["spec"],
        named("PersistentVolumeClaim")["node-folder"],
    )
    assert volume["claimRef"] == {"namespace": "marlaas", "name": claim["metadata"]["name"]}
    assert claim["spec"]["volumeName"] == "marlaas-node-folder" and "nodeAffinity" not in volume, (
        "each node has its own"
    )
    for name in ("rollout", "trainer"):
        pod = named("Deployment")[name]["spec"]["template"]["spec"]
        assert volumes(pod)["cache"] == {"claimName": "node-folder"}
    _, made = yaml.safe_load_all((KUBERNETES_NODES / "folder.yaml").read_text())
    maker = made["spec"]["template"]["spec"]
    *command, folder = maker["initContainers"][0]["command"]
    uid = pod["securityContext"]["runAsUser"]
    assert command == ["install", "-d", "-o", str(uid), "-g", str(uid), "-m", "0700"]
    assert volumes(maker)["node"]["path"] + folder.removeprefix("/node") == volume["hostPath"]["path"]


def test_every_pod_runs_without_rights_is_probed_and_has_a_memory_limit() -> None:
    for document in [*named("Deployment").values(), *named("StatefulSet").values()]:
        pod = document["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False and pod["securityContext"]["runAsNonRoot"] is True
        assert {kind for volume in pod.get("volumes", []) for kind in volume} - {"name"} <= RESTRICTED
        for container in pod["containers"]:
            assert "livenessProbe" in container and container["resources"]["limits"]["memory"]
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_env_workers_reach_redis_the_store_and_the_proxy_alone() -> None:
    def applies(policy: dict[str, Any]) -> bool:
        selector = policy["spec"]["podSelector"]
        labels, rows = selector.get("matchLabels", {}), selector.get("matchExpressions", [])
        return labels.get("app", "env") == "env" and all("env" in row["values"] for row in rows)

    policies = [p for p in named("NetworkPolicy").values() if "Egress" in p["spec"]["policyTypes"] and applies(p)]
    assert {p["metadata"]["name"] for p in policies} == {"nothing", "names", "to-redis", "to-store", "env-to-egress"}


# ---- compose --------------------------------------------------------------------------------------------------------

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())


def test_compose_keeps_the_env_workers_in() -> None:
    services, networks = COMPOSE["services"], COMPOSE["networks"]
    members = {name: {s for s, d in services.items() if name in d["networks"]} for name in networks}
    assert services["env"]["networks"] == ["sandbox"] and networks["sandbox"]["internal"]
    assert members["sandbox"] == {"redis", "store", "egress", "env"}
    assert services["exporter"]["networks"] == ["data"] and networks["data"]["internal"], "it leaves by its proxy"
    for service in services.values():
        assert service["cap_drop"] == ["ALL"] and service["read_only"]
        assert service["security_opt"] == ["no-new-privileges:true"]


def test_every_service_of_compose_has_a_memory_limit() -> None:
    assert [name for name, service in COMPOSE["services"].items() if "mem_limit" not in service] == []


def test_what_tenants_code_writes_is_bounded_in_bytes_and_files() -> None:
    [tmpfs] = COMPOSE["services"]["env"]["tmpfs"]
    assert "size=" in tmpfs and "nr_inodes=" in tmpfs
    [volume] = named("Deployment")["env"]["spec"]["template"]["spec"]["volumes"]
    assert volume["emptyDir"]["medium"] == "Memory" and volume["emptyDir"]["sizeLimit"]


def test_compose_gives_each_service_its_own_redis_user_and_no_other_secret() -> None:
    for name in ("manager", "exporter", "env", "rollout", "trainer"):
        environment = COMPOSE["services"][name]["environment"]
        assert environment["MARLAAS_REDIS_URL"].startswith(f"redis://{name}:${{REDIS_{name.upper()}_PASSWORD")
        others = [
            user.upper() for user in ("manager", "exporter", "env", "rollout", "trainer", "operator") if user != name
        ]
        assert not [
            value
            for value in filter(None, environment.values())
            for user in others
            if f"{user}_AWS" in value or f"REDIS_{user}" in value
        ]


def test_composes_store_keeps_objects_on_a_volume_that_is_the_bucket_and_every_service_has_its_key(
    tmp_path: Path,
) -> None:
    store, settings = COMPOSE["services"]["store"], read_settings(make_secrets(tmp_path)[".env.cluster"])
    folder, (volume, _, mounted) = Path(store["command"][-1]), store["volumes"][0].partition(":")
    assert volume in COMPOSE["volumes"] and store["command"][-2] == "posix"
    assert settings["MARLAAS_STORE_URL"].startswith(f"s3://{Path(mounted).relative_to(folder)}/")
    assert settings["AWS_ENDPOINT_URL"] == "http://store" + store["command"][store["command"].index("--port") + 1]
    for part, name in (("ACCESS_KEY_ID", "ROOT_ACCESS_KEY"), ("SECRET_ACCESS_KEY", "ROOT_SECRET_KEY")):
        keys = {value for variable, value in settings.items() if variable.endswith(f"_AWS_{part}")}
        assert len(keys) == 1 and store["environment"][name] == f"${{MANAGER_AWS_{part}:-}}"


NOT_IN_COMPOSE = {
    "MARLAAS_BASE_MODEL",
    "MARLAAS_DEVICES",
    "MARLAAS_ROLLOUT_SHARE",
    "MARLAAS_REPACK",
    "MARLAAS_DISK_RESERVE_BYTES",
}
"""Set in services that an operator adds, or of `marlaas up` alone, or of a store that is a folder."""


def test_what_the_docs_tell_an_operator_to_set_reaches_the_containers() -> None:
    passed = {name for service in COMPOSE["services"].values() for name in service.get("environment", {})}
    told = {
        name
        for page in ("operations.md", "real-models.md")
        for line in (ROOT / "docs" / page).read_text().splitlines()
        for name in re.findall(r"`(MARLAAS_[A-Z_]+[A-Z])\b", line)
    }
    assert told - passed - NOT_IN_COMPOSE == set()


# ---- images ---------------------------------------------------------------------------------------------------------

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DISTRIBUTION = {"google": "protobuf"}
MAY_BE_ABSENT = {"huggingface_hub", "triton"}  # the first comes with tokenizers, the second with torch for CUDA
IMAGES = {
    "manager": ["common", "manager_service"],
    "exporter": ["common", "manager_service"],
    "env": ["common", "env_service"],
    "torch": ["common", "base_model", "rollout_service", "trainer_service"],
}
ON_THE_USERS_MACHINE = ("commands", "supervisor.py", "embedded_redis.py", "processes.py", "cluster_file.py", "vllm")


def requirements(group: str) -> set[str]:
    lines = subprocess.run(
        [sys.executable, ROOT / "deploy" / "docker" / "requirements.py", group],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\n")
    return {line for line in lines if line}


def test_the_images_want_what_the_project_wants() -> None:
    everything = set(PYPROJECT["project"]["dependencies"])
    for image in ("manager", "env", "torch"):
        assert requirements(image) <= everything
    assert not any(name.startswith("torch") for image in ("manager", "env") for name in requirements(image))


def test_the_exporters_image_has_the_loggers_beside_what_the_manager_needs() -> None:
    extras = PYPROJECT["project"]["optional-dependencies"]
    loggers = {*extras["wandb"], *extras["trackio"]}
    assert requirements("exporter") > requirements("manager") | loggers
    assert requirements("exporter") - loggers <= set(PYPROJECT["project"]["dependencies"])


@pytest.mark.parametrize("image", IMAGES)
def test_each_image_installs_what_its_code_imports(image: str) -> None:
    installed = {re.split(r"[\[><=]", line)[0].replace("-", "_") for line in requirements(image)}
    ours = {path.name for path in ROOT.iterdir() if path.is_dir()}
    elsewhere = (*ON_THE_USERS_MACHINE, *(["/export/"] if image == "manager" else []))
    for folder in IMAGES[image]:
        for file in (ROOT / folder).rglob("*.py"):
            if not any(part in str(file.relative_to(ROOT)) for part in elsewhere):
                wanted = {DISTRIBUTION.get(name, name) for name in imported(file)}
                missing = wanted - installed - set(sys.stdlib_module_names) - ours - MAY_BE_ABSENT
                assert missing <= {"starlette", "hiredis"}, (file, missing)


def imported(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add((node.module or "").partition(".")[0])
    return names


# ---- secrets --------------------------------------------------------------------------------------------------------


def make_secrets(folder: Path) -> dict[str, str]:
    subprocess.run(
        [sys.executable, "-m", "deploy.make_secrets"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


def test_secrets_are_made_once_and_nobody_else_reads_them(tmp_path: Path) -> None:
    first = make_secrets(tmp_path)
    assert make_secrets(tmp_path) == first
    assert (tmp_path / ".env.cluster").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / ".cluster").stat().st_mode & 0o777 == 0o700
    values = [line.partition("=")[2] for line in first[".env.cluster"].splitlines() if "PASSWORD=" in line]
    assert len(set(values)) == len(values) == 8 and all(len(value) == 48 for value in values)
    assert not any(value in first[".cluster/redis/users.acl"] for value in values), "hashes alone"


def test_while_a_password_is_rotated_both_are_valid(tmp_path: Path) -> None:
    before = make_secrets(tmp_path)[".cluster/redis/users.acl"]
    with (tmp_path / ".env.cluster").open("a") as file:
        file.write("REDIS_ENV_OLD_PASSWORD=old\n")
    after = make_secrets(tmp_path)[".cluster/redis/users.acl"]
    assert (before.count("#"), after.count("#")) == (8, 9)


# ---- the proxy ------------------------------------------------------------------------------------------------------


def egress(hosts: str) -> list[str]:
    sys.path.insert(0, str(ROOT / "deploy" / "docker"))
    try:
        from egress import configuration
    finally:
        sys.path.pop(0)
    return configuration(hosts).splitlines()


def test_the_proxy_lets_listed_names_out_and_private_addresses_only_if_they_are_listed_too() -> None:
    lines = egress("api.example.org, *.example.com, 10.1.0.0/16")
    rules = [line for line in lines if line.startswith("http_access")]
    assert "acl named dstdomain api.example.org" in lines and "acl named dstdomain .example.com" in lines
    assert rules == [
        "http_access allow listed",
        "http_access deny private",
        "http_access deny encrypted !tls",
        "http_access allow named",
        "http_access deny all",
    ]


def test_the_proxy_refuses_what_the_services_refuse_and_its_image_has_that_list(tmp_path: Path) -> None:
    dockerfile = (ROOT / "deploy/docker/Dockerfile").read_text().partition(" AS egress\n")[2].partition("\nFROM ")[0]
    for source, target in re.findall(r"^COPY (\S+) /app/(\S+)$", dockerfile, re.MULTILINE):
        (tmp_path / target).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / source, tmp_path / target)
    program = "import egress; print(egress.configuration(''))"
    alone = [sys.executable, "-S", "-c", program]  # with the standard library and nothing else, as there
    told = subprocess.run(alone, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert f"acl private dst {' '.join(PRIVATE)}" in told.splitlines()


def test_the_proxy_without_a_list_lets_nothing_out() -> None:
    assert [line for line in egress("") if line.startswith("http_access allow")] == []
