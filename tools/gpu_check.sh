#!/usr/bin/env bash
# Checks kvbm on a machine with a GPU; needs no network: Python with the build and run-time requirements, nvcc, a driver.
#
#   tools/gpu_check.sh [build] [test] [memcheck] [racecheck] [bench] [transfers] [plots]      all if none is named
#
# `sanitize` is both checks. Every stage ends with a summary of what ran so far, so stages can be run one by one.
#
# OUT        where the logs go (benchmarks/results)
# PYTHON     the interpreter (python3)
# CUDA_ARCHS what to build for (the first GPU's own)
# WHEEL      a wheel that was built elsewhere: the stage `build` installs it, and needs no nvcc
# JOBS       test processes that share the GPU (4; under compute-sanitizer one a file of tests)
# LIMIT      seconds that one command may take (no limit): what takes longer has failed, and the summary still comes
# PLOTS      where the pictures go ($OUT/plots)
# KVBM_COMMIT what the results are labelled with, where there is no repository (git describe)
#
# Every stage runs whatever became of the one before, unless the build failed; the exit status is that of the worst.
set -uo pipefail
cd "$(dirname "$0")/.."

OUT=${OUT:-benchmarks/results}
PYTHON=${PYTHON:-python3}
SITE=$PWD/build/gpu-site # installed beside, not into, the environment it borrows
mkdir -p "$OUT" build
OUT=$(cd "$OUT" && pwd)
export OUT PYTHONPATH=$SITE${PYTHONPATH:+:$PYTHONPATH} PATH=$SITE/bin:$PATH PYTHONUNBUFFERED=1
gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2> /dev/null | head -n 1)
rows=()
status=0

row() { rows+=("$(printf '%-18s %-12s %5s s   %s' "$1" "$2" "$3" "$4")"); }

