#!/bin/sh
# vLLM with 64 GiB of host memory for blocks that leave the GPU: offload.sh MODEL (docs/vllm.md)
set -eu
MODEL=${1:?a model, as for vllm serve}
exec vllm serve "$MODEL" --kv-transfer-config '{"kv_connector": "KvbmOffloadingConnector", "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 68719476736}}'
