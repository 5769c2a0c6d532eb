"""compose/kubernetes: Kustomize makes valid, hardened manifests that agree with the processes."""

from __future__ import annotations

import copy
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft202012Validator, ValidationError

from drafter_svc.config import settings_schema
from gateway.config import GatewaySettings
from outrider.process.settings.config import Settings
from outrider_cli.verifier import VerifierWithDraftersSettings

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "compose/kubernetes"
LAYERS = ("base", "overlays/disaggregated-set", "overlays/inference-pool", "overlays/vllm")
VERSION = "1.34"
"""The oldest Kubernetes in which every field that we use works without a feature gate."""

Document = dict[str, Any]

SETTINGS: dict[str, type[Settings]] = {
    "outrider-gateway": GatewaySettings,
    "outrider-verifier": VerifierWithDraftersSettings,
    "outrider-drafter-ngram": settings_schema("ngram"),
    "outrider-drafter-model": settings_schema("model"),
}


def closed(required: str, optional: str = "", **properties: Any) -> Document:
    """Return the schema of an object with these fields only.

    A field that has no schema in `properties` may hold anything.
    """
    names = required.split()
    fields = {name: properties.get(name, {}) for name in names + optional.split()}
    return {
        "type": "object",
        "properties": fields,
        "required": names,
        "additionalProperties": False,
    }


def each(schema: Document, at_least: int = 1) -> Document:
    return {"type": "array", "items": schema, "minItems": at_least}


TEXT = {"type": "string", "minLength": 1}
COUNT = {"type": "integer", "minimum": 0}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}

# These schemas have only the fields that the overlays use. Kubernetes' own schemas check the pod
# templates inside.
ROLLING = closed(
    "type rollingUpdateConfiguration",
    type={"const": "RollingUpdate"},
    rollingUpdateConfiguration=closed("maxSurge maxUnavailable"),
)
GROUP = closed(
    "size workerTemplate restartPolicy",
    size=COUNT,
    restartPolicy={"enum": ["None", "RecreateGroupOnPodRestart"]},
)
ROLE = closed(
    "name spec",
    name={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63},
    spec=closed(
        "replicas leaderWorkerTemplate",
        "rolloutStrategy",
        replicas={"type": "integer", "minimum": 1},
        leaderWorkerTemplate=GROUP,
        rolloutStrategy=ROLLING,
    ),
)
PICKER = closed(
    "name port failureMode",
    name=TEXT,
    port=closed("number", number=PORT),
    failureMode={"enum": ["FailOpen", "FailClose"]},
)
POOL = closed(
    "selector targetPorts endpointPickerRef",
    selector=closed("matchLabels", matchLabels={"type": "object", "minProperties": 1}),
    targetPorts=each(closed("number", number=PORT)),
    endpointPickerRef=PICKER,
)
BACKEND = closed("group kind name", group=TEXT, kind=TEXT, name=TEXT)
ROUTE = closed(
    "parentRefs rules",
    parentRefs=each(closed("name", name=TEXT)),
    rules=each(closed("backendRefs", backendRefs=each(BACKEND))),
)
CUSTOM = {
    ("disaggregatedset.x-k8s.io/v1", "DisaggregatedSet"): closed("roles", roles=each(ROLE, 2)),
    ("inference.networking.k8s.io/v1", "InferencePool"): POOL,
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): ROUTE,
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of compose/kubernetes with the secrets that compose/secrets.sh makes."""
    copied = tmp_path_factory.mktemp("kubernetes") / "kubernetes"
    shutil.copytree(KUBERNETES, copied, ignore=shutil.ignore_patterns("secrets"))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [ROOT / "compose/secrets.sh", copied / "base/secrets"]
    subprocess.run(
        command, env={**os.environ, "PATH": path}, check=True, capture_output=True, timeout=60
    )
    return copied


@cache
def rendered(folder: Path) -> list[Document]:
    """Return the documents that Kustomize, in kubectl, makes from a folder."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    kubectl = shutil.which("kubectl", path=path)
    assert kubectl, "kubectl is missing: `make` installs it"
    done = subprocess.run(
        [kubectl, "kustomize", folder], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return list(yaml.safe_load_all(done.stdout))


@pytest.fixture(params=LAYERS)
def documents(request: pytest.FixtureRequest, tree: Path) -> list[Document]:
    return rendered(tree / request.param)


def templates(document: Document) -> Iterator[Document]:
    """Yield the templates of pods in a document."""
    spec = document.get("spec", {})
    if "template" in spec:
        yield spec["template"]
    for role in spec.get("roles", ()):
        yield role["spec"]["leaderWorkerTemplate"]["workerTemplate"]


def all_templates(documents: list[Document]) -> list[Document]:
    return [template for document in documents for template in templates(document)]


def of_kind(documents: list[Document], kind: str) -> dict[str, Document]:
    return {each["metadata"]["name"]: each for each in documents if each["kind"] == kind}


def component(template: Document) -> str:
    name: str = template["metadata"]["labels"]["app.kubernetes.io/name"]
    return name


def findings(document: Document) -> list[str]:
    """Return the errors of a document; a field that does not exist is an error."""
    custom = CUSTOM.get((document["apiVersion"], document["kind"]))
    checked = [document]
    errors: list[str] = []
    if custom is not None:
        schema = closed("apiVersion kind metadata spec", spec=custom)
        errors += [error.message for error in Draft202012Validator(schema).iter_errors(document)]
        meta = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": document["metadata"]}
        pods = [
            {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {}, "template": template}
            for template in templates(document)
        ]
        checked = [meta, *pods]
    for part in checked:
        try:
            kubernetes_validate.validate(part, VERSION, strict=True)
        except ValidationError as error:
            errors.append(f"{list(error.path)}: {error.message}")
    return errors


def test_every_document_is_valid_and_has_no_unknown_field(documents: list[Document]) -> None:
    assert len(documents) > 15
    assert [found for document in documents for found in findings(document)] == []


def test_an_unknown_field_of_a_pod_is_found_in_each_kind_of_document(
    documents: list[Document],
) -> None:
    kinds = set()
    for document in copy.deepcopy(documents):
        for template in templates(document):
            template["spec"]["containers"][0]["livenesProbe"] = {}
            kinds.add(document["kind"])
            assert any("livenesProbe" in found for found in findings(document)), document["kind"]
    assert {"Deployment", "DisaggregatedSet"} & kinds


def test_every_pod_is_unprivileged_read_only_and_limited(documents: list[Document]) -> None:
    pods = [template["spec"] for template in all_templates(documents)]
    assert len(pods) >= 4
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] >= 999
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {"cpu", "memory"} <= set(container["resources"]["requests"])
            assert "memory" in container["resources"]["limits"]


