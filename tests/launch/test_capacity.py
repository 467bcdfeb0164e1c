"""Whether a run fits its nodes, what would fit, and the plan of a cluster as `--dry-run` prints it."""

import dataclasses
import functools
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.cli import main
from ramify.core.errors import ClusterTooSmall, ConfigInvalid
from ramify.launch.capacity import check_allocation, find_long_path_warning, place_run, plan_sizes
from ramify.launch.demands import list_planned_nodes
from ramify.launch.launcher import ClusterNode
from ramify.launch.memory import count_version_bytes
from ramify.launch.plan import format_plan, plan_run
from ramify.orchestrate.run_config import RunConfig
from ramify.train.checkpoint_manifest import CheckpointManifest
from ramify.train.memory import MemoryUse, ModelSize
from tests.support.plans import build_machine
from tests.support.ray import StubRay

ROOT = Path(__file__).parents[2]
FULL = bool(os.environ.get("RAMIFY_FULL"))
TRAIN = {"name": "reverse", "taskset": {"id": "reverse-text"}}
LORA = {"lora": {"rank": 16}}


def test_several_nodes_without_a_shared_directory_are_refused():
    config = RunConfig.model_validate({"train": [TRAIN], "cluster": {"launcher": "ray"}})
    nodes = list_planned_nodes(config)
    assert len(nodes) == 1 and place_run(config, nodes).head.is_head
    with pytest.raises(ConfigInvalid, match=r"cluster\.shared_directory: the cluster has 2 nodes"):
        place_run(config, nodes * 2)


@pytest.mark.parametrize("cores", [5, 8])
def test_cores_that_are_not_configured_are_lowered_before_a_run_is_refused(cores):
    def place(num_cores: int, **cluster: object) -> dict[str, int]:
        config = {"launcher": "ray", "node": {"cores": num_cores}, **cluster}
        run = RunConfig.model_validate({"train": [TRAIN], "eval": [TRAIN], "cluster": config})
        return {demand.name: demand.cores for demand in place_run(run, list_planned_nodes(run)).demands}

    assert set(place(cores).values()) == {1} and len(place(cores)) == 5
    assert place(16)["trainer"] == 3 and place(32)["trainer"] == 10
    for num_cores, cluster in ((4, {}), (cores, {"trainer": {"cores": cores}})):
        with pytest.raises(ClusterTooSmall, match="no room for"):
            place(num_cores, **cluster)


def build_run(model: str | dict[str, Any], **more) -> RunConfig:
    model = {"name": model} if isinstance(model, str) else model
    return RunConfig.model_validate({"train": [TRAIN], "model": model, "seq_len": 256, **more})


def test_a_run_that_needs_too_much_memory_is_refused_with_what_would_fit():
    with pytest.raises(ClusterTooSmall, match=r"not enough memory: GPU 0 has 80.0 GiB, the run needs about \d+"):
        plan_run(build_run("org/Some-32B"), [build_machine(2)])
    with pytest.raises(ClusterTooSmall, match=r"not enough memory: this machine has .*(?s:.)* --assume-gpus 8x80"):
        plan_run(build_run("org/Some-32B"), [build_machine()])
    with pytest.raises(
        ClusterTooSmall, match=r"with --trainer.lora.enabled true \(at least \d+.\d GiB of a GPU\), or with .* on"
    ):
        plan_run(build_run("org/Some-4B"), [build_machine(1, gpu_gib=40)])
    with pytest.raises(ClusterTooSmall, match=r"it would fit with a smaller model, or with vLLM engines of several"):
        plan_run(build_run("org/Some-700B"), [build_machine(8)])


def test_advice_does_not_ask_for_gpus_that_are_not_there():
    with pytest.raises(ClusterTooSmall) as caught:
        plan_run(build_run("org/Some-14B"), [build_machine(1, gpu_gib=24)])
    assert "tensor_parallel" not in caught.value.message
    assert re.search(
        r"--trainer.lora.enabled true .*\(--assume-gpus 2x24\) \(at least [12]\d.\d GiB of a GPU\)",
        caught.value.message,
    )
    with pytest.raises(ClusterTooSmall, match=r"it would fit with a smaller model, or with larger GPUs\n"):
        plan_run(build_run("org/Some-700B"), [build_machine(1)])


