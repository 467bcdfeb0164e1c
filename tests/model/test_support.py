"""`docs/models.md` and `ramify doctor --model` say what the code does with each family, by the config alone."""

import io
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig

from ramify.cli import main
from ramify.core.errors import ConfigInvalid, ModelUnsupported
from ramify.launch.run_checks import check_run
from ramify.model.config_check import ALWAYS_SUPPORTED
from ramify.model.load import load_config, load_engine_model, load_hf_model
from ramify.model.pack_layout import SIZE_SETTINGS, choose_pack_layout
from ramify.model.resolve import resolve_model_path
from ramify.model.support import (
    CHECKED_WHEN_LOADED,
    NOT_TESTED,
    REFUSED,
    TESTED,
    check_model_supported,
    read_model_support,
)
from ramify.orchestrate.run_config import RunConfig
from ramify.train.build import build_trainer
from ramify.train.config import TrainerConfig
from ramify.train.policy_model import load_policy
from ramify.train.sft.config import SftConfig
from ramify.train.sft.run import run_sft
from tests.support.training import SINGLE_RANK

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
# Where the default config of transformers has not the layers of the published models.
SETTINGS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
}
VISION_MODELS_WITHOUT_TEXT_PART = ("qwen2_vl", "qwen2_5_vl", "llava", "mistral3")


def read_rows() -> dict[str, tuple[str, ...]]:
    """Return the columns of the table of families, by model type: engine, trainer, LoRA, images, tested."""
    rows: dict[str, tuple[str, ...]] = {}
    for line in PAGE.read_text().split("### Families")[1].split("\n### ")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        for model_type in re.findall(r"`(\w[\w-]*)`", cells[1]) if line.startswith("| ") and len(cells) > 5 else []:
            if model_type != "model_type":
                rows[model_type] = tuple(cells[2:7])
    return rows


@pytest.mark.parametrize("model_type", read_rows())
def test_the_table_of_families_says_what_the_code_does(model_type):
    support = read_model_support(AutoConfig.for_model(model_type, **SETTINGS.get(model_type, {})))
    columns = (support.engine, support.trainer, support.lora, support.images, support.tested)
    assert columns == read_rows()[model_type]


def test_what_was_tested_is_said_of_the_families_of_the_table_only():
    assert {model_type: (variant.engine, variant.trainer) for model_type, variant in TESTED.items()} == {
        model_type: row[:2] for model_type, row in read_rows().items()
    }


