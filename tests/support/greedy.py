"""Greedy replies of a model directory, sampled by the native engine, by transformers and by vLLM, all in float32."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import ramify as rf
from ramify.infer.client import ClientConfig, ClientSampling, InferenceClient
from ramify.infer.config import ServerConfig, VLLMConfig
from ramify.infer.vllm_server import VLLMServer
from ramify.model.render import load_renderer
from ramify.trace import Message

MAX_TOKENS = 16


def render_prompts(model: Path, count: int = 16) -> list[list[int]]:
    """Return prompts of one word each."""
    renderer, words = load_renderer(model), [f"word {number * 7919 % 9973}" for number in range(count)]
    return [renderer.render([Message("user", word)]).token_ids.tolist() for word in words]


def sample_with_engine(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    engine = rf.LLM(model, device="cpu", dtype="float32", threads=1)
    return [sample.token_ids for [sample] in engine.generate(prompts, temperature=0.0, max_tokens=MAX_TOKENS)]


def sample_with_transformers(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    module: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    stop_ids, replies = list(load_renderer(model).stop_ids), list[list[int]]()
    for prompt in prompts:
        settings = {"do_sample": False, "max_new_tokens": MAX_TOKENS, "eos_token_id": stop_ids}
        replies.append(module.generate(torch.tensor([prompt]), **settings)[0, len(prompt) :].tolist())
    return replies


async def sample_with_vllm(model: Path, prompts: list[list[int]], python: str, log: Path) -> list[list[int]]:
    config = VLLMConfig(python=python, dtype="float32", enforce_eager=True, log_file=str(log))
    server = VLLMServer(str(model), config, ServerConfig(port=0))
    await server.start()
    try:
        async with InferenceClient(server.url, ClientConfig()) as client:
            stop_ids = tuple(load_renderer(model).stop_ids)
            sampling = ClientSampling(temperature=0.0, max_tokens=MAX_TOKENS, stop_ids=stop_ids)
            return [(await client.generate(prompt, sampling)).token_ids.tolist() for prompt in prompts]
    finally:
        await server.close()
