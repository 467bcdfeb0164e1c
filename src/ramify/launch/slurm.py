"""The batch script of `ramify slurm`: it starts Ray on the nodes of an allocation and runs `ramify rl` there.

Ports are fixed, by job, because Ray's own choice collides on busy nodes. The head starts first; workers join in waves
of 1, 2, 4, ... nodes, each wave when the last one has joined, because nodes that start all at once sometimes fail.
The job can be requeued at any moment: the same command continues the run. Slurm sends USR1 to the script before the
allocation ends; the run then saves a checkpoint and exits with 75, and the script requeues its job.
"""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from ramify.core.errors import ConfigInvalid
from ramify.orchestrate.config import EXIT_RESUMABLE, RunConfig
from ramify.processes.probe import run_probe

STOP_MARGIN = 30  # of the seconds before the end of an allocation, for all processes to end after the checkpoint
START_TIMEOUT = 600  # seconds for Ray to start on a wave of nodes
SYNTAX_CHECK_TIMEOUT = 10.0  # seconds for the shell to parse one command of `setup`
# Bash exits with 0 after some syntax errors, but always prints them. A setup may turn extglob on for its later lines.
CHECK_SYNTAX = 'LC_ALL=C bash -O extglob -n -c "$1" 2>&1 | head -n 1; exit ${PIPESTATUS[0]}'

START_RAY = r"""
# A thousand ports by job and restart, so that jobs on one node seldom collide; below the ports of outgoing connections.
base=$((10000 + (SLURM_JOB_ID + 11 * ${SLURM_RESTART_COUNT:-0}) % 22 * 1000))
export RAY_USAGE_STATS_ENABLED=0 RAY_DISABLE_DOCKER_CPU_WARNING=1
export RAY_agent_register_timeout_ms=300000  # on a busy node the agents of Ray start slowly
ports="--node-manager-port=$((base + 1)) --object-manager-port=$((base + 2)) --metrics-export-port=$((base + 3))
  --dashboard-agent-grpc-port=$((base + 4)) --dashboard-agent-listen-port=$((base + 5))
  --runtime-env-agent-port=$((base + 6)) --min-worker-port=$((base + 100)) --max-worker-port=$((base + 999))"
# Ray puts sockets there, so the path must be short.
scratch=${RAMIFY_RAY_DIRECTORY:-/tmp}/ramify-ray-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}
declare -A steps  # the srun of each node

get_address() {  # the address that Slurm has for a node
  local address
  address=$(scontrol show node --oneliner "$1" | tr ' ' '\n' | sed -n 's/^NodeAddr=//p')
  getent ahostsv4 "${address:-$1}" | awk 'NR == 1 { print $1 }'
}

start_ray() {  # start_ray NODE OPTIONS...: start Ray on a node, as a job step that runs until the job ends
  local node=$1 address
  shift
  address=$(get_address "$node")
  srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" --kill-on-bad-exit=1 bash -c "$run_ray" "$scratch" \
    ray start --node-name="$node" --node-ip-address="$address" --num-cpus="$cores" --num-gpus="$gpus" $ports \
    --object-store-memory=200000000 --disable-usage-stats "$@" > "$job/ray-$node.log" 2>&1 &
  steps[$node]=$!
}

# What a step runs. Ray runs in its background: with --block, the end of any of Ray's helpers would end the node. Slurm
# may not know these processes as its own, so the step ends them, and first the ones from earlier starts of the job.
run_ray='
  for ((restart = 0; restart < ${0##*-}; restart++)); do pkill -KILL -f "${0%-*}-$restart/session"; done
  trap "pkill -KILL -f $0/session" EXIT
  trap "exit 1" TERM
  for attempt in 1 2 3; do  # on a busy node a start may time out
    "$@" && break
    pkill -KILL -f "$0/session"
    ((attempt < 3)) || exit 1
  done
  while :; do sleep 3600 & wait $!; done
'

wait_for_ray() {  # wait_for_ray NODES...: until Ray runs on them
  local node deadline=$((SECONDS + start_timeout))
  for node in "$@"; do
    until grep -q "Ray runtime started" "$job/ray-$node.log" 2> /dev/null; do
      if ((SECONDS >= deadline)) || ! kill -0 "${steps[$node]}" 2> /dev/null; then
        echo "Ray did not start on $node within $start_timeout s, or ended; the end of $job/ray-$node.log:" >&2
        tail -n 20 "$job/ray-$node.log" >&2
        exit 1
      fi
      sleep 0.5
    done
  done
}

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
rm -f "$job"/ray-*.log
export RAY_ADDRESS=$(get_address "${nodes[0]}"):$base
start_ray "${nodes[0]}" --head --port="$base" --temp-dir="$scratch" --include-dashboard=false
wait_for_ray "${nodes[0]}"
first=1 wave=1
while ((first < ${#nodes[@]})); do
  for node in "${nodes[@]:first:wave}"; do
    start_ray "$node" --address="$RAY_ADDRESS"
  done
  wait_for_ray "${nodes[@]:first:wave}"
  first=$((first + wave)) wave=$((wave * 2))
done
"""

