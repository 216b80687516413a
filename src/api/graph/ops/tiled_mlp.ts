/**
 * The MLP of a layer in tiles of rows: gate|up and its like exist for one tile at a time, and are computed again for
 * backward. What it saves is most of what a layer needs besides its input.
 *
 *     for every tile:  gu = x Wgu^T;  h = silu(g) * u;  y = residual + h Wd^T
 *
 * Rows do not know of each other, but the gradients of the adapters are sums over rows, and so depend on the tile in their
 * last bits. The tile is therefore a setting of the run, never a choice of the planner.
 */
import type { BackwardWalk, CompositeKind, EmitOp } from "../program.ts";
import { makeValue, rowsOf, type Value, viewOf } from "../value.ts";
import { glu, gluBackward } from "./glu.ts";
import {
  type LoraGroup,
  loraDown,
  loraLinearBackward,
  loraLinearGroup,
  totalRank,
} from "./lora_linear_group.ts";

/** One linear of the MLP. */
interface Linear {
  readonly w: Value;
  readonly bias: Value | null;
  readonly lora: LoraGroup | null;
}

export interface TiledMlpAttributes {
  /** [T, C] */
  readonly y: Value;
  /** [T, C] */
  readonly x: Value;
  /** [T, C] */
  readonly residual: Value;
  readonly gateUp: Linear;
  readonly down: Linear;
  /** I */
  readonly width: number;
  /** Rows of a tile; the last one may have fewer. */
  readonly tile: number;
  /** Per tile [1] i32: its rows that hold tokens. */
  readonly lives: readonly Value[];
}

interface Tile {
  readonly from: number;
  readonly rows: number;
  readonly live: Value;
  readonly x: Value;
}

export const tiledMlp: CompositeKind<TiledMlpAttributes> = {
  name: "tiledMlp",
  uses: ({ y, x, residual, gateUp, down, lives }) => ({
    reads: [x, residual, ...weightsOf(gateUp), ...weightsOf(down), ...lives],
    writes: [y],
  }),
  expand(attributes, emit) {
    const { y, residual, down } = attributes;
    for (const tile of tilesOf(attributes, attributes.x)) {
      const { h, s } = hidden(attributes, tile, emit);
      const rows = { y: rowsFrom(y, tile), residual: rowsFrom(residual, tile), live: tile.live };
      emit(loraLinearGroup, { ...rows, ...down, x: h, s: s.down });
    }
  },
  backward(attributes, walk) {
    const { y, x, residual, gateUp, down } = attributes;
    const dy = walk.gradient(y) as Value;
    walk.contribute(residual, dy);
    const dx = walk.wants(x) ? walk.gradientLike(x) : null;
    const again: EmitOp = (kind, of) => walk.recompute(kind, of);
    for (const tile of tilesOf(attributes, walk.need(x))) {
      const { live } = tile;
      const { gu, h, s } = hidden(attributes, tile, again);
      const [dh, dgu] = [walk.gradientLike(h), walk.gradientLike(gu)];
      linearBackward(walk, down, { dx: dh, dy: rowsFrom(dy, tile), x: h, s: s.down, live });
      walk.emit(gluBackward, { dgu, dh, gu, live });
      const into = dx === null ? null : rowsFrom(dx, tile);
      linearBackward(walk, gateUp, { dx: into, dy: dgu, x: tile.x, s: s.gateUp, live });
    }
    if (dx !== null) walk.contribute(x, dx);
  },
};

function weightsOf({ w, bias, lora }: Linear): Value[] {
  const adapters = lora === null ? [] : [lora.a, ...lora.parts.map(({ b }) => b)];
  return [w, bias, ...adapters].filter((value) => value !== null);
}

function tilesOf({ tile, lives }: TiledMlpAttributes, x: Value): Tile[] {
  return lives.map((live, index) => {
    const from = index * tile;
    const rows = Math.min(tile, rowsOf(x) - from);
    return { from, rows, live, x: rowsFrom(x, { from, rows }) };
  });
}

function rowsFrom(value: Value, { from, rows }: { from: number; rows: number }): Value {
  return viewOf(value, value.name, [rows, value.shape[1] as number], from * value.pitch);
}

/** Emits a tile up to its hidden rows and their product with A. */
function hidden(
  { residual, gateUp, down, width }: TiledMlpAttributes,
  { rows, live, x }: Tile,
  emit: EmitOp,
) {
  const { dtype, layer } = residual;
  const fresh = (name: string, columns: number) =>
    makeValue(name, dtype, [rows, columns], { layer });
  const project = (name: string, of: Value, { lora }: Linear): Value | null => {
    if (lora === null) return null;
    const s = fresh(`${name}.s`, totalRank(lora));
    emit(loraDown, { s, x: of, lora, live });
    return s;
  };
  const sGateUp = project("gateUp", x, gateUp);
  const gu = fresh("gateUp", 2 * width);
  emit(loraLinearGroup, { ...gateUp, y: gu, x, residual: null, s: sGateUp, live });
  const h = fresh("mlp", width);
  emit(glu, { h, gu, live });
  const sDown = project("hidden", h, down);
  return { gu, h, s: { gateUp: sGateUp, down: sDown } };
}

/** Values of a linear's backward pass. */
interface LinearRows {
  readonly dx: Value | null;
  readonly dy: Value;
  readonly x: Value;
  readonly s: Value | null;
  readonly live: Value;
}

function linearBackward(walk: BackwardWalk, linear: Linear, { dx, dy, x, s, live }: LinearRows) {
  const { w, lora } = linear;
  if (dx === null && lora === null) return;
  const adapter =
    lora === null || s === null
      ? null
      : { lora, x, s, ds: makeValue("ds", "f32", s.shape, { layer: x.layer }) };
  walk.emit(loraLinearBackward, { dx, dy, w, in: x.shape[1] as number, adapter, live });
}
