#!/bin/sh
# The HTTP API with curl: models, a whole answer with its receipt, a stream, and an error.
set -eu
url=${KVORUM_URL:-http://127.0.0.1:8000}
ask() {
    path=$1
    shift
    curl --silent --show-error --no-buffer -H "Authorization: Bearer ${KVORUM_API_KEY:-none}" \
        -H 'Content-Type: application/json' "$@" "$url$path"
    echo
}

ask /v1/models
ask /v1/completions -d '{"prompt": "Once upon a time", "max_tokens": 8, "kvorum": {"policy": "h2o", "kv_budget": 64}}'
ask /v1/chat/completions -d '{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "stream": true}'
ask /v1/completions -d '{"prompt": "Once", "temperature": 9}'
