"""The commands, files and credentials of systemd units, run without systemd."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SYSTEMD = ROOT / "deploy" / "systemd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A service of this folder, or an instance: ``fedone-edge@factory``; `root` is its ``/``."""

    name: str
    root: Path

    @property
    def _text(self) -> str:
        template, at, instance = self.name.partition("@")
        text = (SYSTEMD / f"{template}{at}.service").read_text()
        for specifier, value in ("%i", instance), ("%S", "/var/lib"):
            text = text.replace(specifier, value)
        return text

    def all(self, key: str) -> list[str]:
        """The values of a setting, in order."""
        return re.findall(rf"^{key}=(.*)$", self._text, re.MULTILINE)

    def one(self, key: str) -> str:
        """The value of a setting that is given once."""
        (value,) = self.all(key)
        return str(value)

    def here(self, path: str) -> Path:
        """A path of the unit on this machine."""
        return self.root / path.lstrip("/")

    def argv(self) -> list[str]:
        """What ExecStart executes."""
        variables = {}
        for name in self.all("EnvironmentFile"):
            lines = self.here(name).read_text().splitlines()
            variables |= dict(line.split("=", 1) for line in lines if line and line[0] != "#")
        found = []
        for word in shlex.split(self.one("ExecStart")):
            word = re.sub(r"\$\{(\w+)\}", lambda match: variables[match[1]], word)
            ours = word.startswith(("/opt/", "/etc/fedone/", "/var/lib/"))
            found.append(str(self.here(word)) if ours else word)
        return found

    def environment(self) -> dict[str, str]:
        """What systemd would set; credentials are copied as it does."""
        credentials = self.root / "run/credentials" / f"{self.name}.service"
        credentials.mkdir(parents=True, exist_ok=True)
        for credential in self.all("LoadCredential"):
            name, _, path = credential.partition(":")
            (credentials / name).write_bytes(self.here(path).read_bytes())
        return {"PATH": "/usr/bin:/bin", "CREDENTIALS_DIRECTORY": str(credentials)}

    def state_folder(self) -> Path:
        """The folder that StateDirectory makes."""
        folder = self.here(f"/var/lib/{self.one('StateDirectory')}")
        folder.mkdir(parents=True, exist_ok=True)
        return folder
