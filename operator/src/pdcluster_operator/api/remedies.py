"""What each reason and rule means to a person, and the command to run next. Pure.

``remedies.yaml`` is the table. It has the reasons of conditions, links, prompts, events, findings
and the API server, and symptoms that have no reason of their own, such as an engine that ran out of
memory. A pattern finds such a symptom in a message.
"""

import re
import shlex
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from importlib.resources import files

import msgspec
import yaml

PAGE = "troubleshooting.md"
LOOK = "kubectl describe pdcluster NAME -n NAMESPACE"
"""The next command for a reason that the table does not have."""
PODS_OF_CLUSTER = "-l pdcluster.dev/cluster="
LOCAL_LOGS = "pdcluster logs NAME --local --since 10m"
"""The next command of a run of pdcluster up in the place of one that needs Kubernetes."""
_WITH_LOCAL = re.compile(r"(pdcluster (?:check|links|logs|status) NAME) -n NAMESPACE")
_PLACEHOLDER = re.compile(r"\b(NAMESPACE|NAME|POD|FILE)\b")


class Severity(StrEnum):
    """Whether somebody has to do something; ``meaning`` says it in words."""

    GOOD = "Good"
    PROGRESS = "Progress"
    ADVICE = "Advice"
    WAITS = "Waits"
    FAULT = "Fault"

    @property
    def meaning(self) -> str:
        """The end of a sentence that begins with a reason."""
        return _MEANINGS[self]


_MEANINGS = {
    Severity.GOOD: "nothing is wrong",
    Severity.PROGRESS: "it passes by itself",
    Severity.ADVICE: "a warning; nothing stops",
    Severity.WAITS: "it goes on when somebody has done something",
    Severity.FAULT: "something is broken",
}


class Remedy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of the table.

    Attributes:
        name: the reason, rule or symptom.
        section: of docs/troubleshooting.md, by what people look at.
        symptom: what they see.
        cause: what holds.
        remedy: what to do; empty if nothing is wrong.
        next: the command to run, with the words NAME, NAMESPACE, POD and FILE; empty as above.
        more: a page of docs/ that says more, with its anchor.
        says: a pattern for the messages that show this symptom, whatever their reason.
        own_reason: whether the name is a reason or rule. False: it names a symptom only.
    """

    name: str
    section: str
    severity: Severity
    symptom: str
    cause: str
    remedy: str = ""
    next: str = ""
    more: str = ""
    says: str = ""
    own_reason: bool = True

    @property
    def link(self) -> str:
        """The page and anchor of this entry below docs/: the anchor is the name in lower case."""
        return f"{PAGE}#{self.name.lower()}"


@cache
def table() -> Mapping[str, Remedy]:
    """Return every entry by its name, in the order of the page."""
    text = files(__package__).joinpath("remedies.yaml").read_text()
    # PyYAML's own parser needs ten times as long as the one of libyaml.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    sections = yaml.load(text, loader)  # noqa: S506 - both load plain data only
    return {
        name: msgspec.convert({"name": name, "section": section, **entry}, Remedy)
        for section, entries in sections.items()
        if not section.startswith("x-")
        for name, entry in entries.items()
    }


def find(reason: str, message: str = "") -> Remedy | None:
    """Return what explains a reason best; None for a reason that the table does not have.

    Args:
        message: of the condition, event or pod that has the reason. A symptom that it shows, such
            as an engine that ran out of memory, says more than the reason does.
    """
    known = table().get(reason)
    if known and known.severity is Severity.GOOD:
        return known
    return next((one for one, says in _patterns() if says.search(message)), known)


def next_step(
    reason: str,
    cluster: str,
    namespace: str,
    *,
    message: str = "",
    pod: str = "",
    file: str = "",
    local: bool = False,
) -> str:
    """Return the command to run next, ready for a shell; empty if nothing is wrong.

    Args:
        reason, message: as for :func:`find`.
        cluster, namespace: of the PDCluster.
        pod: the pod that the message is about; empty for all pods of the PDCluster.
        file: the manifest, if it is known.
        local: whether it runs on this machine, by ``pdcluster up``.
    """
    found = find(reason, message)
    command = found.next if found else LOOK
    if local and command:
        command = _locally(command)
    known = {"NAME": cluster, "NAMESPACE": namespace, "FILE": file or "FILE"}
    words = {word: shlex.quote(text) for word, text in known.items()}
    words["POD"] = shlex.quote(pod) if pod else f"{PODS_OF_CLUSTER}{words['NAME']}"
    return _PLACEHOLDER.sub(lambda word: words[word[0]], command)


def _locally(command: str) -> str:
    if "FILE" in command or "doctor" in command:
        command = command.replace("doctor -n NAMESPACE", "doctor --machine")
        return command.replace(" -n NAMESPACE --against", "")
    found = _WITH_LOCAL.match(command)
    return f"{found[1]} --local{command[found.end() :]}" if found else LOCAL_LOGS


@cache
def _patterns() -> tuple[tuple[Remedy, re.Pattern[str]], ...]:
    return tuple((one, re.compile(one.says)) for one in table().values() if one.says)
