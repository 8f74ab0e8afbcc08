"""YAML as people read it: block style, keys in the order given, and no aliases."""

from __future__ import annotations

import json
from typing import Any

import yaml


class PlainDumper(yaml.SafeDumper):
    """Writes an object twice if it is used twice: aliases are hard to read."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return that nothing is written as an alias."""
        return True


def to_yaml(value: Any) -> str:
    """Return JSON values as YAML in block style, keys in the order given."""
    plain = json.loads(json.dumps(value))  # without the types' own subclasses of str and dict
    return str(
        yaml.dump(plain, Dumper=PlainDumper, sort_keys=False, allow_unicode=True, width=1000)
    )
