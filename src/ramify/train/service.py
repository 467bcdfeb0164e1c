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
from ramify.train.batches import Batch
from ramify.train.build import build_trainer, choose_trainer_dtype, laying_of
from ramify.train.checkpoint import Checkpoints
from ramify.train.metrics import StepMetrics
from ramify.train.parallel import Ranks
from ramify.train.protocol import Welcome
from ramify.train.publish import Publisher
from ramify.train.service_config import ServiceConfig
from ramify.train.source import BatchSource
from ramify.train.step import Trainer

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Kept:
    """Where a service leaves things; a replay leaves none."""

    checkpoints: Checkpoints
    publisher: Publisher
    interval: int
    keep_last: int


class Service:
    """One rank of a trainer, and its source."""

    def __init__(
        self,
        config: ServiceConfig,
        source: BatchSource,
        ranks: Ranks,
        *,
        keep: bool = True,
        flat: bool = False,
        tell: Tell = print,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.config, self.source, self.ranks, self.tell, self.stopped = config, source, ranks, tell, stopped
        self.model = fetch_model(config.model.name)
        self.keep, self.flat = keep, flat

    def run(self) -> int:
        """Train until the source has no more batches; returns the steps that are done."""
        config = self.config
        trainer = build_trainer(
            self.model, config.trainer, self.ranks, seed=config.seed, flat=self.flat, tell=self.tell
        )
        welcome = self._greet(trainer)
        schedule = config.trainer.optim.schedule.type
        if welcome.steps is None and schedule != "constant":
            raise ConfigInvalid(
                f"the {schedule} schedule needs to know the number of steps, and the orchestrator did not say"
            )
        trainer.optimizer.steps = welcome.steps
        kept = self._kept(welcome) if self.keep else None
        done = saved = welcome.committed
        if kept is not None:
            if done:
                kept.checkpoints.load(trainer, done)
            kept.checkpoints.discard_after(done)  # not before what is left is known to be good
            self._publish(trainer, kept, welcome, done)  # engines may serve weights that are no part of the history
        while True:
            batch: Batch | None = None
            with self.ranks.together():
                batch = self.source.batch(done, self.stopped)
            if any(self.ranks.all(batch is None)) or batch is None:
                break
            metrics = trainer.step(batch)
            done += 1
            wanted = self._trained(metrics)
            if kept is not None:
                self._publish(trainer, kept, welcome, done)
                if wanted or done % kept.interval == 0:
                    saved = self._save(trainer, kept, done, saved)
        if kept is not None and done > saved and self._save(trainer, kept, done, saved) < done:
            raise StorageFull(f"{config.path} has no room for the last checkpoint; step {saved} is what is kept")
        return done

    def _greet(self, trainer: Trainer) -> Welcome:
        """All ranks are one trainer: the first asks who it is, the others join it."""
        laying, ranks = laying_of(trainer), self.ranks
        first: Welcome | None = None
        with ranks.together():
            if ranks.first:
                first = self.source.hello(0, ranks.size, laying, None)
        welcome: Welcome = ranks.told(first)
        with ranks.together():
            if not ranks.first:
                self.source.hello(ranks.rank, ranks.size, laying, welcome.incarnation)
        layout = "flat" if self.flat else laying.layout.value
        said = f"incarnation={welcome.incarnation} committed={welcome.committed} layout={layout}"
        self.tell(f"trainer ranks={ranks.size} {said}")
        return welcome

    def _kept(self, welcome: Welcome) -> Kept:
        config = self.config
        publisher = Publisher(
            config.weights.directory(config.path),
            self.ranks,
            policy=welcome.policy,
            base=self.model,
            dtype=choose_trainer_dtype(config.trainer, self.ranks).dtype,
        )
        checkpoints = Checkpoints(config.path / "checkpoints", self.ranks, warn=self.tell)
        return Kept(checkpoints, publisher, config.checkpoint.interval, config.checkpoint.keep_last)

    def _trained(self, metrics: StepMetrics) -> bool:
        """Acknowledge a step; whether a checkpoint is wanted now."""
        wanted = False
        with self.ranks.together():
            if self.ranks.first:
                wanted = self.source.trained(metrics.step, metrics.named())
        self.tell(
            f"step={metrics.step} loss={metrics.loss:.6g} grad_norm={metrics.grad_norm:.6g} lr={metrics.lr:.3g} "
            f"tokens={metrics.sums.tokens} token_ratio={metrics.token_ratio:.3f} seconds={metrics.seconds:.3f}"
        )
        return self.ranks.told(wanted)

    def _publish(self, trainer: Trainer, kept: Kept, welcome: Welcome, step: int) -> None:
        """Give the engines the weights after `step` steps, and remove what they need no more."""
        published = kept.publisher.publish(trainer, welcome.incarnation, step)
        with self.ranks.together():
            if self.ranks.first:
                needed = self.source.published(published.version, published.path)
                if needed is not None:
                    kept.publisher.prune(needed)
        self.tell(f"published={published.version} seconds={published.seconds:.3f} bytes={published.bytes}")

    def _save(self, trainer: Trainer, kept: Kept, step: int, saved: int) -> int:
        """Save and commit. Without room for it the run goes on from the commit before; returns the last one."""
        started = time.perf_counter()
        try:
            kept.checkpoints.save(trainer, step)
        except StorageFull as error:
            self.tell(f"{error.name}: {error.message}; training goes on, the last checkpoint is that of step {saved}")
            return saved
        with self.ranks.together():
            if self.ranks.first:
                self.source.checkpoint(step)
        kept.checkpoints.keep_last(kept.keep_last)
        self.tell(f"checkpoint={step} seconds={time.perf_counter() - started:.3f}")
        return step
