"""For each rule that a manifest can break, one that breaks it and its nearest neighbour. Pure.

``rule_examples.yaml`` holds them.
"""

import difflib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec
import yaml

from pdcluster_operator.api.findings import FieldError, Findings
from pdcluster_operator.api.rules.validate import check_manifest
from pdcluster_operator.api.schema.crd import to_yaml
from pdcluster_operator.api.spec.model_config import FoundConfig
from pdcluster_operator.api.spec.pod_templates import merge

# Too long to be shown. The rules get a text of that length in its place.
LONG_TEXT = "TEXT_OF_250000_LETTERS"
LENGTH = 250_000
# A null itself removes a field of the base.
NULL = "NULL"
SETTINGS = {
    "host_paths": "an operator that admits folders of the nodes",
    "mounted_certificates": "an operator with a certificate that such engines trust",
    "pod_groups": "an API server that serves PodGroups",
}
"""What a default install does not have, by the names of ``check_manifest``."""
LLAMA_CONFIG = FoundConfig(
    config_map={
        "config.json": '{"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096,'
        '"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072}'
    }
)
"""What the ConfigMap holds that an example names."""


class Example(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Two manifests.

    Attributes:
        wrong: the rule refuses it, or warns of it.
        right: what who follows the remedy has. No rule reports anything about it.
        admits: what both are judged with beyond a default install: some of SETTINGS.
        remedy: what the first finding says to do.
    """

    wrong: dict[str, Any]
    right: dict[str, Any]
    admits: tuple[str, ...] = ()
    remedy: str = ""

    def judge(self, manifest: Mapping[str, Any]) -> Findings:
        """Return what admission finds in one of the two."""
        given: dict[str, Any] = {setting: setting in self.admits for setting in SETTINGS}
        given["found"] = LLAMA_CONFIG
        _, findings = check_manifest(_filled(manifest, LONG_TEXT, "x" * LENGTH), **given)
        return findings

    @property
    def finding(self) -> FieldError:
        """The first finding about the wrong one."""
        found = self.judge(self.wrong)
        return (*found.errors, *found.warnings)[0]

    @property
    def refused(self) -> bool:
        """Whether the wrong one is refused. If not, admission warns of it."""
        return not self.judge(self.wrong).ok

    def difference(self) -> list[str]:
        """Return what changes from the wrong manifest to the right one, and the fields around it.

        Lines begin with ``-``, ``+`` or a blank, as those of a diff.
        """
        wrong, right = (to_yaml(one).splitlines() for one in (self.wrong, self.right))
        lines = list(difflib.unified_diff(wrong, right, n=len(wrong), lineterm=""))[3:]
        shown, depth = list[str](), 0
        for line in reversed(lines):
            text = line[1:].lstrip()
            # An item's dash stands below the first letter of the field that has the list.
            place = 2 * (len(line) - len(text)) + text.startswith("-")
            if line[0] in "+-" or place < depth:
                shown.insert(0, line)
                depth = place
        return shown


@cache
def examples() -> Mapping[str, Example]:
    """Return the examples by rule: a rule of manifests, or the id of a compatibility rule."""
    text = files(__package__).joinpath("rule_examples.yaml").read_text()
    table = yaml.safe_load(text)
    return {rule: _example(table["base"], **given) for rule, given in table["rules"].items()}


def of_reason(reason: str) -> Mapping[str, Example]:
    """Return the examples of all rules that report a reason."""
    return {rule: one for rule, one in examples().items() if rule.partition("/")[0] == reason}


def _example(
    base: Any, wrong: Any, right: Any, admits: tuple[str, ...] = (), remedy: str = ""
) -> Example:
    wrong, right = (_filled(merge(base, one), NULL, None) for one in (wrong, right))
    return Example(wrong, right, tuple(admits), remedy)


def _filled(part: Any, word: str, value: str | None) -> Any:
    """Return a manifest with a value wherever a word of the file stands for it."""
    match part:
        case dict():
            return {key: _filled(inner, word, value) for key, inner in part.items()}
        case list():
            return [_filled(inner, word, value) for inner in part]
    return value if part == word else part
