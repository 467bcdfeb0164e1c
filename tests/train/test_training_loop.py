"""`ramify trainer`: every batch is trained once in the history, even if the trainer is killed; recordings replay."""

import contextlib
import os
import re
import threading
from pathlib import Path
from random import Random

import pytest
from safetensors.numpy import load_file

from ramify.cli import main
from ramify.core.errors import ConfigInvalid, DataCorrupt, DeadlineExceeded, PeerRefused, ProcessReplaced
from ramify.model import Manifest
from ramify.trace import PolicyVersion
from ramify.train import remote_batch_source
from ramify.train.batch import Batch, PackSpec, split_across_ranks
from ramify.train.batch_codec import encode_batch
from ramify.train.batch_source import BatchRecording, ReplayBatchSource
from ramify.train.remote_batch_source import RemoteBatchSource
from tests.support.runs import FULL
from tests.support.trainer import TIMEOUT, FakeOrchestrator, context, run_ranks
from tests.support.training import random_batches

pytestmark = pytest.mark.process

STEPS, KILLS = (9, 10) if FULL else (5, 2)


def arguments(model: Path, output: Path, *flags: str) -> list[str]:
    settings = ["--trainer.threads", "1", "--trainer.pack_tokens", "128", "--trainer.optim.lr", "1e-3"]
    settings += ["--trainer.device", "cpu"]  # a GPU adds gradients in any order: equal weights are only expected here
    return ["trainer", "-m", str(model), "-o", str(output), "--checkpoint.interval", "2", *settings, *flags]


def run_trainer(args: list[str]) -> None:
    raise SystemExit(main(args))


def start_trainer(args: list[str]):
    process = context.Process(target=run_trainer, args=(args,), daemon=True)
    process.start()
    return process


def wait_for_exit(process) -> int | None:
    process.join(TIMEOUT)
    process.kill()
    return process.exitcode


def final_weights(output: Path) -> dict:
    newest = max(output.glob("trainer/weights/*"), key=lambda path: tuple(map(int, path.name.split("-"))))
    return load_file(newest / "model.safetensors")


@pytest.mark.promise
def test_a_killed_trainer_restarts_at_the_commit_and_ends_with_the_same_weights(model, tmp_path):
    batches = random_batches(STEPS)
    with FakeOrchestrator(batches) as calm:
        assert wait_for_exit(start_trainer(arguments(model, tmp_path / "calm", "--address", calm.address))) == 0
    assert calm.commits == [*range(2, STEPS, 2), STEPS]
    assert [version for version, _ in calm.published] == [("p", 0, step) for step in range(STEPS + 1)]
    assert len(list((tmp_path / "calm").glob("trainer/weights/*"))) == 1  # no engine needs the others
    kept = [f"step_{step:06}-0" for step in (STEPS - 1, STEPS)]
    assert sorted(path.name for path in (tmp_path / "calm").glob("trainer/checkpoints/*")) == kept

    rng = Random(3)
    with FakeOrchestrator(batches) as chaos:
        args = arguments(model, tmp_path / "chaos", "--address", chaos.address)
        for number in range(KILLS):
            first = chaos.committed
            goal = chaos.last_step = min(first + rng.randint(1, 3), STEPS - 1)
            process = start_trainer(args)
            chaos.wait_for(lambda number=number, goal=goal: (number, goal - 1) in chaos.trained)
            process.kill()
            process.join()
        chaos.last_step = None
        assert wait_for_exit(start_trainer(args)) == 0
    history = dict(sorted((step, loss) for (_, step), loss in sorted(chaos.trained.items())))
    assert history == {step: loss for (_, step), loss in calm.trained.items()}  # exactly, the last time each step ran
    for number in range(KILLS + 1):
        steps = [step for incarnation, step in chaos.served if incarnation == number]
        assert steps == list(range(steps[0], steps[0] + len(steps)))  # in order, from the commit on
    assert {version[1] for version, _ in chaos.published} == set(range(KILLS + 1))
    actual, expected = final_weights(tmp_path / "chaos"), final_weights(tmp_path / "calm")
    assert all((actual[name] == expected[name]).all() for name in expected)


def run_with_stderr_in_file(args: list[str], directory: Path) -> None:
    with (directory / os.environ["RANK"]).open("w") as file, contextlib.redirect_stderr(file):
        main(args)


@pytest.mark.promise
def test_two_ranks_are_one_trainer_until_a_batch_is_refused_to_one(model, tmp_path):
    class RefusingOrchestrator(FakeOrchestrator):
        def _batch(self, request):
            if request.step == 2 and request.rank == 1:
                raise PeerRefused("not for you")
            return super()._batch(request)

    batches = random_batches(3)
    with RefusingOrchestrator(batches) as two:
        args = arguments(model, tmp_path / "two", "--address", two.address)
        run_ranks(2, run_with_stderr_in_file, args, tmp_path, gang="3")
    assert ["PeerRefused: not for you" in (tmp_path / rank).read_text() for rank in "01"] == [True, True]
    with FakeOrchestrator(batches[:2]) as one:
        assert wait_for_exit(start_trainer(arguments(model, tmp_path / "one", "--address", one.address))) == 0
    assert (two.incarnation, two.world_size, two.commits) == (0, 2, [2])
    assert [version for version, _ in two.published] == [version for version, _ in one.published]
    assert sorted(served for served in two.served if served[1] < 2) == sorted(one.served * 2)
    assert two.trained == pytest.approx(one.trained, rel=1e-5)
    actual, expected = final_weights(tmp_path / "two"), final_weights(tmp_path / "one")
    assert all(abs(actual[name] - expected[name]).max() <= 1e-4 for name in expected)


