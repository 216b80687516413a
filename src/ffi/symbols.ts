/**
 * The only list of native functions in TypeScript. Order, names and types follow the headers of
 * csrc/include; tests/header_test.ts compares them.
 *
 * Memory that JavaScript lends for one call is `buf` (strings, structs, results); native memory and objects are `ptr`.
 */
import type { FnTable } from "./types.ts";

/** Every kernel: context, packed arguments, stream. */
const KERNEL = { args: ["ptr", "buf", "ptr"], ret: "i32" } as const;

/** What is checked before the rest of the library is bound: an older library lacks functions. */
export const HANDSHAKE = {
  lm_abi_version: { args: [], ret: "u32" },
  lm_header_hash: { args: [], ret: "u64" },
  lm_build_info: { args: ["buf", "u64"], ret: "i32" },
} as const satisfies FnTable;

/** The kernels, named as in C. */
export const KERNELS = {
  lm_scale: KERNEL,
  lm_add: KERNEL,
  lm_cast: KERNEL,
  lm_embedding_forward: KERNEL,
  lm_gather_rows: KERNEL,
  lm_argmax: KERNEL,
  lm_rms_norm_forward: KERNEL,
  lm_rms_norm_backward: KERNEL,
  lm_glu_forward: KERNEL,
  lm_glu_backward: KERNEL,
  lm_rope: KERNEL,
  lm_lora_down: KERNEL,
  lm_lora_linear_forward: KERNEL,
  lm_lora_linear_backward: KERNEL,
  lm_lora_down_backward: KERNEL,
  lm_attention_forward: KERNEL,
  lm_attention_backward: KERNEL,
  lm_attention_cached_forward: KERNEL,
  lm_linear_cross_entropy: KERNEL,
  lm_loss_sum: KERNEL,
  lm_grad_norm: KERNEL,
  lm_adamw: KERNEL,
  lm_scaler_set: KERNEL,
  lm_scaler_scale: KERNEL,
  lm_scaler_unscale: KERNEL,
  lm_scaler_update: KERNEL,
} as const satisfies FnTable;

