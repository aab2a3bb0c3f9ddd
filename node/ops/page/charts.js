// Line charts as inline SVG. Text is set as text; sizes are attributes, so that the page needs no inline style.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 420, HEIGHT = 170, LEFT = 52, RIGHT = 8, TOP = 8, BOTTOM = 22;

function make(name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

// Three significant digits; 12.3k, 4.5M for large figures, 1.2e-5 for small ones.
export function short(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "-";
  const size = Math.abs(value);
  if (size >= 1e9) return `${+(value / 1e9).toPrecision(3)}G`;
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  return size !== 0 && size < 1e-3 ? value.toExponential(1) : String(+value.toPrecision(3));
}

// Round places for about `count` lines from low to high.
function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6; at += step) found.push(+at.toPrecision(12));
  return found;
}

// Draw `series`, [{name, points: [[x, y], ..]}], as a figure; y may be null.
export function lineChart(title, series, axis = "step") {
  const figure = document.createElement("figure");
  const caption = document.createElement("figcaption");
  caption.textContent = title;
  figure.append(caption);
  const drawn = series.map((one) => ({ ...one, points: one.points.filter(([, y]) => Number.isFinite(y)) })).filter((one) => one.points.length);
  if (!drawn.length) return null;
  const all = drawn.flatMap((one) => one.points), xs = all.map(([x]) => x), ys = all.map(([, y]) => y);
  const least = (values) => values.reduce((a, b) => Math.min(a, b)), most = (values) => values.reduce((a, b) => Math.max(a, b));
  let [x0, x1, y0, y1] = [least(xs), most(xs), least(ys), most(ys)];
  if (x0 === x1) [x0, x1] = [x0 - 1, x1 + 1];
  if (y0 === y1) { const room = Math.abs(y0) / 2 || 1; [y0, y1] = [y0 - room, y1 + room]; }
  const x = (value) => LEFT + ((value - x0) / (x1 - x0)) * (WIDTH - LEFT - RIGHT);
  const y = (value) => TOP + ((y1 - value) / (y1 - y0)) * (HEIGHT - TOP - BOTTOM);
  const last = drawn.map((one) => `${one.name || title} ${short(one.points.at(-1)[1])}`).join(", ");
  const label = `${title}: ${axis} ${short(least(xs))} to ${short(most(xs))}, from ${short(least(ys))} to ${short(most(ys))}; newest ${last}`;
  const svg = make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label });
  for (const at of ticks(y0, y1, 4)) {
    svg.append(make("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(at), y2: y(at) }));
    svg.append(make("text", { x: LEFT - 6, y: y(at) + 4, "text-anchor": "end" }, short(at)));
  }
  for (const at of ticks(x0, x1, 5)) {
    if (Number.isInteger(at)) svg.append(make("text", { x: x(at), y: HEIGHT - 6, "text-anchor": "middle" }, short(at)));
  }
  drawn.forEach((one, number) => {
    const path = one.points.map(([a, b], at) => `${at ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");
    const dot = one.points.length === 1 ? `M${x(one.points[0][0]) - 2} ${y(one.points[0][1])}h4` : path;
    svg.append(make("path", { class: `s${number % 6}`, d: dot }));
  });
  const newest = document.createElement("span");
  newest.textContent = drawn.length === 1 ? `  ${short(drawn[0].points.at(-1)[1])}` : "";
  caption.append(newest);
  figure.append(svg);
  if (drawn.length > 1) {
    const key = document.createElement("ul");
    key.className = "key";
    drawn.forEach((one, number) => {
      const item = document.createElement("li"), mark = make("svg", { viewBox: "0 0 16 10", "aria-hidden": "true" });
      mark.append(make("path", { class: `s${number % 6}`, d: "M0 5h16" }));
      item.append(mark, `${one.name} ${short(one.points.at(-1)[1])}`);
      key.append(item);
    });
    figure.append(key);
  }
  return figure;
}
