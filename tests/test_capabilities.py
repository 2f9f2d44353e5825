"""The capability table: it names what there is, what it refuses is refused with its words, and what
it allows has the tokens of each feature alone."""

import random
from dataclasses import replace
from itertools import combinations

import pytest

from tests.helpers import greedy, run
from tests.test_config import LARGE, SMOLLM2
from tidemill.capabilities import (
    FEATURES,
    REFUSALS,
    asked,
    check,
    check_request,
    in_use,
    requested,
    why_not,
)
from tidemill.capabilities.features import CALIBRATED
from tidemill.cli.options import OPTIONS
from tidemill.config import EngineOptions, resolve
from tidemill.config.resolve import set_up
from tidemill.engine.load import load_core
from tidemill.errors import ConfigError, InvalidRequest
from tidemill.types.model_config import MoESpec, Pooler, Rotation, StateSpec
from tidemill.types.sampling import SamplingParams

PROMPT = [(7 * i) % 250 for i in range(70)]
# Options of features that change no token, and of those that do.
NEUTRAL = {
    "kv-layout virtual": {"kv_layout": "virtual"},
    "no-prefix-caching": {"prefix_caching": False},
    "prefix-index radix": {"prefix_index": "radix"},
    "queue-order prefix": {"queue_order": "prefix"},
    "kv-host-memory": {"kv_host_memory_bytes": 2**22},
    "kv-disk": {"kv_disk": "DISK:4M"},
    "kv-export": {"kv_export": "shm:NAME:4M"},
    "no-evict": {"evict": False},
    "no-pinned": {"max_pinned": 0.0},
    "policy dynamic": {"policy": "dynamic", "batch_window_ms": 0.0},
    "speculate off": {"speculate": "off"},
    "speculate ngram": {"speculate": "ngram"},
    "speculate suffix": {"speculate": "suffix"},
    "weight-memory": {"weight_memory_bytes": 560_000, "weight_cache": "DISK:1G"},
    "acceptance rejection": {"acceptance": "rejection"},
}
CHANGING = {
    f"kv-dtype {name}": {"kv_dtype": name} for name in ("bfloat16", "float16", "int8", "int4")
}
OPTIONS_OF = NEUTRAL | CHANGING
REQUESTS = {
    **{
        f"kv-policy {kind}": {"kv_policy": {"kind": kind, **fields}}
        for kind, fields in {
            "window": {"recent": 32}, "streaming": {"sinks": 4, "recent": 28}, "h2o": {"budget": 40, "recent": 16},
            "snapkv": {"budget": 32, "observed": 8}, "quest": {"budget": 32}, "double": {"budget": 32},
            "random": {"budget": 32},
        }.items()
    },
    "grammar": {"grammar": {"regex": "[a-f ]{6}"}},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "logit_bias": {"logit_bias": {5: 3.0}},
    "allowed_token_ids": {"allowed_token_ids": list(range(40, 200))},
    "prompt_logprobs": {"prompt_logprobs": 1},
}  # fmt: skip
RUNNABLE = [*OPTIONS_OF, *REQUESTS]
STATE = StateSpec(tag="state", kind="mamba2", num_heads=9, head_dim=64, state_size=16)
MODELS = {  # shapes that have a feature
    "encoder": {"pooler": Pooler(how="mean")},
    "states": {"layers": (STATE,) * 30},
    "experts": {"experts": (MoESpec(num_experts=4, top_k=2, expert_size=64, renormalise=True),) * 30},
    "window": {"window": 64}, "mixed windows": {"window": 64, "every": 2}, "softcap": {"softcap": 5.0},
    "sinks": {"has_sinks": True}, "ALiBi": {"has_alibi": True}, "no gate": {"is_gated": False},
    "quantized checkpoint": {"stored": {"Q4_1": 106_168_320}}, "heads below 64": {"head_dim": 32},
    "heads below 32": {"head_dim": 16}, "odd heads": {"head_dim": 63}, "heads of no eighths": {"head_dim": 60},
    "heads of no power": {"head_dim": 96}, "FlexAttention": {"head_dim": 96}, "no ReLU": {},
    "plain checkpoint": {}, "no experts": {},
}  # fmt: skip
GIVEN = OPTIONS_OF | {
    "CPU": {"device": "cpu"}, "GPU": {"device": "cuda"}, "lora": {"max_loras": 2}, "fast-math": {"fast_math": True},
    "nano-batching": {"nano_batching": "on"}, "ranks": {"tensor_parallel": 2}, "NIXL": {"kv_export": "nixl:h:1"},
    "tensor-parallel": {"tensor_parallel": 2}, "pipeline-parallel": {"pipeline_parallel": 2},
    "kv-calibration": {"kv_calibration": "x"}, "hot-neurons": {"hot_neurons": "x"},
    "contextual-sparsity": {"contextual_sparsity": "x"}, "expert-parallel": {"expert_parallel": True},
    "remote-workers": {"remote_workers": 1}, "batch-window": {"batch_window_ms": 1.0},
    "draft-heads": {"draft_heads": "x"}, "draft-model": {"draft_model": "x", "speculate": "off"},
    "kv-import": {"kv_import": "shm:x"},
    "no grid": {"tensor_parallel": 2}, "kv-dtype": {"kv_dtype": "int8"}, "no kernels": {},
    "pipeline-layers": {"pipeline_layers": "1,2"},
    **{f"kv-dtype {name}": {"kv_dtype": name} for name in ("float32", "fp8", "kvquant4", "kvquant3")},
    **{f"{option} {name}": {option: name} for option in ("dtype",) for name in ("float32", "bfloat16", "quantized")},
    **{f"quantization {name}": {"quantization": name} for name in ("fp8", "int8", "int4", "sparse24")},
    **{
        f"speculate {name}": {"speculate": name}
        for name in ("forced", "medusa", "eagle", "eagle-tree", "exit", "exit-bandit", "draft-model")
    },
    **{f"tensor-layout {name}": {"tensor_layout": name} for name in ("2d", "gathered", "phased")},
    **{f"collectives {name}": {"collectives": name} for name in ("ipc", "nccl")},
}  # fmt: skip


