"""Model files that somebody damaged, or made to do harm: a typed error, and no memory beyond what
the file's size warrants."""

import json
import random
import struct
import subprocess
import sys
import tracemalloc

import gguf
import pytest

from tests.frontend.test_tokenizer import sentencepiece_metadata
from tests.helpers import CHAT_TEMPLATE, byte_tokenizer, load_model, make_llama
from tests.weights.test_gguf import write_gguf
from tidemill.cli import settings
from tidemill.compress.draft.text import TextFile
from tidemill.distributed.stages import LayerTimes
from tidemill.errors import CheckpointError, ConfigError, InvalidRequest, TidemillError
from tidemill.frontend.chat import _read_arguments
from tidemill.frontend.sampling_defaults import read_source
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.planning import profile
from tidemill.types.kv_policy import read_policy
from tidemill.weights.gguf import GGUFFile
from tidemill.weights.locate import read_json

TINY = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
DEEP = "[" * 200_000
NUMBERS = [0, -1, 10**30, -(10**30), 2**31, 2**63, 1.5, float("nan"), float("inf")]
OTHERS = [None, True, "", "x", "\ud800", [], ["x"], [[]], {}, {"x": {}}, "a" * 5000]


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("folder")
    make_llama(folder, **TINY)
    byte_tokenizer(folder)
    return folder


@pytest.fixture
def folder(good, tmp_path):
    for file in good.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


@pytest.fixture(scope="module")
def good_gguf(tmp_path_factory):
    """With a vocabulary and a template."""
    path = tmp_path_factory.mktemp("gguf") / "good.gguf"
    return write_gguf(
        path,
        make_llama(**TINY),
        strings=sentencepiece_metadata() | {"tokenizer.chat_template": CHAT_TEMPLATE},
    )


def use(path):
    """All that a server does with a model's files."""
    tokenizer = Tokenizer.load(path)
    tokenizer.encode("Ebb and flood")
    if tokenizer.chat_template is not None:
        tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    load_model(path)


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# ---- memory


LIMITED = """
import resource, sys
from pathlib import Path
from tidemill.errors import CheckpointError
from tidemill.frontend.tokenizer import Tokenizer
resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30,) * 2)
for path in map(Path, sys.argv[1:]):
    try:
        Tokenizer.load(path)
    except CheckpointError as error:
        print(error)
"""


def fails_in_4_gib(*paths):
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, *map(str, paths)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert len(lines) == len(paths), lines
    return lines


def header(num_tensors, num_keys, *parts):
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + b"".join(parts)


def string(text):
    return struct.pack("<Q", len(text)) + text


def test_counts_are_bounded_before_anything_is_allocated_for_them(tmp_path):
    """Files with holes, as large as their counts ask for."""

    def sparse(name, data, num_bytes):
        path = tmp_path / name
        path.write_bytes(data)
        with path.open("r+b") as file:
            file.truncate(num_bytes)
        return path

    long = 2 * 10**9
    bytes_array = header(0, 1, string(b"k"), struct.pack("<IIQ", 9, 0, long))
    strings = header(0, 1, string(b"k"), struct.pack("<IIQ", 9, 8, 10**8))
    text = header(0, 1, string(b"k"), struct.pack("<IQ", 8, long))
    many = header(
        0,
        2**18,
        *(string(b"%d" % i) + struct.pack("<IIQ", 9, 0, 2**21) + bytes(2**21) for i in range(3)),
    )
    lines = fails_in_4_gib(
        sparse("a.gguf", bytes_array, long + 100),
        sparse("b.gguf", strings, 10**9),
        sparse("c.gguf", text, long + 100),
        sparse("d.gguf", header(60_000_000, 0), 25 * 60_000_000),
        sparse("e.gguf", header(0, 60_000_000), 25 * 60_000_000),
        sparse("f.gguf", many, 2**24),
    )
    assert [("more than" in line) for line in lines] == [True] * 6, lines


@pytest.mark.parametrize("where", ["model", "added_tokens"])
def test_token_ids_are_bounded_by_the_size_of_the_vocabulary(good, tmp_path, where):
    folders = []
    for wrong in (2**31, 2**32 - 1, 10**9, 10**30, -1):
        file = json.loads((good / "tokenizer.json").read_text())
        if where == "model":
            file["model"]["vocab"]["<s>"] = wrong
        else:
            file["added_tokens"][-1]["id"] = wrong
        folders.append(tmp_path / str(wrong))
        folders[-1].mkdir()
        (folders[-1] / "tokenizer.json").write_text(json.dumps(file))
    assert all("tokenizer.json" in line for line in fails_in_4_gib(*folders))


