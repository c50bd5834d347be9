// Why a gate at a threshold would withhold the answer to a prompt that was scored.

// row: what the service told of the prompt.  detail: its bundle.  Returns "risk", "outside", or null where it is answered.
export function gatedBy(row, threshold, detail) {
  if (asksForAFact(row) && row.risk >= threshold) return "risk";
  return row.outside_training && (tellsOutside(detail) || withheldAsOutside(row)) ? "outside" : null;
}

// A risk says nothing of a prompt that asks for no fact, unless the policy in force judges such prompts, too: then it is flagged.
export const asksForAFact = (row) => row.applies !== false || row.flagged;

// The colour of what the policy in force made of it: a flagged answer that it lets through is no more trusted than a withheld one.
export const toneOf = (row) => row.decision !== "continue" || row.flagged ? "flagged" : asksForAFact(row) ? "passed" : "unjudged";

const withheldAsOutside = (row) => row.decision !== "continue" && !row.flagged;

// As the service has it: a bundle without context probes misses most of what is new, so a gate does not act on it.
const CONTEXT_SIGNALS = ["passage", "stated", "stated_length"];
const tellsOutside = ({ applicability, signals }) => Boolean(applicability) || signals.some((name) => CONTEXT_SIGNALS.includes(name));