def test_every_pod_has_probes_of_its_readiness_and_its_life(documents: list[Document]) -> None:
    for pod in all_templates(documents):
        [container] = pod["spec"]["containers"]
        assert "readinessProbe" in container, component(pod)
        # A drafter without a verifier serves nobody, and a restart would not change that.
        is_drafter = component(pod).startswith("outrider-drafter-")
        assert ("livenessProbe" in container) is not is_drafter, component(pod)
        # Loading a model takes minutes, in which no liveness probe may end the pod.
        is_slow = component(pod) in {"outrider-gateway", "outrider-verifier"}
        assert ("startupProbe" in container) is is_slow, component(pod)


def test_no_variable_of_kubernetes_can_be_taken_for_a_setting(documents: list[Document]) -> None:
    """For a Service outrider-gateway, Kubernetes sets OUTRIDER_GATEWAY_PORT in every pod."""
    assert all(pod["spec"]["enableServiceLinks"] is False for pod in all_templates(documents))


def test_outriders_processes_are_not_process_1(documents: list[Document]) -> None:
    outriders = [pod for pod in all_templates(documents) if component(pod) != "outrider-redis"]
    assert all(pod["spec"]["shareProcessNamespace"] is True for pod in outriders)


def variables(documents: list[Document], pod: Document) -> dict[str, str]:
    """Return the environment of a pod's container."""
    maps = of_kind(documents, "ConfigMap")
    [container] = pod["spec"]["containers"]
    found: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        found |= maps[source["configMapRef"]["name"]]["data"]
    return found


def test_every_variable_is_a_setting_of_its_process(documents: list[Document]) -> None:
    count = 0
    for pod in all_templates(documents):
        if (schema := SETTINGS.get(component(pod))) is None:
            continue
        prefix = schema.model_config["env_prefix"]
        for name in variables(documents, pod):
            if name.startswith("OUTRIDER_"):
                assert name.removeprefix(prefix).lower() in schema.model_fields, name
                count += 1
    assert count > 10


def test_every_pod_gets_longer_than_its_process_drains(documents: list[Document]) -> None:
    for pod in all_templates(documents):
        [container] = pod["spec"]["containers"]
        pause = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        drains = [
            float(value)
            for name, value in variables(documents, pod).items()
            if name.endswith("_DRAIN_SECONDS")
        ]
        grace = pod["spec"]["terminationGracePeriodSeconds"]
        assert grace >= pause + sum(drains) + 10, component(pod)


def test_whatever_a_document_names_is_there(documents: list[Document]) -> None:
    maps, secrets = of_kind(documents, "ConfigMap"), of_kind(documents, "Secret")
    pods = all_templates(documents)
    for pod in pods:
        for volume in pod["spec"]["volumes"]:
            if "secret" in volume:
                assert volume["secret"]["secretName"] in secrets
            if "configMap" in volume:
                assert volume["configMap"]["name"] in maps
        text = str(variables(documents, pod))
        mounted = {v["secret"]["secretName"] for v in pod["spec"]["volumes"] if "secret" in v}
        files = {name for secret in mounted for name in secrets[secret]["data"]}
        assert set(re.findall(r"/run/outrider/secrets/([a-z_.]+)", text)) <= files
    labels = [pod["metadata"]["labels"] for pod in pods]
    kinds = ("Service", "PodDisruptionBudget", "NetworkPolicy", "InferencePool")
    for document in (each for each in documents if each["kind"] in kinds):
        spec = document["spec"]
        selector = spec.get("selector", spec.get("podSelector"))
        wanted = selector.get("matchLabels", {}) if document["kind"] != "Service" else selector
        assert any(wanted.items() <= each.items() for each in labels), document["metadata"]


