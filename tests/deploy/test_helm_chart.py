"""The chart's manifests: valid for Kubernetes, and with minimal permissions."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from fedone_sdk import __version__
from tests.deploy.helm_chart import CASES, CHART, Manifests, helm, notes, render

CUSTOM = {"HTTPRoute", "ServiceMonitor", "PrometheusRule"}

cases = pytest.mark.parametrize("case", CASES)


@functools.cache
def rendered(case: str) -> Manifests:
    return render(CASES[case])


def _aggregator_files(manifests: Manifests) -> dict[str, str]:
    (config,) = (
        config
        for config in manifests.of_kind("ConfigMap")
        if config["metadata"]["name"].endswith("-aggregator")
    )
    files: dict[str, str] = config["data"]
    return files


@cases
def test_helm_has_no_warnings(case: str) -> None:
    report = helm.lint(CHART, CASES[case], strict=True)
    assert report["errors"] == []
    assert [m["error"] for m in report["messages"] if m["severity"] > 1] == []


@cases
@pytest.mark.parametrize("version", ["1.27", "1.34"])
def test_kubernetes_takes_it(case: str, version: str) -> None:
    seen = set()
    for document in rendered(case).documents:
        key = (document["kind"], document["metadata"]["name"])
        assert key not in seen
        seen.add(key)
        assert len(document["metadata"]["name"]) <= 63
        if document["kind"] not in CUSTOM:
            kubernetes_validate.validate(document, version, strict=True)


@cases
def test_no_pod_may_do_more_than_it_must(case: str) -> None:
    for component, _, spec in rendered(case).pods():
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False, "FEDONE_PORT and VLLM_PORT would be settings"
        assert not {"hostNetwork", "hostPID", "hostIPC", "hostUsers"} & spec.keys()
        assert not [volume for volume in spec.get("volumes", ()) if "hostPath" in volume]
        context = spec["securityContext"]
        assert context["runAsNonRoot"] is True, component
        assert context.get("runAsUser", 1) > 0
        assert context.get("fsGroup", 1) > 0
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}


@cases
def test_containers_are_bounded(case: str) -> None:
    for component, container in rendered(case).containers():
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, component
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
        assert "memory" in container["resources"]["limits"]
        assert re.search(r"(:[\w.-]+|@sha256:[0-9a-f]{64})$", container["image"])
        assert not container["image"].endswith(":latest")


@cases
def test_what_is_written_goes_to_volumes(case: str) -> None:
    manifests = rendered(case)
    for document in manifests.documents:
        template = document.get("spec", {}).get("template")
        if template is None:
            continue
        claims = document["spec"].get("volumeClaimTemplates", [])
        there = {volume["name"] for volume in template["spec"]["volumes"]}
        there |= {claim["metadata"]["name"] for claim in claims}
        for container in template["spec"]["containers"]:
            mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
            assert mounts.keys() <= there
            assert mounts["tmp"]["mountPath"] == "/tmp"
    for path in re.findall(r": (/\S+)", "\n".join(_aggregator_files(manifests).values())):
        assert path.startswith(("/var/lib/fedone/", "/etc/fedone-tls/")), path


@cases
def test_secrets_are_only_named(case: str) -> None:
    manifests = rendered(case)
    assert manifests.of_kind("Secret") == []
    for _, container in manifests.containers():
        for variable in container.get("env", ()):
            if re.search(r"TOKEN|PASSWORD|KEY", variable["name"]):
                assert variable.keys() == {"name", "valueFrom"}
                assert variable["valueFrom"].keys() == {"secretKeyRef"}
    for config in manifests.of_kind("ConfigMap"):
        for name, text in config["data"].items():
            if name == "server.yaml":
                document = yaml.safe_load(text)
                store = document["store"]
                assert not isinstance(store, dict) or store["password"].keys() == {"env"}
                auth = document["auth"]
                people = [*auth["enrolment_tokens"], *auth["admin_tokens"]]
                assert all("env" in token and "token" not in token for token in people)


@cases
def test_every_service_finds_its_pods(case: str) -> None:
    manifests = rendered(case)
    for service in manifests.of_kind("Service"):
        selector = service["spec"]["selector"]
        found = [spec for _, labels, spec in manifests.pods() if selector.items() <= labels.items()]
        (spec,) = found
        ports = {port["name"] for c in spec["containers"] for port in c.get("ports", ())}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


@cases
def test_probes_ask_the_programs_own_paths(case: str) -> None:
    for component, container in rendered(case).containers():
        probes = {
            kind: container.get(f"{kind}Probe") for kind in ("startup", "liveness", "readiness")
        }
        if component == "aggregator" and "ports" in container:
            paths = {
                kind: probe["httpGet"]["path"]
                for kind, probe in probes.items()
                if probe is not None and "httpGet" in probe
            }
            usual = {"startup": "/healthz", "liveness": "/healthz", "readiness": "/readyz"}
            assert paths.items() <= usual.items()
            # `Readiness` waits two seconds for the store.
            assert probes["readiness"] is not None
            assert probes["readiness"]["timeoutSeconds"] > 2
        elif component in ("vllm", "postgresql"):
            assert all(probes.values())


def _policy(manifests: Manifests, component: str) -> dict[str, Any]:
    """The one that is about a component's pods."""
    spec: dict[str, Any]
    (spec,) = (
        policy["spec"]
        for policy in manifests.of_kind("NetworkPolicy")
        if policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == component
    )
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    return spec


