/**
 * What this source was written against; checked right after loading. `node tools/header_hash.mjs` rewrites the hash after
 * a change of csrc/include, and tests/ffi/header_test.ts fails until it has run.
 */

/** ABI version that the library must have: the same major, at least this minor. */
export const ABI = { major: 0, minor: 1 } as const;

/** First 8 bytes of the SHA-256 of csrc/include/loramem.h followed by loramem_kernels.h, big-endian. */
export const HEADER_HASH = 0x897813849d58ce83n;
