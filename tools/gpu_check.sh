#!/usr/bin/env bash
# Checks kvbm on a machine with a GPU; needs no network: Python with the build and run-time requirements, nvcc, a driver.
#
#   tools/gpu_check.sh [build] [test] [sanitize] [bench] [transfers]      all five if none is named
#
# OUT        where the logs go (benchmarks/results)
# PYTHON     the interpreter (python3)
# CUDA_ARCHS what to build for (the first GPU's own)
# JOBS       test processes that share the GPU (4)
# SECTIONS   of benchmarks/transfers.py (pcie sms interference overhead graph soak)
# KVBM_COMMIT what the results are labelled with, where there is no repository (git describe)
#
# Every stage runs whatever became of the one before, unless the build failed; the exit status is that of the worst.
set -uo pipefail
cd "$(dirname "$0")/.."

OUT=${OUT:-benchmarks/results}
PYTHON=${PYTHON:-python3}
JOBS=${JOBS:-4}
SITE=$PWD/build/gpu-site # installed beside, not into, the environment it borrows
mkdir -p "$OUT" build
OUT=$(cd "$OUT" && pwd)
export OUT PYTHONPATH=$SITE${PYTHONPATH:+:$PYTHONPATH} PATH=$SITE/bin:$PATH PYTHONUNBUFFERED=1
gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2> /dev/null | head -n 1)
rows=()
status=0

row() { rows+=("$(printf '%-10s %-12s %5s s   %s' "$1" "$2" "$3" "$4")"); }

# run STAGE COMMAND...: log it and note how it went, with the last line that matches $tell; a log with no $need in it is a
# failure, so that a run in which every test is skipped does not pass
run() {
  local stage=$1 begin=$SECONDS code result=ok
  shift
  printf '\n==> %s: %s\n' "$stage" "$*"
  "$@" 2>&1 | tee "$OUT/$stage.log"
  code=${PIPESTATUS[0]}
  if [[ $code != 0 ]]; then
    result="FAILED ($code)"
  elif ! grep -qE "${need:-}" "$OUT/$stage.log"; then
    result="FAILED"
  fi
  # Some virtual machines hide the device from the sanitizer: that is no verdict on the kernels, and not a pass either.
  if [[ $result != ok ]] && grep -q 'Device not supported' "$OUT/$stage.log"; then
    result=unsupported
  fi
  [[ $result != FAILED* ]] || status=1
  row "$stage" "$result" $((SECONDS - begin)) "$(grep -E "$tell" "$OUT/$stage.log" | tail -n 1 | sed 's/^[= ]*//; s/[= ]*$//')"
  [[ $result == ok ]]
}

summary() {
  {
    printf '\n%s, %s, commit %s\n' "${gpu:-no GPU}" "$("$PYTHON" --version)" \
      "${KVBM_COMMIT:-$(git describe --always --dirty 2> /dev/null || echo unknown)}"
    printf '%s\n' "${rows[@]}"
    for stage in bench transfers; do
      if [ -f "$OUT/$stage.log" ] && [[ " ${stages[*]} " == *" $stage "* ]]; then
        printf '\n'
        tail -n 40 "$OUT/$stage.log"
      fi
    done
  } | tee "$OUT/summary.txt"
  exit "$status"
}

build() {
  rm -rf "$SITE"
  CUDA_ARCHS=${CUDA_ARCHS:-$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null | head -n 1)}
  export CUDA_ARCHS=${CUDA_ARCHS:-90} KVBM_REQUIRE_CUDA=1
  tell='kvbm:|Successfully installed|ERROR' run build \
    "$PYTHON" -m pip install -v --no-build-isolation --no-deps --no-index --target "$SITE" . || summary
}

tests() {
  tell=' in [0-9.]+s' need='[0-9] passed' run test "$PYTHON" -m pytest -p no:benchmark -m gpu -n "$JOBS" -q
  # Those that look at the GPU's free memory want no others beside them.
  tell=' in [0-9.]+s' need='[0-9] passed' run alone "$PYTHON" -m pytest -p no:benchmark -m gpu -k alone -p no:xdist -q
}

sanitize() {
  local tool
  for tool in memcheck racecheck; do
    # PyTorch's caching allocator would hide a read past the end of a tensor from memcheck.
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 tell='SUMMARY|not supported|not found' need='[0-9] passed' run "$tool" \
      compute-sanitizer --tool "$tool" --target-processes all --error-exitcode 99 \
      "$PYTHON" -m pytest -p no:benchmark -m gpu -k sanitize -p no:xdist -q --timeout 0
  done
}

bench() { tell='\.csv' run bench "$PYTHON" benchmarks/run.py --out "$OUT/spine_gpu.csv"; }

transfers() {
  local section sections=()
  for section in ${SECTIONS:-pcie sms interference overhead graph soak}; do sections+=(--section "$section"); done
  rm -f "$OUT/transfers_gpu.csv" # it is appended to
  # Now, alone: a table that a test made beside the others would be of a busy machine.
  "$PYTHON" -m kvbm tune
  tell='\.csv' run transfers "$PYTHON" benchmarks/transfers.py "${sections[@]}" --out "$OUT/transfers_gpu.csv"
}

stages=("$@")
[ $# -gt 0 ] || stages=(build test sanitize bench transfers)
for stage in "${stages[@]}"; do
  case $stage in
    build) build ;;
    test) tests ;;
    sanitize) sanitize ;;
    bench) bench ;;
    transfers) transfers ;;
    *)
      echo "gpu_check.sh: expected stages build, test, sanitize, bench, transfers; got '$stage'" >&2
      exit 2
      ;;
  esac
done
summary
