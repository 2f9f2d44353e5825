"""Tokenizers from files, and text that never breaks a character."""

import itertools
import json
import random

import pytest
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as Backend

from tests.helpers import byte_tokenizer
from tidemill.errors import CheckpointError, ConfigError, ContextTooLong, InvalidRequest
from tidemill.frontend import chat
from tidemill.frontend.gguf_tokenizer import build_tokenizer
from tidemill.frontend.structured import Grammars
from tidemill.frontend.tokenizer import StreamDecoder, Tokenizer
from tidemill.types.sampling import Grammar

TEXTS = [
    "Hello world", " leading and  double  spaces ", "1234567 89", "it's we're I'll", "naïve café 東京 🦆👩‍🚀 ملاح",
    "a\n\n\tb\r\nc", "<|im_start|>user\nhi<|im_end|>", "x" * 300, "𝒳𝒴 \x00 \u200b", "",
]  # fmt: skip


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    return Tokenizer.load(smollm2_path)


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(smollm2, text):
    assert smollm2.decode(smollm2.encode(text), skip_special=False) == text


def test_byte_level_facts(smollm2):
    assert smollm2.eos_token_ids == (2, 0)  # the file's own, and <|endoftext|>
    assert smollm2.encode("<|im_end|>") == [2]
    assert smollm2.decode([2]) == ""
    digits = smollm2.encode("1234")
    # this vocabulary cuts digits apart
    assert [smollm2.token_text(token) for token in digits] == ["1", "2", "3", "4"]
    # its file says: no BOS
    assert smollm2.encode("x", add_special=True) == smollm2.encode("x", add_special=False)


def test_the_same_ids_as_the_published_tokenizer_definition(smollm2, smollm2_path):
    """SmolLM2's published tokenizer: digits apart, then byte-level with the GPT-2 pattern."""
    from tokenizers import models, pre_tokenizers

    from tidemill.weights.gguf import GGUFFile

    metadata = GGUFFile(smollm2_path).metadata
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    published = Backend(models.BPE(vocab, merges))
    published.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    rng = random.Random(0)
    for text in [*TEXTS, *("".join(rng.choices("ab 12\n'té東🦆.", k=40)) for _ in range(200))]:
        if "<|" not in text:
            assert smollm2.encode(text) == published.encode(text).ids


def test_streaming_never_gives_half_a_character(smollm2):
    text = "naïve 東京 🦆👩‍🚀 ملاح"
    decoder = StreamDecoder(smollm2)
    pieces = [decoder.push(token) for token in smollm2.encode(text)]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "" in pieces  # some tokens end in the middle of one
    assert "".join(pieces) + decoder.finish() == text


def test_an_unfinished_character_is_replaced_at_the_end(smollm2):
    decoder = StreamDecoder(smollm2)
    tokens = smollm2.encode("🦆")
    assert decoder.push(tokens[0]) == ""
    assert decoder.finish() == "\ufffd"


def test_random_tokens_decode_like_the_library(smollm2):
    rng = random.Random(3)
    for _ in range(50):
        tokens = [rng.randrange(20, 49000) for _ in range(30)]
        assert smollm2.decode(tokens) == smollm2._backend.decode(tokens)


def test_a_text_that_cannot_fit_is_refused_unread(smollm2):
    with pytest.raises(InvalidRequest, match="characters"):
        smollm2.encode("a" * 10_000_000, max_tokens=100)


def test_a_text_that_must_fit_is_refused_by_its_number_of_tokens(smollm2):
    assert len(smollm2.encode("1234", max_tokens=4, must_fit=True)) == 4
    assert len(smollm2.encode("12345", max_tokens=4)) == 5  # to be truncated later
    with pytest.raises(ContextTooLong, match="it has 5 tokens, and this model takes 4"):
        smollm2.encode("12345", max_tokens=4, must_fit=True)


def test_a_lone_surrogate_is_refused(smollm2):
    with pytest.raises(InvalidRequest, match="surrogate"):
        smollm2.encode("\ud800")


# ---- SentencePiece


