"""`pdcluster init`: what it writes lints, its numbers are those of its formulas, or it says why."""

import json
import re
from pathlib import Path
from typing import Any, ClassVar

import click
import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given, settings, strategies as st

from pdcluster_operator.api.rules.validate import check_manifest
from pdcluster_operator.api.spec.model_config import UnknownModel
from pdcluster_operator.api.spec.types import RolloutType
from pdcluster_operator.cli import model_shape, sizing
from pdcluster_operator.cli.exits import Exit, UserError
from pdcluster_operator.cli.init import Choice, compose, init
from pdcluster_operator.cli.model_shape import FAMILIES, shape_of_family

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))
FLAGS = ["--model", "llama-3.1-8b", "--gpus", "8", "--gpu-type", "H100-80GB", "--fabric", "rdma"]
# As the makers publish them: safetensors' total of each repository.
PUBLISHED = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.3-70b-fp8": 70_553_706_496,
}


def run(*flags: str) -> tuple[str, str]:
    """Run the command; return what it writes to standard output and to standard error."""
    result = CliRunner().invoke(init, list(flags), standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    assert result.return_value == Exit.DONE
    return result.stdout, result.stderr


def wish(**changed: Any) -> sizing.Wish:
    fields = {
        "gpus": 8, "gpu_type": "H100-80GB", "nodes": 1, "fabric": sizing.FABRICS["rdma"],
        "prompt_tokens": 4096, "output_tokens": 512, "ttft": 2.0, "itl": 0.05,
    }  # fmt: skip
    return sizing.Wish(**(fields | changed))


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_formula_of_parameters_gives_what_the_makers_publish(name: str) -> None:
    config = {k: v for k, v in FAMILIES[name].config.items() if k != "quantization_config"}
    assert model_shape.shape(config, weights=None, said="").active == PUBLISHED[name]


def test_kv_of_a_token_is_what_the_examples_say() -> None:
    long = shape_of_family(FAMILIES["llama-3.3-70b-fp8"])
    assert (
        "128k tokens of this model is\n# 43 GB"
        in Path(EXAMPLES[0].parent, "long-context.yaml").read_text()
    )
    assert round(long.kv_bytes * 131_072 / 1e9) == 43
    # A rank holds at least one head, and with MLA all of it.
    assert long.kv_bytes_of_rank(8) == long.kv_bytes_of_rank(16) == long.kv_bytes // 8
    latent = shape_of_family(FAMILIES["deepseek-r1"])
    assert latent.kv_bytes == latent.kv_bytes_of_rank(16) == 61 * 576 * 2


def test_models_of_the_table_are_pinned_to_the_commits_of_the_examples() -> None:
    text = "\n".join(path.read_text() for path in EXAMPLES)
    for family in FAMILIES.values():
        assert family.repo in text
        assert family.revision in text


@pytest.mark.parametrize("name", FAMILIES)
def test_every_model_of_the_table_gets_a_manifest_without_a_warning(name: str) -> None:
    out, errors = run("--model", name, "--gpus", "64", "--nodes", "8", *FLAGS[4:])
    assert errors == ""
    document = yaml.safe_load(out)
    _, findings = check_manifest(
        document, host_paths=None, mounted_certificates=None, pod_groups=None
    )
    assert findings.errors == findings.warnings == ()
    assert all(len(line) <= 100 for line in out.splitlines())


def test_the_manifest_has_what_the_arithmetic_says() -> None:
    out, _ = run(*FLAGS, "--prompt-tokens", "8000")
    lines = re.sub(r"\n#   +", " ", out).replace(",", "")
    for formula, result in (
        (r"KV of a token: (\d+) layers x 2 \(K and V\) x (\d+) KV heads x (\d+) elements",
         r"x 2 bytes = (\d+) bytes"),
        (r"KV of a prompt: (\d+) tokens x (\d+)", r"KV of a prompt: .* = ([\d.]+) GB"),
    ):  # fmt: skip
        factors = [int(one) for one in re.search(formula, lines).groups()]  # type: ignore[union-attr]
        product = 1
        for factor in factors:
            product *= factor
        said = float(re.search(result, lines)[1])  # type: ignore[index]
        assert said in (product * 4, round(product / 1e9, 1))
    ratio = re.search(r"P:D = (\d+):(\d+)", lines)
    spec = yaml.safe_load(out)["spec"]
    assert ratio is not None
    assert [int(one) for one in ratio.groups()] == [
        spec[role]["replicas"] for role in ("prefill", "decode")
    ]
    assert spec["engine"]["maxModelLen"] >= 8512


def test_surge_needs_a_node_with_room_for_an_engine_of_each_role() -> None:
    # Nodes of 3 GPUs have room for one engine of 2: the third GPU is of no use.
    flags = ["--model", "llama-3.1-8b", "--gpu-type", "L4-24GB", "--fabric", "none"]
    out, _ = run(*flags, "--gpus", "12", "--nodes", "4")
    spec = yaml.safe_load(out)["spec"]
    assert spec["decode"]["parallelism"]["tensor"] == 2
    assert spec["prefill"]["replicas"] + spec["decode"]["replicas"] == 4
    assert spec["rollout"]["type"] != "Surge"


def test_longer_prompts_bring_prefill_engines_and_longer_answers_decode_engines() -> None:
    shape = shape_of_family(FAMILIES["llama-3.1-8b"])
    counts = [
        sizing.size(shape, wish(gpus=64, nodes=8, prompt_tokens=p, output_tokens=o)).prefill
        for p, o in ((500, 4000), (4000, 2000), (16_000, 500))
    ]
    assert counts == sorted(set(counts))


def test_engines_grow_when_the_targets_need_it_and_no_further() -> None:
    shape = shape_of_family(FAMILIES["llama-3.1-8b"])
    slow, fast = (sizing.size(shape, wish(prompt_tokens=16_000, ttft=t)) for t in (10, 0.5))
    assert (slow.tensor, slow.met) == (1, True)
    assert fast.tensor > 1
    assert fast.met
    never = sizing.size(shape, wish(prompt_tokens=16_000, ttft=0.001))
    assert (never.tensor, never.met) == (1, False)
    assert any("NOT met" in note for note in never.notes)


def test_a_tensor_size_splits_the_heads_and_fills_whole_nodes() -> None:
    few, many = (shape_of_family(FAMILIES[name]) for name in ("qwen2.5-0.5b", "deepseek-r1"))
    assert sizing._tensors(few, wish()) == [1, 2]  # 14 heads
    assert sizing._tensors(many, wish(gpus=24, nodes=2)) == [1, 2, 4, 8]
    assert sizing._tensors(many, wish(gpus=32, nodes=4)) == [1, 2, 4, 8, 16, 32]


def test_it_does_not_guess_for_a_gpu_without_a_data_sheet() -> None:
    out, _ = run(*FLAGS[:4], "--gpu-type", "Unknown-96GB", "--fabric", "none")
    assert "neither TTFT nor ITL can be estimated" in out.replace("\n#   ", " ")
    assert yaml.safe_load(out)["spec"]["prefill"]["replicas"] == 4


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "llama-3.1-8"], "Did you mean llama-3.1-8b?"),
        (["--gpu-type", "H100"], "such as H100-80GB"),
        (["--nodes", "3"], "do not have equally many GPUs"),
        (["--prompt-tokens", "200000"], "longest context is 131,072 tokens"),
        (["--model", "deepseek-r1"], "0.0 MB of each are left for KV"),
        (["--model", "qwen2.5-72b", "--gpus", "4"], "P/D needs two engines of 4 GPUs"),
        (["--source", "weights"], "write pvc:CLAIM/FOLDER"),
        (["--name", "Not_A_Name"], "these options make no valid manifest: metadata.name"),
        (["--fabric", "none", "--rdma-resource", "rdma/ib"], "rdma/ib is not used"),
        (["--fabric", "nvlink", "--network", "roce"], "roce is not used"),
        (["--rdma-resource", "ib"], "spec.transfer.rdma.resource"),
        (["--model", "x" * 5000], "neither a folder nor a model"),
        (["--output-file", "/proc/no/such"], "cannot be written"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(flags: list[str], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)) as refused:
        run(*FLAGS, *flags)
    assert refused.value.exit == Exit.USAGE
    assert "\n" not in str(refused.value)


