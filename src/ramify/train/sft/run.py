"""An SFT run from its configuration to its weights: open or resume the run, train, save, publish.

Everything a step depends on is in the checkpoint before it and in the seed: weights, optimizer, and the position in the
order of examples. A run that is killed therefore repeats its last steps exactly, and its metrics equal those without a
kill.
"""

import contextlib
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch

from ramify.core.config import CONFIG_FILE, write_toml
from ramify.core.display import Display
from ramify.core.errors import OperationInvalid, RamifyError, StorageFull
from ramify.core.interactive import AwaitableResult
from ramify.core.names import format_count
from ramify.model.resolve import fetch_config, fetch_model
from ramify.model.support import check_model_supported
from ramify.run.store import RunStore, open_run, storage_call
from ramify.run.store.ledger import Ledger
from ramify.run.store.run_log import RunLog, read_metrics_by_step
from ramify.train.batch import Batch, PackSpec, pack_forests, split_across_ranks
from ramify.train.build import build_trainer, choose_trainer_dtype, get_pack_spec
from ramify.train.checkpoint import CheckpointManager
from ramify.train.checkpoint_manifest import list_completed_steps
from ramify.train.distributed import Ranks, init_distributed
from ramify.train.policy_model import PolicyOutput
from ramify.train.publisher import WeightPublisher
from ramify.train.sft.config import SftConfig
from ramify.train.sft.conversations import SftConversation
from ramify.train.sft.display import SftDisplay, StepProgress
from ramify.train.sft.forests import build_sft_forest
from ramify.train.sft.plan import SftPlan, build_sft_plan
from ramify.train.trainer import PendingStep, Trainer

SWITCH_INTERVAL = 0.001  # seconds; with Python's 5 ms a thread that launches kernels waits too long for the GIL


class SftBatch(NamedTuple):
    """One rank's batch of consecutive examples."""

    rank_batch: Batch
    end_position: int  # after its last example, in the order of the examples
    cut_tokens: int  # trained tokens beyond seq_len


class BatchExamples(NamedTuple):
    """The examples of one batch; `start_position` is where the first one stands in the order of all examples."""

    step: int
    start_position: int
    examples: Sequence[SftConversation]


class SftBatchBuilder:
    """Builds one rank's batches in a thread, one batch ahead of the caller, so that a GPU does not wait for them.

    If a batch cannot be built, the caller gets the error when it asks for this batch. Leaving the context discards the
    batches that were not asked for, and joins the thread. Within it, threads take turns every SWITCH_INTERVAL.
    """

    def __init__(self, config: SftConfig, plan: SftPlan, pack_spec: PackSpec, rank: int, world_size: int) -> None:
        self.config, self.plan, self.pack_spec = config, plan, pack_spec
        self.rank, self.world_size = rank, world_size
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="sft-batches")  # one: batches are built in order

    def __enter__(self) -> "SftBatchBuilder":
        self._previous_interval = sys.getswitchinterval()
        sys.setswitchinterval(min(SWITCH_INTERVAL, self._previous_interval))
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._executor.shutdown(cancel_futures=True)
        finally:
            sys.setswitchinterval(self._previous_interval)

    def training_batches(self, first_step: int, position: int, total_steps: int) -> Iterator[SftBatch]:
        """Iterate over the batches of the steps from `first_step` on, the first of which starts at `position`."""
        return self._build_ahead(self._select_examples(first_step, position, total_steps))

    def validation_batches(self, step: int) -> Iterator[SftBatch]:
        """Iterate over the batches of the validation conversations."""
        examples, size = self.plan.validation, self.config.batch_size
        starts = range(0, len(examples), size)
        return self._build_ahead(BatchExamples(step, start, examples[start : start + size]) for start in starts)

    def _select_examples(self, first_step: int, position: int, total_steps: int) -> Iterator[BatchExamples]:
        for step in range(first_step, total_steps):
            indices = self.plan.order.indices_at(position, self.config.batch_size)
            yield BatchExamples(step, position, [self.plan.conversations[index] for index in indices])
            position += len(indices)

    def _build_ahead(self, batches: Iterator[BatchExamples]) -> Iterator[SftBatch]:
        """Yield each batch while the thread builds the next one."""

        def build_next() -> SftBatch | None:
            batch_examples = next(batches, None)  # in the thread too, so that an error here is raised for its batch
            return None if batch_examples is None else self._build(batch_examples)

        future = self._executor.submit(build_next)
        while (sft_batch := future.result()) is not None:
            future = self._executor.submit(build_next)
            yield sft_batch

    def _build(self, batch_examples: BatchExamples) -> SftBatch:
        config, pack_spec = self.config, self.pack_spec
        step, start_position, examples = batch_examples
        named_examples = [(str(number), example) for number, example in enumerate(examples, start_position)]
        forest = build_sft_forest(named_examples, self.plan.renderer, config.trained_roles, config.seq_len)
        packs = pack_forests([forest], pack_spec.pack_tokens, pack_spec.layout)
        shares = split_across_ranks(Batch.from_packs(step, packs), pack_spec, self.world_size)
        return SftBatch(shares[self.rank], start_position + len(examples), forest.dropped.num_truncated_tokens)