def sentencepiece_metadata(**changes):
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "c",
        "ab",
        "▁a",
        "▁ab",
        "bc",
        "abc",
        "cab",
    ]
    types = [2, 3, 3, *[6] * 256, *[1] * 10]
    scores = [0.0] * 259 + [-9.0, -10.0, -11.0, -12.0, -2.0, -3.0, -1.0, -4.0, -5.0, -6.0]
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": pieces, "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
    } | changes  # fmt: skip


def sentencepiece_by_hand(text: str, metadata) -> list[str]:
    """The algorithm as SentencePiece states it: join the neighbours whose union scores best,
    leftmost first, then bytes."""
    scores = dict(
        zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"], strict=True)
    )
    kinds = dict(
        zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"], strict=True)
    )
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        options = [
            (-scores[a + b], i)
            for i, (a, b) in enumerate(itertools.pairwise(parts))
            if kinds.get(a + b) == 1
        ]
        if not options:
            break
        _, i = min(options)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    out = []
    for part in parts:
        out += [part] if part in scores else [f"<0x{byte:02X}>" for byte in part.encode()]
    return out


def test_sentencepiece_equals_the_algorithm():
    metadata = sentencepiece_metadata()
    built = build_tokenizer(metadata, "test")
    tokenizer = Tokenizer(
        built.backend, eos_token_ids=[2], bos_token_id=built.bos_token_id, add_bos=built.add_bos
    )
    rng = random.Random(0)
    for _ in range(300):
        text = "".join(rng.choices("abc é", k=rng.randrange(1, 12)))
        ids = tokenizer.encode(text, add_special=False)
        assert [metadata["tokenizer.ggml.tokens"][i] for i in ids] == sentencepiece_by_hand(
            text, metadata
        )
        assert tokenizer.decode(ids) == " " + text


def rewritten() -> Backend:
    """Tokens that are added, special and not, a normalizer and a space before the first word."""
    made = Backend(models.BPE(byte_fallback=False, unk_token="?"))
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["?", "<end>"])
    made.train_from_iterator(
        ["the tide the tide comes in"],
        trainers.BpeTrainer(vocab_size=300, special_tokens=["?", "<end>"], show_progress=False),
    )
    made.add_tokens([AddedToken("tide pool", single_word=True), AddedToken("<x>", lstrip=True)])
    return made


@pytest.mark.parametrize("kind", ["smollm2", "sentencepiece", "rewritten"])
def test_a_long_text_has_the_ids_that_it_has_alone(kind, request):
    """It is tokenized as a batch of one."""
    if kind == "smollm2":
        tokenizer = request.getfixturevalue("smollm2")
    elif kind == "sentencepiece":
        tokenizer = Tokenizer(
            build_tokenizer(sentencepiece_metadata(), "test").backend, eos_token_ids=[]
        )
    else:
        tokenizer = Tokenizer(rewritten(), eos_token_ids=[])
    rng = random.Random(0)
    words = [
        "The tide ",
        "ﬁ",
        "<x>",
        " <end>",
        "tide pool",
        "naïve",
        "東京",
        "🦆",
        "<|im_end|>",
        "\n",
        "  ",
        "ab",
    ]
    for _ in range(20):
        text = "".join(rng.choices(words, k=800))
        ids = tokenizer.encode(text, add_special=False)
        assert ids == tokenizer._backend.encode(text, add_special_tokens=False).ids
        pieces = tokenizer._backend.encode(text[:200], add_special_tokens=False).ids
        assert tokenizer.encode(text[:200], add_special=False) == pieces != ids


@pytest.mark.parametrize("is_added", [True, False])
def test_a_rendered_conversation_is_a_prompt_with_one_first_token(is_added):
    """Whether the tokenizer adds it or the template alone writes it."""
    built = build_tokenizer(
        sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": False}), "test"
    )
    tokenizer = Tokenizer(
        built.backend,
        eos_token_ids=[2],
        bos_token_id=1,
        add_bos=is_added,
        chat_template="{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
    )
    rendered = tokenizer.render_chat([{"role": "user", "content": "ab"}])
    ids = tokenizer.encode(tokenizer.as_prompt(rendered))
    assert ids == tokenizer.encode_chat([{"role": "user", "content": "ab"}]) == [1, 263]


