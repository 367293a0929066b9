"""A stand-in for grpcurl, where it is not installed: the few of its flags that the example uses, over reflection."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import grpc
from google.protobuf import descriptor_pool, json_format, message_factory
from google.protobuf.message import Message
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (  # type: ignore[import-untyped]  # has no types
    ProtoReflectionDescriptorDatabase,
)

from kvtest.servers import Unchecked


def main() -> None:
    """List services, or call a method."""
    parser = argparse.ArgumentParser(prog="grpcurl", allow_abbrev=False)
    parser.add_argument("-plaintext", action="store_true", required=True)
    parser.add_argument("-H", dest="header", required=True)
    parser.add_argument("-d", dest="data", default="{}")
    parser.add_argument("target")
    parser.add_argument("symbol")
    args = parser.parse_args()
    with grpc.insecure_channel(args.target) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        if args.symbol == "list":
            print("\n".join(database.get_services()))
        else:
            _call(channel, database, args)


def _call(channel: grpc.Channel, database: ProtoReflectionDescriptorDatabase, args: argparse.Namespace) -> None:
    service, _, name = args.symbol.partition("/")
    method = descriptor_pool.DescriptorPool(database).FindServiceByName(service).methods_by_name[name]
    request_class = message_factory.GetMessageClass(method.input_type)
    request = json_format.Parse(args.data, request_class())
    codec: Unchecked = {
        "request_serializer": request_class.SerializeToString,
        "response_deserializer": message_factory.GetMessageClass(method.output_type).FromString,
    }
    key, _, value = args.header.partition(": ")
    how: Unchecked = {"metadata": [(key, value)], "timeout": 30}
    responses: Iterable[Message]
    if method.server_streaming:
        responses = channel.unary_stream(f"/{service}/{name}", **codec)(request, **how)
    else:
        responses = [channel.unary_unary(f"/{service}/{name}", **codec)(request, **how)]
    for response in responses:
        print(json_format.MessageToJson(response))


if __name__ == "__main__":
    main()