def test_what_is_missing_is_named_when_nobody_can_be_asked() -> None:
    with pytest.raises(UserError, match="--gpu-type is missing"):
        run("--model", "llama-3.1-8b", "--gpus", "8")
    with pytest.raises(click.BadParameter, match="1 is not in the range"):
        run(*FLAGS, "--gpus", "1")


def test_efa_gets_the_backend_that_reaches_it_and_says_what_the_image_needs() -> None:
    text, _ = run(*FLAGS[:-1], "efa")
    transfer = yaml.safe_load(text)["spec"]["transfer"]
    assert transfer["backends"] == ["LIBFABRIC"]
    assert transfer["rdma"] == {"resource": "vpc.amazonaws.com/efa"}
    assert "libfabric fits its NIXL" in " ".join(text.replace("#", " ").split())
    assert "backends" not in yaml.safe_load(run(*FLAGS)[0])["spec"]["transfer"]


@pytest.mark.parametrize("option", ["--itl-ms", "--ttft-ms", "--link-gb"])
def test_nan_is_no_number(option: str) -> None:
    done = CliRunner().invoke(init, [option, "nan"])
    assert done.exit_code == 2
    assert "is not a number" in done.output


def test_a_file_without_a_name_is_refused() -> None:
    flags = ["--model", "qwen2.5-7b", "--gpus", "8", "--gpu-type", "L40S-48GB", "--fabric", "none"]
    done = CliRunner().invoke(init, [*flags, "--output-file", ""])
    assert isinstance(done.exception, UserError)
    assert str(done.exception) == "--output-file is empty: name a file"