@pytest.mark.parametrize(
    ("model_type", "settings", "engine", "tested"),
    [
        (
            "phi3",
            {"sliding_window": 512},
            "own code",
            "another variant of the family (fused, forest), not this one: logprobs of",
        ),
        (
            "mistral",
            {"sliding_window": None},
            "fused",
            "another variant of the family (own code, forest), not this one: gradients",
        ),
        ("mistral", {}, "own code", "gradients on CPU and H200"),
        ("qwen3_5_text", {"linear_conv_kernel_dim": 8}, "fused", "another variant of the family (fused, forest), not"),
        (
            "bamba",
            {**SETTINGS["bamba"], "mamba_d_conv": 8},
            "own code",
            "another variant of the family (own code, forest), not",
        ),
        ("qwen3", {"quantization_config": {"quant_method": "gptq"}}, REFUSED, NOT_TESTED),
        ("mamba", {"quantization_config": {"quant_method": "gptq"}}, REFUSED, NOT_TESTED),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, REFUSED, "only that it is refused"),
    ],
    ids=str,
)
def test_what_was_tested_is_said_only_of_the_variant_that_was_tested(model_type, settings, engine, tested):
    support = read_model_support(AutoConfig.for_model(model_type, **settings))
    assert support.engine == engine and support.tested.startswith(tested)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        *(({name: 0}, f"{name} = 0, expected a positive number") for name in SIZE_SETTINGS),
        ({"hidden_size": -5}, "hidden_size = -5, expected a positive number"),
        (dict.fromkeys(SIZE_SETTINGS, 0), f"{SIZE_SETTINGS[0]} = 0, expected a positive number"),
    ],
)
def test_sizes_that_are_not_positive_are_refused_by_name(sizes, reason, tmp_path, capsys):
    settings = {**AutoConfig.for_model("qwen3").to_dict(), "layer_types": None, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    for load in (load_policy, lambda path: load_engine_model(path, device="cpu")):
        with pytest.raises(ModelUnsupported, match=f"qwen3 has {reason}"):
            load(tmp_path)
    assert main(["doctor", "--model", str(tmp_path), "--json"]) == 1
    row = json.loads(capsys.readouterr().out)
    assert row["engine"] == row["trainer"] == REFUSED and re.search(f"qwen3 has {reason}", row["notes"][0])


@pytest.mark.parametrize(
    ("model_type", "tested"),
    [
        ("starcoder2", CHECKED_WHEN_LOADED),
        ("gpt_bigcode", CHECKED_WHEN_LOADED),  # only by the engine
        ("bloom", NOT_TESTED),
        ("whisper", NOT_TESTED),
    ],
)
def test_only_models_that_are_loaded_are_said_to_be_checked(model_type, tested):
    assert read_model_support(AutoConfig.for_model(model_type)).tested == tested


@pytest.mark.parametrize(
    ("model_type", "trainer_reason", "engine_reason"),
    [
        ("deepseek_v3", "deepseek_v3 has latent keys", "deepseek_v3 has latent keys"),
        ("kimi_linear", "kimi_linear has latent keys", "kimi_linear has latent keys"),
        ("mamba", None, "mamba has no layers with attention"),
        ("blt", None, "blt has a config without num_hidden_layers"),
        ("rwkv", "rwkv .* no list of layers", "rwkv has a config without num_attention_heads"),
        ("t5", "t5 has an encoder and a decoder", "t5 has an encoder and a decoder"),
        ("bert", "bert is an encoder", "bert is an encoder"),
        ("modernbert", "modernbert is an encoder", "modernbert is an encoder"),
        ("gptj", "gptj does not support custom attention", "gptj does not support custom attention"),
        ("mimo_v2_flash", "v_head_dim", "v_head_dim"),
        ("gemma4", "differ in head_dim", "differ in head_dim"),
        *((name, *2 * [f"no causal language model of type {name}"]) for name in VISION_MODELS_WITHOUT_TEXT_PART),
    ],
)
def test_unsupported_families_are_refused_by_name_before_anything_is_loaded(
    model_type, trainer_reason, engine_reason, tmp_path
):
    config = AutoConfig.for_model(model_type)
    config.save_pretrained(tmp_path)  # there are no weights
    with pytest.raises(ModelUnsupported, match=engine_reason):
        load_engine_model(tmp_path, device="cpu")
    if trainer_reason is not None:
        with pytest.raises(ModelUnsupported, match=trainer_reason):
            choose_pack_layout(config)


@pytest.mark.parametrize("model_type", ["gemma3", "gemma3n"])
def test_vision_language_models_with_a_causal_language_model_run_on_text(model_type):
    support = read_model_support(AutoConfig.for_model(model_type))
    assert (support.engine, support.trainer, support.images) == ("own code", "forest", "no")


@pytest.mark.parametrize("weights", [None, b"{"], ids=["missing", "truncated"])
def test_the_trainer_refuses_a_family_before_it_reads_weights(tmp_path, weights):
    directory = tmp_path / "model"
    AutoConfig.for_model("deepseek_v3").save_pretrained(directory)
    if weights is not None:
        (directory / "model.safetensors").write_bytes(weights)
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "completion": "b"}')
    model = {"name": str(directory)}
    sft_config = SftConfig(name="sft", output=tmp_path, model=model, data={"path": str(tmp_path / "data.jsonl")})
    source = {"name": "reverse", "taskset": {"id": "reverse-text"}}
    rl_config = RunConfig(name="rl", output=tmp_path, model=model, train=[source])
    starts = [
        lambda: load_policy(directory),
        lambda: build_trainer(directory, TrainerConfig(), SINGLE_RANK),
        lambda: run_sft(sft_config),
        lambda: check_run(rl_config),
    ]
    for start in starts:
        with pytest.raises(ModelUnsupported, match="deepseek_v3 has latent keys"):
            start()
    assert not list(tmp_path.glob("**/*.sqlite")) and not (tmp_path / "sft").exists()


