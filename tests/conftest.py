"""Models for tests: tiny random Llamas made with Transformers, and the real default model with its
reference."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is defined
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a GPU, which `--device auto` would take, is for tests/gpu

import contextlib
import shutil
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import typer.testing
from xdist.scheduler import LoadScopeScheduling

from bench.ports import reserved_port
from tests import interpreted, seeded
from tests.helpers import LONG_S, byte_tokenizer, llama_of_gguf, make_llama, thinking_tokenizer
from tidemill.kernels import machine, native
from tidemill.weights.locate import locate

seeded.seed_this_process()
seeded.seed_child_processes()
torch.set_num_threads(1)  # as in the engine; the other core is another worker's
machine.settle_vector_math()  # references are made with torch, too
if native.lib:
    native.lib.set_threads(2)
with contextlib.suppress(ImportError):  # without Triton, tests of its kernels are skipped
    interpreted.replace_language_once()
    interpreted.make_types_once()
# in the background of a script; children of tests have it from here
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Servers may be slow, and 5 s are the default: an object that all functions of httpx share.
for _name in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _name, LONG_S)
# A client of httpx reads all certificates of the Web, 50 ms each time, and tests have thousands
# that talk plain HTTP.
httpx._transports.default.create_ssl_context = cache(httpx.create_ssl_context)
# Typer makes all commands with all their options anew, 0.15 s for each command that a test invokes.
typer.testing._get_command = cache(typer.testing._get_command)


# Those of a GPU have a conftest of their own: here kernels are interpreted. `make test-clients` has
# the libraries of the others.
collect_ignore = ["gpu", "clients"]

# Beyond what two cores do in a quarter of an hour: `make test-slow` runs these, too.
_ONLY_WHEN_SLOW = (
    "test_no_threshold_changes_a_bit[4]",
    "test_the_torch_fallbacks_first_large_calls_are_accurate",
    "test_flash_attention_is_tried_first[True-20.0]",
    "test_every_kernel_compiles_for_hopper",
    "test_what_this_process_lacks_for_a_restart_is_waited_for",
    "test_drafts_change_nothing[0.6-1e-30]",
    "test_cuda_runner.py::test_beams",
    "test_the_cpus_tokens_in_any_company[streaming]",
    "test_requests_that_kill_engines_are_given_up_alone",
    "test_the_real_model_alone_and_in_a_crowd[float32]",
    "test_several_prompts_are_merged_without_a_backlog",
    "test_quantized_matmuls_keep_the_quality[256]",
    "test_structured_outputs_by_xgrammar",
    "test_a_collector_that_is_gone_hurts_nobody",
    "test_families_with_experts[GptOss]",
    "test_a_request_that_waits_for_its_model_can_be_cancelled",
    *(f"among_others[{name}-torch" for name in ("BertModel", "RobertaModel", "BertForMaskedLM")),
    "test_scores_of_pairs_equal_transformers[torch-XLM",
    "test_cuda.py::test_a_layer_computes_what_its_spec_says[window",
    "test_cuda.py::test_a_layer_computes_what_its_spec_says[sinks",
    *(f"transformers[{name}-torch" for name in ("Mamba", "Mamba with biases", "Qwen3Next")),
    *(
        f"is_computed[{name}-torch"
        for name in ("Mamba", "Mamba with biases", "Mamba2", "Qwen3Next")
    ),
    *(f"the_reference_does[{kind}-triton_plan" for kind in ("mamba", "mamba2")),
    "from_a_position_on[smollm2 torch",
    *(
        f"{name}[smollm2 torch"
        for name in ("among_31_others", "under_every_policy", "lack_of_pages", "in_chunks")
    ),
    "test_under_every_policy[smollm2 float32",
    "test_under_every_policy[odd float32",
    "test_among_31_others[odd float32",
    "test_the_real_model_alone_and_in_a_crowd[quantized]",
    "test_swapping_under_load_loses_nothing_and_stays_within_the_budget",
    "test_a_model_without_requests_is_unloaded_and_loaded_again",
    "test_preempted_and_aborted_while_steps_are_in_flight",
    "test_what_runs_before_the_first_request_leaves_nothing_behind",
    "test_fields_in_another_order_are_noticed",
    "test_compiled_elsewhere_and_found_here",
    "test_cuda.py::test_a_token_and_the_drafts_after_it[kind0]",
    "test_flash_attention_is_tried_first[False-20.0]",
    "the_cache[Mamba with biases",
    "was_kept[Mamba with biases",
    "is_shifted[Mamba with biases",
    "test_any_change_of_a_source_makes_it_stale",
    "test_cuda_runner.py::test_it_says_what_the_cpu_says",
    "test_prefill_first_with_a_prompt_beyond_the_budget",
    "test_flash_attention_is_tried_first[True-9.0]",
    "test_cuda.py::test_a_token_and_the_drafts_after_it[kind1]",
    "test_tables_equal_numpys_in_fresh_processes",
    "test_no_line_is_lost_or_doubled_by_a_restart",
    "test_among_31_others[smollm2 float32-penalties",
    "test_among_31_others[smollm2 float32-seeded",
    "test_among_31_others[smollm2 quantized-penalties",
    "test_among_31_others[smollm2 quantized-seeded",
    "test_in_other_pages[smollm2 torch",
    "test_models_that_can_never_be_served_are_refused_at_the_start",
    "test_slower_kernels_are_an_event_of_the_start",
    "test_code_in_the_current_folder_is_not_run",
    "test_a_stalled_engine_is_replaced_and_samples_go_on_as_they_were",
    "test_what_is_only_queued_is_no_suspect",
    "test_requests_that_come_and_go_while_there_is_no_engine",
    *(
        f"test_prompts_without_control_tokens_are_what_they_were[{name}]"
        for name in ("sentencepiece", "unigram", "bytes, normalized")
    ),
    "test_a_lost_engine_is_seen_and_a_server_that_stops",
    "test_peak_memory_while_loading_is_near_the_final_size[float32",
    "test_cuda.py::test_attention[3-3]",
    "test_scores_of_pairs_equal_the_cpus",
    "test_the_command_prints_json_and_draws",
    "test_a_causal_model_ranks_by_cosine",
    "test_offline[arguments1]",
    "test_tracing.py::test_what_turns_it_on",
    "test_no_stage_reads_from_the_device",
    "test_a_restart_keeps_the_configuration_of_the_first_start",
    "test_many_texts_of_a_request_are_tokenized_in_turns",
    "test_requests_that_do_not_end_while_the_server_stops_are_ended",
    "test_others_get_the_same_output_and_memory_stays_bounded",
    "test_several_engines_and_models_have_one_file",
    "test_what_the_end_of_the_server_cuts_is_an_aborted_request",
    "test_the_kernel_behind_gate_and_up_multiplies_for_the_linear_behind_it[128]",
    "test_steps_with_policies_need_no_kernels_that_start_has_not_made",
    "test_a_prompt_cache_is_whole_whatever_requests_keep",
    "test_peak_memory_while_loading_is_near_the_final_size[quantized",
    "test_an_engine_that_dies_doubles_no_request",
    "test_a_full_disk_stops_the_recording_and_nothing_else",
    "server/test_agents.py",
    "server/test_chat_url.py",
    "server/test_deploy.py",
    "server/test_listen.py",
    "server/test_migrated.py",
    "test_chaos[short]",
    "test_an_ignored_ctrl_c_stays_ignored",
    "leaves_the_chat_as_it_was[phone]",
    "test_a_response_ends_with_the_context[1000000]",
    "test_of_safetensors_in_16_bits_nothing_is_in_memory_twice",
    "test_odd_batches_need_no_kernels",
    "test_smollm2.py::test_safetensors_and_gguf_give_the_same_bits",
    "test_smollm2.py::test_prompt_logprobs_equal_transformers",
    *(f"test_models_of_families[{name}" for name in ("Qwen2", "Qwen3", "Gemma2", "Granite")),
    *(f"test_families_whose_layers_differ[{name}]" for name in ("Olmo2", "Phi")),
    "uninterrupted_one[exit",
    *(f"test_tokens_are_those_without_drafts[{name}" for name in ("exit", "medusa")),
    "bounded_cost[xgrammar",
    "test_flex_attention_equals_the_reference[bidirectional",
    "test_experts_of_several_ranks[70]",
    *(
        f"test_restrictions_keep_what_sorting_keeps[settings{number}]"
        for number in (1, 2, 4, 6, 7, 9)
    ),
    "fail_their_sequence_alone[compiled-plus infinity]",
    "lack_of_pages[odd float32",
    *(f"requests_of_their_own[smollm2 {kind}" for kind in ("float32", "torch")),
    "test_in_chunks[odd float32-greedy-1]",
    *(f"{name}[smollm2 torch" for name in ("within_a_page", "depend_on_chunks")),
    *(f"before_it_ended[{name}" for name in ("Mamba with biases", "Mamba-")),
    "third_on[Mamba with biases",
    *(
        f"closed_without_a_collection[{kind}"
        for kind in (
            "{}-close",
            "{'speculate': 'ngram'}-del",
            "{'kv_disk': 'disk:4M', 'max_loras': 2}-del",
        )
    ),
)


class FromBothEnds(LoadScopeScheduling):
    """Files are kept whole. One worker takes them from the front, where those that start processes
    are, the others from the back: all end at the same time, and servers that files share are seldom
    started twice."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.split("::")[0]

    def _assign_work_unit(self, node: Any) -> None:
        if self.nodes.index(node):
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FromBothEnds:
    config.option.loadscopereorder = False  # the order is ours
    return FromBothEnds(config, log)


