"""Tree attention: its result, its block lists, its memory, and the models that it refuses."""

import os
import subprocess
import sys
from random import Random

import numpy as np
import pytest
import torch
from transformers import AutoConfig, LlamaConfig, MistralConfig

from ramify.core.errors import ModelUnsupported
from ramify.model.kernels.cpu.tree_attention import CpuTreeAttention, split_attention
from ramify.model.pack_layout import PackLayout, choose_pack_layout, describe_pack_layout
from ramify.model.tree_attention import (
    BLOCK_SIZE,
    LENGTH_MULTIPLE,
    MIN_CHAIN_TOKENS,
    BlockMask,
    ChainLengths,
    TreeMask,
    block_sparse_attention,
    causal_attention,
    tree_attention,
)
from ramify.trace import Forest, build_forest, concat_forests, make_padding_forest, pack_trees, split_forest
from tests.support import reference_ops as reference
from tests.support.forests import Size, group
from tests.support.training import CONFIGS, SEQUENTIAL
from tests.train.conftest import one_thread

__all__ = ["one_thread"]  # a fixture

SEEDS = range(10 if os.environ.get("RAMIFY_FULL") else 1)
SIZE = Size(traces=4, nodes=8, fewest=5, tokens=70, vocab=3, logprobs=(-5.0, -0.1))


def build_pack(seed: int) -> Forest:
    """Build a pack of split trees with long and short segments, padded to a multiple of the block size."""
    rng = Random(seed)
    forests = [build_forest([attempt.sample() for attempt in group(rng, SIZE, f"g{i}-")]) for i in range(3)]
    pack = concat_forests(pack_trees([piece for forest in forests for piece in split_forest(forest, 400)], 10_000))
    return concat_forests([pack, make_padding_forest(-len(pack) % BLOCK_SIZE)])


def build_mask(forest: Forest, window: int) -> torch.Tensor:
    in_window = forest.position_ids[:, None] - forest.position_ids[None, :] < (window or len(forest))
    return torch.from_numpy(forest.build_attention_mask() & in_window)


@pytest.mark.promise
@pytest.mark.parametrize(("softcap", "has_sinks"), [(0.0, False), (0.5, True)])
@pytest.mark.parametrize("window", [0, 5, 40, 300])
@pytest.mark.parametrize("seed", SEEDS)
def test_cpu_attention_equals_the_reference_forward_and_backward(seed, window, softcap, has_sinks):
    forest = build_pack(seed)
    torch.manual_seed(seed)
    query = torch.randn(1, 4, len(forest), 8, requires_grad=True)
    key, value = (torch.randn(1, 2, len(forest), 8, requires_grad=True) for _ in range(2))
    sinks = torch.randn(4, requires_grad=True) if has_sinks else None
    end, position = torch.from_numpy(forest.subtree_end), torch.from_numpy(forest.position_ids)
    scores = {"window": window, "softcap": softcap, "sinks": sinks}
    expected = reference.tree_attention(query, key, value, end, position, **scores)
    grad = torch.randn_like(expected)
    plan = split_attention(forest.subtree_end, forest.position_ids, window)
    assert any(product.mask is not None for product in plan)
    assert window or any(product.causal for product in plan)
    actual = CpuTreeAttention.apply(query, key, value, plan, None, softcap, sinks)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    inputs = [tensor for tensor in (query, key, value, sinks) if tensor is not None]
    actual_grads, expected_grads = (torch.autograd.grad(output, inputs, grad) for output in (actual, expected))
    for actual_grad, expected_grad in zip(actual_grads, expected_grads):
        assert (actual_grad - expected_grad).norm() <= 3e-6 * expected_grad.norm()


def parse_lists(lists: torch.Tensor) -> dict[int, tuple[set[int], set[int]]]:
    """Return for each block the blocks that it sees completely, and those that it sees in part."""
    blocks = {}
    for block, num_full, num_all, *others in lists.tolist():
        blocks[block] = (set(others[:num_full]), set(others[num_full:num_all]))
    return blocks


@pytest.mark.parametrize("window", [0, 40])
def test_block_lists_hold_exactly_the_visible_blocks(window):
    forest = build_pack(1)
    blocks = BlockMask.build(forest.subtree_end, forest.position_ids, window, torch.device("cpu"))
    tiled = build_mask(forest, window).reshape(
        len(forest) // BLOCK_SIZE, BLOCK_SIZE, len(forest) // BLOCK_SIZE, BLOCK_SIZE
    )
    any_visible, all_visible = tiled.any(3).any(1), tiled.all(3).all(1)
    keys, queries = parse_lists(blocks.kv_lists), parse_lists(blocks.q_lists)
    assert sorted(keys) == sorted(queries) == list(range(len(any_visible)))
    for block, (full, partial) in keys.items():
        assert full <= set(np.flatnonzero(all_visible[block]).tolist())
        assert set(np.flatnonzero(any_visible[block]).tolist()) <= full | partial
        assert not full & partial
    if not window:  # without a window no invisible block is computed
        assert sum(len(full | partial) for full, partial in keys.values()) == int(any_visible.sum())
    for side in (0, 1):  # key lists and query lists agree
        pairs = {(query, key) for query, lists in keys.items() for key in lists[side]}
        assert pairs == {(query, key) for key, lists in queries.items() for query in lists[side]}


