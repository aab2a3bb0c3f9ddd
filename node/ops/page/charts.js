// Line charts by uPlot. uplot.js, uplot.css and uplot.LICENSE are those of its npm package 1.6.32, unchanged: a test
// has their digests. Names are set as text; colours come from page.css, and follow light and dark.

const HEIGHT = 170, COLOURS = 6, STEPS = [1, 2, 5].flatMap((digit) => Array.from({ length: 9 }, (_, power) => digit * 10 ** power)).sort((a, b) => a - b);
const drawn = new Map();  // figure -> its plot
const colour = (name) => () => getComputedStyle(document.documentElement).getPropertyValue(name);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach((plot) => plot.redraw()));
const sizes = new ResizeObserver((entries) => entries.forEach(({ target }) => {
  if (target.clientWidth) drawn.get(target.parentNode)?.setSize({ width: target.clientWidth, height: HEIGHT });
}));

// Three significant digits; 12.3k, 4.5M for large figures, 1.2e-5 for small ones.
export function short(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "-";
  const size = Math.abs(value);
  if (size >= 1e9) return `${+(value / 1e9).toPrecision(3)}G`;
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  return size !== 0 && size < 1e-3 ? value.toExponential(1) : String(+value.toPrecision(3));
}

// Show `charts`, [{title, series: [{name, points: [[x, y], ..]}], axis}], in a place; y may be null. One that has the
// same series as before gets new points.
export function showCharts(place, charts) {
  const kept = charts.map(({ title, series, axis = "step" }) => {
    const lines = series.filter(({ points }) => points.some(([, y]) => Number.isFinite(y)));
    if (!lines.length) return null;
    const xs = [...new Set(lines.flatMap(({ points }) => points.map(([x]) => x)))].sort((a, b) => a - b);
    const data = [xs, ...lines.map(({ points }) => { const at = new Map(points); return xs.map((x) => at.get(x) ?? null); })];
    const key = JSON.stringify([title, axis, ...lines.map(({ name }) => name)]);
    let figure = [...place.children].find((child) => child.dataset.key === key);
    if (figure) drawn.get(figure).setData(data);
    else figure = plotted(place, title, lines, axis, data, key);
    const newest = lines.map(({ name }, at) => `${name || title} ${short(data[at + 1].findLast(Number.isFinite))}`).join(", ");
    const ys = data.slice(1).flat().filter(Number.isFinite), bound = (pick) => short(ys.reduce((a, b) => pick(a, b)));
    figure.lastChild.setAttribute("aria-label", `${title}: ${axis} ${short(xs[0])} to ${short(xs.at(-1))}, from ${bound(Math.min)} to ${bound(Math.max)}; newest ${newest}`);
    return figure;
  }).filter(Boolean);
  for (const figure of [...place.children]) if (!kept.includes(figure)) { drawn.get(figure)?.destroy(); drawn.delete(figure); figure.remove(); }
  kept.forEach((figure, at) => { if (place.children[at] !== figure) place.insertBefore(figure, place.children[at] ?? null); });
}

function plotted(place, title, lines, axis, data, key) {
  const figure = document.createElement("figure"), caption = document.createElement("figcaption"), room = document.createElement("div");
  caption.textContent = title;
  figure.dataset.key = key;
  room.setAttribute("role", "img");
  figure.append(caption, room);
  place.append(figure);
  const value = (plot, y) => short(y), side = { stroke: colour("--dim"), font: "11px system-ui, sans-serif", ticks: { show: false }, values: (plot, splits) => splits.map(short) };
  const newest = (plot) => { if (!(plot.cursor.left >= 0)) plot.setLegend({ idx: plot.data[0].length - 1 }, false); };
  drawn.set(figure, new uPlot({
    width: room.clientWidth || 300, height: HEIGHT, scales: { x: { time: false } },
    axes: [{ ...side, grid: { show: false }, incrs: STEPS, size: 28 }, { ...side, grid: { stroke: colour("--line"), width: 1 }, size: 52 }],
    series: [{ label: axis, value }, ...lines.map(({ name }, at) => ({ label: name || "value", value, stroke: colour(`--c${at % COLOURS}`), width: 1.6, spanGaps: true, points: { size: 4 } }))],
    legend: { markers: { width: 0, fill: (plot, at) => `var(--c${(at - 1) % COLOURS})` } },
    cursor: { y: false, drag: { x: false, y: false } }, hooks: { setLegend: [newest], setData: [newest], ready: [newest] },
  }, data, room));
  sizes.observe(room);
  return figure;
}
