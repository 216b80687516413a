/**
 * The gated MLP of a layer, computed a tile of rows after the other: gate|up and h, by far the widest values of a layer, exist
 * for one tile only, unless gate|up is kept. Otherwise backward computes that of a tile again and leaves it at once. Sums over
 * tokens (dA, dB) are added up tile by tile, so their last bits follow the tiles; these are the same under every policy.
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
  /** [T, 2 I] gate|up and [T, R] x A^T where they are kept for backward; null = of one tile at a time. */
  readonly gu: Value | null;
  readonly sGateUp: Value | null;
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
  /** [rows, 2 I]; null where gate|up is kept. */
  readonly gu: Value | null;
  /** [rows, I] */
  readonly h: Value;
  /** [rows, R]; null where it is kept or there is no adapter. */
  readonly s: Value | null;
}

/** Scratch for the tiles of x, of what is not kept. */
export function tileScratch(
  { x, gateUp, tiles: { rows } }: Pick<TiledMlpAttributes, "x" | "gateUp" | "tiles">,
  { gu, sGateUp }: Pick<TiledMlpAttributes, "gu" | "sGateUp">,
): TileScratch {
  const width = gateUp.w.shape[0] as number;
  const make = (name: string, columns: number) =>
    makeValue(name, x.dtype, [rows, columns], { layer: x.layer });
  return {
    gu: gu === null ? make("gateUp.tile", width) : null,
    h: make("mlp.tile", width / 2),
    s:
      gateUp.lora === null || sGateUp !== null
        ? null
        : make("gateUp.s.tile", totalRank(gateUp.lora)),
  };
}

/** One op of the sequence, on one tile. */
interface Step {
  readonly call: KernelCall;
  readonly cost: (load: Load) => readonly Work[];
}

function step<A>(
  kind: OpKind<A>,
  attributes: A,
  first: number,
  rows: number,
  again: boolean,
): Step {
  const cost = (load: Load) => {
    const tokens = clamp(load.tokens - first, 0, rows);
    const works = kind.cost(attributes, { ...load, tokens });
    return again ? works.map((work) => ({ ...work, again })) : works;
  };
  return { call: kind.bind(attributes) as KernelCall, cost };
}

const clamp = (x: number, low: number, high: number) => Math.max(low, Math.min(high, x));

type Run = <A>(kind: OpKind<A>, attributes: A) => void;

/** Calls `each` with the first row, the rows and a window for every tile. */
function tilesOf(
  x: Value,
  { rows, live }: MlpTiles,
  each: (tile: {
    readonly run: Run;
    /** Like `run`, for what forward has computed already. */
    readonly again: Run;
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
      run: (kind, attributes) => steps.push(step(kind, attributes, first, count, false)),
      again: (kind, attributes) => steps.push(step(kind, attributes, first, count, true)),
      of: (value) => window(value, first),
      part: (value) => window(value, 0),
      live: tileLive,
    });
  });
  return steps;
}

function forwardSteps(attributes: TiledMlpAttributes): Step[] {
  const { y, s, sGateUp, x, residual, gateUp, down, tiles, scratch } = attributes;
  return tilesOf(x, tiles, ({ run, of, part, live }) => {
    const gu = attributes.gu === null ? part(scratch.gu as Value) : of(attributes.gu);
    const h = part(scratch.h);
    const ofGateUp = sGateUp === null ? scratch.s && part(scratch.s) : of(sGateUp);
    const own = emitDown(run, of(x), ofGateUp, gateUp, live);
    run(loraLinearGroup, { ...gateUp, y: gu, x: of(x), residual: null, s: own, live });
    run(glu, { h, gu, live });
    const rows = emitDown(run, h, s && of(s), down, live);
    run(loraLinearGroup, { ...down, y: of(y), x: h, residual: of(residual), s: rows, live });
  });
}

/** s = x A^T of a linear, if it has an adapter; gives s. */
function emitDown(
  run: Run,
  x: Value,
  s: Value | null,
  { lora }: MlpLinear,
  live: Value,
): Value | null {
  if (lora !== null && s !== null) run(loraDown, { s, x, lora, live });
  return s;
}

const weightsOf = ({ w, bias, lora }: MlpLinear): Value[] =>
  [w, bias, ...(lora === null ? [] : [lora.a, ...lora.parts.map((part) => part.b)])].filter(
    (value) => value !== null,
  );

const present = (values: readonly (Value | null)[]): Value[] =>
  values.filter((value) => value !== null);

export const tiledMlp: OpKind<TiledMlpAttributes> = {
  name: "tiledMlp",
  uses: ({ y, s, gu, sGateUp, x, residual, gateUp, down, tiles, scratch }) => ({
    reads: [x, residual, ...weightsOf(gateUp), ...weightsOf(down), ...tiles.live],
    writes: present([y, s, gu, sGateUp]),
    scratch: present([scratch.gu, scratch.h, scratch.s]),
    inPlace: [[y, residual]],
  }),
  cost: (attributes, load) => forwardSteps(attributes).flatMap(({ cost }) => cost(load)),
  bind: (attributes) => forwardSteps(attributes).map(({ call }) => call),
  backward({ y, s, gu, sGateUp, x, residual, gateUp, down, tiles }, walk) {
    const dy = walk.gradient(y) as Value;
    walk.contribute(residual, dy);
    const { lora } = gateUp;
    if (lora === null && down.lora === null && !walk.wants(x)) return;
    const dx = walk.wants(x) ? walk.gradientLike(x) : null;
    const ds =
      lora === null
        ? null
        : makeValue("d(gateUp.s)", "f32", [rowsOf(x), totalRank(lora)], { layer: x.layer });
    const scratch = tileScratch({ x, gateUp, tiles }, { gu, sGateUp });
    const dsDown =
      down.lora === null
        ? null
        : makeValue("d(hidden.s)", "f32", [tiles.rows, totalRank(down.lora)], { layer: x.layer });
    walk.emit(tiledMlpBackward, {
      dx,
      ds,
      dy,
      s: s === null ? null : walk.need(s),
      gu,
      sGateUp,
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
  /** Where they were kept; the gradient of gate|up takes its place. */
  readonly gu: Value | null;
  readonly sGateUp: Value | null;
  readonly x: Value;
  readonly gateUp: MlpLinear;
  readonly down: MlpLinear;
  readonly tiles: MlpTiles;
  /** ds: [rows, R'] f32 */
  readonly scratch: TileScratch & { readonly ds: Value | null };
}

function backwardSteps(attributes: TiledMlpBackwardAttributes): Step[] {
  const { dx, ds, dy, s, sGateUp, x, gateUp, down, tiles, scratch } = attributes;
  return tilesOf(x, tiles, ({ run, again, of, part, live }) => {
    const gu = attributes.gu === null ? part(scratch.gu as Value) : of(attributes.gu);
    const h = part(scratch.h);
    const own =
      sGateUp === null
        ? emitDown(again, of(x), scratch.s && part(scratch.s), gateUp, live)
        : of(sGateUp);
    if (attributes.gu === null)
      again(loraLinearGroup, { ...gateUp, y: gu, x: of(x), residual: null, s: own, live });
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
  uses: ({ dx, ds, dy, s, gu, sGateUp, x, gateUp, down, tiles, scratch }) => ({
    reads: present([
      dy,
      s,
      gu,
      sGateUp,
      x,
      ...weightsOf(gateUp),
      ...weightsOf(down),
      ...tiles.live,
    ]),
    writes: present([dx, ds]),
    updates: present([
      gu,
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
