"""Whether a run fits on the machine: which share of it each process gets, and the memory that takes."""

from ramify.config import raise_config_invalid
from ramify.infer.config import EngineConfig, ExternalConfig
from ramify.launch.devices import DeviceAllocations, Gpu, allocate_devices, visible_gpus
from ramify.launch.machine import usable_cores, usable_memory
from ramify.launch.memory import MemoryEstimate, ModelSize, estimate_memory
from ramify.orchestrate.config import RunConfig

GIB = 1 << 30
ASSUMED_GPU_BYTES = 80 * GIB  # the memory of a GPU that is not here
MAX_MEMORY_FRACTION = 0.95  # share of a memory that may be planned for


def allocate_for_run(config: RunConfig, *, dry_run: bool, gpus: list[Gpu] | None) -> DeviceAllocations:
    """Who gets which cores and GPUs of this machine, or, for a `dry` plan, of one that has what the run asks for."""
    inference = config.inference
    device = inference.device if isinstance(inference, EngineConfig) else "auto"
    return allocate_devices(
        usable_cores(),
        visible_gpus() if gpus is None else gpus,
        inference="none" if isinstance(inference, ExternalConfig) else device,
        trainer=config.trainer.device,
        mode=config.launch.gpus,
        trainer_gpus=config.launch.trainer_gpus,
        assume_gpus=dry_run,
    )


def estimate_run_memory(devices: DeviceAllocations, config: RunConfig, model: ModelSize) -> MemoryEstimate:
    """What the run needs of the memories it is spread over."""
    gpus = devices.inference.gpus
    memory = (gpus[0].memory or ASSUMED_GPU_BYTES) if gpus else usable_memory()
    return estimate_memory(
        config, model, engine_gpu=bool(gpus), trainer_gpu=bool(devices.trainer.gpus), device_memory=memory
    )


def check_memory(memory_estimate: MemoryEstimate, devices: DeviceAllocations) -> None:
    """Refuse a plan that some memory is too small for."""
    engine, trainer = devices.inference.gpus, devices.trainer.gpus
    demands: list[tuple[str, int, int | None]] = []
    if devices.is_colocated:
        demands.append(
            (f"GPU {engine[0].index}", memory_estimate.inference + memory_estimate.trainer, engine[0].memory)
        )
    else:
        demands += [(f"GPU {gpu.index}", memory_estimate.inference, gpu.memory) for gpu in engine]
        demands += [(f"GPU {gpu.index}", memory_estimate.trainer, gpu.memory) for gpu in trainer]
    host = (
        memory_estimate.other
        + (0 if engine else memory_estimate.inference)
        + (0 if trainer else memory_estimate.trainer)
    )
    demands.append(("this machine", host, usable_memory()))
    problems = [
        ("launch", f"does not fit: {where} has {memory / GIB:.1f} GiB, the run needs about {size / GIB:.1f} GiB of it")
        for where, size, memory in demands
        if memory is not None and size > MAX_MEMORY_FRACTION * memory
    ]
    if problems:
        raise_config_invalid(problems)
