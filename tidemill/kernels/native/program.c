/* A recorded forward pass: the ops of all layers in one call, so that a step costs no Python between them (program.py).

Activations live in one arena. A buffer is named by its first column: with T rows it lies at column * T, so a recording serves any T. */
#include <stddef.h>

#include "tidemill.h"

/* Python checks both before it calls anything else: a library built from other sources is not used. */

#ifndef TM_SOURCES
#define TM_SOURCES "" /* setup.py passes the hash of all sources */
#endif
TM_API const char *tm_sources(void) { return TM_SOURCES; }

typedef struct {
    const char *name;
    long offset;
} field;

#define STEP(f) {"tm_step." #f, offsetof(tm_step, f)}
#define LAYER(f) {"tm_layer." #f, offsetof(tm_layer, f)}
#define KVQUANT(f) {"tm_kvquant." #f, offsetof(tm_kvquant, f)}
#define STATE_LAYER(f) {"tm_state_layer." #f, offsetof(tm_state_layer, f)}
#define STATES(f) {"tm_states." #f, offsetof(tm_states, f)}
#define OP(f) {"tm_op." #f, offsetof(tm_op, f)}
#define PAIR(f) {"tm_lora_pair." #f, offsetof(tm_lora_pair, f)}
#define LORA_STEP(f) {"tm_lora_step." #f, offsetof(tm_lora_step, f)}
#define LORA(f) {"tm_lora." #f, offsetof(tm_lora, f)}
#define MOE(f) {"tm_moe." #f, offsetof(tm_moe, f)}
#define ROUTING(f) {"tm_routing." #f, offsetof(tm_routing, f)}
#define POLICY(f) {"tm_policy." #f, offsetof(tm_policy, f)}
#define SEGMENT(f) {"tm_segment." #f, offsetof(tm_segment, f)}
#define ROUND(f) {"tm_round." #f, offsetof(tm_round, f)}
#define GROUP(f) {"tm_group." #f, offsetof(tm_group, f)}
#define EXCHANGE(f) {"tm_exchange." #f, offsetof(tm_exchange, f)}
#define MATRICES(f) {"tm_matrices." #f, offsetof(tm_matrices, f)}
#define NEURONS(f) {"tm_neurons." #f, offsetof(tm_neurons, f)}
#define HOST_NEURONS(f) {"tm_host_neurons." #f, offsetof(tm_host_neurons, f)}
#define PIECE(f) {"tm_piece." #f, offsetof(tm_piece, f)}
#define STREAM(f) {"tm_stream_spec." #f, offsetof(tm_stream_spec, f)}
#define FIGURES(f) {"tm_stream_figures." #f, offsetof(tm_stream_figures, f)}
/* Offsets of the fields that Python writes; a struct's own name stands for its size. */
TM_API const field *tm_layout(void) {
    static const field fields[] = {
        {"tm_state_layer", sizeof(tm_state_layer)}, {"tm_states", sizeof(tm_states)},
        STATE_LAYER(kind), STATE_LAYER(num_heads), STATE_LAYER(head_dim), STATE_LAYER(state_size), STATE_LAYER(num_groups),
        STATE_LAYER(kernel), STATE_LAYER(norm_size), STATE_LAYER(num_channels), STATE_LAYER(num_projected), STATE_LAYER(pieces),
        STATES(num_tokens), STATES(num_chains), STATES(page_bytes), STATES(table_width), STATES(table_stride), STATES(pool),
        STATES(tables), STATES(segments), STATES(chains),
        {"tm_kvquant", sizeof(tm_kvquant)}, KVQUANT(bits), KVQUANT(scales), KVQUANT(factors), KVQUANT(offsets), KVQUANT(key_bounds),
        KVQUANT(value_bounds), KVQUANT(key_levels), KVQUANT(value_levels),
        {"tm_step", sizeof(tm_step)}, {"tm_layer", sizeof(tm_layer)}, {"tm_op", sizeof(tm_op)},
        LAYER(group), LAYER(num_heads), LAYER(num_kv_heads), LAYER(head_dim), LAYER(value_dim), LAYER(num_stored), LAYER(num_values), LAYER(value_row), LAYER(num_rotated), LAYER(window),
        LAYER(is_bidirectional), LAYER(bias_stride), LAYER(bias), LAYER(cos), LAYER(sin), LAYER(key_scales), LAYER(value_scales), LAYER(quant),
        LAYER(number),
        LAYER(scale), LAYER(softcap), STEP(num_tokens), STEP(page_size), STEP(page_bytes),
        STEP(table_width), STEP(kv_format), STEP(num_tiles), STEP(tile_token), STEP(tile_len), STEP(tile_start), STEP(tile_row),
        STEP(tile_end), STEP(path_width), STEP(tile_base), STEP(tile_path), STEP(tables), STEP(positions), STEP(slots), STEP(states), STEP(num_rounds), STEP(rounds),
        OP(op), OP(in), OP(in_out), OP(out), OP(in_2), OP(in_3), OP(kind), OP(width), OP(num_out), OP(a), OP(b), OP(c), OP(d), OP(e), OP(f), OP(eps),
        {"tm_routing", sizeof(tm_routing)}, ROUTING(num_experts), ROUTING(top_k), ROUTING(is_softmax), ROUTING(renormalise),
        ROUTING(num_groups), ROUTING(top_groups), ROUTING(best_of_group), ROUTING(has_shared), ROUTING(scale), ROUTING(bias),
        {"tm_moe", sizeof(tm_moe)}, {"tm_matrices", sizeof(tm_matrices)},
        MOE(num_experts), MOE(top_k), MOE(renormalise), MOE(topk_first), MOE(is_scored), MOE(act), MOE(gate_up), MOE(down), MOE(shared_gate_up),
        MOE(shared_down), MOE(counts), MATRICES(kind), MATRICES(num_in), MATRICES(num_out), MATRICES(codes), MATRICES(scales),
        MATRICES(bias), MATRICES(code_bytes), MATRICES(num_scales), MATRICES(code_place), MATRICES(scale_place),
        MOE(stream), MOE(first_unit),
        {"tm_neurons", sizeof(tm_neurons)}, NEURONS(kind), NEURONS(num_in), NEURONS(num_inner), NEURONS(num_out), NEURONS(down_place),
        NEURONS(up_bias), NEURONS(down_bias), NEURONS(stream), NEURONS(first_unit), NEURONS(memory), NEURONS(up_place), NEURONS(num_bytes),
        NEURONS(act), NEURONS(gate_bias), NEURONS(num_chosen), NEURONS(is_given),
        {"tm_host_neurons", sizeof(tm_host_neurons)}, HOST_NEURONS(neurons), HOST_NEURONS(given), HOST_NEURONS(gate), HOST_NEURONS(out),
        HOST_NEURONS(gate_codes), HOST_NEURONS(first_row), HOST_NEURONS(num_rows), HOST_NEURONS(num_ns),
        {"tm_piece", sizeof(tm_piece)}, PIECE(offset), PIECE(num_bytes), PIECE(place),
        {"tm_stream_spec", sizeof(tm_stream_spec)}, STREAM(fd), STREAM(file_bytes), STREAM(changed_ns), STREAM(num_units),
        STREAM(num_slots), STREAM(slot_bytes), STREAM(slots), STREAM(pieces), STREAM(first_piece), STREAM(slot_of),
        {"tm_stream_figures", sizeof(tm_stream_figures)}, FIGURES(num_bytes), FIGURES(waited_ns), FIGURES(num_asked), FIGURES(num_read), FIGURES(num_missed), FIGURES(num_foreseen),
        OP(scale),
        {"tm_lora_pair", sizeof(tm_lora_pair)}, {"tm_lora_step", sizeof(tm_lora_step)}, {"tm_lora", sizeof(tm_lora)},
        PAIR(down), PAIR(up), PAIR(kind), PAIR(rank), PAIR(scale),
        LORA_STEP(num_tokens), LORA_STEP(num_tiles), LORA_STEP(order), LORA_STEP(tiles),
        LORA(num_in), LORA(num_parts), LORA(max_rank), LORA(columns), LORA(sizes), LORA(pairs), LORA(step),
        {"tm_policy", sizeof(tm_policy)}, {"tm_segment", sizeof(tm_segment)}, {"tm_round", sizeof(tm_round)},
        POLICY(kind), POLICY(capacity), POLICY(kept), POLICY(recent), POLICY(sinks), POLICY(first_observed), POLICY(dense_layers), POLICY(channels),
        POLICY(stride), POLICY(memory), SEGMENT(policy), SEGMENT(row), SEGMENT(token), SEGMENT(count), SEGMENT(position), SEGMENT(slot),
        SEGMENT(evicts), SEGMENT(num_read), SEGMENT(first_page), SEGMENT(num_pages), ROUND(num_segments), ROUND(segments), ROUND(tiles),
        {"tm_group", sizeof(tm_group)}, GROUP(rank), GROUP(size), GROUP(slot_bytes), GROUP(deadline_ns), GROUP(shared), GROUP(call),
        {"tm_exchange", sizeof(tm_exchange)}, EXCHANGE(group), EXCHANGE(width), EXCHANGE(num_runs), EXCHANGE(own_width), EXCHANGE(firsts),
        EXCHANGE(lens), EXCHANGE(widths),
        {NULL, 0},
    };
    return fields;
}

