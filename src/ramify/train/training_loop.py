"""The main loop of a trainer process: register, load the committed checkpoint, then train batch after batch.

    register -> load checkpoint `committed`, remove newer ones, publish it
    then: batch(s) -> step -> trained(s) -> publish version s+1 -> published
          every `interval` steps: rename checkpoint c -> checkpoint(c), and c is the end of the history

Steps after the last commit are lost if the trainer dies: its successor starts at `committed`, under the next
incarnation, and receives the same batches again.
"""

import time
from collections.abc import Callable

from ramify.core.errors import ConfigInvalid, StorageFull
from ramify.model.pack_layout import PackLayout
from ramify.model.remote_weights import get_run_url
from ramify.model.resolve import fetch_model
from ramify.model.weights_manifest import PublishedAdapters
from ramify.processes.training_lock import TrainingLock
from ramify.run.fencing.token import FencingToken
from ramify.run.store.image_store import MEDIA_DIR
from ramify.train.batch import Batch
from ramify.train.batch_source import BatchSource
from ramify.train.build import build_trainer, choose_trainer_dtype, get_pack_spec
from ramify.train.checkpoint import CheckpointManager
from ramify.train.checkpoint_manifest import CHECKPOINTS_DIR, compute_manifest_digest
from ramify.train.config import TrainerProcessConfig
from ramify.train.distributed import Ranks
from ramify.train.metrics import StepMetrics
from ramify.train.protocol import RegisterReply
from ramify.train.publisher import WeightPublisher
from ramify.train.token_stats import TokenStatsWriter
from ramify.train.trainer import Trainer


