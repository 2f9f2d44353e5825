/* What the files of this library share: the thread pool, the ops, and the step of a paged attention. Python's side is __init__.py. */
#ifndef TM_TIDEMILL_H
#define TM_TIDEMILL_H

#include <stdint.h>

#define TM_API __attribute__((visibility("default")))

/* ---- pool.c */

typedef void (*tm_task)(void *arg, long index, int thread);

/* Runs task(arg, 0 .. count-1), `chunk` indices at a time, on all threads, which begin in different places; a chunk goes to whichever
   thread is free, so a thread that the system takes away holds up one chunk, not a share of the work. */
void tm_parallel(long count, long chunk, tm_task task, void *arg);
int tm_num_threads(void);

/* Memory of a thread, kept between calls; grows as asked. Slots are independent buffers. NULL when there is no memory. */
void *tm_scratch(int thread, int slot, long num_bytes);

/* The pool serves one call at a time; every exported function holds it while it runs. */
void tm_lock(void);
void tm_unlock(void);

/* ---- ops; those that return an int return 0, or -1 when there is no memory */

/* How the KV cache stores values. The numbers are native_attention.py's, too. */
enum { TM_KV_F32, TM_KV_BF16, TM_KV_F16, TM_KV_INT8, TM_KV_INT4, TM_KV_KVQUANT4, TM_KV_KVQUANT3 };

/* KVQuant's constants of a layer (kvquant.c). */
typedef struct {
    long bits;
    const float *scales, *factors, *offsets;       /* of channels of keys, [position 0, all others][kv head][head_dim]; factors: 1 / scales */
    const float *key_bounds, *value_bounds;        /* [2^bits - 1]: a value's code is the number of bounds below it */
    const uint16_t *key_levels, *value_levels;     /* [16] in bfloat16 */
} tm_kvquant;

/* What a layer's attention computes. Field by field as in __init__.py, like tm_step. */
typedef struct {
    long group; /* whose page table names the layer's pages */
    long num_heads, num_kv_heads, head_dim, value_dim; /* head_dim: of queries and keys */
    long num_stored, num_values; /* keys and values that the layer makes of a token: of all KV heads; 0: another layer's are read, or a value is a part of its key */
    long value_row;         /* from a value to the next in the cache: value_dim, or head_dim where it is a part of its key */
    long num_rotated;       /* dimensions of a head, from the first on */
    long window;            /* a query sees so many keys, its own the last; 0: all before it */
    long is_bidirectional;  /* a query sees all keys up to the end of its sequence in this step */
    long bias_stride;       /* from a head's numbers to the next's; that of distance 0 is number bias_stride / 2 */
    const float *bias;      /* added to scores, by the key's position less the query's; NULL: none */
    const float *cos, *sin; /* [position][num_rotated / 2] */
    const char *key_scales, *value_scales; /* bfloat16, in the first page: [kv head][offset]; NULL: the format has none. int4: [2] of each, KVQuant: [4] */
    const tm_kvquant *quant;               /* NULL: another format */
    long number;            /* among attention layers */
    float scale, softcap;   /* softcap: 0: none */
} tm_layer;

/* A layer with a state of constant size (scan.c). */
typedef struct {
    long kind, num_heads, head_dim, state_size, num_groups, kernel, norm_size;
    long num_channels, num_projected;
    const int32_t *pieces; /* [1 + num_heads][2]: the convolution's state and each head's: page within a block, bytes from its start */
} tm_state_layer;

/* A step's states. */
typedef struct {
    long num_tokens, num_chains, page_bytes, table_width, table_stride; /* entries from a row to the next; from a table to the next */
    char *pool;
    const int32_t *tables, *segments, *chains; /* tables: of each page of a block, [row][block]; segments: [n][5], see scan.c; chains: [num_chains + 1], the first segment of each */
} tm_states;

/* One step of all layers. */
typedef struct {
    long num_tokens;
    long page_size, page_bytes, table_width; /* bytes from a page to the next; width: entries from a row of a table to the next */
    long kv_format;
    long num_tiles;
    const int64_t *tile_token, *tile_len, *tile_start, *tile_row; /* first token in the step, tokens, position, row of the table */
    const int64_t *tile_end;          /* position after the last token that the step has of the tile's sequence */
    long path_width;
    const int64_t *tile_base, *tile_path; /* [tile], [tile][path_width]: tokens from position base on lie in these places; NULL: all in their own */
    const int32_t *const *tables;     /* of each group */
    const int64_t *positions, *slots; /* of tokens; slots of each group: page * page_size + offset */
    const tm_states *states;          /* NULL: no layer has one */
    long num_rounds;                  /* 0: all tokens stay in the cache */
    const struct tm_round *rounds;    /* policy_attention.c */
} tm_step;

