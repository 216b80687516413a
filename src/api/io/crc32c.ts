/**
 * CRC-32C (Castagnoli; RFC 3720, appendix B.4) in JavaScript: for headers, and for looking at files where there is no native
 * library. Data that passes through a file ring is checked there, while it is in the cache.
 */

/** The polynomial 0x1EDC6F41, lowest bit first. */
const POLYNOMIAL = 0x82f63b78;
/** Bytes that are taken at a time ("slicing", Kounavis & Berry 2005): one table for each place. */
const SLICE = 8;

const TABLES = makeTables();

function makeTables(): Uint32Array {
  const tables = new Uint32Array(SLICE * 256);
  for (let byte = 0; byte < 256; byte++) {
    let crc = byte;
    for (let bit = 0; bit < 8; bit++) crc = (crc >>> 1) ^ (crc & 1 ? POLYNOMIAL : 0);
    tables[byte] = crc;
  }
  for (let at = 256; at < tables.length; at++) {
    const before = tables[at - 256] as number;
    tables[at] = (before >>> 8) ^ (tables[before & 255] as number);
  }
  return tables;
}

/**
 * The checksum of bytes.
 *
 * @param before Checksum of what comes before them; 0 to begin.
 */
export function crc32c(bytes: Uint8Array, before = 0): number {
  const table = (place: number, byte: number) => TABLES[256 * place + byte] as number;
  const { length } = bytes;
  const view = new DataView(bytes.buffer, bytes.byteOffset, length);
  let crc = ~before;
  let at = 0;
  for (; at + SLICE <= length; at += SLICE) {
    const low = crc ^ view.getUint32(at, true);
    const high = view.getUint32(at + 4, true);
    crc =
      table(7, low & 255) ^
      table(6, (low >>> 8) & 255) ^
      table(5, (low >>> 16) & 255) ^
      table(4, low >>> 24) ^
      table(3, high & 255) ^
      table(2, (high >>> 8) & 255) ^
      table(1, (high >>> 16) & 255) ^
      table(0, high >>> 24);
  }
  for (; at < length; at++) crc = (crc >>> 8) ^ table(0, (crc ^ view.getUint8(at)) & 255);
  return ~crc >>> 0;
}
