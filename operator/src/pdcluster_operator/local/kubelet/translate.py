"""From a pod's container to a command line: pure, so that a test can compare it with the manifest.

Kubernetes' own rules first (``$(NAME)`` expansion, downward API), then the three
substitutions of local mode, in arguments and environment values alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Manifest = Mapping[str, Any]

_REFERENCE = re.compile(r"\$(\$|\(([A-Za-z_][\w.-]*)\))")
_DNS_NAME = re.compile(r"(?<![\w.-])(?:[a-z0-9-]+\.){2,3}svc(?:\.cluster\.local)?(?![\w-])")
_WILDCARD = re.compile(r"(?<![\d.])0\.0\.0\.0(?![\d.])")


@dataclass(frozen=True, slots=True)
class Substitutions:
    """What stands for a pod's namespaces on this machine.

    Attributes:
        address: the pod's own address, which replaces 0.0.0.0.
        folders: mount path to the folder that stands for it.
        resolve: cluster DNS name to an address; None leaves the name as it is.
    """

    address: str
    folders: Mapping[str, str]
    resolve: Callable[[str], str | None]

    def apply(self, text: str) -> str:
        """One argument or environment value, as this machine needs it."""
        # One pass, longest first: what a folder's own path holds is not replaced again.
        mounts = sorted(self.folders, key=len, reverse=True)
        pattern = rf"(?<![\w./-])({'|'.join(map(re.escape, mounts))})(?![\w.-])"
        if mounts:
            text = re.sub(pattern, lambda mount: self.folders[mount[1]], text)
        text = _DNS_NAME.sub(lambda name: self.resolve(name[0]) or name[0], text)
        return _WILDCARD.sub(self.address, text)


def kubernetes_environment(pod: Manifest, container: Manifest, address: str) -> dict[str, str]:
    """Return the container's ``env`` as a kubelet resolves it.

    What comes from Secrets and ConfigMaps is left to the surrounding environment, where
    :func:`..machine.find_problem` has looked for it.
    """
    values: dict[str, str] = {}
    for entry in container.get("env") or ():
        source = entry.get("valueFrom")
        if source is None:
            values[entry["name"]] = expand(entry.get("value", ""), values)
        elif "fieldRef" in source:
            values[entry["name"]] = _field(pod, source["fieldRef"]["fieldPath"], address)
    return values


def kubernetes_command(container: Manifest, environment: Mapping[str, str]) -> list[str]:
    """``command`` and ``args`` as a kubelet expands them."""
    words = [*(container.get("command") or ()), *(container.get("args") or ())]
    return [expand(word, environment) for word in words]


def expand(text: str, values: Mapping[str, str]) -> str:
    """Replace ``$(NAME)``. An unknown name stays as it is, and ``$$`` is a dollar."""
    return _REFERENCE.sub(lambda m: "$" if m[1] == "$" else values.get(m[2], m[0]), text)


def _field(pod: Manifest, path: str, address: str) -> str:
    if path in ("status.podIP", "status.hostIP"):
        return address
    if quoted := re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path):
        return str((pod["metadata"].get(quoted[1]) or {}).get(quoted[2], ""))
    value: Any = pod
    for part in path.split("."):
        value = value.get(part, "") if isinstance(value, Mapping) else ""
    return str(value)
