#!/usr/bin/env bash
# Builds the package for this machine's GPUs and runs everything that needs one: tests, the backend's conformance suite,
# benchmarks, compute-sanitizer. Run from the repository. Writes logs and JSON to $OUT (default: build/gpu).
#
#   STEPS="..."     of: tests formats peer ipc backend nixl nccl nccl_cycles bench bench_copy bench_formats bench_nccl
#                  demo_nccl sanitizer sanitizer_formats
#   NCCL=...        a libnccl.so.2 to use in the place of the environment's, in the steps of NCCL
#   CYCLES=1000     of connecting and disconnecting in all, by five pairs of processes, in the step nccl_cycles
#   MAXFAIL=10     failed tests after which a step ends
#   BENCH="..."     arguments of benchmarks/bench_gpu.py, say --steps fetch,latency
#   OUT=...         where results go
#   TARGET=...      where the package is put together (default: a fresh folder)
#   WHEELS=...      folder of wheels to install first, for a machine without a package index
#   PREBUILT=...    folder that holds _native*.so and _cuda*.so already: nothing is compiled
#   ARCHS=90-real   what to compile for
set -uo pipefail
cd "$(dirname "$0")/../.."
export OUT=${OUT:-$PWD/build/gpu} PYTHONUNBUFFERED=1
TARGET=${TARGET:-$(mktemp -d)}
ARCHS=${ARCHS:-90-real}
STEPS=${STEPS:-tests formats peer ipc backend bench}
PYTHON=${PYTHON:-python3}
LOGS="$TARGET/.logs"
mkdir -p "$OUT" "$LOGS"
KVXFER_COMMIT=${KVXFER_COMMIT:-$(git rev-parse --short HEAD 2>/dev/null)} && export KVXFER_COMMIT
failed=0

step() {  # name, seconds, command...: runs it with a limit, keeps its log, says how it ended
  local name=$1 limit=$2 begin=$SECONDS log="$LOGS/$1.log"
  shift 2
  timeout -k 5 "$limit" "$@" >"$log" 2>&1
  local status=$?
  echo "== $name: exit $status after $((SECONDS - begin)) s"
  [ $status -eq 0 ] || { failed=1; tail -n 25 "$log"; }
  return $status
}

tests() {  # name, seconds, arguments of pytest...
  local name=$1 limit=$2
  shift 2
  step "$name" "$limit" "$PYTHON" -m pytest -q --maxfail "${MAXFAIL:-10}" --timeout 60 -p no:cacheprovider "$@"
  local status=$?
  tail -n 1 "$LOGS/$name.log"
  return $status
}

one_gpu() {  # a command that sees one GPU and starts processes that see the other, where there is one
  CUDA_VISIBLE_DEVICES=0 KVXFER_PEER_GPU=$((gpus > 1 ? 1 : 0)) "$@"
}

with_nccl() {  # a command that uses $NCCL, if that is set, and may share the GPU, if there is one
  LD_PRELOAD=${NCCL:-${LD_PRELOAD:-}} NCCL_MULTI_RANK_GPU_ENABLE=$((gpus == 1)) \
    KVXFER_PEER_GPU=$((gpus > 1 ? 1 : 0)) "$@"
}

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader || exit 1
gpus=$(nvidia-smi --list-gpus | wc -l)
if [ -n "${WHEELS:-}" ]; then
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$TARGET" \
    "$WHEELS"/*.whl || exit 1
fi
cp -r kvxfer tests benchmarks examples pyproject.toml "$TARGET" || exit 1
"$PYTHON" tests/gpu/entry_points.py "$TARGET" || exit 1
if [ -n "${PREBUILT:-}" ]; then
  cp "$PREBUILT"/_native*.so "$PREBUILT"/_cuda*.so "$TARGET/kvxfer/" || exit 1
else
  work="$TARGET/.build"
  step configure 60 cmake -S . -B "$work" -G Ninja -DCMAKE_BUILD_TYPE=Release -DKVXFER_CUDA=on \
    -DKVXFER_CUDA_ARCHS="$ARCHS" -DPython_EXECUTABLE="$(command -v "$PYTHON")" &&
    step compile 240 cmake --build "$work" &&
    step install 30 cmake --install "$work" --prefix "$TARGET" || exit 1
fi
cd "$TARGET" || exit 1
export PYTHONPATH=$TARGET${PYTHONPATH:+:$PYTHONPATH} PATH=$TARGET/bin:$PATH

