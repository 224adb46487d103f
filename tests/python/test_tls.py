"""TLS and mutual TLS, from `dovetail serve` to the Python client."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import dovetail
from harness import Server, StartFailed, binary

Start = Callable[..., Server]


class Authority:
    """A certificate authority of the test's own."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self.pem = folder / f"{name}.pem"
        openssl(
            "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}",
            "-keyout", folder / f"{name}-key.pem", "-out", self.pem,
        )  # fmt: skip

    def issue(self, name: str) -> tuple[Path, Path]:
        """A certificate for this machine, and its key."""
        cert, key, request = (self._folder / f"{name}{end}" for end in (".pem", "-key.pem", ".csr"))
        extensions = self._folder / f"{name}.ext"
        extensions.write_text("basicConstraints=CA:FALSE\nsubjectAltName=DNS:localhost,IP:127.0.0.1\n")
        openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}", "-keyout", key, "-out", request)
        openssl(
            "x509", "-req", "-in", request, "-CA", self.pem, "-CAkey", self._folder / f"{self._name}-key.pem",
            "-CAcreateserial", "-days", "2", "-extfile", extensions, "-out", cert,
        )  # fmt: skip
        return cert, key


def openssl(*arguments: object) -> None:
    """Runs the openssl command, which every machine with git has."""
    done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, f"openssl {arguments[0]}: {done.stderr}"


def is_served(client: dovetail.Client) -> None:
    client.put("t", {"k": [1, 2, 3], "s": ["a", "b", "c"]}, streams=2)
    with client.join("t", "t", on="k") as result:
        assert sorted(result.table()["k"].to_pylist()) == [1, 2, 3]
    assert client.get("t").num_rows == 3
    client.drop("t")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"), "ca")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"), "stranger-ca")


def test_tls_serves_clients_that_trust_the_server(start: Start, authority: Authority, stranger: Authority) -> None:
    cert, key = authority.issue("server")
    server = start(devices="host:1", host_memory="256MiB", tls_cert=cert, tls_key=key)
    with server.connect(tls_root_certs=authority.pem) as client:
        is_served(client)
    # As text, not as the path of a file.
    with server.connect(tls_root_certs=authority.pem.read_bytes()) as client:
        is_served(client)
    with pytest.raises(
        ValueError, match=r"no certificate in tls_root_certs \(.*server-key\.pem\); it takes PEM, where a"
    ):
        server.connect(tls_root_certs=key)
    with pytest.raises(ValueError, match="no certificate in tls_root_certs; it takes PEM, where a"):
        server.connect(tls_root_certs=b"")
    with pytest.raises(dovetail.Unavailable, match="the authority of the server's certificate with tls_root_certs"):
        server.connect(tls_root_certs=stranger.pem)
    with pytest.raises(dovetail.Unavailable, match=r"speaks TLS; write grpc\+tls://"):
        dovetail.connect(f"grpc://{server.address}")
    with server.connect(tls_root_certs=authority.pem) as client:
        is_served(client)


def test_mutual_tls_serves_clients_that_the_server_trusts(
    start: Start, authority: Authority, stranger: Authority
) -> None:
    cert, key = authority.issue("server")
    server = start(devices="host:1", host_memory="256MiB", tls_cert=cert, tls_key=key, tls_client_ca=authority.pem)
    mine, theirs = authority.issue("client"), stranger.issue("stranger")
    with server.connect(tls_root_certs=authority.pem, cert=mine[0], key=mine[1]) as client:
        is_served(client)
    with pytest.raises(dovetail.Unavailable, match=r"only clients with certificates: .* connect\(cert=\.\.\., key="):
        server.connect(tls_root_certs=authority.pem)
    # Who does not know the server's authority is not told to show a certificate.
    with pytest.raises(dovetail.Unavailable) as refused:
        server.connect(tls_root_certs=stranger.pem)
    assert "only clients with certificates" not in str(refused.value)
    with pytest.raises(dovetail.Unavailable):
        server.connect(tls_root_certs=authority.pem, cert=theirs[0], key=theirs[1])
    with pytest.raises(ValueError, match=r"key \(.*stranger-key\.pem\) is not the key of cert \(.*client\.pem\)"):
        server.connect(tls_root_certs=authority.pem, cert=mine[0], key=theirs[1])
    with pytest.raises(ValueError, match="key is not the key of cert; give a certificate and its own key"):
        server.connect(tls_root_certs=authority.pem, cert=mine[0].read_bytes(), key=theirs[1].read_text())
    with pytest.raises(ValueError, match=r"no private key in key \(.*client\.pem\); it takes PEM, where a key begins"):
        server.connect(tls_root_certs=authority.pem, cert=mine[0], key=mine[0])
    with server.connect(tls_root_certs=authority.pem, cert=mine[0], key=mine[1]) as client:
        is_served(client)