/* ---- ops: one joins with a function and a line in the table; Python finds its number by its name */

static int run_linear(const tm_op *o, const tm_buffers *at) {
    return linear_op((int)o->kind, at->in, at->num_rows, o->width, o->a, o->b, o->c, o->num_out, at->out);
}

static int run_norm(const tm_op *o, const tm_buffers *at) {
    norm_op(at->in, o->scale, at->in_out, o->a, o->eps, at->out, at->num_rows, o->width);
    return 0;
}

static int run_post_norm(const tm_op *o, const tm_buffers *at) {
    post_norm_op(at->in, at->in_out, o->a, o->eps, at->out, at->num_rows, o->width);
    return 0;
}

static int run_qk_norm(const tm_op *o, const tm_buffers *at) {
    qk_norm_op(at->in, o->a, o->kind, o->b, o->num_out, o->eps, at->out, at->num_rows, o->width);
    return 0;
}

static int run_layer_norm(const tm_op *o, const tm_buffers *at) {
    layer_norm_op(at->in, at->in_out, o->a, o->b, o->eps, at->out, at->num_rows, o->width);
    return 0;
}

static int run_act(const tm_op *o, const tm_buffers *at) {
    act_op((int)o->kind, at->in, at->out, at->num_rows, o->width);
    return 0;
}