def test_a_file_that_exists_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    assert run(*FLAGS, "--output-file", str(file)) == ("", "")
    written = file.read_text()
    with pytest.raises(UserError, match="the file exists"):
        run(*FLAGS, "--output-file", str(file))
    assert file.read_text() == written


class TestFolders:
    """Models in a folder."""

    CONFIG: ClassVar[dict[str, Any]] = {**FAMILIES["llama-3.1-8b"].config}

    def folder(self, tmp_path: Path, config: object, **files: int) -> str:
        (tmp_path / "config.json").write_text(json.dumps(config))
        for name, size in files.items():
            with (tmp_path / f"{name}.safetensors").open("wb") as file:
                file.truncate(size)
        return str(tmp_path)

    def test_its_files_say_what_the_weights_are(self, tmp_path: Path) -> None:
        model = self.folder(tmp_path, self.CONFIG, a=6 << 30, b=3 << 30)
        out, errors = run(*FLAGS, "--model", model, "--source", "pvc:weights/llama")
        assert "weights: 9.7 GB (2 files *.safetensors of the folder)" in out
        assert errors == ""
        source = yaml.safe_load(out)["spec"]["model"]["source"]
        assert source == {"persistentVolumeClaim": {"claimName": "weights", "path": "llama"}}

    def test_without_files_they_are_computed_and_the_folder_is_warned_of(
        self, tmp_path: Path
    ) -> None:
        out, errors = run(*FLAGS, "--model", self.folder(tmp_path, self.CONFIG))
        assert "8,030,261,248 parameters x 2 bytes" in out
        assert "[NodeLocalModel]" in errors

    def test_an_index_says_it_for_experts(self, tmp_path: Path) -> None:
        model = self.folder(tmp_path, {**self.CONFIG, "num_experts": 8})
        with pytest.raises(UserError, match="without experts"):
            run(*FLAGS, "--model", model)
        index = {"metadata": {"total_size": 20_000_000_000}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        out, _ = run(*FLAGS, "--model", model)
        assert "weights: 20.0 GB" in out
        assert "the experts of a token is not known" in out.replace("\n#   ", " ")

    @pytest.mark.parametrize(
        ("config", "words"),
        [
            ([], "holds no JSON object"),
            ({}, "num_hidden_layers = null is no whole number"),
            ({"num_hidden_layers": "32"}, 'num_hidden_layers = "32" is no whole number'),
            ({**CONFIG, "layer_types": ["mamba", "attention"]}, "keep states beside KV"),
            ({**CONFIG, "mamba_d_state": 128}, "keep states beside KV"),
        ],
    )
    def test_a_config_that_says_too_little_is_named(
        self, tmp_path: Path, config: object, words: str
    ) -> None:
        with pytest.raises(UserError, match=words):
            run(*FLAGS, "--model", self.folder(tmp_path, config))

    def test_a_folder_without_a_config_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"config\.json cannot be read: No such file"):
            run(*FLAGS, "--model", str(tmp_path))
        (tmp_path / "config.json").write_bytes(b"\xff{")
        with pytest.raises(UserError, match="is no JSON"):
            run(*FLAGS, "--model", str(tmp_path))


