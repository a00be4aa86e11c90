"""The reference pages agree with the code."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import fedone_sdk
from fedone_sdk import errors
from fedone_sdk.errors import PROBLEMS, FedOneError, ProblemError, is_retryable

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"
NOT_A_LIBRARY = {"fedone_sdk.assets", "fedone_sdk.cli", "fedone_sdk.usage"}


def test_every_package_has_a_page() -> None:
    page = (REFERENCE / "api.rst").read_text(encoding="utf-8")
    listed = re.findall(r"^   (fedone_sdk[\w.]*)$", page, re.MULTILINE)
    packages = {
        info.name
        for info in pkgutil.iter_modules(fedone_sdk.__path__, "fedone_sdk.")
        if not info.name.rpartition(".")[2].startswith("_")
    }
    assert packages - NOT_A_LIBRARY <= set(listed)
    assert listed == sorted(set(listed))


def test_every_module_that_programs_import_has_a_page() -> None:
    listed = (REFERENCE / "api.rst").read_text(encoding="utf-8").split()
    examples = (path for path in (ROOT / "examples").rglob("*.py") if "paper" not in path.parts)
    programs = [*(ROOT / "docs").rglob("*.md"), *examples]
    imported = {
        name
        for program in programs
        for name in re.findall(
            r"^ *from (fedone_sdk[\w.]*) import", program.read_text(encoding="utf-8"), re.MULTILINE
        )
    }
    assert imported - {"fedone_sdk"} - set(listed) == set()


def test_the_tree_of_errors() -> None:
    page = (REFERENCE / "errors.md").read_text(encoding="utf-8")
    tree = str(errors.__doc__).partition("\n\n")[2].strip()
    assert tree in page
    drawn = set(re.findall(r"\b[A-Z]\w+(?= |$)", tree, re.MULTILINE))
    assert {error.__name__ for error in descendants(FedOneError)} <= drawn


def descendants(kind: type[FedOneError]) -> set[type[FedOneError]]:
    """Those that `fedone_sdk.errors` names."""
    found = {each for below in kind.__subclasses__() for each in {below, *descendants(below)}}
    return {each for each in found if each.__module__ == errors.__name__}


def test_the_codes_of_problems() -> None:
    page = (REFERENCE / "errors.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (.+?) \| (yes|no) \|$", page, re.MULTILINE)
    assert rows == [
        (code, str(status), title, "yes" if is_retryable(ProblemError(code, "")) else "no")
        for code, (status, title) in PROBLEMS.items()
    ]
