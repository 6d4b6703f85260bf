// The page: draws the data that it holds, or asks the server for them again and again.
const POLL_MS = 2000;
// A run without a step for so many times its pace, and for so long, may have died.
const SILENT_STEPS = 20, SILENT_S = 120;
let digest = "";

function showProblem(text) {
  byId("problem").textContent = text;
  byId("problem").hidden = !text;
}

function draw(data) {
  document.title = data.name;
  byId("name").textContent = data.name;
  drawOutcome(data);
  drawCards(data);
  const plots = folded => data.plots.filter(plot => plot.folded === folded).map(drawPlot).filter(box => box);
  const first = plots(false), more = plots(true);
  byId("plots").replaceChildren(...first);
  byId("more_plots").replaceChildren(...more);
  byId("curves").hidden = !first.length;
  byId("more").hidden = !more.length;
  byId("nothing").hidden = data.plots.length > 0;
  byId("nothing").textContent = data.outcome.kind === "open" ? "No step has been logged yet." : "No step was trained.";
  drawSamples(data);
  drawTable("actors", data.actors.head, data.actors.lines);
  drawTable("versions", data.versions.head, data.versions.lines);
  drawTable("evaluations", data.evaluations.head, data.evaluations.lines);
  byId("evaluations_note").textContent = data.evaluations.left_out > 0 ? `The first one, and the last ones; ${data.evaluations.left_out} between them are left out.` : "";
  drawTable("metrics", ["metric", "first", "last", "mean", "lowest", "highest"], data.metrics);
  drawTable("events", ["time", "event", "details"], data.events.map(([time, ...rest]) => [moment(time), ...rest]).reverse());
  byId("timeline").hidden = !data.timeline;
  if (data.timeline) {
    byId("timeline_plot").replaceChildren(drawTimeline(data.timeline));
    const lanes = data.timeline.left_out ? ` ${data.timeline.left_out} more processes are not drawn.` : "";
    byId("timeline_note").textContent = `Trainer and actors on one clock.${lanes} More of the run is in trace.json, for https://ui.perfetto.dev or chrome://tracing.`;
  }
  byId("configuration").hidden = !data.configuration;
  byId("configuration_text").textContent = data.configuration;
  byId("made").textContent = [data.outcome.made, data.written && `written ${moment(data.written)}`].filter(text => text).join("; ");
}

function drawTable(name, head, lines) {
  byId(name).hidden = !lines.length;
  fillTable(byId(`${name}_table`), head, lines);
}

function silence({ progress, written }) {
  const now = written || Date.now() / 1000, pace = progress.seconds_per_step || 0;
  const silent = progress.time ? now - progress.time : 0;
  return silent > Math.max(SILENT_S, SILENT_STEPS * pace) ? silent : 0;
}

function drawOutcome(data) {
  const box = byId("outcome"), silent = silence(data);
  let { kind, text } = data.outcome;
  if (kind === "open" && silent) text = `No step for ${duration(silent)}, and no end is recorded: the run waits, or it was killed.`;
  else if (kind === "open" && data.written) text = "No end is recorded: the run went on when this page was written, or it was killed.";
  box.textContent = text;
  box.className = `outcome ${kind}`;
  box.hidden = !text;
}

function card(value, about, middle = []) {
  return make("div", null, { class: "card" }, [make("b", value), ...middle, ...about.filter(text => text).map(text => make("span", text))]);
}

function drawCards(data) {
  const { progress, evaluation, reward } = data, cards = [];
  if (progress.steps) {
    const bar = make("div");
    bar.style.width = `${Math.min(100, 100 * progress.step / progress.steps)}%`;
    const goesOn = data.outcome.kind === "open" && !silence(data), pace = progress.seconds_per_step;
    const left = goesOn && pace !== null && progress.step < progress.steps ? `about ${duration((progress.steps - progress.step) * pace)} left` : "";
    cards.push(card(`step ${number(progress.step)} of ${number(progress.steps)}`, [[left, pace !== null && `${number(pace)} s per step`].filter(text => text).join(", ")],
      [make("div", null, { class: "progress" }, [bar])]));
  }
  if (evaluation) {
    const interval = typeof evaluation.low === "number" ? `95 % interval ${number(evaluation.low)} to ${number(evaluation.high)}` : "";
    const greedy = typeof evaluation.greedy === "number" ? `greedy ${number(evaluation.greedy)}` : "";
    cards.push(card(`pass@1 ${evaluation.first === null ? "" : `${number(evaluation.first)} → `}${number(evaluation.last)}`,
      ["on held-out prompts" + (evaluation.first === null ? `, after step ${number(evaluation.step)}` : `, first evaluation → after step ${number(evaluation.step)}`), [interval, greedy].filter(text => text).join("; ")]));
  }
  if (reward) cards.push(card(`reward ${number(reward.first)} → ${number(reward.last)}`, [`mean of the first ${reward.steps === 1 ? "step" : `${reward.steps} steps`} → of the last`]));
  byId("cards").replaceChildren(...cards);
}

function drawSamples(data) {
  const steps = data.samples, names = ["first", "middle", "last"];
  byId("samples").hidden = !steps.length;
  const turns = steps.some(part => part.rows.some(row => row.segments));
  const reading = [data.reading, turns && "Grey is what the policy was given, by an environment or a tool."].filter(text => text).join(" ");
  byId("reading").textContent = reading;
  byId("reading").hidden = !reading;
  const titles = steps.length === 3 ? names : steps.length === 2 ? ["first", "last"] : [""];
  byId("steps").replaceChildren(...steps.map((part, index) => make("div", null, { class: "step" },
    [make("h3", `step ${number(part.step)}${titles[index] && ` (${titles[index]})`}`), ...part.rows.map(sampleBox)])));
  const size = data.completion_bytes > 1e6 ? `${Math.round(data.completion_bytes / 1e6)} MB` : `${Math.ceil(data.completion_bytes / 1e3)} kB`;
  byId("samples_note").textContent = `The first completions of these steps, of different groups. completions.jsonl (${size}) has all that were written` +
    (data.written ? "; python -m torchtitan.report --serve RUN_DIR searches them." : ".");
}

function sampleBox(row) {
  const lines = [["prompt", make("dd", row.prompt, { class: "text" })]];
  const completion = make("dd", row.segments ? null : row.completion, { class: "text" });
  if (row.segments) completion.append(...row.segments.map(part => make("span", part.text, part.sampled ? {} : { class: "given" })));
  lines.push(["completion", completion]);
  for (const [name, value] of row.reference) lines.push([name === "answer" ? "reference" : name, make("dd", value, { class: "text" })]);
  const single = row.rewards.length > 1 ? ` (${row.rewards.map(([name, value]) => `${name} ${number(value)}`).join(", ")})` : "";
  const reward = make("dd", null, {}, [make("b", number(row.reward)), single]);
  lines.push(["reward", reward]);
  if (row.finish_reason === "length") lines.push(["end", make("dd", "cut off at the greatest length")]);
  return make("div", null, { class: "sample" }, [make("dl", null, {}, lines.flatMap(([name, value]) => [make("dt", name), value]))]);
}

async function poll() {
  try {
    const answer = await get(`data?known=${digest}`);
    if (answer) { digest = answer.digest; draw(answer.data); }
    // The first page follows the run; where a reader has turned pages or picked, what is shown stays.
    if (!offset && picked === null) await browse();
    showProblem("");
  } catch (error) {
    showProblem(`no connection: ${error.message}`);
  }
  setTimeout(poll, POLL_MS);
}

const held = JSON.parse(byId("data").textContent);
if (held) draw(held);
else { startBrowser(); poll(); }
