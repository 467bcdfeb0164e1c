"""Where the rollouts of an eval run: here, or in the workers of an env server. What comes of them is the same."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

from ramify.errors import Failure, WorkerDied
from ramify.evals.config import EvalConfig
from ramify.evals.plan import Pair
from ramify.evals.policies import Answering
from ramify.gateway import Gateway
from ramify.infer.config import ExternalConfig
from ramify.rollout import Environment, run_rollout
from ramify.rollout.attempt import ProgressCallback
from ramify.rollout.scoring import build_unscored_rewards
from ramify.trace import Trace

WORKER_WAIT = 600.0  # seconds a rollout may wait for a worker

Runs = Callable[[Pair, ProgressCallback], Awaitable[Sequence[Trace]]]
"""Runs one pair, telling whoever watches."""


def running(
    config: EvalConfig, environment: Environment, found: Answering, path: Path
) -> contextlib.AbstractAsyncContextManager[Runs]:
    """What runs the pairs of an eval."""
    if config.workers:
        return _in_workers(config, environment, found, path)
    return _in_process(config, environment, found)


@contextlib.asynccontextmanager
async def _in_process(config: EvalConfig, environment: Environment, found: Answering) -> AsyncIterator[Runs]:
    hooks = environment.hooks
    asks = environment.requires_endpoint or hooks.tools is not None or hooks.user is not None
    async with Gateway() if asks else contextlib.nullcontext() as gateway:

        async def here(pair: Pair, watch: ProgressCallback) -> Sequence[Trace]:
            episode = await run_rollout(
                environment,
                pair.task,
                policy=found.policy,
                gateway=gateway,
                id=pair.id,
                group=pair.key,
                attempt=pair.repetition,
                seed=pair.seed(config.sampling.seed or 0),
                on_progress=watch,
            )
            return episode.traces

        yield here


@contextlib.asynccontextmanager
async def _in_workers(
    config: EvalConfig, environment: Environment, found: Answering, path: Path
) -> AsyncIterator[Runs]:
    from ramify.envserver import EnvClient, EnvServerConfig, EnvServerProcess
    from ramify.envserver.messages import compute_environment_digest

    expected = compute_environment_digest(environment.identity)
    urls = config.inference.base_url if isinstance(config.inference, ExternalConfig) else [found.engine_url]
    source = environment.source.model_dump(mode="json")
    if environment.runtime_config.keep:
        source["runtime"] = {**source["runtime"], "keep": True}
    served = EnvServerConfig.model_validate(
        {
            "eval": [{**source, "pool": {"type": "static", "workers": config.workers}}],
            "model": config.model.model_dump(),
            "renderer": config.renderer.model_dump(),
            "inference": {"engine": "external", "base_url": urls},
            "client": config.client,
            "api_key_env": config.api_key_env,
            "output": path,
            "queue": max(EnvServerConfig.model_fields["queue"].default, config.concurrency),
            "hang_timeout": config.hang_timeout,
            "grace": 0.0,
        }
    )
    async with (
        EnvServerProcess(served, path / "configs" / "env-server.toml", start_timeout=config.start_deadline) as child,
        EnvClient(child.address) as client,
    ):
        attempts = environment.source.attempts

        async def there(pair: Pair, watch: ProgressCallback) -> Sequence[Trace]:
            try:
                done = await client.run(
                    pair.task,
                    id=pair.id,
                    group=pair.key,
                    attempt=pair.repetition,
                    seed=pair.seed(config.sampling.seed or 0),
                    environment_digest=expected,
                    on_progress=watch,
                    timeout=attempts * environment.source.max_attempt_seconds(pair.task.timeout) + WORKER_WAIT,
                )
            except WorkerDied as error:
                return [_lost(environment, pair, error)]
            return done.episode.traces

        yield there


def _lost(environment: Environment, pair: Pair, error: WorkerDied) -> Trace:
    """What is left of a rollout that no worker survived."""
    trace = Trace(
        id=pair.id,
        episode=pair.id,
        group=pair.key,
        attempt=pair.repetition,
        env=environment.name,
        task=pair.task.to_wire(),
        rewards=build_unscored_rewards(environment),
        stop=error.name,
    )
    trace.errors.append(Failure.from_exception(error))
    return trace
