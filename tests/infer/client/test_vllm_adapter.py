"""The vLLM adapter against a fake server: labels, failing cache resets, failing reloads."""

import asyncio
import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from ramify.core.errors import DeadlineExceeded, ProviderError, RequestInvalid, WeightsRefused
from ramify.infer.client import ClientSampling, vllm_adapter
from ramify.model.weights_manifest import Manifest, compute_checksum
from ramify.trace.version import PolicyVersion
from tests.infer.client.test_replica_pool import SAMPLING, connected
from tests.support.engine import ScriptedVLLM, hang
from tests.support.processes import async_wait_until

SECOND = PolicyVersion("policy", 0, 2)


def publish(directory, version, width=2):
    directory.mkdir(exist_ok=True)
    save_file({"embed": np.zeros((12, width), np.float32)}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"vocab_size": 12}))
    digest = compute_checksum(directory / "model.safetensors")
    Manifest(version, {"model.safetensors": digest}).write(directory)
    return directory


@pytest.fixture
def first(tmp_path):
    return publish(tmp_path / "first", PolicyVersion("policy", 0, 1))


@pytest.fixture
def second(tmp_path):
    return publish(tmp_path / "second", SECOND)


def control_requests(fake: ScriptedVLLM) -> list[str]:
    """Return the paths of requests that change the server's state."""
    readonly = ("/health", "/v1/models", "/weight_info", "/inference")
    return [path for path in fake.targets if not path.startswith(readonly)]


async def test_an_update_pauses_reloads_resets_labels_and_resumes(first, second):
    fake = ScriptedVLLM(root=str(first))
    fake.refused_resets = 2
    async with connected(fake, version=PolicyVersion("policy", 0, 1)) as client:
        fake.targets.clear()
        await client.update_weights(second, SECOND)
        assert list(client.versions.values()) == [SECOND] and fake.label == "policy@0.2"
        assert control_requests(fake) == [
            "/pause?mode=keep&clear_cache=false",
            "/update_weight_version",
            "/collective_rpc",
            *["/reset_prefix_cache?reset_running_requests=true"] * 3,
            "/update_weight_version",
            "/resume",
        ]
        done = await client.generate([1], SAMPLING)
        assert [run.step for run in done.version_spans] == [2]


async def test_with_kv_keep_the_cache_is_not_reset_and_new_requests_are_salted(first, second):
    fake = ScriptedVLLM(root=str(first))
    async with connected(fake, version=PolicyVersion("policy", 0, 1)) as client:
        await client.generate([1], SAMPLING, cache_salt="mine")
        await client.update_weights(second, SECOND, "keep")
        await client.generate([1], SAMPLING, cache_salt="mine")
        assert not any(path.startswith("/reset") for path in fake.targets)
        await client.generate([1], SAMPLING, cache_salt="mine")
        await client.generate([1], SAMPLING, cache_salt="yours")
        old, new, same, other = (body["cache_salt"] for body in fake.requests[-4:])
        assert new == same and len({old, new, other}) == 3
        assert all(len(salt) <= 128 and salt.isalnum() for salt in (old, new, other))  # vLLM's limits


async def test_a_server_whose_cache_cannot_be_reset_is_ejected(first, second, monkeypatch):
    monkeypatch.setattr(vllm_adapter, "RESET_TIMEOUT", 0.2)

    fake = ScriptedVLLM(root=str(first))
    fake.refused_resets = 1000
    async with connected(fake, version=PolicyVersion("policy", 0, 1)) as client:
        with pytest.raises(DeadlineExceeded, match=r"prefix cache could not be reset within 0\.2 s"):
            await client.update_weights(second, SECOND)
        assert fake.label == "undefined" and list(client.down_replicas) == [fake.url]
        assert control_requests(fake)[-1] == "/pause?mode=abort&clear_cache=false"


@pytest.mark.parametrize("directory", ["missing", "other"])
async def test_a_bad_directory_is_refused_before_any_request(first, tmp_path, directory):
    publish(tmp_path / "other", SECOND, width=3)

    fake = ScriptedVLLM(root=str(first))
    async with connected(fake, version=PolicyVersion("policy", 0, 1)) as client:
        fake.targets.clear()
        with pytest.raises(WeightsRefused):
            await client.update_weights(tmp_path / directory, SECOND)
        assert control_requests(fake) == [] and not client.down_replicas
        assert client.versions[fake.url] == PolicyVersion("policy", 0, 1)


