#!/bin/sh
# NVIDIA's AIPerf against a running server: 16 chats, 4 at a time, with random prompts of the model's own tokens.
# MODEL_PATH: a folder with the model's tokenizer.
set -eu
unset HF_HUB_OFFLINE  # AIPerf's own check of the tokenizer fails with it
aiperf profile --url "${KVORUM_URL:-http://127.0.0.1:8000}" --api-key "${KVORUM_API_KEY:-none}" \
    --model "${KVORUM_MODEL:-smollm2-135m}" --tokenizer "$MODEL_PATH" --endpoint-type chat --streaming \
    --request-count 16 --concurrency 4 --synthetic-input-tokens-mean 64 --output-tokens-mean 16 \
    --ui none --artifact-dir "${OUT:-build/aiperf}"
