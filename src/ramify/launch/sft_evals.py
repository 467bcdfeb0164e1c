"""The `[[eval]]` sources of `ramify sft`: the same evals as in an RL run, between the steps of one process.

Each eval starts an engine with the weights of its step and an env server per source, and stops them when it is done, so
that the trainer has its memory back. Rollouts and metrics are stored as in an RL run.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Self

from ramify.core.async_calls import cancel_all, unwrap_exception_group
from ramify.core.errors import Failure
from ramify.infer.config import ExternalServersConfig, ModelConfig, ServeConfig, ServerConfig
from ramify.orchestrate.connected_source import ConnectedSource, build_connected_source
from ramify.orchestrate.env_server_pool import EnvServerPool
from ramify.orchestrate.online_evals import EvalSchedule, OnlineEvaluator, format_eval_result
from ramify.rollout.envserver import EnvServerConfig, EnvServerProcess
from ramify.rollout.envserver.config import ServedSourceConfig
from ramify.rollout.evals.config import EvalSourceConfig
from ramify.rollout.evals.policy_client import EngineProcess
from ramify.run.store import RunStore
from ramify.run.store.environments import find_changes, format_changes, record_environments
from ramify.run.store.run_log import RunLog
from ramify.train.sft.config import SftConfig

STOP_POLL_INTERVAL = 0.2  # seconds between two looks whether the run stops


class RolloutEvals:
    """The evals of one run. An eval of a run that stops is cancelled, and repeated when the run is resumed."""

    def __init__(self, config: SftConfig) -> None:
        self._config, self._schedule = config, EvalSchedule(config.eval)
        self._sources = {source.source_name: source for source in config.eval}

    @classmethod
    def from_config(cls, config: SftConfig) -> Self | None:
        """Return the evals of a run; None if it has none."""
        return cls(config) if config.eval else None

    def open(self, store: RunStore, print_line: Callable[[str], None]) -> None:
        """Start with the evals that `store` has; further results go there."""
        self._store, self._run_log, self._print_line = store, RunLog(store), print_line
        self._schedule.restore(self._run_log.metrics("eval/*/avg"))

    def get_due_sources(self, step: int, *, is_last: bool = False) -> list[str]:
        """Return the sources that are due at a step."""
        return self._schedule.get_due_sources(step, is_last=is_last)

    def run(self, step: int, names: list[str], model: Path, stop: threading.Event) -> None:
        """Evaluate a model on sources, and record the results; return early when `stop` is set."""
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._run_until_stopped(step, names, model, stop))
            self._schedule.mark_started(step, names)

    async def _run_until_stopped(self, step: int, names: list[str], model: Path, stop: threading.Event) -> None:
        task = asyncio.create_task(self._run(step, names, model), name=f"evals at step {step}")
        try:
            while not stop.is_set() and not task.done():
                await asyncio.wait([task], timeout=STOP_POLL_INTERVAL)
        finally:
            if not task.done():
                await cancel_all([task])
        await task

    async def _run(self, step: int, names: list[str], model: Path) -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                address = await self._start_engine(model, stack)
                async with asyncio.TaskGroup() as group:
                    connecting = {
                        name: group.create_task(self._connect(self._sources[name], model, address, stack))
                        for name in names
                    }
                sources = {name: (self._sources[name], await connecting[name]) for name in names}
                evaluator = OnlineEvaluator(
                    sources,
                    None,
                    self._store,
                    seed=self._config.seed,
                    on_result=self._record_result,
                    on_failure=self._record_failure,
                    on_progress=lambda: None,
                )
                await evaluator.run(step, names)
        except BaseExceptionGroup as failures:
            raise unwrap_exception_group(failures) from None

    async def _start_engine(self, model: Path, stack: contextlib.AsyncExitStack) -> str:
        config = self._config
        serve_config = ServeConfig(
            model=ModelConfig(name=str(model)),
            renderer=config.renderer,
            inference=config.inference,
            server=ServerConfig(port=0),
        )
        engine = EngineProcess(serve_config, self._store.path, start_timeout=config.startup_timeout)
        return (await stack.enter_async_context(engine)).address

    async def _connect(
        self, source: EvalSourceConfig, model: Path, address: str, stack: contextlib.AsyncExitStack
    ) -> ConnectedSource:
        """Start the env server of a source and connect to it."""
        config, name, run = self._config, source.source_name, self._store.path
        served = ServedSourceConfig(**{key: getattr(source, key) for key in ServedSourceConfig.model_fields})
        server_config = EnvServerConfig(
            eval=[served.model_copy(update={"seq_len": source.seq_len or config.seq_len})],
            model=ModelConfig(name=str(model)),
            renderer=config.renderer,
            inference=ExternalServersConfig(base_url=[address]),
            output=run,
            shutdown_timeout=0.0,
        )
        config_path = run / "configs" / f"env-eval-{name.strip('/').replace('/', '-')}.toml"
        process = EnvServerProcess(server_config, config_path, start_timeout=config.startup_timeout)
        await stack.enter_async_context(process)
        pool = EnvServerPool(name, [process.address], start_timeout=config.startup_timeout)
        connected = await build_connected_source(source, await stack.enter_async_context(pool))
        return replace(connected, revision=await self._record_environment(connected, source.num_tasks))

    async def _record_environment(self, source: ConnectedSource, num_tasks: int) -> int:
        """Record the environment of a source, and return its revision. A change is a new revision."""
        key = f"eval/{source.name}"
        observed = {key: await source.observe_environment(self._store, key, num_tasks)}
        changes = find_changes(self._store, observed)
        for line in format_changes(changes):
            self._print_line(f"the environment of {key} has changed: {line}")
        return record_environments(self._store, observed, changes)[key]

    def _record_result(self, step: int, values: dict[str, float]) -> None:
        self._run_log.log_metrics(step, values)
        self._print_line(format_eval_result(step, values))

    def _record_failure(self, origin: str, failure: Failure) -> None:
        self._run_log.log_event("failure", where=origin, name=failure.name, message=failure.message)
        self._print_line(f"{origin}: {failure.name}: {failure.message}")
