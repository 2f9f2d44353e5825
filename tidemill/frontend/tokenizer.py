"""Tokenizer: text to ids and ids to bytes, from a tokenizer.json or from what a GGUF file carries."""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from tidemill.errors import CheckpointError, InvalidRequest
from tidemill.frontend.chat import ChatTemplate, Template
from tidemill.frontend.gguf_tokenizer import build_tokenizer
from tidemill.weights.gguf import GGUFFile
from tidemill.weights.locate import read_json


class Tokenizer:
    """What a model's words are. Decoding goes through the bytes of each token, so it can stop and go on anywhere."""

    def __init__(
        self,
        backend: Backend,
        *,
        eos_token_ids: Sequence[int],
        bos_token_id: int | None = None,
        add_bos: bool = False,
        add_eos: bool = False,
        bos_in_chat: bool = True,
        chat_template: str | None = None,
    ) -> None:
        backend.no_truncation()  # a tokenizer.json may carry settings of a training run
        backend.no_padding()
        self._backend = backend
        self.path: Path | None = None  # where it was loaded from
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))  # the first is the one to write
        self.bos_token_id = bos_token_id
        self._before = [bos_token_id] if add_bos and bos_token_id is not None else []
        self._after = list(self.eos_token_ids[:1]) if add_eos else []
        self._before_chat = self._before if bos_in_chat else []
        self.vocab_size = backend.get_vocab_size()
        self._token_bytes, self.special_ids = _byte_table(backend)
        self._longest_bytes = max(map(len, self._token_bytes.values()), default=1)
        self._eos_text = backend.id_to_token(self.eos_token_ids[0]) if self.eos_token_ids else ""
        self._bos_text = backend.id_to_token(bos_token_id) if bos_token_id is not None else ""
        self.chat_template: Template | None = None
        self._no_chat = "This model has no chat template."
        if chat_template:
            try:
                self.chat_template = ChatTemplate(chat_template)
            except CheckpointError as error:  # completions work all the same
                self._no_chat = str(error)

    @staticmethod
    def load(path: Path) -> Tokenizer:
        """From a checkpoint: a GGUF file or a Hugging Face folder."""
        made = _from_folder(path) if path.is_dir() else _from_gguf(path)
        made.path = path
        return made

    def encode(self, text: str, *, add_special: bool = True, max_tokens: int | None = None) -> list[int]:
        """Ids of a text; with `add_special` it starts as the model expects texts to start. A text that cannot fit `max_tokens`
        is refused before any work is done on it."""
        if max_tokens is not None and len(text) > max_tokens * self._longest_bytes:
            raise InvalidRequest(
                f"The prompt has {len(text)} characters, more than {max_tokens} tokens of context can hold.",
                fix="Shorten the prompt.",
                param="prompt",
            )
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        except (UnicodeEncodeError, TypeError):  # which one depends on the version of the library
            raise InvalidRequest("The prompt holds a lone surrogate, which is not text.", param="prompt") from None
        return [*self._before, *ids, *self._after] if add_special else ids

    def encode_chat(self, messages: Sequence[dict[str, Any]], *, max_tokens: int | None = None, **how: Any) -> list[int]:
        """`how`: as of `render_chat`."""
        text = self.render_chat(messages, **how)
        ids = self.encode(text, add_special=False, max_tokens=max_tokens)
        return ids if ids[:1] == self._before_chat else [*self._before_chat, *ids]  # a GGUF's template may write it or not

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: dict[str, Any] | None = None,
    ) -> str:
        """The prompt that a conversation becomes. `continue_final_message`: it ends within the last message, not after it."""
        if self.chat_template is None:
            raise InvalidRequest(self._no_chat, fix="Use completions with a plain prompt.", param="messages")
        ours = {
            "bos_token": self._bos_text,
            "eos_token": self._eos_text,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        taken = next((name for name in ("messages", "tools", *ours) if name in (variables or {})), None)
        if taken is not None:
            raise InvalidRequest(f"chat_template_kwargs may not set {taken!r}.", param="chat_template_kwargs")
        text = self.chat_template.render(messages, tools, {**(variables or {}), **ours})
        if not continue_final_message:
            return text
        last = messages[-1].get("content")
        at = text.rfind(last) if isinstance(last, str) and last else -1
        if at < 0:
            raise InvalidRequest("The last message cannot be continued: it is not in the prompt as it is.", param="messages")
        return text[: at + len(last or "")]

    def token_bytes(self, token_id: int) -> bytes:
        return self._token_bytes.get(token_id, b"")

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        skipped = self.special_ids if skip_special else frozenset()
        text = b"".join([self.token_bytes(token) for token in token_ids if token not in skipped])
        return text.decode("utf-8", errors="replace")


class StreamDecoder:
    """Ids to text as they come: a character is given out when its last byte is there, never half of it."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """What is left of an unfinished character, as a replacement character."""
        return self._decoder.decode(b"", final=True)


# ---- bytes of tokens


def _gpt2_bytes() -> dict[str, int]:
    """The printable stand-ins that byte-level vocabularies write bytes with."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _byte_table(backend: Backend) -> tuple[dict[int, bytes], frozenset[int]]:
    """The bytes each id stands for, and which ids are special."""
    added = backend.get_added_tokens_decoder()
    special = frozenset(token_id for token_id, token in added.items() if token.special)
    decoder = json.dumps(json.loads(backend.to_str()).get("decoder"))
    vocab = backend.get_vocab(with_added_tokens=True)
    table: dict[int, bytes] = {}
    if '"ByteLevel"' in decoder:
        to_byte = _gpt2_bytes()
        for token, token_id in vocab.items():
            if token_id in added:
                table[token_id] = token.encode()
            else:
                try:
                    table[token_id] = bytes(map(to_byte.__getitem__, token))
                except KeyError:
                    table[token_id] = token.encode()
    elif "\\u2581" in decoder or '"Metaspace"' in decoder:
        for token, token_id in vocab.items():
            if token_id not in added and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                table[token_id] = bytes([int(token[3:5], 16)])
            else:
                table[token_id] = token.replace("▁", " ").encode() if token_id not in added else token.encode()
    else:
        raise CheckpointError(
            f"The tokenizer's decoder is not supported: {decoder[:200]}.", fix="Byte-level and SentencePiece are."
        )
    return table, special


# ---- where tokenizers come from


def _from_gguf(path: Path) -> Tokenizer:
    metadata = GGUFFile(path).metadata
    built = build_tokenizer(metadata, str(path))
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        built.backend,
        eos_token_ids=built.eos_token_ids,
        bos_token_id=built.bos_token_id,
        add_bos=built.add_bos,
        add_eos=built.add_eos,
        chat_template=template if isinstance(template, str) else None,
    )


