"""`rf.LLM` samples in this process, with the tokens, logprobs and shared prefixes of the engine."""

import pytest
import torch

import ramify as rf
from ramify.core.errors import ConfigInvalid, RequestInvalid, WeightsRefused
from ramify.train import load_policy

torch.set_num_threads(1)

MESSAGES = [{"role": "system", "content": "Reverse the text."}, {"role": "user", "content": "river"}]


@pytest.fixture(scope="module")
def llm():
    return rf.LLM("tiny", dtype="float32")


def test_text_messages_and_token_ids_are_prompts(llm):
    [[chat]] = llm.generate([MESSAGES], max_tokens=12, temperature=0)
    prompt, reply = chat.trace.branches[0].messages[-2:]
    assert (prompt.text, reply.text) == ("river", chat.text)

    prompt_ids = chat.trace.branches[0].token_ids[: -len(chat.token_ids)].tolist()
    [[from_ids]] = llm.generate([prompt_ids], max_tokens=12, temperature=0)
    assert from_ids.token_ids == chat.token_ids

    [[from_text]] = llm.generate(["river"], max_tokens=4, temperature=0)
    assert from_text.trace.branches[0].messages[0].text == "river"
    assert (len(from_text.token_ids), from_text.finish_reason) == (4, "length")


def test_samples_of_a_prompt_differ_share_it_and_repeat_with_the_same_seed(llm):
    prompt = [list(range(100, 165))]
    computed = llm._core.counters.computed_tokens
    [samples] = llm.generate(prompt, n=8, max_tokens=3, seed=7)
    assert llm._core.counters.computed_tokens - computed < 2 * 65  # not 8 * 65
    assert len({tuple(sample.token_ids) for sample in samples}) > 1

    [again] = llm.generate(prompt, n=8, max_tokens=3, seed=7)
    assert [sample.token_ids for sample in again] == [sample.token_ids for sample in samples]
    [first, second] = llm.generate(prompt * 2, n=1, max_tokens=16, seed=7)
    assert first[0].token_ids != second[0].token_ids


def test_a_sample_has_the_logprobs_of_the_policy_also_after_an_update(llm):
    policy = load_policy("tiny", device="cpu")
    for _ in range(2):
        [[sample]] = llm.generate([MESSAGES], max_tokens=12, seed=1)
        trace = sample.trace
        forest = rf.build_forest([rf.AnnotatedTrace(trace, (rf.Annotation(trace.id, trace.sampled_nodes[0]),))])
        entries = policy.compute_entries(forest)
        torch.testing.assert_close(entries.logprob, torch.tensor(sample.logprobs), atol=1e-4, rtol=0)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(1.05)
        step = llm.version.step
        assert llm.update_weights(policy.model).step == step + 1 == llm.version.step
    llm.update_weights(load_policy("tiny", device="cpu").model)


def test_a_forest_without_entries_is_refused(llm):
    policy = load_policy("tiny", device="cpu")
    [[sample]] = llm.generate(["river"], max_tokens=2)
    for traces in ([], [rf.AnnotatedTrace(sample.trace, ())]):
        with pytest.raises(ValueError, match="the forest has no entries"):
            policy.compute_entries(rf.build_forest(traces))


def test_what_cannot_be_sampled_is_refused_and_changes_nothing(llm):
    version = llm.version
    for prompts in ("river", MESSAGES, [1, 2, 3]):
        with pytest.raises(RequestInvalid, match="put it into a list"):
            llm.generate(prompts)
    with pytest.raises(RequestInvalid, match="images"):
        url = "data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAA="
        llm.generate([[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]])
    with pytest.raises(ConfigInvalid, match="temperature"):
        llm.generate(["river"], temprature=1)
    with pytest.raises(WeightsRefused, match="Linear does not fit"):
        llm.update_weights(torch.nn.Linear(1, 1))
    assert llm.version == version
    assert not llm._core.has_unfinished_requests


def test_a_generation_that_is_interrupted_leaves_no_request(llm, monkeypatch):
    steps = iter([llm._core.step] * 3)

    def step():
        return next(steps)()

    monkeypatch.setattr(llm._core, "step", step)
    with pytest.raises(StopIteration):
        llm.generate([MESSAGES], n=4)
    monkeypatch.undo()
    assert len(llm.generate([MESSAGES], n=4, max_tokens=4)[0]) == 4
    assert not llm._core.has_unfinished_requests