def test_more_gpus_for_the_trainer_are_advised_where_its_machine_has_them():
    with pytest.raises(ClusterTooSmall, match=r"or with --launch.trainer_gpus 3 \(at least [56]\d\.\d GiB of a GPU\)"):
        plan_run(build_run("org/Some-8B"), [build_machine(4)])


def test_a_base_in_4_bits_is_advised_where_trainer_and_engine_then_fit():
    advised = r"would fit with --trainer.lora.enabled true --model.quantize 4bit \(at least 1\d\.\d GiB of a GPU\)"
    with pytest.raises(ClusterTooSmall, match=advised):
        plan_run(build_run("org/Some-8B"), [build_machine(1, gpu_gib=24)])
    lora = {"trainer": {"lora": {"rank": 16}}}
    for more in ({"weights": {"adapters": "merged"}}, {"inference": {"engine": "vllm"}}):
        run = build_run({"name": "org/Some-8B", "quantize": "4bit"}, **lora, **more)
        with pytest.raises(ClusterTooSmall, match="not enough memory"):  # their engines are in bfloat16
            plan_run(run, [build_machine(1, gpu_gib=24)])


def read_advice(run: RunConfig, machine: ClusterNode) -> str:
    """Return what would fit, as a run that does not fit the machine is refused with it."""
    with pytest.raises(ClusterTooSmall) as caught:
        plan_run(run, [machine])
    return next(line for line in caught.value.message.splitlines() if line.startswith("it would fit with"))


def test_a_setting_that_saves_nothing_is_not_advised():
    advice = read_advice(build_run("org/Some-30B-A3B", seq_len=2048), build_machine(1))
    assert "with --trainer.lora.enabled true on 2 GPUs (--assume-gpus 2x80)" in advice
    assert "quantize" not in advice  # experts are not quantized
    trainer = {"pack_tokens": 16384, "recompute_layers": 0}
    advice = read_advice(build_run("org/Some-8B", seq_len=2048, trainer=trainer), build_machine(1, gpu_gib=60))
    assert "with --trainer.pack_tokens auto --trainer.lora.enabled true (" in advice


def test_the_fewest_gpus_of_a_larger_machine_are_advised():
    advice = read_advice(build_run("org/Some-8B", seq_len=2048), build_machine(1))
    assert "with --launch.gpu_placement colocated on 3 GPUs (--assume-gpus 3x80) (at least 7" in advice
    assert advice.endswith(", or with these settings on 6 GPUs (--assume-gpus 6x80) (at least 58.5 GiB of a GPU)")
    undivided = build_run("org/Some-8B", seq_len=2048, launch={"gpu_placement": "split"})
    assert re.findall(r"on \d GPUs", read_advice(undivided, build_machine(2))) == ["on 6 GPUs"]


def test_another_division_is_not_advised_on_a_larger_machine_if_one_of_this_machine_fits():
    advice = read_advice(build_run("org/Some-8B", seq_len=2048), build_machine(4))
    assert re.findall(r"trainer_gpus \d|on \d GPUs", advice) == ["trainer_gpus 3", "on 6 GPUs"]


def test_advice_is_not_repeated_with_more_settings():
    run = build_run("org/Some-4B", trainer={"pack_tokens": 16384, "recompute_layers": 0})
    with pytest.raises(ClusterTooSmall) as caught:
        plan_run(run, [build_machine(1, gpu_gib=80)])
    assert caught.value.message.count("--trainer.pack_tokens auto") == 1
    assert "--trainer.recompute_layers auto" not in caught.value.message


def test_a_shorter_seq_len_is_suggested():
    run = build_run("org/Some-4B", seq_len=131072)
    with pytest.raises(
        ClusterTooSmall, match=r"--seq_len (65536|32768|16384|8192|4096) \(at least \d+.\d GiB of a GPU\)"
    ):
        plan_run(run, [build_machine(1, gpu_gib=80)])


