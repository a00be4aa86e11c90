"""Print the wire contract as JSON Schema: ``python -m fedone_sdk.messages``."""

from __future__ import annotations

import json

from fedone_sdk.messages.schema import json_schemas


def document() -> str:
    """Return the schemas of all messages as one JSON document."""
    schemas = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "FedOne messages",
        "$defs": json_schemas(),
    }
    return json.dumps(schemas, indent=2, ensure_ascii=False)


if __name__ == "__main__":
    print(document())
