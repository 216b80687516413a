import assert from "node:assert/strict";
import { test } from "node:test";
import { type Cell, cellOf, Handle, leakedHandles, pointerOf } from "../../src/ffi/handle.ts";
import type { Ptr } from "../../src/ffi/types.ts";
import { collectGarbage } from "./support.ts";

class Thing extends Handle {}

const POINTER = {} as Ptr;

function thing(label: string, destroyed: string[], parent: Cell | null = null): Thing {
  return new Thing({ label, pointer: POINTER, parent, destroy: () => destroyed.push(label) });
}

test("Handle.dispose() destroys once, however often it is called", () => {
  const destroyed: string[] = [];
  const handle = thing("a", destroyed);
  assert.equal(pointerOf(handle), POINTER);
  assert.equal(handle.disposed, false);
  handle.dispose();
  handle.dispose();
  handle[Symbol.dispose]();
  assert.deepEqual(destroyed, ["a"]);
  assert.equal(handle.disposed, true);
});

test("pointerOf() throws DISPOSED naming the object that was disposed", () => {
  const destroyed: string[] = [];
  const parent = thing('MemoryPool "p"', destroyed);
  const child = thing('DeviceBuffer "x"', destroyed, cellOf(parent));
  parent.dispose();
  assert.equal(child.disposed, true);
  assert.throws(() => pointerOf(parent), {
    code: "DISPOSED",
    message: /^MemoryPool "p": it was disposed: /,
    details: { label: 'MemoryPool "p"' },
  });
  assert.throws(() => pointerOf(child), {
    code: "DISPOSED",
    message: /^DeviceBuffer "x": its MemoryPool "p" was disposed: /,
  });
  child.dispose();
  assert.deepEqual(destroyed, ['MemoryPool "p"', 'DeviceBuffer "x"']);
});

test("Handle is destroyed by the leak net when it is dropped, and counted", async () => {
  const destroyed: string[] = [];
  const before = leakedHandles().count;
  for (let i = 0; i < 100; i++) thing(`dropped ${i}`, destroyed);
  await collectGarbage();
  // A conservative collector may keep the last few alive.
  assert.ok(destroyed.length >= 95, `${destroyed.length} of 100`);
  assert.ok(leakedHandles().count - before >= destroyed.length);
  assert.match(leakedHandles().labels.at(-1) ?? "", /^dropped \d+$/);
});

// Mutant: givePlace() leaves the cell in the place: those that are not kept report it. So many at once that not all are.
test("Handle that was disposed is none of the leak net's business", async () => {
  const destroyed: string[] = [];
  const things = Array.from({ length: 3000 }, (_, i) => thing(`disposed ${i}`, destroyed));
  for (const handle of things.splice(0)) handle.dispose();
  await collectGarbage();
  const labels = leakedHandles().labels.filter((label) => label.startsWith("disposed"));
  assert.deepEqual(labels, []);
  assert.equal(destroyed.length, 3000);
});

// Mutants: disposeNow() keeps the place of the object, so that the second dispose gives it away again and two objects share
// it; takePlace() leaves the cell out.
test("Handle that was disposed twice leaves its place in the leak net to one other", async () => {
  const destroyed: string[] = [];
  const kept: Thing[] = [];
  for (let i = 0; i < 100; i++) {
    const handle = thing("disposed", []);
    handle.dispose();
    handle.dispose();
    thing(`dropped ${i}`, destroyed);
    kept.push(thing("kept", destroyed));
  }
  await collectGarbage();
  assert.ok(destroyed.length >= 95, `${destroyed.length} of 100`);
  assert.ok(!destroyed.includes("kept"));
  for (const handle of kept) handle.dispose();
  assert.equal(destroyed.filter((label) => label === "kept").length, 100);
});

test("leak net is rooted in the global object", () => {
  const roots = Object.getOwnPropertySymbols(globalThis).map(String);
  assert.ok(roots.includes("Symbol(loramem.leakNet)"));
});