# run STAGE COMMAND...: log it and note how it went, with the last line that matches $tell; a log with no $need in it is a
# failure, so that a run in which every test is skipped does not pass
run() {
  local stage=$1 begin=$SECONDS code result=ok
  shift
  printf '\n==> %s: %s\n' "$stage" "$*"
  # Interrupted as by a user, pytest still names what failed so far.
  ${LIMIT:+timeout --signal=INT --kill-after=20 "$LIMIT"} "$@" 2>&1 | tee "$OUT/$stage.log"
  code=${PIPESTATUS[0]}
  if [[ $code == 124 || $code == 137 ]] && [[ -n ${LIMIT:-} ]]; then
    result="FAILED, $LIMIT s"
  elif [[ $code != 0 ]]; then
    result="FAILED ($code)"
  elif [[ -n ${need:-} ]] && ! grep -qE "$need" "$OUT/$stage.log"; then
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

# What ran so far, at the end of every stage.
summary() {
  {
    printf '\n%s, %s, commit %s\n' "${gpu:-no GPU}" "$("$PYTHON" --version)" \
      "${KVBM_COMMIT:-$(git describe --always --dirty 2> /dev/null || echo unknown)}"
    printf '%s\n' "${rows[@]}"
    # What was asked for, and reached.
    grep -hE ' (yes|NO) *$' "$OUT"/*.log 2> /dev/null
  } | tee "$OUT/summary.txt"
}

build() {
  rm -rf "$SITE"
  CUDA_ARCHS=${CUDA_ARCHS:-$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null | head -n 1)}
  export CUDA_ARCHS=${CUDA_ARCHS:-90} KVBM_REQUIRE_CUDA=1
  tell='kvbm:|Successfully installed|ERROR' run build \
    "$PYTHON" -m pip install -v --no-build-isolation --no-deps --no-index --target "$SITE" "${WHEEL:-.}" || {
    summary
    exit "$status"
  }
}

tests() {
  tell=' in [0-9.]+s' need='[0-9] passed' run test "$PYTHON" -m pytest -p no:benchmark -m gpu -n "${JOBS:-4}" -q
  # Those that look at the GPU's free memory want no others beside them.
  tell=' in [0-9.]+s' need='[0-9] passed' run alone "$PYTHON" -m pytest -p no:benchmark -m gpu -k alone -p no:xdist -q
}

# sanitize TOOL CLEAN WHICH: the tests named WHICH under compute-sanitizer, a process a file of tests, all at once; CLEAN is what
# it says when all is well.
sanitize() {
  local tool=$1 clean=$2 which=$3 begin=$SECONDS result=ok passed=0 file log number code
  local -A processes=()
  printf '\n==> %s: -k %s, a process a file\n' "$tool" "$which"
  for file in $(grep -lE 'def test_.*sanitize' tests/*/test_*.py); do
    log=$OUT/$tool.$(basename "$file" .py).log
    # PyTorch's caching allocator would hide a read past the end of a tensor from memcheck.
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 ${LIMIT:+timeout --kill-after=10 "$LIMIT"} \
      compute-sanitizer --tool "$tool" --target-processes all --error-exitcode 99 \
      "$PYTHON" -m pytest -p no:benchmark -p no:xdist -m gpu -k "$which" -q --timeout 0 "$file" > "$log" 2>&1 &
    processes[$log]=$!
  done
  for log in "${!processes[@]}"; do
    code=0
    wait "${processes[$log]}" || code=$?
    number=$(grep -oE '[0-9]+ passed' "$log" | tail -n 1 | cut -d ' ' -f 1)
    passed=$((passed + ${number:-0}))
    # A file in which no test is meant; the sanitizer says that nothing called CUDA.
    [[ $code != 0 ]] && grep -qE '^[0-9]+ deselected in' "$log" && continue
    if [[ $code != 0 ]] || ! grep -q "$clean" "$log"; then
      result="FAILED ($code)"
      tail -n 40 "$log"
    fi
  done
  [[ $passed -gt 0 ]] || result="FAILED"
  # Some virtual machines hide the device from the sanitizer: that is no verdict on the kernels, and not a pass either.
  if [[ $result != ok ]] && grep -q 'Device not supported' "$OUT/$tool."*.log; then
    result=unsupported
  fi
  [[ $result != FAILED* ]] || status=1
  [[ $result == ok ]] || clean=''
  row "$tool" "$result" $((SECONDS - begin)) "$passed passed in ${#processes[@]} files${clean:+, $clean}"
  [[ $result == ok ]]
}

memcheck() { sanitize memcheck 'ERROR SUMMARY: 0 errors' sanitize; }

# Races are within a kernel: each by itself and once, at its larger sizes, and not again behind every door that leads to it.
racecheck() { sanitize racecheck 'SUMMARY: 0 hazards' 'sanitize and (each or units) and not True'; }

# measure NAME ARGUMENTS...: `kvbm bench`, with its rows in $OUT/NAME.csv
measure() {
  local name=$1
  shift
  tell='rows|figures|error' run "$name" "$PYTHON" -m kvbm bench "$@" --out "$OUT/$name.csv"
  "$PYTHON" -m benchmarks targets "$OUT/$name.csv" || true  # for the reader: a slower machine is no failure
}

# both A:B C:D...: those pairs and their reverses, as --pair takes them
both() {
  local pair list=()
  for pair in "$@"; do list+=("$pair" "${pair#*:}:${pair%%:*}"); done
  (IFS=,; echo "${list[*]}")
}

# Within one GPU: what README and NOTES.md show.
bench() {
  local tiles=nhd:benchmarks/layouts/packed_k.yaml,benchmarks/layouts/packed_k.yaml:nhd
  tiles+=,nhd:benchmarks/layouts/transposed.yaml,benchmarks/layouts/transposed.yaml:nhd
  measure d2d --num-blocks 1,4,16,64,256 --no-peers
  measure replay --num-blocks 1,4 --no-peers --replay
  measure peers --num-blocks 64 --pair nhd:universal,nhd:hnd
  measure raw --num-blocks 1,16,64 --pattern fc_to_fc,lw_to_fc --backend direct,vectorized,batched,memcpy_async --no-peers
  measure tiles_bf16 --num-blocks 64 --pair "$tiles" --no-peers
  measure tiles_fp8 --num-blocks 128 --pair "$tiles" --shape llama-3.1-70b,dtype=float8_e4m3fn --no-peers
  measure tiles_f32 --num-blocks 64 --pair "$tiles" --shape llama-3.1-70b,dtype=float32 --no-peers
  local mla=vllm/fp8_ds_mla v4=vllm/deepseek_v4 idx=vllm/dsa_indexer nv=vllm/nvfp4 pth=vllm/per_token_head_fp8 mx=sglang/mxfp8
  measure records_mla --num-blocks 64,256 --shape deepseek-v3 --no-peers --pair \
    "$(both $mla:record/mla_fp8_planes $mla:record/mla_fp8_tensors vllm/nvfp4_ds_mla:record/nvfp4_mla_planes flashinfer/mla_split:record/mla_joined)"
  measure records_v4 --num-blocks 64,256 --shape deepseek-v3,hd=512 --no-peers --pair \
    "$(both $v4:record/deepseek_v4_planes $v4:record/deepseek_v4_tokens vllm/mla_v41:record/mla_v41_tokens)"
  measure records_indexer --num-blocks 256,1024 --shape deepseek-v3,hd=128 --no-peers --pair \
    "$(both $idx:record/dsa_indexer_tokens ${idx}_mxfp4:record/dsa_indexer_mxfp4_tokens)"
  measure records_heads --num-blocks 64,256 --no-peers --pair \
    "$(both $nv:record/nvfp4_universal $nv:vllm/nvfp4_sm120 $nv:record/nvfp4_tensors $pth:record/per_token_head_fp8_planes)"
  measure records_mxfp8 --num-blocks 16,64 --shape llama-3.1-70b,nt=128 --no-peers --pair \
    "$(both $mx:record/mxfp8_universal $mx:record/mxfp8_tensors)"
  measure rows_fp8_hd64 --num-blocks 64,256 --pair nhd:universal,universal:nhd,nhd:hnd,hnd:nhd \
    --shape llama-3.1-70b,hd=64,dtype=float8_e4m3fn --no-peers
}

# Across PCIe, and what a transfer costs others.
transfers() {
  # Now, alone: a table that a test made beside the others would be of a busy machine.
  "$PYTHON" -m kvbm tune
  local many=1,4,16,64
  measure d2h --direction d2h --num-blocks $many --no-peers \
    --pair nhd:universal,vllm/LBHNC:universal,nhd:vllm/flash_attn_nhd
  measure h2d --direction h2d --num-blocks $many --no-peers --pair universal:nhd,universal:vllm/paged_attn_v0
  measure cpu --direction h2h --num-blocks 64 --device cpu
  tell='figures|error' run duplex "$PYTHON" -m benchmarks duplex --out "$OUT/duplex.csv"
  tell='figures|error' run interference "$PYTHON" -m benchmarks interference --out "$OUT/interference.csv"
  tell='figures|error' run offload "$PYTHON" -m benchmarks offload --out "$OUT/offload.csv"
  tell='figures|error' run overhead "$PYTHON" -m benchmarks overhead --out "$OUT/overhead.csv"
  tell='figures|error' run scale "$PYTHON" -m benchmarks scale --out "$OUT/scale.csv"
}

# picture NAME CSV...: what can be drawn of these, in a folder of that name
picture() {
  local name=$1 files=() each
  shift
  for each in "$@"; do [ ! -f "$OUT/$each.csv" ] || files+=("$OUT/$each.csv"); done
  [ ${#files[@]} -gt 0 ] || return 0
  tell='png|error' run "plot_$name" "$PYTHON" -m benchmarks plot "${files[@]}" --out "${PLOTS:-$OUT/plots}/$name"
}

plots() {
  local name
  for name in d2d replay peers interference overhead scale; do picture $name $name; done
  picture pcie d2h h2d
}

stages=("$@")
[ $# -gt 0 ] || stages=(build test memcheck racecheck bench transfers plots)
for stage in "${stages[@]}"; do
  case $stage in
    build) build ;;
    test) tests ;;
    memcheck) memcheck ;;
    racecheck) racecheck ;;
    sanitize)
      memcheck
      racecheck
      ;;
    bench) bench ;;
    transfers) transfers ;;
    plots) plots ;;
    *)
      echo "gpu_check.sh: expected stages build, test, sanitize, memcheck, racecheck, bench, transfers, plots; got '$stage'" >&2
      exit 2
      ;;
  esac
  summary
done
exit "$status"