def test_every_choice_of_an_option_has_a_row_and_every_name_is_known():
    for name in (
        "dtype",
        "quantization",
        "kv-dtype",
        "speculate",
        "tensor-layout",
        "collectives",
        "kv-layout",
    ):
        (option,) = (option for option in OPTIONS if option.name == name)
        neutral = {"auto", "none", "1d", "paged"}
        assert all(f"{name} {choice}" in FEATURES for choice in set(option.choices) - neutral), name
    fields = {option.field for option in OPTIONS} | {option.key for option in OPTIONS}
    for refusal in REFUSALS:
        assert {refusal.feature, *refusal.others, *refusal.needed} <= set(FEATURES)
        assert refusal.why
        assert refusal.fix.endswith(".")
        feature = FEATURES[refusal.feature]
        assert feature.param in fields or feature.asked is None


def shaped(*names: str):
    changes = {key: value for name in names for key, value in MODELS.get(name, {}).items()}
    own = {"window", "softcap", "has_sinks", "has_alibi", "head_dim"}
    spec, every = {key: changes.pop(key) for key in own & set(changes)}, changes.pop("every", 1)
    layers = tuple(
        replace(one, rotation=Rotation(num_dims=one.head_dim, theta=1e4)) for one in SMOLLM2.layers
    )
    layers = tuple(one.but(**spec) if i % every == 0 else one for i, one in enumerate(layers))
    return replace(SMOLLM2, **{"layers": layers} | changes)


REFUSED = [
    refusal
    for refusal in REFUSALS
    if not refusal.is_left_out
    and {refusal.feature, *refusal.others} <= {*GIVEN, *MODELS}
    and refusal.feature in GIVEN
]


def test_what_is_refused_is_refused_with_its_words():
    """By `resolve`, from options, a model and a machine that have the features."""
    assert len(REFUSED) > 150
    for refusal in REFUSED:
        names = (refusal.feature, *refusal.others)
        device = {"device": "cuda"} if {"GPU", "FlexAttention"} & {*names} else {"device": "cpu"}
        given = device | {
            key: value for name in names for key, value in GIVEN.get(name, {}).items()
        }
        machine = replace(LARGE, gpu="none", gpu_bytes=2**36, gpu_free_bytes=2**36, num_gpus=2)
        if "no kernels" in names:
            machine = replace(machine, kernels="")
        options, model = EngineOptions(**given), shaped(*names)
        setup = set_up(options, model, machine)
        assert {*names} <= in_use(setup), (names, given)
        with pytest.raises(ConfigError) as caught:
            resolve(options, model, machine)
        expected = next(
            one
            for one in REFUSALS
            if one.feature in in_use(setup) and one.holds(in_use(setup)) and not one.is_left_out
        )
        assert caught.value.message == expected.message(setup.notes)
        assert caught.value.fix == expected.fix
        assert refusal.holds(in_use(setup))


