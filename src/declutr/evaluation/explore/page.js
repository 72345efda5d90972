// Text from the server is inserted by textContent alone, so that it is never parsed as markup.

const element = id => document.getElementById(id);
let asked = 0; // only the answer to the latest question is shown
let weight = null; // of the words, in a hybrid index

/** Make an element with a class and children. */
function make(name, kind, ...children) {
  const made = document.createElement(name);
  if (kind) made.className = kind;
  if (kind === "text") made.dir = "auto"; // each text is laid out in the direction of its script
  made.append(...children);
  return made;
}

function shape(group) {
  const { shape: path, colour } = look(group, map.groups);
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const drawn = document.createElementNS("http://www.w3.org/2000/svg", "path");
  svg.setAttribute("viewBox", "-6 -6 12 12");
  svg.setAttribute("class", "shape");
  svg.setAttribute("aria-hidden", "true");
  drawn.setAttribute("d", path);
  drawn.style.fill = `var(${colour})`;
  svg.append(drawn);
  return svg;
}

/** Describe the origin of a text: its group's shape, its source, its id or else its record. */
function origin(text) {
  return [shape(text.group), make("span", "source", `${text.source} · ${text.id ?? text.record}`)];
}

const map = new TextMap(element("map"), element("tip"), point => {
  for (const item of element("hits").children) item.classList.toggle("lit", point?.row === Number(item.dataset.row));
  if (point) element("tip").replaceChildren(make("p", "head", ...origin(point)), make("p", "text", point.text.slice(0, 120)));
}, point => go({ row: point.row }));

/** Format a number with its noun. */
function count(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

function say(words, wrong = false) {
  element("status").textContent = words;
  element("status").classList.toggle("wrong", wrong);
}

async function get(path, parameters = {}) {
  let response;
  try {
    const headers = { "X-Declutr-Token": new URLSearchParams(location.search).get("token") ?? "" };
    response = await fetch(`${path}?${new URLSearchParams(parameters)}`, { headers });
  } catch {
    throw new Error("No answer. Check that `declutr explore` is still running; its terminal shows what went wrong.");
  }
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

function hitItem(hit, index) {
  const bar = make("div", "fill");
  bar.style.width = `${100 * Math.max(0, Math.min(1, hit.score / (1 + (weight ?? 0))))}%`;
  const button = make("button", "", "Neighbours");
  button.type = "button";
  button.setAttribute("aria-label", `Texts nearest to number ${index + 1}`);
  button.addEventListener("click", () => go({ row: hit.row }));
  const rank = make("span", "rank", `${index + 1}`), score = make("span", "score", hit.score.toFixed(3));
  if (weight !== null) score.title = "cosine + weight × score of words";
  if (weight !== null) score.append(` = ${hit.cosine.toFixed(3)} + ${weight} × ${hit.lexical.toFixed(3)}`);
  const head = make("div", "head", rank, score, ...origin(hit), button);
  const item = make("li", "", head, make("div", "track", bar), make("p", "text", hit.text));
  item.dataset.row = hit.row;
  const lit = () => map.point(map.hidden.has(hit.group) ? null : hit);
  item.addEventListener("pointerenter", lit);
  item.addEventListener("pointerleave", () => map.point(null));
  button.addEventListener("focus", lit);
  button.addEventListener("blur", () => map.point(null));
  return item;
}

function showAnswer({ hits, text = null, query = null }) {
  const leading = element("hits").contains(document.activeElement); // the focused item is about to be replaced
  element("chosen").hidden = !text;
  if (text) element("chosen").replaceChildren(make("p", "head", ...origin(text)), make("blockquote", "", text.text));
  element("hits").replaceChildren(...hits.map(hitItem));
  if (leading) element("chosen").focus();
  map.mark(hits, query ?? text);
  const best = hits.length ? `; the first has ${weight === null ? "cosine" : "score"} ${hits[0].score.toFixed(3)}` : "";
  say(`The ${count(hits.length, "text")} nearest to ${text ? "the chosen one" : "the sentence"}${best}.`);
}

/** Ask the question in the address: #text=... or #row=... */
async function run() {
  const given = new URLSearchParams(location.hash.slice(1)), number = ++asked;
  if (!given.has("text") && !given.has("row")) {
    element("chosen").hidden = true;
    element("hits").replaceChildren();
    map.mark([], null);
    say("Type a sentence, or choose a point.");
    return;
  }
  if (given.has("text")) element("query").value = given.get("text");
  say("Looking …");
  try {
    const text = { text: given.get("text") }, row = { row: given.get("row") };
    const answer = await (given.has("text") ? get("/api/search", text) : get("/api/neighbours", row));
    if (number === asked) showAnswer(answer);
  } catch (error) {
    if (number === asked) say(error.message, true);
  }
}

/** Ask, and store the question in the address, so that Back returns to the previous one. */
function go(parameters) {
  history.pushState(null, "", `#${new URLSearchParams(parameters)}`);
  run();
}

function showLegend(groups, points) {
  groups.forEach((name, group) => {
    const number = points.filter(point => point.group === group).length;
    if (!number) return;
    const box = make("input");
    box.type = "checkbox";
    box.checked = true;
    box.addEventListener("change", () => map.toggle(group, box.checked));
    const told = make("span", "note", number.toLocaleString("en"));
    element("legend").append(make("label", "", box, shape(group), make("span", "name", name), told));
  });
}

async function start() {
  const told = await get("/api/map");
  const { encoder, texts, size, kind, share, groups, points } = told;
  weight = told.weight;
  element("encoder").textContent = encoder;
  document.title = `Explore ${encoder}`;
  const searched = kind === "exact" ? "a search looks at every one" : "a search follows a graph, which may miss some";
  element("facts").textContent = `${count(texts, "text")}, embeddings of ${count(size, "number")}; ${searched}.`
    + (weight === null ? "" : ` Scores are cosine + ${weight} × score of words.`);
  const drawn = points.length < texts ? `${count(points.length, "text")} of ${texts.toLocaleString("en")}, drawn at random`
    : `All ${count(texts, "text")}`;
  element("map-note").textContent = `${drawn}, projected on the plane of largest variance (principal components; it holds `
    + `${(100 * share).toFixed(0)}% of the variance). Points that are near here may be far from each other; the list is exact. `
    + "The star marks the query, the numbers its nearest texts.";
  map.show(points, groups);
  showLegend(groups, points);
  run();
}

element("ask").addEventListener("submit", event => { event.preventDefault(); go({ text: element("query").value }); });
element("query").addEventListener("keydown", event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  element("ask").requestSubmit();
});
addEventListener("popstate", run);
start().catch(error => say(error.message, true));
