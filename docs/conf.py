"""Sphinx: the folder `docs`, the other Markdown of the repository, and the docstrings, as a site.

The root of the repository is the source folder, so that links between its files work on GitHub,
both on disk and in the site; a linked file that is no page comes with the site as a download.
Nothing is fetched, neither to build the site nor to read it.
"""

from __future__ import annotations

import logging
import re
from importlib.util import find_spec
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any

import typer
from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from typer.cli import get_docs_for_click
from typer.main import get_command

import fedone_sdk
from fedone_sdk.cli.app import app

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.writers.html5 import HTML5Translator

logging.getLogger("alembic").setLevel(logging.WARNING)  # it says that it was imported

project = "FedOne SDK"
release = version = fedone_sdk.__version__
html_title = f"{project} {release}"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_external_toc",
]
if find_spec("sphinx_copybutton"):  # in the extra docs; the site is whole without it
    extensions.append("sphinx_copybutton")
copybutton_exclude = ".linenos, .gp, .go"
root_doc = "docs/index"
include_patterns = [
    *("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md"),
    *("docs/**.md", "docs/**.rst", "examples/**.md", "deploy/**.md"),
]
exclude_patterns = ["docs/_templates", "**/node_modules"]
external_toc_path = "docs/_toc.yml"
templates_path = [str(Path(__file__).parent / "_templates")]

html_theme = "furo"
html_theme_options = {
    "navigation_with_keys": True,
    "light_css_variables": {"color-code-background": "#f3f4f6"},  # it is white otherwise
}
html_extra_path = ["_extra"]
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_search_summary = False  # it would fetch pages, which browsers refuse from a disk
html_math_renderer = "mathml"
# Legible in both schemes: furo brings them.
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
highlight_language = "none"  # of blocks that name no language

myst_heading_anchors = 4  # as on GitHub
myst_fence_as_directive = ["math"]  # GitHub's form of a formula

napoleon_attr_annotations = False  # the signature has them
napoleon_use_ivar = True  # attributes as a list, not as entries of every contents

default_role = "py:obj"
autosummary_ignore_module_all = False
autosummary_imported_members = True
autodoc_member_order = "groupwise"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
suppress_warnings = ["etoc.toctree"]  # the list of packages is autosummary's


def _highlight_fences(
    _app: Sphinx, _what: str, _name: str, _member: object, _options: object, lines: list[str]
) -> None:
    """Read the Markdown fences of docstrings, which editors show well, as code blocks."""
    fence = re.compile(r"^( *)```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
    lines[:] = fence.sub(
        lambda found: f"{found[1]}.. code-block:: {found[2]}\n\n{indent(found[3], '   ')}",
        "\n".join(lines),
    ).split("\n")


def _skip_aliases(
    _app: Sphinx, _what: str, _name: str, member: object, _skip: bool, _options: object
) -> bool | None:
    """Skip the fields of a named tuple, which are listed under its attributes."""
    return True if str(member.__doc__).startswith("Alias for field number") else None


def _pair_with_dark(app: Sphinx, doctree: nodes.document) -> None:
    """Show ``NAME-dark`` in the place of an image ``NAME`` while the page is dark."""
    folder = Path(app.srcdir, app.env.docname).parent
    for image in [*doctree.findall(nodes.image)]:
        light = Path(image["uri"])
        dark = light.with_name(f"{light.stem}-dark{light.suffix}")
        if (folder / dark).is_file():
            twin = image.copy()
            twin["uri"] = dark.as_posix()
            twin["classes"] = [*image["classes"], "only-dark"]
            image["classes"] = [*image["classes"], "only-light"]
            image.parent.insert(image.parent.index(image) + 1, twin)


def _open_to_all(
    _app: Sphinx, _page: str, _template: str, context: dict[str, Any], _doctree: object
) -> None:
    """Mends for screen readers and the keyboard what the theme leaves open.

    Headings of the navigation get a level, what scrolls sideways gets the focus, and signatures,
    a line per parameter, are no lists of definitions.
    """
    tree, level = context["furo_navigation_tree"], 'role="heading" aria-level="2"'
    context["furo_navigation_tree"] = tree.replace('role="heading"', level)
    body = context.get("body", "")
    body = re.sub(r'<pre(?=>)|<div(?= class="(?:table|math)-wrapper)', r'\g<0> tabindex="0"', body)
    body = re.sub(r'<dl(?=>)|<dd(?=><em class="sig-param">)', r'\g<0> role="presentation"', body)
    context["body"] = body


def _write_command_line(folder: Path) -> None:
    """Write the page of all commands, from the program."""
    page = folder / "cli.md"
    command = get_command(app)
    text = get_docs_for_click(
        obj=command, ctx=typer.Context(command), name="fedone", title="Command line"
    )
    if not page.exists() or page.read_text(encoding="utf-8") != text:
        page.write_text(text, encoding="utf-8")


def _visit_math(writer: HTML5Translator, node: nodes.Element) -> None:
    """Write a formula as MathML, which browsers show by themselves."""
    block = isinstance(node, nodes.math_block)
    writer.body.append(tex2mathml(node.astext(), as_block=block))
    raise nodes.SkipNode


def setup(sphinx: Sphinx) -> None:
    """Register the extensions above."""
    _write_command_line(Path(__file__).parent / "reference")
    sphinx.connect("autodoc-process-docstring", _highlight_fences)
    sphinx.connect("autodoc-skip-member", _skip_aliases)
    sphinx.connect("doctree-read", _pair_with_dark, priority=400)  # before images are collected
    sphinx.connect("html-page-context", _open_to_all, priority=900)  # after furo
    sphinx.add_html_math_renderer("mathml", (_visit_math, None), (_visit_math, None))
