#!/bin/bash
@options@

# From the first line on: a signal that arrives before the run has started is passed on to it when it starts.
run= early_signal= must_requeue=false
pass_on() { if [ -n "$run" ]; then kill -"$1" "$run"; else early_signal=$1; fi; }
trap 'must_requeue=true; pass_on USR1' USR1
trap 'pass_on TERM' TERM

cd @working_directory@ || exit 1
export PATH=@bin_directory@:$PATH
@setup@
@settings@

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

@command@ &
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
if $must_requeue && [[ $code = @resumable@ || $code = $((128 + $(kill -l USR1))) ]]; then
  scontrol requeue $SLURM_JOB_ID  # the same command continues the run
fi
exit $code
