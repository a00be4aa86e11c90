"""The chart's values: validated, documented, and accepted by the programs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedone_sdk import __version__
from fedone_sdk.aggregator.authority import Authority
from fedone_sdk.aggregator.config import ServeConfig
from fedone_sdk.aggregator.http.application import ROUTES
from fedone_sdk.budget import Budget
from fedone_sdk.spec import RunSpec
from tests.deploy.helm_chart import CASES, CHART, helm, render

cases = pytest.mark.parametrize("case", CASES)


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({"aggregatr": {}}, "'aggregatr' not allowed"),
        ({"aggregator": {"replica": 2}}, "'replica' not allowed"),
        ({"aggregator": {"replicas": 0}}, "/aggregator/replicas"),
        ({"aggregator": {"config": {"listen": "0.0.0.0:1"}}}, "'listen' not allowed"),
        ({"aggregator": {"config": {"cors": {"origins": ["*"]}}}}, "/config/cors/origins/0"),
        ({"aggregator": {"backend": {"kind": "openai", "api_key": "sk-1"}}}, "'api_key'"),
        ({"aggregator": {"enrolmentTokens": [{"token": "s3cret"}]}}, "'token' not allowed"),
        ({"aggregator": {"adminTokens": [{"name": "a", "role": "god", "secret": {}}]}},
         "/aggregator/adminTokens/0/role"),
        ({"aggregator": {"runs": {"a run": {"task": {}, "prompt": {}}}}}, "'a run'"),
        ({"aggregator": {"runs": {"a": {"task": {"labels": {"1": " b", "0": " a"}}}}}},
         "/aggregator/runs/a/task/labels"),
        ({"aggregator": {"files": {"../words.txt": ""}}}, "'../words.txt'"),
        ({"aggregator": {"resources": {"limits": None}}}, "missing property 'limits'"),
        ({"store": {"postgresql": {"password": "hunter2"}}}, "'password' not allowed"),
        ({"store": {"postgresql": {"parameters": {"password": "hunter2"}}}}, "'password'"),
        ({"gateway": {"enabled": True}}, "'gateway' not allowed"),
        ({"aggregator": {"apiKeySecret": {"name": "keys"}}}, "/aggregator/apiKeySecret"),
        ({"image": {"digest": "latest"}}, "/image/digest"),
        ({"ingress": {"hosts": ["https://a.example"]}}, "/ingress/hosts/0"),
        ({"networkPolicy": {"clients": [{"cidr": "10.0.0.0/8"}]}}, "/networkPolicy/clients/0"),
        ({"podSecurityContext": {"runAsUser": 0}}, "/podSecurityContext/runAsUser"),
    ],
)  # fmt: skip
def test_the_schema_refuses(values: dict[str, Any], where: str) -> None:
    with helm.Chart.load(CHART) as chart:
        with pytest.raises(helm.HelmValuesError) as refused:
            chart.validate_schema(values)
        with pytest.raises(helm.HelmValuesError):
            chart.render(values, name="fedone")
    assert where in str(refused.value)


PG = {"store": {"kind": "postgresql"}}
HOST = {"kind": "postgresql", "postgresql": {"host": "db"}}
VLLM = {"enabled": True, "model": "m"}


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"aggregator": {"replicas": 2}}, "aggregator.replicas: SQLite supports"),
        ({"store": HOST, "aggregator": {"autoscaling": {"enabled": True}},
          "monitoring": {"metrics": False}}, "targetRequestsInProgress: needs monitoring.metrics"),
        ({"aggregator": {"autoscaling": {"enabled": True}}}, "aggregator.replicas: SQLite s"),
        ({"postgresql": {"enabled": True}}, "postgresql.enabled: with store.kind sqlite"),
        (PG, "store.postgresql.host: set the host"),
        ({"store": HOST, "postgresql": {"enabled": True}},
         "store.postgresql.host: with postgresql.enabled there would be two databases"),
        ({"aggregator": {"enrolmentTokens": [], "adminTokens": []}},
         "aggregator.enrolmentTokens: needs at least one"),
        ({"aggregator": {"backend": None}, "vllm": VLLM},
         "vllm.enabled: only the aggregator can use vLLM"),
        ({"vllm": {"enabled": True}}, "vllm.model: name the model to serve"),
        ({"aggregator": {"backend": {"kind": "openai"}}, "vllm": VLLM},
         "aggregator.backend.kind: must be vllm with vllm.enabled"),
        ({"aggregator": {"apiKeySecret": {"name": "a", "key": "b"}}, "vllm": VLLM},
         "aggregator.apiKeySecret: with vllm.enabled set vllm.apiKeySecret instead"),
        ({"aggregator": {"backend": {"kind": "openai", "model": "gpt-6-luna"}}},
         "aggregator.apiKeySecret: OpenAI needs an API key"),
        ({"vllm": {**VLLM, "replicas": 2}},
         "vllm.cache.accessModes: several replicas share the cache"),
        ({"aggregator": {"backend": {"record": "a"}}}, "aggregator.backend.record: must begin"),
        ({"httpRoute": {"enabled": True}}, "httpRoute.parentRefs: needs the gateway"),
        ({"aggregator": {"tls": {"clientCertificates": True}}},
         "aggregator.tls.clientCertificates: needs aggregator.tls.secretName"),
        ({"ingress": {"enabled": True}}, "ingress.hosts: needs at least one"),
        ({"ingress": {"certManager": {"clusterIssuer": "a", "issuer": "b"}}},
         "ingress.certManager: name a clusterIssuer or an issuer"),
        ({"monitoring": {"metrics": False, "serviceMonitor": {"enabled": True}}},
         "monitoring.metrics: must be true for serviceMonitor"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_one_line(values: dict[str, Any], line: str) -> None:
    with pytest.raises(helm.HelmRenderError) as refused:
        render(values)
    assert line in str(refused.value)
    assert "\n" not in str(refused.value).strip()


@cases
def test_the_programs_take_what_is_rendered(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file is read by the program that gets it, with the variables that its pod has."""
    manifests = render(CASES[case])
    for component, container in manifests.containers():
        if container.get("command") != ["fedone"] or component == "test":
            continue
        folder = tmp_path / component
        (mounted,) = (
            volume["configMap"]["name"]
            for volume in manifests.pod(component)["volumes"]
            if volume["name"] == "config"
        )
        folder.mkdir(exist_ok=True)
        for name, text in manifests.get("ConfigMap", mounted)["data"].items():
            (folder / name).write_text(text)
        with monkeypatch.context() as environment:
            for variable in container["env"]:
                value = variable.get("value", f"secret-of-{variable['name']}")
                environment.setenv(variable["name"], value)
            path = folder / Path(container["args"][-1 if component != "aggregator" else 1]).name
            served = ServeConfig.load(path)
            served.store.build(folder)
            if component == "migration":
                continue
            if "ports" in container:
                assert served.address == ("::", _port(container, "http"))
                listen = served.metrics.listen
                assert listen is None or listen == f"[::]:{_port(container, 'metrics')}"
            if served.backend is not None:
                _key_is_there(served.backend.model_dump(), container)
            for run in served.load_runs(folder)[0]:
                assert (run.spec.name, [*run.spec.task.labels]) == ("reviews", ["1", "0"])
                assert run.spec.budget == Budget(queries=1_000_000)
                assert run.vocabulary.candidates == (" good", " bad")


