"""The chart's files that need no helm: the CRD, the values' schema, what the test pod runs."""

from __future__ import annotations

import http.server
import importlib.util
import itertools
import json
import re
import threading
import types

import jsonschema
import pytest
import yaml
from chart_helm import CHART

from pdcluster_operator.api.object_names import GROUP, PLURAL, SCALER_PLURAL
from pdcluster_operator.api.rules.validate import check_manifest

REPOSITORY = CHART.parent.parent
SAMPLES = CHART / "files" / "samples"
RULE = "PrefixCachingHeterogeneousBlocks"


@pytest.mark.parametrize("plural", [PLURAL, SCALER_PLURAL])
def test_crd_is_the_generated_one(plural):
    name = f"{GROUP}_{plural}.yaml"
    ours = (CHART / "files" / name).read_text()
    assert ours == (REPOSITORY / "crds" / name).read_text(), "run `make generate`"


def values() -> dict:
    return yaml.safe_load((CHART / "values.yaml").read_text())


def schema() -> dict:
    return json.loads((CHART / "values.schema.json").read_text())


def resolve(part: dict) -> dict:
    if "$ref" in part:
        return resolve(schema()["$defs"][part["$ref"].rpartition("/")[2]])
    return part


def test_default_values_fit_the_schema():
    jsonschema.Draft7Validator.check_schema(schema())
    jsonschema.validate(values(), schema())


def test_schema_and_values_name_the_same_fields():
    def compare(part: dict, value: dict, path: str) -> None:
        part = resolve(part)
        if path.rpartition(".")[2] in ("requests", "limits"):
            return  # any resource may be named
        assert part["additionalProperties"] is False, path
        # `resources` has parts that the defaults need not have; `global` is helm's own.
        unset = {"claims", "global", "requests", "limits"}
        assert set(part["properties"]) - unset == set(value) - unset, path
        for name, inner in value.items():
            if isinstance(inner, dict) and "properties" in resolve(part["properties"][name]):
                compare(part["properties"][name], inner, f"{path}.{name}")

    compare(schema(), values(), "values")


@pytest.mark.parametrize("name", ["good", "bad", "malformed"])
def test_samples_are_judged_as_the_check_expects(name):
    manifest = json.loads((SAMPLES / f"{name}.json").read_text())
    manifest["metadata"]["namespace"] = "default"
    _, findings = check_manifest(manifest)
    rules = {str(error.rule) for error in findings.errors}
    assert rules == {"good": set(), "bad": {RULE}, "malformed": {"ExactlyOne"}}[name]


def test_notes_name_examples_that_are_there_and_what_a_default_installation_admits():
    notes = (CHART / "templates" / "NOTES.txt").read_text()
    named = set(re.findall(r"examples/(\S+\.yaml)", notes))
    admitted = set()
    for name in named:
        manifest = yaml.safe_load((REPOSITORY / "examples" / name).read_text())
        manifest["metadata"]["namespace"] = "default"
        _, findings = check_manifest(manifest, host_paths=False)
        if not findings.errors:
            admitted.add(name)
    # The notes name one example that is refused, together with the value that admits it.
    assert named - admitted == {"tiny-cpu.yaml"}
    assert "operator.allowHostPathModels=true" in notes
    applied = set(re.findall(r"kubectl (?:apply|wait).*examples/(\S+\.yaml)", notes))
    assert applied
    assert applied <= admitted


class Admission(http.server.BaseHTTPRequestHandler):
    """An API server that answers creates from a list: (code, message)."""

    answers: list[tuple[int, str]]
    seen: list[str]

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.seen.append(f"{self.path} {json.loads(body)['metadata']['name']}")
        code, message = self.answers.pop(0)
        data = json.dumps({"message": message}).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def script(monkeypatch, tmp_path):
    """Call the program of the check against a list of answers; its exit code and its requests."""
    path = CHART / "files" / "admission_check.py"
    spec = importlib.util.spec_from_file_location("admission_check_script", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "token").write_text("secret")
    monkeypatch.setattr(module, "ACCOUNT", tmp_path)
    monkeypatch.setattr(module, "SAMPLES", SAMPLES)
    monkeypatch.setattr(module.ssl, "create_default_context", lambda cafile: None)
    # Every look at the clock, and every sleep, is one second.
    clock = itertools.count()
    timing = types.SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _: next(clock))
    monkeypatch.setattr(module, "time", timing)

    def run(answers: list[tuple[int, str]], *mode: str) -> tuple[int, list[str]]:
        handler = type("Handler", (Admission,), {"answers": answers, "seen": []})
        server = http.server.HTTPServer(("127.0.0.1", 0), handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setattr(module, "SERVER", f"http://127.0.0.1:{server.server_port}")
        words = ["admission_check.py", mode[0], "team", RULE, *mode[1:]]
        monkeypatch.setattr(module.sys, "argv", words)
        try:
            return module.main(), handler.seen
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    return run


GOOD, BAD = (201, ""), (422, f"refused by {RULE}: …")
NOT_YET = (500, "failed calling webhook: connection refused")
# One line for the API server: what it says at first, and what that must not be taken for.
STARTING = [(404, "no such kind"), (403, "may not create"), NOT_YET, GOOD, (422, "another rule")]


@pytest.mark.parametrize(
    ("answers", "code"),
    [
        ([GOOD, BAD], 0),
        ([(500, "no endpoints available"), GOOD, BAD], 0),
        ([GOOD, GOOD], 1),
        ([GOOD, (422, "refused by another rule")], 1),
        ([(403, "may not create"), BAD], 1),
        ([(404, "no such kind"), BAD], 1),
    ],
)
def test_the_test_pod_believes_only_a_refusal_by_name(script, answers, code):
    result, seen = script(answers, "test")
    assert result == code
    path = f"/apis/{GROUP}/v1alpha1/namespaces/team/{PLURAL}?dryRun=All admission-test"
    assert set(seen) == {path}


def test_the_startup_check_waits_until_refusals_by_name_come_in_a_row(script, capsys):
    answers = [*STARTING, BAD, BAD, NOT_YET, BAD, BAD, BAD, (418, "never asked for")]
    result, seen = script(answers, "wait", "1000")
    assert result == 0
    assert answers == [(418, "never asked for")]
    assert {one.rpartition(" ")[2] for one in seen} == {"admission-test"}
    said = capsys.readouterr().out
    assert all(message in said for _, message in STARTING[:3])
    assert "the webhook answers" in said


@pytest.mark.parametrize("answer", STARTING)
def test_the_startup_check_ends_in_time_and_says_what_it_saw(script, capsys, answer):
    result, seen = script([answer] * 1000, "wait", "20")
    assert result == 1
    assert 2 < len(seen) < 20
    said = capsys.readouterr().out
    assert said.count("waiting: ") == 1, "the same answer is told once"
    assert (answer[1] or "admitted") in said
    assert "webhook.startupCheck.enabled=false" in said