def _place(item: pytest.Item) -> int:
    """First what starts processes: servers that files share, then others."""
    _, folder, *_ = item.nodeid.split("/")
    return (
        0
        if folder == "server"
        else 1
        if folder in ("cli", "bench") or item.path.name == "test_client.py"
        else 2
    )


def _is_fallback(item: pytest.Item) -> bool:
    """The torch references of ops in a whole engine, which others run with compiled kernels:
    kernels are compared with them."""
    params = (
        item.callspec.params
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
        else {}
    )
    return (
        params.get("backend") == "torch"
        and "/kernels/" not in item.nodeid
        and "test_families.py" not in item.nodeid
    )


@pytest.hookimpl(tryfirst=True)  # before marks are looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Invariance without compiled kernels takes minutes: one way of sampling is always tested, all
    by `make test-slow`."""
    items.sort(key=_place)
    for item in items:
        if "smollm2 torch" in item.nodeid and (
            "greedy" in item.nodeid or "penalties" in item.nodeid
        ):
            item.add_marker(pytest.mark.slow)
        if _is_fallback(item):
            item.add_marker(pytest.mark.slow)
        if (
            "test_families.py" in item.nodeid
            and "-torch]" in item.nodeid
            and "Gemma3-" not in item.nodeid
        ):
            # the reference ops of one family that has them all are enough
            item.add_marker(pytest.mark.slow)
        if any(part in item.nodeid for part in _ONLY_WHEN_SLOW):
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def random_seeds(monkeypatch):
    """Requests without a seed draw one, as they do for users."""
    with seeded.random_seeds(monkeypatch):
        yield


@pytest.fixture(params=["compiled", "torch"])
def backend(request, monkeypatch) -> str:
    """Every op by the compiled kernels, and by its torch reference."""
    if request.param == "torch":
        monkeypatch.setattr(native, "lib", None)
    elif native.lib is None:
        pytest.skip(native.why)
    return request.param


@pytest.fixture
def port() -> Iterator[int]:
    """A port that nobody else gets while the test runs."""
    with reserved_port() as found:
        yield found


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    return locate("smollm2")


@pytest.fixture(scope="session")
def smollm2_reference(smollm2_path):
    """The same GGUF in Transformers, in float32; kept between runs. Its own conversion gives the
    same and takes half a minute."""
    from transformers import AutoModelForCausalLM

    kept = Path(__file__).parent.parent / ".test-cache" / smollm2_path.stem
    if not (kept / "config.json").is_file():
        part = kept.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        llama_of_gguf(smollm2_path).save_pretrained(part, max_shard_size="200MB")
        part.rename(kept)
    return AutoModelForCausalLM.from_pretrained(kept, dtype=torch.float32).eval(), kept


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    """A small Llama with a byte-level tokenizer and a chat template: everything a server needs,
    loaded in no time."""
    path = tmp_path_factory.mktemp("tiny")
    make_llama(path, vocab_size=320, max_position_embeddings=512)
    byte_tokenizer(path)
    return path


@pytest.fixture(scope="session")
def thinking_folder(tmp_path_factory) -> Path:
    """The same with marks of reasoning, which its template opens, and more room."""
    path = tmp_path_factory.mktemp("thinking")
    make_llama(path, vocab_size=320, max_position_embeddings=4096)
    thinking_tokenizer(path)
    return path
