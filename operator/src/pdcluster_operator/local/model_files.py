"""Looks into a model's folder for files that no engine could load: cut, absent, or pointers.

vLLM finds these faults too, but only after half a minute, at the end of a traceback that seldom
names the file. Of each file of weights only the header is read.
"""

import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from msgspec import json

from pdcluster_connector.compat.findings import counted
from pdcluster_operator.api.findings import shown

MOST_BYTES = 32 << 20
"""Of a file of JSON that is read."""
LONGEST_HEADER = 100_000_000
"""Bytes of the header of a safetensors file, as the format bounds it."""
MOST_SHARDS = 4096
METADATA = "__metadata__"
CONFIG = "config.json"
CONFIGS = frozenset({CONFIG, "params.json"})
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
TOKENIZERS = ("tokenizer", "tokenization", "tekken", "vocab", "spiece", "sentencepiece")
"""Beginnings of the names of a tokenizer's files."""
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
            )
    except OSError as error:
        return Folder(path, f"can't be read by this user ({error.strerror})")
    faults: list[Fault] = []
    config: Mapping[str, Any] = {}
    if not names & CONFIGS:
        faults.append(Fault(Part.CONFIG, "holds no config.json"))
    elif CONFIG in names:
        try:
            config = _document(folder / CONFIG)
        except _BrokenError as broken:
            faults.append(Fault(Part.CONFIG, *broken.args))
    faults += _tokenizer(folder, names)
    if any(name.endswith(WEIGHTS) for name in names):
        faults += _weights(folder, names)
    else:
        faults.append(Fault(Part.WEIGHTS, f"holds no weights (*{', *'.join(WEIGHTS)})"))
    return Folder(path, "", names, tuple(faults), config)


def _tokenizer(folder: Path, names: frozenset[str]) -> Iterator[Fault]:
    tokenizers = sorted(name for name in names if _is_tokenizer(name))
    if not tokenizers:
        yield Fault(
            Part.TOKENIZER,
            "holds no tokenizer (tokenizer.json, tokenizer.model, tekken.json, vocab.*)",
            "Copy the tokenizer's files there too, or name another folder's with --tokenizer in "
            "extraArgs.",
        )
    pointers = (_pointer(folder / name) for name in tokenizers)
    if fault := next(filter(None, pointers), None):
        yield Fault(Part.TOKENIZER, *fault)


def _is_tokenizer(name: str) -> bool:
    return name.startswith(TOKENIZERS) or "tiktoken" in name or name.endswith(".gguf")


def _weights(folder: Path, names: frozenset[str]) -> Iterator[Fault]:
    """Yield the first fault of the files of weights, and how many files have one."""
    index = next((name for name in INDEXES if name in names), None)
    wanted = sorted(name for name in names if name.endswith(".safetensors"))
    if index:
        try:
            shards = _document(folder / index).get("weight_map")
            if not isinstance(shards, Mapping):
                raise _BrokenError(f"holds {index} without a weight_map", AGAIN)
        except _BrokenError as broken:
            yield Fault(Part.WEIGHTS, *broken.args)
            return
        wanted = sorted({str(shard) for shard in shards.values()})
        if lost := [shard for shard in wanted if shard not in names]:
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            yield Fault(
                Part.WEIGHTS,
                f"lacks {shown(lost[0])}{more} of the {counted(len(wanted), 'file')} that {index} "
                "names",
                f"Download the missing {'files' if more else 'file'}.",
            )
            return
    wrong = [fault for name in wanted[:MOST_SHARDS] if (fault := _shard(folder / name))]
    if wrong:
        more = f"; {counted(len(wrong) - 1, 'other file')} too" if len(wrong) > 1 else ""
        yield Fault(Part.WEIGHTS, wrong[0][0] + more, wrong[0][1])


def _shard(file: Path) -> tuple[str, str] | None:
    """Return what is wrong with a file of weights, and what to do; None if nothing is seen.

    A safetensors file is 8 bytes with the length of its header, the header as JSON, and the
    tensors. The last tensor ends with the file.
    """
    if (fault := _pointer(file)) or file.suffix != ".safetensors":
        return fault
    try:
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
    """Return the last byte of the tensors of a header; -1 if it is no list of tensors."""
    try:
        tensors: dict[str, Any] = json.decode(header, type=dict[str, Any])
        ends = [one["data_offsets"][1] for key, one in tensors.items() if key != METADATA]
        return max([0, *map(int, ends)])
    except (ValueError, RecursionError, TypeError, LookupError):
        return -1


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
        return json.decode(data, type=dict[str, Any])
    except (ValueError, RecursionError) as error:
        what = f"holds {file.name}, which is no JSON object ({error})"
        raise _BrokenError(what, AGAIN) from None
