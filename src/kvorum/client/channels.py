"""How both clients connect."""

from __future__ import annotations

# A router that comes back is found within a fraction of a second, where gRPC by itself waits up to two minutes.
CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.max_receive_message_length", -1),
)


def metadata_of(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """Return what is sent beside each request."""
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()
