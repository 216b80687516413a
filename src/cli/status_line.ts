/** One live line on a terminal; a line now and then where the output is a file. */

/** Milliseconds between lines that do not replace each other. */
const PLAIN_INTERVAL = 5000;

/** Where the line goes; `process.stdout` has this form. */
export interface LineTarget {
  readonly isTTY?: boolean | undefined;
  readonly columns?: number | undefined;
  write(text: string): unknown;
}

/** A line that is rewritten in place. */
export class StatusLine {
  readonly #target: LineTarget;
  #lastPlain = Number.NEGATIVE_INFINITY;
  #open = false;

  constructor(target: LineTarget) {
    this.#target = target;
  }

  /** Shows `text` now; a `last` line is never skipped, nor is the first of what comes after it. */
  show(text: string, last = false): void {
    if (this.#target.isTTY) {
      const width = Math.max(20, (this.#target.columns ?? 80) - 1);
      this.#target.write(`\r\x1b[2K${text.slice(0, width)}`);
      this.#open = true;
      if (last) this.end();
      return;
    }
    const now = performance.now();
    if (!last && now - this.#lastPlain < PLAIN_INTERVAL) return;
    // What follows a last line is another story, and begins at once.
    this.#lastPlain = last ? Number.NEGATIVE_INFINITY : now;
    this.#target.write(`${text}\n`);
  }

  /** Leaves the line as it is; what is printed next starts below it. */
  end(): void {
    if (this.#open) this.#target.write("\n");
    this.#open = false;
  }
}

/** Seconds as `1:05` or `2:01:05`. */
export function formatDuration(seconds: number): string {
  const whole = Math.max(0, Math.round(seconds));
  const parts = [Math.floor(whole / 60) % 60, whole % 60].map((part) =>
    String(part).padStart(2, "0"),
  );
  const hours = Math.floor(whole / 3600);
  return hours > 0 ? `${hours}:${parts.join(":")}` : `${Number(parts[0])}:${parts[1]}`;
}
