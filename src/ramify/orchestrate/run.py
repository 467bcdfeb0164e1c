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
from ramify.orchestrate.concurrency import Concurrency
from ramify.orchestrate.config import RunConfig
from ramify.orchestrate.core import Core, check_task_counts
from ramify.orchestrate.evaluating import Evaluating
from ramify.orchestrate.judging import Rules, Source
from ramify.orchestrate.meeting import Met, meet, observe
from ramify.orchestrate.parts import Parts, load_mix, load_parts
from ramify.orchestrate.progress import Progress
from ramify.orchestrate.sampling import Sampling
from ramify.orchestrate.service import TrainerService
from ramify.orchestrate.snapshot import write_snapshot
from ramify.orchestrate.weights import Weights
from ramify.store import open_run
from ramify.store.environments import ACCEPT_CHANGES_KEY, check_no_changes, find_changes, record_environments
from ramify.store.group_state import DropReason, GroupState
from ramify.store.ledger import Ledger
from ramify.store.run_log import RunLog

READERS = 30.0  # seconds for whoever began to read the run while nobody ran it: `why`, `show`, `export`

Log = Callable[[int, Mapping[str, float]], None]


class Run:
    """One run. `open` it once; what it opened ends with the stack."""

    def __init__(self, config: RunConfig, log: Log | None = None) -> None:
        if not isinstance(config.inference, ExternalConfig):
            raise ConfigInvalid("inference: the orchestrator starts no engine; give it engine = 'external', base_url")
        for kind, sources in (("train", config.train), ("eval", config.eval)):
            for number, source in enumerate(sources):
                if source.address is None:
                    raise ConfigInvalid(f"{kind}.{number}.address: the orchestrator needs the env server's address")
        self.config, self.inference, self._log = config, config.inference, log
        self.policy = Path(config.model.name).name
        self.started = time.time()
        self.leaving = asyncio.Event()
        """Set when the run is asked to make a checkpoint and end, to be continued."""
        self.due: asyncio.Queue[tuple[int, list[str]]] = asyncio.Queue()
        """Evals: the step and the sources."""
        self.loads: list[EngineLoad] = []
        """What the engines said last."""

    async def open(self, stack: AsyncExitStack) -> None:
        """Open the store, meet engines and env servers, and stand where the ledger says the run stands."""
        config = self.config
        parts = load_parts(config)
        self.store = open_run(config.path, config.identity, lock_timeout=READERS)
        stack.callback(self.store.close)
        self.ledger, self.journal = Ledger.open(self.store), RunLog(self.store)
        self._snapshot_start()
        self.progress = Progress(self.journal, self._log)
        patience = config.launch.start_deadline
        self.client: InferenceClient = await stack.enter_async_context(
            build_inference_client(
                self.inference, config=ClientConfig(patience=patience), version=PolicyVersion(self.policy)
            )
        )
        known = {"patience": patience, "secret": config.secret}
        train = {source.source_name: await meet(source, stack, **known) for source in config.train}
        evals = {source.source_name: await meet(source, stack, **known) for source in config.eval}
        sources = self._sources(parts, train)
        check_task_counts(self.ledger, sources)
        await self._check_environments(train, evals)
        self.core = await self._core(parts, sources, {name: met.served.count for name, met in train.items()})
        self.core.patience.restore(self.ledger, config.orchestrator.patience)
        self.first, self.next = self.core.marks.committed, self.core.admission.step
        """The step this process begins at, and the first whose batch nobody has been told of."""
        shape, largest = config.orchestrator.shape, max(config.group_size(source) for source in config.train)
        most = config.orchestrator.max_concurrency or shape.slots * largest
        self.concurrency = Concurrency(min(most, config.orchestrator.batch_size), most)
        self.weights = Weights(self.client, self._applied)
        self.sampling = Sampling(
            self.core,
            {name: met.served for name, met in train.items()},
            seed=config.seed,
            limit=lambda: self.concurrency.limit,
            settled=self.progress.settled,
            failed=self.progress.trouble,
        )
        self.evaluating = Evaluating(
            {source.source_name: (source, evals[source.source_name].served) for source in config.eval},
            self.weights,
            self.store,
            seed=config.seed,
            report=self._evaluated,
            failed=self.progress.trouble,
            moved=self.progress.move,
        )
        self.evaluating.restore(self.journal.metrics("eval/*/avg"))
        self.service = TrainerService(
            self.core,
            self.weights,
            self.progress,
            policy=self.policy,
            steps=config.max_steps,
            replaced=self._replaced,
        )
        if self.core.marks.committed == 0 and all(version.step == 0 for version in self.client.versions.values()):
            self.sampling.open.set()  # the weights the run begins with; any later start waits for its trainer's

    def _snapshot_start(self) -> None:
        """Write a snapshot that says `starting`: the status address answers only after engines and env servers do."""
        status = {
            "run": str(self.config.path),
            "step": self.ledger.progress().committed,
            "max_steps": self.config.max_steps,
            "state": "starting",
        }
        wait = {"who": "orchestrator", "waits_for": "engines and env servers", "since_s": 0.0}
        write_snapshot(self.config.path, status, [{**wait, "deadline_s": self.config.launch.start_deadline}])

    async def _check_environments(self, train: dict[str, Met], evals: dict[str, Met]) -> None:
        """Compare every source with the environment that is stored for it, and set its revision.

        Raises EnvironmentChanged for changes that the user did not accept. After accepted changes, groups that are not
        scored yet are dropped: their attempts would be scored by two versions.
        """
        limits = {f"eval/{source.source_name}": source.num_tasks for source in self.config.eval}
        met = {**train, **{f"eval/{name}": one for name, one in evals.items()}}
        observed = {name: await observe(one, self.store, name, limits.get(name)) for name, one in met.items()}
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

    def _sources(self, parts: Parts, train: Mapping[str, Met]) -> dict[str, Source]:
        config = self.config
        return {
            source.source_name: Source(
                name=source.source_name,
                algorithm=parts.algorithms[source.source_name],
                size=config.group_size(source),
                tries=source.attempts,
                temperature=source.sampling.temperature,
                group_rewards=frozenset(train[source.source_name].info.group_rewards),
                epoch=train[source.source_name].served.count if source.curriculum.type == "shuffle" else None,
            )
            for source in config.train
        }

    async def _core(self, parts: Parts, sources: Mapping[str, Source], counts: dict[str, int | None]) -> Core:
        config = self.config
        rules = Rules(_vocabulary(config.model.name), config.seq_len, parts.filters, config.orchestrator.min_group)
        shape = config.orchestrator.shape
        return await Core.open(self.ledger, load_mix(config, counts), sources, rules, shape, last_step=config.max_steps)

    def _replaced(self) -> None:
        """A trainer begins from the history: nothing is sampled until the engines have what it begins with."""
        self.sampling.open.clear()
        self.weights.forget()

    def _applied(self, version: PolicyVersion, seconds: float) -> None:
        """The engines have a version: slots are free, and an eval may be due."""
        if version.incarnation != self.core.marks.incarnation:
            return  # of a trainer that was replaced meanwhile
        self.core.applied(version.incarnation, version.step)
        self.progress.record(version.step, {"time/swap": seconds})
        self.sampling.open.set()
        self.sampling.wake()
        if names := self.evaluating.due(version.step):
            self.due.put_nowait((version.step, names))

    def _evaluated(self, step: int, values: dict[str, float]) -> None:
        self.progress.evals |= {name: {"step": step, "value": value} for name, value in values.items()}
        self.progress.record(step, values)
        told = [f"{name} {value:.3f}" for name, value in values.items() if name.endswith(("/avg", "/exact"))]
        told += [f"{name} {value:g}" for name, value in values.items() if name.endswith("/missing") and value]
        print(f"eval at step {step}: {', '.join(told)}", flush=True)


def _vocabulary(model: str) -> int:
    path = resolve_model_path(model) / "config.json"
    try:
        return int(json.loads(path.read_text())["vocab_size"])
    except (OSError, ValueError, KeyError) as error:
        raise TokenizerMismatch(f"{path} names no vocab_size: {error}") from error
