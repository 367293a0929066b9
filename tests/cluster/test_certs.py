"""Development certificates: what `kvorum certs` writes is what the control plane takes."""

from __future__ import annotations

import argparse
import stat
from pathlib import Path

import pytest
from cryptography import x509

from kvorum.cluster.certs_command import run
from kvorum.cluster.config import ClusterConfig
from kvorum.cluster.launcher import running_cluster
from kvorum.cluster.manager.tls import SERVER_NAME, TlsError, read_tls


def write(folder: Path) -> None:
    assert run(argparse.Namespace(folder=folder, days=2)) == 0


def test_the_certificate_is_signed_by_the_authority_and_the_keys_are_private(tmp_path: Path) -> None:
    write(tmp_path / "new" / "certs")
    tls = read_tls(tmp_path / "new" / "certs")
    ca, certificate = x509.load_pem_x509_certificate(tls.ca), x509.load_pem_x509_certificate(tls.certificate)
    certificate.verify_directly_issued_by(ca)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [SERVER_NAME]
    for name in ("ca.key", "tls.key"):
        assert stat.S_IMODE((tmp_path / "new" / "certs" / name).stat().st_mode) == 0o600


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    write(tmp_path)
    before = (tmp_path / "tls.key").read_bytes()
    with pytest.raises(TlsError, match="never overwritten"):
        write(tmp_path)
    assert (tmp_path / "tls.key").read_bytes() == before


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TlsError, match=r"ca\.crt"):
        read_tls(tmp_path)


def test_a_cluster_whose_certificates_are_missing_is_not_started(tmp_path: Path) -> None:
    config = ClusterConfig(executor="fake", control_tls=tmp_path)
    starting = running_cluster(config, address=None, on_phase=lambda _: None, on_progress=lambda _, __: None)
    with pytest.raises(TlsError, match="control_tls"):
        starting.__enter__()
