"""`ramify trainer @ config.toml`: run only the trainer, on batches from an orchestrator or a recording."""

import functools
import os
import signal
from pathlib import Path

from ramify.cli.arguments import ConfigCall
from ramify.cli.commands import pause_garbage_collection
from ramify.core.config import dry_run
from ramify.core.errors import ConfigInvalid
from ramify.train.config import TrainerProcessConfig


def run(call: ConfigCall[TrainerProcessConfig]) -> int:
    """Open the batch source, and train until it ends."""
    config, run_config, flags = call.config, call.run_config, call.flags
    replay = Path(flags.replay) if flags.replay else None
    record = Path(flags.record) if flags.record else None
    if run_config is not None and run_config.record_batches and replay is None and record is None:
        record = config.path / "batches"
    if (config.address is None) == (replay is None):
        raise ConfigInvalid(
            "give exactly one of --address tcp://HOST:PORT and --replay DIR "
            "(a run's file sets the address as orchestrator.address)"
        )
    if (flags.flat and replay is None) or (record is not None and replay is not None):
        raise ConfigInvalid("--flat requires --replay; --record requires --address")
    if flags.dry_run:
        source = config.address or f"the batches in {replay}"
        message = f"would train {config.model.name} on {source}, into {config.path}"
        if run_config is None:
            dry_run(config, config.path, [message])
        else:  # the resolved configuration in that directory is the run's
            print(message)
        return 0
    _train(config, replay=replay, record=record, flat=flags.flat)
    return 0


def _train(config: TrainerProcessConfig, *, replay: Path | None, record: Path | None, flat: bool) -> None:
    """Train until the batch source or a signal ends it."""
    with pause_garbage_collection():
        from ramify.model.precision import disable_tf32_convolutions
        from ramify.run.fencing.token import GANG_TOKEN_VARIABLE, FencingToken
        from ramify.train.batch_source import BatchRecording, ReplayBatchSource
        from ramify.train.distributed import init_distributed  # torch is loaded here, not for a dry run
        from ramify.train.remote_batch_source import RemoteBatchSource
        from ramify.train.training_loop import TrainerProcess
        from ramify.train.weights_directory import lock_directory, remove_stale_directories

    disable_tf32_convolutions()
    received_signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: received_signals.append(number))
    with init_distributed(config.trainer) as ranks, lock_directory(config.weights_directory):
        if replay is not None:
            source = ReplayBatchSource(BatchRecording(replay), flat=flat)  # pyrefly: ignore[bad-instantiation] - the class has no abstract methods
        else:
            assert config.address is not None
            source = RemoteBatchSource(
                config.address,
                secret=os.environ.get(config.secret_env),
                timeout=config.orchestrator_timeout,
                recording=BatchRecording(record) if record is not None else None,
                should_stop=lambda: bool(received_signals),
                start_token=FencingToken.parse(token) if (token := os.environ.get(GANG_TOKEN_VARIABLE)) else None,
            )
        try:
            last_step = TrainerProcess(
                config,
                source,
                ranks,
                save_outputs=replay is None,
                flat=flat,
                log=functools.partial(print, flush=True) if ranks.is_first else _discard_line,
                should_stop=lambda: bool(received_signals),
            ).run()
        finally:
            source.close()
        if ranks.is_first:
            print(f"{'stopped' if received_signals else 'done'} after step {last_step}")
    if received_signals:  # no other process may be left to remove them; a resumed run publishes again
        remove_stale_directories()


def _discard_line(line: str) -> None: ...
