"""Names of Services and pods: CoreDNS in a pod, built with only the plugins that they need."""

from __future__ import annotations

import string

from cluster import images, network
from cluster.access import ADMIN
from cluster.api import Api
from cluster.commands import run
from cluster.daemons import Programs
from cluster.places import PACKAGE, Places

MANIFEST = PACKAGE / "manifests" / "dns.yaml"


def apply(places: Places, programs: Programs) -> None:
    text = string.Template(MANIFEST.read_text()).substitute(
        DOMAIN=network.DOMAIN, DNS_SERVICE=network.DNS_SERVICE, IMAGE=images.DNS
    )
    run(
        programs["kubectl"],
        "--kubeconfig",
        places.settings / f"{ADMIN}.kubeconfig",
        "apply",
        "--server-side",
        "-f",
        "-",
        stdin=text,
    )


def ready(api: Api) -> bool:
    return api.available_replicas("kube-system", "coredns") > 0
