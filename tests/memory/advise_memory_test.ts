import assert from "node:assert/strict";
import { test } from "node:test";
import { adviseMemory, type MemoryKind, type MemoryUse } from "../../src/api/mod.ts";

const MIB = 1 << 20;

// Mutant: swap the answers of any two leaves.
test("adviseMemory() reaches every leaf of its tree, each with its reason", () => {
  const cases: [MemoryUse, MemoryKind, RegExp][] = [
    [{ bytes: MIB, kernels: true }, "device", /fastest/],
    [{ bytes: MIB, kernels: true, host: "both", copies: "often" }, "device", /fits/],
    [{ bytes: MIB, kernels: true, deviceFree: MIB }, "device", /fits/],
    [{ bytes: MIB, kernels: true, host: "reads", sparse: true }, "managed", /scattered/],
    [{ bytes: MIB, kernels: true, sparse: true }, "device", /fits/],
    [
      { bytes: MIB, kernels: true, deviceFree: MIB - 1 },
      "pinned",
      /1048576 bytes exceed the 1048575 free.*windows/,
    ],
    [{ bytes: MIB, kernels: true, sparse: true, host: "both", deviceFree: 0 }, "pinned", /windows/],
    [
      { bytes: MIB, kernels: true, deviceFree: 0, pinnedFree: 9 },
      "pageable",
      /windows; only 9 bytes/,
    ],
    [{ bytes: MIB, kernels: false }, "pageable", /only the host/],
    [{ bytes: MIB, kernels: false, host: "both" }, "pageable", /only the host/],
    [{ bytes: 65_535, kernels: false, copies: "once" }, "pageable", /small/],
    [{ bytes: 65_536, kernels: false, copies: "once" }, "pinned", /beside other work/],
    [{ bytes: 64, kernels: false, copies: "often" }, "pinned", /beside other work/],
    [
      { bytes: MIB, kernels: false, copies: "often", pinnedFree: MIB - 1 },
      "pageable",
      /smaller ring/,
    ],
    [{ bytes: MIB, kernels: false, copies: "often", host: "writes" }, "pinned", /full speed/],
    [
      { bytes: MIB, kernels: false, copies: "often", host: "writes", writeCombinedGain: 0.05 },
      "write-combined",
      /measured/,
    ],
    [
      { bytes: MIB, kernels: false, copies: "often", host: "writes", writeCombinedGain: 0.04 },
      "pinned",
      /full speed/,
    ],
    [
      { bytes: MIB, kernels: false, copies: "often", host: "both", writeCombinedGain: 0.5 },
      "pinned",
      /full speed/,
    ],
  ];
  for (const [use, kind, reason] of cases) {
    const advice = adviseMemory(use);
    assert.equal(advice.kind, kind, JSON.stringify(use));
    assert.match(advice.reason, reason, JSON.stringify(use));
  }
});

test("adviseMemory() checks its arguments", () => {
  const bad: unknown[] = [
    undefined,
    {},
    { bytes: 0, kernels: true },
    { bytes: 1 },
    { bytes: 1, kernels: 1 },
    { bytes: 1, kernels: true, host: "sometimes" },
    { bytes: 1, kernels: true, copies: 3 },
  ];
  for (const use of bad) {
    assert.throws(() => adviseMemory(use as MemoryUse), { code: "BAD_ARGUMENT" });
  }
});
