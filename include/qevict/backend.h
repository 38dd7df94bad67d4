/* C entry points of the llama.cpp plug-in (libggml-qevict.so), for programs that link it or look
 * the symbols up.
 *
 * Programs that only load the library (GGML_BACKEND_PATH with `-dev QEVICT` or
 * LLAMA_ARG_DEVICE=QEVICT) need none of this: the environment variable QEVICT_CONFIG (inline
 * `key=value,...` or the path of a file) configures every cache.
 *
 * Conventions: functions return 0 on success, else a negative number; the sentence that says why is
 * kept per thread and returned by qevict_last_error(). Nothing here exits, aborts, prints to stdout
 * or throws. All functions may be called from any thread, but not concurrently with llama_decode()
 * on the same context.
 */
#ifndef QEVICT_BACKEND_H
#define QEVICT_BACKEND_H

#include <stdint.h>

#if defined(_WIN32)
#define QEVICT_API
#else
#define QEVICT_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_backend_reg;

/* The backend registration (device QEVICT); pass it to ggml_backend_register() once. NULL if this
 * process runs another ggml version than the plug-in was built for (qevict_last_error() says
 * which). Lifetime: the process. */
QEVICT_API struct ggml_backend_reg* qevict_backend_reg(void);

/* Sets the configuration of all contexts created from now on, on top of the defaults (same text as
 * QEVICT_CONFIG). */
QEVICT_API int qevict_configure(const char* text_or_path);

/* A session is one llama_context on the QEVICT device. Returns the newest one created by the
 * calling thread, 0 if none. */
QEVICT_API uint64_t qevict_last_session(void);

/* Resolves a budget fraction against `tokens` (prompt + max_new) instead of n_ctx. Before the first
 * routing event. */
QEVICT_API int qevict_set_budget_tokens(uint64_t session, uint32_t tokens);

/* What the next batches are. AUTO: rows tell (docs/architecture.md, Phases). PROMPT: batches are
 * prompt chunks whatever their size. DECODE: each row is one decode step, however many rows a
 * batch has. */
enum qevict_phase { QEVICT_PHASE_AUTO = 0, QEVICT_PHASE_PROMPT = 1, QEVICT_PHASE_DECODE = 2 };
QEVICT_API int qevict_set_phase(uint64_t session, enum qevict_phase phase);

/* Statistics of all caches of a session (sums; a model with sliding windows has two). Sizes in
 * bytes. */
struct qevict_stats {
  uint64_t full_bytes, packed_bytes, dormant_bytes, tables_bytes,
      slack_bytes;       /* their sum is what the budget limits */
  uint64_t f16_bytes;    /* the same tokens in an f16 cache */
  uint64_t budget_bytes; /* 0 = none in force */
  uint64_t arena_bytes, arena_peak_bytes;
  uint64_t arena_resident_bytes; /* by the operating system (Linux smaps) */
  uint64_t peak_bytes;           /* highest sum at the end of a step while the limit was in force */
  uint64_t workspace_bytes;      /* kernels' and masks' scratch, outside the budget */
  uint64_t full_tokens, packed_tokens, evicted_tokens; /* summed over layers */
  uint64_t n_layers;                                   /* with per_head every kv head is a layer */
  uint64_t n_streams, cells_per_stream;
  uint64_t capacity_f16_bytes; /* an f16 cache of all cells */
  uint64_t events, promotions, demotions, first_encodings, evictions;
  /* Time spent, nanoseconds: routing and packing, attention, writing of rows, masks and lists of
   * windows, scores. */
  uint64_t route_ns, attention_ns, write_ns, mask_ns, score_ns;
  uint64_t violations; /* found by the validator (QEVICT_CHECK=1) */
};
QEVICT_API int qevict_get_stats(uint64_t session, struct qevict_stats* stats);

/* Plan dump of one layer for tests and tracing: for windows in order, birth number and rung of
 * the keys (0 full, 1 ... packed). Writes at most `capacity` entries, returns the number there are, negative on
 * error. */
QEVICT_API int qevict_get_layer(uint64_t session, uint32_t cache, uint32_t layer, uint32_t* births,
                                uint8_t* tiers, float* scores, uint32_t capacity);

/* Writes the statistics that codec=wf is made of (src/codecs/statistics.h) to a file: of what the
 * session's caches hold in full precision, at most `max_tokens` tokens of each layer, and of the
 * queries so far (which the session notes if its codec is wf). model_hash names the model in the
 * file. */
QEVICT_API int qevict_save_statistics(uint64_t session, const char* path, uint64_t model_hash,
                                      uint32_t max_tokens);

QEVICT_API const char* qevict_version(void);
QEVICT_API const char* qevict_last_error(void);

#ifdef __cplusplus
}
#endif
#endif
