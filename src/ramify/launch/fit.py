"""Whether a run fits on the machine: which share of it each process gets, and the memory that takes."""

from ramify.cli.machine import usable_cores, usable_memory
from ramify.config import raise_config_invalid
from ramify.infer.config import EngineConfig, ExternalConfig
from ramify.launch.devices import Gpu, Shares, share, visible_gpus
from ramify.launch.estimate import Model, Need, need_of
from ramify.orchestrate.config import RunConfig

GIB = 1 << 30
ASSUMED = 80 * GIB  # the memory of a GPU that is not here
ROOM = 0.95  # share of a memory that may be planned for


def shares_of(config: RunConfig, *, dry: bool, gpus: list[Gpu] | None) -> Shares:
    """Who gets which cores and GPUs of this machine, or, for a `dry` plan, of one that has what the run asks for."""
    inference = config.inference
    device = inference.device if isinstance(inference, EngineConfig) else "auto"
    return share(
        usable_cores(),
        visible_gpus() if gpus is None else gpus,
        inference="none" if isinstance(inference, ExternalConfig) else device,
        trainer=config.trainer.device,
        mode=config.launch.gpus,
        trainer_gpus=config.launch.trainer_gpus,
        assume=dry,
    )


def need_on(shares: Shares, config: RunConfig, model: Model) -> Need:
    """What the run needs of the memories it is spread over."""
    gpus = shares.inference.gpus
    memory = (gpus[0].memory or ASSUMED) if gpus else usable_memory()
    return need_of(config, model, engine_gpu=bool(gpus), trainer_gpu=bool(shares.trainer.gpus), memory=memory)


def check_memory(need: Need, shares: Shares) -> None:
    """Refuse a plan that some memory is too small for."""
    engine, trainer = shares.inference.gpus, shares.trainer.gpus
    asked: list[tuple[str, int, int | None]] = []
    if shares.shared:
        asked.append((f"GPU {engine[0].index}", need.inference + need.trainer, engine[0].memory))
    else:
        asked += [(f"GPU {gpu.index}", need.inference, gpu.memory) for gpu in engine]
        asked += [(f"GPU {gpu.index}", need.trainer, gpu.memory) for gpu in trainer]
    host = need.rest + (0 if engine else need.inference) + (0 if trainer else need.trainer)
    asked.append(("this machine", host, usable_memory()))
    problems = [
        ("launch", f"does not fit: {where} has {memory / GIB:.1f} GiB, the run needs about {size / GIB:.1f} GiB of it")
        for where, size, memory in asked
        if memory is not None and size > ROOM * memory
    ]
    if problems:
        raise_config_invalid(problems)
