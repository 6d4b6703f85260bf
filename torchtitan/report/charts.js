"use strict";
// Elements, tables and charts. All text is set as text, so that nothing that a model wrote becomes markup.
const COLORS = ["#2463b4", "#d9622b", "#2e8b57", "#8d4fb0", "#b8860b", "#c03955", "#0f8a8a", "#6b7280", "#a0522d", "#111827"];
const STACK_COLORS = ["#2463b4", "#e0b13a", "#8d4fb0", "#c03955", "#c3c9d1"];
const SVG_TAGS = ["svg", "g", "polyline", "path", "line", "text", "circle", "rect", "title"];
const WIDTH = 440, HEIGHT = 240, LEFT = 54, RIGHT = 12, TOP = 20, BOTTOM = 34;
const byId = id => document.getElementById(id);

function make(tag, text, attributes = {}, children = []) {
  const element = SVG_TAGS.includes(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  if (text !== null && text !== undefined) element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function number(value) {
  if (typeof value !== "number") return value === null || value === undefined || value === "" ? "–" : String(value);
  if (Number.isInteger(value) || Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return Math.abs(value) < 1e-4 ? value.toExponential(1) : String(+value.toPrecision(3));
}

// A point in time as events and file names have it: 2026-11-29 23:31:25, in the reader's zone.
function moment(seconds) {
  return new Date(1000 * seconds).toLocaleString("sv");
}

function duration(seconds) {
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor(whole % 3600 / 60)} min`;
}

function fillTable(element, head, lines) {
  const cell = (tag, value) => {
    const made = make(tag, number(value));
    if (typeof value === "number") made.className = "number";
    else if (tag === "td" && String(value).length > 60) made.className = "long";
    return made;
  };
  const row = (tag, cells) => make("tr", null, {}, cells.map(value => cell(tag, value)));
  const first = row("th", head);
  if (lines.length) lines[0].forEach((value, index) => first.children[index].classList.toggle("number", typeof value === "number"));
  element.replaceChildren(first, ...lines.map(cells => row("td", cells)));
}

// Values at which an axis has ticks, about `count` of them, at round numbers.
function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(factor => factor * power).find(size => size >= rough);
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-9; value += step) found.push(+value.toPrecision(12));
  return found;
}

function logTicks(low, high) {
  const found = [], factors = high - low > 2 ? [1] : [1, 2, 5];
  for (let power = Math.floor(low); power <= high; power++) {
    for (const factor of factors) {
      const place = power + Math.log10(factor);
      if (place >= low && place <= high) found.push(place);
    }
  }
  if (!found.length) return ticks(low, high, 2);
  return found.length > 6 ? found.filter((_, index) => index % Math.ceil(found.length / 6) === 0) : found;
}

// Means over neighbouring points [x, value, …]; null where there are too few for a smoother line.
function smoothed(points) {
  const window = Math.floor(points.length / 40);
  if (window < 2) return null;
  return points.map((point, index) => {
    const near = points.slice(Math.max(0, index - window), index + window + 1);
    return point.map((value, place) => place ? near.reduce((sum, other) => sum + other[place], 0) / near.length : value);
  });
}

// One line per label, each a list of [step, value]: what the legend and the pointer show.
function linesOf(plot) {
  if (plot.kind === "lines") return plot.points;
  return plot.labels.map((_, index) => plot.points[0].map(point => [point[0], point[index + 1]]));
}

function extentOf(plot, lines) {
  const values = [];
  if (plot.kind === "stack") {
    // The first step may hold start-up time, which must not flatten the rest.
    const sums = plot.points[0].map(point => point.slice(1).reduce((a, b) => a + b, 0)).sort((a, b) => a - b);
    values.push(0, 1.15 * sums[Math.min(sums.length - 1, Math.floor(0.98 * sums.length))]);
  } else if (plot.kind === "band") values.push(...plot.points[0].flatMap(point => point.slice(1)));
  else for (const line of lines) values.push(...line.map(point => point[1]));
  let low = plot.low ?? values.reduce((a, b) => Math.min(a, b)), high = plot.high ?? values.reduce((a, b) => Math.max(a, b));
  if (low >= high) { low -= Math.abs(low) / 10 || 0.5; high += Math.abs(high) / 10 || 0.5; if (plot.low !== null) low = plot.low; }
  else if (plot.kind !== "stack") { const space = 0.04 * (high - low); if (plot.low === null) low -= space; if (plot.high === null) high += space; }
  return [low, high];
}

function drawPlot(given) {
  const plot = { ...given };
  if (plot.log) plot.points = plot.points.map(line => line.filter(point => point[1] > 0).map(([x, y]) => [x, Math.log10(y)]));
  if (plot.kind === "stack") plot.points = [smoothed(plot.points[0]) || plot.points[0]];
  const lines = linesOf(plot), steps = lines.flatMap(line => line.map(point => point[0]));
  if (!steps.length) return null;
  let first = steps.reduce((a, b) => Math.min(a, b)), last = steps.reduce((a, b) => Math.max(a, b));
  if (first === last) { first -= 0.5; last += 0.5; }
  const [low, high] = extentOf(plot, lines), width = WIDTH - LEFT - RIGHT, height = HEIGHT - TOP - BOTTOM;
  const x = step => (step - first) / (last - first) * width, y = value => height - (value - low) / (high - low) * height;
  const shown = value => plot.log ? 10 ** value : value, at = point => `${x(point[0]).toFixed(1)},${y(point[1]).toFixed(1)}`;
  const svg = make("svg", null, { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": plot.title });
  for (const value of plot.log ? logTicks(low, high) : ticks(low, high, 4)) {
    const place = TOP + y(value);
    svg.append(make("line", null, { x1: LEFT, x2: WIDTH - RIGHT, y1: place, y2: place, stroke: "#e3e6ea" }));
    svg.append(make("text", number(shown(value)), { x: LEFT - 6, y: place + 4, "text-anchor": "end" }));
  }
  for (const step of ticks(first, last, 5).filter(Number.isInteger)) {
    svg.append(make("text", number(step), { x: LEFT + x(step), y: HEIGHT - BOTTOM + 15, "text-anchor": "middle" }));
  }
  svg.append(make("text", plot.unit, { x: 2, y: 11 }), make("text", "step", { x: LEFT + width / 2, y: HEIGHT - 4, "text-anchor": "middle" }));
  // An inner svg clips what reaches beyond the axes.
  const inner = make("svg", null, { x: LEFT, y: TOP, width, height, overflow: "hidden" });
  svg.append(inner);
  const colors = plot.kind === "stack" ? STACK_COLORS : COLORS, color = index => colors[index % colors.length];
  if (plot.kind === "stack") drawStack(inner, plot.points[0], x, y, color);
  if (plot.kind === "band") drawBand(inner, plot.points[0], x, y);
  if (plot.kind !== "stack") lines.forEach((line, index) => drawLine(svg, inner, line, plot.dots, at, color(index)));
  svg.append(make("line", null, { x1: LEFT, x2: WIDTH - RIGHT, y1: TOP + height, y2: TOP + height, stroke: "#9aa3af" }));
  const box = make("div", null, { class: "plot" }, [make("h3", plot.title), svg]);
  box.append(legend(plot, lines, color, shown, svg, inner, x, first, last));
  return box;
}

function drawLine(svg, inner, line, dots, at, color) {
  if (!line.length) return;
  const smooth = dots ? null : smoothed(line), path = points => points.map(at).join(" ");
  const style = { fill: "none", stroke: color, "stroke-linejoin": "round" };
  if (smooth) inner.append(make("polyline", null, { points: path(line), ...style, "stroke-width": 1, "stroke-opacity": 0.3 }));
  inner.append(make("polyline", null, { points: path(smooth || line), ...style, "stroke-width": 1.8 }));
  // On the outer svg, where a point at the edge is not cut in half.
  for (const point of dots || line.length < 3 ? line : [line.at(-1)]) {
    const [cx, cy] = at(point).split(",").map(Number);
    if (dots || line.length < 3) svg.append(make("circle", null, { cx: LEFT + cx, cy: TOP + cy, r: 2.8, fill: color }));
  }
}

function drawBand(inner, points, x, y) {
  const edge = index => points.map(point => `${x(point[0]).toFixed(1)},${y(point[index]).toFixed(1)}`);
  if (points.length > 1) inner.append(make("path", null, { d: `M${edge(2).concat(edge(3).reverse()).join("L")}Z`, fill: COLORS[0], "fill-opacity": 0.13 }));
}

function drawStack(inner, points, x, y, color) {
  // An area needs two points.
  const drawn = points.length > 1 ? points : [-0.5, 0.5].map(by => [points[0][0] + by, ...points[0].slice(1)]);
  let below = drawn.map(() => 0);
  for (let part = 1; part < drawn[0].length; part++) {
    const above = drawn.map((point, index) => below[index] + point[part]);
    const edge = heights => drawn.map((point, index) => `${x(point[0]).toFixed(1)},${y(heights[index]).toFixed(1)}`);
    inner.append(make("path", null, { d: `M${edge(below).concat(edge(above).reverse()).join("L")}Z`, fill: color(part - 1) }));
    below = above;
  }
}

// Label and value of each line: the last value, or that under the pointer.
function legend(plot, lines, color, shown, svg, inner, x, first, last) {
  const outputs = lines.map(() => make("output")), box = make("div", null, { class: "legend" });
  const labels = plot.kind === "band" ? ["mean ± standard deviation"] : plot.labels;
  const place = make("output"), cursor = make("line", null, { y1: 0, y2: HEIGHT, stroke: "#5c6675", "stroke-dasharray": "2 3", visibility: "hidden" });
  inner.append(cursor);
  lines.forEach((_, index) => {
    const mark = make("i");
    mark.style.background = color(index);
    box.append(make("span", null, {}, [mark, labels[index] || "", outputs[index]]));
  });
  if (plot.left_out) box.append(make("span", `and ${plot.left_out} more`));
  box.append(place);
  const show = step => {
    lines.forEach((line, index) => {
      const near = step === null ? line.at(-1) : line.reduce((best, point) => Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best, line[0]);
      outputs[index].textContent = near ? number(shown(near[1])) : "–";
    });
    place.textContent = step === null ? "" : `at step ${number(Math.round(step))}`;
    cursor.setAttribute("visibility", step === null ? "hidden" : "visible");
    if (step !== null) { cursor.setAttribute("x1", x(step)); cursor.setAttribute("x2", x(step)); }
  };
  svg.addEventListener("pointermove", event => {
    const area = svg.getBoundingClientRect(), part = ((event.clientX - area.left) / area.width * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT);
    show(first + Math.min(1, Math.max(0, part)) * (last - first));
  });
  svg.addEventListener("pointerleave", () => show(null));
  show(null);
  return box;
}

const KIND_COLORS = {
  "data wait": "#e0b13a", train: "#2463b4", rollout: "#b7d3f2", "sync stall": "#c03955", commit: "#5b2a86", evaluation: "#8a97a8",
  wake: "#e8c468", checkpoint: "#b9c0c9", generate: "#b7d3f2", pause: "#10151c", snapshot: "#8d4fb0", transfer: "#d9622b",
  apply: "#2e8b57", drain: "#9fd3b4", failed: "#c03955",
};
const LANE = 46, NAME_WIDTH = 90, TIMELINE_WIDTH = 1100;

function drawTimeline(timeline) {
  const height = timeline.lanes.length * LANE + 44, width = TIMELINE_WIDTH - NAME_WIDTH - 10;
  const x = seconds => NAME_WIDTH + seconds / timeline.seconds * width;
  const svg = make("svg", null, { viewBox: `0 0 ${TIMELINE_WIDTH} ${height}`, role: "img", "aria-label": "timeline of the last steps" });
  const kinds = new Set(), bottom = height - 26;
  let labelled = -Infinity;
  for (const [end, step] of timeline.steps) {
    svg.append(make("line", null, { x1: x(end), x2: x(end), y1: 14, y2: bottom, stroke: "#c5cbd3" }));
    if (x(end) - labelled > 64) { svg.append(make("text", `step ${step}`, { x: x(end) - 3, y: 10, "text-anchor": "end" })); labelled = x(end); }
  }
  timeline.lanes.forEach((lane, index) => {
    const top = 18 + index * LANE;
    svg.append(make("text", lane.name, { x: NAME_WIDTH - 8, y: top + 18, "text-anchor": "end" }));
    for (const [begin, end, kind, name, row] of lane.spans) {
      kinds.add(kind);
      const box = { x: x(begin), y: top + (row ? 25 : 0), width: Math.max(0.8, x(end) - x(begin)), height: row ? 11 : 23, fill: KIND_COLORS[kind] };
      svg.append(make("rect", null, box, [make("title", `${name === kind ? kind : `${kind}: ${name}`}, ${number(1000 * (end - begin))} ms`)]));
    }
    for (const [moment, name] of lane.moments) {
      svg.append(make("text", "✕", { x: x(moment), y: top + 16, "text-anchor": "middle", fill: KIND_COLORS.failed }, [make("title", name)]));
    }
  });
  for (const value of ticks(0, timeline.seconds, 8)) svg.append(make("text", number(value), { x: x(value), y: bottom + 12, "text-anchor": "middle" }));
  svg.append(make("text", "seconds", { x: NAME_WIDTH + width / 2, y: height - 2, "text-anchor": "middle" }));
  const marks = Object.keys(KIND_COLORS).filter(kind => kinds.has(kind)).map(kind => {
    const mark = make("i");
    mark.style.background = KIND_COLORS[kind];
    return make("span", null, {}, [mark, kind]);
  });
  return make("div", null, { class: "timeline" }, [svg, make("div", null, { class: "legend" }, marks)]);
}