/* What a layer's attention has learned besides its projections; NULL: nothing of the kind. */
typedef struct {
    const float *q_norm, *k_norm; /* [head_dim], of each head before rotation */
    const float *sinks;           /* [num_heads]: a score that joins the softmax, without a value */
    float eps;
} tm_learned;

/* One layer's attention in a step. */
typedef struct {
    const tm_step *step;
    const tm_layer *layer;
    tm_learned learned;
    float *qkv;          /* [token][q heads | k heads | v heads], qkv_width of attention.h */
    char *keys, *values; /* of this layer: [page, page_bytes apart][kv head][offset][head_dim, value_dim] */
    float *out;          /* [token][q heads][value_dim] */
    const float *chosen; /* [token][kv heads]: scores; heads at 0 and below give zeros, and those that no token chose are not computed; NULL: all are */
} tm_attention_job;

/* Where the tokens of a tile's sequence lie in its pages: from position `base` on, in the places of a path. */
typedef struct {
    const int32_t *pages;
    const int64_t *path;
    long base;
} tm_places;

/* Tokens `token` .. of one sequence, in slots `start` .. of the cache: their queries of one KV head over all slots up to their own, or
   up to `end` if the layer is bidirectional. */
void attention_tile(const tm_attention_job *j, long token, long len, long start, long end, const tm_places *where, long head, int thread);

/* ---- policy_attention.c: sequences that give up tokens, or read few of them. Field by field as in policies.py. */

/* What a row keeps beside its pages. */
typedef struct {
    long kind, capacity, kept, recent, sinks, first_observed, dense_layers, channels; /* capacity: slots; kind: as in policies.py */
    long stride;   /* values from a KV head's memory to the next's */
    float *memory; /* [layer][kv head]: accumulated attention of slots; keys of sinks; lowest and highest keys of pages; channels, and those of tokens' keys */
} tm_policy;

/* Tokens of a row in slots that follow each other. */
typedef struct {
    const tm_policy *policy;
    long row, token, count, position, slot;
    long evicts;                  /* after these tokens, slots are given up */
    long num_read;                /* pages, or of Double Sparsity tokens, that the query reads; 0: all */
    long first_page, num_pages;   /* that are full now, or tokens that are new, whose keys are to be summed up */
} tm_segment;

/* Segments that can be computed together, and the tiles of their queries. */
typedef struct tm_round {
    long num_segments;
    const tm_segment *segments;
    const tm_step *tiles; /* NULL: the step's own */
} tm_round;

int policy_rounds(const tm_attention_job *job);

typedef struct {
    const float *decay, *skip, *step_bias, *norm; /* NULL: none */
    float eps;
} tm_state_learned;

/* ---- stream.c: weights that are read from a file as they are needed. Field by field as in kernels/native/streams.py. */

/* What streams return besides 0: the file was changed or cut short; it cannot be read. */
enum { TM_STREAM_CHANGED = -5, TM_STREAM_FAILED = -6 };

typedef struct {
    int64_t offset, num_bytes; /* in the file */
    int64_t place;             /* in a slot */
} tm_piece;

typedef struct {
    long fd, file_bytes, changed_ns; /* of the file as it must stay: its size, and when it was last changed */
    long num_units, num_slots, slot_bytes;
    char *slots;
    const tm_piece *pieces;
    const int64_t *first_piece; /* of each unit, and the number of all */
    const int64_t *slot_of;     /* of each unit; NULL: any */
} tm_stream_spec;

typedef struct {
    int64_t num_bytes, waited_ns; /* read; for which computing waited */
    int64_t num_asked, num_read;  /* units */
    int64_t num_missed, num_foreseen; /* of those that were asked for: in no slot; read ahead by a guess */
} tm_stream_figures;

typedef struct tm_stream tm_stream;

/* Until the layer's weights are in its slot. Those of the layers before it are no longer needed: the next ones are read into their slots. */
int stream_layer_op(tm_stream *stream, long layer);
/* Until these experts are in slots: where. The ones of the call before are no longer needed. */
int stream_experts(tm_stream *stream, const long *units, long num, const char **places);
/* These experts may be asked for next: those that are in no slot are read, as far as there are slots that the last call does not need. For
   guesses, there may be twice as many transient slots as were needed, but no more than half of all. */
void stream_ahead(tm_stream *stream, const long *units, long num);

/* A feed-forward of which few neurons are computed (neurons.c). In a stream: of each neuron a row of up, and from `down_place` bytes on a
   column of down. In memory: a row of gate, from `up_place` on one of up, then down; or, where the gate is given, as in a stream. Rows are
   followed by zeros, to a multiple of 8 values, columns to one of 64. Field by field as in kernels/neurons.py. */