def test_bos_and_space_flags_of_the_file():
    def encode(text, **changes):
        built = build_tokenizer(sentencepiece_metadata(**changes), "test")
        return Tokenizer(
            built.backend,
            eos_token_ids=built.eos_token_ids,
            bos_token_id=built.bos_token_id,
            add_bos=built.add_bos,
            add_eos=built.add_eos,
        ).encode(text)

    assert encode("ab")[0] == 1
    assert encode("ab", **{"tokenizer.ggml.add_bos_token": False})[0] != 1
    assert encode("ab", **{"tokenizer.ggml.add_space_prefix": False}) == [1, 263]
    assert encode("ab", **{"tokenizer.ggml.add_eos_token": True})[-1] == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.scores": [1.0]}, "tokenizer.ggml.scores"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type"),
        (
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": "strange",
                "tokenizer.ggml.merges": ["a b"],
            },
            "'strange'",
        ),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["ab"]}, "not a pair"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["q z"]}, "do not fit"),
    ],
)
def test_a_broken_tokenizer_is_named(changes, words):
    with pytest.raises(CheckpointError, match=words):
        build_tokenizer(sentencepiece_metadata(**changes), "test")


# ---- chat


def test_chat_template_of_the_file(smollm2):
    text = smollm2.render_chat([{"role": "user", "content": "hi"}])
    assert text.startswith("<|im_start|>system\nYou are")
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    parts = smollm2.render_chat(
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}],
            }
        ]
    )
    assert parts == text


def test_folder_tokenizer_with_template(tmp_path):
    byte_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_token_ids == (1,)
    assert (
        tokenizer.render_chat([{"role": "user", "content": "hé"}])
        == "<|user|>hé<|end|><|assistant|>"
    )
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    assert Tokenizer.load(tmp_path).render_chat([{"role": "user", "content": "x"}]) == "x!"


def test_settings_of_a_training_run_do_not_cut_prompts(tmp_path):
    byte_tokenizer(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(8)
    backend.enable_padding(length=16)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert len(tokenizer.encode("x" * 30)) == 30


def test_a_post_processor_is_respected(tmp_path):
    from tokenizers.processors import TemplateProcessing

    byte_tokenizer(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    ids = tokenizer.encode("ab")
    assert (ids[0], ids[-1], len(ids)) == (0, 1, 4)
    assert len(tokenizer.encode("ab", add_special=False)) == 2


def test_a_template_that_is_broken_leaves_completions(tmp_path):
    byte_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("x")
    with pytest.raises(InvalidRequest, match="cannot be compiled"):
        tokenizer.render_chat([{"role": "user", "content": "x"}])


def test_what_published_templates_use():
    from tidemill.frontend.chat import ChatTemplate

    template = "{% generation %}{{ messages[0]['content'] }}{% endgeneration %}{% if tools is not none %}T{% endif %}"
    assert ChatTemplate(template).render([{"role": "user", "content": "x"}]) == "x"


def test_no_template_says_so(tmp_path):
    byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(InvalidRequest, match="no chat template"):
        Tokenizer.load(tmp_path).render_chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('no') }}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ range(100000000) | list }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_templates_can_do_nothing_but_write_text(template):
    from tidemill.frontend.chat import ChatTemplate

    with pytest.raises(InvalidRequest):
        ChatTemplate(template).render([{"role": "user", "content": "x"}])


def test_a_template_that_does_not_compile_is_named():
    from tidemill.frontend.chat import ChatTemplate

    with pytest.raises(CheckpointError, match="cannot be compiled"):
        ChatTemplate("{% for %}")


