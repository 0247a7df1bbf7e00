"""Certificates and keys that cannot be used are refused by the name of their setting."""

from __future__ import annotations

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from common.errors import ConfigError
from common.tls import TlsConfig, client_context, server_context


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    authority, other = trustme.CA(), trustme.CA()
    leaf, stranger = authority.issue_cert("127.0.0.1"), other.issue_cert("127.0.0.1")
    key = serialization.load_pem_private_key(leaf.private_key_pem.bytes(), None)
    encrypted = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"word"),
    )
    contents = {
        "cert": leaf.cert_chain_pems[0].bytes(),
        "key": leaf.private_key_pem.bytes(),
        "both": leaf.private_key_and_cert_chain_pem.bytes(),
        "strangers-key": stranger.private_key_pem.bytes(),
        "encrypted": encrypted,
        "ca": authority.cert_pem.bytes(),
        "text": b"no certificate\n",
        "empty": b"",
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return {name: str(folder / name) for name in (*contents, "missing", ".")}


@pytest.mark.parametrize(
    ("certfile", "keyfile", "ca_certs", "words"),
    [
        ("missing", "key", None, ("--ssl-certfile", "No such file")),
        ("cert", "missing", None, ("--ssl-keyfile", "No such file")),
        (".", "key", None, ("--ssl-certfile", "directory")),
        ("text", "key", None, ("--ssl-certfile", "no certificate with its private key")),
        ("cert", "text", None, ("--ssl-keyfile", "no certificate with its private key")),
        ("empty", None, None, ("--ssl-certfile", "no certificate with its private key")),
        ("cert", None, None, ("--ssl-certfile", "no certificate with its private key")),
        ("cert", "strangers-key", None, ("--ssl-keyfile", "no certificate with its private key")),
        ("cert", "encrypted", None, ("--ssl-keyfile", "unencrypted")),
        ("cert", "key", "missing", ("--ssl-ca-certs", "No such file")),
        ("cert", "key", "text", ("--ssl-ca-certs", "no certificates")),
        ("cert", "key", "empty", ("--ssl-ca-certs", "no certificates")),
        (None, "key", None, ("--ssl-keyfile", "only with --ssl-certfile")),
        (None, None, "ca", ("--ssl-ca-certs", "only with --ssl-certfile")),
    ],
)
def test_what_a_server_cannot_use(
    files: dict[str, str], certfile: str | None, keyfile: str | None, ca_certs: str | None, words: tuple[str, ...]
) -> None:
    paths = (name and files[name] for name in (certfile, keyfile, ca_certs))
    config = TlsConfig(**dict(zip(("certfile", "keyfile", "ca_certs"), paths, strict=True)))
    with pytest.raises(ConfigError) as error:
        server_context(config)
    assert all(word in error.value.message for word in words)


def test_what_a_server_can_use(files: dict[str, str]) -> None:
    assert server_context(TlsConfig()) is None
    assert server_context(TlsConfig(certfile=files["cert"], keyfile=files["key"])) is not None
    assert server_context(TlsConfig(certfile=files["both"], ca_certs=files["ca"])) is not None


def test_what_a_client_cannot_use(files: dict[str, str]) -> None:
    for name, words in (("missing", "No such file"), ("text", "no certificates"), ("key", "no certificates")):
        with pytest.raises(ConfigError, match="--worker-ca-file") as error:
            client_context(files[name], "--worker-ca-file")
        assert words in error.value.message and error.value.param == "worker_ca_file"
    shown = TlsConfig(certfile=files["cert"], keyfile=files["key"])
    assert client_context(files["ca"], "--worker-ca-file", shown).get_ca_certs()
