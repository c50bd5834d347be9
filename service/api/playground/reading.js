// One bundle's reading of a prompt: the risk, the decision, the answer or its withholding, the trajectory.
import { scale } from "./axes.js";
import { drawn, el, fixed, percent, svg } from "./dom.js";
import { gatedBy, toneOf } from "./gating.js";
import { trajectoryPlot } from "./trajectory.js";

const NO_FACT = "Asks for no fact: the risk does not apply";
const WITHHELD = { abstain: "withheld", block: "blocked", retrieve: "sent to fetch a passage", fallback: "left to another server" };

export class Reading {
  #text = "";
  #unread = []; // pieces whose tokens are not read yet
  #read = { tokens: 0, sum: 0 };

  // answered: whether an answer was asked for, or the risk alone
  constructor(host, detail, { answered, title }) {
    this.detail = detail;
    this.answered = answered;
    this.left = el("div", {}, el("p", { class: "note" }, "Reading the prompt"));
    this.right = el("div", {});
    this.node = el("article", { class: "reading", "data-bundle": detail.id });
    if (title) this.node.append(el("h3", {}, detail.id));
    this.node.append(this.left, this.right);
    host.append(this.node);
  }

  // document: what POST /score answers, or a stream's first event
  begin(document) {
    const risk = document.data[0];
    this.risk = risk;
    this.policy = document.policy;
    this.id = document.id;
    this.answer = el("div", { class: `answer ${toneOf(risk)}`, "aria-busy": "true" });
    this.count = el("p", { class: "facts" });
    const number = el("p", { class: "risk", "data-risk": risk.risk }, el("small", {}, "risk"), fixed(risk.risk));
    const decision = el("p", { class: `decision ${risk.decision} ${toneOf(risk)}` }, this.decision());
    this.left.replaceChildren(el("div", { class: "figures" }, number, decision), riskBar(risk), ...this.#facts(document));
    if (risk.decision === "continue") {
      if (risk.message) this.left.append(el("p", { class: "facts warn" }, risk.message));
      if (this.answered) this.left.append(this.answer, this.count);
    } else {
      this.answer.removeAttribute("aria-busy");
      this.answer.textContent = risk.message ?? "No answer.";
      this.count.textContent = risk.answer_flagged
        ? `The answer was read and not given: its own tokens put its risk at ${fixed(risk.answer_risk)}.` : "No answer token was decoded.";
      this.left.append(this.answer, this.count);
    }
    if (risk.trajectory) this.#draw(risk);
  }

  decision() {
    const { decision, flagged, applies, outside_training: outside } = this.risk;
    if (applies === false && decision === "continue" && !flagged) return NO_FACT;
    const be = this.answered ? (done) => done[0].toUpperCase() + done.slice(1) : (done) => `Would be ${done}`;
    const does = this.risk.message ? "warns" : "only watches";
    if (decision === "continue") return flagged ? `${be("answered")} although flagged: the policy ${this.policy} ${does}` : be("answered");
    if (this.risk.answer_flagged) return `${be(WITHHELD[decision] ?? "withheld")} after it was read`;
    return `${be(WITHHELD[decision] ?? "withheld")} before the first token${outside && !flagged ? ": outside training" : ""}`;
  }

  // chunk: the next piece, and the risk of the answer's tokens before it, where it is read
  add(chunk) {
    this.#shade(chunk);
    const piece = this.text ? chunk.delta.text : chunk.delta.text.trimStart();
    this.#text += chunk.delta.text;
    if (!piece) return;
    this.#unread.push(el("span", {}, piece));
    this.answer.append(this.#unread.at(-1));
  }

  // Risks so far are of means, so their log odds times the tokens are sums: a difference is of the tokens between.
  #shade({ answer_risk: risk, answer_tokens: tokens }) {
    if (risk === undefined || !(tokens > this.#read.tokens)) return;
    const sum = tokens * Math.log(risk / (1 - risk));
    const own = 1 / (1 + Math.exp((this.#read.sum - sum) / (tokens - this.#read.tokens)));
    this.#read = { tokens, sum };
    if (!Number.isFinite(own)) return;
    for (const node of this.#unread.splice(0)) {
      node.className = "token";
      node.title = `risk ${fixed(own)}`;
      node.style.setProperty("--risk", own);
    }
  }

  get text() {
    return this.#text.trim();
  }

  end(chunk) {
    this.answer?.removeAttribute("aria-busy");
    if (!chunk?.usage) return;
    const tokens = chunk.usage.completion_tokens;
    const cut = { length: ", cut off at the limit", content_filter: `, ended by the policy ${this.policy}` }[chunk.finish_reason] ?? "";
    this.count.textContent = `${tokens} answer token${tokens === 1 ? "" : "s"} after ${chunk.usage.prompt_tokens} of the prompt${cut}.`;
    if (!this.text) this.answer.textContent = "(an empty answer)";
    if (chunk.answer_risk !== undefined) {
      this.left.append(el("p", { class: chunk.answer_flagged ? "facts warn" : "facts", "data-answer-risk": chunk.answer_risk },
        `Read again: the answer's own tokens put its risk at ${fixed(chunk.answer_risk)}${chunk.answer_flagged ? ", at or above the bundle's threshold for answers" : ""}. Each token is shaded by its own.`));
    }
  }

  fail(message) {
    this.answer?.removeAttribute("aria-busy");
    const told = el("p", { class: "problem", role: "alert" }, message);
    if (this.risk) this.left.append(told);
    else this.left.replaceChildren(told);
  }

  #facts(document) {
    const { applies, asks, interval, outside_training: outside, distance, threshold } = this.risk;
    const lines = [];
    const tenth = this.detail.coverage.tenths.findLast(({ low }) => this.risk.risk >= low) ?? this.detail.coverage.tenths[0];
    if (tenth && applies !== false) {
      lines.push(el("p", { class: "facts tenth" }, `Of training questions at risks like this one (${fixed(tenth.low)} to ${fixed(tenth.high)}) ` +
        `the model answered ${percent(tenth.right)} right. A gate at ${fixed(threshold)} ${gatedBy(this.risk, threshold, this.detail) ? "withholds" : "answers"} it.`));
    }
    lines.push(el("p", { class: "facts" }, `Threshold ${fixed(threshold, 3)}, policy ${document.policy}. ` + (interval
      ? `Trained on other rows, the bundle would put the risk between ${fixed(interval[0])} and ${fixed(interval[1])} (95 %).`
      : "This bundle records no interval for its risks.")));
    if (applies === false) lines.push(el("p", { class: "facts" }, `${NO_FACT}. The probability that it asks for one is ${fixed(asks)}.`));
    if (outside) lines.push(el("p", { class: "facts warn" }, `Outside training: unlike all its prompts (distance ${fixed(distance, 1)}, its cutoff is 1). The risk is a guess here.`));
    if (document.guarantee) {
      const { alpha, delta, holds, void: reasons } = document.guarantee;
      lines.push(el("p", { class: "facts" }, holds
        ? `Promise: of the question groups that are answered, counted equally, at most ${fixed(alpha * 100, 1)} % are answered wrong, with confidence ${fixed((1 - delta) * 100, 1)} %.`
        : `The bundle's promise does not hold for this request: ${reasons.join("; ")}.`));
    }
    if (document.retrieval?.known) {
      const { risk_before: before, drop } = document.retrieval;
      const moved = drop >= 0 ? `${fixed(drop)} less` : `${fixed(-drop)} more`;
      lines.push(el("p", { class: "facts" }, `Without the passage the risk was ${fixed(before)}: ${moved} now.`));
    }
    return lines;
  }

  #draw(risk) {
    const plot = el("div", { class: "plot" });
    const rows = risk.trajectory.map((value, layer) => el("tr", {}, el("th", { scope: "row" }, String(layer)),
      ...[value, risk.running_mean[layer], this.detail.trajectories.factual[layer], this.detail.trajectories.hallucinated[layer]]
        .map((number) => el("td", {}, fixed(number, 3)))));
    const head = ["layer", "this prompt", "running mean", "factual rows", "hallucinated rows"];
    const inside = el("details", { class: "layers", open: layersOpen }, el("summary", {}, "Details: the truth logit of each layer"),
      el("figure", {}, plot, el("figcaption", { class: "legend" },
        key("own", "this prompt"), key("running", "its running mean, whose last value becomes the risk"),
        key("factual", "factual training rows, ± 1 std"), key("hallucinated", "hallucinated ones"))),
      el("details", {}, el("summary", {}, "The numbers"),
        el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Truth logits by layer, ${this.detail.id}` }, el("table", {},
          el("thead", {}, el("tr", {}, ...head.map((name) => el("th", { scope: "col" }, name)))), el("tbody", {}, ...rows)))));
    inside.addEventListener("toggle", () => { layersOpen = inside.open; });
    this.right.append(inside);
    trajectoryPlot(plot, this.detail.trajectories, risk);
  }
}

let layersOpen = false; // as it was left: the next reading opens so

const key = (name, text) => el("span", {}, el("i", { class: `swatch ${name}` }), text);

// 0 to 1: the risk, its interval where there is one, the threshold.
function riskBar(risk) {
  const host = el("div", { class: "plot" });
  drawn(host, (width) => {
    const x = scale(0, 1, 6, width - 6), at = x(risk.threshold);
    const interval = risk.interval ? `, interval ${fixed(risk.interval[0])} to ${fixed(risk.interval[1])}` : "";
    const side = risk.threshold > 0.5 ? "end" : "start";
    const bar = svg("svg", { viewBox: `0 0 ${width} 46`, height: 46, role: "img",
      "aria-label": `Risk ${fixed(risk.risk)}${interval}, threshold ${fixed(risk.threshold, 3)}` });
    bar.append(svg("rect", { class: "track", x: x(0), y: 20, width: x(1) - x(0), height: 6, rx: 3 }));
    if (risk.interval) {
      const [low, high] = risk.interval.map(x);
      bar.append(svg("rect", { class: "interval", x: low, y: 17, width: Math.max(2, high - low), height: 12, rx: 3 }));
    }
    bar.append(
      svg("line", { class: "cut", x1: at, x2: at, y1: 12, y2: 33 }),
      svg("text", { x: at + (side === "end" ? 4 : -4), y: 10, "text-anchor": side }, "threshold"),
      svg("circle", { class: "here", cx: x(risk.risk), cy: 23, r: 7 }),
      svg("text", { x: 0, y: 45 }, "0"), svg("text", { x: width, y: 45, "text-anchor": "end" }, "1"));
    return bar;
  });
  return host;
}
