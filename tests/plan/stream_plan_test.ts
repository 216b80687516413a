/** Programs with copies between host and device: their order, what the verifier refuses, and how long they take. */
import assert from "node:assert/strict";
import { test } from "node:test";
import type { Op, Program, ProgramName, Transfer } from "../../src/api/graph/program.ts";
import { bytesOf, rootOf } from "../../src/api/graph/value.ts";
import type { Plan } from "../../src/api/plan/plan.ts";
import { findProfile } from "../../src/api/plan/profiles.ts";
import { arrange, type SavePoints, type SavePolicy } from "../../src/api/plan/save_points.ts";
import { forecastStep, fullLoad } from "../../src/api/plan/time.ts";
import { verifyProgram } from "../../src/api/plan/verify.ts";
import { planRun, type WeightPlace } from "../../src/api/train/run_plan.ts";
import { specOf } from "./models.ts";

function planStreamed(points: SavePolicy | SavePoints, tokensPerMicroBatch = 512): Plan {
  return planRun({ ...specOf("four layers", { tokensPerMicroBatch }), weights: "stream" }, points)
    .plan;
}

function programOf(plan: Plan, name: ProgramName): Program {
  const planned = plan.programs.get(name);
  assert.ok(planned !== undefined);
  return planned.program;
}

/** The ops as a story: `3` is layer 3, `>3` and `=3` start and await the copy of its weights, `-` is no layer. */
function story({ ops }: Program): string {
  const words: string[] = [];
  const marks: Readonly<Record<string, string>> = { transfer: ">", arrival: "=" };
  for (const { kind, attributes, layer } of ops) {
    const mark = marks[kind.name];
    const word =
      mark === undefined ? (layer ?? "-") : `${mark}${(attributes as Transfer).from.layer}`;
    if (words.at(-1) !== String(word)) words.push(String(word));
  }
  return words.join(" ");
}

test("buildPrograms() streams every layer one ahead, and leaves the windows as it found them", () => {
  const plan = planStreamed("checkpoint");
  const forward = "- =0 0 >2 =1 1 >3 =2 2";
  assert.equal(story(programOf(plan, "train")), `${forward} =3 3 - 3 >1 2 >0 =1 1 =0 0`);
  for (const name of ["evaluate", "prefill", "decode"] as const)
    assert.equal(story(programOf(plan, name)), `${forward} >0 =3 3 >1 -`);
  assert.equal(story(programOf(plan, "optimizer")), "-");
});

/** A program whose ops have been tampered with. */
function tampered(program: Program, change: (ops: Op[]) => void): Program {
  const ops = [...program.ops];
  change(ops);
  return { ...program, ops };
}

test("verifyProgram() refuses copies that come too late, too early or not at all", () => {
  const plan = planStreamed("offload");
  const train = programOf(plan, "train");
  verifyProgram(train, plan);
  const refused = (what: string, change: (ops: Op[]) => void) =>
    assert.throws(() => verifyProgram(tampered(train, change), plan), /report this as a bug/, what);
  const isCopy = (op: Op | undefined) =>
    op?.kind.name === "transfer" || op?.kind.name === "arrival";
  for (const [at, op] of train.ops.entries()) {
    if (!isCopy(op)) continue;
    refused(`without op ${at}`, (ops) => ops.splice(at, 1));
    // Before the last op that reads a window, the window is overwritten while it is needed; copies may change places.
    const { to } = op.attributes as Transfer;
    if (op.kind.name === "arrival" || to.memory !== "weights" || isCopy(train.ops[at - 1]))
      continue;
    const last = train.ops.findLastIndex(
      ({ uses }, index) => index < at && uses.reads.some((read) => rootOf(read) === rootOf(to)),
    );
    assert.ok(last >= at - 8, "the copy starts soon after");
    refused(`op ${at} early`, (ops) => {
      ops.splice(at, 1);
      ops.splice(last, 0, op);
    });
  }
});

test("makePlan() needs no more than the lower bound with copies under way", () => {
  for (const points of ["offload", arrange({ keep: 1, checkpoint: 1, offload: 2 })] as const) {
    for (const { bytes, lowerBound } of planStreamed(points).programs.values())
      assert.equal(bytes, lowerBound);
  }
});

/** Seconds of a step of Llama-3.1-8B on an H200: in all, waiting for copies, and of the link alone. */
function times(tokens: number, weights: WeightPlace, points: SavePolicy) {
  const profile = findProfile("h200");
  assert.ok(profile !== null);
  const spec = specOf("Llama-3.1-8B", { tokensPerMicroBatch: tokens });
  const { programs } = planRun({ ...spec, weights, programs: ["train"] }, points).set;
  const { seconds, phases } = forecastStep(programs, profile, fullLoad(tokens));
  let copied = 0;
  for (const { kind, attributes } of programs.flatMap(({ ops }) => ops)) {
    const { to, from } = attributes as Transfer;
    if (kind.name === "transfer" && to.memory !== "host") copied += bytesOf(from);
  }
  const { link, disk } = profile;
  return { seconds, waiting: phases.waiting, link: copied / link, disk: copied / disk };
}

test("forecastStep() takes as long as the ops, the link or the disk, whichever is slowest, and never all of them", () => {
  for (const tokens of [1024, 4096, 16_384]) {
    const resident = times(tokens, "resident", "checkpoint");
    const streamed = times(tokens, "stream", "checkpoint");
    const filed = times(tokens, "file", "checkpoint");
    const offloaded = times(tokens, "resident", "offload");
    assert.equal(resident.waiting, 0);
    const slower = Math.max(resident.seconds, streamed.link);
    assert.ok(streamed.seconds > slower && streamed.seconds < 1.25 * slower, `${tokens}`);
    const slowest = Math.max(resident.seconds, filed.disk);
    assert.ok(filed.seconds > slowest && filed.seconds < 1.25 * slowest, `${tokens}`);
    const more = offloaded.seconds / resident.seconds;
    assert.ok(more > 1 && more < 1.02, `${tokens}: ${more}`);
  }
});