@settings(deadline=None)
@given(
    model=st.sampled_from(list(FAMILIES)),
    gpus=st.integers(2, 2000),
    nodes=st.integers(1, 64),
    gpu_type=st.sampled_from([*sizing.DATA_SHEETS, "Other-48GB", "x-1GB"]),
    fabric=st.sampled_from(list(sizing.FABRICS)),
    rate=st.none() | st.floats(0.001, 10_000),
    tokens=st.tuples(st.integers(1, 200_000), st.integers(1, 200_000)),
    targets=st.tuples(st.floats(1e-6, 3600), st.floats(1e-6, 3600)),
)
def test_whatever_the_flags_are_the_result_lints_or_one_sentence_says_why(
    model: str, gpus: int, nodes: int, gpu_type: str, fabric: str, rate: float | None,
    tokens: tuple[int, int], targets: tuple[float, float],
) -> None:  # fmt: skip
    known = sizing.FABRICS[fabric]
    over = sizing.Fabric(rate or known.gigabytes, "", known.each_gpu, known.resource)
    asked = wish(
        gpus=gpus, nodes=nodes, gpu_type=gpu_type, fabric=over, prompt_tokens=tokens[0],
        output_tokens=tokens[1], ttft=targets[0], itl=targets[1],
    )  # fmt: skip
    choice = Choice(
        model=model, source=None, name=None, fabric=fabric, gpu_resource="nvidia.com/gpu",
        image="docker.io/vllm/vllm-openai:v0.32.0", networks=(),
    )  # fmt: skip
    text, refusal = "", ""
    try:
        text, _ = compose(choice, asked)
    except UserError as error:
        refusal = str(error)
    assert "\n" not in refusal
    if refusal:
        return
    document = yaml.safe_load(text)
    cluster, findings = check_manifest(document)
    assert findings.ok
    spec = cluster.spec
    used = sum(role.replicas * role.parallelism.workers for role in (spec.prefill, spec.decode))
    assert used <= gpus
    shape, tensor = shape_of_family(FAMILIES[model]), spec.prefill.parallelism.tensor
    assert shape.heads % tensor == 0
    room = sizing.gpu_bytes(gpu_type) * sizing.USED - shape.weights / tensor - sizing.RESERVED
    assert room >= sizing.LEAST_REQUESTS * asked.tokens * shape.kv_bytes_of_rank(tensor)
    spare = gpus - used
    if spec.rollout.type is RolloutType.SURGE:
        assert spare >= 2 * tensor
    elif spec.rollout.type is RolloutType.REPLACE:
        assert min(spec.prefill.replicas, spec.decode.replicas) > 1
    if spec.prefill.parallelism.nodes == 1:
        assert spec.prefill.parallelism.workers <= gpus // nodes


@settings(deadline=None)
@given(
    config=st.dictionaries(
        st.sampled_from(["num_hidden_layers", "hidden_size", "num_attention_heads", "head_dim",
                         "num_key_value_heads", "vocab_size", "intermediate_size", "kv_lora_rank",
                         "qk_rope_head_dim", "max_position_embeddings", "text_config",
                         "layer_types", "num_experts", "sliding_window"]),
        st.integers(-1, 1 << 41) | st.none() | st.booleans() | st.text() | st.lists(st.text()),
    )
)  # fmt: skip
def test_no_config_ends_in_a_traceback(config: dict[str, Any]) -> None:
    refusal = ""
    try:
        sizing.size(model_shape.shape(config, weights=10**10, said=""), wish())
    except (UnknownModel, sizing.Impossible) as error:
        refusal = str(error)
    assert "\n" not in refusal
