"""``python3 -m pdcluster_connector.launcher``, for images that hold the connector."""

from __future__ import annotations

from pdcluster_connector.launcher.main import main

if __name__ == "__main__":
    main()
