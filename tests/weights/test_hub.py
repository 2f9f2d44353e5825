"""Models of the hub and split GGUFs: really downloaded, from a small server that speaks the hub's
API."""

import hashlib
import json
import os
import socket
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

import gguf
import numpy as np
import pytest
import torch

from tests.helpers import byte_tokenizer, load_model, make_llama
from tests.models.test_llama import prompt_logits
from tests.weights.test_gguf import write_gguf
from tidemill.errors import CheckpointError, ModelNotFound
from tidemill.weights.checkpoint import open_checkpoint
from tidemill.weights.choose import choose
from tidemill.weights.locate import locate

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def split(path, num_parts: int) -> list:
    """The GGUF as llama.cpp's gguf-split writes it: all keys in the first part, tensors shared out."""
    reader = gguf.GGUFReader(path)
    per_part = -(-len(reader.tensors) // num_parts)
    made = []
    for number in range(num_parts):
        target = path.with_name(f"{path.stem}-{number + 1:05}-of-{num_parts:05}.gguf")
        writer = gguf.GGUFWriter(target, "llama")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", num_parts)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        if number == 0:
            for name, field in reader.fields.items():
                if not name.startswith("GGUF.") and name != "general.architecture":
                    writer.add_key_value(
                        name,
                        field.contents(),
                        field.types[0],
                        field.types[-1] if len(field.types) > 1 else None,
                    )
        for tensor in reader.tensors[number * per_part : (number + 1) * per_part]:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        made.append(target)
    return made


@pytest.fixture(scope="module")
def reference():
    return make_llama(hidden_size=64, intermediate_size=128, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def files(reference, tmp_path_factory) -> dict[str, bytes]:
    """Of two repositories: one of GGUFs in several quantizations, one of them split, and one of
    safetensors."""
    folder = tmp_path_factory.mktemp("repo")
    kinds = {"Q8_0": "Q8_0", "Q4_K_M": "Q4_0", "F16": "F16"}
    repo = {}
    for name, kind in kinds.items():
        path = write_gguf(
            folder / f"tiny-{name}.gguf", reference, quantize=gguf.GGMLQuantizationType[kind]
        )
        for each in split(path, 3) if name == "F16" else [path]:
            repo[f"org/tiny-GGUF/{'F16/' if name == 'F16' else ''}{each.name}"] = each.read_bytes()
    repo["org/tiny-GGUF/mmproj-F16.gguf"] = b"not a language model"
    repo["org/tiny-GGUF/README.md"] = b"# tiny"
    plain = tmp_path_factory.mktemp("plain")
    make_llama(plain)
    byte_tokenizer(plain)
    return repo | {f"org/tiny/{path.name}": path.read_bytes() for path in plain.iterdir()}


@pytest.fixture(scope="module")
def hub(files):
    """The parts of the hub's API that downloads use. `asked` holds the files that were sent."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def reply(self, status: int, body: bytes, **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path).strip("/")
            if path.startswith("api/models/"):
                _, _, org, name, *rest = path.split("/")
                names = [
                    file.split("/", 2)[2] for file in files if file.startswith(f"{org}/{name}/")
                ]
                if not names:
                    return self.reply(404, b"{}", X_Error_Code="RepoNotFound")
                sizes = {each: len(files[f"{org}/{name}/{each}"]) for each in names}
                tree = [
                    {"type": "file", "path": each, "size": size, "oid": "0" * 40}
                    for each, size in sizes.items()
                ]
                info = {
                    "id": f"{org}/{name}",
                    "sha": COMMIT,
                    "siblings": [{"rfilename": each} for each in names],
                }
                return self.reply(
                    200,
                    json.dumps(tree if rest[:1] == ["tree"] else info).encode(),
                    Content_Type="application/json",
                )
            org, name, _, _, file = path.split("/", 4)
            body = files.get(f"{org}/{name}/{file}")
            if body is None:
                return self.reply(404, b"", X_Error_Code="EntryNotFound")
            if self.command == "GET":
                asked.append(file)
            tag = hashlib.sha256(body).hexdigest()
            return self.reply(
                200,
                body,
                ETag=f'"{tag}"',
                X_Repo_Commit=COMMIT,
                Content_Type="application/octet-stream",
            )

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


LOCATES = """if True:
    import sys
    from tidemill.errors import TidemillError
    from tidemill.weights.locate import locate
    for model in sys.argv[1:]:
        try:
            print("=", locate(model))
        except TidemillError as error:
            print("= error:", error)
"""


def located(models: list[str], home, endpoint: str, **environ: str) -> list[str]:
    """Where each is, in a process of their own: the library reads its settings when it is imported."""
    settings = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
    } | environ
    command, environment = [sys.executable, "-c", LOCATES, *models], {**os.environ, **settings}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return [line[2:] for line in done.stdout.splitlines() if line.startswith("= ")]


def test_a_gguf_repository_gives_four_bits_unless_another_is_asked_for(hub, files, tmp_path):
    endpoint, asked = hub
    asked.clear()
    path, other, refused = located(
        ["org/tiny-GGUF", "hf.co/org/tiny-GGUF:q8_0", "org/tiny-GGUF:Q2_K"], tmp_path, endpoint
    )
    assert path.endswith("tiny-Q4_K_M.gguf")
    assert Path(path).read_bytes() == files["org/tiny-GGUF/tiny-Q4_K_M.gguf"]
    assert other.endswith("tiny-Q8_0.gguf")
    assert asked == ["tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf"]
    assert "org/tiny-GGUF has no GGUF of quantization Q2_K." in refused
    assert all(name in refused for name in ("Q4_K_M", "Q8_0", "F16"))
    # What is cached needs no network.
    cached, missing = located(
        ["org/tiny-GGUF", "org/tiny-GGUF:F16"], tmp_path, endpoint, HF_HUB_OFFLINE="1"
    )
    assert cached == path
    assert "could not be fetched" in missing


def test_all_parts_of_a_split_gguf_are_fetched_and_are_the_same_model(hub, reference, tmp_path):
    endpoint, _ = hub
    (path,) = located(["org/tiny-GGUF:F16"], tmp_path, endpoint)
    assert path.endswith("F16/tiny-F16-00001-of-00003.gguf")
    prompt = list(range(2, 40))
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
    assert (prompt_logits(load_model(locate(path)), prompt) - expected).abs().max() < 0.05


def test_a_folder_of_safetensors_on_the_hub_and_what_the_hub_does_not_have(hub, tmp_path):
    endpoint, asked = hub
    (folder,) = located(["org/tiny"], tmp_path, endpoint)
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= set(os.listdir(folder))
    asked.clear()
    again, quantized, nothing = located(
        ["org/tiny", "org/tiny:Q4_K_M", "org/nothing"], tmp_path, endpoint
    )
    assert again == folder
    assert not asked
    assert "has no GGUF files. Give org/tiny," in quantized
    assert "The hub has no such model" in nothing


def test_a_hub_that_cannot_be_reached_is_one_error_and_no_warnings(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and never listens
        settings = {
            "HF_ENDPOINT": f"http://127.0.0.1:{taken.getsockname()[1]}",
            "HF_HOME": str(tmp_path),
            "HF_HUB_OFFLINE": "0",
        }
        command = [sys.executable, "-m", "tidemill", "pull", "org/name"]
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, **settings}
        )
    assert done.returncode == 1
    # the library's own words, one for each of its tries, are not among them
    error, fix = done.stderr.splitlines()
    assert (
        f"org/name is not in the local hub cache, and the hub cannot be reached at {settings['HF_ENDPOINT']}"
        in error
    )
    assert "HF_ENDPOINT" in fix


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "llama3.2",
            "Ollama's llama3.2 is bartowski/Llama-3.2-3B-Instruct-GGUF on the Hugging Face hub",
        ),
        ("llama3.2:1b-instruct-q8_0", "is bartowski/Llama-3.2-1B-Instruct-GGUF:Q8_0 on"),
        ("qwen3:latest", "is Qwen/Qwen3-8B-GGUF on"),
        ("phi4", "is bartowski/phi-4-GGUF on"),
        ("smollm", "Did you mean smollm2?"),
        ("unheard:7b", "org/name or org/name:Q4_K_M (search there for unheard GGUF)"),
        ("qwen3:999b", "search there for qwen3 GGUF"),
    ],
)
def test_names_without_an_organization_get_the_hubs(name, words):
    with pytest.raises(ModelNotFound) as caught:
        locate(name)
    assert words in caught.value.fix


def test_a_local_split_gguf_is_found_by_any_part_and_checked(reference, tmp_path):
    parts = split(write_gguf(tmp_path / "model.gguf", reference), 3)
    (tmp_path / "model.gguf").unlink()
    assert locate(str(parts[2])) == locate(str(tmp_path)) == parts[0]
    whole = {tensor.name for tensor in open_checkpoint(parts[0]).tensors()}
    assert {"token_embd.weight", "output_norm.weight"} <= whole
    os.rename(parts[1], tmp_path / "kept")
    with pytest.raises(CheckpointError, match=r"1 are missing: model-00002-of-00003\.gguf"):
        locate(str(parts[0]))
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(CheckpointError, match=r"is not part 2: key split\.no is 2"):
        open_checkpoint(parts[0])
    parts[0].rename(tmp_path / "alone.gguf")
    with pytest.raises(CheckpointError, match="part of a model in 3 files"):
        open_checkpoint(tmp_path / "alone.gguf")


def test_a_folder_of_ggufs(tmp_path):
    for name in ("a-Q8_0.gguf", "a-IQ2_XXS.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert locate(str(tmp_path)).name == "a-Q8_0.gguf"
    assert locate(f"{tmp_path}:iq2_xxs").name == "a-IQ2_XXS.gguf"
    (tmp_path / "a.bin").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFound, match=r"a\.bin is not a \.gguf file"):
        locate(str(tmp_path / "a.bin"))
    (tmp_path / "b-Q8_0.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFound, match=r"3 GGUF models\. It has a-IQ2_XXS, a-Q8_0, b-Q8_0"):
        locate(str(tmp_path))
    assert locate(f"{tmp_path}:b-Q8_0").name == "b-Q8_0.gguf"


def test_the_choice_of_a_quantization():
    def chosen(*kinds: str, asked: str = "") -> str:
        return choose([f"m-{kind}.gguf" for kind in kinds], asked, "here").quantization

    assert chosen("Q2_K", "Q8_0", "Q4_K_M", "F16") == "Q4_K_M"
    assert chosen("Q8_0", "Q4_0", "BF16") == "Q4_0"
    assert chosen("IQ1_S", "Q2_K") == "IQ1_S"
    assert chosen("UD-Q2_K_XL", "Q4_K_M", asked="ud-q2_k_xl") == "UD-Q2_K_XL"
    with pytest.raises(ModelNotFound, match="no GGUF of quantization Q9"):
        chosen("Q8_0", asked="Q9")
