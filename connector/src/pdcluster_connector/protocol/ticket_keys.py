"""The keys that sign tickets: one or two, shared by the prefill and decode engines of a cluster.

Both keys are accepted, and one of them signs. So a key can be replaced while engines run: every
engine accepts the new key before any engine signs with it.
"""

import hmac
import re
from dataclasses import dataclass, field
from typing import Final

KEY_BYTES: Final = 32
MOST_KEY_BYTES: Final = 128
MOST_KEYS: Final = 2
MAX_FILE_BYTES: Final = 1024
# The kubelet brings a changed Secret into a pod within about a minute and a half.
ROTATION_SECONDS: Final = 180.0
MAKE_A_KEY_FILE: Final = "(umask 077 && openssl rand -hex 32 > FILE)"

_PURPOSE: Final = b"pdcluster ticket, format 3"  # the keys may serve other purposes, too
_LINE: Final = re.compile(rb"([0-9a-fA-F]{2}){%d,%d}" % (KEY_BYTES, MOST_KEY_BYTES))


@dataclass(frozen=True, slots=True)
class TicketKeys:
    """Keys that are derived from those of a file. Nothing here prints them.

    Attributes:
        accepted: the keys whose signatures count.
        signing: the one that signs; one of ``accepted``.
    """

    accepted: tuple[bytes, ...] = field(repr=False)
    signing: bytes = field(repr=False)

    def sign(self, body: bytes) -> bytes:
        """Return the HMAC-SHA256 of ``body``, 32 bytes."""
        return hmac.digest(self.signing, body, "sha256")

    def verify(self, body: bytes, signature: bytes) -> bool:
        """Whether an accepted key made ``signature``. The comparison takes constant time."""
        return any(
            hmac.compare_digest(hmac.digest(key, body, "sha256"), signature)
            for key in self.accepted
        )


def parse_keys(raw: bytes, age: float = ROTATION_SECONDS) -> TicketKeys:
    """Return the keys of a key file: one or two lines of hexadecimal digits.

    Args:
        raw: the file's content.
        age: seconds since the file was written. In a file younger than ROTATION_SECONDS the second
            key signs, since other engines may not have read the first one yet.

    Raises:
        ValueError: what is wrong, in words that follow the file's name and hold no key.
    """
    if len(raw) > MAX_FILE_BYTES:
        raise ValueError(f"holds more than {MAX_FILE_BYTES} bytes")
    lines = raw.split()
    if not lines:
        raise ValueError("holds no key")
    if len(lines) > MOST_KEYS:
        raise ValueError(f"holds {len(lines)} keys; {MOST_KEYS} can be valid at a time")
    for number, line in enumerate(lines, 1):
        if len(line) < 2 * KEY_BYTES:
            raise ValueError(
                f"holds a key that is too short in line {number}: {len(line)} characters; a key "
                f"has at least {2 * KEY_BYTES} hexadecimal digits ({KEY_BYTES} bytes)"
            )
        if not _LINE.fullmatch(line):
            raise ValueError(
                f"holds a line {number} that is not {2 * KEY_BYTES} to {2 * MOST_KEY_BYTES} "
                "hexadecimal digits, an even number of them"
            )
    keys = tuple(hmac.digest(bytes.fromhex(line.decode()), _PURPOSE, "sha256") for line in lines)
    return TicketKeys(keys, keys[-1] if age < ROTATION_SECONDS else keys[0])
