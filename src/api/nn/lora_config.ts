/**
 * Which modules get an adapter, of which rank and strength: PEFT's rules (0.21, `lora/model.py`,
 * `tuners_utils.py`), except that a name, pattern or regular expression that matches nothing is an
 * error instead of a silent no.
 */
import { LoramemError } from "../../ffi/error.ts";
import { nearMisses } from "./config_near.ts";
import { type LinearModule, LM_HEAD } from "./config_tensors.ts";

/** What to adapt, and how strongly. */
export interface LoraConfig {
  /** Inner size r of B A, for every module that `rankPattern` does not name. */
  readonly rank: number;
  /** Numerator of the scale, for every module that `alphaPattern` does not name. */
  readonly alpha: number;
  /**
   * `"all-linear"`: every linear layer but the output head. A list: each item is a module path or
   * its end after a dot (`"q_proj"`, `"layers.0.mlp.up_proj"`). Any other string: a regular
   * expression that must match whole paths.
   */
  readonly targetModules: string | readonly string[];
  /** Modules left out, as a list or a regular expression. */
  readonly excludeModules?: string | readonly string[];
  /** Rank by regular expression over the end of the path; the first key that matches counts. */
  readonly rankPattern?: Readonly<Record<string, number>>;
  /** Alpha in the same way, looked up on its own. */
  readonly alphaPattern?: Readonly<Record<string, number>>;
  /** Scale by alpha / sqrt(rank) instead of alpha / rank (Kalajdzievski, arXiv 2312.03732). */
  readonly useRslora?: boolean;
}

/** One module that gets an adapter. */
export interface LoraTarget extends LinearModule {
  readonly rank: number;
  readonly alpha: number;
  /** y = W x + scale * B A x. */
  readonly scale: number;
}

/** Larger than any rank in use; keeps sizes far from overflow. */
const MAX_RANK = 65_536;

/**
 * Finds the modules that a LoRA config adapts.
 *
 * @example Usage
 * ```ts
 * import { linearModules, readModelConfig, resolveLoraTargets } from "./mod.ts";
 * const modules = linearModules(await readModelConfig("examples/demo/model"));
 * const lora = { rank: 8, alpha: 16, targetModules: ["q_proj", "v_proj"] };
 * for (const { path, scale } of resolveLoraTargets(modules, lora)) console.log(path, scale);
 * ```
 *
 * @param modules The linear layers of the model.
 * @param lora What to adapt.
 * @returns The adapted modules in the order of `modules`.
 * @throws {LoramemError} `BAD_ARGUMENT` for a rank, alpha or pattern out of range, and for a name
 * or pattern that matches nothing, with the names that come close; `UNSUPPORTED` where the output
 * head is meant.
 */
export function resolveLoraTargets(
  modules: readonly LinearModule[],
  lora: LoraConfig,
): LoraTarget[] {
  checkNumber("rank", lora.rank, isRank, RANK_FORM);
  checkNumber("alpha", lora.alpha, isAlpha, ALPHA_FORM);
  const targeted = isAllLinear(lora.targetModules)
    ? modules.filter(({ path }) => path !== LM_HEAD)
    : select("targetModules", modules, lora.targetModules);
  const excluded = new Set(
    lora.excludeModules === undefined ? [] : select("excludeModules", modules, lora.excludeModules),
  );
  const chosen = targeted.filter((module) => !excluded.has(module));
  if (chosen.length === 0) {
    throw badArgument("excludeModules", lora.excludeModules, "no module is left", "exclude less");
  }
  if (chosen.some(({ path }) => path === LM_HEAD)) {
    const message =
      "lora: an adapter on the output head is not supported: lm_head is targeted: " +
      'leave it out with excludeModules: ["lm_head"]';
    throw new LoramemError("UNSUPPORTED", message, { what: LM_HEAD });
  }
  const rankOf = pattern("rankPattern", lora.rankPattern, chosen, isRank, RANK_FORM);
  const alphaOf = pattern("alphaPattern", lora.alphaPattern, chosen, isAlpha, ALPHA_FORM);
  return chosen.map((module) => {
    const rank = rankOf(module.path) ?? lora.rank;
    const alpha = alphaOf(module.path) ?? lora.alpha;
    return { ...module, rank, alpha, scale: alpha / (lora.useRslora ? Math.sqrt(rank) : rank) };
  });
}

/**
 * Finds the shortest list of path endings that means exactly these modules to PEFT, as
 * `target_modules` on disk.
 *
 * @example Usage
 * ```ts
 * import { compressTargets, linearModules, readModelConfig, resolveLoraTargets } from "./mod.ts";
 * const modules = linearModules(await readModelConfig("examples/demo/model"));
 * const targets = resolveLoraTargets(modules, { rank: 8, alpha: 16, targetModules: ["q_proj"] });
 * console.log(compressTargets(targets, modules)); // ["q_proj"]
 * ```
 *
 * @param targets Paths of the adapted modules.
 * @param modules All linear layers of the model, the adapted ones included.
 * @returns Sorted endings, e.g. `["k_proj", "q_proj"]`.
 */
