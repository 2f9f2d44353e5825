"""Where the server listens: TLS, Unix sockets, and a path behind a reverse proxy."""

import os
import re
import shutil
import socket
import ssl
import stat
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.server.browser import Browser, needs_chromium
from tests.server.conftest import Server
from tests.waiting import until
from tidemill.errors import ConfigError
from tidemill.server.http.listen import Listen

needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="certificates are made with openssl"
)


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """Self-signed, and its key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
    ]
    command += [
        "-subj",
        f"/CN={name}",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-keyout",
        str(key),
        "-out",
        str(cert),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


def answers(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


@needs_openssl
def test_tls_with_certificates_of_clients(tiny_folder, tmp_path):
    cert, key = certificate(tmp_path, "server")
    mine, my_key = certificate(tmp_path, "client")
    server = Server(
        tiny_folder, "--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", str(mine)
    )
    url = server.url.replace("http:", "https:")
    known = ssl.create_default_context(cafile=str(cert))
    known.load_cert_chain(mine, my_key)
    with httpx.Client(verify=known) as client:
        until(lambda: server.process.poll() is not None or answers(client, url))
        reply = client.post(
            f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 3, "stream": True}
        )
        assert reply.text.endswith("data: [DONE]\n\n")
    with pytest.raises(httpx.HTTPError):
        # no certificate is shown
        httpx.get(f"{url}/health", verify=ssl.create_default_context(cafile=str(cert)))
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{server.url}/health")
    assert server.stop() == 0
    assert f"on {url} " in server.process.stdout.read()


@needs_openssl
def test_tls_files_that_cannot_be_used_are_told(tmp_path):
    cert, key = certificate(tmp_path, "one")
    _, other = certificate(tmp_path, "other")
    locked = tmp_path / "locked.key"
    command = [
        "openssl",
        "ec",
        "-in",
        str(key),
        "-aes256",
        "-passout",
        "pass:secret",
        "-out",
        str(locked),
    ]
    subprocess.run(command, check=True, capture_output=True)
    assert Listen(tls_cert=cert, tls_key=key).tls()
    for wrong in (other, locked, cert):
        with pytest.raises(ConfigError, match="TLS files cannot be used"):
            Listen(tls_cert=cert, tls_key=wrong).tls()
    with pytest.raises(ConfigError, match=r"no file .*missing.* --tls-key"):
        Listen(tls_cert=cert, tls_key=tmp_path / "missing").tls()
    with pytest.raises(ConfigError, match="no certificate"):
        Listen(tls_key=key).tls()


def test_a_unix_socket_under_a_root_path(tiny_folder, tmp_path):
    path = tmp_path / "tidemill.sock"
    stale = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stale.bind(str(path))
    stale.close()
    server = Server(tiny_folder, "--unix-socket", str(path), "--root-path", "/llm/")
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
        until(lambda: server.process.poll() is not None or answers(client, "http://localhost/llm"))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        # by a proxy that takes the prefix off
        assert client.get("http://localhost/health").status_code == 200
        reply = client.post(
            "http://localhost/llm/v1/completions", json={"prompt": "x", "max_tokens": 3}
        )
        assert reply.json()["model"] == "tiny"
        assert client.get("http://localhost/llm/openapi.json").json()["servers"] == [
            {"url": "/llm"}
        ]
        moved = client.get("http://localhost/llm")
        assert (moved.status_code, moved.headers["location"]) == (308, "/llm/")
        linked = re.findall(
            r'(?:src|href)="([^#"][^"]*)"', client.get("http://localhost/llm/").text
        )
        assert linked
        for name in linked:
            assert client.get(httpx.URL("http://localhost/llm/").join(name)).status_code == 200
        assert client.get("http://localhost/llmx/health").status_code == 404
        with pytest.raises(ConfigError, match="Another program listens"):
            Listen(unix_socket=path).open()
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{server.url}/health")  # not on a port
    assert server.stop() == 0
    assert "in a browser" not in server.process.stdout.read()
    assert not path.exists()


def test_only_a_stale_socket_is_removed(tmp_path):
    file = tmp_path / "file"
    file.write_text("precious")
    with pytest.raises(ConfigError, match="not a socket"):
        Listen(unix_socket=file).open()
    assert file.read_text() == "precious"
    link = tmp_path / "link"
    link.symlink_to(file)
    with pytest.raises(ConfigError, match="not a socket"):
        Listen(unix_socket=link).open()
    listen = Listen(unix_socket=tmp_path / "socket", unix_socket_mode=0o660)
    first = listen.open()
    assert stat.S_IMODE(os.stat(tmp_path / "socket").st_mode) == 0o660
    os.unlink(tmp_path / "socket")
    second = listen.open()
    listen.close(first)  # leaves what is not its own
    assert (tmp_path / "socket").exists()
    listen.close(second)
    assert not (tmp_path / "socket").exists()


@pytest.mark.parametrize("path", ["llm", "/a//b", "/a b", "/../x?", "/ä"])
def test_a_root_path_is_a_path(path):
    with pytest.raises(ConfigError, match="root path"):
        Listen(root_path=path)


@needs_chromium
def test_the_page_works_under_a_root_path(tiny_folder, tmp_path):
    server = Server(tiny_folder, "--root-path", "/llm").wait()
    browser = Browser(tmp_path)
    try:
        browser.open(f"{server.url}/llm")
        browser.until("document.querySelector('#model').value === 'tiny'")
        browser.click("#tab-engine")
        browser.until(
            "document.querySelector('#live-says').textContent === '' && location.pathname === '/llm/'"
        )
        browser.click("#tab-chat")
        browser.until("location.pathname === '/llm/' && location.hash === ''")
        assert browser.complaints() == []
    finally:
        browser.close()
        assert server.stop() == 0