EVAL_POLL_INTERVAL = 0.5  # seconds between two looks whether an eval has ended
STEPS_IN_FLIGHT = {"cpu": 0, "cuda": 1}  # steps started before the metrics of one are read, to keep a GPU busy


@dataclass(frozen=True, slots=True)
class SftResult(AwaitableResult):
    """The state of a run when it returns."""

    path: Path  # the run's directory
    steps: int  # the steps that are done
    steps_run: int  # how many of them ran in this call
    weights: Path | None  # the trained model; None if the run was stopped early

    def table(self) -> list[dict[str, Any]]:
        """Return the metrics of each step as a plain dict, as `pandas.DataFrame` takes them."""
        return read_metrics_by_step(self.path)


class StepEvals(Protocol):
    """The rollout evals of a run. Only the first rank has them."""

    def open(self, store: RunStore, print_line: Callable[[str], None]) -> None:
        """Start with the evals that `store` has; further results go there."""
        ...

    def get_due_sources(self, step: int, *, is_last: bool = False) -> list[str]:
        """Return the sources that are due at a step."""
        ...

    def run(self, step: int, names: list[str], model: Path, stop: threading.Event) -> None:
        """Evaluate a model on sources, and record the results; return early when `stop` is set."""
        ...


def run_sft(
    config: SftConfig, *, fresh: bool = False, display: SftDisplay | None = None, evals: StepEvals | None = None
) -> SftResult:
    """Run or resume an SFT run. Every rank calls it; the first one writes, evaluates and shows progress."""
    if config.eval and evals is None:
        raise OperationInvalid("eval: this run has evals, which rf.sft and ramify sft run")
    check_model_supported(fetch_config(config.model.name))
    fetch_model(config.model.name)
    plan = build_sft_plan(config)
    with init_distributed(config.trainer) as ranks, contextlib.ExitStack() as stack:
        active_display = stack.enter_context(display if display is not None and ranks.is_first else Display())
        store: RunStore | None = None
        with ranks.raise_together():
            if ranks.is_first:
                store = stack.enter_context(open_run(plan.path, plan.identity, fresh=fresh))
                with storage_call(plan.path):
                    write_toml(config, plan.path / CONFIG_FILE)
                Ledger.open(store)
                if evals is not None:
                    evals.open(store, active_display.print_line)
        stop = stack.enter_context(_stop_on_signal())
        return _SftRun(config, plan, ranks, store, active_display, stop, evals).run()


_PendingSteps = deque[tuple[SftBatch, PendingStep]]