@pytest.mark.parametrize("model_type", sorted(ALWAYS_SUPPORTED))
def test_families_that_are_not_checked_before_a_run_are_not_refused(model_type):
    support = read_model_support(AutoConfig.for_model(model_type))
    assert REFUSED not in (support.engine, support.trainer)


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_run_refuses_an_unsupported_model_before_anything_starts(tmp_path, dry_run, check_plugins_in_process):
    def check(model_type, **more):
        directory = tmp_path / model_type
        shutil.copytree(resolve_model_path("tiny"), directory, dirs_exist_ok=True)  # with weights, of another model
        AutoConfig.for_model(model_type).save_pretrained(directory)
        source = {"name": "reverse", "taskset": {"id": "reverse-text"}}
        run = RunConfig(name="rl", output=tmp_path, model={"name": str(directory)}, train=[source], **more)
        check_run(run, dry_run=dry_run)

    with pytest.raises(ModelUnsupported, match="kimi_linear has latent keys"):
        check("kimi_linear")
    with pytest.raises(ModelUnsupported, match="kimi_linear has latent keys"):
        check("llama", models={"teacher": {"name": str(tmp_path / "kimi_linear")}})
    with pytest.raises(ModelUnsupported, match=r"falcon_h1 has layers that the engine .*; inference.engine = .vllm"):
        check("falcon_h1")
    check("falcon_h1", inference={"engine": "external", "base_url": ["http://localhost:8000"]})


def test_vllm_is_refused_for_a_model_of_which_only_the_text_part_is_trained(tmp_path, check_plugins_in_process):
    model = tmp_path / "vision-language"
    shutil.copytree(resolve_model_path("tiny-vision"), model)
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"model_type": "qwen3_5"}))
    source = {"name": "reverse", "taskset": {"id": "reverse-text"}}
    run = RunConfig(
        name="run", output=tmp_path, model={"name": str(model)}, train=[source], inference={"engine": "vllm"}
    )
    with pytest.raises(
        ConfigInvalid, match=r"inference.engine: vLLM loads the whole model, but only its text part is published"
    ):
        check_run(run, dry_run=True)


def write_quantized(directory: Path, model_type: str, method: str) -> Path:
    """Write the config of a model whose weights are quantized."""
    config = AutoConfig.for_model(model_type).to_dict() | {"quantization_config": {"quant_method": method}}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    "settings",
    [{"model_type": "new_family"}, {"model_type": "qwen3", "quantization_config": {"quant_method": "awq"}}],
    ids=["unknown family", "quantized"],
)
def test_a_model_that_only_vllm_runs_is_not_checked(tmp_path, check_plugins_in_process, settings):
    shutil.copy(resolve_model_path("tiny") / "model.safetensors", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(settings))
    source = {"name": "reverse", "taskset": {"id": "reverse-text"}}
    judge = {"name": str(tmp_path), "inference": {"engine": "vllm"}}
    check_run(RunConfig(name="rl", output=tmp_path, train=[source], models={"judge": judge}), dry_run=True)