static int run_glu(const tm_op *o, const tm_buffers *at) {
    glu_op((int)o->kind, at->in, at->out, at->num_rows, o->num_out);
    return 0;
}

static int run_attention(const tm_op *o, const tm_buffers *at) {
    return attention_op(at->step, o->f, (tm_learned){o->c, o->d, o->e, o->eps}, at->in, (void *)o->a, (void *)o->b, at->out, at->in_2);
}

static int run_write_kv(const tm_op *o, const tm_buffers *at) {
    write_kv_op(at->step, o->f, (tm_learned){o->c, o->d, NULL, o->eps}, at->in, (void *)o->a, (void *)o->b);
    return 0;
}

static int run_conv(const tm_op *o, const tm_buffers *at) {
    conv_op(at->step->states, o->a, o->b, o->c, at->in, at->out);
    return 0;
}

static int run_scan(const tm_op *o, const tm_buffers *at) {
    return scan_op(at->step->states, o->a, (tm_state_learned){o->b, o->c, o->d, o->e, o->eps}, at->in, at->in_out, at->in_2, at->in_3, at->out);
}

static int run_gate(const tm_op *o, const tm_buffers *at) {
    gate_op(at->in, at->in_2, at->out, at->num_rows, o->width);
    return 0;
}

static int run_moe(const tm_op *o, const tm_buffers *at) { return moe_op(o->a, at->in, at->in_out, o->b, at->in_2, at->num_rows, at->out); }

static int run_score_experts(const tm_op *o, const tm_buffers *at) {
    score_experts_op(o->a, at->in, at->out, at->num_rows);
    return 0;
}

static int run_all_reduce(const tm_op *o, const tm_buffers *at) { return all_reduce_op(o->a, at->in_out, at->num_rows, o->width); }

static int run_all_gather(const tm_op *o, const tm_buffers *at) {
    return all_gather_op(o->a, at->in, at->out, at->num_rows, o->width, o->num_out);
}

static int run_stream(const tm_op *o, const tm_buffers *at) {
    (void)at;
    return stream_layer_op((tm_stream *)o->a, o->kind);
}

static int run_neurons(const tm_op *o, const tm_buffers *at) { return neurons_op(o->a, at->in, at->in_2, at->num_rows, at->out); }

