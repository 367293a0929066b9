#!/bin/sh
# The gRPC API with grpcurl, which learns the messages from the server's reflection.
set -eu
target=${KVORUM_GRPC:-127.0.0.1:9000}
ask() { grpcurl -plaintext -H "authorization: Bearer ${KVORUM_API_KEY:-none}" "$@"; }

ask "$target" list
ask -d '{"service": "kvorum.inference.v1.InferenceService"}' "$target" grpc.health.v1.Health/Check
ask -d '{"text": "Once upon a time", "sampling": {"max_tokens": 8}}' "$target" \
    kvorum.inference.v1.InferenceService/Generate