@pytest.mark.parametrize("kind", CALIBRATED)
def test_a_calibrated_cache_may_be_asked_for(kind):
    """Also where only the options are known: servers and LLM look at them before a model is read."""
    check(asked(EngineOptions(kv_dtype=kind, kv_calibration="file")))
    with pytest.raises(ConfigError, match="kv-calibration"):
        check(asked(EngineOptions(kv_calibration="file")))
    with pytest.raises(ConfigError, match="kv-calibration"):
        check(asked(EngineOptions(kv_dtype=kind)))


def test_requests_are_refused_when_they_are_made():
    beams = SamplingParams(n=1).beams
    assert beams is None
    with pytest.raises(
        InvalidRequest, match="The KV policy h2o cannot be combined with pooling"
    ) as caught:
        SamplingParams(kv_policy="h2o", pooling="mean")
    assert caught.value.param == "kv_policy"
    params = SamplingParams(kv_policy="double")
    check_request(params, {"CPU"})
    with pytest.raises(InvalidRequest, match="it is computed on a CPU only"):
        check_request(params, {"GPU"})
    assert why_not("beams", {"no-evict"}).error(InvalidRequest).param == "use_beam_search"


class Runs:
    """The answers of a tiny model with some features, each computed once."""

    def __init__(self, folder, tmp_path) -> None:
        self.folder, self.tmp_path = folder, tmp_path
        self.known: dict[tuple[str, ...], list[list[int]]] = {}

    def _place(self, value):
        """The value, with a folder and a name that nobody else has."""
        if not isinstance(value, str):
            return value
        return value.replace("DISK", str(self.tmp_path)).replace(
            "NAME", f"{self.tmp_path.name}-{len(self.known)}"
        )

    def answers(self, *names: str) -> list[list[int]]:
        """The same prompt twice, the second time with what the first has left in the cache, beside
        another."""
        names = tuple(sorted(set(names)))
        if names not in self.known:
            given = {
                key: value for name in names for key, value in OPTIONS_OF.get(name, {}).items()
            }
            given = {key: self._place(value) for key, value in given.items()}
            options = {
                "threads": 1,
                "kv_memory_bytes": 2**23,
                "max_requests": 4,
                "token_budget": 32,
                "device": "cpu",
            }
            core = load_core(
                EngineOptions(model=str(self.folder), dtype="float32", **options | given)
            )
            asked = {key: value for name in names for key, value in REQUESTS.get(name, {}).items()}
            params = greedy(6, ignore_eos=True, **asked)
            assert {*names} <= {*core.config.features, *requested(params)}
            try:
                first = run(core, {"x": (PROMPT, params)})["x"]
                both = run(core, {"x": (PROMPT, params), "y": (PROMPT[::-1], greedy(4))})["x"]
            finally:
                core.close()
            self.known[names] = [first.tokens, both.tokens]
        return self.known[names]


@pytest.fixture(scope="module")
def runs(tiny_folder, tmp_path_factory):
    return Runs(tiny_folder, tmp_path_factory.mktemp("disk"))


def allowed(one: str, other: str) -> bool:
    names = {"CPU", "plain checkpoint", "no experts", one, other}
    if any(refusal.feature in names and refusal.holds(frozenset(names)) for refusal in REFUSALS):
        return False
    return (
        not set(OPTIONS_OF.get(one, {})) & set(OPTIONS_OF.get(other, {}))
        and one.split(" ")[0] != other.split(" ")[0]
    )


PAIRS = [pair for pair in combinations(RUNNABLE, 2) if allowed(*pair)]


def compare(runs: Runs, one: str, other: str) -> None:
    check({"CPU", one, other})
    together = runs.answers(one, other)
    assert together[0] == together[1], "the second time"
    for neutral, changing in ((one, other), (other, one)):
        if neutral in NEUTRAL:
            assert together == runs.answers(changing), (one, other)


def test_what_is_allowed_has_the_tokens_of_each_alone(runs):
    for pair in random.Random(random.SystemRandom().getrandbits(32)).sample(PAIRS, 12):
        compare(runs, *pair)


@pytest.mark.slow
@pytest.mark.parametrize("one", RUNNABLE)
def test_every_allowed_pair(runs, one):
    for pair in PAIRS:
        if pair[0] == one:
            compare(runs, *pair)
