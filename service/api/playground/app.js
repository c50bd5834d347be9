// The page's wiring: connect, ask, show.
import { getJson, key, score, ServiceError, stream } from "./api.js";
import { byId, el, fixed, show, tell } from "./dom.js";
import { toneOf } from "./gating.js";
import { History } from "./history.js";
import { Reading } from "./reading.js";
import { Sample } from "./sample.js";
import { Threshold } from "./threshold.js";

const EXAMPLES = [
  { question: "Which city is the capital of Yemen?" },
  { question: "Which city is the capital of Dominica?" },
  { question: "Which city is the capital of Dominica?", name: "Dominica, with a passage",
    passage: "Roseau is the capital of Dominica. Castries is the capital of Saint Lucia. Lima is the capital of Peru." },
];
const RETRY_S = 2;

const details = new Map(); // bundle -> what GET /v1/bundles/{bundle} told
const history = new History((entry) => fill(entry));
const sample = new Sample((entry) => { fill(entry); ask(); });
const threshold = new Threshold((at) => sample.at(at));
let asking = null; // the AbortController of the request under way
let next = null; // what was asked meanwhile: it is asked as soon as that can be
let fetching; // the question that was sent to fetch a passage, and the id of that answer

async function connect() {
  try {
    const [models, bundles] = await Promise.all([getJson("v1/models"), getJson("v1/bundles")]);
    connected(models.data[0], bundles);
    await chosen();
    askNext();
  } catch (error) {
    if (!(error instanceof ServiceError)) throw error;
    if (error.status === 401) askForKey();
    else {
      byId("state").textContent = error.status === 503 ? `Not ready yet: ${error.message}` : error.message;
      setTimeout(connect, (error.retryAfter ?? RETRY_S) * 1000);
    }
  }
}

function connected(model, { data, policies }) {
  const answer = Math.max(1, Math.min(1024, model.max_model_len));
  byId("tokens").max = answer;
  options("bundle", data.map(({ id }) => [id, id]), data.find((card) => card.default).id);
  options("policy", policies.map((name, place) => [name, place ? name : `${name} (this service's)`]), policies[0]);
  show(byId("compare-row"), data.length > 1);
  others();
  details.clear();
  show(byId("access"), false);
  show(byId("forget"), Boolean(key.get()));
  byId("ask").disabled = false;
  byId("state").textContent = `${model.id}, ${model.dtype}`;
}

function options(id, pairs, chosen) {
  byId(id).replaceChildren(...pairs.map(([value, text]) => el("option", { value, selected: value === chosen }, text)));
  byId(id).disabled = pairs.length < 2;
}

function others() {
  const all = [...byId("bundle").options].map(({ value }) => value), own = byId("bundle").value, kept = byId("compare").value;
  options("compare", [["", "nothing"], ...all.filter((id) => id !== own).map((id) => [id, id])], kept === own ? "" : kept);
}

async function detail(bundle) {
  if (!details.has(bundle)) details.set(bundle, await getJson(`v1/bundles/${encodeURIComponent(bundle)}`));
  return details.get(bundle);
}

async function chosen() {
  const found = await detail(byId("bundle").value);
  threshold.use(found);
  sample.use(found); // its answers come one by one
}

function askForKey() {
  const wrong = Boolean(key.get());
  key.forget();
  show(byId("access"), true);
  show(byId("forget"), false);
  byId("ask").disabled = true;
  forgetNext();
  byId("state").textContent = "Waiting for a key";
  tell(byId("key-problem"), wrong ? "The service does not know this key." : "");
  byId("key").focus();
}

function fill({ question, passage = "" }) {
  byId("question").value = question;
  byId("passage").value = passage;
  byId("passage-details").open = Boolean(passage);
  (byId("ask").disabled ? byId("question") : byId("ask")).focus();
}

// The passage before the question, as the training rows with passages have it.
const promptOf = (question, passage) => (passage ? `${passage}\n\n${question}` : question);

const typed = () => ({ question: byId("question").value.trim(), passage: byId("passage").value.trim() });

