#!/bin/sh
# Prefill in one vLLM, decode in another, and a router before both (docs/engines/vllm-disaggregated.md): on the first machine
# disaggregated.sh prefill MODEL, on the second disaggregated.sh decode MODEL, anywhere disaggregated.sh router.
# 10.0.0.1 and 10.0.0.2 are the addresses of the two machines: put yours in their places.
set -eu
ROLE=${1:?prefill, decode or router}
case $ROLE in
prefill)
  MODEL=${2:?a model, as for vllm serve}
  exec vllm serve "$MODEL" --port 8100 --tensor-parallel-size 1 --block-size 32 \
    --kv-transfer-config '{"kv_connector": "KvbmConnector", "kv_role": "kv_both", "kv_port": 14600, "kv_load_failure_policy": "recompute",
                           "kv_connector_extra_config": {"host": "10.0.0.1"}}'
  ;;
decode)
  MODEL=${2:?a model, as for vllm serve}
  exec vllm serve "$MODEL" --port 8200 --tensor-parallel-size 2 --block-size 64 \
    --kv-transfer-config '{"kv_connector": "KvbmConnector", "kv_role": "kv_both", "kv_port": 14700, "kv_load_failure_policy": "recompute",
                           "kv_connector_extra_config": {"host": "10.0.0.2"}}'
  ;;
router)
  exec python "$(dirname "$0")/router.py" --port 8000 --prefill http://10.0.0.1:8100 --decode http://10.0.0.2:8200
  ;;
*)
  echo "disaggregated.sh: expected prefill, decode or router, got $ROLE" >&2
  exit 2
  ;;
esac
