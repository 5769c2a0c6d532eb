// One colour for each drafter, wherever the page shows it.

const COLORS = 4;
const known = new Map();

/** The CSS class with a drafter's colour. If there are too few colours, drafters share them. */
export function author(drafter) {
  if (!known.has(drafter)) {
    known.set(drafter, `by-${known.size % COLORS + 1}`);
    explain(drafter);
  }
  return known.get(drafter);
}

function explain(drafter) {
  const item = document.createElement("li");
  const sample = document.createElement("span");
  [sample.className, sample.textContent] = [`token ${known.get(drafter)}`, drafter];
  item.append("guessed by ", sample);
  document.querySelector(".legend").lastElementChild.before(item);
}
