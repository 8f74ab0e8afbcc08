"""``spec.transfer.tls: Mounted`` needs a mount in both roles, and an operator that can speak."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from said_findings import check_manifest

from pdcluster_connector.protocol.engine_id import OPERATOR_NAME, role_name
from pdcluster_operator.api.findings import FieldError

ROOT = Path(__file__).resolve().parents[3]
VOLUME = {"name": "own", "secret": {"secretName": "engine-certificate"}}
MOUNT = {"name": "own", "mountPath": "/pdcluster-tls"}


def role(*mounts: dict[str, Any], container: str = "engine") -> dict[str, Any]:
    other = {"name": container, "volumeMounts": list(mounts)}
    if container != "engine":
        other["image"] = "example/other:1"
    return {"podTemplate": {"spec": {"containers": [other], "volumes": [VOLUME]}}}


def manifest(tls: str = "Mounted", **spec: Any) -> dict[str, Any]:
    claim = {"persistentVolumeClaim": {"claimName": "models"}}
    return {
        "apiVersion": "pdcluster.dev/v1alpha1",
        "kind": "PDCluster",
        "metadata": {"name": "llama"},
        "spec": {"model": {"source": claim}, "transfer": {"tls": tls}, **spec},
    }


def errors(tls: str = "Mounted", **spec: Any) -> tuple[FieldError, ...]:
    return check_manifest(manifest(tls, **spec))[1].errors


@pytest.mark.parametrize("path", ["/pdcluster-tls", "/pdcluster-tls/"])
def test_a_mount_in_both_roles_is_accepted(path: str) -> None:
    mounted = role({**MOUNT, "mountPath": path, "readOnly": True})
    assert errors(prefill=mounted, decode=mounted) == ()


@pytest.mark.parametrize(
    "decode",
    [
        {},
        {"podTemplate": {"spec": {"volumes": [VOLUME]}}},
        role(),
        role({**MOUNT, "mountPath": "/elsewhere"}),
        role(MOUNT, container="sidecar"),
        {
            "podTemplate": {
                "spec": {
                    "volumes": [VOLUME],
                    "initContainers": [{"name": "fetch", "image": "x", "volumeMounts": [MOUNT]}],
                }
            }
        },
    ],
)
def test_a_role_whose_engines_have_no_certificate_is_refused(decode: dict[str, Any]) -> None:
    [error] = errors(prefill=role(MOUNT), decode=decode)
    assert error.rule == "CertificateNotMounted"
    assert error.path.startswith("spec.decode.podTemplate")
    assert "/pdcluster-tls" in error.message
    assert "spec.decode.podTemplate" in error.remedy
    assert errors("Disabled", prefill=role(MOUNT), decode=decode) == ()


@pytest.mark.parametrize("path", ["/pdcluster-tls", "/pdcluster-tls/", "/pdcluster-tls/tls.crt"])
def test_a_mount_that_hides_the_operators_certificate_is_refused(path: str) -> None:
    """It stays behind easily when somebody goes back from Mounted to Enabled."""
    [error] = errors("Enabled", decode=role({**MOUNT, "mountPath": path}))
    assert error.rule == "CertificateHidden"
    assert error.path == "spec.decode.podTemplate.spec.containers[0].volumeMounts[0].mountPath"
    assert "Mounted" in error.remedy
    assert errors("Enabled", decode=role(MOUNT, container="sidecar")) == ()
    assert errors("Enabled", decode=role({**MOUNT, "mountPath": "/elsewhere"})) == ()


@pytest.mark.parametrize(
    "source",
    [
        {"secret": {"secretName": "llama-certificates"}},
        {
            "projected": {
                "sources": [
                    {"configMap": {"name": "authority"}},
                    {"secret": {"name": "llama-certificates"}},
                ]
            }
        },
    ],
)
def test_the_operators_own_secret_is_no_certificate_of_the_user(source: dict[str, Any]) -> None:
    decode = role(MOUNT)
    decode["podTemplate"]["spec"]["volumes"] = [{"name": "own", **source}]
    [error] = errors(prefill=role(MOUNT), decode=decode)
    assert error.rule == "CertificateNotMounted"
    assert "llama-certificates" in error.message


def test_a_file_mounted_over_the_folder_is_refused() -> None:
    file = {**MOUNT, "mountPath": "/pdcluster-tls/tls.crt", "subPath": "tls.crt"}
    [error] = errors(prefill=role(MOUNT), decode=role(MOUNT, file))
    assert error.path.endswith("volumeMounts[1].subPath")


def test_a_volume_below_the_folder_need_not_hold_the_certificate() -> None:
    decode = role(MOUNT, {"name": "more", "mountPath": "/pdcluster-tls/more"})
    items = [{"key": "a", "path": "a"}]
    more = {"name": "more", "secret": {"secretName": "s", "items": items, "optional": True}}
    decode["podTemplate"]["spec"]["volumes"] = [VOLUME, more]
    found = check_manifest(manifest(prefill=role(MOUNT), decode=decode))[1]
    assert found.errors == ()
    assert "CertificateNotMounted" not in [one.rule for one in found.warnings]


@pytest.mark.parametrize("tls", ["Mounted", "Enabled"])
def test_a_mount_or_a_volume_that_is_no_object_is_one_error(tls: str) -> None:
    mounts = [MOUNT] if tls == "Mounted" else []
    for mounted, volumes, path in (
        (["own", *mounts], [VOLUME], "containers[0].volumeMounts[0]"),
        (mounts, ["own", VOLUME], "volumes[0]"),
    ):
        decode = role(*mounted)
        decode["podTemplate"]["spec"]["volumes"] = volumes
        [error] = errors(tls, prefill=role(*mounts), decode=decode)
        assert (error.path, error.rule) == (f"spec.decode.podTemplate.spec.{path}", "WrongType")


def test_names_that_are_no_text_are_refused_with_their_paths() -> None:
    decode = role({**MOUNT, "name": ["own"]})
    decode["podTemplate"]["spec"]["volumes"] = [{"name": {"own": 1}, "secret": {"secretName": []}}]
    found = errors(prefill=role(MOUNT), decode=decode)
    paths = {error.path.rpartition("podTemplate.spec.")[2] for error in found}
    assert paths >= {"volumes[0].name", "containers[0].volumeMounts[0].name"}
    assert all(error.rule in ("WrongType", "CertificateNotMounted") for error in found)


def test_both_roles_are_named_at_once() -> None:
    assert [error.path for error in errors()] == [
        "spec.prefill.podTemplate",
        "spec.decode.podTemplate",
    ]


@pytest.mark.parametrize(
    ("mount", "path"),
    [
        ({**MOUNT, "subPath": "tls"}, "volumeMounts[0].subPath"),
        ({**MOUNT, "subPathExpr": "$(POD_IP)"}, "volumeMounts[0].subPathExpr"),
        ({**MOUNT, "name": "shm"}, "volumeMounts[0].name"),
    ],
)
def test_a_mount_that_brings_no_new_certificates_is_refused(
    mount: dict[str, Any], path: str
) -> None:
    [error] = errors(prefill=role(MOUNT), decode=role(mount))
    assert error.rule == "CertificateNotMounted"
    assert error.path == f"spec.decode.podTemplate.spec.containers[0].{path}"


def test_a_mount_of_no_volume_is_refused_once() -> None:
    [error] = errors(prefill=role(MOUNT), decode=role({**MOUNT, "name": "other"}))
    assert error.rule == "NotInPod"
    assert error.path == "spec.decode.podTemplate.spec.containers[0].volumeMounts[0].name"


ALL = [{"key": key, "path": key} for key in ("ca.crt", "tls.crt", "tls.key")]
OWN_PATH = "spec.decode.podTemplate.spec.volumes[0]"


def decode_with(source: dict[str, Any], **template: Any) -> dict[str, Any]:
    """A decode role whose engines mount this volume, beside other containers."""
    decode = role(MOUNT)
    spec = decode["podTemplate"]["spec"]
    spec["volumes"] = [{"name": "own", **source}]
    for field, containers in template.items():
        spec[field] = [*spec.get(field, ()), *containers]
    return decode


def helper(**fields: Any) -> dict[str, Any]:
    return {"name": "helper", "image": "example/helper:1", "volumeMounts": [MOUNT], **fields}


def projected(*sources: dict[str, Any]) -> dict[str, Any]:
    return {"projected": {"sources": list(sources)}}


@pytest.mark.parametrize(
    "source",
    [
        {"secret": {"secretName": "s", "items": ALL}},
        {"secret": {"secretName": "s", "items": [{"key": i["key"], "path": f"./{i['path']}"}
                                                 for i in ALL]}},
        {"secret": {"secretName": "s", "items": []}},
        {"csi": {"driver": "csi.cert-manager.io", "readOnly": True}},
        {"hostPath": {"path": "/certificates"}},
        projected({"secret": {"name": "s", "items": ALL[1:]}},
                  {"clusterTrustBundle": {"name": "b", "path": "ca.crt"}}),
        projected({"secret": {"name": "s", "items": ALL[1:]}}, {"configMap": {"name": "ca"}}),
        projected({"podCertificate": {"keyType": "ED25519", "signerName": "a.b/c",
                                      "keyPath": "tls.key", "certificateChainPath": "tls.crt"}},
                  {"configMap": {"name": "ca", "items": ALL[:1]}}),
    ],
)  # fmt: skip
def test_a_volume_that_may_hold_the_files_is_accepted(source: dict[str, Any]) -> None:
    decode = decode_with(source)
    found = check_manifest(manifest(prefill=role(MOUNT), decode=decode))[1]
    assert found.errors == ()
    assert [one for one in found.warnings if one.rule.startswith("Certificate")] == []


NAME = {"fieldPath": "metadata.name"}
SIGNED = {"signerName": "example.com/engines", "keyType": "ED25519"}


@pytest.mark.parametrize(
    ("source", "path", "missing"),
    [
        ({"secret": {"secretName": "s", "items": ALL[:2]}}, ".secret.items", "out tls.key,"),
        (
            {"secret": {"secretName": "s", "items": [{"key": "tls.crt", "path": "sub/tls.crt"}]}},
            ".secret.items",
            "out ca.crt, tls.crt, tls.key,",
        ),
        ({"configMap": {"name": "c", "items": ALL[1:]}}, ".configMap.items", "out ca.crt,"),
        (
            {"downwardAPI": {"items": [{"path": "ca.crt", "fieldRef": NAME}]}},
            ".downwardAPI.items",
            "out tls.crt, tls.key,",
        ),
        (
            projected({"secret": {"name": "s", "items": ALL[1:]}}),
            ".projected.sources[0].secret.items",
            "out ca.crt,",
        ),
        (
            projected(
                {"secret": {"name": "s", "items": ALL[2:]}},
                {"clusterTrustBundle": {"name": "b", "path": "ca.crt"}},
                {"serviceAccountToken": {"path": "token"}},
            ),
            ".projected.sources",
            "out tls.crt,",
        ),
        (
            projected(
                {
                    "podCertificate": {
                        **SIGNED,
                        "keyPath": "tls.key",
                        "certificateChainPath": "tls.crt",
                    }
                }
            ),
            ".projected.sources[0].podCertificate",
            "out ca.crt,",
        ),
        (
            projected({"podCertificate": {**SIGNED, "credentialBundlePath": "tls.crt"}}),
            ".projected.sources[0].podCertificate",
            "out ca.crt, tls.key,",
        ),
    ],
)
def test_items_that_leave_a_file_out_are_refused(
    source: dict[str, Any], path: str, missing: str
) -> None:
    [error] = errors(prefill=role(MOUNT), decode=decode_with(source))
    assert error.rule == "CertificateNotMounted"
    assert error.path == f"{OWN_PATH}{path}"
    assert missing in error.message
    assert "items" in error.remedy
    assert "None" not in error.value
    assert errors("Disabled", prefill=role(MOUNT), decode=decode_with(source)) == ()


@pytest.mark.parametrize(
    "template",
    [
        {},
        {"initContainers": [helper(volumeMounts=[{**MOUNT, "readOnly": True}])]},
        {"containers": [helper(volumeMounts=[{"name": "other", "mountPath": "/x"}])]},
    ],
)
@pytest.mark.parametrize("source", [{"emptyDir": {}}, {}, {"emptyDir": None}])
def test_an_empty_folder_that_nobody_fills_is_warned_of(
    template: dict[str, Any], source: dict[str, Any]
) -> None:
    """A webhook may add a sidecar to the pods: the podTemplate does not show it."""
    decode = decode_with(source, **template)
    found = check_manifest(manifest(prefill=role(MOUNT), decode=decode))[1]
    assert "CertificateNotMounted" not in [one.rule for one in found.errors]
    [warning] = [one for one in found.warnings if one.rule == "CertificateNotMounted"]
    assert warning.path == f"{OWN_PATH}.emptyDir"
    assert "webhook" in warning.remedy


def test_an_empty_folder_that_a_sidecar_fills_is_accepted() -> None:
    for template in (
        {"containers": [helper()]},
        {"initContainers": [helper(restartPolicy="Always")]},
        {"containers": [helper(volumeMounts=[{"name": "shm", "mountPath": "/more"}, MOUNT])]},
        {"initContainers": [helper()], "containers": [{**helper(), "name": "renews"}]},
    ):
        decode = decode_with({"emptyDir": {"medium": "Memory"}}, **template)
        found = check_manifest(manifest(prefill=role(MOUNT), decode=decode))[1]
        assert found.errors == ()
        assert [one for one in found.warnings if one.rule.startswith("Certificate")] == []
    for runs in ({"command": ["/fetch-then-launch"]}, {"lifecycle": {"postStart": {"sleep": {}}}}):
        own = decode_with({"emptyDir": {}})
        own["podTemplate"]["spec"]["containers"][0] |= runs
        found = check_manifest(manifest(prefill=role(MOUNT), decode=own))[1]
        said = [one.rule for one in (*found.errors, *found.warnings)]
        assert "CertificateNotMounted" not in said, "what it runs is the user's own"


def test_a_certificate_that_only_an_init_container_writes_is_warned_of() -> None:
    decode = decode_with({"emptyDir": {}}, initContainers=[helper()])
    found = check_manifest(manifest(prefill=role(MOUNT), decode=decode))[1]
    assert found.ok
    [warning] = [one for one in found.warnings if one.rule == "CertificateNotRenewed"]
    assert warning.path == f"{OWN_PATH}.emptyDir"
    assert "restartPolicy: Always" in warning.remedy
    secret = decode_with(VOLUME, initContainers=[helper()])
    found = check_manifest(manifest(prefill=role(MOUNT), decode=secret))[1]
    assert "CertificateNotRenewed" not in [one.rule for one in found.warnings]


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ({"secret": {"secretName": "s", "optional": True}}, ".secret.optional"),
        (
            projected({"secret": {"name": "s", "optional": True}}),
            ".projected.sources[0].secret.optional",
        ),
    ],
)
def test_a_certificate_that_may_be_missing_is_warned_of(source: dict[str, Any], path: str) -> None:
    found = check_manifest(manifest(prefill=role(MOUNT), decode=decode_with(source)))[1]
    assert found.ok
    [warning] = [one for one in found.warnings if one.rule == "CertificateNotMounted"]
    assert warning.path == f"{OWN_PATH}{path}"
    assert "Remove" in warning.remedy
    plain = check_manifest(manifest("Disabled", prefill=role(MOUNT), decode=decode_with(source)))[1]
    assert "CertificateNotMounted" not in [one.rule for one in plain.warnings]


@pytest.mark.parametrize(
    "value", [None, 7, "x", [], [7], {"items": "x"}, {"sources": [7, {"a": 1}]}]
)
@pytest.mark.parametrize("kind", ["emptyDir", "secret", "configMap", "projected", "downwardAPI"])
def test_volumes_of_any_shape_are_read(kind: str, value: object) -> None:
    check_manifest(manifest(prefill=role(MOUNT), decode=decode_with({kind: value})))


def test_a_source_that_this_operator_does_not_know_may_hold_the_files() -> None:
    """A later Kubernetes may have it. The operator's table of fields does not know it yet."""
    decode = decode_with(projected({"vault": {"path": "anything"}}))
    [error] = errors(prefill=role(MOUNT), decode=decode)
    assert error.rule == "UnknownField"


