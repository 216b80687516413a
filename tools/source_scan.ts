/**
 * A small lexer that separates code from comments and strings, for TypeScript and for C, and finds imports.
 *
 * It knows just enough grammar to be right about where comments, strings, templates and regular
 * expressions begin and end. A misjudged `/` can only spoil the rest of its line.
 */

/** A source without its comments and strings. Line breaks are kept. */
export interface Scanned {
  /** The code; the n-th string literal reads `"n"`. */
  readonly code: string;
  /** The text of each string literal, escapes not resolved. */
  readonly strings: readonly string[];
}

/** One import or re-export of another module. */
export interface Import {
  /** What is imported; undefined for `import(expression)`. */
  readonly specifier: string | undefined;
  readonly kind: "static" | "type" | "dynamic";
  /** The text between `import` and `from`. */
  readonly clause: string;
  /** Line number, from 1. */
  readonly line: number;
}

/** Words after which `/` begins a regular expression and does not divide. */
const BEFORE_REGEX =
  /(?:^|[^\w$.])(?:return|typeof|case|in|of|void|throw|new|do|else|yield|await)$/;

const COMMENT = /\/\/[^\n]*|\/\*[\s\S]*?(?:\*\/|$)/y;
const STRING = /"((?:[^"\\\n]|\\[\s\S])*)"?|'((?:[^'\\\n]|\\[\s\S])*)'?/y;
const TEMPLATE_TEXT = /(?:[^`\\$]|\\[\s\S]|\$(?!\{))*/y;
const REGEX = /\/(?:[^/\\[\n]|\\.|\[(?:[^\]\\\n]|\\.)*\])+\/\w*/y;

/** Separates code from comments and strings. */
export function scan(source: string, language: "ts" | "c"): Scanned {
  const strings: string[] = [];
  /** For every open `${`: how many braces are open inside it. */
  const templates: number[] = [];
  let code = "";
  let at = 0;

  const take = (pattern: RegExp): RegExpExecArray | null => {
    pattern.lastIndex = at;
    const match = pattern.exec(source);
    if (match) at = pattern.lastIndex;
    return match;
  };
  const literal = (text: string): void => {
    code += `"${strings.push(text) - 1}"`;
  };
  const blank = (text: string): void => {
    code += text.replace(/[^\n]+/g, " ");
  };
  /** From just after a "`" or the "}" of a substitution to the next "${" or the end of the template. */
  const template = (): string => {
    const text = take(TEMPLATE_TEXT)?.[0] ?? "";
    if (source[at] === "`") at += 1;
    else {
      at += 2;
      templates.push(0);
    }
    return text;
  };

  while (at < source.length) {
    const character = source[at] as string;
    const comment = character === "/" && take(COMMENT);
    if (comment) {
      blank(comment[0]);
      continue;
    }
    if (character === '"' || character === "'") {
      const match = take(STRING);
      literal(match?.[1] ?? match?.[2] ?? "");
      continue;
    }
    if (language === "ts") {
      if (character === "`") {
        at += 1;
        const depth = templates.length;
        const text = template();
        if (templates.length === depth) literal(text);
        else blank(`( ${text}`);
        continue;
      }
      const depth = templates.at(-1);
      if (depth !== undefined && (character === "{" || character === "}")) {
        if (character === "}" && depth === 0) {
          at += 1;
          templates.pop();
          blank(` ${template()}`);
          continue;
        }
        templates[templates.length - 1] = depth + (character === "{" ? 1 : -1);
      }
      if (character === "/" && regexMayStart(code) && take(REGEX)) {
        code += " 0 ";
        continue;
      }
    }
    code += character;
    at += 1;
  }
  return { code, strings };
}

function regexMayStart(codeBefore: string): boolean {
  const before = codeBefore.slice(-200).trimEnd();
  return before === "" || /[(,=:[!&|?{};+\-*%<>~^]$/.test(before) || BEFORE_REGEX.test(before);
}

/** Every import, re-export and dynamic import of a TypeScript source, in the order of their kinds. */
export function importsOf(source: string): Import[] {
  const { code, strings } = scan(source, "ts");
  const lineAt = (index: number): number => code.slice(0, index).split("\n").length;
  const found: Import[] = [];
  for (const match of code.matchAll(
    /\b(?:import|export)\b(\s*type\b)?([^"';()]*?)\bfrom\s*"(\d+)"/g,
  )) {
    const [, type, clause = "", string] = match;
    const kind = type ? "type" : "static";
    found.push({ specifier: strings[Number(string)], kind, clause, line: lineAt(match.index) });
  }
  for (const match of code.matchAll(/\bimport\s*"(\d+)"/g)) {
    const specifier = strings[Number(match[1])];
    found.push({ specifier, kind: "static", clause: "", line: lineAt(match.index) });
  }
  for (const match of code.matchAll(/\bimport\s*\((?:\s*"(\d+)"\s*[,)])?/g)) {
    const specifier = match[1] === undefined ? undefined : strings[Number(match[1])];
    found.push({ specifier, kind: "dynamic", clause: "", line: lineAt(match.index) });
  }
  return found;
}