async function ask({ question, passage } = typed()) {
  if (!question) return;
  if (asking || byId("ask").disabled) {
    next = { question, passage };
    tell(byId("waiting"), `${asking ? "Asked next, once this answer ends" : "Asked once the service is ready"}: ${question}`);
    return;
  }
  asking = new AbortController();
  busy(true);
  const chosen = [byId("bundle").value, byId("compare").value].filter(Boolean);
  show(byId("empty"), false);
  show(byId("asked"), true);
  byId("asked").replaceChildren(...(passage ? [el("span", {}, passage)] : []), question);
  byId("readings").replaceChildren();
  reveal(byId("result"));
  try {
    const found = await Promise.all(chosen.map(detail));
    const readings = found.map((one, place) => new Reading(byId("readings"), one, { answered: place === 0, title: chosen.length > 1 }));
    const body = { prompt: promptOf(question, passage), include: ["trajectory", "running_mean"], policy: byId("policy").value };
    if (threshold.chosen !== undefined) body.threshold = threshold.chosen;
    if (passage && fetching?.question === question) body.retrieval_of = fetching.id;
    const work = readings.map((reading, place) => (place === 0 ? answered : compared)(reading, { ...body, bundle: reading.detail.id }));
    await Promise.all(work.map((one, place) => one.catch((error) => failed(error, readings[place]))));
    const [{ id, risk, text }] = readings;
    fetching = risk?.decision === "retrieve" ? { question, id } : undefined;
    if (risk) history.add({ question, passage, bundle: chosen[0], risk: risk.risk, tone: toneOf(risk), decision: risk.decision, answer: text });
  } catch (error) {
    failed(error, null);
  } finally {
    asking = null;
    busy(false);
  }
  askNext();
}

function askNext() {
  if (!next || byId("ask").disabled) return;
  const question = next;
  forgetNext();
  ask(question);
}

function forgetNext() {
  next = null;
  tell(byId("waiting"), "");
}

async function answered(reading, body) {
  const tokens = Number(byId("tokens").value);
  const include = reading.detail.reads_answers ? [...body.include, "answer_risk"] : body.include;
  for await (const document of stream({ ...body, include, generate: { max_tokens: tokens } }, asking.signal)) {
    if (document.object === "risk.list") {
      reading.begin(document);
      threshold.mark(reading.risk);
      byId("announce").textContent = `Risk ${fixed(reading.risk.risk)}. ${reading.decision()}. ${reading.risk.message ?? ""}`;
    } else {
      reading.add(document);
      if (document.finish_reason) {
        reading.end(document);
        byId("announce").textContent = `Answer: ${reading.text}`;
      }
    }
  }
}

async function compared(reading, body) {
  reading.begin(await score(body, asking.signal));
  reading.end();
}

// On a small screen the reading is below the form.
function reveal(node) {
  const { top } = node.getBoundingClientRect();
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  if (top < 0 || top > innerHeight * 0.6) node.scrollIntoView({ behavior: calm ? "auto" : "smooth", block: "start" });
}

function failed(error, reading) {
  const stopped = error.name === "AbortError";
  if (!stopped && !(error instanceof ServiceError)) throw error;
  if (error.status === 401) askForKey();
  const again = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
  const message = stopped ? "Stopped." : `${error.message}${again}`;
  if (reading) reading.fail(message);
  else tell(byId("problem"), message);
}

function busy(working) {
  byId("ask").disabled = working || !byId("access").hidden;
  show(byId("stop"), working);
  byId("result").setAttribute("aria-busy", String(working));
  if (working) tell(byId("problem"), "");
}

byId("examples").replaceChildren(...EXAMPLES.map((example) => {
  const button = el("button", { type: "button" }, example.name ?? example.question);
  button.addEventListener("click", () => { fill(example); ask(); });
  return button;
}));
byId("ask-form").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
byId("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("ask-form").requestSubmit();
  }
});
byId("stop").addEventListener("click", () => asking?.abort());
byId("forget").addEventListener("click", () => { key.forget(); askForKey(); });
byId("bundle").addEventListener("change", async () => {
  others();
  try {
    await chosen();
  } catch (error) {
    failed(error, null);
  }
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set(byId("key").value.trim());
  byId("key").value = "";
  connect();
});
connect();
