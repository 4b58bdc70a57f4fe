#!/usr/bin/env bash
# Real vLLM engines on two GPUs, or on one that they share, hand over prompts, ours and NixlConnector (benchmarks/bench_vllm_handoff.py).
# Writes JSON and the engines' logs to $OUT (default: build/gpu). Ends within LIMIT seconds, compiling not counted.
#
#   SITE=...      folder with vLLM and what it needs, for a machine where they are not installed
#   WHEELS=...    folder of wheels to install first, likewise
#   PREBUILT=...  folder that holds _native*.so and _cuda*.so already: nothing is compiled
#   LIMIT=230     seconds for the benchmark
#   ARGS=...      arguments of the benchmark: "--connectors kvxfer kvxfer:nvfp4 --shape qwen2.5-14b-kv"
set -uo pipefail
cd "$(dirname "$0")/../.."
export OUT=${OUT:-$PWD/build/gpu} PYTHONUNBUFFERED=1 PYTHONPATH=${SITE:-}
PYTHON=${PYTHON:-python3}
TARGET=$(mktemp -d)
mkdir -p "$OUT"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader || exit 1
if [ -n "${WHEELS:-}" ]; then
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$TARGET" "$WHEELS"/*.whl || exit 1
fi
cp -r kvxfer tests benchmarks pyproject.toml "$TARGET" && "$PYTHON" tests/gpu/entry_points.py "$TARGET" || exit 1
if [ -n "${PREBUILT:-}" ]; then
  cp "$PREBUILT"/_native*.so "$PREBUILT"/_cuda*.so "$TARGET/kvxfer/" || exit 1
else
  {
    cmake -S . -B "$TARGET/.build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DKVXFER_CUDA=on \
      -DKVXFER_CUDA_ARCHS="${ARCHS:-90-real}" -DPython_EXECUTABLE="$(command -v "$PYTHON")" &&
      cmake --build "$TARGET/.build" && cmake --install "$TARGET/.build" --prefix "$TARGET"
  } >"$OUT/build.txt" 2>&1 || { tail -n 30 "$OUT/build.txt"; exit 1; }
fi
cd "$TARGET" || exit 1
export PYTHONPATH=$TARGET${PYTHONPATH:+:$PYTHONPATH}
# shellcheck disable=SC2086
timeout -k 10 "${LIMIT:-230}" "$PYTHON" benchmarks/bench_vllm_handoff.py --json "$OUT/vllm_handoff.json" \
  --logs "$TARGET/logs" ${ARGS:-}
status=$?
for log in "$TARGET"/logs/*.log; do
  echo "== $(basename "$log")"
  grep -E "kvxfer|KV comes|KV Transfer metrics|rror|GPU KV cache size|Traceback" "$log" | cut -c1-250 | tail -n 12
done
tar -C "$TARGET/logs" -czf "$OUT/vllm_logs.tgz" .
exit $status
