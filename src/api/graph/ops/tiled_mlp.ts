/**
 * The gated MLP of a layer, computed a tile of rows after the other: gate|up and h, by far the widest values of a layer, exist
 * for one tile only. Rows do not depend on each other, so forward has the same bits as the separate ops. Backward computes
 * gate|up of a tile again and leaves it at once; sums over tokens (dA, dB) are added up tile by tile.
 *
 *     forward    s = n A^T;  gu = n Wgu^T + s B^T;  h = silu(g) * u;  s' = h A'^T;  y = residual + h Wd^T + s' B'^T
 *     backward   gu again;  dh = dy Wd + ds' A';  dgu and h from gu and dh;  dA' += ds'^T h;  dn = dgu Wgu + ds A
 */
import type { Load, Work } from "../cost.ts";
import type { KernelCall, OpKind } from "../program.ts";
import { makeValue, rowsOf, type Value, viewOf } from "../value.ts";
import { glu, gluBackward } from "./glu.ts";
import {
  type LoraGroup,
  loraDown,
  loraDownBackward,
  loraLinearBackward,
  loraLinearGroup,
  totalRank,
} from "./lora_linear_group.ts";

/** A linear of the MLP. */
export interface MlpLinear {
  readonly w: Value;
  readonly bias: Value | null;
  readonly lora: LoraGroup | null;
}

/** Rows per tile, and how many of every tile hold tokens. */
export interface MlpTiles {
  readonly rows: number;
  /** [1] i32 for every tile */
  readonly live: readonly Value[];
}

export interface TiledMlpAttributes {
  /** [T, C] */
  readonly y: Value;
  /** [T, R] h A'^T, which backward needs; null without an adapter. */
  readonly s: Value | null;
  /** [T, C] the normed input */
  readonly x: Value;
  /** [T, C] */
  readonly residual: Value;
  readonly gateUp: MlpLinear;
  readonly down: MlpLinear;
  readonly tiles: MlpTiles;
  readonly scratch: TileScratch;
}

/** Values of one tile. */
interface TileScratch {
  /** [rows, 2 I] */
  readonly gu: Value;
  /** [rows, I] */
  readonly h: Value;
  /** [rows, R] */
  readonly s: Value | null;
}

/** Scratch for the tiles of x. */
export function tileScratch(x: Value, gateUp: MlpLinear, { rows }: MlpTiles): TileScratch {
  const width = gateUp.w.shape[0] as number;
  const make = (name: string, columns: number) =>
    makeValue(name, x.dtype, [rows, columns], { layer: x.layer });
  return {
    gu: make("gateUp.tile", width),
    h: make("mlp.tile", width / 2),
    s: gateUp.lora === null ? null : make("gateUp.s.tile", totalRank(gateUp.lora)),
  };
}

/** One op of the sequence, on one tile. */
interface Step {
  readonly call: KernelCall;
  readonly cost: (load: Load) => readonly Work[];
}

function step<A>(kind: OpKind<A>, attributes: A, first: number, rows: number): Step {
  return {
    call: kind.bind(attributes) as KernelCall,
    cost: (load) => kind.cost(attributes, { ...load, tokens: clamp(load.tokens - first, 0, rows) }),
  };
}

const clamp = (x: number, low: number, high: number) => Math.max(low, Math.min(high, x));

/** Calls `each` with the first row, the rows and a window for every tile. */
function tilesOf(
  x: Value,
  { rows, live }: MlpTiles,
  each: (tile: {
    readonly run: <A>(kind: OpKind<A>, attributes: A) => void;
    /** The tile's rows of a value of T rows. */
    readonly of: (value: Value) => Value;
    /** As many rows of a value of one tile. */
    readonly part: (value: Value) => Value;
    readonly live: Value;
  }) => void,
): Step[] {
  const steps: Step[] = [];
  live.forEach((tileLive, index) => {
    const first = index * rows;
    const count = Math.min(rows, rowsOf(x) - first);
    const window = (value: Value, row: number) =>
      viewOf(value, value.name, [count, value.shape[1] as number], row * value.pitch);
    each({
      run: (kind, attributes) => steps.push(step(kind, attributes, first, count)),
      of: (value) => window(value, first),
      part: (value) => window(value, 0),
      live: tileLive,
    });
  });
  return steps;
}

