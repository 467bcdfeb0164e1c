"""Started runtimes for the tests: each kind that works on this machine."""

import asyncio
import contextlib
import functools
import os
import shlex

import pytest

from ramify.env import Runtime, RuntimeConfig, Task
from ramify.rollout.runtime import (
    ContainerRuntime,
    ContainerRuntimeConfig,
    HostedRuntime,
    HostedRuntimeConfig,
    LocalRuntime,
    LocalRuntimeConfig,
    SandboxRuntime,
    SandboxRuntimeConfig,
)
from ramify.rollout.runtime.bwrap import find_unsupported_reason
from ramify.rollout.runtime.config import PreloadConfig
from ramify.rollout.runtime.owner import make_owner_name
from ramify.rollout.runtime.template import SandboxTemplate
from tests.rollout.runtime.container_image import IMAGE
from tests.rollout.runtime.prime_fake import PrimeFake

PYTHON = ("python3", "-S")  # without installed packages it starts quickly
CONTAINER_ENGINE = os.environ.get("RAMIFY_CONTAINER_ENGINE", "")


class ForkedRuntime(SandboxRuntime):
    """A sandbox that is a fork of a template of its own."""

    def __init__(self, config: SandboxRuntimeConfig) -> None:
        self.template = SandboxTemplate(config, PreloadConfig(PYTHON, ("json",), {}))
        super().__init__(config, self.template)

    async def start(self, task: Task) -> None:
        await super().start(task)
        assert self._sandbox is not None and self._sandbox.is_forked

    async def stop(self) -> None:
        await super().stop()
        await self.template.close()


RUNTIMES = {
    "local": (LocalRuntime, LocalRuntimeConfig),
    "sandbox": (SandboxRuntime, SandboxRuntimeConfig),
    "forked": (ForkedRuntime, SandboxRuntimeConfig),
    "container": (
        ContainerRuntime,
        functools.partial(
            ContainerRuntimeConfig,
            image=IMAGE,
            engine=CONTAINER_ENGINE or "auto",
            engine_args=shlex.split(os.environ.get("RAMIFY_CONTAINER_ARGS", "")),
            pull="never",
        ),
    ),
    "hosted": (HostedRuntime, HostedRuntimeConfig),
}


@contextlib.asynccontextmanager
async def open_runtime(kind: str, task: Task | None = None, **settings):
    """A started runtime for at most a minute, which is stopped at the end."""
    runtime_class, config_class = RUNTIMES[kind]
    runtime: Runtime = runtime_class(config_class(**settings))
    async with asyncio.timeout(60):
        try:
            await runtime.start(task or Task())
            yield runtime
        finally:
            await runtime.stop()


async def run_with_runtime(kind: str, test, task: Task | None = None, **settings):
    """Run `test(runtime)` with a started runtime."""
    async with open_runtime(kind, task, **settings) as runtime:
        return await test(runtime)


def make_ended_owner_name(number: int | str) -> str:
    """The name of a thing that a process of this machine made, which has ended."""
    pid, _, *others, _ = make_owner_name(0).split("-")
    return "-".join([pid, "1", *others, str(number)])  # the process id is in use again


def build_runtime_table(kind: str) -> dict:
    """The table of a config that selects a runtime."""
    config: RuntimeConfig = RUNTIMES[kind][1]()
    return config.model_dump(mode="json", exclude_defaults=True) | {"id": kind}


def skip_unless_available(kind: str) -> None:
    if kind in ("sandbox", "forked") and (reason := find_unsupported_reason()):
        pytest.skip(f"no sandbox here: {reason}")
    if kind == "container" and not CONTAINER_ENGINE:
        pytest.skip("no container engine is given; run `make test-containers`")


@pytest.fixture(scope="session")
def prime_server(tmp_path_factory):
    """A stand-in for the provider of hosted sandboxes."""
    pytest.importorskip("prime_sandboxes", reason="the extra `prime` is not installed")
    with PrimeFake(tmp_path_factory.mktemp("prime")) as server:
        yield server


@pytest.fixture
def prime_fake(prime_server, monkeypatch, tmp_path):
    """The same, as the provider that the SDK calls."""
    monkeypatch.setenv("PRIME_API_BASE_URL", prime_server.url)
    monkeypatch.setenv("PRIME_API_KEY", "key")
    monkeypatch.setenv("HOME", str(tmp_path))  # where the SDK keeps its files
    monkeypatch.delenv("PRIME_CONTEXT", raising=False)
    return prime_server


@pytest.fixture(params=["sandbox", "forked"])
def sandbox_kind(request) -> str:
    """Both ways in which a sandbox is started."""
    skip_unless_available(request.param)
    return request.param


@pytest.fixture(params=[kind for kind in RUNTIMES if kind != "forked" or os.environ.get("RAMIFY_FULL")])
def kind(request) -> str:
    if request.param == "hosted":
        request.getfixturevalue("prime_fake")
    skip_unless_available(request.param)
    return request.param
