"""One attempt at one task, phase by phase.

    boot -> setup -> harness -> finalize -> scoring -> (the runtime is stopped)

Every phase is timed and has a timeout. A failure whose `blame` is "policy" ends only the harness phase: the attempt is
still finalized and scored. Any other failure ends the attempt, and its rewards stay None. However the attempt ends,
cancellation included, the runtime is stopped and the session closed before the caller sees the result.
"""

import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from ramify.core.async_calls import fail_after
from ramify.core.errors import (
    ConfigInvalid,
    EngineIncompatible,
    EnvironmentFault,
    Failure,
    OperationInvalid,
    RamifyError,
)
from ramify.core.seeds import derive_seed
from ramify.env import RolloutAgent, RolloutContext, Task, ToolSet, User
from ramify.env.mcp import extend_tools
from ramify.infer.gateway.main_calls import find_side_calls
from ramify.infer.gateway.policy import Policy
from ramify.infer.gateway.served_tools import ServedTools
from ramify.infer.gateway.session import RolloutSession
from ramify.rollout.environment import Environment
from ramify.rollout.harness.base import get_user_prompt_texts
from ramify.rollout.harness_timeout import HarnessTimeout
from ramify.rollout.prepared_runtimes import RetryingRuntime, collect_outputs, run_commands
from ramify.rollout.rewards import (
    SCORING_STATE_KEY,
    build_unscored_rewards,
    drop_unserializable_info,
    raise_environment_faults,
    save_state,
    score_trace,
)
from ramify.trace import Episode, Trace

if TYPE_CHECKING:
    from ramify.infer.gateway import Gateway

ProgressCallback = Callable[[str, int], None]
"""Called with a phase ("boot", "setup", "harness", "finalize", "scoring", "done") when the attempt enters it, or "turn"
after a model call, and with the number of model calls so far."""
CLOSE_TIMEOUT = 30.0  # seconds for the runtime to stop


async def run_attempt(
    env: Environment,
    task: Task,
    *,
    policy: Policy,
    gateway: "Gateway | None" = None,
    id: str,
    group: str = "",
    attempt: int = 0,
    seed: int = 0,
    train: bool = False,
    on_progress: ProgressCallback | None = None,
) -> Episode:
    """Run one attempt and return its episode, which contains any failures.

    Raises only errors that are known before the attempt starts: ConfigInvalid if the harness or the runtime cannot run
    the task, if the sampling parameters cannot be trained on, or if an endpoint is required and there is no gateway;
    EngineIncompatible if the policy returns no tokens in training. `seed` determines all randomness of the attempt.
    """
    env.check_task(task)
    if train and not policy.trainable:
        raise EngineIncompatible(f"{env.name} is trained on, but {policy.name} returns no token ids and logprobs")
    if gateway is None and env.requires_endpoint:
        raise ConfigInvalid(f"{env.name} requires an `endpoint`, but there is no gateway")
    await env.start_pacer.wait_turn()
    runner = AttemptRunner(env, task, policy, gateway, id, group, attempt, seed, train, on_progress)
    return await runner.run()