class TrainerProcess:
    """One rank of a trainer, which trains the batches of `batch_source`.

    `save_outputs` is false for a replay, which writes neither checkpoints nor weights. `log` receives one line for each
    event. The process stops after a step once `should_stop` returns true.
    """

    def __init__(
        self,
        config: TrainerProcessConfig,
        batch_source: BatchSource,
        ranks: Ranks,
        *,
        save_outputs: bool = True,
        flat: bool = False,
        log: Callable[[str], None] = print,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.config, self.batch_source, self.ranks = config, batch_source, ranks
        self.save_outputs, self.flat, self.log, self.should_stop = save_outputs, flat, log, should_stop
        self.model_path = fetch_model(config.model.name)
        self.training_lock = TrainingLock.from_environment()
        self._published_bytes = 0  # of one version, if it is on the disk of the checkpoints

    def run(self) -> int:
        """Train until the source has no more batches; returns the number of steps in the history."""
        config = self.config
        records_stats = config.trainer.record_token_stats and self.save_outputs
        token_stats = TokenStatsWriter(config.storage_path, self.ranks.rank) if records_stats else None
        trainer = build_trainer(
            self.model_path,
            config.trainer,
            self.ranks,
            quantize=config.model.quantize,
            seed=config.seed,
            flat=self.flat,
            media=config.storage_path / MEDIA_DIR,
            checkpoints=config.storage_path / CHECKPOINTS_DIR,
            token_stats=token_stats,
            log=self.log,
        )
        registration = self._register(trainer)
        schedule = config.trainer.optim.schedule.type
        if registration.steps is None and schedule != "constant":
            problem = f"the {schedule} schedule needs the total number of steps"
            raise ConfigInvalid(f"{problem}, which the orchestrator did not send")
        trainer.optimizer.total_steps = registration.steps
        publisher = self._open_publisher(registration) if self.save_outputs else None
        token = FencingToken.from_number(registration.incarnation)
        checkpoints = CheckpointManager(config.storage_path / CHECKPOINTS_DIR, self.ranks, token=token, warn=self.log)
        steps_done = last_saved_step = registration.committed
        is_chains = trainer.policy.layout is PackLayout.CHAINS
        if publisher is not None:
            if steps_done:
                checkpoints.load(trainer, steps_done, name=registration.checkpoint, digest=registration.digest)
            checkpoints.remove_after(steps_done)  # only after the committed one has been verified
            self._publish(trainer, publisher, steps_done)  # engines may serve a version that was lost
            trainer.before_update = publisher.withdraw
        while True:
            batch: Batch | None = None
            with self.ranks.raise_together():
                batch = None if self.should_stop() else self.batch_source.get_batch(steps_done)
            if any(self.ranks.all_gather(batch is None)) or batch is None:
                break
            with self.training_lock.hold(self.log):
                metrics = trainer.step(batch)
            if token_stats is not None:
                with self.ranks.raise_together():
                    token_stats.write(metrics.step, token)
            if metrics.chain_cost is not None and is_chains and steps_done == registration.committed:
                sums, cost = metrics.sums, f"{metrics.chain_cost:.2f} times what a forest would compute"
                self.log(f"chains: {sums.tokens} tokens computed for {sums.unique_tokens} unique ones, {cost}")
            steps_done += 1
            checkpoint_requested = self._report_trained(metrics)
            if publisher is not None:
                self._publish(trainer, publisher, steps_done)
                if checkpoint_requested or steps_done % config.checkpoint.interval == 0:
                    last_saved_step = self._save(
                        trainer, checkpoints, steps_done, last_saved_step, reserved_bytes=self._published_bytes
                    )
        if publisher is not None:
            if steps_done > last_saved_step:
                last_saved_step = self._save(trainer, checkpoints, steps_done, last_saved_step)
            publisher.write_last_directory()  # if this fails, no step is lost: they are saved
            publisher.withdraw()  # the memory ends with this process
            if last_saved_step < steps_done:
                problem = f"no disk space for the final checkpoint in {config.storage_path}"
                raise StorageFull(f"{problem}; the last saved step is {last_saved_step}")
        return steps_done

    def _register(self, trainer: Trainer) -> RegisterReply:
        """Register all ranks as one trainer: the first rank gets the incarnation, the others join it."""
        pack_spec, ranks = get_pack_spec(trainer), self.ranks
        registration = ranks.call_on_first(lambda: self.batch_source.register(0, ranks.world_size, pack_spec, None))
        with ranks.raise_together():
            if not ranks.is_first:
                self.batch_source.register(ranks.rank, ranks.world_size, pack_spec, registration.incarnation)
        layout = "flat" if self.flat else pack_spec.layout.value
        self.log(
            f"trainer ranks={ranks.world_size} token={FencingToken.from_number(registration.incarnation)} "
            f"committed={registration.committed} layout={layout}"
        )
        return registration

    def _open_publisher(self, registration: RegisterReply) -> WeightPublisher:
        config = self.config
        url = config.weights.url_for(config.path)
        return WeightPublisher(
            config.weights_directory,
            self.ranks,
            policy=registration.policy,
            base_model=self.model_path,
            dtype=choose_trainer_dtype(config.trainer, self.ranks).dtype,
            incarnation=registration.incarnation,
            shares_memory=config.weights.shares_memory,
            wait_until_copied=self.batch_source.wait_until_copied,
            write_every_version=config.weights.writes_every_version,
            url=None if url is None else get_run_url(url, registration.run),
            adapters=self._describe_adapters(),
            warn=self.log,
        )

    def _describe_adapters(self) -> PublishedAdapters | None:
        """Return what published adapters belong to; None if complete models are published."""
        config, lora = self.config, self.config.trainer.lora
        if not lora.enabled or config.weights.adapters != "unmerged":
            return None
        return PublishedAdapters(self.model_path.absolute(), lora.alpha / lora.rank, config.model.quantize)

    def _report_trained(self, metrics: StepMetrics) -> bool:
        """Report a finished step; returns whether a checkpoint is requested now."""
        values = metrics.to_dict()
        checkpoint_requested = self.ranks.call_on_first(lambda: self.batch_source.report_trained(metrics.step, values))
        mismatch_kl = values.get("mismatch_kl")
        self.log(
            f"step={metrics.step} loss={metrics.loss:.6g} grad_norm={metrics.grad_norm:.6g} lr={metrics.lr:.3g} "
            f"tokens={metrics.sums.tokens} token_ratio={metrics.token_ratio:.3f} seconds={metrics.seconds:.3f}"
            + ("" if mismatch_kl is None else f" mismatch_kl={mismatch_kl:.3g}")
        )
        return checkpoint_requested

    def _publish(self, trainer: Trainer, publisher: WeightPublisher, step: int) -> None:
        """Publish the weights after `step` steps, and remove versions that no engine needs."""
        published = publisher.publish(trainer, step)
        needed = self.ranks.call_on_first(lambda: self.batch_source.report_published(published.version, published.path))
        if needed is not None:
            publisher.prune(needed)
        if not self.config.weights.is_in_memory:
            self._published_bytes = published.bytes
        self.log(f"published={published.version} seconds={published.seconds:.3f} bytes={published.bytes}")

    def _save(
        self,
        trainer: Trainer,
        checkpoints: CheckpointManager,
        step: int,
        last_saved_step: int,
        *,
        reserved_bytes: int = 0,
    ) -> int:
        """Save and commit a checkpoint; returns the last saved step. If the disk is full, report it and continue.

        `reserved_bytes` is the room that the next published version needs.
        """
        started = time.perf_counter()
        try:
            path = checkpoints.save(trainer, step, committed=last_saved_step, reserved_bytes=reserved_bytes)
        except StorageFull as error:
            message = f"step {step} was not saved: {error.message}; the last saved step is {last_saved_step}"
            self.log(f"{error.name}: {message}")
            self.ranks.call_on_first(lambda: self.batch_source.report_unsaved(step, message))
            return last_saved_step
        values = self.ranks.call_on_first(
            lambda: self.batch_source.commit_checkpoint(step, path.name, compute_manifest_digest(path))
        )
        checkpoints.remove_before(step, self.config.checkpoint, values)
        self.log(f"checkpoint={step} seconds={time.perf_counter() - started:.3f}")
        return step
