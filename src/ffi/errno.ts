/** What failures of the file system mean to the user. */
import { constants } from "node:os";

const MEANING: ReadonlyMap<string, readonly [what: string, fix: string]> = new Map([
  ["ENOENT", ["no such file or folder", "check the path"]],
  ["EEXIST", ["a file is there already", "choose another name, or remove it"]],
  ["ENOTDIR", ["a part of the path is a file, not a folder", "choose another path"]],
  ["EISDIR", ["the path is a folder, not a file", "choose another path"]],
  ["EACCES", ["permission denied", "check the owner and mode of the file and its folder"]],
  ["EPERM", ["permission denied", "check the owner and mode of the file and its folder"]],
  ["EROFS", ["the file system is read-only", "choose another folder"]],
  ["ENOSPC", ["the disk is full", "free some space; what was there before is unchanged"]],
  ["EDQUOT", ["the disk quota is used up", "free some space; what was there before is unchanged"]],
  [
    "EFBIG",
    ["the file would be too large", "check the file size limit of the process and the disk"],
  ],
  ["EMFILE", ["too many open files", "raise the limit with ulimit -n"]],
  ["EIO", ["the disk failed", "look at the kernel log"]],
]);

const NAMES = new Map(Object.entries(constants.errno).map(([name, value]) => [value, name]));

/** Name of an errno, such as `"ENOSPC"`. */
export function errnoName(value: number): string {
  return NAMES.get(value) ?? `errno ${value}`;
}

/** What an errno means, and what mends it; `otherwise` is what is wrong where the errno says nothing better. */
export function errnoMeaning(name: string, otherwise: string): { what: string; fix: string } {
  const [what, fix] = MEANING.get(name) ?? [otherwise, "check the path and the disk"];
  return { what, fix };
}
