"""An SFT run from its configuration to its weights: open the run, go on where it was left, learn, save, publish.

Everything a step depends on is in the checkpoint before it and in the seed: weights, optimizer, and the position in the
stream of examples. A run that is killed therefore repeats its last steps exactly, and its curve is the one it would
have had.
"""

import contextlib
import signal
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ramify.config import parse_section, write_toml
from ramify.errors import RamifyError, StorageFull
from ramify.interactive import AwaitableResult, expand_model_name, get_explicit_values, is_interactive
from ramify.model.resolve import fetch_model
from ramify.store import RunStore, open_run, wrap_storage_errors
from ramify.store.ledger import Ledger
from ramify.store.run_log import RunLog, read_metrics_by_step
from ramify.trace import Forest
from ramify.train.batch import Batch, PackSpec, pack_forests, split_across_ranks
from ramify.train.build import build_trainer, choose_trainer_dtype, get_pack_spec
from ramify.train.checkpoint import CheckpointManager
from ramify.train.distributed import Ranks, init_distributed
from ramify.train.publisher import WeightPublisher
from ramify.train.sft.config import SftConfig
from ramify.train.sft.conversations import SftConversation
from ramify.train.sft.display import NullSftDisplay, SftDisplay, StepProgress, choose_display
from ramify.train.sft.example_order import iter_chunks
from ramify.train.sft.forests import build_forest
from ramify.train.sft.plan import SftPlan, build_sft_plan
from ramify.train.trainer import PendingStep, Trainer

JOURNAL_TIMEOUT = 60.0  # seconds until what was queued for the run's tables has to be there
STEPS_IN_FLIGHT = {
    "cpu": 0,
    "cuda": 1,
}  # steps begun before the metrics of one are asked for: a GPU should find the next waiting


@dataclass(frozen=True, slots=True)
class SftResult(AwaitableResult):
    """Where a run stands when it returns."""

    path: Path
    steps: int
    steps_run: int
    """How many of the steps ran now."""
    weights: Path | None
    """The finished model; None if the run was stopped before its end."""

    def table(self) -> list[dict[str, Any]]:
        """Return the metrics of each step as a plain dict, as `pandas.DataFrame` takes them."""
        return read_metrics_by_step(self.path)


def sft(
    config: SftConfig | Mapping[str, Any] | None = None,
    *,
    fresh: bool = False,
    display: SftDisplay | None = None,
    **settings: Any,
) -> SftResult:
    """Teach a model conversations, or go on. `config` is a table of settings, `settings` are further keys of it.

    `data` may be the path of a file. It may be called where an event loop runs (in a notebook), plainly or with
    `await`, and blocks in both cases.
    """
    if isinstance(config, SftConfig) and not settings:
        checked = config
    else:
        given = get_explicit_values(config) if isinstance(config, SftConfig) else config or {}
        table = expand_model_name({**given, **settings})
        if isinstance(table.get("data"), str | Path):
            table["data"] = {"path": str(table["data"])}
        checked = parse_section(SftConfig, table, key="sft")
    return run_sft(
        checked, fresh=fresh, display=display or (choose_display() if is_interactive() else NullSftDisplay())
    )


def run_sft(config: SftConfig, *, fresh: bool = False, display: SftDisplay | None = None) -> SftResult:
    """Run, or go on. Every rank calls it; the first one writes and shows."""
    fetch_model(config.model.name)
    plan = build_sft_plan(config)
    with init_distributed(config.trainer) as ranks, contextlib.ExitStack() as stack:
        shown = stack.enter_context(display if display is not None and ranks.is_first else NullSftDisplay())
        store: RunStore | None = None
        with ranks.raise_together():
            if ranks.is_first:
                store = stack.enter_context(open_run(plan.path, plan.identity, fresh=fresh))
                with wrap_storage_errors(plan.path):
                    write_toml(config, plan.path / "config.toml")
                Ledger.open(store)
        stop = stack.enter_context(_stop_on_signal())
        return _SftRun(config, plan, ranks, store, shown, stop).run()


