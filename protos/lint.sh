#!/bin/sh
# Lint the .proto files by Buf's STANDARD rules. Buf wants a package's folders below its root, which here are a tree of
# links: the package kvorum.engine.v1 is in protos/engine/v1.
set -eu
cd "$(dirname "$0")/.."
tree=build/buf
rm -rf "$tree"
mkdir -p "$tree/kvorum"
for version in protos/*/v1; do
    ln -s "../../../$(dirname "$version")" "$tree/kvorum/"
done
cp protos/buf.yaml "$tree/"
buf lint "$tree"
buf format --diff --exit-code "$tree"
