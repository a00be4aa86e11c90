"""The page at ``/docs``: Swagger UI for the OpenAPI document, without external files."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from fedone_sdk.errors import ProblemError

FILES = ("favicon-32x32.png", "swagger-ui-bundle.js", "swagger-ui.css")
"""Served files of Swagger UI, from the package swagger-ui-py."""

# Relative paths also work behind a proxy that adds a prefix.
PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>FedOne aggregator</title>
<link rel="icon" href="docs/favicon-32x32.png">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="contract"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</body>
</html>
"""

ASSETS = {
    "start.js": """\
SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#contract",
  deepLinking: true,
  validatorUrl: null,
  presets: [SwaggerUIBundle.presets.apis],
});
"""
}
"""The page's own files; a script in a file needs no exception in the content security policy."""

PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def asset_file(name: str) -> Path:
    """Return the path of a file of Swagger UI; ``not_found`` if it or the package is missing."""
    # Located without an import, which would load a template engine.
    package = importlib.util.find_spec("swagger_ui")
    if package is None or package.origin is None:
        raise ProblemError(
            "not_found", "this page needs an extra on the server: pip install 'fedone-sdk[server]'"
        )
    if name not in FILES:
        raise ProblemError("not_found", f"the page has no file {name!r}")
    return Path(package.origin).parent / "static" / name