function forwardSteps(attributes: TiledMlpAttributes): Step[] {
  const { y, s, x, residual, gateUp, down, tiles, scratch } = attributes;
  return tilesOf(x, tiles, ({ run, of, part, live }) => {
    const [gu, h] = [part(scratch.gu), part(scratch.h)];
    emitGateUp(run, { gu, x: of(x), s: scratch.s && part(scratch.s), gateUp, live });
    run(glu, { h, gu, live });
    const own = s === null ? null : of(s);
    if (down.lora !== null && own !== null) run(loraDown, { s: own, x: h, lora: down.lora, live });
    run(loraLinearGroup, { ...down, y: of(y), x: h, residual: of(residual), s: own, live });
  });
}

function emitGateUp(
  run: <A>(kind: OpKind<A>, attributes: A) => void,
  {
    gu,
    x,
    s,
    gateUp,
    live,
  }: { gu: Value; x: Value; s: Value | null; gateUp: MlpLinear; live: Value },
): void {
  const { lora } = gateUp;
  if (lora !== null && s !== null) run(loraDown, { s, x, lora, live });
  run(loraLinearGroup, { ...gateUp, y: gu, x, residual: null, s, live });
}

const weightsOf = ({ w, bias, lora }: MlpLinear): Value[] =>
  [w, bias, ...(lora === null ? [] : [lora.a, ...lora.parts.map((part) => part.b)])].filter(
    (value) => value !== null,
  );

const present = (values: readonly (Value | null)[]): Value[] =>
  values.filter((value) => value !== null);

export const tiledMlp: OpKind<TiledMlpAttributes> = {
  name: "tiledMlp",
  uses: ({ y, s, x, residual, gateUp, down, tiles, scratch }) => ({
    reads: [x, residual, ...weightsOf(gateUp), ...weightsOf(down), ...tiles.live],
    writes: present([y, s]),
    scratch: present([scratch.gu, scratch.h, scratch.s]),
    inPlace: [[y, residual]],
  }),
  cost: (attributes, load) => forwardSteps(attributes).flatMap(({ cost }) => cost(load)),
  bind: (attributes) => forwardSteps(attributes).map(({ call }) => call),
  backward({ y, s, x, residual, gateUp, down, tiles }, walk) {
    const dy = walk.gradient(y) as Value;
    walk.contribute(residual, dy);
    const { lora } = gateUp;
    if (lora === null && down.lora === null && !walk.wants(x)) return;
    const dx = walk.wants(x) ? walk.gradientLike(x) : null;
    const ds =
      lora === null
        ? null
        : makeValue("d(gateUp.s)", "f32", [rowsOf(x), totalRank(lora)], { layer: x.layer });
    const scratch = tileScratch(x, gateUp, tiles);
    const dsDown =
      down.lora === null
        ? null
        : makeValue("d(hidden.s)", "f32", [tiles.rows, totalRank(down.lora)], { layer: x.layer });
    walk.emit(tiledMlpBackward, {
      dx,
      ds,
      dy,
      s: s === null ? null : walk.need(s),
      x: walk.need(x),
      gateUp,
      down,
      tiles,
      scratch: { ...scratch, ds: dsDown },
    });
    if (dx !== null) walk.contribute(x, dx);
    if (lora === null || ds === null) return;
    walk.later(x, (there) => walk.emit(tiledDownBackward, { ds, x: there, lora, tiles }));
  },
};

