"""Keys and certificates of the control plane: elliptic-curve keys by openssl, 0.3 s for all.

They are not meant to last: every start makes new ones, and they are valid for thirty days.
"""

from __future__ import annotations

from pathlib import Path

from cluster.commands import run
from cluster.network import API_SERVICE, DOMAIN, NODE, NODE_NAME

DAYS = "30"


def make_certificates(folder: Path) -> None:
    """Write `ca`, `apiserver`, `kubelet`, `apiserver-client` (.key, .crt each) and the key pair
    `service-account` (.key, .pub) that signs the tokens of ServiceAccounts."""
    folder.mkdir(mode=0o700)
    _key(folder, "ca")
    authority = f"-key ca.key -out ca.crt -subj /CN=pdcluster-test -days {DAYS}"
    _openssl(folder, f"req -x509 -new {authority}")
    _key(folder, "service-account")
    _openssl(folder, "ec -in service-account.key -pubout -out service-account.pub")
    service = "kubernetes.default.svc"
    names = ("localhost", "kubernetes", "kubernetes.default", service, f"{service}.{DOMAIN}")
    _certificate(folder, "apiserver", "/CN=kube-apiserver", ("127.0.0.1", NODE, API_SERVICE), names)
    _certificate(folder, "kubelet", f"/CN={NODE_NAME}", (NODE,), (NODE_NAME,))
    # The API server's identity when it asks the kubelet for logs or to run a command.
    _certificate(folder, "apiserver-client", "/O=system:masters/CN=kube-apiserver-kubelet-client")


def _key(folder: Path, name: str) -> None:
    _openssl(folder, f"ecparam -name prime256v1 -genkey -noout -out {name}.key")


def _certificate(
    folder: Path,
    name: str,
    subject: str,
    addresses: tuple[str, ...] = (),
    names: tuple[str, ...] = (),
) -> None:
    _key(folder, name)
    request = _openssl(folder, f"req -new -key {name}.key -subj {subject}")
    extensions = ["keyUsage=digitalSignature", "extendedKeyUsage=serverAuth,clientAuth"]
    alternatives = [*(f"IP:{address}" for address in addresses), *(f"DNS:{n}" for n in names)]
    if alternatives:
        extensions.append(f"subjectAltName={','.join(alternatives)}")
    (folder / f"{name}.ext").write_text("\n".join(extensions) + "\n")
    signer = f"-CA ca.crt -CAkey ca.key -CAcreateserial -days {DAYS}"
    _openssl(folder, f"x509 -req {signer} -extfile {name}.ext -out {name}.crt", stdin=request)


def _openssl(folder: Path, arguments: str, stdin: str | None = None) -> str:
    return run("openssl", *arguments.split(), cwd=folder, stdin=stdin)
