#!/bin/sh
# vLLM with 64 GiB of host memory for blocks that leave the GPU, and with 2 TiB of files behind it (docs/engines/vllm.md):
# offload.sh MODEL, offload.sh MODEL files. /mnt/kv is the folder of the files: put yours in its place.
set -eu
MODEL=${1:?a model, as for vllm serve}
case ${2:-memory} in
memory)
  exec vllm serve "$MODEL" --kv-transfer-config '{"kv_connector": "KvbmOffloadingConnector", "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 68719476736}}'
  ;;
files)
  exec vllm serve "$MODEL" --kv-transfer-config '{"kv_connector": "KvbmOffloadingConnector", "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 68719476736, "folder": "/mnt/kv", "folder_bytes": 2199023255552}}'
  ;;
*)
  echo "offload.sh: expected memory or files, got $2" >&2
  exit 2
  ;;
esac
