"""Write the files that are generated from the code, or check that they are up to date."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = {
    "charts/pdcluster/README.md": "dev.chart_page",
    # A chart cannot read files outside of itself.
    "charts/pdcluster/files/pdcluster.dev_pdclusters.yaml": "pdcluster_operator.api.schema.crd",
    "charts/pdcluster/files/dashboards/operator.json": "dev.dashboards operator",
    "charts/pdcluster/files/dashboards/pdcluster.json": "dev.dashboards pdcluster",
    "crds/pdcluster.dev_pdclusters.yaml": "pdcluster_operator.api.schema.crd",
    "charts/pdcluster/files/pdcluster.dev_prefillscalers.yaml": (
        "pdcluster_operator.api.schema.scaler_crd"
    ),
    "crds/pdcluster.dev_prefillscalers.yaml": "pdcluster_operator.api.schema.scaler_crd",
    "docs/api.md": "dev.api_page",
    "docs/cli-reference.md": "dev.cli_page",
    "docs/cli-v1.schema.json": "dev.cli_schema",
    "docs/layouts.md": "dev.layouts_page",
    "docs/map.md": "dev.map_page",
    **{
        f"docs/pictures/{name}.svg": f"dev.concept_pictures {name}"
        for name in ("request", "link", "lease")
    },
    "docs/reasons.md": "dev.reasons_page",
    "docs/rules.md": "dev.rules_page",
    "docs/troubleshooting.md": "dev.troubleshooting_page",
    "operator/src/pdcluster_operator/api/spec/pod_fields.txt": "dev.pod_fields",
}


def main() -> int:
    check = "--check" in sys.argv[1:]
    stale = []
    for name, module in FILES.items():
        text = subprocess.run(
            [sys.executable, "-m", *module.split()],
            check=True,
            capture_output=True,
            text=True,
            cwd=ROOT,
        ).stdout
        path = ROOT / name
        if check and (not path.exists() or path.read_text() != text):
            stale.append(name)
        elif not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    if stale:
        print(f"out of date: {', '.join(stale)}; run `make generate`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