interface TiledMlpBackwardAttributes {
  /** [T, C]; null if nobody wants it. */
  readonly dx: Value | null;
  /** [T, R] f32, written for {@linkcode tiledDownBackward} */
  readonly ds: Value | null;
  readonly dy: Value;
  readonly s: Value | null;
  readonly x: Value;
  readonly gateUp: MlpLinear;
  readonly down: MlpLinear;
  readonly tiles: MlpTiles;
  /** ds: [rows, R'] f32 */
  readonly scratch: TileScratch & { readonly ds: Value | null };
}

function backwardSteps(attributes: TiledMlpBackwardAttributes): Step[] {
  const { dx, ds, dy, s, x, gateUp, down, tiles, scratch } = attributes;
  return tilesOf(x, tiles, ({ run, of, part, live }) => {
    const [gu, h, own] = [part(scratch.gu), part(scratch.h), scratch.s && part(scratch.s)];
    emitGateUp(run, { gu, x: of(x), s: own, gateUp, live });
    const dsDown = scratch.ds && part(scratch.ds);
    const adapter =
      down.lora === null || s === null || dsDown === null
        ? null
        : { lora: down.lora, s: of(s), ds: dsDown };
    const width = h.shape[1] as number;
    run(loraLinearBackward, { dx: h, dy: of(dy), w: down.w, in: width, adapter, live });
    // dh gives way to h, gate|up to its gradient.
    run(gluBackward, { dgu: gu, h: adapter && h, dh: h, gu, live });
    if (adapter !== null) run(loraDownBackward, { ds: adapter.ds, x: h, lora: adapter.lora, live });
    const { lora, w } = gateUp;
    run(loraLinearBackward, {
      dx: dx && of(dx),
      dy: gu,
      w,
      in: x.shape[1] as number,
      adapter: lora === null || ds === null || own === null ? null : { lora, s: own, ds: of(ds) },
      live,
    });
  });
}

const gradientsOf = (lora: LoraGroup | null): (Value | null)[] =>
  lora === null ? [] : lora.parts.map((part) => part.gradB);

const tiledMlpBackward: OpKind<TiledMlpBackwardAttributes> = {
  name: "tiledMlpBackward",
  uses: ({ dx, ds, dy, s, x, gateUp, down, tiles, scratch }) => ({
    reads: present([dy, s, x, ...weightsOf(gateUp), ...weightsOf(down), ...tiles.live]),
    writes: present([dx, ds]),
    updates: present([
      down.lora?.gradA ?? null,
      ...gradientsOf(down.lora),
      ...gradientsOf(gateUp.lora),
    ]),
    scratch: present([scratch.gu, scratch.h, scratch.s, scratch.ds]),
    inPlace: dx === null ? [] : [[dx, x]],
  }),
  cost: (attributes, load) => backwardSteps(attributes).flatMap(({ cost }) => cost(load)),
  bind: (attributes) => backwardSteps(attributes).map(({ call }) => call),
};

/** dA of gate|up, once the norm's backward rule has made x again. */
const tiledDownBackward: OpKind<{
  readonly ds: Value;
  readonly x: Value;
  readonly lora: LoraGroup;
  readonly tiles: MlpTiles;
}> = {
  name: "tiledDownBackward",
  uses: ({ ds, x, lora, tiles }) => ({
    reads: [ds, x, ...tiles.live],
    writes: [],
    updates: [lora.gradA],
  }),
  cost: (attributes, load) => downSteps(attributes).flatMap(({ cost }) => cost(load)),
  bind: (attributes) => downSteps(attributes).map(({ call }) => call),
};

function downSteps({
  ds,
  x,
  lora,
  tiles,
}: {
  readonly ds: Value;
  readonly x: Value;
  readonly lora: LoraGroup;
  readonly tiles: MlpTiles;
}): Step[] {
  return tilesOf(x, tiles, ({ run, of, live }) =>
    run(loraDownBackward, { ds: of(ds), x: of(x), lora, live }),
  );
}
