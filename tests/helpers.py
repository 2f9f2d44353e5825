"""Shared pieces of tests."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tests.waiting import LONG_S as LONG_S
from tidemill.config import EngineConfig, EngineOptions, resolve
from tidemill.engine.core import EngineCore
from tidemill.engine.load import core_of
from tidemill.engine.parts.drafting import Drafting
from tidemill.engine.parts.structured import StructuredOutput
from tidemill.kernels import machine as here
from tidemill.kernels import native
from tidemill.models.base import CausalLM
from tidemill.models.registry import model_class
from tidemill.quant import SCHEMES, WeightPlan
from tidemill.runner.spec import Ask, Drafter
from tidemill.sched.tree import Tree, ancestors_of
from tidemill.types.events import Event
from tidemill.types.model_config import ModelConfig
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Delta, Refused, StepOutput, Submit
from tidemill.weights.checkpoint import open_checkpoint
from tidemill.weights.gguf import GGUFFile

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def llama_of_gguf(path: Path) -> Any:
    """A Llama of a GGUF file, for Transformers to save, with the values of the gguf package. There,
    rows of queries and keys are in pairs; here, the two halves of a head follow each other."""
    import gguf
    from transformers import LlamaConfig, LlamaForCausalLM

    told = {name.removeprefix("llama."): value for name, value in GGUFFile(path).metadata.items()}
    heads = {"attn_q": told["attention.head_count"], "attn_k": told["attention.head_count_kv"]}
    config = LlamaConfig(
        vocab_size=told["vocab_size"],
        hidden_size=told["embedding_length"],
        intermediate_size=told["feed_forward_length"],
        num_hidden_layers=told["block_count"],
        num_attention_heads=heads["attn_q"],
        num_key_value_heads=heads["attn_k"],
        max_position_embeddings=told["context_length"],
        rms_norm_eps=told["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_theta": told["rope.freq_base"], "rope_type": "default"},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    names = {
        "token_embd": "embed_tokens", "output_norm": "norm", "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj",
        **{f"attn_{one}": f"self_attn.{one}_proj" for one in "qkv"},
        **{f"ffn_{one}": f"mlp.{one}_proj" for one in ("gate", "up", "down")},
    }  # fmt: skip
    values = {}
    for tensor in gguf.GGUFReader(path).tensors:
        *place, kind, _ = tensor.name.split(".")  # blk, number, kind, weight
        value = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        if kind in heads:
            value = (
                value.view(heads[kind], -1, 2, value.shape[1]).transpose(1, 2).reshape(value.shape)
            )
        values["model." + (f"layers.{place[1]}." if place else "") + f"{names[kind]}.weight"] = (
            value
        )
    with torch.device("meta"):  # random values would take longer than all the rest
        made = LlamaForCausalLM(config)
    missing, unknown = made.load_state_dict(values, strict=False, assign=True)
    assert (missing, unknown) == (["lm_head.weight"], [])  # which is tied
    made.tie_weights()
    return made


def make_llama(path: Path | None = None, seed: int = 0, **config: Any):
    """A random Llama by Transformers, saved as safetensors if a path is given. Weights large enough
    to give varied logits."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        "vocab_size": 256, "hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
        "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.2,
    } | config  # fmt: skip
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**settings)).eval().float()
    for name, weight in model.named_parameters():
        if "norm" in name or "bias" in name:
            weight.data.normal_(1.0 if "norm" in name else 0.0, 0.1)
    if path is not None:
        model.save_pretrained(path)
    return model


