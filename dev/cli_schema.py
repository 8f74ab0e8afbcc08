"""Prints docs/cli-v1.schema.json: the JSON schema of every document that a command prints."""

from __future__ import annotations

import json

from dev.cli_page import kinds

from pdcluster_operator.cli import output


def main() -> None:
    definitions = {}
    for name, kind in kinds().items():
        shape = output.schema(kind)
        del shape["$schema"]
        definitions[name] = shape
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Documents of pdcluster, {output.API_VERSION}",
        "oneOf": [{"$ref": f"#/$defs/{name}"} for name in definitions],
        "$defs": definitions,
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
