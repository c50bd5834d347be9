// Whether the bundle pays for its model, and held-out questions that it carries, answered as the page opens and sorted by risk, with
// the line that a gate would draw.
import { getJson } from "./api.js";
import { bar, byId, el, fixed, show, tell } from "./dom.js";
import { asksForAFact, gatedBy } from "./gating.js";

const SHOWN = 24, TOGETHER = 6;  // as many connections as a browser opens
const MARKS = { right: "✓ right", wrong: "✗ wrong", abstained: "– no answer", withheld: "– not judged" };
const ENDS = /[.!?…:;)\]}"'”’»。！？]$/u; // of a text that was not cut off at the limit

export class Sample {
  #run = 0; // answers of an earlier bundle that still come are not shown
  #rows = []; // as GET /v1/bundles/{bundle}/sample/{number} tells, lowest risks first
  #detail = null;
  #threshold = null; // the slider's

  // onChosen: called with the question that was clicked on
  constructor(onChosen) {
    this.onChosen = onChosen;
  }

  async use(detail) {
    const run = ++this.#run, questions = (detail.sample?.questions ?? []).slice(0, SHOWN);
    this.#detail = detail;
    this.#rows = [];
    byId("recommendation").textContent = detail.recommendation ?? "";
    show(byId("recommendation"), Boolean(detail.recommendation)); // bundles of before have none
    show(byId("sample"), questions.length > 0);
    show(byId("sample-text"), questions.length > 0);
    tell(byId("sample-problem"), "");
    if (!questions.length) return;
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

  // The slider stands at another threshold.
  at(threshold) {
    this.#threshold = threshold;
    if (this.#detail?.sample) this.#draw();
  }

  #draw() {
    const at = this.#threshold, total = Math.min(SHOWN, this.#detail.sample.questions.length);
    byId("sample-text").textContent = headline(this.#rows, total, at, this.#detail);
    const below = this.#rows.filter(({ risk }) => risk < at), above = this.#rows.filter(({ risk }) => risk >= at);
    const line = el("tr", { class: "line-row" }, el("td", {}, fixed(at)), el("td", { colspan: 2 }, "withheld from here on"));
    const held = document.activeElement?.closest("#sample-rows tr")?.dataset.number; // a row that is drawn anew loses the focus
    byId("sample-rows").replaceChildren(...below.map((row) => this.#row(row)), line, ...above.map((row) => this.#row(row)));
    if (held) byId("sample-rows").querySelector(`tr[data-number="${held}"] button`)?.focus({ preventScroll: true });
  }

  #row(row) {
    const { number, risk, prompt, answer, verdict, accepted } = row, by = gatedBy(row, this.#threshold, this.#detail);
    const button = el("button", { type: "button" }, prompt);
    button.addEventListener("click", () => this.onChosen({ question: prompt }));
    const right = verdict === "right" ? [] : [el("span", { class: "accepted" }, accepted[0])];
    const mark = verdict ?? "withheld";
    const why = by === "outside" ? "outside training: withheld" : !by && risk >= this.#threshold ? "asks for no fact: let through" : null;
    return el("tr", { class: by ? "stopped" : false, "data-number": String(number), "data-verdict": mark },
      el("td", {}, fixed(risk), bar(risk, by ? "flagged" : asksForAFact(row) ? "passed" : "unjudged")),
      el("td", {}, button, el("span", { class: "said" }, whole(answer) ?? "(withheld)"), ...(why ? [el("span", { class: "why" }, why)] : [])),
      el("td", { class: mark }, MARKS[mark], ...right));
  }
}

// An answer that the limit of tokens ended mid-sentence says so.
const whole = (answer) => (answer && !ENDS.test(answer) ? `${answer} …` : answer);

const none = (number) => (number ? `${number}` : "none");

// What a gate at the threshold changes in these rows.
export function headline(rows, total, at, detail) {
  const count = (some, verdict) => some.filter((row) => row.verdict === verdict).length;
  const withheld = rows.filter((row) => gatedBy(row, at, detail)), passed = rows.filter((row) => !withheld.includes(row));
  const unknown = count(rows, null); // the policy in force withholds them, whatever the slider says
  const coming = rows.length < total ? `${rows.length || "None"} of ${total} answered so far. ` : "";
  if (!rows.length) return coming;
  const wrong = count(rows, "wrong"), judged = rows.length - unknown;
  let ungated = `Without a gate ${unknown ? "at least " : ""}${none(wrong)} of ${rows.length} would be wrong. `;
  if (unknown && !wrong) ungated = judged ? `Of the ${judged} that are answered none is wrong. ` : "";
  const kinds = [["wrong", "wrong"], ["right", "right"], ["abstained", "no answer"], [null, "not judged"]]
    .map(([verdict, name]) => [count(withheld, verdict), name]).filter(([number], place) => number || (place < 2 && !unknown));
  const which = withheld.length ? `: ${kinds.map(([number, name]) => `${number} ${name}`).join(", ")}` : "";
  const note = unknown ? ` The service's policy withholds ${unknown} of the answers: whether they would be right is not known.` : "";
  const wrongPassed = count(passed, "wrong"), judgedPassed = passed.length - count(passed, null);
  const whichPassed = judgedPassed < passed.length ? `${judgedPassed} judged ones` : `${passed.length}`;
  let left = passed.length ? "none that it lets through is judged" : "it lets none through";
  if (judgedPassed) left = `of the ${whichPassed} that it lets through ${none(wrongPassed)} ${wrongPassed > 1 ? "are" : "is"} wrong`;
  return `${coming}${ungated}A gate at ${fixed(at)} withholds ${none(withheld.length)}${which}; ${left}.${note}`;
}