def byte_tokenizer(path: Path) -> None:
    """A byte-level tokenizer of 256 bytes and a few special tokens, with a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE({char: i + 2 for i, char in enumerate(alphabet)} | {"<s>": 0, "</s>": 1}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"eos_token": "</s>", "bos_token": "<s>", "chat_template": CHAT_TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


THINKING_TEMPLATE = CHAT_TEMPLATE.replace(
    "<|assistant|>{% endif %}",
    "<|assistant|>{{ '<think>' if enable_thinking is not false else '<think>\\n\\n</think>\\n\\n' }}{% endif %}",
)


def thinking_tokenizer(path: Path) -> None:
    """The same with <think> and </think> as tokens, and a template that opens the reasoning unless
    it is switched off."""
    from tokenizers import AddedToken, Tokenizer

    byte_tokenizer(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in ("<think>", "</think>")]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    settings = json.loads((path / "tokenizer_config.json").read_text()) | {
        "chat_template": THINKING_TEMPLATE
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


_DTYPES = {"dense": "float32", "quantized": "quantized"}  # by scheme


def load_model(path: Path, dtype: str = "float32") -> CausalLM:
    checkpoint = open_checkpoint(path)
    cls = model_class(checkpoint)
    return cls.load(checkpoint, cls.read_config(checkpoint), WeightPlan(SCHEMES[dtype]))


def engine_config(
    model: CausalLM, draft: ModelConfig | None = None, **options: Any
) -> EngineConfig:
    # those of torch wait for each other by spinning, and another worker has the other core
    threads = 2 if native.lib else 1
    options = {
        "kv_memory_bytes": 64 * 2**20,
        "threads": threads,
        "dtype": "quantized" if model.weight_plan.scheme == "quantized" else "float32",
    } | options
    machine = replace(here.detect(), num_cores=2, memory_bytes=8 * 2**30, available_bytes=8 * 2**30)
    return resolve(EngineOptions(**options), model.config, machine, draft)


def draft_core(model: CausalLM, draft: CausalLM, **options: Any) -> EngineCore:
    """All drafts of the draft model are verified."""
    given = {"adaptive_drafts": False, "max_drafts": 5, "draft_model": "draft"} | options
    config = engine_config(model, draft.config, **given)
    return core_of(model, config, draft=draft)


def make_core(model: CausalLM, **options: Any) -> EngineCore:
    return core_of(model, engine_config(model, **options))


def structured_core(model: CausalLM, folder: Path, backend: str, **options: Any) -> EngineCore:
    """It knows the tokenizer of the folder, for grammars."""
    core = make_core(model, structured_backend=backend, **options)
    core.part(StructuredOutput).tokenizer_path = folder
    return core


class Answer:
    """Everything the engine said about one sample."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[Any] = []
        self.prompt_logprobs: Any = None
        self.finish_reason: str | None = None
        self.last: Delta | None = None

    def __eq__(self, other: object) -> bool:
        """Bit for bit: logprobs are compared as floats, not approximately."""
        return isinstance(other, Answer) and vars(self) | {"last": None} == vars(other) | {
            "last": None
        }

    def __repr__(self) -> str:
        return f"Answer({self.tokens}, {self.finish_reason}, {[entry.logprob for entry in self.logprobs]})"


def run(
    core: EngineCore, requests: dict[str, tuple[Any, ...]], eos: tuple[int, ...] = ()
) -> dict[str, Answer]:
    """Submit everything at once and step until it is done. Samples beyond the first are named
    id:index. `requests`: a prompt, parameters, and segments and their contents, if it has some."""
    answers: dict[str, Answer] = {}
    for name, (prompt, params, *inputs) in requests.items():
        more = dict(zip(("segments", "contents"), inputs, strict=False))
        core.submit(Submit(name, prompt, params, list(eos), **more))
        for index in range(params.n):
            answers[name if index == 0 else f"{name}:{index}"] = Answer()
    while core.has_work:
        take(core, answers)
    core.scheduler.table.check_integrity()
    return answers


def take(core: EngineCore, answers: dict[str, Answer]) -> None:
    output, failed = core.step()
    assert not failed
    for delta in output.deltas:
        answer = answers[
            delta.request_id if delta.index == 0 else f"{delta.request_id}:{delta.index}"
        ]
        answer.tokens += delta.token_ids
        answer.logprobs += delta.logprobs or []
        answer.prompt_logprobs = delta.prompt_logprobs or answer.prompt_logprobs
        answer.finish_reason = delta.finish_reason
        answer.last = delta


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **more)