@pytest.mark.parametrize(
    ("model_type", "method", "advice"),
    [
        ("gpt_oss", "mxfp4", "convert them first, as docs/models.md shows"),
        *(("qwen3", method, "use the unquantized version of the model") for method in ("awq", "gptq", "fp8")),
    ],
)
def test_quantized_weights_are_refused_by_name(tmp_path, capsys, model_type, method, advice):
    write_quantized(tmp_path, model_type, method)
    message = rf"the weights of {tmp_path} are quantized \({method}\), expected bfloat16 or float32: {advice}$"
    for load in (load_policy, lambda path: load_engine_model(path, device="cpu"), check_model_supported):
        with pytest.raises(ModelUnsupported, match=message):
            load(tmp_path)
    assert main(["doctor", "--model", str(tmp_path), "--json"]) == 1
    row = json.loads(capsys.readouterr().out)
    assert row["engine"] == row["trainer"] == REFUSED
    (note,) = row["notes"]  # one for both
    assert re.search(f"^{message}", note)
    with pytest.raises(ModelUnsupported, match=f"quantized .*{advice}; inference.engine = .vllm. runs it in vLLM"):
        check_model_supported(tmp_path, by_trainer=False, by_engine=True)
    with pytest.raises(ModelUnsupported, match="quantized"):
        load_hf_model(tmp_path, load_config(tmp_path), torch.float32, None)


def test_quantization_is_not_the_reason_if_a_model_would_be_refused_without_it(tmp_path, capsys):
    write_quantized(tmp_path, "deepseek_v3", "fp8")
    for load in (load_policy, lambda path: load_engine_model(path, device="cpu"), check_model_supported):
        with pytest.raises(ModelUnsupported, match="deepseek_v3 has latent keys"):
            load(tmp_path)
    assert main(["doctor", "--model", str(tmp_path), "--json"]) == 1
    row = json.loads(capsys.readouterr().out)
    assert "latent keys" in row["notes"][0] and not any("quantized" in note for note in row["notes"])
    main(["doctor", "--model", str(write_quantized(tmp_path, "falcon_h1", "fp8")), "--json"])  # which can be trained
    engine_reason, reason = json.loads(capsys.readouterr().out)["notes"]
    assert "layers that the engine does not know" in engine_reason and "quantized (fp8)" in reason