export function compressTargets(
  targets: readonly { readonly path: string }[],
  modules: readonly { readonly path: string }[],
): string[] {
  const wanted = new Set(targets.map(({ path }) => path));
  const others = modules.map(({ path }) => path).filter((path) => !wanted.has(path));
  const endings: string[] = [];
  for (const path of [...wanted].sort()) {
    if (endings.some((ending) => endsWithPath(path, ending))) continue;
    const parts = path.split(".");
    let ending = path;
    for (let from = parts.length - 1; from >= 0; from--) {
      ending = parts.slice(from).join(".");
      const candidate = ending;
      if (!others.some((other) => endsWithPath(other, candidate))) break;
    }
    endings.push(ending);
  }
  return endings.sort();
}

/** `all-linear` in any case, as PEFT takes it. */
function isAllLinear(modules: string | readonly string[]): boolean {
  return typeof modules === "string" && modules.toLowerCase() === "all-linear";
}

/** Whether `ending` is the path or follows a dot in it. */
function endsWithPath(path: string, ending: string): boolean {
  return path === ending || path.endsWith(`.${ending}`);
}

/** The modules that a list or a regular expression means; each item must mean at least one. */
function select(
  name: string,
  modules: readonly LinearModule[],
  wanted: string | readonly string[],
): LinearModule[] {
  if (typeof wanted === "string") {
    const expression = compile(name, wanted, `^(?:${wanted})$`);
    const matches = modules.filter(({ path }) => expression.test(path));
    if (matches.length > 0) return matches;
    const isName = modules.some(({ path }) => endsWithPath(path, wanted));
    const fix = isName
      ? `a string is a regular expression over the whole path; write ["${wanted}"]`
      : suggestion(modules, wanted);
    throw badArgument(name, wanted, "the regular expression matches no module", fix);
  }
  const isName = (item: unknown) => typeof item === "string" && item !== "";
  if (!Array.isArray(wanted) || wanted.length === 0 || !wanted.every(isName)) {
    throw badArgument(name, wanted, "neither a string nor a list of names", 'write ["q_proj"]');
  }
  for (const item of wanted) {
    if (modules.some(({ path }) => endsWithPath(path, item))) continue;
    const fix = /[\\*+?|()[\]^$]/.test(item)
      ? "a list holds names; give the regular expression as one string"
      : suggestion(modules, item);
    throw badArgument(name, item, "the name matches no linear module", fix);
  }
  return modules.filter(({ path }) => wanted.some((item) => endsWithPath(path, item)));
}

/**
 * Looks values up by PEFT's rule: the key, as a regular expression, is all of the path or follows a
 * dot in it.
 */
function pattern(
  name: string,
  values: Readonly<Record<string, number>> = {},
  modules: readonly LinearModule[],
  isValid: (value: unknown) => boolean,
  form: string,
): (path: string) => number | undefined {
  const rules = Object.entries(values).map(([key, value]) => {
    checkNumber(`${name}.${key}`, value, isValid, form);
    const expression = compile(name, key, `^(?:.*\\.)?(?:${key})$`);
    if (!modules.some(({ path }) => expression.test(path))) {
      throw badArgument(name, key, "the key matches no adapted module", suggestion(modules, key));
    }
    return { expression, value };
  });
  return (path) => rules.find(({ expression }) => expression.test(path))?.value;
}

/**
 * Unicode mode, so that what only Python's dialect knows (`\A`, `(?P<x>)`) is an error and not
 * another meaning.
 */
function compile(name: string, source: string, wrapped: string): RegExp {
  try {
    new RegExp(source, "u"); // alone as well: "a)|(b" must not become two
    return new RegExp(wrapped, "u");
  } catch (error) {
    const what = `not a regular expression (${(error as Error).message})`;
    throw badArgument(
      name,
      source,
      what,
      "write it in the syntax that Python and JavaScript share",
    );
  }
}

const RANK_FORM = `give an integer from 1 to ${MAX_RANK}`;
const ALPHA_FORM = "give a number above 0";
const isRank = (value: unknown) =>
  Number.isInteger(value) && (value as number) >= 1 && (value as number) <= MAX_RANK;
const isAlpha = (value: unknown) => Number.isFinite(value) && (value as number) > 0;

function checkNumber(
  name: string,
  value: unknown,
  isValid: (value: unknown) => boolean,
  form: string,
): void {
  if (!isValid(value)) throw badArgument(name, value, "the value is out of range", form);
}

function suggestion(modules: readonly LinearModule[], wanted: string): string {
  const near = nearMisses(
    modules.map(({ path }) => path),
    wanted,
  );
  return `${near.close ? "did you mean" : "the model has"} ${near.names.join(", ")}`;
}

function badArgument(name: string, value: unknown, what: string, fix: string): LoramemError {
  const message = `lora: ${what}: ${name} ${JSON.stringify(value)}: ${fix}`;
  return new LoramemError("BAD_ARGUMENT", message, { name, value });
}
