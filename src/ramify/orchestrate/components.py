"""The components of an orchestrator, wired together.

env servers <- AttemptDispatcher -> OrchestratorCore (ledger) <- TrainerService <- trainer
                                          ^ version applied           | version published
engines <-------------------------- WeightUpdater <-------------------+         beside them: OnlineEvaluator
"""

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ramify.core.errors import EngineIncompatible, Failure
from ramify.env import plugin
from ramify.infer.client.replica import EngineLoad
from ramify.infer.config import ExternalServersConfig
from ramify.model.resolve import read_vocab_size, resolve_model_path
from ramify.orchestrate.algorithms import Algorithm
from ramify.orchestrate.attempt_dispatcher import AttemptDispatcher
from ramify.orchestrate.batches import LossNormalization, get_top_logprobs_path
from ramify.orchestrate.connected_source import ConnectedSource
from ramify.orchestrate.connections import REPORT_INTERVAL, RunConnections, StartupReport
from ramify.orchestrate.core import OrchestratorCore, check_task_counts
from ramify.orchestrate.curriculum import SourceMix, build_curriculum
from ramify.orchestrate.filters import Filter
from ramify.orchestrate.group_scoring import ScoringRules, SourceSpec
from ramify.orchestrate.online_evals import OnlineEvaluator, format_eval_result
from ramify.orchestrate.progress import RunProgress
from ramify.orchestrate.reference_scores import ReferenceScorer
from ramify.orchestrate.run_config import RunConfig
from ramify.orchestrate.trainer_service import TrainerService
from ramify.orchestrate.untrainable_groups import DEFAULT_NO_SIGNAL_SETTINGS, NoSignalSettings
from ramify.orchestrate.weight_updates import WeightUpdater
from ramify.run.fencing.head_log import DirectoryStore
from ramify.run.state import EvalMetric
from ramify.run.store import open_run
from ramify.run.store.environments import (
    ACCEPT_CHANGES_KEY,
    ObservedEnvironment,
    check_no_changes,
    find_changes,
    record_environments,
)
from ramify.run.store.group_state import DropReason, GroupState
from ramify.run.store.head_replication import HeadReplicator
from ramify.run.store.ledger import Ledger
from ramify.run.store.run_log import RunLog
from ramify.trace.version import PolicyVersion


@dataclass(frozen=True, slots=True)
class RunPlugins:
    """The plugins that turn the traces of a group into annotations."""

    algorithms: dict[str, Algorithm]  # by source name
    filters: tuple[Filter, ...]


def load_plugins(config: RunConfig) -> RunPlugins:
    """Load every algorithm and filter. Raises ConfigInvalid with all wrong keys."""
    plugins: list[Any] = [plugin_class(table) for plugin_class, table in plugin.resolve_plugins(config.plugin_tables)]
    algorithms = dict(zip([source.source_name for source in config.train], plugins))
    return RunPlugins(algorithms, tuple(plugins[len(config.train) :]))


def build_source_mix(config: RunConfig, task_counts: dict[str, int | None]) -> SourceMix:
    """Build the mix of the train sources, given the number of tasks of each (None: unbounded)."""
    sources = {source.source_name: source for source in config.train}
    curricula = {
        name: build_curriculum(source.curriculum, task_counts[name], f"{config.seed}:{name}")
        for name, source in sources.items()
    }
    return SourceMix({name: source.weight for name, source in sources.items()}, curricula)


LOW_KV_USAGE, HIGH_KV_USAGE = 0.8, 0.95  # fractions of the KV cache in use
QUEUE_POLLS = 5  # successive measurements in which requests must be queued
INCREASE_FACTOR, DECREASE_FACTOR = 1.1, 0.75


