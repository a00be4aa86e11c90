"""Runs the benches whose figures depend on an idle machine, one after another.

Each writes its output to OUT/NAME.txt, with the load of the machine before and after it. The other
benches of docs/benchmarks need models or hours; their pages have the commands.

    python -m tests.benchmarks.all [--out FOLDER] [NAME ...]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BENCHES = {
    "federation": ["federation"],
    "simulation": ["simulation", "--rounds", "150", "--repeats", "2"],
    "devices-100-runs": ["devices", "--devices", "10000", "--runs", "100", "--seconds", "60"],
    "devices-10-runs": ["devices", "--devices", "10000", "--runs", "10", "--seconds", "60"],
    "clients": ["clients", "--clients", "100", "--rounds", "100"],
    "stores": ["stores"],
    "stalls": ["stalls", "--seconds", "25"],
    "start": ["start"],
    "quickstart-mini": ["quickstart", "--model", "roberta-mini"],
}
_DEVICES = ["--think", "0.5", "2", "--store", "sqlite", "--folder"]


def main() -> None:
    """Run the named benches, by default all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--out", type=Path, default=Path("benchmarks"))
    args = parser.parse_args()
    if unknown := set(args.names) - BENCHES.keys():
        parser.error(f"no bench is called {', '.join(unknown)}; allowed: {', '.join(BENCHES)}")
    args.out.mkdir(parents=True, exist_ok=True)
    failed = [name for name in args.names or BENCHES if not run(name, args.out / f"{name}.txt")]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def run(name: str, out: Path) -> bool:
    """Run one bench; return whether it ended well."""
    module, *options = BENCHES[name]
    with tempfile.TemporaryDirectory() as folder, out.open("w") as file:
        if module == "devices":
            options += [*_DEVICES, folder]
        print(f"load {os.getloadavg()[0]:.1f}, {time.strftime('%F %T')}", file=file, flush=True)
        command = [sys.executable, "-m", f"tests.benchmarks.{module}", *options]
        code = subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, check=False
        ).returncode
        print(f"load {os.getloadavg()[0]:.1f}, {time.strftime('%F %T')}", file=file)
    print(f"{name}: {'done' if code == 0 else f'exit status {code}'}, {out}", flush=True)
    return code == 0


if __name__ == "__main__":
    main()