def _from_folder(path: Path) -> Tokenizer:
    file = path / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(f"{path} holds no tokenizer.json.", fix="Save the tokenizer in its fast form beside the weights.")
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{file} cannot be read: {error}.") from error
    settings = read_json(path / "tokenizer_config.json") if (path / "tokenizer_config.json").is_file() else {}
    eos: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = read_json(path / name).get("eos_token_id") if (path / name).is_file() else None
        eos += [token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int)]
    named = _token_id(backend, settings.get("eos_token"))
    eos += [named] if named is not None else []
    backend.no_truncation()
    backend.no_padding()
    plain, full = (backend.encode("a", add_special_tokens=special).ids for special in (False, True))
    at = next((i for i in range(len(full) - len(plain) + 1) if full[i : i + len(plain)] == plain), 0)
    before, after = full[:at], full[at + len(plain) :]  # what its post-processor writes around a text
    bos = before[0] if before else _token_id(backend, settings.get("bos_token"))
    return Tokenizer(
        backend,
        eos_token_ids=eos,
        bos_token_id=bos,
        add_bos=bool(before),
        add_eos=bool(after) and after[0] in eos,
        bos_in_chat=False,  # a folder's template writes its own
        chat_template=_folder_template(path, settings),
    )


def _token_id(backend: Backend, token: Any) -> int | None:
    text = token.get("content") if isinstance(token, dict) else token
    return backend.token_to_id(text) if isinstance(text, str) else None


def _folder_template(path: Path, settings: dict[str, Any]) -> str | None:
    if (path / "chat_template.jinja").is_file():
        return (path / "chat_template.jinja").read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        by_name = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = by_name.get("default")
    return template if isinstance(template, str) else None
