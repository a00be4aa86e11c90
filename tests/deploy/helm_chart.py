"""The Helm chart as Helm's own engine renders it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

try:
    import helm_python as helm
except ImportError:
    if os.environ.get("CI"):
        raise
    pytest.skip("helm-python-sdk is not installed", allow_module_level=True)

__all__ = ["CASES", "CHART", "Manifests", "helm", "notes", "render"]

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "fedone"

_RUN: dict[str, Any] = {
    "task": {
        "template": " {text} It was{prompt} {mask}.",
        "labels": [{"value": "1", "word": " great"}, {"value": "0", "word": " bad"}],
    },
    "prompt": {"length": 4, "vocabulary": {"kind": "file", "path": "words.txt"}},
    "method": {"name": "gs-bdpl", "num_samples": 4},
    "budget": {"queries": 1_000_000},
    "rounds": 10,
}
_RUNS = {"runs": {"reviews": _RUN}, "files": {"words.txt": " good\n bad\n"}}
_MAPPED = {**_RUN, "task": {**_RUN["task"], "labels": {"1": " great", "0": " bad"}}}
_TEXTS = {**_RUNS, "runs": {"reviews": yaml.safe_dump(_MAPPED, sort_keys=False)}}
_KEY = {"name": "keys", "key": "model"}
_VLLM = {"enabled": True, "model": "Qwen/Qwen2.5-0.5B-Instruct"}


def _container(name: str) -> dict[str, Any]:
    """A container that the restricted Pod Security Standard allows."""
    return {
        "name": name,
        "image": "proxy:1",
        "resources": {"requests": {"cpu": "50m", "memory": "32Mi"}, "limits": {"memory": "64Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }


CASES: Mapping[str, dict[str, Any]] = {
    "nothing": {},
    "sqlite with a run and an ingress": {
        "aggregator": {
            **_RUNS,
            "config": {"limits": {"trusted_proxies": ["10.0.0.0/8"]}, "drain_notice_s": 2.5},
        },
        "store": {"sqlite": {"storageClass": "fast"}},
        "ingress": {
            "enabled": True,
            "className": "nginx",
            "hosts": ["fedone.example", "www.fedone.example"],
            "certManager": {"clusterIssuer": "letsencrypt"},
        },
    },
    "sqlite on a volume that is there": {
        "store": {"sqlite": {"existingClaim": "mine"}},
        "monitoring": {"metrics": False},
        "networkPolicy": {"enabled": False},
    },
    "replicas on a database of one's own": {
        "store": {
            "kind": "postgresql",
            "postgresql": {
                "host": "db.example",
                "user": "fed@one",
                "parameters": {"sslmode": "verify-full", "sslrootcert": "/ca/ca.pem"},
                "passwordSecret": {"name": "db", "key": "password"},
            },
        },
        "aggregator": {
            **_TEXTS,
            "replicas": 3,
            "extraVolumes": [{"name": "ca", "secret": {"secretName": "db-ca"}}],
            "extraVolumeMounts": [{"name": "ca", "mountPath": "/ca", "readOnly": True}],
        },
        "networkPolicy": {"database": [{"ipBlock": {"cidr": "10.1.2.3/32"}}]},
        "monitoring": {
            "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
            "prometheusRule": {"enabled": True},
            "dashboard": {"enabled": True, "annotations": {"grafana_folder": "ML"}},
        },
    },
    "a bundled database and autoscaling": {
        "store": {"kind": "postgresql"},
        "postgresql": {"enabled": True, "storageClass": "fast"},
        "aggregator": {"autoscaling": {"enabled": True, "maxReplicas": 9}},
    },
    "replicas and a service like OpenAI": {
        "store": {"kind": "postgresql", "postgresql": {"host": "db"}},
        "aggregator": {
            "replicas": 2,
            "backend": {
                "kind": "openai",
                "model": "small",
                "base_url": "https://llm.example:8443/v1",
                "api_key_env": "LLM_KEY",
                "cache": "/var/lib/fedone/a.db",
            },
            "apiKeySecret": _KEY,
        },
        "networkPolicy": {"internet": {"port": 8443}},
    },
    "vllm that downloads its model": {
        "vllm": {
            **_VLLM,
            "apiKeySecret": _KEY,
            "hubTokenSecret": {"name": "hub", "key": "token"},
            "args": ["--max-model-len=2048"],
            "gpus": 2,
        }
    },
    "vllm without a way out": {
        "vllm": {
            **_VLLM,
            "servedName": "small",
            "download": False,
            "gpus": 0,
            "cache": {"existingClaim": "models"},
            "image": {"digest": "sha256:" + "0" * 64},
        }
    },
    "a paid model": {
        "aggregator": {
            "backend": {"kind": "openai", "model": "gpt-4o-mini"},
            "apiKeySecret": _KEY,
            "config": {"cors": {"origins": ["https://app.example"]}, "log": {"requests": "info"}},
            "enrolmentTokens": [
                {
                    "name": "acme",
                    "runs": ["acme-*"],
                    "uses": 500,
                    "expires": "2030-01-01T00:00:00Z",
                    "secret": {"name": "acme", "key": "token"},
                }
            ],
            "adminTokens": [
                {"name": "ops", "role": "operator", "secret": {"name": "ops", "key": "token"}}
            ],
        }
    },
    "clients that bring their own model": {
        "nameOverride": "tuning",
        "image": {"digest": "sha256:" + "a" * 64},
        "imagePullSecrets": [{"name": "registry"}],
        "commonLabels": {"team": "ml"},
        "serviceAccount": {"create": False},
        "aggregator": {
            "backend": None,
            "service": {"type": "LoadBalancer", "port": 443, "annotations": {"a": "b"}},
            "nodeSelector": {"disk": "ssd"},
            "tolerations": [{"operator": "Exists"}],
            "podLabels": {"mesh": "on"},
            "podAnnotations": {"note": "this"},
            "priorityClassName": "high",
            "podDisruptionBudget": {"enabled": False},
            "extraEnv": [{"name": "FEDONE_LOG__LEVEL", "value": "debug"}],
        },
    },
    "a platform with rules of its own": {
        "global": {"imageRegistry": "mirror.example/", "imagePullSecrets": [{"name": "mirror"}]},
        "imagePullSecrets": [{"name": "mirror"}, {"name": "own"}],
        "store": {"kind": "postgresql"},
        "podSecurityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None},
        "postgresql": {
            "enabled": True,
            "podSecurityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None},
        },
        "aggregator": {
            "tls": {"secretName": "fedone-tls", "clientCertificates": True},
            "strategy": {"type": "Recreate"},
            "terminationGracePeriodSeconds": 300,
            "startupProbe": {"failureThreshold": 300},
            "readinessProbe": {"exec": {"command": ["healthy"]}, "periodSeconds": 7},
            "annotations": {"reloader.stakater.com/auto": "true"},
            "extraEnvFrom": [{"secretRef": {"name": "more"}}],
            "initContainers": [_container("wait")],
            "extraContainers": [_container("proxy")],
            "service": {"ipFamilyPolicy": "RequireDualStack", "ipFamilies": ["IPv6", "IPv4"]},
            "autoscaling": {
                "enabled": True,
                "behavior": {"scaleDown": {"stabilizationWindowSeconds": 600}},
            },
        },
        "httpRoute": {
            "enabled": True,
            "parentRefs": [{"name": "gateway", "namespace": "infra"}],
            "hostnames": ["fedone.example"],
        },
        "monitoring": {
            "serviceMonitor": {
                "enabled": True,
                "relabelings": [{"targetLabel": "cluster", "replacement": "a"}],
                "metricRelabelings": [{"action": "labeldrop", "regex": "pod"}],
            }
        },
        "extraObjects": [
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": '{{ include "fedone.fullname" . }}-more'},
                "data": {"a": "b"},
            },
            "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: text}\ndata: {a: b}\n",
        ],
    },
}
"""Values that go together, by what they are for."""


@dataclass(frozen=True, slots=True)
class Manifests:
    """What a release would send to Kubernetes, hooks too."""

    documents: list[dict[str, Any]]

    def get(self, kind: str, name: str) -> dict[str, Any]:
        """The one object of a kind and name."""
        (found,) = (d for d in self.of_kind(kind) if d["metadata"]["name"] == name)
        return found

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """All objects of a kind."""
        return [document for document in self.documents if document["kind"] == kind]

    def pods(self) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
        """What each pod is for (its component), its labels and its spec."""
        for document in self.documents:
            pod = (
                document if document["kind"] == "Pod" else document.get("spec", {}).get("template")
            )
            if pod is not None:
                labels = pod["metadata"]["labels"]
                yield labels["app.kubernetes.io/component"], labels, pod["spec"]

    def pod(self, component: str) -> dict[str, Any]:
        """The spec of a component's pods."""
        (found,) = (spec for name, _, spec in self.pods() if name == component)
        return found

    def containers(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """All containers, with what their pods are for."""
        for component, _, spec in self.pods():
            for container in spec["containers"]:
                yield component, container


def render(
    values: Mapping[str, Any], *, name: str = "fedone", namespace: str = "tuning"
) -> Manifests:
    """Renders the chart as `helm install` does."""
    with helm.Chart.load(CHART) as chart:
        rendered = chart.render(dict(values), name=name, namespace=namespace)
    documents = [
        document
        for path, text in sorted(rendered.items())
        if path.endswith(".yaml")
        for document in yaml.safe_load_all(text)
        if document is not None
    ]
    return Manifests(documents)


def notes(values: Mapping[str, Any]) -> str:
    """The output of `helm install`."""
    with helm.Chart.load(CHART) as chart:
        return chart.render(dict(values), name="fedone")["fedone/templates/NOTES.txt"]


if __name__ == "__main__":
    for name, values in CASES.items():
        documents = yaml.safe_dump_all(render(values).documents)
        (Path(sys.argv[1]) / f"{name}.yaml").write_text(documents)
