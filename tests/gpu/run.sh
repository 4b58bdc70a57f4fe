#!/usr/bin/env bash
# Builds the package for this machine's GPU and runs everything that needs one: tests, compute-sanitizer, benchmark.
# Run from the repository. Writes logs and JSON to $OUT (default: build/gpu).
#
#   OUT=...         where results go
#   TARGET=...      where the package is put together (default: a fresh folder)
#   WHEELS=...      folder of wheels to install first, for a machine without a package index
#   PREBUILT=...    folder that holds _native*.so and _cuda*.so already: nothing is compiled
#   ARCHS=90-real   what to compile for
#   STEPS="tests formats peer bench bench_formats sanitizer sanitizer_formats"
set -uo pipefail
cd "$(dirname "$0")/../.."
export OUT=${OUT:-$PWD/build/gpu} PYTHONUNBUFFERED=1
TARGET=${TARGET:-$(mktemp -d)}
ARCHS=${ARCHS:-90-real}
STEPS=${STEPS:-tests formats peer bench bench_formats sanitizer sanitizer_formats}
PYTHON=${PYTHON:-python3}
LOGS="$TARGET/.logs"
mkdir -p "$OUT" "$LOGS"
failed=0

step() {  # name, seconds, command...: runs it with a limit, keeps its log, says how it ended
  local name=$1 limit=$2 begin=$SECONDS log="$LOGS/$1.log"
  shift 2
  timeout "$limit" "$@" >"$log" 2>&1
  local status=$?
  echo "== $name: exit $status after $((SECONDS - begin)) s"
  [ $status -eq 0 ] || { failed=1; tail -n 25 "$log"; }
  return $status
}

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader || exit 1
if [ -n "${WHEELS:-}" ]; then
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$TARGET" \
    "$WHEELS"/*.whl || exit 1
fi
cp -r kvxfer tests benchmarks pyproject.toml "$TARGET" || exit 1
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
export PYTHONPATH=$TARGET${PYTHONPATH:+:$PYTHONPATH}
ls -l kvxfer/*.so

for name in $STEPS; do
  case $name in
    tests)
      step tests 240 "$PYTHON" -m pytest -q -m "not multi_gpu" tests/gpu \
        --ignore tests/gpu/test_cuda_formats.py --ignore tests/gpu/test_cuda_formats_mapping.py
      ;;
    formats)
      step formats 280 "$PYTHON" -m pytest -q --maxfail=40 tests/gpu/test_cuda_formats.py
      grep -E "^FAILED|passed|failed" "$LOGS/formats.log" | tail -n 45
      ;;
    peer)
      step peer 180 "$PYTHON" -m pytest -q -m multi_gpu tests/gpu/test_cuda_peer.py tests/gpu/test_cuda_formats_peer.py
      ;;
    bench)
      step bench 230 "$PYTHON" benchmarks/bench_cuda_copy.py --json "$OUT/cuda_copy.json"
      tail -c 9000 "$LOGS/bench.log"
      ;;
    bench_formats)
      step bench_formats 150 "$PYTHON" benchmarks/bench_cuda_formats.py --json "$OUT/cuda_formats.json"
      tail -c 9000 "$LOGS/bench_formats.log"
      ;;
    sanitizer)
      sanitizer=$(command -v compute-sanitizer) || { echo "== sanitizer: not installed"; continue; }
      for tool in memcheck racecheck initcheck synccheck; do
        step "$tool" 150 "$sanitizer" --tool "$tool" --error-exitcode 9 "$PYTHON" -m pytest -q -p no:cacheprovider \
          tests/gpu/test_cuda_copy.py -k "(whole_rows or token_rows or checksum) and not 65536 and not 100016 and not 8192" &
      done
      wait # for all four; each has said how it ended, and a log without "0 errors" is one to read
      grep -H "ERROR SUMMARY\|RACECHECK SUMMARY" "$LOGS"/{mem,race,init,sync}check.log
      ;;
    sanitizer_formats)
      sanitizer=$(command -v compute-sanitizer) || { echo "== sanitizer: not installed"; continue; }
      for tool in memcheck racecheck initcheck synccheck; do
        step "formats_$tool" 200 "$sanitizer" --tool "$tool" --error-exitcode 9 "$PYTHON" -m pytest -q \
          -p no:cacheprovider tests/gpu/test_cuda_formats.py \
          -k "every_pair and not infinity and (24 or 656)" &
      done
      wait
      grep -H "ERROR SUMMARY\|RACECHECK SUMMARY" "$LOGS"/formats_{mem,race,init,sync}check.log
      ;;
    *) echo "unknown step $name" && failed=1 ;;
  esac
done
cd "$LOGS" && tail -n +1 ./*.log >"$OUT/logs.txt"
exit $failed
