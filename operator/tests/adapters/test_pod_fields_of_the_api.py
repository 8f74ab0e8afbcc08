"""Our table of a pod template's fields, held against the schema of a real API server."""

from __future__ import annotations

import pytest

from pdcluster_operator.api.spec.pod_templates import FIELDS

pytestmark = pytest.mark.cluster

CORE = "io.k8s.api.core.v1"
META = "io.k8s.apimachinery.pkg.apis.meta.v1"


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
            assert set(served.get("properties", ())) <= fields.keys(), name
    assert compared > 90, "most types are found by their names"
