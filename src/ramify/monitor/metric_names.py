"""Every metric of a run, in one table: its name, and what it says. `docs/metrics.md` repeats it.

`<source>` is the name of a source, `<name>` that of a reward or metric of a taskset, `<id>` that of a filter, `<age>`
how many steps older than the trained weights those were that sampled.
"""

METRIC_DESCRIPTIONS: dict[str, dict[str, str]] = {
    "Rewards and rollouts": {
        "reward/all/mean": "mean reward of all rollouts judged since the last step, trained on or not",
        "reward/<source>/mean": "the same of one source",
        "reward/<source>/<name>": "mean score of one reward, before its weight",
        "metric/<source>/<name>": "mean of one metric of the taskset",
        "turns/mean": "model calls of a rollout",
        "tokens/sampled": "tokens of a rollout that the policy sampled",
        "truncated": "share of rollouts with a reply that was cut off",
        "render/breaks": "times that history had to be rendered anew, for each rollout",
        "rollouts": "rollouts judged since the last step",
        "trainable": "share of groups that could be trained on",
        "filter/<id>": "share of rollouts that a filter fired on, in either mode",
    },
    "Evals": {
        "eval/<source>/avg": "mean reward, clustered by task",
        "eval/<source>/error": "its standard error",
        "eval/<source>/pass@k": "chance that at least one of k rollouts passes",
        "eval/<source>/pass^k": "chance that all of k rollouts pass",
        "eval/<source>/metric/<name>": "mean of one metric of the taskset",
        "eval/<source>/truncated": "share of rollouts with a reply that was cut off",
        "eval/<source>/missing": "tasks with rollouts that the system failed; they count nowhere",
        "eval/<source>/seconds": "how long the eval took",
    },
    "Training": {
        "train/loss": "loss of the step",
        "train/grad_norm": "norm of the gradient before it is clipped",
        "train/lr": "learning rate",
        "train/skipped": "1 where the gradient was not finite and the weights stayed",
        "train/seconds": "the step alone, without waiting for its batch",
        "train/tokens_per_second": "tokens of the forest a second, forward and backward",
        "train/mfu": "share of the device's peak arithmetic that was used; only on known GPUs",
        "loss/<component>": "the part of the loss that `rl`, `ce` or `ref_kl` has",
        "entries": "trained (trace, token) pairs; also for each source and age, as are the next five",
        "entropy": "mean entropy of the policy at trained tokens",
        "mismatch_kl": "KL between trainer and sampler, as mean of ratio - log ratio - 1",
        "max_log_ratio": "largest |log ratio| between trainer and sampler",
        "p999_log_ratio": "what all but a thousandth of the |log ratio|s are below, a fifth too high at most",
        "masked": "share of entries that the loss left out",
        "entries/<source>/age_<age>": "the same numbers of one source, sampled by weights so many steps old",
        "committed": "the step of a checkpoint, when it is made",
    },
    "The forest": {
        "forest/tokens": "tokens that were computed",
        "forest/token_ratio": "flat tokens over forest tokens: what sharing prefixes saves",
        "forest/padding": "tokens of padding beside them",
    },
    "Flow": {
        "staleness/mean": "steps between the weights a group began with and those it trained, mean of the batch",
        "staleness/max": "and at most",
        "rollouts_per_s": "rollouts a second, over the last minute",
        "tokens_per_s": "sampled tokens a second, over the last minute",
        "time/train": "seconds from giving the trainer a batch to hearing that it is done",
        "time/swap": "seconds to give the engines new weights",
    },
}
