/**
 * The page about plans: one file without a reference to anything outside it. Data comes from page_data.ts; this is the
 * markup; how it looks and how it moves is in page_style.css and page_script.js.
 */
import { readFileSync } from "node:fs";
import { MEMORY_CLASSES } from "../graph/value.ts";
import type { PageData, ValueGroup } from "./page_data.ts";
import { formatBytes, formatSeconds } from "./report.ts";

const GROUPS: readonly (readonly [ValueGroup, string])[] = [
  ["kept", "kept for backward"],
  ["recomputed", "computed again"],
  ["gradient", "gradients and backward scratch"],
  ["head", "logits and loss"],
  ["passing", "passing through"],
  ["input", "inputs and caches"],
];

/** The page as HTML. */
export function renderPage(data: PageData): string {
  const asset = (name: string) => readFileSync(new URL(name, import.meta.url), "utf8");
  // Nothing may be loaded, not even by mistake.
  const policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'";
  return `<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="${policy}">
<title>${escapeText(data.title)}</title>
<style>
${asset("./page_style.css")}</style>
</head>
<body>
<header>
<h1>${escapeText(data.title)}</h1>
<p>Every byte is known before the first step. A bar is a value: as wide as it lives, as high as it is large, at the place
that it has in memory. Nothing on this page is loaded from elsewhere.</p>
</header>
<main>
${renderSummary(data)}
${renderLegend()}
<div class="panels">
${renderPanel(data, 0)}
${data.plans.length > 1 ? renderPanel(data, 1) : ""}
</div>
</main>
<noscript>The timelines need JavaScript; the numbers above do not.</noscript>
<div id="tip" role="status" aria-live="polite" hidden></div>
<script type="application/json" id="plans">${embed(data)}</script>
<script>
${asset("./page_script.js")}</script>
</body>
</html>
`;
}

function renderLegend(): string {
  const items = GROUPS.map(
    ([group, text]) => `<li><i class="swatch ${group}" aria-hidden="true"></i>${text}</li>`,
  );
  items.push('<li><i class="swatch limit" aria-hidden="true"></i>peak</li>');
  items.push('<li><i class="swatch alive" aria-hidden="true"></i>bytes alive</li>');
  return `<ul class="legend" aria-label="Colours">${items.join("")}</ul>`;
}

/** All plans beside each other, in numbers. */
function renderSummary({ plans }: PageData): string {
  const columns = ["Plan", "Device", ...MEMORY_CLASSES, "Predicted step", "Tokens/s"];
  const cell = (bytes: number) =>
    `<td data-bytes="${bytes}">${formatBytes(bytes)}<small>${bytes.toLocaleString("en")} B</small></td>`;
  const rows = plans.map((plan) => {
    const { seconds, tokensPerSecond, profile } = plan;
    const memory = [plan.deviceBytes, ...MEMORY_CLASSES.map((name) => plan.classes[name])];
    const step = seconds === null ? "" : formatSeconds(seconds);
    const speed = tokensPerSecond === null ? "" : Math.round(tokensPerSecond).toLocaleString("en");
    return (
      `<tr><th scope="row">${escapeText(plan.name)}</th>${memory.map(cell).join("")}` +
      `<td>${step}<small>${escapeText(profile ?? "")}</small></td><td>${speed}</td></tr>`
    );
  });
  const head = columns.map((name) => `<th scope="col">${name}</th>`).join("");
  return (
    '<div class="scroll"><table class="summary"><caption>Device is weights, trainable and activations ' +
    `together; staging and host are page-locked host memory, file is on the disk</caption><thead><tr>${head}</tr></thead>` +
    `<tbody>${rows.join("")}</tbody></table></div>`
  );
}

/** A place for one plan, which the script fills. */
function renderPanel({ plans }: PageData, index: number): string {
  const options = plans.map(
    ({ name }, at) =>
      `<option value="${at}"${at === index ? " selected" : ""}>${escapeText(name)}</option>`,
  );
  const keys =
    "Left and right move between ops, up and down between values, Home and End go to the ends, P to the peak.";
  return `<section class="panel" aria-label="Timeline ${index + 1}">
<div class="choices">
<label>Plan <select class="plan">${options.join("")}</select></label>
<label>Program <select class="program"></select></label>
</div>
<p class="peak"></p>
<div class="chart">
<div class="phases" aria-hidden="true"></div>
<div class="bytes" aria-hidden="true"></div>
<div class="plot" tabindex="0" role="application" aria-label="Values over the ops. ${keys}">
<svg preserveAspectRatio="none" aria-hidden="true"></svg>
</div>
<div class="ops" aria-hidden="true"></div>
</div>
<table class="largest"><caption>Largest values at the peak</caption><tbody></tbody></table>
<details><summary>All values as a table</summary><table class="all"><tbody></tbody></table></details>
</section>`;
}

function escapeText(text: string): string {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll('"', "&quot;");
}

/** JSON that cannot end the script element it stands in. */
function embed(data: PageData): string {
  return JSON.stringify(data).replaceAll("<", "\\u003c");
}
