"""Downloads a model into a cache of the Hugging Face Hub: the program of a download Job.

``python3 -m pdcluster_connector.launcher.hub_download REPOSITORY [--revision REVISION]``

``HF_HOME`` names the cache. Engines that share it find the model there without the Hub. After an
interruption, files that were complete are not asked for again; huggingface_hub 2.4 begins the
others anew. A mark is written last, with the size of each file. While these files are there, the
next run ends at once and asks nobody.

The last line says in one sentence what went wrong. The exit code is 1 if another attempt may help,
2 if it cannot.
"""

import argparse
import errno
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

MARKS: Final = ".pdcluster"
"""Folder of the marks in the cache."""
NEVER_READ: Final = ("original/*", "metal/*", "*.onnx", "*.onnx_data", "*.msgpack", "*.h5", "*.ot")
"""Weights that vLLM does not load."""
BESIDE_SAFETENSORS: Final = ("pytorch_model*", "*.pth", "*.gguf")
"""Weights that vLLM does not load if the repository has safetensors, too."""
TOLD_EVERY_SECONDS: Final = 30.0
LONGEST_SENTENCE: Final = 500
TERMINATION_LOG: Final = "/dev/termination-log"
LEFT_SECONDS: Final = 900.0
"""For so long nothing was written to a part of a file before it counts as left."""
AGAIN, HOPELESS = 1, 2


class _DownloadError(Exception):
    """The arguments are a sentence, and the exit code."""


def wanted_files(files: Mapping[str, int]) -> dict[str, int]:
    """Return the files of a repository that vLLM may read, with their sizes in bytes."""
    # vLLM looks for weights in the first folder only. An adapter is no weights.
    safetensors = any(fnmatch(name, "*.safetensors") for name in files if _is_weights(name))
    unread = (*NEVER_READ, *(BESIDE_SAFETENSORS if safetensors else ()))
    return {
        name: size
        for name, size in files.items()
        if not any(fnmatch(name, pattern) for pattern in unread)
    }


def _is_weights(name: str) -> bool:
    return "/" not in name and not name.startswith("adapter_")


def are_there(folder: Path, files: Mapping[str, int]) -> bool:
    """Whether a folder holds these files in these sizes."""
    return bool(files) and all(_size(folder / name) == size for name, size in files.items())


def _size(path: Path) -> int:
    """Return the size of a file in bytes; -1 without one."""
    try:
        return path.stat().st_size
    except OSError:
        return -1


def download(repo: str, revision: str | None, cache: Path) -> str:
    """Download a model; return what was done, as a sentence.

    Args:
        cache: the folder that ``HF_HUB_CACHE`` names in engines.

    Raises:
        _DownloadError: it did not succeed.
    """
    from huggingface_hub import HfApi, errors, snapshot_download  # slow to import

    home = cache / f"models--{repo.replace('/', '--')}"
    mark = cache / MARKS / f"{repo}/{revision or 'main'}".replace("/", "--")
    known = _read_mark(mark)
    snapshot = home / "snapshots" / str(known.get("commit"))
    if are_there(snapshot, known.get("files") or {}):
        return f"{repo} is in the cache already, as commit {snapshot.name}"
    of = f"{repo}, revision {revision}," if revision else repo
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        found = HfApi().model_info(repo, revision=revision, files_metadata=True)
        files = wanted_files({one.rfilename: one.size or 0 for one in found.siblings or ()})
        print(f"downloading {len(files)} files, {_gb(sum(files.values()))}, of {of}", flush=True)
        _remove_leftovers(home / "blobs")
        _check_space(home / "blobs", files)
        with _Progress(home / "blobs", sum(files.values())):
            folder = snapshot_download(
                repo, revision=revision, cache_dir=cache, allow_patterns=[*map(_escaped, files)]
            )
        _write_mark(mark, {"commit": Path(folder).name, "files": _sizes(Path(folder), files)})
    except (errors.GatedRepoError, errors.RepositoryNotFoundError) as error:
        status = error.response.status_code
        what = f"the Hub does not give out {repo} (HTTP {status}): there is no such model, or the"
        raise _DownloadError(f"{what} token may not read it", HOPELESS) from None
    except errors.RevisionNotFoundError:
        raise _DownloadError(f"the Hub has no revision {revision} of {repo}", HOPELESS) from None
    except errors.HFValidationError as error:
        raise _DownloadError(f"{repo} is no name of a model: {error}", HOPELESS) from None
    except _DownloadError:
        raise
    except Exception as error:  # each transport of the library has errors of its own
        raise _DownloadError(_why(error, cache), AGAIN) from error
    return f"downloaded {of} as commit {Path(folder).name}"