def test_without_a_certificate_of_its_own_an_operator_and_local_mode_refuse() -> None:
    good = manifest(prefill=role(MOUNT), decode=role(MOUNT))
    for place in ({"mounted_certificates": False}, {"one_node": True}):
        [error] = check_manifest(good, **place)[1].errors
        assert error.rule == "MountedNotSupported"
        assert error.path == "spec.transfer.tls"
        assert "engineCertificate" in error.remedy


def test_lint_warns_because_it_does_not_know_the_operator() -> None:
    good = manifest(prefill=role(MOUNT), decode=role(MOUNT))
    _, findings = check_manifest(good, mounted_certificates=None)
    assert findings.ok
    assert "MountedNotSupported" in [warning.rule for warning in findings.warnings]
    plain = check_manifest(manifest("Enabled"), mounted_certificates=None)[1]
    assert "MountedNotSupported" not in [warning.rule for warning in plain.warnings]


def test_the_example_in_docs_is_accepted_and_its_certificates_have_the_right_names() -> None:
    page = (ROOT / "docs/security.md").read_text()
    [text] = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    documents = list(yaml.safe_load_all(text))
    [example] = [document for document in documents if document["kind"] == "PDCluster"]
    assert check_manifest(example)[1].errors == ()
    names = {
        document["spec"]["secretName"]: document["spec"]["dnsNames"]
        for document in documents
        if document["kind"] == "Certificate"
    }
    assert names.pop("operator-certificate") == [OPERATOR_NAME]
    namespace, cluster = example["metadata"]["namespace"], example["metadata"]["name"]
    mounted = {}
    for side in ("prefill", "decode"):
        [volume] = example["spec"][side]["podTemplate"]["spec"]["volumes"]
        mounted[volume["secret"]["secretName"]] = [role_name(f"{namespace}.{cluster}.{side}.r.0/1")]
    assert names == mounted
