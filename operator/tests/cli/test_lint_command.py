"""Golden outputs of ``pdcluster lint``. PDCLUSTER_GOLDEN=write makes them anew."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from pdcluster_operator.cli import lint, manifests, output, plan_view
from pdcluster_operator.cli.main import COMMANDS, main

GOLDEN = Path(__file__).with_name("golden")


@pytest.fixture(autouse=True)
def _in_golden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(GOLDEN)


@pytest.mark.parametrize(("name", "code"), [("five-mistakes", 1), ("warnings", 0)])
def test_golden_output(name: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", f"{name}.yaml"]) == code
    printed = capsys.readouterr().out
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("PDCLUSTER_GOLDEN") == "write":
        golden.write_text(printed)
    assert printed == golden.read_text()


def test_every_error_names_path_value_rule_and_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    main(["lint", "five-mistakes.yaml"])
    printed = capsys.readouterr().out
    blocks = printed.split("  error   ")[1:]
    assert len(blocks) >= 5
    for block in blocks:
        path, what, remedy = block.splitlines()[:3]
        assert re.match(r"five-mistakes.yaml:\d+: [a-zA-Z.\[\]0-9]+", path)
        assert re.search(r"\[[A-Z]\w+\]$", what)
        assert remedy.strip()[-1] in ".?"
    for value in ("Tiny_Bad", "models/tiny", "-1", "--kv-transfer-config {}", "prefill 16"):
        assert value in printed


def test_several_files_and_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = tmp_path / "both.yaml"
    good = (GOLDEN / "warnings.yaml").read_text()
    service = "apiVersion: v1\nkind: Service\nmetadata: {name: s}\n"
    both.write_text(f"{good}---\n{service}---\n{(GOLDEN / 'five-mistakes.yaml').read_text()}")
    assert main(["lint", "warnings.yaml", str(both)]) == 1
    printed = capsys.readouterr().out
    assert printed.count("warnings.yaml (warned)") == 1
    assert f"{both} (warned)" in printed
    assert f"{both}, document 3 (Tiny_Bad)" in printed
    assert printed.count("(Tiny_Bad)") == 1
    assert printed.splitlines()[-1] == "skipped 1 object of other kinds: Service s"


def objects(*kinds: str) -> str:
    return "---\n".join(
        f"apiVersion: v1\nkind: {kind}\nmetadata: {{name: {number}-x}}\n"
        for number, kind in enumerate(kinds)
    )


def test_a_folder_is_searched_for_yaml(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = (GOLDEN / "warnings.yaml").read_text()
    for name in ("b/c/two.yml", "a.yaml", ".git/hidden.yaml", "b/notes.txt"):
        (file := tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        file.write_text(good)
    assert main(["lint", str(tmp_path), "-o", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [one["file"] for one in report["checked"]] == [
        str(tmp_path / "a.yaml"), str(tmp_path / "b/c/two.yml"),
    ]  # fmt: skip
    os.mkfifo(tmp_path / "b/pipe.yaml")
    (tmp_path / "b/link.yaml").symlink_to("none")
    assert main(["lint", str(tmp_path)]) == 1
    assert "b/link.yaml cannot be read: No such file" in capsys.readouterr().out
    (tmp_path / "b/link.yaml").unlink()
    (tmp_path / "b/template.yaml").write_text("a: {{ .Values.a }}\n  b: [\n")
    assert main(["lint", str(tmp_path)]) == 1
    assert "template.yaml is not YAML" in (said := capsys.readouterr().out)
    assert "render templates first" in said
    monkeypatch.setattr(manifests, "MAX_FILES", 2)
    assert main(["lint", str(tmp_path)]) == 1
    assert "holds more than 2 files with YAML; name a folder below it" in capsys.readouterr().out
    (empty := tmp_path / "empty").mkdir()
    assert main(["lint", str(empty)]) == 1
    assert capsys.readouterr().out == f"{empty} holds no file that ends with .yaml or .yml\n"


SCALER_HEAD = (
    "apiVersion: pdcluster.dev/v1alpha1\nkind: PrefillScaler\nmetadata: {name: s, namespace: a}\n"
)
SCALER = f"{SCALER_HEAD}spec: {{}}\n"


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        (objects(*["Service"] * 7), 1, "there is no PDCluster in -, so nothing was checked"),
        (objects(*["Service"] * 7), 1, "Service 4-x and 2 more"),
        (objects(*["Service"] * 7), 1, "skipped 7 objects of other kinds: Service 0-x, "),
        (
            "kind: PDClsuter\napiVersion: pdcluster.dev/v1alpha1\n",
            1,
            "must be PDCluster [NotAllowed]",
        ),
        ("kind: PdCluster\n", 1, "-:1: kind = PdCluster"),
        ("kind: PdCluster\n", 1, "-:1: apiVersion\n          is missing [Required]"),
        ("kind: PdCluster\n", 1, "Write apiVersion: pdcluster.dev/v1alpha1."),
        ("apiVersion: v1\nkind: PDClusters\n", 1, "-:2: kind = PDClusters"),
        ("apiVersion: v1\nkind: PDClusters\n", 1, "Write kind: PDCluster."),
        ("apiVersion: pdcluster.dev/v1beta1\nkind: PDCluster\n", 1, "-:1: apiVersion = pdclu"),
        (SCALER, 0, "- (s): no errors"),
        (f"{SCALER_HEAD}spec: {{replicas: 9, minPercentOfDecode: 50}}\n", 0, "no errors"),
        (SCALER.replace("spec: {}", ""), 1, "Give spec: {}, or a number in spec.replicas."),
        (f"{SCALER_HEAD}spec: {{replicsa: 2}}\n", 1, "-:4: spec.replicsa"),
        (f"{SCALER_HEAD}spec: {{replicsa: 2}}\n", 1, "Did you mean replicas?"),
        (f"{SCALER_HEAD}spec: {{replicas: '2'}}\n", 1, "Leave out the quotes."),
        (f"{SCALER_HEAD}spec: {{replicas: -1}}\n", 1, "must be between 0 and 1000 [OutOfRange]"),
        (
            f"{SCALER_HEAD}spec: {{minPercentOfDecode: 9, maxPercentOfDecode: 8}}\n",
            1,
            "[MinAboveMax]",
        ),
        (SCALER.replace("v1alpha1", "v1"), 1, "Write apiVersion: pdcluster.dev/v1alpha1."),
        (SCALER.replace("name: s", "name: S_"), 1, "metadata.name = S_"),
    ],
)
def test_what_is_no_cluster_is_named(
    text: str,
    code: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert main(["lint", "-"]) == code
    assert says in capsys.readouterr().out


def test_a_scaler_has_the_name_of_a_cluster_that_is_checked_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "no PDCluster that is checked with it has this name"
    for name, clusters, warned in (
        ("warned", "warned", False), ("warnd", "warned", True), ("other", None, False),
    ):  # fmt: skip
        (file := tmp_path / f"{name}.yaml").write_text(
            SCALER.replace("name: s, namespace: a", f"name: {name}")
        )
        beside = [str(GOLDEN / "warnings.yaml")] if clusters else []
        assert main(["lint", *beside, str(file)]) == 0
        text = capsys.readouterr().out
        assert (said in text, "Did you mean warned?" in text) == (warned, warned), name


# As `kubectl annotate --local -o json` of version 1.32 answers.
KUBECTL: list[tuple[str, object]] = [
    ("1e3 1E3 1e+3 1.e3 +1e3 1_0e2 1000.0 1_000 1__000", 1000),
    ("017 0o17 0O17 +017 0xF 0X0f 0b1111 1_5 0_17 15.", 15),
    ("-017 -0o17 -0xf -0b1111", -15),
    ("08 8. 8.0 0.8e1", 8),
    (".5 +.5 5e-1 .5_0", 0.5),
    ("1e21 1E+21", 1e21),
    ("0777777777777777777777777", 7.777777777777778e23),
    ("yes Yes YES y Y on ON true True", True),
    ("no No NO n N off OFF false FALSE", False),
    ("~ null Null NULL", None),
    *((text, text) for text in (
        "2026-12-31", "2026-02-30", "2026-12-31T12:30:00Z", "12:30:00", "1:30", "190:20:30.15", "=",
        "1e", "1e400", "-1e400", "0o8", "0xG", "0b2", "0x", "_1", "tRUE", "nULL", "inf", "nan",
        "1.7.0", "1e3x", "1,000", ".", "-.", "+", ".e1", "e3", "1p3", "0x1.8p3",
    )),
]  # fmt: skip


@pytest.mark.parametrize(("texts", "value"), KUBECTL)
def test_a_scalar_is_what_kubectl_takes_it_for(tmp_path: Path, texts: str, value: object) -> None:
    (file := tmp_path / "x.yaml").write_text("".join(f"- {text}\n" for text in texts.split()))
    [document] = manifests.read_documents(str(file))
    for text, found in zip(texts.split(), document.body, strict=True):
        assert (type(found), found) == (type(value), value), text


def test_a_value_is_shown_as_it_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = (GOLDEN / "warnings.yaml").read_text()
    texts = ("010", "1.10", "1e3", "yes")
    env = ", ".join(f"{{name: A{place}, value: {text}}}" for place, text in enumerate(texts))
    (file := tmp_path / "x.yaml").write_text(
        f"{good}  prefill: {{replicas: 0o20000, engine: {{env: [{env}]}}}}\n"
    )
    assert main(["lint", str(file)]) == 1
    printed = capsys.readouterr().out
    for place, text in enumerate(texts):
        assert f"spec.prefill.engine.env[{place}].value = {text}\n" in printed
    assert "spec.prefill.replicas = 0o20000\n" in printed


@pytest.mark.parametrize("kind", ["List", "PDClusterList"])
def test_a_list_of_kubectl_is_its_items(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = yaml.safe_load((GOLDEN / "warnings.yaml").read_text())
    items = [cluster, {"kind": "Service", "metadata": 3}, "x"]
    text = f"kind: Config\n---\n{json.dumps({'kind': kind, 'items': items})}"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert main(["lint", "-", "-o", "yaml"]) == 1
    report = yaml.safe_load(capsys.readouterr().out)
    assert [(one["document"], one["name"]) for one in report["checked"]] == [(2, "warned"), (2, "")]
    assert [(one["kind"], one["name"]) for one in report["skipped"]] == [
        ("Config", ""), ("Service", ""),
    ]  # fmt: skip


def test_the_document_has_what_the_text_has(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["lint", "warnings.yaml", "five-mistakes.yaml", "none.yaml"]
    assert main(words) == 1
    text = capsys.readouterr().out
    assert main([*words, "-o", "json"]) == 1
    report = json.loads(capsys.readouterr().out)
    jsonschema.validate(report, output.schema(lint.Lint))
    assert (report["ok"], report["problems"]) == (
        False, ["none.yaml cannot be read: No such file or directory"],
    )  # fmt: skip
    assert [(one["name"], one["errors"], one["warnings"]) for one in report["checked"]] == [
        ("warned", 0, 5), ("Tiny_Bad", 6, 2),
    ]  # fmt: skip
    assert len(report["findings"]) == 13
    for one in report["findings"]:
        value = f" = {one['value']}" if one["value"] else ""
        where = f"{one['file']}:{one['line']}: "
        assert f"  {one['severity'].lower():8}{where}{one['path']}{value}\n" in text
        assert f"{'':10}{one['message']} [{one['rule']}]\n" in text
        assert one["remedy"] in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read: No such file"),
        ("", "is empty"),
        ("a: [1,", "is not YAML: line"),
        ("a: b: c", "line 1, column 5"),
        ("a: 1\n\x00", "is not YAML: line 2: unacceptable character"),
        ("é: 1\nb: \x07", "is not YAML: line 2: unacceptable character"),
        ("a: 1\nb: \xe9".encode("latin-1"), "is not YAML: line 2: unacceptable character #x00e9"),
        ("kind: List\nitems: [{}]\nitems: []\n", "line 3: items is given twice in one List"),
        ("a: .inf", "line 1, column 4: a number must be finite"),
        ("just words", "a manifest is an object"),
        ("[1, 2]", "object"),
    ],
)
def test_what_is_no_manifest_is_said_in_a_line(
    tmp_path: Path, text: str | bytes | None, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.yaml"
    if text is not None:
        file.write_bytes(text.encode() if isinstance(text, str) else text)
    assert main(["lint", str(file)]) == 1
    printed = capsys.readouterr().out
    assert words in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("kinds", "says"),
    [
        (("Service", "Secret"), "there is no PDCluster in {}; add one, with kind: PDCluster"),
        (("ConfigMap",), "there is no PDCluster in {}; add one, with kind: PDCluster"),
        (("PDCluster", "PDCluster"), "{} holds 2 objects of kind PDCluster; put one of them into"),
    ],
)
def test_plan_says_how_many_clusters_a_file_has(
    kinds: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "several.yaml"
    file.write_text("---\n".join(f"kind: {kind}\n" for kind in kinds))
    assert main(["plan", str(file)]) == 1
    assert says.format(file) in capsys.readouterr().err


def test_a_file_that_is_too_large_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    large = b"#" * ((4 << 20) + 1)
    (tmp_path / "x.yaml").write_bytes(large)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(large)))
    assert main(["lint", str(tmp_path / "x.yaml"), "-"]) == 1
    assert capsys.readouterr().out.count("is larger than 4 MiB") == 2


def test_a_manifest_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    stdin = io.TextIOWrapper(io.BytesIO((GOLDEN / "warnings.yaml").read_bytes()))
    monkeypatch.setattr("sys.stdin", stdin)
    assert main(["lint", "-"]) == 0


def test_plan_prints_the_steps_of_the_operators_own_planner(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "warnings.yaml"]) == 0
    printed = capsys.readouterr().out
    assert "apply StatefulSet warned-prefill-" in printed
    numbers = [int(line.partition(".")[0]) for line in printed.splitlines() if ". " in line[:6]]
    assert numbers == list(range(1, len(numbers) + 1)), "no step is left out"
    assert main(["plan", "-o", "yaml", "warnings.yaml"]) == 0
    printed = capsys.readouterr().out
    assert "characters of base64" in printed
    assert len(printed) < 60_000
    assert main(["plan", "five-mistakes.yaml"]) == 1
    assert "UnknownField" in capsys.readouterr().out
    assert main(["plan", "five-mistakes.yaml", "-o", "json"]) == 1
    assert json.loads(capsys.readouterr().out)["kind"] == "Lint"


def test_plan_ends_with_the_gpus_that_the_engines_hold(
    capsys: pytest.CaptureFixture[str],
) -> None:
    example = str(GOLDEN.parents[3] / "examples" / "one-node-8gpu.yaml")
    assert main(["plan", example]) == 0
    text = capsys.readouterr().out
    assert "\nengines: 0 now, 3 at the peak, 3 after\n" in text
    assert "\nGPUs: 0 now, 8 at the peak, 8 after\n" in text
    assert main(["plan", example, "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    jsonschema.validate(found, output.schema(plan_view.Plan))
    assert found["gpus"] == {"now": 0, "peak": 8, "after": 8}
    for one in (step for turn in found["rounds"] for step in turn["steps"]):
        line = f"{one['number']:3}. {one['verb']} {one['kind']} {one['name']}  {one['why']}\n"
        assert line in text


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    for words in ("pdcluster lint cluster.yaml", "--once", "Exit codes", "prefill", "decode"):
        assert words in printed
    for command in COMMANDS:
        assert main([command, "--help"]) == 0
        assert len(capsys.readouterr().out) > 250


@pytest.mark.parametrize("words", [[], ["up"], ["up", "x", "--timeout", "0"], ["fly"]])
def test_a_wrong_command_line_exits_with_2(words: list[str]) -> None:
    assert main(words) == 2


def test_lint_starts_without_what_only_an_operator_needs() -> None:
    """What makes it quick: none of the slow imports."""
    program = (
        "import sys\n"
        "from pdcluster_operator.cli.main import main\n"
        "main(['lint', 'five-mistakes.yaml'])\n"
        "heavy = {'kopf', 'aiohttp', 'kubernetes', 'torch', 'vllm', 'nixl', 'numpy'}\n"
        "sys.exit(f'imported: {heavy & sys.modules.keys()}' if heavy & sys.modules.keys() else 0)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=False, text=True
    )
    assert (run.returncode, run.stderr) == (0, "")


LINES = """\
# a comment
x: &engine
  args: [--a, --b]
