// Elements without innerHTML: whatever the model or a user wrote stays text.
const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

export function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

export function show(node, visible) {
  node.hidden = !visible;
}

// A problem in words beside what it is about; nothing: it is over.
export function tell(node, message) {
  node.textContent = message ?? "";
  show(node, Boolean(message));
}

// A risk as a bar from 0 to 1, beside its number; tone: passed, flagged or unjudged.
export function bar(risk, tone) {
  const filled = svg("rect", { class: tone, width: 100 * risk, height: 6, rx: 3 });
  return svg("svg", { class: "bar", viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true", "data-risk": risk },
    svg("rect", { class: "track", width: 100, height: 6, rx: 3 }), filled);
}

export const percent = (share) => `${(share * 100).toFixed(share > 0 && share < 0.0995 ? 1 : 0)} %`;
export const fixed = (value, digits = 2) => value.toFixed(digits).replace(/^-(0\.?0*)$/, "$1");

// Redraws when the width changes; the drawing is in real pixels, so that its letters keep their size.
export function drawn(host, draw) {
  let width = 0;
  const watch = new ResizeObserver(() => {
    if (host.clientWidth > 0 && host.clientWidth !== width) {
      width = host.clientWidth;
      host.replaceChildren(draw(width));
    }
  });
  watch.observe(host);
  return () => {
    if (host.clientWidth > 0) {
      width = host.clientWidth;
      host.replaceChildren(draw(width));
    }
  };
}