/** Every native function. */
export const SYMBOLS = {
  ...HANDSHAKE,

  lm_ctx_open: { args: ["buf", "i32", "buf", "u64"], ret: "ptr" },
  lm_ctx_destroy: { args: ["ptr"], ret: "void" },
  lm_last_error: { args: ["ptr", "buf", "u64"], ret: "i32" },
  lm_ctx_info: { args: ["ptr", "buf", "u64"], ret: "i32" },
  lm_choices_time: { args: ["ptr", "i32"], ret: "i32" },
  lm_choices_write: { args: ["ptr", "buf", "u64"], ret: "i32" },
  lm_choices_read: { args: ["ptr", "buf"], ret: "i32" },
  lm_ctx_stats: { args: ["ptr", "buf"], ret: "i32" },
  lm_ctx_memory_stats: { args: ["ptr", "i32", "buf"], ret: "i32" },
  lm_ctx_reset_peaks: { args: ["ptr"], ret: "i32" },
  lm_ctx_snapshot: { args: ["ptr", "buf", "u64"], ret: "i32" },
  lm_debug_enable: { args: ["ptr"], ret: "i32" },

  lm_mem_reserve: { args: ["ptr", "u64"], ret: "ptr" },
  lm_mem_release: { args: ["ptr", "ptr"], ret: "i32" },
  lm_mem_label: { args: ["ptr", "ptr", "buf"], ret: "i32" },
  lm_ptr_add: { args: ["ptr", "i64"], ret: "ptr" },
  lm_mem_copy: { args: ["ptr", "ptr", "ptr", "u64", "ptr"], ret: "i32" },
  lm_mem_fill: { args: ["ptr", "ptr", "i32", "u64", "ptr"], ret: "i32" },

  lm_pinned_create: { args: ["ptr", "u64", "i32"], ret: "ptr" },
  lm_pinned_data: { args: ["ptr"], ret: "ptr" },
  lm_pinned_destroy: { args: ["ptr"], ret: "void" },
  lm_pinned_locked: { args: ["ptr"], ret: "i32" },

  lm_pinned_pool_create: { args: ["ptr", "u64"], ret: "ptr" },
  lm_pinned_pool_destroy: { args: ["ptr"], ret: "void" },
  lm_pinned_pool_acquire: { args: ["ptr", "u64", "i32"], ret: "ptr" },
  lm_pinned_pool_trim: { args: ["ptr"], ret: "i32" },
  lm_pinned_pool_stats_get: { args: ["ptr", "buf"], ret: "i32" },

  lm_managed_reserve: { args: ["ptr", "u64"], ret: "ptr" },
  lm_managed_release: { args: ["ptr", "ptr"], ret: "i32" },
  lm_managed_advise: { args: ["ptr", "ptr", "u64", "i32"], ret: "i32" },
  lm_managed_prefetch: { args: ["ptr", "ptr", "u64", "i32", "ptr"], ret: "i32" },

  lm_pool_create: { args: ["ptr", "u64"], ret: "ptr" },
  lm_pool_destroy: { args: ["ptr"], ret: "void" },
  lm_pool_alloc: { args: ["ptr", "u64", "buf", "ptr"], ret: "u64" },
  lm_pool_pointer: { args: ["ptr", "u64"], ret: "ptr" },
  lm_pool_free: { args: ["ptr", "u64", "ptr"], ret: "i32" },
  lm_pool_trim: { args: ["ptr"], ret: "i32" },
  lm_pool_stats_get: { args: ["ptr", "buf"], ret: "i32" },
  lm_pool_reset_peaks: { args: ["ptr"], ret: "i32" },
  lm_pool_snapshot: { args: ["ptr", "buf", "u64"], ret: "i32" },
  lm_pool_check: { args: ["ptr"], ret: "i32" },

  lm_stream_create: { args: ["ptr", "i32"], ret: "ptr" },
  lm_stream_destroy: { args: ["ptr"], ret: "void" },
  lm_stream_query: { args: ["ptr"], ret: "i32" },
  lm_stream_wait: { args: ["ptr"], ret: "i32" },
  lm_stream_on_done: { args: ["ptr", "fn", "u64"], ret: "i32" },

  lm_event_create: { args: ["ptr"], ret: "ptr" },
  lm_event_destroy: { args: ["ptr"], ret: "void" },
  lm_event_record: { args: ["ptr", "ptr"], ret: "i32" },
  lm_event_query: { args: ["ptr"], ret: "i32" },
  lm_event_wait: { args: ["ptr"], ret: "i32" },
  lm_event_elapsed: { args: ["buf", "ptr", "ptr"], ret: "i32" },
  lm_stream_wait_event: { args: ["ptr", "ptr"], ret: "i32" },

  lm_graph_begin: { args: ["ptr"], ret: "i32" },
  lm_graph_end: { args: ["ptr"], ret: "ptr" },
  lm_graph_launch: { args: ["ptr", "ptr"], ret: "i32" },
  lm_graph_nodes: { args: ["ptr"], ret: "i32" },
  lm_graph_destroy: { args: ["ptr"], ret: "void" },

  lm_range_push: { args: ["ptr", "buf"], ret: "i32" },
  lm_range_pop: { args: ["ptr"], ret: "i32" },
  lm_file_ring_create: { args: ["ptr", "u64", "i32", "i32"], ret: "ptr" },
  lm_file_ring_destroy: { args: ["ptr"], ret: "void" },
  lm_file_ring_stats_get: { args: ["ptr", "buf"], ret: "i32" },
  lm_file_open: { args: ["ptr", "buf", "i32", "i32", "u64", "fn", "u64"], ret: "ptr" },
  lm_file_read: { args: ["ptr", "buf", "i32", "i32", "ptr", "fn", "u64"], ret: "ptr" },
  lm_file_write: { args: ["ptr", "buf", "buf", "i32", "i32", "ptr", "fn", "u64"], ret: "ptr" },
  lm_file_sync: { args: ["ptr", "fn", "u64"], ret: "ptr" },
  lm_file_publish: { args: ["ptr", "buf", "fn", "u64"], ret: "ptr" },
  lm_file_close: { args: ["ptr", "fn", "u64"], ret: "ptr" },
  lm_file_destroy: { args: ["ptr"], ret: "void" },
  lm_file_remove: { args: ["ptr", "buf", "fn", "u64"], ret: "ptr" },
  lm_folder_create: { args: ["ptr", "buf", "fn", "u64"], ret: "ptr" },
  lm_disk_free: { args: ["ptr", "buf", "fn", "u64"], ret: "ptr" },
  lm_file_request_query: { args: ["ptr"], ret: "i32" },
  lm_file_request_result: { args: ["ptr", "buf"], ret: "i32" },
  lm_file_request_error: { args: ["ptr", "buf", "u64"], ret: "i32" },
  lm_file_request_file: { args: ["ptr"], ret: "ptr" },
  lm_file_request_checksums: { args: ["ptr", "buf"], ret: "i32" },
  lm_file_request_host: { args: ["ptr", "buf", "u64"], ret: "i32" },
  lm_file_request_cancel: { args: ["ptr"], ret: "void" },
  lm_file_request_destroy: { args: ["ptr"], ret: "void" },
  lm_file_lock_acquire: { args: ["ptr", "buf", "buf"], ret: "ptr" },
  lm_file_lock_destroy: { args: ["ptr"], ret: "void" },
  lm_crc32c: { args: ["u32", "buf", "u64"], ret: "u32" },

  ...KERNELS,
} as const satisfies FnTable;