def test_a_pair_in_memory_is_checked_by_the_handshake_on_systems_without_memory_files(
    authority: Authority, stranger: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs = authority.issue("client"), stranger.issue("stranger")
    monkeypatch.delattr("os.memfd_create", raising=False)
    nowhere = "grpc+tls://127.0.0.1:1"
    with pytest.raises(dovetail.Unavailable, match="cannot reach a server"):
        dovetail.connect(nowhere, cert=mine[0].read_bytes(), key=mine[1].read_text())
    with pytest.raises(dovetail.Unavailable, match="cannot be used for TLS; .*, and that key is the key of cert"):
        dovetail.connect(nowhere, cert=mine[0], key=theirs[1].read_bytes())
    with pytest.raises(ValueError, match="is not the key of cert"):
        dovetail.connect(nowhere, cert=mine[0], key=theirs[1])


def test_pem_that_grpc_cannot_use_is_reported_with_the_arguments_that_gave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = b"-----BEGIN CERTIFICATE-----\nxx\n-----END CERTIFICATE-----\n"
    unusable = "tls_root_certs, cert and key cannot be used for TLS; check"
    with pytest.raises(dovetail.Unavailable, match=unusable):
        dovetail.connect("grpc+tls://127.0.0.1:1", tls_root_certs=damaged)
    # A name that stands for no address is told in the same words.
    for said, address, given in [
        ("empty address list", "grpc://127.0.0.1:1", damaged),
        ("empty address list", "grpc+tls://127.0.0.1:1", None),
        ("an empty address list", "grpc+tls://127.0.0.1:1", damaged),
    ]:

        def action(*_: object, said: str = said, **__: object) -> None:
            raise dovetail.Unavailable(said)

        monkeypatch.setattr("dovetail._connection.Connections.action", action)
        with pytest.raises(dovetail.Unavailable, match=f"^{said}$"):
            dovetail.connect(address, tls_root_certs=given)


def command_line(*arguments: object) -> str:
    """What a command line that fails says."""
    done = subprocess.run([str(binary()), *map(str, arguments)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stdout
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_a_certificate_without_extensions_is_reported_as_an_old_version(start: Start, tmp_path: Path) -> None:
    key, request, cert = (tmp_path / name for name in ("key.pem", "request.csr", "cert.pem"))
    openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-keyout", key, "-out", request)
    openssl("x509", "-req", "-in", request, "-signkey", key, "-days", "2", "-out", cert)
    shown = subprocess.run(["openssl", "x509", "-in", cert, "-noout", "-text"], capture_output=True, text=True).stdout
    if "Version: 1 " not in shown:
        pytest.skip("this openssl makes certificates of version 3 only")
    with pytest.raises(StartFailed, match="the certificate of --tls-cert is of version 1 of X.509"):
        start(devices="host:1", host_memory="256MiB", tls_cert=cert, tls_key=key)

    # Other servers show such a certificate all the same.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        # A command line that never connects, or says nothing then, fails the test and does not hold it up.
        listener.settimeout(30)

        def answer() -> None:
            with suppress(OSError), listener.accept()[0] as connection:
                connection.settimeout(30)
                context.wrap_socket(connection, server_side=True).close()

        server = threading.Thread(target=answer)
        server.start()
        try:
            address = f"https://localhost:{listener.getsockname()[1]}"
            said = command_line("tables", "--server", address, "--ca", cert)
        finally:
            server.join()
    assert "its certificate is of version 1 of X.509" in said and "UnsupportedCertVersion" not in said, said


def test_the_command_line_reports_which_certificate_is_wrong(
    start: Start, authority: Authority, stranger: Authority
) -> None:
    cert, key = authority.issue("server")
    server = start(devices="host:1", host_memory="256MiB", tls_cert=cert, tls_key=key, tls_client_ca=authority.pem)
    theirs = stranger.issue("other-stranger")
    ask = ("tables", "--server", f"https://{server.address}", "--ca", authority.pem)
    # What the server says is lost where it closes the connection first.
    said = command_line(*ask)
    assert "admits only clients with certificates" in said and "--cert and --key" in said, said
    said = command_line(*ask, "--cert", theirs[0], "--key", theirs[1])
    assert "not accept this client's certificate" in said and "--cert" in said, said
    assert "alert" not in said
