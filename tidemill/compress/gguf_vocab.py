"""A folder's tokenizer as keys of a GGUF file. Readers cut texts by a name that stands for a
regular expression: the one is taken with which texts become the same tokens; a tokenizer that none
fits is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tidemill.errors import CheckpointError
from tidemill.frontend.gguf_tokenizer import build_tokenizer
from tidemill.frontend.tokenizer import Tokenizer, folder_template
from tidemill.weights.locate import read_json

Keys = dict[str, Any]
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_CUTS = ("smollm", "gpt-2", "qwen2", "llama-bpe", "tekken")  # one digit at a time before three
# Where the ways to cut a text differ: digits, contractions, case, marks, spaces, lines, other
# scripts.
_PROBES = (
    "Hello, world! It's 2026; we've 1234567 tokens, DON'T we? x1y22z333",
    "  two spaces\n\n\tand a tab \n   then\r\nlines...   end  ",
    "def f(a_b, *args):\n    return {'k': [1.50e-3, -2], 'p/q': \"s\\n\"}  # fin\n",
    "Größe, naïve café, Ελληνικά, русский текст, 日本語のテキスト、中文字符, العربية, हिन्दी 😀👍🏽",
    "½ of 10² is ①٣٤ or Ⅷ; room 101a, v2.10.3, 0xFF, 1,000,000 and 2nd 007",
    "camelCaseWords and HTTPServer's I'LL/we'll 3rd--x!!! @#$%^&*() <tag attr='1'/> <|end|>",
)


def vocabulary(folder: Path, vocab_size: int) -> Keys:
    """`vocab_size`: rows of the embedding; ids that the tokenizer leaves are named, too. Empty: the
    folder has no tokenizer."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return {}
    own = Tokenizer.load(folder)
    data = read_json(file)
    model = data["model"]
    if model.get("type", "BPE") != "BPE" or not model.get("merges"):
        why = (
            f"GGUF holds no tokenizer of kind {model.get('type')}"
            if model.get("type") != "BPE"
            else "it has no merges"
        )
        raise CheckpointError(
            f"{file} cannot be written as GGUF: {why}.", fix="Choose another --format."
        )
    tokens, types = _tokens(data, own, vocab_size, file)
    keys: Keys = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types} | _ends(
        own, folder
    )
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]]
    if model.get("byte_fallback"):
        scored = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": _scores(tokens, merges)}
        tried = [
            scored
            | {"tokenizer.ggml.pre": "default", "tokenizer.ggml.add_space_prefix": adds_space}
            for adds_space in (True, False)
        ]
    else:
        tried = [
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.merges": merges,
                "tokenizer.ggml.pre": pre,
            }
            for pre in _CUTS
        ]
    added = [
        token["content"]
        for token in data.get("added_tokens", [])[:64]
        if token["content"] != model.get("unk_token")
    ]
    probes = [*_PROBES, "".join(added)]
    expected = [own.encode(text, add_special=False) for text in probes]
    for kind_keys in tried:
        backend = build_tokenizer(keys | kind_keys, str(folder)).backend
        if [backend.encode(text, add_special_tokens=False).ids for text in probes] == expected:
            return keys | kind_keys
    known = ", ".join(_CUTS) if len(tried) == len(_CUTS) else "SentencePiece"
    raise CheckpointError(
        f"{file} cannot be written as GGUF: no way to cut texts that the format knows gives its tokens.",
        fix=f"Tried: {known}. Choose another --format.",
    )


def _tokens(
    data: dict[str, Any], own: Tokenizer, vocab_size: int, file: Path
) -> tuple[list[str], list[int]]:
    """By id, and their kinds."""
    names = {token: name for name, token in own.vocabulary.items()}
    if max(names) >= vocab_size:
        raise CheckpointError(f"{file} has the token {max(names)}; the model has {vocab_size}.")
    added = {
        token["id"]: _CONTROL if token["special"] else _USER_DEFINED
        for token in data.get("added_tokens", [])
    }
    unknown = data["model"].get("unk_token")
    tokens, types = [], []
    for token in range(vocab_size):
        name = names.get(token, f"[PAD{token}]")
        is_byte = (
            len(name) == 6
            and name.startswith("<0x")
            and name.endswith(">")
            and data["model"].get("byte_fallback")
        )
        kind = _UNUSED if token not in names else _BYTE if is_byte else added.get(token, _NORMAL)
        tokens.append(name)
        types.append(_UNKNOWN if name == unknown else kind)
    return tokens, types


def _ends(own: Tokenizer, folder: Path) -> Keys:
    """The tokens that begin and end texts, and the chat template."""
    before = own.encode("a") != own.encode("a", add_special=False)
    starts = before and own.encode("a")[:1] == [own.bos_token_id]
    ends = before and bool(own.eos_token_ids) and own.encode("a")[-1:] == [own.eos_token_ids[0]]
    keys: Keys = {"tokenizer.ggml.add_bos_token": starts, "tokenizer.ggml.add_eos_token": ends}
    ids = {"bos": own.bos_token_id} | dict(
        zip(("eos", "eot", "eom"), own.eos_token_ids, strict=False)
    )
    keys |= {
        f"tokenizer.ggml.{name}_token_id": token for name, token in ids.items() if token is not None
    }
    file = folder / "tokenizer_config.json"
    if (template := folder_template(folder, read_json(file) if file.is_file() else {})) is not None:
        keys["tokenizer.chat_template"] = template
    return keys


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """SentencePiece joins by scores of pieces; merges are in their order."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        ranks.setdefault(left + right, rank)
    return [-float(ranks.get(token, len(merges))) for token in tokens]
