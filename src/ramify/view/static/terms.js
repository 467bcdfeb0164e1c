// Words of the domain with an explanation, which the browser shows for a pointer on the word.

import { h } from "./dom.js";

const EXPLANATIONS = {
  committed: "the step of the last complete checkpoint; after a crash, training continues from it",
  incarnation: "the number of a start of the trainer; a restarted trainer has a new one",
  zero_advantage: "the filter of rollouts whose advantages are all zero: the attempts of the group got the same reward",
};

// The word as an element with its explanation; the word itself if it has none.
export function term(word) {
  return Object.hasOwn(EXPLANATIONS, word) ? h("abbr", { title: EXPLANATIONS[word] }, word) : word;
}

// Where a group is in the ledger, such as "trained in step 3".
export function describeGroupState({ state, step, reason, detail }) {
  if (state === "dropped") return [`dropped: ${reason}`, detail ? [" (", term(detail), ")"] : null];
  return step === null ? state : `${state} in step ${step}`;
}
