"""The trainer as a service: greet, go back to the end of the history, then batch after batch.

    hello -> load checkpoint `committed`, forget newer ones, publish it
    then: batch(s) -> step -> trained(s) -> publish version s+1 -> published
          every `interval` steps: rename checkpoint c -> checkpoint(c), and c is the end of the history

What happens to a trainer between two commits never happened: its successor starts at `committed` under the next
incarnation and is given the same batches again.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from ramify.errors import ConfigInvalid, StorageFull
from ramify.model.resolve import fetch_model
from ramify.train.batch import Batch
from ramify.train.batch_source import BatchSource
from ramify.train.build import build_trainer, choose_trainer_dtype, get_pack_spec
from ramify.train.checkpoint import CheckpointManager
from ramify.train.distributed import Ranks
from ramify.train.metrics import StepMetrics
from ramify.train.process_config import TrainerProcessConfig
from ramify.train.protocol import RegisterReply
from ramify.train.publisher import WeightPublisher
from ramify.train.trainer import Trainer

LogLine = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TrainerOutputs:
    """Where a service leaves things; a replay leaves none."""

    checkpoints: CheckpointManager
    publisher: WeightPublisher
    checkpoint_interval: int
    keep_last: int


class TrainerProcess:
    """One rank of a trainer, and its source."""

    def __init__(
        self,
        config: TrainerProcessConfig,
        batch_source: BatchSource,
        ranks: Ranks,
        *,
        save_outputs: bool = True,
        flat: bool = False,
        log: LogLine = print,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.config, self.batch_source, self.ranks, self.log, self.should_stop = (
            config,
            batch_source,
            ranks,
            log,
            should_stop,
        )
        self.model_path = fetch_model(config.model.name)
        self.save_outputs, self.flat = save_outputs, flat

    def run(self) -> int:
        """Train until the source has no more batches; returns the steps that are done."""
        config = self.config
        trainer = build_trainer(
            self.model_path, config.trainer, self.ranks, seed=config.seed, flat=self.flat, log=self.log
        )
        welcome = self._register(trainer)
        schedule = config.trainer.optim.schedule.type
        if welcome.steps is None and schedule != "constant":
            raise ConfigInvalid(
                f"the {schedule} schedule needs to know the number of steps, and the orchestrator did not say"
            )
        trainer.optimizer.total_steps = welcome.steps
        kept = self._open_outputs(welcome) if self.save_outputs else None
        done = saved = welcome.committed
        if kept is not None:
            if done:
                kept.checkpoints.load(trainer, done)
            kept.checkpoints.remove_after(done)  # not before what is left is known to be good
            self._publish(trainer, kept, welcome, done)  # engines may serve weights that are no part of the history
        while True:
            batch: Batch | None = None
            with self.ranks.raise_together():
                batch = self.batch_source.get_batch(done, self.should_stop)
            if any(self.ranks.all_gather(batch is None)) or batch is None:
                break
            metrics = trainer.step(batch)
            done += 1
            wanted = self._report_trained(metrics)
            if kept is not None:
                self._publish(trainer, kept, welcome, done)
                if wanted or done % kept.checkpoint_interval == 0:
                    saved = self._save(trainer, kept, done, saved)
        if kept is not None and done > saved and self._save(trainer, kept, done, saved) < done:
            raise StorageFull(f"{config.path} has no room for the last checkpoint; step {saved} is what is kept")
        return done

    def _register(self, trainer: Trainer) -> RegisterReply:
        """All ranks are one trainer: the first asks who it is, the others join it."""
        laying, ranks = get_pack_spec(trainer), self.ranks
        first: RegisterReply | None = None
        with ranks.raise_together():
            if ranks.is_first:
                first = self.batch_source.register(0, ranks.world_size, laying, None)
        welcome: RegisterReply = ranks.broadcast(first)
        with ranks.raise_together():
            if not ranks.is_first:
                self.batch_source.register(ranks.rank, ranks.world_size, laying, welcome.incarnation)
        layout = "flat" if self.flat else laying.layout.value
        said = f"incarnation={welcome.incarnation} committed={welcome.committed} layout={layout}"
        self.log(f"trainer ranks={ranks.world_size} {said}")
        return welcome

    def _open_outputs(self, registration: RegisterReply) -> TrainerOutputs:
        config = self.config
        publisher = WeightPublisher(
            config.weights.directory_for(config.path),
            self.ranks,
            policy=registration.policy,
            base_model=self.model_path,
            dtype=choose_trainer_dtype(config.trainer, self.ranks).dtype,
        )
        checkpoints = CheckpointManager(config.path / "checkpoints", self.ranks, warn=self.log)
        return TrainerOutputs(checkpoints, publisher, config.checkpoint.interval, config.checkpoint.keep_last)

    def _report_trained(self, metrics: StepMetrics) -> bool:
        """Acknowledge a step; whether a checkpoint is wanted now."""
        wanted = False
        with self.ranks.raise_together():
            if self.ranks.is_first:
                wanted = self.batch_source.report_trained(metrics.step, metrics.to_dict())
        self.log(
            f"step={metrics.step} loss={metrics.loss:.6g} grad_norm={metrics.grad_norm:.6g} lr={metrics.lr:.3g} "
            f"tokens={metrics.sums.tokens} token_ratio={metrics.token_ratio:.3f} seconds={metrics.seconds:.3f}"
        )
        return self.ranks.broadcast(wanted)

    def _publish(self, trainer: Trainer, outputs: TrainerOutputs, registration: RegisterReply, step: int) -> None:
        """Give the engines the weights after `step` steps, and remove what they need no more."""
        published = outputs.publisher.publish(trainer, registration.incarnation, step)
        with self.ranks.raise_together():
            if self.ranks.is_first:
                needed = self.batch_source.report_published(published.version, published.path)
                if needed is not None:
                    outputs.publisher.prune(needed)
        self.log(f"published={published.version} seconds={published.seconds:.3f} bytes={published.bytes}")

    def _save(self, trainer: Trainer, outputs: TrainerOutputs, step: int, last_saved_step: int) -> int:
        """Save and commit. Without room for it the run goes on from the commit before; returns the last one."""
        started = time.perf_counter()
        try:
            outputs.checkpoints.save(trainer, step)
        except StorageFull as error:
            self.log(
                f"{error.name}: {error.message}; training goes on, the last checkpoint is that of "
                f"step {last_saved_step}"
            )
            return last_saved_step
        with self.ranks.raise_together():
            if self.ranks.is_first:
                self.batch_source.commit_checkpoint(step)
        outputs.checkpoints.remove_all_but_last(outputs.keep_last)
        self.log(f"checkpoint={step} seconds={time.perf_counter() - started:.3f}")
        return step