def test_a_vocabulary_may_have_gaps(folder):
    file = json.loads((folder / "tokenizer.json").read_text())
    file["added_tokens"][-1]["id"] = file["added_tokens"][-1]["id"] + 3
    (folder / "tokenizer.json").write_text(json.dumps(file))
    Tokenizer.load(folder)


def test_a_file_too_large_to_describe_a_model_is_not_read(folder):
    for name in ("chat_template.jinja", "config.json", "tokenizer.json"):
        with (folder / name).open("a") as file:
            file.truncate(2**40)
        with pytest.raises(CheckpointError, match="at most"):
            Tokenizer.load(folder)
        (folder / name).unlink()


def test_a_template_computes_nothing_while_it_is_compiled(folder):
    tracemalloc.start()
    try:
        for expression in (
            "'x' * 10**8",
            "'x' | center(10**8)",
            "('x' * 10**8) | length",
            "'%100000000d' % 1",
            "[1] * 10**7",
        ):
            (folder / "chat_template.jinja").write_text(
                "{% if 0 %}{{ " + expression + " }}{% endif %}"
            )
            Tokenizer.load(folder)
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


# ---- values


@pytest.mark.parametrize("wrong", [10**30, -1, "2", 2.0, True, [1, "x"], {}, [[1]], 2**31])
def test_what_is_not_an_end_token_is_named(folder, wrong):
    edit(folder / "config.json", eos_token_id=wrong)
    with pytest.raises(CheckpointError, match="eos_token_id"):
        Tokenizer.load(folder)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
@pytest.mark.parametrize(
    "text",
    [DEEP, '{"model": ' + DEEP, '{"a": "\\ud800"}', "[]", "", "{", b"\xff\xfe{}", "1" * 10_000],
)
def test_json_that_is_none(folder, name, text):
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CheckpointError, match=name):
        use(folder)


def test_a_header_of_safetensors_that_is_none(folder):
    path = folder / "model.safetensors"
    for head in (
        DEEP.encode(),
        b'{"a":' + DEEP.encode(),
        b'{"\\ud800":{}}',
        b"\xff" * 100,
        b"{}",
        b"[]",
    ):
        for length in (len(head), 2**63, 2**64 - 1, 0):
            path.write_bytes(struct.pack("<Q", length) + head)
            with pytest.raises(CheckpointError):
                load_model(folder)


@pytest.mark.parametrize(
    "template",
    [
        b"\xff\xfe{{ messages }}",
        "{{ '\ud800' }}".encode(errors="surrogatepass"),
        b"{{ " + b"(" * 20_000 + b"1" + b")" * 20_000 + b" }}",
        b"{{ " + b"-" * 20_000 + b"1 }}",
        b"{% if 1 %}" * 500 + b"{% endif %}" * 500,
        b"{{ 'x' }}" * 2**18,
    ],
    ids=["not utf-8", "surrogate", "parentheses", "signs", "blocks", "long"],
)
def test_a_template_that_cannot_be_compiled_leaves_completions(folder, template):
    (folder / "chat_template.jinja").write_bytes(template)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("x")
    with pytest.raises(InvalidRequest, match="chat template"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])


def test_a_configuration_larger_than_its_weights_is_refused_before_layers_are_made(folder):
    for changes in (
        {"num_hidden_layers": 2**14},
        {"vocab_size": 2**31 - 1, "hidden_size": 2**31 - 1},
    ):
        edit(folder / "config.json", **changes)
        with pytest.raises(CheckpointError, match="the tensors hold"):
            load_model(folder)
    edit(folder / "config.json", num_hidden_layers=2**30)  # not even a list of so many
    with pytest.raises(ConfigError, match="num_layers"):
        load_model(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "linear", "factor": 0}},
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 0,
            }
        },
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 2.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 1.0,
            }
        },
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": float("inf")}},
        {"rms_norm_eps": float("nan")},
        {"rms_norm_eps": -1.0},
        {"max_position_embeddings": 0},
        {"head_dim": 15},
        {"hidden_size": 10**30},
        {"num_hidden_layers": -1},
    ],
    ids=str,
)
def test_numbers_that_no_model_has(folder, changes):
    edit(folder / "config.json", **changes)
    with pytest.raises(CheckpointError):
        load_model(folder)