def test_doctor_prints_the_row_of_a_model(tmp_path, capsys):
    assert main(["doctor", "--model", "tiny"]) == 0
    output = capsys.readouterr().out
    assert all(
        re.search(rf"^{label} +{value}$", output, re.M)
        for label, value in (("engine", "fused"), ("lora", "yes"), ("tested", "runs, gradients .* on CPU and H200"))
    )
    AutoConfig.for_model("gpt_oss").save_pretrained(tmp_path)
    assert main(["doctor", "--model", str(tmp_path), "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["engine"], row["trainer"], row["lora"]) == ("own code", "forest", "not experts")
    assert any('inference.engine = "vllm"' in note for note in row["notes"])


def test_doctor_says_why_a_model_is_refused(tmp_path, capsys):
    AutoConfig.for_model("deepseek_v3").save_pretrained(tmp_path)
    assert main(["doctor", "--model", str(tmp_path)]) == 1
    output = capsys.readouterr().out
    assert len(re.findall(r"^(engine|trainer) +refused$", output, re.M)) == 2 and "latent keys" in output
    assert "router replay" not in output


def test_doctor_indents_the_lines_of_a_long_note(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    AutoConfig.for_model("gpt_oss").save_pretrained(tmp_path)
    main(["doctor", "--model", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("note        experts: ") for line in lines)
    assert all(re.match("(model_type|[a-z]+) +[^ ]| {12}[^ ]", line) and len(line) <= 80 for line in lines)
    assert any(line.startswith(" " * 12) for line in lines)


@pytest.mark.parametrize(("text", "family"), [('{"model_type": "new_family"}', "new_family"), ("{", "unknown")])
def test_doctor_names_the_family_of_a_config_that_cannot_be_loaded(tmp_path, capsys, text, family):
    (tmp_path / "config.json").write_text(text)
    assert main(["doctor", "--model", str(tmp_path), "--json"]) == 1
    row = json.loads(capsys.readouterr().out)
    assert row["model_type"] == family and row["tested"] == NOT_TESTED


def test_doctor_advises_vllm_only_where_a_run_accepts_it(tmp_path, capsys):
    for model_type, is_advised in (("falcon_h1", True), ("deepseek_v3", False), ("qwen3_5_moe", False)):
        AutoConfig.for_model(model_type).save_pretrained(tmp_path)
        main(["doctor", "--model", str(tmp_path)])
        assert ("vllm" in capsys.readouterr().out) == is_advised, model_type


def test_doctor_says_which_value_of_a_config_is_wrong(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": "wide"}')
    assert main(["doctor", "--model", str(tmp_path), "--json"]) == 1
    assert re.search(r"field 'hidden_size': .*'wide'", capsys.readouterr().out)


def write_model_code(directory: Path, settings: dict[str, Any]) -> Path:
    """Write a model whose config names code beside it, and return the file that this code would write."""
    directory.mkdir()
    marker, auto_map = directory / "executed", {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (directory / "code.py").write_text(f"open({str(marker)!r}, 'w').close()")
    (directory / "config.json").write_text(json.dumps({**settings, "auto_map": auto_map}))
    shutil.copy(resolve_model_path("tiny") / "model.safetensors", directory)
    return marker


@pytest.fixture
def answers(monkeypatch) -> io.StringIO:
    """A standard input that answers every question with yes."""
    stdin = io.StringIO("y\n" * 10)
    monkeypatch.setattr(sys, "stdin", stdin)
    return stdin


@pytest.mark.parametrize(
    "command",
    [
        ("doctor", "--model"),
        ("rl", "reverse-text", "--dry-run", "-m"),
        ("rl", "reverse-text", "-m"),
        ("sft", "-d", "data.jsonl", "-m"),
        ("eval", "reverse-text", "--dry-run", "-m"),
        ("eval", "reverse-text", "-m"),
    ],
    ids=" ".join,
)
def test_code_of_a_model_of_an_unknown_family_is_never_run(command, answers, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("data.jsonl").write_text('{"prompt": "a", "completion": "b"}')
    marker = write_model_code(tmp_path / "model", {"model_type": "internlm2"})
    assert main([*command, str(tmp_path / "model")]) == 1
    output = " ".join("".join(capsys.readouterr()).split())
    assert "is of the family 'internlm2', which transformers" in output and "never runs" in output
    assert "Do you wish" not in output and "trust_remote_code" not in output
    assert answers.tell() == 0 and not marker.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"data.jsonl", "model"}


def test_code_of_a_model_is_never_run_by_what_loads_it(answers, tmp_path):
    unknown, known = tmp_path / "unknown", tmp_path / "known"
    marker = write_model_code(unknown, {"model_type": "internlm2"})
    for load in (load_policy, lambda path: load_engine_model(path, device="cpu")):
        with pytest.raises(ModelUnsupported, match="internlm2"):
            load(unknown)
    clip_marker = write_model_code(known, {"model_type": "clip"})  # a family without a causal language model
    clip = AutoConfig.for_model("clip", auto_map={"AutoModelForCausalLM": "code.Model"})
    for keep_precision in (False, True):
        with pytest.raises(ModelUnsupported, match="contains custom code which must be executed"):
            load_hf_model(known, clip, torch.float32, None, keep_precision=keep_precision)
    assert answers.tell() == 0 and not marker.exists() and not clip_marker.exists()


def test_code_beside_a_model_of_a_known_family_is_ignored(answers, tmp_path):
    marker = write_model_code(tmp_path / "model", AutoConfig.for_model("qwen2").to_dict())
    assert isinstance(load_config(tmp_path / "model"), PreTrainedConfig)
    assert answers.tell() == 0 and not marker.exists()


def test_a_config_that_names_code_but_no_family_is_refused(answers, tmp_path):
    marker = write_model_code(tmp_path / "model", {})
    with pytest.raises(
        ModelUnsupported, match=r"config.json has no model_type; expected the name of a model family"
    ) as caught:
        load_config(tmp_path / "model")
    assert "trust_remote_code" not in caught.value.message
    assert answers.tell() == 0 and not marker.exists()
