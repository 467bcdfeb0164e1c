"""What the orchestrator of a run holds, put together, and what each part does to the others.

env servers <- Sampling -> Core (ledger) <- TrainerService <- trainer
                             ^ applied
engines <------------------ Weights <- published            Evaluating beside them
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

from ramify.client import ClientConfig, InferenceClient
from ramify.client.engine_load import EngineLoad as EngineLoad
from ramify.errors import ConfigInvalid, TokenizerMismatch
from ramify.infer.config import ExternalConfig
from ramify.infer.inference_client import build_inference_client
from ramify.model.resolve import resolve_model_path
from ramify.model.version import PolicyVersion
from ramify.orchestrate.attempt_dispatcher import AttemptDispatcher
from ramify.orchestrate.concurrency import ConcurrencyLimiter
from ramify.orchestrate.config import RunConfig
from ramify.orchestrate.connected_source import SourceConnection, connect_source, observe_environment
from ramify.orchestrate.core import OrchestratorCore, check_task_counts
from ramify.orchestrate.online_evals import OnlineEvaluator
from ramify.orchestrate.plugins import RunPlugins, build_source_mix, load_plugins
from ramify.orchestrate.progress import RunProgress
from ramify.orchestrate.scoring import ScoringRules, SourceSpec
from ramify.orchestrate.snapshot import write_snapshot
from ramify.orchestrate.trainer_service import TrainerService
from ramify.orchestrate.weight_updates import WeightUpdater
from ramify.store import open_run
from ramify.store.environments import ACCEPT_CHANGES_KEY, check_no_changes, find_changes, record_environments
from ramify.store.group_state import DropReason, GroupState
from ramify.store.ledger import Ledger
from ramify.store.run_log import RunLog

READER_TIMEOUT = 30.0  # seconds for whoever began to read the run while nobody ran it: `why`, `show`, `export`

LogMetrics = Callable[[int, Mapping[str, float]], None]


class RunContext:
    """One run. `open` it once; what it opened ends with the stack."""

    def __init__(self, config: RunConfig, on_metrics: LogMetrics | None = None) -> None:
        if not isinstance(config.inference, ExternalConfig):
            raise ConfigInvalid("inference: the orchestrator starts no engine; give it engine = 'external', base_url")
        for kind, sources in (("train", config.train), ("eval", config.eval)):
            for number, source in enumerate(sources):
                if source.address is None:
                    raise ConfigInvalid(f"{kind}.{number}.address: the orchestrator needs the env server's address")
        self.config, self.inference, self._on_metrics = config, config.inference, on_metrics
        self.policy = Path(config.model.name).name
        self.started_at = time.time()
        self.stop_requested = asyncio.Event()
        """Set when the run is asked to make a checkpoint and end, to be continued."""
        self.eval_queue: asyncio.Queue[tuple[int, list[str]]] = asyncio.Queue()
        """Evals: the step and the sources."""
        self.engine_loads: list[EngineLoad] = []
        """What the engines said last."""

    async def open(self, stack: AsyncExitStack) -> None:
        """Open the store, meet engines and env servers, and stand where the ledger says the run stands."""
        config = self.config
        plugins = load_plugins(config)
        self.store = open_run(config.path, config.identity, lock_timeout=READER_TIMEOUT)
        stack.callback(self.store.close)
        self.ledger, self.journal = Ledger.open(self.store), RunLog(self.store)
        self._write_start_snapshot()
        self.progress = RunProgress(self.journal, self._on_metrics)
        patience = config.launch.start_deadline
        self.client: InferenceClient = await stack.enter_async_context(
            build_inference_client(
                self.inference, config=ClientConfig(patience=patience), version=PolicyVersion(self.policy)
            )
        )
        known = {"patience": patience, "secret": config.secret}
        train = {source.source_name: await connect_source(source, stack, **known) for source in config.train}
        evals = {source.source_name: await connect_source(source, stack, **known) for source in config.eval}
        sources = self._build_source_specs(plugins, train)
        check_task_counts(self.ledger, sources)
        await self._check_environments(train, evals)
        self.core = await self._open_core(plugins, sources, {name: met.source.num_tasks for name, met in train.items()})
        self.core.patience.restore(self.ledger, config.orchestrator.patience)
        self.first_step, self.next_step_to_report = self.core.ledger_progress.committed, self.core.admission.next_step
        """The step this process begins at, and the first whose batch nobody has been told of."""
        shape, largest = (
            config.orchestrator.admission_limits,
            max(config.get_group_size(source) for source in config.train),
        )
        most = config.orchestrator.max_concurrency or shape.slots * largest
        self.limiter = ConcurrencyLimiter(min(most, config.orchestrator.batch_size), most)
        self.weight_updater = WeightUpdater(self.client, self._on_weights_applied)
        self.sampling = AttemptDispatcher(
            self.core,
            {name: met.source for name, met in train.items()},
            seed=config.seed,
            get_limit=lambda: self.limiter.limit,
            on_group_scored=self.progress.record_group,
            on_failure=self.progress.record_failure,
        )
        self.evaluator = OnlineEvaluator(
            {source.source_name: (source, evals[source.source_name].source) for source in config.eval},
            self.weight_updater,
            self.store,
            seed=config.seed,
            on_result=self._on_eval_done,
            on_failure=self.progress.record_failure,
            on_progress=self.progress.mark_progress,
        )
        self.evaluator.restore(self.journal.metrics("eval/*/avg"))
        self.trainer_service = TrainerService(
            self.core,
            self.weight_updater,
            self.progress,
            policy=self.policy,
            max_steps=config.max_steps,
            on_trainer_replaced=self._on_trainer_replaced,
        )
        if self.core.ledger_progress.committed == 0 and all(
            version.step == 0 for version in self.client.versions.values()
        ):
            self.sampling.weights_ready.set()  # the initial weights; any later start waits for its trainer's

    def _write_start_snapshot(self) -> None:
        """Write a snapshot that says `starting`: the status address answers only after engines and env servers do."""
        status = {
            "run": str(self.config.path),
            "step": self.ledger.progress().committed,
            "max_steps": self.config.max_steps,
            "state": "starting",
        }
        wait = {"who": "orchestrator", "waits_for": "engines and env servers", "since_s": 0.0}
        write_snapshot(self.config.path, status, [{**wait, "deadline_s": self.config.launch.start_deadline}])

    async def _check_environments(self, train: dict[str, SourceConnection], evals: dict[str, SourceConnection]) -> None:
        """Compare every source with the environment that is stored for it, and set its revision.

        Raises EnvironmentChanged for changes that the user did not accept. After accepted changes, groups that are not
        scored yet are dropped: their attempts would be scored by two versions.
        """
        limits = {f"eval/{source.source_name}": source.num_tasks for source in self.config.eval}
        met = {**train, **{f"eval/{name}": one for name, one in evals.items()}}
        observed = {
            name: await observe_environment(one, self.store, name, limits.get(name)) for name, one in met.items()
        }
        changes = find_changes(self.store, observed)
        if not self.store.get_fact(ACCEPT_CHANGES_KEY):
            check_no_changes(self.store, changes)
        for group in self.ledger.open_groups():
            if group.source in changes and group.state is not GroupState.SCORED:
                detail = f"the environment of {group.source} was changed"
                await self.ledger.drop_group(group.number, DropReason.CANCELLED, detail)
        revisions = record_environments(self.store, observed, changes)
        self.store.set_fact(ACCEPT_CHANGES_KEY, False)
        for sources, prefix in ((train, ""), (evals, "eval/")):
            sources |= {name: one.with_revision(revisions[f"{prefix}{name}"]) for name, one in sources.items()}

    def _build_source_specs(self, plugins: RunPlugins, train: Mapping[str, SourceConnection]) -> dict[str, SourceSpec]:
        config = self.config
        return {
            source.source_name: SourceSpec(
                name=source.source_name,
                algorithm=plugins.algorithms[source.source_name],
                group_size=config.get_group_size(source),
                max_tries=source.attempts,
                temperature=source.sampling.temperature,
                group_rewards=frozenset(train[source.source_name].info.group_rewards),
                tasks_per_epoch=train[source.source_name].source.num_tasks
                if source.curriculum.type == "shuffle"
                else None,
            )
            for source in config.train
        }

    async def _open_core(
        self, plugins: RunPlugins, sources: Mapping[str, SourceSpec], task_counts: dict[str, int | None]
    ) -> OrchestratorCore:
        config = self.config
        rules = ScoringRules(
            _read_vocab_size(config.model.name), config.seq_len, plugins.filters, config.orchestrator.min_group
        )
        shape = config.orchestrator.admission_limits
        return await OrchestratorCore.open(
            self.ledger, build_source_mix(config, task_counts), sources, rules, shape, max_steps=config.max_steps
        )

    def _on_trainer_replaced(self) -> None:
        """A trainer begins from the history: nothing is sampled until the engines have what it begins with."""
        self.sampling.weights_ready.clear()
        self.weight_updater.discard_pending()

    def _on_weights_applied(self, version: PolicyVersion, seconds: float) -> None:
        """The engines have a version: slots are free, and an eval may be due."""
        if version.incarnation != self.core.ledger_progress.incarnation:
            return  # of a trainer that was replaced meanwhile
        self.core.record_applied_version(version.incarnation, version.step)
        self.progress.record_metrics(version.step, {"time/swap": seconds})
        self.sampling.weights_ready.set()
        self.sampling.wake()
        if names := self.evaluator.get_due_sources(version.step):
            self.eval_queue.put_nowait((version.step, names))

    def _on_eval_done(self, step: int, values: dict[str, float]) -> None:
        self.progress.evals |= {name: {"step": step, "value": value} for name, value in values.items()}
        self.progress.record_metrics(step, values)
        told = [f"{name} {value:.3f}" for name, value in values.items() if name.endswith(("/avg", "/exact"))]
        told += [f"{name} {value:g}" for name, value in values.items() if name.endswith("/missing") and value]
        print(f"eval at step {step}: {', '.join(told)}", flush=True)


def _read_vocab_size(model: str) -> int:
    path = resolve_model_path(model) / "config.json"
    try:
        return int(json.loads(path.read_text())["vocab_size"])
    except (OSError, ValueError, KeyError) as error:
        raise TokenizerMismatch(f"{path} names no vocab_size: {error}") from error
