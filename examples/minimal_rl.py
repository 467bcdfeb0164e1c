"""Reinforcement learning in one file and one process: `tiny` learns to write words backwards, in seconds on two cores.

Each step of the loop in `main` is six statements. Edit any of them:

    1. sampling       the engine samples GROUP_SIZE replies to each prompt and computes the prompt once
    2. reward         the taskset scores each reply, from 0 to 1
    3. advantage      how much better a reply is than the mean of its group
    4. forest         replies that begin with the same tokens are merged, so each shared token is computed once
    5. loss           a clipped, importance-weighted policy gradient, written out below
    6. optimizer step AdamW; the engine then samples with the new weights

`ramify rl` runs the same six parts in processes of their own, which survive crashes and may be on many machines.

    python examples/minimal_rl.py
"""

import torch

import ramify as rf
from ramify.env.tasksets.reverse_text import ReverseText, ReverseTextConfig
from ramify.train import Entries

MODEL = "tiny"  # or a directory, or a Hugging Face id
NUM_STEPS = 6
GROUPS_PER_STEP = 16  # tasks per step
GROUP_SIZE = 8  # replies per task
NUM_HELD_OUT = 64  # tasks that measure what was learned and are never trained on
MAX_TOKENS = 48  # limit for one reply
LEARNING_RATE = 3e-4
MAX_GRAD_NORM = 1.0
CLIP_LOW, CLIP_HIGH = 0.2, 0.2  # the probability ratio of a token is clipped to [1 - CLIP_LOW, 1 + CLIP_HIGH]
SEED = 0


def main() -> tuple[float, float]:
    """Train the model; return the mean reward on the held-out tasks before and after."""
    llm = rf.LLM(MODEL, dtype="float32")  # the inference engine, with its own copy of the weights
    policy = rf.load_policy(MODEL)  # the torch.nn.Module to train
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    taskset = ReverseText()
    train_tasks = list(taskset.load())
    held_out_tasks = list(ReverseText(ReverseTextConfig(split="eval", num_tasks=NUM_HELD_OUT)).load())

    score_before = evaluate(llm, taskset, held_out_tasks)
    print(f"held-out reward before training: {score_before:.3f}")

    for step in range(NUM_STEPS):
        first = step * GROUPS_PER_STEP % len(train_tasks)
        tasks = train_tasks[first : first + GROUPS_PER_STEP]
        prompts = [build_prompt(task) for task in tasks]

        # 1. Sampling: [tasks][GROUP_SIZE] samples. The `trace` of a sample holds the tokens of prompt and reply, and
        #    the logprobs with which the reply was sampled.
        groups = llm.generate(prompts, n=GROUP_SIZE, temperature=1.0, max_tokens=MAX_TOKENS, seed=SEED + step)

        # 2. Reward: [tasks, GROUP_SIZE].
        rewards = torch.tensor(
            [[taskset.similarity(task, sample.trace) for sample in group] for task, group in zip(tasks, groups)]
        )

        # 3. Advantage: [tasks, GROUP_SIZE]. It is 0 for a group of equal rewards, which teaches nothing.
        advantages = rewards - rewards.mean(dim=1, keepdim=True)

        # 4. Forest: trees of tokens, merged on equal prefixes. Each sampled token of a reply is one entry of the loss.
        forest = rf.build_forest(
            [
                annotate(sample.trace, advantage)
                for group, row in zip(groups, advantages.tolist())
                for sample, advantage in zip(group, row)
            ]
        )

        # 5. Loss: one forward pass over the forest gives the logprob of every entry under the current weights.
        loss = compute_policy_gradient_loss(policy.compute_entries(forest))

        # 6. Optimizer step; from now on the engine samples with the new weights.
        take_optimizer_step(loss, optimizer, policy)
        llm.update_weights(policy.model)

        print(
            f"step {step}: reward {rewards.mean():.3f}, loss {loss:+.4f}, "
            f"{len(forest)} tokens computed instead of {forest.flat_tokens}"
        )

    score_after = evaluate(llm, taskset, held_out_tasks)
    print(f"held-out reward after training: {score_after:.3f}")
    return score_before, score_after


def build_prompt(task: rf.Task) -> list[dict[str, object]]:
    """Return the conversation to which the model replies; its chat template turns it into tokens."""
    return [{"role": "system", "content": task.system}, {"role": "user", "content": task.prompt}]


def annotate(trace: rf.Trace, advantage: float) -> rf.AnnotatedTrace:
    """Give every sampled token of a trace the same advantage; pass an array for one value per token."""
    annotations = tuple(rf.Annotation(trace.id, node, advantage=advantage) for node in trace.sampled_nodes)
    return rf.AnnotatedTrace(trace, annotations)


def compute_policy_gradient_loss(entries: Entries) -> torch.Tensor:
    """Return PPO's clipped objective as a loss. The tensors of `entries` have one element per sampled token."""
    # π / π_sampler. It is close to 1 here, because each forest gets one optimizer step; with more steps it moves away.
    ratio = (entries.logprob - entries.sampler_logprob).exp()
    clipped_ratio = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    # The minimum is pessimistic: no gradient flows once a token has moved far enough in the direction of its advantage.
    objective = torch.minimum(ratio * entries.advantage, clipped_ratio * entries.advantage)
    return -objective.mean()


def take_optimizer_step(loss: torch.Tensor, optimizer: torch.optim.Optimizer, policy: torch.nn.Module) -> None:
    """Update the weights by the gradient of the loss, clipped to the norm MAX_GRAD_NORM."""
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), MAX_GRAD_NORM)
    optimizer.step()


def evaluate(llm: rf.LLM, taskset: ReverseText, tasks: list[rf.Task]) -> float:
    """Return the mean reward of one reply to each task."""
    groups = llm.generate([build_prompt(task) for task in tasks], max_tokens=MAX_TOKENS, seed=SEED)
    rewards = [taskset.similarity(task, sample.trace) for task, [sample] in zip(tasks, groups)]
    return sum(rewards) / len(rewards)


if __name__ == "__main__":
    main()
