#!/bin/sh
# Write *_pb2.py, *_pb2.pyi and *_pb2_grpc.py beside the .proto files. Usage: protos/generate.sh [python]
set -eu
cd "$(dirname "$0")/.."
python=${1:-python3}
"$python" -P -m grpc_tools.protoc -Isrc --python_out=src --pyi_out=src --grpc_python_out=src src/kvorum/protos/*/v1/*.proto
