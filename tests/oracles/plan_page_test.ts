/** The page of `loramem plan --html` in a real browser: headless Chromium (Debian package `chromium`). */
import assert from "node:assert/strict";
import { existsSync } from "node:fs";
import { writeFile } from "node:fs/promises";
import { join } from "node:path";
import process from "node:process";
import { test } from "node:test";
import { chromium, type Page } from "playwright-core";
import { planTraining } from "../../mod.ts";
import { MEMORY_CLASSES } from "../../src/api/graph/value.ts";
import { renderPage } from "../../src/api/plan/page.ts";
import { type PageProgram, type PageValue, pageData } from "../../src/api/plan/page_data.ts";
import { formatBytes } from "../../src/api/plan/report.ts";
import { DEMO, temporary } from "../cli/support.ts";

const BROWSER =
  process.env.CHROMIUM ??
  ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"].find(existsSync);

/** Opens the page of a plan; `visit` must find it without a single error or request. */
async function withPage(
  scheme: "light" | "dark",
  visit: (page: Page, plans: Awaited<ReturnType<typeof planDemo>>) => Promise<void>,
): Promise<void> {
  assert.ok(BROWSER !== undefined, "no Chromium: install the package chromium, or set CHROMIUM");
  await using folder = await temporary();
  const plans = await planDemo();
  const file = join(folder.path, "plan.html");
  await writeFile(file, renderPage(plans.data));
  const browser = await chromium.launch({ executablePath: BROWSER, args: ["--no-sandbox"] });
  try {
    const page = await browser.newPage({
      viewport: { width: 1500, height: 1300 },
      colorScheme: scheme,
    });
    const faults: string[] = [];
    page.on("pageerror", (error) => faults.push(error.message));
    page.on("console", (message) => faults.push(message.text()));
    page.on("request", (request) => faults.push(request.url()));
    await page.goto(`file://${file}`);
    await visit(page, plans);
    assert.deepEqual(faults, [`file://${file}`]);
  } finally {
    await browser.close();
  }
}

async function planDemo() {
  const planned = await planTraining({
    model: join(DEMO, "model"),
    data: join(DEMO, "train.jsonl"),
    memoryBudget: "34MB",
    device: "cpu",
  });
  return { planned, data: pageData("Memory plan <of> the demo", planned.compared()) };
}

/** The bytes that an element carries. */
async function bytesOf(page: Page, selector: string): Promise<number[]> {
  const texts = await page
    .locator(selector)
    .evaluateAll((elements) =>
      elements.map(
        (element) => (element as unknown as { dataset: { bytes: string } }).dataset.bytes,
      ),
    );
  return texts.map(Number);
}

/** What the hover text must say of a value. */
function assertDescribes(text: string, value: PageValue, { ops }: PageProgram): void {
  assert.ok(text.includes(value.name), text);
  assert.ok(text.includes(`[${value.shape.join(", ")}] ${value.dtype}`), text);
  assert.ok(text.includes(`${value.bytes.toLocaleString("en")} bytes`), text);
  assert.ok(text.includes(`from op ${value.from}, ${ops[value.from]?.[0]}`), text);
  if (value.layer !== null) assert.ok(text.includes(`of layer ${value.layer}`), text);
}

test("renderPage() shows the bytes of the plan", { timeout: 120_000 }, async () => {
  await withPage("light", async (page, { planned, data }) => {
    assert.equal(await page.title(), "Memory plan <of> the demo");
    const { plan } = planned;
    const shown = await bytesOf(page, ".summary tbody tr:first-child td[data-bytes]");
    assert.deepEqual(shown, [
      plan.deviceBytes,
      ...MEMORY_CLASSES.map((name) => plan.classes[name]),
    ]);
    const peaks = await bytesOf(page, ".panel .peak strong");
    const trains = data.plans.slice(0, 2).map(({ programs }) => programs[0]?.bytes);
    assert.deepEqual(peaks, trains);
    assert.equal(peaks[0], plan.programs.get("train")?.bytes);
    const text = await page.locator(".panel .peak").first().textContent();
    assert.ok(text?.includes(formatBytes(peaks[0] ?? 0)), text ?? "");

    // The peak line is where the highest bar ends.
    const [line, tops] = await page.evaluate(() => {
      const document = (globalThis as unknown as { document: ParentNode }).document;
      const top = (element: Element) => element.getBoundingClientRect().top;
      type ParentNode = { querySelectorAll(selector: string): Iterable<Element> };
      type Element = { getBoundingClientRect(): { top: number } };
      const [panel] = document.querySelectorAll(".panel") as unknown as ParentNode[];
      const all = (selector: string) =>
        [...(panel as ParentNode).querySelectorAll(selector)].map(top);
      return [all("line.limit")[0] ?? 0, all("rect")] as const;
    });
    assert.ok(Math.abs(Math.min(...tops) - line) < 2, `${Math.min(...tops)} and ${line}`);
  });
});

test("renderPage() tells op, shape, layer and bytes of the bar under the pointer", {
  timeout: 120_000,
}, async () => {
  await withPage("dark", async (page, { data }) => {
    const program = data.plans[0]?.programs[0];
    assert.ok(program !== undefined);
    const bars = page.locator(".panel").first().locator("rect");
    assert.equal(await bars.count(), program.values.length);
    const largest = program.values
      .map((value, index) => ({ value, index }))
      .sort(
        (a, b) =>
          b.value.bytes * (b.value.to - b.value.from) - a.value.bytes * (a.value.to - a.value.from),
      );
    for (const { value, index } of largest.slice(0, 5)) {
      const box = await bars.nth(index).boundingBox();
      assert.ok(box !== null);
      await page.mouse.move(box.x + box.width / 2, box.y + box.height / 2);
      assertDescribes((await page.locator("#tip").textContent()) ?? "", value, program);
    }
    await page.mouse.move(2, 2);
    assert.ok(await page.locator("#tip").isHidden());
  });
});

test("renderPage() can be used with the keyboard, and has a table of all values", {
  timeout: 120_000,
}, async () => {
  await withPage("light", async (page, { data }) => {
    const program = data.plans[0]?.programs[0];
    assert.ok(program !== undefined);
    await page.locator(".plot").first().focus();
    await page.keyboard.press("p");
    const peak = (await page.locator("#tip").textContent()) ?? "";
    assert.ok(peak.includes(`alive at op ${program.peakOp}`), peak);
    await page.keyboard.press("ArrowLeft");
    const before = (await page.locator("#tip").textContent()) ?? "";
    assert.ok(before.includes(`alive at op ${program.peakOp - 1}`), before);
    await page.keyboard.press("Home");
    await page.keyboard.press("ArrowDown");
    assert.match((await page.locator("#tip").textContent()) ?? "", /alive at op 0/);

    const panel = page.locator(".panel").first();
    await panel.locator("summary").click();
    assert.equal(await panel.locator(".all tbody tr").count(), program.values.length);
    assert.equal(await panel.locator(".largest tbody tr").count(), 10);

    // Another plan and another program in the same place.
    await panel.locator("select.plan").selectOption("1");
    const [shown] = await bytesOf(page, ".panel .peak strong");
    assert.equal(shown, data.plans[1]?.programs[0]?.bytes);
    await panel.locator("select.program").selectOption({ label: "decode" });
    const decode = data.plans[1]?.programs.find(({ name }) => name === "decode");
    assert.equal((await bytesOf(page, ".panel .peak strong"))[0], decode?.bytes);
    assert.equal(await panel.locator("rect").count(), decode?.values.length);
  });
});
