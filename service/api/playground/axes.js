// What both plots share: scales, round steps, a grid.
import { svg } from "./dom.js";

export const scale = (from, to, start, end) => (value) => start + ((value - from) / (to - from || 1)) * (end - start);

export function steps(low, high, about) {
  const rough = (high - low || 1) / about;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((one) => one >= rough);
  const found = [];
  for (let place = Math.ceil(low / step); place * step <= high + step * 1e-9; place++) found.push(place * step);
  return { values: found, digits: Math.max(0, Math.ceil(-Math.log10(step) + (String(step / power).includes(".") ? 1 : 0) - 1e-9)) };
}

export const path = (points) => points.map(([x, y], place) => `${place ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

export function gridLine(y, left, right, label, kind = "grid") {
  return svg("g", {},
    svg("line", { x1: left, x2: right, y1: y, y2: y, class: kind }),
    svg("text", { x: left - 8, y: y + 4, "text-anchor": "end" }, label));
}
