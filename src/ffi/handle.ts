/**
 * Ownership of native objects. `dispose()` is how memory is given back; the FinalizationRegistry is a leak net behind it:
 * it fires late, never inside a synchronous loop, and never at exit.
 */
import { LoramemError } from "./error.ts";
import type { Ptr } from "./types.ts";

/** What a handle owns. It never refers to the handle, so that the registry can hold it. */
export interface Cell {
  /** Kind and name for messages, such as `DeviceBuffer "x"`. */
  readonly label: string;
  /** The native object or memory; null once disposed. */
  pointer: Ptr | null;
  /** What the object lives inside: a disposed parent makes it unusable. */
  readonly parent: Cell | null;
  /** Gives the object back. Called once, or again after it threw. */
  destroy(pointer: Ptr): void;
  /** It lies inside something else and owns nothing: the leak net does not need to know it. */
  readonly borrowed?: true;
  /** The leak net had to close it. */
  collected?: true;
  /** How often it is held, see {@linkcode holdNow}; and what to give back when it no longer is. */
  holds?: number;
  waiting?: Ptr | undefined;
}

/** What the registry gives back once a place was collected: the cell to close, null where the place was free. */
interface Held {
  cell: Cell | null;
}

/**
 * A registration, for one object after another: to register and unregister each costs more than a native allocation. Only
 * the object in it refers to it, so that both are collected together.
 */
interface Place {
  readonly held: Held;
}

/** The leak net. One per global scope, and rooted there: Bun collects a registry that only a module refers to. */
interface LeakNet {
  readonly registry: FinalizationRegistry<Held>;
  /** Free places. */
  readonly spare: Place[];
  /** Labels of objects that were collected without dispose, newest last; the oldest are dropped. */
  readonly labels: string[];
  count: number;
}

const LEAK_NET = Symbol.for("loramem.leakNet");

const MOST_LABELS = 64;

/** Free places kept; one that is not is collected, and then closes nothing. */
const MOST_SPARE = 1024;

function leakNet(): LeakNet {
  const scope = globalThis as typeof globalThis & { [LEAK_NET]?: LeakNet };
  scope[LEAK_NET] ??= makeLeakNet();
  return scope[LEAK_NET];
}

function makeLeakNet(): LeakNet {
  const registry = new FinalizationRegistry<Held>(({ cell }) => {
    if (cell === null) return;
    cell.collected = true;
    net.count++;
    net.labels.push(cell.label);
    if (net.labels.length > MOST_LABELS) net.labels.shift();
    close(cell);
  });
  const net: LeakNet = { registry, spare: [], labels: [], count: 0 };
  return net;
}

function takePlace(cell: Cell): Place {
  const net = leakNet();
  let place = net.spare.pop();
  if (place === undefined) {
    place = { held: { cell: null } };
    net.registry.register(place, place.held);
  }
  place.held.cell = cell;
  return place;
}

function givePlace(place: Place): void {
  place.held.cell = null;
  const { spare } = leakNet();
  if (spare.length < MOST_SPARE) spare.push(place);
}

/** How many objects were left to the garbage collector so far, and the names of the last ones; for tests and debugging. */
export function leakedHandles(): { readonly count: number; readonly labels: readonly string[] } {
  const { count, labels } = leakNet();
  return { count, labels: [...labels] };
}

function close(cell: Cell): void {
  const pointer = cell.pointer;
  if (pointer === null) return;
  cell.pointer = null;
  if (cell.holds !== undefined && cell.holds > 0) {
    cell.waiting = pointer;
    return;
  }
  try {
    cell.destroy(pointer);
  } catch (error) {
    cell.pointer = pointer; // still there: dispose can be called again
    throw error;
  }
}

/** Whether the object of a cell and everything that it lives inside is there. */
export function isOpen(cell: Cell): boolean {
  for (let at: Cell | null = cell; at !== null; at = at.parent)
    if (at.pointer === null) return false;
  return true;
}

function disposedError(cell: Cell): LoramemError {
  let at = cell;
  while (at.pointer !== null && at.parent !== null) at = at.parent;
  const what = at === cell ? "it was disposed" : `its ${at.label} was disposed`;
  const message = `${cell.label}: ${what}: make a new one, or dispose later`;
  return new LoramemError("DISPOSED", message, { label: cell.label });
}

/** The native object, for one call; throws `DISPOSED` once it or what it lives inside is gone. */
export let pointerOf: (object: NativeObject) => Ptr;

/** The cell of an object: to be a parent, or to be remembered by something that must not keep the object alive. */
export let cellOf: (object: NativeObject) => Cell;

/**
 * Keeps the native object, and everything that it lives inside, until the result is called: for work that no stream knows
 * of. Disposing meanwhile makes it unusable at once and gives it back then.
 *
 * @throws {LoramemError} `DISPOSED`.
 */
export function holdNow(object: NativeObject): () => void {
  pointerOf(object);
  const cells: Cell[] = [];
  for (let at: Cell | null = cellOf(object); at !== null; at = at.parent) cells.push(at);
  for (const cell of cells) cell.holds = (cell.holds ?? 0) + 1;
  return () => {
    for (const cell of cells) {
      cell.holds = (cell.holds ?? 1) - 1;
      if (cell.holds > 0 || cell.waiting === undefined) continue;
      const pointer = cell.waiting;
      cell.waiting = undefined;
      cell.destroy(pointer);
    }
  };
}

/** Gives the native object back and takes it out of the leak net; the second call does nothing. */
export let disposeNow: (object: NativeObject) => void;

/** An object of the native library. Using it after it was disposed throws `DISPOSED`. */
export abstract class NativeObject {
  readonly #cell: Cell;
  #place: Place | null;

  static {
    pointerOf = (object) => {
      const cell = object.#cell;
      if (!isOpen(cell)) throw disposedError(cell);
      return cell.pointer as Ptr;
    };
    cellOf = (object) => object.#cell;
    disposeNow = (object) => {
      close(object.#cell);
      const place = object.#place;
      if (place === null) return;
      object.#place = null;
      givePlace(place);
    };
  }

  constructor(cell: Cell) {
    this.#cell = cell;
    this.#place = cell.borrowed === true ? null : takePlace(cell);
  }

  /** Whether it was disposed, or lives inside something that was. */
  get disposed(): boolean {
    return !isOpen(this.#cell);
  }
}

/** A native object that is given back without waiting. */
export abstract class Handle extends NativeObject implements Disposable {
  /** Gives it back in stream order, without waiting. Disposing twice does nothing. */
  dispose(): void {
    disposeNow(this);
  }

  /** {@linkcode Handle.dispose}, for `using`. */
  [Symbol.dispose](): void {
    this.dispose();
  }
}