sanitized() {  # prefix of the logs, seconds, arguments of pytest...
  local prefix=$1 limit=$2 sanitizer
  shift 2
  sanitizer=$(command -v compute-sanitizer) || { echo "== compute-sanitizer is not installed"; return; }
  for tool in memcheck racecheck initcheck synccheck; do
    step "$prefix$tool" "$limit" "$sanitizer" --tool "$tool" --error-exitcode 9 "$PYTHON" -m pytest -q \
      -p no:cacheprovider "$@" &
  done
  wait # for all four; each has said how it ended, and a log without "0 errors" is one to read
  grep -H "ERROR SUMMARY\|RACECHECK SUMMARY" "$LOGS/$prefix"{mem,race,init,sync}check.log
}

for name in $STEPS; do
  case $name in
    tests)
      tests tests 240 -m "not multi_gpu" tests/gpu \
        --ignore tests/gpu/test_cuda_formats.py --ignore tests/gpu/test_cuda_formats_mapping.py \
        --ignore tests/gpu/test_cuda_ipc.py --ignore tests/gpu/test_nccl.py
      ;;
    formats) tests formats 280 tests/gpu/test_cuda_formats.py ;;
    peer) tests peer 180 tests/gpu/test_cuda_peer.py tests/gpu/test_cuda_formats_peer.py ;;
    ipc) one_gpu tests ipc 280 -o faulthandler_timeout=4 tests/gpu/test_cuda_ipc.py ;; # stacks of what hangs
    backend)
      one_gpu tests backend 300 tests/backends --kvxfer-backend cuda_ipc
      ;;
    nixl) one_gpu tests nixl 200 tests/backends --kvxfer-backend nixl ;;
    nccl)
      one_gpu with_nccl tests nccl_backend 200 tests/backends --kvxfer-backend nccl
      one_gpu with_nccl tests nccl 300 -s --timeout 120 -m "not slow" tests/gpu/test_nccl.py \
        tests/unit/test_nccl_surface.py
      grep -h "one-sided\|beside\|a slow fetch\|NCCL channel" "$LOGS/nccl.log"
      ;;
    nccl_cycles)
      pairs=()
      for pair in 1 2 3 4 5; do # one pair takes 0.7 s a cycle; what it holds is counted for each process
        MALLOC_ARENA_MAX=1 KVXFER_CYCLES=$((${CYCLES:-1000} / 5)) one_gpu with_nccl tests "nccl_cycles_$pair" 560 -s \
          --timeout 550 -m slow tests/gpu/test_nccl.py &
        pairs+=($!)
      done
      for pair in "${pairs[@]}"; do wait "$pair" || failed=1; done
      grep -h "^cycle" "$LOGS"/nccl_cycles_*.log
      ;;
    demo_nccl)
      with_nccl step demo_nccl 120 "$PYTHON" -m kvxfer.cli demo --backend nccl --synthetic
      cat "$LOGS/demo_nccl.log"
      ;;
    bench_nccl)
      # shellcheck disable=SC2086
      with_nccl step bench_nccl 280 "$PYTHON" benchmarks/bench_nccl.py --json "$OUT/nccl.json" ${BENCH:-}
      cat "$LOGS/bench_nccl.log"
      ;;
    bench)
      # shellcheck disable=SC2086
      step bench 240 "$PYTHON" benchmarks/bench_gpu.py --json "$OUT/gpu.json" ${BENCH:-}
      cat "$LOGS/bench.log"
      ;;
    bench_copy)
      step bench_copy 200 "$PYTHON" benchmarks/bench_cuda_copy.py --json "$OUT/cuda_copy.json"
      tail -c 9000 "$LOGS/bench_copy.log"
      ;;
    bench_formats)
      step bench_formats 150 "$PYTHON" benchmarks/bench_cuda_formats.py --json "$OUT/cuda_formats.json"
      tail -c 9000 "$LOGS/bench_formats.log"
      ;;
    sanitizer)
      sanitized "" 150 tests/gpu/test_cuda_copy.py \
        -k "(whole_rows or token_rows or checksum) and not 65536 and not 100016 and not 8192"
      ;;
    sanitizer_formats)
      sanitized formats_ 200 tests/gpu/test_cuda_formats.py -k "every_pair and not infinity and (24 or 656)"
      ;;
    *) echo "unknown step $name" && failed=1 ;;
  esac
done
cd "$LOGS" && tail -n +1 ./*.log >"$OUT/logs.txt"
exit $failed
