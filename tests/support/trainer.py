"""A fake orchestrator for the trainer, and trainers in forked processes.

The orchestrator speaks the trainer's protocol over a real wire and holds its ledger in memory. The processes are forked
from one that has already imported torch: a start takes milliseconds, not seconds.
"""

import asyncio
import multiprocessing
import os
import threading
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from ramify.core.display import Display
from ramify.core.errors import PeerLost, PortTaken, ProcessReplaced
from ramify.processes.wire import IncomingRequest, WireMessage, WireServer
from ramify.processes.wire.listener import PortReservation
from ramify.train.batch import Batch, PackSpec, repack, split_across_ranks
from ramify.train.batch_codec import encode_batch
from ramify.train.protocol import (
    BatchRequest,
    CheckpointRequest,
    CopiedRequest,
    PublishedRequest,
    RegisterReply,
    RegisterRequest,
    TrainedRequest,
    UnsavedRequest,
)
from tests.support.processes import find_free_port

TIMEOUT = 60.0

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        "ramify.train.sft.run",
        "ramify.train.training_loop",
        "pytest",
        "tests.support.training",
        "tests.support.trainer",
    ]
)

REQUEST_TYPES = {
    "hello": RegisterRequest,
    "batch": BatchRequest,
    "trained": TrainedRequest,
    "published": PublishedRequest,
    "copied": CopiedRequest,
    "checkpoint": CheckpointRequest,
    "unsaved": UnsavedRequest,
}


class FakeOrchestrator:
    """Serves the same batches to every trainer, and records what trainers report."""

    def __init__(self, batches: list[Batch], address: str | None = None) -> None:
        self.batches = batches
        self.address = address or PortReservation({"it": "tcp://127.0.0.1:0"}).addresses["it"]  # free from now on
        self.committed, self.incarnation = 0, -1
        self.checkpoint = ("", "")  # directory and digest of the last commit
        self.pack_spec, self.world_size = PackSpec(), 0
        self.served: list[tuple[int, int]] = []  # (incarnation, step)
        self.trained: dict[tuple[int, int], float] = {}  # (incarnation, step): loss
        self.published: list[tuple[tuple[str, int, int], str]] = []
        self.commits: list[int] = []
        self.unsaved: dict[int, str] = {}  # step: message
        self.needed: list[tuple[str, int, int]] | None = []
        self.last_step: int | None = None  # trainers wait for later batches
        self.changed = threading.Condition()

    def __enter__(self):
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)), daemon=True)
        self._thread.start()
        assert started.wait(60)
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(30)

    def wait_for(self, condition) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, 60), "timed out"

    async def _serve(self, started: threading.Event) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        server = WireServer({name: self._handler(name) for name in REQUEST_TYPES}, self.address)
        async with asyncio.timeout(60):
            while True:
                try:
                    await server.start()
                    break
                except PortTaken:  # the kernel frees the port of the previous server a little later
                    await asyncio.sleep(0.05)
        try:
            self.address = server.address
            started.set()
            await self._end.wait()
        finally:
            await server.close()

    def _handler(self, name: str):
        async def handle(incoming: IncomingRequest) -> WireMessage:
            request = incoming.decode(REQUEST_TYPES[name])
            if name != "hello" and request.incarnation != self.incarnation:
                raise ProcessReplaced(f"trainer {request.incarnation} was replaced by {self.incarnation}")
            if name != "hello" and not self.world_size:
                raise PeerLost("the orchestrator was restarted: register again")
            while name == "batch" and self.last_step is not None and request.step > self.last_step:
                await asyncio.sleep(0.01)
            with self.changed:
                reply = getattr(self, f"_{name}")(request)
                self.changed.notify_all()
            return reply

        return handle

    def _hello(self, request: RegisterRequest) -> WireMessage:
        if request.incarnation is None:
            self.incarnation += 1
        self.world_size, self.pack_spec = request.world_size, request.pack_spec
        return WireMessage.encode(
            RegisterReply(
                committed=self.committed,
                checkpoint=self.checkpoint[0],
                digest=self.checkpoint[1],
                incarnation=self.incarnation,
                policy="p",
            )
        )

    def _batch(self, request: BatchRequest) -> WireMessage:
        if request.step >= len(self.batches):
            return WireMessage.encode(None)
        self.served.append((request.incarnation, request.step))
        batch = repack([self.batches[request.step]], self.pack_spec)
        share = split_across_ranks(batch, self.pack_spec, self.world_size)[request.rank]
        return WireMessage.encode(None, encode_batch(share))

    def _trained(self, request: TrainedRequest) -> WireMessage:
        self.trained[request.incarnation, request.step] = request.metrics["train/loss"]
        return WireMessage.encode(False)

    def _published(self, request: PublishedRequest) -> WireMessage:
        self.published.append((request.version, request.path))
        return WireMessage.encode(self.needed)

    def _copied(self, request: CopiedRequest) -> WireMessage:
        return WireMessage.encode("")

    def _checkpoint(self, request: CheckpointRequest) -> WireMessage:
        self.committed, self.checkpoint = request.step, (request.directory, request.digest)
        self.commits.append(request.step)
        return WireMessage.encode({})

    def _unsaved(self, request: UnsavedRequest) -> WireMessage:
        self.unsaved[request.step] = request.message
        return WireMessage.encode(None)


def write_model(directory: Path) -> Path:
    """Write a random model of two layers with the tokenizer and template of `tiny`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tools.tiny.tokenizer import VOCAB_SIZE, write_tokenizer

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
    if world_size > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # NCCL does not run two ranks on one GPU
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