static int run_add(const tm_op *o, const tm_buffers *at) {
    add_op(at->in, o->scale, at->in_out, at->num_rows, o->width);
    return 0;
}

static int run_clip(const tm_op *o, const tm_buffers *at) {
    clip_op(at->in_out, o->scale, at->num_rows, o->width);
    return 0;
}

static int run_concat(const tm_op *o, const tm_buffers *at) {
    const float *const parts[3] = {at->in, at->in_2, at->in_3};
    const long widths[3] = {o->width, o->kind, o->num_out - o->width - o->kind};
    concat_op(parts, widths, at->num_rows, at->out);
    return 0;
}

static int run_columns(const tm_op *o, const tm_buffers *at) {
    columns_op(at->in, at->num_rows, o->width, o->kind, o->num_out, at->out);
    return 0;
}

static int run_own_rows(const tm_op *o, const tm_buffers *at) {
    own_rows_op(at->in, at->all_rows, o->width, o->kind, o->num_out, at->out);
    return 0;
}

static int run_to_columns(const tm_op *o, const tm_buffers *at) { return to_columns_op(o->a, at->in, at->out, at->all_rows); }
static int run_to_rows(const tm_op *o, const tm_buffers *at) { return to_rows_op(o->a, at->in, at->out, at->all_rows); }

/* How many rows there are from an op on. */
static long rank_rows(const tm_op *o, long all) { return first_row(all, o->kind + 1, o->num_out) - first_row(all, o->kind, o->num_out); }
static long all_rows(const tm_op *o, long all) { return (void)o, all; }

static int run_lora(const tm_op *o, const tm_buffers *at) { return lora_op(o->a, at->in, at->in_out, o->num_out); }

static const struct {
    const char *name;
    int (*run)(const tm_op *, const tm_buffers *);
    long (*rows)(const tm_op *, long all); /* NULL: as many as before */
} OPS[] = {
    {"linear", run_linear, NULL},
    {"norm", run_norm, NULL},
    {"post_norm", run_post_norm, NULL},
    {"qk_norm", run_qk_norm, NULL},
    {"layer_norm", run_layer_norm, NULL},
    {"act", run_act, NULL},
    {"glu", run_glu, NULL},
    {"attention", run_attention, NULL},
    {"write_kv", run_write_kv, NULL},
    {"conv", run_conv, NULL},
    {"scan", run_scan, NULL},
    {"gate", run_gate, NULL},
    {"score_experts", run_score_experts, NULL},
    {"moe", run_moe, NULL},
    {"lora", run_lora, NULL},
    {"add", run_add, NULL},
    {"clip", run_clip, NULL},
    {"all_reduce", run_all_reduce, NULL},
    {"all_gather", run_all_gather, NULL},
    {"stream", run_stream, NULL},
    {"neurons", run_neurons, NULL},
    {"columns", run_columns, NULL},
    {"own_rows", run_own_rows, rank_rows},
    {"to_columns", run_to_columns, all_rows},
    {"to_rows", run_to_rows, rank_rows},
    {"concat", run_concat, NULL},
};

/* The name of op number `i`; NULL after the last. */
TM_API const char *tm_op_name(long i) { return i < (long)(sizeof OPS / sizeof *OPS) ? OPS[i].name : NULL; }

TM_API int tm_replay(const tm_op *ops, long num_ops, float *arena, long num_rows, const tm_step *step) {
    int failed = 0;
    long rows = num_rows;
    tm_lock();
    for (const tm_op *o = ops; o < ops + num_ops && !failed; o++) {
        const tm_buffers at = {
            o->in < 0 ? NULL : arena + o->in * num_rows, o->in_out < 0 ? NULL : arena + o->in_out * num_rows,
            o->out < 0 ? NULL : arena + o->out * num_rows, o->in_2 < 0 ? NULL : arena + o->in_2 * num_rows,
            o->in_3 < 0 ? NULL : arena + o->in_3 * num_rows, rows, step, num_rows,
        };
        if (OPS[o->op].rows) rows = OPS[o->op].rows(o, num_rows);
        else if (!rows && OPS[o->op].run != run_stream) continue; /* a rank without rows */
        failed = OPS[o->op].run(o, &at);
    }
    tm_unlock();
    return failed;
}
