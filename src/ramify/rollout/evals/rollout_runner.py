"""Runs the rollouts of an eval in this process or in the workers of an env server, with the same results."""

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from pathlib import Path

from ramify.core.errors import AgentFailed, Failure, ProcessDied
from ramify.infer.gateway import Gateway
from ramify.rollout import Environment, repeat_attempt, run_attempt
from ramify.rollout.attempt import ProgressCallback
from ramify.rollout.evals.config import EvalConfig
from ramify.rollout.evals.plan import PlannedRollout
from ramify.rollout.evals.policy_client import ServedPolicy
from ramify.rollout.rewards import build_unscored_rewards
from ramify.trace import Trace

WORKER_WAIT_TIMEOUT = 600.0  # seconds a rollout may wait for a worker

RolloutRunner = Callable[[PlannedRollout, ProgressCallback], Awaitable[Sequence[Trace]]]
"""Runs one rollout and returns its traces."""


def open_rollout_runner(
    config: EvalConfig, environment: Environment, served: ServedPolicy, path: Path
) -> contextlib.AbstractAsyncContextManager[RolloutRunner]:
    """Yield the function that runs the rollouts of an eval; `path` is the run's directory."""
    if config.workers:
        return _open_in_workers(config, environment, served, path)
    return _open_in_process(config, environment, served)


@contextlib.asynccontextmanager
async def _open_in_process(
    config: EvalConfig, environment: Environment, served: ServedPolicy
) -> AsyncGenerator[RolloutRunner]:
    hooks = environment.hooks
    needs_gateway = environment.requires_endpoint or hooks.tools is not None or hooks.user is not None
    async with Gateway() if needs_gateway else contextlib.nullcontext() as gateway:

        async def run_in_process(rollout: PlannedRollout, on_progress: ProgressCallback) -> Sequence[Trace]:
            async def run() -> Sequence[Trace]:
                episode = await run_attempt(
                    environment,
                    rollout.task,
                    policy=served.policy,
                    gateway=gateway,
                    id=rollout.id,
                    group=rollout.task_key,
                    attempt=rollout.repetition,
                    seed=rollout.derive_seed(config.sampling.seed or 0),
                    on_progress=on_progress,
                )
                return episode.traces

            return await repeat_attempt(run, environment)

        yield run_in_process


@contextlib.asynccontextmanager
async def _open_in_workers(
    config: EvalConfig, environment: Environment, served: ServedPolicy, path: Path
) -> AsyncGenerator[RolloutRunner]:
    from ramify.rollout.envserver import EnvClient, EnvServerConfig, EnvServerProcess
    from ramify.rollout.envserver.messages import compute_environment_digest

    environment_digest = compute_environment_digest(environment.identity)
    source = {**environment.source.model_dump(mode="json"), "pool": {"type": "static", "workers": config.workers}}
    server_config = EnvServerConfig.model_validate(
        {
            "eval": [source],
            "model": config.model.model_dump(),
            "renderer": config.renderer.model_dump(),
            "inference": {"engine": "external", "base_url": served.urls},
            "client_type": config.client_type,
            "api_key_env": config.api_key_env,
            "output": path,
            "max_open_requests": max(EnvServerConfig.model_fields["max_open_requests"].default, config.concurrency),
            "hang_timeout": config.hang_timeout,
            "shutdown_timeout": 0.0,
        }
    )
    async with (
        EnvServerProcess(
            server_config, path / "configs" / "env-server.toml", start_timeout=config.startup_timeout
        ) as server,
        EnvClient(server.address) as client,
    ):

        async def run_in_worker(rollout: PlannedRollout, on_progress: ProgressCallback) -> Sequence[Trace]:
            async def run() -> Sequence[Trace]:
                result = await client.run(
                    rollout.task,
                    id=rollout.id,
                    group=rollout.task_key,
                    attempt=rollout.repetition,
                    seed=rollout.derive_seed(config.sampling.seed or 0),
                    environment_digest=environment_digest,
                    on_progress=on_progress,
                    timeout=environment.source.max_attempt_seconds(rollout.task.timeout) + WORKER_WAIT_TIMEOUT,
                )
                return result.episode.traces

            try:
                return await repeat_attempt(run, environment)
            except (AgentFailed, ProcessDied) as error:
                return [_make_failed_trace(environment, rollout, error)]

        yield run_in_worker


def _make_failed_trace(environment: Environment, rollout: PlannedRollout, error: AgentFailed | ProcessDied) -> Trace:
    """Return the trace of a rollout whose workers all died."""
    trace = Trace(
        id=rollout.id,
        episode=rollout.id,
        group=rollout.task_key,
        attempt=rollout.repetition,
        env=environment.name,
        task=rollout.task.to_wire(),
        rewards=build_unscored_rewards(environment),
        stop=error.name,
    )
    trace.errors.append(Failure.from_exception(error))
    return trace