async def test_a_server_outside_development_mode_can_sample_but_not_update(first, second):
    class Closed(ScriptedVLLM):
        async def control(self, path, exchange):
            await exchange.reply({"detail": "Not Found"}, 404)

    fake = Closed(root=str(first))
    async with connected(fake, version=PolicyVersion("policy", 0, 1)) as client:
        assert [run.step for run in (await client.generate([1], SAMPLING)).version_spans] == [1]
        with pytest.raises(WeightsRefused, match="VLLM_SERVER_DEV_MODE=1"):
            await client.update_weights(second, SECOND)


async def test_a_token_id_outside_the_vocabulary_is_not_sent(first):
    fake = ScriptedVLLM(root=str(first))
    async with connected(fake) as client:
        num_requests = len(fake.requests)
        with pytest.raises(RequestInvalid, match="token id 12; the vocabulary is 0 to 11"):
            await client.generate([1, 12], ClientSampling())
        assert len(fake.requests) == num_requests


# -- every token has the version that sampled it ----------------------------------------------------------------------


@pytest.mark.promise
@pytest.mark.parametrize("label", ["default", "undefined"])
async def test_tokens_of_unknown_weights_are_refused_and_the_server_joins_again(first, label):
    """The server was restarted unnoticed, or resumed by another client during an update."""

    fake = ScriptedVLLM(root=str(first))
    async with connected(fake, version=PolicyVersion("policy", 0, 1)) as client:
        fake.label = label
        with pytest.raises(ProviderError, match=f"label '{label}', which is not a version"):
            await client.generate([1], SAMPLING)
        if label == "default":
            done = await client.generate([1], SAMPLING)
            assert [run.step for run in done.version_spans] == [1] and fake.label == "policy@0.1"
        else:
            await async_wait_until(lambda: "was interrupted" in client.down_replicas.get(fake.url, ""))


@pytest.mark.promise
async def test_a_cancelled_update_leaves_weights_without_a_version(first, second):
    class Slow(ScriptedVLLM):
        async def control(self, path, exchange):
            if path == "/collective_rpc":
                reloading.set()
                await hang(self, exchange)
            else:
                await super().control(path, exchange)

    reloading = asyncio.Event()

    fake = Slow(root=str(first))
    async with connected(fake, version=PolicyVersion("policy", 0, 1)) as client:
        update = asyncio.create_task(client.update_weights(second, SECOND))
        await reloading.wait()
        update.cancel()
        await asyncio.wait([update])
        assert fake.label == "undefined" and client.versions[fake.url].policy == "undefined"
        with pytest.raises(ProviderError, match="which is not a version"):
            await client.generate([1], SAMPLING)


async def test_an_update_whose_response_is_lost_aborts_requests_and_leaves_no_version(first, second):
    class Dropping(ScriptedVLLM):
        async def control(self, path, exchange):
            if path == "/collective_rpc":
                exchange.writer.transport.abort()
            else:
                await super().control(path, exchange)

    fake = Dropping(root=str(first))
    async with connected(fake, version=PolicyVersion("policy", 0, 1)) as client:
        fake.targets.clear()
        with pytest.raises(ProviderError):
            await client.update_weights(second, SECOND)
        assert control_requests(fake)[-1] == "/pause?mode=abort&clear_cache=false"
        assert fake.label == "undefined" and list(client.down_replicas) == [fake.url]


@pytest.mark.promise
@pytest.mark.parametrize("spans", [[(0, 2)], [(0, 1), (2, 3)], [(0, 4), (4, 3)], [(1, 3)], []])
async def test_version_spans_that_do_not_cover_the_tokens_are_refused(first, spans):
    class Odd(ScriptedVLLM):
        def sample(self, body):
            response = super().sample(body)
            response["choices"][0]["weight_versions"] = [
                {"version": "policy@0.1", "start": start, "end": end} for start, end in spans
            ]
            return response

    async with connected(Odd(root=str(first)), version=PolicyVersion("policy", 0, 1)) as client:
        with pytest.raises(ProviderError, match="3 tokens whose versions do not add up"):
            await client.generate([1], SAMPLING)
