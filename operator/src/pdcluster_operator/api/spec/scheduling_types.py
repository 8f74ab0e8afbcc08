"""How the pods of engines get their nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pdcluster_operator.api.spec.bounds import QUEUE
from pdcluster_operator.api.spec.enums import Switch
from pdcluster_operator.api.spec.fields import Doc, Example


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduling:
    """How the pods of engines get their nodes."""

    gang: Annotated[
        Switch,
        Example("Enabled"),
        Doc(
            "says whether pods that need each other get their nodes together or not at all. With "
            "Enabled, these are the pods of the first prefill engine and of the first decode "
            "engine, and the pods of each engine that has several. The API server has to serve "
            "PodGroup of scheduling.k8s.io/v1beta1. Engines that exist are not replaced."
        ),
    ] = Switch.DISABLED
    queue_name: Annotated[
        str | None,
        Example("team-a"),
        Doc(
            "is the LocalQueue of Kueue that admits engines, one by one. New engines get the label "
            "kueue.x-k8s.io/queue-name. Engines that exist stay in their queue."
        ),
        QUEUE,
    ] = None