def _let_in(manifests: Manifests, component: str) -> list[tuple[set[str] | None, set[int]]]:
    """The components that may reach a component's pods, by port; None is all."""
    return [_rule(rule, "from") for rule in _policy(manifests, component)["ingress"]]


def _let_out(manifests: Manifests, component: str) -> list[tuple[set[str] | None, set[int]]]:
    return [_rule(rule, "to") for rule in _policy(manifests, component)["egress"]]


def _rule(rule: dict[str, Any], key: str) -> tuple[set[str] | None, set[int]]:
    ports = {port["port"] for port in rule["ports"]}
    if key not in rule:
        return None, ports
    names = set()
    for peer in rule[key]:
        labels = peer.get("podSelector", {}).get("matchLabels", {})
        names.add(labels.get("app.kubernetes.io/component", next(iter(peer))))
    return names, ports


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("vllm")])
def test_only_the_aggregator_reaches_vllm(case: str) -> None:
    manifests = rendered(case)
    assert _let_in(manifests, "vllm") == [({"aggregator"}, {8000})]
    assert _let_out(manifests, "aggregator") == [
        ({"namespaceSelector", "ipBlock"}, {53, 5353}),
        ({"vllm"}, {8000}),
    ]
    for policy in manifests.of_kind("NetworkPolicy"):
        name = policy["metadata"]["name"]
        reaches = [peers for peers, _ in _let_out(manifests, name.removeprefix("fedone-"))]
        assert name == "fedone-aggregator" or {"vllm"} not in reaches
    for document in (*manifests.of_kind("Ingress"), *manifests.of_kind("ServiceMonitor")):
        assert "vllm" not in str(document)
    (service,) = (s for s in manifests.of_kind("Service") if s["metadata"]["name"] == "fedone-vllm")
    assert service["spec"].get("type", "ClusterIP") == "ClusterIP"


def test_a_model_on_the_internet_is_the_aggregators_alone() -> None:
    manifests = rendered("a paid model")
    assert ({"ipBlock"}, {443}) in _let_out(manifests, "aggregator")
    holders = {
        component
        for component, container in manifests.containers()
        for variable in container.get("env", ())
        if variable["name"] == "OPENAI_API_KEY"
    }
    assert holders == {"aggregator"}
    other = rendered("replicas and a service like OpenAI")
    assert ({"ipBlock"}, {8443}) in _let_out(other, "aggregator")


