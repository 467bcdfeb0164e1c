"""`ramify trainer`: what it is asked to train it trains once in the history, whatever kills it; recordings replay."""

import contextlib
import os
import re
from pathlib import Path
from random import Random

import pytest
from safetensors.numpy import load_file

from ramify.cli import main
from ramify.errors import BatchCorrupt, ConfigInvalid, DeadlineExceeded, PeerRefused
from ramify.model import Manifest, PolicyVersion
from ramify.train import remote_batch_source
from ramify.train.batch import Batch, PackSpec, encode_batch, split_across_ranks
from ramify.train.batch_source import BatchRecording, ReplayBatchSource
from ramify.train.remote_batch_source import RemoteBatchSource
from tests.train.batched import random_batches
from tests.train.models import CONFIGS, made
from tests.train.orchestrator import Orchestrator
from tests.train.workers import DEADLINE, context, run_ranks

STEPS = 9
KILLS = 10 if os.environ.get("RAMIFY_FULL") else 2


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("service") / "model"
    made(CONFIGS["llama"], "eager").save_pretrained(path)
    return path


def arguments(model: Path, output: Path, *more: str) -> list[str]:
    settings = ["--trainer.threads", "1", "--trainer.pack_tokens", "128", "--trainer.optim.lr", "1e-3"]
    return ["trainer", "-m", str(model), "-o", str(output), "--checkpoint.interval", "2", *settings, *more]


def run_trainer(args: list[str]) -> None:
    raise SystemExit(main(args))


def start(args: list[str]):
    process = context.Process(target=run_trainer, args=(args,), daemon=True)
    process.start()
    return process


def end(process) -> int | None:
    process.join(DEADLINE)
    process.kill()
    return process.exitcode


def final_weights(path: Path) -> dict:
    newest = max(path.glob("trainer/weights/*"), key=lambda each: tuple(map(int, each.name.split("-"))))
    return load_file(newest / "model.safetensors")


def test_a_killed_trainer_starts_at_the_commit_and_ends_with_the_same_weights(model, tmp_path):
    batches = random_batches(STEPS)
    with Orchestrator(batches) as calm:
        assert end(start(arguments(model, tmp_path / "calm", "--address", calm.address))) == 0
    assert calm.commits == [2, 4, 6, 8, 9]
    assert [version for version, _ in calm.published] == [("p", 0, step) for step in range(STEPS + 1)]
    assert len(list((tmp_path / "calm").glob("trainer/weights/*"))) == 1  # nobody needs the others
    assert [path.name for path in sorted((tmp_path / "calm").glob("trainer/checkpoints/*"))] == [
        "step_000008",
        "step_000009",
    ]

    rng = Random(3)
    with Orchestrator(batches) as chaos:
        args = arguments(model, tmp_path / "chaos", "--address", chaos.address)
        for life in range(KILLS):
            first = chaos.committed
            goal = min(first + rng.randint(1, 4), STEPS - 1)
            process = start(args)
            chaos.wait_for(lambda life=life, goal=goal: (life, goal - 1) in chaos.trained)
            process.kill()
            process.join()
        assert end(start(args)) == 0
    history = dict(sorted((step, loss) for (_, step), loss in sorted(chaos.trained.items())))
    assert history == {step: loss for (_, step), loss in calm.trained.items()}  # exactly, the last time each was done
    for life in range(KILLS + 1):
        steps = [step for incarnation, step in chaos.served if incarnation == life]
        assert steps == list(range(steps[0], steps[0] + len(steps)))  # from the commit on, in order
    assert {version[1] for version, _ in chaos.published} == set(range(KILLS + 1))
    ours, theirs = final_weights(tmp_path / "chaos"), final_weights(tmp_path / "calm")
    assert all((ours[name] == theirs[name]).all() for name in theirs)


def test_two_ranks_are_one_trainer(model, tmp_path):
    batches = random_batches(4)
    with Orchestrator(batches) as two:
        run_ranks(2, run_trainer, arguments(model, tmp_path / "two", "--address", two.address))
    with Orchestrator(batches) as one:
        assert end(start(arguments(model, tmp_path / "one", "--address", one.address))) == 0
    assert (two.incarnation, two.ranks, two.commits) == (0, 2, [2, 4])
    assert sorted(two.served) == sorted(one.served * 2)
    assert two.trained == pytest.approx(one.trained, rel=1e-5)
    ours, theirs = final_weights(tmp_path / "two"), final_weights(tmp_path / "one")
    assert all(abs(ours[name] - theirs[name]).max() <= 1e-4 for name in theirs)


