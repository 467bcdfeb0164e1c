"""Processes that train, forked from one that has loaded torch already: a start costs milliseconds, not seconds."""

import multiprocessing
import os
import socket
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tools.tiny.tokenizer import VOCAB_SIZE, write_tokenizer

DEADLINE = 60.0

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["ramify.train.sft.run", "ramify.train.process", "peft"])


def write_model(directory: Path) -> Path:
    """A random model of two layers with the tokenizer and template of `tiny`."""
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


class Reporting:
    """A display that tells another process about every step."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def say(self, line: str) -> None:
        self.pipe.send(line)

    def step(self, metrics, pace) -> None:
        self.pipe.send(pace.done)


def run_sft(settings: dict[str, Any], pipe: Connection) -> None:
    from ramify.train.sft import SftConfig, run_sft

    result = run_sft(SftConfig.model_validate(settings), display=Reporting(pipe))
    pipe.send(("end", result.steps, result.steps_run))


def start_sft(settings: dict[str, Any]):
    """A process that trains, and the pipe on which it tells how far it is."""
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=run_sft, args=(settings, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def as_rank(rank: int, size: int, port: int, target, args) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    target(*args)


def run_ranks(size: int, target, *args) -> None:
    """Run `target` as so many ranks, as torchrun would, and wait for them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [context.Process(target=as_rank, args=(rank, size, port, target, args)) for rank in range(size)]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(DEADLINE)
            assert process.exitcode == 0, f"a rank ended with {process.exitcode}"
    finally:
        for process in ranks:
            process.kill()
