"""An example configuration with sections, lists of sections, variants selected by `type`, and plugin tables."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ramify.core.config import Config


class Optim(Config):
    lr: float = 1e-4
    warmup_steps: int = 0
    betas: list[float] = [0.9, 0.95]
    window: tuple[float, float] = (0.0, 1.0)
    marks: tuple[str, ...] = ()


class Trainer(Config):
    optim: Optim = Optim(lr=3e-4)  # an explicit default, which other keys of the section must not reset
    compile: bool = False


class Elastic(Config):
    type: Literal["elastic"] = "elastic"
    min: int = 1
    max: int | None = None


class Static(Config):
    type: Literal["static"] = "static"
    workers: int = 4
    cores: list[int] = []


Pool = Annotated[Elastic | Static, Field(discriminator="type")]


class Sampling(Config):
    temperature: float = 1.0
    max_tokens: int | None = 256


class Source(Config):
    name: str | None = None
    taskset: dict[str, Any] = {}
    sampling: Sampling = Sampling()
    pool: Pool = Elastic()
    tags: list[str] = []
    shuffle: bool = True


class Wandb(Config):
    project: str = "ramify"
    entity: str | None = None


class Run(Config):
    name: str
    max_steps: int = 120
    output: Path = Path("outputs")
    memory: float | Literal["auto"] = "auto"
    trainer: Trainer = Trainer()
    pool: Pool = Elastic()
    wandb: Wandb | None = None
    train: list[Source] = []
    eval: list[Source] = [Source(name="held-out")]


class Adapters(Config):
    switch: ClassVar = "enabled"

    enabled: bool = True
    rank: int = 16


class Switched(Config):
    adapters: Adapters = Adapters(enabled=False)
