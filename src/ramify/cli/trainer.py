"""`ramify trainer @ config.toml`: the trainer alone, fed by an orchestrator or from a recording."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from ramify.cli.short_flags import expand_short_flags
from ramify.config import dry_run, parse_component, pop_flag
from ramify.errors import ConfigInvalid
from ramify.launch.process_configs import build_trainer_config
from ramify.orchestrate.config import RunConfig
from ramify.train.process_config import TrainerProcessConfig

COMMAND_FLAGS = ("--dry-run", "--flat", "--replay", "--record")
USAGE = """usage: ramify trainer [@ FILE] [-m MODEL] [--address tcp://HOST:PORT] [-o OUTPUTS] [--key value]

  FILE                 the trainer's own, or a whole run's as `ramify rl` takes it: its trainer, model, checkpoint and
                       weights, for the orchestrator at `orchestrator.address`; flags are the keys below either way
  --record DIR         keep every batch that comes
  --replay DIR         train on recorded batches; writes no checkpoints and no weights
  --replay DIR --flat  the same batches with every branch laid out whole
  --dry-run            read and check everything, train nothing

On several GPUs: torchrun --nproc-per-node N -m ramify trainer ... All keys:
"""


def run(argv: Sequence[str]) -> int:
    """Read the configuration, find the source, train until it ends."""
    if "--help" in argv or "-h" in argv:
        print(USAGE)
    dry, rest = pop_flag(argv, "--dry-run")
    flat, rest = pop_flag(rest, "--flat")
    replay, rest = _pop_directory_flag(rest, "--replay")
    record, rest = _pop_directory_flag(rest, "--record")
    build_part = (
        build_trainer_config if replay is None else (lambda whole: {**build_trainer_config(whole), "address": None})
    )
    config, run_config = parse_component(
        TrainerProcessConfig,
        expand_short_flags(rest),
        RunConfig,
        build_part,
        prog="ramify trainer",
        command_flags=COMMAND_FLAGS,
    )
    if run_config is not None and run_config.record and replay is None and record is None:
        record = config.path / "batches"
    if (config.address is None) == (replay is None):
        said = "--address of an orchestrator (in a run's file: orchestrator.address, with a port), or --replay DIR"
        raise ConfigInvalid(f"a trainer needs one source: {said}")
    if (flat and replay is None) or (record is not None and replay is not None):
        raise ConfigInvalid("--flat goes with --replay, and --record with --address")
    if dry:
        source = config.address or f"the batches in {replay}"
        said = f"would train {config.model.name} on {source}, into {config.path}"
        if run_config is None:
            dry_run(config, config.path, [said])
        else:  # the resolved configuration there is the run's
            print(said)
        return 0
    from ramify.train.batch_source import BatchRecording, ReplayBatchSource
    from ramify.train.distributed import init_distributed  # torch is loaded here, not for help
    from ramify.train.process import TrainerProcess
    from ramify.train.remote_batch_source import RemoteBatchSource
    from ramify.train.weights_directory import lock_directory, remove_stale_directories

    received_signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: received_signals.append(number))
    with init_distributed(config.trainer) as ranks, lock_directory(config.weights.directory_for(config.path)):
        if replay is not None:
            source = ReplayBatchSource(BatchRecording(replay), flat=flat)
        else:
            assert config.address is not None
            kept = BatchRecording(record) if record is not None else None
            secret = os.environ.get(config.secret_env)
            source = RemoteBatchSource(
                config.address,
                secret=secret,
                timeout=config.patience,
                recording=kept,
                should_stop=lambda: bool(received_signals),
            )
        try:
            tell = _print_line if ranks.is_first else _discard_line
            keep = replay is None
            service = TrainerProcess(
                config,
                source,
                ranks,
                save_outputs=keep,
                flat=flat,
                log=tell,
                should_stop=lambda: bool(received_signals),
            )
            done = service.run()
        finally:
            source.close()
        if ranks.is_first:
            print(f"done after step {done}" if not received_signals else f"stopped after step {done}")
    if received_signals:  # nobody may be left to do it; a run that goes on publishes again
        remove_stale_directories()
    return 0


def _pop_directory_flag(args: Sequence[str], flag: str) -> tuple[Path | None, list[str]]:
    """The word behind a flag of the command's own, and the other arguments."""
    if flag not in args:
        return None, list(args)
    index = list(args).index(flag)
    if index + 1 == len(args):
        raise ConfigInvalid(f"{flag} needs a directory")
    return Path(args[index + 1]), [*args[:index], *args[index + 2 :]]


def _print_line(line: str) -> None:
    print(line, flush=True)


def _discard_line(line: str) -> None: ...