# ---- at random


def mutate_bytes(rng, data, limit):
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 3, 8])):
        at = rng.randrange(min(limit, len(data)))
        kind = rng.randrange(5)
        if kind == 0:
            data[at : at + rng.randrange(1, 9)] = b""
        elif kind == 1:
            data[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif kind == 2:
            data[at : at + 8] = struct.pack(
                "<Q", rng.choice([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1])
            )
        else:
            data[at] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
    return bytes(data)


def mutate_json(rng, data):
    """One value somewhere, of another kind or size."""
    value = json.loads(data)
    at = value
    while True:
        key = rng.choice(list(at)) if isinstance(at, dict) else rng.randrange(len(at))
        if not isinstance(at[key], dict | list) or not at[key] or rng.random() < 0.2:
            break
        at = at[key]
    at[key] = rng.choice([*NUMBERS, *OTHERS])
    return json.dumps(value).encode()


def only_typed_errors(path):
    try:
        use(path)
    except TidemillError:
        return 1
    return 0


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("config.json", 2000),
        ("tokenizer.json", 20_000),
        ("tokenizer_config.json", 500),
        ("model.safetensors", 1000),
    ],
)
def test_mutated_folders(good, folder, name, limit):
    rng = random.Random(name)
    data = (good / name).read_bytes()
    refused = 0
    for i in range(80):
        is_json = i % 2 and name != "model.safetensors"
        (folder / name).write_bytes(
            mutate_json(rng, data) if is_json else mutate_bytes(rng, data, limit)
        )
        refused += only_typed_errors(folder)
    assert refused > 20


def test_mutated_gguf_files(good_gguf, tmp_path):
    rng = random.Random(4)
    data = good_gguf.read_bytes()
    num_header = len(data) - sum(
        tensor.num_bytes for tensor in GGUFFile(good_gguf).tensors.values()
    )
    refused = 0
    for _ in range(150):
        path = tmp_path / "x.gguf"
        path.write_bytes(mutate_bytes(rng, data, num_header))
        refused += only_typed_errors(path)
    assert refused > 40


def test_gguf_metadata_of_other_kinds(good_gguf, tmp_path):
    """Every key of a file with a value of every other kind."""
    reference = make_llama(**TINY)
    keys = [key for key in GGUFFile(good_gguf).metadata if not key.startswith("general")]
    rng = random.Random(5)
    strings = sentencepiece_metadata() | {"tokenizer.chat_template": CHAT_TEMPLATE}
    for key in keys:
        wrong = rng.choice(
            ["x", -1, 2**31 - 1, 0, True, 1.5, float("nan"), ["x"], [1.5], [True], [2**31 - 1]]
        )
        only_typed_errors(
            write_gguf(tmp_path / "x.gguf", reference, strings=strings | {key: wrong})
        )


def test_the_good_ones_are_good(good, good_gguf):
    use(good)
    use(good_gguf)
    assert gguf.GGUFReader(good_gguf).fields


@pytest.mark.parametrize("depth", [900, 10**5])
def test_options_and_files_that_are_nested_deeply_are_typed_errors(tmp_path, depth):
    """Python reads about a thousand levels of JSON, and then raises what is no ValueError."""
    deep = "[" * depth + "]" * depth
    file = tmp_path / "file.json"
    file.write_text(f'{{"format": {deep}, "x": {deep}}}\n')
    readers = [
        lambda: read_source(f'{{"x": {deep}}}'),
        lambda: read_policy(f'{{"x": {deep}}}'),
        lambda: LayerTimes.load(file),
        lambda: profile._decode(file.read_bytes(), "a file"),
        lambda: read_json(file),
        lambda: TextFile(file, "model").read(),
        lambda: settings._read_file(file),
    ]
    for read in readers:
        with pytest.raises(TidemillError):
            read()
    (tmp_path / "file.toml").write_text(f"x = {deep}")
    with pytest.raises(TidemillError):
        settings._read_file(tmp_path / "file.toml")
    arguments = _read_arguments({"function": {"name": "f", "arguments": deep}}, as_text=False)[
        "function"
    ]["arguments"]
    assert isinstance(arguments, str if depth > 1000 else list)
