"""The default model, end to end, against Transformers in float32."""

import math

import pytest
import torch

from bench.perplexity import mean_logprob, text_ids
from tests.helpers import greedy, load_model, make_core, reference_agrees, run
from tests.models.test_llama import prompt_logits
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.kernels import native
from tidemill.sched.policies import POLICIES

TOPICS = [
    "tide mills", "the French Revolution", "how bread rises", "prime numbers", "a lost dog", "rain in the desert", "the moon",
    "computers", "why the sky is blue", "a friendly dragon", "gravity", "a recipe for soup", "chess", "old maps", "honey bees",
    "the Roman army", "a letter home", "volcanoes", "the alphabet", "trees in winter", "glass", "the number seven", "jazz",
    "a train journey", "salt",
]  # fmt: skip
TEXTS = [f"Write about {topic}." for topic in TOPICS] + [
    f"{start} {topic}"
    for start, topic in zip(
        ["The history of", "Once upon a time there was", "def", "Q: What is", "1. "] * 5,
        TOPICS,
        strict=True,
    )
]


def asked_of(path, every=1):
    """Tokens of the texts, every other one as a chat."""
    tokenizer = Tokenizer.load(path)
    asked = {
        text: tokenizer.encode_chat([{"role": "user", "content": text}])
        if i % 2
        else tokenizer.encode(text)
        for i, text in enumerate(TEXTS)
        if i % every == 0
    }
    assert len(asked) == -(-50 // every)
    return asked


def answers_agree(reference, asked, answers, num_tokens=64):
    """The tokens of each are those of the reference. How many were excused as near-ties."""
    agreed = excused = 0
    for text, ids in asked.items():
        assert len(answers[text].tokens) == num_tokens
        a, e = reference_agrees(reference, ids, answers[text].tokens)
        agreed, excused = agreed + a, excused + e
    assert agreed + excused == num_tokens * len(asked)
    assert excused <= 16, f"{excused} near-ties are too many to be near-ties"
    return excused


@pytest.fixture(scope="module")
def model(smollm2_path):
    return load_model(smollm2_path)


@pytest.mark.parametrize(
    ("page_size", "every", "num_tokens"),
    [(16, 25, 16), *(pytest.param(size, 1, 64, marks=pytest.mark.slow) for size in (1, 16, 32))],
)
def test_fifty_prompts_of_64_tokens_equal_transformers(
    smollm2_path, smollm2_reference, model, page_size, every, num_tokens
):
    """All of them in `make test-slow`; the beginnings of every 25th in `make test`."""
    reference, _ = smollm2_reference
    asked = asked_of(smollm2_path, every)
    core = make_core(model, kv_memory_bytes=2**30, page_size=page_size)
    answers = run(core, {text: (ids, greedy(num_tokens)) for text, ids in asked.items()})
    answers_agree(reference, asked, answers, num_tokens)
    with torch.inference_mode():
        for text in list(asked)[:2]:
            expected = reference(torch.tensor([asked[text]])).logits[0]
            assert (
                prompt_logits(model, asked[text], kv_memory_bytes=2**28) - expected
            ).abs().max() < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_prompts_of_mixed_lengths_equal_transformers_under_each_policy(
    smollm2_path, smollm2_reference, model, policy
):
    """More of them than slots, of 1 to 50 tokens, so that batches are drained, refilled and cut in
    every way there is."""
    reference, _ = smollm2_reference
    tokenizer = Tokenizer.load(smollm2_path)
    prompts = [tokenizer.encode(text) for text in TEXTS[::4]]
    lengths = [1 + 37 * i % 50 for i in range(len(prompts))]
    core = make_core(model, kv_memory_bytes=2**30, policy=policy, max_requests=6, token_budget=48)
    asked = {
        str(i): (prompt, greedy(num))
        for i, (prompt, num) in enumerate(zip(prompts, lengths, strict=True))
    }
    answers = run(core, asked)
    excused = 0
    for i, (prompt, num) in enumerate(zip(prompts, lengths, strict=True)):
        assert len(answers[str(i)].tokens) == num
        excused += reference_agrees(reference, prompt, answers[str(i)].tokens)[1]
    assert excused <= 4, f"{excused} near-ties are too many to be near-ties"


def test_prompt_logprobs_equal_transformers(smollm2_path, smollm2_reference, model):
    """Of each token of a prompt after the first, and of the three likeliest in its place."""
    reference, _ = smollm2_reference
    tokenizer = Tokenizer.load(smollm2_path)
    prompts = [
        tokenizer.encode(text)
        for text in (
            "The tide mill grinds twice a day, when the pond is full.",
            TEXTS[26],
            TEXTS[33],
        )
    ]
    core = make_core(model, kv_memory_bytes=2**28, token_budget=8, max_requests=4)
    answers = run(
        core, {str(i): (ids, greedy(1, prompt_logprobs=3)) for i, ids in enumerate(prompts)}
    )
    for i, ids in enumerate(prompts):
        with torch.inference_mode():
            expected = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
        entries = answers[str(i)].prompt_logprobs
        assert [entry.token_id for entry in entries] == ids[1:]
        for entry, row in zip(entries, expected, strict=False):
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-3)
            assert [value for _, value in entry.top] == pytest.approx(
                row.topk(3).values.tolist(), abs=1e-3
            )
            assert [value for _, value in entry.top] == pytest.approx(
                [float(row[token]) for token, _ in entry.top], abs=1e-3
            )


def test_safetensors_and_gguf_give_the_same_bits(model, smollm2_reference):
    """Two readers, one model: the folder that Transformers wrote against the file it read."""
    _, folder = smollm2_reference
    ids = list(range(1000, 1040))
    one = prompt_logits(model, ids, kv_memory_bytes=2**28)
    other = prompt_logits(load_model(folder), ids, kv_memory_bytes=2**28)
    assert torch.equal(one, other)


@pytest.mark.skipif(native.lib is None, reason=native.why)
@pytest.mark.parametrize("num_tokens", [256, pytest.param(20 * 1024, marks=pytest.mark.slow)])
def test_quantized_matmuls_keep_the_quality(num_tokens):
    """Perplexity within 1 % of float32 compute on the same file."""
    ids = text_ids("smollm2", num_tokens)
    quantized, exact = (
        math.exp(-mean_logprob("smollm2", dtype, ids)) for dtype in ("quantized", "float32")
    )
    assert quantized == pytest.approx(exact, rel=0.01)