def test_a_version_is_kept_while_an_engine_needs_it_and_may_be_in_shared_memory(model, tmp_path):
    with FakeOrchestrator(random_batches(3)) as orchestrator:
        orchestrator.needed = [("p", 0, 1)]
        args = arguments(model, tmp_path, "--address", orchestrator.address, "--weights.transport", "shm")
        assert wait_for_exit(start_trainer(args)) == 0
    directory = Path(orchestrator.published[0][1]).parent
    try:
        assert directory.parent == Path("/dev/shm")
        assert sorted(path.name for path in directory.iterdir()) == ["0-000001", "0-000003"]
        assert Manifest.read(directory / "0-000001").version == PolicyVersion("p", 0, 1)
    finally:
        for path in sorted(directory.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        directory.rmdir()


def test_a_recording_replays_forest_and_flat_with_the_same_gradients(model, tmp_path, capsys):
    pack_spec = PackSpec(pack_tokens=128, flops_per_token=1.0)
    recording = BatchRecording(tmp_path / "recorded")
    for batch in random_batches(2):
        for rank, share in enumerate(split_across_ranks(batch, pack_spec, 2)):
            recording.write_share(batch.step, rank, encode_batch(share), 2)
    results = []
    for flat in ([], ["--flat"]):
        args = ["--replay", str(recording.directory), *flat, "--trainer.optim.lr", "1e-9"]
        assert main(arguments(model, tmp_path / "out", *args)) == 0
        out = capsys.readouterr().out
        layout, dtype, operators, registered = out.splitlines()[:4]
        description = "flat: every branch is computed whole" if flat else "forest: shared prefixes are computed once"
        assert layout == description
        assert dtype == "dtype: float32 (the default on a CPU)"
        assert operators == "operators: tree attention in torch"
        assert registered.endswith(f" layout={'flat' if flat else 'forest'}")
        results.append([tuple(map(float, pair)) for pair in re.findall(r"grad_norm=(\S+) .* tokens=(\d+)", out)])
    forest, flat = results
    assert len(forest) == 2
    for (forest_norm, forest_tokens), (flat_norm, flat_tokens) in zip(forest, flat, strict=True):
        assert forest_norm == pytest.approx(flat_norm, rel=1e-4)
        assert forest_tokens < flat_tokens
    assert not (tmp_path / "out").exists()


def test_a_recording_without_batches_or_with_a_missing_step_is_refused(tmp_path):
    with pytest.raises(ConfigInvalid, match="no recorded batches"):
        ReplayBatchSource(BatchRecording(tmp_path))
    for step in (0, 2):
        BatchRecording(tmp_path).write_share(step, 0, b"", 1)
    with pytest.raises(ConfigInvalid, match="no batch of step 1"):
        ReplayBatchSource(BatchRecording(tmp_path))


def test_shares_that_do_not_add_up_to_one_batch_are_refused(tmp_path):
    recording, pack_spec = BatchRecording(tmp_path), PackSpec(pack_tokens=128)
    batch = random_batches(1)[0]
    for world_size in (2, 1):  # a trainer with fewer ranks repeats the step
        for rank, share in enumerate(split_across_ranks(batch, pack_spec, world_size)):
            recording.write_share(0, rank, encode_batch(share), world_size)
    (share,) = recording.read_shares(0)
    assert Batch.from_packs(0, share.packs).entry_counts == batch.entry_counts
    first, second = split_across_ranks(batch, pack_spec, 2)
    recording.write_share(0, 0, encode_batch(first), 2)  # and the other rank was killed before it wrote its share
    with pytest.raises(DataCorrupt, match=r"the shares of step 0 .* one is missing"):
        recording.read_shares(0)
    recording.write_share(0, 1, encode_batch(second)[:-9], 2)
    with pytest.raises(DataCorrupt, match=r"rank_1\.batch"):
        recording.read_shares(0)


def test_newer_checkpoints_stay_if_the_committed_one_cannot_be_loaded(model, tmp_path, capsys):
    newer = tmp_path / "trainer" / "checkpoints" / "step_000004"
    newer.mkdir(parents=True)
    (newer / "checkpoint.json").write_text("{}")
    with FakeOrchestrator(random_batches(3)) as orchestrator:
        orchestrator.committed = 2
        assert main(arguments(model, tmp_path, "--address", orchestrator.address)) == 1
    assert "step_000002/checkpoint.json cannot be read" in capsys.readouterr().err
    assert newer.exists()


@pytest.mark.megabytes(1)
def test_every_failed_save_is_reported_and_the_last_one_fails_the_trainer(model, small_disk, capsys):
    (small_disk / "filler").write_bytes(bytes(700_000))
    args = arguments(model, small_disk, "--checkpoint.interval", "1", "--weights.transport", "shm")
    with FakeOrchestrator(random_batches(2)) as orchestrator:
        assert main([*args, "--address", orchestrator.address]) == 1
        assert orchestrator.committed == 0
        assert list(orchestrator.unsaved) == [1, 2]
        assert "step 1 was not saved: " in orchestrator.unsaved[1]
    assert "StorageFull" in capsys.readouterr().err


def test_steps_are_saved_even_if_the_last_version_cannot_be_written(model, tmp_path, capsys):
    weights = tmp_path / "trainer" / "weights"
    weights.mkdir(parents=True)
    (weights / "0-000001").symlink_to("nowhere")  # exists() is false, and the rename fails
    with FakeOrchestrator(random_batches(1)) as orchestrator:
        args = arguments(model, tmp_path, "--weights.transport", "ipc", "--address", orchestrator.address)
        assert main(args) == 1
        assert orchestrator.committed == 1
    assert "StorageFailed" in capsys.readouterr().err


def test_a_schedule_that_needs_the_number_of_steps_is_refused_before_the_first_step(model, tmp_path, capsys):
    with FakeOrchestrator(random_batches(1)) as orchestrator:
        args = ["--address", orchestrator.address, "--trainer.optim.schedule", '{"type": "linear", "warmup_steps": 9}']
        assert main(arguments(model, tmp_path, *args)) == 2
    assert "needs the total number of steps" in capsys.readouterr().err
    assert not orchestrator.served


def test_calls_may_be_repeated_and_a_replaced_trainer_is_refused():
    with FakeOrchestrator(random_batches(2)) as orchestrator:
        stopped = threading.Event()
        old, new = (RemoteBatchSource(orchestrator.address, timeout=60.0, should_stop=stopped.is_set) for _ in range(2))
        try:
            assert old.register(0, 1, PackSpec(pack_tokens=128), None).incarnation == 0
            first, repeated = (old.get_batch(0) for _ in range(2))
            assert first is not None
            assert repeated is not None
            assert encode_batch(first) == encode_batch(repeated)
            assert old.get_batch(2) is None
            old.commit_checkpoint(1, "step_000001-0", "digest")
            old.commit_checkpoint(1, "step_000001-0", "digest")
            assert new.register(0, 1, PackSpec(pack_tokens=128), None).committed == 1
            with pytest.raises(ProcessReplaced, match="replaced by 1"):
                old.get_batch(1)
            stopped.set()
            assert old.get_batch(1) is None  # a stopped trainer does not wait
        finally:
            old.close()
            new.close()


def test_a_trainer_registers_again_with_a_restarted_orchestrator_under_the_same_incarnation():
    batches = random_batches(2)
    with FakeOrchestrator(batches) as first:
        source = RemoteBatchSource(first.address, timeout=60.0)
        source.register(0, 1, PackSpec(pack_tokens=128), None)
        batch = source.get_batch(0)
        source.report_published(PolicyVersion("p", 0, 1), Path("/weights/0-000001"))
    try:
        restarted = FakeOrchestrator(batches, first.address)
        restarted.incarnation = first.incarnation  # as its ledger would tell
        with restarted:
            repeated = source.get_batch(0)
            assert batch is not None
            assert repeated is not None
            assert encode_batch(repeated) == encode_batch(batch)
            assert (restarted.world_size, restarted.incarnation) == (1, 0)
            assert restarted.published == [(("p", 0, 1), "/weights/0-000001")]  # engines may not have loaded it yet
    finally:
        source.close()


def test_an_orchestrator_that_does_not_answer_fails_the_call_after_the_timeout():
    source = RemoteBatchSource("tcp://127.0.0.1:9", timeout=0.2)
    try:
        with pytest.raises(DeadlineExceeded, match="hello was not answered"):
            source.register(0, 1, PackSpec(), None)
    finally:
        source.close()


def test_a_stopped_trainer_does_not_wait_for_an_orchestrator_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(remote_batch_source, "STOP_TIMEOUT", 0.2)
    source = RemoteBatchSource("tcp://127.0.0.1:9", timeout=3600.0, should_stop=lambda: True)
    try:
        with pytest.raises(DeadlineExceeded, match="stop requested"):
            source.register(0, 1, PackSpec(), None)
    finally:
        source.close()


def test_an_invalid_address_is_refused(capsys):
    for address in ("here", "tcp://127.0.0.1", "http://127.0.0.1:80", "tcp://127.0.0.1:99999"):
        assert main(["trainer", "--address", address, "--dry-run"]) == 2
        assert "address: " in capsys.readouterr().err


def test_a_trainer_needs_exactly_one_batch_source(capsys, tmp_path):
    assert main(["trainer", "-o", str(tmp_path)]) == 2
    assert main(["trainer", "--flat", "--address", "tcp://127.0.0.1:1"]) == 2
    assert "--flat requires --replay" in capsys.readouterr().err
    assert main(["trainer", "--address", "tcp://127.0.0.1:1", "-o", str(tmp_path), "--dry-run"]) == 0
