#!/usr/bin/env bash
# Tests the host's compiled code under sanitizers: kernels, _core, and the fake driver under them; needs gcc, no GPU.
#
#   tools/sanitize.sh [address,undefined] [thread]      both if none is named
#
# PYTHON      the interpreter; its environment has what builds and tests need (.venv/bin/python)
# PYTEST_ARGS options of pytest (-n auto --dist worksteal)
#
# The extension is built in build/<the first sanitizer>/lib, which is found before what is installed. Under AddressSanitizer run the
# sample, and all cases of those with the marker `sanitize`; under ThreadSanitizer those with `thread` in their name or
# the marker `threads`. A new file of tests belongs to them, unless it is named in `others` below. Each has three times its limit.
# Each report is a file build/<the first sanitizer>/report.*: one is a failure, even if no test failed. Leaks are not looked for:
# what CPython and NumPy keep until they end cannot be told from them.
# UndefinedBehaviorSanitizer writes to the standard error alone, which pytest must therefore not capture.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}

# Tests that run no compiled code of kvbm, or mostly that of others: PyTorch, JAX, NVRTC (which does not find its own
# libraries where a sanitizer stands before dlopen).
set -f # the shell must not take them for files here
others=(*_gpu address_map advice autotune bench* bridge* build cache calling catalogue cli codegen command_messages
  connect_docs conventions cost_model declare derived docs* engines errors examples* facts figure figures files_docs gpu_extra identity
  import install keys layout locks log loops messages modules naming notebook nvcc nvrtc operate_docs oracle overlap packaging
  pages placement plan presets private processes readme release report reshard reshard_docs reshard_figure schema secret
  serve_check sglang_identity shapes site spec store taken testing* torch* vllm_identity vllm_setting_names)
skip=()
set +f
for name in "${others[@]}"; do skip+=("--ignore-glob=*/test_$name.py"); done

skip+=(--deselect=tests/memory/test_allocation.py::test_more_than_there_is) # limits the address space, which sanitizers need
skip+=(--deselect=tests/wire/test_wire.py::test_objects_as_peers)     # the AWS SDK gives memory of operator new to free

# Of this compiler; its own name comes back for a library that it does not have.
library() {
  local path
  path=$(gcc -print-file-name="$1")
  [[ $path == /* ]] || { echo "tools/sanitize.sh: $1: expected it with gcc, found none: install gcc's sanitizer libraries" >&2; return 1; }
  echo "$path"
}

# What stands before the program, for sanitizers that are joined by commas.
preloaded() {
  local preload found
  preload=$(library libstdc++.so.6) # beside them: what throws finds it before the sanitizer looks for it
  for found in ${1//,/ }; do
    case $found in
      address) preload="$(library libasan.so) $preload" ;;
      undefined) preload="$preload $(library libubsan.so)" ;;
      thread) preload="$(library libtsan.so) $preload" ;;
      *) echo "tools/sanitize.sh: expected address, undefined or thread, got $found" >&2; return 1 ;;
    esac
  done
  echo "$preload"
}

folder_of() { echo "$PWD/build/${1%%,*}"; }

build() {
  local folder
  folder=$(folder_of "$1")
  mkdir -p "$folder"
  KVBM_SANITIZE=$1 CC=gcc CXX=g++ "$PYTHON" setup.py --quiet build --build-base "$folder" --build-lib "$folder/lib" \
    > "$folder/build.log" 2>&1 || { cat "$folder/build.log"; return 1; }
}

check() {
  local sanitizers=$1 folder preload found
  shift
  printf '\n==> %s\n' "$sanitizers"
  folder=$(folder_of "$sanitizers")
  preload=$(preloaded "$sanitizers")
  export KVBM_SANITIZE=$sanitizers
  rm -f "$folder"/report.*
  local common=log_path=$folder/report:print_stacktrace=1 status=0
  env PYTHONPATH="$folder/lib" LD_PRELOAD="$preload" OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 \
    ASAN_OPTIONS="$common:detect_leaks=0:allocator_may_return_null=1:quarantine_size_mb=32" UBSAN_OPTIONS="$common" \
    TSAN_OPTIONS="$common:suppressions=$PWD/tests/data/tsan.supp:die_after_fork=0:halt_on_error=1" \
    "$PYTHON" -m pytest --capture=sys --timeout=900 "${skip[@]}" "$@" || status=$?
  for found in "$folder"/report.*; do
    [[ -e $found ]] || break
    cat "$found"
    status=1
  done
  [[ $status == 0 ]] || { echo "tools/sanitize.sh: $sanitizers: failed"; return 1; }
}

read -ra args <<< "${PYTEST_ARGS:--n auto --dist worksteal}"
[[ $# -gt 0 ]] || set -- address,undefined thread
for sanitizers in "$@"; do preloaded "$sanitizers" > /dev/null; done # a name that is none is an error before anything is compiled
building=()
for sanitizers in "$@"; do # both at a time: one file takes most of it
  build "$sanitizers" &
  building+=($!)
done
for each in "${building[@]}"; do wait "$each"; done
for sanitizers in "$@"; do
  if [[ $sanitizers == thread ]]; then
    check "$sanitizers" -k thread -m "not gpu" "${args[@]}"
  else
    check "$sanitizers" -m "(sample or sanitize) and not gpu" "${args[@]}"
  fi
done
