// What was asked in this tab: kept by the browser until the tab is closed, and nowhere else.
import { bar, byId, el, fixed, show } from "./dom.js";

const PLACE = "hallutracer.history";
const MOST = 30;

export class History {
  constructor(onChosen) {
    this.onChosen = onChosen;
    this.entries = read();
    byId("clear").addEventListener("click", () => { this.entries = []; this.#write(); byId("question").focus(); });
    this.#show();
  }

  // entry: {question, passage, bundle, risk, tone, decision, answer}
  add(entry) {
    this.entries = [entry, ...this.entries].slice(0, MOST);
    this.#write();
  }

  #write() {
    try {
      sessionStorage.setItem(PLACE, JSON.stringify(this.entries));
    } catch { /* full: the list is still on the page */ }
    this.#show();
  }

  #show() {
    show(byId("past-empty"), this.entries.length === 0);
    show(byId("clear"), this.entries.length > 0);
    byId("history").replaceChildren(...this.entries.map((entry) => {
      const said = entry.decision === "continue" ? entry.answer : `withheld (${entry.decision})`;
      const button = el("button", { type: "button" },
        el("span", {}, entry.question), el("span", { class: "risk-line" }, `risk ${fixed(entry.risk)}`, bar(entry.risk, entry.tone ?? "unjudged")),
        el("span", { class: "answer-line" }, [entry.bundle, entry.passage && "with a passage", said].filter(Boolean).join(" · ")));
      button.addEventListener("click", () => this.onChosen(entry));
      return el("li", {}, button);
    }));
  }
}

function read() {
  try {
    const kept = JSON.parse(sessionStorage.getItem(PLACE) ?? "[]");
    return kept.filter((entry) => typeof entry.question === "string" && typeof entry.risk === "number").slice(0, MOST);
  } catch {
    return [];
  }
}
