"""Looks into a model's folder for files that no engine could load: cut, absent, or pointers.

vLLM finds these faults too, but only after half a minute, at the end of a traceback that seldom
names the file. Of each file of weights only the header is read.
"""

import json
import math
import os
import re
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import filter as matching
from pathlib import Path
from typing import Any

import msgspec

from pdcluster_connector.compat.findings import counted
from pdcluster_operator.api.findings import shown

MOST_BYTES = 64 << 20
"""Of a file of JSON that is read."""
LONGEST_HEADER = 100_000_000
"""Bytes of the header of a safetensors file, as the format bounds it."""
MOST_SHARDS = 4096
CONFIG = "config.json"
CONFIGS = frozenset({CONFIG, "params.json"})
WEIGHTS = {
    "consolidated*.safetensors": "consolidated.safetensors.index.json",
    "*.safetensors": "model.safetensors.index.json",
    **dict.fromkeys(("*.bin", "*.pt", "*.gguf"), ""),
}
"""Files and their index. vLLM 0.32 loads those of the first pattern that a file has."""
NO_WEIGHTS = re.compile(r"adapter_.*|.*(training_args|optimizer|scheduler|scaler)\.(bin|pt)")
PART = re.compile(r"(.*-)\d+(-of-(\d+)\.\w+)")
TOKENIZERS = ("tokenizer", "tokenization", "tekken", "vocab", "spiece", "sentencepiece")
"""Beginnings of the names of a tokenizer's files."""
DOCUMENTS = ("tokenizer.json", "tokenizer_config.json", "tekken.json")
POINTER = b"version https://git-lfs.github.com/spec/"
PULL = "Run `git lfs pull` in the folder, or download the model again."
AGAIN = "Download it again."


class Part(StrEnum):
    """What of a model a file belongs to; flags of vLLM can do without some of them."""

    CONFIG = "config"
    TOKENIZER = "tokenizer"
    WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with one file, as the end of a sentence about the folder, and what to do."""

    part: Part
    what: str
    remedy: str = ""


class _BrokenError(Exception):
    """A file cannot be used; the arguments are what is wrong, and what to do."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A model's folder as it was found.

    Attributes:
        problem: why it can't be read; empty if it can.
        names: of the files in it.
        faults: what is wrong with the files.
        config: what its config.json holds; empty without one.
    """

    path: str
    problem: str
    names: frozenset[str] = frozenset()
    faults: tuple[Fault, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)


def read_folder(path: str) -> Folder:
    """Look into a model's folder."""
    folder = Path(path)
    if not os.path.isdir(path):
        return Folder(path, "is not a folder" if os.path.exists(path) else "does not exist")
    try:
        with os.scandir(path) as entries:  # a link that leads nowhere is a file that is broken
            names = frozenset(
                one.name
                for one in entries
                if one.is_file() or (one.is_symlink() and not os.path.exists(one))
                if not one.name.startswith(".")
            )
    except OSError as error:
        return Folder(path, f"can't be read by this user ({error.strerror})")
    faults: list[Fault] = []
    found: dict[Part, Any] = {}
    for part, look in (
        (Part.CONFIG, _config), (Part.TOKENIZER, _tokenizer), (Part.WEIGHTS, _weights)
    ):  # fmt: skip
        try:
            found[part] = look(folder, names)
        except _BrokenError as broken:
            faults.append(Fault(part, *broken.args))
    return Folder(path, "", names, tuple(faults), found.get(Part.CONFIG, {}))


def _config(folder: Path, names: frozenset[str]) -> Mapping[str, Any]:
    if not names & CONFIGS:
        raise _BrokenError("holds no config.json")
    return _document(folder / CONFIG) if CONFIG in names else {}


def _tokenizer(folder: Path, names: frozenset[str]) -> None:
    tokenizers = sorted(name for name in names if _is_tokenizer(name))
    if not {*tokenizers} - {"tokenizer_config.json"}:
        raise _BrokenError(
            "holds no tokenizer (tokenizer.json, tokenizer.model, tekken.json, vocab.*)",
            "Copy the tokenizer's files there too, or name another folder's with --tokenizer in "
            "extraArgs.",
        )
    for name in tokenizers:
        if name in DOCUMENTS:
            _document(folder / name)
        elif fault := _pointer(folder / name):
            raise _BrokenError(*fault)


def _is_tokenizer(name: str) -> bool:
    return name.startswith(TOKENIZERS) or "tiktoken" in name or name.endswith(".gguf")


