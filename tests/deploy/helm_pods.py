"""Pods as processes: what a kubelet would start, at local addresses and folders."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.deploy.helm_chart import Manifests
from tests.processes import Process, free_port, running

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A pod on this machine."""

    spec: dict[str, Any]
    folder: Path
    ports: dict[int, int] = field(default_factory=dict)

    def url(self, port: int) -> str:
        """Where one of its ports is."""
        return f"http://127.0.0.1:{self.ports[port]}"


class Kubelet:
    """Starts containers of rendered pods as processes.

    Commands, arguments, variables and files are those of the manifests. What differs is what a
    cluster's network and mounts would do: names of services become addresses of loopback, ports
    become free ones, and mount paths become folders.

    Args:
        manifests: What was rendered.
        folder: Where everything is.
        secrets: The Secrets that exist: name -> key -> text.
        services: Where services are that no pod of here is: ``NAME:PORT`` -> ``HOST:PORT``.
    """

    def __init__(
        self,
        manifests: Manifests,
        folder: Path,
        *,
        secrets: Mapping[str, Mapping[str, str]],
        services: Mapping[str, str],
    ) -> None:
        self._manifests, self._folder = manifests, folder
        self._secrets, self._services = secrets, dict(services)
        self._path = folder / "bin"
        self._path.mkdir()
        for name, command in (("fedone", "-m fedone_sdk.cli"), ("python", "")):
            program = self._path / name
            program.write_text(f'#!/bin/sh\nexec {sys.executable} {command} "$@"\n')
            program.chmod(0o755)

    @property
    def environment(self) -> dict[str, str]:
        """What an image has: its programs."""
        return {"PATH": f"{self._path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}

    def pod(self, component: str, name: str, service: str | None = None) -> Pod:
        """Places a pod: its volumes are filled and its ports chosen."""
        spec = self._manifests.pod(component)
        pod = Pod(spec=spec, folder=self._folder / name)
        for container in spec["containers"]:
            for port in container.get("ports", ()):
                pod.ports[port["containerPort"]] = free_port()
        if service is not None:
            for port in self._manifests.get("Service", service)["spec"]["ports"]:
                target = next(
                    p["containerPort"]
                    for container in spec["containers"]
                    for p in container["ports"]
                    if p["name"] == port["targetPort"]
                )
                self._services[f"{service}:{port['port']}"] = f"127.0.0.1:{pod.ports[target]}"
        for volume in spec.get("volumes", ()):
            self._fill(pod, volume)
        return pod

    def _fill(self, pod: Pod, volume: dict[str, Any]) -> None:
        folder = pod.folder / volume["name"]
        folder.mkdir(parents=True)
        if "configMap" in volume:
            config = self._manifests.get("ConfigMap", volume["configMap"]["name"])
            for name, text in config["data"].items():
                (folder / name).write_text(self._here(text, pod))
            folder.chmod(0o555)

    def _here(self, text: str, pod: Pod) -> str:
        for name, address in self._services.items():
            text = text.replace(name, address)
        for port, free in pod.ports.items():
            text = text.replace(f"[::]:{port}", f"127.0.0.1:{free}")
        for container in pod.spec["containers"]:
            for mount in container.get("volumeMounts", ()):
                if mount["mountPath"] != "/tmp":
                    text = text.replace(mount["mountPath"], str(pod.folder / mount["name"]))
        return text

    @contextmanager
    def container(self, pod: Pod, name: str) -> Iterator[Process]:
        """Starts one container of a pod."""
        (found,) = (one for one in pod.spec["containers"] if one["name"] == name)
        argv = [self._here(word, pod) for word in (*found["command"], *found["args"])]
        environment = self.environment
        for variable in found["env"]:
            environment[variable["name"]] = self._value(variable)
        program = self._path / argv[0]
        pod.folder.mkdir(exist_ok=True)
        with running([str(program), *argv[1:]], environment, pod.folder, name) as process:
            yield process

    def _value(self, variable: dict[str, Any]) -> str:
        if "value" in variable:
            return str(variable["value"])
        reference = variable["valueFrom"]["secretKeyRef"]
        return self._secrets[reference["name"]][reference["key"]]

    def run(self, pod: Pod, name: str) -> str:
        """Runs one container of a pod to its end; what it wrote."""
        with self.container(pod, name) as process:
            status = process.popen.wait(120)
            assert status == 0, process.log
            return process.log