def test_a_template_that_does_not_end_is_stopped(monkeypatch):
    monkeypatch.setattr(chat, "MAX_CHARS", 10_000)
    template = chat.ChatTemplate(
        "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}"
    )
    with pytest.raises(InvalidRequest, match="does not come to an end"):
        template.render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        (
            "chatml",
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        ),
        ("llama2", "[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST]"),
        ("gemma", "<start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n"),
        ("mistral-v7", "[SYSTEM_PROMPT] Be brief.[/SYSTEM_PROMPT][INST] Hi[/INST]"),
    ],
)
def test_a_chat_template_by_its_name(tiny_folder, tmp_path, name, prompt):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert Tokenizer.load(tiny_folder, name).render_chat(messages) == prompt
    with_bos = Backend.from_file(str(tiny_folder / "tokenizer.json"))
    with_bos.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    with_bos.save(str(tmp_path / "tokenizer.json"))
    begun = Tokenizer.load(tmp_path, name)
    assert begun.render_chat(messages) == ("" if name == "chatml" else "<s>") + prompt
    assert begun.as_prompt(begun.render_chat(messages)) == prompt  # which `encode` begins with it


def test_an_unknown_name_of_a_chat_template(tiny_folder):
    with pytest.raises(ConfigError, match="llama3"):
        Tokenizer.load(tiny_folder, "lama3")


def test_variables_of_the_template(thinking_folder):
    with pytest.raises(ConfigError, match="may not set 'messages'"):
        Tokenizer.load(thinking_folder, chat_template_kwargs='{"messages": []}')
    tokenizer = Tokenizer.load(thinking_folder, chat_template_kwargs='{"enable_thinking": false}')
    plain, messages = Tokenizer.load(thinking_folder), [{"role": "user", "content": "hi"}]
    off = plain.render_chat(messages, variables={"enable_thinking": False})
    assert tokenizer.render_chat(messages) == off != plain.render_chat(messages)
    # what a request gives counts
    on = tokenizer.render_chat(messages, variables={"enable_thinking": True})
    assert on == plain.render_chat(messages, variables={"enable_thinking": True}) != off


# ---- text that a tokenizer writes otherwise than it reads it


def runs_of_spaces(prefix: bool) -> Tokenizer:
    """As Gemma's: runs of spaces are added tokens that are not special. `prefix`: a space is put
    before texts, as Llama 2's."""
    from tokenizers import AddedToken, decoders, models, normalizers

    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "▁▁",
        "▁▁▁",
        "▁a",
        "é",
    ]
    merges = [("▁", "▁"), ("▁▁", "▁"), ("▁", "a")]
    backend = Backend(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, merges, byte_fallback=True)
    )
    first = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence(
        [*first, normalizers.NFC(), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_tokens([AddedToken(piece, normalized=False) for piece in ("▁▁", "▁▁▁")])
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")]
    )
    return Tokenizer(backend, eos_token_ids=[2])


@pytest.mark.parametrize("text", ["a\n   a:\n  b  a", "  b", "é  東 🦆\t\x00"])
def test_runs_of_spaces_that_are_added_tokens(text):
    tokenizer = runs_of_spaces(prefix=False)
    ids = tokenizer.encode(text)
    decoder = StreamDecoder(tokenizer)
    assert tokenizer.decode(ids) == text == tokenizer._backend.decode(ids)
    assert "".join(map(decoder.push, ids)) + decoder.finish() == text


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("text", ["a  b", "   a", "▁▁a", "cafe\u0301  b", "a</s>b", "東"])
def test_forced_text_is_spelled_as_it_is(prefix, text):
    """A tokenizer may put a space before a text, write it in another Unicode form, or see control
    tokens in it: tokens that are forced by a grammar must not."""
    tokenizer = runs_of_spaces(prefix)
    matcher = Grammars.of("llguidance", tokenizer, tokenizer.vocab_size).matcher(
        Grammar("choice", json.dumps([text]))
    )
    ids = []
    while not matcher.is_over:
        words = matcher.mask()
        ids.append(
            next(
                token
                for token in range(3, tokenizer.vocab_size)
                if words[token // 32] >> (token % 32) & 1
            )
        )
        matcher.take(ids[-1:])
        assert not matcher.error
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(tokenizer.spell(text), skip_special=False) == text
