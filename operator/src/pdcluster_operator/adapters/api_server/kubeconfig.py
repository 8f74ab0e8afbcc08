"""Where the API server is, and who asks: a pod's ServiceAccount, or a kubeconfig."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.request import getproxies

from kubernetes.aio import client, config

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
DEFAULT_NAMESPACE = "default"


class NotConnected(Exception):  # noqa: N818 - says what holds
    """Neither a ServiceAccount nor a kubeconfig was found; the message says where."""


async def find_configuration(
    kubeconfig: str | None = None, context: str | None = None
) -> client.Configuration:
    """Return how to reach the API server: a ServiceAccount's pod first, else a kubeconfig.

    Args:
        kubeconfig: a file that wins over both.
        context: of a kubeconfig, which then wins over the ServiceAccount.

    Raises:
        NotConnected: neither is there, or what is there cannot be read.
    """
    files = _files(kubeconfig)
    in_pod = kubeconfig is None and context is None and (ACCOUNT / "token").exists()
    configuration = client.Configuration()
    # A cluster's CA often lacks the extensions that Python's strict mode asks for.
    configuration.disable_strict_ssl_verification = True
    # With trust_env, each request first asks two threads for a .netrc and for proxies.
    configuration.client_session_kwargs = {"trust_env": bool(getproxies())}
    try:
        if in_pod:
            config.load_incluster_config(  # type: ignore[no-untyped-call]
                client_configuration=configuration
            )
        elif found := [one for one in _paths(files) if one.exists()]:
            _check(found, context)
            loader = await config.load_kube_config(  # type: ignore[no-untyped-call]
                config_file=files, context=context, client_configuration=configuration
            )
            _check_loaded(loader._user, configuration)  # noqa: SLF001 - of the chosen context
        else:
            raise FileNotFoundError("there is no such file")
    except Exception as error:  # a file may be anything, and the library raises anything then
        named, why = ACCOUNT if in_pod else files, " ".join(str(error).split())
        remedy = "correct it, or set KUBECONFIG to another file"
        if in_pod or isinstance(error, FileNotFoundError):
            remedy = "run in a pod with a ServiceAccount, or set KUBECONFIG"
        raise NotConnected(f"cannot reach the API server: {named}: {why}; {remedy}") from error
    return configuration


def namespace_of_context(context: str | None, kubeconfig: str | None = None) -> str:
    """Return the namespace that a context of the kubeconfig names, as kubectl takes it."""
    try:
        known, current = config.list_kube_config_contexts(  # type: ignore[no-untyped-call]
            _files(kubeconfig)
        )
        named = [one for one in known if one["name"] == context]
        chosen = (named[0] if named else current)["context"]
        return str(chosen.get("namespace") or DEFAULT_NAMESPACE)
    except Exception:  # noqa: BLE001 - a file may be anything; who connects says what is wrong
        return own_namespace() or DEFAULT_NAMESPACE


def _paths(files: str) -> list[Path]:
    return [Path(one).expanduser() for one in files.split(":") if one]


def _check(files: Sequence[Path], context: str | None) -> None:
    """Raise ValueError if kubeconfigs are empty, or lack a context. The library says neither."""
    if all(one.is_file() and not one.read_bytes().strip() for one in files):
        raise ValueError("this is no kubeconfig: it is empty")
    if context is not None:
        known, _ = config.list_kube_config_contexts(  # type: ignore[no-untyped-call]
            ":".join(map(str, files))
        )
        names = [str(one["name"]) for one in known]
        if context not in names:
            raise ValueError(f"it has no context {context!r}; there are: {', '.join(names)}")


def _check_loaded(user: Any, configuration: client.Configuration) -> None:
    """Raise ValueError if there is no URL, or if nobody logged in. The library says neither."""
    if not configuration.host.lower().startswith(("https://", "http://")):
        raise ValueError(f"the server {configuration.host!r} must begin with https:// or http://")
    known = configuration.api_key or configuration.cert_file
    if user is not None and "exec" in user and not known:
        program = str(user["exec"]["command"])
        why = "gives no credentials" if shutil.which(program) else "is not on PATH"
        raise ValueError(f"the login program {program!r} (users[].user.exec) {why}")


def _files(kubeconfig: str | None) -> str:
    return kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"


def every_address() -> str:
    """Return what stands for all addresses of a pod: ``::`` if this cluster's Services have IPv6.

    Elsewhere the kernel of a node may have no IPv6 at all.
    """
    return "::" if ":" in os.environ.get("KUBERNETES_SERVICE_HOST", "") else "0.0.0.0"  # noqa: S104


def own_namespace() -> str | None:
    """Return the namespace of the operator's pod; None outside of a cluster."""
    if named := os.environ.get("POD_NAMESPACE"):
        return named
    try:
        return (ACCOUNT / "namespace").read_text().strip() or None
    except OSError:
        return None
