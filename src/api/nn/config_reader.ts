/**
 * Takes a JSON object of a config apart key by key, so that what nobody asked for can be named at
 * the end.
 */
import { LoramemError } from "../../ffi/error.ts";

/** The `BAD_CONFIG` error of a config key, or of the whole file where `key` is null. */
export function badConfig(
  file: string,
  key: string | null,
  what: string,
  fix: string,
): LoramemError {
  const details = key === null ? { file } : { file, key };
  return new LoramemError("BAD_CONFIG", `config: ${what}: ${file}: ${fix}`, details);
}

/** The `UNSUPPORTED` error of a config key that is understood. */
export function unsupported(file: string, key: string, value: unknown, fix: string): LoramemError {
  const message = `config: not supported: ${key} = ${excerpt(value)} in ${file}: ${fix}`;
  return new LoramemError("UNSUPPORTED", message, { what: key });
}

/** A value from a file, short enough for a message. */
export function excerpt(value: unknown): string {
  let text: string;
  try {
    text = JSON.stringify(value) ?? "missing";
  } catch {
    text = "a value nested too deep to show"; // JSON.stringify is recursive
  }
  return text.length > 80 ? `${text.slice(0, 80)}...` : text;
}

/** Whether a value is a JSON object. */
export function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** Reads the keys of one object; null counts as absent, as Hugging Face configs use it. */
export class ConfigReader {
  readonly file: string;
  readonly #prefix: string;
  readonly #rest: Map<string, unknown>;

  /** `prefix` stands before key names in messages, e.g. `rope_scaling.`. */
  constructor(object: Record<string, unknown>, file: string, prefix = "") {
    this.file = file;
    this.#prefix = prefix;
    this.#rest = new Map(Object.entries(object));
  }

  /** The value, `undefined` where it is absent or null. The key counts as read. */
  take(key: string): unknown {
    const value = this.#rest.get(key) ?? undefined;
    this.#rest.delete(key);
    return value;
  }

  /** The value without reading it. */
  peek(key: string): unknown {
    return this.#rest.get(key);
  }

  /** An integer from 1 to `max`; without a fallback the key must be there. */
  integer(key: string, max: number, fallback?: number): number {
    const value = this.take(key) ?? fallback;
    if (Number.isInteger(value) && (value as number) >= 1 && (value as number) <= max) {
      return value as number;
    }
    throw this.bad(key, value, `an integer from 1 to ${max}`);
  }

  /** A number above 0; the key must be there. */
  positive(key: string): number {
    const value = this.take(key);
    if (Number.isFinite(value) && (value as number) > 0) return value as number;
    throw this.bad(key, value, "a number above 0");
  }

  /** true or false; false where it is absent. */
  boolean(key: string): boolean {
    const value = this.take(key) ?? false;
    if (typeof value === "boolean") return value;
    throw this.bad(key, value, "true or false");
  }

  /** What nobody took, nulls included. */
  rest(): IterableIterator<[string, unknown]> {
    return this.#rest.entries();
  }

  /** The error for a key with a wrong or missing value. */
  bad(key: string, value: unknown, expected: string): LoramemError {
    const name = this.#prefix + key;
    const what = value === undefined ? `${name} is missing` : `${name} is ${excerpt(value)}`;
    return badConfig(this.file, name, what, `it must be ${expected}`);
  }
}