class _SftRun:
    """One process's part of a run."""

    def __init__(
        self,
        config: SftConfig,
        plan: SftPlan,
        ranks: Ranks,
        store: RunStore | None,
        display: SftDisplay,
        stop: "_StopFlag",
    ) -> None:
        self.config, self.plan, self.ranks, self.display, self.stop = config, plan, ranks, display, stop
        self.journal = RunLog(store) if store is not None else None
        self.last_write: Future[None] | None = None
        self.checkpoints = CheckpointManager(plan.path / "checkpoints", ranks, warn=display.print_line)
        self.steps_done = ranks.broadcast(self.checkpoints.newest_step())
        self.examples_seen = int(self.checkpoints.read_note(self.steps_done)["seen"]) if self.steps_done else 0
        self.total_steps = plan.count_total_steps(config, self.steps_done, self.examples_seen)
        self.cut_tokens = 0

    def run(self) -> SftResult:
        """All steps that are missing, then the weights."""
        config, plan, begun = self.config, self.plan, self.steps_done
        publisher = WeightPublisher(
            plan.path / "weights",
            self.ranks,
            policy=plan.path.name,
            base_model=plan.model_path,
            dtype=choose_trainer_dtype(config.trainer, self.ranks).dtype,
        )
        if self.steps_done >= self.total_steps and (path := publisher.path_for(0, self.steps_done)).exists():
            return SftResult(plan.path, self.steps_done, 0, path)
        trainer = build_trainer(
            plan.model_path,
            config.trainer,
            self.ranks,
            total_steps=self.total_steps,
            seed=config.seed,
            log=self.display.print_line,
        )
        if begun:
            self.checkpoints.load(trainer, begun)
            self.display.print_line(f"going on after step {begun} from {self.checkpoints.path_for(begun)}")
        self._train_loop(trainer)
        if self.cut_tokens:
            self.display.print_line(
                f"{self.cut_tokens} tokens to learn lay beyond seq_len = {config.seq_len} and were cut off"
            )
        if self.steps_done < self.total_steps:
            return SftResult(plan.path, self.steps_done, self.steps_done - begun, None)
        published = publisher.publish(trainer, 0, self.steps_done)
        self.display.print_line(f"wrote {published.path} in {published.seconds:.1f} s")
        return SftResult(plan.path, self.steps_done, self.steps_done - begun, published.path)

    def _train_loop(self, trainer: Trainer) -> None:
        config, pace = self.config, StepProgress(self.steps_done, self.total_steps)
        laying = get_pack_spec(trainer)
        if not self.steps_done:
            self._validate(trainer, laying)
        begun: deque[tuple[_StepBatch, PendingStep]] = deque()
        while self.steps_done < self.total_steps:
            with (
                self._record_pending_on_failure(begun, pace, raised_on_all_ranks=RamifyError),
                self.ranks.raise_together(),
            ):
                lesson = self._next_batch(laying)
            with self._record_pending_on_failure(begun, pace):
                begun.append((lesson, trainer.start_step(lesson.rank_batch)))
            self.steps_done, self.examples_seen, self.cut_tokens = (
                self.steps_done + 1,
                lesson.examples_seen,
                self.cut_tokens + lesson.cut_tokens,
            )
            stopped = any(self.ranks.all_gather(self.stop.requested))
            last = self.steps_done == self.total_steps
            measured = last or self.steps_done % config.validation.interval == 0
            saved = last or stopped or self.steps_done % config.checkpoint.interval == 0
            while len(begun) > (0 if measured or saved else STEPS_IN_FLIGHT[trainer.device.type]):
                self._record_step(*begun.popleft(), pace)
            if measured:
                self._validate(trainer, laying)
            if saved:
                self._save(trainer, required=last or stopped)
            if stopped:
                return

    def _next_batch(self, pack_spec: PackSpec) -> "_StepBatch":
        """What the next step learns."""
        chosen = self.plan.order.indices_at(self.examples_seen, self.config.batch_size)
        forest = self._build_forest(
            [(f"{self.examples_seen + at}", self.plan.conversations[each]) for at, each in enumerate(chosen)]
        )
        share = split_across_ranks(self._build_batch(forest, pack_spec), pack_spec, self.ranks.world_size)[
            self.ranks.rank
        ]
        return _StepBatch(
            share, self.examples_seen + len(chosen), forest.dropped.num_truncated_tokens
        )  # of a forest that may have no packs

    def _record_step(self, step_batch: "_StepBatch", pending: PendingStep, progress: StepProgress) -> None:
        """Record and show a step that was begun, when it is done."""
        metrics = pending.wait_for_metrics()
        progress.record_step(metrics.seconds)
        self._write_metrics(
            metrics.step,
            {**metrics.to_dict(), "data/examples": step_batch.examples_seen, "data/cut_tokens": step_batch.cut_tokens},
        )
        self.display.show_step(metrics, progress)

    @contextlib.contextmanager
    def _record_pending_on_failure(
        self,
        pending_steps: "deque[tuple[_StepBatch, PendingStep]]",
        progress: StepProgress,
        raised_on_all_ranks: type[Exception] | None = None,
    ) -> Iterator[None]:
        """Record the steps that were begun before one that cannot be. Several ranks do so together, thus only if that
        one fails on all of them as `alike`: a rank that fails in a step leaves the others waiting in the step."""
        try:
            yield
        except Exception as failure:
            together = self.ranks.world_size == 1 or (
                raised_on_all_ranks is not None and isinstance(failure, raised_on_all_ranks)
            )
            for lesson, running in pending_steps if together else ():
                try:
                    self._record_step(lesson, running, progress)
                except Exception as error:  # noqa: BLE001 - the GPU may be what has failed; the first failure leaves
                    said = f"{type(error).__name__}: {error}"
                    failure.add_note(f"and step {lesson.rank_batch.step}, begun before it, cannot be told: {said}")
            raise

    def _build_forest(self, conversations: Sequence[tuple[str, SftConversation]]) -> Forest:
        return build_forest(conversations, self.plan.renderer, self.config.data.roles, self.config.seq_len)

    def _build_batch(self, forest: Forest, pack_spec: PackSpec) -> Batch:
        return Batch.from_packs(self.steps_done, pack_forests([forest], pack_spec.pack_tokens, pack_spec.layout))

    def _validate(self, trainer: Trainer, pack_spec: PackSpec) -> None:
        """The mean loss of the conversations that are not learned, under the weights as they are."""
        loss = entries = 0.0
        for places in iter_chunks(range(len(self.plan.validation)), self.config.batch_size):
            batch = self._build_batch(
                self._build_forest([(str(at), self.plan.validation[at]) for at in places]), pack_spec
            )
            share = split_across_ranks(batch, pack_spec, self.ranks.world_size)[self.ranks.rank]
            with torch.no_grad():
                seen = [
                    trainer.policy(trainer.prepare_inputs(pack), dict.fromkeys(batch.entry_counts, 1))
                    for pack in share.packs
                ]
            loss += sum(float(each.terms.get("ce", 0.0)) for each in seen)
            entries += batch.entry_counts["ce"]
        if entries:
            loss = sum(self.ranks.all_gather(loss)) / entries
            self._write_metrics(self.steps_done, {"validation/loss": loss})
            self.display.print_line(f"validation loss {loss:.4f} after {self.steps_done} steps")

    def _write_metrics(self, step: int, values: Mapping[str, float]) -> None:
        if self.journal is not None:
            self.last_write = self.journal.log_metrics(step, values)

    def _save(self, trainer: Trainer, *, required: bool) -> None:
        """A checkpoint. Where there is no room for one the run goes on, unless it ends here."""
        try:
            with self.ranks.raise_together():
                if self.last_write is not None:
                    self.last_write.result(JOURNAL_TIMEOUT)  # the curve up to here is part of what is saved
            self.checkpoints.save(trainer, self.steps_done, {"seen": self.examples_seen})
        except StorageFull as error:
            if required:
                raise
            self.display.print_line(f"{error.name}: {error.message}; training goes on without this checkpoint")
            return
        self.checkpoints.remove_all_but_last(self.config.checkpoint.keep_last)


class _StepBatch(NamedTuple):
    """What a step learns."""

    rank_batch: Batch  # this rank's part
    examples_seen: int  # conversations that have been taken when it is done
    cut_tokens: int  # tokens to learn that were beyond the length of a sequence


@dataclass(slots=True)
class _StopFlag:
    """Whether somebody wants the run to end early."""

    requested: bool = False


@contextlib.contextmanager
def _stop_on_signal() -> Iterator[_StopFlag]:
    """SIGINT and SIGTERM end the run after the step that runs, with a checkpoint."""
    stop = _StopFlag()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(*_: object) -> None:
        stop.requested = True

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
