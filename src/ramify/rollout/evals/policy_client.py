"""The policy of an eval: a running server, or one that is started for it.

A wrong model or address is reported here, before the first rollout.
"""

import contextlib
import os
import socket
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ramify.core.async_calls import call_storage
from ramify.core.errors import ConfigInvalid, EnvironmentFault, ModelNotFound, ProviderError, RamifyError
from ramify.env import Task
from ramify.infer.config import EngineConfig, ExternalServersConfig, ServeConfig
from ramify.infer.gateway.policy import Policy
from ramify.infer.gateway.policy_connection import connect_policy
from ramify.model.config_check import check_model_config
from ramify.model.image_support import find_image_problem
from ramify.model.resolve import (
    describe_missing_model,
    fetch_model,
    is_fetchable,
    read_max_positions,
    resolve_config_path,
    resolve_model_path,
)
from ramify.processes.interpreter import ENGINE_PYTHON_VARIABLE
from ramify.rollout import Environment
from ramify.rollout.environment import check_prompt_images
from ramify.rollout.evals.config import EvalConfig
from ramify.rollout.server_process import ServerProcess

STOP_TIMEOUT = 10.0  # seconds between SIGTERM and SIGKILL


class EngineProcess(ServerProcess):
    """One `ramify serve` process. Its output is in `logs/inference.log` of the run directory."""

    title, exit_error = "the model server", ProviderError

    def __init__(self, config: ServeConfig, run_dir: Path, *, start_timeout: float) -> None:
        config_path, log_path = run_dir / "configs" / "serve.toml", run_dir / "logs" / "inference.log"
        super().__init__(
            "serve",
            config,
            config_path,
            log_path,
            start_timeout=start_timeout,
            stop_timeout=STOP_TIMEOUT,
            python=os.environ.get(ENGINE_PYTHON_VARIABLE),
        )


@dataclass(frozen=True, slots=True)
class ServedPolicy:
    """A policy, the addresses of its servers, and the engine that was started for it, if any."""

    policy: Policy
    urls: list[str]
    engine: EngineProcess | None = None


def check_server(config: EvalConfig, environment: Environment) -> None:
    """Raise ConfigInvalid if the eval has to serve a model that is missing, that is too short for the harness or that
    takes no images although the taskset requires it, or if it has to serve it at a port that is in use."""
    if not isinstance(config.inference, ExternalServersConfig):
        if environment.taskset.requires_vision:
            _check_takes_images(config, environment)
        lengths = (config.inference.max_model_len, _read_model_length(config), config.seq_len)
        seq_len = min((length for length in lengths if length is not None), default=None)
        environment.harness.check_limits(environment.limits.model_copy(update={"seq_len": seq_len}))
        _check_port(config.server.host, config.server.port)


async def check_task_images(config: EvalConfig, environment: Environment, task: Task) -> None:
    """Raise ConfigInvalid if the prompt of a task has images that cannot be used, or that the model does not take."""
    try:
        has_images = await call_storage(partial(check_prompt_images, task), f"images of task {task.identity}")
    except EnvironmentFault as error:
        raise ConfigInvalid(f"taskset: {error.message}") from error
    if has_images and not isinstance(config.inference, ExternalServersConfig):
        _check_takes_images(config, environment)


def _check_takes_images(config: EvalConfig, environment: Environment) -> None:
    if reason := find_image_problem(config.model.name, config.inference.engine):
        raise ConfigInvalid(f"taskset: {environment.name} {reason}")


@contextlib.asynccontextmanager
async def open_policy(
    config: EvalConfig, run_dir: Path, print_line: Callable[[str], None]
) -> AsyncGenerator[ServedPolicy]:
    """Yield the policy; an engine that is started for it is stopped on exit."""
    async with contextlib.AsyncExitStack() as stack:
        if isinstance(config.inference, ExternalServersConfig):
            urls = config.inference.base_url
            yield ServedPolicy(await _connect(config, urls, stack, print_line), urls)
            return
        serve_config = ServeConfig(
            model=config.model, renderer=config.renderer, inference=config.inference, server=config.server
        )
        print_line(f"starting {config.model.name} with the {config.inference.engine} engine")
        engine = await stack.enter_async_context(
            EngineProcess(serve_config, run_dir, start_timeout=config.startup_timeout)
        )
        policy = await connect_policy(
            [engine.address],
            config.model.name,
            config.renderer,
            stack,
            client_mode="tokens",
            retries=config.model_retries,
        )
        yield ServedPolicy(policy, [engine.address], engine)


async def _connect(
    config: EvalConfig, urls: list[str], stack: contextlib.AsyncExitStack, print_line: Callable[[str], None]
) -> Policy:
    key = os.environ.get(config.api_key_env, "")
    try:
        return await connect_policy(
            urls,
            config.model.name,
            config.renderer,
            stack,
            client_mode=config.client_type,
            api_key=key,
            retries=config.model_retries,
            log=print_line,
        )
    except ConfigInvalid:
        raise
    except RamifyError as error:
        raise ConfigInvalid(error.message, key="inference.base_url") from error


def _check_port(host: str, port: int) -> None:
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        message = f"server.port: cannot listen on {host}:{port}: {error.strerror}; 0 picks a free port"
        raise ConfigInvalid(message) from error


def check_served_model(config: EvalConfig, *, fetch: bool) -> None:
    """Raise ModelUnsupported if the config of the model shows that a native engine of the eval refuses it.

    With `fetch`, the config of a hub id is downloaded. The engine may run in another interpreter, see `EngineProcess`.
    """
    by_engine = isinstance(config.inference, EngineConfig)
    check_model_config(
        config.model.name, by_trainer=False, by_engine=by_engine, fetch=fetch, skip_without_transformers=True
    )


def fetch_served_model(config: EvalConfig) -> None:
    """Download the model if the eval has to serve it and it is a hub id that is not in the cache.

    Raises ModelUnsupported before the download.
    """
    check_served_model(config, fetch=True)
    if not isinstance(config.inference, ExternalServersConfig):
        try:
            fetch_model(config.model.name)
        except ModelNotFound as error:
            raise ConfigInvalid(error.message, key="model.name") from error


def list_model_notes(config: EvalConfig) -> list[str]:
    """Return a note if the eval has to fetch the model that it serves."""
    if isinstance(config.inference, ExternalServersConfig):
        return []
    note = describe_missing_model("model.name", config.model.name)
    return [note] if note else []


def _read_model_length(config: EvalConfig) -> int | None:
    """Return the longest sequence that the model allows; None if it is unknown, or if the eval will fetch the model."""
    name = config.model.name
    try:
        return read_max_positions(resolve_config_path(name) if is_fetchable(name) else resolve_model_path(name))
    except ModelNotFound as error:
        if is_fetchable(name):  # only in a dry run: a run has fetched it
            return None
        raise ConfigInvalid(error.message, key="model.name") from error
