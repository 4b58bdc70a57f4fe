#!/usr/bin/env bash
# Installs the package into a folder and runs the conformance suite and the benchmark of the GPU backend: two
# processes, each of which sees one GPU (two where there are two). Logs and JSON go to $OUT (default: build/gpu).
#
#   STEPS="suite ipc bench"  which of them: conformance suite, tests between processes, benchmark
#   WHEELS=...   folder of wheels to install first, for a machine without a package index
set -uo pipefail
cd "$(dirname "$0")/../.."
export OUT=${OUT:-$PWD/build/gpu} PYTHONUNBUFFERED=1 CUDA_VISIBLE_DEVICES=0
[ "$(nvidia-smi --list-gpus | wc -l)" -gt 1 ] && export KVXFER_PEER_GPU=1 || export KVXFER_PEER_GPU=0
mkdir -p "$OUT"
TARGET=$(mktemp -d)
python3 -m pip install -q --no-index --no-deps --target "$TARGET" ${WHEELS:+"$WHEELS"/*.whl} || exit 1
KVXFER_CUDA=on KVXFER_CUDA_ARCHS=90-real python3 -m pip install -q --no-build-isolation --no-deps --no-index \
  --target "$TARGET" . 2>&1 | tail -n 20
export PYTHONPATH=$TARGET PATH=$TARGET/bin:$PATH
cp -r tests benchmarks examples pyproject.toml "$TARGET" && cd "$TARGET" || exit 1
{
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
  python3 -c 'from kvxfer.cli import main; raise SystemExit(main(["doctor"]))' | sed -n '/^backends/,/^$/p'
  for name in ${STEPS:-ipc suite bench}; do
    case $name in
      # The nearest thing to the hardware first, so that a failure there explains those that follow.
      ipc) timeout 280 python3 -m pytest -v --durations 5 tests/gpu/test_cuda_words.py tests/gpu/test_cuda_ipc.py -p no:cacheprovider ;;
      suite) timeout 400 python3 -m pytest -q --maxfail 6 tests/backends --kvxfer-backend cuda_ipc -p no:cacheprovider ;;
      bench) timeout 120 python3 benchmarks/bench_cuda_ipc.py --json "$OUT/cuda_ipc.json" ;;
      *) echo "unknown step $name" ;;
    esac
  done
} 2>&1 | tee "$OUT/cuda_ipc_logs.txt" | tail -n 120
