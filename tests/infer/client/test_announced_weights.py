"""Engines that are restarted, late or disturbed get the weights that a trainer announced, over HTTP."""

import asyncio
import threading
from pathlib import Path

import pytest
import torch

from ramify.core.errors import ProviderError, WeightsReplaced
from ramify.infer.client import InferenceClient
from ramify.infer.request import SamplingParams
from ramify.model import publish_weights
from ramify.model.shared_weights import SharedWeights, remove_announcements
from ramify.model.weights import get_untied_tensors
from ramify.orchestrate.weight_updates import UpdateSettings, WeightUpdater
from ramify.trace.version import PolicyVersion
from tests.infer.client.test_replica_pool import QUICK
from tests.support.models import build_core, publish_as, reference, write_llama
from tests.support.native_server import run_server
from tests.support.processes import async_wait_until
from tests.support.trainer import context

QUICK_UPDATES = UpdateSettings(retry_delay=0.05)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    return publish_as(directory / "v0", write_llama(directory / "source", seed=3), make_version(0))


def make_version(step: int, incarnation: int = 0) -> PolicyVersion:
    return PolicyVersion("llama", incarnation, step)


class AnnouncingTrainer:
    """Announces versions in memory; their directories are never written."""

    def __init__(self, model: Path, directory: Path, incarnation: int = 0) -> None:
        remove_announcements(directory, incarnation)
        self.module = reference(model)
        self.shared = SharedWeights(get_untied_tensors(self.module), self.module, directory, incarnation)
        self.directory, self.incarnation = directory, incarnation

    def announce(self, step: int) -> tuple[Path, PolicyVersion]:
        name = f"{self.incarnation}-{step:06}"
        self.shared.announce(make_version(step, self.incarnation), name)
        return self.directory / name, make_version(step, self.incarnation)


@pytest.mark.process
@pytest.mark.parametrize("trainer_restarts", [False, True])
async def test_a_restarted_engine_joins_with_the_version_that_is_announced_now(model, tmp_path, trainer_restarts):
    trainer = AnnouncingTrainer(model, tmp_path)
    with run_server(build_core(model)) as (url, _):
        client = await InferenceClient(url, QUICK).start()
        await client.update_weights(*trainer.announce(1))
    try:
        await async_wait_until(lambda: client.down_replicas)
        if trainer_restarts:
            trainer = AnnouncingTrainer(model, tmp_path, incarnation=1)
        path, version = trainer.announce(2)
        with run_server(build_core(model), port=int(url.rpartition(":")[2])):
            await client.update_weights(path, version)
            assert client.versions == {url: version}
    finally:
        await client.close()


async def test_a_restarted_engine_does_not_wait_for_a_version_that_died_with_its_trainer(model, tmp_path):
    """Engine and trainer die together: the update to the dead trainer's version is dropped for the new trainer's."""

    trainer = AnnouncingTrainer(model, tmp_path)
    with run_server(build_core(model)) as (url, _):
        client = await InferenceClient(url, QUICK.model_copy(update={"server_wait_timeout": 600.0})).start()
    applied = asyncio.Event()
    updater = WeightUpdater(client, lambda version, seconds: applied.set())
    updating = asyncio.create_task(updater.run())
    try:
        await async_wait_until(lambda: client.down_replicas)
        path, version = trainer.announce(1)
        updater.request_update(version, path)
        await async_wait_until(lambda: updater.versions_in_use == [version, version])  # it is being applied
        trainer = AnnouncingTrainer(model, tmp_path, incarnation=1)
        with run_server(build_core(model), port=int(url.rpartition(":")[2])):
            await async_wait_until(lambda: "WeightsRefused" in client.down_replicas[url])
            updater.discard_pending()
            path, version = trainer.announce(1)
            updater.request_update(version, path)
            await applied.wait()
            assert updater.served_version == version
            assert client.versions == {url: version}
    finally:
        updating.cancel()
        await asyncio.wait([updating])
        await client.close()


