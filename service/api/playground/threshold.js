// The threshold slider: what a gate there would answer and get wrong, by what the bundle keeps of its training.
// The list of held-out questions follows it.
import { gridLine, path, scale } from "./axes.js";
import { byId, drawn, el, fixed, percent, show, svg, tell } from "./dom.js";
import { asksForAFact, gatedBy } from "./gating.js";

const MARGIN = { left: 44, right: 10, top: 10, bottom: 34 };
const FORM_ROWS = { held_out: "held-out rows", out_of_fold: "training rows, by probes that never saw the row" };
const SOURCES = {
  out_of_fold_risks: ({ rows }) => `Counted on the bundle's ${rows.toLocaleString("en")} training rows, each with the risk of probes that never saw it. It holds for questions like those.`,
  own_threshold: () => "This bundle keeps too little for other thresholds than its own. One that is trained anew keeps it all.",
};

export class Threshold {
  #detail = null;
  #moved = false;
  #last = null; // what the service told of the last question
  #redraw;

  // onMoved: called with each threshold that the slider takes
  constructor(onMoved) {
    this.onMoved = onMoved;
    this.slider = byId("threshold");
    this.slider.addEventListener("input", () => { this.#moved = true; byId("threshold-send").checked = true; this.#update(); });
    byId("threshold-reset").addEventListener("click", () => { this.slider.focus(); this.#reset(); });
    this.#redraw = drawn(byId("gate-plot"), (width) => this.#picture(width));
  }

  // The threshold to ask with; undefined: the service's own choice.
  get chosen() {
    return this.#moved && byId("threshold-send").checked ? Number(this.slider.value) : undefined;
  }

  get value() {
    return this.#moved ? Number(this.slider.value) : this.#detail.threshold;
  }

  use(detail) {
    this.#detail = detail;
    this.#last = null;
    const { gates, source } = detail.coverage;
    show(byId("gate-waiting"), false);
    show(byId("gate-body"), true);
    show(byId("gate-figure"), gates.length > 0);
    byId("gate-source").textContent = SOURCES[source](detail.coverage);
    forms(detail.forms);
    this.#reset();
  }

  // The last reading's row, to say what would happen to it here.
  mark(row) {
    this.#last = row;
    if (this.#detail) this.#update();
  }

  #reset() {
    this.#moved = false;
    byId("threshold-send").checked = false;
    this.slider.value = this.#detail.threshold;
    this.#update();
  }

  #update() {
    const at = this.value, { own } = this.#detail.coverage;
    byId("threshold-value").textContent = this.#moved ? fixed(at) : `${fixed(at, 3)} (the bundle's own)`;
    show(byId("threshold-moved"), this.#moved);
    const lines = [];
    const gate = this.#gate(at);
    if (own && (!this.#moved || !gate)) {
      lines.push(el("p", { id: "gate-own" }, `Measured at the bundle's own threshold, ${fixed(own.threshold, 3)}: ${words(own)}`));
    } else if (gate) {
      lines.push(el("p", { id: "gate-at" }, words(gate)));
    }
    if (at > 0 && at < 1) {
      const cost = Number(((1 - at) / at).toPrecision(2));
      lines.push(el("p", { id: "gate-cost", class: "note" }, `Right where a wrong answer costs as much as ${cost} withheld right ones.`));
    }
    tell(byId("gate-here"), this.#last && lastQuestion(this.#last, at, this.#detail));
    byId("gate-text").replaceChildren(...lines);
    this.slider.setAttribute("aria-valuetext", fixed(at));
    this.#redraw();
    this.onMoved(at);
  }

  // The nearest of the thresholds that the service tells of: they are a hundredth apart, as the slider's steps are.
  #gate(at) {
    const { gates } = this.#detail.coverage;
    return gates.length ? gates.reduce((best, gate) => Math.abs(gate.threshold - at) < Math.abs(best.threshold - at) ? gate : best) : null;
  }

  #picture(width) {
    const height = Math.round(Math.min(230, Math.max(170, width * 0.45)));
    const { gates } = this.#detail?.coverage ?? { gates: [] };
    const x = scale(0, 1, MARGIN.left, width - MARGIN.right), y = scale(0, 1, height - MARGIN.bottom, MARGIN.top);
    const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img",
      "aria-label": "Share answered, and share wrong among the answered, over the threshold; the numbers are in the text above." });
    for (const share of [0, 0.25, 0.5, 0.75, 1]) drawing.append(gridLine(y(share), MARGIN.left, width - MARGIN.right, `${share * 100} %`));
    for (const value of [0, 0.2, 0.4, 0.6, 0.8, 1]) {
      drawing.append(svg("text", { x: x(value), y: height - MARGIN.bottom + 16, "text-anchor": value === 1 ? "end" : "middle" }, value));
    }
    drawing.append(svg("text", { x: (MARGIN.left + width) / 2, y: height - 3, "text-anchor": "middle" }, "threshold"));
    const wrong = gates.filter((gate) => gate.wrong_among_answered !== null && gate.answered >= 0.005);
    drawing.append(
      svg("path", { class: "line wrong", d: path(wrong.map((gate) => [x(gate.threshold), y(gate.wrong_among_answered)])) }),
      svg("path", { class: "line answered", d: path(gates.map((gate) => [x(gate.threshold), y(gate.answered)])) }));
    if (this.#detail) {
      const at = x(this.value);
      drawing.append(svg("line", { class: "cut", x1: at, x2: at, y1: MARGIN.top, y2: height - MARGIN.bottom }));
      const gate = this.#gate(this.value);
      for (const [kind, share] of gate ? [["answered", gate.answered], ["wrong", gate.answered < 0.005 ? null : gate.wrong_among_answered]] : []) {
        if (share !== null) drawing.append(svg("circle", { class: `at ${kind}`, cx: at, cy: y(share), r: 4 }));
      }
    }
    return drawing;
  }
}

// What the risk is worth in each form of conversation, those first in which it is furthest from a probability.
function forms(table) {
  show(byId("forms"), Boolean(table));
  if (!table) return;
  const number = (value) => (value === null ? "–" : fixed(value));
  const off = ({ mean_risk, wrong }) => Math.abs(mean_risk - wrong);
  byId("forms-source").textContent = `By form of conversation, on ${FORM_ROWS[table.source]}. ` +
    "Where the mean risk is far from the share of wrong answers, the risk is no probability in that form.";
  byId("forms-rows").replaceChildren(...[...table.data].sort((a, b) => off(b) - off(a)).map((one) =>
    el("tr", {}, el("th", { scope: "row" }, one.form.replaceAll("_", " ")),
      ...[one.rows.toLocaleString("en"), number(one.wrong), number(one.mean_risk), number(one.auroc),
        one.answered === null ? "–" : percent(one.answered), number(one.wrong_among_answered)].map((cell) => el("td", {}, cell)))));
}

function lastQuestion(row, at, detail) {
  const by = gatedBy(row, at, detail), risk = fixed(row.risk);
  if (by === "outside") return "The last question is outside training: it would be withheld at every threshold.";
  if (!asksForAFact(row)) return `The last question asks for no fact: its risk, ${risk}, does not apply, and no threshold withholds the answer.`;
  return `The last question, risk ${risk}, would be ${by ? "withheld" : "answered"}.`;
}

function words(gate) {
  if (gate.wrong_among_answered === null) return "Nothing is answered.";
  return `${percent(gate.answered)} of the questions are answered, ${percent(gate.wrong_among_answered)} of these answers are wrong; ` +
    `${percent(gate.right_withheld)} of the right answers are withheld.`;
}
