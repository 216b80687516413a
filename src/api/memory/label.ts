/** Names of memory as the native library takes them. */

/** Labels repeat; encoding one costs as much as an allocation. */
const encoded = new Map<string, Uint8Array<ArrayBuffer>>();

const MOST_LABELS = 1024;

/** A terminated text; the library keeps the first 31 bytes. */
export function encodeLabel(label: string): Uint8Array<ArrayBuffer> {
  let bytes = encoded.get(label);
  if (bytes === undefined) {
    if (encoded.size === MOST_LABELS) encoded.clear();
    bytes = new TextEncoder().encode(`${label}\0`);
    encoded.set(label, bytes);
  }
  return bytes;
}
