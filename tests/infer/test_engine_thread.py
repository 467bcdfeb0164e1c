"""The engine's thread delivers what is sampled, also while it waits for a trainer or is paused."""

import asyncio
import contextlib
import ctypes
import os

import pytest
import torch

from ramify.core.errors import DeadlineExceeded
from ramify.infer import engine as engine_module
from ramify.infer.engine import Engine
from ramify.infer.engine_core import LaunchedStep
from ramify.infer.request import SamplingParams
from ramify.model.kernels.cpu.c_library import CLibraryUnavailable, find_torch_symbol
from ramify.processes.training_lock import TRAINING_LOCK_VARIABLE, TrainingLock
from tests.support.models import build_core, write_llama
from tests.support.processes import async_wait_until


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("models") / "source", seed=3)


@pytest.fixture
def engine(source, tmp_path, monkeypatch):
    monkeypatch.setenv(TRAINING_LOCK_VARIABLE, str(tmp_path / "lock"))
    engine = Engine(build_core(source)).start()
    yield engine
    engine.close()


@pytest.mark.parametrize("wait", ["paused", "training"])
async def test_tokens_of_a_step_launched_ahead_are_delivered_while_the_engine_waits(engine, tmp_path, wait):
    core = engine.core

    def launch_last_token() -> None:
        """Launch a step for the last token of the only request, as a GPU does."""
        (request,) = core.list_unfinished_requests()
        index = len(request.token_ids)
        request.expect_token(0)
        core._launched = LaunchedStep([(request, index)], lambda: ([7], [-0.5]), core.version)

    async with asyncio.timeout(60):
        await engine.pause()
        stream = engine.submit([5, 6], SamplingParams(max_tokens=1))
        with TrainingLock(tmp_path / "lock").hold() if wait == "training" else contextlib.nullcontext():
            if wait == "training":
                await engine.resume()
            await engine._run_command(launch_last_token)
            output = await stream.result()
    assert (output.token_ids, output.finish_reason) == ([7], "length")


async def test_training_counts_as_training_while_there_is_no_request(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_module, "IDLE_WAIT_SECONDS", 600.0)
    await asyncio.wait_for(engine._run_command(lambda: None), 60)  # an earlier wait has ended
    counters = engine.core.counters
    with TrainingLock(tmp_path / "lock").hold():
        await async_wait_until(lambda: counters.training_seconds > 0)
        idle, training = counters.idle_seconds, counters.training_seconds
        await async_wait_until(lambda: counters.training_seconds > training)
        assert counters.idle_seconds == idle
    await async_wait_until(lambda: counters.idle_seconds > idle)


async def test_update_does_not_wait_forever_for_another_one(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_module, "STAGING_TIMEOUT", 0.1)
    with engine._staging_lock, pytest.raises(DeadlineExceeded, match=r"another version was not staged within 0\.1 s"):
        await asyncio.wait_for(engine.update_weights(tmp_path), 60)


async def test_products_of_the_engine_use_the_configured_threads(source):
    """OpenMP and MKL count threads per calling thread, and the operators in C do not ask torch for its number."""
    try:
        count_openmp_threads = ctypes.CFUNCTYPE(ctypes.c_int)(find_torch_symbol("omp_get_max_threads"))
    except CLibraryUnavailable as error:
        pytest.skip(str(error))
    default, configured = torch.get_num_threads(), (os.cpu_count() or 1) + 1
    torch.set_num_threads(configured)
    engine = Engine(build_core(source)).start()
    try:
        assert await asyncio.wait_for(engine._run_command(count_openmp_threads), 60) == configured
    finally:
        engine.close()
        torch.set_num_threads(default)
