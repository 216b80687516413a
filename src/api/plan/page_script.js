// @ts-nocheck: it runs in a browser, whose types the project does not load.
/** Draws the timelines of the page and answers pointer and keyboard. Reads the data that the page carries. */
(() => {
  const { plans } = JSON.parse(document.getElementById("plans").textContent);
  const tip = document.getElementById("tip");
  const panels = [...document.querySelectorAll(".panel")].map(makePanel);
  for (const panel of panels) panel.draw();

  /** Height of all plots in bytes, so that plans can be compared by eye. */
  function scale() {
    return 1.06 * Math.max(1, ...panels.map((panel) => panel.program().bytes));
  }

  function makePanel(root) {
    const find = (selector) => root.querySelector(selector);
    const [planChoice, programChoice, plot] = [".plan", ".program", ".plot"].map(find);
    const svg = find("svg");
    let state = null;
    const plan = () => plans[planChoice.value];
    const program = () => plan().programs[programChoice.value];

    planChoice.addEventListener("change", () => {
      listPrograms();
      for (const panel of panels) panel.draw();
    });
    programChoice.addEventListener("change", () => {
      for (const panel of panels) panel.draw();
    });
    find("details").addEventListener("toggle", fillAll);
    plot.addEventListener("pointermove", (event) => {
      const box = plot.getBoundingClientRect();
      const op = Math.floor(((event.clientX - box.left) / box.width) * state.ops);
      const bytes = (1 - (event.clientY - box.top) / box.height) * state.scale;
      point(op, bytes, event.clientX, event.clientY);
    });
    plot.addEventListener("pointerleave", leave);
    plot.addEventListener("blur", leave);
    plot.addEventListener("focus", () => focusOn(state.op, state.value));
    plot.addEventListener("keydown", onKey);

    function listPrograms() {
      const chosen = programChoice.selectedOptions[0]?.textContent;
      const names = plan().programs.map(({ name }) => name);
      programChoice.replaceChildren(
        ...names.map((name, index) => new Option(name, index, false, name === chosen)),
      );
    }

    function draw() {
      const { ops, values, bytes, peakOp } = program();
      state = { ops: ops.length, scale: scale(), op: peakOp, value: null };
      const y = (at) => 1000 * (1 - at / state.scale);
      svg.setAttribute("viewBox", `0 0 ${ops.length} 1000`);
      const ticks = tickBytes(state.scale);
      svg.replaceChildren(
        ...ticks.map((at) => line("grid", 0, ops.length, y(at), y(at))),
        ...values.map((value, index) =>
          shape("rect", {
            class: `${value.group}${value.layer % 2 === 1 ? " odd" : ""}`,
            x: value.from,
            y: y(value.offset + value.bytes),
            width: value.to - value.from,
            height: (1000 * value.bytes) / state.scale,
            "data-value": index,
          }),
        ),
        shape("path", { class: "alive", d: aliveCurve(program(), y) }),
        line("limit", 0, ops.length, y(bytes), y(bytes)),
        line("when", peakOp + 0.5, peakOp + 0.5, 0, 1000),
      );
      find(".bytes").replaceChildren(
        ...ticks.map((at) => label(formatBytes(at, 0), { top: `${y(at) / 10}%` })),
      );
      find(".ops").replaceChildren(
        ...[0, 1, 2, 3, 4].map((part) => {
          const op = Math.round(((ops.length - 1) * part) / 4);
          return label(part === 0 ? "op 0" : String(op), { left: `${(100 * op) / ops.length}%` });
        }),
      );
      find(".phases").replaceChildren(
        ...phaseRuns(ops).map(({ name, from, to }) => {
          const [left, width] = [(100 * from) / ops.length, (100 * (to - from)) / ops.length];
          return label(width > 6 ? name : "", { left: `${left}%`, width: `${width}%` });
        }),
      );
      drawPeak();
      fillRows(find(".largest tbody"), alive(values, peakOp).slice(0, 10));
      fillAll();
    }

    function drawPeak() {
      const { bytes, peakOp, ops } = program();
      const strong = document.createElement("strong");
      strong.textContent = formatBytes(bytes);
      strong.dataset.bytes = bytes;
      const exact = document.createElement("span");
      exact.textContent = `${bytes.toLocaleString("en")} bytes of activations`;
      const where = document.createElement("small");
      where.textContent = `Peak at ${opText(ops, peakOp)}`;
      find(".peak").replaceChildren(strong, " ", exact, where);
    }

    function fillAll() {
      const values = find("details").open ? program().values : [];
      fillRows(find(".all tbody"), values, true);
    }

    function point(op, bytes, x, y) {
      const { values } = program();
      const index = values.findIndex(
        ({ from, to, offset, bytes: size }) =>
          from <= op && op < to && offset <= bytes && bytes < offset + size,
      );
      mark(op, index);
      show(op, values[index], x, y);
    }

    /** Shows a value at an op where it lies, for the keyboard. */
    function focusOn(op, index) {
      const { values } = program();
      const here = alive(values, op);
      const value = index === null ? here[0] : values[index];
      if (value === undefined) return;
      state.op = op;
      state.value = values.indexOf(value);
      mark(op, state.value);
      const box = plot.getBoundingClientRect();
      const up = (value.offset + value.bytes / 2) / state.scale;
      show(
        op,
        value,
        box.left + (box.width * (op + 0.5)) / state.ops,
        box.top + box.height * (1 - up),
      );
    }

    function onKey(event) {
      const { values, peakOp } = program();
      const ends = { Home: 0, End: state.ops - 1, p: peakOp, P: peakOp };
      const steps = { ArrowLeft: -1, ArrowRight: 1 };
      const current = values[state.value];
      if (event.key in ends) {
        focusOn(ends[event.key], null);
      } else if (event.key in steps) {
        const op = Math.min(state.ops - 1, Math.max(0, state.op + steps[event.key]));
        const stays = current !== undefined && current.from <= op && op < current.to;
        focusOn(op, stays ? state.value : null);
      } else if (event.key === "ArrowUp" || event.key === "ArrowDown") {
        const column = alive(values, state.op).sort((a, b) => a.offset - b.offset);
        const at = column.indexOf(current) + (event.key === "ArrowUp" ? 1 : -1);
        if (column[at] !== undefined) focusOn(state.op, values.indexOf(column[at]));
      } else if (event.key === "Escape") {
        leave();
      } else {
        return;
      }
      event.preventDefault();
    }

    function mark(op, index) {
      svg.querySelector(".picked")?.classList.remove("picked");
      svg.querySelector(".cursor")?.remove();
      svg.append(line("cursor", op + 0.5, op + 0.5, 0, 1000));
      if (index >= 0) svg.querySelector(`[data-value="${index}"]`).classList.add("picked");
    }

    function leave() {
      svg.querySelector(".picked")?.classList.remove("picked");
      svg.querySelector(".cursor")?.remove();
      tip.hidden = true;
    }

    function show(op, value, x, y) {
      const { ops, values } = program();
      const total = alive(values, op).reduce((sum, { bytes }) => sum + bytes, 0);
      const lines = [];
      if (value !== undefined) {
        const owner = value.layer === null ? "" : ` of layer ${value.layer}`;
        lines.push(
          ["b", `${value.name}${owner}`],
          ["div", `[${value.shape.join(", ")}] ${value.dtype}, ${formatBytes(value.bytes)}`],
          ["span", `${value.bytes.toLocaleString("en")} bytes at ${formatBytes(value.offset)}`],
          ["span", `from ${opText(ops, value.from)}`],
          ["span", `to ${opText(ops, value.to - 1)}`],
        );
      }
      lines.push(["span", `${formatBytes(total)} alive at ${opText(ops, op)}`]);
      tip.replaceChildren(
        ...lines.map(([tag, text]) => {
          const element = document.createElement(tag);
          element.textContent = text;
          return element;
        }),
      );
      tip.hidden = false;
      const { width, height } = tip.getBoundingClientRect();
      const left = x + 16 + width > innerWidth - 8 ? x - 16 - width : x + 16;
      const top = Math.min(y + 16, innerHeight - 8 - height);
      tip.style.left = `${Math.max(8, left)}px`;
      tip.style.top = `${Math.max(8, top)}px`;
    }

    listPrograms();
    return { program, draw };
  }

  /** The values that are alive at an op, largest first. */
  function alive(values, op) {
    return values.filter(({ from, to }) => from <= op && op < to).sort((a, b) => b.bytes - a.bytes);
  }

  /** A curve of the bytes that are alive. */
  function aliveCurve({ ops, values }, y) {
    const change = new Float64Array(ops.length + 1);
    for (const { from, to, bytes } of values) {
      change[from] += bytes;
      change[to] -= bytes;
    }
    let total = 0;
    const steps = ops.map((_, op) => {
      total += change[op];
      return `${op === 0 ? "M" : "L"}${op} ${y(total)}L${op + 1} ${y(total)}`;
    });
    return steps.join("");
  }

  /** Forward, head, backward: stretches of ops; recomputation belongs to backward. */
  function phaseRuns(ops) {
    const runs = [];
    ops.forEach(([kind, phase], op) => {
      const head = kind === "linearCrossEntropy" || kind === "lossSum";
      const name = phase === "recompute" ? "backward" : head ? "head" : phase;
      const last = runs.at(-1);
      if (last?.name === name) last.to = op + 1;
      else runs.push({ name, from: op, to: op + 1 });
    });
    return runs;
  }

  function opText(ops, op) {
    const [kind, phase, layer] = ops[op];
    return `op ${op}, ${kind}${layer === null ? "" : ` of layer ${layer}`} (${phase})`;
  }

  /** Heights of grid lines: a power of two of bytes apart, six at most. */
  function tickBytes(height) {
    const step = 2 ** Math.ceil(Math.log2(height / 6));
    return Array.from({ length: Math.floor(height / step) + 1 }, (_, index) => index * step);
  }

  function formatBytes(bytes, digits = 2) {
    const unit = bytes === 0 ? 0 : Math.min(4, Math.floor(Math.log2(bytes) / 10));
    const amount = bytes / 1024 ** unit;
    const text = unit === 0 || Number.isInteger(amount) ? amount : amount.toFixed(digits);
    return `${text} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
  }

  function fillRows(body, values, withLife = false) {
    const cells = ({ name, layer, shape: sizes, dtype, bytes, offset, from, to }) => [
      name,
      layer === null ? "" : `layer ${layer}`,
      `[${sizes.join(", ")}] ${dtype}`,
      ...(withLife ? [`ops ${from} to ${to - 1}`, `at ${offset.toLocaleString("en")}`] : []),
      withLife ? bytes.toLocaleString("en") : formatBytes(bytes),
    ];
    body.replaceChildren(
      ...values.map((value) => {
        const row = document.createElement("tr");
        for (const text of cells(value)) row.insertCell().textContent = text;
        const swatch = document.createElement("i");
        swatch.className = `swatch ${value.group}`;
        row.cells[0].prepend(swatch);
        return row;
      }),
    );
  }

  function label(text, style) {
    const element = document.createElement("span");
    element.textContent = text;
    Object.assign(element.style, style);
    return element;
  }

  function line(name, x1, x2, y1, y2) {
    return shape("line", { class: name, x1, x2, y1, y2 });
  }

  function shape(tag, attributes) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  }
})();
