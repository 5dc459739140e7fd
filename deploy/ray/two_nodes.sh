#!/usr/bin/env bash
# Two Ray nodes in network namespaces of one machine, a replica on each, and every bit compared. Needs root.
# deploy/ray/two_nodes.sh [MODEL FOLDER]
set -euo pipefail
cd "$(dirname "$0")/../.."
BIN=${BIN:-.venv/bin}
MODEL=${1:-smollm2-135m-instruct}
WORK=$(mktemp -d /tmp/zd.XXXX)
export RAY_AUTH_MODE=disabled PYTHONPATH=$PWD OMP_NUM_THREADS=1 RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0

cleanup() {
  for space in zd-a zd-b; do
    ip netns pids $space 2>/dev/null | xargs -r kill 2>/dev/null || true
  done
  sleep 2
  for space in zd-a zd-b; do
    ip netns pids $space 2>/dev/null | xargs -r kill -9 2>/dev/null || true
    ip netns del $space 2>/dev/null || true
  done
  rm -rf "$WORK"
}
trap cleanup EXIT

ip netns add zd-a
ip netns add zd-b
ip link add zd-va netns zd-a type veth peer name zd-vb netns zd-b
for side in a b; do
  [ $side = a ] && number=1 || number=2
  ip -n zd-$side addr add "10.99.0.$number/24" dev zd-v$side
  ip -n zd-$side link set zd-v$side up
  ip -n zd-$side link set lo up
done
in_a() { ip netns exec zd-a "$@"; }
in_b() { ip netns exec zd-b "$@"; }

in_a "$BIN/ray" start --head --node-ip-address=10.99.0.1 --port=6379 --num-cpus=1 --include-dashboard=false --temp-dir="$WORK" --disable-usage-stats > "$WORK/head.log" 2>&1
in_b "$BIN/ray" start --address=10.99.0.1:6379 --node-ip-address=10.99.0.2 --num-cpus=1 --disable-usage-stats > "$WORK/worker.log" 2>&1
in_a env RAY_ADDRESS=10.99.0.1:6379 "$BIN/python" -m rollout serve "model.path=$MODEL" worker.count=2 server.port=50051 \
  engine.kv_cache_tokens=8192 worker.start_timeout_s=600 ray.address=10.99.0.1:6379 > "$WORK/serve.log" 2>&1 &
serve=$!
for _ in $(seq 600); do
  grep -q serving "$WORK/serve.log" && break
  kill -0 $serve || { cat "$WORK/serve.log"; exit 1; }
  sleep 1
done
in_a env RAY_ADDRESS=10.99.0.1:6379 "$BIN/python" - <<'PY'
import ray
ray.init(address="10.99.0.1:6379", log_to_driver=False, logging_level="error")
alive = [n["NodeManagerAddress"] for n in ray.nodes() if n["Alive"]]
print("nodes", sorted(alive))
assert sorted(alive) == ["10.99.0.1", "10.99.0.2"]
PY
for i in 1 2 3 4; do echo "{\"prompt_ids\": [$i, 5, 6, 7]}"; done > "$WORK/prompts.jsonl"
in_a "$BIN/python" -m rollout generate --prompts "$WORK/prompts.jsonl" --address 127.0.0.1:50051 -n 4 --max-tokens 24 --seed 1 --out "$WORK/r.jsonl" > "$WORK/generate.log"
echo "samples a replica: $(grep -o '"replica":"[^"]*"' "$WORK/r.jsonl" | sort | uniq -c | tr '\n' ' ')"
in_a "$BIN/python" -m rollout compare "$WORK/r.jsonl" "model.path=$MODEL"
