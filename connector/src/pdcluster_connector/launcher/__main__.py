"""``python3 -m pdcluster_connector.launcher``, for images that hold the connector.

In a pod the launcher is process 1, and the kernel drops a SIGTERM that process 1 does not handle.
Importing the launcher takes up to seconds on a loaded node, and a pod that is deleted meanwhile
would wait for its whole grace period. So this module imports as little as possible and handles the
signals first. The supervisor replaces its handlers before it starts the engine.
"""

import os
import signal
from types import FrameType


def run() -> None:
    """Run the launcher. Exits with the engine's code."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)

    # Imported late: signals are handled from here on.
    from pdcluster_connector.launcher.main import main

    main()


def _end(number: int, _: FrameType | None) -> None:
    """Exit with 128 plus the signal's number."""
    # Not by an exception: an import that is under way could swallow it.
    name = signal.Signals(number).name
    try:
        os.write(2, f"pdcluster: {name}: told to stop before the engine was started\n".encode())
    finally:
        os._exit(128 + number)


if __name__ == "__main__":
    run()
