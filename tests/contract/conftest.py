"""The server under contract: native by default; a real vLLM with RAMIFY_VLLM_PYTHON, the interpreter that has it."""

import asyncio
import os

import pytest

from ramify.infer.client import ClientConfig, InferenceClient
from ramify.infer.config import ServerConfig, VLLMConfig
from ramify.infer.vllm_server import VLLMServer
from ramify.trace.version import PolicyVersion
from tests.contract.target import Target, VLLMTarget
from tests.support.models import VOCAB, build_core, publish_as, write_llama
from tests.support.native_server import run_server

VLLM_PYTHON = os.environ.get("RAMIFY_VLLM_PYTHON")


@pytest.fixture(scope="session", params=["vllm" if VLLM_PYTHON else "native"])
def target(request, tmp_path_factory):
    home = tmp_path_factory.mktemp("served")
    directories = []
    for step in (1, 2):
        source = write_llama(home / f"source-{step}", seed=step, positions=4096, head_dim=32)  # vLLM's smallest
        directories.append(publish_as(home / f"step-{step}", source, PolicyVersion("llama", 0, step)))
    if request.param == "vllm":
        server = VLLMServer(str(directories[0]), vllm_config(home), ServerConfig(port=0))
        asyncio.run(server.start())
        try:
            # Its front may lag far behind its engine, which samples a model this small in a millisecond a token.
            yield VLLMTarget(server.url, *directories, max_model_len=4096, vocab=VOCAB, flight=3500)
        finally:
            asyncio.run(server.close())
        return
    core = build_core(
        directories[0],
        PolicyVersion("llama", 0, 1),
        kv_cache_tokens=16384,
        max_running_requests=64,
        max_num_batched_tokens=256,
    )
    with run_server(core) as (url, _):
        yield Target(url, *directories, max_model_len=core.max_model_len, vocab=VOCAB)


@pytest.fixture
async def http(target):
    """An HTTP client of the server, which is left with the weights it started with."""
    async with target.client() as client:
        yield client
        await target.resume(client)
        await target.update(client, target.first)


@pytest.fixture
async def client(target):
    """An `InferenceClient` of the server, which is left with the weights it started with."""
    async with InferenceClient(target.url, ClientConfig(health_interval=0.5)) as client:
        yield client
        await client.update_weights(target.first, PolicyVersion("llama", 0, 1))


def vllm_config(home) -> VLLMConfig:
    return VLLMConfig(
        python=str(VLLM_PYTHON),
        dtype="float32",
        enforce_eager=True,
        log_file=str(home / "vllm.log"),
        extra_args=["--enable-server-load-tracking"],  # only so that the tests can see a request that waits
    )
