/**
 * Reads the C ABI from its headers and compares it with the tables of `src/ffi`. Both are pure functions over text and
 * records, so that the comparison itself can be tested with planted faults.
 */

import { scan } from "./source_scan.ts";

/**
 * Signature of a function: types by the names of the symbol table. A header has two kinds of pointer instead of one:
 * `object` points to an opaque object and is always `ptr`; `data` is any other and is `ptr` or, lent by JavaScript for one
 * call, `buf`.
 */
export interface Signature {
  readonly args: readonly string[];
  readonly ret: string;
}

/** The parts of the ABI that both sides must agree on. */
export interface Abi {
  readonly functions: Readonly<Record<string, Signature>>;
  /** Struct name -> field name -> type, in the order of the fields. */
  readonly structs: Readonly<Record<string, Readonly<Record<string, string>>>>;
  readonly statuses: Readonly<Record<string, { readonly value: number; readonly text: string }>>;
}

/** Types that pass by value, by the names of the tables. */
const SCALARS: Readonly<Record<string, string>> = {
  void: "void",
  int32_t: "i32",
  uint32_t: "u32",
  int64_t: "i64",
  uint64_t: "u64",
  float: "f32",
  double: "f64",
};

/** Beyond this a function takes one descriptor. */
const MOST_ARGUMENTS = 12;

/**
 * Reads every `LM_API` declaration, every `typedef struct` with a body, and `LM_STATUS_MAP`.
 *
 * @param headers the text of the headers, in the order of their inclusion
 * @throws {Error} on a declaration with a type that may not cross the boundary
 */
export function parseHeader(headers: string): Abi {
  const { code, strings } = scan(headers, "c");
  const names = (pattern: RegExp): Set<string> =>
    new Set([...code.matchAll(pattern)].map((match) => match[1] ?? ""));
  const callbacks = names(/\btypedef\s+[\w\s*]+\(\s*\*\s*(\w+)\s*\)\s*\([^)]*\)\s*;/g);
  const opaque = names(/\btypedef\s+struct\s+(\w+)\s+\1\s*;/g);

  const typeOf = (declaration: string, where: string): string => {
    const words = declaration.replace(/\b(?:const|struct)\b/g, " ").trim();
    const [name = ""] = words.split(/[\s*]+/);
    if (callbacks.has(name)) return "fn";
    if (words.includes("*")) return opaque.has(name) && !/\*.*\*/.test(words) ? "object" : "data";
    const scalar = SCALARS[words];
    if (scalar === undefined) throw new Error(`${where}: type ${words} may not cross the boundary`);
    return scalar;
  };

  const functions: Record<string, Signature> = {};
  for (const match of code.matchAll(/^\s*LM_API\b([^();]*?)(\w+)\s*\(([^();]*)\)\s*;/gm)) {
    const [, ret = "", name = "", list = ""] = match;
    const args =
      list.trim() === "void" ? [] : list.split(",").map((arg) => typeOf(unnamed(arg), name));
    functions[name] = { args, ret: typeOf(ret, name) };
  }

  const structs: Record<string, Record<string, string>> = {};
  for (const match of code.matchAll(/\btypedef\s+struct\s+(\w+)\s*\{([^{}]*)\}\s*\1\s*;/g)) {
    const [, name = "", body = ""] = match;
    const fields: Record<string, string> = {};
    for (const field of body.split(";").filter((text) => text.trim() !== "")) {
      const type = typeOf(unnamed(field), name);
      const pointer = type === "data" || type === "object" || type === "fn";
      fields[/(\w+)\s*$/.exec(field)?.[1] ?? field] = pointer ? "ptr" : type;
    }
    structs[name] = fields;
  }

  const statuses: Record<string, { value: number; text: string }> = {};
  const map = /#define\s+LM_STATUS_MAP\(X\)((?:[^\n]*\\\n)*[^\n]*)/.exec(code)?.[1] ?? "";
  for (const match of map.matchAll(/\bX\(\s*(\w+)\s*,\s*(-?\d+)\s*,\s*"(\d+)"\s*\)/g)) {
    statuses[match[1] ?? ""] = { value: Number(match[2]), text: strings[Number(match[3])] ?? "" };
  }
  return { functions, structs, statuses };
}

/** A parameter or field declaration without its name. */
function unnamed(declaration: string): string {
  return declaration.replace(/\w+\s*$/, "");
}

/** Every difference between the header and the tables, in both directions; an empty list means none. */
export function abiFaults(header: Abi, tables: Abi): string[] {
  const faults = [
    ...unmatched("function", header.functions, tables.functions),
    ...unmatched("struct", header.structs, tables.structs),
    ...unmatched("status", header.statuses, tables.statuses),
  ];
  for (const [name, c] of Object.entries(header.functions)) {
    if (c.args.length > MOST_ARGUMENTS) {
      faults.push(`${name}: ${c.args.length} arguments, at most ${MOST_ARGUMENTS}`);
    }
    const table = tables.functions[name];
    if (table === undefined) continue;
    if (c.args.length !== table.args.length) {
      faults.push(`${name}: ${c.args.length} arguments in C, ${table.args.length} in the table`);
    }
    if (!agrees(c.ret, table.ret) || table.ret === "buf") {
      faults.push(`${name}: returns ${c.ret} in C, ${table.ret} in the table`);
    }
    c.args.forEach((type, index) => {
      const other = table.args[index];
      if (other !== undefined && !agrees(type, other)) {
        faults.push(`${name}: argument ${index} is ${type} in C, ${other} in the table`);
      }
    });
  }
  for (const [name, fields] of Object.entries(header.structs)) {
    const [c, table] = [fields, tables.structs[name] ?? fields].map((record) =>
      Object.entries(record)
        .map(([field, type]) => `${type} ${field}`)
        .join(", "),
    );
    if (c !== table) faults.push(`${name}: {${c}} in C, {${table}} in the table`);
  }
  for (const [name, { value, text }] of Object.entries(header.statuses)) {
    const table = tables.statuses[name];
    if (table !== undefined && (table.value !== value || table.text !== text)) {
      faults.push(`${name}: ${value} "${text}" in C, ${table.value} "${table.text}" in the table`);
    }
  }
  return faults;
}

function unmatched(what: string, c: object, table: object): string[] {
  return [
    ...Object.keys(c)
      .filter((name) => !Object.hasOwn(table, name))
      .map((name) => `${what} ${name} is in the header only`),
    ...Object.keys(table)
      .filter((name) => !Object.hasOwn(c, name))
      .map((name) => `${what} ${name} is in the table only`),
  ];
}

/** Whether a type of the header may be declared as a type of the table. */
function agrees(c: string, table: string): boolean {
  if (c === "object") return table === "ptr";
  if (c === "data") return table === "ptr" || table === "buf";
  return c === table;
}
