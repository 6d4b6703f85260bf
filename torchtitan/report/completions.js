// All completions of the run, selected by the server that shows this page (a report has a few samples only).
const PAGE = 20;
const SELECT = ["text", "source", "step_from", "step_to", "reward_from", "reward_to", "tokens_from", "tokens_to", "version", "sort"];
const TOKEN = new URLSearchParams(location.search).get("token") || "";
// offset: of the page in what is selected; picked: where the shown one begins in the file, null for the first of the page.
let offset = 0, picked = null, list = { rows: [], sources: [], more: false }, completion = null, asked = 0;

// Returns null where the server has nothing new.
async function get(path) {
  const answer = await fetch(path, { headers: { Authorization: "Bearer " + TOKEN } });
  if (!answer.ok) throw new Error(await answer.text());
  return answer.status === 204 ? null : answer.json();
}

async function browse() {
  const query = new URLSearchParams({ offset, limit: PAGE }), turn = ++asked;
  for (const id of SELECT) if (byId(id).value) query.set(id, byId(id).value);
  const answer = await get(`completions?${query}`);
  if (turn !== asked) return;  // a later question is on its way
  list = answer;
  const names = ["", ...list.sources], chosen = byId("source").value;
  byId("sourcelabel").hidden = names.length < 2;
  byId("source").replaceChildren(...names.map(name => make("option", name || "all", { value: name })));
  byId("source").value = chosen;
  const end = offset + list.rows.length, of = list.selected === null ? (list.more ? "more" : String(end)) : number(list.selected);
  const reading = list.known < 1 ? ` (reading: ${Math.floor(100 * list.known)} %)` : "";
  byId("place").textContent = (list.rows.length ? `${number(offset + 1)} to ${number(end)} of ${of}; ${number(list.all)} completions in all` : `none of ${number(list.all)}`) + reading;
  byId("previous").disabled = !offset;
  byId("next").disabled = !list.more;
  await showCompletion();
  if (reading) setTimeout(() => attempt(browse), 100);
}

async function showCompletion() {
  const row = list.rows.find(candidate => candidate.begin === picked) || list.rows[0];
  const head = ["step", "reward", "advantage", "tokens", "versions", ...(list.sources.length ? ["source"] : []), "prompt", "completion"];
  // Prompts of one task begin alike, so their ends are shown.
  const cells = { versions: all => all.join(", "), prompt: text => text.slice(-22), completion: text => text.slice(0, 60) };
  fillTable(byId("list"), head, list.rows.map(candidate => head.map(name => cells[name] ? cells[name](candidate[name]) : candidate[name])));
  [...byId("list").rows].slice(1).forEach((line, index) => {
    line.classList.toggle("shown", list.rows[index] === row);
    line.onclick = () => { picked = list.rows[index].begin; attempt(showCompletion); };
  });
  completion = row ? await get(`completion?at=${row.begin}`) : null;
  drawCompletion();
}

function drawCompletion() {
  const row = completion;
  if (!row) { for (const id of ["facts", "prompt", "completion"]) byId(id).replaceChildren(); return; }
  const rewards = Object.entries(row.rewards || {}), extra = Object.entries(row.extra || {}), versions = row.versions || [];
  fillTable(byId("facts"), ["step", "reward", ...rewards.map(([name]) => name), "advantage", "tokens", "end", "sampled by versions", ...extra.map(([name]) => name)],
    [[row.step, row.reward, ...rewards.map(([, value]) => value), row.advantage, row.tokens, row.finish_reason, versions.map(span => `${span.version} (${span.tokens})`).join(", "),
      ...extra.map(([, value]) => typeof value === "object" ? JSON.stringify(value) : value)]]);
  byId("prompt").textContent = row.prompt;
  const texts = row.token_texts || [], versionOf = versions.flatMap(span => Array(span.tokens).fill(span.version));
  const pieces = texts.map((text, index) => tokenPiece(row, text, index, versionOf[index]));
  // The row has only the first tokens of a long completion one by one.
  if (row.segments) byId("completion").replaceChildren(...conversation(row.segments, pieces));
  else byId("completion").replaceChildren(...pieces, make("span", row.completion.slice(texts.join("").length)));
}

function tokenPiece(row, text, index, version) {
  const engine = row.log_probs && row.log_probs[index], trainer = row.trainer_log_probs && row.trainer_log_probs[index];
  const known = typeof engine === "number" && typeof trainer === "number", mode = byId("colour").value;
  const piece = make("span", text, { title: `engine ${number(engine)}, trainer ${number(trainer)}, version ${number(version)}` });
  const tint = (color, strength) => piece.style.backgroundColor = `rgba(${color}, ${Math.min(0.85, strength).toFixed(3)})`;
  if (mode === "version") tint(["36,99,180", "217,98,43", "46,139,87", "141,79,176"][(version || 0) % 4], 0.3);
  else if (mode === "ratio" && known) { const ratio = Math.exp(trainer - engine); tint(ratio < 1 ? "192,57,85" : "36,99,180", Math.abs(ratio - 1)); }
  else if (mode === "engine" && typeof engine === "number") tint("217,98,43", -engine / 6);
  else if (mode === "difference" && known) tint(engine > trainer ? "192,57,85" : "36,99,180", 2 * Math.abs(engine - trainer));
  return piece;
}

// A branch begins where the history was rewritten; its segments are again all that the policy was given.
function conversation(segments, pieces) {
  const parts = [];
  let place = 0, branch = 0;
  for (const segment of segments) {
    if (segment.branch !== branch) parts.push(make("div", `branch ${number(segment.branch + 1)}`, { class: "quiet" }));
    branch = segment.branch;
    if (segment.tokens === undefined) { parts.push(make("span", segment.text, { class: "given", title: "given" })); continue; }
    const sampled = pieces.slice(place, place += segment.tokens);
    parts.push(...sampled);
    if (sampled.length < segment.tokens) parts.push(make("span", segment.text.slice(sampled.map(piece => piece.textContent).join("").length)));
  }
  return parts;
}

async function attempt(action) {
  try { await action(); } catch (error) { showProblem(`no answer: ${error.message}`); }
}

function turnPage(by) {
  offset = Math.max(0, offset + by * PAGE);
  picked = null;
  return attempt(browse);
}

function startBrowser() {
  byId("browser").hidden = false;
  byId("previous").onclick = () => turnPage(-1);
  byId("next").onclick = () => turnPage(1);
  for (const id of SELECT) byId(id).onchange = () => { offset = 0; picked = null; attempt(browse); };
  byId("colour").onchange = drawCompletion;
}
