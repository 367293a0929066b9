"""`kvorum certs`: a development authority and a certificate for the control plane's mutual TLS.

For real clusters let cert-manager or your own authority issue them; what kvorum reads is the same three files.
"""

from __future__ import annotations

import argparse
import datetime
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvorum.cluster.manager.tls import CA_FILE, CERT_FILE, KEY_FILE, SERVER_NAME, TlsError

CA_KEY_FILE = "ca.key"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the folder and how long the certificates hold."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="where to write; created if need be")
    parser.add_argument("--days", type=int, default=365, metavar="N", help="how long they hold [%(default)s]")


def run(args: argparse.Namespace) -> int:
    """Write the files and say how to use them."""
    write_development_certificates(args.folder, days=args.days, now=datetime.datetime.now(datetime.UTC))
    print(f"wrote {CA_FILE}, {CA_KEY_FILE}, {CERT_FILE} and {KEY_FILE}; use them with --control-tls {args.folder}")
    return 0


def write_development_certificates(folder: Path, *, days: int, now: datetime.datetime) -> None:
    """Make an authority and one certificate for both ends of the control plane; raises TlsError."""
    if any((folder / name).exists() for name in (CA_FILE, CA_KEY_FILE, CERT_FILE, KEY_FILE)):
        raise TlsError(f"{folder} has certificates already; they are never overwritten")
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ends = now + datetime.timedelta(days=days)
    authority = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvorum development CA")])
    ca = (
        _builder(authority, authority, ca_key.public_key(), now, ends)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, SERVER_NAME)])
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        _builder(subject, authority, key.public_key(), now, ends)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, cert in ((CA_FILE, ca), (CERT_FILE, certificate)):
            (folder / name).write_bytes(cert.public_bytes(serialization.Encoding.PEM))
        for name, private in ((CA_KEY_FILE, ca_key), (KEY_FILE, key)):
            _write_private(folder / name, private)
    except OSError as error:
        raise TlsError(f"cannot write certificates: {error}") from error


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    starts: datetime.datetime,
    ends: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(starts)
        .not_valid_after(ends)
    )


def _write_private(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(text)
