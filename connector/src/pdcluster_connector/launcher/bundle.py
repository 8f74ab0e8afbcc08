"""The connector as one file: a zipapp whose bytes depend only on its sources.

``python -m pdcluster_connector.launcher.bundle OUT`` writes OUT and prints its SHA-256. The
operator ships this file to engine pods in a ConfigMap that is named by that hash.
"""

import argparse
import hashlib
import io
import os
import zipfile
from pathlib import Path
from typing import Final

import pdcluster_connector

# A ConfigMap holds 1 MiB, base64 and metadata included.
MAX_BUNDLE: Final = 700 * 1024
# Engines and faults for tests. No engine needs them.
_LEFT_OUT: Final = "testing"
_EPOCH: Final = (1980, 1, 1, 0, 0, 0)
_SHEBANG: Final = b"#!/usr/bin/env python3\n"
_MAIN: Final = b"""\
from pdcluster_connector.launcher.__main__ import run

if __name__ == "__main__":
    run()
"""


class BundleError(RuntimeError):
    """The package cannot be bundled. The message names the cause."""


def build(out: Path, package: Path | None = None) -> str:
    """Write the zipapp to ``out`` and return its SHA-256 in hexadecimal.

    Args:
        out: the file to write; it is replaced in one step.
        package: the folder of ``pdcluster_connector``; by default the folder of this module.

    Raises:
        BundleError: the package is not a folder, or the bundle is too large for a ConfigMap.
    """
    data = bundle_bytes(package or Path(pdcluster_connector.__file__).parent)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    partial.write_bytes(data)
    partial.chmod(0o755)
    partial.replace(out)
    return hashlib.sha256(data).hexdigest()


def bundle_bytes(package: Path) -> bytes:
    """Make the zipapp. The same sources give the same bytes in any folder, at any time."""
    if not package.is_dir():
        raise BundleError(f"{package} is not a folder; bundle from the installed package's sources")
    sources = {
        f"{package.name}/{path.relative_to(package).as_posix()}": path
        for path in package.rglob("*")
        if (path.suffix == ".py" or path.name == "py.typed")
        and path.relative_to(package).parts[0] != _LEFT_OUT
    }
    buffer = io.BytesIO(_SHEBANG)
    buffer.seek(0, os.SEEK_END)
    with zipfile.ZipFile(buffer, "a", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        _add(archive, "__main__.py", _MAIN)
        for name in sorted(sources):
            _add(archive, name, sources[name].read_bytes())
    data = buffer.getvalue()
    if len(data) > MAX_BUNDLE:
        raise BundleError(
            f"the bundle has {len(data)} bytes, but a ConfigMap holds at most {MAX_BUNDLE}"
        )
    return data


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    entry = zipfile.ZipInfo(name, _EPOCH)
    entry.create_system = 3
    entry.external_attr = 0o644 << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(entry, content, compresslevel=9)


def main() -> None:
    """Command line of the module."""
    parser = argparse.ArgumentParser(
        prog="python -m pdcluster_connector.launcher.bundle",
        description="Write the connector and its launcher as one file and print its SHA-256.",
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="the file to write: connector.pyz")
    print(build(parser.parse_args().out))


if __name__ == "__main__":
    main()
