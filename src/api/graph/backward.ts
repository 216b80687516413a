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
  /** Copies that are forgotten after the recomputation that they were made for: their producer restores them. */
  readonly #passing = new Set<Value>();
  readonly #waiting = new Map<Value, ((value: Value) => void)[]>();

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
    const { writes } = op.uses;
    this.#builder.layer = op.layer;
    if (writes.some((value) => this.#gradients.has(value) && this.wants(value))) {
      op.kind.backward?.(op.attributes, this);
      for (const value of writes) this.#gradients.delete(value);
    }
    for (const value of writes) {
      const uses = this.#waiting.get(value) ?? [];
      this.#waiting.delete(value);
      if (uses.length === 0) continue;
      const there = this.need(value);
      for (const use of uses) use(there);
      this.#copies.delete(value);
    }
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
    const there = this.#available(value);
    for (const passing of this.#passing) this.#copies.delete(passing);
    this.#passing.clear();
    return there;
  }

  prepare(value: Value): void {
    const producer = this.#producers.get(value);
    if (producer?.kind.restores !== true || !this.wants(value)) return;
    for (const read of producer.uses.reads) this.need(read);
  }

  later(value: Value, use: (value: Value) => void): void {
    const producer = this.#producers.get(value);
    if (producer?.kind.restores !== true || this.#isKept(value)) {
      use(this.need(value));
      return;
    }
    this.#waiting.set(value, [...(this.#waiting.get(value) ?? []), use]);
  }

  restored(value: Value): Value | null {
    return this.#waiting.has(value) ? this.#copy(value) : null;
  }

  emit<A>(kind: OpKind<A>, attributes: A): void {
    this.#builder.emit(kind, attributes, "backward");
  }

  gradientLike(value: Value): Value {
    return this.#builder.value(`d(${value.name})`, value.dtype, value.shape);
  }

  #available(value: Value): Value {
    const root = rootOf(value);
    if (root !== value) {
      const base = this.#available(root);
      if (base === root) return value;
      return viewOf(base, value.name, value.shape, value.view?.elements ?? 0, value.pitch);
    }
    const producer = this.#producers.get(value);
    if (producer === undefined || this.#isKept(value)) return value;
    return this.#copies.get(value) ?? this.#recompute(producer, value);
  }

  /** Emits the producer of a dropped value again, from kept ancestors: the same kernel, so the same bits. */
  #recompute(producer: Op, wanted: Value): Value {
    const mapping = new Map<Value, Value>();
    for (const value of producer.uses.reads) mapping.set(value, this.#available(value));
    for (const value of producer.uses.writes) {
      mapping.set(value, this.#copy(value));
      if (producer.kind.restores === true) this.#passing.add(value);
    }
    for (const value of producer.uses.scratch ?? []) {
      mapping.set(
        value,
        makeValue(value.name, value.dtype, value.shape, { layer: value.layer, pitch: value.pitch }),
      );
    }
    this.#builder.emit(producer.kind, substitute(producer.attributes, mapping), "recompute");
    return this.#copies.get(wanted) as Value;
  }

  #copy(value: Value): Value {
    const { dtype, shape, layer, pitch } = value;
    const copy = makeValue(`${value.name}'`, dtype, shape, { layer, pitch });
    this.#copies.set(value, copy);
    return copy;
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
