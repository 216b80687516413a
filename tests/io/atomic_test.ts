import assert from "node:assert/strict";
import { mkdir, readdir, readFile, stat, symlink, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { test } from "node:test";
import { writeFileAtomic, writeFolderAtomic } from "../../src/api/io/atomic.ts";
import { ioError } from "../../src/api/io/io_error.ts";
import { rejects, withScratch } from "./scratch.ts";

const bytes = (text: string) => new TextEncoder().encode(text);

test("writeFileAtomic() writes all parts under the final name only", () =>
  withScratch(async (dir) => {
    const large = new Uint8Array(20_000_000).fill(1); // more than one write call
    await writeFileAtomic(join(dir, "f"), [bytes("a"), new Uint8Array(0), large, bytes("z")]);
    const result = await readFile(join(dir, "f"));
    assert.equal(result.byteLength, large.byteLength + 2);
    assert.deepEqual([result[0], result[1], result.at(-2), result.at(-1)], [97, 1, 1, 122]);
    assert.deepEqual(await readdir(dir), ["f"]);
  }));

test("writeFileAtomic() puts a new file in place of a symbolic link", () =>
  withScratch(async (dir) => {
    await writeFile(join(dir, "shared"), "shared");
    await symlink("shared", join(dir, "f"));
    await writeFileAtomic(join(dir, "f"), [bytes("new")]);
    assert.equal(await readFile(join(dir, "f"), "utf8"), "new");
    assert.equal(await readFile(join(dir, "shared"), "utf8"), "shared");
  }));

test("writeFileAtomic() removes its temporary file when it fails", () =>
  withScratch(async (dir) => {
    await mkdir(join(dir, "folder/inner"), { recursive: true });
    await rejects(() => writeFileAtomic(join(dir, "folder"), [bytes("x")]), "IO", /EISDIR/);
    await rejects(() => writeFileAtomic(join(dir, "gone/f"), [bytes("x")]), "IO", /ENOENT/);
    await writeFile(join(dir, "file"), "old");
    await rejects(() => writeFileAtomic(join(dir, "file/f"), [bytes("x")]), "IO", /ENOTDIR/);
    assert.deepEqual((await readdir(dir)).sort(), ["file", "folder"]);
    assert.equal(await readFile(join(dir, "file"), "utf8"), "old");
  }));

test("writeFolderAtomic() makes a folder appear whole, with its parents", () =>
  withScratch(async (dir) => {
    const target = join(dir, "a/b");
    await writeFolderAtomic(target, ["x", "y"], async (staging) => {
      await writeFile(join(staging, "x"), "1");
      await rejects(
        () => stat(target).catch((error) => Promise.reject(ioError("stat", target, error))),
        "IO",
      );
      await writeFile(join(staging, "y"), "2");
    });
    assert.deepEqual((await readdir(target)).sort(), ["x", "y"]);
    assert.deepEqual(await readdir(join(dir, "a")), ["b"]);
  }));

test("writeFolderAtomic() replaces files of an existing folder and keeps the others", () =>
  withScratch(async (dir) => {
    await writeFile(join(dir, "x"), "old");
    await writeFile(join(dir, "README.md"), "mine");
    await writeFolderAtomic(dir, ["x"], async (staging) => {
      await writeFile(join(staging, "x"), "new");
      assert.equal(await readFile(join(dir, "x"), "utf8"), "old");
    });
    assert.equal(await readFile(join(dir, "x"), "utf8"), "new");
    assert.deepEqual((await readdir(dir)).sort(), ["README.md", "x"]);
  }));

test("writeFolderAtomic() leaves everything as it was when filling fails", () =>
  withScratch(async (dir) => {
    const broken = new Error("broken");
    const fill = async (staging: string) => {
      await writeFile(join(staging, "x"), "new");
      throw broken;
    };
    await assert.rejects(writeFolderAtomic(join(dir, "new"), ["x"], fill), broken);
    const full = async (staging: string) => await writeFileAtomic(join(staging, "no/x"), []);
    const error = await rejects(() => writeFolderAtomic(join(dir, "new"), ["x"], full), "IO");
    assert.ok(error.is("IO") && error.details.file === join(dir, "new"));
    assert.deepEqual(await readdir(dir), []);
    await writeFile(join(dir, "x"), "old");
    await assert.rejects(writeFolderAtomic(dir, ["x"], fill), broken);
    assert.deepEqual(await readdir(dir), ["x"]);
    assert.equal(await readFile(join(dir, "x"), "utf8"), "old");
    await rejects(() => writeFolderAtomic(join(dir, "x"), ["x"], fill), "IO", /file is in the way/);
    await rejects(() => writeFolderAtomic(join(dir, "x/y"), ["x"], fill), "IO", /ENOTDIR/);
  }));

test("ioError() says what an errno means and keeps the cause", () => {
  for (const [code, text] of [
    ["ENOSPC", /disk is full/],
    ["EACCES", /permission/],
    ["EROFS", /read-only/],
  ]) {
    const cause = Object.assign(new Error("raw"), { code });
    const error = ioError("save", "out/file", cause);
    assert.match(error.message, text as RegExp);
    assert.match(error.message, /^save: .*out\/file/);
    assert.ok(error.is("IO") && error.details.errno === code && error.cause === cause);
  }
  assert.match(
    ioError("save", "f", Object.assign(new Error("odd"), { code: "EODD" })).message,
    /odd.*EODD/,
  );
});
