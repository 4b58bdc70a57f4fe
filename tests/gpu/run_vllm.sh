#!/usr/bin/env bash
# Real vLLM engines on two GPUs, or on one that they share, ours and NixlConnector: single hand-overs of prompts
# (benchmarks/bench_vllm_handoff.py), latencies of servers under load (benchmarks/bench_vllm.py), and prompts that are
# handed over while they are computed (benchmarks/bench_vllm_stream.py).
# Writes JSON and the engines' logs to $OUT (default: build/gpu).
#
#   STEPS="..."      of: handoff serve stream (default: handoff)
#   SITE=...         folder with vLLM and what it needs, for a machine where they are not installed
#   WHEELS=...       folder of wheels to install first, likewise; serve needs vllm-router and orjson
#   PREBUILT=...     folder that holds _native*.so and _cuda*.so already: nothing is compiled
#   LIMIT=...        seconds for each step (default: 230 for handoff and stream, 450 for serve)
#   ARGS=...         arguments of handoff: "--connectors kvxfer kvxfer:nvfp4 --shape qwen2.5-14b-kv"
#   SERVE_ARGS=...   arguments of serve: "--shape qwen2.5-14b-kv --rate 3 --prompts 500 15000"
#   STREAM_ARGS=...  arguments of stream (default: "--shape qwen2.5-14b-kv --tokens 8193 32001 --chunk 8704")
set -uo pipefail
cd "$(dirname "$0")/../.."
export OUT=${OUT:-$PWD/build/gpu} PYTHONUNBUFFERED=1 PYTHONPATH=${SITE:-}
PYTHON=${PYTHON:-python3}
TARGET=$(mktemp -d)
mkdir -p "$OUT"
KVXFER_COMMIT=${KVXFER_COMMIT:-$(git rev-parse --short HEAD 2>/dev/null)} && export KVXFER_COMMIT
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader || exit 1
gpus=$(nvidia-smi --list-gpus | wc -l)
if [ -n "${WHEELS:-}" ]; then
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$TARGET" "$WHEELS"/*.whl || exit 1
fi
cp -r kvxfer tests benchmarks examples pyproject.toml "$TARGET" && "$PYTHON" tests/gpu/entry_points.py "$TARGET" || exit 1
mkdir "$TARGET/docs" && cp docs/vllm.md "$TARGET/docs/" || exit 1 # has the servers' launch lines
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
status=0
for step in ${STEPS:-handoff}; do
  # shellcheck disable=SC2086
  case $step in
    handoff)
      timeout -k 10 "${LIMIT:-230}" "$PYTHON" benchmarks/bench_vllm_handoff.py --json "$OUT/vllm_handoff.json" \
        --logs "$TARGET/logs/handoff" ${ARGS:-} ;;
    serve)
      timeout -k 10 "${LIMIT:-450}" "$PYTHON" benchmarks/bench_vllm.py --json "$OUT/vllm_serve.json" \
        --logs "$TARGET/logs/serve" --gpus $((gpus > 1 ? 2 : 1)) ${SERVE_ARGS:-} ;;
    stream)
      timeout -k 10 "${LIMIT:-230}" "$PYTHON" benchmarks/bench_vllm_stream.py --json "$OUT/vllm_stream.json" \
        --logs "$TARGET/logs/stream" ${STREAM_ARGS:---shape qwen2.5-14b-kv --tokens 8193 32001 --chunk 8704} ;;
    *) echo "unknown step $step" && false ;;
  esac || status=$?
done
for log in "$TARGET"/logs/*/*.log; do
  echo "== ${log#"$TARGET"/logs/}"
  grep -E "kvxfer|KV comes|KV Transfer metrics|rror|GPU KV cache size|Traceback" "$log" | cut -c1-250 | tail -n 12
done
tar -C "$TARGET/logs" -czf "$OUT/vllm_logs.tgz" .
exit $status