@torch.inference_mode()
def reference_agrees(
    reference: Any, prompt: list[int], output: list[int], near_tie: float = 1e-4
) -> tuple[int, int]:
    """Teacher-forced: each output token must be the reference's best after the same tokens, unless
    its two best are a near-tie. Returns how many agreed and how many were excused; by induction the
    sequences are equal up to the first excuse."""
    logits = reference(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :].float()
    agreed = excused = 0
    for token, row in zip(output, logits, strict=True):
        best = row.topk(2).values
        if int(row.argmax()) == token:
            agreed += 1
        else:
            assert best[0] - best[1] < near_tie, (
                f"token {token} at {agreed + excused}, reference {int(row.argmax())}"
            )
            assert best[0] - row[token] < near_tie
            excused += 1
    return agreed, excused


@dataclass
class Guesser:
    """A drafter that knows what comes, and is right as often as it is told to be."""

    answers: dict[tuple[int, ...], list[int]] = field(default_factory=dict)  # prompt to output
    chance: float = 0.7
    name: str = "guesser"
    is_free: bool = True
    num_asked: int = 0

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        self.num_asked += len(asks)
        made = []
        for ask in asks:
            draw = random.Random(len(ask.tokens))
            right = self.answers.get(tuple(ask.tokens[: ask.num_prompt]), [])[
                len(ask.tokens) - ask.num_prompt :
            ]
            right = (right + [1] * ask.most)[: ask.most]
            made.append(
                [token if draw.random() < self.chance else (token + 1) % 60 for token in right]
            )
        return made

    def forget(self, seq: int, tokens: Sequence[int], salt: str) -> None:
        pass


@dataclass
class Grower(Guesser):
    """Trees of any shape. What comes is on a branch of each, as far as `chance` goes, or not at
    all."""

    vocab_size: int = 250

    def propose(self, asks: Sequence[Ask]) -> list[Any]:
        return [
            self._grow(ask, chain) for ask, chain in zip(asks, super().propose(asks), strict=True)
        ]

    def _grow(self, ask: Ask, chain: list[int]) -> Tree:
        draw, tokens, parents = random.Random(len(ask.tokens)), list[int](), list[int]()
        right = -1  # the draft that all right ones so far end in
        while len(tokens) < ask.most:
            parent = draw.randrange(-1, len(tokens))
            if draw.random() < 0.6:
                parent, token = right, chain[len(ancestors_of(parents, right))]
                right = len(tokens)
            else:
                token = draw.randrange(self.vocab_size)
            tokens.append(token)
            parents.append(parent)
        return Tree(tokens, parents)


def guess_with(
    core: EngineCore, *drafters: Drafter, most: int = 5, slope: float = 0.3, adaptive: bool = False
) -> EngineCore:
    """The core with these drafters. Unless it is `adaptive`, all their drafts are verified, up to
    `most` for a request."""
    core.use(*core.parts_but(Drafting), Drafting(drafters, most, slope, adaptive=adaptive))
    return core


def watch(core: EngineCore) -> list[Event]:
    """The events of the core's steps from now on."""
    seen, step = list[Event](), core.step

    def watched() -> tuple[StepOutput, list[Refused]]:
        output, failed = step()
        seen.extend(output.events)
        return output, failed

    core.step = watched  # type: ignore[method-assign]
    return seen


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whatever bits a NaN has: machines write different ones."""
    if not one.is_floating_point():
        return torch.equal(one, other)
    nan = one.isnan()
    bits = [
        t.contiguous().view(torch.int16 if t.element_size() == 2 else torch.int32)[~nan]
        for t in (one, other)
    ]
    return torch.equal(nan, other.isnan()) and torch.equal(*bits)


KINDS_OF_CACHE = ("llama", "windows", "states")


def model_with_cache(kind: str, path: Path) -> CausalLM:
    """A small model of random weights whose layers all see everything, or through windows, or keep
    states."""
    import transformers

    sizes = {
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "initializer_range": 0.2,
    }
    if kind == "llama":
        make_llama(path, seed=5, **sizes)
    elif kind == "windows":
        heads = {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "sliding_window": 24,
        }
        kinds = ["sliding_attention", "sliding_attention", "full_attention"]
        config = transformers.Gemma3TextConfig(
            **sizes, **heads, max_position_embeddings=256, layer_types=kinds
        )
        transformers.Gemma3ForCausalLM(config).save_pretrained(path)
    else:
        sizes.pop("intermediate_size")
        transformers.MambaForCausalLM(
            transformers.MambaConfig(**sizes, state_size=4)
        ).save_pretrained(path)
    return load_model(path)
