// The truth logit of each layer against where the training rows lie, drawn layer by layer, as the model went.
import { gridLine, path, scale, steps } from "./axes.js";
import { drawn, fixed, svg } from "./dom.js";

const MARGIN = { left: 52, right: 10, top: 10, bottom: 36 };
const DRAWING_MS = 900;

// classes: {factual, hallucinated, factual_std, hallucinated_std}, reading: {trajectory, running_mean}; lists over layers
export function trajectoryPlot(host, classes, reading) {
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  const layers = reading.trajectory.length;
  let shown = calm ? layers : 0;
  const redraw = drawn(host, (width) => picture(width, classes, reading, shown));
  if (calm) {
    host.dataset.drawn = "true";
    return;
  }
  const began = performance.now();
  const step = (now) => {
    const next = Math.min(layers, Math.ceil(((now - began) / DRAWING_MS) * layers));
    if (next !== shown) {
      shown = next;
      redraw();
    }
    if (shown < layers && host.isConnected) requestAnimationFrame(step);
    else host.dataset.drawn = "true";
  };
  requestAnimationFrame(step);
}

function picture(width, classes, reading, shown) {
  const height = Math.round(Math.min(340, Math.max(230, width * 0.55)));
  const layers = reading.trajectory.length;
  const ends = ["factual", "hallucinated"].flatMap((name) => {
    const std = classes[`${name}_std`];
    return classes[name].flatMap((mean, layer) => [mean - std[layer], mean + std[layer]]);
  });
  const all = [...ends, ...reading.trajectory, ...reading.running_mean];
  const low = Math.min(...all), high = Math.max(...all);
  const x = scale(0, layers - 1, MARGIN.left + 6, width - MARGIN.right - 6);
  const y = scale(low, high, height - MARGIN.bottom, MARGIN.top);
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": summary(classes, reading) });

  const ticks = steps(low, high, 5);
  for (const value of ticks.values) {
    const kind = Math.abs(value) < 1e-12 ? "zero" : "grid";
    drawing.append(gridLine(y(value), MARGIN.left, width - MARGIN.right, fixed(value, ticks.digits), kind));
  }
  const every = Math.max(1, Math.ceil(layers / Math.max(2, Math.floor((width - MARGIN.left) / 44))));
  for (let layer = 0; layer < layers; layer += every) {
    drawing.append(svg("text", { x: x(layer), y: height - MARGIN.bottom + 17, "text-anchor": "middle" }, layer));
  }
  drawing.append(svg("text", { x: (MARGIN.left + width) / 2, y: height - 3, "text-anchor": "middle" }, "layer"));

  for (const name of ["hallucinated", "factual"]) {
    const mean = classes[name], std = classes[`${name}_std`];
    const upper = mean.map((value, layer) => [x(layer), y(value + std[layer])]);
    const lower = mean.map((value, layer) => [x(layer), y(value - std[layer])]).reverse();
    drawing.append(svg("path", { class: `band ${name}`, d: `${path([...upper, ...lower])}Z` }));
  }
  for (const name of ["hallucinated", "factual"]) {
    drawing.append(svg("path", { class: `line ${name}`, d: path(classes[name].map((value, layer) => [x(layer), y(value)])) }));
  }
  const points = reading.trajectory.slice(0, shown).map((value, layer) => [x(layer), y(value)]);
  const running = reading.running_mean.slice(0, shown).map((value, layer) => [x(layer), y(value)]);
  drawing.append(svg("path", { class: "line running", d: path(running) }));
  drawing.append(svg("path", { class: "line own", d: path(points) }));
  points.forEach(([cx, cy], layer) => drawing.append(
    svg("circle", { class: "dot", cx, cy, r: 3 }, svg("title", {}, `layer ${layer}: ${fixed(reading.trajectory[layer], 3)}`))));
  return drawing;
}

function summary(classes, reading) {
  const last = reading.running_mean.at(-1);
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  return `Truth logit over ${reading.trajectory.length} layers. This prompt's depth mean is ${fixed(last, 3)}; that of factual ` +
    `training rows is ${fixed(mean(classes.factual), 3)}, that of hallucinated ones ${fixed(mean(classes.hallucinated), 3)}.`;
}