def test_the_fastest_sizes_that_fit_are_chosen_and_explained():
    run = build_run("org/Some-4B", seq_len=2048)
    planned, placement = plan_run(run, [build_machine(1, gpu_gib=140)])
    trainer, inference = planned.trainer, planned.inference
    assert (trainer.optim.moments, trainer.recompute_layers) == ("float32", 0)
    assert trainer.pack_tokens >= 8192
    assert (inference.max_running_requests, inference.max_num_batched_tokens) == (256, 8192)
    assert inference.kv_cache_tokens in (64 * 2048, 128 * 2048, 256 * 2048)
    lines = format_plan(planned, placement)
    for key in (
        "trainer.pack_tokens",
        "trainer.recompute_layers",
        "trainer.optim.moments",
        "inference.kv_cache_tokens",
    ):
        assert any(line.startswith(f"{key} = ") for line in lines), key
    header = next(line for line in lines if "headroom" in line)
    assert "weights  moments  gradients  activations  keys and values  workspace  headroom  total" in header
    cells = [float(cell) for cell in lines[lines.index(header) + 1].split()[2:]]
    assert sum(cells[:-1]) == pytest.approx(cells[-1], abs=0.3)
    assert cells[-1] == 140 and cells[-2] >= 0.05 * 140 - 0.1


def test_packs_are_larger_than_16k_only_where_they_take_no_gpu_from_engines():
    run = build_run("org/Some-500M", seq_len=2048)
    plans = [plan_run(run, [build_machine(num_gpus, gpu_gib=140)])[0] for num_gpus in (1, 2)]
    assert [planned.trainer.pack_tokens for planned in plans] == [49_152, 16_384]


def test_a_model_that_is_guessed_from_its_name_is_noted():
    note = "note: the size of org/Some-4B is guessed from its name, so its memory can be off by a tenth or more; "
    note += "'ramify model fetch org/Some-4B' makes it exact"
    assert note in format_plan(*plan_run(build_run("org/Some-4B"), [build_machine(1)]))
    with pytest.raises(ClusterTooSmall, match=re.escape(f"\n{note}")):
        plan_run(build_run("org/Some-4B"), [build_machine(1, gpu_gib=8)])
    lines = format_plan(*plan_run(build_run("tiny"), [build_machine(1)]))
    assert not any("guessed" in line for line in lines)
    lines = format_plan(*plan_run(build_run("./missing-4B"), [build_machine(1)]))
    assert (
        "note: the size of ./missing-4B is guessed from its name, so its memory can be off by a tenth or more" in lines
    )


def test_a_pack_holds_the_longest_path():
    planned, _ = plan_run(build_run("org/Some-4B", seq_len=20000), [build_machine(1, gpu_gib=140)])
    assert planned.trainer.pack_tokens >= 20096


def test_more_recomputed_layers_than_the_model_has_are_refused():
    for name, is_known in (("tiny", True), ("org/Some-600M", False)):
        run = build_run(name, trainer={"recompute_layers": 1000})
        if is_known:
            with pytest.raises(ConfigInvalid, match=r"trainer\.recompute_layers: the model has \d+ layers, got 1000"):
                plan_run(run, [build_machine(1)])
        else:
            plan_run(run, [build_machine(1)])


def test_the_engine_of_the_model_at_the_start_is_sized_for_its_few_requests():
    penalized = {**TRAIN, "algorithm": {"id": "grpo", "beta": 0.1}, "reference": "start"}
    run = build_run("org/Some-2B", train=[penalized])
    planned, placement = plan_run(run, [build_machine(1)])
    engine = planned.all_models["start"].inference
    assert engine.max_running_requests == 64 and engine.kv_cache_tokens <= 64 * 257
    assert planned.identity == run.identity
    sizes = {demand.name: demand.gpu_memory for demand in placement.demands}
    assert sizes["models/start"] < sizes["inference/0"]


def test_a_run_on_a_cpu_is_not_changed():
    run = build_run("tiny")
    planned, _ = plan_run(run, [build_machine()])
    assert (planned.trainer, planned.inference) == (run.trainer, run.inference)


MODELS = ["org/Some-600M", "org/Some-2B", "org/Some-4B", "org/Some-8B", "org/Some-14B"]
USER_SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "trainer.pack_tokens": st.sampled_from([1024, 4096, 40960]),
        "trainer.recompute_layers": st.integers(0, 40),
        "trainer.optim.moments": st.sampled_from(["float32", "8bit"]),
        "trainer.lora.rank": st.sampled_from([8, 64]),
        "inference.kv_cache_tokens": st.integers(1000, 10**6),
        "inference.max_running_requests": st.integers(1, 1000),
        "inference.max_num_batched_tokens": st.integers(1000, 16384),
        "orchestrator.group_size": st.sampled_from([4, 64]),
    },
)


