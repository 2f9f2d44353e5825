"""Tokenizer: text to ids and ids to bytes, from a tokenizer.json or from what a GGUF file carries."""

from __future__ import annotations

import codecs
import contextlib
import copy
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tidemill.errors import (
    CheckpointError,
    ConfigError,
    ContextTooLong,
    InvalidRequest,
    TidemillError,
    input_too_long,
)
from tidemill.frontend.chat import TOKEN_VARIABLES, ChatTemplate, Template, joined_templates
from tidemill.frontend.control import MARK
from tidemill.frontend.folder_tokenizer import build_from_files
from tidemill.frontend.gguf_tokenizer import BYTE_CHARS, build_tokenizer
from tidemill.frontend.templates import NAMED
from tidemill.weights.gguf import GGUFFile
from tidemill.weights.locate import read_file, read_json

# of a template
_OWN_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt", *TOKEN_VARIABLES})
_TEMPLATE_FOLDER = "additional_chat_templates"  # beside chat_template.jinja, the default
_LONG_TEXT = 1024  # characters
_SPARE_IDS = 2**16  # ids that a vocabulary may leave unused, beside as many as it has
_ANCHOR = "\x02"  # no token joins it with what follows
_log = logging.getLogger("tidemill.frontend")


class Tokenizer:
    """Text to token ids and back. Decoding goes through the bytes of each token, so it can stop and
    resume anywhere."""

    def __init__(
        self,
        backend: Backend,
        *,
        eos_token_ids: Sequence[int],
        bos_token_id: int | None = None,
        add_bos: bool = False,
        add_eos: bool = False,
        separator_id: int | None = None,
        bos_in_chat: bool = True,
        chat_template: str | None = None,
        token_texts: dict[str, str] | None = None,
    ) -> None:
        """`token_texts`: variables of the chat template as the tokenizer's own settings have them."""
        backend.no_truncation()  # a tokenizer.json may carry settings of a training run
        backend.no_padding()
        self._backend = backend
        self.path: Path | None = None  # where it was loaded from
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))  # the first is the one to write
        self.bos_token_id = bos_token_id
        self._before = [bos_token_id] if add_bos and bos_token_id is not None else []
        end = [separator_id] if separator_id is not None else list(self.eos_token_ids[:1])
        self._after = end if add_eos else []
        self._before_chat = self._before if bos_in_chat else []
        self.vocab_size = backend.get_vocab_size()
        self._token_bytes, self.special_ids = _byte_table(backend)
        # a few: one a dialect
        self._special_but: dict[frozenset[str], frozenset[int]] = {frozenset(): self.special_ids}
        self._longest_bytes = max(map(len, self._token_bytes.values()), default=1)
        ends = self.eos_token_ids[:1]  # generation may end with others than texts do
        by_id = {"bos_token": bos_token_id, "eos_token": ends[0] if ends else None}
        self._token_texts = {
            name: "" if token is None else backend.id_to_token(token) or ""
            for name, token in by_id.items()
        } | (token_texts or {})
        self.chat_template: Template | None = None
        # whether control tokens in content are marked; None: not tried yet
        self._marks: bool | None = None
        # of the chat template, where a conversation does not give them
        self.variables: dict[str, Any] = {}
        self._no_chat = "This model has no chat template."
        if chat_template:
            try:
                self.chat_template = ChatTemplate(chat_template, self.control_texts())
            except CheckpointError as error:  # completions work all the same
                self._no_chat = str(error)

    @staticmethod
    def load(
        path: Path, chat_template: str | None = None, chat_template_kwargs: str | None = None
    ) -> Tokenizer:
        """From a checkpoint: a GGUF file or a Hugging Face folder. `chat_template`: a file or the
        text of another one; `chat_template_kwargs`: its variables, as JSON."""
        with _typed_errors(f"The tokenizer of {path}"):
            tokenizer = _from_folder(path) if path.is_dir() else _from_gguf(path)
        tokenizer.path = path
        if chat_template:
            template = _read_template(chat_template, bool(tokenizer._before))
            tokenizer.chat_template = ChatTemplate(template, tokenizer.control_texts())
        if chat_template_kwargs:
            tokenizer.variables = _read_variables(chat_template_kwargs)
        return tokenizer

    def encode(
        self,
        text: str,
        *,
        add_special: bool = True,
        max_tokens: int | None = None,
        marked: bool = False,
        must_fit: bool = False,
    ) -> list[int]:
        """Ids of a text; with `add_special` it starts as the model expects texts to start. A text
        that cannot fit `max_tokens` is refused before any work is done on it; with `must_fit`, one
        that does not, before a list is made of its tokens. `marked`: control tokens with a mark
        inside are plain text."""
        if max_tokens is not None:
            self._check_length(text, max_tokens)
        encoding = self._encoded(text, self._marked_backend if marked else self._backend)
        if must_fit and max_tokens is not None and len(encoding) > max_tokens:
            raise input_too_long(len(encoding), max_tokens)
        ids: list[int] = encoding.ids
        return self.with_special(ids) if add_special else ids

    def with_special(self, ids: list[int]) -> list[int]:
        """The ids with the special tokens that `encode` puts around them."""
        return [*self._before, *ids, *self._after] if self._before or self._after else ids

    def _check_length(self, text: str, max_tokens: int) -> None:
        if len(text) > max_tokens * self._longest_bytes:
            raise ContextTooLong(
                f"The prompt ({len(text)} characters) is too large: it is longer than the model's context length. This model's "
                f"maximum context length is {max_tokens} tokens, which it cannot fit.",
                fix="Please reduce the length of the input prompt.",
                param="prompt",
            )

    @staticmethod
    def _encoded(text: str, backend: Backend) -> Any:
        """A long text as a batch of one: only for batches does the library let other threads run
        meanwhile."""
        try:
            if len(text) >= _LONG_TEXT:
                return backend.encode_batch_fast([text], add_special_tokens=False)[0]
            return backend.encode(text, add_special_tokens=False)
        except (UnicodeEncodeError, TypeError):  # which one depends on the version of the library
            raise InvalidRequest(
                "The prompt holds a lone surrogate, which is not text.", param="prompt"
            ) from None

    def encode_cut(
        self, text: str, max_tokens: int, *, side: str = "right", add_special: bool = True
    ) -> list[int]:
        """The same as `encode`, for a text that is cut at this side so that it fits, the tokens
        around it included."""
        before, after = (self._before, self._after) if add_special else ([], [])
        room = max(max_tokens - len(before) - len(after), 1)
        ids = self._encoded_cut(text, room, side).ids
        return [*before, *(ids[:room] if side == "right" else ids[-room:]), *after]

    def encode_pair(
        self,
        first: str,
        second: str,
        *,
        max_tokens: int,
        truncate: bool = False,
        max_second: int | None = None,
    ) -> tuple[list[int], int]:
        """Ids of two texts as the model expects a pair, and where tokens of type 1 begin (0:
        nowhere). The second is cut to `max_second` tokens. With `truncate`, the longer of the two
        is cut until they fit; else a pair that does not is for the engine to refuse."""
        before, between, after, has_types = self._pair
        if truncate:
            room = max(max_tokens - len(before) - len(between) - len(after), 2)
            # enough to tell the longer
            first_ids, other = (self._encoded_cut(text, 4 * room).ids for text in (first, second))
            other = other[:max_second]
            num, num_other = _fitted(len(first_ids), len(other), room)
            first_ids, other = first_ids[:num], other[:num_other]
        else:
            first_ids = self.encode(first, add_special=False, max_tokens=max_tokens, must_fit=True)
            if max_second is None:
                other = self.encode(second, add_special=False, max_tokens=max_tokens, must_fit=True)
            else:
                other = self._encoded_cut(second, max_second).ids[:max_second]
        start = len(before) + len(first_ids) + len(between)
        return [*before, *first_ids, *between, *other, *after], start if has_types else 0

    @cached_property
    def _pair(self) -> tuple[list[int], list[int], list[int], bool]:
        """The tokens that the tokenizer writes before, between and after two texts, and whether
        tokens of the second have another type. Not by its own truncation, which makes all parts of
        one text times all of the other."""
        plain, full = self._encoded("a", self._backend).ids, self._backend.encode("a", "a")
        at = [
            i
            for i in range(len(full.ids) - len(plain) + 1)
            if full.ids[i : i + len(plain)] == plain
        ]
        if len(at) < 2:
            raise InvalidRequest("This model's tokenizer does not join two texts.", param="model")
        end = at[0] + len(plain), at[-1] + len(plain)
        return (
            full.ids[: at[0]],
            full.ids[end[0] : at[-1]],
            full.ids[end[1] :],
            full.type_ids[at[-1]] == 1,
        )

    def _encoded_cut(self, text: str, room: int, side: str = "right") -> Any:
        """At least so many tokens, if there are, without looking at more of the text than that
        takes. Cut between words."""
        num_chars = 8 * room
        while num_chars < len(text):
            words = (
                text[:num_chars].rsplit(None, 1)
                if side == "right"
                else text[-num_chars:].split(None, 1)
            )
            encoding = self._encoded(
                words[0 if side == "right" else -1] if words else "", self._backend
            )
            if len(encoding.ids) >= room:
                return encoding
            num_chars *= 2
        return self._encoded(text, self._backend)

    def use_template(self, template: Template) -> None:
        """Render with this one from now on; tried at once, so that what it cannot do is logged at
        start."""
        self.chat_template = template
        self._marks = self._try_marks(template)

    def with_template(self, template: Template) -> Tokenizer:
        """The same tokenizer, with another chat template."""
        tokenizer = copy.copy(self)
        tokenizer.use_template(template)
        return tokenizer

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        max_tokens: int | None = None,
        on_rendered: Callable[[], None] | None = None,
        **template_options: Any,
    ) -> list[int]:
        """`on_rendered`: called between the template and the tokens. `template_options`: as of
        `render_chat`. Control tokens in what the client gave are encoded as plain text."""
        text = self._render(messages, **template_options)
        if on_rendered is not None:
            on_rendered()
        is_marked = (
            bool(self._marks)
            and self.chat_template is not None
            and self.chat_template.control.is_marked(text)
        )
        ids = self.encode(text, add_special=False, max_tokens=max_tokens, marked=is_marked)
        # a GGUF's template may write it or not
        return ids if ids[:1] == self._before_chat else [*self._before_chat, *ids]

    def apply_chat_template(
        self,
        conversation: Sequence[dict[str, Any]],
        *,
        tokenize: bool = True,
        **template_options: Any,
    ) -> str | list[int]:
        """Renders a conversation like Transformers' tokenizers: token ids, or with `tokenize=False`
        a text that `encode` turns into them. `template_options`: tools, add_generation_prompt (here
        off), continue_final_message, and variables of the template."""
        own = ("tools", "add_generation_prompt", "continue_final_message")
        options: dict[str, Any] = {"add_generation_prompt": False}
        options |= {name: template_options.pop(name) for name in own if name in template_options}
        if tokenize:
            return self.encode_chat(conversation, variables=template_options, **options)
        return self.as_prompt(self.render_chat(conversation, variables=template_options, **options))

    def render_chat(self, messages: Sequence[dict[str, Any]], **template_options: Any) -> str:
        """The prompt that a conversation becomes, as text. `template_options`: as of `_render`."""
        text = self._render(messages, **template_options)
        return (
            self.chat_template.control.unmark(text)
            if self._marks and self.chat_template is not None
            else text
        )

    def as_prompt(self, rendered: str) -> str:
        """A rendered conversation as `encode` wants it, which puts the first token before a text
        itself."""
        return rendered.removeprefix(self._token_texts["bos_token"]) if self._before else rendered

    def _render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: dict[str, Any] | None = None,
    ) -> str:
        """The rendered text, with marks in control tokens. `continue_final_message`: the prompt
        ends within the last message, not after it."""
        if self.chat_template is None:
            raise InvalidRequest(
                self._no_chat, fix="Use completions with a plain prompt.", param="messages"
            )
        if self._marks is None:
            self.use_template(self.chat_template)
        ours = self._token_texts | {
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        variables = {**self.variables, **(variables or {})}
        if taken := _OWN_VARIABLES & variables.keys():
            raise InvalidRequest(
                f"chat_template_kwargs may not set {sorted(taken)[0]!r}.",
                param="chat_template_kwargs",
            )
        text = self.chat_template.render(
            messages, tools, {**variables, **ours}, marks=bool(self._marks)
        )
        if not continue_final_message:
            return text
        last = messages[-1].get("content")
        if isinstance(last, list):  # of text parts, which were rendered
            last = last[-1]["text"] if last else None
        last = self.chat_template.control.mark(last) if self._marks else last
        at = text.rfind(last) if isinstance(last, str) and last else -1
        if at < 0:
            raise InvalidRequest(
                "The last message cannot be continued: it is not in the prompt as it is.",
                param="messages",
            )
        return text[: at + len(last or "")]

    # ---- control tokens in content

    def control_texts(self) -> list[str]:
        """The texts of tokens that are never part of an output. Others (`<think>`, `<tool_call>`)
        clients may send back as they came."""
        return [
            text for token in sorted(self.special_ids) if (text := self._backend.id_to_token(token))
        ]

    @cached_property
    def _marked_backend(self) -> Backend:
        """The same tokenizer, except that no token crosses a mark, and marks are dropped."""
        backend = Backend.from_str(self._backend.to_str())
        in_bytes = "".join(map(BYTE_CHARS.__getitem__, MARK.encode()))
        # after ByteLevel, text is bytes
        split = pre_tokenizers.Split(Regex(f"{MARK}|{in_bytes}"), "removed")
        backend.pre_tokenizer = (
            pre_tokenizers.Sequence([backend.pre_tokenizer, split])
            if backend.pre_tokenizer
            else split
        )
        return backend

    def _try_marks(self, template: Template) -> bool:
        """Tells if control tokens in content can be distinguished from the template's own; what
        cannot is logged."""
        control = template.control
        unsafe = [
            text
            for text in self.control_texts()
            if text not in control.texts
            or self.special_ids.intersection(
                self.encode(control.mark(f"x{text}y"), add_special=False, marked=True)
            )
        ]
        if unsafe:
            _log.warning(
                "Control tokens of this tokenizer that a message may contain: %s.",
                ", ".join(map(repr, unsafe[:8])),
            )
        if _marks_survive(template, self._token_texts):
            return True
        _log.warning(
            "The model's chat template rewrites content: control tokens in messages are not distinguished from its own."
        )
        return False

    @property
    def vocabulary(self) -> dict[str, int]:
        """Every token with its id, special ones, too."""
        return self._backend.get_vocab(with_added_tokens=True)

    def token_id(self, token: str) -> int | None:
        """The id of a token, by its name in the vocabulary."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def token_bytes(self, token_id: int) -> bytes:
        return self._token_bytes.get(token_id, b"")

    def token_name(self, token_id: int) -> str:
        """The name of a token in the vocabulary: of a byte-level tokenizer, bytes are written as
        other characters."""
        return self._backend.id_to_token(token_id) or ""

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def prefix_tokens(self, text: bytes) -> list[int]:
        """Tokens that the text begins with."""
        return [
            token for end in range(1, len(text) + 1) for token in self._by_bytes.get(text[:end], ())
        ]

    def spell(self, text: str) -> list[int]:
        """Ordinary tokens whose bytes are exactly the text's: those that `encode` cuts it into,
        unless it changes the text (a space before it, another Unicode form) or finds control tokens
        in it."""
        wanted = text.encode()
        for before in ("", _ANCHOR):
            ids = self.encode(before + text, add_special=False)
            ids = ids[len(self.encode(before, add_special=False)) :] if before else ids
            if b"".join(map(self.token_bytes, ids)) == wanted and self.special_ids.isdisjoint(ids):
                return ids
        return self._longest_tokens(wanted)

    def _longest_tokens(self, text: bytes) -> list[int]:
        """Up to where no token goes on."""
        ids, at = [], 0
        while at < len(text):
            ends = range(min(len(text), at + self._longest_bytes), at, -1)
            found = (token for end in ends for token in self._by_bytes.get(text[at:end], ()))
            token = next((token for token in found if token not in self.special_ids), None)
            if token is None:
                break
            ids.append(token)
            at += len(self.token_bytes(token))
        return ids

    @cached_property
    def _by_bytes(self) -> dict[bytes, list[int]]:
        tokens: dict[bytes, list[int]] = {}
        for token, text in self._token_bytes.items():
            tokens.setdefault(text, []).append(token)
        return tokens

    def special_but(self, texts: frozenset[str]) -> frozenset[int]:
        """Special tokens, without those of these texts."""
        if texts not in self._special_but:
            self._special_but[texts] = frozenset(
                token for token in self.special_ids if self.token_text(token) not in texts
            )
        return self._special_but[texts]

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        skipped = self.special_ids if skip_special else frozenset()
        text = b"".join([self.token_bytes(token) for token in token_ids if token not in skipped])
        return text.decode("utf-8", errors="replace")


def _fitted(first: int, second: int, room: int) -> tuple[int, int]:
    """The number of tokens of two texts that are kept: the longer is cut first, then both alike, as
    tokenizers do it."""
    short, long = sorted((first, second))
    if short + long > room:
        long = max(short, room - short)
        if short + long > room:
            short, long = room // 2, room - room // 2
    return (short, long) if first <= second else (long, short)


def _read_variables(text: str) -> dict[str, Any]:
    fix = """It must be a JSON object, such as '{"enable_thinking": false}'."""
    try:
        variables = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"chat_template_kwargs is not JSON: {error}.", fix=fix, param="chat_template_kwargs"
        ) from error
    if not isinstance(variables, dict):
        raise ConfigError(
            f"chat_template_kwargs is {text[:100]!r}.", fix=fix, param="chat_template_kwargs"
        )
    if taken := _OWN_VARIABLES & variables.keys():
        what = f"chat_template_kwargs may not set {sorted(taken)[0]!r}, which every chat has its own of."
        raise ConfigError(what, fix="Leave it out.", param="chat_template_kwargs")
    return variables


def _marks_survive(template: Template, variables: dict[str, Any]) -> bool:
    """Render a conversation without control tokens and one with all of them: both must have as many
    that are whole."""
    for roles in (["system", "user", "assistant", "user"], ["user", "assistant", "user"], ["user"]):
        counts = []
        for content in ("x y", f"x {' '.join(template.control.texts)} y"):
            messages = [{"role": role, "content": content} for role in roles]
            try:
                text = template.render(
                    messages, None, {**variables, "add_generation_prompt": True}, marks=True
                )
            except InvalidRequest:  # it may know no system message, for example
                break
            counts.append(template.control.count(text))
        if counts:
            return len(counts) == 2 and counts[0] == counts[1]
    return True


class StreamDecoder:
    """Ids to text as they come: a character is given out when its last byte is there, never half of
    it. `shown`: texts of special tokens that are not skipped."""

    def __init__(
        self, tokenizer: Tokenizer, skip_special: bool = True, shown: frozenset[str] = frozenset()
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_but(shown) if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """The rest of an unfinished character, as a replacement character."""
        return self._decoder.decode(b"", final=True)


# ---- bytes of tokens


def _byte_table(backend: Backend) -> tuple[dict[int, bytes], frozenset[int]]:
    """The bytes each id stands for, and which ids are special."""
    added = backend.get_added_tokens_decoder()
    special = frozenset(token_id for token_id, token in added.items() if token.special)
    decoder = backend.decoder.__getstate__().decode() if backend.decoder is not None else "null"
    vocab = backend.get_vocab(with_added_tokens=True)
    table: dict[int, bytes] = {}
    if '"ByteLevel"' in decoder:
        to_byte = {char: byte for byte, char in BYTE_CHARS.items()}
        for token, token_id in vocab.items():
            if token_id in added:
                table[token_id] = token.encode()
            else:
                try:
                    table[token_id] = bytes(map(to_byte.__getitem__, token))
                except KeyError:
                    table[token_id] = token.encode()
    elif "▁" in decoder or '"Metaspace"' in decoder:
        for token, token_id in vocab.items():
            if token_id in special:
                table[token_id] = token.encode()
            elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                table[token_id] = bytes([int(token[3:5], 16)])
            else:  # added tokens, too: Gemma's runs of spaces are
                table[token_id] = token.replace("▁", " ").encode()
    elif '"WordPiece"' in decoder:
        prefix = backend.decoder.prefix
        for token, token_id in vocab.items():
            continued = token.startswith(prefix) and token_id not in added
            table[token_id] = (
                token.removeprefix(prefix)
                if continued
                else token
                if token_id in added
                else f" {token}"
            ).encode()
    else:
        raise CheckpointError(
            f"The tokenizer's decoder is not supported: {decoder[:200]}.",
            fix="Byte-level, SentencePiece and WordPiece are.",
        )
    return table, special


# ---- where tokenizers come from


@contextlib.contextmanager
def _typed_errors(what: str) -> Iterator[None]:
    try:
        yield
    except (TidemillError, KeyboardInterrupt, SystemExit):
        raise
    # the library raises bare Exception, and PanicException, which is not an Exception
    except BaseException as error:
        raise CheckpointError(
            f"{what} cannot be read: {type(error).__name__}: {str(error)[:300]}."
        ) from error


def _read_template(template: str, adds_bos: bool) -> str:
    """Reads a template that a user gave: a template has braces, a path has none; some templates
    have names. These begin with the first token only if the tokenizer puts it before texts
    (`adds_bos`)."""
    if "{" in template:
        return template
    if template in NAMED and not Path(template).exists():
        return NAMED[template] if adds_bos else NAMED[template].removeprefix("{{ bos_token }}")
    try:
        return Path(template).expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        fix = (
            f"Give a file with a Jinja template, the template itself, or one of {', '.join(NAMED)}."
        )
        raise ConfigError(
            f"chat_template {template!r} cannot be read: {error}.", fix=fix, param="chat_template"
        ) from error


def _from_gguf(path: Path) -> Tokenizer:
    metadata = GGUFFile(path).metadata
    built = build_tokenizer(metadata, str(path))
    keys = {"default": "tokenizer.chat_template", "tool_use": "tokenizer.chat_template.tool_use"}
    return Tokenizer(
        built.backend,
        eos_token_ids=built.eos_token_ids,
        bos_token_id=built.bos_token_id,
        add_bos=built.add_bos,
        add_eos=built.add_eos,
        chat_template=joined_templates({name: metadata.get(key) for name, key in keys.items()}),
    )


def _from_folder(path: Path) -> Tokenizer:
    file = path / "tokenizer.json"
    settings = (
        read_json(path / "tokenizer_config.json")
        if (path / "tokenizer_config.json").is_file()
        else {}
    )
    backend = _read_backend(file) if file.is_file() else build_from_files(path, settings)
    eos = [*_eos_ids(path / "generation_config.json"), *_eos_ids(path / "config.json")]
    named = _token_id(backend, settings.get("eos_token"))
    eos += [named] if named is not None else []
    backend.no_truncation()
    backend.no_padding()
    plain, full = (backend.encode("a", add_special_tokens=special).ids for special in (False, True))
    at = next(
        (i for i in range(len(full) - len(plain) + 1) if full[i : i + len(plain)] == plain), 0
    )
    # what its post-processor writes around a text
    before, after = full[:at], full[at + len(plain) :]
    bos = before[0] if before else _token_id(backend, settings.get("bos_token"))
    # an encoder's: it ends a text, and parts two
    separator = _token_id(backend, settings.get("sep_token"))
    if after[:1] != [separator]:
        separator = None
    return Tokenizer(
        backend,
        eos_token_ids=eos,
        bos_token_id=bos,
        add_bos=bool(before),
        add_eos=bool(after) and (after[0] in eos or separator is not None),
        separator_id=separator,
        bos_in_chat=False,  # a folder's template writes its own
        chat_template=folder_template(path, settings),
        token_texts={
            name: text
            for name in TOKEN_VARIABLES
            if (text := _token_text(settings.get(name))) is not None
        },
    )


class _Added(msgspec.Struct):
    id: int


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[Any] = {}


class _File(msgspec.Struct):
    """The part of a tokenizer.json that decides how much memory the library takes for it."""

    model: _Model
    added_tokens: list[_Added] = []


def _read_backend(path: Path) -> Backend:
    data = read_file(path)
    with _typed_errors(str(path)):
        file = msgspec.json.decode(data, type=_File)
        vocab = file.model.vocab
        ids = [
            *(vocab.values() if isinstance(vocab, dict) else ()),
            *(token.id for token in file.added_tokens),
        ]
        limit = 2 * (len(vocab) + len(file.added_tokens)) + _SPARE_IDS
        if not all(0 <= token < limit for token in ids):
            raise CheckpointError(
                f"{path}: token ids are from {min(ids)} to {max(ids)}; with so few tokens, 0 to {limit - 1}."
            )
        return Backend.from_buffer(data)


def _eos_ids(path: Path) -> list[int]:
    value = read_json(path).get("eos_token_id") if path.is_file() else None
    ids = [token for token in (value if isinstance(value, list) else [value]) if token is not None]
    wrong = next((token for token in ids if type(token) is not int or not 0 <= token < 2**31), None)
    if wrong is not None:
        raise CheckpointError(
            f"{path}: eos_token_id is {str(wrong)[:100]}, which is not a token id."
        )
    return ids


def _token_id(backend: Backend, token: Any) -> int | None:
    text = _token_text(token)
    return None if text is None else backend.token_to_id(text)


def _token_text(token: Any) -> str | None:
    """A token as tokenizer_config.json has it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def folder_template(path: Path, settings: dict[str, Any]) -> str | None:
    """`settings`: of tokenizer_config.json, which has one template or a list of several by name.
    Files count first."""
    template = settings.get("chat_template")
    listed = template if isinstance(template, list) else [{"name": "default", "template": template}]
    by_name = {
        str(entry.get("name")): entry.get("template") for entry in listed if isinstance(entry, dict)
    }
    files = [path / "chat_template.jinja", *sorted((path / _TEMPLATE_FOLDER).glob("*.jinja"))]
    for file in files:
        if file.is_file():
            name = file.stem if file.parent != path else "default"
            # refused where it is compiled
            by_name[name] = read_file(file).decode(errors="surrogateescape")
    return joined_templates(by_name)
