"""Files: uploaded, listed, read and deleted by their tenant, and by nobody else."""

import contextlib
import socket
import stat

import httpx
import openai
import pytest

from tests.server.conftest import KEYS
from tests.waiting import until


@pytest.fixture
def clients(tenants):
    made = [openai.OpenAI(base_url=f"{tenants.url}/v1", api_key=key, max_retries=0) for key in KEYS]
    clear(made)  # other tests use the server, too
    yield made
    clear(made)


def clear(clients):
    for client in clients:
        for file in client.files.list():
            client.files.delete(file.id)


def upload(client, content=b'{"a": 1}\n', name="requests.jsonl", **more):
    return client.files.create(file=(name, content), purpose="batch", **more)


def test_a_file_comes_and_goes(clients, data_folder):
    client = clients[0]
    content = bytes(range(256)) * 700
    made = upload(client, content)
    assert (made.object, made.bytes, made.filename, made.purpose) == (
        "file",
        len(content),
        "requests.jsonl",
        "batch",
    )
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).read() == content
    assert [one.id for one in client.files.list(purpose="batch")] == [made.id]
    assert not list(client.files.list(purpose="assistants"))
    (path,) = (data_folder / "files").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(data_folder.stat().st_mode) == 0o700
    assert client.files.delete(made.id).deleted
    assert not list((data_folder / "files").iterdir())
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made.id)


def test_pages(clients):
    client = clients[0]
    ids = [upload(client).id for _ in range(5)]
    assert [one.id for one in client.files.list(limit=2)] == ids[::-1]  # the client turns the pages
    assert [one.id for one in client.files.list(limit=2, order="asc")] == ids
    first = client.files.list(limit=2, order="asc")
    assert first.has_more
    assert [one.id for one in client.files.list(after=ids[3], order="asc").data] == ids[4:]
    for wrong in (
        {"limit": 0},
        {"limit": 10_001},
        {"order": "up"},
        {"after": "file-x"},
        {"extra_query": {"what": "1"}},
    ):
        with pytest.raises(openai.BadRequestError):
            client.files.list(**wrong)


def test_another_key_sees_nothing(clients):
    mine, other = clients
    made = upload(mine)
    assert not list(other.files.list())
    for ask in (other.files.retrieve, other.files.content, other.files.delete):
        with pytest.raises(openai.NotFoundError):
            ask(made.id)
    with pytest.raises(openai.BadRequestError):
        other.files.list(after=made.id)
    with pytest.raises(openai.NotFoundError):
        other.batches.create(
            input_file_id=made.id, endpoint="/v1/completions", completion_window="24h"
        )
    assert mine.files.retrieve(made.id) == made


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("../../etc/passwd", "passwd"),
        ("..\\..\\boot.ini", "boot.ini"),
        ("a\x1b[31mb.jsonl", "a[31mb.jsonl"),
        ("x" * 600, "x" * 255),
    ],
)
def test_names_are_only_shown(clients, data_folder, given, shown):
    made = upload(clients[0], name=given)
    assert made.filename in (shown, shown.replace("a[31mb", "a%1B[31mb"))
    assert [path.name for path in (data_folder / "files").iterdir()] == [made.id]


@pytest.mark.parametrize(
    "name",
    [
        "../lock",
        "..%2flock",
        "%2e%2e%2fstate.sqlite3",
        "file-x",
        "%00",
        "'; DROP TABLE files; --",
        "x" * 3000,
    ],
)
def test_ids_lead_nowhere_else(tenants, name):
    for path in (f"/v1/files/{name}", f"/v1/files/{name}/content", f"/v1/batches/{name}"):
        reply = httpx.get(tenants.url + path, headers={"Authorization": f"Bearer {KEYS[0]}"})
        assert reply.status_code in (400, 404), path  # a target that is not plain, or no such id
        assert "error" in reply.json()


def test_what_is_not_a_proper_form(tenants):
    def post(**how):
        headers = {"Authorization": f"Bearer {KEYS[0]}"} | how.pop("headers", {})
        reply = httpx.post(f"{tenants.url}/v1/files", headers=headers, **how)
        return reply.status_code, reply.json()["error"]["message"]

    file = {"file": ("a", b"x")}
    assert post(json={})[0] == 415
    assert post(content=b"x", headers={"Content-Type": "multipart/form-data"})[0] == 415
    boundary = {"Content-Type": "multipart/form-data; boundary=b"}
    assert post(content=b"nonsense", headers=boundary)[0] == 400
    assert (
        "incomplete"
        in post(
            content=b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nabc',
            headers=boundary,
        )[1]
    )
    assert post(content=b"--b\r\n" + b"X" * 5000 + b": y\r\n\r\n", headers=boundary)[0] == 400
    assert "purpose" in post(files=file)[1]
    assert "'fine-tune'" in post(files=file, data={"purpose": "fine-tune"})[1]
    assert "no file" in post(files={"file": ("a", b"")}, data={"purpose": "batch"})[1]
    assert "'other'" in post(files=file, data={"purpose": "batch", "other": "1"})[1]
    assert (
        "twice"
        in post(files=[("file", ("a", b"x")), ("file", ("b", b"y"))], data={"purpose": "batch"})[1]
    )
    assert "longer than" in post(files=file, data={"purpose": "b" * 2000})[1]
    assert (
        "from 3600"
        in post(
            files=file,
            data={
                "purpose": "batch",
                "expires_after[anchor]": "created_at",
                "expires_after[seconds]": "5",
            },
        )[1]
    )
    assert post(files=file, data={"purpose": "batch", "expires_after[seconds]": "5000"})[0] == 400


def test_expiry_is_told(clients):
    made = upload(clients[0], expires_after={"anchor": "created_at", "seconds": 3600})
    assert made.expires_at == made.created_at + 3600


def test_the_quota_and_the_size_of_a_file(clients, tenants, data_folder):
    client = clients[0]
    upload(client, b"x" * 600_000)
    with pytest.raises(openai.APIStatusError) as refused:
        upload(client, b"y" * 600_000)
    assert (refused.value.status_code, refused.value.code) == (413, "storage_quota_exceeded")

    def endless():
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        while True:
            yield b"x" * 65536

    headers = {
        "Authorization": f"Bearer {KEYS[0]}",
        "Content-Type": "multipart/form-data; boundary=b",
    }
    with contextlib.suppress(httpx.HTTPError):  # it may be closed while we write
        assert (
            httpx.post(f"{tenants.url}/v1/files", content=endless(), headers=headers).status_code
            == 413
        )
    assert len(list((data_folder / "files").iterdir())) == 1
    # a gigabyte is refused before a byte of it comes
    with socket.create_connection(("127.0.0.1", tenants.port)) as raw:
        raw.sendall(
            b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b\r\n"
            b"Content-Length: 1073741824\r\n\r\n"
        )
        assert b" 413 " in raw.recv(100)


def test_who_leaves_in_the_middle_leaves_nothing(tenants, data_folder):
    with socket.create_connection(("127.0.0.1", tenants.port)) as raw:
        raw.sendall(
            b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b\r\n"
            + f"Authorization: Bearer {KEYS[0]}\r\nContent-Length: 900000\r\n\r\n".encode()
            + b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
            + b"x" * 300_000
        )
    until(lambda: not list((data_folder / "files").iterdir()))