---
apiVersion: pdcluster.dev/v1alpha1
kind: PDCluster
metadata:
  labels: {app: one, app.kubernetes.io/name: two}
spec:
  decode: &role
    engine:
      env:
      - name: A
        value: b
      - {name: B, value: c}
    resources:
      limits:
        nvidia.com/gpu: 1
  prefill:
    <<: *role
    replicas: 2
"""


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (".", 5),
        ("apiVersion", 5),
        ("metadata.labels.app", 8),
        ("metadata.name", 7),
        ("spec.decode.engine.env[0]", 13),
        ("spec.decode.engine.env[0].value", 14),
        ("spec.decode.engine.env[1].value", 15),
        ("spec.decode.engine.env[7].value", 12),
        ("spec.decode.resources.limits.nvidia.com/gpu", 18),
        ("spec.prefill.resources.limits.nvidia.com/gpu", 18),
        ("spec.prefill.replicas", 21),
        ("spec.prefill.engine.extraArgs[2]", 11),
        ("spec.router.replicas", 9),
        ("status.x", 5),
        ("port", 0),
        ("--model-dir", 0),
    ],
)
def test_a_path_has_its_line_or_that_of_the_nearest_field_around_it(
    path: str, line: int, tmp_path: Path
) -> None:
    (file := tmp_path / "x.yaml").write_text(LINES)
    [_, cluster] = manifests.read_documents(str(file))
    assert cluster.line(path) == line


def test_each_field_of_the_examples_is_found_in_its_own_line() -> None:
    """The line that is said of a path begins with the path's last key, or an item's dash."""
    files = sorted((GOLDEN.parents[3] / "examples").glob("*.yaml"))
    count = 0
    for file in files:
        lines = file.read_text().splitlines()
        for document in manifests.read_documents(str(file)):
            for path, key in paths(document.body):
                count += 1
                text = lines[document.line(path) - 1]
                assert re.search(rf"(^|[\s{{,\"']){re.escape(key)}[\"']?:", text), (path, text)
    assert count > 200


def paths(body: object, path: str = "") -> list[tuple[str, str]]:
    found = []
    if isinstance(body, dict):
        for key, value in body.items():
            here = f"{path}.{key}" if path else key
            found += [(here, key), *paths(value, here)]
    elif isinstance(body, list):
        for place, value in enumerate(body):
            found += paths(value, f"{path}[{place}]")
    return found


def test_a_key_that_stands_twice_is_refused_with_both_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = (GOLDEN / "warnings.yaml").read_text()
    last = good.count("\n")
    (file := tmp_path / "x.yaml").write_text(
        f"{good}  router:\n    replicas: 1\n    resources: {{}}\n    replicas: 3\n"
        "---\nkind: Service\nmetadata: {labels: {a: b, a: c}}\n"
    )
    for command in ("lint", "plan", "up"):
        assert main([command, str(file)]) == 1
        printed = capsys.readouterr().out
        assert f"{file}:{last + 4}: spec.router.replicas\n" in printed
        says = f"is given twice in one mapping, on lines {last + 2} and {last + 4} [Duplicate]"
        assert printed.count("[Duplicate]") == printed.count(says) == 1
        assert "UnknownField" not in printed
    assert main(["lint", str(file), "-o", "json"]) == 1
    [error] = json.loads(capsys.readouterr().out)["findings"][:1]
    assert (error["rule"], error["line"], error["document"]) == ("Duplicate", last + 4, 1)


def test_a_merged_key_may_be_given_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = (GOLDEN / "warnings.yaml").read_text()
    (file := tmp_path / "x.yaml").write_text(
        f"{good}  router: &r {{replicas: 1}}\n  prefill: {{<<: *r, replicas: 2}}\n"
    )
    assert main(["lint", str(file)]) == 0
    assert "Duplicate" not in capsys.readouterr().out
    assert manifests.read_cluster(str(file)).body["spec"]["prefill"]["replicas"] == 2


LAUGHS = "".join(
    f"l{n}: &l{n} " + ("[" + ", ".join([f"*l{n - 1}"] * 9) + "]" if n else "lol") + "\n"
    for n in range(40)
)
MERGES = "".join(
    f"l{n}: &l{n} " + (f"{{<<: [*l{n - 1}, *l{n - 1}]}}" if n else "{k: v}") + "\n"
    for n in range(40)
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (LAUGHS, "the aliases (*name) in document 1 of - stand for more than 8 MiB; write fewer"),
        (MERGES, "the aliases (*name) in document 1 of - stand for more than 8 MiB; write fewer"),
        (f"a: 1\n---\n{LAUGHS}", "in document 2 of -"),
        ("a: &a\n  b: *a\n", "line 1: an alias stands inside of what it stands for"),
        ("a: &a\n- [*a]\n", "line 1: an alias stands inside of what it stands for"),
        ("[" * 5_000, "is not YAML"),
    ],
)
def test_aliases_stand_for_a_bounded_number_of_values(
    text: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert main(["lint", "-"]) == 1
    assert says in capsys.readouterr().out


CONFIG = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


def linted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: object, *words: str, tensor: int = 1
) -> tuple[int, str, str]:
    (tmp_path / "config.json").write_text(json.dumps(config))
    manifest = yaml.safe_load((GOLDEN / "warnings.yaml").read_text())
    manifest["spec"]["prefill"] = {"replicas": 1, "parallelism": {"tensor": tensor}}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(manifest))
    code = main(["lint", str(tmp_path / "cluster.yaml"), *words])
    return code, *capsys.readouterr()


def test_a_models_config_is_checked_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path, tmp_path / "config.json"):
        flag = ("--model-config", str(path))
        code, text, _ = linted(tmp_path, capsys, CONFIG, *flag)
        assert code == 0
        words = " ".join(text.split())
        assert "131,072 bytes for one token, 131,072,000 for 1,000" in words
        assert "about 2,016 descriptors in blocks of 16 tokens" in words
        code, text, _ = linted(tmp_path, capsys, CONFIG, *flag, "-o", "json", tensor=3)
        assert code == 1
        document = json.loads(text)
        assert "131,072 bytes for one token" in document["checked"][0]["model"]
        heads = [one for one in document["findings"] if "32 attention heads" in one["message"]]
        assert [one["path"] for one in heads] == ["spec.prefill.parallelism.tensor"]
    code, text, _ = linted(tmp_path, capsys, {**CONFIG, "mamba_d_state": 128}, *flag)
    assert code == 0
    assert "does not say how its layers keep their KV" in " ".join(text.split())
    assert "the model's layers" in " ".join(text.split()), "the engines check them"


@pytest.mark.parametrize(
    ("config", "words"),
    [({}, "num_hidden_layers = null is no whole number"), ([], "holds no JSON object")],
)
def test_a_config_that_is_none_is_a_wrong_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: object, words: str
) -> None:
    code, _, errors = linted(tmp_path, capsys, config, "--model-config", str(tmp_path))
    assert code == 2
    assert words in errors
    code, _, errors = linted(tmp_path, capsys, CONFIG, "--model-config", str(tmp_path / "none"))
    assert code == 2
    assert f"{tmp_path}/none cannot be read" in errors
