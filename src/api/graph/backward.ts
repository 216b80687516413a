/**
 * The reverse walk. Every op kind has a hand-written backward rule; the walk only hands gradients from consumers to
 * producers (fan-in) and re-emits producers of values that were not kept.
 */
import { add } from "./ops/add.ts";
import type { BackwardWalk, Op, OpKind, ProgramBuilder } from "./program.ts";
import { makeValue, rootOf, type Value, viewOf } from "./value.ts";

/**
 * Appends the backward pass of `forward` to `builder`.
 *
 * @param builder Where the ops of the forward pass stand already.
 * @param forward The ops to walk, in forward order.
 * @param seeds Values with their gradients, such as the input of the loss.
 * @param isKept Whether the save-point policy keeps a value that an op of `forward` wrote.
 * @param restored Values that are not kept and not computed again either, with what stands for them.
 */
export function emitBackward(
  builder: ProgramBuilder,
  forward: readonly Op[],
  seeds: ReadonlyMap<Value, Value>,
  isKept: (value: Value) => boolean,
  restored: ReadonlyMap<Value, Value> = new Map(),
): void {
  const walk = new ReverseWalk(builder, forward, seeds, isKept, restored);
  for (let index = forward.length - 1; index >= 0; index--) walk.step(forward[index] as Op);
}

class ReverseWalk implements BackwardWalk {
  readonly #builder: ProgramBuilder;
  readonly #gradients: Map<Value, Value>;
  readonly #producers = new Map<Value, Op>();
  readonly #wanted = new Set<Value>();
  readonly #isKept: (value: Value) => boolean;
  /** Recomputed and restored copies. Every copy is read for the last time within its own layer, so none lives long. */
  readonly #copies: Map<Value, Value>;

  constructor(
    builder: ProgramBuilder,
    forward: readonly Op[],
    seeds: ReadonlyMap<Value, Value>,
    isKept: (value: Value) => boolean,
    restored: ReadonlyMap<Value, Value>,
  ) {
    this.#copies = new Map(restored);
    this.#builder = builder;
    this.#gradients = new Map(seeds);
    this.#isKept = isKept;
    for (const op of forward) {
      const differentiable = op.uses.reads.some(
        (value) => rootOf(value).memory === "trainable" || this.#wanted.has(value),
      );
      for (const value of op.uses.writes) {
        this.#producers.set(value, op);
        if (differentiable) this.#wanted.add(value);
      }
    }
  }

  step(op: Op): void {
    if (!op.uses.writes.some((value) => this.#gradients.has(value) && this.wants(value))) return;
    this.#builder.layer = op.layer;
    op.kind.backward?.(op.attributes, this);
    for (const value of op.uses.writes) this.#gradients.delete(value);
  }

  gradient(value: Value): Value | null {
    return this.#gradients.get(value) ?? null;
  }

  wants(value: Value): boolean {
    return this.#wanted.has(value);
  }

  contribute(value: Value, gradient: Value): void {
    if (!this.wants(value)) return;
    const earlier = this.#gradients.get(value);
    if (earlier === undefined) {
      this.#gradients.set(value, gradient);
      return;
    }
    const sum = this.gradientLike(value);
    this.emit(add, { y: sum, a: earlier, b: gradient });
    this.#gradients.set(value, sum);
  }

  replace(value: Value, gradient: Value): void {
    this.#gradients.set(value, gradient);
  }

  need(value: Value): Value {
    const root = rootOf(value);
    if (root !== value) {
      const base = this.need(root);
      if (base === root) return value;
      return viewOf(base, value.name, value.shape, value.view?.elements ?? 0, value.pitch);
    }
    const producer = this.#producers.get(value);
    if (producer === undefined || this.#isKept(value)) return value;
    const copy = this.#copies.get(value);
    if (copy !== undefined) return copy;
    this.#recompute(producer);
    return this.#copies.get(value) as Value;
  }

  emit<A>(kind: OpKind<A>, attributes: A): void {
    this.#builder.emit(kind, attributes, "backward");
  }

  gradientLike(value: Value): Value {
    return this.#builder.value(`d(${value.name})`, value.dtype, value.shape);
  }

  /** Emits the producer of a dropped value again, from kept ancestors: the same kernel, so the same bits. */
  #recompute(producer: Op): void {
    const mapping = new Map<Value, Value>();
    for (const value of producer.uses.reads) mapping.set(value, this.need(value));
    for (const value of producer.uses.writes) {
      const copy = makeValue(`${value.name}'`, value.dtype, value.shape, {
        layer: value.layer,
        pitch: value.pitch,
      });
      mapping.set(value, copy);
      this.#copies.set(value, copy);
    }
    for (const value of producer.uses.scratch ?? []) {
      mapping.set(
        value,
        makeValue(value.name, value.dtype, value.shape, { layer: value.layer, pitch: value.pitch }),
      );
    }
    this.#builder.emit(producer.kind, substitute(producer.attributes, mapping), "recompute");
  }
}

/** `attributes` with every value replaced that `mapping` names; attributes are plain objects, arrays and values. */
function substitute(attributes: unknown, mapping: ReadonlyMap<Value, Value>): unknown {
  if (attributes === null || typeof attributes !== "object") return attributes;
  const mapped = mapping.get(attributes as Value);
  if (mapped !== undefined) return mapped;
  if ("memory" in attributes && "dtype" in attributes) return attributes;
  if (Array.isArray(attributes)) return attributes.map((item) => substitute(item, mapping));
  return Object.fromEntries(
    Object.entries(attributes).map(([key, item]) => [key, substitute(item, mapping)]),
  );
}
