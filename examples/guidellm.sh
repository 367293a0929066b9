#!/bin/sh
# GuideLLM against a running server: 16 completions, 4 at a time, of random prompts; it stops at the first error.
# MODEL_PATH: a folder with the model's tokenizer.
set -eu
out=${OUT:-build/guidellm}
mkdir -p "$out"
guidellm run \
    --backend "kind=openai_http,target=${KVORUM_URL:-http://127.0.0.1:8000},model=${KVORUM_MODEL:-smollm2-135m},api_key=${KVORUM_API_KEY:-none}" \
    --tokenizer "kind=huggingface_auto,model=$MODEL_PATH" \
    --data kind=synthetic_text,prompt_tokens=64,output_tokens=16 \
    --profile kind=concurrent,streams=4 \
    --constraint kind=max_requests,count=16 --constraint kind=max_errors,count=1 \
    --output "kind=json,path=$out/report.json" --disable-progress