def as_one_that_says_why(args: list[str], folder: Path) -> None:
    with (folder / os.environ["RANK"]).open("w") as told, contextlib.redirect_stderr(told):
        main(args)


def test_a_batch_that_one_rank_cannot_have_ends_all_by_its_name(model, tmp_path):
    class Mean(Orchestrator):
        def _batch(self, said):
            if said.rank == 1:
                raise PeerRefused("not for you")
            return super()._batch(said)

    with Mean(random_batches(1)) as orchestrator:
        args = arguments(model, tmp_path / "out", "--address", orchestrator.address)
        run_ranks(2, as_one_that_says_why, args, tmp_path)
    assert ["PeerRefused: not for you" in (tmp_path / rank).read_text() for rank in "01"] == [True, True]


def test_a_version_is_kept_while_an_engine_needs_it_and_lies_in_memory_if_asked(model, tmp_path):
    with Orchestrator(random_batches(3)) as orchestrator:
        orchestrator.needed = [("p", 0, 1)]
        args = arguments(model, tmp_path, "--address", orchestrator.address, "--weights.transport", "shm")
        assert end(start(args)) == 0
    folder = Path(orchestrator.published[0][1]).parent
    try:
        assert folder.parent == Path("/dev/shm")
        assert sorted(path.name for path in folder.iterdir()) == ["0-000001", "0-000003"]
        assert Manifest.read(folder / "0-000001").version == PolicyVersion("p", 0, 1)
    finally:
        for path in sorted(folder.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        folder.rmdir()


def test_a_recording_replays_forest_and_flat_with_the_same_gradients(model, tmp_path, capsys):
    laying = PackSpec(pack_tokens=128, per_token=1.0)
    recording = BatchRecording(tmp_path / "recorded")
    for batch in random_batches(2):
        for rank, share in enumerate(split_across_ranks(batch, laying, 2)):
            recording.write_share(batch.step, rank, encode_batch(share), 2)
    found = []
    for flat in ([], ["--flat"]):
        args = ["--replay", str(recording.directory), *flat, "--trainer.optim.lr", "1e-9"]
        assert main(arguments(model, tmp_path / "out", *args)) == 0
        out = capsys.readouterr().out
        how, dtype, operators, hello = out.splitlines()[:4]
        assert how == ("flat: every branch is computed whole" if flat else "forest: shared prefixes are computed once")
        assert dtype == "dtype: float32 (the default on a CPU)"
        assert operators == "operators: tree attention in torch"
        assert hello.endswith(f" layout={'flat' if flat else 'forest'}")
        found.append([tuple(map(float, pair)) for pair in re.findall(r"grad_norm=(\S+) .* tokens=(\d+)", out)])
    forest, flat = found
    assert len(forest) == 2
    for (ours, few), (theirs, many) in zip(forest, flat, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
        assert few < many
    assert not (tmp_path / "out").exists()


def test_a_recording_with_a_hole_or_without_batches_is_refused(tmp_path):
    with pytest.raises(ConfigInvalid, match="no recorded batches"):
        ReplayBatchSource(BatchRecording(tmp_path))
    for step in (0, 2):
        BatchRecording(tmp_path).write_share(step, 0, b"", 1)
    with pytest.raises(ConfigInvalid, match="no batch of step 1"):
        ReplayBatchSource(BatchRecording(tmp_path))


def test_shares_that_are_not_one_batch_are_never_replayed(tmp_path):
    recording, laying = BatchRecording(tmp_path), PackSpec(pack_tokens=128)
    batch = random_batches(1)[0]
    for ranks in (2, 1):  # a trainer with fewer ranks is given the step again
        for rank, share in enumerate(split_across_ranks(batch, laying, ranks)):
            recording.write_share(0, rank, encode_batch(share), ranks)
    (whole,) = recording.read_shares(0)
    assert Batch.from_packs(0, whole.packs).entry_counts == batch.entry_counts
    first, second = split_across_ranks(batch, laying, 2)
    recording.write_share(0, 0, encode_batch(first), 2)  # and the other rank was killed before it had its own
    with pytest.raises(BatchCorrupt, match=r"the shares of step 0 .* one is missing"):
        recording.read_shares(0)
    recording.write_share(0, 1, encode_batch(second)[:-9], 2)
    with pytest.raises(BatchCorrupt, match=r"rank_1\.batch"):
        recording.read_shares(0)


def test_checkpoints_stay_when_the_end_of_the_history_cannot_be_loaded(model, tmp_path, capsys):
    newer = tmp_path / "trainer" / "checkpoints" / "step_000004"
    newer.mkdir(parents=True)
    (newer / "checkpoint.json").write_text("{}")
    with Orchestrator(random_batches(3)) as orchestrator:
        orchestrator.committed = 2
        assert main(arguments(model, tmp_path, "--address", orchestrator.address)) == 1
    assert "step_000002/checkpoint.json cannot be read" in capsys.readouterr().err
    assert newer.exists()


@pytest.mark.megabytes(1)
def test_without_room_for_the_last_checkpoint_the_end_says_so(model, small_disk, capsys):
    args = arguments(model, small_disk, "--checkpoint.interval", "100", "--weights.transport", "shm")
    with Orchestrator(random_batches(2)) as orchestrator:
        assert main([*args, "--address", orchestrator.address]) == 1
        assert orchestrator.committed == 0
    assert "StorageFull" in capsys.readouterr().err


def test_a_schedule_that_needs_an_end_is_refused_before_the_first_step(model, tmp_path, capsys):
    with Orchestrator(random_batches(1)) as orchestrator:
        args = ["--address", orchestrator.address, "--trainer.optim.schedule", '{"type": "linear", "warmup_steps": 9}']
        assert main(arguments(model, tmp_path, *args)) == 2
    assert "needs to know the number of steps" in capsys.readouterr().err
    assert not orchestrator.served


def test_questions_may_be_repeated_and_a_replaced_trainer_is_told_to_go():
    with Orchestrator(random_batches(2)) as orchestrator:
        old, new = (RemoteBatchSource(orchestrator.address, timeout=5.0) for _ in range(2))
        try:
            assert old.register(0, 1, PackSpec(pack_tokens=128), None).incarnation == 0
            first, again = (old.get_batch(0, lambda: False) for _ in range(2))
            assert encode_batch(first) == encode_batch(again)
            assert old.get_batch(2, lambda: False) is None
            old.commit_checkpoint(1)
            old.commit_checkpoint(1)
            assert new.register(0, 1, PackSpec(pack_tokens=128), None).committed == 1
            assert old.get_batch(1, lambda: True) is None  # whoever stops waits for nothing
            with pytest.raises(PeerRefused, match="replaced by 1"):
                old.get_batch(1, lambda: False)
        finally:
            old.close()
            new.close()


def test_an_orchestrator_that_was_started_again_is_greeted_again_and_nothing_rolls_back():
    batches = random_batches(2)
    with Orchestrator(batches) as first:
        source = RemoteBatchSource(first.address, timeout=60.0)
        source.register(0, 1, PackSpec(pack_tokens=128), None)
        before = source.get_batch(0, lambda: False)
        source.report_published(PolicyVersion("p", 0, 1), Path("/weights/0-000001"))
    try:
        again = Orchestrator(batches, first.address)
        again.incarnation = first.incarnation  # its ledger remembers
        with again:
            assert encode_batch(source.get_batch(0, lambda: False)) == encode_batch(before)
            assert (again.ranks, again.incarnation) == (1, 0)
            assert again.published == [(("p", 0, 1), "/weights/0-000001")]  # the engines may not have it yet
    finally:
        source.close()


def test_an_orchestrator_that_is_not_there_is_named_in_time():
    source = RemoteBatchSource("tcp://127.0.0.1:9", timeout=0.2)
    try:
        with pytest.raises(DeadlineExceeded, match="hello was not answered"):
            source.register(0, 1, PackSpec(), None)
    finally:
        source.close()


def test_whoever_is_asked_to_stop_waits_for_nobody_who_does_not_answer(monkeypatch):
    monkeypatch.setattr(remote_batch_source, "PARTING", 0.2)
    source = RemoteBatchSource("tcp://127.0.0.1:9", timeout=3600.0, should_stop=lambda: True)
    try:
        with pytest.raises(DeadlineExceeded, match="asked to stop"):
            source.register(0, 1, PackSpec(), None)
    finally:
        source.close()


def test_an_address_that_is_none_is_refused(capsys):
    for address in ("here", "tcp://127.0.0.1", "http://127.0.0.1:80", "tcp://127.0.0.1:99999"):
        assert main(["trainer", "--address", address, "--dry-run"]) == 2
        assert "address: " in capsys.readouterr().err


def test_a_trainer_needs_exactly_one_source(capsys, tmp_path):
    assert main(["trainer", "-o", str(tmp_path)]) == 2
    assert main(["trainer", "--flat", "--address", "tcp://127.0.0.1:1"]) == 2
    assert "--flat goes with --replay" in capsys.readouterr().err
    assert main(["trainer", "--address", "tcp://127.0.0.1:1", "-o", str(tmp_path), "--dry-run"]) == 0