class AttemptRunner:
    """Runs one attempt, and owns its trace, session, runtime and context. `run_attempt` checks the task first."""

    def __init__(
        self,
        env: Environment,
        task: Task,
        policy: Policy,
        gateway: "Gateway | None",
        id: str,
        group: str,
        attempt: int,
        seed: int,
        train: bool,
        on_progress: ProgressCallback | None,
    ) -> None:
        seed_text = f"{seed}:{task.identity}:{attempt}"
        self.env, self.task = env, task
        self.harness_timeout = task.timeout or env.harness.config.timeout
        self.runtime = RetryingRuntime(env.prepared_runtimes.take())  # pyrefly: ignore[bad-instantiation] - the class has no abstract methods
        self._policy, self._seed_text, self._train = policy, seed_text, train
        self._make_trace = partial(
            Trace,
            episode=id,
            group=group,
            attempt=attempt,
            env=env.name,
            task=task.to_wire(),
            harness=env.harness.trace_metadata,
            runtime=env.runtime_metadata,
            sampler={"model": policy.name, "sampling": env.sampling_metadata},
        )
        self.trace = self._make_trace(id=id, rewards=build_unscored_rewards(env))
        self.session = self._make_session(self.trace)
        self.sessions = [self.session]  # one for each agent
        self.context = RolloutContext(task, self.trace, self.runtime, random.Random(seed_text))
        self._gateway, self._on_progress = gateway, on_progress
        if on_progress is not None:
            self.session.on_reply = lambda _: self._report_phase("turn")

    async def run(self) -> Episode:
        """Run all phases, clean up, and return the episode."""
        if self._gateway is not None:
            self.context.endpoint = self._gateway.register(self.session)
            self.context.add_agent = self._add_agent
        try:
            await self._run_phases()
        finally:
            await _run_uncancellable(self._close())
        for session in self.sessions:
            session.trace.timing.model = session.model_seconds
            session.trace.timing.stalled = session.clock.seconds
            self._exclude_side_calls(session)
            drop_unserializable_info(session.trace)
        self._report_phase("done")
        return Episode(tuple(session.trace for session in self.sessions))

    def _make_session(self, trace: Trace, agent: str = "") -> RolloutSession:
        source = self.env.source
        session = RolloutSession(
            trace,
            self._policy,
            sampling=source.sampling,
            limits=self.env.limits,
            models=self.env.open_models(),
            is_training=self._train,
            seed=derive_seed(f"{self._seed_text}:{agent}" if agent else self._seed_text),
            call_timeout=self.harness_timeout + source.timeouts.engine_stall,
        )
        session.is_agent_running = False
        return session

    def _add_agent(self, name: str) -> RolloutAgent:
        """Return a new agent of the rollout; the first one has the rollout's own trace."""
        assert self._gateway is not None and self.context.endpoint is not None
        if any(session.trace.agent == name for session in self.sessions) or not name:
            raise EnvironmentFault(f"add_agent: expected a name that no agent has, found {name!r}")
        if not self.trace.agent:
            self.trace.agent = name
            return RolloutAgent(self.trace, self.context.endpoint)
        rewards = build_unscored_rewards(self.env)
        trace = self._make_trace(id=f"{self.trace.id}-{name}", agent=name, rewards=rewards)
        session = self._make_session(trace, name)
        session.is_agent_running = self.session.is_agent_running
        self.sessions.append(session)
        return RolloutAgent(trace, self._gateway.register(session))

    async def _run_phases(self) -> None:
        timeouts = self.env.source.timeouts
        try:
            await self._run_phase("boot", fail_after(timeouts.boot, "boot"), self.runtime.start(self.task))
            tools, user = await self._run_phase("setup", fail_after(timeouts.setup, "setup"), self._setup())
            try:
                timeout = HarnessTimeout(self.harness_timeout, self.session.clock, timeouts.engine_stall)
                stop = await self._run_phase("harness", timeout, self.run_harness(tools, user))
                for session in self.sessions:
                    session.trace.stop = session.trace.stop or stop
            except RamifyError as error:
                if error.blame != "policy":
                    raise
                self._record_failure(error)
            await self.finalize_and_score()
        except RamifyError as error:
            self._record_failure(error)

    def _exclude_side_calls(self, session: RolloutSession) -> None:
        """Mark the calls of one agent that `harness.train` excludes from training."""
        if self.env.harness.config.train == "main":
            side_calls = find_side_calls(session.recorded_calls, lambda: get_user_prompt_texts(self.task))
            for node, reason in sorted(side_calls.items()):
                session.trace.exclude_from_training(node, reason)

    async def finalize_and_score(self) -> None:
        """Run the `finalize` hook, the rewards and the metrics."""
        if self.env.hooks.finalize is not None:
            timeout = fail_after(self.env.source.timeouts.finalize, "finalize")
            await self._run_phase("finalize", timeout, self.env.hooks.finalize(self.context))
        self._report_phase("scoring")
        start = time.monotonic()
        if self.task.outputs is not None:
            await self._replace_runtime(self.task.outputs)
        if not self._train and any("state" in hook.injected_parameters for hook in self.env.hooks.rewards):
            self.trace.info[SCORING_STATE_KEY] = _save_state_or_reason(self.context.state)
        for session in self.sessions:
            context = self.context if session is self.session else replace(self.context, trace=session.trace)
            await score_trace(self.env, context)
        self.trace.timing.scoring = time.monotonic() - start

    async def _replace_runtime(self, outputs: Sequence[str]) -> None:
        """Replace the agent's runtime by a fresh one that has only the task's outputs, so that rewards can trust it."""
        with raise_environment_faults("outputs"), tempfile.TemporaryDirectory(prefix="ramify-outputs-") as directory:
            async with fail_after(self.env.source.timeouts.boot, "the runtime of the rewards"):
                self.trace.info["outputs"] = await collect_outputs(self.runtime, outputs, Path(directory))
                await self._stop_runtime()
                self.runtime = self.context.runtime = RetryingRuntime(self.env.prepared_runtimes.take())  # pyrefly: ignore[bad-instantiation] - the class has no abstract methods
                await self.runtime.start(self.task)
            await self._run_commands("setup")  # each command has a time limit of its own
            async with fail_after(self.env.source.timeouts.boot, "the outputs of the task"):
                await self.runtime.upload(Path(directory), ".")

    async def _setup(self) -> tuple[ToolSet, User | None]:
        hooks = self.env.hooks
        await self._run_commands("setup")
        if hooks.setup is not None:
            await hooks.setup(self.context)
        tools, user = await hooks.build_toolset(self.context), await hooks.build_user(self.context)
        await self._run_commands("pre_run")
        return tools, user

    async def _run_commands(self, field: Literal["setup", "pre_run"]) -> None:
        """Run the commands of the task, then the commands of the runtime's configuration."""
        for key, owner in (("task", self.task), ("runtime", self.runtime.config)):
            commands: Sequence[str] = getattr(owner, field)
            timeout = self.env.source.timeouts.setup
            await run_commands(self.runtime, f"{key}.{field}", commands, timeout=timeout, rollout_id=self.trace.id)

    async def run_harness(self, tools: ToolSet, user: User | None) -> str:
        """Run the agent and return its stop reason."""
        harness, stop_hooks = self.env.harness, self.env.hooks.stops
        self.session.is_agent_running = True
        try:
            async with contextlib.AsyncExitStack() as stack:
                config = harness.config
                tools = await stack.enter_async_context(extend_tools(tools, config.mcp, config.tool_timeout))
                if harness.requires_endpoint:
                    run_tool = partial(tools.run, context=self.context)
                    self.session.tools = ServedTools(self.trace, tools.schemas, run_tool)
                    await stack.enter_async_context(self.session.tools)
                return await harness.run(self.context, self.session, tools, user, stop_hooks)
        finally:
            for session in self.sessions:
                session.is_agent_running = False

    async def _run_phase(
        self, name: str, timeout: fail_after | HarnessTimeout, coroutine: Coroutine[Any, Any, Any]
    ) -> Any:
        """Run one phase with its timeout, and record its duration."""
        self._report_phase(name)
        start = time.monotonic()
        try:
            with raise_environment_faults(name):
                async with timeout:
                    return await coroutine
        finally:
            setattr(self.trace.timing, name, time.monotonic() - start)

    def _record_failure(self, error: RamifyError) -> None:
        for session in self.sessions:
            session.trace.stop = error.name
            session.trace.errors.append(Failure.from_exception(error))

    def _report_phase(self, phase: str) -> None:
        if self._on_progress is not None:
            self._on_progress(phase, len(self.trace.sampled_nodes))

    async def _close(self) -> None:
        """Close the session and stop the runtime. A failure here does not change the result; the trace records it."""
        for session in self.sessions:
            if self._gateway is not None:
                self._gateway.unregister(session)
            else:
                session.close()
        try:
            async with fail_after(CLOSE_TIMEOUT, "stopping the runtime"):
                await self._stop_runtime()
        except Exception as error:  # noqa: BLE001 - a runtime may be a user's plugin
            self.trace.info["cleanup"] = f"{type(error).__name__}: {error}"

    async def _stop_runtime(self) -> None:
        """Stop the runtime, and record where it kept its files."""
        await self.runtime.stop()
        if self.runtime.kept_workdir is not None:
            self.trace.info.setdefault("kept_workdirs", []).append(str(self.runtime.kept_workdir))


async def _run_uncancellable(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end, even if the caller is cancelled meanwhile. It must have its own timeout."""
    task = asyncio.create_task(coroutine)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()


def _save_state_or_reason(state: SimpleNamespace) -> dict[str, str]:
    """Return the state in the form that `ramify replay` loads, or the reason why it cannot be saved."""
    try:
        return {"saved": save_state(state)}
    except OperationInvalid as error:
        return {"refused": error.message}