class ConcurrencyLimiter:
    """A limit of the attempts in flight, between `min_limit` and `max_limit`, that follows the load of the engines.

    Too few attempts leave an engine idle; too many make it preempt requests, or queue them until they time out. The
    limit grows slowly while it is used up and the KV caches have room, and shrinks by a factor as soon as a cache is
    full, or if requests stay queued. The requests of a wave arrive together, so a queue alone does not mean overload.
    A lower limit cancels no attempt, so the limit shrinks again only after enough attempts have ended.
    """

    def __init__(self, min_limit: int, max_limit: int) -> None:
        self.min_limit, self.max_limit, self.limit = min_limit, max_limit, max_limit
        self._queues: deque[int] = deque(maxlen=QUEUE_POLLS)
        self._last_seconds: list[float | None] = []

    def update(self, loads: Sequence[EngineLoad], num_in_flight: int) -> int:
        """Adapt the limit to the loads of all engines, measured with `num_in_flight` attempts, and return it.

        While engines wait for the trainer or for weights, their loads do not change and say nothing new.
        """
        queued, seconds = sum(load.num_waiting for load in loads), [load.seconds.get("sampling") for load in loads]
        was_held = queued > 0 and None not in seconds and seconds == self._last_seconds
        self._last_seconds = seconds
        if was_held:
            return self.limit
        is_draining = num_in_flight > self.limit  # the loads still result from a higher limit
        if not is_draining:
            self._queues.append(queued)
        kv_usage = max(load.kv_usage for load in loads)
        is_queueing = len(self._queues) == QUEUE_POLLS and min(self._queues) > max(1, num_in_flight // 8)
        if not is_draining and (kv_usage > HIGH_KV_USAGE or is_queueing):
            # Start from the number in flight if it is below the limit: an unused limit carries no information.
            self.limit = max(self.min_limit, int(min(self.limit, max(num_in_flight, 1)) * DECREASE_FACTOR))
            self._queues.clear()
        elif kv_usage < LOW_KV_USAGE and queued == 0 and num_in_flight >= self.limit:
            self.limit = min(self.max_limit, max(self.limit + 1, int(self.limit * INCREASE_FACTOR)))
        return self.limit


RUN_ID_KEY = "run_id"  # of the id among the facts of the store
READER_TIMEOUT = 30.0  # seconds to wait for commands that read the run (`why`, `show`, `export`)

LogMetrics = Callable[[int, Mapping[str, float]], None]


class RunComponents:
    """The components of one run. Call `open` once; everything it opens is closed with the stack.

    Attributes:
        policy: name of the policy, from the name of the model.
        stop_requested: set when the run should save a checkpoint and stop.
        connections: the engines, other models and env servers of the run.
        client: the client of the engines.
        sources: the train sources by name, and the eval sources by `eval/NAME`.
        first_step: the step at which this process started.
        next_step_to_report: the first step whose batch was not reported yet.
    """

    def __init__(
        self,
        config: RunConfig,
        on_metrics: LogMetrics | None = None,
        no_signal_settings: NoSignalSettings = DEFAULT_NO_SIGNAL_SETTINGS,
        *,
        report_interval: float = REPORT_INTERVAL,
    ) -> None:
        assert isinstance(config.inference, ExternalServersConfig), "the orchestrator starts no engine"
        self.config, self.inference, self._on_metrics = config, config.inference, on_metrics
        self.no_signal_settings, self._report_interval = no_signal_settings, report_interval
        self.policy = Path(config.model.name).name
        self.started_at = time.time()
        self.stop_requested = asyncio.Event()

    async def open(self, stack: AsyncExitStack) -> None:
        """Open the store, connect to engines and env servers, and restore the state of the run from the ledger."""
        config = self.config
        plugins = load_plugins(config)
        self.store = open_run(config.path, config.identity, lock_timeout=READER_TIMEOUT)
        stack.callback(self.store.close)
        self.ledger, self.run_log = Ledger.open(self.store), RunLog(self.store)
        self.replicator = await self._open_replicator()
        self._startup_report = StartupReport(
            config, self.run_log, self.ledger.progress().committed, interval=self._report_interval
        )
        self.progress = RunProgress(self.run_log, self._on_metrics)
        self.connections = RunConnections(
            config, self.inference.base_url, PolicyVersion(self.policy), self._startup_report, self._on_env_server_lost
        )
        await self.connections.open(stack)
        self.client, train, evals = self.connections.client, self.connections.train, self.connections.evals
        source_specs = self._build_source_specs(plugins, train)
        check_task_counts(self.ledger, source_specs)
        await self._check_environments(train, evals)
        self.core = await self._open_core(plugins, source_specs, train)
        self.sources = self.connections.sources
        self.core.untrainable_groups.warning_groups = self.no_signal_settings.warning_groups
        self.core.untrainable_groups.restore(self.ledger, config.orchestrator.max_untrainable_groups)
        self.first_step, self.next_step_to_report = self.core.ledger_progress.committed, self.core.admission.next_step
        max_group_size = max(config.get_group_size(source) for source in config.train)
        max_active = config.orchestrator.admission_limits.slots * max_group_size
        max_limit = config.orchestrator.max_concurrency or max_active
        self.limiter = ConcurrencyLimiter(min(max_limit, config.orchestrator.batch_size), max_limit)
        self.weight_updater = WeightUpdater(self.client, self._on_weights_applied, run=self._get_run_id())
        self.dispatcher = AttemptDispatcher(
            self.core,
            train,
            seed=config.seed,
            get_limit=lambda: self.limiter.limit,
            on_group_scored=self.progress.record_group,
            on_failure=self.progress.record_failure,
            reference_scorer=ReferenceScorer(self.connections.score_models),
        )
        self.evaluator = OnlineEvaluator(
            {source.source_name: (source, evals[source.source_name]) for source in config.eval},
            self.weight_updater,
            self.store,
            seed=config.seed,
            on_result=self._on_eval_done,
            on_failure=self.progress.record_failure,
            on_progress=self.progress.mark_progress,
        )
        self.evaluator.schedule.restore(self.run_log.metrics("eval/*/avg"))
        self.trainer_service = TrainerService(
            self.core,
            self.weight_updater,
            self.progress,
            policy=self.policy,
            run=self._get_run_id(),
            max_steps=config.max_steps,
            on_trainer_replaced=self._on_trainer_replaced,
            get_keep_values=lambda: self.run_log.values_by_step(config.checkpoint.keep_best),
        )
        # A new run samples from the initial weights; a resumed run waits for its trainer's.
        if self.first_step == 0 and all(version.step == 0 for version in self.client.versions.values()):
            self.dispatcher.weights_ready.set()
            self.evaluator.queue_due_sources(0)
        self.progress.mark_sampling_started()

    async def _open_replicator(self) -> HeadReplicator | None:
        """Append the changes that the head log lacks; later commits wait for their entry.

        Return None if the run has no shared directory. Raises ProcessReplaced if another head has taken over.
        """
        if self.config.shared_path is None:
            return None
        shared = DirectoryStore(self.config.shared_path)
        replicator = HeadReplicator(self.store, shared, lambda number: get_top_logprobs_path(self.store.path, number))
        self._get_run_id()  # a later head has the same id: the engines refuse the trainers of this head then
        await replicator.replicate()
        self.ledger.replicate = replicator.replicate
        return replicator

    def _get_run_id(self) -> str:
        """Return the id that distinguishes this run from all others, whatever their directories are called."""
        if (run_id := self.store.get_fact(RUN_ID_KEY)) is None:
            run_id = uuid.uuid4().hex
            self.store.set_fact(RUN_ID_KEY, run_id)
        return run_id

    async def _check_environments(self, train: dict[str, ConnectedSource], evals: dict[str, ConnectedSource]) -> None:
        """Compare every source with the environment that is stored for it, and set its revision.

        Raises EnvironmentChanged for changes that the user did not accept. After accepted changes, groups that are not
        scored yet are dropped: their attempts would be scored by two versions of the environment.
        """
        limits = {f"eval/{source.source_name}": source.num_tasks for source in self.config.eval}
        stored_sources = {**train, **{f"eval/{name}": source for name, source in evals.items()}}
        observed: dict[str, ObservedEnvironment] = {}
        for name, source in stored_sources.items():
            async with self._startup_report.waiting_for(f"the tasks of {name}"):
                observed[name] = await source.observe_environment(self.store, name, limits.get(name))
        changes = find_changes(self.store, observed)
        if not self.store.get_fact(ACCEPT_CHANGES_KEY):
            check_no_changes(self.store, changes)
        for group in self.ledger.open_groups():
            if group.source in changes and group.state is not GroupState.SCORED:
                detail = f"the environment of {group.source} has changed"
                await self.ledger.drop_group(group.number, DropReason.CANCELLED, detail)
        revisions = record_environments(self.store, observed, changes)
        self.store.set_fact(ACCEPT_CHANGES_KEY, False)
        for sources, prefix in ((train, ""), (evals, "eval/")):
            for name, source in sources.items():
                sources[name] = replace(source, revision=revisions[f"{prefix}{name}"])

    def _build_source_specs(self, plugins: RunPlugins, train: Mapping[str, ConnectedSource]) -> dict[str, SourceSpec]:
        return {
            name: SourceSpec(
                name=name,
                algorithm=plugins.algorithms[name],
                group_size=self.config.get_group_size(config),
                max_tries=config.max_tries,
                temperature=config.sampling.temperature,
                is_scored_by_trainer=bool(config.score_model) and config.score_model not in self.config.all_models,
                normalization=LossNormalization(config.normalization, config.normalization_tokens or 1),
                group_rewards=train[name].group_rewards,
                tasks_per_epoch=train[name].num_tasks if config.curriculum.type == "shuffle" else None,
            )
            for name, config in {config.source_name: config for config in self.config.train}.items()
        }

    async def _open_core(
        self, plugins: RunPlugins, source_specs: Mapping[str, SourceSpec], train: Mapping[str, ConnectedSource]
    ) -> OrchestratorCore:
        config = self.config
        model_dir, min_group_size = resolve_model_path(config.model.name), config.orchestrator.min_group_size
        if (vocab_size := read_vocab_size(model_dir)) is None:
            raise EngineIncompatible(f"{model_dir / 'config.json'} has no vocab_size")
        rules = ScoringRules(vocab_size, config.seq_len, plugins.filters, min_group_size)
        mix = build_source_mix(config, {name: source.num_tasks for name, source in train.items()})
        limits = config.orchestrator.admission_limits
        return await OrchestratorCore.open(self.ledger, mix, source_specs, rules, limits, config.max_steps)

    def _on_env_server_lost(self, origin: str, failure: Failure) -> None:
        """Record the loss of an env server, unless the run stops: then its env servers may stop too."""
        if not self.stop_requested.is_set():
            self.progress.record_failure(origin, failure)

    def _on_trainer_replaced(self) -> None:
        """Pause sampling until the engines serve the version at which the new trainer starts."""
        self.dispatcher.weights_ready.clear()
        self.weight_updater.discard_pending()

    def _on_weights_applied(self, version: PolicyVersion, seconds: float) -> None:
        """Free the slots of the batches that made the version, resume sampling, and queue the evals that are due."""
        if version.incarnation != self.core.ledger_progress.incarnation:
            return  # its trainer was replaced meanwhile
        self.core.record_applied_version(version.incarnation, version.step)
        self.progress.record_metrics(version.step, {"time/swap": seconds})
        self.dispatcher.weights_ready.set()
        self.dispatcher.wake()
        self.evaluator.queue_due_sources(version.step)

    def _on_eval_done(self, step: int, values: dict[str, float]) -> None:
        self.progress.evals |= {name: EvalMetric(step, value) for name, value in values.items()}
        self.progress.record_metrics(step, values)
        print(format_eval_result(step, values), flush=True)
