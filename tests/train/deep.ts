/** Golden models made deeper: their layers over and over, each time different, so that weights and layer inputs have somewhere to go. */
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import type { AdapterTensors } from "../../src/api/io/adapter.ts";
import {
  openSafetensors,
  type TensorData,
  writeSafetensors,
} from "../../src/api/io/safetensors.ts";
import { temporaryFolder } from "../ffi/support.ts";
import { type Golden, readGolden } from "./support.ts";

const LAYER = /\blayers\.(\d+)\./;

/** Copies of something that belongs to a layer: one for every layer of the deep model that repeats it. */
function repeat<T>(
  name: string,
  layers: number,
  depth: number,
  copy: (name: string, times: number) => T,
): T[] {
  const layer = LAYER.exec(name)?.[1];
  if (layer === undefined) return [copy(name, 0)];
  const copies: T[] = [];
  for (let at = Number(layer); at < depth; at += layers)
    copies.push(copy(name.replace(LAYER, `layers.${at}.`), copies.length));
  return copies;
}

/** Other weights of the same kind: a window that holds the wrong layer must show. */
function rotated(data: Uint8Array<ArrayBuffer>, times: number): Uint8Array<ArrayBuffer> {
  const at = (16 * times) % data.byteLength; // whole elements of any type
  const result = new Uint8Array(data.byteLength);
  result.set(data.subarray(at));
  result.set(data.subarray(0, at), data.byteLength - at);
  return result;
}

/** A golden case with `depth` layers; its reference results do not apply any more. */
export async function deepGolden(name: string, depth: number): Promise<Golden & Disposable> {
  const golden = await readGolden(name);
  const temporary = temporaryFolder();
  const folder = temporary.path;
  const model = join(golden.folder, "model");
  mkdirSync(join(folder, "model"));
  const config = JSON.parse(readFileSync(join(model, "config.json"), "utf8"));
  const layers: number = config.num_hidden_layers;
  const deeper = { ...config, num_hidden_layers: depth };
  if (config.layer_types !== undefined)
    deeper.layer_types = Array.from({ length: depth }, (_, at) => config.layer_types[at % layers]);
  writeFileSync(join(folder, "model", "config.json"), JSON.stringify(deeper));
  await using file = await openSafetensors(model);
  const tensors: TensorData[] = [];
  for (const entry of file.tensors.values()) {
    const data = new Uint8Array(entry.bytes);
    await file.read(entry, data);
    tensors.push(
      ...repeat(entry.name, layers, depth, (to, times) => ({
        name: to,
        dtype: entry.dtype,
        shape: entry.shape,
        data: rotated(data, times),
      })),
    );
  }
  await writeSafetensors(join(folder, "model", "model.safetensors"), tensors);
  const { config: lora, tensors: pairs } = golden.adapter0;
  const deepPairs = pairs.flatMap((pair) =>
    repeat(
      `${pair.path}.`,
      layers,
      depth,
      (to): AdapterTensors => ({
        ...pair,
        path: to.slice(0, -1),
      }),
    ),
  );
  return {
    ...golden,
    folder,
    adapter0: { ...golden.adapter0, config: lora, tensors: deepPairs },
    [Symbol.dispose]: () => temporary[Symbol.dispose](),
  };
}