def _weights(folder: Path, names: frozenset[str]) -> None:
    """Raise the first fault of the files of weights, and how many files have one."""
    pattern = next((one for one in WEIGHTS if matching(names, one)), "")
    index = WEIGHTS.get(pattern, "")
    wanted = sorted(name for name in matching(names, pattern) if not NO_WEIGHTS.fullmatch(name))
    if not wanted:
        raise _BrokenError(f"holds no weights ({', '.join([*WEIGHTS][1:])})")
    if index in names:
        shards = _document(folder / index).get("weight_map")
        if not isinstance(shards, Mapping):
            raise _BrokenError(f"holds {index} without a weight_map", AGAIN)
        wanted = sorted({str(shard) for shard in shards.values()})
    else:
        parts = Counter(part.groups() for part in map(PART.fullmatch, wanted) if part)
        for (head, tail, count), found in parts.items():
            if found < int(count):
                what = f"holds {found} of the {int(count)} files {head}*{tail}"
                raise _BrokenError(what, "Download the missing files.")
    if lost := [shard for shard in wanted if shard not in names]:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise _BrokenError(
            f"lacks {shown(lost[0])}{more} of the {counted(len(wanted), 'file')} that {index} "
            "names",
            f"Download the missing {'files' if more else 'file'}.",
        )
    wrong = [fault for name in wanted[:MOST_SHARDS] if (fault := _shard(folder / name))]
    if wrong:
        more = f"; {counted(len(wrong) - 1, 'other file')} too" if len(wrong) > 1 else ""
        raise _BrokenError(wrong[0][0] + more, wrong[0][1])


def _shard(file: Path) -> tuple[str, str] | None:
    """Return what is wrong with a file of weights, and what to do; None if nothing is seen.

    A safetensors file is 8 bytes with the length of its header, the header as JSON, and the
    tensors. The last tensor ends with the file.
    """
    if fault := _pointer(file):
        return fault
    try:
        if file.suffix != ".safetensors":
            return None if file.stat().st_size else (f"holds {file.name}, which is empty", AGAIN)
        with file.open("rb") as opened:
            size, first = os.fstat(opened.fileno()).st_size, opened.read(8)
            length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
            header = opened.read(length) if 2 <= length <= min(LONGEST_HEADER, size - 8) else b""
    except OSError as error:
        return _unreadable(file, error)
    what = ""
    if not 2 <= length <= LONGEST_HEADER:
        what = f"which of {size:,} bytes does not begin as a safetensors file does"
    elif not header:
        what = f"which is cut within its header ({size:,} bytes)"
    elif (wanted := 8 + length + _end(header)) < 8 + length:
        what = "whose header is no list of tensors"
    elif wanted != size:
        is_cut = "is cut" if size < wanted else "is no whole safetensors file"
        what = f"which {is_cut}: it has {size:,} of {wanted:,} bytes"
    return (f"holds {file.name}, {what}", AGAIN) if what else None


def _end(header: bytes) -> int:
    """Return the last byte of the tensors of a header; -1 if it is no list without gaps."""
    try:
        tensors = msgspec.json.decode(header, type=dict[str, Any])
        tensors.pop("__metadata__", None)
        rows = [(one["data_offsets"], one["shape"], one["dtype"]) for one in tensors.values()]
        end = 0
        for (begin, stop), shape, dtype in sorted(
            msgspec.convert(rows, list[tuple[tuple[int, int], list[int], str]])
        ):
            bits = int((re.findall(r"\d+", dtype) or [8])[0])  # BOOL and F8_E4M3 have 8
            if begin != end or math.prod(shape) * bits != 8 * (stop - begin):
                return -1
            end = stop
    except (ValueError, RecursionError, TypeError, LookupError):
        return -1
    return end


def _pointer(file: Path) -> tuple[str, str] | None:
    """Return that a file is only Git LFS's pointer to it, or cannot be read."""
    try:
        with file.open("rb") as opened:
            is_pointer = opened.read(len(POINTER)) == POINTER
    except OSError as error:
        return _unreadable(file, error)
    what = f"holds {file.name} as a pointer of Git LFS, without the file's content"
    return (what, PULL) if is_pointer else None


def _unreadable(file: Path, error: OSError) -> tuple[str, str]:
    if file.is_symlink() and not file.exists():
        what = f"holds {file.name} as a link to {shown(os.readlink(file))}, which is not there"
        return what, "Copy the file itself there, or mount the folder that the link leads to."
    return f"holds {file.name}, which can't be read ({error.strerror})", "Change its permissions."


def _document(file: Path) -> Mapping[str, Any]:
    """Read a file of JSON; raises :class:`_BrokenError`."""
    if fault := _pointer(file):
        raise _BrokenError(*fault)
    try:
        with file.open("rb") as opened:
            data = opened.read(MOST_BYTES + 1)
    except OSError as error:
        raise _BrokenError(*_unreadable(file, error)) from None
    if len(data) > MOST_BYTES:
        raise _BrokenError(f"holds {file.name} of more than {MOST_BYTES >> 20} MiB", AGAIN)
    try:
        found = json.loads(data.decode())  # as transformers does: Infinity is a number to it
        return msgspec.convert(found, dict[str, Any])
    except (ValueError, RecursionError) as error:
        what = f"holds {file.name}, which is no JSON object ({error})"
        raise _BrokenError(what, AGAIN) from None
