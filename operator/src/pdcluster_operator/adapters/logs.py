"""Log lines for a person or for a machine."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

PLAIN = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up_logs(level: str, form: str) -> None:
    """Send every logger's lines to stderr; ``form`` is json or plain."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter(PLAIN))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # kopf logs every manifest that our webhook refuses.
    logging.getLogger("kopf.objects").setLevel(logging.CRITICAL)