typedef struct {
    long kind, num_in, num_inner, num_out, down_place; /* kind: F32, F16 or BF16 of linear.h */
    const float *up_bias, *down_bias; /* NULL: none */
    tm_stream *stream;
    long first_unit;
    const char *memory; /* instead of a stream; NULL: there is one */
    long up_place, num_bytes, act; /* of neurons in memory: num_bytes from one to the next; act: a number of glu.c */
    const float *gate_bias;
    int64_t *num_chosen; /* neurons that rows chose, or, where the gate is given, that were read, counted; NULL: they are not */
    long is_given;       /* of neurons in memory: scores are the gate before its activation */
} tm_neurons;

/* scores: [row][num_inner]. In a stream, or given: the gate before the activation. In memory: neurons above 0 are computed for that row. */
int neurons_op(const tm_neurons *neurons, const float *x, const float *scores, long num_rows, float *out);

/* Neurons that a GPU has computed by the host's cores (kernels/host_neurons.py): a step's rows `first_row` and on, `num_rows` at most.
   given: those rows of x; of the gate, unless it is computed here; and how many rows the step has. */
typedef struct {
    const tm_neurons *neurons;
    const float *given;
    float *gate, *out;      /* gate: where it is computed here; NULL: it is given */
    const void *gate_codes; /* as linear.c has them, of the neurons' kind */
    long first_row, num_rows;
    int64_t *num_ns; /* spent here, added to */
} tm_host_neurons;

/* A matrix of each expert, one after the other, each laid out as a linear's (linear.c). */
typedef struct {
    long kind, num_in, num_out;
    const void *codes;
    const uint16_t *scales;
    const float *bias; /* [expert][num_out]; NULL: none */
    long code_bytes, num_scales; /* from one expert to the next */
    long code_place, scale_place; /* of experts in a stream's slots: where in a slot */
} tm_matrices;

/* A mixture of experts. Field by field as in __init__.py. */
/* How scores choose experts: by score plus bias, among the best groups. */
typedef struct {
    long num_experts, top_k, is_softmax, renormalise, num_groups, top_groups, best_of_group, has_shared;
    float scale;
    const float *bias; /* NULL: none */
} tm_routing;

typedef struct {
    /* topk_first: the softmax is over the chosen experts; is_scored: logits are weights already, negative where not chosen */
    long num_experts, top_k, renormalise, topk_first, is_scored, act;
    tm_matrices gate_up, down;
    tm_matrices shared_gate_up, shared_down; /* of an expert that all rows go through; codes NULL: none */
    int64_t *counts;                         /* [expert]: rows that it got, added to */
    tm_stream *stream;                       /* that has the experts; NULL: they are where the matrices say */
    long first_unit;                         /* the first expert's */
} tm_moe;

/* ---- lora.c. Field by field as in kernels/lora.py. */

typedef struct {
    const void *down, *up;
    long kind, rank; /* of the values, as in linear.c; rank 0: there is no pair */
    float scale;
} tm_lora_pair;

/* Rows of one adapter: `count` of them, from place `first` of the order on. */
typedef struct {
    int64_t slot, first, count;
} tm_lora_tile;

/* Which rows of a step have which adapter. */
typedef struct {
    long num_tokens, num_tiles; /* tokens: that have an adapter */
    const int64_t *order;
    const tm_lora_tile *tiles;
} tm_lora_step;

/* Of one linear layer. max_rank is a multiple of 8. */
typedef struct {
    long num_in, num_parts, max_rank;
    const int64_t *columns, *sizes; /* of the parts' outputs: the first, how many */
    const tm_lora_pair *pairs;      /* [slot][part] */
    const tm_lora_step *step;
} tm_lora;

int lora_op(const tm_lora *lora, const float *x, float *y, long num_out);

/* ---- group.c: processes that compute a step together. Field by field as in parallel/shared.py. */

enum { TM_ALL_REDUCE, TM_ALL_GATHER };
/* What collectives return besides 0; the numbers are parallel/group.py's, too. */
enum { TM_PEER_LOST = -2, TM_PEER_LATE = -3, TM_PEERS_DIFFER = -4 };

typedef struct {
    long rank, size;
    long slot_bytes;  /* of each rank's two slots, a multiple of 64 */
    long deadline_ns; /* to wait for another rank */
    char *shared;     /* a line for all, one for each rank, then the slots */
    int (*call)(int what, float *x, float *out, long num_rows, long width, long num_out); /* for other transports; NULL: shared memory */
} tm_group;

/* x becomes the sum over ranks, added up in their order. */
int all_reduce_op(const tm_group *group, float *x, long num_rows, long width);
/* The ranks' columns side by side, which need not be as many from each. */
int all_gather_op(const tm_group *group, const float *x, float *out, long num_rows, long width, long num_out);

