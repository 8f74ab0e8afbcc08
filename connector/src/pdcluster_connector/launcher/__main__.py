"""``python3 -m pdcluster_connector.launcher``, for images that hold the connector."""

from __future__ import annotations

from pdcluster_connector.launcher.early_stop import end_when_told

if __name__ == "__main__":
    end_when_told()

    # Imported late: a SIGTERM is heeded from here on.
    from pdcluster_connector.launcher.main import main

    main()