@given(
    st.sampled_from(MODELS),
    st.sampled_from([24, 48, 80, 140]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([512, 2048, 8192, 32768]),
    USER_SETTINGS,
)
def test_parts_of_a_plan_fit_the_gpu_and_what_the_user_set_is_kept(model, gib, num_gpus, seq_len, settings):
    table: dict[str, Any] = {}
    for key, value in settings.items():
        *path, name = key.split(".")
        section = functools.reduce(lambda part, word: part.setdefault(word, {}), path, table)
        section[name] = value
    run = build_run(model, **{"seq_len": seq_len, **table})
    try:
        planned, placement = plan_run(run, [build_machine(num_gpus, gpu_gib=gib, memory_gib=2000)])
    except ClusterTooSmall as error:
        assert "it would fit with " in error.message
        return
    for key, value in settings.items():
        assert functools.reduce(getattr, key.split("."), planned) == value, key
    assert planned.trainer.pack_tokens >= seq_len or "trainer.pack_tokens" in settings
    uses = placement.list_gpu_use()
    assert uses
    for _, use, memory in uses:
        assert use.with_headroom <= memory + 8 and min(dataclasses.astuple(use)) >= 0
    assert sum(use.kv_cache for _, use, _ in uses) > 0


def describe_fit(run: RunConfig, num_gpus: int, gib: int) -> str:
    """Return how a run fits these GPUs, as the table of docs/memory.md says it."""
    try:
        planned, placement = plan_run(run, [build_machine(num_gpus, gpu_gib=gib, memory_gib=2000)])
    except ClusterTooSmall:
        return "–"
    words = ["yes" if planned.trainer.lora.enabled else planned.trainer.optim.moments]
    words += ["recompute"] * (planned.trainer.recompute_layers != 0)
    if num_gpus > 1:
        num_ranks = sum(demand.num_ranks for demand in placement.demands if demand.name == "trainer")
        num_engines = sum(demand.name.startswith("inference") for demand in placement.demands)
        words.append(f"{num_ranks} + {num_engines} GPUs")
    return ", ".join(words)


def test_the_documented_models_fit_their_gpus():
    page = (ROOT / "docs" / "memory.md").read_text("utf-8")
    machines = [(int(number), int(gib)) for number, gib in re.findall(r" (\d+) × (\d+) GiB \|", page)]
    assert machines == [(1, 24), (1, 80), (1, 140), (8, 80)]
    rows = re.findall(r"^\| ([\d.]+) (B\S*), (all weights|LoRA|LoRA, 4bit) \| (.*) \|$", page, re.MULTILINE)
    kinds = {size: [kind for other, _, kind, _ in rows if other == size] for size in ("0.6", "1.7", "4", "8", "30")}
    assert kinds == {size: ["all weights", "LoRA", *(["LoRA, 4bit"] * (size == "8"))] for size in kinds}
    for size, unit, kind, cells in rows if FULL else rows[::3]:  # a row takes a third of a second
        trainer = {"lora": {"rank": 16}} if kind.startswith("LoRA") else {}
        model = {"name": f"org/Some-{size}{unit}", "quantize": "4bit" if kind.endswith("4bit") else None}
        run = build_run(model=model, seq_len=2048, trainer=trainer)
        assert " | ".join(describe_fit(run, *machine) for machine in machines) == cells, (size, kind)


def test_copies_of_shared_weights_are_counted():
    for num_gpus, element_bytes, lora in ((0, 4, False), (1, 2, False), (1, 2, True)):
        trainer, adapters = {"lora": {"enabled": lora}}, {"adapters": "merged"} if lora else {}
        disk, ipc = (
            place_run(
                build_run("org/Some-1B", weights={"transport": transport, **adapters}, trainer=trainer),
                [build_machine(num_gpus, memory_gib=256)],
            )
            for transport in ("disk", "ipc")
        )
        more = {name: used - before for (name, used, _), (_, before, _) in zip(ipc.list_memory(), disk.list_memory())}
        copy = pytest.approx(element_bytes * 10**9, rel=0.06)  # in host memory, and of merged weights on a GPU
        assert more == ({"GPU 0": copy if lora else 0} if num_gpus else {}) | {"this machine": copy}


@pytest.mark.parametrize(
    ("num_gpus", "gib", "moments"), [(1, 80, "float32"), (1, 34, "8bit"), (1, 140, "float32"), (0, 0, "auto")]
)
def test_moments_have_8_bits_where_float32_does_not_fit_and_8_bits_do(tmp_path, num_gpus, gib, moments):
    planned, reasons = plan_sizes(build_run("org/Some-2B", output=tmp_path), [build_machine(num_gpus, gpu_gib=gib)])
    assert planned.trainer.optim.moments == moments
    (reason,) = [line for line in reasons if line.startswith("trainer.optim.moments")] or [""]
    reached = r"float32: it fits|8bit: float32 does not fit, it needs at least \d\d\.\d GiB of a GPU"
    assert re.fullmatch(rf"trainer\.optim\.moments = ({reached})", reason) or not num_gpus


def test_what_the_user_set_is_listed_with_the_chosen_sizes():
    inference, trainer = {"kv_cache_tokens": 65536}, {"pack_tokens": 4096}
    _, reasons = plan_sizes(build_run("org/Some-2B", inference=inference, trainer=trainer), [build_machine(1)])
    assert "trainer.pack_tokens = 4096: as configured" in reasons
    assert "inference.kv_cache_tokens = 65536: as configured" in reasons
    assert any(line.startswith("trainer.recompute_layers = 0: of ") for line in reasons)


@pytest.mark.process  # the plan says whether vLLM is installed
def test_vllm_beside_the_trainer_gets_what_the_trainer_leaves():
    def plan(gib: float, **inference) -> tuple[RunConfig, MemoryUse, list[str]]:
        run = build_run("org/Some-4B", seq_len=2048, inference={"engine": "vllm", **inference}, trainer=LORA)
        planned, placement = plan_run(run, [build_machine(1, gpu_gib=gib)])
        (_, use, memory), lines = placement.list_gpu_use()[0], format_plan(planned, placement)
        assert use.with_headroom <= memory
        engine, trainer = placement.get_demand("inference/0"), placement.get_demand("trainer")
        fraction = planned.inference.gpu_memory_utilization
        assert engine.memory_use.total == pytest.approx(fraction * memory, rel=0.01)
        assert trainer.gpu_memory + fraction * memory <= memory
        return planned, engine.memory_use, lines

    small, small_use, lines = plan(24)
    large, large_use, _ = plan(140)
    assert small_use.kv_cache < large_use.kv_cache and small_use.weights == large_use.weights
    assert small.inference.max_running_requests <= large.inference.max_running_requests == 256
    assert large.trainer.recompute_layers == 0 and large.inference.gpu_memory_utilization < 0.6
    fraction = small.inference.gpu_memory_utilization
    (reason,) = [line for line in lines if line.startswith("inference.gpu_memory_utilization = ")]
    assert reason.startswith(f"inference.gpu_memory_utilization = {fraction}: weights, buffers and a KV cache of ")
    configured, _, lines = plan(80, gpu_memory_utilization=0.55, max_running_requests=32)
    assert (configured.inference.gpu_memory_utilization, configured.inference.max_running_requests) == (0.55, 32)
    assert "inference.gpu_memory_utilization = 0.55: as configured" in lines


def test_vllm_on_gpus_of_its_own_holds_its_requests_at_full_length():
    run = build_run("org/Some-8B", seq_len=4096, inference={"engine": "vllm", "tensor_parallel": 2})
    planned, placement = plan_run(run, [build_machine(8)])
    use, size = placement.get_demand("inference/0").memory_use, ModelSize.from_name("org/Some-8B")
    token_bytes = size.num_kv_layers * size.kv_elements * 2 // 2
    assert use.weights == 8 * 10**9 and 0 < planned.inference.gpu_memory_utilization <= 0.95
    assert use.kv_cache >= planned.inference.max_running_requests * 4096 * token_bytes


def test_vllm_on_a_gpu_that_is_too_small_for_its_requests_runs_as_many_as_a_native_engine():
    planned, uses = {}, {}
    for engine in ("native", "vllm"):
        run = build_run("org/Some-4B", seq_len=16384, inference={"engine": engine})
        plan, placement = plan_run(run, [build_machine(2)])
        planned[engine], uses[engine] = plan.inference, placement.get_demand("inference/0").memory_use
    native, vllm = planned["native"], planned["vllm"]
    assert 64 < vllm.max_running_requests == native.max_running_requests < 256
    assert vllm.gpu_memory_utilization < 0.95 and uses["vllm"].kv_cache >= uses["native"].kv_cache


def test_vllm_that_holds_few_requests_gets_all_of_its_gpu():
    model, trainer = {"name": "org/Some-8B", "quantize": "4bit"}, {**LORA, "pack_tokens": 4096}
    run = build_run(model, seq_len=32768, inference={"engine": "vllm"}, trainer=trainer)
    planned, placement = plan_run(run, [build_machine(2, gpu_gib=24)])
    assert (planned.inference.gpu_memory_utilization, planned.inference.max_running_requests) == (0.95, 64)
    use, size = placement.get_demand("inference/0").memory_use, ModelSize.from_name("org/Some-8B")
    path_bytes = 32768 * size.num_kv_layers * size.kv_elements * 2
    assert path_bytes <= use.kv_cache < 2 * path_bytes


@pytest.mark.process  # the plan says whether vLLM is installed
def test_vllm_with_an_unknown_model_has_the_default_fraction():
    planned, placement = plan_run(build_run("org/unknown", inference={"engine": "vllm"}), [build_machine(1)])
    assert (planned.inference.gpu_memory_utilization, planned.inference.memory_fraction) == ("auto", 0.4)
    assert not any("gpu_memory_utilization" in line for line in format_plan(planned, placement))


def test_advice_for_vllm_is_the_fraction_that_fits():
    run = build_run("org/Some-4B", inference={"engine": "vllm", "gpu_memory_utilization": 0.8}, trainer=LORA)
    with pytest.raises(ClusterTooSmall, match=r"--inference.gpu_memory_utilization auto \(at least \d+.\d GiB"):
        plan_run(run, [build_machine(1, gpu_gib=40)])


def test_one_gpu_is_not_explained_by_a_limit_of_one_rank():
    run = build_run("org/Some-2B", trainer={"optim": {"moments": "8bit"}})
    for num_gpus, is_explained in ((1, False), (2, False), (8, True)):
        _, placement = plan_run(run, [build_machine(num_gpus)])
        assert any("moments in 8 bits need" in reason for reason in placement.reasons) == is_explained


def test_an_allocation_that_fits_with_8_bits_is_accepted(tmp_path):
    cluster = {"launcher": "ray", "node": {"cores": 16, "gpus": 2, "gpu_memory_gib": 30}}
    run = build_run("org/Some-2B", output=tmp_path, cluster=cluster)
    check_allocation(run)
    assert plan_sizes(run, list_planned_nodes(run))[0].trainer.optim.moments == "8bit"


def write_manifest(run: RunConfig, optimizer: str) -> None:
    """Write the manifest of a checkpoint that this optimizer wrote."""
    checkpoint = run.path / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    CheckpointManifest(step=1, optimizer=optimizer, note={}, files={}).write(checkpoint)


@pytest.mark.parametrize(
    ("saved", "optim", "key", "problem"),
    [
        ("adamw", {"moments": "8bit"}, "trainer.optim.moments", "expected 'float32' or 'auto'"),
        ("adamw-8bit", {"moments": "float32"}, "trainer.optim.moments", "expected '8bit' or 'auto'"),
        ("adamw", {"type": "muon"}, "trainer.optim.type", "expected 'adamw'"),
    ],
)
@pytest.mark.parametrize("num_gpus", [0, 1])
def test_a_run_with_checkpoints_refuses_another_optimizer(saved, optim, key, problem, num_gpus, tmp_path):
    run, nodes = build_run("org/Some-1B", output=tmp_path, trainer={"optim": optim}), [build_machine(num_gpus)]
    write_manifest(run, saved)
    with pytest.raises(ConfigInvalid, match=f"{key}: {problem}, as in the run's checkpoints, got"):
        plan_sizes(run, nodes)
    plan_sizes(run, nodes, fresh=True)


def test_checkpoints_on_this_machine_count_for_a_job_only_if_they_are_shared(tmp_path):
    cluster = {"launcher": "ray", "node": {"cores": 16, "gpus": 2, "gpu_memory_gib": 30}}
    run = build_run("org/Some-1B", output=tmp_path, cluster=cluster)
    write_manifest(run, "muon")
    check_allocation(run)
    shared = build_run("org/Some-1B", output=tmp_path, cluster={**cluster, "shared_directory": tmp_path})
    with pytest.raises(ConfigInvalid, match=r"trainer\.optim\.type: expected 'muon'"):
        check_allocation(shared)


def test_moments_continue_as_in_the_checkpoints_unless_the_run_starts_over(tmp_path):
    run, nodes = build_run("org/Some-1B", output=tmp_path), [build_machine(8)]
    write_manifest(run, "adamw-8bit")
    planned, reasons = plan_sizes(run, nodes)
    assert planned.trainer.optim.moments == "8bit"
    assert "trainer.optim.moments = 8bit: as in the run's checkpoints" in reasons
    assert plan_sizes(run, nodes, fresh=True)[0].trainer.optim.moments == "float32"


def test_8_bits_are_neither_chosen_nor_advised_for_several_ranks(tmp_path):
    run, nodes = build_run("org/Some-8B", launch={"trainer_gpus": 2}, output=tmp_path), [build_machine(4, gpu_gib=34)]
    assert plan_sizes(run, nodes)[0].trainer.optim.moments == "float32"
    with pytest.raises(ClusterTooSmall, match=r"it would fit with .*--trainer.lora.enabled true") as caught:
        plan_run(run, nodes)
    assert "8bit" not in caught.value.message


def test_weights_in_shared_memory_are_counted_as_memory_of_the_host():
    def count_memory(transport: str) -> int:
        run = build_run("org/Some-1B", weights={"transport": transport})
        return place_run(run, [build_machine(2, memory_gib=256)]).get_demand("trainer").memory

    assert count_memory("shm") - count_memory("disk") == pytest.approx(4 * 2 * 10**9, rel=0.01)
    planned, _ = plan_run(build_run("org/Some-1B"), [build_machine(2, memory_gib=8)])
    assert planned.weights.transport == "disk"


def test_engines_on_more_gpus_than_the_trainer_are_not_all_beside_it():
    trainer = {"optim": {"moments": "8bit"}}
    run = build_run("org/Some-1B", launch={"gpu_placement": "colocated"}, trainer=trainer)
    _, placement = plan_run(run, [build_machine(4)])
    assert (
        "inference: 4 engines of 1 GPU each, on all GPUs, also beside the trainer, as configured" in placement.reasons
    )


@pytest.mark.parametrize("key", ["trainer_gpus", "inference_gpus"])
def test_too_many_gpus_are_reported_by_the_key_that_was_set(key):
    with pytest.raises(ClusterTooSmall, match=rf"\n  launch.{key}: "):
        plan_run(build_run("tiny", launch={key: 8}), [build_machine(4)])


def test_paths_longer_than_a_pack_are_warned_about_not_refused():
    def find_warning(num_gpus: int, seq_len: int) -> str | None:
        run = build_run("org/Some-2B", seq_len=seq_len, trainer={"pack_tokens": 16384})
        return find_long_path_warning(run, place_run(run, [build_machine(num_gpus)]))

    assert find_warning(2, 16384) is None
    warnings = [find_warning(num_gpus, 40000) for num_gpus in (2, 4, 8)]  # the trainer has one rank on each of them
    assert warnings[0] == warnings[1] == warnings[2]
    assert warnings[0] is not None and "GPU 0 has 80.0 GiB, the run needs about" in warnings[0]


@pytest.fixture
def run_file(tmp_path, monkeypatch, check_plugins_in_process):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(
        'name = "run"\nseq_len = 256\n[[train]]\nname = "reverse"\ntaskset = { id = "reverse-text" }\n'
        '[cluster]\nnum_nodes = 2\nshared_directory = "/shared"\nnode = { cores = 8, gpus = 2, memory_gib = 16 }\n'
        "trainer = { num_ranks = 2 }\n"
    )
    return "run.toml"


def test_a_dry_run_prints_who_runs_where(run_file, capsys):
    assert main(["rl", "@", run_file, "--cluster", "ray", "--dry-run"]) == 0
    first, step, origin, *lines = capsys.readouterr().out.splitlines()
    assert first == "run outputs/run: tiny, 100 steps"
    assert step == "step: 8 groups, about 128 rollouts (reverse: groups of 16)"
    assert origin.startswith("nodes as in [cluster.node], because cluster.")
    assert lines[:11] == [
        "",
        "node-0 (node-0, head): 2 GPUs of 80 GiB, 8 cores, 16 GiB",
        "  orchestrator: 1 core, 0.3 GiB of memory",
        "  inference/0: 1 GPU, 2 cores, 1.0 GiB of memory, 1.2 GiB of GPU memory per GPU",
        "  inference/1: 1 GPU, 2 cores, 1.0 GiB of memory, 1.2 GiB of GPU memory per GPU",
        "  env/train/reverse/1: 2 cores, 0.4 GiB of memory",
        "",
        "node-1 (node-1): 2 GPUs of 80 GiB, 8 cores, 16 GiB",
        "  trainer rank 0: 1 GPU, 2 cores, 1.0 GiB of memory, 1.5 GiB of GPU memory per GPU",
        "  trainer rank 1: 1 GPU, 2 cores, 1.0 GiB of memory, 1.5 GiB of GPU memory per GPU",
        "  env/train/reverse/0: 2 cores, 0.4 GiB of memory",
    ]


def test_a_dry_run_lists_everything_that_does_not_fit(run_file, capsys):
    args = ["--cluster.trainer.num_ranks", "5", "--cluster.env_servers.cores", "32"]
    assert main(["rl", "@", run_file, "--cluster", "ray", "--dry-run", *args]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ClusterTooSmall: the run does not fit the cluster:")
    assert "cluster.trainer: trainer: 4 of 5 ranks fit" in error and "no room for env/train/reverse/0" in error
    assert "\n  nodes as in [cluster.node], because cluster." in error


def test_a_dry_run_says_how_many_nodes_have_joined_and_plans_the_others(run_file, capsys, monkeypatch):
    monkeypatch.setattr("ramify.launch.ray_launcher.connect_to_ray", lambda address: StubRay("a"))
    assert main(["rl", "@", run_file, "--cluster", "ray", "--dry-run", "--cluster.trainer.num_ranks", "1"]) == 0
    _, _, origin, *lines = capsys.readouterr().out.splitlines()
    assert origin == (
        "nodes of the Ray cluster at 'auto'; 1 of 2 nodes have joined (a); "
        "the run would wait up to 600 s for the others, planned as in [cluster.node]"
    )
    assert {"a (a, head): 0 GPUs, 4 cores", "node-1 (node-1): 2 GPUs of 80 GiB, 8 cores, 16 GiB"} <= set(lines)


def test_a_dry_run_on_ray_plans_with_the_configured_memory_of_a_gpu(run_file, capsys, monkeypatch):
    ray = StubRay("a", "b")
    ray.num_gpus = 2
    monkeypatch.setattr("ramify.launch.ray_launcher.connect_to_ray", lambda address: ray)
    command = ["rl", "@", run_file, "--cluster", "ray", "--dry-run", "--cluster.env_servers.cores", "1"]
    assert main(command) == 0
    output, note = capsys.readouterr().out, "note: each GPU is assumed to have 80 GiB, which Ray does not report"
    assert "a (a, head): 2 GPUs of 80 GiB, 4 cores" in output
    assert f"{note}; set cluster.node.gpu_memory_gib" in output
    assert main([*command, "--cluster.node.gpu_memory_gib", "1.05"]) == 2
    error = capsys.readouterr().err
    assert "has 1.0 GiB, the run needs about" in error and "assumed" not in error


def test_a_dry_run_says_what_other_jobs_use(run_file, capsys, monkeypatch):
    ray = StubRay("a", "b")
    ray.used_cores = 3
    monkeypatch.setattr("ramify.launch.ray_launcher.connect_to_ray", lambda address: ray)
    args = ["--cluster.trainer.num_ranks", "1", "--cluster.env_servers.cores", "1"]
    assert main(["rl", "@", run_file, "--cluster", "ray", "--dry-run", *args]) == 0
    usage = "other Ray jobs use 0 GPUs and 3 cores, and 0 GPUs and 5 cores are free"
    origin = "nodes of the Ray cluster at 'auto', planned as if they were free"
    assert capsys.readouterr().out.splitlines()[2] == f"{origin}: {usage}"


def test_versions_of_unmerged_adapters_are_small():
    model = ModelSize.from_name("org/Some-4B")
    assert model is not None
    lora = {"train": [TRAIN], "trainer": {"lora": {"rank": 8}}}
    runs = [RunConfig.model_validate({**lora, "weights": {"adapters": key}}) for key in ("merged", "unmerged")]
    merged, unmerged = (count_version_bytes(run, model, gpu=True) for run in runs)
    assert merged == 8 * 10**9 and 10**7 < unmerged < merged // 100