/* Of a matrix whose rows are divided among ranks, `width` columns: the columns that this rank has of all rows, in runs; or how many
   each rank has, one after the other. Row i of `all` is rank r's from all * r / size on. */
typedef struct {
    const tm_group *group;
    long width, num_runs, own_width;
    const long *firsts, *lens, *widths;
} tm_exchange;

/* From own rows [.][width] to all rows [all][own_width]; and from these to own rows, all columns. */
int to_columns_op(const tm_exchange *exchange, const float *x, float *out, long all);
int to_rows_op(const tm_exchange *exchange, const float *x, float *out, long all);
void own_rows_op(const float *x, long all, long width, long rank, long size, float *out);
void columns_op(const float *x, long num_rows, long width, long first, long num, float *out);
static inline long first_row(long all, long rank, long size) { return all * rank / size; }

/* ---- a recorded op (program.c). A buffer is named by its first column in the arena. */

typedef struct {
    long op;                    /* its number in the table of ops */
    long in, in_out, out;       /* columns; -1: none */
    long in_2, in_3;            /* what else is read */
    long kind, width, num_out;  /* width: columns of the input */
    const void *a, *b, *c, *d, *e, *f; /* what else the op reads: weights, its layer's cache, its layer */
    float eps, scale;
} tm_op;

/* Where a replay with `num_rows` rows has an op's buffers; NULL: none. */
typedef struct {
    float *in, *in_out, *out, *in_2, *in_3;
    long num_rows; /* of them: all, or those of this rank */
    const tm_step *step;
    long all_rows;
} tm_buffers;

int linear_op(int kind, const float *x, long num_rows, long num_in, const void *codes, const uint16_t *scales, const float *bias,
              long num_out, float *out);
/* qkv is normed and rotated in place. */
int attention_op(const tm_step *step, const tm_layer *layer, tm_learned learned, float *qkv, void *keys, void *values, float *out, const float *chosen);
/* The same up to the cache, for tokens whose attention nobody reads. */
void write_kv_op(const tm_step *step, const tm_layer *layer, tm_learned learned, float *qkv, void *keys, void *values);
/* Into the cache: a key before rotation, and a value. `keys`, `values`: of the layer, in the first page. */
void kvquant_put(const tm_step *s, const tm_layer *l, char *keys, char *values, long page, long head, long offset, long position,
                 const float *key, const float *value);
/* `num` keys, rotated, and values from position `first` on into [2][num_rows][head_dim]. keys, values: where their codes are; then where
   they are in float32, those past the last as the last. */
void kvquant_take(const tm_layer *l, long head, long first, long num, const char **keys, const char **values,
                  const char *const *key_extras, const char *const *value_extras, long num_rows, float *to);
/* Up to three matrices side by side; NULL: of no columns. */
void concat_op(const float *const parts[3], const long widths[3], long num_rows, float *out);
/* residual += scale * x */
void add_op(const float *x, float scale, float *residual, long num_rows, long width);
/* x within -limit .. limit */
void clip_op(float *x, float limit, long num_rows, long width);
void norm_op(const float *x, float scale, float *residual, const float *weight, float eps, float *out, long num_rows, long width);
void post_norm_op(const float *x, const float *residual, const float *weight, float eps, float *out, long num_rows, long width);
void qk_norm_op(const float *x, const float *q_weight, long num_q, const float *k_weight, long num_k, float eps, float *out, long num_rows,
                long width);
void layer_norm_op(const float *x, float *residual, const float *weight, const float *bias, float eps, float *out, long num_rows, long width);
void act_op(int act, const float *x, float *out, long num_rows, long width);
void conv_op(const tm_states *states, const tm_state_layer *layer, const float *weight, const float *bias, const float *projected, float *out);
/* mixed is overwritten. */
int scan_op(const tm_states *states, const tm_state_layer *layer, tm_state_learned learned, float *mixed, const float *projected,
            const float *steps, const float *bc, float *out);
/* x * sigmoid(gate) */
void gate_op(const float *x, const float *gate, float *out, long num_rows, long width);
void glu_values(int act, const float *gate_up, float *out, long width); /* one row */
/* out: [row][num_experts, and one for the shared expert]: weights of the chosen experts, -infinity for the others, as moe_op takes them. */
void score_experts_op(const tm_routing *routing, const float *logits, float *out, long num_rows);
/* logits: [row][num_experts, and one for the shared expert]. */
/* `ahead`: the next layer's, whose experts are read by guess, or NULL; `ahead_logits`: by its router. */
int moe_op(const tm_moe *moe, const float *x, const float *logits, const tm_moe *ahead, const float *ahead_logits, long num_rows, float *out);
void glu_op(int act, const float *gate_up, float *out, long num_rows, long width);

#endif