def test_vllm_without_download_has_no_way_out() -> None:
    manifests = rendered("vllm without a way out")
    assert _let_out(manifests, "vllm") == []
    (container,) = manifests.pod("vllm")["containers"]
    environment = {v["name"]: v.get("value") for v in container["env"]}
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["VLLM_NO_USAGE_STATS"] == "1"
    assert {m["mountPath"]: m.get("readOnly") for m in container["volumeMounts"]}["/models"] is True
    assert "nvidia.com/gpu" not in container["resources"]["limits"]
    with_gpus = rendered("vllm that downloads its model").pod("vllm")["containers"][0]
    assert with_gpus["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert "--max-model-len=2048" in with_gpus["args"]


def test_the_database_is_for_two() -> None:
    manifests = rendered("a bundled database and autoscaling")
    assert _let_in(manifests, "postgresql") == [({"aggregator", "migration"}, {5432})]
    assert _let_out(manifests, "postgresql") == []
    assert ({"postgresql"}, {5432}) in _let_out(manifests, "aggregator")
    own = rendered("replicas on a database of one's own")
    assert _let_out(own, "migration") == [
        ({"namespaceSelector", "ipBlock"}, {53, 5353}),
        ({"ipBlock"}, {5432}),
    ]


def test_sqlite_has_one_pod_and_a_volume() -> None:
    manifests = rendered("sqlite with a run and an ingress")
    workload = manifests.get("StatefulSet", "fedone-aggregator")
    assert workload["spec"]["replicas"] == 1
    (claim,) = workload["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert claim["spec"]["storageClassName"] == "fast"
    assert manifests.of_kind("Job") == [], "SQLite is upgraded at the start"


def test_replicas_roll_without_a_gap() -> None:
    manifests = rendered("replicas on a database of one's own")
    workload = manifests.get("Deployment", "fedone-aggregator")
    assert workload["spec"]["replicas"] == 3
    assert workload["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    budget = manifests.get("PodDisruptionBudget", "fedone-aggregator")
    assert budget["spec"]["maxUnavailable"] == 1
    selector = budget["spec"]["selector"]["matchLabels"]
    assert selector == workload["spec"]["selector"]["matchLabels"]


@cases
def test_there_is_time_to_drain(case: str) -> None:
    manifests = rendered(case)
    config = yaml.safe_load(_aggregator_files(manifests)["server.yaml"])
    grace = manifests.pod("aggregator")["terminationGracePeriodSeconds"]
    assert grace > config["drain_s"] + config["drain_notice_s"]


def test_autoscaling_follows_requests_and_the_cpu() -> None:
    case = CASES["a bundled database and autoscaling"]
    manifests = rendered("a bundled database and autoscaling")
    assert "replicas" not in manifests.get("Deployment", "fedone-aggregator")["spec"]
    scaler = manifests.get("HorizontalPodAutoscaler", "fedone-aggregator")["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (2, 9)
    assert scaler["scaleTargetRef"]["kind"] == "Deployment"
    requests, cpu = scaler["metrics"]
    assert requests["pods"] == {
        "metric": {"name": "fedone_requests_in_progress"},
        "target": {"type": "AverageValue", "averageValue": "16"},
    }
    assert cpu["resource"]["name"] == "cpu"
    assert "custom.metrics.k8s.io" in notes(case)
    alone = {"autoscaling": {"enabled": True, "targetRequestsInProgress": 0}}
    (scaler,) = render({**case, "aggregator": alone}).of_kind("HorizontalPodAutoscaler")
    assert [metric["type"] for metric in scaler["spec"]["metrics"]] == ["Resource"]
    assert "custom.metrics.k8s.io" not in notes({**case, "aggregator": alone})


@pytest.mark.parametrize("case", CASES)
def test_a_stateful_set_has_a_headless_service(case: str) -> None:
    manifests = rendered(case)
    for workload in manifests.of_kind("StatefulSet"):
        service = manifests.get("Service", workload["spec"]["serviceName"])
        assert service["spec"]["clusterIP"] == "None"
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items()
    stateful = {w["metadata"]["name"] for w in manifests.of_kind("StatefulSet")}
    headless = {
        service["metadata"]["name"].removesuffix("-headless")
        for service in manifests.of_kind("Service")
        if service["metadata"]["name"].endswith("-headless")
    }
    assert headless == stateful


def test_dns_of_kubernetes_openshift_and_nodelocal() -> None:
    egress = _policy(rendered("a paid model"), "aggregator")["egress"]
    dns = egress[0]
    spaces = [
        peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
        for peer in dns["to"]
        if "namespaceSelector" in peer
    ]
    assert spaces == ["kube-system", "openshift-dns"]
    assert {"ipBlock": {"cidr": "169.254.20.10/32"}} in dns["to"]
    assert {(port["port"], port["protocol"]) for port in dns["ports"]} == {
        *((53, "UDP"), (53, "TCP"), (5353, "UDP"), (5353, "TCP"))
    }
    internet, internet_v6 = (
        peer["ipBlock"] for rule in egress[1:] for peer in rule.get("to", ()) if "ipBlock" in peer
    )
    assert "169.254.0.0/16" in internet["except"], "cloud metadata"
    assert "fc00::/7" in internet_v6["except"], "private networks"


def test_the_migration_comes_first() -> None:
    own = rendered("replicas on a database of one's own").get("Job", "fedone-migration")
    assert own["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    (container,) = own["spec"]["template"]["spec"]["containers"]
    assert container["command"] + container["args"] == [
        *("fedone", "db", "upgrade", "/etc/fedone/server.yaml")
    ]
    # A Job of a hook runs before what it could lean on: neither account nor config is there.
    assert "serviceAccountName" not in own["spec"]["template"]["spec"]
    bundled = rendered("a bundled database and autoscaling")
    hooks = [
        document["metadata"]["annotations"]["helm.sh/hook"]
        for kind in ("Job", "ConfigMap", "NetworkPolicy")
        for document in bundled.of_kind(kind)
        if document["metadata"]["name"] == "fedone-migration"
    ]
    assert hooks == ["pre-upgrade"] * 3, "there is no database yet before an install"


def test_the_ingress() -> None:
    (ingress,) = rendered("sqlite with a run and an ingress").of_kind("Ingress")
    assert ingress["metadata"]["annotations"] == {"cert-manager.io/cluster-issuer": "letsencrypt"}
    hosts = ["fedone.example", "www.fedone.example"]
    assert ingress["spec"]["tls"] == [{"hosts": hosts, "secretName": "fedone-tls"}]
    for rule in ingress["spec"]["rules"]:
        service = rule["http"]["paths"][0]["backend"]["service"]
        assert service == {"name": "fedone-aggregator", "port": {"name": "http"}}


@cases
def test_metrics_are_on_no_public_port(case: str) -> None:
    for service in rendered(case).of_kind("Service"):
        ports = {port["targetPort"] for port in service["spec"]["ports"]}
        if "metrics" in ports:
            assert ports == {"metrics"}
            assert service["spec"]["clusterIP"] == "None"


def test_a_new_config_means_new_pods() -> None:
    def checksum(values: dict[str, Any]) -> str:
        workload = render(values).get("StatefulSet", "fedone-aggregator")
        found: str = workload["spec"]["template"]["metadata"]["annotations"]["checksum/config"]
        return found

    assert checksum({}) == checksum({})
    assert checksum({}) != checksum({"aggregator": {"config": {"drain_s": 21}}})


def test_names_stay_short_enough() -> None:
    values = {"store": {"kind": "postgresql"}, "postgresql": {"enabled": True}}
    release = "a-name-as-long-as-helm-allows-for-a-release-of-charts"
    assert len(release) == 53
    for document in render(values, name=release).documents:
        # A StatefulSet's pods and claims add to its name, and a label has 63 letters.
        longest = 63 if document["kind"] == "Service" else 52
        assert len(document["metadata"]["name"]) <= longest
        assert all(len(value) <= 63 for value in document["metadata"]["labels"].values())


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__
    image = rendered("nothing").pod("aggregator")["containers"][0]["image"]
    assert image == f"fedone/server:{__version__}"
    digest = rendered("clients that bring their own model").pod("aggregator")["containers"][0]
    assert digest["image"] == "fedone/server@sha256:" + "a" * 64


def test_it_can_be_packaged(tmp_path: Path) -> None:
    archive = helm.package(CHART, destination=tmp_path)
    with helm.Chart.load(archive) as chart:
        names = {file["name"] for file in chart.files}
        assert {"README.md", "files/alerts.yaml", "files/dashboard.json"} <= names
        assert chart.render({}, name="fedone")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({}, "port-forward service/fedone-aggregator 8080:8080"),
        ({}, "There is no run yet"),
        (CASES["sqlite with a run and an ingress"], "https://fedone.example"),
        ({"ingress": {"enabled": True, "hosts": ["a.example"]}}, "trusted_proxies"),
        (CASES["a platform with rules of its own"], "trusted_proxies"),
        ({"ingress": {"enabled": True, "hosts": ["a.example"], "tls": {"enabled": False}}},
         "plain text"),
        ({"networkPolicy": {"enabled": False}}, "every pod of the cluster can read"),
        (CASES["a bundled database and autoscaling"], "is for trials"),
    ],
)  # fmt: skip
def test_notes_say_what_comes_next(values: dict[str, Any], text: str) -> None:
    assert text in notes(values)