class _SftRun:
    """One rank's part of a run."""

    def __init__(
        self,
        config: SftConfig,
        plan: SftPlan,
        ranks: Ranks,
        store: RunStore | None,
        display: SftDisplay,
        stop: threading.Event,
        evals: StepEvals | None,
    ) -> None:
        self.evals = evals if ranks.is_first else None
        self.config, self.plan, self.ranks, self.display, self.stop = config, plan, ranks, display, stop
        self.run_log = RunLog(store) if store is not None else None
        self.last_write: Future[None] | None = None
        self.checkpoints = CheckpointManager(plan.path / "checkpoints", ranks, warn=display.print_line)
        self.steps_done = ranks.broadcast(max(list_completed_steps(self.checkpoints.directory), default=0))
        self.examples_seen = int(self.checkpoints.read_note(self.steps_done)["seen"]) if self.steps_done else 0
        self.publisher = WeightPublisher(
            plan.path / "weights",
            ranks,
            policy=plan.path.name,
            base_model=plan.model_path,
            dtype=choose_trainer_dtype(config.trainer, ranks).dtype,
        )
        self.total_steps = plan.count_total_steps(config, self.steps_done, self.examples_seen)
        self.cut_tokens = 0

    def run(self) -> SftResult:
        """Run all missing steps and evals, and publish the weights."""
        config, plan, first_step = self.config, self.plan, self.steps_done
        publisher = self.publisher
        if first_step >= self.total_steps and (path := publisher.path_for(0, first_step)).exists():
            self._evaluate(path, is_last=True)
            return SftResult(plan.path, first_step, 0, path)
        publisher.remove_after(first_step)
        if not first_step:
            self._evaluate(plan.model_path)
        trainer = build_trainer(
            plan.model_path,
            config.trainer,
            self.ranks,
            quantize=config.model.quantize,
            total_steps=self.total_steps,
            seed=config.seed,
            seq_len=config.seq_len,
            checkpoints=self.checkpoints.directory,
            log=self.display.print_line,
        )
        if first_step:
            self.checkpoints.load(trainer, first_step)
            self.display.print_line(f"resuming after step {first_step} from {self.checkpoints.path_for(first_step)}")
            self._evaluate_step(trainer)
        with SftBatchBuilder(config, plan, get_pack_spec(trainer), self.ranks.rank, self.ranks.world_size) as builder:
            self._train_loop(trainer, builder)
        if self.cut_tokens:
            self.display.print_line(f"{self.cut_tokens} trained tokens beyond seq_len = {config.seq_len} were cut off")
        weights: Path | None = None
        if self.steps_done >= self.total_steps:
            weights = self._publish(trainer)
            self._evaluate(weights, is_last=True)
        return SftResult(plan.path, self.steps_done, self.steps_done - first_step, weights)

    def _publish(self, trainer: Trainer) -> Path:
        """Write the weights of this step, remove earlier ones, and return the directory."""
        published = self.publisher.publish(trainer, self.steps_done)
        self.publisher.prune([published.version])
        self.display.print_line(f"wrote {published.path} in {published.seconds:.1f} s")
        return published.path

    def _evaluate_step(self, trainer: Trainer) -> None:
        """Run the evals that are due at this step, on its weights. The last step is evaluated when all is done."""
        if self.steps_done < self.total_steps and self._get_due_evals():
            self._evaluate(self._publish(trainer))

    def _get_due_evals(self, *, is_last: bool = False) -> list[str]:
        """Return the sources that are due at this step, on every rank."""
        if not self.config.eval:
            return []
        due = self.evals.get_due_sources(self.steps_done, is_last=is_last) if self.evals is not None else []
        return self.ranks.broadcast(due)

    def _evaluate(self, model: Path, *, is_last: bool = False) -> None:
        """Run the evals that are due at this step on a model.

        The first rank runs them in a thread, so that it handles signals; the others ask from time to time whether they
        have ended, because no collective may wait as long as an eval takes.
        """
        if not (names := self._get_due_evals(is_last=is_last)):
            return
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the engine sizes its cache by the free memory
        with ThreadPoolExecutor(1, thread_name_prefix="evals") as executor:
            future: Future[None] | None = None
            if self.evals is not None:
                future = executor.submit(self.evals.run, self.steps_done, names, model, self.stop)
            while not all(self.ranks.all_gather(future is None or future.done())):
                wait([future] if future is not None else [], EVAL_POLL_INTERVAL)
                if future is None:
                    time.sleep(EVAL_POLL_INTERVAL)
            with self.ranks.raise_together():
                if future is not None:
                    future.result()

    def _train_loop(self, trainer: Trainer, builder: SftBatchBuilder) -> None:
        config, progress = self.config, StepProgress(self.steps_done, self.total_steps)
        if not self.steps_done:
            self._validate(trainer, builder)
        step_batches = builder.training_batches(self.steps_done, self.examples_seen, self.total_steps)
        pending_steps: _PendingSteps = deque()
        while self.steps_done < self.total_steps:
            record_pending = self._record_pending_on_failure(pending_steps, progress, raised_on_all_ranks=RamifyError)
            with record_pending, self.ranks.raise_together():
                step_batch = next(step_batches)  # the next one is already being built
            with self._record_pending_on_failure(pending_steps, progress):
                pending_steps.append((step_batch, trainer.start_step(step_batch.rank_batch)))
            self.steps_done += 1
            self.examples_seen = step_batch.end_position
            self.cut_tokens += step_batch.cut_tokens
            stopped = any(self.ranks.all_gather(self.stop.is_set()))
            is_last = self.steps_done == self.total_steps
            validates = is_last or self.steps_done % config.validation.interval == 0
            saves = is_last or stopped or self.steps_done % config.checkpoint.interval == 0
            while len(pending_steps) > (0 if validates or saves else STEPS_IN_FLIGHT[trainer.device.type]):
                self._record_step(*pending_steps.popleft(), progress)
            if validates:
                self._validate(trainer, builder)
            if saves:
                self._save(trainer, required=is_last or stopped)
            if stopped:
                return
            if self._get_due_evals():
                while pending_steps:
                    self._record_step(*pending_steps.popleft(), progress)
                self._evaluate_step(trainer)

    def _record_step(self, step_batch: SftBatch, pending: PendingStep, progress: StepProgress) -> None:
        """Wait for a step, then record and show its metrics."""
        metrics = pending.wait_for_metrics()
        progress.record_step(metrics)
        data = {"data/examples": step_batch.end_position, "data/cut_tokens": step_batch.cut_tokens}
        self._write_metrics(metrics.step, {**metrics.to_dict(), **data})
        self.display.refresh(progress)

    @contextlib.contextmanager
    def _record_pending_on_failure(
        self,
        pending_steps: _PendingSteps,
        progress: StepProgress,
        raised_on_all_ranks: type[Exception] | None = None,
    ) -> Iterator[None]:
        """If preparing or starting a step fails, record the pending steps, then re-raise.

        With several ranks this needs a collective, so it is done only for failures of type `raised_on_all_ranks`, which
        every rank raises.
        """
        try:
            yield
        except Exception as failure:
            on_all_ranks = raised_on_all_ranks is not None and isinstance(failure, raised_on_all_ranks)
            for step_batch, pending in pending_steps if self.ranks.world_size == 1 or on_all_ranks else ():
                try:
                    self._record_step(step_batch, pending, progress)
                except Exception as error:  # noqa: BLE001 - the GPU may be what has failed; the first failure is raised
                    message = f"{type(error).__name__}: {error}"
                    failure.add_note(f"step {step_batch.rank_batch.step}, started before, was not recorded: {message}")
            raise

    def _validate(self, trainer: Trainer, builder: SftBatchBuilder) -> None:
        """Record the mean loss of the validation conversations under the current weights."""
        loss = entries = 0.0
        for sft_batch in builder.validation_batches(self.steps_done):
            batch = sft_batch.rank_batch
            sum_weights = dict.fromkeys(batch.entry_counts, 1)  # makes each loss a sum, not a mean
            with torch.no_grad():
                outputs: list[PolicyOutput] = [
                    trainer.policy(trainer.prepare_inputs(pack), sum_weights) for pack in batch.packs
                ]
            loss += sum(float(output.component_losses.get("ce", 0.0)) for output in outputs)
            entries += batch.entry_counts["ce"]
        if entries:
            loss = sum(self.ranks.all_gather(loss)) / entries
            self._write_metrics(self.steps_done, {"validation/loss": loss})
            self.display.print_line(f"validation loss {loss:.4f} after {format_count(self.steps_done, 'step')}")

    def _write_metrics(self, step: int, values: Mapping[str, float]) -> None:
        if self.run_log is not None:
            self.last_write = self.run_log.log_metrics(step, values)

    def _save(self, trainer: Trainer, *, required: bool) -> None:
        """Save a checkpoint. If the disk is full, the run continues without it unless the checkpoint is `required`."""
        try:
            with self.ranks.raise_together():
                if self.last_write is not None:
                    self.last_write.result()  # the metrics up to here belong to the checkpoint
            committed = max(self.checkpoints.list_steps(), default=0)
            note = {"seen": self.examples_seen}
            self.checkpoints.save(trainer, self.steps_done, note, committed=committed)
        except StorageFull as error:
            if required:
                raise
            self.display.print_line(f"{error.name}: {error.message}; training continues without this checkpoint")
            return
        config = self.config.checkpoint
        values = self.run_log.values_by_step(config.keep_best) if self.run_log is not None else {}
        self.checkpoints.remove_before(self.steps_done, config, self.ranks.broadcast(values))


@contextlib.contextmanager
def _stop_on_signal() -> Iterator[threading.Event]:
    """On SIGINT or SIGTERM request a stop: the run ends after the current step, with a checkpoint."""
    stop = threading.Event()
    is_main_thread = threading.current_thread() is threading.main_thread()  # only that one may handle signals
    signals = (signal.SIGINT, signal.SIGTERM) if is_main_thread else ()
    previous = {signum: signal.signal(signum, lambda *_: stop.set()) for signum in signals}
    try:
        yield stop
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
