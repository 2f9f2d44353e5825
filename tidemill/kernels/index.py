"""The index of kernels: each op with its torch reference, its kernels, its test and its benchmark."""

from __future__ import annotations

from typing import NamedTuple


class Op(NamedTuple):
    """One operation. Names are relative to `tidemill.kernels`, kernels of a GPU to `kernels.cuda`."""

    name: str
    reference: str  # in torch
    tests: str  # FILE::FUNCTION, under tests/; they compare kernels with the reference
    bench: str  # modules of bench/
    c: str = ""  # functions of the compiled library, without tm_
    triton: str = ""
    hopper: str = ""  # in Gluon, for the H100 and H200 alone


_CUDA, _ATTENTION, _ROWS = (
    "kernels/test_cuda.py",
    "kernels/test_attention.py",
    "kernels/test_elementwise.py",
)
_MOE, _LORA, _SCAN = "kernels/test_cuda_moe.py", "kernels/test_lora.py", "kernels/test_scan.py"

OPS = (
    Op(
        "token ids and slots", "torch.gather", f"{_CUDA}::test_look_up", "kernels",
        triton="look_up._look_up",
    ),
    # ---- rows
    Op(
        "residual addition, RMSNorm", "norm.add_rms_norm_reference",
        f"{_CUDA}::test_norm {_ROWS}::test_rms_norm",
        "kernels", c="add_rms_norm", triton="norm._add_rms_norm",
    ),
    Op(
        "residual addition", "torch.add", f"{_ROWS}::test_rms_norm", "kernels", c="add",
    ),
    Op(
        "residual addition, LayerNorm", "norm.add_layer_norm_reference",
        f"{_CUDA}::test_norm {_ROWS}::test_norms_of_other_kinds",
        "kernels", c="add_layer_norm", triton="norm._add_layer_norm",
    ),
    Op(
        "RMSNorm, residual addition", "norm.post_norm_reference",
        f"{_CUDA}::test_norms_after {_ROWS}::test_norms_of_other_kinds",
        "kernels", c="post_norm", triton="norm._post_norm",
    ),
    Op(
        "RMSNorm of queries and keys", "norm.qk_norm_reference",
        f"{_CUDA}::test_norms_after {_ROWS}::test_norms_of_other_kinds",
        "kernels", c="qk_norm", triton="norm._qk_norm",
    ),
    Op(
        "activation", "glu.activate_reference",
        f"{_CUDA}::test_every_activation {_ROWS}::test_glu",
        "kernels", c="act", triton="glu._activate",
    ),
    Op(
        "gated activation", "glu.glu_reference", f"{_CUDA}::test_glu {_ROWS}::test_glu",
        "kernels", c="glu", triton="glu._glu",
    ),
    Op(
        "sigmoid gate", "gate.gate_reference", f"{_SCAN}::test_a_gate",
        "kernels", c="gate", triton="scan._gate",
    ),
    Op("clipping", "torch.clamp", f"{_ROWS}::test_values_are_cut_off", "kernels", c="clip"),
    Op(
        "matrices side by side", "torch.cat",
        "kernels/test_native.py::TestRecordedForward::test_it_gives_the_bits_of_the_model_itself",
        "kernels", c="concat columns",
    ),
    # ---- sampling
    Op(
        "greedy sampling", "argmax.argmax_reference",
        f"{_ROWS}::test_argmax_is_the_first_of_the_highest", "kernels", c="argmax",
    ),
    Op(
        "sampling", "noise.gumbel_argmax_reference",
        f"{_CUDA}::test_a_draw_is_a_function_of_seed_and_position"
        f" {_ROWS}::test_a_compiled_draw_is_the_references", "gpu step",
        c="gumbel_argmax", triton="sampling._pick sampling._settle",
    ),
    Op(
        "top-k, top-p, min-p, typical-p", "torch.sort",
        "gpu/test_kernels.py::test_sampling runner/test_cuda_runner.py::test_it_says_what_the_cpu_says", "gpu",
        triton="sampling._survey sampling._narrow sampling._collect sampling._finish",
    ),
    Op(
        "log-probabilities", "torch.log_softmax",
        "runner/test_cuda_runner.py::test_it_says_what_the_cpu_says", "gpu",
        triton="logprobs._summarize logprobs._normalize",
    ),
    # ---- attention
    Op(
        "writing keys and values", "attention.enter_heads",
        f"{_CUDA}::test_heads_enter_the_cache {_ATTENTION}::test_both_backends_write_the_same_bits",
        "gpu_kv",
        c="write_kv", triton="kv_write._enter_heads",
    ),
    Op(
        "attention", "attention.attention_reference",
        f"{_CUDA}::test_attention {_ATTENTION}::test_mixed_step_equals_reference"
        " gpu/test_kernels.py::test_attention", "gpu",
        c="attention",
        triton="paged_attention._attend_prompts paged_attention._attend_shared"
        " paged_attention._attend_single",
        hopper="hopper_attention._attend_prompts_warp_specialized hopper_single._attend_single_at_once",
    ),
    Op(
        "attention over 8-bit and 4-bit keys and values", "attention.attention_reference",
        "kernels/test_cuda_kv_formats.py::test_attention_reads_the_format", "gpu_kv",
        triton="scaled_attention._attend_prompts_scaled scaled_attention._attend_shared_scaled"
        " scaled_attention._attend_single_scaled",
        hopper="hopper_attention._attend_prompts_scaled_warp_specialized hopper_fp8._attend_single_fp8",
    ),
    Op(
        "copies of 8-bit and 4-bit pages", "kv_cache.dequantize",
        "kernels/test_cuda_kv_formats.py::test_pages_of_prompts_are_copied", "gpu_kv",
        triton="page_copies._copy_pages",
    ),
    Op(
        "attention of policies", "policy_attention.plan_policies",
        "kernels/test_cuda_policies.py::test_against_a_list_of_tokens"
        " kernels/test_policy_attention.py::test_against_a_list_of_tokens", "gpu_kv_policies",
        triton="policy_attention._weigh_slots policy_attention._add_to_slots"
        " policy_attention._bound_pages",
    ),
    Op(
        "attention over rows in one run, by torch's FlashAttention",
        "cuda.contiguous.flash_reference",
        "runner/test_virtual_cuda.py::test_prompts_and_decoding_over_the_end_of_a_page",
        "gpu_virtual",
    ),
    # ---- matmuls
    Op(
        "matmul", "linear.linear_reference",
        f"{_CUDA}::test_gemm kernels/test_linear.py::test_every_backend_multiplies_and_looks_up"
        " gpu/test_kernels.py::test_gemm_warp_specialized", "gpu quantized",
        c="linear", triton="gemm._gemm gemm._gemm_bulk", hopper="hopper_gemm._gemm_warp_specialized",
    ),
    Op(
        "matmul in 8 bits", "linear.linear_reference", "kernels/test_cuda_quantized.py::test_scaled",
        "gpu_quant", triton="scaled_gemm._gemm_scaled",
    ),
    Op(
        "activations in 8 bits", "quantized_linear.quantize",
        "kernels/test_cuda_quantized.py::test_scaled_by_blocks", "gpu_quant",
        triton="scaled_gemm._quantize_rows scaled_gemm._quantize_blocks",
    ),
    Op(
        "matmul of packed weights", "quantized_linear.quantized_linear_reference",
        "kernels/test_cuda_quantized.py::test_packed"
        " kernels/test_quantized_linear.py::test_it_multiplies_and_looks_up", "gpu_quant quantized",
        triton="packed_gemm._gemm_packed hopper_packed._add_chunks",
        hopper="hopper_packed._gemm_packed_warp_specialized",
    ),
    Op(
        "matmul in chunks", "linear.linear_reference",
        "kernels/test_cuda_quantized.py::test_packed_in_chunks", "gpu_quant",
        triton="packed_gemm._gemm_chunked",
    ),
    Op(
        "rows of quantized weights", "cuda.packed_gemm.unpack_reference",
        "kernels/test_cuda_quantized.py::test_weights_are_stored_in_the_cheapest_form",
        "gpu_quant", c="take_rows", triton="packed_gemm._dequantize",
    ),
    Op(
        "outliers of quantized weights", "quantized_linear.quantized_linear_reference",
        "kernels/test_cuda_methods.py::test_centroids_and_single_values", "gpu_quant",
        triton="outliers._split_rows outliers._add_outliers outliers._add_sparse",
    ),
    Op(
        "LoRA", "lora.TorchLora",
        f"{_LORA}::test_adapters_on_a_gpu {_LORA}::test_adapters_on_a_cpu", "gpu_lora lora",
        c="lora_add", triton="lora._shrink lora._add_up lora._expand lora._expand_gated",
    ),
    # ---- feed-forwards of which some is computed
    Op(
        "scores of experts", "routing.score_experts_reference",
        "kernels/test_routing.py::test_compiled_scores_are_the_references"
        " kernels/test_routing.py::test_the_gpus_kernel_is_the_reference",
        "gpu_moe", c="score_experts", triton="routing._score_experts",
    ),
    Op(
        "choice of experts", "moe.route_reference",
        f"{_MOE}::test_routing kernels/test_moe.py::test_switch_routing_is_transformers_own",
        "gpu_moe", triton="moe._route moe._place",
    ),
    Op(
        "mixture of experts", "moe.moe_reference",
        f"{_MOE}::test_experts kernels/test_moe.py::test_computes_what_the_reference_does", "gpu_moe",
        c="run_moe",
        triton="moe._up moe._down moe._combine"
        " moe_direct._up_direct moe_direct._down_direct",
    ),
    Op(
        "neurons of a feed-forward", "neurons.neurons_reference",
        "kernels/test_neurons.py::test_outputs_are_those_of_the_whole_feed_forward_to_the_bit",
        "contextual", c="run_neurons",
    ),
    Op(
        "neurons that a predictor chose", "neurons.chosen_reference",
        "compress/test_predictors.py::test_few_neurons_are_computed_and_a_rows_choice_is_its_own",
        "contextual", c="run_host_neurons",
    ),
    # ---- states of constant size
    Op(
        "convolution of a state", "state.TorchStates",
        f"{_SCAN}::test_a_backend_computes_what_the_reference_does", "gpu_states",
        c="conv", triton="scan._convolve",
    ),
    Op(
        "scan of a state", "state.TorchStates",
        f"{_SCAN}::test_a_backend_computes_what_the_reference_does", "gpu_states",
        c="scan", triton="scan._scan scan._norm_heads",
    ),
    # ---- embeddings
    Op(
        "pooling", "cuda.pooling.pool_reference", "runner/test_cuda_encoder.py::test_sums_of_tokens",
        "gpu_encoders", triton="pooling._pool",
    ),
    # ---- ranks
    Op(
        "sum over ranks", "cuda.collectives.all_reduce_reference",
        "kernels/test_cuda_collectives.py::test_sums_are_in_the_order_of_ranks", "gpu_group",
        c="all_reduce", triton="collectives._all_reduce collectives._add_parts",
    ),
    Op(
        "gather over ranks", "torch.cat",
        "kernels/test_cuda_collectives.py"
        "::test_columns_are_gathered_also_where_ranks_have_different_numbers", "gpu_group",
        c="all_gather", triton="collectives._all_gather",
    ),
    Op(
        "rows for columns between ranks", "torch.cat",
        "parallel/test_phased.py::test_no_threshold_changes_a_bit", "parallel",
        c="own_rows to_columns to_rows",
    ),
)  # fmt: skip

# Functions of the compiled library that are no ops: threads, programs, streams, copies.
SERVICES = (
    "set_threads", "use_tiles", "sources", "layout", "op_name", "replay", "fail_group", "take_ranges",
    "copy_sum", "stream_open", "stream_close", "stream_layer", "stream_figures_of",
)  # fmt: skip
