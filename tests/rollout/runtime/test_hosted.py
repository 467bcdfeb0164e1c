"""What is particular to sandboxes of a provider, against a stand-in for its HTTP API."""

import asyncio
import re
import sys

import pytest

from ramify.core.errors import ConfigInvalid, SandboxError
from ramify.env import Task
from ramify.env.runtime import Capability
from ramify.rollout.runtime import HostedRuntime, HostedRuntimeConfig
from tests.rollout.runtime.conftest import open_runtime, run_with_runtime


def test_missing_sdk_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "prime_sandboxes", None)
    with pytest.raises(ConfigInvalid, match=r"pip install 'ramify\[prime\]'"):
        HostedRuntime().check_task(Task())
    assert HostedRuntime.clean(HostedRuntimeConfig()) == []


def test_missing_key_is_named(prime_fake, monkeypatch):
    monkeypatch.delenv("PRIME_API_KEY")
    with pytest.raises(ConfigInvalid, match="set PRIME_API_KEY"):
        HostedRuntime().check_task(Task())


async def test_refused_key_is_a_failure_of_the_sandbox(prime_fake, monkeypatch):
    monkeypatch.setenv("PRIME_API_KEY", "another")

    async with asyncio.timeout(30):
        with pytest.raises(SandboxError, match="API key unauthorized"):
            await HostedRuntime().start(Task())


@pytest.mark.process
async def test_sandbox_has_the_image_and_the_limits_of_its_task(prime_fake):
    async def test(runtime):
        assert len(prime_fake.sandboxes) == 1

    task = Task(image="debian:12", resources={"memory_mb": 3072, "cpus": 2, "disk_mb": 10240})
    await run_with_runtime("hosted", test, task, lifetime=90, allow_hosts=["example.com"])
    request = prime_fake.requests[-1]
    assert (request["docker_image"], request["memory_gb"], request["cpu_cores"]) == ("debian:12", 3, 2)
    assert (request["disk_size_gb"], request["timeout_minutes"]) == (10, 2)
    assert request["network_allowlist"] == ["example.com"]
    assert prime_fake.sandboxes == {}


async def test_gateway_without_a_public_address_is_refused():
    runtime = HostedRuntime()
    with pytest.raises(ConfigInvalid, match=r"needs gateway of the runtime 'hosted': .* set gateway_url"):
        runtime.capabilities.check(Capability.GATEWAY, "the harness 'program'", "hosted")
    with pytest.raises(ConfigInvalid, match=r"set runtime\.gateway_url"):
        await runtime.expose("http://127.0.0.1:8000/v1")


@pytest.mark.process
async def test_lost_sandbox_is_a_failure_of_the_sandbox(prime_fake):
    async with open_runtime("hosted") as runtime:
        await asyncio.to_thread(prime_fake.remove, next(iter(prime_fake.sandboxes)))
        with pytest.raises(SandboxError, match="sandbox"):
            await runtime.run("true", timeout=10)


@pytest.mark.process
async def test_sandbox_of_an_ended_process_is_cleaned_and_no_other(prime_fake):
    async with open_runtime("hosted") as runtime:
        (living,) = prime_fake.sandboxes.values()
        labels = [re.sub(r"^ramify-owner-\d+", "ramify-owner-999999999", name) for name in living["labels"]]
        other_machine = [re.sub(r"^ramify-machine-.*", "ramify-machine-other", name) for name in labels]
        prime_fake.sandboxes["leftover"] = {**living, "id": "leftover", "labels": labels}
        prime_fake.sandboxes["elsewhere"] = {**living, "id": "elsewhere", "labels": other_machine}
        config = HostedRuntimeConfig()
        assert await asyncio.to_thread(HostedRuntime.clean, config) == ["hosted sandbox leftover"]
        assert await asyncio.to_thread(HostedRuntime.clean, config) == []
        assert set(prime_fake.sandboxes) == {living["id"], "elsewhere"}
        prime_fake.remove("elsewhere")
        assert (await runtime.run("echo lives", timeout=10)).stdout == b"lives\n"
