"""Find faults of files that no linter of Python sees: `python dev/file_hygiene.py [FILE …]`.

A file of more than 500 kB, the marks of an unresolved merge, YAML and TOML that cannot be read,
blanks at the end of a line, a last line without an end, and the line ends of Windows. Without
arguments it looks at every file that git tracks, which takes a second.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import yaml

LARGEST_BYTES = 500_000
MERGE_MARK = re.compile(rb"^(<<<<<<<|\|\|\|\|\|\|\||>>>>>>>) ", re.MULTILINE)
BLANK_AT_THE_END = re.compile(rb"[ \t]+$", re.MULTILINE)
# Recorded logs and drawings are as their programs wrote them.
WRITTEN_BY_PROGRAMS = {".log", ".svg"}
# A template of helm becomes YAML only when the chart is rendered.
TEMPLATES = re.compile(r"charts/\w+/templates/")


def faults(path: Path) -> Iterator[str]:
    """Yield each fault of a file, with its line where it has one."""
    data = path.read_bytes()
    if len(data) > LARGEST_BYTES:
        yield f"{len(data):,} bytes, more than {LARGEST_BYTES:,}: keep large files out of git"
    if b"\0" in data:  # no text
        return
    if found := MERGE_MARK.search(data):
        yield f"line {_line(data, found)}: the mark of a merge that is not resolved"
    if path.suffix not in WRITTEN_BY_PROGRAMS:
        yield from _ends_of_lines(data)
    try:
        _read(path, data)
    except (yaml.YAMLError, tomllib.TOMLDecodeError) as error:
        yield " ".join(str(error).split())


def _ends_of_lines(data: bytes) -> Iterator[str]:
    if found := BLANK_AT_THE_END.search(data):
        yield f"line {_line(data, found)}: blanks at the end"
    if b"\r\n" in data:
        yield "line ends of Windows"
    if data and not data.endswith(b"\n"):
        yield "the last line has no end"


def _read(path: Path, data: bytes) -> None:
    if path.suffix in {".yaml", ".yml"} and not TEMPLATES.search(path.as_posix()):
        list(yaml.parse(data, Loader=yaml.CSafeLoader))
    elif path.suffix == ".toml":
        tomllib.loads(data.decode())


def _line(data: bytes, found: re.Match[bytes]) -> int:
    return data.count(b"\n", 0, found.start()) + 1


def tracked() -> list[Path]:
    """Return every file that git tracks and that is there."""
    listed = subprocess.run(["git", "ls-files", "-z"], capture_output=True, check=True, text=True)
    return [path for name in listed.stdout.split("\0") if name and (path := Path(name)).is_file()]


def main() -> None:
    files = [Path(name) for name in sys.argv[1:]] or tracked()
    found = [f"{path}: {fault}" for path in files if path.is_file() for fault in faults(path)]
    print("\n".join(found), end="\n" if found else "")
    raise SystemExit(1 if found else 0)


if __name__ == "__main__":
    main()