def _why(error: Exception, cache: Path) -> str:
    """Return why a download stopped, in one sentence without secrets."""
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        who = f"user {os.getuid()} and group {os.getgid()}"
        return f"{who} may not write to {cache} ({os.strerror(number)})"
    if number in (errno.ENOSPC, errno.EDQUOT):
        return f"{cache} is full ({_gb(shutil.disk_usage(cache).free)} free)"
    text = re.sub(r"\?\S+", "", f"{type(error).__name__}: {error}".partition("\n")[0])
    return f"the download from the Hub stopped: {text[:LONGEST_SENTENCE]}"


def _check_space(blobs: Path, files: Mapping[str, int]) -> None:
    """Refuse what certainly has no room.

    What another commit or another Job has brought counts as there. If it is something else, the
    disk is full in the end, and that is told as well.
    """
    lacks = sum(files.values()) - _have(blobs)
    free = shutil.disk_usage(blobs.parents[1]).free
    if lacks > free:
        words = f"{_gb(lacks)} are still to be downloaded, and {blobs.parents[1]} has"
        raise _DownloadError(f"{words} {_gb(free)} free", AGAIN)


def _have(blobs: Path) -> int:
    """Return the bytes of a repository in the cache, parts of files too."""
    return sum(max(_size(one), 0) for one in blobs.glob("*"))


def _remove_leftovers(blobs: Path) -> None:
    """Remove parts of files that a killed process has left, and that nobody takes up again."""
    for part in blobs.glob("*.incomplete"):
        with suppress(OSError):  # another process may be done with it
            if time.time() - part.stat().st_mtime > LEFT_SECONDS:
                part.unlink()


def _escaped(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


def _sizes(folder: Path, files: Iterable[str]) -> dict[str, int]:
    return {name: _size(folder / name) for name in files}


def _read_mark(mark: Path) -> dict[str, Any]:
    try:
        found = json.loads(mark.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_mark(mark: Path, content: Mapping[str, Any]) -> None:
    """Write the mark so that a crash leaves it whole or absent; another Job may write it, too."""
    with tempfile.NamedTemporaryFile("w", dir=mark.parent, delete=False) as opened:
        json.dump(content, opened)
        opened.flush()
        os.fsync(opened.fileno())
    Path(opened.name).replace(mark)


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


class _Progress:
    """Prints now and then how much has come."""

    def __init__(self, blobs: Path, whole: int) -> None:
        self._blobs, self._whole, self._done = blobs, whole, threading.Event()
        self._thread = threading.Thread(target=self._tell, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _tell(self) -> None:
        while not self._done.wait(TOLD_EVERY_SECONDS):
            print(f"{_gb(_have(self._blobs))} of {_gb(self._whole)}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code."""
    # Process 1 of a container ignores SIGTERM, and threads would keep it. Nothing is lost.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(prog="hub_download", description=__doc__.partition("\n")[0])
    parser.add_argument("repo")
    parser.add_argument("--revision")
    given = parser.parse_args(arguments)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    cache = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser() / "hub"
    try:
        print(download(given.repo, given.revision, cache), flush=True)
    except _DownloadError as error:
        sentence, code = error.args
        print(sentence, file=sys.stderr, flush=True)
        if os.access(TERMINATION_LOG, os.W_OK):
            Path(TERMINATION_LOG).write_text(sentence)
        return int(code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
