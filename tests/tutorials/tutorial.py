"""Execution of a tutorial: files are saved, commands run, outputs compared."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.pages import Block, blocks
from tests.processes import Process, until

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "tutorials"
PATIENCE_S = 300.0

_TITLE = re.compile(r'title="([^"]+)"')
_LOOSE = re.compile(r"(?P<cut>\.\.\.)|(?P<prompt>'[^']*')|(?P<number>-?\d[\d.,]*)|(?P<space> +)")
_MEANS = {"cut": ".*", "prompt": r"'[^'\n]*'", "number": r"-?\d[\d.,]*", "space": " +"}
"""What the model and the machine have a say in: quoted prompts, and numbers."""


class Tutorial:
    """A page under `docs/tutorials`, and a folder that stands for the root of a checkout.

    A block of `bash` is typed into a terminal, whose variables and folder stay; its title names
    which. A block of `text` is what the command before it printed, or with a title, what another
    one did. Any other block has a title, and is saved as the file of that name where the first
    terminal is.

    Args:
        name: Of the page.
        folder: An empty one.
        changes: What the page says -> what it has to be here: addresses with free ports.
    """

    def __init__(self, name: str, folder: Path, *, changes: Mapping[str, str] = {}) -> None:
        text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
        for old, new in changes.items():
            assert old in text, f"{name}.md says nothing of {old}"
            text = text.replace(old, new)
        self._blocks = blocks(text)
        self.root = folder / "checkout"
        self.root.mkdir()
        for part in "examples", "fedone_sdk", "tests":
            (self.root / part).symlink_to(ROOT / part)
        # Stand for the environments that pages make.
        for environment in ".venv", ".venv-vllm":
            (self.root / environment / "bin").mkdir(parents=True)
            (self.root / environment / "bin" / "activate").touch()
        self._terminals = folder / "terminals"
        self._terminals.mkdir()
        binaries = Path(sys.executable).parent
        self._environment = {
            "PATH": f"{binaries}:{os.environ['PATH']}",
            "HOME": str(folder),
            "PYTHONPATH": str(ROOT),
        }
        self._count = 0

    @property
    def rest(self) -> list[Block]:
        """What was not reached."""
        return self._blocks

    @property
    def folder(self) -> Path:
        """Where the first terminal is."""
        state = self._terminals / "first"
        if not state.exists():
            return self.root
        (place,) = re.findall(r"^cd (.*)$", state.read_text(), re.MULTILINE)
        return Path(place)

    def skip(self, start: str) -> None:
        """Passes over a command that the tests have no use for, such as an installation."""
        block = self._next_command()
        assert block.text.startswith(start), block.text
        if self._prints():
            self._blocks.pop(0)

    def run(self) -> str:
        """Run the next command, and compare its output with the page."""
        with self.start() as running:
            assert running.popen.wait(PATIENCE_S) == 0, running.log
            if self._prints():
                self.shown(running)
            return running.log

    @contextmanager
    def start(self) -> Iterator[Running]:
        """Types the next command, and leaves it at work for the block."""
        block = self._next_command()
        title = _TITLE.search(block.info)
        state = self._terminals / (title[1] if title else "first")
        self._count += 1
        script = (
            f"cd {self.root}\nif [ -e '{state}' ]; then . '{state}'; fi\n{block.text}\n"
            f"{{ export -p; declare -f; printf 'cd %s\\n' \"$PWD\"; }} >'{state}'\n"
        )
        running = Running(script, self._environment, self._terminals, f"{self._count}")
        try:
            yield running
        finally:
            running.kill()

    def shown(self, running: Running) -> None:
        """Holds the page's next block, of `text`, against what a command has printed.

        In order, but for what `...` stands for, numbers and quoted prompts.
        """
        expected = self._blocks.pop(0)
        assert expected.language == "text", expected.text
        found = re.search(_pattern(expected.text), running.log, re.MULTILINE)
        assert found, f"{expected.text}\nis not\n{running.log}"

    def _prints(self) -> bool:
        return bool(self._blocks) and self._blocks[0][:2] == ("text", "")

    def _next_command(self) -> Block:
        while self._blocks:
            block = self._blocks.pop(0)
            if block.language == "bash":
                return block
            title = _TITLE.search(block.info)
            assert title, f"no test runs {block.text}"
            assert block.language != "text", f"no test runs {block.text}"
            (self.folder / title[1]).write_text(block.text, encoding="utf-8")
        raise AssertionError("the page has ended")


class Running(Process):
    """A command in a separate terminal."""

    def __init__(
        self, script: str, environment: Mapping[str, str], folder: Path, name: str
    ) -> None:
        command = ["bash", "-euo", "pipefail", "-c", script]
        # As from a keyboard, Ctrl-C reaches all of the terminal's processes, and only those.
        super().__init__(command, environment, folder, name, start_new_session=True)

    def reaches(self, text: str) -> None:
        """Returns once it has printed `text`; it may have ended by then."""
        until(lambda: text in self.log or self.popen.poll() is not None, patience_s=PATIENCE_S)
        assert text in self.log, self.log

    def ctrl_c(self) -> int:
        """Presses Ctrl-C; the exit status."""
        os.killpg(self.popen.pid, signal.SIGINT)
        return self.popen.wait(PATIENCE_S)

    def kill(self) -> None:
        """Ends all of it, as a power failure does."""
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()


def _pattern(expected: str) -> str:
    return "^" + "".join(map(_line, expected.splitlines()))


def _line(line: str) -> str:
    if line.strip() == "...":
        return r"(?:.*\n)*?"
    pattern, end = "", 0
    for found in _LOOSE.finditer(line):
        pattern += re.escape(line[end : found.start()])
        pattern += _MEANS[str(found.lastgroup)]
        end = found.end()
    return pattern + re.escape(line[end:]) + r" *\n"
