"""Images that no node can pull, wherever a spec names them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st
from said_findings import check_manifest

DIGEST = "sha256:" + "0f" * 32
RIGHT = [
    "busybox", "busybox:1.36", "foo_bar.com:8080", "foo/foo_bar.com:8080", "test:5000/repo",
    "test:5000/repo:tag", "localhost/repo", f"test:5000/repo:tag@{DIGEST}", f"repo@{DIGEST}",
    "lower:Upper", "Host/repo", "HOST.example:5000/a/b", "xn--n3h.com/myimage:xn--n3h.com",
    "b.gcr.io/test.example.com/my-app:test.example.com", "a--b/c__d/e.f_g", "1.2.3.4/x",
    "[2001:db8::1]:5000/repo", "repo:_x", f"r@sha512:{'a' * 128}", "a" * 255, f"r:{'t' * 128}",
    "sub-dom1.foo.com/bar/baz/quux:some-long-tag",
]  # fmt: skip
WRONG = [
    "https://docker.io/vllm/vllm-openai:v0.32.0", "docker://a/b", "a/b:tag:tag", "a/b@tag", "A/B",
    "a/B:x", "Uppercase:tag", "test:5000/Upper/lower", ":justtag", f"@{DIGEST}", "repo@sha256:ffff",
    f"repo@{DIGEST.upper()}", f"repo@md5:{'0' * 32}", f"repo@{DIGEST}:tag", "aa/asdf$$^/aa", "a//b",
    "/a/b", "a/b/", "-foo/bar", "foo/bar-", "foo..bar/x/", "a___b", "[fe80::1%eth0]/repo",
    "a" * 256, f"r:{'t' * 129}", "r:-x", "a:", "0f" * 32, "réseau/x", "a/b:é",
]  # fmt: skip


def template(*containers: dict[str, Any], **pod: Any) -> dict[str, Any]:
    return {"podTemplate": {"spec": {"containers": list(containers), **pod}}}


def places(image: str) -> dict[str, dict[str, Any]]:
    box = {"name": "x", "image": image}
    volume = {"name": "v", "image": {"reference": image}}
    return {
        "engine.image": {"engine": {"image": image}},
        "decode.engine.image": {"decode": {"engine": {"image": image}}},
        "router.image": {"router": {"image": image}},
        "prefill.podTemplate.spec.containers[0].image": {
            "prefill": template({**box, "name": "engine"})
        },
        "router.podTemplate.spec.containers[0].image": {
            "router": template({**box, "name": "router"})
        },
        "decode.podTemplate.spec.containers[0].image": {"decode": template(box)},
        "decode.podTemplate.spec.initContainers[0].image": {
            "decode": template(initContainers=[box])
        },
        "decode.podTemplate.spec.volumes[0].image.reference": {
            "decode": template(volumes=[volume])
        },
    }


def errors(**spec: Any) -> dict[str, str]:
    head = {"apiVersion": "pdcluster.dev/v1alpha1", "kind": "PDCluster", "metadata": {"name": "x"}}
    spec["model"] = {"source": {"persistentVolumeClaim": {"claimName": "weights"}}}
    found = check_manifest({**head, "spec": spec})[1].errors
    return {one.path.removeprefix("spec."): str(one.rule) for one in found}


@pytest.mark.parametrize("image", WRONG)
def test_what_is_no_reference_is_refused_in_each_place(image: str) -> None:
    for path, spec in places(image).items():
        assert errors(**spec) == {path: "BadFormat"}, path


@pytest.mark.parametrize("image", RIGHT)
def test_references_are_accepted_in_each_place(image: str) -> None:
    for path, spec in places(image).items():
        assert errors(**spec) == {}, path


LABEL = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,5}[a-z0-9])?", fullmatch=True)
DOMAINS = st.builds(
    lambda labels, port: ".".join(labels) + port,
    st.lists(LABEL, min_size=2, max_size=3),
    st.sampled_from(["", ":5000"]),
)
PARTS = st.from_regex(r"[a-z0-9]{1,4}((\.|_|__|-{1,3})[a-z0-9]{1,4}){0,2}", fullmatch=True)
TAGS = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,9}", fullmatch=True)


@given(
    st.none() | DOMAINS, st.lists(PARTS, min_size=1, max_size=3), st.none() | TAGS, st.booleans()
)
def test_whatever_the_grammar_makes_is_accepted(
    domain: str | None, parts: list[str], tag: str | None, pinned: bool
) -> None:
    image = "/".join([domain, *parts] if domain else parts)
    image += (f":{tag}" if tag else "") + (f"@{DIGEST}" if pinned else "")
    assert "BadFormat" not in errors(decode=template({"name": "x", "image": image})).values()
