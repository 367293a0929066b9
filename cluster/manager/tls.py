"""Mutual TLS for the control plane: one folder with an authority's certificate and the holder's own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

from kvorum.kvstore.errors import KvorumError

# The names that Kubernetes gives the files of a TLS Secret.
CA_FILE, CERT_FILE, KEY_FILE = "ca.crt", "tls.crt", "tls.key"
# What certificates are made for, since addresses in a cluster come and go.
SERVER_NAME = "kvorum-control-plane"


class TlsError(KvorumError):
    """A certificate or key is missing or cannot be read."""


@dataclass(frozen=True, slots=True)
class ControlTls:
    """PEM texts: the authority that both ends trust, and this end's certificate chain and key."""

    ca: bytes
    certificate: bytes
    key: bytes


def read_tls(folder: Path) -> ControlTls:
    """Read ca.crt, tls.crt and tls.key; raises TlsError."""
    try:
        ca, certificate, key = ((folder / name).read_bytes() for name in (CA_FILE, CERT_FILE, KEY_FILE))
    except OSError as error:
        raise TlsError(f"control_tls: {error}") from error
    return ControlTls(ca, certificate, key)


def server_credentials(tls: ControlTls) -> grpc.ServerCredentials:
    """Return credentials of a server that takes only clients whose certificate the authority signed."""
    return grpc.ssl_server_credentials([(tls.key, tls.certificate)], root_certificates=tls.ca, require_client_auth=True)


def channel_credentials(tls: ControlTls) -> grpc.ChannelCredentials:
    """Return credentials of a client that shows its certificate."""
    return grpc.ssl_channel_credentials(
        root_certificates=tls.ca, private_key=tls.key, certificate_chain=tls.certificate
    )