def _port(container: dict[str, Any], name: str) -> int:
    (port,) = (p["containerPort"] for p in container["ports"] if p["name"] == name)
    return int(port)


def _key_is_there(backend: dict[str, Any], container: dict[str, Any]) -> None:
    names = {variable["name"] for variable in container["env"]}
    assert backend.get("api_key_env") is None or backend["api_key_env"] in names


def test_a_platform_has_rules_of_its_own() -> None:
    manifests = render(CASES["a platform with rules of its own"])
    workload = manifests.get("Deployment", "fedone-aggregator")
    assert workload["metadata"]["annotations"] == {"reloader.stakater.com/auto": "true"}
    assert workload["spec"]["strategy"] == {"type": "Recreate"}
    pod = manifests.pod("aggregator")
    assert pod["terminationGracePeriodSeconds"] == 300
    assert pod["imagePullSecrets"] == [{"name": "mirror"}, {"name": "own"}]
    assert [one["name"] for one in pod["initContainers"]] == ["wait"]
    main, sidecar = pod["containers"]
    assert sidecar["name"] == "proxy"
    assert main["image"] == f"mirror.example/fedone/server:{__version__}"
    assert main["envFrom"] == [{"secretRef": {"name": "more"}}]
    # The kubelet has no client certificate.
    assert main["startupProbe"] == {
        "tcpSocket": {"port": "http"},
        "periodSeconds": 2,
        "failureThreshold": 300,
    }
    assert "tcpSocket" not in main["readinessProbe"]
    assert main["readinessProbe"]["exec"] == {"command": ["healthy"]}
    assert {"name": "tls", "mountPath": "/etc/fedone-tls", "readOnly": True} in main["volumeMounts"]
    config = yaml.safe_load(manifests.get("ConfigMap", "fedone-aggregator")["data"]["server.yaml"])
    assert config["tls"]["client_ca"] == "/etc/fedone-tls/ca.crt"
    assert manifests.of_kind("Pod") == []  # `helm test` has no certificate
    for component in ("aggregator", "postgresql"):  # OpenShift's restricted SCC assigns users
        assert manifests.pod(component)["securityContext"] == {
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
    service = manifests.get("Service", "fedone-aggregator")["spec"]
    assert (service["ipFamilyPolicy"], service["ipFamilies"]) == (
        "RequireDualStack",
        ["IPv6", "IPv4"],
    )
    (scaler,) = manifests.of_kind("HorizontalPodAutoscaler")
    assert scaler["spec"]["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 600
    (monitor,) = manifests.of_kind("ServiceMonitor")
    assert {"relabelings", "metricRelabelings"} <= monitor["spec"]["endpoints"][0].keys()
    (way,) = manifests.of_kind("HTTPRoute")
    backends = [{"name": "fedone-aggregator", "port": 8080}]
    assert way["spec"]["rules"] == [{"backendRefs": backends, "timeouts": {"request": "660s"}}]
    assert manifests.get("ConfigMap", "fedone-more")
    assert manifests.get("ConfigMap", "text")


def test_tls_alone_is_probed_by_https() -> None:
    container = render({"aggregator": {"tls": {"secretName": "a"}}}).pod("aggregator")[
        "containers"
    ][0]
    assert container["readinessProbe"]["httpGet"] == {
        "path": "/readyz",
        "port": "http",
        "scheme": "HTTPS",
    }


def test_pods_are_spread_unless_values_say_how() -> None:
    constraints = render({}).pod("aggregator")["topologySpreadConstraints"]
    keys = [constraint["topologyKey"] for constraint in constraints]
    assert keys == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]
    for constraint in constraints:
        labels = constraint["labelSelector"]["matchLabels"]
        assert labels["app.kubernetes.io/component"] == "aggregator"
    own = [{"maxSkew": 2, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule"}]
    given = render({"aggregator": {"topologySpreadConstraints": own}})
    assert given.pod("aggregator")["topologySpreadConstraints"] == own


def test_the_database_url_is_quoted() -> None:
    manifests = render(CASES["replicas on a database of one's own"])
    config = yaml.safe_load(manifests.get("ConfigMap", "fedone-aggregator")["data"]["server.yaml"])
    assert config["store"] == {
        "url": "postgresql://fed%40one@/fedone?host=db.example&port=5432"
        "&sslmode=verify-full&sslrootcert=%2Fca%2Fca.pem",
        "password": {"env": "DATABASE_PASSWORD"},
    }


def _schema(*path: str) -> dict[str, Any]:
    with helm.Chart.load(CHART) as chart:
        found: Any = chart.schema
    for name in path:
        found = found["properties"][name]
    return dict(found)


def test_every_key_of_the_programs_is_given_or_taken() -> None:
    """A key that CONFIG.yaml gets must be one of the chart's, or one of `config`'s."""
    ours = {"listen", "store", "auth", "backend", "runs", "metrics", "tls"}
    given = _schema("aggregator", "config")["properties"].keys()
    assert ours | given == ServeConfig.model_fields.keys()
    assert not ours & given
    assert Authority.model_fields.keys() == {"enrolment_tokens", "admin_token", "admin_tokens"}
    required = {name for name, field in RunSpec.model_fields.items() if field.is_required()}
    runs = _schema("aggregator", "runs")["additionalProperties"]
    assert required <= set(runs["required"])


def test_probes_are_routes() -> None:
    served = {route.path for route in ROUTES}
    container = render({}).pod("aggregator")["containers"][0]
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[kind]["httpGet"]["path"] in served


def _leaves(schema: dict[str, Any], values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value with its default: mappings with fixed keys are opened, all others are leaves."""
    fixed = schema.get("additionalProperties") is False or path == "global"  # others' keys, too
    if not fixed or path in OPEN:
        yield path, values
        return
    assert values.keys() == schema["properties"].keys(), path
    for name, part in values.items():
        yield from _leaves(schema["properties"][name], part, f"{path}.{name}" if path else name)


OPEN = {"aggregator.config"}
"""Keys of the program, whose page explains them."""

_ROW = re.compile(r"^\| `([\w.]+)` \| (.*?) \| (.*) \|$", re.MULTILINE)


def test_the_readme_explains_every_value() -> None:
    with helm.Chart.load(CHART) as chart:
        assert chart.schema is not None
        # Not `chart.values`, which are sorted.
        values = yaml.safe_load((CHART / "values.yaml").read_text())
        expected = dict(_leaves(chart.schema, values))
    rows = {row[1]: row for row in _ROW.finditer((CHART / "README.md").read_text())}
    assert list(rows) == list(expected), "the README's rows are those of values.yaml, in its order"
    for path, row in rows.items():
        assert yaml.safe_load(row[2].strip("`")) == expected[path], path
        assert len(row[3]) > 3, f"{path} is not explained"
