// Held-out questions that the bundle carries, answered as the page opens and sorted by risk, with a line that a gate would draw.
import { getJson } from "./api.js";
import { byId, el, fixed, show, tell } from "./dom.js";

const SHOWN = 24, TOGETHER = 6;  // as many connections as a browser opens
const MARKS = { right: "✓ right", wrong: "✗ wrong", abstained: "– no answer", withheld: "– not judged" };

export class Sample {
  #run = 0; // answers of an earlier bundle that still come are not shown
  #rows = []; // as GET /v1/bundles/{bundle}/sample/{number} tells, lowest risks first
  #detail = null;
  #moved = false; // the slider's steps are coarser than a bundle's threshold

  // onChosen: called with the question that was clicked on
  constructor(onChosen) {
    this.onChosen = onChosen;
    this.slider = byId("sample-threshold");
    this.slider.addEventListener("input", () => { this.#moved = true; this.#draw(); });
  }

  async use(detail) {
    const run = ++this.#run, questions = (detail.sample?.questions ?? []).slice(0, SHOWN);
    this.#detail = detail;
    this.#rows = [];
    this.#moved = false;
    show(byId("sample"), questions.length > 0);
    tell(byId("sample-problem"), "");
    if (!questions.length) return;
    this.slider.value = detail.threshold;
    byId("sample-note").textContent = `${questions.length} questions that this bundle was not fitted on, drawn before any risk was known: ` +
      "the model answers them now, under this service's policy, and they stand by the risk that was read before each answer. Misses are shown like hits.";
    this.#draw();
    const waiting = questions.map((_, number) => number);
    try {
      await Promise.all(Array.from({ length: TOGETHER }, async () => {
        while (waiting.length && run === this.#run) {
          const row = await getJson(`v1/bundles/${encodeURIComponent(detail.id)}/sample/${waiting.shift()}`);
          if (run !== this.#run) return;
          this.#rows = [...this.#rows, row].sort((a, b) => a.risk - b.risk);
          this.#draw();
        }
      }));
    } catch (error) {
      if (run === this.#run) tell(byId("sample-problem"), `Not all questions were answered: ${error.message}`);
      waiting.length = 0;
    }
  }

  #draw() {
    const at = this.#moved ? Number(this.slider.value) : this.#detail.threshold, total = Math.min(SHOWN, this.#detail.sample.questions.length);
    const passed = this.#rows.filter(({ risk }) => risk < at), stopped = this.#rows.filter(({ risk }) => risk >= at);
    const count = (rows, verdict) => rows.filter((row) => row.verdict === verdict).length;
    byId("sample-value").textContent = fixed(at);
    const unknown = count(this.#rows, null); // the policy in force withholds them, whatever the slider says
    const note = unknown ? ` The service's policy withholds ${unknown} of the answers: whether they would be right is not known.` : "";
    const coming = this.#rows.length < total ? `${this.#rows.length} of ${total} answered so far. ` : "";
    byId("sample-text").textContent = `${coming}A gate at ${fixed(at)} answers ${passed.length}, ${count(passed, "wrong")} of them wrong, ` +
      `and withholds ${stopped.length}, ${count(stopped, "right")} of them right.${note}`;
    const line = el("tr", { class: "line-row" }, el("td", {}, fixed(at)), el("td", { colspan: 2 }, "withheld from here on"));
    const held = document.activeElement?.closest("#sample-rows tr")?.dataset.number; // a row that is drawn anew loses the focus
    byId("sample-rows").replaceChildren(...passed.map((row) => this.#row(row)), line, ...stopped.map((row) => this.#row(row, true)));
    if (held) byId("sample-rows").querySelector(`tr[data-number="${held}"] button`)?.focus({ preventScroll: true });
  }

  #row({ number, risk, prompt, answer, verdict, accepted }, stopped = false) {
    const button = el("button", { type: "button" }, prompt);
    button.addEventListener("click", () => this.onChosen({ question: prompt }));
    const right = verdict === "right" ? [] : [el("span", { class: "accepted" }, accepted[0])];
    const mark = verdict ?? "withheld";
    return el("tr", { class: stopped ? "stopped" : false, "data-number": String(number), "data-verdict": mark },
      el("td", {}, fixed(risk)), el("td", {}, button, el("span", { class: "said" }, answer ?? "(withheld)")),
      el("td", { class: mark }, MARKS[mark], ...right));
  }
}
