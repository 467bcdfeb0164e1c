"""An exported model says the same in the native engine, in transformers and, with RAMIFY_VLLM_PYTHON, in vLLM."""

import asyncio
import os

import pytest

from ramify.run.store import RunStore
from ramify.train.exported_models import export_model
from tests.support.greedy import render_prompts, sample_with_engine, sample_with_transformers, sample_with_vllm
from tests.support.trained_runs import write_trained_run


@pytest.mark.process
def test_sixteen_greedy_replies_are_equal(tmp_path):
    with RunStore.open(write_trained_run(tmp_path / "run"), write=False) as store:
        model = export_model(store).directory
    prompts = render_prompts(model)
    replies = sample_with_engine(model, prompts)
    assert sample_with_transformers(model, prompts) == replies
    if python := os.environ.get("RAMIFY_VLLM_PYTHON"):
        assert asyncio.run(sample_with_vllm(model, prompts, python, tmp_path / "vllm.log")) == replies
