/* crc32c.c: CRC-32C (Castagnoli polynomial, reflected), by the processor's instruction where it has one, else by tables.
 *
 * The instruction takes 3 cycles and a new one can start every cycle, so three parts of the data are worked on at once and
 * then joined: a checksum is moved over n zero bytes by a product with x^8n modulo the polynomial. */
#include "file.h"

#include <string.h>

#define POLYNOMIAL UINT32_C(0x82f63b78)
#define PART UINT64_C(4096) /* bytes of each of the three parts; two products for 12 KiB cost nothing */

static uint32_t tables[8][256];
static uint32_t powers[64]; /* x^(2^n) modulo the polynomial */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static uint32_t over_one, over_two; /* x^(8 PART) and x^(16 PART) */
static bool have_instruction;

/* Product of two polynomials modulo the polynomial; the highest coefficient is bit 31 of x^0. */
static uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = UINT32_C(1) << 31; bit; bit >>= 1) {
    if (a & bit) product ^= b;
    b = b & 1 ? (b >> 1) ^ POLYNOMIAL : b >> 1;
  }
  return product;
}

/* Moves a checksum over zero bytes: bit n of their count stands for x^(2^(n + 3)). Files have less than 2^60 bytes. */
static uint32_t shift(uint32_t crc, uint64_t bytes) {
  for (int n = 3; bytes && n < 64; bytes >>= 1, n++) {
    if (bytes & 1) crc = multiply(powers[n], crc);
  }
  return crc;
}

static void prepare(void) {
  for (uint32_t i = 0; i < 256; i++) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; bit++) crc = crc & 1 ? (crc >> 1) ^ POLYNOMIAL : crc >> 1;
    tables[0][i] = crc;
  }
  for (int t = 1; t < 8; t++) {
    for (int i = 0; i < 256; i++) tables[t][i] = (tables[t - 1][i] >> 8) ^ tables[0][tables[t - 1][i] & 255];
  }
  powers[0] = UINT32_C(1) << 30; /* x */
  for (int i = 1; i < 64; i++) powers[i] = multiply(powers[i - 1], powers[i - 1]);
  over_one = shift(UINT32_C(1) << 31, PART);
  over_two = shift(UINT32_C(1) << 31, 2 * PART);
#if defined(__x86_64__)
  have_instruction = __builtin_cpu_supports("sse4.2");
#endif
}

uint32_t lm_crc32c_shift(uint32_t crc, uint64_t bytes) {
  pthread_once(&once, prepare);
  return shift(crc, bytes);
}

static uint32_t by_tables(uint32_t crc, const uint8_t *data, uint64_t bytes) {
  for (; bytes >= 8; data += 8, bytes -= 8) {
    uint32_t low, high;
    memcpy(&low, data, 4);
    memcpy(&high, data + 4, 4);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    low = __builtin_bswap32(low), high = __builtin_bswap32(high);
#endif
    low ^= crc;
    crc = tables[7][low & 255] ^ tables[6][low >> 8 & 255] ^ tables[5][low >> 16 & 255] ^ tables[4][low >> 24] ^
          tables[3][high & 255] ^ tables[2][high >> 8 & 255] ^ tables[1][high >> 16 & 255] ^ tables[0][high >> 24];
  }
  for (; bytes; bytes--) crc = (crc >> 8) ^ tables[0][(crc ^ *data++) & 255];
  return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) static uint32_t by_instruction(uint32_t crc, const uint8_t *data, uint64_t bytes) {
  uint64_t a = crc;
  for (; bytes >= 3 * PART; data += 3 * PART, bytes -= 3 * PART) {
    uint64_t b = 0, c = 0, x, y, z;
    for (uint64_t i = 0; i < PART; i += 8) {
      memcpy(&x, data + i, 8);
      memcpy(&y, data + PART + i, 8);
      memcpy(&z, data + 2 * PART + i, 8);
      a = __builtin_ia32_crc32di(a, x);
      b = __builtin_ia32_crc32di(b, y);
      c = __builtin_ia32_crc32di(c, z);
    }
    a = multiply(over_two, (uint32_t)a) ^ multiply(over_one, (uint32_t)b) ^ c;
  }
  for (; bytes >= 8; data += 8, bytes -= 8) {
    uint64_t x;
    memcpy(&x, data, 8);
    a = __builtin_ia32_crc32di(a, x);
  }
  uint32_t rest = (uint32_t)a;
  for (; bytes; bytes--) rest = __builtin_ia32_crc32qi(rest, *data++);
  return rest;
}
#endif

uint32_t lm_crc32c_portable(uint32_t crc, const void *data, uint64_t bytes) {
  pthread_once(&once, prepare);
  return ~by_tables(~crc, data, bytes);
}

uint32_t lm_crc32c(uint32_t crc, const void *data, uint64_t bytes) {
  pthread_once(&once, prepare);
  if (!data || !bytes) return crc;
#if defined(__x86_64__)
  if (have_instruction) return ~by_instruction(~crc, data, bytes);
#endif
  return lm_crc32c_portable(crc, data, bytes);
}
