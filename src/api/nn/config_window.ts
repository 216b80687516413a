/**
 * Sliding windows as config.json states them: Qwen2's `use_sliding_window`, `sliding_window`, `max_window_layers` and
 * `layer_types`, with the defaults of transformers.
 */
import { badConfig, type ConfigReader, excerpt, unsupported } from "./config_reader.ts";

/** What transformers takes where a Qwen2 config does not say. */
const DEFAULT_WINDOW = 4096;
const DEFAULT_FULL_LAYERS = 28;

const TYPES: readonly unknown[] = ["full_attention", "sliding_attention"];

/**
 * Takes the windows out of a config.
 *
 * @param slides Whether the family knows windows; without them every layer must attend to everything before it.
 * @param layers Number of decoder layers.
 * @returns By layer: rows that a query sees at most, itself among them; 0 = all before it.
 * @throws {LoramemError} `UNSUPPORTED` for a window where the family has none, or another kind of layer; `BAD_CONFIG` for
 * keys that contradict each other or are out of range.
 */
export function readWindows(reader: ConfigReader, slides: boolean, layers: number): number[] {
  const window = slides ? readWindow(reader) : refuseWindow(reader);
  const first = slides ? readFullLayers(reader) : layers;
  const types =
    readTypes(reader, slides, layers) ??
    Array.from({ length: layers }, (_, layer) => TYPES[window !== null && layer >= first ? 1 : 0]);
  if (window === null && types.includes("sliding_attention")) {
    const what = "layer_types has sliding_attention, but no window is in use";
    const fix = "give use_sliding_window and sliding_window, or make all layers full_attention";
    throw badConfig(reader.file, "layer_types", what, fix);
  }
  return types.map((type) => (type === "sliding_attention" ? (window as number) : 0));
}

/** The window in use; null = none. Qwen2 checkpoints often give one and switch it off. */
function readWindow(reader: ConfigReader): number | null {
  const used = reader.boolean("use_sliding_window") && reader.peek("sliding_window") !== null;
  if (used) return reader.integer("sliding_window", 2 ** 31 - 1, DEFAULT_WINDOW);
  reader.take("sliding_window");
  return null;
}

function refuseWindow(reader: ConfigReader): null {
  const window = reader.take("sliding_window");
  const used = reader.take("use_sliding_window");
  reader.take("max_window_layers"); // counts only with the switch
  const fix = "only full attention can be trained in this architecture";
  if (used !== undefined && used !== false) {
    throw unsupported(reader.file, "use_sliding_window", used, fix);
  }
  // A window without the switch is in use.
  if (window !== undefined && used !== false) {
    throw unsupported(reader.file, "sliding_window", window, fix);
  }
  return null;
}

/** Layers before the first one that slides. */
function readFullLayers(reader: ConfigReader): number {
  const layers = reader.take("max_window_layers") ?? DEFAULT_FULL_LAYERS;
  if (Number.isInteger(layers) && (layers as number) >= 0) return layers as number;
  throw reader.bad("max_window_layers", layers, "an integer of 0 or more");
}

/** The kinds of the layers where they are listed. */
function readTypes(reader: ConfigReader, slides: boolean, layers: number): unknown[] | null {
  const types = reader.take("layer_types");
  if (types === undefined) return null;
  const known = slides ? TYPES : TYPES.slice(0, 1);
  if (!Array.isArray(types) || !types.every((type) => known.includes(type))) {
    const fix = `supported are ${known.map(excerpt).join(" and ")}`;
    throw unsupported(reader.file, "layer_types", types, fix);
  }
  if (types.length === layers) return types;
  const what = `layer_types has ${types.length} entries for ${layers} layers`;
  throw badConfig(reader.file, "layer_types", what, "make them agree");
}
