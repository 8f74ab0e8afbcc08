"""``python -m fuzz TARGET [--seconds N]``: fuzz one parser, guided by coverage.

The fuzzer is installed into the cache folder at its first use, apart from the environment. An input
that makes a parser raise is printed, and the exit code is not 0. ``--keep`` adds the inputs that
reached new code to the corpus.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from hashlib import sha1
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The last release for Python 3.11; from 3.12 on there is a newer one.
ATHERIS = "atheris==2.3.0" if sys.version_info < (3, 12) else "atheris==3.1.0"
MOST_BYTES = 2048
SECONDS_AN_INPUT = 10


def fuzzer_folder() -> Path:
    """Return the folder that the fuzzer is installed in."""
    uv = subprocess.run(
        [sys.executable, str(ROOT / "dev" / "environment.py"), "--print-uv"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    folder = Path(uv).parents[2] / f"{ATHERIS.replace('==', '-')}-py{sys.version_info[1]}"
    if not (folder / "atheris").is_dir():
        command = [uv, "pip", "install", "--quiet", "--python", sys.executable]
        command += ["--only-binary", ":all:", "--target", str(folder), ATHERIS]
        subprocess.run(command, check=True)
    return folder


def fuzz(target: str, seconds: int, folder: Path) -> None:
    """Run the fuzzer until it finds something or the time is over; does not return."""
    sys.path.insert(0, str(fuzzer_folder()))
    import atheris

    with atheris.instrument_imports(include=["pdcluster_connector", "pdcluster_operator"]):
        from fuzz import corpus_files
        from fuzz.targets import TARGETS
    for raw in corpus_files.read(target):
        (folder / sha1(raw).hexdigest()).write_bytes(raw)
    options = [f"-max_total_time={seconds}", f"-max_len={MOST_BYTES}", "-print_final_stats=1"]
    options += [f"-timeout={SECONDS_AN_INPUT}", "-rss_limit_mb=2048", "-verbosity=1"]
    options += [f"-artifact_prefix={tempfile.gettempdir()}/fuzz-{target}-"]
    atheris.Setup([sys.argv[0], *options, str(folder)], TARGETS[target])
    atheris.Fuzz()


def main() -> int:
    """Fuzz in a child process: the fuzzer ends its own."""
    arguments = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    arguments.add_argument("target")
    arguments.add_argument("--seconds", type=int, default=600)
    arguments.add_argument("--keep", action="store_true")
    arguments.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.inside:
        fuzz(options.target, options.seconds, options.inside)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fuzz", options.target]
        command += ["--seconds", str(options.seconds), "--inside", folder]
        code = subprocess.run(command, check=False).returncode
        if options.keep:
            from fuzz import corpus_files

            found = [file.read_bytes() for file in Path(folder).iterdir()]
            corpus_files.write(options.target, found)
    return code


if __name__ == "__main__":
    sys.exit(main())
