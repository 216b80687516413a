/**
 * What this source was written against; checked right after loading. `node tools/header_hash.mjs` rewrites the hash after
 * a change of csrc/include, and tests/header_test.ts fails until it has run.
 */

/** ABI version that the library must have: the same major, at least this minor. */
export const ABI = { major: 0, minor: 1 } as const;

/** First 8 bytes of the SHA-256 of the headers of csrc/include, one after the other, big-endian. */
export const HEADER_HASH = 0x418b22817f498314n;
