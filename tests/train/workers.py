"""Training processes, forked from one that has already imported torch: a start takes milliseconds, not seconds."""

import multiprocessing
import os
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ramify.display import Display
from tests.support.processes import find_free_port
from tools.tiny.tokenizer import VOCAB_SIZE, write_tokenizer

TIMEOUT = 60.0

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        "ramify.train.sft.run",
        "ramify.train.process",
        "peft",
        "pytest",
        "tests.train.batches",
        "tests.train.fake_orchestrator",
    ]
)


def write_model(directory: Path) -> Path:
    """Write a random model of two layers with the tokenizer and template of `tiny`."""
    directory.mkdir(parents=True)
    write_tokenizer(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        initializer_range=0.1,
        tie_word_embeddings=True,
        eos_token_id=258,
        pad_token_id=256,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


class PipeDisplay(Display):
    """A display that sends every line and the number of finished steps to another process.

    The run waits for `may_continue` when `last_step` steps are finished.
    """

    def __init__(self, pipe: Connection, last_step: int | None, may_continue: Event) -> None:
        self.pipe, self._last_step, self._may_continue = pipe, last_step, may_continue

    def print_line(self, line: str) -> None:
        self.pipe.send(line)

    def refresh(self, progress) -> None:
        self.pipe.send(progress.steps_done)
        if self._last_step is not None and progress.steps_done >= self._last_step:
            self._may_continue.wait(TIMEOUT)


def _run_sft_process(settings: dict[str, Any], pipe: Connection, last_step: int | None, may_continue: Event) -> None:
    from ramify.train.sft import SftConfig, run_sft

    result = run_sft(SftConfig.model_validate(settings), display=PipeDisplay(pipe, last_step, may_continue))
    pipe.send(("end", result.steps, result.steps_run))


def start_sft(settings: dict[str, Any], *, last_step: int | None = None):
    """Start a process that trains; returns it, the pipe that receives its progress, and an event.

    After `last_step` steps it waits for the event.
    """
    receiver, sender = context.Pipe(duplex=False)
    may_continue = context.Event()
    process = context.Process(target=_run_sft_process, args=(settings, sender, last_step, may_continue), daemon=True)
    process.start()
    sender.close()
    return process, receiver, may_continue


def _run_as_rank(rank: int, world_size: int, port: int, gang: str | None, target, args) -> None:
    os.environ |= {} if gang is None else {"RAMIFY_GANG_TOKEN": gang}
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    target(*args)


def run_ranks(world_size: int, target, *args, gang: str | None = None) -> None:
    """Run `target` in `world_size` ranks, as torchrun would or as a gang with this token, and wait for them."""
    port = find_free_port()
    processes = [
        context.Process(target=_run_as_rank, args=(rank, world_size, port, gang, target, args))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(TIMEOUT)
            assert process.exitcode == 0, f"a rank ended with {process.exitcode}"
    finally:
        for process in processes:
            process.kill()