@pytest.mark.parametrize("is_written", [False, True])
async def test_a_held_version_is_replaced_only_if_its_last_engine_died_and_it_was_never_written(
    model, tmp_path, is_written
):
    trainer, applied = AnnouncingTrainer(model, tmp_path), asyncio.Queue()
    with run_server(build_core(model)) as (url, _):
        client = await InferenceClient(url, QUICK.model_copy(update={"server_wait_timeout": 600.0})).start()
        updater = WeightUpdater(client, lambda version, _: applied.put_nowait(version), settings=QUICK_UPDATES)
        updating = asyncio.create_task(updater.run())
        path, held_version = trainer.announce(1)
        updater.request_update(held_version, path)
        assert await applied.get() == held_version
    try:
        async with asyncio.timeout(60):
            async with updater.hold():
                await async_wait_until(lambda: client.down_replicas)
                if is_written:
                    publish_weights(path, get_untied_tensors(trainer.module), held_version, base_model=model)
                trainer.shared.withdraw()
                path, newer_version = trainer.announce(2)
                updater.request_update(newer_version, path)
                with run_server(build_core(model), port=int(url.rpartition(":")[2])):
                    await async_wait_until(lambda: client.versions)
                    expected = held_version if is_written else newer_version
                    assert client.versions == {url: expected}
                    if not is_written:
                        assert await applied.get() == newer_version
                    assert updater.served_version == expected
    finally:
        updating.cancel()
        await asyncio.wait([updating])
        await client.close()


async def test_an_engine_that_is_too_late_for_a_version_says_so_and_stays_up(model, tmp_path):
    trainer = AnnouncingTrainer(model, tmp_path)
    with run_server(build_core(model)) as (url, _):
        async with InferenceClient(url, QUICK) as client:
            replaced = trainer.announce(1)
            newest = trainer.announce(2)
            with pytest.raises(WeightsReplaced, match=r"llama@0\.2 is announced now"):
                await client.update_weights(*replaced)
            assert client.versions == {url: make_version(0)}
            await client.update_weights(*newest)
            assert client.versions == {url: make_version(2)}


def announce_and_wait(model: Path, directory: Path) -> None:
    trainer = AnnouncingTrainer(model, directory)
    trainer.announce(1)
    threading.Event().wait(300)  # until it is killed


@pytest.mark.process
async def test_an_engine_unmaps_the_memory_of_a_trainer_that_has_died(model, tmp_path):
    trainer = context.Process(target=announce_and_wait, args=(model, tmp_path), daemon=True)
    trainer.start()
    memory_maps, announcement = Path("/proc/self/maps"), tmp_path / "announced-0.msgpack"
    try:
        with run_server(build_core(model)) as (url, _):
            async with InferenceClient(url, QUICK) as client:
                await async_wait_until(announcement.exists)
                await client.update_weights(tmp_path / "0-000001", make_version(1))
                assert str(tmp_path) in memory_maps.read_text()
                trainer.kill()
                await async_wait_until(lambda: str(tmp_path) not in memory_maps.read_text())
                assert client.versions == {url: make_version(1)}
    finally:
        trainer.kill()
        trainer.join()


@pytest.mark.promise
@pytest.mark.parametrize("rescue", ["directory", "newer version"])
async def test_an_engine_whose_copy_broke_off_has_no_weights_and_keeps_its_requests(model, tmp_path, rescue):
    trainer, gate = AnnouncingTrainer(model, tmp_path), threading.Event()
    with run_server(build_core(model)) as (url, engine):
        async with InferenceClient(url, QUICK) as client, asyncio.timeout(60):
            path, version = trainer.announce(1)
            engine._enqueue_command(lambda: gate.wait(30))  # the engine is slow
            update = asyncio.create_task(client.update_weights(path, version))
            await async_wait_until(lambda: len(engine._commands) == 1)  # it has found the version
            weight = next(iter(trainer.shared.tensors.values()))
            right = weight.clone()
            weight.add_(1.0)  # the trainer did not wait any longer
            gate.set()
            await async_wait_until(lambda: not engine.core.has_weights)
            response = await client.servers[0].http.request("GET", "/health")
            assert (response.status, b"WeightsMissing" in response.body) == (503, True)
            stream = engine.submit([5, 6], SamplingParams(max_tokens=2))
            await asyncio.sleep(0.1)
            assert not stream.request.logprobs
            if rescue == "directory":
                weight.copy_(right)
                publish_weights(path, get_untied_tensors(trainer.module), version, base_model=model)
                assert list(await update) == [url]
                assert engine.core.version == version
            else:
                newer = trainer.announce(2)
                with pytest.raises(ProviderError, match=r"WeightsReplaced: .*llama@0\.2 is announced now"):
                    await update
                assert not client.versions  # no request is sent to it
                version = newer[1]
                await client.update_weights(*newer)
            output = await stream.result()
            assert {span[0] for span in output.version_spans} == {version}
            assert engine.core.version == version
            assert engine.core.counters.swaps_refused > 0
            assert torch.equal(next(iter(get_untied_tensors(engine.core.model.module).values())).cpu(), weight)
            await async_wait_until(lambda: client.versions == {url: version})