PASS_SIGNALS_ON = r"""
# From the first line on: a signal that arrives before the run has started is passed on to it when it starts.
run= early_signal= must_requeue=false
pass_on() { if [ -n "$run" ]; then kill -"$1" "$run"; else early_signal=$1; fi; }
trap 'must_requeue=true; pass_on USR1' USR1
trap 'pass_on TERM' TERM
"""

WAIT_FOR_RUN = r"""
started=$!
# A process that was forked just now, and still is this shell, may swallow a signal. So may $(...) in this loop: bash
# 5.2 cannot run a trap while it parses one.
while cmp -s "/proc/$$/cmdline" "/proc/$started/cmdline"; do sleep 0.1; done
run=$started
[ -z "$early_signal" ] || kill -"$early_signal" "$run"
wait "$run"
while kill -0 "$run" 2> /dev/null; do  # a signal interrupts `wait`
  wait "$run"
done
wait "$run"
code=$?
"""


def build_batch_script(
    config: RunConfig, *, arguments: Sequence[str], working_directory: Path, bin_directory: Path, job_directory: Path
) -> str:
    """Return the batch script that runs `ramify rl` with these arguments in `working_directory`.

    `bin_directory` has the commands `ramify` and `ray`; logs go to `job_directory`. All three must be on all nodes.
    Raises ConfigInvalid if the configuration does not say how many nodes to allocate, or if an entry of `setup` is not
    a complete command.
    """
    cluster = config.cluster
    if cluster.num_nodes is None:
        raise ConfigInvalid("expected the number of nodes to allocate, got none", key="cluster.num_nodes")
    if problems := _find_setup_problems(cluster.slurm.setup):
        raise ConfigInvalid(problems=problems)
    node, slurm = cluster.node, cluster.slurm
    options = {
        "--job-name": config.path.name.replace("/", "-"),
        "--nodes": cluster.num_nodes,
        "--ntasks-per-node": 1,
        "--cpus-per-task": node.cores,
        "--mem": f"{int(node.memory_gib * 1024)}M",
        **({"--gpus-per-node": node.gpus} if node.gpus else {}),
        **({"--partition": slurm.partition} if slurm.partition else {}),
        **({"--account": slurm.account} if slurm.account else {}),
        "--time": slurm.time_limit,
        "--signal": f"B:USR1@{slurm.stop_seconds}",
        "--output": job_directory / "slurm-%j.log",
        "--open-mode": "append",
    }
    lines = [f"#SBATCH {name}={value}" for name, value in options.items()]
    lines += ["#SBATCH --requeue", *(f"#SBATCH {argument}" for argument in slurm.extra_args)]
    values = {"cores": node.cores, "gpus": node.gpus, "start_timeout": START_TIMEOUT, "job": job_directory}
    settings = [f"{name}={shlex.quote(str(value))}" for name, value in values.items()]
    grace_period = ["--launch.grace_period", str(slurm.stop_seconds - STOP_MARGIN)]
    address = ["--cluster.address", "auto"]  # the cluster that the script starts, at RAY_ADDRESS
    # Of two values of a key the last one counts.
    command = shlex.join(["ramify", "rl", *grace_period, *arguments, *address])
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            PASS_SIGNALS_ON.rstrip(),
            "",
            f"cd {shlex.quote(str(working_directory))} || exit 1",
            f"export PATH={shlex.quote(str(bin_directory))}:$PATH",
            *(line for command in slurm.setup for line in _run_or_exit(command)),
            *settings,
            START_RAY.rstrip(),
            "",
            f"{command} &",
            WAIT_FOR_RUN.strip(),
            f"if $must_requeue && [[ $code = {EXIT_RESUMABLE} || $code = $((128 + $(kill -l USR1))) ]]; then",
            "  scontrol requeue $SLURM_JOB_ID  # the same command continues the run",
            "fi",
            "exit $code",
            "",
        ]
    )


def _find_setup_problems(commands: Sequence[str]) -> list[tuple[str, str]]:
    """Return the key and the problem of each command that the shell cannot parse on its own."""
    problems: list[tuple[str, str]] = []
    for index, command in enumerate(commands):
        group = f"{{\n:\n{command}\n}}"  # a command that is not complete takes the closing brace as part of it
        result = run_probe(["bash", "-c", CHECK_SYNTAX, "bash", group], timeout=SYNTAX_CHECK_TIMEOUT)
        if not result.ok or result.text:
            reason = re.sub(r"^bash: -c: line \d+: ", "", result.text)
            problem = f"expected a complete shell command, got {command!r} ({reason})"
            advice = "put lines that belong together into one entry, separated by \\n"
            problems.append((f"cluster.slurm.setup.{index}", f"{problem}; {advice}"))
    return problems


def _run_or_exit(command: str) -> list[str]:
    """Return the lines that run a shell command, and end the script if it fails."""
    message = shlex.quote(f"setup failed: {command}")
    return [command, f"(($? == 0)) || {{ echo {message} >&2; exit 1; }}"]