def test_very_long_block_lists_come_first_and_the_others_stay_in_order():
    prompt, reply, replies = BLOCK_SIZE, 8 * BLOCK_SIZE, 8
    end = np.concatenate([np.full(prompt, prompt + replies * reply), prompt + chain_ends(*[reply] * replies)])
    blocks = BlockMask.build(end, np.arange(len(end), dtype=np.int32), 0, torch.device("cpu"))
    assert blocks.q_lists[:, 0].tolist() == list(range(len(end) // BLOCK_SIZE)) == blocks.kv_lists[:, 0].tolist()
    shifted = np.concatenate([chain_ends(reply), end + reply])
    blocks = BlockMask.build(shifted, np.arange(len(shifted), dtype=np.int32), 0, torch.device("cpu"))
    assert blocks.q_lists[:, 0].tolist() == [8, *range(8), *range(9, len(shifted) // BLOCK_SIZE)]


@pytest.mark.promise
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels run on a GPU")
@pytest.mark.parametrize(("width", "window"), [(64, 40), (128, 0), (80, 0), (80, 40)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_equal_the_reference_forward_and_backward(dtype, width, window):
    if dtype is torch.float32 and width == 80:
        pytest.skip("kernels for float32 take long to compile")
    limit = 1e-2 if dtype is torch.bfloat16 else 1e-5
    forest = build_pack(1)
    torch.manual_seed(0)
    cuda = torch.device("cuda")
    shapes = [(1, heads, len(forest), width) for heads in (4, 2, 2, 4)]
    query, key, value, grad = (torch.randn(shape, device=cuda, dtype=dtype).requires_grad_() for shape in shapes)
    blocks = BlockMask.build(forest.subtree_end, forest.position_ids, window, cuda)
    actual = block_sparse_attention(query, key, value, blocks, None, window).transpose(1, 2)
    exact = [tensor.detach().double().requires_grad_() for tensor in (query, key, value)]
    end, position = torch.from_numpy(forest.subtree_end).to(cuda), torch.from_numpy(forest.position_ids).to(cuda)
    expected = reference.tree_attention(*exact, end, position, window=window)
    assert (actual - expected).norm() <= limit * expected.norm()
    actual_grads = torch.autograd.grad(actual, (query, key, value), grad)
    expected_grads = torch.autograd.grad(expected, exact, grad.double())
    for actual_grad, expected_grad in zip(actual_grads, expected_grads):
        assert (actual_grad - expected_grad).norm() <= limit * expected_grad.norm()


def chain_ends(*lengths: int) -> np.ndarray:
    """Return the subtree ends of consecutive chains."""
    return np.repeat(np.cumsum(lengths), lengths)


def test_a_pack_of_long_chains_is_recognized_by_its_subtree_ends():
    def find_lengths(end: np.ndarray) -> list[int] | None:
        chains = ChainLengths.from_ends(end)
        return chains and chains.lengths

    padding = make_padding_forest(300).subtree_end
    assert find_lengths(chain_ends(MIN_CHAIN_TOKENS, MIN_CHAIN_TOKENS + 7)) == [MIN_CHAIN_TOKENS, MIN_CHAIN_TOKENS + 7]
    assert find_lengths(np.concatenate([chain_ends(MIN_CHAIN_TOKENS), padding + MIN_CHAIN_TOKENS])) == [
        MIN_CHAIN_TOKENS
    ]
    assert find_lengths(chain_ends(MIN_CHAIN_TOKENS, 5, MIN_CHAIN_TOKENS)) is None
    assert find_lengths(padding) is None
    forked = chain_ends(MIN_CHAIN_TOKENS, MIN_CHAIN_TOKENS)
    forked[: MIN_CHAIN_TOKENS // 2] = 2 * MIN_CHAIN_TOKENS  # the second chain branches off the middle of the first
    assert find_lengths(forked) is None


@pytest.mark.promise
def test_each_chain_attends_to_itself_and_padding_to_nothing():
    lengths, padding_tokens = [LENGTH_MULTIPLE, 100, 70], 30
    torch.manual_seed(0)
    query = torch.randn(1, 4, sum(lengths) + padding_tokens, 8, requires_grad=True)
    key, value = (torch.randn(1, 2, sum(lengths) + padding_tokens, 8, requires_grad=True) for _ in range(2))
    actual = causal_attention(query, key, value, ChainLengths(lengths), None)
    assert not actual[:, :, -padding_tokens:].any()
    end = chain_ends(*lengths, *[1] * padding_tokens)
    expected = CpuTreeAttention.apply(query, key, value, split_attention(end, end, 0), None)
    grad = torch.randn_like(expected)
    grad[:, :, -padding_tokens:] = 0.0  # nothing is trained there
    torch.testing.assert_close(actual[:, :, :-padding_tokens], expected[:, :, :-padding_tokens], atol=1e-5, rtol=1e-5)
    actual_grads, expected_grads = (
        torch.autograd.grad(output, (query, key, value), grad) for output in (actual, expected)
    )
    for actual_grad, expected_grad in zip(actual_grads, expected_grads):
        assert (actual_grad - expected_grad).norm() <= 2e-6 * expected_grad.norm()


MEMORY_SCRIPT = """
import resource
import numpy as np, torch
from transformers import AutoModelForCausalLM, LlamaConfig
from ramify.model.pack_layout import PackLayout
from ramify.model.tree_attention import ATTENTION_NAME
from ramify.trace import AnnotatedTrace, Annotation, Message, Trace, build_forest
from ramify.train.losses import load_loss
from ramify.train.policy_model import PolicyModel
from ramify.train.model_inputs import build_model_inputs

torch.set_num_threads(1)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1)
model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
policy = PolicyModel(model, PackLayout.FOREST, load_loss("dppo"))

def run(attempts):
    rng, traces = np.random.default_rng(0), []
    prompt = rng.integers(0, 64, 2500)
    for index in range(attempts):
        trace = Trace(id=str(index))
        trace.graph.add_node(-1, Message("user"), prompt)
        for parent in (0, 1, 1):  # a reply with two continuations
            size = 25 if parent else 500
            ids, logprobs = rng.integers(0, 64, size), [-4.0] * size
            trace.graph.add_node(parent, Message("assistant"), ids, sampled_span=(0, size), logprobs=logprobs)
        traces.append(AnnotatedTrace(trace, tuple(Annotation(trace.id, node, advantage=1.0) for node in (1, 2, 3))))
    forest = build_forest(traces)
    policy(build_model_inputs(forest), forest.count_by_component()).loss.backward()
    return len(forest)

run(2)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tokens = run(50)
print(tokens, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.process
@pytest.mark.full("ten seconds for one number")
def test_memory_is_linear_in_the_tokens_of_a_tree():
    """A mask of its pairs would take 900 MB as bytes, 3.6 GB as numbers; a tensor of its activations takes 4 MB."""
    process = subprocess.run([sys.executable, "-c", MEMORY_SCRIPT], capture_output=True, text=True, timeout=100)
    assert process.returncode == 0, process.stderr
    tokens, memory_growth = map(int, process.stdout.split())
    assert tokens >= 29_000
    assert memory_growth < 300e6


def test_models_with_unknown_recurrent_layers_get_chains():
    assert {choose_pack_layout(config) for config in CONFIGS.values()} == {PackLayout.FOREST}
    assert choose_pack_layout(SEQUENTIAL) is PackLayout.CHAINS
    for kind in ("mamba", "minimax", "zamba2", "mamba2"):
        assert choose_pack_layout(AutoConfig.for_model(kind)) is PackLayout.CHAINS, kind
    for kind in ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "lfm2", "lfm2_moe"):
        assert choose_pack_layout(AutoConfig.for_model(kind)) is PackLayout.FOREST, kind
    for kind in ("granitemoehybrid", "bamba", "nemotron_h", "falcon_h1"):
        assert choose_pack_layout(AutoConfig.for_model(kind)) is PackLayout.FOREST, kind
    wide = AutoConfig.for_model("lfm2", conv_L_cache=5, layer_types=["conv"], num_hidden_layers=1)
    assert choose_pack_layout(wide) is PackLayout.CHAINS
    assert describe_pack_layout(wide).startswith("chains: lfm2 has conv layers")


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("deepseek_v3", "kv_lora_rank"),
        ("rwkv", "no list of layers"),
        ("codegen", "does not support custom attention"),
        ("gptj", "does not support custom attention"),
        ("xglm", "does not support custom attention"),
        ("clip_text_model", "no causal language model"),
        ("llama4_text", "chunked_attention"),
        ("gemma4_text", "head_dim"),
        ("gemma4", "head_dim"),
    ],
)
def test_an_unsupported_model_is_refused(model_type, reason):
    with pytest.raises(ModelUnsupported, match=reason):
        choose_pack_layout(AutoConfig.for_model(model_type))


def test_layers_may_differ_in_sizes_but_not_in_windows():
    assert choose_pack_layout(LlamaConfig(per_layer_config={1: {"intermediate_size": 64}})) is PackLayout.FOREST
    with pytest.raises(ModelUnsupported, match="sliding_window"):
        choose_pack_layout(MistralConfig(sliding_window=9, per_layer_config={1: {"sliding_window": 5}}))


def test_sinks_that_a_config_does_not_show_are_refused():
    """A mask of plain scores may hold only the lengths of chains, for cuDNN's kernel, which knows no sinks."""
    end = np.full(4, 4, np.int32)
    mask = TreeMask(end, np.arange(4, dtype=np.int32), torch.device("cpu"))
    query = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ModelUnsupported, match="that its config does not show"):
        tree_attention(torch.nn.Module(), query, query, query, None, tree_mask=mask, s_aux=torch.zeros(2))
