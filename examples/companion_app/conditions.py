"""Conditions of a companion app: the user's switch, charging, and Wi-Fi.

The module reads Linux's files under /sys, and needs no GUI toolkit. On Android, use
`BatteryManager.isCharging()` and `ConnectivityManager.isActiveNetworkMetered()`, on iOS
`UIDevice.batteryState` and `NWPath.isExpensive`. A Briefcase app calls these functions through
Chaquopy's `java` (Android) or `rubicon.objc` (iOS).
"""

from __future__ import annotations

from pathlib import Path


class Conditions:
    """The condition that the client checks before claims and requests.

    Args:
        system: Folder in which Linux describes its devices.

    Attributes:
        wanted: The user's switch.
    """

    def __init__(self, system: Path = Path("/sys")) -> None:
        self._system = system
        self.wanted = True

    def charging(self) -> bool:
        """Whether a charger is plugged in; also true on a device that has no battery."""
        supplies = list(self._system.glob("class/power_supply/*"))
        return not supplies or any(_says(supply / "online", "1") for supply in supplies)

    def on_wifi(self) -> bool:
        """Whether a wireless network is up."""
        radios = self._system.glob("class/net/*/wireless")
        return any(_says(radio.parent / "operstate", "up") for radio in radios)

    def missing(self) -> list[str]:
        """Return the unmet conditions, as text."""
        asked = {
            "switched off": self.wanted,
            "not charging": self.charging(),
            "not on wi-fi": self.on_wifi(),
        }
        return [what for what, holds in asked.items() if not holds]

    def hold(self) -> bool:
        """Whether the device may work now: the client's ``only_when``."""
        return not self.missing()


def _says(file: Path, value: str) -> bool:
    return file.is_file() and file.read_text().strip() == value
