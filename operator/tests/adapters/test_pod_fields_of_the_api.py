"""Our table of a pod template's fields, held against the schema of a real API server."""

from __future__ import annotations

import pytest

from pdcluster_operator.api.spec.pod_templates import FIELDS, LIMITS, NEEDED

pytestmark = pytest.mark.cluster

CORE = "io.k8s.api.core.v1"
META = "io.k8s.apimachinery.pkg.apis.meta.v1"
MERGED = {"containers", "name", "type"}
"""What the operator's own pod may have already."""
ELSEWHERE = {
    ("V1EphemeralContainer", "imagePullPolicy"),
    ("V1EphemeralContainer", "terminationMessagePolicy"),
    ("V1Lifecycle", "stopSignal"), ("V1PodSpec", "restartPolicy"),
}  # fmt: skip
"""Refused as a whole in our templates, but for the signals, which the table does not list."""


def test_no_field_that_an_api_server_knows_is_refused(real):
    """The other way round it may be: our table is of the client's version, perhaps a newer one."""
    status, schema = real.call("GET", "/openapi/v3/api/v1")
    assert status == 200
    known = schema["components"]["schemas"]
    compared = 0
    for name, fields in FIELDS.items():
        short = name.removeprefix("Core").removeprefix("V1")
        served = known.get(f"{CORE}.{short}") or known.get(f"{META}.{short}")
        if served is not None:
            compared += 1
            properties = served.get("properties", {})
            assert set(properties) <= fields.keys(), name
            assert set(NEEDED[name]) >= set(served.get("required", ())) - MERGED, name
            for field, schema in properties.items():
                words = set(schema.get("enum") or schema.get("items", {}).get("enum") or ())
                if words and (name, field) not in ELSEWHERE:
                    assert set(LIMITS[name, field].split("|")) == words - {""}, (name, field)
    assert compared > 90, "most types are found by their names"