def test_ports_of_services_policies_and_probes_are_ports_of_the_pods(
    documents: list[Document],
) -> None:
    ports = {
        component(pod): {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
        for pod in all_templates(documents)
    }
    for service in of_kind(documents, "Service").values():
        of_pod = ports[service["spec"]["selector"]["app.kubernetes.io/name"]]
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= of_pod
    for policy in of_kind(documents, "NetworkPolicy").values():
        [of_pod] = [ports[name] for name in selected(policy["spec"]["podSelector"])][:1]
        named = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
        assert named <= of_pod
    for pod in all_templates(documents):
        probes = re.findall(r"'port': '([a-z]+)'", str(pod["spec"]))
        assert set(probes) <= ports[component(pod)]


def selected(selector: Document) -> list[str]:
    """Return the names of the components that a selector of pods selects."""
    if "matchLabels" in selector:
        return [selector["matchLabels"]["app.kubernetes.io/name"]]
    [expression] = selector["matchExpressions"]
    names: list[str] = expression["values"]
    return names


def test_verifiers_are_found_by_a_name_that_has_each_ones_address(
    documents: list[Document],
) -> None:
    found = {
        value
        for pod in all_templates(documents)
        for name, value in variables(documents, pod).items()
        if name in {"OUTRIDER_GATEWAY_VERIFIER", "OUTRIDER_DRAFTER_VERIFIER"}
    }
    assert found == {"dns:outrider-verifier:50051"}
    service = of_kind(documents, "Service")["outrider-verifier"]["spec"]
    assert service["clusterIP"] == "None"
    # A draining verifier is not ready, but needs its address until its requests have moved.
    assert service["publishNotReadyAddresses"] is True
    assert [port["port"] for port in service["ports"]] == [50051]


def test_every_pod_has_a_policy_and_no_port_without_a_lock_is_open_to_all(
    documents: list[Document],
) -> None:
    policies = of_kind(documents, "NetworkPolicy").values()
    covered = {name for policy in policies for name in selected(policy["spec"]["podSelector"])}
    assert covered == {component(pod) for pod in all_templates(documents)}
    open_to_all = {
        (policy["metadata"]["name"], port["port"])
        for policy in policies
        for rule in policy["spec"]["ingress"]
        if "from" not in rule
        for port in rule["ports"]
    }
    # The gateway requires API keys.
    assert open_to_all <= {("outrider-gateway", "https"), ("outrider-gateway", "grpc")}


def test_a_pod_reaches_its_peers_and_the_clusters_dns_alone(documents: list[Document]) -> None:
    """If an attacker makes a process open connections, these reach nothing, inside or outside."""
    policies = of_kind(documents, "NetworkPolicy")
    for name in ("outrider-verifier", "outrider-redis"):
        assert policies[name]["spec"]["egress"] == []
    dns = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}}
    ports = {"outrider-verifier": "grpc", "outrider-redis": "redis"}
    for policy in policies.values():
        assert "Egress" in policy["spec"]["policyTypes"]
        for rule in policy["spec"]["egress"]:
            [peer] = rule["to"]
            if peer == dns:
                assert {port["port"] for port in rule["ports"]} == {53}
            else:
                [port] = rule["ports"]
                assert port["port"] == ports[selected(peer["podSelector"])[0]]


def test_each_process_gets_the_secrets_of_its_own_role_alone(documents: list[Document]) -> None:
    roles = ("gateway", "verifier", "drafter", "redis", "operator")
    for name, secret in of_kind(documents, "Secret").items():
        role = name.split("-")[1]
        others = [other for other in roles if other != role]
        foreign = tuple(f"{other}." for other in others)
        assert [file for file in secret["data"] if file.startswith(foreign)] == []
        assert "ca.key" not in secret["data"]


def test_redis_gives_its_user_the_rights_of_the_documentation() -> None:
    documented = re.findall(
        r"^user (outrider\S*) on >PASSWORD (.*~.*)$",
        (ROOT / "docs/operations.md").read_text(),
        re.MULTILINE,
    )
    given = re.findall(
        r"^user (outrider\S*) on #\S+ \w+\) (.*)$",
        (KUBERNETES / "base/redis.sh").read_text(),
        re.MULTILINE,
    )
    assert len(given) == 1
    assert sorted(given) == sorted(documented)


def test_verifiers_ask_for_a_gpu_and_go_one_at_a_time(documents: list[Document]) -> None:
    [verifier] = [pod for pod in all_templates(documents) if component(pod) == "outrider-verifier"]
    assert verifier["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
    budget = of_kind(documents, "PodDisruptionBudget")["outrider-verifier"]["spec"]
    assert budget["maxUnavailable"] == 1
